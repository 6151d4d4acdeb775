"""Saver: has every rank write its part of a checkpoint, and the first one make it exist.

What ranks hold is compared once, and again when it changes on one of them. Each element is written once, by one of the
ranks that have it. Nothing is known here of where checkpoints lie among each other, which is jobfolder.py's affair.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ...files import sync_folder
from ...ranks import Ranks
from ..layout import Box
from .commit import Commit
from .contents import KINDS, STATE_FILE, Contents, FileKind, meta_file, shard_file
from .inventory import Inventory, meta_of
from .jobfolder import JobFolder
from .memory import part_of
from .meta import StateMeta
from .shardfile import ShardSummary
from .shardwriter import Piece, write_shard
from .together import gather_or_raise, within

__all__ = ["Saver"]


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What the ranks hold, as long as it stays the same."""

    digests: list[str]
    """Of each rank's inventories."""
    metas: Mapping[FileKind, StateMeta]
    data: Mapping[FileKind, bytes]
    """The metadata as it is written."""


class Saver:
    """One rank's part in saving."""

    def __init__(self, ranks: Ranks, *, storage_timeout_seconds: float) -> None:
        self._ranks = ranks
        self._seconds = storage_timeout_seconds
        self._agreed: _Agreed | None = None

    def save(
        self, folder: JobFolder, name: str, contents: Contents, describe: Callable[[str], Commit]
    ) -> Path:
        """Write the checkpoint ``name``; on return it exists, on every rank. All ranks call this.

        ``describe(generation)`` gives the first rank's COMMIT but for what is only known once files are written.
        Where one rank fails all raise, and no checkpoint of this name exists.
        """
        agreed = self._agree(contents, name)
        own = self._ranks.rank
        metas: dict[str, str] = {}
        committed: list[Commit] = []

        def begin() -> str:
            if own > 0:
                return ""
            generation = secrets.token_hex(8)
            folder.begin(name, generation)
            for kind, data in agreed.data.items():
                metas[meta_file(kind)] = folder.link_meta(name, meta_file(kind), folder.put_meta(data))
            return generation

        generation = gather_or_raise(self._ranks, lambda: self._on_storage(begin, "beginning a checkpoint"), f"beginning {name}")[0]
        try:
            pieces = {kind: self._pieces(agreed.metas[kind], held) for kind, held in contents.by_kind()}

            def write() -> dict[str, list[object]]:
                summaries = {
                    shard_file(kind, own, self._ranks.world_size): write_shard(
                        path / shard_file(kind, own, self._ranks.world_size), pieces[kind], generation=generation
                    )
                    for kind in KINDS
                    if pieces[kind]
                }
                sync_folder(path)
                return {file: [summary.num_bytes, summary.checksum] for file, summary in summaries.items()}

        except BaseException:
            raise
        return path
