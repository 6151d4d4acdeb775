"""What a real training shows of its profile: a line in the log, sinks, and the profiler switched off."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from elastic_ext import StepProfile
from elastic_ext.records.metrics import RankMetrics
from elastic_ext.training.trainer import ElasticTrainer
from tests.support.training import make_data, make_model, trainer_of


class Kept:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.profiles: list[StepProfile] = []
        self.num_closed = 0

    def write(self, profile: StepProfile) -> None:
        self.profiles.append(profile)

    def close(self) -> None:
        self.num_closed += 1


def train(trainer: ElasticTrainer, loader: DataLoader[object], model: nn.Module, *, num_epochs: int = 2) -> None:
    with trainer:
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
        for epoch in range(num_epochs):
            with trainer.epoch(epoch):
                for inputs, targets in loader:
                    with trainer.step():
                        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                        optimizer.step()
                        optimizer.zero_grad()


def test_a_training_ends_with_a_line_of_its_log_and_its_sinks_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model, loader = make_model(), DataLoader(TensorDataset(*make_data(48)), batch_size=4)
    trainer, early, late = trainer_of(tmp_path, model, loader, global_batch_size=8), Kept(), Kept()
    trainer.add_sink(early)
    train(trainer, loader, model)
    with pytest.raises(Exception, match="training has ended"):
        trainer.add_sink(late)
    (line,) = [each.getMessage() for each in caplog.records if each.name == "elastic_ext.profile.output"]
    assert re.match(
        r"profile: step 12, [\d.]+ [mµ]?s a step \(p50; .* p90\), [\d,]+ samples/s: .*\bforward \d+%.*; ", line
    )
    assert early.num_closed == 1
    (profile,) = early.profiles
    assert (profile.step, profile.num_steps) == (12, 12)
    assert sum(profile.shares.values()) == pytest.approx(1.0)


def test_metrics_of_a_real_training_tell_how_it_trains(tmp_path: Path) -> None:
    model, loader = make_model(), DataLoader(TensorDataset(*make_data(48)), batch_size=4)
    trainer = trainer_of(tmp_path, model, loader, global_batch_size=8)
    train(trainer, loader, model)
    (file,) = tmp_path.rglob("metrics-0.json")
    measures = RankMetrics.from_json(file.read_text()).measures
    assert (measures.num_workers, measures.num_replicas, measures.waits_in_passes) == (0, 1, False)


def test_with_the_profiler_off_nothing_is_shown_and_sinks_are_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("ELASTIC_EXT_PROFILE", "off")
    model, loader = make_model(), DataLoader(TensorDataset(*make_data(48)), batch_size=4)
    trainer, sink = trainer_of(tmp_path, model, loader, global_batch_size=8), Kept()
    trainer.add_sink(sink)
    train(trainer, loader, model)
    assert not list(tmp_path.rglob("profile-*")) and "profile: " not in caplog.text
    assert (sink.profiles, sink.num_closed) == ([], 1)
