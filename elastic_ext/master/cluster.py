"""The machines of a job compared: which are near each other in the network, which are slow, what to do. Pure."""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from elastic_ext.doctor.report import NodeComparison, compared_nodes
from elastic_ext.profile.stragglers import Straggler
from elastic_ext.records.text import counted, size_in_words

from .machines import LinkMeasurement, MachineMeasurements, NodeFacts, facts_of, measured_in, named, unlike_nodes
from .wire import master_pb2

__all__ = [
    "Group",
    "LinkStatus",
    "MachineComparison",
    "Machines",
    "PairFindings",
    "SlowMachine",
    "Topology",
    "compare_machines",
    "guess_topology",
    "pair_findings",
]


# --- which machines are near each other ------------------------------------------------------------------------------
# Which machines are near each other, guessed from what lies between them: pure, and honest where it cannot be told.
#
# The *length* of a link is its latency, or 1 / bandwidth where latencies tell nothing: a longer link is a slower one.
# A *near* link is one on this side of a gap among all links: the widest that parts the machines into a few groups, each
# held together by near links, with none between them. A single slow link is no gap, as its two machines are near others
# that are near each other; and where values differ by chance alone, what lies beyond the widest gap parts nothing.

_LEAST_GAP = 1.3
"""A gap lies between two links, next to each other by length, where the longer is at least so many times as long."""
_LEAST_TIMES, _LEAST_TIMES_OF_FEW, _FEW = 1.5, 2.0, 6
"""By how many times the median link between groups must be longer than the median link within them; and the same for
fewer than 6 machines, among which chance alone makes gaps."""
_LEAST_NEAR = 0.75
"""The share of the links within each group that must be near ones."""
_LEAST_PLACED = 0.5
"""The share of all machines that must be in a group."""
_MOST_TRIED = 16  # gaps, the widest first
_ALIKE = 2.0
"""Links are all about alike where the longest is at most so many times as long as the shortest."""
_TIMES_SLOW = 3.0
"""A link is slow where it is more than so many times as long as the median link in the same place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Machines that are near each other in the network, with the median of the links among them."""

    machines: tuple[int, ...]
    """The machines, as indices into ``MachineMeasurements.machines``."""
    latency_seconds: float | None
    """The median latency of the group's links; None where it was not measured."""
    bandwidth: float | None
    """The median bandwidth of the group's links, in bytes per second; None where it was not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Which machines are near each other in the network, as groups guessed from measured links."""

    groups: tuple[Group, ...]
    """The groups; a machine whose group is not known is in none."""
    text: str
    """By which measure the groups were told apart, or why they are not known, in a sentence."""
    slow_links: tuple[LinkMeasurement, ...] = ()
    """Links that are far slower than others in the same place: within the same group, or between groups."""
    between: Group | None = None
    """The medians of the links from one group to another, without machines; None where there is one group, or none."""


def guess_topology(num_machines: int, links: Sequence[LinkMeasurement], *, apart: Iterable[int] = ()) -> Topology:
    """The groups of machines that are near each other, guessed from ``links`` between them.

    Machines that are slow to answer at all are left out, as indices in ``apart``.
    """
    left = sorted(set(range(num_machines)) - set(apart))
    timed = [each for each in links if {each.first, each.second} <= set(left) and each.trouble is None]
    if len(left) < 3 or len(timed) < 2:
        return Topology(groups=(), text="which nodes are near each other is not known: fewer than two links to compare")
    found = _by_gap(left, timed, "latency", lambda link: link.latency_seconds)
    found = found or _by_gap(left, timed, "bandwidth", lambda link: _inverse(link.bandwidth))
    return found or _all_alike(left, timed)


def _by_gap(
    machines: Sequence[int],
    links: Sequence[LinkMeasurement],
    measure: str,
    length_of: Callable[[LinkMeasurement], float | None],
) -> Topology | None:
    """The groups on either side of the widest gap among links' lengths that parts the machines; None if none does."""
    lengths = {(each.first, each.second): length for each in links if (length := length_of(each)) is not None}
    ordered = sorted(set(lengths.values()))
    gaps = [(longer / shorter, shorter) for shorter, longer in pairwise(ordered)]
    widest = sorted((each for each in gaps if each[0] >= _LEAST_GAP), key=lambda each: (-each[0], each[1]))
    for _, limit in widest[:_MOST_TRIED]:
        near = [ends for ends, length in lengths.items() if length <= limit]
        parts = _compared_parts(_parts(machines, near), lengths)
        if _are_apart(parts, len(machines), lengths, set(near)):
            return _topology(parts, len(machines), links, measure)
    return None


def _parts(machines: Sequence[int], near: Iterable[tuple[int, int]]) -> list[list[int]]:
    """The machines in connected parts, by the pairs in ``near``; the larger parts first."""
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


def _compared_parts(parts: Sequence[list[int]], lengths: Iterable[tuple[int, int]]) -> list[list[int]]:
    """The larger parts that were compared with each other by a link; where not every pair was measured, some were not.

    A part that was not compared with a kept one may belong to it or not, and is left out.
    """
    place_of = {machine: number for number, part in enumerate(parts) for machine in part}
    compared = {(place_of[first], place_of[second]) for first, second in lengths}
    kept: list[int] = []
    for number in range(len(parts)):
        if all((each, number) in compared or (number, each) in compared for each in kept):
            kept.append(number)
    return [parts[number] for number in kept]


def _are_apart(
    parts: Sequence[Sequence[int]],
    num_machines: int,
    lengths: dict[tuple[int, int], float],
    near: set[tuple[int, int]],
) -> bool:
    """Whether parts look like machines in several places: near links within them, clearly longer ones between them."""
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


def _topology(
    parts: Sequence[Sequence[int]], num_machines: int, links: Sequence[LinkMeasurement], measure: str
) -> Topology:
    part_of = {machine: number for number, part in enumerate(parts) for machine in part}
    within: list[list[LinkMeasurement]] = [[] for _ in parts]
    across: list[LinkMeasurement] = []
    for each in links:
        ends = part_of.get(each.first), part_of.get(each.second)
        if ends[0] is not None and ends[1] is not None:
            (within[ends[0]] if ends[0] == ends[1] else across).append(each)
    groups = tuple(_group(part, row) for part, row in zip(parts, within, strict=True))
    between = _group((), across)
    inside = _group((), [each for row in within for each in row])
    slow = [link for row in (*within, across) for link in _slow_links(row)]
    text = f"{len(groups)} groups by {measure}: {_words_of(inside)} within them, {_words_of(between)} between them"
    num_left = num_machines - len(part_of)
    return Topology(
        groups=groups,
        text=text if num_left == 0 else f"{text}; of {counted(num_left, 'node')} too few links were measured",
        slow_links=tuple(sorted(slow, key=lambda link: (link.first, link.second))),
        between=between,
    )


def _all_alike(machines: Sequence[int], links: Sequence[LinkMeasurement]) -> Topology:
    """One group of all machines, where all links but some slow ones are about alike; else no group is known."""
    slow = _slow_links(links)
    usual = [each for each in links if each not in slow]
    latencies = sorted(each.latency_seconds for each in usual if each.latency_seconds is not None)
    parts = _parts(machines, [(each.first, each.second) for each in usual])
    if len(latencies) < 2 or len(parts) > 1:
        return Topology(groups=(), text="which nodes are near each other is not known: too few links were measured")
    if latencies[-1] > _ALIKE * latencies[0]:
        text = "which nodes are near each other is not known: fast and slow links cannot be told apart"
        return Topology(groups=(), text=text, slow_links=tuple(slow))
    group = _group(machines, usual)
    return Topology(groups=(group,), text=f"all nodes are about as near: {_words_of(group)}", slow_links=tuple(slow))


def _group(machines: Sequence[int], links: Iterable[LinkMeasurement]) -> Group:
    rows = list(links)
    latencies = [each.latency_seconds for each in rows if each.latency_seconds is not None]
    bandwidths = [each.bandwidth for each in rows if each.bandwidth is not None]
    return Group(
        machines=tuple(machines),
        latency_seconds=statistics.median(latencies) if latencies else None,
        bandwidth=statistics.median(bandwidths) if bandwidths else None,
    )


def _slow_links(links: Sequence[LinkMeasurement]) -> list[LinkMeasurement]:
    """Among links in the same place, those far slower than the median, if both machines have others that are not."""
    if len(links) < 3:
        return []
    usual = _group((), links)
    by_machine: dict[int, list[LinkMeasurement]] = {}
    for each in links:
        by_machine.setdefault(each.first, []).append(each)
        by_machine.setdefault(each.second, []).append(each)
    return [
        each
        for each in links
        if _is_slow(each, usual)
        and all(any(not _is_slow(other, usual) for other in by_machine[end]) for end in (each.first, each.second))
    ]


def _is_slow(link: LinkMeasurement, usual: Group) -> bool:
    is_late = _is_beyond(link.latency_seconds, usual.latency_seconds)
    return is_late or _is_beyond(_inverse(link.bandwidth), _inverse(usual.bandwidth))


def _is_beyond(length: float | None, usual: float | None) -> bool:
    return length is not None and usual is not None and length > _TIMES_SLOW * usual


def _words_of(group: Group) -> str:
    parts = []
    if group.latency_seconds is not None:
        parts.append(f"{group.latency_seconds * 1e6:.0f} us")
    if group.bandwidth is not None:
        parts.append(f"{size_in_words(int(group.bandwidth))}/s")
    return " and ".join(parts) or "nothing measured"


def _inverse(value: float | None) -> float | None:
    return None if value is None else 1 / value


# --- the machines of a job side by side: how they lie to each other, which are slow, and what to do ------------------
# It is made anew from what is known: what nodes have told of their hardware, what pairs of them have measured, and
# which ranks keep the others waiting. The order in which that was told changes nothing.

_MOST_RECOMMENDED = 32
_MOST_LINKS = 4096
_LEAST_SHARES = {"matmul": 0.15, "latency": 0.5, "bandwidth": 0.3}
"""By which part of the usual value a machine has to be slower to count as slow, by measure."""
_LENGTHS: Mapping[str, Callable[[LinkMeasurement], float | None]] = {  # of a link, by measure: longer is slower
    "latency": lambda link: link.latency_seconds,
    "bandwidth": lambda link: None if link.bandwidth is None else 1 / link.bandwidth,
}
_WORDS = {  # by measure: what a slow machine does slowly, and what a person should look at
    "matmul": ("computes", "look at its clock, its temperature and what else runs there"),
    "latency": ("answers", "look at its network interface and its place in the network, and what else runs there"),
    "bandwidth": ("exchanges data", "look at the speed of its network interface, its cable, and what else uses it"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkStatus:
    """The link between two machines, by their names, as the status shows it."""

    first: str
    second: str
    latency_seconds: float | None
    bandwidth: float | None
    trouble: str | None
    is_slow: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowMachine:
    """A machine that is slower than the others, and why it is judged so."""

    host: str
    """The host's name; where several machines have the same one, the beginning of the machine's boot id stands after
    it, as in "n1 (3f2a91c0)"."""
    evidence: tuple[str, ...]
    """The reasons in sentences, one for each measure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairFindings:
    """What pairs of nodes have measured, with the slow machines and the groups that follow from that alone."""

    measured: MachineMeasurements
    slow: Mapping[int, Sequence[tuple[str, str]]]
    """For each slow machine, by its index in ``measured.machines``: the measures by which it is slow, and why."""
    topology: Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineComparison:
    """The comparison of a job's machines, as its status shows it: groups, links, slow machines, and what to do."""

    groups: tuple[master_pb2.NodeGroup, ...]
    """Nodes that are near each other, as far as that is known."""
    topology_text: str
    """By which measure the groups were told apart, or why they are not known, in a sentence."""
    links: tuple[LinkStatus, ...]
    slow: tuple[SlowMachine, ...]
    unlike: tuple[str, ...]
    """The differences between nodes that should be alike, each in a sentence."""
    recommendations: tuple[str, ...]
    """What to do and why, the most urgent first."""


def pair_findings(measured: MachineMeasurements) -> PairFindings:
    """The slow machines and the groups that follow from ``measured``; this takes a second for thousands of machines."""
    slow = _slow_machines(measured)
    answers_slowly = [place for place, found in slow.items() if any(each[0] == "latency" for each in found)]
    topology = guess_topology(len(measured.machines), measured.links, apart=answers_slowly)
    return PairFindings(measured=measured, slow=slow, topology=topology)


def compare_machines(
    nodes: Sequence[NodeFacts], found: PairFindings | None = None, slow_ranks: Sequence[Straggler] = ()
) -> MachineComparison:
    """The comparison of a job's machines, from its nodes' hardware, measured pairs, and stragglers in training."""
    nodes = sorted(nodes, key=lambda each: (each.host, each.node_id))
    found = found or pair_findings(MachineMeasurements())
    measured, topology = found.measured, found.topology
    evidence = _evidence(measured, found.slow, slow_ranks)
    unlike = tuple(unlike_nodes(nodes))
    recommended = [
        *_of_trouble(measured),
        *_of_unlike(unlike, is_bad=True),
        *_of_slow(evidence, slow_ranks),
        *_of_links(measured, topology),
        *_of_unlike(unlike, is_bad=False),
        *_of_groups(measured, topology),
    ]
    return MachineComparison(
        groups=tuple(_groups(nodes, measured, topology)),
        topology_text=topology.text,
        links=tuple(_link(each, measured, topology) for each in measured.links[:_MOST_LINKS]),
        slow=tuple(SlowMachine(host=host, evidence=tuple(texts)) for host, texts in evidence.items()),
        unlike=tuple(text for text, _, _ in unlike),
        recommendations=tuple(recommended[:_MOST_RECOMMENDED]),
    )


# ---- who is slow ----


def _slow_machines(measured: MachineMeasurements) -> dict[int, list[tuple[str, str]]]:
    """For each slow machine, by its index: the measures by which it is slow, and why. Each measure is judged alone."""
    found: dict[int, list[tuple[str, str]]] = {}
    usual = _usual_lengths(measured)
    for measure, device, values, is_rate in _measures(measured):
        names = {str(place): row for place, row in values.items()}
        standings = compared_nodes(names, is_rate=is_rate, least_share=_LEAST_SHARES[measure])
        for place, standing in sorted((int(name), each) for name, each in standings.items()):
            if standing.state == "straggler" and _is_beyond_links(values[place], measure, usual):
                found.setdefault(place, []).append((measure, _standing_in_words(measure, device, standing)))
    return dict(sorted(found.items()))


def _measures(measured: MachineMeasurements) -> Iterator[tuple[str, str, Mapping[int, tuple[float, ...]], bool]]:
    """What machines are compared by: measure, device, each machine's values by window, whether more is better."""
    alive = {place: each for place, each in enumerate(measured.machines) if not each.is_silent}
    for device in sorted({device for each in alive.values() for device in each.matmul}):
        values = {place: each.matmul[device] for place, each in alive.items() if each.matmul.get(device)}
        yield "matmul", f"{device} ", values, True
    if len(alive) >= 3:  # of a single pair nobody can tell whose fault it is
        yield "latency", "", _best_of_each(measured, lambda link: link.latencies, min), False
        yield "bandwidth", "", _best_of_each(measured, lambda link: link.bandwidths, max), True


def _best_of_each(
    measured: MachineMeasurements,
    values_of: Callable[[LinkMeasurement], tuple[float, ...]],
    best: Callable[[float, float], float],
) -> dict[int, tuple[float, ...]]:
    """The best value of each machine's links in each window: one bad partner does not count against a machine."""
    found: dict[int, tuple[float, ...]] = {}
    for link in measured.links:
        values = values_of(link)
        for place in (link.first, link.second) if values else ():
            known = found.get(place)
            found[place] = values if known is None else tuple(map(best, known, values))
    return found


def _usual_lengths(measured: MachineMeasurements) -> dict[str, float]:
    """The median length of all links, near and far, by measure."""
    found = {}
    for measure, length_of in _LENGTHS.items():
        lengths = [length for each in measured.links if (length := length_of(each)) is not None]
        if lengths:
            found[measure] = statistics.median(lengths)
    return found


def _is_beyond_links(values: Sequence[float], measure: str, usual: Mapping[str, float]) -> bool:
    """Whether even the best of a machine's links is slower than the median link.

    Of many machines each is measured with some, and one that was measured with none near it is not slow for that.
    """
    if measure == "matmul":
        return True
    best = min(values) if measure == "latency" else 1 / max(values)
    return best > (1 + _LEAST_SHARES[measure]) * usual[measure]


def _standing_in_words(measure: str, device: str, standing: NodeComparison) -> str:
    return f"{device}{_WORDS[measure][0]} slowly: {standing.reason}"


def _evidence(
    measured: MachineMeasurements, slow: Mapping[int, Sequence[tuple[str, str]]], slow_ranks: Sequence[Straggler]
) -> dict[str, list[str]]:
    """The reasons why machines are slow, by name: of those with stragglers in training, the slowest first, and then of
    others that are slow by measurements."""
    found: dict[str, list[str]] = {}
    for each in sorted(slow_ranks, key=lambda each: (each.score, each.rank)):
        found.setdefault(each.host, []).append(each.text)
    for place, reasons in slow.items():
        machine = measured.machines[place]
        key = machine.host if machine.host in found else machine.name
        found.setdefault(key, []).extend(text for _, text in reasons)
    return found


# ---- what to do ----


def _of_trouble(measured: MachineMeasurements) -> Iterator[str]:
    """What to do where the measurement itself has failed: as a whole, on machines, or on links."""
    if measured.trouble is not None:
        yield f"check the pairs of nodes again: {measured.trouble}; what was measured until then is all that is known"
    silent = [each.name for each in measured.machines if each.is_silent]
    if silent:
        yield f"look whether {named(silent)} and the process there are alive: they stopped answering during the check"
    broken = [each for each in measured.links if each.trouble is not None]
    broken = [each for each in broken if not any(measured.machines[end].is_silent for end in (each.first, each.second))]
    for each in broken[:4]:
        yield (
            f"look whether a firewall is between {_ends(each, measured)}, and which address each host name stands for: "
            f"they could not exchange data ({each.trouble}), and a job on both of them would hang or fail"
        )
    if len(broken) > 4:
        yield f"look at the network: {counted(len(broken) - 4, 'pair')} more could not exchange data either"


def _of_unlike(unlike: Sequence[tuple[str, str, bool]], *, is_bad: bool) -> Iterator[str]:
    """What to do about differences from ``unlike_nodes``: those that may end a job (``is_bad``), or the others."""
    for text, what, may_end in unlike:
        if may_end and is_bad:
            yield f"install the same {what} on all nodes, as processes of unlike versions fail or hang: {text}"
        elif not may_end and not is_bad:
            yield f"expect all nodes to wait for the slowest one at every step, or use nodes that are alike: {text}"


def _of_slow(evidence: Mapping[str, Sequence[str]], slow_ranks: Sequence[Straggler]) -> Iterator[str]:
    trains_slowly = {each.host for each in slow_ranks}
    for host, reasons in list(evidence.items())[:16]:
        more = f" (and {len(reasons) - 3} more)" if len(reasons) > 3 else ""
        why = "; ".join(reasons[:3]) + more
        if host in trains_slowly:
            is_measured = len(reasons) > sum(each.host == host for each in slow_ranks)
            then = "and take it out of the job" if is_measured else "and if that shows nothing take it out of the job"
            yield f"look at the clock and temperature of {host} and at what else runs there, {then}: {why}"
        else:
            measure = next(each for each, (verb, _) in _WORDS.items() if f"{verb} slowly" in reasons[0])
            yield f"{host} {reasons[0]}; at every step all nodes wait for the slowest one: {_WORDS[measure][1]}"


def _of_links(measured: MachineMeasurements, topology: Topology) -> Iterator[str]:
    for each in topology.slow_links[:4]:
        yield (
            f"look at the way between {_ends(each, measured)} (cable, switch port, route): {_link_in_words(each)}, far "
            "slower than other links of the same kind (within one group, or between two), though both nodes are fast "
            "with others"
        )
    if len(topology.slow_links) > 4:
        num = len(topology.slow_links) - 4
        yield f"look at {counted(num, 'link')} more that are far slower than others of the same kind"


def _of_groups(measured: MachineMeasurements, topology: Topology) -> Iterator[str]:
    between = topology.between
    if len(topology.groups) < 2 or between is None:
        return
    sizes = sorted({len(group.machines) for group in topology.groups})
    size = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    first = named(measured.machines[place].name for place in topology.groups[0].machines)
    yield (
        "keep ranks that exchange most, such as those one replica is spread over, on nodes that are near each other, "
        f"and let only averaged gradients pass between groups: {topology.text}; each group has {size} nodes, "
        f"the first one {first}"
    )


# ---- for people ----


def _groups(
    nodes: Sequence[NodeFacts], measured: MachineMeasurements, topology: Topology
) -> Iterator[master_pb2.NodeGroup]:
    """The groups of the job's own nodes; nodes of one machine are near each other whatever was measured."""
    boots = {each.boot_id: place for place, each in enumerate(measured.machines) if each.boot_id is not None}
    hosts = {each.host: place for place, each in enumerate(measured.machines) if each.name == each.host}
    group_of = {place: number for number, group in enumerate(topology.groups) for place in group.machines}
    members: dict[int, list[str]] = {}
    beside: dict[str, list[str]] = {}
    for node in nodes:
        place = boots.get(node.boot_id, hosts.get(node.host)) if node.boot_id is not None else hosts.get(node.host)
        number = None if place is None else group_of.get(place)
        if number is not None:
            members.setdefault(number, []).append(node.node_id)
        else:
            beside.setdefault(node.boot_id or node.host, []).append(node.node_id)
    for number, node_ids in sorted(members.items()):
        found = master_pb2.NodeGroup(node_ids=sorted(node_ids))
        group = topology.groups[number]
        if group.latency_seconds is not None:
            found.latency_seconds = group.latency_seconds
        if group.bandwidth is not None:
            found.bandwidth = group.bandwidth
        yield found
    for node_ids in sorted(beside.values()):
        if len(node_ids) > 1:
            yield master_pb2.NodeGroup(node_ids=sorted(node_ids))


def _link(link: LinkMeasurement, measured: MachineMeasurements, topology: Topology) -> LinkStatus:
    return LinkStatus(
        first=measured.machines[link.first].name,
        second=measured.machines[link.second].name,
        latency_seconds=link.latency_seconds,
        bandwidth=link.bandwidth,
        trouble=link.trouble,
        is_slow=link in topology.slow_links,
    )


def _ends(link: LinkMeasurement, measured: MachineMeasurements) -> str:
    return f"{measured.machines[link.first].name} and {measured.machines[link.second].name}"


def _link_in_words(link: LinkMeasurement) -> str:
    parts = []
    if link.latency_seconds is not None:
        parts.append(f"{link.latency_seconds * 1e6:.0f} us")
    if link.bandwidth is not None:
        parts.append(f"{size_in_words(int(link.bandwidth))}/s")
    return " and ".join(parts) or "nothing was measured"


# --- the machines of a job as its nodes have told of them, and what follows from that, worked out when asked ---------


class Machines:
    """The machines of a job as its nodes report them, what pairs have measured, and the comparison that follows."""

    def __init__(self, pairs: str = "") -> None:
        """``pairs`` is the report that ``take_pairs`` was given, or empty."""
        self.pairs = pairs
        self._findings: PairFindings | None = pair_findings(measured_in(pairs)) if pairs else None
        self._texts: dict[str, tuple[str, bytes]] = {}  # node -> its host, and what it has told, packed
        self._facts: dict[str, tuple[bool, NodeFacts]] = {}  # node -> whether there were others, and the facts
        self._comparison: tuple[tuple[object, ...], MachineComparison] | None = None  # what it was made of, and it

    def hear(self, node_id: str, host: str, hardware: str, *, num_nodes: int) -> bool:
        """Take a node's hardware record (JSON; empty where there is none yet); whether it is news.

        ``num_nodes`` is how many nodes the job has with this one.
        """
        known = self._texts.get(node_id)
        packed = zlib.compress(hardware.encode()) if hardware else b""
        if known == (host, packed) or (known is not None and known[0] == host and not hardware):
            return False
        self._texts[node_id] = host, packed
        self._facts.pop(node_id, None)
        self.facts(node_id, num_nodes=num_nodes)  # read now, since reading all at once for a status takes too long
        self._comparison = None
        return True

    def forget(self, node_id: str) -> None:
        """Forget the machine of a node that is gone for good."""
        self._facts.pop(node_id, None)
        if self._texts.pop(node_id, None) is not None:
            self._comparison = None

    def hardware(self, node_id: str) -> str:
        """The hardware record of a node as JSON; empty where it has reported none."""
        return _unpacked(self._texts.get(node_id, ("", b""))[1])

    def facts(self, node_id: str, *, num_nodes: int | None = None) -> NodeFacts | None:
        """The facts of a node's machine as one of ``num_nodes``, or, for None, as they were last asked for.

        None for a node that is not known.
        """
        known = self._texts.get(node_id)
        if known is None:
            return None
        host, packed = known
        kept = self._facts.get(node_id)
        if kept is None or (num_nodes is not None and kept[0] != (num_nodes > 1)):
            num_nodes = num_nodes or 1
            kept = num_nodes > 1, facts_of(node_id, host, _unpacked(packed), num_nodes=num_nodes)
            self._facts[node_id] = kept
        return kept[1]

    def take_pairs(self, text: str) -> None:
        """Take a report of what pairs of nodes have measured, in place of any earlier one; ValueError if it is none."""
        self._findings = pair_findings(measured_in(text))
        self.pairs = text
        self._comparison = None

    def comparison(self, slow_ranks: Sequence[Straggler], node_ids: Iterable[str]) -> MachineComparison:
        """The comparison of the machines of these nodes, made again only where something has changed."""
        made_of = tuple(slow_ranks), tuple(node_ids)
        if self._comparison is None or self._comparison[0] != made_of:
            facts = [found for node_id in made_of[1] if (found := self.facts(node_id)) is not None]
            self._comparison = made_of, compare_machines(facts, self._findings, slow_ranks)
        return self._comparison[1]


def _unpacked(packed: bytes) -> str:
    return zlib.decompress(packed).decode() if packed else ""
