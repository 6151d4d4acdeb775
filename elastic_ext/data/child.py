"""Child: a worker process as the one that has it started sees it; and the ways there are to start one.

With ``spawn`` and ``forkserver`` it is multiprocessing's, started from this process; with ``fork`` see nursery.py.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any, Protocol

from .process import Seat, Work, run

__all__ = ["GONE_SECONDS", "Child", "Ending", "Process", "Separate", "Starter", "in_words", "is_readable"]

GONE_SECONDS = 5.0
"""How long the end of a process that is gone, or was killed, may take to be seen."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended."""

    how: str
    """What a person is told."""
    went_with: int | None = None
    """The process that it was forked from and ended with; None: its end was its own."""
    error: Exception | None = None
    """What kept it from being started at all."""
    as_torch_says: str = ""
    """What torch's loader says of a worker that ended so, where it was a signal."""

    @classmethod
    def of(cls, pid: int, code: int | None, error: Exception | None = None) -> Ending:
        """That of a process, by the exit code that multiprocessing has for it."""
        said = ""
        if code is not None and code < 0:
            said = f"DataLoader worker (pid {pid}) is killed by signal: {signal.strsignal(-code)}"
        return cls(in_words(pid, code), error=error, as_torch_says=said)


class Child(Protocol):
    """A worker process. It is started, and closed, on one thread; in between it belongs to one other."""

    @property
    def end_descriptor(self) -> int:
        """Readable once it has ended; another from ``identify`` on."""

    def identify(self, pid: int) -> None:
        """Take what it says of itself; it can be seen from more nearby then."""

    def kill(self) -> None:
        """Have it end at once."""

    def ending(self) -> Ending:
        """How a process that is gone has ended; waits for seconds at most."""

    def close(self) -> None:
        """Give back what is left of a process that has ended."""


class Starter(Protocol):
    """Starts the workers of one pool, on one thread."""

    def prepare(self) -> None:
        """Do what is to be done on the thread that wants workers. Called there once, before all else."""

    def start(self, seat: Seat, indices: Connection, results: Connection) -> Child:
        """A worker with these ends of its pipes, of which it has copies."""

    def retire(self) -> None:
        """No more are started; those that there are may end first."""

    def close(self) -> None:
        """See to the end of what was needed to start them, once they have ended."""


class Process:
    """A process of multiprocessing's; how it ended may be asked on any thread."""

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
        """Readable once it has ended."""
        return self._watched

    def identify(self, pid: int) -> None:
        """It is known from the start."""

    def kill(self) -> None:
        """Have it end at once."""
        self._process.kill()

    def ending(self) -> Ending:
        """How it has ended; waits for seconds at most."""
        if is_readable(self._watched, GONE_SECONDS) and self._process.exitcode is None:
            self._process.join(GONE_SECONDS)  # its fork server has yet to say
        return Ending.of(self.pid, self._process.exitcode)

    def close(self) -> None:
        """Give back what is left of a process that has ended."""
        self.ending()
        if self._watched != self._process.sentinel:
            os.close(self._watched)
        with contextlib.suppress(ValueError):  # still there, in spite of SIGKILL
            self._process.close()

    def _watch(self) -> int:
        # A sentinel is a pipe, which a process that is forked at the same time by another thread may hold open.
        try:
            return os.pidfd_open(self.pid)
        except OSError:  # an older kernel, or a process that its fork server has seen the end of
            sentinel: int = self._process.sentinel
            return sentinel


class Separate:
    """Starts each worker from this process, which it shares no memory with."""

    def __init__(self, work: Work, context: BaseContext, may_start: AbstractContextManager[object]) -> None:
        self._work = work
        self._context = context
        self._may_start = may_start

    def prepare(self) -> None:
        """There is nothing to do."""

    def start(self, seat: Seat, indices: Connection, results: Connection) -> Child:
        """A worker with these ends of its pipes, of which it has copies."""
        with self._may_start:  # the dataset is pickled
            return Process(self._context, seat.name, run, (self._work, seat, indices, results, ()))

    def retire(self) -> None:
        """There is nothing but them."""

    def close(self) -> None:
        """The same."""


def in_words(pid: int, code: int | None) -> str:
    """How a process ended, by the exit code that multiprocessing has for it."""
    if code is None:
        return f"pid {pid} ended, nobody knows how"
    if code >= 0:
        return f"pid {pid} exited with code {code}"
    with contextlib.suppress(ValueError):  # a signal without a name
        return f"pid {pid} was killed by {signal.Signals(-code).name}"
    return f"pid {pid} was killed by signal {-code}"


def is_readable(descriptor: int, timeout_seconds: float = 0.0) -> bool:
    """Whether there is something to be read from it, or will be in time."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_seconds * 1000))
