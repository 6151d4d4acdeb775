"""What a user may give as one thing or as several."""

from __future__ import annotations

from typing import Any

__all__ = ["as_list"]


def as_list(given: Any) -> list[Any]:
    """None, one thing, or a list or tuple of some, as a list."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]
