"""The stacks of all threads of a node's workers: collected when training hangs, parsed, and summed up in a line."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path, PurePath

from elastic_ext.ranks.heartbeat import HeartbeatReading, ask_for_stacks, heartbeat_file, read_heartbeat, stacks_pipe
from elastic_ext.ranks.processes import ProcessIdentity, process_of
from elastic_ext.records.files import write_whole

from .monitor import Watched

__all__ = ["Captured", "Frame", "Thread", "Where", "capture", "parse_stacks", "told_apart", "where_of"]

_logger = logging.getLogger(__name__)


# --- stacks as faulthandler writes them, read, and told in a line ----------------------------------------------------

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "/elastic_ext/", "<frozen ")
_TOGETHER = (
    "/torch/distributed/",
    "/torch/nn/parallel/distributed.py",
    "/torch/autograd/graph.py",  # a backward pass, in which gradients are shared
    "/torch/cuda/__init__.py",
    "/elastic_ext/ranks/group.py",
    "/elastic_ext/fsdp/reshard/exchange.py",
)


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a thread's stack: a function that is being run."""

    file: str
    line: int | None
    function: str

    @property
    def is_in_a_library(self) -> bool:
        """Whether the function belongs to a library, such as torch or this one, and not to the user's script."""
        return any(part in self.file for part in _LIBRARIES)

    def __str__(self) -> str:
        return f"{PurePath(self.file).name}:{'?' if self.line is None else self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread of a process with its stack; the innermost function comes first."""

    ident: int
    frames: tuple[Frame, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """Where in its code a rank's training thread is."""

    rank: int
    thread: str
    frame: Frame | None
    """The innermost frame of the user's script, else the innermost of all; None where the thread runs no Python."""
    within: Frame | None
    """The innermost frame of all, where that is not ``frame``."""

    @property
    def is_together(self) -> bool:
        """Whether the rank is in code that all ranks run together, such as a collective: it most likely waits there."""
        innermost = self.within or self.frame
        return innermost is not None and any(part in innermost.file for part in _TOGETHER)

    def __str__(self) -> str:
        told = "no Python function" if self.frame is None else str(self.frame)
        return f"rank {self.rank}, {self.thread}: {told}" + (f" ({self.within})" if self.within else "")


def parse_stacks(text: str) -> tuple[Thread, ...]:
    """The threads of faulthandler's last dump in ``text``, in its order; other lines are skipped."""
    threads: list[tuple[int, list[Frame]]] = []
    seen: set[int] = set()
    for line in text.splitlines():
        head = _THREAD.match(line)
        if head is not None:
            ident = int(head[1], 16)
            if ident in seen:  # another dump begins
                threads, seen = [], set()
            seen.add(ident)
            threads.append((ident, []))
        elif threads and (found := _FRAME.fullmatch(line)) is not None:
            threads[-1][1].append(Frame(found[1], None if found[2] == "???" else int(found[2]), found[3]))
    return tuple(Thread(ident, tuple(frames)) for ident, frames in threads)


def where_of(rank: int, threads: Sequence[Thread], thread: int) -> Where | None:
    """Where a rank is that trains in the thread with the id ``thread``; None if it is not among ``threads``."""
    found = next((each for each in threads if each.ident == thread), None)
    if found is None:
        return None
    name = "MainThread" if found is threads[-1] else f"thread 0x{thread:x}"  # the oldest comes last
    frames = found.frames
    own = next((each for each in frames if not each.is_in_a_library), None) or (frames[0] if frames else None)
    within = frames[0] if frames and frames[0] is not own else None
    return Where(rank=rank, thread=name, frame=own, within=within)


def told_apart(found: Sequence[Where]) -> str:
    """The ranks to look at first, in words: those outside of collectives while others are in one; empty if none is."""
    apart = [each for each in found if not each.is_together]
    if not apart or len(apart) == len(found):
        return ""
    others = [each for each in found if each.is_together]
    told = "; ".join(str(each) for each in apart)
    verb = "is" if len(others) == 1 else "are"
    return f"{told}, while {_ranks(others)} {verb} in code that all ranks run together"


def _ranks(found: Sequence[Where]) -> str:
    numbers = [str(rank) for rank in sorted(each.rank for each in found)]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


# --- what every thread of a node's workers does, asked before anything is done about a hang --------------------------
# A worker with a heartbeat writes its Python functions itself, at a signal, whatever it hangs in; of others, and of one
# that is stopped, there is what the system tells of its threads, and what ``py-spy`` finds where it is installed.

_POLL_SECONDS = 0.05
_NUM_STILL = 5  # polls in which nothing is added: a dump, which takes milliseconds, has ended
_MOST_BYTES = 1 << 20
_MOST_FILES = 10
_MOST_THREADS = 64
_NO_STACKS = "it did not write its stacks within {:.1f} s"
_STOPPED = "it is stopped (state T), and writes nothing"
_SYSCALLS = {
    "x86_64": {
        0: "read",
        1: "write",
        7: "poll",
        16: "ioctl",
        23: "select",
        34: "pause",
        35: "nanosleep",
        42: "connect",
        45: "recvfrom",
        47: "recvmsg",
        61: "wait4",
        74: "fsync",
        202: "futex",
        230: "clock_nanosleep",
        232: "epoll_wait",
        257: "openat",
        270: "pselect6",
        271: "ppoll",
        281: "epoll_pwait",
    },
    "aarch64": {
        22: "epoll_pwait",
        29: "ioctl",
        56: "openat",
        63: "read",
        64: "write",
        72: "pselect6",
        73: "ppoll",
        82: "fsync",
        98: "futex",
        101: "nanosleep",
        115: "clock_nanosleep",
        203: "connect",
        207: "recvfrom",
        212: "recvmsg",
        260: "wait4",
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """The stacks of a node's workers, as they were captured."""

    path: Path | None
    """The file that has all the stacks; None where it could not be written."""
    places: tuple[Where, ...]
    """Where each rank is whose stack is known, for the log."""
    look_at: str
    """The ranks that are elsewhere than the others, in words; empty where none is."""


@dataclass(slots=True)
class _StacksRequest:
    """A worker that was asked for its stacks, and its answer so far."""

    worker: Watched
    state: str
    reading: HeartbeatReading | None = None
    file: int = -1
    start: int = 0
    """The offset in the file at which this answer begins."""
    size: int = 0
    num_still: int = 0
    text: str = ""
    problem: str = "it does not write its stacks when it is asked to"

    @property
    def is_done(self) -> bool:
        """Whether the worker has written its stacks, or writes none."""
        return self.file == -1 or (self.size > self.start and self.num_still >= _NUM_STILL)


def capture(
    workers: Sequence[Watched],
    *,
    run_dir: Path,
    pulse_dir: Path,
    reason: str,
    patience_seconds: float = 5.0,
    py_spy: str | None = None,
) -> Captured:
    """Ask all ``workers`` for their stacks, and write them into a file in ``run_dir``.

    A worker is asked over its pipe first, then by a signal, then by the program ``py_spy`` if its path is given: in all
    at most 2.5 times ``patience_seconds``. Nothing is raised: the hang is the error to be reported.
    """
    asked = [_prepared(each, pulse_dir) for each in workers]
    by_thread = [each for each in asked if each.file != -1 and ask_for_stacks(stacks_pipe(pulse_dir, each.worker.seat))]
    _wait(by_thread, patience_seconds / 2)
    by_signal = [each for each in asked if each.file != -1 and not each.text]
    for each in by_signal:
        _send_signal(each)
    _wait(by_signal, patience_seconds)
    for each in asked:
        _close(each)
    _ask_py_spy([each for each in asked if not each.text], py_spy, patience_seconds)
    places = [found for each in asked if (found := _where(each)) is not None]
    look_at = told_apart(places)
    head = [f"{datetime.now(timezone.utc).isoformat(timespec='seconds')}: {reason}", *map(str, places)]
    if look_at:
        head.append(f"look at this first: {look_at}")
    sections = [_section(each, _MOST_BYTES // max(len(asked), 1)) for each in asked]
    return Captured(path=_write("\n".join([*head, "", *sections]), run_dir), places=tuple(places), look_at=look_at)


# --- by itself ------------------------------------------------------------------------------------------------------


def _prepared(worker: Watched, pulse_dir: Path) -> _StacksRequest:
    """The request for a worker's stacks, with the open file that the worker writes them to, if it does."""
    asked = _StacksRequest(worker=worker, state=_state_of(worker.process.pid))
    reading = asked.reading = read_heartbeat(heartbeat_file(pulse_dir, worker.seat))
    if reading is None or reading.stacks_signal == 0:
        return asked
    if _state_of(reading.pid) in ("T", "t"):
        asked.problem = _STOPPED
        return asked
    try:
        if process_of(reading.pid) == ProcessIdentity(pid=reading.pid, start_ticks=reading.start_ticks):
            asked.file = _open_stacks(reading)
            asked.start = asked.size = os.fstat(asked.file).st_size
    except OSError as error:
        asked.problem = f"it could not be asked for its stacks: {error}"
        _close(asked)
    return asked


def _send_signal(asked: _StacksRequest) -> None:
    """Signal a worker, so that its faulthandler writes the stacks even where no Python code can run."""
    reading = asked.reading
    assert reading is not None, "its heartbeat says where it writes"
    try:
        process = os.pidfd_open(reading.pid)
    except OSError:
        return
    try:
        is_it = process_of(reading.pid) == ProcessIdentity(pid=reading.pid, start_ticks=reading.start_ticks)
        if is_it and _catches(reading.pid, reading.stacks_signal):  # else it would end, as another program would
            signal.pidfd_send_signal(process, reading.stacks_signal)
    except OSError as error:
        asked.problem = f"it could not be asked for its stacks: {error}"
    finally:
        os.close(process)


def _open_stacks(reading: HeartbeatReading) -> int:
    """The open file that a process writes its stacks to; OSError where its descriptor is of another file by now."""
    path = f"/proc/{reading.pid}/fd/{reading.stacks_descriptor}"
    if os.stat(path).st_ino != reading.stacks_inode:
        raise FileNotFoundError(f"it has closed its stacks file, and {path} is another file now")
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _wait(asked: Sequence[_StacksRequest], patience_seconds: float) -> None:
    """Wait until all asked workers have written their stacks, or the time is over, and read what they wrote."""
    deadline = time.monotonic() + patience_seconds
    while not all(each.is_done for each in asked) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        for each in asked:
            if each.file != -1:
                size = os.fstat(each.file).st_size
                each.num_still = each.num_still + 1 if size == each.size else 0
                each.size = size
    for each in asked:
        if each.file == -1:
            continue
        each.text = os.pread(each.file, min(each.size - each.start, _MOST_BYTES), each.start).decode(errors="replace")
        each.problem = "" if each.text else _NO_STACKS.format(patience_seconds)


def _close(asked: _StacksRequest) -> None:
    if asked.file != -1:
        os.close(asked.file)
        asked.file = -1


def _where(asked: _StacksRequest) -> Where | None:
    if asked.reading is None or not asked.text:
        return None
    return where_of(asked.worker.rank, parse_stacks(asked.text), asked.reading.thread)


# --- from outside ---------------------------------------------------------------------------------------------------


def _ask_py_spy(asked: Sequence[_StacksRequest], py_spy: str | None, patience_seconds: float) -> None:
    """Have py-spy dump the stacks of workers that did not write any themselves."""
    if py_spy is None:
        return
    running: list[tuple[_StacksRequest, subprocess.Popen[bytes]]] = []
    for each in asked:
        command = [py_spy, "dump", "--nonblocking", "--pid", str(each.worker.process.pid)]
        try:
            started = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        except OSError as error:
            each.problem += f"; py-spy: {error}"
            continue
        running.append((each, started))
    deadline = time.monotonic() + patience_seconds
    for each, started in running:
        try:
            output, _ = started.communicate(timeout=max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            started.kill()
            output, _ = started.communicate()
        each.text = output[:_MOST_BYTES].decode(errors="replace")
        each.problem += "; py-spy says:"


def _threads(pid: int) -> list[str]:
    """A line for each thread of a process, by /proc: its name, its state, and the system call that it waits in."""
    lines = []
    with contextlib.suppress(OSError):
        threads = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
        for thread in threads[:_MOST_THREADS]:
            folder = Path(f"/proc/{pid}/task/{thread}")
            call = _read(folder / "syscall").partition(" ")[0]
            name = _SYSCALLS.get(platform.machine(), {}).get(int(call), "") if call.isdecimal() else ""
            told = [_read(folder / "comm"), f"state {_state_of(pid, thread)}"]
            told += [f"in {waits}" for waits in [_read(folder / "wchan")] if waits not in ("", "0")]
            told += [f"system call {call}{f' ({name})' if name else ''}"] if call.isdecimal() else []
            lines.append(f"  {thread}: {', '.join(told)}")
        if len(threads) > _MOST_THREADS:
            lines.append(f"  and {len(threads) - _MOST_THREADS} more")
    return lines or ["  none: the process has ended, or is another user's"]


def _state_of(pid: int, thread: int | None = None) -> str:
    """The state of a process or thread as Linux' letter; empty where it has gone."""
    text = _read(Path(f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"))
    return text.rpartition(")")[2].split()[0] if text else ""


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    lines = _read(Path(f"/proc/{pid}/status")).splitlines()
    return any(line.startswith("SigCgt:") and int(line.split()[1], 16) >> (number - 1) & 1 for line in lines)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


# --- the file -------------------------------------------------------------------------------------------------------


def _section(asked: _StacksRequest, most: int) -> str:
    """The section of the stacks file for one worker."""
    worker = asked.worker
    lines = [f"==== rank {worker.rank} (process {worker.process.pid}, state {asked.state or 'ended'})"]
    if asked.problem:
        lines.append(asked.problem)
    lines += [asked.text.strip(), "its threads, as the system has them:", *_threads(worker.process.pid), ""]
    text = "\n".join(line for line in lines if line) + "\n"
    return text if len(text) <= most else text[:most] + "\n... (cut off here)\n"


def _write(text: str, run_dir: Path) -> Path | None:
    """Write a stacks file into the run directory, where the newest few are kept; None where that fails."""
    folder = run_dir / "stacks"
    path = folder / f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S-%f}.txt"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, text.encode(errors="replace"), durable=False)
        for old in sorted(folder.glob("*.txt"))[:-_MOST_FILES]:
            old.unlink(missing_ok=True)
    except OSError as error:
        _logger.warning("the stacks of the workers cannot be written: %s", error)
        return None
    return path
