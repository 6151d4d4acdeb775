"""Checksums of a shard file's data: the xxh3_64 of each block, made as data goes by, and the table of all of them."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator, Sequence

import xxhash

__all__ = ["BlockSums", "SumTable", "sums_of_table"]

_PIECE_SUMS = 1 << 16  # those of a gigabyte, where blocks have the size that they have by default
_MOST_PIECES = 16


class BlockSums:
    """The checksums of blocks, made as data goes by."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._sums = array("Q")
        self._begun = xxhash.xxh3_64()
        self._num_begun = 0  # bytes of the block that has not ended

    def add(self, data: memoryview) -> None:
        """Go on with ``data``."""
        start, end, block = 0, len(data), self._block_bytes
        if self._num_begun:
            start = min(block - self._num_begun, end)
            self._begun.update(data[:start])
            self._num_begun += start
            if self._num_begun == block:
                self._end_block()
        whole = start + (end - start) // block * block
        digest = xxhash.xxh3_64_intdigest
        self._sums.extend([digest(data[at : at + block]) for at in range(start, whole, block)])
        if whole < end:
            self._begun.update(data[whole:])
            self._num_begun = end - whole

    def table(self) -> bytes:
        """All of them, as they stand in the file; the last block ends here."""
        if self._num_begun:
            self._end_block()
        return _in_little_endian(self._sums).tobytes()

    def _end_block(self) -> None:
        self._sums.append(self._begun.intdigest())
        self._begun.reset()
        self._num_begun = 0


class SumTable:
    """A file's table of checksums, of which a part is in memory, and all of it where the file is not very large.

    ``read`` gives so many bytes of the table from some byte on. What it gives later is not checked again: a checksum
    that has become another one is that of no data.
    """

    def __init__(self, num_blocks: int, read: Callable[[int, int], bytes]) -> None:
        self._num_blocks = num_blocks
        self._read = read
        self._pieces: dict[int, Sequence[int]] = {}

    def __getitem__(self, block: int) -> int:
        number, place = divmod(block, _PIECE_SUMS)
        piece = self._pieces.get(number)
        return (self._keep(number, self._read_piece(number)) if piece is None else piece)[place]

    @property
    def memory_bytes(self) -> int:
        """What it may come to take of memory."""
        return 8 * min(self._num_blocks, _MOST_PIECES * _PIECE_SUMS)

    def pieces(self) -> Iterator[bytes]:
        """All of the table, piece by piece."""
        for number in range(-(-self._num_blocks // _PIECE_SUMS)):
            data = self._read_piece(number)
            self._keep(number, data)
            yield data

    def _read_piece(self, number: int) -> bytes:
        first = number * _PIECE_SUMS
        return self._read(first * 8, min(_PIECE_SUMS, self._num_blocks - first) * 8)

    def _keep(self, number: int, data: bytes) -> Sequence[int]:
        if len(self._pieces) == _MOST_PIECES:
            del self._pieces[next(iter(self._pieces))]
        sums = self._pieces[number] = sums_of_table(data)
        return sums


def sums_of_table(data: bytes) -> Sequence[int]:
    """The checksums in a table as it stands in a file."""
    sums = array("Q")
    sums.frombytes(data)
    return _in_little_endian(sums)


def _in_little_endian(sums: array[int]) -> array[int]:
    if sys.byteorder == "big":
        sums = sums[:]
        sums.byteswap()
    return sums
