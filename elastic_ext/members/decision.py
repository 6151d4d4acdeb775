"""What nodes that have met decide: who trains, and whether workers go on while that changes or are started anew. Pure.

Every node says the same things of itself, hears all, and comes to the same. Words: who *stays* was in the membership
plan in force and is in the next one, who *joins* only in the next, and who *leaves* only in that before. A *spare* is a
node that has met the others and waits, without workers, since with its ranks no model could be sharded as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from elastic_ext.records.json import record_of
from elastic_ext.records.member import MemberRecord
from elastic_ext.records.text import counted

from .plan import MembershipPlan, NodeShare

__all__ = [
    "CHOICES",
    "ChangeRow",
    "ChangeStage",
    "Counted",
    "LeavingNode",
    "MeetingDecision",
    "MembersChoice",
    "NodeWords",
    "RoundStart",
    "RowState",
    "count",
    "decide_members",
    "fitting",
    "in_force",
    "multiple_of",
    "settle",
    "stage_of",
    "why_restart_at_loss",
    "why_restart_of",
]

MembersChoice = Literal["auto", "live", "restart"]
"""How members may change: ``auto``: live where the job can, else by a restart; ``live``: a node that would need a
restart does not join; ``restart``: always by a restart."""
CHOICES: tuple[MembersChoice, ...] = ("auto", "live", "restart")


# --- what a node says as it meets the others -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class LeavingNode:
    """A node that leaves, and whose workers train until a plan without it is come to."""

    node_id: str
    why_restart: str = ""
    """Why its workers cannot leave live, a sentence; empty where they can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """One node's part of the count of failures, as a round begins."""

    num_failures: int
    """How many failures this node has counted, without a failure by which the round before ended."""
    has_failed: bool
    """Whether the round before ended with a failure of this node's workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeWords:
    """What one node tells the others about itself as a round begins."""

    node_id: str
    host: str
    num_workers: int
    num_failures: int
    """How many failures this node has counted so far."""
    has_failed: bool
    """Whether the round before ended with a failure of this node's workers."""
    is_finished: bool
    """Whether all of this node's workers have ended well."""
    version: int = 0
    """The version of the newest membership plan that this node knows of; 0 before its first."""
    plan: MembershipPlan | None = None
    """The membership plan by which this node's workers train; None where they are in none."""
    written: int = 0
    """The version of the newest plan that this node's workers have been told; at least that of ``plan``."""
    keeps_workers: bool = False
    """Whether this node's workers run, are well, and could go on."""
    why_restart: str = ""
    """Why members can change by a restart alone, as far as this node knows, a sentence; empty where they can live."""
    unsettled: str = ""
    """Why nobody knows by which plan this node's workers train, a sentence; empty where that is known."""
    choice: MembersChoice = "auto"
    time: float = 0.0
    """When this is said, seconds since 1970; the plan has the time of the first node."""
    leaving: tuple[LeavingNode, ...] = ()
    """The nodes that leave, as this node has heard of them."""
    rank_multiple: int = 1
    """The divisor of every number of ranks that can train: as this node's workers say, or else as it last heard."""
    restart: int = 0
    """How many failures had been counted when the workers of this node were started."""
    refused: tuple[str, ...] = ()
    """The nodes that the ranks have refused to take in, since their workers do not fit or have not answered."""
    why_refused: str = ""
    """Why the ranks have refused them, a sentence."""

    def to_row(self) -> dict[str, Any]:
        """These values for JSON, by field."""
        return asdict(self)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> NodeWords:
        """The NodeWords that ``to_row`` made ``row`` of, once JSON has carried it."""
        return record_of(cls, row)


def why_restart_of(
    choice: MembersChoice, records: Mapping[int, MemberRecord | None], ranks: Mapping[int, int], *, host: str
) -> str:
    """Why members can change by a restart alone, as far as one node knows, a sentence; empty where they can live.

    ``records`` are of the node's workers by seat, None where a worker has written none, and ``ranks`` their ranks.
    """
    if choice == "restart":
        return f"--members=restart asks for that on {host}"
    silent = [ranks[seat] for seat, record in records.items() if record is None]
    if silent:
        return f"the workers do not say that they can change live (rank {min(silent)} on {host})"
    first = min((seat for seat, record in records.items() if record is not None and record.why_restart), default=None)
    record = None if first is None else records[first]
    return "" if first is None or record is None else f"{record.why_restart} (rank {ranks[first]} on {host})"


# --- what they decide ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class MeetingDecision:
    """How workers come to the next membership plan, and why not live."""

    kind: Literal["start", "live", "same"]
    """``start``: all workers are started, those that run are ended first. ``live``: the workers of who stays go on.
    ``same``: they go on, and nobody joins or leaves."""
    why: str = ""
    """Why members do not change live (``start``), or else why those who are kept out are: a sentence. Empty where there
    is nothing to say, as after a failure."""
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    kept_out: tuple[str, ...] = ()
    """The nodes that have met the others and do not join."""
    spares: tuple[str, ...] = ()
    """The nodes that have met the others and wait without workers until the number of ranks fits with theirs."""
    why_spares: str = ""
    """Which nodes wait as spares and for what, a sentence; empty where none does."""
    is_one_plan: bool = False
    """Whether nodes leave and join by one plan, since the number of ranks would not fit between the two."""
    holder: str = ""
    """The node that has the store in which the workers of the next plan find each other; empty where torch's has it."""
    takes_back: bool = False
    """Whether workers have been told a plan that does not come into force: the next plan has the present members."""


def in_force(words: Sequence[NodeWords]) -> MembershipPlan | None:
    """The newest plan by which workers of these nodes train; None where none of them do."""
    plans = [each.plan for each in words if each.plan is not None]
    return max(plans, key=lambda plan: plan.version, default=None)


def decide_members(words: Sequence[NodeWords]) -> MeetingDecision:
    """How the workers of nodes that have met come to the next plan, from the words of all in the order of places."""
    plan = in_force(words)
    if plan is None:
        return _all_anew(words, ())
    known, now = [node.node_id for node in plan.nodes], [each.node_id for each in words]
    stay = [each for each in words if each.node_id in known]
    leaving = {one.node_id: one for each in stay for one in each.leaving}
    left = tuple(node for node in known if node not in now)
    if {*left} - leaving.keys() or not all(each.keeps_workers and not each.has_failed for each in stay):
        return _all_anew(words, known)  # some have failed or are lost, and nobody could go on
    others = [each for each in words if each.plan != plan and (each in stay or each.plan is not None)]
    unsettled = [each.unsettled for each in stay]
    if why := _first([*unsettled, *(f"{each.node_id} has another membership plan in force" for each in others)]):
        return _all_anew(words, known, why=why)
    refused = {node for each in stay for node in each.refused}
    kept_out = tuple(node for node in now if node not in known and node in refused)
    why_kept_out = _first([each.why_refused for each in stay]) if kept_out else ""
    come = [each for each in words if each.node_id not in known and each.node_id not in refused]
    num_staying, multiple = _num_workers(stay), multiple_of(words)
    taken = _chosen(num_staying, come, multiple)
    if left and taken is None:
        why = f"without {', '.join(left)} the number of ranks is no multiple of {multiple} (the shard degree)"
        return _all_anew(words, known, why=why)
    joined = tuple(each.node_id for each in taken or ())
    spares = [each for each in come if each.node_id not in joined]
    meant = [each for each in words if each not in spares and each.node_id not in kept_out]
    whys = [each.why_restart for each in meant] + [leaving[node].why_restart for node in left]
    if (joined or left) and (why := _first(whys)):
        if left or not any(each.choice == "live" for each in stay):
            return _all_anew(words, known, why=why)
        joined, kept_out, why_kept_out = (), (*kept_out, *joined), why
    is_change = bool(joined or left)
    return MeetingDecision(
        kind="live" if is_change else "same",
        why=why_kept_out,
        joined=joined,
        left=left,
        kept_out=kept_out,
        spares=tuple(each.node_id for each in spares),
        why_spares=_spares_in_words(spares, [each for each in words if each.node_id in (*known, *joined)], multiple),
        is_one_plan=bool(joined and left) and num_staying % multiple > 0,
        holder=next(node for node in known if node in now) if is_change else "",
        takes_back=not is_change and any(each.written > plan.version for each in stay),
    )


def _all_anew(words: Sequence[NodeWords], known: Sequence[str], *, why: str = "") -> MeetingDecision:
    """The decision that workers are started anew: on all nodes, or on the most of them whose number of ranks fits.

    Those of the plan in force, ``known``, come first. Where no number fits, the model may be sharded in another way on
    so few ranks: all are started.
    """
    multiple = multiple_of(words)
    by_right = sorted(words, key=lambda each: each.node_id not in known)
    train = _chosen(0, by_right, multiple) or words
    spares = [each for each in words if each not in train]
    now = [each.node_id for each in words]
    return MeetingDecision(
        kind="start",
        why=why,
        joined=tuple(each.node_id for each in words if each in train and each.node_id not in known) if known else (),
        left=tuple(node for node in known if node not in now),
        spares=tuple(each.node_id for each in spares),
        why_spares=_spares_in_words(spares, train, multiple),
        holder=next(each.node_id for each in words if each in train) if spares else "",  # not on one that may be gone
    )


def multiple_of(words: Sequence[NodeWords]) -> int:
    """The divisor of every number of ranks that can train: as nodes with workers say, or else as all nodes remember."""
    train = [each for each in words if each.plan is not None]
    return max(each.rank_multiple for each in train or words)


def _num_workers(words: Sequence[NodeWords]) -> int:
    return sum(each.num_workers for each in words)


def _chosen(num_ranks: int, words: Sequence[NodeWords], multiple: int) -> list[NodeWords] | None:
    """The most of these nodes whose ranks make the number fit, in their order; those that met before have precedence.

    None where no number fits.
    """
    first = sorted(words, key=lambda each: each.version == 0)
    numbers = fitting(num_ranks, [each.num_workers for each in first], multiple)
    return None if numbers is None else [each for each in words if each in [first[number] for number in numbers]]


def fitting(num_ranks: int, sizes: Sequence[int], multiple: int) -> tuple[int, ...] | None:
    """Which of ``sizes``, by number, have the largest sum that makes ``num_ranks`` a multiple of ``multiple`` with it.

    Of equal sums the one counts that the first of them have. None where there is none, () where none of them is needed.
    """
    best: dict[int, tuple[int, tuple[int, ...]]] = {num_ranks % multiple: (0, ())}  # by the remainder
    for number, size in enumerate(sizes):
        for remainder, (total, chosen) in [*best.items()]:
            after = (remainder + size) % multiple
            if after not in best or total + size > best[after][0]:
                best[after] = total + size, (*chosen, number)
    return best[0][1] if 0 in best else None


def _spares_in_words(spares: Sequence[NodeWords], train: Sequence[NodeWords], multiple: int) -> str:
    """Which nodes wait and for what, in a sentence; empty where none does."""
    if not spares:
        return ""
    names, num_spare = ", ".join(each.node_id for each in spares), counted(_num_workers(spares), "rank")
    wait, have = ("waits as a spare", "it has") if len(spares) == 1 else ("wait as spares", "they have")
    num_ranks = _num_workers(train)
    return (
        f"{names} {wait}: {have} {num_spare}, {num_ranks} {'trains' if num_ranks == 1 else 'train'}, and the number of "
        f"ranks that train is to be a multiple of {multiple} (the shard degree)"
    )


def _first(sentences: Sequence[str]) -> str:
    return next((each for each in sentences if each), "")


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundStart:
    """What a new round starts with, agreed on by its nodes and the same on all: membership plan, count of failures."""

    plan: MembershipPlan
    decision: MeetingDecision
    num_failures: int
    restart: int
    """How many failures had been counted as the workers that train were started, which their records carry."""
    is_finished: bool
    """Whether the job is done: the workers of all nodes that were in it had ended well as the nodes met."""
    is_old: bool
    """Whether any of the nodes was in an earlier round; a node that was not then joins a job under way."""
    then: MembershipPlan | None = None
    """The plan by which nodes join, where ``plan`` is the one by which others leave, and comes into force before it."""

    @property
    def is_as_before(self) -> bool:
        """Whether the plan is the one in force before."""
        return self.decision.kind == "same" and not self.decision.takes_back


def settle(words: Sequence[NodeWords], *, max_restarts: int, store: str = "") -> RoundStart:
    """The plan and the count of failures for a new round, from the words of all its nodes in the order of their places.

    Pure, so that every node comes to the same; ``store`` is where the workers of a live plan find each other.
    """
    decision, plan = decide_members(words), in_force(words)
    version = max(each.version for each in words) + 1
    has_failed = any(each.has_failed for each in words)
    counted = [Counted(num_failures=each.num_failures, has_failed=each.has_failed) for each in words]
    lost: list[str] = []
    restart = max((each.restart for each in words if each.plan is not None), default=0)
    if decision.kind == "start":
        now = [each.node_id for each in words]
        lost = [] if plan is None else [node.node_id for node in plan.nodes if node.node_id not in now]
        reason = "the job starts" if version == 1 else _why(decision.joined, lost, has_failed)
        nodes = _shares([each for each in words if each.node_id not in decision.spares])
        plans = [MembershipPlan(version=version, nodes=nodes, reason=reason, time=words[0].time)]
    else:
        assert plan is not None, "somebody trains who goes on"
        plans = _live(plan, words, decision, version=version, store=store) or [plan]
    num_failures = min(count(counted, num_lost=len(lost)), max_restarts)
    if decision.kind == "start":
        restart = num_failures
    return RoundStart(
        plan=plans[0],
        then=plans[1] if len(plans) > 1 else None,
        decision=decision,
        num_failures=num_failures,
        restart=restart,
        is_finished=plan is not None and all(each.is_finished for each in words if each.plan is not None),
        is_old=version > 1,
    )


def _live(
    plan: MembershipPlan, words: Sequence[NodeWords], decision: MeetingDecision, *, version: int, store: str
) -> list[MembershipPlan]:
    """The live plans of a decision, one after the other; one with the present members where it takes a plan back.

    Who leaves does not wait until who joins is ready, unless the number of ranks would not fit: that may take long, and
    nodes that leave have little time.
    """
    joined = _shares([each for each in words if each.node_id in decision.joined])
    last = plan.at_version(version - 1)
    found: list[MembershipPlan] = []
    if decision.takes_back:
        reason = f"the membership stays as it was: {decision.why or 'nobody joins or leaves'}"
        return [last.changed(reason=reason, time=words[0].time, store=plan.store)]
    changes = [(joined, decision.left)] if decision.is_one_plan else [((), decision.left), (joined, ())]
    for come, left in changes:
        if come or left:
            reason = ", ".join([*(f"{node} leaves" for node in left), *(f"{each.node_id} joins" for each in come)])
            last = last.changed(joined=come, left=left, reason=reason, time=words[0].time, store=store)
            found.append(last)
    return found


def count(rows: Sequence[Counted], *, num_lost: int) -> int:
    """The number of failures up to now, the same on all nodes; a round that ended as nodes were lost does not count."""
    has_failed = any(row.has_failed for row in rows) and num_lost == 0
    return max(row.num_failures for row in rows) + has_failed


def _shares(words: Sequence[NodeWords]) -> tuple[NodeShare, ...]:
    shares, first = [], 0
    for each in words:
        shares.append(NodeShare(node_id=each.node_id, host=each.host, first_rank=first, num_workers=each.num_workers))
        first += each.num_workers
    return tuple(shares)


def _why(joined: Collection[str], lost: Collection[str], has_failed: bool) -> str:
    reasons = [f"{name} joined" for name in joined] + [f"{name} left or was lost" for name in lost]
    return ", ".join(reasons) or ("workers failed" if has_failed else "nodes met again")


# --- what nodes decide once workers are lost -------------------------------------------------------------------------


def why_restart_at_loss(
    plan: MembershipPlan, lost: Collection[int], answers: Mapping[str, str], *, min_nodes: int, num_left: int
) -> str:
    """Why all workers are started anew as those in the seats ``lost`` are gone, a sentence; empty where others go on.

    ``plan`` is in force, ``answers`` has by node why its workers cannot go on, empty where they can, and ``num_left``
    is how many failures may be counted yet. Of two parts of the nodes that have lost each other the larger one goes on;
    of equal ones that which reaches the store of the round, and no other part can decide.
    """
    left = {member.node_id for member in plan.members if member.seat not in lost}
    nodes = {node.node_id for node in plan.nodes}
    if not left:
        return "all workers are lost, and the state of training with them"
    if num_left < 1:
        return "no more failures are allowed (--max-restarts)"
    if silent := sorted(left - answers.keys()):
        which = "has not said that its" if len(silent) == 1 else "have not said that their"
        return f"{', '.join(silent)} {which} workers can go on"
    if why := next((f"{answers[node]} ({node})" for node in sorted(left) if answers[node]), ""):
        return why
    if len(left) < min_nodes:
        return f"{len(left)} nodes have workers left, and the job needs {min_nodes} (--nnodes)"
    if 2 * len(left) < len(nodes):
        return f"only {len(left)} of {len(nodes)} nodes are left, and the others may train on"
    return ""


# --- how far a change is that workers go on in, by what the nodes say while it goes on -------------------------------

RowState = Literal["waiting", "warming", "ready", "lost", "failed", "applied", "refused"]
"""How far a node's workers are. Where the node joins: ``warming`` up, then ``ready``, and ``lost`` if they are lost
after that; ``failed`` if they fail before they are ready. Where it stays: ``waiting`` for the nodes that join and for
the plan, then ``applied`` or ``refused``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeRow:
    """How far one node is with the plan of a version."""

    node_id: str
    version: int
    state: RowState
    why: str = ""
    """The reason for ``failed`` and ``refused``, a sentence."""
    refused: tuple[str, ...] = ()
    """The nodes whose workers are the reason for ``refused``: the others are to go on without them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeStage:
    """How far a change is on all nodes together."""

    kind: Literal["warming", "ready", "failed", "refused", "applied"]
    """``ready``: all nodes that join are ready, and workers are told the plan. ``failed``: a node that joins has failed
    before it was ready."""
    why: str = ""
    refused: tuple[str, ...] = ()


def stage_of(plan: MembershipPlan, joined: Collection[str], rows: Sequence[ChangeRow]) -> ChangeStage:
    """How far the change to ``plan`` is, by the newest rows of all nodes that have written one.

    A node whose row is of a newer plan has seen that all nodes applied this one. A node that is lost after it was ready
    counts as ready: some workers may have been told the plan by then, so all are told, and go on without that node.
    """
    states = {each.node_id: each for each in rows if each.version == plan.version}
    if refused := [each for each in states.values() if each.state == "refused"]:
        return ChangeStage(kind="refused", why=refused[0].why, refused=refused[0].refused)
    if failed := [each for each in states.values() if each.state == "failed"]:
        who = ", ".join(sorted(each.node_id for each in failed))
        return ChangeStage(kind="failed", why=f"{who}: {failed[0].why}")
    are_in = {
        each.node_id
        for each in rows
        if each.version > plan.version or (each.version == plan.version and each.state == "applied")
    }
    if are_in >= {node.node_id for node in plan.nodes}:
        return ChangeStage(kind="applied")
    num_ready = sum(node in are_in or (node in states and states[node].state in ("ready", "lost")) for node in joined)
    if num_ready == len(joined):
        return ChangeStage(kind="ready")
    return ChangeStage(kind="warming", why=f"of the nodes that join {num_ready} of {len(joined)} are ready")
