"""What of a job is to be stored and is not yet: gathered as it changes, given once, and taken back where it could not
be written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from elastic_ext.tuner.decisions import Decision

from .collector import Collector
from .event_log import EventLog
from .fleet import Fleet
from .nodes import Node, Nodes
from .plans import Plans
from .records import EventRecord, NodeRecord
from .tuning import Tuning

__all__ = ["Unsaved", "UnsavedChanges"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsaved:
    """What has come since the store was given something last."""

    events: Sequence[EventRecord]
    nodes: Sequence[NodeRecord]
    forgotten: Sequence[str]
    """Nodes that have been gone for long."""
    membership: str | None
    job: str | None
    """What it is called."""
    pairs: str | None
    points: Sequence[tuple[float, str]]
    decisions: Sequence[Decision]
    """Of the tuner."""


class UnsavedChanges:
    """What has changed in the parts of one job."""

    def __init__(
        self,
        *,
        nodes: Nodes,
        fleet: Fleet,
        plans: Plans,
        log: EventLog,
        collector: Collector,
        tuning: Tuning,
        saved_until: float,
    ) -> None:
        self._nodes = nodes
        self._fleet = fleet
        self._plans = plans
        self._log = log
        self._collector = collector
        self._tuning = tuning
        self._saved_until = saved_until  # of the history
        self._changed_nodes: set[str] = set()
        self._forgotten: list[str] = []
        self._whole: set[Literal["membership", "job", "pairs"]] = set()

    def note_node(self, node_id: str) -> None:
        """Something of a node is other than it was."""
        self._changed_nodes.add(node_id)

    def note_forgotten(self, node_id: str) -> None:
        """A node is gone for good."""
        self._changed_nodes.discard(node_id)
        self._forgotten.append(node_id)

    def note(self, what: Literal["membership", "job", "pairs"]) -> None:
        """There is a new one, to be stored as a whole."""
        self._whole.add(what)

    def take(self, job: str) -> Unsaved:
        """What is to be stored; it is given once. ``job`` is what the job is called now."""
        nodes = [self._record(node) for each in self._changed_nodes if (node := self._nodes.get(each)) is not None]
        self._changed_nodes.clear()
        forgotten = [each for each in self._forgotten if self._nodes.get(each) is None]  # others have come back since
        self._forgotten.clear()
        whole, self._whole = self._whole, set()
        plan = self._plans.newest
        points = self._collector.rows(self._saved_until)
        self._saved_until = max([self._saved_until, *(time for time, _ in points)])
        return Unsaved(
            events=self._log.take_new(),
            nodes=nodes,
            forgotten=forgotten,
            membership=plan.to_json() if plan is not None and "membership" in whole else None,
            job=job if "job" in whole else None,
            pairs=self._fleet.pairs if "pairs" in whole else None,
            points=points,
            decisions=self._tuning.take_unsaved(),
        )

    def give_back(self, unsaved: Unsaved) -> None:
        """It could not be stored, and is given again."""
        self._log.give_back(unsaved.events)
        self._tuning.give_back(unsaved.decisions)
        self._forgotten += unsaved.forgotten
        self._changed_nodes.update(each.node_id for each in unsaved.nodes)
        if unsaved.membership is not None:
            self._whole.add("membership")
        if unsaved.job is not None:
            self._whole.add("job")
        if unsaved.pairs is not None:
            self._whole.add("pairs")
        self._saved_until = min([self._saved_until, *(time - 1 for time, _ in unsaved.points)])

    def _record(self, node: Node) -> NodeRecord:
        return NodeRecord(
            node_id=node.node_id,
            incarnation=node.incarnation,
            host=node.host,
            pid=node.pid,
            library=node.library,
            started_at=node.started_at,
            state=node.state,
            hardware=self._fleet.hardware(node.node_id),
            agent_id=node.agent_id,
        )
