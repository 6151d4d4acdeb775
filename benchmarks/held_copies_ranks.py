"""The ranks of benchmarks/held_copies.py: each trains a model whose state is large, as a job with storage does.

All begin with the same parameters and take the same batches, so that all must end with the same state. How often the
trainer asks for what a checkpoint holds, as it does for each copy, its schedule counts.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import ConstantLR

from benchmarks.joined import joined
from benchmarks.linear import digest_of, linear_model, random_batches, start_again
from elastic_ext import CheckpointInterval, CheckpointOptions, ElasticTrainer, FollowOptions

__all__ = ["Block", "Done", "Rank", "Task", "copying_rank"]

NUM_BATCHES = 16
NEVER = 10**9  # steps until a checkpoint is due: none is saved, as between two of a long training


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is trained, and how."""

    widths: tuple[int, ...]
    """Of the layers, from the inputs to the outputs."""
    num_samples: int
    """Of a step, on each rank."""
    num_steps: int
    """Of an epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """Which rank a process is, where it finds the others, and whether a signal is to end its training well."""

    rank: int
    world_size: int
    port: int
    folder: Path
    task: Task
    saves_on_signals: bool


@dataclass(frozen=True, slots=True)
class Block:
    """Train from the beginning for so many epochs."""

    num_epochs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What a rank made of a block."""

    wall_seconds: float
    cpu_seconds: float
    """Of all its threads."""
    num_copies: int
    state_bytes: int
    """Of all ranks together."""
    work: tuple[int, str]
    """Epochs, and a digest of the state that they led to."""


@contextmanager
def copying_rank(setup: Rank) -> Iterator[Callable[[Block], Done]]:
    """A rank with its training, made before anything is timed."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        if setup.world_size > 1:
            stack.enter_context(joined(rank=setup.rank, world_size=setup.world_size, port=setup.port))
        training = _Training(setup)
        stack.callback(training.trainer.close)
        gc.collect()
        gc.freeze()
        yield training.run


class _Schedule(ConstantLR):
    """Leaves rates as they are, and counts how often somebody asks for its state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.num_asked = 0
        super().__init__(optimizer, factor=1.0)

    def state_dict(self) -> dict[str, Any]:
        self.num_asked += 1
        return {name: value for name, value in super().state_dict().items() if name != "num_asked"}


class _Training:
    def __init__(self, setup: Rank) -> None:
        task = setup.task
        self._num_ranks, self._num_steps = setup.world_size, task.num_steps
        plain = linear_model(task.widths)
        self._model: nn.Module = plain if setup.world_size == 1 else DistributedDataParallel(plain)
        self._batches = random_batches(task.widths, task.num_samples, NUM_BATCHES, seed=setup.rank)
        self.trainer = ElasticTrainer(
            self._model,
            micro_batch_size=task.num_samples,
            checkpoint_interval=CheckpointInterval(steps=NEVER),
            shared_storage_path=setup.folder / "storage",
            checkpoint_options=CheckpointOptions(save_on_signals=setup.saves_on_signals),
            follow_options=FollowOptions(
                job="copies" if setup.saves_on_signals else "none", run_dir=setup.folder / "run", progress=False
            ),
        )
        inner = AdamW(plain.parameters())
        self._schedule = _Schedule(inner)
        self._optimizer, _ = self.trainer.prepare(inner, self._schedule)
        parameters = list(plain.parameters())
        kept = [value for parameter in parameters for _, value in sorted(inner.state[parameter].items())]
        self._state = [tensor.detach() for tensor in (*parameters, *kept)]
        self._start = [tensor.clone() for tensor in self._state]

    def run(self, block: Block) -> Done:
        start_again(self._state, self._start)
        gc.collect()
        if self._num_ranks > 1:
            dist.barrier()
        num_asked = self._schedule.num_asked
        wall_began, cpu_began = time.perf_counter(), time.process_time()
        for _ in range(block.num_epochs):
            self._take_epoch()
        return Done(
            wall_seconds=time.perf_counter() - wall_began,
            cpu_seconds=time.process_time() - cpu_began,
            num_copies=self._schedule.num_asked - num_asked,
            state_bytes=sum(tensor.nbytes for tensor in self._state),
            work=(block.num_epochs, digest_of(self._state)),
        )

    def _take_epoch(self) -> None:
        with self.trainer.epoch():
            for step in range(self._num_steps):
                inputs, targets = self._batches[step % NUM_BATCHES]
                with self.trainer.step():
                    loss = mse_loss(self._model(inputs), targets)
                    loss.backward()  # type: ignore[no-untyped-call]
                    self._optimizer.step()
                    self._optimizer.zero_grad()
