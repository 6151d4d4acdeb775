"""Showing: what becomes of a rank's windows as they end: its metrics, and on rank 0 a line of the log and sinks.

It runs on the training thread, between two steps. What other ranks did is read from their files, a few windows of each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from elastic_ext.records.metrics import Measures, NodeCalibration, StepCensus, StepWindow

from .bottleneck import Verdict, verdict
from .line import line_of
from .phases import Phase
from .reading import present_windows, profile_file, read_calibration, read_census, read_trace, tails_of, view_of
from .sinks import Sinks
from .summary import flops_share, summary_of
from .weighed import merged

__all__ = ["Showing", "Training"]

_logger = logging.getLogger(__name__)

_MOST_READ = 16
"""Windows of other ranks for one line: each takes about 35 µs."""
_MOST_KEPT = 1024  # of the rank's own


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What a window does not say, and one has to know to judge it."""

    num_replicas: int
    """Of the model, each of which takes samples of its own."""
    num_micro_steps: int
    num_workers: int | None
    waits_in_passes: bool
    """Whether passes wait for parameters of other ranks."""


class Showing:
    """One rank's; ``see`` each window, and ``close`` it when training ends."""

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        hosts: Sequence[str],
        every_seconds: float,
        know: Callable[[], Training],
        sinks: Sinks,
    ) -> None:
        """``hosts`` are those of all ranks. Lines come after ``every_seconds`` of training; with 0 there are none."""
        self._folder = folder
        self._rank, self._hosts = rank, tuple(hosts)
        self._every_seconds = every_seconds
        self._know = know
        self._sinks = sinks
        self._last: StepWindow | None = None
        self._windows: list[StepWindow] = []  # since the last line, under one config
        self._seconds = 0.0  # of them, and of those under the config before

    def see(self, window: StepWindow) -> None:
        """A window has ended."""
        if window.num_steps == 0:
            return
        self._last = window
        if self._rank > 0:
            return
        if self._sinks.are_there:
            profile = summary_of([window], num_replicas=self._know().num_replicas)
            if profile is not None:
                self._sinks.write(profile)
        if self._every_seconds > 0:
            self._keep(window)

    def measured(self, measures: Measures) -> Measures:
        """With what is known of where the time went since the metrics before."""
        known = self._know()
        measures = replace(
            measures,
            num_workers=known.num_workers,
            num_micro_steps=known.num_micro_steps,
            num_replicas=known.num_replicas,
            waits_in_passes=known.waits_in_passes,
        )
        last = None if self._last is None else summary_of([self._last], num_replicas=known.num_replicas)
        if last is None:
            return measures
        return replace(
            measures,
            shares={label: round(share, 4) for label, share in last.shares.items()},
            step_seconds=last.step_seconds,
            slow_step_seconds=last.slow_step_seconds,
            tokens_per_second=last.tokens_per_second,
        )

    def close(self) -> None:
        """Say what there is to say of the last steps, and let go of the sinks. Twice is allowed."""
        self._tell()
        self._sinks.close()

    def _keep(self, window: StepWindow) -> None:
        if self._windows and _config_of(window) != _config_of(self._windows[-1]):
            self._windows.clear()
        self._windows.append(window)
        del self._windows[:-_MOST_KEPT]
        self._seconds += window.length - window.seconds.get(Phase.OUTSIDE.label, 0.0)
        if self._seconds >= self._every_seconds:
            self._tell()

    def _tell(self) -> None:
        windows, self._windows, self._seconds = self._windows, [], 0.0
        if not windows or not _logger.isEnabledFor(logging.INFO):
            return
        known = self._know()
        profile = summary_of(windows, num_replicas=known.num_replicas)
        if profile is None:
            return
        census, best = read_census(self._folder, self._rank), read_calibration(self._folder)
        mfu = flops_share(merged(windows), census, best, num_replicas=known.num_replicas)
        text = self._judged(windows, profile.seconds, census, best).text
        _logger.info("profile: %s", line_of(profile, mfu=mfu, text=text))

    def _judged(
        self, windows: Sequence[StepWindow], seconds: float, census: StepCensus | None, best: NodeCalibration | None
    ) -> Verdict:
        """What holds training up, as far as it can be seen from this node, whose ranks are taken to train alike."""
        others = [rank for rank in self._others_here() if profile_file(self._folder, rank).exists()][:_MOST_READ]
        num_each = _MOST_READ // len(others) if others else len(windows)
        tails = tails_of(self._folder, others, num_each)
        found = present_windows({**tails, self._rank: windows[-num_each:]}, seconds=seconds)
        measures = self.measured(Measures())
        views = [
            view_of(
                row,
                host=self._hosts[rank],
                measures=measures,
                census=census,
                calibration=best,
                trace=read_trace(self._folder, rank),
            )
            for rank, row in found.items()
        ]
        return verdict(views, is_partial=len(others) + 1 < len(self._hosts))

    def _others_here(self) -> Iterator[int]:
        """Those on this machine, whose files may be in another agent's folder even so."""
        own_host = self._hosts[self._rank]
        return (rank for rank, host in enumerate(self._hosts) if host == own_host and rank != self._rank)


def _config_of(window: StepWindow) -> tuple[int, int]:
    return window.config_version, window.config_revision
