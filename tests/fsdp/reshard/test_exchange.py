"""The exchange: buckets of several types, cut in any way, arrive whole; a rank without memory is heard of by all."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from elastic_ext.fsdp.layout import Box, Layout
from elastic_ext.fsdp.reshard.buckets import Bucket, BucketItem, BucketPlan, Router
from elastic_ext.fsdp.reshard.exchange import BucketExchange, Memories
from tests.support.ranks import RankPool

TYPES = (torch.float32, torch.uint8, torch.bfloat16, torch.complex128, torch.int64, torch.bool)


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, number: int) -> torch.Tensor:
    """The same on all ranks, no two elements alike where the type has as many values."""
    return (torch.arange(math.prod(shape)) + 1000 * number).to(dtype).reshape(shape)


def _part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Its elements in memory of their own, as a rank has them."""
    if box.is_flat:
        return tensor.reshape(-1)[box.start[0] : box.end[0]].clone()
    return tensor[tuple(map(slice, box.start, box.end))].contiguous().reshape(-1)


def _layout(draw: random.Random, shape: tuple[int, ...], num_ranks: int) -> Layout:
    """Whole, by rows, by columns, or in runs of any length."""
    kind = draw.choice(["whole", "rows", "columns", "runs"])
    if kind == "whole":
        return Layout(shape, (Box.whole(shape),) * num_ranks)
    if kind == "runs":
        cuts = [0, *sorted(draw.choices(range(math.prod(shape) + 1), k=num_ranks - 1)), math.prod(shape)]
        return Layout(shape, tuple(Box.flat(shape, *cuts[at : at + 2]) for at in range(num_ranks)))
    dim = 0 if kind == "rows" else len(shape) - 1
    share = -(-shape[dim] // num_ranks)
    boxes = []
    for rank in range(num_ranks):
        low, high = (min(part * share, shape[dim]) for part in (rank, rank + 1))
        start, end = [0] * len(shape), list(shape)
        start[dim], end[dim] = low, high
        boxes.append(Box.block(shape, start, end))
    return Layout(shape, tuple(boxes))


def _cargo(draw: random.Random, num_ranks: int) -> tuple[list[torch.Tensor], list[BucketItem]]:
    router, tensors, items = Router(), [], []
    for number in range(12):
        shape = tuple(draw.randrange(1, 9) for _ in range(draw.randrange(1, 4)))
        tensors.append(_tensor(shape, draw.choice(TYPES), number))
        old, new = (_layout(draw, shape, num_ranks) for _ in range(2))
        items.append(router.item(f"item {number}", old, new, tensors[-1].element_size()))
    return tensors, items


def _old_and_new(
    bucket: Bucket, tensors: Sequence[torch.Tensor], rank: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    old = [_part(tensors[bucket.first + at], item.old.boxes[rank]) for at, item in enumerate(bucket.items)]
    new = [
        held if item.old.boxes[rank] == item.new.boxes[rank] else held.new_empty(item.new.boxes[rank].num_elements)
        for held, item in zip(old, bucket.items, strict=True)
    ]
    return old, new


def _carried(rank: int, seed: int) -> int:
    """How many buckets were exchanged."""
    num_ranks = dist.get_world_size()
    draw = random.Random(seed)
    tensors, items = _cargo(draw, num_ranks)
    bucket_plan = BucketPlan(items, draw.choice([0, 500, 1 << 20]))
    group = dist.group.WORLD
    assert group is not None
    exchange = BucketExchange(range(num_ranks), bucket_plan.staged_bytes[rank], group=group, device=torch.device("cpu"))
    for bucket in bucket_plan.buckets:
        old, new = _old_and_new(bucket, tensors, rank)
        assert exchange.carry(bucket, {rank: Memories(old, new)})
        for at, (item, target) in enumerate(zip(bucket.items, new, strict=True)):
            assert torch.equal(target, _part(tensors[bucket.first + at], item.new.boxes[rank])), (seed, item.name)
    return sum(bucket.sent_bytes > 0 for bucket in bucket_plan.buckets)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_tensors_of_several_types_arrive_whole(ranks: RankPool, num_ranks: int) -> None:
    assert all(ranks.run(num_ranks, _carried, seed)[0] > 0 for seed in range(8))


def _without_memory(rank: int) -> list[bool]:
    """What ranks hear of three buckets, rank 1 having no memory for the second."""
    tensors, items = _cargo(random.Random(5), dist.get_world_size())
    exchanged = [bucket for bucket in BucketPlan(items, 0).buckets if bucket.sent_bytes][:3]
    group = dist.group.WORLD
    assert group is not None
    most_bytes = max(bucket.exchanged_bytes[rank] for bucket in exchanged)
    exchange = BucketExchange(range(dist.get_world_size()), most_bytes, group=group, device=torch.device("cpu"))
    heard = []
    for at, bucket in enumerate(exchanged):
        old, new = _old_and_new(bucket, tensors, rank)
        heard.append(exchange.carry(bucket, None if rank == 1 and at == 1 else {rank: Memories(old, new)}))
    return heard


def test_all_ranks_hear_of_one_that_has_no_memory(ranks: RankPool) -> None:
    assert ranks.run(3, _without_memory) == [[True, False, True]] * 3


# --- holders and ranks -----------------------------------------------------------------------------------------------

RANK_OF = (1, None, 0, 1)
"""The ranks of four holders: rank 1 has a copy of another one's part beside its own, and one is nowhere."""


def _by_holder(rank: int, seed: int) -> int:
    """The bytes that were sent."""
    draw, held = random.Random(seed), [holder for holder, at in enumerate(RANK_OF) if at == rank]
    router, tensors, items = Router(), [], []
    for number in range(6):
        shape = tuple(draw.randrange(1, 9) for _ in range(draw.randrange(1, 4)))
        tensors.append(_tensor(shape, draw.choice(TYPES), number))
        old, new = (_without_second(_layout(draw, shape, 3)) for _ in range(2))
        items.append(router.item(f"item {number}", old, new, tensors[-1].element_size()))
    bucket_plan = BucketPlan(items, draw.choice([0, 500]))
    group = dist.group.WORLD
    assert group is not None
    most_bytes = sum(bucket_plan.staged_bytes[holder] for holder in held)
    exchange = BucketExchange(RANK_OF, most_bytes, group=group, device=torch.device("cpu"))
    for bucket in bucket_plan.buckets:
        memories = {holder: Memories(*_old_and_new(bucket, tensors, holder)) for holder in held}
        assert exchange.carry(bucket, memories)
        for holder in held:
            for at, (item, target) in enumerate(zip(bucket.items, memories[holder].new, strict=True)):
                assert torch.equal(target, _part(tensors[bucket.first + at], item.new.boxes[holder])), (seed, item.name)
    return bucket_plan.sent_bytes


def _without_second(layout: Layout) -> Layout:
    """The same over one holder more, the second of which has nothing."""
    first, *rest = layout.boxes
    return Layout(layout.shape, (first, Box.empty(layout.shape), *rest))


def test_a_rank_carries_for_several_holders(ranks: RankPool) -> None:
    assert all(ranks.run(2, _by_holder, seed)[0] > 0 for seed in range(4))
