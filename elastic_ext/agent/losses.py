"""LostWorkers: workers that have failed while all others can go on without them, and the plans by which they do.

Whoever finds workers lost, of its own node or of one that is gone, makes the plan without them. Nodes put their plan on
the board of the round, and the one that is there first counts for all: the agents of one round have one store, so that
no two parts of them decide apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from elastic_ext.members.decision import why_restart_at_loss
from elastic_ext.members.plan import MembershipPlan
from elastic_ext.ranks.board import BoardGone
from elastic_ext.ranks.node_board import RoundBoard
from elastic_ext.records.text import counted

from .journal import Failure

__all__ = ["LostWorkers", "gone_in_words", "lost_in_words"]

_OUTLIVES = "outlives"
_POLL_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    """What an agent has told on a board of whether its workers outlive others."""

    board: RoundBoard
    why_restart: str


class LostWorkers:
    """What one agent knows of workers that are lost, and its part in deciding on plans without them."""

    def __init__(self, *, min_nodes: int, node_id: str, open_store: Callable[[], str]) -> None:
        """``open_store`` starts a store for a plan's workers on this node, and gives its address."""
        self._min_nodes = min_nodes
        self._node_id = node_id
        self._open_store = open_store
        # By seat, in words, until a plan is without them; the words are empty for who ends with others of its node.
        self._lost: dict[int, str] = {}
        self._told: _Known | None = None

    def tell(self, board: RoundBoard, why_restart: str) -> None:
        """Tell the other nodes why all workers are started anew where one is lost, as far as this node's say it."""
        if self._told is None or self._told.board is not board or self._told.why_restart != why_restart:
            board.tell_quietly(_OUTLIVES, why_restart)
            self._told = _Known(board=board, why_restart=why_restart)

    def why_restart(
        self, board: RoundBoard, plan: MembershipPlan, lost: Iterable[int], places: Mapping[int, str], num_left: int
    ) -> str:
        """Why all workers are started anew as workers in these seats are lost, a sentence; empty where others go on.

        ``places`` are the ids of nodes by their places, and ``num_left`` is how many failures may be counted yet.
        """
        lost = {*self._lost, *lost}
        try:
            told = {places[place]: str(why) for place, why in board.values_of(_OUTLIVES).items() if place in places}
            finished = {places[place] for place in board.values_of("finished") if place in places}
        except BoardGone as error:
            return str(error)
        if ended := sorted(finished & {member.node_id for member in plan.members if member.seat not in lost}):
            return f"the workers of {', '.join(ended)} have ended well"
        return why_restart_at_loss(plan, lost, told, min_nodes=self._min_nodes, num_left=num_left)

    def wait_for_words(self, board: RoundBoard, places: Collection[int], *, seconds: float) -> None:
        """Wait until the nodes at these places have told why all workers are started anew at a loss, up to a limit.

        They look once in a while, and their workers may have begun to train since.
        """
        deadline = time.monotonic() + seconds
        while not {*places} <= board.who_told(_OUTLIVES) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def add(self, lost: Mapping[int, str]) -> None:
        """Note workers that are lost, by seat, in words."""
        self._lost.update(lost)

    def next_plan(self, board: RoundBoard, plan: MembershipPlan, version: int) -> MembershipPlan | None:
        """The plan of a version by which nodes go on without who is lost, as one of them has put it on the board.

        Of workers that this node has found lost it puts one there itself. The first node of the plan has the store for
        its workers. None as long as there is no plan, or no store.
        """
        name = f"loss-plan/{version}"
        try:
            text = board.read(name)
            if text is None and (lost := self.pending(plan)):
                text = board.decide(name, self._made(plan, lost, version).to_json())
            if text is None:
                return None
            found = MembershipPlan.from_json(text)
            store = board.read(f"{name}/store")
            if store is None and found.nodes[0].node_id == self._node_id:
                store = self._open_store()
                board.post(f"{name}/store", store)
        except BoardGone:
            return None
        if store is None:
            return None
        self._lost = self.pending(found)
        return replace(found, store=str(store))

    def pending(self, plan: MembershipPlan) -> dict[int, str]:
        """The workers that are lost and in the plan yet, by seat, in words."""
        return {seat: words for seat, words in self._lost.items() if plan.member_at(seat) is not None}

    def _made(self, plan: MembershipPlan, lost: Mapping[int, str], version: int) -> MembershipPlan:
        return plan.at_version(version - 1).changed(lost=lost, reason=_listed(lost), time=time.time(), store="")

    def forget(self) -> None:
        """Forget who is lost, as all workers are started anew."""
        self._lost = {}


def _listed(lost: Mapping[int, str]) -> str:
    """Who is lost, in words: those that have a reason of their own, and how many others end with them."""
    words, others = [each for each in lost.values() if each], sum(not each for each in lost.values())
    return "; ".join(words) + (f", and {counted(others, 'worker')} of that node with it" if others else "")


def lost_in_words(failure: Failure) -> str:
    """A worker that is lost, and how, in the words of a plan's reason."""
    return f"rank {failure.rank} (pid {failure.pid}) on {failure.host} {failure.ending}"


def gone_in_words(plan: MembershipPlan, nodes: Collection[str]) -> dict[int, str]:
    """The workers of nodes that are gone, by seat, in words."""
    return {
        member.seat: f"rank {member.rank} is lost with its node {member.node_id}"
        for member in plan.members
        if member.node_id in nodes
    }
