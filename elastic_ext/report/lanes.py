"""Lanes above the other drawings: which config was in force when, what happened, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .effects import Period
from .frame import LEFT, WIDTH, time_axis
from .happenings import GROUPS, Group, Happening
from .markup import path_of, svg, tag, text
from .numbers import elapsed_in_words
from .record import Remark, RunRecord
from .scales import TimeScale

__all__ = ["GROUP_NAMES", "event_key", "lanes"]

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
    """All of them in one drawing."""
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
    """What the shapes mean."""
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
    """One for each, but for those that would lie on one another."""
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
    """Each kind has a shape of its own, besides its colour."""
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
