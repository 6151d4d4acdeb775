"""BucketPlan: buckets that ranks exchange, carried out in numpy: the new layout, within the memory that was told."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.fsdp.layout import Box, Layout
from elastic_ext.fsdp.plan import Degrees
from elastic_ext.fsdp.reshard.buckets import Bucket, BucketItem, BucketPlan, Router
from tests.support.layouts import Array, memory_of, num_elements, overlapping, ranges, shapes, strided, tensor_of
from tests.support.layouts import meshes as meshes_of

ITEM_BYTES = np.dtype(np.int64).itemsize


def _held_by(layout: Layout, num_ranks: int) -> Layout:
    """The same, and nothing for ranks that it does not have."""
    more = num_ranks - len(layout.boxes)
    return Layout(layout.shape, (*layout.boxes, *(Box.empty(layout.shape),) * more))


@st.composite
def items(draw: st.DrawFn, num_ranks: int, number: int) -> BucketItem:
    """A tensor that is to lie elsewhere, on so many ranks or, for some, where it was."""
    shape = draw(shapes)
    any_layout = ranges(shape) | meshes_of(shape) | overlapping(shape)
    fitting = any_layout.filter(lambda layout: len(layout.boxes) <= num_ranks)
    old = _held_by(draw(fitting), num_ranks)
    new = old if draw(st.integers(0, 4)) == 0 else _held_by(draw(fitting), num_ranks)
    return Router().item(f"item {number}", old, new, ITEM_BYTES)


@st.composite
def item_lists(draw: st.DrawFn) -> list[BucketItem]:
    num_ranks = draw(st.integers(1, 6))
    return [draw(items(num_ranks, number)) for number in range(draw(st.integers(0, 4)))]


def _carry(bucket: Bucket, sources: list[list[Array]]) -> tuple[list[list[Array]], list[int]]:
    """Exchange a bucket as ranks do; gives the new memories by item and rank, and what each sends and receives."""
    num_ranks = len(bucket.items[0].old.boxes)
    exchanged = [0] * num_ranks
    new: list[list[Array]] = []
    for item, held in zip(bucket.items, sources, strict=True):
        targets = [
            held[rank] if before == after else np.zeros(after.num_elements, dtype=np.int64)
            for rank, (before, after) in enumerate(zip(item.old.boxes, item.new.boxes, strict=True))
        ]
        new.append(targets)
        pieces = [
            strided(held[move.source], move.source_offset, move.sizes, move.source_strides).copy()
            for move in item.moves
        ]
        for move, piece in zip(item.moves, pieces, strict=True):
            strided(targets[move.target], move.target_offset, move.sizes, move.target_strides)[...] = piece
            if move.source != move.target:
                exchanged[move.source] += piece.nbytes
                exchanged[move.target] += piece.nbytes
    return new, exchanged


@given(item_lists(), st.integers(0, 600))
def test_buckets_bring_every_tensor_to_its_new_layout_within_the_extra_bytes_that_they_tell(
    items: list[BucketItem], most_bytes: int
) -> None:
    bucket_plan = BucketPlan(items, most_bytes)
    tensors = [tensor_of(item.old.shape) for item in items]
    memories = [[memory_of(tensor, box) for box in item.old.boxes] for item, tensor in zip(items, tensors, strict=True)]
    num_ranks = len(items[0].old.boxes) if items else 0
    before, peak, sent_bytes = _sizes(memories, num_ranks), [0] * num_ranks, 0
    for bucket in bucket_plan.buckets:
        own = slice(bucket.first, bucket.first + len(bucket.items))
        held = _sizes(memories, num_ranks)
        new, exchanged = _carry(bucket, memories[own])
        fresh = [
            sum(
                after[rank].nbytes
                for had, after in zip(memories[own], new, strict=True)
                if after[rank] is not had[rank]
            )
            for rank in range(num_ranks)
        ]
        assert all(size <= staged for size, staged in zip(exchanged, bucket_plan.staged_bytes, strict=True))
        peak = [
            max(each)
            for each in zip(peak, map(sum, zip(held, fresh, bucket_plan.staged_bytes, strict=True)), strict=True)
        ]
        sent_bytes += sum(exchanged) // 2
        assert bucket.sent_bytes == sum(exchanged) // 2
        memories[own] = new
    for item, tensor, targets in zip(items, tensors, memories, strict=True):
        for box, target in zip(item.new.boxes, targets, strict=True):
            assert np.array_equal(target, memory_of(tensor, box))
    after = _sizes(memories, num_ranks)
    over = [most - max(ends) for most, *ends in zip(peak, before, after, strict=True)]
    assert bucket_plan.extra_bytes == max(over, default=0)
    assert bucket_plan.sent_bytes == sent_bytes == sum(item.sent_bytes for item in items)


def _sizes(memories: list[list[Array]], num_ranks: int) -> list[int]:
    """What each rank holds, in bytes."""
    return [sum(of_item[rank].nbytes for of_item in memories) for rank in range(num_ranks)]


@given(item_lists(), st.integers(0, 600))
def test_buckets_have_all_items_in_order_and_keep_to_the_limit_unless_they_have_one(
    items: list[BucketItem], most_bytes: int
) -> None:
    buckets = BucketPlan(items, most_bytes).buckets
    assert [item for bucket in buckets for item in bucket.items] == items
    assert [bucket.first for bucket in buckets] == [
        sum(len(before.items) for before in buckets[:at]) for at in range(len(buckets))
    ]
    assert all(_fits(bucket.items, most_bytes) for bucket in buckets if len(bucket.items) > 1)
    for bucket, following in itertools.pairwise(buckets):
        assert not _fits([*bucket.items, following.items[0]], most_bytes)  # or it would have been in it


def _fits(items: Sequence[BucketItem], most_bytes: int) -> bool:
    """Three quarters for what is exchanged, one for what is there twice."""
    exchanged = max(map(sum, zip(*(item.exchanged_bytes for item in items), strict=True)))
    doubled = max(map(sum, zip(*(map(min, item.taken_bytes, item.freed_bytes) for item in items), strict=True)))
    for_exchange = most_bytes * 3 // 4
    return exchanged <= for_exchange and doubled <= most_bytes - for_exchange


@given(st.lists(st.tuples(shapes, st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=12), st.data())
def test_a_change_of_tensors_that_are_cut_evenly_takes_two_buckets_or_what_one_of_them_needs(
    tensors: list[tuple[tuple[int, ...], int]], data: st.DataObject
) -> None:
    num_ranks = data.draw(st.sampled_from([1, 2, 3, 4, 6]))
    degrees = [Degrees(num_ranks // shard, shard) for shard in range(1, num_ranks + 1) if num_ranks % shard == 0]
    old, new = data.draw(st.sampled_from(degrees)), data.draw(st.sampled_from(degrees))
    router = Router()
    even = [((12 * shape[0], *shape[1:]), item_bytes) for shape, item_bytes in tensors if shape]  # by any degree here
    items = [
        router.item(f"{at}", old.layout(shape), new.layout(shape), item_bytes)
        for at, (shape, item_bytes) in enumerate(even)
    ]
    most_bytes = data.draw(st.integers(0, 5000))
    for_exchange = max([most_bytes * 3 // 4, *(max(item.exchanged_bytes) for item in items)])
    for_doubles = max(
        [most_bytes - most_bytes * 3 // 4, *(max(map(min, item.taken_bytes, item.freed_bytes)) for item in items)]
    )
    assert BucketPlan(items, most_bytes).extra_bytes <= for_exchange + for_doubles


@given(item_lists())
def test_nothing_is_sent_to_who_has_it_or_whose_part_stays(items: list[BucketItem]) -> None:
    for item in items:
        stays = {rank for rank, (old, new) in enumerate(zip(item.old.boxes, item.new.boxes, strict=True)) if old == new}
        assert not any(move.target in stays for move in item.moves)
        assert item.sent_bytes <= ITEM_BYTES * num_elements(item.moves)
        for rank in stays:
            gives = sum(move.num_elements for move in item.moves if move.source == rank != move.target)
            assert item.exchanged_bytes[rank] == ITEM_BYTES * gives
            assert item.taken_bytes[rank] == item.freed_bytes[rank] == 0


def test_a_tensor_that_stays_takes_nothing() -> None:
    layout = Layout((4, 2), (Box.block((4, 2), (0, 0), (2, 2)), Box.block((4, 2), (2, 0), (4, 2))))
    bucket_plan = BucketPlan([Router().item("weight", layout, layout, 4)], 0)
    assert (
        bucket_plan.extra_bytes,
        bucket_plan.sent_bytes,
        bucket_plan.staged_bytes,
        list(bucket_plan.items[0].moves),
    ) == (0, 0, [0, 0], [])


def test_no_items_make_no_bucket() -> None:
    bucket_plan = BucketPlan([], 100)
    assert (bucket_plan.buckets, bucket_plan.extra_bytes, bucket_plan.sent_bytes) == ([], 0, 0)


def test_of_replicas_that_could_give_several_take_turns() -> None:
    shape = (8,)
    halves = tuple(Box.block(shape, (low,), (low + 4,)) for low in (0, 4))
    sharded, whole = Layout(shape, halves * 2), Layout(shape, (Box.whole(shape),) * 4)
    givers = {
        move.source
        for number in range(8)
        for move in Router().item(f"weight {number}", sharded, whole, 4).moves
        if move.source != move.target
    }
    assert givers == {0, 1, 2, 3}
