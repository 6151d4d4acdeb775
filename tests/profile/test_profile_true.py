"""What is told of a training in which much happens is true: configs that change, memory that runs out, checkpoints, and
steps that are taken again; in the windows, the ledger, the page and the status.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from elastic_ext import (
    CheckpointInterval,
    CheckpointOptions,
    ElasticDataLoader,
    ElasticTrainer,
    FollowOptions,
    StepOptions,
)
from elastic_ext.cli import main
from elastic_ext.profile.ledger import Ledger, TimeUse
from elastic_ext.records.files import write_whole
from tests.profile.test_profile import total, windows_of
from tests.report.test_report import check_page, gathered, shown
from tests.support.loops import DEADLINE_SECONDS
from tests.support.ranks import RankPool
from tests.support.resharding import WHOLE
from tests.support.training import make_data

STEP, SAVE, CHANGE, EVALUATE = 0.02, 0.15, 0.2, 0.3
"""Seconds that a pass takes at least, and what comes besides."""
GLOBAL_BATCH, LAST = 8, 16
SHORT_AT, SAVE_EVERY, FIRST_AT, BACK_AT, BACK_TO, SECOND_AT = 2, 4, 5, 10, 8, 12
"""Steps: where memory runs out, after how many they are saved, after which configs come, from where training goes back
and to where.
"""
FIRST_IN_FORCE = FIRST_AT + 2
SECOND_IN_FORCE = SECOND_AT + 3  # a step more: recomputing is tried in a pass before it comes into force


class Sleepy(nn.Module):
    """Passes that take a while, and memory for so many samples at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)), nn.Linear(6, 5))
        self.limit = 8

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(STEP)
        if len(inputs) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. (planted)")
        outputs: torch.Tensor = self.layers(inputs)
        return outputs


class SlowToSave(ElasticDataLoader):
    """Whose position takes a while to be told."""

    def state_dict(self) -> dict[str, Any]:
        time.sleep(SAVE)
        return super().state_dict()


class Job:
    """One rank's training; the ranks' files lie in one run directory, as on one node."""

    def __init__(self, rank: int, folder: Path) -> None:
        torch.manual_seed(0)
        self.rank, self.run_dir = rank, folder / "0"
        self.model = Sleepy()
        self.loader = SlowToSave(TensorDataset(*make_data(GLOBAL_BATCH * LAST, torch.float32)), batch_size=4)
        self.trainer = ElasticTrainer(
            self.model,
            self.loader,
            global_batch_size=GLOBAL_BATCH,
            step_options=StepOptions(guard="always"),
            shared_storage_path=folder / "kept",
            checkpoint_interval=CheckpointInterval(steps=SAVE_EVERY),
            checkpoint_options=CheckpointOptions(save_in_background=False),
            follow_options=FollowOptions(run_dir=self.run_dir, job="true", agree_every_steps=1, timeout_seconds=60.0),
        )
        self.trainer.parallelize(self.model, WHOLE, units=[f"layers.{each}" for each in range(2)])
        self.trainer.on_change("user", lambda old, new: time.sleep(CHANGE))
        self.optimizer = self.trainer.prepare(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.retried: list[float] = []
        """How long each attempt took that came to nothing."""
        self.versions: list[tuple[float, int, str]] = []
        """When a config was in force first, before which step."""

    def train(self) -> tuple[float, float]:
        """From when to when steps were taken."""
        with self.trainer:
            begin = time.time()
            with self.trainer.epoch(0):
                for inputs, targets in self.loader:
                    self.note_config()
                    self.take_step(inputs, targets)
                    if not self.trainer._prepared.steps.is_partial:
                        self.do_besides(self.trainer.global_step)
            self.model.eval()
            self.model(inputs)
            time.sleep(EVALUATE)
        return begin, time.time()

    def take_step(self, *batch: torch.Tensor) -> None:
        if self.trainer.global_step == SHORT_AT and self.rank == 0:
            self.model.limit = 2
        began = time.perf_counter()
        if self.trainer.run(self.work, *batch) is None:
            self.retried.append(time.perf_counter() - began)

    def work(self, inputs: torch.Tensor, targets: torch.Tensor) -> bool:
        nn.functional.cross_entropy(self.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return True

    def note_config(self) -> None:
        label = self.trainer.config.label
        if not self.versions or self.versions[-1][2] != label:
            self.versions.append((time.time(), self.trainer.global_step, label))

    def do_besides(self, step: int) -> None:
        is_first = not any(label.startswith(("1", "2")) for _, _, label in self.versions)
        if step == FIRST_AT and is_first:
            self.put({"version": 1, "dataloader": {"batch_size": 1}, "user": {"knob": 1}})
        elif step == BACK_AT and self.num_back == 0:
            self.num_back += 1
            self.trainer.rewind(BACK_TO)
        elif step == SECOND_AT:
            checkpointing = {"activation_checkpoint": 1.0}
            self.put({"version": 2, "dataloader": {"batch_size": 2}, "parallelism": checkpointing, "user": {"knob": 2}})

    num_back = 0

    def put(self, config: dict[str, Any]) -> None:
        """Have a config come, as a person would, and go on once it has been seen."""
        if self.rank == 0:
            write_whole(self.run_dir / "config.json", json.dumps(config).encode(), durable=False)
        watcher: Any = self.trainer._prepared.follower._watcher
        assert watcher.wait_for_version(config["version"], DEADLINE_SECONDS)


def train(rank: int, folder: Path) -> dict[str, Any]:
    job = Job(rank, folder)
    span = job.train()
    return {"span": span, "retried": job.retried, "versions": job.versions}


def spent(ledger: Ledger, entry: TimeUse) -> float:
    return ledger.seconds[entry]


def check_rank(folder: Path, rank: int, ledger: Ledger, told: Mapping[str, Any]) -> None:
    """What is said of a rank, beside what it has seen itself."""
    windows = windows_of(folder, rank)
    begin, end = told["span"]
    assert windows[1].begin == pytest.approx(begin, abs=0.3)
    in_all = sum(sum(each.seconds.values()) for each in windows[1:])
    assert in_all == pytest.approx(end - begin, rel=0.01, abs=0.2)
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_seconds, rel=1e-6)
    (retried,) = told["retried"]
    assert STEP <= spent(ledger, TimeUse.ROLLED_BACK) <= retried
    num_passes = {"before": SHORT_AT, "short": 2 * (FIRST_IN_FORCE - SHORT_AT), "again": 4 * (BACK_AT - BACK_TO)}
    assert spent(ledger, TimeUse.LOST_STEPS) >= num_passes["again"] * STEP
    num_passes["then"] = 4 * (SECOND_IN_FORCE - FIRST_IN_FORCE) + 2 * (LAST - SECOND_IN_FORCE)
    kept = sum(num_passes.values()) - num_passes["again"]
    assert kept * STEP <= spent(ledger, TimeUse.FORWARD) <= total(windows, "forward") - num_passes["again"] * STEP
    assert spent(ledger, TimeUse.CHANGE) >= 2 * CHANGE
    assert spent(ledger, TimeUse.CHECKPOINT) >= LAST // SAVE_EVERY * SAVE
    assert spent(ledger, TimeUse.OUTSIDE) >= EVALUATE
    assert [each.step for each in windows if each.num_steps == 0] == [0, BACK_TO]
    # What is not any of these is little: nothing of them was taken for something else.
    for entry in (TimeUse.AGREEMENT, TimeUse.OTHER, TimeUse.DATA):
        assert spent(ledger, entry) < 0.2 * ledger.wall_seconds, entry
    for entry in (TimeUse.UNSEEN, TimeUse.RESTART, TimeUse.STOPPED, TimeUse.STEP):
        assert spent(ledger, entry) == 0, entry


def test_a_run_in_which_much_happens_is_told_of_truly(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = ranks.run(2, train, tmp_path)
    record = gathered(tmp_path / "0")
    for rank, each in enumerate(told):
        link = tmp_path / str(rank)
        if not link.exists():  # as these files lie on a node of its own
            link.symlink_to(tmp_path / "0")
        check_rank(tmp_path, rank, record.ranks[rank].ledger, each)
    assert sum(record.ledger.seconds.values()) == pytest.approx(record.ledger.wall_seconds, rel=1e-6)
    assert (record.first_step, record.last_step, record.num_steps_again) == (0, LAST, BACK_AT - BACK_TO)
    assert (record.num_samples, record.num_restarts, record.notes) == (LAST * GLOBAL_BATCH, 0, ())

    assert [each.name for each in record.periods] == ["0", "0.1", "1", "2"]
    num_again = BACK_AT - BACK_TO
    between = SECOND_IN_FORCE - FIRST_IN_FORCE + num_again
    steps = [SHORT_AT, FIRST_IN_FORCE - SHORT_AT, between, LAST - SECOND_IN_FORCE]
    assert [each.num_steps for each in record.periods] == steps
    for moment, period in zip([begin for begin, _, _ in told[0]["versions"]], record.periods, strict=True):
        assert period.begin == pytest.approx(moment, abs=0.3), "where it lies on the axis"
    assert "dataloader.batch_size 4 -> 2 (memory ran out on rank 0" in record.periods[1].text
    assert "parallelism.activation_checkpoint 0.0 -> 1.0" in record.periods[3].text

    words = check_page(shown(record)).words
    for name in ("v0.1", "v1", "v2", "steps rolled back", "steps taken again", "2 taken again", "out of memory"):
        assert name in words, name
    assert main(["status", str(tmp_path / "0"), "--json"]) in (0, 1)
    status = json.loads(capsys.readouterr().out)
    assert [(each["rank"], each["step"]) for each in status["ranks"]] == [(0, LAST), (1, LAST)]
    shares = [each.seconds.get("checkpoint", 0.0) / each.length for each in windows_of(tmp_path)]
    assert any(status["ranks"][0]["shares"].get("checkpoint", 0.0) == pytest.approx(each, abs=1e-3) for each in shares)
