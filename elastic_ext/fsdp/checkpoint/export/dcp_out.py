"""A checkpoint written as a torch.distributed.checkpoint folder, a piece at a time, by one process."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from elastic_ext.errors import CheckpointError
from elastic_ext.fsdp.checkpoint.contents import EXTRA_STATES, KINDS, STATE_FILE, meta_file
from elastic_ext.fsdp.checkpoint.folder.job_folder import refuse_in_a_jobs_folder
from elastic_ext.fsdp.checkpoint.folder.listing import ListedCheckpoint
from elastic_ext.fsdp.checkpoint.format.json_text import ITEM_BYTES
from elastic_ext.fsdp.checkpoint.loading.description import StreamedCheckpoint, Stretch
from elastic_ext.fsdp.value_encoding import dtype_of, unpack
from elastic_ext.records.files import is_temporary, move_folder, remove_folder, sync_folder, temporary_beside

from .dcp_plan import (
    METAS,
    RECORD,
    STATE,
    ConversionRecord,
    Keys,
    Leaf,
    Outgoing,
    OutTensor,
    Refusals,
    joined,
    leaves_of,
    runs_of,
)

__all__ = ["DcpWriter", "write_dcp"]


# --- a torch.distributed.checkpoint folder, written a piece at a time by one process ---------------------------------
# ``dcp.save`` holds all that it writes. Here torch.save makes one piece after another, each of some megabytes, and
# torch's own writer the metadata of all. One class of torch's that is not public is used: the one by which .metadata
# tells where a piece lies, without which there is no such folder.

_FILE = "__0_0.distcp"


class DcpWriter:
    """Writes tensors and values into a new folder, which is one of DCP's after ``finish`` alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._leaves: dict[str, Leaf] = {}
        self._places = array("q")  # offset and length of each piece, in the order of the entries
        self._alike: dict[object, TensorStorageMetadata] = {}
        self._file: IO[bytes] = (folder / _FILE).open("xb")

    def put_tensor(
        self,
        leaves: Sequence[Leaf],
        dtype: torch.dtype,
        shape: Sequence[int],
        blocks: Iterable[tuple[Sequence[int], torch.Tensor]],
    ) -> None:
        """Write a tensor's blocks, each with its offsets, to be found under each path in ``leaves``.

        A block's memory is its own elements and nothing else, and may be used again when the next is asked for.
        """
        chunks = []
        places = array("q")
        for offsets, block in blocks:
            chunks.append((tuple(offsets), tuple(block.shape)))
            places.extend(self._put(block))
        entry = self._entry_of(dtype, tuple(shape), tuple(chunks))
        for leaf in leaves:
            self._note(leaf, entry, places)

    def put_value(self, leaf: Leaf, value: object) -> None:
        """Write a value that is no tensor with torch.save, to be found under the path ``leaf``."""
        self._note(leaf, BytesStorageMetadata(), array("q", self._put(value)))

    def finish(self) -> None:
        """Sync all that was written to the disk, then write .metadata, which makes the folder one of DCP's."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        metadata = Metadata(self._entries, planner_data=self._leaves)
        # It goes through the results once, so they are made as it does: of many tensors they take much memory.
        FileSystemWriter(self._folder).finish(metadata, cast("list[list[WriteResult]]", self._results()))
        sync_folder(self._folder)

    def __enter__(self) -> DcpWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _entry_of(
        self, dtype: torch.dtype, shape: tuple[int, ...], chunks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    ) -> TensorStorageMetadata:
        """The entry of .metadata for a tensor; tensors of equal dtype, shape and chunks share one."""
        key = dtype, shape, chunks
        if key not in self._alike:
            blocks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
            self._alike[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), blocks)
        return self._alike[key]

    def _put(self, value: object) -> tuple[int, int]:
        """Write ``value`` with torch.save; gives its offset in the file and its length."""
        offset = self._file.tell()
        torch.save(value, self._file)
        return offset, self._file.tell() - offset

    def _note(self, leaf: Leaf, entry: TensorStorageMetadata | BytesStorageMetadata, places: array[int]) -> None:
        key = joined(leaf)
        assert key not in self._entries
        self._entries[key] = entry
        self._leaves[key] = leaf
        self._places.extend(places)

    def _results(self) -> Iterator[list[WriteResult]]:
        """The write results from which torch's writer makes .metadata, key by key."""
        numbers = iter(self._places)
        places = (_StorageInfo(_FILE, offset, length) for offset, length in zip(numbers, numbers, strict=True))
        for key, entry in self._entries.items():
            indices = [MetadataIndex(key)]
            if isinstance(entry, TensorStorageMetadata):
                indices = [MetadataIndex(key, chunk.offsets, number) for number, chunk in enumerate(entry.chunks)]
            yield [WriteResult(index, place.length, place) for index, place in zip(indices, places, strict=False)]


# --- a checkpoint as a folder of torch.distributed.checkpoint, which ``dcp.load`` reads on any number of ranks -------
# One process does it, without a process group, and holds some megabytes at a time. Under which keys things stand is
# decided in dcp_plan.py.

_PIECE_BYTES = 16 << 20  # dcp.load reads a piece as a whole, for whatever part of it
_SUFFIX_CHARACTERS = len(".0123456789abcdef.tmp")


def write_dcp(
    found: ListedCheckpoint,
    dest: Path,
    *,
    keys: Keys,
    first_names: Collection[str],
    force: bool,
    on_progress: Callable[[int, int], None],
) -> tuple[int, int]:
    """Write a checkpoint as the DCP folder ``dest``; gives the number of tensors and their bytes."""
    with StreamedCheckpoint(found) as streamed:
        refusals = Refusals()
        metas = {kind: streamed.meta(kind) for kind in KINDS}
        state = streamed.state()
        outgoing = Outgoing.of(metas, state, keys=keys, first_names=first_names, refusals=refusals)
        values = {leaf: unpack(value) for leaf, value in outgoing.values.items()}
        for name, value in state[EXTRA_STATES].items():
            values.update(leaves_of(keys.of_model(name), unpack(value)))
        _refuse_twice(itertools.chain(*(tensor.leaves for tensor in outgoing.tensors), values), refusals)
        refusals.raise_if_any(found.path)
        reading = _BlockReading(streamed, outgoing, on_progress)
        num_tensors = len(outgoing.tensors)
        with _new_folder(dest, force=force) as folder, DcpWriter(folder) as writer:
            for leaf, value in values.items():
                writer.put_value(leaf, value)
            for tensor in outgoing.tensors:
                shape = tensor.meta.layout.shape
                writer.put_tensor(tensor.leaves, dtype_of(tensor.meta.dtype), shape, reading.blocks_of(tensor))
            _put_text(writer, RECORD, ConversionRecord.of(found.commit, keys, first_names).to_json())
            _put_text(writer, STATE, found.read_state(STATE_FILE))
            for kind in KINDS:
                _put_text(writer, (*METAS, kind), found.read_meta(meta_file(kind)))
            streamed.close()
            del metas, state, outgoing, values  # torch's metadata of many tensors needs the room
            writer.finish()
    return num_tensors, reading.num_bytes


class _BlockReading:
    """Reads the tensors of one checkpoint for a DCP folder, a block at a time."""

    def __init__(
        self, streamed: StreamedCheckpoint, outgoing: Outgoing, on_progress: Callable[[int, int], None]
    ) -> None:
        self.num_bytes = sum(_num_bytes_in(tensor) for tensor in outgoing.tensors)
        self._num_done = 0
        self._streamed = streamed
        self._on_progress = on_progress

    def blocks_of(self, tensor: OutTensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """The blocks of a tensor, each with its offsets, in memory that the next block uses again."""
        dtype = dtype_of(tensor.meta.dtype)
        start = 0
        for offsets, sizes in runs_of(tensor.meta.layout.shape, _PIECE_BYTES // ITEM_BYTES[tensor.meta.dtype]):
            end = start + math.prod(sizes)
            if start == end:
                yield offsets, torch.empty(sizes, dtype=dtype)
                continue
            (view,) = self._streamed.read(tensor.kind, [Stretch(tensor.meta, start, end)])
            self._num_done += len(view)
            self._on_progress(self._num_done, self.num_bytes)
            yield offsets, torch.frombuffer(view, dtype=torch.uint8).view(dtype).view(sizes)
            start = end


def _num_bytes_in(tensor: OutTensor) -> int:
    return math.prod(tensor.meta.layout.shape) * ITEM_BYTES[tensor.meta.dtype]


def _put_text(writer: DcpWriter, leaf: Leaf, text: bytes) -> None:
    """Write text as a tensor of its bytes, which needs no pickle to be read."""
    block = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    writer.put_tensor([leaf], torch.uint8, block.shape, [((0,), block)])


def _refuse_twice(leaves: Iterable[Leaf], refusals: Refusals) -> None:
    keys: set[str] = set()
    for leaf in leaves:
        if joined(leaf) in keys:
            refusals.add("keys under which two values would stand", joined(leaf))
        keys.add(joined(leaf))


@contextlib.contextmanager
def _new_folder(dest: Path, *, force: bool) -> Iterator[Path]:
    """A folder beside ``dest``, which takes its place when the ``with`` ends well, and is removed where it does not."""
    dest = Path(os.path.abspath(dest))
    refuse_in_a_jobs_folder(dest)
    _refuse_taken(dest, force=force)
    for name in os.listdir(dest.parent):  # left by conversions that were killed
        if is_temporary(name) and name[1:-_SUFFIX_CHARACTERS] == dest.name:
            remove_folder(dest.parent / name)
    folder = temporary_beside(dest)
    folder.mkdir(mode=0o775)
    with contextlib.ExitStack() as undo:
        undo.callback(_remove, folder)
        yield folder
        _refuse_taken(dest, force=force)
        if os.path.lexists(dest):
            remove_folder(dest)
        move_folder(folder, dest)
        undo.pop_all()


def _refuse_taken(dest: Path, *, force: bool) -> None:
    if not os.path.lexists(dest):
        return
    if dest.is_dir() and not dest.is_symlink():
        names = os.listdir(dest)
        others = [name for name in names if not (name.endswith(".distcp") or name == ".metadata")]
        if not names or (force and not others):
            return
        if force:
            raise CheckpointError(
                f"{dest} holds {others[0]}, which dcp.save has not made and force=True (--force) does not remove; "
                "remove it by hand, or give another dest"
            )
    raise CheckpointError(
        f"{dest} is there already; give another dest, or force=True (--force), which replaces a folder of DCP's"
    )


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        remove_folder(folder)
