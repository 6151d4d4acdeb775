"""Remarks: what is said once about a loop, since it may be meant and mostly is a mistake; and when it is looked for."""

from __future__ import annotations

import logging
from collections.abc import Callable

__all__ = ["Remarks", "is_looked_at", "next_look"]

_logger = logging.getLogger(__name__)

_MOST_BETWEEN_LOOKS = 1024
"""Steps. A look takes a few hundred microseconds: of a training of many steps, less than one in each."""


def is_looked_at(number: int) -> bool:
    """Whether the step of that number is looked at: the first eight, then four in each doubling of their number, until
    the most that may be lie between two."""
    return number % _between_looks(number) == 0


def next_look(number: int) -> int:
    """The first step after that of this number that is looked at."""
    following = number + 1
    return following + -following % _between_looks(following)


def _between_looks(number: int) -> int:
    """How many steps lie between two looks about that step."""
    return min(1 << max(number.bit_length() - 3, 0), _MOST_BETWEEN_LOOKS)


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
