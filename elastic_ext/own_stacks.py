"""OwnStacks: a process writes the stacks of its threads when it is asked to, through a pipe with a name.

A thread of its own does that, as Python code: what it sees of the others is whole. It comes to its turn wherever the
others are but in native code that keeps Python to itself; of such a process faulthandler, which a signal has write
whatever there is, may tell something.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

__all__ = ["OwnStacks", "ask_for_stacks"]

_JOIN_SECONDS = 1.0
_MOST_FRAMES = 100


class OwnStacks:
    """Waits to be asked through ``pipe``, and writes to the open ``file``."""

    def __init__(self, pipe: Path, file: int) -> None:
        """OSError where there can be no such pipe."""
        self._path = pipe
        self._file = file
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe, 0o600)
        self._pipe = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)
        self._inode = os.fstat(self._pipe).st_ino
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic_ext stacks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Be asked no more."""
        self._is_over.set()
        if self._has_pipe():
            os.write(self._pipe, b".")
        self._thread.join(_JOIN_SECONDS)
        self._path.unlink(missing_ok=True)
        if self._has_pipe() and not self._thread.is_alive():
            os.close(self._pipe)

    def _has_pipe(self) -> bool:
        """Whether the script has left the pipe open: one that becomes a daemon closes all, and opens others."""
        try:
            return os.fstat(self._pipe).st_ino == self._inode
        except OSError:
            return False

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the script's threads
        with contextlib.suppress(OSError):  # the script has closed the pipe
            while os.read(self._pipe, 64) and not self._is_over.is_set():
                data = _stacks().encode(errors="replace")
                with contextlib.suppress(OSError):  # the disk is full: who asks finds nothing
                    os.write(self._file, data)


def ask_for_stacks(pipe: Path) -> bool:
    """Ask whoever waits at ``pipe``; False where nobody does."""
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.write(descriptor, b".") == 1
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _stacks() -> str:
    """Those of all threads but the one that asks, as faulthandler writes them."""
    lines = []
    for ident, frame in sys._current_frames().items():  # documented; the name says that it is for debugging
        if ident == threading.get_ident():
            continue
        lines.append(f"Thread 0x{ident:016x} (most recent call first):")
        found = traceback.extract_stack(frame, limit=None)[-_MOST_FRAMES:]
        lines += [f'  File "{each.filename}", line {each.lineno} in {each.name}' for each in reversed(found)]
        lines.append("")
    return "\n".join(lines) + "\n"
