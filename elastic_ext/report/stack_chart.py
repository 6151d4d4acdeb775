"""Drawings of what time went into: the stack over time, and the bar of all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic_ext.profile.ledger import Entry, Ledger

from .columns import Column, Columns
from .entries import HATCHED, LABELS, ORDER
from .frame import LEFT, RIGHT, WIDTH, amount_axis, time_axis
from .markup import number, svg, tag, text
from .numbers import percent, seconds_in_words
from .scales import AmountScale, TimeScale

__all__ = ["HATCHES", "ledger_bar", "legend", "stack_chart"]

_TOP, _BOTTOM, _HEIGHT = 10.0, 250.0, 276.0
_BAR_HEIGHT = 46.0
_LEAST_TEXT_WIDTH = 46.0

HATCHES = tag(
    "svg",
    tag(
        "defs",
        *(
            tag(
                "pattern",
                tag("path", d="M0 6L6 0", class_="hatching"),
                id="hatch",
                width=6,
                height=6,
                patternUnits="userSpaceOnUse",
            ),
        ),
    ),
    width=0,
    height=0,
    class_="definitions",
    aria_hidden="true",
)
"""Stands once on a page: the others refer to it."""


def stack_chart(columns: Columns, scale: TimeScale) -> str:
    """What the ranks' time went into, from moment to moment."""
    amounts = AmountScale(most=1.0, bottom=_BOTTOM, top=_TOP)
    runs = _runs(columns)
    parts: list[str] = []
    below: dict[float, float] = {}
    for entry in ORDER:
        data = "".join(_area(run, entry, below, scale, amounts) for run in runs)
        for column in columns:
            below[column.begin] = below.get(column.begin, 0.0) + column.shares.get(entry, 0.0)
        if data:
            parts.append(_filled("path", entry, d=data))
    return svg(
        "stack",
        "What time went into, over time",
        "A stack of areas that fills the height; each is the share of all ranks' time that an entry of the ledger had.",
        amount_axis(amounts, lambda share: f"{share:.0%}", left=LEFT, right=RIGHT),
        time_axis(scale, _BOTTOM, top=_TOP),
        *parts,
        width=WIDTH,
        height=_HEIGHT,
        class_="over-time",
    )


def ledger_bar(ledger: Ledger) -> str:
    """All of the wall time, from left to right."""
    parts: list[str] = []
    x = 0.0
    for entry in ORDER:
        share = ledger.seconds[entry] / ledger.wall_seconds if ledger.wall_seconds > 0 else 0.0
        width = share * WIDTH
        if width >= 0.05:
            words = f"{LABELS[entry]}: {percent(share)}, {seconds_in_words(ledger.seconds[entry])}"
            inside = [_filled("rect", entry, x=x, y=0.0, width=width, height=_BAR_HEIGHT)]
            if width >= _LEAST_TEXT_WIDTH:
                label = tag("text", text(percent(share)), x=x + width / 2, y=28.0, text_anchor="middle")
                inside.append(tag("g", label, class_=f"on on-{entry.value}"))
            parts.append(tag("g", tag("title", text(words)), *inside))
        x += width
    return svg(
        "bar",
        "The ledger as a bar",
        "The whole width is the wall time; each part is an entry of the table below, in its order.",
        *parts,
        width=WIDTH,
        height=_BAR_HEIGHT,
    )


def legend(seconds: Mapping[Entry, float]) -> str:
    """What the colours mean, of those entries that there are."""
    items = [
        tag("li", swatch(entry), tag("span", text(LABELS[entry]))) for entry in ORDER if seconds.get(entry, 0.0) > 0
    ]
    return tag("ul", *items, class_="legend")


def swatch(entry: Entry) -> str:
    """A square in an entry's colour."""
    square = _filled("rect", entry, width=14, height=14)
    return tag("svg", square, class_="swatch", viewBox="0 0 14 14", width=14, height=14, aria_hidden="true")


def _filled(name: str, entry: Entry, **attributes: object) -> str:
    shape = tag(name, class_=f"fill-{entry.value}", **attributes)
    return shape + tag(name, class_="hatched", **attributes) if entry in HATCHED else shape


def _runs(columns: Columns) -> list[list[Column]]:
    """Columns that touch one another."""
    runs: list[list[Column]] = []
    for column in columns:
        if runs and column.begin - runs[-1][-1].end < columns.width * 1e-6:
            runs[-1].append(column)
        else:
            runs.append([column])
    return runs


def _area(
    run: Sequence[Column], entry: Entry, below: Mapping[float, float], scale: TimeScale, amounts: AmountScale
) -> str:
    """The data of an entry's area over columns that touch; parts in which it is nothing are left out."""
    data = ""
    part: list[Column] = []
    for column in [*run, None]:
        if column is not None and column.shares.get(entry, 0.0) > 0:
            part.append(column)
        elif part:
            data += _outline(part, entry, below, scale, amounts)
            part = []
    return data


def _outline(
    part: Sequence[Column], entry: Entry, below: Mapping[float, float], scale: TimeScale, amounts: AmountScale
) -> str:
    upper, lower = [], []
    for column in part:
        base = below.get(column.begin, 0.0)
        left, right = number(scale.x(column.begin)), number(scale.x(column.end))
        high, low = number(amounts.y(base + column.shares[entry])), number(amounts.y(base))
        upper.append(f"{left} {high}H{right}")
        lower.append(f"{right} {low}H{left}")
    return f"M{'L'.join(upper)}L{'L'.join(reversed(lower))}Z"
