"""Saver: a save by all ranks, while training waits or beside it: they tell one another what they hold, each writes its
part, and the first one commits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from elastic_ext.errors import CheckpointError, in_words
from elastic_ext.fsdp.checkpoint.contents import KINDS, VALUES, Contents, FileKind, Inventory, meta_of
from elastic_ext.fsdp.checkpoint.coordination import (
    agree_and_gather,
    agree_on,
    failure_of,
    gather_or_raise,
    joined_failure,
)
from elastic_ext.fsdp.checkpoint.folder.commit import Commit, checksum_of
from elastic_ext.fsdp.checkpoint.folder.job_folder import JobFolder
from elastic_ext.fsdp.checkpoint.folder.listing import Retention
from elastic_ext.fsdp.checkpoint.folder.run import Run
from elastic_ext.fsdp.checkpoint.format.metadata import StateMeta
from elastic_ext.fsdp.checkpoint.format.tensor_bytes import WrittenPart, part_of
from elastic_ext.fsdp.checkpoint.format.writer import TensorToWrite
from elastic_ext.fsdp.checkpoint.storage import Storage
from elastic_ext.fsdp.state import LocalShard, local_of
from elastic_ext.ranks.board import BoardGone
from elastic_ext.ranks.group import Ranks
from elastic_ext.ranks.world import World

from .background import PATIENCE_SECONDS, BackgroundSave
from .collect import Comparable, SaveRequest, ToSave, differing_names
from .letters import Letters, ToldOfFailure
from .rank_files import Shard, Writing, give_up, make_folder
from .staging import Copying, Staging, free_bytes, why_no_room

__all__ = ["AgreedContents", "AsyncSaveMode", "InventoryExchange", "InventoryExchanges", "Saver"]

_logger = logging.getLogger(__name__)


# --- what ranks tell one another when a save begins, so that they know what they hold together -----------------------
# That is compared by digests. The whole of it goes round once, and again when it has changed on one of them.


@dataclass(frozen=True, slots=True)
class _Agreed:
    """The metadata of all ranks' tensors as last agreed, used again while no rank's inventories change."""

    digests: Sequence[str]
    """The digest of each rank's inventories, in the order of ranks."""
    metas: Mapping[FileKind, StateMeta]
    data: Mapping[FileKind, bytes]
    """The metadata as JSON, as it is written."""


@dataclass(frozen=True, slots=True, eq=False)
class AgreedContents:
    """What one rank knows of a save once all ranks have exchanged their inventories."""

    contents: Contents
    """What this rank contributes to the checkpoint."""
    parts: Mapping[FileKind, Sequence[WrittenPart]]
    """The parts of tensors that this rank writes, by the kind of file."""
    descriptions: Mapping[FileKind, bytes]
    """The metadata of all ranks' tensors, as JSON."""
    values: Mapping[str, Any]
    """The ``Contents.values`` of all ranks, merged."""
    generation: str
    """The random id of the save, the same on all ranks."""


class InventoryExchanges:
    """The exchanges of inventories before saves, on one rank; the whole of them goes round only after a change."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._agreed: _Agreed | None = None

    def of(self, what: ToSave) -> InventoryExchange:
        """The exchange for one save."""
        return InventoryExchange(self, self._ranks, what)

    def agree(self, inventories: Mapping[FileKind, Inventory], digests: Sequence[str], name: str) -> _Agreed:
        """The metadata of all ranks' tensors, the same on every rank; gathers inventories if a digest has changed."""
        if self._agreed is None or self._agreed.digests != digests:
            self._agreed = None
            metas: dict[FileKind, StateMeta] = {}
            for kind in KINDS:
                own = inventories[kind].to_json()
                rows = self._ranks.gather(own, f"comparing what ranks hold for checkpoint {name}")
                metas[kind] = meta_of([Inventory.from_json(row) for row in rows], is_of_one_model=kind == "model")
            data = {kind: meta.to_json() for kind, meta in metas.items()}
            self._agreed = _Agreed(digests, metas, data)
        return self._agreed


class InventoryExchange:
    """One rank's side of the exchange of inventories when a save begins."""

    def __init__(self, exchanges: InventoryExchanges, ranks: Ranks, what: ToSave) -> None:
        self._exchanges = exchanges
        self._ranks = ranks
        self._what = what
        self._comparable: Comparable | None = None  # where there are others
        self._contents: Contents
        self._inventories: Mapping[FileKind, Inventory]

    def begin(self) -> dict[str, Any]:
        """Collect this rank's contents, as if buffers were equal on all ranks; gives what other ranks need to know."""
        self._contents = self._what.collect()
        self._inventories = self._contents.inventories()
        if self._ranks.world_size > 1:
            self._comparable = Comparable(self._contents, self._ranks.rank)
        return {
            "digest": checksum_of(b"\n".join(self._inventories[kind].to_json() for kind in KINDS)),
            "values": dict(self._contents.values),
            "alike": None if self._comparable is None else self._comparable.digest,
            "generation": secrets.token_hex(8),  # the first rank's counts
        }

    def end(self, name: str, said: Sequence[Mapping[str, Any]]) -> AgreedContents:
        """What this rank is to save, by what each rank has ``said``: what ``begin`` gave there. All ranks call this."""
        digests = [str(each["digest"]) for each in said]
        if len({each["alike"] for each in said}) > 1:
            own = self._add_own(name)
            digests = [checksum_of(f"{digest} {own}".encode()) for digest in digests]
        agreed, rank = self._exchanges.agree(self._inventories, digests, name), self._ranks.rank
        stepped = {_place_of(local_of(parameter)) for parameter in self._what.stepped}
        return AgreedContents(
            contents=self._contents,
            parts={
                kind: list(_parts(agreed.metas[kind], held, rank, stepped)) for kind, held in self._contents.by_kind()
            },
            descriptions=agreed.data,
            values={key: value for each in said for key, value in each["values"].items()},
            generation=str(said[0]["generation"]),
        )

    def _add_own(self, name: str) -> list[str]:
        """Add this rank's own copies of tensors that differ between ranks; gives the names of those tensors."""
        comparable = self._comparable
        assert comparable is not None
        doing = f"comparing buffers and registered tensors of the ranks for checkpoint {name}"
        names = differing_names(gather_or_raise(self._ranks, lambda: dict(comparable.digests), doing))
        self._contents = comparable.contents_with(names)
        self._inventories = self._contents.inventories()
        return names


def _parts(meta: StateMeta, held: Sequence[LocalShard], rank: int, stepped: Collection[int]) -> Iterator[WrittenPart]:
    for each in held:
        if each.is_alias_of is not None:
            continue
        part = meta.tensors[each.name].layout.boxes[rank]
        if not part.is_empty:
            is_stepped = each.kind == "like" or (each.kind == "parameter" and _place_of(each.tensor) in stepped)
            yield WrittenPart(each.name, each.dtype, each.tensor, each.box, part, is_stepped)


def _place_of(tensor: torch.Tensor) -> int:
    """The address where a tensor's storage begins."""
    return tensor.untyped_storage().data_ptr()


# --- has every rank write its part of a checkpoint, and the first one make it exist ----------------------------------
# Each element is written once, by one of the ranks that have it. What ranks tell one another of what they hold is in
# InventoryExchange, what the thread of an async save does in background.py. Nothing is decided here of where
# checkpoints lie among each other, which is fsdp/checkpoint/folder/job_folder.py's affair, nor of what comes before
# what on the disk, which is rank_files.py's.

_SHORT_SECONDS, _LONG_SECONDS = 0.002, 0.1  # to wait for one's own part before asking the others for theirs
_GIVEN_UP_SECONDS = 2.0  # for the thread of a save to see that it is given up, unless it is writing


def _raise(error: CheckpointError) -> None:
    raise error


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AsyncSaveMode:
    """How one async save behaves: whether it waits for the one before, overlaps passes, and is written at once."""

    waits: bool = True
    """Whether to wait for an async save under way; if not, no save is begun beside that one."""
    overlaps: bool = False
    """Whether parameters, and optimizer state of their shape, are copied beside passes, until ``finish_staging``."""
    starts: bool = True
    """Whether the copy is written; if not it is held until the next save, for ``write_held`` or ``begin_held``."""
    on_failed: Callable[[CheckpointError], None] = _raise
    """Called on all ranks with the error of the save before this one, if that has failed."""


class Saver:
    """Saves checkpoints: every rank writes its part, and rank 0 commits, while training waits or on threads.

    An async save is staged in ``staging``, without which there is none, and a thread of each rank writes it from there.
    ``run`` is told of each checkpoint that exists, and ``retention`` says which of them are kept.
    """

    def __init__(
        self, ranks: Ranks, storage: Storage, run: Run, *, retention: Retention, staging: Staging | None
    ) -> None:
        self._ranks = ranks
        self._storage = storage
        self._run = run
        self._retention = retention
        self._staging = staging
        self._exchanges = InventoryExchanges(ranks)
        self._under_way: BackgroundSave | None = None
        self._copying: Copying | None = None
        self._held_save: BackgroundSave | None = None  # copied, and not to be written unless somebody asks
        self._written_late: BackgroundSave | None = None  # a held save that is written, since somebody has asked for it
        self._last: BackgroundSave | None = None  # the newest save that is known to be made
        self._abandoned_save: BackgroundSave | None = None  # given up, and its thread may still read the staging memory
        self._lock = threading.Lock()

    def save(self, folder: JobFolder, draft: Commit, request: SaveRequest) -> Path:
        """Save a checkpoint while training waits; on return it exists, for every rank. All call this between two steps.

        What it holds is collected, which may raise on some. ``draft`` is the first rank's: what COMMIT says besides the
        names of files and the save's generation. Where one rank fails all raise, and there is no checkpoint of this
        name. Nothing else may be under way.
        """
        storage, rank, name = self._storage, self._ranks.rank, request.name

        def make(generation: str) -> None:
            storage.restart_clock()
            storage.within(
                lambda: make_folder(folder, name, generation, draft.lineage, replaces=request.replaces),
                _beginning(name),
            )

        agree_on(self._ranks, request.ask)  # before anything is done
        try:
            agreed = self._exchange_inventories(name, request.what, request.ask, make if rank == 0 else None)
            writing = self._writing(folder, name, agreed, draft)
            doing = f"writing checkpoint {name}"

            def write() -> dict[str, list[object]]:
                shards = {kind: Shard(list(map(_piece, parts))) for kind, parts in agreed.parts.items()}
                return storage.within(lambda: writing.write(shards), doing)

            of_ranks = storage.together(write, doing, is_patient=False)

            def commit() -> None:
                if rank == 0:
                    writing.commit(of_ranks)

            storage.together(commit, f"committing checkpoint {name}")
        except BaseException:
            if rank == 0 and name in folder.begun:
                storage.restart_clock()
                discarding = f"discarding checkpoint {name}"
                give_up(lambda: storage.within(lambda: folder.discard(name), discarding), name)
            raise
        if rank == 0 and self._retention.keep_last is not None:  # within the storage's time limit, as other ranks go on
            storage.restart_clock()
            try:
                storage.within(lambda: writing.retain(self._retention), "removing old checkpoints")
            except CheckpointError as error:
                _logger.warning("old checkpoints are still being removed: %s", error)
        self._run.note_save(request.step)
        return writing.path

    def _writing(self, folder: JobFolder, name: str, agreed: AgreedContents, draft: Commit) -> Writing:
        """The writer of this rank's files of a checkpoint."""
        is_first = self._ranks.rank == 0
        state = {**agreed.contents.state, VALUES: agreed.values}
        return Writing(
            folder,
            name,
            draft,
            generation=agreed.generation,
            rank=self._ranks.rank,
            num_ranks=self._ranks.world_size,
            descriptions=agreed.descriptions,
            state=json.dumps(state, allow_nan=False).encode() if is_first else b"",
        )

    def _exchange_inventories(
        self, name: str, what: ToSave, ask: Callable[[], str], and_then: Callable[[str], None] | None
    ) -> AgreedContents:
        """Collect this rank's contents, call ``and_then`` with this rank's generation, and exchange inventories.

        The first rank's generation is the save's, so that ``and_then`` is given on the first rank alone.
        """
        doing = _beginning(name)
        exchange = self._exchanges.of(what)

        def begin() -> dict[str, Any]:
            self._storage.refuse_if(self._abandoned_save is not None and not self._abandoned_save.is_over, doing)
            self._abandoned_save = None
            said = exchange.begin()
            if and_then is not None:
                and_then(said["generation"])
            return said

        return exchange.end(name, agree_and_gather(self._ranks, ask, begin, doing))

    # ---- async saves ----

    @property
    def can_save(self) -> bool:
        """Whether async saves are possible: there is staging memory, and the ranks share a board."""
        return self._staging is not None and self._ranks.board is not None

    def wait_a_while(self, seconds: float) -> bool:
        """Wait for an async save of this rank, if one is under way; gives whether it is over within ``seconds``."""
        save = self._under_way
        if save is None:
            return True
        self.finish_staging()
        save.join(seconds)
        return not _is_running(save)

    @property
    def is_ending(self) -> bool:
        """Whether a save that was given up is still being written on this rank: no other one can begin meanwhile."""
        return self._abandoned_save is not None and not self._abandoned_save.is_over

    def forget_others(self) -> bool:
        """Give up the save under way and the held copy, without the other ranks, as some of them are lost.

        Gives whether a save was given up that has not made its checkpoint.
        """
        self.finish_staging()
        with self._lock:
            self._held_save, saves = None, [self._under_way, self._written_late]
            self._under_way = self._written_late = None
        for save in saves:
            if save is not None:
                save.give_up("ranks that had a part in it are lost")
                save.join(_GIVEN_UP_SECONDS)
                if not save.is_over:
                    self._abandoned_save = save
        return any(save is not None and not save.is_made for save in saves)

    def take_world(self, world: World) -> None:
        """Save with the ranks of ``world`` from here on, which have exchanged nothing; no save is under way."""
        assert self._under_way is None and not self.is_holding
        self._exchanges = InventoryExchanges(self._ranks)
        self._last = None

    @property
    def is_free(self) -> bool:
        """Whether an async save can begin on this rank without waiting for staging memory or another save."""
        is_made = self._staging is not None and not self._staging.is_being_made
        return self.can_save and is_made and (self._under_way is None or not _is_running(self._under_way))

    def save_async(self, folder: JobFolder, draft: Commit, request: SaveRequest, mode: AsyncSaveMode) -> Path | None:
        """Begin an async save; gives its folder. What it holds may change on return, or after ``finish_staging``.

        A failure is raised by ``settle``, or goes to ``mode.on_failed`` in the next call of this, which waits for the
        save before it. None, and no save begins, where another one is under way and ``mode`` does not wait.
        """
        staging, board = self._staging, self._ranks.board
        assert staging is not None and board is not None
        after = self._under_way or self._last
        agreed = self._exchange_after_the_last(request, mode)
        if agreed is None:
            return None
        writing, seconds = self._writing(folder, request.name, agreed, draft), self._storage.seconds
        save = BackgroundSave(
            writing,
            Letters(board, name=agreed.generation, seconds=seconds),
            staging,
            replaces=request.replaces,
            retention=self._retention,
            seconds=seconds,
            after=after,
        )
        self.drop_held()
        if mode.starts:
            self._under_way = save
        is_staged = False
        try:
            later: list[tuple[WrittenPart, memoryview]] = []
            save.shards = staging.hold(agreed.parts, later if mode.overlaps else None)
            keep = partial(staging.keep, save.shards, writing)
            save.copying = self._copying = Copying(later, keep) if later else None
            if not later:
                keep()
            is_staged = True
            if mode.starts:
                save.start()
            else:
                self._held_save = save
        except Exception as error:
            self._give_up_copying()
            save.fail(CheckpointError(_why_not_begun(error, is_staged=is_staged)))
            if mode.starts:
                _logger.warning("%s failed on rank %d", _beginning(request.name), self._ranks.rank, exc_info=error)
            else:
                _logger.warning(
                    "the state of this step was not staged, and training goes on without a staged copy: %s", save.error
                )
        except BaseException:
            self._give_up_copying()
            save.fail(CheckpointError("the save was interrupted while it copied the state of this step"))
            raise
        return writing.path

    @property
    def is_holding(self) -> bool:
        """Whether a copy is held that is not written, or was written only because somebody has asked for it."""
        return self._held_save is not None or self._written_late is not None

    @property
    def is_idle(self) -> bool:
        """Whether all saves that were begun are settled, and no copy is held."""
        return self._under_way is None and not self.is_holding

    def write_held(self, seconds: float) -> Path | None:
        """Write the held copy, on all ranks and from any thread; its folder, None where it is not made in ``seconds``.

        Without a held copy it waits for the last save.
        """
        with self._lock:
            save = self._held_save
            if save is not None:
                self._write_late(save)
                save.hurry(seconds)
        save = save or self._written_late or self._under_way or self._last
        if save is None:
            return None
        save.join(seconds)
        return save.path if save.is_made else None

    def begin_held(self) -> Path | None:
        """Begin to write the held copy, and have the other ranks do so; its folder, None where no copy is held.

        The other ranks need not call this: a thread of each calls ``follow_others`` now and then. ``end`` waits for the
        save.
        """
        with self._lock:
            save = self._held_save
            if save is None:
                return None
            self._write_late(save)
        with contextlib.suppress(BoardGone):
            save.ask_for()
        return save.path

    def wait_for_held(self) -> None:
        """Wait for the save that ``begin_held`` has begun; for other ranks no longer than half a minute at a time."""
        save = self._written_late
        if save is not None:
            save.hurry(PATIENCE_SECONDS)
            save.join(self._storage.seconds)

    def follow_others(self) -> None:
        """Begin to write the held copy if another rank has called ``begin_held``; from any thread."""
        save = self._held_save
        if save is not None and save.is_asked_for():
            with self._lock:
                if self._held_save is save:
                    self._write_late(save)

    def _write_late(self, save: BackgroundSave) -> None:
        self._held_save, self._written_late = None, save
        save.start()

    def _give_up_copying(self) -> None:
        """End the overlapped copy, which failed, so that nobody waits for it."""
        if self._copying is not None:
            self._copying.end()
            self._copying = None

    def drop_held(self) -> None:
        """Forget the held copy without writing it; where it is being written already, wait for that."""
        with self._lock:
            self._held_save = None
        if self._written_late is not None:
            self._written_late.join(None)
            self._written_late = None

    @property
    def is_copying(self) -> bool:
        """Whether an overlapped copy may still be under way, which ``finish_staging`` waits for."""
        return self._copying is not None

    def finish_staging(self) -> None:
        """Wait until the overlapped copy is made: from then on what is being saved may change."""
        if self._copying is not None:
            self._copying.wait()
            self._copying = None

    def is_busy(self) -> bool:
        """Whether a save is under way on any rank; all ranks call this."""
        is_own = self._under_way is not None and _is_running(self._under_way)
        return sum(self._ranks.sum([int(is_own)], "seeing whether a save is under way")) > 0

    def settle(self) -> None:
        """Wait until no async save is under way; raise on all ranks where it has failed on one of them.

        PeerLostError at once where a rank is gone.
        """
        save = self._under_way
        if save is None:
            return
        self.finish_staging()
        self._wait_for(save)
        self._conclude(save, gather_or_raise(self._ranks, lambda: _failure_in(save), f"saving {save.path}"))

    def _conclude(self, save: BackgroundSave, failures: Sequence[Mapping[str, Any] | None]) -> None:
        """End a save that is over on all ranks, and raise where ``failures``, one of each rank or None, has any."""
        self._under_way = None
        save.burn_letters()
        failed = {rank: failure for rank, failure in enumerate(failures) if failure is not None}
        if failed:
            failure = joined_failure(failed, f"saving {save.path}", len(failures))
            failure.is_in_log = save.is_in_log
            raise failure
        if save.error is not None:
            raise save.error
        self._last = save
        self._run.note_save(save.step)

    def _wait_for(self, save: BackgroundSave) -> None:
        """Wait until a save is over on all ranks, or its time is over on one: then no rank waits for it any more."""
        deadline, slice_seconds = time.monotonic() + self._storage.seconds, _SHORT_SECONDS
        doing = f"saving {save.path}"
        while True:
            save.join(slice_seconds)
            is_late = not save.is_over and time.monotonic() > deadline
            try:
                num_waiting, num_late = self._ranks.sum([int(not save.is_over), int(is_late)], doing)
            except BaseException:
                self._under_way, self._abandoned_save = None, save
                save.give_up(f"the save was given up while {doing}")
                raise
            if num_late and save.is_made:
                _logger.warning("%s is saved; old checkpoints are still being removed", save.path)
                self._abandoned_save = save
            elif num_late:
                save.give_up(
                    f"the storage took longer than {self._storage.seconds:g} seconds while {doing}; look after the "
                    "storage, or give it more time: storage_timeout_seconds, or of a trainer timeout_seconds, half of "
                    "which the storage may take"
                )
                self._abandoned_save = save
            if num_late or not num_waiting:
                return
            slice_seconds = min(2 * slice_seconds, _LONG_SECONDS)

    def end(self, *, hurries: bool = False) -> None:
        """Wait for this rank's saves without collectives, and close the staging memory; failures are only logged.

        With ``hurries`` a save waits for other ranks, which may be gone, half a minute at most.
        """
        self.finish_staging()
        with self._lock:
            self._held_save, saves = None, [self._under_way, self._written_late]
            self._under_way = self._written_late = None
        for save in saves:
            if save is None:
                continue
            if hurries:
                save.hurry(PATIENCE_SECONDS)
            save.join(self._storage.seconds)
            save.give_up(f"saving {save.path} came to no end in {self._storage.seconds:g} seconds")
        if self._staging is not None:
            self._staging.close()

    def make_ready(self, what: ToSave) -> None:
        """Begin to allocate the staging memory for ``what``, on a thread; all ranks call this.

        Where one of their machines has too little memory, async saves are off from then on, on all ranks.
        """
        staging = self._staging
        if staging is None:
            return
        agreed, host = (
            self._exchange_inventories("to come", what, lambda: "make ready for saving", None),
            self._ranks.host,
        )
        wants = gather_or_raise(
            self._ranks,
            lambda: [host, staging.num_missing(agreed.parts), free_bytes()],
            "looking for memory to save from",
        )
        why_not = why_no_room((host, wanted, free) for host, wanted, free in wants)
        if why_not is None:
            staging.make_ready(agreed.parts)
            return
        self._staging = None
        staging.close()
        if self._ranks.rank == 0:
            _logger.warning(
                "there is too little memory to stage checkpoints (%s): training waits while each checkpoint is written",
                why_not,
            )

    def _exchange_after_the_last(self, request: SaveRequest, mode: AsyncSaveMode) -> AgreedContents | None:
        """Wait for the save under way and exchange inventories for this one; None where ``mode`` does not wait."""
        name, what, ask, last = request.name, request.what, request.ask, self._under_way
        if last is None:
            return self._exchange_inventories(name, what, ask, None)
        self.finish_staging()
        exchange = self._exchanges.of(what)
        while True:
            answers = agree_and_gather(
                self._ranks,
                ask,
                lambda: [_is_running(last), last.seconds > self._storage.seconds, _failure_in(last), exchange.begin()],
                _beginning(name),
            )
            if not any(is_running for is_running, *_ in answers):
                break
            if not mode.waits and not any(is_late for _, is_late, *_ in answers):
                return None
            self._wait_for(last)
        try:
            self._conclude(last, [failure for *_, failure, _ in answers])
        except CheckpointError as error:
            mode.on_failed(error)
        ask()  # again, now that it is known what there is: it raises on all ranks alike
        if self._abandoned_save is not None:  # the others are to hear of that too
            return self._exchange_inventories(name, what, ask, None)
        return exchange.end(name, [said for *_, said in answers])


def _beginning(name: str) -> str:
    """What a save is doing when ranks first meet, in words for errors."""
    return f"beginning checkpoint {name}"


def _why_not_begun(error: Exception, *, is_staged: bool) -> str:
    """Why an async save did not begin on this rank, in words."""
    if is_staged:
        return f"the thread that writes this save cannot be started: {error}"
    if isinstance(error, (MemoryError, OSError, RuntimeError)):  # what torch raises where there is no memory
        return f"there is no memory for the staged copy of this save: {error}"
    return f"the state of this step cannot be staged: {in_words(error)}"


def _piece(part: WrittenPart) -> TensorToWrite:
    return TensorToWrite(part.name, part.dtype, part.sizes, part_of(part.tensor, part.box, part.part))


def _is_running(save: BackgroundSave) -> bool:
    """Whether a save is to be waited for on this rank: one that has failed is, while it removes its files."""
    return not (save.is_over or save.is_made or save.is_given_up)


def _failure_in(save: BackgroundSave) -> dict[str, object] | None:
    """A save's failure on this rank, as JSON; None where it has not failed, or only because another rank has."""
    error = save.error
    return None if error is None or isinstance(error, ToldOfFailure) else failure_of(error)
