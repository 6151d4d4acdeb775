"""What an agent observes of its node's workers about once a second: their progress, processor time, memory and GPUs."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from elastic_ext.ranks.heartbeat import HeartbeatReading, heartbeat_file, read_heartbeat
from elastic_ext.ranks.processes import ProcessIdentity
from elastic_ext.records.agent import WorkerSeen, WorkersRecord, WorkerState
from elastic_ext.records.metrics import RankMetrics

from .hangs import Hang, HangLimits, Judge, WorkerLook, WorkerStanding, find_hang

__all__ = ["GpuProbe", "GpuUse", "Monitor", "NvidiaGpus", "ProcessSample", "ProcessTable", "Watched", "WorkersLook"]

_logger = logging.getLogger(__name__)


# --- what the system tells of workers: processor time, memory, threads, children, and what they have of GPUs ---------

_PROC = Path("/proc")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TREE_SECONDS = 5.0  # who has started whom is looked up so often: that takes a look at every process there is


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSample:
    """The processor time and memory of a worker and of the processes that it has started."""

    state: str
    """The state of the worker's own process, as Linux' letter, such as R or S."""
    cpu_percent: float | None
    """Processor time since the sample before, in percent of one core; None in the first sample."""
    memory_bytes: int
    """Resident memory of the worker's own process."""
    children_bytes: int
    """Resident memory of the processes that it has started; memory that they share counts once for each."""
    num_threads: int
    """How many threads the worker's own process has."""
    children: tuple[int, ...]
    """The pids of the worker's child processes, and of their children."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuUse:
    """The GPU memory and GPU time that one process uses."""

    memory_bytes: int | None
    percent: float | None
    """The part of the time that its busiest GPU computes for it, in percent; None where the driver does not tell."""


class GpuProbe(Protocol):
    """A source of what processes use of the machine's GPUs."""

    def by_pid(self) -> Mapping[int, GpuUse]:
        """What each process that uses a GPU has of it, by pid."""

    def close(self) -> None:
        """Let go of the driver."""


@dataclass(frozen=True, slots=True)
class _Stat:
    """The fields of /proc/<pid>/stat that are used here."""

    state: str
    parent: int
    ticks: int
    num_threads: int
    start_ticks: int
    memory_bytes: int


class ProcessTable:
    """Takes samples of processes, each with its child processes."""

    def __init__(self) -> None:
        self._children: dict[int, list[int]] = {}
        self._looked_up_at: float | None = None
        self._ticks: dict[int, tuple[float, int, int]] = {}  # pid -> when, start, ticks of it and its children

    def sample(self, process: ProcessIdentity, now: float) -> ProcessSample | None:
        """The sample of ``process`` and its children at the time ``now`` (``time.monotonic``); None if it has ended."""
        own = _stat_of(process.pid)
        if own is None or own.start_ticks != process.start_ticks or own.state in ("Z", "X"):
            self._ticks.pop(process.pid, None)
            return None
        self._look_up(now)
        children = self._below(process.pid)
        stats = [own, *(found for pid in children if (found := _stat_of(pid)) is not None)]
        ticks = sum(each.ticks for each in stats)
        before = self._ticks.get(process.pid)
        self._ticks[process.pid] = now, own.start_ticks, ticks
        percent = None
        if before is not None and before[1] == own.start_ticks and now > before[0]:
            used = max(ticks - before[2], 0)  # those of a child that has ended are gone
            percent = round(100 * used / _TICKS_PER_SECOND / (now - before[0]), 1)
        return ProcessSample(
            state=own.state,
            cpu_percent=percent,
            memory_bytes=own.memory_bytes,
            children_bytes=sum(each.memory_bytes for each in stats[1:]),
            num_threads=own.num_threads,
            children=tuple(children),
        )

    def _look_up(self, now: float) -> None:
        """List which process is whose child, at most every few seconds."""
        if self._looked_up_at is not None and now - self._looked_up_at < _TREE_SECONDS:
            return
        self._looked_up_at = now
        self._children = {}
        for entry in os.listdir(_PROC):
            if entry.isdecimal() and (found := _stat_of(int(entry))) is not None:
                self._children.setdefault(found.parent, []).append(int(entry))

    def _below(self, pid: int) -> list[int]:
        """The pids of a process' children, and of their children."""
        found = list(self._children.get(pid, ()))
        for each in found:  # which grows
            found += self._children.get(each, ())
        return found


class NvidiaGpus:
    """What processes use of NVIDIA GPUs, as the driver's library (NVML) tells it."""

    def __init__(self, library: Any, handles: Sequence[Any]) -> None:
        self._library = library
        self._handles = handles
        self._told_at = [0] * len(handles)  # by the driver's clock: what is older is not told again

    @classmethod
    def open(cls) -> NvidiaGpus | None:
        """The NVIDIA GPUs of this machine; None where there is no driver, or nothing that could ask it."""
        try:
            import pynvml
        except ImportError as error:
            _logger.debug("nothing is seen of GPUs: %s", error)
            return None
        try:
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            _logger.debug("nothing is seen of GPUs: %s", error)
            return None
        return cls(pynvml, handles)

    def by_pid(self) -> Mapping[int, GpuUse]:
        """What each process that uses a GPU has of it, by pid; mostly empty in a container with pids of its own."""
        memory: dict[int, int | None] = {}
        percent: dict[int, float] = {}
        for index, handle in enumerate(self._handles):
            try:
                for process in self._library.nvmlDeviceGetComputeRunningProcesses(handle):
                    used = process.usedGpuMemory
                    memory[process.pid] = None if used is None else (memory.get(process.pid) or 0) + used
                for told in self._library.nvmlDeviceGetProcessUtilization(handle, self._told_at[index]):
                    self._told_at[index] = max(self._told_at[index], told.timeStamp)
                    percent[told.pid] = max(percent.get(told.pid, 0.0), float(told.smUtil))
            except self._library.NVMLError as error:  # nothing new, or not of this device
                _logger.debug("GPU %d tells nothing of processes: %s", index, error)
        return {
            pid: GpuUse(memory_bytes=memory.get(pid), percent=percent.get(pid))
            for pid in memory.keys() | percent.keys()
        }

    def close(self) -> None:
        """Let go of the driver."""
        self._library.nvmlShutdown()


def _stat_of(pid: int) -> _Stat | None:
    """The fields of /proc/<pid>/stat of a process; None if it has gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            values = file.read().rpartition(b")")[2].split()  # its name, in parentheses, may hold anything
    except OSError:
        return None
    return _Stat(
        values[0].decode(),
        int(values[1]),
        int(values[11]) + int(values[12]),
        int(values[17]),
        int(values[19]),
        int(values[21]) * _PAGE_BYTES,
    )


# --- what the workers of a node are seen to do, about once a second --------------------------------------------------
# Whether that is a hang is decided in hangs.py. Nothing is written here, and nothing is done to the workers.

_MOST_METRICS_BYTES = 1 << 20
_RATE_SECONDS = 30.0  # that a step rate is the mean of, about


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """A worker process of this node that an agent watches: ranks, seat, pid, and how it has ended if it has."""

    local_rank: int
    rank: int
    seat: int
    """The number by which the worker's files are named."""
    process: ProcessIdentity
    state: WorkerState = "running"
    exit_code: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersLook:
    """What one look of an agent at its node's workers has shown."""

    record: WorkersRecord
    """What each worker does, for the file workers.json."""
    standings: tuple[WorkerStanding, ...]
    """Each worker's progress, for ``find_hang`` together with those of other nodes."""
    hang: Hang | None
    """A hang, judged by the workers of this node alone."""
    said: str
    """Which rank waits for which, in words, where that is no hang."""


class Monitor:
    """Observes the workers of one node about once a second: heartbeats, metrics, processor time, memory, and GPUs."""

    def __init__(
        self,
        *,
        run_dir: Path,
        pulse_dir: Path,
        limits: HangLimits | None,
        gpus: GpuProbe | None = None,
        every_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` gives the time of ``time.monotonic``. Without ``limits`` nothing is a hang."""
        self._run_dir = run_dir
        self._pulse_dir = pulse_dir
        self._gpus = gpus
        self._every_seconds = every_seconds
        self._clock = clock
        self._table = ProcessTable()
        self._judge = Judge(limits)
        self._due_at = clock()
        self._readings: dict[ProcessIdentity, HeartbeatReading] = {}  # the last that could be read
        self._rates: dict[ProcessIdentity, deque[tuple[float, int]]] = {}  # when, and how many steps had ended
        self._metrics: dict[int, tuple[int, RankMetrics]] = {}  # seat -> when its file was written; what it says

    def look(
        self,
        workers: Sequence[Watched],
        *,
        restart: int,
        membership_version: int,
        world_size: int,
        at_once: bool = False,
    ) -> WorkersLook | None:
        """What the workers do now; None, at no cost, where the next look is not due, unless ``at_once`` is given."""
        now = self._clock()
        if now < self._due_at and not at_once:
            return None
        self._due_at = now + self._every_seconds
        uses = {} if self._gpus is None else self._gpus.by_pid()
        samples = {each.seat: self._table.sample(each.process, now) for each in workers if each.state == "running"}
        readings = {
            each.seat: self._reading(each, found) for each in workers if (found := samples.get(each.seat)) is not None
        }
        workers = self.with_present_ranks(workers)
        observed = [each for each in workers if samples.get(each.seat) is not None]
        looks = [
            WorkerLook(rank=each.rank, pid=each.process.pid, reading=readings[each.seat], process_state=found.state)
            for each in observed
            if (found := samples[each.seat]) is not None
        ]
        standings = self._judge.look(now, looks)
        verdict = find_hang(standings, world_size=world_size)
        stand = {each.seat: standing for each, standing in zip(observed, standings, strict=True)}
        record = WorkersRecord(
            time=time.time(),
            restart=restart,
            membership_version=membership_version,
            workers=tuple(
                self._seen(
                    each, now, restart, samples.get(each.seat), readings.get(each.seat), stand.get(each.seat), uses
                )
                for each in workers
            ),
        )
        return WorkersLook(record=record, standings=standings, hang=verdict.hang, said=verdict.said)

    def with_present_ranks(self, workers: Sequence[Watched]) -> tuple[Watched, ...]:
        """The workers with the ranks that their heartbeats told last: members may have changed since they started."""
        told = {each.process: self._readings.get(each.process) for each in workers}
        return tuple(
            each if (reading := told[each.process]) is None else replace(each, rank=reading.rank) for each in workers
        )

    def forget(self) -> None:
        """Forget the workers of the round before, as others start, and remove their heartbeat files."""
        self._judge.forget()
        self._readings.clear()
        self._rates.clear()
        self._metrics.clear()
        for kind in ("pulse-*", "stacks-*", "ended-*"):
            for file in self._pulse_dir.glob(kind):
                file.unlink(missing_ok=True)

    def count_anew(self) -> None:
        """Count steps per second, and how long a worker is where it is, from the next look on: the world is another.

        One that has joined takes over the steps of the others, which it has not taken in that time; others may take a
        step again that they had taken before.
        """
        self._rates.clear()
        self._judge.forget()

    def close(self) -> None:
        """Let go of the GPUs' driver."""
        if self._gpus is not None:
            self._gpus.close()

    def _reading(self, worker: Watched, sample: ProcessSample) -> HeartbeatReading | None:
        """The last heartbeat that was read of a worker, or of its child process that trains; None before the first."""
        reading = read_heartbeat(heartbeat_file(self._pulse_dir, worker.seat))
        if reading is not None and reading.pid in (worker.process.pid, *sample.children):
            self._readings[worker.process] = reading
        return self._readings.get(worker.process)

    def _seen(
        self,
        worker: Watched,
        now: float,
        restart: int,
        sample: ProcessSample | None,
        reading: HeartbeatReading | None,
        standing: WorkerStanding | None,
        uses: Mapping[int, GpuUse],
    ) -> WorkerSeen:
        """The record of one worker for workers.json."""
        if sample is None or standing is None:
            return WorkerSeen(
                local_rank=worker.local_rank,
                rank=worker.rank,
                pid=worker.process.pid,
                start_ticks=worker.process.start_ticks,
                state=worker.state,
                exit_code=worker.exit_code,
                seat=worker.seat,
            )
        step, rate = self._progress(worker, now, restart, sample, reading)
        gpu = [uses[pid] for pid in (worker.process.pid, *sample.children) if pid in uses]
        gpu_memory = [each.memory_bytes for each in gpu if each.memory_bytes is not None]
        return WorkerSeen(
            local_rank=worker.local_rank,
            rank=worker.rank,
            pid=worker.process.pid,
            start_ticks=worker.process.start_ticks,
            state="running",
            cpu_percent=sample.cpu_percent,
            memory_bytes=sample.memory_bytes,
            children_bytes=sample.children_bytes,
            num_threads=sample.num_threads,
            num_processes=1 + len(sample.children),
            gpu_percent=max((each.percent for each in gpu if each.percent is not None), default=None),
            gpu_memory_bytes=sum(gpu_memory) if gpu_memory else None,
            step=step,
            steps_per_second=rate,
            activity=standing.activity,
            activity_seconds=None if standing.activity is None else round(standing.seconds, 1),
            trouble=standing.reason or None,
            seat=worker.seat,
        )

    def _progress(
        self, worker: Watched, now: float, restart: int, sample: ProcessSample, reading: HeartbeatReading | None
    ) -> tuple[int | None, float | None]:
        """The last step of a worker and its steps per second, by its heartbeat, else by its metrics file."""
        if reading is None:
            return self._progress_by_metrics(worker, restart, sample)
        counted = self._rates.setdefault(worker.process, deque())
        if counted and reading.num_boundaries < counted[-1][1]:
            counted.clear()  # another training has begun in it
        counted.append((now, reading.num_boundaries))
        while len(counted) > 2 and counted[1][0] <= now - _RATE_SECONDS:
            counted.popleft()
        seconds = now - counted[0][0]
        return reading.step, (reading.num_boundaries - counted[0][1]) / seconds if seconds > 0 else None

    def _progress_by_metrics(
        self, worker: Watched, restart: int, sample: ProcessSample
    ) -> tuple[int | None, float | None]:
        """The last step of a worker and its steps per second, by the metrics file that it writes every few seconds."""
        file = self._run_dir / f"metrics-{worker.seat}.json"
        try:
            written = file.stat().st_mtime_ns
            if worker.seat not in self._metrics or self._metrics[worker.seat][0] != written:
                with open(file, "rb") as opened:
                    found = RankMetrics.from_json(opened.read(_MOST_METRICS_BYTES).decode())
                self._metrics[worker.seat] = written, found
        except (OSError, ValueError):
            return None, None
        metrics = self._metrics[worker.seat][1]
        if metrics.generation != restart or metrics.pid not in (worker.process.pid, *sample.children):
            return None, None
        return metrics.step, metrics.measures.steps_per_second
