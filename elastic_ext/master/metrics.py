"""A master's metrics in Prometheus's text format, and the small HTTP server that serves them."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from google.protobuf.message import Message

from elastic_ext.profile.phases import Phase
from elastic_ext.records.measures import METRICS, Metric
from elastic_ext.records.text import on_one_line

from .wire import logged_of, master_pb2, metrics_of

__all__ = ["CONTENT_TYPE", "MOST_RANKS", "MetricsServer", "exposition"]


# --- what a master knows, as Prometheus reads it: its text format, version 0.0.4 -------------------------------------
# Names and units are those of Prometheus's conventions: seconds, bytes and ratios; ``_total`` is what only grows. The
# values of labels are names (of the job, nodes, hosts, logged numbers), numbers of ranks, and words of a fixed list,
# such as states, phases and reasons of refusals; none is a sentence. The number of series is bounded, however large a
# job is.

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_RANKS = 1024
"""How many ranks have series of their own: those from rank 0 on."""
_MOST_NODES = 4096
_MOST_LABEL = 120
_MOST_COUNTERS = 64
_PREFIX = "elastic_ext"
_PHASES = tuple(phase.label for phase in Phase)
_NODE_STATES = ("live", "late", "lost", "left")
_PRESENT = ("live", "late")
_TUNER_MODES = ("off", "advise", "auto")
_TUNER_RATES: Mapping[str, str] = {
    "best": "The best rate that the tuner has measured so far.",
    "predicted": "The rate that was predicted for the tuner's last decision with a prediction.",
    "measured": "The rate that was measured under that decision, once it is known.",
}
_COUNTERS: Mapping[str, str] = {
    "joins": "Times that agents have joined; one that joins again counts again.",
    "beats": "Beats of nodes that were answered.",
    "pushes": "Configs that the master has sent on the nodes' streams of configs.",
    "generated": "Versions of the config that the tuner has written.",
    "unacknowledged": "Streams of configs that were ended because their node did not acknowledge a config.",
    "events": "Events of the job so far.",
}

Labels = Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """One Prometheus metric, with all of its series."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    samples: Iterable[tuple[Labels, float]]
    is_any_number: bool = False
    """Whether NaN and infinities are shown too; else series with these are left out."""


def exposition(
    status: master_pb2.JobStatus,
    counts: Mapping[str, int] | None = None,
    refusals: Mapping[str, int] | None = None,
    *,
    num_ranks: int | None = None,
    most_ranks: int = MOST_RANKS,
) -> str:
    """The page of a master's metrics in Prometheus's text format.

    ``counts`` is how many calls and pushes the master has answered since it started, by kind; ``refusals`` how many it
    has refused, by reason. The status may come without workers whose ranks are ``most_ranks`` or more; ``num_ranks``
    says how many ranks there are in all.
    """
    families = [
        *_of_master(status, counts or {}, refusals or {}),
        *_of_job(status),
        *_of_nodes(status.nodes[:_MOST_NODES]),
        *_of_ranks(status.nodes, num_ranks, most_ranks),
    ]
    return "".join(line for family in families for line in _lines(family))


# ---- what there is ----


def _of_master(
    status: master_pb2.JobStatus, counts: Mapping[str, int], refusals: Mapping[str, int]
) -> Iterator[_Family]:
    about = {"job": status.job, "job_id": status.job_id, "version": status.library}
    yield _one("master_info", "The job and the library version of this master, as labels.", 1, about)
    yield _one(
        "master_start_time_seconds", "When the master started, in seconds since 1970.", status.time - status.up_seconds
    )
    yield _one("master_uptime_seconds", "How long the master has been up, in seconds.", status.up_seconds)
    yield _one(
        "master_epoch", "The number of the master's process among those that have been this job's master.", status.epoch
    )
    for name, number in list(counts.items())[:_MOST_COUNTERS]:
        text = _COUNTERS.get(name, f"What the master counts as {name}.")
        yield _Family(name=f"master_{name}_total", kind="counter", help=text, samples=[({}, number)])
    yield _Family(
        name="master_refusals_total",
        kind="counter",
        help="Calls that were refused, by reason.",
        samples=[({"reason": reason}, number) for reason, number in list(refusals.items())[:_MOST_COUNTERS]],
    )


def _of_job(status: master_pb2.JobStatus) -> Iterator[_Family]:
    config, progress = status.config, status.progress
    states = [each.state for each in status.nodes]
    yield _Family(
        name="nodes",
        kind="gauge",
        help="Nodes of the job, by whether they are heard of.",
        samples=[({"state": state}, states.count(state)) for state in _NODE_STATES],
    )
    yield _one("config_version", "The newest version of the config.", config.version)
    yield _one("config_nodes", "Nodes that should hold the newest version of the config.", config.num_nodes)
    yield _one(
        "config_nodes_holding",
        "Nodes whose file has the newest version of the config, by its number.",
        config.num_holding,
    )
    yield _one("membership_version", "The version of the job's membership plan.", status.membership.version)
    yield _one("membership_nodes", "Nodes in the job's membership plan.", len(status.membership.nodes))
    yield _one("troubles", "Troubles in the job's status.", len(status.troubles))
    yield _one("recommendations", "Recommendations in the job's status.", len(status.recommendations))
    yield _optional("step", "Steps that have committed since training began.", progress, "step")
    yield from _of_measured([({}, metrics_of(progress))], of_job=True)
    yield _Family(
        name="logged",
        kind="gauge",
        help=METRICS["logged"].help,
        samples=[({"name": name}, value) for name, value in logged_of(progress).items()],
        is_any_number=True,
    )
    shares = [({"phase": phase}, progress.shares[phase]) for phase in _PHASES if phase in progress.shares]
    yield _Family(
        name="phase_ratio", kind="gauge", help="The share of ranks' recent time in each phase.", samples=shares
    )
    if status.verdict.kind:
        kind = {"kind": status.verdict.kind}
        yield _one("verdict", "What holds training up, as a label.", 1, kind)
    yield _optional(
        "verdict_ratio", "The share of the time that goes into what holds training up.", status.verdict, "share"
    )
    yield from _of_tuner(status.tuning)


def _of_tuner(tuning: master_pb2.TuningStatus) -> Iterator[_Family]:
    if not tuning.mode:  # a master without one
        return
    modes = [({"mode": mode}, mode == tuning.mode) for mode in _TUNER_MODES]
    yield _Family(name="tuner_mode", kind="gauge", help="What the tuner may do, as a label.", samples=modes)
    yield _Family(
        name="tuner_decisions_total",
        kind="counter",
        help="Decisions of the tuner.",
        samples=[({}, tuning.num_decisions)],
    )
    for name, text in _TUNER_RATES.items():
        yield _optional(f"tuner_{name}_samples_per_second", text, tuning, name)


def _of_nodes(nodes: Sequence[master_pb2.NodeStatus]) -> Iterator[_Family]:
    labels = [{"node": each.node.node_id, "host": each.node.host} for each in nodes]

    def family(name: str, text: str, values: Iterable[float]) -> _Family:
        return _Family(name=f"node_{name}", kind="gauge", help=text, samples=zip(labels, values, strict=True))

    yield family("up", "Whether the node is live or late, and not lost.", (each.state in _PRESENT for each in nodes))
    yield family("silence_seconds", "How long ago the node was last heard of.", (each.seen_seconds for each in nodes))
    yield family("config_version", "The config version in the node's file.", (each.config_version for each in nodes))
    yield family("troubles", "Troubles of the node.", (len(each.troubles) for each in nodes))


def _of_ranks(nodes: Iterable[master_pb2.NodeStatus], num_ranks: int | None, most_ranks: int) -> Iterator[_Family]:
    ranks = [(each.node.node_id, worker) for each in nodes if each.state in _PRESENT for worker in each.workers]
    ranks.sort(key=lambda each: (each[1].rank, each[0]))
    told = ranks[:most_ranks]
    labels = [{"rank": str(worker.rank), "node": node_id} for node_id, worker in told]
    workers = [worker for _, worker in told]
    num_ranks = len(ranks) if num_ranks is None else num_ranks
    yield _one("ranks", "Ranks of live and late nodes, by their newest reports.", num_ranks)
    yield _one("ranks_left_out", "Ranks of which there are no series, as there are very many.", num_ranks - len(told))
    running = zip(labels, (worker.state == "running" for worker in workers), strict=True)
    yield _Family(name="rank_running", kind="gauge", help="Whether the rank's process runs.", samples=running)
    for name, text, amount, scale in _RANK_GAUGES:
        values = [
            (label, value * scale)
            for label, worker in zip(labels, workers, strict=True)
            if (value := _known(worker, amount)) is not None
        ]
        yield _Family(name=f"rank_{name}", kind="gauge", help=text, samples=values)
    yield from _of_measured(list(zip(labels, map(metrics_of, workers), strict=True)), of_job=False)


def _of_measured(told: Sequence[tuple[Labels, Mapping[str, float]]], *, of_job: bool) -> Iterator[_Family]:
    """The metrics in the table METRICS, of the job or else of each rank; ``told`` has rows of values by labels."""
    families: dict[str, list[tuple[str, Metric]]] = {}
    for name, metric in METRICS.items():
        if metric.prometheus and (metric.over_ranks == "middle") == of_job:
            families.setdefault(metric.full_name, []).append((name, metric))
    for full_name, rows in families.items():
        first = rows[0][1]
        yield _Family(
            name=full_name,
            kind="counter" if first.over_steps == "total" else "gauge",
            help=first.help or first.meaning,
            samples=[
                ({**labels, **metric.labels}, values[name])
                for labels, values in told
                for name, metric in rows
                if name in values
            ],
        )


_RANK_GAUGES: tuple[tuple[str, str, str, float], ...] = (
    ("step", "Steps that have committed on the rank.", "step", 1),
    ("cpu_ratio", "Processors that the rank's process keeps busy.", "cpu_percent", 0.01),
    ("accelerator_busy_ratio", "How busy the rank's accelerator is.", "gpu_percent", 0.01),
    ("config_version", "The config version in force on the rank.", "config_version", 1),
)
"""The gauges of a rank that are not in the table METRICS: name, help, field of a Worker, and factor."""


# ---- as text ----


def _one(name: str, text: str, value: float, labels: Labels | None = None) -> _Family:
    return _Family(name=name, kind="gauge", help=text, samples=[(labels or {}, value)])


def _optional(name: str, text: str, message: Message, field: str) -> _Family:
    value = _known(message, field)
    return _Family(name=name, kind="gauge", help=text, samples=[] if value is None else [({}, value)])


def _known(message: Message, field: str) -> float | None:
    """The value of an optional field; None where it is absent."""
    return float(getattr(message, field)) if message.HasField(field) else None


def _lines(family: _Family) -> Iterator[str]:
    """The lines of a metric; none where it has no series, and of two series with the same labels the first."""
    name = f"{_PREFIX}_{family.name}"
    seen: set[str] = set()
    for labels, value in family.samples:
        series = name + _in_braces(labels)
        if series in seen or not (family.is_any_number or math.isfinite(value)):
            continue
        if not seen:
            yield f"# HELP {name} {_escaped(family.help, quotes=False)}\n# TYPE {name} {family.kind}\n"
        seen.add(series)
        yield f"{series} {_number(value)}\n"


def _in_braces(labels: Labels) -> str:
    if not labels:
        return ""
    parts = [f'{name}="{_escaped(on_one_line(value[:_MOST_LABEL]))}"' for name, value in labels.items()]
    return "{" + ",".join(parts) + "}"


def _escaped(text: str, *, quotes: bool = True) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(float(value))


# --- a small HTTP server for what Prometheus reads, and for probes ---------------------------------------------------
# What it answers with is made by functions that it is given.
#
# One request for each connection, within a few seconds and a few kilobytes; connections beyond a number are answered
# with 503 and closed.

_MOST_HEADER_BYTES = 8 << 10
_MOST_LEFT_BYTES = 64 << 10  # of what comes after a request, and is read so that the answer arrives
_READ_SECONDS = 5.0
_WRITE_SECONDS = 10.0
_LEFT_SECONDS = 1.0
_MOST_CONNECTIONS = 32
_FRESH_SECONDS = 1.0
_WORDS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """The parts of an HTTP request that are used here."""

    method: str
    path: str
    headers: Mapping[str, tuple[str, ...]]
    """The values of each header, by its name in small letters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """The HTTP answer to a request."""

    status: int
    text: str
    headers: Mapping[str, str] = field(default_factory=dict)


class MetricsServer:
    """A small HTTP server for /metrics and /healthz, on the event loop that starts it."""

    def __init__(
        self,
        render: Callable[[], str],
        *,
        token: str | None = None,
        read_seconds: float = _READ_SECONDS,
        most_connections: int = _MOST_CONNECTIONS,
    ) -> None:
        """``render`` makes the page of metrics, at most once a second; with a ``token`` its readers have to give that.

        /healthz needs no token.
        """
        self._render = render
        self._credentials = None if token is None else f"Bearer {token}".encode()
        self._read_seconds = read_seconds
        self._most_connections = most_connections
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._page: tuple[float, str] | None = None

    async def start(self, host: str, port: int, *, tls: ssl.SSLContext | None = None) -> int:
        """Listen at ``port``, or at any free one for 0, and give the port; OSError where that fails."""
        self._server = await asyncio.start_server(
            self._connected,
            host,
            port,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self._read_seconds,
            limit=_MOST_HEADER_BYTES,
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening, and end connections that are open. Closing twice is allowed."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.TimeoutError):  # whoever asked is gone, or does not read
            writer.transport.abort()
        except asyncio.CancelledError:  # the master ends
            writer.transport.abort()
            raise
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) > self._most_connections:
            answer, has_body = _Answer(status=503, text="too many connections\n"), True
        else:
            answer, has_body = await self._answer(reader)
        writer.write(_as_bytes(answer, has_body=has_body))
        await asyncio.wait_for(writer.drain(), _WRITE_SECONDS)
        if writer.can_write_eof():
            writer.write_eof()
        if len(self._tasks) <= self._most_connections:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_read_the_rest(reader), _LEFT_SECONDS)

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[_Answer, bool]:
        """The answer to the request on a connection, and whether it is sent with its text (not for HEAD)."""
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), self._read_seconds)
        except asyncio.LimitOverrunError:
            return _Answer(status=431, text=f"a request may have {_MOST_HEADER_BYTES} bytes of headers\n"), True
        except asyncio.IncompleteReadError:
            return _Answer(status=400, text="the request has no end\n"), True
        except asyncio.TimeoutError:
            return _Answer(status=408, text=f"a request has to come within {self._read_seconds:g} seconds\n"), True
        request = _request_in(head)
        if request is None:
            return _Answer(status=400, text="this is no request of HTTP/1.1\n"), True
        return self._answer_to(request), request.method != "HEAD"

    def _answer_to(self, request: _Request) -> _Answer:
        if request.headers.get("content-length", ("0",)) != ("0",) or "transfer-encoding" in request.headers:
            return _Answer(status=413, text="a request must have no body\n")
        if request.path not in ("/metrics", "/healthz"):
            return _Answer(status=404, text="no such path; there are /metrics and /healthz\n")
        if request.method not in ("GET", "HEAD"):
            return _Answer(status=405, text="the method must be GET or HEAD\n", headers={"Allow": "GET, HEAD"})
        if request.path == "/healthz":
            return _Answer(status=200, text="ok\n")
        if self._credentials is not None and not self._has_token(request):
            text = "give the master's token, as a bearer token\n"
            return _Answer(status=401, text=text, headers={"WWW-Authenticate": "Bearer"})
        return _Answer(status=200, text=self._newest(), headers={"Content-Type": CONTENT_TYPE})

    def _has_token(self, request: _Request) -> bool:
        """Whether the caller has the token; how long that takes does not depend on how much of it is right."""
        given = request.headers.get("authorization", ())
        found = given[0] if len(given) == 1 else ""
        assert self._credentials is not None
        return hmac.compare_digest(found.encode("latin-1"), self._credentials)

    def _newest(self) -> str:
        """The page of metrics, no older than ``_FRESH_SECONDS``."""
        now = asyncio.get_running_loop().time()
        if self._page is None or now - self._page[0] >= _FRESH_SECONDS:
            self._page = now, self._render()
        return self._page[1]


def _request_in(head: bytes) -> _Request | None:
    """The HTTP request in ``head``; None where that is none."""
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or not parts[1].startswith("/") or parts[2] not in ("HTTP/1.0", "HTTP/1.1"):
        return None
    headers: dict[str, tuple[str, ...]] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip() or not line.isprintable():
            return None
        headers[name.lower()] = (*headers.get(name.lower(), ()), value.strip())
    return _Request(method=parts[0], path=parts[1].partition("?")[0], headers=headers)


def _as_bytes(answer: _Answer, *, has_body: bool) -> bytes:
    body = answer.text.encode()
    headers = {
        "Content-Type": "text/plain; charset=utf-8",
        "Content-Length": str(len(body)),
        "Cache-Control": "no-store",
        "Connection": "close",
        **answer.headers,
    }
    lines = [f"HTTP/1.1 {answer.status} {_WORDS[answer.status]}", *(f"{key}: {text}" for key, text in headers.items())]
    return "\r\n".join((*lines, "", "")).encode() + (body if has_body else b"")


async def _read_the_rest(reader: asyncio.StreamReader) -> None:
    """Read what was sent after a request, since closing a connection with unread bytes loses the answer."""
    left = _MOST_LEFT_BYTES
    while left > 0 and (data := await reader.read(left)):
        left -= len(data)
