"""How long things took, as p50 and p99 beside their targets; what ran, and how it was timed, is the caller's.

Words: an *occasion* is one thing that happened, such as one change of a file; the *samples* of an occasion are what
each process made of it. Samples of one occasion go together: they are resampled as one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from benchmarks.harness import HIGH, LOW, Finding, Unit, Verdict, shown_value

__all__ = ["QuantileTable", "QuantileTarget", "Samples", "interval_of_quantile", "quantile"]

NUM_RESAMPLES = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantileTarget:
    """What is claimed of samples: this quantile of them is at most so much."""

    quantile: float
    at_most: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """One row of the table."""

    name: str
    occasions: Sequence[Sequence[float]]
    unit: Unit = "seconds"
    target: QuantileTarget | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantileTable:
    """Rows of samples, with what became of their targets."""

    title: str
    rows: tuple[Samples, ...]
    notes: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        return f"**{self.title}**"

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return tuple(decide_quantile(row)[0] for row in self.rows)

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(_finding(row) for row in self.rows)

    def table_lines(self) -> list[str]:
        lines = [
            "| name | samples | p50 (90% interval) | p99 (90% interval) | largest | target | verdict |",
            "|---|---:|---:|---:|---:|---:|---|",
        ]
        for row in self.rows:
            values = list(chain.from_iterable(row.occasions))
            target = row.target
            claimed = f"p{100 * target.quantile:g} ≤ {shown_value(target.at_most, row.unit)}" if target else ""
            verdict = ": ".join(decide_quantile(row)) if target else ""
            lines.append(
                f"| {row.name} | {len(values)} | {_shown(row, 0.5)} | {_shown(row, 0.99)} "
                f"| {shown_value(max(values), row.unit)} | {claimed} | {verdict} |"
            )
        return lines


def _finding(row: Samples) -> Finding:
    """Of the quantile that is claimed, else of the median."""
    target = row.target or QuantileTarget(quantile=0.5, at_most=math.inf)
    place = "largest" if target.quantile == 1 else f"p{100 * target.quantile:g}"
    found = quantile(list(chain.from_iterable(row.occasions)), target.quantile)
    limit = shown_value(target.at_most, row.unit)
    return Finding(
        claim=f"{row.name}: the {place} is at most {limit}" if row.target else f"{row.name}: the {place}",
        side=row.name,
        value=f"{place} {shown_value(found, row.unit)}",
        target=f"{place} ≤ {limit}" if row.target else None,
        verdict=decide_quantile(row)[0],
        reason=decide_quantile(row)[1] if row.target else None,
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least ``share`` of them do not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


def interval_of_quantile(occasions: Sequence[Sequence[float]], share: float, *, seed: int = 0) -> tuple[float, float]:
    """Where the quantile lies in nine of ten resamplings of the occasions; the same each time it is asked."""
    draw = random.Random(seed)
    found = sorted(
        quantile(list(chain.from_iterable(draw.choices(occasions, k=len(occasions)))), share)
        for _ in range(NUM_RESAMPLES)
    )
    last = NUM_RESAMPLES - 1
    return found[round(LOW * last)], found[round(HIGH * last)]


def decide_quantile(row: Samples) -> tuple[Verdict, str]:
    """Whether a row's target was met, with the reason in words; undecided where its interval holds the target."""
    if row.target is None:
        return "none claimed", "nothing is claimed of it"
    share, at_most = row.target.quantile, row.target.at_most
    low, high = interval_of_quantile(row.occasions, share)
    limit = shown_value(at_most, row.unit)
    if low <= at_most < high:
        spread = f"{shown_value(low, row.unit)} to {shown_value(high, row.unit)}"
        return "inconclusive", f"the interval of p{100 * share:g}, {spread}, holds {limit}"
    found = shown_value(quantile(list(chain.from_iterable(row.occasions)), share), row.unit)
    return ("pass", f"{found} is at most {limit}") if high <= at_most else ("fail", f"{found} is more than {limit}")


def _shown(row: Samples, share: float) -> str:
    low, high = interval_of_quantile(row.occasions, share)
    found = quantile(list(chain.from_iterable(row.occasions)), share)
    return f"{shown_value(found, row.unit)} ({shown_value(low, row.unit)} to {shown_value(high, row.unit)})"
