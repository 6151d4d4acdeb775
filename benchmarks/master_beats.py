"""What agents tell a master, made up: beats of nodes of eight workers, as a training in full swing has them.

The benchmark of the master and the tests of what it makes of beats are told these.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from elastic_ext.master.wire import master_pb2

__all__ = ["NUM_WORKERS", "STEP", "made_window", "made_worker", "made_workers"]

NUM_WORKERS = 8
STEP: Mapping[str, float] = {
    "data": 0.01,
    "forward": 0.09,
    "backward": 0.16,
    "communication": 0.03,
    "optimizer": 0.02,
    "other": 0.01,
    "agreement": 0.002,
}
"""Seconds of a step, by phase."""


def made_window(
    rank: int,
    *,
    end: float,
    world_size: int = NUM_WORKERS,
    step: Mapping[str, float] = STEP,
    num_steps: int = 30,
    at_step: int = 1000,
    config_version: int = 1,
    noise: float = 0.02,
    draw: random.Random | None = None,
) -> master_pb2.StepWindow:
    """Some steps of one rank."""
    draw = draw or random.Random(rank)
    typical = {name: seconds * draw.uniform(1 - noise, 1 + noise) for name, seconds in step.items()}
    length = sum(typical.values())
    spent = {name: num_steps * seconds for name, seconds in typical.items()}
    return master_pb2.StepWindow(
        begin=end - num_steps * length,
        end=end,
        rank=rank,
        world_size=world_size,
        restart=0,
        step=at_step,
        num_steps=num_steps,
        config_version=config_version,
        config_revision=0,
        seconds=spent,
        processor_seconds=spent,
        typical=typical,
        step_seconds=[0.9 * length, length, 1.1 * length, 1.3 * length],
        num_samples=num_steps * 32 * world_size,
        num_tokens=num_steps * 32 * 1024,
        num_bytes=num_steps * 32 * 8192,
        num_detailed=num_steps,
        memory_bytes=6 << 30,
        accelerator_bytes=60 << 30,
        accelerator_peak_bytes=72 << 30,
    )


def made_worker(
    rank: int,
    *,
    end: float,
    world_size: int = NUM_WORKERS,
    step: Mapping[str, float] = STEP,
    num_windows: int = 1,
    at_step: int = 1000,
    config_version: int = 1,
    noise: float = 0.02,
    draw: random.Random | None = None,
) -> master_pb2.Worker:
    """What is told of one worker in one beat, of ten seconds."""
    draw = draw or random.Random(rank)
    typical = {name: seconds * draw.uniform(1 - noise, 1 + noise) for name, seconds in step.items()}
    length = sum(typical.values())
    return master_pb2.Worker(
        rank=rank,
        local_rank=rank % NUM_WORKERS,
        pid=100_000 + rank,
        state="running",
        step=at_step,
        steps_per_second=1 / length,
        samples_per_second=32 * world_size / length,
        tokens_per_second=32 * 1024 * world_size / length,
        memory_bytes=6 << 30,
        accelerator_bytes=60 << 30,
        cpu_percent=103.5,
        gpu_percent=96.0,
        config_version=config_version,
        config_revision=0,
        activity="backward",
        activity_seconds=0.05,
        shares={name: seconds / length for name, seconds in typical.items()},
        step_seconds=length,
        slow_step_seconds=1.1 * length,
        metrics={"num_not_finite": 0.0, "num_skipped": 0.0},
        windows=[
            made_window(
                rank,
                end=end - (num_windows - 1 - number) * 10.0,
                world_size=world_size,
                step=typical,
                at_step=at_step,
                config_version=config_version,
                noise=0.0,
            )
            for number in range(num_windows)
        ],
    )


def made_workers(node: int, *, end: float, num_nodes: int = 1, **changes: object) -> list[master_pb2.Worker]:
    """What a node tells in one beat; its number makes its ranks."""
    ranks = range(node * NUM_WORKERS, (node + 1) * NUM_WORKERS)
    world_size = num_nodes * NUM_WORKERS
    return [made_worker(rank, end=end, world_size=world_size, **changes) for rank in ranks]  # type: ignore[arg-type]
