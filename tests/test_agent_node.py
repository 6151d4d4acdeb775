"""One node under elastic-run: failures are explained, workers restarted, what was staged is kept, nothing is left."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from elastic_ext.agent.processes import is_alive
from tests.elastic_job import NUM_SAMPLES
from tests.nodes import Node, last_step, nodes, samples_of_steps, until

JOB = ("-m", "tests.elastic_job")


def started(tmp_path: Path, *arguments: str, launch: tuple[str, ...] = ()) -> Node:
    return Node(tmp_path / "node", ["--standalone", "--nproc-per-node=2", *launch, *JOB, str(tmp_path), *arguments])


def held(folder: Path, step: int, *, ranks: int = 2) -> bool:
    """Whether so many processes have written that step."""
    files = folder.glob("samples-*.txt")
    return sum(f"\n{step} " in file.read_text() for file in files) >= ranks


def test_a_worker_that_is_killed_is_named_and_training_goes_on_from_what_was_staged(tmp_path: Path) -> None:
    with nodes(started(tmp_path, "--steps=16", "--every=4", "--hold-at=10", launch=("--max-restarts=1",))) as (node,):
        until(lambda: held(tmp_path, 10))
        (tmp_path / "go").touch()
        os.kill(node.workers()[1].pid, signal.SIGKILL)
        assert node.end() == 0, node.text
    assert "rank 1" in node.text and "SIGKILL" in node.text
    steps = samples_of_steps(tmp_path)
    assert sorted(steps) == list(range(1, 17))
    assert sorted(sample for step in range(1, 9) for sample in steps[step]) == list(range(NUM_SAMPLES))
    assert sorted(sample for step in range(9, 17) for sample in steps[step]) == list(range(NUM_SAMPLES))


def test_workers_end_with_an_agent_that_is_killed(tmp_path: Path) -> None:
    with nodes(started(tmp_path, "--steps=100000", "--pace=0.01")) as (node,):
        until(lambda: last_step(tmp_path) > 3 or None)
        workers, memory = node.workers(), Path(node.record().memory_folder)
        node.send(signal.SIGKILL)
        until(lambda: not any(is_alive(worker) for worker in workers.values()) or None)
        until(lambda: not memory.exists() or None)
        assert len(workers) == 2


def test_sigterm_ends_all_with_a_checkpoint(tmp_path: Path) -> None:
    with nodes(started(tmp_path, "--steps=100000", "--pace=0.01", "--every=100000")) as (node,):
        until(lambda: last_step(tmp_path) > 3 or None)
        node.send(signal.SIGTERM)
        assert node.end() == 143
    assert list((tmp_path / "checkpoints").rglob("COMMIT"))


def test_what_was_staged_on_all_ranks_is_a_checkpoint_before_they_are_restarted(tmp_path: Path) -> None:
    arguments = ("--steps=20", "--every=4", "--full-from=6", "--hold-at=10")
    with nodes(started(tmp_path, *arguments, launch=("--max-restarts=1",))) as (node,):
        node.wait_for("No space left")
        until(lambda: held(tmp_path, 10))
        (tmp_path / "go").touch()
        os.kill(node.workers()[0].pid, signal.SIGKILL)
        assert node.end() == 0, node.text
    (staged,) = [event for event in node.events() if event["kind"] == "staged"]
    assert staged["details"]["path"].endswith("step_8"), staged
    began = [json.loads(line) for line in (node.run_dir / "events-0.jsonl").read_text().splitlines()]
    assert [event["step"] for event in began if event["kind"] == "training-began"] == [0, 8]
