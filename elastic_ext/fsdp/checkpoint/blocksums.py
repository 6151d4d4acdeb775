"""Checksums of a shard file's data: the xxh3_64 of each block, made as data goes by, and the table of all of them."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence

import xxhash

__all__ = ["BlockSums", "sums_of_table"]


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


def sums_of_table(num_blocks: int, fill: Callable[[memoryview], None]) -> Sequence[int]:
    """The checksums in a table as it stands in a file, which ``fill`` reads into memory; that is all it takes of it."""
    sums = array("Q", [0]) * num_blocks
    fill(memoryview(sums).cast("B") if num_blocks else memoryview(b""))
    return _in_little_endian(sums)


def _in_little_endian(sums: array[int]) -> array[int]:
    if sys.byteorder == "big":
        sums = sums[:]
        sums.byteswap()
    return sums
