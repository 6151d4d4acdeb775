"""The nodes of a job as its master knows them: who may join, who is live, and which nodes the job runs on. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from elastic_ext.members.plan import MembershipPlan, NodeShare
from elastic_ext.records.text import counted, on_one_line

from .wire import PROTOCOL
from .wire import master_pb2 as wire

__all__ = [
    "MOST_HARDWARE",
    "MOST_NAME",
    "Fenced",
    "MembershipPlans",
    "Node",
    "NodeChange",
    "NodeState",
    "Nodes",
    "RefusalKind",
    "RequestRefused",
    "TooMany",
    "UnknownNode",
    "check_job",
    "check_join",
]


# --- the nodes of a job as its master knows them: who they are, and whether they are still heard of ------------------
# A *node* is an agent's place: the same id each time an agent starts there, with a higher *incarnation*. An agent with
# a lower one than the node's is *fenced*: it is told so and counts for nothing. It may join only once the node is lost
# or has left, and is the node then. A *lease* says until when a node counts as live without being heard of; every word
# from it renews the lease. Times are by the master's monotonic clock, so that agents' clocks make no difference. Where
# the master itself was stopped for a while, nobody's lease has run meanwhile.

NodeState = Literal["live", "late", "lost", "left"]

_MOST_NODES = 10_000
_KEPT_SECONDS = 24 * 3600.0  # that a node which is gone is remembered for
_LATE_SHARE = 0.5  # of a lease, after which a node that is not heard of is told of as late


class UnknownNode(Exception):
    """No node with this id and incarnation has joined: the agent has to join first.

    Raised within the master, as Fenced is; in an agent, errors.NodeUnknown and errors.NodeFenced tell of it.
    """


class Fenced(Exception):
    """An agent with a higher incarnation has this node's place, and the one that calls is not listened to."""


class TooMany(Exception):
    """As many nodes have joined as a master takes."""


@dataclass(kw_only=True, slots=True)
class Node:
    """One node as its master knows it: identity, lease, and the config in its file. ``Nodes`` and ``Job`` write it."""

    node_id: str
    incarnation: int
    host: str
    pid: int
    library: str
    started_at: float
    """When the agent was started, in seconds since 1970 by the agent's clock."""
    agent_id: str = ""
    """The agent's id in membership plans."""
    seen_at: float
    lease_until: float
    state: NodeState = "live"
    held_version: int = 0
    """The version of the config in the node's file; 0 where there is none."""
    held_digest: str = ""
    num_heard: int = 0
    """The number of the last event heard from the agent, by the agent's own count."""
    num_dropped: int = 0
    """How many events the agent had dropped by its last beat, since the last beat whose answer it had."""
    refused: tuple[int, str] = (0, "")
    """Version and digest of the last config in the node's file that the master has refused."""
    refusal: str = ""
    """Why the config in the node's file is refused; empty where it is not."""
    trouble: str = ""
    """The trouble that the agent reports, in a sentence; empty where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeChange:
    """A change of a node's state (joined, lost, left), for the job's events."""

    node_id: str
    kind: Literal["joined", "rejoined", "replaced", "lost", "back", "left"]
    text: str


class Nodes:
    """All nodes that have joined a job, and their leases.

    ``tick`` is called about once in ``tick_seconds``; calls are given the present time of a monotonic clock.
    """

    def __init__(self, *, lease_seconds: float, tick_seconds: float = 1.0, most_nodes: int = _MOST_NODES) -> None:
        self.lease_seconds = lease_seconds
        self._tick_seconds = tick_seconds
        self._most_nodes = most_nodes
        self._by_id: dict[str, Node] = {}
        self._gone: set[str] = set()  # ids of those that are lost or have left
        self._ticked_at: float | None = None
        self._forgotten: list[str] = []

    def __iter__(self) -> Iterator[Node]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, node_id: str) -> Node | None:
        """The node of this id, if there is one."""
        return self._by_id.get(node_id)

    @property
    def present(self) -> Sequence[Node]:
        """The nodes that are live or late."""
        return [each for each in self._by_id.values() if each.node_id not in self._gone]

    @property
    def num_present(self) -> int:
        """How many nodes are live or late."""
        return len(self._by_id) - len(self._gone)

    def num_with(self, node_id: str) -> int:
        """How many nodes are live or late once the node of this id is, which may be one already."""
        return self.num_present + (node_id not in self._by_id or node_id in self._gone)

    def join(
        self,
        now: float,
        node_id: str,
        incarnation: int,
        *,
        host: str,
        pid: int,
        library: str,
        started_at: float,
        agent_id: str = "",
        state: NodeState = "live",
    ) -> NodeChange:
        """Let a node join, or join again, in another ``state`` than live where the store says so.

        Raises Fenced if a later incarnation of it is present, and TooMany if no more nodes are taken.
        """
        known = self._by_id.get(node_id)
        if known is not None and incarnation < known.incarnation and node_id not in self._gone:
            raise Fenced(_fenced(known))
        if known is None and len(self._by_id) >= self._most_nodes and not self._forget_one():
            raise TooMany(f"{self._most_nodes} nodes have joined, which is all that this master takes")
        node = Node(
            node_id=node_id,
            incarnation=incarnation,
            host=host,
            pid=pid,
            library=library,
            started_at=started_at,
            agent_id=agent_id,
            seen_at=now,
            lease_until=now + self.lease_seconds,
        )
        self._by_id[node_id] = node
        self._note(node, state)
        where = f"{node_id} (pid {pid} on {host})"
        if known is None:
            return NodeChange(node_id=node_id, kind="joined", text=f"node {where} has joined")
        if known.incarnation == incarnation:
            node.held_version, node.held_digest = known.held_version, known.held_digest
            node.num_heard, node.num_dropped = known.num_heard, known.num_dropped
            return NodeChange(node_id=node_id, kind="rejoined", text=f"node {where} has joined again")
        former = f"in place of the one with pid {known.pid}, which {_STANDING[known.state]}"
        return NodeChange(node_id=node_id, kind="replaced", text=f"node {where} has joined {former}")

    def renew(self, now: float, node_id: str, incarnation: int) -> tuple[Node, NodeChange | None]:
        """Renew the lease of a node that is heard of; a change where it was thought lost.

        Raises UnknownNode for a node that has not joined, and Fenced where a later incarnation has.
        """
        node = self._by_id.get(node_id)
        if node is None or incarnation > node.incarnation or node.state == "left":
            raise UnknownNode(f"node {node_id} has not joined; join first")
        if incarnation < node.incarnation:
            raise Fenced(_fenced(node))
        change = None
        if node.state == "lost":
            away = now - node.seen_at
            change = NodeChange(
                node_id=node_id, kind="back", text=f"node {node_id} is heard of again, after {away:.0f} seconds"
            )
        node.seen_at, node.lease_until = now, now + self.lease_seconds
        self._note(node, "live")
        return node, change

    def leave(self, now: float, node_id: str, incarnation: int, reason: str) -> NodeChange:
        """Note that a node leaves the job; raises UnknownNode or Fenced as ``renew`` does."""
        node, _ = self.renew(now, node_id, incarnation)
        self._note(node, "left")
        return NodeChange(node_id=node_id, kind="left", text=f"node {node_id} has left: {reason or 'no reason given'}")

    def tick(self, now: float) -> list[NodeChange]:
        """The nodes whose lease has run out since the last call; time that the master was stopped does not count."""
        if self._ticked_at is not None:
            stopped = now - self._ticked_at - 2 * self._tick_seconds
            if stopped > 0:
                for node in self._by_id.values():
                    node.lease_until += stopped
        self._ticked_at = now
        changes = []
        for node in self.present:
            if now >= node.lease_until:
                self._note(node, "lost")
                words = f"node {node.node_id} on {node.host} has not been heard of for {now - node.seen_at:.0f} seconds"
                changes.append(NodeChange(node_id=node.node_id, kind="lost", text=f"{words}, and counts as lost"))
            elif node.lease_until - now < (1 - _LATE_SHARE) * self.lease_seconds:
                node.state = "late"
        self._forget_old(now)
        return changes

    def take_forgotten(self) -> list[str]:
        """The ids of nodes forgotten since the last call, as they had been gone for long or room was needed."""
        found, self._forgotten = self._forgotten, []
        return found

    def _forget_old(self, now: float) -> None:
        for node_id in [each for each in self._gone if now - self._by_id[each].seen_at > _KEPT_SECONDS]:
            self._forget(node_id)

    def _forget_one(self) -> bool:
        """Make room for another node: forget the one that has been gone longest; whether there was one."""
        if not self._gone:
            return False
        self._forget(min(self._gone, key=lambda each: (self._by_id[each].seen_at, each)))
        return True

    def _forget(self, node_id: str) -> None:
        del self._by_id[node_id]
        self._gone.discard(node_id)
        self._forgotten.append(node_id)

    def _note(self, node: Node, state: NodeState) -> None:
        """Set the state of a node, and count it among those that are gone or not."""
        node.state = state
        (self._gone.add if state in ("lost", "left") else self._gone.discard)(node.node_id)


_STANDING = {"live": "was there", "late": "was there", "lost": "had been lost", "left": "had left"}


def _fenced(node: Node) -> str:
    return (
        f"another agent (pid {node.pid} on {node.host}) has the place of node {node.node_id}, and is the later one; "
        "this one is not heard any more"
    )


# --- which nodes a job runs on, as one version after another ---------------------------------------------------------
# Agents count the plans of one start of a job; here they are counted on where a job is started again. The agents' own
# count is stored with the plan, so that a master that is started again knows an older plan by it.

_MOST_NAME = 256
_MOST_REASON = 1_000
_MOST_SHARES = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class _CountedPlan(MembershipPlan):
    """A membership plan with the master's number as ``version``, and the number that it has among the agents."""

    agents_version: int = 0
    """The plan's version by the agents' own count, which begins anew at each start; 0 in stores of earlier versions."""


class MembershipPlans:
    """The newest membership plan of a job, numbered by the master over all starts of the job."""

    def __init__(self, stored: str) -> None:
        """``stored`` is the newest plan as JSON, or empty."""
        self.newest = _CountedPlan.from_json(stored) if stored else None

    def take(self, told: wire.Membership, time: float) -> str | None:
        """Take a membership that an agent reports; a sentence for an event where it is a new plan, else None."""
        nodes = tuple(
            NodeShare(
                node_id=each.node_id[:_MOST_NAME],
                host=each.host[:_MOST_NAME],
                first_rank=each.first_rank,
                num_workers=each.num_workers,
            )
            for each in told.nodes[:_MOST_SHARES]
        )
        known = self.newest
        if known is not None:
            # agents have new ids at each start of the job: with one in common, the lower version is the older plan
            is_of_same_start = {each.node_id for each in nodes} & {each.node_id for each in known.nodes}
            if nodes == known.nodes or (is_of_same_start and told.version < known.agents_version):
                return None
        version = 1 if known is None else known.version + 1
        reason = on_one_line(told.reason[:_MOST_REASON])
        self.newest = _CountedPlan(version=version, nodes=nodes, reason=reason, time=time, agents_version=told.version)
        size = f"{counted(len(nodes), 'node')}, {counted(self.newest.world_size, 'rank')}"
        return f"membership {version}: {size}: {reason}"


# --- who may join a job, by what an agent says of itself -------------------------------------------------------------

MOST_NAME = 256
MOST_HARDWARE = 256 << 10
_MOST_AHEAD_SECONDS = 86400.0

RefusalKind = Literal["fenced", "unknown", "other", "limits", "late", "invalid"]
"""Why a request is refused. "fenced": a higher incarnation has the node's place; "unknown": the node has not joined;
"other": a wrong job, protocol or machine, or what is not allowed; "limits": more nodes or calls than this master takes;
"late": a message or an acknowledgement did not come in time; "invalid": a value that cannot be, or a message that is
too large."""


class RequestRefused(Exception):
    """The master refuses a request of an agent or a person, for a reason in a sentence."""

    def __init__(self, kind: RefusalKind, words: str) -> None:
        super().__init__(words)
        self.kind = kind


def check_join(
    request: wire.JoinRequest, *, job: str, job_id: str, epoch: int, library: str, now_seconds: float
) -> None:
    """Check a request to join; RequestRefused where the agent cannot be one of this master's job."""
    node = request.node
    if not request.oldest_protocol <= PROTOCOL <= request.protocol:
        spoken = f"{request.oldest_protocol} to {request.protocol}"
        raise RequestRefused(
            "other",
            f"the agent (elastic_ext {node.library[:40]}) speaks protocol {spoken}, this master (elastic_ext "
            f"{library}) speaks {PROTOCOL}: use the same version of the library",
        )
    for field, value in {"node_id": node.node_id, "host": node.host, "job": request.job}.items():
        if not 0 < len(value) <= MOST_NAME or not value.isprintable():
            raise RequestRefused(
                "invalid", f"{field} is {value[:60]!r}; allowed: 1 to {MOST_NAME} printable characters"
            )
    if len(request.hardware) > MOST_HARDWARE:
        raise RequestRefused("invalid", f"hardware has {len(request.hardware)} characters; allowed: {MOST_HARDWARE}")
    if not math.isfinite(node.started_at):
        raise RequestRefused("invalid", f"started_at is {node.started_at}; allowed: seconds since 1970")
    ahead_seconds = node.incarnation / 1e9 - now_seconds
    if ahead_seconds > _MOST_AHEAD_SECONDS:  # no later start of this node could take its place
        raise RequestRefused(
            "invalid",
            f"incarnation is {node.incarnation} nanoseconds since 1970, {ahead_seconds / 86400:.0f} days ahead of the "
            "master's clock; one day is allowed: set the clocks right, and remove the file `incarnation` in the "
            "agent's run directory",
        )
    check_job(request.job, job)
    if request.job_id and request.job_id != job_id:
        raise RequestRefused(
            "other",
            f"the agent has joined a master of job {job!r} that kept its state elsewhere (id {request.job_id[:40]!r}); "
            f"this one has id {job_id!r}: start the master with the former --state-dir, or restart the agents",
        )
    if request.epoch > epoch:
        words = f"the agent has met a later master (epoch {request.epoch}); this one is of epoch {epoch}"
        words += " and was replaced: end it"
        raise RequestRefused("other", words)


def check_job(named: str, job: str) -> None:
    """Check the job that a request names; RequestRefused where it is another one than the master's."""
    if named and job and named != job:
        raise RequestRefused("other", f"this master is of job {job!r}, not of {named[:MOST_NAME]!r}: look at --master")
