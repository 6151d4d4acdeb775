"""What a change from one plan or world to another takes: its steps, bytes, seconds and memory; or why it cannot be.

Pure: tensors are told by their shapes, and nothing is asked of a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import add
from typing import Literal, TypeAlias

from elastic_ext.fsdp.plan import UNEVEN, ParallelPlan
from elastic_ext.fsdp.worlds import LayoutsBetween, Worlds

from .buckets import BucketItem, BucketPlan, Router

__all__ = ["BUCKET_BYTES", "PlanWork", "Tensor", "TransferRates", "Transition", "transition"]

PlanWork: TypeAlias = Literal["spread", "gather", "prefetch", "buckets", "recompute"]
"""A kind of work in a change of plan.

spread: units are made anew, and tensors moved. gather: what was gathered for the forward pass is kept or given back.
prefetch: units are gathered ahead. buckets: DDP is made anew. recompute: blocks are computed again.
"""

BUCKET_BYTES = 8 << 20  # twice of it is what a bucket takes at most
_TELLING_BYTES = 8 << 20  # what less takes says little of how fast bytes are


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that lies by the plan."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int
    dim: int = 0
    """The dimension along which the tensor is cut."""


@dataclass(frozen=True, slots=True)
class TransferRates:
    """How fast a change of plan moves bytes and tensors, to estimate its seconds.

    At first as ``benchmarks/RESULTS.md`` has it of four ranks on two cores.
    """

    bytes_per_second: float = 9e8
    """Bytes per second that a rank sends, receives and newly takes."""
    seconds_per_tensor: float = 4e-4
    """Seconds that each tensor takes beside its bytes."""

    def seconds(self, bucket_plan: BucketPlan) -> float:
        """Estimated seconds that moving takes."""
        return _most_handled(bucket_plan) / self.bytes_per_second + len(bucket_plan.items) * self.seconds_per_tensor

    def after(self, bucket_plan: BucketPlan, *, wiring_seconds: float, moving_seconds: float) -> TransferRates:
        """The rates as a change has shown them; one that moved too little to tell leaves the old rate."""
        handled, number = _most_handled(bucket_plan), len(bucket_plan.items)
        if not number:
            return self
        per_tensor = wiring_seconds / number
        if handled < _TELLING_BYTES or moving_seconds <= 0:
            return replace(self, seconds_per_tensor=per_tensor)
        return TransferRates(bytes_per_second=handled / moving_seconds, seconds_per_tensor=per_tensor)


def _most_handled(bucket_plan: BucketPlan) -> int:
    """Bytes that are exchanged and newly taken, on the rank with the most."""
    by_rank = zip(*([*map(add, item.exchanged_bytes, item.taken_bytes)] for item in bucket_plan.items), strict=True)
    return max(map(sum, by_rank), default=0)


@dataclass(frozen=True)
class Transition:
    """A change of plan that can be made."""

    old: ParallelPlan
    new: ParallelPlan
    steps: tuple[PlanWork, ...]
    """The kinds of work in the order in which they are done; none where the plans come to the same."""
    replaces: bool
    """Whether parameters become other objects."""
    items: tuple[BucketItem, ...] = field(repr=False)
    """The tensors that are moved among the ranks of the new world."""
    pace: TransferRates
    bucket_bytes: int
    given: tuple[BucketItem, ...] = field(default=(), repr=False)
    """The tensors that are moved before that among the ranks of the old world, where some of these leave."""

    @cached_property
    def bucket_plan(self) -> BucketPlan:
        """The tensors that have to be moved, in buckets."""
        return BucketPlan(self.items, 2 * self.bucket_bytes)

    @cached_property
    def given_plan(self) -> BucketPlan:
        """The tensors that have to be moved before ranks leave, in buckets."""
        return BucketPlan(self.given, 2 * self.bucket_bytes)

    @property
    def sent_bytes(self) -> int:
        """Bytes that go from one rank to another."""
        return self.given_plan.sent_bytes + self.bucket_plan.sent_bytes

    @property
    def extra_bytes(self) -> int:
        """Estimated bytes that a rank takes for a while, beside what its state takes before or after."""
        return max(self.given_plan.extra_bytes, self.bucket_plan.extra_bytes)

    @property
    def seconds(self) -> float:
        """Estimated seconds for which training stands still, but for those in which groups are formed."""
        return self.pace.seconds(self.given_plan) + self.pace.seconds(self.bucket_plan)

    def __str__(self) -> str:
        if not self.steps:
            return "nothing changes"
        told = ", ".join(self.steps)
        if "spread" not in self.steps:
            return told
        return f"{told}: {len(self.items)} tensors, {self.sent_bytes} bytes between ranks, about {self.seconds:.2g} s"


def transition(
    old: ParallelPlan,
    new: ParallelPlan,
    tensors: Iterable[Tensor],
    *,
    worlds: Worlds,
    pace: TransferRates | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> tuple[Transition | None, str]:
    """The change from one plan and world to another, with words for it; or None, and why it cannot be made."""
    try:
        before = old.degrees(worlds.num_old, worlds.num_local[0])
        after = new.degrees(worlds.num_new, worlds.num_local[1])
    except ValueError as error:
        return None, str(error)
    steps: list[PlanWork] = []
    has_moved = not worlds.is_same or before != after or old.is_replicated is not new.is_replicated
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
    given, items = [], []
    router, layouts = Router(), LayoutsBetween(worlds, before, after)
    for tensor in tensors if "spread" in steps else ():
        if tensor.dim > 0 and not new.is_replicated and tensor.shape[tensor.dim] % after.shard:
            return None, UNEVEN.format(tensor.name, tensor.dim, tensor.shape[tensor.dim], after.shard)
        laid = layouts.of(tensor.shape, tensor.dim)
        if worlds.has_leavers:
            given.append(router.item(tensor.name, laid.old, laid.between, tensor.item_bytes))
        items.append(router.item(tensor.name, laid.between, laid.new, tensor.item_bytes))
    made = Transition(
        old,
        new,
        tuple(steps),
        replaces=old.is_replicated is not new.is_replicated,
        items=tuple(items),
        given=tuple(given),
        pace=pace or TransferRates(),
        bucket_bytes=bucket_bytes,
    )
    return made, str(made)
