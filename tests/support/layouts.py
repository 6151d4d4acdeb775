"""Layouts made up by hypothesis, and a model of what they mean in numpy: memories that are really filled and copied."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from elastic_ext.fsdp.layout import Block, Box, Layout
from elastic_ext.fsdp.moves import Move
from elastic_ext.fsdp.worlds import Worlds

Array = npt.NDArray[np.int64]

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple) | st.lists(st.integers(1, 9), max_size=3).map(tuple)


# --- made up --------------------------------------------------------------------------------------------------------
@st.composite
def cuts(draw: st.DrawFn, size: int, num_parts: int) -> list[tuple[int, int]]:
    """``size`` elements in so many ranges, in order; some may be empty."""
    inner = sorted(draw(st.lists(st.integers(0, size), min_size=num_parts - 1, max_size=num_parts - 1)))
    return list(itertools.pairwise([0, *inner, size]))


@st.composite
def any_boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """A part of a tensor of that shape, not always said in the usual way."""
    if draw(st.booleans()) or not shape:
        start, end = sorted(draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
        return Box.flat(shape, start, end)
    corners = [sorted(draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape]
    start, end = (tuple(corner[side] for corner in corners) for side in (0, 1))
    return Box.block(shape, start, end) if draw(st.booleans()) else Box(shape, start, end)


@st.composite
def ranges(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout:
    """The flattened tensor, cut anywhere, given to holders in any order."""
    parts = draw(cuts(math.prod(shape), draw(st.integers(1, 6))))
    return Layout(shape, tuple(Box.flat(shape, *part) for part in draw(st.permutations(parts))))


@st.composite
def meshes(draw: st.DrawFn, shape: tuple[int, ...], *, replicates: bool = True, odd: bool = False) -> Layout:
    """Ranks in a mesh, each dimension of which cuts one of the tensor's, evenly or anywhere, or replicates it.

    In an odd one, replicas cut in different ways what they have.
    """
    blocks: list[tuple[tuple[int, int], ...]] = [tuple((0, size) for size in shape)]
    for num_ranks in draw(st.lists(st.integers(1, 4), max_size=3)):
        dimensions = st.integers(0, len(shape) - 1) if shape else st.none()
        across = draw(st.none() | dimensions) if replicates else draw(dimensions)
        is_even = draw(st.booleans())
        known: dict[tuple[int, int], list[tuple[int, int]]] = {}
        cut_blocks = []
        for block in blocks:
            if across is None:
                cut_blocks += [block] * (num_ranks if replicates else 1)
                continue
            low, high = block[across]
            if block[across] not in known or odd:
                chunk = -(-(high - low) // num_ranks)
                even = [min(at * chunk, high - low) for at in range(num_ranks + 1)]
                parts = list(itertools.pairwise(even)) if is_even else draw(cuts(high - low, num_ranks))
                known[low, high] = [(low + first, low + last) for first, last in parts]
            cut_blocks += [(*block[:across], part, *block[across + 1 :]) for part in known[low, high]]
        blocks = cut_blocks
    boxes = tuple(Box.block(shape, [low for low, _ in block], [high for _, high in block]) for block in blocks)
    return Layout(shape, draw(st.permutations(boxes).map(tuple)) if draw(st.booleans()) else boxes)


@st.composite
def replicated(draw: st.DrawFn, layouts: st.SearchStrategy[Layout]) -> Layout:
    """Some holders of a layout several times over, and some holders with nothing."""
    layout = draw(layouts)
    times = draw(st.lists(st.integers(1, 3), min_size=len(layout.boxes), max_size=len(layout.boxes)))
    boxes = [box for box, repeats in zip(layout.boxes, times, strict=True) for _ in range(repeats)]
    boxes += [Box.empty(layout.shape)] * draw(st.integers(0, 2))
    return Layout(layout.shape, tuple(draw(st.permutations(boxes))))


@st.composite
def overlapping(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout:
    """A layout that holds everything, and boxes of any kind beside it."""
    layout = draw(ranges(shape) | meshes(shape))
    more = draw(st.lists(any_boxes(shape), max_size=3))
    return Layout(shape, tuple(draw(st.permutations([*layout.boxes, *more]))))


def tilings(shape: tuple[int, ...]) -> st.SearchStrategy[Layout]:
    """Layouts that hold every element once."""
    return ranges(shape) | meshes(shape, replicates=False)


def apart_or_equal(shape: tuple[int, ...]) -> st.SearchStrategy[Layout]:
    """Layouts that hold every element, and whose boxes are replicas or disjoint."""
    plain = ranges(shape) | meshes(shape)
    return plain | replicated(plain)


def covering(shape: tuple[int, ...]) -> st.SearchStrategy[Layout]:
    return apart_or_equal(shape) | meshes(shape, odd=True) | overlapping(shape)


@st.composite
def any_worlds(draw: st.DrawFn) -> Worlds:
    """Worlds of a few ranks, some of whom leave, and some come."""
    num_old = draw(st.integers(1, 5))
    stays = draw(st.sets(st.integers(0, num_old - 1), min_size=1))
    comers = range(num_old, num_old + draw(st.integers(0, 3)))
    old, new = [*range(num_old)], [*sorted(stays), *comers]
    return Worlds.between(old, new, num_local=(len(old), len(new)))


# --- what it means --------------------------------------------------------------------------------------------------
def tensor_of(shape: Sequence[int]) -> Array:
    """A tensor, each element of which is another number."""
    return np.arange(math.prod(shape), dtype=np.int64).reshape(tuple(shape)) + 1000


def part_of(tensor: Array, box: Box) -> Array:
    """A view of what a box has of a tensor that is dense."""
    if box.is_flat:
        return tensor.reshape(-1)[box.start[0] : box.end[0]]
    part: Array = tensor[tuple(slice(low, high) for low, high in zip(box.start, box.end, strict=True))]
    return part


def memory_of(tensor: Array, box: Box) -> Array:
    """A copy of it, as its holder has it."""
    memory: Array = part_of(tensor, box).reshape(-1).copy()
    return memory


def times_held(shape: Sequence[int], boxes: Iterable[Box]) -> Array:
    """How many of some boxes have each element."""
    counts = np.zeros(tuple(shape), dtype=np.int64)
    for box in boxes:
        part_of(counts, box)[...] += 1
    return counts


def strided(memory: Array, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> Array:
    """Elements of a memory; AssertionError where they lie outside of it."""
    assert len(sizes) == len(strides) and min(sizes, default=1) > 0
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    assert 0 <= offset <= last < memory.size
    view: Array = np.lib.stride_tricks.as_strided(
        memory[offset:], tuple(sizes), [stride * memory.itemsize for stride in strides]
    )
    return view


def block_in(memory: Array, block: Block) -> Array:
    sizes = [high - low for low, high in zip(block.start, block.end, strict=True)]
    return strided(memory, block.offset, sizes, block.strides)


def carry(moved: Iterable[Move], sources: Sequence[Array], targets: Sequence[Array]) -> list[Array]:
    """Do what moves say, all of them reading before any writes; and count how often each target element is written."""
    counts = [np.zeros_like(target) for target in targets]
    read = [
        (move, strided(sources[move.source], move.source_offset, move.sizes, move.source_strides).copy())
        for move in moved
    ]
    for move, elements in read:
        strided(targets[move.target], move.target_offset, move.sizes, move.target_strides)[...] = elements
        strided(counts[move.target], move.target_offset, move.sizes, move.target_strides)[...] += 1
    return counts


def num_elements(moved: Iterable[Move], **where: Any) -> int:
    """How many elements move, of moves with such attributes."""
    return sum(
        move.num_elements for move in moved if all(getattr(move, name) == value for name, value in where.items())
    )
