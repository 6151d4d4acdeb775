"""The jobs of tuning_live.py: what elastic-run starts, small trainings that start badly in a way of their own.

    python -m benchmarks.tuning_live_jobs NAME FOLDER [MOST]

MOST is how many samples at once memory suffices for; all there are without. In FOLDER rank 0 writes steps-0.txt, a line
for each step: when it ended, in nanoseconds of the clock that all processes share, the version that it ran under, and
how many samples it had; and each rank failures.txt, a line for each micro-batch that was too large for the memory there
is.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from benchmarks.allocated import allocated_on_cpu
from elastic_ext import CheckpointOptions, ElasticDataLoader, ElasticTrainer, FollowOptions

__all__ = ["JOBS", "Kind", "most_at_once", "train"]

NUM_SAMPLES = 1 << 20
SLEEP_SECONDS = 0.004
RARE, RARE_SECONDS, USUAL_SECONDS = 20, 0.04, 0.001  # of the skewed samples one in so many takes long
LINK_SECONDS, LINK_BYTES_PER_SECOND = 0.01, 50e6
WIDE = 1 << 18  # floats that passes have of each sample, of the job that has little memory
LITTLE_BYTES = 44 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One of the jobs."""

    width: int
    depth: int
    global_batch: int
    start: Mapping[str, Any]
    """Of the loader."""
    read_seconds: Callable[[int], float] = lambda index: 0.0
    memory_bytes: int | None = None
    """What a rank may take of its device, where that is not much: then passes take megabytes for each sample."""
    has_slow_link: bool = False
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """What is measured one by one beside the tuner."""


_BATCHES_AND_WORKERS: Mapping[str, tuple[Any, ...]] = {
    "dataloader.batch_size": (1, 4, 16, 32),
    "dataloader.num_workers": (0, 1, 2, 4, 6, 8),
}
_BATCHES_AND_PLANS: Mapping[str, tuple[Any, ...]] = {
    "dataloader.batch_size": (1, 4, 16, 32),
    "dataloader.num_workers": (0, 1),
    "parallelism.strategy": ("no_shard", "shard_grad_op", "full_shard"),
}
_START: Mapping[str, Any] = {"batch_size": 1, "num_workers": 0}

JOBS: Mapping[str, Kind] = {
    "data-bound by sleeping": Kind(
        width=256,
        depth=3,
        global_batch=64,
        start=_START,
        read_seconds=lambda index: SLEEP_SECONDS,
        choices=_BATCHES_AND_WORKERS,
    ),
    "skewed data": Kind(
        width=256,
        depth=3,
        global_batch=64,
        start=_START,
        read_seconds=lambda index: USUAL_SECONDS if index % RARE else RARE_SECONDS,
        choices=_BATCHES_AND_WORKERS,
    ),
    "small kernels": Kind(width=16, depth=40, global_batch=64, start=_START, choices=_BATCHES_AND_PLANS),
    "memory-limited": Kind(
        width=256,
        depth=4,
        global_batch=96,
        start=_START,
        memory_bytes=LITTLE_BYTES,
        choices={"dataloader.batch_size": (1, 2, 3, 4, 6, 8, 12), "dataloader.num_workers": (0, 1, 2)},
    ),
    "slow link": Kind(
        width=512, depth=3, global_batch=64, start=_START, has_slow_link=True, choices=_BATCHES_AND_WORKERS
    ),
    "balanced": Kind(
        width=512, depth=4, global_batch=128, start={"batch_size": 16, "num_workers": 1}, choices=_BATCHES_AND_PLANS
    ),
}


class Samples(Dataset[torch.Tensor]):
    """Rows that are made here, each after as long as its job says that reading it takes."""

    def __init__(self, kind: Kind) -> None:
        self._width = kind.width
        self._read_seconds = kind.read_seconds

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        seconds = self._read_seconds(index)
        if seconds:
            time.sleep(seconds)
        return torch.full((self._width,), (index % 1000) / 1000)


class Wide(nn.Module):
    """Takes a mebibyte for each sample, and more for its gradients."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDE // width))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs.unsqueeze(1) * self.scale.unsqueeze(1)).relu().mean(1)


def model_of(kind: Kind) -> nn.Module:
    """What it trains."""
    layers: list[nn.Module] = [Wide(kind.width)] if kind.memory_bytes is not None else []
    for _ in range(kind.depth):
        layers += [nn.Linear(kind.width, kind.width), nn.ReLU()]
    return nn.Sequential(*layers)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """What it trains by."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def most_at_once(kind: Kind) -> int | None:
    """For how many samples at once memory suffices, by what the allocator gives in true steps; None for any."""
    if kind.memory_bytes is None:
        return None
    torch.manual_seed(0)
    model = model_of(kind)
    optimizer = optimizer_of(model)
    held = [each.numel() * each.element_size() for each in model.parameters()]
    most = 0

    def step(num_samples: int) -> None:
        model(torch.ones(num_samples, kind.width)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(1)
    while 4 * sum(held) + allocated_on_cpu(partial(step, most + 1)) <= kind.memory_bytes:  # DDP has buckets too
        most += 1
    return most


def train(name: str, folder: Path, most: int | None) -> None:
    """Train until told to end."""
    kind = JOBS[name]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model_of(kind))
    if kind.has_slow_link:
        model.register_comm_hook(None, _slow_exchange)
    loader = ElasticDataLoader(Samples(kind), shuffle=True, **kind.start)
    trainer = ElasticTrainer(
        model,
        loader,
        global_batch_size=kind.global_batch,
        follow_options=FollowOptions(progress=False),
        checkpoint_options=CheckpointOptions(save_on_signals=False),
    )
    optimizer = trainer.prepare(optimizer_of(model))
    is_first = dist.get_rank() == 0

    def micro_step(inputs: torch.Tensor) -> None:
        if most is not None and len(inputs) > most:
            with open(folder / "failures.txt", "a") as failures:
                print(len(inputs), file=failures)
            raise torch.OutOfMemoryError(f"out of memory for {len(inputs)} samples")
        model(inputs).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with trainer, open(folder / f"steps-{dist.get_rank()}.txt", "a", buffering=1) as file:
        epoch = trainer.start_epoch
        while not trainer.should_stop:
            with trainer.epoch(epoch):
                for inputs in loader:
                    version = trainer.config.version
                    trainer.run(micro_step, inputs)
                    if is_first and trainer.sync_gradients:
                        print(time.monotonic_ns(), version, kind.global_batch, file=file)
                    if trainer.should_stop:
                        break
            epoch += 1


def _slow_exchange(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """What DDP does, over a link with a latency and a bandwidth of its own."""
    found: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    buffer = bucket.buffer().div_(dist.get_world_size())
    work = dist.all_reduce(buffer, async_op=True)
    assert work is not None

    def later() -> None:
        work.wait()
        time.sleep(LINK_SECONDS + buffer.numel() * buffer.element_size() / LINK_BYTES_PER_SECOND)
        found.set_result(buffer)

    threading.Thread(target=later).start()
    return found


_slow_exchange.__annotations__ = {
    "state": object,
    "bucket": vars(dist)["GradBucket"],
    "return": torch.futures.Future[torch.Tensor],
}


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else None)
