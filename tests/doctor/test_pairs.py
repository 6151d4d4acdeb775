"""Pairs of nodes: what is said of measured values, and real processes as nodes, which live, die or stop on the way."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from elastic_ext.doctor.findings import Finding
from elastic_ext.doctor.meeting import Meeting, MeetingFailed, Rendezvous, holds_store, meet
from elastic_ext.doctor.pairs import NUM_WINDOWS, Hello, Notes, matching
from elastic_ext.doctor.report import CheckedNode, CheckedPair, PairReport, findings_of_report, words_of_report
from tests.support.machines import GOOD_MACHINE as GOOD
from tests.support.masters import master_on_thread
from tests.support.ports import free_port
from tests.support.scripts import begun

DEADLINE_SECONDS = 100.0


# --- what is said of measured values -------------------------------------------------------------------------------
def _report(
    num_nodes: int = 4,
    *,
    matmul: dict[int, float] | None = None,
    slow_links: Sequence[int] = (),
    silent: Sequence[int] = (),
    troubles: dict[tuple[int, int], str] | None = None,
    **changes: Any,
) -> PairReport:
    """Nodes that are alike, but for what is planted."""
    nodes = tuple(
        CheckedNode(
            index=index,
            label=f"node {index}",
            is_silent=index in silent,
            hardware=GOOD,
            matmul={"cpu": ((matmul or {}).get(index, 100e9),) * 3},
        )
        for index in range(num_nodes)
    )
    pairs = tuple(
        CheckedPair(
            round=0,
            first=first,
            second=second,
            backend="gloo",
            latency_seconds=(3e-3 if {first, second} & set(slow_links) else 3e-5,) * 3,
            bandwidth=(1e8 if {first, second} & set(slow_links) else 1e9,) * 3,
            trouble=(troubles or {}).get((first, second)),
        )
        for first in range(num_nodes)
        for second in range(first + 1, num_nodes)
    )
    good = PairReport(num_wanted=num_nodes, nodes=nodes, pairs=pairs, trouble=None)
    return dataclasses.replace(good, **changes)


def _wrong(report: PairReport) -> list[Finding]:
    return [one for one in findings_of_report(report) if one.severity != "ok"]


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 9])
def test_nodes_that_are_alike_are_fine(num_nodes: int) -> None:
    assert _wrong(_report(num_nodes)) == []


def test_a_node_that_computes_slowly_is_named_by_that_alone() -> None:
    (wrong,) = _wrong(_report(matmul={2: 50e9}))
    assert wrong.severity == "warning"
    assert wrong.what == "node 2, cpu computes slowly: 2.00 times as slow as the median of 4"


@pytest.mark.parametrize("num_nodes", [3, 4, 8])
def test_a_node_with_a_slow_link_is_named_and_its_partners_are_not(num_nodes: int) -> None:
    wrong = _wrong(_report(num_nodes, slow_links=[1]))
    assert [one.what.partition(":")[0] for one in wrong] == ["node 1 answers slowly", "node 1 exchanges data slowly"]


def test_of_a_single_pair_nobody_is_blamed_for_the_link() -> None:
    assert _wrong(_report(2, slow_links=[1])) == []
    (wrong,) = _wrong(_report(2, matmul={1: 50e9}))
    assert (wrong.severity, wrong.what.partition(" more")[0]) == ("note", "node 1, cpu computes")


def test_silent_and_missing_nodes_are_named_and_no_pair_with_them_is() -> None:
    wrong = _wrong(_report(4, silent=[3], troubles={(0, 3): "closed", (1, 3): "timeout"}, num_wanted=6))
    assert [one.what for one in wrong] == [
        "4 of 6 nodes came: node 0, node 1, node 2, node 3",
        "node 3 has stopped answering",
    ]
    assert {one.severity for one in wrong} == {"error"}


def test_two_that_live_and_could_not_exchange_data_are_named() -> None:
    (wrong,) = _wrong(_report(3, troubles={(0, 2): "timed out"}))
    assert wrong.what == "node 0 and node 2 could not exchange data: timed out"
    assert "node 0 - node 2: timed out" in words_of_report(_report(3, troubles={(0, 2): "timed out"}))


def test_unlike_versions_are_a_warning_and_unlike_machines_a_note() -> None:
    report = _report(3)
    other = dataclasses.replace(
        GOOD,
        versions=dataclasses.replace(GOOD.versions, torch="2.11.0"),
        cpu=dataclasses.replace(GOOD.cpu, num_allowed=8),
    )
    nodes = (*report.nodes[:2], dataclasses.replace(report.nodes[2], hardware=other))
    wrong = _wrong(dataclasses.replace(report, nodes=nodes))
    assert [(one.severity, one.what.partition(":")[0]) for one in wrong] == [
        ("warning", "nodes have unlike versions of torch"),
        ("note", "nodes have unlike processors"),
    ]
    assert "2.13.0 on node 0, node 1; 2.11.0 on node 2" in wrong[0].what


def test_a_pair_comes_back_from_json_and_anything_else_is_refused() -> None:
    pair = _report(2).pairs[0]
    assert CheckedPair.from_json(json.dumps(dataclasses.asdict(pair))) == pair
    with pytest.raises(ValueError, match=r'^latency_seconds\[0\] is "x"; allowed: tuple'):
        CheckedPair.from_json(json.dumps({**dataclasses.asdict(pair), "latency_seconds": ["x"]}))


# --- a meeting ------------------------------------------------------------------------------------------------------
def test_who_does_not_beat_falls_silent_for_all_and_hears_of_it_when_it_comes_back() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    first, late, third = (Meeting(store, index, 3, where="here", silence_seconds=2) for index in range(3))
    with first:
        late.tell("before", "words")
        assert first.wait_for(1, "before") == "words"
        assert first.wait_for(1, "after") is None
        assert first.silent == {1}
        assert third.wait_for(1, "after") is None  # at the word of the first, without waiting itself
        with pytest.raises(MeetingFailed, match="gone on without this node"):
            late.wait_for(0, "never")
        assert first.hear(1, "before") == "words"


def test_a_node_whose_first_words_cannot_be_read_is_told_of_and_the_others_are_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    own, *others = (Meeting(store, index, 4, where="here", silence_seconds=60) for index in range(4))
    rendezvous = Rendezvous(endpoint="/a/file", run_id="none", min_nodes=4, max_nodes=4)
    hello = Hello(pid=7, holds_store=True, hardware=GOOD.to_json())
    for other, words in zip(others, (dataclasses.asdict(hello), {"pid": "7"}, "{"), strict=True):
        other.tell("hello", words)
    notes = Notes(own, GOOD, rendezvous, with_nccl=False)
    notes.introduce()
    assert notes.label(1) == f"node 1 ({GOOD.network.host}, pid 7)" and notes.holders == {1}
    assert [notes.label(2), notes.label(3)] == ["node 2", "node 3"]
    assert [record.message.partition(":")[0] for record in caplog.records] == ["node 2", "node 3"]


def test_a_node_whose_speeds_cannot_be_read_is_told_of_and_those_of_the_others_are_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    own, *others = (Meeting(store, index, 6, where="here", silence_seconds=60) for index in range(6))
    notes = Notes(own, GOOD, Rendezvous(endpoint="/a/file", run_id="none", min_nodes=6, max_nodes=6), with_nccl=False)
    rows: tuple[object, ...] = (
        {"matmul": {"cpu": [1e9, 2e9]}, "gpu": None, "more": 1},
        {"matmul": {"cpu": [1e9]}},
        {"gpu": None},
        {"matmul": {"cpu": 1e9}, "gpu": None},
        [],
    )
    for other, words in zip(others, rows, strict=True):
        other.tell("measured", words)
    notes.measure()
    own_speeds, first, *rest = (node.matmul for node in notes.report(None).nodes)
    assert len(own_speeds["cpu"]) == NUM_WINDOWS and first == {"cpu": (1e9, 2e9)} and rest == [{}] * 4
    assert [record.message.partition(":")[0] for record in caplog.records] == [f"node {index}" for index in range(2, 6)]


def test_a_pair_whose_record_cannot_be_read_is_told_of_and_the_other_pairs_are_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    own, first, second = (Meeting(store, index, 3, where="here", silence_seconds=60) for index in range(3))
    notes = Notes(own, GOOD, Rendezvous(endpoint="/a/file", run_id="none", min_nodes=3, max_nodes=3), with_nccl=False)
    good, _, other = (dataclasses.asdict(pair) for pair in _report(3).pairs)
    rounds = {pair: number for number, pairs in enumerate(matching(3)) for pair in pairs}
    first.tell(f"pair/{rounds[0, 1]}", good)
    second.tell(f"pair/{rounds[0, 2]}", {**good, "bandwidth": "much"})
    second.tell(f"pair/{rounds[1, 2]}", [])
    first.tell(f"pair/{rounds[1, 2]}", other)
    notes.read_all()
    assert {(pair.first, pair.second) for pair in notes.report(None).pairs} == {(0, 1), (1, 2)}
    words = {record.message.partition(" cannot be read: ")[0] for record in caplog.records}
    assert words == {f"node 2: its record of the pair of nodes {index} and 2" for index in (0, 1)}


@pytest.mark.parametrize("address", ["127.0.2.1", "127.0.513"])
def test_the_node_whose_address_is_the_endpoint_hosts_the_meeting_by_whatever_name(address: str) -> None:
    there = Rendezvous(  # at 127.0.2.1, as torch does not find out
        endpoint=f"127.0.513:{free_port()}", run_id="none", min_nodes=1, max_nodes=1, local_addr=address,
        config={"join_timeout": 1},
    )  # fmt: skip
    with meet(there, silence_seconds=60) as meeting:
        assert (meeting.index, meeting.num_nodes) == (0, 1) and holds_store(there.endpoint)
        meeting.leave({0})


def test_who_does_not_listen_at_the_endpoint_does_not_hold_the_store(forked_jobs: None, tmp_path: Path) -> None:
    child = "import sys; from elastic_ext.doctor.meeting import holds_store; sys.exit(holds_store(sys.argv[1]))"
    (tmp_path / "child.py").write_text(child)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        here = f"127.0.0.1:{listening.getsockname()[1]}"
        assert not holds_store(here)
        listening.listen()
        assert holds_store(here)
        assert not holds_store("/a/file")
        with begun([str(tmp_path / "child.py"), here], env=os.environ) as process:
            assert process.communicate(timeout=DEADLINE_SECONDS)[0] == ""
            assert process.wait() == 0


# --- real processes as nodes ---------------------------------------------------------------------------------------
_VICTIM = """
import os, sys
from elastic_ext.doctor.hardware import look
from elastic_ext.doctor.pairs import Rendezvous, check_pairs
endpoint, num_nodes, holds, number = sys.argv[1:]

def say(words):
    if words.startswith("round "):
        os.kill(os.getpid(), int(number))

config = {"is_host": holds, "join_timeout": 60}
nodes = Rendezvous(endpoint=endpoint, run_id="none", min_nodes=int(num_nodes), max_nodes=int(num_nodes), config=config)
check_pairs(nodes, look(), say=say)
"""
"""A node that sends itself a signal when it comes to its first pair."""


class _Nodes:
    """Processes of elastic-ext doctor that check each other, of which the first holds the store."""

    def __init__(
        self,
        num_nodes: int,
        folder: Path,
        *arguments: str,
        num_wanted: int | None = None,
        victim: int | None = None,
        how: signal.Signals = signal.SIGKILL,
    ) -> None:
        endpoint = f"127.0.0.1:{free_port()}"
        self._deadline = time.monotonic() + DEADLINE_SECONDS
        self.processes = []
        for index in range(num_nodes):
            holds = "true" if index == 0 else "false"
            command = ["-m", "elastic_ext.cli", "doctor", "--json", "--run-dir", str(folder)]
            command += ["--rdzv-endpoint", endpoint, "--nnodes", str(num_wanted or num_nodes)]
            command += ["--rdzv-conf", f"is_host={holds},join_timeout={4 if num_wanted else 60}", *arguments]
            if index == victim:
                (folder / "victim.py").write_text(_VICTIM)
                command = [str(folder / "victim.py"), endpoint, str(num_nodes), holds, str(int(how))]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            with (folder / f"{index}.err").open("wb") as err:
                self.processes.append(begun(command, env=environment, stderr=err.fileno()))

    def end_of(self, index: int) -> tuple[int, list[dict[str, Any]]]:
        """The exit status of that process, and what it has printed."""
        output, _ = self.processes[index].communicate(timeout=max(self._deadline - time.monotonic(), 0.01))
        return self.processes[index].wait(), [json.loads(line) for line in output.splitlines()]

    def close(self) -> None:
        for process in self.processes:
            with process:
                process.kill()


@pytest.fixture
def start(forked_jobs: None, tmp_path: Path) -> Iterator[Any]:
    started: list[_Nodes] = []

    def make(num_nodes: int, *arguments: str, **more: Any) -> _Nodes:
        started.append(_Nodes(num_nodes, tmp_path, *arguments, **more))
        return started[-1]

    yield make
    for nodes in started:
        nodes.close()


def _report_in(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    (report,) = [record for record in records if record["record"] == "pairs"]
    return report


def _errors_in(records: Sequence[dict[str, Any]]) -> list[str]:
    return [one["what"] for one in records if one["record"] == "finding" and one["severity"] == "error"]


def _is_measured(pair: dict[str, Any]) -> bool:
    return not pair["trouble"] and len(pair["latency_seconds"]) == len(pair["bandwidth"]) == 3


slow = pytest.mark.slow


def test_a_master_that_is_named_is_told_what_was_measured(start: Any, tmp_path: Path) -> None:
    for master in master_on_thread(tmp_path):
        ways = ["--master", master.address, "--token-file", str(master.token_file)]
        nodes = start(2, *ways)
        for index in range(2):
            nodes.end_of(index)
        kinds = [each.kind for each in master.caller()("ReadEvents")]
        assert kinds.count("pairs") == 1, "the first node tells of it"


@pytest.mark.parametrize("num_nodes", [2, pytest.param(3, marks=slow)])
def test_nodes_measure_every_pair_and_all_get_the_same_report(num_nodes: int, start: Any) -> None:
    nodes = start(num_nodes)
    ended = [nodes.end_of(index) for index in range(num_nodes)]
    report = _report_in(ended[0][1])
    assert all(_report_in(records) == report for _, records in ended)
    pairs = [(pair["first"], pair["second"]) for pair in report["pairs"]]
    assert sorted(pairs) == [(a, b) for a in range(num_nodes) for b in range(a + 1, num_nodes)]
    assert all(_is_measured(pair) for pair in report["pairs"])
    assert all(len(node["matmul"]["cpu"]) == 3 and not node["is_silent"] for node in report["nodes"])
    assert {f"pid {process.pid})" in str(report["nodes"]) for process in nodes.processes} == {True}
    for status, records in ended:
        assert _errors_in(records) == []
        bad = [one for one in records if one["record"] == "finding" and one["severity"] == "warning"]
        assert status == int(bool(bad))


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=slow)])
def test_a_node_that_dies_or_stops_on_the_way_is_named_and_the_others_finish(how: signal.Signals, start: Any) -> None:
    nodes = start(3, "--silence", "4", victim=2, how=how)
    for index in (0, 1):
        status, records = nodes.end_of(index)
        assert status == 1
        (error,) = _errors_in(records)
        assert f"pid {nodes.processes[2].pid}) has stopped answering" in error
        report = _report_in(records)
        silent = {node["index"] for node in report["nodes"] if node["is_silent"]}
        left = [pair for pair in report["pairs"] if not silent & {pair["first"], pair["second"]}]
        assert len(silent) == len(left) == 1
        assert _is_measured(left[0])


@slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_node_that_holds_the_store_is_named_when_it_dies_or_stops(how: signal.Signals, start: Any) -> None:
    nodes = start(3, "--silence", "4", victim=0, how=how)
    for index in (1, 2):
        status, records = nodes.end_of(index)
        assert status == 1
        errors = _errors_in(records)
        assert "where the nodes met, does not answer any more" in errors[0]
        assert f"pid {nodes.processes[0].pid}) has stopped answering" in errors[1]


@slow
def test_who_came_is_named_where_a_node_is_missing(start: Any) -> None:
    nodes = start(2, num_wanted=3)
    for index in range(2):
        status, records = nodes.end_of(index)
        assert status == 1
        (error,) = _errors_in(records)
        assert error.startswith("2 of 3 nodes came: ")
        assert all(f"pid {process.pid})" in error for process in nodes.processes)


@slow
def test_an_endpoint_that_nobody_holds_is_an_error_in_words(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        command = [sys.executable, "-m", "elastic_ext.cli", "doctor", "--run-dir", str(tmp_path), "--nnodes", "2"]
        command += ["--rdzv-endpoint", endpoint, "--rdzv-conf", "is_host=false,join_timeout=1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert done.returncode == 1
    assert f"elastic-ext: {endpoint}, where the nodes are to meet, cannot be reached" in done.stderr


_MEETS = """
import sys
import torch.distributed as dist
from elastic_ext.doctor.pairs import exchange
rank, path = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore(path, 2)
if rank == 1:
    try:
        exchange(dist.PrefixStore("alone", store), 1, backend="gloo", timeout_seconds=0.1)
    except RuntimeError:
        print("failed")
latency, bandwidth = exchange(dist.PrefixStore("both", store), rank, backend="gloo", timeout_seconds=60)
print(len(latency), len(bandwidth))
"""


def test_a_pair_meets_after_one_of_them_has_failed_to_meet_another(forked_jobs: None, tmp_path: Path) -> None:
    (tmp_path / "meets.py").write_text(_MEETS)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    both = [
        begun([str(tmp_path / "meets.py"), str(rank), str(tmp_path / "store")], env=environment, stderr=2)
        for rank in range(2)
    ]
    assert [process.communicate(timeout=DEADLINE_SECONDS)[0].split() for process in both] == [
        ["3", "3"],
        ["failed", "0", "0"],
    ]
    for process in both:
        with process:
            assert process.wait() == 0
