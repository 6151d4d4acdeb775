"""Training: a training job that a demo starts with elastic-run, reads the output of, and takes workers from."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["NUM_RANKS", "DemoError", "Training"]

NUM_RANKS = 2
_Found = TypeVar("_Found")


class DemoError(Exception):
    """Something that the demo shows did not happen."""


class Training:
    """The training job as a launcher's process, its output kept, and echoed as far as the demo shows it."""

    def __init__(
        self,
        run_directory: Path,
        deadline_seconds: float,
        script: Path,
        *given: str,
        launcher: Sequence[str] = (),
        meets: Sequence[str] = ("--standalone",),
        node: int = 0,
        shown: Callable[[str], str | None] = str,
    ) -> None:
        """``given`` goes to the script, ``launcher`` to elastic-run; the script counts samples in samples.txt.

        ``meets`` says how nodes find each other; a ``node`` that is not the first has a run directory within that of
        the first, whose name begins its lines. ``shown`` gives what is echoed of a line; None for nothing.
        """
        self.run_directory = run_directory if node == 0 else run_directory / f"node-{node}"
        self._mark = "  |" if node == 0 else f"  node {node} |"
        self.config_file = self.run_directory / "config.json"
        self._samples = run_directory / "samples.txt"
        self._shown = shown
        self._deadline = time.monotonic() + deadline_seconds
        self._lines: list[str] = []
        self._more = threading.Condition()
        run = ["-m", "elastic_ext.run", *meets, f"--nproc-per-node={NUM_RANKS}", "--max-restarts=1", *launcher]
        saving = [f"--checkpoints={run_directory / 'checkpoints'}", f"--samples={self._samples}"]
        self._process = subprocess.Popen(
            [sys.executable, *run, str(script), *given, *saving],
            env={**os.environ, "ELASTIC_EXT_RUN_DIR": str(self.run_directory), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="demo output", daemon=True)
        self._reader.start()

    @property
    def step(self) -> int:
        """The last step that the training has printed."""
        steps = (re.match(r"step (\d+):", line) for line in reversed(self._lines))
        return next((int(match[1]) for match in steps if match), 0)

    def wait_for_line(self, pattern: str) -> str:
        """The first line that matches; an error once the demo's time is up or the training has ended."""
        found = self._wait(lambda: next((line for line in self._lines if re.search(pattern, line)), None))
        if found is None:
            raise DemoError(f"no line like {pattern!r} was printed")
        return found

    def wait_for_version(self, version: int) -> list[int]:
        """The step from which ``version`` was in force, for each rank."""
        found = self._wait(lambda: self._steps_of(version))
        if found is None:
            raise DemoError(f"version {version} did not come into force on all {NUM_RANKS} ranks")
        return found

    @property
    def is_running(self) -> bool:
        """Whether there is time left, and the training has not ended."""
        return time.monotonic() < self._deadline and self._process.poll() is None

    def last_step(self) -> int:
        """That rank 0 has counted samples of."""
        return max(self.checksums())

    @property
    def lines(self) -> Sequence[str]:
        """What was printed so far."""
        return tuple(self._lines)

    def checksums(self) -> dict[int, list[str]]:
        """Of the samples that rank 0 took in every step, each time that it did."""
        found: dict[int, list[str]] = {}
        for line in self._samples.read_text().splitlines():
            step, checksum = line.split()
            found.setdefault(int(step), []).append(checksum)
        return found

    def versions_applied(self) -> set[int]:
        """Every version that any rank has applied."""
        return {event["details"]["version"] for rank in range(NUM_RANKS) for event in self._applied(rank)}

    def wait_until(self, is_so: Callable[[], bool], told: str) -> None:
        """Until ``is_so``; an error that says ``told`` once the demo's time is up or the training has ended."""
        if self._wait(lambda: is_so() or None) is None:
            raise DemoError(told)

    def wait_for_step(self, step: int) -> None:
        """Until that step, or a later one, was taken."""
        self.wait_until(lambda: self.last_step() >= step, f"training did not come to step {step}")

    def kill_worker(self, rank: int) -> None:
        """End a rank's process as the system does where memory has run out."""
        pids = re.findall(rf"\b{rank} \(pid (\d+)\)", self.wait_for_line("workers started"))
        os.kill(int(pids[0]), signal.SIGKILL)

    def pids(self) -> list[str]:
        """Of all workers that the agent has ever started."""
        told = (
            event["text"] for event in self._read_events("events-agent.jsonl") if event["kind"] == "workers-started"
        )
        return [pid for text in told for pid in re.findall(r"\(pid (\d+)\)", text)]

    def account(self) -> list[str]:
        """What the agent and rank 0 wrote down, in order, with the seconds since the start."""
        events = [(event, "agent") for event in self._read_events("events-agent.jsonl")]
        events += [(event, "rank 0") for event in self._events(0)]
        events.sort(key=lambda each: float(each[0]["time"]))
        start = float(events[0][0]["time"])
        return [
            f"{event['time'] - start:>6.1f} s  {who:<7} {str(event['text']).splitlines()[0]}" for event, who in events
        ]

    def finish(self) -> None:
        """Wait until the training has ended by itself."""
        try:
            status = self._process.wait(timeout=max(self._deadline - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            raise DemoError("the training did not end when it was told to") from None
        self._reader.join(timeout=10.0)
        if status != 0:
            raise DemoError(f"the training ended with status {status}")

    def kill(self) -> None:
        """End the launcher and its workers, whatever they do."""
        if self._process.poll() is None:
            self._process.terminate()  # it ends its workers, which it keeps in sessions of their own
            try:
                self._process.wait(timeout=10.0)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._reader.join(timeout=10.0)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _events(self, rank: int) -> list[dict[str, Any]]:
        return self._read_events(f"events-{rank}.jsonl")

    def _applied(self, rank: int) -> list[dict[str, Any]]:
        return [event for event in self._events(rank) if event["kind"] == "config-applied"]

    def _read_events(self, name: str) -> list[dict[str, Any]]:
        file = self.run_directory / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def _steps_of(self, version: int) -> list[int] | None:
        steps = [
            int(event["step"])
            for rank in range(NUM_RANKS)
            for event in self._applied(rank)
            if event["details"]["version"] == version
        ]
        return steps if len(steps) == NUM_RANKS else None

    def _wait(self, look: Callable[[], _Found | None]) -> _Found | None:
        with self._more:
            while (found := look()) is None and time.monotonic() < self._deadline and self._process.poll() is None:
                self._more.wait(timeout=0.1)
        return found if found is not None else look()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            shown = self._shown(line.rstrip())
            if shown is not None:
                print(f"{self._mark} {shown}", flush=True)
            with self._more:
                self._lines.append(line.rstrip())
                self._more.notify_all()
