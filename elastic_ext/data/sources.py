"""Where micro-batches come from: what a loader must offer to be told their sizes, and what is known of one that is not.

A loader with sizes of its own, such as torch's DataLoader or one that accelerate has prepared, is looked at from
outside: how many samples each of its batches holds is worked out from its settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from .batch_plan import BatchPlan, StepPlan, nearest_batches

__all__ = [
    "BatchDrawingSource",
    "CountedSource",
    "EndingSource",
    "FixedBatchSizes",
    "LeavableSource",
    "MicroBatchSource",
    "OrderedSource",
    "OwnPositions",
    "ReenteredSource",
    "ResumableSource",
    "RewindableSource",
    "ShowingSource",
]


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
        """Samples per micro-batch on one rank, as the loader was made.

        A loader with these methods whose sizes cannot be set may give None, whatever the type says here: a trainer
        then treats it as a plain loader.
        """

    @property
    def drop_last(self) -> bool:
        """Whether an epoch's last step is left out where it would be smaller than the others."""

    @property
    def remaining(self) -> int | None:
        """Samples of the epoch, over all ranks, that no commit has passed; None where it never ends.

        Between two loops: of the one that has ended, or once a position was loaded, of the one that comes.
        """

    def plan(self, plan: BatchPlan, rank: int) -> None:
        """Cut steps by ``plan`` from the last commit on. Called between two steps, and before the first."""

    def commit(self, num_micro_batches: int) -> None:
        """Take the first micro-batches handed out since the last commit as consumed. Called at every step boundary.

        What was handed out after them begins the next step, at the size that it has.
        """

    def rollback(self) -> None:
        """Hand out again what was handed out since the last commit, in the loop that is under way."""


@runtime_checkable
class CountedSource(MicroBatchSource, Protocol):
    """A MicroBatchSource that says how many micro-batches it has handed out.

    As a micro-step begins, a trainer refuses a loop that has taken more than that micro-step's batch beside those of
    the micro-steps before (StepError).
    """

    @property
    def num_handed(self) -> int:
        """Micro-batches handed out on this rank that no commit has consumed, and no rollback has taken back."""

    @property
    def carried(self) -> tuple[int, ...] | None:
        """The sizes, by rank, of the first such micro-batch, where steps were cut otherwise since it was handed out.

        None where the step that comes begins with a micro-batch of that size anyway. ``BatchPlan.next_step`` takes it.
        """


@runtime_checkable
class ResumableSource(MicroBatchSource, Protocol):
    """A MicroBatchSource whose position goes into checkpoints: plain values, the same on every rank after a commit."""

    def state_dict(self) -> Any:
        """The position of the epoch: samples that are not consumed come from there, with any number of ranks."""

    def load_state_dict(self, state: Any) -> None:
        """Have the next loop go on from a state.

        A state saved at an epoch's end may resume at the next epoch, or with ``remaining`` 0 in the finished one; the
        trainer then goes to the next epoch by itself.
        """


@runtime_checkable
class RewindableSource(ResumableSource, Protocol):
    """A ResumableSource that can go back during a loop."""

    def rewind(self, state: Any) -> None:
        """Have the loop under way, or the next one, go on from a state. Called between two steps."""


@runtime_checkable
class OwnPositions(RewindableSource, Protocol):
    """A RewindableSource that may have a position per rank: a run then resumes with the same number of ranks."""

    @property
    def has_own_positions(self) -> bool:
        """Whether each rank has a position of its own."""

    @property
    def why_no_position(self) -> str | None:
        """Why no later loop can go on from where the loader is now; None if one can."""


@runtime_checkable
class OrderedSource(MicroBatchSource, Protocol):
    """A MicroBatchSource that draws an epoch's order on each rank, where the order has to be the same."""

    @property
    def seed(self) -> int | None:
        """The seed of the order, if there is one."""

    @property
    def draws_order(self) -> bool:
        """Whether the order may depend on more than the seed, so that ranks have to compare their orders."""

    def take_seed(self, seed: int) -> None:
        """Draw later orders from this seed."""

    def order_to_come(self) -> Any:
        """The order of the next loop, as plain values that ranks compare. Called where an epoch begins."""


@runtime_checkable
class BatchDrawingSource(Protocol):
    """A loader whose batch sampler each rank may draw by itself; ranks compare their batches, which should differ."""

    @property
    def draws_batches(self) -> bool:
        """Whether each rank draws its batches for itself."""

    def order_to_come(self) -> Any:
        """The batches of the next loop, as plain values that ranks compare. Called where an epoch begins."""


@runtime_checkable
class LeavableSource(MicroBatchSource, Protocol):
    """A MicroBatchSource that has to be told that no loop will go on where the last one was left."""

    def leave_epoch(self) -> None:
        """Give up the rest of the epoch if its loop has ended: the next loop and the state are of the next one.

        An epoch of which no step was committed is still to come.
        """


@runtime_checkable
class EndingSource(Protocol):
    """A loader that says whether a loop over it has come to the end of the epoch, also where it has no length."""

    @property
    def is_at_end(self) -> bool:
        """Whether the loop under way, or the last one, has no samples left, as far as it has seen."""


@runtime_checkable
class ShowingSource(Protocol):
    """A loader that calls ``on_batch`` with each batch before the loop has it."""

    on_batch: Callable[[Any], None] | None


@runtime_checkable
class ReenteredSource(Protocol):
    """A loader over which the next loop may begin before the last step of the one before has ended."""

    is_in_step: Callable[[], bool]
    """Set by the trainer: says whether a micro-step is under way."""
    on_loop: Callable[[], None] | None
    """Set by the trainer: called before a loop begins; raises where none may."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedBatchSizes:
    """The batch sizes of a loader that cannot be told others: equal on every rank, but for the last batch."""

    micro_batch: int
    num_batches: int | None = None
    """Batches of an epoch; None where it is not known how many."""
    last_batch: int | None = None
    """Samples in the last batch; None where it is as large as the others."""

    @classmethod
    def of(cls, loader: Any) -> FixedBatchSizes | None:
        """What a DataLoader's settings say of its batches; None if they do not give a batch size."""
        sampler = getattr(loader, "batch_sampler", None)
        # accelerate's DataLoaderDispatcher; a batch sampler that accelerate has wrapped; torch's own.
        if hasattr(loader, "slice_fn") and hasattr(loader, "split_batches"):
            return cls._dispatched(loader, cls._of_sampler(sampler))
        if hasattr(sampler, "batch_sampler"):
            return cls._of_sampler(sampler)
        size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
        return cls._known(size, loader if sampler is None else sampler, sampler)

    @classmethod
    def _known(cls, size: object, sized: object, sampler: object) -> FixedBatchSizes | None:
        if type(size) is not int or size < 1:
            return None
        # Over an iterable dataset a DataLoader's own length is only a guess; its batch sampler has none then.
        num_batches = _length(sized)
        if not num_batches:
            return cls(micro_batch=size)
        num_samples = _length(getattr(sampler, "sampler", None))
        last = None
        if num_samples is not None and not getattr(sampler, "drop_last", False):
            last = num_samples - (num_batches - 1) * size
        return cls(micro_batch=size, num_batches=num_batches, last_batch=last if last and 0 < last < size else None)

    @classmethod
    def _of_sampler(cls, sampler: Any) -> FixedBatchSizes | None:
        """The batches of a batch sampler, through those that accelerate puts around it."""
        inner = getattr(sampler, "batch_sampler", None)
        if inner is None:
            return cls._known(getattr(sampler, "batch_size", None), sampler, sampler)
        whole = cls._of_sampler(inner)
        if whole is None:
            return None
        # accelerate's SkipBatchSampler, or its BatchSamplerShard.
        if hasattr(sampler, "skip_batches"):
            return whole._without(sampler.skip_batches)
        return cls._sharded(sampler, whole) if hasattr(sampler, "even_batches") else None

    def _without(self, num_skipped: int) -> FixedBatchSizes:
        left = 0 if self.num_batches is None else self.num_batches - num_skipped
        return replace(self, num_batches=left) if left > 0 else FixedBatchSizes(micro_batch=self.micro_batch)

    @classmethod
    def _sharded(cls, shard: Any, whole: FixedBatchSizes) -> FixedBatchSizes | None:
        """A rank's part of batches: each goes to one rank, or is sliced among all ranks.

        Where ``even_batches`` makes up for what is missing with samples from the beginning, all of them are whole.
        """
        num_ranks, rank, is_split = shard.num_processes, shard.process_index, shard.split_batches
        size = whole.micro_batch // num_ranks if is_split else whole.micro_batch
        if size < 1:
            return None
        num_batches = None if whole.num_batches is None else _length(shard)
        if whole.num_batches is None or not num_batches:
            return cls(micro_batch=size)
        last = None
        if whole.last_batch is not None and not shard.even_batches:
            if is_split:
                last = min(max(whole.last_batch - rank * size, 0), size)
                num_batches -= last == 0
            elif (whole.num_batches - 1) % num_ranks == rank:
                last = whole.last_batch
        return cls(micro_batch=size, num_batches=num_batches or None, last_batch=last if last and last < size else None)

    @classmethod
    def _dispatched(cls, loader: Any, whole: FixedBatchSizes | None) -> FixedBatchSizes | None:
        """A rank's slices of what the first rank reads at once: one batch, or as many as there are ranks."""
        if whole is None:
            return None
        num_ranks = loader.state.num_processes
        num_together = 1 if loader.split_batches else num_ranks
        size = whole.micro_batch * num_together // num_ranks
        if size < 1:
            return None
        if whole.num_batches is None:
            return cls(micro_batch=size)
        if loader._drop_last:
            return cls(micro_batch=size, num_batches=whole.num_batches // num_together or None)
        num_batches = -(-whole.num_batches // num_together)
        num_samples = (whole.num_batches - 1) * whole.micro_batch + (whole.last_batch or whole.micro_batch)
        last = -(-(num_samples - (num_batches - 1) * num_together * whole.micro_batch) // num_ranks)
        return cls(micro_batch=size, num_batches=num_batches, last_batch=last if last < size else None)

    def next_step(self, num_taken: int, num_micro_steps: int, num_ranks: int) -> StepPlan:
        """The step after ``num_taken`` batches of an epoch: the last one holds what is left.

        The other ranks' batches are supposed to be as large as this rank's. After all batches it is a step of one more.
        """
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
                f" of {self.micro_batch}); use {nearest}, or an ElasticDataLoader, which cuts any size"
            )
        return global_batch // quantum


def _length(thing: object) -> int | None:
    try:
        return len(thing) if isinstance(thing, Sized) else None
    except (TypeError, NotImplementedError):  # a DataLoader has the method even where it has no length
        return None
