"""RunDirectory: what lives on a node for one job, where worker, agent and people meet.

    <run directory>/
      config.json              what training should be doing; one writer: a person, or the agent where there is one
      metrics-<rank>.json      what a rank is doing; one writer: that rank
      model-<rank>.json        what a rank trains; one writer: that rank
      job.json                 what can be changed in the job, for whoever tunes it; one writer: rank 0
      census-<rank>.json       what a step asks of its machine; one writer: that rank
      trace-<rank>.json        what torch's profiler saw of a step; one writer: that rank
      calibration.json         what the machine does at best; one writer: the first rank on it
      profile-<rank>.jsonl     where a rank's time went, a line for each second or more; one writer: that rank
      events-<rank>.jsonl      what happened to a rank, a line each; one writer: that rank

Each record carries the restart generation, so that a reader can tell yesterday's files from today's. Training never
depends on these files: a write that fails is one warning.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from .files import append_line, open_regular, write_whole
from .job_facts import FILE as JOB_FILE
from .job_facts import JobFacts
from .metrics import JobEvent, ModelProfile, NodeCalibration, RankMetrics, StepCensus, StepTrace, StepWindow
from .record_json import JsonRecord

__all__ = ["RunDirectory"]

_logger = logging.getLogger(__name__)

_MOST_WINDOW_BYTES = 1 << 13


class RunDirectory:
    """One rank's hand in its node's run directory."""

    def __init__(self, path: Path, *, rank: int) -> None:
        self.path = path
        self.metrics_file = path / f"metrics-{rank}.json"
        self.model_file = path / f"model-{rank}.json"
        self.events_file = path / f"events-{rank}.jsonl"
        self.profile_file = path / f"profile-{rank}.jsonl"
        self.trace_file = path / f"trace-{rank}.json"
        self.census_file = path / f"census-{rank}.json"
        self.job_file = path / JOB_FILE
        self.calibration_file = path / "calibration.json"
        self._warned = False

    def prepare(self) -> None:
        """Make the directory, for its owner alone where it is new."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            self._warn(error)

    def write_metrics(self, metrics: RankMetrics) -> None:
        """Replace this rank's metrics file."""
        self._replace(self.metrics_file, metrics)

    def write_model(self, profile: ModelProfile) -> None:
        """Replace what is said of this rank's model."""
        self._replace(self.model_file, profile)

    def write_census(self, census: StepCensus) -> None:
        """Replace what is said of this rank's steps."""
        self._replace(self.census_file, census)

    def write_trace(self, trace: StepTrace) -> None:
        """Replace what torch's profiler saw of a step of this rank."""
        self._replace(self.trace_file, trace)

    def write_calibration(self, calibration: NodeCalibration) -> None:
        """Replace what is said of this machine."""
        self._replace(self.calibration_file, calibration)

    def write_facts(self, facts: JobFacts) -> None:
        """Replace what is said of the job."""
        self._replace(self.job_file, facts)

    def profiled_until(self) -> float:
        """The end of the last window in this rank's profile; 0 where there is none that can be read."""
        try:
            with open_regular(self.profile_file) as file:
                file.seek(max(file.seek(0, os.SEEK_END) - _MOST_WINDOW_BYTES, 0))
                last = file.read(_MOST_WINDOW_BYTES).decode().rstrip().rpartition("\n")[2]
            return StepWindow.from_json(last).end
        except (OSError, ValueError):
            return 0.0

    def add_window(self, window: StepWindow) -> None:
        """Add one line to this rank's profile."""
        try:
            append_line(self.profile_file, window.to_json())
        except OSError as error:
            self._warn(error)

    def add_event(self, event: JobEvent) -> None:
        """Add one line to this rank's events."""
        try:
            append_line(self.events_file, event.to_json())
        except OSError as error:
            self._warn(error)

    def _replace(self, path: Path, record: JsonRecord) -> None:
        try:
            write_whole(path, f"{record.to_json()}\n".encode(), durable=False)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            _logger.warning(
                "the run directory %s cannot be written (%s): training goes on without metrics and events; "
                "set ELASTIC_EXT_RUN_DIR to a folder that can be written",
                self.path,
                error,
            )
