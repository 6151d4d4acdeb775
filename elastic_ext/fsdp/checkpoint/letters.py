"""Letters: what the threads of a save tell each other from rank to rank, where collectives are the training's alone.

They lie in the store of the process group, each under a name of its own. Reading them needs no other rank to be alive.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from typing import Any

from elastic_ext.errors import CheckpointError
from elastic_ext.peers import Store

__all__ = ["Letters", "OwnStore", "ToldOfFailure"]

_POLL_SECONDS = 0.002
_MOST_POLL_SECONDS = 0.1
_FAILED = "failed"
_WANTED = "wanted"


class ToldOfFailure(CheckpointError):
    """Another rank has failed, and says why."""


class OwnStore:
    """A store of one process alone."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str, /) -> None:
        self._values[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        return self._values[key]

    def check(self, keys: list[str], /) -> bool:
        return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        with self._lock:
            if self._values.get(key, b"").decode() == expected:
                self._values[key] = desired.encode()
            return self._values[key]

    def delete_key(self, key: str, /) -> bool:
        return self._values.pop(key, None) is not None


class Letters:
    """One rank's letters of one save, which all ranks call by the same ``name``."""

    def __init__(self, store: Store, *, name: str, rank: int, seconds: float) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._posted: list[str] = []
        self._cancelled: str | None = None
        self._is_hurried = False

    def post(self, what: str, value: object = None) -> None:
        """Tell the others; each ``what`` once."""
        key = self._key(what, self._rank)
        self._store.set(key, json.dumps(value))
        self._posted.append(key)

    def ask_for(self) -> None:
        """Have all ranks write what they only hold so far."""
        key = self._key(_WANTED)
        self._store.set(key, "1")
        self._posted.append(key)

    def is_asked_for(self) -> bool:
        """Whether some rank has said ``ask_for``."""
        return self._store.check([self._key(_WANTED)])

    def fail(self, why: str) -> None:
        """Have whoever waits, or comes to wait, give up."""
        key = self._key(_FAILED)
        self._store.set(key, json.dumps([self._rank, why]))
        self._posted.append(key)

    def wait(self, what: str, ranks: Iterable[int]) -> list[Any]:
        """What ``ranks`` have posted under ``what``; CheckpointError where one has failed, or does not come in time."""
        waiting = list(ranks)
        keys = {rank: self._key(what, rank) for rank in waiting}
        pause, seconds = threading.Event(), _POLL_SECONDS
        began = time.monotonic()
        while waiting := [rank for rank in waiting if not self._store.check([keys[rank]])]:
            self.raise_if_failed()
            now = time.monotonic()
            if now > self._deadline or (self._is_hurried and now > began + self._seconds):
                raise CheckpointError(
                    f"rank {waiting[0]} has not said within {self._seconds:g} seconds that it has {what} its part; it "
                    "died, or its storage does not answer"
                )
            pause.wait(seconds)
            seconds = min(2 * seconds, _MOST_POLL_SECONDS)
        return [json.loads(self._store.get(key)) for key in keys.values()]

    def raise_if_failed(self) -> None:
        """ToldOfFailure where another rank has failed: in its words."""
        if self._cancelled is not None:
            raise CheckpointError(self._cancelled)
        key = self._key(_FAILED)
        if self._store.check([key]):
            rank, why = json.loads(self._store.get(key))
            raise ToldOfFailure(f"rank {rank}: {why}")

    def restart_clock(self) -> None:
        """What is waited for from now on has all the time."""
        self._deadline = time.monotonic() + self._seconds

    def hurry(self, seconds: float) -> None:
        """Have this rank wait no longer than so from now on, each time that it waits."""
        self._seconds = min(self._seconds, seconds)
        self._is_hurried = True

    def cancel(self, why: str) -> None:
        """Have this rank wait no longer."""
        self._cancelled = why

    def burn(self) -> None:
        """Take back what this rank has posted, when nobody reads it any more."""
        while self._posted:
            self._store.delete_key(self._posted.pop())

    def _key(self, what: str, rank: int | None = None) -> str:
        return f"save/{self._name}/{what}" + ("" if rank is None else f"/{rank}")
