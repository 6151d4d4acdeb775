"""Remarks: what is said once about a loop, since it may be meant and mostly is a mistake; and when it is looked for."""

from __future__ import annotations

import logging
from collections.abc import Callable

__all__ = ["BETWEEN_LOOKS", "NUM_FIRST_LOOKS", "Remarks", "is_looked_at", "next_look"]

_logger = logging.getLogger(__name__)

NUM_FIRST_LOOKS = 4
"""So many first steps are looked at, and one of many after them."""
BETWEEN_LOOKS = 255
"""A step's number has none of these bits where a further look is due. A look takes a few hundred microseconds: spread
over so many steps, one or two of each."""


def is_looked_at(number: int) -> bool:
    """Whether the step of that number is looked at."""
    return number < NUM_FIRST_LOOKS or not number & BETWEEN_LOOKS


def next_look(number: int) -> int:
    """The first step after that of this number that is looked at."""
    following = number + 1
    return following if following < NUM_FIRST_LOOKS else (following + BETWEEN_LOOKS) & ~BETWEEN_LOOKS


class Remarks:
    """Warnings about a training loop, each said once, by the first rank."""

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
