"""What Prometheus reads of a master, taken apart by the rules of its format, and the server that it is read from."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.master_beats import made_workers
from elastic_ext.master.metrics import MetricsServer, exposition
from elastic_ext.master.wire import master_pb2, put_metrics
from elastic_ext.records.measures import METRICS

PINNED = Path(__file__).resolve().parents[1] / "saved" / "metrics.json"

# --- the format, by its rules -----------------------------------------------------------------------------------------


@dataclass
class Metric:
    """One metric with its series."""

    kind: str = ""
    help: str = ""
    series: dict[tuple[tuple[str, str], ...], float] = field(default_factory=dict)


_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"(,|(?=\}))')


def parsed(text: str) -> dict[str, Metric]:
    """The metrics of a page; AssertionError for anything that the format 0.0.4, read strictly, has not."""
    assert text == "" or text.endswith("\n")
    found: dict[str, Metric] = {}
    last = ""
    for line in text.split("\n")[:-1]:
        assert line and line.isprintable(), line
        if line.startswith("#"):
            hash_, what, name, rest = line.split(" ", 3)
            assert hash_ == "#" and what in ("HELP", "TYPE") and _NAME.fullmatch(name)
            if what == "HELP":
                assert name not in found, f"{name} stands in two places"
                found[name] = Metric(help=rest)
            else:
                assert name == last and not found[name].kind and not found[name].series
                assert rest in ("gauge", "counter")
                found[name].kind = rest
            last = name
            continue
        name, labels, value = _sample(line)
        assert name == last and found[name].kind, f"{name} is not below its TYPE"
        assert labels not in found[name].series, f"{line} is there twice"
        found[name].series[labels] = value
    assert all(metric.series and metric.kind and metric.help for metric in found.values())
    return found


def _sample(line: str) -> tuple[str, tuple[tuple[str, str], ...], float]:
    match = _NAME.match(line)
    assert match, line
    rest = line[match.end() :]
    labels: list[tuple[str, str]] = []
    if rest.startswith("{"):
        rest = rest[1:]
        while not rest.startswith("}"):
            label = _LABEL.match(rest)
            assert label, line
            labels.append((label[1], re.sub(r"\\(.)", lambda found: {"n": "\n"}.get(found[1], found[1]), label[2])))
            rest = rest[label.end() :]
        rest = rest[1:]
    assert len({name for name, _ in labels}) == len(labels)
    assert rest.startswith(" ") and re.fullmatch(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?", rest[1:]), line
    return match[0], tuple(sorted(labels)), float(rest[1:])


def _status(num_nodes: int = 2) -> master_pb2.JobStatus:
    status = master_pb2.JobStatus(
        time=1.7e9,
        job="nano",
        job_id="f00",
        epoch=3,
        up_seconds=60.5,
        library="0.1.0",
        config=master_pb2.ConfigStatus(version=4, num_holding=1, num_nodes=num_nodes),
        progress=master_pb2.Progress(
            step=1000, steps_per_second=3.1, samples_per_second=2600.0, shares={"data": 0.25, "forward": 0.75}
        ),
        verdict=master_pb2.Verdict(kind="data", text="data-bound: ...", share=0.41),
    )
    for number in range(num_nodes):
        status.nodes.add(
            node=master_pb2.Node(node_id=f"n{number}", host=f"host-{number}"),
            state="live" if number else "late",
            seen_seconds=1.5,
            config_version=4,
            workers=made_workers(number, end=1.7e9, num_nodes=num_nodes),
        )
    return status


def test_a_status_is_told_in_base_units_with_a_type_and_a_sentence_for_each_metric() -> None:
    found = parsed(exposition(_status(), {"beats": 17, "pushes": 2}, {"fenced": 1, "rate": 3}))
    assert all(name.startswith("elastic_ext_") for name in found)
    assert {name for name, metric in found.items() if metric.kind == "counter"} == {
        "elastic_ext_master_beats_total",
        "elastic_ext_master_pushes_total",
        "elastic_ext_master_refusals_total",
        "elastic_ext_rank_steps_not_finite_total",
        "elastic_ext_rank_steps_skipped_total",
    }
    assert all(name.endswith("_total") == (metric.kind == "counter") for name, metric in found.items())
    assert found["elastic_ext_master_refusals_total"].series == {(("reason", "fenced"),): 1, (("reason", "rate"),): 3}
    assert found["elastic_ext_master_start_time_seconds"].series == {(): 1.7e9 - 60.5}
    assert found["elastic_ext_nodes"].series[(("state", "live"),)] == 1
    assert found["elastic_ext_nodes"].series[(("state", "lost"),)] == 0
    assert found["elastic_ext_step"].series == {(): 1000}
    assert found["elastic_ext_phase_ratio"].series == {(("phase", "data"),): 0.25, (("phase", "forward"),): 0.75}
    assert found["elastic_ext_verdict"].series == {(("kind", "data"),): 1}
    assert "elastic_ext_tokens_per_second" not in found, "it is not known"
    rank = (("node", "n1"), ("rank", "9"))
    assert found["elastic_ext_rank_memory_bytes"].series[rank] == 6 << 30
    assert found["elastic_ext_rank_cpu_ratio"].series[rank] == pytest.approx(1.035)
    half = found["elastic_ext_rank_step_duration_seconds"].series[(("node", "n1"), ("quantile", "0.5"), ("rank", "9"))]
    assert half == pytest.approx(0.322, rel=0.05)
    assert len(found["elastic_ext_rank_running"].series) == found["elastic_ext_ranks"].series[()] == 16


def test_metrics_have_the_names_kinds_and_labels_that_they_had() -> None:
    """Of a master that knows all that it can. Lines are added to saved/metrics.json, and none is changed."""
    status = _status()
    status.progress.tokens_per_second = 1.0
    status.tuning.MergeFrom(
        master_pb2.TuningStatus(mode="auto", num_decisions=1, best=1.0, predicted=1.0, measured=1.0)
    )
    worker = status.nodes[0].workers[0]
    for each in worker.DESCRIPTOR.fields:
        if each.has_presence and each.message_type is None and not worker.HasField(each.name):
            setattr(worker, each.name, 1)
    put_metrics(worker, dict.fromkeys(METRICS, 1))
    counts = ("joins", "beats", "pushes", "generated", "unacknowledged", "events")
    found = parsed(exposition(status, dict.fromkeys(counts, 1), {"fenced": 1}))
    told = {
        name: " ".join([metric.kind, *(label for label, _ in next(iter(metric.series)))])
        for name, metric in found.items()
    }
    assert told == json.loads(PINNED.read_text())


def test_a_master_that_knows_nothing_yet_is_told_of_too() -> None:
    found = parsed(exposition(master_pb2.JobStatus()))
    assert found["elastic_ext_ranks"].series == {(): 0}
    assert "elastic_ext_verdict" not in found and "elastic_ext_node_up" not in found


def test_of_very_many_ranks_there_are_series_of_some_and_of_all_nodes() -> None:
    found = parsed(exposition(_status(100), most_ranks=64))
    assert len(found["elastic_ext_rank_step"].series) == 64
    assert found["elastic_ext_ranks_left_out"].series == {(): 736}
    assert len(found["elastic_ext_node_up"].series) == 100


def test_a_job_of_very_many_ranks_may_be_told_of_without_them() -> None:
    status = _status(3)
    for node in status.nodes:
        del node.workers[:]
    found = parsed(exposition(status, num_ranks=16_000))
    assert found["elastic_ext_ranks"].series == found["elastic_ext_ranks_left_out"].series == {(): 16_000}
    assert "elastic_ext_rank_running" not in found


def test_nodes_that_are_gone_have_no_ranks() -> None:
    status = _status()
    status.nodes[0].state = "lost"
    found = parsed(exposition(status))
    assert found["elastic_ext_node_up"].series == {
        (("host", "host-0"), ("node", "n0")): 0,
        (("host", "host-1"), ("node", "n1")): 1,
    }
    assert found["elastic_ext_ranks"].series == {(): 8}


_TEXT = st.text(max_size=200) | st.sampled_from(['a"b', "a\\", "a\nb", "\\n", '"', "{}", "\x1b[31m", "x" * 5000])
_VALUE = st.floats() | st.sampled_from([math.nan, math.inf, -math.inf, 1e300, 5e-324, -0.0, 2.0**53])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_whatever_nodes_are_called_and_tell_the_page_keeps_the_format(data: st.DataObject) -> None:
    draw = data.draw
    status = master_pb2.JobStatus(job=draw(_TEXT), job_id=draw(_TEXT), library=draw(_TEXT), time=draw(_VALUE))
    status.verdict.kind = draw(_TEXT)
    status.verdict.share = draw(_VALUE)
    status.progress.samples_per_second = draw(_VALUE)
    status.progress.shares[draw(_TEXT)] = draw(_VALUE)
    for _ in range(draw(st.integers(0, 4))):
        node = status.nodes.add(state=draw(st.sampled_from(["live", "late", "lost", "", "other"])))
        node.node.node_id, node.node.host, node.seen_seconds = draw(_TEXT), draw(_TEXT), draw(_VALUE)
        for rank in draw(st.lists(st.integers(0, 3), max_size=3)):
            node.workers.add(rank=rank, cpu_percent=draw(_VALUE), memory_bytes=draw(st.integers(0, 2**64 - 1)))
    counts = draw(st.dictionaries(st.sampled_from(["beats", "pushes", "new"]), st.integers(0, 2**70), max_size=3))
    parsed(exposition(status, counts, draw(st.dictionaries(_TEXT, st.integers(0, 9), max_size=3))))


# --- the server -------------------------------------------------------------------------------------------------------

_TOKEN = "a-token-of-some-length"


@dataclass
class Client:
    """A server's port, spoken to in bytes."""

    server: MetricsServer
    port: int

    async def exchange(self, data: bytes, *, ends: bool = False) -> bytes:
        """What comes back until the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            await writer.drain()
            if ends:
                writer.write_eof()
            return await asyncio.wait_for(reader.read(), 10)
        finally:
            writer.close()

    async def status(self, data: bytes, **changes: bool) -> int:
        """The number that the answer begins with."""
        found = await self.exchange(data, **changes)
        assert found.startswith(b"HTTP/1.1 "), found
        return int(found[9:12])

    async def get(self, path: str, *headers: str, method: str = "GET") -> tuple[int, dict[str, str], str]:
        lines = [f"{method} {path} HTTP/1.1", "Host: here", *headers, "", ""]
        found = await self.exchange("\r\n".join(lines).encode())
        head, _, body = found.decode().partition("\r\n\r\n")
        first, *rest = head.split("\r\n")
        return int(first.split(" ")[1]), dict(line.split(": ", 1) for line in rest), body


def serving(test: Callable[[Client], Awaitable[None]], **settings: object) -> None:
    """Run ``test`` beside a server whose pages are numbered."""
    numbers = itertools.count(1)

    async def run() -> None:
        server = MetricsServer(lambda: f"page {next(numbers)}\n", **settings)  # type: ignore[arg-type]
        port = await server.start("127.0.0.1", 0)
        try:
            await asyncio.wait_for(test(Client(server, port)), 30)
        finally:
            await server.close()
            await server.close()
        with pytest.raises(OSError, match=r"[Cc]onnect"):
            await asyncio.open_connection("127.0.0.1", port)

    asyncio.run(run())


def test_a_page_is_made_at_most_once_a_second_and_read_by_many() -> None:
    async def test(client: Client) -> None:
        found = [await client.get("/metrics") for _ in range(3)]
        assert {body for _, _, body in found} == {"page 1\n"}
        status, headers, body = found[0]
        assert status == 200 and headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert int(headers["Content-Length"]) == len(body) and headers["Connection"] == "close"

    serving(test)


def test_what_is_asked_otherwise_is_answered_with_what_there_is() -> None:
    async def test(client: Client) -> None:
        assert (await client.get("/"))[0] == 404
        assert (await client.get("/metrics/../../etc/passwd"))[0] == 404
        assert (await client.get("/metrics?name=x"))[0] == 200
        status, headers, _ = await client.get("/metrics", method="POST")
        assert status == 405 and headers["Allow"] == "GET, HEAD"
        assert (await client.get("/metrics", "Content-Length: 10"))[0] == 413
        assert (await client.get("/metrics", "Transfer-Encoding: chunked"))[0] == 413
        status, headers, body = await client.get("/metrics", method="HEAD")
        assert (status, headers["Content-Length"], body) == (200, "7", "")
        assert await client.get("/healthz") == (200, (await client.get("/healthz"))[1], "ok\n")

    serving(test)


def test_with_a_token_metrics_are_for_those_who_have_it_and_health_for_all() -> None:
    async def test(client: Client) -> None:
        status, headers, body = await client.get("/metrics")
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer") and _TOKEN not in body
        wrong = ("Bearer x", f"Bearer {_TOKEN}x", f"bearer {_TOKEN}", f"Basic {_TOKEN}", _TOKEN, "", "Bearer \xe9")
        for each in wrong:
            assert (await client.get("/metrics", f"Authorization: {each}"))[0] in (400, 401)
        good = f"Authorization: Bearer {_TOKEN}"
        assert (await client.get("/metrics", good, good))[0] == 401, "which of two is meant is not known"
        assert (await client.get("/metrics", good))[0] == 200
        assert (await client.get("/healthz"))[0] == 200

    serving(test, token=_TOKEN)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET /metrics HTTP/2.0\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\n", 400),
        (b"GET http://other/metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n folded: x\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nname : x\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\na: \x00\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\na: x\nb: y\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.0\r\n\r\n", 200),
        (b"GET /metrics HTTP/1.1\r\n" + b"a: " + b"x" * 9000 + b"\r\n\r\n", 431),
        (b"GET /metrics HTTP/1.1\r\n" + b"a: x\r\n" * 3000 + b"\r\n", 431),
        (b"x" * 200_000, 431),
    ],
)
def test_what_is_no_request_is_answered_and_no_harm_done(data: bytes, status: int) -> None:
    async def test(client: Client) -> None:
        assert await client.status(data) == status
        assert (await client.get("/healthz"))[0] == 200

    serving(test)


def test_of_requests_behind_one_another_the_first_is_answered() -> None:
    async def test(client: Client) -> None:
        found = await client.exchange(b"GET /healthz HTTP/1.1\r\n\r\n" * 500)
        assert found.count(b"HTTP/1.1 ") == 1 and found.endswith(b"ok\n")

    serving(test)


def test_one_who_sends_no_more_is_answered_still() -> None:
    async def test(client: Client) -> None:
        assert await client.status(b"GET /metrics HTTP/1.1\r\n\r\n", ends=True) == 200
        assert await client.status(b"GET /metrics HT", ends=True) == 400
        assert await client.status(b"", ends=True) == 400

    serving(test)


def test_one_who_sends_slowly_is_cut_off_whatever_comes() -> None:
    async def test(client: Client) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        answered = asyncio.ensure_future(reader.read())
        while not answered.done():
            writer.write(b"a")
            await asyncio.wait([answered], timeout=0.05)
        assert answered.result().startswith(b"HTTP/1.1 408 ")
        writer.close()

    serving(test, read_seconds=0.3)


def test_connections_that_are_too_many_are_told_so_and_others_are_served_after() -> None:
    async def test(client: Client) -> None:
        held = [await asyncio.open_connection("127.0.0.1", client.port) for _ in range(4)]
        assert (await client.exchange(b"GET /healthz HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 503 ")
        for reader, writer in held:
            writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()
        while client.server._tasks:
            await asyncio.wait(set(client.server._tasks), timeout=1)
        assert (await client.get("/healthz"))[0] == 200

    serving(test, most_connections=4, read_seconds=20.0)


def test_who_never_reads_does_not_hold_up_the_end() -> None:
    async def run() -> None:
        server = MetricsServer(lambda: "x" * 50_000_000)
        port = await server.start("127.0.0.1", 0)
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        while not server._tasks:
            await asyncio.sleep(0)
        await asyncio.wait_for(server.close(), 5)
        writer.transport.abort()

    asyncio.run(run())


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_answered_with_a_status(data: bytes) -> None:
    async def test(client: Client) -> None:
        assert await client.status(data, ends=True) in (200, 400, 401, 404, 405, 413, 431)

    serving(test)
