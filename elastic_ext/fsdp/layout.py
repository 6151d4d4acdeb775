"""Layouts: which holder has which part of a tensor, with the arithmetic of boxes, regions and placements behind them.
Pure: no tensors, no files, no processes.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import overload

__all__ = [
    "Block",
    "Box",
    "Boxes",
    "Cut",
    "Layout",
    "Point",
    "Region",
    "Regions",
    "TooManyRegions",
    "box_after",
    "box_in",
    "cut_run",
    "cut_slabs",
    "num_in",
    "num_worth",
    "row_major",
    "space_of",
    "turn_of",
]


# --- which of some blocks hold each element of a space; and how blocks are cut ---------------------------------------
# Pure, on numbers alone.

Point = tuple[int, ...]
"""Coordinates in a space or a tensor: one number per dimension."""


@dataclass(frozen=True, slots=True)
class Region:
    """A block of a space whose elements all have the same holders."""

    start: Point
    end: Point
    holders: tuple[int, ...]
    """Indices of the blocks given to Regions that hold this region, smallest first; empty where none does."""


class TooManyRegions(Exception):
    """Raised where blocks cut each other into more regions than was allowed."""


@dataclass(slots=True)
class _Slabs:
    """One dimension of a space, cut into slabs, each with its further dimensions, or its holders in the last one."""

    cuts: list[int]
    inner: list[_Slabs | tuple[int, ...]]


class Regions:
    """A space of one dimension or more, cut by blocks into regions; near-linear in their number where few overlap."""

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
        """The regions of which a block of the space is made, in row-major order of the places where it is cut."""
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
    """The strides of row-major memory: how far apart neighbours lie in each dimension."""
    return tuple(accumulate(sizes[:0:-1], int.__mul__, initial=1))[::-1] if sizes else ()


def cut_run(sizes: Point, low: int, high: int) -> Iterator[tuple[Point, Point]]:
    """The blocks, in order, that make up a run of elements in row-major order; at most 2N - 1 in N dimensions."""
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
    """A block cut into ``num_parts`` parts, as equal as cuts across a dimension make them; some may be empty."""
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


# --- which holder has which part of a tensor -------------------------------------------------------------------------
# Pure: no tensors, no files, no processes.
#
# Words: a *box* is a part of a tensor, either *flat*, a range of its elements in row-major order, or a *block*, a range
# in each of its dimensions. A *holder* is whatever has memory: a rank, or a file. *Replicas* are holders of equal
# boxes.

_MOST_CUTS, _MOST_CUTS_PER_BLOCK = 1 << 14, 1 << 8
"""How often the blocks of one tensor may cut each other, in all and per block: those that tile it seldom do."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a tensor, and where a box that it belongs to keeps it."""

    start: Point
    end: Point
    offset: int
    """The offset of the element at ``start`` in the box's own memory."""
    strides: Point
    """The strides in the box's own memory: how far apart neighbours lie, per dimension of the tensor."""

    @property
    def num_elements(self) -> int:
        return num_in(self.start, self.end)

    def offset_of(self, point: Point) -> int:
        """The offset of one of the block's elements in the box's own memory."""
        return self.offset + sum(
            (at - first) * stride for at, first, stride in zip(point, self.start, self.strides, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: the triplet (original shape, start, end).

    A box can be said that does not lie in its tensor, as metadata may; ``fault`` tells, and everything else takes for
    granted that there is none.
    """

    shape: Point
    """The shape of the whole tensor."""
    start: Point
    """The box's first index: one number into the flattened tensor, or one per dimension for a block."""
    end: Point
    """The box's end, exclusive, as ``start``."""

    @classmethod
    def flat(cls, shape: Sequence[int], start: int, end: int) -> Box:
        return cls(tuple(shape), (start,), (end,))

    @classmethod
    def block(cls, shape: Sequence[int], start: Sequence[int], end: Sequence[int]) -> Box:
        """The block between two corners, as a flat box if its elements are one run: equal parts are equal boxes."""
        box = cls(tuple(shape), tuple(start), tuple(end))
        if not len(box.shape) == len(box.start) == len(box.end) or any(map(int.__gt__, box.start, box.end)):
            return box
        sizes = tuple(map(int.__sub__, box.end, box.start))
        if 0 in sizes:
            return cls.empty(shape)
        if box.fault() is not None and sizes:
            return box
        cut = next((at for at, size in enumerate(sizes) if size != 1), len(sizes))
        if any(size != full for size, full in zip(sizes[cut + 1 :], box.shape[cut + 1 :], strict=True)):
            return box
        first = sum(map(int.__mul__, box.start, row_major(box.shape)))
        return cls.flat(shape, first, first + math.prod(sizes))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls.flat(shape, 0, math.prod(shape))

    @classmethod
    def empty(cls, shape: Sequence[int]) -> Box:
        return cls.flat(shape, 0, 0)

    @property
    def is_flat(self) -> bool:
        return len(self.start) == 1

    @property
    def num_elements(self) -> int:
        return self.end[0] - self.start[0] if len(self.start) == 1 else num_in(self.start, self.end)

    @property
    def is_empty(self) -> bool:
        return self.start == self.end or any(map(int.__eq__, self.start, self.end))

    @property
    def sizes(self) -> Point:
        """The sizes of the box's own memory, which is row-major: one number if the box is flat."""
        return tuple(map(int.__sub__, self.end, self.start))

    @property
    def hull(self) -> tuple[int, int]:
        """The smallest flat range in which the box lies: its start and its end."""
        if len(self.start) == 1:
            return self.start[0], self.end[0]
        if self.is_empty:
            return 0, 0
        strides = row_major(self.shape)
        last = sum((high - 1) * stride for high, stride in zip(self.end, strides, strict=True))
        return sum(map(int.__mul__, self.start, strides)), last + 1

    def __str__(self) -> str:
        ranges = ", ".join(f"{low}:{high}" for low, high in zip(self.start, self.end, strict=False))
        return f"elements {ranges} of {self.shape}" if self.is_flat else f"[{ranges}] of {self.shape}"

    def fault(self) -> str | None:
        """Why the box is not a part of its tensor; None if it is."""
        if min(self.shape, default=0) < 0:
            return f"a tensor cannot have the shape {self.shape}; sizes are 0 or more"
        limits = (math.prod(self.shape),) if len(self.start) == 1 else self.shape
        if not len(self.start) == len(self.end) == len(limits) or not self.start:
            return (
                f"start {self.start} and end {self.end} do not go with the shape {self.shape}; allowed: one number "
                "each, into the flattened tensor, or one for each dimension"
            )
        if all(0 <= low <= high <= limit for low, high, limit in zip(self.start, self.end, limits, strict=True)):
            return None
        return f"outside of the tensor: {self}; allowed: ranges within " + ", ".join(f"0:{limit}" for limit in limits)

    def blocks(self) -> tuple[Block, ...]:
        """The blocks of which the box is made, in order, and where each lies in the box's memory: at most 2N - 1."""
        if self.is_empty:
            return ()
        if not self.is_flat or len(self.shape) == 1:
            return (Block(self.start, self.end, 0, row_major(self.sizes)),)
        strides = row_major(self.shape)
        return tuple(
            Block(start, end, sum(map(int.__mul__, start, strides)) - self.start[0], strides)
            for start, end in cut_run(self.shape, self.start[0], self.end[0])
        )

    def blocks_in(self, space: Point) -> tuple[Block, ...]:
        """The blocks of which the box is made, in one of the spaces that ``space_of`` gives."""
        if len(space) == 1:
            return () if self.is_empty else (Block(self.start, self.end, 0, (1,)),)
        return self.blocks()

    def split(self, num_parts: int) -> tuple[Box, ...]:
        """Boxes that tile this one, in order, as equal as can be: to one element if it is flat. Some may be empty."""
        box = self if self.is_flat else Box.block(self.shape, self.start, self.end)
        if box.is_flat:
            low, size = box.start[0], box.num_elements
            cuts = [low + size * part // num_parts for part in range(num_parts + 1)]
            return tuple(Box(self.shape, (cuts[part],), (cuts[part + 1],)) for part in range(num_parts))
        return tuple(Box.block(self.shape, start, end) for start, end in cut_slabs(self.start, self.end, num_parts))


class Boxes(Sequence[Box]):
    """Boxes by holder, which take memory only for holders that have something."""

    __slots__ = ("_empty", "_num_holders", "held")

    def __init__(self, shape: Point, num_holders: int, held: Mapping[int, Box]) -> None:
        """With the boxes that are not empty, by holder, the first holder first."""
        self.held = held
        self._num_holders = num_holders
        self._empty = Box.empty(shape)

    def __len__(self) -> int:
        return self._num_holders

    @overload
    def __getitem__(self, index: int) -> Box: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Box, ...]: ...
    def __getitem__(self, index: int | slice) -> Box | tuple[Box, ...]:
        holders = range(self._num_holders)[index]
        return self._of(holders) if isinstance(holders, int) else tuple(map(self._of, holders))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Boxes):
            return (self._num_holders, self._empty, self.held) == (other._num_holders, other._empty, other.held)
        return isinstance(other, tuple) and len(self) == len(other) and all(map(Box.__eq__, self, other))

    def __hash__(self) -> int:
        return hash((self._num_holders, *self.held.items()))

    def _of(self, holder: int) -> Box:
        return self.held.get(holder, self._empty)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where one tensor lies: which part of it each holder has."""

    shape: Point
    boxes: tuple[Box, ...] | Boxes
    """The part of the tensor that each holder has, by holder."""

    def __hash__(self) -> int:
        return hash((self.shape, len(self.boxes), *self.held()))

    @property
    def is_flat(self) -> bool:
        return all(len(box.start) == 1 for _, box in self.held())

    def held(self) -> Iterator[tuple[int, Box]]:
        """The boxes that are not empty, each with its holder."""
        if isinstance(self.boxes, Boxes):
            return iter(self.boxes.held.items())
        return ((holder, box) for holder, box in enumerate(self.boxes) if not box.is_empty)

    def holders_of_boxes(self) -> dict[Box, list[int]]:
        """The holders of each box that is not empty; replicas together."""
        found: dict[Box, list[int]] = {}
        for holder, box in self.held():
            found.setdefault(box, []).append(holder)
        return found

    def covers(self) -> bool:
        """Whether every element is held, by one holder or several."""
        return self.fault(replicas=True) is None

    def fault(self, *, replicas: bool = False) -> str | None:
        """Why the boxes do not hold each element exactly once, or at least once with ``replicas``; None if they do."""
        if min(self.shape, default=0) < 0:
            return f"a tensor cannot have the shape {self.shape}; sizes are 0 or more"
        size = math.prod(self.shape)
        for holder, box in self.held() if isinstance(self.boxes, Boxes) else enumerate(self.boxes):
            if box.shape != self.shape:
                return f"holder {holder} has a part of a tensor of shape {box.shape}; this one has {self.shape}"
            if len(box.start) == len(box.end) == 1 and 0 <= box.start[0] <= box.end[0] <= size:
                continue  # as most are
            fault = box.fault()
            if fault is not None:
                return f"holder {holder}: {fault}"
        if self.is_flat and self._is_one_run(replicas):
            return None
        return self._uneven(replicas)

    def _is_one_run(self, replicas: bool) -> bool:
        reach = 0
        for low, high in sorted((box.start[0], box.end[0]) for _, box in self.held()):
            if low > reach or (low < reach and not replicas):
                return False
            reach = max(reach, high)
        return reach == math.prod(self.shape)

    def _uneven(self, replicas: bool) -> str | None:
        """Why a part of the tensor is held by nobody, or by more than one holder; None where neither is so."""
        found = self.holders_of_boxes()
        holders = list(found.values())
        space = space_of(self.shape, found)
        items = [(at, block) for at, box in enumerate(found) for block in box.blocks_in(space)]
        blocks = [(block.start, block.end) for _, block in items]
        most = _MOST_CUTS + _MOST_CUTS_PER_BLOCK * len(blocks) * len(space)
        try:
            regions = Regions(space, blocks, most=math.inf if replicas else most)
        except TooManyRegions:
            return f"{len(found)} different boxes overlap, many times over"
        for region in regions.everywhere():
            who = [holder for at in region.holders for holder in holders[items[at][0]]]
            where = region.start, region.end
            if not who:
                return f"no holder has {box_in(self.shape, *where)}"
            if len(who) > 1 and not replicas:
                others = f" and {len(who) - 2} more" if len(who) > 2 else ""
                return f"holders {who[0]} and {who[1]}{others} have {box_in(self.shape, *where)}; only one may"
        return None

    def shares(self, *, least: int, salt: str = "") -> Layout:
        """A layout in which each element is held once: replicas split their box between them.

        ``least`` elements or fewer are not split but left to one of the replicas. ``salt``, such as the tensor's name,
        says whose turn it is, so that over many tensors the work is spread evenly. Boxes that overlap otherwise are cut
        down; ValueError where that would leave a holder with what is no box.
        """
        shares = [Box.empty(self.shape)] * len(self.boxes)
        turn = turn_of(salt)
        found = self.holders_of_boxes()
        for box, holders in zip(_apart(self.shape, tuple(found)), found.values(), strict=True):
            if len(holders) == 1:
                shares[holders[0]] = box
                continue
            num_parts = num_worth(box.num_elements, least, len(holders))
            for part, share in enumerate(box.split(num_parts)):
                shares[holders[(turn + part) % len(holders)]] = share
        return Layout(self.shape, tuple(shares))


def num_worth(num_elements: int, least: int, num_holders: int) -> int:
    """Between how many holders ``num_elements`` are split, if ``least`` elements or fewer are not."""
    return max(1, min(num_holders, -(-num_elements // max(1, least))))


def turn_of(salt: str) -> int:
    """A number that follows from a name alone; those of many names are spread evenly."""
    return int.from_bytes(hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def space_of(shape: Point, boxes: Iterable[Box]) -> Point:
    """The sizes of the space in which boxes of a tensor are compared: the flattened tensor where all are flat."""
    return (math.prod(shape),) if all(len(box.start) == 1 for box in boxes) else shape


def box_in(shape: Point, start: Point, end: Point) -> Box:
    """The box of a block in a space that ``space_of`` gives."""
    return Box(shape, start, end) if len(start) == 1 else Box.block(shape, start, end)


def _apart(shape: Point, boxes: Sequence[Box]) -> list[Box]:
    """Boxes without the elements that earlier boxes have: those that begin earlier, or there and reach further.

    ValueError where that leaves what is no box, and another order does so too.
    """
    if all(len(box.start) == 1 for box in boxes):
        apart = list(boxes)
        reach = 0
        for low, minus_high, at in sorted((box.start[0], -box.end[0], at) for at, box in enumerate(boxes)):
            if low < reach:
                apart[at] = Box.flat(shape, min(reach, -minus_high), -minus_high)
            reach = max(reach, -minus_high)
        return apart
    items = [(at, block) for at, box in enumerate(boxes) for block in box.blocks()]
    regions = list(Regions(shape, [(block.start, block.end) for _, block in items]).everywhere())
    of_region = [[items[at][0] for at in region.holders] for region in regions]
    if all(len(places) < 2 for places in of_region):
        return list(boxes)
    hulls, sizes = [box.hull for box in boxes], [box.num_elements for box in boxes]
    orders = (
        lambda at: (hulls[at][0], -sizes[at]),
        lambda at: (-sizes[at], at),
        lambda at: (-hulls[at][1], -sizes[at]),
    )
    for order in orders:
        parts: list[list[tuple[Point, Point]]] = [[] for _ in boxes]
        for places, region in zip(of_region, regions, strict=True):
            if places:
                parts[min(places, key=order)].append((region.start, region.end))
        cut = [_joined(box, own) for box, own in zip(boxes, parts, strict=True)]
        if None not in cut:
            return [box for box in cut if box is not None]
    odd = boxes[cut.index(None)]
    raise ValueError(
        f"the part {odd} overlaps parts on other ranks, and what is left of it is neither a range nor a block; give "
        "ranks equal parts, or parts that do not overlap"
    )


def _joined(box: Box, parts: Sequence[tuple[Point, Point]]) -> Box | None:
    """Parts of a box as one box; None where they do not make one."""
    num_elements = sum(num_in(start, end) for start, end in parts)
    if num_elements == box.num_elements:
        return box
    if not parts:
        return Box.empty(box.shape)
    starts, ends = zip(*parts, strict=True)
    start, end = tuple(map(min, zip(*starts, strict=True))), tuple(map(max, zip(*ends, strict=True)))
    if num_in(start, end) == num_elements:
        return Box.block(box.shape, start, end)
    hulls = [Box(box.shape, *part).hull for part in parts]
    run = Box.flat(box.shape, min(low for low, _ in hulls), max(high for _, high in hulls))
    return run if run.num_elements == num_elements else None


# --- which part of a tensor is left to a rank when the dimensions of a mesh cut it one after another -----------------
# Words: a *cut* is what one dimension of a mesh does to one dimension of a tensor. A *run* is a range of the indices of
# a tensor's dimension; what a rank has of it is one run, or several where cuts are nested otherwise than the mesh is.

_Runs = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut of one dimension of a tensor, into as many parts as one dimension of the mesh has ranks."""

    dim: int
    num_parts: int
    part: int
    """The number of this rank's part."""
    num_outer: int = 1
    """How many parts the dimension was cut into before, each of which this cuts: torch's ``split_factor``.

    It is more than one where mesh dimensions that come later have cut first, as fully_shard of tensor parallelism does.
    """


def box_after(shape: Sequence[int], cuts: Sequence[Cut]) -> Box | None:
    """The part of a tensor that cuts leave, in the order of the mesh's dimensions; None if it is not one block."""
    runs: list[_Runs] = []
    for dim, size in enumerate(shape):
        kept = [(0, size)] if size else []
        for cut in _in_order([cut for cut in cuts if cut.dim == dim]):
            kept = _part_of(kept, cut)
        runs.append(kept)
    if any(len(of_dim) > 1 for of_dim in runs):
        return None
    if not all(runs):
        return Box.empty(shape)
    return Box.block(shape, [of_dim[0][0] for of_dim in runs], [of_dim[0][1] for of_dim in runs])


def _in_order(cuts: Sequence[Cut]) -> list[Cut]:
    """Cuts of one dimension in the order in which they were made: one after all the later ones is put after them.

    Where sizes do not divide evenly, ``split_factor`` by itself says otherwise; this is what fully_shard does.
    """
    if len(cuts) < 2:
        return list(cuts)
    first, later = cuts[0], _in_order(cuts[1:])
    if first.num_outer == math.prod(cut.num_parts for cut in later) > 1:
        return [*later, replace(first, num_outer=1)]
    return [first, *later]


def _part_of(runs: _Runs, cut: Cut) -> _Runs:
    kept: _Runs = []
    for outer in range(cut.num_outer):
        within = _chunk(runs, cut.num_outer, outer)
        for low, high in _chunk(within, cut.num_parts, cut.part):
            if kept and kept[-1][1] == low:
                low = kept.pop()[0]
            kept.append((low, high))
    return kept


def _chunk(runs: _Runs, num_chunks: int, chunk: int) -> _Runs:
    """One of the parts that ``torch.chunk`` makes of runs: all parts are full until nothing is left."""
    size = sum(high - low for low, high in runs)
    full = -(-size // num_chunks)
    first, last = full * chunk, min(full * (chunk + 1), size)
    kept: _Runs = []
    before = 0  # how many indices the runs so far have
    for low, high in runs:
        start, end = max(first - before, 0), min(last - before, high - low)
        if start < end:
            kept.append((low + start, low + end))
        before += high - low
    return kept
