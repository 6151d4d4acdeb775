"""The master's gRPC service: its calls, who may make them and how often, and the health service."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError

from elastic_ext.errors import ConfigError
from elastic_ext.records.text import on_one_line

from .address import MOST_BEAT_BYTES, MOST_MESSAGE_BYTES
from .configs import AuthoredVersion, ConfigStreams, StaleVersion, Unacknowledged
from .job import Job, Now
from .nodes import RequestRefused
from .status import StatusCache, config_history, event_message, job_status, newest_events, tuning_report
from .store import JobStore, StoreError
from .wire import master_pb2 as wire
from .wire.master_pb2_grpc import MasterServicer

__all__ = [
    "ANSWERED_ERRORS",
    "HEALTH_SERVICE",
    "Allowances",
    "CallEnded",
    "Guard",
    "GuardInterceptor",
    "Health",
    "MasterService",
    "Peer",
    "host_of",
    "moment",
]


# --- how many calls one peer may make in a while ---------------------------------------------------------------------


class Allowances:
    """A rate limit for each peer: ``at_once`` calls at once, and ``per_second`` in the long run.

    Beyond ``most_peers`` the peers heard of longest ago are forgotten: they begin anew, as any new peer.
    """

    def __init__(self, *, per_second: float, at_once: float, most_peers: int) -> None:
        self._per_second, self._at_once, self._most_peers = per_second, at_once, most_peers
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # peer -> how many more, as of when

    def __len__(self) -> int:
        return len(self._left)

    def __contains__(self, peer: str) -> bool:
        return peer in self._left

    def take(self, now: float, peer: str) -> bool:
        """Whether this peer may make a call now, which is counted if so."""
        left, since = self._left.pop(peer, (self._at_once, now))
        left = min(self._at_once, left + (now - since) * self._per_second)
        may = left >= 1
        self._left[peer] = (left - 1 if may else left), now
        if len(self._left) > self._most_peers:
            self._left.popitem(last=False)
        return may


# --- who may call, and how often -------------------------------------------------------------------------------------
# Guard: who may call a master, and how often; GuardInterceptor: has every call admitted by the guard, before any of its
# message is read. Calls that are not admitted are answered with a status and a sentence.

_CODES = {
    "fenced": grpc.StatusCode.ABORTED,
    "unknown": grpc.StatusCode.NOT_FOUND,
    "other": grpc.StatusCode.FAILED_PRECONDITION,
    "limits": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "late": grpc.StatusCode.DEADLINE_EXCEEDED,
    "invalid": grpc.StatusCode.INVALID_ARGUMENT,
}
_MOST_PEERS = 20_000
_MOST_CHARACTERS = 1_000
_MOST_WAITING = 1_024
_ENDED_PER_SECOND = 200.0
"""How many refused calls that wait are ended per second: callers that came together do not come again together."""
_MOST_BYTES = {
    "Beat": MOST_BEAT_BYTES,
    "Join": MOST_BEAT_BYTES,
    "Leave": MOST_BEAT_BYTES,
    "SetConfig": MOST_BEAT_BYTES,
    "ReportPairs": MOST_MESSAGE_BYTES,  # which is JSON
}
"""The most bytes that a message of these methods may have."""
_MOST_OTHER_BYTES = 16 << 10
"""The most bytes that a message of any other method with a token may have."""
_MOST_PROBE_BYTES = 256
"""The most bytes that a message of a method without a token may have."""
_MOST_READING = 16
"""How many messages are read at once, each of which may be of the largest size; and as many of health probes, which
anybody may make and which must not keep agents waiting."""
_READ_SECONDS = 10.0
_IPV6_BITS = 64
"""How many bits of an IPv6 address stand for a host, which may have all addresses with these bits."""

if TYPE_CHECKING:
    Peer = grpc.aio.ServicerContext[Any, Any]
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    Peer = grpc.aio.ServicerContext
    _Interceptor = grpc.aio.ServerInterceptor
"""The caller of a method, as gRPC's context of the call."""

ANSWERED_ERRORS = (RequestRefused, ConfigError, ValueError, StoreError)
"""The exceptions of a call that are answered to its caller; any other one is a fault of the master."""


class CallEnded(Exception):
    """A call ends with a gRPC status and words for its caller.

    It is raised, and told to gRPC in one place, since the exception that gRPC raises to end a call refers to itself:
    each call without a token would leave kilobytes until garbage is collected.
    """

    def __init__(self, code: grpc.StatusCode, words: str) -> None:
        super().__init__(words)
        self.code = code
        self.words = words


class Guard:
    """Admits calls to a master by their token and their rate; ``refusals`` counts what was refused, by reason.

    Calls are limited for each connection, and new connections for each host, which could else make a connection for
    each call. All nodes that a master takes may come at once through one address, as when the master is started again;
    later few of them connect anew. A host with too many new connections, or calls without the token, is refused only
    after ``wait_seconds``: most callers that are answered at once call again at once.
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
        # Calls by connection are limited above; new connections by host, calls without the token by host, and calls of
        # methods that need no token by connection, here.
        self._newcomers = Allowances(per_second=new_per_second, at_once=new_at_once, most_peers=_MOST_PEERS)
        self._strangers = Allowances(per_second=new_per_second, at_once=at_once, most_peers=_MOST_PEERS)
        self._probes = Allowances(per_second=per_second, at_once=at_once, most_peers=_MOST_PEERS)
        self._wait_seconds = wait_seconds
        self._num_waiting = 0
        self._ending = asyncio.Lock()
        self.refusals: Counter[str] = Counter()

    async def admit(self, peer: Peer) -> None:
        """Admit a call, or raise CallEnded."""
        now, name = self._clock(), peer.peer()
        if self._credentials is not None and not self._has_token(peer):
            if not self._strangers.take(now, host_of(name)):
                await self._have_wait()
            self._end(grpc.StatusCode.UNAUTHENTICATED, "unauthenticated", _NO_TOKEN)
        if name not in self._allowances and not self._newcomers.take(now, host_of(name)):
            await self._have_wait()
            self._end(grpc.StatusCode.RESOURCE_EXHAUSTED, "newcomers", _TOO_MANY_NEW)
        if not self._allowances.take(now, name):
            self._end(grpc.StatusCode.RESOURCE_EXHAUSTED, "rate", _TOO_MANY)

    async def admit_probe(self, peer: Peer) -> None:
        """Admit a call that needs no token, or raise CallEnded."""
        if not self._probes.take(self._clock(), peer.peer()):
            await self._have_wait()
            self._end(grpc.StatusCode.RESOURCE_EXHAUSTED, "rate", _TOO_MANY)

    def refuse(self, error: Exception) -> NoReturn:
        """Raise CallEnded with the status and the words for ``error``; any other error is raised as it is."""
        words = on_one_line(str(error))[:_MOST_CHARACTERS]
        if isinstance(error, RequestRefused):
            self._end(_CODES[error.kind], error.kind, words)
        elif isinstance(error, (ConfigError, ValueError)):
            self._end(grpc.StatusCode.INVALID_ARGUMENT, "invalid", words)
        elif isinstance(error, StoreError):
            self._end(grpc.StatusCode.UNAVAILABLE, "store", f"nothing was changed: {words}")
        raise error

    async def _have_wait(self) -> None:
        """Delay the refusal of a call, unless too many calls wait already."""
        if self._num_waiting >= _MOST_WAITING:
            return
        self._num_waiting += 1
        try:
            await asyncio.sleep(self._wait_seconds)
            async with self._ending:
                await asyncio.sleep(1 / _ENDED_PER_SECOND)
        finally:
            self._num_waiting -= 1

    def _has_token(self, peer: Peer) -> bool:
        """Whether the caller has the token; how long that takes does not depend on how much of it is right."""
        assert self._credentials is not None
        metadata = peer.invocation_metadata() or ()
        given = [value for key, value in metadata if key == "authorization"]
        found = given[0] if len(given) == 1 else ""
        return hmac.compare_digest(found if isinstance(found, bytes) else found.encode(), self._credentials)

    def _end(self, code: grpc.StatusCode, reason: str, words: str) -> NoReturn:
        self.refusals[reason] += 1
        raise CallEnded(code, words) from None


class GuardInterceptor(_Interceptor):
    """The server's interceptor: it has the guard admit each call before the message is read, and limits message sizes.

    To gRPC all methods take a stream of messages, of which it reads none until asked. So what a caller without the
    token has sent stays in the flow-control window of its connection, and is neither assembled nor parsed.
    """

    def __init__(self, guard: Guard, *, open_service: str, read_seconds: float = _READ_SECONDS) -> None:
        """``guard`` admits calls; the methods of ``open_service`` need no token."""
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
        """The handler of a call's method, behind the guard."""
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
            if is_open and reading.locked():
                # As many probes are read as may be, perhaps of callers who send nothing. This one is answered unread,
                # like an empty message, which asks whether the whole server serves.
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
        """Read the one message of a call; CallEnded where it is late, too large or no such message."""
        async with reading:
            try:
                data = await asyncio.wait_for(peer.read(), self._read_seconds)
            except asyncio.TimeoutError:
                words = f"the message of {name} has not come within {self._read_seconds:g} seconds"
                self._guard.refuse(RequestRefused("late", words))
        if not isinstance(data, bytes):
            self._guard.refuse(RequestRefused("invalid", f"{name} was called without a message"))
        if len(data) > most_bytes:
            words = f"the message of {name} has {len(data)} bytes; allowed: {most_bytes}"
            self._guard.refuse(RequestRefused("invalid", words))  # not "limits": it would be too large again
        try:
            return parse(data)
        except DecodeError:
            self._guard.refuse(RequestRefused("invalid", f"this is no message of {name}"))

    async def _no_such(self, _: object, peer: Peer) -> None:
        with _ending(peer):
            await self._guard.admit(peer)
            raise CallEnded(grpc.StatusCode.UNIMPLEMENTED, "this master has no such method")


@contextlib.contextmanager
def _ending(peer: Peer) -> Iterator[None]:
    """Tell gRPC the status and the words of a CallEnded that is raised within."""
    try:
        yield
    except CallEnded as error:
        peer.set_code(error.code)
        peer.set_details(error.words)


def host_of(peer: str) -> str:
    """The host of a gRPC peer such as ``ipv4:10.0.0.7:4711``: the address without port, of IPv6 its /64 network."""
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
_NO_TOKEN = "this master asks for its token, and this call has none or another one: look at --token-file"
_TOO_MANY_NEW = "too many new connections come from this host: wait a while, and make all calls by one connection"


# --- what the master answers over gRPC -------------------------------------------------------------------------------
# What it knows, and what follows from it, is in job.py.
#
# All of it runs on one event loop, and calls that change the config follow one another: what they write is on disk
# before anybody hears of it.

_MOST_FOLLOWERS = 64
_MOST_CHANGES = 1_000
_MOST_GENERATED = 8
"""How many decisions of the tuner are written one after another; a refused one may call for the next."""
_Result = TypeVar("_Result")


def moment() -> Now:
    """The present time, by the monotonic clock and in seconds since 1970."""
    return Now(clock=time.monotonic(), time=time.time())


class _StatusOf:
    """The source of a job's status for ``StatusCache``."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def status(self, request: wire.GetStatusRequest) -> wire.JobStatus:
        return job_status(self._job, moment(), request)

    def events(self, num: int) -> Sequence[wire.JobEvent]:
        return newest_events(self._job, num)


class MasterService(MasterServicer):
    """The gRPC service Master: its methods have the names of master.proto, and call ``Job`` and the store."""

    def __init__(self, job: Job, store: JobStore, executor: Executor, guard: Guard) -> None:
        """``executor`` has the one thread on which ``store`` is called."""
        self._job = job
        self._store = store
        self._executor = executor
        self._guard = guard
        self._config_streams = ConfigStreams(job.settings.acknowledge_seconds)
        self._writing = asyncio.Lock()
        self._news = asyncio.Event()  # set, and another one put in its place, as events come
        self._status_cache = StatusCache(_StatusOf(job), time.monotonic)
        self._pushed = wire.ConfigPush()
        self._num_followers = 0
        self.counts: Counter[str] = Counter()
        """How many calls and pushes of each kind were answered."""

    # ---- agents ----

    async def Join(self, request: wire.JoinRequest, peer: Peer) -> wire.JoinReply:
        try:
            reply = self._job.join(moment(), request)
        except ANSWERED_ERRORS as error:
            self._guard.refuse(error)
        self.counts["joins"] += 1
        return reply

    async def Beat(self, request: wire.BeatRequest, peer: Peer) -> wire.BeatReply:
        try:
            reply, authored = self._job.beat(moment(), request)
            if authored is not None:
                await self._take(authored)
                reply.config_version = self._job.book.version
        except ANSWERED_ERRORS as error:
            self._guard.refuse(error)
        self._config_streams.acknowledge(request.node_id, request.held.version)
        self.counts["beats"] += 1
        return reply

    async def Watch(self, request: wire.WatchRequest, peer: Peer) -> AsyncIterator[wire.ConfigPush]:
        node_id = request.node_id
        stream = None
        try:
            self._job.check_watch(moment(), request)
            stream = self._config_streams.begin(node_id, request.config_version)
            while not stream.is_over:
                if stream.take_news(self._job.book.version):
                    yield self._push()
                    self.counts["pushes"] += 1
                else:
                    await stream.rung()
        except Unacknowledged as error:
            self.counts["unacknowledged"] += 1
            self._guard.refuse(RequestRefused("late", str(error)))
        except RequestRefused as error:
            self._guard.refuse(error)
        finally:
            if stream is not None:
                self._config_streams.forget(node_id, stream)

    async def Leave(self, request: wire.LeaveRequest, peer: Peer) -> wire.LeaveReply:
        try:
            self._job.leave(moment(), request)
        except ANSWERED_ERRORS as error:
            self._guard.refuse(error)
        self._config_streams.end(request.node_id)
        return wire.LeaveReply()

    # ---- people ----

    async def GetStatus(self, request: wire.GetStatusRequest, peer: Peer) -> wire.JobStatus:
        return self._status_cache.status(request)

    async def ReadEvents(self, request: wire.ReadEventsRequest, peer: Peer) -> AsyncIterator[wire.JobEvent]:
        if request.follow and self._num_followers >= _MOST_FOLLOWERS:
            self._guard.refuse(RequestRefused("limits", f"{_MOST_FOLLOWERS} other calls follow the events already"))
        self._num_followers += request.follow
        try:
            number, most = request.after, request.most
            while True:
                news = self._news
                for event in self._job.event_log.after(number, most=most, are_settled=request.follow):
                    number = event.number
                    yield event_message(event)
                if not request.follow:
                    return
                most = 0
                await news.wait()
        finally:
            self._num_followers -= request.follow

    async def SetConfig(self, request: wire.SetConfigRequest, peer: Peer) -> wire.ConfigWritten:
        if len(request.changes) + len(request.remove) > _MOST_CHANGES:
            self._guard.refuse(RequestRefused("invalid", f"more than {_MOST_CHANGES} keys are changed at once"))
        return await self._written(lambda: self._job.propose_change(moment(), request), peer)

    async def UndoConfig(self, request: wire.UndoConfigRequest, peer: Peer) -> wire.ConfigWritten:
        return await self._written(lambda: self._job.propose_undo(moment(), request), peer)

    async def GetConfigs(self, request: wire.GetConfigsRequest, peer: Peer) -> wire.ConfigHistory:
        return config_history(self._job.book)

    async def ReportPairs(self, request: wire.ReportPairsRequest, peer: Peer) -> wire.ReportPairsReply:
        try:
            recommendations = self._job.take_pairs(moment(), request)
        except ANSWERED_ERRORS as error:
            self._guard.refuse(error)
        return wire.ReportPairsReply(recommendations=recommendations)

    async def GetMetrics(self, request: wire.GetMetricsRequest, peer: Peer) -> wire.MetricHistory:
        return self._job.collector.history(request.since)

    async def GetTuning(self, request: wire.GetTuningRequest, peer: Peer) -> wire.TuningReport:
        return tuning_report(self._job.tuning, most=request.most)

    async def ControlTuning(self, request: wire.ControlTuningRequest, peer: Peer) -> wire.TuningReport:
        newest = max((each.number for each in self._job.tuning.decisions), default=0)
        try:
            self._job.control_tuning(moment(), request)
            is_answered = asyncio.Event()
            self._job.tuning.after(is_answered.set)
            await is_answered.wait()
            await self.write_due_decisions()
        except ANSWERED_ERRORS as error:
            self._guard.refuse(error)
        return tuning_report(self._job.tuning, after=newest)

    # ---- how ----

    async def write_due_decisions(self) -> None:
        """Store the tuner's decisions that are due as config versions, and tell nodes of them."""
        tuning = self._job.tuning
        if tuning.due is None:
            return
        async with self._writing:
            for _ in range(_MOST_GENERATED):
                decision = self._job.decision_to_write(moment())
                if decision is None:
                    break
                try:
                    authored = self._job.propose_decided(moment(), decision)
                    written = replace(decision, version=authored.config.version)
                    await self._stored(partial(self._store.enter_version, authored, written))
                except (*ANSWERED_ERRORS, StaleVersion) as error:
                    tuning.refuse_due(moment().time, decision.number, f"it could not be written: {error}")
                else:
                    self._enter(authored, decision.number)
                    self.counts["generated"] += 1

    def tell_followers(self) -> None:
        """Wake the calls of ReadEvents that follow, as there are new events that they may hear of."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def end_streams(self) -> None:
        """End all nodes' streams of configs, as the master ends."""
        self._config_streams.end_all()

    def _push(self) -> wire.ConfigPush:
        """The newest config for a stream; the same message for all of them."""
        version, within_seconds = self._job.book.version, self._job.acknowledge_within_seconds
        if (self._pushed.version, self._pushed.acknowledge_within_seconds) != (version, within_seconds):
            text = self._job.book.text
            self._pushed = wire.ConfigPush(
                epoch=self._job.epoch, version=version, text=text, acknowledge_within_seconds=within_seconds
            )
        return self._pushed

    async def _written(self, make: Callable[[], AuthoredVersion], peer: Peer) -> wire.ConfigWritten:
        """Store the config version that ``make`` gives, enter it into the job, and answer with it."""
        try:
            async with self._writing:
                before = self._job.book.newest
                authored = make()
                await self._stored(lambda: self._store.enter_version(authored))
                self._enter(authored)
        except ANSWERED_ERRORS as error:
            self._guard.refuse(error)
        return wire.ConfigWritten(
            version=authored.config.version,
            text=authored.config.to_json(),
            before=before.config.to_json() if before is not None else "",
        )

    async def _take(self, authored: AuthoredVersion) -> None:
        """Store and enter a version from a node's file, unless a newer one has come while others were stored."""
        async with self._writing:
            if authored.config.version > self._job.book.version:
                await self._stored(lambda: self._store.enter_version(authored))
                self._enter(authored)

    def _enter(self, authored: AuthoredVersion, decision: int | None = None) -> None:
        self._job.enter(moment(), authored, decision=decision)
        self._config_streams.tell(authored.config.version)

    async def _stored(self, write: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, write)


# --- the standard health service of gRPC -----------------------------------------------------------------------------
# It is written out here, since its package needs a newer protobuf.
#
# Anybody may ask, without the token: all that is said is whether the master serves.

HEALTH_SERVICE = "grpc.health.v1.Health"
"""The gRPC name of the health service, whose methods need no token."""
_KNOWN = ("", "elastic_ext.v1.Master")
_SERVING, _NOT_SERVING, _UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"  # HealthCheckResponse
_MOST_WATCHING = 64
_FIELD_ONE_TEXT = 0x0A  # protobuf's tag of a text in field 1


class Health:
    """The standard gRPC health service, which says whether this master serves."""

    def __init__(self) -> None:
        self._is_serving = True
        self._has_ended = asyncio.Event()
        self._num_watching = 0

    @property
    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """The gRPC handler of the health service's methods."""
        return grpc.method_handlers_generic_handler(
            HEALTH_SERVICE,
            {
                "Check": grpc.unary_unary_rpc_method_handler(self._check),
                "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
            },
        )

    def end(self) -> None:
        """Answer from now on that the master serves no more."""
        self._is_serving = False
        self._has_ended.set()

    async def _check(self, request: bytes, peer: Peer) -> bytes:
        if _service_in(request) not in _KNOWN:
            raise CallEnded(grpc.StatusCode.NOT_FOUND, f"no such service; there is {_KNOWN[1]}")
        return self._standing

    async def _watch(self, request: bytes, peer: Peer) -> AsyncIterator[bytes]:
        if self._num_watching >= _MOST_WATCHING:
            raise CallEnded(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{_MOST_WATCHING} other calls watch already")
        self._num_watching += 1
        try:
            yield self._standing if _service_in(request) in _KNOWN else _UNKNOWN
            await self._has_ended.wait()
            yield self._standing
        finally:
            self._num_watching -= 1

    @property
    def _standing(self) -> bytes:
        return _SERVING if self._is_serving else _NOT_SERVING


def _service_in(request: bytes) -> str | None:
    """The service that a serialized HealthCheckRequest asks for; None where ``request`` is none."""
    if not request:
        return ""
    size = request[1] if len(request) > 1 else -1
    if request[0] != _FIELD_ONE_TEXT or not 0 <= size < 128 or len(request) != 2 + size:
        return None
    return request[2:].decode(errors="replace")
