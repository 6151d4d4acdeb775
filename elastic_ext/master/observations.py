"""Measured steps for the tuner: the profile windows of all ranks, gathered round by round into one measurement. Pure,
and bounded.

A *round* is complete once every rank has reported steps under the same config (its version, and its revision, which
counts the changes made to that inside the job), in one window or several. A window is of one config from its first step
to its last, so that none counts which began before a version came into force; nor, for a while, does one in which
something, such as data workers, was still starting. Of a very large job some ranks are looked at, spread evenly over
it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median

from elastic_ext.profile.breakdown import RankBreakdown, breakdown_of
from elastic_ext.profile.phases import IN_STEPS, Phase
from elastic_ext.profile.reader import view_of
from elastic_ext.records.measures import Measures
from elastic_ext.records.metrics import StepWindow
from elastic_ext.records.text import counted
from elastic_ext.tuner.measurements import StepReport

from .node_metrics import fitting_window
from .wire import master_pb2

__all__ = ["MeasurementRounds", "measured_steps"]

_MOST_RANKS = 1024
"""About how many ranks are looked at, at most."""
_MOST_WINDOWS = 64
"""The most windows of a rank in one round."""
_MOST_SETTLING = 30
"""The most windows of a rank under one config that do not count because data workers are still starting."""
_MOST_NAMED = 4
_MOST_TIMES = 3.0
"""The most by which step times of ranks may differ, as a factor, since ranks take their steps together."""
_LEAST_STEP_SECONDS = 1e-7
_HELD_UP = (Phase.CHANGE, Phase.MEMBERSHIP, Phase.CHECKPOINT, Phase.ROLLED_BACK)


class MeasurementRounds:
    """Gathers the profile windows of a job's ranks into rounds, each of which becomes a StepReport for the tuner."""

    def __init__(self, *, patience_seconds: float) -> None:
        """A rank that has reported nothing ``patience_seconds`` after the first rank of a round counts as silent."""
        self._patience_seconds = patience_seconds
        self._job = 0, 0, 0  # restart, version of the members, world size
        self._ranks: Sequence[int] = ()
        self._config = 0, 0
        self._num_settling: dict[int, int] = {}  # windows of a rank that did not count, under this config
        self._windows: dict[int, list[StepWindow]] = {}  # of the round that is under way
        self._broken: set[int] = set()
        self._began = 0.0
        self._is_silence_told = False
        self.num_windows = 0
        """How many windows of this job all ranks together have reported."""

    @property
    def num_ranks(self) -> int:
        """How many ranks are looked at."""
        return len(self._ranks)

    @property
    def version(self) -> int:
        """The newest config version under which ranks have reported steps; 0 before there is one."""
        return self._config[0]

    def expect(self, restart: int, world_size: int, members: int = 0) -> None:
        """Begin anew for the ranks of a restart, or of a change of members; a call with the same changes nothing."""
        job = restart, members, world_size
        if job == self._job:
            return
        self._job, self._config = job, (0, 0)
        stride = 1 if world_size <= _MOST_RANKS else -(-world_size // _MOST_RANKS) | 1
        self._ranks = range(0, world_size, stride)
        self._is_silence_told = False
        self._begin_round()

    def take(self, now: float, workers: Sequence[master_pb2.Worker]) -> None:
        """Take the windows in a beat's workers, which stay unchanged; ``now`` is in seconds since 1970."""
        for worker in workers:
            if worker.rank in self._ranks:
                for said in worker.windows[-_MOST_WINDOWS:]:
                    self._take(now, worker.rank, said)

    def take_measurement(self, now: float) -> StepReport | None:
        """The measurement of a round that is over; None while ranks are waited for.

        A round is over once every rank has reported possible values or impossible ones (*broken*), or those missing
        are silent. Each round is given once; of incomplete ones that follow each other, only the first. A round in
        which no rank has reported possible values has no steps, and trouble.
        """
        num_told = len(self._windows) + len(self._broken)
        is_late = not 0 <= now - self._began <= self._patience_seconds
        if num_told == 0 or (num_told < len(self._ranks) and not is_late):
            return None
        missing = [rank for rank in self._ranks if rank not in self._windows]
        if missing and not is_late and not self._broken.issuperset(missing):
            return None
        windows, broken = self._windows, self._broken
        self._begin_round()
        was_told, self._is_silence_told = self._is_silence_told, bool(missing)
        if missing and was_told:
            return None
        if not windows:
            return self._no_steps(now, broken)
        return measured_steps(windows, now=now, expected=self._ranks, broken=broken)

    def _take(self, now: float, rank: int, said: master_pb2.StepWindow) -> None:
        window = fitting_window(said, rank)
        if window is not None and (
            window.num_steps == 0 or (window.restart, window.members, window.world_size) != self._job
        ):
            return
        if not self._windows and not self._broken:
            self._began = now
        if window is None:
            self._broken.add(rank)
            return
        self.num_windows += 1
        config = window.config_version, window.config_revision
        if config < self._config:
            return
        if config > self._config:
            self._config = config
            self._num_settling.clear()
            self._begin_round()
            self._began = now
        if window.is_settling and self._num_settling.get(rank, 0) < _MOST_SETTLING:
            self._num_settling[rank] = self._num_settling.get(rank, 0) + 1
            self._began = now  # who waits for workers is not silent
            return
        row = self._windows.setdefault(rank, [])
        row.append(window)
        del row[:-_MOST_WINDOWS]

    def _no_steps(self, now: float, broken: Collection[int]) -> StepReport:
        """The report of a round in which every rank that has reported is ``broken``."""
        version, revision = self._config
        return StepReport(
            time=now,
            version=version,
            revision=revision,
            step=0,
            num_steps=0,
            num_ranks=0,
            world_size=self._job[2],
            num_asked=len(self._ranks),
            step_seconds=0.0,
            trouble=_trouble({}, self._ranks, broken),
        )

    def _begin_round(self) -> None:
        self._windows, self._broken = {}, set()


def measured_steps(
    windows: Mapping[int, Sequence[StepWindow]],
    *,
    now: float,
    expected: Collection[int],
    broken: Collection[int] = (),
) -> StepReport:
    """The measurement that ``windows``, by rank and of one config, give of steps that all ``expected`` ranks took.

    The time of a step is the mean over all steps and not their median, as samples per second are wanted, to which slow
    steps count; changes, checkpoints and rollbacks between two steps are left out. ``broken`` are ranks with impossible
    values.
    """
    steps: dict[int, float] = {}
    breakdowns: list[RankBreakdown] = []
    shares: dict[Phase, list[float]] = {phase: [] for phase in IN_STEPS}  # of steps, by rank
    for rank, row in windows.items():
        view = view_of(row, host="", measures=Measures())
        found = breakdown_of(view)
        breakdowns.append(found)
        step_share = found.step_share_of_wall
        steps[rank] = step_share * sum(view.window.seconds.values()) / view.window.num_steps
        for phase, each in shares.items():
            each.append(found.shares.get(phase, 0.0) / max(step_share, 1e-9))
    last = [row[-1] for row in windows.values()]
    seconds = max(steps.values())
    processors = [each.processor_share for each in breakdowns if each.processor_share is not None]
    peaks = [each.accelerator_peak_bytes for each in last if each.accelerator_peak_bytes is not None]
    held_up = (
        sum(each.seconds.get(phase.label, 0.0) for each in row for phase in _HELD_UP) for row in windows.values()
    )
    return StepReport(
        time=min(max(each.end for each in last), now),
        version=last[0].config_version,
        revision=last[0].config_revision,
        step=max(each.step for each in last),
        num_steps=min(sum(each.num_steps for each in row) for row in windows.values()),
        num_ranks=len(windows),
        world_size=last[0].world_size,
        num_asked=len(expected),
        step_seconds=seconds,
        phases={phase.label: seconds * median(each) for phase, each in shares.items() if max(each) > 0}
        if all(each.is_known for each in breakdowns)
        else {},
        held_up_seconds=max(held_up),
        processor_share=median(processors) if processors else None,
        loading_processor_share=_loading_share(windows),
        peak_bytes=max(peaks, default=None),
        trouble=_trouble(steps, [rank for rank in expected if rank not in windows], broken),
    )


def _loading_share(windows: Mapping[int, Sequence[StepWindow]]) -> float | None:
    """The processor share of training threads while they waited for samples, the median of ranks; None if unknown."""
    label, found = Phase.DATA.label, []
    for row in windows.values():
        waited = sum(each.seconds.get(label, 0.0) for each in row)
        if waited > 0 and any(each.processor_seconds for each in row):
            found.append(min(sum(each.processor_seconds.get(label, 0.0) for each in row) / waited, 1.0))
    return median(found) if found else None


def _trouble(steps: Mapping[int, float], missing: Sequence[int], broken: Collection[int]) -> str:
    """Why the tuner must not decide by these steps, in a sentence; empty where it may."""
    told_nothing = [rank for rank in missing if rank not in broken]
    if broken:
        return f"{_named(sorted(broken))} reported impossible values of steps, such as times that are not finite"
    if told_nothing:
        return f"{_named(told_nothing)} reported no steps for a while, and other ranks did"
    slowest, quickest = max(steps, key=lambda each: steps[each]), min(steps, key=lambda each: steps[each])
    if steps[quickest] < _LEAST_STEP_SECONDS:
        return f"rank {quickest} told of steps that took no time"
    if steps[slowest] > _MOST_TIMES * steps[quickest]:
        return (
            f"rank {slowest} told of steps of {steps[slowest]:.3g} s and rank {quickest} of {steps[quickest]:.3g} s, "
            "though ranks take them together"
        )
    return ""


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= _MOST_NAMED:
        return f"ranks {', '.join(map(str, ranks))}"
    return f"{counted(len(ranks), 'rank')}, rank {ranks[0]} among them,"
