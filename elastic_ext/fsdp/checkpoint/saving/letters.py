"""Letters: what the threads of one save tell each other from rank to rank; collectives are the training's alone."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from typing import Any

from elastic_ext.errors import CheckpointError
from elastic_ext.ranks.board import Board, BoardGone

__all__ = ["Letters", "ToldOfFailure"]

_FAILED = "failed"
_WANTED = "wanted"


class ToldOfFailure(CheckpointError):
    """A save fails here because another rank has failed, which says why."""


class Letters:
    """Messages that the threads of one save exchange between ranks on a board; all ranks give the same ``name``."""

    def __init__(self, board: Board, *, name: str, seconds: float) -> None:
        self._board = board.below(f"save/{name}")
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._cancelled: str | None = None
        self._is_hurried = False

    def post(self, what: str, value: object = True) -> None:
        """Send ``value`` to the other ranks under the name ``what``; each name once."""
        self._board.tell(what, value)

    def ask_for(self) -> None:
        """Ask all ranks to write the state that they have only staged so far."""
        self._board.post(_WANTED, 1)

    def is_asked_for(self) -> bool:
        """Whether some rank has called ``ask_for``."""
        return self._board.has(_WANTED)

    def fail(self, why: str) -> None:
        """Tell all ranks that this one has failed, so that whoever waits, or comes to wait, gives up."""
        self._board.post(_FAILED, [self._board.place, why])

    def wait(self, what: str, ranks: Sequence[int]) -> list[Any]:
        """Wait for the values that ``ranks`` post under ``what``; CheckpointError if one fails or is late."""
        names = self._board.of_peers(what, ranks)
        began = time.monotonic()

        def is_late() -> bool:
            self.raise_if_failed()
            now = time.monotonic()
            return now > self._deadline or (self._is_hurried and now > began + self._seconds)

        is_complete = self._board.wait(names, seconds=math.inf, stop=is_late)
        if not is_complete and (late := sorted(set(ranks) - self._board.values_of(what).keys())):
            raise CheckpointError(
                f"rank {late[0]} has not said within {self._seconds:g} seconds that it has {what} its part; it died, "
                "or its storage does not answer"
            )
        return [self._board.read(name) for name in names]

    def raise_if_failed(self) -> None:
        """ToldOfFailure, in that rank's words, where another rank has failed; CheckpointError after ``cancel``."""
        if self._cancelled is not None:
            raise CheckpointError(self._cancelled)
        if (failure := self._board.read(_FAILED)) is not None:
            rank, why = failure
            raise ToldOfFailure(f"rank {rank}: {why}")

    def restart_clock(self) -> None:
        """Give waiting from now on all of its time again."""
        self._deadline = time.monotonic() + self._seconds

    def hurry(self, seconds: float) -> None:
        """Have this rank wait for at most ``seconds`` from now on, each time that it waits."""
        self._seconds = min(self._seconds, seconds)
        self._is_hurried = True

    def cancel(self, why: str) -> None:
        """Have each wait of this rank fail from now on, for the reason ``why``."""
        self._cancelled = why

    def burn(self) -> None:
        """Delete this rank's messages from the store, when nobody reads them any more.

        A store that is gone has none. Whatever the ranks exchange next raises for that, as a lost peer.
        """
        with contextlib.suppress(BoardGone):
            self._board.clear()
