"""Comparing ways to do the same work, interleaved in one process: ratios round by round, and how far to believe them.

A benchmark is a module of this folder whose ``main()`` returns the results that it came to, such as comparisons. One
that is long takes ``share``, how much of its usual time to use, and takes fewer rounds, trials or jobs by that;
``main_on_gpu()`` is what needs a GPU. ``python -m benchmarks`` prints and records them. Nothing here knows what is
compared, nor how results are kept.

Words: a *side* is one way to do the work; the first is the *baseline*, A, and runs twice in each *round*, as A and A'.
A *ratio* is a side's reading over the baseline's of the same round, so less is better. The *A/A interval* is what
A'/A, where nothing differs, was seen to be: no claim finer than that can be decided here.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal, Protocol

import psutil

__all__ = [
    "Claim",
    "Comparison",
    "Finding",
    "Machine",
    "Reading",
    "Readings",
    "Result",
    "Row",
    "Side",
    "Unit",
    "UnlikeWorkError",
    "Verdict",
    "bootstrap_interval",
    "check_same_work",
    "compare",
    "compare_measures",
    "comparison_of",
    "decide",
    "frozen",
    "paired_ratios",
    "rotated",
    "rounded",
    "run_rounds",
    "shortened",
    "shown_value",
    "table",
    "this_machine",
]

Verdict = Literal["pass", "fail", "inconclusive", "none claimed"]
Unit = Literal["seconds", "bytes", "count"]

NUM_RESAMPLES = 2000
LOW, HIGH = 0.05, 0.95  # which part of the resampled medians the A/A interval holds


class UnlikeWorkError(RuntimeError):
    """Two sides of a comparison did not do the same work, so their times say nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What a side returns that measures itself: the value to compare, in the comparison's unit, and the work done."""

    value: float
    work: object


@dataclass(frozen=True, kw_only=True, slots=True)
class Readings:
    """What a side returns that takes several measures of one run: a value for each, and the work done."""

    values: Mapping[str, float]
    work: object


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What is claimed of a side: its reading is at most so many times the baseline's."""

    at_most: float

    def __post_init__(self) -> None:
        if not 0 < self.at_most < math.inf or self.at_most == 1:
            raise ValueError(
                f"at_most is {self.at_most}; allowed: a number > 0 and not 1, which leaves no margin to decide in; "
                "for 'no slower' say how much is still no slower, such as 1.02"
            )

    @property
    def margin(self) -> float:
        """How far from 1 the claim lies."""
        return abs(1 - self.at_most)


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One way to do the work.

    ``run`` returns what it did as a value that compares with ``==`` (a count, a digest, a tuple of these): it is timed
    whole. Where only part of it is to count, or something other than time, it returns a Reading.
    """

    name: str
    run: Callable[[], object]
    claim: Claim | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One side's line in the table."""

    name: str
    median: float
    ratio: float
    aa_interval: tuple[float, float]
    claim: Claim | None
    verdict: Verdict
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One side's line in the results: what it came to, beside what, and whether that is what is claimed of it.

    What does not apply, or was not measured, is None.
    """

    claim: str
    """What is claimed, in words that can be read without the table; where nothing is, what was measured."""
    side: str
    value: str
    """As it is shown, with its unit."""
    peer: str | None = None
    peer_value: str | None = None
    ratio: float | None = None
    """The side's over the peer's, as the median of paired rounds where there were rounds."""
    difference: str | None = None
    """The side's less the peer's, with its unit, where the claim is of that."""
    aa_interval: tuple[float, float] | None = None
    aa_unit: Literal["ratio", "µs"] = "ratio"
    target: str | None = None
    verdict: Verdict = "none claimed"
    reason: str | None = None


class Result(Protocol):
    """What a benchmark's ``main`` returns some of: a table that can be printed and recorded."""

    @property
    def heading(self) -> str:
        """What stands above the table."""

    @property
    def notes(self) -> Sequence[str]:
        """What stands below it, a sentence each."""

    @property
    def verdicts(self) -> Sequence[Verdict]:
        """What became of each row's claim."""

    @property
    def findings(self) -> Sequence[Finding]:
        """What the results say of it: a line for each claim, and for what was measured beside it."""

    def table_lines(self) -> list[str]:
        """The table in Markdown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What came of one comparison: a row for each side, the baseline's first."""

    title: str
    unit: Unit
    num_rounds: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        return f"**{self.title}** ({self.num_rounds} rounds)"

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return tuple(row.verdict for row in self.rows)

    @property
    def findings(self) -> tuple[Finding, ...]:
        baseline, *others = self.rows
        takes = "comes to" if self.unit == "count" else "takes"
        return tuple(
            Finding(
                claim=f"{row.name} {takes} at most {row.claim.at_most:.4g} times what {baseline.name} {takes}"
                if row.claim
                else f"{row.name}, beside {baseline.name}",
                side=row.name,
                value=shown_value(row.median, self.unit),
                peer=baseline.name,
                peer_value=shown_value(baseline.median, self.unit),
                ratio=rounded(row.ratio),
                aa_interval=(rounded(row.aa_interval[0]), rounded(row.aa_interval[1])),
                target=f"≤ {row.claim.at_most:.4g}" if row.claim else None,
                verdict=row.verdict,
                reason=row.reason if row.claim else None,
            )
            for row in others
        )

    def table_lines(self) -> list[str]:
        digits = max(_digits(row.claim) for row in self.rows)
        lines = [
            "| name | median | ratio | A/A interval | target | verdict |",
            "|---|---:|---:|---:|---:|---|",
        ]
        for row in self.rows:
            low, high = row.aa_interval
            name = row.name.replace("|", "\\|")
            target = f"≤ {row.claim.at_most:.4g}" if row.claim else ""
            verdict = f"{row.verdict}: {row.reason}" if row.claim else ""
            lines.append(
                f"| {name} | {shown_value(row.median, self.unit)} | {row.ratio:.{digits}f} "
                f"| {low:.{digits}f} to {high:.{digits}f} | {target} | {verdict} |"
            )
        return lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What ran the comparison, in general words: no host and no exact model is named."""

    num_cpus: int
    cpu: str
    memory_bytes: int
    accelerator: str | None


# --- statistics -----------------------------------------------------------------------------------------------------


def rotated(num_sides: int, round_index: int) -> list[int]:
    """The order of the sides in one round: over many rounds each side stands in each place, and before each other."""
    order = list(range(num_sides))
    turn = round_index % num_sides
    order = order[turn:] + order[:turn]
    return order[::-1] if (round_index // num_sides) % 2 else order


def paired_ratios(side: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """A side's readings over the baseline's, round by round."""
    ratios = []
    for mine, other in zip(side, baseline, strict=True):
        if not other > 0:
            raise ValueError(f"the baseline read {other}; a ratio needs readings > 0: give each run more to do")
        ratios.append(mine / other)
    return ratios


def bootstrap_interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """Where the median of such values lies in nine of ten resamplings; the same each time it is asked."""
    draw = random.Random(seed)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES))
    last = NUM_RESAMPLES - 1
    return medians[round(LOW * last)], medians[round(HIGH * last)]


def decide(ratio: float, aa_interval: tuple[float, float], claim: Claim | None) -> tuple[Verdict, str]:
    """Whether a claim holds, with the reason in words.

    The A/A interval counts as wide as it reaches from 1 too: where A' differs from A by more than the margin, however
    steadily, the place in the round matters more than what is claimed.
    """
    if claim is None:
        return "none claimed", "nothing is claimed of it"
    low, high = aa_interval
    width = max(high, 1.0) - min(low, 1.0)
    digits = _digits(claim)
    if width > claim.margin:
        shown = f"{width:.{digits - 2}%}, the claim's margin is {claim.margin:.{digits - 2}%}"
        return "inconclusive", f"the baseline against itself spans {shown}"
    if ratio <= claim.at_most:
        return "pass", f"{ratio:.{digits}f} is at most {claim.at_most:.{digits}f}"
    return "fail", f"{ratio:.{digits}f} is more than {claim.at_most:.{digits}f}"


def _digits(claim: Claim | None) -> int:
    """How many decimals of a ratio to show, so that a claim's margin can be seen."""
    return 4 if claim is not None and claim.margin < 0.02 else 3


def check_same_work(work: Mapping[str, object]) -> None:
    """Raise UnlikeWorkError where the sides of one round did not all do the same."""
    names = list(work)
    for name in names[1:]:
        if work[name] != work[names[0]]:
            raise UnlikeWorkError(
                f"{name!r} did {work[name]!r} and {names[0]!r} did {work[names[0]]!r}; sides are compared only where "
                "they do the same work: make both do it, and return it from run"
            )


# --- running --------------------------------------------------------------------------------------------------------


def compare(
    title: str,
    sides: Sequence[Side],
    *,
    num_rounds: int,
    num_warmup_rounds: int = 1,
    unit: Unit = "seconds",
    clock: Callable[[], float] = time.perf_counter,
    settle: Callable[[], object] = gc.collect,
) -> Comparison:
    """Run the sides interleaved, the first as the baseline and twice, and say what came of it.

    ``settle`` runs before each run, outside its time. Warm-up rounds check the work and are not read.
    """

    def read(side: Side) -> Readings:
        settle()
        start = clock()
        done = side.run()
        elapsed = clock() - start
        value, work = (done.value, done.work) if isinstance(done, Reading) else (elapsed, done)
        return Readings(values={title: value}, work=work)

    (compared,) = _compare([title], sides, read, unit, num_rounds=num_rounds, num_warmup_rounds=num_warmup_rounds)
    return compared


def compare_measures(
    titles: Sequence[str],
    sides: Sequence[Side],
    *,
    num_rounds: int,
    num_warmup_rounds: int = 1,
    unit: Unit = "seconds",
) -> list[Comparison]:
    """As ``compare``, for sides that take several measures of each run: one comparison for each title.

    Every side returns Readings with a value under each title.
    """

    def read(side: Side) -> Readings:
        done = side.run()
        assert isinstance(done, Readings)
        return done

    return _compare(titles, sides, read, unit, num_rounds=num_rounds, num_warmup_rounds=num_warmup_rounds)


@contextmanager
def frozen() -> Iterator[None]:
    """In here collections of garbage pass over what there is by now; what was frozen before stays so afterwards."""
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


def run_rounds(
    sides: Sequence[Side], read: Callable[[Side], Readings], *, num_rounds: int, num_warmup_rounds: int = 1
) -> list[list[Mapping[str, float]]]:
    """What ``read`` gave in each round: of the baseline once more, then of the sides in their order.

    Raises UnlikeWorkError where the sides of a round did not do the same.
    """
    if len({side.name for side in sides}) < max(len(sides), 2):
        raise ValueError(f"sides are {[side.name for side in sides]}; allowed: two or more, with unlike names")
    if num_rounds < 3:
        raise ValueError(f"num_rounds is {num_rounds}; use at least 3, and 15 or more for a claim of a few percent")
    runners = [sides[0], *sides]  # 0: A', 1: A
    readings: list[list[Mapping[str, float]]] = [[] for _ in runners]
    for index in range(-num_warmup_rounds, num_rounds):
        work: dict[str, object] = {}
        for place in rotated(len(runners), index % (2 * len(runners))):
            done = read(runners[place])
            work[runners[place].name if place else f"{runners[0].name}, again"] = done.work
            if index >= 0:
                readings[place].append(done.values)
        check_same_work(work)
    return readings


def _compare(
    titles: Sequence[str],
    sides: Sequence[Side],
    read: Callable[[Side], Readings],
    unit: Unit,
    *,
    num_rounds: int,
    num_warmup_rounds: int,
) -> list[Comparison]:
    readings = run_rounds(sides, read, num_rounds=num_rounds, num_warmup_rounds=num_warmup_rounds)
    return [comparison_of(title, sides, readings, unit=unit) for title in titles]


def comparison_of(
    title: str, sides: Sequence[Side], readings: Sequence[Sequence[Mapping[str, float]]], *, unit: Unit = "seconds"
) -> Comparison:
    """What ``run_rounds`` read of these sides under one title."""
    again, *values = [[one[title] for one in mine] for mine in readings]
    aa_interval = bootstrap_interval(paired_ratios(again, values[0]))
    rows = tuple(_row(side, mine, values[0], aa_interval) for side, mine in zip(sides, values, strict=True))
    return Comparison(title=title, unit=unit, num_rounds=len(again), rows=rows)


def _row(side: Side, values: Sequence[float], baseline: Sequence[float], aa_interval: tuple[float, float]) -> Row:
    ratio = median(paired_ratios(values, baseline))
    verdict, reason = decide(ratio, aa_interval, side.claim)
    return Row(
        name=side.name,
        median=median(values),
        ratio=ratio,
        aa_interval=aa_interval,
        claim=side.claim,
        verdict=verdict,
        reason=reason,
    )


# --- how long to go on ----------------------------------------------------------------------------------------------


def shortened(number: int, share: float, *, least: int) -> int:
    """How many of so many rounds, trials or jobs a run takes that has only a share of its time."""
    return min(number, max(least, round(number * share)))


# --- showing --------------------------------------------------------------------------------------------------------


def table(result: Result) -> str:
    """A result as a Markdown table under its heading, with its notes."""
    notes = ["", *(f"- {note}" for note in result.notes)] if result.notes else []
    return "\n".join([result.heading, "", *result.table_lines(), *notes]) + "\n"


def rounded(ratio: float) -> float:
    """A ratio with the digits that are kept of it: five."""
    return float(f"{ratio:.5g}")


def shown_value(value: float, unit: Unit) -> str:
    """A reading in the unit that suits its size."""
    if unit == "count":
        return f"{value:.6g}"
    steps: Sequence[tuple[float, str]] = (
        ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
        if unit == "seconds"
        else ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
    )
    size, name = next((step for step in steps if abs(value) >= step[0]), steps[-1])
    return f"{value / size:.4g} {name}"


def generic_cpu_name(model_name: str) -> str:
    """The family of a processor out of its model name: without marks, model numbers and speed."""
    words = model_name.split("@")[0].replace("(R)", "").replace("(TM)", "").split()
    kept = [word for word in words if not any(sign.isdigit() for sign in word) and word not in ("CPU", "Processor")]
    return " ".join(kept) or "unknown processor"


def this_machine() -> Machine:
    """The machine that this process runs on; the accelerator only where a benchmark has loaded torch."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        cpuinfo = ""
    models = [line.partition(":")[2] for line in cpuinfo.splitlines() if line.startswith("model name")]
    torch = sys.modules.get("torch")
    return Machine(
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cpu=f"{generic_cpu_name(models[0] if models else platform.processor())} ({platform.machine()})",
        memory_bytes=psutil.virtual_memory().total,
        accelerator=torch.cuda.get_device_name() if torch and torch.cuda.is_available() else None,
    )
