"""Streams: the batches of an IterableDataset, of which each worker has a stream of its own, asked for before they are
needed and asked for again where steps are cut otherwise or come again.

Workers take turns, a batch each, as torch has them do: turns.py. Who makes batches is behind ``StreamMaker``; what a
worker does with a request is in stream.py.
"""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any, Protocol

from elastic_ext.accumulate import BatchPlan
from elastic_ext.errors import WorkerDiedError

from .cursor import Chunk, chunks
from .late import Late
from .stream import Answer, Request
from .turns import Slot, StreamsPosition, Turns

__all__ = ["NO_STATE", "StreamMaker", "Streams"]

NO_STATE = (
    "its IterableDataset has no state_dict() and load_state_dict(); give it both, or the loader fast_forward=True to "
    "pass all samples before"
)


class StreamMaker(Protocol):
    """Who asks workers for batches."""

    @property
    def num_ahead(self) -> int:
        """How many it should be asked for before the first of them is taken."""

    def submit(self, indices: list[Any], slot: int | None = None) -> int:
        """Have the worker of that slot answer a request; gives its number."""

    def take(self, number: int) -> Any:
        """The answer."""

    def first_made(self, numbers: Sequence[int]) -> int:
        """Which of these numbers' answers has come first, once one has; none of them was taken."""

    def forget(self, number: int) -> None:
        """Nobody will take it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    chunk: Chunk
    slot: Slot
    start: int
    number: int
    turn: int
    """Whose it is to be asked after it."""


@dataclass(frozen=True, slots=True)
class _Handed:
    """A batch that the loop was given and that is not consumed."""

    chunk: Chunk
    place: tuple[tuple[int, ...], int]
    """Where the streams stood after it."""


class Streams:
    """The rest of a loop over the dataset on one rank: an iterator over batches, whose sizes may change.

    With ``plan`` they have exactly the sizes it says, and what is too little for one in the end is left out; else they
    have ``batch_size`` samples, or what is left of a stream unless ``drop_last``. With ``passes_samples`` those before
    a place of which the dataset has told no state are passed to come there. More than ``told_length`` are warned of.

    Without ``in_order`` and without ``plan`` whichever worker is first gives the next batch; each worker's stream comes
    in its own order.
    """

    def __init__(
        self,
        maker: StreamMaker,
        position: StreamsPosition,
        *,
        loop: int,
        batch_size: int,
        drop_last: bool,
        collate_fn: Callable[[Any], Any],
        num_batches: Callable[[], int] | None = None,
        told_length: int | None = None,
        passes_samples: bool = False,
        wants_states: bool = False,
        in_order: bool = True,
        seed: int = 0,
        plan: BatchPlan | None = None,
        rank: int = 0,
    ) -> None:
        self.wants_states = wants_states
        """Somebody may go on where it stands after any batch."""
        self.seed = seed
        """What a data pipe shuffles by."""
        self._maker = maker
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._collate_fn = collate_fn
        self._num_batches = num_batches
        self._told_length = told_length
        self._passes_samples = passes_samples
        self._in_order = in_order
        self.has_ended = False
        self.carried: tuple[int, ...] | None = None
        self._handed: deque[_Handed] = deque()
        self._loop, self._attempt = loop, 0
        self._plan, self._rank = plan, rank
        self._asked: deque[_Asked] = deque()
        self._go_to(position)

    def __len__(self) -> int:
        """What the dataset says of itself."""
        if self._num_batches is None:
            raise TypeError("it is not known how many batches there are")
        return self._num_batches()

    def __next__(self) -> Any:
        while True:
            self._ask()
            if not self._asked:
                self._turns.is_over = True
                raise StopIteration
            asked = self._next_asked()
            slot, chunk, start = asked.slot, asked.chunk, asked.start
            try:
                answer = self._taken(slot, asked.number)
            except (Late, KeyboardInterrupt):  # the next call may have it
                raise
            except BaseException:
                self._pass(asked)
                self._handed.append(_Handed(chunk, self._turns.place))
                raise
            self._pass(asked)
            if answer.num_samples == chunk.num_samples:
                return self._handed_out(chunk, answer.batch)
            if answer.is_lost:
                slot.handed, self._turns.handed = start, slot.number
                self._find_again(slot, chunk)
                self._take_back(chunk)
                continue
            if slot.end is None:
                slot.end = start + answer.num_samples
            if self._plan is not None:
                slot.handed = min(start, slot.end)
                samples = self._pieced_together(slot, chunk)
                if samples is not None:
                    return self._handed_out(chunk, self._collate_fn(samples))
            else:
                slot.handed = slot.end
                if answer.num_samples and not self._drop_last:
                    return self._handed_out(chunk, answer.batch)

    @property
    def num_workers(self) -> int:
        """Among whom the streams are shared out; 0: the one is this process's own."""
        return self._turns.num_workers

    @property
    def position(self) -> StreamsPosition:
        """What is consumed."""
        return self._turns.position

    @property
    def num_handed(self) -> int:
        """How many batches were handed out that are not consumed."""
        return len(self._handed)

    def resize(self, batch_size: int) -> None:
        """Have batches of so many samples from the next one on."""
        if batch_size != self._batch_size:
            self._batch_size = batch_size
            self._cut()

    def plan(self, plan: BatchPlan, rank: int) -> None:
        """Cut steps like this from what is consumed on."""
        if (plan, rank) != (self._plan, self._rank):
            self._plan, self._rank = plan, rank
            self._cut()

    def commit(self, num_batches: int | None = None) -> None:
        """The first batches that were handed out are consumed, or all; those after them begin the next step.

        A step that was cut short there is followed by one that begins there.
        """
        num_consumed = len(self._handed) if num_batches is None else min(num_batches, len(self._handed))
        consumed = [self._handed.popleft() for _ in range(num_consumed)]
        if not self._handed:
            self._turns.commit()
        elif consumed:
            self._turns.commit(consumed[-1].place)
        if consumed:
            self.carried = None
            if not consumed[-1].chunk.ends_step:
                self._cut()

    def rollback(self) -> None:
        """What was handed out and is not consumed comes again."""
        self._handed.clear()
        self.carried = None
        if self._turns.rollback():
            self._cut()

    def go_to(self, position: StreamsPosition) -> None:
        """Go on elsewhere."""
        self.close()
        self._attempt += 1
        self._go_to(position)

    def close(self) -> None:
        """Nobody takes what was asked for."""
        while self._asked:
            self._maker.forget(self._asked.popleft().number)

    def end(self) -> None:
        """The loop is over: nothing is asked for any more."""
        self.close()
        self.has_ended = True

    def _go_to(self, position: StreamsPosition) -> None:
        self._handed.clear()
        self._turns = Turns(position)
        self._cut()

    def _cut(self) -> None:
        """Begin a step at what is consumed, with what is handed out already."""
        self._take_back()
        self._to_come = self._sizes()
        self._ask()

    def _sizes(self) -> Iterator[Chunk]:
        if self._plan is None:
            return repeat(Chunk(0, self._batch_size, 0, ends_step=True))
        self.carried = self._plan.carried_over(self._handed[0].chunk.sizes, None) if self._handed else None
        to_come = chunks(self._plan, self._rank, position=0, num_samples=None, carried=self.carried)
        return islice(to_come, len(self._handed), None)

    def _take_back(self, *again: Chunk) -> None:
        """Nobody takes what was asked for, and the same sizes are asked for again; first of all what is given."""
        sizes = [*again, *(asked.chunk for asked in self._asked)]
        self.close()
        if sizes:
            self._to_come = chain(sizes, self._to_come)
        self._turns.take_back()

    def _ask(self) -> None:
        """Ask for batches until as many are under way as should be, one at least."""
        most = 0 if self.has_ended else max(self._maker.num_ahead, 1)
        while len(self._asked) < most:
            num_asked = None if self._keeps_order else Counter(asked.slot.number for asked in self._asked)
            slot = self._turns.next_slot(num_asked)
            if slot is None:
                return
            chunk = next(self._to_come)
            start = slot.asked
            number = self._submit(slot, start, chunk.num_samples)
            slot.asked = start + chunk.num_samples
            self._asked.append(_Asked(chunk, slot, start, number, self._turns.asked))

    @property
    def _keeps_order(self) -> bool:
        return self._in_order or self._plan is not None

    def _next_asked(self) -> _Asked:
        if self._keeps_order:
            return self._asked[0]
        first: dict[int, _Asked] = {}  # of each stream
        for asked in self._asked:
            first.setdefault(asked.slot.number, asked)
        by_number = {asked.number: asked for asked in first.values()}
        return by_number[self._maker.first_made(list(by_number))]

    def _submit(self, slot: Slot, start: int, num_samples: int, *, is_raw: bool = False) -> int:
        mark = None if slot.is_found else slot.marks[0]
        slot.is_found = True
        request = Request(
            slot.number,
            self._loop,
            self._attempt,
            start,
            num_samples,
            slot.passed,
            mark,
            is_raw,
            is_whole=self._drop_last or self._plan is not None,  # a plan's batch has what is left of several streams
            is_marked=self.wants_states or self._plan is not None,
            seed=self.seed,
        )
        return self._maker.submit([request], slot.number)

    def _taken(self, slot: Slot, number: int) -> Answer:
        try:
            answer = self._maker.take(number)
        except StopIteration as error:  # of a collate_fn: the loop would end as if the epoch were over
            raise RuntimeError(f"making a batch of the stream of worker {slot.number} raised StopIteration") from error
        assert isinstance(answer, Answer)
        if answer.mark is not None and answer.mark.num_samples > slot.marks[-1].num_samples:
            slot.marks.append(answer.mark)
        return answer

    def _pass(self, asked: _Asked) -> None:
        """It is handed out, also where it cannot be made."""
        self._asked.remove(asked)
        asked.slot.handed, self._turns.handed = asked.start + asked.chunk.num_samples, asked.turn

    def _find_again(self, slot: Slot, chunk: Chunk) -> None:
        """Its worker is another one, which has to be told where to go on, or has no more to give, which is said once.

        The chunk that it was to give is then to come from another.
        """
        if slot.passed and slot.marks[0].state is None and not self._passes_samples:
            slot.end = slot.passed  # after a rollback too
            self._take_back(chunk)
            raise WorkerDiedError(
                f"data worker {slot.number} died, and where its stream goes on is not known, so this one is over: "
                f"{NO_STATE}",
                indices=[],
            )
        slot.is_found = False

    def _pieced_together(self, slot: Slot, chunk: Chunk) -> list[Any] | None:
        """As many samples of a stream that has too few, and of those after it; None where all have too few."""
        self._take_back()
        samples: list[Any] = []
        each: Slot | None = slot
        while each is not None:
            answer = self._raw(each, chunk, chunk.num_samples - len(samples))
            samples += answer.batch or []
            each.asked += answer.num_samples
            if len(samples) == chunk.num_samples:
                self._turns.hand_out_asked()
                return samples
            each.end = each.asked
            each = self._turns.next_slot()
        return None  # all of them are over now

    def _raw(self, slot: Slot, chunk: Chunk, num_samples: int) -> Answer:
        """The next samples of one stream as they are."""
        while True:
            answer = self._taken(slot, self._submit(slot, slot.asked, num_samples, is_raw=True))
            if not answer.is_lost:
                return answer
            self._find_again(slot, chunk)

    def _handed_out(self, chunk: Chunk, batch: Any) -> Any:
        self._handed.append(_Handed(chunk, self._turns.place))
        self._ask()
        if self._told_length is not None:
            _warn_of_more(self._turns, self._told_length)
        return batch


def _warn_of_more(turns: Turns, told_length: int) -> None:
    """Warn of each batch with which more samples have come than there are, in words that begin as torch's do."""
    num_samples = sum(slot.handed for slot in turns.slots)
    if num_samples <= told_length:
        return
    advice = (
        "For multiprocessing data-loading, this may be since workers give the same samples; share them out by "
        "get_worker_info()"
        if turns.num_workers > 0
        else "Have its __len__ say how many it gives"
    )
    warnings.warn(
        f"Length of IterableDataset was reported to be {told_length} (when accessing len(dataloader)), but "
        f"{num_samples} samples have been fetched. {advice}",
        stacklevel=5,
    )
