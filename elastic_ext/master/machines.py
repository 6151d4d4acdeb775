"""Facts about the machines of a job's nodes, and measurements of the links between them, for a master. Pure."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_ext.doctor.findings import check_node
from elastic_ext.doctor.records import NodeHardware
from elastic_ext.doctor.report import SHOULD_BE_ALIKE
from elastic_ext.records.text import counted, size_in_words

from .node_metrics import shortened

__all__ = [
    "BadMachines",
    "LinkMeasurement",
    "MachineMeasurements",
    "MeasuredMachine",
    "NodeFacts",
    "facts_of",
    "measured_in",
    "named",
    "unlike_nodes",
    "why_refused",
]


# --- what a master keeps of a node's hardware: where it is, what it has in a line, what is wrong with it -------------
# The record that an agent sends has some kilobytes, and a master may have thousands of nodes.

_MOST_RECORD_TEXT = 1 << 18  # characters of a record
_MOST_TROUBLES = 8
_MOST_NAMED = 5
_MOST_TOLD = 10_000
_MOST_REASON = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """What a master keeps of the machine of one node: its hardware in a line, and what is wrong with it."""

    node_id: str
    host: str
    boot_id: str | None = None
    """The boot id of the machine, the same for all nodes on it; None where it is not known."""
    in_words: str = ""
    """The machine's cores, memory, GPUs and torch version in a line; empty where they are not known."""
    traits: tuple[str, ...] = ()
    """The values that should be alike on all nodes, in the order of ``SHOULD_BE_ALIKE``; empty where not known."""
    troubles: tuple[str, ...] = ()


def facts_of(node_id: str, host: str, text: str, *, num_nodes: int = 1) -> NodeFacts:
    """The facts of a node from its hardware record ``text`` (JSON; empty where there is none yet).

    ``num_nodes`` is how many nodes the job has, on which it depends what is wrong with a machine.
    """
    if not text:
        return NodeFacts(node_id=node_id, host=host)
    try:
        hardware = _hardware_in(text)
    except ValueError as error:
        trouble = shortened(f"its hardware record cannot be read: {error}")
        return NodeFacts(node_id=node_id, host=host, troubles=(trouble,))
    refused, warnings = check_node(hardware, num_nodes=num_nodes)
    troubles = [] if refused is None else [refused]
    return NodeFacts(
        node_id=node_id,
        host=host,
        boot_id=shortened(hardware.system.boot_id, 64) if hardware.system.boot_id else None,
        in_words=sys.intern(shortened(_in_words(hardware))),  # nodes are alike, as a rule, and there may be thousands
        traits=tuple(sys.intern(shortened(ask(hardware), 120)) for _, ask, _ in SHOULD_BE_ALIKE),
        troubles=tuple(sys.intern(shortened(each, _MOST_REASON)) for each in (*troubles, *warnings)[:_MOST_TROUBLES]),
    )


def why_refused(text: str, num_nodes: int) -> str | None:
    """Why a machine must not be one of a job's ``num_nodes``, by its hardware record ``text``; None where it may.

    A machine without a record that can be read may be.
    """
    try:
        hardware = _hardware_in(text)
    except ValueError:
        return None
    reason, _ = check_node(hardware, num_nodes=num_nodes)
    return None if reason is None else shortened(reason, _MOST_REASON)


class BadMachines:
    """Decides which nodes are refused for errors of their machine, if bad machines are to be refused."""

    def __init__(self, *, are_refused: bool) -> None:
        self._are_refused = are_refused
        self._told: set[str] = set()

    def look(self, node_id: str, hardware: str, num_nodes: int) -> tuple[str | None, bool]:
        """Why a node is refused as one of ``num_nodes``, or None; and whether that is news, as the node tries again."""
        why_not = why_refused(hardware, num_nodes) if self._are_refused and hardware else None
        if why_not is None:
            if hardware:
                self._told.discard(node_id)
            return None, False
        is_news = node_id not in self._told
        if len(self._told) >= _MOST_TOLD:
            self._told.clear()
        self._told.add(node_id)
        return why_not, is_news


def unlike_nodes(nodes: Sequence[NodeFacts]) -> Iterable[tuple[str, str, bool]]:
    """The differences between nodes that should be alike: a sentence, what differs, and whether that may end a job."""
    known = [each for each in nodes if each.traits]
    for number, (what, _, is_bad) in enumerate(SHOULD_BE_ALIKE):
        values = Counter(each.traits[number] for each in known)
        if len(values) < 2:
            continue
        usual, num = max(values.items(), key=lambda item: (item[1], item[0]))
        parts = [f"{_short(usual)} on {counted(num, 'node')}"]
        for value in sorted(values.keys() - {usual}, key=lambda each: (-values[each], each))[:_MOST_NAMED]:
            parts.append(f"{_short(value)} on {named(each.host for each in known if each.traits[number] == value)}")
        yield f"nodes have unlike {what}: {'; '.join(parts)}", what, is_bad


def named(names: Iterable[str]) -> str:
    """A list of names in words: the first few, and how many more there are."""
    found = sorted(set(names))
    listed = ", ".join(found[:_MOST_NAMED])
    return listed if len(found) <= _MOST_NAMED else f"{listed} and {len(found) - _MOST_NAMED:,} more"


def _hardware_in(text: str) -> NodeHardware:
    if len(text) > _MOST_RECORD_TEXT:
        raise ValueError(f"it has {len(text)} characters, and {_MOST_RECORD_TEXT} are allowed")
    return NodeHardware.from_json(text)


def _in_words(hardware: NodeHardware) -> str:
    parts = [
        f"{hardware.cpu.effective_cores:g} cores",
        size_in_words(hardware.memory.effective_bytes),
        *(f"{num} x {name}" for name, num in Counter(gpu.name or "GPU" for gpu in hardware.gpus.devices).items()),
        f"torch {hardware.versions.torch}",
    ]
    return ", ".join(parts)


def _short(value: str) -> str:
    return value if len(value) <= 60 else f"{value[:57]}..."


# --- what nodes have measured of themselves and of each other, as a master keeps it: by machine, and bounded ---------

_MOST_REPORT_TEXT = 16 << 20
_MOST_NODES = 2048
_MOST_PAIRS = 32768
_MOST_WINDOWS = 8
_MOST_DEVICES = 32
_MOST = 1e18


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredMachine:
    """A machine that has taken part in the measurement of pairs of nodes."""

    name: str
    """The name for people: the machine's host, with an id where several machines have that host name."""
    host: str
    boot_id: str | None
    is_silent: bool
    """Whether the machine stopped answering before the measurement was over."""
    matmul: Mapping[str, tuple[float, ...]]
    """Floating-point operations per second in each window of time, by device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkMeasurement:
    """The measurement of the network link between two machines, with all its windows of time.

    Machines are indices into ``MachineMeasurements.machines``, the lower first.
    """

    first: int
    second: int
    latencies: tuple[float, ...]
    """The latency of the link in each window of time, in seconds, one way."""
    bandwidths: tuple[float, ...]
    """The bandwidth of the link in each window of time, in bytes per second."""
    trouble: str | None = None
    """Why the two machines could not exchange data, in words; None where they could."""

    @property
    def latency_seconds(self) -> float | None:
        """The lowest latency: that of the network, while the machines themselves add to the others."""
        return min(self.latencies, default=None)

    @property
    def bandwidth(self) -> float | None:
        """The highest bandwidth in bytes per second: that of the network, as machines only slow it down."""
        return max(self.bandwidths, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineMeasurements:
    """What pairs of nodes have measured of their machines and links; the same, in whatever order it was reported."""

    machines: tuple[MeasuredMachine, ...] = ()
    links: tuple[LinkMeasurement, ...] = ()
    num_wanted: int = 0
    """How many nodes the measurement waited for; fewer may have come."""
    trouble: str | None = None
    """Why the measurement ended before all pairs were measured, in words; None where it did not."""


def measured_in(text: str) -> MachineMeasurements:
    """The measurements in what ``elastic-ext doctor --json`` prints for pairs of nodes; ValueError for anything else.

    Of several processes of one machine the best values count, and there is no link between them.
    """
    report = _report_in(text)
    nodes = [_node(each) for each in _rows(report, "nodes", _MOST_NODES)]
    order = sorted(range(len(nodes)), key=lambda place: _sort_key(nodes[place]))
    places: dict[tuple[str, str], int] = {}
    place_of = {index: places.setdefault(_identity(nodes[index]), len(places)) for index in order}
    machines: list[MeasuredMachine | None] = [None] * len(places)
    for index in order:
        machines[place_of[index]] = _joined(machines[place_of[index]], nodes[index])
    links: dict[tuple[int, int], list[LinkMeasurement]] = {}
    for each in _rows(report, "pairs", _MOST_PAIRS):
        link = _link(each, place_of)
        if link.first != link.second:
            links.setdefault((link.first, link.second), []).append(link)
    return MachineMeasurements(
        machines=tuple(_with_names([each for each in machines if each is not None])),
        links=tuple(_best(row) for _, row in sorted(links.items())),
        num_wanted=_whole(report.get("num_wanted"), "num_wanted"),
        trouble=_words_or_none(report.get("trouble")),
    )


# ---- reading ----


def _report_in(text: str) -> Mapping[str, Any]:
    """The report of pairs in ``text``: the JSON object itself, or the last line with one that the command prints."""
    if len(text) > _MOST_REPORT_TEXT:
        raise ValueError(f"the report has {len(text)} characters; allowed: {_MOST_REPORT_TEXT}")
    lines = [line for line in text.splitlines() if line.startswith('{"record": "pairs"')]
    try:
        found = json.loads(lines[-1] if lines else text)
    except (ValueError, RecursionError):
        raise ValueError(
            "the report is not what elastic-ext doctor --rdzv-endpoint HOST:PORT --json prints: it is no JSON"
        ) from None
    if not isinstance(found, dict) or "nodes" not in found or "pairs" not in found:
        raise ValueError(
            "the report tells of no pairs of nodes; "
            "give what elastic-ext doctor --rdzv-endpoint HOST:PORT --json prints"
        )
    return found


def _rows(found: Mapping[str, Any], name: str, most: int) -> list[Mapping[str, Any]]:
    rows = found.get(name)
    if not isinstance(rows, list) or not all(isinstance(each, dict) for each in rows):
        raise ValueError(f"{name} is no list of objects")
    if len(rows) > most:
        raise ValueError(f"{name} has {len(rows)} rows; allowed: {most}")
    return rows


def _node(found: Mapping[str, Any]) -> MeasuredMachine:
    hardware = _object(found.get("hardware"))
    label = shortened(str(found.get("label", "")), 80)
    matmul = _object(found.get("matmul"))
    return MeasuredMachine(
        name=label,
        host=_words_or_none(_object(hardware.get("network")).get("host")) or label,
        boot_id=_words_or_none(_object(hardware.get("system")).get("boot_id")),
        is_silent=found.get("is_silent") is True,
        matmul={shortened(str(name), 40): _amounts(row) for name, row in list(matmul.items())[:_MOST_DEVICES]},
    )


def _link(found: Mapping[str, Any], place_of: Mapping[int, int]) -> LinkMeasurement:
    ends = [_whole(found.get(name), name) for name in ("first", "second")]
    if not all(each in place_of for each in ends):
        raise ValueError(f"a pair is of nodes {ends[0]} and {ends[1]}, and there are {len(place_of)} nodes")
    first, second = sorted(place_of[each] for each in ends)
    return LinkMeasurement(
        first=first,
        second=second,
        latencies=_amounts(found.get("latency_seconds")),
        bandwidths=_amounts(found.get("bandwidth")),
        trouble=_words_or_none(found.get("trouble")),
    )


def _object(found: object) -> Mapping[str, Any]:
    return found if isinstance(found, dict) else {}


def _whole(found: object, name: str) -> int:
    if type(found) is not int or not 0 <= found <= 2**31:
        raise ValueError(f"{name} is {shortened(repr(found), 60)}; allowed: a whole number")
    return found


def _amounts(found: object) -> tuple[float, ...]:
    """The numbers above 0 in a list; an empty tuple for anything else."""
    rows = found if isinstance(found, list) else []
    return tuple(float(each) for each in rows[:_MOST_WINDOWS] if type(each) in (int, float) and 0 < each <= _MOST)


def _words_or_none(found: object) -> str | None:
    return shortened(found, 200) if isinstance(found, str) and found else None


# ---- several processes of one machine ----


def _identity(node: MeasuredMachine) -> tuple[str, str]:
    """What identifies a node's machine: its boot id, or else its host name."""
    return ("boot", node.boot_id) if node.boot_id is not None else ("host", node.host)


def _sort_key(node: MeasuredMachine) -> tuple[Any, ...]:
    return node.host, node.boot_id or "", node.is_silent, sorted(node.matmul.items()), node.name


def _joined(known: MeasuredMachine | None, node: MeasuredMachine) -> MeasuredMachine:
    if known is None:
        return node
    devices = sorted({*known.matmul, *node.matmul})
    return MeasuredMachine(
        name=known.name,
        host=known.host,
        boot_id=known.boot_id,
        is_silent=known.is_silent and node.is_silent,
        matmul={name: max(known.matmul.get(name, ()), node.matmul.get(name, ())) for name in devices},
    )


def _with_names(machines: Sequence[MeasuredMachine]) -> Iterator[MeasuredMachine]:
    """The machines, each named by its host, with an id added where several have the same host name."""
    hosts = Counter(each.host for each in machines)
    for each in machines:
        name = each.host if hosts[each.host] == 1 else f"{each.host} ({(each.boot_id or each.name)[:8]})"
        yield MeasuredMachine(
            name=name, host=each.host, boot_id=each.boot_id, is_silent=each.is_silent, matmul=each.matmul
        )


def _best(links: Sequence[LinkMeasurement]) -> LinkMeasurement:
    troubles = sorted(each.trouble for each in links if each.trouble is not None)
    return LinkMeasurement(
        first=links[0].first,
        second=links[0].second,
        latencies=_window_by_window(min, [each.latencies for each in links if each.latencies]),
        bandwidths=_window_by_window(max, [each.bandwidths for each in links if each.bandwidths]),
        trouble=troubles[0] if len(troubles) == len(links) else None,
    )


def _window_by_window(best: Callable[[Sequence[float]], float], rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(best(window) for window in zip(*rows, strict=False) if all(map(math.isfinite, window)))
