"""What a master keeps of nodes and events, as records that stand in its store."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_ext.records.json import JsonRecord, object_of
from elastic_ext.records.text import on_one_line

__all__ = ["MASTERS_OWN", "EventRecord", "NodeRecord", "refusal_in"]

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
