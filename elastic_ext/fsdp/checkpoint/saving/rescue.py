"""Completing: what was staged on every rank is made a checkpoint after the ranks have died, without torch.

Ranks whose agent gave them a folder (ELASTIC_EXT_STAGING_DIR) keep there what they are saving. An agent that has ended
all its workers, and before it starts others, calls ``complete(folder)``, and then ``clear(folder)``. Where ranks lie on
several nodes their agents do the same in steps, and tell each other in between, in a store of theirs:

    every node                      rows = rows_in(folder)
    every node, with all rows       choices = choose(rows); for each that has a generation:
    every node                      completion = Completion(folder, choice)
    where completion.has_first      completion.begin()                 the others wait for that
    every node                      written = completion.write()
    where completion.has_first      completion.commit(all written)
    every node                      completion.close(); clear(folder)

Rows, choices and what was written are made of plain values. Whoever fails tells the others, who then close.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from elastic_ext.errors import CheckpointError, CheckpointExists, ElasticError
from elastic_ext.fsdp.checkpoint.contents import FileKind
from elastic_ext.fsdp.checkpoint.folder.claim import PATIENCE_SECONDS, Claim
from elastic_ext.fsdp.checkpoint.folder.commit import Commit, place_in
from elastic_ext.fsdp.checkpoint.folder.job_folder import JobFolder

from .rank_files import Shard, Writing
from .shared_memory import RECORD, StagedCopy, StagedFiles, boot_id, remove_shelved

__all__ = ["Completion", "Outcome", "RescuePlan", "choose", "clear", "complete", "rows_in", "saved_in_words"]

_logger = logging.getLogger(__name__)

_MOST_NAMED = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class RescuePlan:
    """The staged save of one run that is to be completed, and what becomes of its other saves."""

    run_id: str
    generation: str | None
    """The generation of the save to complete; None where none can be completed."""
    why: str
    """Why this save, or none, is to be completed, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Whether a staged save of one run was made a checkpoint, and why or why not."""

    run_id: str
    path: Path | None
    """The checkpoint that was completed, None where none was."""
    why: str


def saved_in_words(path: Path) -> str:
    """What is said of a checkpoint that was made of staged copies: nothing has to have failed, a script may end so."""
    return f"{path} is saved, from the copies that its ranks had staged in memory"


# ---- one node ----


def complete(folder: Path, *, patience_seconds: float = PATIENCE_SECONDS) -> list[Outcome]:
    """Make checkpoints of what the ranks of one node have staged in ``folder``, when none of them lives any more.

    One outcome for each run that has staged something that was no checkpoint when it died: the newest save that is
    whole on every rank is completed. Where that cannot be, or needs not be, the outcome says why, and what checkpoints
    there are is as it was. Nothing is raised that storage or another run has done.
    """
    return [_completed(folder, choice, patience_seconds) for choice in choose(rows_in(folder))]


def clear(folder: Path) -> None:
    """Remove all that is staged in ``folder``, completed or not, for those who come next."""
    remove_shelved(folder, lambda name: True)


def _completed(folder: Path, choice: RescuePlan, patience_seconds: float) -> Outcome:
    path, why = None, choice.why
    if choice.generation is not None:
        try:
            with Completion(folder, choice) as completion:
                completion.begin(patience_seconds=patience_seconds)
                path = completion.commit(completion.write())
            why = saved_in_words(path)
        except CheckpointExists as error:
            why = f"nothing staged is left to complete: {error}"
        except (ElasticError, OSError) as error:
            why = f"what was staged is not completed: {error}"
    return Outcome(run_id=choice.run_id, path=path, why=why)


# ---- steps ----


def rows_in(folder: Path) -> list[StagedCopy]:
    """The staged copies in ``folder``, one of each rank and save; a warning tells of each that cannot be used."""
    return [record.row for record in _records_in(folder)]


def choose(rows: Iterable[StagedCopy]) -> list[RescuePlan]:
    """For each run the newest of its saves that every rank has staged. Pure, and the same whatever the rows' order."""
    by_run: dict[str, list[StagedCopy]] = {}
    for row in rows:
        by_run.setdefault(row.run_id, []).append(row)
    return [_choice_of(run_id, by_run[run_id]) for run_id in sorted(by_run)]


class Completion:
    """Makes a checkpoint of the staged save ``choice``, from the copies of this node's ranks in ``folder``."""

    def __init__(self, folder: Path, choice: RescuePlan) -> None:
        self._folder = folder
        self._why = choice.why
        found = [record for record in _records_in(folder) if record.row.generation == choice.generation]
        self._records = sorted(found, key=lambda record: record.row.rank)
        self._first: Writing | None = None
        self._claim: Claim | None = None

    @property
    def has_first(self) -> bool:
        """Whether rank 0's copy is on this node, which then begins and commits the checkpoint."""
        return bool(self._records) and self._records[0].row.rank == 0

    def begin(self, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Make the checkpoint's folder, for all nodes to write into.

        CheckpointExists where there is nothing left to do, CheckpointFenced where another run has the job's folder.
        """
        assert self.has_first
        record = self._records[0]
        row, draft = record.row, Commit.from_json(record.draft, where=f"what rank 0 staged in {self._folder}")
        folder = JobFolder(Path(row.folder))
        self._claim = folder.act_for(row.run_id, patience_seconds=patience_seconds)
        for found in folder.candidates():
            is_on_way = place_in(draft.lineage, run_id=found.commit.run_id, global_step=found.commit.global_step)
            if found.commit.generation == draft.lineage[-1].from_generation:
                continue  # training went back to it, and what is staged says so
            if is_on_way is not None and found.commit.global_step >= draft.global_step:
                raise CheckpointExists(
                    f"{found.path} exists, saved at step {found.commit.global_step}, and step {draft.global_step} was "
                    "staged"
                )
        writing = _writing(record, folder, draft)
        writing.make_folder(replaces=True)
        self._first = writing

    def write(self) -> list[dict[str, list[object]]]:
        """Write the files of this node's ranks, once the folder is there; gives what ``commit`` needs, rank by rank."""
        written = []
        for record in self._records:
            writing = self._first if record.row.rank == 0 else _writing(record, JobFolder(Path(record.row.folder)))
            assert writing is not None, "begin() comes before write() where the first rank's copy is"
            with record.mapped(self._folder) as memory:
                written.append(writing.write(_shards(record, memory)))
        return written

    def commit(self, written: Sequence[Mapping[str, Sequence[Any]]]) -> Path:
        """Commit the checkpoint when all nodes have ``written``, which has one entry per rank; gives its folder."""
        assert self._first is not None, "begin() comes before commit()"
        num_ranks = self._first.draft.num_ranks
        if len(written) != num_ranks:
            raise CheckpointError(
                f"only {len(written)} of the {num_ranks} ranks that had staged the checkpoint have written it "
                f"({self._why}); what the others had staged is lost"
            )
        self._first.commit(written)
        return self._first.path

    def close(self) -> None:
        """Release the job's folder, and remove the checkpoint there if it was begun and not committed."""
        if self._first is not None:
            self._first.discard()
            self._first = None
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def __enter__(self) -> Completion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _records_in(folder: Path) -> list[StagedFiles]:
    records = []
    for path in sorted(folder.glob(f"*{RECORD}")):
        try:
            records.append(StagedFiles.read(path, boot=boot_id()))
        except (ValueError, OSError) as error:
            _logger.warning("what is staged in %s cannot be used: %s", path, error)
    return records


def _choice_of(run_id: str, rows: Sequence[StagedCopy]) -> RescuePlan:
    by_generation: dict[str, list[StagedCopy]] = {}
    for row in sorted(rows, key=lambda row: (row.rank, row.num_ranks)):
        by_generation.setdefault(row.generation, []).append(row)
    newest_first = sorted(by_generation.values(), key=_age, reverse=True)
    for own in newest_first:
        if _num_missing(own) == 0:
            why = f"{own[0].name} was staged on all of its {own[0].num_ranks} ranks"
            return RescuePlan(run_id=run_id, generation=own[0].generation, why=why)
    own = newest_first[0]
    num_ranks, present, num_more = _num_ranks(own), _present_in(own), _num_missing(own) - _MOST_NAMED
    named = itertools.islice((rank for rank in range(num_ranks) if rank not in present), _MOST_NAMED)
    missing = ", ".join(map(str, named)) + (f" and {num_more} more" if num_more > 0 else "")
    why = f"{own[0].name} cannot be completed: of {num_ranks} ranks these had not staged it: {missing}"
    return RescuePlan(run_id=run_id, generation=None, why=why)


def _age(rows: Sequence[StagedCopy]) -> tuple[int, int, str]:
    """A sort key of one staged save, larger for each later save of a run."""
    return max(row.global_step for row in rows), max(row.staged_ns for row in rows), rows[0].generation


def _num_ranks(rows: Sequence[StagedCopy]) -> int:
    return max(row.num_ranks for row in rows)


def _present_in(rows: Sequence[StagedCopy]) -> set[int]:
    """The ranks that one save was staged on, without copies that tell of fewer ranks than others do."""
    num_ranks = _num_ranks(rows)
    return {row.rank for row in rows if row.num_ranks == num_ranks}


def _num_missing(rows: Sequence[StagedCopy]) -> int:
    return _num_ranks(rows) - len(_present_in(rows))


def _writing(record: StagedFiles, folder: JobFolder, draft: Commit | None = None) -> Writing:
    row = record.row
    return Writing(
        folder,
        row.name,
        draft,
        generation=row.generation,
        rank=row.rank,
        num_ranks=row.num_ranks,
        descriptions=record.descriptions,
        state=record.state,
    )


def _shards(record: StagedFiles, memory: memoryview) -> dict[FileKind, Shard]:
    shards: dict[FileKind, Shard] = {}
    for kind, file in record.files.items():
        pieces, own = file.pieces(memory)
        shards[kind] = Shard(pieces, own)
    return shards
