"""The tensors that a change moves, packed into buckets that ranks exchange one after the other. Pure.

Words: an *item* is a tensor with the layout that it has and the one that it shall have. A *bucket* is some items in a
row, whose elements all ranks exchange at once. What is sent and received lies in memory that is taken once, for all
buckets; the new memory of a bucket is there beside the old one until the bucket has been exchanged. The
*extra* bytes of a change are what a holder has for a while beyond the larger of what it has before and after. Holders
are ranks, as a rule; exchange.py knows which rank has whose memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add, sub

from elastic_ext.fsdp.layout import Layout, turn_of
from elastic_ext.fsdp.moves import Move, moves

__all__ = ["Bucket", "BucketItem", "BucketPlan", "Router"]

_EXCHANGED = 3  # quarters of what a bucket may take; the rest is for what is there twice


@dataclass(frozen=True, slots=True)
class _Route:
    """The moves from one layout to another, for all tensors alike, with amounts by holder, counted in elements."""

    moves: tuple[Move, ...]
    num_sent: int
    exchanged: tuple[int, ...]
    taken: tuple[int, ...]
    given_back: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BucketItem:
    """A tensor that a change moves."""

    name: str
    old: Layout
    new: Layout
    item_bytes: int
    _route: _Route

    @property
    def moves(self) -> Sequence[Move]:
        """All moves that fill holders' memory of the new layout; none into one whose part stays the same."""
        return self._route.moves

    @property
    def sent_bytes(self) -> int:
        """Bytes of this tensor that go from one holder to another."""
        return self._route.num_sent * self.item_bytes

    @property
    def exchanged_bytes(self) -> list[int]:
        """Bytes of this tensor that each holder sends and receives."""
        return [number * self.item_bytes for number in self._route.exchanged]

    @property
    def taken_bytes(self) -> list[int]:
        """Bytes of new memory that this tensor takes, by holder: none where a holder's part stays the same."""
        return [number * self.item_bytes for number in self._route.taken]

    @property
    def freed_bytes(self) -> list[int]:
        """Bytes of old memory that this tensor gives back, by holder."""
        return [number * self.item_bytes for number in self._route.given_back]


class Router:
    """Finds the moves of tensors, once for those that are alike: as most of a model and its state are."""

    def __init__(self) -> None:
        self._known: dict[tuple[Layout, Layout, int], _Route] = {}

    def item(self, name: str, old: Layout, new: Layout, item_bytes: int) -> BucketItem:
        """The item of a tensor; its name says whose turn it is to give what several ranks have."""
        key = old, new, turn_of(name) % max(1, len(old.boxes))
        if key not in self._known:
            self._known[key] = _route(*key)
        return BucketItem(name, old, new, item_bytes, self._known[key])


def _route(old: Layout, new: Layout, turn: int) -> _Route:
    stays = [before == after for before, after in zip(old.boxes, new.boxes, strict=True)]
    nothing = (0,) * len(stays)
    if all(stays):
        return _Route((), 0, nothing, nothing, nothing)
    found = moves(old, new, salt=turn, same_memory=False)
    made = tuple(move for move in found if not stays[move.target])
    exchanged = [0] * len(stays)
    for move in made:
        if move.source != move.target:
            exchanged[move.source] += move.num_elements
            exchanged[move.target] += move.num_elements
    taken, given_back = (
        tuple(0 if stay else box.num_elements for stay, box in zip(stays, layout.boxes, strict=True))
        for layout in (new, old)
    )
    return _Route(made, sum(exchanged) // 2, tuple(exchanged), taken, given_back)


@dataclass(frozen=True)
class Bucket:
    """Some items in a row, which all ranks exchange at once."""

    first: int
    items: Sequence[BucketItem]

    @cached_property
    def sent_bytes(self) -> int:
        """Bytes that go from one holder to another; where it is 0, no rank has to talk to another."""
        return sum(item.sent_bytes for item in self.items)

    @cached_property
    def exchanged_bytes(self) -> list[int]:
        """Bytes of this bucket that each holder sends and receives."""
        return _summed([item.exchanged_bytes for item in self.items])


class BucketPlan:
    """All items of a change in order, in buckets of at most ``most_bytes`` where they have more than one item."""

    def __init__(self, items: Sequence[BucketItem], most_bytes: int) -> None:
        self.items = items
        self.buckets = list(_buckets_of(items, most_bytes))

    @cached_property
    def staged_bytes(self) -> list[int]:
        """Bytes of the memory for what is sent and received, by holder: enough for each bucket."""
        return [max(sizes) for sizes in zip(*(bucket.exchanged_bytes for bucket in self.buckets), strict=True)]

    @cached_property
    def sent_bytes(self) -> int:
        """Bytes that go from one holder to another: no element twice to one, and none that it has."""
        return sum(bucket.sent_bytes for bucket in self.buckets)

    @cached_property
    def extra_bytes(self) -> int:
        """Bytes that a holder has for a while beyond the larger of before and after: the most of any holder."""
        before = now = [0] * len(self.staged_bytes)  # beside what stays, and what there is to be given back
        peak = now
        for bucket in self.buckets:
            now = list(map(add, now, _summed([item.taken_bytes for item in bucket.items])))
            peak = list(map(max, peak, now))
            now = list(map(sub, now, _summed([item.freed_bytes for item in bucket.items])))
        over = (most - max(begins, ends) for most, begins, ends in zip(peak, before, now, strict=True))
        return max(map(add, over, self.staged_bytes), default=0)


def _buckets_of(items: Sequence[BucketItem], most_bytes: int) -> Iterator[Bucket]:
    first = 0
    exchanged: list[int] = []
    doubled: list[int] = []
    for at, item in enumerate(items):
        own = item.exchanged_bytes, list(map(min, item.taken_bytes, item.freed_bytes))
        grown = [list(map(add, before, more)) for before, more in zip((exchanged, doubled), own, strict=True)]
        if first < at and (
            max(grown[0], default=0) > most_bytes * _EXCHANGED // 4
            or max(grown[1], default=0) > most_bytes - most_bytes * _EXCHANGED // 4
        ):
            yield Bucket(first, items[first:at])
            first = at
        exchanged, doubled = grown if first < at else own
    if first < len(items):
        yield Bucket(first, items[first:])


def _summed(by_item: Sequence[Sequence[int]]) -> list[int]:
    return [sum(of_rank) for of_rank in zip(*by_item, strict=True)]
