"""How long steps at a point take, when a measurement can be trusted, and when a search has to begin again. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic_ext.profile.stragglers import ChangeDetector, PaceChange
from elastic_ext.records.metrics import JobFacts

from .space import Point

__all__ = [
    "LEAST_GAIN",
    "PROBE_STEPS",
    "PaceWatch",
    "PointMeasurement",
    "SlowdownCheck",
    "StepReport",
    "Trial",
    "changed_facts",
    "merged_step_times",
    "why_untrusted",
]


# --- what steps under one config took, over all ranks: what a tuner learns from --------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """A report of consecutive steps that were measured under one version and revision of the config, over all ranks."""

    time: float
    """When the last of the steps ended, in seconds since 1970."""
    version: int
    revision: int = 0
    """How often the job itself had changed the config of that version."""
    step: int
    """Steps that had committed since training began, at the end of the last of these."""
    num_steps: int
    num_ranks: int
    """Ranks that told of these steps."""
    world_size: int
    """Ranks that the job has."""
    num_asked: int | None = None
    """Ranks whose reports are expected: a sample of them in a very large job; None where all are."""
    step_seconds: float
    """The mean step time of the slowest rank; slow steps are not left out of it."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """The seconds of a step by phase, as profile/phases.py names phases: ``step_seconds`` times the median over ranks
    of the phase's share; empty where steps of some rank were not timed by phase."""
    held_up_seconds: float = 0.0
    """Seconds beside the steps in which training waited for checkpoints or changes, or was rolled back."""
    processor_share: float | None = None
    """Share of a processor that the training thread had while it computed."""
    loading_processor_share: float | None = None
    """Share of a processor that the training thread had while it waited for samples; None where it did not wait.

    Without workers the thread loads samples itself: a small share says that it waits for them more than it computes.
    """
    peak_bytes: int | None = None
    """The most that an accelerator of any rank held at once, in these steps or before."""
    slow_rank: str = ""
    """Which rank keeps the others waiting, as a sentence of profile/stragglers.py; empty where none does."""
    trouble: str = ""
    """Why nothing is to be decided by these steps, such as a rank that is silent, as a sentence; else empty."""


# --- what steps at one point take, out of what is seen of them, and why it is not to be trusted ----------------------
# The first steps after a change are not counted: workers start, caches fill, memory is laid out anew.

PROBE_STEPS = 3
"""Steps that are measured at a point, where tuning.probe_steps says nothing, in at least as many reports: steps that
follow each other within a second have much in common that tells nothing of later ones."""
_MUCH_LONGER = 1.5
"""A trial ends early where its steps take more than so many times as long as those of the best point."""
_TIMES_AS_MANY = 4
"""Where step times differ, at most so many times the wanted number of steps is measured."""
_SCATTERED = 0.35
"""Spread of step times, as ``_spread`` gives it, above which they tell nothing."""
_UNLIKE = 0.06
"""Spread of step times, as ``_spread`` gives it, above which more steps are measured."""
_MOST_OF_A_STEP = 1.5
"""How many step times all phases may take together: each phase's share is its own median over ranks, and such medians
may add up to more than 1."""
_OF_A_MEDIAN = 1.25 * 1.4826
"""The standard error of a median is this times half the interquartile range, divided by the root of the
number of values."""
_LEAST, _MOST = 1e-7, 1e6  # seconds; beyond them numbers are taken for broken


@dataclass(frozen=True, slots=True)
class PointMeasurement:
    """The measurement of one point of a search space: how long its steps take, by all reports of a trial."""

    point: Point
    seconds: float
    """The median over the reports of their mean step times."""
    spread: float
    """Half the interquartile range of the logarithms of step times: about a share of the step time."""
    num_steps: int
    num_reports: int
    """Reports that the steps came in."""
    unsure: float = 0.0
    """The standard error of the logarithm of ``seconds``: about a share of the step time."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """The seconds of a step by phase; empty where no step was timed by phase."""
    loading_share: float | None = None
    """Share of a processor that the training thread had while it loaded samples itself; None where workers did."""
    peak_bytes: int | None = None
    """The most that an accelerator of any rank has held at once; None where nobody told."""
    held_up_seconds: float = 0.0
    """Seconds that training waited beside the steps, above all for the change to this point."""
    is_brief: bool = False
    """Whether the trial ended early, since its steps clearly took long."""

    @property
    def waited_share(self) -> float:
        """Share of a step that was waited for samples."""
        return min(self.phases.get("data", 0.0) / self.seconds, 1.0)


class Trial:
    """The measuring of one point, report by report, until enough steps are known."""

    def __init__(self, point: Point, *, version: int, revision: int, probe_steps: int) -> None:
        self.point = point
        self.version = version
        self.revision = revision
        self._wanted = probe_steps
        self._reports: list[StepReport] = []
        self._num_passed_over = 0
        self._held_up = 0.0

    def add(self, report: StepReport) -> None:
        """Take a report of steps at the point; the first report is passed over."""
        self._held_up += report.held_up_seconds
        if not self._num_passed_over:
            self._num_passed_over = report.num_steps
        else:
            self._reports.append(report)

    def is_done(self, best_seconds: float | None) -> bool:
        """Whether enough steps are known, where steps of the best point so far take ``best_seconds``.

        So it is where all are clearly slower than those of the best point; where the wanted number is known and their
        times are alike; and where _TIMES_AS_MANY times that number is known, however much they differ.
        """
        if not self._reports:
            return False
        if self._is_clearly_slow(best_seconds):
            return True
        if not self._has(1):
            return False
        return self._has(_TIMES_AS_MANY) or _spread(self._step_seconds) <= _UNLIKE

    @property
    def why_no_result(self) -> str:
        """Why the trial gives no step time: its reports differ too much. A sentence; empty where it gives one."""
        spread = _spread(self._step_seconds)
        if spread <= _SCATTERED:
            return ""
        fast, slow = min(self._step_seconds), max(self._step_seconds)
        return (
            f"steps took from {_milliseconds(fast)} to {_milliseconds(slow)} under version {self.version}, "
            "and nothing changed between them"
        )

    @property
    def num_steps(self) -> int:
        """Steps measured so far, without those of the first report."""
        return sum(each.num_steps for each in self._reports)

    def measured(self, best_seconds: float | None) -> PointMeasurement:
        """The step times so far; called only after a report beyond the first.

        ``best_seconds`` is the step time of the best point so far, None where there is none.
        """
        peaks = [each.peak_bytes for each in self._reports if each.peak_bytes is not None]
        names = dict.fromkeys(name for each in self._reports for name in each.phases)
        working = [each.loading_processor_share for each in self._reports if each.loading_processor_share is not None]
        looked_at = [each.phases for each in self._reports if each.phases]
        return PointMeasurement(
            point=self.point,
            seconds=statistics.median(self._step_seconds),
            spread=_spread(self._step_seconds),
            num_steps=self.num_steps,
            num_reports=len(self._reports),
            unsure=_OF_A_MEDIAN * _spread(self._step_seconds) / math.sqrt(len(self._step_seconds)),
            phases={name: statistics.median(each.get(name, 0.0) for each in looked_at) for name in names},
            loading_share=statistics.median(working) if working and not self.point.num_workers else None,
            peak_bytes=max(peaks, default=None),
            held_up_seconds=self._held_up,
            is_brief=not self._has(1) and self._is_clearly_slow(best_seconds),
        )

    def _has(self, times: int) -> bool:
        """Whether ``times`` times as many steps as are wanted are known, in ``times`` times as many reports."""
        num_reports = min(self._wanted, PROBE_STEPS)
        return self.num_steps >= times * self._wanted and len(self._reports) >= times * num_reports

    @property
    def _step_seconds(self) -> list[float]:
        """The mean step time of each report."""
        return [each.step_seconds for each in self._reports]

    def _is_clearly_slow(self, best_seconds: float | None) -> bool:
        """Whether all reports are of steps much longer than ``best_seconds``; a single report may have been held up."""
        if best_seconds is None or len(self._reports) < min(2, self._wanted):
            return False
        return min(self._step_seconds) > _MUCH_LONGER * best_seconds


def merged_step_times(one: PointMeasurement, other: PointMeasurement) -> PointMeasurement:
    """The step times of one point out of two trials of it, ``other`` the newer one.

    ``seconds`` is the geometric mean by number of steps. Phases, memory and waits are those of ``other``.
    """
    num_steps = one.num_steps + other.num_steps
    logs = one.num_steps * math.log(one.seconds) + other.num_steps * math.log(other.seconds)
    return replace(
        other,
        seconds=math.exp(logs / num_steps),
        spread=max(one.spread, other.spread),
        num_steps=num_steps,
        num_reports=one.num_reports + other.num_reports,
        unsure=max(one.unsure, other.unsure) / math.sqrt(2),
        is_brief=one.is_brief and other.is_brief,
    )


def why_untrusted(report: StepReport, facts: JobFacts) -> str:
    """Why nothing is to be decided by the steps ``report``, as a sentence; empty where they can be trusted."""
    if report.trouble:
        return report.trouble
    num_asked = report.world_size if report.num_asked is None else report.num_asked
    if report.num_ranks < num_asked:
        return f"only {report.num_ranks} of {num_asked} ranks have reported their steps"
    if report.world_size != facts.world_size:
        ranks = f"a job of {report.world_size} ranks, and rank 0 has last described a job of {facts.world_size}"
        return f"steps are reported for {ranks}"
    if not (math.isfinite(report.step_seconds) and _LEAST <= report.step_seconds <= _MOST) or report.num_steps < 1:
        return f"a step is said to take {report.step_seconds:g} s over {report.num_steps} steps, which cannot be"
    lengths = report.phases.values()
    if not all(math.isfinite(each) and each >= 0 for each in lengths):
        name = next(name for name, each in report.phases.items() if not (math.isfinite(each) and each >= 0))
        return f"{name} is said to take {report.phases[name]:g} s of a step, which cannot be"
    total = math.fsum(lengths)
    if total > _MOST_OF_A_STEP * report.step_seconds:
        return (
            f"the parts of a step add up to {_milliseconds(total)}, and a step is said to take "
            f"{_milliseconds(report.step_seconds)}"
        )
    return ""


def _spread(lengths: Sequence[float]) -> float:
    """Half the interquartile range of the logarithms of step times; 0 for fewer than two."""
    if len(lengths) < 2:
        return 0.0
    low, _, high = statistics.quantiles((math.log(each) for each in lengths), n=4, method="inclusive")
    return (high - low) / 2


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


# --- steps that take much longer than was expected -------------------------------------------------------------------
# Is it the point that was tried, or has the job's pace changed?
#
# At a point that was measured before, the two step times tell. A measurement at a new point is set aside until the best
# point has been measured again: if steps there take as long as before, it was the new point.

_OTHER_PACE = 0.2
"""Difference of the logarithms of two step times of one point, above which the job's pace has changed in between."""
_DOUBTFUL_LONGER = 0.4
_DEVIATIONS = 2.0
"""A step time is doubted whose logarithm is above the expected one by so many standard deviations, and by at least
_DOUBTFUL_LONGER."""


class SlowdownCheck:
    """The check whether steps are slower than expected because of their point, or because the whole job became slower.

    The measurement in question is kept here until the best point has been measured again.
    """

    def __init__(self) -> None:
        self._set_aside: PointMeasurement | None = None

    def is_doubtful(self, measured: PointMeasurement, expected_seconds: float | None, unsure: float) -> bool:
        """Whether the best point is to be measured again before ``measured`` is learnt, which is set aside if so.

        ``unsure`` is the standard deviation of the logarithm of ``expected_seconds``.
        """
        if expected_seconds is None:
            return False
        if math.log(measured.seconds / expected_seconds) < max(_DOUBTFUL_LONGER, _DEVIATIONS * unsure):
            return False
        self._set_aside = measured
        return True

    def step_time_ratio(self, measured: PointMeasurement, before: PointMeasurement | None) -> float | None:
        """``measured`` divided by the step time ``before`` of the same point; None where the two are much alike.

        None too where there is nothing to compare: nothing was measured before, or in a trial that ended early.
        """
        if before is None or before.is_brief:
            return None
        ratio = measured.seconds / before.seconds
        return ratio if abs(math.log(ratio)) > _OTHER_PACE else None

    def pop_set_aside(self) -> PointMeasurement | None:
        """The measurement that was set aside, if any, which is forgotten here."""
        aside, self._set_aside = self._set_aside, None
        return aside


# --- whether what a search has found still holds, or the search has to begin again, and why --------------------------
# Two things are compared: steps with those before them, and facts of a job with those that a search was made for.

LEAST_GAIN = 0.05
"""The least gain, as a share, that is worth advice, a size trial (course.py), or another search after one that has
ended."""
_NUM_NAMED = 240
"""Reports for which a slow rank is remembered: a change of pace is found some time after a rank causes it."""


class PaceWatch:
    """A watch for changes of pace in the steps at the point that was settled on."""

    def __init__(self) -> None:
        self._detector = ChangeDetector(least_seconds=0.0)  # a report has many steps where they are short
        self._slow_rank = ""
        self._num_since = 0

    def see(self, report: StepReport) -> PaceChange | None:
        """Take a report of steps; gives a change of pace at the report that shows it, else None."""
        self._num_since += 1
        if report.slow_rank:
            self._slow_rank, self._num_since = report.slow_rank, 0
        return self._detector.see(report.step, report.step_seconds, (report.version, report.revision))

    def why(self, change: PaceChange) -> str:
        """A change of pace as a sentence, that begins with the rank that keeps the others waiting, if any."""
        if self._slow_rank and self._num_since <= _NUM_NAMED and change.ratio > 1:
            return f"{self._slow_rank}: {change.text}"
        return change.text


def changed_facts(before: JobFacts, now: JobFacts) -> str:
    """What has changed about a job so that its search has to begin again, as a sentence; empty where nothing has."""
    if now.world_size != before.world_size:
        return f"{now.world_size} ranks train instead of {before.world_size}"
    if now.members != before.members:
        return "others of the job's workers train together"
    if now.restart != before.restart:
        return "the job's processes were started again"
    if now.num_local != before.num_local or now.device != before.device:
        ranks = f"{now.num_local} ranks with {now.device} per machine"
        return f"the job has {ranks}, before {before.num_local} with {before.device}"
    if now.global_batch != before.global_batch:
        return f"a step has {now.global_batch:,} samples instead of {before.global_batch:,}"
    if now.num_replicas != before.num_replicas:
        return f"{now.num_replicas} replicas of the model have samples of their own instead of {before.num_replicas}"
    if now.share != before.share:
        return f"a rank has {now.share:,} samples of a step instead of {before.share:,}"
    if now.num_blocks != before.num_blocks:
        return f"the model has {now.num_blocks} blocks instead of {before.num_blocks}"
    if _plain(now.choices) != _plain(before.choices) or dict(now.fixed) != dict(before.fixed):
        return "the keys that the job can change while it trains, or their values, are not those of before"
    return ""


def _plain(choices: Mapping[str, object]) -> dict[str, list[object]]:
    """The choices as lists: what was read from JSON equals the tuples that it was written from."""
    return {key: list(each) if isinstance(each, (list, tuple)) else [each] for key, each in choices.items()}
