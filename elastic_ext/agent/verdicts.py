"""What the end of a round means: a failure, which the budget of restarts counts, or a change of membership: pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from elastic_ext.records.text import counted

from .failures import Failure, first_of, is_consequence

__all__ = ["Counted", "Verdict", "count", "judge"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What to make of workers that have failed on this node."""

    kind: Literal["failure", "membership", "wait"]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """What one node brings to the count of failures, as a round begins."""

    num_failures: int
    """Counted up to the round before."""
    has_failed: bool
    """Whether the round before has ended with a failure of its workers."""


def judge(
    failures: Sequence[Failure],
    *,
    departed: Collection[str],
    num_nodes: int,
    num_left: int,
    waited_seconds: float,
    silence_seconds: float,
) -> Verdict:
    """What the failures mean that this node's workers and others have told of in this round.

    ``departed`` are nodes that left or fell silent, ``num_left`` how many restarts there are, and ``silence_seconds``
    the time after which a node that is gone is known to be.
    """
    cause = first_of(failures)
    if departed:
        return Verdict(kind="membership", reason=f"the round ended as {_listed(departed)} left or fell silent")
    if num_nodes == 1 or not is_consequence(cause):
        return Verdict(kind="failure", reason=f"rank {cause.rank} {cause.ending}")
    if num_left > 0:  # should it turn out that a node was lost, it is not counted
        return Verdict(kind="failure", reason=f"rank {cause.rank} lost another rank, and {cause.ending}")
    if waited_seconds < silence_seconds:
        return Verdict(kind="wait", reason="whether a node is gone is not known yet")
    return Verdict(kind="failure", reason=f"rank {cause.rank} lost another rank, and {cause.ending}; no node is gone")


def count(rows: Sequence[Counted], *, num_lost: int) -> int:
    """The number of failures up to now, the same on all nodes: a round that ended as a node was lost is none."""
    has_failed = any(row.has_failed for row in rows) and num_lost == 0
    return max(row.num_failures for row in rows) + has_failed


def _listed(nodes: Collection[str]) -> str:
    return f"{counted(len(nodes), 'node')} ({', '.join(sorted(nodes))})"
