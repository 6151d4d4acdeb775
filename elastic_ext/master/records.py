"""What a master keeps of nodes and events, as records that stand in its store."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_ext.record_json import JsonRecord

__all__ = ["MASTERS_OWN", "EventRecord", "NodeRecord"]

MASTERS_OWN = ""
"""The node of events that are the master's."""


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
