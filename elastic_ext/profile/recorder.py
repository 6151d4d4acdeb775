"""Recorder: makes a rank's profile, from what the trainer tells the rank's heartbeat and from the probe's phases."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from time import perf_counter_ns

from elastic_ext.ranks.heartbeat import Activity, Heartbeat
from elastic_ext.ranks.world import World
from elastic_ext.records.metrics import StepWindow

from .memory.analyzer import Analyzer
from .phases import Phase, TimedSource
from .probe import Probe, ProbePace
from .sampled_steps import Surveyor
from .windows import TrainingProgress, WindowAccumulator

__all__ = ["Recorder"]

_PHASES = {
    Activity.STARTING: Phase.STARTUP,
    Activity.RESUMING: Phase.CHECKPOINT,
    Activity.OUTSIDE: Phase.OUTSIDE,
    Activity.STEP: Phase.STEP,
    Activity.BOUNDARY: Phase.AGREEMENT,
    Activity.SAVING: Phase.CHECKPOINT,
    Activity.CHANGING: Phase.CHANGE,
    Activity.ENDED: Phase.OUTSIDE,
    Activity.BETWEEN: Phase.OTHER,
    Activity.MEMBERS: Phase.MEMBERSHIP,
}
_BEFORE_OTHER_STEPS = (Activity.CHANGING, Activity.RESUMING, Activity.MEMBERS)
"""Activities after which steps may be unlike those before, and belong to another window."""
_COUNT_NANOSECONDS = 100_000_000  # after which a window counts the unmeasured steps that have ended
_SURVEY_AFTER = 16  # steps: by then a step takes what later ones take


class Recorder(Heartbeat):
    """Makes a rank's profile: takes the place of the rank's heartbeat, and hands on its calls to the heartbeat.

    ``communicating`` alone is not handed on: heartbeats that an agent reads do not tell of it.
    """

    wants_micro_steps = True

    def __init__(
        self,
        heartbeat: Heartbeat,
        probe: Probe,
        windows: WindowAccumulator,
        *,
        progress: Callable[[], TrainingProgress],
        on_window: Callable[[StepWindow], None],
        loader: object,
        surveyor: Surveyor | None = None,
    ) -> None:
        """``progress`` says how far training is, and ``on_window`` is called with each profile window as it ends.

        ``loader`` is the dataloader that the trainer was given, and None where it was given none.
        """
        self._heartbeat = heartbeat
        self._timeline = timeline = windows.timeline
        self._probe = probe
        self._windows = windows
        self._pace = ProbePace()
        self._progress, self._on_window = progress, on_window
        self._loader = loader if isinstance(loader, TimedSource) else None
        if self._loader is not None:
            self._loader.timeline = timeline  # it tells when the loop waits for it
        # A loader that does not tell when the loop waits for it may be waited for all the time between two micro-steps.
        self._tells_waits = loader is None or self._loader is not None
        self._phase_in_epoch = Phase.OTHER if self._tells_waits else Phase.DATA  # between two micro-steps
        self._phase_between: Phase = self._phase_in_epoch  # or outside of epochs, where the loop is there
        # Where all time between two micro-steps may be a wait, the tuner asks how much CPU time that has.
        self._mark_unmeasured = timeline.enter_unmeasured if self._tells_waits else timeline.enter
        self._surveyor = surveyor
        self._num_boundaries = 0
        self._survey_after = _SURVEY_AFTER
        self._has_begun = False
        self._is_measured = self._is_changed = self._is_over = False
        self.rests_until = 0
        """When steps are measured again, in nanoseconds by ``time.perf_counter_ns``; 0 while they are."""
        self._num_unmeasured = 0  # unmeasured steps that have ended and that the window has not counted yet
        self._count_at = 0  # when it counts these

    @property
    def analyzer(self) -> Analyzer | None:
        """What measures and works out the memory that steps take; None where nothing does."""
        return None if self._surveyor is None else self._surveyor.analyzer

    # ---- what a heartbeat is told ----

    # Training waits for these two in each micro-step, of which few are measured.

    def enter(self, micro_step: int) -> None:
        if self._heartbeat.wants_micro_steps:
            self._heartbeat.enter(micro_step)
        if self.rests_until:
            if self._probe.is_attached:
                self._probe.enter_unmeasured_micro_step()
            self._mark_unmeasured(Phase.STEP)
            return
        if not self._has_begun:
            self._begin()
        elif self._is_changed and micro_step == 0:  # after a change, steps belong to another window
            self._close()
        self._is_measured = True
        self._probe.enter_micro_step()
        if self._surveyor is not None and self._probe.has_seen and self._num_boundaries >= self._survey_after:
            self._surveyor.enter(micro_step)
        if micro_step == 0:
            self._timeline.begin_step()

    def leave(self, step: int, num_boundaries: int, micro_step: int) -> None:
        if self._heartbeat.wants_micro_steps:
            self._heartbeat.leave(step, num_boundaries, micro_step)
        has_ended = num_boundaries != self._num_boundaries
        self._num_boundaries = num_boundaries
        is_rolled_back = not has_ended and micro_step == 0  # as none of its micro-steps has ended any more
        if not self.rests_until:
            self._leave_measured(has_ended=has_ended, is_rolled_back=is_rolled_back)
            return
        if self._probe.is_attached:
            self._probe.leave_micro_step()
        self._mark_unmeasured(self._phase_between)
        if is_rolled_back:
            self._timeline.roll_back()
        elif has_ended:
            self._timeline.end_unmeasured_step()
            self._num_unmeasured += 1
            now = perf_counter_ns()
            if now >= self.rests_until:
                self._measure_again()
            elif now >= self._count_at:
                self._count_at = now + _COUNT_NANOSECONDS
                self._count_unmeasured()

    @contextlib.contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        if activity in _BEFORE_OTHER_STEPS:
            self._measure_again()
        if activity is Activity.RESUMING and self._has_begun:
            self._close()  # training goes back: what it has come to is told before
        with self._heartbeat.during(activity), self.spending(self._phase_of(activity)):
            yield
        if activity in _BEFORE_OTHER_STEPS:
            self._is_changed = True

    def note(self, activity: Activity) -> None:
        self._heartbeat.note(activity)
        self._measure_again()
        if self._has_begun:
            self._timeline.enter(self._phase_of(activity))

    def communicating(self) -> AbstractContextManager[None]:
        # All of an unmeasured micro-step is Phase.STEP, which is divided later as measured ones are. Communication that
        # was told apart would be counted twice.
        return contextlib.nullcontext() if self.rests_until else self.spending(Phase.COMMUNICATION)

    def pass_step(self, step: int) -> None:
        self._heartbeat.pass_step(step)

    def note_save(self) -> None:
        self._heartbeat.note_save()

    def note_change(self) -> None:
        self._heartbeat.note_change()
        self._windows.expect_change()

    def join(self, step: int, num_boundaries: int) -> None:
        self._heartbeat.join(step, num_boundaries)
        self._survey_after += num_boundaries - self._num_boundaries
        self._num_boundaries = num_boundaries

    def take_world(self, world: World) -> None:
        self._heartbeat.take_world(world)
        self._measure_again()
        if self._has_begun:
            self._close()  # a window is of one world
        self._windows.take_world(world)
        if self._surveyor is not None:
            self._surveyor.take_world(world)

    def end(self) -> None:
        self._heartbeat.end()
        if not self._is_over:
            self._is_over = True
            self._measure_again()
            self._probe.detach()
            if self._surveyor is not None:
                self._surveyor.close()
            if self._loader is not None and self._loader.timeline is self._timeline:
                self._loader.timeline = None
            self._timeline.finish()
            self._close()

    # ---- what others tell ----

    @contextlib.contextmanager
    def spending(self, phase: Phase) -> Iterator[None]:
        """A context whose time counts for ``phase``; afterwards the phase is the one before."""
        before = self._timeline.enter(phase)
        try:
            yield
        finally:
            self._timeline.enter(before)

    @contextlib.contextmanager
    def at_boundary(self) -> Iterator[None]:
        """A context in which a boundary is passed while steps are measured; its time counts as agreement."""
        before = self._timeline.enter(Phase.AGREEMENT)
        if self._surveyor is not None:
            self._surveyor.reach_boundary()
        try:
            yield
        finally:
            self._timeline.enter(before)

    def begin_epoch(self) -> None:
        """Count time between steps for the next step again, and not as outside of epochs: an epoch begins."""
        self._phase_between = self._phase_in_epoch
        self._timeline.enter(self._phase_between)

    def end_epoch(self) -> None:
        """Count the loop's time as outside of epochs from now on."""
        self._phase_between = Phase.OUTSIDE
        self._timeline.enter(self._phase_between)

    # ---- what follows ----

    def _phase_of(self, activity: Activity) -> Phase:
        return _PHASES[activity] if self._has_begun or activity is Activity.SAVING else Phase.STARTUP

    def _begin(self) -> None:
        """Begin the first step: the window of the startup ends."""
        self._has_begun = True
        self._timeline.take_thread()  # a loop may run on another thread than what has prepared it
        self._close()
        self._pace.begin_look(perf_counter_ns())
        self._probe.attach()

    def _end_step(self) -> None:
        is_measured = self._is_measured and self._probe.has_seen  # else hooks do not see this model called
        if self._windows.end_step(is_measured=is_measured) or self._is_changed:
            self._close()
        now = perf_counter_ns()
        self.rests_until, self._count_at = self._pace.end_step(now), now + _COUNT_NANOSECONDS
        if self.rests_until and self._tells_waits and self._probe.may_detach():  # else hooks tell evaluations apart
            self._probe.detach()

    def _leave_measured(self, *, has_ended: bool, is_rolled_back: bool) -> None:
        self._probe.leave_micro_step()
        if self._surveyor is not None:
            self._surveyor.leave(has_ended=has_ended)
        if has_ended:
            self._end_step()
        elif is_rolled_back:
            self._timeline.roll_back()
        self._timeline.enter(self._phase_between)

    def _measure_again(self) -> None:
        """Measure steps again, from the next one that begins."""
        if self.rests_until or self._num_unmeasured:
            self.rests_until = 0
            self._pace.begin_look(perf_counter_ns())
            self._is_measured = False  # the step that may be under way
            self._probe.attach()
            self._count_unmeasured()

    def _count_unmeasured(self) -> None:
        """Count the steps that were not measured in the window."""
        num_unmeasured, self._num_unmeasured = self._num_unmeasured, 0
        if num_unmeasured and (self._windows.end_unmeasured_steps(num_unmeasured) or self._is_changed):
            self._close()

    def _close(self) -> None:
        self._is_changed = False
        self._windows.count(*self._probe.take_counts())
        self._on_window(self._windows.close(self._progress()))
