"""The rendezvous before each round of workers: torch's handler and what is added to it, whether a round ended with a
failure or a change of membership, and how staged checkpoints are completed between two rounds.

What nodes that have met decide of their members is in members/decision.py.
"""

from __future__ import annotations

import copy
import ipaddress
import logging
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from elastic_ext.doctor.meeting import is_at
from elastic_ext.errors import ElasticError, in_words
from elastic_ext.fsdp.checkpoint.saving.rescue import (
    Completion,
    Outcome,
    RescuePlan,
    choose,
    clear,
    complete,
    rows_in,
    saved_in_words,
)
from elastic_ext.fsdp.checkpoint.saving.shared_memory import StagedCopy
from elastic_ext.ranks.board import BoardGone
from elastic_ext.ranks.deadlines import NoAnswer, within
from elastic_ext.ranks.node_board import RoundBoard
from elastic_ext.records.text import counted
from elastic_ext.torch_private.agent import (
    complete_once,
    judge_silence_here,
    leave,
    participants,
    serve_workers_by,
    stop_heartbeats,
    waiting,
)

from .arguments import LaunchRefused, seconds_in
from .journal import Failure, first_of, is_consequence

__all__ = [
    "FailureVerdict",
    "Loopback",
    "NodeRendezvous",
    "handler_for",
    "judge",
    "loopback_store",
    "on_loopback",
    "persist",
]

_logger = logging.getLogger(__name__)


# --- how nodes meet, through a rendezvous of torch's: what is different here -----------------------------------------
# The workers of every round have a store of their own, on the first node of that round, so that nodes which join find
# it and nothing of an earlier round is in it. A node that leaves or falls silent is noticed as one that joins is.
#
# torch's stores listen on all of a machine's addresses, and the rendezvous unpickles what lies in its store. Where all
# nodes are on one machine, because they meet at its loopback address, all stores listen there alone.

_STORE = "workers-store"
_AGAIN = "meet-again"
_LOOK_SECONDS = 1.0
_STORE_SECONDS = 60.0
_MORE_SECONDS = 5.0
_LISTENS_SECONDS = 3.0
_DEFAULT_PORT = 29400  # torch's, for an endpoint without one


def loopback_store(address: str, port: int = 0) -> TCPStore:
    """A TCPStore that listens at a loopback address alone; OSError where something else listens at the port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((address, port))
        port = int(listener.getsockname()[1])
        # Shared: whatever else in this process would serve that port is served by this one.
        store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.fileno(),
        )
        listener.detach()  # the store closes it
    return store


@dataclass(frozen=True, kw_only=True, slots=True)
class Loopback:
    """The loopback address at which all nodes of a job meet, because all run on this machine."""

    address: str
    store: TCPStore | None
    """The store of the rendezvous, in the process that hosts it; None in the others."""


def on_loopback(launch: LaunchConfig) -> tuple[LaunchConfig, Loopback | None]:
    """``launch`` with a rendezvous that listens on loopback alone; ``launch`` unchanged where nodes meet elsewhere.

    The agent that can host the rendezvous starts its store here.
    """
    if launch.rdzv_backend not in ("c10d", "static") or launch.rdzv_configs.get("store_type", "tcp") != "tcp":
        return launch, None
    try:
        host, port = parse_rendezvous_endpoint(launch.rdzv_endpoint, default_port=_DEFAULT_PORT)
    except ValueError:  # which the handler refuses in its own words
        return launch, None
    address = _loopback_address(host)
    if address is None:
        return launch, None
    is_static = launch.rdzv_backend == "static"
    is_host = launch.rdzv_configs.get("rank", 0) == 0 if is_static else _flag(launch.rdzv_configs.get("is_host", True))
    if not is_host:
        return launch, Loopback(address=address, store=None)
    try:
        store = loopback_store(address, port)
    except OSError:  # most often another agent of this machine has the rendezvous
        return launch, Loopback(address=address, store=None)
    found = copy.copy(launch)
    found.rdzv_endpoint = f"[{address}]:{store.port}" if ":" in address else f"{address}:{store.port}"
    return found, Loopback(address=address, store=store)


def handler_for(launch: LaunchConfig) -> RendezvousHandler:
    """Torch's rendezvous handler for a launch; LaunchRefused for bad settings, RendezvousError where nobody answers.

    A node whose ``--local-addr`` is the endpoint hosts the rendezvous, unless another agent of its machine does: torch
    looks at the names and addresses of the machine's hostname alone.
    """
    tries = [dict(launch.rdzv_configs)]
    if launch.rdzv_backend == "c10d" and "is_host" not in tries[0] and is_at(launch.rdzv_endpoint, launch.local_addr):
        tries.insert(0, {**tries[0], "is_host": True})
    for configs in tries:
        try:
            return _handler(launch, configs)
        except RendezvousConnectionError as error:
            failed = error
    raise RendezvousConnectionError(f"{failed}. {_why_no_answer(launch)}") from failed


def _handler(launch: LaunchConfig, configs: Mapping[str, Any]) -> RendezvousHandler:
    try:
        parameters = RendezvousParameters(
            backend=launch.rdzv_backend,
            endpoint=launch.rdzv_endpoint,
            run_id=launch.run_id,
            min_nodes=launch.min_nodes,
            max_nodes=launch.max_nodes,
            local_addr=launch.local_addr,
            **configs,
        )
    except (TypeError, ValueError) as error:  # a name that is its own, or no name of a backend
        raise LaunchRefused(f"torch refuses these rendezvous settings: {error}") from error
    limit = _seconds_to_answer(launch)
    try:  # torch waits for ever where something else listens at the endpoint
        return within(limit, partial(registry.get_rendezvous_handler, parameters), name="elastic_ext rendezvous")
    except NoAnswer:
        why = f"{launch.rdzv_endpoint} has not answered within {limit:.0f} seconds"
        raise RendezvousConnectionError(why) from None
    except ValueError as error:
        raise LaunchRefused(f"torch refuses these rendezvous settings: {error}") from error
    except RendezvousConnectionError as error:  # of which torch says that it has failed, and no more
        raise RendezvousConnectionError(f"{launch.rdzv_endpoint} does not answer") from error


class NodeRendezvous(RendezvousHandler):
    """A rendezvous handler around torch's that gives the workers of each round a store of their own.

    It also notices nodes that left or fell silent, and has the board on which the nodes of a round exchange messages.
    """

    def __init__(
        self,
        inner: RendezvousHandler,
        *,
        is_pending: Callable[[], bool],
        loopback: Loopback | None = None,
        local_addr: str | None = None,
    ) -> None:
        """``is_pending`` says whether this node wants all to meet again; ``loopback`` is for nodes of one machine.

        ``local_addr`` is the address at which other nodes reach this one, by default its name.
        """
        self.holds_back_joins = False
        """Whether nodes that want to join wait: no round ends because of them."""
        self.passed_over: frozenset[int] = frozenset()
        """The places of nodes whose departure ends no round by itself."""
        self._inner = inner
        self._loopback = loopback
        self._local_addr = local_addr
        serve_workers_by(inner, lambda: loopback_store("127.0.0.1"))  # in whose place comes one for each round
        judge_silence_here(inner)
        self._expected: frozenset[str] = frozenset()
        complete_once(inner, lambda: self._expected)
        self._is_pending = is_pending
        self._is_dynamic = participants(inner) is not None and not inner.use_agent_store
        self._members: dict[str, int] = {}
        self._server: TCPStore | None = None
        self._earlier: list[TCPStore] = []
        self._opened: dict[str, TCPStore] = {}  # of plans that are come to live, by their addresses
        self.is_lost = False
        """Whether the node that has the rendezvous is gone."""
        self._num_rounds = 0
        self._look_at = 0.0
        self.board: RoundBoard | None = None
        """The board on which the nodes of the present round exchange messages; None before the first round."""

    # ---- what torch's agent calls ----

    def get_backend(self) -> str:
        return self._inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        return self._is_dynamic or self._inner.use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        if self.board is not None and not self._is_dynamic:
            self.board.post(_AGAIN, True)  # a static rendezvous tells nobody
        info = self._inner.next_rendezvous()
        self._num_rounds += 1
        number = 0 if self._is_dynamic else self._num_rounds  # torch gives a dynamic one's rounds names of their own
        self.board = RoundBoard(
            info.store, place=info.rank, num_nodes=info.world_size, number=number, is_lost=self._has_lost
        )
        self._members = participants(self._inner) or {}
        self._expected, self.passed_over = frozenset(), frozenset()
        if not self._is_dynamic and self._num_rounds == 1:
            return info  # a static one has a store for workers, and the same again in later rounds, with what is in it
        self._earlier += [] if self._server is None else [self._server]
        self._server = None
        return RendezvousInfo(info.store, info.rank, info.world_size, self._store_of(info))

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        """How many nodes came, left or fell silent since the round began, or 1 where all have to meet again."""
        if self.is_lost:  # it does not come back, and torch prints stacks of its own each time that it is asked
            return int(self._is_pending())
        try:
            num_waiting = self._inner.num_nodes_waiting()
        except RendezvousConnectionError as error:
            self._tell_lost(error)
            return int(self._is_pending())
        if self.holds_back_joins:
            num_waiting -= len(self.held_back())
        return num_waiting + len(self.departed() - self.passed_over) + self._is_pending() + self._is_called_again()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return self._inner.shutdown()

    # ---- and what this agent does besides ----

    def departed(self) -> frozenset[int]:
        """The places of nodes that have left this round or fell silent, as of the last ``num_nodes_waiting``.

        Nodes whose workers had all ended well before are not among them.
        """
        now = participants(self._inner)
        gone = frozenset() if now is None else frozenset(self._members[node] for node in self._members.keys() - now)
        return gone - self.board.who_told("finished") if gone and self.board is not None else gone

    @property
    def is_dynamic(self) -> bool:
        """Whether nodes can come and go."""
        return self._is_dynamic

    def held_back(self) -> frozenset[str]:
        """The nodes that wait to join, as of the last ``num_nodes_waiting``."""
        return waiting(self._inner) - self._members.keys()

    def expect(self, *, gone: Collection[int]) -> None:
        """Have the next meeting begin its round once all nodes are there that are known to come: it waits for no more.

        These are those of the present round, but for those at the places ``gone``, and those that wait.
        """
        stay = {node for node, place in self._members.items() if place not in gone}
        self._expected = waiting(self._inner).union(stay)

    def _has_lost(self) -> bool:
        """Whether a node has left this round or fell silent, by a new look."""
        self.num_nodes_waiting()
        return bool(self.departed())

    def leave(self) -> bool:
        """Leave the round; whether the other nodes learn of it at once, and can meet without this node."""
        try:
            return leave(self._inner)
        except RendezvousError:  # whoever has the rendezvous is gone
            return False

    def forget_earlier(self, *, but: str = "") -> None:
        """Release the stores of workers of earlier rounds and plans, which have ended, or need them no more.

        That with the address ``but`` stays.
        """
        self._earlier.clear()
        self._opened = {address: store for address, store in self._opened.items() if address == but}

    def open_store(self, *, is_here: bool = False) -> str:
        """Start a store for the workers of a plan that is come to live, and give its address, HOST:PORT.

        It is kept until ``forget_earlier``. With ``is_here`` workers of this node alone use it.
        """
        if is_here or self._loopback is not None:
            host = self._loopback.address if self._loopback is not None else "127.0.0.1"
            store = loopback_store(host)
        else:
            host = self._local_addr or socket.getfqdn()
            store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        address = f"[{host}]:{store.port}" if ":" in host else f"{host}:{store.port}"
        self._opened[address] = store
        return address

    def _is_called_again(self) -> bool:
        """Whether another node of a static rendezvous has called all nodes to meet again; looked up once a second."""
        if self._is_dynamic or self.board is None or time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + _LOOK_SECONDS
        try:
            return self.board.read(_AGAIN) is not None
        except BoardGone:
            return False

    def _tell_lost(self, error: RendezvousConnectionError) -> None:
        if not self.is_lost:
            self.is_lost = True
            stop_heartbeats(self._inner)
            _logger.error(
                "the rendezvous does not answer any more: the node that has it is gone. The workers of this node go on "
                "as long as they can; nodes can neither join nor be replaced: %s",
                error,
            )

    def _store_of(self, info: RendezvousInfo) -> RendezvousStoreInfo:
        """The address of a new store for the round's workers, which the first node starts and announces."""
        found = info.bootstrap_store_info
        assert found is not None and self.board is not None, "torch's dynamic handlers give one"
        if info.rank == 0:
            if self._loopback is None:
                address = found.master_addr
                self._server = TCPStore(address, 0, is_master=True, wait_for_workers=False)
            else:
                address = self._loopback.address
                self._server = loopback_store(address)
            self.board.post(_STORE, [address, self._server.port])
        address, port = self.board.take(_STORE, seconds=_STORE_SECONDS)
        return RendezvousStoreInfo(master_addr=address, master_port=port)


def _loopback_address(host: str) -> str | None:
    """The address of a host that is this machine's loopback, else None."""
    if host == "localhost":
        return "127.0.0.1"
    try:
        return host if ipaddress.ip_address(host).is_loopback else None
    except ValueError:
        return None


def _flag(value: object) -> bool:
    """Whether a rendezvous setting means true, as torch reads it."""
    return str(value).lower() in ("1", "true", "t", "yes", "y")


def _seconds_to_answer(launch: LaunchConfig) -> float:
    """How long a rendezvous may take to answer: its own read timeout, and a few seconds more."""
    return seconds_in(launch, "read_timeout", 60) + _MORE_SECONDS


def _parted(endpoint: str) -> tuple[str, int | None]:
    """Host and port of an endpoint; None as the port where the endpoint names none."""
    host, colon, port = endpoint.strip().rpartition(":")
    if not colon or endpoint.strip().endswith("]"):
        host, port = endpoint.strip(), ""
    return host.removeprefix("[").removesuffix("]"), int(port) if port.isascii() and port.isdecimal() else None


def _why_no_answer(launch: LaunchConfig) -> str:
    """Why no rendezvous answers, in words: whether anything listens at the endpoint, and what to do."""
    host, port = _parted(launch.rdzv_endpoint)
    try:
        socket.create_connection((host, port or _DEFAULT_PORT), timeout=_LISTENS_SECONDS).close()
    except (OSError, OverflowError, ValueError) as error:
        why = in_words(error) if isinstance(error, OSError) else str(error)
        return (
            f"Nothing listens there, as far as this node sees ({why}): start the node that is {host}, and give "
            f"--local-addr={host} there, or look at --rdzv-endpoint"
        )
    return "Something listens there that is no rendezvous: choose another port, or look at --rdzv-endpoint"


# --- what the end of a round means: a failure, which the budget of restarts counts, or a change of membership --------


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureVerdict:
    """What failed workers mean: a failure, a change of membership, or that the agent has to wait to know; and why."""

    kind: Literal["failure", "membership", "wait"]
    reason: str


def judge(
    failures: Sequence[Failure],
    *,
    departed: Collection[str],
    num_nodes: int,
    num_left: int,
    waited_seconds: float,
    silence_seconds: float,
) -> FailureVerdict:
    """Whether the failures that nodes have reported in this round count as one, or follow from a change of membership.

    ``departed`` are nodes that left or fell silent, ``num_left`` is how many restarts are left, and ``silence_seconds``
    how long it takes until the others know that a node is gone. Pure.
    """
    cause = first_of(failures)
    if departed:
        return FailureVerdict(kind="membership", reason=f"the round ended as {_listed(departed)} left or fell silent")
    if num_nodes == 1 or not is_consequence(cause):
        return FailureVerdict(kind="failure", reason=f"rank {cause.rank} {cause.ending}")
    if num_left > 0:  # should it turn out that a node was lost, it is not counted
        return FailureVerdict(kind="failure", reason=f"rank {cause.rank} lost another rank, and {cause.ending}")
    if waited_seconds < silence_seconds:
        return FailureVerdict(kind="wait", reason="whether a node is gone is not known yet")
    return FailureVerdict(
        kind="failure", reason=f"rank {cause.rank} lost another rank, and {cause.ending}; no node is gone"
    )


def _listed(nodes: Collection[str]) -> str:
    return f"{counted(len(nodes), 'node')} ({', '.join(sorted(nodes))})"


# --- staged copies made a checkpoint between two rounds --------------------------------------------------------------
# What was staged on all nodes is made a checkpoint, when no worker of a round lives any more and before others start.
#
# Every agent of a round does the same: they say what is staged, choose alike, write, and one commits.

_Exchange = Callable[[str, Any], list[Any]]
"""Called with a name and this node's row; gives the rows of all nodes, in the order of their places."""


def persist(folder: Path, board: RoundBoard | None, *, name: str, timeout_seconds: float) -> list[Outcome]:
    """Make checkpoints of what workers have staged in ``folder`` and on other nodes, and clear ``folder``.

    Gives an outcome for each run that had staged copies. Without a board this node is on its own; ``name`` tells one
    such exchange of a round from another. Errors of storage are in the outcomes. BoardGone where another node is lost:
    what is staged here stays.
    """

    def exchange(what: str, row: Any) -> list[Any]:
        assert board is not None
        return board.exchange(f"{name}/{what}", row, timeout_seconds=timeout_seconds)

    is_alone = board is None or board.num_peers == 1
    outcomes = complete(folder) if is_alone else _persist_together(folder, exchange)
    clear(folder)
    return outcomes


def _persist_together(folder: Path, exchange: _Exchange) -> list[Outcome]:
    own = [asdict(row) for row in rows_in(folder)]
    rows = [StagedCopy(**row) for each in exchange("staged", own) for row in each]
    return [_completed(folder, exchange, choice) for choice in choose(rows)]


def _completed(folder: Path, exchange: _Exchange, choice: RescuePlan) -> Outcome:
    """The outcome of completing one run's newest save: each node writes its part, and one node commits.

    All nodes call it; they exchange whether it went well after each stage.
    """
    if choice.generation is None:
        return Outcome(run_id=choice.run_id, path=None, why=choice.why)
    run, path = choice.run_id, None
    with Completion(folder, choice) as completion:
        trouble, written = "", []
        try:
            if completion.has_first:
                completion.begin()
        except (ElasticError, OSError) as error:
            trouble = str(error)
        why = _first(exchange(f"begun/{run}", trouble))
        if not why:
            try:
                written = completion.write()
            except (ElasticError, OSError) as error:
                trouble = str(error)
            told = exchange(f"written/{run}", [trouble, written])
            why = _first([each for each, _ in told])
            if not why and completion.has_first:
                try:
                    path = completion.commit([one for _, ranks in told for one in ranks])
                except (ElasticError, OSError) as error:
                    why = str(error)
            why = _first(exchange(f"committed/{run}", why))
    if why:
        return Outcome(run_id=run, path=None, why=f"what was staged is not completed: {why}")
    return Outcome(run_id=run, path=path, why=f"{choice.why}, and is saved" if path is None else saved_in_words(path))


def _first(troubles: list[str]) -> str:
    """The first of the nodes' troubles; empty where no node has one."""
    return next((trouble for trouble in troubles if trouble), "")
