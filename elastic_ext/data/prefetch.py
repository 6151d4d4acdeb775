"""Batches that are asked for before a loop needs them, and cut anew when the sizes of steps change."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map  # as torch's documentation has it

from .batch_plan import BatchPlan
from .order import Chunk, Cursor, Order, Ranges, RemainingOrder, chunks, num_chunks, position_and_completed
from .seeding import SeededOrder
from .workers.worker import in_short

__all__ = ["BatchNotReady", "IndexedLoop", "Maker", "can_be_recut", "cut", "join"]


# --- batches that torch's default_collate has made, cut and joined as if they had been made so -----------------------


def can_be_recut(collate_fn: Callable[[Any], Any]) -> bool:
    """Whether batches can be cut and joined: default_collate makes them, with torch's own functions for all types."""
    known = default_collate.__module__
    return collate_fn is default_collate and all(
        getattr(each, "__module__", None) == known for each in default_collate_fn_map.values()
    )


def cut(batch: Any, start: int, stop: int, num_samples: int) -> Any:
    """The samples from ``start`` to before ``stop`` of a batch with ``num_samples``; ValueError if it cannot be cut."""
    if isinstance(batch, torch.Tensor):
        if batch.dim() == 0 or batch.shape[0] != num_samples:
            raise ValueError(f"a tensor of shape {list(batch.shape)} is no batch of {num_samples} samples")
        return batch[start:stop].clone()  # the rest is handed out later, whatever becomes of this
    if _is_of_texts(batch):
        if len(batch) != num_samples:
            raise ValueError(f"{len(batch)} texts are no batch of {num_samples} samples")
        return batch[start:stop]
    return _like(batch, [cut(part, start, stop, num_samples) for part in _parts(batch)])


def join(batches: Sequence[Any]) -> Any:
    """One batch of the samples of all these batches; ValueError where they are not alike."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if any(type(batch) is not type(first) for batch in batches):
        raise ValueError("batches of unlike types cannot be joined")
    if isinstance(first, torch.Tensor):
        if len({(batch.dtype, batch.shape[1:]) for batch in batches}) > 1:
            raise ValueError("batches of unlike tensors cannot be joined")
        return torch.cat(list(batches))
    if _is_of_texts(first):
        return type(first)(text for batch in batches for text in batch)
    columns = [_parts(batch) for batch in batches]
    if len({len(parts) for parts in columns}) > 1:
        raise ValueError("batches of unlike lengths cannot be joined")
    if isinstance(first, Mapping) and any(list(batch) != list(first) for batch in batches):
        raise ValueError("batches of unlike keys cannot be joined")
    return _like(first, [join(column) for column in zip(*columns, strict=True)])


def _is_of_texts(batch: Any) -> bool:
    """Whether a batch is a sequence of texts, one for each sample, which is cut as it is."""
    return isinstance(batch, (list, tuple)) and bool(batch) and all(isinstance(part, (str, bytes)) for part in batch)


def _parts(batch: Any) -> list[Any]:
    """The parts that a sample consists of, each as a batch; ValueError where a batch of this type cannot be cut."""
    if isinstance(batch, Mapping) and type(batch) is dict:
        return list(batch.values())
    if type(batch) in (list, tuple) or (isinstance(batch, tuple) and hasattr(batch, "_fields")):
        return list(batch)
    raise ValueError(f"a {type(batch).__name__} cannot be cut")


def _like(batch: Any, parts: list[Any]) -> Any:
    if isinstance(batch, Mapping):
        return dict(zip(batch, parts, strict=True))
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)


# --- a batch that did not come in the time that a loader has for it --------------------------------------------------


class BatchNotReady(RuntimeError):
    """A prefetched batch is still being made, and can be taken later."""


# --- the batches that are asked for before a loop needs them ---------------------------------------------------------
# The cursor says which samples come next; a ``Maker`` makes batches of them.

_NOT_TAKEN: Any = object()


class Maker(Protocol):
    """What submits batches to be made, some of them ahead, and gives them: a ``BatchProducer`` to an IndexedLoop."""

    @property
    def num_ahead(self) -> int:
        """How many batches to ask for before the first of them is taken."""

    def submit(self, indices: list[Any], *, batch_index: int) -> int:
        """Have the batch ``batch_index`` of the loop, counted from 0, made of these indices; gives its number."""

    def take(self, number: int) -> Any:
        """The batch of that number, once it is made."""

    def first_made(self, numbers: Sequence[int]) -> int:
        """Which of these numbers' batches has come first, once one has; none of them was taken."""

    def forget(self, number: int) -> None:
        """Drop the batch of this number: nobody will take it."""


@dataclass(slots=True, eq=False)
class _PrefetchedBatch:
    """A batch that a Maker was asked for and may still be making: the samples from ``start`` to before ``stop``."""

    start: int
    stop: int
    number: int
    num_uses: int = 0
    """How many of the batches that are still to be handed out are cut from this one."""
    batch: Any = _NOT_TAKEN

    @property
    def num_samples(self) -> int:
        return self.stop - self.start


@dataclass(slots=True, eq=False)
class _BatchToHandOut:
    """A batch that is to be handed out, and the prefetched batches from which it is cut, in order."""

    chunk: Chunk
    prefetched: tuple[_PrefetchedBatch, ...]


class IndexedLoop:
    """One rank's loop over the rest of an epoch by index: an iterator over prefetched batches, whose sizes may change.

    With ``can_recut`` batches are as default_collate makes them: when sizes change, those that are asked for already
    are cut and joined. Else their samples are asked for again.

    ``completed`` are ranges after ``position`` whose samples are consumed already. With ``as_they_come``, which is for
    a rank that has all samples of its steps, whichever batch is made first is handed out first.
    """

    def __init__(
        self,
        order: Order,
        position: int,
        maker: Maker,
        plan: BatchPlan,
        rank: int,
        *,
        can_recut: bool = False,
        completed: Ranges = (),
        as_they_come: bool = False,
    ) -> None:
        self._begin_at(order, position, completed)
        self._as_they_come = as_they_come
        self.carried: tuple[int, ...] | None = None
        self._handed: deque[Chunk] = deque()  # handed out, and not consumed
        self._num_committed = 0
        self._maker = maker
        self._plan, self._rank = plan, rank
        self._can_recut = can_recut
        self._asked: deque[_BatchToHandOut] = deque()
        self._to_come: Iterator[Chunk] = iter(())
        self.has_ended = False
        self._cut()

    def __len__(self) -> int:
        """How many batches the loop hands out in all: those that are consumed, and the rest as they are cut now."""
        left = self._rest.num_samples - self.cursor.committed  # a step begins there
        num_left = num_chunks(self._plan, self._rank, left, self.carried)
        return self._num_committed + num_left - sum(chunk not in self._handed for chunk in self._early)

    def __next__(self) -> Any:
        self._ask()
        if not self._asked:
            if (
                not self.has_ended
                and not self._plan.is_even
                and self._plan.next_step(self.cursor.remaining) is not None
            ):
                self.cursor.hand_out_rest()
            raise StopIteration
        asked = self._first_made() if self._as_they_come else self._asked[0]
        chunk = asked.chunk
        try:
            batch = self._batch_of(asked)
        except (BatchNotReady, KeyboardInterrupt):  # the next call may have it
            raise
        except BaseException as error:
            self._hand_out(asked)  # what cannot be made is passed; after a rollback it comes again
            if not isinstance(error, StopIteration):
                raise
            samples = in_short(self._rest.indices(chunk.start, chunk.stop))  # else the epoch would seem to be over
            raise RuntimeError(
                f"making a batch of {samples} raised StopIteration, as if the epoch were over; have the dataset and "
                "the collate_fn raise another exception"
            ) from error
        self._hand_out(asked)
        if self._maker.num_ahead > 0:
            self._ask()
        return batch

    @property
    def remaining(self) -> int | None:
        """Samples of the epoch that are not consumed; None where the epoch never ends."""
        left = self.cursor.remaining
        return None if left is None else left - sum(chunk.num_samples for chunk in self._early)

    @property
    def standing(self) -> tuple[int, Ranges]:
        """The position in ``order`` before which all is consumed, and the ranges after it that are consumed."""
        if self._rest is self.order and not self._early:
            return self.cursor.committed, ()
        early = [(chunk.start, chunk.stop) for chunk in self._early]
        starts = [self.cursor.committed, *[stop for _, stop in early]]
        stops = [*[start for start, _ in early], self._rest.num_samples]
        left = tuple((start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop)
        if isinstance(self._rest, RemainingOrder):
            left = tuple(place for each in left for place in self._rest.places(*each))
        return position_and_completed(left, self.order.num_samples)

    @property
    def num_handed(self) -> int:
        """How many batches were handed out that are not consumed."""
        return len(self._handed)

    def plan(self, plan: BatchPlan, rank: int) -> None:
        """Cut steps by ``plan`` from now on, beginning after the last consumed sample."""
        if (plan, rank) != (self._plan, self._rank):
            self._plan, self._rank = plan, rank
            self._cut()

    def keep_order(self) -> None:
        """Hand out later batches in order, whichever is made first."""
        if self._as_they_come:
            self._as_they_come = False
            self._cut()

    def commit(self, num_batches: int | None = None) -> None:
        """Take the first ``num_batches`` that were handed out, or all, as consumed; the others begin the next step.

        A step that was cut short there is followed by one that begins there.
        """
        handed = self._handed
        num_consumed = len(handed) if num_batches is None else min(num_batches, len(handed))
        last = handed[num_consumed - 1] if num_consumed else None
        self._num_committed += num_consumed
        if num_consumed == len(handed):
            handed.clear()
            self.cursor.commit()
        elif last is not None:
            for _ in range(num_consumed):
                handed.popleft()
            self.cursor.commit(last.micro_step_stop)
        if last is not None:
            self.carried = None
            if not last.ends_step:
                self._cut()

    def rollback(self) -> None:
        """Hand out again the batches that are not consumed."""
        self._handed.clear()
        self.carried = None
        if self.cursor.rollback():
            self._cut()

    def go_to(self, order: Order, position: int, completed: Ranges = ()) -> None:
        """Have the loop go on from another position, in this order."""
        # Batches that are asked for can be used only where their positions mean the same samples in the new order, with
        # the same random numbers.
        keeps_places = self._rest is self.order and not self._early and not completed
        keeps_seeds = not isinstance(order, SeededOrder) or order.has_seeds_of(self.order)
        if not (keeps_places and keeps_seeds) or order.state_dict() != self.order.state_dict():
            self.close()
        self._num_committed += len(self._handed)
        self._handed.clear()
        self._begin_at(order, position, completed)
        self._cut()

    def close(self) -> None:
        """Forget all batches that are asked for and were not taken."""
        while self._asked:
            self._release(self._asked.popleft())

    def end(self) -> None:
        """End the loop: no more batches are asked for."""
        self.close()
        self.has_ended = True

    def _begin_at(self, order: Order, position: int, completed: Ranges) -> None:
        self.order = order
        self._rest = RemainingOrder(order, completed) if completed else order
        self.cursor = Cursor(self._rest.num_samples, position=position)  # positions in self._rest
        self._early: list[Chunk] = []  # handed out while a chunk before them was not yet; in order of position

    def _cut(self) -> None:
        """Cut the next step after what is consumed; batches on their way are used again where they fit."""
        if self._early:
            self.close()
            self._begin_at(self.order, *self.standing)
        before = list(self._asked)
        self._asked.clear()
        cursor = self.cursor
        self.carried = self._plan.carried_over(self._handed[0].sizes, cursor.remaining) if self._handed else None
        to_come = chunks(
            self._plan, self._rank, position=cursor.committed, num_samples=cursor.num_samples, carried=self.carried
        )
        self._to_come = islice(to_come, len(self._handed), None)
        self._ask(list(dict.fromkeys(prefetched for asked in before for prefetched in asked.prefetched)))
        for asked in before:
            self._release(asked)

    def _ask(self, on_the_way: Sequence[_PrefetchedBatch] = ()) -> None:
        """Ask for batches until ``num_ahead`` are asked for, one at least, with all samples that are ``on_the_way``.

        These are in batches that were asked for before steps were cut anew.
        """
        if self.has_ended:
            return
        most = max(self._maker.num_ahead, 1)
        end = max((prefetched.stop for prefetched in on_the_way), default=0)
        while len(self._asked) < most or self._asked[-1].chunk.micro_step_stop < end:
            chunk = next(self._to_come, None)
            if chunk is None:
                return
            prefetched = self._cover(chunk, on_the_way) or (self._submit(chunk.start, chunk.stop, self._num_begun),)
            for each in prefetched:
                each.num_uses += 1
            self._asked.append(_BatchToHandOut(chunk, prefetched))

    def _cover(self, chunk: Chunk, on_the_way: Sequence[_PrefetchedBatch]) -> tuple[_PrefetchedBatch, ...]:
        """Batches on their way, and new ones between, that have all of a chunk; none if nothing of it is on its way."""
        for prefetched in on_the_way:
            if (prefetched.start, prefetched.stop) == (chunk.start, chunk.stop):
                return (prefetched,)
        if not self._can_recut:
            return ()
        cover: list[_PrefetchedBatch] = []
        position = chunk.start
        for prefetched in sorted(on_the_way, key=lambda prefetched: prefetched.start):
            if prefetched.stop <= position or prefetched.start >= chunk.stop:
                continue
            if prefetched.start > position:
                cover.append(self._submit(position, prefetched.start, self._num_begun))
            cover.append(prefetched)
            position = prefetched.stop
        if cover and position < chunk.stop:
            cover.append(self._submit(position, chunk.stop, self._num_begun))
        return tuple(cover)

    @property
    def _num_begun(self) -> int:
        """How many batches of the loop were handed out, or are asked for."""
        return self._num_committed + len(self._handed) + len(self._asked)

    def _submit(self, start: int, stop: int, batch_index: int) -> _PrefetchedBatch:
        return _PrefetchedBatch(
            start, stop, self._maker.submit(self._rest.indices(start, stop), batch_index=batch_index)
        )

    def _batch_of(self, asked: _BatchToHandOut) -> Any:
        chunk, prefetched = asked.chunk, asked.prefetched
        try:
            batches = [self._taken(each) for each in prefetched]
            if (prefetched[0].start, prefetched[-1].stop) == (chunk.start, chunk.stop) and len(prefetched) == 1:
                return batches[0]
            return join(
                [
                    cut(
                        batch,
                        max(chunk.start - each.start, 0),
                        min(chunk.stop - each.start, each.num_samples),
                        each.num_samples,
                    )
                    for each, batch in zip(prefetched, batches, strict=True)
                ]
            )
        except BatchNotReady:
            raise
        except Exception:
            if (prefetched[0].start, prefetched[0].stop) == (chunk.start, chunk.stop):
                raise
            # It may be of a sample that this chunk does not have; or samples are not as alike as batches have to be.
            again = self._submit(chunk.start, chunk.stop, self._num_begun)
            self._release(asked)
            again.num_uses, asked.prefetched = 1, (again,)
            return self._taken(again)

    def _taken(self, prefetched: _PrefetchedBatch) -> Any:
        if prefetched.batch is _NOT_TAKEN:
            try:
                prefetched.batch = self._maker.take(prefetched.number)
            except (BatchNotReady, KeyboardInterrupt):
                raise
            except BaseException:
                prefetched.batch = None  # it is taken
                raise
        return prefetched.batch

    def _first_made(self) -> _BatchToHandOut:
        """The batch that may be handed out first: the first one whose parts have come."""
        waiting: dict[int, _BatchToHandOut] = {}
        for asked in self._asked:
            missing = next(
                (prefetched.number for prefetched in asked.prefetched if prefetched.batch is _NOT_TAKEN), None
            )
            if missing is None:
                return asked
            waiting.setdefault(missing, asked)
        return waiting[self._maker.first_made(list(waiting))]

    def _hand_out(self, asked: _BatchToHandOut) -> None:
        if asked is self._asked[0]:
            self.cursor.hand_out(asked.chunk)
            while self._early and self._early[0].start == self.cursor.handed:
                self.cursor.hand_out(self._early.pop(0))
        else:
            insort(self._early, asked.chunk, key=lambda chunk: chunk.start)
        self._asked.remove(asked)
        self._handed.append(asked.chunk)
        self._release(asked)

    def _release(self, asked: _BatchToHandOut) -> None:
        for prefetched in asked.prefetched:
            prefetched.num_uses -= 1
            if prefetched.num_uses == 0:
                if prefetched.batch is _NOT_TAKEN:
                    self._maker.forget(prefetched.number)
                prefetched.batch = None
