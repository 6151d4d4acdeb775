"""The samples of an IterableDataset as one worker has them, and how far the streams of all workers have come."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from .seeding import Copied

__all__ = [
    "START",
    "ResumePoint",
    "Stream",
    "StreamAnswer",
    "StreamCounters",
    "StreamRequest",
    "StreamsPosition",
    "StreamsProgress",
    "can_tell_state",
]


# --- the samples of an IterableDataset as one worker has them, which come again where they are asked for again -------
# Whoever makes batches asks it instead of the dataset: each request says which of the stream's samples are wanted, by
# their numbers. So no sample is lost with a batch that nobody took, and none comes twice.


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A place in a stream from which it can go on: how many samples lie before it, and the dataset's state there."""

    num_samples: int
    """How many samples of the stream lie before this place."""
    state: Copied | None = None
    """What the dataset's ``state_dict`` gave there; None: all samples before it are drawn and dropped."""


START = ResumePoint(0)

_SAMPLE_SECONDS_PER_STATE_SECOND = 50.0
"""How long samples have to take before the dataset tells another state, as a multiple of the time that a state takes.

This is for states that no request asks for.
"""


@dataclass(frozen=True, slots=True, repr=False)
class StreamRequest:
    """A request for the next samples of one stream, as one batch."""

    slot: int
    loop: int
    """The number of the loop over the dataset that asks."""
    attempt: int
    """How often this loop has gone to another position before."""
    start: int
    """The number, in the stream, of the first sample that is wanted."""
    num_samples: int
    keep_from: int
    """The number of the first sample that may be asked for again; those before it are dropped."""
    resume_point: ResumePoint | None = None
    """A place at or before ``start`` to go to if the stream is not there; None: it answers that it is lost."""
    is_raw: bool = False
    """Whether the samples are wanted as a list, not collated."""
    is_whole: bool = False
    """Whether only a full batch is wanted: fewer samples are counted, and not collated."""
    wants_state: bool = False
    """Whether the dataset has to tell its state after this batch, however long that takes."""
    seed: int = 0
    """The seed by which an IterDataPipe shuffles in this loop, alike in all workers and on all ranks."""

    def __repr__(self) -> str:
        last = self.start + self.num_samples - 1
        which = f"{self.start} to {last}" if last > self.start else str(last)
        return f"{which} of the stream of worker {self.slot}"


@dataclass(frozen=True, slots=True)
class StreamAnswer:
    """The batch that a stream gave for one request."""

    batch: Any = None
    num_samples: int = 0
    """Samples in the batch; fewer than asked for where the stream ends."""
    resume_point: ResumePoint | None = None
    """The place behind the last sample, where the dataset has told its state."""
    is_lost: bool = False
    """Whether the stream is not where the request begins: ask again, with a resume point."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """An exception that came instead of a sample: it counts as one, and comes again where the sample would."""

    error: BaseException


def can_tell_state(dataset: Any) -> bool:
    """Whether a dataset can save and load its position, by ``state_dict`` and ``load_state_dict``."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")


class PipeSharing(Protocol):
    """Shares the samples of an IterDataPipe out among workers and ranks."""

    def __call__(self, dataset: Any, seed: int, /) -> None: ...


class Stream:
    """One worker's samples of an IterableDataset: ``stream[request]`` is the answer to a StreamRequest.

    A state may be large, and often nobody goes on from it. So where no request needs one (``wants_state``) the dataset
    tells a state only once samples have taken fifty times as long as the last state took. Whoever goes on from the
    last state draws the samples after it again and drops them: that takes at most fifty times as long as a state, or
    as long as a batch.

    ``share_out`` is called with the dataset and a request's seed before the dataset is iterated over.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        *,
        auto_collation: bool,
        share_out: PipeSharing | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._share_out = share_out
        self.dataset = dataset
        self._collate_fn = collate_fn
        self._auto_collation = auto_collation
        self._clock = clock
        self._tells_state = can_tell_state(dataset)
        self._first_state: Copied | None = None
        self._num_seconds = 0.0  # that samples have taken since the state was told last
        self._due_seconds = 0.0  # once samples have taken this long, another state is due
        self._loop = self._attempt = -1
        self._seed = 0
        self._iterator: Iterator[Any] = iter(())
        self._has_ended = False
        self._at = 0  # samples of the loop that were drawn
        self._kept: deque[Any] = deque()  # the last of them, which may be asked for again

    def __getitem__(self, request: StreamRequest) -> StreamAnswer:
        if (request.loop, request.attempt) != (self._loop, self._attempt) or request.start < self._at - len(self._kept):
            if request.resume_point is None:
                return StreamAnswer(is_lost=True)
            self._seed = request.seed
            self._go_to(request.resume_point, is_new=request.loop != self._loop)
            self._loop, self._attempt = request.loop, request.attempt
        began = self._clock()
        error = self._pass_to(request.keep_from, keeps=False)
        while self._kept and self._at - len(self._kept) < request.keep_from:
            self._kept.popleft()
        stop = request.start + request.num_samples
        self._pass_to(request.start, keeps=True)
        while self._at < stop and not self._has_ended and self._draw() is None:
            pass
        self._num_seconds += self._clock() - began
        first = self._at - len(self._kept)
        samples = list(islice(self._kept, request.start - first, stop - first))
        if not samples:
            if error is not None:  # the stream ends with it, and nobody has heard of it
                raise error
            return StreamAnswer()
        for sample in samples:
            if type(sample) is _Failed:
                raise sample.error
        resume_point = None
        # Of a stream that has ended the state may be that of the next epoch's beginning.
        if self._tells_state and not self._has_ended and self._at == request.start + len(samples):
            resume_point = self._resume_point_here(request.wants_state)
        if request.is_raw:
            return StreamAnswer(samples, len(samples), resume_point)
        if request.is_whole and len(samples) < request.num_samples:
            return StreamAnswer(None, len(samples), resume_point)
        return StreamAnswer(
            self._collate_fn(samples if self._auto_collation else samples[0]), len(samples), resume_point
        )

    def _pass_to(self, place: int, *, keeps: bool) -> BaseException | None:
        """Draw all samples before a place; gives the exception that came instead of the last one, if one did.

        An exception of the dataset counts as a sample.
        """
        error = None
        while self._at < place and not self._has_ended:
            error = self._draw(keeps=keeps) or (error if self._has_ended else None)
        return error

    def _draw(self, *, keeps: bool = True) -> BaseException | None:
        """Draw the next sample, if there is one; gives the exception that came instead, if one did."""
        failed = None
        try:
            sample = next(self._iterator)
        except StopIteration:
            self._has_ended = True
            return None
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failed = error
            sample = _Failed(error)
        self._at += 1
        if keeps:
            self._kept.append(sample)
        return failed

    def _resume_point_here(self, is_wanted: bool) -> ResumePoint | None:
        """The place behind the drawn samples with the dataset's state, if it is wanted or has become due."""
        if not is_wanted and self._num_seconds < self._due_seconds:
            return None
        began = self._clock()
        resume_point = ResumePoint(self._at, Copied.of(self.dataset.state_dict()))
        self._num_seconds, self._due_seconds = 0.0, _SAMPLE_SECONDS_PER_STATE_SECOND * (self._clock() - began)
        return resume_point

    def _go_to(self, resume_point: ResumePoint, *, is_new: bool) -> None:
        self._kept.clear()
        self._has_ended = False
        self._at = 0 if resume_point.state is None else resume_point.num_samples
        self._num_seconds = self._due_seconds = 0.0
        try:
            self._iterator = self._begun(resume_point, is_new=is_new)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._iterator = _Raising(error)

    def _begun(self, resume_point: ResumePoint, *, is_new: bool) -> Iterator[Any]:
        if self._tells_state:
            if is_new:
                self._first_state = Copied.of(self.dataset.state_dict())
            state = self._first_state if resume_point.state is None else resume_point.state
            if state is not None and (resume_point.state is not None or not is_new):
                self.dataset.load_state_dict(state.value())  # a new loop begins where the dataset is, as torch's does
        if self._share_out is not None:
            self._share_out(self.dataset, self._seed)
        return iter(self.dataset)


class _Raising(Iterator[Any]):
    """An iterator for a dataset that could not begin: it raises the reason each time that it is asked for a sample."""

    def __init__(self, error: BaseException) -> None:
        self._error, self._trace = error, error.__traceback__

    def __next__(self) -> Any:
        raise self._error.with_traceback(self._trace)  # which grows with each time that it is raised


# --- the streams of a loop, one of each worker, how far each has come, and whose turn it is --------------------------
# A sample is *asked* for, *handed* out, and at last *committed*: consumed. For each of these three it is kept how many
# samples of each stream have come so far, and which worker's turn is next.


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamsPosition:
    """How far each worker's stream is consumed, and whose turn is next."""

    num_committed: tuple[int, ...]
    """How many samples of each stream are consumed."""
    resume_points: tuple[ResumePoint, ...]
    """For each stream a place to go on from, at or before what is consumed."""
    num_workers: int
    """The number of workers; 0: the only stream is this process's own."""
    next_worker: int = 0
    """The index of the worker whose stream gives the next batch."""
    is_over: bool = False
    """Whether no more samples come from any stream."""

    @classmethod
    def start(cls, num_workers: int) -> StreamsPosition:
        num_streams = max(num_workers, 1)
        return cls(num_committed=(0,) * num_streams, resume_points=(START,) * num_streams, num_workers=num_workers)

    def state_dict(self) -> dict[str, Any]:
        """This position as plain values, but for what the dataset's own states hold."""
        return {
            "num_workers": self.num_workers,
            "streams": [
                {
                    "passed": passed,
                    "at": resume_point.num_samples,
                    "has_state": resume_point.state is not None,
                    "state": None if resume_point.state is None else resume_point.state.value(),
                }
                for passed, resume_point in zip(self.num_committed, self.resume_points, strict=True)
            ],
            "turn": self.next_worker,
            "is_over": self.is_over,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> StreamsPosition:
        """The position that ``state_dict`` gave."""
        streams = state["streams"]
        return cls(
            num_committed=tuple(int(each["passed"]) for each in streams),
            resume_points=tuple(
                ResumePoint(int(each["at"]), Copied.of(each["state"]) if each["has_state"] else None)
                for each in streams
            ),
            num_workers=int(state["num_workers"]),
            next_worker=int(state["turn"]),
            is_over=bool(state["is_over"]),
        )


@dataclass(slots=True, eq=False)
class StreamCounters:
    """How many samples of one worker's stream are requested, handed out and consumed, as the loop counts them."""

    number: int
    committed: int
    """How many samples are consumed."""
    resume_points: deque[ResumePoint]
    """Places to go on from, in order; the first is at or before what is consumed."""
    asked: int = 0
    """How many samples are asked for."""
    handed: int = 0
    """How many samples are handed out."""
    end: int | None = None
    """How many samples the stream has, once that is known."""
    is_found: bool = False
    """Whether the worker was told where its stream goes on."""

    def __post_init__(self) -> None:
        self.asked = self.handed = self.committed

    @property
    def is_over(self) -> bool:
        return self.end is not None and self.asked >= self.end

    def drop_resume_points(self) -> None:
        """Drop the resume points that are not needed any more: all before the last one at or before ``committed``."""
        while len(self.resume_points) > 1 and self.resume_points[1].num_samples <= self.committed:
            self.resume_points.popleft()


class StreamsProgress:
    """How far all streams of a loop are asked for, handed out and consumed; workers take turns until each ends."""

    def __init__(self, position: StreamsPosition) -> None:
        self.num_workers = position.num_workers
        self.streams = [
            StreamCounters(number, passed, deque([resume_point]))
            for number, (passed, resume_point) in enumerate(
                zip(position.num_committed, position.resume_points, strict=True)
            )
        ]
        self.next_to_request = self.next_to_hand_out = self._next_to_commit = position.next_worker
        """Which worker's stream is next requested, next handed out and next consumed."""
        self.is_over = False

    @property
    def position(self) -> StreamsPosition:
        """How far each stream is consumed, as a position that a loop can go on from."""
        return StreamsPosition(
            num_committed=tuple(stream.committed for stream in self.streams),
            resume_points=tuple(stream.resume_points[0] for stream in self.streams),
            num_workers=self.num_workers,
            next_worker=self._next_to_commit,
            is_over=self.is_over,
        )

    def next_stream(self, num_asked: Mapping[int, int] | None = None) -> StreamCounters | None:
        """The stream to ask next, of those that may have more samples; None where all have ended.

        It is the one whose turn it is, or, with ``num_asked`` (requests without an answer, by stream), the one with
        fewest of these.
        """
        in_turn = [
            self.streams[(self.next_to_request + number) % len(self.streams)] for number in range(len(self.streams))
        ]
        left = [stream for stream in in_turn if not stream.is_over]
        if not left:
            return None
        stream = left[0] if num_asked is None else min(left, key=lambda stream: num_asked.get(stream.number, 0))
        self.next_to_request = (stream.number + 1) % len(self.streams)
        return stream

    @property
    def place(self) -> tuple[tuple[int, ...], int]:
        """How far each stream is handed out, and whose turn is next; for ``commit``."""
        return tuple(stream.handed for stream in self.streams), self.next_to_hand_out

    def commit(self, place: tuple[tuple[int, ...], int] | None = None) -> None:
        """Count what was handed out, up to ``place`` or all of it, as consumed."""
        handed, next_worker = place or self.place
        for stream, committed in zip(self.streams, handed, strict=True):
            stream.committed = committed
            stream.drop_resume_points()
        self._next_to_commit = next_worker

    def rollback(self) -> bool:
        """Have all be handed out again that is not consumed; gives whether that was anything."""
        has_moved = any(stream.handed != stream.committed for stream in self.streams)
        if has_moved:
            self.is_over = False
            for stream in self.streams:
                stream.handed = stream.committed
            self.next_to_hand_out = self._next_to_commit
        return has_moved

    def take_back(self) -> None:
        """Have all be asked for again that was not handed out."""
        for stream in self.streams:
            stream.asked = stream.handed
        self.next_to_request = self.next_to_hand_out

    def hand_out_asked(self) -> None:
        """Count all that was asked for as handed out."""
        for stream in self.streams:
            stream.handed = stream.asked
        self.next_to_hand_out = self.next_to_request
