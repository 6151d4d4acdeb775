"""Membership: what the nodes that have met settle among them before workers start: pure.

Every node says the same things of itself, hears all, and comes to the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastic_ext.records.agent import MembershipPlan, NodeShare

from .verdicts import Counted, count

__all__ = ["NodeWords", "Settled", "settle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeWords:
    """What one node says of itself as it meets the others."""

    node_id: str
    host: str
    num_workers: int
    num_failures: int
    """That it has counted so far."""
    has_failed: bool
    """Whether the round before has ended with a failure of its workers."""
    is_finished: bool
    """Whether all of its workers have come to their end, and well."""
    version: int
    """Of its membership plan; 0 before its first."""
    nodes: tuple[str, ...]
    """Those of that plan."""

    def to_row(self) -> dict[str, Any]:
        """As JSON's values."""
        return asdict(self)

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> NodeWords:
        """What ``to_row`` gave, and JSON has carried."""
        return cls(**{**row, "nodes": tuple(row["nodes"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """What follows, for all of them."""

    plan: MembershipPlan
    num_failures: int
    is_finished: bool
    """Whether all that is to be done was done as they met."""
    is_old: bool
    """Whether any of them has worked before: who has not, joins a job under way."""


def settle(words: Sequence[NodeWords], *, max_restarts: int, time: float) -> Settled:
    """What follows from what nodes say, in the order of their places."""
    newest = max(words, key=lambda each: each.version)
    now = [each.node_id for each in words]
    lost = [node for node in newest.nodes if node not in now]
    joined = [node for node in now if node not in newest.nodes]
    has_failed = any(each.has_failed for each in words)
    counted = [Counted(num_failures=each.num_failures, has_failed=each.has_failed) for each in words]
    is_old = newest.version > 0
    return Settled(
        plan=MembershipPlan(
            version=newest.version + 1,
            nodes=_shares(words),
            reason=_why(joined, lost, has_failed) if is_old else "the job starts",
            time=time,
        ),
        num_failures=min(count(counted, num_lost=len(lost)), max_restarts),
        is_finished=is_old and all(each.is_finished for each in words if each.version > 0),
        is_old=is_old,
    )


def _shares(words: Sequence[NodeWords]) -> tuple[NodeShare, ...]:
    shares, first = [], 0
    for each in words:
        shares.append(NodeShare(node_id=each.node_id, host=each.host, first_rank=first, num_workers=each.num_workers))
        first += each.num_workers
    return tuple(shares)


def _why(joined: Sequence[str], lost: Sequence[str], has_failed: bool) -> str:
    reasons = [f"{name} joined" for name in joined] + [f"{name} left or was lost" for name in lost]
    return ", ".join(reasons) or ("workers failed" if has_failed else "nodes met again")
