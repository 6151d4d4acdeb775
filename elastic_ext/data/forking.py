"""What a nursery's process runs: it forks the workers of one pool, and tells how each has ended.

It does nothing else, on one thread: nobody holds a lock when it forks.

An *order* asks for a worker; with it come the worker's ends of its pipes, and its *line*: a socket on which the pool is
told of its end, once, and which the pool shuts to have it killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import multiprocessing
import os
import select
import signal
import socket
import struct
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from errno import EAGAIN, ECANCELED, EMFILE
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

from .child import is_readable
from .process import Seat, Work, end_with_parent, run

__all__ = ["MESSAGE_BYTES", "Report", "order_of", "tend"]

MESSAGE_BYTES = 4096
"""More than any message has."""

_SIGNAL_BYTES = 128  # a struct signalfd_siginfo
_SIGNAL = struct.Struct("=IiiI")  # how it begins: number, errno, code, the sender's pid
_SIGSET_BYTES = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What became of a worker."""

    pid: int = 0
    code: int | None = None
    """Its exit code, as multiprocessing has it; None if nobody knows."""
    error: int = 0
    """The number of the error that kept it from being forked."""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Report:
        return cls(**json.loads(data))


def order_of(seat: Seat) -> bytes:
    """The message that asks for a worker."""
    return json.dumps(asdict(seat)).encode()


def tend(
    work: Work, context: BaseContext, orders: socket.socket, parents_end: socket.socket, mask: AbstractSet[int]
) -> None:
    """Fork workers until the pool wants no more, and see the last of them end.

    It is begun with all signals blocked; ``mask`` has those that are to be blocked in workers. What is sent to a whole
    process group or job reaches the workers alone.
    """
    end_with_parent()
    parents_end.close()
    multiprocessing.current_process().daemon = False  # which may have no children
    _give_signals_back(mask)
    _Forking(work, context, orders).run()


class _Forking:
    """The workers that it has forked, and whoever wants more of them."""

    def __init__(self, work: Work, context: BaseContext, orders: socket.socket) -> None:
        self._work = work
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
                _tell(line, Report(pid=process.pid, code=process.exitcode))
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
                self._fork(Seat(**json.loads(message)), line, indices, results)
        elif not descriptors:  # nobody can be told, but by the end of this process
            raise OSError(EMFILE, "a worker is asked for, and no more files may be open")
        else:
            line = socket.socket(fileno=descriptors.pop(0))
            for descriptor in descriptors:
                os.close(descriptor)
            _tell(line, Report(error=EMFILE))
            line.close()

    def _fork(self, seat: Seat, line: socket.socket, indices: Connection, results: Connection) -> None:
        if is_readable(line.fileno()):  # nobody wants it any more
            _tell(line, Report(error=ECANCELED))
            line.close()
            return
        own = [self._signals, self._orders, line, *[each for _, each in self._workers.values()]]
        process: Any = self._context.Process(  # type: ignore[attr-defined]  # every context has one
            target=run, args=(self._work, seat, indices, results, own), name=seat.name, daemon=True
        )
        try:
            process.start()
        except OSError as error:
            _tell(line, Report(error=error.errno or EAGAIN))
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


def _tell(line: socket.socket, report: Report) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the pool has no use for it
        line.send(report.to_bytes())


def _give_signals_back(mask: AbstractSet[int]) -> None:
    """Have workers take signals as if they were forked where the nursery was."""
    nursery = os.getpid()
    is_deaf = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    if is_deaf:  # then nobody is told of ends
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def in_worker() -> None:
        if os.getppid() != nursery:  # a process that a worker forks
            return
        if is_deaf:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    os.register_at_fork(after_in_child=in_worker)


def _signals_of(numbers: AbstractSet[int]) -> io.FileIO:
    """A file that these signals can be read from, which are blocked; nothing while there are none."""
    libc = ctypes.CDLL(None, use_errno=True)
    wanted = ctypes.create_string_buffer(_SIGSET_BYTES)
    libc.sigemptyset(wanted)
    for number in numbers:
        libc.sigaddset(wanted, number)
    descriptor = libc.signalfd(-1, wanted, os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "signalfd")
    return io.FileIO(descriptor)
