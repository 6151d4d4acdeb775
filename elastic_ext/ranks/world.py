"""World: who trains together, as one rank sees it: a value, with another in its place after a change of members."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PeerName", "World"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerName:
    """A rank with the host and the process that it runs in, to be named in messages."""

    rank: int
    host: str
    pid: int
    seat: int
    """The number by which the files of that process are named (records/run_dir.py)."""

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The ranks that train together, by name, and which of them this process is.

    Members may come and go while processes live. Whoever can, asks ``Ranks.world`` each time. What has kept anything of
    a world has a method ``take_world(world)``, which it is told of another one by.
    """

    rank: int
    names: tuple[PeerName, ...]
    members: int = 0
    """The version of the membership plan by which these ranks came together while they trained; 0 where they have
    started so. Of two worlds of one size it tells which a measurement is of."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.names)

    @property
    def name(self) -> PeerName:
        """This rank's own name."""
        return self.names[self.rank]

    @property
    def is_first_here(self) -> bool:
        """Whether this rank is the first of those on its machine."""
        return all(name.host != self.name.host for name in self.names[: self.rank])

    @property
    def num_here(self) -> int:
        """The number of ranks on this rank's machine."""
        return sum(name.host == self.name.host for name in self.names)
