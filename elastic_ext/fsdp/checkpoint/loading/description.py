"""What a committed checkpoint says of its tensors and files, and its tensors read in stretches, in little memory."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

from elastic_ext.errors import CheckpointDamaged
from elastic_ext.fsdp.checkpoint.contents import EXTRA_STATES, STATE_FILE, FileKind, meta_file, shard_file
from elastic_ext.fsdp.checkpoint.folder.listing import ListedCheckpoint
from elastic_ext.fsdp.checkpoint.format.json_text import ITEM_BYTES, JsonText
from elastic_ext.fsdp.checkpoint.format.metadata import StateMeta, TensorMeta
from elastic_ext.fsdp.checkpoint.format.reader import ReadRequest, ShardReader
from elastic_ext.fsdp.layout import Box
from elastic_ext.fsdp.moves import moves_into
from elastic_ext.fsdp.pickled_values import read_plain
from elastic_ext.records.files import is_taken, look_afresh

__all__ = [
    "BATCH_BYTES",
    "StreamedCheckpoint",
    "Stretch",
    "batches_of",
    "meta_from",
    "open_shard",
    "requests_for",
    "state_from",
]


# --- what a committed checkpoint says of its tensors and files, checked, and what to ask the files for ---------------


def meta_from(found: ListedCheckpoint, kind: FileKind, data: bytes) -> StateMeta:
    """The metadata of a kind's tensors, from its file's contents ``data``; CheckpointDamaged where that cannot be."""
    path = found.path / meta_file(kind)
    meta = StateMeta.from_json(data, where=str(path))
    fault = meta.fault()
    if fault is None and meta.num_ranks != found.commit.num_ranks:
        fault = f"it is of {meta.num_ranks} ranks, COMMIT of {found.commit.num_ranks}"
    said = sum(math.prod(each.layout.shape) * ITEM_BYTES[each.dtype] for each in meta.tensors.values())
    saved = sum(summary.num_bytes for summary in found.commit.shards.values())
    if fault is None and said > saved:  # memory is taken for them before the files are read
        fault = f"its tensors are of {said} bytes, and the files that COMMIT names of {saved}"
    if fault is not None:
        raise CheckpointDamaged(f"{path}: {fault}")
    return meta


def state_from(found: ListedCheckpoint, data: bytes) -> dict[str, Any]:
    """A checkpoint's plain values, from its file's contents ``data``; CheckpointDamaged where they cannot be."""
    path = found.path / STATE_FILE
    try:
        state = read_plain(data)
    except ValueError as error:
        raise CheckpointDamaged(f"{path} is damaged: {error}") from None
    if not isinstance(state, dict):
        raise CheckpointDamaged(f"{path} is damaged: it holds no object")
    return state


def open_shard(found: ListedCheckpoint, file: str) -> ShardReader:
    """A reader of a checkpoint's shard file; CheckpointDamaged where the file is not the one that was saved."""
    summary = found.commit.shards.get(file)
    if summary is None:
        raise CheckpointDamaged(f"{found.path}: COMMIT does not name {file}, which its metadata tells of")
    if not is_taken(found.path / file):  # or not known here yet
        look_afresh(found.path)
    return ShardReader(found.path / file, summary=summary, generation=found.commit.generation)


def requests_for(meta: TensorMeta, box: Box, target: memoryview) -> Iterator[tuple[int, ReadRequest]]:
    """The reads that fill ``target``, as bytes, with a box of a saved tensor, each with the rank whose file has it."""
    for move in moves_into(box, meta.layout, target=-1):
        yield (
            move.source,
            ReadRequest(
                entry_name=meta.name,
                item_bytes=ITEM_BYTES[meta.dtype],
                sizes=move.sizes,
                source_offset=move.source_offset,
                source_strides=move.source_strides,
                target=target,
                target_offset=move.target_offset,
                target_strides=move.target_strides,
            ),
        )


# --- a committed checkpoint read in stretches, in little memory, whatever the size of it or of one tensor ------------
# A *stretch* is a range of a whole tensor's elements in row-major order, put together from the boxes that the ranks'
# files have of it. Everything is checked on the way, as source.py does, which reads into a model's own tensors.

BATCH_BYTES = 8 << 20
"""The size of a batch of stretches: so large that the blocks which two batches share do not count."""
_MOST_STRETCHES = 4096  # in a batch: each takes some kilobytes while it is read
_MOST_FILES = 64
_MOST_READER_BYTES = 48 << 20
"""The memory of all files that are open at once; a single one may take more."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A range of a saved tensor's elements in row-major order: from ``start`` to before ``end``."""

    tensor: TensorMeta
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return (self.end - self.start) * ITEM_BYTES[self.tensor.dtype]


def batches_of(tensors: Iterable[TensorMeta], most_bytes: int = BATCH_BYTES) -> Iterator[list[Stretch]]:
    """All elements of some tensors, in order, as batches of stretches that are each read at once."""
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


class StreamedCheckpoint:
    """A committed checkpoint read in stretches, in little memory, by one thread; to be closed."""

    def __init__(self, found: ListedCheckpoint) -> None:
        self.found = found
        self._readers: OrderedDict[str, ShardReader] = OrderedDict()  # the one that was used last comes last
        self._memory = bytearray()

    def meta(self, kind: FileKind) -> StateMeta:
        """The metadata of a kind's tensors, read anew; CheckpointDamaged where it cannot be right."""
        return meta_from(self.found, kind, self.found.read_meta(meta_file(kind)))

    def state(self) -> Mapping[str, Any]:
        """The checkpoint's plain values, read anew."""
        return state_from(self.found, self.found.read_state(STATE_FILE))

    def extra_states(self) -> Mapping[str, Any]:
        """The extra states that modules gave, by name; the checkpoint's other plain values are passed over."""
        state = JsonText(self.found.state_pieces(STATE_FILE))
        values: Any = {}
        try:
            for key, value in state.members(lambda key: key == EXTRA_STATES):
                values = value if key == EXTRA_STATES else values
        except (ValueError, RecursionError) as error:
            raise CheckpointDamaged(f"{self.found.path / STATE_FILE} is damaged: {error}") from None
        return cast("Mapping[str, Any]", values)

    def read(self, kind: FileKind, stretches: Sequence[Stretch]) -> list[memoryview]:
        """Read and check stretches; gives the bytes of each, in memory that the next call uses again.

        CheckpointDamaged names the file that is not what was saved, and where in it.
        """
        num_bytes = sum(stretch.num_bytes for stretch in stretches)
        if len(self._memory) < num_bytes:
            self._memory = bytearray(num_bytes)
        memory = memoryview(self._memory)
        views: list[memoryview] = []
        requests: dict[int, list[ReadRequest]] = {}
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
        """Close the checkpoint's files. Twice is allowed."""
        while self._readers:
            self._readers.popitem()[1].close()

    def __enter__(self) -> StreamedCheckpoint:
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
