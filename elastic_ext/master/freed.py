"""Memory that was freed, given back to the system: where thousands of connections come and go, C keeps it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

__all__ = ["Freed"]

_EVERY_SECONDS = 10.0
_Trim = Callable[[int], int]


class Freed:
    """What one process has freed. ``give_back`` is called as often as one likes, and takes a few milliseconds."""

    def __init__(self, *, every_seconds: float = _EVERY_SECONDS) -> None:
        self._every_seconds = every_seconds
        self._due_at = 0.0
        self._trim = _trim_of_libc()

    def give_back(self, now: float) -> None:
        """Do so, where the last time is some seconds ago; nothing where the C library knows no way."""
        if self._trim is not None and now >= self._due_at:
            self._due_at = now + self._every_seconds
            self._trim(0)


def _trim_of_libc() -> _Trim | None:
    """glibc's malloc_trim; None with another C library."""
    try:
        found = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = [ctypes.c_size_t], ctypes.c_int
    return found
