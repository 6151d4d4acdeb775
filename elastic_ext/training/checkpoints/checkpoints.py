"""A trainer's checkpoints: when one is due, what becomes of its save, and which one a run resumes from.

What goes into one is in state.py, where in the loop saves begin in loop.py. How a checkpoint comes to lie in files, and
back, is fsdp/checkpoint's affair.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.follower import ConfigFollower
from elastic_ext.errors import CheckpointError, CheckpointExists, CheckpointFenced, RanksDisagreeError, RanksError
from elastic_ext.fsdp.checkpoint.folder.listing import Retention
from elastic_ext.fsdp.checkpoint.job import JobCheckpoints, Launched
from elastic_ext.fsdp.checkpoint.loading.source import Opened
from elastic_ext.fsdp.checkpoint.saving.collect import SaveRequest, ToSave
from elastic_ext.fsdp.checkpoint.saving.saver import AsyncSaveMode
from elastic_ext.fsdp.checkpoint.saving.staging import num_copies
from elastic_ext.ranks.heartbeat import Activity, Heartbeat
from elastic_ext.ranks.world import World
from elastic_ext.training.options import CheckpointInterval, CheckpointOptions

from .state import PASSES_BY_ITSELF, BoundaryState, Resumed, TrainingState

if TYPE_CHECKING:
    from elastic_ext.training.steps.steps import Steps

__all__ = ["CheckpointRequest", "Checkpoints", "checkpoints_for"]

_logger = logging.getLogger(__name__)

_CANNOT_HOLD = (
    "checkpoints cannot hold what the optimizers have made in the first step: {}. Use an optimizer whose state is "
    "plain tensors, as torch.optim's are, or have none saved: give checkpoint_interval=CheckpointInterval(), and leave "
    "checkpoint out of the config"
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Due:
    """A checkpoint that is due, and whose save has not begun."""

    moment: BoundaryState
    """The counters, config, random states and position at the boundary, or the end of the epoch, where it is due."""
    is_asked_for: bool = False
    """Whether somebody has asked for the checkpoint, so that it waits for another save."""
    is_of_epoch: bool = False
    """Whether the checkpoint is due because an epoch has ended."""
    is_between: bool = False
    """Whether the save begins when the loop has done what it does between two epochs."""
    marks: Sequence[object] | None = None
    """``TrainingState.marks`` when the checkpoint was saved before its time; None where it was not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRequest:
    """A trainer's arguments about its checkpoints: where, for which job, how often, and the options."""

    storage: Path | None
    """The folder of all jobs; None to keep no checkpoints."""
    job: str | None
    interval: CheckpointInterval
    options: CheckpointOptions

    def to_compare(self) -> str:
        """The arguments as text, which ranks compare: it is the same where they were given the same."""
        own = {"shared_storage_path": self.storage, "job": self.job, "checkpoint_interval": self.interval}
        return json.dumps({name: str(value) for name, value in (own | asdict(self.options)).items()})


class Checkpoints:
    """One training's checkpoints on this rank: when one is due, its save, its failure, and going on from one.

    One class, though a long one: a save that is due, under way or failed decides what the next call of any of these
    does.
    """

    def __init__(
        self,
        job: JobCheckpoints,
        state: TrainingState,
        *,
        startup: Mapping[str, object],
        interval: CheckpointInterval,
        options: CheckpointOptions,
        heartbeat: Heartbeat,
    ) -> None:
        self.job = job
        """The job's checkpoints, of which these are this training's."""
        self.path: Path | None = None
        """The folder of the last checkpoint that exists or is being saved."""
        self.saved_step: int | None = None
        """The global step of ``path``."""
        self._state = state
        self._counts = state.counts
        self._heartbeat = heartbeat  # where it is noted that training waits for storage
        self._warns = options.when_save_fails == "warn"  # of a save that fails, instead of raising
        self._names_of_now: set[str] = set()  # of all checkpoints that this run has saved of the same step as ``path``
        self._back_at: int | None = None  # the global step that training went back to last
        self._failure: CheckpointError | None = None  # of a save, on all ranks, that nobody was told of so far
        self._given = interval
        self._interval = self._given
        self.options = options
        self._startup = startup  # the config values that the script gives
        self._falls_back = options.resume != "strict"  # a damaged checkpoint is passed over for the one before it
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
        """Note that a checkpoint is due at this boundary; its save begins when the loop has done with the step.

        One that somebody has asked for waits for another that is under way, whatever ``when_saving`` says.
        """
        self._due = _Due(moment=self.moment(), is_asked_for=is_asked_for)

    def note_epoch(self, *, is_over: bool) -> None:
        """Note that an epoch's loop has ended or was left: a checkpoint due now has what the loop does until the next.

        The save begins there, and ``keep_due`` has the state survive if training ends before.
        """
        number = self._counts.epoch_to_resume + (not is_over)
        is_of_epoch = self._interval.should_save(current_epoch=number)
        if self._due is None and not is_of_epoch:
            return
        self._due = _Due(
            moment=self.moment(is_between=is_over),
            is_asked_for=self._due is not None and self._due.is_asked_for,
            is_of_epoch=is_of_epoch,
            is_between=True,
        )

    def keep_due(self, *, by_copy: bool) -> bool:
        """Keep the state of a checkpoint due between two epochs, should training end before its save; with all ranks.

        The state is copied in memory where threads of all ranks can write the copy (``by_copy``); gives whether it was.
        Else it is saved now, and once more where anything has changed until its save would begin.
        """
        due = self._due
        if due is None or not due.is_between or self.path_of_now is not None:
            return False
        name, mode = self._name_of(due), self._mode(waits=due.is_asked_for)
        if by_copy and self.job.saver.can_save:
            with self._warning():
                self.save(name, due.moment, replace(mode, starts=False))
                return True
        else:
            self._save_or_warn(name, due.moment, mode)
            self._note_saved(due)
        return False

    def _note_saved(self, due: _Due) -> None:
        """Note, with marks of the present state, that the checkpoint that is due was saved before its time."""
        self._due = replace(due, marks=self._state.marks()) if self.path_of_now is not None else due

    def _has_changed(self, due: _Due) -> bool:
        """Whether the training state has changed on any rank since ``due`` was saved."""
        changed = [int(due.marks != self._state.marks())]
        return self.job.ranks.sum(changed, "seeing whether anything has changed")[0] > 0

    def tell_of_no_epoch(self) -> None:
        """Warn once of a step outside of ``trainer.epoch()`` where checkpoints are saved by epochs; after a step."""
        if self._interval.epochs is None or self._counts.is_in_epoch or self._has_told_of_no_epoch:
            return
        self._has_told_of_no_epoch = True
        if self._state.rank == 0:
            _logger.warning(
                "a step was taken outside of `with trainer.epoch():`, and checkpoints are saved by epochs: none falls "
                "due where no epoch ends, and trainer.reset() ends none; put `with trainer.epoch():` around the loop "
                "over the data, or give checkpoint_interval=CheckpointInterval(steps=...) to have checkpoints saved by "
                "steps, or CheckpointInterval() to have none saved by itself"
            )

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint is due, and its save has not begun."""
        return self._due is not None

    @property
    def is_due_between(self) -> bool:
        """Whether a checkpoint is due whose save begins when the loop has done its work between two epochs."""
        return self._due is not None and self._due.is_between

    def begin_due(self, *, in_step: bool = False) -> None:
        """Save the checkpoint that is due, if any; before the next step or epoch, or the end of training.

        As a step begins (``in_step``) staging may overlap with the step's passes, until ``fence``.
        """
        due, self._due = self._due, None
        if due is None:
            return
        moment = self._moment_of(due, in_step=in_step)
        mode = self._mode(waits=due.is_asked_for, overlaps=in_step and self._may_overlap())
        try:
            if due.marks is None:
                self._save_or_warn(self._name_of(due), moment, mode)
            elif self._has_changed(due):
                self._save_again(moment, mode)
        except RanksError:  # it is still due to the ranks that are left, where some are lost
            self._due = due
            raise

    @property
    def is_saved_now(self) -> bool:
        """Whether this run has a checkpoint of the present step, as the first rank knows, also of a save given up."""
        newest = self.job.run.newest
        return newest is not None and newest.global_step == self._counts.global_step

    def forget_due(self) -> bool:
        """Forget the checkpoint that is due; gives whether one was."""
        due, self._due = self._due, None
        return due is not None

    def note_saved(self, told: Mapping[str, Any]) -> None:
        """Take the checkpoint that was saved last for the one that another rank tells of, by ``tell``."""
        self.path = None if told["path"] is None else Path(told["path"])
        self.saved_step, self._names_of_now = told["saved_step"], set(told["names_of_now"])

    def _moment_of(self, due: _Due, *, in_step: bool) -> BoundaryState:
        """The counters, random states and position to save: of the boundary, or of now for one between two epochs.

        Where a step begins instead, the loop over its data has drawn random numbers, and will do so again.
        """
        if not due.is_between:
            return due.moment
        now = self.moment()
        return replace(now, random=due.moment.random) if in_step else now

    def _may_overlap(self) -> bool:
        """Whether staging may overlap with passes; asked for each save, since users may add hooks after prepare()."""
        why_not = self._state.why_not_overlap(self.options.overlap_saving)
        how = "overlaps" if why_not is None else f"does not overlap ({why_not})"
        _logger.debug("staging %s with the passes of the next step", how)
        return why_not is None

    def fence(self) -> None:
        """Wait until staging is done, so that parameters and optimizer state may change."""
        with self._heartbeat.during(Activity.SAVING):
            self.job.saver.finish_staging()

    def moment(self, *, is_between: bool = False) -> BoundaryState:
        """The counters, config, random states and loader position of now; asking the loader may take a while.

        ``is_between`` is as ``TrainingState.moment`` takes it.
        """
        with self._heartbeat.during(Activity.SAVING):
            return self._state.moment(is_between=is_between)

    def save_now(self, moment: BoundaryState | None = None) -> Path:
        """Save a checkpoint on all ranks, and wait for it, unless one holds just this state; gives its folder.

        Tensors are those of now; the rest of the state is that of now, or of ``moment``.

        CheckpointExists where this step has one, and something has changed since.
        """
        due, path = self._due, self.path_of_now
        if path is None:
            path = self._save_and_wait(self._name_of(due), moment or self.moment())
            self._note_name(path.name)
        else:
            change = self.job.change_since(path, self._state.collect, PASSES_BY_ITSELF)
            if change is None:
                self._due = due if due is not None and due.is_between and moment is None else None
                return path
            free = self._free_name() if due is not None and due.marks is not None else None
            try:
                path = self._save_and_wait(free or f"step_{self._counts.global_step}", moment or self.moment())
            except CheckpointExists as error:
                raise CheckpointExists(f"{error}; it does not have {change} as it is now") from None
        self._due = None  # it is this very step
        if due is not None and due.is_between and moment is None:  # and what the loop does there yet belongs to it
            self._note_saved(due)
        return path

    def try_out(self) -> None:
        """Raise now if a part of the training state could not be saved later; with all ranks."""
        self.job.try_out(self._state.collect)

    def try_out_stepped(self) -> None:
        """Raise after the first step if the state that optimizers have made could not be saved; with all ranks.

        A warning instead where no checkpoint falls due by itself, or where a failed save is to be a warning.
        """
        try:
            self.job.try_out(self._state.collect)
        except CheckpointError as error:
            self._why_never = _CANNOT_HOLD.format(error)
            is_planned = self._interval.steps is not None or self._interval.epochs is not None
            if is_planned and not self._warns:
                raise CheckpointError(self._why_never) from None
            if self._state.rank == 0:
                _logger.warning("%s; training goes on without", self._why_never)

    def check(self, new: ElasticConfig) -> str | None:
        """Why no checkpoint can be saved though ``new`` asks for some; None where one can, or failures are warnings."""
        wanted = new.checkpoint
        is_wanted = wanted.steps is not None or wanted.epochs is not None or wanted.now
        return self._why_never if is_wanted and not self._warns else None

    @property
    def interval_in_words(self) -> str:
        """How often checkpoints fall due by themselves, by the config in force, in words."""
        for number, noun in ((self._interval.steps, "step"), (self._interval.epochs, "epoch")):
            if number is not None:
                return f"every {noun}" if number == 1 else f"every {number} {noun}s"
        return "none by itself"

    @property
    def has_interval(self) -> bool:
        """Whether checkpoints fall due by themselves."""
        return bool(self._interval.steps or self._interval.epochs)

    def why_not_idle(self, seconds: float) -> str:
        """What has to end before the ranks may change, and does not end within ``seconds``, in words; on this rank."""
        if self._due is not None:
            return "a checkpoint is due at this step"
        return "" if self.job.saver.wait_a_while(seconds) else "a checkpoint is being written"

    def take_world(self, world: World) -> None:
        """Save with the ranks of ``world`` from here on; all of them call this, and no save is under way."""
        self.job.saver.take_world(world)
        self.job.run.take_world(world)

    def tell(self) -> dict[str, Any]:
        """Which checkpoints there are, as JSON for a rank that joins."""
        return {
            "run": self.job.run.tell(),
            "path": None if self.path is None else str(self.path),
            "saved_step": self.saved_step,
            "names_of_now": sorted(self._names_of_now),
            "back_at": self._back_at,
            "last_epoch": self._last_epoch,
            "left_out": self._left_out,
            "why_never": self._why_never,
        }

    def join(self, told: Mapping[str, Any]) -> None:
        """Go on with the checkpoints of the ranks that this one has joined."""
        self.job.run.join(told["run"])
        self.path = None if told["path"] is None else Path(told["path"])
        self.saved_step, self._back_at, self._last_epoch = told["saved_step"], told["back_at"], told["last_epoch"]
        self._names_of_now = set(told["names_of_now"])
        self._left_out = None if told["left_out"] is None else (told["left_out"][0], told["left_out"][1])
        self._why_never = told["why_never"]

    def make_ready(self) -> None:
        """Allocate the memory for async saves, on a thread; with all ranks."""
        with self._heartbeat.during(Activity.SAVING):
            self.job.saver.make_ready(ToSave(self._state.collect))

    def end(self) -> None:
        """Finish saving, as training has ended well on all ranks: wait for the save under way, save what is missing.

        That is the last step, where checkpoints fall due by themselves; a checkpoint that was left out there, since
        another save was under way; or the state after training went back, where nothing was saved since.
        """
        self.finish()
        left_out_at, name = self._left_out or (None, "")
        is_left_out = left_out_at == self._counts.global_step
        is_unsaved = self.path_of_now is None and self.has_interval and self._counts.num_boundaries > 0
        is_back_unsaved = self._back_at is not None and self.path is None
        if is_left_out or is_unsaved or is_back_unsaved:
            name = name if is_left_out else f"step_{self._counts.global_step}"
            with contextlib.suppress(CheckpointExists):  # what was held was written just now, at a signal
                self._save_or_warn(name, self.moment(), self._mode(waits=True))
                self.finish()

    def close(self) -> None:
        """Give up the job's folder, so that another run of the job can have it."""
        self.job.close(hurries=sys.exc_info()[1] is not None)

    def _mode(self, *, waits: bool = False, overlaps: bool = False) -> AsyncSaveMode:
        """How to save what is due: whether it waits for another save, and whether staging overlaps with passes."""
        waits = waits or self.options.when_saving == "wait"
        return AsyncSaveMode(waits=waits, overlaps=overlaps, on_failed=self._note_failure)

    def _name_of(self, due: _Due | None) -> str:
        """The checkpoint's name: the number of an epoch that is over, unless another has had that; else the step."""
        counts = self._counts
        if due is not None and due.is_of_epoch and counts.unfinished_epoch is None:
            name = f"epoch_{counts.epoch}"
            if counts.epoch > self._last_epoch:
                return name
            self._tell_of_repeated_epoch(name)
        return f"step_{counts.global_step}"

    def _save_again(self, moment: BoundaryState, mode: AsyncSaveMode) -> None:
        """Save once more under another name, since the state has changed after it was saved as an epoch ended."""
        name = self._free_name()
        if name is not None:
            self._save_or_warn(name, moment, mode, is_again=True)
        elif self._state.rank == 0:
            _logger.warning(
                "%s does not have what the loop did after it was saved, and step %d has no other name to save that by",
                self.path,
                self._counts.global_step,
            )

    def _free_name(self) -> str | None:
        """A name for another checkpoint of this step: the step's, or else that of the epoch that has ended."""
        counts, used = self._counts, self._names_of_now
        names = [f"step_{counts.global_step}"]
        if counts.epoch > self._last_epoch and counts.unfinished_epoch is None:
            names.append(f"epoch_{counts.epoch}")
        return next((name for name in names if name not in used), None)

    def _note_name(self, name: str) -> None:
        if name.startswith("epoch_"):
            self._last_epoch = self._counts.epoch

    def _save_or_warn(self, name: str, moment: BoundaryState, mode: AsyncSaveMode, *, is_again: bool = False) -> None:
        if self.path_of_now is not None and (name in self._names_of_now or not (is_again or name.startswith("epoch_"))):
            return
        self._tell_failure()
        with self._warning():
            if self.save(name, moment, mode) is None:
                self._leave_out(name)
            else:
                self._note_name(name)

    def _leave_out(self, name: str) -> None:
        """Raise or warn that a checkpoint is not saved, since another save is under way and is not waited for."""
        if self.options.when_saving == "error":
            raise CheckpointError(
                f"{name} is due while {self.path} is still being saved; save less often, or wait for it with "
                'when_saving="wait", or leave saves out with "skip"'
            )
        self._num_skipped += 1
        self._left_out = self._counts.global_step, name
        if self._state.rank == 0:
            _logger.warning(
                "%s is not saved, since %s is still being saved (%d left out so far)",
                name,
                self.path,
                self._num_skipped,
            )

    def _tell_of_repeated_epoch(self, name: str) -> None:
        if self._state.rank == 0 and not self._has_told_of_epochs:
            _logger.warning(
                "%s holds a checkpoint already, of an epoch that had this number before. The new one is named by its "
                "step instead, as are those of all later epochs that repeat a number; begin with trainer.start_epoch, "
                "and go on counting",
                name,
            )
        self._has_told_of_epochs = True

    # ---- one save after another ----

    @property
    def path_of_now(self) -> Path | None:
        """The folder of a checkpoint of the present global step; None where there is none."""
        return self.path if self.saved_step == self._counts.global_step else None

    def save(self, name: str, moment: BoundaryState, mode: AsyncSaveMode) -> Path | None:
        """Begin an async save where that is possible, else save while training waits; gives the checkpoint's folder.

        None where another save is under way, and ``mode`` does not wait for it.
        """
        if not self.job.saver.can_save:
            return self._save_and_wait(name, moment)
        self._heartbeat.note_save()
        with self._heartbeat.during(Activity.SAVING):
            path = self.job.save_async(self._request(name, moment, overlaps=mode.overlaps), mode)
        if path is not None and mode.starts:
            self._note(path)
        return path

    def _save_and_wait(self, name: str, moment: BoundaryState) -> Path:
        """Save a checkpoint while training waits; gives its folder."""
        self._heartbeat.note_save()
        self.finish()
        with self._heartbeat.during(Activity.SAVING):
            path = self.job.save(self._request(name, moment))
        self._note(path)
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

    def _note(self, path: Path) -> None:
        """Note that a checkpoint of the present global step exists or is being saved."""
        if self.saved_step != self._counts.global_step:
            self._names_of_now.clear()
        self.saved_step, self.path = self._counts.global_step, path
        self._names_of_now.add(path.name)

    def _note_failure(self, error: CheckpointError) -> None:
        """Forget the checkpoint whose save failed, and raise the failure or warn of it."""
        self.saved_step = self.path = None
        with self._warning():
            raise error

    def keep_failure(self, error: CheckpointError) -> None:
        """Forget the checkpoint whose save failed, and keep the failure for ``_tell_failure``."""
        self.saved_step = self.path = None
        self._failure = error

    def _tell_failure(self) -> None:
        """Raise the failure that ``keep_failure`` kept, or warn of it, if there is one."""
        error, self._failure = self._failure, None
        if error is not None:
            with self._warning():
                raise error

    def finish(self, *, drops_held: bool = False) -> None:
        """Wait for the save under way, if there is one, and raise its failure or warn of it; with all ranks.

        With ``drops_held`` a copy in memory that was not written is forgotten.
        """
        self._tell_failure()
        try:
            with self._heartbeat.during(Activity.SAVING):
                self.job.saver.settle()
        except CheckpointError as error:
            self._note_failure(error)
        if drops_held:
            self.job.saver.drop_held()

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Turn a CheckpointError into a warning, where the user allows that; never a CheckpointFenced."""
        try:
            yield
        except CheckpointFenced:
            raise
        except CheckpointError as error:
            if not self._warns:
                raise
            if self._state.rank == 0 and not error.is_in_log:
                _logger.warning("a checkpoint was not saved, and training goes on: %s", error)

    # ---- going on from a checkpoint ----

    def resume(self, take_up: Callable[[Mapping[str, Any]], None]) -> bool:
        """Claim the job's folder, and load its newest checkpoint unless resume is "never"; gives whether it loaded one.

        ``take_up`` is given the checkpoint's config.
        """
        with self._heartbeat.during(Activity.RESUMING):
            self.job.run.claim()
        return self.options.resume != "never" and self.load(take_up)

    def load(self, take_up: Callable[[Mapping[str, Any]], None]) -> bool:
        """Go on from the job's newest checkpoint; gives whether there is one. ``take_up`` is given its config."""
        self._due = None
        with self._heartbeat.during(Activity.RESUMING):
            resumed = self.job.restore(self._state, falls_back=self._falls_back)
            if resumed is None:
                return False
            self._state.let_go()  # before a config comes that spreads the model otherwise
            self._counts.load_state_dict(resumed.state["counts"])
            take_up(resumed.state["config"])
            if self._state.rank == 0:
                _tell_resumed(resumed, self._state, self._startup)
            self._state.take_up(resumed)
        self._note(resumed.path)
        self._last_epoch = self._counts.epoch
        return True

    def load_earlier(self, step: int | None, steps: Steps, *, leaves_epoch: bool, skips: bool) -> Resumed:
        """Load the checkpoint of ``step``, or the newest before the present step; call ``go_back`` next.

        With ``leaves_epoch`` it may be one of another epoch, for which the caller leaves the one under way.
        """
        self._due = None
        self.finish(drops_held=True)
        is_torn, more = steps.torn is not None, ", passing over the samples since" if skips else ""
        if is_torn:
            more += f", after {steps.num_torn} micro-steps of a step that was torn"
        before = self._counts.global_step + is_torn  # what is torn was to come after it
        into = _Earlier(self._state, steps, stays_in_epoch=not (skips or leaves_epoch))
        with self._heartbeat.during(Activity.RESUMING):
            resumed = self.job.restore_earlier(into, step, before=before, more=more, falls_back=self._falls_back)
            self._state.let_go()
        return resumed

    def go_back(self, resumed: Resumed, in_force: ElasticConfig, *, skips: bool) -> str:
        """Go on from the earlier checkpoint that was loaded, under the config ``in_force``; gives that in words.

        Until a newer one is saved a restart undoes that.
        """
        step = self._counts.global_step
        data = self._state.take_up_earlier(resumed, skips=skips)
        text = _gone_back_in_words(resumed, in_force, step=step, data=data)
        if self._state.rank == 0:
            _logger.info("%s", text)
            _tell_of_missing(resumed, self._state)
        self.saved_step = self.path = None
        self._back_at = self._counts.global_step
        self._last_epoch = self._counts.epoch
        return text


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
        data.decode() for data in ranks.gather(asked.to_compare().encode(), "comparing arguments for checkpoints")
    ]
    if len(set(answers)) > 1:
        told = "; ".join(f"rank {rank}: {answer}" for rank, answer in enumerate(answers))
        raise RanksDisagreeError(f"the ranks have different arguments for checkpoints ({told}); give all the same")
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
        job_checkpoints, state, startup=startup, interval=asked.interval, options=options, heartbeat=follower.heartbeat
    )


# --- going on from a checkpoint: what is logged then, and checked before training goes back to one -------------------


def _tell_resumed(resumed: Resumed, state: TrainingState, startup: Mapping[str, object]) -> None:
    """Log what differs from when the checkpoint was saved, and which of the script's own values are unused."""
    commit = resumed.commit
    was = {**commit.about, "torch": commit.versions.get("torch")}
    now = {**state.about(), "torch": torch.__version__}
    differs = [f"{name} {was.get(name)} -> {value}" for name, value in now.items() if was.get(name) != value]
    config = ElasticConfig.from_dict(resumed.state["config"]["config"])
    differs += [
        f"{path} stays {config.get(path)}, the script's is {value}"
        for path, value in startup.items()
        if config.get(path) not in (None, value)
    ]
    differs += resumed.stays
    _logger.log(
        logging.WARNING if differs else logging.INFO,
        "resuming from %s, saved %s at step %d: %s",
        resumed.path,
        commit.saved_at,
        commit.global_step,
        ", ".join(differs) or "nothing has changed since",
    )
    _tell_of_missing(resumed, state)


def _gone_back_in_words(resumed: Resumed, in_force: ElasticConfig, *, step: int, data: str) -> str:
    """That training has gone back from ``step``, with what becomes of the ``data``, under the config ``in_force``."""
    then = ElasticConfig.from_dict(resumed.state["config"]["config"]).label
    of_config = "" if then == in_force.label else f"; {in_force.label} stays in force, it was saved under {then}"
    commit = resumed.commit
    return (
        f"going back from step {step} to {resumed.path}, saved {commit.saved_at} at step {commit.global_step}, {data}"
        f"{of_config}"
    )


def _tell_of_missing(resumed: Resumed, state: TrainingState) -> None:
    why = state.why_incomplete(resumed)
    if why is not None:
        _logger.warning("%s", why)


class _Earlier:
    """A training state that an earlier checkpoint is loaded into while training is under way."""

    def __init__(self, state: TrainingState, steps: Steps, *, stays_in_epoch: bool) -> None:
        """With ``stays_in_epoch`` samples are to come again within the epoch under way."""
        self._state = state
        self._stays_in_epoch = stays_in_epoch
        self._steps = steps

    def check(self, opened: Opened) -> None:
        """Raise where the checkpoint does not fit, or its place in the data cannot be gone back to."""
        why_not = self._state.why_not_replay(opened) if self._stays_in_epoch else None
        if why_not is not None:
            raise CheckpointError(why_not)
        self._state.check(opened)

    def refilled(self, opened: Opened, touched: Collection[str]) -> set[str]:
        """Which of the parts that a damaged checkpoint has ``touched`` loading this one would overwrite wholly."""
        return self._state.refilled(opened, touched)

    def load(self, opened: Opened) -> Resumed:
        """Fill all tensors, as when a run is resumed; until all is done training cannot go on."""
        self._steps.expect_checkpoint()
        return self._state.load(opened)
