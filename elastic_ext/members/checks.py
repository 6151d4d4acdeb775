"""Whether ranks can go from the world that they are in to the members of a plan, and what all of them decide. Pure.

Each rank says what it has against the plan, and all draw the same decision from the answers of all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from elastic_ext.records.json import JsonRecord, shown

from .plan import MembershipPlan

__all__ = [
    "Answer",
    "MembersDecision",
    "decide",
    "differences",
    "digest_of",
    "seconds_to_settle",
    "why_not_members",
]

_SETTLE_SECONDS = 2.0
_PATIENCE_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer(JsonRecord):
    """What one rank says of a membership plan."""

    version: int
    digest: str
    """The digest of the plan that this rank holds."""
    why_not: str = ""
    """Why this rank cannot train by the plan; empty where it can."""
    why_later: str = ""
    """What this rank has to end before members can change; empty for nothing."""
    registered: str = ""
    """The digest of tensors that may differ between the ranks; empty where all take those of the first rank."""
    tells: bool = False
    """Whether the script of this rank is to be told of a change, by functions that may fail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MembersDecision:
    """What all ranks do about a plan, with the reason in words where they do not apply it."""

    kind: Literal["apply", "refuse", "later", "newer"]
    """``later``: something has to end first; ``newer``: some ranks hold a newer plan, of which the others will hear."""
    why: str = ""


_UNLIKE = (
    "registered tensors, or buffers of a sharded model, differ between the ranks, and whoever joins would go on with "
    "those of the rank whose place it takes; checkpoints have the tensors of each rank"
)


def digest_of(plan: MembershipPlan) -> str:
    """A digest of a plan, the same where all of it is the same."""
    return hashlib.blake2b(plan.to_json().encode(), digest_size=8).hexdigest()


def decide(answers: Sequence[Answer], names: Sequence[object]) -> MembersDecision:
    """What all ranks do about a plan, by the answers of all, in the order of ranks, whose ``names`` are told."""
    if len({answer.version for answer in answers}) > 1:
        return MembersDecision(kind="newer", why="some ranks hold a newer membership plan than others")
    plans: dict[str, list[str]] = {}
    for answer, name in zip(answers, names, strict=True):
        plans.setdefault(answer.digest, []).append(str(name))
    if len(plans) > 1:
        held = "; ".join(f"one of digest {digest} on {', '.join(on)}" for digest, on in plans.items())
        return MembersDecision(kind="refuse", why=f"the ranks were told different plans of this version: {held}")
    reasons: dict[str, list[str]] = {}
    for answer, name in zip(answers, names, strict=True):
        if answer.why_not:
            reasons.setdefault(answer.why_not, []).append(str(name))
    if reasons:
        return MembersDecision(kind="refuse", why="; ".join(f"{', '.join(on)}: {why}" for why, on in reasons.items()))
    later = next(
        (f"{name}: {answer.why_later}" for answer, name in zip(answers, names, strict=True) if answer.why_later), ""
    )
    if later:
        return MembersDecision(kind="later", why=later)
    if len({answer.registered for answer in answers}) > 1:
        return MembersDecision(kind="refuse", why=_UNLIKE)
    return MembersDecision(kind="apply")


def seconds_to_settle(waited_seconds: float) -> float | None:
    """How long a boundary waits for a save under way before it leaves the plan to the next boundary; None: to its end.

    ``waited_seconds`` is how long the plan has waited. The boundaries wait for saves within its first two seconds. Once
    it has waited for twenty seconds, a boundary waits to the end of the save, since saves may follow one another.
    """
    return None if waited_seconds > _PATIENCE_SECONDS else max(_SETTLE_SECONDS - waited_seconds, 0.0)


def why_not_members(plan: MembershipPlan, seats: Sequence[int]) -> str | None:
    """Why ranks with these ``seats`` cannot become the members of ``plan`` while they train; None where they can."""
    new = [member.seat for member in plan.members]
    stay = [seat for seat in seats if seat in new]
    come = [seat for seat in new if seat not in seats]
    if not stay:
        return f"none of the workers that train, in seats {[*seats]}, is in the plan, whose seats are {new}"
    if new != [*stay, *come]:
        return f"the plan has the seats {new}; allowed: {[*stay, *come]}, in which who stays keeps the order"
    if not plan.store.rpartition(":")[2].isdecimal():
        return f"the plan names the store {plan.store!r}; allowed: HOST:PORT of a store that an agent holds"
    return None


def differences(mine: Mapping[str, Any], others: Mapping[str, Any], *, most: int = 5) -> str:
    """The differences between a worker that joins and those that train, in words; empty where there are none."""
    unlike = [
        f"{name} is {shown(mine.get(name), 200)} here and {shown(others.get(name), 200)} there"
        for name in dict.fromkeys([*others, *mine])
        if mine.get(name) != others.get(name)
    ]
    more = f"; and {len(unlike) - most} more" if len(unlike) > most else ""
    return "; ".join(unlike[:most]) + more
