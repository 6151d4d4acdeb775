"""Nodes that wait as spares until the number of ranks fits the way in which the model is sharded, by real agents.

In all but the last test the workers are a stand-in, tests/support/member_job.py, which says the multiple by itself.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from elastic_ext.cli import main
from elastic_ext.ranks.processes import is_alive
from tests.support.member_nodes import Job, check_samples, end, plan_of, samples_by_step, told, wait_for_kind
from tests.support.nodes import Node, nodes, set_config, until

NONE_WAITS = "no node waits to join any more"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    made.say("multiple", "2")
    yield made
    for node in made.nodes:  # which is seen where a test fails
        print(f"---- {node.run_dir.name}\n{node.text}")


def wait_as_spare(first: Node, spare: Node, *, num_train: int = 2) -> str:
    """Wait until a node waits as a spare, by what it says and another node does; gives the sentence."""
    words = (
        f"{spare.record().node_id} waits as a spare: it has 1 rank, {num_train} train, and the number of ranks that "
        "train is to be a multiple of 2 (the shard degree)"
    )
    for node in (first, spare):
        until(lambda node=node: node_waits(node) == words or None, what=f"a spare\n{node.text}")  # type: ignore[misc]
    assert not spare.workers(), "none are started"
    return words


def node_waits(node: Node) -> str:
    """Who waits, as a node has told last."""
    events = told(node, "members-waiting")
    return str(events[-1]["text"]) if events else ""


@pytest.mark.slow
def test_a_node_waits_as_a_spare_and_joins_together_with_another(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    with job.started(num_workers=2) as first:
        before = job.wait_for(2, version=1)
        with nodes(job.node(1)) as (second,):
            wait_for_kind(second, "members-waiting")
            words = wait_as_spare(first, second)
            for node, command in [(node, command) for node in (first, second) for command in ("members", "status")]:
                arguments = ["members", "--run-dir"] if command == "members" else ["status"]

                def shown(arguments: list[str] = arguments, node: Node = node) -> bool | None:
                    assert main([*arguments, str(node.run_dir)]) == 0
                    return words in capsys.readouterr().out.replace("\n  ", "\n").replace("\n", " ") or None

                until(shown, what=f"{command} of {node.run_dir.name}")
            assert job.wait_for(2, version=1) == before
            with nodes(job.node(2)) as (third,):
                after = job.wait_for(4, version=2)
                assert before.keys() < after.keys() and plan_of(first).reason.count(" joins") == 2
                assert node_waits(first) == node_waits(second) == NONE_WAITS
                end(job, first, second, third)
        assert [each.kinds().count("workers-started") for each in (first, second, third)] == [1, 1, 1]
    job.check_steps()


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_node_that_leaves_and_no_worker_is_restarted(job: Job) -> None:
    with job.started() as first, nodes(job.node(1)) as (second,):
        job.wait_for(2, version=2)
        with nodes(job.node(2)) as (third,):
            wait_for_kind(third, "members-waiting")
            wait_as_spare(first, third)
            (stays,) = first.workers().values()
            second.send(signal.SIGTERM)
            assert second.end() == 143
            assert "the workers of this node have left those of others" in second.text
            after = job.wait_for(2, version=3)
            assert after[stays.pid] == (3, 0, 2, 0)
            names = [second.record().node_id, third.record().node_id]
            assert plan_of(first).reason == f"{names[0]} leaves, {names[1]} joins"
            end(job, first, third)
        assert [each.kinds().count("workers-started") for each in (first, third)] == [1, 1]
    job.check_steps()


@pytest.mark.slow
def test_where_the_spare_is_not_ready_in_time_all_workers_are_started_anew_and_no_failure_is_counted(job: Job) -> None:
    how = "--shutdown-timeout=6"
    with job.started(how) as first, nodes(job.node(1, how)) as (second,):
        job.wait_for(2, version=2)
        with nodes(job.node(2, how)) as (third,):
            wait_for_kind(third, "members-waiting")
            wait_as_spare(first, third)
            job.say("hold")
            second.send(signal.SIGTERM)
            assert second.end() == 143
            until(lambda: plan_of(first).mode == "restart" or None, what="the plan of a restart")
            job.wait_for(2, version=plan_of(first).version)
            end(job, first, third)
        assert told(first, "membership")[-1]["generation"] == 0, "none is counted"


@pytest.mark.slow
def test_a_node_is_drained_once_a_spare_is_there_to_take_its_place(job: Job) -> None:
    with job.started() as first, nodes(job.node(1)) as (second,):
        job.wait_for(2, version=2)
        drain = ["members", "drain", second.record().node_id, "--after-join", "--run-dir", str(first.run_dir)]
        wait_for_kind(first, "membership-in-force")
        assert main(drain) == 0
        wait_for_kind(second, "leaving")
        with nodes(job.node(2)) as (third,):
            assert second.end() == 0, second.text
            assert "a spare takes its place: this node leaves the job" in second.text
            job.wait_for(2, version=3)
            end(job, first, third)
        assert first.kinds().count("workers-started") == 1


@pytest.mark.slow
def test_a_spare_joins_once_the_model_is_sharded_in_another_way(job: Job) -> None:
    with job.started(num_workers=2) as first, nodes(job.node(1)) as (second,):
        before = job.wait_for(2, version=1)
        wait_for_kind(second, "members-waiting")
        wait_as_spare(first, second)
        job.say("multiple", "1")
        assert before.keys() < job.wait_for(3, version=2).keys()
        end(job, first, second)
        assert first.kinds().count("workers-started") == second.kinds().count("workers-started") == 1
    job.check_steps()


@pytest.mark.slow
def test_after_a_failure_a_spare_waits_on_and_ends_with_the_job(job: Job) -> None:
    how = "--max-restarts=1"
    with job.started(how, num_workers=2) as first, nodes(job.node(1, how)) as (second,):
        before = job.wait_for(2, version=1)
        wait_for_kind(second, "members-waiting")
        wait_as_spare(first, second)
        os.kill(next(iter(before)), signal.SIGKILL)
        after = job.wait_for(2, version=2)
        assert not before.keys() & after.keys() and plan_of(first).mode == "restart"
        wait_as_spare(first, second)
        end(job, first, second)
        assert "the workers of the other nodes have ended well before this node was in" in second.text
        assert "workers-started" not in second.kinds()


@pytest.mark.slow
def test_where_a_node_is_lost_all_workers_are_started_anew_and_a_spare_is_among_them(job: Job) -> None:
    with job.started() as first, nodes(job.node(1)) as (second,):
        job.wait_for(2, version=2)
        with nodes(job.node(2)) as (third,):
            wait_for_kind(third, "members-waiting")
            wait_as_spare(first, third)
            second.send(signal.SIGINT)  # it leaves at once
            assert second.end() == 130
            wait_for_kind(third, "workers-started")
            job.wait_for(2, version=3)
            assert plan_of(first).mode == "restart" and node_waits(first) == NONE_WAITS
            end(job, first, third)


@pytest.mark.slow
def test_a_spare_leaves_and_training_goes_on(job: Job) -> None:
    with job.started(num_workers=2) as first:
        before = job.wait_for(2, version=1)
        with nodes(job.node(1)) as (second,):
            wait_for_kind(second, "members-waiting")
            wait_as_spare(first, second)
            second.send(signal.SIGTERM)
            assert second.end() == 143
            assert "this node leaves the job; it has waited as a spare" in second.text
        until(lambda: node_waits(first) == NONE_WAITS or None, what="nobody waits")
        assert job.wait_for(2, version=1) == before
        end(job, first)
        assert first.kinds().count("workers-started") == 1 and "worker-failed" not in first.kinds()


def training(*options: str) -> Sequence[str]:
    """A training of a model each of whose copies is sharded over two ranks."""
    sharded = ("--sharded", "--strategy=hybrid_shard", "--shard-degree=2")
    return "-m", "tests.support.elastic_job", "--every=1000000", "--pace=0.1", *sharded, *options


@pytest.mark.slow
def test_a_training_whose_copies_are_sharded_over_two_ranks_takes_in_two_nodes_at_once_and_ends_with_all_its_steps(
    job: Job,
) -> None:
    how, script = "--hang-seconds=off", training("--steps=60", "--hold-at=20")  # the ranks are held in a step
    with nodes(job.node(0, how, num_workers=2, script=script)) as (first,):
        assert "while workers go on" in wait_for_kind(first, "members")["text"]
        workers = first.workers()
        with nodes(job.node(1, how, script=script)) as (second,):
            wait_for_kind(second, "members-waiting")
            wait_as_spare(first, second)
            assert first.workers() == workers and all(map(is_alive, workers.values()))
            with nodes(job.node(2, how, script=script)) as (third,):
                wait_for_kind(first, "membership", times=2)  # the workers are told
                (job.folder / "go").touch()
                assert [node.end() for node in (first, second, third)] == [0, 0, 0], first.text
        for node in (first, second, third):
            assert node.kinds().count("workers-started") == 1 and "worker-failed" not in node.kinds()
        assert plan_of(first).world_size == 4 and "membership-in-force" in first.kinds()
    assert max(samples_by_step(job.folder)) == 60
    check_samples(job.folder)


@pytest.mark.slow
def test_a_spare_joins_a_training_whose_config_asks_for_a_strategy_that_allows_any_number_of_ranks(job: Job) -> None:
    script = training("--steps=1000000")
    with nodes(job.node(0, num_workers=2, script=script)) as (first,):
        assert "while workers go on" in wait_for_kind(first, "members")["text"]
        with nodes(job.node(1, script=script)) as (second,):
            wait_for_kind(second, "members-waiting")
            wait_as_spare(first, second)
            set_config(first, "parallelism.strategy=full_shard")
            wait_for_kind(first, "membership-in-force")
            at_join = max(samples_by_step(job.folder))
            until(lambda: len(samples_by_step(job.folder)) > at_join + 3 or None, what="steps of three ranks")
            assert plan_of(first).world_size == 3 and first.kinds().count("workers-started") == 1
    check_samples(job.folder)
