"""How far training is, and of which step its newest checkpoint is, as a rank's metrics tell it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastic_ext import CheckpointInterval, ElasticDataLoader, ElasticTrainer
from elastic_ext.cli.jobs import config_file_in
from elastic_ext.training.counters import Counts
from elastic_ext.training.options import FollowOptions
from elastic_ext.training.reports import Speed

DATA = TensorDataset(torch.arange(24.0).reshape(24, 1))


@pytest.mark.parametrize("elastic", [True, False])
def test_the_metrics_of_a_rank_have_the_steps_left_of_the_epoch_and_the_newest_checkpoint(
    tmp_path: Path, elastic: bool
) -> None:
    model, began = nn.Linear(1, 1), time.time()
    loader: Any = ElasticDataLoader(DATA, batch_size=2) if elastic else DataLoader(DATA, batch_size=2)
    run_dir, told = tmp_path / "run", []
    trainer = ElasticTrainer(
        model,
        loader,
        global_batch_size=4,
        shared_storage_path=tmp_path / "storage",
        checkpoint_interval=CheckpointInterval(steps=4),
        follow_options=FollowOptions(job="j", run_dir=run_dir, config_file=tmp_path / "own.json"),
    )
    optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with trainer:
        for epoch in range(2):
            with trainer.epoch(epoch):
                for number, (inputs,) in enumerate(loader):
                    trainer._session.follower.reports.due_at = 0.0  # type: ignore[union-attr] # at the next boundary
                    with trainer.step():
                        model(inputs).sum().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                    if number % 2:
                        measures = json.loads((run_dir / "metrics-0.json").read_text())["measures"]
                        told.append((measures["epoch"], measures["num_epoch_steps_left"]))
        trainer.save_checkpoint()
    measures = json.loads((run_dir / "metrics-0.json").read_text())["measures"]
    assert told == [(epoch, left) for epoch in range(2) for left in (5, 4, 3, 2, 1, 0)]
    assert (measures["epoch"], measures["num_epoch_steps_left"], measures["checkpoint_step"]) == (None, None, 12)
    assert began - 1.0 <= measures["checkpoint_time"] <= time.time()
    assert config_file_in(run_dir) == tmp_path / "own.json"


def test_the_metrics_of_a_rank_have_the_batch_and_the_learning_rate_in_use(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    loader = ElasticDataLoader(DATA, batch_size=2)
    following = FollowOptions(job="j", run_dir=tmp_path, agree_every_steps=1)
    trainer = ElasticTrainer(model, loader, global_batch_size=4, follow_options=following)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer, schedule = trainer.prepare(inner, torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 0.5))

    def told() -> list[float]:
        measures = json.loads((tmp_path / "metrics-0.json").read_text())["measures"]
        return [measures[name] for name in ("global_batch_size", "micro_batch_size", "learning_rate")]

    with trainer:
        assert told() == [4, 2, 0.05]
        changes = {"optimizer.learning_rate": 0.3, "dataloader.batch_size": 1, "global_batch_size": 3}
        proposal = trainer.propose(changes, "to see that it happens")
        with trainer.epoch(0):
            for (inputs,) in loader:
                with trainer.step():
                    model(inputs).sum().backward()
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
        assert proposal.outcome == "in force"
        assert told() == pytest.approx([3, 1, 0.15])


class Run:
    """A run that takes steps at a rate that halves with each, and saves checkpoints in ``folder``."""

    def __init__(self, folder: Path, name: str, **given: Any) -> None:
        self.model, self.run_dir = nn.Linear(1, 1), folder / name
        self.loader = ElasticDataLoader(DATA, batch_size=2)
        self.trainer = ElasticTrainer(
            self.model,
            self.loader,
            global_batch_size=4,
            shared_storage_path=folder / "storage",
            checkpoint_interval=CheckpointInterval(),
            follow_options=FollowOptions(job="j", run_dir=self.run_dir),
            **given,
        )
        inner = torch.optim.SGD(self.model.parameters(), lr=1.0)
        halving = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 0.5**step)
        self.optimizer, self.schedule = self.trainer.prepare(inner, halving)

    def take(self, num_steps: int) -> None:
        for _, (inputs,) in zip(range(2 * num_steps), self.loader, strict=False):
            with self.trainer.step():
                self.model(inputs).sum().backward()
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()

    def told(self) -> list[Any]:
        """The step, the learning rate and the step of the newest checkpoint in the metrics."""
        metrics = json.loads((self.run_dir / "metrics-0.json").read_text())
        return [metrics["step"], metrics["measures"]["learning_rate"], metrics["measures"]["checkpoint_step"]]


def test_the_first_metrics_of_a_resumed_run_have_its_rate_and_the_checkpoint_that_it_goes_on_from(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, "first")
    with run.trainer, run.trainer.epoch(0):
        run.take(3)
        run.trainer.save_checkpoint()
    resumed = Run(tmp_path, "second")
    with resumed.trainer:
        assert resumed.trainer.global_step == 3
        assert resumed.told() == [3, 0.125, 3]


def test_metrics_are_written_at_the_step_after_a_save_and_once_training_has_ended(tmp_path: Path) -> None:
    run = Run(tmp_path, "run")
    with run.trainer:
        with run.trainer.epoch(0):
            run.take(2)
            run.trainer.save_checkpoint()
            run.take(1)
            assert run.told() == [3, 0.125, 2]
            run.take(1)
        run.trainer.save_checkpoint()
    assert run.told() == [4, 0.0625, 4]


def test_metrics_that_are_written_soon_after_others_keep_their_rates() -> None:
    counts = Counts()
    speed = Speed(counts)
    assert speed.measure().steps_per_second is None
    counts.num_boundaries, counts.num_samples = 8, 64
    first = speed.measure()
    assert first.steps_per_second is not None and first.samples_per_second == 8 * first.steps_per_second
    again = speed.measure()
    assert (again.steps_per_second, again.samples_per_second) == (first.steps_per_second, first.samples_per_second)
