"""What a master keeps of nodes and events, as records that stand in its store."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from elastic_ext.record_json import object_of, record_of

__all__ = ["MASTERS_OWN", "EventRecord", "NodeRecord"]

MASTERS_OWN = ""
"""The node of events that are the master's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EventRecord:
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

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EventRecord:
        """The record that ``to_json`` gave; ValueError for anything else."""
        return record_of(cls, object_of(text))


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    """A node that has joined, and what its machine has."""

    node_id: str
    incarnation: int
    host: str
    pid: int
    library: str
    started_at: float
    state: str
    hardware: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NodeRecord:
        """The record that ``to_json`` gave; ValueError for anything else."""
        return record_of(cls, object_of(text))
