"""The events of a job, numbered in the order in which its master heard of them, and the records that the store keeps.
Bounded, and pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_ext.records.json import JsonRecord, object_of
from elastic_ext.records.text import counted, on_one_line

__all__ = ["MASTERS_OWN", "EventLog", "EventRecord", "NodeRecord", "refusal_in"]


# --- what a master keeps of nodes and events, as records that stand in its store -------------------------------------

MASTERS_OWN = ""
"""The node of events that are the master's."""
_MOST_REASON = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class EventRecord(JsonRecord):
    """Something that happened in the job."""

    number: int
    """Events are counted for as long as there is the job."""
    time: float
    node_id: str
    rank: int
    step: int
    kind: str
    text: str
    details: str
    """JSON, as it came."""
    restart: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord(JsonRecord):
    """A node that has joined, and what its machine has."""

    node_id: str
    incarnation: int
    host: str
    pid: int
    library: str
    started_at: float
    state: str
    hardware: str
    agent_id: str = ""
    """As the job's agents call it in a membership plan."""


def refusal_in(event: EventRecord) -> tuple[int, str] | None:
    """Which version of the config ranks say that they refuse, and why; None where an event says no such thing."""
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


# --- what happened in a job, numbered in the order in which the master heard of it -----------------------------------
# A node may tell of so many events in a while and no more: what is beyond that is counted and told of in one event.

_MOST_EVENTS = 5_000
_MOST_TEXT = 4_000
_MOST_DETAILS = 8_000
_PER_SECOND = 5.0  # of one node, in the long run,
_AT_ONCE = 200.0  # ... and at once
_MOST_NODES = 20_000


class EventLog:
    """The newest events. ``take_new`` gives those that are to be stored."""

    def __init__(self, events: Sequence[EventRecord] = ()) -> None:
        self._events: deque[EventRecord] = deque(events, maxlen=_MOST_EVENTS)
        self._number = events[-1].number if events else 0
        self._new: deque[EventRecord] = deque(maxlen=_MOST_EVENTS)
        self._allowances: dict[str, tuple[float, float]] = {}  # node -> how many more, as of when
        self._num_dropped: dict[str, int] = {}

    @property
    def number(self) -> int:
        """Of the newest event; 0 before there is any."""
        return self._number

    def tell(self, now: float, kind: str, text: str, *, node_id: str = MASTERS_OWN) -> EventRecord:
        """Something that the master itself has to say; ``now`` is seconds since 1970."""
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
        """An event of a node; whether it was taken. ``clock`` is the master's own."""
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
        """One event for each node that has told of more than was taken since the last call."""
        for node_id, number in self._num_dropped.items():
            words = f"{counted(number, 'event')} of node {node_id} are left out, as it tells of too many"
            self.tell(now, "events-dropped", words, node_id=node_id)
        self._num_dropped.clear()

    def after(self, number: int, *, most: int = 0) -> Sequence[EventRecord]:
        """The events that came after the one with ``number``; no more than the newest ``most`` of them."""
        first = self._events[0].number if self._events else 0
        skipped = max(number + 1 - first, len(self._events) - most if most else 0, 0)
        return [self._events[index] for index in range(skipped, len(self._events))]

    def take_new(self) -> Sequence[EventRecord]:
        """Those that have come since the last call."""
        found = list(self._new)
        self._new.clear()
        return found

    def give_back(self, events: Sequence[EventRecord]) -> None:
        """They could not be stored, and are taken again."""
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
