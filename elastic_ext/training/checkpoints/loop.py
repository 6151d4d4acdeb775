"""Saving: where in a training's loop checkpoints are begun, what waits for them, and how a signal ends training.

When a checkpoint is due, and what is in it, is in checkpoints.py; how signals are heard, in signals.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import NoReturn

from elastic_ext.config.agreement import Boundary
from elastic_ext.config.follower import ConfigFollower
from elastic_ext.errors import CheckpointError, CheckpointExists, CheckpointFenced, in_words
from elastic_ext.records.metrics import CAN_GO_ON, TOLD_TO_END
from elastic_ext.training.steps.steps import Steps

from .checkpoints import Checkpoints
from .signals import EXIT_STATUS, Leaving
from .state import BoundaryState

__all__ = ["Saving"]

_logger = logging.getLogger(__name__)


class Saving:
    """Saves checkpoints at the right moments of a rank's loop, from the start of a session to its end."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        follower: ConfigFollower,
        steps: Steps,
        *,
        on_leave: Callable[[], None],
    ) -> None:
        self.checkpoints = checkpoints
        self._follower = follower
        self._steps = steps
        self._on_leave = on_leave
        self._save_at = math.inf  # the next global step with something to save
        self._try_at = math.inf  # the first that training takes here, after which there is all that is saved
        self._leaving = self._listening() if checkpoints.options.save_on_signals else None
        self._leaves_at: BoundaryState | None = None  # of the boundary at which that was agreed on
        self._copies_at: BoundaryState | None = None
        self._is_fenced = False  # optimizers wait for a checkpoint that is being copied

    def start(self) -> None:
        """Begin to save checkpoints as they fall due, and to end training with one at a signal."""
        self.plan()
        self._try_at = self._follower.step + 1
        self._follower.on_change("checkpoint", lambda old, new: None, self.checkpoints.check)
        if self._leaving is not None:
            self._leaving.start()

    def plan(self) -> None:
        """Set the next step with a checkpoint from the config in force; on all ranks alike."""
        self._save_at = self.checkpoints.next_due(self._follower.config)
        self.checkpoints.make_ready()

    def go_back(self) -> None:
        """Plan saves anew after training went back, and copy its state in case it is told to end; with all ranks."""
        self.plan()
        if self._leaving is not None:
            self.checkpoints.held.copy_if_on()

    def pass_boundary(self, step: int, boundary: Boundary | None) -> None:
        """Note, after a step, what to save before the next one; ``boundary`` is None where nothing was agreed."""
        if self._is_fenced:
            self._take_down_fence()
        if step >= self._try_at:
            self._try_at = math.inf
            self.checkpoints.try_out_stepped()
        is_due, is_asked_for = step >= self._save_at, False
        if boundary is not None:
            self.plan()
            self.checkpoints.tell_of_no_epoch()
            is_asked_for = boundary.save
            if self._leaving is not None:
                self._note_copy(boundary)
            if boundary.leave and self._leaving is not None:
                self._leaves_at = self.checkpoints.moment()
                self._steps.do_first(self._leave)
                return
        if is_due or is_asked_for:
            self.plan()
            self.checkpoints.note_due(is_asked_for=is_asked_for)
            self._steps.do_first(self.begin_due_in_step)

    def _note_copy(self, boundary: Boundary) -> None:
        """Have the training state copied before the next step, if the first rank has found that it is time to."""
        if boundary.copy:
            self._copies_at = self.checkpoints.moment()
            self._steps.do_first(self._copy)
        elif self._follower.ranks.rank == 0 and self.checkpoints.held.is_wanted():
            self._follower.request_copy()

    def _copy(self) -> None:
        moment, self._copies_at = self._copies_at, None
        if moment is not None:  # and the epoch has not ended instead
            self.checkpoints.held.copy(moment)

    def begin_due(self) -> None:
        """Save the checkpoint that is due, or save and exit if a rank was told to; between steps, on all ranks."""
        if self._leaves_at is not None:
            self._leave()
        self.checkpoints.begin_due()

    def end_epoch(self, *, is_over: bool) -> None:
        """Keep the state of a checkpoint that is due as a loop over the data ends; ``is_over`` unless left early.

        Where none is due, the present state is copied, should training be told to end before the next step. What the
        loop does from here on is within no step: so staging ends here, before the loop changes anything.
        """
        checkpoints = self.checkpoints
        checkpoints.fence()
        checkpoints.note_epoch(is_over=is_over)
        self._copies_at = None
        if self._leaving is None:
            checkpoints.keep_due(by_copy=self._follower.ranks.world_size == 1)
            return
        is_leaving = self._follower.is_leaving  # not after the first step of the next: most loaders begin that anew
        if self._leaves_at is not None or is_leaving:
            if is_over or self._leaves_at is None:  # which of many loaders is known only here
                self._leaves_at = checkpoints.moment(is_between=is_over)
            self._leave()
        checkpoints.keep_due(by_copy=True)
        if not checkpoints.is_due:
            checkpoints.held.hold(is_between=is_over)

    def give_up_due(self, *, is_well: bool) -> None:
        """Save or give up the checkpoint that is due, as training ends between two steps without the other ranks.

        Unless training ends well (``is_well``) the loop's work after the step may be half done.
        """
        checkpoints = self.checkpoints
        if not checkpoints.is_due or self._steps.torn is not None:
            return
        if self._follower.ranks.world_size == 1 and is_well:
            checkpoints.begin_due()
        elif checkpoints.is_due_between:
            path = checkpoints.held.write()
            if path is not None:
                _logger.info("%s is written as it was when the epoch ended", path)
        else:
            _logger.warning(
                "the checkpoint that was due is not saved: training ended before the loop was done with the step"
            )

    def leave_failed(self, error: BaseException) -> None:
        """Save the newest copy where training was told to end and then failed with ``error``."""
        is_asked = self._leaving is not None and self._leaving.is_asked
        if is_asked and isinstance(error, Exception) and self.checkpoints.held.has_newest():
            assert self._leaving is not None
            _logger.warning("training was told to end, and came to this: %s", in_words(error))
            self._leaving.go_from_memory()

    def end(self) -> None:
        """Finish saving, as training has ended well on all ranks; where one was told to end, all exit."""
        self.checkpoints.end()
        if self._leaving is not None:
            asked = self._follower.ranks.sum([int(self._leaving.is_asked)], "ending")
            if asked[0] > 0:
                self._leave()

    def fence(self) -> None:
        """Wait until staging is done, so that parameters and optimizer state may change."""
        self.checkpoints.fence()

    def stop(self) -> None:
        """Give the signals back to their earlier handlers, and wait until staging is done."""
        if self._leaving is not None:
            self._leaving.stop()
        self._take_down_fence()

    def _listening(self) -> Leaving | None:
        """The listener for signals; None where ranks have no board to tell each other on."""
        board = self._follower.ranks.board
        return None if board is None else Leaving(board, self, seconds=self._follower.settings.shutdown_seconds)

    # ---- what the thread asks that listens for signals ----

    def request_leave(self) -> None:
        self._follower.request_leave()

    def can_write(self) -> bool:
        return self.checkpoints.held.has_newest()

    def has_some(self) -> bool:
        return self.checkpoints.held.has_some()

    def has_nothing(self) -> bool:
        return self._steps.has_not_begun and not self._steps.is_inside

    def write_newest(self, seconds: float) -> str:
        step, words = self.checkpoints.held.write_newest(seconds)
        self._tell_left(step, words)
        return words

    def write_with_others(self) -> None:
        self.checkpoints.held.write_with_others()

    # ---- saving as a step begins, and leaving ----

    def begin_due_in_step(self) -> None:
        """Save the checkpoint that is due as a step begins; optimizers wait until it is staged."""
        self.checkpoints.begin_due(in_step=True)
        if self.checkpoints.is_copying:
            self._is_fenced = True
            self._steps.fence(self.fence)

    def _take_down_fence(self) -> None:
        self.fence()
        self._is_fenced = False
        self._steps.fence(None)

    def _leave(self) -> NoReturn:
        """Save and exit, on all ranks between the same two steps, since some rank was told to end."""
        assert self._leaving is not None
        self._on_leave()
        ranks = self._follower.ranks
        is_claimed = ranks.rank == 0 and self._leaving.claim()
        if ranks.sum([int(is_claimed)], "leaving")[0] == 0:
            self._leaving.wait()
        elif self._steps.torn is None:
            is_saved, words = self._save()
            _logger.info("%s, and training ends", words)
            self._tell_left(self.checkpoints.step if is_saved else None, words)
        raise SystemExit(EXIT_STATUS)

    def _tell_left(self, step: int | None, words: str) -> None:
        """Report that training was told to end, and from which ``step`` it can go on; None where from none."""
        now = self.checkpoints.step
        kind, how = (TOLD_TO_END, f"at step {now}") if step is None else (CAN_GO_ON, f"and can go on from step {step}")
        text = f"training was told to end, {how}: {words}"
        self._follower.reports.tell(kind, step=now if step is None else step, text=text, details={})

    def _save(self) -> tuple[bool, str]:
        """Save before exiting, with a second try; whether a run can go on from this step, and the outcome in words."""
        for is_last in (False, True):
            try:
                return True, f"{self.checkpoints.save_now(self._leaves_at)} is saved"
            except CheckpointExists as error:
                return True, f"nothing is saved again ({error})"
            except CheckpointError as error:
                if is_last or isinstance(error, CheckpointFenced):
                    _logger.error("nothing newer is saved: %s", error)
                    return False, f"nothing newer is saved ({error})"
                _logger.warning("%s; once more", error)
        raise AssertionError
