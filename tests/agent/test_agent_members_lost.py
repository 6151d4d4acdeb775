"""Workers that are lost while those of the others go on, by real agents and a real trainer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_ext.ranks.processes import is_alive
from tests.support.member_nodes import Job, check_samples, samples_by_step, told, wait_for_kind
from tests.support.nodes import nodes, until

SCRIPT = ("-m", "tests.support.elastic_job", "--steps=1000000", "--every=1000000", "--pace=0.05")
RESTARTS = "--max-restarts=3"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    for node in made.nodes:  # which is seen where a test fails
        print(f"---- {node.run_dir.name}\n{node.text}")


def wait_for_steps(job: Job, number: int = 3) -> None:
    """Wait until so many more steps have been taken."""
    before = max(samples_by_step(job.folder), default=0)
    until(lambda: max(samples_by_step(job.folder), default=0) >= before + number or None, what="more steps")


def test_a_worker_is_killed_and_the_others_go_on_until_another_one_joins_in_its_place(job: Job) -> None:
    with nodes(job.node(0, RESTARTS, script=SCRIPT)) as (first,):
        assert "while workers go on" in wait_for_kind(first, "members")["text"]
        with nodes(job.node(1, RESTARTS, script=SCRIPT), job.node(2, RESTARTS, script=SCRIPT)) as (second, third):
            for node in (second, third):
                wait_for_kind(node, "membership-in-force")
            wait_for_steps(job)
            workers = first.workers(), third.workers()
            (killed,) = second.workers().values()
            os.kill(killed.pid, signal.SIGKILL)
            lost = wait_for_kind(first, "worker-lost")
            assert f"(pid {killed.pid})" in lost["text"] and "ended by SIGKILL" in lost["text"]
            wait_for_steps(job)
            until(lambda: second.workers().get(0) not in (None, killed) or None, what="another worker")
            times = len(told(second, "membership-in-force"))
            wait_for_kind(second, "membership-in-force", times=times + 1)
            wait_for_steps(job)
            assert (first.workers(), third.workers()) == workers
            assert all(is_alive(each) for found in workers for each in found.values())
            for node in (first, third):
                assert node.kinds().count("workers-started") == 1
            for node in (first, second, third):
                node.send(signal.SIGTERM)
            assert [node.end() for node in (second, third)] == [143, 143]
        assert first.end() == 143
    check_samples(job.folder)
