"""What a training says of itself: its metrics, its events, the bar on a terminal and the line as it starts.

What the numbers are written to is the follower's ``Reports``; what is said once about a loop is in remarks.py.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_ext.profile.windows import memory_held
from elastic_ext.ranks.world import World
from elastic_ext.records.logged import logged_in_words
from elastic_ext.records.measures import Measures
from elastic_ext.records.metrics import StepWindow
from elastic_ext.records.text import Progress, on_one_line

from .counters import Counts
from .description import start_line
from .facts import tell_of_model
from .optimizers.optimizer import ElasticLRScheduler
from .parallelism import ReshardReport
from .remarks import EpochLength, LengthRemark, remark_on_length

if TYPE_CHECKING:
    from .training import Training

__all__ = ["Speed", "TrainingReports"]

_logger = logging.getLogger(__name__)

_ANEW = (
    'give the trainer follow_options=FollowOptions(job="another name"), another shared_storage_path, or '
    'checkpoint_options=CheckpointOptions(resume="never")'
)
_LEAST_SECONDS = 1.0  # that rates are measured over


class Speed:
    """Measures steps and samples per second between two calls of ``measure``, a second or more apart."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._since = time.perf_counter()
        self._num_boundaries, self._num_samples = counts.num_boundaries, counts.num_samples  # so many there were then
        self._rates: tuple[float | None, float | None] = None, None  # steps and samples per second

    def measure(self) -> Measures:
        """Steps and samples per second of late, the memory held now, and counted metrics."""
        now, counts = time.perf_counter(), self._counts
        seconds = now - self._since
        if seconds >= _LEAST_SECONDS or self._rates == (None, None):
            num_steps = counts.num_boundaries - self._num_boundaries
            num_samples = counts.num_samples - self._num_samples
            self._since, self._num_boundaries, self._num_samples = now, counts.num_boundaries, counts.num_samples
            self._rates = num_steps / seconds if num_steps else None, num_samples / seconds if num_samples else None
        steps, samples = self._rates
        measured: dict[str, Any] = {**asdict(memory_held()), **counts.measured}
        return Measures(steps_per_second=steps, samples_per_second=samples, **measured)


class TrainingReports:
    """What a training says of itself on this rank, from its start to its end."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._speed = Speed(training.counts)
        wanted = training.following.progress
        # A script may have put something else in its place, and a process without a console has none.
        is_terminal = wanted is not False and bool(getattr(sys.stderr, "isatty", bool)())
        self._wants_bar = is_terminal if wanted is None else wanted
        self._shows_start = is_terminal and not _logger.hasHandlers()
        # By schedule, the remark on a length that may have been counted in micro-batches; None where it was not.
        self._doubted: dict[ElasticLRScheduler, LengthRemark | None] = {}
        self.bar = Progress(is_shown=False)
        """The bar of an epoch's steps, which the first rank shows."""
        self.take_world(training.ranks.world)

    def take_world(self, world: World) -> None:
        """Have the bar shown on the first rank of ``world``, from the next epoch on, and ended on another."""
        self.bar.is_shown = world.rank == 0 and self._wants_bar
        if not self.bar.is_shown:
            self.bar.end()

    def count_anew(self) -> None:
        """Measure steps and samples per second from the counts as they are now, which other ranks have told."""
        self._speed = Speed(self._training.counts)

    def begin(self) -> None:
        """Report that training has begun, and after which step it goes on; metrics tell what is in force from here."""
        training, follower = self._training, self._training.follower
        follower.reports.measure = self._measure
        if not training.members.joins:  # others wait for the first step of who has joined, which writes them
            follower.write_metrics()
        step = training.counts.global_step
        text = f"training goes on after step {step}" if step else "training begins"
        checkpoints = training.checkpoints
        job = None if checkpoints is None else checkpoints.job
        resumed = None if checkpoints is None or checkpoints.path is None else checkpoints.job.run.newest
        details = {
            "global_batch_size": training.batches.global_batch,
            "checkpoints": None if job is None else str(job.root),
            "checkpoint_interval": None if checkpoints is None else checkpoints.interval_in_words,
            "checkpoint_job": None if job is None else job.name,
            "saves_on_signals": checkpoints is not None and checkpoints.options.save_on_signals,
            "resumed_from": None if resumed is None or checkpoints is None else str(checkpoints.path),
            "saved_by_ranks": None if resumed is None else resumed.num_ranks,
            "config_file": str(follower.settings.config_file),
        }
        self._write_event("training-began", text, details)
        training.facts.tell()
        if follower.ranks.rank == 0 and follower.settings.enabled:
            line = start_line(training, follower.tell_of_file())
            _logger.info("%s", line)
            if self._shows_start:  # a terminal that no log reaches
                sys.stderr.write(f"elastic_ext: {on_one_line(line)}\n")

    def _measure(self) -> Measures:
        """The metrics of now: speed and memory, what a step takes and does, how far training is, and what is saved."""
        training, counts, batches = self._training, self._training.counts, self._training.batches
        training.growing.warn()
        training.facts.tell()
        logged = training.logged.newest()
        newest = None if training.checkpoints is None else training.checkpoints.job.run.newest
        return replace(
            training.profile_output.with_profile(self._speed.measure()),
            logged=logged,
            global_batch_size=batches.step_samples,
            micro_batch_size=batches.largest or None,
            learning_rate=training.settings.rate,
            epoch=counts.epoch if counts.is_in_epoch else None,
            num_epoch_steps_left=batches.num_steps_left if counts.is_in_epoch else None,
            checkpoint_step=None if newest is None else newest.global_step,
            checkpoint_time=None if newest is None else newest.saved_seconds,
        )

    def see_window(self, window: StepWindow) -> None:
        """Tell of a profile window that was written, and on rank 0 of the job's facts and of logged numbers."""
        self._training.profile_output.see(window)
        if self._training.ranks.rank == 0:
            self._training.facts.tell()
            if window.logged:
                self.bar.note(logged_in_words(window.logged))

    def tell_remark(self, text: str) -> None:
        """Report a warning about the loop, which was logged."""
        self._write_event("remark", text, {})

    def tell_gone_back(self, text: str, *, before: int, path: Path, skips: bool) -> None:
        """Report that training went back from step ``before`` to a checkpoint, whether or not it ``skips`` samples."""
        details = {"before": before, "path": str(path), "skip_samples": skips}
        self._write_event("went-back", text, details)

    def look_at_length(self, schedule: ElasticLRScheduler, epoch: EpochLength | None) -> None:
        """Say what there is to say of a schedule's length; where it may be right, not again after a resume."""
        training, batch = self._training, self._training.batches.global_batch
        if batch is None or epoch is None:
            return
        remark = remark_on_length(schedule.inner, epoch, batch, training.session.epochs.endless.max_steps)
        # At another batch the number of steps tells nothing.
        self._doubted[schedule] = None if schedule in self._doubted else remark
        if remark is None:
            return
        if not remark.may_be_right:
            training.state.remarks.say("length of a schedule", remark.text)
        elif not schedule.was_resumed:
            training.state.remarks.mention("length of a schedule, maybe", remark.text)

    def tell_resharded(self, report: ReshardReport) -> None:
        """Report that the model was resharded, and what the model is now."""
        tell_of_model(self._training)
        if self._training.ranks.rank == 0:
            _logger.info("the model was resharded: %s", report)
        self._write_event("resharded", str(report), report.details())

    def end_well(self) -> None:
        """Warn where training has ended well and yet not as was meant: without a step, or before a schedule's end."""
        training, counts = self._training, self._training.counts
        if counts.num_boundaries == 0 and counts.global_step > 0 and training.ranks.rank == 0:
            anew = "load no state" if training.checkpoints is None else _ANEW
            text = (
                f"nothing was left to do: training had come to step {counts.global_step}, epoch {counts.start_epoch}, "
                "before this run, which has taken no step; to train on ask for more epochs or steps, to begin anew "
                f"{anew}"
            )
            _logger.warning("%s", text)
            self._write_event("nothing-left", text, {})
        for remark in self._doubted.values():
            # The steps that the schedule's length has if it counts micro-batches.
            if remark is not None and not training.session.should_stop and counts.global_step == remark.num_steps:
                training.state.remarks.say("length of a schedule", remark.text_at_end)

    def _write_event(self, kind: str, text: str, details: Mapping[str, object]) -> None:
        step = self._training.counts.global_step
        self._training.follower.reports.write_event(kind, step=step, text=text, details=details)
