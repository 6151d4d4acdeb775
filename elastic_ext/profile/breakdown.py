"""Where the time of one rank's steps goes, from the windows of its profile. Pure.

For passes, the optimizer's step and waiting for other ranks, the median of single steps counts, which noise hardly
moves. For phases that come in bursts, such as waiting for data, the mean counts: several data workers that are too slow
deliver several batches at once, so that most steps wait for none, and the median is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic_ext.records.logged import sum_logged
from elastic_ext.records.metrics import MERGED_BY, NodeCalibration, StepCensus, StepTrace, StepWindow

from .phases import COMPUTING, IN_STEPS, WAITING, WITHIN_MICRO_STEPS, Phase

__all__ = [
    "RankBreakdown",
    "RankView",
    "Roofline",
    "breakdown_of",
    "is_usable",
    "merged",
    "replicas_of",
    "why_no_verdict",
]

_LEAST_STEPS = 3
_MOST = 1e12  # of anything that is counted or timed: beyond it numbers are taken for broken
_IN_BURSTS = (Phase.DATA, Phase.OTHER)
"""The phases that take long in some steps and nothing in most, so that their mean counts and not their median."""
_PHASES = {phase.label: phase for phase in Phase}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankView:
    """What is known of one rank's training: its profile window, and facts of its device, loader and micro-steps."""

    host: str
    window: StepWindow
    """A profile window of this rank, or several that ``merged`` has made one of."""
    census: StepCensus | None = None
    calibration: NodeCalibration | None = None
    """What the rank's node does at best."""
    num_workers: int | None = None
    """The data workers of this rank's loader; 0 where it makes batches itself, None where that is not known."""
    num_processors: int | None = None
    """The processors of this rank's host that it may use, with all others there; None where that is not known."""
    micro_batch: int | None = None
    """Samples per micro-batch now, where they may differ from those of the census."""
    num_micro_steps: int = 1
    waits_in_passes: bool = False
    """Whether the rank's passes wait for parameters of other ranks, as those of a sharded model do."""
    trace: StepTrace | None = None
    """A traced step of this rank, where passes wait for other ranks: a trace alone tells how long."""

    @property
    def rank(self) -> int:
        return self.window.rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """The seconds that a step would take at least if arithmetic, memory or the host alone took time."""

    compute: float
    """Seconds that a step's arithmetic takes at the device's best."""
    memory: float
    """Seconds that a step's reading and writing of memory takes at the device's best."""
    host: float
    """Seconds that the host takes to start a step's operations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBreakdown:
    """Where one rank's time goes: a step by phase, shares of all time, waiting, and time without a processor."""

    rank: int
    host: str
    step: Mapping[Phase, float]
    """Seconds of a step by phase; the waiting within passes that a trace found is in ``Phase.COMMUNICATION``."""
    shares: Mapping[Phase, float]
    """The share of all of this rank's time that each phase takes."""
    is_known: bool
    """Whether the time within steps is known by phase; else it is in ``Phase.STEP``."""
    processor_share: float | None
    """How much of a processor the training thread had while it should have computed; None where nobody can tell."""
    is_on_accelerator: bool
    roofline: Roofline | None
    waiting_seconds: float
    """Seconds that this rank waits for other ranks in three steps of four at least: the lower quartile."""
    steady_seconds: float
    """Seconds of a step that this rank is busy with by itself, with computing by its lower quartile over steps."""
    overlapped_seconds: float | None = None
    """Seconds of a step in which communication and computing overlap; None where no step was traced."""

    @property
    def step_seconds(self) -> float:
        return sum(self.step.values())

    @property
    def local_seconds(self) -> float:
        """Seconds of a step that this rank is busy with by itself: all but waiting for other ranks."""
        return sum(seconds for phase, seconds in self.step.items() if phase not in WAITING)

    @property
    def computing_seconds(self) -> float:
        return sum(self.step.get(phase, 0.0) for phase in COMPUTING)

    @property
    def cpu_starved_share(self) -> float:
        """The share of the time in steps in which the training thread should have computed and had no processor.

        It counts the time of all steps, and not that of a median one: of short steps some have a processor, some none.
        """
        if self.processor_share is None or self.step_share_of_wall <= 0:
            return 0.0
        computing = sum(self.shares.get(phase, 0.0) for phase in COMPUTING)
        return min((1 - self.processor_share) * computing / self.step_share_of_wall, 1.0)

    @property
    def step_share_of_training(self) -> float:
        """The share of training's time that goes to steps; the rest goes to what holds them up.

        Training's time is without startup and what lies outside of epochs.
        """
        training = 1 - self.shares.get(Phase.STARTUP, 0.0) - self.shares.get(Phase.OUTSIDE, 0.0)
        return min(self.step_share_of_wall / training, 1.0) if training > 0 else 0.0

    @property
    def shares_of_training(self) -> dict[Phase, float]:
        """The share of training's time that each phase takes, as verdicts count it: within steps by the median step."""
        left_out = (Phase.STARTUP, Phase.OUTSIDE)
        of_wall = {phase: share for phase, share in self.shares.items() if phase not in left_out}
        training = sum(of_wall.values()) or 1.0
        of_step = self.step_share_of_training / (self.step_seconds or 1.0)
        in_steps = {phase: seconds * of_step for phase, seconds in self.step.items()}
        return {phase: share / training for phase, share in of_wall.items()} | in_steps

    @property
    def step_share_of_wall(self) -> float:
        """The share of all of this rank's time that goes to steps."""
        return sum(self.shares.get(phase, 0.0) for phase in IN_STEPS)


def merged(windows: Sequence[StepWindow]) -> StepWindow:
    """One window made of several of one rank; ValueError where they are not of one rank under one config.

    The typical step and lower quartiles are means of the windows', weighted by measured steps. Each quantile of step
    lengths is the largest of the windows': an upper bound of that of all steps.
    """
    if not windows:
        raise ValueError("no windows were given to be merged; give at least one")
    if len({(each.rank, each.world_size, each.members, each.restart, *_config(each)) for each in windows}) > 1:
        raise ValueError("windows of several ranks, members, restarts or configs cannot be merged; merge each alone")
    ordered = sorted(windows, key=lambda each: (each.begin, each.end))
    last = ordered[-1]
    logged = _sums_of_logged(ordered)
    quantiles = [each.step_seconds for each in ordered if each.step_seconds]
    return replace(
        last,
        begin=ordered[0].begin,
        typical=_mean_typical(ordered),
        step_seconds=tuple(max(each) for each in zip(*quantiles, strict=False)),
        waiting_seconds=_mean_quartile([(each.num_detailed, each.waiting_seconds) for each in ordered]),
        computing_seconds=_mean_quartile([(each.num_detailed, each.computing_seconds) for each in ordered]),
        logged={name: total / weight for name, (total, weight) in logged.items()},
        logged_weights={name: weight for name, (_, weight) in logged.items()},
        **{name: _MERGING[how]([getattr(each, name) for each in ordered]) for name, how in MERGED_BY.items()},
    )


def replicas_of(window: StepWindow, num_replicas: int | None) -> int:
    """How many replicas of the model take samples of their own: ``num_replicas``, or one per rank if that is None.

    ``num_replicas`` is read from files: an impossible number counts as None.
    """
    return num_replicas if num_replicas is not None and 0 < num_replicas <= _MOST else max(window.world_size, 1)


def why_no_verdict(views: Sequence[RankView], *, is_partial: bool) -> str | None:
    """Why no verdict can be made from these ranks' windows together; None where one can."""
    if not views:
        return "no rank has written a profile of its time yet"
    for view in views:
        if not all(_is_amount(each) for each in _numbers(view.window)):
            return f"the profile of rank {view.rank} holds a value that is no length of time or no number of steps"
    windows = [view.window for view in views]
    ranks = [each.rank for each in windows]
    if len(set(ranks)) < len(ranks):
        return "a rank is given twice; merge its windows first"
    if len({(each.world_size, each.members, each.restart) for each in windows}) > 1:
        return "the ranks' profiles are of different restarts or members; wait until all are of the same"
    if len({_config(each) for each in windows}) > 1:
        return "the ranks tell of different versions of the config; wait until all tell of the same"
    num_missing = windows[0].world_size - len(windows)
    if num_missing > 0 and not is_partial:
        return f"{num_missing} of {windows[0].world_size} ranks have written no profile yet"
    fewest = min(windows, key=lambda each: (each.num_steps, each.rank))
    if fewest.num_steps < _LEAST_STEPS:
        return f"too few steps have ended: {fewest.num_steps} on rank {fewest.rank}; {_LEAST_STEPS} are needed"
    if not all(breakdown_of(view).step_seconds > 1 / _MOST for view in views):
        return "there are ranks whose steps took no time"
    return None


def breakdown_of(view: RankView) -> RankBreakdown:
    """Where one rank's time goes, in the parts that a verdict is made from; the rank's window has to hold steps."""
    window = view.window
    seconds = _by_phase(window.seconds)
    split = _split(seconds)
    total = sum(split.values()) or 1.0
    step, trace = _step_of(window, split), view.trace
    if trace is not None and not _is_possible(trace):
        trace = None
    whole = _with_waits(step, trace)
    return RankBreakdown(
        rank=view.rank,
        host=view.host,
        step=whole,
        shares={phase: spent / total for phase, spent in split.items()},
        is_known=_has_passes(split),
        processor_share=None if _is_on_accelerator(view) else _processor_share(view, seconds),
        is_on_accelerator=_is_on_accelerator(view),
        roofline=_roofline(view),
        waiting_seconds=_waiting_of(window, step, whole),
        steady_seconds=_steady_of(window, step, whole),
        overlapped_seconds=None if trace is None else _seconds_of(trace.overlapped_seconds, step, trace),
    )


# ---- what they are made of ----


def _config(window: StepWindow) -> tuple[int, int]:
    return window.config_version, window.config_revision


def _numbers(window: StepWindow) -> Iterator[object]:
    yield from (window.num_steps, window.num_samples, window.num_detailed)
    for table in (window.seconds, window.processor_seconds, window.typical):
        yield from table.values()
    yield from window.step_seconds
    yield from (each for each in (window.waiting_seconds, window.computing_seconds) if each is not None)


def _is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value <= _MOST


def _added(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: sum(table.get(name, 0.0) for table in tables) for name in names}


_MERGING: Mapping[str, Callable[[list[Any]], Any]] = {
    "sum": sum,
    "by phase": _added,
    "most": lambda values: max((each for each in values if each is not None), default=None),
    "any": any,
}
"""What makes one value of a field's values in several windows, by the word that MERGED_BY has for the field."""


def _sums_of_logged(windows: Sequence[StepWindow]) -> dict[str, tuple[float, float]]:
    """The weighted sum over windows of each number that the script has logged, and the sum of its weights."""
    rows = (row for window in windows for row in window.weighed_logged().items())
    return sum_logged(({name: value}, weight) for name, (value, weight) in rows)


def _mean_typical(windows: Sequence[StepWindow]) -> dict[str, float]:
    """The mean of windows' typical steps, each weighted by its number of measured steps.

    On an accelerator steps are known late: a window may have measured steps and no typical one, or the reverse.
    """
    seen = [(each.typical, max(each.num_detailed, 1)) for each in windows if each.typical]
    total = sum(number for _, number in seen)
    names = dict.fromkeys(name for typical, _ in seen for name in typical)
    return {name: sum(typical.get(name, 0.0) * number for typical, number in seen) / total for name in names}


def _mean_quartile(quartiles: Sequence[tuple[int, float | None]]) -> float | None:
    """The mean of windows' lower quartiles, each weighted by its number of measured steps; None where none has one."""
    seen = [(max(number, 1), seconds) for number, seconds in quartiles if seconds is not None]
    total = sum(number for number, _ in seen)
    return sum(number * seconds for number, seconds in seen) / total if total > 0 else None


def _by_phase(table: Mapping[str, float]) -> dict[Phase, float]:
    """Seconds by Phase, from a table by name; a name that is not known here, of a newer version, is ``Phase.OTHER``."""
    found: dict[Phase, float] = {}
    for label, spent in table.items():
        phase = _PHASES.get(label, Phase.OTHER)
        found[phase] = found.get(phase, 0.0) + spent
    return found


def _split(seconds: Mapping[Phase, float]) -> dict[Phase, float]:
    """Seconds by phase, with those of unmeasured steps shared out as those of measured ones.

    Where no pass was seen, what lies around the passes is not told apart from them: it is in ``Phase.STEP`` too.
    """
    found = dict(seconds)
    if not _has_passes(seconds):
        found[Phase.STEP] = sum(found.pop(phase, 0.0) for phase in (Phase.STEP, Phase.TRANSFER, Phase.OTHER))
        return found
    measured = {phase: found[phase] for phase in WITHIN_MICRO_STEPS if found.get(phase)}
    total = sum(measured.values())
    unmeasured = found.pop(Phase.STEP, 0.0)
    for phase, spent in measured.items():
        found[phase] += unmeasured * (spent / total)
    return found


def _has_passes(seconds: Mapping[Phase, float]) -> bool:
    return any(seconds.get(phase, 0.0) > 0 for phase in (Phase.FORWARD, Phase.BACKWARD))


def _step_of(window: StepWindow, split: Mapping[Phase, float]) -> dict[Phase, float]:
    """Seconds of a step by phase: medians of measured steps, but means of all steps for phases that come in bursts.

    Where no pass was seen there are no medians, and all phases are means.
    """
    typical = _by_phase(window.typical)
    mean = {phase: split.get(phase, 0.0) / window.num_steps for phase in IN_STEPS}
    if not (_has_passes(typical) and _has_passes(split)):
        return mean
    return {phase: mean[phase] if phase in _IN_BURSTS else typical.get(phase, 0.0) for phase in IN_STEPS}


def _with_waits(step: dict[Phase, float], trace: StepTrace | None) -> dict[Phase, float]:
    """A step by phase, with the passes' waiting for other ranks moved to communication, as in the traced step."""
    passes = step.get(Phase.FORWARD, 0.0) + step.get(Phase.BACKWARD, 0.0)
    if trace is None or passes <= 0:
        return step
    waits = _seconds_of(trace.exposed_seconds, step, trace) - step.get(Phase.COMMUNICATION, 0.0)
    waits = min(max(waits, 0.0), passes)
    found = {**step, Phase.COMMUNICATION: step.get(Phase.COMMUNICATION, 0.0) + waits}
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        found[phase] = step.get(phase, 0.0) * (1 - waits / passes)
    return found


def _waiting_of(window: StepWindow, step: Mapping[Phase, float], whole: Mapping[Phase, float]) -> float:
    """Seconds of a step that a rank waits for other ranks, by the lower quartile of steps where the window has one.

    ``whole`` is ``step`` with the passes' waiting, which a trace tells, moved to communication; that is added.
    """
    usual, in_all = (sum(each.get(phase, 0.0) for phase in WAITING) for each in (step, whole))
    return in_all if window.waiting_seconds is None else in_all - usual + min(window.waiting_seconds, usual)


def _steady_of(window: StepWindow, step: Mapping[Phase, float], whole: Mapping[Phase, float]) -> float:
    """Seconds that a rank is busy with by itself, by the lower quartile of steps; phases in bursts count as means.

    Computing is transfer, passes and optimizer together, of which the window's ``computing_seconds`` are the quartile.
    What ``whole`` has of computing is scaled by the quartile over what ``step`` has of it, and never up.
    """
    usual, in_all = (sum(each.get(phase, 0.0) for phase in (Phase.TRANSFER, *COMPUTING)) for each in (step, whole))
    local = sum(seconds for phase, seconds in whole.items() if phase not in WAITING)
    if window.computing_seconds is None or usual <= 0:
        return local
    return local - in_all * (1 - min(window.computing_seconds / usual, 1.0))


def _is_possible(trace: StepTrace) -> bool:
    """Whether a trace holds possible numbers: it is read from a file."""
    return 0 < trace.step_seconds <= _MOST and 0 <= trace.exposed_seconds <= trace.communication_seconds <= _MOST


def _seconds_of(traced: float, step: Mapping[Phase, float], trace: StepTrace) -> float:
    """Seconds that take the same share of a step's ``WITHIN_MICRO_STEPS`` as ``traced`` took of the traced step."""
    return min(traced / trace.step_seconds, 1.0) * sum(step.get(phase, 0.0) for phase in WITHIN_MICRO_STEPS)


def _processor_share(view: RankView, seconds: Mapping[Phase, float]) -> float | None:
    """How much of a processor the training thread had in phases where it has nothing to wait for."""
    had = _by_phase(view.window.processor_seconds)
    phases = (Phase.OPTIMIZER,) if view.waits_in_passes else COMPUTING
    spent = sum(seconds.get(phase, 0.0) for phase in phases)
    if not had or spent <= 0:
        return None
    return min(sum(had.get(phase, 0.0) for phase in phases) / spent, 1.0)


def _is_on_accelerator(view: RankView) -> bool:
    if view.census is not None:
        return not view.census.device.startswith("cpu")
    return view.window.accelerator_bytes is not None


def _roofline(view: RankView) -> Roofline | None:
    census, best = view.census, view.calibration
    if census is None or best is None or not is_usable(census, best) or not 0 < view.num_micro_steps <= _MOST:
        return None
    num, larger = view.num_micro_steps, 1.0  # larger: the micro-batch now, over that of the census
    if view.micro_batch is not None and 0 < view.micro_batch <= _MOST and census.num_samples > 0:
        larger = view.micro_batch / census.num_samples
    num_ops = num * (census.num_ops - census.optimizer_ops) + census.optimizer_ops
    num_bytes = num * larger * (census.num_bytes - census.optimizer_bytes) + census.optimizer_bytes
    return Roofline(
        compute=num * larger * census.num_flops / best.flops_per_second,
        memory=num_bytes / best.bytes_per_second,
        host=num_ops * best.seconds_per_op,
    )


def is_usable(census: StepCensus, best: NodeCalibration) -> bool:
    """Whether a census and a calibration hold possible numbers: they are read from files."""
    counts = (census.num_ops, census.num_bytes, census.num_flops, census.optimizer_ops, census.optimizer_bytes)
    speeds = (best.flops_per_second, best.bytes_per_second)
    return (
        all(0 <= each <= 1e24 for each in counts)
        and 0 <= census.num_samples <= _MOST
        and census.optimizer_ops <= census.num_ops
        and census.optimizer_bytes <= census.num_bytes
        and all(1e-12 <= each <= 1e24 for each in speeds)
        and 0 <= best.seconds_per_op <= _MOST
    )
