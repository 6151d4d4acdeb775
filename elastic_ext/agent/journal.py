"""The agent's journal, its events in the log and in the run directory; and the failure of a worker, in words."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from elastic_ext.ranks.notices import is_of_lost_peer
from elastic_ext.records.agent import EVENTS_FILE
from elastic_ext.records.files import append_line
from elastic_ext.records.metrics import JobEvent
from elastic_ext.training.checkpoints.signals import EXIT_STATUS

__all__ = [
    "OF_AGENT",
    "FailedNode",
    "Failure",
    "Journal",
    "ProcessEnd",
    "failure_of",
    "first_of",
    "hung",
    "is_consequence",
    "told",
]

_logger = logging.getLogger(__name__)


# --- what the agent saw and did, a line each: in the log, and in the run directory for those who come later ----------

OF_AGENT = -1
"""The rank in events that the agent itself writes."""


class Journal:
    """The events of one agent, each written to its log and to the events file of its run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / EVENTS_FILE
        self._has_warned = False
        self.restart = 0
        """How many failures of workers were counted so far in this job; each event is written with it."""
        self._listener: Callable[[JobEvent], None] | None = None

    def listen(self, listener: Callable[[JobEvent], None]) -> None:
        """Call ``listener`` with each event from now on, on the thread that writes the event."""
        self._listener = listener

    def tell(self, kind: str, text: str, *, is_bad: bool = False, **details: object) -> None:
        """Write an event, and a line in the log."""
        _logger.log(logging.ERROR if is_bad else logging.INFO, "%s", text)
        self._write(kind, text, details)

    def note(self, kind: str, text: str, **details: object) -> None:
        """Write an event without a line in the log."""
        self._write(kind, text, details)

    def tell_staged(self, why: str, path: Path | None) -> None:
        """Write what became of workers' staged copies; ``path`` is the checkpoint made of them, None if none was made.

        Without a ``path`` the log has no line of it.
        """
        if path is not None:
            self.tell("staged", why, path=str(path))
        else:
            self.note("staged", why)

    def _write(self, kind: str, text: str, details: Mapping[str, object]) -> None:
        event = JobEvent(
            time=time.time(), generation=self.restart, rank=OF_AGENT, step=-1, kind=kind, text=text, details=details
        )
        if self._listener is not None:
            self._listener(event)
        try:
            append_line(self._file, event.to_json())
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                _logger.warning("%s cannot be written (%s): this log alone has the events", self._file, error)


# --- how a worker failed, in words -----------------------------------------------------------------------------------
# Also whether a failure is the consequence of another worker's: pure, but for the clock.

_MOST_LINES = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The failure of one worker process: which one, on which node, its exit code, and its exception if it wrote one."""

    rank: int
    local_rank: int
    seat: int
    """The number by which the worker's files are named."""
    host: str
    node_id: str
    pid: int
    exit_code: int
    """The exit code of the process; below zero, the number of the signal that ended it."""
    time: float
    """When the agent saw the failure, in seconds since 1970."""
    message: str
    """The worker's exception in one line; empty where the worker wrote none."""
    traceback: str
    """The traceback that the worker wrote; empty where it wrote none."""
    is_hung: bool = False
    """Whether the worker was ended because it hung."""

    def to_row(self) -> dict[str, Any]:
        """The failure as values for JSON, by field."""
        return asdict(self)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Failure:
        """The failure that ``to_row`` made ``row`` of."""
        return cls(**row)

    @property
    def ending(self) -> str:
        """How the worker process ended, in words such as "exited with status 1"."""
        if self.is_hung:
            return "hung"
        if self.exit_code < 0:
            return f"ended by {_name_of(-self.exit_code)}"
        return f"exited with status {self.exit_code}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedNode:
    """The node whose worker failed: its host and its id."""

    host: str
    node_id: str


class ProcessEnd(Protocol):
    """What torch tells of a process that failed (its ``ProcessFailure``)."""

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    error_file_data: dict[str, Any]


def failure_of(rank: int, end: ProcessEnd, *, seat: int, node: FailedNode) -> Failure:
    """The Failure of a worker, made of torch's account of its process and of the exception that the worker wrote."""
    said = end.error_file_data.get("message")
    message, trace = "", ""
    if isinstance(said, dict):
        message = str(said.get("message", ""))
        extra = said.get("extraInfo")
        trace = str(extra.get("py_callstack", "")) if isinstance(extra, dict) else ""
    elif isinstance(said, str) and Path(end.error_file).exists():  # else torch has put a text of its own there
        message = said
    return Failure(
        rank=rank,
        local_rank=end.local_rank,
        seat=seat,
        host=node.host,
        node_id=node.node_id,
        pid=end.pid,
        exit_code=end.exitcode,
        time=time.time(),
        message=message,
        traceback=trace,
    )


def hung(rank: int, local_rank: int, pid: int, reason: str, *, seat: int, node: FailedNode) -> Failure:
    """The Failure of a worker that is ended because it hangs."""
    return Failure(
        rank=rank,
        local_rank=local_rank,
        seat=seat,
        host=node.host,
        node_id=node.node_id,
        pid=pid,
        exit_code=0,
        time=time.time(),
        message=reason,
        traceback="",
        is_hung=True,
    )


def is_consequence(failure: Failure) -> bool:
    """Whether a failure only follows from another's: its message says that the process at the other end was gone."""
    if failure.exit_code < 0:
        return False
    return is_of_lost_peer(failure.message)


def first_of(failures: Sequence[Failure]) -> Failure:
    """The failure that caused the others, as far as can be told: no consequence of another, and the first one seen."""
    return min(failures, key=lambda each: (is_consequence(each), each.exit_code == EXIT_STATUS, each.time, each.rank))


def told(failure: Failure) -> str:
    """A failure in words: the rank, the host, how the process ended, its message, and the end of its traceback."""
    words = (
        f"rank {failure.rank} (local rank {failure.local_rank}, pid {failure.pid}) on {failure.host} {failure.ending}"
    )
    if failure.message:
        words += f": {failure.message}"
    if failure.traceback:
        lines = failure.traceback.rstrip().splitlines()
        shown = lines if len(lines) <= _MOST_LINES else ["...", *lines[-_MOST_LINES:]]
        words += "\n" + "\n".join(f"    {line}" for line in shown)
    elif hint := _hint(failure.exit_code):
        words += f"; {hint}"
    return words


def _hint(exit_code: int) -> str:
    """What an exit code without a traceback may mean, or where to look; empty where there is nothing to say."""
    if exit_code == -signal.SIGKILL:
        return "either memory ran out and the kernel sent SIGKILL (`dmesg` says so), or a person or a scheduler sent it"
    if exit_code == -signal.SIGBUS:
        return "a process gets SIGBUS where /dev/shm or another file system in memory is full: see `df -h /dev/shm`"
    if exit_code in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGILL, -signal.SIGFPE):
        return "the process failed in native code: what it printed last may say where"
    return ""


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
