"""What is read of a shard file, and in which order: requests for elements become reads of whole blocks.

A file's data is gone through in windows of half a megabyte. Of each window only the blocks that hold something wanted
are read. A block that lies wholly in one run of bytes that is wanted goes straight to where it is wanted; others go
to a scratch buffer, as large as a window, from which what is wanted is copied. Pure arithmetic: nothing is read here.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .strided import Dimension, copy_strided, dimensions_of, extent_of

__all__ = ["WINDOW_BYTES", "Copy", "Part", "Request", "Span", "arranged", "by_window", "parts_of"]

WINDOW_BYTES = 1 << 19  # large enough for few system calls, small enough to be in the cache when it is checked
_OWN_READ_BLOCKS = 4  # a run of so many blocks is read to where it is wanted, however many such runs there are


@dataclass(frozen=True, slots=True)
class Request:
    """Elements of one tensor of the file, wanted at some places in ``target``; offsets and strides count elements.

    ``target`` is writable memory, as bytes. In the file the elements lie as in a row-major tensor, in any order of
    its dimensions: no two steps lead to the same element.
    """

    entry_name: str
    item_bytes: int
    sizes: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]
    target: memoryview
    target_offset: int
    target_strides: tuple[int, ...]

    num_bytes: int = field(init=False, repr=False)
    dimensions: tuple[Dimension, ...] = field(init=False, repr=False)  # with `run`: what is wanted, in bytes
    run: int = field(init=False, repr=False)
    source_bytes: int = field(init=False, repr=False)  # in the file, from the first byte to the last

    def __post_init__(self) -> None:
        if not len(self.sizes) == len(self.source_strides) == len(self.target_strides):
            raise ValueError(
                f"sizes {self.sizes}, source strides {self.source_strides} and target strides {self.target_strides} "
                f"of {self.entry_name!r} must be equally many"
            )
        if min((self.source_offset, self.target_offset, *self.sizes, *self.source_strides, *self.target_strides)) < 0:
            raise ValueError(f"sizes, offsets and strides of {self.entry_name!r} must not be negative: {self}")
        num_bytes = math.prod(self.sizes) * self.item_bytes
        dimensions, run = dimensions_of(self.sizes, self.source_strides, self.target_strides, self.item_bytes)
        source_bytes, target_bytes = extent_of(dimensions, run) if num_bytes else (0, 0)
        if num_bytes and (self.target.readonly or self.target.format != "B" or self.target.ndim != 1):
            raise ValueError(f"the target of {self.entry_name!r} must be writable memory, as bytes without gaps")
        if self.target_offset * self.item_bytes + target_bytes > len(self.target):
            raise ValueError(f"the target of {self.entry_name!r} has {len(self.target)} bytes, too few for {self}")
        inner = run
        for size, source, _ in reversed(dimensions if num_bytes else ()):
            if source < inner:
                raise ValueError(f"two steps of {self} lead to the same element of the file")
            inner += (size - 1) * source
        for name, value in zip(
            ("num_bytes", "dimensions", "run", "source_bytes"), (num_bytes, dimensions, run, source_bytes), strict=True
        ):
            object.__setattr__(self, name, value)


class Part(NamedTuple):
    """What a request wants of one window: from byte ``start`` to byte ``end`` of the data, with or without gaps.

    No block lies wholly in a gap.
    """

    start: int
    end: int
    target: memoryview
    at: int  # where in the target, in bytes
    dimensions: tuple[Dimension, ...]
    run: int


class Span(NamedTuple):
    """Whole blocks that follow one another, from byte ``start`` of the data on, and the memory that takes them."""

    start: int
    views: list[memoryview]  # each begins and ends with a block


class Copy(NamedTuple):
    """What is copied out of the scratch buffer once it has been checked."""

    source: memoryview
    target: memoryview
    dimensions: tuple[Dimension, ...]
    run: int

    def do(self) -> None:
        copy_strided(self.source, self.target, self.dimensions, self.run)


def parts_of(request: Request, offset: int, *, block_bytes: int, window_bytes: int) -> Iterator[Part]:
    """What ``request`` wants of each window, in the order of the file; its tensor begins ``offset`` bytes into the
    data."""
    if not request.num_bytes:
        return
    dimensions, run = request.dimensions, request.run
    extents = [run]  # of the runs, then of what is inside of each dimension, from the innermost on
    for dimension in reversed(dimensions):
        extents.append(extents[-1] + (dimension.size - 1) * dimension.source)
    extents.reverse()
    # From which dimension on no gap holds a block, and all may be read together.
    depth = len(dimensions)
    if run < _OWN_READ_BLOCKS * block_bytes:
        while depth and dimensions[depth - 1].source - extents[depth] < block_bytes:
            depth -= 1

    def cut(level: int, source: int, target: int) -> Iterator[Part]:
        """The parts of one step of the dimensions before ``level``."""
        inner = dimensions[level:]
        end = source + extents[level]
        if level >= depth and source // window_bytes == (end - 1) // window_bytes:
            yield Part(source, end, request.target, target, inner, run)
        elif not inner:
            while source < end:
                stop = min((source // window_bytes + 1) * window_bytes, end)
                yield Part(source, stop, request.target, target, (), stop - source)
                target += stop - source
                source = stop
        else:
            size, source_step, target_step = inner[0]
            done = 0
            while done < size:
                first = source + done * source_step
                room = (first // window_bytes + 1) * window_bytes - first - extents[level + 1]
                if level >= depth and room >= 0:
                    steps = min(size - done, room // source_step + 1)
                    stop = first + (steps - 1) * source_step + extents[level + 1]
                    some = (inner[0]._replace(size=steps), *inner[1:])
                    yield Part(first, stop, request.target, target + done * target_step, some, run)
                    done += steps
                else:
                    yield from cut(level + 1, first, target + done * target_step)
                    done += 1

    yield from cut(0, offset + request.source_offset * request.item_bytes, request.target_offset * request.item_bytes)


def by_window(parts: Iterable[Iterator[Part]], window_bytes: int) -> Iterator[tuple[int, list[Part]]]:
    """Where each window begins of which something is wanted, and what that is, in the order of the file."""
    in_order = heapq.merge(*parts, key=lambda part: part.start)
    for window, some in itertools.groupby(in_order, key=lambda part: part.start // window_bytes):
        yield window * window_bytes, list(some)


def arranged(
    parts: Sequence[Part], scratch: memoryview, base: int, *, block_bytes: int, data_bytes: int
) -> tuple[list[Span], list[Copy]]:
    """The reads that bring the ``parts`` of the window that begins at ``base``, each block once, and the copies that
    follow them."""
    spans: list[Span] = []
    copies: list[Copy] = []
    spans_end = -1

    def read(start: int, end: int, memory: memoryview) -> None:
        nonlocal spans_end
        if start < end:
            if start != spans_end:
                spans.append(Span(start, []))
            spans[-1].views.append(memory)
            spans_end = end

    def read_to_scratch(start: int, end: int) -> None:
        read(start, end, scratch[start - base : end - base])

    def copy(part: Part, start: int, end: int) -> None:
        if start < end:
            at = part.at + start - part.start
            copies.append(Copy(scratch[start - base : end - base], part.target[at : at + end - start], (), end - start))

    reached = base  # everything before it that is wanted is being read
    nexts = [part.start // block_bytes * block_bytes for part in parts[1:]]
    for part, next_first in zip(parts, [*nexts, data_bytes], strict=True):
        first = part.start // block_bytes * block_bytes
        last = min(-(-part.end // block_bytes) * block_bytes, data_bytes)
        reached = max(reached, first)
        if part.dimensions:
            copies.append(Copy(scratch[part.start - base : part.end - base], part.target[part.at :], *part[4:]))
        else:  # the blocks that are wholly its own need no copy
            start = max(-(-part.start // block_bytes) * block_bytes, reached)
            end = part.end if part.end == data_bytes else part.end // block_bytes * block_bytes
            end = min(end, next_first)
            if start < end:
                read_to_scratch(reached, start)
                read(start, end, part.target[part.at + start - part.start : part.at + end - part.start])
                reached = end
                copy(part, part.start, start)
                copy(part, end, part.end)
            else:
                copy(part, part.start, part.end)
        if reached < last:
            read_to_scratch(reached, last)
            reached = last
    return spans, copies
