"""Pool: worker processes that make batches, and are started and retired while they do.

Batches come back whatever happens to the workers: one that dies is replaced, and what it had been given is made again.
Which batches are made, and in which order they are used, is the caller's affair.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from types import TracebackType
from typing import Any

from elastic_ext.torch_private.loading import private_parts, thread_state

from .crew import Crew
from .dealing import Dealing
from .late import Late
from .process import MADE, Work
from .tasks import NOTHING, Raised, Task, in_short, reraise
from .worker import Worker

__all__ = ["Pool", "Work"]

_logger = logging.getLogger(__name__)

_DYING_SECONDS = 1.0  # between the end of what a process shares and its own
_LOST: Any = object()


class Pool:
    """Worker processes behind a loader. All of it is called on one thread.

    ``timeout_seconds`` is how long ``take`` and ``wait_ready`` wait without a sign of whom they wait for; 0: for ever.
    A worker that is to end and does not in ``end_seconds`` is killed. ``finish`` is given each batch as it comes, and
    gives what is to be taken, or its future. ``in_turn`` workers are given batches one after another, else whoever has
    least to do is. Processes are started within ``may_start``, on another thread: who holds
    it is in the middle of nothing that they would find locked for ever.
    """

    def __init__(
        self,
        work: Work,
        *,
        context: BaseContext,
        timeout_seconds: float = 0.0,
        end_seconds: float = 5.0,
        finish: Callable[[Any], Future[Any] | Any] | None = None,
        may_start: AbstractContextManager[object] | None = None,
        in_turn: bool = False,
    ) -> None:
        self._parts = private_parts()
        self._thread_state = thread_state()  # another thread forks
        self._timeout_seconds = timeout_seconds
        self._finish = finish
        self._tasks: dict[int, Task] = {}  # neither taken nor forgotten
        self._num_submitted = self._num_settled = 0
        self._crew = Crew(work, context, end_seconds, may_start or nullcontext())
        self._news = self._crew.news
        self._dealing = Dealing(self._crew, in_turn=in_turn)

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
        """Have so many workers, in a while: comes back at once. The first ones are waited for in turn."""
        self._check_open()
        self._crew.want(num_workers, is_first=is_first)
        self._arrange()

    def wait_ready(self, num_workers: int = 1) -> None:
        """Wait until so many workers are ready, of those that are wanted."""
        self._check_open()
        self._arrange()
        until = self._deadline()
        while len(self._crew.ready) < min(num_workers, self._crew.num_wanted):
            self._crew.check_some_will_come()
            if not self._wait(_left(until)):
                raise RuntimeError(
                    f"DataLoader timed out after {self._timeout_seconds} seconds: {len(self._crew.ready)} of "
                    f"{num_workers} workers were ready; see what worker_init_fn and the dataset's own start do"
                )

    def submit(self, number: int, indices: Any, slot: int | None = None, turn: int | None = None) -> None:
        """Have a batch made, by the worker of that slot, by the one whose ``turn`` it is, or by any. Numbers grow."""
        task = Task(number, indices, slot, turn=self._num_submitted if turn is None else turn)
        self._dealing.deal(task)
        worker = None
        if not (self._news or self._dealing.waiting or self._crew.num_starting):
            worker = self._dealing.worker_for(task)
        self._tasks[number] = task
        if worker is not None:
            self._dealing.give(task, worker)
        else:
            self._check_open()
            self._dealing.waiting.append(task)
            self._arrange()
        self._num_submitted += 1

    def take(self, number: int) -> Any:
        """The batch of a number, once; raises what its making raised."""
        task = self._tasks[number]
        if task.outcome is NOTHING:
            self._wait_for([task])
        del self._tasks[number]
        reraise(task, self._parts)
        return task.outcome.result() if isinstance(task.outcome, Future) else task.outcome

    def first_made(self, numbers: Sequence[int]) -> int:
        """Which of these numbers' batches has come first, once one has; none of them was taken."""
        tasks = [self._tasks[number] for number in numbers]
        self._wait_for(tasks)
        return min((task for task in tasks if task.outcome is not NOTHING), key=lambda task: task.came).number

    def forget(self, number: int) -> None:
        """Nobody will take the batch of this number."""
        if self._crew.is_closed:
            return
        task = self._tasks.pop(number)
        task.is_forgotten = True
        if task in self._dealing.waiting:
            self._dealing.waiting.remove(task)
        elif task.worker is not None and task.outcome is NOTHING:
            self._receive(task.worker)
            self._fit()

    def close(self) -> None:
        """End all workers, within seconds; what was not taken is lost. Closing twice is allowed."""
        self._crew.close()
        self._tasks.clear()
        self._dealing.waiting.clear()

    # --- workers come and go ---

    def _arrange(self) -> None:
        """Take over new workers, start and retire some as needed, and have tasks made that were waiting for one."""
        self._crew.absorb()
        self._fit()
        self._dealing.hand_out()

    def _fit(self) -> None:
        self._crew.fit(at_least=1 if self._dealing.waiting else 0)

    # --- batches come in ---

    def _wait_for(self, tasks: Sequence[Task]) -> None:
        """Wait until something has come of one of these."""
        for worker in {task.worker for task in tasks if task.outcome is NOTHING}:
            if worker is not None:
                self._receive(worker)  # most often it is there, or is the next to come
        if self._news or self._dealing.waiting:
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
        if worker.is_heard:  # an interrupt got in between: what it sent then is lost
            worker.kill()
            self._bury(worker)
            return
        worker.is_heard = True
        try:
            messages = worker.inbox.read()
        except EOFError:
            self._bury(worker)
            return
        is_whole = True
        for number, payload in messages:
            is_whole = self._settle(worker, number, payload) and is_whole
        worker.is_heard = False
        if not is_whole:  # before it can be taken for one that has done all it had
            self._bury(worker)
        elif messages and worker.slot >= self._crew.num_wanted:
            self._fit()
        if self._dealing.waiting:
            self._dealing.hand_out()

    def _settle(self, worker: Worker, number: int, payload: memoryview) -> bool:
        """Take an answer; False if what it refers to went with the worker."""
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
        task.outcome, task.came = outcome, self._num_settled
        return True

    def _bury(self, worker: Worker) -> None:
        """See what a dead worker has left, and have others do what it has not."""
        if not worker.is_heard:
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
        self._dealing.take_back(
            task for task in self._tasks.values() if task.worker is worker and task.outcome is NOTHING
        )
        self._crew.drop(worker)
        self._arrange()

    # --- what is wrong ---

    def _check_open(self) -> None:
        if self._crew.is_closed:
            raise ValueError("the pool is closed; make another")

    def _deadline(self) -> float | None:
        return time.monotonic() + self._timeout_seconds if self._timeout_seconds > 0 else None


def _timed_out(after_seconds: float, worker: Worker | None) -> Late:
    """What is raised where nothing came in time of this worker."""
    message = f"DataLoader timed out after {after_seconds} seconds: "
    if worker is None:
        return Late(message + "no worker was ready; see what worker_init_fn and the dataset's own start do")
    indices = [] if worker.doing is None else worker.doing.indices
    stack = worker.stack()
    where = f"it is here:\n{stack}" if stack else "it does not tell where it is"
    return Late(f"{message}worker {worker.slot} (pid {worker.pid}) is making {in_short(indices)}; {where}")


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
