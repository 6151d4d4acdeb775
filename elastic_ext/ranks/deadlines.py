"""Questions with a limit of time, and how long to wait before the next try."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Backoff", "NoAnswer", "answer_within"]


# --- questions that may never be answered ----------------------------------------------------------------------------
# Questions that may never be answered: to a file system whose server is gone, to a store whose process has stopped.

_Answer = TypeVar("_Answer")


class NoAnswer(Exception):
    """It took too long."""


def answer_within(seconds: float, ask: Callable[[], _Answer]) -> _Answer:
    """What ``ask`` gives or raises; NoAnswer if it takes longer: then its thread stays, as nothing can end it."""
    answers: list[_Answer] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(ask())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="elastic_ext-asks", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise NoAnswer(f"no answer within {seconds:g} s")
    return answers[0]


# --- how long to wait before the next try, so that many who have lost the same thing do not come back at once --------
# Each wait is anything from nothing to a bound (full jitter), and the bound doubles with each try: pure but for the
# random numbers, which are given.

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
