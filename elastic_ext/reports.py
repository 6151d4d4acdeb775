"""Reports: what one rank writes to the run directory of itself: events, and metrics every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .appliers import Applied
from .config import ElasticConfig
from .records.metrics import (
    JobEvent,
    JobFacts,
    Measures,
    ModelProfile,
    NodeCalibration,
    RankMetrics,
    StepCensus,
    StepTrace,
    StepWindow,
)
from .records.run_dir import RunDirectory, Settings

if TYPE_CHECKING:
    from .ranks.group import Ranks

__all__ = ["Reports"]

_METRICS_SECONDS = 10.0


class Reports:
    """One rank's reports; with the library switched off there are none."""

    def __init__(self, settings: Settings, ranks: Ranks) -> None:
        self.measure: Callable[[], Measures] = Measures
        """What the next metrics say of speed and memory."""
        self.on_window: Callable[[StepWindow], None] | None = None
        """Told of each window that has been written."""
        self._settings = settings
        self._ranks = ranks
        self._directory = RunDirectory(settings.run_dir, rank=ranks.rank) if settings.enabled else None
        self.census: StepCensus | None = None
        self.calibration: NodeCalibration | None = None
        """The last that were written."""
        self.due_at = 0.0
        """When it is time for metrics, on the clock of ``time.perf_counter``."""

    def begin(self) -> None:
        """Make the run directory."""
        if self._directory is not None:
            self._directory.prepare()

    def tell_of(self, applied: Applied) -> None:
        """An event: what came into force."""
        version, revision = applied.new.version, applied.new.revision
        details = {"version": version, "revision": revision, "changes": applied.changes}
        self.tell("config-applied", step=applied.step, text=str(applied), details=details)

    def tell(self, kind: str, *, step: int, text: str, details: Mapping[str, object]) -> None:
        """An event: what has happened before ``step``."""
        if self._directory is None:
            return
        event = JobEvent(
            time=time.time(),
            generation=self._settings.restart,
            rank=self._ranks.rank,
            step=step,
            kind=kind,
            text=text,
            details=dict(details),
        )
        self._directory.add_event(event)

    def write_model(self, profile: ModelProfile) -> None:
        """What is trained."""
        if self._directory is not None:
            self._directory.write_model(profile)

    def write_census(self, census: StepCensus) -> None:
        """What a step asks of its machine."""
        self.census = census
        if self._directory is not None:
            self._directory.write_census(census)

    def write_trace(self, trace: StepTrace) -> None:
        """What torch's profiler saw of a step."""
        if self._directory is not None:
            self._directory.write_trace(trace)

    def write_calibration(self, calibration: NodeCalibration) -> None:
        """What this machine does at best."""
        self.calibration = calibration
        if self._directory is not None:
            self._directory.write_calibration(calibration)

    def write_facts(self, facts: JobFacts) -> None:
        """What can be changed in the job."""
        if self._directory is not None:
            self._directory.write_facts(facts)

    def profiled_until(self) -> float:
        """The end of the last window of this rank that was written, in seconds since 1970; 0 where there is none."""
        return 0.0 if self._directory is None else self._directory.profiled_until()

    def add_window(self, window: StepWindow) -> None:
        """Where this rank's time went."""
        if self._directory is not None:
            self._directory.add_window(window)
        if self.on_window is not None:
            self.on_window(window)

    def write(self, *, step: int, config: ElasticConfig, agree_every_steps: int) -> None:
        """The metrics, as of now."""
        self.due_at = time.perf_counter() + _METRICS_SECONDS
        if self._directory is None:
            return
        ranks = self._ranks
        name = ranks.names[ranks.rank]
        metrics = RankMetrics(
            time=time.time(),
            job=self._settings.job,
            generation=self._settings.restart,
            rank=ranks.rank,
            world_size=ranks.world_size,
            host=name.host,
            pid=name.pid,
            step=step,
            config_version=config.version,
            config_revision=config.revision,
            agree_every_steps=agree_every_steps,
            measures=self.measure(),
        )
        self._directory.write_metrics(metrics)
