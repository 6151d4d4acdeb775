"""What a master takes: until it answers, of a beat, until all nodes have a config; its memory and its processor.

The master is a process of its own, started as a person does; its agents are made up in another one, each with a
connection of its own (master_load_agents.py). Each node tells of eight workers in each beat, with a window of each, and
has a stream of configs. Both processes share the machine, so that what is measured of beats is what both take. One load
is put on a master whose tuner plans once a second (master_planner.py).

Not measured: what lies between machines, and TLS.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import psutil

from benchmarks.harness import Finding, Result, Verdict, shortened, shown_value
from elastic_ext.master.wire import master_pb2 as wire
from elastic_ext.master.wire.master_pb2_grpc import MasterStub

__all__ = ["Load", "LoadTable", "Row", "main", "measured", "table_of"]

_ROOT = Path(__file__).resolve().parent.parent
_START_SECONDS = 30.0
_MOST_SECONDS = 170.0  # of one load
_MOST_BEAT_SECONDS = 0.1
_MOST_PUSH_SECONDS = 0.5
_MOST_BYTES = 150e6
_MOST_SHARE_OF_A_CORE = 0.25
_MOST_UP_SECONDS = 1.0
_NUM_STARTS = 7
_MOST_GROWTH = 1.1  # of memory, from the second quarter to the last


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is asked of a master."""

    num_agents: int
    every_seconds: float
    """Between two beats of an agent."""
    num_beats: int
    """Of each."""
    num_pushes: int = 10
    has_plans: bool = False
    """Whether the master's tuner plans meanwhile, once a second."""

    @property
    def name(self) -> str:
        meanwhile = ", while the tuner plans once a second" if self.has_plans else ""
        return f"{self.num_agents} nodes, a beat each {self.every_seconds:g} s{meanwhile}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measure, and what is wanted of it."""

    name: str
    value: float
    shown: str
    at_most: float | None = None
    wanted: str = ""

    @property
    def verdict(self) -> Verdict:
        if self.at_most is None:
            return "none claimed"
        return "pass" if self.value <= self.at_most else "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadTable:
    """What came of one load."""

    title: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        return f"**{self.title}**"

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return tuple(row.verdict for row in self.rows)

    @property
    def findings(self) -> tuple[Finding, ...]:
        found = []
        whole = ""  # what a name that begins with dots goes on from
        for row in self.rows:
            whole = row.name if not row.name.startswith("...") else whole
            name = f"{whole.partition(',')[0]}, {row.name[3:].strip(' ,')}" if whole != row.name else row.name
            found.append(
                Finding(
                    claim=f"{name}: {row.wanted}" if row.at_most is not None else name,
                    side=name,
                    value=row.shown,
                    target=row.wanted or None,
                    verdict=row.verdict,
                )
            )
        return tuple(found)

    def table_lines(self) -> list[str]:
        lines = ["| measure | value | target | verdict |", "|---|---:|---:|---|"]
        for row in self.rows:
            verdict = row.verdict if row.at_most is not None else ""
            lines.append(f"| {row.name} | {row.shown} | {row.wanted} | {verdict} |")
        return lines


def main(share: float = 1.0) -> list[Result]:
    """Starts, each number of nodes, a tuner that plans, ten times the rate, and as many beats as an hour has."""
    rare = [Load(num_agents=num, every_seconds=10.0, num_beats=2) for num in (200, 1000, 2000)]
    often = Load(num_agents=1000, every_seconds=1.0, num_beats=shortened(30, share, least=10), num_pushes=3)
    tuned = Load(num_agents=1000, every_seconds=10.0, num_beats=3, has_plans=True)
    num_beats = shortened(360, share, least=40)
    long = Load(num_agents=200, every_seconds=0.25, num_beats=num_beats, num_pushes=3)
    return [
        table_of_starts([up_seconds() for _ in range(_NUM_STARTS)]),
        *(table_of(load, measured(load)) for load in rare),
        table_of(tuned, measured(tuned)),
        table_of(often, measured(often), is_sustained=True),
        table_of(long, measured(long), is_sustained=True),
    ]


def up_seconds() -> float:
    """From the start of a master until it has said where it listens, and has answered."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, _master(Path(folder), poll_seconds=0.002) as (_, port):
        _call(port, "GetStatus", wire.GetStatusRequest())
        return time.monotonic() - begin


def table_of_starts(seconds: Sequence[float]) -> LoadTable:
    """What starting took, several times."""
    rows = [
        _seconds("until it has answered, p50", median(seconds), _MOST_UP_SECONDS),
        _seconds("... at most", max(seconds)),
    ]
    return LoadTable(title=f"From its start ({len(seconds)} masters, one after another)", rows=tuple(rows))


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What was seen of a master under a load."""

    told: Mapping[str, Sequence[Mapping[str, Any]]]
    """By its agents, by what it is."""
    cpu_share: float
    """Of a core, while there were beats alone."""
    bytes_in_quarters: tuple[float, ...]
    """The most that it held in each quarter of that time."""
    bytes_at_end: float
    plans: str = ""
    """How many were made meanwhile, and what they took, in words; empty where none were to be."""


def measured(
    load: Load, *, token: str = "", beside: Callable[[int], AbstractContextManager[None]] | None = None
) -> Measured:
    """Put a master under a load, with a token or none; ``beside``, of its port, is what goes on while agents beat."""
    module = "benchmarks.master_planner" if load.has_plans else "elastic_ext.master"
    with ExitStack() as at_end:
        folder = Path(at_end.enter_context(tempfile.TemporaryDirectory()))
        secret = ["--token-file", str(_token_file(folder, token))] if token else []
        process, port = at_end.enter_context(_master(folder, module, *secret))
        if load.has_plans:
            _call(port, "ControlTuning", wire.ControlTuningRequest(action="resume"))
        command = [sys.executable, "-m", "benchmarks.master_load_agents", f"127.0.0.1:{port}"]
        command += ["--agents", str(load.num_agents), "--every", str(load.every_seconds)]
        command += ["--beats", str(load.num_beats), "--pushes", str(load.num_pushes), *secret]
        watch = _Watch(psutil.Process(process.pid))
        told: dict[str, list[Mapping[str, Any]]] = {}
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=_ROOT, stdin=pipe, stdout=pipe, text=True) as agents, watch:
            limit = threading.Timer(_MOST_SECONDS, agents.kill)
            limit.start()
            try:
                assert agents.stdout is not None and agents.stdin is not None
                meanwhile = ExitStack()
                for line in agents.stdout:
                    found = json.loads(line)
                    told.setdefault(found["event"], []).append(found)
                    if found["event"] == "ready":
                        if beside is not None:
                            meanwhile.enter_context(beside(port))
                        agents.stdin.close()  # which is what they wait for
                    watch.mark(found["event"])
                    if found["event"] == "beaten":
                        meanwhile.close()
            finally:
                limit.cancel()
                agents.kill()
        plans = _plans_in_words(_call(port, "GetTuning", wire.GetTuningRequest())) if load.has_plans else ""
        assert "over" in told, f"the load was not over after {_MOST_SECONDS:g} s, or has failed: {list(told)}"
        return Measured(
            told=told,
            cpu_share=watch.share("ready", "beaten"),
            bytes_in_quarters=watch.quarters("ready", "beaten"),
            bytes_at_end=watch.samples[-1][1],
            plans=plans,
        )


def _token_file(folder: Path, token: str) -> Path:
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(f"{token}\n")
    return path


def _call(port: int, method: str, request: Any) -> Any:
    """What a master answers."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = MasterStub(channel)  # type: ignore[no-untyped-call]
        return getattr(stub, method)(request, timeout=_START_SECONDS)


def _plans_in_words(report: wire.TuningReport) -> str:
    seconds = [float(each.reason) for each in report.decisions]
    usual, most = (shown_value(each, "seconds") for each in (median(seconds), max(seconds)))
    return f"{len(seconds)} plans, which took {usual} (p50) and {most} at most"


@contextmanager
def _master(
    folder: Path, module: str = "elastic_ext.master", *options: str, poll_seconds: float = 0.05
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    port_file = folder / "port"
    command = [sys.executable, "-m", module, "--port", "0", "--port-file", str(port_file), *options]
    log = folder / "log"
    with log.open("wb") as told:
        process = subprocess.Popen([*command, "--state-dir", str(folder / "state")], cwd=_ROOT, stderr=told)
    try:
        limit = time.monotonic() + _START_SECONDS
        while not port_file.exists():
            has_time = process.poll() is None and time.monotonic() < limit
            assert has_time, f"the master has not started: {log.read_text()[-2000:]}"
            time.sleep(poll_seconds)
        yield process, int(port_file.read_text())
    finally:
        process.terminate()
        process.wait(20)


class _Watch:
    """A process's memory and processor, looked at a few times a second."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._marks: dict[str, tuple[float, float]] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.samples: list[tuple[float, float]] = []

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def mark(self, name: str) -> None:
        times = self._process.cpu_times()
        self._marks[name] = time.monotonic(), times.user + times.system

    def share(self, first: str, last: str) -> float:
        """Of a core, between two marks."""
        (begin, spent_before), (end, spent) = self._marks[first], self._marks[last]
        return (spent - spent_before) / (end - begin)

    def quarters(self, first: str, last: str) -> tuple[float, ...]:
        begin, end = self._marks[first][0], self._marks[last][0]
        rows: list[list[float]] = [[], [], [], []]
        for moment, held in self.samples:
            if begin <= moment < end:
                rows[int(4 * (moment - begin) / (end - begin))].append(held)
        return tuple(max(row, default=math.nan) for row in rows)

    def _run(self) -> None:
        while not self._is_over.wait(0.2):
            self.samples.append((time.monotonic(), float(self._process.memory_info().rss)))


def table_of(load: Load, found: Measured, *, is_sustained: bool = False) -> LoadTable:
    """What was measured, beside what is wanted; of a load that is kept up, whether memory grows."""
    told = found.told
    (joined,), (beaten,), (status,), (over,) = (told[name] for name in ("joined", "beaten", "status", "over"))
    pushes = sorted(each["seconds"] for each in told["pushed"])
    failures = [*beaten["failures"], *over["failures"]]
    quarters = ", ".join(shown_value(each, "bytes") for each in found.bytes_in_quarters)
    growth = found.bytes_in_quarters[-1] / found.bytes_in_quarters[1]
    most = max(*found.bytes_in_quarters, found.bytes_at_end)
    is_rare = load.every_seconds >= 10
    is_alone = is_rare and not load.has_plans  # else it is the plans that take the processor, and what they need
    rows = [
        _seconds("a beat, p50", beaten["p50"]),
        _seconds("a beat, p99", beaten["p99"], _MOST_BEAT_SECONDS if is_rare else None),
        _seconds("until the last node has a config, p50", pushes[len(pushes) // 2], _MOST_PUSH_SECONDS),
        _seconds("... at most", pushes[-1], _MOST_PUSH_SECONDS),
        _seconds("a beat of those that all nodes send then, p99", over["p99"]),
        _seconds("the job's status", status["seconds"]),
        Row(
            name="of a core",
            value=found.cpu_share,
            shown=f"{found.cpu_share:.0%}",
            at_most=_MOST_SHARE_OF_A_CORE if is_alone else None,
            wanted=f"< {_MOST_SHARE_OF_A_CORE:.0%}" if is_alone else "",
        ),
        Row(
            name="memory, at most",
            value=most,
            shown=shown_value(most, "bytes"),
            at_most=None if load.has_plans else _MOST_BYTES,
            wanted="" if load.has_plans else "≤ 150 MB",
        ),
    ]
    if is_sustained:
        rows.append(
            Row(
                name="memory in the last quarter, over that in the second",
                value=growth,
                shown=f"{growth:.3f}",
                at_most=_MOST_GROWTH,
                wanted=f"≤ {_MOST_GROWTH:g}",
            )
        )
    notes = [
        f"{beaten['num']:,} beats, {load.num_agents / load.every_seconds:,.0f} a second; {joined['num_channels']:,} "
        f"connections; all had joined after {joined['seconds']:.1f} s",
        f"beats were begun late by {shown_value(beaten['lag'], 'seconds')} (p99), which is the load's own doing",
        f"memory in quarters: {quarters}; {len(pushes)} configs",
    ]
    if found.plans:
        notes.append(found.plans)
    if over["num_failures"]:
        notes.append(f"{over['num_failures']} calls failed, such as: {failures[0]}")
    return LoadTable(title=load.name, rows=tuple(rows), notes=tuple(notes))


def _seconds(name: str, value: float, at_most: float | None = None) -> Row:
    wanted = "" if at_most is None else f"≤ {shown_value(at_most, 'seconds')}"
    return Row(name=name, value=value, shown=shown_value(value, "seconds"), at_most=at_most, wanted=wanted)
