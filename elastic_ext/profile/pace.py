"""Pace: which steps are looked at one by one, so that looking takes no more than its share of them: pure."""

from __future__ import annotations

__all__ = ["Pace"]

_COST_SECONDS = 250e-6
"""What looking at a step adds to it, about, in steps that compute: what it runs lies in no cache then. It is a quarter
of that in steps that do nothing else."""
_SHARE = 0.006
"""Of short steps, that it may take; of long ones, a fifth of that."""
_SHORT_SECONDS, _LONG_SECONDS = 8e-3, 40e-3
"""Between these it may take as long as of the shorter."""
_NUM_FIRST = 64  # steps that are looked at before any is passed over
_TOGETHER_SECONDS = 0.05
_LEAST_TOGETHER, _MOST_TOGETHER = (
    4,
    16,
)  # steps that are looked at one after another, for about so long: a window has some
_MEMORY = 0.1  # how much the last step counts in what steps take
_MOST_AT_ONCE = 4  # times what steps took, that it counts as
_LEAST_SECONDS = 1e-6


class Pace:
    """Looks at every step where that is cheap, and else at some steps in a row, and then at none for a while."""

    def __init__(self) -> None:
        self._left = _NUM_FIRST  # steps to look at before it is asked again
        self._seconds = 0.0

    def end_step(self, seconds: float) -> int:
        """A step that was looked at has ended and took so long; how many that come are to be passed over now."""
        if self._seconds:
            seconds = min(seconds, _MOST_AT_ONCE * self._seconds)  # the rest is a pause, as for an evaluation
            self._seconds += (seconds - self._seconds) * _MEMORY
        else:
            self._seconds = seconds
        self._left -= 1
        if self._left > 0:
            return 0
        self._left = steps_together(self._seconds)
        return steps_between(self._seconds)

    def pass_steps(self, number: int, seconds: float) -> None:
        """So many steps were passed over, and took so long together; a pause may be among them."""
        self._seconds = min(seconds / number, self._seconds)

    @property
    def long_seconds(self) -> float:
        """A step that takes longer is one of those to come, or had a pause before it."""
        return _MOST_AT_ONCE * self._seconds


def steps_together(seconds: float) -> int:
    """How many steps of this length are looked at one after another."""
    return min(max(round(_TOGETHER_SECONDS / max(seconds, _LEAST_SECONDS)), _LEAST_TOGETHER), _MOST_TOGETHER)


def steps_between(seconds: float) -> int:
    """How many steps of this length are passed over after those that were looked at; 0 where none need to be."""
    num_together = steps_together(seconds)
    num_steps = num_together * _COST_SECONDS / _allowed(max(seconds, _LEAST_SECONDS))
    return 0 if num_steps <= num_together else round(num_steps) - num_together


def _allowed(seconds: float) -> float:
    """How long looking may take of a step."""
    short = _SHARE * min(seconds, _SHORT_SECONDS)
    return short * max(seconds / _LONG_SECONDS, 1.0)
