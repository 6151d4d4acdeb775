"""The file operations of this process in one folder: counted, and one of them struck, for tests of what then is left.

Python's audit events tell of most of them before they happen; what has none (``fsync``, ``writev``) is watched where
the os module has it. Neither can be taken back, so this is for processes that end with their test.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

__all__ = ["SLOW_SECONDS", "FileOperations", "Gate", "Strike"]

Strike = Literal["kill", "tear", "hang", "slow", "full", "broken"]
"""What happens to an operation in the place of what it was to do: the process dies; the file that it was to make
durable is cut in half, and the process dies; it never returns; it is done, but late; the disk is full; the disk is
broken."""

SLOW_SECONDS = 0.05
_REACHED_WITHIN_SECONDS = 60.0  # on a busy machine
_FORGOTTEN_AFTER_SECONDS = 90.0  # a test that fails leaves its gate shut, and a process ends when it has saved

_PATHS = {  # of each event: the places of its paths among its arguments, each with that of its folder's descriptor
    "open": ((0, None),),
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((0, 2), (1, 3)),
    "os.mkdir": ((0, 2),),
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.listdir": ((0, None),),
    "os.scandir": ((0, None),),
    "os.chmod": ((0, 2),),
    "os.truncate": ((0, None),),
    "fcntl.flock": ((0, None),),
    "shutil.rmtree": ((0, 1),),
}


class FileOperations:
    """Those of this process in ``folder`` from now on, or those whose words hold ``like``. The one number ``at``, from
    0, is struck, or each in a range of numbers; a ``strike`` that is a function is called before the operation."""

    def __init__(
        self,
        folder: Path,
        strike: Strike | Callable[[], object] = "kill",
        at: int | range | None = None,
        *,
        like: str = "",
    ) -> None:
        self.seen: list[str] = []
        """Each in words, in their order."""
        self._folder = os.path.realpath(folder)
        self._strike = strike
        self._at = at if isinstance(at, range) else range(0) if at is None else range(at, at + 1)
        self._like = like
        self._is_on = True
        sys.addaudithook(self._hear)
        for name in ("fsync", "writev"):
            setattr(os, name, self._watched(name, getattr(os, name)))

    def end(self) -> list[str]:
        """Watch no longer; what was seen."""
        self._is_on = False
        return self.seen

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_on and event in _PATHS:
            paths = [_path_of(arguments, *places) for places in _PATHS[event]]
            self._pass(event, paths, None)

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(descriptor: int, *arguments: Any) -> Any:
            if self._is_on:
                self._pass(f"os.{name}", [_path_of((descriptor,), 0, None)], descriptor)
            return call(descriptor, *arguments)

        return watched

    def _pass(self, event: str, paths: Sequence[str], descriptor: int | None) -> None:
        if not any(path == self._folder or path.startswith(f"{self._folder}/") for path in paths):
            return
        words = f"{event} {' -> '.join(os.path.relpath(path, self._folder) for path in paths)}"
        if self._like not in words:
            return
        self.seen.append(words)
        if len(self.seen) - 1 not in self._at:
            return
        if callable(self._strike):
            self._is_on = False
            self._strike()
            return
        if self._strike == "tear" and descriptor is not None:
            self._is_on = False
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
        if self._strike in ("kill", "tear"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._strike == "hang":
            threading.Event().wait()
        if self._strike == "slow":
            threading.Event().wait(SLOW_SECONDS)
        if self._strike == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), paths[0])
        if self._strike == "broken":
            raise OSError(errno.EIO, os.strerror(errno.EIO), paths[0])


class Gate:
    """Holds up the first operation in ``folder`` whose words hold ``like``, until it is opened."""

    def __init__(self, folder: Path, *, like: str) -> None:
        self._reached, self._opened = threading.Event(), threading.Event()
        FileOperations(folder, self._hold_up, 0, like=like)

    def wait_until_reached(self) -> None:
        """Until the operation is held up."""
        assert self._reached.wait(_REACHED_WITHIN_SECONDS), "no such operation came"

    def open(self) -> None:
        """Let it go on."""
        self._opened.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def _hold_up(self) -> None:
        self._reached.set()
        self._opened.wait(_FORGOTTEN_AFTER_SECONDS)


def _path_of(arguments: Sequence[Any], place: int, folder_place: int | None) -> str:
    """The whole path that an event tells of, be it as a descriptor or below one."""
    path = arguments[place]
    if path is None:
        return ""
    if isinstance(path, int):
        return _path_behind(path)
    if hasattr(path, "fileno"):
        return _path_behind(path.fileno())
    text = os.fsdecode(path)
    folder = -1 if folder_place is None or folder_place >= len(arguments) else arguments[folder_place]
    if isinstance(folder, int) and folder >= 0 and not os.path.isabs(text):
        return os.path.join(_path_behind(folder), text)
    return os.path.abspath(text)


def _path_behind(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
