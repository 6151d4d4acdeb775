"""A shard file written from bytes as they come, where `shardwriter` has all of them in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from elastic_ext.records.files import put_in_place

from .blocksums import BlockSums
from .parts import write_beside
from .shardfile import Header, ShardSummary, checksum_of

__all__ = ["write_stream"]


def write_stream(path: Path, header: Header, parts: Iterable[memoryview]) -> ShardSummary:
    """Write the file ``path``, which is not there yet, of the tensors in ``header``, whose bytes follow one another in
    ``parts``, each good until the next is asked for. Its contents are durable; its name is once the folder is synced.
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
