"""Sampling: what the system tells of workers: processor time, memory, threads, children, and what they have of GPUs."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from elastic_ext.ranks.processes import Process

__all__ = ["GpuProbe", "GpuUse", "NvidiaGpus", "ProcessTable", "Sample"]

_logger = logging.getLogger(__name__)

_PROC = Path("/proc")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TREE_SECONDS = 5.0  # who has started whom is looked up so often: that takes a look at every process there is


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What a worker and the processes that it has started take."""

    state: str
    """The worker's own, a letter as Linux has it."""
    cpu_percent: float | None
    """Of one core, since the sample before; None in the first."""
    memory_bytes: int
    """What they share is counted as often as they have it."""
    num_threads: int
    """The worker's own."""
    children: tuple[int, ...]
    """The pids of those that it has started, and those these have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuUse:
    """What a process has of the machine's GPUs."""

    memory_bytes: int | None
    percent: float | None
    """Of the time, on the busiest one; None where that is not told."""


class GpuProbe(Protocol):
    """What tells of processes on GPUs."""

    def by_pid(self) -> Mapping[int, GpuUse]:
        """What each process has that is on one."""

    def close(self) -> None:
        """Let go of the driver."""


@dataclass(frozen=True, slots=True)
class _Stat:
    """What stands in /proc/<pid>/stat."""

    state: str
    parent: int
    ticks: int
    num_threads: int
    start_ticks: int
    memory_bytes: int


class ProcessTable:
    """Samples of processes and those that they have started."""

    def __init__(self) -> None:
        self._children: dict[int, list[int]] = {}
        self._looked_up_at: float | None = None
        self._ticks: dict[int, tuple[float, int, int]] = {}  # pid -> when, start, ticks of it and its children

    def sample(self, process: Process, now: float) -> Sample | None:
        """What ``process`` takes at the time ``now``; None if it has ended."""
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
        return Sample(
            state=own.state,
            cpu_percent=percent,
            memory_bytes=sum(each.memory_bytes for each in stats),
            num_threads=own.num_threads,
            children=tuple(children),
        )

    def _look_up(self, now: float) -> None:
        """Find out who has started whom, now and then."""
        if self._looked_up_at is not None and now - self._looked_up_at < _TREE_SECONDS:
            return
        self._looked_up_at = now
        self._children = {}
        for entry in os.listdir(_PROC):
            if entry.isdecimal() and (found := _stat_of(int(entry))) is not None:
                self._children.setdefault(found.parent, []).append(int(entry))

    def _below(self, pid: int) -> list[int]:
        found = list(self._children.get(pid, ()))
        for each in found:  # which grows
            found += self._children.get(each, ())
        return found


class NvidiaGpus:
    """NVIDIA's GPUs, as the driver's library tells of them."""

    def __init__(self, library: Any, handles: Sequence[Any]) -> None:
        self._library = library
        self._handles = handles
        self._told_at = [0] * len(handles)  # by the driver's clock: what is older is not told again

    @classmethod
    def open(cls) -> NvidiaGpus | None:
        """Those of this machine; None where there are none, or no driver."""
        import pynvml

        try:
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            _logger.debug("nothing is seen of GPUs: %s", error)
            return None
        return cls(pynvml, handles)

    def by_pid(self) -> Mapping[int, GpuUse]:
        """What each process has that is on one; in a container that has processes of its own, mostly nothing."""
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
    """What the system tells of a process; None if it has gone."""
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
