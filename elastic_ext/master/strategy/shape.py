"""Shape: a point as numbers: what it makes of a step, and of where the model lies. Pure.

What a point leaves to torch or to the library is here what these do by themselves.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from elastic_ext.records.metrics import JobFacts

from .space import Point, Value

__all__ = ["Shape", "shape_of"]

_BUCKET_MB = 25.0
_PREFETCH_FACTOR = 2
_GATHERED_AHEAD = 1


class Shape(NamedTuple):
    """Of a step on the rank that has most samples."""

    micro_batch: int
    num_micro_steps: int
    num_workers: int
    prefetch_factor: int
    """Batches that a worker loads ahead; 0 without workers."""
    is_pinned: bool
    strategy: str
    shard_degree: int
    """Ranks that share a copy of the model; 1 where each has a whole one."""
    unit: int
    """Blocks that are gathered at once; 0 where nothing is."""
    activation_checkpoint: float
    ahead: int
    """Units that are gathered ahead."""
    bucket_bytes: int
    """Of DDP; 0 where the model is sharded."""

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are gathered before they are used, be it from one rank."""
        return self.unit > 0


def shape_of(point: Point, facts: JobFacts) -> Shape:
    """What ``point`` is in this job."""
    micro_batch = min(max(_count(point.batch_size, facts.share), 1), facts.share)
    unit = _unit(point.unit, facts.num_blocks)
    num_workers = _count(point.num_workers, 0)
    strategy = str(point.strategy or "no_shard")
    is_sharded = strategy != "no_shard"
    return Shape(
        micro_batch=micro_batch,
        num_micro_steps=math.ceil(facts.share / micro_batch),
        num_workers=num_workers,
        prefetch_factor=_count(point.prefetch_factor, _PREFETCH_FACTOR) if num_workers else 0,
        is_pinned=bool(point.pin_memory),
        strategy=strategy,
        shard_degree=_degree(strategy, point, facts),
        unit=unit if is_sharded else 0,
        activation_checkpoint=_number(point.activation_checkpoint, 0.0),
        ahead=_ahead(point.prefetch, unit, facts.num_blocks) if is_sharded else 0,
        bucket_bytes=0 if is_sharded else int(_number(point.bucket_cap_mb, _BUCKET_MB) * 2**20),
    )


def _degree(strategy: str, point: Point, facts: JobFacts) -> int:
    if strategy == "no_shard":
        return 1
    if strategy == "hybrid_shard":
        return _count(point.shard_degree, min(facts.num_local, facts.world_size))
    return facts.world_size


def _unit(unit: Value, num_blocks: int) -> int:
    whole = max(num_blocks, 1)
    return min(_count(unit, whole if unit == "whole" else 1), whole)


def _ahead(prefetch: Value, unit: int, num_blocks: int) -> int:
    """No more than there are other units."""
    return min(_count(prefetch, _GATHERED_AHEAD), max(math.ceil(num_blocks / max(unit, 1)), _GATHERED_AHEAD))


def _count(value: Value, otherwise: int) -> int:
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else otherwise


def _number(value: Value, otherwise: float) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else otherwise
