"""How much longer than a baseline the sides of a comparison take, in seconds, and whether that is within a limit.

For claims of so many microseconds whatever the work is; harness.py, whose words are used here, has those of so many
percent of it. A *difference* is a side's reading less the baseline's of the same round.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.harness import (
    Finding,
    Reading,
    Readings,
    Side,
    Verdict,
    bootstrap_interval,
    rounded,
    run_rounds,
    shown_value,
)

__all__ = ["DifferenceTable", "Differences", "compare_differences", "compare_shares", "decide_difference"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Differences:
    """One side's line in the table."""

    name: str
    values: Sequence[float]
    """What it read in each round, in seconds."""
    differences: Sequence[float]
    at_most: float | None = None
    """What is claimed of their median."""

    @property
    def difference(self) -> float:
        return median(self.differences)

    @property
    def interval(self) -> tuple[float, float]:
        """Where that median lies in nine of ten resamplings."""
        return bootstrap_interval(self.differences)


@dataclass(frozen=True, kw_only=True, slots=True)
class DifferenceTable:
    """What came of one comparison: a row for each side, the baseline's first."""

    title: str
    rows: tuple[Differences, ...]
    aa_interval: tuple[float, float]
    """What the baseline was seen to take more than itself."""
    notes: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        return f"**{self.title}** ({len(self.rows[0].values)} rounds)"

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return tuple(self._decided(row)[0] for row in self.rows)

    @property
    def findings(self) -> tuple[Finding, ...]:
        baseline, *others = self.rows
        usual = median(baseline.values)
        return tuple(
            Finding(
                claim=f"{row.name}, beside {baseline.name}"
                if row.at_most is None
                else f"{row.name} takes at most {row.at_most * 1e6:.1f} µs more than {baseline.name}",
                side=row.name,
                value=_shown(median(row.values)),
                peer=baseline.name,
                peer_value=_shown(usual),
                ratio=rounded(1 + row.difference / usual),
                difference=f"{_signed(row.difference)} ({_span(row.interval)})",
                aa_interval=(round(self.aa_interval[0] * 1e6, 1), round(self.aa_interval[1] * 1e6, 1)),
                aa_unit="µs",
                target=None if row.at_most is None else f"≤ {_signed(row.at_most)}",
                verdict=self._decided(row)[0],
                reason=None if row.at_most is None else self._decided(row)[1],
            )
            for row in others
        )

    def table_lines(self) -> list[str]:
        lines = [
            "| name | median | over the baseline (90% interval) | ratio | A/A interval | target | verdict |",
            "|---|---:|---:|---:|---:|---:|---|",
        ]
        baseline, *others = self.rows
        lines.append(f"| {baseline.name} | {_shown(median(baseline.values))} | | | {_span(self.aa_interval)} | | |")
        for row in others:
            target = "" if row.at_most is None else f"≤ {_signed(row.at_most)}"
            verdict = "" if row.at_most is None else ": ".join(self._decided(row))
            ratio = 1 + row.difference / median(baseline.values)
            lines.append(
                f"| {row.name} | {_shown(median(row.values))} | {_signed(row.difference)} ({_span(row.interval)}) "
                f"| {ratio:.3f} | {_span(self.aa_interval)} | {target} | {verdict} |"
            )
        return lines

    def _decided(self, row: Differences) -> tuple[Verdict, str]:
        return decide_difference(row.difference, row.interval, self.aa_interval, row.at_most)


def compare_differences(
    title: str,
    sides: Sequence[Side],
    at_most: Mapping[str, float],
    *,
    num_rounds: int,
    settle: Callable[[], object] = gc.collect,
) -> DifferenceTable:
    """Run the sides interleaved, the first as the baseline and twice; ``at_most`` has what is claimed, side by side.

    Every side returns a Reading in seconds; ``settle`` runs before each.
    """

    def read(side: Side) -> Readings:
        settle()
        done = side.run()
        assert isinstance(done, Reading)
        return Readings(values={title: done.value}, work=done.work)

    readings = run_rounds(sides, read, num_rounds=num_rounds)
    return _table_of(title, sides, readings, lambda name, baseline: at_most.get(name))


def compare_shares(
    titles: Sequence[str],
    sides: Sequence[Side],
    at_most: Mapping[str, float],
    *,
    num_rounds: int,
    settle: Callable[[], object] = gc.collect,
) -> list[DifferenceTable]:
    """As ``compare_differences``, for sides that return Readings, in seconds, with a value under each title.

    ``at_most`` has what is claimed as a part of the baseline's median.
    """

    def read(side: Side) -> Readings:
        settle()
        done = side.run()
        assert isinstance(done, Readings)
        return done

    def claimed(name: str, baseline: float) -> float | None:
        return at_most[name] * baseline if name in at_most else None

    readings = run_rounds(sides, read, num_rounds=num_rounds)
    return [_table_of(title, sides, readings, claimed) for title in titles]


def _table_of(
    title: str,
    sides: Sequence[Side],
    readings: Sequence[Sequence[Mapping[str, float]]],
    at_most: Callable[[str, float], float | None],
) -> DifferenceTable:
    """What ``run_rounds`` read under one title; ``at_most`` is asked by a side's name and the baseline's median."""
    again, *values = [[one[title] for one in mine] for mine in readings]
    return DifferenceTable(
        title=title,
        rows=tuple(
            Differences(
                name=side.name,
                values=mine,
                differences=_differences(mine, values[0]),
                at_most=at_most(side.name, median(values[0])),
            )
            for side, mine in zip(sides, values, strict=True)
        ),
        aa_interval=bootstrap_interval(_differences(again, values[0])),
    )


def decide_difference(
    difference: float, interval: tuple[float, float], aa_interval: tuple[float, float], at_most: float | None
) -> tuple[Verdict, str]:
    """Whether a claim holds, with the reason in words.

    Undecided where the baseline differs from itself by more than is claimed, or where the difference's own interval
    holds what is claimed.
    """
    if at_most is None:
        return "none claimed", "nothing is claimed of it"
    width = max(aa_interval[1], 0.0) - min(aa_interval[0], 0.0)
    if width > at_most:
        return "inconclusive", f"the baseline against itself spans {_shown(width)}, the claim is {_shown(at_most)}"
    low, high = interval
    if low <= at_most < high:
        return "inconclusive", f"its interval, {_span(interval)}, holds {_signed(at_most)}"
    if high <= at_most:
        return "pass", f"{_signed(difference)} is at most {_signed(at_most)}"
    return "fail", f"{_signed(difference)} is more than {_signed(at_most)}"


def _differences(side: Sequence[float], baseline: Sequence[float]) -> list[float]:
    return [mine - other for mine, other in zip(side, baseline, strict=True)]


def _shown(seconds: float) -> str:
    return shown_value(seconds, "seconds")


def _signed(seconds: float) -> str:
    return f"{seconds * 1e6:+.1f} µs"


def _span(interval: tuple[float, float]) -> str:
    return f"{_signed(interval[0])} to {_signed(interval[1])}"
