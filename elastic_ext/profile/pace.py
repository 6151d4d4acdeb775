"""Pace: which steps are looked at one by one, so that looking takes no more than its share of them: pure."""

from __future__ import annotations

__all__ = ["Pace"]

_COST_SECONDS = 55e-6
"""What looking at a step adds to it, about: two hooks around the model, one on its output, two around the optimizer."""
_SHARE = 0.008
_NUM_TOGETHER = 64  # steps that are looked at one after another
_MEMORY = 0.1  # how much the last step counts in what steps take
_MOST_AT_ONCE = 4  # times what steps took, that it counts as


class Pace:
    """Looks at every step where that is cheap, and else at some steps in a row, and then at none for a while."""

    def __init__(self) -> None:
        self.is_detailed = True
        """Whether the steps that come are looked at."""
        self._left = _NUM_TOGETHER  # steps until it is asked again
        self._seconds = 0.0

    def end_step(self, seconds: float) -> bool:
        """A step has ended, that took so long; whether ``is_detailed`` has changed."""
        if self._seconds:
            seconds = min(seconds, _MOST_AT_ONCE * self._seconds)  # the rest is a pause, as for an evaluation
            self._seconds += (seconds - self._seconds) * _MEMORY
        else:
            self._seconds = seconds
        self._left -= 1
        if self._left > 0:
            return False
        before = self.is_detailed
        num_skipped = steps_between(self._seconds) if before else 0
        self.is_detailed = num_skipped == 0
        self._left = num_skipped or _NUM_TOGETHER
        return self.is_detailed is not before


def steps_between(seconds: float) -> int:
    """How many steps of this length are passed over after those that were looked at; 0 where none need to be."""
    cost = _NUM_TOGETHER * _COST_SECONDS
    num_steps = cost / (_SHARE * max(seconds, 1e-6))
    return 0 if num_steps <= _NUM_TOGETHER else round(num_steps) - _NUM_TOGETHER
