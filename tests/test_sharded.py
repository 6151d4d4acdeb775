"""Models spread over ranks: fully_shard on one mesh and two, tensor parallelism, FSDP1; as by hand, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from tests.ranks import RankPool
from tests.sharded import WAYS, Way, fresh, values_of
from tests.training import bits_of, make_data, trainer_of

NUM_STEPS = 5
MICRO_BATCH = 4


def optimizer_of(name: str, model: nn.Module) -> Optimizer:
    if name == "sgd":
        return SGD(model.parameters(), lr=0.1, momentum=0.9)
    return AdamW(model.parameters(), lr=1e-2)


def micro_batches(
    way: Way, num_micro_steps: int, num_steps: int = NUM_STEPS
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What this rank's replica takes, in order."""
    degree, rank = way.degree()
    inputs, targets = make_data(num_steps * num_micro_steps * degree * MICRO_BATCH, torch.float32)
    cut = zip(inputs.split(MICRO_BATCH), targets.split(MICRO_BATCH), strict=True)
    return [batch for index, batch in enumerate(cut) if index % degree == rank]


def by_hand(way: Way, name: str, num_micro_steps: int, most: float | None) -> list[Any]:
    model = fresh(way)
    optimizer = optimizer_of(name, model)
    losses: list[float] = []
    for index, (inputs, targets) in enumerate(micro_batches(way, num_micro_steps)):
        is_last = (index + 1) % num_micro_steps == 0
        with way.share(model, now=is_last):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            losses.append(loss.item())
            (loss / num_micro_steps).backward()
        if is_last:
            if most is not None:
                clip_by_hand(model, most)
            optimizer.step()
            optimizer.zero_grad()
    return bits_of(losses, values_of(model))


def clip_by_hand(model: nn.Module, most: float) -> None:
    own = getattr(model, "clip_grad_norm_", None)  # FSDP1's
    if own is not None:
        own(most)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), most)


def by_trainer(
    way: Way, folder: Path, rank: int, name: str, num_micro_steps: int, most: float | None, *, exactly: bool = False
) -> list[Any]:
    model = fresh(way)
    degree, _ = way.degree()
    batch = num_micro_steps * degree * MICRO_BATCH
    trainer = trainer_of(folder, model, rank=rank, global_batch_size=batch, micro_batch_size=MICRO_BATCH)
    optimizer = trainer.prepare(optimizer_of(name, model))
    losses: list[float] = []
    with trainer:
        for inputs, targets in micro_batches(way, num_micro_steps):
            with trainer.step():
                loss = nn.functional.cross_entropy(model(inputs), targets)
                losses.append(loss.item())
                if exactly:
                    trainer.backward(loss)
                else:
                    loss.backward()
                if most is not None:
                    trainer.clip_grad_norm_(model.parameters(), most)
                optimizer.step()
                optimizer.zero_grad()
        assert trainer.global_step == NUM_STEPS
    return bits_of(losses, values_of(model))


def equal_rank(rank: int, folder: Path, way: str, num_micro_steps: int, most: float | None) -> None:
    for name in ("sgd", "adamw"):
        expected = by_hand(WAYS[way], name, num_micro_steps, most)
        for exactly in (False, True):
            run = folder / f"{name}-{exactly}"
            run.mkdir(exist_ok=True)
            found = by_trainer(WAYS[way], run, rank, name, num_micro_steps, most, exactly=exactly)
            assert found == expected, (name, exactly)


@pytest.mark.parametrize("most", [None, 0.05], ids=["", "clipped"])
@pytest.mark.parametrize("num_micro_steps", [1, 4])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_that_of_a_loop_by_hand(
    ranks: RankPool, tmp_path: Path, way: str, num_micro_steps: int, most: float | None
) -> None:
    ranks.run(WAYS[way].num_ranks, equal_rank, tmp_path, way, num_micro_steps, most)
