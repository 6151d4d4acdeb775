"""ConfigWatcher: the newest valid config of one file, kept up to date by a thread of its own.

It parses and keeps; it applies nothing and knows nothing of ranks. File system events (watchdog) tell it of a change
within a millisecond or so. Where none arrive (network file systems, exhausted inotify limits) it looks at the file's
stamp every ``poll_seconds``. A file that is refused leaves the last valid config in place and is warned of once.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from .config import ElasticConfig
from .errors import ConfigError, ElasticError
from .folder_events import FolderEvents
from .records.files import FileStamp, read_at_most, stamp_of
from .records.json import MAX_BYTES
from .records.text import path_given

__all__ = ["ConfigWatcher"]

_logger = logging.getLogger(__name__)

_MOST_REMEMBERED = 256


class ConfigWatcher:
    """Watches one config file from ``start()`` (or ``with``) to ``close()``.

    ``settle_seconds`` is how long bad contents must stay before they are warned of: a file that is written in place
    is seen half-written in between. What is there at the end is warned of at once. Of several processes that watch one
    file, one ``warns``.
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
        self.on_news: Callable[[], None] = _nobody
        """Called on the watching thread when another config is held, or none will be any more."""
        self._poll_seconds = poll_seconds
        self._settle_seconds = settle_seconds
        self._changed = threading.Condition()  # guards everything below
        self._held: ElasticConfig | None = None
        self._held_at = 0.0
        self._refusal: str | None = None
        self._stamp: FileStamp | None = None
        self._seen: bytes | None = None
        self._warn_at: float | None = None
        self._warned: dict[bytes, None] = {}
        self._error: BaseException | None = None
        self._wake = threading.Event()
        self._warning_level = logging.WARNING if warns else logging.DEBUG
        self._events = FolderEvents(self._told_of_change) if use_events else None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look at the file now, then follow it on a thread."""
        if self._thread is not None:
            raise ElasticError(f"the watcher of {self.path} was started before; make a new one")
        self.refresh()
        self._thread = threading.Thread(target=self._run, name=f"elastic_ext watcher of {self.path.name}", daemon=True)
        self._wake.set()
        self._thread.start()

    def close(self) -> None:
        """Stop following; what is held stays readable. Closing twice is allowed."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():  # which may collect garbage
            self._thread.join(timeout=10.0)
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> ConfigWatcher:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def held(self) -> ElasticConfig | None:
        """The newest valid config seen in the file, None before the first. Raises if the watching thread has died."""
        if self._error is not None:
            raise ElasticError(f"the watcher of {self.path} died; its log has the traceback") from self._error
        return self._held

    @property
    def held_at(self) -> float:
        """When what is held was taken from the file, on the clock of ``time.monotonic``; 0 before the first."""
        return self._held_at

    @property
    def refusal(self) -> str | None:
        """Why the file's present contents were refused, None where they were not."""
        return self._refusal

    @property
    def is_alive(self) -> bool:
        """Whether the thread is following the file."""
        return self._thread is not None and self._thread.is_alive()

    def refresh(self) -> ElasticConfig | None:
        """Look at the file now, in the calling thread; gives what is held then."""
        self._look(must_read=True)
        return self.held

    def wait_for_version(self, version: int, timeout_seconds: float) -> bool:
        """Whether a config of at least ``version`` was held before the time was up."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._held is not None and self._held.version >= version, timeout=timeout_seconds
            )

    def wait_until_seen(self, data: bytes, timeout_seconds: float) -> bool:
        """Whether the file's contents, valid or not, were seen to be ``data`` before the time was up."""
        with self._changed:
            seen = _hash(data[: MAX_BYTES + 1])  # of a longer file no more is read
            return self._changed.wait_for(lambda: self._seen == seen, timeout=timeout_seconds)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                told = self._wake.wait(self._seconds_to_wait())
                self._wake.clear()
                if self._stop.is_set():
                    break
                if self._events is not None:
                    told |= self._events.follow(self.path)
                self._look(must_read=told)
            self._look(must_read=True, is_last=True)
        except Exception as error:  # the top of a thread: kept for the owner, who learns of it in ``held``
            self._die(error)

    def _told_of_change(self, must_follow: bool) -> None:
        """Look at once, on the thread that brings the event; the watcher's own is woken only for what is left to do."""
        try:
            self._look(must_read=True)
        except Exception as error:  # the top of a thread, as in _run
            self._die(error)
        if must_follow or self._warn_at is not None:
            self._wake.set()

    def _die(self, error: Exception) -> None:
        _logger.error("the watcher of %s died; changes of the file are not seen any more", self.path, exc_info=error)
        self._error = error
        self.on_news()

    def _seconds_to_wait(self) -> float:
        if self._warn_at is None:
            return self._poll_seconds
        return min(self._poll_seconds, max(self._warn_at - time.monotonic(), 0.0) + 0.001)

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
            self._warn_if_settled(is_last=is_last)
            self._changed.notify_all()

    def _forget_file(self) -> None:
        self._stamp = self._seen = self._refusal = self._warn_at = None

    def _take(self, data: bytes) -> None:
        fingerprint = _hash(data)
        if fingerprint == self._seen:
            return
        try:
            config = ElasticConfig.parse(data)
        except ConfigError as error:
            self._refuse(fingerprint, str(error))
            return
        self._seen = fingerprint
        self._refusal = self._warn_at = None
        if self._held is None or config.version != self._held.version or config.digest != self._held.digest:
            self._held, self._held_at = config, time.monotonic()
            self.on_news()

    def _refuse(self, fingerprint: bytes, reason: str) -> None:
        if fingerprint == self._seen:
            return
        self._seen = fingerprint
        self._refusal = reason
        self._warn_at = None if fingerprint in self._warned else time.monotonic() + self._settle_seconds

    def _warn_if_settled(self, *, is_last: bool) -> None:
        if self._warn_at is None or self._seen is None or (time.monotonic() < self._warn_at and not is_last):
            return
        self._warn_at = None
        self._warned[self._seen] = None
        if len(self._warned) > _MOST_REMEMBERED:
            self._warned.pop(next(iter(self._warned)))
        kept = "no config" if self._held is None else self._held.label
        _logger.log(self._warning_level, "%s was refused, %s stays: %s", self.path, kept, self._refusal)


def _nobody() -> None: ...


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
