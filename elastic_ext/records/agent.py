"""Records of the agent, as they stand in the run directory's files; each of them has one writer, the agent.

    agent.json         AgentRecord        who the agent of this node is, and where its things lie
    membership.json    MembershipPlan     which nodes the job runs on, and since when
    hardware.json      NodeHardware       what the machine has, as the doctor knows it
    master.json        MasterRecord       the master that the agent speaks with, if there is one
    workers.json       WorkersRecord      what the agent sees of its workers, every few seconds

A node is one agent with its workers, whatever machine it is on; a round is the time between two meetings of all nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .json import JsonRecord

__all__ = [
    "AGENT_FILE",
    "EVENTS_FILE",
    "HARDWARE_FILE",
    "MASTER_FILE",
    "MEMBERSHIP_FILE",
    "MOST_BYTES",
    "WORKERS_FILE",
    "AgentRecord",
    "MasterRecord",
    "MembershipPlan",
    "NodeShare",
    "Since",
    "WorkerSeen",
    "WorkerState",
    "WorkersRecord",
]

AGENT_FILE = "agent.json"
HARDWARE_FILE = "hardware.json"
MASTER_FILE = "master.json"
MEMBERSHIP_FILE = "membership.json"
WORKERS_FILE = "workers.json"
EVENTS_FILE = "events-agent.jsonl"
MOST_BYTES = 4 << 20
"""More is in none of these files."""

WorkerState = Literal["running", "succeeded", "failed", "left"]
"""``left`` where it has ended with the status of those that were told to end, and save first."""


class Since:
    """A moment that times of day in records are compared with, also after the machine's clock was put back."""

    def __init__(
        self, began: float, *, time_of_day: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``began`` in seconds since 1970, as told by the time of day now; ``clock`` only ever goes on."""
        self._began = began
        self._time_of_day, self._clock = time_of_day, clock
        self._ahead = time_of_day() - clock()

    @property
    def seconds(self) -> float:
        """When it was, since 1970, by the time of day as it is now; no later than it was told."""
        return self._began + min(self._time_of_day() - self._clock() - self._ahead, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentRecord(JsonRecord):
    """Who the agent of this node is, and where its things lie."""

    node_id: str
    """What the job calls this node; another one that starts in its place is called otherwise."""
    job: str
    run_id: str
    """The launcher's, which nodes that belong together have in common."""
    host: str
    pid: int
    start_ticks: int
    """When the process was started, in ticks since the machine was: with the pid it names one process for good."""
    time: float
    """When the agent was started, seconds since 1970."""
    version: str
    config_file: str
    memory_folder: str
    """The folder in memory that goes with the agent."""
    socket: str
    """Where the agent is spoken to; empty where it listens to nobody."""
    log_folder: str
    """What workers print, where it is redirected; empty where it is not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MasterRecord(JsonRecord):
    """The master that an agent speaks with, or has spoken with last."""

    address: str
    """HOST:PORT."""
    token_file: str
    """Where the token lies that it wants; empty where it wants none."""
    ca_file: str
    """What its certificate is checked by; empty where it has none."""
    pid: int
    """Its process, where the agent has started it; 0 where somebody else has."""
    job_id: str
    epoch: int
    time: float
    """When the agent joined, seconds since 1970."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeShare:
    """A node's part in a job."""

    node_id: str
    host: str
    first_rank: int
    num_workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MembershipPlan(JsonRecord):
    """Which nodes the job runs on, in the order of their ranks; a version holds until there is a larger one."""

    version: int
    nodes: tuple[NodeShare, ...]
    reason: str
    time: float
    """When it was made, seconds since 1970."""

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes."""
        return sum(node.num_workers for node in self.nodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSeen:
    """One worker, as its agent sees it; None for what is not known."""

    local_rank: int
    rank: int
    pid: int
    start_ticks: int
    state: WorkerState
    exit_code: int | None = None
    """Below zero, the signal that ended it."""
    cpu_percent: float | None = None
    """Of one core, since the record before."""
    memory_bytes: int | None = None
    """What it and the processes that it has started hold of the machine's memory."""
    num_threads: int | None = None
    num_processes: int | None = None
    """Itself and those that it has started."""
    gpu_percent: float | None = None
    gpu_memory_bytes: int | None = None
    step: int | None = None
    """Steps that its trainer has taken."""
    steps_per_second: float | None = None
    activity: str | None = None
    """What its trainer does, in a word."""
    activity_seconds: float | None = None
    """... and for how long it has."""
    trouble: str | None = None
    """Why it does not get on, in a sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersRecord(JsonRecord):
    """What the agent sees of its workers."""

    time: float
    restart: int
    """How often the workers of this job have been restarted after a failure."""
    membership_version: int
    workers: tuple[WorkerSeen, ...]
