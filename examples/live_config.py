"""The demo: two ranks train a small GPT while its configuration is edited and one of them is killed.

    make demo        or        python -m examples.live_config

It changes the learning rate, a knob of the script's own and the size of the micro-batch (the global batch stays), tries
a value that the ranks refuse and a file that is not even JSON, schedules a change for one exact step, takes changes
back, kills a worker with SIGKILL, and ends the training. The exit status is 0 only if every rank took every change at
the same step, every step trained on as many samples, and the steps that were taken again after the kill had the samples
that they had had before.
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
CHECKPOINT_EVERY = 60
LOG_EVERY = 20
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
        self._samples = run_directory / "samples.txt"
        self._deadline = time.monotonic() + deadline_seconds
        self._lines: list[str] = []
        self._more = threading.Condition()
        launcher = ["-m", "elastic_ext.run", "--standalone", f"--nproc-per-node={NUM_RANKS}", "--max-restarts=1"]
        saving = [f"--checkpoints={run_directory / 'checkpoints'}", f"--checkpoint-every={CHECKPOINT_EVERY}"]
        saving.append(f"--samples={self._samples}")
        self._process = subprocess.Popen(
            [sys.executable, *launcher, str(_SCRIPT), "--steps=1000000", f"--log-every={LOG_EVERY}", *saving],
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

    def steps_taken(self) -> dict[int, tuple[int, int]]:
        """The windows that rank 0 counted, and its micro-steps, for every step that it printed."""
        steps = (re.match(r"step (\d+): .* (\d+) windows in (\d+) micro-steps", line) for line in self._lines)
        return {int(match[1]): (int(match[2]), int(match[3])) for match in steps if match}

    def checksums(self) -> dict[int, list[str]]:
        """Of the windows that rank 0 took in every step, each time that it did."""
        found: dict[int, list[str]] = {}
        for line in self._samples.read_text().splitlines():
            step, checksum = line.split()
            found.setdefault(int(step), []).append(checksum)
        return found

    def versions_applied(self) -> set[int]:
        """Every version that any rank has applied."""
        return {event["details"]["version"] for rank in range(NUM_RANKS) for event in self._applied(rank)}

    def wait_for_step_beyond_checkpoint(self) -> None:
        """Until a step was printed that comes again if training goes on from the last checkpoint."""
        if self._wait(lambda: True if self.step % CHECKPOINT_EVERY >= LOG_EVERY else None) is None:
            raise DemoError("no step was printed after a checkpoint")

    def wait_for_step(self, step: int) -> None:
        """Until that step, or a later one, was taken."""
        if self._wait(lambda: True if max(self.checksums()) >= step else None) is None:
            raise DemoError(f"training did not come to step {step}")

    def kill_worker(self, rank: int) -> None:
        """End a rank's process as the system does where memory has run out."""
        pids = re.findall(rf"\b{rank} \(pid (\d+)\)", self.wait_for_line("workers started"))
        os.kill(int(pids[0]), signal.SIGKILL)

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
        file = self._run_directory / name
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

    training.wait_for_line(r"^step 40: .* learning rate 0\.001, \d+ windows in 1 micro-steps")
    edit(training, "set", "optimizer.learning_rate=0.002", "--reason", "the loss falls slowly")
    expect(1)
    edit(training, "set", "user.dropout=0.1", "--reason", "a knob of the script's own")
    expect(2)
    edit(training, "set", "dataloader.batch_size=8", "--reason", "needs less memory")
    expect(3)
    training.wait_for_line(r"^step \d+: .* learning rate 0\.002, \d+ windows in 2 micro-steps")

    edit(training, "set", "global_batch_size=1", "--reason", "too small: every rank refuses it")
    training.wait_for_line(r"version 4 was refused, version 3 stays in force: ranks 0 to 1: ")
    edit(training, "undo")
    expect(5)
    training.config_file.write_text('{"version": 6, "optimizer": {"learning_rate": ')
    print("(the file now holds half a JSON object)", flush=True)
    training.wait_for_line(r"config\.json was refused, version 5 stays: .*not JSON")
    edit(training, "undo")
    expect(6)

    step = training.step + 120
    edit(training, "set", "optimizer.weight_decay=0.1", f"--at-step={step}", "--reason", "at one exact step")
    expect(7)
    if effects[-1][1] != [step] * NUM_RANKS:
        raise DemoError(f"version 7 was to take effect at step {step}, and did at {effects[-1][1]}")

    training.wait_for_step_beyond_checkpoint()
    print("$ kill -9 (the process of rank 1)", flush=True)
    training.kill_worker(1)
    training.wait_for_line(r"training goes on after step \d+: ")
    training.wait_for_step(max(training.checksums()) + LOG_EVERY)
    edit(training, "set", f"user.steps={training.step + 50}", "--reason", "that is enough")
    expect(8)
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
        raise DemoError(f"versions {training.versions_applied()} were applied, and version 4 should have been refused")
    taken = training.steps_taken()
    windows = sorted({num_windows for num_windows, _ in taken.values()})
    cuts = sorted({num_micro_steps for _, num_micro_steps in taken.values()})
    if len(windows) != 1:
        raise DemoError(f"the global batch did not stay: rank 0 took {windows} windows in a step")
    if len(cuts) < 2:
        raise DemoError(f"the micro-batch did not change: all steps had {cuts} micro-steps")
    print(f"\nevery step took {windows[0]} windows on rank 0, in {cuts[0]} or in {cuts[-1]} micro-steps")
    checksums = training.checksums()
    if missing := sorted(set(range(1, max(checksums) + 1)) - set(checksums)):
        raise DemoError(f"steps {missing} were left out")
    if unlike := [step for step, found in checksums.items() if len(set(found)) != 1]:
        raise DemoError(f"steps {unlike} had other samples when they were taken again")
    num_again = sum(len(found) > 1 for found in checksums.values())
    print(f"no step was left out; {num_again} were taken again after the kill, with the same samples")
    result = re.search(r"loss ([\d.]+) \(guessing: ([\d.]+)\)", training.wait_for_line(r"^trained \d+ steps"))
    if result is None or float(result[1]) > 0.7 * float(result[2]):
        raise DemoError("the model has learned nothing")


def main(deadline_seconds: float = DEADLINE_SECONDS) -> int:
    """Run the demo; gives its exit status."""
    with tempfile.TemporaryDirectory(prefix="elastic_ext-demo-") as folder:
        training = Training(Path(folder), deadline_seconds)
        try:
            effects = show(training)
            print("\nwhat happened when:")
            print("\n".join(f"  {line}" for line in training.account()))
            check(training, effects)
        except (DemoError, subprocess.CalledProcessError) as error:
            print(f"\nthe demo failed: {error}", file=sys.stderr)
            return 1
        finally:
            training.kill()
    print("every change took effect at the same step on every rank, and the refused ones nowhere")
    print("a worker was killed, and training went on by itself from what had been saved")
    return 0


if __name__ == "__main__":
    sys.exit(main())
