"""Who may do what in a job's folder: the run that holds it, the readers that keep a checkpoint from being removed, and
the folder's name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

from elastic_ext.errors import CheckpointDamaged, CheckpointError, CheckpointFenced
from elastic_ext.ranks.deadlines import OwnedThread
from elastic_ext.ranks.processes import do_in_forked_processes
from elastic_ext.records.files import (
    FILE_MODE,
    is_locked,
    lock_holders,
    naming,
    read_at_most,
    temporary_beside,
    try_lock,
    write_whole,
)
from elastic_ext.records.json import JsonRecord
from elastic_ext.records.run_dir import given_run_id

from .commit import check_id

__all__ = [
    "LAPSE_SECONDS",
    "LOCK",
    "PATIENCE_SECONDS",
    "Claim",
    "Holder",
    "Reader",
    "Reading",
    "Visitor",
    "check_job",
    "folder_name",
    "has_lapsed",
    "is_mark",
    "job_name",
    "newest_folder",
    "now_ns_in",
    "quoted",
    "read_holder",
    "read_visitor",
    "readers_of",
    "sign",
]

_logger = logging.getLogger(__name__)


# --- one run's hold on its job's folder, so that two runs of one job never save there at once ------------------------
# Two things hold it. A lock on RUN.lock, for as long as the process lives, refuses the second run where the file system
# has locks that both see. RUN.json says which run came last: a run that finds another's id there has been fenced out,
# whatever the file system can do.
#
# Who only tidies the folder holds the lock too, and says in RUN.lock itself who it is: a run that starts waits for
# that.

PATIENCE_SECONDS = 5.0
_LOOK_AGAIN_SECONDS = 0.05
_MOST_CLAIM_BYTES = 1 << 16
LOCK = "RUN.lock"
_HOLDER = "RUN.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder(JsonRecord):
    """The run that was the last to claim a job's folder: the contents of RUN.json."""

    id: str
    host: str
    pid: int
    since: str
    """When the run claimed the folder: ISO 8601, by the clock of its host."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    def check_read(self) -> None:
        check_id("id", self.id)


@dataclass(frozen=True, kw_only=True, slots=True)
class Visitor(JsonRecord):
    """The process that last locked a job's folder to tidy it: RUN.lock's contents until a run locks it."""

    host: str
    pid: int
    since: str
    """When the process locked the folder: ISO 8601, by the clock of its host."""

    def __str__(self) -> str:
        return f"`elastic-ext ckpt prune`, process {self.pid} on {self.host}, since {self.since}"


def sign(lock: int) -> None:
    """Write into RUN.lock, whose descriptor is ``lock``, that this process holds it, which is no run."""
    visitor = Visitor(host=socket.gethostname(), pid=os.getpid(), since=_now())
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps(asdict(visitor)).encode(), 0)


def read_visitor(folder: Path) -> Visitor | None:
    """The process that RUN.lock names as tidying ``folder``, or the last to; None where it names none."""
    try:
        return Visitor.from_json(read_at_most(folder / LOCK, _MOST_CLAIM_BYTES).decode())
    except (OSError, ValueError):
        return None


def read_holder(folder: Path) -> Holder | None:
    """The run that claimed ``folder`` last, None where none has; CheckpointDamaged where RUN.json is damaged."""
    path = folder / _HOLDER
    try:
        return Holder.from_json(read_at_most(path, _MOST_CLAIM_BYTES).decode())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CheckpointDamaged(f"{path} does not say whose the folder is ({error}); start the job again") from None


class Claim:
    """The hold of run ``run_id`` on a job's ``folder``, taken when it is made; rank 0 has it, until ``release``.

    Another run that is alive is waited for ``patience_seconds``, since this one may have been restarted for it, and
    CheckpointFenced says who it is where it stays. A process that tidies the folder is waited for ``visit_seconds``:
    CheckpointError. Without ``takes_over`` the claim acts for the run ``run_id``, which had the folder and has died:
    CheckpointFenced where another run has come since.
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
        """CheckpointFenced if another run has taken the folder since. Called before each rename, removal or commit."""
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
        """Release the folder to the next run, and leave its files as they are. Twice is allowed."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _myself(run_id: str) -> Holder:
    return Holder(id=run_id, host=socket.gethostname(), pid=os.getpid(), since=_now())


def _lock(folder: Path, patience_seconds: float, visit_seconds: float) -> int | None:
    """A descriptor that holds the folder's RUN.lock, None where the file system has no locks.

    CheckpointFenced if another run keeps it, CheckpointError if a process does that is no run.
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
        _logger.info(
            "the file system of %s has no locks: a second run of this job would take over the job's folder, and not be "
            "refused",
            folder,
        )
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


# --- how somebody who reads a checkpoint keeps others from removing it meanwhile -------------------------------------
# A reader puts a mark into the checkpoint's folder, a small file of its own, before it looks for COMMIT, and touches it
# from time to time. Who removes checkpoints looks for marks both before COMMIT is taken away and after that: whichever
# of the two comes first, one of them sees the other. A reader that dies leaves its mark, which means nothing any more
# once nobody has touched it for ``LAPSE_SECONDS``, by the file system's clock.

LAPSE_SECONDS = 300.0  # more than a client of NFS may take to see that a file was touched, and a reader to touch it
_TOUCH_SECONDS = 30.0
_CLOSE_SECONDS = 5.0
_MOST_MARK_BYTES = 4096
_MARK = re.compile(r"\.reading-[0-9a-f]{16}\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader(JsonRecord):
    """The process that reads a checkpoint: the contents of its mark."""

    host: str
    pid: int
    since: str
    """When the process began to read: ISO 8601, by the clock of its host."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class Reading:
    """A mark that keeps the checkpoint in ``folder`` from being removed while this process reads it.

    The mark is there from when this is made until ``close``. Where it cannot be put, as on storage that may only be
    read, nothing is marked, and the checkpoint can be read all the same.
    """

    def __init__(self, folder: Path, *, touch_seconds: float = _TOUCH_SECONDS) -> None:
        self._path = folder / f".reading-{secrets.token_hex(8)}.json"
        self._touch_seconds = touch_seconds
        self._thread = OwnedThread(self._keep, name="elastic_ext reading")
        try:
            self._put()
        except OSError as error:
            _logger.info("%s has no mark that keeps others from removing it while it is read: %s", folder, error)
            return
        self._thread.start()

    def close(self) -> None:
        """Remove the mark. Twice is allowed."""
        self._thread.close(_CLOSE_SECONDS)  # which storage that does not answer may outlast; the mark lapses then

    def __enter__(self) -> Reading:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _put(self) -> None:
        reader = Reader(
            host=socket.gethostname(),
            pid=os.getpid(),
            since=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
        try:
            with contextlib.suppress(OSError):  # a full disk: that the mark is there is what counts
                os.write(file, json.dumps(asdict(reader)).encode())
        finally:
            os.close(file)

    def _keep(self) -> None:
        while not self._thread.stopping.wait(self._touch_seconds):
            with contextlib.suppress(OSError):  # storage that does not answer now may do so the next time
                self._touch()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _touch(self) -> None:
        try:
            os.utime(self._path)
        except FileNotFoundError:  # somebody has taken it for a dead one's, after this process had stood still
            self._put()


def is_mark(name: str) -> bool:
    """Whether a file of this name is a reader's mark."""
    return _MARK.fullmatch(name) is not None


def readers_of(folder: Path, now_ns: int | None = None) -> list[Reader]:
    """The processes that read the checkpoint in ``folder`` now, by their marks; OSError where that cannot be told.

    The time is the file system's; a caller that may write nothing there gives ``now_ns`` by another clock.
    """
    now_ns = now_ns_in(folder) if now_ns is None else now_ns
    marks = [folder / name for name in sorted(os.listdir(folder)) if is_mark(name)]
    readers = (_reader_at(mark, now_ns) for mark in marks)
    return [reader for reader in readers if reader is not None]


def has_lapsed(touched_ns: int, now_ns: int) -> bool:
    """Whether a mark was last touched so long before ``now_ns`` that its reader is taken for dead."""
    return now_ns - touched_ns > LAPSE_SECONDS * 1e9


def now_ns_in(folder: Path) -> int:
    """The time in nanoseconds, by the clock of the file system that has ``folder``.

    The call makes a file there for a moment, so that a client of NFS does not go on from what it remembers of the
    folder.
    """
    path = temporary_beside(folder / "now")
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
    try:
        with contextlib.suppress(OSError):  # a full disk, which is when much is removed; its making has a time too
            os.write(file, b"?")
        return os.fstat(file).st_mtime_ns
    finally:
        os.close(file)
        os.unlink(path)


def _reader_at(mark: Path, now_ns: int) -> Reader | None:
    """The reader that a mark names, None where the mark is gone or has lapsed."""
    try:
        if has_lapsed(os.stat(mark).st_mtime_ns, now_ns):
            return None
        return Reader.from_json(read_at_most(mark, _MOST_MARK_BYTES).decode())
    except FileNotFoundError:
        return None
    except ValueError:  # not all of it is there yet
        return Reader(host="a host that has not said its name", pid=0, since="of late")


# --- what a job is called, and the folder on shared storage that is called after it ----------------------------------

_MOST_CHARACTERS = 100
_MOST_NAME_BYTES = 200  # of a file name's 255, less the time and what else is put to it
_STAMP = re.compile(r"_(\d{8}-\d{6})")
_STAMP_CHARACTERS = 16


def job_name(argument: str | None, run_id: str | None, script: str | None) -> str:
    """The name under which a job finds its checkpoints again when it is restarted.

    ``argument`` if it is given; else the launcher's ``run_id``, unless torchrun has made it up; else the script's name,
    with a mark of where it lies, so that two scripts train.py do not share a folder. ValueError says what cannot be a
    name, and where there is none: a notebook has no script of its own.
    """
    if argument is not None:
        return check_job(argument)
    if name := given_run_id(run_id):
        return check_job(name)
    if not script:
        raise ValueError(
            "the job has no name, and no script to be called after (a notebook, or python -c); give job=, by which its "
            "checkpoints are found again"
        )
    path = Path(script).absolute()
    mark = hashlib.sha256(str(path).encode(errors="surrogateescape")).hexdigest()[:8]
    return check_job(f"{path.stem[: _MOST_CHARACTERS // 4]}-{mark}")


def check_job(job: str) -> str:
    """``job`` itself; ValueError if it cannot be a job's name."""
    if not isinstance(job, str):
        raise ValueError(f"job is {job!r}; allowed: text")
    if not 1 <= len(job) <= _MOST_CHARACTERS or len(quoted(job)) > _MOST_NAME_BYTES:
        raise ValueError(
            f"job is {job[:120]!r}, which has {len(job)} characters and takes {len(quoted(job))} in a folder's name; "
            f"allowed: 1 to {_MOST_CHARACTERS} characters that take at most {_MOST_NAME_BYTES}; give a shorter name"
        )
    return job


def quoted(job: str) -> str:
    """``job`` as part of a file's name: all but letters, digits and ``_.-~`` as %XX, and so a first dot."""
    text = quote(job, safe="", errors="surrogateescape")
    return "%2E" + text[1:] if text.startswith(".") else text


def folder_name(job: str, now: datetime) -> str:
    """The name of the folder that ``job`` gets at ``now``; unlike jobs get unlike names, whatever they hold."""
    return f"{quoted(job)}_{now:%Y%m%d-%H%M%S}"


def newest_folder(names: Iterable[str], job: str) -> str | None:
    """The newest among ``names`` of folders that was made for exactly this job, None where there is none."""
    own = (name for name in names if name[:-_STAMP_CHARACTERS] == quoted(job) and _is_stamp(name[-_STAMP_CHARACTERS:]))
    return max(own, default=None)


def _is_stamp(text: str) -> bool:
    return _STAMP.fullmatch(text) is not None
