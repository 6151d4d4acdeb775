"""Which point is tried next, which is the best so far, and how long training stands still for a change. Pure, with
numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from elastic_ext.config.keys import TuningSection
from elastic_ext.records.metrics import JobFacts

from .costs import Budget
from .measurements import LEAST_GAIN, PROBE_STEPS, PointMeasurement, merged_step_times
from .memory import JobMemory, memory_knobs
from .performance_model import Fitted, Floats, Prior, columns_of, fit, prior_of
from .space import KEYS, Point, knobs_of_cost, micro_batches_of, shape_of, space_of

__all__ = ["PointProposal", "Search", "Switching", "cost_of_probes"]


# --- how long training stands still for a change from one point to another, and what a probe costs with that ---------
# That time is guessed by what has to be moved, and corrected by the times that changes took.

# Functions: each gives, of a point, the values of those knobs whose change restarts workers, moves the model's state,
# or wraps the model anew.
_loaded, _laid_out, _wrapped = knobs_of_cost("workers"), knobs_of_cost("move"), knobs_of_cost("wrap")
_SECONDS_TO_MOVE = 1.0
_BYTES_PER_SECOND = 2e9
_SECONDS_TO_WRAP = 0.1
_SECONDS_TO_START = 0.4
_BYTES_OF_A_PARAMETER = 12
"""Bytes of a parameter with its optimizer's state, where they are not known."""


class Switching:
    """How long training stands still for a change from one point to another, learnt from the changes of one job."""

    def __init__(self, facts: JobFacts) -> None:
        memory = facts.memory
        size = _BYTES_OF_A_PARAMETER * facts.num_parameters
        if memory is not None:
            size = memory.parameter_bytes + memory.optimizer_bytes
        self._to_move = _SECONDS_TO_MOVE + size / facts.world_size / _BYTES_PER_SECOND
        self._to_start = _SECONDS_TO_START

    def see(self, old: Point, new: Point, seconds: float) -> None:
        """Take the seconds that training stood still for a change from ``old`` to ``new``."""
        if _laid_out(old) != _laid_out(new):
            self._to_move = (self._to_move + seconds) / 2
        elif _loaded(old) != _loaded(new) and _wrapped(old) == _wrapped(new):
            self._to_start = (self._to_start + seconds) / 2

    def seconds(self, here: Point, points: Sequence[Point]) -> Floats:
        """Seconds that training is expected to stand still for a change from ``here`` to each of ``points``."""
        laid_out, wrapped, loaded = _laid_out(here), _wrapped(here), _loaded(here)
        found = [
            (self._to_move if _laid_out(point) != laid_out else _SECONDS_TO_WRAP if _wrapped(point) != wrapped else 0.0)
            + (self._to_start if _loaded(point) != loaded else 0.0)
            for point in points
        ]
        return np.array(found)


def cost_of_probes(budget: Budget, seconds: Floats, switching: Floats, probe_steps: int, usual: float) -> Floats:
    """The seconds that a budget must have saved for each of some probes.

    That is least pace * (time that the probe takes) - (time that its steps take at the baseline).

    ``seconds`` are the step times of the probes, and ``switching`` is how long training stands still for each. A probe
    is ``probe_steps`` steps and one more, and long enough for as many reports: short steps are reported by the second.
    ``usual`` stands for the step time of the baseline where that is not known.
    """
    baseline = usual if budget.baseline_seconds is None else budget.baseline_seconds
    num_reports = min(probe_steps, PROBE_STEPS) + 1
    num_steps = np.maximum(probe_steps + 1, num_reports * budget.report_seconds / seconds)
    return budget.least_pace * (num_steps * seconds + switching) - num_steps * baseline


# --- which point is to be tried next, and which is the best so far ---------------------------------------------------
# A step time at a point is the performance model's prediction times its *error*. The logarithm of the error is taken
# for a Gaussian process, in which points that are alike have errors that are alike. Of the points that fit into memory
# the one is tried whose expected improvement is largest, less the cost of the change to it; where that is less than one
# percent, the search is over.

_LEAST_IMPROVEMENT = 0.01
"""Expected gain, as a share of a step, below which a search is over."""
_AMPLITUDES = (0.02, 0.03, 0.045, 0.065, 0.09)
"""Standard deviations that the logarithm of the error may have; the most likely one is used."""
_USUAL_AMPLITUDE, _UNUSUAL = 0.05, 0.7
"""The usual standard deviation of the logarithm of the error, and the standard deviation of that standard deviation's
own logarithm."""
_DISTANCE = 0.6
"""The length scale of the Gaussian process: points that lie much farther apart have unrelated errors."""
_ALMOST = 0.5
"""Share of the largest gain from which on a point is worth saving up for as well."""
_NOT_WORTH_GOING_BACK = 0.007
"""Share by which another point has to be faster than the one in force, to be the best point."""
_MOST_TIMES = 4.0
"""No probe is made whose steps may take more than so many times as long as those at the best point."""
_WAITED = 0.1
"""Share of a step that is waited for samples, from which on the next numbers of workers are tried in any case."""
_TIMES_OF_A_NEIGHBOUR = 1.5
"""These are not tried where steps may take more than so many times as long as at the best point."""
_MAY_HAVE_CHANGED = 0.5
"""Standard deviation added to the logarithms of the performance model's coefficients where a search begins again."""
_NOISE = 0.025
"""Standard deviation of the logarithm of a measured step time, for PROBE_STEPS reports of it."""
_LEAST_NOISE = 0.01
"""Least standard deviation of the logarithm of a measured step time, for any number of reports of it."""
_BRIEF_NOISE = 0.06
"""Standard deviation of the logarithm of a step time where the trial of the point ended early."""
_SURELY, _CLOSE = 3.0, 0.1
"""Noise may shift the logarithm of a measured step time by _SURELY standard deviations, or by _CLOSE if more."""
_HORIZON_SECONDS = 600.0
_HORIZON_STEPS = 1000
"""A change has to pay for itself within so many steps, or within _HORIZON_SECONDS where that is longer."""
_MOST_MEASURED = 40
"""Measured points that are learnt from: those whose first measurement is the newest."""
_SURE = 0.5
"""Standard deviations by which a probe may be slower than expected, when it is asked whether it can be paid for."""


@dataclass(frozen=True, slots=True)
class PointProposal:
    """A point of a search space that is to be tried next."""

    point: Point
    seconds: float
    """The expected step time."""
    least_seconds: float
    """The step time if all goes well: expected logarithm less a standard deviation of it."""
    most_seconds: float
    """A high estimate of the step time, by which it is asked what a probe costs."""
    cost: float = 0.0
    """Seconds that the budget must have saved for the next probe: that of ``point`` if ``is_affordable``, else that of
    the cheapest point that gains almost as much."""
    is_affordable: bool = True
    """Whether the budget has saved what ``point`` costs."""


class Search:
    """One search for the fastest point of a job: what was measured, what is expected, and which point is next."""

    def __init__(
        self, facts: JobFacts, tuning: TuningSection, *, before: Search | None = None, is_again: bool = False
    ) -> None:
        """``before`` is an earlier search of the same job, from which this one learns; with ``is_again`` the search
        begins only for a gain of LEAST_GAIN."""
        self._tuning = tuning
        self._prior: Prior | None = before.learnt if before is not None else None
        self._switching: Switching = before._switching if before is not None else Switching(facts)
        self._least_gain = LEAST_GAIN if is_again else _LEAST_IMPROVEMENT
        self._measured: dict[Point, PointMeasurement] = {}
        self._refused: dict[Point, None] = {}
        self._last: Point | None = None
        self._expected: _Expected | None = None
        self._best: PointMeasurement | None = None
        self._facts = facts
        self._space = space_of(facts, self._tuning)
        self._columns = columns_of(self._space.points, facts)
        self._places = {point: at for at, point in enumerate(self._space.points)}
        is_alike = before is not None and before._facts.world_size == facts.world_size
        memory = before._memory if before is not None and is_alike else None
        self._memory: JobMemory = JobMemory(facts, self._tuning.headroom, memory, limit_bytes=self._tuning.memory_bytes)

    # ---- what is learnt ----

    @property
    def best(self) -> PointMeasurement | None:
        """The measured point that is expected to be the fastest, and what its steps are expected to take."""
        if self._best is None:
            possible = [each for point, each in self._measured.items() if point not in self._refused]
            if not possible:
                return None
            expected = self._expectation()
            found = min(possible, key=lambda each: self._log_seconds(expected, each))
            if self._last in self._measured and self._last not in self._refused:
                last = self._measured[self._last]
                if self._log_seconds(expected, last) < self._log_seconds(expected, found) + _NOT_WORTH_GOING_BACK:
                    found = last
            self._best = replace(found, seconds=math.exp(self._log_seconds(expected, found)))
        return self._best

    @property
    def best_measured(self) -> PointMeasurement | None:
        """The best point, with its step times as they were measured."""
        best = self.best
        return None if best is None else self._measured[best.point]

    def _log_seconds(self, expected: _Expected, measured: PointMeasurement) -> float:
        """The logarithm of a measured point's expected step time, as far from the measured one as noise may be."""
        far, seen = max(_SURELY * _noise(measured), _CLOSE), math.log(measured.seconds)
        return min(max(float(expected.log_seconds[self._places[measured.point]]), seen - far), seen + far)

    @property
    def learnt(self) -> Prior | None:
        """The prior with which another search of this job may begin."""
        if not self._measured:
            return self._prior
        fitted = self._expectation().fitted
        unsure = np.sqrt(np.diag(fitted.covariance) + _MAY_HAVE_CHANGED**2)
        return Prior(mean=fitted.log_coefficients, deviation=np.minimum(unsure, 1.5))

    def tell(self, measured: PointMeasurement) -> None:
        """Take the measured step times of a point."""
        point = measured.point
        if point not in self._places:
            self._space = replace(self._space, points=(*self._space.points, point))
            self._columns = columns_of(self._space.points, self._facts)
            self._places[point] = len(self._places)
        if self._last is not None:
            self._switching.see(self._last, point, measured.held_up_seconds)
        self._last = point
        earlier = self._measured.get(point)
        self._measured[point] = measured if earlier is None else merged_step_times(earlier, measured)
        self._memory.see(point, measured.peak_bytes)
        self._expected = self._best = None

    def take_facts(self, facts: JobFacts) -> bool:
        """Take newer facts of the same job; gives whether other points may be tried because of them."""
        is_other_bound = facts.bound != self._facts.bound  # the micro-batch for which memory did not suffice
        is_other_memory = _memory_known(facts) != _memory_known(self._facts)
        self._facts = facts
        limit = self._tuning.memory_bytes
        self._memory = JobMemory(facts, self._tuning.headroom, self._memory, limit_bytes=limit)
        if is_other_memory:
            self._columns = columns_of(self._space.points, facts)
            self._expected = self._best = None
        return is_other_memory or is_other_bound

    def refuse(self, point: Point, why: str) -> None:
        """Leave out ``point``, which was not put in force.

        ``why`` is searched for config keys: of a key that is named there, and has another value than at the point
        measured last, all points with this value are left out too.
        """
        self._refused[point] = None
        self._best = None
        before = self._last
        for name, key in KEYS.items():
            value = getattr(point, name)
            if key in why and before is not None and value != getattr(before, name):
                self._refused.update((each, None) for each in self._space.points if getattr(each, name) == value)

    def begun_again(self, facts: JobFacts | None = None) -> Search:
        """A new search with what this one has learnt, after the pace of the job has changed, or its global batch size.

        ``facts`` are those with the other global batch size.
        """
        found = Search(facts or self._facts, self._tuning, before=self, is_again=True)
        found.refuse_as(self)
        return found

    def refuse_as(self, other: Search) -> None:
        """Leave out the points that were refused in another search."""
        self._refused.update(other._refused)

    def allow(self, point: Point) -> None:
        """No longer leave out ``point``, which is in force after all."""
        self._refused.pop(point, None)
        self._best = None

    # ---- what is expected ----

    def seconds_at(self, point: Point) -> float | None:
        """The expected step time of ``point``; None where nothing was measured, or there is no such point."""
        if not self._measured or point not in self._places:
            return None
        return math.exp(self._expectation().log_seconds[self._places[point]])

    def unsure_at(self, point: Point) -> float:
        """The standard deviation of the logarithm of the expected step time at ``point``; else infinite."""
        return float(self._expectation().deviations[self._places[point]]) if point in self._places else math.inf

    def measured_at(self, point: Point) -> PointMeasurement | None:
        """The measured step times of ``point``; None where none were measured."""
        return self._measured.get(point)

    def bytes_at(self, point: Point) -> int | None:
        """The predicted peak of memory at ``point``; None where it is unknown or has no limit."""
        return self._memory.expected_bytes(point)

    def propose(self, here: Point, budget: Budget, probe_steps: int) -> PointProposal | None:
        """The point to be tried next, one that the budget can pay for if there is any; None where none is worth it."""
        best = self.best
        if best is None or not self._space.is_open:
            return None
        expected = self._expectation()
        switching = self._switching.seconds(here, self._space.points)
        most = np.exp(expected.log_seconds + _SURE * expected.deviations)
        gains = np.where(most <= _MOST_TIMES * best.seconds, self._gains(expected, best, switching), 0.0)
        cost = cost_of_probes(budget, most, switching, probe_steps, best.seconds)
        if float(gains.max()) < self._least_gain:
            gains = self._neighbours(best, most)
        if float(gains.max()) < self._least_gain:
            return None
        self._least_gain = _LEAST_IMPROVEMENT  # once a search goes on, it goes on to the end
        affordable = np.where(cost <= budget.saved, gains, 0.0)
        is_affordable = float(affordable.max()) >= self._least_gain
        place = int(np.argmax(affordable if is_affordable else gains))
        # where none can be paid for: save up for the cheapest of the points that gain almost as much as the best one
        worth = cost[gains >= max(_ALMOST * float(gains.max()), self._least_gain)]
        return PointProposal(
            point=self._space.points[place],
            seconds=math.exp(expected.log_seconds[place]),
            least_seconds=math.exp(expected.log_seconds[place] - expected.deviations[place]),
            most_seconds=float(most[place]),
            cost=float(cost[place] if is_affordable else worth.min()),
            is_affordable=is_affordable,
        )

    def advise(self, here: Point) -> PointProposal | None:
        """The point that is expected to be the fastest, its change from ``here`` included; None if not worth advice."""
        best = self.best
        if best is None:
            return None
        expected = self._expectation()
        switching = self._switching.seconds(here, self._space.points)
        log_seconds = np.where(self._allowed(), expected.log_seconds + switching / self._horizon(best), np.inf)
        place = int(np.argmin(log_seconds))
        if math.log(best.seconds) - float(log_seconds[place]) < LEAST_GAIN:
            return None
        seconds = math.exp(expected.log_seconds[place])
        point = self._space.points[place]
        return PointProposal(point=point, seconds=seconds, least_seconds=seconds, most_seconds=seconds)

    def best_micro_batch_for(self, facts: JobFacts) -> PointProposal | None:
        """The micro-batch that is expected to be the fastest with the global batch size of ``facts``, as a point.

        The other knobs are those of the best point here. None where no such point fits into memory.
        """
        best = self.best_measured
        if best is None:
            return None
        points = [best.point._replace(batch_size=size) for size in micro_batches_of(facts, self._tuning)]
        points = [point for point in points if point not in self._refused or point == best.point]
        memory = self._memory_at(facts)
        points = [point for point in points if not memory.why_not(self._at_most(point, facts))]
        if not points:
            return None
        fitted = self._expectation().fitted
        here = fitted.log_seconds(columns_of([best.point], self._facts), self._facts.share)
        longer = fitted.log_seconds(columns_of(points, facts), facts.share) - here
        log_seconds = math.log(best.seconds) + longer.mean(axis=0)
        place = int(np.argmin(log_seconds))
        unsure = float(longer.std(axis=0)[place])
        return PointProposal(
            point=points[place],
            seconds=math.exp(log_seconds[place]),
            least_seconds=math.exp(log_seconds[place] - unsure),
            most_seconds=math.exp(log_seconds[place] + _SURE * unsure),
        )

    def cost(self, seconds: float, budget: Budget, probe_steps: int) -> float:
        """The seconds that a budget must have saved for ``probe_steps`` steps that take ``seconds`` each."""
        usual = self.best.seconds if self.best else seconds
        return float(cost_of_probes(budget, np.array([seconds]), np.zeros(1), probe_steps, usual)[0])

    def fits_in_memory(self, point: Point, facts: JobFacts) -> bool:
        """Whether ``point`` fits into memory with the global batch size of ``facts``."""
        return not self._memory_at(facts).why_not(self._at_most(point, facts))

    def why_micro_batch_stays(self) -> str:
        """Why memory might not suffice for the next larger micro-batch at the best point, as a sentence; else empty."""
        best = self.best
        if best is None:
            return ""
        now = shape_of(best.point, self._facts).micro_batch
        larger = [each for each in self._space.choices["batch_size"] if isinstance(each, int) and each > now]
        return self._memory.why_not(best.point._replace(batch_size=min(larger))) if larger else ""

    def _memory_at(self, facts: JobFacts) -> JobMemory:
        return JobMemory(facts, self._tuning.headroom, self._memory, limit_bytes=self._tuning.memory_bytes)

    def _at_most(self, point: Point, facts: JobFacts) -> Point:
        """``point`` with the largest micro-batch that it may have under ``facts``.

        Where the micro-batch is no choice and is a rank's whole share, it grows with the share.
        """
        size = point.batch_size
        is_chosen = KEYS["batch_size"] in facts.choices or (isinstance(size, int) and size < self._facts.share)
        return point if is_chosen else point._replace(batch_size=facts.share)

    def _gains(self, expected: _Expected, best: PointMeasurement, switching: Floats) -> Floats:
        """The expected improvement at each point, as a share of a step, less the cost of the change.

        0 for points that are measured, refused or too large. For a gain that is normal with mean m (``shorter``, in
        logarithms of step times) and standard deviation s (``deviations``), it is m * Phi(m / s) + s * phi(m / s), with
        the normal distribution function Phi and its density phi; the mean of that over the draws is taken.
        """
        measured = self._columns.shape_ids[[self._places[point] for point in self._measured]]
        possible = np.flatnonzero(self._allowed() & ~np.isin(self._columns.shape_ids, measured))
        deviations = expected.own_deviations[possible]
        shorter = math.log(best.seconds) - expected.drawn[:, possible]
        far = shorter / deviations
        improvement = shorter * _normal_below(far) + deviations * np.exp(-0.5 * far * far) / math.sqrt(2 * math.pi)
        gains = np.zeros(len(self._space.points))
        gains[possible] = improvement.mean(axis=0) - switching[possible] / self._horizon(best)
        return gains

    def _neighbours(self, best: PointMeasurement, most: Floats) -> Floats:
        """Tiny gains for the next numbers of workers, where the best point waits for samples; else 0.

        The right number of workers is what the performance model knows least of.
        """
        gains = np.zeros(len(self._space.points))
        if best.waited_share < _WAITED or self._least_gain > _LEAST_IMPROVEMENT:  # not what a search begins again for
            return gains
        numbers = [each for each in self._space.choices["num_workers"] if isinstance(each, int)]
        now = best.point.num_workers
        if not isinstance(now, int) or now not in numbers:
            return gains
        at = numbers.index(now)
        allowed = self._allowed()
        for number in numbers[max(at - 1, 0) : at] + numbers[at + 1 : at + 2]:
            place = self._places.get(best.point._replace(num_workers=number))
            if place is None or not number or not allowed[place] or self._space.points[place] in self._measured:
                continue
            if most[place] <= _TIMES_OF_A_NEIGHBOUR * best.seconds:
                # at least the least gain, and more where steps are expected to be shorter
                gains[place] = self._least_gain * best.seconds / most[place] * _TIMES_OF_A_NEIGHBOUR
        return gains

    def _horizon(self, best: PointMeasurement) -> float:
        return max(_HORIZON_SECONDS, _HORIZON_STEPS * best.seconds)

    def _allowed(self) -> NDArray[np.bool_]:
        """Which points of the space fit into memory and were not refused."""
        known: dict[tuple[object, ...], bool] = {}
        found = np.empty(len(self._space.points), dtype=np.bool_)
        for at, point in enumerate(self._space.points):
            taking = memory_knobs(point)
            if taking not in known:
                known[taking] = not self._memory.why_not(point)
            found[at] = known[taking]
        for point in self._refused:
            if point in self._places:
                found[self._places[point]] = False
        return found

    def _expectation(self) -> _Expected:
        if self._expected is None:
            self._expected = self._learn()
        return self._expected

    def _learn(self) -> _Expected:
        measured = list(self._measured.values())[-_MOST_MEASURED:]
        places = np.array([self._places[each.point] for each in measured])
        columns, share = self._columns.at(places), self._facts.share
        if self._prior is None:
            self._prior = prior_of(self._facts, measured[0], columns)
        fitted = fit(self._prior, measured, columns, share)
        drawn = fitted.log_seconds(self._columns, share)
        wrong = np.log([each.seconds for each in measured]) - drawn[:, places]
        noise = np.array([_noise(each) for each in measured])
        errors, deviations = _model_errors(self._columns.features, places, wrong, noise)
        drawn = drawn + errors
        return _Expected(fitted, drawn, deviations, drawn.mean(axis=0), np.hypot(drawn.std(axis=0), deviations))


@dataclass(frozen=True, slots=True)
class _Expected:
    """The expected step times of all points of a search; all step times here are logarithms."""

    fitted: Fitted
    drawn: Floats
    """(draws, points): step times by several draws of the performance model's coefficients."""
    own_deviations: Floats
    """Standard deviation at each point under any one draw, from the error there."""

    log_seconds: Floats
    """The mean over the draws."""
    deviations: Floats
    """Standard deviation at each point, of the draws and of the error together."""


def _memory_known(facts: JobFacts) -> tuple[object, ...]:
    """The facts of memory whose change may let other points be tried.

    The others are left out, since predictions that are made from them are corrected by measured peaks.
    """
    memory = facts.memory
    if memory is None:
        return ()
    return bool(memory.passes), memory.capacity_bytes, memory.source, memory.parameter_bytes


def _noise(measured: PointMeasurement) -> float:
    """The standard deviation of the logarithm of a measured step time."""
    if measured.is_brief:
        return _BRIEF_NOISE
    return max(_NOISE * math.sqrt(PROBE_STEPS / measured.num_reports), _LEAST_NOISE, measured.unsure)


def _model_errors(features: Floats, places: NDArray[np.intp], wrong: Floats, noise: Floats) -> tuple[Floats, Floats]:
    """The performance model's error at all points by a Gaussian process, (draws, points), and its standard deviation.

    ``wrong`` are the errors at the measured points, (draws, measured), and ``places`` the indices of these points. An
    error is here the logarithm of a step time less what the performance model says. The standard deviation, (points),
    is the same for any draw.
    """
    known = features[places]
    alike = _alike(known, known)
    amplitude = max(_AMPLITUDES, key=lambda each: _likelihood(each, alike, wrong[0], noise))
    inverse = np.linalg.inv(alike + np.diag((noise / amplitude) ** 2))
    to_known = _alike(features, known)
    # the share of the error's variance that the measured points leave open
    left = 1 - ((to_known @ inverse) * to_known).sum(axis=1)
    return (to_known @ (inverse @ wrong.T)).T, amplitude * np.sqrt(np.maximum(left, 1e-9))


def _likelihood(amplitude: float, alike: Floats, wrong: Floats, noise: Floats) -> float:
    """The logarithm of an amplitude's likelihood, by the errors and by what is usual."""
    among = amplitude**2 * alike + np.diag(noise**2)
    _, volume = np.linalg.slogdet(among)
    fits = float(wrong @ np.linalg.solve(among, wrong))
    return -0.5 * (fits + float(volume) + (math.log(amplitude / _USUAL_AMPLITUDE) / _UNUSUAL) ** 2)


def _alike(these: Floats, those: Floats) -> Floats:
    """(these, those): the correlation of errors at points of such features."""
    squares = (these**2).sum(axis=1)[:, None] + (those**2).sum(axis=1)[None, :] - 2 * these @ those.T
    return np.asarray(np.exp(-np.maximum(squares, 0.0) / (2 * _DISTANCE**2)))


def _normal_below(value: Floats) -> Floats:
    """The normal cumulative distribution function, right to a ten-millionth (Abramowitz and Stegun, 7.1.26)."""
    size = np.abs(value) / math.sqrt(2)
    t = 1 / (1 + 0.3275911 * size)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    above = 0.5 * series * np.exp(-size * size)
    return np.where(value > 0, 1 - above, above)
