"""Members that come and go while the workers of the others go on, by real agents.

In all but the last part the workers are a stand-in, tests/support/member_job.py, which speaks of members with its agent
by itself and is no trainer: what a trainer does with a plan is shown elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from elastic_ext.agent.arguments import without_outer
from elastic_ext.agent.members import Drain, Drains, LiveChange, drained_node, members_requests
from elastic_ext.cli import main
from elastic_ext.members.decision import ChangeRow
from elastic_ext.members.plan import MembershipPlan, NodeShare
from elastic_ext.ranks.node_board import RoundBoard
from elastic_ext.ranks.processes import is_alive
from elastic_ext.records.agent import MEMBERSHIP_FILE
from elastic_ext.records.member import MemberRecord, member_file
from tests.support.member_nodes import (
    Job,
    check_samples,
    end,
    plan_of,
    ranks_seen,
    samples_by_step,
    told,
    wait_for_kind,
)
from tests.support.nodes import Node, nodes, until


def record_in(node: Node, seat: int) -> MemberRecord:
    """What the worker in a seat says of itself as a member."""
    return MemberRecord.from_json(member_file(node.run_dir, seat).read_text())


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    for node in made.nodes:  # which is seen where a test fails
        print(f"---- {node.run_dir.name}\n{node.text}")


@pytest.mark.slow
def test_a_node_joins_and_leaves_again_and_the_workers_of_the_other_go_on(job: Job) -> None:
    with job.started(num_workers=2) as first:
        before = job.wait_for(2, version=1)
        with nodes(job.node(1)) as (second,):
            together = job.wait_for(3, version=2)
            assert {pid: together[pid] for pid in before} == {
                pid: (2, rank, 3, rank) for pid, (_, rank, _, _) in before.items()
            }
            (joined,) = together.keys() - before.keys()
            assert together[joined] == (2, 2, 3, 2)
            planned = wait_for_kind(first, "members-planned")
            assert planned["details"]["mode"] == "live" and "its workers warm up" in planned["text"]
            for node in (first, second):
                assert "membership 2 is in force on all nodes" in wait_for_kind(node, "membership-in-force")["text"]
            plan = plan_of(first)
            assert plan == plan_of(second) and (plan.mode, plan.generation) == ("live", 1)
            until(lambda: ranks_seen(first) == [(0, 0, 2), (1, 1, 2)] or None, what="the ranks of the first node")
            second.send(signal.SIGTERM)
            assert second.end() == 143
            assert "the workers of this node have left those of others" in second.text
            assert job.wait_for(2, version=3).keys() == before.keys()
            wait_for_kind(first, "membership-in-force", times=2)
            assert [event["plan"] for event in (each["details"] for each in told(first, "membership"))] == [1, 2, 3]
            assert job.seen()[joined][-1][0] == 2, "who leaves is in no world of the new plan"
        end(job, first)
        assert first.kinds().count("workers-started") == 1 and "worker-failed" not in first.kinds()
    job.check_steps()


def test_the_node_of_rank_0_leaves_and_the_others_go_on_and_take_in_another(job: Job) -> None:
    with job.started() as first, nodes(job.node(1)) as (second,):
        before = job.wait_for(2, version=2)
        (stays,) = [pid for pid, row in before.items() if row[1] == 1]
        wait_for_kind(second, "membership-in-force")
        first.send(signal.SIGTERM)
        assert first.end() == 143
        assert job.wait_for(1, version=3) == {stays: (3, 0, 1, 1)}
        until(lambda: ranks_seen(second) == [(0, 1, 3)] or None, what="the rank of the second node")
        wait_for_kind(second, "membership-in-force", times=2)
        with nodes(job.node(2)) as (third,):
            after = job.wait_for(2, version=4)
            assert after[stays] == (4, 0, 2, 1) and sorted(row[3] for row in after.values()) == [1, 2]
            end(job, second, third)
        assert second.kinds().count("workers-started") == 1
    job.check_steps()


@pytest.mark.slow
def test_who_joins_and_dies_before_it_is_ready_is_dropped_and_nobody_notices(job: Job) -> None:
    with job.started() as first:
        before = job.wait_for(1, version=1)
        job.say("die", "another model")
        with nodes(job.node(1)) as (second,):
            assert second.end() == 1
            assert re.search("this node has not joined the others: .*another model", second.text), second.text
        refused = wait_for_kind(first, "members-refused")
        assert "another model" in refused["text"] and second.record().node_id in refused["text"]
        (job.folder / "die").unlink()
        with nodes(job.node(2)) as (third,):
            after = job.wait_for(2, version=3)
            assert before.keys() < after.keys() and {row[3] for row in after.values()} == {0, 1}
            end(job, first, third)
        assert first.kinds().count("workers-started") == 1
        assert [each["details"]["plan"] for each in told(first, "membership")] == [1, 3], "of 2 no worker has heard"


@pytest.mark.slow
def test_who_joins_beside_one_that_dies_joins(job: Job) -> None:
    with job.started() as first:
        before = job.wait_for(1, version=1)
        with nodes(job.node(1), job.node(2, script=("-m", "no_such_module"))) as (second, third):
            assert third.end() == 1
            after = job.wait_for(2)
            assert before.keys() < after.keys()
            wait_for_kind(second, "membership-in-force")
            end(job, first, second)
        assert first.kinds().count("workers-started") == second.kinds().count("workers-started") == 1


@pytest.mark.slow
def test_who_joins_and_is_lost_before_it_is_ready_is_done_without(job: Job) -> None:
    job.say("hold")
    with job.started() as first:
        before = job.wait_for(1, version=1)
        with nodes(job.node(1)) as (second,):
            wait_for_kind(second, "workers-started")
            (worker,) = second.workers().values()
            second.send(signal.SIGINT)  # it leaves at once
            assert second.end() == 130
            assert not is_alive(worker)
        (job.folder / "hold").unlink()
        with nodes(job.node(2)) as (third,):
            assert before.keys() < job.wait_for(2).keys()
            end(job, first, third)
        assert first.kinds().count("workers-started") == 1


def test_where_the_ranks_refuse_a_plan_all_workers_are_started_anew_and_it_is_said_why(job: Job) -> None:
    job.say("refuse", "rank 0 has a loader that cannot replay")
    with job.started() as first:
        before = job.wait_for(1, version=1)
        with nodes(job.node(1)) as (second,):
            after = job.wait_for(2)
            assert not before.keys() & after.keys() and sorted(row[1] for row in after.values()) == [0, 1]
            planned = wait_for_kind(first, "members-planned", times=2)
            assert planned["details"]["mode"] == "restart"
            assert "the ranks have refused membership 2: rank 0 has a loader that cannot replay" in planned["text"]
            assert plan_of(first).mode == "restart" and plan_of(first).version == 3
            end(job, first, second)
        assert first.kinds().count("workers-started") == 2 and "worker-failed" not in first.kinds()


@pytest.mark.slow
@pytest.mark.parametrize(("choice", "refuses"), [("auto", "unlike"), ("live", "unlike"), ("live", "refuse")])
def test_who_joins_and_is_refused_is_sent_away_and_training_goes_on(job: Job, choice: str, refuses: str) -> None:
    job.say(refuses, "rank 0 does not like it")
    with job.started(f"--members={choice}") as first:
        before = job.wait_for(1, version=1)
        with nodes(job.node(1, f"--members={choice}")) as (second,):
            assert second.end() == 1
            assert re.search("has not joined the others: .*rank 0 does not like it", second.text), second.text
        until(lambda: plan_of(first).version == 3 or None, what="the plan that takes the refused one back")
        assert plan_of(first).world_size == 1 and plan_of(first).mode == "live"
        (job.folder / refuses).unlink()
        with nodes(job.node(2)) as (third,):
            after = job.wait_for(2, version=4)
            assert before.keys() < after.keys()
            end(job, first, third)
        assert first.kinds().count("workers-started") == 1


@pytest.mark.slow
def test_who_joins_and_dies_once_others_have_been_told_is_refused_and_training_goes_on(job: Job) -> None:
    with job.started() as first:
        before = job.wait_for(1, version=1)
        job.say("deaf")
        with nodes(job.node(1)) as (second,):
            until(lambda: told(first, "membership")[-1]["details"]["plan"] == 2 or None, what="the plan")
            (worker,) = second.workers().values()
            os.kill(worker.pid, signal.SIGKILL)
            assert second.end() == 1
            job.say("unlike", "the worker in seat 1 has not answered")
            (job.folder / "deaf").unlink()
        wait_for_kind(first, "members-refused")
        until(lambda: plan_of(first).version == 3 or None, what="the plan that takes the refused one back")
        assert job.wait_for(1, version=1) == before
        end(job, first)
        assert first.kinds().count("workers-started") == 1


@pytest.mark.slow
def test_who_leaves_does_not_wait_for_who_warms_up_and_that_one_goes_on_warming_up(job: Job) -> None:
    with job.started() as first, nodes(job.node(1)) as (second,):
        before = job.wait_for(2, version=2)
        wait_for_kind(second, "membership-in-force")
        job.say("hold")
        with nodes(job.node(2)) as (third,):
            wait_for_kind(third, "workers-started")
            workers = third.workers()
            second.send(signal.SIGTERM)
            assert second.end() == 143
            assert "the workers of this node have left those of others" in second.text
            (stays,) = job.wait_for(1, version=4, of=first).keys() & before.keys()
            (job.folder / "hold").unlink()
            after = job.wait_for(2, version=5)
            assert after.keys() == {stays, workers[0].pid} and after[stays] == (5, 0, 2, 0)
            wait_for_kind(first, "membership-in-force", times=3)
            planned = wait_for_kind(first, "members-planned", times=3)
            assert re.search("membership 4 is planned, .* leaves; then membership 5: .* joins", planned["text"])
            end(job, first, third)
        for node in (first, third):
            assert node.kinds().count("workers-started") == 1 and "worker-failed" not in node.kinds()
    job.check_steps()


@pytest.mark.slow
def test_where_no_boundary_comes_in_time_all_workers_are_started_anew(job: Job) -> None:
    job.say("deaf")
    with job.started("--shutdown-timeout=2") as first:
        before = job.wait_for(1, version=1)
        with nodes(job.node(1, "--shutdown-timeout=2")) as (second,):
            after = job.wait_for(2)
            assert not before.keys() & after.keys()
            assert "no boundary between two steps has come within 2 seconds of membership 2" in first.text
            end(job, first, second)
        assert first.kinds().count("workers-started") == 2 and "worker-failed" not in first.kinds()


@pytest.mark.slow
def test_a_node_leaves_in_time_also_where_its_workers_come_to_no_plan_that_they_have_agreed_on(job: Job) -> None:
    job.say("agreed")
    with job.started("--shutdown-timeout=6") as first, nodes(job.node(1, "--shutdown-timeout=6")) as (second,):
        until(lambda: record_in(first, 0).agreed == 2 or None, what="the workers agree")
        first.send(signal.SIGTERM)
        wait_for_kind(first, "leaving")
        assert first.end() == 143
        job.wait_for(1, of=second)
        end(job, second)


def test_a_node_that_has_just_joined_leaves_live_also_before_all_others_have_said_so(job: Job) -> None:
    with job.started() as first:
        before = job.wait_for(1, version=1)
        job.say("quiet")
        with nodes(job.node(1)) as (second,):
            job.wait_for(2, version=2)
            second.send(signal.SIGTERM)
            since = time.monotonic()
            until(lambda: time.monotonic() > since + 1.5 or None)
            (job.folder / "quiet").unlink()
            assert second.end() == 143
            assert "the workers of this node have left those of others" in second.text
        assert job.wait_for(1, version=3).keys() == before.keys()
        end(job, first)
        assert first.kinds().count("workers-started") == 1


@pytest.mark.slow
def test_a_worker_that_fails_while_members_change_is_a_failure_as_ever(job: Job) -> None:
    job.say("hold")
    with job.started("--max-restarts=1") as first, nodes(job.node(1, "--max-restarts=1")) as (second,):
        wait_for_kind(second, "workers-started")
        (warming,) = second.workers().values()
        (worker,) = first.workers().values()
        os.kill(worker.pid, signal.SIGKILL)
        wait_for_kind(second, "workers-started", times=2)
        job.wait_for(2)
        assert not is_alive(warming)
        assert plan_of(first).mode == "restart" and plan_of(first).world_size == 2
        assert told(first, "membership")[-1]["generation"] == 1, "it is counted"
        (worker,) = first.workers().values()
        os.kill(worker.pid, signal.SIGKILL)
        assert (first.end(), second.end()) == (1, 1)


@pytest.mark.slow
def test_a_node_waits_to_join_as_long_as_it_would_need_a_restart_where_members_change_live_alone(job: Job) -> None:
    job.say("why", "the dataset is an IterableDataset")
    with job.started("--members=live") as first:
        before = job.wait_for(1, version=1)
        with nodes(job.node(1)) as (second,):
            waiting = wait_for_kind(first, "members-waiting")
            assert "the dataset is an IterableDataset (rank 0 on" in waiting["text"]
            since = time.monotonic()
            until(lambda: time.monotonic() > since + 3 or None)
            assert "membership" not in second.kinds() and job.wait_for(1, version=1) == before
            second.send(signal.SIGTERM)
            second.end()
        end(job, first)
    assert first.kinds().count("workers-started") == 1 and "membership-changing" not in first.kinds()


@pytest.mark.parametrize("by", ["the workers", "--members"])
def test_where_members_change_by_a_restart_it_is_said_why(
    job: Job, capsys: pytest.CaptureFixture[str], by: str
) -> None:
    if by == "the workers":
        job.say("why", "the dataset is an IterableDataset")
    options = () if by == "the workers" else ("--members=restart",)
    with job.started(*options) as first, nodes(job.node(1)) as (second,):
        after = job.wait_for(2, version=2)
        (planned,) = told(first, "members-planned")
        why = "the dataset is an IterableDataset (rank 0 on" if by == "the workers" else "--members=restart asks"
        assert why in planned["text"] and planned["details"]["mode"] == "restart"
        wait_for_kind(first, "members")
        assert main(["members", "--run-dir", str(first.run_dir)]) == 0
        assert f"members change by a restart of all workers: {why}" in capsys.readouterr().out
        assert sorted(row[3] for row in after.values()) == [0, 1] and plan_of(second).mode == "restart"
        end(job, first, second)


@pytest.mark.slow
def test_a_job_that_ends_while_a_node_warms_up_ends_there_too(job: Job) -> None:
    job.say("hold")
    with job.started() as first, nodes(job.node(1)) as (second,):
        wait_for_kind(second, "workers-started")
        end(job, first, second)
        assert "have ended well before this node was in" in second.text


# ---- what an agent makes of its workers' records ----


def change_of(folder: Path, record: MemberRecord) -> LiveChange:
    """A change to a plan by which node b, which is ready, joins node a, whose worker says ``record``."""
    shares = [
        NodeShare(node_id=name, host="one", first_rank=rank, num_workers=1) for rank, name in enumerate(("a", "b"))
    ]
    plan = MembershipPlan(version=4, nodes=tuple(shares), reason="b joins", time=1.0, mode="live")
    board = RoundBoard(HashStore(), place=0, num_nodes=2)
    board.post("change/1", asdict(ChangeRow(node_id="b", version=4, state="ready")))
    member_file(folder, 0).write_text(record.to_json())
    change = LiveChange(
        plan,
        joined=["b"],
        node_id="a",
        board=board,
        run_dir=folder,
        limit_seconds=0.0,
        on_ready=lambda: None,
    )
    change.look()
    return change


RECORD = MemberRecord(seat=0, pid=1, time=1.0, why_restart="", version=3)


def test_a_plan_that_workers_have_agreed_on_is_not_late_however_long_they_evaluate(tmp_path: Path) -> None:
    end = change_of(tmp_path, RECORD).look()
    assert end is not None and end.kind == "late" and "no boundary between two steps has come" in end.why
    assert change_of(tmp_path, replace(RECORD, agreed=4)).look() is None
    end = change_of(tmp_path, replace(RECORD, agreed=4, version=4)).look()
    assert end is not None and "other nodes do not say that they have" in end.why


@pytest.mark.parametrize(("seats", "nodes"), [((), ()), ((1,), ("b",))])
def test_a_refusal_names_the_nodes_for_the_sake_of_whose_workers_it_is(
    tmp_path: Path, seats: tuple[int, ...], nodes: tuple[str, ...]
) -> None:
    record = replace(RECORD, agreed=4, refused=4, why_refused="it is another model", refused_seats=seats)
    end = change_of(tmp_path, record).end
    assert end is not None and (end.kind, end.why, end.refused) == ("refused", "it is another model", nodes)


def changes_of(folder: Path, joined: Sequence[str]) -> dict[str, LiveChange]:
    """The change by which these nodes join a and b, on each of the nodes; their workers have said nothing so far."""
    names = ["a", "b", *joined]
    shares = [NodeShare(node_id=name, host="one", first_rank=at, num_workers=1) for at, name in enumerate(names)]
    plan = MembershipPlan(version=4, nodes=tuple(shares), reason="they join", time=1.0, mode="live")
    boards = HashStore()
    found = {}
    for place, name in enumerate(names):
        (folder / name).mkdir()
        found[name] = LiveChange(
            plan,
            joined=joined,
            node_id=name,
            board=RoundBoard(boards, place=place, num_nodes=len(names)),
            run_dir=folder / name,
            limit_seconds=60.0,
            on_ready=lambda: None,
        )
    return found


def get_ready(folder: Path, name: str, seat: int) -> None:
    """Have the worker of a node say that it is ready to join."""
    member_file(folder / name, seat).write_text(replace(RECORD, seat=seat, ready=4).to_json())


def test_a_joiner_that_is_lost_between_the_looks_of_two_agents_has_both_tell_their_workers(tmp_path: Path) -> None:
    a, b, c = changes_of(tmp_path, ["c"]).values()
    assert [each.look() for each in (a, b, c)] == [None, None, None]
    get_ready(tmp_path, "c", 2)
    c.look()
    a.look()
    assert a.is_told and not b.is_told
    c.tell_failed("rank 0 exited with status 1")
    assert a.look() is None and b.look() is None
    assert b.is_told, "else ranks of the one wait for the plan of the other"


def test_a_joiner_beside_one_that_fails_is_not_at_fault_and_waits_until_all_meet_again(tmp_path: Path) -> None:
    a, _, c, d = changes_of(tmp_path, ["c", "d"]).values()
    get_ready(tmp_path, "c", 2)
    c.look()
    d.look()
    d.tell_failed("rank 0 exited with status 1")
    assert c.look() is None
    end = a.look()
    assert end is not None and end.kind == "failed" and not a.is_told


def test_a_joiner_that_fails_before_it_is_ready_has_nobody_tell_workers(tmp_path: Path) -> None:
    a, b, c = changes_of(tmp_path, ["c"]).values()
    c.look()
    c.tell_failed("rank 0 exited with status 1")
    ends = [each.look() for each in (a, b)]
    assert [(end.kind, end.why) for end in ends if end is not None] == [
        ("failed", "c: rank 0 exited with status 1")
    ] * 2


# ---- requests over the control socket ----


@pytest.mark.slow
def test_a_node_is_drained_by_a_command_from_another_node(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    with job.started() as first, nodes(job.node(1)) as (second,):
        before = job.wait_for(2, version=2)
        for node in (first, second):
            wait_for_kind(node, "membership-in-force")
        assert main(["members", "--run-dir", str(first.run_dir), "--json"]) == 0
        told_of = json.loads(capsys.readouterr().out)
        assert told_of["is_live"] is True and told_of["plan"]["version"] == 2 and told_of["planned"] is None
        assert main(["members", "drain", "nobody", "--run-dir", str(first.run_dir)]) == 2
        assert "refused: node nobody is not in the job; its nodes are " in capsys.readouterr().err
        name = second.record().node_id
        assert main(["members", "drain", name, "--run-dir", str(first.run_dir)]) == 0
        assert f"{name} is told to leave now" in capsys.readouterr().out
        assert second.end() == 0, second.text
        assert main(["status", str(second.run_dir)]) == 0
        assert ": has left the job at step " in capsys.readouterr().out
        (stays,) = job.wait_for(1, version=3)
        assert stays in before
        wait_for_kind(first, "membership-in-force", times=2)
        assert main(["members", "drain", first.record().node_id, "--run-dir", str(first.run_dir)]) == 2
        assert "is the only one of the job" in capsys.readouterr().err
        assert main(["members", "--run-dir", str(first.run_dir)]) == 0
        words = capsys.readouterr().out
        assert words.startswith(f"membership 3: 1 node, 1 rank: {name} leaves\n")
        assert "members change while workers go on" in words and "membership 3 is in force" in words
        end(job, first)


@pytest.mark.slow
def test_a_node_leaves_once_another_has_joined_also_the_only_one(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    with job.started() as first:
        before = job.wait_for(1, version=1)
        drain = ["members", "drain", first.record().node_id, "--run-dir", str(first.run_dir)]
        assert main(drain) == 2
        assert "with --after-join the node leaves once another has joined" in capsys.readouterr().err
        assert main([*drain, "--after-join"]) == 0
        assert "is told to leave once another node has joined" in capsys.readouterr().out
        wait_for_kind(first, "leaving")
        with nodes(job.node(1)) as (second,):
            assert first.end() == 0, first.text
            after = job.wait_for(1, version=3)
            assert not before.keys() & after.keys() and [*after.values()] == [(3, 0, 1, 1)]
            rows = [row[:3] for row in job.seen()[next(iter(before))]]
            assert rows == [(1, 0, 1), (2, 0, 2)], "it goes on until the other is in"
            end(job, second)
    job.check_steps()


@pytest.mark.slow
def test_a_node_leaves_as_another_joins_where_all_workers_are_started_anew(job: Job) -> None:
    how = "--members=restart"
    with job.started(how) as first, nodes(job.node(1, how)) as (second,):
        job.wait_for(2, version=2)
        name = second.record().node_id
        assert main(["members", "drain", name, "--after-join", "--run-dir", str(first.run_dir)]) == 0
        wait_for_kind(second, "leaving")
        with nodes(job.node(2, how)) as (third,):
            assert second.end() == 0, second.text
            job.wait_for(2, version=3)
            end(job, first, third)
        assert first.kinds().count("workers-started") == 3, "once for it and the one that comes"


@pytest.mark.parametrize(
    ("drain", "min_nodes", "why"),
    [
        (Drain(node="z"), 1, "node z is not in the job; its nodes are a, b, c"),
        (Drain(node="one"), 1, "one has several nodes of the job; name one of a, b"),
        (Drain(node="c"), 3, r"the job has 3 nodes and needs 3 \(--nnodes\); with --after-join"),
    ],
)
def test_a_node_that_cannot_leave_is_refused_in_words(drain: Drain, min_nodes: int, why: str) -> None:
    hosts = {"a": "one", "b": "one", "c": "two"}
    shares = [
        NodeShare(node_id=name, host=host, first_rank=rank, num_workers=1)
        for rank, (name, host) in enumerate(hosts.items())
    ]
    plan = MembershipPlan(version=1, nodes=tuple(shares), reason="the job starts", time=1.0)
    with pytest.raises(ValueError, match=why):
        drained_node(plan, drain, min_nodes=min_nodes)
    assert drained_node(plan, Drain(node="two", after_join=True), min_nodes=3) == "c"
    with pytest.raises(ValueError, match="node a is the only one of the job"):
        drained_node(replace(plan, nodes=plan.nodes[:1]), Drain(node="a"), min_nodes=1)
    assert drained_node(replace(plan, nodes=plan.nodes[:1]), Drain(node="a", after_join=True), min_nodes=1) == "a"


def test_a_node_that_leaves_once_another_has_joined_stays_until_there_is_one_that_was_not_known() -> None:
    shares = [
        NodeShare(node_id=name, host="one", first_rank=rank, num_workers=1) for rank, name in enumerate(("a", "b"))
    ]
    plan = MembershipPlan(version=1, nodes=tuple(shares), reason="the job starts", time=1.0)
    assert Drain(node="a").is_due(plan)
    assert not Drain(node="a", after_join=True, known=("a", "b", "c")).is_due(plan, ("c",))
    assert Drain(node="a", after_join=True, known=("a", "c")).is_due(plan)
    assert Drain(node="a", after_join=True, known=("a", "b")).is_due(plan, ("c",)), "a spare, which takes its place"


def test_a_request_that_a_node_leaves_is_told_in_each_round_until_it_has_left() -> None:
    shares = [
        NodeShare(node_id=name, host="one", first_rank=rank, num_workers=1) for rank, name in enumerate(("a", "b"))
    ]
    plan = MembershipPlan(version=1, nodes=tuple(shares), reason="the job starts", time=1.0)
    drains, rounds = Drains(), [RoundBoard(HashStore(), place=0, num_nodes=2) for _ in range(3)]
    drains.add(Drain(node="b"))
    for board in rounds[:2]:
        drains.tell(board, plan)
        assert drains.of("b", board) == Drain(node="b") and drains.of("a", board) is None
    drains.tell(rounds[2], replace(plan, nodes=tuple(shares[:1])))
    assert drains.of("b", rounds[2]) is None


# ---- a training ----


def test_a_training_under_ddp_goes_on_in_its_processes_as_a_node_joins_and_leaves(job: Job) -> None:
    script = ("-m", "tests.support.elastic_job", "--steps=1000000", "--every=1000000", "--pace=0.05")
    with nodes(job.node(0, num_workers=2, script=script)) as (first,):
        assert "while workers go on" in wait_for_kind(first, "members")["text"]
        until(lambda: len(samples_by_step(job.folder)) > 3 or None, what="steps of the first node")
        workers = first.workers()
        with nodes(job.node(1, script=script)) as (second,):
            wait_for_kind(first, "membership-in-force")
            at_join = max(samples_by_step(job.folder))
            until(lambda: len(samples_by_step(job.folder)) > at_join + 3 or None, what="steps of three ranks")
            until(lambda: ranks_seen(second) == [(2, 2, 2)] or None, what="the rank of the second node")
            second.send(signal.SIGTERM)
            assert second.end() == 143
            wait_for_kind(first, "membership-in-force", times=2)
        at_leave = max(samples_by_step(job.folder))
        until(lambda: len(samples_by_step(job.folder)) > at_leave + 3 or None, what="steps of two ranks again")
        assert first.workers() == workers and all(is_alive(each) for each in workers.values())
        assert first.kinds().count("workers-started") == 1 and "worker-failed" not in first.kinds()
        first.send(signal.SIGTERM)
        assert first.end() == 143
    check_samples(job.folder)


def test_what_a_worker_is_told_does_not_reach_an_agent_that_it_starts() -> None:
    assert without_outer({"ELASTIC_EXT_JOINS": "3", "HOME": "/"}) == {"HOME": "/"}


def nodes_of(*names: str) -> MembershipPlan:
    """A plan with a worker on each of these nodes."""
    shares = [NodeShare(node_id=name, host=name, first_rank=rank, num_workers=1) for rank, name in enumerate(names)]
    return MembershipPlan(version=1, nodes=tuple(shares), reason="the job starts", time=1.0)


@pytest.mark.parametrize(
    ("names", "min_nodes", "why"),
    [
        ("ab", 1, "node b is the only one of the job once a has left"),
        ("abc", 2, r"the job has 2 nodes once a has left and needs 2 \(--nnodes\)"),
    ],
)
def test_a_second_request_is_refused_that_would_leave_too_few_nodes_together_with_the_first(
    tmp_path: Path, names: str, min_nodes: int, why: str
) -> None:
    (tmp_path / MEMBERSHIP_FILE).write_text(nodes_of(*names).to_json())
    drains = Drains()
    drain = members_requests(tmp_path, drains, min_nodes=min_nodes)["members-drain"]
    assert drain({"node": "a"}) == {"node": "a"}
    with pytest.raises(ValueError, match=why):
        drain({"node": "b"})
    drains.tell(RoundBoard(HashStore(), place=0, num_nodes=2), nodes_of(*names))
    with pytest.raises(ValueError, match=why):
        drain({"node": "b"})
    assert drain({"node": "a"}) == {"node": "a"} and drain({"node": "b", "after_join": True}) == {"node": "b"}


@pytest.mark.parametrize(
    ("names", "min_nodes", "gone", "leave"),
    [
        ("ab", 1, "", "a"),
        ("abc", 2, "", "a"),
        ("abc", 1, "", "ab"),
        ("abc", 2, "b", ""),
        ("abc", 0, "", "ab"),
    ],
)
def test_of_nodes_that_different_agents_were_asked_to_have_leave_the_first_do_as_long_as_enough_stay(
    names: str, min_nodes: int, gone: str, leave: str
) -> None:
    store, plan = HashStore(), nodes_of(*names)
    agents = {name: (Drains(), RoundBoard(store, place=at, num_nodes=len(names))) for at, name in enumerate(names)}
    for name, (drains, board) in agents.items():
        drains.add(Drain(node=name))
        drains.tell(board, plan)
    may = [
        name
        for name, (drains, board) in agents.items()
        if name not in gone and drains.are_enough_without(name, board, plan, min_nodes=min_nodes, gone=gone)
    ]
    assert "".join(may) == leave


def test_a_request_is_told_on_by_the_node_that_is_to_leave_where_the_agent_that_was_asked_has_left() -> None:
    store, plan = HashStore(), nodes_of("a", "b")
    asked, own = (
        (Drains(), RoundBoard(store, place=0, num_nodes=2)),
        (Drains(), RoundBoard(store, place=1, num_nodes=2)),
    )
    asked[0].add(Drain(node="b", after_join=True))
    asked[0].tell(asked[1], plan)
    assert own[0].of("b", own[1]) is not None
    later = RoundBoard(HashStore(), place=0, num_nodes=1)
    own[0].tell(later, nodes_of("b"))
    assert own[0].of("b", later) == Drain(node="b", after_join=True)
