"""HeldCopies: copies of what there is, to be written if training is told to end and no step ends in time."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

from .errors import CheckpointError, CheckpointFenced
from .fsdp.checkpoint.coordination import first_says
from .fsdp.checkpoint.job import JobCheckpoints
from .fsdp.checkpoint.saving.async_saver import Manner
from .saves import Saves
from .training_state import Moment, TrainingState

__all__ = ["HeldCopies"]

_logger = logging.getLogger(__name__)

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

    def keep(self, name: str, moment: Moment, *, waits: bool) -> None:
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

    def copy(self, moment: Moment | None = None) -> None:
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
