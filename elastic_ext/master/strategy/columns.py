"""Columns: many points at once, as arrays of numbers: what a model of steps computes with. Pure, with numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from elastic_ext.records.metrics import JobFacts

from .shape import Shape, shape_of
from .space import Point

__all__ = ["Columns", "Floats", "columns_of"]

Floats: TypeAlias = NDArray[np.float64]

_STRATEGIES = ("no_shard", "shard_grad_op", "full_shard", "hybrid_shard")
_BYTES_OF_A_PARAMETER = 4


@dataclass(frozen=True, slots=True)
class Columns:
    """A number of each point in each."""

    micro_batch: Floats
    num_micro_steps: Floats
    num_workers: Floats
    num_processors: Floats
    """That there are for a rank and its workers."""
    prefetch_factor: Floats
    is_pinned: Floats
    is_sharded: Floats
    shard_degree: Floats
    recomputed: Floats
    """Share of blocks,"""
    gathers_again: Floats
    """Whether parameters are gathered for the backward pass too."""
    gather_near: Floats
    """Bytes of parameters that a rank gets for one pass of a micro-step from ranks on its own machine,"""
    gather_far: Floats
    """... and from others,"""
    num_units: Floats
    """... in so many parts; 0 where nothing is gathered;"""
    units_ahead: Floats
    """... so many of which are on their way before they are needed."""
    share_near: Floats
    """Bytes of gradients that a rank sends in a step to ranks on its own machine,"""
    share_far: Floats
    """... and to others,"""
    num_parts: Floats
    """... in so many parts, the last of which has nothing beside which it could be sent."""
    part_near: Floats
    part_far: Floats
    """Bytes of such a part."""
    same: NDArray[np.intp]
    """A number that points share that come to the same."""
    features: Floats
    """(points, features): how near two points are to each other."""

    def at(self, index: Sequence[int] | NDArray[np.intp]) -> Columns:
        """Of some of the points."""
        chosen = np.asarray(index, dtype=np.intp)
        return Columns(*(getattr(self, each.name)[chosen] for each in fields(self)))


def columns_of(points: Sequence[Point], facts: JobFacts) -> Columns:
    """All of ``points``, in their order."""
    shapes = [shape_of(point, facts) for point in points]
    known: dict[Shape, int] = {}
    same = np.array([known.setdefault(shape, len(known)) for shape in shapes], dtype=np.intp)
    numbers = np.array([_numbers(shape) for shape in shapes], dtype=np.float64).T
    micro, steps, workers, ahead, pinned, strategy, degree, unit, recomputed, units_ahead, bucket = numbers
    traffic = _Traffic(facts, strategy, degree, unit, bucket)
    features = [
        np.log2(micro) / 6,
        np.log2(workers + 1) / 2,
        np.log2(np.maximum(ahead, 1)) / 6,
        pinned / 2,
        *(0.7 * (strategy == each) for each in range(len(_STRATEGIES))),
        np.log2(degree) / 8,
        np.log2(np.maximum(unit, 1)) / 4,
        recomputed,
        units_ahead / 6,
        np.log2(np.maximum(bucket, 2**20) / 2**20) / 8,
    ]
    return Columns(
        micro_batch=micro,
        num_micro_steps=steps,
        num_workers=workers,
        num_processors=np.full(len(points), float(facts.num_processors)),
        prefetch_factor=np.maximum(ahead, 1),
        is_pinned=pinned,
        is_sharded=np.minimum(unit, 1.0),
        shard_degree=degree,
        recomputed=recomputed,
        gathers_again=np.where(strategy >= _STRATEGIES.index("full_shard"), 1.0, 0.0),
        gather_near=traffic.gather_near,
        gather_far=traffic.gather_far,
        num_units=traffic.num_units,
        units_ahead=units_ahead,
        share_near=traffic.share_near,
        share_far=traffic.share_far,
        num_parts=traffic.num_parts,
        part_near=traffic.part_near,
        part_far=traffic.part_far,
        same=same,
        features=np.stack(features, axis=1),
    )


def _numbers(shape: Shape) -> tuple[float, ...]:
    return (
        shape.micro_batch,
        shape.num_micro_steps,
        shape.num_workers,
        shape.prefetch_factor,
        shape.is_pinned,
        _STRATEGIES.index(shape.strategy) if shape.strategy in _STRATEGIES else 0,
        shape.shard_degree,
        shape.unit,
        shape.activation_checkpoint,
        shape.ahead,
        shape.bucket_bytes,
    )


class _Traffic:
    """What a rank sends in a step, by rings.

    Parameters are gathered in every micro-step, for each pass or once for both. Gradients are added up on each rank,
    and shared out at the end of a step.
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
        self.gather_near, self.gather_far = _by_link(gathered, is_far)
        self.num_units = np.where(is_sharded & (degree > 1), np.ceil(num_blocks / np.maximum(unit, 1)) + 1, 0.0)
        within = _by_link(gradients * (degree - 1) / degree, is_far)
        between = _by_link(2 * gradients / degree * (copies - 1) / copies, np.full(len(unit), spans_machines))
        self.share_near, self.share_far = (inside + beside for inside, beside in zip(within, between, strict=True))
        buckets = np.ceil(gradients / np.maximum(bucket, 1.0))
        self.num_parts = np.where(is_sharded, self.num_units * (1 + (copies > 1)), 2 * buckets) * (not is_alone)
        block = float(memory.block_bytes if memory and memory.block_bytes else parameters / num_blocks)
        part = np.where(is_sharded, unit * block, np.minimum(bucket, gradients)) * (not is_alone)
        self.part_near, self.part_far = _by_link(part, np.where(is_sharded, is_far, spans_machines))


def _by_link(size: Floats, is_far: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """What goes to ranks on the same machine, and what goes to others."""
    return np.where(is_far, 0.0, size), np.where(is_far, size, 0.0)
