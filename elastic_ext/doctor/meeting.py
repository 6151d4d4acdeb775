"""Meeting: nodes that check each other, the messages that they exchange through a store, and which fall silent.

Every node writes heartbeats to the store, on a thread. Who waits for a message of another node watches its heartbeats
too: a node whose heartbeats have stopped is silent, for all nodes and for good, and nobody waits for it any more. A
node that is merely late keeps writing them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from elastic_ext.ranks.board import Board, BoardGone, Store
from elastic_ext.ranks.deadlines import NoAnswer, OwnedThread, within

__all__ = ["Meeting", "MeetingFailed", "Rendezvous", "holds_store", "is_at", "meet"]

_logger = logging.getLogger(__name__)

_BEAT_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 0.25
_DEFAULT_JOIN_SECONDS = 600
_LONGEST_CONNECT_SECONDS = 60
_DEFAULT_PORT = 29400
_LISTENS = "0A"  # in /proc/net/tcp


class MeetingFailed(Exception):
    """The nodes did not meet, or have gone on without this one; the text is for people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """The place where nodes meet, as the arguments that torchrun has for its rendezvous."""

    endpoint: str
    run_id: str
    min_nodes: int
    max_nodes: int
    backend: str = "c10d"
    config: Mapping[str, str | int] = field(default_factory=dict)
    local_addr: str | None = None

    def parameters(self) -> RendezvousParameters:
        """The parameters that torch makes a rendezvous of.

        Where a fixed number of nodes is to come, those that came go on without the others when the time is up, so that
        the missing ones can be told: torch would say no more than that time is up.
        """
        config = dict(self.config)
        min_nodes = self.min_nodes
        if "join_timeout" in config:  # nobody who wants to wait for a short while wants to connect for a long one
            config.setdefault("read_timeout", min(int(config["join_timeout"]), _LONGEST_CONNECT_SECONDS))
        if self.backend != "static" and self.min_nodes == self.max_nodes:
            join = int(config.get("join_timeout", _DEFAULT_JOIN_SECONDS))
            min_nodes, config["last_call_timeout"], config["join_timeout"] = 1, join, join + 30
        return RendezvousParameters(
            self.backend,
            self.endpoint,
            f"{self.run_id}-doctor",  # a job that meets at the same place is not met
            min_nodes,
            self.max_nodes,
            self.local_addr,
            **config,
        )


def is_at(endpoint: str, address: str | None) -> bool:
    """Whether an endpoint's host and ``address`` are the same machine, by name or by IP address."""
    try:
        host, _ = parse_rendezvous_endpoint(endpoint, _DEFAULT_PORT)
    except ValueError:  # a file, for one
        return False
    return address is not None and (host == address or not _numbers_of(host).isdisjoint(_numbers_of(address)))


def _numbers_of(host: str) -> frozenset[str]:
    """The IP addresses that a host name stands for; none where it cannot be looked up."""
    try:
        return frozenset(str(each[4][0]) for each in socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP))
    except (OSError, ValueError):
        return frozenset()


def holds_store(endpoint: str) -> bool:
    """Whether this process hosts the store of a rendezvous, which is then gone when the process ends."""
    try:
        _, port = parse_rendezvous_endpoint(endpoint, _DEFAULT_PORT)
    except ValueError:  # a file, for one
        return False
    listening = {
        fields[9]
        for name in ("tcp", "tcp6")
        for fields in (line.split() for line in _lines(Path("/proc/self/net") / name))
        if len(fields) > 9 and fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port
    }
    return any(_target(link) == f"socket:[{inode}]" for link in Path("/proc/self/fd").iterdir() for inode in listening)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()[1:]
    except OSError:
        return []


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # it has been closed
        return ""


class Meeting:
    """One node's place among nodes that have met: its number, the messages it sends and reads, and who is silent.

    A message lies under a key of the node that sends it. Heartbeats are written while it is used as a context.
    """

    def __init__(
        self,
        store: Store,
        index: int,
        num_nodes: int,
        *,
        where: str,
        silence_seconds: float,
        handler: RendezvousHandler | None = None,
    ) -> None:
        self.index = index
        self.num_nodes = num_nodes
        self.silent: set[int] = set()
        """Numbers of the nodes that have fallen silent."""
        self._board = Board(
            store,
            "doctor",
            what=f"{where}, where the nodes met,",
            pause_seconds=_LONGEST_PAUSE_SECONDS,
            answer_seconds=2 * silence_seconds,
        )
        self._where = where
        self._silence_seconds = silence_seconds
        self._handler = handler
        self._seen: dict[int, tuple[int | None, float]] = {}
        own = self._board.below(str(index), connects=True)
        self._beats = OwnedThread(partial(self._beat, own), name="elastic_ext-beats")

    def __enter__(self) -> Meeting:
        self._beats.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._beats.close(self._silence_seconds)

    def leave(self, holders: Collection[int]) -> None:
        """Close the rendezvous once all nodes have called this; ``holders``, which host the store, leave last."""
        try:
            self.tell("leaves", 1)
            self.hear_from_all("leaves")
            self._close()
            self.tell("left", 1)
            if self.index in holders:
                self.hear_from_all("left")
        except (BoardGone, MeetingFailed) as error:  # it has gone first, and nothing is needed of it any more
            _logger.info("%s", error)

    def _close(self) -> None:
        if self._handler is not None:
            try:
                within(self._silence_seconds, self._handler.shutdown)
            except (NoAnswer, RendezvousError, RuntimeError) as error:
                _logger.info("the rendezvous at %s could not be closed: %s", self._where, error)

    def store_of_pair(self, name: str) -> Any:
        """A store for two nodes alone, with keys and a connection of its own."""
        pair = self._board.below(name, connects=True)
        store: Any = pair.store  # which torch's types want to be one of torch's
        return dist.PrefixStore(pair.prefix, store)  # type: ignore[attr-defined]

    def tell(self, key: str, message: object) -> None:
        """Send a message that all nodes can read; BoardGone where the store is gone."""
        self._board.post(f"{self.index}/{key}", message)

    def hear(self, index: int, key: str) -> Any:
        """The message of a node under ``key``; None if it has sent none yet."""
        return self._board.read(f"{index}/{key}")

    def wait_for(self, index: int, key: str) -> Any:
        """Wait for the message of a node under ``key``; None if the node falls silent before."""
        self._board.wait([f"{index}/{key}"], seconds=math.inf, stop=lambda: self._goes_on_without(index))
        return self.hear(index, key)

    def hear_from_all(self, key: str) -> dict[int, Any]:
        """Wait for the messages of all nodes under ``key``, by node, without those that fall silent before."""
        heard = {index: self.wait_for(index, key) for index in range(self.num_nodes)}
        return {index: message for index, message in heard.items() if message is not None}

    def _goes_on_without(self, index: int) -> bool:
        """Whether a node is silent, and not waited for; MeetingFailed where this one is, for the others."""
        if index in self.silent or self._falls_silent(index):
            return True
        if self.hear(self.index, "silent") is not None:
            silence = f"no heartbeat for {self._silence_seconds:g} s"
            raise MeetingFailed(f"the other nodes have gone on without this node, of which they had seen {silence}")
        return False

    def _falls_silent(self, index: int) -> bool:
        """Whether a node's heartbeats have stopped, to this node or to another; the node is then silent."""
        if self.hear(index, "silent") is None:
            beat: int | None = self.hear(index, "beat")
            if index not in self._seen or self._seen[index][0] != beat:
                self._seen[index] = beat, time.monotonic()
                return False
            if time.monotonic() - self._seen[index][1] < self._silence_seconds:
                return False
            self._board.post(f"{index}/silent", 1)
        self.silent.add(index)
        return True

    def _beat(self, own: Board) -> None:
        number = 0
        while not self._beats.stopping.is_set():
            try:
                own.post("beat", number)
            except BoardGone as error:  # which whoever asks the store hears too
                _logger.info("this node writes no more heartbeats to the store at %s: %s", self._where, error)
                return
            number += 1
            self._beats.stopping.wait(min(_BEAT_SECONDS, self._silence_seconds / 8))


def meet(rendezvous: Rendezvous, *, silence_seconds: float) -> Meeting:
    """Meet the other nodes through torch's rendezvous, and give the meeting of those that came in time.

    MeetingFailed says why there is none, and ValueError which argument was wrong.
    """
    where = rendezvous.endpoint
    try:
        handler = _handler(rendezvous)
        info = handler.next_rendezvous()
    except RendezvousClosedError:
        raise MeetingFailed(
            f"the nodes of --rdzv-id {rendezvous.run_id} have met at {where} already; choose another --rdzv-id"
        ) from None
    except RendezvousTimeoutError:
        raise MeetingFailed(
            f"fewer than {rendezvous.min_nodes} nodes came to {where} in time, or they went on without this one; start "
            "them at the same time, or wait longer: --rdzv-conf join_timeout=SECONDS"
        ) from None
    except RendezvousConnectionError as error:
        raise MeetingFailed(f"{where}, where the nodes are to meet, cannot be reached: {_cause(error)}") from None
    except (RendezvousError, RuntimeError) as error:
        raise MeetingFailed(f"the nodes did not meet at {where}: {_cause(error)}") from None
    return Meeting(
        info.store, info.rank, info.world_size, where=where, silence_seconds=silence_seconds, handler=handler
    )


def _handler(rendezvous: Rendezvous) -> RendezvousHandler:
    """Torch's handler; a node whose ``local_addr`` is the endpoint hosts the rendezvous, unless another one there does.

    Torch looks at the names and addresses of the machine's hostname alone.
    """
    config = rendezvous.config
    if rendezvous.backend == "c10d" and "is_host" not in config and is_at(rendezvous.endpoint, rendezvous.local_addr):
        with contextlib.suppress(RendezvousConnectionError):
            return get_rendezvous_handler(replace(rendezvous, config={**config, "is_host": True}).parameters())
    return get_rendezvous_handler(rendezvous.parameters())


def _cause(error: BaseException) -> str:
    """The first line of the error that caused another one."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [type(error).__name__])[0]
