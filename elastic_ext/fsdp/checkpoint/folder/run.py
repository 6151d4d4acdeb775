"""Run: one life of a job's processes, and its place among the checkpoints in the job's folder.

All ranks have one and call it alike. The first rank alone looks into the folder and changes names there.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from elastic_ext.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, in_words
from elastic_ext.fsdp.checkpoint.storage import Storage
from elastic_ext.ranks.group import Ranks
from elastic_ext.ranks.world import World

from .claim import PATIENCE_SECONDS, Claim, newest_folder
from .commit import Chain, Commit, chain_after
from .job_folder import FOLDER, JobFolder
from .listing import Listing, is_set_aside, leading_to

__all__ = ["Run"]

_logger = logging.getLogger(__name__)
_NOT_BEGUN = "not-begun"
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG)
_MOST_STEPS = 20  # how many a message names


class Run:
    """This run of ``job``, with checkpoints under ``root``: which runs led to it, and its claim on the job's folder.

    It has the folder from ``claim`` to ``leave``.
    """

    def __init__(self, ranks: Ranks, storage: Storage, root: Path, job: str) -> None:
        self._ranks = ranks
        self._storage = storage
        self._root = root
        self._job = job
        self._folder: JobFolder | None = None  # once it is claimed
        self._claim: Claim | None = None  # on the first rank
        self._claimed_by = 0  # the seat of the rank that has the claim
        self._id = _NOT_BEGUN
        self._came_from: Commit | None = None
        self._saved_at: int | None = None  # the global step of this run's newest checkpoint
        self.on_commit: Callable[[], None] | None = None
        """Called on the first rank once a checkpoint is committed, on the thread that has done so; set before
        ``claim``."""

    @property
    def chain(self) -> Chain:
        """The runs that led to the present state of training, this one last."""
        return chain_after(self._came_from, run_id=self._id)

    @property
    def newest(self) -> Commit | None:
        """The COMMIT of the newest checkpoint that this process has committed, or else of the one that it went on from.

        On the first rank, since it alone commits; others know the one that training went on from.
        """
        committed = None if self._folder is None else self._folder.newest
        return committed or self._came_from

    @property
    def is_claimed(self) -> bool:
        """Whether this run has claimed the job's folder."""
        return self._folder is not None

    def claim(self) -> JobFolder:
        """Claim the job's folder for this run, and give it; CheckpointFenced where another run of the job is alive."""
        if self._folder is not None:
            return self._folder
        claims: list[Claim] = []
        folders: list[JobFolder] = []
        is_over = threading.Event()

        def take() -> tuple[str, str]:
            if self._ranks.rank > 0:
                return "", ""
            run_id = secrets.token_hex(6)
            most = self._storage.seconds / 2  # or it would look like slow storage
            with _refusing_unwritable(self._root):
                folder = JobFolder.find_or_make(self._root, self._job, now=datetime.now())
                claims.append(
                    folder.claim(run_id, patience_seconds=min(PATIENCE_SECONDS, most), visit_seconds=most),
                )
            if is_over.is_set():  # it came after all, when nobody waited for it any more
                claims[0].release()
                return "", ""
            folder.prune_garbage()
            folders.append(folder)
            return str(folder.path), run_id

        try:
            path, self._id = self._storage.together(take, "claiming the job's folder of checkpoints")[0]
            self._folder = folders[0] if folders else JobFolder(Path(path))
            self._folder.on_commit = self.on_commit
            self._claimed_by = self._ranks.world.names[0].seat
        finally:
            if self._folder is None:  # another try must not find it held by this very process
                is_over.set()
                for claim in claims:
                    claim.release()
        if claims:
            self._claim = claims[0]
            weakref.finalize(self, claims[0].release)  # a notebook's cell, run again
        return self._folder

    def tell(self) -> dict[str, Any]:
        """This run, as JSON for a rank that joins it."""
        came_from = self._came_from
        return {
            "folder": None if self._folder is None else str(self._folder.path),
            "id": self._id,
            "claimed_by": self._claimed_by,
            "came_from": None if came_from is None else came_from.to_json().decode(),
            "saved_at": self._saved_at,
        }

    def join(self, told: Mapping[str, Any]) -> None:
        """Be in the run that ``tell`` has told of, on a rank that has joined its ranks."""
        self._folder = None
        if told["folder"] is not None:
            self._folder = JobFolder(Path(told["folder"]))
            self._folder.on_commit = self.on_commit
        self._id, self._saved_at, self._claimed_by = told["id"], told["saved_at"], told["claimed_by"]
        came_from = told["came_from"]
        self._came_from = None if came_from is None else Commit.from_json(came_from.encode(), where="what was told")

    def take_world(self, world: World) -> None:
        """Have the folder's claim on the first of the ranks of ``world``; all of them call this.

        The process that had the claim releases it as it leaves, and is waited for. What it has committed last, the
        folder says. Where the first rank is the one that was, nothing is exchanged.
        """
        if self._folder is None or world.names[0].seat == self._claimed_by:
            return
        claims: list[Claim] = []
        folder = self._folder

        def take() -> None:
            if world.rank == 0 and self._claim is None:
                most = self._storage.seconds / 2
                claims.append(folder.claim(self._id, patience_seconds=min(PATIENCE_SECONDS, most), visit_seconds=most))
                with contextlib.suppress(OSError, CheckpointError):  # else the next one that is committed
                    latest = folder.latest(self.chain)
                    folder.newest = None if latest is None else latest.commit

        self._storage.together(take, "taking over the job's folder of checkpoints")
        self._claimed_by = world.names[0].seat
        if claims:
            self._claim = claims[0]
            weakref.finalize(self, claims[0].release)

    def leave(self) -> None:
        """Release the job's folder to other runs; another ``claim`` begins a new run, with a new id."""
        if self._claim is not None:
            self._claim.release()
        self._claim = self._folder = None
        self._id = _NOT_BEGUN
        self._saved_at = None

    def note_save(self, step: int) -> None:
        """Note that this run has saved a checkpoint of ``step``."""
        self._saved_at = step

    def check_is_next(self, step: int) -> None:
        """ValueError unless ``step`` is after the newest checkpoint that this run has saved, or else has loaded."""
        newest, did = self._saved_at, "saved"
        if newest is None and self._came_from is not None:
            newest, did = self._came_from.global_step, "gone on from"
        if newest is not None and step <= newest:
            raise ValueError(
                f"step is {step}, and this run has {did} step {newest}; allowed: a step after that. To go back, load "
                "an older checkpoint first; for another training that begins with these weights give another job="
            )

    def is_own(self, path: Path) -> bool:
        """Whether ``path`` is a checkpoint in one of this job's folders."""
        folder = path.resolve().parent
        return folder.parent == (self._root / FOLDER).resolve() and newest_folder([folder.name], self._job) is not None

    def go_on_from(self, commit: Commit) -> None:
        """Note that training was loaded from ``commit``: what is saved from here on follows that checkpoint.

        Where this run has saved already, it ends, and the next ``claim`` begins another one.
        """
        is_own = commit.run_id == self._id  # one of a save that was late, and of which nobody has heard
        self._came_from = commit
        if self._saved_at is not None or is_own:
            self.leave()

    def latest(self) -> Path | None:
        """The newest checkpoint that led to this run's state; of all the job's, before this run claims or loads."""
        is_somewhere = self._folder is not None or self._came_from is not None
        chain = self.chain if is_somewhere else None

        def find() -> str | None:
            folder = self._found()
            found = None if folder is None else folder.latest(chain)
            return None if found is None else str(found.path)

        path = self._storage.together(find, "looking for the newest checkpoint")[0]
        return None if path is None else Path(path)

    def candidates(self, *, falls_back: bool) -> list[Path]:
        """The job's checkpoints, newest first. One whose COMMIT is damaged is passed over if ``falls_back``.

        One of a newer format is not: it may be where training stands.
        """

        def find() -> list[str]:
            folder = self._found()
            if folder is None:
                return []
            listing = Listing.counting(folder.path)
            for name, error in listing.unreadable.items():
                if not falls_back or not listing.found or not isinstance(error, CheckpointDamaged):
                    raise error  # an OSError may pass, too
                _logger.warning("checkpoint %s is passed over: %s", name, error)
            for found in listing.found:
                if is_set_aside(found.name):
                    _logger.warning(
                        "%s was abandoned for a run that has saved no checkpoint: training may go on from it",
                        found.path,
                    )
            return [str(found.path) for found in reversed(listing.found)]

        return [Path(path) for path in self._storage.together(find, "looking for checkpoints")[0]]

    def behind(self, *, step: int | None, before: int) -> list[Path]:
        """The checkpoints that lead to where this run is, newest first: that of ``step``, or all ``before`` a step.

        CheckpointNotFound, with the steps that there are, where none is. One whose COMMIT is damaged is passed over,
        unless it is the one that is asked for.
        """

        def find() -> list[str]:
            folder = self._found()
            if folder is None:
                return []
            listing = folder.listing()
            for name, error in listing.unreadable.items():
                if isinstance(error, OSError) or name == f"step_{step}":
                    raise error
                if step is None:
                    _logger.warning("checkpoint %s is passed over: %s", name, error)
            led = leading_to(self.chain, listing.found)
            asked = [one for one in led if one.commit.global_step < before]
            if step is not None:
                asked = [one for one in led if one.commit.global_step == step][:1]
            if not asked:
                raise CheckpointNotFound(_why_none([one.commit.global_step for one in led], step, before))
            return [str(one.path) for one in asked]

        return [Path(path) for path in self._storage.together(find, "looking for checkpoints to go back to")[0]]

    def _found(self) -> JobFolder | None:
        """The job's folder on rank 0, None on other ranks or where there is none."""
        if self._ranks.rank > 0:
            return None
        return self._folder or JobFolder.find_afresh(self._root, self._job)


@contextlib.contextmanager
def _refusing_unwritable(root: Path) -> Iterator[None]:
    """Raise CheckpointError, which says what to do, in place of errors about what may not be written."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        raise CheckpointError(
            f"checkpoints cannot be kept in {root}: {in_words(error)}; give a shared_storage_path in which this "
            "process may write"
        ) from None


def _why_none(steps: Sequence[int], step: int | None, before: int) -> str:
    """Why there is no checkpoint to go back to, where there are those of ``steps``, newest first."""
    asked = f"of step {step}" if step is not None else f"before step {before}"
    known = list(dict.fromkeys(steps))
    there = ", ".join(map(str, sorted(known[:_MOST_STEPS])))
    more = f", and {len(known) - _MOST_STEPS} older ones" if len(known) > _MOST_STEPS else ""
    return (
        f"there is no checkpoint {asked} to go back to among those that led to here; there are "
        f"{f'those of steps {there}{more}' if known else 'none so far'}"
    )
