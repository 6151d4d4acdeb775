"""Workers that are lost while those of the others go on, by real agents and a real trainer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elastic_ext.ranks.processes import is_alive
from tests.support.member_nodes import Job, check_samples, samples_by_step, told, wait_for_kind
from tests.support.nodes import Node, nodes, until

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


@contextmanager
def three(job: Job, *options: str, num_workers: int = 1) -> Iterator[tuple[Node, Node, Node]]:
    """Three nodes, whose workers train together; they end in the end, and each step had samples of its own."""
    options = (RESTARTS, *options)
    with nodes(job.node(0, *options, num_workers=num_workers, script=SCRIPT)) as (first,):
        assert "while workers go on" in wait_for_kind(first, "members")["text"]
        second, third = (job.node(number, *options, num_workers=num_workers, script=SCRIPT) for number in (1, 2))
        with nodes(second, third):
            for node in (second, third):
                wait_for_kind(node, "membership-in-force")
            wait_for_steps(job)
            yield first, second, third
            left = [node for node in (first, second, third) if node.process.poll() is None]
            for node in left:
                node.send(signal.SIGTERM)
            assert [node.end() for node in left] == [143] * len(left)
    check_samples(job.folder)


def wait_until_in(node: Node) -> None:
    """Wait until other workers of a node have joined those of the others."""
    times = node.kinds().count("workers-started")
    until(lambda: node.kinds().count("workers-started") > max(times - 1, 1) or None, what="other workers")
    until(
        lambda: (
            node.kinds()[::-1].index("membership-in-force") < node.kinds()[::-1].index("workers-started")
            if "membership-in-force" in node.kinds()
            else None
        ),
        what="a plan with them",
    )


def check_went_on(job: Job, workers: Mapping[Node, Any]) -> None:
    """The workers of these nodes are those that they were, and train."""
    wait_for_steps(job)
    for node, before in workers.items():
        assert node.workers() == before and all(is_alive(each) for each in before.values())
        assert node.kinds().count("workers-started") == 1


@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_worker_is_killed_and_the_others_go_on_until_others_join_in_its_place(job: Job, num_workers: int) -> None:
    with three(job, num_workers=num_workers) as (first, second, third):
        stay = {node: node.workers() for node in (first, third)}
        killed = second.workers()[num_workers - 1]
        os.kill(killed.pid, signal.SIGKILL)
        lost = wait_for_kind(first, "worker-lost")
        assert f"(pid {killed.pid})" in lost["text"] and "ended by SIGKILL" in lost["text"]
        check_went_on(job, stay)
        wait_until_in(second)
        check_went_on(job, stay)


@pytest.mark.slow
def test_a_worker_is_killed_in_the_first_steps_and_the_others_go_on(job: Job) -> None:
    """Agents look once a second at what their workers say, and may not have looked since training began."""
    conf = "--rdzv-conf=is_host=0,last_call_timeout=60,join_timeout=240,keep_alive_interval=1,keep_alive_max_attempt=30"
    three_at_once = [job.node(number, RESTARTS, "--nnodes=2:3", conf, script=SCRIPT) for number in range(3)]
    with nodes(*three_at_once) as (first, second, third):
        until(lambda: max(samples_by_step(job.folder), default=0) >= 1 or None, what="a step")
        stay = {node: node.workers() for node in (first, second)}
        (killed,) = third.workers().values()
        os.kill(killed.pid, signal.SIGKILL)
        wait_for_kind(first, "worker-lost")
        check_went_on(job, stay)


@pytest.mark.slow
def test_a_worker_that_hangs_is_ended_and_the_others_go_on(job: Job) -> None:
    with three(job, "--hang-seconds=3") as (first, second, third):
        stay = {node: node.workers() for node in (first, third)}
        (stopped,) = second.workers().values()
        os.kill(stopped.pid, signal.SIGSTOP)
        assert "hung" in wait_for_kind(first, "worker-lost")["text"]
        assert not is_alive(stopped)
        check_went_on(job, stay)
        wait_until_in(second)


@pytest.mark.slow
def test_a_node_is_gone_with_its_agent_and_the_others_go_on(job: Job) -> None:
    conf = "--rdzv-conf=is_host=0,last_call_timeout=3,join_timeout=240,keep_alive_interval=1,keep_alive_max_attempt=3"
    with three(job, conf) as (first, second, third):
        stay = {node: node.workers() for node in (first, third)}
        (worker,) = second.workers().values()
        second.process.kill()
        os.kill(worker.pid, signal.SIGKILL)
        assert "is lost with its node" in wait_for_kind(first, "worker-lost")["text"]
        check_went_on(job, stay)


@pytest.mark.slow
def test_an_error_of_all_ranks_at_once_counts_once_and_all_start_anew(job: Job) -> None:
    script = ("-m", "tests.support.elastic_job", "--steps=40", "--every=5", "--pace=0.02", "--raise-at=20")
    options = ("--max-restarts=1", "--nnodes=2:3")
    with nodes(*(job.node(number, *options, script=script) for number in range(2))) as made:
        assert [node.end() for node in made] == [0, 0], "\n".join(node.text for node in made)
    for node in made:
        assert node.kinds().count("workers-started") == 2
        assert told(node, "workers-started")[-1]["generation"] == 1
