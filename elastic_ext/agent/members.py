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
from typing import TYPE_CHECKING, Any, Literal, Protocol

from elastic_ext.errors import ElasticError
from elastic_ext.members.decision import (
    ChangeRow,
    ChangeStage,
    LeavingNode,
    NodeWords,
    RoundStart,
    RowState,
    fitting,
    multiple_of,
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
    "why_restart_told",
]

_MOST_BYTES = 1 << 16
_ROWS = "change"
_LEAVING = "leaving"
_DRAINING = "draining"
_DRAIN = "drain"
_HOW = "members"
_BY_RESTART = "nodes join and leave by a restart of all workers: "
_LOSS_SECONDS = 120.0  # until workers have ended the pass that they are in, and hear that others are lost
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


class _Told(Protocol):
    """An event, as far as it is read here."""

    @property
    def kind(self) -> str: ...

    @property
    def text(self) -> str: ...


def why_restart_told(events: Sequence[_Told]) -> str:
    """Why members can change by a restart alone, as an agent has told it last in ``events``, oldest first; else empty.

    It knows more than its workers do: what it was asked for, and what the ranks have refused.
    """
    how = next((each.text for each in reversed(events) if each.kind == _HOW), "")
    return how.removeprefix(_BY_RESTART) if how.startswith(_BY_RESTART) else ""


# --- a change in which workers go on ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeEnd:
    """How a change has ended: ``failed`` is one whose joiners have not become ready, before others were told of it.

    To a node that joins it is one whose own workers have not.
    """

    kind: Literal["applied", "failed", "refused", "late"]
    why: str = ""
    refused: tuple[str, ...] = ()
    """Of ``refused``: the nodes for the sake of whose workers, which the others are to go on without; else none."""


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
        on_ready: Callable[[], None],
    ) -> None:
        """``on_ready`` is called once workers are to be told the plan.

        They have ``limit_seconds`` from then on to agree on it, and again to come to it once they can.
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
        self._on_ready = on_ready
        self._seats = [member.seat for member in plan.members if member.node_id == node_id]
        self._begun_at = self._told_at = time.monotonic()
        self._row: ChangeRow | None = None

    @property
    def seconds(self) -> float:
        """How long ago the change was decided."""
        return time.monotonic() - self._begun_at

    @property
    def has_come(self) -> bool:
        """Whether the workers of this node are known to have come to the plan."""
        return all(each is not None and each.version >= self.plan.version for each in self._records())

    def look(self) -> ChangeEnd | None:
        """Look at the workers of this node and at what other nodes say, and act on it; how the change has ended, if so.

        Called several times a second. A board that is gone says nothing: then the workers of this node decide.
        """
        self.end = self._looked()
        return self.end

    def _looked(self) -> ChangeEnd | None:
        row = self._row_now()
        self._tell(row)
        stage = self._stage(row)
        now = time.monotonic()
        if stage.kind == "ready" and not self.is_told and not self.is_joining:
            self.is_told, self._told_at = True, now
            self._on_ready()
        if stage.kind in ("applied", "refused"):
            return ChangeEnd(kind=stage.kind, why=stage.why, refused=stage.refused)
        # To a node that joins it is another one that fails: all nodes meet again, and this one may join without it.
        if stage.kind == "failed" and not (self.is_told or self.is_joining):
            return ChangeEnd(kind=stage.kind, why=stage.why)
        if row.state == "warming" and self.seconds > _WARM_SECONDS:
            return ChangeEnd(kind="failed", why=f"its workers are not ready after {_WARM_SECONDS:.0f} seconds")
        is_applied = row.state == "applied"
        if not is_applied and self._have_agreed():  # it comes once they begin their next step
            self._told_at = now
        if self.is_told and now > self._told_at + self._limit_seconds:
            which = "other nodes do not say that they have" if is_applied else "no boundary between two steps has come"
            return ChangeEnd(
                kind="late", why=f"{which} within {self._limit_seconds:.0f} seconds of membership {self.plan.version}"
            )
        return None

    def tell_failed(self, why: str) -> None:
        """Tell the other nodes that the workers of this node, which were to join, do not."""
        was_ready = self._row is not None and self._row.state == "ready"
        state: RowState = "lost" if was_ready else "failed"
        self._tell(ChangeRow(node_id=self._node_id, version=self.plan.version, state=state, why=why))

    def _tell(self, row: ChangeRow) -> None:
        if row != self._row:
            self._row = row
            self._board.tell_quietly(_ROWS, asdict(row))

    def _row_now(self) -> ChangeRow:
        """How far the workers of this node are."""
        version, records = self.plan.version, self._records()
        row = ChangeRow(node_id=self._node_id, version=version, state="waiting")
        if self.has_come:
            return replace(row, state="applied")
        if self.is_joining:
            is_ready = all(each is not None and each.ready >= version for each in records)
            return replace(row, state="ready" if is_ready else "warming")
        by = next((each for each in records if each is not None and each.refused >= version), None)
        if by is None:
            return row
        nodes = {member.seat: member.node_id for member in self.plan.members}
        refused = dict.fromkeys(nodes[seat] for seat in by.refused_seats if seat in nodes)
        return replace(row, state="refused", why=by.why_refused or "they do not say why", refused=tuple(refused))

    def _have_agreed(self) -> bool:
        return any(each is not None and each.agreed >= self.plan.version for each in self._records())

    def _records(self) -> list[MemberRecord | None]:
        return [*member_records(self._run_dir, self._seats).values()]

    def _stage(self, own: ChangeRow) -> ChangeStage:
        try:
            told = self._board.values_of(_ROWS).values()
            rows = [record_of(ChangeRow, row) for row in told]
        except (BoardGone, ValueError):
            rows = []
        return stage_of(self.plan, self.joined, rows or [own])


# --- what an agent knows of the members of its job -------------------------------------------------------------------


class Membership:
    """Who trains, as one agent knows it: the plan in force, newer ones, the change under way, and why not live."""

    def __init__(self, run_dir: Path, journal: Journal, meeting: NodeRendezvous, launch: Launch) -> None:
        self.choice = launch.members
        self.plan: MembershipPlan | None = None
        """The plan by which the workers of this node train; None before the first, and while they warm up to join."""
        self.change: LiveChange | None = None
        """The change that is under way, in which workers go on."""
        self._then: LiveChange | None = None  # that follows once it is over
        self.wants_meeting = False
        """Whether all nodes are to meet again, as workers do not come to a plan."""
        self.places: tuple[str, ...] = ()
        """The ids of the nodes of the present round, by their places on the board."""
        self.leavers: list[RoundBoard] = []
        """The boards of rounds that nodes have left whose workers train until the change that is under way."""
        self.spares: dict[str, int] = {}
        """The nodes that wait as spares, by id, each with the number of its workers."""
        self.was_spare = False
        """Whether this node was a spare as nodes met, and has the job's config already."""
        self.trains: frozenset[int] = frozenset()
        """The places of the nodes whose workers train as nodes have met, also where this one's do not."""
        self._rank_multiple = 1  # as workers here, or else nodes that have met, have said it last
        self._version = self._written = 0  # of the newest plan that is known, and that workers have been told
        self._refusal = ""  # why the ranks have refused the last plan, where members are now to change by a restart
        self._refused: tuple[str, ...] = ()  # the nodes without which the ranks go on, and why
        self._why_refused = ""
        self._unsettled = ""  # why nobody knows by which plan workers train
        self._how_told = ""
        self._why_told: str | None = None  # on the present board
        self.waiting = ""
        """Which nodes wait to join and for what, a sentence; empty where none does."""
        self._why_spares = ""  # the same, of spares alone
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

    @property
    def version(self) -> int:
        """The version of the newest plan that is known."""
        return self._version

    @property
    def newest_plan(self) -> MembershipPlan:
        """The newest plan without workers that are lost, whether or not they have come to it; else the one in force."""
        assert self.plan is not None, "it trains"
        return self.change.plan if self.change is not None and self.change.plan.lost else self.plan

    @property
    def is_spare(self) -> bool:
        """Whether this node waits as a spare, without workers."""
        return self._node_id in self.spares

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
        self.plan, self.leavers = None if self.is_spare else settled.plan, []
        self._forget_refusal()
        self._unsettled = ""
        self.write(settled.plan)

    def take(self, plan: MembershipPlan) -> None:
        """Take a plan that the workers of this node have come to, and release what served those before."""
        if self.plan is None or not plan.has_members_of(self.plan):  # else groups need not have been formed anew
            self._meeting.forget_earlier(but=plan.store)
        self.plan, self.change, self._then = plan, self._then, None
        self._forget_refusal()
        if not plan.lost:  # else nodes that are gone are done without until the next meeting
            self._meeting.passed_over = frozenset()
        for each in self.leavers:
            each.post_quietly("begun", True)
        self.leavers = []

    def _forget_refusal(self) -> None:
        self._refusal, self._refused, self._why_refused = "", (), ""

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

    def why_restart_at_loss(self) -> str | None:
        """Why all workers are started anew where one is lost, as those of this node say; None as long as they do not.

        Empty where the others go on.
        """
        if self.plan is None:
            return None
        if not self._meeting.is_dynamic:
            return "the nodes of a static rendezvous meet together or not at all"
        records = member_records(self._run_dir, self.seats_in(self.plan))
        if not records:
            return ""
        whys = [None if each is None else each.why_restart_at_loss for each in records.values()]
        return None if None in whys else next((why for why in whys if why), "")

    def tell_how(self) -> None:
        """Tell how members can change, as soon as the workers of this node say it."""
        if self._launch.max_nodes == 1 or self.change is not None or self.plan is None:
            return
        if None in member_records(self._run_dir, self.seats_in(self.plan)).values():
            return
        why = self.why_restart()
        how = f"{_BY_RESTART}{why}" if why else "nodes join and leave while workers go on"
        if how != self._how_told:
            self._how_told = how
            self._journal.tell(_HOW, how)

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
        is_held = bool(why) and bool(self._meeting.held_back())
        held = f"a node waits to join, as all workers would be restarted: {why}" if is_held else ""
        self._tell_waiting(self._why_spares or held)

    def _tell_waiting(self, words: str) -> None:
        """Tell who waits to join and for what, where that is news; ``words`` are empty for nobody."""
        if words != self.waiting:
            self.waiting = words
            self._journal.tell("members-waiting", words or "no node waits to join any more")

    # ---- spares ----

    def look_for_spares(self) -> None:
        """Have all nodes meet again where spares could join by now, since the model is sharded in another way."""
        if self.spares and self.change is None and self.spares_for(()):
            self.wants_meeting = self.choice != "live" or not self.why_restart()

    def spares_for(self, gone: Collection[str]) -> list[str]:
        """The spares that would join now, were the nodes ``gone`` not there; none where it is not known."""
        if self.plan is None:
            return []
        num_ranks = sum(node.num_workers for node in self.plan.nodes if node.node_id not in gone)
        numbers = fitting(num_ranks, [*self.spares.values()], self._multiple_now())
        return [[*self.spares][number] for number in numbers or ()]

    def _multiple_now(self) -> int:
        """Of what the number of ranks has to be a multiple, as workers of this node say, or else as was heard last."""
        if self.plan is not None:
            records = member_records(self._run_dir, self.seats_in(self.plan)).values()
            told = [each.rank_multiple for each in records if each is not None]
            self._rank_multiple = max(told, default=self._rank_multiple)
        return self._rank_multiple

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
            refused=self._refused,
            why_refused=self._why_refused,
            rank_multiple=self._multiple_now(),
        )

    def see(self, words: Sequence[NodeWords], settled: RoundStart) -> None:
        """Note who has met, and tell how members are to change, where that is not after a failure or at the start."""
        decision = settled.decision
        self.places = tuple(each.node_id for each in words)
        self.wants_meeting, self._why_told = False, None
        self.was_spare = self.is_spare
        self.spares = {each.node_id: each.num_workers for each in words if each.node_id in decision.spares}
        joined = () if decision.kind == "start" else decision.joined
        self.trains = self.places_of({node.node_id for node in settled.plan.nodes}.difference(joined))
        self._version = max(each.version for each in words)
        self._rank_multiple = multiple_of(words)
        self._why_spares = decision.why_spares
        self._tell_waiting(self._why_spares)
        if (told := planned_in_words(settled)) is not None:
            self._journal.tell(
                "members-planned",
                told,
                plan=(settled.then or settled.plan).version,
                mode="restart" if decision.kind == "start" else "live",
                joined=list(decision.joined),
                left=list(decision.left),
                why=decision.why,
            )

    def change_to(self, settled: RoundStart, board: RoundBoard, earlier: Sequence[RoundBoard]) -> None:
        """Begin a change to the plan that nodes have settled on; nodes may have left on the ``earlier`` boards."""
        joined = settled.decision.joined
        plans = [settled.plan, *([] if settled.then is None else [settled.then])]
        self._version = plans[-1].version
        self.leavers = [each for each in earlier if _leaving_on(each)] if settled.decision.left else []
        changes = [self._change_by(plan, joined if plan is plans[-1] else (), board) for plan in plans]
        if changes[-1].is_joining:  # what others do before is nothing to it
            self.change = changes[-1]
            self.write(plans[-1])
        else:
            self.change, self._then = changes[0], changes[1] if len(changes) > 1 else None

    def _change_by(self, plan: MembershipPlan, joined: Sequence[str], board: RoundBoard) -> LiveChange:
        def tell_workers() -> None:
            self.write(plan)
            for each in self.leavers:
                each.post_quietly("plan", plan.to_json())
            # Who does not train yet may come and go: the ranks decide on the plan without a word of it.
            together = self.member_places()
            if plan.lost:
                together &= self.places_of([node.node_id for node in plan.nodes])
            self._meeting.passed_over = frozenset(range(len(self.places))) - together

        return LiveChange(
            plan,
            joined=joined,
            node_id=self._node_id,
            board=board,
            run_dir=self._run_dir,
            limit_seconds=max(self._launch.shutdown_seconds, _LOSS_SECONDS if plan.lost else 0.0),
            on_ready=tell_workers,
        )

    def lose(self, plan: MembershipPlan, board: RoundBoard) -> None:
        """Have the workers of this node come to a plan without those who are lost, in the place of any other change."""
        self._version = plan.version
        self._then, self.leavers = None, []
        self.change = self._change_by(plan, (), board)
        self.change.look()  # which has its workers told at once

    def come_back(self) -> None:
        """Have all nodes meet, so that this one joins, whose workers were lost while those of others have gone on."""
        self.plan, self.change, self.wants_meeting = None, None, True

    def settle(self) -> MembershipPlan | None:
        """Let go of the change under way, as nodes meet again; gives its plan if workers here have come to it."""
        change, self.change, self._then = self.change, None, None
        if change is None or not (change.is_told or change.is_joining):
            return None
        end = change.look()
        if change.has_come:
            return change.plan
        if change.is_joining:
            return None
        if end is not None and end.kind == "refused":
            self._note_refusal(change.plan.version, end)
        else:
            words = f"membership {change.plan.version} was under way as nodes met again"
            self._unsettled = self._unsettled or words
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
            if end.kind == "refused":
                self._note_refusal(version, end)
            else:
                self._unsettled = end.why
            self.wants_meeting = True
            words += ", and all nodes meet again"
        self.change, self._then, self._meeting.passed_over = None, None, frozenset()
        self._journal.tell("members-refused", f"{words}: {end.why}", plan=version)
        return None

    def _note_refusal(self, version: int, end: ChangeEnd) -> None:
        """Note for the next meeting that the ranks have refused a plan, and whether they go on without some nodes."""
        if end.refused:
            self._refused, self._why_refused = end.refused, end.why
        else:
            self._refusal = f"the ranks have refused membership {version}: {end.why}"

    # ---- leaving ----

    def leave(self, board: RoundBoard, *, is_live: bool) -> None:
        """Tell the other nodes that this one leaves; with ``is_live`` its workers go on until a plan without it."""
        if is_live:
            board.tell_quietly(_DRAINING, asdict(LeavingNode(node_id=self._node_id, why_restart=self.why_restart())))
        board.tell_quietly(_LEAVING, self._node_id)


def _leaving_on(board: RoundBoard) -> list[LeavingNode]:
    """The nodes that have told on a board that they leave, and whose workers go on until then."""
    try:
        return [record_of(LeavingNode, row) for row in board.values_of(_DRAINING).values()]
    except (BoardGone, ValueError):
        return []


def planned_in_words(settled: RoundStart) -> str | None:
    """How members are to change, in a sentence; None where there is nothing to say."""
    plan, then, decision = settled.plan, settled.then, settled.decision
    if decision.kind == "start":
        return f"all workers are started anew, as {decision.why}" if decision.why else None
    kept_out = f"{', '.join(decision.kept_out)} does not join, as {decision.why}" if decision.kept_out else ""
    if decision.kind == "same":
        says = bool(kept_out) or decision.takes_back
        return f"the members stay as they are: {kept_out or 'nobody joins'}" if says else None
    words = f"membership {plan.version} is planned, and no worker is restarted: {plan.reason}"
    words += "" if then is None else f"; then membership {then.version}: {then.reason}"
    words += "; its workers warm up while training goes on" if decision.joined else ""
    return f"{words}; {kept_out}" if kept_out else words


# --- nodes that somebody wants to leave ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Drain:
    """A request that a node leaves the job."""

    node: str
    """The node's id, or the name of its host where the job has one node there."""
    after_join: bool = False
    """Whether the node stays until another has joined."""
    known: tuple[str, ...] = ()
    """The nodes of the job as this was asked."""

    def is_due(self, plan: MembershipPlan, spares: Collection[str] = ()) -> bool:
        """Whether the node is to leave now, where ``plan`` is in force, and ``spares`` take its place as it leaves."""
        others = [*(node.node_id for node in plan.nodes), *spares]
        return not self.after_join or any(node not in self.known for node in others)


def drained_node(plan: MembershipPlan, drain: Drain, *, min_nodes: int, leaving: Collection[str] = ()) -> str:
    """The id of the node that is to leave; ValueError where that is none, or the job cannot go on without it. Pure.

    ``leaving`` are the nodes that have been told to leave before.
    """
    nodes = {node.node_id: node.host for node in plan.nodes}
    found = [drain.node] if drain.node in nodes else [each for each, host in nodes.items() if host == drain.node]
    if not found:
        raise ValueError(f"node {drain.node} is not in the job; its nodes are {', '.join(nodes)}")
    if len(found) > 1:
        raise ValueError(f"{drain.node} has several nodes of the job; name one of {', '.join(found)}")
    others = [each for each in nodes if each in leaving and each != found[0]]
    num_nodes, once = (
        len(nodes) - len(others),
        f" once {', '.join(others)} {'has' if len(others) == 1 else 'have'} left" if others else "",
    )
    if num_nodes == 1 and not drain.after_join:
        raise ValueError(
            f"node {found[0]} is the only one of the job{once}, and the state of training would go with it; with "
            "--after-join the node leaves once another has joined, and to end the job stop its agent"
        )
    if num_nodes <= min_nodes and not drain.after_join:
        raise ValueError(
            f"the job has {num_nodes} nodes{once} and needs {min_nodes} (--nnodes); with --after-join the node leaves "
            "once another has joined"
        )
    return found[0]


class Drains:
    """The requests that nodes leave, handed from the control socket's thread to the agent's loop."""

    def __init__(self) -> None:
        self._requests: deque[Drain] = deque()
        self._followed: dict[str, Drain] = {}  # by node, until it has left

    @property
    def leaving(self) -> set[str]:
        """The nodes that are to leave at once, as far as this agent has heard of it."""
        return {each.node for each in (*self._followed.values(), *self._requests) if not each.after_join}

    def add(self, drain: Drain) -> None:
        """Hand over a request; its ``node`` is an id."""
        self._requests.append(drain)

    def tell(self, board: RoundBoard, plan: MembershipPlan) -> None:
        """Tell the nodes of a round of the requests to this agent, again in each round until the node has left."""
        while self._requests:
            drain = self._requests.popleft()
            self._followed[drain.node] = drain
        here = {node.node_id for node in plan.nodes}
        self._followed = {node: drain for node, drain in self._followed.items() if node in here}
        for node, drain in self._followed.items():
            board.post_quietly(f"{_DRAIN}/{node}", asdict(drain))

    def of(self, node_id: str, board: RoundBoard) -> Drain | None:
        """The request that a node leaves, as somebody has told it on the board; None where nobody has.

        This agent tells it too from then on, as the one that was asked may leave itself.
        """
        row = board.read_quietly(f"{_DRAIN}/{node_id}")
        try:
            return None if row is None else self._followed.setdefault(node_id, record_of(Drain, row))
        except ValueError:
            return None

    def are_enough_without(
        self, node_id: str, board: RoundBoard, plan: MembershipPlan, *, min_nodes: int, gone: Collection[str]
    ) -> bool:
        """Whether enough nodes stay where this one leaves now; of several that are to leave the first ones do.

        ``gone`` are the nodes that have left or are leaving.
        """
        names = [node.node_id for node in plan.nodes]
        asked = {name: self.of(name, board) for name in names[: names.index(node_id)]}
        leaving = {name for name, drain in asked.items() if drain is not None and drain.is_due(plan)}
        return len({*names} - {*gone} - leaving - {node_id}) >= max(min_nodes, 1)


def members_requests(
    run_dir: Path, drains: Drains, *, min_nodes: int
) -> Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]]:
    """The handlers of requests about members over the control socket, by name; ValueError where one is refused."""

    def drain(request: Mapping[str, Any]) -> dict[str, Any]:
        asked = record_of(Drain, request, place="members-drain.")
        plan = MembershipPlan.from_json(read_at_most(run_dir / MEMBERSHIP_FILE, MOST_BYTES).decode())
        node = drained_node(plan, asked, min_nodes=min_nodes, leaving=drains.leaving)
        drains.add(replace(asked, node=node, known=tuple(each.node_id for each in plan.nodes)))
        return {"node": node}

    return {"members-drain": drain}
