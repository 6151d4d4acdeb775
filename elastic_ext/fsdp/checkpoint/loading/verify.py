"""Verifying: every byte of a checkpoint read and checked, and every damage told, without torch.

COMMIT, which has been read to find the checkpoint, is checked by itself; the metadata and values by COMMIT; the header
and the table of a shard file by COMMIT, and its data by the table. What the metadata says has to be in the files, and
each element of each tensor in exactly one of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from elastic_ext.errors import CheckpointDamaged, CheckpointError
from elastic_ext.fsdp.checkpoint.contents import KINDS, STATE_FILE, FileKind, meta_file, shard_file
from elastic_ext.fsdp.checkpoint.folder.listing import ListedCheckpoint
from elastic_ext.fsdp.checkpoint.format.json_text import JsonText
from elastic_ext.fsdp.checkpoint.format.metadata import StateMeta, TensorMeta
from elastic_ext.fsdp.checkpoint.format.reader import ShardReader
from elastic_ext.fsdp.checkpoint.format.shardfile import TensorEntry

__all__ = ["Damage", "damage_in"]

_MOST_RUNS = 100  # how many runs of damaged blocks are told of one file


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """Something in a checkpoint's file that is not as it was saved."""

    file: str
    what: str
    blocks: tuple[int, int] | None = None
    """The first and the last damaged block, where the damage is in the data of tensors."""
    tensors: tuple[str, ...] = ()
    """The names of the tensors that the damage concerns, as far as known."""


def damage_in(found: ListedCheckpoint, advance: Callable[[int], object] = lambda num_bytes: None) -> Iterator[Damage]:
    """All damage in a checkpoint, as it is found; ``advance`` is told of the bytes of shard files read.

    CheckpointError where a newer library wrote something of it, which says nothing of damage.
    """
    metas: dict[FileKind, StateMeta] = {}
    for kind in KINDS:
        try:
            metas[kind] = _read_meta(found, meta_file(kind))
        except (CheckpointDamaged, OSError) as error:
            yield _damage(found, meta_file(kind), error)
    for file in sorted({STATE_FILE, *found.commit.states}):
        try:
            _read_state(found, file)
        except (CheckpointDamaged, OSError) as error:
            yield _damage(found, file, error)
    expected = dict(_files_of(metas))
    for file in sorted({*expected, *found.commit.shards}):
        yield from _damage_in_shard(found, file, metas, expected.get(file), advance)


def _read_meta(found: ListedCheckpoint, file: str) -> StateMeta:
    if file not in found.commit.metas:
        raise CheckpointDamaged("COMMIT does not name it")
    meta = StateMeta.from_json(found.read_meta(file), where=file)
    if meta.num_ranks != found.commit.num_ranks:
        raise CheckpointDamaged(f"it is of {meta.num_ranks} ranks, COMMIT of {found.commit.num_ranks}")
    fault = meta.fault()
    if fault is not None:
        raise CheckpointDamaged(fault)
    return meta


def _read_state(found: ListedCheckpoint, file: str) -> None:
    if file not in found.commit.states:
        raise CheckpointDamaged("COMMIT does not name it")
    num_bytes = 0

    def counted() -> Iterator[bytes]:
        nonlocal num_bytes
        for piece in found.state_pieces(file):
            num_bytes += len(piece)
            yield piece

    try:
        JsonText(counted()).check()
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"it is no JSON: {error}") from None
    if num_bytes != found.commit.states[file].num_bytes:
        raise CheckpointDamaged(f"it has {num_bytes} bytes, and COMMIT says {found.commit.states[file].num_bytes}")


def _files_of(metas: Mapping[FileKind, StateMeta]) -> Iterator[tuple[str, tuple[FileKind, int]]]:
    """The shard files that have to be there by the metadata, each with its kind and rank."""
    for kind, meta in metas.items():
        layouts = {id(tensor.layout): tensor.layout for tensor in meta.tensors.values()}.values()
        for rank in sorted({rank for layout in layouts for rank, _ in layout.held()}):
            yield shard_file(kind, rank, meta.num_ranks), (kind, rank)


def _damage_in_shard(
    found: ListedCheckpoint,
    file: str,
    metas: Mapping[FileKind, StateMeta],
    holder: tuple[FileKind, int] | None,
    advance: Callable[[int], object],
) -> Iterator[Damage]:
    summary = found.commit.shards.get(file)
    if summary is None:
        yield Damage(file=file, what="COMMIT does not name it, and the metadata says that tensors are in it")
        return
    try:
        with ShardReader(found.path / file, summary=summary, generation=found.commit.generation) as reader:
            if holder is not None:
                yield from _odd_entries(file, reader.entries, metas[holder[0]], holder[1])
            elif len(metas) == len(KINDS):
                yield Damage(file=file, what="the metadata names no tensor that is in this file")
            advance(summary.num_bytes - sum(entry.num_bytes for entry in reader.entries.values()))
            runs = reader.damage(advance)
            for run in itertools.islice(runs, _MOST_RUNS):
                yield Damage(file=file, what=str(run), blocks=(run.first, run.last), tensors=run.tensors)
            num_more = sum(1 for _ in runs)
            if num_more:
                yield Damage(file=file, what=f"and {num_more} more runs of blocks that are not what was saved")
    except (CheckpointDamaged, OSError) as error:
        yield _damage(found, file, error)


def _odd_entries(file: str, entries: Mapping[str, TensorEntry], meta: StateMeta, rank: int) -> Iterator[Damage]:
    """The damage in a rank's shard file whose header names other tensors than the metadata does."""
    names = itertools.chain(meta.tensors, (name for name in entries if name not in meta.tensors))
    odd = ((name, _oddity(name, entries.get(name), meta.tensors.get(name), rank)) for name in names)
    for name, what in sorted((name, what) for name, what in odd if what is not None):
        yield Damage(file=file, what=what, tensors=(name,))


def _oddity(name: str, entry: TensorEntry | None, tensor: TensorMeta | None, rank: int) -> str | None:
    """How a tensor in a rank's file differs from the metadata, in words; None where it does not."""
    box = None if tensor is None else tensor.layout.boxes[rank]
    if tensor is None or box is None or box.is_empty:
        return None if entry is None else f"the file has {name!r}, and the metadata does not say so"
    if entry is None:
        return f"the metadata says that the file has {name!r}, and the file has not"
    if (entry.dtype, math.prod(entry.sizes)) == (tensor.dtype, box.num_elements):
        return None
    return f"{name!r} is {entry.dtype} {entry.sizes} in it; the metadata says {tensor.dtype}, {box}"


def _damage(found: ListedCheckpoint, file: str, error: CheckpointError | OSError) -> Damage:
    if isinstance(error, OSError):
        return Damage(file=file, what=f"it cannot be read: {error.strerror or error}")
    what = str(error)
    for beginning in (f"{found.path / file} is damaged: ", f"{found.path / file} ", f"{file} is damaged: ", f"{file} "):
        what = what.removeprefix(beginning)
    return Damage(file=file, what=what)
