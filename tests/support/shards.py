"""Shard files for tests: pieces with random contents, requests for all of them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

from elastic_ext.fsdp.checkpoint.format.json_text import ITEM_BYTES
from elastic_ext.fsdp.checkpoint.format.reader import ReadRequest, ShardReader
from elastic_ext.fsdp.checkpoint.format.shardfile import BLOCK_BYTES, ShardSummary
from elastic_ext.fsdp.checkpoint.format.writer import TensorToWrite, write_shard
from elastic_ext.records.files import NewFiles


def write_alone(
    path: Path, pieces: Sequence[TensorToWrite], *, generation: str, block_bytes: int = BLOCK_BYTES
) -> ShardSummary:
    """Write a shard file that no others are written with."""
    with NewFiles() as new:
        summary = write_shard(new, path, pieces, generation=generation, block_bytes=block_bytes)
        new.sync()
        new.put_in_place()
    return summary


def random_bytes(num_bytes: int, seed: int = 0) -> bytearray:
    return bytearray(random.Random(seed).randbytes(num_bytes))


def piece(name: str, dtype: str, sizes: tuple[int, ...], seed: int = 0) -> TensorToWrite:
    return TensorToWrite(name, dtype, sizes, memoryview(random_bytes(math.prod(sizes) * ITEM_BYTES[dtype], seed)))


def whole(one: TensorToWrite, target: bytearray) -> ReadRequest:
    """A request for all of a tensor, as one dimension."""
    item_bytes = ITEM_BYTES[one.dtype]
    return ReadRequest(one.name, item_bytes, (math.prod(one.sizes),), 0, (1,), memoryview(target), 0, (1,))


def read_whole(reader: ShardReader, pieces: Sequence[TensorToWrite]) -> list[bytearray]:
    targets = [bytearray(one.data.nbytes) for one in pieces]
    reader.read_into([whole(one, target) for one, target in zip(pieces, targets, strict=True)])
    return targets


def assert_read_back(path: Path, summary: ShardSummary, pieces: Sequence[TensorToWrite], generation: str = "g") -> None:
    with ShardReader(path, summary=summary, generation=generation) as reader:
        assert {name: (entry.dtype, entry.sizes) for name, entry in reader.entries.items()} == {
            one.name: (one.dtype, one.sizes) for one in pieces
        }
        targets = read_whole(reader, pieces)
        reader.verify()
    assert all(target == one.data for target, one in zip(targets, pieces, strict=True))
