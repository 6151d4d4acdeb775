"""Stream: the samples of an IterableDataset as one worker has them, which come again where they are asked for again.

Whoever makes batches asks it instead of the dataset: each request says which of the stream's samples are wanted, by
their numbers. So no sample is lost with a batch that nobody took, and none comes twice.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from .copied import Copied

__all__ = ["START", "Answer", "Mark", "Request", "Stream", "can_tell_state"]


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a stream from which it can go on."""

    num_samples: int
    """That lie before it."""
    state: Copied | None = None
    """What the dataset's ``state_dict`` gave there; without one, the way to it is to pass all samples before it."""


START = Mark(0)

_SAMPLES_PER_STATE = 50.0
"""How many times as long samples have to take as the state that is told of them, where nobody is known to want it."""


@dataclass(frozen=True, slots=True, repr=False)
class Request:
    """Some samples of one stream, as a batch."""

    slot: int
    loop: int
    """Which loop over the dataset they are of."""
    attempt: int
    """How often the loop has gone elsewhere."""
    start: int
    num_samples: int
    keep_from: int
    """Samples before it are not asked for again."""
    mark: Mark | None = None
    """At or before ``start``: where to go if the stream is not there; without one it answers that it is lost."""
    is_raw: bool = False
    """As a list of samples, not collated."""
    is_whole: bool = False
    """Fewer samples than that make no batch: they are counted, and not collated."""
    is_marked: bool = False
    """Somebody will want to go on behind it: the dataset tells its state there, whatever that takes."""
    seed: int = 0
    """What a data pipe shuffles by in this loop, alike in all workers and on all ranks."""

    def __repr__(self) -> str:
        last = self.start + self.num_samples - 1
        which = f"{self.start} to {last}" if last > self.start else str(last)
        return f"{which} of the stream of worker {self.slot}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request."""

    batch: Any = None
    num_samples: int = 0
    """In the batch; fewer than asked for where the stream ends."""
    mark: Mark | None = None
    """Behind the last of them, where the dataset has told its state."""
    is_lost: bool = False
    """The stream is not where the request begins: ask again, and say how to come there."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """What came in the place of a sample: it counts as one, and comes again where the sample would."""

    error: BaseException


def can_tell_state(dataset: Any) -> bool:
    """Whether a dataset can go on from where it was."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")


class Stream:
    """One worker's; ``stream[request]`` is the answer.

    A state may be large, and often nobody ever goes on from it: where no request is marked, all states together take a
    fiftieth of the time that samples take. Who goes on from the last one passes what came after it, which then takes
    fifty times as long as a state, or a batch, at most.

    ``share_out`` is called with the dataset and a request's seed before the dataset is iterated over.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        *,
        auto_collation: bool,
        share_out: Callable[[Any, int], None] | None = None,
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
        self._due_seconds = 0.0  # as many as make it due
        self._loop = self._attempt = -1
        self._seed = 0
        self._iterator: Iterator[Any] = iter(())
        self._has_ended = False
        self._at = 0  # samples of the loop that were drawn
        self._kept: deque[Any] = deque()  # the last of them, which may be asked for again

    def __getitem__(self, request: Request) -> Answer:
        if (request.loop, request.attempt) != (self._loop, self._attempt) or request.start < self._at - len(self._kept):
            if request.mark is None:
                return Answer(is_lost=True)
            self._seed = request.seed
            self._go_to(request.mark, is_new=request.loop != self._loop)
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
            return Answer()
        for sample in samples:
            if type(sample) is _Failed:
                raise sample.error
        mark = None
        # Of a stream that has ended the state may be that of the next epoch's beginning.
        if self._tells_state and not self._has_ended and self._at == request.start + len(samples):
            mark = self._marked(request.is_marked)
        if request.is_raw:
            return Answer(samples, len(samples), mark)
        if request.is_whole and len(samples) < request.num_samples:
            return Answer(None, len(samples), mark)
        return Answer(self._collate_fn(samples if self._auto_collation else samples[0]), len(samples), mark)

    def _pass_to(self, place: int, *, keeps: bool) -> BaseException | None:
        """Draw what lies before a place. A sample that cannot be had counts as one: no batch waits for it.

        Gives what came instead of the last one, if that could not be had.
        """
        error = None
        while self._at < place and not self._has_ended:
            error = self._draw(keeps=keeps) or (error if self._has_ended else None)
        return error

    def _draw(self, *, keeps: bool = True) -> BaseException | None:
        """Draw the next sample, if there is one; gives what came instead of it."""
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

    def _marked(self, is_wanted: bool) -> Mark | None:
        """The place behind what is drawn, if it is wanted, or its state has become due."""
        if not is_wanted and self._num_seconds < self._due_seconds:
            return None
        began = self._clock()
        mark = Mark(self._at, Copied.of(self.dataset.state_dict()))
        self._num_seconds, self._due_seconds = 0.0, _SAMPLES_PER_STATE * (self._clock() - began)
        return mark

    def _go_to(self, mark: Mark, *, is_new: bool) -> None:
        self._kept.clear()
        self._has_ended = False
        self._at = 0 if mark.state is None else mark.num_samples
        self._num_seconds = self._due_seconds = 0.0
        try:
            self._iterator = self._begun(mark, is_new=is_new)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._iterator = _Raising(error)

    def _begun(self, mark: Mark, *, is_new: bool) -> Iterator[Any]:
        if self._tells_state:
            if is_new:
                self._first_state = Copied.of(self.dataset.state_dict())
            state = self._first_state if mark.state is None else mark.state
            if state is not None and (mark.state is not None or not is_new):
                self.dataset.load_state_dict(state.value())  # a new loop begins where the dataset is, as torch's does
        if self._share_out is not None:
            self._share_out(self.dataset, self._seed)
        return iter(self.dataset)


class _Raising(Iterator[Any]):
    """The samples of a dataset that could not even begin: whoever asks for one is told why, as often as they ask."""

    def __init__(self, error: BaseException) -> None:
        self._error, self._trace = error, error.__traceback__

    def __next__(self) -> Any:
        raise self._error.with_traceback(self._trace)  # which grows with each time that it is raised
