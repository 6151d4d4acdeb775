"""Regions: which of some blocks hold each element of a space; and how blocks are cut. Pure, on numbers alone."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

__all__ = ["Point", "Region", "Regions", "TooManyRegions", "cut_run", "cut_slabs", "num_in", "row_major"]

Point = tuple[int, ...]
"""One number per dimension."""


@dataclass(frozen=True, slots=True)
class Region:
    """A block of a space, all of whose elements the same ones hold."""

    start: Point
    end: Point
    holders: tuple[int, ...]
    """By their places in what Regions was given, smallest first; nobody where empty."""


class TooManyRegions(Exception):
    """Blocks cut each other into more regions than was allowed."""


@dataclass(slots=True)
class _Slabs:
    """One dimension of a space, cut; and each slab's further dimensions, or its holders where it has none."""

    cuts: list[int]
    inner: list[_Slabs | tuple[int, ...]]


class Regions:
    """A space of one dimension or more, as the blocks in it cut it; near-linear in their number where few overlap."""

    def __init__(self, sizes: Point, blocks: Sequence[tuple[Point, Point]], *, most: float = math.inf) -> None:
        """TooManyRegions where it would have to be cut more than ``most`` times: blocks that overlap in several
        dimensions may have any number of regions."""
        self._most = most
        self._sizes = sizes
        self._blocks = blocks
        self._root = self._cut(0, [at for at, (start, end) in enumerate(blocks) if all(map(int.__lt__, start, end))])

    def _cut(self, dimension: int, held: Sequence[int]) -> _Slabs:
        is_last = dimension == len(self._sizes) - 1
        begin: dict[int, list[int]] = {}
        cease: dict[int, list[int]] = {}
        for at in held:
            start, end = self._blocks[at]
            begin.setdefault(start[dimension], []).append(at)
            cease.setdefault(end[dimension], []).append(at)
        slabs = _Slabs([0], [])
        active: dict[int, None] = {}
        for low, high in pairwise(sorted({0, self._sizes[dimension], *begin, *cease})):
            for at in cease.get(low, ()):
                del active[at]
            active.update(dict.fromkeys(begin.get(low, ())))
            self._most -= 1 + len(active)
            if self._most < 0:
                raise TooManyRegions
            holders = tuple(sorted(active)) if len(active) > 1 else tuple(active)
            inner = holders if is_last else self._cut(dimension + 1, holders)
            if slabs.inner and slabs.inner[-1] == inner:
                slabs.cuts[-1] = high
            else:
                slabs.cuts.append(high)
                slabs.inner.append(inner)
        return slabs

    def within(self, start: Point, end: Point) -> Iterator[Region]:
        """What a block of the space is made of, in row-major order of the places where it is cut."""
        return _regions(self._root, (), (), start, end)

    def everywhere(self) -> Iterator[Region]:
        return self.within((0,) * len(self._sizes), self._sizes)


def _regions(slabs: _Slabs, head: Point, tail: Point, start: Point, end: Point) -> Iterator[Region]:
    low, high = start[len(head)], end[len(head)]
    at = bisect_right(slabs.cuts, low) - 1
    while low < high:
        upto, inner = min(slabs.cuts[at + 1], high), slabs.inner[at]
        if isinstance(inner, tuple):
            yield Region((*head, low), (*tail, upto), inner)
        else:
            yield from _regions(inner, (*head, low), (*tail, upto), start, end)
        low, at = upto, at + 1


def num_in(start: Point, end: Point) -> int:
    """How many elements a block has."""
    return math.prod(map(int.__sub__, end, start))


def row_major(sizes: Point) -> Point:
    """How far apart neighbours lie in each dimension, in memory whose last dimension is dense."""
    return tuple(accumulate(sizes[:0:-1], int.__mul__, initial=1))[::-1] if sizes else ()


def cut_run(sizes: Point, low: int, high: int) -> Iterator[tuple[Point, Point]]:
    """The blocks, in order, of a run of elements in row-major order; at most 2N - 1 of them in N dimensions."""
    if low >= high:
        return
    if len(sizes) <= 1:
        yield (low,) * len(sizes), (high,) * len(sizes)
        return
    inner = math.prod(sizes[1:])
    first, rest = divmod(low, inner)
    last, tail = divmod(high, inner)
    if rest:
        upto = inner if first < last else tail
        for start, end in cut_run(sizes[1:], rest, upto):
            yield (first, *start), (first + 1, *end)
        first += 1
    if first < last:
        yield (first,) + (0,) * (len(sizes) - 1), (last, *sizes[1:])
    if tail and first <= last:
        for start, end in cut_run(sizes[1:], 0, tail):
            yield (last, *start), (last + 1, *end)


def cut_slabs(start: Point, end: Point, num_parts: int) -> Iterator[tuple[Point, Point]]:
    """A block in so many parts, as equal as cuts across a dimension make them; some are empty where it is small."""
    sizes = tuple(map(int.__sub__, end, start))
    whole = math.prod(sizes)
    if num_parts == 1 or whole <= 1:
        yield start, end
        yield from [(start, start)] * (num_parts - 1)
        return

    def largest(size: int) -> int:
        """About how large a part is at most, if that dimension is cut."""
        slab = whole // size
        return slab * -(-size // num_parts) if size >= num_parts else -(-slab // (num_parts // size))

    # Outer cuts leave longer runs: one that comes near the best is taken.
    limit = min(largest(size) for size in sizes if size > 1) * 17 // 16
    across = next(at for at, size in enumerate(sizes) if size > 1 and largest(size) <= limit)
    size, low = sizes[across], start[across]
    num_slabs = min(size, num_parts)
    for slab in range(num_slabs):
        slab_start = (*start[:across], low + size * slab // num_slabs, *start[across + 1 :])
        slab_end = (*end[:across], low + size * (slab + 1) // num_slabs, *end[across + 1 :])
        yield from cut_slabs(slab_start, slab_end, num_parts * (slab + 1) // num_slabs - num_parts * slab // num_slabs)
