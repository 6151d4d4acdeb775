"""Ahead: the batches of one epoch that are asked for before a loop needs them, cut anew when steps are cut otherwise.

Which samples come next is the cursor's; who makes batches of them is behind ``Maker``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from elastic_ext.accumulate import BatchPlan

from .cursor import Chunk, Cursor, chunks
from .order import Order

__all__ = ["Ahead", "Maker"]


class Maker(Protocol):
    """Who makes batches, some of them before they are taken."""

    @property
    def num_ahead(self) -> int:
        """How many it should be asked for before the first of them is taken."""

    def submit(self, indices: list[Any]) -> int:
        """Have a batch made of these; gives its number."""

    def take(self, number: int) -> Any:
        """The batch of that number, once it is made."""

    def forget(self, number: int) -> None:
        """Nobody will take it."""


class Ahead:
    """The rest of an epoch on one rank: an iterator over batches, of sizes that may change between any two."""

    def __init__(self, order: Order, cursor: Cursor, maker: Maker, plan: BatchPlan, rank: int) -> None:
        self.order = order
        self.cursor = cursor
        self._maker = maker
        self._plan, self._rank = plan, rank
        self._asked: deque[tuple[Chunk, int]] = deque()  # each with the number of its batch
        self._to_come: Iterator[Chunk] = iter(())
        self._is_in_step = False
        self._cut()

    def __next__(self) -> Any:
        self._ask()
        if not self._asked:
            raise StopIteration
        chunk, number = self._asked.popleft()
        self.cursor.hand_out(chunk)  # also where it cannot be made: after a rollback it comes again
        self._is_in_step = not chunk.ends_step
        batch = self._maker.take(number)
        self._ask()
        return batch

    def plan(self, plan: BatchPlan, rank: int) -> None:
        """Cut steps like this from what is consumed on."""
        if (plan, rank) != (self._plan, self._rank):
            self._plan, self._rank = plan, rank
            self._cut()

    def commit(self) -> None:
        """What was handed out is consumed; a step that was cut short there is followed by one that begins there."""
        self.cursor.commit()
        if self._is_in_step:
            self._cut()

    def rollback(self) -> None:
        """What was handed out and is not consumed comes again."""
        if self.cursor.rollback():
            self._cut()

    def go_to(self, order: Order, cursor: Cursor) -> None:
        """Go on elsewhere."""
        if order.state_dict() != self.order.state_dict():
            self.close()
        self.order, self.cursor = order, cursor
        self._cut()

    def close(self) -> None:
        """Nobody takes what was asked for."""
        while self._asked:
            self._maker.forget(self._asked.popleft()[1])

    def _cut(self) -> None:
        """Begin at what is consumed; what was asked for and still comes so is not asked for again."""
        self._is_in_step = False
        kept = {(chunk.start, chunk.stop): number for chunk, number in self._asked}
        self._asked.clear()
        cursor = self.cursor
        self._to_come = chunks(self._plan, self._rank, position=cursor.passed, num_samples=cursor.num_samples)
        self._ask(kept)
        for number in kept.values():
            self._maker.forget(number)

    def _ask(self, kept: dict[tuple[int, int], int] | None = None) -> None:
        """Ask for batches until as many are under way as should be, and one at least."""
        most = max(self._maker.num_ahead, 1)
        while len(self._asked) < most:
            chunk = next(self._to_come, None)
            if chunk is None:
                return
            number = kept.pop((chunk.start, chunk.stop), None) if kept else None
            if number is None:
                number = self._maker.submit(self.order.indices(chunk.start, chunk.stop))
            self._asked.append((chunk, number))
