"""`elastic-ext status`, `events` and `tuning` where a job's master is asked."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from elastic_ext.agent.master.report import wire_text
from elastic_ext.agent.status.status import ProgressStatus, seconds_for_steps
from elastic_ext.agent.status.text import once_each, progress_in_words
from elastic_ext.errors import MasterAbsent, MasterBusy, MasterError, MasterRefused
from elastic_ext.master.address import MasterPlace
from elastic_ext.master.client import MasterClient
from elastic_ext.master.events import beginnings_in
from elastic_ext.master.tuning import changes_in_words, rates_of
from elastic_ext.master.wire import as_dict, logged_of, metrics_of
from elastic_ext.master.wire import master_pb2 as wire
from elastic_ext.ranks.deadlines import Backoff
from elastic_ext.records.json import object_of
from elastic_ext.records.logged import logged_in_words
from elastic_ext.records.measures import shown_in_words
from elastic_ext.records.text import age_in_words, counted, cut, on_one_line, wrapped

from .ckpt import Terminal
from .status import INTERRUPTED

__all__ = [
    "decision_record",
    "decision_words",
    "event_words",
    "is_healthy",
    "moment_words",
    "run_events",
    "run_status",
    "run_stored_log",
    "run_tuning",
    "status_words",
]


# --- what a master says of its job, in words, for people -------------------------------------------------------------

_MOST_NODES = 64
_MOST_RANKS = 16
_MOST_EVENTS = 5
_MOST_MISSING = 8
_NUM_PHASES = 2
_PRESENT = ("live", "late")


def is_healthy(status: wire.JobStatus) -> bool:
    """Whether a job's status has no trouble that is shown: of its master, its nodes, their machines or its workers."""
    return not any(_troubles(status))


def status_words(status: wire.JobStatus, address: str, width: int | None = None) -> str:
    """The status of a job by its master, in words on several lines: of ``width`` characters, or as long as they are.

    Rows of nodes, workers and events are cut, sentences are wrapped.
    """
    lines = wrapped(_heading(status), width)
    for name, text in _facts(status, address):
        lines += wrapped(text, width, first=f"  {name:<14} ", rest=" " * 17)
    if status.nodes:
        lines.append("  nodes")
        shares = {each.node_id: each for each in status.membership.nodes}
        for node in status.nodes[:_MOST_NODES]:
            lines.append(cut(f"    {_node(node, shares.get(node.node.agent_id))}", width))
            lines += [cut(f"      {_worker(each)}", width) for each in node.workers[:_MOST_RANKS]]
            if len(node.workers) > _MOST_RANKS:
                lines.append(f"      and {len(node.workers) - _MOST_RANKS} more")
        if len(status.nodes) > _MOST_NODES:
            lines.append(f"    and {len(status.nodes) - _MOST_NODES} more")
    for name, sentences in (("trouble", [*_troubles(status)]), ("to do", status.recommendations)):
        if sentences:
            lines.append(f"  {name}")
            lines += [line for each in sentences for line in wrapped(each, width, first="    ", rest="      ")]
    if status.events:
        lines.append("  last events")
        told = once_each([(f"{each.node_id} {each.rank}", each) for each in status.events])[-_MOST_EVENTS:]
        lines += [cut(f"    {event_words(each, len(sources))}", width) for sources, each in told]
    return "\n".join(lines)


def event_words(event: wire.JobEvent, num_sources: int = 1) -> str:
    """An event in words, on one line; ``num_sources`` ranks, or nodes' agents, have told it in the same words."""
    who = [event.node_id or "master", *([f"rank {event.rank}"] if event.rank >= 0 else [])]
    if num_sources > 1:
        who = [counted(num_sources, "rank" if event.rank >= 0 else "node")]
    who += [f"step {event.step}"] if event.step >= 0 else []
    return on_one_line(f"{moment_words(event.time)}  {', '.join(who)}: {event.text}")


def _heading(status: wire.JobStatus) -> str:
    here = [each for each in status.nodes if each.state in _PRESENT]
    words = f"{status.job or 'no job yet'}: {counted(len(here), 'node')}"
    if status.progress.HasField("step"):
        words += f", step {status.progress.step}"
    return words + ("" if is_healthy(status) else ", in trouble")


def _facts(status: wire.JobStatus, address: str) -> Iterator[tuple[str, str]]:
    up = age_in_words(status.up_seconds)
    yield "master", f"{address}, epoch {status.epoch}, for {up}, elastic_ext {status.library}"
    if status.HasField("membership"):
        plan = status.membership
        ranks = sum(each.num_workers for each in plan.nodes)
        size = f"{counted(len(plan.nodes), 'node')}, {counted(ranks, 'rank')}"
        yield "membership", f"version {plan.version}: {size}, since {moment_words(plan.time)}: {plan.reason}"
        if unknown := _unknown_shares(status):
            yield "", f"the master never heard of: {', '.join(unknown)}"
    if progress := _progress(status):
        yield "progress", progress_in_words(progress)
    if speed := _speed(status.progress):
        yield "speed", speed
    if logged := logged_of(status.progress):
        yield "logged", f"{logged_in_words(logged)}; means of all ranks"
    if status.verdict.text:
        yield "profile", status.verdict.text
    elif status.progress.shares:
        yield "profile", _largest(status.progress.shares, num=len(status.progress.shares))
    yield "config", _config(status.config)
    if status.tuning.mode:
        yield "tuner", f"{status.tuning.mode}, {status.tuning.standing}: {status.tuning.text}"
    for group in status.groups:
        yield "near", ", ".join(group.node_ids)


def _progress(status: wire.JobStatus) -> ProgressStatus | None:
    """How far training is, by the worker that has told of most steps; None where none has told of any."""
    present = [node for node in status.nodes if node.state in _PRESENT]
    workers = [each for node in present for each in node.workers if each.HasField("step")]
    if not workers:
        return None
    first = max(workers, key=lambda each: each.step)
    metrics = metrics_of(first)
    num_left = _whole(metrics.get("num_epoch_steps_left"))
    saves = (metrics_of(each) for each in workers)
    saved = max(saves, key=lambda each: each.get("checkpoint_time") or 0.0)
    saved_at = saved.get("checkpoint_time")
    return ProgressStatus(
        step=first.step,
        epoch=_whole(metrics.get("epoch")),
        num_steps_left=num_left,
        seconds_left=seconds_for_steps(num_left, metrics.get("steps_per_second")),
        checkpoint_step=_whole(saved.get("checkpoint_step")),
        checkpoint_age_seconds=None if saved_at is None else max(time.time() - saved_at, 0.0),
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _speed(progress: wire.Progress) -> str:
    parts = []
    if progress.HasField("steps_per_second"):
        parts.append(f"{progress.steps_per_second:.3g} steps/s")
    if progress.HasField("samples_per_second"):
        parts.append(f"{progress.samples_per_second:.4g} samples/s")
    if progress.HasField("tokens_per_second"):
        parts.append(f"{progress.tokens_per_second:.4g} tokens/s")
    return ", ".join(parts)


def _config(config: wire.ConfigStatus) -> str:
    if not config.version:
        return "none yet"
    reason = f": {config.reason}" if config.reason else ""
    held = f"held by {config.num_holding} of {counted(config.num_nodes, 'node')}"
    in_force = f", version {', '.join(map(str, config.in_force))} in force" if config.in_force else ""
    return f"version {config.version} ({config.author}, {moment_words(config.time)}{reason}), {held}{in_force}"


def _unknown_shares(status: wire.JobStatus) -> list[str]:
    """The nodes that belong to the job by its membership and have not joined; empty if no node tells its id."""
    known = {each.node.agent_id for each in status.nodes if each.node.agent_id}
    missing = [each for each in status.membership.nodes if each.node_id not in known] if known else []
    return [f"{each.node_id} ({_ranks(each)})" for each in missing[:_MOST_MISSING]]


def _ranks(share: wire.NodeShare) -> str:
    last = share.first_rank + share.num_workers - 1
    return f"rank {last}" if share.num_workers == 1 else f"ranks {share.first_rank} to {last}"


def _node(node: wire.NodeStatus, share: wire.NodeShare | None) -> str:
    who = f"{node.node.node_id}  {node.state}  pid {node.node.pid} on {node.node.host}"
    who += f"  {_ranks(share)}" if share is not None and share.num_workers else ""
    version = f"config {node.config_version}" if node.config_version else "no config"
    machine = f"  {node.machine}" if node.machine else ""
    return f"{who}  {version}  seen {age_in_words(node.seen_seconds)} ago{machine}"


def _worker(worker: wire.Worker) -> str:
    parts = [f"rank {worker.rank}", f"pid {worker.pid}", worker.state]
    if worker.HasField("exit_code"):
        parts.append(f"exit code {worker.exit_code}")
    if worker.HasField("step"):
        parts.append(f"step {worker.step}")
    metrics = metrics_of(worker)
    parts += [*filter(None, (*shown_in_words(metrics, "last"), *shown_in_words(metrics, "total")))]
    if worker.HasField("config_version"):
        parts.append(f"config {worker.config_version}")
    if worker.activity:
        parts.append(f"{worker.activity} for {age_in_words(worker.activity_seconds)}")
    if worker.shares:
        parts.append(_largest(worker.shares, num=_NUM_PHASES))
    return "  ".join(parts)


def _troubles(status: wire.JobStatus) -> Iterator[str]:
    yield from status.troubles
    for node in status.nodes:
        for worker in node.workers:
            if worker.trouble:
                yield f"rank {worker.rank} on {node.node.host}: {worker.trouble}"


def _largest(shares: Mapping[str, float], *, num: int) -> str:
    largest = sorted(shares.items(), key=lambda each: -each[1])[:num]
    return ", ".join(f"{label} {share:.0%}" for label, share in largest)


def moment_words(seconds: float) -> str:
    """A time as its date and time of day, on this machine's clock."""
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):  # which no clock has shown
        return "a time that cannot be"


# --- what `elastic-ext status` and `elastic-ext events` do where a master is asked -----------------------------------

_HEALTHY = 0
_TROUBLE, _REFUSED = 1, 2
_FIRST_SECONDS, _MOST_SECONDS = 0.5, 10.0


def run_status(place: MasterPlace, terminal: Terminal) -> int:
    """Show the status of a job by its master; gives the exit status."""
    try:
        with MasterClient(place) as client:
            status = client.status()
    except (MasterError, ValueError) as error:
        return _complained(error, terminal)
    healthy = is_healthy(status)
    record = {**as_dict(status), "healthy": healthy}
    terminal.tell(record, status_words(status, str(place.address), terminal.width))
    return _HEALTHY if healthy else _TROUBLE


def run_events(place: MasterPlace, terminal: Terminal, *, most: int, follow: bool) -> int:
    """Show the newest ``most`` events of a master, with 0 all, and with ``follow`` later ones; gives the exit status.

    A master that goes away while it is followed is waited for, and nothing is shown twice or left out.
    """
    try:
        with _ctrl_c_ending_this_process():
            for event in _events(place, terminal, most=most, follow=follow):
                terminal.tell(_event_record(event), event_words(event))
                terminal.flush()
    except (MasterError, ValueError) as error:
        return _complained(error, terminal)
    return _HEALTHY


def _events(place: MasterPlace, terminal: Terminal, *, most: int, follow: bool) -> Iterator[wire.JobEvent]:
    backoff = Backoff(random.Random(), first_seconds=_FIRST_SECONDS, most_seconds=_MOST_SECONDS)
    last, has_begun = 0, False
    with MasterClient(place) as client:
        while True:
            try:
                for event in client.events(after=last, most=0 if has_begun else most, follow=follow):
                    last, has_begun = event.number, True
                    backoff.forget()
                    yield event
                if not follow:
                    return
                words = f"the master at {place.address} has ended the events"
            except (MasterAbsent, MasterBusy) as error:
                if not follow or not has_begun:
                    raise
                words = str(error)
            if backoff.num_tries == 0:
                terminal.complain(f"{words}; this command waits for the master")
            threading.Event().wait(backoff.next_seconds())


@contextmanager
def _ctrl_c_ending_this_process() -> Iterator[None]:
    """A context in which Ctrl-C ends this process at once, unless somebody else handles it or this is a thread.

    A KeyboardInterrupt that is raised while gRPC begins a stream may be swallowed there, or leave a thread behind that
    nobody ends and that the process waits for.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end_interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_interrupted(number: int, frame: object) -> None:
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # what is printed is flushed event by event
        sys.stdout.flush()
    os._exit(INTERRUPTED)


def _event_record(event: wire.JobEvent) -> dict[str, Any]:
    """An event as a dictionary for JSON, with its details as values."""
    try:
        details = object_of(event.details)
    except ValueError:  # it has none
        details = {}
    return {**as_dict(event), "details": details}


def _complained(error: Exception, terminal: Terminal) -> int:
    terminal.complain(str(error))
    return _REFUSED if isinstance(error, (MasterRefused, ValueError)) else _TROUBLE


# --- what the tuner of a job's master has decided, and what people have it do ----------------------------------------

_DONE = 0


def run_tuning(place: MasterPlace, job: str, options: argparse.Namespace, terminal: Terminal) -> int:
    """Do ``elastic-ext tuning log``, ``pause``, ``resume`` or ``undo`` with a master; gives the exit status.

    ``job`` is the name of the job whose master is meant; empty for any.
    """
    try:
        with MasterClient(place) as client:
            if options.command == "log":
                report = client.tuning(most=options.last)
                beginnings = beginnings_in(client.events())
            else:
                report = client.control_tuning(options.command, options.reason, job=wire_text(job))
    except (MasterError, ValueError) as error:
        terminal.complain(str(error))
        return _REFUSED if isinstance(error, (MasterRefused, ValueError)) else _TROUBLE
    if options.command == "log":
        _tell_log(report.decisions, beginnings, terminal)
        terminal.say(_standing(report.status))
        return _DONE
    decisions = [decision_record(each) for each in report.decisions]
    words = [decision_words(each) for each in report.decisions] or ["the tuner has decided nothing on this request"]
    if not (options.job or options.master):
        words.insert(0, on_one_line(f"told the master of {f'job {job}' if job else 'a job'} at {place.address}"))
    about = {"job": job or None, "master": str(place.address)}
    record = {**about, "status": as_dict(report.status), "decisions": decisions}
    terminal.tell(record, "\n".join([*words, _standing(report.status)]))
    return _DONE


def run_stored_log(run_dirs: Sequence[Path], options: argparse.Namespace, terminal: Terminal) -> int | None:
    """Do ``elastic-ext tuning log`` with what a master has stored that an agent had started, and that has ended.

    Gives the exit status; None where none of the run directories has such a store.
    """
    from elastic_ext.agent.master.embedded import STATE_FOLDER  # these import all of a master
    from elastic_ext.master.status import decision_message
    from elastic_ext.master.store import StoreError, stored_tuning
    from elastic_ext.tuner.decisions import are_paused

    try:
        stores = (stored_tuning(each / STATE_FOLDER) for each in run_dirs)
        found = next((each for each in stores if each is not None), None)
    except StoreError as error:
        terminal.complain(str(error))
        return _TROUBLE
    if found is None:
        return None
    shown = [*map(decision_message, found.decisions[-options.last :])]
    _tell_log(shown, found.beginnings, terminal)
    paused = ", and was paused" if are_paused(found.decisions) else ""
    terminal.say(f"the job's master has ended; its tuner had made {counted(len(found.decisions), 'decision')}{paused}")
    return _DONE


def _tell_log(decisions: Sequence[wire.TuningDecision], beginnings: Sequence[float], terminal: Terminal) -> None:
    """Show decisions, and between them where a new training of the job began, by ``beginnings`` in order."""
    for number, decision in enumerate(decisions):
        began = [each for each in beginnings if each <= decision.time]
        if number and began and began[-1] > decisions[number - 1].time:
            terminal.say(f"--- a new training began {moment_words(began[-1])}")
        record = {**decision_record(decision), "training_began": began[-1] if began else None}
        terminal.tell(record, decision_words(decision))
    if decisions and beginnings and beginnings[-1] > decisions[-1].time:
        terminal.say(f"--- a new training began {moment_words(beginnings[-1])}, and the tuner has decided nothing yet")


def decision_record(decision: wire.TuningDecision) -> dict[str, Any]:
    """A decision of the tuner as a dictionary for JSON, with its changes as values."""
    return {**as_dict(decision), "changes": _changes(decision)}


def decision_words(decision: wire.TuningDecision) -> str:
    """A decision of the tuner on a few lines: what, why, what was predicted and measured, what became of it."""
    return "\n".join(on_one_line(line) for line in _lines(decision))


def _lines(decision: wire.TuningDecision) -> Iterator[str]:
    heading = [f"{decision.number:>3}", moment_words(decision.time), f"{decision.kind:<7}"]
    if decision.HasField("version"):
        heading.append(f"version {decision.version}")
    yield "  ".join([*heading, decision.outcome]).rstrip()
    if decision.changes:
        yield f"       {changes_in_words(_changes(decision))}"
    yield f"       {decision.reason}"
    if rates := ", ".join(rates_of(*(_known(decision, name) for name in _RATES))):
        yield f"       {rates}"


_RATES = ("before", "predicted", "measured", "predicted_bytes")


def _known(decision: wire.TuningDecision, name: Any) -> Any:
    return getattr(decision, name) if decision.HasField(name) else None


def _standing(status: wire.TuningStatus) -> str:
    return on_one_line(f"the tuner's mode is {status.mode}; it is {status.standing}: {status.text}")


def _changes(decision: wire.TuningDecision) -> Mapping[str, Any]:
    found = {}
    for path, text in sorted(decision.changes.items()):
        try:
            found[path] = json.loads(text)
        except (ValueError, RecursionError):
            found[path] = text
    return found
