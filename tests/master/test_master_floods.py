"""A master whose time others want: honest agents are answered, and nobody is taken for lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from elastic_ext.master.service import CallEnded, Guard, GuardInterceptor, host_of
from elastic_ext.master.status import StatusCache
from elastic_ext.master.wire import master_pb2 as wire
from tests.support.masters import TOKEN, MasterProcess, master_in_process

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
        self.shown = StatusCache(self, lambda: self.now)

    def status(self, request: wire.GetStatusRequest) -> wire.JobStatus:
        self.num_made += 1
        self.now += self._seconds
        return wire.JobStatus(job=str(self.num_made), events=self.events(request.num_events))

    def events(self, num: int) -> list[wire.JobEvent]:
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


# ---- who comes anew for each call ----


@dataclass
class Peer:
    """Who calls, as a guard sees it."""

    name: str
    token: str | None = TOKEN

    def peer(self) -> str:
        return self.name

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)


async def admitted(guard: Guard, name: str, **given: Any) -> grpc.StatusCode | None:
    """With what a call ends, None where it is let be."""
    try:
        await guard.admit(Peer(name, **given))  # type: ignore[arg-type]
    except CallEnded as error:
        return error.code
    return None


class Gate:
    """A guard, and a clock."""

    def __init__(self) -> None:
        self.now = 50.0
        self.guard = Guard(TOKEN, lambda: self.now, new_per_second=2.0, new_at_once=10.0, wait_seconds=0.0)

    def refusal(self, name: str, **given: Any) -> tuple[grpc.StatusCode, str] | None:
        """With what a call of the connection of that name ends, None where it is let be."""
        try:
            asyncio.run(self.guard.admit(Peer(name, **given)))  # type: ignore[arg-type]
        except CallEnded as error:
            return error.code, error.words
        return None

    def num_new(self, host: str, *, first: int = 0, num: int = 30) -> int:
        """How many new connections of a host are let be."""
        return sum(self.refusal(f"ipv4:{host}:{first + port}") is None for port in range(num))


def test_a_host_may_make_so_many_connections_and_then_a_few_each_second() -> None:
    gate = Gate()
    assert gate.num_new("10.0.0.7") == 10
    code, words = gate.refusal("ipv4:10.0.0.7:99") or (None, "")
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert words == "too many new connections come from this host: wait a while, and make all calls by one connection"
    assert gate.guard.refusals["newcomers"] == 21
    gate.now += 3.0
    assert gate.num_new("10.0.0.7", first=1000) == 6
    assert gate.num_new("10.0.0.8") == 10, "and others have theirs"


def test_a_connection_that_is_there_goes_on_whatever_comes_from_its_host() -> None:
    gate = Gate()
    assert gate.num_new("10.0.0.7") == 10
    assert [gate.refusal(f"ipv4:10.0.0.7:{port}") for port in range(10)] == [None] * 10


def test_who_calls_without_the_token_again_and_again_is_told_so_after_a_while() -> None:
    guard = Guard(TOKEN, lambda: 0.0, at_once=5.0, wait_seconds=3600.0)

    async def come() -> tuple[list[bool], set[str]]:
        calls = [asyncio.ensure_future(admitted(guard, f"ipv4:10.0.0.7:{each}", token="a-guess")) for each in range(8)]
        while sum(each.done() for each in calls) < 5:
            await asyncio.sleep(0)
        await guard.admit(Peer("ipv4:10.0.0.7:99"))  # type: ignore[arg-type]
        found = [each.done() for each in calls]
        ended = {str(each.result()) for each in calls if each.done()}
        for each in calls:
            each.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        return found, ended

    assert asyncio.run(come()) == ([True] * 5 + [False] * 3, {str(grpc.StatusCode.UNAUTHENTICATED)})


def test_those_that_have_to_wait_keep_nobody_else_waiting_and_are_no_more_than_so_many() -> None:
    guard = Guard(None, lambda: 0.0, new_per_second=2.0, new_at_once=1.0, wait_seconds=3600.0)

    async def come() -> tuple[int, set[str]]:
        await guard.admit(Peer("ipv4:10.0.0.7:0"))  # type: ignore[arg-type]
        calls = [asyncio.ensure_future(guard.admit(Peer(f"ipv4:10.0.0.7:{1 + each}"))) for each in range(5_000)]  # type: ignore[arg-type]
        while sum(each.done() for each in calls) < 5_000 - 1_024:
            await asyncio.sleep(0)
        done, waiting = [each for each in calls if each.done()], [each for each in calls if not each.done()]
        await guard.admit(Peer("ipv4:10.0.0.7:0"))  # type: ignore[arg-type]
        await guard.admit(Peer("ipv4:10.0.0.8:0"))  # type: ignore[arg-type]
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return len(waiting), {type(each.exception()).__name__ for each in done}

    assert asyncio.run(come()) == (1_024, {"CallEnded"})


def test_who_has_no_token_takes_nothing_from_those_who_have() -> None:
    gate = Gate()
    for port in range(100):
        code, _ = gate.refusal(f"ipv4:10.0.0.7:{port}", token=None) or (None, "")
        assert code == grpc.StatusCode.UNAUTHENTICATED
    assert gate.num_new("10.0.0.7") == 10


def test_all_nodes_that_a_master_takes_may_come_at_once_from_one_address() -> None:
    guard = Guard(None, lambda: 0.0)

    async def come() -> None:
        for number in range(10_000):
            await guard.admit(Peer(f"ipv4:10.0.0.7:{number}"))  # type: ignore[arg-type]

    asyncio.run(come())
    assert not guard.refusals


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.7:4711", "10.0.0.7"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:4711", "2001:db8:1:2::/64"),
        ("ipv6:[2001:db8:1:2::9]:4711", "2001:db8:1:2::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:1", "fe80::/64"),
        ("ipv6:[::ffff:10.0.0.7]:4711", "10.0.0.7"),
        ("ipv6:[nothing]:1", "nothing"),
        ("unix:", "unix"),
        ("unix:/tmp/socket", "unix"),
        ("", ""),
    ],
)
def test_a_host_is_where_a_connection_comes_from(peer: str, host: str) -> None:
    assert host_of(peer) == host


# ---- what of a message is read ----


class Doorkeeping:
    """A server with a door, and what its method was given."""

    def __init__(self, *, read_seconds: float = 3600.0) -> None:
        self.given: list[bytes] = []
        self.guard = Guard(TOKEN, lambda: 0.0, wait_seconds=0.0)
        self._door = GuardInterceptor(self.guard, open_service="open.Service", read_seconds=read_seconds)

    @contextlib.asynccontextmanager
    async def channel(self) -> AsyncIterator[Any]:
        async def one(request: bytes, peer: Any) -> bytes:
            self.given.append(request)
            return b"answer"

        async def many(request: bytes, peer: Any) -> AsyncIterator[bytes]:
            yield await one(request, peer)
            yield b"end"

        methods: dict[str, Any] = {
            "Beat": grpc.unary_unary_rpc_method_handler(one),
            "Watch": grpc.unary_stream_rpc_method_handler(many),
        }
        server = grpc.aio.server(interceptors=(self._door,))
        for name in ("a.Service", "open.Service"):
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, methods),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                yield channel
        finally:
            await server.stop(0)


AS_OURS = (("authorization", f"Bearer {TOKEN}"),)


async def outcome(call: Any) -> tuple[grpc.StatusCode, str]:
    """With what a call ends."""
    return await call.code(), await call.details()


def test_calls_are_answered_as_they_are_without_a_door() -> None:
    found = Doorkeeping()

    async def come() -> None:
        async with found.channel() as channel:
            assert await channel.unary_unary("/a.Service/Beat")(b"x", metadata=AS_OURS) == b"answer"
            assert [each async for each in channel.unary_stream("/a.Service/Watch")(b"y", metadata=AS_OURS)] == [
                b"answer",
                b"end",
            ]
            assert await channel.unary_unary("/open.Service/Beat")(b"z") == b"answer"

    asyncio.run(come())
    assert found.given == [b"x", b"y", b"z"]


def test_of_who_has_no_token_nothing_is_waited_for() -> None:
    found = Doorkeeping()

    async def come() -> None:
        async with found.channel() as channel:
            for method in ("Beat", "Watch", "NoSuch"):
                silent = channel.stream_unary(f"/a.Service/{method}")()
                assert await outcome(silent) == (
                    grpc.StatusCode.UNAUTHENTICATED,
                    "this master asks for its token, and this call has none or another one: look at --token-file",
                )

    asyncio.run(come())
    assert found.given == [] and found.guard.refusals == {"unauthenticated": 3}


def test_a_message_that_does_not_come_is_refused_after_a_while() -> None:
    found = Doorkeeping(read_seconds=0.1)

    async def come() -> tuple[grpc.StatusCode, str]:
        async with found.channel() as channel:
            return await outcome(channel.stream_unary("/a.Service/Beat")(metadata=AS_OURS))

    words = "the message of Beat has not come within 0.1 seconds"
    assert asyncio.run(come()) == (grpc.StatusCode.DEADLINE_EXCEEDED, words)


def test_a_message_that_is_none_or_too_large_is_refused_with_what_is_allowed() -> None:
    found = Doorkeeping()

    async def come() -> list[tuple[grpc.StatusCode, str]]:
        async with found.channel() as channel:
            ended = channel.stream_unary("/a.Service/Beat")(metadata=AS_OURS)
            await ended.done_writing()
            watch = channel.unary_unary("/a.Service/Watch")(bytes(20_000), metadata=AS_OURS)
            probe = channel.unary_unary("/open.Service/Beat")(bytes(300))
            other = channel.unary_unary("/a.Service/NoSuch")(b"", metadata=AS_OURS)
            return [await outcome(each) for each in (ended, watch, probe, other)]

    code = grpc.StatusCode
    assert asyncio.run(come()) == [
        (code.INVALID_ARGUMENT, "Beat was called without a message"),
        (code.INVALID_ARGUMENT, "the message of Watch has 20000 bytes; allowed: 16384"),
        (code.INVALID_ARGUMENT, "the message of Beat has 300 bytes; allowed: 256"),
        (code.UNIMPLEMENTED, "this master has no such method"),
    ]
    assert found.given == []


def test_messages_that_do_not_come_are_waited_for_a_few_at_once() -> None:
    found = Doorkeeping()

    async def come() -> None:
        async with found.channel() as channel:
            silent = [channel.stream_unary("/a.Service/Beat")(metadata=AS_OURS) for _ in range(16)]
            await asyncio.gather(*(each.wait_for_connection() for each in silent))
            waiting = channel.unary_unary("/a.Service/Beat")(b"x", metadata=AS_OURS)
            for each in silent[1:]:
                each.cancel()
            assert await waiting == b"answer", "as soon as there is a place"
            silent[0].cancel()

    asyncio.run(come())


def test_probes_of_anybody_whose_messages_do_not_come_keep_no_agent_and_no_probe_waiting() -> None:
    found = Doorkeeping()

    async def come() -> None:
        async with found.channel() as channel:
            silent = [channel.stream_unary("/open.Service/Beat")() for _ in range(20)]
            await asyncio.gather(*(each.wait_for_connection() for each in silent))
            assert await channel.unary_unary("/a.Service/Beat")(b"x", metadata=AS_OURS) == b"answer"
            assert await channel.unary_unary("/open.Service/Beat")(b"z") == b"answer"
            for each in silent:
                each.cancel()

    asyncio.run(asyncio.wait_for(come(), 20))
    assert b"x" in found.given and found.given.count(b"") == 5, "a probe that nobody reads is one of the whole server"


@pytest.mark.parametrize(("num_honest", "num_floods"), [(60, 1), pytest.param(200, 3, marks=pytest.mark.slow)])
def test_floods_of_all_kinds_beside_honest_agents(master: MasterProcess, num_honest: int, num_floods: int) -> None:
    workers = [wire.Worker(rank=rank, state="running", step=1) for rank in range(8)]
    honest = [master.caller() for _ in range(num_honest)]
    for number, caller in enumerate(honest):
        caller.join(f"n{number}")

    def all_beat() -> list[Any]:
        beats = [wire.BeatRequest(node_id=f"n{number}", incarnation=1, workers=workers) for number in range(num_honest)]
        return [caller.future("Beat", beat) for caller, beat in zip(honest, beats, strict=True)]

    def flood(method: str, request: Any, token: str) -> list[Any]:
        caller = master.caller(token, is_connected=True)
        return [caller.future(method, request, timeout=60) for _ in range(NUM_CALLS)]

    for _ in range(num_floods):
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
