"""Writing: one rank's files of one checkpoint, from the first name to COMMIT. No collectives: who calls it has those.

What a power cut may leave of a checkpoint is right because some things are on the disk before others:

1. what files hold, before their names: each is synced under another name;
2. those names, before COMMIT's: each machine has its ranks sync the folder, the first one's does as the last;
3. the folder's own name and COMMIT's, before a save is said to be done.

Nothing else waits for the disk. A folder that was made and lost, or a name without COMMIT, is no checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic_ext.errors import ElasticError
from elastic_ext.fsdp.checkpoint.contents import STATE_FILE, FileKind, meta_file, shard_file
from elastic_ext.fsdp.checkpoint.folder.commit import Chain, Commit, FileSummary
from elastic_ext.fsdp.checkpoint.folder.job_folder import JobFolder
from elastic_ext.fsdp.checkpoint.folder.listing import Retention
from elastic_ext.fsdp.checkpoint.format.shardfile import ShardSummary
from elastic_ext.fsdp.checkpoint.format.writer import TensorToWrite, write_shard
from elastic_ext.records.files import NewFiles, is_taken, look_afresh, sync_folder

from .shared_memory import StagedCopy, StagedFiles

__all__ = ["Shard", "Writing", "give_up", "make_folder"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """The tensors of one shard file that a rank is to write."""

    pieces: Sequence[TensorToWrite]
    staged: memoryview | None = None
    """The memory of all tensors, if they lie there as they will in the file; else None."""
    start: int = 0
    """Where ``staged`` begins in the staging memory, in bytes."""


def make_folder(folder: JobFolder, name: str, generation: str, lineage: Chain, *, replaces: bool = False) -> None:
    """Make the folder of the checkpoint ``name``: on the first rank, before any other rank writes."""
    for left in folder.begun:  # by tries that failed, and came to their end when nobody waited any more
        folder.discard(left)
    folder.begin(name, generation, lineage, replaces=replaces)


def give_up(discard: Callable[[], None], name: str) -> None:
    """Remove what a failed save has left; where that fails it stays for now, and is no checkpoint."""
    try:
        discard()
    except (ElasticError, OSError) as error:
        _logger.info("what is left of checkpoint %s stays for now: %s", name, error)


class Writing:
    """Writes one rank's files of the checkpoint ``name`` in ``folder``; on rank 0 the metadata and COMMIT too.

    ``draft`` is what COMMIT says besides the names of files and the save's generation; who only writes files has none.
    """

    def __init__(
        self,
        folder: JobFolder,
        name: str,
        draft: Commit | None,
        *,
        generation: str,
        rank: int,
        num_ranks: int,
        descriptions: Mapping[FileKind, bytes],
        state: bytes,
    ) -> None:
        self.path = folder.path / name
        self.generation = generation
        """The random id of the save, the same on all ranks."""
        self._folder = folder
        self._name = name
        self._draft = draft
        self._rank = rank
        self._num_ranks = num_ranks
        self._descriptions = descriptions
        self._state = state
        self._metas: dict[str, str] = {}
        self._states: dict[str, FileSummary] = {}

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0's part, which makes the folder and commits."""
        return self._rank == 0

    @property
    def draft(self) -> Commit:
        """What COMMIT says besides the names of files and the save's generation."""
        assert self._draft is not None, "only who has a draft commits"
        return self._draft

    def make_folder(self, *, replaces: bool) -> None:
        """Make the checkpoint's folder, on rank 0, before any other rank writes."""
        make_folder(self._folder, self._name, self.generation, self.draft.lineage, replaces=replaces)

    def write(self, shards: Mapping[FileKind, Shard]) -> dict[str, list[object]]:
        """Write this rank's files; gives the size and checksum of each shard file by its name, for COMMIT."""
        is_first = self.is_first
        if not is_first and not is_taken(self.path):  # the first rank's machine has made it, and this one knows not yet
            look_afresh(self._folder.path)
        with self._folder.told_if_fenced() if is_first else nullcontext(), NewFiles() as new:
            if is_first:
                self._put_descriptions(new)
            written = {
                file: self._write_shard(new, file, shard)
                for kind, shard in shards.items()
                if shard.pieces and (file := shard_file(kind, self._rank, self._num_ranks))
            }
            new.sync()
            new.put_in_place()
        if not is_first:  # committing does it there
            sync_folder(self.path)
        return written

    def commit(self, of_ranks: Iterable[Mapping[str, Sequence[Any]]]) -> None:
        """Commit the checkpoint, on rank 0, when all have written; ``of_ranks`` is what ``write`` gave on each."""
        shards = {
            file: ShardSummary(num_bytes=num_bytes, checksum=checksum)
            for of_rank in of_ranks
            for file, (num_bytes, checksum) in of_rank.items()
        }
        whole = replace(self.draft, generation=self.generation, metas=self._metas, states=self._states, shards=shards)
        try:
            self._folder.commit(self._name, whole)
        except (ElasticError, OSError):  # before the others hear of it: there may be a COMMIT already
            self.discard()
            raise

    def retain(self, rule: Retention) -> None:
        """Remove the checkpoints that ``rule`` does not keep any more; on rank 0, after a commit."""
        if rule.keep_last is not None:
            self._folder.retain(rule, self.draft.lineage)

    def record(self) -> StagedFiles:
        """The record by which another process can write this rank's files and, by rank 0's record, commit."""
        draft = self.draft
        row = StagedCopy(
            folder=str(self._folder.path),
            name=self._name,
            generation=self.generation,
            run_id=draft.run_id,
            global_step=draft.global_step,
            rank=self._rank,
            num_ranks=self._num_ranks,
            staged_ns=time.time_ns(),
        )
        if self._rank > 0:
            return StagedFiles(row=row)
        return StagedFiles(row=row, draft=draft.to_json(), state=self._state, descriptions=self._descriptions)

    def discard(self) -> None:
        """Remove the checkpoint's folder, on rank 0, if it was begun and not committed."""
        if self._name in self._folder.begun:
            give_up(lambda: self._folder.discard(self._name), self._name)

    def _put_descriptions(self, new: NewFiles) -> None:
        for kind, data in self._descriptions.items():
            self._metas[meta_file(kind)] = self._folder.put_meta(self._name, meta_file(kind), data)
        self._states[STATE_FILE] = self._folder.put_state(new, self._name, STATE_FILE, self._state)

    def _write_shard(self, new: NewFiles, file: str, shard: Shard) -> list[object]:
        path: Path = self.path / file
        summary = write_shard(new, path, shard.pieces, generation=self.generation, staged=shard.staged)
        return [summary.num_bytes, summary.checksum]
