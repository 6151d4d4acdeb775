"""What takes part in a step beside a model and one optimizer is in a checkpoint that is copied meanwhile as it was.

Scalers, several optimizers, those that step in one kernel, and what accelerate has prepared.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel

from tests.support.overlapping import MICRO_BATCH, SAVED_STEP, Gate, Net, forget_newer, saving_trainer
from tests.support.ranks import RankPool
from tests.support.training import bits_of, make_data, shared
from tests.training.optimizers.test_accelerate import accelerate_forgotten


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What trains."""

    make: Callable[[Any], list[Optimizer]]
    is_scaled: bool = False
    left_out: int | None = None
    """The step that an infinite loss has the scaler leave out, by its place in the loop."""
    is_accelerated: bool = False


def adamw(model: Any) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=0.01)]


def fused(model: Any) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=0.01, fused=True)]


def two(model: Any) -> list[Optimizer]:
    rest = [*model.norm.parameters(), *model.last.parameters()]
    return [AdamW(model.first.parameters(), lr=0.01), SGD(rest, lr=0.1, momentum=0.9, nesterov=True)]


KINDS = {
    "two optimizers": Kind(make=two),
    "two fused optimizers": Kind(
        make=lambda model: [
            Adagrad(model.first.parameters(), lr=0.1, fused=True),
            SGD([*model.norm.parameters(), *model.last.parameters()], lr=0.1, momentum=0.9, fused=True),
        ]
    ),
    "a rate that is a tensor": Kind(make=lambda model: [AdamW(model.parameters(), lr=torch.tensor(0.01))]),
    "a scaler": Kind(make=two, is_scaled=True),
    "a scaler that leaves the step out": Kind(make=adamw, is_scaled=True, left_out=SAVED_STEP),
    "a scaler and a fused optimizer": Kind(make=fused, is_scaled=True),
    "a fused optimizer that leaves the step out": Kind(make=fused, is_scaled=True, left_out=SAVED_STEP),
    "accelerate": Kind(make=adamw, is_accelerated=True),
    "accelerate with two optimizers": Kind(make=two, is_accelerated=True),
    "accelerate with a scaler": Kind(make=adamw, is_accelerated=True, is_scaled=True),
}


class Training:
    """A run that saves after every second step, a step at a time."""

    def __init__(self, rank: int, folder: Path, kind: Kind, seed: int) -> None:
        self.kind = kind
        num_ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        self.bare = Net(seed, is_sharded=False)
        self.average = AveragedModel(self.bare)
        self.optimizers = kind.make(self.bare)
        self.schedulers = [ExponentialLR(each, 0.9) for each in self.optimizers]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1) if kind.is_scaled else None
        self.accelerator: Any = None
        parts: list[Any] = [*self.optimizers, *self.schedulers]
        if kind.is_accelerated:
            self.accelerator = Accelerator(cpu=True)
            self.accelerator.scaler = self.scaler
            self.model, *parts = self.accelerator.prepare(self.bare, *parts)
        else:
            self.model = shared(self.bare, num_ranks)
        self.trainer = saving_trainer(folder, self.model, rank=rank, accelerator=self.accelerator)
        held = {name.replace(".", "/"): tensor for name, tensor in self.average.state_dict().items()}
        self.trainer.register_state("average", held)
        num_optimizers = len(self.optimizers)
        given = [parts[:num_optimizers], parts[num_optimizers:]]
        scaler = None if kind.is_accelerated else self.scaler
        stepped, scheduled, *scaled = self.trainer.prepare(*given, *([] if scaler is None else [scaler]))
        self.stepped, self.scheduled, self.scaled = stepped, scheduled, next(iter(scaled), None)

    def state(self) -> list[Any]:
        return bits_of(
            self.bare,
            [list(each.state.values()) for each in self.optimizers],
            [each.param_groups[0]["lr"] for each in self.optimizers],
            [each.state_dict() for each in self.schedulers],
            self.average.state_dict(),
            None if self.scaler is None else self.scaler.state_dict(),
        )

    def take(self, place: int, before_step: Callable[[], object] = lambda: None) -> None:
        """One step, and what a loop does after it."""
        inputs, targets = make_data(MICRO_BATCH, torch.float32, seed=place)
        with self.trainer.step():
            loss = nn.functional.cross_entropy(self.model(inputs), targets)
            loss = loss * (torch.inf if place == self.kind.left_out else 1.0)
            if self.accelerator is not None:
                self.accelerator.backward(loss)
            else:
                (loss if self.scaled is None else self.scaled.scale(loss)).backward()
            before_step()
            for optimizer in reversed(self.stepped):  # not in the order in which the trainer knows them
                optimizer.step() if self.scaled is None else self.scaled.step(optimizer)
            if self.scaled is not None:
                self.scaled.update()
            for optimizer, scheduler in zip(self.stepped, self.scheduled, strict=True):
                scheduler.step()
                optimizer.zero_grad()
        self.average.update_parameters(self.bare)
        with torch.no_grad():
            for part in self.bare.parameters():
                part.mul_(1.01)


def save_beside_a_step(rank: int, folder: Path, kind: Kind) -> list[Any]:
    """What there was before the step beside which it was copied."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        gate = Gate(monkeypatch)
        gate.open()
        training = Training(rank, folder, kind, seed=0)

        def open_late() -> None:
            assert training.trainer._training.checkpoints.job.saver.is_copying
            gate.open_soon()

        with training.trainer:
            for place in range(SAVED_STEP):
                training.take(place)
            due = training.state()
            gate.close()
            training.take(SAVED_STEP, open_late)
            training.take(SAVED_STEP + 1)
            assert training.trainer.global_step == SAVED_STEP + 2 - (kind.left_out is not None)
            assert training.state() != due
    return due


def on_rank(rank: int, folder: Path, name: str) -> None:
    kind, num_ranks = KINDS[name], torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    with accelerate_forgotten(rank, num_ranks) if kind.is_accelerated else nullcontext():
        due = save_beside_a_step(rank, folder, kind)
    if rank == 0:
        for step in (SAVED_STEP + 1, SAVED_STEP + 2):  # of the end, with or without the one left out
            forget_newer(folder, step)
    if num_ranks > 1:
        torch.distributed.barrier()
    with accelerate_forgotten(rank, num_ranks) if kind.is_accelerated else nullcontext():
        training = Training(rank, folder, kind, seed=7)
        with training.trainer:
            assert training.trainer.global_step == SAVED_STEP
            assert training.state() == due


@pytest.mark.parametrize("name", KINDS)
def test_all_that_takes_part_is_saved_as_it_was_before_the_step(tmp_path: Path, name: str) -> None:
    on_rank(0, tmp_path, name)


@pytest.mark.parametrize("name", ["a scaler that leaves the step out", "accelerate with two optimizers"])
def test_all_that_takes_part_on_ranks_is_saved_as_it_was(ranks: RankPool, tmp_path: Path, name: str) -> None:
    ranks.run(2, on_rank, tmp_path, name)
