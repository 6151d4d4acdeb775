"""What nodes have measured of themselves and of each other, as a master keeps it: by machine, and bounded. Pure."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .amounts import words

__all__ = ["Link", "Measured", "MeasuredMachine", "measured_in"]

_MOST_TEXT = 16 << 20
_MOST_NODES = 2048
_MOST_PAIRS = 32768
_MOST_WINDOWS = 8
_MOST_DEVICES = 32
_MOST = 1e18


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredMachine:
    """One that has taken part."""

    name: str
    """What people call it: its host, with more where several hosts are called so."""
    host: str
    boot_id: str | None
    is_silent: bool
    """It stopped to answer before all was done."""
    matmul: Mapping[str, tuple[float, ...]]
    """Floating-point operations a second in each window of time, by device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The way between two machines, by their places in ``Measured.machines``, the lower first."""

    first: int
    second: int
    latencies: tuple[float, ...]
    """Seconds, one way, in each window of time,"""
    bandwidths: tuple[float, ...]
    """... and bytes a second."""
    trouble: str | None = None

    @property
    def latency_seconds(self) -> float | None:
        """The least: it is the network's, and what is above it the machines'."""
        return min(self.latencies, default=None)

    @property
    def bandwidth(self) -> float | None:
        """The most, for the same reason."""
        return max(self.bandwidths, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """All that was measured; the same, whatever order it was told in."""

    machines: tuple[MeasuredMachine, ...] = ()
    links: tuple[Link, ...] = ()
    num_wanted: int = 0
    trouble: str | None = None


def measured_in(text: str) -> Measured:
    """What ``elastic-ext doctor --json`` has told of pairs of nodes; ValueError for anything else.

    Of several processes of one machine it is the best that counts, and what lies between them is no link.
    """
    report = _report_in(text)
    nodes = [_node(each) for each in _rows(report, "nodes", _MOST_NODES)]
    order = sorted(range(len(nodes)), key=lambda place: _sort_key(nodes[place]))
    places: dict[tuple[str, str], int] = {}
    place_of = {index: places.setdefault(_identity(nodes[index]), len(places)) for index in order}
    machines: list[MeasuredMachine | None] = [None] * len(places)
    for index in order:
        machines[place_of[index]] = _joined(machines[place_of[index]], nodes[index])
    links: dict[tuple[int, int], list[Link]] = {}
    for each in _rows(report, "pairs", _MOST_PAIRS):
        link = _link(each, place_of)
        if link.first != link.second:
            links.setdefault((link.first, link.second), []).append(link)
    return Measured(
        machines=tuple(_with_names([each for each in machines if each is not None])),
        links=tuple(_best(row) for _, row in sorted(links.items())),
        num_wanted=_whole(report.get("num_wanted"), "num_wanted"),
        trouble=_words_or_none(report.get("trouble")),
    )


# ---- reading ----


def _report_in(text: str) -> Mapping[str, Any]:
    """The one object, or the one line among those that the command prints."""
    if len(text) > _MOST_TEXT:
        raise ValueError(f"the report has {len(text)} characters; allowed: {_MOST_TEXT}")
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
    label = words(str(found.get("label", "")), 80)
    matmul = _object(found.get("matmul"))
    return MeasuredMachine(
        name=label,
        host=_words_or_none(_object(hardware.get("network")).get("host")) or label,
        boot_id=_words_or_none(_object(hardware.get("system")).get("boot_id")),
        is_silent=found.get("is_silent") is True,
        matmul={words(str(name), 40): _amounts(row) for name, row in list(matmul.items())[:_MOST_DEVICES]},
    )


def _link(found: Mapping[str, Any], place_of: Mapping[int, int]) -> Link:
    ends = [_whole(found.get(name), name) for name in ("first", "second")]
    if not all(each in place_of for each in ends):
        raise ValueError(f"a pair is of nodes {ends[0]} and {ends[1]}, and there are {len(place_of)} nodes")
    first, second = sorted(place_of[each] for each in ends)
    return Link(
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
        raise ValueError(f"{name} is {words(repr(found), 60)}; allowed: a whole number")
    return found


def _amounts(found: object) -> tuple[float, ...]:
    """Those that can be: above 0."""
    rows = found if isinstance(found, list) else []
    return tuple(float(each) for each in rows[:_MOST_WINDOWS] if type(each) in (int, float) and 0 < each <= _MOST)


def _words_or_none(found: object) -> str | None:
    return words(found, 200) if isinstance(found, str) and found else None


# ---- several processes of one machine ----


def _identity(node: MeasuredMachine) -> tuple[str, str]:
    """Of a machine, as well as it is known."""
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
    """Called by their hosts, and where several are called the same by more."""
    hosts = Counter(each.host for each in machines)
    for each in machines:
        name = each.host if hosts[each.host] == 1 else f"{each.host} ({(each.boot_id or each.name)[:8]})"
        yield MeasuredMachine(
            name=name, host=each.host, boot_id=each.boot_id, is_silent=each.is_silent, matmul=each.matmul
        )


def _best(links: Sequence[Link]) -> Link:
    troubles = sorted(each.trouble for each in links if each.trouble is not None)
    return Link(
        first=links[0].first,
        second=links[0].second,
        latencies=_window_by_window(min, [each.latencies for each in links if each.latencies]),
        bandwidths=_window_by_window(max, [each.bandwidths for each in links if each.bandwidths]),
        trouble=troubles[0] if len(troubles) == len(links) else None,
    )


def _window_by_window(best: Callable[[Sequence[float]], float], rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(best(window) for window in zip(*rows, strict=False) if all(map(math.isfinite, window)))
