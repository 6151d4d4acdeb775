"""The drawings of a report: stacks of time, heat maps of ranks, and lines of speed and memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import nan

from elastic_ext.profile.ledger import Ledger, TimeUse
from elastic_ext.profile.summary import number_in_words
from elastic_ext.records.text import counted, size_in_words

from .axes import (
    LEFT,
    RIGHT,
    WIDTH,
    AmountScale,
    Column,
    TimeColumns,
    TimeScale,
    amount_axis,
    middle,
    nice_ends,
    nice_top,
    time_axis,
    verticals,
)
from .markup import HATCHED, LABELS, ORDER, amount, number, path_of, percent, seconds_in_words, svg, tag, text
from .record import RankSums, RunRecord

__all__ = [
    "HATCHES",
    "NUM_COLOURS",
    "arithmetic_chart",
    "busy_map",
    "ledger_bar",
    "legend",
    "logged_chart",
    "memory_chart",
    "speed_chart",
    "stack_chart",
    "step_map",
    "swatch",
    "token_chart",
    "world_chart",
]


# --- drawings of what time went into: the stack over time, and the bar of all of it ----------------------------------

_STACK_TOP, _STACK_BOTTOM, _STACK_HEIGHT = 10.0, 250.0, 276.0
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
"""The pattern of hatched areas as SVG; it stands once on a page, and drawings refer to it."""


def stack_chart(columns: TimeColumns, scale: TimeScale) -> str:
    """A stack of areas over time: the share of all ranks' time that each ledger entry had."""
    amounts = AmountScale(most=1.0, bottom=_STACK_BOTTOM, top=_STACK_TOP)
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
        time_axis(scale, _STACK_BOTTOM, top=_STACK_TOP),
        *parts,
        width=WIDTH,
        height=_STACK_HEIGHT,
        class_="over-time",
    )


def ledger_bar(ledger: Ledger) -> str:
    """The goodput ledger as one horizontal bar, whose width is the wall time."""
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


def legend(seconds: Mapping[TimeUse, float]) -> str:
    """The legend of the ledger's colours, for entries with time in them."""
    items = [
        tag("li", swatch(entry), tag("span", text(LABELS[entry]))) for entry in ORDER if seconds.get(entry, 0.0) > 0
    ]
    return tag("ul", *items, class_="legend")


def swatch(entry: TimeUse) -> str:
    """A small square in the colour of a ledger entry, as SVG."""
    square = _filled("rect", entry, width=14, height=14)
    return tag("svg", square, class_="swatch", viewBox="0 0 14 14", width=14, height=14, aria_hidden="true")


def _filled(name: str, entry: TimeUse, **attributes: object) -> str:
    shape = tag(name, class_=f"fill-{entry.value}", **attributes)
    return shape + tag(name, class_="hatched", **attributes) if entry in HATCHED else shape


def _runs(columns: TimeColumns) -> list[list[Column]]:
    """The columns in runs of columns that touch one another."""
    runs: list[list[Column]] = []
    for column in columns:
        if runs and column.begin - runs[-1][-1].end < columns.width * 1e-6:
            runs[-1].append(column)
        else:
            runs.append([column])
    return runs


def _area(
    run: Sequence[Column], entry: TimeUse, below: Mapping[float, float], scale: TimeScale, amounts: AmountScale
) -> str:
    """The path data of a ledger entry's area over columns that touch, without columns in which it has no time."""
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
    part: Sequence[Column], entry: TimeUse, below: Mapping[float, float], scale: TimeScale, amounts: AmountScale
) -> str:
    upper, lower = [], []
    for column in part:
        base = below.get(column.begin, 0.0)
        left, right = number(scale.x(column.begin)), number(scale.x(column.end))
        high, low = number(amounts.y(base + column.shares[entry])), number(amounts.y(base))
        upper.append(f"{left} {high}H{right}")
        lower.append(f"{right} {low}H{left}")
    return f"M{'L'.join(upper)}L{'L'.join(reversed(lower))}Z"


# --- heat maps of ranks over time: a row for each rank, a column for each interval, colours for an amount ------------

NUM_COLOURS = 9
_HEAT_TOP = 8.0
_MOST_ROWS = 256
_MOST_LABELS = 16
_RATIOS = (0.75, 0.85, 0.95, 0.98, 1.02, 1.05, 1.15, 1.3)
"""Bounds between the colours of a rank's busy time, as ratios to the median."""
_LEAST_RANGE = 0.1
"""Share that the colours of step times span at least, so that small differences are shown alike."""

Cells = Mapping[int, Mapping[float, float]]
"""The values of a heat map, by rank and by the beginning of the column."""


def step_map(columns: TimeColumns, ranks: Sequence[int], scale: TimeScale) -> str:
    """A heat map of step times by rank and time, with its legend; empty where no step was taken."""
    cells = _cells(columns, ranks, lambda sums: sums.step_seconds / sums.num_steps if sums.num_steps > 0 else None)
    values = sorted(value for row in cells.values() for value in row.values())
    if not values:
        return ""
    low, high = (values[round(share * (len(values) - 1))] for share in (0.02, 0.98))
    high = max(high, low * (1 + _LEAST_RANGE), 1e-9)
    bounds = [low + (high - low) * each / NUM_COLOURS for each in range(1, NUM_COLOURS)]
    words = [f"≤ {seconds_in_words(each)}" for each in bounds] + [f"> {seconds_in_words(bounds[-1])}"]
    return _map(
        "steps-map",
        "Step time of each rank, over time",
        "A row for each rank, time from left to right; the brighter, the longer its steps took.",
        "heat",
        (columns, cells, bounds),
        scale,
    ) + _key("heat", words)


def busy_map(columns: TimeColumns, ranks: Sequence[int], scale: TimeScale) -> str:
    """A heat map of each rank's own work for a step against the median rank's at that time, with its legend.

    A single rank is compared with its own median. Empty where no step was timed by phase.
    """
    cells = _cells(
        columns, ranks, lambda sums: sums.busy_seconds / sums.num_looked_at if sums.num_looked_at > 0 else None
    )
    if not any(cells.values()):
        return ""
    whole = middle([value for row in cells.values() for value in row.values()]) or 1.0
    compared: dict[int, dict[float, float]] = {rank: {} for rank in cells}
    for column in columns:
        here = [row[column.begin] for row in cells.values() if column.begin in row]
        base = (middle(here) if len(ranks) > 1 else whole) or 1.0
        for rank, row in cells.items():
            if column.begin in row:
                compared[rank][column.begin] = row[column.begin] / base
    words = [_ratio_in_words(each) for each in (None, *_RATIOS)]
    against = "that of the median rank at that time" if len(ranks) > 1 else "its median over time"
    return _map(
        "busy-map",
        "Local busy time of each rank, over time",
        f"A row for each rank, time from left to right; orange where a rank's own work for a step takes longer than "
        f"{against}, blue where it takes less time.",
        "apart",
        (columns, compared, list(_RATIOS)),
        scale,
    ) + _key("apart", words)


def _cells(columns: TimeColumns, ranks: Sequence[int], value_of: Callable[[RankSums], float | None]) -> Cells:
    """The values of a heat map; of more than _MOST_ROWS ranks, neighbours share a row that has the highest of them."""
    group = -(-len(ranks) // _MOST_ROWS)
    rows = {rank: ranks[number // group * group] for number, rank in enumerate(ranks)}
    cells: dict[int, dict[float, float]] = {rank: {} for rank in dict.fromkeys(rows.values())}
    for column in columns:
        for rank, sums in column.sums.items():
            value = value_of(sums)
            if value is not None:
                row = cells[rows[rank]]
                row[column.begin] = max(value, row.get(column.begin, value))
    return cells


def _map(
    name: str,
    title: str,
    description: str,
    palette: str,
    shown: tuple[TimeColumns, Cells, Sequence[float]],
    scale: TimeScale,
) -> str:
    columns, cells, bounds = shown
    height = max(min(26.0, 420.0 / len(cells)), 2.0)
    bottom = _HEAT_TOP + height * len(cells)
    data: list[list[str]] = [[] for _ in range(NUM_COLOURS)]
    for number_of_row, row in enumerate(cells.values()):
        for colour, begin, end in _strips(columns, row, bounds):
            x, right = scale.x(begin), scale.x(end)
            y, tall = number(_HEAT_TOP + number_of_row * height), number(height)
            data[colour].append(f"M{number(x)} {y}H{number(max(right, x + 0.6))}v{tall}H{number(x)}z")
    fills = [tag("path", class_=f"{palette}-{each}", d="".join(parts)) for each, parts in enumerate(data) if parts]
    return svg(
        name,
        title,
        description,
        tag("rect", class_="ground", x=LEFT, y=_HEAT_TOP, width=RIGHT - LEFT, height=bottom - _HEAT_TOP),
        *fills,
        _row_names(list(cells), height),
        time_axis(scale, bottom, top=bottom),
        width=WIDTH,
        height=bottom + 26,
        class_="over-time",
    )


def _strips(
    columns: TimeColumns, row: Mapping[float, float], bounds: Sequence[float]
) -> list[tuple[int, float, float]]:
    """The strips of a row of a heat map: colour, beginning and end of neighbouring cells of one colour."""
    strips: list[tuple[int, float, float]] = []
    for column in columns:
        if column.begin not in row:
            continue
        colour = bisect_right(bounds, row[column.begin])
        if strips and strips[-1][0] == colour and column.begin - strips[-1][2] < columns.width * 1e-6:
            strips[-1] = colour, strips[-1][1], column.end
        else:
            strips.append((colour, column.begin, column.end))
    return strips


def _row_names(ranks: Sequence[int], height: float) -> str:
    step = -(-len(ranks) // _MOST_LABELS)
    return tag(
        "g",
        *(
            tag(
                "text",
                text(f"rank {rank}"),
                class_="tick",
                x=LEFT - 7,
                y=_HEAT_TOP + (place + 0.5) * height + 4,
                text_anchor="end",
            )
            for place, rank in enumerate(ranks)
            if place % step == 0
        ),
    )


def _key(palette: str, words: Sequence[str]) -> str:
    """The legend of a heat map: a square in each colour, with its words."""
    items = []
    for number_of_colour, each in enumerate(words):
        square = tag("rect", class_=f"{palette}-{number_of_colour}", width=14, height=14)
        picture = tag("svg", square, class_="swatch", viewBox="0 0 14 14", width=14, height=14, aria_hidden="true")
        items.append(tag("li", picture, tag("span", text(each))))
    return tag("ul", *items, class_="legend key")


def _ratio_in_words(bound: float | None) -> str:
    if bound is None:
        return f"less than {percent(_RATIOS[0])}"
    place = _RATIOS.index(bound)
    if place + 1 == len(_RATIOS):
        return f"more than {percent(bound)}"
    return f"{percent(bound)} to {percent(_RATIOS[place + 1])}"


# --- drawings of speed and memory over time --------------------------------------------------------------------------

_LINE_TOP, _LINE_BOTTOM, _LINE_LOW_BOTTOM = 10.0, 170.0, 110.0
_MOST_BANDS = 120
_MOST_DRAWN = 1e15
"""The largest logged number that has a place in a drawing."""


def speed_chart(record: RunRecord, columns: TimeColumns, scale: TimeScale) -> str:
    """A line of samples per second in steps, with the quartiles under each config; empty where none is known."""
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
        "A line of the speed; behind the line, for each config, the middle half of its windows and their median. "
        "Dashed lines are where another config came into force.",
        amount_axis(amounts, amount, left=LEFT, right=RIGHT),
        time_axis(scale, _LINE_BOTTOM, top=_LINE_TOP),
        *_bands(record, scale, amounts),
        verticals(changes, "change", top=_LINE_TOP, bottom=_LINE_BOTTOM),
        _line(points, "line-a", scale, amounts),
        width=WIDTH,
        height=_LINE_BOTTOM + 26,
        class_="over-time",
    )


def world_chart(record: RunRecord, scale: TimeScale) -> str:
    """A line of how many ranks there were, with why they came or left; empty where there were always as many."""
    if len(record.worlds) < 2:
        return ""
    amounts = _scale(max(each.num_ranks for each in record.worlds) * 1.1, _LINE_LOW_BOTTOM)
    parts = []
    for each in record.worlds[-_MOST_BANDS:]:
        x, right, y = scale.x(each.begin), scale.x(each.end), amounts.y(each.num_ranks)
        words = f"{counted(each.num_ranks, 'rank')}: {each.text or 'nothing tells why'}"
        line = tag("line", class_="of-band", x1=x, x2=max(right, x + 1.0), y1=y, y2=y)
        band = tag("rect", class_="band", x=x, y=y, width=max(right - x, 1.0), height=amounts.bottom - y)
        parts.append(tag("g", tag("title", text(words)), band, line))
    return svg(
        "world",
        "The number of ranks, over time",
        "A line of how many ranks trained together. Dashed lines are where some came or left.",
        amount_axis(amounts, amount, left=LEFT, right=RIGHT),
        time_axis(scale, _LINE_LOW_BOTTOM, top=_LINE_TOP),
        verticals(
            [scale.x(each.begin) for each in record.worlds[1:]], "change", top=_LINE_TOP, bottom=_LINE_LOW_BOTTOM
        ),
        *parts,
        width=WIDTH,
        height=_LINE_LOW_BOTTOM + 26,
        class_="over-time",
    )


def token_chart(record: RunRecord, columns: TimeColumns, scale: TimeScale) -> str:
    """A line of tokens per second, over the time of training; empty where none is known."""
    first = record.ranks[0].rank
    points = _points(columns, lambda column: _tokens(column.sums.get(first)))
    return _rate_chart(
        "tokens", "Tokens per second, over time", "A line of the speed", points, number_in_words, record, scale
    )


def logged_chart(name: str, record: RunRecord, columns: TimeColumns, scale: TimeScale) -> str:
    """A line of a number that the script has logged; empty where none of its values can be drawn."""

    def drawn(column: Column) -> float | None:
        value = column.logged.get(name, nan)
        return value if abs(value) <= _MOST_DRAWN else None

    points = _points(columns, drawn)
    values = [value for _, _, value in points if value is not None]
    if not values:
        return ""
    least, most = nice_ends(min(values), max(values))
    amounts = AmountScale(least=least, most=most, bottom=_LINE_LOW_BOTTOM, top=_LINE_TOP)
    changes = [scale.x(each.begin) for each in record.periods[1:]]
    return svg(
        f"logged-{list(record.logged).index(name)}",
        f"{name}, over time",
        "A line of the mean over ranks. Dashed lines are where another config came into force.",
        amount_axis(amounts, lambda value: f"{value:.4g}", left=LEFT, right=RIGHT),
        time_axis(scale, _LINE_LOW_BOTTOM, top=_LINE_TOP),
        verticals(changes, "change", top=_LINE_TOP, bottom=_LINE_LOW_BOTTOM),
        _line(points, "line-a", scale, amounts),
        width=WIDTH,
        height=_LINE_LOW_BOTTOM + 26,
        class_="over-time",
    )


def arithmetic_chart(record: RunRecord, columns: TimeColumns, scale: TimeScale) -> str:
    """A line of the median rank's model FLOPs utilisation; empty where none is known."""
    points = _points(columns, lambda column: middle(list(_arithmetic(column))))
    about = "A line of the arithmetic that was done, as a part of what the device does at best"
    return _rate_chart("mfu", "MFU, over time", about, points, percent, record, scale)


def memory_chart(columns: TimeColumns, scale: TimeScale, *, of_accelerator: bool) -> str:
    """Lines of the memory that processes hold: the most of any rank, and the median; empty where none is known."""
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
        f"Two lines: what the rank with the most holds, at most {size_in_words(int(max(values)))}, and what the median "
        "rank holds.",
        amount_axis(amounts, lambda each: f"{amount(each)} GiB", left=LEFT, right=RIGHT),
        time_axis(scale, _LINE_BOTTOM, top=_LINE_TOP),
        *lines,
        width=WIDTH,
        height=_LINE_BOTTOM + 26,
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
    amounts = _scale(values[round(0.99 * (len(values) - 1))] * 1.1, _LINE_LOW_BOTTOM)
    changes = [scale.x(each.begin) for each in record.periods[1:]]
    return svg(
        name,
        title,
        f"{about}. Dashed lines are where another config came into force.",
        amount_axis(amounts, words, left=LEFT, right=RIGHT),
        time_axis(scale, _LINE_LOW_BOTTOM, top=_LINE_TOP),
        verticals(changes, "change", top=_LINE_TOP, bottom=_LINE_LOW_BOTTOM),
        _line(points, "line-a", scale, amounts),
        width=WIDTH,
        height=_LINE_LOW_BOTTOM + 26,
        class_="over-time",
    )


_Points = list[tuple[float, float, float | None]]


def _points(columns: TimeColumns, value_of: Callable[[Column], float | None]) -> _Points:
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


def _scale(most: float, bottom: float = _LINE_BOTTOM) -> AmountScale:
    return AmountScale(most=nice_top(most), bottom=bottom, top=_LINE_TOP)


def _highest(record: RunRecord) -> float:
    """The upper edge of the highest band: the largest upper quartile of samples per second under any config."""
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
    """A line through the middles of columns, broken where one has no value."""
    data, part = "", list[tuple[float, float]]()
    for begin, end, value in [*points, (0.0, 0.0, None)]:
        if value is not None:
            part.append((scale.x((begin + end) / 2), amounts.y(value)))
        elif part:
            x, y = part[0]
            data += path_of(part if len(part) > 1 else [(x - 1.5, y), (x + 1.5, y)])
            part = []
    return tag("path", class_=f"line {class_}", d=data) if data else ""
