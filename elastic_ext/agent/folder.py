"""NodeFolders: where the things of one agent lie: its run directory on a disk, and its folder in memory.

<run directory>/          of this node alone; agents of one job on one machine have one each
  agent.lock              held by the agent as long as it lives
  agent.json ...          records/agent.py
<memory folder>/          goes with the agent; a later agent removes what a dead one has left
  staging/                copies of what is being saved, which outlive the workers
  pulses/                 how far each rank has come, written by it
  socket                  where the agent is spoken to
"""

from __future__ import annotations

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
    "keep_newest",
    "remove_memory_folder",
    "spare_cache",
    "with_cache",
]

_logger = logging.getLogger(__name__)

NODES = "nodes"
"""In the folder of a job: the run directories of its agents, by the name of the machine, where nobody gave them one."""
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
    """The folders of one agent, which holds them until it closes them."""

    def __init__(self, run_dir: Path, run_lock: int, memory: Path, memory_lock: int) -> None:
        self.run_dir = run_dir
        self.memory = memory
        self.staging = memory / STAGING
        self.pulses = memory / _PULSES
        self.memory_lock = memory_lock
        """A descriptor; as long as a process has it the folder in memory is left alone."""
        self._run_lock = run_lock

    @classmethod
    def make(cls, run_dir: Path, *, is_given: bool) -> NodeFolders:
        """An agent's folders; NodeTaken where ``run_dir`` was given and another agent has it."""
        held, run_lock = _hold_run_directory(run_dir, is_given=is_given)
        return cls(held, run_lock, *_make_memory_folder())

    def close(self) -> None:
        """Remove the folder in memory, and let others have the run directory."""
        remove_memory_folder(self.memory)
        os.close(self.memory_lock)
        os.close(self._run_lock)


def is_held(run_dir: Path) -> bool:
    """Whether an agent holds this run directory, on whatever machine; OSError where there is no telling."""
    return is_locked(run_dir / _LOCK)


def spare_cache() -> Path:
    """What stands in for the cache folder of a user who has no home folder, or may not write there."""
    return Path(tempfile.gettempdir()) / f"elastic_ext_of_{os.getuid()}"


def with_cache(environ: Mapping[str, str]) -> Mapping[str, str]:
    """``environ``, with another cache folder where run directories can be made in none; ValueError if there is none."""
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
    spare.mkdir(mode=0o700, exist_ok=True)
    if spare.stat().st_uid != os.getuid():
        raise ValueError(f"{why}; and {spare} is somebody else's: give a run directory, ELASTIC_EXT_RUN_DIR")
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
    """Say so where other users may write into a run directory that was there before."""
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
    """The run directory of this agent, and the lock that holds it: ``folder`` itself where somebody gave it.

    Otherwise ``folder``, or one with a number where other agents of this machine have those before. NodeTaken if
    ``folder`` was given and is held.
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
    """A new folder in memory and the lock that holds it; among temporary files where there is no such file system."""
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
    """Remove it with all that is in it."""
    shutil.rmtree(folder, ignore_errors=True)


def _candidates(folder: Path, *, is_given: bool) -> Iterator[Path]:
    yield folder
    if not is_given:
        yield from (folder.with_name(f"{folder.name}-{number}") for number in range(2, _MOST_ON_ONE_MACHINE))


def _remove_left(parent: Path) -> None:
    """Remove the folders of agents that have ended, and of whom nobody is left who could still want them."""
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
