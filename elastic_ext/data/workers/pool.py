"""A pool of worker processes that make batches: which workers there are, which task goes to which, and what happens
when one dies.
"""

from __future__ import annotations

import errno
import logging
import select
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from types import TracebackType
from typing import Any

from elastic_ext.data.prefetch import BatchNotReady
from elastic_ext.errors import ElasticError, WorkerDiedError
from elastic_ext.torch_private.loading import private_parts, thread_state

from .worker import NOTHING, Raised, Spawner, Started, Task, Unstarted, Worker, in_short, reraise
from .worker_process import MADE, Seat, WorkerSpec

__all__ = ["Crew", "Pool", "TaskAssigner", "WorkerSpec"]

_logger = logging.getLogger(__name__)


# --- the workers that there are, and those that there should be ------------------------------------------------------
# Which tasks they are given is decided by TaskAssigner, below.
#
# A worker is *ready* once it can be given tasks. Its *slot* is its id, which another is given after it. It *retires*
# when it is one too many and nothing of it is wanted any more.

_MOST_UNSTARTED = 3
_SEED_STRIDE = 0x9E3779B97F4A7C15  # odd, and far from what slots add


class Crew:
    """The workers of a pool: starts and retires them by a spawner, and waits for them. It is called on one thread."""

    def __init__(
        self, spec: WorkerSpec, context: BaseContext, end_seconds: float, fork_lock: AbstractContextManager[object]
    ) -> None:
        self.ready: list[Worker] = []
        """The workers that may be given tasks."""
        self.num_wanted = 0
        self._is_first = False  # the wanted workers are the first ones, and none was dropped
        self._base_seed = spec.base_seed
        self._slots: dict[int, Worker | None] = {}  # None: being started
        self._num_starts: dict[int, int] = {}  # by slot
        self._num_unstarted = 0  # since a worker was last ready
        self._went_with: int | None = None  # the pid of the fork server that the last of them ended with
        self._unstarted: Unstarted | None = None  # why no more are started for now
        self._poll = select.poll()
        self._polled: dict[int, Worker] = {}  # by each descriptor of theirs
        self._spawner = Spawner(spec, context, end_seconds, fork_lock)
        self.news = self._spawner.news
        """What the spawner tells of started workers; not empty when ``absorb`` has something to do."""
        self._poll.register(self._spawner.news_descriptor, select.POLLIN)
        self._end = weakref.finalize(self, self._spawner.close)  # at the interpreter's end too

    @property
    def is_closed(self) -> bool:
        """Whether the workers have been ended for good."""
        return not self._end.alive

    @property
    def num_starting(self) -> int:
        """How many workers are being started."""
        return sum(worker is None for worker in self._slots.values())

    def has(self, worker: Worker) -> bool:
        """Whether a worker still belongs to the crew."""
        return self._slots.get(worker.slot) is worker

    def awaits(self, slot: int) -> bool:
        """Whether the worker of this slot is waited for: it is one of the first, which all start together."""
        return self._is_first and slot in self._slots

    def want(self, num_workers: int, *, is_first: bool = False) -> None:
        """Want this many workers from now on; try again to start those that could not be started."""
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
        """Take a worker out of the crew, and have its process end."""
        self._is_first = False
        del self._slots[worker.slot]
        if worker in self.ready:
            self.ready.remove(worker)
        for descriptor in [each for each, whose in self._polled.items() if whose is worker]:
            self._unwatch(descriptor)
        self._spawner.end(worker)

    def send(self, worker: Worker, number: int, task: object) -> None:
        """Send a task to a worker; that a worker is dead shows where its answer is waited for."""
        try:
            if not worker.send(number, task):
                self._watch(worker, worker.indices_descriptor, select.POLLOUT)
        except BrokenPipeError:
            pass

    def wait(self, timeout_seconds: float | None) -> dict[Worker, bool] | None:
        """Wait for news, answers and deaths: the workers to look at, and whether each ended; None if time was up."""
        milliseconds = None if timeout_seconds is None else max(timeout_seconds, 0.0) * 1000
        seen: dict[Worker, bool] = {}
        events = self._poll.poll(milliseconds)
        for descriptor, _ in events:
            worker = self._polled.get(descriptor)
            if worker is None:
                self._spawner.clear_news_signal()
            elif descriptor != worker.indices_descriptor:
                seen[worker] = seen.get(worker, False) or descriptor == worker.end_descriptor
            elif self._is_sent(worker):
                self._unwatch(descriptor)
        return seen if events else None

    def check_some_will_come(self) -> None:
        """Raise, with the reason, where there is no worker and none will be ready."""
        if self._spawner.error is not None:
            raise ElasticError(
                "the thread that starts data workers died, so that this loop gets no more batches; the log of this "
                "process has the thread's traceback"
            ) from self._spawner.error
        if self.news or None in self._slots.values() or self._unstarted is None:
            return
        if self._unstarted.ending.error is not None:
            raise self._unstarted.ending.error
        raise WorkerDiedError(
            f"{self._num_unstarted} data workers died one after another before they were ready (the last: "
            f"{self._unstarted.ending.how}); look for the cause in worker_init_fn, in unpickling the dataset, and in "
            "the workers' standard error"
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
        reason = ending.how if ending.error is None else f"its process could not be started: {ending.error}"
        level = logging.INFO if ending.was_told_to_end else logging.WARNING  # a job that is told to end starts workers
        _logger.log(level, "data worker %d was never ready: %s", news.slot, reason)

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


# --- which worker is given which task --------------------------------------------------------------------------------
# What comes of a task is the pool's affair.


class TaskAssigner:
    """Gives tasks to the workers of a crew, and keeps those for which there is none yet.

    With ``round_robin`` batch i of a loop goes to worker i mod n, as in torch, so that each worker makes the same
    batches each time. Else the worker with least to do is given the next task, and of several such the one whose turn
    it is. Where that worker is not ready another makes the batch; but the workers that the pool starts first are waited
    for, and so is the worker of a slot that a task names.
    """

    def __init__(self, crew: Crew, *, round_robin: bool = False) -> None:
        self.waiting: deque[Task] = deque()
        """The tasks that no worker has, in order."""
        self._crew = crew
        self._round_robin = round_robin

    def choose_slot(self, task: Task) -> None:
        """Choose the slot with least to do for a task, if any worker may make it; tasks that wait for one count too."""
        if self._round_robin or task.slot is not None or self._crew.num_wanted == 0:
            return
        num_slots = self._crew.num_wanted
        loads = dict.fromkeys(range(num_slots), 0) | {each.slot: len(each.tasks) for each in self._crew.ready}
        for each in self.waiting:
            if each.dealt_to is not None:
                loads[each.dealt_to] = loads.get(each.dealt_to, 0) + 1
        least = min(range(num_slots), key=lambda slot: (loads[slot], (slot - task.batch_index) % num_slots))
        if self._crew.awaits(least) or any(each.slot == least for each in self._crew.ready):
            task.dealt_to = least

    def worker_for(self, task: Task) -> Worker | None:
        """The ready worker that a task goes to, of its slot or with least to do; None where the task has to wait."""
        found: Worker | None = None
        slot = self._slot_for(task)
        for worker in self._crew.ready:
            if worker.slot == slot:
                return worker
            if found is None or len(worker.tasks) < len(found.tasks):
                found = worker
        is_awaited = task.slot is not None or (slot is not None and self._crew.awaits(slot))
        return None if is_awaited else found

    def give(self, task: Task, worker: Worker) -> None:
        """Give a task to a worker.

        Where workers have died over the task, its ``probes`` may go first: its samples one by one, to find the one that
        kills workers.
        """
        task.worker = worker
        for each_task in (*task.probes(), task) if task.num_deaths else (task,):
            worker.tasks.append(each_task)
            each_task.num_bytes_before = worker.outbox.num_sent_bytes
            self._crew.send(worker, each_task.number, each_task.indices)

    def hand_out(self) -> None:
        """Give out the tasks that are waiting.

        Where half of the workers or more are still starting, their tasks are kept for them unless another is idle.
        """
        num_ready, num_starting = len(self._crew.ready), self._crew.num_starting
        num_dealt_to = num_ready + (num_starting if num_starting >= num_ready else 0)
        left: deque[Task] = deque()
        for task in self.waiting:
            worker = self.worker_for(task)
            if worker is not None and (
                worker.slot == self._slot_for(task) or task.batch_index % num_dealt_to < num_ready or not worker.tasks
            ):
                self.give(task, worker)
            else:
                left.append(task)
        self.waiting = left

    def _slot_for(self, task: Task) -> int | None:
        """The slot whose worker is the first choice for a task; None where there is none."""
        if task.slot is None and self._round_robin:
            return task.batch_index % max(self._crew.num_wanted, 1)
        return task.dealt_to if task.slot is None else task.slot

    def take_back(self, tasks: Iterable[Task]) -> None:
        """Have tasks wait again, each in its place: their worker will not make them."""
        again = list(tasks)
        for task in again:
            task.worker = None
        self.waiting = deque(sorted([*self.waiting, *again], key=lambda task: task.number))


# --- worker processes that make batches, and are started and retired while they do -----------------------------------
# Batches come back whatever happens to the workers: one that dies is replaced, and what it had been given is made
# again. Which batches are made, and in which order they are used, is the caller's affair.

_DYING_SECONDS = 1.0  # how long a process may go on after the memory that it shares is gone
_LOST: Any = object()  # instead of an answer whose tensors were in the memory of a worker that has died


class Pool:
    """Worker processes behind a loader. All of it is called on one thread.

    ``timeout_seconds`` is how long ``take`` and ``first_made`` wait for the next answer of the workers that have the
    tasks, and ``wait_ready`` in all; 0: for ever.
    A worker that is to end and does not in ``end_seconds`` is killed. ``finish`` is given each batch as it comes, and
    gives what is to be taken, or its future. With ``round_robin`` workers are given batches in turn, else whoever has
    least to do is. Processes are started on another thread, which holds ``fork_lock`` as it forks or pickles: a thread
    that loads samples holds it meanwhile, so that no process is forked while that thread holds locks of the dataset's.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        context: BaseContext,
        timeout_seconds: float = 0.0,
        end_seconds: float = 5.0,
        finish: Callable[[Any], Future[Any] | Any] | None = None,
        fork_lock: AbstractContextManager[object] | None = None,
        round_robin: bool = False,
    ) -> None:
        self._parts = private_parts()  # torch's ExceptionWrapper, in which exceptions of workers come
        self._thread_state = thread_state()  # to keep it alive, also in processes that another thread forks
        self._timeout_seconds = timeout_seconds
        self._finish = finish
        self._tasks: dict[int, Task] = {}  # neither taken nor forgotten
        self._num_submitted = self._num_settled = 0
        self._crew = Crew(spec, context, end_seconds, fork_lock or nullcontext())
        self._news = self._crew.news
        self._assigner = TaskAssigner(self._crew, round_robin=round_robin)

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def num_ready(self) -> int:
        """How many workers can be given tasks."""
        self._check_open()
        self._wait(0.0)
        return len(self._crew.ready)

    def resize(self, num_workers: int, *, is_first: bool = False) -> None:
        """Want this many workers, and come back at once. Where they are the first, tasks wait for them in turn."""
        self._check_open()
        self._crew.want(num_workers, is_first=is_first)
        self._arrange()

    def wait_ready(self, num_workers: int = 1) -> None:
        """Wait until ``num_workers`` workers are ready, or all that are wanted."""
        self._check_open()
        self._arrange()
        until = self._deadline()
        while len(self._crew.ready) < min(num_workers, self._crew.num_wanted):
            self._crew.check_some_will_come()
            if not self._wait(_left(until)):
                raise RuntimeError(
                    f"DataLoader timed out after {self._timeout_seconds} seconds: {len(self._crew.ready)} of "
                    f"{num_workers} workers were ready; look for the cause in worker_init_fn and in unpickling the "
                    "dataset"
                )

    def submit(self, number: int, indices: Any, slot: int | None = None, batch_index: int | None = None) -> None:
        """Have a batch made by the worker of ``slot``, by the one whose turn it is at ``batch_index``, or by any.

        Numbers grow.
        """
        task = Task(number, indices, slot, batch_index=self._num_submitted if batch_index is None else batch_index)
        self._assigner.choose_slot(task)
        worker = None
        if not (self._news or self._assigner.waiting or self._crew.num_starting):
            worker = self._assigner.worker_for(task)
        self._tasks[number] = task
        if worker is not None:
            self._assigner.give(task, worker)
        else:
            self._check_open()
            self._assigner.waiting.append(task)
            self._arrange()
        self._num_submitted += 1

    def take(self, number: int) -> Any:
        """The batch of a number, once; raises what its making raised."""
        task = self._tasks[number]
        if task.outcome is NOTHING:
            self._wait_for([task])
        if isinstance(task.outcome, Future):
            wait([task.outcome])  # a KeyboardInterrupt here leaves the batch for the next call
        del self._tasks[number]
        reraise(task, self._parts)
        return task.outcome.result() if isinstance(task.outcome, Future) else task.outcome

    def first_made(self, numbers: Sequence[int]) -> int:
        """Which of these numbers' batches has come first, once one has; none of them was taken."""
        tasks = [self._tasks[number] for number in numbers]
        self._wait_for(tasks)
        return min((task for task in tasks if task.outcome is not NOTHING), key=lambda task: task.arrival).number

    def forget(self, number: int) -> None:
        """Drop the batch of this number: nobody will take it."""
        if self._crew.is_closed:
            return
        task = self._tasks.pop(number)
        task.is_forgotten = True
        if task in self._assigner.waiting:
            self._assigner.waiting.remove(task)
        elif task.worker is not None and task.outcome is NOTHING:
            self._receive(task.worker)
            self._fit()

    def close(self) -> None:
        """End all workers, within seconds; what was not taken is lost. Closing twice is allowed."""
        self._crew.close()
        self._tasks.clear()
        self._assigner.waiting.clear()

    # --- workers come and go ---

    def _arrange(self) -> None:
        """Take over new workers, start and retire some as needed, and have tasks made that were waiting for one."""
        self._crew.absorb()
        self._fit()
        self._assigner.hand_out()

    def _fit(self) -> None:
        self._crew.fit(at_least=1 if self._assigner.waiting else 0)

    # --- batches come in ---

    def _wait_for(self, tasks: Sequence[Task]) -> None:
        """Wait until one of these tasks has an outcome."""
        for worker in {task.worker for task in tasks if task.outcome is NOTHING}:
            if worker is not None:
                self._receive(worker)  # most often it is there, or is the next to come
        if self._news or self._assigner.waiting:
            self._arrange()
        last_sign: object = None
        until: float | None = None
        while all(task.outcome is NOTHING for task in tasks):
            self._check_open()
            workers = list(dict.fromkeys(task.worker for task in tasks if task.worker is not None))
            if not workers:
                self._crew.check_some_will_come()
            sign = (workers, *[each.num_answers for each in (workers or self._crew.ready)])
            if sign != last_sign:
                last_sign, until = sign, self._deadline()
            if not self._wait(_left(until), tasks):
                raise _timed_out(self._timeout_seconds, next(iter(workers or self._crew.ready), None))

    def _wait(self, timeout_seconds: float | None, tasks: Sequence[Task] = ()) -> bool:
        """Take in what comes next, from any worker until one of the tasks is done; False if nothing came in time."""
        seen = self._crew.wait(timeout_seconds)
        if seen is None:
            return False
        for worker in [task.worker for task in tasks]:
            if worker is not None and worker in seen:
                self._look_at(worker, seen.pop(worker))
        for worker, has_ended in seen.items():
            if any(task.outcome is not NOTHING for task in tasks):
                break  # the others are seen again
            self._look_at(worker, has_ended)
        if self._news:
            self._arrange()
        return True

    def _look_at(self, worker: Worker, has_ended: bool) -> None:
        if not self._crew.has(worker):
            return
        if has_ended and worker.has_ended():  # and not another that had its descriptor
            self._bury(worker)
        else:
            self._receive(worker)

    def _receive(self, worker: Worker) -> None:
        """Take in what a worker has sent."""
        if worker.is_being_read:  # an interrupt got in between: what it sent then is lost
            worker.kill()
            self._bury(worker)
            return
        worker.is_being_read = True
        try:
            messages = worker.inbox.read()
        except EOFError:
            self._bury(worker)
            return
        is_whole = True
        for number, payload in messages:
            is_whole = self._settle(worker, number, payload) and is_whole
        worker.is_being_read = False
        if not is_whole:  # before it can be taken for one that has done all it had
            self._bury(worker)
        elif messages and worker.slot >= self._crew.num_wanted:
            self._fit()
        if self._assigner.waiting:
            self._assigner.hand_out()

    def _settle(self, worker: Worker, number: int, payload: memoryview) -> bool:
        """Take in an answer of a worker; False if memory that the answer refers to went with the worker."""
        if number == MADE:
            worker.num_made += 1
            return True
        worker.num_made = max(worker.num_made - 1, 0)
        worker.num_answers += 1
        task = worker.tasks.popleft()
        outcome = _loaded(worker, payload)
        if outcome is _LOST:
            return False
        is_batch = type(outcome) not in (Raised, self._parts.wrapper)
        if is_batch and self._finish is not None and not task.is_forgotten and task.probes_for is None:
            outcome = self._finish(outcome)
        self._num_settled += 1
        task.outcome, task.arrival = outcome, self._num_settled
        return True

    def _bury(self, worker: Worker) -> None:
        """Take in what a dead worker has left, and have other workers make what it has not."""
        if not worker.is_being_read:
            try:
                while messages := worker.inbox.read():
                    for number, payload in messages:
                        self._settle(worker, number, payload)
            except EOFError:
                pass
        ending = worker.ending()
        doing = worker.doing
        _logger.warning(
            "data worker %d died (%s) %s; another takes its place",
            worker.slot,
            ending.how,
            "while it had nothing to do" if doing is None else f"while it made {in_short(doing.indices)}",
        )
        if doing is not None:
            doing.blame(ending)
        self._assigner.take_back(
            task for task in self._tasks.values() if task.worker is worker and task.outcome is NOTHING
        )
        self._crew.drop(worker)
        self._arrange()

    # --- what is wrong ---

    def _check_open(self) -> None:
        if self._crew.is_closed:
            raise ValueError("the pool of data workers is closed; make another pool")

    def _deadline(self) -> float | None:
        return time.monotonic() + self._timeout_seconds if self._timeout_seconds > 0 else None


def _timed_out(after_seconds: float, worker: Worker | None) -> BatchNotReady:
    """The error to raise where nothing came in time from a worker."""
    message = f"DataLoader timed out after {after_seconds} seconds: "
    if worker is None:
        return BatchNotReady(
            f"{message}no worker was ready; look for the cause in worker_init_fn and in unpickling the dataset"
        )
    making = "has no batch to make" if worker.doing is None else f"is making {in_short(worker.doing.indices)}"
    stack = worker.stack()
    where = f"its threads are here:\n{stack}" if stack else "where it hangs is not known, since it gives no stack"
    return BatchNotReady(f"{message}worker {worker.slot} (pid {worker.pid}) {making}; {where}")


def _left(until: float | None) -> float | None:
    return None if until is None else max(until - time.monotonic(), 0.0)


def _loaded(worker: Worker, payload: memoryview) -> Any:
    try:
        return ForkingPickler.loads(payload)
    except Exception as error:  # what the user's classes raise included: kept for who takes the batch
        if isinstance(error, OSError | EOFError) and worker.has_ended(_DYING_SECONDS):
            return _LOST  # its tensors went with it
        if getattr(error, "errno", None) == errno.EMFILE or "ancdata" in str(error):
            return Raised(
                RuntimeError(
                    "Too many open files. Communication with the workers is no longer possible. Please increase "
                    "the limit using `ulimit -n` in the shell, or change the sharing strategy by calling "
                    "`torch.multiprocessing.set_sharing_strategy('file_system')` at the beginning of your code"
                )
            )
        return Raised(error)
