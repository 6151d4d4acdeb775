"""Training simulated jobs under tuners, and what came of it beside the best that could have been done.

A *share* is what a step by the best safe point would have taken, over what one by the point in force truly takes; the
best of all is 1. Training *holds* from the first step on after which 49 of 50 steps have at least ``GOOD``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.simulated_draw import Array
from benchmarks.simulated_job import SimulatedJob
from benchmarks.simulated_time import Circumstances
from benchmarks.tuning_peers import Training, Way

__all__ = [
    "GOOD",
    "NUM_BEFORE",
    "NUM_STEPS",
    "Raced",
    "holds_from",
    "is_felt",
    "oracle",
    "race",
    "race_after_change",
    "settled",
    "train_long",
]

GOOD = 0.95
NUM_STEPS = 3000
"""That the best could make in the time that training is given."""
NUM_BEFORE = 1200
"""... and before all becomes otherwise."""
_EXCEPTIONS = 0.02
_FELT = 1.08


@dataclass(frozen=True, kw_only=True, slots=True)
class Raced:
    """One job under one tuner."""

    shares: Array
    """Of each step that was trained, or since the change."""
    num_wanted: float
    """Steps that the best would have made in the same time."""
    share_at_end: float
    """No more than 1, though a tuner may have left less memory free than the best has to."""
    num_failures: int
    """Steps, or experiments, for which memory did not suffice."""

    @property
    def efficiency(self) -> float:
        return len(self.shares) / self.num_wanted

    @property
    def held_from(self) -> int | None:
        """The step from which on training holds; None where it does not."""
        return holds_from(self.shares)


def race(job: SimulatedJob, way: Way) -> Raced:
    """Train for as long as the best point takes ``NUM_STEPS`` steps."""
    best = _best_seconds(job)
    end = job.now + NUM_STEPS * best
    return _raced(job, _train(job, way, [(end, None)])[0])


def race_after_change(job: SimulatedJob, way: Way, circumstances: Circumstances) -> Raced:
    """Train, have all become otherwise, and train for as long as the new best point takes ``NUM_STEPS`` steps."""
    changed = SimulatedJob(job.hidden.seed)
    changed.meet(circumstances)
    middle = job.now + NUM_BEFORE * _best_seconds(job)
    end = middle + NUM_STEPS * _best_seconds(changed)
    return _raced(job, _train(job, way, [(middle, None), (end, circumstances)])[1])


def is_felt(seed: int, circumstances: Circumstances) -> bool:
    """Whether steps by what was best take longer then: a change that nothing shows is none to be tried."""
    job = SimulatedJob(seed)
    point = job.oracle
    assert point is not None
    before = job.true_step_seconds(point)
    job.meet(circumstances)
    return job.true_step_seconds(point) > _FELT * before


def train_long(job: SimulatedJob, way: Way, num_steps: int) -> None:
    """Train so many steps, with nothing that changes."""
    tuner = way(job)
    next(tuner)
    for _ in range(num_steps):
        tuner.send(job.step())


def settled(job: SimulatedJob) -> Training:
    """The best safe point from the first step on, and it stays."""
    assert job.oracle is not None
    job.change(job.oracle)
    while True:
        yield


def oracle(job: SimulatedJob) -> Training:
    """The best safe point from the first step on, and at once the next one when all becomes otherwise."""
    while True:
        best = job.oracle
        if best is not None and best != job.point:
            job.change(best)
        yield


def holds_from(shares: Array) -> int | None:
    """The first step from which on nearly all are good, itself among them; None where there is none."""
    is_good = shares >= GOOD
    num_left = np.arange(len(shares), 0, -1)
    num_bad = np.cumsum(~is_good[::-1])[::-1]
    found = np.flatnonzero(is_good & (num_bad <= _EXCEPTIONS * num_left))
    return int(found[0]) if len(found) and is_good[-1] else None


def _train(job: SimulatedJob, way: Way, legs: Sequence[tuple[float, Circumstances | None]]) -> list[Array]:
    """For each leg, which ends at a time and begins with a change or none, the shares of its steps."""
    tuner = way(job)
    next(tuner)
    found = []
    for end, circumstances in legs:
        if circumstances is not None:
            job.meet(circumstances)
        best, shares = _best_seconds(job), []
        while job.now < end:
            point = job.point
            seen = job.step()
            if seen is not None and job.now <= end:
                shares.append(best / job.true_step_seconds(point))
            tuner.send(seen)
        found.append(np.array(shares))
    return found


def _raced(job: SimulatedJob, shares: Array) -> Raced:
    at_end = min(_best_seconds(job) / job.true_step_seconds(job.point), 1.0)
    return Raced(shares=shares, num_wanted=NUM_STEPS, share_at_end=at_end, num_failures=job.num_failures)


def _best_seconds(job: SimulatedJob) -> float:
    best = job.oracle
    assert best is not None
    return job.true_step_seconds(best)
