"""Which of several nodes is slower than the others: pure, and robust, so that a few slow ones do not hide themselves.

In each window of time every value is compared with the median of all, in units of how far values lie from it (the
median of these distances, MAD). What is far off in most windows is a straggler. Few nodes, or nodes that differ as much
among themselves, do not tell; then the answer is that it is undecided.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Standing", "stragglers"]

_OF_A_NORMAL_DISTRIBUTION = 1.4826
"""Times the MAD is the standard deviation there."""
_FAR = 3.0
_MOST_WINDOWS = 2 / 3
_HALF = 1 / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """How one compares with the others."""

    state: Literal["normal", "straggler", "undecided"]
    times_slower: float | None
    """... than the median of all, or of two than the faster one; None where there is nothing to compare."""
    reason: str


def stragglers(values: Mapping[str, Sequence[float]], *, is_rate: bool, least_share: float) -> dict[str, Standing]:
    """How each of several compares with the others, by its values in the same windows of time, each above 0.

    Of a rate more is better, of a time less is. Whoever is slower by less than ``least_share`` is not told of. One who
    lacks values is undecided and does not count.
    """
    costs = {name: [1 / value if is_rate else value for value in given] for name, given in values.items() if given}
    num_windows = min((len(given) for given in costs.values()), default=0)
    windows = [_window([given[number] for given in costs.values()]) for number in range(num_windows)]
    standings = {}
    for name in values:
        if name not in costs:
            standings[name] = Standing(state="undecided", times_slower=None, reason="it has not been measured")
        elif len(costs) < 2:
            standings[name] = Standing(state="undecided", times_slower=None, reason="there is no other to compare with")
        else:
            standings[name] = _standing(costs[name], windows, least_share)
    return standings


@dataclass(frozen=True, kw_only=True, slots=True)
class _Window:
    """What all of them took in one window of time."""

    num: int
    median: float
    usual: float
    spread: float


def _window(costs: Sequence[float]) -> _Window:
    median = statistics.median(costs)
    return _Window(
        num=len(costs),
        median=median,
        usual=min(costs) if len(costs) == 2 else median,
        spread=statistics.median(abs(other - median) for other in costs),
    )


def _standing(own: Sequence[float], windows: Sequence[_Window], least_share: float) -> Standing:
    seen = [_seen(cost, window, least_share) for cost, window in zip(own, windows, strict=False)]
    times = statistics.median(ratio for ratio, _, _ in seen)
    is_slow = sum(slow for _, slow, _ in seen) / len(seen)
    is_far = sum(far for _, _, far in seen) / len(seen)
    num = windows[0].num
    if is_far >= _MOST_WINDOWS:
        return Standing(
            state="straggler", times_slower=times, reason=f"{times:.2f} times as slow as the median of {num}"
        )
    if is_slow < _HALF:
        return Standing(state="normal", times_slower=times, reason="as fast as the others")
    if num == 2:
        reason = f"{times:.2f} times as slow as the other; a third would tell which of them is as it should be"
    else:
        reason = f"{times:.2f} times as slow as the median of {num}, which differ by as much among themselves"
    return Standing(state="undecided", times_slower=times, reason=reason)


def _seen(cost: float, window: _Window, least_share: float) -> tuple[float, bool, bool]:
    """How many times as slow as is usual in a window, whether that is slow, and whether it is far from the others."""
    is_slow = cost > (1 + least_share) * window.usual
    is_far = cost - window.median > _FAR * _OF_A_NORMAL_DISTRIBUTION * window.spread
    return cost / window.usual, is_slow, is_slow and is_far
