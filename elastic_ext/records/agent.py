"""Records of the agent, as they stand in the run directory's files; each of them has one writer, the agent.

    agent.json         AgentRecord        who the agent of this node is, and where its things lie
    membership.json    MembershipPlan     which nodes the job runs on, and since when (members/plan.py); some workers
                                          come to another one while they train, and watch it
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
"""The most bytes that any of the agent's files has."""

WorkerState = Literal["running", "succeeded", "failed", "left"]
"""``left``: the worker has ended with the exit status of one that was told to end, and saves first."""


class Since:
    """The time since which records count: a reader leaves out those of an earlier round or agent, by comparing times.

    If the machine's clock is put back meanwhile, ``seconds`` goes back as far, so that new records still count.
    """

    def __init__(
        self, began: float, *, time_of_day: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``began`` in seconds since 1970, as told by the time of day now; ``clock`` only ever goes on."""
        self._began = began
        self._time_of_day, self._clock = time_of_day, clock
        self._ahead = time_of_day() - clock()

    @property
    def seconds(self) -> float:
        """The moment in seconds since 1970, by the present time of day; never later than ``began``."""
        return self._began + min(self._time_of_day() - self._clock() - self._ahead, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentRecord(JsonRecord):
    """Who the agent of this node is, and where its things lie."""

    node_id: str
    """The node's id in the job; another node that starts in its place has another one."""
    job: str
    run_id: str
    """The launcher's id of the run, which nodes that belong together have in common."""
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
    """The socket at which the agent takes requests; empty where it takes none."""
    log_folder: str
    """The folder of what workers print, where that is redirected; empty where it is not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MasterRecord(JsonRecord):
    """The master that an agent speaks with, or has spoken with last."""

    address: str
    """The master's address, HOST:PORT."""
    token_file: str
    """The file of the token that the master asks for; empty where it asks for none."""
    ca_file: str
    """The file by which the master's certificate is checked; empty where it has none."""
    pid: int
    """The master's process, where the agent has started it; 0 where somebody else has."""
    job_id: str
    epoch: int
    time: float
    """When the agent joined, seconds since 1970."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSeen:
    """One worker, as its agent sees it; None for what is not known."""

    local_rank: int
    rank: int
    pid: int
    start_ticks: int
    state: WorkerState
    exit_code: int | None = None
    """The worker's exit status; below zero, the signal that ended it, negated."""
    cpu_percent: float | None = None
    """Processor time since the record before, in percent of one core."""
    memory_bytes: int | None = None
    """The machine's memory that the worker's own process holds."""
    children_bytes: int | None = None
    """The machine's memory that the processes started by the worker hold, such as those that load samples; memory that
    they share counts once for each."""
    num_threads: int | None = None
    num_processes: int | None = None
    """The number of processes: the worker and those started by it."""
    gpu_percent: float | None = None
    gpu_memory_bytes: int | None = None
    step: int | None = None
    """Steps that the worker's trainer has taken."""
    steps_per_second: float | None = None
    activity: str | None = None
    """What the worker's trainer does, in a word."""
    activity_seconds: float | None = None
    """How long the worker's trainer has been at its activity."""
    trouble: str | None = None
    """Why the worker makes no progress, in a sentence."""
    seat: int | None = None
    """The number by which the worker's files are named; None in a record of an earlier version, where it is the rank.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersRecord(JsonRecord):
    """The states of all workers on a node, as the agent sees them."""

    time: float
    restart: int
    """How often the workers of this job have been restarted after a failure."""
    membership_version: int
    workers: tuple[WorkerSeen, ...]
    waiting: str = ""
    """Which nodes wait to join the job and for what, a sentence; empty where none does."""
