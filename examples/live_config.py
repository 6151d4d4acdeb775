"""The demo: two ranks train a small GPT while its configuration is edited and one of them is killed.

    make demo-config        or        python -m examples.live_config

It changes the learning rate, a knob of the script's own and the size of the micro-batch (the global batch stays), tries
a value that the ranks refuse and a file that is not even JSON, schedules a change for one exact step, takes changes
back, kills a worker with SIGKILL, and ends the training. The exit status is 0 only if every rank took every change at
the same step, every step trained on as many samples, and the steps that were taken again after the kill had the samples
that they had had before.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from examples.training_job import NUM_RANKS, DemoError, Training

CHECKPOINT_EVERY = 60
LOG_EVERY = 20
DEADLINE_SECONDS = 110.0
_SCRIPT = Path(__file__).with_name("nano_gpt.py")


def start(run_directory: Path, deadline_seconds: float) -> Training:
    """The training, whose output is echoed."""
    given = ["--steps=1000000", f"--log-every={LOG_EVERY}", f"--checkpoint-every={CHECKPOINT_EVERY}"]
    return Training(run_directory, deadline_seconds, _SCRIPT, *given)


def edit(training: Training, *arguments: str, is_refused: bool = False) -> None:
    """Run ``elastic-ext config ...`` on the training's file, as a person would in another terminal.

    It waits for what the ranks say; DemoError where they do not refuse what they are to refuse, or the other way round.
    """
    print(f"$ elastic-ext config {shlex.join(arguments)}", flush=True)
    command = [sys.executable, "-m", "elastic_ext.cli", "config", *arguments, "--file", str(training.config_file)]
    status = subprocess.run(command, check=False).returncode
    if status != (2 if is_refused else 0):
        raise DemoError(f"the command ended with status {status}")


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

    edit(training, "set", "global_batch_size=1", "--reason", "too small: every rank refuses it", is_refused=True)
    training.wait_for_line(r"version 4 was refused, version 3 stays in force: ranks 0 to 1: ")
    edit(training, "undo")
    expect(5)
    training.config_file.write_text('{"version": 6, "optimizer": {"learning_rate": ')
    print("(the file now holds half a JSON object)", flush=True)
    training.wait_for_line(r"config\.json was refused, and version 5, valid before, is kept: .*not JSON")
    edit(training, "undo")
    expect(6)

    step = training.step + 120
    edit(training, "set", "optimizer.weight_decay=0.1", f"--at-step={step}", "--reason", "at one exact step")
    expect(7)
    if effects[-1][1] != [step] * NUM_RANKS:
        raise DemoError(f"version 7 was to take effect at step {step}, and did at {effects[-1][1]}")

    training.wait_until(lambda: training.step % CHECKPOINT_EVERY >= LOG_EVERY, "no step was printed after a checkpoint")
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
    taken = _steps_taken(training.lines)
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


def _steps_taken(lines: Sequence[str]) -> dict[int, tuple[int, int]]:
    """The windows that rank 0 counted, and its micro-steps, for every step that it printed."""
    steps = (re.match(r"step (\d+): .* (\d+) windows in (\d+) micro-steps", line) for line in lines)
    return {int(match[1]): (int(match[2]), int(match[3])) for match in steps if match}


def main(deadline_seconds: float = DEADLINE_SECONDS) -> int:
    """Run the demo; gives its exit status."""
    with tempfile.TemporaryDirectory(prefix="elastic_ext-demo-") as folder:
        training = start(Path(folder), deadline_seconds)
        try:
            effects = show(training)
            print("\nwhat happened when:")
            print("\n".join(f"  {line}" for line in training.account()))
            check(training, effects)
        except DemoError as error:
            print(f"\nthe demo failed: {error}", file=sys.stderr)
            return 1
        finally:
            training.kill()
    print("every change took effect at the same step on every rank, and the refused ones nowhere")
    print("a worker was killed, and training went on by itself from what had been saved")
    return 0


if __name__ == "__main__":
    sys.exit(main())
