"""RoundBoard: what the agents of one round tell one another, in the store of that round.

    failed/<node>     how workers of that node failed
    meeting/<node>    it meets the others again
    leaving/<node>    it leaves
    met-again         ... and the others have met without it
    any-failed        some node has said under `failed` that workers of it did
    over              why the job is over, from the node that found it
    config...         the newest config of any node
    <name>/<node>     a row of an exchange, in which every node says something and hears all

A node is known by its place in the round. What is looked for and not there yet is None; the store's own errors are
passed on: it is gone with the node that has it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

__all__ = ["BoardGone", "RoundBoard"]

_PREFIX = "elastic_ext"
_SLICE_SECONDS = 1.0


class BoardGone(Exception):
    """The store of the round does not answer, or a node has not said its part in time."""


class RoundBoard:
    """One node's part in it."""

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

    def tell(self, name: str, row: Any) -> None:
        """Say something of this node, for those who look."""
        self._put(f"{name}/{self.place}", row)

    def told(self, name: str) -> dict[int, Any]:
        """What nodes have said so far, by their places."""
        found = {}
        for place in range(self.num_nodes):
            if (row := self._look(f"{name}/{place}")) is not None:
                found[place] = row
        return found

    def announce(self, name: str, row: Any) -> None:
        """Say something to all; the last to say it is heard."""
        self._put(name, row)

    def announced(self, name: str) -> Any:
        """What was said to all, None if nothing was."""
        return self._look(name)

    def exchange(self, name: str, row: Any, *, timeout_seconds: float) -> list[Any]:
        """What every node says, in the order of their places, once all have; BoardGone if they have not in time.

        Nor if one of them is lost meanwhile.
        """
        self.tell(name, row)
        names = [f"{name}/{place}" for place in range(self.num_nodes)]
        end = time.monotonic() + timeout_seconds
        try:
            while not self._store.check(names):
                if time.monotonic() > end or self._is_lost():
                    raise TimeoutError("one is lost, or says nothing")
                self._wait_a_while(names, min(end - time.monotonic(), _SLICE_SECONDS))
            return [json.loads(self._store.get(each)) for each in names]
        except (RuntimeError, TimeoutError) as error:
            raise BoardGone(f"no {name} of every node within {timeout_seconds:.0f} seconds: {error}") from error

    def wait(self, name: str, *, timeout_seconds: float) -> Any:
        """What is announced to all, once it is; BoardGone if it is not in time."""
        try:
            self._store.wait([name], timedelta(seconds=timeout_seconds))
            return json.loads(self._store.get(name))
        except RuntimeError as error:
            raise BoardGone(f"nothing was said of {name} within {timeout_seconds:.0f} seconds: {error}") from error

    def tell_quietly(self, name: str, row: Any) -> None:
        """As ``tell``, where it is no matter if nobody hears it."""
        with contextlib.suppress(BoardGone):
            self.tell(name, row)

    def announce_quietly(self, name: str, row: Any) -> None:
        """As ``announce``, where it is no matter if nobody hears it."""
        with contextlib.suppress(BoardGone):
            self.announce(name, row)

    def announced_quietly(self, name: str) -> Any:
        """As ``announced``; None too where the store is gone."""
        try:
            return self.announced(name)
        except BoardGone:
            return None

    def who_told(self, *names: str) -> frozenset[int]:
        """The places of nodes that have said something under one of these names; none if the store is gone."""
        try:
            return frozenset(place for name in names for place in self.told(name))
        except BoardGone:
            return frozenset()

    def part(self, *, timeout_seconds: float) -> None:
        """Nothing more is said here: wait until the others have heard all, as the store may go with this node."""
        with contextlib.suppress(BoardGone):
            self.exchange("parted", True, timeout_seconds=timeout_seconds)

    def _wait_a_while(self, names: list[str], seconds: float) -> None:
        with contextlib.suppress(RuntimeError):  # in time or not: whoever waits looks
            self._store.wait(names, timedelta(seconds=max(seconds, 0.01)))

    def _put(self, key: str, row: Any) -> None:
        try:
            self._store.set(key, json.dumps(row))
        except RuntimeError as error:
            raise BoardGone(f"the store of this round does not answer: {error}") from error

    def _look(self, key: str) -> Any:
        try:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError as error:
            raise BoardGone(f"the store of this round does not answer: {error}") from error
