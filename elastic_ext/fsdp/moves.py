"""Moves: the copies between holders by which a tensor comes to lie by another layout. Pure; others do the copying."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .layout import Block, Box, Layout, Point, Region, Regions, box_in, cut_run, num_in, num_worth, space_of, turn_of

__all__ = ["Move", "moves", "moves_into"]

_LEAST = 1 << 14  # elements; fewer are not worth another message


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
    """The first element's place in the source box's own row-major memory, in elements, as the strides are."""
    source_strides: Point
    target_offset: int
    target_strides: Point

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def stays(self) -> bool:
        """Whether the move changes nothing, if the holder has one memory for both boxes."""
        return (
            self.source == self.target
            and self.source_offset == self.target_offset
            and self.source_strides == self.target_strides
        )


def moves_into(
    box: Box, old: Layout, *, target: int, prefers: Sequence[int] = (), least: int = _LEAST, salt: str = ""
) -> list[Move]:
    """The moves that fill ``box``, each element once; ValueError where no holder of ``old`` has an element.

    What ``target`` has in ``old`` it takes from itself; give -1 where the holders are files. Of holders of the same
    elements the first one in ``prefers`` gives them, and where none is there, all give equal parts; but ``least``
    elements or fewer come from one of them, for each target and each ``salt`` (the tensor's name) another.
    """
    low, high = box.hull
    if target < 0 and box.is_flat and old.is_flat:
        found = _of_ranges(low, high, old, target)
        if found is not None:
            return found
    needed: dict[Box, list[int]] = {}
    for holder, held in old.held():
        start, end = held.hull
        if start < high and low < end:
            needed.setdefault(held, []).append(holder)
    giving = _Giving(old, needed, (box, *needed))
    found = giving.ask(target, box)
    return _in_order([*found, *giving.given(least, turn_of(salt) + target, prefers)])


def _of_ranges(low: int, high: int, old: Layout, target: int) -> list[Move] | None:
    """The moves that fill a range of a tensor from ranges, where each element is in one of them; else None."""
    found = []
    for holder, held in old.held():
        start, end = max(low, held.start[0]), min(high, held.end[0])
        if start < end:
            found.append(Move(holder, target, (end - start,), start - held.start[0], (1,), start - low, (1,)))
    found.sort(key=lambda move: move.target_offset)
    reach = 0
    for move in found:
        if move.target_offset != reach:
            return None
        reach += move.sizes[0]
    return found if reach == high - low else None


def moves(
    old: Layout, new: Layout, *, least: int = _LEAST, salt: str | int = "", same_memory: bool = True
) -> list[Move]:
    """The moves from one layout to another, each needed element once; ValueError where no holder of ``old`` has one.

    Holders with the same number are the same, and take from themselves what they have. Where a holder's memory for its
    two boxes is the same, what stays in its place is left out, and what it moves within must be read before it is
    written to. With ``same_memory=False`` the memory for ``new`` is fresh, and all that it needs is among the moves.
    Replicas give equal parts of what is asked of them, by ``least`` and ``salt`` as in ``moves_into``; a salt that is
    a number says whose turn it is.
    """
    found: list[Move] = []
    held = old.holders_of_boxes()
    giving = _Giving(old, held, (*held, *new.boxes))
    for target, box in enumerate(new.boxes):
        if same_memory and target < len(old.boxes) and old.boxes[target] == box:
            continue
        own = giving.ask(target, box)
        found += [move for move in own if not move.stays] if same_memory else own
    turn = salt if isinstance(salt, int) else turn_of(salt)
    return _in_order([*found, *giving.given(least, turn)])


@dataclass(frozen=True, slots=True)
class _HeldBlock:
    """A block of elements that a target needs and that the same ranks hold."""

    target: int
    into: Block
    """The block of the target's box in which these elements lie."""
    region: Region

    def move(self, source: int, held: Block) -> Move:
        return _move(source, self.target, self.region.start, self.region.end, held, self.into)


class _Giving:
    """What the holders of a layout have, and which elements targets need of them."""

    def __init__(self, old: Layout, held: Mapping[Box, Sequence[int]], boxes: Sequence[Box]) -> None:
        """With the holders of each box that matters, and those boxes together with the ones that will be asked for."""
        odd = next((box for box in boxes if box.shape != old.shape), None)
        if odd is not None:
            raise ValueError(f"{odd} cannot come from a tensor of shape {old.shape}; give parts of one tensor")
        self._boxes = old.boxes
        self._space = space_of(old.shape, boxes)
        self._places = {box: place for place, box in enumerate(held)}
        self._holders = list(held.values())
        self._parts = [(place, block) for box, place in self._places.items() for block in box.blocks_in(self._space)]
        self._wanted: dict[tuple[int, ...], list[_HeldBlock]] = {}
        """Blocks that targets need of others, by the boxes that have them."""

    @cached_property
    def _regions(self) -> Regions:
        return Regions(self._space, [(block.start, block.end) for _, block in self._parts])

    def ask(self, target: int, box: Box) -> list[Move]:
        """The moves of what a target has itself of ``box``; the rest is asked of the others, for ``given``."""
        into = box.blocks_in(self._space)
        mine = self._places.get(self._boxes[target]) if 0 <= target < len(self._boxes) else None
        own = [] if mine is None else _common(target, self._boxes[target].blocks_in(self._space), into)
        if sum(move.num_elements for move in own) < box.num_elements:
            self._want(target, box, into, mine)
        return own

    def _want(self, target: int, box: Box, blocks: Sequence[Block], mine: int | None) -> None:
        for into in blocks:
            for region in self._regions.within(into.start, into.end):
                places = tuple(self._parts[part][0] for part in region.holders)
                if not places:
                    missing = box_in(box.shape, region.start, region.end)
                    raise ValueError(f"no holder has {missing}, which are needed for {box}")
                if mine not in places:
                    self._wanted.setdefault(places, []).append(_HeldBlock(target, into, region))

    def given(self, least: int, turn: int, prefers: Sequence[int] = ()) -> Iterator[Move]:
        """The moves of what was asked of other holders."""
        for places, pieces in self._wanted.items():
            if len(places) == 1 and len(self._holders[places[0]]) == 1:  # as most are
                for piece in pieces:
                    yield piece.move(self._holders[places[0]][0], self._parts[piece.region.holders[0]][1])
            else:
                givers = [(holder, at) for at, place in enumerate(places) for holder in self._holders[place]]
                yield from self._dealt(pieces, _preferred(givers, prefers), least, turn)

    def _dealt(
        self, pieces: Sequence[_HeldBlock], givers: Sequence[tuple[int, int]], least: int, turn: int
    ) -> Iterator[Move]:
        """The moves of pieces that several holders can give; each giver has the place of its box among those boxes."""
        sizes = [num_in(piece.region.start, piece.region.end) for piece in pieces]
        for at, low, high, part in _parts(sizes, len(givers), least):
            piece = pieces[at]
            giver, place = givers[(turn + part) % len(givers)]
            held = self._parts[piece.region.holders[place]][1]
            if high - low == sizes[at]:
                yield piece.move(giver, held)
                continue
            start, end = piece.region.start, piece.region.end
            for first, last in cut_run(tuple(map(int.__sub__, end, start)), low, high):
                corners = tuple(map(int.__add__, start, first)), tuple(map(int.__add__, start, last))
                yield _move(giver, piece.target, *corners, held, piece.into)


def _common(holder: int, held: Sequence[Block], into: Sequence[Block]) -> list[Move]:
    """The moves of elements that lie both in a holder's old and in its new blocks."""
    found = []
    for new in into:
        for old in held:
            start, end = tuple(map(max, new.start, old.start)), tuple(map(min, new.end, old.end))
            if all(map(int.__lt__, start, end)):
                found.append(_move(holder, holder, start, end, old, new))
    return found


def _preferred(givers: Sequence[tuple[int, int]], prefers: Sequence[int]) -> Sequence[tuple[int, int]]:
    """The holders that shall give: the one that ``prefers`` names first, or all of them."""
    for holder in prefers:
        named = [giver for giver in givers if giver[0] == holder]
        if named:
            return named
    return givers


def _parts(sizes: Sequence[int], num_givers: int, least: int) -> Iterator[tuple[int, int, int, int]]:
    """Pieces laid end to end and dealt out in equal parts: (which piece, from where in it, to where, which part).

    A piece is cut between grains of ``least`` elements or a little fewer, so that nobody gives splinters.
    """
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
    """The move of a block's elements between two blocks in which it lies."""
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
    """Moves sorted by target and source; neighbours that are a run in both memories are one move."""
    moved: list[Move] = []
    for move in sorted(found, key=lambda move: (move.target, move.source, move.target_offset)):
        if moved and _continues(moved[-1], move):
            sizes = (moved[-1].sizes[0] + move.sizes[0],)
            moved[-1] = replace(moved[-1], sizes=sizes)
        else:
            moved.append(move)
    return moved


def _continues(move: Move, following: Move) -> bool:
    return (
        move.target == following.target
        and move.source == following.source
        and move.source_strides == move.target_strides == following.source_strides == following.target_strides == (1,)
        and move.source_offset + move.sizes[0] == following.source_offset
        and move.target_offset + move.sizes[0] == following.target_offset
    )
