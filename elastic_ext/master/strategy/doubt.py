"""Doubt: steps that take much longer than was expected: is it the point that was tried, or has the job's pace changed?
Pure.

At a point that was measured before that is plain. What was measured at another one is set aside until the best point
has been measured again: only if steps there take as long as before it was the point.
"""

from __future__ import annotations

import math

from .measuring import Measured

__all__ = ["Doubt"]

_OTHER_PACE = 0.2
"""How much longer or shorter steps take at the same point, as a logarithm, where it is the pace."""
_MUCH_LONGER = 0.4
_DEVIATIONS = 2.0
"""Steps are doubted that take longer than expected by so much, as a logarithm, and by so many deviations."""


class Doubt:
    """Of one search."""

    def __init__(self) -> None:
        self._aside: Measured | None = None

    def is_doubtful(self, measured: Measured, expected_seconds: float | None, unsure: float) -> bool:
        """Whether the best point is to be measured again before ``measured`` is learnt, which is kept until then."""
        if expected_seconds is None:
            return False
        if math.log(measured.seconds / expected_seconds) < max(_MUCH_LONGER, _DEVIATIONS * unsure):
            return False
        self._aside = measured
        return True

    def other_pace(self, measured: Measured, before: Measured | None) -> float | None:
        """How many times as long steps take as ``before`` at the same point; None where that is much the same."""
        if before is None or before.is_brief:
            return None
        ratio = measured.seconds / before.seconds
        return ratio if abs(math.log(ratio)) > _OTHER_PACE else None

    def taken(self) -> Measured | None:
        """What was set aside, which is no longer."""
        aside, self._aside = self._aside, None
        return aside
