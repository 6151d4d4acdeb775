"""What a master keeps of a node's hardware: where it is, what it has in a line, what is wrong with it. Pure.

The record that an agent sends has some kilobytes, and a master may have thousands of nodes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic_ext.doctor.hardware_records import NodeHardware
from elastic_ext.doctor.machine import check_node
from elastic_ext.doctor.pair_report import SHOULD_BE_ALIKE
from elastic_ext.records.text import counted, size_in_words

from .amounts import words

__all__ = ["BadMachines", "NodeFacts", "facts_of", "named", "unlike_nodes", "why_refused"]

_MOST_TEXT = 1 << 18  # characters of a record
_MOST_TROUBLES = 8
_MOST_NAMED = 5
_MOST_TOLD = 10_000
_MOST_REASON = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """One node's."""

    node_id: str
    host: str
    boot_id: str | None = None
    """The same for all that runs on one machine; None where that is not known."""
    in_words: str = ""
    """What it has, in a line; empty where that is not known."""
    traits: tuple[str, ...] = ()
    """What should be alike on all nodes, in the order of ``SHOULD_BE_ALIKE``; empty where that is not known."""
    troubles: tuple[str, ...] = ()


def facts_of(node_id: str, host: str, text: str, *, num_nodes: int = 1) -> NodeFacts:
    """What is kept of a node of a job of ``num_nodes`` that has sent ``text``, empty where it knows nothing yet."""
    if not text:
        return NodeFacts(node_id=node_id, host=host)
    try:
        hardware = _hardware_in(text)
    except ValueError as error:
        trouble = words(f"what it tells of its hardware cannot be read: {error}")
        return NodeFacts(node_id=node_id, host=host, troubles=(trouble,))
    refused, warnings = check_node(hardware, num_nodes=num_nodes)
    troubles = [] if refused is None else [refused]
    return NodeFacts(
        node_id=node_id,
        host=host,
        boot_id=words(hardware.system.boot_id, 64) if hardware.system.boot_id else None,
        in_words=sys.intern(words(_in_words(hardware))),  # nodes are alike, as a rule, and there may be thousands
        traits=tuple(sys.intern(words(ask(hardware), 120)) for _, ask, _ in SHOULD_BE_ALIKE),
        troubles=tuple(sys.intern(words(each, _MOST_REASON)) for each in (*troubles, *warnings)[:_MOST_TROUBLES]),
    )


def why_refused(text: str, num_nodes: int) -> str | None:
    """Why a machine must not be one of ``num_nodes`` of a job, by what its agent has sent; None where it may.

    One that has told nothing yet, or nothing that can be read, may: it is no worse for that.
    """
    try:
        hardware = _hardware_in(text)
    except ValueError:
        return None
    reason, _ = check_node(hardware, num_nodes=num_nodes)
    return None if reason is None else words(reason, _MOST_REASON)


class BadMachines:
    """The nodes that are kept out for their machine, where that was asked for."""

    def __init__(self, *, are_refused: bool) -> None:
        self._are_refused = are_refused
        self._told: set[str] = set()

    def look(self, node_id: str, hardware: str, num_nodes: int) -> tuple[str | None, bool]:
        """Why a node must not be one of so many, if it must not, and whether that is news: it comes again and again."""
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
    """What is unlike on nodes that should be alike, in a sentence; what it is; and whether it may end a job."""
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
    """Some of them by name, and how many more there are."""
    found = sorted(set(names))
    listed = ", ".join(found[:_MOST_NAMED])
    return listed if len(found) <= _MOST_NAMED else f"{listed} and {len(found) - _MOST_NAMED:,} more"


def _hardware_in(text: str) -> NodeHardware:
    if len(text) > _MOST_TEXT:
        raise ValueError(f"it has {len(text)} characters, and {_MOST_TEXT} are allowed")
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
