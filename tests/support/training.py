"""Small trainings for tests of the trainer: a model, its data, a loader that can be told its sizes, and a plain loop
to compare with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from elastic_ext import (
    BatchPlan,
    CheckpointInterval,
    CheckpointOptions,
    ElasticTrainer,
    FollowOptions,
    MemoryModel,
    StepOptions,
    StepPlan,
)

__all__ = [
    "ResumableSlices",
    "Slices",
    "bits_of",
    "grouped",
    "make_data",
    "make_model",
    "plain_losses",
    "shared",
    "trainer_of",
]

Batch = tuple[torch.Tensor, torch.Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


def make_model(dtype: torch.dtype = torch.float64, *, seed: int = 0) -> nn.Sequential:
    """The same small classifier every time."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5)).to(dtype)


def make_data(num_samples: int, dtype: torch.dtype = torch.float64, *, seed: int = 1) -> Batch:
    """Inputs and classes."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, 6, generator=draw, dtype=torch.float64)
    return inputs.to(dtype), torch.randint(5, (num_samples,), generator=draw)


class Slices:
    """A MicroBatchSource over tensors, in their order: every micro-step takes the next samples, rank after rank."""

    def __init__(self, data: Batch, batch_size: int, *, drop_last: bool = False, is_endless: bool = False) -> None:
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.committed: list[int] = []
        """The samples that this rank's commits consumed."""
        self.sizes: list[tuple[int, ...]] = []
        """This rank's micro-batches of each commit."""
        self._data = data
        self._is_endless = is_endless
        self._position = 0  # samples of the epoch that commits have passed, over all ranks
        self._handed: list[list[int]] = []  # since the last commit, micro-batch by micro-batch
        self._step: StepPlan | None = None
        self._plan: BatchPlan | None = None
        self._rank = 0
        self._num_cuts = 0

    @property
    def remaining(self) -> int | None:
        return None if self._is_endless else len(self._data[0]) - self._position

    def plan(self, plan: BatchPlan, rank: int) -> None:
        assert not self._handed, "a plan came in the middle of a step"
        self._plan, self._rank = plan, rank
        self._num_cuts += 1

    def commit(self, num_micro_batches: int) -> None:
        assert self._step is not None
        self._position += sum(sum(sizes[: len(self._handed)]) for sizes in self._step.micro_batches)
        self.sizes.append(tuple(len(indices) for indices in self._handed))
        self.committed += [index for indices in self._handed for index in indices]
        self.rollback()

    def rollback(self) -> None:
        self._handed = []
        self._num_cuts += 1

    def _begin(self) -> int:
        """Where the next loop starts."""
        return 0

    def __iter__(self) -> Iterator[Batch]:
        self._position = self._begin()
        self.rollback()
        assert self._plan is not None, "the loader was not told its sizes"
        while (step := self._plan.next_step(self.remaining)) is not None:
            self._step = step
            start = self._position
            cut = self._num_cuts
            for sizes in zip(*step.micro_batches, strict=True):
                mine = start + sum(sizes[: self._rank])
                indices = [index % len(self._data[0]) for index in range(mine, mine + sizes[self._rank])]
                start += sum(sizes)
                self._handed.append(indices)
                yield self._data[0][indices], self._data[1][indices]
                if self._num_cuts != cut:  # committed, rolled back, or cut otherwise from here on
                    break
            else:
                raise AssertionError("a step was handed out whole, and neither committed nor rolled back")


class ResumableSlices(Slices):
    """One whose position is kept in checkpoints: a number, whatever the number of ranks."""

    def __init__(self, data: Batch, batch_size: int, **options: bool) -> None:
        super().__init__(data, batch_size, **options)
        self._start = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = self._position = state["position"]

    def _begin(self) -> int:
        start, self._start = self._start, 0
        return start


def trainer_of(folder: Path, model: nn.Module, dataloader: Any = None, *, rank: int = 0, **arguments: Any) -> Any:
    """A trainer whose files are this rank's own, as on a node of its own; by default it saves nothing by itself."""
    run_dir = folder / str(rank)
    run_dir.mkdir(exist_ok=True)
    if arguments.get("shared_storage_path") is not None:
        arguments.setdefault("checkpoint_interval", CheckpointInterval())
    options: dict[str, Any] = {"agree_every_steps": 1, "timeout_seconds": 60.0, "job": "test", **arguments}
    return ElasticTrainer(model, dataloader, **grouped(run_dir=run_dir, **options))


def grouped(**arguments: Any) -> dict[str, Any]:
    """Arguments of ElasticTrainer, where each option that belongs to a group was given by its own name."""
    groups: dict[str, Any] = {
        "step_options": StepOptions,
        "checkpoint_options": CheckpointOptions,
        "follow_options": FollowOptions,
        "memory_model": MemoryModel,
    }
    for name, kind in groups.items():
        own = {each.name: arguments.pop(each.name) for each in dataclasses.fields(kind) if each.name in arguments}
        if own:
            arguments[name] = kind(**own)
    return arguments


def plain_losses(
    make_optimizer: MakeOptimizer, batches: list[Batch], dtype: torch.dtype = torch.float64
) -> tuple[list[float], nn.Sequential]:
    """The loss of each whole batch, and the model, when one plain torch process trains on them."""
    model = make_model(dtype)
    optimizer = make_optimizer(list(model.parameters()))
    losses = []
    for inputs, targets in batches:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        losses.append(loss.item())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


def bits_of(*things: Any) -> list[Any]:
    """Every tensor's bytes and every other value, in order, of nested containers: equal lists are equal bit for bit."""
    found: list[Any] = []
    for thing in things:
        if isinstance(thing, DTensor):
            found += bits_of(thing.to_local())
        elif isinstance(thing, torch.Tensor):
            found.append((tuple(thing.shape), str(thing.dtype), thing.detach().cpu().contiguous().numpy().tobytes()))
        elif isinstance(thing, dict):
            for name, value in thing.items():
                found += [str(name), *bits_of(value)]
        elif isinstance(thing, (list, tuple)):
            for value in thing:
                found += bits_of(value)
        elif isinstance(thing, nn.Module):
            found += bits_of(thing.state_dict())
        else:
            found.append(repr(thing))
    return found


def shared(model: nn.Module, world_size: int) -> nn.Module:
    """The model in DDP where there are several ranks."""
    return DistributedDataParallel(model) if world_size > 1 else model
