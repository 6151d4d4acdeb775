"""Ranks: who takes part, and the few collectives on plain numbers and bytes that control needs.

All of them run on a gloo group of their own: control traffic on the user's group could pair with a gradient.
Everything is called on the training thread, by all ranks in the same order. While it waits, a rank reads its
peers' notices, so that it does not wait for one that has said it will not come. A ``Ranks`` lives as long as its
process trains; who the others are may change (``regroup``), so nobody keeps what it says of them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from elastic_ext.errors import PeerLostError, RanksDisagreeError, RanksError, RanksFailedError
from elastic_ext.records.run_dir import DEFAULT_TIMEOUT_SECONDS, GivenSeat
from elastic_ext.torch_private.groups import set_limit, store_of_default_group

from .board import Board, BoardGone
from .deadlines import OwnedThread
from .notices import Notices, Trouble
from .world import PeerName, World

__all__ = ["PendingSum", "Ranks"]

_logger = logging.getLogger(__name__)

_GRACE_SECONDS = 3.0  # how long the survivors of a loss wait for each other's word
_MOST_TRACEBACK = 20_000
_END_SECONDS = 10.0  # of a group that is destroyed, and takes some 50 ms
_PREFIX = "elastic_ext"
_LENGTH_BYTES = 8
_GATHERED_AT_ONCE, _SENT_AT_ONCE = 248, 8184  # bytes that go with their length, and take no second collective


class PendingSum:
    """An element-wise sum over the ranks that is under way; ``result()`` waits for it."""

    def __init__(self, values: torch.Tensor, wait: Callable[[], None]) -> None:
        self._values = values  # (num_fields,), int64
        self._wait = wait

    def result(self) -> list[int]:
        self._wait()
        return [int(value) for value in self._values.tolist()]


class Ranks:
    """This rank's connection to the other ranks: collectives of numbers and bytes, and a board."""

    def __init__(
        self,
        world: World,
        *,
        group: dist.ProcessGroup | None = None,
        board: Board | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        agents_folder: Path | None = None,
    ) -> None:
        self.world = world
        """Who the ranks are now; another value after ``regroup``."""
        self.seat = world.name.seat
        """The number by which this rank's files are named, for as long as its process lives."""
        self.board = board
        """What ranks tell each other without collectives; None where they have no store for it."""
        self.notices: Notices | None = None
        """Why the other ranks stop, in their words; None where there is no board, or no other rank."""
        self.progress: Callable[[], str] = lambda: "the start"
        """Called for how far this rank has come, in words, for the messages of errors; the owner sets it."""
        self.slice_seconds = 0.5
        """How long a collective is waited for between two looks at the peers' notices."""
        self.waits_for_accounts = True
        """Whether a rank that has lost a peer waits a few seconds for the words of the others, to tell them in its
        error."""
        self._group = group
        self._timeout_seconds = timeout_seconds
        self._agents_folder = agents_folder
        self._patience_seconds = math.inf  # beyond it the group's own timeout counts
        self._are_in_step = False
        self._ending: list[OwnedThread] = []  # that let go of process groups
        self._doubt = ""  # why peers may well be somewhere else, and wait for this rank

    @classmethod
    def alone(cls) -> Ranks:
        """Rank 0 of 1, whose collectives exchange nothing."""
        ranks = cls(_world_of(0, 1, seat=0))
        ranks._stand_alone()
        return ranks

    @classmethod
    def join(cls, *, timeout_seconds: float, agents_folder: Path | None = None, seat: GivenSeat | None = None) -> Ranks:
        """The ranks of the default process group; all of them call this. Rank 0 of 1 where there is no group.

        In ``agents_folder`` an agent says which ranks have ended; it may have given this process a ``seat``.
        """
        rank, size = _default_place()
        number = rank if seat is None else seat.of(rank, size)
        ranks = cls(_world_of(rank, size, seat=number), timeout_seconds=timeout_seconds, agents_folder=agents_folder)
        ranks._join()
        return ranks

    def regroup(self, form: Callable[[], object], *, members: int = 0, seconds: float | None = None) -> World:
        """Leave these ranks for those of the default process group that ``form`` makes; gives the new world.

        ``form`` ends the default process group, if there is one, and begins another, on a store of its own: a store
        that an agent holds, under a prefix that no world before has had. All ranks of the new world call this,
        newcomers too, from a world of their own. Nothing is under way in this group, which is let go of before ``form``
        is called, with its board and notices. What is set here stays: the seat, ``progress``, limits of time. Who keeps
        anything of a world is told of the new one by its ``take_world``.

        Where ``form`` or a collective of the new world fails this rank is in no world: it may call this again. With
        ``seconds`` no collective of the new world takes longer, until ``lift_limit``. ``members`` is the version of the
        plan by which these ranks come together.
        """
        self.wait_for_ends()
        self._let_go()
        form()
        self._join(seconds)
        self.world = replace(self.world, members=members)
        return self.world

    def lift_limit(self) -> None:
        """Have collectives take as long as they may from the start on, where ``regroup`` was given less."""
        if self._group is not None:
            set_limit(timedelta(seconds=self._timeout_seconds), self._group)

    def _join(self, seconds: float | None = None) -> None:
        """Make the control group of the default process group's ranks, and learn who they are."""
        rank, size = _default_place()
        self.world = _world_of(rank, size, seat=self.seat)
        if size == 1:
            self._stand_alone()
            return
        try:
            limit = timedelta(seconds=self._timeout_seconds if seconds is None else seconds)
            group = dist.new_group(backend="gloo", timeout=limit)
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {rank} could not make a process group for agreements with all ranks: {error}; make the same "
                "calls of elastic_ext on every rank"
            ) from error
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        store = store_of_default_group()
        board = None if store is None else Board(store, _PREFIX, place=rank, num_peers=size)
        number = board.count("groups") if rank == 0 and board is not None else 0
        hello = json.dumps({"name": asdict(self.world.name), "number": number}).encode()
        greetings = [json.loads(greeting) for greeting in self.gather(hello, "joining the other ranks")]
        self.world = World(rank=rank, names=tuple(PeerName(**greeting["name"]) for greeting in greetings))
        if board is not None:  # on a connection of its own: the user's threads may be waiting in theirs
            self.board = board.below(str(greetings[0]["number"]), connects=True)
            self.notices = Notices(self.board, self.names, agents_folder=self._agents_folder)

    def _stand_alone(self) -> None:
        if dist.is_available():
            self.board = Board(dist.HashStore(), _PREFIX)  # type: ignore[attr-defined]

    def _let_go(self) -> None:
        """Let go of the group, whose connections close, and of the board, with its connection to the store."""
        self.board = self.notices = None
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
            groups: list[object] = [group]
            del group
            self.end_beside(groups)

    def end_beside(self, groups: list[object]) -> None:
        """Let go of destroyed process groups, and empty the list of them, beside what this thread does next.

        Their connections close at once, which peers may wait for; torch waits some 10 ms for each of them.
        """
        self._ending = [each for each in self._ending if each.is_alive()]
        self._ending.append(OwnedThread(groups.clear, name="elastic_ext groups end"))
        self._ending[-1].start()

    def wait_for_ends(self) -> None:
        """Return once process groups that were let go of have ended."""
        for each in self._ending:
            each.wait(_END_SECONDS)
        self._ending = []

    @property
    def rank(self) -> int:
        """This rank's number among the ranks."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.world.size

    @property
    def names(self) -> tuple[PeerName, ...]:
        """The names of all ranks, in their order."""
        return self.world.names

    @property
    def host(self) -> str:
        """The machine that this rank runs on."""
        return self.world.name.host

    def has_group(self, group: object) -> bool:
        """Whether a process group is the one on which these ranks exchange words."""
        return group is self._group

    def speaks_for(self, thing: str) -> bool:
        """Whether this rank is the one to log what all ranks of its machine that have the same ``thing`` would log.

        It is the first of them; ``thing`` is what a warning would be about, such as the path of a config file. All
        ranks call this together.
        """
        everything = self.gather(json.dumps([self.host, thing]).encode(), "starting to follow a config")
        return everything.index(everything[self.rank]) == self.rank

    def start_sum(self, values: Sequence[int], doing: str) -> PendingSum:
        """Begin an element-wise sum over the ranks, which all give equally many values; ``doing`` is for errors."""
        tensor = torch.tensor(values, dtype=torch.int64)
        if self._group is None:
            return PendingSum(tensor, lambda: None)
        work = self._begin(lambda: self._all_reduce(tensor), doing)
        return PendingSum(tensor, lambda: self._wait(work, doing))

    def sum(self, values: Sequence[int], doing: str) -> list[int]:
        """The element-wise sum of ``values`` over the ranks; ``doing`` is for errors."""
        return self.start_sum(values, doing).result()

    def gather(self, data: bytes, doing: str) -> list[bytes]:
        """The bytes that each rank gave, in rank order; lengths may differ."""
        if self._group is None:
            return [data]
        if self._are_in_step:
            at_once = self._gather_equal(_with_length(data, _GATHERED_AT_ONCE), doing)
            lengths = [_length_of(each) for each in at_once]
            if max(lengths) <= _GATHERED_AT_ONCE:
                return [_after_length(each) for each in at_once]
        else:
            lengths = self.sum([len(data) if rank == self.rank else 0 for rank in range(self.world_size)], doing)
        received = self._gather_equal(bytearray(data.ljust(max(max(lengths), 1), b"\0")), doing)
        return [bytes(buffer[:length]) for buffer, length in zip(received, lengths, strict=True)]

    def _gather_equal(self, data: bytearray, doing: str) -> list[bytearray]:
        """The bytes that each rank gave, all of which give equally many."""
        received = [bytearray(len(data)) for _ in range(self.world_size)]
        tensors = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in received]
        mine = torch.frombuffer(data, dtype=torch.uint8)
        self._wait(self._begin(lambda: dist.all_gather(tensors, mine, self._group, async_op=True), doing), doing)
        return received

    def broadcast(self, data: bytes, source: int, doing: str) -> bytes:
        """The bytes that rank ``source`` gave, on all ranks."""
        if self._group is None:
            return data
        is_source = self.rank == source
        if self._are_in_step:
            at_once = _with_length(data if is_source else b"", _SENT_AT_ONCE)
            self._send(at_once, source, doing)
            length = _length_of(at_once)
            if length <= _SENT_AT_ONCE:
                return _after_length(at_once)
        else:
            (length,) = self.sum([len(data) if is_source else 0], doing)
            if length == 0:
                return b""
        buffer = bytearray(data if is_source else length)
        self._send(buffer, source, doing)
        return bytes(buffer)

    def _send(self, buffer: bytearray, source: int, doing: str) -> None:
        """Fill ``buffer``, of one length on all ranks, with what rank ``source`` has in it."""
        assert self._group is not None
        tensor = torch.frombuffer(buffer, dtype=torch.uint8)
        global_source = dist.get_global_rank(self._group, source)
        work = self._begin(lambda: dist.broadcast(tensor, global_source, self._group, async_op=True), doing)
        self._wait(work, doing)

    def all_or_raise(self, error: BaseException | None, doing: str, *, is_refusal: bool = False) -> None:
        """Return if no rank brought an error; else every rank raises a RanksFailedError that holds all tracebacks.

        Of a refusal, which its own rank raises as well, it holds the words alone.
        """
        shown = traceback.format_exception_only if is_refusal else traceback.format_exception
        text = "" if error is None else "".join(shown(error))[-_MOST_TRACEBACK:]
        texts = self.gather(text.encode(errors="replace"), doing)
        failed = {rank: text.decode(errors="replace") for rank, text in enumerate(texts) if text}
        if failed and error is not None and not is_refusal:
            error.with_traceback(None)  # the message has it
        if failed:
            raise RanksFailedError(doing, self.world_size, failed) from error

    def leave(self) -> None:
        """Leave these ranks for a world of this rank alone; nothing is under way among them."""
        self._let_go()
        self.world = _world_of(0, 1, seat=self.seat)
        self._stand_alone()

    def close(self) -> None:
        """Leave the group and the store; collectives under way are given up, and nothing may be called afterwards."""
        board = None if self.world_size > 1 else self.board
        self.progress = lambda: "the end"
        self._let_go()
        self.wait_for_ends()
        self.board = board

    def _begin(self, start: Callable[[], dist.Work | None], doing: str) -> dist.Work:
        try:
            work = start()
        except RuntimeError as error:
            raise self._peer_lost(doing, error) from error
        assert work is not None
        return work

    def _all_reduce(self, tensor: torch.Tensor) -> dist.Work | None:
        if self._patience_seconds == math.inf:
            work: dist.Work | None = dist.all_reduce(tensor, group=self._group, async_op=True)
            return work
        assert self._group is not None
        options = dist.AllreduceOptions()
        # What is under way keeps ``close`` waiting, and with it the end of this process, at which peers stop waiting.
        options.timeout = timedelta(seconds=self._patience_seconds + 10 * self.slice_seconds)
        return self._group.allreduce([tensor], options)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """A context for what all ranks have just agreed to do together: short words take one collective there.

        Elsewhere they begin with a sum, as boundaries do: ranks that have come apart notice it by that, where they
        would wait for each other for ever, and a sum alone can be given a limit of its own.
        """
        self._are_in_step = True
        try:
            yield
        finally:
            self._are_in_step = False

    @contextlib.contextmanager
    def waiting_at_most(self, seconds: float, doubt: str = "") -> Iterator[None]:
        """A context in which peers that do not come within ``seconds`` count as lost, as they may wait elsewhere.

        ``doubt`` is what this rank did to make that likely: this rank is to blame then, unless a peer has said that it
        failed.
        """
        self._patience_seconds, self._doubt = seconds, doubt
        try:
            yield
        finally:
            self._patience_seconds, self._doubt = math.inf, ""

    def _wait(self, work: dist.Work, doing: str) -> None:
        deadline = time.monotonic() + self._patience_seconds
        while True:
            try:
                work.wait(timedelta(seconds=self.slice_seconds))
                return
            except RuntimeError:  # a failure, or only the slice of time has passed
                if work.is_completed():
                    break
            if time.monotonic() > deadline:
                raise self._peer_lost(doing, None)
            with contextlib.suppress(BoardGone):  # a lost store is no reason to give up a collective
                if self.notices is not None and self.notices.troubles():
                    raise self._peer_lost(doing, None)
        try:
            work.wait()  # it may have completed well after all, just after its slice of time had passed
        except RuntimeError as error:
            raise self._peer_lost(doing, error) from error

    def _peer_lost(self, doing: str, error: RuntimeError | None) -> RanksError:
        """The error of a collective that lost a peer, with what the other ranks say of themselves."""
        if self.notices is None:
            why = error or f"other ranks have not come within {self._patience_seconds:g} seconds"
            return PeerLostError(f"a peer was lost while {doing}: {why}")
        progress, me = self.progress(), self.world.name
        if self._doubt and error is None and self._are_well():
            self.notices.post(Trouble(kind="failed", progress=progress, text=f"it {self._doubt}"))
            silent = f"did not, and waits for rank {self.rank} in that step, unless it has died or hangs"
            others = self.notices.account({}, silent=silent)
            return RanksDisagreeError(f"{me} {self._doubt}, after {progress}: {others}; do the same on all ranks")
        self.notices.post(Trouble(kind="lost", progress=progress, text=str(error or "")))
        troubles = self.notices.gather(_GRACE_SECONDS if self.waits_for_accounts else 0.0)
        known = self.notices.account(troubles, silent="gave no sign: it died, hangs or is elsewhere, see its output")
        cause = f" ({str(error).splitlines()[0][:200]})" if error is not None else ""
        lost = PeerLostError(f"{me} lost a peer while {doing}, after {progress}: {known}{cause}")
        self.notices.explain(lost, troubles)
        return lost

    def _are_well(self) -> bool:
        """Whether no peer has said that it failed, or was seen to have ended."""
        try:
            return self.notices is not None and not self.notices.troubles()
        except BoardGone:
            return False


def _with_length(data: bytes, num_bytes: int) -> bytearray:
    """The length of some bytes, and the first ``num_bytes`` of them, with zeros behind where there are fewer."""
    return bytearray(len(data).to_bytes(_LENGTH_BYTES, "big") + data[:num_bytes].ljust(num_bytes, b"\0"))


def _length_of(buffer: bytearray) -> int:
    return int.from_bytes(buffer[:_LENGTH_BYTES], "big")


def _after_length(buffer: bytearray) -> bytes:
    return bytes(buffer[_LENGTH_BYTES : _LENGTH_BYTES + _length_of(buffer)])


def _default_place() -> tuple[int, int]:
    """This process's rank in the default process group, and the number of ranks there; (0, 1) without one."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _world_of(rank: int, size: int, *, seat: int) -> World:
    """A world in which the other ranks have not told their names yet."""
    names = [PeerName(rank=peer, host="?", pid=0, seat=peer) for peer in range(size)]
    names[rank] = PeerName(rank=rank, host=socket.gethostname(), pid=os.getpid(), seat=seat)
    return World(rank=rank, names=tuple(names))
