"""The demo: two ranks train a small GPT while its configuration is edited, and every change is shown to have happened.

    make demo        or        python -m examples.live_config

It changes a learning rate, a knob of the script's own, tries a value that a rank refuses and a file that is not even
JSON, schedules a change for one exact step, takes a change back, and ends the training, all through the config file.
The exit status is 0 only if every rank took every change at the same step.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

NUM_RANKS = 2
DEADLINE_SECONDS = 110.0
_Found = TypeVar("_Found")
_SCRIPT = Path(__file__).with_name("nano_gpt.py")


class DemoError(Exception):
    """Something that the demo shows did not happen."""


class Training:
    """The training job as a launcher's process, its output echoed and kept."""

    def __init__(self, run_directory: Path, deadline_seconds: float) -> None:
        self.config_file = run_directory / "config.json"
        self._run_directory = run_directory
        self._deadline = time.monotonic() + deadline_seconds
        self._lines: list[str] = []
        self._more = threading.Condition()
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
        self._process = subprocess.Popen(
            [*launcher, str(_SCRIPT), "--steps=1000000", "--log-every=20"],
            env={**os.environ, "ELASTIC_EXT_RUN_DIR": str(run_directory), "OMP_NUM_THREADS": "1"},
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

    def versions_applied(self) -> set[int]:
        """Every version that any rank has applied."""
        return {event["details"]["version"] for rank in range(NUM_RANKS) for event in self._events(rank)}

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
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._reader.join(timeout=10.0)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _events(self, rank: int) -> list[dict[str, Any]]:
        file = self._run_directory / f"events-{rank}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def _steps_of(self, version: int) -> list[int] | None:
        steps = [
            int(event["step"])
            for rank in range(NUM_RANKS)
            for event in self._events(rank)
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
            print(f"  | {line}", end="", flush=True)
            with self._more:
                self._lines.append(line.rstrip())
                self._more.notify_all()


def edit(training: Training, *arguments: str) -> None:
    """Run ``elastic-ext config ...`` on the training's file, as a person would in another terminal."""
    print(f"$ elastic-ext config {shlex.join(arguments)}", flush=True)
    command = [sys.executable, "-m", "elastic_ext.cli", "config", *arguments, "--file", str(training.config_file)]
    subprocess.run(command, check=True)


def show(training: Training) -> list[tuple[int, list[int]]]:
    """Make every edit and wait for what it should do; gives the steps at which each version took effect."""
    effects: list[tuple[int, list[int]]] = []

    def expect(version: int) -> None:
        effects.append((version, training.wait_for_version(version)))

    training.wait_for_line(r"^step 40:")
    edit(training, "set", "optimizer.learning_rate=0.002", "--reason", "the loss falls slowly")
    expect(1)
    edit(training, "set", "user.dropout=0.1", "--reason", "a knob of the script's own")
    expect(2)

    edit(training, "set", "optimizer.learning_rate=5", "--reason", "too much: every rank refuses it")
    training.wait_for_line(r"version 3 was refused, version 2 stays in force: rank 0: .*; rank 1: ")
    edit(training, "undo")
    expect(4)
    training.config_file.write_text('{"version": 5, "optimizer": {"learning_rate": ')
    print("(the file now holds half a JSON object)", flush=True)
    training.wait_for_line(r"config\.json was refused, version 4 stays: .*not JSON")
    edit(training, "undo")
    expect(5)

    step = training.step + 150
    edit(training, "set", "optimizer.weight_decay=0.1", f"--at-step={step}", "--reason", "at one exact step")
    expect(6)
    if effects[-1][1] != [step] * NUM_RANKS:
        raise DemoError(f"version 6 was to take effect at step {step}, and did at {effects[-1][1]}")
    edit(training, "set", f"user.steps={training.step + 100}", "--reason", "that is enough")
    expect(7)
    training.finish()
    return effects


def check(training: Training, effects: Sequence[tuple[int, list[int]]]) -> None:
    """Print which version took effect at which step on which rank; DemoError unless it was the same on all."""
    print("\nversion   " + "   ".join(f"in force on rank {rank} from step" for rank in range(NUM_RANKS)))
    for version, steps in effects:
        print(f"{version:>7}   " + "   ".join(f"{step:>29}" for step in steps))
    uneven = [version for version, steps in effects if len(set(steps)) != 1]
    if uneven:
        raise DemoError(f"versions {uneven} took effect at different steps")
    if training.versions_applied() != {version for version, _ in effects}:
        raise DemoError(f"versions {training.versions_applied()} were applied, and version 3 should have been refused")
    result = re.search(r"loss ([\d.]+) \(guessing: ([\d.]+)\)", training.wait_for_line(r"^trained \d+ steps"))
    if result is None or float(result[1]) > 0.7 * float(result[2]):
        raise DemoError("the model has learned nothing")


def main(deadline_seconds: float = DEADLINE_SECONDS) -> int:
    """Run the demo; gives its exit status."""
    with tempfile.TemporaryDirectory(prefix="elastic_ext-demo-") as folder:
        training = Training(Path(folder), deadline_seconds)
        try:
            check(training, show(training))
        except (DemoError, subprocess.CalledProcessError) as error:
            print(f"\nthe demo failed: {error}", file=sys.stderr)
            return 1
        finally:
            training.kill()
    print("\nevery change took effect at the same step on every rank, and the refused ones nowhere")
    return 0


if __name__ == "__main__":
    sys.exit(main())
