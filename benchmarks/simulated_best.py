"""The best that a simulated job could do: the fastest safe point of all that its knobs can make, whatever of them a
space holds, which leaves some out where there are very many.

Batches as far ahead as any tuner may choose are never slower here than fewer, and so no others are looked at.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields

import numpy as np

from benchmarks.simulated_draw import STRATEGIES, Array, Columns, Hidden
from benchmarks.simulated_memory import HEADROOM, true_bytes
from benchmarks.simulated_time import Circumstances, phase_seconds
from elastic_ext.tuner.space import Point

__all__ = ["best_point"]

_MOST_AHEAD = 8
_RATIOS = (0.0, 0.25, 0.5, 0.75, 1.0)
_BUCKETS_MB = (1.0, 5.0, 25.0, 100.0)
_UNITS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class _Plan:
    strategy: str
    shard_degree: int | None = None
    unit: int | None = None
    bucket_cap_mb: float | None = None


def best_point(hidden: Hidden, circumstances: Circumstances) -> Point | None:
    """The fastest that leaves enough of the memory free; None where none does."""
    plans = _plans(hidden)
    sizes = sorted({-(-hidden.share // parts) for parts in _round_numbers(hidden.share)} | {1, 2})
    workers = [0, *_round_numbers(max(2 * hidden.num_processors, 8))]
    axes = [np.arange(len(plans)), np.array(sizes), np.array(workers), np.array(_RATIOS), np.array([0, 1])]
    which, batch, num_workers, ratio, pinned = (each.ravel() for each in np.meshgrid(*axes, indexing="ij"))
    columns = _columns(hidden, plans, which.astype(int), batch, num_workers, ratio, pinned)
    safe = true_bytes(hidden, columns)[1] <= (1 - HEADROOM) * hidden.capacity_bytes
    if not safe.any():
        return None
    columns = Columns(*(getattr(columns, field.name)[safe] for field in fields(Columns)))
    seconds = phase_seconds(hidden, columns, circumstances).sum(axis=0)
    at = int(np.flatnonzero(safe)[np.argmin(seconds)])
    plan = plans[int(which[at])]
    return Point(
        batch_size=int(batch[at]),
        num_workers=int(num_workers[at]),
        prefetch_factor=_MOST_AHEAD if num_workers[at] else None,
        pin_memory=bool(pinned[at]),
        strategy=plan.strategy,
        shard_degree=plan.shard_degree,
        unit=plan.unit,
        activation_checkpoint=float(ratio[at]),
        bucket_cap_mb=plan.bucket_cap_mb,
    )


def _plans(hidden: Hidden) -> list[_Plan]:
    world = hidden.world_size
    units = [unit for unit in _UNITS if unit <= hidden.num_blocks]
    degrees = [degree for degree in range(2, world) if world % degree == 0]
    found = [_Plan("no_shard", bucket_cap_mb=bucket) for bucket in _BUCKETS_MB]
    for strategy, unit in itertools.product(("shard_grad_op", "full_shard"), units):
        found.append(_Plan(strategy, unit=unit))
    found += [_Plan("hybrid_shard", degree, unit) for degree, unit in itertools.product(degrees, units)]
    return found


def _columns(
    hidden: Hidden, plans: list[_Plan], which: Array, batch: Array, workers: Array, ratio: Array, pinned: Array
) -> Columns:
    places = which.astype(int)
    whole = hidden.world_size
    degrees = [1 if each.strategy == "no_shard" else each.shard_degree or whole for each in plans]
    return Columns(
        batch=np.minimum(batch, hidden.share).astype(float),
        workers=workers.astype(float),
        ahead=np.full(len(batch), float(_MOST_AHEAD)),
        is_pinned=pinned > 0,
        strategy=np.array([STRATEGIES.index(each.strategy) for each in plans])[places],
        degree=np.array(degrees, dtype=float)[places],
        unit=np.array([each.unit or 1 for each in plans], dtype=float)[places],
        ratio=np.round(ratio * hidden.num_blocks) / hidden.num_blocks,
        bucket_bytes=np.array([each.bucket_cap_mb or 25.0 for each in plans])[places] * 2**20,
    )


def _round_numbers(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... up to ``most``, and that."""
    powers = [2**exponent for exponent in range(most.bit_length())]
    return sorted({each for power in powers for each in (power, 3 * power // 2) if each <= most} | {most})
