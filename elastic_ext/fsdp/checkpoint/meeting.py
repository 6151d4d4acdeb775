"""Meeting: what ranks tell one another when a save begins, so that they know what they hold together.

That is compared by digests. The whole of it goes round once, and again when it has changed on one of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elastic_ext.fsdp.state import Held, local_of
from elastic_ext.ranks.group import Ranks

from .collecting import ToSave
from .commit import checksum_of
from .contents import KINDS, Contents, FileKind
from .differing import Comparable, differing_names
from .inventory import Inventory, meta_of
from .memory import Part
from .meta import StateMeta
from .together import gather_or_raise

__all__ = ["Meeting", "Meetings", "Met"]


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What the ranks hold together, for as long as it stays the same."""

    digests: Sequence[str]
    """Of each rank's inventories."""
    metas: Mapping[FileKind, StateMeta]
    data: Mapping[FileKind, bytes]
    """The metadata as it is written."""


@dataclass(frozen=True, slots=True, eq=False)
class Met:
    """What a rank knows when all have met to save."""

    contents: Contents
    """This rank's."""
    parts: Mapping[FileKind, Sequence[Part]]
    """Of tensors, which this rank writes."""
    descriptions: Mapping[FileKind, bytes]
    """The metadata of all ranks' tensors."""
    values: Mapping[str, Any]
    """Of all ranks, as ``Contents.values``."""
    generation: str


class Meetings:
    """One rank's meetings with the others, which need not hear again what has not changed."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._agreed: _Agreed | None = None

    def of(self, what: ToSave) -> Meeting:
        """One about what is to be saved."""
        return Meeting(self, self._ranks, what)

    def agree(self, inventories: Mapping[FileKind, Inventory], digests: Sequence[str], name: str) -> _Agreed:
        """What the ranks hold together, with the same answer on every rank."""
        if self._agreed is None or self._agreed.digests != digests:
            self._agreed = None
            metas: dict[FileKind, StateMeta] = {}
            for kind in KINDS:
                own = inventories[kind].to_json()
                rows = self._ranks.gather(own, f"comparing what ranks hold for checkpoint {name}")
                metas[kind] = meta_of([Inventory.from_json(row) for row in rows], is_of_one_model=kind == "model")
            data = {kind: meta.to_json() for kind, meta in metas.items()}
            self._agreed = _Agreed(digests, metas, data)
        return self._agreed


class Meeting:
    """What one rank has to say, and to hear, when a save begins."""

    def __init__(self, meetings: Meetings, ranks: Ranks, what: ToSave) -> None:
        self._meetings = meetings
        self._ranks = ranks
        self._what = what
        self._comparable: Comparable | None = None  # where there are others
        self._contents: Contents
        self._inventories: Mapping[FileKind, Inventory]

    def begin(self) -> dict[str, Any]:
        """Collect what this rank has, as if ranks had the same buffers; what the others are to hear of it."""
        self._contents = self._what.collect()
        self._inventories = self._contents.inventories()
        if self._ranks.world_size > 1:
            self._comparable = Comparable(self._contents, self._ranks.rank)
        return {
            "digest": checksum_of(b"\n".join(self._inventories[kind].to_json() for kind in KINDS)),
            "values": dict(self._contents.values),
            "alike": None if self._comparable is None else self._comparable.digest,
            "generation": secrets.token_hex(8),  # the first rank's counts
        }

    def end(self, name: str, said: Sequence[Mapping[str, Any]]) -> Met:
        """What all ranks have together, by what each has ``said``."""
        digests = [str(each["digest"]) for each in said]
        if len({each["alike"] for each in said}) > 1:
            own = self._add_own(name)
            digests = [checksum_of(f"{digest} {own}".encode()) for digest in digests]
        agreed, rank = self._meetings.agree(self._inventories, digests, name), self._ranks.rank
        stepped = {_place_of(local_of(parameter)) for parameter in self._what.stepped}
        return Met(
            contents=self._contents,
            parts={
                kind: list(_parts(agreed.metas[kind], held, rank, stepped)) for kind, held in self._contents.by_kind()
            },
            descriptions=agreed.data,
            values={key: value for each in said for key, value in each["values"].items()},
            generation=str(said[0]["generation"]),
        )

    def _add_own(self, name: str) -> list[str]:
        """Save what ranks differ in of each of them; gives its names."""
        comparable = self._comparable
        assert comparable is not None
        doing = f"comparing what ranks have alike for checkpoint {name}"
        names = differing_names(gather_or_raise(self._ranks, lambda: dict(comparable.digests), doing))
        self._contents = comparable.contents_with(names)
        self._inventories = self._contents.inventories()
        return names


def _parts(meta: StateMeta, held: Sequence[Held], rank: int, stepped: Collection[int]) -> Iterator[Part]:
    for each in held:
        if each.is_alias_of is not None:
            continue
        part = meta.tensors[each.name].layout.boxes[rank]
        if not part.is_empty:
            is_stepped = each.kind == "like" or (each.kind == "parameter" and _place_of(each.tensor) in stepped)
            yield Part(each.name, each.dtype, each.tensor, each.box, part, is_stepped)


def _place_of(tensor: torch.Tensor) -> int:
    """Where its memory begins."""
    return tensor.untyped_storage().data_ptr()
