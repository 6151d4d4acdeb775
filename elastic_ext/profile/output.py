"""Where a rank's profile goes as its windows end: metrics, a line of the log, and sinks such as TensorBoard."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from elastic_ext.errors import ElasticError
from elastic_ext.ranks.world import World
from elastic_ext.records.measures import Measures
from elastic_ext.records.metrics import NodeCalibration, StepCensus, StepWindow

from .breakdown import merged
from .phases import Phase
from .reader import present_windows, profile_file, read_calibration, read_census, read_profiles, view_of
from .summary import StepProfile, flops_share, line_of, summary_of
from .verdict import Verdict, verdict

__all__ = ["ProfileOutput", "Sink", "Sinks", "TensorBoardSink", "TrainingFacts"]

_logger = logging.getLogger(__name__)


# --- where else rank 0 writes what its profile says ------------------------------------------------------------------
# Nothing is imported that is not used.


class Sink(Protocol):
    """What a trainer writes its profile to, on rank 0, between two steps: write little, and wait for nobody.

    A sink that raises is dropped, with one warning.
    """

    def write(self, profile: StepProfile) -> None:
        """Write the profile of a window that has ended: of the steps of a second or more, as a rule.

        A window is shorter where a change or the end of training ends it. ``num_steps`` is 0 where no step has ended in
        it and numbers were logged.
        """

    def close(self) -> None:
        """Finish writing: no profile comes any more."""


class Sinks:
    """The sinks that one rank's trainer writes its profile to."""

    def __init__(self) -> None:
        self._sinks: list[Sink] = []
        self._is_closed = False

    @property
    def are_there(self) -> bool:
        """Whether there is a sink to write to."""
        return bool(self._sinks)

    def add(self, sink: Sink) -> None:
        """Write profiles to ``sink`` too from now on. ElasticError once training has ended."""
        if self._is_closed:
            raise ElasticError("training has ended, and no sink can be added any more; add sinks before training ends")
        self._sinks.append(sink)

    def write(self, profile: StepProfile) -> None:
        """Write a profile to all sinks; one that raises is dropped."""
        for sink in tuple(self._sinks):
            try:
                sink.write(profile)
            except Exception:
                self._sinks.remove(sink)
                _logger.warning(
                    "the profile could not be written to %s, which is dropped; training goes on",
                    type(sink).__name__,
                    exc_info=True,
                )

    def close(self) -> None:
        """Close all sinks that were not dropped. Closing twice is allowed."""
        self._is_closed = True
        while self._sinks:
            sink = self._sinks.pop()
            try:
                sink.close()
            except Exception:
                _logger.warning(
                    "%s could not be closed, and may have lost the last profiles that it was given",
                    type(sink).__name__,
                    exc_info=True,
                )


class TensorBoardSink:
    """Curves by step for TensorBoard in ``folder``: logged numbers, speed, where the time goes, memory, the config.

    It needs the package ``tensorboard``; torch's writer is imported when there is something to write.
    """

    def __init__(self, folder: str | Path) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ElasticError("TensorBoardSink needs the package tensorboard; pip install tensorboard")
        self._folder = Path(folder)
        self._writer: Any = None

    def write(self, profile: StepProfile) -> None:
        """Add a point of this profile to each curve."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder))
        for name, value in _scalars(profile):
            self._writer.add_scalar(name, value, global_step=profile.step, walltime=profile.time)

    def close(self) -> None:
        """Close TensorBoard's writer, which writes what is left."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _scalars(profile: StepProfile) -> Iterator[tuple[str, float]]:
    values = {
        "speed/samples_per_second": profile.samples_per_second,
        "speed/tokens_per_second": profile.tokens_per_second,
        "speed/step_seconds": profile.step_seconds,
        "speed/slow_step_seconds": profile.slow_step_seconds,
        "memory/process_bytes": profile.memory_bytes,
        "memory/accelerator_bytes": profile.accelerator_bytes,
        "memory/accelerator_peak_bytes": profile.accelerator_peak_bytes,
        "config/version": profile.config_version,
        "config/revision": profile.config_revision,
    }
    yield from ((name, value) for name, value in values.items() if value is not None)
    yield from ((f"time/{label}", share) for label, share in profile.shares.items())
    yield from ((f"logged/{name}", value) for name, value in profile.logged.items())


# --- what becomes of a rank's windows as they end: its metrics, and on rank 0 a line of the log and sinks ------------
# It runs on the training thread, between two steps. What other ranks did is read from their files, a few windows of
# each.

_MOST_READ = 16
"""How many windows of other ranks are read for one line of the log: each takes about 35 µs."""
_MOST_KEPT = 1024  # windows of this rank since the last line of the log


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingFacts:
    """Facts of a training that are needed to judge a profile window and that the window does not have."""

    num_replicas: int
    """Replicas of the model, each of which takes samples of its own."""
    num_micro_steps: int
    num_workers: int | None
    num_processors: int | None
    """Processors of the machine that the rank may use, with all others there that may use them."""
    waits_in_passes: bool
    """Whether passes wait for parameters of other ranks."""


class ProfileOutput:
    """Writes one rank's profile to metrics, the log and sinks: ``see`` each window as it ends, then ``close``."""

    def __init__(
        self,
        folder: Path,
        *,
        world: World,
        every_seconds: float,
        facts: Callable[[], TrainingFacts],
        sinks: Sinks,
    ) -> None:
        """A line is logged after ``every_seconds`` of training; with 0 there is none.

        ``facts`` gives the facts of the training as they are now.
        """
        self._folder = folder
        self._world = world
        self._every_seconds = every_seconds
        self._facts = facts
        self._sinks = sinks
        self._last: StepWindow | None = None
        self._windows: list[StepWindow] = []  # since the last line, under the config of the last window
        self._seconds = 0.0  # of training since the last line, under earlier configs too

    def see(self, window: StepWindow) -> None:
        """Take in a window that has ended: write it to the sinks, and log a line where one is due."""
        if window.num_steps > 0:
            self._last = window
        if self._world.rank > 0:
            return
        if self._sinks.are_there:
            profile = summary_of([window], num_replicas=self._facts().num_replicas)
            if profile is not None:
                self._sinks.write(profile)
        if self._every_seconds > 0 and (window.num_steps > 0 or window.logged):
            self._keep(window)

    def with_profile(self, measures: Measures) -> Measures:
        """The measures of a rank with facts of the training, and where the time went in the last window that has steps.

        Tokens per second are the tokens of a sample in that window at the samples per second of ``measures``; the
        window's own where either has no samples per second.
        """
        known = self._facts()
        measures = replace(measures, **asdict(known))
        last = None if self._last is None else summary_of([self._last], num_replicas=known.num_replicas)
        if last is None:
            return measures
        tokens, samples = last.tokens_per_second, measures.samples_per_second
        if tokens is not None and samples is not None and last.samples_per_second:
            tokens *= samples / last.samples_per_second  # over the time that samples are counted in
        return replace(
            measures,
            shares={label: round(share, 4) for label, share in last.shares.items()},
            step_seconds=last.step_seconds,
            slow_step_seconds=last.slow_step_seconds,
            tokens_per_second=tokens,
        )

    def take_world(self, world: World) -> None:
        """Judge windows among the ranks of ``world`` from here on; what was kept of the ranks before is told first."""
        self._log_line()
        self._last, self._world = None, world

    def close(self) -> None:
        """Log the line of the last steps, and close the sinks. Closing twice is allowed."""
        self._log_line()
        self._sinks.close()

    def _keep(self, window: StepWindow) -> None:
        if self._windows and _config_of(window) != _config_of(self._windows[-1]):
            self._windows.clear()
        self._windows.append(window)
        del self._windows[:-_MOST_KEPT]
        self._seconds += window.length - window.seconds.get(Phase.OUTSIDE.label, 0.0)
        if self._seconds >= self._every_seconds:
            self._log_line()

    def _log_line(self) -> None:
        """Log one line about the windows since the last line, with the verdict on them."""
        windows, self._windows, self._seconds = self._windows, [], 0.0
        if not windows or not _logger.isEnabledFor(logging.INFO):
            return
        known = self._facts()
        logged, windows = merged(windows).logged, [each for each in windows if each.num_steps > 0] or windows
        profile = summary_of(windows, num_replicas=known.num_replicas)
        if profile is None:
            return
        profile = replace(profile, logged=logged)  # also of an evaluation after the last step
        census, best = read_census(self._folder, self._world.name.seat), read_calibration(self._folder)
        mfu = flops_share(merged(windows), census, best, num_replicas=known.num_replicas)
        text = self._judged(windows, profile.seconds, census, best).text
        _logger.info("profile: %s", line_of(profile, mfu=mfu, text=text))

    def _judged(
        self, windows: Sequence[StepWindow], seconds: float, census: StepCensus | None, best: NodeCalibration | None
    ) -> Verdict:
        """The verdict on what holds training up, from the ranks of this machine, which are taken to train alike."""
        world = self._world
        others = [seat for seat in self._others_here() if profile_file(self._folder, seat).exists()][:_MOST_READ]
        num_each = _MOST_READ // len(others) if others else len(windows)
        told = read_profiles(self._folder, [*others, world.name.seat], num_windows=num_each)
        rows = {rank: row for rank, row in told.windows.items() if rank < world.size}
        found = present_windows({**rows, world.rank: windows[-num_each:]}, seconds=seconds)
        measures = self.with_profile(Measures())
        views = [
            view_of(
                row,
                host=world.names[rank].host,
                measures=measures,
                census=census,
                calibration=best,
                trace=told.traces.get(rank),
            )
            for rank, row in found.items()
        ]
        return verdict(views, is_partial=len(views) < world.size)  # where some have not told of this config so far too

    def _others_here(self) -> Iterator[int]:
        """The seats of the other ranks on this machine; of another agent's ranks the files are in another folder."""
        world = self._world
        return (name.seat for name in world.names if name.host == world.name.host and name.rank != world.rank)


def _config_of(window: StepWindow) -> tuple[int, int]:
    return window.config_version, window.config_revision
