"""What all drawings over time have in common: where they lie on the page, their axes and their grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .markup import number, tag, text
from .scales import AmountScale, TimeScale

__all__ = ["LEFT", "RIGHT", "WIDTH", "amount_axis", "time_axis", "verticals"]

WIDTH = 1120.0
LEFT, RIGHT = 84.0, 1108.0
"""The same in all of them, so that a moment is at the same place in each."""
_MOST_VERTICALS = 200


def time_axis(scale: TimeScale, y: float, *, top: float) -> str:
    """The line at ``y`` with its marks, and lines of a grid up to ``top``."""
    parts = [tag("line", class_="axis", x1=scale.left, x2=scale.right, y1=y, y2=y)]
    for x, words in scale.ticks():
        parts.append(tag("line", class_="grid", x1=x, x2=x, y1=top, y2=y + 4))
        anchor = "end" if x > scale.right - 24 else "middle"
        parts.append(tag("text", text(words), class_="tick", x=x, y=y + 17, text_anchor=anchor))
    return tag("g", *parts)


def amount_axis(scale: AmountScale, words: Callable[[float], str], *, left: float, right: float) -> str:
    """Marks to the left, with lines of a grid."""
    parts = []
    for each in scale.ticks():
        y = scale.y(each)
        parts.append(tag("line", class_="grid", x1=left, x2=right, y1=y, y2=y))
        parts.append(tag("text", text(words(each)), class_="tick", x=left - 7, y=y + 4, text_anchor="end"))
    return tag("g", *parts)


def verticals(places: Sequence[float], class_: str, *, top: float, bottom: float) -> str:
    """Lines from top to bottom at these places, those that lie close together once."""
    shown: list[float] = []
    least = (RIGHT - LEFT) / _MOST_VERTICALS
    for x in sorted(places):
        if not shown or x - shown[-1] >= least:
            shown.append(x)
    data = "".join(f"M{number(x)} {number(top)}V{number(bottom)}" for x in shown)
    return tag("path", class_=class_, d=data) if data else ""
