"""Scripts and modules in processes of their own that need not import torch first: the nursery of the ranks forks them.

To a test each is what ``subprocess.Popen`` would give it, as far as tests ask. What is to be shown of a new interpreter
is shown with one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

from tests.support.ranks import RankPool

__all__ = ["Script", "begun", "forked_from"]

_POOLS: list[Callable[[], RankPool]] = []  # the last one's nursery forks what is begun


@contextmanager
def forked_from(pool: Callable[[], RankPool]) -> Iterator[None]:
    """In here what is begun has imported torch already."""
    _POOLS.append(pool)
    try:
        yield
    finally:
        _POOLS.remove(pool)


def begun(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    folder: Path | None = None,
    stderr: int | None = None,
    within: Sequence[str] = (),
    is_new: bool = False,
) -> Script | subprocess.Popen[str]:
    """``python argv...`` in a session of its own: forked where a pool was given, and else a new interpreter;
    in ``folder``, or else where this process is.

    What it writes to ``stderr`` goes to that descriptor, or else where the rest does. With ``is_new`` it is a new
    interpreter, which reads its environment as it starts; so it is with ``within``, which its command begins with.
    """
    if _POOLS and not within and not is_new:
        return Script(_POOLS[-1](), argv, folder=folder or Path.cwd(), env=env, stderr=stderr)
    return subprocess.Popen(
        [*within, sys.executable, *argv],
        cwd=folder,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if stderr is None else stderr,
        text=True,
        start_new_session=True,
    )


class Script:
    """A process that runs a script, or ``-m`` and a module; what it writes to either stream comes from ``stdout``,
    unless there is another descriptor for ``stderr``."""

    def __init__(
        self,
        pool: RankPool,
        argv: Sequence[str],
        *,
        folder: Path,
        env: Mapping[str, str],
        stderr: int | None = None,
    ) -> None:
        self._pool = pool
        given, giving = os.pipe()
        reading, written = os.pipe()
        try:
            streams = (given, written, written if stderr is None else stderr)
            self.pid = pool.start(argv, streams, folder=folder, env=env)
        finally:
            os.close(given)
            os.close(written)
        self.stdin, self.stdout = os.fdopen(giving, "w"), os.fdopen(reading)
        self.returncode: int | None = None
        self._end = os.pidfd_open(self.pid)

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
        self.wait()
        self.stdin.close()
        self.stdout.close()

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        if self.returncode is None and wait([self._end], 0):
            self.wait()
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended."""
        if self.returncode is None:
            if not wait([self._end], timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = self._pool.reap(self.pid)
            os.close(self._end)
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, None]:
        """What it still writes, and is not read, until it has ended."""
        self.stdin.close()
        parts: list[str] = []
        reader = threading.Thread(target=lambda: parts.append(self.stdout.read()), daemon=True)
        reader.start()
        reader.join(timeout)
        if reader.is_alive():
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        self.wait(timeout)
        return "".join(parts), None
