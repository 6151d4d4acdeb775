"""The records in the files of a run directory, read in bounded time and memory; status.py says what they mean.

A file that is torn or damaged is named and left out. Nothing is written here, and no process is asked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from elastic_ext.agent.config_writer import is_running
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.errors import ConfigError, in_words
from elastic_ext.members.plan import MembershipPlan
from elastic_ext.profile.reader import NodeProfiles, profiled_seats, read_profiles
from elastic_ext.ranks.processes import ProcessIdentity, is_alive, process_of
from elastic_ext.records.agent import (
    AGENT_FILE,
    EVENTS_FILE,
    MASTER_FILE,
    MEMBERSHIP_FILE,
    MOST_BYTES,
    WORKERS_FILE,
    AgentRecord,
    MasterRecord,
    WorkersRecord,
)
from elastic_ext.records.files import open_regular, read_at_most, stamp_of
from elastic_ext.records.json import MAX_BYTES, object_of, record_of
from elastic_ext.records.member import MemberRecord
from elastic_ext.records.metrics import ModelProfile, RankMetrics

__all__ = ["CONFIG_FILE", "EventSeen", "RunFiles", "is_run_directory", "read_run_directory"]

CONFIG_FILE = "config.json"
_METRICS = re.compile(r"metrics-\d{1,9}\.json")
_MODEL = re.compile(r"model-\d{1,9}\.json")
_MEMBER = re.compile(r"member-\d{1,9}\.json")
_EVENTS = re.compile(r"events-(\d{1,9}|agent)\.jsonl")
_MOST_METRICS_BYTES = 64 << 10
_MOST_METRICS = 4096
_TAIL_BYTES = 16 << 10
_MOST_TAILS = 64
_MOST_EVENTS = 20
_MOST_WINDOWS = 32
_LATEST = 1e11  # seconds since 1970; what lies beyond is no date
_SLACK_SECONDS = 60.0
"""How far the clock may have been corrected while a process ran."""
_Record = TypeVar("_Record")


@dataclass(frozen=True, kw_only=True, slots=True)
class EventSeen:
    """An event in a run directory, with the process that wrote it."""

    time: float
    source: str
    """The writer of the event: ``agent``, or a rank, such as ``rank 3``."""
    step: int | None = None
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _WrittenBy:
    """The rank that an event is of."""

    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFiles:
    """What one run directory holds, and which of the processes that it names are alive on this machine."""

    path: str
    time: float
    """When the run directory was read, in seconds since 1970."""
    host: str
    """The name of the machine that has read it."""
    agent: AgentRecord | None = None
    is_agent_running: bool = False
    master: MasterRecord | None = None
    """The master that the agent speaks with, or has spoken with last."""
    membership: MembershipPlan | None = None
    workers: WorkersRecord | None = None
    metrics: tuple[RankMetrics, ...] = ()
    members: tuple[MemberRecord, ...] = ()
    """What the workers say of themselves as members of the job."""
    living: frozenset[int] = frozenset()
    """The pids in the workers' record and in the metrics whose processes are alive on this machine."""
    model: ModelProfile | None = None
    """The model that is trained, by the first rank that has written of it."""
    profiles: NodeProfiles = field(default_factory=NodeProfiles)
    config: ElasticConfig | None = None
    config_refusal: str = ""
    config_time: float | None = None
    """When the config file was written."""
    events: tuple[EventSeen, ...] = ()
    """The last events of all ranks and the agent, oldest first."""
    damaged: tuple[str, ...] = ()
    """The files that could not be read, each in a sentence."""


def is_run_directory(path: Path) -> bool:
    """Whether a folder has files of a run directory; OSError where it cannot be read."""
    known = (AGENT_FILE, MEMBERSHIP_FILE, WORKERS_FILE, CONFIG_FILE)
    return any(name in known or _METRICS.fullmatch(name) or _EVENTS.fullmatch(name) for name in os.listdir(path))


def read_run_directory(path: Path, *, now: float, host: str) -> RunFiles:
    """Read a run directory at ``now`` (seconds since 1970) on this machine, ``host``; OSError where that fails."""
    reader = _Reader(path)
    names = sorted(os.listdir(path))
    agent = reader.record(AGENT_FILE, MOST_BYTES, AgentRecord.from_json)
    config_file = path / CONFIG_FILE if agent is None else Path(agent.config_file)
    config, refusal = reader.config(config_file)
    stamp = _stamp_or_none(config_file)
    workers = reader.record(WORKERS_FILE, MOST_BYTES, WorkersRecord.from_json)
    metrics = [
        reader.record(name, _MOST_METRICS_BYTES, RankMetrics.from_json)
        for name in [name for name in names if _METRICS.fullmatch(name)][:_MOST_METRICS]
    ]
    is_agent_running = agent is not None and is_running(agent, path, host)
    if agent is not None and is_agent_running:
        agent = _started_by_clock(agent)
    found = tuple(sorted((each for each in metrics if each is not None), key=lambda each: each.rank))
    return RunFiles(
        path=str(path),
        time=now,
        host=host,
        agent=agent,
        is_agent_running=is_agent_running,
        master=reader.record(MASTER_FILE, MOST_BYTES, MasterRecord.from_json),
        membership=reader.record(MEMBERSHIP_FILE, MOST_BYTES, MembershipPlan.from_json),
        workers=workers,
        metrics=found,
        members=tuple(one for name in names if _MEMBER.fullmatch(name) and (one := reader.member(name))),
        living=_living(agent, workers, found, host),
        model=next((each for name in names if _MODEL.fullmatch(name) and (each := reader.model(name))), None),
        profiles=read_profiles(path, profiled_seats(path)[:_MOST_TAILS], num_windows=_MOST_WINDOWS),
        config=config,
        config_refusal=refusal,
        config_time=None if stamp is None else stamp / 1e9,
        events=reader.events([name for name in names if _EVENTS.fullmatch(name)]),
        damaged=tuple(reader.damaged),
    )


class _Reader:
    """Reads files of one run directory, and notes which are damaged."""

    def __init__(self, folder: Path) -> None:
        self.damaged: list[str] = []
        self._folder = folder

    def record(self, name: str, most_bytes: int, parse: Callable[[str], _Record]) -> _Record | None:
        """What ``parse`` makes of the file; None where there is none, or it is damaged."""
        try:
            data = read_at_most(self._folder / name, most_bytes)
            if len(data) > most_bytes:
                raise ValueError(f"it has more than {most_bytes} bytes")
            return parse(data.decode())
        except FileNotFoundError:
            return None
        except OSError as error:
            self.damaged.append(f"{name} cannot be read: {in_words(error)}")
        except ValueError as error:
            self.damaged.append(f"{name} is damaged, or another version's: {error}"[:300])
        return None

    def model(self, name: str) -> ModelProfile | None:
        return self.record(name, _MOST_METRICS_BYTES, ModelProfile.from_json)

    def member(self, name: str) -> MemberRecord | None:
        return self.record(name, _MOST_METRICS_BYTES, MemberRecord.from_json)

    def config(self, path: Path) -> tuple[ElasticConfig | None, str]:
        """The config in a config file, and why it is refused if it is; None and empty where there is no file."""
        try:
            return ElasticConfig.parse(read_at_most(path, MAX_BYTES)), ""
        except (FileNotFoundError, NotADirectoryError):
            return None, ""
        except OSError as error:
            return None, f"it cannot be read: {in_words(error)}"
        except ConfigError as error:
            return None, str(error)

    def events(self, names: list[str]) -> tuple[EventSeen, ...]:
        """The last events of all these event files; of too many files, of those written last."""
        stamps = {name: _stamp_or_none(self._folder / name) or 0 for name in names}
        found: list[EventSeen] = []
        for name in sorted(names, key=lambda name: stamps[name])[-_MOST_TAILS:]:
            lines, num_damaged = self._tail(name), 0
            for line in lines:
                event = _event_of(line, name)
                if event is None:
                    num_damaged += 1
                else:
                    found.append(event)
            if num_damaged:
                self.damaged.append(f"{name} has {num_damaged} damaged lines of the last {len(lines)}")
        return tuple(sorted(found, key=lambda event: event.time)[-_MOST_EVENTS:])

    def _tail(self, name: str) -> list[bytes]:
        """The last whole lines of an event file; a line without an end is still being written, and left out."""
        try:
            with open_regular(self._folder / name) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - _TAIL_BYTES, 0))
                lines = file.read(_TAIL_BYTES).split(b"\n")[:-1]
        except OSError as error:
            self.damaged.append(f"{name} cannot be read: {in_words(error)}")
            return []
        return lines[1:] if size > _TAIL_BYTES else lines


def _event_of(line: bytes, name: str) -> EventSeen | None:
    """The event in a line of the file ``name``; None where the line is none."""
    try:
        found = object_of(line.decode())
        source = "agent" if name == EVENTS_FILE else f"rank {record_of(_WrittenBy, found).rank}"
        event = record_of(EventSeen, {**found, "source": source})
    except ValueError:
        return None
    if not 0 <= event.time < _LATEST:
        return None
    return event if event.step is None or event.step >= 0 else replace(event, step=None)


def _living(
    agent: AgentRecord | None, workers: WorkersRecord | None, metrics: tuple[RankMetrics, ...], host: str
) -> frozenset[int]:
    """The pids of workers and of ranks' metrics whose processes are alive on this machine, not replaced by others."""
    exactly: dict[int, bool] = {}
    if workers is not None and agent is not None and agent.host == host:
        exactly = {
            each.pid: is_alive(ProcessIdentity(pid=each.pid, start_ticks=each.start_ticks)) for each in workers.workers
        }
    living = {pid for pid, lives in exactly.items() if lives}
    booted = _boot_time()
    for each in metrics:
        if each.host != host or each.pid in exactly or not 0 < each.pid < 1 << 31:
            continue
        process = process_of(each.pid)
        if process is not None and _started(process, booted) <= each.time + _SLACK_SECONDS:
            living.add(each.pid)
    return frozenset(living)


def _started_by_clock(agent: AgentRecord) -> AgentRecord:
    """An agent's record with its start by the clock as it is now, if the clock was put back since it started."""
    started = _started(ProcessIdentity(pid=agent.pid, start_ticks=agent.start_ticks), _boot_time())
    return replace(agent, time=started) if 0 < started < agent.time - _SLACK_SECONDS else agent


def _started(process: ProcessIdentity, booted: float) -> float:
    """When a process was started, in seconds since 1970."""
    return booted + process.start_ticks / os.sysconf("SC_CLK_TCK")


def _boot_time() -> float:
    """When this machine was started, seconds since 1970; 0 where it does not say."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return 0.0
    return next((float(line.split()[1]) for line in lines if line.startswith("btime ")), 0.0)


def _stamp_or_none(path: Path) -> int | None:
    """When a file was written, in nanoseconds since 1970."""
    try:
        stamp = stamp_of(path)
    except OSError:
        return None
    return None if stamp is None else stamp.modified_ns
