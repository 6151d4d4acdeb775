"""A run that is resumed from a checkpoint goes on as one that never stopped."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from elastic_ext import CheckpointInterval, ElasticError, StepError
from elastic_ext.errors import CheckpointDamaged, CheckpointMismatch
from tests.ranks import RankPool
from tests.sharded import WAYS, Way, values_of
from tests.training import ResumableSlices, bits_of, make_data, trainer_of

BATCH = 12
EPOCH_STEPS = 7
NUM_STEPS = 10
HALF = 5


@dataclass
class Seen:
    """What a run came to."""

    losses: dict[int, float] = field(default_factory=dict)
    """By the step that they were the first of; several micro-steps are added up."""
    rates: list[float] = field(default_factory=list)
    drawn: list[float] = field(default_factory=list)
    final: list[Any] = field(default_factory=list)
    started_at: int = 0


MakeOptimizer = Callable[[nn.Module], Optimizer]
MakeScheduler = Callable[[Optimizer], Any]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: AdamW(
        [{"params": [part for part in model.parameters() if part.ndim > 1], "weight_decay": 0.1},
         {"params": [part for part in model.parameters() if part.ndim == 1], "lr": 0.003}], lr=0.01, foreach=True),
}  # fmt: skip
SCHEDULERS: dict[str, MakeScheduler] = {
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=30),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.MultiStepLR(optimizer, [2, 2, 4])],
        milestones=[3],
    ),
}


def net(dropout: float, *, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(dropout), nn.Linear(16, 5)]
    return nn.Sequential(*layers).double()


def train(
    folder: Path,
    storage: Path | None,
    *,
    until: int,
    optimizer: str = "adamw",
    scheduler: str = "one cycle",
    seed: int = 0,
    rank: int = 0,
    way: Way | None = None,
    dropout: float = 0.3,
    micro_batch: int = 4,
    **arguments: Any,
) -> Seen:
    """Train until a step, from wherever the newest checkpoint is."""
    plain = net(dropout, seed=seed)
    model = plain if way is None else way.wrap(plain)
    loader = ResumableSlices(make_data(BATCH * EPOCH_STEPS), micro_batch)
    inner = OPTIMIZERS[optimizer](model)
    schedule = SCHEDULERS[scheduler](inner)
    options: dict[str, Any] = {"global_batch_size": BATCH, **arguments}
    if storage is not None:
        options = {"shared_storage_path": storage, "checkpoint_interval": CheckpointInterval(steps=HALF), **options}
    trainer = trainer_of(folder, model, loader, rank=rank, **options)
    seen = Seen()
    with trainer:
        wrapped, wrapped_schedule = trainer.prepare(inner, schedule)
        seen.started_at = trainer.global_step
        while trainer.global_step < until:
            with trainer.epoch(trainer.start_epoch if not seen.losses else None):
                for inputs, targets in loader:
                    step = trainer.global_step
                    with trainer.step():
                        loss = nn.functional.cross_entropy(model(inputs), targets)
                        trainer.backward(loss)
                        if not isinstance(model, FullyShardedDataParallel):  # which clips no doubles
                            trainer.clip_grad_norm_(model.parameters(), 1.0)
                        wrapped.step()
                        wrapped_schedule.step(*([loss.item()] if scheduler == "plateau" else []))
                        wrapped.zero_grad()
                        seen.drawn.append(random.random())
                    seen.losses[step] = seen.losses.get(step, 0.0) + loss.item()
                    if trainer.global_step > step:
                        seen.rates.append(wrapped.effective_rates[0])
                    if trainer.global_step == until:
                        trainer.request_stop()
                        break
        seen.final = bits_of(values_of(model), list(plain.buffers()), inner.state_dict()["param_groups"])
        seen.final += bits_of([state for part, state in inner.state.items() if part.numel()])  # FSDP1 has empty ones
    return seen


def make(folder: Path, name: str) -> Path:
    (folder / name).mkdir(exist_ok=True)
    return folder / name


@pytest.fixture(autouse=True)
def drawn_alike() -> None:
    random.seed(7)


# --- as a run that never stopped ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, optimizer: str, scheduler: str) -> None:
    whole = train(make(tmp_path, "whole"), None, until=NUM_STEPS, optimizer=optimizer, scheduler=scheduler)
    random.seed(7)
    storage = tmp_path / "storage"
    first = train(make(tmp_path, "a"), storage, until=HALF, optimizer=optimizer, scheduler=scheduler)
    random.seed(99)  # another process would have drawn otherwise
    second = train(make(tmp_path, "b"), storage, until=NUM_STEPS, optimizer=optimizer, scheduler=scheduler, seed=3)
    assert (first.started_at, second.started_at) == (0, HALF)
    assert {**first.losses, **second.losses} == whole.losses
    assert first.rates + second.rates == whole.rates
    assert first.drawn + second.drawn == whole.drawn
    assert second.final == whole.final


def resumed_rank(rank: int, folder: Path, way: str, expected: Seen | None) -> None:
    storage = folder / "storage"
    options: dict[str, Any] = {"way": WAYS[way], "rank": rank, "dropout": 0.3, "micro_batch": 3}
    torch.manual_seed(0)
    random.seed(7)
    whole = train(make(folder, "whole"), None, until=NUM_STEPS, **options)
    random.seed(7)
    first = train(make(folder, "a"), storage, until=HALF, **options)
    random.seed(99)
    second = train(make(folder, "b"), storage, until=NUM_STEPS, seed=3, **options)
    assert (first.started_at, second.started_at) == (0, HALF), (first.started_at, second.started_at)
    assert {**first.losses, **second.losses} == whole.losses
    assert first.drawn + second.drawn == whole.drawn
    assert second.final == whole.final


@pytest.mark.parametrize("way", ["ddp", "FSDP1"])
def test_ranks_resume_bit_for_bit(ranks: RankPool, tmp_path: Path, way: str) -> None:
    ranks.run(WAYS[way].num_ranks, resumed_rank, tmp_path, way, None)
