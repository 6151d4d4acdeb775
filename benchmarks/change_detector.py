"""How soon a change of pace is seen, and how often one is seen where there is none, in the noise of real steps.

The noise is recorded in the same run: 20,000 steps of a small model on one thread, about a millisecond each, by the
clock, on whatever else this machine does meanwhile. Three things are made of it. *As it was*; a busy machine changes
its pace by itself then, and to see that is no mistake. *Without its drift*: divided by the median of the thousand steps
around each, so that whatever is seen is a false alarm. *As of a quiet machine*: the same, with what steps differ by
made so small that half of them lie within 1.5 percent of the median; bursts and outliers remain where they were.

A change is planted by making all steps from a place on longer. A delay is how many of them it takes, at half of the
places; an alarm in the other direction is none, and where none comes in time it is missed. Ours runs as it is used,
where steps that are as short as these are compared in larger numbers, and, as it does with longer ones, with eight
steps wherever they are enough. Peers are a CUSUM (slack of half a standard deviation, limit of five) and a plain mean
with three standard deviations, which learn from the same 32 steps and, as ours does, begin anew after an alarm.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from benchmarks.harness import Finding, Result, Verdict, shown_value
from elastic_ext.profile.stragglers import ChangeDetector

__all__ = [
    "DETECTORS",
    "DetectorTable",
    "Found",
    "as_quiet",
    "find",
    "main",
    "record_steps",
    "table_of",
    "without_drift",
]

NUM_STEPS = 20_000
NUM_WARMUP_STEPS = 500
FACTORS = (1.08, 1.15, 1.30)
NUM_PLACES = 40
LEAD, PATIENCE = 3_000, 1_000  # steps that a detector has seen before a change, and in which it has to see that
AROUND = 500  # steps on either side, which the drift is told from
QUIET_HALF = 0.015
NUM_REFERENCE = 32
LONGER, SHORTER = 1, -1
OURS, EIGHT = "ours", "ours, eight steps where they are enough"


class Detector(Protocol):
    """Says of each step whether it shows a change: 1 that steps are longer, -1 shorter, 0 none."""

    def see(self, step: int, seconds: float) -> int: ...


class Ours:
    """The library's, as it is used."""

    def __init__(self) -> None:
        self._detector = self.made()

    def made(self) -> ChangeDetector:
        return ChangeDetector()

    def see(self, step: int, seconds: float) -> int:
        found = self._detector.see(step, seconds)
        return 0 if found is None else LONGER if found.ratio > 1 else SHORTER


class OursOfLongSteps(Ours):
    """The same, as if steps were longer."""

    def made(self) -> ChangeDetector:
        return ChangeDetector(least_seconds=0.0)


class _Learning:
    """What peers have in common: the mean and the deviation of the first steps."""

    def __init__(self) -> None:
        self._learnt: list[float] = []
        self.mean = self.deviation = 0.0

    def see(self, step: int, seconds: float) -> int:
        value = self.value(seconds)
        if len(self._learnt) < NUM_REFERENCE:
            self._learnt.append(value)
            if len(self._learnt) == NUM_REFERENCE:
                self.mean, self.deviation = statistics.fmean(self._learnt), statistics.stdev(self._learnt)
                self.begin()
            return 0
        found = self.judge((value - self.mean) / max(self.deviation, 1e-12))
        if found:
            self._learnt.clear()
        return found

    def value(self, seconds: float) -> float:
        return seconds

    def begin(self) -> None:
        """The first steps are learnt."""

    def judge(self, deviations: float) -> int:
        raise NotImplementedError


class Cusum(_Learning):
    """Sums of what steps are longer, or shorter, than the mean and half a standard deviation of their logarithms."""

    def value(self, seconds: float) -> float:
        return math.log(seconds)

    def begin(self) -> None:
        self._longer = self._shorter = 0.0

    def judge(self, deviations: float) -> int:
        self._longer = max(self._longer + deviations - 0.5, 0.0)
        self._shorter = max(self._shorter - deviations - 0.5, 0.0)
        return LONGER if self._longer > 5 else SHORTER if self._shorter > 5 else 0


class ThreeSigma(_Learning):
    """One step that is further from the mean than three standard deviations."""

    def judge(self, deviations: float) -> int:
        return LONGER if deviations > 3 else SHORTER if deviations < -3 else 0


DETECTORS: Mapping[str, Callable[[], Detector]] = {
    OURS: Ours,
    EIGHT: OursOfLongSteps,
    "CUSUM": Cusum,
    "mean ± 3 sigma": ThreeSigma,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What one detector has made of one recording."""

    name: str
    num_alarms: int
    """With nothing planted."""
    delays: Sequence[Sequence[int | None]]
    """For each factor, at each place; None where it was missed."""
    most_alarms: int | None = None
    most_delays: Sequence[int] | None = None
    """What is claimed: that there are no more alarms, and no longer delays at half of the places."""

    @property
    def middles(self) -> tuple[int | None, ...]:
        """The delay at half of the places, by factor; None where fewer saw the change."""
        return tuple(_middle(each) for each in self.delays)

    @property
    def is_claimed(self) -> bool:
        return self.most_alarms is not None or self.most_delays is not None

    def decided(self) -> tuple[Verdict, str]:
        if not self.is_claimed:
            return "none claimed", "nothing is claimed of it"
        if self.most_alarms is not None and self.num_alarms > self.most_alarms:
            return "fail", f"{self.num_alarms} alarms are more than {self.most_alarms}"
        for factor, found, most in zip(FACTORS, self.middles, self.most_delays or (), strict=False):
            if found is None or found > most:
                return "fail", f"{factor:.2f} times as long takes {found} steps, not {most}"
        return "pass", "as claimed"


@dataclass(frozen=True, kw_only=True, slots=True)
class DetectorTable:
    """All detectors on one recording."""

    title: str
    num_steps: int
    rows: tuple[Found, ...]
    notes: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        return f"**{self.title}** ({self.num_steps:,} steps)"

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return tuple(row.decided()[0] for row in self.rows)

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(
            Finding(
                claim=f"{row.name}: {_target(row)}" if row.is_claimed else f"{row.name}: alarms, and steps until seen",
                side=row.name,
                value=f"{row.num_alarms} alarms; {', '.join(_shown(each) for each in row.delays)} steps",
                target=_target(row) or None,
                verdict=row.decided()[0],
                reason=row.decided()[1] if row.is_claimed else None,
            )
            for row in self.rows
        )

    def table_lines(self) -> list[str]:
        names = " | ".join(f"{factor:.2f} times as long: steps (seen)" for factor in FACTORS)
        lines = [f"| detector | alarms | {names} | target | verdict |", "|---|---:|---:|---:|---:|---|---|"]
        for row in self.rows:
            shown = " | ".join(_shown(each) for each in row.delays)
            verdict = ": ".join(row.decided()) if row.is_claimed else ""
            lines.append(f"| {row.name} | {row.num_alarms} | {shown} | {_target(row)} | {verdict} |")
        return lines


def main() -> list[Result]:
    """A table for each of the three."""
    recorded = record_steps(NUM_STEPS)
    level = without_drift(recorded)
    quiet = as_quiet(level)
    note = (
        f"recorded steps take {shown_value(statistics.median(recorded), 'seconds')} (median); half of them lie within "
        f"{_half_within(recorded):.1%} of it, without the drift within {_half_within(level):.1%}"
    )
    return [
        table_of("Changes of pace, in recorded noise as it was", recorded, notes=(note,)),
        table_of("Changes of pace, in recorded noise without its drift", level, most_alarms={OURS: 0}),
        table_of(
            "Changes of pace, in recorded noise as of a quiet machine",
            quiet,
            most_alarms={OURS: 0},
            most_delays={EIGHT: (20, 6, 5)},
        ),
    ]


def record_steps(num_steps: int) -> list[float]:
    """What steps of a small model take on this machine now, in seconds."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(128, 128)
    seconds = []
    for _ in range(NUM_WARMUP_STEPS + num_steps):
        began = time.perf_counter()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    return seconds[NUM_WARMUP_STEPS:]


def without_drift(seconds: Sequence[float]) -> list[float]:
    """Each over the median of those around it, times the median of all."""
    usual = statistics.median(seconds)
    every = max(AROUND // 10, 1)  # the medians of places so far from each other
    medians = [
        statistics.median(seconds[max(place - AROUND, 0) : place + AROUND + 1])
        for place in range(0, len(seconds), every)
    ]
    return [each * usual / medians[number // every] for number, each in enumerate(seconds)]


def as_quiet(seconds: Sequence[float]) -> list[float]:
    """The same noise, but smaller."""
    usual = math.log(statistics.median(seconds))
    logs = [math.log(each) - usual for each in seconds]
    half = statistics.median(abs(each) for each in logs)
    return [math.exp(usual + each * min(QUIET_HALF / max(half, 1e-12), 1.0)) for each in logs]


def table_of(
    title: str,
    seconds: Sequence[float],
    *,
    most_alarms: Mapping[str, int] | None = None,
    most_delays: Mapping[str, Sequence[int]] | None = None,
    notes: tuple[str, ...] = (),
) -> DetectorTable:
    """All detectors on one recording, with what is claimed of some."""
    alarms, delays = most_alarms or {}, most_delays or {}
    rows = (
        replace(find(name, seconds), most_alarms=alarms.get(name), most_delays=delays.get(name)) for name in DETECTORS
    )
    return DetectorTable(title=title, num_steps=len(seconds), rows=tuple(rows), notes=notes)


def find(name: str, seconds: Sequence[float]) -> Found:
    """What the detector of that name makes of a recording, and of changes planted in it."""
    make = DETECTORS[name]
    detector = make()
    num_alarms = sum(detector.see(step, each) != 0 for step, each in enumerate(seconds))
    apart = max((len(seconds) - LEAD - PATIENCE) // NUM_PLACES, 1)
    places = range(LEAD, len(seconds) - PATIENCE + 1, apart)[:NUM_PLACES]
    delays = [[_delay(make(), seconds, place, factor) for place in places] for factor in FACTORS]
    return Found(name=name, num_alarms=num_alarms, delays=delays)


def _delay(detector: Detector, seconds: Sequence[float], place: int, factor: float) -> int | None:
    for step in range(place - LEAD, place):
        detector.see(step, seconds[step])
    for step in range(place, place + PATIENCE):
        if detector.see(step, seconds[step] * factor) == LONGER:
            return step - place + 1
    return None


def _middle(delays: Sequence[int | None]) -> int | None:
    found = sorted(math.inf if each is None else each for each in delays)[(len(delays) - 1) // 2]
    return None if found == math.inf else int(found)


def _shown(delays: Sequence[int | None]) -> str:
    middle = _middle(delays)
    num_seen = sum(each is not None for each in delays)
    return f"{'-' if middle is None else middle} ({num_seen} of {len(delays)})"


def _target(row: Found) -> str:
    alarms = [] if row.most_alarms is None else [f"alarms ≤ {row.most_alarms}"]
    delays = [] if row.most_delays is None else [f"steps ≤ {', '.join(map(str, row.most_delays))}"]
    return ", ".join(alarms + delays)


def _half_within(seconds: Sequence[float]) -> float:
    usual = statistics.median(seconds)
    return statistics.median(abs(each / usual - 1) for each in seconds)
