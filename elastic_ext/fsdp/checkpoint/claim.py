"""Claim: one run's hold on its job's folder, so that two runs of one job never save there at once.

Two things hold it. A lock on RUN.lock, for as long as the process lives, refuses the second run where the file system
has locks that both see. RUN.json says which run came last: a run that finds another's id there has been fenced out,
whatever the file system can do.

Who only tidies the folder holds the lock too, and says in RUN.lock itself who it is: a run that starts waits for that.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from elastic_ext.errors import CheckpointDamaged, CheckpointError, CheckpointFenced
from elastic_ext.ranks.processes import do_in_forked_processes
from elastic_ext.records.files import is_locked, lock_holders, naming, read_at_most, try_lock, write_whole

from .lineage import check_id

__all__ = ["LOCK", "PATIENCE_SECONDS", "Claim", "Holder", "Visitor", "read_holder", "read_visitor", "sign"]

_logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 5.0
_LOOK_AGAIN_SECONDS = 0.05
_MOST_BYTES = 1 << 16
LOCK = "RUN.lock"
_HOLDER = "RUN.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """The run that came last to a job's folder, as RUN.json tells of it."""

    id: str
    host: str
    pid: int
    since: str
    """ISO 8601, by that host's clock."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Visitor:
    """Who had the lock of a job's folder last to tidy it, as RUN.lock tells of it until a run has the lock."""

    host: str
    pid: int
    since: str
    """ISO 8601, by that host's clock."""

    def __str__(self) -> str:
        return f"`elastic-ext ckpt prune`, process {self.pid} on {self.host}, since {self.since}"


def sign(lock: int) -> None:
    """Say in RUN.lock who holds ``lock``, which is a descriptor of it: this process, which is no run."""
    visitor = Visitor(host=socket.gethostname(), pid=os.getpid(), since=_now())
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps(asdict(visitor)).encode(), 0)


def read_visitor(folder: Path) -> Visitor | None:
    """Who has signed in ``folder``; None where nobody has since a run had it, or where that cannot be read."""
    try:
        return Visitor(**json.loads(read_at_most(folder / LOCK, _MOST_BYTES)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def read_holder(folder: Path) -> Holder | None:
    """Who has claimed ``folder`` last, None where nobody has; CheckpointDamaged where that cannot be read."""
    path = folder / _HOLDER
    try:
        record = json.loads(read_at_most(path, _MOST_BYTES))
        holder = Holder(**record)
        check_id("id", holder.id)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointDamaged(f"{path} does not say whose the folder is ({error}); start the job again") from None
    return holder


class Claim:
    """The hold of run ``run_id`` on ``folder``, taken when it is made; rank 0 has it, until ``release``.

    Another run that is alive is waited for a little, since it may be what this one was restarted for. CheckpointFenced
    says who it is where it stays. Who tidies the folder comes to an end, and is waited for longer: CheckpointError. Who
    does not take over acts for that very run, which had the folder and has died: CheckpointFenced where another has
    come since.
    """

    def __init__(
        self,
        folder: Path,
        run_id: str,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        visit_seconds: float = PATIENCE_SECONDS,
        takes_over: bool = True,
    ) -> None:
        check_id("a run's id", run_id)
        self.folder = folder
        self.run_id = run_id
        self._descriptor: int | None = None
        # A loader's worker may outlive this process, and must not hold its lock.
        do_in_forked_processes(self, Claim.release)
        self._descriptor = _lock(folder, patience_seconds, visit_seconds)
        try:
            if takes_over:
                write_whole(folder / _HOLDER, json.dumps(asdict(_myself(run_id)), indent=1).encode() + b"\n")
            else:
                self.check()
            self.since_ns = os.stat(folder / _HOLDER).st_mtime_ns  # by the file system's clock
        except (OSError, CheckpointError):
            self.release()
            raise

    def check(self) -> None:
        """CheckpointFenced if another run has come since. Asked before anything is renamed, removed or committed."""
        holder = read_holder(self.folder)
        if holder is None:
            raise CheckpointError(
                f"{self.folder / _HOLDER} is gone: the job's folder was removed or moved while the job runs; "
                "put it back, or start the job again"
            )
        if holder.id != self.run_id:
            raise CheckpointFenced(
                f"{self.folder} was taken over by another run of this job ({holder}): this run saves nothing there "
                "any more. End one of the two, or give one of them another name with job="
            )

    def release(self) -> None:
        """Let the next run in; what it finds is untouched. Can be called again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _myself(run_id: str) -> Holder:
    return Holder(id=run_id, host=socket.gethostname(), pid=os.getpid(), since=_now())


def _lock(folder: Path, patience_seconds: float, visit_seconds: float) -> int | None:
    """A descriptor that holds the lock, None where there are no locks.

    CheckpointFenced if another run keeps it, CheckpointError if somebody does who is none.
    """
    began, waiting = time.monotonic(), threading.Event()
    has_told = False
    try:
        while (descriptor := try_lock(folder / LOCK)) is None:
            waited, visitor = time.monotonic() - began, read_visitor(folder)
            if visitor is None and waited >= patience_seconds:
                if not is_locked(folder / LOCK):  # it may have become free just now, too
                    if waited < patience_seconds + visit_seconds:
                        continue
                    raise CheckpointError(_held_for_reading(folder))
                raise CheckpointFenced(_refusal(folder))
            if visitor is not None and waited >= visit_seconds:
                raise CheckpointError(f"{folder} is being tidied by {visitor}; wait until that has ended, or end it")
            if visitor is not None and waited >= patience_seconds and not has_told:
                _logger.warning("%s is being tidied by %s: this run waits for that", folder, visitor)
                has_told = True
            waiting.wait(_LOOK_AGAIN_SECONDS)
    except OSError as error:
        if error.errno != errno.ENOLCK:
            raise
        _logger.info("%s has no locks: a second run of this job would take its folder over, not be refused", folder)
        return None
    try:
        with naming(folder / LOCK):
            os.ftruncate(descriptor, 0)  # whoever has signed there has left
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _refusal(folder: Path) -> str:
    try:
        holder = read_holder(folder)
    except (CheckpointError, OSError):
        holder = None
    return (
        f"{folder} is in use by another run of this job ({holder or 'which has not said who it is'}); its lock is held "
        f"by {lock_holders(folder / LOCK)}. Wait until that has ended, end it, or give this one another name with job="
    )


def _held_for_reading(folder: Path) -> str:
    path = folder / LOCK
    return (
        f"no run has {folder}, but its lock {path} cannot be taken, since it is held by {lock_holders(path)}; end that "
        "process, and start this run again"
    )
