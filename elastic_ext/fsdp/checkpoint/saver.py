"""Saver: has every rank write its part of a checkpoint, and the first one make it exist.

What ranks hold is compared once, and again when it changes on one of them. Each element is written once, by one of the
ranks that have it. Nothing is decided here of where checkpoints lie among each other, which is jobfolder.py's affair,
nor of what comes before what on the disk, which is writing.py's.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_ext.errors import CheckpointError, ElasticError
from elastic_ext.fsdp.state import Held
from elastic_ext.ranks import Ranks

from .background import BackgroundSave
from .commit import Commit, checksum_of
from .contents import KINDS, VALUES, Contents, FileKind
from .inventory import Inventory, meta_of
from .jobfolder import JobFolder
from .letters import Letters, OwnStore, ToldOfFailure
from .lineage import Chain
from .memory import Part, part_of
from .meta import StateMeta
from .retain import Retention
from .shardwriter import Piece
from .staging import Staging
from .storage import Storage
from .together import gather_or_raise
from .writing import Shard, Writing, give_up, make_folder

__all__ = ["Saver"]

_logger = logging.getLogger(__name__)

_SHORT_SECONDS, _LONG_SECONDS = 0.002, 0.1  # to wait for one's own part before asking the others for theirs


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What the ranks hold together, for as long as it stays the same."""

    digests: Sequence[str]
    """Of each rank's inventories."""
    metas: Mapping[FileKind, StateMeta]
    data: Mapping[FileKind, bytes]
    """The metadata as it is written."""


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    """A save under way, as one rank sees it."""

    writing: Writing
    parts: Mapping[FileKind, Sequence[Part]]
    """Of tensors, which this rank writes."""
    generation: str


class Saver:
    """One rank's part in saving."""

    def __init__(
        self, ranks: Ranks, storage: Storage, *, staging: Staging | None = None, retention: Retention | None = None
    ) -> None:
        self._ranks = ranks
        self._storage = storage
        self._staging = staging
        self._retention = retention
        self._agreed: _Agreed | None = None
        self._under_way: BackgroundSave | None = None
        self._late: BackgroundSave | None = None  # given up, and its thread may still write from the kept memory
        self._store = ranks.store or OwnStore()

    @property
    def can_save_in_background(self) -> bool:
        """Whether there is memory for it, and a store by which the ranks' threads can tell each other how it goes."""
        return self._staging is not None and (self._ranks.store is not None or self._ranks.world_size == 1)

    def save(self, folder: JobFolder, name: str, collect: Callable[[], Contents], draft: Commit) -> Path:
        """Write the checkpoint ``name``; on return it exists, for every rank. All ranks call this between two steps.

        ``collect`` gives what this rank has, and may raise on some. ``draft`` is the first rank's: what COMMIT says
        besides the names of files and the save's generation. Where one rank fails all raise, and there is no checkpoint
        of this name.
        """
        storage, rank = self._storage, self._ranks.rank

        def make(generation: str) -> None:
            storage.restart_clock()
            doing = f"beginning checkpoint {name}"
            storage.within(lambda: make_folder(folder, name, generation, draft.lineage), doing)

        try:
            begun = self._begin(folder, name, collect, make if rank == 0 else None)
            doing = f"writing checkpoint {name}"

            def write() -> dict[str, list[object]]:
                shards = {kind: Shard(list(map(_piece, parts))) for kind, parts in begun.parts.items()}
                return storage.within(lambda: begun.writing.write(shards), doing)

            of_ranks = storage.together(write, doing, is_patient=False)

            def commit() -> None:
                if rank == 0:
                    begun.writing.commit(draft, of_ranks)

            storage.together(commit, f"committing checkpoint {name}")
        except BaseException:
            if rank == 0 and name in folder.begun:
                storage.restart_clock()
                discarding = f"discarding checkpoint {name}"
                give_up(lambda: storage.within(lambda: folder.discard(name), discarding), name)
            raise
        if rank == 0:
            self._retain_in_time(folder, draft.lineage)
        return begun.writing.path

    def save_in_background(
        self, folder: JobFolder, name: str, collect: Callable[[], Contents], draft: Commit, on_end: Callable[[], None]
    ) -> Path:
        """Begin to write the checkpoint ``name``; on return nothing of what it holds is needed any more.

        No other may be under way. How it went is what ``settle`` tells; ``on_end`` is called once it exists.
        """
        staging = self._staging
        assert staging is not None
        assert self._under_way is None, "settle() comes before the next save"
        begun = self._begin(folder, name, collect, None)
        seconds = self._storage.seconds
        letters = Letters(self._store, name=begun.generation, rank=self._ranks.rank, seconds=seconds)
        shards: dict[FileKind, Shard] = {}

        def commit(of_ranks: Sequence[Mapping[str, Sequence[Any]]]) -> None:
            begun.writing.commit(draft, of_ranks)

        def end() -> None:
            on_end()
            staging.forget(begun.generation)

        save = self._under_way = BackgroundSave(
            begun.writing.path,
            letters,
            rank=self._ranks.rank,
            num_ranks=self._ranks.world_size,
            make_folder=lambda: make_folder(folder, name, begun.generation, draft.lineage),
            write=lambda: begun.writing.write(shards),
            commit=commit,
            discard=begun.writing.discard,
            on_end=end,
            clear=lambda: self._retain(folder, draft.lineage),
        )
        try:
            held = staging.hold(begun.parts)
            for kind, staged in held.items():
                shards[kind] = Shard(staged.pieces, staged.data)
            staging.keep(held, lambda: begun.writing.record(draft))
        except (MemoryError, OSError, RuntimeError) as error:  # what torch raises where there is no memory
            save.fail(CheckpointError(f"there is no memory to keep what is saved while training goes on: {error}"))
        else:
            save.start()
        return begun.writing.path

    def is_busy(self) -> bool:
        """Whether a save is under way on any rank; all ranks call this."""
        is_own = self._under_way is not None and not self._under_way.is_over
        return sum(self._ranks.sum([int(is_own)], "seeing whether a save is under way")) > 0

    def settle(self) -> None:
        """Return once nothing is under way; raise on all ranks where what was under way has failed on one of them.

        PeerLostError at once where a rank is gone.
        """
        save = self._under_way
        if save is None:
            return
        self._under_way = None
        doing = f"saving {save.path}"
        try:
            self._wait_for(save, doing)
        except BaseException:
            save.give_up(f"it was given up while {doing}")
            raise

        def tell() -> None:
            if save.error is not None and not isinstance(save.error, ToldOfFailure):
                raise save.error

        try:
            gather_or_raise(self._ranks, tell, doing)
            if save.error is not None:
                raise save.error
        finally:
            save.burn_letters()

    def _wait_for(self, save: BackgroundSave, doing: str) -> None:
        """Until it is over on all ranks, or there is no time left on one."""
        deadline, slice_seconds = time.monotonic() + self._storage.seconds, _SHORT_SECONDS
        while True:
            save.join(slice_seconds)
            is_late = not save.is_over and time.monotonic() > deadline
            num_waiting, num_late = self._ranks.sum([int(not save.is_over), int(is_late)], doing)
            if num_late:
                save.give_up(
                    f"the storage took longer than {self._storage.seconds:g} seconds while {doing}; look after it, or "
                    "allow it more with storage_timeout_seconds, a trainer with timeout_seconds, of which it is half"
                )
                self._late = save
            if num_late or not num_waiting:
                return
            slice_seconds = min(2 * slice_seconds, _LONG_SECONDS)

    def end(self) -> None:
        """Wait for what is under way, without the other ranks, which may be gone; what fails has been logged."""
        save, self._under_way = self._under_way, None
        if save is not None:
            save.join(self._storage.seconds)
            save.give_up(f"saving {save.path} came to no end in {self._storage.seconds:g} seconds")
        if self._staging is not None:
            self._staging.close()

    def make_ready(self, collect: Callable[[], Contents]) -> None:
        """Begin to make room for what ``collect`` gives, off training's way; with all ranks."""
        if self._staging is not None:
            contents, agreed, _ = self._compare("to come", collect, None)
            self._staging.make_ready(_parts_of(contents, agreed, self._ranks.rank))

    def _retain(self, folder: JobFolder, chain: Chain) -> None:
        """On the first rank, after a commit: remove the checkpoints that are not to be kept any more."""
        if self._retention is not None:
            folder.retain(self._retention, chain)

    def _retain_in_time(self, folder: JobFolder, chain: Chain) -> None:
        """The same while the other ranks go on; what the storage does not do in time it does later."""
        if self._retention is not None:
            self._storage.restart_clock()
            try:
                self._storage.within(lambda: self._retain(folder, chain), "removing old checkpoints")
            except CheckpointError as error:
                _logger.warning("old checkpoints are still being removed: %s", error)

    def _begin(
        self,
        folder: JobFolder,
        name: str,
        collect: Callable[[], Contents],
        and_then: Callable[[str], None] | None,
    ) -> _Begun:
        """Collect what this rank has, do what is given, by the save's generation, and hear of what the others have."""
        rank = self._ranks.rank
        contents, agreed, answers = self._compare(name, collect, and_then)
        generation = answers[0][3]
        values = {key: value for _, _, values, _ in answers for key, value in values.items()}
        state = json.dumps({**contents.state, VALUES: values}, allow_nan=False).encode() if rank == 0 else b""
        writing = Writing(
            folder,
            name,
            generation=generation,
            rank=rank,
            num_ranks=self._ranks.world_size,
            descriptions=agreed.data,
            state=state,
        )
        return _Begun(writing, _parts_of(contents, agreed, rank), generation)

    def _compare(
        self, name: str, collect: Callable[[], Contents], and_then: Callable[[str], None] | None
    ) -> tuple[Contents, _Agreed, list[list[Any]]]:
        """What this rank has; what all hold together; what each has said: name, digest, values, generation."""
        doing = f"beginning checkpoint {name}"
        found: list[Contents] = []
        inventories: dict[FileKind, Inventory] = {}

        def begin() -> list[Any]:
            if self._late is not None and not self._late.is_over:
                raise CheckpointError(
                    f"the storage has not answered yet what was asked of it before {doing}; until then nothing else is "
                    "begun"
                )
            contents = collect()
            found.append(contents)
            inventories.update(contents.inventories())
            digest = checksum_of(b"\n".join(inventories[kind].to_json() for kind in KINDS))
            generation = secrets.token_hex(8)  # the first rank's counts
            if and_then is not None:
                and_then(generation)
            return [name, digest, dict(contents.values), generation]

        answers = gather_or_raise(self._ranks, begin, doing)
        names = [given for given, *_ in answers]
        if len(set(names)) > 1:
            raise ElasticError(f"the ranks save different checkpoints at once: {', '.join(names)}, rank by rank")
        return found[0], self._agree(inventories, [digest for _, digest, *_ in answers], name), answers

    def _agree(self, inventories: Mapping[FileKind, Inventory], digests: Sequence[str], name: str) -> _Agreed:
        """What the ranks hold together, with the same answer on every rank."""
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


def _parts_of(contents: Contents, agreed: _Agreed, rank: int) -> dict[FileKind, list[Part]]:
    """What this rank writes of what it holds."""
    return {kind: list(_parts(agreed.metas[kind], held, rank)) for kind, held in contents.by_kind()}


def _parts(meta: StateMeta, held: Sequence[Held], rank: int) -> list[Part]:
    parts = []
    for each in held:
        if each.is_alias_of is not None:
            continue
        part = meta.tensors[each.name].layout.boxes[rank]
        if not part.is_empty:
            parts.append(Part(each.name, each.dtype, each.tensor, each.box, part))
    return parts


def _piece(part: Part) -> Piece:
    return Piece(part.name, part.dtype, part.sizes, part_of(part.tensor, part.box, part.part))
