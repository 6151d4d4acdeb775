"""The sockets of this process's gloo groups, which no public part of torch tells: shut down, they end a collective that
would never end.

Where a peer is stopped, or has left its part of a ring, neither ``abort`` nor ``shutdown`` nor destroying the groups
wakes who waits in a collective, before the groups' own limit of time. Shutting their sockets down from another thread
does, at once, with an error in all collectives that are under way in them.

Which sockets these are is found out in three steps, of which the caller does what is between ranks:

1. ``open_sockets()`` before groups are formed, and again after: ``candidates`` are the connections that came up in
   between.
2. Each rank tells the others ``to_tell(candidates)``.
3. ``shared_with_others`` are those of which another rank has the other end, and that were accepted where a socket
   listens that came up in between, on one address: as a group of gloo does, and as neither a store nor, as a rule,
   anything else does. What the script connects meanwhile is thereby left alone.

torch connects a gloo group to all its ranks in the call that forms it, for subgroups and the dimensions of a DeviceMesh
too. With TORCH_GLOO_LAZY_INIT=1 a connection comes up with the first collective that needs it: a later look, with the
first one as ``before``, finds it as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from elastic_ext.errors import ElasticError
from elastic_ext.version import TESTED_TORCH_IN_WORDS

from .groups import groups_made

__all__ = [
    "Candidate",
    "GroupSockets",
    "SocketAddress",
    "TcpSocket",
    "address_in",
    "candidates",
    "make_sure_of_sockets",
    "num_connections",
    "open_sockets",
    "shared_with_others",
    "to_tell",
]

_logger = logging.getLogger(__name__)

_DESCRIPTORS = "/proc/self/fd"
_CONNECTED, _LISTENS = b"\x01", b"\x0a"  # states of TCP, the first byte of TCP_INFO
_ANSWER_BYTES = 128  # the longest sockaddr
_IPV4_BYTES = 4
_MAPPED = b"\0" * 10 + b"\xff" * 2  # what an IPv4 address has before it as one of IPv6
_DIGEST_BYTES = 8
_LOOPBACK_OF_THE_TEST = "127.83.79.67"  # a loopback address as all of 127.0.0.0/8, where nothing else listens
_TEST_SECONDS = 10.0  # for what takes 1 ms
_LIMIT_OF_THE_TEST = timedelta(minutes=1)  # so that no collective ends by it in that time
_PAUSE_SECONDS = 0.001


class SocketAddress(NamedTuple):
    """One end of a TCP connection."""

    host: str
    """An IP address; an IPv4 address that is mapped to IPv6 is written as the IPv4 address."""
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TcpSocket:
    """A TCP socket of this process that is connected, or listens."""

    descriptor: int
    inode: int
    """Of this socket alone, where the descriptor may be another file's after a close."""
    local: SocketAddress
    remote: SocketAddress | None
    """None of a socket that listens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A connection that may be one of a process group, since it came up while groups were formed."""

    socket: TcpSocket
    is_accepted: bool
    """Whether this process has accepted it, where one of its sockets listens that came up in the same time."""


def open_sockets(descriptors: str = _DESCRIPTORS) -> tuple[TcpSocket, ...]:
    """The TCP sockets of this process that are connected or listen; none where the system does not tell, as macOS.

    ``descriptors`` is the folder of links to open files. Each socket is asked by itself, 5 us for an open file and some
    20 more for a socket: /proc/self/net/tcp has those of the whole machine, and takes 8 ms to read where it has few.
    """
    try:
        names = os.listdir(descriptors)
    except OSError as error:
        _say_once(f"{error.strerror}: {descriptors}")
        return ()
    system = ctypes.CDLL(None)
    found = (_seen(system, int(name), descriptors) for name in names)
    return tuple(each for each in found if each is not None)


def address_in(packed: bytes) -> SocketAddress | None:
    """The address in a ``sockaddr``; None where it is one of neither IPv4 nor IPv6."""
    family, port = int.from_bytes(packed[:2], sys.byteorder), int.from_bytes(packed[2:4], "big")
    if family == socket.AF_INET:
        host = packed[4:8]
    elif family == socket.AF_INET6:
        host = packed[8:24].removeprefix(_MAPPED)
    else:
        return None
    return SocketAddress(socket.inet_ntop(socket.AF_INET if len(host) == _IPV4_BYTES else socket.AF_INET6, host), port)


def candidates(before: Iterable[TcpSocket], after: Iterable[TcpSocket]) -> tuple[Candidate, ...]:
    """The connections that came up between two looks at this process's sockets; none that it has with itself."""
    known = {each.inode for each in before}
    new = [each for each in after if each.inode not in known]
    # A store, and most of what a script may begin meanwhile, listens on 0.0.0.0, which is no connection's address.
    listening = {each.local for each in new if each.remote is None}
    ends = {(each.local, each.remote) for each in new}
    return tuple(
        Candidate(socket=each, is_accepted=each.local in listening)
        for each in new
        if each.remote is not None and (each.remote, each.local) not in ends
    )


def to_tell(found: Iterable[Candidate]) -> bytes:
    """What a rank tells the others of its candidates: 8 bytes for each."""
    return b"".join(_digest(each, is_accepted=each.is_accepted) for each in found)


def shared_with_others(found: Iterable[Candidate], told: Iterable[bytes]) -> tuple[TcpSocket, ...]:
    """The sockets among candidates whose other end a rank has that has told of it, one of the two having accepted it.

    ``told`` is what the ranks gave by ``to_tell``; this rank's own may be among it.
    """
    ends = {each[at : at + _DIGEST_BYTES] for each in told for at in range(0, len(each), _DIGEST_BYTES)}
    return tuple(each.socket for each in found if _digest(each, is_accepted=not each.is_accepted) in ends)


def num_connections() -> int | None:
    """How many connections the gloo groups of this process have at least; None where torch keeps no list of groups.

    Where fewer were found, as behind a network that changes addresses on the way, some collectives cannot be ended.
    """
    groups = groups_made()
    if groups is None:
        return None
    return sum(int(group.size()) - 1 for group in groups if "gloo" in str(dist.get_backend_config(group)))


class GroupSockets:
    """The sockets of the process groups of one generation, and the one time that they are shut down.

    Whoever forms groups adds sockets; another thread may sever them meanwhile.
    """

    def __init__(self, sockets: Iterable[TcpSocket] = ()) -> None:
        self._lock = threading.Lock()
        self._sockets = {each.inode: each for each in sockets}
        self._is_severed = False

    def __len__(self) -> int:
        """How many sockets are there to be shut down."""
        return len(self._sockets)

    def add(self, sockets: Iterable[TcpSocket]) -> None:
        """Add what a later look has found. Where the groups have been severed, it is shut down at once."""
        with self._lock:
            if not self._is_severed:
                self._sockets.update((each.inode, each) for each in sockets)
                return
        for each in sockets:
            _shut_down(each)

    def sever(self) -> int:
        """Shut all of them down, with all collectives that are under way in these groups; gives how many there were.

        Any thread calls this, as often as it likes: it raises nothing, and does something the first time alone. A
        descriptor that was closed, or is another file's, is left alone.
        """
        with self._lock:
            self._is_severed = True
            sockets, self._sockets = self._sockets, {}
        return sum(_shut_down(each) for each in sockets.values())


def make_sure_of_sockets() -> None:
    """Raise ElasticError, with the reason, where a collective of gloo's cannot be ended here; it is tried, in 30 ms.

    Two ranks in this process form a group that torch lists nowhere, on an address that nobody else uses, and one waits
    for the other.
    """
    try:
        why = _why_not()
    except (AttributeError, OSError, RuntimeError, TypeError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
    if why:
        raise ElasticError(
            f"a collective of gloo's that a lost or stopped rank has left cannot be ended in this process ({why}); the "
            f"other ranks go on in their processes with torch {TESTED_TORCH_IN_WORDS} on Linux, otherwise by a restart"
        )


def _why_not() -> str:
    """Why no collective can be ended here, in words; empty where it can."""
    if not os.path.isdir(_DESCRIPTORS):
        return f"this system has no {_DESCRIPTORS}"
    before = open_sockets()
    groups = _pair_of_groups()
    if len(groups) != 2:
        return f"two groups of torch {torch.__version__} do not find each other in one process"
    new = [each for each in open_sockets() if each not in before and _LOOPBACK_OF_THE_TEST in _hosts_of(each)]
    listening = [each for each in new if each.remote is None]
    connected = [each for each in new if each.remote is not None]
    if not listening or len(connected) != 2:
        return (
            f"two groups of torch {torch.__version__} listen with {len(listening)} sockets and have {len(connected)} "
            "connections once they are formed, where it should be 2 and 2"
        )
    ranks = [candidates(before, [*listening, each]) for each in connected]
    shared = [each for found in ranks for each in shared_with_others(found, [to_tell(found) for found in ranks])]
    if len(shared) != 2:
        return f"a group of torch {torch.__version__} accepts connections where it does not listen"
    return _why_not_ended(groups[0], GroupSockets(shared))


def _pair_of_groups() -> list[Any]:
    """Two ranks of one gloo group, both in this process; neither is in a list of torch's. Fewer where one fails."""
    store, kind = dist.HashStore(), cast(Any, dist.ProcessGroupGloo)  # type: ignore[attr-defined]
    devices = [kind.create_device(hostname=_LOOPBACK_OF_THE_TEST) for _ in range(2)]
    made: list[Any] = []

    def form(rank: int) -> None:
        options = kind._Options()
        options._timeout, options._devices = _LIMIT_OF_THE_TEST, [devices[rank]]
        with contextlib.suppress(RuntimeError):
            made.append(kind(store, rank, 2, options))

    other = threading.Thread(target=form, args=(1,), name="elastic_ext sockets", daemon=True)
    other.start()
    form(0)
    other.join(_LIMIT_OF_THE_TEST.total_seconds())
    return made


def _why_not_ended(group: Any, sockets: GroupSockets) -> str:
    """Why a collective that the other rank takes no part in does not end as the sockets are shut down, in words; empty
    where it does."""
    work = group.allreduce(torch.zeros(1))
    sockets.sever()
    deadline = time.monotonic() + _TEST_SECONDS
    while not work.is_completed():
        if time.monotonic() > deadline:
            return f"one of torch {torch.__version__} was still waiting {_TEST_SECONDS:g} s after its sockets were shut"
        time.sleep(_PAUSE_SECONDS)
    try:
        work.wait()
    except RuntimeError:
        return ""
    return f"one of torch {torch.__version__} gives a result without its peer"


def _shut_down(found: TcpSocket) -> bool:
    """Whether a socket was there still, and is shut down."""
    # What is another file's is not duplicated: closing the duplicate would let go of locks that this process has on it.
    if _inode_of(found.descriptor) != found.inode:
        return False
    try:
        descriptor = os.dup(found.descriptor)
    except OSError:
        return False
    try:
        if _inode_of(descriptor) != found.inode:  # closed since
            return False
        with socket.socket(fileno=descriptor) as own:
            descriptor = -1
            own.shutdown(socket.SHUT_RDWR)
    except OSError:  # not connected any more
        return False
    finally:
        if descriptor != -1:
            os.close(descriptor)
    return True


def _seen(system: ctypes.CDLL, descriptor: int, descriptors: str) -> TcpSocket | None:
    """An open file, if it is a TCP socket that is connected or listens.

    No ``socket.socket`` is made of it: that may change whether the script's own calls wait.
    """
    inode = _inode_of(descriptor, descriptors)
    if inode is None:
        return None
    state = _asked(system.getsockopt, descriptor, socket.IPPROTO_TCP, socket.TCP_INFO)[:1]  # empty where it is not TCP
    if state not in (_CONNECTED, _LISTENS):
        return None
    local = address_in(_asked(system.getsockname, descriptor))
    remote = address_in(_asked(system.getpeername, descriptor)) if state == _CONNECTED else None
    if local is None or (remote is None and state == _CONNECTED) or _inode_of(descriptor, descriptors) != inode:
        return None  # closed meanwhile
    return TcpSocket(descriptor=descriptor, inode=inode, local=local, remote=remote)


def _asked(call: Any, *arguments: int) -> bytes:
    """What a call of the system's tells of a socket; nothing where it fails."""
    answer, length = ctypes.create_string_buffer(_ANSWER_BYTES), ctypes.c_uint32(_ANSWER_BYTES)
    failed = call(*arguments, answer, ctypes.byref(length))
    return b"" if failed else answer.raw[: length.value]


def _inode_of(descriptor: int, descriptors: str = _DESCRIPTORS) -> int | None:
    """The inode of a socket, by its descriptor; None for another file, or where nothing is open.

    The link is read, and not the file's status: for that a file system may wait that does not answer.
    """
    try:
        kind, _, number = os.readlink(f"{descriptors}/{descriptor}").partition(":")
    except OSError:
        return None
    return int(number[1:-1]) if kind == "socket" else None


def _hosts_of(found: TcpSocket) -> list[str]:
    return [each.host for each in (found.local, found.remote) if each is not None]


def _digest(found: Candidate, *, is_accepted: bool) -> bytes:
    """What the rank tells of a connection that has accepted it, or the one that has begun it."""
    begun, accepted = found.socket.remote, found.socket.local
    if not found.is_accepted:
        begun, accepted = accepted, begun
    return hashlib.blake2b(f"{is_accepted} {accepted} {begun}".encode(), digest_size=_DIGEST_BYTES).digest()


@functools.cache
def _say_once(why: str) -> None:
    _logger.warning(
        "this process cannot see its sockets (%s): a collective that a lost rank has left ends by its limit of time",
        why,
    )
