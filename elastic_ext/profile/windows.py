"""WindowAccumulator: the steps of a rank summed up over a second or more, and the memory that the process holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import psutil
import torch

from elastic_ext.ranks.world import World
from elastic_ext.records.metrics import StepWindow

from .phases import COMPUTING, IN_STEPS, WAITING, Phase, Spent, Timeline

__all__ = ["MemoryInUse", "TrainingProgress", "WindowAccumulator", "memory_held", "window_seconds"]


# --- the steps of a rank summed up over a second or more, for files that people and programs read --------------------
# A window ends once it is as long as the run's age asks for, and where another config comes into force: so their number
# grows slowly, and what a change has brought is seen at once.

_LEAST_SECONDS, _MOST_SECONDS = 1.0, 60.0
_PART_OF_AGE = 1 / 1000
_YOUNG_SECONDS = 30.0  # after a change, windows are short again
_MOST_STEPS = 1024  # of which quantiles are made
_QUANTILES = (0.1, 0.5, 0.9, 1.0)
_LABELS = tuple(phase.label for phase in Phase)


class TrainingProgress(NamedTuple):
    """How far training is when a profile window ends."""

    step: int
    num_samples: int
    """Samples that all ranks have taken since the process began."""
    config_version: int
    config_revision: int
    """How often the job itself has changed that version of the config, as config/elastic_config.py says."""
    is_settled: bool = True
    """Whether everything that should run is running, such as a loader's workers."""
    logged: Mapping[str, tuple[float, float]] = {}
    """The means of the numbers that the script has logged since the last window, each with the sum of its weights."""


class WindowAccumulator:
    """Sums one rank's steps up into profile windows of a second or more; ``close`` gives each window."""

    def __init__(
        self,
        timeline: Timeline,
        *,
        rank: int,
        world_size: int,
        restart: int,
        begin: float,
        memory: Callable[[], MemoryInUse],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``begin`` is the wall-clock time, in seconds since 1970, from which on ``timeline`` has counted time.

        That is when it began, less the time that ``Timeline.add_past`` has added.

        ``restart`` is how often the launcher has restarted the job's processes.
        """
        self.timeline = timeline
        self._rank, self._world_size, self._restart = rank, world_size, restart
        self._members = 0  # as a world has them that has started so
        self._begin = begin
        self._memory = memory
        self._clock = clock
        self._first = self._young_since = self._opened = clock()
        self._due = self._opened + _LEAST_SECONDS
        self._at_open = [0] * (2 * len(Phase))  # the time spent by phase as the window began
        self._steps: list[tuple[Spent, Spent]] = []  # of some measured steps: the time spent as it began, as it ended
        self._num_measured = 0  # steps
        self._num_known, self._stride = 0, 1  # measured steps whose times are known; ``_steps`` has each ``_stride``-th
        self._num_steps = self._num_samples = 0
        self._counts = 0, 0  # tokens, bytes
        self._is_settled = True  # as the window began
        self._config = 0, 0  # that was in force as the window began

    def take_world(self, world: World) -> None:
        """Count what follows as time of this rank in ``world``; the window of the world before was closed."""
        self._rank, self._world_size, self._members = world.rank, world.size, world.members

    @property
    def num_steps(self) -> int:
        """How many steps have ended in the open window."""
        return self._num_steps

    def end_step(self, *, is_measured: bool) -> bool:
        """Count a step that has ended; gives whether it is time to end the window."""
        self._num_steps += 1
        self._num_measured += is_measured
        for each in self.timeline.end_step(is_measured=is_measured):
            if self._num_known % self._stride == 0:
                self._steps.append(each)
            self._num_known += 1
        if len(self._steps) >= _MOST_STEPS:
            del self._steps[1::2]
            self._stride *= 2
        return self._clock() >= self._due

    def end_unmeasured_steps(self, number: int) -> bool:
        """Count so many steps that were not measured; gives whether it is time to end the window."""
        self._num_steps += number - 1
        return self.end_step(is_measured=False)

    def count(self, num_tokens: int, num_bytes: int) -> None:
        """Count tokens and bytes that the model was given in measured steps of this window."""
        self._counts = self._counts[0] + num_tokens, self._counts[1] + num_bytes

    def close(self, progress: TrainingProgress) -> StepWindow:
        """End the window that is open, and begin the next."""
        spent = self.timeline.take_spent()
        memory = self._memory()
        steps = _summed_up(self._steps)
        in_all = _between(self._at_open, spent)
        seconds = _named(in_all[: len(Phase)])
        end = self._begin + sum(seconds.values())
        window = StepWindow(
            begin=self._begin,
            end=end,
            rank=self._rank,
            world_size=self._world_size,
            restart=self._restart,
            members=self._members,
            step=progress.step,
            num_steps=self._num_steps,
            config_version=self._config[0],
            config_revision=self._config[1],
            seconds=seconds,
            processor_seconds=_named(in_all[len(Phase) :]),
            typical=steps.typical,
            step_seconds=steps.lengths,
            waiting_seconds=steps.waiting_seconds,
            computing_seconds=steps.computing_seconds,
            is_settling=not (self._is_settled and progress.is_settled),
            num_samples=progress.num_samples - self._num_samples,
            num_tokens=self._counts[0],
            num_bytes=self._counts[1],
            num_detailed=self._num_measured,
            memory_bytes=memory.memory_bytes,
            accelerator_bytes=memory.accelerator_bytes,
            accelerator_peak_bytes=memory.accelerator_peak_bytes,
            logged={name: mean for name, (mean, _) in progress.logged.items()},
            logged_weights={name: weight for name, (_, weight) in progress.logged.items()},
        )
        self._begin, self._num_samples, self._is_settled = end, progress.num_samples, progress.is_settled
        self._config = progress.config_version, progress.config_revision
        self._at_open = spent
        self._steps, self._counts, self._num_steps = [], (0, 0), 0
        self._num_measured, self._num_known, self._stride = 0, 0, 1
        now = self._opened = self._clock()
        self._due = now + window_seconds(now - self._first, now - self._young_since)
        return window

    def expect_change(self) -> None:
        """Make windows short for a while: coming steps may be unlike those before."""
        self._young_since = self._clock()
        self._due = min(self._due, self._opened + _LEAST_SECONDS)


def window_seconds(age: float, since_change: float) -> float:
    """How long a window is ``age`` seconds after the first, and ``since_change`` seconds after something changed."""
    if since_change < _YOUNG_SECONDS:
        return _LEAST_SECONDS
    return min(max(age * _PART_OF_AGE, _LEAST_SECONDS), _MOST_SECONDS)


def _named(nanoseconds: list[int]) -> dict[str, float]:
    """Seconds by the phases' names, without phases in which no time was spent."""
    return {label: spent / 1e9 for label, spent in zip(_LABELS, nanoseconds, strict=True) if spent > 0}


def _between(before: Spent, after: Spent) -> Spent:
    return [now - then for then, now in zip(before, after, strict=True)]


class _MeasuredSteps(NamedTuple):
    """What the measured steps of a window took, in medians and quantiles of seconds."""

    typical: dict[str, float]
    """The median of each phase in a step."""
    lengths: tuple[float, ...] = ()
    """Step lengths at ``_QUANTILES``."""
    waiting_seconds: float | None = None
    """The lower quartile of waiting for other ranks in a step."""
    computing_seconds: float | None = None
    """The lower quartile of transfer, passes and optimizer together in a step."""


def _summed_up(ends: list[tuple[Spent, Spent]]) -> _MeasuredSteps:
    """The steps at whose begin and end so much time had been spent, in medians and quantiles."""
    if not ends:
        return _MeasuredSteps({})
    steps = [_between(before, after)[: len(Phase)] for before, after in ends]
    middle, last = len(steps) // 2, len(steps) - 1
    typical = [sorted(each)[middle] for each in zip(*steps, strict=True)]
    lengths = sorted(sum(step[phase] for phase in IN_STEPS) for step in steps)
    quantiles = tuple(round(lengths[int(part * last)] * 1e-9, 9) for part in _QUANTILES)
    computing = _lower_quartile(steps, (Phase.TRANSFER, *COMPUTING))
    return _MeasuredSteps(_named(typical), quantiles, _lower_quartile(steps, WAITING), computing)


def _lower_quartile(steps: list[Spent], phases: tuple[Phase, ...]) -> float:
    """The lower quartile of the seconds that ``phases`` take together in a step."""
    found = sorted(sum(step[phase] for phase in phases) for step in steps)
    return round(found[len(found) // 4] * 1e-9, 9)


# --- what this process holds of memory now ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryInUse:
    """The memory that this process holds; fields are named as the metrics are.

    Those of the accelerator are of tensors, None where no CUDA is in use.
    """

    memory_bytes: int | None
    """Bytes of host memory; None where the system does not say, as where this process may open no more files."""
    accelerator_bytes: int | None = None
    accelerator_peak_bytes: int | None = None


def memory_held() -> MemoryInUse:
    """The memory that this process holds now."""
    try:
        held: int | None = psutil.Process().memory_info().rss
    except (OSError, psutil.Error):
        held = None
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return MemoryInUse(
            memory_bytes=held,
            accelerator_bytes=torch.cuda.memory_allocated(),
            accelerator_peak_bytes=torch.cuda.max_memory_allocated(),
        )
    return MemoryInUse(memory_bytes=held)
