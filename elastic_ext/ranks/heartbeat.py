"""A rank's heartbeat: how far the rank has come, written where its agent sees it; and its stacks, written
when they are asked for.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import logging
import mmap
import os
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from elastic_ext.records.files import write_whole

from .deadlines import OwnedThread
from .processes import do_in_forked_processes, is_alive, process_of, this_process
from .world import World

__all__ = [
    "Activity",
    "FileHeartbeat",
    "Heartbeat",
    "HeartbeatReading",
    "OwnStacks",
    "ask_for_stacks",
    "begin_heartbeat",
    "heartbeat_file",
    "read_heartbeat",
    "stacks_file",
    "stacks_pipe",
]

_logger = logging.getLogger(__name__)


# --- a process writes the stacks of its threads when it is asked to, through a pipe with a name ----------------------
# A thread of its own does that, as Python code: what it sees of the others is whole. It comes to its turn wherever the
# others are but in native code that keeps Python to itself; of such a process faulthandler, which a signal has write
# whatever there is, may tell something.

_JOIN_SECONDS = 1.0
_MOST_FRAMES = 100


class OwnStacks:
    """A thread that writes the stacks of all threads to the open ``file`` when asked to through ``pipe``."""

    def __init__(self, pipe: Path, file: int) -> None:
        """Make the pipe and start the thread; OSError where there can be no such pipe or thread."""
        self._path = pipe
        self._file = file
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe, 0o600)
        self._pipe = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)
        self._inode = os.fstat(self._pipe).st_ino
        self._thread = OwnedThread(self._run, name="elastic_ext stacks", wake=self._wake)
        try:
            self._thread.start()
        except RuntimeError as error:  # this process, or its user, may have no more threads
            self.close()
            raise OSError(errno.EAGAIN, str(error)) from error

    def close(self) -> None:
        """End the thread, and remove the pipe."""
        has_ended = self._thread.close(_JOIN_SECONDS)
        self._path.unlink(missing_ok=True)
        if self._has_pipe() and has_ended:
            os.close(self._pipe)

    def _wake(self) -> None:
        if self._has_pipe():
            os.write(self._pipe, b".")

    def _has_pipe(self) -> bool:
        """Whether the script has left the pipe open: one that becomes a daemon closes all, and opens others."""
        try:
            return os.fstat(self._pipe).st_ino == self._inode
        except OSError:
            return False

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the script's threads
        with contextlib.suppress(OSError):  # the script has closed the pipe
            while os.read(self._pipe, 64) and not self._thread.stopping.is_set():
                data = _stacks().encode(errors="replace")
                with contextlib.suppress(OSError):  # the disk is full: who asks finds nothing
                    os.write(self._file, data)


def ask_for_stacks(pipe: Path) -> bool:
    """Ask the process that waits at ``pipe`` for its stacks; False where none waits."""
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.write(descriptor, b".") == 1
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _stacks() -> str:
    """The stacks of all threads but the present one, in the format of faulthandler."""
    lines = []
    for ident, frame in sys._current_frames().items():  # documented; the name says that it is for debugging
        if ident == threading.get_ident():
            continue
        lines.append(f"Thread 0x{ident:016x} (most recent call first):")
        found = traceback.extract_stack(frame, limit=None)[-_MOST_FRAMES:]
        lines += [f'  File "{each.filename}", line {each.lineno} in {each.name}' for each in reversed(found)]
        lines.append("")
    return "\n".join(lines) + "\n"


# --- how far one rank has come and what it does, where its agent can see it at any time ------------------------------
# A file of 128 bytes in a folder in memory, which the rank writes through a mapping in its training thread: that takes
# about a microsecond, and waits for nobody. What a reader makes of it is in agent/workers/hangs.py.
#
# Words: an *activity* is what a rank does now; ``micro_step`` counts those of the step under way that have ended.

_MAGIC = b"EEPULSE\0"
_FORMAT = 1
_SIZE = 128
_FIXED = struct.Struct("=8sIIIIIIQQQiI")
"""Magic, format, 0; pid, rank, restart, stacks signal; start ticks, thread; the stacks' file: inode, number; 0."""
_RANK, _RANK_AT = struct.Struct("=I"), 20  # within what is fixed: a rank gets another number where members change
_MOVING = struct.Struct("=8q")
_SEQUENCE, _SINCE, _ACTIVITY, _MICRO_STEP, _STEPS, _BOUNDARIES, _ALIKE, _NANOSECONDS = range(8, 16)
"""Where the numbers stand that change, of 16; the sequence is odd while something is being written."""
_NUM_TRIES = 100  # of a reader, each a microsecond or two: a writer is done by then, or has died in the middle

_FIRST_SIGNAL = 4  # above SIGRTMIN: the ones before are what others take first
_MOST_STACKS_BYTES = 1 << 20  # of earlier processes, that a new one adds to
_STATUS = Path("/proc/self/status")


class Activity(IntEnum):
    """What a rank does; the numbers stand in files."""

    STARTING = 0
    RESUMING = 1
    OUTSIDE = 2
    """Neither in a step nor on the way to one: before the first, between epochs, in an evaluation that says so."""
    STEP = 3
    BOUNDARY = 4
    """The rank exchanges words with the other ranks, between steps as a rule."""
    SAVING = 5
    """Training waits for a checkpoint."""
    CHANGING = 6
    """A config is coming into force."""
    ENDED = 7
    BETWEEN = 8
    """Between two micro-steps or steps, where the loop takes the next batch."""
    MEMBERS = 9
    """Members come or leave, or ranks decide whether they do."""


_STEP, _BETWEEN = int(Activity.STEP), int(Activity.BETWEEN)  # which are written faster
_SAVE = 1 << 32  # beside the micro-step: a save has begun since the last boundary, between two steps


class Heartbeat:
    """A rank's heartbeat: what it does and how far it has come. This class, for no agent, writes nothing."""

    wants_micro_steps = False
    """Whether each micro-step is to be told to this heartbeat."""

    def enter(self, micro_step: int) -> None:
        """Note that a micro-step begins; ``micro_step`` micro-steps of its step have ended before."""

    def leave(self, step: int, num_boundaries: int, micro_step: int) -> None:
        """Note that a micro-step has ended, or was given up; ``num_boundaries`` steps have ended in this process."""

    def during(self, activity: Activity) -> AbstractContextManager[None]:
        """A context in which the rank does ``activity``; afterwards it does what it did before."""
        return nullcontext()

    def communicating(self) -> AbstractContextManager[None]:
        """A context within a step, in which its gradients are shared after its passes."""
        return nullcontext()

    def pass_step(self, step: int) -> None:
        """Note that a step has ended, in a loop that does not say when one begins."""

    def note(self, activity: Activity) -> None:
        """Note that the rank does ``activity`` from here on."""

    def note_save(self) -> None:
        """Note that the rank begins a save, between two steps, as all ranks do there."""

    def note_change(self) -> None:
        """Note a change of the config or the model, after which steps may take as long as the first ones."""

    def join(self, step: int, num_boundaries: int) -> None:
        """Note that this rank has joined others, of which ``num_boundaries`` steps have ended, and is between two."""

    def take_world(self, world: World) -> None:
        """Note which number this rank has from here on, and that steps may take as long as the first ones."""

    def end(self) -> None:
        """Note that training has ended in this process, and write nothing any more."""


class FileHeartbeat(Heartbeat):
    """A rank's heartbeat in a file that its agent reads; one thread of the rank calls this."""

    wants_micro_steps = True

    def __init__(self, path: Path, *, rank: int, restart: int, stacks: Path, pipe: Path) -> None:
        """Make the file ``path``; OSError where that cannot be.

        Who writes to ``pipe`` has stacks written to ``stacks``.
        """
        self._stacks_signal, self._stacks_descriptor = _offer_stacks(stacks)
        self._sequence = self._num_boundaries = self._num_alike = 0
        self._activity = int(Activity.STARTING)
        self._entered = time.monotonic_ns()
        self._inside = 0  # nanoseconds within the step under way
        self._save = 0  # or _SAVE
        me, thread = this_process(), threading.get_ident()
        inode = os.fstat(self._stacks_descriptor).st_ino if self._stacks_signal else 0
        told = me.pid, rank, restart, self._stacks_signal, me.start_ticks, thread, inode, self._stacks_descriptor
        start = bytearray(_SIZE)
        _FIXED.pack_into(start, 0, _MAGIC, _FORMAT, 0, *told, 0)
        self._numbers = memoryview(start).cast("q")
        self._numbers[_SINCE] = self._entered
        self._own_stacks: OwnStacks | None = None
        try:
            write_whole(path, bytes(start), durable=False)
            with open(path, "r+b") as file:
                self._numbers = memoryview(mmap.mmap(file.fileno(), _SIZE)).cast("q")
            if self._stacks_signal:
                self._own_stacks = OwnStacks(pipe, self._stacks_descriptor)
        except OSError:
            self._withdraw_stacks()
            with contextlib.suppress(OSError):
                path.unlink()  # it would say that this rank starts, for ever
            raise
        do_in_forked_processes(self, FileHeartbeat.leave_to_parent)

    # Training waits for these two: what they write, and how, is chosen to take little.

    def enter(self, micro_step: int) -> None:
        self._activity = _STEP
        if micro_step == 0:
            self._inside = 0
        odd = (self._sequence + 1) | 1  # also after a write that an exception has cut short
        self._sequence = odd + 1
        numbers = self._numbers
        numbers[_SEQUENCE] = odd
        numbers[_ACTIVITY] = _STEP
        numbers[_MICRO_STEP] = micro_step | self._save
        numbers[_SINCE] = self._entered = time.monotonic_ns()
        numbers[_SEQUENCE] = odd + 1

    def leave(self, step: int, num_boundaries: int, micro_step: int) -> None:
        self._activity = _BETWEEN
        now = time.monotonic_ns()
        self._inside += now - self._entered
        odd = (self._sequence + 1) | 1
        self._sequence = odd + 1
        numbers = self._numbers
        numbers[_SEQUENCE] = odd
        numbers[_ACTIVITY] = _BETWEEN
        numbers[_SINCE] = now
        if num_boundaries != self._num_boundaries:
            self._save = 0
            self._num_boundaries = numbers[_BOUNDARIES] = num_boundaries
            self._num_alike = numbers[_ALIKE] = self._num_alike + 1
            numbers[_STEPS] = step
            numbers[_NANOSECONDS] = self._inside
        numbers[_MICRO_STEP] = micro_step | self._save
        numbers[_SEQUENCE] = odd + 1

    @contextlib.contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        before = Activity(self._activity)
        self.note(activity)
        try:
            yield
        finally:
            self.note(before)

    def pass_step(self, step: int) -> None:
        if self._activity == _STEP:
            return  # and leaving it says the same
        self._inside = 0
        self.leave(step, self._num_boundaries + 1, 0)
        self._entered = time.monotonic_ns()
        self.note(Activity.OUTSIDE)  # as the next step may be, which does not say when it begins

    def note(self, activity: Activity) -> None:
        self._activity = int(activity)
        self._write({_ACTIVITY: self._activity, _SINCE: time.monotonic_ns()})

    def note_save(self) -> None:
        self._save = _SAVE
        self._write({_MICRO_STEP: self._numbers[_MICRO_STEP] | _SAVE})

    def note_change(self) -> None:
        self._num_alike = 0
        self._write({_ALIKE: 0})

    def join(self, step: int, num_boundaries: int) -> None:
        self._num_boundaries = num_boundaries
        self._write({_STEPS: step, _BOUNDARIES: num_boundaries})
        self.note(Activity.BETWEEN)

    def take_world(self, world: World) -> None:
        _RANK.pack_into(self._numbers.cast("B"), _RANK_AT, world.rank)
        self.note_change()

    def end(self) -> None:
        self.note(Activity.ENDED)
        self._withdraw_stacks()
        self.leave_to_parent()

    def leave_to_parent(self) -> None:
        """Have a forked process, which is not the rank, write nothing to the file; called there."""
        self._numbers = memoryview(bytearray(_SIZE)).cast("q")
        self._own_stacks = None

    def _write(self, values: Mapping[int, int]) -> None:
        odd = (self._sequence + 1) | 1
        self._sequence = odd + 1
        numbers = self._numbers
        numbers[_SEQUENCE] = odd
        for place, value in values.items():
            numbers[place] = value
        numbers[_SEQUENCE] = odd + 1

    def _withdraw_stacks(self) -> None:
        if self._own_stacks is not None:
            self._own_stacks.close()
            self._own_stacks = None
        if self._stacks_signal:
            faulthandler.unregister(self._stacks_signal)
            os.close(self._stacks_descriptor)
            self._stacks_signal = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatReading:
    """A rank's heartbeat as it was read at one moment."""

    pid: int
    start_ticks: int
    thread: int
    """The ident of the training thread, as ``threading.get_ident`` has it."""
    rank: int
    restart: int
    activity: Activity
    since_ns: int
    """When the rank took up its activity, or came to this micro-step; on the clock of ``time.monotonic_ns``."""
    step: int
    """Steps that have committed since training began."""
    num_boundaries: int
    """Steps that have ended in this process."""
    micro_step: int
    """Micro-steps of the step under way that have ended."""
    has_begun_save: bool
    """Whether a save has begun since the last boundary: ranks where none has will be waited for there."""
    last_step_seconds: float
    """How long the last step took, without the time between its micro-steps; 0 before the first."""
    num_alike: int
    """Steps that have ended since the start, or since a change after which steps may take another time."""
    stacks_signal: int
    """The signal at which this process writes its stacks; 0 where it does not."""
    stacks_descriptor: int
    """The file descriptor, in the rank's process, that stacks are written to."""
    stacks_inode: int
    """The inode of the file of stacks; if the descriptor has another one, the script has replaced the file."""


def begin_heartbeat(folder: Path | None, *, seat: int, rank: int, restart: int, run_dir: Path) -> Heartbeat:
    """The heartbeat of this rank, in an agent's ``folder``; one that writes nothing where there is no agent.

    Nothing is written either where another live process has that seat's, as where a script starts another that trains.
    """
    if folder is None:
        return Heartbeat()
    path = heartbeat_file(folder, seat)
    found = read_heartbeat(path)
    if found is not None and found.pid != os.getpid() and found.activity is not Activity.ENDED:
        other = process_of(found.pid)
        if other is not None and other.start_ticks == found.start_ticks and is_alive(other):
            _logger.debug("process %d has the heartbeat of seat %d, and this one has none", found.pid, seat)
            return Heartbeat()
    try:
        return FileHeartbeat(
            path, rank=rank, restart=restart, stacks=stacks_file(run_dir, seat), pipe=stacks_pipe(folder, seat)
        )
    except OSError as error:
        _logger.warning(
            "rank %d cannot write its heartbeat, so that its agent does not notice if the rank hangs: %s", rank, error
        )
        return Heartbeat()


def heartbeat_file(folder: Path, seat: int) -> Path:
    """The file of a worker's heartbeat."""
    return folder / f"pulse-{seat}"


def stacks_pipe(folder: Path, seat: int) -> Path:
    """The pipe through which a worker is asked for its stacks."""
    return folder / f"stacks-{seat}"


def stacks_file(run_dir: Path, seat: int) -> Path:
    """The file to which a worker writes its stacks when it is asked to."""
    return run_dir / f"stacks-{seat}.txt"


def read_heartbeat(path: Path) -> HeartbeatReading | None:
    """A rank's heartbeat as it is now; None where the file cannot be read, or is of another format."""
    before = b""
    try:
        with open(path, "rb", buffering=0) as file:
            for _ in range(_NUM_TRIES):
                data = os.pread(file.fileno(), _SIZE, 0)
                if (
                    data and data == before
                ):  # whatever order a processor writes in, half of it is not what there is twice
                    return _reading(data)
                is_whole = len(data) == _SIZE and _MOVING.unpack_from(data, _FIXED.size)[0] % 2 == 0
                before = data if is_whole else b""
    except OSError:
        pass
    return None


def _reading(data: bytes) -> HeartbeatReading | None:
    magic, version, _, *told, inode, descriptor, _ = _FIXED.unpack_from(data)
    if magic != _MAGIC or version != _FORMAT:
        return None
    pid, rank, restart, stacks_signal, start_ticks, thread = told
    _, since, activity, micro_step, step, num_boundaries, alike, inside = _MOVING.unpack_from(data, _FIXED.size)
    if activity not in Activity.__members__.values():
        return None
    return HeartbeatReading(
        pid=pid,
        start_ticks=start_ticks,
        thread=thread,
        rank=rank,
        restart=restart,
        activity=Activity(activity),
        since_ns=since,
        step=step,
        num_boundaries=num_boundaries,
        micro_step=micro_step % _SAVE,
        has_begun_save=micro_step >= _SAVE,
        last_step_seconds=inside / 1e9,
        num_alike=alike,
        stacks_signal=stacks_signal,
        stacks_descriptor=descriptor,
        stacks_inode=inode,
    )


def _offer_stacks(path: Path) -> tuple[int, int]:
    """Have a signal write the stacks of all threads to ``path``: that signal, and the open file; 0 and -1 without."""
    number = _free_signal()
    if number == 0:
        return 0, -1
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, flags, 0o600)
        if os.fstat(descriptor).st_size > _MOST_STACKS_BYTES:
            os.ftruncate(descriptor, 0)
    except OSError as error:
        _logger.warning("this rank cannot open the file for its stack traces, and writes none if it hangs: %s", error)
        return 0, -1
    faulthandler.register(number, descriptor, all_threads=True, chain=False)
    return number, descriptor


def _free_signal() -> int:
    """A real-time signal that nobody has done anything with; 0 if there is none."""
    taken = _masks()
    for number in range(signal.SIGRTMIN + _FIRST_SIGNAL, signal.SIGRTMAX + 1):
        if signal.getsignal(number) is signal.SIG_DFL and not taken >> (number - 1) & 1:
            return number
    return 0


def _masks() -> int:
    """The signals that are caught, in C too, ignored or blocked, as bits; all where that cannot be told."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:  # another system
        return -1
    values = [int(line.split()[1], 16) for line in lines if line.startswith(("SigBlk:", "SigIgn:", "SigCgt:"))]
    return values[0] | values[1] | values[2]
