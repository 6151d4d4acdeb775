"""The report of nodes that checked each other in pairs: measured values, findings, and which nodes are slow. Pure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from elastic_ext.records.json import JsonRecord
from elastic_ext.records.text import size_in_words

from .findings import Finding, error, note, ok, sorted_findings, warning
from .records import NodeHardware

__all__ = [
    "SHOULD_BE_ALIKE",
    "CheckedNode",
    "CheckedPair",
    "NodeComparison",
    "PairReport",
    "best_by_node",
    "compared_nodes",
    "findings_of_report",
    "unlike",
    "words_of_report",
]


# --- which of several nodes is slower than the others ----------------------------------------------------------------
# The comparison is robust: a few slow nodes do not shift what is usual so far that they look normal.
#
# In each window of time every value is compared with the median of all, in units of how far values lie from it (the
# median of these distances, MAD). What is far off in most windows is a straggler. Few nodes, or nodes that differ as
# much among themselves, do not tell; then the answer is that it is undecided.

_OF_A_NORMAL_DISTRIBUTION = 1.4826
"""The standard deviation of a normal distribution is so many times its MAD."""
_FAR = 3.0
_MOST_WINDOWS = 2 / 3
_HALF = 1 / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeComparison:
    """How fast one node or pair is beside the others."""

    state: Literal["normal", "straggler", "undecided"]
    times_slower: float | None
    """The time of the node or pair over the median of all, or, of two, over that of the faster one; None with nothing
    to compare with."""
    reason: str


def compared_nodes(
    values: Mapping[str, Sequence[float]], *, is_rate: bool, least_share: float
) -> dict[str, NodeComparison]:
    """How each of several nodes or pairs compares with the others, by name, from values in the same windows of time.

    All values are above 0. With ``is_rate`` more is better, otherwise less is. One that is slower by less than
    ``least_share`` is normal; one without values is undecided and does not count.
    """
    costs = {name: [1 / value if is_rate else value for value in given] for name, given in values.items() if given}
    num_windows = min((len(given) for given in costs.values()), default=0)
    windows = [_window([given[number] for given in costs.values()]) for number in range(num_windows)]
    standings = {}
    for name in values:
        if name not in costs:
            standings[name] = NodeComparison(state="undecided", times_slower=None, reason="it has not been measured")
        elif len(costs) < 2:
            standings[name] = NodeComparison(
                state="undecided", times_slower=None, reason="there is no other to compare with"
            )
        else:
            standings[name] = _standing(costs[name], windows, least_share)
    return standings


@dataclass(frozen=True, kw_only=True, slots=True)
class _Window:
    """What all nodes or pairs took in one window of time: their number, median, usual value and MAD."""

    num: int
    median: float
    usual: float
    spread: float


def _window(costs: Sequence[float]) -> _Window:
    median = statistics.median(costs)
    return _Window(
        num=len(costs),
        median=median,
        usual=min(costs) if len(costs) == 2 else median,
        spread=statistics.median(abs(other - median) for other in costs),
    )


def _standing(own: Sequence[float], windows: Sequence[_Window], least_share: float) -> NodeComparison:
    seen = [_seen(cost, window, least_share) for cost, window in zip(own, windows, strict=False)]
    times = statistics.median(ratio for ratio, _, _ in seen)
    is_slow = sum(slow for _, slow, _ in seen) / len(seen)
    is_far = sum(far for _, _, far in seen) / len(seen)
    num = windows[0].num
    if is_far >= _MOST_WINDOWS:
        return NodeComparison(
            state="straggler", times_slower=times, reason=f"{times:.2f} times as slow as the median of {num}"
        )
    if is_slow < _HALF:
        return NodeComparison(state="normal", times_slower=times, reason="as fast as the others")
    if num == 2:
        reason = f"{times:.2f} times as slow as the other; a third one, to compare with, would tell which is normal"
    else:
        reason = f"{times:.2f} times as slow as the median of {num}, which differ by as much among themselves"
    return NodeComparison(state="undecided", times_slower=times, reason=reason)


def _seen(cost: float, window: _Window, least_share: float) -> tuple[float, bool, bool]:
    """A node's cost as a multiple of the usual one, whether that is slow, and whether it is far from the others."""
    is_slow = cost > (1 + least_share) * window.usual
    is_far = cost - window.median > _FAR * _OF_A_NORMAL_DISTRIBUTION * window.spread
    return cost / window.usual, is_slow, is_slow and is_far


# --- what nodes have measured of themselves and of each other, and what follows from it ------------------------------

_LEAST_SHARES = {"matmul": 0.15, "latency": 0.5, "bandwidth": 0.3}
"""Share by which a node has to be slower than usual to be told of, by measure; unlike links differ by nature."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedNode:
    """What one of the nodes has told of itself: its hardware and how fast it multiplies matrices."""

    index: int
    label: str
    """The node's name for people: its number, host and pid."""
    is_silent: bool
    """Whether the node stopped answering before all was done."""
    hardware: NodeHardware | None
    matmul: dict[str, tuple[float, ...]]
    """Floating-point operations per second of matrix products in each window of time, by device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedPair(JsonRecord):
    """What two nodes have measured of the network between them, in windows of time."""

    round: int
    first: int
    second: int
    backend: str
    latency_seconds: tuple[float, ...]
    """Seconds that a single word takes one way: the least of each window."""
    bandwidth: tuple[float, ...]
    """Bytes per second in the slower direction, in each window."""
    trouble: str | None
    """Why nothing could be measured; None where it could."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairReport:
    """All that nodes have measured of themselves and of each other, with what went wrong."""

    num_wanted: int
    """Nodes that should have come."""
    nodes: tuple[CheckedNode, ...]
    pairs: tuple[CheckedPair, ...]
    trouble: str | None
    """Why nothing more was measured."""

    def label(self, index: int) -> str:
        """The name of a node for people."""
        return self.nodes[index].label

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def to_short_json(self) -> str:
        """The report as JSON with what a master reads of it, short enough for one message to a master.

        Of hardware it has what tells machines apart; agents report the whole.
        """
        nodes = [
            {
                "label": node.label,
                "is_silent": node.is_silent,
                "matmul": node.matmul,
                "hardware": None
                if node.hardware is None
                else {
                    "network": {"host": node.hardware.network.host},
                    "system": {"boot_id": node.hardware.system.boot_id},
                },
            }
            for node in self.nodes
        ]
        pairs = [
            {
                "first": pair.first,
                "second": pair.second,
                "latency_seconds": pair.latency_seconds,
                "bandwidth": pair.bandwidth,
                "trouble": pair.trouble,
            }
            for pair in self.pairs
        ]
        found = {"num_wanted": self.num_wanted, "nodes": nodes, "pairs": pairs, "trouble": self.trouble}
        return json.dumps(found, separators=(",", ":"))


def findings_of_report(report: PairReport) -> tuple[Finding, ...]:
    """The findings on the nodes of a report together, the worst first."""
    silent = [node.label for node in report.nodes if node.is_silent]
    found: list[Finding] = []
    if report.trouble is not None:
        found.append(
            error(
                report.trouble,
                "the findings on pairs of nodes are of what had been measured until then",
                "look whether the machine and the process on it still run, and run elastic-ext doctor again",
            )
        )
    if len(report.nodes) < report.num_wanted:
        came = ", ".join(node.label for node in report.nodes)
        found.append(
            error(
                f"{len(report.nodes)} of {report.num_wanted} nodes came: {came}",
                "a job waits for all of them",
                "start elastic-ext doctor with the same --rdzv-endpoint and --rdzv-id on the others at the same time; "
                "look whether they can reach that address",
            )
        )
    found += [
        error(
            f"{label} has stopped answering",
            "a job would hang or fail there",
            "look whether the machine and the process on it still run, and run elastic-ext doctor again",
        )
        for label in silent
    ]
    found += _of_pairs(report)
    found += unlike({node.label: node.hardware for node in report.nodes if node.hardware is not None})
    found += _of_speed(report)
    return sorted_findings(found)


def best_by_node(
    report: PairReport, values: Callable[[CheckedPair], tuple[float, ...]], best: Callable[..., float]
) -> dict[str, tuple[float, ...]]:
    """The best value of each node in each window over all its pairs, by label, so that a bad partner does not count."""
    by_node: dict[str, tuple[float, ...]] = {}
    for node in report.nodes:
        own = [values(pair) for pair in report.pairs if node.index in (pair.first, pair.second) and values(pair)]
        by_node[node.label] = tuple(best(window) for window in zip(*own, strict=False))
    return by_node


def unlike(hardware: Mapping[str, NodeHardware]) -> Iterator[Finding]:
    """A finding for each thing in which nodes differ that should be alike, such as versions and GPUs."""
    for what, ask, is_bad in SHOULD_BE_ALIKE:
        by_value: dict[str, list[str]] = {}
        for label, one in hardware.items():
            by_value.setdefault(ask(one), []).append(label)
        if len(by_value) > 1:
            parts = "; ".join(f"{value} on {', '.join(labels)}" for value, labels in by_value.items())
            if is_bad:
                yield warning(
                    f"nodes have unlike {what}: {parts}",
                    "processes of unlike versions fail, or hang, when they form a process group",
                    "install the same on all nodes",
                )
            else:
                yield note(f"nodes have unlike {what}: {parts}", "at every step all nodes wait for the slowest one")


def words_of_report(report: PairReport) -> list[str]:
    """The measured values of a report in words, a line for each node and each pair."""
    lines = []
    for node in report.nodes:
        speeds = [f"{device} {max(windows) / 1e9:.1f}" for device, windows in node.matmul.items() if windows]
        lines.append(f"{node.label}: matmul {', '.join(speeds) + ' GFLOP/s' if speeds else 'not measured'}")
    for pair in report.pairs:
        between = f"{report.label(pair.first)} - {report.label(pair.second)}"
        if any(report.nodes[index].is_silent for index in (pair.first, pair.second)) and pair.trouble:
            lines.append(f"{between}: not measured, as one of them has stopped answering")
        else:
            lines.append(f"{between}: {pair.trouble or _of_pair_in_words(pair)}")
    return lines


def _of_pair_in_words(pair: CheckedPair) -> str:
    return (
        f"{min(pair.latency_seconds) * 1e6:.0f} us, {size_in_words(int(max(pair.bandwidth)))}/s ({pair.backend})"
        if pair.latency_seconds and pair.bandwidth
        else "not measured"
    )


def _gpus(hardware: NodeHardware) -> str:
    names = sorted(gpu.name or "of unknown name" for gpu in hardware.gpus.devices)
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "no GPU"


SHOULD_BE_ALIKE: tuple[tuple[str, Callable[[NodeHardware], str], bool], ...] = (
    ("versions of torch", lambda one: str(one.versions.torch), True),
    ("versions of elastic_ext", lambda one: str(one.versions.elastic_ext), True),
    ("versions of Python", lambda one: ".".join(one.versions.python.split(".")[:2]), True),
    ("GPUs", _gpus, False),
    ("GPU drivers", lambda one: str(one.gpus.driver_version), False),
    ("processors", lambda one: f"{one.cpu.effective_cores:g} cores of {one.cpu.model}", False),
)
"""What should be alike on all nodes: its name, a function that reads it of a node, and whether jobs fail otherwise."""


def _of_pairs(report: PairReport) -> Iterator[Finding]:
    for pair in report.pairs:
        nodes = report.nodes[pair.first], report.nodes[pair.second]
        if pair.trouble is not None and not any(node.is_silent for node in nodes):
            yield error(
                f"{nodes[0].label} and {nodes[1].label} could not exchange data: {pair.trouble}",
                "a job on both of them would hang or fail",
                "look whether a firewall is between them, which address each host name stands for, and set "
                "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that leads from one to the other",
            )


def _of_speed(report: PairReport) -> Iterator[Finding]:
    for kind in ("cpu", "cuda"):
        speeds = {
            f"{node.label}, {device}": windows
            for node in report.nodes
            if not node.is_silent
            for device, windows in node.matmul.items()
            if device.startswith(kind)
        }
        if len(speeds) > 1:
            yield from _of_measure("matmul", speeds, is_rate=True)
    if sum(not node.is_silent for node in report.nodes) < 3:  # of a single pair nobody can tell whose fault it is
        for pair in report.pairs:
            if pair.trouble is None and pair.latency_seconds and pair.bandwidth:
                yield ok(f"{report.label(pair.first)} and {report.label(pair.second)}: {_of_pair_in_words(pair)}")
        return
    latency = best_by_node(report, lambda pair: pair.latency_seconds, min)
    bandwidth = best_by_node(report, lambda pair: pair.bandwidth, max)
    yield from _of_measure("latency", {label: one for label, one in latency.items() if one}, is_rate=False)
    yield from _of_measure("bandwidth", {label: one for label, one in bandwidth.items() if one}, is_rate=True)


_WORDS = {
    "matmul": ("computes", "look at its clock, temperature and what else runs there"),
    "latency": ("answers", "look at its network interface and its place in the network, and what else runs there"),
    "bandwidth": ("exchanges data", "look at the speed of its network interface, its cable, and what else uses it"),
}


def _of_measure(measure: str, values: Mapping[str, tuple[float, ...]], *, is_rate: bool) -> Iterator[Finding]:
    """Findings on nodes by one measure; measures are never added up, since a node that is slow by one may be fast by
    another."""
    standings = compared_nodes(values, is_rate=is_rate, least_share=_LEAST_SHARES[measure])
    does, to_do = _WORDS[measure]
    for label, standing in standings.items():
        if standing.state == "straggler":
            yield warning(
                f"{label} {does} slowly: {standing.reason}", "at every step all nodes wait for the slowest one", to_do
            )
        elif standing.state == "undecided" and standing.times_slower is not None:
            yield note(
                f"{label} {does} more slowly: {standing.reason}",
                "it may be a straggler, or noise",
                "run elastic-ext doctor again",
            )
    if values and all(standing.state == "normal" for standing in standings.values()):
        yield ok(f"no straggler by {measure}: {_middle(measure, standings, values)}")


def _middle(measure: str, standings: Mapping[str, NodeComparison], values: Mapping[str, tuple[float, ...]]) -> str:
    middle = statistics.median(statistics.median(windows) for windows in values.values())
    worst = max(standing.times_slower or 1.0 for standing in standings.values())
    amount = {
        "matmul": f"{middle / 1e9:.1f} GFLOP/s",
        "latency": f"{middle * 1e6:.0f} us",
        "bandwidth": f"{size_in_words(int(middle))}/s",
    }[measure]
    return f"the median is {amount}, the slowest is {worst:.2f} times as slow"
