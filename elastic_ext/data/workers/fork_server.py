"""Worker processes as the process that starts them sees them, and the fork server from which a pool's workers are
forked.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import multiprocessing
import os
import select
import signal
import socket
import struct
import threading
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass
from errno import EAGAIN, ECANCELED, EMFILE
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any, Protocol

from elastic_ext.records.json import JsonRecord

from .worker_process import Seat, WorkerSpec, end_with_parent, run

__all__ = [
    "GONE_SECONDS",
    "MESSAGE_BYTES",
    "Child",
    "Ending",
    "ForkServerStarter",
    "MultiprocessingChild",
    "SeparateStarter",
    "Starter",
    "WorkerOutcome",
    "in_words",
    "is_readable",
    "run_fork_server",
]


# --- a worker process as the one that has it started sees it; and the ways there are to start one --------------------
# With ``spawn`` and ``forkserver`` it is multiprocessing's, started from this process; with ``fork`` it is forked by a
# fork server of the pool's own (not multiprocessing's): see ForkServerStarter.

GONE_SECONDS = 5.0
"""How long to wait for the end of a process that is gone, or was killed, to be seen."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a worker process ended."""

    how: str
    """How the process ended, in words for people."""
    went_with: int | None = None
    """The pid of the fork server that the process ended with; None: its end was its own."""
    error: Exception | None = None
    """The error that kept the process from being started at all; None where it was started."""
    as_torch_says: str = ""
    """What torch's loader says of a worker that a signal ended; empty where none did."""
    was_told_to_end: bool = False
    """Whether SIGTERM ended the process, as where a whole job is told to end."""

    @classmethod
    def of(cls, pid: int, code: int | None, error: Exception | None = None) -> Ending:
        """The ending of a process, by its exit code as multiprocessing has it."""
        said = ""
        if code is not None and code < 0:
            said = f"DataLoader worker (pid {pid}) is killed by signal: {signal.strsignal(-code)}"
        was_told = code == -signal.SIGTERM
        return cls(in_words(pid, code), error=error, as_torch_says=said, was_told_to_end=was_told)


class Child(Protocol):
    """A worker process as its pool sees it.

    It is started, and closed, on one thread; in between it belongs to one other.
    """

    @property
    def end_descriptor(self) -> int:
        """A descriptor that is readable once the process has ended; another one from ``identify`` on."""

    def identify(self, pid: int) -> None:
        """Take the pid that the process tells of itself, by which its end can be seen sooner."""

    def kill(self) -> None:
        """Kill the process at once."""

    def ending(self) -> Ending:
        """How the process, which is gone, has ended; waits for seconds at most."""

    def close(self) -> None:
        """Free what is left of the process, which has ended."""


class Starter(Protocol):
    """Starts the workers of one pool, on one thread."""

    def prepare(self) -> None:
        """Prepare the starter on the thread that wants workers. Called there once, before all else."""

    def start(self, seat: Seat, indices: Connection, results: Connection) -> Child:
        """Start a worker with these ends of its pipes, of which it has copies."""

    def start_no_more(self) -> None:
        """Start no more workers, and end with the last one what was needed to start them."""

    def close(self) -> None:
        """End what was needed to start workers, once they have ended."""


class MultiprocessingChild:
    """A worker or a fork server that multiprocessing starts, by any start method; any thread may ask how it ended."""

    def __init__(
        self, context: BaseContext, name: str, target: Callable[..., None], arguments: tuple[object, ...]
    ) -> None:
        self._process: Any = context.Process(  # type: ignore[attr-defined]  # every context has one
            target=target, args=arguments, name=name, daemon=True
        )
        self._process.start()
        self.pid: int = self._process.pid
        self._watched = self._watch()

    @property
    def end_descriptor(self) -> int:
        """A descriptor that is readable once the process has ended."""
        return self._watched

    def identify(self, pid: int) -> None:
        """Nothing to do: the pid is known from the start."""

    def kill(self) -> None:
        """Kill the process at once."""
        self._process.kill()

    def ending(self) -> Ending:
        """How the process has ended; waits for seconds at most."""
        if is_readable(self._watched, GONE_SECONDS) and self._process.exitcode is None:
            self._process.join(GONE_SECONDS)  # with ``forkserver`` multiprocessing's server has yet to say
        return Ending.of(self.pid, self._process.exitcode)

    def close(self) -> None:
        """Free what is left of the process, which has ended."""
        self.ending()
        if self._watched != self._process.sentinel:
            os.close(self._watched)
        with contextlib.suppress(ValueError):  # still there, in spite of SIGKILL
            self._process.close()

    def _watch(self) -> int:
        # A sentinel is a pipe, which a process that is forked at the same time by another thread may hold open.
        try:
            return os.pidfd_open(self.pid)
        except OSError:  # an older kernel, or multiprocessing's fork server has reaped it
            sentinel: int = self._process.sentinel
            return sentinel


class SeparateStarter:
    """Starts each worker by itself, with ``spawn`` or ``forkserver``: it shares no memory with this process."""

    def __init__(self, spec: WorkerSpec, context: BaseContext, fork_lock: AbstractContextManager[object]) -> None:
        self._spec = spec
        self._context = context
        self._fork_lock = fork_lock

    def prepare(self) -> None:
        """Nothing to do: each worker is started by itself."""

    def start(self, seat: Seat, indices: Connection, results: Connection) -> Child:
        """Start a worker with these ends of its pipes, of which it has copies."""
        with self._fork_lock:  # the dataset is pickled
            return MultiprocessingChild(self._context, seat.name, run, (self._spec, seat, indices, results, ()))

    def start_no_more(self) -> None:
        """Nothing to do: there is no process besides the workers."""

    def close(self) -> None:
        """Nothing to do: there is no process besides the workers."""


def in_words(pid: int, code: int | None) -> str:
    """How a process ended, in words, by its exit code as multiprocessing has it."""
    if code is None:
        return f"pid {pid} ended, and its exit code is not known"
    if code >= 0:
        return f"pid {pid} exited with code {code}"
    with contextlib.suppress(ValueError):  # a signal without a name
        return f"pid {pid} was killed by {signal.Signals(-code).name}"
    return f"pid {pid} was killed by signal {-code}"


def is_readable(descriptor: int, timeout_seconds: float = 0.0) -> bool:
    """Whether there is something to be read from a descriptor, or will be in time."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_seconds * 1000))


# --- what a fork server's process runs: it forks the workers of one pool, and tells how each has ended ---------------
# It does nothing else, on one thread: nobody holds a lock when it forks.
#
# An *order* asks for a worker; with it come the worker's ends of its pipes, and its *line*: a socket on which the pool
# is told of its end, once, and which the pool shuts to have it killed.

MESSAGE_BYTES = 4096
"""More bytes than any message between a pool and its fork server has."""

_SIGNAL_BYTES = 128  # a struct signalfd_siginfo
_SIGNAL = struct.Struct("=IiiI")  # how it begins: number, errno, code, the sender's pid
_SIGSET_BYTES = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOutcome(JsonRecord):
    """How a forked data worker ended, or why it could not be forked, as its fork server tells the pool."""

    pid: int = 0
    code: int | None = None
    """The worker's exit code, as multiprocessing has it; None if nobody knows."""
    error: int = 0
    """The number of the error that kept the worker from being forked; 0 where none did."""


def run_fork_server(
    spec: WorkerSpec, context: BaseContext, orders: socket.socket, parents_end: socket.socket, mask: AbstractSet[int]
) -> None:
    """Run a fork server in this process: fork workers until the pool wants no more, and wait until the last has ended.

    It is begun with all signals blocked; ``mask`` has those that are to be blocked in workers. What is sent to a whole
    process group or job reaches the workers alone.
    """
    end_with_parent()
    parents_end.close()
    multiprocessing.current_process().daemon = False  # which may have no children
    _give_signals_back(mask)
    _ForkServerProcess(spec, context, orders).run()


class _ForkServerProcess:
    """A fork server in its own process: forks workers as the pool orders them, and tells how each has ended."""

    def __init__(self, spec: WorkerSpec, context: BaseContext, orders: socket.socket) -> None:
        self._spec = spec
        self._context = context
        self._orders = orders
        self._is_open = True
        self._workers: dict[int, tuple[Any, socket.socket]] = {}  # by the descriptor of its line
        self._signals = _signals_of({signal.SIGCHLD, signal.SIGTERM})
        self._poll = select.poll()
        self._poll.register(self._signals, select.POLLIN)
        self._poll.register(self._orders, select.POLLIN)

    def run(self) -> None:
        while self._is_open or self._workers:
            ready = {descriptor for descriptor, _ in self._poll.poll()}
            if self._signals.fileno() in ready:  # first: ends are told between two forks
                self._take_signals()
            for descriptor in ready & self._workers.keys():
                self._kill(descriptor)
            # An order comes last: its line may have the number of one that was closed here, and was ready for its end.
            if self._is_open and self._orders.fileno() in ready:
                self._take_order()

    def _take_signals(self) -> None:
        while told := self._signals.read(_SIGNAL_BYTES):
            number, _, _, sender = _SIGNAL.unpack_from(told)
            if number == signal.SIGTERM and sender == os.getppid():  # as multiprocessing ends what it has started
                self._take_no_more()
                for descriptor in self._workers:
                    self._kill(descriptor)
        for process, line in list(self._workers.values()):
            if process.exitcode is not None:
                _tell(line, WorkerOutcome(pid=process.pid, code=process.exitcode))
                self._unwatch(line)
                del self._workers[line.fileno()]
                line.close()
                process.close()

    def _take_order(self) -> None:
        message, descriptors, _, _ = socket.recv_fds(self._orders, MESSAGE_BYTES, 3)
        if not message:
            self._take_no_more()
        elif len(descriptors) == 3:
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            line = socket.socket(fileno=descriptors[0])
            with (
                Connection(descriptors[1], writable=False) as indices,
                Connection(descriptors[2], readable=False) as results,
            ):
                self._fork(Seat.from_json(message.decode()), line, indices, results)
        elif not descriptors:  # nobody can be told, but by the end of this process
            raise OSError(
                EMFILE, "the fork server cannot start a data worker: it may open no more files; raise `ulimit -n`"
            )
        else:
            line = socket.socket(fileno=descriptors.pop(0))
            for descriptor in descriptors:
                os.close(descriptor)
            _tell(line, WorkerOutcome(error=EMFILE))
            line.close()

    def _fork(self, seat: Seat, line: socket.socket, indices: Connection, results: Connection) -> None:
        if is_readable(line.fileno()):  # nobody wants it any more
            _tell(line, WorkerOutcome(error=ECANCELED))
            line.close()
            return
        own = [self._signals, self._orders, line, *[each for _, each in self._workers.values()]]
        process: Any = self._context.Process(  # type: ignore[attr-defined]  # every context has one
            target=run, args=(self._spec, seat, indices, results, own), name=seat.name, daemon=True
        )
        try:
            process.start()
        except OSError as error:
            _tell(line, WorkerOutcome(error=error.errno or EAGAIN))
            line.close()
            return
        self._workers[line.fileno()] = (process, line)
        self._poll.register(line, select.POLLIN)

    def _kill(self, descriptor: int) -> None:
        process, line = self._workers[descriptor]
        self._unwatch(line)
        process.kill()

    def _unwatch(self, line: socket.socket) -> None:
        with contextlib.suppress(KeyError):  # where it was killed
            self._poll.unregister(line)

    def _take_no_more(self) -> None:
        if self._is_open:
            self._is_open = False
            self._poll.unregister(self._orders)


def _tell(line: socket.socket, report: WorkerOutcome) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the pool has no use for it
        line.send(report.to_json().encode())


def _give_signals_back(mask: AbstractSet[int]) -> None:
    """Have workers take signals as if they were forked by the process that forked the fork server."""
    fork_server = os.getpid()
    is_deaf = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    if is_deaf:  # then nobody is told of ends
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def in_worker() -> None:
        if os.getppid() != fork_server:  # a process that a worker forks
            return
        if is_deaf:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    os.register_at_fork(after_in_child=in_worker)


def _signals_of(numbers: AbstractSet[int]) -> io.FileIO:
    """A file from which these signals, which are blocked, can be read; it gives nothing while there are none."""
    libc = ctypes.CDLL(None, use_errno=True)
    wanted = ctypes.create_string_buffer(_SIGSET_BYTES)
    libc.sigemptyset(wanted)
    for number in numbers:
        libc.sigaddset(wanted, number)
    descriptor = libc.signalfd(-1, wanted, os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "the fork server of data workers cannot read its signals: signalfd failed")
    return io.FileIO(descriptor)


# --- a process that is forked from this one once, and from which all workers of a pool are forked --------------------
# A process stands still while it forks, the longer the more memory it has. With a fork server, a worker that is added
# or replaced costs this process no more than a message. What the fork server does, and its words, stand above.


class ForkServerStarter:
    """Starts each worker with ``fork``, from a fork server, and from a new one where that has died; on one thread.

    The first fork server may be forked on the thread that loops: workers then have that thread's thread-local values.
    """

    def __init__(self, spec: WorkerSpec, context: BaseContext, fork_lock: AbstractContextManager[object]) -> None:
        self._spec = spec
        self._context = context
        self._fork_lock = fork_lock
        self._fork_server: _ForkServer | None = None

    def prepare(self) -> None:
        """Fork the first fork server here, if this is the process's first thread: it must not end before workers do."""
        if threading.get_native_id() == os.getpid():
            with contextlib.suppress(OSError, AssertionError):  # start() tries again, and raises
                self._fork()

    def start(self, seat: Seat, indices: Connection, results: Connection) -> Child:
        """Start a worker with these ends of its pipes, of which it has copies."""
        if self._fork_server is not None and self._fork_server.is_lost:
            self.close()
        return (self._fork_server or self._fork()).start(seat, indices, results)

    def start_no_more(self) -> None:
        """Start no more workers, and end with the last one what was needed to start them."""
        if self._fork_server is not None:
            self._fork_server.start_no_more()

    def close(self) -> None:
        """End the fork server, with the workers that there still are."""
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None

    def _fork(self) -> _ForkServer:
        with self._fork_lock:
            self._fork_server = _ForkServer(self._spec, self._context)
        return self._fork_server


class _ForkServer:
    """A fork server as its pool sees it: the process, and the socket on which the pool orders workers."""

    def __init__(self, spec: WorkerSpec, context: BaseContext) -> None:
        self._orders, theirs = _sockets()
        self._ending_lock = threading.Lock()  # how it ended is asked for on two threads
        self._how = ""
        self._is_lost = False
        with contextlib.ExitStack() as on_failure, theirs:
            on_failure.callback(self._orders.close)
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # none may come before it is ready
            try:
                arguments = (spec, context, theirs, self._orders, mask)
                self._process = MultiprocessingChild(context, "elastic_ext fork server", run_fork_server, arguments)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            on_failure.pop_all()
        self.pid = self._process.pid

    @property
    def is_lost(self) -> bool:
        """Whether the fork server has died, as far as is known."""
        return self._is_lost or is_readable(self._orders.fileno())

    def start(self, seat: Seat, indices: Connection, results: Connection) -> Child:
        line, theirs = _sockets()
        descriptors = [theirs.fileno(), indices.fileno(), results.fileno()]
        with theirs, contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has died, as the line says too
            socket.send_fds(self._orders, [seat.to_json().encode()], descriptors)
        return _ForkServerChild(self, line)

    def lost(self) -> str:
        """How the fork server has died, with which a worker was seen to end."""
        self._is_lost = True
        return self._ended()

    def start_no_more(self) -> None:
        with contextlib.suppress(OSError):  # it has died
            self._orders.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.start_no_more()
        if not is_readable(self._process.end_descriptor, 0.0 if self._is_lost else GONE_SECONDS):
            self._process.kill()
        self._ended()
        self._process.close()
        self._orders.close()

    def _ended(self) -> str:
        with self._ending_lock:
            self._how = self._how or self._process.ending().how
            return self._how


class _ForkServerChild:
    """A worker that a fork server has forked, as its pool sees it."""

    def __init__(self, fork_server: _ForkServer, line: socket.socket) -> None:
        self._fork_server = fork_server
        self._line = line
        self._watched = line.fileno()
        self._pid: int | None = None
        self._ending: Ending | None = None

    @property
    def end_descriptor(self) -> int:
        """A descriptor that is readable once the worker has ended; another one from ``identify`` on."""
        return self._watched

    def identify(self, pid: int) -> None:
        """Have the kernel tell of the worker's end: its fork server may be in the middle of a fork then."""
        self._pid = pid
        with contextlib.suppress(OSError):  # an older kernel, or it has ended
            watched = os.pidfd_open(pid)
            if is_readable(self._line.fileno()):  # it has ended, and the pid may be another's
                os.close(watched)
            else:
                self._watched = watched

    def kill(self) -> None:
        """Have the fork server kill the worker at once."""
        with contextlib.suppress(OSError):  # its fork server has died
            self._line.shutdown(socket.SHUT_WR)

    def ending(self) -> Ending:
        """How the worker has ended; waits for seconds at most."""
        if self._ending is None:
            self._ending = self._told() if is_readable(self._line.fileno(), GONE_SECONDS) else self._unknown()
        return self._ending

    def close(self) -> None:
        """Free what is left of the worker, which has ended."""
        if self._watched != self._line.fileno():
            os.close(self._watched)
        self._line.close()

    def _told(self) -> Ending:
        try:
            data = self._line.recv(MESSAGE_BYTES)
        except ConnectionResetError:
            data = b""
        if data:
            report = WorkerOutcome.from_json(data.decode())
            error = OSError(report.error, os.strerror(report.error)) if report.error else None
            return Ending.of(report.pid, report.code, error)
        which = "the worker" if self._pid is None else f"pid {self._pid}"
        how = f"{which} died together with its fork server, and {self._fork_server.lost()}"
        return Ending(how, went_with=self._fork_server.pid)

    def _unknown(self) -> Ending:
        if self._pid is None:
            return Ending("the worker ended, and its exit code is not known")
        return Ending.of(self._pid, None)


def _sockets() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
