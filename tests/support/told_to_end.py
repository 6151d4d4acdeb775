"""A training without steps and checkpoints, which notes that it was told to end."""

from __future__ import annotations

import threading

__all__ = ["ToldToEnd"]


class ToldToEnd:
    """What a thread that listens for signals asks; writes nothing."""

    def __init__(self, *, can_write: bool = False, has_some: bool = False) -> None:
        self.asked = threading.Event()
        """Set when training was told to end."""
        self._can_write, self._has_some = can_write, has_some

    def request_leave(self) -> None:
        self.asked.set()

    def can_write(self) -> bool:
        return self._can_write

    def has_some(self) -> bool:
        return self._has_some

    def has_nothing(self) -> bool:
        return False

    def write_newest(self, seconds: float) -> str:
        return "nothing is written"

    def write_with_others(self) -> None: ...
