"""A trainer's checkpoints: when one is saved, which one a run resumes from, and the copies that are kept for a run that
is told to end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.follower import ConfigFollower
from elastic_ext.errors import CheckpointError, CheckpointExists, CheckpointFenced, RanksDisagreeError
from elastic_ext.fsdp.checkpoint.coordination import first_says
from elastic_ext.fsdp.checkpoint.folder.listing import Retention
from elastic_ext.fsdp.checkpoint.job import JobCheckpoints, Launched
from elastic_ext.fsdp.checkpoint.saving.async_saver import Manner
from elastic_ext.fsdp.checkpoint.saving.collect import SaveRequest, ToSave
from elastic_ext.fsdp.checkpoint.saving.staging import num_copies
from elastic_ext.ranks.heartbeat import Activity, Pulse
from elastic_ext.training.options import CheckpointInterval, CheckpointOptions

from .resume import Resuming
from .state import PASSES_BY_ITSELF, BoundaryState, Resumed, TrainingState

__all__ = ["CheckpointRequest", "Checkpoints", "HeldCopies", "Saves", "checkpoints_for"]

_logger = logging.getLogger(__name__)


# --- a training's saves, one after another: what each holds, and what becomes of it ----------------------------------
# When there is one is decided by Checkpoints. How it comes to lie in files is fsdp/checkpoint's affair.


class Saves:
    """Saving the checkpoints of a training, as far as one rank does it."""

    def __init__(self, job: JobCheckpoints, state: TrainingState, *, warns: bool, pulse: Pulse) -> None:
        self.path: Path | None = None
        """Of the last checkpoint that there is, or is being saved."""
        self.warns = warns
        """A save that fails is a warning."""
        self._job = job
        self._state = state
        self._counts = state.counts
        self._pulse = pulse  # where it is noted that training waits for a save
        self.names_of_now: set[str] = set()
        """Of all checkpoints that this run has saved of the step that ``path`` is of."""
        self._saved_at: int | None = None  # the global step of that
        self._back_at: int | None = None  # the global step that training went back to last
        self._failure: CheckpointError | None = None  # of a save, on all ranks, that nobody was told of so far

    @property
    def path_of_now(self) -> Path | None:
        """Of a checkpoint of this very step, if there is one."""
        return self.path if self._saved_at == self._counts.global_step else None

    @property
    def step(self) -> int | None:
        """The global step of the last checkpoint that there is, or is being saved."""
        return self._saved_at

    def moment(self, *, is_between: bool = False) -> BoundaryState:
        """What belongs to now: a loader's position, for one, which may take a while to be told.

        ``is_between`` is as ``TrainingState.moment`` takes it.
        """
        with self._pulse.during(Activity.SAVING):
            return self._state.moment(is_between=is_between)

    def save(self, name: str, moment: BoundaryState, manner: Manner) -> Path | None:
        """Begin to save, where that goes on while training does; else save. None where another save is under way."""
        if not self._job.live.can_save:
            return self.save_and_wait(name, moment)
        self._pulse.note_save()
        with self._pulse.during(Activity.SAVING):
            path = self._job.save_live(self._request(name, moment, overlaps=manner.overlaps), manner)
        if path is not None and manner.starts:
            self.note(path)
        return path

    def save_and_wait(self, name: str, moment: BoundaryState) -> Path:
        """Save while training waits."""
        self._pulse.note_save()
        self.settle()
        with self._pulse.during(Activity.SAVING):
            path = self._job.save(self._request(name, moment))
        self.note(path)
        return path

    def _request(self, name: str, moment: BoundaryState, *, overlaps: bool = False) -> SaveRequest:
        state, step, epoch = self._state, self._counts.global_step, self._counts.epoch_to_resume
        if moment.counts.get("is_between", False) and name.startswith("step_"):
            epoch = moment.counts["epoch"] - 1  # older than what is saved again with what came after the epoch
        return SaveRequest(
            name=name,
            what=ToSave(partial(state.collect, moment=moment), state.stepped() if overlaps else ()),
            ask=lambda: f"save {name} at step {step} of epoch {epoch}",
            step=step,
            epoch=epoch,
            replaces=self._back_at == step,
            about=state.about(),
        )

    def go_back(self) -> None:
        """Training stands where an earlier checkpoint does: until there is a newer one that is undone by a restart."""
        self._saved_at = self.path = None
        self._back_at = self._counts.global_step

    @property
    def is_back_unsaved(self) -> bool:
        """Whether training went back, and has saved nothing since."""
        return self._back_at is not None and self.path is None

    def note(self, path: Path) -> None:
        """There is, or will be, a checkpoint of now."""
        if self._saved_at != self._counts.global_step:
            self.names_of_now.clear()
        self._saved_at, self.path = self._counts.global_step, path
        self.names_of_now.add(path.name)

    def note_failure(self, error: CheckpointError) -> None:
        """What was being saved is no checkpoint."""
        self._saved_at = self.path = None
        with self.warning():
            raise error

    def keep_failure(self, error: CheckpointError) -> None:
        """What was being saved is no checkpoint, and that is not the place to say so."""
        self._saved_at = self.path = None
        self._failure = error

    def tell_failure(self) -> None:
        """Say what was kept, if anything was."""
        error, self._failure = self._failure, None
        if error is not None:
            with self.warning():
                raise error

    def settle(self) -> None:
        """Wait for what is being saved; where it failed, there is no such checkpoint."""
        self.tell_failure()
        try:
            with self._pulse.during(Activity.SAVING):
                self._job.live.settle()
        except CheckpointError as error:
            self.note_failure(error)

    @contextlib.contextmanager
    def warning(self) -> Iterator[None]:
        """Where the user allows it, a save that fails is a warning."""
        try:
            yield
        except CheckpointFenced:
            raise
        except CheckpointError as error:
            if not self.warns:
                raise
            if self._state.rank == 0 and not error.is_in_log:
                _logger.warning("a checkpoint was not saved, and training goes on: %s", error)


# --- copies of what there is, to be written if training is told to end and no step ends in time ----------------------

_SPARING = 200  # times as long as copying takes lies between two copies of a kind, which nobody may need


class HeldCopies:
    """One rank's part in them."""

    def __init__(self, job: JobCheckpoints, state: TrainingState, saves: Saves) -> None:
        self.is_on = False
        """There is memory for them."""
        self._job = job
        self._saves = saves
        self._counts = state.counts
        self._held_at = self._copied_at = -math.inf  # at an epoch's end, and whenever
        self._copy_seconds = 0.0
        self._step = 0  # the global step that was copied last

    def hold(self, *, is_between: bool) -> None:
        """Copy what there is at the end of an epoch, to be written if training is told to end before the next step.

        ``is_between`` is as ``TrainingState.moment`` takes it. Nothing is copied where that would take up much of the
        time, nor while something is still being written.
        """
        if not self.is_on or not self._job.live.can_save:
            return
        if first_says(self._job.ranks, self._may_copy(self._held_at), "agreeing on a copy"):
            self.copy(self._saves.moment(is_between=is_between))
            self._held_at = time.monotonic()

    def keep(self, name: str, moment: BoundaryState, *, waits: bool) -> None:
        """Copy what a checkpoint holds that is due, to be written by ``write`` unless it is saved before; on all ranks.

        Where another save is under way that is not waited for nothing is copied.
        """
        manner = Manner(waits=waits, starts=False, on_failed=self._saves.note_failure)
        self._saves.save(name, moment, manner)
        self._step = self._counts.global_step
        self._held_at = self._copied_at = time.monotonic()

    def wait(self) -> None:
        """Return once ``write`` is done, or other ranks have done nothing for it in a while."""
        self._job.live.wait_for_held()

    def write(self) -> Path | None:
        """Begin to write what was copied last, on this rank and, by threads of theirs, on the others; its folder."""
        return self._job.live.begin_held()

    def write_with_others(self) -> None:
        """Begin to write it where another rank has; from any thread."""
        self._job.live.follow_others()

    def copy_if_on(self) -> None:
        """Copy what there is, if there is memory for that; with all ranks."""
        if self.is_on and self._job.live.can_save:
            self.copy()

    def is_wanted(self) -> bool:
        """Whether it is time to copy what there is, for a training that is told to end, and costs little of it."""
        return self.is_on and self._may_copy(self._copied_at)

    def _may_copy(self, since: float) -> bool:
        is_needed = self._saves.path_of_now is None and self._job.live.is_free
        return is_needed and time.monotonic() - since > _SPARING * self._copy_seconds

    def copy(self, moment: BoundaryState | None = None) -> None:
        """Copy what there is, to be written if training is told to end before the next copy; with all ranks.

        Not where that is saved. What has become of the save before is told where the next one is due.
        """
        if self._saves.path_of_now is not None:
            return
        began = time.monotonic()
        name = f"step_{self._counts.global_step}"
        try:
            manner = Manner(waits=False, starts=False, on_failed=self._saves.keep_failure)
            self._saves.save(name, moment or self._saves.moment(), manner)
            self._step = self._counts.global_step
        except CheckpointFenced:
            raise
        except CheckpointError as error:  # nobody has asked for it
            _logger.debug("%s is not copied: %s", name, error)
        self._copied_at = time.monotonic()
        self._copy_seconds = max(self._copied_at - began, self._copy_seconds / 2)

    def has_some(self) -> bool:
        """Whether there is something to go on from, or to be written for that."""
        return self._job.live.is_holding or self._saves.path is not None

    def has_newest(self) -> bool:
        """Whether ``write_newest`` has something to write, or has nothing left to write."""
        return self._job.live.is_holding or self._saves.path_of_now is not None

    def write_newest(self, seconds: float) -> tuple[int | None, str]:
        """Have a checkpoint of what was copied last, without the other ranks.

        Gives the step from which training can go on, None where there is nothing to go on from, and what became of it
        in words. Another thread than training's may call this.
        """
        step = self._counts.global_step
        if not self.has_some():
            if self._counts.num_boundaries == 0:
                return step, "there is nothing to save yet"
            return None, f"nothing was copied so far, and nothing is saved; training has come to step {step}"
        path, path_of_now = self._job.live.write_held(seconds), self._saves.path_of_now
        if path is None and path_of_now is not None:
            return step, f"{path_of_now} has all there is"
        if path is None and self._job.live.is_idle:
            path = self._saves.path  # whatever comes next has not begun
        if path is not None:
            of = self._saves.step if path == self._saves.path else self._step
            return of, f"{path} is what there is to go on from; training has come to step {step}"
        return None, f"what was copied is not saved in the time that there is, and training has come to step {step}"


# --- a trainer's own: when one is saved, and which one a run resumes from --------------------------------------------
# What goes into one is in state.py, how a run goes on from one in resume.py. How it comes to lie in files, and
# back, is fsdp/checkpoint's affair.

_CANNOT_HOLD = (
    "after the first step {}. Use an optimizer whose state is plain tensors, as torch.optim's are, or have no "
    "checkpoints saved: leave checkpoint_interval out, and checkpoint in the config"
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Due:
    """A checkpoint that is due, and not begun."""

    moment: BoundaryState
    """Of the boundary, or of the end of the epoch, at which it was due."""
    is_asked_for: bool = False
    is_of_epoch: bool = False
    """Epochs say when one is due, and this is the end of one."""
    is_between: bool = False
    """It is begun when the loop has done what it does between two epochs."""
    marks: Sequence[object] | None = None
    """Of what there was when it was saved before its time, if it was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRequest:
    """What a trainer was told of its checkpoints."""

    storage: Path | None
    """The folder of all jobs; None to keep no checkpoints."""
    job: str | None
    interval: CheckpointInterval | None
    options: CheckpointOptions

    def to_compare(self) -> str:
        """Text that is the same on all ranks where they were told the same."""
        own = {"shared_storage_path": self.storage, "job": self.job, "checkpoint_interval": self.interval}
        return json.dumps({name: str(value) for name, value in (own | asdict(self.options)).items()})


class Checkpoints:
    """One rank's part in the checkpoints of one training."""

    def __init__(
        self,
        job: JobCheckpoints,
        state: TrainingState,
        *,
        startup: Mapping[str, object],
        interval: CheckpointInterval | None,
        options: CheckpointOptions,
        pulse: Pulse,
    ) -> None:
        self._job = job
        self._state = state
        self._counts = state.counts
        self._pulse = pulse  # where it is noted that training waits for storage
        self._saves = Saves(job, state, warns=options.when_save_fails == "warn", pulse=pulse)
        self.held = HeldCopies(job, state, self._saves)
        """What there is, should training be told to end."""
        self._given = interval or CheckpointInterval()
        self._interval = self._given
        self.options = options
        self._resuming = Resuming(job, state, startup, falls_back=options.resume != "strict")
        self._last_epoch = 0  # the largest number that names a checkpoint, as far as this run knows
        self._num_skipped = 0
        self._left_out: tuple[int, str] | None = None  # the global step and the name of the last one that was
        self._has_told_of_epochs = self._has_told_of_no_epoch = False
        self._due: _Due | None = None  # the save that is not begun yet
        self._why_never: str | None = None  # anything can be saved, since the first step

    # ---- saving ----

    def next_due(self, config: ElasticConfig) -> float:
        """The next ``global_step`` after which to save, now that ``config`` is in force."""
        wanted = config.checkpoint
        self._interval = self._given
        if wanted.steps is not None or wanted.epochs is not None:
            self._interval = CheckpointInterval(steps=wanted.steps, epochs=wanted.epochs)
        steps = self._interval.steps
        return math.inf if steps is None else (self._counts.global_step // steps + 1) * steps

    def note_due(self, *, is_asked_for: bool) -> None:
        """A checkpoint is due at this boundary, and is begun when the loop has done what it does after the step.

        One that somebody has asked for waits for another that is under way, whatever ``when_saving`` says.
        """
        self._due = _Due(moment=self._saves.moment(), is_asked_for=is_asked_for)

    def note_epoch(self, *, is_over: bool) -> None:
        """An epoch's loop has ended, or was left before that: what is due now holds what the loop does until the next.

        It is begun there, and ``keep_due`` has it outlive what ends training before.
        """
        number = self._counts.epoch_to_resume + (not is_over)
        is_of_epoch = self._interval.should_save(current_epoch=number)
        if self._due is None and not is_of_epoch:
            return
        self._due = _Due(
            moment=self._saves.moment(is_between=is_over),
            is_asked_for=self._due is not None and self._due.is_asked_for,
            is_of_epoch=is_of_epoch,
            is_between=True,
        )

    def keep_due(self, *, by_copy: bool) -> None:
        """Have what is due between two epochs be there should training end before it is begun; with all ranks.

        As a copy in memory, where threads of all ranks can write that; else it is saved, and saved once more where
        anything has changed until it would be begun.
        """
        due = self._due
        if due is None or not due.is_between or self._saves.path_of_now is not None:
            return
        name, waits = self._name_of(due), due.is_asked_for or self.options.when_saving == "wait"
        if by_copy and self._job.live.can_save:
            with self._saves.warning():
                self.held.keep(name, due.moment, waits=waits)
        else:
            self._save_or_warn(name, due.moment, self._manner(waits=waits))
            self._note_saved(due)

    def _note_saved(self, due: _Due) -> None:
        """What is due is saved by now, as it is so far."""
        self._due = replace(due, marks=self._state.marks()) if self._saves.path_of_now is not None else due

    def _has_changed(self, due: _Due) -> bool:
        """Whether anything has, on any rank, since ``due`` was saved."""
        changed = [int(due.marks != self._state.marks())]
        return self._job.ranks.sum(changed, "seeing whether anything has changed")[0] > 0

    def tell_of_no_epoch(self) -> None:
        """A step was taken: where epochs say what is saved, it has to be one of an epoch whose end is known."""
        if self._interval.epochs is None or self._counts.is_in_epoch or self._has_told_of_no_epoch:
            return
        self._has_told_of_no_epoch = True
        if self._state.rank == 0:
            _logger.warning(
                "a step was taken outside of `with trainer.epoch():`, and checkpoints are saved by epochs: nothing is "
                "saved by itself where no epoch ends, as trainer.reset() alone tells of none; put it around the loop "
                "over the data, or have checkpoints saved by steps"
            )

    @property
    def step(self) -> int:
        """The global step that training has come to."""
        return self._counts.global_step

    @property
    def root(self) -> Path:
        """The folder in which the job's are."""
        return self._job.root

    @property
    def is_due(self) -> bool:
        """Whether one was due, and is not begun yet."""
        return self._due is not None

    @property
    def is_due_between(self) -> bool:
        """Whether it is one that is begun when the loop has done what it does between two epochs."""
        return self._due is not None and self._due.is_between

    def begin_due(self, *, in_step: bool = False) -> None:
        """Save what is due, if anything is; before the next step or epoch, or the end of training.

        As a step begins (``in_step``) what that does not change is copied while it goes on, until ``fence``.
        """
        due, self._due = self._due, None
        if due is None:
            return
        moment = self._moment_of(due, in_step=in_step)
        manner = self._manner(waits=due.is_asked_for, overlaps=in_step and self._may_overlap())
        if due.marks is None:
            self._save_or_warn(self._name_of(due), moment, manner)
        elif self._has_changed(due):
            self._save_again(moment, manner)

    def _moment_of(self, due: _Due, *, in_step: bool) -> BoundaryState:
        """What belongs to what is due: of the boundary; between two epochs of now, where the next one begins.

        Where a step begins instead, the loop over its data has drawn random numbers, and will do so again.
        """
        if not due.is_between:
            return due.moment
        now = self._saves.moment()
        return replace(now, random=due.moment.random) if in_step else now

    def _may_overlap(self) -> bool:
        """Asked for each save: hooks that step what prepare() returns are not there before."""
        why_not = self._state.why_not_overlap(self.options.overlap_saving)
        _logger.debug("parameters are copied before the next step begins: %s", why_not or "no, meanwhile")
        return why_not is None

    @property
    def is_copying(self) -> bool:
        """Whether ``fence`` has something to wait for."""
        return self._job.live.is_copying

    def fence(self) -> None:
        """Return once parameters and optimizers may change."""
        with self._pulse.during(Activity.SAVING):
            self._job.live.fence()

    def moment(self, *, is_between: bool = False) -> BoundaryState:
        """What belongs to the boundary that was passed just now, or to the end of an epoch."""
        return self._saves.moment(is_between=is_between)

    def save_now(self, moment: BoundaryState | None = None) -> Path:
        """Save on all ranks, unless a checkpoint holds just what would be saved; gives the folder, which is there.

        The rest of the state is that of now, or of ``moment``.

        CheckpointExists where this step has one, and something has changed since.
        """
        saves, due = self._saves, self._due
        path = saves.path_of_now
        if path is None:
            path = saves.save_and_wait(self._name_of(due), moment or saves.moment())
            self._note_name(path.name)
        else:
            change = self._job.change_since(path, self._state.collect, PASSES_BY_ITSELF)
            if change is None:
                self._due = due if due is not None and due.is_between and moment is None else None
                return path
            free = self._free_name() if due is not None and due.marks is not None else None
            try:
                path = saves.save_and_wait(free or f"step_{self._counts.global_step}", moment or saves.moment())
            except CheckpointExists as error:
                raise CheckpointExists(f"{error}; it does not have {change} as it is now") from error
        self._due = None  # it is this very step
        if due is not None and due.is_between and moment is None:  # and what the loop does there yet belongs to it
            self._note_saved(due)
        return path

    def try_out(self) -> None:
        """Find out now what could not be saved later."""
        self._job.try_out(self._state.collect)

    def try_out_stepped(self) -> None:
        """The same after the first step, with all ranks, of what optimizers have made in it.

        A warning where none falls due by itself, or one that fails is to be a warning.
        """
        try:
            self._job.try_out(self._state.collect)
        except CheckpointError as error:
            self._why_never = _CANNOT_HOLD.format(error)
            is_planned = self._interval.steps is not None or self._interval.epochs is not None
            if is_planned and not self._saves.warns:
                raise CheckpointError(self._why_never) from None
            if self._state.rank == 0:
                _logger.warning("%s; training goes on without", self._why_never)

    def check(self, new: ElasticConfig) -> str | None:
        """Why none can be saved where ``new`` asks for some, None where they can, or where a failure is a warning."""
        wanted = new.checkpoint
        is_wanted = wanted.steps is not None or wanted.epochs is not None or wanted.now
        return self._why_never if is_wanted and not self._saves.warns else None

    def make_ready(self) -> None:
        """Make the memory for saving in the background, once, as soon as there is an interval to save at."""
        if not self.held.is_on and (self._interval.steps or self._interval.epochs):
            self.held.is_on = True
            with self._pulse.during(Activity.SAVING):
                self._job.live.make_ready(ToSave(self._state.collect))

    def end(self) -> None:
        """Training has ended well on all ranks: what is being saved is, or is an error; and that it went back.

        So is what was due at its last step, and was left out for another save: nothing is gained by that any more.
        """
        self._saves.settle()
        left_out_at, name = self._left_out or (None, "")
        is_left_out = left_out_at == self._counts.global_step
        if is_left_out or self._saves.is_back_unsaved:
            name = name if is_left_out else f"step_{self._counts.global_step}"
            with contextlib.suppress(CheckpointExists):  # what was held was written just now, at a signal
                self._save_or_warn(name, self._saves.moment(), self._manner(waits=True))
                self._saves.settle()

    def close(self) -> None:
        """Let another run of the job have the folder."""
        self._job.close(hurries=sys.exc_info()[1] is not None)

    def _manner(self, *, waits: bool = False, overlaps: bool = False) -> Manner:
        """How to save what is due."""
        waits = waits or self.options.when_saving == "wait"
        return Manner(waits=waits, overlaps=overlaps, on_failed=self._saves.note_failure)

    def _name_of(self, due: _Due | None) -> str:
        """An epoch that is over gives its number, unless another has had that; all else is named by its step."""
        counts = self._counts
        if due is not None and due.is_of_epoch and counts.unfinished_epoch is None:
            name = f"epoch_{counts.epoch}"
            if counts.epoch > self._last_epoch:
                return name
            self._tell_of_repeated_epoch(name)
        return f"step_{counts.global_step}"

    def _save_again(self, moment: BoundaryState, manner: Manner) -> None:
        """Save what has changed since it was saved as an epoch ended."""
        name = self._free_name()
        if name is not None:
            self._save_or_warn(name, moment, manner, is_again=True)
        elif self._state.rank == 0:
            _logger.warning(
                "%s does not have what the loop did after it was saved, and step %d has no other name to save that by",
                self._saves.path,
                self._counts.global_step,
            )

    def _free_name(self) -> str | None:
        """A name for another checkpoint of this step: the step's, or else that of the epoch that has ended."""
        counts, used = self._counts, self._saves.names_of_now
        names = [f"step_{counts.global_step}"]
        if counts.epoch > self._last_epoch and counts.unfinished_epoch is None:
            names.append(f"epoch_{counts.epoch}")
        return next((name for name in names if name not in used), None)

    def _note_name(self, name: str) -> None:
        if name.startswith("epoch_"):
            self._last_epoch = self._counts.epoch

    def _save_or_warn(self, name: str, moment: BoundaryState, manner: Manner, *, is_again: bool = False) -> None:
        names = self._saves.names_of_now
        if self._saves.path_of_now is not None and (name in names or not (is_again or name.startswith("epoch_"))):
            return
        self._saves.tell_failure()
        with self._saves.warning():
            if self._saves.save(name, moment, manner) is None:
                self._leave_out(name)
            else:
                self._note_name(name)

    def _leave_out(self, name: str) -> None:
        """Another save is under way, and this one does not wait for it."""
        if self.options.when_saving == "error":
            raise CheckpointError(
                f"{name} is due while {self._saves.path} is still being saved; save less often, or wait for it with "
                'when_saving="wait", or leave saves out with "skip"'
            )
        self._num_skipped += 1
        self._left_out = self._counts.global_step, name
        if self._state.rank == 0:
            _logger.warning(
                "%s is not saved, since %s is still being saved (%d left out so far)",
                name,
                self._saves.path,
                self._num_skipped,
            )

    def _tell_of_repeated_epoch(self, name: str) -> None:
        if self._state.rank == 0 and not self._has_told_of_epochs:
            _logger.warning(
                "%s holds a checkpoint already, of an epoch that had this number before. The step names this one's "
                "instead, and those of all epochs to come that repeat a number; begin with trainer.start_epoch, and go "
                "on counting",
                name,
            )
        self._has_told_of_epochs = True

    # ---- going on from a checkpoint ----

    def resume(self, take_up: Callable[[Mapping[str, Any]], None]) -> bool:
        """Take the job's folder, and go on from its newest checkpoint, unless that is never to be done."""
        with self._pulse.during(Activity.RESUMING):
            self._job.run.claim()
        return self.options.resume != "never" and self.load(take_up)

    def load(self, take_up: Callable[[Mapping[str, Any]], None]) -> bool:
        """Go on from the newest checkpoint, if there is one; ``take_up`` is given its config."""
        self._due = None
        with self._pulse.during(Activity.RESUMING):
            resumed = self._resuming.load(take_up)
        if resumed is not None:
            self._saves.note(resumed.path)
            self._last_epoch = self._counts.epoch
        return resumed is not None

    def load_earlier(
        self, step: int | None, *, skips: bool, is_torn: bool, more: str, on_begin: Callable[[], None]
    ) -> Resumed:
        """Load an earlier checkpoint, as ``Resuming.load_earlier`` does; ``go_back`` comes next."""
        self._due = None
        self._job.live.drop_held()
        self._saves.settle()
        with self._pulse.during(Activity.RESUMING):
            return self._resuming.load_earlier(step, skips=skips, is_torn=is_torn, more=more, on_begin=on_begin)

    def go_back(self, resumed: Resumed, in_force: ElasticConfig, *, skips: bool) -> None:
        """Go on from what was loaded, under the config ``in_force``."""
        self._resuming.go_back(resumed, in_force, skips=skips)
        self._saves.go_back()
        self._last_epoch = self._counts.epoch


def checkpoints_for(
    state: TrainingState,
    follower: ConfigFollower,
    startup: Mapping[str, object],
    asked: CheckpointRequest,
    *,
    launched: Launched,
) -> Checkpoints | None:
    """The checkpoints that a trainer's arguments ask for; None where it keeps none. All ranks call this.

    RanksDisagreeError where they were given different arguments: some would save, and wait for the others.
    """
    ranks, options = follower.ranks, asked.options
    answers = [
        data.decode() for data in ranks.gather(asked.to_compare().encode(), "comparing what is said of checkpoints")
    ]
    if len(set(answers)) > 1:
        told = "; ".join(f"rank {rank}: {answer}" for rank, answer in enumerate(answers))
        raise RanksDisagreeError(f"the ranks were told different things of checkpoints ({told}); give all the same")
    if asked.storage is None:
        return None
    job_checkpoints = JobCheckpoints(
        asked.storage,
        asked.job,
        ranks,
        launched=launched,
        storage_seconds=follower.settings.timeout_seconds / 2,
        retention=Retention(keep_last=options.keep_last, keep_every=options.keep_every),
        num_copies=num_copies(in_background=options.save_in_background, keep_previous=options.keep_previous),
    )
    return Checkpoints(
        job_checkpoints, state, startup=startup, interval=asked.interval, options=options, pulse=follower.pulse
    )
