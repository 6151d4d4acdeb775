"""Moves: what has to be copied where, so that a tensor lies by another layout. Pure; carriers do the copying."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from .layout import Block, Box, Layout, box_in, num_worth, space_of, turn_of
from .regions import Point, Regions, cut_run, num_in

__all__ = ["Move", "moves", "moves_into"]

_LEAST = 1 << 14  # elements; a message with fewer costs about as much as this one


@dataclass(frozen=True, slots=True)
class Move:
    """A copy of elements from the memory of one holder to that of another.

    Both are walked in the same order, dimension by dimension, the last one fastest. Dimensions are as few as can be;
    what is dense in both memories is one dimension with strides of 1.
    """

    source: int
    target: int
    sizes: Point
    source_offset: int
    """In elements, as the strides are, in the source box's own row-major memory."""
    source_strides: Point
    target_offset: int
    target_strides: Point

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def stays(self) -> bool:
        """Whether it would copy a holder's elements onto themselves, if its memory for both boxes is the same."""
        return (
            self.source == self.target
            and self.source_offset == self.target_offset
            and self.source_strides == self.target_strides
        )


def moves_into(
    box: Box, old: Layout, *, target: int, prefers: Sequence[int] = (), least: int = _LEAST, salt: str = ""
) -> list[Move]:
    """Everything that ``box`` needs, each element once; ValueError where no holder of ``old`` has one.

    What ``target`` has in ``old`` it takes from itself; give -1 where the holders are files. Of holders of the same
    elements the first one in ``prefers`` gives them, and where none is there, all give equal parts; but ``least``
    elements or fewer come from one of them, for each target and each ``salt`` (the tensor's name) another.
    """
    low, high = box.hull
    needed: dict[Box, list[int]] = {}
    for holder, held in enumerate(old.boxes):
        start, end = held.hull
        if start < high and low < end:
            needed.setdefault(held, []).append(holder)
    giving = _Giving(old, needed, space_of(old.shape, (box, *needed)))
    found = giving.own(target, box)
    if sum(move.num_elements for move in found) < box.num_elements:
        giving.want(target, box)
        found += giving.given(least, turn_of(salt) + target, prefers)
    return _in_order(found)


def moves(old: Layout, new: Layout, *, least: int = _LEAST, salt: str = "", same_memory: bool = True) -> list[Move]:
    """From one layout to another, each needed element once; ValueError where no holder of ``old`` has one.

    Holders with the same number are the same, and take from themselves what they have. Where a holder's memory for its
    two boxes is the same, what stays in its place is left out, and what it moves within must be read before it is
    written to. With ``same_memory=False`` the memory for ``new`` is fresh, and all that it needs is among the moves.
    Replicas give equal parts of what is asked of them, by ``least`` and ``salt`` as in ``moves_into``.
    """
    found: list[Move] = []
    held = old.holders_of_boxes()
    giving = _Giving(old, held, space_of(old.shape, (*held, *new.holders_of_boxes())))
    for target, box in enumerate(new.boxes):
        if same_memory and target < len(old.boxes) and old.boxes[target] == box:
            continue
        own = giving.own(target, box)
        if sum(move.num_elements for move in own) < box.num_elements:
            giving.want(target, box)
        found += [move for move in own if not (same_memory and move.stays)]
    return _in_order([*found, *giving.given(least, turn_of(salt))])


@dataclass(frozen=True, slots=True)
class _Piece:
    """A block of what a target wants, all of whose elements the same holders have."""

    target: int
    into: Block
    start: Point
    end: Point
    parts: tuple[int, ...]
    """Which blocks of which boxes have it, by their places in ``_Giving``."""


class _Giving:
    """What the holders of a layout have, and what is asked of them."""

    def __init__(self, old: Layout, held: Mapping[Box, Sequence[int]], space: Point) -> None:
        self._old = old
        self._space = space
        self._places = {box: place for place, box in enumerate(held)}
        self._holders = list(held.values())
        self._parts = [(place, block) for box, place in self._places.items() for block in box.blocks_in(space)]
        self._wanted: dict[tuple[int, ...], list[_Piece]] = {}
        """By the boxes that have it."""

    @cached_property
    def _regions(self) -> Regions:
        return Regions(self._space, [(block.start, block.end) for _, block in self._parts])

    def own(self, target: int, box: Box) -> list[Move]:
        """What a target has itself of what it needs."""
        if not 0 <= target < len(self._old.boxes):
            return []
        mine = self._old.boxes[target]
        return [
            _move(target, target, start, end, source, into)
            for into in box.blocks_in(self._space)
            for source in mine.blocks_in(self._space)
            for start in (tuple(map(max, into.start, source.start)),)
            for end in (tuple(map(min, into.end, source.end)),)
            if all(map(int.__lt__, start, end))
        ]

    def want(self, target: int, box: Box) -> None:
        """Ask for what a target needs and does not have."""
        mine = self._places.get(self._old.boxes[target]) if 0 <= target < len(self._old.boxes) else None
        for into in box.blocks_in(self._space):
            for region in self._regions.within(into.start, into.end):
                if not region.holders:
                    missing = box_in(box.shape, region.start, region.end)
                    raise ValueError(f"no holder has {missing}, which are needed for {box}")
                places = tuple(self._parts[part][0] for part in region.holders)
                if mine is None or mine not in places:
                    piece = _Piece(target, into, region.start, region.end, region.holders)
                    self._wanted.setdefault(places, []).append(piece)

    def given(self, least: int, turn: int, prefers: Sequence[int] = ()) -> Iterator[Move]:
        """How that is answered."""
        for places, pieces in self._wanted.items():
            givers = [(holder, at) for at, place in enumerate(places) for holder in self._holders[place]]
            if prefers and len(givers) > 1:
                rank = {holder: place for place, holder in reversed(list(enumerate(prefers)))}
                best = min(givers, key=lambda giver: rank.get(giver[0], len(prefers)))
                givers = [best] if best[0] in rank else givers
            sizes = [num_in(piece.start, piece.end) for piece in pieces]
            for at, low, high, part in _dealt(sizes, len(givers), least):
                piece = pieces[at]
                giver, held_by = givers[(turn + part) % len(givers)]
                source = self._parts[piece.parts[held_by]][1]
                if high - low == sizes[at]:
                    yield _move(giver, piece.target, piece.start, piece.end, source, piece.into)
                    continue
                extent = tuple(map(int.__sub__, piece.end, piece.start))
                for first, last in cut_run(extent, low, high):
                    start, end = tuple(map(int.__add__, piece.start, first)), tuple(map(int.__add__, piece.start, last))
                    yield _move(giver, piece.target, start, end, source, piece.into)


def _dealt(sizes: Sequence[int], num_givers: int, least: int) -> Iterator[tuple[int, int, int, int]]:
    """Pieces laid end to end and dealt out in equal parts: (which piece, from where in it, to where, which part).

    A piece is cut between grains of ``least`` elements or a little fewer, so that nobody gives splinters.
    """
    if num_givers == 1:
        yield from ((at, 0, size, 0) for at, size in enumerate(sizes))
        return
    total = sum(sizes)
    grains = [num_worth(size, least, size) for size in sizes]
    num_parts = min(num_givers, sum(grains))
    before = 0
    for at, (size, num_grains) in enumerate(zip(sizes, grains, strict=True)):
        low, part = 0, before * num_parts // total
        while low < size:
            exact = total * (part + 1) // num_parts - before
            grain = min((2 * exact * num_grains + size) // (2 * size), num_grains)
            high = size * grain // num_grains if exact < size else size
            if low < high:
                yield at, low, high, part
                low = high
            part += 1
        before += size


def _move(source: int, target: int, start: Point, end: Point, held: Block, into: Block) -> Move:
    """The copy of a block, between two that it lies in."""
    if len(start) == 1 and held.strides == into.strides == (1,):
        sizes, offset, at = (end[0] - start[0],), held.offset + start[0] - held.start[0], start[0] - into.start[0]
        return Move(source, target, sizes, offset, (1,), into.offset + at, (1,))
    dimensions: list[tuple[int, int, int]] = []
    for low, high, held_stride, into_stride in zip(start, end, held.strides, into.strides, strict=True):
        size = high - low
        if dimensions and dimensions[-1][1:] == (held_stride * size, into_stride * size):
            dimensions[-1] = (dimensions[-1][0] * size, held_stride, into_stride)
        elif size > 1:
            dimensions.append((size, held_stride, into_stride))
    sizes, held_strides, into_strides = zip(*dimensions, strict=True) if dimensions else ((1,), (1,), (1,))
    return Move(source, target, sizes, held.offset_of(start), held_strides, into.offset_of(start), into_strides)


def _in_order(found: Iterable[Move]) -> list[Move]:
    return sorted(found, key=lambda move: (move.target, move.source, move.target_offset, move.source_offset))
