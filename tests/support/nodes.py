"""Nodes of a job, each an agent of its own with its own run directory, all on this machine, and what they print."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from elastic_ext.ranks.processes import ProcessIdentity, is_alive, process_of
from elastic_ext.records.agent import AGENT_FILE, EVENTS_FILE, AgentRecord
from tests.support.scripts import begun

__all__ = ["Node", "nodes", "samples_of_steps", "set_config", "until"]

DEADLINE_SECONDS = 240.0
_Found = TypeVar("_Found")
TORCHRUN = ("-m", "torch.distributed.run")
ELASTIC_RUN = ("-m", "elastic_ext.run")
FORKING_RUN = ("-m", "tests.support.forking_agent")  # workers need not import torch


class Node:
    """One agent, of this launcher or of torch's."""

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        *,
        launcher: Sequence[str] = ELASTIC_RUN,
        environ: dict[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> None:
        """``within`` is what the command begins with, as for one that is run on another host.

        With either of them it is a new interpreter, which reads its environment as it starts.
        """
        self.run_dir = folder
        self.lines: list[str] = []
        self._environ = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("ELASTIC_EXT", "PET_", "TORCHELASTIC"))
            },
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "ELASTIC_EXT_RUN_DIR": str(folder),
            "OMP_NUM_THREADS": "1",
            **(environ or {}),
        }
        command = [*launcher, *arguments]
        self.process = begun(command, env=self._environ, within=within, is_new=bool(environ))
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, *, times: int = 1) -> str:
        """The line that matches, when so many have."""
        end = time.monotonic() + DEADLINE_SECONDS
        with self._more:
            while True:
                found = [line for line in self.lines if re.search(pattern, line)]
                if len(found) >= times:
                    return found[times - 1]
                assert time.monotonic() < end and (self.process.poll() is None or self._reader.is_alive()), self.text
                self._more.wait(0.2)

    def end(self, *, within: float = DEADLINE_SECONDS) -> int:
        """Its exit status."""
        try:
            status = self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.text}") from None
        self._reader.join(5)
        return status

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def workers(self) -> dict[int, ProcessIdentity]:
        """Its present workers by rank."""
        told = [event for event in self.events() if event["kind"] == "workers-started"]
        found = {}
        for rank, pid in re.findall(r"(\d+) \(pid (\d+)\)", told[-1]["text"] if told else ""):
            if (process := process_of(int(pid))) is not None:
                found[int(rank)] = process
        return found

    def events(self) -> list[dict[str, Any]]:
        file = self.run_dir / EVENTS_FILE
        written = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in written[: written.rfind("\n") + 1].splitlines()]  # one may be half there

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events()]

    def record(self) -> AgentRecord:
        return AgentRecord.from_json((self.run_dir / AGENT_FILE).read_text())

    def close(self) -> None:
        """End it and what is left of it, whatever state it is in."""
        workers = list(self.workers().values())
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for worker in workers:
            if is_alive(worker):
                os.kill(worker.pid, signal.SIGKILL)
        self._reader.join(5)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._more:
                self.lines.append(line.rstrip())
                self._more.notify_all()


@contextmanager
def nodes(*made: Node) -> Iterator[tuple[Node, ...]]:
    """... which end with the test."""
    try:
        yield made
    finally:
        for node in made:
            node.close()


def until(look: Callable[[], _Found | None], *, what: str = "") -> _Found:
    """What ``look`` finds, as soon as it finds something."""
    end = time.monotonic() + DEADLINE_SECONDS
    while (found := look()) is None or found is False:
        assert time.monotonic() < end, f"not in time: {what}"
        time.sleep(0.05)  # what is looked for takes its time to be read
    return found


def set_config(node: Node, change: str) -> None:
    """As a person does, on the node's machine."""
    command = [sys.executable, "-m", "elastic_ext.cli", "config", "set", change, "--file", node.record().config_file]
    subprocess.run(command, check=True, capture_output=True)


def samples_of_steps(folder: Path) -> dict[int, list[int]]:
    """The samples of every step as they stand in the end: of the ranks that took it last, where all of them have."""
    by_round: dict[int, list[dict[int, list[int]]]] = {}
    for file in folder.glob("samples-*.txt"):
        first, *lines = file.read_text().splitlines() or [""]
        if first:
            steps = {
                int(line.split()[0]): [int(each) for each in line.split()[1:]] for line in lines if line[0].isdigit()
            }
            by_round.setdefault(int(first.split()[3]), []).append(steps)
    found: dict[int, list[int]] = {}
    for number in sorted(by_round):
        of_ranks = by_round[number]
        for step in set(of_ranks[0]).intersection(*of_ranks[1:]):
            found[step] = [sample for steps in of_ranks for sample in steps[step]]
    return dict(sorted(found.items()))


def last_step(folder: Path) -> int:
    """The last step that every process has written."""
    return max(samples_of_steps(folder), default=0)
