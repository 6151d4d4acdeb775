"""Saver: has every rank write its part of a checkpoint, and the first one make it exist.

What ranks hold is compared once, and again when it changes on one of them. Each element is written once, by one of the
ranks that have it. Nothing is decided here of where checkpoints lie among each other, which is jobfolder.py's affair.

What a power cut may leave of a checkpoint is right because some things are on the disk before others:

1. what files hold, before their names: each is synced under another name;
2. those names, before COMMIT's: each machine has its ranks sync the folder, the first one's does as the last;
3. the folder's own name and COMMIT's, before a save is said to be done.

Nothing else waits for the disk. A folder that was made and lost, or a name without COMMIT, is no checkpoint.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from elastic_ext.errors import ElasticError
from elastic_ext.files import NewFiles, sync_folder
from elastic_ext.fsdp.state import Held
from elastic_ext.ranks import Ranks

from .commit import Commit, FileSummary, checksum_of
from .contents import KINDS, STATE_FILE, VALUES, Contents, FileKind, meta_file, shard_file
from .inventory import Inventory, meta_of
from .jobfolder import JobFolder
from .lineage import Chain
from .memory import part_of
from .meta import StateMeta
from .shardfile import ShardSummary
from .shardwriter import Piece, write_shard
from .storage import Storage

__all__ = ["Saver"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What the ranks hold together, for as long as it stays the same."""

    digests: Sequence[str]
    """Of each rank's inventories."""
    metas: Mapping[FileKind, StateMeta]
    data: Mapping[FileKind, bytes]
    """The metadata as it is written."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Begun:
    """A save under way, as one rank sees it."""

    name: str
    generation: str
    contents: Contents
    """This rank's."""
    agreed: _Agreed
    values: Mapping[str, Any]
    """Of all ranks."""


@dataclass(frozen=True, slots=True)
class _Written:
    """What COMMIT says of a checkpoint's files."""

    metas: dict[str, str] = field(default_factory=dict)
    states: dict[str, FileSummary] = field(default_factory=dict)
    shards: dict[str, ShardSummary] = field(default_factory=dict)


class Saver:
    """One rank's part in saving."""

    def __init__(self, ranks: Ranks, storage: Storage) -> None:
        self._ranks = ranks
        self._storage = storage
        self._agreed: _Agreed | None = None

    def save(self, folder: JobFolder, name: str, collect: Callable[[], Contents], draft: Commit) -> Path:
        """Write the checkpoint ``name``; on return it exists, for every rank. All ranks call this between two steps.

        ``collect`` gives what this rank has, and may raise on some. ``draft`` is the first rank's: what COMMIT says
        besides the names of files and the save's generation. Where one rank fails all raise, and there is no checkpoint
        of this name.
        """
        try:
            begun = self._begin(folder, name, collect, draft.lineage)
            written = self._write(folder, begun)

            def commit() -> None:
                if self._ranks.rank > 0:
                    return
                try:
                    folder.commit(name, _completed(draft, begun.generation, written))
                except (ElasticError, OSError):  # before the others hear of it: there may be a COMMIT already
                    _give_up(lambda: folder.discard(name), name)
                    raise

            self._storage.together(commit, f"committing checkpoint {name}")
        except BaseException:
            if self._ranks.rank == 0 and name in folder.begun:
                self._storage.restart_clock()
                discarding = f"discarding checkpoint {name}"
                _give_up(lambda: self._storage.within(lambda: folder.discard(name), discarding), name)
            raise
        return folder.path / name

    def _begin(self, folder: JobFolder, name: str, collect: Callable[[], Contents], lineage: Chain) -> _Begun:
        """Collect what this rank has, have the first one make the folder, and hear of what the others have."""
        doing = f"beginning checkpoint {name}"
        found: list[Contents] = []
        inventories: dict[FileKind, Inventory] = {}

        def begin() -> list[Any]:
            contents = collect()
            found.append(contents)
            inventories.update(contents.inventories())
            digest = checksum_of(b"\n".join(inventories[kind].to_json() for kind in KINDS))
            generation = ""
            if self._ranks.rank == 0:
                generation = self._storage.within(lambda: _make_folder(folder, name, lineage), doing)
            return [name, digest, dict(contents.values), generation]

        answers = self._storage.together(begin, doing, is_patient=False)
        names, digests, values, generations = zip(*answers, strict=True)
        if len(set(names)) > 1:
            raise ElasticError(f"the ranks save different checkpoints at once: {', '.join(names)}, rank by rank")
        return _Begun(
            name=name,
            generation=generations[0],
            contents=found[0],
            agreed=self._agree(inventories, digests, name),
            values={key: value for of_rank in values for key, value in of_rank.items()},
        )

    def _agree(self, inventories: Mapping[FileKind, Inventory], digests: Sequence[str], name: str) -> _Agreed:
        """What the ranks hold together, with the same answer on every rank."""
        if self._agreed is None or self._agreed.digests != digests:
            self._agreed = None
            metas: dict[FileKind, StateMeta] = {}
            for kind in KINDS:
                own = inventories[kind].to_json()
                rows = self._ranks.gather(own, f"comparing what ranks hold for checkpoint {name}")
                metas[kind] = meta_of([Inventory.from_json(row) for row in rows])
            data = {kind: meta.to_json() for kind, meta in metas.items()}
            self._agreed = _Agreed(digests, metas, data)
        return self._agreed

    def _write(self, folder: JobFolder, begun: _Begun) -> _Written:
        """Have every rank write its files; what COMMIT has to say of them, which the first rank knows of all."""
        doing = f"writing checkpoint {begun.name}"
        rank, path = self._ranks.rank, folder.path / begun.name
        written = _Written()

        def write_files(pieces: Mapping[FileKind, Sequence[Piece]]) -> dict[str, list[object]]:
            with folder.told_if_fenced() if rank == 0 else nullcontext(), NewFiles() as new:
                if rank == 0:
                    _put_descriptions(new, folder, begun, written)
                shards = self._write_shards(new, path, pieces, begun.generation)
                new.sync()
                new.put_in_place()
            if rank > 0:  # committing does it for the first one
                sync_folder(path)
            return shards

        def write() -> dict[str, list[object]]:
            pieces = {kind: _pieces(begun.agreed.metas[kind], held, rank) for kind, held in begun.contents.by_kind()}
            return self._storage.within(lambda: write_files(pieces), doing)

        for of_rank in self._storage.together(write, doing, is_patient=False):
            for file, (num_bytes, checksum) in of_rank.items():
                written.shards[file] = ShardSummary(num_bytes=num_bytes, checksum=checksum)
        return written

    def _write_shards(
        self, new: NewFiles, path: Path, pieces: Mapping[FileKind, Sequence[Piece]], generation: str
    ) -> dict[str, list[object]]:
        """This rank's files of tensors, and what COMMIT has to say of them."""
        written: dict[str, list[object]] = {}
        for kind, own in pieces.items():
            if own:
                file = shard_file(kind, self._ranks.rank, self._ranks.world_size)
                summary = write_shard(new, path / file, own, generation=generation)
                written[file] = [summary.num_bytes, summary.checksum]
        return written


def _give_up(discard: Callable[[], None], name: str) -> None:
    """What is left of a save that failed does no harm: it is no checkpoint, and is removed now or later."""
    try:
        discard()
    except (ElasticError, OSError) as error:
        _logger.warning("what is left of checkpoint %s stays for now: %s", name, error)


def _make_folder(folder: JobFolder, name: str, lineage: Chain) -> str:
    """Begin the checkpoint ``name``, on the first rank; the generation that it gets."""
    generation = secrets.token_hex(8)
    for left in folder.begun:  # by tries that failed, and came to their end when nobody waited any more
        folder.discard(left)
    folder.begin(name, generation, lineage)
    return generation


def _put_descriptions(new: NewFiles, folder: JobFolder, begun: _Begun, written: _Written) -> None:
    """The first rank's files that hold no tensors."""
    for kind, data in begun.agreed.data.items():
        written.metas[meta_file(kind)] = folder.put_meta(begun.name, meta_file(kind), data)
    state = json.dumps({**begun.contents.state, VALUES: begun.values}, allow_nan=False)
    written.states[STATE_FILE] = folder.put_state(new, begun.name, STATE_FILE, state.encode())


def _completed(draft: Commit, generation: str, written: _Written) -> Commit:
    return replace(draft, generation=generation, metas=written.metas, states=written.states, shards=written.shards)


def _pieces(meta: StateMeta, held: Sequence[Held], rank: int) -> list[Piece]:
    """What this rank writes of what it holds."""
    pieces = []
    for each in held:
        if each.is_alias_of is not None:
            continue
        part = meta.tensors[each.name].layout.boxes[rank]
        if not part.is_empty:
            pieces.append(Piece(each.name, each.dtype, part.sizes, part_of(each.tensor, each.box, part)))
    return pieces
