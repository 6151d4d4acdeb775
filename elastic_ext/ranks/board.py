"""Board: values that peers post for each other in a store of keys and values, without collectives.

A *peer* is a rank of a process group or a node of a round, known by its *place* among the others. A value is whatever
JSON has, but None: that is read where there is no value yet. Reading needs no other peer to be alive, only the store.
No other file of this library calls a store: which names there are, and what their values mean, say those who have a
board.
"""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

from elastic_ext.errors import ElasticError

from .deadlines import NoAnswer, within

__all__ = ["Board", "BoardGone", "Store"]

_FIRST_PAUSE_SECONDS = 0.002
_LEAST_SECONDS_INSIDE = 0.01
_LOST = "DistNetworkError"  # torch's error of a lost connection, by its name: this file does without torch
_Answer = TypeVar("_Answer")


class BoardGone(ElasticError, RuntimeError):
    """The store of a board does not answer, or a peer has not posted its value in time."""


class Store(Protocol):
    """What a board calls of a store; the stores of torch.distributed have it."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, value: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...

    def delete_key(self, key: str, /) -> bool: ...


def _never() -> bool:
    return False


class Board:
    """Values under names in a store: those that this peer posts, and those of the other peers."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        *,
        place: int = 0,
        num_peers: int = 1,
        what: str = "the store",
        pause_seconds: float = 0.1,
        waits_inside: bool = False,
        answer_seconds: float | None = None,
    ) -> None:
        """All names are keys below ``prefix``; errors call the store ``what``.

        A wait looks into the store at least every ``pause_seconds``. With ``waits_inside`` it pauses in a call of the
        store, which ends as soon as the values are there, and which holds the connection up. A call of the store that
        takes longer than ``answer_seconds`` is an error; None has no limit.
        """
        self.store = store
        self.prefix = prefix
        self.place = place
        self.num_peers = num_peers
        self._what = what
        self._pause_seconds = pause_seconds
        self._waits_inside = waits_inside
        self._answer_seconds = answer_seconds
        self._posted: set[str] = set()
        self._why_gone = ""

    def below(self, name: str, *, connects: bool = False) -> Board:
        """A board of the same peers whose names all lie below ``name``; with ``connects`` on a connection of its own.

        Calls on one connection wait for each other.
        """
        board = copy.copy(self)
        board.prefix = self._key(name)
        board._posted = set()
        if connects:
            store: Any = self.store  # torch's types do not have it
            board.store = store.clone()
        return board

    def post(self, name: str, value: object) -> None:
        """Put ``value`` under ``name``, in the place of an earlier one of any peer."""
        key, text = self._key(name), json.dumps(value)
        self._ask(lambda: self.store.set(key, text))
        self._posted.add(key)

    def has(self, *names: str) -> bool:
        """Whether there is a value under each of ``names`` now."""
        keys = [self._key(name) for name in names]
        return self._ask(lambda: self.store.check(keys))

    def read(self, name: str) -> Any:
        """The value under ``name``; None if there is none now."""
        key = self._key(name)
        return json.loads(self._ask(lambda: self.store.get(key))) if self.has(name) else None

    def wait(self, names: Sequence[str], *, seconds: float, stop: Callable[[], bool] = _never) -> bool:
        """Wait until there is a value under each of ``names``; False if that takes longer than ``seconds``.

        ``stop`` is called before each pause; False at once where it gives True.
        """
        pause = threading.Event()
        pause_seconds = self._pause_seconds if self._waits_inside else _FIRST_PAUSE_SECONDS
        end = time.monotonic() + seconds
        while not self.has(*names):
            left = end - time.monotonic()
            if stop() or left < 0:
                return False
            if self._waits_inside:
                self._wait_inside(names, max(min(pause_seconds, left), _LEAST_SECONDS_INSIDE))
            else:
                pause.wait(min(pause_seconds, left))
                pause_seconds = min(2 * pause_seconds, self._pause_seconds)
        return True

    def _wait_inside(self, names: Sequence[str], seconds: float) -> None:
        try:
            self.store.wait([self._key(name) for name in names], timedelta(seconds=seconds))
        except RuntimeError:  # they are not there in time, or the store is lost, as the next call finds
            return

    def take(self, name: str, *, seconds: float) -> Any:
        """Wait for the value under ``name``; BoardGone if it does not come within ``seconds``."""
        if not self.wait([name], seconds=seconds):
            raise BoardGone(f"no peer has posted {name} in {self._what} within {seconds:.0f} seconds")
        return self.read(name)

    def decide(self, name: str, value: object) -> Any:
        """The value that was put under ``name`` first; ``value``, if there was none."""
        key, text = self._key(name), json.dumps(value)
        return json.loads(self._ask(lambda: self.store.compare_set(key, "", text)))

    def count(self, name: str) -> int:
        """How often the peers have called this for ``name``, this call counted."""
        key = self._key(name)
        return self._ask(lambda: self.store.add(key, 1))

    def clear(self) -> None:
        """Delete the values that this peer has posted, when nobody reads them any more."""
        while self._posted:
            self._ask(partial(self.store.delete_key, self._posted.pop()))

    # ---- a value of each peer under one name ----

    def tell(self, name: str, value: object) -> None:
        """Put this peer's value under ``name``."""
        self.post(f"{name}/{self.place}", value)

    def of_peers(self, name: str, places: Iterable[int] | None = None) -> list[str]:
        """The names of the values that the peers at ``places``, all peers for None, have under ``name``."""
        return [f"{name}/{place}" for place in (range(self.num_peers) if places is None else places)]

    def values_of(self, name: str) -> dict[int, Any]:
        """The values that peers have put under ``name`` so far, by their places."""
        values = {place: self.read(each) for place, each in enumerate(self.of_peers(name))}
        return {place: value for place, value in values.items() if value is not None}

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}"

    def _ask(self, call: Callable[[], _Answer]) -> _Answer:
        """The answer of a call of the store; a store whose connection is lost is not asked again.

        The connection does not come back, and torch prints stacks of its own each time.
        """
        if self._why_gone:
            raise BoardGone(self._why_gone)
        try:
            return call() if self._answer_seconds is None else within(self._answer_seconds, call)
        except (NoAnswer, RuntimeError) as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            why = f"{self._what} does not answer any more ({first_line})"
            if type(error).__name__ == _LOST:
                self._why_gone = why
            raise BoardGone(why) from error
