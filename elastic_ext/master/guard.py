"""Guard: who may call a master, and how often; Door: what has every call of a server go by that, before any of its
message is read. Calls that may not be are answered with a status and a sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError

from elastic_ext.errors import ConfigError
from elastic_ext.records.text import on_one_line

from .admission import Refused
from .allowances import Allowances
from .configs import Late
from .places import MOST_BEAT_BYTES, MOST_MESSAGE_BYTES
from .store import StoreError

__all__ = ["ANSWERED", "Door", "Ended", "Guard", "Peer", "host_of"]

_CODES = {
    "fenced": grpc.StatusCode.ABORTED,
    "unknown": grpc.StatusCode.NOT_FOUND,
    "other": grpc.StatusCode.FAILED_PRECONDITION,
    "limits": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "late": grpc.StatusCode.DEADLINE_EXCEEDED,
    "invalid": grpc.StatusCode.INVALID_ARGUMENT,
}
_MOST_PEERS = 20_000
_MOST_WORDS = 1_000
_MOST_WAITING = 4_096
_ENDED_PER_SECOND = 200.0
"""Of those that wait, one after another: who came together would else be ended together, and come again so."""
_MOST_BYTES = {
    "Beat": MOST_BEAT_BYTES,
    "Join": MOST_BEAT_BYTES,
    "Leave": MOST_BEAT_BYTES,
    "SetConfig": MOST_BEAT_BYTES,
    "ReportPairs": MOST_MESSAGE_BYTES,  # which is JSON
}
"""The most bytes that a message of these methods may have."""
_MOST_OTHER_BYTES = 16 << 10
"""The most bytes that a message of any other method may have that wants the token."""
_MOST_PROBE_BYTES = 256
"""The most bytes that a message of a method may have that wants no token."""
_MOST_READING = 16
"""Messages that are being read at once, of which each may have the most bytes that there may be; and as many of probes,
which anybody may make: those must keep no agent waiting."""
_READ_SECONDS = 10.0
_IPV6_BITS = 64
"""Of an address, which one host may have all the rest of."""

if TYPE_CHECKING:
    Peer = grpc.aio.ServicerContext[Any, Any]
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    Peer = grpc.aio.ServicerContext
    _Interceptor = grpc.aio.ServerInterceptor
"""Who calls, as gRPC gives it to a method."""

ANSWERED = (Refused, ConfigError, ValueError, Late, StoreError)
"""What may come of a call and is told to who has made it; anything else is a fault of the master."""


class Ended(Exception):
    """A call is over, with a status and words for who has made it.

    It is raised, and said to gRPC in one place, since what gRPC raises to end a call holds itself alive: of those who
    have no token that would be kilobytes for each call, until somebody looks for garbage.
    """

    def __init__(self, code: grpc.StatusCode, words: str) -> None:
        super().__init__(words)
        self.code = code
        self.words = words


class Guard:
    """One master's. ``refusals`` counts what was refused, by reason.

    A connection may make so many calls, and a host so many connections: else one that makes a connection for each call
    would have no bound. All nodes that a master takes may come at once through one address, as they do when it is
    started again, and few of them come anew later on. Who makes more of them is told so after a second, and so is
    who calls without the token, again and again: most who are answered at once come again at once.
    """

    def __init__(
        self,
        token: str | None,
        clock: Callable[[], float],
        *,
        per_second: float = 50.0,
        at_once: float = 200.0,
        new_per_second: float = 20.0,
        new_at_once: float = 10_240.0,
        wait_seconds: float = 1.0,
    ) -> None:
        self._credentials = None if token is None else f"Bearer {token}".encode()
        self._clock = clock
        self._allowances = Allowances(per_second=per_second, at_once=at_once, most_peers=_MOST_PEERS)
        self._newcomers = Allowances(per_second=new_per_second, at_once=new_at_once, most_peers=_MOST_PEERS)
        self._strangers = Allowances(per_second=new_per_second, at_once=at_once, most_peers=_MOST_PEERS)
        self._probes = Allowances(per_second=per_second, at_once=at_once, most_peers=_MOST_PEERS)
        self._wait_seconds = wait_seconds
        self._num_waiting = 0
        self._ending = asyncio.Lock()
        self.refusals: Counter[str] = Counter()

    async def admit(self, peer: Peer) -> None:
        """Let the call be, or end it: Ended."""
        now, name = self._clock(), peer.peer()
        if self._credentials is not None and not self._is_theirs(peer):
            if not self._strangers.take(now, host_of(name)):
                await self._have_wait()
            self._end(grpc.StatusCode.UNAUTHENTICATED, "unauthenticated", _NO_TOKEN)
        if name not in self._allowances and not self._newcomers.take(now, host_of(name)):
            await self._have_wait()
            self._end(grpc.StatusCode.RESOURCE_EXHAUSTED, "newcomers", _TOO_MANY_NEW)
        if not self._allowances.take(now, name):
            self._end(grpc.StatusCode.RESOURCE_EXHAUSTED, "rate", _TOO_MANY)

    async def admit_probe(self, peer: Peer) -> None:
        """Let a call be that needs no token, or end it: Ended."""
        if not self._probes.take(self._clock(), peer.peer()):
            await self._have_wait()
            self._end(grpc.StatusCode.RESOURCE_EXHAUSTED, "rate", _TOO_MANY)

    def refuse(self, error: Exception) -> NoReturn:
        """End a call by what went wrong with it, in words."""
        words = on_one_line(str(error))[:_MOST_WORDS]
        if isinstance(error, Refused):
            self._end(_CODES[error.kind], error.kind, words)
        elif isinstance(error, (ConfigError, ValueError)):
            self._end(grpc.StatusCode.INVALID_ARGUMENT, "invalid", words)
        elif isinstance(error, Late):
            self._end(grpc.StatusCode.FAILED_PRECONDITION, "late", words)
        elif isinstance(error, StoreError):
            self._end(grpc.StatusCode.UNAVAILABLE, "store", f"nothing was changed: {words}")
        raise error

    async def _have_wait(self) -> None:
        """Let some time go by, where not too many wait already."""
        if self._num_waiting >= _MOST_WAITING:
            return
        self._num_waiting += 1
        try:
            await asyncio.sleep(self._wait_seconds)
            async with self._ending:
                await asyncio.sleep(1 / _ENDED_PER_SECOND)
        finally:
            self._num_waiting -= 1

    def _is_theirs(self, peer: Peer) -> bool:
        """Whether the caller has the token; how long that takes does not depend on how much of it is right."""
        assert self._credentials is not None
        metadata = peer.invocation_metadata() or ()
        given = [value for key, value in metadata if key == "authorization"]
        found = given[0] if len(given) == 1 else ""
        return hmac.compare_digest(found if isinstance(found, bytes) else found.encode(), self._credentials)

    def _end(self, code: grpc.StatusCode, reason: str, words: str) -> NoReturn:
        self.refusals[reason] += 1
        raise Ended(code, words) from None


class Door(_Interceptor):
    """Of a server: each call goes by the guard before any of its message is read, and messages are small and few.

    To gRPC all calls are such as send a stream of messages, of which it reads none until asked. So what a caller
    without the token has sent stays in the window of its connection, and is neither put together nor parsed.
    """

    def __init__(self, guard: Guard, *, open_service: str, read_seconds: float = _READ_SECONDS) -> None:
        """The methods of ``open_service`` want no token."""
        self._guard = guard
        self._open = f"/{open_service}/"
        self._read_seconds = read_seconds
        self._reading = asyncio.Semaphore(_MOST_READING)
        self._reading_probes = asyncio.Semaphore(_MOST_READING)
        self._handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """How a call is answered."""
        method = handler_call_details.method
        found = self._handlers.get(method)
        if found is None:
            handler = await continuation(handler_call_details)
            if handler is None:  # there is no such method, which is nothing to keep
                return grpc.stream_unary_rpc_method_handler(self._no_such)
            found = self._handlers[method] = self._guarded(handler, method)
        return found

    def _guarded(self, handler: Any, method: str) -> grpc.RpcMethodHandler[Any, Any]:
        is_open = method.startswith(self._open)
        admit = self._guard.admit_probe if is_open else self._guard.admit
        name = method.rpartition("/")[2]
        most_bytes = _MOST_PROBE_BYTES if is_open else _MOST_BYTES.get(name, _MOST_OTHER_BYTES)
        parse: Callable[[bytes], Any] = handler.request_deserializer or bytes
        reading = self._reading_probes if is_open else self._reading

        async def message_of(peer: Peer) -> Any:
            if is_open and reading.locked():  # by those who send nothing, perhaps: an empty message asks for the server
                return parse(b"")
            return await self._message(peer, name, most_bytes, parse, reading)

        async def answer(_: object, peer: Peer) -> Any:
            with _ending(peer):
                await admit(peer)
                return await handler.unary_unary(await message_of(peer), peer)

        async def answers(_: object, peer: Peer) -> AsyncIterator[Any]:
            with _ending(peer):
                await admit(peer)
                message = await message_of(peer)
                async with contextlib.aclosing(handler.unary_stream(message, peer)) as found:
                    async for each in found:
                        yield each

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(answers, response_serializer=handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(answer, response_serializer=handler.response_serializer)

    async def _message(
        self, peer: Peer, name: str, most_bytes: int, parse: Callable[[bytes], Any], reading: asyncio.Semaphore
    ) -> Any:
        """The one message of a call."""
        async with reading:
            try:
                data = await asyncio.wait_for(peer.read(), self._read_seconds)
            except asyncio.TimeoutError:
                words = f"the message of {name} has not come within {self._read_seconds:g} seconds"
                self._guard.refuse(Refused("late", words))
        if not isinstance(data, bytes):
            self._guard.refuse(Refused("invalid", f"{name} was called without a message"))
        if len(data) > most_bytes:
            words = f"the message of {name} has {len(data)} bytes; allowed: {most_bytes}"
            self._guard.refuse(Refused("limits", words))
        try:
            return parse(data)
        except DecodeError:
            self._guard.refuse(Refused("invalid", f"this is no message of {name}"))

    async def _no_such(self, _: object, peer: Peer) -> None:
        with _ending(peer):
            await self._guard.admit(peer)
            raise Ended(grpc.StatusCode.UNIMPLEMENTED, "this master has no such method")


@contextlib.contextmanager
def _ending(peer: Peer) -> Iterator[None]:
    """Where a call that is over is said to be."""
    try:
        yield
    except Ended as error:
        peer.set_code(error.code)
        peer.set_details(error.words)


def host_of(peer: str) -> str:
    """Where a connection comes from: ``ipv4:10.0.0.7:4711`` without its port, and of IPv6 the network of the host."""
    kind, _, rest = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return kind
    address = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    if kind == "ipv4":
        return address
    try:
        found = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    return str(found.ipv4_mapped or ipaddress.IPv6Network((int(found), _IPV6_BITS), strict=False))


_TOO_MANY = "too many calls: wait a while"
_NO_TOKEN = "this master wants its token, and this is not it: look at --token-file"
_TOO_MANY_NEW = "too many new connections come from this host: wait a while, and make all calls by one connection"
