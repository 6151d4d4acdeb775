"""Notices and letters by which ranks tell each other things through the process group's store, without collectives."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from elastic_ext.errors import CheckpointError
from elastic_ext.records.json import JsonRecord

__all__ = [
    "DecidingStore",
    "Letters",
    "NoticeBoard",
    "OwnStore",
    "PeerName",
    "Store",
    "ToldOfFailure",
    "Trouble",
    "ended_file",
]

_logger = logging.getLogger(__name__)


# --- what ranks tell each other through the store when their collectives cannot --------------------------------------
# Each rank writes only its own notice. Reading needs no other rank to be alive, only the store.

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 2.0  # for others to say that they failed as well
_MOST_TEXT = 4000


class Store(Protocol):
    """The few calls of a torch.distributed store that are needed here."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def delete_key(self, key: str, /) -> bool: ...


class DecidingStore(Store, Protocol):
    """A store in which the first rank to set a key decides its value for all."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerName:
    """A rank with the host and the process that it runs in, to be named in messages."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble(JsonRecord):
    """Why a rank stopped taking part: it failed itself, or it lost a peer; or an agent has found its process ended."""

    kind: Literal["failed", "lost", "ended"]
    progress: str
    """How far the rank had come, in words."""
    text: str = ""


def ended_file(folder: Path, rank: int) -> Path:
    """The file in which an agent says how a rank has ended."""
    return folder / f"ended-{rank}"


class NoticeBoard:
    """Notices by which ranks say in the store why they stop; written for one rank, and read for all."""

    def __init__(
        self, store: Store, *, rank: int, names: Sequence[PeerName], agents_folder: Path | None = None
    ) -> None:
        """An agent, where there is one, says in ``agents_folder`` which ranks have ended without a notice."""
        self._store = store
        self._agents_folder = agents_folder
        self._rank = rank
        self._names = tuple(names)
        self._posted = False

    def post(self, trouble: Trouble) -> None:
        """Say why this rank stops taking part; only the first trouble of a rank is kept. Never raises."""
        if self._posted:
            return
        self._posted = True
        notice = replace(trouble, text=trouble.text[-_MOST_TEXT:])
        try:
            self._store.set(f"trouble/{self._rank}", notice.to_json())
            self._store.set("trouble", "1")
        except RuntimeError as error:  # what torch's stores raise when the process that holds them is gone
            _logger.debug("peers could not be told of trouble: %s", error)

    def tell_of(self, error: BaseException, *, progress: str) -> None:
        """Post that ``error`` ends this rank, and log what is known of the others; ``progress`` is how far it came."""
        self.post(Trouble(kind="failed", progress=progress, text=f"{type(error).__name__}: {error}"))
        if isinstance(error, RuntimeError):  # a collective that lost its peer looks like this
            _logger.error(
                "of the other ranks: %s", self.account(self.gather(_GRACE_SECONDS), silent="has given no sign so far")
            )

    def troubles(self) -> dict[int, Trouble]:
        """The troubles of the other ranks, by rank."""
        others = [peer.rank for peer in self._names if peer.rank != self._rank]
        found = self._told_by_agent(others)
        if self._store.check(["trouble"]):
            present = [rank for rank in others if self._store.check([f"trouble/{rank}"])]
            found |= {rank: Trouble.from_json(self._store.get(f"trouble/{rank}").decode()) for rank in present}
        return found

    def _told_by_agent(self, ranks: Sequence[int]) -> dict[int, Trouble]:
        if self._agents_folder is None:
            return {}
        found = {}
        for rank in ranks:
            try:
                text = ended_file(self._agents_folder, rank).read_text(errors="replace")[:_MOST_TEXT]
            except OSError:
                continue
            found[rank] = Trouble(kind="ended", progress="", text=text)
        return found

    def gather(self, grace_seconds: float) -> dict[int, Trouble] | None:
        """The troubles of the others once all have some or the time is up; None when the store cannot be reached."""
        deadline = time.monotonic() + grace_seconds
        pause = threading.Event()
        try:
            while True:
                found = self.troubles()
                if len(found) == len(self._names) - 1 or time.monotonic() > deadline:
                    return found
                pause.wait(_POLL_SECONDS)
        except RuntimeError:
            return None

    def account(self, troubles: Mapping[int, Trouble] | None, *, silent: str) -> str:
        """What is known of the other ranks, in words; ``silent`` is what to say of those that left no notice."""
        if troubles is None:
            return "the store cannot be reached either: the process that holds it (rank 0, or the launcher) is gone"
        others = [peer for peer in self._names if peer.rank != self._rank]
        failed_first = sorted(others, key=lambda peer: _order(troubles.get(peer.rank)))
        return "; ".join(f"{peer} {_in_words(troubles.get(peer.rank), silent)}" for peer in failed_first)


def _order(trouble: Trouble | None) -> int:
    """A sort key that puts what explains most first: failures, then silence, then ranks that lost a peer."""
    return 1 if trouble is None else 2 if trouble.kind == "lost" else 0


def _in_words(trouble: Trouble | None, silent: str) -> str:
    if trouble is None:
        return silent
    if trouble.kind == "ended":
        return f"has ended: {trouble.text}"
    if trouble.kind == "failed":
        return f"failed after {trouble.progress}: {trouble.text}"
    return f"lost a peer too, after {trouble.progress}"


# --- what the threads of a save tell each other from rank to rank, where collectives are the training's alone --------
# They lie in the store of the process group, each under a name of its own. Reading them needs no other rank to be
# alive.

_LEAST_POLL_SECONDS = 0.002
_MOST_POLL_SECONDS = 0.1
_FAILED = "failed"
_WANTED = "wanted"


class ToldOfFailure(CheckpointError):
    """A save fails here because another rank has failed, which says why."""


class OwnStore:
    """A store in the memory of one process, for a training of one rank."""

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
    """Messages that the threads of one save exchange between ranks through the store; all give the same ``name``."""

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
        """Send ``value`` to the other ranks under the name ``what``; each name once."""
        key = self._key(what, self._rank)
        self._store.set(key, json.dumps(value))
        self._posted.append(key)

    def ask_for(self) -> None:
        """Ask all ranks to write the state that they have only staged so far."""
        key = self._key(_WANTED)
        self._store.set(key, "1")
        self._posted.append(key)

    def is_asked_for(self) -> bool:
        """Whether some rank has called ``ask_for``."""
        return self._store.check([self._key(_WANTED)])

    def fail(self, why: str) -> None:
        """Tell all ranks that this one has failed, so that whoever waits, or comes to wait, gives up."""
        key = self._key(_FAILED)
        self._store.set(key, json.dumps([self._rank, why]))
        self._posted.append(key)

    def wait(self, what: str, ranks: Iterable[int]) -> list[Any]:
        """Wait for the values that ``ranks`` post under ``what``; CheckpointError if one fails or is late."""
        waiting = list(ranks)
        keys = {rank: self._key(what, rank) for rank in waiting}
        pause, seconds = threading.Event(), _LEAST_POLL_SECONDS
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
        """ToldOfFailure, in that rank's words, where another rank has failed; CheckpointError after ``cancel``."""
        if self._cancelled is not None:
            raise CheckpointError(self._cancelled)
        key = self._key(_FAILED)
        if self._store.check([key]):
            rank, why = json.loads(self._store.get(key))
            raise ToldOfFailure(f"rank {rank}: {why}")

    def restart_clock(self) -> None:
        """Give waiting from now on all of its time again."""
        self._deadline = time.monotonic() + self._seconds

    def hurry(self, seconds: float) -> None:
        """Have this rank wait for at most ``seconds`` from now on, each time that it waits."""
        self._seconds = min(self._seconds, seconds)
        self._is_hurried = True

    def cancel(self, why: str) -> None:
        """Have each wait of this rank fail from now on, for the reason ``why``."""
        self._cancelled = why

    def burn(self) -> None:
        """Delete this rank's messages from the store, when nobody reads them any more."""
        while self._posted:
            self._store.delete_key(self._posted.pop())

    def _key(self, what: str, rank: int | None = None) -> str:
        return f"save/{self._name}/{what}" + ("" if rank is None else f"/{rank}")
