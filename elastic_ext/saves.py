"""Saves: a training's saves, one after another: what each holds, and what becomes of it.

When there is one is in checkpoints.py. How it comes to lie in files is fsdp/checkpoint's affair.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from .errors import CheckpointError, CheckpointFenced
from .fsdp.checkpoint.job import JobCheckpoints
from .fsdp.checkpoint.saving.async_saver import Manner
from .fsdp.checkpoint.saving.collect import SaveRequest, ToSave
from .ranks.heartbeat import Activity, Pulse
from .training_state import Moment, TrainingState

__all__ = ["Saves"]

_logger = logging.getLogger(__name__)


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

    def moment(self, *, is_between: bool = False) -> Moment:
        """What belongs to now: a loader's position, for one, which may take a while to be told.

        ``is_between`` is as ``TrainingState.moment`` takes it.
        """
        with self._pulse.during(Activity.SAVING):
            return self._state.moment(is_between=is_between)

    def save(self, name: str, moment: Moment, manner: Manner) -> Path | None:
        """Begin to save, where that goes on while training does; else save. None where another save is under way."""
        if not self._job.live.can_save:
            return self.save_and_wait(name, moment)
        self._pulse.note_save()
        with self._pulse.during(Activity.SAVING):
            path = self._job.save_live(self._request(name, moment, overlaps=manner.overlaps), manner)
        if path is not None and manner.starts:
            self.note(path)
        return path

    def save_and_wait(self, name: str, moment: Moment) -> Path:
        """Save while training waits."""
        self._pulse.note_save()
        self.settle()
        with self._pulse.during(Activity.SAVING):
            path = self._job.save(self._request(name, moment))
        self.note(path)
        return path

    def _request(self, name: str, moment: Moment, *, overlaps: bool = False) -> SaveRequest:
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
