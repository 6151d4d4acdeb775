"""One worker of a pool as seen from outside: its pipes, its tasks, and the thread that starts workers."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.util
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from typing import Any

from elastic_ext.errors import WorkerDiedError
from elastic_ext.ranks.deadlines import OwnedThread
from elastic_ext.torch_private.loading import PrivateParts, remove_shared_memory_of

from .fork_server import GONE_SECONDS, Ending, ForkServerStarter, SeparateStarter, Starter, is_readable
from .worker_process import READY, STACK_SIGNAL, STOP, Inbox, PipeOutbox, Seat, WorkerSpec

__all__ = [
    "NOTHING",
    "THREAD_NAME",
    "Raised",
    "Spawner",
    "Started",
    "Task",
    "Unstarted",
    "Worker",
    "in_short",
    "name_samples",
    "reraise",
]

_logger = logging.getLogger(__name__)


# --- one worker process with its pipes, seen from outside ------------------------------------------------------------
# When to start or end one is decided elsewhere.

_STACK_SECONDS = 2.0
_SILENT_SECONDS = 0.1  # a worker that writes nothing for so long has written its whole stack


class Worker:
    """A worker process with its pipes and its tasks, as its pool sees it.

    It is started, and closed, on one thread; in between it belongs to one other.
    """

    def __init__(self, seat: Seat, starter: Starter) -> None:
        self.slot = seat.slot
        self.pid: int | None = None
        """The pid of the process; None before it is ready."""
        self.tasks: deque[Any] = deque()
        """Tasks that the worker was given and has not answered, in order; whoever gives it tasks keeps them here."""
        self.num_answers = 0
        self.num_made = 0
        """How many of the first of ``tasks`` are done, with their batches on their way."""
        self.is_being_read = False
        """Whether the pool is in the middle of reading what the worker has sent."""
        self._stack = -1  # the descriptor, in the worker's process, of the pipe that it writes its stack to
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as in_worker:
            indices, self._indices = multiprocessing.Pipe(duplex=False)
            in_worker.callback(indices.close)
            on_failure.callback(self._indices.close)
            self._results, results = multiprocessing.Pipe(duplex=False)
            in_worker.callback(results.close)
            on_failure.callback(self._results.close)
            self.outbox = PipeOutbox(self._indices.fileno())
            self.inbox = Inbox(self._results.fileno())
            self._child = starter.start(seat, indices, results)
            on_failure.pop_all()

    @property
    def results_descriptor(self) -> int:
        """A descriptor that is readable when there may be messages in ``inbox``."""
        return self._results.fileno()

    @property
    def indices_descriptor(self) -> int:
        """A descriptor that is writable when ``outbox`` may have room again."""
        return self._indices.fileno()

    @property
    def end_descriptor(self) -> int:
        """A descriptor that is readable once the process has ended."""
        return self._child.end_descriptor

    def send(self, number: int, task: object) -> bool:
        """Send a task; gives whether all of it is in the pipe. The rest goes with ``outbox.flush``."""
        return self.outbox.send(number, ForkingPickler.dumps(task))

    def has_begun(self, num_bytes_before: int) -> bool:
        """Whether the worker may have begun with a task that was sent after ``num_bytes_before`` bytes.

        A worker that never answered may have: workers that only ever die are not to be replaced for ever.
        """
        return self.num_answers == 0 or self.outbox.num_read_bytes() > num_bytes_before

    @property
    def doing(self) -> Any:
        """The task that the worker is making or sending; None where it has none."""
        if self.num_made < len(self.tasks) and self.has_begun(self.tasks[self.num_made].num_bytes_before):
            return self.tasks[self.num_made]
        return self.tasks[0] if self.num_made and self.tasks else None  # which it is sending

    def note_ready(self, payload: memoryview) -> None:
        """Take the pid and the pipe of stacks from the worker's first message."""
        pid, self._stack = ForkingPickler.loads(payload)
        self.pid = pid
        self._child.identify(pid)

    def has_ended(self, timeout_seconds: float = 0.0) -> bool:
        """Whether the process is gone, or will be before the time is up."""
        return is_readable(self.end_descriptor, timeout_seconds)

    def kill(self) -> None:
        """Kill the process at once."""
        self._child.kill()

    def ending(self) -> Ending:
        """How the process has ended, which is gone, or just about to be."""
        self.end(GONE_SECONDS)
        return self._child.ending()

    def stack(self) -> str:
        """The Python stack of each of the process's threads, as text; empty if it does not tell."""
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
        """Have the process end after what it does now; what it sends is read no more. Asking twice is allowed."""
        if self._indices.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            self.outbox.send(STOP, memoryview(b""))
        self._indices.close()
        self._results.close()

    def end(self, timeout_seconds: float) -> None:
        """Wait for the end of the process, and kill it if it has not ended in time."""
        if not self.has_ended(timeout_seconds):
            self.kill()
            self.has_ended(GONE_SECONDS)

    def close(self) -> None:
        """Free what is left of the process, which has ended."""
        self._indices.close()
        self._results.close()
        if self.pid is not None:
            remove_shared_memory_of(self.pid)
        self._child.close()


# --- one batch to make, and what came of it; and what people are told of its samples ---------------------------------

NOTHING: Any = object()
"""The outcome of a task that has none so far."""

_MOST_DEATHS = 3  # of workers, over one task
_MOST_LOSSES = 10  # of workers with their fork server, over one task: it is less likely to be the cause


@dataclass(frozen=True, slots=True)
class Raised:
    """The outcome of a task that is an exception of this process."""

    error: Exception


@dataclass(slots=True, eq=False)
class Task:
    """A batch to make; or, as a probe, one of its samples."""

    number: int
    indices: Any
    slot: int | None = None
    """The slot of the worker that has to make it; None: any."""
    batch_index: int = 0
    """How many batches of the loop come before this one."""
    dealt_to: int | None = None
    """The slot that had least to do when the task was submitted; its worker may still be starting."""
    worker: Worker | None = None
    """The worker that makes it; None while it waits for one."""
    num_bytes_before: int = 0
    """How many bytes the worker had been sent before this task."""
    outcome: Any = NOTHING
    arrival: int = 0
    """The number of this outcome among those of the pool's tasks, in the order in which they came."""
    num_deaths: int = 0
    num_losses: int = 0
    """How often its worker died together with its fork server while it made this."""
    is_forgotten: bool = False
    """Whether nobody wants the batch any more."""
    probes_for: Task | None = None
    """For a probe: the task over which workers died, to find the sample that they died of."""

    def blame(self, ending: Ending) -> None:
        """Count that one more worker has died while it made this; after several deaths the outcome is an error."""
        blamed = self.probes_for or self
        if ending.went_with is None:
            blamed.num_deaths += 1
        else:  # which is not its fault
            blamed.num_losses += 1
        if blamed.num_deaths >= _MOST_DEATHS:
            blamed.outcome = Raised(_died_over(self.indices, ending))
        elif blamed.num_losses >= _MOST_LOSSES:
            blamed.outcome = Raised(_lost_over(self.indices, ending.how))

    def probes(self) -> list[Task]:
        """The task's samples one by one, if the next death over it is the last and there are several samples."""
        if self.num_deaths < _MOST_DEATHS - 1 or not isinstance(self.indices, list) or len(self.indices) < 2:
            return []
        return [Task(self.number, [index], self.slot, probes_for=self) for index in self.indices]


def in_short(indices: Any, limit: int = 10) -> str:
    """The indices of a task in words for people."""
    if not isinstance(indices, Sequence) or isinstance(indices, str | bytes):
        return f"sample {indices!r}"
    more = len(indices) - limit
    shown = ", ".join(repr(index) for index in indices[:limit]) + (f" and {more} more" if more > 0 else "")
    return f"sample {shown}" if len(indices) == 1 else f"samples {shown}"


def reraise(task: Task, parts: PrivateParts) -> None:
    """Raise the outcome of a task if that is an exception, as torch does, and say of which sample."""
    outcome = task.outcome
    if type(outcome) is Raised:
        raise outcome.error
    if type(outcome) is not parts.wrapper:
        return
    at = getattr(outcome, "at", ())
    if sys.version_info >= (3, 11):
        try:
            outcome.reraise()
        except BaseException as error:
            name_samples(error, at, task.indices)
            raise
    else:
        outcome.exc_msg += _note(at, task.indices)
        outcome.reraise()


def name_samples(error: BaseException, at: tuple[Any, ...], indices: Any) -> None:
    """Note on an exception, where Python can, which sample was looked up (``at``), or which were made."""
    if sys.version_info >= (3, 11):
        error.add_note(_note(at, indices))


def _note(at: tuple[Any, ...], indices: Any) -> str:
    return f"raised by the dataset for sample {at[0]!r}" if at else f"raised while making {in_short(indices)}"


def _died_over(indices: Any, ending: Ending) -> WorkerDiedError:
    as_torch_says = f" ({ending.as_torch_says}.)" if ending.as_torch_says else ""  # which scripts may look for
    return WorkerDiedError(
        f"{_MOST_DEATHS} worker processes died one after another while they made {in_short(indices)} of the dataset "
        f"(the last: {ending.how}); load these samples in a process of their own to see why, or, where the kernel's "
        f"log says that memory ran out, use fewer workers or smaller batches{as_torch_says}",
        indices=indices if isinstance(indices, list) else [indices],
    )


def _lost_over(indices: Any, how: str) -> WorkerDiedError:
    return WorkerDiedError(
        f"{_MOST_LOSSES} times workers died together with their fork server while they made "
        f"{in_short(indices)} of the dataset (the last: {how}); look into the kernel's log for memory that ran out",
        indices=indices if isinstance(indices, list) else [indices],
    )


# --- the one thread of a pool that starts its worker processes, and sees to it that they end -------------------------
# Workers are started here alone, and pipes are opened and closed here alone. The thread lives as long as the pool,
# since Linux may be told to end a child with the thread that made it.

THREAD_NAME = "elastic_ext worker spawner"
_EVENTS = os.EFD_NONBLOCK | os.EFD_CLOEXEC


@dataclass(frozen=True, slots=True)
class Started:
    """News of the spawner: a worker that can be given tasks."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class Unstarted:
    """News of the spawner: a worker that ended before it was ready, or could not be started."""

    slot: int
    ending: Ending


class Spawner:
    """The thread that starts and ends a pool's workers: takes orders from one thread, and has ``news`` for it."""

    def __init__(
        self, spec: WorkerSpec, context: BaseContext, end_seconds: float, fork_lock: AbstractContextManager[object]
    ) -> None:
        self._end_seconds = end_seconds
        is_fork = context.get_start_method() == "fork"
        self._starter: Starter = (ForkServerStarter if is_fork else SeparateStarter)(spec, context, fork_lock)
        self.news: deque[Started | Unstarted] = deque()
        self.error: Exception | None = None
        """The exception that the thread died of; None unless it did."""
        self._orders: deque[Callable[[], None]] = deque()
        self._seats: deque[Seat] = deque()  # of workers that are to be started
        self._wake_descriptor = os.eventfd(0, _EVENTS)
        self._news_descriptor = os.eventfd(0, _EVENTS)
        self._closing = threading.Event()
        self._is_closed = False
        self._is_abandoned = False
        self._workers: set[Worker] = set()
        self._starting: dict[Worker, None] = {}
        self._ending: dict[Worker, float] = {}  # and when it is killed, on the clock of time.monotonic
        self._poll = select.poll()
        self._poll.register(self._wake_descriptor, select.POLLIN)
        self._thread: OwnedThread | None = None

    @property
    def news_descriptor(self) -> int:
        """A descriptor that is readable when there may be news; ``clear_news_signal`` clears it."""
        return self._news_descriptor

    def clear_news_signal(self) -> None:
        """Clear ``news_descriptor``, so that it tells of later news only."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._news_descriptor)

    def start(self, seat: Seat) -> None:
        """Start a worker, and come back at once; ``news`` will tell of it."""
        if self._thread is None:
            multiprocessing.util.get_temp_dir()  # that workers share: one that is killed leaves none of its own
            self._starter.prepare()
        self._seats.append(seat)
        self._wake()

    def end(self, worker: Worker) -> None:
        """Have a worker end that has nothing to do, or is dead; nobody may use it after that."""
        self._order(partial(self._end, worker))

    def close(self) -> None:
        """End all workers and the thread. Closing twice is allowed."""
        self._closing.set()
        if self._is_closed:
            return
        os.eventfd_write(self._wake_descriptor, 1)
        if self._thread is None:  # an interrupt came before it
            self._starter.close()
        elif not self._thread.wait(None):  # this is that thread, which has collected the pool as garbage
            self._is_abandoned = True
            return
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._is_closed = True
        os.close(self._wake_descriptor)
        os.close(self._news_descriptor)

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._wake_descriptor, 1)
        if self._thread is None:
            self._thread = OwnedThread(self._run, name=THREAD_NAME)
            self._thread.start()

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                while self._orders and not self._closing.is_set():
                    self._orders.popleft()()
                while self._seats and not self._must_wait() and not self._closing.is_set():
                    self._start(self._seats.popleft())
                self._wait()
        except Exception as error:  # the top of a thread: kept for the pool, which raises it
            _logger.error("the thread that starts data workers died", exc_info=error)
            self.error = error
            os.eventfd_write(self._news_descriptor, 1)
        finally:
            self._end_all()
            if self._is_abandoned:
                self._close_descriptors()

    def _must_wait(self) -> bool:
        """Whether the next worker has to wait for one that is being started, while others work.

        A worker that begins takes processors from those that work, wherever it is forked. Where there are fewer
        processors than workers, those that join come later, and a loop waits less for the batches of those that are
        there.
        """
        return bool(self._starting) and len(self._workers) > len(self._starting) + len(self._ending)

    def _wait(self) -> None:
        due = min(self._ending.values(), default=None)
        self._poll.poll(None if due is None else max(due - time.monotonic(), 0.0) * 1000 + 1)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_descriptor)
        for worker in list(self._starting):
            self._look_at(worker)
        for worker, kill_at in list(self._ending.items()):
            if worker.has_ended() or time.monotonic() >= kill_at:
                self._poll.unregister(worker.end_descriptor)
                del self._ending[worker]
                self._bury(worker)

    def _start(self, seat: Seat) -> None:
        try:
            worker = Worker(seat, self._starter)
        except Exception as error:  # pickling runs the user's code: kept for the pool, which raises it
            self._tell(Unstarted(seat.slot, Ending("could not be started", error=error)))
            return
        self._workers.add(worker)
        self._starting[worker] = None
        for descriptor in (worker.results_descriptor, worker.end_descriptor):
            self._poll.register(descriptor, select.POLLIN)

    def _look_at(self, worker: Worker) -> None:
        """See whether a worker that was started has become ready, or has died."""
        has_ended = worker.has_ended()
        try:
            messages = worker.inbox.read()
        except EOFError:
            messages, has_ended = [], True
        if not messages and not has_ended:
            return
        del self._starting[worker]
        for descriptor in (worker.results_descriptor, worker.end_descriptor):
            self._poll.unregister(descriptor)
        if messages:
            ((number, payload),) = messages
            assert number == READY
            worker.note_ready(payload)
            self._tell(Started(worker))
        else:
            ending = worker.ending()
            self._bury(worker)
            self._tell(Unstarted(worker.slot, ending))

    def _end(self, worker: Worker) -> None:
        worker.ask_to_end()
        self._ending[worker] = time.monotonic() + self._end_seconds
        self._poll.register(worker.end_descriptor, select.POLLIN)

    def _bury(self, worker: Worker) -> None:
        worker.end(0.0)
        worker.close()
        self._workers.discard(worker)

    def _end_all(self) -> None:
        for worker in self._workers:
            worker.ask_to_end()
        self._starter.start_no_more()
        until = time.monotonic() + self._end_seconds
        for worker in list(self._workers):
            worker.end(max(until - time.monotonic(), 0.0))
            self._bury(worker)
        self._starter.close()

    def _tell(self, news: Started | Unstarted) -> None:
        self.news.append(news)
        os.eventfd_write(self._news_descriptor, 1)
