"""A clock that is put back or forward by an hour on one node, while a job runs: nothing there waits for an hour.

What goes on by a clock that cannot be set needs no test here; what compares times of day does.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
)

from elastic_ext.agent.master.report import NodeReporter
from elastic_ext.agent.rendezvous import loopback_store
from elastic_ext.master.address import MOST_BEAT_BYTES
from elastic_ext.master.wire import master_pb2 as wire
from elastic_ext.members.plan import MembershipPlan
from elastic_ext.records.agent import MEMBERSHIP_FILE, WORKERS_FILE, Since, WorkerSeen, WorkersRecord
from elastic_ext.torch_private.agent import judge_silence_here, participants, serve_workers_by
from tests.agent.test_agent_nodes import FOR_EVER, JOB, Cluster
from tests.support.nodes import Node, nodes
from tests.support.put_back import HOUR

_SILENT_SECONDS = 15.0  # torch's own: three heartbeats, of which there is one in five seconds


class Clock:
    """A time of day that is set, and a clock beside it that goes on."""

    def __init__(self) -> None:
        self.seconds, self.time_of_day = 100.0, 1.7e9

    def pass_by(self, seconds: float) -> None:
        self.seconds += seconds
        self.time_of_day += seconds

    def since(self, began: float) -> Since:
        return Since(began, time_of_day=lambda: self.time_of_day, clock=lambda: self.seconds)


# ---- times of day in records ----


def test_a_moment_is_told_earlier_by_as_much_as_the_clock_was_put_back() -> None:
    clock = Clock()
    since = clock.since(clock.time_of_day - 5)
    told = since.seconds
    clock.pass_by(60)
    assert since.seconds == pytest.approx(told)
    clock.time_of_day -= HOUR
    clock.pass_by(60)
    assert since.seconds == pytest.approx(told - HOUR)


def test_a_moment_stays_where_the_clock_was_put_forward_since_what_came_after_it_may_have_been_told_before() -> None:
    clock = Clock()
    since = clock.since(clock.time_of_day - 5)
    told = since.seconds
    clock.time_of_day += HOUR
    assert since.seconds == told


def test_a_master_is_told_of_workers_and_nodes_also_once_the_clock_of_a_node_was_put_back(tmp_path: Path) -> None:
    clock = Clock()
    report = NodeReporter(tmp_path, since=clock.since(clock.time_of_day))
    clock.pass_by(60)
    clock.time_of_day -= HOUR
    worker = WorkerSeen(local_rank=0, rank=0, pid=1, start_ticks=1, state="running", step=7)
    plan = MembershipPlan(version=3, nodes=(), reason="a node has joined", time=clock.time_of_day)
    record = WorkersRecord(time=clock.time_of_day, restart=0, membership_version=3, workers=(worker,))
    (tmp_path / MEMBERSHIP_FILE).write_text(plan.to_json())
    (tmp_path / WORKERS_FILE).write_text(record.to_json())
    request = wire.BeatRequest()
    report.fill(request, MOST_BEAT_BYTES)
    assert [each.rank for each in request.workers] == [0] and request.membership.version == 3


# ---- nodes that meet ----


class Memory(RendezvousBackend):
    """The state of a rendezvous, in memory."""

    def __init__(self) -> None:
        self._lock, self._bits, self._token = threading.Lock(), b"", 0

    @property
    def name(self) -> str:
        return "memory"

    def get_state(self) -> tuple[bytes, int] | None:
        with self._lock:
            return (self._bits, self._token) if self._token else None

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, int, bool]:
        with self._lock:
            has_set = (token or 0) == self._token
            if has_set:
                self._bits, self._token = state, self._token + 1
            return self._bits, self._token, has_set

    def shift(self, place: int, seconds: float) -> None:
        """Have the node of that place tell that it lives, by a clock that is so much ahead."""
        with self._lock:
            state = pickle.loads(self._bits)
            node = next(node for node, found in state.participants.items() if found == place)
            state.last_heartbeats[node] += timedelta(seconds=seconds)
            self._bits, self._token = pickle.dumps(state), self._token + 1


@contextmanager
def two_nodes(clock: Callable[[], float]) -> Iterator[tuple[Memory, list[DynamicRendezvousHandler]]]:
    """Two that have met, in the order of their places, and tell nothing by themselves; one judges by ``clock``."""
    memory, store = Memory(), HashStore()
    limits = RendezvousTimeout(join=timedelta(seconds=60), last_call=timedelta(seconds=1))
    made = [DynamicRendezvousHandler.from_backend("job", store, memory, 2, 2, "127.0.0.1", limits) for _ in range(2)]
    for each in made:
        vars(each._state_holder)["_cache_duration"] = 0  # of a second: each look is one at the state
        serve_workers_by(each, lambda: loopback_store("127.0.0.1"))
        assert judge_silence_here(each, clock=clock)
    threads = [threading.Thread(target=each.next_rendezvous, daemon=True) for each in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for each in made:
        each._stop_heartbeats()
    places: dict[str, int] = participants(made[0]) or {}
    made.sort(key=lambda each: places[str(each._this_node)])
    yield memory, made


def num_present(handler: DynamicRendezvousHandler) -> int:
    handler.num_nodes_waiting()
    return len(participants(handler) or {})


@pytest.mark.parametrize("shift", [-HOUR, HOUR])
def test_a_node_whose_clock_was_set_is_not_taken_for_lost_and_takes_no_other_for_it(shift: float) -> None:
    clock = Clock()
    with two_nodes(lambda: clock.seconds) as (memory, (first, second)):
        memory.shift(1, shift)
        for _ in range(10):
            assert num_present(first) == 2 == num_present(second)
            clock.pass_by(_SILENT_SECONDS - 1)
            memory.shift(0, 1.0)
            memory.shift(1, 1.0)


def test_a_node_that_has_fallen_silent_is_lost_whatever_its_clock_says() -> None:
    clock = Clock()
    with two_nodes(lambda: clock.seconds) as (memory, (first, _)):
        memory.shift(1, HOUR)
        assert num_present(first) == 2
        clock.pass_by(_SILENT_SECONDS - 1)
        memory.shift(0, 1.0)
        assert num_present(first) == 2
        clock.pass_by(2)
        assert num_present(first) == 1


def test_a_silent_node_is_lost_though_another_writes_down_again_and_again_what_it_told_last() -> None:
    clock = Clock()
    with two_nodes(lambda: clock.seconds) as (memory, (first, _)):
        memory.shift(1, HOUR)
        assert num_present(first) == 2
        for num_left in (2, 2, 1):
            clock.pass_by(6)
            before = memory.get_state()
            first._keep_alive()
            assert memory.get_state() != before
            assert num_present(first) == num_left


class DeadlineAhead(Memory):
    """... where a clock that is an hour ahead has said until when more nodes are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.num_put_off = 0

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, int, bool]:
        found = pickle.loads(state)
        if found.deadline is not None and self.num_put_off == 0:
            self.num_put_off += 1
            found.deadline += timedelta(seconds=HOUR)
            state = pickle.dumps(found)
        return super().set_state(state, token)


def test_more_nodes_are_waited_for_no_longer_where_the_clock_that_said_until_when_is_an_hour_ahead() -> None:
    memory, store = DeadlineAhead(), HashStore()
    limits = RendezvousTimeout(join=timedelta(seconds=30), last_call=timedelta(seconds=1))
    only = DynamicRendezvousHandler.from_backend("job", store, memory, 1, 2, "127.0.0.1", limits, keep_alive_interval=1)
    serve_workers_by(only, lambda: loopback_store("127.0.0.1"))
    assert judge_silence_here(only)
    only.next_rendezvous()  # which raises where that takes longer than ``join``
    only._stop_heartbeats()
    assert memory.num_put_off == 1


def test_a_node_whose_clock_was_put_back_goes_on_telling_that_it_lives() -> None:
    clock = Clock()
    with two_nodes(lambda: clock.seconds) as (memory, (first, second)):
        memory.shift(1, HOUR)  # told before its clock was put back
        for _ in range(3):
            assert num_present(first) == 2 == num_present(second)
            before = memory.get_state()
            clock.pass_by(6)
            second._keep_alive()
            assert memory.get_state() != before


@pytest.mark.slow
def test_a_job_goes_on_while_the_clock_of_a_node_is_put_back_and_says_what_a_restart_has_cost(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, nnodes="2", max_restarts=1)
    file = tmp_path / "put-back"
    arguments = [*cluster.launch, *JOB, str(tmp_path), *FOR_EVER]
    back = Node(tmp_path / "node-1", arguments, launcher=("-m", "tests.support.put_back", str(file)))
    with nodes(cluster.node(0), back) as made:
        cluster.wait_for_steps(3)
        file.touch()
        began = time.monotonic()
        while time.monotonic() - began < 12:  # three times as long as a node may be silent
            cluster.wait_for_steps(20)
        for node in made:
            assert [event["generation"] for event in node.events() if event["kind"] == "membership"] == [0]
        os.kill(next(iter(back.workers().values())).pid, signal.SIGKILL)
        for node in made:
            node.wait_for("workers started", times=2)
            line = node.wait_for("training goes on after step")
            assert 0 < float(line.split(" seconds without a step")[0].rpartition(" ")[2]) < 60, line
        for node in made:
            assert [event["generation"] for event in node.events() if event["kind"] == "membership"] == [0, 1]
