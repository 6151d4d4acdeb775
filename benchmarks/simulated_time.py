"""What steps of a simulated job take, by phase: of all points at once.

Where ranks gather parameters of sharded units, passes wait for them, and no clock of a rank tells these waits from the
passes: they count as forward and backward. What is waited for after the last gradient is communication.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.simulated_draw import GRAD_OP, HYBRID, NO_SHARD, Array, Columns, Hidden, quirk
from elastic_ext.profile.phases import Phase

__all__ = ["PHASES", "Circumstances", "phase_seconds"]

PHASES = (Phase.DATA, Phase.TRANSFER, Phase.FORWARD, Phase.BACKWARD, Phase.COMMUNICATION, Phase.OPTIMIZER, Phase.OTHER)
_FORWARD = 0.34
"""Of both passes."""
_SHARPNESS = 4.0
"""How little the smaller of two times adds to the larger."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """What may become different while a job runs."""

    link: float = 1.0
    """The speed of the slowest link between ranks, by what it was,"""
    loading: float = 1.0
    """... the time that a sample takes to load,"""
    slow_rank: float = 1.0
    """... and what one rank takes to compute, by what the others take."""


@dataclass(frozen=True, slots=True)
class _Micro:
    """One micro-step of each point."""

    forward: Array
    backward: Array


def phase_seconds(hidden: Hidden, columns: Columns, now: Circumstances) -> Array:
    """Of each of PHASES a row, of each point a column: what a step takes of an usual rank."""
    num_full = np.floor(hidden.share / columns.batch)
    rest = hidden.share - num_full * columns.batch
    has_rest = rest > 0
    full, small = _micro(hidden, columns, columns.batch), _micro(hidden, columns, np.maximum(rest, 1))
    gather_full, gather_small = _gathers(hidden, columns, now, full), _gathers(hidden, columns, now, small)
    forward = num_full * (full.forward + gather_full.forward) + has_rest * (small.forward + gather_small.forward)
    backward = num_full * (full.backward + gather_full.backward) + has_rest * (small.backward + gather_small.backward)
    last_backward = np.where(has_rest, small.backward, full.backward)
    exposed, overlapped = _gradients(hidden, columns, now, last_backward)
    backward = backward + hidden.contention * overlapped
    optimizer = _optimizer(hidden, columns)
    waiting = (now.slow_rank - 1) * (forward + backward + optimizer) * (hidden.world_size > 1)
    if hidden.world_size == 1:
        forward, backward, optimizer = (each * now.slow_rank for each in (forward, backward, optimizer))
    transfer = _transfer(hidden, columns)
    other = np.full_like(forward, hidden.loop_seconds)
    busy = forward + backward + optimizer + transfer + exposed + waiting + other
    data = _data(hidden, columns, now, busy)
    return np.stack([data, transfer, forward, backward, exposed + waiting, optimizer, other])


def _larger(first: Array, second: Array) -> Array:
    """A little more than the larger of the two, where they are about as large."""
    found: Array = (first**_SHARPNESS + second**_SHARPNESS) ** (1 / _SHARPNESS)
    return found


def _micro(hidden: Hidden, columns: Columns, size: Array) -> _Micro:
    filled = size / (size + hidden.half_size) * (1 + hidden.size_quirk * quirk(hidden.seed, "size", size))
    flops = hidden.flops * size / (hidden.flops_per_second * hidden.efficiency * filled)
    moved = (2 * hidden.parameter_bytes + hidden.moved_bytes * size) / hidden.bytes_per_second
    device = _larger(flops, moved)
    lacking = np.maximum(columns.workers + 1 - hidden.num_processors, 0) / hidden.num_processors
    host = hidden.num_ops * hidden.seconds_per_op * hidden.host_factor * (1 + hidden.steal * lacking)
    units = np.ceil(hidden.num_blocks / columns.unit) * hidden.unit_seconds * columns.is_sharded
    again = hidden.recompute * columns.ratio
    by_strategy = np.array(hidden.sharded_quirk)[columns.strategy]
    forward = _larger(_FORWARD * device, _FORWARD * host + units)
    backward = _larger(
        (1 - _FORWARD + _FORWARD * again) * device, (1 - _FORWARD + _FORWARD * again) * host + 1.5 * units
    )
    together = 1 + 0.02 * quirk(hidden.seed, "together", size, columns.ratio, columns.strategy.astype(float))
    return _Micro(forward * by_strategy * together, backward * by_strategy * together)


def _links(hidden: Hidden, now: Circumstances) -> tuple[float, float]:
    """Bytes per second within a machine and between machines: it is the slower of the two that changes."""
    if hidden.num_machines == 1:
        return hidden.local_link * now.link, hidden.local_link * now.link
    return hidden.local_link, hidden.far_link * now.link


def _gathers(hidden: Hidden, columns: Columns, now: Circumstances, micro: _Micro) -> _Micro:
    """What the passes of one micro-step wait for parameters."""
    local, far = _links(hidden, now)
    degree = columns.degree
    link = np.where(degree <= hidden.num_local, local, far)
    units = np.ceil(hidden.num_blocks / columns.unit) + 1
    volume = 0.5 * hidden.parameter_bytes * (degree - 1) / degree  # in half precision
    seconds = volume / link + units * hidden.collective_seconds * np.log2(np.maximum(degree, 2))
    gathers = columns.is_sharded & (degree > 1)

    def waited(computing: Array) -> Array:
        beside = np.minimum(seconds, hidden.overlap * computing)
        return np.where(gathers, seconds - beside + seconds / units + hidden.contention * beside, 0.0)

    forward, backward = waited(micro.forward), waited(micro.backward)
    return _Micro(forward, np.where(columns.strategy == GRAD_OP, 0.0, backward))


def _gradients(hidden: Hidden, columns: Columns, now: Circumstances, backward: Array) -> tuple[Array, Array]:
    """What is waited for after the last backward pass, and what was on its way beside it."""
    if hidden.world_size == 1:
        return np.zeros_like(backward), np.zeros_like(backward)
    local, far = _links(hidden, now)
    slowest = local if hidden.num_machines == 1 else far
    size, world, degree = hidden.gradient_bytes, hidden.world_size, columns.degree
    doublings, all_doublings = np.log2(np.maximum(degree, 2)), np.log2(world)
    buckets = np.ceil(size / columns.bucket_bytes)
    averaged = 2 * size * (world - 1) / world / slowest + buckets * 2 * hidden.collective_seconds * all_doublings
    tail = hidden.bucket_tail * np.minimum(2 * columns.bucket_bytes / slowest, averaged)
    units = np.ceil(hidden.num_blocks / columns.unit) + 1
    link = np.where(degree <= hidden.num_local, local, far)
    scattered = size * (degree - 1) / degree / link + units * hidden.collective_seconds * doublings
    copies = world / degree
    among_copies = 2 * size / degree * (copies - 1) / copies / slowest + units * hidden.collective_seconds
    scattered = scattered + np.where((columns.strategy == HYBRID) & (copies > 1), among_copies, 0.0)
    is_whole = columns.strategy == NO_SHARD
    seconds = np.where(is_whole, averaged, scattered)
    beside = np.minimum(seconds, hidden.overlap * backward * np.where(is_whole, 0.8, 0.9))
    return seconds - beside + np.where(is_whole, tail, scattered / units), beside


def _optimizer(hidden: Hidden, columns: Columns) -> Array:
    size = 2 * hidden.parameter_bytes + hidden.gradient_bytes + 2 * hidden.optimizer_bytes
    found: Array = size / columns.degree / hidden.bytes_per_second * 1.2
    found += 40 * hidden.seconds_per_op * hidden.host_factor
    return found


def _transfer(hidden: Hidden, columns: Columns) -> Array:
    size = hidden.share * hidden.sample_bytes
    return np.where(columns.is_pinned, size / 20e9 * hidden.transfer_seen + 2e-5, size / 4e9)


def _data(hidden: Hidden, columns: Columns, now: Circumstances, busy: Array) -> Array:
    """What is waited for batches: all that they take where there are no workers."""
    alone = hidden.share * hidden.load_seconds * now.loading
    workers = np.maximum(columns.workers, 1)
    lacking = np.maximum(workers / hidden.num_processors, 1.0)
    busy_workers = workers / (1 + hidden.worker_cost * (workers - 1)) / lacking**1.15
    loading = alone / busy_workers
    uneven = hidden.load_unevenness * loading / np.sqrt(workers * columns.ahead)
    uneven = uneven * np.clip(loading / busy, 0.0, 1.0)
    handed_over = hidden.share * hidden.sample_bytes / 8e9 * np.where(columns.is_pinned, 0.6, 1.0)
    ahead = np.maximum(loading - busy, 0.0) + uneven + 0.1 * handed_over
    return np.where(columns.workers == 0, alone, ahead)
