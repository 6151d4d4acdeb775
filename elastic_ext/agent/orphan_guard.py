"""The warden: a process that ends the workers of an agent which has died, and keeps what they had staged.

    python -m elastic_ext.agent.orphan_guard FOLDER SECONDS        started by the agent, with a pipe as standard input

The agent writes a line of JSON when it has started workers, [[pid, start ticks], ...], and ["done"] as it ends. Where
the pipe ends before that the agent was killed: the workers are told to end and have SECONDS for it, what they had
staged is made a checkpoint, and the folder in memory is removed.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

from elastic_ext.ranks.processes import ProcessIdentity, end_groups

from .folder import STAGING, remove_memory_folder

__all__ = ["Warden", "main"]

_logger = logging.getLogger(__name__)

_DONE = ["done"]
_END_SECONDS = 5.0


class Warden:
    """The agent's handle of the warden process, which ends the agent's workers should the agent be killed."""

    def __init__(self, memory: Path, memory_lock: int, *, patience_seconds: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(memory), str(patience_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(memory_lock,),  # so that nobody takes the folder for one that was left
            start_new_session=True,
        )

    def watch(self, workers: Iterable[ProcessIdentity]) -> None:
        """Tell the warden process which workers run now; they replace those told before."""
        self._say([[worker.pid, worker.start_ticks] for worker in workers])

    def dismiss(self) -> None:
        """End the warden process, as the agent ends in order; its workers are left alone."""
        self._say(_DONE)
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(_END_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    def _say(self, row: list[object] | list[str] | list[list[int]]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(row).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:  # somebody has ended it
            _logger.warning("the warden process, which ends the workers if this agent is killed, has ended: %s", error)


def main(arguments: Sequence[str]) -> int:
    """The warden process: wait for the agent's end; if the agent was killed, end its workers and keep staged copies."""
    memory, patience_seconds = Path(arguments[0]), float(arguments[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # it goes when the agent does
        signal.signal(number, signal.SIG_IGN)
    workers = _last_told(sys.stdin.buffer)
    if workers is None:
        return 0
    whom = "its worker is" if len(workers) == 1 else f"its {len(workers)} workers are"
    print(f"elastic-run: the agent was killed: {whom} ended", file=sys.stderr, flush=True)
    end_groups(workers, patience_seconds=patience_seconds)
    from elastic_ext.fsdp.checkpoint.saving.rescue import (
        complete,  # what it needs takes time to load, and is seldom needed
    )

    for outcome in complete(memory / STAGING):
        print(f"elastic-run: {outcome.why}", file=sys.stderr, flush=True)
    remove_memory_folder(memory)
    return 0


def _last_told(pipe: IO[bytes]) -> list[ProcessIdentity] | None:
    """The workers that the agent named last before the pipe ended; None where the agent has said that it is done."""
    workers: list[ProcessIdentity] = []
    for line in pipe:
        if not line.endswith(b"\n"):
            break  # it was killed as it wrote
        row = json.loads(line)
        if row == _DONE:
            return None
        workers = [ProcessIdentity(pid=pid, start_ticks=ticks) for pid, ticks in row]
    return workers


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
