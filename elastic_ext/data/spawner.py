"""Spawner: the one thread of a pool that starts its worker processes, and sees to it that they end.

Workers are started here alone, and pipes are opened and closed here alone. The thread lives as long as the pool, since
Linux may be told to end a child with the thread that made it.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.util
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import BaseContext

from .child import Ending, Separate, Starter
from .nursery import Nurseries
from .process import READY, Seat, Work
from .worker import Worker

__all__ = ["THREAD_NAME", "Spawner", "Started", "Unstarted"]

_logger = logging.getLogger(__name__)

THREAD_NAME = "elastic_ext worker spawner"
_EVENTS = os.EFD_NONBLOCK | os.EFD_CLOEXEC


@dataclass(frozen=True, slots=True)
class Started:
    """A worker that can be given tasks."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class Unstarted:
    """A worker that never could."""

    slot: int
    ending: Ending


class Spawner:
    """Takes orders from one thread, and has ``news`` for it."""

    def __init__(
        self, work: Work, context: BaseContext, end_seconds: float, may_start: AbstractContextManager[object]
    ) -> None:
        self._end_seconds = end_seconds
        is_fork = context.get_start_method() == "fork"
        self._starter: Starter = (Nurseries if is_fork else Separate)(work, context, may_start)
        self.news: deque[Started | Unstarted] = deque()
        self.error: Exception | None = None
        """Why the thread is gone, None unless it failed."""
        self._orders: deque[Callable[[], None]] = deque()
        self._seats: deque[Seat] = deque()  # of workers that are to be started
        self._told = os.eventfd(0, _EVENTS)
        self._has_news = os.eventfd(0, _EVENTS)
        self._closing = threading.Event()
        self._is_closed = False
        self._is_abandoned = False
        self._workers: set[Worker] = set()
        self._starting: dict[Worker, None] = {}
        self._ending: dict[Worker, float] = {}  # and when it is killed, on the clock of time.monotonic
        self._poll = select.poll()
        self._poll.register(self._told, select.POLLIN)
        self._thread: threading.Thread | None = None

    @property
    def news_descriptor(self) -> int:
        """Readable when there may be news; ``heard`` clears it."""
        return self._has_news

    def heard(self) -> None:
        """Be told of later news only."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._has_news)

    def start(self, seat: Seat) -> None:
        """Start a worker; comes back at once, and there will be news of it."""
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
        os.eventfd_write(self._told, 1)
        if self._thread is not None:
            if self._thread is threading.current_thread():  # which may collect garbage
                self._is_abandoned = True
                return
            self._thread.join()
        else:
            self._starter.close()  # an interrupt came before the thread
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._is_closed = True
        os.close(self._told)
        os.close(self._has_news)

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._told, 1)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
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
            os.eventfd_write(self._has_news, 1)
        finally:
            self._end_all()
            if self._is_abandoned:
                self._close_descriptors()

    def _must_wait(self) -> bool:
        """Others work, and one is on its way: what it takes of the processors to begin, they do without.

        So it is wherever it is forked. Where there are fewer processors than workers, those that join come later, and a
        loop waits less for the batches of those that are there.
        """
        return bool(self._starting) and len(self._workers) > len(self._starting) + len(self._ending)

    def _wait(self) -> None:
        due = min(self._ending.values(), default=None)
        self._poll.poll(None if due is None else max(due - time.monotonic(), 0.0) * 1000 + 1)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._told)
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
        self._starter.retire()
        until = time.monotonic() + self._end_seconds
        for worker in list(self._workers):
            worker.end(max(until - time.monotonic(), 0.0))
            self._bury(worker)
        self._starter.close()

    def _tell(self, news: Started | Unstarted) -> None:
        self.news.append(news)
        os.eventfd_write(self._has_news, 1)
