"""Which machines are near each other, guessed from what lies between them: pure, and honest where it cannot be told.

A *near* link is one on this side of a gap among all links: the widest that parts the machines into a few groups, each
held together by near links, with none between them. A single slow link is no gap, as its two machines are near others
that are near each other; and where values differ by chance alone, what lies beyond the widest gap parts nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from elastic_ext.records.text import counted, size_in_words

from .links import Link

__all__ = ["Group", "Topology", "guess"]

_LEAST_GAP = 1.3  # times as long, from one link to the next,
_LEAST_TIMES = 1.5  # ... and from those in the middle of either side;
_LEAST_TIMES_OF_FEW, _FEW = 2.0, 6  # of few machines, where chance alone makes gaps
_LEAST_NEAR = 0.75  # of the links within a group
_LEAST_PLACED = 0.5  # of all machines
_MOST_TRIED = 16
_ALIKE = 2.0  # times as long as the shortest are the longest of links that are all about as long
_TIMES_SLOW = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Machines that are near each other, by their places."""

    machines: tuple[int, ...]
    latency_seconds: float | None
    """Of a link in the middle, within it; None where that was not measured."""
    bandwidth: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """How machines lie to each other."""

    groups: tuple[Group, ...]
    """Machines of which it is not known are in none."""
    text: str
    """By what, or why it is not known."""
    slow_links: tuple[Link, ...] = ()
    """Those that are far slower than others that lie alike."""
    between: Group | None = None
    """What a link from one group to another has; None where there is one group, or none."""


def guess(num_machines: int, links: Sequence[Link], *, apart: Iterable[int] = ()) -> Topology:
    """How machines lie to each other, but for those that are slow to answer at all: these stand ``apart``."""
    left = sorted(set(range(num_machines)) - set(apart))
    timed = [each for each in links if {each.first, each.second} <= set(left) and each.trouble is None]
    if len(left) < 3 or len(timed) < 2:
        return Topology(groups=(), text="which nodes are near each other is not known: fewer than two links to compare")
    found = _by_gap(left, timed, "latency", lambda link: link.latency_seconds)
    found = found or _by_gap(left, timed, "bandwidth", lambda link: _inverse(link.bandwidth))
    return found or _all_alike(left, timed)


def _by_gap(
    machines: Sequence[int], links: Sequence[Link], measure: str, length_of: Callable[[Link], float | None]
) -> Topology | None:
    lengths = {(each.first, each.second): length for each in links if (length := length_of(each)) is not None}
    ordered = sorted(set(lengths.values()))
    gaps = [(longer / shorter, shorter) for shorter, longer in pairwise(ordered)]
    widest = sorted((each for each in gaps if each[0] >= _LEAST_GAP), key=lambda each: (-each[0], each[1]))
    for _, limit in widest[:_MOST_TRIED]:
        near = [ends for ends, length in lengths.items() if length <= limit]
        parts = _told_apart(_parts(machines, near), lengths)
        if _is_told(parts, len(machines), lengths, set(near)):
            return _topology(parts, len(machines), links, measure)
    return None


def _parts(machines: Sequence[int], near: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Machines that near links hold together, the larger parts first."""
    part_of = {each: [each] for each in machines}
    for first, second in near:
        one, other = part_of[first], part_of[second]
        if one is not other:
            if len(one) < len(other):
                one, other = other, one
            one += other
            for each in other:
                part_of[each] = one
    parts = {id(each): sorted(each) for each in part_of.values()}
    return sorted(parts.values(), key=lambda part: (-len(part), part))


def _told_apart(parts: Sequence[list[int]], lengths: Iterable[tuple[int, int]]) -> list[list[int]]:
    """The larger parts of which it is known that they are apart: where not every pair has met, some may never have.

    Those that were not compared with one of them may belong to it, or may not: of these it is not known.
    """
    place_of = {machine: number for number, part in enumerate(parts) for machine in part}
    compared = {(place_of[first], place_of[second]) for first, second in lengths}
    kept: list[int] = []
    for number in range(len(parts)):
        if all((each, number) in compared or (number, each) in compared for each in kept):
            kept.append(number)
    return [parts[number] for number in kept]


def _is_told(
    parts: Sequence[Sequence[int]],
    num_machines: int,
    lengths: dict[tuple[int, int], float],
    near: set[tuple[int, int]],
) -> bool:
    """Whether parts are what machines in several places would look like."""
    if not 2 <= len(parts) <= (num_machines + 1) // 2 or sum(map(len, parts)) < _LEAST_PLACED * num_machines:
        return False
    part_of = {machine: number for number, part in enumerate(parts) for machine in part}
    lengths = {ends: length for ends, length in lengths.items() if ends[0] in part_of and ends[1] in part_of}
    within = [ends for ends in lengths if part_of[ends[0]] == part_of[ends[1]]]
    across = [lengths[ends] for ends in lengths if part_of[ends[0]] != part_of[ends[1]]]
    num_near = [0] * len(parts)
    num_within = [0] * len(parts)
    for ends in within:
        num_within[part_of[ends[0]]] += 1
        num_near[part_of[ends[0]]] += ends in near
    if any(is_near < _LEAST_NEAR * num for is_near, num in zip(num_near, num_within, strict=True)):
        return False
    usual = statistics.median(lengths[ends] for ends in within)
    least = _LEAST_TIMES if num_machines >= _FEW else _LEAST_TIMES_OF_FEW
    return bool(across) and statistics.median(across) >= least * usual


def _topology(parts: Sequence[Sequence[int]], num_machines: int, links: Sequence[Link], measure: str) -> Topology:
    part_of = {machine: number for number, part in enumerate(parts) for machine in part}
    within: list[list[Link]] = [[] for _ in parts]
    across: list[Link] = []
    for each in links:
        ends = part_of.get(each.first), part_of.get(each.second)
        if ends[0] is not None and ends[1] is not None:
            (within[ends[0]] if ends[0] == ends[1] else across).append(each)
    groups = tuple(_group(part, row) for part, row in zip(parts, within, strict=True))
    between = _group((), across)
    inside = _group((), [each for row in within for each in row])
    slow = [link for row in (*within, across) for link in _slow_links(row)]
    text = f"{len(groups)} groups by {measure}: {_in_words(inside)} within them, {_in_words(between)} between them"
    num_left = num_machines - len(part_of)
    return Topology(
        groups=groups,
        text=text if num_left == 0 else f"{text}; of {counted(num_left, 'node')} too few links were measured",
        slow_links=tuple(sorted(slow, key=lambda link: (link.first, link.second))),
        between=between,
    )


def _all_alike(machines: Sequence[int], links: Sequence[Link]) -> Topology:
    """One group where links are about as long, but for some that are slow; else it is not known."""
    slow = _slow_links(links)
    usual = [each for each in links if each not in slow]
    latencies = sorted(each.latency_seconds for each in usual if each.latency_seconds is not None)
    parts = _parts(machines, [(each.first, each.second) for each in usual])
    if len(latencies) < 2 or len(parts) > 1:
        return Topology(groups=(), text="which nodes are near each other is not known: too few links were measured")
    if latencies[-1] > _ALIKE * latencies[0]:
        text = "which nodes are near each other is not known: links differ, and no gap lies between short and long ones"
        return Topology(groups=(), text=text, slow_links=tuple(slow))
    group = _group(machines, usual)
    return Topology(groups=(group,), text=f"all are about as near: {_in_words(group)}", slow_links=tuple(slow))


def _group(machines: Sequence[int], links: Iterable[Link]) -> Group:
    rows = list(links)
    latencies = [each.latency_seconds for each in rows if each.latency_seconds is not None]
    bandwidths = [each.bandwidth for each in rows if each.bandwidth is not None]
    return Group(
        machines=tuple(machines),
        latency_seconds=statistics.median(latencies) if latencies else None,
        bandwidth=statistics.median(bandwidths) if bandwidths else None,
    )


def _slow_links(links: Sequence[Link]) -> list[Link]:
    """Those among links that lie alike which are far slower than such links, and than others of both machines."""
    if len(links) < 3:
        return []
    usual = _group((), links)
    by_machine: dict[int, list[Link]] = {}
    for each in links:
        by_machine.setdefault(each.first, []).append(each)
        by_machine.setdefault(each.second, []).append(each)
    return [
        each
        for each in links
        if _is_slow(each, usual)
        and all(any(not _is_slow(other, usual) for other in by_machine[end]) for end in (each.first, each.second))
    ]


def _is_slow(link: Link, usual: Group) -> bool:
    is_late = _is_beyond(link.latency_seconds, usual.latency_seconds)
    return is_late or _is_beyond(_inverse(link.bandwidth), _inverse(usual.bandwidth))


def _is_beyond(length: float | None, usual: float | None) -> bool:
    return length is not None and usual is not None and length > _TIMES_SLOW * usual


def _in_words(group: Group) -> str:
    parts = []
    if group.latency_seconds is not None:
        parts.append(f"{group.latency_seconds * 1e6:.0f} us")
    if group.bandwidth is not None:
        parts.append(f"{size_in_words(int(group.bandwidth))}/s")
    return " and ".join(parts) or "nothing measured"


def _inverse(value: float | None) -> float | None:
    return None if value is None else 1 / value
