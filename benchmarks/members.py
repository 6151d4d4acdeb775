"""Nodes that join and leave, and workers that are killed: how long no step is taken, by elastic-run and its peers.

Each node has one rank, of the same model, on this machine (benchmarks/members_job.py). Two of them train, and a third
one joins; or there are three from the beginning, and one is sent SIGTERM, or its worker SIGKILL. Read is the longest
time between two steps of the job, from three steps before the first one in the new world, or from the kill, to three
after it, by what each process has written; a usual step, of which 20 ms are sleep, is a part of it.

    torchrun            starts all anew, from the newest checkpoint on the disk; meets as in benchmarks/launcher.py
    restart             elastic-run --members=restart: starts all anew, from what was staged in memory
    live                elastic-run --members=live: no process is started anew, but for a worker that was killed
    torchft             replicas of one rank with its lighthouse, its DDP and its optimizer; a replica that is to leave
                        ends between two steps, and is missed after a second (its own default: five); one that was
                        killed is not started again

How many samples were lost (drawn, and in no step) or repeated (in two) is counted in each run. Groups of four ranks,
and what ``live`` costs where nothing happens, are measured beside.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import psutil

from benchmarks.harness import (
    Claim,
    Reading,
    Readings,
    Result,
    Side,
    compare,
    comparison_of,
    paired_ratios,
    run_rounds,
    shortened,
    shown_value,
)
from benchmarks.launcher import Job, job_of
from benchmarks.quantiles import QuantileTable, QuantileTarget, Samples

__all__ = ["Run", "gap_after", "longest_gap", "main", "read_steps", "samples_of"]

TORCHRUN, RESTART, LIVE, TORCHFT = "torchrun", "elastic-run, restart", "elastic-run, live", "torchft"
LAUNCHERS: Mapping[str, Sequence[str]] = {
    TORCHRUN: ("-m", "torch.distributed.run", "--max-restarts=3"),
    RESTART: ("-m", "elastic_ext.run", "--members=restart", "--max-restarts=3"),
    LIVE: ("-m", "elastic_ext.run", "--members=live", "--max-restarts=3"),
}
STALL, LOST, REPEATED = "Without a step", "Samples lost", "Samples repeated"
DDP_OVER = {TORCHRUN: 1 / 40, RESTART: 1 / 15, TORCHFT: 1 / 2}
KILLED_OVER = {TORCHRUN: 1 / 20, RESTART: 1 / 10, TORCHFT: 1 / 2}
SHARDED_OVER = {RESTART: 1 / 8}
GROUPS = QuantileTarget(quantile=0.5, at_most=0.1)
_KILLED = "A worker of three is killed, DDP"
_COSTS = Claim(at_most=1.01)
_DEADLINE_SECONDS = 180.0
_POLL_SECONDS = 0.05
_NUM_STEPS = {"ddp": 20, "full_shard": 3, "busy": 20}  # before something happens, and after it
_NUM_QUIET = 60
_AROUND = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What the processes of a job have written."""

    steps: Sequence[tuple[int, float, int]]
    """Step, when, and among how many ranks: of every process, by time."""
    drawn: Counter[int]
    """Samples by how often they were drawn, but for what each process has drawn last."""
    trained: Counter[int]
    """Samples by how often they were in a step that was committed."""

    @property
    def num_ranks(self) -> int:
        """Among how many the last step was; 0 where there is none."""
        return self.steps[-1][2] if self.steps else 0

    def num_steps_among(self, num_ranks: int) -> int:
        """How many different steps the ranks have taken in a world of that size."""
        return len({step for step, _, ranks in self.steps if ranks == num_ranks})


def read_steps(folder: Path) -> Run:
    """What lies in a job's folder so far."""
    steps, drawn, trained = [], Counter[int](), Counter[int]()
    for file in folder.glob("steps-*.txt"):
        text = file.read_text()
        of_file: list[list[int]] = []
        for line in text[: text.rfind("\n") + 1].splitlines():
            what, *words = line.split()
            samples = samples_of(words[-1])
            if what == "drawn":
                of_file.append(samples)
            else:
                steps.append((int(words[0]), float(words[1]), int(words[2])))
                trained.update(samples)
        for samples in of_file[:-_AROUND]:  # what was under way as the job was ended is no loss
            drawn.update(samples)
    return Run(steps=sorted(steps, key=lambda each: each[1]), drawn=drawn, trained=trained)


def samples_of(word: str) -> list[int]:
    """The samples of a line of members_job.py."""
    return [] if word == "-" else [int(each) for each in word.split(",")]


def longest_gap(steps: Sequence[tuple[int, float, int]], num_ranks: int) -> float:
    """The longest time between two steps around the first one in a world of that size, which follows another world."""
    other = next(place for place, (_, _, ranks) in enumerate(steps) if ranks != num_ranks)
    first = next(place for place, (_, _, ranks) in enumerate(steps) if place > other and ranks == num_ranks)
    most = max(ranks for _, _, ranks in steps)
    around = steps[max(0, first - _AROUND * most - 1) : first + _AROUND * most + 1]
    return max(late[1] - early[1] for early, late in pairwise(around))


def gap_after(steps: Sequence[tuple[int, float, int]], killed_at: float) -> float:
    """The longest time between two steps from the last one before a worker was killed on."""
    first = next(place for place, (_, when, _) in enumerate(steps) if when > killed_at)
    most = max(ranks for _, _, ranks in steps)
    around = steps[max(0, first - 1) : first + _AROUND * most + 1]
    return max(late[1] - early[1] for early, late in pairwise(around))


# --- jobs -----------------------------------------------------------------------------------------------------------


class Nodes(Protocol):
    """A job whose nodes come and go."""

    folder: Path

    def start_node(self) -> None:
        """One more, of one rank."""

    def end_node(self, number: int) -> None:
        """Send it SIGTERM."""

    def kill_worker(self, number: int) -> None:
        """Send its worker SIGKILL."""


class _Launched(Nodes):
    """One that has a launcher in each node."""

    def __init__(self, job: Job) -> None:
        self._job, self.folder = job, job.folder

    def start_node(self) -> None:
        self._job.start_node()

    def end_node(self, number: int) -> None:
        self._job.nodes[number].send_signal(signal.SIGTERM)

    def kill_worker(self, number: int) -> None:
        files = self.folder.glob("steps-*.txt")
        pids = {int(file.stem.removeprefix("steps-")) for file in files}
        children = psutil.Process(self._job.nodes[number].pid).children(recursive=True)
        (worker,) = [child for child in children if child.pid in pids]
        worker.kill()


class _Replicas(Nodes):
    """One of torchft's replicas, with their lighthouse."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        serve = str(Path(sys.executable).with_name("torchft_lighthouse"))
        options = ["--min_replicas=1", "--join_timeout_ms=1000", "--heartbeat_timeout_ms=1000", "--quorum_tick_ms=20"]
        self._lighthouse = self._start("lighthouse", serve, f"--bind={self._address}", *options)
        self._replicas: list[subprocess.Popen[bytes]] = []

    def start_node(self) -> None:
        number = len(self._replicas)
        job = ["-m", "benchmarks.members_job", "torchft", str(self.folder), str(number), f"http://{self._address}"]
        self._replicas.append(self._start(f"replica-{number}", *job))

    def end_node(self, number: int) -> None:
        self._replicas[number].terminate()

    def kill_worker(self, number: int) -> None:
        self._replicas[number].kill()

    def close(self) -> None:
        for process in (*self._replicas, self._lighthouse):
            process.kill()
            process.wait()

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(self.folder / f"{name}.log", "w") as log:
            return subprocess.Popen(
                [sys.executable, *arguments], env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )


@contextmanager
def _nodes(side: str, way: str) -> Iterator[Nodes]:
    if side != TORCHFT:
        with job_of(LAUNCHERS[side], ("benchmarks.members_job", way)) as job:
            yield _Launched(job)
        return
    with tempfile.TemporaryDirectory(prefix="members-") as folder:
        replicas = _Replicas(Path(folder))
        try:
            yield replicas
        finally:
            replicas.close()


def _wait(job: Nodes, is_there: Callable[[Run], bool]) -> Run:
    end = time.monotonic() + _DEADLINE_SECONDS
    while not is_there(run := read_steps(job.folder)):
        if time.monotonic() > end:
            logs = "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in sorted(job.folder.glob("*.log")))
            raise RuntimeError(f"not in time; the last steps: {run.steps[-5:]}\n{logs}")
        time.sleep(_POLL_SECONDS)
    return run


def _changed(side: str, way: str, before: int, after: int) -> tuple[Run, list[Mapping[str, Any]]]:
    """A job whose world changes once, and what it tells of that."""
    num_steps = _NUM_STEPS[way]
    with _nodes(side, way) as job:
        for _ in range(before):
            job.start_node()
        _wait(job, lambda run: run.num_ranks == before and run.num_steps_among(before) >= num_steps)
        if after > before:
            job.start_node()
        else:
            job.end_node(before - 1)
        run = _wait(job, lambda run: run.num_ranks == after and run.num_steps_among(after) >= num_steps)
        return run, _changes_told(job.folder)


def _killed(side: str, way: str, before: int) -> tuple[Run, float, list[Mapping[str, Any]]]:
    """A job of which a worker is killed, when that was, and what it tells of that."""
    num_steps = _NUM_STEPS[way]
    with _nodes(side, way) as job:
        for _ in range(before):
            job.start_node()
        _wait(job, lambda run: run.num_ranks == before and run.num_steps_among(before) >= num_steps)
        killed_at = time.time()
        job.kill_worker(before - 1)
        run = _wait(job, lambda run: sum(when > killed_at for _, when, _ in run.steps) >= 3 * before * num_steps)
        return run, killed_at, [each for each in _changes_told(job.folder) if each.get("lost")]


def _changes_told(folder: Path) -> list[Mapping[str, Any]]:
    """The details of live changes, as their survivors have told them."""
    told = []
    for file in folder.glob("node-*/events-*.jsonl"):
        for line in file.read_text().splitlines():
            with suppress(json.JSONDecodeError):
                event = json.loads(line)
                if event["kind"] == "members-changed" and event["details"].get("before"):
                    told.append(event["details"])
    return told


# --- tables ---------------------------------------------------------------------------------------------------------


def main(share: float = 1.0) -> list[Result]:
    """Tables of a join and of a worker that is killed, under DDP; in the whole form also of a leave, of shards, of
    groups, and of a quiet job."""
    num_rounds = shortened(6, share, least=3)
    results = _stalls("A node joins two, DDP", "ddp", 2, 3, DDP_OVER, num_rounds)
    results += _stalls(_KILLED, "ddp", 3, None, KILLED_OVER, num_rounds)
    if share < 1:
        return results
    return [
        *results,
        *_stalls("A node of three leaves, DDP", "ddp", 3, 2, DDP_OVER, num_rounds),
        *_stalls("A node joins two, fully_shard, 40 million parameters", "full_shard", 2, 3, SHARDED_OVER, 3),
        _groups(num_rounds=3),
        _quiet(num_rounds=8),
    ]


def _stalls(
    title: str, way: str, before: int, after: int | None, over: Mapping[str, float], num_rounds: int
) -> list[Result]:
    """How long no step is taken, by each side and over the others; and how many samples were lost or repeated.

    A node joins or leaves, so that there are ``after`` of them; None: a worker is killed.
    """
    names = [TORCHRUN, RESTART, LIVE, *([TORCHFT] if TORCHFT in over and _has_torchft() else [])]
    costs: list[Mapping[str, Any]] = []

    def read(name: str) -> Readings:
        if after is None:
            run, killed_at, told = _killed(name, way, before)
            stall = gap_after(run.steps, killed_at)
        else:
            run, told = _changed(name, way, before, after)
            stall = longest_gap(run.steps, after)
        costs.extend(told)
        values = {
            STALL: stall,
            LOST: float(len(run.drawn.keys() - run.trained.keys())),
            REPEATED: float(sum(count - 1 for count in run.trained.values())),
        }
        return Readings(values=values, work=(run.num_ranks if after is not None else before,))

    sides = [Side(name=name, run=partial(read, name)) for name in names]

    def run_side(side: Side) -> Readings:
        done = side.run()
        assert isinstance(done, Readings)
        return done

    values = run_rounds(sides, run_side, num_rounds=num_rounds, num_warmup_rounds=0)
    _, *of_sides = values
    columns = {name: [one[STALL] for one in mine] for name, mine in zip(names, of_sides, strict=True)}
    ratios = [
        Samples(
            name=f"live over {name}",
            occasions=[[ratio] for ratio in paired_ratios(columns[LIVE], columns[name])],
            unit="count",
            target=QuantileTarget(quantile=0.5, at_most=at_most),
        )
        for name, at_most in over.items()
        if name in columns
    ]
    samples = [
        f"{name}: {_span(one[LOST] for one in mine)} samples lost, {_span(one[REPEATED] for one in mine)} repeated"
        for name, mine in zip(names, of_sides, strict=True)
    ]
    compared = comparison_of(STALL, sides, values)
    notes = (*samples, *_told_of(costs))
    return [
        QuantileTable(
            title=f"{title}: no step",
            rows=tuple(Samples(name=name, occasions=[[each] for each in mine]) for name, mine in columns.items()),
            notes=(
                *notes,
                f"torchrun against itself: {compared.rows[0].aa_interval[0]:.2f} to "
                f"{compared.rows[0].aa_interval[1]:.2f}",
            ),
        ),
        QuantileTable(title=f"{title}: live over others, round by round", rows=tuple(ratios)),
    ]


def _span(values: Iterator[float]) -> str:
    found = sorted(values)
    return f"{found[0]:.0f}" if found[0] == found[-1] else f"{found[0]:.0f} to {found[-1]:.0f}"


def _told_of(costs: Sequence[Mapping[str, Any]]) -> list[str]:
    """What survivors said of live changes, in words."""
    if not costs:
        return []
    parts = {part: median(each["seconds"].get(part, 0.0) for each in costs) for part in costs[0]["seconds"]}
    seconds = ", ".join(f"{part} {shown_value(value, 'seconds')}" for part, value in parts.items())
    moved = max(each.get("moved_bytes", 0) for each in costs)
    extra = max(each.get("extra_bytes", 0) for each in costs)
    return [
        f"live, medians of survivors: {seconds}; at most {shown_value(moved, 'bytes')} sent by one of them, "
        f"{shown_value(extra, 'bytes')} of extra memory on one"
    ]


def _groups(*, num_rounds: int) -> QuantileTable:
    """How long groups of four ranks take to form, as each survivor has measured it."""
    occasions = []
    for _ in range(num_rounds):
        _, told = _changed(LIVE, "ddp", 3, 4)
        occasions.append([each["seconds"]["forming"] for each in told])
    rows = (Samples(name="the default group, and all that are made of it", occasions=occasions, target=GROUPS),)
    return QuantileTable(title="Groups of four ranks are formed anew", rows=rows)


def _quiet(*, num_rounds: int) -> Result:
    """What a step of 50 ms takes where nothing happens: two nodes, whose members could change live or by a restart."""

    def read(name: str) -> Reading:
        with _nodes(name, "busy") as job:
            for _ in range(2):
                job.start_node()
            run = _wait(job, lambda run: run.num_ranks == 2 and run.num_steps_among(2) >= _NUM_QUIET)
        times = sorted({step: when for step, when, ranks in run.steps if ranks == 2}.values())[-_NUM_QUIET // 2 :]
        return Reading(value=(times[-1] - times[0]) / (len(times) - 1), work=2)

    sides = [
        Side(name=name, run=partial(read, name), claim=_COSTS if name == LIVE else None) for name in (RESTART, LIVE)
    ]
    return compare(
        "A step of about 50 ms, two nodes, nothing happens", sides, num_rounds=num_rounds, num_warmup_rounds=0
    )


def _has_torchft() -> bool:
    return importlib.util.find_spec("torchft") is not None
