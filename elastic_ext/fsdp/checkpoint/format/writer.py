"""A shard file written, from tensors in memory or from bytes as they come, with checksums made on the way."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from elastic_ext.records.files import FILE_MODE, NewFiles, naming, put_in_place, temporary_beside

from .json_text import ITEM_BYTES
from .shardfile import BLOCK_BYTES, BlockSums, Header, ShardSummary, checksum_of, laid_out

__all__ = ["MOST_VIEWS", "PAGE_BYTES", "TensorToWrite", "go_through", "write_beside", "write_shard", "write_stream"]


# --- views of memory, gone through by system calls that take as much of them at a time as they like ------------------

MOST_VIEWS = 1000  # Linux takes 1024 in one call


def go_through(views: Sequence[memoryview], call: Callable[[Sequence[memoryview], int], int]) -> int:
    """Have a system ``call`` take all of ``views``, as often as it needs; gives the number of bytes.

    ``call`` is given the views that are left and how many bytes came before them, and gives how many it took: one at
    least.
    """
    waiting = [view for view in views if view]
    total = 0
    while waiting:
        num_bytes = call(waiting[:MOST_VIEWS], total)
        total += num_bytes
        waiting = _after(waiting, num_bytes)
    return total


def _after(views: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    done = 0
    while done < len(views) and num_bytes >= len(views[done]):
        num_bytes -= len(views[done])
        done += 1
    left = list(views[done:])
    if num_bytes:
        left[0] = left[0][num_bytes:]
    return left


# --- a shard file written: from memory as it lies there, checksums made as the bytes go by ---------------------------
# What is in the file is decided in shardfile.py.

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PAGE_BYTES = 4096
_BATCH_BYTES = 4 << 20  # written at once, just after it has gone through the processor's cache for its checksums


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """A tensor to be written: ``data`` is its memory, row-major, without gaps, unchanged until it is written."""

    name: str
    dtype: str
    sizes: tuple[int, ...]
    data: memoryview


def write_shard(
    new: NewFiles,
    path: Path,
    pieces: Sequence[TensorToWrite],
    *,
    generation: str,
    block_bytes: int = BLOCK_BYTES,
    staged: memoryview | None = None,
) -> ShardSummary:
    """Write tensors as a shard file of the save ``generation``: as one of ``new``, to be named ``path``.

    Where the tensors lie in memory as they will in the file, ``staged`` is that memory: it goes straight to the disk,
    where the file system lets it.

    The summary is what makes the file trusted, once ``new`` is in place. OSError names the file that could not be
    written; ValueError says which piece cannot be in such a file.
    """
    header = laid_out(
        ((piece.name, piece.dtype, piece.sizes) for piece in pieces), generation=generation, block_bytes=block_bytes
    )
    memory = {piece.name: _bytes_of(piece) for piece in pieces}
    for name, entry in header.entries.items():
        if len(memory[name]) != entry.num_bytes:
            raise ValueError(
                f"the piece {name!r} has {len(memory[name])} bytes of memory; sizes {entry.sizes} of {entry.dtype}, "
                f"{ITEM_BYTES[entry.dtype]} bytes each, take {entry.num_bytes}"
            )
    first = header.encoded()
    with naming(path):
        file = new.begin(path)
        views = [memory[name] for name in header.entries] if staged is None else [staged]
        assert sum(map(len, views)) == header.data_bytes
        table = _write_all(file, first, views, block_bytes, is_staged=staged is not None)
    return ShardSummary(num_bytes=len(first) + header.data_bytes + len(table), checksum=checksum_of(first, table))


def _bytes_of(piece: TensorToWrite) -> memoryview:
    if not piece.data.c_contiguous:
        raise ValueError(f"the memory of the piece {piece.name!r} has gaps; give memory that is row-major")
    return piece.data.cast("B") if piece.data.nbytes else memoryview(b"")  # what is empty cannot be cast


def _write_all(file: int, header: bytes, memory: Sequence[memoryview], block_bytes: int, *, is_staged: bool) -> bytes:
    """Write a shard file from its header to its table of checksums; gives that table."""
    _write(file, [memoryview(header)])
    sums = BlockSums(block_bytes)
    num_bytes = sum(map(len, memory))
    is_large = num_bytes >= _BATCH_BYTES and len(header) % PAGE_BYTES == 0
    with _PastTheCache(file) if is_large else nullcontext() as pages:
        for batch in _batches(memory):
            for view in batch:
                sums.add(view)
            if pages is None:
                _write(file, batch)
            else:
                pages.write(batch, is_aligned=is_staged)
    table = sums.table()
    _write(file, [memoryview(table)])
    return table


class _PastTheCache:
    """Writes whole pages straight to the disk, where the file system has a way, and the last, broken one as it can.

    The system's cache would copy them just as often, and then hold up whoever waits for the disk.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._memory = memoryview(mmap.mmap(-1, _BATCH_BYTES))  # which begins with a page
        self._num_held = 0
        self._go(past=True)

    def __enter__(self) -> _PastTheCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            whole = self._num_held // PAGE_BYTES * PAGE_BYTES
            self._write_pages(self._memory[:whole])
            self._go(past=False)
            _write(self._file, [self._memory[whole : self._num_held]])

    def write(self, views: Sequence[memoryview], *, is_aligned: bool) -> None:
        """Write ``views``: those of whole, aligned pages from their own memory if nothing is held; others by a copy."""
        for view in views:
            if is_aligned and not self._num_held and len(view) % PAGE_BYTES == 0:
                self._write_pages(view)
                continue
            start = 0
            while start < len(view):
                part = view[start : start + len(self._memory) - self._num_held]
                self._memory[self._num_held : self._num_held + len(part)] = part
                self._num_held += len(part)
                start += len(part)
                if self._num_held == len(self._memory):
                    self._write_pages(self._memory)
                    self._num_held = 0

    def _write_pages(self, pages: memoryview) -> None:
        if not pages:
            return
        try:
            num_bytes = os.write(self._file, pages)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            num_bytes = 0  # so says a file system that cannot
        if num_bytes < len(pages):
            self._go(past=False)
            _write(self._file, [pages[num_bytes:]])

    def _go(self, *, past: bool) -> None:
        if fcntl is None or not hasattr(os, "O_DIRECT"):
            return
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        wanted = flags | os.O_DIRECT if past else flags & ~os.O_DIRECT
        if wanted != flags:
            with contextlib.suppress(OSError):  # a file system that cannot
                fcntl.fcntl(self._file, fcntl.F_SETFL, wanted)


def _batches(memory: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The views of ``memory`` in order, as batches that are each written at once; most end where a block does."""
    batch: list[memoryview] = []
    room = _BATCH_BYTES
    for view in memory:
        start = 0
        while start < len(view):
            part = view[start : start + room]
            batch.append(part)
            start += len(part)
            room -= len(part)
            if not room or len(batch) == MOST_VIEWS:
                yield batch
                batch = []
                room = room or _BATCH_BYTES
    if batch:
        yield batch


def _write(file: int, views: Sequence[memoryview]) -> int:
    """Write all of ``views``, however little the system takes at a time; gives the number of bytes."""

    def write(left: Sequence[memoryview], _: int) -> int:
        num_bytes = os.writev(file, left)
        if not num_bytes:
            raise OSError(errno.EIO, "nothing was written, and no reason was given")
        return num_bytes

    return go_through(views, write)


# --- a file written from parts as they come, under a temporary name, until it is durable -----------------------------


def write_beside(path: Path, parts: Iterable[bytes | memoryview]) -> Path:
    """Write ``parts`` durably to a new file with a temporary name beside ``path``; gives that name.

    Each part is good until the next is asked for. Where writing fails no file is left, and OSError names ``path`` if it
    names no other file.
    """
    temporary = temporary_beside(path)
    with contextlib.ExitStack() as undo:
        try:
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
            undo.callback(_remove, temporary)
            try:
                for part in parts:
                    _write_part(file, memoryview(part))
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            error.filename = error.filename or str(path)  # calls on descriptors do not name the file
            raise
        undo.pop_all()
    return temporary


def _write_part(file: int, data: memoryview) -> None:
    """Write all of ``data``, however little the system takes at a time."""
    while data:
        num_bytes = os.write(file, data)
        if not num_bytes:
            raise OSError(errno.EIO, "nothing was written, and no reason was given")
        data = data[num_bytes:]


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


# --- a shard file written from bytes as they come, where what stands above has all of them in memory -----------------


def write_stream(path: Path, header: Header, parts: Iterable[memoryview]) -> ShardSummary:
    """Write a new shard file ``path`` with the tensors of ``header``, whose bytes follow one another in ``parts``, each
    good until the next is asked for. Its contents are durable; its name is once the folder is synced.
    """
    first = header.encoded()
    sums = BlockSums(header.block_bytes)
    table = b""

    def everything() -> Iterator[bytes | memoryview]:
        nonlocal table
        yield first
        num_bytes = 0
        for part in parts:
            sums.add(part)
            num_bytes += len(part)
            yield part
        assert num_bytes == header.data_bytes, f"{num_bytes} bytes came for {path}, which has {header.data_bytes}"
        table = sums.table()
        yield table

    put_in_place(write_beside(path, everything()), path)
    return ShardSummary(num_bytes=len(first) + header.data_bytes + len(table), checksum=checksum_of(first, table))
