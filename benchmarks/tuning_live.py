"""Real jobs that start badly and tune themselves, beside what a person would find who tried every config one by one.

Six jobs of two ranks under elastic-run. Up to 24 configs of each are measured first, every one in a job that is started
for it and ended again, as tuners do that work before training begins. Then the job trains from a bad start with
``--tuning=auto`` until its tuner settles. In the same processes, with the tuner turned off, the fastest of all configs
and what the tuner has found are measured by turns. Said is how long it takes to train so many samples when it tunes
itself, when it stays as it was started, when all configs are tried first, and with the best from the start.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Finding, Result, Verdict, shortened
from benchmarks.tuning_live_jobs import JOBS, Kind, most_at_once
from elastic_ext.config.history import ConfigEdit, ConfigHistory

__all__ = ["Found", "LiveTable", "main", "measured"]

NUM_RANKS = 2
LEAST_SHARE, LEAST_GOOD = 0.9, 5
LEAST_PACE = 0.9
MOST_CONFIGS = 24
SETTLE_SECONDS = 150.0
TRY_SECONDS, LEAST_STEPS = 1.5, 6
AGAIN_SECONDS, NUM_AGAIN = 4.0, 4
DEADLINE_SECONDS = 60.0
NUM_TRAINED = 200_000  # samples, for which it is said how long they take


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What has come of one job; rates are samples per second."""

    name: str
    start: float
    """Until the tuner changed something first."""
    best: float
    tuned: float
    """As measured by turns with the best."""
    best_config: Mapping[str, Any]
    tuned_config: Mapping[str, Any]
    num_configs: int
    seconds: float
    """Until the tuner had settled,"""
    num_samples: float
    """... and the samples that it had trained meanwhile;"""
    reached_seconds: float | None
    """... until it had trained ``NUM_TRAINED`` of them, where that was before it had settled."""
    has_settled: bool
    num_probes: int
    num_failures: int
    """Micro-batches for which memory did not suffice, while it was tuned."""
    tries_seconds: float
    """What it took to start a job for each config, and to measure it."""

    @property
    def share(self) -> float:
        return self.tuned / self.best

    @property
    def pace_meanwhile(self) -> float:
        """Until it had settled, by what it would have been without a tuner."""
        return self.num_samples / self.seconds / self.start

    def seconds_to_train(self) -> Mapping[str, float]:
        """How long it takes to have trained ``NUM_TRAINED``, one way and another."""
        left = NUM_TRAINED - self.num_samples
        return {
            "tuned while it trains": self.reached_seconds or self.seconds + left / self.tuned,
            "as it was started": NUM_TRAINED / self.start,
            "a restart for each config first": self.tries_seconds + NUM_TRAINED / self.best,
            "the best from the start": NUM_TRAINED / self.best,
        }


def main(share: float = 1.0) -> list[Result]:
    """All six, one after another; with less time every third one, beside the best of fewer configs."""
    jobs = list(JOBS.items()) if share >= 1 else [*JOBS.items()][::3]
    most_configs = shortened(MOST_CONFIGS, share, least=4)
    num_again = shortened(NUM_AGAIN, share, least=2)
    found = tuple(measured(name, kind, most_configs=most_configs, num_again=num_again) for name, kind in jobs)
    return [LiveTable(found=found, most_configs=most_configs)]


def measured(name: str, kind: Kind, *, most_configs: int = MOST_CONFIGS, num_again: int = NUM_AGAIN) -> Found:
    """One job, from its bad start to the last turn."""
    with tempfile.TemporaryDirectory(prefix="tuning-live-") as folder:
        most = most_at_once(kind)
        began = time.monotonic()
        rates = {
            config: _started_with(name, Path(folder), most, dict(config)) for config in _configs(kind, most_configs)
        }
        tries_seconds = time.monotonic() - began
        with _job(name, Path(folder) / "job", "auto", most) as job:
            has_settled = job.settle()
            seconds, num_samples, reached_seconds = job.trained()
            start = job.first_rate()
            num_failures, decisions = job.num_failures(), job.decisions()
            tuned_config = job.config()
            job.put({"tuning.mode": "off"})
            start_config = {**dict.fromkeys([*kind.choices, *tuned_config]), **job.started_with()}
            best_config = {**start_config, **dict(max(rates.items(), key=lambda each: each[1])[0])}
            configs = {"best": best_config, "tuned": tuned_config}
            turns: dict[str, list[float]] = {whose: [] for whose in configs}
            for _ in range(num_again):
                for whose, config in configs.items():
                    turns[whose].append(job.try_out(config, AGAIN_SECONDS))
            return Found(
                name=name,
                start=start,
                best=statistics.median(turns["best"]),
                tuned=statistics.median(turns["tuned"]),
                best_config={key: value for key, value in best_config.items() if value is not None},
                tuned_config={key: value for key, value in tuned_config.items() if value is not None},
                num_configs=len(rates),
                seconds=seconds,
                num_samples=num_samples,
                reached_seconds=reached_seconds,
                has_settled=has_settled,
                num_probes=sum(each["kind"] == "probe" for each in decisions),
                num_failures=num_failures,
                tries_seconds=tries_seconds,
            )


def _configs(kind: Kind, most: int) -> list[tuple[tuple[str, Any], ...]]:
    """What is tried one by one, spread evenly over all that the job's knobs make where that is too much."""
    every = [tuple(zip(kind.choices, values, strict=True)) for values in itertools.product(*kind.choices.values())]
    step = max(len(every) / most, 1.0)
    return [every[int(at * step)] for at in range(min(len(every), most))]


def _started_with(name: str, folder: Path, most: int | None, config: Mapping[str, Any]) -> float:
    """The rate of a job that has this config from its start; it is ended again."""
    path = Path(tempfile.mkdtemp(dir=folder)) / "job"
    with _job(name, path, "off", most, config) as job:
        return job.warm_rate()


class _Job:
    """One that trains, in a folder of its own."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], kind: Kind) -> None:
        self._folder = folder
        self._process = process
        self._history = ConfigHistory(folder / "run" / "config.json")
        self._keys = [*kind.choices]
        self._kind = kind

    def await_steps(self, num_steps: int) -> None:
        self._until(lambda: len(self._steps()) >= num_steps)

    def rate(self, num_steps: int, seconds: float) -> float:
        """Of the steps that come: at least so many, and for so long."""
        first = len(self._steps())
        began = time.monotonic()
        self._until(lambda: len(self._steps()) > first + num_steps and time.monotonic() - began >= seconds)
        steps = self._steps()[first:]
        return sum(each[2] for each in steps[1:]) / ((steps[-1][0] - steps[0][0]) / 1e9)

    def try_out(self, config: Mapping[str, Any], seconds: float = TRY_SECONDS) -> float:
        """The rate under ``config``, after the first steps under it."""
        version = self.put(config)
        self._until(lambda: self._steps()[-1][1] >= version)
        return self.warm_rate(seconds)

    def warm_rate(self, seconds: float = TRY_SECONDS) -> float:
        """The rate of what is in force, after the first steps of it."""
        first = len(self._steps())
        began = time.monotonic()
        self._until(lambda: len(self._steps()) > first + 1 and time.monotonic() - began >= 1.0)  # workers are ready
        return self.rate(LEAST_STEPS, seconds)

    def put(self, config: Mapping[str, Any]) -> int:
        """Have it in force as a person would; gives its version."""
        current = self._history.current()
        there = {} if current is None else current.values()
        remove = [key for key, value in config.items() if value is None and key in there]
        changes = {key: value for key, value in config.items() if value is not None}
        return self._history.set(ConfigEdit(changes, remove=tuple(remove), reason="it is measured")).version

    def settle(self) -> bool:
        """Wait until the tuner has, or its time is up; whether it has."""
        until = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < until:
            time.sleep(3.0)
            found = self._asked("status")
            if found and (found[0].get("tuning") or {}).get("standing") == "settled":
                return True
        return False

    def decisions(self) -> list[Mapping[str, Any]]:
        """What the tuner has decided so far."""
        return self._asked("tuning", "log")

    def _asked(self, *command: str) -> list[Mapping[str, Any]]:
        """The objects that a command prints; none where there is no master just now."""
        whole = [sys.executable, "-m", "elastic_ext.cli", *command, "--json", "--master", str(self._folder / "run")]
        asked = subprocess.run(whole, capture_output=True, text=True, timeout=60.0)
        return [json.loads(line) for line in asked.stdout.splitlines()] if asked.stdout.startswith("{") else []

    def trained(self) -> tuple[float, float, float | None]:
        """How long it trains by now, how many samples that were, and how long the first ``NUM_TRAINED`` took, if so."""
        steps = self._steps()
        samples = list(itertools.accumulate(each[2] for each in steps[1:]))
        seconds = [(each[0] - steps[0][0]) / 1e9 for each in steps[1:]]
        reached = next((at for at, so_far in zip(seconds, samples, strict=True) if so_far >= NUM_TRAINED), None)
        return seconds[-1], float(samples[-1]), reached

    def first_rate(self) -> float:
        """The rate until something was changed, but for the first steps."""
        steps = self._steps()
        first = [each for each in steps if each[1] == steps[0][1]][LEAST_STEPS // 2 :]
        return sum(each[2] for each in first[1:]) / ((first[-1][0] - first[0][0]) / 1e9)

    def config(self) -> Mapping[str, Any]:
        """What is in force of what is tried one by one, and of all else that the tuner has changed."""
        current = self._history.current()
        values = {} if current is None else current.values()
        found = {key: values.get(key) for key in self._keys}
        tuned = {key: value for key, value in values.items() if key.startswith(("dataloader", "parallel", "commun"))}
        start = self.started_with()
        return {**found, **{key: start.get(key) for key in found if found[key] is None}, **tuned}

    def started_with(self) -> Mapping[str, Any]:
        """What the script itself says."""
        return {f"dataloader.{key}": value for key, value in self._kind.start.items()}

    def num_failures(self) -> int:
        file = self._folder / "failures.txt"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def _steps(self) -> list[tuple[int, int, int]]:
        file = self._folder / "steps-0.txt"
        rows = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [(int(row[0]), int(row[1]), int(row[2])) for row in rows if len(row) == 3]

    def _until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not is_so():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise TimeoutError(f"the job does not get on: {(self._folder / 'log').read_text()[-2000:]}")
            time.sleep(0.05)


@contextmanager
def _job(
    name: str, folder: Path, mode: str, most: int | None, config: Mapping[str, Any] | None = None
) -> Iterator[_Job]:
    """The job from its first steps on; memory suffices for ``most`` samples at once."""
    kind = JOBS[name]
    (folder / "run").mkdir(parents=True)
    values = dict(config or {})
    if kind.memory_bytes is not None:
        values["tuning.memory_bytes"] = kind.memory_bytes
    if values:
        ConfigHistory(folder / "run" / "config.json").set(ConfigEdit(values, reason="it is measured"))
    command = [sys.executable, "-m", "elastic_ext.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    command += [f"--tuning={mode}", "-m", "benchmarks.tuning_live_jobs", name, str(folder)]
    command += [] if most is None else [str(most)]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, "ELASTIC_EXT_RUN_DIR": str(folder / "run"), "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )
    job = _Job(folder, process, kind)
    try:
        job.await_steps(LEAST_STEPS)
        yield job
    finally:
        process.terminate()
        process.wait(60)


# ---- the table ----


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveTable:
    """What each job came to."""

    found: Sequence[Found]
    most_configs: int = MOST_CONFIGS

    @property
    def heading(self) -> str:
        configs = f"the best of up to {self.most_configs} configs"
        return f"**Jobs that tune themselves, two ranks: what they found beside {configs}**"

    @property
    def least_good(self) -> int:
        """How many of the jobs must do well: as large a part of them as of all six."""
        return math.ceil(len(self.found) * LEAST_GOOD / len(JOBS))

    @property
    def notes(self) -> tuple[str, ...]:
        configs = (
            f"{each.name}: the best was {_in_words(each.best_config)}; the tuner chose {_in_words(each.tuned_config)}"
            for each in self.found
        )
        return (
            f"time is that until {NUM_TRAINED:,} samples are trained, by the rates measured; pace meanwhile is that "
            f"until it had settled, by that of its start, of which {LEAST_PACE} are promised",
            "every config was measured in a job that was started for it",
            f"out of memory while tuning: {sum(each.num_failures for each in self.found)} times",
            *configs,
        )

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return tuple(each.verdict for each in self.findings)

    @property
    def findings(self) -> tuple[Finding, ...]:
        verdict, reason = self._decided()
        good = sum(each.share >= LEAST_SHARE for each in self.found)
        pace = min(each.pace_meanwhile for each in self.found)
        num_failures = sum(each.num_failures for each in self.found)
        return (
            Finding(
                claim=f"{self.least_good} jobs or more reach {LEAST_SHARE} of the best config's rate",
                side="tuned",
                value=f"{good} of {len(self.found)} jobs",
                target=f"≥ {self.least_good}",
                verdict=verdict,
                reason=reason,
            ),
            Finding(
                claim=f"until it has settled, every job keeps {LEAST_PACE} of the pace it started with, or more",
                side="tuned",
                value=f"at worst {pace:.2f}",
                target=f"≥ {LEAST_PACE}",
                verdict="pass" if pace >= LEAST_PACE else "fail",
            ),
            Finding(
                claim="no job runs out of memory while it tunes itself",
                side="tuned",
                value=f"{num_failures} times",
                target="0",
                verdict="fail" if num_failures else "pass",
            ),
        )

    def table_lines(self) -> list[str]:
        ways = list(self.found[0].seconds_to_train()) if self.found else []
        lines = [
            "| job | start | best of all | tuned | tuned / best | probes | until settled | pace meanwhile | "
            + " | ".join(f"time {way}" for way in ways)
            + " |",
            "|---|---:|---:|---:|---:|---:|---:|---:|" + "---:|" * len(ways),
        ]
        for each in self.found:
            seconds = each.seconds_to_train()
            settled = f"{each.seconds:.0f} s" if each.has_settled else f"not in {each.seconds:.0f} s"
            lines.append(
                f"| {each.name} | {each.start:,.0f}/s | {each.best:,.0f}/s | {each.tuned:,.0f}/s | {each.share:.2f} "
                f"| {each.num_probes} | {settled} | {each.pace_meanwhile:.2f} | "
                + " | ".join(f"{seconds[way]:,.0f} s" for way in ways)
                + " |"
            )
        lines.append(f"| verdict | | | | {': '.join(self._decided())} | | | | " + " | " * len(ways))
        return lines

    def _decided(self) -> tuple[Verdict, str]:
        good = sum(each.share >= LEAST_SHARE for each in self.found)
        told = f"{good} of {len(self.found)} reach {LEAST_SHARE}; the target is {self.least_good}"
        return ("pass" if good >= self.least_good else "fail"), told


def _in_words(config: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in config.items())
