"""Freight: buckets that ranks exchange, carried out in numpy: the new layout, within the memory that was told."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.fsdp.freight import Bucket, Item, buckets_of
from elastic_ext.fsdp.layout import Box, Layout
from tests.layouts import Array, memory_of, num_elements, overlapping, ranges, shapes, strided, tensor_of
from tests.layouts import meshes as meshes_of

ITEM_BYTES = np.dtype(np.int64).itemsize


def _held_by(layout: Layout, num_ranks: int) -> Layout:
    """The same, and nothing for ranks that it does not have."""
    more = num_ranks - len(layout.boxes)
    return Layout(layout.shape, layout.boxes + (Box.empty(layout.shape),) * more)


@st.composite
def items(draw: st.DrawFn, num_ranks: int, number: int) -> Item:
    """A tensor that is to lie elsewhere, on so many ranks or, for some, where it was."""
    shape = draw(shapes)
    any_layout = ranges(shape) | meshes_of(shape) | overlapping(shape)
    fitting = any_layout.filter(lambda layout: len(layout.boxes) <= num_ranks)
    old = _held_by(draw(fitting), num_ranks)
    new = old if draw(st.integers(0, 4)) == 0 else _held_by(draw(fitting), num_ranks)
    return Item(f"item {number}", old, new, ITEM_BYTES)


@st.composite
def cargoes(draw: st.DrawFn) -> list[Item]:
    num_ranks = draw(st.integers(1, 6))
    return [draw(items(num_ranks, number)) for number in range(draw(st.integers(0, 4)))]


class Memory:
    """What one rank has allocated beside what it had, and the most of it."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def take(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.most = max(self.most, self.now)


def _carry(bucket: Bucket, sources: list[list[Array]]) -> tuple[list[list[Array]], list[int], int]:
    """Exchange a bucket as ranks do; gives the new memories by item and rank, what each rank took, and bytes sent.

    As in carrier.py: new memory, all that is sent packed, all that is received packed.
    """
    num_ranks = len(bucket.items[0].old.boxes) if bucket.items else 0
    memories = [Memory() for _ in range(num_ranks)]
    new: list[list[Array]] = []
    posted: dict[tuple[int, int], list[Array]] = {}
    for item, held in zip(bucket.items, sources, strict=True):
        targets = []
        for rank, (before, after) in enumerate(zip(item.old.boxes, item.new.boxes, strict=True)):
            if before == after:
                targets.append(held[rank])
                continue
            targets.append(np.zeros(after.num_elements, dtype=np.int64))
            memories[rank].take(targets[-1].nbytes)
        new.append(targets)
        for move in item.moves:
            piece = strided(held[move.source], move.source_offset, move.sizes, move.source_strides)
            if move.source == move.target:
                strided(targets[move.target], move.target_offset, move.sizes, move.target_strides)[...] = piece
                continue
            packed = piece.copy()
            memories[move.source].take(packed.nbytes)
            posted.setdefault((move.source, move.target), []).append(packed)
    num_sent = sum(piece.nbytes for pieces in posted.values() for piece in pieces)
    for (_, target), pieces in posted.items():
        memories[target].take(sum(piece.nbytes for piece in pieces))
    for item, targets in zip(bucket.items, new, strict=True):
        for move in item.moves:
            if move.source != move.target:
                piece = posted[move.source, move.target].pop(0)
                strided(targets[move.target], move.target_offset, move.sizes, move.target_strides)[...] = piece
    assert not any(posted.values())
    return new, [memory.most for memory in memories], num_sent


@given(cargoes(), st.integers(0, 600))
def test_buckets_bring_every_tensor_to_its_new_layout_within_the_load_that_they_tell(
    cargo: list[Item], most_bytes: int
) -> None:
    for bucket in buckets_of(cargo, most_bytes):
        tensors = [tensor_of(item.old.shape) for item in bucket.items]
        sources = [
            [memory_of(tensor, box) for box in item.old.boxes]
            for item, tensor in zip(bucket.items, tensors, strict=True)
        ]
        new, taken, num_sent = _carry(bucket, sources)
        for item, tensor, targets in zip(bucket.items, tensors, new, strict=True):
            for box, target in zip(item.new.boxes, targets, strict=True):
                assert np.array_equal(target, memory_of(tensor, box))
        assert max(taken) <= bucket.load
        assert bucket.load == max(map(sum, zip(*(item.loads for item in bucket.items), strict=True)))
        assert num_sent == bucket.num_sent == sum(item.num_sent for item in bucket.items)


@given(cargoes(), st.integers(0, 600))
def test_buckets_have_all_items_in_order_and_keep_to_the_limit_unless_they_have_one(
    cargo: list[Item], most_bytes: int
) -> None:
    buckets = list(buckets_of(cargo, most_bytes))
    assert [item for bucket in buckets for item in bucket.items] == cargo
    assert [bucket.first for bucket in buckets] == [
        sum(len(before.items) for before in buckets[:at]) for at in range(len(buckets))
    ]
    for bucket, following in itertools.pairwise(buckets):
        assert Bucket(0, [*bucket.items, following.items[0]]).load > most_bytes  # or it would have been in it
    assert all(bucket.load <= most_bytes for bucket in buckets if len(bucket.items) > 1)


@given(cargoes())
def test_nothing_is_sent_to_who_has_it_or_whose_part_stays(cargo: list[Item]) -> None:
    for item in cargo:
        stays = {rank for rank, (old, new) in enumerate(zip(item.old.boxes, item.new.boxes, strict=True)) if old == new}
        assert not any(move.target in stays for move in item.moves)
        assert item.num_sent <= ITEM_BYTES * num_elements(item.moves)
        for rank in stays:
            gives = sum(move.num_elements for move in item.moves if move.source == rank != move.target)
            assert item.loads[rank] == ITEM_BYTES * gives


def test_a_tensor_that_stays_takes_nothing() -> None:
    layout = Layout((4, 2), (Box.block((4, 2), (0, 0), (2, 2)), Box.block((4, 2), (2, 0), (4, 2))))
    (bucket,) = buckets_of([Item("weight", layout, layout, 4)], 0)
    assert (bucket.load, bucket.num_sent, list(bucket.items[0].moves)) == (0, 0, [])


def test_no_items_make_no_bucket() -> None:
    assert list(buckets_of([], 100)) == []


def test_of_replicas_that_could_give_several_take_turns() -> None:
    shape = (8,)
    halves = tuple(Box.block(shape, (low,), (low + 4,)) for low in (0, 4))
    sharded, whole = Layout(shape, halves * 2), Layout(shape, (Box.whole(shape),) * 4)
    givers = {
        move.source
        for number in range(8)
        for move in Item(f"weight {number}", sharded, whole, 4).moves
        if move.source != move.target
    }
    assert givers == {0, 1, 2, 3}
