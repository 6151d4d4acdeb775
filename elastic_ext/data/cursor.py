"""Cursor: how far an epoch has come, as one number, and the micro-batches that come next. Pure.

A position counts samples of the epoch in the order that all ranks share; steps take them in turn, micro-step by
micro-step, and in each of them rank by rank. So what lies before a position is all that was taken, whatever the number
of ranks was, and whatever it will be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from elastic_ext.accumulate import BatchPlan

__all__ = ["Chunk", "Cursor", "chunks", "num_chunks"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One micro-batch of one rank: the samples at positions from ``start`` to before ``stop``."""

    start: int
    stop: int
    passes: int
    """The position that the micro-step ends at, on all ranks."""
    ends_step: bool
    sizes: tuple[int, ...] = field(default=(), compare=False)
    """How many samples each rank has in this micro-step."""

    @property
    def num_samples(self) -> int:
        return self.stop - self.start


def chunks(
    plan: BatchPlan,
    rank: int,
    *,
    position: int,
    num_samples: int | None,
    carried: tuple[int, ...] | None = None,
) -> Iterator[Chunk]:
    """The micro-batches of ``rank`` from a step's beginning at ``position`` to the end of the epoch.

    ``num_samples`` is the epoch's; None where it never ends. There is none of a micro-step in which it has no samples.
    The first step begins with micro-batches of the sizes ``carried``, where these are given.
    """
    while True:
        step = plan.next_step(None if num_samples is None else num_samples - position, carried)
        carried = None
        if step is None:
            return
        last = step.num_micro_steps - 1
        for number, sizes in enumerate(zip(*step.micro_batches, strict=True)):
            start = position + sum(sizes[:rank])
            position += sum(sizes)
            if sizes[rank]:
                yield Chunk(start, start + sizes[rank], position, number == last, sizes)


def num_chunks(plan: BatchPlan, rank: int, num_samples: int) -> int:
    """How many micro-batches ``chunks`` gives of so many samples."""
    num_full = num_samples // plan.global_batch
    if (
        plan.is_even and not plan.drop_last
    ):  # the last step has what is left, and what would be too little for a step of its own
        num_full = max(-(-(num_samples - plan.global_batch - plan.num_ranks + 1) // plan.global_batch), 0)
    last = plan.next_step(num_samples - num_full * plan.global_batch)
    last_sizes = () if last is None else last.micro_batches[rank]
    return num_full * plan.full_step.num_micro_steps + sum(size > 0 for size in last_sizes)


class Cursor:
    """The position of one rank's loader in one epoch; what was handed out counts once it is passed."""

    def __init__(self, num_samples: int | None, *, position: int = 0) -> None:
        if position < 0 or (num_samples is not None and position > num_samples):
            raise ValueError(f"the position is {position}; allowed: 0 to {num_samples}, the samples of the epoch")
        self.num_samples = num_samples
        self.passed = position
        """All samples before it are consumed, and none after it is."""
        self.handed = position
        """All samples before it are handed out, on the ranks together."""

    @property
    def remaining(self) -> int | None:
        """Samples that nothing has passed."""
        return None if self.num_samples is None else self.num_samples - self.passed

    def hand_out(self, chunk: Chunk) -> None:
        """It goes to the loop; the other ranks hand out theirs of the same micro-step."""
        self.handed = chunk.passes

    def hand_out_rest(self) -> None:
        """What is left goes to the other ranks."""
        assert self.num_samples is not None
        self.handed = self.num_samples

    def commit(self, position: int | None = None) -> bool:
        """What was handed out is consumed, up to ``position`` or all of it; whether that is something."""
        before = self.passed
        self.passed = self.handed if position is None else position
        return self.passed != before

    def rollback(self) -> bool:
        """What was handed out since the last commit comes again; whether that is something."""
        has_moved = self.passed != self.handed
        self.handed = self.passed
        return has_moved
