"""The demo: a training job that starts badly tunes itself while it trains, and loses a worker on the way.

    make demo        or        python -m examples.tunes_itself [--all]

Two ranks read samples that take a while to be had, without workers and one at a time. The job's own master watches
where the time goes, tries other settings on real training steps, keeps what is faster and says why; a worker is killed
with SIGKILL meanwhile. The exit status is 0 only if the job trains at least twice as fast in the end, every decision
that was written came into force, and no sample was left out or taken otherwise when its step came again.

Of the job's output only some lines are shown, in short; ``--all`` shows all of them.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.training_job import DemoError, Training

LEAST_GAIN = 2.0
DEADLINE_SECONDS = 300.0
NUM_LINES = 3  # of the script's, which a rate is the median of
CHECKPOINT_EVERY = 40
_SCRIPT = Path(__file__).with_name("slow_samples.py")
_RATE = re.compile(r"step \d+: (\d+) samples/s")
_SHOW_EVERY = 4  # of the script's lines
_LONGEST = 200  # characters of a line
_LEFT_OUT = re.compile(r"elastic-run [\d:]+   |INFO (?!version \d+ in force|.*: training (?:begins|goes on))")
_FOLDER = re.compile(r"/\S+/(?=step_\d+)")
_REST = re.compile(r" \(.*|; config file .*")  # a reason, which the tuner's line has; and where things are


def start(run_directory: Path, deadline_seconds: float, shown: Callable[[str], str | None]) -> Training:
    """The training, whose output is echoed as far as ``shown`` gives it."""
    given = ["--log-seconds=2", f"--checkpoint-every={CHECKPOINT_EVERY}"]
    return Training(run_directory, deadline_seconds, _SCRIPT, *given, launcher=["--tuning=auto"], shown=shown)


class Story:
    """The lines of the job's output that tell what happens, in short: no checkpoints, no profiles, no paths."""

    def __init__(self) -> None:
        self._num_rates = 0

    def shown(self, line: str) -> str | None:
        """What is shown of a line; None for nothing."""
        if _RATE.match(line):
            self._num_rates += 1
            return line if self._num_rates % _SHOW_EVERY == 1 else None
        if _LEFT_OUT.match(line):
            return None
        if line.startswith("INFO "):
            line = _REST.sub("", line.removeprefix("INFO "), count=1)
        line = _FOLDER.sub("", line)
        return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


class Tuner:
    """What the job's tuner has decided, asked for as a person would in another terminal."""

    def __init__(self, run_directory: Path) -> None:
        self._run_directory = str(run_directory)
        self._told: dict[int, str] = {}

    def decisions(self) -> list[Mapping[str, Any]]:
        """All of them, in order; prints each with its reason, and later what came of it."""
        found = self._asked("tuning", "log")
        for each in found:
            number, told = each["number"], in_words(each)
            if self._told.get(number) != told:
                print(f"tuner | {f'{number}. {outcome_of(each)}' if number in self._told else told}", flush=True)
                self._told[number] = told
        return found

    def is_settled(self) -> bool:
        """Whether it expects nothing else to be faster."""
        found = self._asked("status")
        return bool(found) and (found[0].get("tuning") or {}).get("standing") == "settled"

    def _asked(self, *command: str) -> list[Mapping[str, Any]]:
        """The objects that a command prints; none where there is no master yet, or none just now."""
        whole = [sys.executable, "-m", "elastic_ext.cli", *command, "--json", "--master", self._run_directory]
        asked = subprocess.run(whole, capture_output=True, text=True, timeout=30.0)
        return [json.loads(line) for line in asked.stdout.splitlines()] if asked.stdout.startswith("{") else []


def in_words(decision: Mapping[str, Any]) -> str:
    """A decision on one line; its reason says what was predicted."""
    version = "" if decision["version"] is None else f", version {decision['version']}"
    told = [f"{decision['kind']}{version}: {decision['reason']}", outcome_of(decision)]
    return f"{decision['number']}. {'; '.join(filter(None, told))}"


def outcome_of(decision: Mapping[str, Any]) -> str:
    """What came of a decision; nothing so far where it is empty."""
    told = ["" if decision["measured"] is None else f"measured {decision['measured']:,.0f} samples/s"]
    if decision["outcome"]:
        told.append(f"{'->' if told[0] else 'not measured ->'} {decision['outcome']}")
    return " ".join(filter(None, told))


def rates(lines: Sequence[str]) -> list[float]:
    """Samples per second, as the script has printed them."""
    return [float(match[1]) for match in map(_RATE.match, lines) if match]


def show(training: Training) -> tuple[float, float, list[Mapping[str, Any]]]:
    """Watch the job tune itself, and take a worker from it; rates before and after, and what was decided."""
    training.wait_until(lambda: len(rates(training.lines)) >= NUM_LINES, "the training has printed no rates")
    before = statistics.median(rates(training.lines)[:NUM_LINES])
    tuner = Tuner(training.run_directory)
    has_killed = False
    for decisions in _asked(training, tuner):
        if not has_killed and any(each["outcome"] == "kept" for each in decisions):
            print("\n$ kill -9 (the process of rank 1)", flush=True)
            training.kill_worker(1)
            training.wait_for_line(r"training goes on after step \d+: ")
            print("\nboth ranks train again; the tuner goes on until nothing else is expected to be faster", flush=True)
            has_killed = True
        if has_killed and tuner.is_settled():
            break
    num_lines = len(rates(training.lines))
    training.wait_until(
        lambda: len(rates(training.lines)) >= num_lines + 1 + NUM_LINES, "no rates were printed once it had settled"
    )
    after = statistics.median(rates(training.lines)[-NUM_LINES:])
    decisions = tuner.decisions()
    change = f"user.steps={training.last_step() + 20}"
    print(f"\n$ elastic-ext config set {change}   (which the script reads, and ends)", flush=True)
    end = [sys.executable, "-m", "elastic_ext.cli", "config", "set", change, "--reason", "that is enough"]
    subprocess.run([*end, "--file", str(training.config_file)], check=True, stdout=subprocess.DEVNULL)
    training.finish()
    return before, after, decisions


def _asked(training: Training, tuner: Tuner) -> Iterator[list[Mapping[str, Any]]]:
    """What has been decided, every second, until the time is up."""
    while training.is_running:
        yield tuner.decisions()
        time.sleep(1.0)
    raise DemoError("the tuner did not settle in time")


def check(training: Training, before: float, after: float, decisions: Sequence[Mapping[str, Any]]) -> None:
    """Print what has come of it; DemoError unless all of it holds."""
    written = [each for each in decisions if each["version"] is not None]
    applied = training.versions_applied()
    if not written:
        raise DemoError("the tuner has changed nothing")
    if missing := [each["version"] for each in written if each["version"] not in applied and not each["outcome"]]:
        raise DemoError(f"versions {missing} were written and never in force")
    checksums = training.checksums()
    if missing := sorted(set(range(1, max(checksums) + 1)) - set(checksums)):
        raise DemoError(f"steps {missing} were left out")
    if unlike := [step for step, found in checksums.items() if len(set(found)) != 1]:
        raise DemoError(f"steps {unlike} had other samples when they were taken again")
    num_again = sum(len(found) > 1 for found in checksums.values())
    print(f"no step was left out; {num_again} were taken again after the kill, with the same samples")
    print(
        f"samples/s: {before:,.0f} as it was started, {after:,.0f} as it has tuned itself: {after / before:.1f} times"
    )
    if after < LEAST_GAIN * before:
        raise DemoError(f"that is less than {LEAST_GAIN:g} times as fast")


_INTRODUCTION = """\
Two ranks train from a bad start: no loader workers, micro-batches of one sample. A tuner tries other settings on real
steps meanwhile, and a rank is killed. It takes three to five minutes. In another terminal, from this folder:

  .venv/bin/elastic-ext status {folder}
  .venv/bin/elastic-ext tuning log --master {folder}

A checkpoint is saved every {every} steps. Checkpoints, profiles and most of the script's lines are left out below;
--all shows all. The script counts samples/s; lines of `tuner` are the tuner's decisions.
"""


def main(deadline_seconds: float = DEADLINE_SECONDS, *, shows_all: bool = False) -> int:
    """Run the demo; gives its exit status."""
    with tempfile.TemporaryDirectory(prefix="elastic_ext-demo-") as folder:
        print(_INTRODUCTION.format(folder=folder, every=CHECKPOINT_EVERY), flush=True)
        training = start(Path(folder), deadline_seconds, str if shows_all else Story().shown)
        try:
            before, after, decisions = show(training)
            print("\nwhat was decided, and why:")
            print("\n".join(f"  {in_words(each)}" for each in decisions), "\n")
            check(training, before, after, decisions)
        except (DemoError, subprocess.SubprocessError) as error:
            print(f"\nthe demo failed: {error}", file=sys.stderr)
            return 1
        finally:
            training.kill()
    print("a worker was killed, and training went on by itself with what had been found")
    return 0


if __name__ == "__main__":
    sys.exit(main(shows_all="--all" in sys.argv[1:]))
