"""Surveyor: takes the census of one step, and has the machine measured, once in the life of a process."""

from __future__ import annotations

from collections.abc import Callable

import torch

from elastic_ext.metrics import NodeCalibration, StepCensus

from .calibrating import calibrate
from .census import Census
from .phases import Phase
from .probe import Probe
from .timeline import Timeline

__all__ = ["Surveyor"]


class Surveyor:
    """Of one rank; entered and left with each micro-step of the step that is to be looked at."""

    def __init__(
        self,
        timeline: Timeline,
        probe: Probe,
        *,
        rank: int,
        host: str,
        device: torch.device,
        keep_census: Callable[[StepCensus], None],
        keep_calibration: Callable[[NodeCalibration], None] | None,
    ) -> None:
        """``keep_calibration`` is None where another rank measures this machine."""
        self._timeline = timeline
        self._probe = probe
        self._rank, self._host, self._device = rank, host, device
        self._keep_census, self._keep_calibration = keep_census, keep_calibration
        self._census: Census | None = None
        self._is_counting = False
        self._num_micro_steps = self._num_rows = 0

    def enter(self, micro_step: int) -> None:
        """A micro-step begins, before which so many of its step have ended."""
        if micro_step == 0:
            self._census = Census(lambda: self._timeline.phase == Phase.OPTIMIZER)
            self._num_micro_steps, self._num_rows = 0, self._probe.num_rows
        if self._census is not None:
            self._num_micro_steps += 1
            self._census.__enter__()  # type: ignore[no-untyped-call]
            self._is_counting = True

    def pause(self) -> None:
        """What comes is not counted."""
        if self._is_counting and self._census is not None:
            self._is_counting = False
            self._census.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def leave(self, *, has_ended: bool) -> bool:
        """A micro-step ends, and with it its step or not; whether all is done."""
        self.pause()
        num_rows = self._probe.num_rows - self._num_rows
        if not has_ended or self._census is None:
            return False
        if num_rows > 0:  # else no pass was seen
            self._keep_census(
                self._census.record(
                    rank=self._rank,
                    num_samples=num_rows,
                    num_micro_steps=self._num_micro_steps,
                    device=str(self._device),
                )
            )
        self._census = None
        if self._keep_calibration is not None:
            self._keep_calibration(calibrate(self._device, host=self._host))
        return True
