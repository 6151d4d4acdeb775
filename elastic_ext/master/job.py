"""Job: the state of a master's job, and the answers to agents and people. It does no I/O and reads no clock.

A config version is stored before it counts: the caller of `beat`, `propose_change`, `propose_undo` and
`propose_decided` stores the version that they give, and then calls `enter`. All else is given to the store now and
then, by `take_unsaved`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from elastic_ext.config.history import ConfigEdit
from elastic_ext.errors import ConfigError
from elastic_ext.records.text import on_one_line
from elastic_ext.tuner.decisions import Decision

from .cluster import MachineComparison, Machines
from .collector import Collector
from .configs import AuthoredVersion, ConfigBook
from .events import EventLog, EventRecord, HeardRecord, NodeRecord, refusal_in, refused_versions
from .machines import BadMachines
from .nodes import (
    MOST_HARDWARE,
    MOST_NAME,
    Fenced,
    MembershipPlans,
    Node,
    NodeChange,
    Nodes,
    RequestRefused,
    TooMany,
    UnknownNode,
    check_job,
    check_join,
)
from .store import Stored, Unsaved, UnsavedChanges
from .tuning import Mode, Run, TunerFactory, Tuning, at_once, check_decision, is_to_come
from .wire import PROTOCOL
from .wire import master_pb2 as wire

__all__ = ["Job", "JobSettings", "Now", "Unsaved"]

_MOST_EVENTS = 512  # in one message
_MOST_TROUBLE = 1_000
_ACKNOWLEDGEMENTS_PER_SECOND = 1_000  # of a config, by all agents together
_MOST_WITHIN_SECONDS = 2.0


class Now(NamedTuple):
    """The present time: ``clock`` never goes back, ``time`` is seconds since 1970."""

    clock: float
    time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSettings:
    """The settings of a master: leases, beats, which nodes are refused, and what the tuner may do."""

    library: str
    """This library's version."""
    lease_seconds: float = 30.0
    """How long a node may be silent before it counts as lost."""
    beat_seconds: float = 10.0
    """The time between two heartbeats of a node."""
    acknowledge_seconds: float = 5.0
    """How long a node may take to say that a config it was sent is in its file."""
    refuses_bad_nodes: bool = False
    """Whether nodes whose machine has errors are kept out."""
    tuning: Mode = "advise"
    """What the tuner may do, where the config does not say."""


class Job:
    """A master's job: its nodes, configs, events, metrics and tuner. Its methods for agents raise RequestRefused."""

    def __init__(
        self,
        stored: Stored,
        settings: JobSettings,
        now: Now,
        *,
        tuner: TunerFactory | None = None,
        run: Run = at_once,
    ) -> None:
        """``tuner`` makes the tuner, by default the library's; ``run`` runs its computations."""
        self.settings = settings
        self.job_id = stored.job_id
        self.epoch = stored.epoch
        self.began = now
        self.book = ConfigBook(stored.versions)
        self.event_log = EventLog(stored.events)
        self.nodes = Nodes(lease_seconds=settings.lease_seconds)
        self.membership_plans = MembershipPlans(stored.membership)
        self.name = stored.job
        """The name of the job; empty until the first agent has given it."""
        self.trouble = ""
        """The master's own trouble, such as a store that cannot be written; empty where there is none."""
        self.machines = Machines(stored.pairs)
        self.collector = Collector(fresh_seconds=4 * settings.beat_seconds)
        self.collector.restore(stored.points)
        tell, slow = self.event_log.tell, self._slow_rank
        self.tuning = Tuning(settings.tuning, stored.decisions, tell=tell, slow=slow, make=tuner, run=run)
        if self.book.newest is not None:
            self.tuning.take_config(now.time, self.book.newest.config, self.book.newest.author)
        self._bad_machines = BadMachines(are_refused=settings.refuses_bad_nodes)
        self._unsaved = UnsavedChanges(
            nodes=self.nodes,
            machines=self.machines,
            membership_plans=self.membership_plans,
            event_log=self.event_log,
            collector=self.collector,
            tuning=self.tuning,
            saved_until=now.time,
        )
        heard = {(each.node_id, each.incarnation): each for each in stored.heard}
        for node in stored.nodes:
            self._remember(node, heard.get((node.node_id, node.incarnation)), now)

    # ---- agents ----

    def join(self, now: Now, request: wire.JoinRequest) -> wire.JoinReply:
        """Let a node join the job, or join again."""
        check_join(
            request,
            job=self.name,
            job_id=self.job_id,
            epoch=self.epoch,
            library=self.settings.library,
            now_seconds=now.time,
        )
        node = request.node
        self._check_machine(now, node.node_id, request.hardware)
        before = self.nodes.get(node.node_id)
        was_lost = before is not None and before.state == "lost"
        try:
            change = self.nodes.join(
                now.clock,
                node.node_id,
                node.incarnation,
                host=node.host,
                pid=node.pid,
                library=node.library,
                started_at=node.started_at,
                agent_id=on_one_line(node.agent_id[:MOST_NAME]),
            )
        except Fenced as error:
            raise RequestRefused("fenced", str(error)) from None
        except TooMany as error:
            raise RequestRefused("limits", str(error)) from None
        self._note(now, change)
        self.machines.hear(node.node_id, node.host, request.hardware, num_nodes=self.nodes.num_present)
        if not self.name:
            self.name = request.job
            self._unsaved.note("job")
        settings = self.settings
        return wire.JoinReply(
            protocol=PROTOCOL,
            job_id=self.job_id,
            job=self.name,
            epoch=self.epoch,
            lease_seconds=settings.lease_seconds,
            beat_seconds=settings.beat_seconds,
            acknowledge_seconds=settings.acknowledge_seconds,
            library=settings.library,
            was_lost=was_lost,
        )

    def beat(self, now: Now, request: wire.BeatRequest) -> tuple[wire.BeatReply, AuthoredVersion | None]:
        """Take a node's beat; gives the reply, and the config in the node's file, to be stored, if that is newer."""
        node = self._renewed(now, request.node_id, request.incarnation)
        node.trouble = on_one_line(request.trouble[:_MOST_TROUBLE])
        if 0 < len(request.hardware) <= MOST_HARDWARE:
            self._check_machine(now, node.node_id, request.hardware, node)
            if self.machines.hear(node.node_id, node.host, request.hardware, num_nodes=self.nodes.num_present):
                self._unsaved.note_node(node.node_id)
        if request.facts and any(each.rank == 0 for each in request.workers):
            self.tuning.take_facts(now.time, request.facts)
        self.tuning.take_workers(now.time, request.workers)  # before their windows are taken out
        self.collector.take(now.time, node.node_id, request.workers, host=node.host)
        if (
            request.HasField("membership")
            and (told := self.membership_plans.take(request.membership, now.time)) is not None
        ):
            self._unsaved.note("membership")
            self.event_log.tell(now.time, "membership", told)
        before = node.num_heard, node.num_dropped
        self._hear(now, node.node_id, *_unheard(node, request))
        if (node.num_heard, node.num_dropped) != before:
            self._unsaved.note_heard(node.node_id)
        authored, wants_config = self._look_at_held(now, node, request.held)
        newest = self.book.newest
        lags = newest is not None and request.held.version < newest.config.version
        reply = wire.BeatReply(
            epoch=self.epoch,
            job_id=self.job_id,
            lease_seconds=self.settings.lease_seconds,
            beat_seconds=self.tuning.beat_seconds(self.settings.beat_seconds, self.nodes.num_present),
            config_version=self.book.version,
            config=self.book.text if lags else "",
            wants_config=wants_config,
            wants_hardware=not self.machines.hardware(node.node_id),
        )
        return reply, authored

    def check_watch(self, now: Now, request: wire.WatchRequest) -> Node:
        """Check the node that asks for the stream of configs, and renew its lease."""
        return self._renewed(now, request.node_id, request.incarnation)

    @property
    def acknowledge_within_seconds(self) -> float:
        """Within how many seconds agents are to acknowledge a config, each at a random moment of them."""
        wanted = self.nodes.num_present / _ACKNOWLEDGEMENTS_PER_SECOND
        return min(wanted, _MOST_WITHIN_SECONDS, self.settings.acknowledge_seconds / 2)

    def leave(self, now: Now, request: wire.LeaveRequest) -> None:
        """Note that a node leaves the job, with its last events."""
        self._renewed(now, request.node_id, request.incarnation)
        self._hear(now, request.node_id, request.events, 0)
        reason = on_one_line(request.reason[:_MOST_TROUBLE])
        self._note(now, self.nodes.leave(now.clock, request.node_id, request.incarnation, reason))

    def tick(self, now: Now) -> None:
        """Do what is due about once a second: leases that have run out, the metrics' history, and the tuner."""
        for change in self.nodes.tick(now.clock):
            self._note(now, change)
        for node_id in self.nodes.take_forgotten():
            self.machines.forget(node_id)
            self.collector.forget(node_id)
            self._unsaved.note_forgotten(node_id)
        for words in self.collector.tick(now.time):
            self.event_log.tell(now.time, "pace", words)
        self.tuning.tick(now.time, is_held=all(each.held_version >= self.book.version for each in self.nodes.present))
        self.event_log.tell_of_dropped(now.time)

    # ---- configs ----

    def propose_change(self, now: Now, request: wire.SetConfigRequest) -> AuthoredVersion:
        """The next config version as a person asks for it, to be stored and entered.

        Raises ConfigError for an invalid config, RequestRefused for another job.
        """
        check_job(request.job, self.name)
        changes: dict[str, object] = {}
        for key, text in request.changes.items():
            try:
                changes[key] = json.loads(text)
            except (ValueError, RecursionError):
                raise RequestRefused("invalid", f"the value of {key[:100]} is no JSON: {text[:100]!r}") from None
        edit = ConfigEdit(
            changes,
            remove=tuple(request.remove),
            reason=request.reason,
            at_step=request.at_step if request.HasField("at_step") else None,
            refused=tuple(refused_versions(self.event_log.after(0))),
        )
        return self.book.propose(edit, now=now.time)

    def propose_undo(self, now: Now, request: wire.UndoConfigRequest) -> AuthoredVersion:
        """The next config version, with the content from before the newest, to be stored and entered.

        Raises ConfigError where no earlier content is known, RequestRefused for another job.
        """
        check_job(request.job, self.name)
        return self.book.propose_undo(now=now.time, refused=refused_versions(self.event_log.after(0)))

    def decision_to_write(self, now: Now) -> Decision | None:
        """The tuner's decision that is to be written now as a config version; None where there is none."""
        waits = is_to_come(self.book.newest, step=self.collector.progress(now.time).step)
        return None if waits else self.tuning.due

    def propose_decided(self, now: Now, decision: Decision) -> AuthoredVersion:
        """The next config version as the tuner has decided it, to be stored and entered.

        Raises ConfigError for an invalid config, StaleVersion where another version has come since it was decided,
        RequestRefused where the tuner may not change a key.
        """
        check_decision(decision, self.book.newest, step=self.collector.progress(now.time).step)
        there = self.book.newest.config.values() if self.book.newest is not None else {}
        changes = {path: value for path, value in decision.changes.items() if value is not None}
        remove = tuple(path for path, value in decision.changes.items() if value is None and path in there)
        edit = ConfigEdit(changes, remove=remove, reason=decision.reason)
        return self.book.propose(edit, now=now.time, author="generated", made_from=decision.base)

    def enter(self, now: Now, authored: AuthoredVersion, *, decision: int | None = None) -> None:
        """Make a version that is stored the newest config, which all nodes are to hold.

        ``decision`` is the number of the tuner's decision that it was written for, if any.
        """
        self.book.enter(authored)
        config = authored.config
        whose = {"person": "by a person", "generated": "by the tuner", "node": f"on {authored.node_id}"}
        words = f"version {config.version} of the config was written {whose[authored.author]}"
        self.event_log.tell(now.time, "config", words + (f": {on_one_line(config.reason)}" if config.reason else ""))
        self.tuning.take_config(now.time, config, authored.author, number=decision)

    # ---- the tuner ----

    def control_tuning(self, now: Now, request: wire.ControlTuningRequest) -> None:
        """Pass a person's request (pause, resume, undo) to the tuner; RequestRefused where it is off or has failed."""
        check_job(request.job, self.name)
        self.tuning.control(now.time, request.action, on_one_line(request.reason[:_MOST_TROUBLE]))

    # ---- people ----

    def take_pairs(self, now: Now, request: wire.ReportPairsRequest) -> Sequence[str]:
        """Take a report of what pairs of nodes have measured; gives the recommendations that follow.

        Raises ValueError for anything else than such a report.
        """
        self.machines.take_pairs(request.report)
        self._unsaved.note("pairs")
        self.event_log.tell(now.time, "pairs", "pairs of nodes have measured their network links")
        return self.compared_machines.recommendations

    @property
    def compared_machines(self) -> MachineComparison:
        """The comparison of the machines of the nodes that are live or late."""
        return self.machines.comparison(self.collector.stragglers, (each.node_id for each in self.nodes.present))

    # ---- for the store ----

    def take_unsaved(self) -> Unsaved:
        """The changes that are to be stored; each is given once."""
        return self._unsaved.take(self.name)

    def give_back(self, unsaved: Unsaved) -> None:
        """Take back changes that could not be stored; ``take_unsaved`` gives them again."""
        self._unsaved.give_back(unsaved)

    # ---- how ----

    def _slow_rank(self) -> str:
        return next((each.text for each in self.collector.stragglers), "")

    def _check_machine(self, now: Now, node_id: str, hardware: str, node: Node | None = None) -> None:
        """RequestRefused for a bad machine, if bad ones are to be refused; a ``node`` that had joined then leaves."""
        why_not, is_news = self._bad_machines.look(node_id, hardware, self.nodes.num_with(node_id))
        if why_not is None:
            return
        if is_news:
            self.event_log.tell(now.time, "node-refused", f"node {node_id} is refused: {why_not}", node_id=node_id)
        if node is not None:
            self._note(now, self.nodes.leave(now.clock, node_id, node.incarnation, "its machine is refused"))
        raise RequestRefused("other", f"this machine is refused: {why_not}")

    def _renewed(self, now: Now, node_id: str, incarnation: int) -> Node:
        try:
            node, change = self.nodes.renew(now.clock, node_id, incarnation)
        except UnknownNode:
            raise RequestRefused("unknown", f"node {node_id[:MOST_NAME]!r} has not joined: join first") from None
        except Fenced as error:
            raise RequestRefused("fenced", str(error)) from None
        if change is not None:
            self._note(now, change)
        return node

    def _note(self, now: Now, change: NodeChange) -> None:
        self.event_log.tell(now.time, f"node-{change.kind}", change.text, node_id=change.node_id)
        self._unsaved.note_node(change.node_id)
        if change.kind in ("lost", "left"):
            self.collector.note_gone(change.node_id)

    def _hear(self, now: Now, node_id: str, events: Sequence[wire.JobEvent], num_dropped: int) -> None:
        for each in events[:_MOST_EVENTS]:
            heard = _heard(each, node_id, now)
            if self.event_log.hear(now.clock, heard) and (refusal := refusal_in(heard)) is not None:
                self.tuning.refuse_version(now.time, *refusal)
        if num_dropped > 0:
            words = f"node {node_id} dropped {num_dropped} events while it could not send them to the master"
            self.event_log.tell(now.time, "events-dropped", words, node_id=node_id)

    def _look_at_held(self, now: Now, node: Node, held: wire.ConfigHeld) -> tuple[AuthoredVersion | None, bool]:
        """Look at the config that a node holds: gives it, to be stored, if newer; and whether its text is needed."""
        node.held_version, node.held_digest = held.version, held.digest[:64]
        conflict = self.book.conflict(held.version, node.held_digest, node.node_id)
        if conflict is not None:
            self.event_log.tell(now.time, "config-conflict", conflict, node_id=node.node_id)
        if held.version <= self.book.version:
            node.refusal = ""
            return None, False
        if node.refused == (held.version, node.held_digest):
            return None, False
        node.refusal = ""
        if not held.text:
            return None, True
        try:
            return self.book.propose_from_file(held.text, node_id=node.node_id, now=now.time), False
        except ConfigError as error:
            node.refused = held.version, node.held_digest
            node.refusal = f"the master refuses the config in its file: {on_one_line(str(error))[:_MOST_TROUBLE]}"
            self.event_log.tell(
                now.time, "config-refused", f"node {node.node_id}: {node.refusal}", node_id=node.node_id
            )
            return None, False

    def _remember(self, node: NodeRecord, heard: HeardRecord | None, now: Now) -> None:
        """Take up a node that had joined an earlier process of this master; it has a lease to be heard of again."""
        self.nodes.join(
            now.clock,
            node.node_id,
            node.incarnation,
            host=node.host,
            pid=node.pid,
            library=node.library,
            started_at=node.started_at,
            agent_id=node.agent_id,
            state="left" if node.state == "left" else "lost" if node.state == "lost" else "live",
        )
        known = self.nodes.get(node.node_id)
        if known is not None and heard is not None:
            known.num_heard, known.num_dropped = heard.num_heard, heard.num_dropped
        self.machines.hear(node.node_id, node.host, node.hardware, num_nodes=self.nodes.num_with(node.node_id))


def _heard(event: wire.JobEvent, node_id: str, now: Now) -> EventRecord:
    """The record of a node's event, not numbered yet; its node is the sender, whatever the message says."""
    return EventRecord(
        number=0,
        time=event.time if math.isfinite(event.time) else now.time,
        node_id=node_id,
        rank=event.rank,
        step=event.step,
        kind=event.kind,
        text=event.text,
        details=event.details,
        restart=event.restart,
    )


def _unheard(node: Node, request: wire.BeatRequest) -> tuple[Sequence[wire.JobEvent], int]:
    """The events in a beat that did not come before, and how many others the agent has dropped since.

    A beat whose answer was lost is sent again, with the same events first.
    """
    events, first, num_dropped = request.events, request.first_event, request.num_events_dropped
    if first == 0:
        return events, num_dropped
    num_known = min(max(node.num_heard + 1 - first, 0), len(events))
    num_told = node.num_dropped if num_known > 0 else 0
    node.num_heard, node.num_dropped = max(node.num_heard, first + len(events) - 1), num_dropped
    return events[num_known:], max(num_dropped - num_told, 0)
