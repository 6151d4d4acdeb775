"""Remarks: what is said once about a loop, where it may be meant, and mostly is a mistake."""

from __future__ import annotations

import logging
from collections.abc import Callable

__all__ = ["Remarks"]

_logger = logging.getLogger(__name__)


class Remarks:
    """Those of one training: each is said once, by the first rank."""

    def __init__(self) -> None:
        self.are_logged = True
        """Whether this rank is the one that says them."""
        self.on_said: Callable[[str], None] | None = None
        """Called with what was said, by the rank that says it."""
        self._said: set[str] = set()

    def say(self, kind: str, text: str) -> None:
        """Log ``text``, unless something of its kind was said before."""
        if kind in self._said:
            return
        self._said.add(kind)
        if self.are_logged:
            _logger.warning("%s (this is said once)", text)
            if self.on_said is not None:
                self.on_said(text)
