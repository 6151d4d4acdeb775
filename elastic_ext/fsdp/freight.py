"""Freight: tensors that are to lie elsewhere, packed into buckets that ranks exchange one after the other. Pure.

Words: an *item* is a tensor with the layout that it has and the one that it shall have. A *bucket* is some items in a
row, whose elements all ranks exchange at once; its *load* is the memory that it takes on a rank while that lasts,
beside what the tensors take before and after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .layout import Layout, turn_of
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
    def _route(self) -> _Route:
        return _route(self.old, self.new, turn_of(self.name) % max(1, len(self.old.boxes)))

    @property
    def moves(self) -> Sequence[Move]:
        """Everything that a rank's memory of the new layout is filled with; nothing where its part stays the same."""
        return self._route.moves

    @property
    def num_sent(self) -> int:
        """Bytes between ranks."""
        return self._route.num_sent * self.item_bytes

    @cached_property
    def loads(self) -> list[int]:
        """In bytes, by rank: new memory, and what is sent and received, which lies in memory of its own."""
        return [load * self.item_bytes for load in self._route.loads]


@dataclass(frozen=True, slots=True)
class _Route:
    """What is the same of all tensors that go from one layout to another, counted in elements."""

    moves: tuple[Move, ...]
    num_sent: int
    loads: tuple[int, ...]


@lru_cache(maxsize=512)  # a model repeats its shapes, and its gradients and moments repeat them again
def _route(old: Layout, new: Layout, turn: int) -> _Route:
    stays = [old == new for old, new in zip(old.boxes, new.boxes, strict=True)]
    if all(stays):
        return _Route((), 0, (0,) * len(stays))
    found = moves(old, new, salt=turn, same_memory=False)
    made = tuple(move for move in found if not stays[move.target])
    loads = [0 if stay else box.num_elements for stay, box in zip(stays, new.boxes, strict=True)]
    num_sent = 0
    for move in made:
        if move.source != move.target:
            num_elements = move.num_elements
            num_sent += num_elements
            loads[move.source] += num_elements
            loads[move.target] += num_elements
    return _Route(made, num_sent, tuple(loads))


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
