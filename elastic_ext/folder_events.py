"""FolderEvents: one call whenever something happens to the file that a path leads to.

The folders are watched, not the file: an atomic replacement is a new file moved over the old one. Every link on the
way counts too (Kubernetes swaps a link to publish a new ConfigMap), and so does a folder that goes and comes back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

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

__all__ = ["FolderEvents", "names_on_the_way"]

_logger = logging.getLogger(__name__)

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
    """Watches what ``follow`` was last given and calls ``told``, from a thread of watchdog's, at each change.

    ``told(True)`` means that the way to the file has changed: ``follow`` has to be called, on another thread.
    """

    def __init__(self, told: Callable[[bool], None]) -> None:
        self._told = told
        self._path: Path | None = None
        self._names: Mapping[str, frozenset[str]] = {}
        self._watches: dict[str, tuple[ObservedWatch, tuple[int, int]]] = {}
        self._gone: set[str] = set()  # folders that were deleted: their watches are dead, whatever is there now
        self._observer: BaseObserver | None = None
        self._gave_up = False

    def follow(self, path: Path) -> bool:
        """Watch the folders that ``path`` depends on now; True when they are others than before.

        Call it again after each change and now and then. True means that something may have been missed: look.
        """
        if self._gave_up:
            return False
        self._path = path
        try:
            return self._rewatch(names_on_the_way(path))
        except (OSError, RuntimeError) as error:  # RuntimeError: no more threads
            self._gave_up = True
            _logger.warning("no file system events for %s (%s): it is looked at now and then instead", path, error)
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
                self._told(True)
                return
            if name in self._names.get(folder, ()):
                self._told(self._is_other_way(touched))
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
    """Within it watchdog's threads of this observer may be stopped while they are being told of something.

    They say so as an error, which it is not: what they were told is dropped.
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
