"""Transition: what a change from one plan to another takes: its steps, bytes, seconds and memory; or why it cannot be.

Pure: tensors are told by their shapes, and nothing is asked of a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

from .freight import Item, buckets_of
from .layout import Layout
from .plan import UNEVEN, Degrees, ParallelPlan

__all__ = ["BUCKET_BYTES", "Pace", "Step", "Tensor", "Transition", "layout_under", "transition"]

Step: TypeAlias = Literal["spread", "gather", "prefetch", "buckets", "recompute"]
"""spread: units are made anew, and tensors moved. gather: what was gathered for the forward pass is kept or given back.
prefetch: units are gathered ahead. buckets: DDP is made anew. recompute: blocks are computed again."""

BUCKET_BYTES = 8 << 20  # twice of it is what a bucket takes at most


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that lies by the plan."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int
    dim: int = 0
    """Along which it is cut."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast changes are here: as the last ones were, or as ``benchmarks/RESULTS.md`` has them of two cores."""

    bytes_per_second: float = 3e8
    """Of the rank that exchanges the most."""
    seconds_per_tensor: float = 4e-4


@dataclass(frozen=True)
class Transition:
    """A change of plan that can be made."""

    old: ParallelPlan
    new: ParallelPlan
    steps: tuple[Step, ...]
    """In the order in which they are made; none where the plans come to the same."""
    replaces: bool
    """Parameters become other objects."""
    items: tuple[Item, ...] = field(repr=False)
    pace: Pace
    bucket_bytes: int

    @cached_property
    def num_sent(self) -> int:
        """Bytes between all ranks: no element twice to a rank, and none that it has."""
        return sum(item.num_sent for item in self.items)

    @cached_property
    def load(self) -> int:
        """Bytes that it takes on a rank for a while, beside what the state takes before or after: the estimate."""
        return max((bucket.load for bucket in buckets_of(self.items, 2 * self.bucket_bytes)), default=0)

    @cached_property
    def seconds(self) -> float:
        """How long training stands still: the estimate."""
        most = max(map(sum, zip(*(item.loads for item in self.items), strict=True)), default=0)
        return most / self.pace.bytes_per_second + len(self.items) * self.pace.seconds_per_tensor

    def __str__(self) -> str:
        if not self.steps:
            return "nothing changes"
        told = ", ".join(self.steps)
        if "spread" not in self.steps:
            return told
        return f"{told}: {len(self.items)} tensors, {self.num_sent} bytes between ranks, about {self.seconds:.2g} s"


def transition(
    old: ParallelPlan,
    new: ParallelPlan,
    tensors: Iterable[Tensor],
    *,
    num_ranks: int,
    num_local: int,
    pace: Pace | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> tuple[Transition | None, str]:
    """The change and what it is in words, or None and why it cannot be made."""
    try:
        before, after = (plan.degrees(num_ranks, num_local) for plan in (old, new))
    except ValueError as error:
        return None, str(error)
    steps: list[Step] = []
    has_moved = before != after or old.is_replicated is not new.is_replicated
    is_sharded = not (old.is_replicated and new.is_replicated)
    if has_moved or (is_sharded and old.unit != new.unit):
        steps.append("spread")
    elif is_sharded:
        if old.reshards_after_forward is not new.reshards_after_forward:
            steps.append("gather")
        if old.prefetch != new.prefetch:
            steps.append("prefetch")
    elif old.bucket_cap_mb != new.bucket_cap_mb:
        steps.append("buckets")
    if old.ratio != new.ratio:
        steps.append("recompute")
    items = []
    for tensor in tensors if "spread" in steps else ():
        if tensor.dim > 0 and not new.is_replicated and tensor.shape[tensor.dim] % after.shard:
            return None, UNEVEN.format(tensor.name, tensor.dim, tensor.shape[tensor.dim], after.shard)
        lies, shall = (layout_under(plan, degrees, tensor) for plan, degrees in ((old, before), (new, after)))
        items.append(Item(tensor.name, lies, shall, tensor.item_bytes))
    made = Transition(
        old,
        new,
        tuple(steps),
        replaces=old.is_replicated is not new.is_replicated,
        items=tuple(items),
        pace=pace or Pace(),
        bucket_bytes=bucket_bytes,
    )
    return made, str(made)


def layout_under(plan: ParallelPlan, degrees: Degrees, tensor: Tensor) -> Layout:
    """Where a tensor lies, by rank."""
    return degrees.layout(tensor.shape, 0 if plan.is_replicated else tensor.dim)
