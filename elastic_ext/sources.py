"""Where micro-batches come from: what a loader must offer to be told their sizes, and what is known of one that is not.

A loader with sizes of its own, such as torch's DataLoader, is looked at from outside: how many samples each of its
batches holds is worked out from its settings.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from .accumulate import BatchPlan, StepPlan, nearest_batches

__all__ = ["FixedBatches", "MicroBatchSource"]


@runtime_checkable
class MicroBatchSource(Protocol):
    """A loader that hands out micro-batches of the sizes it is told.

    Between two steps it cuts the next one with ``plan.next_step(remaining)`` and hands this rank its part of it,
    ``step.micro_batches[rank]``, one micro-batch after another. Where that gives no step its epoch is over. Samples are
    taken micro-step by micro-step, in each of them rank by rank: so what a commit passes has no holes, wherever it
    comes.
    """

    @property
    def batch_size(self) -> int:
        """The micro-batch that it was made with, on one rank."""

    @property
    def drop_last(self) -> bool:
        """Whether an epoch's last step is left out where it would be smaller than the others."""

    @property
    def remaining(self) -> int | None:
        """Samples of the epoch, over all ranks, that no commit has passed; None where it never ends."""

    def plan(self, plan: BatchPlan, rank: int) -> None:
        """Cut steps like this from the last commit on. Called between two steps, and before the first."""

    def commit(self) -> None:
        """What was handed out is consumed, and the next step is cut anew. Called at every step boundary."""

    def rollback(self) -> None:
        """Hand out again what was handed out since the last commit, in the loop that is under way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedBatches:
    """A loader whose batch size is its own: the same on every rank, one batch after another."""

    micro_batch: int
    num_batches: int | None = None
    """Of an epoch; None where it is not known."""
    last_batch: int | None = None
    """Samples in the last one; None where it is as large as the others."""

    @classmethod
    def of(cls, loader: Any) -> FixedBatches | None:
        """What a DataLoader's settings say of its batches; None if they do not give a batch size."""
        sampler = getattr(loader, "batch_sampler", None)
        size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
        if type(size) is not int or size < 1:
            return None
        # Over an iterable dataset a DataLoader's own length is only a guess; its batch sampler has none then.
        num_batches = _length(loader if sampler is None else sampler)
        if not num_batches:
            return cls(micro_batch=size)
        num_samples = _length(getattr(sampler, "sampler", None))
        last = None
        if num_samples is not None and not getattr(sampler, "drop_last", False):
            last = num_samples - (num_batches - 1) * size
        return cls(micro_batch=size, num_batches=num_batches, last_batch=last if last and 0 < last < size else None)

    def next_step(self, num_taken: int, num_micro_steps: int, num_ranks: int) -> StepPlan:
        """The step after ``num_taken`` batches of an epoch: the last one holds what is left."""
        sizes = [self.micro_batch] * num_micro_steps
        if self.num_batches is not None:
            left = max(self.num_batches - num_taken, 1)
            sizes = sizes[:left]
            if left <= num_micro_steps and self.last_batch is not None:
                sizes[-1] = self.last_batch
        return StepPlan(global_batch=sum(sizes) * num_ranks, micro_batches=(tuple(sizes),) * num_ranks)

    def num_micro_steps(self, global_batch: int, num_ranks: int) -> int:
        """How many batches of every rank make a step; ValueError where they do not add up to ``global_batch``."""
        quantum = self.micro_batch * num_ranks
        if global_batch % quantum:
            nearest = " or ".join(str(size) for size in nearest_batches(global_batch, quantum))
            raise ValueError(
                f"global_batch_size {global_batch} is not a multiple of {quantum} ({num_ranks} ranks with micro-batches"
                f" of {self.micro_batch}); use {nearest}, or a loader that can be told its sizes (MicroBatchSource)"
            )
        return global_batch // quantum


def _length(thing: object) -> int | None:
    try:
        return len(thing) if isinstance(thing, Sized) else None
    except (TypeError, NotImplementedError):  # a DataLoader has the method even where it has no length
        return None
