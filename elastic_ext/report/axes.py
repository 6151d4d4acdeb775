"""What all drawings of a report share: columns over time, scales, frames, and the lanes above them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from elastic_ext.profile.ledger import ENTRIES, TimeUse

from .events import GROUPS, Group, Happening, Period
from .markup import elapsed_in_words, number, path_of, svg, tag, text
from .record import RankRecord, RankSums, Remark, RunRecord, means_of

__all__ = [
    "GROUP_NAMES",
    "LEFT",
    "RIGHT",
    "WIDTH",
    "AmountScale",
    "Column",
    "TimeColumns",
    "TimeScale",
    "amount_axis",
    "columns_of",
    "event_key",
    "lanes",
    "middle",
    "nice_ends",
    "nice_top",
    "time_axis",
    "verticals",
]


# --- the columns in which drawings over time show a training: the job's bins and the ranks', all of one width --------

_MOST = 240
_MOST_CELLS = 20_000
_LEAST = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """An interval of time in the drawings of a report, with what all ranks did in it."""

    begin: float
    end: float
    shares: dict[TimeUse, float]
    """The share of all ranks' time that each ledger entry has; the shares add up to 1."""
    sums: dict[int, RankSums]
    """The sums of each rank that was measured in the interval."""
    logged: dict[str, float]
    """The mean over ranks of each number that the script has logged in the interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeColumns:
    """The time of a training as intervals of equal width, in order; those without any measurement are left out."""

    width: float
    columns: tuple[Column, ...]

    def __iter__(self) -> Iterator[Column]:
        return iter(self.columns)


def columns_of(record: RunRecord, *, cells: bool) -> TimeColumns:
    """The columns in which drawings show a training; with ``cells`` so few that each rank can have a cell in each.

    The record's bins are widened.
    """
    num_columns = max(min(_MOST, _MOST_CELLS // max(len(record.ranks), 1)), _LEAST) if cells else _MOST
    width = max((record.end - record.begin) / num_columns, 1e-9)
    record.spent.widen(width)
    bins = [*(rank.bins for rank in record.ranks), *record.logged.values()]
    for each in bins:
        record.spent.widen(each.width)
    for each in bins:
        each.widen(record.spent.width)
    return TimeColumns(width=record.spent.width, columns=tuple(_columns(record, record.ranks)))


def middle(values: Sequence[float]) -> float | None:
    """The median of some values; None where there are none."""
    if not values:
        return None
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _columns(record: RunRecord, ranks: Sequence[RankRecord]) -> Iterator[Column]:
    of_ranks: dict[float, dict[int, RankSums]] = {}
    for rank in ranks:
        for begin, row in rank.bins.items():
            of_ranks.setdefault(begin, {})[rank.rank] = RankSums(*row)
    logged: dict[float, dict[str, float]] = {}
    for name, bins in record.logged.items():
        for begin, mean in means_of(bins):
            logged.setdefault(begin, {})[name] = mean
    for begin, row in record.spent.items():
        total = sum(row)
        if total > 0:
            yield Column(
                begin=max(begin, record.begin),
                end=min(begin + record.spent.width, record.end),
                shares={entry: value / total for entry, value in zip(ENTRIES, row, strict=True) if value > 0},
                sums=of_ranks.get(begin, {}),
                logged=logged.get(begin, {}),
            )


# --- where times and amounts lie in a drawing, and which of them its axes name ---------------------------------------

_TIME_STEPS = (
    *(base * 10.0**power for power in range(-6, 0) for base in (1, 2, 5)),
    *(1.0, 2.0, 5.0, 10.0, 15.0, 30.0),
    *(60.0 * each for each in (1, 2, 5, 10, 15, 30)),
    *(3600.0 * each for each in (1, 2, 3, 6, 12)),
    *(86400.0 * each for each in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)),
)
_MOST_TICKS = 9
_LEAST_AMOUNT = 1e-12
"""Amounts below this are drawn as nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeScale:
    """The horizontal scale of a drawing: time from left to right."""

    begin: float
    end: float
    left: float
    right: float

    def x(self, moment: float) -> float:
        """The place of a moment in the drawing; at an edge where the moment is not within the scale."""
        length = self.end - self.begin
        share = (moment - self.begin) / length if length > 0 else 0.0
        return self.left + min(max(share, 0.0), 1.0) * (self.right - self.left)

    def ticks(self) -> list[tuple[float, str]]:
        """The places of the marks on the axis, each with the time since the beginning in words."""
        length = max(self.end - self.begin, 1e-6)
        step = next((each for each in _TIME_STEPS if length / each <= _MOST_TICKS), _TIME_STEPS[-1])
        count = min(floor(length / step), 1000)
        return [(self.x(self.begin + each * step), elapsed_in_words(each * step)) for each in range(count + 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class AmountScale:
    """The vertical scale of a drawing: amounts from ``least`` at the bottom to ``most`` at the top."""

    most: float
    bottom: float
    top: float
    least: float = 0.0

    def y(self, amount: float) -> float:
        """The place of an amount in the drawing; at an edge where the amount is not within the scale."""
        length = self.most - self.least
        share = (amount - self.least) / length if length > 0 else 0.0
        return self.bottom - min(max(share, 0.0), 1.0) * (self.bottom - self.top)

    def ticks(self) -> list[float]:
        """The amounts that the axis names, from the bottom to the top, three to six of them."""
        step = _nice((self.most - self.least) / 4)
        if step <= 0:
            return [self.least]
        first, last = ceil(self.least / step - 1e-9), floor(self.most / step + 1e-9)
        return [each * step for each in range(first, last + 1)]


def nice_top(most: float) -> float:
    """The least round amount from ``most`` on, at which an axis may end."""
    if most < _LEAST_AMOUNT:
        return 1.0
    step = _nice(most / 4)
    return ceil(most / step - 1e-9) * step


def nice_ends(low: float, high: float) -> tuple[float, float]:
    """The closest round amounts around ``low`` and ``high``, at which an axis may begin and end."""
    step = _nice((high - low) / 4) or _nice(max(abs(low), _LEAST_AMOUNT) / 4)
    return floor(low / step + 1e-9) * step, ceil(high / step - 1e-9) * step


def _nice(amount: float) -> float:
    if amount < _LEAST_AMOUNT / 8:
        return 0.0
    power = 10.0 ** floor(log10(amount))
    return next((base * power for base in (1, 2, 2.5, 5, 10) if base * power >= amount * 0.999), 10 * power)


# --- what all drawings over time have in common: where they lie on the page, their axes and their grid ---------------

WIDTH = 1120.0
LEFT, RIGHT = 84.0, 1108.0
"""Left and right edge of all drawings over time, so that a moment is at the same place in each."""
_MOST_VERTICALS = 200


def time_axis(scale: TimeScale, y: float, *, top: float) -> str:
    """The axis of time at ``y`` as SVG, with its marks, and with lines of a grid up to ``top``."""
    parts = [tag("line", class_="axis", x1=scale.left, x2=scale.right, y1=y, y2=y)]
    for x, words in scale.ticks():
        parts.append(tag("line", class_="grid", x1=x, x2=x, y1=top, y2=y + 4))
        anchor = "end" if x > scale.right - 24 else "middle"
        parts.append(tag("text", text(words), class_="tick", x=x, y=y + 17, text_anchor=anchor))
    return tag("g", *parts)


def amount_axis(scale: AmountScale, words: Callable[[float], str], *, left: float, right: float) -> str:
    """The axis of amounts as SVG: marks to the left of ``left``, and lines of a grid up to ``right``."""
    parts = []
    for each in scale.ticks():
        y = scale.y(each)
        parts.append(tag("line", class_="grid", x1=left, x2=right, y1=y, y2=y))
        parts.append(tag("text", text(words(each)), class_="tick", x=left - 7, y=y + 4, text_anchor="end"))
    return tag("g", *parts)


def verticals(places: Sequence[float], class_: str, *, top: float, bottom: float) -> str:
    """Vertical lines at some places as SVG, one for those that lie close together."""
    shown: list[float] = []
    least = (RIGHT - LEFT) / _MOST_VERTICALS
    for x in sorted(places):
        if not shown or x - shown[-1] >= least:
            shown.append(x)
    data = "".join(f"M{number(x)} {number(top)}V{number(bottom)}" for x in shown)
    return tag("path", class_=class_, d=data) if data else ""


# --- lanes above the other drawings: which config was in force when, what happened, and what is said of it -----------

GROUP_NAMES: dict[Group, str] = {
    "failure": "failure",
    "hang": "hang",
    "restart": "start or end",
    "membership": "nodes come or go",
    "memory": "out of memory",
    "numbers": "not finite",
    "config": "config",
    "checkpoint": "checkpoints",
    "other": "other",
}
_LANE_NAMES: dict[Group, str] = {
    "failure": "failures",
    "hang": "hangs",
    "restart": "starts",
    "membership": "nodes",
    "memory": "memory",
    "numbers": "not finite",
    "config": "configs",
    "checkpoint": "checkpoints",
    "other": "other",
}
_LANE = 26.0
_TOP = 4.0
_LEAST_PIXELS = 5.0
_MOST_SEGMENTS = 300
_MOST_LENGTH = 300


def lanes(record: RunRecord, scale: TimeScale) -> str:
    """The lanes of configs, events and verdicts over time, as one drawing."""
    rows: list[tuple[str, list[str]]] = [("configs", list(_segments(record.periods, scale, _TOP)))]
    groups = [group for group in GROUPS if group != "config"]
    found = {group: [each for each in record.happenings if each.group == group] for group in groups}
    y = _TOP
    for group in groups:
        if found[group]:
            y += _LANE
            rows.append((_LANE_NAMES[group], list(_marks(found[group], record, scale, y + _LANE / 2))))
    if record.remarks:
        y += _LANE
        rows.append(("verdicts", list(_spans(record.remarks, scale, y))))
    bottom = y + _LANE + 2
    names = [
        tag("text", text(name), class_="tick", x=LEFT - 7, y=_TOP + (place + 0.5) * _LANE + 4, text_anchor="end")
        for place, (name, _) in enumerate(rows)
    ]
    return svg(
        "lanes",
        "Configs and events, over time",
        "A row for config versions and one for each kind of event; the same is in the tables below.",
        time_axis(scale, bottom, top=_TOP),
        *names,
        *(mark for _, marks in rows for mark in marks),
        width=WIDTH,
        height=bottom + 26,
        class_="over-time",
    )


def event_key(record: RunRecord) -> str:
    """The legend of the marks in the lanes: a shape for each group of events; empty where there are none."""
    there = {each.group for each in record.happenings}
    items = []
    for group in GROUPS:
        if group in there and group != "config":
            drawing = tag(
                "svg",
                _shape(group, 7, 7),
                class_="swatch",
                viewBox="0 0 14 14",
                width=14,
                height=14,
                aria_hidden="true",
            )
            items.append(tag("li", drawing, tag("span", text(GROUP_NAMES[group]))))
    return tag("ul", *items, class_="legend") if items else ""


def _segments(periods: Sequence[Period], scale: TimeScale, y: float) -> Iterator[str]:
    shown = 0
    last = float("-inf")
    for place, period in enumerate(periods):
        x, right = scale.x(period.begin), scale.x(period.end)
        if right - last < (scale.right - scale.left) / _MOST_SEGMENTS and shown:
            continue
        shown, last = shown + 1, right
        width = max(right - x, 1.0)
        words = f"config {period.name}, {period.num_steps} steps. {period.text}"[:_MOST_LENGTH]
        label = f"v{period.name}"
        parts = [tag("rect", class_=f"config-{place % 2}", x=x, y=y + 3, width=width, height=_LANE - 6)]
        if width > 8 * len(label) + 5:
            parts.append(tag("text", text(label), class_="on", x=x + 4, y=y + _LANE / 2 + 4))
        yield tag("g", tag("title", text(words)), *parts)


def _marks(happenings: Sequence[Happening], record: RunRecord, scale: TimeScale, y: float) -> Iterator[str]:
    """The marks of a lane of events, without those that would lie on one another."""
    last = float("-inf")
    for each in happenings:
        x = scale.x(each.time)
        if x - last < _LEAST_PIXELS:
            continue
        last = x
        words = f"{elapsed_in_words(each.time - record.begin)}: {each.text}"[:_MOST_LENGTH]
        yield tag("g", tag("title", text(words)), _shape(each.group, x, y))


def _spans(remarks: Sequence[Remark], scale: TimeScale, y: float) -> Iterator[str]:
    for place, each in enumerate(remarks[:_MOST_SEGMENTS]):
        x, right = scale.x(each.begin), scale.x(each.end)
        width = max(right - x, 2.0)
        parts = [tag("rect", class_=f"remark-{place % 2}", x=x, y=y + 3, width=width, height=_LANE - 6)]
        if width > 8 * len(each.kind) + 5:
            parts.append(tag("text", text(each.kind), class_="on", x=x + 4, y=y + _LANE / 2 + 4))
        yield tag("g", tag("title", text(f"{each.kind}: {each.text}"[:_MOST_LENGTH])), *parts)


def _shape(group: Group, x: float, y: float) -> str:
    """The mark of an event; each group has a shape of its own, besides its colour."""
    name = f"mark mark-{group}"
    if group == "failure":
        return tag(
            "path", class_=name, d=path_of([(x - 5, y - 5), (x + 5, y + 5)]) + path_of([(x - 5, y + 5), (x + 5, y - 5)])
        )
    if group == "restart":
        return tag("path", class_=name, d=path_of([(x - 4, y - 6), (x + 6, y), (x - 4, y + 6)], is_closed=True))
    if group == "hang":
        return tag(
            "path",
            class_=name,
            d=path_of([(x - 5, y - 5), (x + 5, y - 5), (x - 5, y + 5), (x + 5, y + 5)], is_closed=True),
        )
    if group == "membership":
        return tag("path", class_=name, d=path_of([(x, y - 6), (x + 6, y), (x, y + 6), (x - 6, y)], is_closed=True))
    if group == "memory":
        return tag("rect", class_=name, x=x - 4, y=y - 5, width=8, height=10)
    if group == "numbers":
        return tag("path", class_=name, d=path_of([(x - 6, y - 5), (x + 6, y - 5), (x, y + 6)], is_closed=True))
    return tag("circle", class_=name, cx=x, cy=y, r=4)
