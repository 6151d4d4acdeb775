"""Moves between any two layouts, carried out in numpy: every element arrives, once, and from where it should."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.fsdp.layout import Box, Layout
from elastic_ext.fsdp.moves import Move, moves, moves_into
from tests.support.layouts import (
    any_boxes,
    apart_or_equal,
    carry,
    covering,
    memory_of,
    num_elements,
    overlapping,
    ranges,
    shapes,
    tensor_of,
    times_held,
)

leasts = st.sampled_from([0, 1, 2, 5, 100])


@given(st.data(), shapes, leasts)
def test_moves_bring_every_element_to_fresh_memory_once(
    data: st.DataObject, shape: tuple[int, ...], least: int
) -> None:
    old, new = data.draw(covering(shape)), data.draw(covering(shape))
    tensor = tensor_of(shape)
    sources = [memory_of(tensor, box) for box in old.boxes]
    targets = [np.zeros(box.num_elements, dtype=np.int64) for box in new.boxes]
    counts = carry(moves(old, new, least=least, same_memory=False), sources, targets)
    for box, target, count in zip(new.boxes, targets, counts, strict=True):
        assert np.array_equal(target, memory_of(tensor, box))
        assert (count == 1).all()


@given(st.data(), shapes, leasts)
def test_moves_within_one_memory_leave_out_what_stays(data: st.DataObject, shape: tuple[int, ...], least: int) -> None:
    old, new = data.draw(covering(shape)), data.draw(covering(shape))
    tensor = tensor_of(shape)
    sources = [memory_of(tensor, box) for box in old.boxes]
    targets = [np.zeros(box.num_elements, dtype=np.int64) for box in new.boxes]
    for source, target in zip(sources, targets, strict=False):
        size = min(source.size, target.size)
        target[:size] = source[:size]
    moved = moves(old, new, least=least)
    carry(moved, sources, targets)
    for box, target in zip(new.boxes, targets, strict=True):
        assert np.array_equal(target, memory_of(tensor, box))
    everything = moves(old, new, least=least, same_memory=False)
    assert moved == [move for move in everything if not move.stays]


@given(st.data(), shapes, leasts)
def test_elements_leave_a_holder_only_for_one_that_lacks_them(
    data: st.DataObject, shape: tuple[int, ...], least: int
) -> None:
    old, new = data.draw(covering(shape)), data.draw(covering(shape))
    moved = moves(old, new, least=least)
    for target, box in enumerate(new.boxes):
        had = times_held(shape, old.boxes[target : target + 1])
        lacks = int((times_held(shape, [box]) > had).sum())
        arrived = num_elements(moved, target=target) - num_elements(moved, target=target, source=target)
        assert arrived == lacks


@given(st.data(), shapes)
def test_a_layout_needs_no_moves_to_itself(data: st.DataObject, shape: tuple[int, ...]) -> None:
    layout = data.draw(covering(shape))
    assert moves(layout, layout) == []


@given(st.data(), shapes, leasts)
def test_moves_into_a_box_bring_it_all(data: st.DataObject, shape: tuple[int, ...], least: int) -> None:
    old, box = data.draw(covering(shape)), data.draw(any_boxes(shape))
    target = data.draw(st.integers(-1, len(old.boxes)))
    prefers = data.draw(st.lists(st.integers(0, len(old.boxes)), max_size=3))
    moved = moves_into(box, old, target=target, prefers=prefers, least=least)
    tensor = tensor_of(shape)
    memory = np.zeros(box.num_elements, dtype=np.int64)
    assert {move.target for move in moved} <= {target}
    local = [dataclasses.replace(move, target=0) for move in moved]
    (count,) = carry(local, [memory_of(tensor, held) for held in old.boxes], [memory])
    assert np.array_equal(memory, memory_of(tensor, box))
    assert (count == 1).all()
    own = old.boxes[target : target + 1] if target >= 0 else ()
    assert num_elements(moved, source=target) == int((times_held(shape, [box, *own]) == 2).sum())


@given(st.data(), shapes)
def test_who_is_preferred_gives_all_it_has(data: st.DataObject, shape: tuple[int, ...]) -> None:
    old, box = data.draw(overlapping(shape)), data.draw(any_boxes(shape))
    first, second = (data.draw(st.integers(0, len(old.boxes) - 1)) for _ in range(2))
    moved = moves_into(box, old, target=-1, prefers=(first, second), least=1)
    has_first = times_held(shape, [old.boxes[first]]) * times_held(shape, [box])
    has_second = times_held(shape, [old.boxes[second]]) * times_held(shape, [box])
    assert num_elements(moved, source=first) == int(has_first.sum())
    if second != first:
        assert num_elements(moved, source=second) == int((has_second > has_first).sum())


@given(st.data(), shapes)
def test_replicas_give_equal_parts(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Of what targets without anything of their own ask of a layout, to an element."""
    old, new = data.draw(apart_or_equal(shape)), data.draw(covering(shape))
    nothing = (Box.empty(shape),) * len(old.boxes)
    moved = moves(old, Layout(shape, (*nothing, *new.boxes)), least=1)
    given_by = Counter[int]()
    for move in moved:
        given_by[move.source] += move.num_elements
    for holders in old.holders_of_boxes().values():
        each = [given_by[holder] for holder in holders]
        assert max(each) - min(each) <= 1


@given(st.integers(2, 40), st.integers(1, 40), st.integers(1, 3000), st.integers(1, 64))
def test_what_replicas_give_is_cut_into_few_messages_and_no_splinters(
    num_replicas: int, num_targets: int, size: int, least: int
) -> None:
    shape = (size,)
    whole = Box.whole(shape)
    old = Layout(shape, (whole,) * num_replicas)
    new = Layout(shape, (Box.empty(shape),) * num_replicas + whole.split(num_targets))
    moved = moves(old, new, least=least)
    smallest = min(box.num_elements for box in new.boxes[num_replicas:] if not box.is_empty)
    assert num_elements(moved) == size
    assert len(moved) <= num_targets + num_replicas - 1
    assert min(move.num_elements for move in moved) >= min(smallest, least // 2)
    busiest = max(num_elements(moved, source=holder) for holder in range(num_replicas))
    assert busiest <= size / num_replicas + least + 1 or busiest <= least + math.ceil(size / num_targets)


def test_small_tensors_come_from_another_replica_for_each_name_and_each_target() -> None:
    whole = Box.whole((100,))
    old = Layout((100,), (whole,) * 8)
    by_name = Counter(moves_into(whole, old, target=8, salt=f"layers.{at}.bias")[0].source for at in range(800))
    assert len(by_name) == 8 and min(by_name.values()) > 60
    by_target = Counter(moves_into(whole, old, target=target)[0].source for target in range(8, 16))
    assert set(by_target.values()) == {1}


@given(st.data(), shapes)
def test_moves_are_the_same_on_every_rank_that_works_them_out(data: st.DataObject, shape: tuple[int, ...]) -> None:
    old, new = data.draw(covering(shape)), data.draw(covering(shape))
    moved = moves(old, new, least=2, salt="weight")
    assert moved == moves(Layout(shape, tuple(old.boxes)), new, least=2, salt="weight")
    assert moved == sorted(moved, key=lambda move: (move.target, move.source, move.target_offset))


@given(st.data(), shapes)
def test_what_nobody_holds_is_an_error_that_names_it(data: st.DataObject, shape: tuple[int, ...]) -> None:
    boxes, box = data.draw(st.lists(any_boxes(shape), max_size=3)), data.draw(any_boxes(shape))
    old = Layout(shape, tuple(boxes))
    is_missing = bool(((times_held(shape, [box]) == 1) & (times_held(shape, boxes) == 0)).any())
    if is_missing:
        with pytest.raises(ValueError, match=r"no holder has .* of .*, which are needed for .* of"):
            moves_into(box, old, target=0)
        with pytest.raises(ValueError, match="no holder has"):
            moves(old, Layout(shape, (Box.empty(shape),) * len(boxes) + (box,)))
    else:
        assert num_elements(moves_into(box, old, target=0)) == box.num_elements


def test_the_error_for_missing_elements_in_full() -> None:
    old = Layout((4, 6), (Box.block((4, 6), (0, 0), (4, 3)),))
    message = "no holder has [1:3, 3:5] of (4, 6), which are needed for [1:3, 2:5] of (4, 6)"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        moves_into(Box.block((4, 6), (1, 2), (3, 5)), old, target=0)


def test_a_target_whose_own_block_lies_elsewhere_takes_ranges_from_others() -> None:
    shape = (4, 4)
    column = Box.block(shape, (2, 0), (4, 1))
    old = Layout(shape, (column, Box.flat(shape, 0, 8)))
    assert moves_into(Box.flat(shape, 2, 6), old, target=0) == [Move(1, 0, (4,), 2, (1,), 0, (1,))]
    with pytest.raises(ValueError, match="no holder has elements 9:11"):
        moves_into(Box.flat(shape, 9, 11), Layout(shape, (column,)), target=0)


def test_parts_of_another_tensor_are_refused() -> None:
    old = Layout((4, 6), (Box.whole((4, 6)),))
    message = re.escape("elements 0:24 of (6, 4) cannot come from a tensor of shape (4, 6); give parts of one tensor")
    with pytest.raises(ValueError, match=message):
        moves_into(Box.whole((6, 4)), old, target=0)
    with pytest.raises(ValueError, match=message):
        moves(old, Layout((6, 4), (Box.whole((6, 4)),)))


# --- as few numbers as can be --------------------------------------------------------------------------------------
def test_runs_that_are_dense_in_both_memories_are_one_dimension() -> None:
    shape = (8, 4, 5)
    rows = Layout(shape, Box.whole(shape).split(4))
    assert moves(rows, Layout(shape, (Box.whole(shape),))) == [
        Move(1, 0, (40,), 0, (1,), 40, (1,)),
        Move(2, 0, (40,), 0, (1,), 80, (1,)),
        Move(3, 0, (40,), 0, (1,), 120, (1,)),
    ]


def test_columns_are_two_dimensions_whatever_the_tensor_has() -> None:
    shape = (2, 3, 8, 5)
    halves = Layout(shape, tuple(Box.block(shape, (0, 0, low, 0), (2, 3, low + 4, 5)) for low in (0, 4)))
    assert moves(halves, Layout(shape, (Box.whole(shape),)), same_memory=False) == [
        Move(0, 0, (6, 20), 0, (20, 1), 0, (40, 1)),
        Move(1, 0, (6, 20), 0, (20, 1), 20, (40, 1)),
    ]


def test_a_column_of_one_is_one_strided_dimension() -> None:
    shape = (5, 3)
    column = Box.block(shape, (0, 1), (5, 2))
    assert moves_into(column, Layout(shape, (Box.whole(shape),)), target=-1) == [
        Move(0, -1, (5,), 1, (3,), 0, (1,)),
    ]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
def test_one_element_is_one_dense_dimension(shape: tuple[int, ...]) -> None:
    whole = Box.whole(shape)
    assert moves_into(whole, Layout(shape, (whole,)), target=-1) == [Move(0, -1, (1,), 0, (1,), 0, (1,))]


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0, 2)])
def test_tensors_without_elements_need_no_moves(shape: tuple[int, ...]) -> None:
    whole = Box.whole(shape)
    assert moves_into(whole, Layout(shape, ()), target=0) == []
    assert moves(Layout(shape, (whole,)), Layout(shape, (whole, whole)), same_memory=False) == []


# --- many holders --------------------------------------------------------------------------------------------------
def _flat(shape: tuple[int, ...], num_holders: int) -> Layout:
    return Layout(shape, Box.whole(shape).split(num_holders))


def test_a_thousand_holders_take_over_from_a_thousand() -> None:
    shape = (4096, 257)
    moved = moves(_flat(shape, 1024), _flat(shape, 1000), same_memory=False)
    assert num_elements(moved) == 4096 * 257
    assert len(moved) <= 1024 + 1000


def test_a_mesh_of_a_thousand_takes_over_from_ranges_and_gives_back() -> None:
    shape = (256, 320)
    mesh = Layout(
        shape,
        tuple(
            Box.block(shape, (row * 8, column * 10), (row * 8 + 8, column * 10 + 10))
            for row in range(32)
            for column in range(32)
        ),
    )
    flat = _flat(shape, 1024)
    for old, new in ((mesh, flat), (flat, mesh)):
        moved = moves(old, new, same_memory=False)
        assert num_elements(moved) == 256 * 320
        counts = carry(
            moved,
            [memory_of(tensor_of(shape), box) for box in old.boxes],
            targets := [np.zeros(box.num_elements, dtype=np.int64) for box in new.boxes],
        )
        assert all((count == 1).all() for count in counts)
        assert all(map(np.array_equal, targets, (memory_of(tensor_of(shape), box) for box in new.boxes)))


def test_five_hundred_replicas_bring_up_five_hundred_more_with_a_message_or_two_each() -> None:
    shape = (1 << 20,)
    whole = Box.whole(shape)
    old = Layout(shape, (whole,) * 512)
    moved = moves(old, _flat(shape, 1024), least=1)
    given_by = Counter(move.source for move in moved if move.source != move.target)
    assert set(given_by) == set(range(512))
    assert max(given_by.values()) <= 2


@given(st.data(), st.integers(1, 5), ranges((30,)))
def test_holders_that_are_new_or_gone_are_served_too(data: st.DataObject, num_more: int, old: Layout) -> None:
    new = data.draw(ranges((30,)))
    grown = Layout((30,), (*new.boxes, *[Box.whole((30,))] * num_more))
    assert num_elements(moves(old, grown, same_memory=False)) == 30 * (1 + num_more)
