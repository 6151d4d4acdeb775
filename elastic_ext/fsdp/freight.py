"""Freight: tensors that are to lie elsewhere, packed into buckets that ranks exchange one after the other. Pure.

Words: an *item* is a tensor with the layout that it has and the one that it shall have. A *bucket* is some items in a
row, whose elements all ranks exchange at once; its *load* is the memory that it takes on a rank while that lasts,
beside what the tensors take before and after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from .layout import Layout
from .moves import Move, moves

__all__ = ["Bucket", "Item", "buckets_of"]


@dataclass(frozen=True)
class Item:
    """A tensor that is to lie elsewhere."""

    name: str
    """Says whose turn it is to give what several ranks have."""
    old: Layout
    new: Layout
    item_bytes: int

    @cached_property
    def moves(self) -> list[Move]:
        """Everything that a rank's memory of the new layout is filled with; nothing where its part stays the same."""
        stays = [old == new for old, new in zip(self.old.boxes, self.new.boxes, strict=True)]
        if all(stays):
            return []
        found = moves(self.old, self.new, salt=self.name, same_memory=False)
        return [move for move in found if not stays[move.target]]

    @cached_property
    def num_sent(self) -> int:
        """Bytes between ranks."""
        return sum(move.num_elements for move in self.moves if move.source != move.target) * self.item_bytes

    @cached_property
    def loads(self) -> list[int]:
        """In bytes, by rank: new memory, and what is sent and received, which lies in memory of its own."""
        loads = [0 if old == new else new.num_elements for old, new in zip(self.old.boxes, self.new.boxes, strict=True)]
        for move in self.moves:
            if move.source != move.target:
                loads[move.source] += move.num_elements
                loads[move.target] += move.num_elements
        return [load * self.item_bytes for load in loads]


@dataclass(frozen=True)
class Bucket:
    """Some items in a row."""

    first: int
    items: Sequence[Item]

    @cached_property
    def load(self) -> int:
        """Bytes, on the rank that has the most."""
        return max(map(sum, zip(*(item.loads for item in self.items), strict=True)), default=0)

    @cached_property
    def num_sent(self) -> int:
        """Bytes between ranks; where it is 0, none has to talk to another."""
        return sum(item.num_sent for item in self.items)


def buckets_of(items: Sequence[Item], most_bytes: int) -> Iterator[Bucket]:
    """All items in order, in buckets whose load is ``most_bytes`` or less where it takes more than one item."""
    first = 0
    loads: list[int] = []
    for at, item in enumerate(items):
        grown = [before + more for before, more in zip(loads, item.loads, strict=True)] if loads else list(item.loads)
        if first < at and max(grown, default=0) > most_bytes:
            yield Bucket(first, items[first:at])
            first, grown = at, list(item.loads)
        loads = grown
    if first < len(items):
        yield Bucket(first, items[first:])
