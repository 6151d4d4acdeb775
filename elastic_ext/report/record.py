"""RunRecord: all that a report shows of one training, summed up in equal intervals of time. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor
from typing import NamedTuple

from elastic_ext.profile.ledger import Ledger, ProcessProfile, Slice, ledger_of_slices
from elastic_ext.profile.phases import Phase
from elastic_ext.profile.summary import training_seconds
from elastic_ext.records.logged import as_json
from elastic_ext.records.measures import METRICS, parts_of
from elastic_ext.records.metrics import StepWindow

from .events import Happening, Period, Quartiles, Speeds, WorldSpan, in_step_seconds, spread_of

__all__ = [
    "MOST_BINS",
    "ON_PAGE",
    "Bins",
    "RankRecord",
    "RankSums",
    "Remark",
    "RunRecord",
    "busy_seconds",
    "means_of",
    "rank_record",
]


# --- sums over equal intervals, which grow longer as the time does, so that they are never too many ------------------

_SHORTEST = 2.0**-5
"""Seconds of the shortest interval; each is this times a power of two and begins at a multiple of its length, so that
two neighbours can be made one."""


class Bins:
    """Sums over equal intervals of time, that grow longer so that never more than ``most`` lie side by side.

    A row has ``num_values`` sums for one interval.
    """

    def __init__(self, num_values: int, most: int) -> None:
        self.width = _SHORTEST
        self._num_values = num_values
        self._most = most
        self._rows: dict[int, array[float]] = {}
        self._first = self._last = 0

    def add(self, begin: float, end: float, values: Sequence[float]) -> None:
        """Add ``values`` to the sums, spread evenly from ``begin`` to ``end``."""
        first, last = floor(begin / self.width), max(floor(begin / self.width), -floor(-end / self.width) - 1)
        first, last = self._make_room(first, last, begin, end)
        length = end - begin
        for index in range(first, last + 1):
            share = 1.0
            if length > 0 and first < last:
                share = (min(end, (index + 1) * self.width) - max(begin, index * self.width)) / length
            row = self._rows.get(index)
            if row is None:
                row = self._rows[index] = array("d", bytes(8 * self._num_values))
            for place, value in enumerate(values):
                if value:
                    row[place] += value * share

    def widen(self, width: float) -> None:
        """Make the intervals at least ``width`` seconds long."""
        while self.width < width:
            self._double()

    def items(self) -> Iterator[tuple[float, array[float]]]:
        """The beginning of each interval in which there is something, in order, and its sums."""
        for index in sorted(self._rows):
            yield index * self.width, self._rows[index]

    def __len__(self) -> int:
        """The number of intervals from the first with something in it to the last."""
        return self._last - self._first + 1 if self._rows else 0

    def _make_room(self, first: int, last: int, begin: float, end: float) -> tuple[int, int]:
        while True:
            lowest = min(first, self._first) if self._rows else first
            highest = max(last, self._last) if self._rows else last
            if highest - lowest < self._most:
                self._first, self._last = lowest, highest
                return first, last
            self._double()
            first = floor(begin / self.width)
            last = max(first, -floor(-end / self.width) - 1)

    def _double(self) -> None:
        self.width *= 2
        rows: dict[int, array[float]] = {}
        for index, row in self._rows.items():
            kept = rows.get(index >> 1)
            if kept is None:
                rows[index >> 1] = row
            else:
                for place, value in enumerate(row):
                    kept[place] += value
        self._rows = rows
        self._first, self._last = self._first >> 1, self._last >> 1


# --- all that a report shows of one training -------------------------------------------------------------------------

ON_PAGE: Mapping[str, Sequence[str]] = {
    name: [part for part in parts_of(name) if METRICS[part].on_page]
    for name, metric in METRICS.items()
    if metric.on_page and not metric.part_of
}
"""The metrics that a report shows, each with the metrics that count a part of it."""


class RankSums(NamedTuple):
    """The sums of a rank's windows in one interval of its bins, in the order of a row."""

    num_steps: float
    num_samples: float
    """Samples of all ranks together."""
    step_seconds: float
    """Seconds that the steps took, without what comes between them."""
    num_looked_at: float
    """Steps of windows in which some steps were timed by phase."""
    busy_seconds: float
    """Seconds that those steps would have taken without waiting for other ranks."""
    num_tokens: float
    """Tokens of all ranks together, as far as this rank tells."""
    training_seconds: float
    """Seconds of training, with checkpoints and changes."""
    ideal_seconds: float
    """Seconds in which the rank's device, at its best, would have done the arithmetic; 0 where that is not known."""
    known_seconds: float
    """Seconds that the windows cover; the next three are bytes times these seconds, for means over time."""
    host_byte_seconds: float
    accelerator_byte_seconds: float
    peak_byte_seconds: float


class Remark(NamedTuple):
    """A sentence about some time of a training, such as a verdict on what held it up."""

    begin: float
    end: float
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord:
    """What a report shows of one rank in a training."""

    rank: int
    begin: float
    end: float
    ledger: Ledger
    num_processes: int
    num_steps: int
    step_seconds: Quartiles | None
    """The mean step times of its windows."""
    busy_seconds: Quartiles | None
    """The times of a step without waiting for other ranks, of its windows."""
    mfu: Quartiles | None
    """The model FLOPs utilisation of its windows: the share that the model did of what its device could do at best."""
    most_host_bytes: int | None
    most_accelerator_bytes: int | None
    metrics: Mapping[str, float]
    """The metrics that the page shows, by name, as the rank's last process wrote them; those it wrote alone."""
    bins: Bins
    """Sums over time, with ``RankSums`` as rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """What a report shows of one training, as far as the files of its run tell."""

    path: str
    job: str
    number: int
    """The number of this training in its run directory, from 1 on."""
    num_trainings: int
    """Trainings in the run directory."""
    begin: float
    end: float
    ledger: Ledger
    ranks: tuple[RankRecord, ...]
    first_step: int
    last_step: int
    num_steps_again: int
    """Steps that were lost and taken again, since training went on from an earlier one."""
    num_samples: int
    """Samples of the steps that were not lost."""
    samples_per_second: Quartiles | None
    """Samples per second of all ranks together, in steps."""
    tokens_per_second: Quartiles | None
    """Tokens per second of all ranks together, over the time of training; None where samples are no rows of tokens."""
    step_seconds: Quartiles | None
    """The mean step times of the first rank's windows."""
    num_restarts: int
    num_failures: int
    """How many times workers failed; workers that failed together, on however many nodes, count as one."""
    spent: Bins
    """Seconds of all ranks by ledger entry, in intervals of time."""
    periods: tuple[Period, ...]
    worlds: tuple[WorldSpan, ...]
    happenings: tuple[Happening, ...]
    notes: tuple[str, ...]
    """What the report left out or had to assume, a sentence each."""
    remarks: Sequence[Remark] = ()
    logged: Mapping[str, Bins] = field(default_factory=dict)
    """For each number that the script has logged, its weighted sum over ranks and the weights, over time."""

    @property
    def mfu(self) -> Quartiles | None:
        """The model FLOPs utilisation of the rank with the median one; None where no rank's is known."""
        known = sorted((each.mfu for each in self.ranks if each.mfu is not None), key=lambda each: each.middle)
        return known[(len(known) - 1) // 2] if known else None

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that the page shows, each of the rank that has the most of it; 0 where no rank has told."""
        found: dict[str, float] = {}
        for name, parts in ON_PAGE.items():
            told = [[each.metrics[one] for one in (name, *parts)] for each in self.ranks if name in each.metrics]
            found.update(zip((name, *parts), max(told, default=[0] * (1 + len(parts))), strict=True))
        return found

    def to_dict(self) -> dict[str, object]:
        """The record as the JSON of ``elastic-ext report --json``."""
        return {
            "path": self.path,
            "job": self.job,
            "training": self.number,
            "trainings": self.num_trainings,
            "begin": self.begin,
            "end": self.end,
            "wall_seconds": self.ledger.wall_seconds,
            "goodput": self.ledger.goodput,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "steps_again": self.num_steps_again,
            "samples": self.num_samples,
            "samples_per_second": self.samples_per_second and self.samples_per_second.to_dict(),
            "tokens_per_second": self.tokens_per_second and self.tokens_per_second.to_dict(),
            "mfu": self.mfu and self.mfu.to_dict(),
            "step_seconds": self.step_seconds and self.step_seconds.to_dict(),
            "restarts": self.num_restarts,
            "failures": self.num_failures,
            **_named(self.metrics),
            "logged": {name: as_json(_first_and_last(bins)) for name, bins in self.logged.items()},
            "ledger": self.ledger.to_dict(),
            "ranks": [_of_rank(each) for each in self.ranks],
            "config": [
                {**each.to_dict(), "effect": each.compared_with(before)}
                for before, each in zip((None, *self.periods), self.periods, strict=False)
            ],
            "worlds": [each.to_dict() for each in self.worlds],
            "events": [each.to_dict() for each in self.happenings],
            "verdicts": [each._asdict() for each in self.remarks],
            "notes": list(self.notes),
        }


def means_of(bins: Bins) -> list[tuple[float, float]]:
    """The mean of a logged number in each interval that has it, by the interval's beginning, in order."""
    return [(begin, total / weight) for begin, (total, weight) in bins.items() if weight > 0]


def _first_and_last(bins: Bins) -> dict[str, float]:
    """The means of a logged number in the first and the last interval that has it."""
    means = [mean for _, mean in means_of(bins)]
    return {"first": means[0], "last": means[-1]} if means else {}


def _named(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics by the names that they have in the JSON of a report; None for what is not known."""
    names = (one for name, parts in ON_PAGE.items() for one in (name, *parts))
    return {METRICS[name].prometheus: metrics.get(name) for name in names}


def _of_rank(rank: RankRecord) -> dict[str, object]:
    return {
        "rank": rank.rank,
        "begin": rank.begin,
        "end": rank.end,
        "processes": rank.num_processes,
        "steps": rank.num_steps,
        "step_seconds": rank.step_seconds and rank.step_seconds.to_dict(),
        "busy_seconds": rank.busy_seconds and rank.busy_seconds.to_dict(),
        "mfu": rank.mfu and rank.mfu.to_dict(),
        "most_host_bytes": rank.most_host_bytes,
        "most_accelerator_bytes": rank.most_accelerator_bytes,
        **_named(rank.metrics),
        "ledger": rank.ledger.to_dict(),
    }


# --- a RankRecord from a rank's processes ---------------------------------------------------------------------------

MOST_BINS = 512
_BUSY = frozenset(
    phase.label for phase in (Phase.DATA, Phase.TRANSFER, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER)
)


def busy_seconds(window: StepWindow) -> float | None:
    """Seconds of a step without waiting for other ranks; None where no step of the window was timed by phase."""
    found = sum(spent for label, spent in window.typical.items() if label in _BUSY)
    return found if found > 0 else None


def rank_record(
    rank: int,
    processes: Sequence[ProcessProfile],
    slices: Sequence[Slice],
    speeds: Speeds,
    metrics: Mapping[str, float],
) -> RankRecord:
    """The record of a rank, from the slices of its time and the metrics that its last process wrote."""
    windows = [each.piece.window for each in slices if each.piece is not None]
    bins = Bins(len(RankSums._fields), MOST_BINS)
    steps: list[float] = []
    busy: list[float] = []
    for each in slices:
        if each.piece is None:
            continue
        sums = _sums(each.piece.window, each.end - each.begin, speeds)
        bins.add(each.begin, each.end, sums)
        if sums.num_steps and sums.step_seconds > 0:
            steps.append(sums.step_seconds / sums.num_steps)
        if sums.num_looked_at > 0:
            busy.append(sums.busy_seconds / sums.num_looked_at)
    return RankRecord(
        rank=rank,
        begin=slices[0].begin,
        end=slices[-1].end,
        ledger=ledger_of_slices(slices),
        num_processes=max(sum(each.is_whole for each in processes), 1),
        num_steps=sum(each.num_steps for each in windows),
        step_seconds=spread_of(steps),
        busy_seconds=spread_of(busy),
        mfu=spread_of(map(speeds.mfu, windows)),
        most_host_bytes=_most(each.memory_bytes for each in windows),
        most_accelerator_bytes=_most(each.accelerator_peak_bytes or each.accelerator_bytes for each in windows),
        metrics=metrics,
        bins=bins,
    )


def _sums(window: StepWindow, length: float, speeds: Speeds) -> RankSums:
    busy = busy_seconds(window)
    weight = float(window.num_steps) if busy is not None else 0.0
    return RankSums(
        num_steps=window.num_steps,
        num_samples=window.num_samples,
        step_seconds=in_step_seconds(window),
        num_looked_at=weight,
        busy_seconds=weight * (busy or 0.0),
        num_tokens=speeds.num_tokens(window),
        training_seconds=training_seconds(window),
        ideal_seconds=speeds.ideal_seconds(window),
        known_seconds=length,
        host_byte_seconds=length * (window.memory_bytes or 0),
        accelerator_byte_seconds=length * (window.accelerator_bytes or 0),
        peak_byte_seconds=length * (window.accelerator_peak_bytes or 0),
    )


def _most(values: Iterable[int | None]) -> int | None:
    return max((each for each in values if each is not None), default=None)
