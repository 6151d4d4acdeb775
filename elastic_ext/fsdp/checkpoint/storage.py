"""Storage: operations on shared storage, each with a time limit.

Storage that does not answer would hold up a rank for ever, and the others with it. What waits for it cannot be
interrupted: it goes on in a thread of its own, and until that has ended nothing else is begun, so that it can do no
harm to what comes later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from elastic_ext.errors import CheckpointError
from elastic_ext.ranks.deadlines import Call, NoAnswer
from elastic_ext.ranks.group import Ranks

from .coordination import gather_or_raise

__all__ = ["THREAD_NAME", "Storage"]

_Result = TypeVar("_Result")
THREAD_NAME = "elastic_ext checkpoint"


class Storage:
    """Runs operations on shared storage within a time limit, on this rank or on all ranks together."""

    def __init__(self, ranks: Ranks, *, timeout_seconds: float) -> None:
        self._ranks = ranks
        self.seconds = timeout_seconds
        """How long an operation on the storage may take, in seconds."""
        self._deadline = time.monotonic() + timeout_seconds
        self._late: Call[Any] | None = None

    def together(self, act: Callable[[], object], doing: str, *, is_patient: bool = True) -> list[Any]:
        """Run ``act`` on every rank as ``gather_or_raise`` does, with one time limit; gives its results by rank.

        With ``is_patient`` all of ``act`` is one operation on the storage; otherwise it calls ``within`` for each.
        """
        self._deadline = time.monotonic() + self.seconds
        return gather_or_raise(self._ranks, (lambda: self.within(act, doing)) if is_patient else act, doing)

    def within(self, act: Callable[[], _Result], doing: str) -> _Result:
        """Run ``act`` on a thread and give its result; CheckpointError where no time is left before it ends."""
        self.refuse_if(False, doing)
        call = Call(act, name=THREAD_NAME)
        self._late = call  # before it is made: an interrupt may leave it behind as well
        try:
            return call.within(max(self._deadline - time.monotonic(), 0.0))
        except NoAnswer:
            raise CheckpointError(
                f"the storage took longer than {self.seconds:g} seconds while {doing}; look after the storage, or give "
                "it more time: storage_timeout_seconds, or of a trainer timeout_seconds, half of which the storage may "
                "take"
            ) from None

    def refuse_if(self, is_late: bool, doing: str) -> None:
        """CheckpointError where an earlier operation has not ended yet, or the caller knows of one that ``is_late``."""
        if is_late or (self._late is not None and self._late.is_alive()):
            raise CheckpointError(
                f"the storage has not answered yet what an earlier operation asked for, and until it does {doing} is "
                "not possible; look after the storage"
            )

    def restart_clock(self) -> None:
        """Give the operations that follow the full time limit again."""
        self._deadline = time.monotonic() + self.seconds
