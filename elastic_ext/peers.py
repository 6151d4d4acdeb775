"""NoticeBoard: what ranks tell each other through the store when their collectives cannot.

Each rank writes only its own notices. Reading needs no other rank to be alive, only the store.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, Protocol

__all__ = ["Counts", "NoticeBoard", "PeerName", "Store", "Trouble"]

_logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_MOST_TEXT = 4000


class Store(Protocol):
    """The few calls of a torch.distributed store that are needed here."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerName:
    """Where a rank runs."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """How far a rank has come."""

    boundary: int
    step: int
    backwards: int

    def __str__(self) -> str:
        passes = f", {self.backwards} backward passes" if self.backwards else ""
        return f"{self.step} steps, {self.boundary} boundaries{passes}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """Why a rank stopped taking part: it failed itself, it lost a peer, or it saw that ranks had come apart."""

    kind: Literal["failed", "lost", "apart"]
    counts: Counts
    text: str = ""


class NoticeBoard:
    """One rank's view of the notices of all."""

    def __init__(self, store: Store, *, rank: int, names: Sequence[PeerName]) -> None:
        self._store = store
        self._rank = rank
        self.names = tuple(names)
        self._posted = False

    def post_end(self, index: int, counts: Counts) -> None:
        """Say that this rank has come to the ``index``-th end (of an epoch, or of training) with these counts."""
        self._store.set(f"end/{index}/{self._rank}", json.dumps(asdict(counts)))

    def ends(self, index: int) -> dict[int, Counts]:
        """The counts of the ranks that have come to the ``index``-th end."""
        return {rank: Counts(**json.loads(text)) for rank, text in self._read(f"end/{index}").items()}

    def post_trouble(self, trouble: Trouble) -> None:
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

    def troubles(self) -> dict[int, Trouble]:
        """The troubles of the other ranks, by rank."""
        if not self._store.check(["trouble"]):
            return {}
        found: dict[int, Trouble] = {}
        for rank, text in self._read("trouble").items():
            record = json.loads(text)
            if rank != self._rank:
                found[rank] = Trouble(kind=record["kind"], counts=Counts(**record["counts"]), text=record["text"])
        return found

    def gather_troubles(self, grace_seconds: float) -> dict[int, Trouble] | None:
        """The troubles of the others once all have some or the time is up; None when the store cannot be reached."""
        deadline = time.monotonic() + grace_seconds
        pause = threading.Event()
        try:
            while True:
                found = self.troubles()
                if len(found) == len(self.names) - 1 or time.monotonic() > deadline:
                    return found
                pause.wait(_POLL_SECONDS)
        except RuntimeError:
            return None

    def _read(self, kind: str) -> dict[int, str]:
        ranks = [peer.rank for peer in self.names]
        present = [rank for rank in ranks if self._store.check([f"{kind}/{rank}"])]
        return {rank: self._store.get(f"{kind}/{rank}").decode() for rank in present}

    def account(self, troubles: Mapping[int, Trouble] | None, *, silent: str) -> str:
        """What is known of the other ranks, in words; ``silent`` is what to say of those that left no notice."""
        if troubles is None:
            return "the store cannot be reached either: the process that holds it (rank 0, or the launcher) is gone"
        parts = []
        for peer in self.names:
            trouble = troubles.get(peer.rank)
            if peer.rank == self._rank:
                continue
            if trouble is None:
                parts.append(f"{peer} {silent}")
            elif trouble.kind == "failed":
                parts.append(f"{peer} failed after {trouble.counts}: {trouble.text}")
        return "; ".join(parts) or "every other rank is alive and saw the same"
