"""The events of a job, numbered in the order in which its master heard of them, and the records that the store keeps.
Bounded, and pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from elastic_ext.config.history import CONFIG_EVENTS, refused_in, unset_values
from elastic_ext.records.json import JsonRecord, object_of
from elastic_ext.records.text import counted, on_one_line

__all__ = [
    "MASTERS_OWN",
    "EventLog",
    "EventRecord",
    "HeardRecord",
    "NodeRecord",
    "beginnings_in",
    "refusal_in",
    "refused_versions",
    "unset_values_of",
]


# --- what a master keeps of nodes and events, as records that stand in its store -------------------------------------

MASTERS_OWN = ""
"""The node id in events that the master itself writes, unless they are about one node."""
_MOST_REASON = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class EventRecord(JsonRecord):
    """An event of a job, as the master keeps it."""

    number: int
    """The number of the event, counted over the whole life of the job."""
    time: float
    node_id: str
    """The node that the event comes from or, of an event of the master, is about; ``MASTERS_OWN`` for none."""
    rank: int
    """The rank that the event is of; -1 for an event of the agent or the master."""
    step: int
    """The step at which it was; -1 where it belongs to no step."""
    kind: str
    text: str
    details: str
    """The event's details as JSON, as the node has sent it."""
    restart: int
    """How often the job's processes had been restarted by then, as the node counts; 0 in the master's own events."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord(JsonRecord):
    """A node that has joined, with the hardware record of its machine, as the store keeps it."""

    node_id: str
    incarnation: int
    host: str
    pid: int
    library: str
    started_at: float
    state: str
    hardware: str
    agent_id: str = ""
    """The agent's id in membership plans."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeardRecord(JsonRecord):
    """Which of an agent's events the master has: a beat whose answer was lost comes again, to its next process too."""

    node_id: str
    incarnation: int
    num_heard: int
    """The number of the last event heard from the agent, by the agent's own count."""
    num_dropped: int
    """How many events the agent had dropped by its last beat, since the last beat whose answer it had."""


def refusal_in(event: EventRecord) -> tuple[int, str] | None:
    """The config version that a rank's event says is refused, and why; None for an event of another kind."""
    if event.kind != "config-refused" or event.rank < 0:
        return None
    try:
        details = object_of(event.details)
    except ValueError:
        return None
    version, why = details.get("version"), details.get("why")
    if type(version) is not int or not isinstance(why, str):
        return None
    return version, on_one_line(why[:_MOST_REASON])


class _ConfigEvent(Protocol):
    """The part of an event that says what became of a version of the config."""

    @property
    def rank(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def details(self) -> str: ...


def refused_versions(events: Iterable[_ConfigEvent]) -> dict[str, str]:
    """Why ranks have refused versions of the config, by the digest of their contents, as ``events`` say it."""
    return refused_in(_told_of_configs(events))


def unset_values_of(events: Iterable[_ConfigEvent]) -> dict[str, object]:
    """The values in force of keys that no version of the config sets, by dotted key, as ``events`` say it."""
    return unset_values(_told_of_configs(events))


def _told_of_configs(events: Iterable[_ConfigEvent]) -> list[tuple[str, Mapping[str, object]]]:
    """The kinds and details of the events in which ranks say what became of versions."""
    told: list[tuple[str, Mapping[str, object]]] = []
    for event in events:
        if event.kind in CONFIG_EVENTS and event.rank >= 0:
            with suppress(ValueError):
                told.append((event.kind, object_of(event.details)))
    return told


class _RankEvent(Protocol):
    """The part of an event that says where a training has begun."""

    @property
    def time(self) -> float: ...
    @property
    def rank(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def kind(self) -> str: ...


def beginnings_in(events: Iterable[_RankEvent]) -> list[float]:
    """When trainings have begun with their first step, in seconds since 1970, by the events of rank 0."""
    return sorted(each.time for each in events if each.kind == "training-began" and each.rank == each.step == 0)


# --- what happened in a job, numbered in the order in which the master heard of it -----------------------------------
# The events of a node are limited in rate: those beyond the limit are counted, and one event says how many there were.

_MOST_EVENTS = 5_000
_MOST_TEXT = 4_000
_MOST_DETAILS = 8_000
_PER_SECOND = 5.0  # of one node, in the long run,
_AT_ONCE = 200.0  # ... and at once
_MOST_NODES = 20_000


class EventLog:
    """The newest events of a job, numbered; ``take_new`` gives those that are to be stored."""

    def __init__(self, events: Sequence[EventRecord] = ()) -> None:
        self._events: deque[EventRecord] = deque(events, maxlen=_MOST_EVENTS)
        self._number = self._settled = events[-1].number if events else 0
        self._new: deque[EventRecord] = deque(maxlen=_MOST_EVENTS)
        self._allowances: dict[str, tuple[float, float]] = {}  # node -> how many more, as of when
        self._num_dropped: dict[str, int] = {}

    @property
    def number(self) -> int:
        """The number of the newest event; 0 before there is one."""
        return self._number

    @property
    def settled(self) -> int:
        """The number of the newest event that the store has taken, or could not take when it was asked to.

        A call of ReadEvents that follows is given no later one: its reader comes back to ask for what came after an
        event, and another process of the master counts on from the store, where a later number may be another event's.
        A call that does not follow is given all events.
        """
        return self._settled

    def settle(self, number: int) -> None:
        """Note that the store has been asked to take all events up to ``number``."""
        self._settled = number

    def tell(self, now: float, kind: str, text: str, *, node_id: str = MASTERS_OWN) -> EventRecord:
        """Add an event of the master itself; ``now`` is in seconds since 1970."""
        return self._add(
            EventRecord(
                number=0,
                time=now,
                node_id=node_id,
                rank=-1,
                step=-1,
                kind=kind,
                text=text,
                details="",
                restart=0,
            )
        )

    def hear(self, clock: float, heard: EventRecord) -> bool:
        """Add an event of a node, unless it has sent too many; whether it was added. ``clock`` is monotonic."""
        left, since = self._allowances.get(heard.node_id, (_AT_ONCE, clock))
        left = min(_AT_ONCE, left + (clock - since) * _PER_SECOND)
        if left < 1:
            self._allowances[heard.node_id] = left, clock
            self._num_dropped[heard.node_id] = self._num_dropped.get(heard.node_id, 0) + 1
            return False
        if heard.node_id not in self._allowances and len(self._allowances) >= _MOST_NODES:
            self._allowances.clear()
        self._allowances[heard.node_id] = left - 1, clock
        self._add(heard)
        return True

    def tell_of_dropped(self, now: float) -> None:
        """Add an event for each node that has sent too many events since the last call."""
        for node_id, number in self._num_dropped.items():
            words = f"{counted(number, 'event')} of node {node_id} are left out, as the node sends too many"
            self.tell(now, "events-dropped", words, node_id=node_id)
        self._num_dropped.clear()

    def after(self, number: int, *, most: int = 0, are_settled: bool = False) -> Sequence[EventRecord]:
        """The events after the one with ``number``, oldest first; the newest ``most`` of them, or all for 0.

        With ``are_settled`` those after ``settled`` are left out.
        """
        first = self._events[0].number if self._events else 0
        end = len(self._events) - (self._number - self._settled if are_settled else 0)
        begin = max(number + 1 - first, end - most if most else 0, 0)
        return [self._events[index] for index in range(begin, end)]

    def take_new(self) -> Sequence[EventRecord]:
        """The events that have come since the last call, for the store."""
        found = list(self._new)
        self._new.clear()
        return found

    def give_back(self, events: Sequence[EventRecord]) -> None:
        """Take back events that could not be stored; ``take_new`` gives them again."""
        room = _MOST_EVENTS - len(self._new)
        self._new.extendleft(reversed(events[-room:] if room else ()))

    def _add(self, event: EventRecord) -> EventRecord:
        self._number += 1
        kept = EventRecord(
            number=self._number,
            time=event.time,
            node_id=event.node_id,
            rank=event.rank,
            step=event.step,
            kind=event.kind[:100],
            text=event.text[:_MOST_TEXT],
            details=event.details if len(event.details) <= _MOST_DETAILS else "",
            restart=event.restart,
        )
        self._events.append(kept)
        self._new.append(kept)
        return kept
