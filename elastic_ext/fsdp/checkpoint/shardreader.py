"""A shard file read: it is opened only as what was saved, and nothing of it counts as read before its checksum is
right."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import NoReturn

import xxhash

from elastic_ext.errors import CheckpointDamaged
from elastic_ext.records.files import naming

from .blocksums import SumTable
from .dtypes import ITEM_BYTES
from .formats import unknown_format
from .shardfile import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    VERSION,
    Entry,
    Header,
    NewerHeader,
    ShardSummary,
    checksum_of,
    read_header,
)
from .views import go_through
from .windows import WINDOW_BYTES, Request, Span, arranged, by_window, parts_of

__all__ = ["BlockDamage", "Request", "ShardReader"]

_FIRST_READ_BYTES = 16384  # more than most headers; a larger one takes a second read
_ENTRY_BYTES = 500  # what is kept of a tensor, its name among it


@dataclass(frozen=True, slots=True)
class BlockDamage:
    """Blocks of a file, one after another, that are not what was saved."""

    first: int
    last: int
    start: int
    """Of their bytes in the file."""
    end: int
    tensors: tuple[str, ...]
    """Whose data they hold."""

    def __str__(self) -> str:
        which = f"block {self.first}" if self.first == self.last else f"what is in blocks {self.first} to {self.last}"
        names = ", ".join(map(repr, self.tensors[:5]))
        more = f" and {len(self.tensors) - 5} more" if len(self.tensors) > 5 else ""
        return f"{which}, bytes {self.start} to {self.end - 1}, is not what was saved; it holds {names}{more}"


class ShardReader:
    """The tensors of a shard file, for one thread. What is not as it was saved is a CheckpointDamaged that names the
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
        self.entries: Mapping[str, Entry] = MappingProxyType(header.entries)
        self._header = header
        self._data_start = len(encoded)
        self._window_bytes = max(WINDOW_BYTES // header.block_bytes, 1) * header.block_bytes

    @property
    def memory_bytes(self) -> int:
        """What this takes of memory while it is open, or nearly."""
        return self._window_bytes + self._sums.memory_bytes + _ENTRY_BYTES * len(self.entries)

    def read_into(self, requests: Iterable[Request]) -> None:
        """Put what ``requests`` want where they want it; each block that they touch is read once.

        Their targets hold something in between, and after an error too: bytes arrive before they are checked.
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
        """All of one tensor, which is to be small."""
        entry = self.entries.get(name) or self._refuse_name(name)
        data, item_bytes = bytearray(entry.num_bytes), ITEM_BYTES[entry.dtype]
        self.read_into(
            [Request(name, item_bytes, (entry.num_bytes // item_bytes,), 0, (1,), memoryview(data), 0, (1,))]
        )
        return data

    def verify(self) -> None:
        """Read all of the file and check it."""
        for damage in self.damage():
            self._refuse(str(damage))

    def damage(self, advance: Callable[[int], object] = lambda num_bytes: None) -> Iterator[BlockDamage]:
        """Read all of the file; each run of blocks that is not what was saved. ``advance`` is told of bytes read.

        What cannot be read at all ends it, with the error that says so.
        """
        for first, last in _runs(self._damaged_blocks(advance)):
            yield self._told(first, last)

    def close(self) -> None:
        """Close the file; nothing can be read after that. Closing twice does nothing."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read_header(self, generation: str) -> tuple[Header, bytearray]:
        """What the header says, not checked yet, and its bytes with all that comes before the data."""
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

    def _entry_of(self, request: Request) -> Entry:
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
        """Read whole blocks and check them."""
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
        """What there is to say of damaged blocks."""
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
    """The first and the last of each run of rising numbers; what ``numbers`` raises comes after the last of them."""
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
    """Let the system read further ahead than by itself: what is not in memory yet comes half as fast again."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # not everything can be advised
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
