"""Ways to tune a job while it trains, on simulated jobs whose seeds were frozen before ours was written.

Each job has a model, a cluster and data of its own, effects that no tuner is told of, and steps that differ by 3
percent, with spikes among them. A tuner begins with a user's plausible config and has as long as the best safe point
takes 3,000 steps. Steps under whatever it tries are training; changes, restarts and steps for which memory does not
suffice are time that is lost. What is told as a share is of the *best*: the fastest point that leaves 6 percent of
memory free, which nobody but the referee knows.

Then the same with a change after a while: links, loading or one rank become slower, where that is felt. The best is
another then, and so is what a tuner is measured by. Last, nothing changes for 20,000 steps, and whoever begins to
search again is mistaken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean, median
from typing import TypeAlias

from benchmarks.harness import Finding, Result, Verdict, shortened
from benchmarks.simulated_cases import CHANGES, REPORT_SEEDS, seeds_tried
from benchmarks.simulated_job import SimulatedJob
from benchmarks.tuning_ours import Ours
from benchmarks.tuning_peers import PEERS, Way, coordinate_descent, gaussian
from benchmarks.tuning_race import GOOD, Raced, is_felt, oracle, race, race_after_change, settled, train_long

__all__ = ["Target", "TuningTable", "after_changes", "from_a_bad_start", "main", "without_change"]

NUM_JOBS, NUM_JOBS_CHANGED, NUM_JOBS_LONG = 60, 16, 6
NUM_STEPS_LONG, NUM_STEPS_SEARCHED = 20_000, 500
WITHIN_STEPS = 100
LONG_STEP_SECONDS = 1.0
OURS, DEEPSPEED, ORACLE = "ours", "DeepSpeed-style restarts", "the best, known from the start"
SETTLED = "the best before the change, which stays"

_NOTE_OF_NOISE = (
    "an efficiency is of the steps that the best would make if none took longer than usual; spikes make them longer"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What is claimed of one number, and what it was."""

    name: str
    found: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def is_met(self) -> bool:
        return (self.at_least is None or self.found >= self.at_least) and (
            self.at_most is None or self.found <= self.at_most
        )

    @property
    def words(self) -> str:
        sign, limit = ("≥", self.at_least) if self.at_least is not None else ("≤", self.at_most)
        return f"{self.name} {sign} {limit:g}"


Row: TypeAlias = tuple[str, Sequence[str], Sequence[Target]]
"""A tuner's name, what it came to, and what was claimed of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningTable:
    """One row for each tuner."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Row]
    notes: Sequence[str] = ()

    @property
    def heading(self) -> str:
        return f"**{self.title}**"

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return tuple(_verdict(targets) for _, _, targets in self.rows)

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(
            Finding(
                claim=f"{name}: {', '.join(each.words for each in targets) or self.columns[0]}",
                side=name,
                value=", ".join(f"{each.name} {each.found:.3g}" for each in targets) or cells[0],
                target=", ".join(each.words for each in targets) or None,
                verdict=_verdict(targets),
                reason=_verdict_in_words(targets).partition(": ")[2] or None,
            )
            for name, cells, targets in self.rows
        )

    def table_lines(self) -> list[str]:
        lines = [
            f"| tuner | {' | '.join(self.columns)} | target | verdict |",
            f"|---|{'---:|' * len(self.columns)}---|---|",
        ]
        for name, cells, targets in self.rows:
            claimed = ", ".join(each.words for each in targets)
            lines.append(f"| {name} | {' | '.join(cells)} | {claimed} | {_verdict_in_words(targets)} |")
        return lines


def main(share: float = 1.0) -> list[Result]:
    """A table for each of the three."""
    jobs, changed, long = (shortened(num, share, least=2) for num in (NUM_JOBS, NUM_JOBS_CHANGED, NUM_JOBS_LONG))
    seeds = list(seeds_tried(REPORT_SEEDS, jobs))
    return [from_a_bad_start(seeds), after_changes(seeds, changed), without_change(seeds[:long])]


def from_a_bad_start(seeds: Sequence[int]) -> TuningTable:
    """Every tuner on every job."""
    ways: Mapping[str, Callable[[], Way]] = {
        **{name: _always(way) for name, way in PEERS.items()},
        OURS: Ours,
        ORACLE: _always(oracle),
    }
    found = {name: [race(SimulatedJob(seed), make()) for seed in seeds] for name, make in ways.items()}
    restarts = fmean(each.efficiency for each in found[DEEPSPEED])
    rows: list[Row] = []
    for name, raced in found.items():
        times = fmean(each.efficiency for each in raced) / max(restarts, 1e-9)
        soon = _share(raced, lambda each: each.held_from is not None and each.held_from <= WITHIN_STEPS)
        failures = sum(each.num_failures for each in raced)
        cells = [
            f"{fmean(each.share_at_end for each in raced):.3f}",
            f"{soon:.0%}",
            _middle([each.held_from for each in raced]),
            f"{fmean(each.efficiency for each in raced):.3f}",
            f"{times:.2f}",
            str(failures),
        ]
        targets = [
            Target(name=f"share of jobs within {WITHIN_STEPS} steps", found=soon, at_least=0.9),
            Target(name="times DeepSpeed-style", found=times, at_least=1.7),
            Target(name="out of memory", found=failures, at_most=0),
        ]
        rows.append((name, cells, targets if name == OURS else []))
    columns = [
        "share of the best at the end",
        f"jobs with ≥ {GOOD} of it within {WITHIN_STEPS} steps, and from there on",
        "steps until then, half of jobs",
        "efficiency over 3,000 steps",
        "times DeepSpeed-style",
        "out of memory",
    ]
    title = f"Tuning from a user's config ({len(seeds)} jobs, 3,000 steps of the best)"
    return TuningTable(title=title, columns=columns, rows=rows, notes=[_NOTE_OF_NOISE, _note_of_long(seeds, found)])


def after_changes(seeds: Sequence[int], most: int) -> TuningTable:
    """Those who search again, and one who does not, on jobs that feel a change; each change on so many of them."""
    ways: Mapping[str, Callable[[], Way]] = {
        SETTLED: _always(settled),
        "coordinate descent": _always(coordinate_descent),
        "Gaussian process alone": _always(gaussian),
        OURS: Ours,
        ORACLE: _always(oracle),
    }
    rows: list[Row] = []
    all_of_ours: list[Raced] = []
    for change, circumstances in CHANGES.items():
        felt = list(islice((seed for seed in seeds if is_felt(seed, circumstances)), most))
        for name, make in ways.items():
            raced = [race_after_change(SimulatedJob(seed), make(), circumstances) for seed in felt]
            if name == OURS:
                all_of_ours += raced
            rows.append((f"{change} ({len(felt)} jobs): {name}", _cells_after(raced), []))
    targets = [
        Target(name="share of the best", found=fmean(each.share_at_end for each in all_of_ours), at_least=GOOD),
        Target(name="share of jobs", found=_share(all_of_ours, _is_good_at_end), at_least=0.95),
        Target(name="out of memory", found=sum(each.num_failures for each in all_of_ours), at_most=0),
    ]
    rows.append((f"all of them ({len(all_of_ours)} jobs): {OURS}", _cells_after(all_of_ours), targets))
    columns = [
        "share of the new best at the end",
        f"jobs with ≥ {GOOD} of it",
        "steps from the change until it holds, half of jobs",
        "efficiency since",
        "out of memory",
    ]
    return TuningTable(title="After a change", columns=columns, rows=rows)


def without_change(seeds: Sequence[int]) -> TuningTable:
    """Ours for very long, with nothing that changes."""
    num_alarms = 0
    for seed in seeds:
        ours = Ours()
        train_long(SimulatedJob(seed), ours, NUM_STEPS_LONG)
        num_alarms += ours.num_reopened(after_step=NUM_STEPS_SEARCHED)
    rate = num_alarms / len(seeds)
    target = Target(name="in 20,000 steps", found=rate, at_most=1)
    title = f"With nothing that changes ({len(seeds)} jobs, {NUM_STEPS_LONG:,} steps of each)"
    columns = ["searches begun again", "in 20,000 steps"]
    return TuningTable(title=title, columns=columns, rows=[(OURS, [str(num_alarms), f"{rate:.2f}"], [target])])


def _cells_after(raced: Sequence[Raced]) -> list[str]:
    return [
        f"{fmean(each.share_at_end for each in raced):.3f}",
        f"{_share(raced, _is_good_at_end):.0%}",
        _middle([each.held_from for each in raced]),
        f"{fmean(each.efficiency for each in raced):.3f}",
        str(sum(each.num_failures for each in raced)),
    ]


def _note_of_long(seeds: Sequence[int], found: Mapping[str, Sequence[Raced]]) -> str:
    """Restarts cost least where training is long."""
    places = [at for at, seed in enumerate(seeds) if _best_seconds(seed) >= LONG_STEP_SECONDS]
    if not places:
        return f"no job has steps of {LONG_STEP_SECONDS:g} s or longer"
    ours, restarts = (fmean(found[name][at].efficiency for at in places) for name in (OURS, DEEPSPEED))
    return (
        f"where a step of the best takes {LONG_STEP_SECONDS:g} s or longer, so that a restart costs less beside it "
        f"({len(places)} jobs), ours has an efficiency of {ours:.3f} and DeepSpeed-style restarts one of {restarts:.3f}"
    )


def _best_seconds(seed: int) -> float:
    job = SimulatedJob(seed)
    assert job.oracle is not None
    return job.true_step_seconds(job.oracle)


def _always(way: Way) -> Callable[[], Way]:
    return lambda: way


def _is_good_at_end(raced: Raced) -> bool:
    return raced.share_at_end >= GOOD


def _share(raced: Sequence[Raced], is_so: Callable[[Raced], bool]) -> float:
    return sum(map(is_so, raced)) / len(raced)


def _middle(steps: Sequence[int | None]) -> str:
    found = median(float("inf") if each is None else each for each in steps)
    return "never" if found == float("inf") else f"{found:.0f}"


def _verdict(targets: Sequence[Target]) -> Verdict:
    if not targets:
        return "none claimed"
    return "pass" if all(each.is_met for each in targets) else "fail"


def _verdict_in_words(targets: Sequence[Target]) -> str:
    missed = [f"{each.name} is {each.found:.3g}" for each in targets if not each.is_met]
    if not targets:
        return ""
    return f"fail: {', '.join(missed)}" if missed else "pass: as claimed"
