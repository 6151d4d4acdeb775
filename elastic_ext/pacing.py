"""Pacing: how many boundaries one rank would have between two agreements, from what it sees of steps and agreements.

What follows from the numbers is decided in decide.py; which interval all ranks take, by their control words.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Literal

from .decide import Pace

if TYPE_CHECKING:
    from .ranks.group import Ranks

__all__ = ["Every", "Pacing"]

_NUM_MEASUREMENTS = 16
_MEASUREMENT_SECONDS = 0.002
_RETELL = 1.5  # how much a wanted interval must change to be worth telling
_GROWTH = (
    2  # how much longer an interval may become at once: a burst of short steps must not silence a run of long ones
)

Every = int | Literal["auto"]


class Pacing:
    """One rank's wish; with a number given as ``every`` it is always that."""

    def __init__(self, ranks: Ranks, every: Every) -> None:
        self._ranks = ranks
        self._is_chosen = every == "auto"
        self.is_needed = self._is_chosen and ranks.world_size > 1
        """Whether anything follows from what is noted."""
        first = 1 if every == "auto" else every
        self._wanted = self._told = first
        self._pace = Pace(pulse_seconds=0.0)
        self._passed_at: float | None = None
        self._spent_seconds = 0.0  # on the agreement under way

    def measure(self) -> None:
        """Measure what a pulse takes, with all ranks, before the first step."""
        if self._is_chosen:
            self._pace = Pace(pulse_seconds=_pulse_seconds(self._ranks))

    def note_step(self, now: float) -> None:
        """A boundary is passed."""
        if self._passed_at is not None:
            self._pace.note_step(now - self._passed_at)
        self._passed_at = now

    def note_idle(self, seconds: float) -> None:
        """A boundary without an agreement kept the training thread so long."""
        self._pace.note_idle(seconds)

    def note_reading(self, seconds: float) -> None:
        """Reading a pulse kept it so long; its agreement is over when the next one is begun."""
        self._spent_seconds += seconds

    def note_beginning(self, seconds: float) -> None:
        """Beginning a pulse kept it so long."""
        self._pace.note_agreement(self._spent_seconds + seconds)
        self._spent_seconds = 0.0

    def want(self, every: int) -> tuple[int, bool]:
        """The interval that this rank would have where ``every`` is in force, and whether that is worth telling."""
        self._wanted = min(self._pace.interval(), every * _GROWTH) if self._is_chosen else every
        return self._wanted, not self._told / _RETELL <= self._wanted <= self._told * _RETELL

    def mark_told(self) -> None:
        """All ranks have read what was wanted last."""
        self._told = self._wanted


def _pulse_seconds(ranks: Ranks) -> float:
    """The CPU seconds that one pulse takes in all of this process's threads, measured; the largest over the ranks.

    As in training, the threads that carry it have slept before: that makes it dearer than pulses in a row.
    """
    if ranks.world_size == 1:
        return 0.0
    doing = "measuring an agreement"
    pause = threading.Event()
    nanoseconds = []
    for _ in range(_NUM_MEASUREMENTS):
        pause.wait(_MEASUREMENT_SECONDS)
        began = time.process_time_ns()
        pulse = ranks.start_sum([0], doing)
        pause.wait(_MEASUREMENT_SECONDS)
        pulse.result()
        nanoseconds.append(time.process_time_ns() - began)
    mine = sorted(nanoseconds)[_NUM_MEASUREMENTS // 2]
    return max(int(data) for data in ranks.gather(str(mine).encode(), doing)) / 1e9
