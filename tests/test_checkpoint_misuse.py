"""What cannot be done with checkpoints: refused on every rank at once, in words that help, with nothing changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_ext.errors import CheckpointError, ElasticError
from elastic_ext.fsdp import ShardCheckpointer
from tests.ranks import RankPool
from tests.training import make_data, make_model, shared, trainer_of


def everything_in(storage: Path) -> dict[str, tuple[int, bytes]]:
    """Every file by its path, with what changes when it is written or replaced."""
    files = sorted(path for path in storage.rglob("*") if path.is_file())
    return {str(path.relative_to(storage)): (path.stat().st_ino, path.read_bytes()) for path in files}


def closed_rank(_: int, storage: Path) -> None:
    model = nn.Linear(2, 2)
    checkpointer = ShardCheckpointer(storage, job="x")
    path = checkpointer.save(1, model)
    checkpointer.save(2, model)
    checkpointer.close()
    before = everything_in(storage)
    asked: list[Callable[[], object]] = [
        lambda: checkpointer.save(3, model),
        lambda: checkpointer.load(model),
        lambda: checkpointer.load(model, path=path),
        checkpointer.latest,
        checkpointer.claim,
    ]
    for ask in asked:
        with pytest.raises(CheckpointError, match=r"of job 'x' is closed, .* call this before close"):
            ask()
    checkpointer.wait()
    checkpointer.close()
    assert everything_in(storage) == before


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_closed_neither_saves_nor_loads_nor_answers(ranks: RankPool, tmp_path: Path, num_ranks: int) -> None:
    ranks.run(num_ranks, closed_rank, tmp_path)


def small_trainer(folder: Path, rank: int, num_ranks: int, **arguments: Any) -> tuple[Any, nn.Module]:
    folder.mkdir(exist_ok=True)
    model = shared(make_model(), num_ranks)
    options = {"shared_storage_path": folder / "storage", "micro_batch_size": 4, **arguments}
    return trainer_of(folder, model, rank=rank, **options), model


def take(trainer: Any, model: nn.Module, optimizer: Any) -> None:
    inputs, targets = make_data(4)
    with trainer.step():
        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def ended_rank(rank: int, folder: Path, num_ranks: int) -> None:
    trainer, model = small_trainer(folder, rank, num_ranks)
    with trainer:
        optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            take(trainer, model, optimizer)
            trainer.save_checkpoint()
        take(trainer, model, optimizer)
    before = everything_in(folder / "storage")
    for ask in (trainer.save_checkpoint, trainer._save_fsdp_state, trainer._load_fsdp_state):
        with pytest.raises(ElasticError, match=r"training has ended, .* within `with trainer:`"):
            ask()
    assert everything_in(folder / "storage") == before


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_training_that_has_ended_neither_saves_nor_loads(ranks: RankPool, tmp_path: Path, num_ranks: int) -> None:
    ranks.run(num_ranks, ended_rank, tmp_path, num_ranks)
    (folder,) = (tmp_path / "storage" / "fsdp_checkpoint").iterdir()
    assert sorted(name for name in os.listdir(folder) if name.startswith("step")) == ["step_1", "step_2"]
