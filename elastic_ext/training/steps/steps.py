"""Steps: one micro-step after another, until a step commits; or is rolled back, and never happened.

What these words mean is said in training/trainer.py. Here is what happens on this rank; how a step is taken back is in
rollback.py, and what all ranks do at a boundary in training/session.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from elastic_ext.errors import ElasticError, StepError, TornStepError
from elastic_ext.torch_private.out_of_memory import advise, is_out_of_memory, refuses_one
from elastic_ext.training.batches import RankStep
from elastic_ext.training.gradients.finite import FiniteGradients
from elastic_ext.training.optimizers.optimizer import NO_GRADIENTS_HERE
from elastic_ext.training.remarks import next_look

from .loop_checks import FEWER_BATCHES, LoopChecks, Rhythm
from .oom_guard import StepFailure
from .rollback import Retry, Rollback, Snapshot
from .state import TRANSITIONS, StepEvent, StepPhase

if TYPE_CHECKING:
    from elastic_ext.training.training import Training

__all__ = ["Steps"]

_logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


# --- one micro-step after another, until a step commits; or is rolled back, and never happened -----------------------

_INSIDE = "trainer.step() was entered inside another `with trainer.step():`; leave that one first"
_TOO_EARLY = (
    "a GradScaler's step() or update() was called in a micro-step that does not end a step, where there are no "
    "gradients for it so far; give the scaler to prepare(), or call it `if trainer.sync_gradients:`"
)
_TAKEN_AHEAD = (
    "{num_handed} batches were taken from the dataloader since the last commit, and micro-step {number} of the step "
    "begins now; at most {number} may be taken by then, since a commit passes all of them, and each has its weight. "
    "Loop over the dataloader itself, without a wrapper that takes batches ahead (prefetch_factor does), and enter "
    "trainer.step() with each batch. For one that is not to be trained on call trainer.backward(loss * 0, "
    "num_items=0), and for the others trainer.backward(losses.sum(), num_items=len(batch))"
)
_MIXED = (
    "a step that trainer.run() began goes on in `with trainer.step():`; take all micro-steps of a step in the same way"
)
_USE_A_FUNCTION = (
    "{}. The step was taken back. Put the work on one micro-batch in a function, and call it with "
    "trainer.run(function, batch): then a step for which memory does not suffice comes again in smaller micro-batches"
)
_NOT_READ = (
    "the loop has taken no batch from the dataloader that ElasticTrainer was given ({kind}), and trains on others: a "
    "step would count {num} micro-batches that nobody took. Give ElasticTrainer the dataloader that the loop is over, "
    "or none and micro_batch_size="
)
_STALE = (
    "the batch in hand was taken from the dataloader before its step was taken back, and comes again: it would be "
    "trained on twice. After a step that failed, and after trainer.rewind(), take the next batch from the dataloader "
    "first"
)
_NO_BACKWARD = "left the backward pass of its last step out"
_NO_STEP = "left optimizer.step() out of its last step"
_ALL_LEAVE = (
    "; ranks that have not left the loop too wait for the gradients of this rank, and then all ranks end: leave the "
    "loop on all ranks after the same micro-step, as `if trainer.sync_gradients: break` does at a step's end"
)
_OVER = "the dataloader has no samples left for a step; begin the next epoch"


class MicroStepWeights(NamedTuple):
    """The weights of a step's micro-steps."""

    each: tuple[float, ...]
    """The weight of the mean loss of each micro-step in the gradient of the step."""
    factor_at_end: float = 1.0
    """What the gradients of all earlier micro-steps are multiplied by as the last one begins, where they were not
    weighed one by one; 1.0 where they were."""


class Steps:
    """This rank's steps, from the first micro-step of one to its boundary.

    One class, though a long one: whatever enters, leaves or undoes a micro-step changes the same few fields.
    """

    def __init__(self, training: Training) -> None:
        gradients, batches, optimizers = training.gradients, training.batches, training.prepared.optimizers
        self.keep_batch = True
        """Whether the micro-step that is entered is a part of a step with a global batch."""
        self.num_backwards = 0
        """Micro-steps with a backward pass, in all steps that have ended."""
        self.doubt = ""
        """What this rank left out of its last step, so that other ranks may wait, in words; empty for nothing."""
        self.torn: TornStepError | None = None
        """The error after which no further step is taken; None where steps can be."""
        self.num_torn = 0
        """Micro-steps that the torn step had taken."""
        self.was_undone = False
        """Whether the step that the loop left last was undone, as members have changed, and its samples come again."""
        self.by_function = self._was_by_function = False
        """Whether the micro-step that is entered is a function, which can be called again."""
        self.failure: StepFailure | None = None
        """How memory ran out last; None where it has not."""
        self._guarding = training.guarding
        self._state = training.state
        self._gradients = gradients
        self._batches = batches
        self._counted = batches.counted
        self._optimizers = optimizers
        self._schedules = [schedule for optimizer in optimizers for schedule in optimizer.schedules]
        self._finite = gradients.finite = FiniteGradients(training)
        self._kept, self._keeps_all = Snapshot(training.model, training.registered), training.options.rollback == "full"
        self._losses = training.losses
        self._scaler = training.prepared.scaler
        self._undoing = Rollback(training)
        self._checks = LoopChecks(training)
        self._rhythm = Rhythm(self._checks)
        self._was_handed = False  # a batch, by the dataloader, since training began
        self._enters_with_batch = False  # steps begin with one that the loop has taken before
        self._shares_always = training.options.sync_every_micro_step
        self._counts = training.counts
        self._logged = training.logged
        self._session, self._recorder = training.session, training.recorder
        self._follower = training.follower
        heartbeat = training.follower.heartbeat
        self._heartbeat = heartbeat if heartbeat.wants_micro_steps else None
        self._tells_of_infinities = self._scaler is not None  # once, on the first rank: others would say the same
        self._step = RankStep(weights=(1.0,), num_samples=None)
        self._weights = self._by_turns = MicroStepWeights(self._step.weights)
        self._keeps_batch = True
        self._num_own_backwards = 0  # of the step under way
        self._to_meet: Retry | None = None  # of the step that was taken back last, where other ranks wait for it
        self._num_exchanges = 0  # when the step began
        self._is_like_before = False  # single micro-steps in which nothing is watched: the next needs no preparing
        self._next_look = 0  # the number of a step
        self._puts_back = False  # once the micro-step under way is left, which was taken back as it was entered
        self._to_do_first: Callable[[], None] | None = None
        self._to_change: Callable[[], bool] | None = None  # the members, after that
        gradients.sharing.share(now=True)  # whatever an earlier trainer left there
        training.state.num_optimizers = len(optimizers)
        gradients.share_guarded = self._share_guarded
        if self._keeps_all:
            gradients.on_shared_buffers = self._kept.take_shared

    @property
    def num_micro_steps(self) -> int:
        """The number of micro-steps of the step under way, or of the one that ended last."""
        return self._step.num_micro_steps

    @property
    def largest(self) -> int | None:
        """The most samples that a rank takes at once in the step under way, or the one that ended last.

        None where the dataloader cannot be told to give fewer.
        """
        return self._step.largest

    @property
    def has_not_begun(self) -> bool:
        """Whether no step was ever begun, and no checkpoint gone back to."""
        return self._state.phase is StepPhase.UNBEGUN

    @property
    def is_committing(self) -> bool:
        """Whether the micro-step under way ends a step; between steps, whether the last one has ended.

        A step that was taken back has not, nor has any before the first.
        """
        return self._state.phase in (StepPhase.ENDING, StepPhase.IDLE, StepPhase.OWING)

    @property
    def is_partial(self) -> bool:
        """Whether some micro-steps of a step were taken, and not all."""
        phase = self._state.phase
        return self._state.index > 0 and (phase.is_inside or phase is StepPhase.PARTIAL)

    @property
    def can_mend(self) -> bool:
        """Whether training can go on once a checkpoint is loaded, where no further step can be taken."""
        return self._state.phase is not StepPhase.LOST

    @property
    def is_inside(self) -> bool:
        """Whether a micro-step is under way."""
        return self._state.phase.is_inside

    def __enter__(self) -> None:
        """Begin a micro-step."""
        state = self._state
        if state.phase.is_inside:
            raise StepError(_INSIDE)
        if self.torn is not None:
            raise self.torn
        if self._counted is not None:
            num_handed = self._counted.num_handed
            if num_handed > state.index + 1:
                self._refuse_taken_ahead(num_handed)
            state.check_batch = None if num_handed > state.index else self._check_batch
            if num_handed == 0 and self._enters_with_batch and state.phase is StepPhase.TAKEN_BACK:
                raise StepError(_STALE)
        state.has_forward = state.has_backward = state.is_exact = False
        if self._schedules and state.index == 0:
            is_epochs_first = self._counts.num_steps == 0
            for schedule in self._schedules:
                schedule.begin_step(is_epochs_first=is_epochs_first)
        is_like_before = self._is_like_before and self.by_function is self._was_by_function
        if (
            is_like_before
            and self.keep_batch
            and state.number < self._next_look
            and self._batches.next_step() is self._step
        ):
            state.move(StepEvent.ENTER_LAST)
        else:
            self._enter_with_others()
        if self._heartbeat is not None:
            self._heartbeat.enter(state.index)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """End a micro-step; the last one of a step passes a boundary.

        An error of ranks that are lost is held back where those that are left go on without them.
        """
        try:
            if self._checks.is_inside:
                self._checks.end_micro_step()
            if error is None:
                self._leave()
            else:
                self._fail(error)
            return error is not None and self._losses.recover(error)
        except Exception as failure:
            if not self._losses.recover(failure):
                raise
            return True
        finally:
            if self._heartbeat is not None:
                counts = self._counts
                self._heartbeat.leave(counts.global_step, counts.num_boundaries, self._state.index)

    def _enter_with_others(self) -> None:
        """Begin a micro-step that is not like the one before; where ranks are lost meanwhile, one that comes again."""
        while True:
            try:
                return self._enter()
            except Exception as error:
                if not self._losses.recover(error, is_entering=True):
                    raise

    def _enter(self) -> None:
        """Begin a micro-step that is not like the one before."""
        state = self._state
        takes_back = False
        if state.index == 0:
            try:
                takes_back = self._begin(self.keep_batch)
            except ElasticError as error:
                if not error.says_all:
                    raise
                raise error.with_traceback(None) from error.__cause__
        elif self.keep_batch is not self._keeps_batch:
            raise StepError("fix_total_batch_size changed in the middle of a step; change it between two steps")
        elif state.is_guarded and not self.by_function:
            raise StepError(_MIXED)
        state.weight = self._weights.each[state.index]
        is_last = state.index + 1 == state.num_micro_steps
        state.move(StepEvent.ENTER_LAST if is_last else StepEvent.ENTER)
        is_shared = (is_last or self._shares_always or self._gradients.shares_first) and not (
            state.is_guarded and self._guarding.holds_back
        )
        sharing = self._gradients.sharing
        if is_shared is not sharing.is_sharing:
            sharing.share(now=is_shared)
        if is_last and self._weights.factor_at_end != 1.0:
            self._gradients.weigh_gathered(self._weights.factor_at_end)
        if self._checks.is_looking:
            self._checks.begin_micro_step()
        if takes_back:
            self.rollback()
            self._kept.take()  # what the loop does until it leaves is to leave no trace
            self._puts_back = self.was_undone = True

    def _leave(self) -> None:
        """End a micro-step that no exception leaves."""
        state = self._state
        if state.phase is StepPhase.UNDONE:
            self._gradients.drop()  # of passes that were made since it was taken back
            self._leave_undone()
            return
        if self.torn is not None:  # and the loop has gone on after it was told so
            raise self.torn
        is_last = state.phase.is_last
        try:
            if state.check_batch is not None:
                self._check_at_end(state.check_batch)
            if state.is_guarded and is_last and not state.is_shared:
                self._share_guarded()  # of a rank that has made no pass in its last micro-step, where others have
            if state.num_begun > state.num_stepped:
                self._raise_if_torn(None)
            bare = self._bare_steps() if is_last and self._schedules else None
            if bare is not None and state.num_begun == 0:
                self._take_back()
                raise bare
            if not is_last:
                self._check()
                if state.has_backward:
                    self._keep_left_gradients()
                state.move(StepEvent.LEAVE)
            self._num_own_backwards += state.has_backward
            if self._gradients.awaited:
                self._gradients.answer()
                self.doubt = _NO_BACKWARD
            elif is_last:
                self.doubt = "" if state.num_stepped == state.num_optimizers else _NO_STEP
        except BaseException as failure:
            if state.phase.is_inside:
                self._fail(failure)
            raise
        if is_last:
            self._end(StepEvent.END)
            try:
                self._pass_boundary()
            except ElasticError as failure:
                if not failure.says_all:
                    raise
                raise failure.with_traceback(None) from failure.__cause__
            if bare is not None:  # the step stands, on all ranks
                raise bare
        else:
            state.index += 1

    def _pass_boundary(self) -> None:
        """Pass the boundary after a step, in a context that tells how long it takes where that is measured."""
        if self._recorder is None or self._recorder.rests_until:  # where it waits for ranks it says so by ``during``
            self._session.pass_boundary()
        else:
            with self._recorder.at_boundary():
                self._session.pass_boundary()

    def _bare_steps(self) -> StepError | None:
        """The error of a schedule that was stepped by itself in this step; None where none was."""
        for schedule in self._schedules:
            error = schedule.bare_steps()
            if error is not None:
                return error
        return None

    def _fail(self, error: BaseException) -> None:
        """Handle an exception that leaves a micro-step: roll the step back, or see that it is torn or has committed."""
        state = self._state
        if state.phase is StepPhase.UNDONE:
            self._leave_undone()
            return
        self._raise_if_torn(error)
        self._raise_if_stuck(error)
        if state.num_begun and state.has_committed:
            self._num_own_backwards += state.has_backward
            self._end(StepEvent.BREAK_OFF)
            self._undoing.forget()
            self._is_like_before = False
        elif state.phase.is_inside:
            why = _TOO_EARLY if not state.phase.is_last and _is_of_bare_scaler(error) else None
            why = NO_GRADIENTS_HERE if _is_without_gradients(error) else why
            is_too_small = refuses_one(error)
            if is_too_small or is_out_of_memory(error):
                snapshot, holds_back = self._undoing.snapshot, self._guarding.holds_back
                self.failure = StepFailure.of(
                    state,
                    sees_passes=self._gradients.sees_passes,
                    largest=self._step.largest,
                    holds_back=holds_back,
                    keeps_all=snapshot is not None,
                    refusal=str(error) if is_too_small else "",
                )
                if not (self.by_function or is_too_small):
                    advise(error, _USE_A_FUNCTION)
            try:
                self.rollback()
            finally:
                if state.phase in TRANSITIONS[StepEvent.LEAVE_UNDONE]:
                    state.move(StepEvent.LEAVE_UNDONE)
            if why is not None:
                raise StepError(why) from error

    def _leave_undone(self) -> None:
        """Leave a micro-step whose step was taken back; of one that was so as it was entered, nothing stays."""
        if self._puts_back:
            self._puts_back = False
            self._kept.restore()
            if not self._keeps_all:
                self._kept.let_go()
        self._state.move(StepEvent.LEAVE_UNDONE)

    def rollback(self) -> None:
        """Undo the micro-steps since the last boundary."""
        state = self._state
        if state.num_begun:
            raise StepError(
                "an optimizer has stepped, so the step cannot be rolled back; leave it before optimizer.step()"
            )
        if state.phase not in TRANSITIONS[StepEvent.TAKE_BACK]:
            return
        num_taken = state.index + state.phase.is_inside
        self._raise_if_stuck(None)
        gradients = self._gradients
        is_called = state.index > 0 or state.has_forward
        is_exchanging = (
            state.phase.is_inside and state.has_forward and (gradients.sharing.is_sharing or state.is_shared)
        )
        is_exchanging |= is_called and gradients.sharing.exchanges_always
        must_meet = gradients.are_exchanged and (is_exchanging or not self._batches.can_replay)
        if self._checks.is_looking:
            self._checks.end_step(has_committed=False)
        if must_meet or self._to_meet is not None:
            self._to_meet = self._undoing.retry(num_taken, num_exchanges=self._num_exchanges, is_called=is_called)
        self._is_like_before = False
        self._logged.drop()
        state.move(StepEvent.TAKE_BACK)
        self._undoing.roll_back(num_taken, is_called=is_called)

    def log(self, values: Mapping[str, object]) -> None:
        """Add numbers of the script's to the step under way, weighed by the samples of its micro-batch.

        Between two micro-steps they weigh as in the one before; where no step is under way they count at once.
        """
        state, sizes = self._state, self._step.sizes
        if state.phase is StepPhase.UNDONE:  # and its numbers with it
            return
        is_inside = state.phase.is_inside
        self._logged.add(values, sizes[state.index - (not is_inside)] if sizes else 1.0)
        if not (is_inside or state.phase is StepPhase.PARTIAL):
            self._logged.count()

    def keep_everything(self) -> None:
        """Keep what a step changes besides parameters, as with ``rollback="full"``, from the next step on."""
        if not self._keeps_all:
            self._keeps_all, self._is_like_before = True, False
            self._gradients.on_shared_buffers = self._kept.take_shared

    def forget_others(self) -> None:
        """Owe other ranks nothing any more, as some of them are lost: no boundary, no passes, no change of members."""
        if self._state.phase is StepPhase.OWING:
            self._state.move(StepEvent.PASS)
        self._to_meet = self._to_change = None
        self._is_like_before, self.doubt = False, ""

    def begin_behind(self, *, is_taken_back: bool) -> None:
        """Begin the next step with what other ranks have ended, which this rank takes from them.

        ``is_taken_back`` says that they were in a later step, which was undone: else the loop does next what it does
        after the step that they have ended.
        """
        if self.torn is None:
            self._state.move(StepEvent.TEAR)
        self.start_over(passes_over=False)
        self.go_on(passes_over=not is_taken_back)

    def weigh_anew(self) -> None:
        """Decide anew when gradients are weighed, as the way they are shared has changed; between two steps."""
        self._is_like_before = False
        self._set_weights(self._step.weights)

    def do_first(self, act: Callable[[], None]) -> None:
        """Have ``act`` called as the next step begins, before anything of it happens."""
        self._to_do_first, self._is_like_before = act, False

    def change_first(self, act: Callable[[], bool]) -> None:
        """Have ``act``, a change of members, called as the next step begins, after what ``do_first`` was given.

        Where it gives True that step is taken back as it is entered: its batch was cut for others, and comes again.
        """
        self._to_change, self._is_like_before = act, False

    def pass_owed_boundary(self) -> None:
        """Pass the boundary that an exception kept this rank from, if there is one."""
        if self._state.phase is StepPhase.OWING:
            self._state.move(StepEvent.PASS)
            self._pass_boundary()

    def catch_up(self) -> None:
        """Do what other ranks wait for since the last step: pass an owed boundary, meet, make a backward pass.

        Called between two steps.
        """
        self.pass_owed_boundary()
        if self._to_meet is not None:
            self._follower.meet(
                self._to_meet.purpose,
                doubt="took back a step that had failed on it",
                exchanges=self._to_meet.num_exchanges,
                lost=self._to_meet.num_lost,
            )
            self._to_meet = None
            self._gradients.sharing.wait()
        if self._gradients.awaited:
            self._gradients.answer()
            self._gradients.drop()

    def expect_checkpoint(self) -> None:
        """Let no step be taken while a checkpoint is loaded: a failure would leave a part of it in memory."""
        self._state.move(StepEvent.TEAR)
        self.torn = TornStepError(
            "going back to a checkpoint failed halfway, and memory holds parts of it: resume from a checkpoint, or "
            "have all ranks call trainer.rewind() for another one"
        )

    def give_up(self, why: str) -> None:
        """Let no further step be taken, for the reason ``why``; called between two steps."""
        self._state.move(StepEvent.GIVE_UP)
        self.num_torn, self._is_like_before = 0, False
        self.torn = TornStepError(why)

    def start_over(self, *, passes_over: bool) -> None:
        """Forget the step under way and what is left of the last one, once a checkpoint is loaded.

        ``passes_over`` says that the samples of a torn step do not come again.
        """
        self._undoing.start_over(self.num_torn, passes_over=passes_over)
        self.num_torn = 0
        self._is_like_before, self.doubt = False, ""

    def go_on(self, *, passes_over: bool) -> None:
        """Let steps be taken again, once all parts of training are as the checkpoint has them."""
        self._state.move(StepEvent.LOAD if passes_over else StepEvent.LOAD_TO_REPLAY)
        self.torn = None

    def end_epoch(self) -> None:
        """Warn, as an epoch or training ends, if no optimizer has stepped at all."""
        self._rhythm.end_epoch(num_ended=self._counts.num_boundaries)

    def drop_partial(self, why: str) -> None:
        """Roll back a step that will not be completed, if one is under way, and warn of it for the reason ``why``."""
        if self.is_partial:
            told = f"{self._state.index} of {self._step.num_micro_steps} micro-steps"
            self.doubt = f"left a step after {told} ({why})"
            self.rollback()
            self._to_meet = None  # the end that comes now compares all ranks
            advice = _ALL_LEAVE if self._gradients.are_exchanged else ""
            _logger.warning("%s of a step were dropped: %s%s", told, why, advice)

    def _begin(self, keep_batch: bool) -> bool:
        """Begin a step; gives whether it is to be taken back once it is entered, as ``change_first`` says."""
        state, gradients = self._state, self._gradients
        self.was_undone = False
        is_first, takes_back = state.phase is StepPhase.UNBEGUN, False
        if state.phase is StepPhase.OWING:
            self.pass_owed_boundary()
        if self._to_do_first is not None:
            act, self._to_do_first = self._to_do_first, None
            self._do_first(act)
        if self._to_change is not None:
            change, self._to_change = self._to_change, None
            takes_back = self._do_first(change)
        if self._to_meet is not None or gradients.awaited:
            self.catch_up()
        if gradients.before_step is not None:
            gradients.before_step()
        step = self._batches.next_step(keep_batch=keep_batch)
        if step is None:
            raise StepError(_OVER)
        if step is not self._step or keep_batch is not self._keeps_batch:
            self._step, self._keeps_batch = step, keep_batch
            state.num_micro_steps = step.num_micro_steps
            state.keeps_batch = keep_batch and self._batches.keeps(step)
            self._set_weights(step.weights)
        self._weights = self._by_turns
        state.on_cleared = None
        if self._weights.factor_at_end != 1.0 and self._optimizers[0].may_have_left_gradients:
            self._weights = MicroStepWeights(step.weights)  # what is left is not to be weighed again
            state.on_cleared = self._weigh_once
        if self._counted is not None:
            self._enters_with_batch = self._counted.num_handed > 0
        if is_first and state.keeps_batch:  # gradients from before are no part of a step
            self._undoing.forget_gradients()
        self._was_by_function = self.by_function
        state.is_guarded = self.by_function and step.largest is not None and self._guarding.is_due(step.largest)
        if state.is_guarded:
            self._guarding.begin_step()
        is_watching = self._guarding.is_watching
        if is_watching:
            self._guarding.watch()
        snapshot = self._undoing.snapshot = self._kept if self._keeps_all or state.is_guarded else None
        is_looked_at_now = state.number >= self._next_look
        if is_looked_at_now:
            self._next_look = next_look(state.number)
        if is_looked_at_now and state.number > 0:  # in the first one compilers make their graphs
            self._checks.begin_step(step.sizes)
        are_exchanged = gradients.are_exchanged
        is_watched = are_exchanged or step.weights != (1.0,)
        gradients.watch(needed=is_watched)
        state.before_optimizer = gradients.check if is_watched else None
        if step.num_micro_steps > 1:
            gradients.begin_gathering(is_looked_at=is_looked_at_now)
            for optimizer in self._optimizers:
                optimizer.begin_gathering()
        self._num_own_backwards = 0
        is_plain = not (is_watched or is_watching or is_looked_at_now)
        self._is_like_before = keep_batch and is_plain and snapshot is None
        if are_exchanged:
            self._num_exchanges = gradients.sharing.num_exchanges
        if snapshot is not None:
            snapshot.take()
            snapshot.put_shared()
        return takes_back

    def _refuse_taken_ahead(self, num_handed: int) -> None:
        """Raise, since too many batches were taken, and have these come again.

        Other ranks learn of it as of any failure between steps.
        """
        number = self._state.index + 1
        self.rollback()
        self._batches.rollback(0)  # which has no part in a step that has not begun
        raise StepError(_TAKEN_AHEAD.format(num_handed=num_handed, number=number))

    def _check_batch(self) -> None:
        """Raise where the loop reads another dataloader, and warn where it takes too few batches from this one."""
        state, counted = self._state, self._counted
        assert counted is not None
        num_handed = counted.num_handed
        if num_handed > state.index:
            return
        if num_handed == 0 and not self._was_handed:
            kind = type(self._batches.loader).__name__
            raise StepError(_NOT_READ.format(kind=kind, num=state.num_micro_steps))
        if state.phase.is_last:
            self._checks.say(FEWER_BATCHES, num=state.num_micro_steps, handed=num_handed)

    def _check_at_end(self, check: Callable[[], None]) -> None:
        """Check the batch of a micro-step that ends and in which no optimizer has asked for that."""
        try:
            check()
        except StepError:
            if self._state.num_begun == 0:
                self._take_back()
            raise

    def _weigh_once(self) -> None:
        """Weigh this step's gradients once, at its end, since nothing is left of the step before."""
        state = self._state
        state.on_cleared = None
        if state.phase.is_inside and state.index == 0 and not state.has_backward:
            self._weights = self._by_turns
            state.weight = self._weights.each[0]

    def _keep_left_gradients(self) -> None:
        """Have optimizers not clear what the step before has left, since a backward pass has added to it."""
        for optimizer in self._optimizers:
            if optimizer.may_have_left_gradients:
                optimizer.keep_left_gradients()

    def _do_first(self, act: Callable[[], _Result]) -> _Result:
        try:
            return act()
        except BaseException:
            self._batches.rollback(1)  # what was handed out for this step is not taken
            raise

    def _set_weights(self, weights: tuple[float, ...]) -> None:
        """Set how micro-batches are weighed: where all count the same, gradients are weighed once, before the last.

        Ranks may differ in that, so gradients must not be shared before.
        """
        common = weights[0]
        is_late = len(set(weights)) == 1 < len(weights) and len(self._optimizers) == 1 and not self._shares_always
        if is_late and self._scaler is None and self._gradients.can_wait_for_weights:  # scaled ones fill their range
            self._by_turns = MicroStepWeights((1.0,) * (len(weights) - 1) + (common,), factor_at_end=common)
        else:
            self._by_turns = MicroStepWeights(weights)
        self._weights = self._by_turns

    def _end(self, event: StepEvent) -> None:
        """Count and commit a step that has ended on this rank by ``event``, and begin the state of the next."""
        state, counts = self._state, self._counts
        state.move(event)
        if self._counted is not None and not self._was_handed:
            self._was_handed = self._counted.num_handed > 0
        self._batches.commit(state.num_micro_steps)
        has_committed = state.num_stepped == state.num_optimizers
        if has_committed:
            counts.global_step += 1
            counts.num_steps += 1
            if self._logged.under_way:
                self._logged.count()
        elif self._finite.leaves_out:
            self._logged.drop()
            self._undoing.leave_out(restores=self._keeps_all and state.num_begun == 0)
        else:
            self._rhythm.note(self._optimizers, state, num_ended=counts.num_boundaries + 1, is_known=self._leaves_out)
            if state.keeps_batch or self._leaves_out:
                self._logged.drop()
            else:  # it is gathered by hand, and its gradients stay
                self._logged.count()
            if state.keeps_batch:
                self._gradients.drop()
            elif state.num_stepped == 0 and self._leaves_gradients():
                self._batches.is_gathered_by_hand = True
                self._session.note_gathered_by_hand()
            if self._tells_of_infinities and self._follower.ranks.rank == 0:
                self._tell_of_infinities()
        if state.number >= state.looks_from:
            self._finite.end_step()
        if not self._is_like_before:
            self._end_watched(has_committed=has_committed)
        elif state.is_exact:
            self._gradients.end_step()
        self.num_backwards += self._num_own_backwards
        self._num_own_backwards = 0
        counts.num_boundaries += 1
        counts.num_samples += self._step.num_samples or 0
        state.begin_anew()

    def _end_watched(self, *, has_committed: bool) -> None:
        """End a step in which something was watched, or may have been."""
        state = self._state
        if self._checks.is_looking:
            self._checks.end_step(has_committed=has_committed)
        if self._guarding.is_watching:
            self._guarding.note(self._step.largest)
        if state.is_guarded:
            self._guarding.end_step(self._step.largest or 0)
            if not (self._keeps_all or self._guarding.goes_on):
                self._kept.let_go()
        self._gradients.end_step()
        if self._undoing.snapshot is not None:
            self._undoing.snapshot.end_step()

    def _leaves_gradients(self) -> bool:
        """Whether a step without an optimizer leaves gradients to the next one, as is not known of the loop yet."""
        if self._leaves_out or self._batches.is_gathered_by_hand:
            return False
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return any(parameter.grad is not None for group in groups for parameter in group["params"])

    @property
    def _leaves_out(self) -> bool:
        """Whether it is known why no optimizer has stepped."""
        return self._scaler is not None and self._scaler.leaves_out

    def _tell_of_infinities(self) -> None:
        if self._leaves_out:
            self._tells_of_infinities = False
            _logger.info(
                "the step after step %d was left out, since the scaler found gradients that are not finite: its "
                "samples are consumed, global_step and schedules stay; this message is logged once",
                self._counts.global_step,
            )

    def _share_guarded(self) -> None:
        """Share the gradients of the guarded step under way, once memory has sufficed on all ranks."""
        with self._follower.heartbeat.communicating():
            held = self._guarding.hear()
            self._state.is_shared = True
            self._guarding.average(held)

    def _check(self) -> None:
        try:
            self._gradients.check()
        except StepError:
            self._take_back()
            raise

    def _take_back(self) -> None:
        """Undo the step after the micro-step that ends now."""
        self._state.move(StepEvent.LEAVE)
        self._state.index += 1  # this micro-step took its samples
        self.rollback()

    def _raise_if_torn(self, error: BaseException | None) -> None:
        why = self._undoing.why_torn(error)
        if why is not None:
            self._tear(why, error, can_mend=True)

    def _raise_if_stuck(self, error: BaseException | None) -> None:
        why = None if self.torn is not None else self._undoing.why_stuck()
        if why is not None:
            self._tear(why, error, can_mend=False)

    def _tear(self, why: str, error: BaseException | None, *, can_mend: bool) -> None:
        """Let no further step be taken, for the reason ``why``; ``can_mend`` where loading a checkpoint helps."""
        self._state.move(StepEvent.TEAR if can_mend else StepEvent.GIVE_UP)
        self._logged.drop()
        self.num_torn, self._is_like_before = self._state.index + 1, False
        self.torn = TornStepError(why)
        if error is None or isinstance(error, Exception):  # an interrupt goes on as what it is
            raise self.torn from error


def _is_without_gradients(error: BaseException) -> bool:
    """Whether ``error`` is that of a backward pass where gradients are switched off."""
    return isinstance(error, RuntimeError) and not torch.is_grad_enabled() and "does not require grad" in str(error)


def _is_of_bare_scaler(error: BaseException) -> bool:
    """Whether ``error`` is that of a GradScaler which has seen no gradients since its last update."""
    return isinstance(error, AssertionError) and "inf checks were recorded" in str(error)
