"""Incoming: what a folder of torch.distributed.checkpoint holds, as a checkpoint is to hold it.

Here is what all such folders have in common, and those that were converted from a checkpoint, which have its own word
on everything; `dcpforeign` makes out what others hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_ext.errors import CheckpointDamaged
from elastic_ext.fsdp.dtypes import name_of
from elastic_ext.fsdp.layout import Box, Boxes, Layout
from elastic_ext.fsdp.packed import read_plain
from elastic_ext.fsdp.plain import unpack

from .contents import EXTRA_STATES, KINDS, FileKind
from .dcpplan import METAS, OWN, RECORD, STATE, Leaf, Outgoing, Refusals, joined, leaves_of
from .dcpreader import DcpFolder, DcpPiece, DcpTensor
from .dcprecord import Record
from .meta import Kind, StateMeta, TensorMeta

__all__ = ["Incoming", "Placed", "Tensors", "metas_of", "of_record", "placed", "record_in"]

Tensors = Mapping[FileKind, Mapping[str, "tuple[Kind, Placed]"]]
"""By the names that they get."""


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A tensor, its parts in files of ranks, and the pieces that make up each part, one after another."""

    tensor: DcpTensor
    boxes: tuple[Box, ...]
    pieces: tuple[tuple[DcpPiece, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Incoming:
    """A checkpoint that is to be written."""

    metas: Mapping[FileKind, StateMeta]
    tensors: Tensors
    state: bytes
    """The plain values, as JSON."""
    step: int
    epoch: int
    num_ranks: int
    about: Mapping[str, Any]


def placed(tensor: DcpTensor, refusals: Refusals) -> Placed:
    """A tensor in one file, where its pieces are runs of elements; else each piece in the file of a rank of its own."""
    boxes = [
        Box.block(tensor.shape, piece.offsets, tuple(map(int.__add__, piece.offsets, piece.sizes)))
        for piece in tensor.pieces
    ]
    fault = Layout(tensor.shape, tuple(boxes)).fault()
    if fault is not None:
        refusals.add(f"tensors whose pieces are not all of them, or overlap ({fault})", tensor.key)
    if name_of(tensor.dtype) is None:
        refusals.add(f"tensors of {tensor.dtype}", tensor.key)
    if all(box.is_flat for box in boxes):
        in_order = sorted(range(len(boxes)), key=lambda place: boxes[place].start)
        return Placed(tensor, (Box.whole(tensor.shape),), (tuple(tensor.pieces[place] for place in in_order),))
    return Placed(tensor, tuple(boxes), tuple((piece,) for piece in tensor.pieces))


def metas_of(tensors: Tensors, aliases: Mapping[str, str], num_ranks: int) -> dict[FileKind, StateMeta]:
    """What the checkpoint says of its tensors; ``aliases`` are the model's."""
    metas: dict[FileKind, StateMeta] = {}
    alike: dict[Layout, Layout] = {}  # equal ones are one object
    for kind in KINDS:
        described = {name: _meta(name, of, where, num_ranks, alike) for name, (of, where) in tensors[kind].items()}
        metas[kind] = StateMeta(num_ranks, described, dict(aliases) if kind == "model" else {})
    return metas


def record_in(folder: DcpFolder) -> Record | None:
    """What a converted checkpoint says of itself, None where this was not converted from one."""
    key = joined(RECORD)
    if key not in folder.tensors:
        return None
    return Record.from_json(_text(folder, RECORD), where=f"{folder.path}: {key}")


def of_record(folder: DcpFolder, record: Record) -> Incoming:
    """A checkpoint that was converted, as it was, but that one file of each kind has all tensors."""
    where = f"{folder.path}: {OWN}"
    metas: dict[FileKind, StateMeta] = {
        kind: StateMeta.from_json(_text(folder, (*METAS, kind)), where=f"{where}.metas.{kind}") for kind in KINDS
    }
    text = _text(folder, STATE)
    try:
        state = read_plain(text)
    except ValueError as error:
        raise CheckpointDamaged(f"{where}: its plain values are damaged: {error}") from None
    refusals = Refusals()
    outgoing = Outgoing.of(metas, state, keys=record.keys, first_names=record.first_names, refusals=refusals)
    found: dict[FileKind, dict[str, tuple[Kind, Placed]]] = {kind: {} for kind in KINDS}
    for tensor in outgoing.tensors:
        key = joined(tensor.leaves[0])
        there = folder.tensors.get(key)
        name = tensor.meta.name
        if there is None or (name_of(there.dtype), there.shape) != (tensor.meta.dtype, tensor.meta.layout.shape):
            raise CheckpointDamaged(f"{folder.path} does not hold {key} as it was converted; convert it again")
        found[tensor.kind][name] = tensor.meta.kind, placed(there, refusals)
    known = {joined(leaf) for tensor in outgoing.tensors for leaf in tensor.leaves}
    known |= {joined(leaf) for leaf in outgoing.values}
    for name, value in state[EXTRA_STATES].items():
        known |= {joined(leaf) for leaf, _ in leaves_of(record.keys.of_model(name), unpack(value))}
    for key in folder.leaves.keys() - known:
        if not key.startswith(f"{OWN}."):
            refusals.add("keys that the checkpoint did not have which this was converted from", key)
    refusals.raise_if_any(folder.path)
    return Incoming(
        metas=metas_of(found, metas["model"].aliases, record.num_ranks),
        tensors=found,
        state=text,
        step=record.global_step,
        epoch=record.epoch,
        num_ranks=record.num_ranks,
        about=record.about,
    )


def _meta(name: str, kind: Kind, where: Placed, num_ranks: int, alike: dict[Layout, Layout]) -> TensorMeta:
    dtype = name_of(where.tensor.dtype)
    assert dtype is not None
    shape = where.tensor.shape
    layout = Layout(shape, Boxes(shape, num_ranks, {at: box for at, box in enumerate(where.boxes) if not box.is_empty}))
    return TensorMeta(name, dtype, alike.setdefault(layout, layout), kind)


def _text(folder: DcpFolder, leaf: Leaf) -> bytes:
    tensor = folder.tensors.get(joined(leaf))
    if tensor is None:
        raise CheckpointDamaged(f"{folder.path} lacks {joined(leaf)}, which it was converted with")
    pieces: Sequence[DcpPiece] = tensor.pieces
    return b"".join(bytes(part) for piece in pieces for part in folder.contents_of(tensor, piece))
