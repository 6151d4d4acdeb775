"""Worker: one worker process with its pipes, as its parent has it. When to start or end one is decided elsewhere."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections import deque
from collections.abc import Iterable
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from typing import Any

from .frames import Inbox, Outbox
from .process import STACK_SIGNAL, STOP, Seat, Work, run

__all__ = ["Worker"]

_STACK_SECONDS = 2.0
_SILENT_SECONDS = 0.1  # a stack that is being written has no longer gaps
_GONE_SECONDS = 5.0


class Worker:
    """A worker process. It is started, and closed, on one thread; in between it belongs to one other."""

    def __init__(self, work: Work, seat: Seat, context: BaseContext, others: Iterable[Worker]) -> None:
        self.slot = seat.slot
        self.tasks: deque[Any] = deque()
        """What it has been given and not answered, in order; whoever gives it tasks keeps them here."""
        self.num_answers = 0
        self.is_heard = False
        """Somebody is taking in what it has sent."""
        self._stack = -1  # its descriptor for the pipe with its stack
        # A fork has the other workers' pipes too: it closes them, so that a pipe ends with its own two processes.
        is_fork = context.get_start_method() == "fork"
        inherited = [end for other in others for end in other._ends()] if is_fork else []
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as in_worker:
            indices, self._indices = context.Pipe(duplex=False)
            in_worker.callback(indices.close)
            on_failure.callback(self._indices.close)
            self._results, results = context.Pipe(duplex=False)
            in_worker.callback(results.close)
            on_failure.callback(self._results.close)
            self.outbox = Outbox(self._indices.fileno())
            self.inbox = Inbox(self._results.fileno())
            inherited += self._ends() if is_fork else []
            process: Any = context.Process(  # type: ignore[attr-defined]  # every context has one
                target=run,
                args=(work, seat, indices, results, inherited),
                name=f"elastic_ext worker {seat.slot}",
                daemon=True,
            )
            process.start()
            on_failure.pop_all()
        self._process = process
        self.pid: int = process.pid
        self._watched = self._watch()

    @property
    def results_descriptor(self) -> int:
        """Readable when there may be messages in ``inbox``."""
        return self._results.fileno()

    @property
    def indices_descriptor(self) -> int:
        """Writable when ``outbox`` may have room again."""
        return self._indices.fileno()

    @property
    def end_descriptor(self) -> int:
        """Readable once the process has ended."""
        return self._watched

    def send(self, number: int, task: object) -> bool:
        """Whether the task is on its way whole; the rest goes with ``outbox.flush``."""
        return self.outbox.send(number, ForkingPickler.dumps(task))

    def has_begun(self, sent_at: int) -> bool:
        """Whether it may have begun with what it was sent behind so many bytes.

        One that never answered may have: workers that only ever die are not to be replaced for ever.
        """
        return self.num_answers == 0 or self.outbox.num_read_bytes() > sent_at

    def note_ready(self, payload: memoryview) -> None:
        """Take what its first message says."""
        self._stack = ForkingPickler.loads(payload)

    def has_ended(self, timeout_seconds: float = 0.0) -> bool:
        """Whether the process is gone, or is so before the time is up."""
        return _is_readable(self._watched, timeout_seconds)

    def kill(self) -> None:
        """Have it end at once."""
        self._process.kill()

    def how_it_ended(self) -> str:
        """What a person is told of a process that is gone, or just about to be."""
        self.end(_GONE_SECONDS)
        code = self._process.exitcode
        if code is None:
            return f"pid {self.pid} ended, nobody knows how"
        if code >= 0:
            return f"pid {self.pid} exited with code {code}"
        with contextlib.suppress(ValueError):  # a signal without a name
            return f"pid {self.pid} was killed by {signal.Signals(-code).name}"
        return f"pid {self.pid} was killed by signal {-code}"

    def stack(self) -> str:
        """Where each of the process's threads is in its Python code; empty if it does not tell."""
        try:
            with open(f"/proc/{self.pid}/fd/{self._stack}", "rb", buffering=0) as pipe:
                os.kill(self.pid, STACK_SIGNAL)
                told = b""
                while _is_readable(pipe.fileno(), _SILENT_SECONDS if told else _STACK_SECONDS):
                    told += pipe.read(65536)
        except OSError:
            return ""
        return told.decode(errors="replace")

    def ask_to_end(self) -> None:
        """Have it end once it has done what it does; what it sends is read no more. Asking twice is allowed."""
        if self._indices.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            self.outbox.send(STOP, memoryview(b""))
        self._indices.close()
        self._results.close()

    def end(self, timeout_seconds: float) -> None:
        """Wait for its end, and kill it if it does not come."""
        if not self.has_ended(timeout_seconds):
            self._process.kill()
            self.has_ended(_GONE_SECONDS)
        if self._process.exitcode is None:  # its fork server has yet to say
            self._process.join(_GONE_SECONDS)

    def close(self) -> None:
        """Give back what is left of a process that has ended."""
        self._indices.close()
        self._results.close()
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

    def _ends(self) -> list[Connection]:
        return [each for each in (self._indices, self._results) if not each.closed]


def _is_readable(descriptor: int, timeout_seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_seconds * 1000))
