"""The training loops that benchmarks/trainer_steps.py compares, on one rank alone and on several that train together.

Every loop has a model and an optimizer of its own, and lives as long as the benchmark. All begin with the same
parameters and take the same batches, so that all must end with the same parameters.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from benchmarks.joined import joined
from elastic_ext import ElasticTrainer, FollowOptions, StepOptions

__all__ = ["Block", "Done", "Loop", "LoopName", "Rank", "Task", "Work", "make_loop", "training_rank"]

LoopName = Literal["hand", "default", "ours", "backward", "full", "accelerate", "fabric"]
Batch = tuple[torch.Tensor, torch.Tensor]
Work = tuple[int, str]  # micro-steps, and a digest of the parameters that they led to

_NUM_BATCHES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is trained, and how: the same in every loop of a comparison."""

    widths: tuple[int, ...]
    """Of the layers, from the inputs to the outputs."""
    micro_batch: int
    num_micro_steps: int
    """Of a step."""
    is_sharded: bool = False
    """On several ranks by fully_shard, every layer and the whole, instead of DDP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """Which rank a process is, and where it finds the others."""

    rank: int
    world_size: int
    port: int
    folder: Path
    task: Task
    names: tuple[LoopName, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Some micro-steps to take in one of the loops."""

    name: LoopName
    num_micro_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What a rank made of a block; times are per micro-step."""

    wall_seconds: float
    cpu_seconds: float
    """Of all its threads."""
    thread_seconds: float
    """Of the thread that trains, which runs backward passes too on a CPU."""
    work: Work


class Loop:
    """One way to train: ``take`` goes over batches, which make whole steps."""

    def __init__(self, model: nn.Module, take: Callable[[Sequence[Batch]], None], batches: Sequence[Batch]) -> None:
        self._parameters = [_local(parameter) for parameter in model.parameters()]
        self._take = take
        self._batches = batches
        self._start = [parameter.detach().clone() for parameter in self._parameters]

    def run(self, num_micro_steps: int, *, begin: Callable[[], object] = lambda: None) -> Done:
        """Train from the beginning; ``begin`` is called before the clocks are read."""
        with torch.no_grad():
            for parameter, start in zip(self._parameters, self._start, strict=True):
                parameter.copy_(start)
        batches = [self._batches[index % len(self._batches)] for index in range(num_micro_steps)]
        begin()
        wall_began, cpu_began, thread_began = time.perf_counter(), time.process_time(), time.thread_time()
        self._take(batches)
        thread, cpu = time.thread_time() - thread_began, time.process_time() - cpu_began
        wall = time.perf_counter() - wall_began
        return Done(
            wall_seconds=wall / num_micro_steps,
            cpu_seconds=cpu / num_micro_steps,
            thread_seconds=thread / num_micro_steps,
            work=(num_micro_steps, self._digest()),
        )

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for parameter in self._parameters:
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()[:16]


def make_loop(name: LoopName, task: Task, folder: Path, stack: ExitStack, *, rank: int = 0, num_ranks: int = 1) -> Loop:
    """The loop of that name; what it needs to end is left to ``stack``. With several ranks all make it together."""
    draw = torch.Generator().manual_seed(rank)
    shapes = ((task.micro_batch, task.widths[0]), (task.micro_batch, task.widths[-1]))
    batches = [
        (torch.randn(shapes[0], generator=draw), torch.randn(shapes[1], generator=draw)) for _ in range(_NUM_BATCHES)
    ]
    torch.manual_seed(0)
    layers = [nn.Linear(*pair) for pair in zip(task.widths, task.widths[1:], strict=False)]
    plain: nn.Module = layers[0] if len(layers) == 1 else nn.Sequential(*layers)
    model: nn.Module = plain
    if num_ranks > 1 and task.is_sharded:
        for layer in (*layers, plain):
            fully_shard(layer)
    elif num_ranks > 1 and name != "accelerate":  # which wraps it itself
        model = DistributedDataParallel(plain)
    optimizer = SGD(plain.parameters(), lr=0.01)
    if name == "accelerate":
        return Loop(plain, _with_accelerate(plain, optimizer, task), batches)
    if name == "fabric":
        return Loop(plain, _with_fabric(plain, optimizer, task), batches)
    if name == "hand":
        return Loop(plain, _by_hand(model, optimizer, task), batches)
    is_default = name == "default"
    trainer = ElasticTrainer(
        model,
        global_batch_size=None if is_default else task.micro_batch * task.num_micro_steps * num_ranks,
        micro_batch_size=None if is_default else task.micro_batch,
        step_options=StepOptions(rollback="full" if name == "full" else "gradients"),
        follow_options=FollowOptions(job=name, run_dir=folder / name, progress=False),
    )
    stack.callback(trainer.close)
    prepared = trainer.prepare(optimizer)
    return Loop(plain, _with_trainer(trainer, model, prepared, calls_backward=name == "backward"), batches)


# --- the loops ------------------------------------------------------------------------------------------------------


def _by_hand(model: nn.Module, optimizer: Optimizer, task: Task) -> Callable[[Sequence[Batch]], None]:
    """What one writes without a library."""
    num_micro_steps = task.num_micro_steps

    def take(batches: Sequence[Batch]) -> None:
        for inputs, targets in batches:
            loss = mse_loss(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

    def accumulate(batches: Sequence[Batch]) -> None:
        for index, (inputs, targets) in enumerate(batches, start=1):
            loss = mse_loss(model(inputs), targets) / num_micro_steps
            loss.backward()  # type: ignore[no-untyped-call]
            if index % num_micro_steps == 0:
                optimizer.step()
                optimizer.zero_grad()

    def accumulate_sharded(batches: Sequence[Batch]) -> None:
        assert isinstance(model, FSDPModule)
        for index, (inputs, targets) in enumerate(batches, start=1):
            is_last = index % num_micro_steps == 0
            model.set_requires_gradient_sync(is_last)
            loss = mse_loss(model(inputs), targets) / num_micro_steps
            loss.backward()  # type: ignore[no-untyped-call]
            if is_last:
                optimizer.step()
                optimizer.zero_grad()

    def accumulate_on_ranks(batches: Sequence[Batch]) -> None:
        assert isinstance(model, DistributedDataParallel)
        for index, (inputs, targets) in enumerate(batches, start=1):
            is_last = index % num_micro_steps == 0
            with nullcontext() if is_last else model.no_sync():
                loss = mse_loss(model(inputs), targets) / num_micro_steps
                loss.backward()  # type: ignore[no-untyped-call]
            if is_last:
                optimizer.step()
                optimizer.zero_grad()

    if num_micro_steps == 1:
        return take
    if isinstance(model, FSDPModule):
        return accumulate_sharded
    return accumulate_on_ranks if isinstance(model, DistributedDataParallel) else accumulate


def _with_trainer(
    trainer: ElasticTrainer, model: nn.Module, optimizer: Optimizer, *, calls_backward: bool
) -> Callable[[Sequence[Batch]], None]:
    def take(batches: Sequence[Batch]) -> None:
        for inputs, targets in batches:
            with trainer.step():
                loss = mse_loss(model(inputs), targets)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()

    def take_with_backward(batches: Sequence[Batch]) -> None:
        for inputs, targets in batches:
            with trainer.step():
                loss = mse_loss(model(inputs), targets)
                trainer.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    return take_with_backward if calls_backward else take


def _with_accelerate(plain: nn.Module, plain_optimizer: Optimizer, task: Task) -> Callable[[Sequence[Batch]], None]:
    """With several ranks accelerate itself wraps the model with DDP, and leaves it with no_sync."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=task.num_micro_steps)
    model, optimizer = accelerator.prepare(plain, plain_optimizer)

    def take(batches: Sequence[Batch]) -> None:
        accelerator.gradient_accumulation_steps = task.num_micro_steps  # all accelerators of a process share it
        for inputs, targets in batches:
            with accelerator.accumulate(model):
                loss = mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    return take


def _with_fabric(plain: nn.Module, plain_optimizer: Optimizer, task: Task) -> Callable[[Sequence[Batch]], None]:
    """On one rank, where its no_backward_sync has nothing to leave out."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(plain, plain_optimizer)
    num_micro_steps = task.num_micro_steps

    def take(batches: Sequence[Batch]) -> None:
        for inputs, targets in batches:
            loss = mse_loss(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    def accumulate(batches: Sequence[Batch]) -> None:
        for index, (inputs, targets) in enumerate(batches, start=1):
            loss = mse_loss(model(inputs), targets) / num_micro_steps
            fabric.backward(loss)
            if index % num_micro_steps == 0:
                optimizer.step()
                optimizer.zero_grad()

    return take if num_micro_steps == 1 else accumulate


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """What of it lies on this rank."""
    return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter


# --- ranks ----------------------------------------------------------------------------------------------------------


@contextmanager
def training_rank(setup: Rank) -> Iterator[Callable[[Block], Done]]:
    """A rank with all its loops, made before anything is timed."""
    with joined(rank=setup.rank, world_size=setup.world_size, port=setup.port), ExitStack() as stack:
        loops = {
            name: make_loop(name, setup.task, setup.folder, stack, rank=setup.rank, num_ranks=setup.world_size)
            for name in setup.names
        }
        gc.collect()
        gc.freeze()

        def begin() -> None:
            gc.collect()
            dist.barrier()

        yield lambda block: loops[block.name].run(block.num_micro_steps, begin=begin)
