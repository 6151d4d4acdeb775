"""`elastic-ext members`: who trains, who warms up to join, how members can change, and what the last changes were; and
`elastic-ext members drain`, which has a node leave. All but the latter is read from the files of run directories.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from elastic_ext.agent.config_writer import agent_in
from elastic_ext.agent.control import AgentRefused, ControlError, ask
from elastic_ext.agent.event_files import EventFiles
from elastic_ext.agent.members import member_records, why_restart_told
from elastic_ext.errors import in_words
from elastic_ext.members.plan import MembershipPlan
from elastic_ext.records.agent import MEMBERSHIP_FILE, MOST_BYTES, WORKERS_FILE, WorkersRecord
from elastic_ext.records.files import read_at_most
from elastic_ext.records.member import MemberRecord
from elastic_ext.records.metrics import JobEvent
from elastic_ext.records.text import counted, cut, on_one_line

from .ckpt import Terminal, path_of
from .jobs import JobHere, add_job, one_job

__all__ = ["MembersView", "add_members", "members_in_words", "run_members", "view_of"]

_WAYS = "--run-dir DIR, or --job NAME"
_KINDS = (
    "members",
    "members-planned",
    "members-waiting",
    "members-changed",
    "members-refused",
    "membership-in-force",
    "membership",
    "worker-lost",
)
_ENDS = ("succeeded", "failed", "ended", "left-out", "not-taken", "rendezvous-failed")
"""The kinds of the events by which agents say how they have ended."""
_BEGAN = "training-began"
_NUM_CHANGES = 10
_MOST_CHARACTERS = 300
_MOST_EVENT_BYTES = 4 << 20
_SECONDS = re.compile(r"[\d.]+ s without a step")
_DONE, _FAILED, _REFUSED = 0, 1, 2


def add_members(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the arguments of ``elastic-ext members``."""
    _add_place(parser)
    parser.add_argument("--json", action="store_true", help="a JSON object")
    parser.set_defaults(command="show")
    drain = parser.add_subparsers().add_parser("drain", help=_DRAIN, description=_DRAIN)
    _add_place(drain, default=argparse.SUPPRESS)
    drain.add_argument("node", metavar="NODE", help="the node's id, or the name of its host")
    drain.add_argument("--after-join", action="store_true", help="leave once another node has joined")
    drain.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="a JSON object")
    drain.set_defaults(command="drain")


def _add_place(parser: argparse.ArgumentParser, **options: Any) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--run-dir", type=path_of, metavar="DIR", help="the run directory of a job", **options)
    add_job(which, **options)


def run_members(options: argparse.Namespace, environ: Mapping[str, str], terminal: Terminal) -> int:
    """Show the members of a job, or have a node leave it; gives the exit status."""
    is_drain = options.command == "drain"
    try:
        job = one_job(options.run_dir, options.job, environ, ways=_WAYS, writes=is_drain)
        if is_drain:
            return _drain(job, options, terminal)
        plan, records, events = _read(job)
        since = min((agent.time for agent in job.living_agents().values()), default=0.0)
        view = view_of(
            plan,
            records,
            events,
            has_begun=_has_begun(job),
            since=since,
            is_running=job.is_running(),
            waiting=_waiting(job),
        )
    except AgentRefused as error:
        terminal.complain(f"refused: {error}")
        return _REFUSED
    except ControlError as error:
        terminal.complain(str(error))
        return _FAILED
    except OSError as error:
        terminal.complain(in_words(error))
        return _REFUSED
    except ValueError as error:
        terminal.complain(str(error))
        return _REFUSED
    terminal.tell(view.to_dict(), "\n".join(members_in_words(view)))
    return _DONE


def _drain(job: JobHere, options: argparse.Namespace, terminal: Terminal) -> int:
    agents = [agent for agent in job.living_agents().values() if agent.socket]
    if not agents:
        raise ValueError(f"no agent of job {job.name} runs on this machine; run this command on one of its nodes")
    request = {"do": "members-drain", "node": options.node, "after_join": options.after_join}
    node = str(ask(Path(agents[0].socket), request).get("node", options.node))
    when = "once another node has joined" if options.after_join else "now"
    terminal.tell({"node": node, "after_join": options.after_join}, f"{node} is told to leave {when}")
    return _DONE


# --- what the files of run directories say of members ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class MembersView:
    """The members of a job, as the run directories of one machine tell it."""

    plan: MembershipPlan
    """The newest plan that workers have been told."""
    records: tuple[MemberRecord, ...]
    """What the workers on this machine say of themselves, by their seats."""
    is_live: bool | None
    """Whether members can change while workers go on, as far as workers and agents on this machine say; None where
    they do not say it."""
    why_restart: str
    """Why members can change by a restart alone, a sentence; else empty."""
    has_begun: bool
    """Whether workers on this machine have begun to train, by when each has said how members can change."""
    planned: JobEvent | None
    """The change that is under way, by the event of its plan."""
    changes: tuple[JobEvent, ...]
    """The last events of members, oldest first."""
    why_restart_at_loss: str = ""
    """Why all workers are started anew where one is lost, a sentence; empty where the others go on, or it is not known.
    """
    waiting: str = ""
    """Which nodes wait to join and for what, a sentence; empty where none does."""
    ended: str = ""
    """That the job has ended on this machine, and how, a sentence; empty while it runs."""

    @property
    def warming(self) -> tuple[MemberRecord, ...]:
        """The workers on this machine that warm up to join, or are ready to."""
        return tuple(each for each in self.records if each.version == 0)

    def to_dict(self) -> dict[str, Any]:
        """The view as values for JSON."""
        return {
            "plan": asdict(self.plan),
            "is_live": self.is_live,
            "why_restart": self.why_restart,
            "why_restart_at_loss": self.why_restart_at_loss,
            "planned": None if self.planned is None else _event(self.planned),
            "waiting": self.waiting,
            "warming": [{"seat": each.seat, "pid": each.pid, "ready": each.ready} for each in self.warming],
            "changes": [_event(each) for each in self.changes],
            "ended": self.ended,
        }


def view_of(
    plan: MembershipPlan,
    records: Sequence[MemberRecord | None],
    events: Sequence[JobEvent],
    *,
    has_begun: bool = True,
    since: float = 0.0,
    is_running: bool = True,
    waiting: str = "",
) -> MembersView:
    """The members by the newest plan, what the workers here say, and what has happened, oldest first. Pure.

    ``has_begun`` and ``waiting`` are as MembersView has them; ``since`` says when the agents here have started, seconds
    since 1970: what earlier ones have told of how members change is no news. Of a job that does not run any more only
    the plan and the events are told: nobody can join it or leave it.
    """
    ends = [each.text for each in events if each.kind in _ENDS]
    events = [each for each in events if each.kind not in _ENDS]
    if not is_running:
        how = on_one_line(ends[-1]) if ends else "nothing says how"
        ended = f"the job has ended on this machine: {cut(how, _MOST_CHARACTERS)}"
        last = tuple(events[-_NUM_CHANGES:])
        return MembersView(
            plan=plan,
            records=(),
            has_begun=has_begun,
            is_live=None,
            why_restart="",
            planned=None,
            changes=last,
            ended=ended,
        )
    said = tuple(each for each in records if each is not None)
    told = why_restart_told([each for each in events if each.time >= since])
    whys = [told] if told else [each.why_restart for each in said if each.why_restart]
    changes = [each for each in events if each.kind != "membership"]
    planned = next((each for each in reversed(changes) if each.kind == "members-planned"), None)
    is_over = planned is not None and any(_ends(each, planned) for each in changes if each.time >= planned.time)
    is_restart = planned is not None and planned.details.get("mode") == "restart"
    return MembersView(
        plan=plan,
        records=said,
        is_live=None if not (said or told) or len(said) < len(records) else not whys,
        why_restart=whys[0] if whys else "",
        why_restart_at_loss=_why_restart_at_loss(plan, said),
        has_begun=has_begun,
        planned=None if is_over or is_restart else planned,
        changes=tuple(events[-_NUM_CHANGES:]),
        waiting=waiting,
    )


def _why_restart_at_loss(plan: MembershipPlan, said: Sequence[MemberRecord]) -> str:
    """Why all workers are started anew where one is lost, a sentence; empty where others go on, or nobody says."""
    whys = [each.why_restart_at_loss for each in said if each.version and each.why_restart_at_loss is not None]
    if len(plan.nodes) == 1 and "" in whys:
        return "all of them are on one node, whose workers end together"
    return next((why for why in whys if why), "")


def _ends(event: JobEvent, planned: JobEvent) -> bool:
    """Whether an event says that a planned change is over; where a node is to join once others have left, both are."""
    of_plan = event.kind == "membership-in-force" and event.details.get("plan") == planned.details.get("plan")
    return of_plan or event.kind == "members-refused"


def members_in_words(view: MembersView) -> list[str]:
    """The members of a job, a line each."""
    plan = view.plan
    sizes = f"{counted(len(plan.nodes), 'node')}, {counted(plan.world_size, 'rank')}"
    lines = [f"membership {plan.version}: {sizes}: {plan.reason}"]
    for node in plan.nodes:
        ranks = ", ".join(f"{rank} (seat {node.seat_of(rank)})" for rank in node.ranks)
        lines.append(f"  {node.node_id} on {node.host}: {'rank' if node.num_workers == 1 else 'ranks'} {ranks}")
    if view.ended:
        lines.append(view.ended)
    elif view.is_live is None and view.waiting and not view.has_begun:
        pass  # the node that waits has no workers, which would say it
    elif view.is_live is None and not view.has_begun:
        lines.append("members change in a way that is not known yet: its workers have not begun to train")
    elif view.is_live is None:
        lines.append("members change by a restart of all workers: these do not say that they can go on")
    else:
        how = "while workers go on" if view.is_live else f"by a restart of all workers: {view.why_restart}"
        lines.append(f"members change {how}")
        if any(each.version and each.why_restart_at_loss is not None for each in view.records):
            anew = f"all workers are started anew: {view.why_restart_at_loss}"
            lines.append(f"where a worker is lost {anew if view.why_restart_at_loss else 'those of other nodes go on'}")
    if view.planned is not None:
        lines.append(f"under way: {view.planned.text}")
    if view.waiting:
        lines.append(view.waiting)
    for each in view.warming:
        state = f"ready to join by membership {each.ready}" if each.ready else "warms up to join"
        lines.append(f"  seat {each.seat} (pid {each.pid}) {state}")
    if view.changes:
        lines.append("last changes:")
        lines += [f"  {_moment(each.time)}  {each.text}" for each in view.changes]
    return lines


def _read(job: JobHere) -> tuple[MembershipPlan, list[MemberRecord | None], list[JobEvent]]:
    """The newest plan by which workers train, the records of workers, and the events of members, oldest first.

    They are of the agents that run here, or else of all that have. ValueError where there is no plan.
    """
    folders = [*job.living_agents()] or [*job.run_directories]
    plans = {folder: plan for folder in folders if (plan := _plan_in(folder)) is not None}
    if not plans:
        raise ValueError("there is no membership plan: an agent (elastic-run) makes one as the nodes of a job meet")
    found = {folder: _records_in(folder, plan) for folder, plan in plans.items()}
    known = {folder: [each for each in records if each is not None] for folder, records in found.items()}
    joining = {folder for folder, records in known.items() if records and not any(each.version for each in records)}
    newest = max(plans, key=lambda folder: (folder not in joining, plans[folder].version))
    records = [each for folder in plans for each in found[folder]] or [None]
    events = [event for folder in plans for event in EventFiles(folder, most_bytes=_MOST_EVENT_BYTES).look().events]
    events = sorted((each for each in events if each.kind in (*_KINDS, *_ENDS)), key=lambda event: event.time)
    return plans[newest], records, _once(events)


def _records_in(folder: Path, plan: MembershipPlan) -> list[MemberRecord | None]:
    """What the workers of the agent of a run directory say, None for one that says nothing; a spare has no workers."""
    agent = agent_in(folder)
    seats = [member.seat for member in plan.members if agent is None or member.node_id == agent.node_id]
    return [*member_records(folder, seats).values()]


def _has_begun(job: JobHere) -> bool:
    """Whether workers of the agents that run here, or else of those that have, have begun to train."""
    for folder in [*job.living_agents()] or [*job.run_directories]:
        agent = agent_in(folder)
        events = EventFiles(folder, most_bytes=_MOST_EVENT_BYTES).look().events
        if any(each.kind == _BEGAN and (agent is None or each.time >= agent.time) for each in events):
            return True
    return False


def _waiting(job: JobHere) -> str:
    """Which nodes wait to join and for what, as the agents that run here say; empty for none."""
    for folder, agent in job.living_agents().items():
        try:
            record = WorkersRecord.from_json(read_at_most(folder / WORKERS_FILE, MOST_BYTES).decode())
        except (OSError, ValueError):
            continue
        if record.waiting and record.time >= agent.time:
            return record.waiting
    return ""


def _once(events: Sequence[JobEvent]) -> list[JobEvent]:
    """The events without those that agents of several nodes, or several workers, have written alike."""
    found: dict[tuple[str, str], JobEvent] = {}
    for each in events:
        found.setdefault((each.kind, _SECONDS.sub("", each.text)), each)  # which each worker measures by itself
    return [*found.values()]


def _plan_in(folder: Path) -> MembershipPlan | None:
    try:
        return MembershipPlan.from_json(read_at_most(folder / MEMBERSHIP_FILE, MOST_BYTES).decode())
    except (OSError, ValueError):
        return None


def _event(event: JobEvent) -> dict[str, Any]:
    return {"time": event.time, "kind": event.kind, "text": event.text, "details": dict(event.details)}


def _moment(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):  # which no clock has shown
        return "a time that cannot be"


_DRAIN = """Have a node leave the job: the others go on without it, and its workers end once they have given what they
have. Exit status: 0 told, 1 nobody answers, 2 refused."""
