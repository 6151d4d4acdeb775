"""Saving: where in a training's loop checkpoints are begun, what waits for them, and how a signal ends training; copies
of the training state, written should it be told to end.

When a checkpoint is due, and what is in it, is in checkpoints.py; how signals are heard, in signals.py.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from elastic_ext.config.agreement import Boundary
from elastic_ext.errors import CheckpointError, CheckpointExists, CheckpointFenced, in_words
from elastic_ext.fsdp.checkpoint.coordination import first_says
from elastic_ext.fsdp.checkpoint.saving.saver import AsyncSaveMode
from elastic_ext.ranks.world import World
from elastic_ext.records.metrics import CAN_GO_ON, TOLD_TO_END

from .checkpoints import Checkpoints
from .signals import EXIT_STATUS, Leaving
from .state import BoundaryState

if TYPE_CHECKING:
    from elastic_ext.training.training import Training

__all__ = ["Saving"]

_logger = logging.getLogger(__name__)

_SPARING = 200  # times as long as copying takes lies between two copies of a kind, which nobody may need


class Saving:
    """Saves checkpoints at the right moments of a rank's loop, from the start of a session to its end."""

    def __init__(self, checkpoints: Checkpoints, training: Training) -> None:
        self.checkpoints = checkpoints
        self._saver = checkpoints.job.saver
        self._follower = training.follower
        checkpoints.job.run.on_commit = training.follower.reports.hasten
        self._steps = training.steps
        self._counts = training.counts
        self._state = training.state
        self._session = training.session
        self._save_at = math.inf  # the next global step with something to save
        self._try_at = math.inf  # the first that training takes here, after which there is all that is saved
        self._leaving = self._listening() if checkpoints.options.save_on_signals else None
        self._leaves_at: BoundaryState | None = None  # of the boundary at which that was agreed on
        self._copies_at: BoundaryState | None = None
        self._is_fenced = False  # optimizers wait for a checkpoint that is being copied
        self._makes_copies = False  # since there is memory for them
        self._held_at = self._copied_at = -math.inf  # when one was made at an epoch's end, and whenever
        self._copy_seconds = 0.0  # that the last ones took
        self._copied_step = 0  # the global step that was copied last

    def start(self) -> None:
        """Begin to save checkpoints as they fall due, and to end training with one at a signal."""
        self.plan()
        self._try_at = self._follower.step + 1
        self._follower.on_change("checkpoint", lambda old, new: None, self.checkpoints.check)
        if self._leaving is not None:
            self._leaving.start()

    def take_world(self, world: World) -> None:
        """Save with the ranks of ``world`` from here on, between two steps; no save is under way.

        These agree on who of them holds the job's folder.
        """
        self.checkpoints.take_world(world)
        board = self._follower.ranks.board
        if self._leaving is not None and board is not None:
            self._leaving.take_world(board)

    def come_to_rest(self) -> None:
        """Save what is due, end all saves and forget held copies, with all ranks, before some of these change."""
        self._take_down_fence()
        self._copies_at = None
        self.checkpoints.begin_due()
        self.checkpoints.finish(drops_held=True)

    def forget_others(self) -> bool:
        """Give up what is being saved or held, without other ranks, as some are lost; gives whether a save is owed."""
        self._take_down_fence()
        self._copies_at = None
        was_given_up = self._saver.forget_others()
        if was_given_up:
            self.checkpoints.saved_step = self.checkpoints.path = None
        is_due = self.checkpoints.forget_due() or self._counts.global_step >= self._save_at
        return is_due or was_given_up

    def note_saved(self, told: Mapping[str, Any]) -> None:
        """Take for saved, and for tried, what another rank of the same run tells of, by ``tell``."""
        self.checkpoints.note_saved(told["checkpoints"])
        self._try_at = math.inf if told["loop"]["try_at"] is None else told["loop"]["try_at"]

    def plan_after_loss(self, *, owes_save: bool) -> None:
        """Plan saves anew once some ranks are lost, with all others; what one of these owed is saved soon."""
        self.plan()
        if owes_save:
            self._steps.do_first(self._save_again)

    def _save_again(self) -> None:
        """Save the state of now as a step begins, with all ranks, once no rank is writing what was given up.

        Not where the first rank finds the checkpoint: it may have come to be before its save was given up.
        """
        ranks, checkpoints = self._follower.ranks, self.checkpoints
        if ranks.sum([int(self._saver.is_ending)], "seeing whether a save that was given up has ended")[0]:
            self._steps.do_first(self._save_again)
            return
        is_there = ranks.broadcast(b"1" if checkpoints.is_saved_now else b"", 0, "seeing what was saved")
        if not is_there:
            checkpoints.note_due(is_asked_for=False)
            self.begin_due_in_step()

    def tell(self) -> dict[str, Any]:
        """Where saving checkpoints is, as JSON for a rank that joins."""
        try_at = None if self._try_at == math.inf else self._try_at
        return {"checkpoints": self.checkpoints.tell(), "loop": {"try_at": try_at, "makes_copies": self._makes_copies}}

    def join(self, told: Mapping[str, Any]) -> None:
        """Save from here on as the ranks do that this one has joined."""
        loop = told["loop"]
        self.checkpoints.join(told["checkpoints"])
        self._try_at = math.inf if loop["try_at"] is None else loop["try_at"]
        self._makes_copies = bool(loop["makes_copies"])
        self.plan()

    def plan(self) -> None:
        """Set the next step with a checkpoint from the config in force; on all ranks alike."""
        self._save_at = self.checkpoints.next_due(self._follower.config)
        if not self._makes_copies and self.checkpoints.has_interval:
            self._makes_copies = True
            self.checkpoints.make_ready()

    def plan_after_rewind(self) -> None:
        """Plan saves anew after training went back, and copy its state in case it is told to end; with all ranks."""
        self.plan()
        if self._leaving is not None and self._makes_copies and self._saver.can_save:
            self._copy()

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
            self._steps.do_first(self._copy_as_agreed)
        elif self._follower.ranks.rank == 0 and self._is_copy_wanted():
            self._follower.agreement.request_copy()

    def _copy_as_agreed(self) -> None:
        moment, self._copies_at = self._copies_at, None
        if moment is not None:  # and the epoch has not ended instead
            self._copy(moment)

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
            self._keep_due(by_copy=self._follower.ranks.world_size == 1)
            return
        # Not after the first step of the next epoch: most loaders begin that anew.
        is_leaving = self._follower.agreement.leaving
        if self._leaves_at is not None or is_leaving:
            if is_over or self._leaves_at is None:  # which of many loaders is known only here
                self._leaves_at = checkpoints.moment(is_between=is_over)
            self._leave()
        self._keep_due(by_copy=True)
        if not checkpoints.is_due:
            self._copy_between(is_between=is_over)

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
            path = self._saver.begin_held()
            if path is not None:
                _logger.info("checkpoint %s is written, with the state that training had as the epoch ended", path)
        else:
            _logger.warning(
                "the checkpoint that was due is not saved: training ended before the loop was done with the step"
            )

    def leave_failed(self, error: BaseException) -> None:
        """Save the newest copy where training was told to end and then failed with ``error``."""
        is_asked = self._leaving is not None and self._leaving.is_asked
        if is_asked and isinstance(error, Exception) and self.can_write():
            assert self._leaving is not None
            _logger.warning("training was told to end, and then failed: %s", in_words(error))
            self._leaving.go_from_memory()

    def end(self) -> None:
        """Finish saving, as training has ended well on all ranks; where one was told to end, all exit."""
        self.checkpoints.end()
        if self._leaving is not None:
            asked = self._follower.ranks.sum([int(self._leaving.is_asked)], "ending training")
            if asked[0] > 0:
                self._leave()

    def stop(self) -> None:
        """Give the signals back to their earlier handlers, and wait until staging is done."""
        if self._leaving is not None:
            self._leaving.stop()
        self._take_down_fence()

    def _listening(self) -> Leaving | None:
        """The listener for signals; None where ranks have no board to tell each other on."""
        board = self._follower.ranks.board
        return None if board is None else Leaving(board, self, seconds=self._follower.settings.shutdown_seconds)

    # ---- copies of the training state, written if training is told to end and no step ends in time ----

    def _keep_due(self, *, by_copy: bool) -> None:
        """Keep the state of a checkpoint due between two epochs, as ``Checkpoints.keep_due`` does."""
        if self.checkpoints.keep_due(by_copy=by_copy):
            self._copied_step = self._counts.global_step
            self._held_at = self._copied_at = time.monotonic()

    def _copy_between(self, *, is_between: bool) -> None:
        """Copy the training state at the end of an epoch; ``is_between`` is as ``TrainingState.moment`` takes it.

        Nothing is copied where that would take up much of the time, nor while something is still being written.
        """
        if not self._makes_copies or not self._saver.can_save:
            return
        if first_says(self._follower.ranks, self._may_copy(self._held_at), "agreeing on a copy"):
            self._copy(self.checkpoints.moment(is_between=is_between))
            self._held_at = time.monotonic()

    def _is_copy_wanted(self) -> bool:
        """Whether it is time for another copy of the training state: it is not saved, and copying takes little time."""
        return self._makes_copies and self._may_copy(self._copied_at)

    def _may_copy(self, since: float) -> bool:
        is_needed = self.checkpoints.path_of_now is None and self._saver.is_free
        return is_needed and time.monotonic() - since > _SPARING * self._copy_seconds

    def _copy(self, moment: BoundaryState | None = None) -> None:
        """Copy the training state, to be written if training is told to end before the next copy; with all ranks.

        Nothing is copied where a checkpoint has this step. That the save before failed is told when the next is due.
        """
        checkpoints = self.checkpoints
        if checkpoints.path_of_now is not None:
            return
        began = time.monotonic()
        name = f"step_{self._counts.global_step}"
        try:
            mode = AsyncSaveMode(waits=False, starts=False, on_failed=checkpoints.keep_failure)
            checkpoints.save(name, moment or checkpoints.moment(), mode)
            self._copied_step = self._counts.global_step
        except CheckpointFenced:
            raise
        except CheckpointError as error:  # nobody has asked for it
            _logger.debug("%s is not copied: %s", name, error)
        self._copied_at = time.monotonic()
        self._copy_seconds = max(self._copied_at - began, self._copy_seconds / 2)

    # ---- what the thread asks that listens for signals ----

    def request_leave(self) -> None:
        self._follower.agreement.request_leave()

    def can_write(self) -> bool:
        return self._saver.is_holding or self.checkpoints.path_of_now is not None

    def has_some(self) -> bool:
        return self._saver.is_holding or self.checkpoints.path is not None

    def has_nothing(self) -> bool:
        return self._steps.has_not_begun and not self._steps.is_inside

    def write_newest(self, seconds: float) -> str:
        step, words = self._write_newest(seconds)
        self._tell_left(step, words)
        return words

    def write_with_others(self) -> None:
        self._saver.follow_others()

    def _write_newest(self, seconds: float) -> tuple[int | None, str]:
        """Have the newest copy written as a checkpoint within ``seconds``, by threads beside the ranks' training.

        Gives the step from which training can go on, None where there is nothing to go on from, and the outcome in
        words.
        """
        checkpoints, step = self.checkpoints, self._counts.global_step
        if not self.has_some():
            if self._counts.num_boundaries == 0:
                return step, "there is nothing to save yet"
            return None, f"nothing was copied so far, and nothing is saved; training has come to step {step}"
        path, path_of_now = self._saver.write_held(seconds), checkpoints.path_of_now
        if path is None and path_of_now is not None:
            return step, f"checkpoint {path_of_now} has this step already"
        if path is None and self._saver.is_idle:
            path = checkpoints.path  # whatever comes next has not begun
        if path is not None:
            of = checkpoints.saved_step if path == checkpoints.path else self._copied_step
            return of, f"{path} is what there is to go on from; training has come to step {step}"
        return None, f"the copy in memory could not be written in time; training has come to step {step}"

    # ---- saving as a step begins, and leaving ----

    def begin_due_in_step(self) -> None:
        """Save the checkpoint that is due as a step begins; optimizers wait until it is staged."""
        self.checkpoints.begin_due(in_step=True)
        if self._saver.is_copying:
            self._is_fenced = True
            self._state.before_change = self.checkpoints.fence

    def _take_down_fence(self) -> None:
        self.checkpoints.fence()
        self._is_fenced = False
        self._state.before_change = None

    def _leave(self) -> NoReturn:
        """Save and exit, on all ranks between the same two steps, since some rank was told to end."""
        assert self._leaving is not None
        self._session.note_leaving()
        ranks = self._follower.ranks
        is_claimed = ranks.rank == 0 and self._leaving.claim()
        if ranks.sum([int(is_claimed)], "ending training at a signal")[0] == 0:
            self._leaving.wait()
        elif self._steps.torn is None:
            is_saved, words = self._save()
            _logger.info("%s, and training ends", words)
            self._tell_left(self._counts.global_step if is_saved else None, words)
        self._follower.write_metrics()  # which tell how far training has come, and of the checkpoint
        raise SystemExit(EXIT_STATUS)

    def _tell_left(self, step: int | None, words: str) -> None:
        """Report that training was told to end, and from which ``step`` it can go on; None where from none."""
        now = self._counts.global_step
        kind, how = (TOLD_TO_END, f"at step {now}") if step is None else (CAN_GO_ON, f"and can go on from step {step}")
        text = f"training was told to end, {how}: {words}"
        self._follower.reports.write_event(kind, step=now if step is None else step, text=text, details={})

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
                _logger.warning("saving failed, and is tried once more: %s", error)
        raise AssertionError
