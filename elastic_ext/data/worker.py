"""Worker: one worker process with its pipes, seen from outside. When to start or end one is decided elsewhere."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections import deque
from multiprocessing.reduction import ForkingPickler
from typing import Any

from .child import GONE_SECONDS, Ending, Starter, is_readable
from .frames import Inbox, Outbox
from .process import STACK_SIGNAL, STOP, Seat

__all__ = ["Worker"]

_STACK_SECONDS = 2.0
_SILENT_SECONDS = 0.1  # a stack that is being written has no longer gaps


class Worker:
    """A worker process. It is started, and closed, on one thread; in between it belongs to one other."""

    def __init__(self, seat: Seat, starter: Starter) -> None:
        self.slot = seat.slot
        self.pid: int | None = None
        """None before it is ready."""
        self.tasks: deque[Any] = deque()
        """What it has been given and not answered, in order; whoever gives it tasks keeps them here."""
        self.num_answers = 0
        self.num_made = 0
        """Of its tasks, the first so many are done, and their batches on their way."""
        self.is_heard = False
        """Somebody is taking in what it has sent."""
        self._stack = -1  # its descriptor for the pipe with its stack
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as in_worker:
            indices, self._indices = multiprocessing.Pipe(duplex=False)
            in_worker.callback(indices.close)
            on_failure.callback(self._indices.close)
            self._results, results = multiprocessing.Pipe(duplex=False)
            in_worker.callback(results.close)
            on_failure.callback(self._results.close)
            self.outbox = Outbox(self._indices.fileno())
            self.inbox = Inbox(self._results.fileno())
            self._child = starter.start(seat, indices, results)
            on_failure.pop_all()

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
        return self._child.end_descriptor

    def send(self, number: int, task: object) -> bool:
        """Whether the task is on its way whole; the rest goes with ``outbox.flush``."""
        return self.outbox.send(number, ForkingPickler.dumps(task))

    def has_begun(self, sent_at: int) -> bool:
        """Whether it may have begun with what it was sent behind so many bytes.

        One that never answered may have: workers that only ever die are not to be replaced for ever.
        """
        return self.num_answers == 0 or self.outbox.num_read_bytes() > sent_at

    @property
    def doing(self) -> Any:
        """The task that it is at, None where it has none to do."""
        if self.num_made < len(self.tasks) and self.has_begun(self.tasks[self.num_made].sent_at):
            return self.tasks[self.num_made]
        return self.tasks[0] if self.num_made and self.tasks else None  # which it is sending

    def note_ready(self, payload: memoryview) -> None:
        """Take what its first message says."""
        pid, self._stack = ForkingPickler.loads(payload)
        self.pid = pid
        self._child.identify(pid)

    def has_ended(self, timeout_seconds: float = 0.0) -> bool:
        """Whether the process is gone, or is so before the time is up."""
        return is_readable(self.end_descriptor, timeout_seconds)

    def kill(self) -> None:
        """Have it end at once."""
        self._child.kill()

    def ending(self) -> Ending:
        """How a process has ended that is gone, or just about to be."""
        self.end(GONE_SECONDS)
        return self._child.ending()

    def stack(self) -> str:
        """Where each of the process's threads is in its Python code; empty if it does not tell."""
        if self.pid is None:
            return ""
        try:
            with open(f"/proc/{self.pid}/fd/{self._stack}", "rb", buffering=0) as pipe:
                os.kill(self.pid, STACK_SIGNAL)
                told = b""
                while is_readable(pipe.fileno(), _SILENT_SECONDS if told else _STACK_SECONDS):
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
            self.kill()
            self.has_ended(GONE_SECONDS)

    def close(self) -> None:
        """Give back what is left of a process that has ended."""
        self._indices.close()
        self._results.close()
        self._child.close()
