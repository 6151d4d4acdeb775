"""Nursery: a process that is forked from this one once, and from which all workers of a pool are forked.

A fork stops whoever forks, for as long as its memory is large. A worker that is added or replaced costs this process a
message. What the other end does is in forking.py, and so are the words.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext

from .child import GONE_SECONDS, Child, Ending, Process, is_readable
from .forking import MESSAGE_BYTES, Report, order_of, tend
from .process import Seat, Work

__all__ = ["Nurseries"]


class Nurseries:
    """Starts the workers of a pool from a nursery, and from another where that one has died; on one thread.

    The first may be forked on the thread that loops: what belongs to a thread is in workers then as it is there.
    """

    def __init__(self, work: Work, context: BaseContext, may_start: AbstractContextManager[object]) -> None:
        self._work = work
        self._context = context
        self._may_start = may_start
        self._nursery: _Nursery | None = None

    def prepare(self) -> None:
        """Fork the first nursery here, if this is the thread that the process began with: it must not end before."""
        if threading.get_native_id() == os.getpid():
            with contextlib.suppress(OSError, AssertionError):  # start() tries again, and raises
                self._fork()

    def start(self, seat: Seat, indices: Connection, results: Connection) -> Child:
        """A worker with these ends of its pipes, of which it has copies."""
        if self._nursery is not None and self._nursery.is_lost:
            self.close()
        return (self._nursery or self._fork()).start(seat, indices, results)

    def retire(self) -> None:
        """No more are started; those that there are may end first."""
        if self._nursery is not None:
            self._nursery.retire()

    def close(self) -> None:
        """See to the end of the nursery, with the workers that there still are."""
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None

    def _fork(self) -> _Nursery:
        with self._may_start:
            self._nursery = _Nursery(self._work, self._context)
        return self._nursery


class _Nursery:
    def __init__(self, work: Work, context: BaseContext) -> None:
        self._orders, theirs = _sockets()
        self._is_ending = threading.Lock()  # asked for on two threads
        self._how = ""
        self._is_lost = False
        with contextlib.ExitStack() as on_failure, theirs:
            on_failure.callback(self._orders.close)
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # none may come before it is ready
            try:
                arguments = (work, context, theirs, self._orders, mask)
                self._process = Process(context, "elastic_ext nursery", tend, arguments)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            on_failure.pop_all()
        self.pid = self._process.pid

    @property
    def is_lost(self) -> bool:
        """Whether it has died, as far as is known."""
        return self._is_lost or is_readable(self._orders.fileno())

    def start(self, seat: Seat, indices: Connection, results: Connection) -> Child:
        line, theirs = _sockets()
        descriptors = [theirs.fileno(), indices.fileno(), results.fileno()]
        with theirs, contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has died, as the line says too
            socket.send_fds(self._orders, [order_of(seat)], descriptors)
        return _Forked(self, line)

    def lost(self) -> str:
        """How it has died, which a worker was seen to have gone with."""
        self._is_lost = True
        return self._ended()

    def retire(self) -> None:
        with contextlib.suppress(OSError):  # it has died
            self._orders.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.retire()
        if not is_readable(self._process.end_descriptor, 0.0 if self._is_lost else GONE_SECONDS):
            self._process.kill()
        self._ended()
        self._process.close()
        self._orders.close()

    def _ended(self) -> str:
        with self._is_ending:
            self._how = self._how or self._process.ending().how
            return self._how


class _Forked:
    """A worker that a nursery has forked."""

    def __init__(self, nursery: _Nursery, line: socket.socket) -> None:
        self._nursery = nursery
        self._line = line
        self._watched = line.fileno()
        self._pid: int | None = None
        self._ending: Ending | None = None

    @property
    def end_descriptor(self) -> int:
        """Readable once it has ended; another from ``identify`` on."""
        return self._watched

    def identify(self, pid: int) -> None:
        """Be told of its end by the kernel: its nursery may be forking then."""
        self._pid = pid
        with contextlib.suppress(OSError):  # an older kernel, or it has ended
            watched = os.pidfd_open(pid)
            if is_readable(self._line.fileno()):  # it has ended, and the pid may be another's
                os.close(watched)
            else:
                self._watched = watched

    def kill(self) -> None:
        """Have it end at once."""
        with contextlib.suppress(OSError):  # its nursery has died
            self._line.shutdown(socket.SHUT_WR)

    def ending(self) -> Ending:
        """How it has ended; waits for seconds at most."""
        if self._ending is None:
            self._ending = self._told() if is_readable(self._line.fileno(), GONE_SECONDS) else self._unknown()
        return self._ending

    def close(self) -> None:
        """Give back what is left of a process that has ended."""
        if self._watched != self._line.fileno():
            os.close(self._watched)
        self._line.close()

    def _told(self) -> Ending:
        try:
            data = self._line.recv(MESSAGE_BYTES)
        except ConnectionResetError:
            data = b""
        if data:
            report = Report.from_bytes(data)
            error = OSError(report.error, os.strerror(report.error)) if report.error else None
            return Ending.of(report.pid, report.code, error)
        which = "it" if self._pid is None else f"pid {self._pid}"
        how = f"{which} went with the process that workers are forked from, and {self._nursery.lost()}"
        return Ending(how, went_with=self._nursery.pid)

    def _unknown(self) -> Ending:
        return Ending("it ended, nobody knows how") if self._pid is None else Ending.of(self._pid, None)


def _sockets() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
