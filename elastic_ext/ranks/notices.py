"""Notices: why ranks stop, which they tell each other on the board of their process group when collectives cannot."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from elastic_ext.records.json import record_of

from .board import Board, BoardGone
from .world import PeerName

__all__ = ["Notices", "Trouble", "ended_file", "is_of_lost_peer"]

_logger = logging.getLogger(__name__)

_GRACE_SECONDS = 2.0  # for others to say that they failed as well
_MOST_TEXT = 4000
_HAVE = ("has", "have")
_TROUBLE = "trouble"
_OF_OTHERS = re.compile(  # what torch, gloo and NCCL say where the process at the other end is gone
    r"Connection (closed|reset)|connection was (closed|reset)|Broken pipe|Connection refused|PeerLostError"
    r"|remote process (has )?(exited|terminated)|socket (closed|error)|Socket Timeout|NCCL.*(remote|system) error"
    r"|DistNetworkError|RanksFailedError|recvBytes|sendBytes|Timed out waiting .*(recv|send|operation)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """Why a rank stopped taking part: it failed itself, or it lost a peer; or an agent has found its process ended."""

    kind: Literal["failed", "lost", "ended"]
    progress: str
    """How far the rank had come, in words."""
    text: str = ""


def is_of_lost_peer(message: str) -> bool:
    """Whether the message of an error says that the process at the other end of a connection was gone."""
    return _OF_OTHERS.search(message) is not None


def ended_file(folder: Path, seat: int) -> Path:
    """The file in which an agent says how a worker has ended."""
    return folder / f"ended-{seat}"


class Notices:
    """Notices by which ranks say on a board why they stop; written for one rank, and read for all."""

    def __init__(self, board: Board, names: Sequence[PeerName], *, agents_folder: Path | None = None) -> None:
        """An agent, where there is one, says in ``agents_folder`` which ranks have ended without a notice."""
        self._board = board
        self._agents_folder = agents_folder
        self._others = [peer for peer in names if peer.rank != board.place]
        self._has_posted = False

    def post(self, trouble: Trouble) -> None:
        """Say why this rank stops taking part; only the first trouble of a rank is kept. Never raises."""
        if self._has_posted:
            return
        self._has_posted = True
        try:
            self._board.tell(_TROUBLE, {**asdict(trouble), "text": trouble.text[-_MOST_TEXT:]})
            self._board.post(_TROUBLE, 1)  # of many ranks all look at this one key
        except BoardGone as error:
            _logger.debug("the other ranks could not be told why this rank stops: %s", error)

    def tell_of(self, error: BaseException, *, progress: str) -> None:
        """Post that ``error`` ends this rank, and log what is known of the others; ``progress`` is how far it came."""
        self.post(Trouble(kind="failed", progress=progress, text=f"{type(error).__name__}: {error}"))
        if isinstance(error, RuntimeError):  # a collective that lost its peer looks like this
            troubles = self.gather(_GRACE_SECONDS)
            account = self.account(troubles, silent="has reported no error so far")
            _logger.error("the state of the other ranks: %s", account)
            self.explain(error, troubles)

    def explain(self, error: Exception, troubles: Mapping[int, Trouble] | None) -> None:
        """Set ``error.follows_from`` to a sentence that names the peers whose end has caused ``error``.

        That is where the error tells of a lost connection, and an agent has found processes of peers ended. A worker
        that ends by the error then prints that sentence in place of a traceback (``at_start/sitecustomize.py``).
        """
        ended = [peer for peer in self._others if (found := (troubles or {}).get(peer.rank)) and found.kind == "ended"]
        if ended and is_of_lost_peer(f"{type(error).__name__}: {error}"):
            error.follows_from = f"{', '.join(map(str, ended))} {_HAVE[len(ended) > 1]} ended"  # type: ignore[attr-defined]

    def troubles(self) -> dict[int, Trouble]:
        """The troubles of the other ranks, by rank."""
        found = self._told_by_agent()
        if self._board.has(_TROUBLE):
            told = self._board.values_of(_TROUBLE)
            found |= {peer.rank: record_of(Trouble, told[peer.rank]) for peer in self._others if peer.rank in told}
        return found

    def _told_by_agent(self) -> dict[int, Trouble]:
        if self._agents_folder is None:
            return {}
        found = {}
        for peer in self._others:
            try:
                text = ended_file(self._agents_folder, peer.seat).read_text(errors="replace")[:_MOST_TEXT]
            except OSError:
                continue
            found[peer.rank] = Trouble(kind="ended", progress="", text=text)
        return found

    def gather(self, grace_seconds: float) -> dict[int, Trouble] | None:
        """The troubles of the others once all have some or the time is up; None when the store cannot be reached."""
        names = self._board.of_peers(_TROUBLE, [peer.rank for peer in self._others])
        try:
            self._board.wait(names, seconds=grace_seconds, stop=lambda: len(self.troubles()) == len(self._others))
            return self.troubles()
        except BoardGone:
            return None

    def account(self, troubles: Mapping[int, Trouble] | None, *, silent: str) -> str:
        """What is known of the other ranks, in words; ``silent`` is what to say of those that left no notice."""
        if troubles is None:
            return "the store cannot be reached either: the process that holds it (rank 0, or the launcher) is gone"
        failed_first = sorted(self._others, key=lambda peer: _order(troubles.get(peer.rank)))
        return "; ".join(f"{peer} {_in_words(troubles.get(peer.rank), silent)}" for peer in failed_first)


def _order(trouble: Trouble | None) -> int:
    """A sort key that puts what explains most first: failures, then silence, then ranks that lost a peer."""
    return 1 if trouble is None else 2 if trouble.kind == "lost" else 0


def _in_words(trouble: Trouble | None, silent: str) -> str:
    if trouble is None:
        return silent
    if trouble.kind == "ended":
        return trouble.text  # such as "ended by SIGKILL"
    if trouble.kind == "failed":
        return f"failed after {trouble.progress}: {trouble.text}"
    return f"lost a peer too, after {trouble.progress}"
