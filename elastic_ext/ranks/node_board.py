"""RoundBoard: messages that the agents of one round exchange, in the store of that round.

    failed/<node>     how workers of that node failed
    meeting/<node>    that node has left this round for the rendezvous of the next one
    leaving/<node>    that node leaves the job
    draining/<node>   that node leaves, and its workers train until others have a membership plan without it
    met-again         the rendezvous of the next round is over, without the node that leaves: "start" where all workers
                      are started anew, "live" where they go on
    plan              the membership plan by which workers of a node that leaves do so, where those of others go on
    begun             the nodes of the next round have begun it; until then a node that leaves waits
    change/<node>     how far the workers of that node are with a change in which they go on
    why-restart/<node>  why members can change by a restart alone, as far as that node knows; empty where they can live
    drain/<id>        the node with that id is to leave, at once or after another has joined
    any-failed        some node has said under `failed` that workers of it did
    over              why the job has failed and ends on all nodes, from the node that found it
    finished/<node>   all workers of that node have ended well
    config...         the newest config of any node
    local-times/<node>  what workers of that node are busy with by themselves
    slow-workers      who is slow, from the first node
    <name>/<node>     a row of an exchange, in which every node says something and hears all

A node is known by its place in the round. Where the store is gone with the node that has it, errors are BoardGone.
Nobody waits in the store for long: torch's rendezvous has the same connection, and this node would be silent for as
long.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any

from .board import Board, BoardGone, Store

__all__ = ["RoundBoard"]

_PREFIX = "elastic_ext"
_SLICE_SECONDS = 1.0


class RoundBoard(Board):
    """One node's messages to the other nodes of its round, and theirs, in the round's store."""

    def __init__(
        self,
        store: Store,
        *,
        place: int,
        num_nodes: int,
        number: int = 0,
        is_lost: Callable[[], bool] = lambda: False,
    ) -> None:
        """``number`` tells rounds apart that have one store; ``is_lost`` says whether a node of this round is gone."""
        super().__init__(
            store,
            f"{_PREFIX}/{number}",
            place=place,
            num_peers=num_nodes,
            what="the store of this round",
            pause_seconds=_SLICE_SECONDS,
            waits_inside=True,
        )
        self._is_lost = is_lost

    def exchange(
        self, name: str, row: object, *, timeout_seconds: float, places: Collection[int] | None = None
    ) -> list[Any]:
        """Post ``row`` for this node, and wait for the rows of all nodes, in the order of their places.

        With ``places`` it waits for the nodes there alone. BoardGone if a node has not posted its row in time, or is
        lost meanwhile.
        """
        self.tell(name, row)
        names = self.of_peers(name, None if places is None else sorted(places))
        if not self.wait(names, seconds=timeout_seconds, stop=self._is_lost):
            why = ": a node was lost" if self._is_lost() else f" within {timeout_seconds:.0f} seconds"
            raise BoardGone(f"not every node has posted its {name}{why}")
        return [self.read(each) for each in names]

    def part(self, *, timeout_seconds: float, places: Collection[int] | None = None) -> None:
        """Wait until all nodes call this, as the last thing they do in the round: this node may host the store.

        With ``places`` it waits for the nodes there alone. Nothing is raised if a node does not come in time.
        """
        with contextlib.suppress(BoardGone):
            self.exchange("parted", True, timeout_seconds=timeout_seconds, places=places)

    # ---- where a store that is gone is no error ----

    def post_quietly(self, name: str, row: object) -> None:
        """Post a message of the whole round, unless the store is gone."""
        with contextlib.suppress(BoardGone):
            self.post(name, row)

    def tell_quietly(self, name: str, row: object) -> None:
        """Post a message of this node, unless the store is gone."""
        with contextlib.suppress(BoardGone):
            self.tell(name, row)

    def read_quietly(self, name: str) -> Any:
        """The round's message under ``name``; None if there is none, or the store is gone."""
        try:
            return self.read(name)
        except BoardGone:
            return None

    def who_told(self, *names: str) -> frozenset[int]:
        """The places of nodes that have a message under one of these names; none if the store is gone."""
        try:
            return frozenset(place for name in names for place in self.values_of(name))
        except BoardGone:
            return frozenset()
