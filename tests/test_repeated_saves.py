"""Checkpoints that are asked for where there is one: nothing is lost, written twice or pretended."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastic_ext import CheckpointInterval
from tests.saving import job_folder
from tests.training import make_data, make_model, trainer_of

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
    assert "epoch_1 holds a checkpoint already, saved at step 4" in line
    assert "begin with trainer.start_epoch" in line
    assert train(tmp_path) == [24], "and the last of them is what is resumed"


def test_epochs_of_a_resumed_run_that_counts_from_zero_are_saved(tmp_path: Path) -> None:
    train(tmp_path, [0, 1])
    train(tmp_path, range(2))
    assert saved(tmp_path) == ["epoch_1", "epoch_2", "step_12", "step_16"]


def test_an_epoch_whose_number_was_used_is_not_saved_twice_where_its_last_step_is(tmp_path: Path) -> None:
    train(tmp_path, [0, 0], saves_last_step=True)
    assert saved(tmp_path) == ["epoch_1", "step_4", "step_8"]
