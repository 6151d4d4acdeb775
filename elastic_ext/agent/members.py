"""Membership: by which plan a node's workers train, as its agent knows it; LiveChange: a change in which workers go on.

Workers of who joins warm up in a world of their own node. Once all of them are ready every agent writes the plan for
its workers, which come to it by themselves at a boundary between two steps, and say so in their records. Agents tell
each other on their board how far their workers are.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from elastic_ext.errors import ElasticError
from elastic_ext.members.decision import (
    ChangeRow,
    ChangeStage,
    LeavingNode,
    NodeWords,
    RoundStart,
    RowState,
    stage_of,
    why_restart_of,
)
from elastic_ext.members.plan import MembershipPlan
from elastic_ext.ranks.board import BoardGone
from elastic_ext.ranks.node_board import RoundBoard
from elastic_ext.records.agent import MEMBERSHIP_FILE, MOST_BYTES
from elastic_ext.records.files import read_at_most, write_whole
from elastic_ext.records.json import record_of
from elastic_ext.records.member import MemberRecord, member_file
from elastic_ext.records.text import counted

from .journal import Journal

if TYPE_CHECKING:
    from .rendezvous import NodeRendezvous
    from .workers.workers import Launch

__all__ = [
    "ChangeEnd",
    "Drain",
    "Drains",
    "LiveChange",
    "Membership",
    "NotTaken",
    "drained_node",
    "member_records",
    "members_requests",
    "planned_in_words",
]

_MOST_BYTES = 1 << 16
_ROWS = "change"
_LEAVING = "leaving"
_DRAINING = "draining"
_DRAIN = "drain"
_WARM_SECONDS = 1800.0  # for the start, the model and the first passes of workers that join


class NotTaken(ElasticError):
    """This node was to join a job, and has not been taken in; the message says why."""


# --- what workers say of themselves, in files of the run directory ---------------------------------------------------


def member_records(run_dir: Path, seats: Collection[int]) -> dict[int, MemberRecord | None]:
    """What the workers in these seats say of themselves as members, by seat; None where one has said nothing."""
    return {seat: _record_in(member_file(run_dir, seat), seat) for seat in seats}


def _record_in(file: Path, seat: int) -> MemberRecord | None:
    try:
        record = MemberRecord.from_json(read_at_most(file, _MOST_BYTES).decode())
    except (OSError, ValueError):
        return None
    return record if record.seat == seat else None


# --- a change in which workers go on ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeEnd:
    """How a change has ended: ``failed`` is one whose joiners have not become ready, before others were told of it."""

    kind: Literal["applied", "failed", "refused", "sent-away", "late"]
    why: str = ""


class LiveChange:
    """One change of members in which workers go on, from the decision of the nodes to its end."""

    def __init__(
        self,
        plan: MembershipPlan,
        *,
        joined: Sequence[str],
        node_id: str,
        board: RoundBoard,
        run_dir: Path,
        limit_seconds: float,
        sends_away: bool,
        on_ready: Callable[[], None],
    ) -> None:
        """``on_ready`` is called once workers are to be told the plan, which have ``limit_seconds`` from then on.

        With ``sends_away`` those that join are sent away where the ranks refuse the plan.
        """
        self.plan = plan
        self.joined = tuple(joined)
        self.is_joining = node_id in joined
        """Whether the workers of this node are among those that join."""
        self.end: ChangeEnd | None = None
        """How the change has ended; None as long as it is under way."""
        self.is_told = False
        """Whether workers of this node, which stay, have been told the plan."""
        self._node_id = node_id
        self._board = board
        self._run_dir = run_dir
        self._limit_seconds = limit_seconds
        self._sends_away = sends_away
        self._on_ready = on_ready
        self._seats = [member.seat for member in plan.members if member.node_id == node_id]
        self._begun_at = self._told_at = time.monotonic()
        self._row: ChangeRow | None = None

    @property
    def seconds(self) -> float:
        """How long ago the change was decided."""
        return time.monotonic() - self._begun_at

    @property
    def outcome(self) -> Literal["applied", "refused", ""]:
        """What the workers of this node have made of the plan by now; empty where that is not known."""
        records = [each for each in member_records(self._run_dir, self._seats).values() if each is not None]
        if len(records) == len(self._seats) and all(each.version >= self.plan.version for each in records):
            return "applied"
        return "refused" if any(each.refused >= self.plan.version for each in records) else ""

    @property
    def why_refused(self) -> str:
        """Why the ranks have refused the plan, as a worker of this node says it."""
        records = member_records(self._run_dir, self._seats).values()
        return next((each.why_refused for each in records if each is not None and each.why_refused), "they do not say")

    def look(self) -> ChangeEnd | None:
        """Look at the workers of this node and at what other nodes say, and act on it; how the change has ended, if so.

        Called several times a second. A board that is gone says nothing: then the workers of this node decide.
        """
        self.end = self._looked()
        return self.end

    def _looked(self) -> ChangeEnd | None:
        state = self._state()
        self.tell(state, self.why_refused if state in ("refused", "sent-away") else "")
        stage = self._stage()
        if stage.kind == "ready" and not self.is_told and not self.is_joining:
            self.is_told, self._told_at = True, time.monotonic()
            self._on_ready()
        if stage.kind in ("applied", "refused", "sent-away") or (stage.kind == "failed" and not self.is_told):
            return ChangeEnd(kind=stage.kind, why=stage.why)
        if state == "warming" and self.seconds > _WARM_SECONDS:
            return ChangeEnd(kind="failed", why=f"its workers are not ready after {_WARM_SECONDS:.0f} seconds")
        if self.is_told and time.monotonic() > self._told_at + self._limit_seconds:
            is_applied = state == "applied"
            which = "other nodes do not say that they have" if is_applied else "no boundary between two steps has come"
            return ChangeEnd(
                kind="late", why=f"{which} within {self._limit_seconds:.0f} seconds of membership {self.plan.version}"
            )
        return None

    def tell(self, state: RowState, why: str = "") -> None:
        """Tell the other nodes how far the workers of this node are, where that is new."""
        row = ChangeRow(node_id=self._node_id, version=self.plan.version, state=state, why=why)
        if row != self._row:
            self._row = row
            self._board.tell_quietly(_ROWS, asdict(row))

    def _state(self) -> RowState:
        outcome = self.outcome
        if outcome == "applied":
            return "applied"
        if self.is_joining:
            records = member_records(self._run_dir, self._seats).values()
            is_ready = all(each is not None and each.ready >= self.plan.version for each in records)
            return "ready" if is_ready else "warming"
        if outcome == "refused":
            return "sent-away" if self._sends_away and self.joined else "refused"
        return "told" if self.is_told else "waiting"

    def _stage(self) -> ChangeStage:
        try:
            told = self._board.values_of(_ROWS).values()
            rows = [record_of(ChangeRow, row) for row in told]
        except (BoardGone, ValueError):
            rows = []
        if not rows and self._row is not None:
            rows = [self._row]
        return stage_of(self.plan, self.joined, rows)


# --- what an agent knows of the members of its job -------------------------------------------------------------------


class Membership:
    """Who trains, as one agent knows it: the plan in force, newer ones, the change under way, and why not live."""

    def __init__(self, run_dir: Path, journal: Journal, meeting: NodeRendezvous, launch: Launch) -> None:
        self.choice = launch.members
        self.plan: MembershipPlan | None = None
        """The plan by which the workers of this node train; None before the first, and while they warm up to join."""
        self.change: LiveChange | None = None
        """The change that is under way, in which workers go on."""
        self.wants_meeting = False
        """Whether all nodes are to meet again, as workers do not come to a plan."""
        self.places: tuple[str, ...] = ()
        """The ids of the nodes of the present round, by their places on the board."""
        self.leavers: list[RoundBoard] = []
        """The boards of rounds that nodes have left whose workers train until the change that is under way."""
        self._version = self._written = 0  # of the newest plan that is known, and that workers have been told
        self._refusal = ""  # why the ranks have refused the last plan, where members are now to change by a restart
        self._unsettled = ""  # why nobody knows by which plan workers train
        self._how_told = ""
        self._why_told: str | None = None  # on the present board
        self._why_held = ""
        self._run_dir = run_dir
        self._journal = journal
        self._meeting = meeting
        self._launch = launch
        self._node_id = launch.node_id

    # ---- who trains ----

    @property
    def is_joining(self) -> bool:
        """Whether the workers of this node warm up to join those of others."""
        return self.change is not None and self.change.is_joining and self.plan is None

    def seats_in(self, plan: MembershipPlan) -> list[int]:
        """The seats of this node's workers by a plan, in the order of their ranks."""
        return [member.seat for member in plan.members if member.node_id == self._node_id]

    def has_member_at(self, place: int) -> bool:
        """Whether the node at a place of the present round has workers that train by the plan in force."""
        return self.plan is not None and self.places[place] in {node.node_id for node in self.plan.nodes}

    def places_of(self, nodes: Collection[str]) -> frozenset[int]:
        """The places of these nodes in the present round."""
        return frozenset(place for place, node in enumerate(self.places) if node in nodes)

    def member_places(self) -> frozenset[int]:
        """The places of the nodes whose workers train together with those of this node."""
        if self.plan is None:
            return self.places_of([self._node_id])
        return self.places_of([node.node_id for node in self.plan.nodes])

    def begin(self, settled: RoundStart) -> None:
        """Take the plan with which all workers are started, and tell of it."""
        self.plan, self.leavers = settled.plan, []
        self._refusal = self._unsettled = ""
        self.write(settled.plan)

    def take(self, plan: MembershipPlan) -> None:
        """Take a plan that the workers of this node have come to, and release what served those before."""
        if self.plan is None or not plan.has_members_of(self.plan):  # else groups need not have been formed anew
            self._meeting.forget_earlier(but=plan.store)
        self.plan, self.change, self._refusal = plan, None, ""
        self._meeting.passed_over = frozenset()
        for each in self.leavers:
            each.post_quietly("begun", True)
        self.leavers = []

    def write(self, plan: MembershipPlan) -> None:
        """Write the plan's file, then tell of it: who reads the event finds the plan that it names."""
        self._version, self._written = max(self._version, plan.version), plan.version
        try:
            write_whole(self._run_dir / MEMBERSHIP_FILE, f"{plan.to_json()}\n".encode(), durable=False)
        except OSError as error:
            self._journal.tell("trouble", f"the membership plan cannot be written: {error}", is_bad=True)
        num_nodes, num_ranks, nodes = len(plan.nodes), plan.world_size, [node.node_id for node in plan.nodes]
        words = f"membership {plan.version}: {counted(num_nodes, 'node')}, {counted(num_ranks, 'rank')}: "
        self._journal.tell("membership", words + plan.reason, plan=plan.version, nodes=nodes)

    def forget_workers(self) -> None:
        """Remove what workers of before have said of themselves, where none of them lives and others start."""
        for file in self._run_dir.glob("member-*.json"):
            file.unlink(missing_ok=True)

    # ---- how members can change ----

    def why_restart(self) -> str:
        """Why members can change by a restart alone, by this node, a sentence; empty where it needs none."""
        host = self._launch.host
        if self.plan is None:  # who joins has nothing to lose
            return why_restart_of(self.choice, {}, {}, host=host)
        if not self._meeting.is_dynamic:
            return "the nodes of a static rendezvous meet together or not at all"
        ranks = {member.seat: member.rank for member in self.plan.members}
        records = member_records(self._run_dir, self.seats_in(self.plan))
        return why_restart_of(self.choice, records, ranks, host=host) or self._refusal

    def tell_how(self) -> None:
        """Tell how members can change, as soon as the workers of this node say it."""
        if self._launch.max_nodes == 1 or self.change is not None or self.plan is None:
            return
        if None in member_records(self._run_dir, self.seats_in(self.plan)).values():
            return
        why = self.why_restart()
        how = f"nodes join and leave {f'by a restart of all workers: {why}' if why else 'while workers go on'}"
        if how != self._how_told:
            self._how_told = how
            self._journal.tell("members", how)

    def hold_back_joins(self, board: RoundBoard) -> None:
        """Have nodes wait that want to join, while a change is under way, or as long as they would need a restart."""
        if self.choice != "live" or self.plan is None:
            self._meeting.holds_back_joins = self.change is not None
            return
        own = self.why_restart()
        if own != self._why_told:
            self._why_told = own
            board.tell_quietly("why-restart", own)
        try:
            told = board.values_of("why-restart")
        except BoardGone:
            told = {}
        silent = self.member_places() - told.keys()
        why = next((each for each in told.values() if each), "some nodes are not ready for it" if silent else "")
        self._meeting.holds_back_joins = self.change is not None or bool(why)
        if why and self._meeting.held_back() and why != self._why_held:
            self._why_held = why
            self._journal.tell("members-waiting", f"a node waits to join, as all workers would be restarted: {why}")

    # ---- as nodes meet ----

    def words(self, own: NodeWords, boards: Sequence[RoundBoard]) -> NodeWords:
        """What this node says of members besides ``own``; ``boards`` are those on which others may have left."""
        return replace(
            own,
            version=self._version,
            plan=self.plan,
            written=0 if self.plan is None else self._written,
            why_restart=self.why_restart(),
            unsettled=self._unsettled,
            choice=self.choice,
            leaving=tuple(node for board in boards for node in _leaving_on(board)),
        )

    def see(self, words: Sequence[NodeWords], settled: RoundStart) -> None:
        """Note who has met, and tell how members are to change, where that is not after a failure or at the start."""
        self.places = tuple(each.node_id for each in words)
        self.wants_meeting, self._why_told = False, None
        decision = settled.decision
        if (told := planned_in_words(settled)) is not None:
            self._journal.tell(
                "members-planned",
                told,
                plan=settled.plan.version,
                mode="restart" if decision.kind == "start" else "live",
                joined=list(decision.joined),
                left=list(decision.left),
                why=decision.why,
            )

    def change_to(self, settled: RoundStart, board: RoundBoard, earlier: Sequence[RoundBoard]) -> None:
        """Begin a change to the plan that nodes have settled on; nodes may have left on the ``earlier`` boards."""
        decision, plan = settled.decision, settled.plan
        self._version = plan.version
        self.leavers = [each for each in earlier if _leaving_on(each)] if decision.left else []
        joined = decision.joined if decision.kind == "live" else ()

        def tell_workers() -> None:
            self.write(plan)
            for each in self.leavers:
                each.post_quietly("plan", plan.to_json())
            self._meeting.passed_over = self.places_of(joined)

        self.change = LiveChange(
            plan,
            joined=joined,
            node_id=self._node_id,
            board=board,
            run_dir=self._run_dir,
            limit_seconds=self._launch.shutdown_seconds,
            sends_away=self.choice == "live",
            on_ready=tell_workers,
        )
        if self.change.is_joining:
            self.write(plan)

    def settle(self) -> MembershipPlan | None:
        """Let go of the change under way, as nodes meet again; gives its plan if workers here have come to it."""
        change, self.change = self.change, None
        if change is None or not (change.is_told or change.is_joining):
            return None
        outcome, version = change.outcome, change.plan.version
        if outcome == "applied":
            return change.plan
        if outcome == "refused" and not (self.choice == "live" and change.joined):
            self._refusal = f"the ranks have refused membership {version}: {change.why_refused}"
        elif outcome != "refused" and change.is_told:
            self._unsettled = self._unsettled or f"membership {version} was under way as nodes met again"
        return None

    # ---- while a change is under way ----

    def follow(self) -> MembershipPlan | None:
        """Look how far the change is that is under way, and end it where it has; gives its plan if that is in force.

        Of workers that join the agent decides what becomes of them where they are not taken in.
        """
        change = self.change
        end = None if change is None else change.look()
        if change is None or end is None or (change.is_joining and end.kind != "applied"):
            return None
        version = change.plan.version
        if end.kind == "applied":
            words = f"membership {version} is in force on all nodes {change.seconds:.1f} s after it was planned"
            words += "; the workers of this node are in" if change.is_joining else "; no worker was restarted"
            self._journal.tell("membership-in-force", words, plan=version)
            return change.plan
        if end.kind == "late" and self.plan is not None and change.plan.has_members_of(self.plan):
            return change.plan  # by which nothing changes
        words = f"membership {version} does not come"
        if end.kind in ("refused", "late"):
            self._fall_back(version, end)
            words += ", and all nodes meet again"
        self.change, self._meeting.passed_over = None, frozenset()
        self._journal.tell("members-refused", f"{words}: {end.why}", plan=version)
        return None

    def _fall_back(self, version: int, end: ChangeEnd) -> None:
        """Have all nodes meet again, and all workers started anew."""
        if end.kind == "refused":
            self._refusal = f"the ranks have refused membership {version}: {end.why}"
        else:
            self._unsettled = end.why
        self.wants_meeting = True

    # ---- leaving ----

    def leave(self, board: RoundBoard, *, is_live: bool) -> None:
        """Tell the other nodes that this one leaves; with ``is_live`` its workers go on until a plan without it."""
        if is_live:
            self.drain(board)
        board.tell_quietly(_LEAVING, self._node_id)

    def drain(self, board: RoundBoard) -> None:
        """Tell the other nodes that this one leaves as they meet again, and that its workers go on until then."""
        board.tell_quietly(_DRAINING, asdict(LeavingNode(node_id=self._node_id, why_restart=self.why_restart())))


def _leaving_on(board: RoundBoard) -> list[LeavingNode]:
    """The nodes that have told on a board that they leave, and whose workers go on until then."""
    try:
        return [record_of(LeavingNode, row) for row in board.values_of(_DRAINING).values()]
    except (BoardGone, ValueError):
        return []


def planned_in_words(settled: RoundStart) -> str | None:
    """How members are to change, in a sentence; None where there is nothing to say."""
    plan, decision = settled.plan, settled.decision
    if decision.kind == "start":
        return f"all workers are started anew, as {decision.why}" if decision.why else None
    if decision.kind == "same":
        who = f"{', '.join(decision.joined)} does not join, as {decision.why}" if decision.joined else "nobody joins"
        return f"the members stay as they are: {who}" if decision.joined or decision.takes_back else None
    warming = "; its workers warm up while training goes on" if decision.joined else ""
    return f"membership {plan.version} is planned, and no worker is restarted: {plan.reason}{warming}"


# --- nodes that somebody wants to leave ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Drain:
    """A request that a node leaves the job."""

    node: str
    """The node's id, or the name of its host where the job has one node there."""
    after_join: bool = False
    """Whether the node stays until another joins, and leaves as that is in."""


def drained_node(plan: MembershipPlan, drain: Drain, *, min_nodes: int) -> str:
    """The id of the node that is to leave; ValueError where that is none, or the job cannot go on without it. Pure."""
    nodes = {node.node_id: node.host for node in plan.nodes}
    found = [drain.node] if drain.node in nodes else [each for each, host in nodes.items() if host == drain.node]
    if not found:
        raise ValueError(f"node {drain.node} is not in the job; its nodes are {', '.join(nodes)}")
    if len(found) > 1:
        raise ValueError(f"{drain.node} has several nodes of the job; name one of {', '.join(found)}")
    if len(nodes) == 1:
        raise ValueError(
            f"node {found[0]} is the only one of the job, and the state of training would go with it; have another "
            "node join first, or stop its agent to end the job"
        )
    if len(nodes) <= min_nodes and not drain.after_join:
        raise ValueError(
            f"the job has {len(nodes)} nodes and needs {min_nodes} (--nnodes); with --after-join the node leaves as "
            "another joins"
        )
    return found[0]


class Drains:
    """The requests that nodes leave, handed from the control socket's thread to the agent's loop."""

    def __init__(self) -> None:
        self._requests: deque[Drain] = deque()

    def add(self, drain: Drain) -> None:
        """Hand over a request; its ``node`` is an id."""
        self._requests.append(drain)

    def tell(self, board: RoundBoard) -> None:
        """Tell the nodes of a round of the requests that have come since."""
        while self._requests:
            drain = self._requests.popleft()
            board.post_quietly(f"{_DRAIN}/{drain.node}", asdict(drain))

    def of(self, node_id: str, board: RoundBoard) -> Drain | None:
        """The request that a node leaves, as somebody has told it on the board; None where nobody has."""
        row = board.read_quietly(f"{_DRAIN}/{node_id}")
        try:
            return None if row is None else record_of(Drain, row)
        except ValueError:
            return None


def members_requests(
    run_dir: Path, drains: Drains, *, min_nodes: int
) -> Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]]:
    """The handlers of requests about members over the control socket, by name; ValueError where one is refused."""

    def drain(request: Mapping[str, Any]) -> dict[str, Any]:
        asked = record_of(Drain, request, place="members-drain.")
        plan = MembershipPlan.from_json(read_at_most(run_dir / MEMBERSHIP_FILE, MOST_BYTES).decode())
        node = drained_node(plan, asked, min_nodes=min_nodes)
        drains.add(replace(asked, node=node))
        return {"node": node}

    return {"members-drain": drain}
