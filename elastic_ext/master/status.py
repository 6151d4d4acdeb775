"""The status of a job for people, as messages, made no more often than a master has time for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from elastic_ext.tuner.decisions import Decision

from .configs import ConfigBook
from .events import EventRecord
from .job import Job, Now
from .machines import NodeFacts, named
from .nodes import Node
from .tuning import Tuning
from .wire import filled
from .wire import master_pb2 as wire

__all__ = [
    "StatusCache",
    "config_history",
    "decision_message",
    "event_message",
    "job_status",
    "newest_events",
    "tuning_report",
]


# --- what a master knows, as the messages that people are shown ------------------------------------------------------

_NUM_EVENTS = 20
_MOST_EVENTS = 1_000


def job_status(job: Job, now: Now, request: wire.GetStatusRequest, *, ranks_below: float = math.inf) -> wire.JobStatus:
    """The status of a job at ``now``: nodes, config, progress, events, troubles, and what to do.

    Workers are in it whose rank is less than ``ranks_below``, and none where the request wants none.
    """
    ranks_below = 0 if request.without_workers else ranks_below
    status = wire.JobStatus(
        time=now.time,
        job=job.name,
        job_id=job.job_id,
        epoch=job.epoch,
        up_seconds=now.clock - job.began.clock,
        library=job.settings.library,
        nodes=[_node_status(job, each, now, ranks_below) for each in job.nodes],
        config=_config_status(job, now),
        progress=job.collector.progress(now.time),
        events=newest_events(job, request.num_events),
        troubles=list(_troubles(job)),
        tuning=_tuning_status(job.tuning),
    )
    verdict = job.collector.verdict(now.time)
    status.verdict.CopyFrom(wire.Verdict(kind=verdict.kind, text=verdict.text_over_steps, share=verdict.share))
    comparison = job.compared_machines
    status.groups.extend(comparison.groups)
    status.recommendations.extend(comparison.recommendations)
    if job.membership_plans.newest is not None:
        plan = job.membership_plans.newest
        nodes = [
            wire.NodeShare(
                node_id=each.node_id, host=each.host, first_rank=each.first_rank, num_workers=each.num_workers
            )
            for each in plan.nodes
        ]
        status.membership.CopyFrom(
            wire.Membership(version=plan.version, nodes=nodes, reason=plan.reason, time=plan.time)
        )
    return status


def config_history(book: ConfigBook) -> wire.ConfigHistory:
    """The config versions that a master keeps, as a message."""
    return wire.ConfigHistory(
        entries=[
            wire.ConfigEntry(
                version=each.config.version,
                text=each.config.to_json(),
                time=each.entry.time,
                author=each.author,
                node_id=each.node_id,
                restores=each.entry.restores,
            )
            for each in book.versions
        ]
    )


def tuning_report(tuning: Tuning, *, most: int = 0, after: int = 0) -> wire.TuningReport:
    """The state of the tuner and its decisions after number ``after``, the newest ``most`` of them, or all for 0."""
    found = [each for each in tuning.decisions if each.number > after]
    return wire.TuningReport(
        status=_tuning_status(tuning), decisions=[decision_message(each) for each in found[-most:]]
    )


def event_message(event: EventRecord) -> wire.JobEvent:
    """The protobuf message of an event."""
    return filled(wire.JobEvent(), event)


def newest_events(job: Job, wanted: int) -> list[wire.JobEvent]:
    """The newest events, ``wanted`` of them but at most 1000, or 20 for 0."""
    return [event_message(each) for each in job.event_log.after(0, most=min(wanted or _NUM_EVENTS, _MOST_EVENTS))]


def _tuning_status(tuning: Tuning) -> wire.TuningStatus:
    word, text, best = tuning.standing()
    decisions = tuning.decisions
    told = next((each for each in reversed(decisions) if each.predicted is not None), None)
    return wire.TuningStatus(
        mode=tuning.mode,
        standing=word,
        text=text,
        best=best,
        predicted=None if told is None else told.predicted,
        measured=None if told is None else told.measured,
        num_decisions=decisions[-1].number if decisions else 0,
    )


def decision_message(decision: Decision) -> wire.TuningDecision:
    """The protobuf message of a decision of the tuner."""
    message = filled(wire.TuningDecision(), replace(decision, changes={}))
    message.changes.update({path: json.dumps(value) for path, value in decision.changes.items()})
    return message


def _node_status(job: Job, node: Node, now: Now, ranks_below: float) -> wire.NodeStatus:
    facts = _facts(job, node)
    return wire.NodeStatus(
        node=filled(wire.Node(), node),
        state=node.state,
        seen_seconds=now.clock - node.seen_at,
        config_version=node.held_version,
        workers=job.collector.workers(node.node_id, ranks_below=ranks_below),
        machine=facts.in_words if facts is not None else "",
        troubles=_node_troubles(job, node),
    )


def _node_troubles(job: Job, node: Node) -> list[str]:
    """The troubles of a node: those that its agent tells, and what is wrong with its machine."""
    facts = _facts(job, node)
    told = [each for each in (node.trouble, node.refusal) if each]
    return told if facts is None else [*told, *facts.troubles]


def _facts(job: Job, node: Node) -> NodeFacts | None:
    """The facts of a node's machine; of a node that is gone as they were while it was one of the job's."""
    is_present = node.state in ("live", "late")
    return job.machines.facts(node.node_id, num_nodes=job.nodes.num_present if is_present else None)


def _config_status(job: Job, now: Now) -> wire.ConfigStatus:
    present = job.nodes.present
    found = wire.ConfigStatus(
        num_nodes=len(present),
        num_holding=sum(each.held_version == job.book.version for each in present),
    )
    newest = job.book.newest
    if newest is not None:
        found.version = newest.config.version
        found.text = newest.config.to_json()
        found.reason = newest.config.reason
        found.author = newest.author
        found.time = newest.entry.time
    found.in_force.extend(job.collector.versions_in_force(now.time))
    return found


def _troubles(job: Job) -> list[str]:
    lost = [each for each in job.nodes if each.state == "lost"]
    troubles = [job.trouble] if job.trouble else []
    troubles += [f"node {each.node_id} on {each.host} is lost" for each in lost[:20]]
    if len(lost) > 20:
        troubles.append(f"... and {len(lost) - 20} nodes more")
    nodes_by_trouble: dict[str, list[str]] = {}  # machines of one kind have the same troubles, and may be thousands
    for node in job.nodes.present:
        for each in _node_troubles(job, node):
            nodes_by_trouble.setdefault(each, []).append(node.node_id)
    for each, nodes in nodes_by_trouble.items():
        troubles.append(f"node{'s' if len(nodes) > 1 else ''} {named(nodes)}: {each}")
    return troubles


# --- the status that people ask for, made no more often than a master can spare the time -----------------------------
# Of a job of thousands of nodes it takes a part of a second, in which nobody else is answered.

_FREE_SECONDS = 0.005  # what takes no longer is made anew each time,
_SHARE = 0.1  # ... and all else in no more than so much of the time


class StatusSource(Protocol):
    """The source of a job's present status and events."""

    def status(self, request: wire.GetStatusRequest) -> wire.JobStatus:
        """The job's status, made anew."""

    def events(self, num: int) -> Sequence[wire.JobEvent]:
        """The newest events, at most ``num``."""


class StatusCache:
    """A cache of a job's status for people, so that making it takes at most about a tenth of the master's time.

    ``clock`` is monotonic, in seconds.
    """

    def __init__(self, source: StatusSource, clock: Callable[[], float]) -> None:
        self._source = source
        self._clock = clock
        self._kept: dict[bool, tuple[float, wire.JobStatus]] = {}  # without workers or with them: until when, and which

    def status(self, request: wire.GetStatusRequest) -> wire.JobStatus:
        """The job's status, made anew or the last one that was made; its events are always the newest."""
        now = self._clock()
        until, kept = self._kept.get(request.without_workers, (now, None))
        if kept is not None and now < until:
            found = wire.JobStatus()
            found.CopyFrom(kept)
            del found.events[:]
            found.events.extend(self._source.events(request.num_events))
            return found
        status = self._source.status(request)
        seconds = self._clock() - now
        self._kept.pop(request.without_workers, None)
        if seconds > _FREE_SECONDS:
            self._kept[request.without_workers] = now + seconds / _SHARE, status
        return status
