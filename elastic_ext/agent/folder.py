"""NodeFolders: the folders of one agent: its run directory on a disk, and its folder in memory.

<run directory>/          of this node alone; agents of one job on one machine have one each
  agent.lock              locked by the agent as long as it lives
  agent.json ...          records/agent.py
<memory folder>/          removed as the agent ends; a later agent removes what a dead one has left
  staging/                copies of what is being saved, which outlive the workers
  pulses/                 how far each rank has come, written by it
  socket                  the agent's control socket (control.py)
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from elastic_ext.errors import in_words
from elastic_ext.records.files import is_locked, lock_holders, try_lock
from elastic_ext.records.run_dir import StartSettings

__all__ = [
    "NODES",
    "STAGING",
    "NodeFolders",
    "NodeTaken",
    "is_held",
    "is_own",
    "keep_newest",
    "remove_memory_folder",
    "spare_cache",
    "with_cache",
]

_logger = logging.getLogger(__name__)

NODES = "nodes"
"""The folder, inside a job's folder, of its agents' run directories by host name, where the user names none."""
STAGING = "staging"
_PULSES = "pulses"
_LOCK = "agent.lock"
_HELD = "held"
_PREFIX = "elastic_ext-"
_IN_MEMORY = Path("/dev/shm")
_MOST_ON_ONE_MACHINE = 1000


class NodeTaken(Exception):
    """Another agent has the run directory that was asked for."""


class NodeFolders:
    """The run directory and the memory folder of one agent, locked until ``close``."""

    def __init__(self, run_dir: Path, run_lock: int, memory: Path, memory_lock: int) -> None:
        self.run_dir = run_dir
        self.memory = memory
        self.staging = memory / STAGING
        self.pulses = memory / _PULSES
        self.memory_lock = memory_lock
        """The file descriptor of the memory folder's lock; while a process has it open, no agent removes the folder."""
        self._run_lock = run_lock

    @classmethod
    def make(cls, run_dir: Path, *, is_given: bool) -> NodeFolders:
        """The folders of a new agent; NodeTaken where the user gave ``run_dir`` and another agent has it locked."""
        held, run_lock = _hold_run_directory(run_dir, is_given=is_given)
        return cls(held, run_lock, *_make_memory_folder())

    def close(self) -> None:
        """Remove the folder in memory, and unlock the run directory."""
        remove_memory_folder(self.memory)
        os.close(self.memory_lock)
        os.close(self._run_lock)


def is_held(run_dir: Path) -> bool:
    """Whether an agent on any machine has this run directory locked; OSError where the storage cannot tell."""
    return is_locked(run_dir / _LOCK)


def spare_cache() -> Path:
    """The cache folder, among temporary files, for a user who has no home folder or may not write there."""
    return Path(tempfile.gettempdir()) / f"elastic_ext_of_{os.getuid()}"


def is_own(folder: Path) -> bool:
    """Whether this is a folder of this user, and no link: anybody can make one among temporary files."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def with_cache(environ: Mapping[str, str]) -> Mapping[str, str]:
    """``environ``, with ``spare_cache`` as the cache folder where run directories cannot be made in the user's own.

    ValueError where the spare one is another user's, or no folder.
    """
    if environ.get("ELASTIC_EXT_RUN_DIR"):
        return environ
    try:
        jobs = StartSettings.jobs_folder(environ)
        jobs.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(jobs, os.W_OK | os.X_OK):
            return environ
        why = f"{jobs} cannot be written"
    except (ValueError, OSError) as error:
        why = in_words(error)
    spare = spare_cache()
    with contextlib.suppress(FileExistsError):
        spare.mkdir(mode=0o700)
    if not is_own(spare):
        raise ValueError(f"{why}; and {spare} is no folder of this user: give a run directory, ELASTIC_EXT_RUN_DIR")
    _logger.warning("%s: the run directory is in %s; ELASTIC_EXT_RUN_DIR gives another one", why, spare)
    return {**environ, "XDG_CACHE_HOME": str(spare)}


def keep_newest(folder: Path, number: int) -> None:
    """Remove all but the ``number`` newest of what is in ``folder``, as far as that can be done."""
    try:
        runs = sorted(folder.iterdir(), key=lambda each: each.stat().st_mtime, reverse=True)
    except OSError:
        return
    for run in runs[number:]:
        shutil.rmtree(run, ignore_errors=True)


def _warn_of_others(run_dir: Path) -> None:
    """Log a warning where other users may write into the run directory."""
    status = run_dir.stat()
    mode, owner = stat.S_IMODE(status.st_mode), status.st_uid
    if owner not in (0, os.geteuid()):
        _logger.warning(
            "the run directory %s belongs to user %d, who can change the job's config there; use one of user %d",
            *(run_dir, owner, os.geteuid()),
        )
    elif mode & stat.S_IWOTH:
        _logger.warning(
            "the run directory %s has mode %04o, so that anybody can change the job's config there; do: chmod o-w %s",
            *(run_dir, mode, run_dir),
        )


def _hold_run_directory(folder: Path, *, is_given: bool) -> tuple[Path, int]:
    """The run directory that this agent has locked, and the lock's file descriptor.

    It is ``folder``, or where the user did not give ``folder`` and other agents have it, the first free one with a
    number. NodeTaken if ``folder`` was given and another agent has it.
    """
    for candidate in _candidates(folder, is_given=is_given):
        candidate.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = try_lock(candidate / _LOCK)
        if lock is not None:
            _warn_of_others(candidate)
            return candidate, lock
    raise NodeTaken(
        f"the run directory {folder} is held by another agent that is running: {lock_holders(folder / _LOCK)}. Stop "
        "that one, or give this one a directory of its own: ELASTIC_EXT_RUN_DIR"
    )


def _make_memory_folder() -> tuple[Path, int]:
    """A new memory folder and its lock's file descriptor; it is among temporary files where /dev/shm is of no use."""
    try:
        return _make_memory_folder_in(_IN_MEMORY)
    except OSError:  # there is none, it is read-only, or it is full
        return _make_memory_folder_in(Path(tempfile.gettempdir()))


def _make_memory_folder_in(parent: Path) -> tuple[Path, int]:
    _remove_left(parent)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        try:
            (folder / STAGING).mkdir(mode=0o700)
            (folder / _PULSES).mkdir(mode=0o700)
            lock = try_lock(folder / _HELD)
        except OSError:
            remove_memory_folder(folder)
            raise
        if lock is not None:  # else another agent has just taken it for one that was left
            return folder, lock


def remove_memory_folder(folder: Path) -> None:
    """Remove an agent's memory folder with all that is in it."""
    shutil.rmtree(folder, ignore_errors=True)


def _candidates(folder: Path, *, is_given: bool) -> Iterator[Path]:
    yield folder
    if not is_given:
        yield from (folder.with_name(f"{folder.name}-{number}") for number in range(2, _MOST_ON_ONE_MACHINE))


def _remove_left(parent: Path) -> None:
    """Remove the memory folders of this user's agents that have ended, where no process has their lock any more."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            if folder.stat().st_uid != os.getuid() or not (folder / _HELD).exists():
                continue
            lock = try_lock(folder / _HELD)
        except OSError:  # it goes away, or is somebody else's
            continue
        if lock is not None:
            _logger.info("removing %s, left by an agent that has ended", folder)
            remove_memory_folder(folder)
            os.close(lock)
