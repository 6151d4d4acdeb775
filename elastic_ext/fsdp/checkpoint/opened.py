"""Opened: a checkpoint that is being read, by one rank for itself.

What it needs of each tensor it takes from the files that have it, straight into the tensor's own memory, and no byte
twice. Everything is checked on the way: the metadata and values by COMMIT, what is read of a file block by block.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CheckpointDamaged
from ..dtypes import dtype_of
from ..layout import Box
from ..moves import moves_into
from .contents import KINDS, STATE_FILE, FileKind, meta_file, shard_file
from .dtypes import ITEM_BYTES
from .listing import Found
from .memory import bytes_of, is_plain
from .meta import StateMeta, TensorMeta
from .shardfile import ShardSummary
from .shardreader import Request, ShardReader

__all__ = ["Opened", "Wanted"]


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A tensor to be filled with a box of what was saved under a name."""

    name: str
    tensor: torch.Tensor
    """Its elements in row-major order are the box's."""
    box: Box


class Opened:
    """A committed checkpoint."""

    def __init__(self, found: Found) -> None:
        self.found = found
        self.num_ranks = found.commit.num_ranks
        """That saved it."""
        self.metas: dict[FileKind, StateMeta] = {}
        for kind in KINDS:
            file = meta_file(kind)
            meta = StateMeta.from_json(found.read_meta(file))
            fault = meta.fault()
            if fault is not None or meta.num_ranks != self.num_ranks:
                raise CheckpointDamaged(
                    f"{found.path / file}: {fault or f'it is of {meta.num_ranks} ranks, COMMIT of {self.num_ranks}'}"
                )
            self.metas[kind] = meta
        self.state: Mapping[str, Any] = json.loads(found.read_state(STATE_FILE))
        """Plain values."""
        self.bytes_read = self.bytes_needed = 0
        """Of the files of tensors, so far."""

    def tensor(self, kind: FileKind, name: str) -> TensorMeta | None:
        """What was saved under a name, or under another name of the same tensor; None if nothing was."""
        meta = self.metas[kind]
        return meta.tensors.get(meta.aliases.get(name, name))

    def names(self, kind: FileKind) -> set[str]:
        """All that something was saved under."""
        return {*self.metas[kind].tensors, *self.metas[kind].aliases}

    def read(self, kind: FileKind, wanted: Iterable[Wanted]) -> None:
        """Fill tensors; their shapes are those that were saved. CheckpointDamaged names what is not what was saved."""
        direct: dict[int, list[Request]] = {}
        for each in wanted:
            meta = self.tensor(kind, each.name)
            assert meta is not None
            if is_plain(each.tensor) and dtype_of(meta.dtype) == each.tensor.dtype:
                self._add_requests(direct, meta, each.box, each.tensor)
            else:
                self._read_apart(kind, meta, each)
        self._read_requests(kind, direct)

    def read_whole(self, kind: FileKind, name: str) -> torch.Tensor:
        """All of a tensor, in new memory."""
        meta = self.tensor(kind, name)
        assert meta is not None
        tensor = torch.empty(meta.layout.shape, dtype=dtype_of(meta.dtype))
        self.read(kind, [Wanted(name, tensor, Box.whole(meta.layout.shape))])
        return tensor

    def _read_apart(self, kind: FileKind, meta: TensorMeta, wanted: Wanted) -> None:
        """By way of memory of its own: into a device, where elements lie apart, or into another dtype."""
        host = torch.empty(wanted.box.num_elements, dtype=dtype_of(meta.dtype))
        requests: dict[int, list[Request]] = {}
        self._add_requests(requests, meta, wanted.box, host)
        self._read_requests(kind, requests)
        with torch.no_grad():
            wanted.tensor.copy_(host.reshape(wanted.tensor.shape))

    def _add_requests(self, requests: dict[int, list[Request]], meta: TensorMeta, box: Box, into: torch.Tensor) -> None:
        if box.is_empty:
            return
        target = bytes_of(into)
        for move in moves_into(box, meta.layout, target=-1):
            requests.setdefault(move.source, []).append(
                Request(
                    entry_name=meta.name,
                    item_bytes=ITEM_BYTES[meta.dtype],
                    sizes=move.sizes,
                    source_offset=move.source_offset,
                    source_strides=move.source_strides,
                    target=target,
                    target_offset=move.target_offset,
                    target_strides=move.target_strides,
                )
            )

    def _read_requests(self, kind: FileKind, requests: Mapping[int, list[Request]]) -> None:
        commit = self.found.commit
        for source, of_file in sorted(requests.items()):
            file = shard_file(kind, source, self.num_ranks)
            summary = commit.shards.get(file)
            if summary is None:
                raise CheckpointDamaged(f"{self.found.path}: COMMIT does not name {file}, which its metadata tells of")
            expected = ShardSummary(num_bytes=summary.num_bytes, checksum=summary.checksum)
            with ShardReader(self.found.path / file, summary=expected, generation=commit.generation) as reader:
                try:
                    reader.read_into(of_file)
                finally:
                    self.bytes_read += reader.bytes_read
                    self.bytes_needed += reader.bytes_needed
