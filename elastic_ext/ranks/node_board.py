"""RoundBoard: messages that the agents of one round exchange, in the store of that round.

    failed/<node>     how workers of that node failed
    meeting/<node>    that node meets the others again, in the next round
    leaving/<node>    that node leaves the job
    met-again         the other nodes have met without the one that leaves
    begun             the other nodes have settled what follows
    any-failed        some node has said under `failed` that workers of it did
    over              why the job is over, from the node that found it
    finished/<node>   all workers of that node have ended well
    config...         the newest config of any node
    local-times/<node>  what workers of that node are busy with by themselves
    slow-workers      who is slow, from the first node
    <name>/<node>     a row of an exchange, in which every node says something and hears all

A node is known by its place in the round. A message that is not there yet is None; an error of the store is BoardGone:
the store is gone with the node that has it. Nobody waits in the store for long: torch's rendezvous has the same
connection, and this node would be silent for as long.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, PrefixStore, Store  # type: ignore[attr-defined]

__all__ = ["BoardGone", "RoundBoard"]

_PREFIX = "elastic_ext"
_SLICE_SECONDS = 1.0


class BoardGone(Exception):
    """The store of the round does not answer, or a node has not said its part in time."""


class RoundBoard:
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
        self.place = place
        self.num_nodes = num_nodes
        self._is_lost = is_lost
        self._store = PrefixStore(f"{_PREFIX}/{number}", store)
        self._why_gone = ""

    def tell(self, name: str, row: Any) -> None:
        """Write this node's message under ``name``."""
        self._put(f"{name}/{self.place}", row)

    def told(self, name: str) -> dict[int, Any]:
        """The messages that nodes have written under ``name`` so far, by their places."""
        found = {}
        for place in range(self.num_nodes):
            if (row := self._look(f"{name}/{place}")) is not None:
                found[place] = row
        return found

    def announce(self, name: str, row: Any) -> None:
        """Write a message of the whole round under ``name``; a later one, of any node, replaces it."""
        self._put(name, row)

    def announced(self, name: str) -> Any:
        """The message of the whole round under ``name``, None if there is none."""
        return self._look(name)

    def exchange(self, name: str, row: Any, *, timeout_seconds: float) -> list[Any]:
        """Write ``row`` for this node, and wait for the rows of all nodes, in the order of their places.

        BoardGone if a node has not written in time, or is lost meanwhile.
        """
        self.tell(name, row)
        names = self._of_all(name)
        end = time.monotonic() + timeout_seconds
        while not self._has(names):
            if self._is_lost():
                raise BoardGone(f"no {name} of every node: one was lost")
            if time.monotonic() > end:
                raise BoardGone(f"no {name} of every node within {timeout_seconds:.0f} seconds")
            self._wait_a_while(names, min(end - time.monotonic(), _SLICE_SECONDS))
        return [self._look(each) for each in names]

    def wait(self, name: str, *, timeout_seconds: float) -> Any:
        """Wait for the round's message under ``name``; BoardGone if it does not come in time."""
        end = time.monotonic() + timeout_seconds
        while (row := self._look(name)) is None:
            if time.monotonic() > end:
                raise BoardGone(f"nothing was said of {name} within {timeout_seconds:.0f} seconds")
            self._wait_a_while([name], min(end - time.monotonic(), _SLICE_SECONDS))
        return row

    def tell_quietly(self, name: str, row: Any) -> None:
        """Write this node's message as ``tell`` does, and ignore a store that is gone."""
        with contextlib.suppress(BoardGone):
            self.tell(name, row)

    def announce_quietly(self, name: str, row: Any) -> None:
        """Write a message of the whole round as ``announce`` does, and ignore a store that is gone."""
        with contextlib.suppress(BoardGone):
            self.announce(name, row)

    def announced_quietly(self, name: str) -> Any:
        """The round's message under ``name``; None if there is none, or the store is gone."""
        try:
            return self.announced(name)
        except BoardGone:
            return None

    def who_told(self, *names: str) -> frozenset[int]:
        """The places of nodes that have a message under one of these names; none if the store is gone."""
        try:
            return frozenset(place for name in names for place in self.told(name))
        except BoardGone:
            return frozenset()

    def have_all_told(self, name: str) -> bool:
        """Whether every node has a message under ``name``."""
        return self._has(self._of_all(name))

    def part(self, *, timeout_seconds: float) -> None:
        """Wait until all nodes have come to their end here, since the store may go with this node."""
        with contextlib.suppress(BoardGone):
            self.exchange("parted", True, timeout_seconds=timeout_seconds)

    def _of_all(self, name: str) -> list[str]:
        return [f"{name}/{place}" for place in range(self.num_nodes)]

    def _wait_a_while(self, names: list[str], seconds: float) -> None:
        with contextlib.suppress(RuntimeError):  # in time or not: whoever waits looks
            self._store.wait(names, timedelta(seconds=max(seconds, 0.01)))

    def _put(self, key: str, row: Any) -> None:
        with self._asking():
            self._store.set(key, json.dumps(row))

    def _has(self, keys: list[str]) -> bool:
        with self._asking():
            return bool(self._store.check(keys))

    def _look(self, key: str) -> Any:
        with self._asking():
            return json.loads(self._store.get(key)) if self._store.check([key]) else None

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Turn errors of the store into BoardGone; a store whose connection is lost is not asked again.

        The connection does not come back, and torch prints stacks of its own each time.
        """
        if self._why_gone:
            raise BoardGone(self._why_gone)
        try:
            yield
        except RuntimeError as error:
            why = f"the store of this round does not answer: {error}"
            if isinstance(error, DistNetworkError):
                self._why_gone = why
            raise BoardGone(why) from error
