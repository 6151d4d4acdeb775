"""Checkpoints made without a job: whole tensors, and how ranks would have had them, written as a save leaves them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from elastic_ext.fsdp.checkpoint.contents import EXTRA_STATES, GROUPS, KINDS, STATE_FILE, VALUES, meta_file, shard_file
from elastic_ext.fsdp.checkpoint.folder.commit import COMMIT, Commit, FileSummary, Lineage, checksum_of
from elastic_ext.fsdp.checkpoint.format.metadata import StateMeta, TensorMeta
from elastic_ext.fsdp.checkpoint.format.tensor_bytes import part_of
from elastic_ext.fsdp.checkpoint.format.writer import TensorToWrite
from elastic_ext.fsdp.layout import Box, Layout
from elastic_ext.fsdp.value_encoding import name_of
from tests.support.shards import write_alone

__all__ = ["GENERATION", "by_columns", "by_rows", "make_checkpoint", "on_one"]

GENERATION = "made-1"


def by_rows(shape: Sequence[int], num_ranks: int) -> Layout:
    """Ranges of equal length, whatever the rows are."""
    return Layout(tuple(shape), Box.whole(shape).split(num_ranks))


def by_columns(shape: Sequence[int], num_ranks: int) -> Layout:
    """A block of the last dimension for each rank, some of them empty where it is short."""
    size = shape[-1]
    cuts = [size * rank // num_ranks for rank in range(num_ranks + 1)]
    boxes = [
        Box.block(shape, [*[0] * (len(shape) - 1), low], [*shape[:-1], high]) for low, high in itertools.pairwise(cuts)
    ]
    return Layout(tuple(shape), tuple(boxes))


def on_one(shape: Sequence[int], num_ranks: int, rank: int = 0) -> Layout:
    """All of it on one rank."""
    boxes = [Box.empty(shape)] * num_ranks
    boxes[rank] = Box.whole(shape)
    return Layout(tuple(shape), tuple(boxes))


def make_checkpoint(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    layouts: Mapping[str, Layout],
    *,
    num_ranks: int,
    aliases: Mapping[str, str] | None = None,
    extra_states: Mapping[str, object] | None = None,
) -> Path:
    """A committed checkpoint of a model, of nothing else, in the new folder ``folder``."""
    folder.mkdir(parents=True)
    metas = {kind: StateMeta(num_ranks, {}, {}) for kind in KINDS}
    metas["model"] = StateMeta(num_ranks, dict(_described(tensors, layouts)), aliases or {})
    data = {meta_file(kind): meta.to_json() for kind, meta in metas.items()}
    data[STATE_FILE] = json.dumps({GROUPS: [], VALUES: {}, EXTRA_STATES: dict(extra_states or {})}).encode()
    for name, contents in data.items():
        (folder / name).write_bytes(contents)
    shards = {}
    for rank in range(num_ranks):
        pieces = [
            TensorToWrite(name, meta.dtype, part.sizes, part_of(tensors[name], Box.whole(part.shape), part))
            for name, meta in metas["model"].tensors.items()
            if not (part := meta.layout.boxes[rank]).is_empty
        ]
        file = shard_file("model", rank, num_ranks)
        shards[file] = write_alone(folder / file, pieces, generation=GENERATION)
    state = data.pop(STATE_FILE)
    commit = Commit(
        generation=GENERATION,
        lineage=(Lineage(id="made"),),
        global_step=1,
        epoch=0,
        num_ranks=num_ranks,
        metas={name: checksum_of(contents) for name, contents in data.items()},
        states={STATE_FILE: FileSummary(num_bytes=len(state), checksum=checksum_of(state))},
        shards=shards,
        saved_at="2026-11-20T19:30:00+00:00",
    )
    (folder / COMMIT).write_bytes(commit.to_json())
    return folder


def _described(tensors: Mapping[str, torch.Tensor], layouts: Mapping[str, Layout]) -> Iterator[tuple[str, TensorMeta]]:
    for name, tensor in tensors.items():
        dtype = name_of(tensor.dtype)
        assert dtype is not None
        yield name, TensorMeta(name, dtype, layouts[name], "parameter")
