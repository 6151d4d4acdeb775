"""DcpWriter: a torch.distributed.checkpoint folder, written a piece at a time by one process.

``dcp.save`` holds all that it writes. Here torch.save makes one piece after another, each of some megabytes, and
torch's own writer the metadata of all. One class of torch's that is not public is used: the one by which .metadata
tells where a piece lies, without which there is no such folder.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
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

from elastic_ext.records.files import sync_folder

from .dcpplan import Leaf, joined

__all__ = ["DcpWriter"]

_FILE = "__0_0.distcp"


class DcpWriter:
    """What is being written into a new folder; without ``finish`` it is none of dcp's."""

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
        """Write a tensor's blocks, each with its offsets, and have them found under each of ``leaves``.

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
        """Write a value that is no tensor, as torch.save does."""
        self._note(leaf, BytesStorageMetadata(), array("q", self._put(value)))

    def finish(self) -> None:
        """Have all of it on the disk, and the metadata after it, which makes it a folder of dcp's."""
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
        """What the metadata says of a tensor, and of all that are like it."""
        key = dtype, shape, chunks
        if key not in self._alike:
            blocks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
            self._alike[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), blocks)
        return self._alike[key]

    def _put(self, value: object) -> tuple[int, int]:
        """Where it comes to lie, and how long it is."""
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
        """What torch's writer puts into the metadata, key by key."""
        numbers = iter(self._places)
        places = (_StorageInfo(_FILE, offset, length) for offset, length in zip(numbers, numbers, strict=True))
        for key, entry in self._entries.items():
            indices = [MetadataIndex(key)]
            if isinstance(entry, TensorStorageMetadata):
                indices = [MetadataIndex(key, chunk.offsets, number) for number, chunk in enumerate(entry.chunks)]
            yield [WriteResult(index, place.length, place) for index, place in zip(indices, places, strict=False)]
