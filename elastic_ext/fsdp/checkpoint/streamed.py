"""Streamed: a committed checkpoint read in stretches, in little memory, whatever the size of it or of one tensor.

A *stretch* is a range of a whole tensor's elements in row-major order, put together from the boxes that the ranks'
files have of it. Everything is checked on the way, as `opened` does, which reads into a model's own tensors.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

from elastic_ext.errors import CheckpointDamaged
from elastic_ext.fsdp.layout import Box

from .contents import EXTRA_STATES, STATE_FILE, FileKind, meta_file, shard_file
from .described import meta_from, open_shard, requests_for, state_from
from .dtypes import ITEM_BYTES
from .jsontext import JsonText
from .listing import Found
from .meta import StateMeta, TensorMeta
from .shardreader import ShardReader
from .windows import Request

__all__ = ["BATCH_BYTES", "Streamed", "Stretch", "batches_of"]

BATCH_BYTES = 8 << 20
"""Of a batch: large enough that the blocks which two of them share do not count."""
_MOST_STRETCHES = 4096  # of a batch: each takes some kilobytes while it is read
_MOST_FILES = 64
_MOST_READER_BYTES = 48 << 20
"""Of the files that are open at once; one alone may take more."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements of a tensor, of all of them in row-major order: from ``start`` to before ``end``."""

    tensor: TensorMeta
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return (self.end - self.start) * ITEM_BYTES[self.tensor.dtype]


def batches_of(tensors: Iterable[TensorMeta], most_bytes: int = BATCH_BYTES) -> Iterator[list[Stretch]]:
    """All elements of some tensors, one tensor after another, cut into what is read at once."""
    batch: list[Stretch] = []
    room = most_bytes
    for tensor in tensors:
        start, size = 0, math.prod(tensor.layout.shape)
        while start < size:
            end = min(size, start + room // ITEM_BYTES[tensor.dtype])
            if start < end:
                batch.append(Stretch(tensor, start, end))
                room -= batch[-1].num_bytes
            if end < size or len(batch) == _MOST_STRETCHES:
                yield batch
                batch, room = [], most_bytes
            start = end
    if batch:
        yield batch


class Streamed:
    """A committed checkpoint, for one thread; close it."""

    def __init__(self, found: Found) -> None:
        self.found = found
        self._readers: OrderedDict[str, ShardReader] = OrderedDict()  # the one that was used last comes last
        self._memory = bytearray()

    def meta(self, kind: FileKind) -> StateMeta:
        """What there is of a kind, read anew; CheckpointDamaged where that cannot be."""
        return meta_from(self.found, kind, self.found.read_meta(meta_file(kind)))

    def state(self) -> Mapping[str, Any]:
        """Plain values."""
        return state_from(self.found, self.found.read_state(STATE_FILE))

    def extra_states(self) -> Mapping[str, Any]:
        """Those of the plain values that modules gave as their extra state; the others are passed over."""
        state = JsonText(self.found.state_pieces(STATE_FILE))
        values: Any = {}
        try:
            for key, value in state.members(lambda key: key == EXTRA_STATES):
                values = value if key == EXTRA_STATES else values
        except (ValueError, RecursionError) as error:
            raise CheckpointDamaged(f"{self.found.path / STATE_FILE} is damaged: {error}") from None
        return cast("Mapping[str, Any]", values)

    def read(self, kind: FileKind, stretches: Sequence[Stretch]) -> list[memoryview]:
        """The bytes of each stretch, in memory that is used again by the next call.

        CheckpointDamaged names the file that is not what was saved, and where in it.
        """
        num_bytes = sum(stretch.num_bytes for stretch in stretches)
        if len(self._memory) < num_bytes:
            self._memory = bytearray(num_bytes)
        memory = memoryview(self._memory)
        views: list[memoryview] = []
        requests: dict[int, list[Request]] = {}
        for stretch in stretches:
            views.append(memory[: stretch.num_bytes])
            memory = memory[stretch.num_bytes :]
            box = Box.flat(stretch.tensor.layout.shape, stretch.start, stretch.end)
            for source, request in requests_for(stretch.tensor, box, views[-1]):
                requests.setdefault(source, []).append(request)
        for source, of_file in sorted(requests.items()):
            self._reader(shard_file(kind, source, self.found.commit.num_ranks)).read_into(of_file)
        return views

    def close(self) -> None:
        """Close its files. Twice is allowed."""
        while self._readers:
            self._readers.popitem()[1].close()

    def __enter__(self) -> Streamed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reader(self, file: str) -> ShardReader:
        reader = self._readers.pop(file, None)
        if reader is None:
            while self._is_crowded():  # before the new one takes memory
                self._readers.popitem(last=False)[1].close()
            reader = open_shard(self.found, file)
        self._readers[file] = reader
        return reader

    def _is_crowded(self) -> bool:
        used = sum(reader.memory_bytes for reader in self._readers.values())
        return len(self._readers) >= _MOST_FILES or used > _MOST_READER_BYTES
