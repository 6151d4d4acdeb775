"""The global batch sizes that a job may have, how much a sample teaches at each, and which would teach faster. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from elastic_ext.config.keys import TuningSection
from elastic_ext.config.lr_scaling import rate_factor
from elastic_ext.records.metrics import JobFacts, LearningFacts

from .decisions import Decision
from .explain import change_in_words, number_in_words, rate_in_words, size_change_in_words
from .measurements import LEAST_GAIN, PointMeasurement
from .space import Point

if TYPE_CHECKING:
    from .search import Search

__all__ = [
    "GLOBAL_BATCH_KEY",
    "LEARNING_RATE_KEY",
    "AllowedBatchSizes",
    "BatchSizeChoice",
    "BatchSizeProposal",
    "SizeVerdict",
    "allowed_sizes",
    "facts_at",
    "may_tune_global_batch",
    "why_global_batch_fixed",
]


# --- how many samples a step may have, what a sample teaches then, and what becomes of learning rates ----------------
# Words: a *size* is a global batch size, the samples of a step over all ranks. The *reference size* is the one that the
# user's learning rate was chosen for (``first_batch`` in the facts). The *noise scale* is the size at which a step's
# gradient has as much noise as gradient. The *efficiency* of a size is how much a sample teaches in steps of it,
# relative to the reference size: (noise scale + reference size) / (noise scale + size), since larger steps know better
# where to go, and there are fewer of them. The *progress* of a size is what one step of it teaches: size * efficiency,
# in samples at the reference size.

GLOBAL_BATCH_KEY = "global_batch_size"
LEARNING_RATE_KEY = "optimizer.learning_rate"
_MICRO_BATCH_KEY = "dataloader.batch_size"
_RULES = ("linear", "sqrt", "adascale")
_GROWTHS = (1.5, 2.0)
"""Factors by which the global batch may grow at once: learning rates follow, and learning should not jump."""
_MOST_TIMES = 2
"""Listed sizes are tried up to so many times the present one; where there is none, the next larger one is tried."""
_MORE_NOISE = 1.25
"""How many times the noise scale may grow until sizes are looked at again: the learning rate must then be
within bounds too."""
_CLOSE = 1e-9
"""Share by which a learning rate may exceed a bound, for rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllowedBatchSizes:
    """The global batch sizes that one job may have within its user's bounds, and what a sample teaches at each."""

    learning: LearningFacts
    present: int
    """The global batch size now."""
    least: int
    most: int
    listed: tuple[int, ...] | None
    """The only sizes that are allowed, where a person or the job lists them; else None."""
    quantum: int
    """Sizes are multiples of this."""
    learning_rate: float | None
    """The user's learning rate, for the reference size; None where the job tells of none."""
    learning_rate_bounds: tuple[float, float] | None
    """The bounds of the learning rate that the rule gives; None where the user gives none."""

    @property
    def reference_size(self) -> int:
        """The global batch size that the user's learning rate was chosen for."""
        return self.learning.first_batch

    def efficiency(self, size: int, noise: float) -> float:
        """The statistical efficiency of ``size``: how much a sample teaches, 1 at the reference size."""
        return (noise + self.reference_size) / (noise + size)

    def progress(self, size: int, noise: float) -> float:
        """How much a step of ``size`` teaches: how many samples teach as much at the reference size."""
        return size * self.efficiency(size, noise)

    def learning_rate_factor(self, size: int, noise: float) -> float:
        """The factor on the user's learning rate, by the job's rule, in steps of ``size``."""
        reference = self.reference_size
        if self.learning.rule == "linear":
            return rate_factor("linear", reference, size)
        if self.learning.rule == "sqrt":
            return rate_factor("sqrt", reference, size)
        return self.progress(size, noise) / reference  # which is AdaScale's gain

    def may_become(self, size: int, noise: float) -> bool:
        """Whether ``size`` keeps to all bounds, and still does if noise grows until sizes are looked at again."""
        return self.may_stay(size, noise) and self.may_stay(size, _MORE_NOISE * noise)

    def may_stay(self, size: int, noise: float) -> bool:
        """Whether ``size`` keeps to all bounds now; the reference size does, since the user has trained with it."""
        if size == self.reference_size:
            return True
        if not self.least <= size <= self.most or (self.listed is not None and size not in self.listed):
            return False
        if self.learning_rate_bounds is None or self.learning_rate is None:
            return True
        low, high = self.learning_rate_bounds
        found = self.learning_rate * self.learning_rate_factor(size, noise)
        return low * (1 - _CLOSE) <= found <= high * (1 + _CLOSE)

    def larger(self) -> list[int]:
        """The next larger sizes that may be tried, in ascending order."""
        if self.listed is not None:
            found = sorted(size for size in self.listed if size > self.present and size % self.quantum == 0)
            return [size for size in found if size <= _MOST_TIMES * self.present] or found[:1]
        least = self._up(max(self.least, self.present + 1))
        wanted = {max(self._down(min(times * self.present, self.most)), least) for times in _GROWTHS}
        return sorted(size for size in wanted if self.present < size <= self.most)

    def smaller(self) -> list[int]:
        """The smaller sizes that may be gone back to, the largest first."""
        if self.listed is not None:
            found = {size for size in self.listed if size % self.quantum == 0}
        else:
            found = {self._up(part) for part in self._parts()} | {self._down(self.most)}
        least = max(self.least, self.reference_size)
        possible = {*found, self.reference_size}
        return sorted((size for size in possible if least <= size < self.present), reverse=True)

    def _parts(self) -> Iterator[float]:
        """The present size divided by 1.5, 2, 3, 4, 6, 8, ..., as long as that may be at or above the least size."""
        part = float(self.present)
        while part >= self.least:
            yield from (part / each for each in _GROWTHS)
            part /= 2

    def _down(self, size: float) -> int:
        return int(size // self.quantum) * self.quantum

    def _up(self, size: float) -> int:
        return math.ceil(size / self.quantum) * self.quantum


def may_tune_global_batch(tuning: TuningSection) -> bool:
    """Whether a person lets the tuner change the global batch size."""
    return GLOBAL_BATCH_KEY in (tuning.knobs or {})


def why_global_batch_fixed(facts: JobFacts, tuning: TuningSection) -> str:
    """Why the global batch size is not tuned in this job, as a sentence; empty where it may be."""
    learning = facts.learning
    if learning is None or learning.rule not in _RULES:
        return (
            "learning rates would not follow the global batch size, so that a sample would teach less in larger steps; "
            "give the trainer learning_rate_rule"
        )
    if GLOBAL_BATCH_KEY not in facts.choices:
        return facts.fixed.get(GLOBAL_BATCH_KEY) or f"this job cannot change {GLOBAL_BATCH_KEY} while it trains"
    if LEARNING_RATE_KEY in (tuning.knobs or {}) and _number(facts.values.get(LEARNING_RATE_KEY)) is None:
        return (
            f"{LEARNING_RATE_KEY} in tuning.knobs bounds the learning rate, and the job tells of no learning rate; "
            "leave that key out of tuning.knobs"
        )
    return ""


def allowed_sizes(facts: JobFacts, tuning: TuningSection) -> AllowedBatchSizes | None:
    """The global batch sizes that a job may have; None where they are not to be tuned."""
    if not may_tune_global_batch(tuning) or why_global_batch_fixed(facts, tuning) or facts.learning is None:
        return None
    knobs = dict(tuning.knobs or {})
    bounds = [each for each in map(_number, knobs[GLOBAL_BATCH_KEY]) if each is not None]
    rates = [each for each in map(_number, knobs.get(LEARNING_RATE_KEY, ())) if each is not None]
    only: set[int] = set() if len(bounds) == 2 else {int(each) for each in bounds}
    allowed = {int(each) for each in map(_number, facts.choices[GLOBAL_BATCH_KEY]) if each is not None}
    listed = (only & allowed if allowed else only) if only else allowed
    return AllowedBatchSizes(
        learning=facts.learning,
        present=facts.global_batch,
        least=max(facts.learning.first_batch, int(min(bounds))),
        most=int(max(bounds)),
        listed=tuple(sorted(listed)) if only or allowed else None,
        quantum=_quantum(facts),
        learning_rate=_number(facts.values.get(LEARNING_RATE_KEY)),
        learning_rate_bounds=(min(rates), max(rates)) if rates else None,
    )


def facts_at(facts: JobFacts, size: int) -> JobFacts:
    """The facts of the same job, if its global batch size were ``size``."""
    is_even = facts.share == -(-facts.global_batch // facts.num_replicas)
    share = -(-size // facts.num_replicas) if is_even else -(-facts.share * size // facts.global_batch)
    return replace(facts, global_batch=size, share=share, values={**facts.values, GLOBAL_BATCH_KEY: size})


def _quantum(facts: JobFacts) -> int:
    """What sizes are multiples of: replicas have equally many samples, in whole micro-batches if those are fixed."""
    micro_batch = facts.values.get(_MICRO_BATCH_KEY)
    if _MICRO_BATCH_KEY in facts.choices or not isinstance(micro_batch, int):
        return facts.num_replicas
    return facts.num_replicas * max(micro_batch, 1)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


# --- whether steps of another size would teach more in the same time, by how long and how noisy they are -------------
# What counts of a size is how fast it teaches: samples per second times their efficiency (see above). Steps of another
# size are worth a size trial (course.py) where that is expected to be well above what it is now, and stay where it
# measures above it.

_LEAST_KEPT = 0.01
"""The least measured gain, as a share, for which a size that was tried is kept."""
_OTHER_NOISE = 1.25
"""Sizes are looked at again where the noise scale has grown, or shrunk, by more than this factor."""
_NUM_REPORTS = 200
"""Reports of steps after which sizes are looked at again in any case."""
_MOST_NOISE = 2.0**60
"""The noise scale as which any above it counts."""
_ALIKE = 0.05
"""Share by which the gain of an advice has to differ from that of the last one to be told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizeProposal:
    """Another global batch size that is worth a size trial, with what is expected of it."""

    size_now: int
    """The global batch size now."""
    size: int
    """The global batch size that is to be tried."""
    point: Point
    """The point to train at with that size."""
    seconds: float
    """The expected time of a step of that size."""
    most_seconds: float
    """A high estimate of the time of a step of that size."""
    even_seconds: float
    """The time of a step of that size at which training would learn exactly as fast as now."""
    now_seconds: float
    """The measured time of a step now."""
    is_needed: bool
    """Whether the present size is out of its bounds, so that the other one is needed whatever it gains."""
    reason: str
    """Why the size is worth a size trial, as a sentence for a person."""

    @property
    def most_seconds_for_equal_progress(self) -> float:
        """A high estimate of the seconds that training takes, at that size, to learn as much as in one step now."""
        return self.most_seconds * self.now_seconds / self.even_seconds

    @property
    def gain(self) -> float:
        """How many times as fast as now training is expected to learn at that size."""
        return self.even_seconds / self.seconds


class SizeVerdict(NamedTuple):
    """Whether a global batch size that was tried is kept, and why."""

    is_kept: bool
    reason: str


class _SizeTimes(NamedTuple):
    """How long steps of one global batch size took."""

    point: Point | None
    seconds: float


class BatchSizeChoice:
    """The choice of another global batch size that is worth a size trial, by each size's step times and by noise."""

    def __init__(self, decisions: Sequence[Decision] = ()) -> None:
        """``decisions`` are those from before a restart of the master; they tell how long steps of other sizes took."""
        self._known: dict[int, _SizeTimes] = {}
        self._refused: set[int] = set()
        self._unwanted: set[int] = set()  # a person has taken these back; ``allow`` does not bring them back
        self._looked: tuple[int, float] | None = None  # size and noise scale when sizes were looked at last
        self._num_reports = 0
        self._told: tuple[int, float] | None = None
        for each in sorted(decisions, key=lambda each: each.number):
            self._remember(each)

    # ---- what is told ----

    def begin(self, proposal: BatchSizeProposal, best: PointMeasurement) -> None:
        """Note that another size is tried; ``best`` has the step times of the present one."""
        self._known[proposal.size_now] = _SizeTimes(best.point, best.seconds)

    def refuse(self, size: int) -> None:
        """Leave ``size`` out from now on, since it was refused."""
        self._refused.add(size)
        self._looked = None

    def take_back(self, decision: Decision) -> None:
        """Leave out the size that ``decision`` has set, if it has set one, since a person took the decision back."""
        size = decision.changes.get(GLOBAL_BATCH_KEY)
        if isinstance(size, int):
            self._unwanted.add(size)

    def allow(self) -> None:
        """Allow sizes that were refused: a person has changed the config, and they may be possible now."""
        self._refused.clear()

    def forget(self) -> None:
        """Forget how long steps of each size take, since the pace of the job has changed."""
        self._known.clear()
        self._looked = None

    # ---- what is asked ----

    def waits(self, facts: JobFacts, tuning: TuningSection) -> bool:
        """Whether the global batch size may be tuned once the noise scale is known, which it is not yet."""
        sizes = allowed_sizes(facts, tuning)
        return sizes is not None and sizes.learning.noise_scale is None

    def is_due(self, facts: JobFacts, tuning: TuningSection) -> bool:
        """Whether it is time to look for another size; called once for each report of steps at the best point."""
        noise = _noise(allowed_sizes(facts, tuning)) if may_tune_global_batch(tuning) else None
        if noise is None:
            return False
        self._num_reports += 1
        if self._looked is None or self._looked[0] != facts.global_batch or self._num_reports >= _NUM_REPORTS:
            return True
        before = self._looked[1]
        if noise != before and self._is_needed(facts, tuning, noise):
            return True
        return not before / _OTHER_NOISE <= noise <= before * _OTHER_NOISE

    def propose(self, facts: JobFacts, tuning: TuningSection, search: Search) -> BatchSizeProposal | None:
        """The size that is worth a size trial, by what ``search`` has learnt of the present one; None if none is."""
        sizes, best = allowed_sizes(facts, tuning), search.best_measured
        noise = _noise(sizes)
        if sizes is None or noise is None or best is None:
            return None
        self._looked, self._num_reports = (facts.global_batch, noise), 0
        left_out = self._refused | self._unwanted
        possible = [size for size in (*sizes.larger(), *sizes.smaller()) if size not in left_out]
        inputs = _ProposalInputs(sizes, noise, facts, search, best)
        proposals = [self._proposal_of(size, inputs) for size in possible if sizes.may_become(size, noise)]
        found = max((each for each in proposals if each is not None), key=lambda each: each.gain, default=None)
        return found if found is not None and (found.is_needed or found.gain >= 1 + LEAST_GAIN) else None

    def judge(
        self, proposal: BatchSizeProposal, measured: PointMeasurement, facts: JobFacts, tuning: TuningSection
    ) -> SizeVerdict:
        """Whether the size that was tried is kept, by its measured step times and by what is known of noise now."""
        before = proposal.now_seconds
        self._known[proposal.size] = _SizeTimes(measured.point, measured.seconds)
        self._looked = None
        sizes = allowed_sizes(facts, tuning)
        noise = _noise(sizes)
        if sizes is None or noise is None:
            ratio, known = proposal.even_seconds / before, "at the noise scale that was expected"
        else:
            ratio = _progress_ratio(sizes, proposal.size_now, proposal.size, noise)
            known = f"at {_noise_in_words(noise)}"
        times = ratio * before / measured.seconds
        as_before = f"as with {proposal.size_now:,} samples a step"
        reason = f"by the measured step times, training learns {times:.3g} times as fast {as_before}, {known}"
        return SizeVerdict(proposal.is_needed or times >= 1 + _LEAST_KEPT, reason)

    def progress_ratio(self, before: JobFacts, now: JobFacts, tuning: TuningSection) -> float:
        """How many times as much a step teaches with the global batch size of ``now`` as with that of ``before``."""
        sizes = allowed_sizes(now, tuning)
        noise = _noise(sizes) if _noise(sizes) is not None else _noise(allowed_sizes(before, tuning))
        if sizes is None or noise is None:
            return now.global_batch / before.global_batch
        return _progress_ratio(sizes, before.global_batch, now.global_batch, noise)

    def is_news(self, proposal: BatchSizeProposal) -> bool:
        """Whether people have not been told of this proposal yet; where it is news, it is kept as told."""
        told = self._told
        if told is not None and told[0] == proposal.size and abs(proposal.gain / told[1] - 1) < _ALIKE:
            return False
        self._told = proposal.size, proposal.gain
        return True

    # ---- how ----

    def _is_needed(self, facts: JobFacts, tuning: TuningSection, noise: float) -> bool:
        sizes = allowed_sizes(facts, tuning)
        return sizes is not None and not sizes.may_stay(facts.global_batch, noise)

    def _proposal_of(self, size: int, inputs: _ProposalInputs) -> BatchSizeProposal | None:
        sizes, best, facts = inputs.sizes, inputs.best, inputs.facts
        facts_there = facts_at(facts, size)
        expected = inputs.search.best_micro_batch_for(facts_there)
        if expected is None:
            return None
        known, on_line = self._known.get(size), self._on_line(size, inputs)
        there = known.seconds if known is not None else on_line
        point = expected.point
        if known is not None and known.point is not None and inputs.search.fits_in_memory(known.point, facts_there):
            point = known.point
        seconds = expected.seconds if there is None else there
        even = best.seconds * _progress_ratio(sizes, facts.global_batch, size, inputs.noise)
        proposal = BatchSizeProposal(
            size_now=facts.global_batch,
            size=size,
            point=point,
            seconds=seconds,
            most_seconds=expected.most_seconds if there is None else there,
            even_seconds=even,
            now_seconds=best.seconds,
            is_needed=not sizes.may_stay(facts.global_batch, inputs.noise),
            reason="",
        )
        return replace(proposal, reason=_why(proposal, inputs))

    def _on_line(self, size: int, inputs: _ProposalInputs) -> float | None:
        """The time of a step of ``size``, on a line through the step times of the present size and of the nearest one.

        None where only the present size is known.
        """
        present, seconds = inputs.facts.global_batch, inputs.best.seconds
        others = sorted(each for each in self._known if each != present)
        if not others:
            return None
        nearest = min(others, key=lambda each: abs(math.log(each / size)))
        of_sample = (self._known[nearest].seconds - seconds) / (nearest - present)
        of_sample = min(max(of_sample, 0.0), seconds / present)
        return seconds + of_sample * (size - present)

    def _remember(self, decision: Decision) -> None:
        """Take from a decision from before a restart what it says of step times and refusals of sizes."""
        if decision.kind == "reopen":
            self.forget()
        if decision.is_taken_back:
            self.take_back(decision)
        size, size_before = decision.changes.get(GLOBAL_BATCH_KEY), decision.instead.get(GLOBAL_BATCH_KEY)
        if decision.kind != "probe" or not isinstance(size, int):
            return
        if decision.outcome == "refused":
            self.refuse(size)
        if decision.measured:
            self._known[size] = _SizeTimes(None, size / decision.measured)
        if decision.before and isinstance(size_before, int):
            self._known[size_before] = _SizeTimes(None, size_before / decision.before)


class _ProposalInputs(NamedTuple):
    """What a proposal of another global batch size is made from: sizes, noise scale, facts, search and best steps."""

    sizes: AllowedBatchSizes
    noise: float
    facts: JobFacts
    search: Search
    best: PointMeasurement


def _noise(sizes: AllowedBatchSizes | None) -> float | None:
    noise = None if sizes is None else sizes.learning.noise_scale
    return None if noise is None else min(noise, _MOST_NOISE)


def _progress_ratio(sizes: AllowedBatchSizes, size_now: int, size: int, noise: float) -> float:
    """How many times as much a step of ``size`` teaches as a step of ``size_now``."""
    return sizes.progress(size, noise) / sizes.progress(size_now, noise)


def _why(proposal: BatchSizeProposal, inputs: _ProposalInputs) -> str:
    sizes, noise, best = inputs.sizes, inputs.noise, inputs.best
    words = size_change_in_words(proposal.size, proposal.size_now)
    if proposal.point != best.point:
        words = f"{words}, {change_in_words(proposal.point, best.point)}"
    words = f"{words}: {rate_in_words(proposal.size / proposal.seconds)} expected, "
    words = f"{words}{number_in_words(proposal.size_now / best.seconds)} now; "
    words = f"{words}at {_noise_in_words(noise)} a sample teaches "
    efficiency = sizes.efficiency(proposal.size, noise) / sizes.efficiency(proposal.size_now, noise)
    words = f"{words}{efficiency:.3g} times as much then, so that training learns {proposal.gain:.3g} times as fast; "
    factor = sizes.learning_rate_factor(proposal.size, noise) / sizes.learning_rate_factor(proposal.size_now, noise)
    words = f"{words}learning rates become {factor:.3g} times what they are ({sizes.learning.rule})"
    if proposal.is_needed:
        words = f"{words}; {proposal.size_now:,} samples a step are beyond what tuning.knobs allow"
    return words


def _noise_in_words(noise: float) -> str:
    return f"a noise scale of {number_in_words(noise)} samples"
