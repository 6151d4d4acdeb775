"""What a master says of a job as a whole: its workers, machines, verdict and history."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from elastic_ext.cli.master import is_healthy, status_words
from elastic_ext.master.job import Job, JobSettings, Now
from elastic_ext.master.nodes import RequestRefused
from elastic_ext.master.status import job_status
from elastic_ext.master.store import Stored
from elastic_ext.master.wire import master_pb2 as wire
from elastic_ext.master.wire import window_message
from elastic_ext.records.metrics import StepWindow
from tests.support.clusters import machine_of, pair_report
from tests.support.machines import machine
from tests.support.masters import Caller, join_request, master_in_process, master_on_thread, until

STORED = Stored(job="j", job_id="0", epoch=1, versions=(), events=(), nodes=(), membership="", pairs="", points=())


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[Caller]:
    for master in master_on_thread(tmp_path):
        yield master.caller()


def worker(rank: int, **given: object) -> wire.Worker:
    """One that waits for its data most of the time."""
    shares = {"data": 0.7, "forward": 0.1, "backward": 0.15, "optimizer": 0.05}
    seconds = {name: 10 * share for name, share in shares.items()}
    window = StepWindow(
        begin=100.0,
        end=110.0,
        rank=rank,
        world_size=2,
        restart=0,
        step=100,
        num_steps=100,
        config_version=1,
        config_revision=0,
        seconds=seconds,
        processor_seconds={name: value for name, value in seconds.items() if name != "data"},
        typical={name: value / 100 for name, value in seconds.items()},
        step_seconds=(0.1, 0.1, 0.1, 0.1),
        num_samples=800,
        num_detailed=100,
    )
    arguments: dict[str, object] = {
        "state": "running",
        "step": 100,
        "steps_per_second": 10.0,
        "samples_per_second": 80.0,
        "step_seconds": 0.1,
        "config_version": 1,
        **given,
    }
    return wire.Worker(rank=rank, shares=shares, windows=[window_message(window)], **arguments)  # type: ignore[arg-type]


def test_the_status_tells_how_far_the_job_is_and_what_holds_it_up(caller: Caller) -> None:
    caller.join("a")
    caller.join("b")
    caller.beat("a", workers=[worker(0, activity="training", trouble="")])
    caller.beat("b", workers=[worker(1, config_version=2)])
    status = caller.status()
    assert (status.progress.step, status.progress.steps_per_second) == (100, 10.0)
    assert status.progress.shares["data"] == pytest.approx(0.7)
    assert status.verdict.kind == "data" and "waiting for samples" in status.verdict.text
    assert status.verdict.text.endswith(" (over steps 1 to 100, 10 s)")
    assert list(status.config.in_force) == [1, 2]
    (first,) = status.nodes[0].workers
    assert (first.rank, first.activity, first.steps_per_second) == (0, "training", 10.0)
    assert not caller.status(without_workers=True).nodes[0].workers


def test_what_workers_cannot_be_is_left_out(caller: Caller) -> None:
    caller.join("a")
    bad = worker(0, steps_per_second=float("nan"), samples_per_second=-1.0, step_seconds=float("inf"))
    caller.beat("a", workers=[bad])
    progress = caller.status().progress
    assert not progress.HasField("steps_per_second") and not progress.HasField("samples_per_second")


def test_machines_are_told_of_in_a_line_and_unlike_ones_are_named(caller: Caller) -> None:
    good = machine()
    other = dataclasses.replace(good, versions=dataclasses.replace(good.versions, torch="1.0"))
    caller("Join", join_request("a", hardware=good.to_json()))
    caller("Join", join_request("b", hardware=other.to_json()))
    status = caller.status()
    assert status.nodes[0].machine
    assert any("torch" in each for each in status.recommendations)
    assert not caller.beat("a").wants_hardware
    caller("Join", join_request("c"))
    assert caller.beat("c").wants_hardware
    caller.beat("c", hardware="{ nothing of the kind")
    until(lambda: any("cannot be read" in each for node in caller.status().nodes for each in node.troubles))
    caller("Leave", wire.LeaveRequest(node_id="b", incarnation=1))
    until(lambda: not any("torch" in each for each in caller.status().recommendations))


def test_what_is_wrong_with_machines_is_a_trouble_of_the_job_once_for_all_of_them(caller: Caller) -> None:
    bad = dataclasses.replace(machine(), network=dataclasses.replace(machine().network, interfaces=())).to_json()
    assert not caller.status().troubles
    for node_id in ("a", "b"):
        caller("Join", join_request(node_id, hardware=bad))
    until(lambda: len(caller.states()) == 2)  # a status may be kept for some milliseconds
    status = caller.status()
    assert status.nodes[0].troubles
    assert [*status.troubles] == [f"nodes a, b: {each}" for each in status.nodes[0].troubles]
    assert not is_healthy(status) and all(each in status_words(status, "here:1") for each in status.troubles)
    for node_id in ("a", "b"):
        caller("Leave", wire.LeaveRequest(node_id=node_id, incarnation=1))
    until(lambda: caller.states() == {"a": "left", "b": "left"})
    status = caller.status()
    assert status.nodes[0].troubles and not status.troubles and is_healthy(status)


def test_nodes_whose_machine_has_errors_are_kept_out_where_that_was_asked_for(tmp_path: Path) -> None:
    good = machine()
    bad = dataclasses.replace(good, network=dataclasses.replace(good.network, interfaces=()))
    for master in master_on_thread(tmp_path, "--refuse-bad-nodes"):
        caller = master.caller()
        code, words = caller.refusal("Join", join_request("bad", hardware=bad.to_json()))
        assert code == grpc.StatusCode.FAILED_PRECONDITION and "this machine is refused" in words
        caller("Join", join_request("good", hardware=good.to_json()))
        assert list(caller.states()) == ["good"]
        assert any(each.kind == "node-refused" for each in caller("ReadEvents"))


def test_a_machine_that_is_known_to_be_bad_only_after_it_has_joined_is_out_again(tmp_path: Path) -> None:
    bad = dataclasses.replace(machine(), network=dataclasses.replace(machine().network, interfaces=())).to_json()
    for master in master_on_thread(tmp_path, "--refuse-bad-nodes"):
        caller = master.caller()
        caller.join("slow")  # to tell what its machine has
        told = wire.BeatRequest(node_id="slow", incarnation=1, hardware=bad)
        code, words = caller.refusal("Beat", told)
        assert code == grpc.StatusCode.FAILED_PRECONDITION and "this machine is refused" in words
        assert caller.states() == {"slow": "left"}
        assert caller.refusal("Beat", told)[0] == grpc.StatusCode.NOT_FOUND, "it has to join, and is refused"
        assert caller.refusal("Join", join_request("slow", hardware=bad))[0] == grpc.StatusCode.FAILED_PRECONDITION
        assert [each.kind for each in caller("ReadEvents")].count("node-refused") == 1, "it is told of once"


def test_a_machine_is_judged_by_how_many_nodes_the_job_has_with_it() -> None:
    """Loopback alone is no fault of a job's only machine, however often it joins and whoever was there before."""
    network = machine().network
    loopback = replace(network, interfaces=tuple(each for each in network.interfaces if each.is_loopback))
    hardware = replace(machine(), network=loopback).to_json()
    now = Now(clock=0.0, time=1e9)
    job = Job(STORED, JobSettings(library="1", refuses_bad_nodes=True), now)
    for _ in range(2):
        job.join(now, join_request("a", hardware=hardware))
    job.leave(now, wire.LeaveRequest(node_id="a", incarnation=1))
    job.join(now, join_request("b", hardware=hardware))
    assert not any(each.troubles for each in job_status(job, now, wire.GetStatusRequest()).nodes)
    with pytest.raises(RequestRefused, match="no network interface but loopback"):
        job.join(now, join_request("c", hardware=hardware))


def test_what_pairs_have_measured_is_kept_over_a_restart_and_nonsense_is_refused(tmp_path: Path) -> None:
    def near(caller: Caller) -> list[list[str]]:
        return sorted(sorted(each.node_ids) for each in caller.status().groups)

    for master in master_in_process(tmp_path):
        caller = master.caller()
        for number in range(4):
            hardware = machine_of(number).to_json()
            request = join_request(f"node {number}", hardware=hardware)
            request.node.host = f"host-{number:03}"
            caller("Join", request)
        for nonsense in ("", "[]", "{", '{"nodes": 3}', "x" * 5_000):
            code, _ = caller.refusal("ReportPairs", wire.ReportPairsRequest(report=nonsense))
            assert code == grpc.StatusCode.INVALID_ARGUMENT
        caller("ReportPairs", wire.ReportPairsRequest(report=pair_report([0, 0, 1, 1]).to_json()))
        found = near(caller)
        assert found == [["node 0", "node 1"], ["node 2", "node 3"]]
        until(lambda: kept_pairs(tmp_path))
        master.kill()
        master.start()
        assert near(master.caller()) == found


def kept_pairs(folder: Path) -> str:
    with contextlib.closing(sqlite3.connect(folder / "state" / "master.db")) as found:
        (text,) = found.execute("SELECT value FROM meta WHERE key = 'pairs'").fetchone()
        return str(text)


def test_a_history_is_told() -> None:
    job = Job(STORED, JobSettings(library="1"), Now(clock=0.0, time=1e9))
    job.join(Now(clock=0.0, time=1e9), join_request("a"))
    for second in range(200):
        now = Now(clock=second, time=1e9 + second)
        if second % 10 == 0:
            job.beat(now, wire.BeatRequest(node_id="a", incarnation=1, workers=[worker(0)]))
        job.tick(now)
    points = job.collector.history().points
    assert len(points) >= 15 and points[-1].steps_per_second == 10.0 and points[-1].num_workers == 1
    rows = job.take_unsaved().points
    assert rows and not job.take_unsaved().points, "each is stored once"
    again = Job(replace(STORED, points=tuple(text for _, text in rows)), job.settings, Now(clock=0.0, time=1e9 + 300))
    assert [each.steps_per_second for each in again.collector.history().points][-1] == 10.0
