"""MembershipPlan: who trains, as one value; and the plans that follow from it when nodes join and leave. Pure.

Words: a *member* is a worker by its place in a plan. A *seat* is the number by which a worker's files are named; no two
living workers of a job share one. A *generation* is the workers' process groups from when they are formed until others
take their place: each has names of its own in the store in which ranks find each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from elastic_ext.records.json import JsonRecord

__all__ = ["JOINS", "LIVE", "LOSSES", "Member", "MembershipMode", "MembershipPlan", "NodeShare"]

_MOST_WORKERS = 4096  # of a node: more are in a damaged plan alone, and would fill the memory
JOINS = "ELASTIC_EXT_JOINS"
"""The variable by which an agent says which plan a worker is to join, by its version."""

LOSSES = "ELASTIC_EXT_LOSSES"
"""The variable by which an agent says with ``LIVE`` that workers that are left go on where others are lost."""
LIVE = "live"

MembershipMode = Literal["restart", "live"]
"""How the workers of a plan come to it: ``restart`` starts all of them; with ``live`` those that stay go on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeShare:
    """A node in a membership plan: its host, and which ranks run on it."""

    node_id: str
    host: str
    first_rank: int
    num_workers: int
    seats: tuple[int, ...] = ()
    """The seats of its workers, in the order of their ranks; empty where they are the ranks, as in a job that never
    changes, and in plans of earlier versions."""

    @property
    def ranks(self) -> range:
        """The ranks of the node's workers."""
        return range(self.first_rank, self.first_rank + self.num_workers)

    def seat_of(self, rank: int) -> int:
        """The seat of one of the node's workers."""
        return self.seats[rank - self.first_rank] if self.seats else rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A worker in a plan."""

    rank: int
    seat: int
    node_id: str
    host: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MembershipPlan(JsonRecord):
    """Which nodes the job runs on, in the order of their ranks; a version holds until there is a larger one."""

    version: int
    nodes: tuple[NodeShare, ...]
    reason: str
    time: float
    """When the plan was made, seconds since 1970."""
    mode: MembershipMode = "restart"
    generation: int = 0
    """The number of the process groups that the plan's workers form: a live plan has one more than the plan before."""
    store: str = ""
    """HOST:PORT of the store in which the workers of a live plan find each other, held by an agent; empty where they
    meet as torch has them."""
    num_seats: int = 0
    """How many seats have been given so far in this start of the job; the next worker that joins gets this number."""
    lost: tuple[int, ...] = ()
    """The seats of lost workers of earlier plans, where this plan lets the others go on without them: lost workers have
    failed, hang or are on a node that is gone, and answer nothing."""

    def check(self) -> None:
        """ValueError where ranks do not follow one another, or workers share a seat: nobody could train by that."""
        first = 0
        for node in self.nodes:
            if node.num_workers > _MOST_WORKERS:
                raise ValueError(
                    f"node {node.node_id} has {node.num_workers} workers; allowed: {_MOST_WORKERS} at most"
                )
            if node.num_workers < 1 or node.first_rank != first:
                raise ValueError(
                    f"node {node.node_id} has ranks from {node.first_rank}, {node.num_workers} of them; allowed: at "
                    f"least one, from {first}, as nodes follow one another"
                )
            if node.seats and len(node.seats) != node.num_workers:
                raise ValueError(f"node {node.node_id} has {node.num_workers} workers and {len(node.seats)} seats")
            first += node.num_workers
        seats = [member.seat for member in self.members]
        if len({*seats}) < len(seats):
            raise ValueError(f"two workers share a seat (the seats are {seats}); give each worker a seat of its own")

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes."""
        return sum(node.num_workers for node in self.nodes)

    @property
    def members(self) -> tuple[Member, ...]:
        """All workers, in the order of their ranks."""
        return tuple(
            Member(rank=rank, seat=node.seat_of(rank), node_id=node.node_id, host=node.host)
            for node in self.nodes
            for rank in node.ranks
        )

    def member_at(self, seat: int) -> Member | None:
        """The worker of a seat; None where the plan has none there."""
        return next((member for member in self.members if member.seat == seat), None)

    def has_members_of(self, other: MembershipPlan) -> bool:
        """Whether the same workers train by both plans, with the same ranks."""
        return [(each.rank, each.seat) for each in self.members] == [(each.rank, each.seat) for each in other.members]

    def at_version(self, version: int) -> MembershipPlan:
        """This plan with a later version, and with the generation that as many more live plans would have led to.

        So a plan that follows it gives its process groups names that no other plan's groups have had.
        """
        return replace(self, version=version, generation=self.generation + version - self.version)

    def changed(
        self,
        *,
        joined: Sequence[NodeShare] = (),
        left: Collection[str] = (),
        lost: Collection[int] = (),
        reason: str,
        time: float,
        store: str,
    ) -> MembershipPlan:
        """The live plan that follows this one: without the nodes ``left``, and with those that ``joined``.

        Workers that stay keep their order and seats; those that join come after them, in new seats. Workers in the
        seats ``lost`` are left out too, and so are nodes that have no others. ValueError where nobody stays, where a
        node that joins is in this plan already, or where a node that leaves or a seat that is lost is not in it.
        """
        known = {node.node_id for node in self.nodes}
        _refuse(sorted({*left} - known), "leave, and the plan does not have them", known)
        _refuse([each.node_id for each in joined if each.node_id in known], "join, and the plan has them", known)
        seats = [member.seat for member in self.members]
        if not {*lost} <= {*seats}:
            raise ValueError(f"workers in the seats {sorted(lost)} are to be lost; the plan has the seats {seats}")
        stayed = [_without(node, lost) for node in self.nodes if node.node_id not in left]
        stayed = [node for node in stayed if node.num_workers > 0]
        if not stayed and lost:
            raise ValueError("all workers of the plan are lost, and the state of training with them")
        if not stayed:
            raise ValueError(
                "all nodes of the plan would leave at once, and nobody could give the state of training to those that "
                "join; have some join first, and the others leave after that"
            )
        num_seats = max([self.num_seats, *(seat + 1 for seat in seats)])
        seated = []
        for node in joined:
            seated.append(replace(node, seats=tuple(range(num_seats, num_seats + node.num_workers))))
            num_seats += node.num_workers
        return MembershipPlan(
            version=self.version + 1,
            nodes=tuple(_in_a_row([*stayed, *seated])),
            reason=reason,
            time=time,
            mode="live",
            generation=self.generation + 1,
            store=store,
            num_seats=num_seats,
            lost=tuple(sorted(lost)),
        )


def _without(node: NodeShare, seats: Collection[int]) -> NodeShare:
    """A node without the workers in these seats; it may have none left."""
    kept = tuple(seat for seat in map(node.seat_of, node.ranks) if seat not in seats)
    return replace(node, num_workers=len(kept), seats=kept)


def _refuse(names: Sequence[str], what: str, known: Collection[str]) -> None:
    if names:
        raise ValueError(f"nodes {', '.join(names)} are to {what}; its nodes are {', '.join(sorted(known))}")


def _in_a_row(nodes: Iterable[NodeShare]) -> Iterable[NodeShare]:
    """The nodes with ranks that follow one another."""
    first = 0
    for node in nodes:
        yield replace(node, first_rank=first)
        first += node.num_workers
