"""JobFolder: the folder on shared storage where one job keeps its checkpoints.

    <storage>/fsdp_checkpoint/<job>_<YYYYmmdd-HHMMSS>/
      RUN.json  RUN.lock          which run saves here now (claim)
      meta/<checksum>.json        descriptions of tensors, each once
      step_100/  epoch_2/         checkpoints: they exist when their COMMIT does
      step_300.abandoned-<run>/   one that lies after the point from which a later run went on
      step_300.unreadable/        one whose COMMIT cannot be trusted, when a later run had that name to give
      .garbage-.../               what killed saves have left, on its way out

Rank 0 of the run that has claimed the folder makes, renames and removes names here, on one thread at a time. All ranks
write their shard files into the folder that it has begun, and read what they like.
"""

from __future__ import annotations

import errno
import logging
import os
from datetime import datetime
from pathlib import Path

from elastic_ext.errors import CheckpointError
from elastic_ext.files import (
    is_taken,
    link_or_copy,
    make_folder,
    put_in_place,
    read_at_most,
    sync_folder,
    write_new,
    write_whole,
    written_beside,
)

from .claim import PATIENCE_SECONDS, Claim
from .clearing import Clearing
from .commit import COMMIT, Commit, FileSummary, checksum_of
from .jobname import check_job, folder_name, newest_folder
from .lineage import Chain, check_chain
from .listing import Found, Listing, check_name, newest_of
from .removing import remove_unused_metas, retained
from .retain import Retention, Verdict

__all__ = ["FOLDER", "JobFolder"]

_logger = logging.getLogger(__name__)

FOLDER = "fsdp_checkpoint"
_META = "meta"


class JobFolder:
    """A job's folder that is there already; ``find_or_make`` gives the one to use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._claim: Claim | None = None
        self._begun: dict[str, str] = {}  # name -> generation
        self._settled: str | None = None  # the run whose chain is all that is left here

    @classmethod
    def find(cls, storage: Path, job: str) -> JobFolder | None:
        """The newest folder of exactly this job, None where it has none."""
        try:
            name = newest_folder(os.listdir(storage / FOLDER), check_job(job))
        except FileNotFoundError:
            return None
        return None if name is None else cls(storage / FOLDER / name)

    @classmethod
    def find_or_make(cls, storage: Path, job: str, *, now: datetime) -> JobFolder:
        """The newest folder of exactly this job, or a new one; rank 0 calls it and tells the others its path."""
        found = cls.find(storage, job)
        if found is not None:
            return found
        root = storage / FOLDER
        root.mkdir(parents=True, exist_ok=True)
        sync_folder(storage)
        own = root / folder_name(job, now)
        try:
            make_folder(own)
        except FileExistsError:  # by another run of this job, in the same second: the claim decides between them
            return cls(own)
        earlier = newest_folder((name for name in os.listdir(root) if name < own.name), job)
        if earlier is not None:  # ... or in a second before, since we looked
            own.rmdir()
            return cls(root / earlier)
        return cls(own)

    # ---- reading: any rank ----

    def listing(self) -> Listing:
        """What lies here under the names of checkpoints."""
        return Listing.read(self.path)

    def checkpoints(self) -> list[Found]:
        """The checkpoints that exist, oldest first; ``listing`` also tells of those that cannot be read."""
        return list(self.listing().found)

    def candidates(self) -> list[Found]:
        """The same, newest first: what to try in turn when a job goes on."""
        return self.checkpoints()[::-1]

    def latest(self, chain: Chain | None = None) -> Found | None:
        """The newest checkpoint, of the runs of ``chain`` if that is given; what is damaged is passed over.

        OSError where the file system does not let one be read, which may be the newest.
        """
        listing = self.listing()
        for error in listing.unreadable.values():
            if isinstance(error, OSError):
                raise error
        return newest_of(listing.found, chain)

    def found(self, name: str) -> Found:
        """The checkpoint ``name``, looked at by its name alone; raises what ``read_commit`` raises."""
        return Found.read(self.path / name)

    # ---- saving: rank 0 of the run that has the claim ----

    def claim(self, run_id: str, *, patience_seconds: float = PATIENCE_SECONDS) -> Claim:
        """Make this folder the run's own, before it looks for what to go on from.

        What earlier runs have not finished is put aside, so that no commit of a run that is fenced from now on can
        appear after the look. CheckpointFenced if another run is alive.
        """
        claim = Claim(self.path, run_id, patience_seconds=patience_seconds)
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

    def begin(self, name: str, generation: str, lineage: Chain) -> Path:
        """Make the folder of a new checkpoint, for all ranks to write into; its path.

        A name that an abandoned run used is free again: what has it is renamed. CheckpointError if this run, or one
        that it goes on from, has saved under this name.
        """
        check_name(name)
        check_chain(lineage)
        clearing = self._clearing()
        if name in self._begun:
            raise CheckpointError(f"{self.path / name} is being saved already; wait for that, or discard it")
        clearing.vacate(name, lineage)
        try:
            make_folder(self.path / name)
        except FileExistsError:
            self._clearing()
            raise
        self._begun[name] = generation
        return self.path / name

    def put_meta(self, data: bytes) -> str:
        """Keep a description of tensors; its checksum, which is its name. What is there is not written again."""
        checksum = checksum_of(data)
        path = self._meta(checksum)
        try:
            if read_at_most(path, len(data)) == data:
                return checksum
        except FileNotFoundError:
            if not is_taken(path.parent):
                make_folder(path.parent)
        write_whole(path, data)  # also where the disk has changed it; what was linked to it stays as it was found
        return checksum

    def link_meta(self, name: str, file: str, checksum: str) -> None:
        """Put a description that is kept into a begun checkpoint, as ``file``."""
        assert name in self._begun
        link_or_copy(self._meta(checksum), self.path / name / file)

    def put_state(self, name: str, file: str, data: bytes) -> FileSummary:
        """Put a file of plain values into a begun checkpoint; what its commit has to say of it."""
        assert name in self._begun
        write_new(self.path / name / file, data)
        return FileSummary(num_bytes=len(data), checksum=checksum_of(data))

    def commit(self, name: str, commit: Commit) -> Found:
        """Make a begun checkpoint exist, when all ranks have written and synced their files and their names.

        Just before, the first time that a run does this, what is abandoned by it gets other names: newest first, so
        that the newest which is left is always one to go on from. Whatever is raised, ``discard`` comes next.
        """
        assert self._begun[name] == commit.generation
        path = self.path / name
        self._check_files(path, commit)
        sync_folder(path)
        if self._settled != commit.run_id:
            self._clearing().abandon(commit.lineage)
        try:
            with written_beside(path / COMMIT, commit.to_json()) as temporary:
                self._clearing()  # a run that comes after this puts the folder aside, and the file with it
                put_in_place(temporary, path / COMMIT)
            sync_folder(path)
        except (FileNotFoundError, FileExistsError):
            self._clearing()
            raise
        self._settled = commit.run_id
        del self._begun[name]
        return Found(path=path, commit=commit)

    @property
    def begun(self) -> tuple[str, ...]:
        """The checkpoints that this run has begun, and neither committed nor discarded."""
        return tuple(self._begun)

    def discard(self, name: str) -> None:
        """Give up a begun checkpoint; it is removed, or left to be pruned. CheckpointFenced where it is not ours."""
        assert name in self._begun
        del self._begun[name]
        self._clearing().give_up(name)  # it may have a COMMIT that could not be made durable

    def retain(self, rule: Retention, chain: Chain) -> list[Verdict]:
        """Remove the checkpoints that ``rule`` does not keep for a run of ``chain``; what became of each, and why.

        Called after a commit. It takes as long as the storage takes to remove files, and raises nothing that the
        storage or another run has done: what is not removed now is so the next time.
        """
        try:
            verdicts = retained(self.path, rule, chain, check=self._check)
            if any(not verdict.stays for verdict in verdicts) and not self._begun:
                remove_unused_metas(self.path)
        except (OSError, CheckpointError) as error:
            _logger.warning("old checkpoints in %s are not removed now: %s", self.path, error)
            return []
        for verdict in verdicts:
            if not verdict.stays:
                _logger.info("%s was removed: %s", verdict.found.path, verdict.why)
        return verdicts

    def prune_garbage(self) -> list[str]:
        """Remove what killed saves have left, and no committed checkpoint, abandoned or not; the names of all that.

        What cannot be removed is a warning, and is tried again the next time.
        """
        return self._clearing().prune(begun=self._begun)

    def _clearing(self) -> Clearing:
        """What may change names here; CheckpointFenced if this run may not any more."""
        self._check()
        assert self._claim is not None
        return Clearing(self._claim)

    def _check(self) -> None:
        assert self._claim is not None, "claim() comes before anything that changes names"
        self._claim.check()

    def _meta(self, checksum: str) -> Path:
        return self.path / _META / f"{checksum}.json"

    def _check_files(self, path: Path, commit: Commit) -> None:
        sizes = commit.sizes()
        for file, checksum in commit.metas.items():
            sizes[file] = _size_of(self._meta(checksum))
        for file, expected in sizes.items():
            size = _size_of(path / file)
            if size != expected or size < 0:
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
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
