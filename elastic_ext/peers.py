"""NoticeBoard: what ranks tell each other through the store when their collectives cannot.

Each rank writes only its own notice. Reading needs no other rank to be alive, only the store.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol

__all__ = ["DecidingStore", "NoticeBoard", "PeerName", "Store", "Trouble", "ended_file"]

_logger = logging.getLogger(__name__)

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
    """One in which the first to say something decides it."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerName:
    """Where a rank runs."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """Why a rank stopped taking part: it failed itself, or it lost a peer; or an agent has found its process ended."""

    kind: Literal["failed", "lost", "ended"]
    progress: str
    """How far it had come, in words."""
    text: str = ""


def ended_file(folder: Path, rank: int) -> Path:
    """Where an agent says how a rank has ended."""
    return folder / f"ended-{rank}"


class NoticeBoard:
    """One rank's view of the notices of all."""

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
        record = asdict(trouble)
        record["text"] = trouble.text[-_MOST_TEXT:]
        try:
            self._store.set(f"trouble/{self._rank}", json.dumps(record))
            self._store.set("trouble", "1")
        except RuntimeError as error:  # what torch's stores raise when the process that holds them is gone
            _logger.debug("peers could not be told of trouble: %s", error)

    def tell_of(self, error: BaseException, *, progress: str) -> None:
        """Say what ends this rank, which had come so far, and log what is known of the others."""
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
            found |= {rank: Trouble(**json.loads(self._store.get(f"trouble/{rank}"))) for rank in present}
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
    """What explains most comes first: a failure, then silence, then ranks that only saw something go wrong."""
    return 1 if trouble is None else 2 if trouble.kind == "lost" else 0


def _in_words(trouble: Trouble | None, silent: str) -> str:
    if trouble is None:
        return silent
    if trouble.kind == "ended":
        return f"has ended: {trouble.text}"
    if trouble.kind == "failed":
        return f"failed after {trouble.progress}: {trouble.text}"
    return f"lost a peer too, after {trouble.progress}"
