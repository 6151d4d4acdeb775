"""How much sides get done in a second, beside what a baseline does in the same round, and whether that is enough.

For claims of throughput, of which more is better; harness.py, whose words are used here, has those of time. A *rate* is
what a side reads: so much a second. A *ratio* is a side's rate over the baseline's of the same round.
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
    paired_ratios,
    rounded,
    run_rounds,
)

__all__ = ["RateTable", "Rates", "compare_rates", "decide_rate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """One side's line in the table."""

    name: str
    values: Sequence[float]
    """Its rate in each round."""
    ratios: Sequence[float]
    at_least: float | None = None
    """What is claimed of their median."""

    @property
    def interval(self) -> tuple[float, float]:
        """Where the median of the ratios lies in nine of ten resamplings."""
        return bootstrap_interval(self.ratios)


@dataclass(frozen=True, kw_only=True, slots=True)
class RateTable:
    """What came of one comparison: a row for each side, the baseline's first."""

    title: str
    what: str
    """Is done so many times a second."""
    rows: tuple[Rates, ...]
    aa_interval: tuple[float, float]
    """What the ratio of the baseline to itself was seen to be."""
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
        low, high = self.aa_interval
        return tuple(
            Finding(
                claim=f"{row.name}, beside {baseline.name}, in {self.what} a second: more is better"
                if row.at_least is None
                else f"{row.name} gives at least {row.at_least:.4g} times the {self.what} a second of {baseline.name}",
                side=row.name,
                value=f"{median(row.values):,.0f} a second",
                peer=baseline.name,
                peer_value=f"{median(baseline.values):,.0f} a second",
                ratio=rounded(median(row.ratios)),
                aa_interval=(rounded(low), rounded(high)),
                target=None if row.at_least is None else f"≥ {row.at_least:.4g}",
                verdict=self._decided(row)[0],
                reason=None if row.at_least is None else self._decided(row)[1],
            )
            for row in others
        )

    def table_lines(self) -> list[str]:
        lines = [
            f"| name | {self.what} a second | of the baseline's (90% interval) | A/A interval | target | verdict |",
            "|---|---:|---:|---:|---:|---|",
        ]
        for place, row in enumerate(self.rows):
            ratio = f"{median(row.ratios):.3f} ({_span(row.interval)})" if place else ""
            target = "" if row.at_least is None else f"≥ {row.at_least:.4g}"
            verdict = "" if row.at_least is None else ": ".join(self._decided(row))
            lines.append(
                f"| {row.name} | {median(row.values):,.0f} | {ratio} | {_span(self.aa_interval)} | {target} "
                f"| {verdict} |"
            )
        return lines

    def _decided(self, row: Rates) -> tuple[Verdict, str]:
        return decide_rate(median(row.ratios), row.interval, self.aa_interval, row.at_least)


def compare_rates(
    title: str,
    what: str,
    sides: Sequence[Side],
    at_least: Mapping[str, float],
    *,
    num_rounds: int,
    settle: Callable[[], object] = gc.collect,
) -> RateTable:
    """Run the sides interleaved, the first as the baseline and twice; ``at_least`` has what is claimed, side by side.

    Every side returns a Reading of its rate; ``settle`` runs before each.
    """

    def read(side: Side) -> Readings:
        settle()
        done = side.run()
        assert isinstance(done, Reading)
        return Readings(values={title: done.value}, work=done.work)

    readings = run_rounds(sides, read, num_rounds=num_rounds, num_warmup_rounds=0)
    again, *values = [[one[title] for one in mine] for mine in readings]
    return RateTable(
        title=title,
        what=what,
        rows=tuple(
            Rates(
                name=side.name,
                values=mine,
                ratios=paired_ratios(mine, values[0]),
                at_least=at_least.get(side.name),
            )
            for side, mine in zip(sides, values, strict=True)
        ),
        aa_interval=bootstrap_interval(paired_ratios(again, values[0])),
    )


def decide_rate(
    ratio: float, interval: tuple[float, float], aa_interval: tuple[float, float], at_least: float | None
) -> tuple[Verdict, str]:
    """Whether a claim holds, with the reason in words.

    Undecided where the ratio's own interval, wider by what the baseline differs from itself, holds what is claimed: a
    side that is far from what is claimed is decided on a restless machine too.
    """
    if at_least is None:
        return "none claimed", "nothing is claimed of it"
    noise = max(aa_interval[1], 1.0) / min(aa_interval[0], 1.0)
    low, high = interval[0] / noise, interval[1] * noise
    if low < at_least <= high:
        return "inconclusive", f"{_span((low, high))}, its interval and the A/A interval's width, holds {at_least:.3f}"
    if low >= at_least:
        return "pass", f"{ratio:.3f} is at least {at_least:.3f}"
    return "fail", f"{ratio:.3f} is less than {at_least:.3f}"


def _span(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.3f} to {interval[1]:.3f}"
