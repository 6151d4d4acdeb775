"""Reading: how somebody who reads a checkpoint keeps others from removing it meanwhile.

A reader puts a mark into the checkpoint's folder, a small file of its own, before it looks for COMMIT, and touches it
from time to time. Who removes checkpoints looks for marks both before COMMIT is taken away and after that: whichever of
the two comes first, one of them sees the other. A reader that dies leaves its mark, which means nothing any more once
nobody has touched it for ``LAPSE_SECONDS``, by the file system's clock.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import socket
import threading
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType

from elastic_ext.records.files import FILE_MODE, read_at_most, temporary_beside

__all__ = ["LAPSE_SECONDS", "Reader", "Reading", "has_lapsed", "is_mark", "now_ns_in", "readers_of"]

_logger = logging.getLogger(__name__)

LAPSE_SECONDS = 300.0  # more than a client of NFS may take to see that a file was touched, and a reader to touch it
_TOUCH_SECONDS = 30.0
_CLOSE_SECONDS = 5.0
_MOST_BYTES = 4096
_MARK = re.compile(r"\.reading-[0-9a-f]{16}\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """Who reads, as a mark tells of it."""

    host: str
    pid: int
    since: str
    """ISO 8601, by that host's clock."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class Reading:
    """The mark of this process on the checkpoint in ``folder``, from when this is made until it is closed.

    Where it cannot be put, as on storage that may only be read, nothing is marked, and the checkpoint can be read all
    the same.
    """

    def __init__(self, folder: Path, *, touch_seconds: float = _TOUCH_SECONDS) -> None:
        self._path = folder / f".reading-{secrets.token_hex(8)}.json"
        self._touch_seconds = touch_seconds
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self._put()
        except OSError as error:
            _logger.info("that %s is being read cannot be marked there: %s", folder, error)
            return
        self._thread = threading.Thread(target=self._keep, name="elastic_ext reading", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take the mark away. Twice is allowed."""
        thread, self._thread = self._thread, None
        self._is_over.set()
        if thread is not None:
            thread.join(_CLOSE_SECONDS)  # which storage that does not answer may outlast; the mark lapses then

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
        while not self._is_over.wait(self._touch_seconds):
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
    """Who reads the checkpoint in ``folder`` now; OSError where that cannot be told.

    By the clock of the file system; one who may write nothing there gives the time by another.
    """
    now_ns = now_ns_in(folder) if now_ns is None else now_ns
    marks = [folder / name for name in sorted(os.listdir(folder)) if is_mark(name)]
    readers = (_reader_at(mark, now_ns) for mark in marks)
    return [reader for reader in readers if reader is not None]


def has_lapsed(touched_ns: int, now_ns: int) -> bool:
    """Whether a mark that was last touched then is a dead reader's."""
    return now_ns - touched_ns > LAPSE_SECONDS * 1e9


def now_ns_in(folder: Path) -> int:
    """The time, by the clock of the file system that has ``folder``.

    It makes a file there for a moment, so that a client of NFS does not go on from what it remembers of the folder.
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
    """Whose mark this is, None where it is gone or has lapsed."""
    try:
        if has_lapsed(os.stat(mark).st_mtime_ns, now_ns):
            return None
        return Reader(**json.loads(read_at_most(mark, _MOST_BYTES)))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, RecursionError):  # not all of it is there yet
        return Reader(host="a host that has not said its name", pid=0, since="of late")
