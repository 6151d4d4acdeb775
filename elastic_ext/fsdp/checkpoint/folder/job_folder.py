"""JobFolder: the folder on shared storage where one job keeps its checkpoints.

    <storage>/fsdp_checkpoint/<job>_<YYYYmmdd-HHMMSS>/
      RUN.json  RUN.lock          which run saves here now (claim)
      meta/<checksum>.json        descriptions of tensors, each once
      step_100/  epoch_2/         checkpoints: they exist when their COMMIT does
      step_300.abandoned-<run>/   one that lies after the point from which this later run went on
      step_300.unreadable/        one whose COMMIT cannot be trusted, when a later run had that name to give
      .garbage-.../               what killed saves have left, on its way out

Beside it is .jobs/<job>, which holds the name of the job's first folder: whoever puts that there first decides it.

Rank 0 of the run that has claimed the folder makes, renames and removes names here, on one thread at a time. All ranks
write their shard files into the folder that it has begun, and read what they like.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from elastic_ext.errors import CheckpointDamaged, CheckpointError
from elastic_ext.records.files import (
    NewFiles,
    is_taken,
    link_or_copy,
    look_afresh,
    make_folder,
    naming,
    read_at_most,
    sync_folder,
    write_new,
)

from .claim import PATIENCE_SECONDS, Claim, check_job, folder_name, newest_folder, quoted
from .cleanup import Clearing, apply_retention, meta_path, remove_unused_metas
from .commit import COMMIT, Chain, Commit, FileSummary, check_chain, checksum_of
from .listing import (
    ListedCheckpoint,
    Listing,
    Retention,
    RetentionVerdict,
    check_name,
    is_name,
    is_set_aside,
    newest_of,
)

__all__ = ["FOLDER", "JobFolder", "refuse_in_a_jobs_folder"]

_logger = logging.getLogger(__name__)

FOLDER = "fsdp_checkpoint"
_JOBS = ".jobs"
_MOST_NAME_BYTES = 255


def _first_name(root: Path, job: str, proposed: str) -> str:
    """The name of the job's first folder: what the first run to ask has ``proposed``, the same for all runs."""
    path = root / _JOBS / quoted(job)
    with contextlib.suppress(FileExistsError):
        write_new(path, proposed.encode())
    name = os.fsdecode(read_at_most(path, _MOST_NAME_BYTES))
    if newest_folder([name], job) is None:
        raise CheckpointError(f"{path} does not hold the name of a folder of job {job!r}; remove it")
    return name


@dataclass(frozen=True, slots=True)
class _Begun:
    """A checkpoint that this run has begun, and not committed yet."""

    generation: str
    metas: dict[str, FileSummary] = field(default_factory=dict)
    """The metadata files that were put into the checkpoint, by name."""
    aside: Path | None = None
    """The path of the checkpoint that this one replaces, which was renamed; None if it replaces none."""


def refuse_in_a_jobs_folder(path: Path) -> None:
    """CheckpointError where a path leads into the folder of some job, whose next run may remove it as garbage."""
    resolved = Path(os.path.realpath(path))
    if any(part.parent.name == FOLDER for part in (resolved, *resolved.parents)):
        raise CheckpointError(
            f"{path} lies among the checkpoints of a job, whose next run may remove it; give a folder elsewhere"
        )


class JobFolder:
    """A job's folder of checkpoints, which is there already; ``find_or_make`` gives the one to use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._claim: Claim | None = None
        self._begun: dict[str, _Begun] = {}
        self._settled: str | None = None  # the run whose chain is all that is left here
        self.newest: Commit | None = None
        """The COMMIT of the checkpoint that this process has committed last; None before the first."""
        self.on_commit: Callable[[], None] | None = None
        """Called once a checkpoint is committed, on the thread that has done so."""

    @classmethod
    def find(cls, storage: Path, job: str) -> JobFolder | None:
        """The newest folder of exactly this job, None where it has none."""
        try:
            name = newest_folder(os.listdir(storage / FOLDER), check_job(job))
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            wrong = next(path for path in (storage / FOLDER, storage, *storage.parents) if path.exists())
            raise CheckpointError(f"{wrong} is no folder, and checkpoints are to lie there; move it away") from None
        return None if name is None else cls(storage / FOLDER / name)

    @classmethod
    def find_afresh(cls, storage: Path, job: str) -> JobFolder | None:
        """The newest folder of exactly this job, or None; past what this machine has cached of a shared file system."""
        look_afresh(storage / FOLDER)
        found = cls.find(storage, job)
        if found is not None:
            look_afresh(found.path)
            for name in os.listdir(found.path):
                if (is_name(name) or is_set_aside(name)) and not is_taken(found.path / name / COMMIT):
                    look_afresh(found.path / name)  # it may have one by now
        return found

    @classmethod
    def find_or_make(cls, storage: Path, job: str, *, now: datetime) -> JobFolder:
        """The newest folder of exactly this job, or a new one; rank 0 calls it and tells the others its path.

        Runs that make the first one at once all get the same, whatever their clocks say; the claim decides between
        them. Nobody waits for another, so that one which is killed on the way holds up none.
        """
        found = cls.find(storage, job)
        if found is not None:
            return found
        root = storage / FOLDER
        make_folder(root / _JOBS)
        sync_folder(storage)
        path = root / _first_name(root, job, folder_name(job, now))
        make_folder(path)
        sync_folder(root)
        return cls(path)

    # ---- reading: any rank ----

    def listing(self) -> Listing:
        """What lies in the folder under names of checkpoints: committed, unreadable or uncommitted."""
        return Listing.read(self.path)

    def checkpoints(self) -> list[ListedCheckpoint]:
        """The checkpoints that exist, oldest first; ``listing`` also tells of those that cannot be read."""
        return list(self.listing().found)

    def candidates(self) -> list[ListedCheckpoint]:
        """The checkpoints that exist, newest first: what to try in turn when a job goes on."""
        return self.checkpoints()[::-1]

    def latest(self, chain: Chain | None = None) -> ListedCheckpoint | None:
        """The newest checkpoint, of the runs of ``chain`` if that is given; damaged ones are passed over.

        Checkpoints abandoned for a run that saved nothing count. OSError where the file system does not let one be
        read, which may be the newest, and CheckpointError where one is of a newer format.
        """
        listing = Listing.counting(self.path)
        for error in listing.unreadable.values():
            if not isinstance(error, CheckpointDamaged):
                raise error
        return newest_of(listing.found, chain)

    def found(self, name: str) -> ListedCheckpoint:
        """The committed checkpoint in the folder ``name``; raises what ``read_commit`` raises."""
        return ListedCheckpoint.read(self.path / name)

    # ---- saving: rank 0 of the run that has the claim ----

    def claim(
        self, run_id: str, *, patience_seconds: float = PATIENCE_SECONDS, visit_seconds: float = PATIENCE_SECONDS
    ) -> Claim:
        """Claim this folder for a run, before the run looks for a checkpoint to go on from.

        What earlier runs have not committed is put aside, so that no commit of a run that is fenced from now on can
        appear after the look. CheckpointFenced if another run is alive; a process that tidies is waited for.
        """
        claim = Claim(self.path, run_id, patience_seconds=patience_seconds, visit_seconds=visit_seconds)
        try:
            clearing = Clearing(claim)
            for name in self.listing().unfinished:
                clearing.put_aside(name)
        except (OSError, CheckpointError):
            claim.release()
            raise
        self._claim = claim
        self._settled = None
        self._begun.clear()
        return claim

    def act_for(self, run_id: str, *, patience_seconds: float = PATIENCE_SECONDS) -> Claim:
        """Claim this folder in the name of a run that had it and has died, to complete what that run had staged.

        CheckpointFenced if another run has come since, or that one is alive.
        """
        self._claim = Claim(self.path, run_id, patience_seconds=patience_seconds, takes_over=False)
        self._settled = None
        self._begun.clear()
        return self._claim

    def begin(self, name: str, generation: str, lineage: Chain, *, replaces: bool = False) -> Path:
        """Make the folder of a new checkpoint, for all ranks to write into; gives its path.

        A name that an abandoned run used is free again: what has it is renamed. CheckpointExists if this run, or one
        that it goes on from, has saved under this name; unless that is what the run went on from, and this ``replaces``
        it.
        """
        check_name(name)
        check_chain(lineage)
        clearing = self._clearing()
        if name in self._begun:
            raise CheckpointError(f"{self.path / name} is being saved already; wait for that, or discard it")
        aside = clearing.vacate(name, lineage, replaces=replaces)
        with self.told_if_fenced():
            os.mkdir(self.path / name, 0o775)  # a power cut may take it back: commit() is what makes it last
        self._begun[name] = _Begun(generation, aside=aside)
        return self.path / name

    def put_meta(self, name: str, file: str, data: bytes) -> str:
        """Put tensors' metadata into a begun checkpoint, as ``file``; gives its checksum, its name in meta/.

        Metadata that meta/ has is linked, not written again. It is durable once this returns.
        """
        summary = FileSummary(num_bytes=len(data), checksum=checksum_of(data))
        kept, path = meta_path(self.path, summary.checksum), self.path / name / file
        self._begun[name].metas[file] = summary
        try:
            link_or_copy(kept, path)
        except FileNotFoundError:
            _write_and_keep(data, path, kept)
        if read_at_most(path, len(data)) != data:  # the disk has changed it; checkpoints that have it are left alone
            os.unlink(path)
            kept.unlink(missing_ok=True)
            _write_and_keep(data, path, kept)
        return summary.checksum

    def put_state(self, new: NewFiles, name: str, file: str, data: bytes) -> FileSummary:
        """Write plain values as one of ``new``, to be ``file`` of a begun checkpoint; gives its summary for COMMIT."""
        assert name in self._begun
        new.write(self.path / name / file, data)
        return FileSummary(num_bytes=len(data), checksum=checksum_of(data))

    def commit(self, name: str, commit: Commit) -> ListedCheckpoint:
        """Commit a begun checkpoint, when all ranks have written and synced their files and their names.

        Before a run's first commit, the checkpoints that it abandons are renamed: newest first, so that the newest one
        left is always one to go on from. Where this raises, ``discard`` comes next.
        """
        begun = self._begun[name]
        assert begun.generation == commit.generation
        path = self.path / name
        _check_files(path, commit.sizes() | {file: begun.metas[file].num_bytes for file in commit.metas})
        with self.told_if_fenced(), NewFiles() as new:
            new.write(path / COMMIT, commit.to_json())
            new.sync()
            sync_folder(self.path)  # which has the checkpoint's folder
            sync_folder(path)  # which has this rank's files
            if self._settled != commit.run_id:
                self._clearing().abandon(commit.lineage)
            self._clearing()  # a run that comes after this puts the folder aside, and the file with it
            new.put_in_place()
            sync_folder(path)
        self._settled = commit.run_id
        del self._begun[name]
        self.newest = commit
        if self.on_commit is not None:
            self.on_commit()
        return ListedCheckpoint(path=path, commit=commit)

    @contextlib.contextmanager
    def told_if_fenced(self) -> Iterator[None]:
        """Raise CheckpointFenced in place of errors about files missing or taken, if another run has come."""
        try:
            yield
        except (FileNotFoundError, FileExistsError):
            self._clearing()
            raise

    @property
    def begun(self) -> tuple[str, ...]:
        """The checkpoints that this run has begun, and neither committed nor discarded."""
        return tuple(self._begun)

    def discard(self, name: str) -> None:
        """Remove a begun checkpoint, or leave it to be pruned; CheckpointFenced if another run has come."""
        aside = self._begun.pop(name).aside
        self._clearing().give_up(name)  # it may have a COMMIT that could not be made durable
        if aside is not None:
            self._clearing().put_back(aside, name)

    def retain(self, rule: Retention, chain: Chain) -> list[RetentionVerdict]:
        """Remove the checkpoints that ``rule`` does not keep for a run of ``chain``; gives a verdict on each.

        Called after a commit. It takes as long as the storage takes to remove files, and raises nothing that the
        storage or another run has done: what is not removed now is so the next time.
        """
        try:
            verdicts = apply_retention(self.path, rule, chain, check=self._check)
            if any(not verdict.stays for verdict in verdicts) and not self._begun:
                remove_unused_metas(self.path)
        except (OSError, CheckpointError) as error:
            _logger.warning("old checkpoints in %s are not removed now: %s", self.path, error)
            return []
        for verdict in verdicts:
            if not verdict.stays:
                _logger.info("checkpoint %s was removed: it is %s", verdict.found.path, verdict.why)
        return verdicts

    def prune_garbage(self) -> list[str]:
        """Remove what killed saves have left, but no committed checkpoint, abandoned or not; gives the names.

        What cannot be removed is a warning, and is tried again the next time.
        """
        metas = {summary.checksum for begun in self._begun.values() for summary in begun.metas.values()}
        return self._clearing().prune(begun=self._begun, metas=metas)

    def _clearing(self) -> Clearing:
        """The object that renames and removes in this folder; CheckpointFenced if this run may not any more."""
        self._check()
        assert self._claim is not None
        return Clearing(self._claim)

    def _check(self) -> None:
        assert self._claim is not None, "claim() comes before anything that changes names"
        self._claim.check()


def _write_and_keep(data: bytes, path: Path, kept: Path) -> None:
    """Write metadata into a checkpoint as ``path``, and link it as ``kept`` in meta/, which may go at any time."""
    write_new(path, data)
    make_folder(kept.parent)
    with contextlib.suppress(FileExistsError):
        link_or_copy(path, kept)


def _check_files(path: Path, sizes: Mapping[str, int]) -> None:
    found = {file: _size_of(path / file) for file in sizes}
    missing = [file for file, size in found.items() if size < 0]
    if missing:  # or what other machines have put there is not known to this one yet
        look_afresh(path)
        found |= {file: _size_of(path / file) for file in missing}
    for file, expected in sizes.items():
        size = found[file]
        if size != expected:
            seen = f"has {size} bytes where {expected} were written" if size >= 0 else "is missing"
            raise CheckpointError(f"{path / file} {seen}: the checkpoint is not committed")


def _size_of(path: Path) -> int:
    """The size of a file, -1 where there is none; opened, since NFS shows what another machine wrote from then on."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return -1
        raise
    with naming(path):
        try:
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
