"""Described: what a committed checkpoint says of its tensors and files, checked, and what to ask the files for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from elastic_ext.errors import CheckpointDamaged
from elastic_ext.fsdp.layout import Box
from elastic_ext.fsdp.moves import moves_into
from elastic_ext.fsdp.packed import read_plain
from elastic_ext.records.files import is_taken, look_afresh

from .contents import STATE_FILE, FileKind, meta_file
from .dtypes import ITEM_BYTES
from .listing import Found
from .meta import StateMeta, TensorMeta
from .shardreader import ShardReader
from .windows import Request

__all__ = ["meta_from", "open_shard", "requests_for", "state_from"]


def meta_from(found: Found, kind: FileKind, data: bytes) -> StateMeta:
    """What the file of a kind's metadata says, whose contents are ``data``; CheckpointDamaged where it cannot be."""
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


def state_from(found: Found, data: bytes) -> dict[str, Any]:
    """The plain values, in a file whose contents are ``data``; CheckpointDamaged where they cannot be."""
    path = found.path / STATE_FILE
    try:
        state = read_plain(data)
    except ValueError as error:
        raise CheckpointDamaged(f"{path} is damaged: {error}") from None
    if not isinstance(state, dict):
        raise CheckpointDamaged(f"{path} is damaged: it holds no object")
    return state


def open_shard(found: Found, file: str) -> ShardReader:
    """A file of tensors, opened only as what was saved; CheckpointDamaged where it is not."""
    summary = found.commit.shards.get(file)
    if summary is None:
        raise CheckpointDamaged(f"{found.path}: COMMIT does not name {file}, which its metadata tells of")
    if not is_taken(found.path / file):  # or not known here yet
        look_afresh(found.path)
    return ShardReader(found.path / file, summary=summary, generation=found.commit.generation)


def requests_for(meta: TensorMeta, box: Box, target: memoryview) -> Iterator[tuple[int, Request]]:
    """What to ask the files of which ranks for, so that ``target``, as bytes, comes to hold a box of a tensor."""
    for move in moves_into(box, meta.layout, target=-1):
        yield (
            move.source,
            Request(
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
