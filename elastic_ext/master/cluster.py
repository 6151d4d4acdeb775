"""Cluster: the machines of a job side by side: how they lie to each other, which are slow, and what to do. Pure.

It is made anew from what is known: what nodes have told of their hardware, what pairs of them have measured, and which
ranks keep the others waiting. The order in which that was told changes nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from elastic_ext.doctor.stragglers import Standing, stragglers
from elastic_ext.profile.stragglers import Straggler
from elastic_ext.records.text import counted, size_in_words

from .links import Link, Measured
from .machines import NodeFacts, named, unlike_nodes
from .topology import Topology, guess
from .wire import master_pb2

__all__ = ["Cluster", "Judged", "MeasuredLink", "SlowMachine", "cluster_of", "judged"]

_MOST_RECOMMENDED = 32
_MOST_LINKS = 4096
_LEAST_SHARES = {"matmul": 0.15, "latency": 0.5, "bandwidth": 0.3}
"""By how much of the usual value a machine has to be slower to be told of."""
_LENGTHS: Mapping[str, Callable[[Link], float | None]] = {
    "latency": lambda link: link.latency_seconds,
    "bandwidth": lambda link: None if link.bandwidth is None else 1 / link.bandwidth,
}
_WORDS = {
    "matmul": ("computes", "look at its clock, its temperature and what else runs there"),
    "latency": ("answers", "look at its network interface and its place in the network, and what else runs there"),
    "bandwidth": ("exchanges data", "look at the speed of its network interface, its cable, and what else uses it"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLink:
    """What lies between two machines, by their hosts."""

    first: str
    second: str
    latency_seconds: float | None
    bandwidth: float | None
    trouble: str | None
    is_slow: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowMachine:
    """One that is slower than the others."""

    host: str
    evidence: tuple[str, ...]
    """In words, each a measure by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """What was measured, and what follows from that alone."""

    measured: Measured
    slow: Mapping[int, Sequence[tuple[str, str]]]
    """Machines by their places: by which measure, and why."""
    topology: Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """What there is to say of a job's machines."""

    groups: tuple[master_pb2.NodeGroup, ...]
    """Nodes that are near each other, as far as that is known."""
    topology: str
    """By what, or why it is not known."""
    links: tuple[MeasuredLink, ...]
    slow: tuple[SlowMachine, ...]
    unlike: tuple[str, ...]
    """In what nodes differ that should be alike."""
    recommendations: tuple[str, ...]
    """What to do and why, the most urgent first."""


def judged(measured: Measured) -> Judged:
    """What follows from what pairs have measured, by itself: of thousands of machines it takes a second."""
    slow = _slow_machines(measured)
    answers_slowly = [place for place, found in slow.items() if any(each[0] == "latency" for each in found)]
    topology = guess(len(measured.machines), measured.links, apart=answers_slowly)
    return Judged(measured=measured, slow=slow, topology=topology)


def cluster_of(
    nodes: Sequence[NodeFacts], found: Judged | None = None, slow_ranks: Sequence[Straggler] = ()
) -> Cluster:
    """What follows from what is known of a job's nodes."""
    nodes = sorted(nodes, key=lambda each: (each.host, each.node_id))
    found = found or judged(Measured())
    measured, topology = found.measured, found.topology
    evidence = _evidence(measured, found.slow, slow_ranks)
    unlike = tuple(unlike_nodes(nodes))
    recommended = [
        *_of_meeting(measured),
        *_of_unlike(unlike, is_bad=True),
        *_of_slow(evidence, slow_ranks),
        *_of_links(measured, topology),
        *_of_unlike(unlike, is_bad=False),
        *_of_groups(measured, topology),
    ]
    return Cluster(
        groups=tuple(_groups(nodes, measured, topology)),
        topology=topology.text,
        links=tuple(_link(each, measured, topology) for each in measured.links[:_MOST_LINKS]),
        slow=tuple(SlowMachine(host=host, evidence=tuple(texts)) for host, texts in evidence.items()),
        unlike=tuple(text for text, _, _ in unlike),
        recommendations=tuple(recommended[:_MOST_RECOMMENDED]),
    )


# ---- who is slow ----


def _slow_machines(measured: Measured) -> dict[int, list[tuple[str, str]]]:
    """By place, by which measure and why; measures are never added up."""
    found: dict[int, list[tuple[str, str]]] = {}
    usual = _usual_lengths(measured)
    for measure, device, values, is_rate in _measures(measured):
        names = {str(place): row for place, row in values.items()}
        standings = stragglers(names, is_rate=is_rate, least_share=_LEAST_SHARES[measure])
        for place, standing in sorted((int(name), each) for name, each in standings.items()):
            if standing.state == "straggler" and _is_beyond_links(values[place], measure, usual):
                found.setdefault(place, []).append((measure, _in_words(measure, device, standing)))
    return dict(sorted(found.items()))


def _measures(measured: Measured) -> Iterator[tuple[str, str, Mapping[int, tuple[float, ...]], bool]]:
    alive = {place: each for place, each in enumerate(measured.machines) if not each.is_silent}
    for device in sorted({device for each in alive.values() for device in each.matmul}):
        values = {place: each.matmul[device] for place, each in alive.items() if each.matmul.get(device)}
        yield "matmul", f"{device} ", values, True
    if len(alive) >= 3:  # of a single pair nobody can tell whose fault it is
        yield "latency", "", _best_of_each(measured, lambda link: link.latencies, min), False
        yield "bandwidth", "", _best_of_each(measured, lambda link: link.bandwidths, max), True


def _best_of_each(
    measured: Measured, values_of: Callable[[Link], tuple[float, ...]], best: Callable[[float, float], float]
) -> dict[int, tuple[float, ...]]:
    """The best of each machine in each window over its links: one bad partner does not count against it."""
    found: dict[int, tuple[float, ...]] = {}
    for link in measured.links:
        values = values_of(link)
        for place in (link.first, link.second) if values else ():
            known = found.get(place)
            found[place] = values if known is None else tuple(map(best, known, values))
    return found


def _usual_lengths(measured: Measured) -> dict[str, float]:
    """By measure, how long a link is in the middle of all, near and far."""
    found = {}
    for measure, length_of in _LENGTHS.items():
        lengths = [length for each in measured.links if (length := length_of(each)) is not None]
        if lengths:
            found[measure] = statistics.median(lengths)
    return found


def _is_beyond_links(values: Sequence[float], measure: str, usual: Mapping[str, float]) -> bool:
    """Whether even the best of a machine's links is slower than links are in the middle.

    Of many machines each meets some, and one that has met none of those near it is not slow for that.
    """
    if measure == "matmul":
        return True
    best = min(values) if measure == "latency" else 1 / max(values)
    return best > (1 + _LEAST_SHARES[measure]) * usual[measure]


def _in_words(measure: str, device: str, standing: Standing) -> str:
    return f"{device}{_WORDS[measure][0]} slowly: {standing.reason}"


def _evidence(
    measured: Measured, slow: Mapping[int, Sequence[tuple[str, str]]], slow_ranks: Sequence[Straggler]
) -> dict[str, list[str]]:
    """By host, the worst first: what was measured there, and what its ranks are seen to do."""
    found: dict[str, list[str]] = {}
    for each in sorted(slow_ranks, key=lambda each: (each.score, each.rank)):
        found.setdefault(each.host, []).append(each.text)
    for place, reasons in slow.items():
        machine = measured.machines[place]
        key = machine.host if machine.host in found else machine.name
        found.setdefault(key, []).extend(text for _, text in reasons)
    return found


# ---- what to do ----


def _of_meeting(measured: Measured) -> Iterator[str]:
    if measured.trouble is not None:
        yield f"check the pairs of nodes again: {measured.trouble}; what was measured until then is all that is known"
    silent = [each.name for each in measured.machines if each.is_silent]
    if silent:
        yield f"look whether {named(silent)} and the process there are alive: they stopped to answer in the check"
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
    for text, what, may_end in unlike:
        if may_end and is_bad:
            yield f"install the same {what} on all nodes, as processes that do not speak alike fail or hang: {text}"
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


def _of_links(measured: Measured, topology: Topology) -> Iterator[str]:
    for each in topology.slow_links[:4]:
        yield (
            f"look at the way between {_ends(each, measured)} (cable, switch port, route): {_link_in_words(each)}, far "
            "slower than links that lie alike, though both are fast with others"
        )
    if len(topology.slow_links) > 4:
        num = len(topology.slow_links) - 4
        yield f"look at {counted(num, 'link')} more that are far slower than those that lie alike"


def _of_groups(measured: Measured, topology: Topology) -> Iterator[str]:
    between = topology.between
    if len(topology.groups) < 2 or between is None:
        return
    sizes = sorted({len(group.machines) for group in topology.groups})
    size = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    first = named(measured.machines[place].name for place in topology.groups[0].machines)
    yield (
        "keep ranks that exchange most, such as those one replica is spread over, on nodes that are near each other, "
        f"and have only gradients' means go between: {topology.text}; each has {size} nodes, the first of them {first}"
    )


# ---- for people ----


def _groups(nodes: Sequence[NodeFacts], measured: Measured, topology: Topology) -> Iterator[master_pb2.NodeGroup]:
    """The job's own nodes; those of one machine are near each other whatever was measured."""
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


def _link(link: Link, measured: Measured, topology: Topology) -> MeasuredLink:
    return MeasuredLink(
        first=measured.machines[link.first].name,
        second=measured.machines[link.second].name,
        latency_seconds=link.latency_seconds,
        bandwidth=link.bandwidth,
        trouble=link.trouble,
        is_slow=link in topology.slow_links,
    )


def _ends(link: Link, measured: Measured) -> str:
    return f"{measured.machines[link.first].name} and {measured.machines[link.second].name}"


def _link_in_words(link: Link) -> str:
    parts = []
    if link.latency_seconds is not None:
        parts.append(f"{link.latency_seconds * 1e6:.0f} us")
    if link.bandwidth is not None:
        parts.append(f"{size_in_words(int(link.bandwidth))}/s")
    return " and ".join(parts) or "nothing was measured"
