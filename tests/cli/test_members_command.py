"""What `elastic-ext members` tells, by the files of run directories alone."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_ext.cli import main
from elastic_ext.cli.members import MembersView, members_in_words, view_of
from elastic_ext.members.plan import MembershipPlan, NodeShare
from elastic_ext.ranks.processes import process_of
from elastic_ext.records.agent import (
    AGENT_FILE,
    EVENTS_FILE,
    MEMBERSHIP_FILE,
    WORKERS_FILE,
    AgentRecord,
    WorkersRecord,
)
from elastic_ext.records.member import MemberRecord, member_file
from elastic_ext.records.metrics import JobEvent

PLAN = MembershipPlan(
    version=3,
    nodes=(
        NodeShare(node_id="a-1", host="a", first_rank=0, num_workers=2, seats=(0, 1)),
        NodeShare(node_id="b-1", host="b", first_rank=2, num_workers=1, seats=(4,)),
    ),
    reason="b-1 joins",
    time=1.0,
    mode="live",
    generation=2,
)


def record(seat: int, **changes: Any) -> MemberRecord:
    return replace(MemberRecord(seat=seat, pid=10 + seat, time=1.0, why_restart="", version=3), **changes)


def event(kind: str, text: str, time: float, **details: object) -> JobEvent:
    return JobEvent(time=time, generation=0, rank=-1, step=-1, kind=kind, text=text, details=details)


PLANNED = event("members-planned", "membership 4 is planned", 5.0, mode="live", plan=4)


def members_by(plan: MembershipPlan, records: Any, events: Any, *, has_begun: bool = True) -> MembersView:
    return view_of(plan, records, events, has_begun=has_begun)


def test_members_are_told_with_ranks_and_seats_and_how_they_can_change() -> None:
    view = members_by(PLAN, [record(0), record(1)], [])
    assert members_in_words(view) == [
        "membership 3: 2 nodes, 3 ranks: b-1 joins",
        "  a-1 on a: ranks 0 (seat 0), 1 (seat 1)",
        "  b-1 on b: rank 2 (seat 4)",
        "members change while workers go on",
    ]


@pytest.mark.parametrize(
    ("records", "how"),
    [
        ([record(0), record(1, why_restart="FSDP1 cannot")], "by a restart of all workers: FSDP1 cannot"),
        ([record(0), None], "by a restart of all workers: these do not say that they can go on"),
        ([None], "by a restart of all workers: these do not say that they can go on"),
    ],
)
def test_it_is_told_why_all_workers_would_be_started_anew(records: list[MemberRecord | None], how: str) -> None:
    assert f"members change {how}" in members_in_words(members_by(PLAN, records, []))


def test_before_training_begins_it_is_not_known_how_members_can_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    not_known = "members change in a way that is not known yet: its workers have not begun to train"
    for records in ([None], [record(0), None]):
        assert not_known in members_in_words(members_by(PLAN, records, [], has_begun=False))
    assert "members change while workers go on" in members_in_words(members_by(PLAN, [record(0)], [], has_begun=False))
    (tmp_path / AGENT_FILE).write_text(agent_here().to_json())
    (tmp_path / MEMBERSHIP_FILE).write_text(PLAN.to_json())
    assert main(["members", "--run-dir", str(tmp_path)]) == 0
    assert not_known in capsys.readouterr().out
    (tmp_path / "events-0.jsonl").write_text(f"{event('training-began', 'training begins', 4.0).to_json()}\n")
    assert main(["members", "--run-dir", str(tmp_path)]) == 0
    assert "these do not say that they can go on" in capsys.readouterr().out


def test_where_an_agent_asks_for_a_restart_it_does_not_matter_that_workers_could_go_on() -> None:
    events = [
        event("members", "nodes join and leave while workers go on", 2.0),
        event("members", "nodes join and leave by a restart of all workers: --members=restart asks for that on a", 3.0),
    ]
    view = view_of(PLAN, [record(0), record(1)], events)
    assert view.is_live is False
    assert "members change by a restart of all workers: --members=restart asks for that on a" in members_in_words(view)
    assert view_of(PLAN, [record(0), record(1)], events[:1]).is_live is True
    assert view_of(PLAN, [record(0), record(1)], events, since=4.0).is_live is True, "an earlier agent has told that"


def test_a_change_is_under_way_until_it_is_in_force_or_refused() -> None:
    joining = record(5, version=0, ready=4)
    view = members_by(PLAN, [record(0), joining], [PLANNED])
    assert "under way: membership 4 is planned" in members_in_words(view)
    assert "  seat 5 (pid 15) ready to join by membership 4" in members_in_words(view)
    for kind in ("membership-in-force", "members-refused"):
        view = members_by(PLAN, [record(0)], [PLANNED, event(kind, "it has ended", 6.0, plan=4)])
        assert view.planned is None and "it has ended" in members_in_words(view)[-1]
    left = event("membership-in-force", "membership 3 is in force", 6.0, plan=3)
    assert members_by(PLAN, [record(0)], [PLANNED, left]).planned == PLANNED, "who is to join after that is not in yet"
    anew = replace(PLANNED, details={"mode": "restart"})
    assert members_by(PLAN, [record(0)], [anew]).planned is None


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ([event("succeeded", "all workers of this node have ended well", 9.0)], "all workers of this node have ended"),
        ([], "nothing says how"),
    ],
)
def test_of_a_job_that_has_ended_it_is_told_how_and_not_how_members_can_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], end: list[JobEvent], how: str
) -> None:
    (tmp_path / MEMBERSHIP_FILE).write_text(PLAN.to_json())
    (tmp_path / EVENTS_FILE).write_text("".join(f"{each.to_json()}\n" for each in (PLANNED, *end)))
    member_file(tmp_path, 0).write_text(record(0).to_json())
    assert main(["members", "--run-dir", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert f"the job has ended on this machine: {how}" in told
    assert "members change" not in told and "under way" not in told
    assert main(["members", "--run-dir", str(tmp_path), "--json"]) == 0
    record_told = json.loads(capsys.readouterr().out)
    assert how in record_told["ended"] and record_told["is_live"] is None
    assert [each["kind"] for each in record_told["changes"]] == ["members-planned"]


def agent_here() -> AgentRecord:
    """The record of an agent that runs: this process."""
    here = process_of(os.getpid())
    assert here is not None
    return AgentRecord(
        node_id="a-1",
        job="nano",
        run_id="nano",
        host=socket.gethostname(),
        pid=here.pid,
        start_ticks=here.start_ticks,
        time=1.0,
        version="0",
        config_file="config.json",
        memory_folder="",
        socket="",
        log_folder="",
    )


def test_what_files_say_is_told_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / AGENT_FILE).write_text(agent_here().to_json())
    (tmp_path / MEMBERSHIP_FILE).write_text(PLAN.to_json())
    member_file(tmp_path, 0).write_text(record(0).to_json())
    member_file(tmp_path, 1).write_text("damaged")
    (tmp_path / EVENTS_FILE).write_text(f"{PLANNED.to_json()}\n")
    for seat in (0, 1):
        text = f"membership 3 at step 8: b-1 joins; 0.1{seat} s without a step"
        (tmp_path / f"events-{seat}.jsonl").write_text(f"{event('members-changed', text, 4.0, version=3).to_json()}\n")
    assert main(["members", "--run-dir", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["plan"]["version"] == 3 and told["is_live"] is None and told["warming"] == []
    assert told["ended"] == "" and told["planned"]["text"] == told["changes"][1]["text"] == "membership 4 is planned"
    assert len(told["changes"]) == 2, "what workers tell alike is told once"


def test_who_waits_as_a_spare_is_told_also_on_its_own_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "c-1 waits as a spare: it has 1 rank, 3 train"
    view = view_of(PLAN, [record(0), record(1)], [], waiting=words)
    assert members_in_words(view)[-2:] == ["members change while workers go on", words]
    assert words not in members_in_words(view_of(PLAN, [record(0)], [], waiting=words, is_running=False))
    agent = replace(agent_here(), node_id="c-1")
    (tmp_path / AGENT_FILE).write_text(agent.to_json())
    (tmp_path / MEMBERSHIP_FILE).write_text(PLAN.to_json())
    seen = WorkersRecord(time=2.0, restart=0, membership_version=3, workers=(), waiting=words)
    (tmp_path / WORKERS_FILE).write_text(seen.to_json())
    assert main(["members", "--run-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[3:] == [words], "and nothing of workers that it does not have"
    (tmp_path / AGENT_FILE).write_text(replace(agent, time=3.0).to_json())
    assert main(["members", "--run-dir", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["waiting"] == "", "an earlier agent has said that"


def test_where_there_is_no_plan_or_no_agent_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / EVENTS_FILE).write_text("")
    assert main(["members", "--run-dir", str(tmp_path)]) == 2
    assert "there is no membership plan" in capsys.readouterr().err
    (tmp_path / MEMBERSHIP_FILE).write_text(PLAN.to_json())
    assert main(["members", "drain", "a-1", "--run-dir", str(tmp_path)]) == 2
    assert "no agent of job" in capsys.readouterr().err
