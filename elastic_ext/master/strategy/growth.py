"""Growth: whether steps of another size would teach more in the same time, by how long and how noisy they are. Pure.

What counts of a size is how fast it teaches: samples per second times their efficiency (sizes.py). Steps of another
size are worth a try where that is expected to be well above what it is now, and stay where it measures above it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from elastic_ext.config.keys import TuningSection
from elastic_ext.records.metrics import JobFacts

from .change import LEAST_GAIN
from .decisions import Decision
from .measuring import Measured
from .sizes import SIZE_KEY, Sizes, facts_at, is_asked_for, sizes_of
from .space import Point
from .telling import change_in_words, number_in_words, rate_in_words, size_change_in_words

if TYPE_CHECKING:
    from .search import Search

__all__ = ["Growth", "Verdict", "Wish"]

_LEAST_KEPT = 0.01
"""What a size has to measure better by, to stay."""
_OTHER_NOISE = 1.25
"""Sizes are looked at again where the noise scale is so many times what it was, or its inverse,"""
_NUM_WINDOWS = 200
"""... or after so many windows."""
_MOST_NOISE = 2.0**60
_ALIKE = 0.05
"""Advice whose gain differs by less is no news."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """A size that is worth a try."""

    first: int
    """What steps have now."""
    size: int
    point: Point
    """The way to train at it,"""
    seconds: float
    """... what a step is expected to take,"""
    most_seconds: float
    """... and at most, as far as can be told;"""
    even_seconds: float
    """... and what a step would take that teaches as fast as now;"""
    now_seconds: float
    """... and what one takes now."""
    is_needed: bool
    """Whether the present size leaves its bounds, so that the other one is not a matter of what it brings."""
    reason: str

    @property
    def most_seconds_alike(self) -> float:
        """At most, for what a step teaches now."""
        return self.most_seconds * self.now_seconds / self.even_seconds

    @property
    def gain(self) -> float:
        """How many times as fast it is expected to teach."""
        return self.even_seconds / self.seconds


class Verdict(NamedTuple):
    """What was measured of a size."""

    is_kept: bool
    reason: str


class _Known(NamedTuple):
    """What steps of a size took."""

    point: Point | None
    seconds: float


class Growth:
    """Of one job, over all sizes that its steps have had."""

    def __init__(self, decisions: Sequence[Decision] = ()) -> None:
        """``decisions`` are those from before a restart, by which sizes are known."""
        self._known: dict[int, _Known] = {}
        self._refused: set[int] = set()
        self._unwanted: set[int] = set()
        self._looked: tuple[int, float] | None = None  # at which size, and noise scale
        self._num_windows = 0
        self._told: tuple[int, float] | None = None
        for each in sorted(decisions, key=lambda each: each.number):
            self._remember(each)

    # ---- what is told ----

    def begin(self, wish: Wish, best: Measured) -> None:
        """Another size is tried; ``best`` is what steps of the present one take."""
        self._known[wish.first] = _Known(best.point, best.seconds)

    def refuse(self, size: int) -> None:
        """Steps of ``size`` are not to be tried again."""
        self._refused.add(size)
        self._looked = None

    def take_back(self, decision: Decision) -> None:
        """A person has taken a decision back, and does not want the size that it gave steps, if it did."""
        size = decision.changes.get(SIZE_KEY)
        if isinstance(size, int):
            self._unwanted.add(size)

    def allow(self) -> None:
        """A person has changed the config: what was refused before may be possible now."""
        self._refused.clear()

    def forget(self) -> None:
        """Steps take something else from now on, whatever their size."""
        self._known.clear()
        self._looked = None

    # ---- what is asked ----

    def waits(self, facts: JobFacts, tuning: TuningSection) -> bool:
        """Whether steps may grow, and it is not known yet how noisy they are."""
        sizes = sizes_of(facts, tuning)
        return sizes is not None and sizes.learning.noise_scale is None

    def is_due(self, facts: JobFacts, tuning: TuningSection) -> bool:
        """Whether sizes are to be looked at; asked in each window of steps at the best point."""
        noise = _noise(sizes_of(facts, tuning)) if is_asked_for(tuning) else None
        if noise is None:
            return False
        self._num_windows += 1
        if self._looked is None or self._looked[0] != facts.global_batch or self._num_windows >= _NUM_WINDOWS:
            return True
        before = self._looked[1]
        if noise != before and self._is_needed(facts, tuning, noise):
            return True
        return not before / _OTHER_NOISE <= noise <= before * _OTHER_NOISE

    def propose(self, facts: JobFacts, tuning: TuningSection, search: Search) -> Wish | None:
        """The size that is worth a try, by what ``search`` has learnt of steps of the present one, if any is."""
        sizes, best = sizes_of(facts, tuning), search.best_measured
        noise = _noise(sizes)
        if sizes is None or noise is None or best is None:
            return None
        self._looked, self._num_windows = (facts.global_batch, noise), 0
        left_out = self._refused | self._unwanted
        possible = [size for size in (*sizes.larger(), *sizes.smaller()) if size not in left_out]
        asked = _Asked(sizes, noise, facts, search, best)
        wishes = [self._wish(size, asked) for size in possible if sizes.may_be(size, noise)]
        found = max((each for each in wishes if each is not None), key=lambda each: each.gain, default=None)
        return found if found is not None and (found.is_needed or found.gain >= 1 + LEAST_GAIN) else None

    def judge(self, wish: Wish, measured: Measured, facts: JobFacts, tuning: TuningSection) -> Verdict:
        """Whether steps of the size that was wished for stay, by what is known of noise now."""
        before = wish.now_seconds
        self._known[wish.size] = _Known(measured.point, measured.seconds)
        self._looked = None
        sizes = sizes_of(facts, tuning)
        noise = _noise(sizes)
        if sizes is None or noise is None:
            ratio, known = wish.even_seconds / before, "as was expected of noise"
        else:
            ratio, known = _progress_ratio(sizes, wish.first, wish.size, noise), f"by {_noise_in_words(noise)}"
        times = ratio * before / measured.seconds
        reason = f"measured, it learns {times:.3g} times as fast as with {wish.first:,} samples a step, {known}"
        return Verdict(wish.is_needed or times >= 1 + _LEAST_KEPT, reason)

    def progress_ratio(self, before: JobFacts, now: JobFacts, tuning: TuningSection) -> float:
        """How many times as much as before a step teaches."""
        sizes = sizes_of(now, tuning)
        noise = _noise(sizes) if _noise(sizes) is not None else _noise(sizes_of(before, tuning))
        if sizes is None or noise is None:
            return now.global_batch / before.global_batch
        return _progress_ratio(sizes, before.global_batch, now.global_batch, noise)

    def is_news(self, wish: Wish) -> bool:
        """Whether people were not told of it yet; then they are."""
        told = self._told
        if told is not None and told[0] == wish.size and abs(wish.gain / told[1] - 1) < _ALIKE:
            return False
        self._told = wish.size, wish.gain
        return True

    # ---- how ----

    def _is_needed(self, facts: JobFacts, tuning: TuningSection, noise: float) -> bool:
        sizes = sizes_of(facts, tuning)
        return sizes is not None and not sizes.may_stay(facts.global_batch, noise)

    def _wish(self, size: int, asked: _Asked) -> Wish | None:
        sizes, best, facts = asked.sizes, asked.best, asked.facts
        expected = asked.search.expect_at(facts_at(facts, size))
        if expected is None:
            return None
        known, on_line = self._known.get(size), self._on_line(size, asked)
        there = known.seconds if known is not None else on_line
        point = expected.point
        if known is not None and known.point is not None and asked.search.fits_at(facts_at(facts, size), known.point):
            point = known.point
        seconds = expected.seconds if there is None else there
        even = best.seconds * _progress_ratio(sizes, facts.global_batch, size, asked.noise)
        wish = Wish(
            first=facts.global_batch,
            size=size,
            point=point,
            seconds=seconds,
            most_seconds=expected.most_seconds if there is None else there,
            even_seconds=even,
            now_seconds=best.seconds,
            is_needed=not sizes.may_stay(facts.global_batch, asked.noise),
            reason="",
        )
        return replace(wish, reason=_why(wish, asked))

    def _on_line(self, size: int, asked: _Asked) -> float | None:
        """What a step of ``size`` takes by what steps of two others do: part of it is for each sample, the rest is not.

        None where only one size is known."""
        present, seconds = asked.facts.global_batch, asked.best.seconds
        others = sorted(each for each in self._known if each != present)
        if not others:
            return None
        nearest = min(others, key=lambda each: abs(math.log(each / size)))
        of_sample = (self._known[nearest].seconds - seconds) / (nearest - present)
        of_sample = min(max(of_sample, 0.0), seconds / present)
        return seconds + of_sample * (size - present)

    def _remember(self, decision: Decision) -> None:
        """What a decision from before a restart says of sizes."""
        if decision.kind == "reopen":
            self.forget()
        size, first = decision.changes.get(SIZE_KEY), decision.instead.get(SIZE_KEY)
        if decision.kind != "probe" or not isinstance(size, int):
            return
        if decision.outcome == "refused":
            self.refuse(size)
        if decision.measured:
            self._known[size] = _Known(None, size / decision.measured)
        if decision.before and isinstance(first, int):
            self._known[first] = _Known(None, first / decision.before)


class _Asked(NamedTuple):
    """What sizes are looked at for."""

    sizes: Sizes
    noise: float
    facts: JobFacts
    search: Search
    best: Measured


def _noise(sizes: Sizes | None) -> float | None:
    noise = None if sizes is None else sizes.learning.noise_scale
    return None if noise is None else min(noise, _MOST_NOISE)


def _progress_ratio(sizes: Sizes, first: int, size: int, noise: float) -> float:
    return sizes.progress(size, noise) / sizes.progress(first, noise)


def _why(wish: Wish, asked: _Asked) -> str:
    sizes, noise, best = asked.sizes, asked.noise, asked.best
    words = size_change_in_words(wish.size, wish.first)
    if wish.point != best.point:
        words = f"{words}, {change_in_words(wish.point, best.point)}"
    words = f"{words}: {rate_in_words(wish.size / wish.seconds)} expected, "
    words = f"{words}{number_in_words(wish.first / best.seconds)} now; by {_noise_in_words(noise)} a sample teaches "
    efficiency = sizes.efficiency(wish.size, noise) / sizes.efficiency(wish.first, noise)
    words = f"{words}{efficiency:.3g} times as much then, so that it learns {wish.gain:.3g} times as fast; "
    factor = sizes.rate_factor(wish.size, noise) / sizes.rate_factor(wish.first, noise)
    words = f"{words}learning rates become {factor:.3g} times what they are ({sizes.learning.rule})"
    if wish.is_needed:
        words = f"{words}; {wish.first:,} samples are beyond what tuning.knobs allow"
    return words


def _noise_in_words(noise: float) -> str:
    return f"a noise scale of {number_in_words(noise)} samples"
