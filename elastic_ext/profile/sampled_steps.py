"""Surveyor: has single steps measured more closely than the others.

A *census* counts the operations, bytes and flops of one step, once. A *trace* is one step as torch's profiler sees it,
taken now and then. A *memory sample* measures what one micro-step takes, where that is not known.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

import torch

from elastic_ext.config.follower import Reports
from elastic_ext.ranks.world import World

from .memory.analyzer import Analyzer
from .phases import Phase, Timeline
from .probe import Probe
from .step_costs import Census, Trace, calibrate, can_trace

__all__ = ["AnalyzerSource", "Surveyor"]

_logger = logging.getLogger(__name__)

_TRACE_SECONDS = 600.0  # between two traces


class AnalyzerSource(Protocol):
    """Makes the analyzer of the memory that steps take, on the first rank, whichever that is."""

    def make(self, probe: Probe) -> Analyzer:
        """An analyzer of the steps that ``probe`` sees from here on."""


class Surveyor:
    """Takes the census, the traces and the memory samples of one rank; the recorder tells it of each micro-step."""

    def __init__(
        self,
        timeline: Timeline,
        probe: Probe,
        *,
        world: World,
        device: torch.device,
        reports: Reports,
        why_no_census: Callable[[], str | None],
        needs_trace: Callable[[], bool],
        analyzers: AnalyzerSource | None = None,
    ) -> None:
        """``reports`` writes what is measured; the machine is measured by the first of its ranks alone.

        ``needs_trace`` says whether passes wait for other ranks in many places: a trace alone tells how long.
        ``why_no_census`` gives the reason why no census can be taken, or None. ``analyzers`` makes what measures
        memory.
        """
        self._timeline = timeline
        self._probe = probe
        self._device = device
        self._reports = reports
        self._why_no_census = why_no_census
        self._needs_trace = needs_trace
        self.analyzer: Analyzer | None = None
        """What measures and works out the memory of steps, on the first rank; None where nothing does."""
        self._analyzers = analyzers
        self.take_world(world)
        self._census: Census | None = None
        self._trace: Trace | None = None
        self._trace_at = 0.0  # when the next trace is due, by ``time.monotonic``
        self._has_census = False  # whether a census was begun, or could not be taken
        self._is_counting = False  # whether the census counts now, within a micro-step
        self._num_micro_steps = self._num_rows = 0

    def enter(self, micro_step: int) -> None:
        """Begin a micro-step, before which ``micro_step`` ones of its step have ended."""
        if micro_step == 0:
            self._begin()
        if self._census is not None:
            self._num_micro_steps += 1
            self._census.__enter__()  # type: ignore[no-untyped-call]
            self._is_counting = True
        elif self.analyzer is not None and self._trace is None:
            self.analyzer.enter(micro_step)

    def reach_boundary(self) -> None:
        """End what is measured of a step: its passes are over, and its optimizers have stepped."""
        self._pause()
        trace, self._trace = self._trace, None
        if trace is not None:
            seen = trace.end()
            self._trace_at = time.monotonic() + _TRACE_SECONDS
            if seen is not None:
                self._reports.write_trace(seen)

    def leave(self, *, has_ended: bool) -> None:
        """End a micro-step; ``has_ended`` says whether its step ends with it."""
        self._pause()
        if has_ended and self._census is not None:
            self._keep_census(self._census)
            self._census = None
            if self._world.is_first_here:
                self._measure_machine()

    def take_world(self, world: World) -> None:
        """Name this rank as it is in ``world`` in what is measured from here on, between two steps.

        Memory is measured on the first rank alone, and anew where another rank has become that.
        """
        self._world = world
        if world.rank > 0 and self.analyzer is not None:
            self.analyzer.close()
            self.analyzer = None
        elif world.rank == 0 and self.analyzer is None and self._analyzers is not None:
            self.analyzer = self._analyzers.make(self._probe)

    def close(self) -> None:
        """Stop measuring: training ends, perhaps within a step."""
        self._pause()
        if self.analyzer is not None:
            self.analyzer.close()
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.end()

    def _measure_machine(self) -> None:
        try:
            self._reports.write_calibration(calibrate(self._device, host=self._world.name.host))
        except (RuntimeError, MemoryError) as error:  # it asks for memory, which a training may have taken up
            _logger.debug("the peak speed of this machine is not measured: %s", error)

    def _begin(self) -> None:
        """Begin a step, and the census or a trace of it where one is due.

        Where a step was rolled back that had either, the next step has it in its place.
        """
        if self._trace is not None:  # of a step that was rolled back
            self._trace.end()
            self._trace, self._trace_at = None, 0.0
        if self._census is not None or not self._has_census:
            self._has_census = True
            why_not = self._why_no_census()
            if why_not is None:
                self._census = Census(lambda: self._timeline.phase == Phase.OPTIMIZER)
                self._num_micro_steps, self._num_rows = 0, self._probe.num_rows
            elif self._world.rank == 0:
                _logger.info("the model's operations are not counted, so that its MFU is not known: %s", why_not)
        elif time.monotonic() >= self._trace_at:
            self._trace_at = time.monotonic() + _TRACE_SECONDS
            if self._needs_trace() and can_trace():
                self._trace = Trace(self._world.rank)
                self._trace.begin()

    def _pause(self) -> None:
        if self.analyzer is not None:
            self.analyzer.leave()
        if self._is_counting and self._census is not None:
            self._is_counting = False
            self._census.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _keep_census(self, census: Census) -> None:
        num_rows = self._probe.num_rows - self._num_rows
        if num_rows > 0:  # else no pass was seen
            self._reports.write_census(
                census.record(
                    rank=self._world.rank,
                    num_samples=num_rows,
                    num_micro_steps=self._num_micro_steps,
                    device=str(self._device),
                )
            )
