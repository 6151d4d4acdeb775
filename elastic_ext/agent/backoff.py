"""Backoff: how long to wait before the next try, so that many who have lost the same thing do not come back at once.

Each wait is anything from nothing to a bound (full jitter), and the bound doubles with each try: pure but for the
random numbers, which are given.
"""

from __future__ import annotations

import random

__all__ = ["Backoff"]

_MOST_DOUBLINGS = 30


class Backoff:
    """The waits of one who tries again and again."""

    def __init__(self, chance: random.Random, *, first_seconds: float, most_seconds: float) -> None:
        self._chance = chance
        self._first_seconds = first_seconds
        self._most_seconds = most_seconds
        self.num_tries = 0
        """Since it last went well."""

    def next_seconds(self) -> float:
        """How long to wait now."""
        bound = min(self._first_seconds * 2.0 ** min(self.num_tries, _MOST_DOUBLINGS), self._most_seconds)
        self.num_tries += 1
        return self._chance.uniform(0.0, bound)

    def forget(self) -> None:
        """It went well."""
        self.num_tries = 0
