"""What a simulated job is: a model, a cluster and data drawn from a seed, with all that no tuner is told of them.

Sizes are bytes and times are seconds, of one rank, unless a comment says otherwise. Some models are made of matrix
products over long sequences, others of convolutions, whose libraries take workspaces of their own.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastic_ext.tuner.space import Point

__all__ = ["STRATEGIES", "Array", "Columns", "Hidden", "columns_of", "draw", "quirk"]

Array = NDArray[np.float64]

STRATEGIES = ("no_shard", "shard_grad_op", "full_shard", "hybrid_shard")
NO_SHARD, GRAD_OP, FULL, HYBRID = range(4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hidden:
    """One model, one cluster and its data, as they truly are."""

    seed: int
    # ---- the model ----
    has_workspaces: bool
    num_blocks: int
    num_parameters: int
    parameter_bytes: float
    optimizer_bytes: float
    buffer_bytes: float
    block_bytes: float
    """Of parameters; the rest is in no block."""
    saved_bytes: float
    """What a block keeps of one sample for its backward pass,"""
    kept_bytes: float
    """... and what it keeps where it is computed again."""
    temporary_bytes: float
    """Of one sample, in the backward pass of a block."""
    logit_bytes: float
    """Of one sample."""
    flops: float
    """Of one sample, forward and backward."""
    moved_bytes: float
    """Read and written for one sample, forward and backward."""
    num_ops: float
    """Of a micro-step, forward and backward, without the optimizer's."""
    # ---- the machines ----
    num_local: int
    num_machines: int
    num_processors: int
    capacity_bytes: float
    context_bytes: float
    flops_per_second: float
    bytes_per_second: float
    seconds_per_op: float
    local_link: float
    """Bytes per second between ranks of a machine,"""
    far_link: float
    """... and of different machines."""
    collective_seconds: float
    """For each collective, and each doubling of its ranks."""
    # ---- the data ----
    share: int
    load_seconds: float
    """Of one sample in one process."""
    load_unevenness: float
    sample_bytes: float
    # ---- what nobody is told ----
    efficiency: float
    """Of the best that a device does, for large micro-batches,"""
    half_size: float
    """... and the micro-batch at which half of that is left."""
    size_quirk: float
    """How far the efficiency of one size is from what its neighbours' would make one expect."""
    recompute: float
    """What it takes to compute a block again, by what its forward pass takes."""
    sharded_quirk: tuple[float, float, float, float]
    """By strategy: what passes take, by what they would."""
    host_factor: float
    unit_seconds: float
    """Of the host, for each unit that is gathered."""
    overlap: float
    """Of a pass, beside which something can be on its way,"""
    contention: float
    """... and how much longer the pass then takes, by the time that is overlapped."""
    bucket_tail: float
    worker_cost: float
    """What each further worker costs the others,"""
    steal: float
    """... and what the training thread loses to workers for which there is no processor."""
    transfer_seen: float
    """Of a transfer from page-locked memory, what steps wait for."""
    loop_seconds: float
    move_speed: float
    """Bytes per second, when the sharding changes,"""
    workers_seconds: float
    """... and for how long training stands still when workers are made."""
    fragments: float
    """Of what passes take, what cannot be used beside it."""
    bias: float
    """What passes take, by what an analyzer thinks,"""
    bias_by_size: float
    """... and how far that is from it at one size."""

    @property
    def world_size(self) -> int:
        return self.num_local * self.num_machines

    @property
    def other_bytes(self) -> float:
        return self.parameter_bytes - self.num_blocks * self.block_bytes

    @property
    def gradient_bytes(self) -> float:
        return self.parameter_bytes


def draw(seed: int) -> Hidden:
    """The job of a seed."""
    r = np.random.default_rng(seed)

    def log_uniform(low: float, high: float) -> float:
        return float(math.exp(r.uniform(math.log(low), math.log(high))))

    has_workspaces = bool(r.random() < 0.25)
    num_local, num_machines = int(r.choice([1, 2, 4, 8], p=[0.1, 0.25, 0.3, 0.35])), int(r.choice([1, 2, 4]))
    speed = float(r.choice([60e12, 120e12, 300e12, 800e12]))
    if has_workspaces:
        num_blocks = int(r.integers(8, 51))
        num_parameters = log_uniform(1e7, 5e8)
        flops = log_uniform(6e9, 3e11)
        activations = log_uniform(4e7, 6e8)  # of one sample, in all blocks
        logits, half_size = 4e3, log_uniform(2.0, 24.0)
        in_blocks, ops_of_block = 0.95, r.uniform(25, 60)
    else:
        num_blocks = int(r.integers(8, 49))
        num_parameters = log_uniform(6e7, 4e9)
        length, words = int(r.choice([256, 512, 1024, 2048, 4096])), float(r.choice([8e3, 32e3, 50e3]))
        width = math.sqrt(num_parameters / 12 / num_blocks)
        flops = 6 * num_parameters * length * r.uniform(1.0, 1.25)
        activations = length * width * r.uniform(20, 36) * num_blocks
        logits, half_size = length * words * r.uniform(4, 8), r.uniform(0.3, 6.0) * 1024 / length
        in_blocks, ops_of_block = min(1.0, 1 / (1 + words / (12 * width * num_blocks))), r.uniform(60, 140)
    saved = activations / num_blocks
    parameter_bytes = 4.0 * num_parameters
    return Hidden(
        seed=seed,
        has_workspaces=has_workspaces,
        num_blocks=num_blocks,
        num_parameters=int(num_parameters),
        parameter_bytes=parameter_bytes,
        optimizer_bytes=parameter_bytes * float(r.choice([1, 2])),
        buffer_bytes=num_blocks * 2e5,
        block_bytes=parameter_bytes * in_blocks / num_blocks,
        saved_bytes=saved,
        kept_bytes=saved * r.uniform(0.04, 0.12),
        temporary_bytes=saved * r.uniform(0.3, 0.8),
        logit_bytes=logits,
        flops=flops,
        moved_bytes=activations * r.uniform(3, 6),
        num_ops=num_blocks * ops_of_block,
        num_local=num_local,
        num_machines=num_machines,
        num_processors=int(r.choice([2, 4, 6, 8, 12])),
        capacity_bytes=float(r.choice([16, 24, 40, 80])) * 2**30,
        context_bytes=r.uniform(0.4, 1.2) * 2**30,
        flops_per_second=speed,
        bytes_per_second=float(r.choice([0.8e12, 1.5e12, 3e12])),
        seconds_per_op=r.uniform(4e-6, 9e-6),
        local_link=log_uniform(12e9, 300e9),
        far_link=log_uniform(1.2e9, 40e9),
        collective_seconds=r.uniform(8e-6, 6e-5),
        share=int(r.choice([8, 12, 16, 24, 32, 48, 64, 96, 128])),
        load_seconds=log_uniform(2e-4, 6e-2),
        load_unevenness=r.uniform(0.02, 0.5),
        sample_bytes=log_uniform(4e3, 2e6),
        efficiency=r.uniform(0.35, 0.7),
        half_size=half_size,
        size_quirk=r.uniform(0.0, 0.05),
        recompute=r.uniform(0.9, 1.15),
        sharded_quirk=(1.0, r.uniform(0.99, 1.08), r.uniform(0.99, 1.09), r.uniform(0.99, 1.09)),
        host_factor=r.uniform(0.8, 1.5),
        unit_seconds=r.uniform(1e-4, 5e-4),
        overlap=r.uniform(0.5, 0.95),
        contention=r.uniform(0.0, 0.15),
        bucket_tail=r.uniform(0.5, 1.2),
        worker_cost=r.uniform(0.0, 0.05),
        steal=r.uniform(0.05, 0.6),
        transfer_seen=r.uniform(0.05, 0.3),
        loop_seconds=log_uniform(1e-4, 1e-2),
        move_speed=log_uniform(1e9, 1e10),
        workers_seconds=r.uniform(0.1, 0.6),
        fragments=r.uniform(0.0, 0.025),
        bias=1 + (r.uniform(0.0, 0.07) if has_workspaces else r.uniform(-0.01, 0.015)),
        bias_by_size=r.uniform(0.01, 0.03) if has_workspaces else 0.004,
    )


@dataclass(frozen=True, slots=True)
class Columns:
    """Points side by side: what each knob is, the library's and torch's own ways filled in."""

    batch: Array
    workers: Array
    ahead: Array
    is_pinned: NDArray[np.bool_]
    strategy: NDArray[np.int64]
    degree: Array
    """Over how many ranks a copy of the model is sharded."""
    unit: Array
    ratio: Array
    """Of blocks that are computed again: a whole number of them."""
    bucket_bytes: Array

    @property
    def is_sharded(self) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self.strategy != NO_SHARD
        return found


def columns_of(hidden: Hidden, points: Sequence[Point]) -> Columns:
    """The points side by side; ValueError where one is none that such a job could have."""

    def numbers(name: str, otherwise: float) -> Array:
        found = [getattr(point, name) for point in points]
        return np.array([otherwise if each is None else float(each) for each in found])

    strategy = np.array([STRATEGIES.index(str(point.strategy)) for point in points])
    chosen = numbers("shard_degree", hidden.num_local)
    degree = np.select([strategy == NO_SHARD, strategy == HYBRID], [np.ones(len(points)), chosen], hidden.world_size)
    batch, workers = numbers("batch_size", 1), numbers("num_workers", 0)
    if (batch < 1).any() or (workers < 0).any() or (hidden.world_size % degree != 0).any():
        raise ValueError(
            "a point has an empty micro-batch, fewer workers than none, or a shard degree that leaves ranks over"
        )
    return Columns(
        batch=np.minimum(batch, hidden.share),
        workers=workers,
        ahead=numbers("prefetch_factor", 2),
        is_pinned=numbers("pin_memory", 0) > 0,
        strategy=strategy,
        degree=degree,
        unit=np.minimum(numbers("unit", 1), hidden.num_blocks),
        ratio=np.round(numbers("activation_checkpoint", 0) * hidden.num_blocks) / hidden.num_blocks,
        bucket_bytes=numbers("bucket_cap_mb", 25) * 2**20,
    )


def quirk(seed: int, name: str, *columns: Array) -> Array:
    """A number from -1 to 1 for each row, which is the same for the same values, and like no other's."""
    mixed = np.full(np.broadcast(*columns).shape, seed ^ zlib.crc32(name.encode()) << 20, dtype=np.uint64)
    for column in columns:
        mixed = (mixed ^ np.round(column * 1024).astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(31)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(29)
    return mixed.astype(np.float64) / 2.0**63 - 1.0
