"""A shard file read: which blocks are read in which order, and every byte checked before it counts."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import NamedTuple, NoReturn

import xxhash

from elastic_ext.errors import CheckpointDamaged
from elastic_ext.records.files import naming

from .copy import Dimension, copy_strided, dimensions_of, extent_of
from .json_text import ITEM_BYTES, unknown_format
from .shardfile import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    VERSION,
    Header,
    NewerHeader,
    ShardSummary,
    SumTable,
    TensorEntry,
    checksum_of,
    read_header,
)
from .writer import go_through

__all__ = [
    "WINDOW_BYTES",
    "BlockDamage",
    "Copy",
    "ReadRequest",
    "ShardReader",
    "Span",
    "WindowPart",
    "arranged",
    "by_window",
    "parts_of",
]


# --- what is read of a shard file, and in which order: requests for elements become reads of whole blocks ------------
# A file's data is gone through in windows of half a megabyte. Of each window only the blocks that hold something wanted
# are read. A block that lies wholly in one run of bytes that is wanted goes straight to where it is wanted; others go
# to a scratch buffer, as large as a window, from which what is wanted is copied. Pure arithmetic: nothing is read here.

WINDOW_BYTES = 1 << 19  # large enough for few system calls, small enough to be in the cache when it is checked
_OWN_READ_BLOCKS = 4  # a run of so many blocks is read to where it is wanted, however many such runs there are


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A request to read elements of one tensor of a shard file into ``target``; offsets and strides count elements.

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


class WindowPart(NamedTuple):
    """The bytes of one read window that a request wants: from ``start`` to ``end`` of the data, with or without gaps.

    No block lies wholly in a gap.
    """

    start: int
    end: int
    target: memoryview
    at: int  # where in the target, in bytes
    dimensions: tuple[Dimension, ...]
    run: int


class Span(NamedTuple):
    """A read of adjoining whole blocks, from byte ``start`` of the data on, into the memory of ``views``."""

    start: int
    views: list[memoryview]  # each begins and ends with a block


class Copy(NamedTuple):
    """A copy out of the scratch buffer, made once what was read into the buffer has been checked."""

    source: memoryview
    target: memoryview
    dimensions: tuple[Dimension, ...]
    run: int

    def do(self) -> None:
        copy_strided(self.source, self.target, self.dimensions, self.run)


def parts_of(request: ReadRequest, offset: int, *, block_bytes: int, window_bytes: int) -> Iterator[WindowPart]:
    """The parts of ``request`` in each read window, in the order of the file; its tensor begins ``offset`` bytes into
    the data."""
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

    def cut(level: int, source: int, target: int) -> Iterator[WindowPart]:
        """The parts of one step of the dimensions before ``level``."""
        inner = dimensions[level:]
        end = source + extents[level]
        if level >= depth and source // window_bytes == (end - 1) // window_bytes:
            yield WindowPart(source, end, request.target, target, inner, run)
        elif not inner:
            while source < end:
                stop = min((source // window_bytes + 1) * window_bytes, end)
                yield WindowPart(source, stop, request.target, target, (), stop - source)
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
                    yield WindowPart(first, stop, request.target, target + done * target_step, some, run)
                    done += steps
                else:
                    yield from cut(level + 1, first, target + done * target_step)
                    done += 1

    yield from cut(0, offset + request.source_offset * request.item_bytes, request.target_offset * request.item_bytes)


def by_window(parts: Iterable[Iterator[WindowPart]], window_bytes: int) -> Iterator[tuple[int, list[WindowPart]]]:
    """The read windows in which something is wanted: where each begins, and the parts in it, in the file's order."""
    in_order = heapq.merge(*parts, key=lambda part: part.start)
    for window, some in itertools.groupby(in_order, key=lambda part: part.start // window_bytes):
        yield window * window_bytes, list(some)


def arranged(
    parts: Sequence[WindowPart], scratch: memoryview, base: int, *, block_bytes: int, data_bytes: int
) -> tuple[list[Span], list[Copy]]:
    """How to fill the ``parts`` of the window that begins at ``base``: reads of each block once, and copies that follow
    them out of ``scratch``."""
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

    def copy(part: WindowPart, start: int, end: int) -> None:
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


# --- a shard file that is read ---------------------------------------------------------------------------------------
# A shard file read: it is opened only as what was saved, and nothing of it counts as read before its checksum is
# right.

_FIRST_READ_BYTES = 16384  # more than most headers; a larger one takes a second read
_ENTRY_BYTES = 500  # what is kept of a tensor, its name among it


@dataclass(frozen=True, slots=True)
class BlockDamage:
    """A run of adjoining blocks of a shard file that are not what was saved."""

    first: int
    last: int
    start: int
    """The first byte of the blocks in the file."""
    end: int
    """The byte after the blocks in the file."""
    tensors: tuple[str, ...]
    """The names of the tensors that have data in the blocks."""

    def __str__(self) -> str:
        which = f"block {self.first}" if self.first == self.last else f"what is in blocks {self.first} to {self.last}"
        names = ", ".join(map(repr, self.tensors[:5]))
        more = f" and {len(self.tensors) - 5} more" if len(self.tensors) > 5 else ""
        return f"{which}, bytes {self.start} to {self.end - 1}, is not what was saved; it holds {names}{more}"


class ShardReader:
    """Reads the tensors of a shard file, on one thread. What is not as saved is a CheckpointDamaged that names the
    file and where in it; OSError, which names the file too, is what the storage says. A CheckpointError that is neither
    tells of a newer format.

    ``bytes_read`` counts all that was read, ``bytes_needed`` what was asked for.
    """

    def __init__(self, path: Path, *, summary: ShardSummary, generation: str) -> None:
        self.path = path
        self.bytes_read = 0
        self.bytes_needed = 0
        self._num_bytes = summary.num_bytes
        self._scratch = memoryview(b"")
        with contextlib.ExitStack() as undo:
            try:
                self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not block
            except FileNotFoundError:
                raise CheckpointDamaged(f"{path} is missing; the checkpoint was saved with it") from None
            undo.callback(self.close)
            _read_ahead(self._file)
            header, encoded = self._read_header(generation)
            table_start = len(encoded) + header.data_bytes
            self._sums = SumTable(header.num_blocks, lambda at, num_bytes: self._read(table_start + at, num_bytes))
            if checksum_of(encoded, self._sums.pieces()) != summary.checksum:
                self._refuse("its header or its table of checksums is not what was saved")
            if header.version != VERSION:
                raise unknown_format(path, header.version, VERSION)
            undo.pop_all()
        self.generation = generation
        self.entries: Mapping[str, TensorEntry] = MappingProxyType(header.entries)
        self._header = header
        self._data_start = len(encoded)
        self._window_bytes = max(WINDOW_BYTES // header.block_bytes, 1) * header.block_bytes

    @property
    def memory_bytes(self) -> int:
        """About how many bytes of memory this reader takes while it is open."""
        return self._window_bytes + self._sums.memory_bytes + _ENTRY_BYTES * len(self.entries)

    def read_into(self, requests: Iterable[ReadRequest]) -> None:
        """Read what ``requests`` want into their targets; each block that they touch is read once, and checked.

        Bytes arrive in the targets before they are checked, so that after an error targets hold unchecked bytes.
        """
        block_bytes, window_bytes = self._header.block_bytes, self._window_bytes
        parts = []
        for request in requests:
            entry = self._entry_of(request)
            self.bytes_needed += request.num_bytes
            parts.append(parts_of(request, entry.offset, block_bytes=block_bytes, window_bytes=window_bytes))
        for base, wanted in by_window(parts, window_bytes):
            spans, copies = arranged(
                wanted, self._memory(), base, block_bytes=block_bytes, data_bytes=self._header.data_bytes
            )
            for span in spans:
                self._fill(span)
            for copy in copies:
                copy.do()

    def read(self, name: str) -> bytearray:
        """The bytes of one whole tensor, which should be small."""
        entry = self.entries.get(name) or self._refuse_name(name)
        data, item_bytes = bytearray(entry.num_bytes), ITEM_BYTES[entry.dtype]
        self.read_into(
            [ReadRequest(name, item_bytes, (entry.num_bytes // item_bytes,), 0, (1,), memoryview(data), 0, (1,))]
        )
        return data

    def verify(self) -> None:
        """Read and check all of the file; CheckpointDamaged where a block is not what was saved."""
        for damage in self.damage():
            self._refuse(str(damage))

    def damage(self, advance: Callable[[int], object] = lambda num_bytes: None) -> Iterator[BlockDamage]:
        """Read all of the file; gives each run of damaged blocks. ``advance`` is told of bytes read.

        Where the file cannot be read any further, that error is raised.
        """
        for first, last in _runs(self._damaged_blocks(advance)):
            yield self._told(first, last)

    def close(self) -> None:
        """Close the file; nothing can be read after that. Closing twice does nothing."""
        file, self._file = self._file, -1
        if file >= 0:
            with contextlib.suppress(OSError):  # it is closed all the same, and what was read of it is verified
                os.close(file)

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read_header(self, generation: str) -> tuple[Header, bytearray]:
        """The header, not checked against the checksum yet, and all bytes that come before the data."""
        with naming(self.path):
            status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode):
            self._refuse("it is not a regular file")
        if status.st_size != self._num_bytes:
            self._refuse(f"it has {status.st_size} bytes; {self._num_bytes} were saved")
        first = self._read(0, min(_FIRST_READ_BYTES, self._num_bytes))
        length = LENGTH_BYTES + int.from_bytes(first[:LENGTH_BYTES], "little")
        if length > min(self._num_bytes, LENGTH_BYTES + MAX_HEADER_BYTES):
            self._refuse(f"a header of {length} bytes cannot be in a file of {self._num_bytes}")
        encoded = bytearray(length)  # in one piece, as it may be large
        encoded[: len(first)] = first[:length]
        if length > len(first):
            self._read_to(len(first), [memoryview(encoded)[len(first) :]])
        try:
            header = read_header(memoryview(encoded)[LENGTH_BYTES:], self._num_bytes - length)
        except NewerHeader as error:
            raise unknown_format(self.path, error.version, VERSION) from None
        except ValueError as error:
            self._refuse(str(error))
        if header.generation != generation:
            self._refuse(f"it was written by another save, {header.generation!r}; this checkpoint is of {generation!r}")
        return header, encoded

    def _entry_of(self, request: ReadRequest) -> TensorEntry:
        entry = self.entries.get(request.entry_name) or self._refuse_name(request.entry_name)
        end = request.source_offset * request.item_bytes + request.source_bytes
        if ITEM_BYTES[entry.dtype] != request.item_bytes or end > entry.num_bytes:
            self._refuse(
                f"its tensor {request.entry_name!r} is of {entry.num_bytes} bytes, {ITEM_BYTES[entry.dtype]} each; "
                f"the checkpoint's metadata says that it reaches to byte {end}, {request.item_bytes} each"
            )
        return entry

    def _memory(self) -> memoryview:
        """The scratch buffer, made when it is first needed and kept."""
        if not self._scratch:
            self._scratch = memoryview(bytearray(min(self._window_bytes, self._header.data_bytes)))
        return self._scratch

    def _fill(self, span: Span) -> None:
        """Read a span's whole blocks into its memory and check them; CheckpointDamaged names the first bad one."""
        self._read_to(self._data_start + span.start, span.views)
        digest, sums, block_bytes = xxhash.xxh3_64_intdigest, self._sums, self._header.block_bytes
        block = span.start // block_bytes
        for view in span.views:
            for at in range(0, len(view), block_bytes):
                if digest(view[at : at + block_bytes]) != sums[block]:
                    self._refuse(str(self._told(block, block)))
                block += 1

    def _read(self, start: int, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        self._read_to(start, [memoryview(data)] if num_bytes else [])
        return bytes(data)

    def _read_to(self, start: int, views: Sequence[memoryview]) -> None:
        """Fill ``views`` with the file's bytes from ``start`` on, however few the system gives at a time."""

        def read(left: Sequence[memoryview], done: int) -> int:
            with naming(self.path):
                num_bytes = os.preadv(self._file, left, start + done)
            if not num_bytes:
                self._refuse(
                    f"it ends at byte {start + done}; {self._num_bytes} were saved, and were there when it was opened"
                )
            self.bytes_read += num_bytes
            return num_bytes

        go_through(views, read)

    def _refuse_name(self, name: str) -> NoReturn:
        self._refuse(f"it has no tensor {name!r}; the checkpoint's metadata says that it has")

    def _told(self, first: int, last: int) -> BlockDamage:
        """The damage of the blocks from ``first`` to ``last``: where they lie, and which tensors they hold."""
        start = first * self._header.block_bytes
        end = min((last + 1) * self._header.block_bytes, self._header.data_bytes)
        tensors = tuple(
            name
            for name, entry in self.entries.items()
            if entry.offset < end and entry.offset + entry.num_bytes > start
        )
        return BlockDamage(first, last, self._data_start + start, self._data_start + end, tensors)

    def _damaged_blocks(self, advance: Callable[[int], object]) -> Iterator[int]:
        digest, sums, block_bytes = xxhash.xxh3_64_intdigest, self._sums, self._header.block_bytes
        for start in range(0, self._header.data_bytes, self._window_bytes):
            window = self._memory()[: self._header.data_bytes - start]
            self._read_to(self._data_start + start, [window])
            block = start // block_bytes
            for at in range(0, len(window), block_bytes):
                if digest(window[at : at + block_bytes]) != sums[block]:
                    yield block
                block += 1
            advance(len(window))

    def _refuse(self, what: str) -> NoReturn:
        raise CheckpointDamaged(f"{self.path} is damaged: {what}")


def _runs(numbers: Iterator[int]) -> Iterator[tuple[int, int]]:
    """The first and last of each run of consecutive numbers; an error of ``numbers`` comes after the last run."""
    run: tuple[int, int] | None = None
    try:
        for number in numbers:
            if run is not None and number != run[1] + 1:
                yield run
                run = None
            run = (number if run is None else run[0], number)
    except (OSError, CheckpointDamaged):
        if run is not None:
            yield run
        raise
    if run is not None:
        yield run


def _read_ahead(file: int) -> None:
    """Have the system read a file further ahead than by itself: uncached data comes half as fast again."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # not everything can be advised
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
