"""The whole loop, with nothing made up: a job that starts badly under elastic-run, its master, and what tunes it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from elastic_ext.cli import main
from elastic_ext.config.elastic_config import ElasticConfig
from tests.agent.master.test_master_run import record_of
from tests.support.growing_job import FIRST_BATCH, RATE
from tests.support.nodes import Node, nodes, samples_of_steps
from tests.support.tuned_job import GLOBAL_BATCH, NUM_SAMPLES

DEADLINE_SECONDS = 240.0
_Found = TypeVar("_Found")


def until(look: Callable[[], _Found | None], *, what: str) -> _Found:
    """What ``look`` finds, once it finds something; it asks the master, which shares the machine with the training."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while (found := look()) is None:
        assert time.monotonic() < deadline, f"not in time: {what}"
        threading.Event().wait(0.5)
    return found


class Tuned:
    """Two ranks of such a job, and what is said of it."""

    def __init__(self, folder: Path, node: Node, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.node = folder, node
        self._capsys = capsys

    def log(self) -> list[dict[str, Any]]:
        """Decisions, none as long as nobody answers."""
        self._capsys.readouterr()
        status = main(["tuning", "log", "--json", "--master", str(self.node.run_dir)])
        out = self._capsys.readouterr().out
        return [json.loads(line) for line in out.splitlines()] if status == 0 else []

    def status(self) -> str:
        self._capsys.readouterr()
        main(["status", "--master", str(self.node.run_dir)])
        return self._capsys.readouterr().out

    def events(self, rank: int = 0) -> list[dict[str, Any]]:
        text = (self.node.run_dir / f"events-{rank}.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def versions_in_force(self, rank: int) -> list[int]:
        return [each["details"]["version"] for each in self.events(rank) if each["kind"] == "config-applied"]

    def stop(self) -> None:
        """At the end of the epoch."""
        (self.folder / "stop").touch()
        assert self.node.end() == 0, self.node.text

    def check_samples(self) -> None:
        """Every sample of every epoch was trained on once."""
        steps = samples_of_steps(self.folder)
        assert list(steps) == list(range(1, len(steps) + 1))
        per_epoch = NUM_SAMPLES // GLOBAL_BATCH
        assert len(steps) % per_epoch == 0
        for first in range(1, len(steps) + 1, per_epoch):
            epoch = [sample for step in range(first, first + per_epoch) for sample in steps[step]]
            assert sorted(epoch) == list(range(NUM_SAMPLES)), f"of the epoch from step {first} on"


def measured_of(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in log if each["measured"] is not None]


def has_tried_workers(log: list[dict[str, Any]]) -> bool:
    return any("dataloader.num_workers" in each["changes"] and each["version"] is not None for each in log)


def job(folder: Path, *options: str) -> Node:
    return Node(folder / "node", [*options, "--nproc-per-node=2", "-m", "tests.support.tuned_job", str(folder)])


@pytest.mark.slow
def test_a_job_that_starts_badly_is_tuned_while_it_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with nodes(job(tmp_path, "--standalone", "--tuning=auto")) as (node,):
        tuned = Tuned(tmp_path, node, capsys)
        log = until(
            lambda: found if len(measured_of(found := tuned.log())) >= 3 and has_tried_workers(found) else None,
            what="three decisions that were measured, and workers, which it lacks, tried",
        )
        measured = measured_of(log)
        for each in measured:
            assert each["kind"] in ("probe", "settle", "undo") and each["outcome"] in ("kept", "undone")
            assert each["reason"] and each["predicted"] > 0 and each["before"] > 0
        first = measured[0]
        assert first["base"] == 0 and first["version"] == 1 and first["changes"]
        for rank in (0, 1):
            in_force = tuned.versions_in_force(rank)
            assert in_force == list(range(1, len(in_force) + 1)) and len(in_force) >= 3, "each of them, in its order"
        config = ElasticConfig.parse((node.run_dir / "config.json").read_bytes())
        assert config.version >= 3 and "predicted" in config.reason
        assert "tuner          auto, " in tuned.status()

        assert main(["config", "set", "dataloader.prefetch_factor=5", "--master", str(node.run_dir)]) == 0
        (pause,) = until(lambda: [each for each in tuned.log() if each["kind"] == "pause"] or None, what="a pause")
        assert "a person set dataloader.prefetch_factor in version" in pause["reason"]
        assert "tuner          auto, paused" in tuned.status()
        version = ElasticConfig.parse((node.run_dir / "config.json").read_bytes()).version
        until(lambda: version in tuned.versions_in_force(0) or None, what="the person's version")
        assert main(["tuning", "resume", "--master", str(node.run_dir)]) == 0
        until(lambda: "resume" in {each["kind"] for each in tuned.log()} or None, what="that it goes on")
        tuned.stop()
    assert main(["tuning", "log", "--master", str(node.run_dir)]) == 2, "the master has ended with the job"
    tuned.check_samples()


@pytest.mark.slow
def test_by_default_it_advises_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with nodes(job(tmp_path, "--standalone")) as (node,):
        tuned = Tuned(tmp_path, node, capsys)
        words = until(
            lambda: found if "samples/s at best" in (found := tuned.status()) else None, what="a measured config"
        )
        assert "tuner          advise, watching" in words
        assert {each["kind"] for each in tuned.log()} <= {"advise", "hold", "reopen"}
        assert tuned.versions_in_force(0) == [] and not (node.run_dir / "config.json").exists()
        node.send(signal.SIGTERM)
        node.end()


@pytest.mark.slow
def test_an_own_master_that_is_killed_goes_on_with_what_was_decided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with nodes(job(tmp_path, "--standalone", "--tuning=auto")) as (node,):
        tuned = Tuned(tmp_path, node, capsys)
        before = until(lambda: found if len(found := tuned.log()) >= 2 else None, what="two decisions")
        record = until(lambda: record_of(node), what="a master")
        os.kill(record.pid, signal.SIGKILL)
        until(lambda: found if (found := record_of(node)) and found.pid != record.pid else None, what="another master")
        after = until(
            lambda: found if len(found := tuned.log()) > len(before) else None, what="a decision of the next master"
        )
        assert [each["number"] for each in after] == list(range(1, len(after) + 1))
        assert [each["reason"] for each in after[: len(before)]] == [each["reason"] for each in before]
        tuned.stop()
    tuned.check_samples()


@pytest.mark.slow
def test_steps_grow_as_far_as_a_person_lets_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Measured in the trainer, told of to the master, decided there, agreed on by the ranks, and with it the rates."""
    most = 4 * FIRST_BATCH
    alone = {
        "dataloader.num_workers": [0],
        "communication.bucket_cap_mb": ["torch"],
        "parallelism.strategy": ["no_shard"],
    }
    knobs = {"global_batch_size": [FIRST_BATCH, most], "dataloader.batch_size": [FIRST_BATCH // 2], **alone}
    node = Node(
        tmp_path / "node",
        ["--standalone", "--tuning=auto", "--nproc-per-node=2", "-m", "tests.support.growing_job", str(tmp_path)],
    )
    node.run_dir.mkdir(parents=True, exist_ok=True)
    (node.run_dir / "config.json").write_text(json.dumps({"version": 1, "tuning": {"knobs": knobs}}))
    with nodes(node):
        tuned = Tuned(tmp_path, node, capsys)

        def grown() -> list[dict[str, Any]] | None:
            sizes = [each for each in tuned.log() if each["changes"].get("global_batch_size", 0) > FIRST_BATCH]
            return [each for each in sizes if each["outcome"] == "kept"] or None

        kept = until(grown, what="larger steps that are kept")
        size = kept[-1]["changes"]["global_batch_size"]
        assert FIRST_BATCH < size <= most and "noise" in kept[-1]["reason"]
        rows = until(
            lambda: found if (found := _steps(tmp_path, 0))[-1][0] * 2 >= size else None, what="steps of that size"
        )
        samples, rate = rows[-1]
        assert RATE < rate <= RATE * samples * 2 / FIRST_BATCH, "the rate follows, by no more than steps have grown"
        assert all(each == (FIRST_BATCH // 2, RATE) for each in rows[:8])
        tuned.stop()
    ranks = [_steps(tmp_path, rank) for rank in (0, 1)]
    assert ranks[0] == ranks[1], "the same sizes and rates on all ranks"


def _steps(folder: Path, rank: int) -> list[tuple[int, float]]:
    lines = (folder / f"steps-{rank}.txt").read_text().splitlines()
    return [(int(line.split()[0]), float(line.split()[1])) for line in lines if len(line.split()) == 2]
