"""A master whose time others want: honest agents are answered, and nobody is taken for lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from elastic_ext.master.shown import Shown
from elastic_ext.master.wire import master_pb2 as wire
from tests.masters import TOKEN, MasterProcess, master_in_process

NUM_HONEST = 200
NUM_CALLS = 300
TOO_MANY = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)  # calls; streams of one connection


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MasterProcess]:
    yield from master_in_process(tmp_path, "--lease-seconds", "30")


class Slow:
    """A status that takes its time, by a clock of its own."""

    def __init__(self, seconds: float) -> None:
        self.now = 100.0
        self.num_made = 0
        self.num_events = 0
        self._seconds = seconds
        self.shown = Shown(self._make, self._events, lambda: self.now)

    def _make(self, request: wire.GetStatusRequest) -> wire.JobStatus:
        self.num_made += 1
        self.now += self._seconds
        return wire.JobStatus(job=str(self.num_made), events=self._events(request.num_events))

    def _events(self, num: int) -> list[wire.JobEvent]:
        return [wire.JobEvent(number=each) for each in range(self.num_events)][-num:]

    def ask(self, **asked: Any) -> tuple[str, int]:
        status = self.shown.status(wire.GetStatusRequest(**asked))
        return status.job, len(status.events)


def test_a_status_that_takes_no_time_is_made_each_time() -> None:
    slow = Slow(0.001)
    assert [slow.ask()[0] for _ in range(3)] == ["1", "2", "3"]


def test_one_that_takes_long_is_made_in_a_tenth_of_the_time_with_all_the_events_there_are() -> None:
    slow = Slow(0.2)
    assert slow.ask() == ("1", 0)
    slow.num_events = 5
    assert [slow.ask(), slow.ask(num_events=2)] == [("1", 5), ("1", 2)]
    assert slow.ask(without_workers=True) == ("2", 5), "which is another one"
    begin, made = slow.now, slow.num_made
    while slow.now < begin + 60.0:
        slow.now += 0.02
        slow.ask()
    assert (slow.num_made - made) * 0.2 <= 60.0 * 0.11
    assert slow.num_made - made > 20, "and it is never old"


def test_floods_of_all_kinds_beside_honest_agents(master: MasterProcess) -> None:
    workers = [wire.Worker(rank=rank, state="running", step=1) for rank in range(8)]
    honest = [master.caller() for _ in range(NUM_HONEST)]
    for number, caller in enumerate(honest):
        caller.join(f"n{number}")

    def all_beat() -> list[Any]:
        beats = [wire.BeatRequest(node_id=f"n{number}", incarnation=1, workers=workers) for number in range(NUM_HONEST)]
        return [caller.future("Beat", beat) for caller, beat in zip(honest, beats, strict=True)]

    def flood(method: str, request: Any, token: str) -> list[Any]:
        caller = master.caller(token)
        return [caller.future(method, request, timeout=60) for _ in range(NUM_CALLS)]

    for _ in range(3):
        statuses = flood("GetStatus", wire.GetStatusRequest(num_events=1000), TOKEN)
        configs = flood("GetConfigs", wire.GetConfigsRequest(), TOKEN)
        hostile = flood("Beat", wire.BeatRequest(node_id="n1", incarnation=9, workers=workers), TOKEN)
        hostile += flood("Beat", wire.BeatRequest(node_id="nobody", incarnation=1), TOKEN)
        hostile += flood("GetStatus", wire.GetStatusRequest(), "a-wrong-token-of-somebody")
        assert {each.code() for each in all_beat()} == {grpc.StatusCode.OK}, "no honest agent is refused anything"
        for each in (statuses, configs):
            codes = Counter(one.code() for one in each)
            assert codes.keys() <= {grpc.StatusCode.OK, *TOO_MANY} and codes[grpc.StatusCode.OK] < NUM_CALLS
        assert grpc.StatusCode.OK not in {each.code() for each in hostile}
    kinds = {each.kind for each in honest[0]("ReadEvents")}
    assert "node-lost" not in kinds, "nobody was kept from saying that he is there"
    assert set(honest[0].states().values()) == {"live"}
