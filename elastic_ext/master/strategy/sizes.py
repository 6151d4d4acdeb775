"""Sizes: how many samples a step may have, what a sample teaches then, and what becomes of learning rates. Pure.

Words: the *first batch* is the size that the user's learning rate was chosen for. The *noise scale* is the size at
which a step's gradient has as much noise as gradient. The *efficiency* of a size is how much a sample teaches in steps
of it, beside steps of the first batch: (noise scale + first batch) / (noise scale + size), since larger steps know
better where to go, and there are fewer of them. The *progress* of a size is that of all samples of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from elastic_ext.config.batch_rules import rate_factor
from elastic_ext.config.keys import TuningSection
from elastic_ext.records.metrics import JobFacts, LearningFacts

__all__ = ["RATE_KEY", "SIZE_KEY", "Sizes", "facts_at", "is_asked_for", "sizes_of", "why_not_resized"]

SIZE_KEY = "global_batch_size"
RATE_KEY = "optimizer.learning_rate"
_MICRO_BATCH_KEY = "dataloader.batch_size"
_RULES = ("linear", "sqrt", "adascale")
_GROWTHS = (1.5, 2.0)
"""How many times as large a step is tried: rates follow, and what is learned should not jump."""
_MOST_TIMES = 2
_MORE_NOISE = 1.25
"""By so much noise may grow until sizes are looked at again: a rate that follows it is within its bounds then too."""
_CLOSE = 1e-9
"""Numbers that differ by this share are the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What a step of one job may have, its user's bounds being as they are."""

    learning: LearningFacts
    present: int
    least: int
    most: int
    listed: tuple[int, ...] | None
    """The only ones, where a person or the job says so."""
    quantum: int
    """Sizes are whole numbers of these."""
    rate: float | None
    """The user's, for the first batch,"""
    rates: tuple[float, float] | None
    """... and the bounds of what the rule makes of it."""

    @property
    def first_batch(self) -> int:
        return self.learning.first_batch

    def efficiency(self, size: int, noise: float) -> float:
        """How much a sample teaches in steps of ``size``, beside steps of the first batch."""
        return (noise + self.first_batch) / (noise + size)

    def progress(self, size: int, noise: float) -> float:
        """How much a step of ``size`` teaches, in samples of steps of the first batch."""
        return size * self.efficiency(size, noise)

    def rate_factor(self, size: int, noise: float) -> float:
        """What the user's learning rate is multiplied with by the rule, in steps of ``size``."""
        first = self.first_batch
        if self.learning.rule == "linear":
            return rate_factor("linear", first, size)
        if self.learning.rule == "sqrt":
            return rate_factor("sqrt", first, size)
        return self.progress(size, noise) / first  # which is AdaScale's gain

    def may_be(self, size: int, noise: float) -> bool:
        """Whether ``size`` keeps to all bounds, and will until sizes are looked at again."""
        return self.may_stay(size, noise) and self.may_stay(size, _MORE_NOISE * noise)

    def may_stay(self, size: int, noise: float) -> bool:
        """Whether ``size`` keeps to all bounds now; the first batch does, since the user has trained with it."""
        if size == self.first_batch:
            return True
        if not self.least <= size <= self.most or (self.listed is not None and size not in self.listed):
            return False
        if self.rates is None or self.rate is None:
            return True
        low, high = self.rates
        found = self.rate * self.rate_factor(size, noise)
        return low * (1 - _CLOSE) <= found <= high * (1 + _CLOSE)

    def larger(self) -> list[int]:
        """The next ones that may be tried."""
        if self.listed is not None:
            found = sorted(size for size in self.listed if size > self.present and size % self.quantum == 0)
            return [size for size in found if size <= _MOST_TIMES * self.present] or found[:1]
        least = self._up(max(self.least, self.present + 1))
        wanted = {max(self._down(min(times * self.present, self.most)), least) for times in _GROWTHS}
        return sorted(size for size in wanted if self.present < size <= self.most)

    def smaller(self) -> list[int]:
        """All that may be gone back to, the largest first."""
        if self.listed is not None:
            found = {size for size in self.listed if size % self.quantum == 0}
        else:
            found = {self._up(part) for part in self._parts()} | {self._down(self.most)}
        least = max(self.least, self.first_batch)
        return sorted((size for size in {*found, self.first_batch} if least <= size < self.present), reverse=True)

    def _parts(self) -> Iterator[float]:
        part = float(self.present)
        while part >= self.least:
            yield from (part / each for each in _GROWTHS)
            part /= 2

    def _down(self, size: float) -> int:
        return int(size // self.quantum) * self.quantum

    def _up(self, size: float) -> int:
        return math.ceil(size / self.quantum) * self.quantum


def is_asked_for(tuning: TuningSection) -> bool:
    """Whether a person lets steps grow."""
    return SIZE_KEY in (tuning.knobs or {})


def why_not_resized(facts: JobFacts, tuning: TuningSection) -> str:
    """Why steps do not grow in this job, where that is asked for: a sentence; empty where they may."""
    learning = facts.learning
    if learning is None or learning.rule not in _RULES:
        return (
            "learning rates would not follow, so that a sample would teach less in larger steps; give the trainer "
            "learning_rate_rule"
        )
    if SIZE_KEY not in facts.choices:
        return facts.fixed.get(SIZE_KEY) or "this job cannot change it while it trains"
    if RATE_KEY in (tuning.knobs or {}) and _number(facts.values.get(RATE_KEY)) is None:
        return f"{RATE_KEY} in tuning.knobs bounds the rate that follows, and the job tells of no rate"
    return ""


def sizes_of(facts: JobFacts, tuning: TuningSection) -> Sizes | None:
    """Those of this job; None where steps are not to grow."""
    if not is_asked_for(tuning) or why_not_resized(facts, tuning) or facts.learning is None:
        return None
    knobs, first = dict(tuning.knobs or {}), facts.learning.first_batch
    bounds = [each for each in map(_number, knobs[SIZE_KEY]) if each is not None]
    rates = [each for each in map(_number, knobs.get(RATE_KEY, ())) if each is not None]
    only: set[int] = set() if len(bounds) == 2 else {int(each) for each in bounds}
    allowed = {int(each) for each in map(_number, facts.choices[SIZE_KEY]) if each is not None}
    listed = (only & allowed if allowed else only) if only else allowed
    return Sizes(
        learning=facts.learning,
        present=facts.global_batch,
        least=max(first, int(min(bounds))),
        most=int(max(bounds)),
        listed=tuple(sorted(listed)) if only or allowed else None,
        quantum=_quantum(facts),
        rate=_number(facts.values.get(RATE_KEY)),
        rates=(min(rates), max(rates)) if rates else None,
    )


def facts_at(facts: JobFacts, size: int) -> JobFacts:
    """What is known of the same job, were its steps of ``size`` samples."""
    is_even = facts.share == -(-facts.global_batch // facts.num_replicas)
    share = -(-size // facts.num_replicas) if is_even else -(-facts.share * size // facts.global_batch)
    return replace(facts, global_batch=size, share=share, values={**facts.values, SIZE_KEY: size})


def _quantum(facts: JobFacts) -> int:
    """Every replica has as many samples; and whole micro-batches, where these cannot be of another size."""
    micro_batch = facts.values.get(_MICRO_BATCH_KEY)
    if _MICRO_BATCH_KEY in facts.choices or not isinstance(micro_batch, int):
        return facts.num_replicas
    return facts.num_replicas * max(micro_batch, 1)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
