"""What a torch.distributed.checkpoint folder holds, as a checkpoint of ours: folders that were converted from one, and
folders that others saved.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from elastic_ext.errors import CheckpointDamaged, CheckpointError
from elastic_ext.fsdp.checkpoint.contents import EXTRA_STATES, GROUPS, KINDS, VALUES, FileKind
from elastic_ext.fsdp.checkpoint.format.metadata import Kind, StateMeta, TensorMeta
from elastic_ext.fsdp.layout import Box, Boxes, Layout
from elastic_ext.fsdp.pickled_values import read_plain
from elastic_ext.fsdp.value_encoding import Plain, name_of, pack, unpack

from .dcp_folder import DcpFolder, DcpPiece, DcpTensor
from .dcp_plan import (
    METAS,
    OWN,
    RECORD,
    STATE,
    ConversionRecord,
    Keys,
    Leaf,
    Outgoing,
    Refusals,
    joined,
    leaves_of,
    owner_and_key,
)

__all__ = ["Incoming", "Placed", "Tensors", "metas_of", "of_foreign", "of_record", "placed", "record_in"]


# --- what a folder of torch.distributed.checkpoint holds, as a checkpoint is to hold it ------------------------------
# Here is what all such folders have in common, and those that were converted from a checkpoint, which have its own word
# on everything; what others hold is made out below.

Tensors = Mapping[FileKind, Mapping[str, "tuple[Kind, Placed]"]]
"""By kind of file and by name in the checkpoint: what each tensor is, and where its parts come from."""


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A DCP tensor as a checkpoint is to hold it: the box in each rank's file, and the pieces that make up each box."""

    tensor: DcpTensor
    boxes: tuple[Box, ...]
    pieces: tuple[tuple[DcpPiece, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Incoming:
    """A checkpoint that is to be written from a DCP folder."""

    metas: Mapping[FileKind, StateMeta]
    tensors: Tensors
    state: bytes
    """The checkpoint's plain values, as JSON."""
    step: int
    epoch: int
    num_ranks: int
    about: Mapping[str, Any]


def placed(tensor: DcpTensor, refusals: Refusals) -> Placed:
    """Where to put a DCP tensor: in one rank's file if its pieces are runs of elements, else each in its own rank's."""
    boxes = [
        Box.block(tensor.shape, piece.offsets, tuple(map(int.__add__, piece.offsets, piece.sizes)))
        for piece in tensor.pieces
    ]
    fault = Layout(tensor.shape, tuple(boxes)).fault()
    if fault is not None:
        refusals.add(f"tensors whose pieces overlap or leave gaps ({fault})", tensor.key)
    if name_of(tensor.dtype) is None:
        refusals.add(f"tensors of {tensor.dtype}", tensor.key)
    if all(box.is_flat for box in boxes):
        in_order = sorted(range(len(boxes)), key=lambda place: boxes[place].start)
        return Placed(tensor, (Box.whole(tensor.shape),), (tuple(tensor.pieces[place] for place in in_order),))
    return Placed(tensor, tuple(boxes), tuple((piece,) for piece in tensor.pieces))


def metas_of(tensors: Tensors, aliases: Mapping[str, str], num_ranks: int) -> dict[FileKind, StateMeta]:
    """The metadata of a checkpoint's tensors, by kind; ``aliases`` are further names of the model's tied tensors."""
    metas: dict[FileKind, StateMeta] = {}
    alike: dict[Layout, Layout] = {}  # equal ones are one object
    for kind in KINDS:
        described = {name: _meta(name, of, where, num_ranks, alike) for name, (of, where) in tensors[kind].items()}
        metas[kind] = StateMeta(num_ranks, described, dict(aliases) if kind == "model" else {})
    return metas


def record_in(folder: DcpFolder) -> ConversionRecord | None:
    """The record that ``convert_to_dcp`` put into a folder, None where the folder is not a converted checkpoint."""
    key = joined(RECORD)
    if key not in folder.tensors:
        return None
    return ConversionRecord.from_json(_text(folder, RECORD), where=f"{folder.path}: {key}")


def of_record(folder: DcpFolder, record: ConversionRecord) -> Incoming:
    """The checkpoint that a DCP folder was converted from, as it was, but for which tensor is in which rank's file."""
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
            refusals.add("keys that were not in the checkpoint from which this folder was converted", key)
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


# --- what a folder of torch.distributed.checkpoint holds that was saved by a training with torch's own means ---------
# The model is what stands under one key, the optimizers what ``get_optimizer_state_dict`` gave under another, flattened
# or not. All else becomes what ``ShardCheckpointer.load`` gives as ``extra``.

_EXTRA = "extra"  # as ShardCheckpointer calls it
_EXTRA_STATE = "_extra_state"
_PLACES = "param_groups."
_STATE = "state."
_NEEDS_CODE = "values that torch does not load with weights_only, since loading them could run any code"


def of_foreign(
    folder: DcpFolder, *, keys: Keys, step: int, optimizers: Sequence[str], tied: Sequence[tuple[str, str]]
) -> Incoming:
    """A checkpoint of what others saved into a DCP folder; CheckpointError lists all that cannot be converted.

    ``optimizers`` are the classes that a trainer is to have. ``tied`` are names of one tensor, two by two.
    """
    return _Foreign(folder, keys, tied).incoming(step, optimizers)


class _Foreign:
    def __init__(self, folder: DcpFolder, keys: Keys, tied: Sequence[tuple[str, str]]) -> None:
        self._folder = folder
        self._refusals = Refusals()
        self._prefix = f"{keys.model}." if keys.model else ""
        optim = f"{keys.optim}."
        every = sorted(folder.leaves)
        self._of_optim = {key.removeprefix(optim): key for key in every if key.startswith(optim)}
        left = [key for key in every if not key.startswith(optim)]
        is_whole = not keys.model
        self._of_model = {
            key.removeprefix(self._prefix): key
            for key in left
            if key.startswith(self._prefix) and not (is_whole and key in folder.values)
        }
        self._others = [key for key in left if key.removeprefix(self._prefix) not in self._of_model]
        self._names = {name for name, key in self._of_model.items() if key in folder.tensors}
        if not self._names:
            tops = ", ".join(sorted({key.partition(".")[0] for key in every}))
            raise CheckpointError(
                f"{folder.path} holds no tensors under {keys.model!r}; its keys begin with {tops}: say which is the "
                "model's with model_key (--model-key)"
            )
        self._own = _own_names(tied, self._names, folder, self._of_model)
        """By each name of a tied tensor, the one name under which the checkpoint keeps it."""

    def incoming(self, step: int, optimizers: Sequence[str]) -> Incoming:
        groups = self._groups()
        if groups and not optimizers:
            raise CheckpointError(
                f"{self._folder.path} holds the state of optimizers, not their classes; name them with optimizers "
                '(--optimizer), such as ["AdamW"]'
            )
        if optimizers and not groups:
            raise CheckpointError(
                f"{self._folder.path} holds no groups of optimizers, and optimizers (--optimizer) names "
                f"{optimizers[0]}; leave it out"
            )
        trained = {name for group in groups for name in group["params"]}
        tensors: dict[FileKind, dict[str, tuple[Kind, Placed]]] = {
            "model": self._model(trained, is_known=bool(groups)),
            "optim": {},
            "extra": {},
        }
        values = self._state_of_parameters(tensors["optim"])
        extra = self._extra(tensors["extra"])
        of_classes = [{"class": name, "groups": groups if place == 0 else []} for place, name in enumerate(optimizers)]
        state = {GROUPS: of_classes, VALUES: values, EXTRA_STATES: self._extra_states(), _EXTRA: extra}
        self._refusals.raise_if_any(self._folder.path)
        of_all = (where for of_kind in tensors.values() for _, where in of_kind.values())
        num_ranks = max(len(where.boxes) for where in of_all)
        aliases = {name: own for name, own in self._own.items() if name != own}
        return Incoming(
            metas=metas_of(tensors, aliases, num_ranks),
            tensors=tensors,
            state=json.dumps(state, allow_nan=False).encode(),
            step=step,
            epoch=0,
            num_ranks=num_ranks,
            about={},
        )

    # ---- the model ----

    def _model(self, trained: set[str], *, is_known: bool) -> dict[str, tuple[Kind, Placed]]:
        found: dict[str, tuple[Kind, Placed]] = {}
        for name in sorted(self._names):
            if self._own.get(name, name) != name:
                continue
            if _EXTRA_STATE in name.rpartition(".")[2]:
                self._refusals.add("extra states of modules that are tensors", name)
            kind: Kind = "parameter" if name in trained or not is_known else "buffer"
            found[name] = kind, placed(self._tensor(name), self._refusals)
        return found

    def _extra_states(self) -> Plain:
        """The extra states of modules, packed, by the names that ``state_dict()`` has for them."""
        values: list[tuple[tuple[str | int, ...], object]] = []
        for name, key in self._of_model.items():
            if key not in self._folder.values:
                continue
            leaf = self._folder.leaves[key]
            own = leaf[1:] if self._prefix and len(leaf) > 1 else (name,)
            if not str(own[0]).endswith(_EXTRA_STATE):
                self._refusals.add("values of the model that are neither tensors nor extra states of modules", key)
                continue
            values.append((own, self._value(key)))
        return {str(name): self._packed(value, str(name)) for name, value in _nested(values).items()}

    def _tensor(self, name: str) -> DcpTensor:
        return self._folder.tensors[self._of_model[name]]

    # ---- optimizers ----

    def _state_of_parameters(self, found: dict[str, tuple[Kind, Placed]]) -> dict[str, Plain]:
        """Put the tensors of optimizer state into ``found``; gives its other values by name, packed."""
        values: dict[str, Plain] = {}
        for rest, key in self._of_optim.items():
            if rest.startswith(_PLACES):
                continue
            split = owner_and_key(rest.removeprefix(_STATE), self._names, ".") if rest.startswith(_STATE) else None
            if split is None or "." in split[1]:
                self._refusals.add("optimizer state that belongs to no parameter of the model, or that is nested", key)
                continue
            owner = self._own.get(split[0], split[0])
            name = f"{owner}/{split[1]}"
            tensor = self._folder.tensors.get(key)
            if tensor is None:
                values[name] = self._packed(self._value(key), name)
            else:
                kind = _kind_of_state(split[1], tensor.shape, self._tensor(owner).shape)
                found[name] = kind, placed(tensor, self._refusals)
        return values

    def _groups(self) -> list[dict[str, Any]]:
        """The optimizers' parameter groups, each with the names of its parameters and its values, packed."""
        parts = {rest.removeprefix(_PLACES): key for rest, key in self._of_optim.items() if rest.startswith(_PLACES)}
        if any(rest.endswith(".params") and rest.partition(".")[0].isdecimal() for rest in parts):
            return self._numbered_groups(parts)
        return self._groups_by_parameter(parts)

    def _numbered_groups(self, parts: Mapping[str, str]) -> list[dict[str, Any]]:
        by_number: dict[int, dict[str, Any]] = {}
        for rest, key in parts.items():
            number, _, name = rest.partition(".")
            by_number.setdefault(int(number), {})[name] = self._group_value(key)
        groups = []
        for place, values in sorted(by_number.items()):
            names = [self._own.get(name, name) for name in values.pop("params", [])]
            for strange in set(names) - self._names:
                self._refusals.add("parameters of optimizers that the model does not have", strange)
            packed = {name: self._packed(value, f"group {place}: {name}") for name, value in values.items()}
            groups.append({"params": names, "values": packed})
        return groups

    def _groups_by_parameter(self, parts: Mapping[str, str]) -> list[dict[str, Any]]:
        """The groups in a flattened optimizer state dict, where parameters of equal values make up one group."""
        by_parameter: dict[str, dict[str, Plain]] = {}
        for rest, key in parts.items():
            split = owner_and_key(rest, self._names, ".")
            if split is None:
                self._refusals.add("parameters of optimizers that the model does not have", key)
                continue
            owner = self._own.get(split[0], split[0])
            by_parameter.setdefault(owner, {})[split[1]] = self._packed(self._group_value(key), key)
        groups: dict[str, dict[str, Any]] = {}
        for name, values in by_parameter.items():
            group = groups.setdefault(json.dumps(values, sort_keys=True), {"params": [], "values": values})
            group["params"].append(name)
        return list(groups.values())

    def _group_value(self, key: str) -> object:
        tensor = self._folder.tensors.get(key)
        if tensor is None:
            return self._value(key)
        if tensor.shape != () and set(tensor.shape) != {1}:
            self._refusals.add("values of groups that are tensors of several elements", key)
            return None
        if [(any(piece.offsets), piece.sizes) for piece in tensor.pieces] != [(False, tensor.shape)]:
            self._refusals.add("values of groups of which the folder does not hold one whole piece", key)
            return None
        data = bytearray(b"".join(bytes(part) for part in self._folder.contents_of(tensor, tensor.pieces[0])))
        return torch.frombuffer(data, dtype=torch.uint8).view(tensor.dtype).item()

    # ---- all else ----

    def _extra(self, found: dict[str, tuple[Kind, Placed]]) -> Plain:
        """Put all other tensors of the folder into ``found``; gives its other values, with stand-ins for tensors."""
        values: list[tuple[tuple[str | int, ...], object]] = []
        for key in self._others:
            leaf, tensor = self._folder.leaves[key], self._folder.tensors.get(key)
            if tensor is None:
                values.append((leaf, self._value(key)))
            else:
                found["/".join([_EXTRA, *map(str, leaf)])] = "buffer", placed(tensor, self._refusals)
                values.append((leaf, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")))
        if not values:
            return None
        named: dict[str, torch.Tensor] = {}
        packed = self._packed(_nested(values), _EXTRA, named)
        for name in named.keys() ^ found.keys():
            self._refusals.add("tensors inside of saved values that are no tensors", name)
        return packed

    def _value(self, key: str) -> object:
        try:
            return self._folder.value(key)
        except CheckpointDamaged:
            raise
        except CheckpointError:
            self._refusals.add(_NEEDS_CODE, key)
            return None

    def _packed(self, value: object, where: str, tensors: dict[str, torch.Tensor] | None = None) -> Plain:
        try:
            return pack(value, where, tensors)
        except TypeError as error:
            self._refusals.add("values that a checkpoint cannot hold without pickle", str(error))
            return None


def _kind_of_state(key: str, shape: tuple[int, ...], of_parameter: tuple[int, ...]) -> Kind:
    """The kind of a tensor of optimizer state, by its key, its shape and its parameter's shape."""
    if key == "step" or (not shape and of_parameter):
        return "scalar" if not shape else "own"
    return "like" if shape == of_parameter else "own"


def _nested(values: Iterable[tuple[tuple[str | int, ...], object]]) -> dict[str | int, Any]:
    """Nested dicts and lists, put together from values, each with its path."""
    root: dict[str | int, Any] = {}
    for leaf, value in values:
        holder = root
        for step in leaf[:-1]:
            holder = holder.setdefault(step, _Holder())
        holder[leaf[-1]] = value
    return {key: _with_lists(value) for key, value in root.items()}


class _Holder(dict[str | int, Any]):
    """A dict or a list that ``_nested`` is putting together; its own class tells it from dicts that are values."""


def _with_lists(value: Any) -> Any:
    if not isinstance(value, _Holder):
        return value
    inner = {key: _with_lists(one) for key, one in value.items()}
    if set(inner) == set(range(len(inner))):
        return [inner[number] for number in range(len(inner))]
    return {str(key): one for key, one in inner.items()}


def _own_names(
    tied: Sequence[tuple[str, str]], names: set[str], folder: DcpFolder, of_model: Mapping[str, str]
) -> dict[str, str]:
    """By each name in ``tied``, the one name that its tensor is kept under; CheckpointError where contents differ."""
    sets: dict[str, set[str]] = {}
    for pair in tied:
        strange = sorted(set(pair) - names)
        if strange:
            raise CheckpointError(f"tied (--tied) names {', '.join(strange)}, and {folder.path} has no such tensor")
        together = set().union(*(sets.get(name, {name}) for name in pair))
        for name in sorted(together):
            sets[name] = together
    own = {name: min(together) for name, together in sets.items()}
    digests = {name: _digest(folder, folder.tensors[of_model[name]]) for name in own}
    for name, first in own.items():
        if digests[name] != digests[first]:
            raise CheckpointError(
                f"tied (--tied) says that {name} and {first} are one tensor, and {folder.path} has two different ones; "
                "leave that pair out"
            )
    return own


def _digest(folder: DcpFolder, tensor: DcpTensor) -> tuple[object, ...]:
    """A digest of a DCP tensor: equal for tensors of equal bits that were cut into equal pieces."""
    digest = xxhash.xxh3_128()
    for piece in tensor.pieces:
        digest.update(repr((piece.offsets, piece.sizes)).encode())
        for part in folder.contents_of(tensor, piece):
            digest.update(part)
    return tensor.dtype, tensor.shape, digest.hexdigest()
