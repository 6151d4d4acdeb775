"""Questions that may never be answered: to a file system whose server is gone, to a store whose process has stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["NoAnswer", "answer_within"]

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
