"""Drawings of speed and memory over time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from elastic_ext.profile.summary import number_in_words
from elastic_ext.records.text import size_in_words

from .columns import Column, Columns, middle
from .frame import LEFT, RIGHT, WIDTH, amount_axis, time_axis, verticals
from .markup import path_of, svg, tag, text
from .numbers import amount, percent
from .record import RankSums, RunRecord
from .scales import AmountScale, TimeScale, nice_top

__all__ = ["arithmetic_chart", "memory_chart", "speed_chart", "token_chart"]

_TOP, _BOTTOM, _LOW_BOTTOM = 10.0, 170.0, 110.0
_MOST_BANDS = 120


def speed_chart(record: RunRecord, columns: Columns, scale: TimeScale) -> str:
    """Samples per second while steps are taken, with the spread of it under each config; empty where none is known."""
    first = record.ranks[0].rank
    points = _points(columns, lambda column: _speed(column.sums.get(first)))
    values = [value for _, _, value in points if value is not None]
    if not values:
        return ""
    shown = sorted(values)
    amounts = _scale(max(shown[round(0.99 * (len(shown) - 1))] * 1.1, _highest(record) * 1.05))
    changes = [scale.x(each.begin) for each in record.periods[1:]]
    return svg(
        "speed",
        "Samples per second in steps, over time",
        "A line of the speed; behind it, for each config, the middle half of its windows and the one in the middle. "
        "Dashed lines are where another config came into force.",
        amount_axis(amounts, amount, left=LEFT, right=RIGHT),
        time_axis(scale, _BOTTOM, top=_TOP),
        *_bands(record, scale, amounts),
        verticals(changes, "change", top=_TOP, bottom=_BOTTOM),
        _line(points, "line-a", scale, amounts),
        width=WIDTH,
        height=_BOTTOM + 26,
        class_="over-time",
    )


def token_chart(record: RunRecord, columns: Columns, scale: TimeScale) -> str:
    """Tokens per second of training; empty where none is known."""
    first = record.ranks[0].rank
    points = _points(columns, lambda column: _tokens(column.sums.get(first)))
    return _rate_chart(
        "tokens", "Tokens per second, over time", "A line of the speed", points, number_in_words, record, scale
    )


def arithmetic_chart(record: RunRecord, columns: Columns, scale: TimeScale) -> str:
    """The part that models did of what their devices could have done at best, in the rank in the middle."""
    points = _points(columns, lambda column: middle(list(_arithmetic(column))))
    about = "A line of the arithmetic that was done, as a part of what the device does at best"
    return _rate_chart("mfu", "MFU, over time", about, points, percent, record, scale)


def memory_chart(columns: Columns, scale: TimeScale, *, of_accelerator: bool) -> str:
    """What processes hold of memory: the rank with the most, and the one in the middle; empty where none is known."""
    kind = "accelerator" if of_accelerator else "host"
    held = [(column, _held(column, of_accelerator=of_accelerator)) for column in columns]
    most = _points_of(held, lambda values: max(values, default=None))
    between = _points_of(held, middle)
    values = [value for _, _, value in most if value is not None]
    if not values:
        return ""
    amounts = _scale(max(values) / 2**30)
    unit = 2.0**30
    lines = [
        _line([(begin, end, value and value / unit) for begin, end, value in points], class_, scale, amounts)
        for points, class_ in ((most, "line-b"), (between, "line-a"))
    ]
    return svg(
        f"memory-{kind}",
        f"Memory of the {kind}, over time",
        f"Two lines: what the rank with the most holds, at most {size_in_words(int(max(values)))}, and the one in the "
        "middle.",
        amount_axis(amounts, lambda each: f"{amount(each)} GiB", left=LEFT, right=RIGHT),
        time_axis(scale, _BOTTOM, top=_TOP),
        *lines,
        width=WIDTH,
        height=_BOTTOM + 26,
        class_="over-time",
    )


def _rate_chart(
    name: str,
    title: str,
    about: str,
    points: _Points,
    words: Callable[[float], str],
    record: RunRecord,
    scale: TimeScale,
) -> str:
    values = sorted(value for _, _, value in points if value is not None)
    if not values:
        return ""
    amounts = _scale(values[round(0.99 * (len(values) - 1))] * 1.1, _LOW_BOTTOM)
    changes = [scale.x(each.begin) for each in record.periods[1:]]
    return svg(
        name,
        title,
        f"{about}. Dashed lines are where another config came into force.",
        amount_axis(amounts, words, left=LEFT, right=RIGHT),
        time_axis(scale, _LOW_BOTTOM, top=_TOP),
        verticals(changes, "change", top=_TOP, bottom=_LOW_BOTTOM),
        _line(points, "line-a", scale, amounts),
        width=WIDTH,
        height=_LOW_BOTTOM + 26,
        class_="over-time",
    )


_Points = list[tuple[float, float, float | None]]


def _points(columns: Columns, value_of: Callable[[Column], float | None]) -> _Points:
    return [(column.begin, column.end, value_of(column)) for column in columns]


def _points_of(held: Sequence[tuple[Column, list[float]]], choose: Callable[[list[float]], float | None]) -> _Points:
    return [(column.begin, column.end, choose(values)) for column, values in held]


def _held(column: Column, *, of_accelerator: bool) -> list[float]:
    """Bytes that each rank held, of those that said so."""
    found = []
    for sums in column.sums.values():
        total = sums.accelerator_byte_seconds if of_accelerator else sums.host_byte_seconds
        if sums.known_seconds > 0 and total > 0:
            found.append(total / sums.known_seconds)
    return found


def _speed(sums: RankSums | None) -> float | None:
    if sums is None or sums.step_seconds <= 0 or sums.num_samples <= 0:
        return None
    return sums.num_samples / sums.step_seconds


def _tokens(sums: RankSums | None) -> float | None:
    if sums is None or sums.training_seconds <= 0 or sums.num_tokens <= 0:
        return None
    return sums.num_tokens / sums.training_seconds


def _arithmetic(column: Column) -> Iterator[float]:
    for sums in column.sums.values():
        if sums.training_seconds > 0 and sums.ideal_seconds > 0:
            yield sums.ideal_seconds / sums.training_seconds


def _scale(most: float, bottom: float = _BOTTOM) -> AmountScale:
    return AmountScale(most=nice_top(most), bottom=bottom, top=_TOP)


def _highest(record: RunRecord) -> float:
    """The upper edge of the highest band."""
    return max((each.samples_per_second.high for each in record.periods if each.samples_per_second), default=0.0)


def _bands(record: RunRecord, scale: TimeScale, amounts: AmountScale) -> list[str]:
    parts = []
    for period in record.periods[-_MOST_BANDS:]:
        spread = period.samples_per_second
        if spread is None:
            continue
        x, right = scale.x(period.begin), scale.x(period.end)
        top, bottom = amounts.y(spread.high), amounts.y(spread.low)
        y = amounts.y(spread.middle)
        words = (
            f"config {period.name}: {amount(spread.middle)} samples/s, the middle half from {amount(spread.low)} "
            f"to {amount(spread.high)}"
        )
        parts.append(
            tag(
                "g",
                tag("title", text(words)),
                tag("rect", class_="band", x=x, y=top, width=max(right - x, 1.0), height=max(bottom - top, 1.0)),
                tag("line", class_="of-band", x1=x, x2=max(right, x + 1.0), y1=y, y2=y),
            )
        )
    return parts


def _line(points: _Points, class_: str, scale: TimeScale, amounts: AmountScale) -> str:
    """Through the middles of columns; where one has no value the line is broken."""
    data, part = "", list[tuple[float, float]]()
    for begin, end, value in [*points, (0.0, 0.0, None)]:
        if value is not None:
            part.append((scale.x((begin + end) / 2), amounts.y(value)))
        elif part:
            x, y = part[0]
            data += path_of(part if len(part) > 1 else [(x - 1.5, y), (x + 1.5, y)])
            part = []
    return tag("path", class_=f"line {class_}", d=data) if data else ""
