"""The newest valid value in a file, such as a config, kept up to date by a thread of its own; and the events of a file
system that tell of a change.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from watchdog.events import (
    DirCreatedEvent,
    DirDeletedEvent,
    DirMovedEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver, ObservedWatch

from elastic_ext.errors import ElasticError
from elastic_ext.ranks.deadlines import OwnedThread
from elastic_ext.records.files import FileStamp, read_at_most, stamp_of
from elastic_ext.records.json import MAX_BYTES
from elastic_ext.records.text import path_given

from .elastic_config import ElasticConfig

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ConfigWatcher", "FileWatcher", "FolderEvents", "names_on_the_way"]

_logger = logging.getLogger(__name__)


# --- one call whenever something happens to the file that a path leads to --------------------------------------------
# The folders are watched, not the file: an atomic replacement is a new file moved over the old one. Every link on the
# way counts too (Kubernetes swaps a link to publish a new ConfigMap), and so does a folder that goes and comes back.

_EMITTERS_LOGGER = "watchdog.observers.inotify"
_MOST_LINKS = 40  # what the kernel follows before it calls a chain of links a loop
# What is asked of the kernel. Opening, reading and each write in place would wake every watcher of the folder for
# nothing; a file written in place is seen when it is closed.
_CHANGES: list[type[FileSystemEvent]] = [
    FileCreatedEvent,
    DirCreatedEvent,
    FileMovedEvent,
    DirMovedEvent,
    FileDeletedEvent,
    DirDeletedEvent,
    FileClosedEvent,
]


class FolderEvents(FileSystemEventHandler):
    """Watches the folders that a path depends on, and calls ``on_change`` from a thread of watchdog's at each change.

    ``on_change(True)`` means that the way to the file has changed: ``follow`` has to be called, on another thread.
    """

    def __init__(self, on_change: Callable[[bool], None]) -> None:
        self._on_change = on_change
        self._path: Path | None = None
        self._names: Mapping[str, frozenset[str]] = {}
        self._watches: dict[str, tuple[ObservedWatch, tuple[int, int]]] = {}
        self._gone: set[str] = set()  # folders that were deleted: their watches are dead, whatever is there now
        self._observer: BaseObserver | None = None
        self._gave_up = False

    def follow(self, path: Path) -> bool:
        """Watch the folders that ``path`` depends on now; gives True when they are others than before.

        Call it again after each change and now and then. True means that something may have been missed: look.
        """
        if self._gave_up:
            return False
        self._path = path
        try:
            return self._rewatch(names_on_the_way(path))
        except (OSError, RuntimeError) as error:  # RuntimeError: no more threads
            self._gave_up = True
            _logger.warning(
                "no file system events can be received for %s (%s): the file is looked at now and then instead",
                path,
                error,
            )
            return True

    def close(self) -> None:
        """Stop watching; no call comes after this returns."""
        self._gave_up = True
        if self._observer is not None:
            with _stopping(self._observer):
                self._observer.stop()
            self._observer.join(timeout=10.0)
            self._observer = None
        self._watches.clear()

    def on_any_event(self, event: FileSystemEvent) -> None:
        """Called by watchdog for everything that happens in a watched folder."""
        for touched in (os.fsdecode(event.src_path), os.fsdecode(event.dest_path)):
            folder, name = os.path.split(touched)
            if event.event_type == "deleted" and touched in self._names:
                self._gone.add(touched)
                self._on_change(True)
                return
            if name in self._names.get(folder, ()):
                self._on_change(self._is_other_way(touched))
                return

    def _is_other_way(self, touched: str) -> bool:
        """Whether what happened to ``touched`` changed the way to the file; cheap where no link is involved."""
        if len(self._names) == 1 and self._path is not None and touched == str(self._path):
            return os.path.islink(touched)
        return self._path is None or names_on_the_way(self._path) != self._names

    def _rewatch(self, names: Mapping[str, frozenset[str]]) -> bool:
        wanted = {folder: identity for folder in names if (identity := _identity(folder)) is not None}
        gone = {folder for folder in self._watches if folder in self._gone}
        have = {folder: identity for folder, (_, identity) in self._watches.items()}
        if wanted == have and names == self._names and not gone:
            return False
        if self._observer is None:
            self._observer = Observer()
            self._observer.daemon = True
            self._observer.start()
        self._names = names
        for folder in [folder for folder, identity in have.items() if wanted.get(folder) != identity or folder in gone]:
            with _stopping(self._observer):
                self._observer.unschedule(self._watches.pop(folder)[0])
            self._gone.discard(folder)
        for folder, identity in wanted.items():
            if folder not in self._watches:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # gone again: tried at the next call
                    self._watches[folder] = (self._schedule(folder), identity)
        return True

    def _schedule(self, folder: str) -> ObservedWatch:
        assert self._observer is not None
        return self._observer.schedule(self, folder, recursive=False, event_filter=_CHANGES)


@contextlib.contextmanager
def _stopping(observer: BaseObserver) -> Iterator[None]:
    """A context in which the threads of an observer of watchdog's are stopped, without the errors that they may log.

    A thread that has an event in hand then drops it and logs an error, though nothing is wrong.
    """
    threads = {emitter.ident for emitter in observer.emitters}

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread not in threads or record.funcName != "queue_events"

    logger = logging.getLogger(_EMITTERS_LOGGER)
    logger.addFilter(is_of_others)
    try:
        yield
    finally:
        logger.removeFilter(is_of_others)


def names_on_the_way(path: Path) -> dict[str, frozenset[str]]:
    """Which names in which folders decide what ``path`` leads to: each link on the way, and the file itself."""
    found: dict[str, set[str]] = {}
    here = path.anchor
    parts = list(path.parts[1:])
    num_links = 0
    while parts:
        name = parts.pop(0)
        if name == "..":
            here = os.path.dirname(here)
            continue
        step = os.path.join(here, name)
        target = _link_target(step)
        if target is not None or not parts:
            found.setdefault(here, set()).add(name)
        if target is None:
            here = step
            continue
        num_links += 1
        if num_links > _MOST_LINKS:
            break
        if os.path.isabs(target):
            here, target = path.anchor, os.path.relpath(target, path.anchor)
        parts = [*Path(target).parts, *parts]
    return {folder: frozenset(names) for folder, names in found.items()}


def _link_target(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:  # not a link, or not there
        return None


def _identity(folder: str) -> tuple[int, int] | None:
    try:
        status = os.stat(folder)
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISDIR(status.st_mode) else None


# --- the newest valid value in one file, kept up to date by a thread of its own --------------------------------------
# It parses and keeps; it applies nothing and knows nothing of ranks. File system events (watchdog) tell it of a change
# within a millisecond or so. Where none arrive (network file systems, exhausted inotify limits) it looks at the file's
# stamp every ``poll_seconds``. A file that is refused leaves the last valid value in place and is warned of once.

_MOST_REMEMBERED = 256
_CLOSE_SECONDS = 10.0


class _Versioned(Protocol):
    """A value that a watched file holds."""

    @property
    def version(self) -> int: ...


_Value = TypeVar("_Value", bound=_Versioned)


class FileWatcher(Generic[_Value]):
    """The newest valid value in one file, followed from ``start()`` (or ``with``) to ``close()``.

    ``settle_seconds`` is how long bad contents must stay before they are warned of: a file that is written in place is
    seen half-written in between. What is there at the end is warned of at once. Of several processes that watch one
    file, one ``warns``.

    The newest is what was last valid, whatever its version. ``on_news`` is called on the thread that finds the news:
    the watcher's own, watchdog's, or that of who calls ``refresh``.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        poll_seconds: float = 1.0,
        settle_seconds: float = 0.2,
        use_events: bool = True,
        warns: bool = True,
    ) -> None:
        self.path = path_given("path", path).absolute()
        self.on_news: Callable[[], None] = _do_nothing
        """Called when there is another value, and when watching has failed, on the thread that finds that.

        That is the watcher's own, watchdog's, or that of a caller of ``refresh``. For another value the thread has the
        watcher's lock: the call must not wait for anything that another thread does with this watcher.
        """
        self._poll_seconds = poll_seconds
        self._settle_seconds = settle_seconds
        self._changed = threading.Condition()  # guards everything below
        self._newest: _Value | None = None
        self._newest_at = 0.0
        self._refusal: str | None = None
        self._stamp: FileStamp | None = None
        self._seen_hash: bytes | None = None  # of the file's contents when last read, valid or not
        self._warn_at: float | None = None  # when contents that were refused are warned of, if they are still there
        self._warned: dict[bytes, None] = {}  # hashes of contents that were warned of, oldest first
        self._error: BaseException | None = None
        self._wake = threading.Event()
        self.warns = warns
        """Whether this watcher, of those of one file, is the one to warn of contents that are refused."""
        self._events = FolderEvents(self._look_at_change) if use_events else None
        name = f"elastic_ext watcher of {self.path.name}"
        self._thread = OwnedThread(self._run, name=name, wake=self._wake.set)

    def _parsed(self, data: bytes) -> _Value:
        """The value that the file's contents are; ValueError says why they are none."""
        raise NotImplementedError

    def _are_same(self, one: _Value, other: _Value) -> bool:
        """Whether two values of one version are the same."""
        raise NotImplementedError

    def _kept_in_words(self) -> str:
        """What stays in use while the file's contents are refused."""
        raise NotImplementedError

    def start(self) -> None:
        """Look at the file now, then follow it on a thread."""
        if self._thread.is_started:
            raise ElasticError(f"the watcher of {self.path} was started before; make a new one")
        self.refresh()
        self._wake.set()
        self._thread.start()

    def close(self) -> None:
        """Stop following; the newest value stays readable. Closing twice is allowed."""
        self._thread.close(_CLOSE_SECONDS)
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def newest(self) -> _Value | None:
        """The newest valid value seen in the file, None before the first. Raises once watching has failed."""
        if self._error is not None:
            raise ElasticError(f"watching {self.path} has failed; the log has the traceback") from self._error
        return self._newest

    @property
    def newest_at(self) -> float:
        """When the newest value was taken from the file, on the clock of ``time.monotonic``; 0 before the first."""
        return self._newest_at

    @property
    def refusal(self) -> str | None:
        """Why the file's present contents were refused, None where they were not."""
        return self._refusal

    @property
    def is_alive(self) -> bool:
        """Whether the watching thread is following the file."""
        return self._thread.is_alive()

    def refresh(self) -> _Value | None:
        """Look at the file now, in the calling thread; gives the newest value then."""
        self._look(must_read=True)
        return self.newest

    def wait_for_version(self, version: int, timeout_seconds: float) -> bool:
        """Whether a value of at least ``version`` came before the time was up."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._newest is not None and self._newest.version >= version, timeout=timeout_seconds
            )

    def wait_until_seen(self, data: bytes, timeout_seconds: float) -> bool:
        """Whether the file's contents, valid or not, were seen to be ``data`` before the time was up."""
        with self._changed:
            seen = _hash(data[: MAX_BYTES + 1])  # of a longer file no more is read
            return self._changed.wait_for(lambda: self._seen_hash == seen, timeout=timeout_seconds)

    def _run(self) -> None:
        try:
            while not self._thread.stopping.is_set():
                is_changed = self._wake.wait(self._seconds_to_wait())
                self._wake.clear()
                if self._thread.stopping.is_set():
                    break
                if self._events is not None:
                    is_changed |= self._events.follow(self.path)
                self._look(must_read=is_changed)
            self._look(must_read=True, is_last=True)
        except Exception as error:  # the top of a thread: kept for the owner, who learns of it in ``newest``
            self._fail(error)

    def _look_at_change(self, must_follow: bool) -> None:
        """Look at the file at once, on the thread that brings the event; wake the watcher's own only if needed."""
        try:
            self._look(must_read=True)
        except Exception as error:  # the top of a thread, as in _run
            self._fail(error)
        if must_follow or self._warn_at is not None:
            self._wake.set()

    def _fail(self, error: Exception) -> None:
        _logger.error("watching %s has failed; changes of the file are not taken any more", self.path, exc_info=error)
        self._error = error
        self.on_news()

    def _seconds_to_wait(self) -> float:
        warn_at = self._warn_at  # read once: another thread may find the file put right meanwhile
        if warn_at is None:
            return self._poll_seconds
        return min(self._poll_seconds, max(warn_at - time.monotonic(), 0.0) + 0.001)

    def _look(self, *, must_read: bool, is_last: bool = False) -> None:
        with self._changed:
            try:
                stamp = stamp_of(self.path)
                if stamp is None:
                    self._forget_file()
                elif must_read or stamp != self._stamp:
                    data = read_at_most(self.path, MAX_BYTES)
                    self._stamp = stamp
                    self._take(data)
            except OSError as error:
                self._stamp = None
                self._refuse(_hash(str(error).encode()), f"it cannot be read: {error}")
            self._warn_if_lasting(is_last=is_last)
            self._changed.notify_all()

    def _forget_file(self) -> None:
        self._stamp = self._seen_hash = self._refusal = self._warn_at = None

    def _take(self, data: bytes) -> None:
        fingerprint = _hash(data)
        if fingerprint == self._seen_hash:
            return
        try:
            found = self._parsed(data)
        except ValueError as error:
            self._refuse(fingerprint, str(error))
            return
        self._seen_hash = fingerprint
        self._refusal = self._warn_at = None
        newest = self._newest
        if newest is None or found.version != newest.version or not self._are_same(found, newest):
            self._newest, self._newest_at = found, time.monotonic()
            self.on_news()

    def _refuse(self, fingerprint: bytes, reason: str) -> None:
        if fingerprint == self._seen_hash:
            return
        self._seen_hash = fingerprint
        self._refusal = reason
        self._warn_at = None if fingerprint in self._warned else time.monotonic() + self._settle_seconds

    def _warn_if_lasting(self, *, is_last: bool) -> None:
        if self._warn_at is None or self._seen_hash is None or (time.monotonic() < self._warn_at and not is_last):
            return
        self._warn_at = None
        self._warned[self._seen_hash] = None
        if len(self._warned) > _MOST_REMEMBERED:
            self._warned.pop(next(iter(self._warned)))
        level = logging.WARNING if self.warns else logging.DEBUG
        _logger.log(level, "%s was refused, %s: %s", self.path, self._kept_in_words(), self._refusal)


class ConfigWatcher(FileWatcher[ElasticConfig]):
    """The newest valid config of one file."""

    def _parsed(self, data: bytes) -> ElasticConfig:
        return ElasticConfig.parse(data)

    def _are_same(self, one: ElasticConfig, other: ElasticConfig) -> bool:
        return one.digest == other.digest

    def _kept_in_words(self) -> str:
        newest = self._newest
        return "the config in force stays" if newest is None else f"and {newest.label}, valid before, is kept"


def _do_nothing() -> None: ...


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
