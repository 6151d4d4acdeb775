"""A shard file written: from memory as it lies there, checksums made as the bytes go by.

What is in the file is decided in `shardfile`.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_ext.files import NewFiles, naming

from .blocksums import BlockSums
from .dtypes import ITEM_BYTES
from .shardfile import BLOCK_BYTES, ShardSummary, checksum_of, laid_out
from .views import MOST_VIEWS, go_through

__all__ = ["Piece", "write_shard"]

_BATCH_BYTES = 4 << 20  # written at once, just after it has gone through the processor's cache for its checksums


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor to be written: ``data`` is its memory, row-major and without gaps; nothing changes it until it is."""

    name: str
    dtype: str
    sizes: tuple[int, ...]
    data: memoryview


def write_shard(
    new: NewFiles, path: Path, pieces: Sequence[Piece], *, generation: str, block_bytes: int = BLOCK_BYTES
) -> ShardSummary:
    """Write ``pieces`` as one of ``new``, to be the file ``path`` of the save ``generation``.

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
        table = _write_all(new.begin(path), first, [memory[name] for name in header.entries], block_bytes)
    return ShardSummary(num_bytes=len(first) + header.data_bytes + len(table), checksum=checksum_of(first, table))


def _bytes_of(piece: Piece) -> memoryview:
    if not piece.data.c_contiguous:
        raise ValueError(f"the memory of the piece {piece.name!r} has gaps; give memory that is row-major")
    return piece.data.cast("B") if piece.data.nbytes else memoryview(b"")  # what is empty cannot be cast


def _write_all(file: int, header: bytes, memory: Sequence[memoryview], block_bytes: int) -> bytes:
    """Write the file from its beginning to its end; gives the table of checksums."""
    _write(file, [memoryview(header)])
    sums = BlockSums(block_bytes)
    offset = len(header)
    for batch in _batches(memory):
        for view in batch:
            sums.add(view)
        num_bytes = _write(file, batch)
        _start_writing_back(file, offset, num_bytes)
        offset += num_bytes
    table = sums.table()
    _write(file, [memoryview(table)])
    return table


def _batches(memory: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """All of ``memory`` in its order, cut into what is written at once; batches end where blocks do, mostly."""
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
    """Write all of ``views``, however little the system takes at a time; the number of bytes."""

    def write(left: Sequence[memoryview], _: int) -> int:
        num_bytes = os.writev(file, left)
        if not num_bytes:
            raise OSError(errno.EIO, "nothing was written, and no reason was given")
        return num_bytes

    return go_through(views, write)


def _start_writing_back(file: int, offset: int, num_bytes: int) -> None:
    """Let the disk begin with what was just written, while the next batch is on its way.

    Linux starts to write pages that it is told are not needed any more; those still to be written stay in memory.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # not everything can be advised
            os.posix_fadvise(file, offset, num_bytes, os.POSIX_FADV_DONTNEED)
