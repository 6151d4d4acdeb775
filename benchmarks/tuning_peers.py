"""Ways to tune a simulated job that the library's is compared with, each with the settings that served it best.

A way is a generator: it is given the job, changes it as it likes, and yields whenever a step is to be trained, which it
is then given as it was seen, or None where memory did not suffice. What it does before it first yields happens before
training begins. Of the job it uses what any tuner may.

Those that predict memory do so with the same prediction, and leave the same part of memory free. Those that search
again after a change of pace see it with the same detector, which is the library's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from statistics import median
from typing import TypeAlias

import numpy as np

from benchmarks.gaussian_process import chosen_by_improvement, features_of
from benchmarks.simulated_draw import Array
from benchmarks.simulated_job import NUM_STEPS_UNKNOWN, SimulatedJob
from benchmarks.simulated_memory import HEADROOM
from elastic_ext.profile.stragglers import ChangeDetector
from elastic_ext.tuner.measurements import StepReport
from elastic_ext.tuner.space import Point, Value

__all__ = [
    "PEERS",
    "Training",
    "Way",
    "coordinate_descent",
    "deepspeed_style",
    "dlrover_style",
    "gaussian",
    "random_search",
    "stay",
]

Training: TypeAlias = Generator[None, "StepReport | None", None]
Way: TypeAlias = Callable[[SimulatedJob], Training]
Probing: TypeAlias = Generator[None, "StepReport | None", "float | None"]
Searching: TypeAlias = Generator[None, "StepReport | None", None]

NUM_WARM, NUM_MEASURED = 1, 3
TRIGGER = 0.05
"""By how much a neighbour has to be better."""
NUM_RANDOM = 20
NUM_FIRST, MOST_PROBES = 6, 40
LEAST_IMPROVEMENT = 0.01
POLL_SECONDS = 30.0
LEAST_FREE_BYTES = 2400 * 2**20
NUM_EXPERIMENT_STEPS = 5
NUM_SIZES = 2


def stay(job: SimulatedJob) -> Training:
    """Whatever the user began with."""
    while True:
        yield


def random_search(job: SimulatedJob) -> Training:
    """Some points at random, and then the best of them."""
    yield from _with_watch(job, _at_random)


def coordinate_descent(job: SimulatedJob) -> Training:
    """One knob after the other, a choice up or down, as long as that is better by the trigger."""
    yield from _with_watch(job, _by_coordinates)


def gaussian(job: SimulatedJob) -> Training:
    """A Gaussian process on what steps take, with no model of a job, and by expected improvement."""
    yield from _with_watch(job, _by_improvement)


def dlrover_style(job: SimulatedJob) -> Training:
    """At each poll the micro-batch grows by what memory is free, over what its samples take: nothing else is tuned.

    DLRover works that out for a fixed model of its own, whatever is trained; here it is told what passes of the job
    take, and does not grow again to what memory has not sufficed for.
    """
    polled = job.now
    while True:
        seen = yield
        if seen is None or job.now - polled < POLL_SECONDS or job.facts.memory is None:
            continue
        polled = job.now
        memory, size = job.facts.memory, int(job.point.batch_size or 1)
        free = (memory.capacity_bytes or 0) - float(job.expected_bytes([job.point])[0])
        if free <= LEAST_FREE_BYTES:
            continue
        like = [each for each in memory.passes if each.activation_checkpoint == (job.point.activation_checkpoint or 0)]
        largest = max(like, key=lambda each: each.micro_batch)
        of_sample = memory.scale * max(largest.loss_bytes, largest.backward_bytes) / largest.micro_batch
        bound = math.inf if job.facts.bound is None else job.facts.bound - 1
        grown = int(min(size + free / of_sample, job.facts.share, bound))
        if grown > size:
            job.change(job.point._replace(batch_size=grown))


def deepspeed_style(job: SimulatedJob) -> Training:
    """Before training begins, an experiment for each of some micro-batches of each ZeRO stage, and each is a restart.

    As DeepSpeed's fast mode has it: of each stage the largest micro-batch that memory suffices for and some below it; a
    stage is left out where the model does not fit, and the search ends with the first that brings nothing. Its memory
    is predicted as everybody's, so that no experiment is wasted.
    """
    job.restart(job.start)  # the experiment in which it gets to know the model
    for _ in range(NUM_STEPS_UNKNOWN):
        job.step()
    best, best_seconds = job.start, math.inf
    for strategy in ("no_shard", "shard_grad_op", "full_shard"):
        of_stage = job.start._replace(strategy=strategy, shard_degree=None)
        sizes = [int(size) for size in job.space.choices["batch_size"] if size is not None]
        points = [of_stage._replace(batch_size=size) for size in sizes]
        fitting = [point for point, fits in zip(points, _fits(job, points), strict=True) if fits]
        if not fitting or (strategy != "no_shard" and job.facts.world_size == 1):
            continue
        places = np.unique(np.linspace(len(fitting) / 2, len(fitting) - 1, NUM_SIZES).astype(int))
        before = best_seconds
        for place in places[::-1]:
            seconds = _experiment(job, fitting[place])
            if seconds is not None and seconds < best_seconds:
                best, best_seconds = fitting[place], seconds
        if best_seconds >= before:
            break
    job.restart(best)
    while True:
        yield


def _experiment(job: SimulatedJob, point: Point) -> float | None:
    """Start anew at a point, train a few steps that count for nothing, and tell what they took."""
    job.restart(point)
    seen = [job.step() for _ in range(NUM_EXPERIMENT_STEPS)]
    times = [each.step_seconds for each in seen[NUM_EXPERIMENT_STEPS - NUM_MEASURED :] if each is not None]
    return sum(times) / NUM_MEASURED if len(times) == NUM_MEASURED and job.point == point else None


# ---- what searches share ----


def _with_watch(job: SimulatedJob, search: Callable[[SimulatedJob], Searching]) -> Training:
    """Search, train, and search again from where it is when the pace changes."""
    for _ in range(NUM_STEPS_UNKNOWN + 1):
        yield
    while True:
        yield from search(job)
        detector, step = ChangeDetector(), 0
        while True:
            seen = yield
            step += 1
            if seen is not None and detector.see(step, seen.step_seconds) is not None:
                break


def _probe(job: SimulatedJob, point: Point) -> Probing:
    """A few real steps at a point: what one in the middle takes; None where memory did not suffice."""
    job.change(point)
    found = []
    for number in range(NUM_WARM + NUM_MEASURED):
        seen = yield
        if seen is None:
            return None
        if number >= NUM_WARM:
            found.append(seen.step_seconds)
    return median(found)


def _fits(job: SimulatedJob, points: list[Point]) -> list[bool]:
    capacity = job.facts.memory.capacity_bytes if job.facts.memory is not None else None
    assert capacity is not None
    return [bool(each) for each in job.expected_bytes(points) <= (1 - HEADROOM) * capacity]


def _candidates(job: SimulatedJob) -> list[Point]:
    points = list(job.space.points)
    return [point for point, fits in zip(points, _fits(job, points), strict=True) if fits]


def _at_random(job: SimulatedJob) -> Searching:
    random, candidates = _random(job), _candidates(job)
    best = job.point
    least = yield from _probe(job, best)
    for _ in range(NUM_RANDOM):
        point = candidates[int(random.integers(len(candidates)))]
        seconds = yield from _probe(job, point)
        if seconds is not None and (least is None or seconds < least):
            best, least = point, seconds
    job.change(best)


def _by_coordinates(job: SimulatedJob) -> Searching:
    candidates = set(_candidates(job))
    best = job.point
    least = (yield from _probe(job, best)) or math.inf
    tried, is_better = {best}, True
    while is_better:
        is_better = False
        for name, choices in job.space.choices.items():
            for way in (1, -1):
                while True:
                    point = _neighbour(best, name, choices, way, job)
                    if point is None or point in tried or point not in candidates:
                        break
                    tried.add(point)
                    seconds = yield from _probe(job, point)
                    if seconds is None or seconds >= least * (1 - TRIGGER):
                        break
                    best, least, is_better = point, seconds, True
    job.change(best)


def _neighbour(point: Point, name: str, choices: Sequence[Value], way: int, job: SimulatedJob) -> Point | None:
    """The next choice of one knob, the others as they are, those that it makes idle as they were at the start."""
    at = choices.index(getattr(point, name)) + way if getattr(point, name) in choices else -1
    if not 0 <= at < len(choices):
        return None
    found, start = point._replace(**{name: choices[at]}), job.space.present
    if found.strategy == "no_shard":
        found = found._replace(unit=start.unit)
    else:
        found = found._replace(bucket_cap_mb=start.bucket_cap_mb)
    if not found.num_workers:
        found = found._replace(prefetch_factor=start.prefetch_factor)
    if found.strategy != "hybrid_shard":
        return found._replace(shard_degree=start.shard_degree if found.strategy == start.strategy else None)
    degrees = [each for each in job.space.choices["shard_degree"] if each is not None]
    if found.shard_degree is None:
        return found._replace(shard_degree=degrees[-1]) if degrees else None
    return found


def _by_improvement(job: SimulatedJob) -> Searching:
    random, candidates = _random(job), _candidates(job)
    features = features_of(candidates, job.space.choices)
    places = {point: place for place, point in enumerate(candidates)}
    tried: list[int] = []
    logs: list[float] = []
    barred: set[int] = set()
    first = [job.point, *(candidates[int(each)] for each in random.integers(len(candidates), size=NUM_FIRST))]
    while len(tried) + len(barred) < MOST_PROBES:
        if first:
            known = places.get(first.pop(0))
            if known is None:
                continue
            place = known
        else:
            promising = _most_promising(features, tried, logs, barred, random)
            if promising is None:
                break
            place = promising
        seconds = yield from _probe(job, candidates[place])
        if seconds is None:
            barred.add(place)
        else:
            tried.append(place)
            logs.append(math.log(seconds))
    if tried:
        job.change(candidates[tried[int(np.argmin(logs))]])


def _most_promising(
    features: Array, tried: list[int], logs: list[float], barred: set[int], random: np.random.Generator
) -> int | None:
    """Which of some candidates to try next; None where none promises enough."""
    some = random.choice(len(features), size=min(3000, len(features)), replace=False)
    some = some[~np.isin(some, [*tried, *barred])]
    if not len(some) or not tried:
        return int(random.integers(len(features)))
    at, improvement = chosen_by_improvement(features[some], features[tried], np.array(logs))
    return None if improvement < LEAST_IMPROVEMENT else int(some[at])


def _random(job: SimulatedJob) -> np.random.Generator:
    return np.random.default_rng((job.hidden.seed, job.num_steps, 3))


PEERS: Mapping[str, Way] = {
    "stay": stay,
    "DLRover-style": dlrover_style,
    "DeepSpeed-style restarts": deepspeed_style,
    "random": random_search,
    "coordinate descent": coordinate_descent,
    "Gaussian process alone": gaussian,
}
