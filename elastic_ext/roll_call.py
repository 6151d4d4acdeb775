"""RollCall: do all ranks come to the same places with the same counts?

Control words show ranks that have come apart in the middle of an epoch. Here are the places where no further word
follows: the end of an epoch and of training, where ranks meet through the store, with a deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .control_word import AgreedWord
from .errors import PeerLostError, RanksDisagreeError
from .peers import Counts, Trouble

if TYPE_CHECKING:
    from .ranks import Ranks

__all__ = ["RollCall"]

_POLL_SECONDS = 0.02


class RollCall:
    """One rank's counts, and the comparison with its peers'."""

    def __init__(self, ranks: Ranks, *, timeout_seconds: float) -> None:
        self.num_boundaries = 0
        self.awaited_boundary = 0
        """The boundary at which the agreement that this rank may be waiting for was begun."""
        self._step = 0
        self._num_backwards = 0
        self._ranks = ranks
        self._timeout_seconds = timeout_seconds
        self._num_ends = 0
        ranks.counts = lambda: self.counts
        ranks.look_around = self._raise_if_a_peer_ended_early

    @property
    def counts(self) -> Counts:
        """How far this rank has come."""
        return Counts(boundary=self.num_boundaries, step=self._step, backwards=self._num_backwards)

    def begin(self, step: int) -> None:
        """Begin with ``step`` steps behind."""
        self._step = step

    def pass_boundary(self, step: int, num_backwards: int) -> int:
        """Count one more boundary; gives how many were passed."""
        self._step, self._num_backwards = step, num_backwards
        self.num_boundaries += 1
        return self.num_boundaries

    def end(self) -> None:
        """Return once every rank has come to this end with the same counts; RanksDisagreeError names who did not."""
        self._num_ends += 1
        board = self._ranks.board
        if board is None:
            return
        doing = "waiting for the others at the end"
        pause = threading.Event()
        deadline = time.monotonic() + self._timeout_seconds
        try:
            board.post_end(self._num_ends, self.counts)
            while len(ends := board.ends(self._num_ends)) < self._ranks.world_size:
                self._ranks.raise_if_peer_failed(doing)
                if time.monotonic() > deadline:
                    missing = ", ".join(str(peer) for peer in self._ranks.names if peer.rank not in ends)
                    waited = f"within {self._timeout_seconds:g} s"
                    raise self._come_apart(f"{missing} did not come to the end {waited}; here are {self.counts}")
                pause.wait(_POLL_SECONDS)
        except RuntimeError as error:  # what torch's stores raise when the process that holds them is gone
            raise PeerLostError(f"the store was lost while {doing}: {error}") from error
        if len({(counts.boundary, counts.step, counts.backwards) for counts in ends.values()}) > 1:
            raise self._come_apart(f"ranks came to the same end with different counts: {_each(ends)}")

    def apart(self, agreed: AgreedWord) -> RanksDisagreeError:
        """The error for words that differ in what should be the same."""
        counts = {
            rank: Counts(boundary=word.boundary, step=word.step, backwards=word.backwards)
            for rank, word in enumerate(agreed.words)
        }
        return self._come_apart(f"ranks differ in {', '.join(agreed.differing)}: {_each(counts)}")

    def _raise_if_a_peer_ended_early(self) -> None:
        board = self._ranks.board
        if board is None:
            return
        ends = board.ends(self._num_ends + 1)
        if any(counts.boundary < self.awaited_boundary for counts in ends.values()):
            raise self._come_apart(
                f"ranks did not take as many steps: {_each({**ends, self._ranks.rank: self.counts})}"
            )

    def _come_apart(self, text: str) -> RanksDisagreeError:
        if self._ranks.board is not None:
            self._ranks.board.post_trouble(Trouble(kind="apart", counts=self.counts, text=text))
        return RanksDisagreeError(text)


def _each(counts: Mapping[int, Counts]) -> str:
    return "; ".join(f"rank {rank}: {each}" for rank, each in sorted(counts.items()))
