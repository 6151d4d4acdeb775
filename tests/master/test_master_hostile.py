"""A master among peers that mean it ill, or are broken: it goes on, and what it holds is bounded."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from elastic_ext.master.events import NodeRecord
from elastic_ext.master.store import JobStore
from elastic_ext.master.wire import master_pb2 as wire
from tests.support.masters import TOKEN, Caller, MasterProcess, join_request, master_in_process, until
from tests.support.thinning import the_first

METHODS = [each.name for each in wire.DESCRIPTOR.services_by_name["Master"].methods]
NUM_NODES = 10_000
"""All that a master takes."""
NUM_CONNECTIONS = 13_000
"""More than a master has at once."""
MOST_GROWN = 64 << 20


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MasterProcess]:
    yield from master_in_process(tmp_path)


@pytest.fixture
def patient_master(tmp_path: Path) -> Iterator[MasterProcess]:
    """One that holds a node's place however long a busy machine takes for the test."""
    yield from master_in_process(tmp_path, "--lease-seconds", "3600")


def memory_of(master: MasterProcess) -> int:
    assert master.process is not None
    return int(Path(f"/proc/{master.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def most_memory_of(master: MasterProcess) -> int:
    """The most that it has held at any time."""
    assert master.process is not None
    status = Path(f"/proc/{master.process.pid}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


def assert_it_goes_on(master: MasterProcess) -> None:
    caller = master.caller()
    caller.join("honest")
    assert caller.beat("honest").epoch == 1
    until(lambda: caller.states().get("honest") == "live")  # a status that takes long to make is kept for a while
    assert "/elastic_ext/" not in master.log.read_text(), "gRPC tells of peers that went while it refused them"


@pytest.mark.parametrize("num_messages", [1_500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_hostile_messages(master: MasterProcess, num_messages: int) -> None:
    dice = random.Random(12)
    valid = [made(name, dice).SerializeToString() for name in METHODS for _ in range(40)]
    before = memory_of(master)
    pending: list[Any] = []
    streams: list[Any] = []
    codes: set[grpc.StatusCode] = set()
    for number in range(num_messages):
        if number % 150 == 0:  # a peer that calls too often is told to wait: it comes again as another
            codes |= {each.code() for each in pending}
            for each in streams:
                each.cancel()
            pending, streams = [], []
            channel = master.channel()
        method = METHODS[number % len(METHODS)]
        request = damaged(dice.choice(valid), dice)
        is_stream = method in ("Watch", "ReadEvents")
        call = (channel.unary_stream if is_stream else channel.unary_unary)(f"/elastic_ext.v1.Master/{method}")
        metadata = (("authorization", f"Bearer {TOKEN}"),)
        if is_stream:
            streams.append(call(request, metadata=metadata, timeout=10))
        else:
            pending.append(call.future(request, metadata=metadata, timeout=10))
    codes |= {each.code() for each in pending}
    assert {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND} <= codes
    assert memory_of(master) - before < MOST_GROWN
    assert_it_goes_on(master)


def made(method: str, dice: random.Random) -> Any:
    """A message of a method with something in each of its fields, much of it out of all bounds."""
    return filled(getattr(wire, f"{method}Request")(), dice, depth=0)


def filled(message: Any, dice: random.Random, depth: int) -> Any:
    numbers = [0, 1, 2**31 - 1, 2**53, 2**63 - 1]
    texts = [
        "",
        "a",
        "j",
        "\x00",
        "../../etc/passwd",
        "x" * 5_000,
        "{" * 3_000,
        "[" * 500 + "]" * 500,
        "NaN",
        "é\u202e",
    ]
    floats = [0.0, -1.0, 1e308, float("nan"), float("inf"), float("-inf"), 1e-320]
    for field in message.DESCRIPTOR.fields:
        is_many = getattr(field, "is_repeated", None)
        is_many = field.label == field.LABEL_REPEATED if is_many is None else is_many
        count = dice.choice([0, 1, 3]) if is_many else 1
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            values = floats if field.message_type.fields_by_name["value"].cpp_type == field.CPPTYPE_DOUBLE else texts
            for _ in range(count):
                getattr(message, field.name)[dice.choice(texts[:6])] = dice.choice(values)
        elif field.message_type is not None:
            for _ in range(count if depth < 3 else 0):
                inner = getattr(message, field.name).add() if is_many else getattr(message, field.name)
                filled(inner, dice, depth + 1)
        else:
            chosen = [value_of(field, dice, numbers, texts, floats) for _ in range(count)]
            if is_many:
                getattr(message, field.name).extend(chosen)
            else:
                setattr(message, field.name, chosen[0])
    return message


def value_of(field: Any, dice: random.Random, numbers: list[int], texts: list[str], floats: list[float]) -> Any:
    if field.cpp_type == field.CPPTYPE_STRING:
        return dice.choice(texts)
    if field.cpp_type == field.CPPTYPE_BOOL:
        return dice.random() < 0.3
    if field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
        return dice.choice(floats)
    narrow = field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_UINT32)
    return dice.choice(numbers[:3] if narrow else numbers)


def damaged(data: bytes, dice: random.Random) -> bytes:
    """As it is, cut short, changed in places, or something else entirely."""
    kind = dice.randrange(4)
    if kind == 0:
        return data
    if kind == 1:
        return data[: dice.randrange(len(data) + 1)]
    if kind == 2:
        changed = bytearray(data)
        for _ in range(dice.randrange(1, 8)):
            if changed:
                changed[dice.randrange(len(changed))] = dice.randrange(256)
        return bytes(changed)
    return dice.randbytes(dice.randrange(200))


def test_messages_that_are_too_large_are_refused(master: MasterProcess) -> None:
    caller = master.caller()
    caller.join()
    huge = wire.BeatRequest(node_id="a", incarnation=1, trouble="x" * (5 << 20))
    assert caller.refusal("Beat", huge)[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
    request = join_request(hardware="x" * (300 << 10))
    assert caller.refusal("Join", request)[0] == grpc.StatusCode.INVALID_ARGUMENT
    config = '{"version": 5, "user": {"x": "' + "y" * (2 << 20) + '"}}'
    huge = wire.BeatRequest(node_id="a", incarnation=1, held=wire.ConfigHeld(version=5, digest="x", text=config))
    code, words = caller.refusal("Beat", huge)
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "allowed: 1310720" in words
    assert caller.status().config.version == 0
    assert_it_goes_on(master)


def test_nobody_can_take_a_nodes_place_for_good_by_the_largest_number_there_is(master: MasterProcess) -> None:
    caller = master.caller()
    code, words = caller.refusal("Join", join_request(incarnation=2**63 - 1))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "days ahead of the master's clock; one day is allowed" in words
    caller.join()
    caller.beat()


NOTHING_A_MILLION_TIMES = b"\x32\x00" * (1 << 20)
"""A Beat of workers of whom nothing is told: what is parsed of it takes a hundred times as much."""


@pytest.mark.parametrize("token", [None, "a-wrong-token-of-somebody", TOKEN])
def test_a_message_of_a_million_empty_parts_is_not_read(master: MasterProcess, token: str | None) -> None:
    before = most_memory_of(master)
    beat = master.channel().unary_unary("/elastic_ext.v1.Master/Beat")
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    calls = [beat.future(NOTHING_A_MILLION_TIMES, metadata=metadata, timeout=60) for _ in range(4)]
    refused = grpc.StatusCode.INVALID_ARGUMENT if token == TOKEN else grpc.StatusCode.UNAUTHENTICATED
    assert {each.code() for each in calls} == {refused}
    assert most_memory_of(master) - before < MOST_GROWN
    assert_it_goes_on(master)


def test_what_was_packed_by_the_caller_is_not_unpacked(master: MasterProcess) -> None:
    before = most_memory_of(master)
    channel: Any = grpc.insecure_channel(master.address, options=[("grpc.default_compression_algorithm", 2)])
    with channel:
        beat = channel.unary_unary("/elastic_ext.v1.Master/Beat")
        call = beat.future(bytes(128 << 20), metadata=(("authorization", f"Bearer {TOKEN}"),), timeout=60)
        assert call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert most_memory_of(master) - before < MOST_GROWN
    assert_it_goes_on(master)


def test_connections_that_say_nothing_or_nonsense_are_borne(master: MasterProcess) -> None:
    kept = [socket.create_connection(("127.0.0.1", master.port)) for _ in range(200)]
    for number, each in enumerate(kept):
        each.sendall([b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 100, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"][number % 4])
    assert_it_goes_on(master)
    for each in kept:
        each.close()


def test_thousands_of_calls_without_the_token_that_bring_much_with_them_are_borne(master: MasterProcess) -> None:
    """As from a peer that keeps to no limit of gRPC's clients: up to 14,400 calls, each with 7 kB of metadata."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
        for _ in range(900):
            each = stack.enter_context(socket.create_connection(("127.0.0.1", master.port)))
            each.setblocking(False)
            with contextlib.suppress(OSError):  # it takes no more for now
                each.send(calls_by_hand("/elastic_ext.v1.Master/Beat", num=16, metadata={"x-more": "y" * 7000}))
        caller = master.caller()

        def is_answered() -> bool:
            with contextlib.suppress(grpc.RpcError):  # while more calls wait than may, as agents do
                caller.join("honest")
                return caller.beat("honest").epoch == 1
            return False

        until(is_answered)  # and those that came before are seen to
        assert most_memory_of(master) < 300 << 20


def calls_by_hand(path: str, *, num: int, metadata: dict[str, str]) -> bytes:
    """What a client of HTTP/2 sends for so many calls at once, whose messages do not come (RFC 9113, RFC 7541)."""

    def text(value: str) -> bytes:
        if len(value) < 127:
            return bytes([len(value)]) + value.encode()
        left, size = len(value) - 127, bytearray([127])
        while left >= 128:
            size.append(left % 128 + 128)
            left //= 128
        return bytes(size) + bytes([left]) + value.encode()

    def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
        return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body

    method_and_scheme = b"\x83\x86"  # POST, http
    block = method_and_scheme + b"\x04" + text(path) + b"\x01" + text("master")
    for name, value in {"content-type": "application/grpc", "te": "trailers", **metadata}.items():
        block += b"\x00" + text(name) + text(value)
    settings, headers, end_headers = 4, 1, 4
    begin = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(settings, 0, 0, b"")
    return begin + b"".join(frame(headers, end_headers, 2 * number + 1, block) for number in range(num))


@pytest.mark.slow  # it waits for gRPC to lose patience
def test_connections_that_say_nothing_are_so_many_at_most_and_soon_closed(master: MasterProcess) -> None:
    caller = master.caller()
    caller.join("honest")
    before = memory_of(master)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert most > NUM_CONNECTIONS + 100, f"this process may open {most} files; allow {NUM_CONNECTIONS + 100} of them"
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    kept = [socket.create_connection(("127.0.0.1", master.port)) for _ in range(NUM_CONNECTIONS)]
    until(lambda: memory_of(master) - before > 60 << 20, 60)
    assert caller.beat("honest").epoch == 1
    assert memory_of(master) - before < 200 << 20
    until(lambda: all(is_closed(each) for each in kept), 60)
    for each in kept:
        each.close()
    assert_it_goes_on(master)


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@pytest.mark.parametrize("num_there", the_first([NUM_NODES - 50, NUM_NODES - 200, 0]))
def test_one_who_joins_under_ever_other_names_is_stopped_at_the_limit(
    patient_master: MasterProcess, num_there: int
) -> None:
    """Some may be there already, and were kept by an earlier master, in whose place this one comes."""
    master = patient_master
    before = memory_of(master)
    if num_there:
        master.kill()
        with contextlib.closing(JobStore(master.folder / "state")) as store:
            store.keep(nodes=[node_there(f"node of before {number} " + "x" * 200) for number in range(num_there)])
        master.start()
    codes: Counter[grpc.StatusCode] = Counter()
    for caller in [master.caller() for _ in range(2 + (NUM_NODES - num_there) // 150)]:
        for batch in range(15):  # no more at once than a connection may have under way
            names = [f"node {id(caller)} {batch} {number} " + "x" * 200 for number in range(10)]
            pending = [caller.future("Join", join_request(name)) for name in names]
            codes.update(each.code() for each in pending)
    assert codes[grpc.StatusCode.OK] == NUM_NODES - num_there and codes[grpc.StatusCode.RESOURCE_EXHAUSTED] > 0
    assert memory_of(master) - before < MOST_GROWN


def node_there(node_id: str) -> NodeRecord:
    return NodeRecord(
        node_id=node_id, incarnation=1, host="h", pid=4, library="1", started_at=1.0, state="live", hardware=""
    )


def test_followers_and_streams_are_bounded(master: MasterProcess) -> None:
    callers = [master.caller() for _ in range(8)]
    followers = [each("ReadEvents", wire.ReadEventsRequest(follow=True), timeout=60) for each in callers * 8]
    for each in followers:
        next(each)
    other = master.caller()
    code, words = other.refusal("ReadEvents", wire.ReadEventsRequest(follow=True))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED and "64 other calls follow the events already" in words
    for each in followers:
        each.cancel()
    until(lambda: is_followed(other))


def is_followed(caller: Caller) -> bool:
    stream = caller("ReadEvents", wire.ReadEventsRequest(follow=True), timeout=60)
    try:
        next(stream)
    except grpc.RpcError:
        return False
    stream.cancel()
    return True
