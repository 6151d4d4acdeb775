"""Where times and amounts lie in a drawing, and which of them its axes name. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log10

from .numbers import elapsed_in_words

__all__ = ["AmountScale", "TimeScale", "nice_top"]

_TIME_STEPS = (
    *(base * 10.0**power for power in range(-6, 0) for base in (1, 2, 5)),
    *(1.0, 2.0, 5.0, 10.0, 15.0, 30.0),
    *(60.0 * each for each in (1, 2, 5, 10, 15, 30)),
    *(3600.0 * each for each in (1, 2, 3, 6, 12)),
    *(86400.0 * each for each in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)),
)
_MOST_TICKS = 9
_LEAST_AMOUNT = 1e-12
"""Less is drawn as nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeScale:
    """Time from left to right."""

    begin: float
    end: float
    left: float
    right: float

    def x(self, moment: float) -> float:
        """Where a moment is; at an edge where it is not within."""
        length = self.end - self.begin
        share = (moment - self.begin) / length if length > 0 else 0.0
        return self.left + min(max(share, 0.0), 1.0) * (self.right - self.left)

    def ticks(self) -> list[tuple[float, str]]:
        """Places, and the time since the beginning in words."""
        length = max(self.end - self.begin, 1e-6)
        step = next((each for each in _TIME_STEPS if length / each <= _MOST_TICKS), _TIME_STEPS[-1])
        count = min(floor(length / step), 1000)
        return [(self.x(self.begin + each * step), elapsed_in_words(each * step)) for each in range(count + 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class AmountScale:
    """Amounts from the bottom upwards, from 0 on."""

    most: float
    bottom: float
    top: float

    def y(self, amount: float) -> float:
        share = amount / self.most if self.most > 0 else 0.0
        return self.bottom - min(max(share, 0.0), 1.0) * (self.bottom - self.top)

    def ticks(self) -> list[float]:
        """Amounts, three to six of them, the last at the top."""
        step = _nice(self.most / 4)
        return [each * step for each in range(floor(self.most / step + 1e-9) + 1)] if step > 0 else [0.0]


def nice_top(most: float) -> float:
    """The next amount from ``most`` on at which an axis may end."""
    if most < _LEAST_AMOUNT:
        return 1.0
    step = _nice(most / 4)
    return ceil(most / step - 1e-9) * step


def _nice(amount: float) -> float:
    if amount < _LEAST_AMOUNT / 8:
        return 0.0
    power = 10.0 ** floor(log10(amount))
    return next((base * power for base in (1, 2, 2.5, 5, 10) if base * power >= amount * 0.999), 10 * power)
