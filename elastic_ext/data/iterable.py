"""Loops over an IterableDataset, of which each worker has a stream of its own, and the batches that are asked for ahead
of such a loop.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice, repeat
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils.data import IterDataPipe, get_worker_info
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

from elastic_ext.errors import WorkerDiedError

from .batch_plan import BatchPlan
from .order import Chunk, chunks
from .prefetch import BatchNotReady
from .streams import (
    Stream,
    StreamAnswer,
    StreamCounters,
    StreamRequest,
    StreamsPosition,
    StreamsProgress,
    can_tell_state,
)
from .workers.producer import BatchProducer

__all__ = ["NO_STATE", "StreamMaker", "StreamedEpochs", "StreamedLoop"]


# --- the batches of an IterableDataset, asked for ahead --------------------------------------------------------------
# Each worker has a stream of its own. Batches are asked for before they are needed, and again where the sizes of steps
# change or a step comes again.
#
# Workers take turns, a batch each, as in torch. A ``StreamMaker`` has batches made; whose turn it is, and what a worker
# does with a request, is in streams.py.

NO_STATE = (
    "its IterableDataset has no state_dict() and load_state_dict(); give the dataset both methods, or give the loader "
    "fast_forward=True, which draws the consumed samples again and drops them"
)


class StreamMaker(Protocol):
    """What submits requests to data workers and takes their batches: a ``BatchProducer``, as streams use it."""

    @property
    def num_ahead(self) -> int:
        """How many batches to ask for before the first of them is taken."""

    def submit(self, indices: list[Any], slot: int | None = None) -> int:
        """Have the worker of slot ``slot`` answer a request; gives the request's number."""

    def take(self, number: int) -> Any:
        """The answer to the request of this number, once it is there."""

    def first_made(self, numbers: Sequence[int]) -> int:
        """Which of these numbers' answers has come first, once one has; none of them was taken."""

    def forget(self, number: int) -> None:
        """Drop the request of this number: nobody will take its answer."""


@dataclass(frozen=True, slots=True, eq=False)
class _RequestedBatch:
    """A batch that a worker was asked for, of samples of its stream."""

    chunk: Chunk
    stream: StreamCounters
    start: int
    """The number of the batch's first sample in the stream."""
    number: int
    """The number of the request."""
    next_worker: int
    """The index of the worker whose turn it is after this batch was asked for."""


@dataclass(frozen=True, slots=True)
class _Handed:
    """A batch that was handed out and that is not consumed."""

    chunk: Chunk
    place: tuple[tuple[int, ...], int]
    """Where the streams stood after this batch."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StreamSettings:
    """How a loop makes batches of the samples that a dataset's streams give."""

    batch_size: int
    drop_last: bool
    """Whether a last batch with too few samples is left out."""
    collate_fn: Callable[[Any], Any]
    """Makes a batch of samples."""
    told_length: int | None = None
    """How many samples the dataset's ``__len__`` says it has; where more come, each batch of them is warned of."""
    skips_by_drawing: bool = False
    """Whether the stream may go to a place without a saved state by drawing and dropping samples."""
    wants_states: bool = False
    """Whether the dataset is to tell its state after every batch."""
    in_order: bool = True
    seed: int = 0


class StreamedLoop:
    """One rank's loop over an IterableDataset: an iterator over batches, whose sizes may change.

    With a ``plan`` batches have exactly the sizes that it says, pieced together of several streams where one ends; the
    last samples that are too few for a batch are left out. Without one they have the settings' ``batch_size``, and the
    last batch of each stream has what is left of it, or is left out with ``drop_last``.

    Without ``in_order`` in the settings, and without a plan, whichever worker is first gives the next batch; the
    batches of one stream keep their order. ``loop`` is the number of this loop among those over the dataset.
    """

    def __init__(
        self,
        maker: StreamMaker,
        position: StreamsPosition,
        settings: StreamSettings,
        *,
        loop: int,
        num_batches: Callable[[], int] | None = None,
        plan: BatchPlan | None = None,
        rank: int = 0,
    ) -> None:
        self.wants_states = settings.wants_states
        """Whether somebody may want to go on from any batch, so that streams have to tell their states."""
        self.seed = settings.seed
        """The seed by which an IterDataPipe shuffles."""
        self._maker = maker
        self._settings = settings
        self._batch_size = settings.batch_size
        self._num_batches = num_batches
        self.has_ended = False
        self.carried: tuple[int, ...] | None = None
        self._handed: deque[_Handed] = deque()
        self._loop, self._attempt = loop, 0
        self._plan, self._rank = plan, rank
        self._asked: deque[_RequestedBatch] = deque()
        self._go_to(position)

    def __len__(self) -> int:
        """How many batches the loop has, by the length that the dataset gives."""
        if self._num_batches is None:
            raise TypeError("the loop does not know how many batches it has")
        return self._num_batches()

    def __next__(self) -> Any:
        while True:
            self._ask()
            if not self._asked:
                self._progress.is_over = True
                raise StopIteration
            asked = self._next_asked()
            stream, chunk, start = asked.stream, asked.chunk, asked.start
            try:
                answer = self._taken(stream, asked.number)
            except (BatchNotReady, KeyboardInterrupt):  # the next call may have it
                raise
            except BaseException:
                self._count_as_handed_out(asked)
                self._handed.append(_Handed(chunk, self._progress.place))
                raise
            self._count_as_handed_out(asked)
            if answer.num_samples == chunk.num_samples:
                return self._handed_out(chunk, answer.batch)
            if answer.is_lost:
                stream.handed, self._progress.next_to_hand_out = start, stream.number
                self._find_again(stream, chunk)
                self._take_back(chunk)
                continue
            if stream.end is None:
                stream.end = start + answer.num_samples
            if self._plan is not None:
                stream.handed = min(start, stream.end)
                samples = self._pieced_together(stream, chunk)
                if samples is not None:
                    return self._handed_out(chunk, self._settings.collate_fn(samples))
            else:
                stream.handed = stream.end
                if answer.num_samples and not self._settings.drop_last:
                    return self._handed_out(chunk, answer.batch)

    @property
    def num_workers(self) -> int:
        """Among how many workers the streams are shared out; 0: the only stream is this process's own."""
        return self._progress.num_workers

    @property
    def position(self) -> StreamsPosition:
        """How far each stream is consumed."""
        return self._progress.position

    @property
    def num_handed(self) -> int:
        """How many batches were handed out that are not consumed."""
        return len(self._handed)

    def resize(self, batch_size: int) -> None:
        """Have batches of ``batch_size`` samples from the next one on."""
        if batch_size != self._batch_size:
            self._batch_size = batch_size
            self._cut()

    def plan(self, plan: BatchPlan, rank: int) -> None:
        """Cut steps by ``plan`` from now on, beginning after the last consumed sample."""
        if (plan, rank) != (self._plan, self._rank):
            self._plan, self._rank = plan, rank
            self._cut()

    def commit(self, num_batches: int | None = None) -> None:
        """Take the first ``num_batches`` that were handed out, or all, as consumed; the others begin the next step.

        A step that was cut short there is followed by one that begins there.
        """
        num_consumed = len(self._handed) if num_batches is None else min(num_batches, len(self._handed))
        consumed = [self._handed.popleft() for _ in range(num_consumed)]
        if not self._handed:
            self._progress.commit()
        elif consumed:
            self._progress.commit(consumed[-1].place)
        if consumed:
            self.carried = None
            if not consumed[-1].chunk.ends_step:
                self._cut()

    def rollback(self) -> None:
        """Hand out again the batches that are not consumed."""
        self._handed.clear()
        self.carried = None
        if self._progress.rollback():
            self._cut()

    def go_to(self, position: StreamsPosition) -> None:
        """Have the loop go on from another position."""
        self.close()
        self._attempt += 1
        self._go_to(position)

    def close(self) -> None:
        """Forget all batches that are asked for and were not taken."""
        while self._asked:
            self._maker.forget(self._asked.popleft().number)

    def end(self) -> None:
        """End the loop: no more batches are asked for."""
        self.close()
        self.has_ended = True

    def end_epoch(self) -> None:
        """End the loop as if its epoch were over."""
        self.end()
        self.rollback()
        self._progress.is_over = True

    def _go_to(self, position: StreamsPosition) -> None:
        self._handed.clear()
        self._progress = StreamsProgress(position)
        self._cut()

    def _cut(self) -> None:
        """Cut the next step after what is consumed; batches that are handed out already are its first ones."""
        self._take_back()
        self._to_come = self._sizes()
        self._ask()

    def _sizes(self) -> Iterator[Chunk]:
        """The batches that come, as chunks of which only sizes and ends of steps count: streams have no positions."""
        if self._plan is None:
            return repeat(Chunk(0, self._batch_size, 0, ends_step=True))
        self.carried = self._plan.carried_over(self._handed[0].chunk.sizes, None) if self._handed else None
        to_come = chunks(self._plan, self._rank, position=0, num_samples=None, carried=self.carried)
        return islice(to_come, len(self._handed), None)

    def _take_back(self, *again: Chunk) -> None:
        """Forget the batches that are asked for, and ask again for their sizes, after those of ``again``."""
        sizes = [*again, *(asked.chunk for asked in self._asked)]
        self.close()
        if sizes:
            self._to_come = chain(sizes, self._to_come)
        self._progress.take_back()

    def _ask(self) -> None:
        """Ask for batches until as many are under way as should be, one at least."""
        most = 0 if self.has_ended else max(self._maker.num_ahead, 1)
        while len(self._asked) < most:
            num_asked = None if self._keeps_order else Counter(asked.stream.number for asked in self._asked)
            stream = self._progress.next_stream(num_asked)
            if stream is None:
                return
            chunk = next(self._to_come)
            start = stream.asked
            number = self._submit(stream, start, chunk.num_samples)
            stream.asked = start + chunk.num_samples
            self._asked.append(_RequestedBatch(chunk, stream, start, number, self._progress.next_to_request))

    @property
    def _keeps_order(self) -> bool:
        return self._settings.in_order or self._plan is not None

    def _next_asked(self) -> _RequestedBatch:
        if self._keeps_order:
            return self._asked[0]
        first: dict[int, _RequestedBatch] = {}  # of each stream
        for asked in self._asked:
            first.setdefault(asked.stream.number, asked)
        by_number = {asked.number: asked for asked in first.values()}
        return by_number[self._maker.first_made(list(by_number))]

    def _submit(self, stream: StreamCounters, start: int, num_samples: int, *, is_raw: bool = False) -> int:
        resume_point = None if stream.is_found else stream.resume_points[0]
        stream.is_found = True
        request = StreamRequest(
            stream.number,
            self._loop,
            self._attempt,
            start,
            num_samples,
            stream.committed,
            resume_point,
            is_raw,
            # A plan's batch has what is left of several streams.
            is_whole=self._settings.drop_last or self._plan is not None,
            wants_state=self.wants_states or self._plan is not None,
            seed=self.seed,
        )
        return self._maker.submit([request], stream.number)

    def _taken(self, stream: StreamCounters, number: int) -> StreamAnswer:
        try:
            answer = self._maker.take(number)
        except StopIteration as error:  # of a collate_fn: the loop would end as if the epoch were over
            raise RuntimeError(
                f"making a batch of the stream of worker {stream.number} raised StopIteration, as if the epoch were "
                "over; have the collate_fn raise another exception"
            ) from error
        assert isinstance(answer, StreamAnswer)
        if answer.resume_point is not None and answer.resume_point.num_samples > stream.resume_points[-1].num_samples:
            stream.resume_points.append(answer.resume_point)
        return answer

    def _count_as_handed_out(self, asked: _RequestedBatch) -> None:
        """Count a batch as handed out, also where it cannot be made."""
        self._asked.remove(asked)
        asked.stream.handed, self._progress.next_to_hand_out = asked.start + asked.chunk.num_samples, asked.next_worker

    def _find_again(self, stream: StreamCounters, chunk: Chunk) -> None:
        """Have a stream's new worker told where to go on; WorkerDiedError, once, where that place is not known.

        The chunk that the stream was to give is then to come from another.
        """
        if stream.committed and stream.resume_points[0].state is None and not self._settings.skips_by_drawing:
            stream.end = stream.committed  # after a rollback too
            self._take_back(chunk)
            raise WorkerDiedError(
                f"data worker {stream.number} died, and the worker in its place cannot know which sample of the stream "
                f"is next, so the rest of that stream is left out: {NO_STATE}",
                indices=[],
            )
        stream.is_found = False

    def _pieced_together(self, stream: StreamCounters, chunk: Chunk) -> list[Any] | None:
        """Samples for a batch from a stream that has too few and from those after it; None where all are over."""
        self._take_back()
        samples: list[Any] = []
        each: StreamCounters | None = stream
        while each is not None:
            answer = self._raw(each, chunk, chunk.num_samples - len(samples))
            samples += answer.batch or []
            each.asked += answer.num_samples
            if len(samples) == chunk.num_samples:
                self._progress.hand_out_asked()
                return samples
            each.end = each.asked
            each = self._progress.next_stream()
        return None  # all of them are over now

    def _raw(self, stream: StreamCounters, chunk: Chunk, num_samples: int) -> StreamAnswer:
        """The answer with the next samples of one stream, not collated."""
        while True:
            answer = self._taken(stream, self._submit(stream, stream.asked, num_samples, is_raw=True))
            if not answer.is_lost:
                return answer
            self._find_again(stream, chunk)

    def _handed_out(self, chunk: Chunk, batch: Any) -> Any:
        self._handed.append(_Handed(chunk, self._progress.place))
        self._ask()
        if self._settings.told_length is not None:
            _warn_of_more(self._progress, self._settings.told_length)
        return batch


def _warn_of_more(progress: StreamsProgress, told_length: int) -> None:
    """Warn of a batch with which more samples have come than the dataset has, in words that begin as torch's do."""
    num_samples = sum(stream.handed for stream in progress.streams)
    if num_samples <= told_length:
        return
    advice = (
        "For multiprocessing data-loading, this may be since workers give the same samples; share them out by "
        "get_worker_info()"
        if progress.num_workers > 0
        else "Have its __len__ say how many it gives"
    )
    warnings.warn(
        f"Length of IterableDataset was reported to be {told_length} (when accessing len(dataloader)), but "
        f"{num_samples} samples have been fetched. {advice}",
        stacklevel=6,
    )


# --- the loops over an IterableDataset, one after another; how far a loop is, is said for each worker's stream -------


class StreamedEpochs:
    """The epochs of an IterableDataset: the dataset shares its samples out among ranks and workers itself."""

    remaining = seed = None
    draws_order = False
    num_ranks = 1
    fetches_lists = False
    fixes_num_workers = True  # they share the samples out among them
    has_own_positions = True

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None,
        drop_last: bool,
        collate_fn: Callable[[Any], Any],
        fast_forward: bool,
        in_order: bool = True,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self._auto_collation = batch_size is not None
        self.collate_fn = _as_it_is  # the Stream collates
        self.epoch = 0
        self.last_loop: StreamedLoop | None = None
        self._dataset = dataset
        self._batch_size = batch_size or 1
        self._drop_last = drop_last
        self._collate_fn = collate_fn
        self._in_order = in_order
        self._is_pipe = isinstance(dataset, IterDataPipe)
        self._seed = seed
        self._generator = generator
        self._drawn_seed: int | None = None
        self._pipe_seed: int | None = None  # by which an IterDataPipe shuffles in this loop, or in the one to come
        self._can_go_on = fast_forward or can_tell_state(dataset)
        self._given_plan: BatchPlan | None = None
        self._rank = 0
        self._position: StreamsPosition | None = None  # where the next loop begins; None: at an epoch's beginning
        # In a copy, which has no loop: where the original's loop stood.
        self._position_of_original: StreamsPosition | None = None
        self._wants_states = False  # somebody has asked where a loop stands, or gone on there
        self._is_begun = False  # whether a loop through this epoch was begun, so that the next loop takes the next one
        self._is_over = False  # whether the epoch is over, by a state that was loaded or by leave_epoch()
        self._next_epoch: int | None = None  # named while a loop is under way
        self._num_loops = 0
        self._told_length: int | None = None  # samples that the dataset said it has, when the loader was asked

    @property
    def worker_dataset(self) -> Stream:
        """A new Stream of the dataset: loops that go on side by side do not draw from the same."""
        return Stream(
            self._dataset,
            self._collate_fn,
            auto_collation=self._auto_collation,
            share_out=_SharesPipe.of_this_rank() if self._is_pipe else None,
        )

    @property
    def num_workers(self) -> int | None:
        return None if self._position is None else self._position.num_workers

    @property
    def is_at_end(self) -> bool:
        return self._is_over if self.last_loop is None else self.last_loop.position.is_over

    @property
    def why_no_position(self) -> str | None:
        """Why a later loop cannot go on where this one is; None if it can."""
        loop = self.last_loop
        if self._can_go_on or loop is None or loop.position.is_over or not any(loop.position.num_committed):
            return None
        return NO_STATE

    @property
    def goes_on(self) -> bool:
        return self._position is not None

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, which has no loop under way: it tells where that loop stands."""
        left = self._position_of_original if self.last_loop is None else self.last_loop.position
        return {**self.__dict__, "last_loop": None, "_position_of_original": left}

    def collate_with(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn

    def draw_shuffle_seed(self) -> None:
        draws = self._is_pipe and not self._goes_on_shuffled and self._seed is None
        self._drawn_seed = None  # of a loop before, which may have been of another number of ranks
        if draws and _SharesPipe.of_this_rank().num_ranks == 1:
            self._drawn_seed = int(torch.empty((), dtype=torch.int64).random_(generator=self._generator).item())

    def begin(self, producer: BatchProducer) -> StreamedLoop:
        if self.last_loop is not None and self._given_plan is not None:
            self.last_loop.end()  # a trainer counts what one loop takes
        named, self.last_loop = self._next_epoch, None
        if named is not None:
            self.set_epoch(named)
        elif self._is_begun:
            self.epoch += 1
        self._is_begun, self._is_over, self._next_epoch, self._position_of_original = True, False, None, None
        if self._is_pipe and not self._goes_on_shuffled:
            self._pipe_seed = self._seed_of_epoch() if self._drawn_seed is None else self._drawn_seed
        self.last_loop = StreamedLoop(
            producer,
            self._position or StreamsPosition.start(producer.num_workers),
            StreamSettings(
                batch_size=self._batch_size,
                drop_last=self._drop_last,
                collate_fn=self._collate_fn,
                told_length=self._told_length,
                skips_by_drawing=self._can_go_on,
                wants_states=self._wants_states,
                in_order=self._in_order,
                seed=self._pipe_seed or 0,
            ),
            loop=self._new_loop(),
            num_batches=self._num_batches,
            plan=self._given_plan,
            rank=self._rank,
        )
        self._position = None
        return self.last_loop

    def num_batches(self) -> int:
        self._told_length = len(self._dataset)
        return self._num_batches()

    def why_not_resize(self, batch_size: int) -> str | None:
        return None

    def resize(self, batch_size: int) -> None:
        self._batch_size = batch_size
        if self.last_loop is not None:
            self.last_loop.resize(batch_size)

    def plan(self, plan: BatchPlan, rank: int) -> None:
        self._given_plan, self._rank = plan, rank
        if self.last_loop is not None:
            self.last_loop.plan(plan, rank)

    def leave_epoch(self) -> None:
        if self.last_loop is not None and self.last_loop.has_ended and any(self.last_loop.position.num_committed):
            self.last_loop, self._position_of_original, self._is_over = None, None, True

    def set_epoch(self, epoch: int) -> None:
        if self._is_under_way:
            self._next_epoch = epoch
            return
        if epoch != self.epoch or self.last_loop is not None:
            self._position = None
        self.last_loop = self._position_of_original = None
        self.epoch = epoch
        self._is_begun = self._is_over = False
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)

    def take_seed(self, seed: int) -> None:
        """Nothing to do: the dataset gives its own order, and no seed draws it."""

    def order_to_come(self) -> None:
        """None: the dataset gives its own order."""

    def state_dict(self) -> dict[str, Any]:
        self._wants_states = True
        if self.last_loop is not None:
            self.last_loop.wants_states = True
        position = self._position
        if position is None:
            position = self._position_of_original if self.last_loop is None else self.last_loop.position
        state = {
            "epoch": self.epoch,
            "is_over": self._is_over if position is None else position.is_over,
            "streams": None if position is None else position.state_dict(),
        }
        return state | {"pipe_seed": self._pipe_seed} if self._is_pipe else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "streams" not in state:
            raise ValueError(
                f"the state is of a map-style dataset, asked for by index ({sorted(state)}), and this loader's dataset "
                "is an IterableDataset; give the loader the dataset with which the state was saved"
            )
        position = None if state["streams"] is None or state["is_over"] else StreamsPosition.of(state["streams"])
        if position is not None and any(position.num_committed) and not self._can_go_on:
            raise ValueError(f"the loop cannot go on where the state was saved: {NO_STATE}")
        self._wants_states = True
        self.epoch = int(state["epoch"])
        self.last_loop = self._position_of_original = None
        self._is_begun = self._is_over = bool(state["is_over"])
        self._position, self._next_epoch = position, None
        self._pipe_seed = state.get("pipe_seed")

    def rewind(self, state: Mapping[str, Any]) -> None:
        loop = self.last_loop
        self.load_state_dict(state)
        if loop is None or loop.has_ended:
            return
        if self._is_over:  # the loop has no samples left, wherever that epoch was left
            loop.end_epoch()
            self.last_loop, self._is_over = loop, False
            return
        position = self._position or StreamsPosition.start(loop.num_workers)
        if position.num_workers != loop.num_workers:
            raise ValueError(
                f"the state was saved with {position.num_workers} workers, and the running loop has "
                f"{loop.num_workers}; leave the loop before rewinding"
            )
        loop.seed = self._pipe_seed or 0
        loop.go_to(position)
        self.last_loop, self._position, self._is_begun = loop, None, True

    @property
    def _goes_on_shuffled(self) -> bool:
        """Whether the next loop goes on with one whose IterDataPipe was shuffled by a known seed."""
        return self._position is not None and self._pipe_seed is not None

    @property
    def _is_under_way(self) -> bool:
        """Whether a loop is under way."""
        return self.last_loop is not None and not self.last_loop.has_ended

    def _num_batches(self) -> int:
        num_samples, size = len(self._dataset), self._batch_size
        if self._given_plan is None:
            return num_samples // size if self._drop_last else -(-num_samples // size)
        sizes = self._given_plan.full_step.micro_batches[self._rank]
        num_steps, num_left = divmod(num_samples, sum(sizes))
        return num_steps * len(sizes) + sum(stop <= num_left for stop in accumulate(sizes))

    def _seed_of_epoch(self) -> int:
        """The seed by which an IterDataPipe shuffles where none was drawn: alike on all ranks, without asking."""
        seed = self._seed
        if seed is None:
            seed = 0 if self._generator is None else self._generator.initial_seed()
        digest = hashlib.blake2b(f"{seed} {self.epoch}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def _new_loop(self) -> int:
        self._num_loops += 1
        return self._num_loops


@dataclass(frozen=True)
class _SharesPipe:
    """Shuffles an IterDataPipe alike on all ranks, and gives each worker of each rank its share, as torch does."""

    rank: int
    num_ranks: int

    @classmethod
    def of_this_rank(cls) -> _SharesPipe:
        joined = dist.is_available() and dist.is_initialized()
        return cls(dist.get_rank(), dist.get_world_size()) if joined else cls(0, 1)

    def __call__(self, pipe: Any, seed: int) -> None:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        apply_sharding(pipe, num_workers * self.num_ranks, worker * self.num_ranks + self.rank)
        apply_random_seed(pipe, torch.Generator().manual_seed(seed))


def _as_it_is(answer: Any) -> Any:
    return answer
