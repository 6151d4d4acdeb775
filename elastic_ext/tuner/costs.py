"""What trials may cost: the budget of slow steps, and what people were advised last. Pure."""

from __future__ import annotations

from .measurements import MeasuredSteps
from .space import Point

__all__ = ["Advice", "Budget"]


# --- how slow a probe may be, so that training is never far behind where it would be without any ---------------------
# What counts is time: what the steps that were taken would have taken by the user's own config, beside what they did
# take. By nine tenths of the latter they have to be paid for. Steps at a better point save up for probes to come.

_LEAST_PACE = 0.9
"""Of the pace of the user's own config, since the tuner began, where nobody says otherwise."""
_SOME_PACE = 0.01


class Budget:
    """Since the tuner began."""

    def __init__(self, share: float | None = None) -> None:
        self.allow(share)
        self._own_seconds: float | None = None
        self._saved = 0.0
        self._report_seconds = 0.0
        self._before_known: list[MeasuredSteps] = []

    def allow(self, share: float | None) -> None:
        """``share`` of the time is what slow probes may cost from now on, where a person says so."""
        self._least_pace = _LEAST_PACE if share is None else max(1 - share, _SOME_PACE)

    @property
    def is_known(self) -> bool:
        """Whether it is known what a step takes by the user's own config."""
        return self._own_seconds is not None

    def take_own(self, seconds: float) -> None:
        """What a step takes by the user's own config."""
        self._own_seconds = seconds
        earlier, self._before_known = self._before_known, []
        for seen in earlier:
            self.see(seen)

    def change_pace(self, ratio: float) -> None:
        """Steps take so many times as long as before, by whatever config."""
        if self._own_seconds is not None:
            self._own_seconds *= ratio

    def see(self, seen: MeasuredSteps) -> None:
        """Steps were taken, by whatever config."""
        if self._own_seconds is None:
            self._before_known.append(seen)
            return
        self._report_seconds = seen.num_steps * seen.step_seconds if seen.num_steps > 1 else 0.0
        took = seen.num_steps * seen.step_seconds + seen.held_up_seconds
        self._saved += seen.num_steps * self._own_seconds - self._least_pace * took

    @property
    def saved(self) -> float:
        """Seconds that probes may cost by now."""
        return self._saved

    @property
    def own_seconds(self) -> float | None:
        """What a step takes by the user's own config, None as long as that is not known."""
        return self._own_seconds

    @property
    def least_pace(self) -> float:
        """By that of the user's own config."""
        return self._least_pace

    @property
    def report_seconds(self) -> float:
        """How long the steps took together that were told of last; 0 where each is told of."""
        return self._report_seconds


# --- what people were told last, so that they are told anew only where it is something else --------------------------

_ANEW = 0.05
"""By this share what is predicted has to differ."""


class Advice:
    """Of one search."""

    def __init__(self) -> None:
        self._told: tuple[Point, float] | None = None

    def is_news(self, point: Point, rate: float) -> bool:
        """Whether people have not been told of this; then they are."""
        if self._told is not None and self._told[0] == point and abs(rate / self._told[1] - 1) < _ANEW:
            return False
        self._told = point, rate
        return True
