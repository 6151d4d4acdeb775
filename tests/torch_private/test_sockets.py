"""The sockets of gloo groups are found among all that a process has; shut down, they end collectives that would never
end, and nothing else of the process is touched."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from elastic_ext.errors import ElasticError
from elastic_ext.torch_private.groups import destroy_groups
from elastic_ext.torch_private.sockets import (
    Candidate,
    GroupSockets,
    SocketAddress,
    TcpSocket,
    address_in,
    candidates,
    make_sure_of_sockets,
    num_connections,
    open_sockets,
    shared_with_others,
    to_tell,
)
from tests.support.ranks import RankPool
from tests.support.worlds import agents_store

LONG = timedelta(minutes=10)
"""The limit of collectives: no test waits for it."""
STAYS_BLOCKED_SECONDS = 0.5
PATIENCE_SECONDS = 30.0
"""For what takes milliseconds."""

# ---- which connections are those of groups ----

HERE, THERE = "10.0.0.1", "10.0.0.2"


class Machine:
    """Sockets made up for a process, with the next descriptor and inode."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.sockets: list[TcpSocket] = []
        self._next = itertools.count(3)

    def listens(self, port: int, host: str | None = None) -> None:
        self._opens(SocketAddress(host or self.host, port), None)

    def connects(self, port: int, other: Machine, to: int) -> None:
        """A connection that ``other`` accepts on its port ``to``."""
        self._opens(SocketAddress(self.host, port), SocketAddress(other.host, to))
        other._opens(SocketAddress(other.host, to), SocketAddress(self.host, port))

    def _opens(self, local: SocketAddress, remote: SocketAddress | None) -> None:
        number = next(self._next)
        self.sockets.append(TcpSocket(descriptor=number, inode=number + 1000, local=local, remote=remote))


def found_by(one: Machine, other: Machine, before: Callable[[], None], within: Callable[[], None]) -> list[list[int]]:
    """The local ports of the connections that each of two processes takes for those of groups."""
    before()
    first = [tuple(one.sockets), tuple(other.sockets)]
    within()
    found = [candidates(*looks) for looks in zip(first, (one.sockets, other.sockets), strict=True)]
    told = [to_tell(each) for each in found]
    return [[each.local.port for each in shared_with_others(own, told)] for own in found]


def nothing() -> None: ...


def test_a_connection_of_which_both_ranks_tell_is_one_of_the_groups() -> None:
    one, other = Machine(HERE), Machine(THERE)

    def within() -> None:
        one.listens(40001)
        other.listens(40002)
        one.connects(50001, other, to=40002)
        other.connects(50002, one, to=40001)

    assert found_by(one, other, nothing, within) == [[50001, 40001], [40002, 50002]]


def test_a_connection_to_a_process_that_is_no_rank_is_none_of_the_groups() -> None:
    one, other, outside = Machine(HERE), Machine(THERE), Machine("10.0.0.3")

    def within() -> None:
        one.listens(40001)
        outside.connects(50001, one, to=40001)
        one.connects(50002, outside, to=80)

    assert found_by(one, other, nothing, within) == [[], []]


def test_a_connection_from_before_or_to_what_listened_before_is_none_of_the_groups() -> None:
    one, other = Machine(HERE), Machine(THERE)

    def before() -> None:
        other.listens(8000)
        one.connects(50001, other, to=8000)

    assert found_by(one, other, before, lambda: one.connects(50002, other, to=8000)) == [[], []]


@pytest.mark.parametrize("every_address", ["0.0.0.0", "::"])
def test_a_connection_to_a_store_that_a_rank_begins_meanwhile_is_none_of_the_groups(every_address: str) -> None:
    one, other = Machine(HERE), Machine(THERE)

    def within() -> None:
        other.listens(29500, every_address)
        one.connects(50001, other, to=29500)

    assert found_by(one, other, nothing, within) == [[], []]


def test_a_connection_that_a_process_has_with_itself_is_none_of_the_groups() -> None:
    one, other = Machine(HERE), Machine(THERE)

    def within() -> None:
        one.listens(40001)
        one.connects(50001, one, to=40001)

    assert found_by(one, other, nothing, within) == [[], []]


def test_what_is_told_of_a_connection_is_eight_bytes_and_not_the_same_at_its_two_ends() -> None:
    ends = [SocketAddress(HERE, 50001), SocketAddress(THERE, 40002)]
    sockets = [TcpSocket(descriptor=3, inode=4, local=a, remote=b) for a, b in (ends, ends[::-1])]
    found = [Candidate(socket=sockets[0], is_accepted=False), Candidate(socket=sockets[1], is_accepted=True)]
    told = [to_tell([each]) for each in found]
    assert [len(each) for each in told] == [8, 8] and told[0] != told[1]
    assert to_tell(found) == b"".join(told) and to_tell([]) == b""


# ---- what a process sees of its sockets ----


def both_ends(server: socket.socket, address: Any, family: int = socket.AF_INET) -> tuple[socket.socket, socket.socket]:
    """A connection to a server, at whoever begins it and at whoever accepts it."""
    begun = socket.socket(family)
    begun.connect(address)
    return begun, server.accept()[0]


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def test_sockets_are_seen_with_their_addresses_and_what_is_no_connection_is_not(opened: contextlib.ExitStack) -> None:
    before = open_sockets()
    server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
    port = server.getsockname()[1]
    begun, accepted = map(opened.enter_context, both_ends(server, ("127.0.0.1", port)))
    opened.enter_context(socket.socket())  # neither connected nor listening
    opened.enter_context(socket.socket(type=socket.SOCK_DGRAM)).connect(("127.0.0.1", port))
    for each in socket.socketpair():
        opened.enter_context(each)
    here, other = SocketAddress("127.0.0.1", port), SocketAddress(*begun.getsockname())
    assert {(each.descriptor, each.local, each.remote) for each in open_sockets() if each not in before} == {
        (server.fileno(), here, None),
        (begun.fileno(), other, here),
        (accepted.fileno(), here, other),
    }


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python knows no IPv6")
def test_an_ipv4_address_in_an_ipv6_socket_is_the_same_address(opened: contextlib.ExitStack) -> None:
    before = open_sockets()
    server = opened.enter_context(socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True))
    port = server.getsockname()[1]
    for each in both_ends(server, ("127.0.0.1", port)):
        opened.enter_context(each)
    listening, begun, accepted = sorted(
        (each for each in open_sockets() if each not in before), key=lambda each: each.descriptor
    )
    assert (listening.local, listening.remote) == (SocketAddress("::", port), None)
    assert (begun.local, begun.remote) == (accepted.remote, accepted.local)
    assert accepted.local == SocketAddress("127.0.0.1", port)


def test_a_sockaddr_is_read() -> None:
    port = (8080).to_bytes(2, "big")

    def of(family: int, rest: bytes) -> bytes:
        return struct.pack("=H", family) + port + rest

    version_6, scope = bytes(4), bytes(4)
    full = socket.inet_pton(socket.AF_INET6, "fe80::1")
    assert address_in(of(socket.AF_INET, bytes([10, 0, 0, 1]) + bytes(8))) == SocketAddress("10.0.0.1", 8080)
    assert address_in(of(socket.AF_INET6, version_6 + full + scope)) == SocketAddress("fe80::1", 8080)
    mapped = socket.inet_pton(socket.AF_INET6, "::ffff:10.0.0.1")
    assert address_in(of(socket.AF_INET6, version_6 + mapped + scope)) == SocketAddress("10.0.0.1", 8080)
    assert address_in(of(socket.AF_UNIX, b"/tmp/x")) is None and address_in(b"") is None


def test_a_look_changes_no_socket(opened: contextlib.ExitStack) -> None:
    """As it would by making Python's sockets of them, where there is a default limit of time."""
    server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
    pair = [opened.enter_context(each) for each in both_ends(server, server.getsockname())]
    opened.callback(socket.setdefaulttimeout, socket.getdefaulttimeout())
    socket.setdefaulttimeout(5.0)
    assert len(open_sockets()) >= 3
    assert all(os.get_blocking(each.fileno()) for each in (server, *pair))
    pair[0].sendall(b"still there")
    assert pair[1].recv(100) == b"still there"


def test_where_the_system_tells_of_no_descriptors_none_are_found_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert open_sockets(str(tmp_path / "none")) == open_sockets(str(tmp_path / "none")) == ()
    assert [each.getMessage().split(":")[0] for each in caplog.records] == [
        "this process cannot see its sockets (No such file or directory"
    ]


# ---- shut down once, and nothing else ----


@dataclass
class Connection:
    """A connection within this process, one end of which is noted."""

    near: socket.socket
    far: socket.socket
    noted: TcpSocket

    def is_open(self) -> bool:
        """Whether what is sent at one end comes to the other."""
        try:
            self.near.sendall(b"!")
            return self.far.recv(1) == b"!"
        except OSError:
            return False


@pytest.fixture
def connect(opened: contextlib.ExitStack) -> Callable[[], Connection]:
    server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))

    def make() -> Connection:
        near, far = map(opened.enter_context, both_ends(server, server.getsockname()))
        (noted,) = (each for each in open_sockets() if each.descriptor == near.fileno())
        return Connection(near, far, noted)

    return make


def test_sockets_are_severed_once(connect: Callable[[], Connection]) -> None:
    severed, other = [connect(), connect()], connect()
    sockets = GroupSockets(each.noted for each in severed)
    assert len(sockets) == 2
    assert sockets.sever() == 2
    assert [each.is_open() for each in (*severed, other)] == [False, False, True]
    assert (sockets.sever(), len(sockets)) == (0, 0)


def test_several_threads_that_sever_shut_each_socket_down_once(connect: Callable[[], Connection]) -> None:
    sockets = GroupSockets(connect().noted for _ in range(20))
    begin, counts = threading.Barrier(4), []

    def sever() -> None:
        begin.wait()
        counts.append(sockets.sever())

    threads = [threading.Thread(target=sever) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(PATIENCE_SECONDS)
    assert sorted(counts) == [0, 0, 0, 20]


def test_what_a_later_look_finds_is_severed_too(connect: Callable[[], Connection]) -> None:
    first, second, late = connect(), connect(), connect()
    sockets = GroupSockets([first.noted])
    sockets.add([first.noted, second.noted])
    assert sockets.sever() == 2
    sockets.add([late.noted])
    assert not late.is_open() and len(sockets) == 0


def test_a_descriptor_that_is_closed_or_is_another_files_is_left_alone(
    connect: Callable[[], Connection], tmp_path: Path
) -> None:
    closed, replaced, by_a_file, stays = connect(), connect(), connect(), connect()
    sockets = GroupSockets(each.noted for each in (closed, replaced, by_a_file, stays))
    other = connect()
    closed.near.close()
    assert os.dup2(other.near.fileno(), replaced.noted.descriptor) == replaced.noted.descriptor
    with open(tmp_path / "file", "w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        os.dup2(file.fileno(), by_a_file.noted.descriptor)
        assert sockets.sever() == 1
        inode = os.fstat(by_a_file.noted.descriptor).st_ino
        assert inode == os.fstat(file.fileno()).st_ino
        # Any descriptor of the file that this process closes ends the lock.
        assert re.search(rf"POSIX .* {os.getpid()} \S+:{inode} ", Path("/proc/locks").read_text())
    assert other.is_open() and not stays.is_open()


def test_a_connection_that_its_peer_has_reset_is_nothing_to_shut_down(connect: Callable[[], Connection]) -> None:
    reset = connect()
    sockets = GroupSockets([reset.noted])
    reset.far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    reset.far.close()
    with pytest.raises(ConnectionResetError):
        reset.near.recv(1)
    assert sockets.sever() == 0


def test_severing_leaves_no_descriptor_behind(connect: Callable[[], Connection]) -> None:
    sockets = GroupSockets(connect().noted for _ in range(5))
    before = os.listdir("/proc/self/fd")
    sockets.sever()
    assert os.listdir("/proc/self/fd") == before


# ---- the self-test ----


def test_this_torch_listens_and_connects_where_it_is_looked_for() -> None:
    before = open_sockets(), threading.active_count()
    make_sure_of_sockets()
    assert (open_sockets(), threading.active_count()) == before


def test_groups_that_connect_only_when_they_are_used_are_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    with pytest.raises(ElasticError, match="listen with 2 sockets and have 0 connections"):
        make_sure_of_sockets()


# ---- in ranks ----


class Generation:
    """The process groups of one generation, with their sockets, and a list of which groups there are beside the default
    one. All ranks make it together."""

    def __init__(self, rank: int, size: int, store: Any, name: str, form: Callable[[], list[Any]] = list) -> None:
        before = open_sockets()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(name, store),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=LONG,
        )
        self.groups = form()
        self._before = before
        self.sockets = GroupSockets()
        self.look()

    def look(self) -> int:
        """How many sockets are known after another look, on all ranks."""
        found = candidates(self._before, open_sockets())
        told = exchanged(to_tell(found))
        self.sockets.add(shared_with_others(found, told))
        return len(self.sockets)


def exchanged(own: Any) -> list[Any]:
    """What each rank gives."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    return told


def store_at(port: int) -> Any:
    return dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]


def total(rank: int) -> float:
    """The sum over all ranks of a number that each has."""
    number = torch.tensor([2.0**rank])
    dist.all_reduce(number)
    return float(number)


def form_many() -> list[Any]:
    """Groups of all ranks, of some, of overlapping ones, and those of meshes with one and two dimensions."""
    groups: list[Any] = [dist.new_group(), dist.new_group([0, 1]), dist.new_group([1, 2, 3]), dist.new_group([2])]
    meshes = [init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))]
    return groups + [group for mesh in meshes for group in mesh.get_all_groups()]


def look_at_many(rank: int, port: int) -> tuple[int, int | None]:
    generation = Generation(rank, 4, store_at(port), "many", form_many)
    return len(generation.sockets), num_connections()


def test_all_connections_of_all_groups_are_there_as_the_calls_that_form_them_return(ranks: RankPool) -> None:
    with agents_store() as port:
        found = ranks.run(4, look_at_many, port, process_group=False)
    # Of the default group, that of all, and the rows and columns of the mesh; then of those of some ranks. The mesh of
    # one dimension has the default group.
    assert found == [(3 + 3 + 2 + 1, 9), (3 + 3 + 2 + 1 + 2, 11), (3 + 3 + 2 + 2, 10), (3 + 3 + 2 + 2, 10)]


def first_used_later(rank: int, port: int) -> list[int | None]:
    generation = Generation(rank, 3, store_at(port), "lazy")
    counts = [len(generation.sockets)]
    total(rank)
    counts.append(generation.look())
    return [*counts, num_connections()]


def test_connections_that_come_up_with_the_first_collective_are_found_by_a_later_look(ranks: RankPool) -> None:
    with agents_store() as port:
        environ = {"TORCH_GLOO_LAZY_INIT": "1"}
        assert ranks.run(3, first_used_later, port, env=environ, process_group=False) == [[0, 2, 2]] * 3


How = Literal["work.wait", "all_reduce", "backward"]


class Training:
    """A loop of collectives in one of three ways, all of which wait for the slowest rank."""

    def __init__(self, how: How) -> None:
        self._how = how
        self._model = DistributedDataParallel(nn.Linear(4, 1, bias=False)) if how == "backward" else None

    def step(self) -> float:
        """What the ranks have in common after a step."""
        if self._model is not None:
            self._model.zero_grad()
            self._model(torch.ones(1, 4)).sum().backward()
            gradient = self._model.module.weight.grad
            assert gradient is not None
            return float(gradient.sum())
        number = torch.ones(100)
        if self._how == "all_reduce":
            dist.all_reduce(number)
        else:
            work = dist.all_reduce(number, async_op=True)
            assert work is not None
            work.wait()
        return float(number.sum())


def wait_for_stop(pid: int) -> None:
    pause, deadline = threading.Event(), time.monotonic() + PATIENCE_SECONDS
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T" and time.monotonic() < deadline:
        pause.wait(0.01)


class Severing(threading.Thread):
    """Severs a generation once this process has waited for a while in a collective that will not end."""

    def __init__(
        self, sockets: GroupSockets, ready: Callable[[], object] = nothing, meet: Callable[[], object] = nothing
    ) -> None:
        """``ready`` waits until the collective will not end any more, ``meet`` for all who are to sever together."""
        super().__init__(name="severing")
        self._sockets, self._ready, self._meet = sockets, ready, meet
        self.is_over = threading.Event()
        """Set as the collective has ended."""
        self.was_blocked = False
        self.num_severed = 0

    def run(self) -> None:
        self._ready()
        self.was_blocked = not self.is_over.wait(STAYS_BLOCKED_SECONDS)
        self._meet()  # the first that severs gets the others out, too
        self.num_severed = self._sockets.sever()

    def told(self) -> dict[str, bool]:
        """What came of it, for who was in the collective and has its error."""
        self.is_over.set()
        self.join(PATIENCE_SECONDS)
        return {"was blocked": self.was_blocked, "has severed": self.num_severed > 0}


def survive(rank: int, port: int, how: How) -> dict[str, Any]:
    """What became of a rank of three, of which the last one stops in its loop and is woken at the end."""
    store = store_at(port)

    def meet(where: str) -> None:
        store.set(f"{where} {rank}", "")
        store.wait([f"{where} 0", f"{where} 1"])

    generation = Generation(rank, 3, store, "first", lambda: [dist.new_group()])
    training = Training(how)
    pids = exchanged(os.getpid())
    for _ in range(3):
        training.step()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(RuntimeError):
            training.step()
        return {}
    try:
        wait_for_stop(pids[2])
        severing = Severing(generation.sockets, meet=lambda: meet("blocked"))
        severing.start()
        with pytest.raises(RuntimeError):
            training.step()
        told: dict[str, Any] = {**severing.told()}
        told["severed again"] = generation.sockets.sever()
        del training
        destroy_groups()
        told["severed after the end"] = generation.sockets.sever()
        second, training = Generation(rank, 2, store, "second"), Training(how)
        told["steps"], told["total"] = [training.step() for _ in range(3)], total(rank)
        told["severed among the next"] = generation.sockets.sever()
        told["sockets"], told["total then"] = len(second.sockets), total(rank)
        meet("end")  # before the stopped one is woken
        return told
    finally:
        if rank == 0:
            os.kill(pids[2], signal.SIGCONT)


@pytest.mark.parametrize("how", ["work.wait", "all_reduce", "backward"])
def test_ranks_get_out_of_a_collective_that_a_stopped_rank_is_in_and_form_groups_among_themselves(
    how: How, ranks: RankPool
) -> None:
    with agents_store() as port:
        *survivors, woken = ranks.run(3, survive, port, how, process_group=False)
    assert woken == {}
    step = 4.0 if how == "backward" else 200.0
    assert (
        survivors
        == [
            {
                "was blocked": True,
                "has severed": True,
                "severed again": 0,
                "severed after the end": 0,
                "steps": [step] * 3,
                "total": 3.0,
                "severed among the next": 0,
                "sockets": 1,
                "total then": 3.0,
            }
        ]
        * 2
    )


def lose_a_rank(rank: int, port: int) -> dict[str, bool]:
    """What became of the ranks of four, of which the last one ends in their loop. Only rank 1 severs."""
    store = store_at(port)
    generation, training = Generation(rank, 4, store, "ring"), Training("all_reduce")
    for _ in range(3):
        training.step()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    severing = Severing(generation.sockets, lambda: store.wait(["failed 0", "failed 2"]))
    if rank == 1:
        severing.start()
    with pytest.raises(RuntimeError):
        training.step()
    if rank == 1:
        store.set("is out", "")
        return severing.told()
    store.set(f"failed {rank}", "")
    store.wait(["is out"])
    return {}


def test_a_rank_gets_out_whose_neighbours_alone_see_that_a_rank_is_lost(ranks: RankPool) -> None:
    with agents_store() as port:
        *survivors, lost = ranks.run_outcomes(4, lose_a_rank, port, process_group=False)
    assert lost.exit_signal == signal.SIGKILL
    assert [each.value for each in survivors] == [{}, {"was blocked": True, "has severed": True}, {}]


class Talk:
    """A connection of a script's, on which what one end sends comes to the other."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        end.settimeout(PATIENCE_SECONDS)

    def say(self) -> None:
        self._end.sendall(b"!")

    def hears(self) -> bool:
        try:
            return self._end.recv(1) == b"!"
        except OSError:
            return False


class Outside:
    """A process that is no rank: it echoes what comes on a connection, and connects to whoever tells it a port."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name="outside", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = self._server.accept()[0]
                threading.Thread(target=self._echo, args=(connection,), name="echo", daemon=True).start()

    @staticmethod
    def _echo(connection: socket.socket) -> None:
        """Echo; but a port in 5 digits that comes first is where to connect, and echo too."""
        with connection, contextlib.suppress(OSError):
            first = connection.recv(5)
            if len(first) == 5:
                Outside._echo(socket.create_connection(("127.0.0.1", int(first))))
                return
            while first:
                connection.sendall(first)
                first = connection.recv(5)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(PATIENCE_SECONDS)


@pytest.fixture
def outside() -> Iterator[Outside]:
    process = Outside()
    yield process
    process.close()


def connect_by(store: Any, rank: int, name: str, server: socket.socket) -> Talk:
    """A connection between two ranks, which rank 0 accepts."""
    if rank == 0:
        store.set(name, str(server.getsockname()[1]))
        return Talk(server.accept()[0])
    return Talk(socket.create_connection(("127.0.0.1", int(store.get(name)))))


def connect_meanwhile(rank: int, port: int, outside: int) -> dict[str, Any]:
    """Which connections of two ranks' scripts, and of stores, still go after the groups were severed."""
    store = store_at(port)
    server = socket.create_server(("127.0.0.1", 0))
    between, with_outside, stores = {"before": connect_by(store, rank, "before", server)}, {}, {}

    def form() -> list[Any]:
        between["within"] = connect_by(store, rank, "within", server)
        with_outside["begun here"] = Talk(socket.create_connection(("127.0.0.1", outside)))
        own = socket.create_server(("127.0.0.1", 0))  # it listens as gloo does
        asks = socket.create_connection(("127.0.0.1", outside))
        asks.sendall(f"{own.getsockname()[1]:05}".encode())
        with_outside["begun there"] = Talk(own.accept()[0])
        stores["an agent's"] = store_at(port)
        if rank == 0:
            stores["rank 0's"] = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
            store.set("a store", str(stores["rank 0's"].port))
        else:
            stores["rank 0's"] = store_at(int(store.get("a store")))
        stores["rank 0's"].set(f"here {rank}", "")
        stores["rank 0's"].wait(["here 0", "here 1"])
        return []

    generation = Generation(rank, 2, store, "group", form)
    between["after"] = connect_by(store, rank, "after", server)
    found = len(generation.sockets)
    store.set(f"severs {rank}", "")
    store.wait(["severs 0", "severs 1"])
    generation.sockets.sever()
    with pytest.raises(RuntimeError):
        total(rank)
    for each in (*between.values(), *with_outside.values()):
        each.say()
    for name, each_store in stores.items():
        each_store.set(f"{name} {rank}", "still there")
    told = {
        "sockets": found,
        "between": {name: each.hears() for name, each in between.items()},
        "outside": {name: each.hears() for name, each in with_outside.items()},
        "stores": {name: each.get(f"{name} {1 - rank}") for name, each in stores.items()},
    }
    store.set(f"done {rank}", "")
    store.wait(["done 0", "done 1"])  # before rank 0's store ends
    return told


def test_connections_of_scripts_and_of_stores_survive(outside: Outside, ranks: RankPool) -> None:
    with agents_store() as port:
        told = ranks.run(2, connect_meanwhile, port, outside.port, process_group=False)
    assert (
        told
        == [
            {
                "sockets": 1,
                "between": {"before": True, "within": True, "after": True},
                "outside": {"begun here": True, "begun there": True},
                "stores": {"an agent's": b"still there", "rank 0's": b"still there"},
            }
        ]
        * 2
    )


def outlive(rank: int, port: int) -> tuple[list[float], int]:
    """Sums in groups that are formed one after another; the sockets of each before are severed after its end."""
    store, before, sums = store_at(port), GroupSockets(), []
    for number in range(5):
        generation = Generation(rank, 2, store, str(number))
        before.sever()
        sums.append(total(rank))
        before = generation.sockets
        exchanged(None)
        dist.destroy_process_group()
    return sums, before.sever()


def test_severing_groups_that_have_ended_leaves_those_alone_that_came_after_them(ranks: RankPool) -> None:
    with agents_store() as port:
        assert ranks.run(2, outlive, port, process_group=False) == [([3.0] * 5, 0)] * 2
