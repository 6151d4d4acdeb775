"""The performance model: how long a step takes at any point, learnt from measured steps. Pure, with numpy.

A *model* alone is the network that is trained; the numbers that the performance model learns are its *coefficients*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from elastic_ext.records.metrics import JobFacts
from elastic_ext.strategies import STRATEGIES

from .measurements import PointMeasurement
from .space import Point, Shape, Value, shape_of

__all__ = ["COEFFICIENTS", "Fitted", "Floats", "PointColumns", "Prior", "columns_of", "fit", "phases_of", "prior_of"]


# --- many points at once, as arrays of numbers: what the performance model computes with -----------------------------

Floats: TypeAlias = NDArray[np.float64]
"""An array of floats of double precision."""

_STRATEGIES = tuple(STRATEGIES)
_GATHERS_AGAIN = np.array([strategy.gathers_again for strategy in STRATEGIES.values()], dtype=np.float64)
_BYTES_OF_A_PARAMETER = 4
"""Bytes of a parameter, and of its gradient, where the job's facts have none."""


@dataclass(frozen=True, slots=True)
class PointColumns:
    """Points of a search space as columns of numbers, with a number for each point in each column."""

    micro_batch: Floats
    num_micro_steps: Floats
    num_workers: Floats
    num_processors: Floats
    """Processors that there are for a rank and its data workers."""
    prefetch_factor: Floats
    is_pinned: Floats
    is_sharded: Floats
    shard_degree: Floats
    recomputed: Floats
    """Share of blocks whose activations are computed again in the backward pass."""
    gathers_again: Floats
    """1 where parameters are gathered for the backward pass too, else 0."""
    gather_near_bytes: Floats
    """Bytes of parameters that a rank gathers for one pass of a micro-step from ranks on its own machine."""
    gather_far_bytes: Floats
    """Bytes of parameters that a rank gathers for one pass of a micro-step from ranks on other machines."""
    num_units: Floats
    """Units that parameters are gathered in, one after another; 0 where nothing is gathered."""
    units_ahead: Floats
    """Units that are prefetched: on their way before they are needed."""
    gradient_near_bytes: Floats
    """Bytes of gradients that a rank sends in a step to ranks on its own machine."""
    gradient_far_bytes: Floats
    """Bytes of gradients that a rank sends in a step to ranks on other machines."""
    num_gradient_messages: Floats
    """Messages that the gradients of a step are sent in; nothing is left to compute while the last one is sent."""
    message_near_bytes: Floats
    """Bytes of gradients in one such message, where it goes to ranks on the same machine, else 0."""
    message_far_bytes: Floats
    """Bytes of gradients in one such message, where it goes to ranks on other machines, else 0."""
    shape_ids: NDArray[np.intp]
    """By point, a number that is the same for points whose steps have the same ``Shape``."""
    features: Floats
    """(points, features): coordinates in which points that are near are expected to behave alike.

    Divisors set by hand bring them to one scale, which is that of search.py's _DISTANCE.
    """

    def at(self, index: Sequence[int] | NDArray[np.intp]) -> PointColumns:
        """The columns of some of the points."""
        chosen = np.asarray(index, dtype=np.intp)
        return PointColumns(*(getattr(self, each.name)[chosen] for each in fields(self)))


def columns_of(points: Sequence[Point], facts: JobFacts) -> PointColumns:
    """The columns of ``points`` in a job, in the order of ``points``."""
    shapes = [shape_of(point, facts) for point in points]
    known: dict[Shape, int] = {}
    shape_ids = np.array([known.setdefault(shape, len(known)) for shape in shapes], dtype=np.intp)
    numbers = np.array([_numbers(shape) for shape in shapes], dtype=np.float64).T
    micro, steps, workers, prefetch_factor, pinned, strategy, degree, unit, recomputed, units_ahead, bucket = numbers
    traffic = _Traffic(facts, strategy, degree, unit, bucket)
    features = [
        np.log2(micro) / 6,
        np.log2(workers + 1) / 2,
        np.log2(np.maximum(prefetch_factor, 1)) / 6,
        pinned / 2,
        *(0.7 * (strategy == each) for each in range(len(_STRATEGIES))),
        np.log2(degree) / 8,
        np.log2(np.maximum(unit, 1)) / 4,
        recomputed,
        units_ahead / 6,
        np.log2(np.maximum(bucket, 2**20) / 2**20) / 8,
        *map(_places, zip(*(shape.others for shape in shapes), strict=True)),
    ]
    return PointColumns(
        micro_batch=micro,
        num_micro_steps=steps,
        num_workers=workers,
        num_processors=np.full(len(points), float(facts.num_processors)),
        prefetch_factor=np.maximum(prefetch_factor, 1),
        is_pinned=pinned,
        is_sharded=np.minimum(unit, 1.0),
        shard_degree=degree,
        recomputed=recomputed,
        gathers_again=_GATHERS_AGAIN[strategy.astype(np.intp)],
        gather_near_bytes=traffic.gather_near_bytes,
        gather_far_bytes=traffic.gather_far_bytes,
        num_units=traffic.num_units,
        units_ahead=units_ahead,
        gradient_near_bytes=traffic.gradient_near_bytes,
        gradient_far_bytes=traffic.gradient_far_bytes,
        num_gradient_messages=traffic.num_gradient_messages,
        message_near_bytes=traffic.message_near_bytes,
        message_far_bytes=traffic.message_far_bytes,
        shape_ids=shape_ids,
        features=np.stack(features, axis=1),
    )


def _numbers(shape: Shape) -> tuple[float, ...]:
    """The fields of ``shape`` as numbers, in the order in which ``columns_of`` unpacks them."""
    return (
        shape.micro_batch,
        shape.num_micro_steps,
        shape.num_workers,
        shape.prefetch_factor,
        shape.is_pinned,
        _STRATEGIES.index(shape.strategy),
        shape.shard_degree,
        shape.unit,
        shape.activation_checkpoint,
        shape.units_ahead,
        shape.bucket_bytes,
    )


def _places(values: Sequence[Value]) -> Floats:
    """The values of a knob as numbers from 0 to 1, in the order in which each occurs first."""
    known = {value: at for at, value in enumerate(dict.fromkeys(values))}
    return np.array([known[value] for value in values]) / max(len(known) - 1, 1)


class _Traffic:
    """The bytes and messages that a rank sends and gathers in a step, with ring collectives.

    Parameters are gathered in every micro-step, for each pass or once for both. Gradients are added up on each rank,
    and reduced over ranks at the end of a step.

    Among n ranks, a ring's all-gather or reduce-scatter of S bytes sends S * (n - 1) / n from each rank, an all-reduce
    twice that. With P ranks in all and shard degree d there are P / d copies of the model. So in a step a rank

    - gathers parameters * (d - 1) / d for one pass of a micro-step;
    - reduce-scatters gradients, gradients * (d - 1) / d, within its copy;
    - all-reduces its shard of gradients between the copies, 2 * (gradients / d) * (copies - 1) / copies. With d = 1
      this is DDP's all-reduce.

    All bytes of one collective count as far where it spans machines, since its slowest link sets its pace.
    """

    def __init__(self, facts: JobFacts, strategy: Floats, degree: Floats, unit: Floats, bucket: Floats) -> None:
        memory, num_blocks = facts.memory, max(facts.num_blocks, 1)
        known = _BYTES_OF_A_PARAMETER * facts.num_parameters
        parameters = float(memory.parameter_bytes if memory else known)
        gradients = float(memory.gradient_bytes if memory else known)
        is_sharded, is_alone = unit > 0, facts.world_size == 1
        copies = facts.world_size / degree
        spans_machines = facts.world_size > facts.num_local
        is_far = np.logical_and(spans_machines, degree > facts.num_local)
        gathered = np.where(is_sharded, parameters * (degree - 1) / degree, 0.0)
        self.gather_near_bytes, self.gather_far_bytes = _by_link(gathered, is_far)
        # blocks by units, and one more unit of the parameters that are in no block
        self.num_units = np.where(is_sharded & (degree > 1), np.ceil(num_blocks / np.maximum(unit, 1)) + 1, 0.0)
        # bytes of gradients: reduce-scattered within a copy, then all-reduced between copies
        within = _by_link(gradients * (degree - 1) / degree, is_far)
        between = _by_link(2 * gradients / degree * (copies - 1) / copies, np.full(len(unit), spans_machines))
        self.gradient_near_bytes = within[0] + between[0]
        self.gradient_far_bytes = within[1] + between[1]
        # sharded: one message for each unit, two where there are other copies; DDP: two for each bucket, since an
        # all-reduce is a reduce-scatter and an all-gather
        buckets = np.ceil(gradients / np.maximum(bucket, 1.0))
        num_messages = np.where(is_sharded, self.num_units * (1 + (copies > 1)), 2 * buckets)
        self.num_gradient_messages = num_messages * (not is_alone)
        block = float(memory.block_bytes if memory and memory.block_bytes else parameters / num_blocks)
        part = np.where(is_sharded, unit * block, np.minimum(bucket, gradients)) * (not is_alone)
        self.message_near_bytes, self.message_far_bytes = _by_link(part, np.where(is_sharded, is_far, spans_machines))


def _by_link(size: Floats, is_far: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """The bytes that go to ranks on the same machine, and those that go to other machines."""
    return np.where(is_far, 0.0, size), np.where(is_far, size, 0.0)


# --- how long a step takes at any point, by coefficients of the job that are learnt from measured steps -------------
# The time of a step is the sum of: micro-steps, each a constant and an amount for each sample, longer where activations
# are computed again; communication, so far as nothing is computed meanwhile; the optimizer's step; copies to the
# accelerator; and waiting for samples, which workers load meanwhile. Where there are too few processors for workers
# and training thread, the step becomes longer. This leaves much out, on purpose: search.py learns its error.
#
# The coefficients are the most likely ones, given the measured phases and what is usual in such jobs. They come with
# a covariance. Times are in seconds. A share "as odds" is share / (1 - share), which is above 0 as any logarithm needs.

COEFFICIENTS = (
    "micro_step",  # seconds that a micro-step takes whatever its size
    "sample",  # seconds that a sample adds to its micro-step
    "least_micro_step",  # seconds that a micro-step takes at least, since operations have to be started
    "recomputing",  # share that passes take longer where all blocks are computed again
    "sharded_passes",  # factor on passes where parameters are gathered
    "unit",  # seconds of the host in each micro-step for each unit that is gathered
    "gather",  # share of a parameter's bytes that is sent where it is gathered
    "near",  # seconds that a byte takes to a rank on the same machine
    "far",  # seconds that a byte takes to another machine
    "message",  # seconds that a message takes whatever its size
    "beside",  # share of computing beside which something can be sent, one unit ahead of its use, as odds
    "loading",  # seconds that one loader takes for a sample
    "working",  # share of loading that takes a processor, as odds
    "collating",  # seconds that one loader takes for a batch, whatever its size
    "handing",  # seconds for which handing over a batch takes a worker's processor, and holds up the training thread
    "loaders",  # loaders that make progress side by side
    "hindering",  # share by which each further loader slows down the others
    "unevenness",  # share by which loading times of batches differ
    "optimizer",  # seconds of an optimizer's step on a whole copy of the network
    "copying",  # seconds that a sample takes to the accelerator from pageable memory
    "pinned",  # factor on that from pinned memory
    "other",  # seconds of a step besides
)
"""Names of the performance model's coefficients, in their order; it is their logarithms that are learnt."""
_FORWARD = 1 / 3
"""Share of the forward pass in the time of both passes."""
_SOFT = 0.05
"""Where a time max(x, 0) is smoothed: the width of the rounded corner, as a share of the time that may remain."""
_TOO_MANY = 0.25
"""Power of the ratio of workers to loaders that make progress, by which loading slows down above a ratio of 1."""


_NUM_DRAWN = 12
"""Draws of the coefficients beside the likeliest ones; an even number, since each is drawn with its opposite."""


class Prior(NamedTuple):
    """What the logarithms of the coefficients usually are: their means and standard deviations."""

    mean: Floats
    deviation: Floats


@dataclass(frozen=True, slots=True)
class Fitted:
    """The logarithms of the most likely coefficients, and the covariance of these logarithms."""

    log_coefficients: Floats
    covariance: Floats

    def log_seconds(self, columns: PointColumns, rank_samples: int) -> Floats:
        """(draws, points): logarithms of step times by several draws of the coefficients, the likeliest first.

        ``rank_samples`` are the samples of a step on the rank that has most.
        """
        roots = np.linalg.cholesky(self.covariance + 1e-9 * np.eye(len(self.log_coefficients)))
        drawn = np.random.default_rng(0).standard_normal((_NUM_DRAWN // 2, len(self.log_coefficients))) @ roots.T
        moved = [np.zeros_like(self.log_coefficients), *drawn, *-drawn]
        return np.stack([_log_steps(self.log_coefficients + each, columns, rank_samples) for each in moved])


def phases_of(log_coefficients: Floats, columns: PointColumns, rank_samples: int) -> dict[str, Floats]:
    """Seconds of a step at each point by phase: passes, communication, optimizer, transfer, data, other.

    ``log_coefficients`` are in the order of COEFFICIENTS; ``rank_samples`` are the samples of a step on one rank.

    - passes: micro-steps * (forward + backward + waits for gathered parameters)
    - communication: time to send gradients beyond what the last micro-step's backward pass hides, plus that of the last
      message, which nothing hides
    - optimizer: that of a whole copy of the network / shard degree
    - transfer: samples * time to copy a sample
    - data: waits for samples

    All but data are longer where workers take processors from the training thread.
    """
    value = dict(zip(COEFFICIENTS, np.exp(log_coefficients), strict=True))
    steps, is_sharded = columns.num_micro_steps, columns.is_sharded > 0
    # one micro-step without communication: forward is a third of it, recomputing is part of backward
    plain = _longer(value["micro_step"] + value["sample"] * rank_samples / steps, value["least_micro_step"])
    plain = plain * np.where(is_sharded, value["sharded_passes"], 1.0)
    plain = plain + value["unit"] * columns.num_units
    forward = _FORWARD * plain
    backward = plain * (1 - _FORWARD + value["recomputing"] * columns.recomputed)
    # gathering, for one pass: hidden behind computing but for the first unit, whose parameters nothing can hide
    beside = value["beside"] / (1 + value["beside"])
    gather = value["gather"] * (value["near"] * columns.gather_near_bytes + value["far"] * columns.gather_far_bytes)
    gather = gather + value["message"] * columns.num_units
    first = gather / np.maximum(columns.num_units, 1.0)
    # prefetching 1 unit hides the share ``beside`` of computing, n units 1 - (1 - beside)^n; none hides nothing
    units_ahead = columns.units_ahead
    gathered_beside = np.where(is_sharded & (units_ahead != 1), 1 - (1 - beside) ** units_ahead, beside)
    waits = _left(gather, gathered_beside * forward) + first
    waits = waits + columns.gathers_again * (_left(gather, gathered_beside * backward) + first)
    passes = steps * (forward + backward + waits)
    # gradients: sent beside the last backward pass; the last message has nothing left to hide behind
    sending = value["near"] * columns.gradient_near_bytes + value["far"] * columns.gradient_far_bytes
    sending = sending + value["message"] * columns.num_gradient_messages
    last = value["near"] * columns.message_near_bytes + value["far"] * columns.message_far_bytes
    exposed = _left(sending, beside * backward) + np.minimum(last, sending)
    optimizer = value["optimizer"] / columns.shard_degree
    copying = rank_samples * value["copying"] * np.where(columns.is_pinned > 0, value["pinned"], 1.0)
    parts = {
        "passes": passes,
        "communication": exposed,
        "optimizer": optimizer,
        "transfer": copying,
        "other": np.full_like(passes, value["other"]),
    }
    busy: Floats = sum(parts.values(), np.zeros_like(passes))
    longer = _crowded(value, columns, rank_samples, busy) / busy
    phases = {name: each * longer for name, each in parts.items()}
    return {**phases, "data": _waiting(value, columns, rank_samples, busy * longer)}


def _loading(value: Mapping[str, float], columns: PointColumns, rank_samples: int) -> Floats:
    """Seconds that one loader takes for all samples of a step."""
    return rank_samples * value["loading"] + columns.num_micro_steps * value["collating"]


def _crowded(value: Mapping[str, float], columns: PointColumns, rank_samples: int, busy: Floats) -> Floats:
    """Seconds of work that takes ``busy`` seconds with a processor of its own, where workers need processors too.

    With N processors for a rank, loading and handing over take w processor-seconds of a step. Beside the training
    thread there are busy * (N - 1) processor-seconds for them; what is lacking, divided by N, makes the step longer:
    w / N - busy * (1 - 1 / N), if that is above 0.
    """
    working = value["working"] / (1 + value["working"]) * _loading(value, columns, rank_samples)
    handing = columns.num_micro_steps * value["handing"]
    besides = (working + handing) / columns.num_processors
    lacking = besides - busy * (1 - 1 / columns.num_processors)
    return busy + np.where(columns.num_workers > 0, _above(lacking, _SOFT * besides), 0.0)


def _left(sending: Floats, beside: Floats) -> Floats:
    """Seconds of ``sending`` that are not hidden behind ``beside`` seconds of computing: max(sending - beside, 0)."""
    return _above(sending - beside, _SOFT * sending)


def _waiting(value: Mapping[str, float], columns: PointColumns, rank_samples: int, busy: Floats) -> Floats:
    """Seconds that a step waits for samples, where it does other things for ``busy`` seconds.

    Without workers it waits for all loading. With them it waits for

    - loading that takes longer than ``busy``. W workers load as fast as about min(W, ``loaders``) loaders, each slowed
      down by the others (``hindering``), and all of them further where W is above ``loaders``;
    - batches that are late by chance (``unevenness``), less with more batches loaded ahead, W * prefetch factor;
    - each batch's handing over.
    """
    alone = _loading(value, columns, rank_samples)
    workers = np.maximum(columns.num_workers, 1.0)
    most = value["loaders"]
    at_once = 1 / _longer(1 / workers, 1 / most, 12.0) / (1 + value["hindering"] * (workers - 1))
    too_many = np.maximum(workers / most, 1.0) ** _TOO_MANY
    loading = alone / at_once * too_many
    uneven = (
        value["unevenness"] * loading / np.sqrt(workers * columns.prefetch_factor) * np.minimum(loading / busy, 1.0)
    )
    handing = columns.num_micro_steps * value["handing"]
    return np.where(columns.num_workers > 0, _above(loading - busy, _SOFT * loading) + uneven + handing, alone)


def _longer(one: Floats, other: float, power: float = 6.0) -> Floats:
    """The larger of two numbers, with its corner rounded off: (a^power + b^power)^(1 / power)."""
    return np.asarray((one**power + other**power) ** (1 / power))


def _above(value: Floats, soft: Floats) -> Floats:
    """``value``, or 0 where it is negative, with the corner rounded off by ``soft``."""
    return 0.5 * (value + np.sqrt(value * value + soft * soft))


def _log_steps(log_coefficients: Floats, columns: PointColumns, rank_samples: int) -> Floats:
    total: Floats = sum(phases_of(log_coefficients, columns, rank_samples).values(), np.zeros(len(columns.micro_batch)))
    return np.log(total)


# ---- what is usual ----


def prior_of(facts: JobFacts, first: PointMeasurement, columns: PointColumns) -> Prior:
    """The prior of a job's coefficients, from the step times of the ``first`` measured point, which ``columns`` is of.

    The median of most is a share of what was measured at that point, or else a usual value of such hardware.
    """
    rank_samples, steps = facts.share, float(columns.num_micro_steps[0])
    seen = _seen_phases(first)
    passes = max(seen.get("passes", first.seconds), 0.02 * first.seconds)
    little = 1e-3 * first.seconds
    workers = max(float(columns.num_workers[0]), 1.0)
    waited = seen.get("data", 0.0)
    # seconds that one loader needs for a step's samples, if steps wait for loading: that wait without workers; with
    # workers, each of them loads all the time; 0 where steps do not wait and so tell nothing of it
    waits_for_loading = float(columns.num_workers[0]) == 0 or waited > 0.05 * first.seconds
    loading = (waited if columns.num_workers[0] == 0 else workers * first.seconds) if waits_for_loading else 0.0
    is_gpu = facts.device != "cpu"
    pinned = bool(columns.is_pinned[0])
    copied = max(seen.get("transfer", 0.0), little)
    # by name: the median of the number, and the standard deviation of its logarithm
    known = {
        "micro_step": (0.3 * passes / steps, 1.0),
        "sample": (0.6 * passes / rank_samples, 0.8),
        "least_micro_step": (0.2 * passes / steps, 1.0),
        "recomputing": (1 / 3, 0.2),
        "sharded_passes": (1.02, 0.04),
        "unit": (2e-4, 0.8),
        "gather": (0.7, 0.4),
        "near": (1e-11 if is_gpu else 1e-9, 1.2),
        "far": (2e-10 if is_gpu else 4e-9, 1.5),
        "message": (6e-5 if is_gpu else 2e-4, 0.7),
        "beside": (3.0, 0.8),
        "loading": (max(loading, 0.1 * workers * passes) / rank_samples, 0.3 if waits_for_loading else 1.5),
        "working": (1.0 if first.loading_share is None else _odds(_within(first.loading_share, 0.02)), 0.7),
        "collating": (5e-5, 1.0),
        "handing": (2e-4, 1.0),
        "loaders": (facts.num_processors / _within(first.loading_share, 0.1), 1.0),
        "hindering": (0.02, 0.8),
        "unevenness": (0.15, 0.8),
        "optimizer": (max(seen.get("optimizer", 0.0), little) * float(columns.shard_degree[0]), 0.5),
        "copying": (copied / rank_samples * (5.0 if pinned else 1.0), 0.7),
        "pinned": (0.2, 1.0),
        "other": (max(seen.get("other", 0.0), little), 0.5),
    }
    return Prior(
        mean=np.log(np.array([known[name][0] for name in COEFFICIENTS])),
        deviation=np.array([known[name][1] for name in COEFFICIENTS]),
    )


def _within(share: float | None, least: float) -> float:
    """``share`` kept between ``least`` and almost 1; 1 where it is not known."""
    return 1.0 if share is None else min(max(share, least), 0.98)


def _odds(share: float) -> float:
    """A share between 0 and 1 as odds."""
    return share / (1 - share)


def _seen_phases(measured: PointMeasurement) -> dict[str, float]:
    """Measured seconds by the phases of ``phases_of``; empty where no step was timed by phase."""
    phases = measured.phases
    if not phases:
        return {}
    named = {name: phases.get(name, 0.0) for name in ("communication", "optimizer", "transfer", "data")}
    passes = sum(phases.get(name, 0.0) for name in ("forward", "backward"))
    rest = sum(phases.values()) - sum(named.values()) - passes
    return {**named, "passes": passes, "other": max(rest, 0.0)}


# ---- learning ----

_OF_A_STEP = 0.08
"""Standard deviation of the logarithm of a step time from what the best coefficients say."""
_OF_A_PHASE = 0.10
"""Standard deviation of the logarithm of a phase's time from what the best coefficients say."""
_FLOOR = 0.02
"""Share of a step below which the time of a phase is not told from 0."""
_MOST_ROUNDS = 25


def fit(prior: Prior, measured: Sequence[PointMeasurement], columns: PointColumns, rank_samples: int) -> Fitted:
    """The most likely coefficients, given ``prior`` and the ``measured`` points, which ``columns`` is of.

    They make the sum of squared residuals least, found by Levenberg-Marquardt; the covariance is the inverse of J^T J,
    with the Jacobian J of the residuals at their logarithms.
    """
    targets = _FitTargets(measured, columns, rank_samples)
    found = np.array(prior.mean, dtype=np.float64)
    damping, residuals = 1e-2, _all_residuals(found, prior, targets)
    for _ in range(_MOST_ROUNDS):
        slopes = _slopes(found, prior, targets, residuals)
        square = slopes.T @ slopes
        step = np.linalg.solve(square + damping * np.diag(np.diag(square)), -slopes.T @ residuals)
        moved = found + np.clip(step, -1.5, 1.5)
        tried = _all_residuals(moved, prior, targets)
        better = float(residuals @ residuals - tried @ tried)
        if better > 0:
            found, residuals, damping = moved, tried, max(damping / 5, 1e-6)
            if better < 1e-4 * float(tried @ tried) + 1e-9:
                break
        else:
            damping *= 6
            if damping > 1e6:
                break
    slopes = _slopes(found, prior, targets, residuals)
    return Fitted(log_coefficients=found, covariance=np.linalg.inv(slopes.T @ slopes))


class _FitTargets:
    """The measured step times and phases that the coefficients are fitted to."""

    def __init__(self, measured: Sequence[PointMeasurement], columns: PointColumns, rank_samples: int) -> None:
        self.columns, self.rank_samples = columns, rank_samples
        self.seconds = np.array([each.seconds for each in measured])
        self.least = _FLOOR * self.seconds
        phases = [_seen_phases(each) for each in measured]
        self.has_phases = np.array([bool(each) for each in phases])
        names = ("passes", "communication", "optimizer", "transfer", "data", "other")
        self.phases = {name: np.array([each.get(name, 0.0) for each in phases]) for name in names}

    def residuals(self, log_coefficients: Floats) -> Floats:
        """The deviations of the performance model from measured steps and phases, in standard deviations of each."""
        said = phases_of(log_coefficients, self.columns, self.rank_samples)
        steps = sum(said.values(), np.zeros(len(self.seconds)))
        found = [np.log(steps / self.seconds) / _OF_A_STEP]
        for name, seen in self.phases.items():
            off = np.log((said[name] + self.least) / (seen + self.least)) / _OF_A_PHASE
            found.append(np.where(self.has_phases, off, 0.0))
        return np.concatenate(found)


def _all_residuals(log_coefficients: Floats, prior: Prior, targets: _FitTargets) -> Floats:
    """Deviations from measured times and from the prior's mean, each in standard deviations."""
    return np.concatenate([targets.residuals(log_coefficients), (log_coefficients - prior.mean) / prior.deviation])


def _slopes(log_coefficients: Floats, prior: Prior, targets: _FitTargets, residuals: Floats) -> Floats:
    """(residuals, coefficients): the Jacobian of the residuals, by finite differences."""
    slopes = np.empty((len(residuals), len(log_coefficients)))
    for at in range(len(log_coefficients)):
        moved = log_coefficients.copy()
        moved[at] += 1e-4
        slopes[:, at] = (_all_residuals(moved, prior, targets) - residuals) / 1e-4
    return slopes
