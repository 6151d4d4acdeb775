"""Heat maps of ranks over time: a row for each rank, a column for each interval, colours for an amount."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

from .columns import Columns, middle
from .frame import LEFT, RIGHT, WIDTH, time_axis
from .markup import number, svg, tag, text
from .numbers import percent, seconds_in_words
from .record import RankSums
from .scales import TimeScale

__all__ = ["NUM_COLOURS", "busy_map", "step_map"]

NUM_COLOURS = 9
_TOP = 8.0
_MOST_ROWS = 256
_MOST_LABELS = 16
_RATIOS = (0.75, 0.85, 0.95, 0.98, 1.02, 1.05, 1.15, 1.3)
"""Between the colours of what is compared with a middle."""
_LEAST_RANGE = 0.1
"""Step times that differ by less are shown alike."""

Cells = Mapping[int, Mapping[float, float]]
"""By rank and beginning of the column."""


def step_map(columns: Columns, ranks: Sequence[int], scale: TimeScale) -> str:
    """How long steps took; empty where nobody took any."""
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


def busy_map(columns: Columns, ranks: Sequence[int], scale: TimeScale) -> str:
    """How long ranks were at work for a step, against the rank in the middle; empty where no step was looked at."""
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
    against = "the rank in the middle at that time" if len(ranks) > 1 else "its own in the middle of all"
    return _map(
        "busy-map",
        "Local busy time of each rank, over time",
        f"A row for each rank, time from left to right; orange where its own work for a step takes longer than "
        f"{against}, blue where it takes less.",
        "apart",
        (columns, compared, list(_RATIOS)),
        scale,
    ) + _key("apart", words)


def _cells(columns: Columns, ranks: Sequence[int], value_of: Callable[[RankSums], float | None]) -> Cells:
    """What is known of each rank; of many ranks, the highest of neighbours."""
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
    shown: tuple[Columns, Cells, Sequence[float]],
    scale: TimeScale,
) -> str:
    columns, cells, bounds = shown
    height = max(min(26.0, 420.0 / len(cells)), 2.0)
    bottom = _TOP + height * len(cells)
    data: list[list[str]] = [[] for _ in range(NUM_COLOURS)]
    for number_of_row, row in enumerate(cells.values()):
        for colour, begin, end in _strips(columns, row, bounds):
            x, right = scale.x(begin), scale.x(end)
            y, tall = number(_TOP + number_of_row * height), number(height)
            data[colour].append(f"M{number(x)} {y}H{number(max(right, x + 0.6))}v{tall}H{number(x)}z")
    fills = [tag("path", class_=f"{palette}-{each}", d="".join(parts)) for each, parts in enumerate(data) if parts]
    return svg(
        name,
        title,
        description,
        tag("rect", class_="ground", x=LEFT, y=_TOP, width=RIGHT - LEFT, height=bottom - _TOP),
        *fills,
        _row_names(list(cells), height),
        time_axis(scale, bottom, top=bottom),
        width=WIDTH,
        height=bottom + 26,
        class_="over-time",
    )


def _strips(columns: Columns, row: Mapping[float, float], bounds: Sequence[float]) -> list[tuple[int, float, float]]:
    """Colour, beginning and end of cells side by side that are alike."""
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
                y=_TOP + (place + 0.5) * height + 4,
                text_anchor="end",
            )
            for place, rank in enumerate(ranks)
            if place % step == 0
        ),
    )


def _key(palette: str, words: Sequence[str]) -> str:
    """What the colours mean."""
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
