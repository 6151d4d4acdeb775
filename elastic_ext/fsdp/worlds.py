"""Worlds: the ranks that train before and after a change of members, and where tensors lie on all of them. Pure.

Words: a *holder* is a process in either world. Holders are numbered: those of the old world by their rank there, then
those who come. A holder *stays*, *leaves* or *comes*; who comes has nothing of a tensor before, who leaves nothing
after. What leaves is moved among the ranks of the old world, to a layout *between*; then what comes is moved from there
among the ranks of the new one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from .layout import Box, Layout
from .plan import Degrees, Layouts, over_holders

__all__ = ["LayoutsBetween", "ThreeLayouts", "Worlds"]


@dataclass(frozen=True, slots=True)
class Worlds:
    """The old and the new rank of each holder: None where it has none."""

    old: tuple[int | None, ...]
    """The rank of each holder in the old world."""
    new: tuple[int | None, ...]
    """The rank of each holder in the new world: who stays keeps the order, and who comes follows."""
    num_local: tuple[int, int]
    """How many ranks share a machine, in the old and in the new world."""

    def __post_init__(self) -> None:
        if not self.old or len(self.old) != len(self.new):
            raise ValueError(
                f"holders have {len(self.old)} old and {len(self.new)} new ranks; give one of each to each"
            )
        in_order = [rank for rank in self.new if rank is not None]
        if self.old != (*range(self.num_old), *(None,) * (len(self.old) - self.num_old)):
            raise ValueError(f"the old ranks are {self.old}; allowed: 0, 1 and so on, then None for who comes")
        if in_order != list(range(self.num_new)) or None in self.new[self.num_old :]:
            raise ValueError(f"the new ranks are {self.new}; allowed: 0, 1 and so on in order, None for who leaves")
        if not self.survivors:
            raise ValueError(
                "no rank of the old world stays, so nobody could give its state to the new one; "
                "have ranks join first, and the old ones leave after that"
            )
        if min(self.num_local) < 1:
            raise ValueError(f"num_local is {self.num_local}; allowed: integers >= 1")

    @classmethod
    def unchanged(cls, num_ranks: int, num_local: int) -> Worlds:
        """The worlds of a change in which nobody leaves or comes."""
        ranks = tuple(range(num_ranks))
        return cls(ranks, ranks, (num_local, num_local))

    @classmethod
    def between(cls, old: Sequence[Hashable], new: Sequence[Hashable], *, num_local: tuple[int, int]) -> Worlds:
        """The worlds of two lists of processes, each in the order of ranks; a process has one name in both.

        ValueError where those who stay do not keep their order, or do not come first.
        """
        if len({*old}) < len(old) or len({*new}) < len(new):
            raise ValueError(f"a process is named twice in {list(old)} or in {list(new)}; each has one rank in a world")
        survivors = [each for each in old if each in new]
        comers = [each for each in new if each not in old]
        if list(new) != [*survivors, *comers]:
            raise ValueError(
                f"the new world is {list(new)}; allowed: {[*survivors, *comers]}, in which who stays keeps "
                "the order and who comes follows"
            )
        rank_of = {each: rank for rank, each in enumerate(new)}
        return cls(
            (*range(len(old)), *(None,) * len(comers)),
            tuple(rank_of.get(each) for each in (*old, *comers)),
            num_local,
        )

    @property
    def num_old(self) -> int:
        """How many ranks the old world has."""
        return sum(rank is not None for rank in self.old)

    @property
    def num_new(self) -> int:
        """How many ranks the new world has."""
        return sum(rank is not None for rank in self.new)

    @property
    def survivors(self) -> tuple[int, ...]:
        """The holders that are in both worlds."""
        return tuple(at for at in range(self.num_old) if self.new[at] is not None)

    @property
    def has_leavers(self) -> bool:
        """Whether some rank of the old world is not in the new one."""
        return len(self.survivors) < self.num_old

    @property
    def has_comers(self) -> bool:
        """Whether some rank of the new world was not in the old one."""
        return self.num_old < len(self.old)

    @property
    def is_same(self) -> bool:
        """Whether nobody leaves or comes."""
        return not (self.has_leavers or self.has_comers)


@dataclass(frozen=True, slots=True)
class ThreeLayouts:
    """Where a tensor lies, by holder: before, between (who leaves has given), and after."""

    old: Layout
    between: Layout
    new: Layout


class LayoutsBetween:
    """Layouts of tensors over the holders of two worlds, each worked out once."""

    def __init__(self, worlds: Worlds, before: Degrees, after: Degrees) -> None:
        self._worlds = worlds
        self._old, self._new = Layouts(before, worlds.old), Layouts(after, worlds.new)
        self._survivors = _numbered(worlds)
        self._between = Layouts(_degrees_between(before, after, len(worlds.survivors)), self._survivors)

    def of(self, shape: tuple[int, ...], dim: int = 0, *, old: Layout | None = None) -> ThreeLayouts:
        """The layouts of a tensor that is cut along ``dim``; ``old`` is where it really lies, if that is known."""
        return self._three(old or self._old.of(shape, dim), self._between.of(shape, dim), self._new.of(shape, dim))

    def old(self, shape: tuple[int, ...], dim: int = 0) -> Layout:
        """Where a tensor that is cut along ``dim`` lies by the old degrees."""
        return self._old.of(shape, dim)

    def of_copies(self, shape: tuple[int, ...], *, of_first: bool = False) -> ThreeLayouts:
        """The layouts of a tensor that each rank has whole; with ``of_first`` all take that of the first old rank."""
        copies = Layout(shape, (Box.whole(shape),) * len(self._worlds.old))
        old = [rank if rank == 0 or not of_first else None for rank in self._worlds.old]
        return self._three(*(over_holders(copies, ranks) for ranks in (old, self._survivors, self._worlds.new)))

    def _three(self, old: Layout, between: Layout, new: Layout) -> ThreeLayouts:
        if not self._worlds.has_leavers:
            between = old
        elif not self._worlds.has_comers:
            between = new
        return ThreeLayouts(old, between, new)


def _numbered(worlds: Worlds) -> tuple[int | None, ...]:
    """Each holder's number among the survivors; None for the others."""
    number_of = {holder: number for number, holder in enumerate(worlds.survivors)}
    return tuple(number_of.get(holder) for holder in range(len(worlds.old)))


def _degrees_between(before: Degrees, after: Degrees, num_survivors: int) -> Degrees:
    """Degrees on the survivors alone, none of whom holds more than before or after, as far as their number allows."""
    shard = min(before.shard, after.shard)
    if num_survivors % shard:
        shard = num_survivors
    return Degrees(num_survivors // shard, shard)
