"""DcpWriter: a torch.distributed.checkpoint folder, written a piece at a time by one process.

``dcp.save`` holds all that it writes. Here torch.save makes one piece after another, each of some megabytes, and
torch's own writer the metadata of all. One class of torch's that is not public is used: the one by which .metadata
tells where a piece lies, without which there is no such folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

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

from elastic_ext.files import sync_folder

from .dcpplan import Leaf, joined

__all__ = ["DcpWriter"]

_FILE = "__0_0.distcp"


class DcpWriter:
    """What is being written into a new folder; without ``finish`` it is none of dcp's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._leaves: dict[str, Leaf] = {}
        self._results: list[WriteResult] = []
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
        places = []
        for offsets, block in blocks:
            chunks.append(ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=block.size()))
            places.append(self._put(block))
        for leaf in leaves:
            entry = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), list(chunks))
            self._note(leaf, entry)
            for number, (chunk, place) in enumerate(zip(chunks, places, strict=True)):
                self._result(MetadataIndex(joined(leaf), chunk.offsets, number), place)

    def put_value(self, leaf: Leaf, value: object) -> None:
        """Write a value that is no tensor, as torch.save does."""
        self._note(leaf, BytesStorageMetadata())
        self._result(MetadataIndex(joined(leaf)), self._put(value))

    def finish(self) -> None:
        """Have all of it on the disk, and the metadata after it, which makes it a folder of dcp's."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        metadata = Metadata(dict(self._entries), planner_data=dict(self._leaves))
        FileSystemWriter(self._folder).finish(metadata, [self._results])
        sync_folder(self._folder)

    def __enter__(self) -> DcpWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _put(self, value: object) -> _StorageInfo:
        offset = self._file.tell()
        torch.save(value, self._file)
        return _StorageInfo(_FILE, offset, self._file.tell() - offset)

    def _note(self, leaf: Leaf, entry: TensorStorageMetadata | BytesStorageMetadata) -> None:
        assert joined(leaf) not in self._entries
        self._entries[joined(leaf)] = entry
        self._leaves[joined(leaf)] = leaf

    def _result(self, index: MetadataIndex, place: _StorageInfo) -> None:
        self._results.append(WriteResult(index=index, size_in_bytes=place.length, storage_data=place))
