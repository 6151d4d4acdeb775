"""Dealing: which worker is given which task. What comes of a task is the pool's affair."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .crew import Crew
from .tasks import Task
from .worker import Worker

__all__ = ["Dealing"]


class Dealing:
    """Gives tasks to the workers of a crew, and keeps those for which there is none yet.

    ``in_turn`` they are dealt as torch does, so that who makes what is the same each time; else whoever has least to do
    is given the next one, and of several the one whose turn it is. Those of a worker that is not there go to others,
    but at the start: it is waited for then.
    """

    def __init__(self, crew: Crew, *, in_turn: bool = False) -> None:
        self.waiting: deque[Task] = deque()
        """Tasks that no worker has, in order."""
        self._crew = crew
        self._in_turn = in_turn

    def deal(self, task: Task) -> None:
        """Choose who has least to do, as a task is submitted; one that is waited for has what waits for it."""
        if self._in_turn or task.slot is not None or self._crew.num_wanted == 0:
            return
        num_slots = self._crew.num_wanted
        loads = dict.fromkeys(range(num_slots), 0) | {each.slot: len(each.tasks) for each in self._crew.ready}
        for each in self.waiting:
            if each.dealt_to is not None:
                loads[each.dealt_to] = loads.get(each.dealt_to, 0) + 1
        least = min(range(num_slots), key=lambda slot: (loads[slot], (slot - task.turn) % num_slots))
        if self._crew.awaits(least) or any(each.slot == least for each in self._crew.ready):
            task.dealt_to = least

    def worker_for(self, task: Task) -> Worker | None:
        """Who has to make it, or who has least to do; None where nobody is ready that may."""
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
        """Have a worker make it."""
        task.worker = worker
        for each_task in (*task.probes(), task) if task.num_deaths else (task,):
            worker.tasks.append(each_task)
            each_task.sent_at = worker.outbox.num_sent_bytes
            self._crew.send(worker, each_task.number, each_task.indices)

    def hand_out(self) -> None:
        """Give out the tasks that are waiting.

        Where half of the workers or more are still starting they are left theirs, unless another is idle.
        """
        num_ready, num_starting = len(self._crew.ready), self._crew.num_starting
        num_dealt_to = num_ready + (num_starting if num_starting >= num_ready else 0)
        left: deque[Task] = deque()
        for task in self.waiting:
            worker = self.worker_for(task)
            if worker is not None and (
                worker.slot == self._slot_for(task) or task.turn % num_dealt_to < num_ready or not worker.tasks
            ):
                self.give(task, worker)
            else:
                left.append(task)
        self.waiting = left

    def _slot_for(self, task: Task) -> int | None:
        """Whose it is; None: anybody's."""
        if task.slot is None and self._in_turn:
            return task.turn % max(self._crew.num_wanted, 1)
        return task.dealt_to if task.slot is None else task.slot

    def take_back(self, tasks: Iterable[Task]) -> None:
        """Have these wait again, each in its place: who was to make them will not."""
        again = list(tasks)
        for task in again:
            task.worker = None
        self.waiting = deque(sorted([*self.waiting, *again], key=lambda task: task.number))
