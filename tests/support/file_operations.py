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
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

__all__ = ["SLOW_SECONDS", "FileOperations", "Gate", "StaleView", "Strike", "WhatIsStale"]

Strike = Literal["kill", "tear", "hang", "slow", "full", "broken"]
"""What happens to an operation in the place of what it was to do: the process dies; the file that it was to make
durable is cut in half, and the process dies; it never returns; it is done, but late; the disk is full; the disk is
broken."""

SLOW_SECONDS = 0.05
_REACHED_WITHIN_SECONDS = 60.0  # on a busy machine
_FORGOTTEN_AFTER_SECONDS = 90.0  # a test that fails leaves its gate shut, and a process ends when it has saved

WhatIsStale = Literal["listings", "names", "names for ever"]
"""What a client does not know of others' doing until it has made a name in that folder itself: what folders list; also
what a name leads to; that, and making a name does not help."""

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


class StaleView:
    """This process from now on as a client of ``folder`` that goes on from what it remembers: what other clients, which
    write it down in ``log``, make there is not known here."""

    def __init__(self, folder: Path, log: Path, client: str, what: WhatIsStale) -> None:
        self._folder = os.path.realpath(folder)
        self._log = log
        self._client = client
        self._what = what
        self._looked_ns: dict[int, int] = {}  # when this client has last changed something in a folder, by its number
        self._file = os.open(log / client, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._real_stat = os.stat
        for name in ("listdir", "stat", "lstat"):
            watched = self._watched_list if name == "listdir" else self._watched_look
            setattr(os, name, watched(getattr(os, name)))
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _PATHS or event in ("os.listdir", "fcntl.flock"):
            return
        paths = [path for places in _PATHS[event] if self._is_ours(path := _path_of(arguments, *places))]
        makes = event in ("os.mkdir", "os.link", "os.rename")
        if event == "open":
            makes = bool(paths) and bool(arguments[2] & os.O_CREAT) and not os.access(paths[0], os.F_OK)
        for place, path in enumerate(paths):
            is_new = makes and place == len(paths) - 1
            self._refuse_unknown(os.path.dirname(path) if is_new else path)
            if is_new or event in ("os.remove", "os.rmdir", "os.rename"):
                number = self._number_of(os.path.dirname(path))
                self._looked_ns[number] = time.monotonic_ns()
                if is_new:
                    line = f"{self._looked_ns[number]} {number} {os.path.basename(path)}\n"
                    os.write(self._file, line.encode())

    def _watched_list(self, call: Callable[..., list[str]]) -> Callable[..., list[str]]:
        def listdir(path: Any = ".") -> list[str]:
            folder, names = _path_of((path,), 0, None), call(path)
            if not self._is_ours(folder):
                return names
            number, unknown = self._number_of(folder), self._unknown()
            return [name for name in names if (number, name) not in unknown]

        return listdir

    def _watched_look(self, call: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def stat(path: Any, **options: Any) -> os.stat_result:
            if not isinstance(path, int) and options.get("dir_fd") is None:
                self._refuse_unknown(os.path.abspath(os.fsdecode(path)))
            return call(path, **options)

        return stat

    def _is_ours(self, path: str) -> bool:
        return path == self._folder or path.startswith(f"{self._folder}/")

    def _number_of(self, folder: str) -> int:
        """What a folder keeps when it gets another name; 0 of one that is not there."""
        try:
            return self._real_stat(folder).st_ino
        except FileNotFoundError:
            return 0

    def _refuse_unknown(self, path: str) -> None:
        if self._what == "listings" or not self._is_ours(path):
            return
        unknown, at = self._unknown(), path
        while at != self._folder:
            if (self._number_of(os.path.dirname(at)), os.path.basename(at)) in unknown:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            at = os.path.dirname(at)

    def _unknown(self) -> set[tuple[int, str]]:
        """What others have made since this client has looked, by the number of its folder."""
        unknown = set()
        for client in sorted(set(os.listdir(self._log)) - {self._client}):
            for line in (self._log / client).read_text().splitlines():
                made_ns, number, name = line.split(" ", 2)
                looked_ns = 0 if self._what == "names for ever" else self._looked_ns.get(int(number), 0)
                if int(made_ns) > looked_ns:
                    unknown.add((int(number), name))
        return unknown


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
