"""Opened: a checkpoint that one rank reads, into tensors of its own.

The part of each tensor that the rank needs is read from the files that have it, straight into the tensor's memory,
and no byte twice. Everything is checked on the way: the metadata and values by COMMIT, what is read of a file block by
block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch

from elastic_ext.errors import CheckpointError
from elastic_ext.fsdp.checkpoint.contents import KINDS, STATE_FILE, FileKind, meta_file, shard_file
from elastic_ext.fsdp.checkpoint.folder.listing import ListedCheckpoint
from elastic_ext.fsdp.checkpoint.format.metadata import StateMeta, TensorMeta
from elastic_ext.fsdp.checkpoint.format.reader import ReadRequest, ShardReader
from elastic_ext.fsdp.checkpoint.format.tensor_bytes import bytes_of
from elastic_ext.fsdp.checkpoint.storage import Storage
from elastic_ext.fsdp.layout import Box
from elastic_ext.fsdp.state import memory_of
from elastic_ext.fsdp.value_encoding import dtype_of

from .description import meta_from, open_shard, requests_for, state_from

__all__ = ["Opened", "Wanted"]

_Result = TypeVar("_Result")
_MOST_APART_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A request to fill a tensor with a box of the tensor that was saved under a name."""

    name: str
    tensor: torch.Tensor
    """The tensor to fill: its elements in row-major order are the box's."""
    box: Box
    what: str | None = None
    """The tensor in words, for ``Opened.touched``; None for new memory, which nobody has seen yet."""


class Opened:
    """A committed checkpoint that one rank reads from; to be closed."""

    def __init__(self, found: ListedCheckpoint, storage: Storage, touched: set[str] | None = None) -> None:
        self.found = found
        self.touched = set() if touched is None else touched
        """What loading has begun to change, in words, such as "parameter a.weight"; noted before it changes."""
        self._storage = storage
        self._is_closed = False
        self.num_ranks = found.commit.num_ranks
        """How many ranks saved the checkpoint."""
        self.metas: dict[FileKind, StateMeta] = {}
        for kind in KINDS:
            self.metas[kind] = meta_from(found, kind, self._read_meta(meta_file(kind)))
        self.state: Mapping[str, Any] = state_from(found, self._within(lambda: found.read_state(STATE_FILE)))
        """The checkpoint's plain values."""
        self._readers: dict[str, ShardReader] = {}

    @property
    def bytes_read(self) -> int:
        """How many bytes of shard files were read so far."""
        return sum(reader.bytes_read for reader in self._readers.values())

    @property
    def bytes_needed(self) -> int:
        """How many bytes of tensors were asked for so far."""
        return sum(reader.bytes_needed for reader in self._readers.values())

    def tensor(self, kind: FileKind, name: str) -> TensorMeta | None:
        """The metadata of the tensor that was saved under a name or an alias; None where none was."""
        meta = self.metas[kind]
        return meta.tensors.get(meta.aliases.get(name, name))

    def names(self, kind: FileKind) -> set[str]:
        """All names and aliases of the saved tensors of a kind."""
        return {*self.metas[kind].tensors, *self.metas[kind].aliases}

    def read(self, kind: FileKind, wanted: Iterable[Wanted]) -> None:
        """Fill tensors with what was saved; their shapes fit. CheckpointDamaged names a file that is not as saved."""
        requests: dict[int, list[ReadRequest]] = {}
        apart: list[tuple[Wanted, torch.Tensor]] = []
        whats: set[str] = set()
        for each in wanted:
            meta = self.tensor(kind, each.name)
            assert meta is not None
            target = each.tensor
            if memory_of(target) is None or dtype_of(meta.dtype) != target.dtype:
                # On a device, where elements lie apart, or of another dtype: by way of memory of its own, not too much.
                if sum(host.nbytes for _, host in apart) > _MOST_APART_BYTES:
                    self._read_apart(kind, requests, apart, whats)
                target = torch.empty(each.box.num_elements, dtype=dtype_of(meta.dtype), device="cpu")
                apart.append((each, target))
            _add_requests(requests, meta, each.box, target)
            if each.what is not None:
                whats.add(each.what)
        self._read_apart(kind, requests, apart, whats)

    def read_whole(self, kind: FileKind, name: str) -> torch.Tensor:
        """A whole saved tensor, in new memory, which is taken once all files that have parts of it are open."""
        meta = self.tensor(kind, name)
        assert meta is not None
        for source, _ in meta.layout.held():
            self._within(functools.partial(self._reader, shard_file(kind, source, self.num_ranks)))
        tensor = torch.empty(meta.layout.shape, dtype=dtype_of(meta.dtype), device="cpu")
        self.read(kind, [Wanted(name, tensor, Box.whole(meta.layout.shape))])
        return tensor

    def close(self) -> None:
        """Close the files; a read that comes late, from a thread, changes nothing. Twice is allowed."""
        self._is_closed = True
        for reader in list(self._readers.values()):
            reader.close()

    def __enter__(self) -> Opened:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_apart(
        self,
        kind: FileKind,
        requests: dict[int, list[ReadRequest]],
        apart: list[tuple[Wanted, torch.Tensor]],
        whats: set[str],
    ) -> None:
        """Read all that was requested so far, and copy what was read ``apart``, into host memory, to its tensors."""
        self._within(lambda: self._read_files(kind, requests, whats))
        with torch.no_grad():
            for each, host in apart:
                each.tensor.copy_(host.reshape(each.tensor.shape))
        requests.clear()
        apart.clear()
        whats.clear()

    def _read_meta(self, file: str) -> bytes:
        return self._within(lambda: self.found.read_meta(file))

    def _within(self, act: Callable[[], _Result]) -> _Result:
        return self._storage.within(act, f"reading {self.found.path}")

    def _read_files(self, kind: FileKind, requests: Mapping[int, list[ReadRequest]], whats: set[str]) -> None:
        sources = sorted(requests)
        readers = [self._reader(shard_file(kind, source, self.num_ranks)) for source in sources]
        self.touched |= whats  # not before all files have been opened, which tells of most damage
        for source, reader in zip(sources, readers, strict=True):
            reader.read_into(requests[source])

    def _reader(self, file: str) -> ShardReader:
        reader = self._readers.get(file)
        if reader is None:
            reader = open_shard(self.found, file)
            self._readers[file] = reader
        if self._is_closed:  # after a load that took too long has raised: what comes now touches nothing
            reader.close()
            raise CheckpointError(f"{self.found.path} was closed before this read, since loading it had taken too long")
        return reader


def _add_requests(requests: dict[int, list[ReadRequest]], meta: TensorMeta, box: Box, into: torch.Tensor) -> None:
    """Add the requests that read a box of a saved tensor into the memory of ``into``, by the rank of the file."""
    if not box.is_empty:
        for source, request in requests_for(meta, box, bytes_of(into)):
            requests.setdefault(source, []).append(request)
