"""Checkpoints that are asked for where there is one: nothing is lost, written twice or pretended."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastic_ext import CheckpointInterval
from elastic_ext.errors import CheckpointExists
from tests.support.ranks import RankPool
from tests.support.saving import job_folder
from tests.support.sharded import WAYS
from tests.support.training import make_data, make_model, trainer_of

EPOCH_STEPS = 4


def train(
    folder: Path, epochs: Iterable[int] | None = None, *, saves_last_step: bool = False, **arguments: Any
) -> list[int]:
    """Train for these epochs, or for one from where the newest checkpoint is; the steps at which epochs ended."""
    folder.mkdir(exist_ok=True)
    model = make_model()
    loader = DataLoader(TensorDataset(*make_data(4 * EPOCH_STEPS)), batch_size=4)
    options = {"shared_storage_path": folder / "storage", "checkpoint_interval": CheckpointInterval(epochs=1)}
    ended = []
    with trainer_of(folder, model, loader, **{**options, **arguments}) as trainer:
        optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        for epoch in [trainer.start_epoch] if epochs is None else epochs:
            with trainer.epoch(epoch):
                for inputs, targets in loader:
                    with trainer.step():
                        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                        optimizer.step()
                        optimizer.zero_grad()
                if saves_last_step:
                    trainer.save_checkpoint()
            ended.append(trainer.global_step)
    return ended


def saved(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in job_folder(folder / "storage").glob("*/COMMIT"))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and "holds a checkpoint already" in record.getMessage()
    ]


# --- epochs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when_save_fails", ["raise", "warn"])
def test_an_epoch_whose_number_was_used_is_saved_by_its_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, when_save_fails: str
) -> None:
    train(tmp_path, [0, 1, 0, 1, 2], when_save_fails=when_save_fails)
    assert saved(tmp_path) == ["epoch_1", "epoch_2", "epoch_3", "step_12", "step_16"]
    (line,) = lines(caplog)
    assert "epoch_1 holds a checkpoint already" in line
    assert "begin with trainer.start_epoch" in line
    assert train(tmp_path) == [24], "and the last of them is what is resumed"


def test_epochs_of_a_resumed_run_that_counts_from_zero_are_saved(tmp_path: Path) -> None:
    train(tmp_path, [0, 1])
    train(tmp_path, range(2))
    assert saved(tmp_path) == ["epoch_1", "epoch_2", "step_12", "step_16"]


def test_an_epoch_whose_number_was_used_is_not_saved_twice_where_its_last_step_is(tmp_path: Path) -> None:
    train(tmp_path, [0, 0], saves_last_step=True)
    assert saved(tmp_path) == ["epoch_1", "step_4", "step_8"]


# --- steps ----------------------------------------------------------------------------------------------------------


def prepared(folder: Path, rank: int = 0, way: str | None = None) -> tuple[Any, nn.Module, Any, torch.Tensor]:
    """A trainer with registered state, its model and what prepare() gives."""
    folder.mkdir(exist_ok=True)
    plain = nn.Sequential(make_model()[0], nn.BatchNorm1d(16).double(), make_model()[2])
    model = plain if way is None else WAYS[way].wrap(plain)
    trainer = trainer_of(folder, model, rank=rank, micro_batch_size=4, shared_storage_path=folder / "storage")
    registered = torch.zeros(3)
    trainer.register_state("ema", registered)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return trainer, model, trainer.prepare(optimizer, schedule), registered


def take(trainer: Any, model: nn.Module, prepared: Any) -> None:
    optimizer, schedule = prepared
    inputs, targets = make_data(4)
    with trainer.step():
        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def saved_twice_rank(rank: int, folder: Path, way: str | None) -> None:
    trainer, model, parts, registered = prepared(folder, rank, way)
    with trainer:
        take(trainer, model, parts)
        first = trainer.save_checkpoint()
        torch.rand(3)
        assert trainer.save_checkpoint() == first, "what holds just this is not written again"
        if rank == 0:
            registered.fill_(5.0)
        with pytest.raises(CheckpointExists, match=r"step_1 holds .*; it does not have registered/ema/ as it is now"):
            trainer.save_checkpoint()
        registered.zero_()
        assert trainer.save_checkpoint() == first
        parts[1].step()
        with pytest.raises(CheckpointExists, match="not have schedulers as it is now"):
            trainer.save_checkpoint()
        take(trainer, model, parts)
        assert trainer.save_checkpoint().name == "step_2"
        part = list(model.parameters())[-1]
        if rank == num_ranks() - 1:
            part.data.add_(1.0)  # which torch does not count as a change
        with pytest.raises(CheckpointExists, match=r"not have 2\.bias as it is now"):
            trainer.save_checkpoint()


def num_ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


@pytest.mark.parametrize("way", [None, "ddp", "fully_shard"])
def test_a_step_that_has_a_checkpoint_is_compared_with_it(ranks: RankPool, tmp_path: Path, way: str | None) -> None:
    ranks.run(1 if way is None else WAYS[way].num_ranks, saved_twice_rank, tmp_path, way)
    assert saved(tmp_path) == ["step_1", "step_2"]


def test_a_resumed_run_saves_anew_what_is_gone_and_not_what_is_there(tmp_path: Path) -> None:
    trainer, model, parts, _ = prepared(tmp_path)
    with trainer:
        take(trainer, model, parts)
        first = trainer.save_checkpoint()
    trainer, model, parts, registered = prepared(tmp_path)
    with trainer:
        assert trainer.save_checkpoint() == first
        shutil.rmtree(first)
        registered.fill_(5.0)
        assert trainer.save_checkpoint() == first
        assert (first / "COMMIT").exists()
    trainer, _, _, registered = prepared(tmp_path)
    trainer.close()
    assert registered.tolist() == [5.0] * 3


def test_what_changed_after_an_epochs_checkpoint_is_saved_by_its_step(tmp_path: Path) -> None:
    train(tmp_path, [0])
    model = make_model()
    trainer = trainer_of(tmp_path, model, micro_batch_size=4, shared_storage_path=tmp_path / "storage")
    with trainer:
        trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        assert trainer.save_checkpoint().name == "epoch_1"
        with torch.no_grad():
            next(model.parameters()).zero_()
        assert trainer.save_checkpoint().name == f"step_{EPOCH_STEPS}"
