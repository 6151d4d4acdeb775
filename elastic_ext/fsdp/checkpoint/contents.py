"""What goes into a checkpoint, and which rank writes which part of it. Pure; needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from elastic_ext.errors import CheckpointError
from elastic_ext.fsdp.layout import Box, Layout

from .format.json_text import ITEM_BYTES
from .format.metadata import Kind, StateMeta, TensorMeta

if TYPE_CHECKING:
    from elastic_ext.fsdp.state import LocalShard

__all__ = [
    "EXTRA_STATES",
    "GROUPS",
    "KINDS",
    "REGISTERED",
    "STATE_FILE",
    "VALUES",
    "Contents",
    "FileKind",
    "Inventory",
    "RankTensor",
    "meta_file",
    "meta_of",
    "own_prefix",
    "own_registered_prefix",
    "shard_file",
]


# --- what each rank holds, laid side by side, and which part of it each of them writes -------------------------------
# Pure, so that every rank comes to the same result from the same inventories, and nobody has to be told.

_LEAST_BYTES = 65536
"""The size up to which a tensor is not split between the ranks that have replicas of it, to be written."""
_OF_THE_FIRST: frozenset[Kind] = frozenset({"buffer", "scalar"})
"""Kinds of tensors whose replicas may differ, as running means do: the first rank that has one writes it."""


@dataclass(frozen=True, slots=True)
class RankTensor:
    """One tensor of a checkpoint, and the part of it that lies on one rank."""

    name: str
    dtype: str
    kind: Kind
    box: Box
    same_as: str | None = None
    """Where this is a further name of a tied tensor: the name under which it is saved; else None."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """The tensors of one kind that a rank holds for a checkpoint: names, dtypes and boxes, without the contents."""

    items: tuple[RankTensor, ...]

    def to_json(self) -> bytes:
        """The inventory as JSON; equal inventories give equal bytes."""
        rows = [
            [item.name, item.dtype, item.kind, item.box.shape, item.box.start, item.box.end, item.same_as]
            for item in self.items
        ]
        return json.dumps(rows, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Inventory:
        """The inventory that ``to_json`` gave on a rank of this run; it is trusted, not checked."""
        return cls(
            tuple(
                RankTensor(name, dtype, kind, Box(tuple(shape), tuple(start), tuple(end)), same_as)
                for name, dtype, kind, shape, start, end, same_as in json.loads(data)
            )
        )


def meta_of(inventories: Sequence[Inventory], *, is_of_one_model: bool = False) -> StateMeta:
    """The metadata of all ranks' tensors: which part of each a rank writes, so that each element is written once.

    CheckpointError where the ranks have different tensors of one name, or not all of one; and, if ``is_of_one_model``,
    where one rank's inventory lacks a name that another's has: of a sharded tensor it may hold nothing, but knows it.
    """
    num_ranks = len(inventories)
    if is_of_one_model:
        _check_names(inventories)
    found: dict[str, dict[int, RankTensor]] = {}
    aliases: dict[str, str] = {}
    for rank, inventory in enumerate(inventories):
        for item in inventory.items:
            if item.same_as is None:
                found.setdefault(item.name, {})[rank] = item
            else:
                aliases[item.name] = item.same_as
    tensors = {name: _tensor(name, items, num_ranks) for name, items in found.items()}
    return StateMeta(num_ranks=num_ranks, tensors=tensors, aliases=aliases)


def _check_names(inventories: Sequence[Inventory]) -> None:
    """CheckpointError where a rank's model lacks a tensor that another rank's has: it could never load that."""
    names = [{item.name for item in inventory.items} for inventory in inventories]
    for rank, own in enumerate(names):
        if own != names[0]:
            has, lacks = (0, rank) if names[0] - own else (rank, 0)
            unknown = sorted(names[has] - names[lacks])
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise CheckpointError(
                f"rank {has} has {unknown[0]}{more} in its model, and rank {lacks} has not; allowed: the same model on "
                "all ranks, however it is spread over them, so that each can load it. A pipeline of which each rank "
                "has made only its own stage cannot be saved"
            )


def _tensor(name: str, items: Mapping[int, RankTensor], num_ranks: int) -> TensorMeta:
    first_rank, first = next(iter(items.items()))
    for rank, item in items.items():
        if (item.dtype, item.kind, item.box.shape) != (first.dtype, first.kind, first.box.shape):
            raise CheckpointError(
                f"{name} is {_in_words(first)} on rank {first_rank} and {_in_words(item)} on rank {rank}; a checkpoint "
                "holds one tensor of each name, of one shape and dtype"
            )
    shape = first.box.shape
    boxes = [items[rank].box if rank in items else Box.empty(shape) for rank in range(num_ranks)]
    held = Layout(shape, tuple(boxes))
    if not held.covers():
        raise CheckpointError(f"the ranks do not have all of {name}: {held.fault(replicas=True)}")
    if first.kind in _OF_THE_FIRST:
        held = _without_replicas(held)
    least = _LEAST_BYTES // ITEM_BYTES[first.dtype]
    return TensorMeta(name=name, dtype=first.dtype, kind=first.kind, layout=held.shares(least=least, salt=name))


def _without_replicas(layout: Layout) -> Layout:
    boxes = [Box.empty(layout.shape)] * len(layout.boxes)
    for box, holders in layout.holders_of_boxes().items():
        boxes[holders[0]] = box
    return replace(layout, boxes=tuple(boxes))


def _in_words(item: RankTensor) -> str:
    return f"{item.kind} {item.dtype} {item.box.shape}"


# --- what goes into a checkpoint, and into which of its files --------------------------------------------------------

FileKind = Literal["model", "optim", "extra"]
KINDS: tuple[FileKind, ...] = ("model", "optim", "extra")
REGISTERED = "registered/"
"""The prefix of the names under which tensors that a script has registered are saved."""
STATE_FILE = "trainer_state.json"
GROUPS = "optimizer_groups"
EXTRA_STATES = "model_extra_states"
VALUES = "optimizer_values"
"""The key in STATE_FILE of all ranks' ``Contents.values``, merged; GROUPS and EXTRA_STATES are keys there too."""


def meta_file(kind: FileKind) -> str:
    """The name of the file that says which part of each tensor of a kind is in the file of which rank."""
    return f"{kind}_meta.json"


def shard_file(kind: FileKind, rank: int, num_ranks: int) -> str:
    """The name of the file with one rank's parts of the tensors of a kind."""
    return f"{kind}_param.{rank:05d}-{num_ranks:05d}.safetensors"


def own_prefix(rank: int) -> str:
    """The prefix under which a rank's own buffers are saved, where they differ between ranks."""
    return f"buffers/{rank}/"


def own_registered_prefix(rank: int) -> str:
    """The prefix, instead of ``REGISTERED``, of a rank's own registered tensors, where they differ between ranks."""
    return f"own_registered/{rank}/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """What one rank contributes to a checkpoint: its tensors, by the kind of file, and plain values."""

    model: Sequence[LocalShard]
    optim: Sequence[LocalShard] = ()
    extra: Sequence[LocalShard] = ()
    """Tensors besides the model and optimizers: registered, given by the caller, or of random generators."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """Plain values that are the same on all ranks; the first rank's are saved."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Plain values by name, such as optimizer state that is no tensor; those of all ranks are saved, merged."""

    def by_kind(self) -> Iterator[tuple[FileKind, Sequence[LocalShard]]]:
        yield "model", self.model
        yield "optim", self.optim
        yield "extra", self.extra

    def inventories(self) -> dict[FileKind, Inventory]:
        return {kind: Inventory(tuple(map(_item, held))) for kind, held in self.by_kind()}


def _item(held: LocalShard) -> RankTensor:
    return RankTensor(name=held.name, dtype=held.dtype, kind=held.kind, box=held.box, same_as=held.is_alias_of)
