"""Task: one batch to make, and what came of it; and what people are told of its samples."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elastic_ext.errors import WorkerDiedError
from elastic_ext.torch_private.loading import PrivateParts

from .child import Ending
from .worker import Worker

__all__ = ["NOTHING", "Raised", "Task", "in_short", "name_samples", "reraise"]

NOTHING: Any = object()
"""What came of a task so far, where nothing has."""

_MOST_DEATHS = 3  # of workers, over one task
_MOST_LOSSES = 10


@dataclass(frozen=True, slots=True)
class Raised:
    """What came of a task is an exception of this process."""

    error: Exception


@dataclass(slots=True, eq=False)
class Task:
    """A batch to make; or, as a probe, one of its samples."""

    number: int
    indices: Any
    slot: int | None = None
    """Which worker has to make it; None: any."""
    turn: int = 0
    """How many batches of the loop come before it."""
    dealt_to: int | None = None
    """The slot of the worker that had least to do when it was submitted, or will have, once it is there."""
    worker: Worker | None = None
    """Who makes it."""
    sent_at: int = 0
    """How many bytes that worker had been sent before it."""
    outcome: Any = NOTHING
    came: int = 0
    """How many outcomes of a pool's tasks had come then, this one among them."""
    num_deaths: int = 0
    num_losses: int = 0
    """How often it was being made when a worker went with the process that it was forked from."""
    is_forgotten: bool = False
    """Nobody wants it any more."""
    probes_for: Task | None = None
    """Of a probe: the task over which workers died, to find the sample that they died of."""

    def blame(self, ending: Ending) -> None:
        """One more worker has died while it made this."""
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
        """Its samples one by one, if the next death over it is the last and there are several."""
        if self.num_deaths < _MOST_DEATHS - 1 or not isinstance(self.indices, list) or len(self.indices) < 2:
            return []
        return [Task(self.number, [index], self.slot, probes_for=self) for index in self.indices]


def in_short(indices: Any, limit: int = 10) -> str:
    """The indices of a task as a person is told them."""
    if not isinstance(indices, Sequence) or isinstance(indices, str | bytes):
        return f"sample {indices!r}"
    more = len(indices) - limit
    shown = ", ".join(repr(index) for index in indices[:limit]) + (f" and {more} more" if more > 0 else "")
    return f"sample {shown}" if len(indices) == 1 else f"samples {shown}"


def reraise(task: Task, parts: PrivateParts) -> None:
    """Raise what came of a task if that is an exception, as torch does, and say of which sample."""
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
    """Say in its traceback, where Python can, which sample was looked up (``at``), or which were made, when it came."""
    if sys.version_info >= (3, 11):
        error.add_note(_note(at, indices))


def _note(at: tuple[Any, ...], indices: Any) -> str:
    return f"raised by the dataset for sample {at[0]!r}" if at else f"raised while making {in_short(indices)}"


def _died_over(indices: Any, ending: Ending) -> WorkerDiedError:
    as_torch_says = f" ({ending.as_torch_says}.)" if ending.as_torch_says else ""  # which scripts may look for
    return WorkerDiedError(
        f"{_MOST_DEATHS} worker processes died one after another while they made {in_short(indices)} of the dataset "
        f"(the last: {ending.how}); load it in a process of its own to see why, or, where the kernel's log says that "
        f"memory ran out, use fewer workers or smaller batches{as_torch_says}",
        indices=indices if isinstance(indices, list) else [indices],
    )


def _lost_over(indices: Any, how: str) -> WorkerDiedError:
    return WorkerDiedError(
        f"{_MOST_LOSSES} times workers went with the process that they were forked from while they made "
        f"{in_short(indices)} of the dataset (the last: {how}); look into the kernel's log for memory that ran out",
        indices=indices if isinstance(indices, list) else [indices],
    )
