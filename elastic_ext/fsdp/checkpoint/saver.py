"""Saver: has every rank write its part of a checkpoint, and the first one make it exist.

What ranks hold is compared once, and again when it changes on one of them. Each element is written once, by one of the
ranks that have it. Nothing is decided here of where checkpoints lie among each other, which is jobfolder.py's affair.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic_ext.errors import ElasticError
from elastic_ext.files import sync_folder
from elastic_ext.fsdp.state import Held
from elastic_ext.ranks import Ranks

from .commit import Commit, FileSummary, checksum_of
from .contents import KINDS, STATE_FILE, VALUES, Contents, FileKind, meta_file, shard_file
from .inventory import Inventory, meta_of
from .jobfolder import JobFolder
from .memory import part_of
from .meta import StateMeta
from .shardfile import ShardSummary
from .shardwriter import Piece, write_shard
from .storage import Storage
from .together import gather_or_raise

__all__ = ["Saver"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What the ranks hold together, for as long as it stays the same."""

    digests: list[str]
    """Of each rank's inventories."""
    metas: Mapping[FileKind, StateMeta]
    data: Mapping[FileKind, bytes]
    """The metadata as it is written."""


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
        ranks = self._ranks
        contents, agreed, values = self._agree(collect, name)
        path = folder.path / name
        metas: dict[str, str] = {}
        states: dict[str, FileSummary] = {}

        def begin() -> str:
            if ranks.rank > 0:
                return ""
            generation = secrets.token_hex(8)
            for left in folder.begun:  # by tries that failed, and came to their end when nobody waited any more
                folder.discard(left)
            folder.begin(name, generation, draft.lineage)
            for kind, data in agreed.data.items():
                checksum = metas[meta_file(kind)] = folder.put_meta(data)
                folder.link_meta(name, meta_file(kind), checksum)
            state = json.dumps({**contents.state, VALUES: values}, allow_nan=False)
            states[STATE_FILE] = folder.put_state(name, STATE_FILE, state.encode())
            return generation

        try:
            generation = self._storage.together(begin, f"beginning checkpoint {name}")[0]
            doing = f"writing checkpoint {name}"

            def write() -> dict[str, list[object]]:
                pieces = {kind: _pieces(agreed.metas[kind], held, ranks.rank) for kind, held in contents.by_kind()}
                return self._storage.within(lambda: self._write(path, pieces, generation), doing)

            written: list[dict[str, Any]] = self._storage.together(write, doing, is_patient=False)
            shards = {
                file: ShardSummary(num_bytes=num_bytes, checksum=checksum)
                for of_rank in written
                for file, (num_bytes, checksum) in of_rank.items()
            }

            def commit() -> None:
                if ranks.rank == 0:
                    whole = replace(draft, generation=generation, metas=metas, states=states, shards=shards)
                    folder.commit(name, whole)

            self._storage.together(commit, f"committing checkpoint {name}")
        except BaseException:
            if ranks.rank == 0 and name in folder.begun:
                self._discard(folder, name)
            raise
        return path

    def _agree(self, collect: Callable[[], Contents], name: str) -> tuple[Contents, _Agreed, dict[str, Any]]:
        """What this rank has; what the ranks hold, and all their values, with the same answer on every rank."""
        doing = f"comparing what ranks hold for checkpoint {name}"
        found: list[Contents] = []
        inventories: dict[FileKind, Inventory] = {}

        def digest() -> list[Any]:
            contents = collect()
            found.append(contents)
            inventories.update(contents.inventories())
            own = checksum_of(b"\n".join(inventories[kind].to_json() for kind in KINDS))
            return [name, own, dict(contents.values)]

        answers = gather_or_raise(self._ranks, digest, doing)
        names = [given for given, _, _ in answers]
        if len(set(names)) > 1:
            raise ElasticError(f"the ranks save different checkpoints at once: {', '.join(names)}, rank by rank")
        digests = [own for _, own, _ in answers]
        if self._agreed is None or self._agreed.digests != digests:
            self._agreed = None
            metas: dict[FileKind, StateMeta] = {}
            for kind in KINDS:
                rows = self._ranks.gather(inventories[kind].to_json(), doing)
                metas[kind] = meta_of([Inventory.from_json(row) for row in rows], is_of_one_model=kind == "model")
            data = {kind: meta.to_json() for kind, meta in metas.items()}
            self._agreed = _Agreed(digests, metas, data)
        return found[0], self._agreed, {key: value for _, _, values in answers for key, value in values.items()}

    def _write(
        self, path: Path, pieces: Mapping[FileKind, Sequence[Piece]], generation: str
    ) -> dict[str, list[object]]:
        """This rank's files, and what COMMIT has to say of them."""
        written: dict[str, list[object]] = {}
        for kind, own in pieces.items():
            if own:
                file = shard_file(kind, self._ranks.rank, self._ranks.world_size)
                summary = write_shard(path / file, own, generation=generation)
                written[file] = [summary.num_bytes, summary.checksum]
        sync_folder(path)
        return written

    def _discard(self, folder: JobFolder, name: str) -> None:
        """What is left of a save that failed does no harm: it is no checkpoint, and is removed now or later."""
        try:
            self._storage.restart_clock()
            self._storage.within(lambda: folder.discard(name), f"discarding checkpoint {name}")
        except (ElasticError, OSError) as error:
            _logger.warning("what is left of checkpoint %s stays for now: %s", name, error)


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
