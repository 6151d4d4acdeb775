"""The process of a master from start to end: its parts put together, the thread on which its tuner computes, and the
return of freed memory to the system.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import grpc

from elastic_ext.errors import ElasticError, in_words
from elastic_ext.ranks.deadlines import OwnedThread
from elastic_ext.records.files import write_whole
from elastic_ext.version import VERSION

from .address import MOST_MESSAGE_BYTES
from .arguments import MasterOptions
from .credentials import read_token
from .job import Job, JobSettings
from .metrics import MOST_RANKS, MetricsServer, exposition
from .service import HEALTH_SERVICE, Guard, GuardInterceptor, Health, MasterService, moment
from .status import job_status
from .store import JobStore, StoreError, Superseded
from .tuning import TunerFactory
from .wire import master_pb2 as wire
from .wire.master_pb2_grpc import add_MasterServicer_to_server

__all__ = ["MasterNotStarted", "MemoryTrimmer", "TunerThread", "serve"]

_logger = logging.getLogger(__name__)


# --- the thread on which a master has its tuner plan, so that those who call meanwhile are answered ------------------
# It does one piece of work after another; results are called on the event loop, as all else of a master.

_Work = Callable[[], Callable[[], None]]
_CLOSE_SECONDS = 2.0


class TunerThread:
    """The thread on which a master's tuner computes, so that the event loop can go on answering calls.

    It starts with the first work. All its methods are called on the thread of the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._works: SimpleQueue[_Work | None] = SimpleQueue()
        # A daemon: a computation that never ends is no reason for its master not to.
        self._thread = OwnedThread(self._work, name="elastic_ext tuner", wake=partial(self._works.put, None))
        self.answered = asyncio.Event()
        """Set as each result is called on the loop; who waits for it clears it."""

    def run(self, work: _Work) -> None:
        """Do ``work``, which raises nothing, on the thread, and call its result on the event loop; not once closed."""
        if self._thread.stopping.is_set():
            return
        if not self._thread.is_started:
            self._thread.start()
        self._works.put(work)

    def end(self) -> None:
        """Begin no more work, and call no more results."""
        self._thread.stop()

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Wait up to ``seconds`` for work that is under way; if it takes longer, it is left behind."""
        if not self._thread.close(seconds):
            _logger.warning("the tuner has not finished planning within %g s, and the master ends without it", seconds)

    def _work(self) -> None:
        while (work := self._works.get()) is not None and not self._thread.stopping.is_set():
            then = work()
            if self._thread.stopping.is_set():
                return
            try:
                self._loop.call_soon_threadsafe(self._hear, then)
            except RuntimeError:  # the loop was closed meanwhile
                return

    def _hear(self, then: Callable[[], None]) -> None:
        if not self._thread.stopping.is_set():
            then()
            self.answered.set()


# --- memory that was freed, returned to the system: where thousands of connections come and go, malloc keeps it ------

_EVERY_SECONDS = 10.0
_Trim = Callable[[int], int]


class MemoryTrimmer:
    """Returns memory that this process has freed to the system (glibc's malloc_trim), at most every few seconds."""

    def __init__(self, *, every_seconds: float = _EVERY_SECONDS) -> None:
        self._every_seconds = every_seconds
        self._due_at = 0.0
        self._trim = _trim_of_libc()

    def trim(self, now: float) -> None:
        """Return freed memory if the last time is some seconds before ``now``; does nothing without glibc.

        It takes a few milliseconds, and may be called as often as one likes.
        """
        if self._trim is not None and now >= self._due_at:
            self._due_at = now + self._every_seconds
            self._trim(0)


def _trim_of_libc() -> _Trim | None:
    """glibc's malloc_trim; None with another C library."""
    try:
        found = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = [ctypes.c_size_t], ctypes.c_int
    return found


# --- a master from its start to its end: what is put together, and what is due every second --------------------------

_TICK_SECONDS = 1.0
_GRACE_SECONDS = 1.0
_MOST_CALLS = 32_768
"""The most calls at once, streams among them: one or two for each agent."""
_MOST_PENDING = 4_096
"""The most calls that wait to be looked at, which anybody may make: each holds some ten kilobytes, and what came with
it. An agent whose call is one too many, as where ten thousand come back at once, calls again a while later."""
_MOST_METADATA_BYTES = 8 << 10
"""The most metadata of a call: the longest token, and as much again."""
_MOST_CONNECTIONS = 12_288
"""The most connections, for all nodes that there may be and others; each holds some fifteen kilobytes."""
_OPTIONS = (
    ("grpc.so_reuseport", 0),  # else two masters could listen at one port, and each would have half of the agents
    ("grpc.max_receive_message_length", MOST_MESSAGE_BYTES),
    ("grpc.max_metadata_size", _MOST_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", _MOST_METADATA_BYTES),
    ("grpc.server.max_pending_requests", _MOST_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", _MOST_PENDING),
    ("grpc.max_concurrent_streams", 16),  # of one connection, of which an agent needs two
    ("grpc.max_allowed_incoming_connections", _MOST_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", 10_000),  # of one that says nothing
    ("grpc.max_connection_idle_ms", 150_000),  # of one without calls; an agent's has a Watch
    ("grpc.http2.lookahead_bytes", 8 << 10),  # of a message that nobody reads yet
    # What a connection holds, which thousands of them hold: no tables of headers (time limits, which come with each
    # call, are never the same and fill them), nothing for tools that look into gRPC, no measuring of the network, and
    # a buffer to read into that stays as small as buffers are.
    ("grpc.http2.hpack_table_size.decoder", 0),
    ("grpc.http2.hpack_table_size.encoder", 0),
    ("grpc.enable_channelz", 0),
    ("grpc.max_channel_trace_event_memory_per_node", 0),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.experimental.tcp_max_read_chunk_size", 4096),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)


class MasterNotStarted(ElasticError):
    """A master could not be started as asked."""


async def serve(options: MasterOptions, has_to_end: asyncio.Event, *, tuner: TunerFactory | None = None) -> None:
    """Run a master until ``has_to_end`` is set; ``tuner`` makes its tuner, by default the library's.

    Raises MasterNotStarted where it cannot be started as asked, Superseded once another process is the job's master.
    """
    token = _token_of(options)
    with ThreadPoolExecutor(1, thread_name_prefix="elastic_ext store") as executor:
        loop = asyncio.get_running_loop()
        try:
            store = await loop.run_in_executor(executor, JobStore, options.state_dir)
        except StoreError as error:
            raise MasterNotStarted(str(error)) from error
        planning = TunerThread(loop)
        try:
            await _serve(options, store, executor, token, has_to_end, tuner, planning)
        finally:
            await loop.run_in_executor(executor, store.close)
            planning.close()


async def _serve(
    options: MasterOptions,
    store: JobStore,
    executor: Executor,
    token: str | None,
    has_to_end: asyncio.Event,
    tuner: TunerFactory | None,
    planning: TunerThread,
) -> None:
    loop = asyncio.get_running_loop()
    try:
        stored = await loop.run_in_executor(executor, store.read)
        if options.job and not stored.job:
            await loop.run_in_executor(executor, lambda: store.keep(job=options.job))
            stored = await loop.run_in_executor(executor, store.read)
    except StoreError as error:
        raise MasterNotStarted(str(error)) from error
    if options.job and options.job != stored.job:
        raise MasterNotStarted(
            f"{options.state_dir} is of job {stored.job!r}, and --job is {options.job!r}; give each job a folder"
        )
    settings = JobSettings(
        library=VERSION,
        lease_seconds=options.lease_seconds,
        beat_seconds=options.beat_seconds,
        acknowledge_seconds=options.acknowledge_seconds,
        refuses_bad_nodes=options.refuse_bad_nodes,
        tuning=options.tuning,
    )
    job = Job(stored, settings, moment(), tuner=tuner, run=planning.run)
    guard = Guard(token, loop.time)
    service = MasterService(job, store, executor, guard)
    health = Health()
    async with _listening(options, service, health, guard) as port, _metrics(options, job, service, guard, token):
        job.event_log.tell(moment().time, "master", f"the master of epoch {job.epoch} listens at {options.bind}:{port}")
        _write_port(options.port_file, port)
        _logger.info("master of job %r (epoch %d) listens at %s:%d", job.name or "?", job.epoch, options.bind, port)
        if options.warning:
            _logger.warning("%s", options.warning)
        async with _writing_decisions(service, planning):
            await _keep_going(job, service, store, executor, has_to_end)
        planning.end()
        job.event_log.tell(moment().time, "master", "the master ends")
        service.end_streams()
        health.end()
        await _keep(job, service, store, executor)  # followers hear the end while they are still connected
    await _keep(job, service, store, executor)  # what came in calls that were answered until the server had stopped


@contextlib.asynccontextmanager
async def _listening(
    options: MasterOptions, service: MasterService, health: Health, guard: Guard
) -> AsyncIterator[int]:
    """Run the gRPC server within the context, which gives the port that it listens at."""
    interceptor = GuardInterceptor(guard, open_service=HEALTH_SERVICE)
    server = grpc.aio.server(interceptors=(interceptor,), options=_OPTIONS, maximum_concurrent_rpcs=_MOST_CALLS)
    add_MasterServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    server.add_generic_rpc_handlers((health.handler,))
    host = f"[{options.bind}]" if ":" in options.bind else options.bind
    try:
        if options.tls_cert is None or options.tls_key is None:
            port = server.add_insecure_port(f"{host}:{options.port}")
        else:
            pair = (options.tls_key.read_bytes(), options.tls_cert.read_bytes())
            port = server.add_secure_port(f"{host}:{options.port}", grpc.ssl_server_credentials([pair]))
    except OSError as error:
        raise MasterNotStarted(f"the certificate or its key cannot be read: {in_words(error)}") from error
    except RuntimeError:
        port = 0
    if port == 0:
        raise MasterNotStarted(
            f"{host}:{options.port} cannot be listened at: it is taken, is no address of this machine, or the "
            "certificate and its key do not go together; --port 0 takes any port that is free"
        )
    await server.start()
    try:
        yield port
    finally:
        await server.stop(_GRACE_SECONDS)


@contextlib.asynccontextmanager
async def _metrics(
    options: MasterOptions, job: Job, service: MasterService, guard: Guard, token: str | None
) -> AsyncIterator[None]:
    """Run the server of metrics for Prometheus within the context, if the options name a port for it."""
    if options.metrics_port is None:
        yield
        return

    def render() -> str:
        status = job_status(job, moment(), wire.GetStatusRequest(), ranks_below=MOST_RANKS)
        counts = {**service.counts, "events": job.event_log.number}
        return exposition(status, counts, guard.refusals, num_ranks=job.collector.num_ranks)

    tls = None
    server = MetricsServer(render, token=token)
    try:
        if options.tls_cert is not None and options.tls_key is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(options.tls_cert, options.tls_key)
        port = await server.start(options.bind, options.metrics_port, tls=tls)
    except OSError as error:
        raise MasterNotStarted(
            f"{options.bind}:{options.metrics_port} cannot be listened at for Prometheus: {in_words(error)}; "
            "--metrics-port 0 takes any port that is free"
        ) from error
    _logger.info("Prometheus is answered at %s:%d/metrics", options.bind, port)
    try:
        yield
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def _writing_decisions(service: MasterService, planning: TunerThread) -> AsyncIterator[None]:
    """Within the context, write the tuner's decisions as soon as there are any; its end waits for a write under way."""
    is_over = False

    async def write() -> None:
        while not is_over:
            planning.answered.clear()
            await service.write_due_decisions()
            await planning.answered.wait()

    task = asyncio.ensure_future(write())
    try:
        yield
    finally:
        is_over = True
        planning.answered.set()
        await task


async def _keep_going(
    job: Job, service: MasterService, store: JobStore, executor: Executor, has_to_end: asyncio.Event
) -> None:
    """Do what is due every second (leases, tuner, store, freed memory) until the master ends."""
    trimmer = MemoryTrimmer()
    while not has_to_end.is_set():
        trimmer.trim(asyncio.get_running_loop().time())
        job.tick(moment())
        await service.write_due_decisions()
        await _keep(job, service, store, executor)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(has_to_end.wait(), _TICK_SECONDS)


async def _keep(job: Job, service: MasterService, store: JobStore, executor: Executor) -> None:
    """Store what is new in the job, and tell followers of new events; raises Superseded.

    What cannot be stored now is stored with what comes next, and followers are told of it all the same.
    """
    number, unsaved = job.event_log.number, job.take_unsaved()
    try:
        await asyncio.get_running_loop().run_in_executor(
            executor,
            lambda: store.keep(
                events=unsaved.events,
                nodes=unsaved.nodes,
                forgotten=unsaved.forgotten,
                membership=unsaved.membership,
                job=unsaved.job,
                pairs=unsaved.pairs,
                points=unsaved.points,
                decisions=unsaved.decisions,
                heard=unsaved.heard,
            ),
        )
    except Superseded:
        raise
    except StoreError as error:
        job.give_back(unsaved)
        if job.trouble != str(error):
            _logger.warning(
                "events, metrics and decisions are kept in memory alone until they can be stored: %s", error
            )
        job.trouble = str(error)
    else:
        job.trouble = ""
    if number > job.event_log.settled:
        job.event_log.settle(number)
        service.tell_followers()


def _token_of(options: MasterOptions) -> str | None:
    try:
        return None if options.token_file is None else read_token(options.token_file)
    except ValueError as error:
        raise MasterNotStarted(str(error)) from None


def _write_port(file: Path | None, port: int) -> None:
    if file is None:
        return
    try:
        write_whole(file, f"{port}\n".encode(), durable=False)
    except OSError as error:
        raise MasterNotStarted(f"the port cannot be written: {in_words(error)}; look at --port-file") from error
