"""Bins: sums over equal intervals, which grow longer as the time does, so that they are never too many: pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from math import floor

__all__ = ["Bins"]

_SHORTEST = 2.0**-5
"""Seconds; intervals are this times a power of two, and begin at its multiples, so that two can be made one."""


class Bins:
    """Rows of sums, each row of an interval; ``most`` of them at most lie between the first and the last."""

    def __init__(self, num_values: int, most: int) -> None:
        self.width = _SHORTEST
        self._num_values = num_values
        self._most = most
        self._rows: dict[int, array[float]] = {}
        self._first = self._last = 0

    def add(self, begin: float, end: float, values: Sequence[float]) -> None:
        """Spread ``values`` evenly from ``begin`` to ``end``."""
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
        """Make the intervals at least this long."""
        while self.width < width:
            self._double()

    def items(self) -> Iterator[tuple[float, array[float]]]:
        """The beginning of each interval in which there is something, in order, and its sums."""
        for index in sorted(self._rows):
            yield index * self.width, self._rows[index]

    def __len__(self) -> int:
        """How many intervals lie between the first and the last."""
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
