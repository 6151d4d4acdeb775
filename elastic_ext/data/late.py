"""Late: a batch that did not come in the time that a loader has for it."""

from __future__ import annotations

__all__ = ["Late"]


class Late(RuntimeError):
    """It is still being made, and can be taken later."""
