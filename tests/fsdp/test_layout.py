"""Boxes and layouts: parts of a tensor as numpy sees them; each element held once, or the reason why not."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

from elastic_ext.fsdp.layout import Box, Layout
from elastic_ext.fsdp.moves import moves, moves_into
from tests.support.layouts import (
    any_boxes,
    apart_or_equal,
    block_in,
    covering,
    memory_of,
    overlapping,
    part_of,
    ranges,
    replicated,
    shapes,
    tensor_of,
    tilings,
    times_held,
)

Shape = tuple[int, ...]


# --- boxes ----------------------------------------------------------------------------------------------------------
@given(st.data(), shapes)
def test_a_box_is_what_numpy_cuts_out(data: st.DataObject, shape: Shape) -> None:
    box, tensor = data.draw(any_boxes(shape)), tensor_of(shape)
    part = part_of(tensor, box)
    assert box.num_elements == part.size
    assert box.is_empty == (part.size == 0)
    assert box.sizes == part.shape
    assert box.fault() is None


@given(st.data(), shapes)
def test_blocks_of_a_box_say_where_each_element_lies_in_its_memory(data: st.DataObject, shape: Shape) -> None:
    box, tensor = data.draw(any_boxes(shape)), tensor_of(shape)
    memory, rebuilt = memory_of(tensor, box), np.zeros_like(tensor)
    for block in box.blocks():
        corner = tuple(slice(low, high) for low, high in zip(block.start, block.end, strict=True))
        assert not rebuilt[corner].any()
        rebuilt[corner] = block_in(memory, block)
        assert rebuilt[corner].size == block.num_elements > 0
        if block.num_elements:
            last = tuple(high - 1 for high in block.end)
            assert memory[block.offset_of(last)] == tensor[last]
    expected = np.zeros_like(tensor)
    part_of(expected, box)[...] = part_of(tensor, box)
    assert np.array_equal(rebuilt, expected)
    assert len(box.blocks()) <= max(1, 2 * len(shape) - 1)


@given(st.data(), shapes.filter(bool))
def test_blocks_whose_elements_are_one_run_are_flat_and_no_others(data: st.DataObject, shape: Shape) -> None:
    corners = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape]
    start, end = zip(*corners, strict=True)
    part = part_of(tensor_of(shape), Box(shape, start, end)).reshape(-1)
    is_run = part.size == 0 or int(part[-1] - part[0]) == part.size - 1
    box = Box.block(shape, start, end)
    assert box.is_flat == is_run or len(shape) == 1
    assert np.array_equal(memory_of(tensor_of(shape), box), part)


@given(st.data(), shapes)
def test_the_hull_is_the_smallest_flat_range_around_a_box(data: st.DataObject, shape: Shape) -> None:
    box = data.draw(any_boxes(shape))
    part = part_of(tensor_of(shape), box).reshape(-1) - 1000
    assume(part.size)
    assert box.hull == (part.min(), part.max() + 1)


@pytest.mark.parametrize(
    ("box", "is_as"),
    [
        (Box.block((4, 4), (1, 0), (3, 4)), Box.flat((4, 4), 4, 12)),
        (Box.block((4, 4), (2, 1), (3, 3)), Box.flat((4, 4), 9, 11)),
        (Box.block((4, 1, 4), (2, 0, 0), (4, 1, 4)), Box.flat((4, 1, 4), 8, 16)),
        (Box.block((3, 4, 4), (1, 1, 0), (2, 3, 4)), Box.flat((3, 4, 4), 20, 28)),
        (Box.block((7,), (2,), (5,)), Box.flat((7,), 2, 5)),
        (Box.block((), (), ()), Box.whole(())),
        (Box.block((4, 4), (4, 0), (4, 4)), Box.empty((4, 4))),
        (Box.block((4, 0), (1, 0), (2, 0)), Box.whole((4, 0))),
        (Box.whole([2, 3]), Box((2, 3), (0,), (6,))),
        (Box.whole(()), Box((), (0,), (1,))),
    ],
)
def test_equal_parts_are_equal_boxes(box: Box, is_as: Box) -> None:
    assert box == is_as
    assert hash(box) == hash(is_as)


def test_a_block_that_is_no_run_keeps_its_corners() -> None:
    box = Box.block([4, 4], [0, 1], [2, 3])
    assert (box.shape, box.start, box.end, box.sizes) == ((4, 4), (0, 1), (2, 3), (2, 2))
    assert not box.is_flat
    with pytest.raises(dataclasses.FrozenInstanceError):
        box.start = (0, 0)  # type: ignore[misc]


# --- splitting ------------------------------------------------------------------------------------------------------
@given(st.data(), shapes, st.integers(1, 12))
def test_parts_of_a_box_tile_it_in_parts_as_equal_as_can_be(data: st.DataObject, shape: Shape, num_parts: int) -> None:
    box = data.draw(any_boxes(shape))
    parts = box.split(num_parts)
    assert len(parts) == num_parts
    assert np.array_equal(times_held(shape, parts), times_held(shape, [box]))
    sizes = [part.num_elements for part in parts]
    if box.is_flat:
        assert max(sizes) - min(sizes) <= 1
        assert [part.start[0] for part in parts] == sorted(part.start[0] for part in parts)
    else:
        assert max(sizes) < 2 * max(1, -(-box.num_elements // num_parts))


@pytest.mark.parametrize(
    ("num_parts", "starts"),
    [(2, [(0, 1), (50, 1)]), (4, [(0, 1), (25, 1), (50, 1), (75, 1)])],
)
def test_blocks_are_cut_across_the_outermost_dimension_that_is_long_enough(
    num_parts: int, starts: list[tuple[int, int]]
) -> None:
    box = Box.block((100, 1000), (0, 1), (100, 1000))
    assert [part.start for part in box.split(num_parts)] == starts


def test_a_low_block_is_cut_across_its_length() -> None:
    parts = Box.block((4, 4, 1000), (0, 0, 0), (2, 3, 900)).split(9)
    assert {part.num_elements for part in parts} == {600}


# --- each element once, or the reason why not -----------------------------------------------------------------------
@given(st.data(), shapes)
def test_layouts_of_all_kinds_have_no_fault_unless_something_is_held_twice(data: st.DataObject, shape: Shape) -> None:
    layout = data.draw(covering(shape))
    times = times_held(shape, layout.boxes)
    assert layout.covers()
    assert (layout.fault() is None) == bool((times == 1).all())


@given(st.data(), shapes)
def test_the_fault_of_any_boxes_names_elements_that_are_held_so(data: st.DataObject, shape: Shape) -> None:
    layout = Layout(shape, tuple(data.draw(st.lists(any_boxes(shape), max_size=4))))
    times = times_held(shape, layout.boxes)
    assert layout.covers() == bool((times > 0).all())
    for fault, is_wrong in ((layout.fault(), times != 1), (layout.fault(replicas=True), times == 0)):
        assert (fault is None) == (not is_wrong.any())
        if fault is not None:
            named = _box_named_in(fault, shape)
            assert named.num_elements > 0
            assert part_of(is_wrong.astype(np.int64), named).all()
            assert ("no holder has" in fault) == (not part_of(times, named).any())


def _box_named_in(fault: str, shape: Shape) -> Box:
    corners = [(int(low), int(high)) for low, high in re.findall(r"(\d+):(\d+)", fault)]
    starts, ends = zip(*corners, strict=True)
    return Box(shape, starts, ends)


@given(st.data(), shapes)
def test_a_holder_that_lost_an_element_is_found(data: st.DataObject, shape: Shape) -> None:
    layout = data.draw(tilings(shape))
    assert layout.fault() is None
    places = [(holder, box) for holder, box in enumerate(layout.boxes) if not box.is_empty]
    assume(places)
    holder, box = data.draw(st.sampled_from(places))
    across = data.draw(st.integers(0, len(box.start) - 1))
    less = _with(layout, holder, Box(shape, _moved(box.start, across, 1), box.end))
    fault = less.fault()
    assert fault is not None and fault.startswith("no holder has")
    assert not less.covers()


@given(st.data(), shapes)
def test_a_holder_that_has_an_element_too_many_is_found(data: st.DataObject, shape: Shape) -> None:
    layout = data.draw(tilings(shape))
    places = [
        (holder, box, across)
        for holder, box in enumerate(layout.boxes)
        for across, low in enumerate(box.start)
        if low > 0 and not box.is_empty
    ]
    assume(places)
    holder, box, across = data.draw(st.sampled_from(places))
    more = _with(layout, holder, Box(shape, _moved(box.start, across, -1), box.end))
    fault = more.fault()
    holders = rf"^holders (\d+ and {holder}|{holder} and \d+)"
    assert fault is not None and re.search(rf"{holders} have .*; only one may$", fault)
    assert more.covers()


def _moved(point: Shape, across: int, by: int) -> Shape:
    return tuple(at + by * (dimension == across) for dimension, at in enumerate(point))


@given(st.data(), shapes.filter(bool))
def test_a_box_outside_of_its_tensor_is_found_with_its_holder(data: st.DataObject, shape: Shape) -> None:
    layout = data.draw(covering(shape))
    holder = data.draw(st.integers(0, len(layout.boxes) - 1))
    box = layout.boxes[holder]
    limits = (math.prod(shape),) if box.is_flat else shape
    across = data.draw(st.integers(0, len(limits) - 1))
    start, end = list(box.start), list(box.end)
    match data.draw(st.sampled_from(["before", "behind", "backwards"])):
        case "before":
            start[across] = -data.draw(st.integers(1, 9))
        case "behind":
            end[across] = limits[across] + data.draw(st.integers(1, 9))
        case _:
            start[across], end[across] = end[across] + 1, start[across]
    fault = _with(layout, holder, Box(shape, tuple(start), tuple(end))).fault()
    assert fault is not None and fault.startswith(f"holder {holder}: outside of the tensor: ")


def _with(layout: Layout, holder: int, box: Box) -> Layout:
    return Layout(layout.shape, (*layout.boxes[:holder], box, *layout.boxes[holder + 1 :]))


@pytest.mark.parametrize(
    ("shape", "boxes", "fault"),
    [
        ((4, 4), [], "no holder has elements 0:16 of (4, 4)"),
        ((), [], "no holder has elements 0:1 of ()"),
        ((), [Box.whole(())] * 3, "holders 0 and 1 and 1 more have elements 0:1 of (); only one may"),
        ((9,), [Box.flat((9,), 0, 4), Box.flat((9,), 6, 9)], "no holder has elements 4:6 of (9,)"),
        ((9,), [Box.flat((9,), 5, 9), Box.flat((9,), 0, 7)], "holders 0 and 1 have elements 5:7 of (9,); only one may"),
        ((4, 4), [Box.block((4, 4), (0, 0), (4, 3))], "no holder has [0:4, 3:4] of (4, 4)"),
        (
            (4, 4),
            [Box.whole((4, 4)), Box.whole((2, 8))],
            "holder 1 has a part of a tensor of shape (2, 8); this one has (4, 4)",
        ),
        (
            (4, 4),
            [Box.flat((4, 4), 0, 17)],
            "holder 0: outside of the tensor: elements 0:17 of (4, 4); allowed: ranges within 0:16",
        ),
        (
            (4, 4),
            [Box((4, 4), (0, 3), (4, 5))],
            "holder 0: outside of the tensor: [0:4, 3:5] of (4, 4); allowed: ranges within 0:4, 0:4",
        ),
        (
            (2, 3, 4),
            [Box((2, 3, 4), (0, 0), (2, 3))],
            "holder 0: start (0, 0) and end (2, 3) do not go with the shape (2, 3, 4); allowed: one number each, into "
            "the flattened tensor, or one for each dimension",
        ),
        ((2, -1), [], "a tensor cannot have the shape (2, -1); sizes are 0 or more"),
    ],
)
def test_the_words_of_a_fault(shape: Shape, boxes: list[Box], fault: str) -> None:
    assert Layout(shape, tuple(boxes)).fault() == fault


@given(shapes, st.lists(st.integers(-2, 9), max_size=4), st.lists(st.integers(-2, 9), max_size=4))
def test_boxes_of_any_numbers_have_a_fault_or_are_parts(shape: Shape, start: list[int], end: list[int]) -> None:
    for box in (Box(shape, tuple(start), tuple(end)), Box.block(shape, start, end)):
        fault = Layout(shape, (box,)).fault()
        assert fault == Layout(shape, (box,)).fault()
        if box.fault() is None:
            assert times_held(shape, [box]).sum() == box.num_elements
        else:
            assert fault is not None and str(shape) in fault


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0, 2)])
def test_tensors_without_elements_are_held_by_anybody_and_nobody(shape: Shape) -> None:
    for boxes in ((), (Box.whole(shape),), (Box.whole(shape), Box.empty(shape))):
        layout = Layout(shape, boxes)
        assert layout.fault() is None
        assert layout.covers()
        assert layout.shares(least=0) == layout


# --- shares ---------------------------------------------------------------------------------------------------------
@given(st.data(), shapes, st.sampled_from([0, 1, 3, 10, 1000]), st.text(max_size=3))
def test_shares_hold_each_element_once_and_nobody_more_than_it_has(
    data: st.DataObject, shape: Shape, least: int, salt: str
) -> None:
    layout = data.draw(apart_or_equal(shape) | replicated(ranges(shape)))
    shares = layout.shares(least=least, salt=salt)
    assert shares.fault() is None
    assert shares.shares(least=least, salt=salt) == shares
    for box, share in zip(layout.boxes, shares.boxes, strict=True):
        assert ((times_held(shape, [share]) == 0) | (times_held(shape, [box]) == 1)).all()
    for box, holders in layout.holders_of_boxes().items():
        sizes = [shares.boxes[holder].num_elements for holder in holders]
        num_parts = sum(map(bool, sizes))
        assert (num_parts == 1) == (box.num_elements <= max(1, least) or len(holders) == 1)
        if box.is_flat and num_parts == len(holders):
            assert max(sizes) - min(sizes) <= 1


@given(st.data(), shapes)
def test_boxes_that_overlap_otherwise_are_cut_down_or_refused(data: st.DataObject, shape: Shape) -> None:
    layout = data.draw(overlapping(shape))
    try:
        shares = layout.shares(least=1)
    except ValueError:
        event("refused")
        assert not layout.is_flat
        return
    event("cut down")
    assert shares.fault() is None
    for box, share in zip(layout.boxes, shares.boxes, strict=True):
        assert ((times_held(shape, [share]) == 0) | (times_held(shape, [box]) == 1)).all()


@given(st.data(), st.integers(1, 5), st.integers(1, 5), st.integers(0, 2), st.integers(0, 2))
def test_blocks_that_overlap_at_their_edges_are_cut_down(
    data: st.DataObject, num_rows: int, num_columns: int, halo: int, other_halo: int
) -> None:
    shape = (3 * num_rows, 4 * num_columns)
    boxes = [
        Box.block(
            shape,
            (max(0, 3 * row - halo), max(0, 4 * column - other_halo)),
            (min(shape[0], 3 * row + 3 + halo), min(shape[1], 4 * column + 4 + other_halo)),
        )
        for row in range(num_rows)
        for column in range(num_columns)
    ]
    layout = Layout(shape, tuple(data.draw(st.permutations(boxes))))
    assert layout.shares(least=0).fault() is None


def test_one_who_has_it_all_shares_for_those_with_parts() -> None:
    parts = [Box.block((4, 4), (0, 2 * at), (4, 2 * at + 2)) for at in range(2)]
    assert Layout((4, 4), (*parts, Box.whole((4, 4)))).shares(least=0).boxes == (
        Box.empty((4, 4)),
        Box.empty((4, 4)),
        Box.whole((4, 4)),
    )


def test_ranges_among_blocks_are_cut_down_to_ranges() -> None:
    shape = (4, 4)
    column, rest = Box.block(shape, (2, 3), (4, 4)), Box.flat(shape, 12, 15)
    layout = Layout(shape, (column, Box.flat(shape, 3, 11), rest, Box.flat(shape, 0, 5)))
    assert layout.shares(least=0).boxes == (column, Box.flat(shape, 5, 11), rest, Box.flat(shape, 0, 5))


def test_a_cross_is_refused_because_what_is_left_of_it_is_no_box() -> None:
    cross = (Box.block((3, 3), (1, 0), (2, 3)), Box.block((3, 3), (0, 1), (3, 2)))
    with pytest.raises(ValueError, match=re.escape("elements 3:6 of (3, 3) overlaps parts on other")):
        Layout((3, 3), cross).shares(least=0)


def test_small_tensors_are_given_to_each_replica_about_equally_often() -> None:
    whole = Box.whole((64,))
    layout = Layout((64,), (whole,) * 16)
    turns = Counter[int]()
    for layer in range(100):
        for name in ("attention.query.bias", "attention.key.bias", "norm.weight", "norm.bias"):
            boxes = layout.shares(least=64, salt=f"layers.{layer}.{name}").boxes
            turns[boxes.index(whole)] += 1
    assert len(turns) == 16
    assert max(turns.values()) <= 2 * 400 / 16


def test_the_turn_of_a_name_is_the_same_in_every_process() -> None:
    whole = Box.whole((8,))
    layout = Layout((8,), (whole,) * 1000)
    salts = ["", "weight", "\N{SNOWMAN}", "\ud800"]
    assert [layout.shares(least=8, salt=salt).boxes.index(whole) for salt in salts] == [876, 636, 275, 464]


# --- many holders ---------------------------------------------------------------------------------------------------
def _num_lines(work: Callable[[], Any]) -> int:
    """How many lines of this library run: work without a clock."""
    num_lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal num_lines
        if "fsdp" not in frame.f_code.co_filename:
            return None
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return num_lines


def _flat(num_holders: int) -> Layout:
    return Layout((1 << 20,), Box.whole((1 << 20,)).split(num_holders))


def _hybrid(num_holders: int) -> Layout:
    return Layout((1 << 20,), Box.whole((1 << 20,)).split(num_holders // 2) * 2)


def _mesh(num_holders: int) -> Layout:
    shape, side = (512, 512), math.isqrt(num_holders)
    step = 512 // side
    return Layout(
        shape,
        tuple(
            Box.block(shape, (step * row, step * column), (step * (row + 1), step * (column + 1)))
            for row in range(side)
            for column in range(side)
        ),
    )


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(lambda n: _flat(n).fault(), id="fault of ranges"),
        pytest.param(lambda n: _hybrid(n).fault(), id="fault of replicas"),
        pytest.param(lambda n: _mesh(n).fault(), id="fault of a mesh"),
        pytest.param(lambda n: _flat(n).shares(least=0), id="shares of ranges"),
        pytest.param(lambda n: _hybrid(n).shares(least=0), id="shares of replicas"),
        pytest.param(lambda n: _mesh(n).shares(least=0), id="shares of a mesh"),
        pytest.param(lambda n: moves(_flat(n), _flat(n - 1)), id="moves between ranges"),
        pytest.param(lambda n: moves(_hybrid(n), _flat(n - 1)), id="moves from replicas"),
        pytest.param(lambda n: moves_into(_flat(3).boxes[1], _flat(n), target=-1), id="moves into a range"),
    ],
)
def test_work_grows_as_the_number_of_holders_does(work: Callable[[int], object]) -> None:
    assert _num_lines(lambda: work(128)) < 4.5 * _num_lines(lambda: work(32))
