"""How a global batch is cut: shares for ranks, micro-batches for steps, and the weight of each. Pure.

Words: the *global batch* (B) is the samples of one step over all data-parallel ranks (W of them). A rank's *share* is
its part of it. A share is taken in *micro-batches* of at most the micro-batch size (b), as many on every rank (A).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["BatchPlan", "StepPlan", "can_cut", "nearest_batches", "next_batch", "plan_step", "shares"]

_MOST_MICRO_BATCHES = 1 << 22  # of a step, on all ranks; a StepPlan holds the size of each


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """How one step is cut: how many samples each rank takes in each micro-step."""

    global_batch: int
    micro_batches: tuple[tuple[int, ...], ...]
    """Samples per micro-batch, by rank, then by micro-step; 0 only in a last step, for ranks without a part in it."""

    @property
    def num_micro_steps(self) -> int:
        return len(self.micro_batches[0])

    @property
    def largest(self) -> int:
        """The most samples that a rank takes at once."""
        return max(map(max, self.micro_batches))

    @property
    def smallest(self) -> int:
        """The fewest samples that a rank takes at once, where it takes any."""
        return min(size for sizes in self.micro_batches for size in sizes if size)

    def weight(self, rank: int, micro_step: int) -> float:
        """The loss weight of a rank's micro-batch: its samples * the number of ranks / the global batch.

        With it as a factor of the mean loss, gradients that are averaged over the ranks are those of the mean over the
        whole global batch.
        """
        return self.micro_batches[rank][micro_step] * len(self.micro_batches) / self.global_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """How the steps of an epoch are cut into micro-batches; ValueError where a full step cannot be cut so."""

    global_batch: int
    num_ranks: int
    micro_batch: int
    weights: tuple[float, ...] | None = None
    """The share weights: the proportions of the ranks' shares; None: equal shares.

    A last step too small for these has equal shares too.
    """
    drop_last: bool = False
    is_even: bool = True
    """Whether all ranks have equally many micro-batches in every step.

    Else the last samples of an epoch, where they are fewer than a full step, are one micro-step, in which some ranks
    may have no samples. Unless ``drop_last`` no sample is left out, and no rank has more of them than in a full step.
    """
    full_step: StepPlan = field(init=False, compare=False)

    def __post_init__(self) -> None:
        step = plan_step(self.global_batch, self.num_ranks, self.micro_batch, self.weights)
        object.__setattr__(self, "full_step", step)

    def next_step(self, remaining: int | None, carried: tuple[int, ...] | None = None) -> StepPlan | None:
        """The step that comes when ``remaining`` samples of the epoch remain (None: it never ends); None at its end.

        ``carried`` are the sizes, by rank, of the micro-batch that the loop has in hand already, as it was cut before
        something changed: the first of the step, at its own size. At an epoch's end samples are left out that are too
        few then for another micro-step of all ranks.
        """
        if carried is not None:
            return self._after_carried(remaining, carried)
        if remaining is None:
            return self.full_step
        # A plan that is not even has full steps, and a last one with all that is left.
        if not self.is_even and 0 < remaining < self.global_batch and not self.drop_last:
            return StepPlan(global_batch=remaining, micro_batches=tuple((size,) for size in self._dealt(remaining)))
        if not self.is_even and remaining >= self.global_batch:
            return self.full_step
        # The last step of an even plan may be larger than a full one, or smaller.
        batch = next_batch(remaining, self.global_batch, self.num_ranks, drop_last=self.drop_last)
        if batch == self.global_batch:
            return self.full_step
        if batch == 0:
            return None
        share_weights = self.weights if can_cut(batch, self.num_ranks, self.micro_batch, self.weights) else None
        return plan_step(batch, self.num_ranks, self.micro_batch, share_weights)

    def num_steps(self, remaining: int) -> int:
        """How many steps an even plan makes of the last ``remaining`` samples of an epoch."""
        num_full, rest = divmod(remaining, self.global_batch)
        return num_full + (rest >= self.num_ranks and not self.drop_last)

    def carried_over(self, sizes: tuple[int, ...], remaining: int | None) -> tuple[int, ...] | None:
        """The ``carried`` for ``next_step``, if a batch of ``sizes`` is in hand; None where it changes nothing.

        A batch that was cut for another number of ranks begins no step of these: it is to come again.
        """
        if len(sizes) != self.num_ranks:
            return None
        usual = self.next_step(remaining)
        begins_so = usual is not None and sizes == tuple(each[0] for each in usual.micro_batches)
        return None if begins_so else sizes

    def _after_carried(self, remaining: int | None, carried: tuple[int, ...]) -> StepPlan:
        """A step whose first micro-batch has the sizes ``carried``; the others are cut from the rest of the step."""
        num_carried = sum(carried)
        usual = self.next_step(remaining)
        missing = 0 if usual is None else usual.global_batch - num_carried
        first = tuple((size,) for size in carried)
        if missing < self.num_ranks:
            return StepPlan(global_batch=num_carried, micro_batches=first)
        share_weights = self.weights if can_cut(missing, self.num_ranks, self.micro_batch, self.weights) else None
        rest = plan_step(missing, self.num_ranks, self.micro_batch, share_weights)
        micro_batches = tuple(one + more for one, more in zip(first, rest.micro_batches, strict=True))
        return StepPlan(global_batch=num_carried + missing, micro_batches=micro_batches)

    def _dealt(self, tail: int) -> list[int]:
        """Each rank's part of the last ``tail`` samples, which are fewer than a full step.

        One sample each if there are enough, the others in proportion to the shares of a full step. Where a proportion
        is no whole number it is rounded down, and the samples left over go, one each, to the ranks with the largest
        rests.
        """
        full = [sum(sizes) for sizes in self.full_step.micro_batches]
        least = int(tail >= self.num_ranks)
        spare, room = tail - least * self.num_ranks, sum(full) - least * self.num_ranks
        parts = [divmod(spare * (size - least), max(room, 1)) for size in full]
        by_rest = sorted(range(self.num_ranks), key=lambda rank: (-parts[rank][1], rank))
        more = set(by_rest[: spare - sum(part for part, _ in parts)])
        return [least + part + (rank in more) for rank, (part, _) in enumerate(parts)]


def shares(global_batch: int, num_ranks: int, share_weights: Sequence[float] | None = None) -> tuple[int, ...]:
    """Each rank's samples: as equal as whole numbers allow, or in proportion to the share weights; at least one."""
    if global_batch < num_ranks:
        raise ValueError(
            f"a global batch of {global_batch} samples leaves some of {num_ranks} ranks without any; "
            f"use at least {num_ranks}"
        )
    if share_weights is None:
        return tuple(global_batch // num_ranks + (rank < global_batch % num_ranks) for rank in range(num_ranks))
    if len(share_weights) != num_ranks or not all(math.isfinite(weight) and weight > 0 for weight in share_weights):
        raise ValueError(
            f"share_weights are {list(share_weights)}; allowed: {num_ranks} finite numbers > 0, one per rank"
        )
    exact = [global_batch * weight / sum(share_weights) for weight in share_weights]
    if all(round(share) >= 1 and abs(share - round(share)) < 1e-9 * global_batch for share in exact):
        return tuple(map(round, exact))
    spare = global_batch - num_ranks  # one each is given out beforehand
    exact = [spare * weight / sum(share_weights) for weight in share_weights]
    whole = [math.floor(share) for share in exact]
    by_rest = sorted(range(num_ranks), key=lambda rank: (whole[rank] - exact[rank], rank))
    for rank in by_rest[: spare - sum(whole)]:
        whole[rank] += 1
    return tuple(1 + share for share in whole)


def can_cut(global_batch: int, num_ranks: int, micro_batch: int, share_weights: Sequence[float] | None = None) -> bool:
    """Whether the shares differ so little that ``plan_step`` can cut them; equal shares always do.

    It may still refuse a step of too many micro-batches.
    """
    _, largest = _count(shares(global_batch, num_ranks, share_weights), micro_batch)
    return largest <= micro_batch + 1


def plan_step(
    global_batch: int, num_ranks: int, micro_batch: int, share_weights: Sequence[float] | None = None
) -> StepPlan:
    """Cut ``global_batch`` into equally many micro-batches on every rank, of ``micro_batch`` samples at most.

    Where that would leave a rank without samples in some micro-step (only possible with a micro-batch of 1, or with
    share weights), micro-batches are one sample larger; where even that does not help, ValueError says what to change.
    """
    each = shares(global_batch, num_ranks, share_weights)
    num_micro_steps, largest = _count(each, micro_batch)
    if largest > micro_batch + 1:
        raise ValueError(
            f"shares of {min(each)} to {max(each)} samples cannot be cut into equally many micro-batches of at most "
            f"{micro_batch}; use a micro-batch of at least {largest}, or share_weights that differ less"
        )
    if num_micro_steps * num_ranks > _MOST_MICRO_BATCHES:
        raise ValueError(
            f"{global_batch} samples on {num_ranks} ranks in micro-batches of at most {micro_batch} are "
            f"{num_micro_steps} micro-steps; use larger micro-batches or a smaller global batch, so that a step has at "
            f"most {_MOST_MICRO_BATCHES // num_ranks}"
        )
    return StepPlan(global_batch=global_batch, micro_batches=tuple(_cut(share, num_micro_steps) for share in each))


def next_batch(remaining: int, global_batch: int, num_ranks: int, *, drop_last: bool = False) -> int:
    """The number of samples that the next step takes of what remains of an epoch; 0 when none may be taken.

    A tail with fewer samples than ranks joins the last full batch, or is left out with ``drop_last``, which leaves out
    every batch that is not full. Where fewer samples than ranks remain in all, as on a resume with more ranks, no
    step may take them.
    """
    if drop_last:
        return global_batch if remaining >= global_batch else 0
    if remaining < num_ranks:
        return 0
    return remaining if remaining - global_batch < num_ranks else global_batch


def nearest_batches(global_batch: int, quantum: int) -> tuple[int, ...]:
    """The multiples of ``quantum`` next below and above ``global_batch``, smallest first; never 0."""
    below = global_batch // quantum * quantum
    return tuple(sorted({size for size in (below, below + quantum) if size > 0 and size != global_batch}))


def _count(each: Sequence[int], micro_batch: int) -> tuple[int, int]:
    """How many micro-steps these shares take, and the size of the largest micro-batch then."""
    num_micro_steps = min(math.ceil(max(each) / micro_batch), min(each))
    return num_micro_steps, math.ceil(max(each) / num_micro_steps)


def _cut(share: int, num_parts: int) -> tuple[int, ...]:
    """``share`` in ``num_parts`` parts that differ by one at most, the smaller ones first."""
    small, num_large = divmod(share, num_parts)
    return (small,) * (num_parts - num_large) + (small + 1,) * num_large
