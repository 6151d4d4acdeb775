"""Crew: the workers that there are, and those that there should be. What they are given to do is not its affair.

A worker is *ready* once it can be given tasks. Its *slot* is its id, which another is given after it. It *retires* when
it is one too many and nothing of it is wanted any more.
"""

from __future__ import annotations

import logging
import select
import weakref
from contextlib import AbstractContextManager
from multiprocessing.context import BaseContext

from elastic_ext.errors import ElasticError, WorkerDiedError

from .process import Seat, Work
from .spawner import Spawner, Started, Unstarted
from .worker import Worker

__all__ = ["Crew"]

_logger = logging.getLogger(__name__)

_MOST_UNSTARTED = 3
_SEED_STRIDE = 0x9E3779B97F4A7C15  # odd, and far from what slots add


class Crew:
    """Starts and retires workers through a spawner, and waits for them. It is called on one thread."""

    def __init__(
        self, work: Work, context: BaseContext, end_seconds: float, may_start: AbstractContextManager[object]
    ) -> None:
        self.ready: list[Worker] = []
        """Who may be given tasks."""
        self.num_wanted = 0
        self._is_first = False
        self._base_seed = work.base_seed
        self._slots: dict[int, Worker | None] = {}  # None: being started
        self._num_starts: dict[int, int] = {}  # by slot
        self._num_unstarted = 0  # since a worker was last ready
        self._went_with: int | None = None  # what the last of them was forked from, if that is why
        self._unstarted: Unstarted | None = None  # why no more are started for now
        self._poll = select.poll()
        self._polled: dict[int, Worker] = {}  # by each descriptor of theirs
        self._spawner = Spawner(work, context, end_seconds, may_start)
        self.news = self._spawner.news
        """Not empty when ``absorb`` has something to do."""
        self._poll.register(self._spawner.news_descriptor, select.POLLIN)
        self._end = weakref.finalize(self, self._spawner.close)  # at the interpreter's end too

    @property
    def is_closed(self) -> bool:
        """Nothing will be made any more."""
        return not self._end.alive

    @property
    def num_starting(self) -> int:
        """How many are on their way to be ready."""
        return sum(worker is None for worker in self._slots.values())

    def has(self, worker: Worker) -> bool:
        """Whether a worker still belongs to it."""
        return self._slots.get(worker.slot) is worker

    def awaits(self, slot: int) -> bool:
        """Whether a worker is started there that is to be waited for, since all are for the first time."""
        return self._is_first and slot in self._slots

    def want(self, num_workers: int, *, is_first: bool = False) -> None:
        """Have so many workers from now on; what kept some from starting may be over."""
        self.num_wanted, self._is_first = num_workers, is_first
        self._num_unstarted, self._unstarted = 0, None

    def absorb(self) -> None:
        """Take over the workers that have become ready."""
        while self.news:
            news = self.news.popleft()
            if isinstance(news, Started):
                worker = news.worker
                self._num_unstarted = 0
                self._slots[worker.slot] = worker
                self._watch(worker, worker.results_descriptor, select.POLLIN)
                self._watch(worker, worker.end_descriptor, select.POLLIN)
            else:
                self._note_unstarted(news)

    def fit(self, *, at_least: int = 0) -> None:
        """Start the workers that are missing, and retire those that are too many."""
        num_wanted = max(self.num_wanted, at_least)
        for slot in range(num_wanted):
            if slot not in self._slots and self._unstarted is None:
                self._slots[slot] = None
                self._spawner.start(self._seat(slot, num_wanted))
        workers = [worker for worker in self._slots.values() if worker is not None]
        self.ready = [worker for worker in workers if worker.slot < num_wanted]
        for worker in workers:
            if worker.slot >= num_wanted and all(task.is_forgotten for task in worker.tasks):
                self.drop(worker)

    def drop(self, worker: Worker) -> None:
        """Use a worker no more, and have it end."""
        self._is_first = False
        del self._slots[worker.slot]
        if worker in self.ready:
            self.ready.remove(worker)
        for descriptor in [each for each, whose in self._polled.items() if whose is worker]:
            self._unwatch(descriptor)
        self._spawner.end(worker)

    def send(self, worker: Worker, number: int, task: object) -> None:
        """Have a task reach a worker; one that is dead is seen to be so by who waits for it."""
        try:
            if not worker.send(number, task):
                self._watch(worker, worker.indices_descriptor, select.POLLOUT)
        except BrokenPipeError:
            pass

    def wait(self, timeout_seconds: float | None) -> dict[Worker, bool] | None:
        """Wait for news, answers and deaths: whom to look at and whether it has ended; None if nothing came in time."""
        milliseconds = None if timeout_seconds is None else max(timeout_seconds, 0.0) * 1000
        seen: dict[Worker, bool] = {}
        events = self._poll.poll(milliseconds)
        for descriptor, _ in events:
            worker = self._polled.get(descriptor)
            if worker is None:
                self._spawner.heard()
            elif descriptor != worker.indices_descriptor:
                seen[worker] = seen.get(worker, False) or descriptor == worker.end_descriptor
            elif self._is_sent(worker):
                self._unwatch(descriptor)
        return seen if events else None

    def check_some_will_come(self) -> None:
        """Raise why there is no worker and none will be ready, if so it is."""
        if self._spawner.error is not None:
            raise ElasticError("the thread that starts data workers died; its log has the traceback") from (
                self._spawner.error
            )
        if self.news or None in self._slots.values() or self._unstarted is None:
            return
        if self._unstarted.ending.error is not None:
            raise self._unstarted.ending.error
        raise WorkerDiedError(
            f"{self._num_unstarted} data workers died one after another before they were ready (the last: "
            f"{self._unstarted.ending.how}); see what worker_init_fn and the dataset's own start do, and standard error"
        )

    def close(self) -> None:
        """End all workers, within seconds. Closing twice is allowed."""
        self._end()
        self._spawner.close()  # again, if it was interrupted
        self.news.clear()
        self._slots.clear()
        self._polled.clear()
        self.ready = []

    def _seat(self, slot: int, num_workers: int) -> Seat:
        # The first worker of a slot is seeded as torch's is; later ones must not repeat its random numbers.
        num_before = self._num_starts.get(slot, 0)
        self._num_starts[slot] = num_before + 1
        base_seed = (self._base_seed + num_before * _SEED_STRIDE) % 2**63 if num_before else self._base_seed
        return Seat(slot=slot, num_workers=num_workers, base_seed=base_seed)

    def _note_unstarted(self, news: Unstarted) -> None:
        del self._slots[news.slot]
        ending = news.ending
        if ending.went_with is None or ending.went_with != self._went_with:  # those that go together count once
            self._num_unstarted += 1
        self._went_with = ending.went_with
        if ending.error is not None or self._num_unstarted >= _MOST_UNSTARTED:
            self._unstarted = news
        reason = ending.how if ending.error is None else f"could not be started: {ending.error}"
        _logger.warning("data worker %d was never ready: %s", news.slot, reason)

    def _is_sent(self, worker: Worker) -> bool:
        try:
            return worker.outbox.flush()
        except BrokenPipeError:
            return True

    def _watch(self, worker: Worker, descriptor: int, event: int) -> None:
        self._polled[descriptor] = worker
        self._poll.register(descriptor, event)

    def _unwatch(self, descriptor: int) -> None:
        del self._polled[descriptor]
        self._poll.unregister(descriptor)
