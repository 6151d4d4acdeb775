"""Retention: which checkpoints of a job stay, which may go, and why. Pure.

What counts as kept is committed, has all its files, and leads to the newest checkpoint. Saves that failed, what cannot
be read and what training went on without are never counted, so that none of them takes the place of a good one.
What was abandoned for nothing counts as before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from .lineage import Lineage, place_in
from .listing import Found, abandoned_for_nothing, is_set_aside, newest_of, oldest_first

__all__ = ["Retention", "Verdict", "judge"]

_NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """What is to be kept of a job's checkpoints."""

    keep_last: int | None = 1
    """So many of the newest; None keeps all that lead to the newest one."""
    keep_every: int | None = None
    """Besides, the first one at or after each multiple of so many steps."""
    keep_abandoned: bool = True
    """Whether those stay that training went on without."""

    def __post_init__(self) -> None:
        if self.keep_last is not None and (type(self.keep_last) is not int or self.keep_last < 1):
            raise ValueError(f"keep_last is {self.keep_last!r}; allowed: an integer >= 1, or None, which keeps all")
        if self.keep_every is not None and (type(self.keep_every) is not int or self.keep_every < 1):
            raise ValueError(f"keep_every is {self.keep_every!r}; allowed: a number of steps >= 1, or None")
        if self.keep_every is not None and self.keep_last is None:
            raise ValueError(f"keep_every is {self.keep_every} and keep_last None, which keeps all; give keep_last too")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What becomes of one checkpoint."""

    found: Found
    stays: bool
    why: str
    has_failed: bool = False
    """Whether it stays because it could not be removed."""


def judge(
    found: Sequence[Found],
    rule: Retention,
    *,
    chain: Sequence[Lineage] | None = None,
    being_read: Mapping[str, str] = _NOTHING,
    incomplete: Mapping[str, str] = _NOTHING,
) -> list[Verdict]:
    """A verdict on each of ``found``, oldest first.

    ``chain`` are the runs that lead to now; by default those that lead to the newest one. ``being_read`` says of names
    who reads them, ``incomplete`` what they lack.
    """
    ordered = oldest_first(found)
    abandoned = _abandoned_in(ordered)
    if chain is None:
        newest = newest_of([one for one in ordered if one.name not in abandoned and one.name not in incomplete])
        chain = () if newest is None else newest.commit.lineage
    reasons = _reasons_to_stay(ordered, rule, chain, incomplete, abandoned)
    verdicts = []
    for one in ordered:
        why = reasons.get(one.name)
        if why is None and one.name in being_read:
            why = f"being read by {being_read[one.name]}"
        gone = "abandoned" if one.name in abandoned else f"none of the last {rule.keep_last}"
        verdicts.append(Verdict(found=one, stays=why is not None, why=why or gone))
    return verdicts


def _abandoned_in(found: Sequence[Found]) -> set[str]:
    """The names of those that training went on without."""
    aside = [one for one in found if is_set_aside(one.name)]
    counting = abandoned_for_nothing([one for one in found if not is_set_aside(one.name)], aside)
    return {one.name for one in aside} - {one.name for one in counting}


def _reasons_to_stay(
    ordered: Sequence[Found],
    rule: Retention,
    chain: Sequence[Lineage],
    incomplete: Mapping[str, str],
    abandoned: Collection[str],
) -> dict[str, str]:
    """Why each that stays does so, whoever reads it."""
    reasons: dict[str, str] = {}
    on_the_way: list[tuple[int, Found]] = []
    for one in ordered:
        place = place_in(chain, run_id=one.commit.run_id, global_step=one.commit.global_step)
        if one.name in incomplete:
            reasons[one.name] = f"not counted, since {incomplete[one.name]}"
        elif one.name in abandoned:
            if rule.keep_abandoned:
                reasons[one.name] = "abandoned, and not counted"
        elif place is None:
            reasons[one.name] = "not counted, since it does not lead to the newest one"
        else:
            on_the_way.append((place, one))
    counted = [one for _, one in sorted(on_the_way, key=lambda pair: pair[0])]
    if rule.keep_every is not None:
        reasons |= _milestones(counted, rule.keep_every)
    last = counted if rule.keep_last is None else counted[-rule.keep_last :]
    return reasons | {one.name: "the newest" if one is last[-1] else f"one of the last {len(last)}" for one in last}


def _milestones(counted: Sequence[Found], every: int) -> dict[str, str]:
    """The first one of each stretch of steps but the one before the first multiple."""
    first: dict[int, Found] = {}
    for one in counted:
        first.setdefault(one.commit.global_step // every, one)
    return {
        one.name: f"the first from step {stretch * every} on" for stretch, one in sorted(first.items()) if stretch > 0
    }
