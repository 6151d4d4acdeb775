"""Contents: what goes into a checkpoint, and into which of its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from .inventory import Inventory, Item

if TYPE_CHECKING:  # which needs torch: who only reads files asks for their names here
    from elastic_ext.fsdp.state import Held

__all__ = [
    "EXTRA_STATES",
    "GROUPS",
    "KINDS",
    "REGISTERED",
    "STATE_FILE",
    "VALUES",
    "Contents",
    "FileKind",
    "meta_file",
    "own_prefix",
    "own_registered_prefix",
    "shard_file",
]

FileKind = Literal["model", "optim", "extra"]
KINDS: tuple[FileKind, ...] = ("model", "optim", "extra")
REGISTERED = "registered/"
"""What the names of tensors that a script has registered begin with."""
STATE_FILE = "trainer_state.json"
GROUPS = "optimizer_groups"
EXTRA_STATES = "model_extra_states"
VALUES = "optimizer_values"
"""Keys of that file; under the last one is what ``Contents.values`` of all ranks came to."""


def meta_file(kind: FileKind) -> str:
    """The file that says where the tensors of a kind lie."""
    return f"{kind}_meta.json"


def shard_file(kind: FileKind, rank: int, num_ranks: int) -> str:
    """The file of one rank's part of them."""
    return f"{kind}_param.{rank:05d}-{num_ranks:05d}.safetensors"


def own_prefix(rank: int) -> str:
    """What the names of a rank's own buffers begin with, where ranks had different ones."""
    return f"buffers/{rank}/"


def own_registered_prefix(rank: int) -> str:
    """The same of what is registered, in the place of ``REGISTERED``."""
    return f"own_registered/{rank}/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """What one rank has for a checkpoint."""

    model: Sequence[Held]
    optim: Sequence[Held] = ()
    extra: Sequence[Held] = ()
    """Registered and given tensors, and the state of random generators."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """Plain values, the same on all ranks: the first one's are kept."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Plain values by names, of which a rank may have some."""

    def by_kind(self) -> Iterator[tuple[FileKind, Sequence[Held]]]:
        yield "model", self.model
        yield "optim", self.optim
        yield "extra", self.extra

    def inventories(self) -> dict[FileKind, Inventory]:
        return {kind: Inventory(tuple(map(_item, held))) for kind, held in self.by_kind()}


def _item(held: Held) -> Item:
    return Item(name=held.name, dtype=held.dtype, kind=held.kind, box=held.box, same_as=held.is_alias_of)
