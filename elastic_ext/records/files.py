"""Files written whole: the only place that renames files.

A reader sees the old contents or the new ones, never a part, whenever a writer dies. Nothing here knows what the
bytes mean.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

try:
    import fcntl
except ImportError:  # Windows has no flock; one writer per file is then up to the user
    fcntl = None  # type: ignore[assignment]

try:
    import pwd
except ImportError:
    pwd = None  # type: ignore[assignment]

__all__ = [
    "FILE_MODE",
    "FileStamp",
    "NewFiles",
    "NotRegularError",
    "append_line",
    "exclusive",
    "is_locked",
    "is_taken",
    "is_temporary",
    "link_or_copy",
    "lock_holders",
    "look_afresh",
    "make_folder",
    "move_folder",
    "naming",
    "open_regular",
    "put_in_place",
    "read_at_most",
    "remove_folder",
    "stamp_of",
    "sync_folder",
    "temporary_beside",
    "try_lock",
    "write_new",
    "write_whole",
]

_logger = logging.getLogger(__name__)

FILE_MODE = 0o664
"""The mode of new files, before the umask; whatever the umask is, only owner and group may write to them."""
_FOLDER_MODE = 0o775

_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.EINVAL})
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})
_LOOK_SECONDS = 1.0  # how long somebody who only looks whether a lock is held is waited for, at most
_LOCK_POLL_SECONDS = 0.01
_TELL_SECONDS = 5.0
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileStamp:
    """A file's inode, size and times, of which one changes whenever the file is written or replaced."""

    inode: int
    size: int
    modified_ns: int
    changed_ns: int


def write_whole(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace ``path`` with ``data`` in one step; the old contents stay when anything fails.

    A symbolic link stays a link: the file that it leads to is replaced. With ``durable`` the new contents survive a
    power cut once this returns. OSError is the file system's own, or says that ``path`` is no regular file.
    """
    target = Path(os.path.realpath(path))
    mode = _mode_of(target)
    temporary = temporary_beside(target)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
    try:
        with naming(target), open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        sync_folder(target.parent)


def temporary_beside(path: Path) -> Path:
    """A new temporary name in the folder of ``path``; a file that is left under such a name is garbage."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def is_temporary(name: str) -> bool:
    """Whether ``name`` is one of ``temporary_beside``: such a file is garbage once nobody writes it."""
    return _TEMPORARY.fullmatch(name) is not None


def write_new(path: Path, data: bytes) -> None:
    """Write the file ``path``, which nothing has the name of yet: FileExistsError otherwise, and all stays as it is.

    The contents survive a power cut once this returns; the name does when the caller has synced the folder.
    """
    with NewFiles() as new:
        new.write(path, data)
        new.sync()
        new.put_in_place()


class NewFiles:
    """Files that nothing has the names of yet: written one after another, then synced, then put in place.

    The disk works on the first of them while the last is written, so that syncing them together takes less than each
    by itself. What was not put in place is removed when the ``with`` ends. If the folder of a file is moved meanwhile
    and another one gets its name, ``put_in_place`` fails: the written contents went with the moved folder.
    """

    def __init__(self) -> None:
        self._open: list[tuple[Path, int]] = []
        self._waiting: dict[Path, Path] = {}  # path -> where its contents are so far

    def begin(self, path: Path) -> int:
        """Begin the file ``path``; gives a descriptor to write its contents to."""
        temporary = temporary_beside(path)
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
        self._open.append((path, file))
        self._waiting[path] = temporary
        return file

    def write(self, path: Path, data: bytes) -> None:
        """Write the whole contents of the file ``path``."""
        file = self.begin(path)
        with naming(path), open(file, "wb", closefd=False) as opened:
            opened.write(data)

    def sync(self) -> None:
        """Make the contents of all files durable; nothing is written to them afterwards."""
        for path, file in self._open:
            with naming(path):
                os.fsync(file)
        self._close()

    def put_in_place(self) -> None:
        """Give the synced files their names; FileExistsError if one is taken. The caller syncs the folder."""
        assert not self._open, "sync() comes before put_in_place()"
        for path, temporary in list(self._waiting.items()):
            put_in_place(temporary, path)
            del self._waiting[path]

    def _close(self) -> None:
        while self._open:
            path, file = self._open.pop()
            with naming(path):
                os.close(file)

    def __enter__(self) -> NewFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            with contextlib.suppress(OSError):
                self._close()
        for temporary in self._waiting.values():
            with contextlib.suppress(OSError):
                os.unlink(temporary)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """A context whose OSErrors name ``path`` where they name no file, as those of calls on descriptors do not.

    It belongs around closing a descriptor too: NFS may tell only then that something was not written.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def link_or_copy(source: Path, path: Path) -> None:
    """Give the file ``source`` a second name, or a copy that is durable where the file system has no hard links.

    FileExistsError if something has the name ``path``. The caller syncs the folder.
    """
    try:
        os.link(source, path, follow_symlinks=False)
    except FileExistsError:
        if not os.path.samestat(os.lstat(source), os.lstat(path)):  # as in put_in_place
            raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with naming(source):
            data = source.read_bytes()
        write_new(path, data)


def put_in_place(temporary: Path, path: Path) -> None:
    """Give the finished file ``temporary`` the name ``path``, which nothing has yet: FileExistsError otherwise.

    The caller has synced the file, and syncs the folder afterwards, once for all that it puts there. Whatever fails,
    ``temporary`` stays. Where a file system has no hard links, ``path`` is looked at before the rename: there alone
    a second writer that comes in between is replaced.
    """
    try:
        os.link(temporary, path, follow_symlinks=False)
    except FileExistsError:
        if not os.path.samestat(os.lstat(temporary), os.lstat(path)):  # NFS may answer so to a link that it has made
            raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _refuse_taken(path)
        os.rename(temporary, path)
        return
    os.unlink(temporary)


def is_taken(path: Path) -> bool:
    """Whether anything has the name ``path``, be it a link that leads nowhere; OSError where that cannot be told."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def move_folder(folder: Path, path: Path) -> None:
    """Give ``folder`` the name ``path`` beside it, for good; FileExistsError if something has that name."""
    _refuse_taken(path)  # a rename would replace an empty folder
    os.rename(folder, path)
    sync_folder(path.parent)


def remove_folder(folder: Path) -> None:
    """Remove ``folder`` with all that is in it; links in it are removed, and what they lead to is not."""
    shutil.rmtree(folder)


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` survive a power cut, where its file system can promise that."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with naming(folder):
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:
                raise
        finally:
            os.close(descriptor)


def look_afresh(folder: Path) -> None:
    """Have this machine ask the storage for the names in ``folder``, and not answer from its cache.

    An NFS client does so once it has changed something there itself: so a file is made for a moment. Nothing happens
    where that cannot be done, as on storage that may only be read.
    """
    path = temporary_beside(folder / "look")
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE))
        os.unlink(path)


def append_line(path: Path, line: str) -> None:
    """Add one line at the end of ``path`` in a single write, so that readers see whole lines.

    OSError where it cannot be written; also where it is a pipe that nobody reads, and waiting would never end. A part
    that a full disk has taken is taken out again, unless another line has come behind it.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o644)
    try:
        data = line.encode() + b"\n"
        num_written = num_first = os.write(descriptor, data)
        if num_first == len(data):
            return
        is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        begin = os.lseek(descriptor, 0, os.SEEK_CUR) - num_first if is_regular else 0
        try:
            while num_written < len(data):  # a disk that is nearly full takes a part of it, and then says so
                num_written += os.write(descriptor, data[num_written:])
        except OSError:
            if is_regular and os.fstat(descriptor).st_size == begin + num_written:
                os.ftruncate(descriptor, begin)
            raise
    finally:
        os.close(descriptor)


class NotRegularError(OSError):
    """A path to be read is no regular file, but a folder, a pipe or a circle of links; trying again does not help."""


def read_at_most(path: Path, limit: int) -> bytes:
    """The first ``limit`` + 1 bytes of a regular file, so that the caller sees if there are more than ``limit``.

    Raises what ``open_regular`` does.
    """
    with naming(path), open_regular(path) as file:
        return file.read(limit + 1)


def open_regular(path: Path) -> IO[bytes]:
    """A regular file, opened for reading.

    NotRegularError for a folder, a pipe, or links that lead round in a circle; OSError where it cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer must not block the reader
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotRegularError(f"{path} is a link that leads round in a circle") from None
        raise
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, descriptor)
        with naming(path):
            mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise NotRegularError(f"{path} is not a regular file")
        undo.pop_all()
    return open(descriptor, "rb")


def stamp_of(path: Path) -> FileStamp | None:
    """The stamp of the file that ``path`` leads to, None where there is no file."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return FileStamp(
        inode=status.st_ino, size=status.st_size, modified_ns=status.st_mtime_ns, changed_ns=status.st_ctime_ns
    )


def make_folder(path: Path) -> None:
    """Make a folder and those above it, where they are not there: whatever the umask, nobody else may write there."""
    for each in reversed([path, *path.parents]):
        if not each.is_dir():
            each.mkdir(mode=_FOLDER_MODE, exist_ok=True)


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold ``path`` as a lock among processes of this machine; waits until it is free, and logs who holds it."""
    descriptor = _open_lock(path)
    try:
        began, waiting, has_told = time.monotonic(), threading.Event(), False
        while fcntl is not None and not _flock(descriptor, path, is_shared=False):
            if not has_told and time.monotonic() - began > _TELL_SECONDS:
                _logger.warning("waiting for the lock %s, which is held by %s", path, lock_holders(path))
                has_told = True
            waiting.wait(_LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def try_lock(path: Path) -> int | None:
    """Take ``path`` as a lock among processes; gives a descriptor that holds it until closed, None if another does.

    The lock file is its owner's alone, so that nobody who can only read the folder can keep its owner out; a lock that
    is only looked at is waited for. OSError with errno.ENOLCK where the file system (or the machine) has no locks, and
    a PermissionError where the file is another user's. A child process that is forked has the descriptor too, and holds
    the lock as long as it has.
    """
    descriptor, is_held = _open_lock(path), False
    try:
        deadline, waiting = time.monotonic() + _LOOK_SECONDS, threading.Event()
        while not (is_held := _flock(descriptor, path, is_shared=False)):
            if time.monotonic() >= deadline or not _flock(descriptor, path, is_shared=True):
                break
            with naming(path):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # nobody has it alone: somebody looks, which is soon over
            waiting.wait(_LOCK_POLL_SECONDS)
    finally:
        if not is_held:
            os.close(descriptor)
    return descriptor if is_held else None


def is_locked(path: Path) -> bool:
    """Whether some process holds ``path`` as a lock now; takes it but for a moment. OSError as in ``try_lock``."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _flock(descriptor, path, is_shared=True)
    finally:
        os.close(descriptor)


def lock_holders(path: Path) -> str:
    """Which processes of this machine hold ``path`` as a lock, in words, as far as the kernel tells."""
    try:
        status = os.stat(path)
        lines = Path("/proc/locks").read_text(errors="replace").splitlines()
    except OSError:
        return "a process that cannot be named here"
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    fields = [line.split() for line in lines]
    holders = [
        f"{_process_in_words(int(each[4]))}{' (for reading)' if each[3] == 'READ' else ''}"
        for each in fields
        if len(each) > 5 and each[1] == "FLOCK" and each[5] == place and each[4].lstrip("-").isdigit()
    ]
    return ", ".join(holders) or "a process of another machine, or one that has just ended"


def _process_in_words(pid: int) -> str:
    if pid <= 0:  # in another namespace
        return "a process of another container"
    process = Path("/proc", str(pid))
    try:
        name, user = (process / "comm").read_text(errors="replace").strip(), _user_in_words(process.stat().st_uid)
    except OSError:
        return f"process {pid}"
    return f"process {pid} ({name}) of {user}"


def _user_in_words(number: int) -> str:
    if pwd is None:
        return f"user {number}"
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"


def _open_lock(path: Path) -> int:
    """A descriptor of a lock file that nobody but its owner can open, made where there is none."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # NFS locks only what it may write to
    except PermissionError as error:
        try:
            owner = os.stat(path).st_uid
        except OSError:
            raise error from None
        if owner == os.geteuid():
            raise
        words = f"the lock belongs to {_user_in_words(owner)}, who alone can hold it"
        raise PermissionError(errno.EACCES, words, str(path)) from None
    try:
        with naming(path):
            status = os.fstat(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    if status.st_uid == os.geteuid() and status.st_mode & 0o077:
        with contextlib.suppress(OSError):  # as on a file system without modes
            os.fchmod(descriptor, 0o600)
    return descriptor


def _flock(descriptor: int, path: Path, *, is_shared: bool) -> bool:
    """Take a lock without waiting; gives whether it was free. OSError with ENOLCK where there are no locks."""
    try:
        if fcntl is None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), str(path))
        with naming(path):
            fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), str(path)) from None
        raise
    return True


def _refuse_taken(path: Path) -> None:
    if is_taken(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def _mode_of(target: Path) -> int | None:
    """The mode that a replaced file keeps, None where there is no file yet; OSError for what is no regular file."""
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):  # a rename would put a file in the place of a device or a pipe
        raise OSError(f"{target} is not a regular file")
    return stat.S_IMODE(mode)
