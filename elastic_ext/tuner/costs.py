"""What trials may cost: the budget of slow steps, and what people were advised last. Pure."""

from __future__ import annotations

from .measurements import StepReport
from .space import Point

__all__ = ["Advice", "Budget"]


# --- how slow a probe may be, so that training is never far behind where it would be without any ---------------------
# The *baseline* is the first point that is measured after a budget has begun: the user's own config, unless a tuner has
# changed it before. In seconds,
#
#   saved = sum over all steps of (step time of the baseline - least pace * time that the step took).
#
# Probes may cost what is saved, so that training on the whole is never slower than the least pace. Steps at a better
# point save more.

_LEAST_PACE = 0.9
"""The least pace of training since the budget began, as a share of the baseline's; tuning.probe_budget changes it."""
_SOME_PACE = 0.01
"""The least pace where tuning.probe_budget allows slow probes to cost all of the time, or nearly all."""


class Budget:
    """The seconds that slow probes may cost, earned by steps that are faster than the least pace of training.

    ``share`` is tuning.probe_budget, the share of training time that slow probes may cost; None for the usual one.
    """

    def __init__(self, share: float | None = None) -> None:
        self.allow(share)
        self._baseline_seconds: float | None = None
        self._saved = 0.0
        self._report_seconds = 0.0
        self._before_known: list[StepReport] = []

    def allow(self, share: float | None) -> None:
        """Let slow probes cost ``share`` of the training time from now on; None is the usual share."""
        self._least_pace = _LEAST_PACE if share is None else max(1 - share, _SOME_PACE)

    @property
    def is_known(self) -> bool:
        """Whether the step time of the baseline is known."""
        return self._baseline_seconds is not None

    def take_baseline(self, seconds: float) -> None:
        """Take the step time of the baseline; steps that were seen before count from then on."""
        self._baseline_seconds = seconds
        earlier, self._before_known = self._before_known, []
        for report in earlier:
            self.see(report)

    def change_pace(self, step_time_ratio: float) -> None:
        """Take a change of pace: steps take ``step_time_ratio`` times as long as before, under any config."""
        if self._baseline_seconds is not None:
            self._baseline_seconds *= step_time_ratio

    def see(self, report: StepReport) -> None:
        """Take a report of steps that were taken, under any config."""
        if self._baseline_seconds is None:
            self._before_known.append(report)
            return
        self._report_seconds = report.num_steps * report.step_seconds if report.num_steps > 1 else 0.0
        took = report.num_steps * report.step_seconds + report.held_up_seconds
        self._saved += report.num_steps * self._baseline_seconds - self._least_pace * took

    @property
    def saved(self) -> float:
        """Seconds that probes may cost by now."""
        return self._saved

    @property
    def baseline_seconds(self) -> float | None:
        """The step time of the baseline; None as long as it is not known."""
        return self._baseline_seconds

    @property
    def least_pace(self) -> float:
        """The least pace of training, as a share of the baseline's."""
        return self._least_pace

    @property
    def report_seconds(self) -> float:
        """Seconds that the steps of the last report took together; 0 where each step has a report of its own."""
        return self._report_seconds


# --- what people were told last, so that they are told anew only where it is something else --------------------------

_ANEW = 0.05
"""Share by which a predicted rate has to differ from the last one told, so that people are told again."""


class Advice:
    """The advice that one search gave people last, so that they are told again only of something else."""

    def __init__(self) -> None:
        self._told: tuple[Point, float] | None = None

    def is_news(self, point: Point, rate: float) -> bool:
        """Whether people have not been told of this point and rate yet; where it is news, it is kept as told."""
        if self._told is not None and self._told[0] == point and abs(rate / self._told[1] - 1) < _ANEW:
            return False
        self._told = point, rate
        return True
