"""The epochs of a training on this rank, begun and ended with all ranks: in ``with trainer.epoch():``, or by themselves
in loops over ``trainer.batches()``, which count steps.

Such a loop is left by ``break`` or by an exception, and Python ends its generator then, or later. The generator cannot
tell one from the other, and after an exception the other ranks are elsewhere: so it does nothing that takes all ranks.
The epoch stays open; the next batch is of the same epoch, and the epoch ends at a call that all ranks make.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from threading import get_ident
from typing import TYPE_CHECKING, Any

from elastic_ext.data.sources import ReenteredSource, ResumableSource
from elastic_ext.errors import ElasticError, StepError
from elastic_ext.ranks.heartbeat import Activity
from elastic_ext.ranks.world import World

from .batches import name_epoch
from .checks import EpochsOfSampler, SameLoading

if TYPE_CHECKING:
    from .training import Training

__all__ = ["EndlessBatches", "TrainingEpochs"]

_logger = logging.getLogger(__name__)

_HAS_ENDED = (
    "training has ended, and trainer.batches() has no more batches; take them within `with trainer:`, or before "
    "trainer.close()"
)
_WITHIN_STEP = (
    "trainer.batches() was asked for a batch inside `with trainer.step():`; take the next batch once the step's block "
    "has ended, as a for loop does: an ElasticDataLoader with workers has it ready by then"
)
_WITHIN_EPOCH = (
    "trainer.batches() was {} inside `with trainer.epoch():`, and begins and ends epochs by itself; leave "
    "trainer.epoch() out, or loop over the dataloader"
)
_MAKE_WAY = (
    "{} in a loop over trainer.batches(), which begins and ends epochs by itself; leave the call out, or leave the "
    "loop first. Where batches are taken with next(batches), batches.close() leaves the loop"
)
_SECOND_LOOP = (
    "a loop over the dataloader was begun in an epoch of trainer.batches(), and would leave out the rest of it; go on "
    "with trainer.batches(), put `with trainer.epoch():` around the loop, or make a second loader for what is not "
    "trained on"
)
_ENDED_BY_ERROR = (
    "the loop over the %s gave no batch after it had raised an error, and epoch %d ends there: a generator that raises "
    "has ended, and the rest of its batches does not come. Catch such an error where the batches are made, and give "
    "another batch instead"
)
_NO_BATCH = (
    "the {kind} gave no batch in two epochs in a row, and trainer.batches() would wait for one for ever. Give the "
    "trainer a loader that has batches: the dataset may be empty, an iterator gives nothing to a second loop, and "
    "drop_last leaves out what is less than a step{of}"
)
_NO_STEP_IN_EPOCHS = (
    "two epochs in a row have ended without a step, though the {kind} gave {num} batches in the second one; enter "
    "`with trainer.step():` with each batch, and give the trainer a loader whose epochs have as many batches as a "
    "step{of} takes"
)


class TrainingEpochs:
    """Begins and ends a training's epochs with all ranks, goes on with one that the loop has left, or gives it up."""

    def __init__(self, training: Training) -> None:
        self.is_open = False
        """Whether an epoch was begun that was not ended, by ``with trainer.epoch()`` or by ``trainer.batches()``."""
        self._training = training
        self._counts, self._batches = training.counts, training.batches
        self._bar = training.reports.bar
        self._loading = SameLoading(training.batches, training.ranks)
        self._sampler_epochs = EpochsOfSampler(training.batches.loader)
        self._has_begun = False
        self._joined: int | None = None  # the epoch in which the ranks are that this one has joined
        self._to_begin: int | None = None  # the same, or the one that comes for them, until it has begun here
        self.endless = EndlessBatches(self, training)
        """What ``trainer.batches()`` gives."""

    def compare_loaders(self) -> None:
        """Raise where the ranks' dataloaders differ, and warn where replicas share nothing out; with all ranks."""
        self._loading.compare()
        self._loading.compare_shares(self._training.gradients.sharing.num_ranks, self._training.state.remarks)

    def take_world(self, world: World) -> None:
        """Compare with the ranks of ``world`` as epochs begin from here on."""
        self._loading.take_world(world)

    def join(self, *, is_within: bool) -> None:
        """Note that this rank has joined others and has their counts; ``is_within`` where their epoch is under way."""
        self._joined = self._counts.epoch if is_within else None
        self._to_begin = self._counts.epoch if is_within else self._counts.start_epoch

    def enter(self, epoch: int | None) -> int:
        """Begin ``epoch``, by default the one after the last, for ``with trainer.epoch():``; gives its number."""
        self.endless.make_way("trainer.epoch() was entered")
        if self.is_open:
            raise StepError("trainer.epoch() was entered inside another `with trainer.epoch():`; leave that one first")
        number = self._counts.epoch if epoch is None else epoch
        self.begin(number)
        return number

    def begin(self, epoch: int) -> None:
        """Begin ``epoch`` with all ranks, or go on with the rest of it."""
        training, counts = self._training, self._counts
        to_begin, self._to_begin = self._to_begin, None
        if to_begin not in (None, epoch):
            raise StepError(
                f"the loop begins with epoch {epoch}, and the ranks that this one has joined are in epoch {to_begin}; "
                "loop over range(trainer.start_epoch, num_epochs)"
            )
        if not self._has_begun:
            self._has_begun = True
            self._begin_first(epoch)
        self.go_on()
        self._leave_gone_back_to(epoch)
        joined, self._joined = self._joined, None
        if epoch == counts.unfinished_epoch:
            self._begin_to_count()
            self._go_on_with_rest()
        elif epoch != joined:  # else the others are in the middle of it
            self._begin_anew()
        if epoch != joined:
            counts.epoch = epoch
            training.losses.with_others(self._begin_with_others)
        counts.epoch, counts.is_in_epoch, self.is_open = epoch, True, True
        self._bar.begin(f"epoch {epoch}", self._batches.num_steps)

    def _begin_with_others(self) -> None:
        """Make sure that all ranks begin the same epoch alike, once a change of members is made that waits."""
        self._training.members.apply_between()
        self._loading.compare_orders()
        self._loading.compare_batches(self._training.gradients.sharing.num_ranks)

    def go_on(self) -> None:
        """Have the time between two steps count as time in which the loop takes a batch: if long, it is a hang."""
        self._training.follower.heartbeat.note(Activity.BETWEEN)
        if self._training.recorder is not None:
            self._training.recorder.begin_epoch()

    def pause(self) -> None:
        """Have the time from here on count as outside of epochs: the loop takes no batches."""
        self._training.follower.heartbeat.note(Activity.OUTSIDE)
        if self._training.recorder is not None:
            self._training.recorder.end_epoch()

    def end(self, error: BaseException | None) -> None:
        """End an epoch with all ranks; or tell them of ``error``, an exception that has left the epoch."""
        training, counts, steps = self._training, self._counts, self._training.steps
        self._step_out()
        if error is not None:
            counts.is_in_epoch = False
            training.session.tell_failure(error)
            return
        try:
            if steps.torn is not None:  # and no checkpoint is to have it
                raise steps.torn
            steps.pass_owed_boundary()
            is_at_end = self._batches.is_at_end  # also where the last samples are too few for a step, and are dropped
            steps.drop_partial("the epoch ended before the step did")
            steps.end_epoch()
            training.losses.with_others(lambda: training.follower.end_epoch(doubt=steps.doubt))
        finally:
            counts.is_in_epoch = False
        if counts.num_steps > 0:
            training.state.remarks.say("an order again", self._sampler_epochs.end(counts.epoch))
        should_stop = training.session.should_stop
        is_over = not self._is_left_early(is_at_end=is_at_end, should_stop=should_stop)
        if is_over:
            self._batches.leave_epoch()
        else:
            counts.unfinished_epoch = counts.epoch
        if is_over or not should_stop:  # by itself trainer.epoch() is the next one, in this run
            counts.epoch += 1
        steps.do_first(self._begin_outside)
        if training.saving is not None:
            training.saving.end_epoch(is_over=is_over)

    def leave_for_checkpoint(self) -> None:
        """Leave an epoch of which nothing is to stay: training goes back to a checkpoint, which says what comes."""
        self.endless.let_go()
        self._counts.is_in_epoch = False
        self._step_out()

    def _step_out(self) -> None:
        self.is_open = False
        self.pause()
        self._bar.end()

    def _is_left_early(self, *, is_at_end: bool, should_stop: bool) -> bool:
        """Whether the loop was left before the epoch's end, as far as any rank knows.

        ``is_at_end`` says that it was not, though the last samples are in no step.
        """
        is_left = self._batches.is_left_early or (should_stop and self._batches.is_mid_epoch)
        is_left = is_left and not is_at_end
        if not self._batches.may_end_apart:
            return is_left
        return self._training.ranks.sum([int(is_left)], "ending an epoch")[0] > 0

    def reset(self) -> None:
        """Begin an epoch: count its steps and its batches from zero."""
        self.endless.make_way("trainer.reset() was called")
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.leave_unfinished()
        self._begin_to_count()

    def _begin_to_count(self) -> None:
        self._training.steps.drop_partial("an epoch begins")
        if self._training.saving is not None:
            self._training.saving.begin_due()
        self._counts.num_steps = 0
        self._batches.begin_epoch()

    def leave_unfinished(self) -> None:
        """Give up the rest of an epoch that the loop has left, as another epoch begins."""
        unfinished, self._counts.unfinished_epoch = self._counts.unfinished_epoch, None
        if unfinished is not None:
            self._counts.epoch = unfinished + 1
            self._batches.leave_epoch()

    def _go_on_with_rest(self) -> None:
        """Go on with the rest of an epoch that the loop has left, and now comes back to."""
        self._counts.unfinished_epoch = None
        why_anew = self._batches.positions.go_on()
        self._batches.count_rest()
        if why_anew is not None and self._training.ranks.rank == 0:
            _logger.warning("%s", why_anew)

    def _begin_first(self, epoch: int) -> None:
        """Begin a run with ``epoch``; where it resumes in an earlier one, leave that out, and say so."""
        counts, is_whole = self._counts, self._batches.can_begin_later
        self._training.state.remarks.say("another first epoch", counts.remark_on_beginning(epoch, is_whole=is_whole))
        if counts.begins_later(epoch) and is_whole:
            self._begin_later(epoch)

    def _leave_gone_back_to(self, epoch: int) -> None:
        """Leave out the epoch that training has gone back to, where the loop goes on with a later one, and say so."""
        counts, batches = self._counts, self._batches
        remark = counts.remark_on_going_back(epoch, is_whole=batches.can_begin_later)
        counts.epoch_gone_back_to = None
        if remark is not None:
            self._training.state.remarks.say("a later epoch than was gone back to", remark)
            if batches.can_begin_later:
                self._begin_later(epoch)

    def _begin_later(self, epoch: int) -> None:
        self._batches.begin_later(epoch)
        self._counts.epoch = epoch  # of which a checkpoint is that is saved before it begins

    def _begin_outside(self) -> None:
        """Give up the rest of an epoch that was left, as a step begins outside of any epoch."""
        if not self._counts.is_in_epoch:
            self.leave_unfinished()
            if self._training.saving is not None:
                self._training.saving.begin_due_in_step()


class EndlessBatches:
    """The batches of a trainer's dataloader, epoch after epoch, for loops that count steps and not epochs.

    A training has one of these, with one loop over the dataloader: whoever takes batches goes on where the one before
    has stopped. An epoch that was begun here stays open until its data has ended, ``make_way`` ends it for another way
    to train, or training ends. All ranks take batches alike.
    """

    def __init__(self, epochs: TrainingEpochs, training: Training) -> None:
        self._epochs = epochs
        self._training = training
        self._counts, self._batches = training.counts, training.batches
        self._loop: Iterator[Any] | None = None  # over the dataloader, in the epoch that is open
        self.is_open = False
        """Whether an epoch was begun here, and has not ended."""
        self.max_steps: int | None = None
        """The step at which the loop that was begun last is to end; None where it does not say."""
        self._num_takers = 0  # loops that were begun and not left
        self._in_hand: list[Any] = []  # a batch between the dataloader and the loop, which alone is to hold it
        self._has_failed = False  # the dataloader, when it was asked for a batch last
        self._num_batches = 0  # that the loop over the dataloader has given
        self._num_boundaries = 0  # so many there were as it began
        self._num_idle = 0  # epochs in a row that have ended without a step

    def batches(self, max_steps: int | None) -> Generator[Any, None, None]:
        """Batches until ``max_steps`` have committed since training began, or some rank asked to stop."""
        if max_steps is not None and (type(max_steps) is not int or max_steps < 0):
            raise ValueError(f"max_steps is {max_steps!r}; allowed: an integer >= 0, or None")
        if self._batches.loader is None:
            raise ValueError(
                "trainer.batches() gives the batches of the trainer's dataloader, and the trainer was given none; make "
                "it as ElasticTrainer(model, dataloader, ...)"
            )
        self._check("called")
        return self._take(max_steps)

    def _take(self, max_steps: int | None) -> Generator[Any, None, None]:
        thread, self.max_steps = get_ident(), max_steps
        self._num_takers += 1
        try:
            if self.is_open:
                self._epochs.go_on()
                self._hand_out_again()
            while self._advance(max_steps):
                yield self._in_hand.pop()
        finally:
            self._num_takers -= 1
            is_left_here = get_ident() == thread  # and not by another thread, whose garbage collection ends generators
            if is_left_here and self.is_open and self._num_takers == 0 and not self._training.steps.is_inside:
                self._epochs.pause()

    def _hand_out_again(self) -> None:
        """Have the batch come again with which the loop before was left ahead of its micro-step, and its step with it.

        Of a loader that does not count its batches that is not known.
        """
        steps = self._training.steps
        if self._num_takers == 1 and not steps.is_inside and self._batches.num_handed > self._training.state.index:
            steps.rollback()
            self._batches.rollback(0)

    def make_way(self, doing: str) -> None:
        """End the epoch that is open, for ``doing``, another way to train; StepError while a loop takes batches."""
        if self._num_takers > 0:
            raise StepError(_MAKE_WAY.format(doing))
        self.end(None)

    def end(self, error: BaseException | None) -> None:
        """End the epoch that is open, if one is, as ``TrainingEpochs.end`` does."""
        is_open = self.is_open
        self.let_go()
        if is_open:
            self._epochs.end(error)

    def let_go(self) -> None:
        """Keep no loop over the dataloader, and with that none of its workers."""
        self._loop, self.is_open = None, False
        if isinstance(self._batches.loader, ReenteredSource):
            self._batches.loader.on_loop = None

    def _check(self, how: str) -> None:
        """Raise where training has ended, or is in an epoch that was not begun here."""
        if self._training.session.has_ended:
            raise ElasticError(_HAS_ENDED)
        if self._epochs.is_open and not self.is_open:
            raise StepError(_WITHIN_EPOCH.format(how))

    def _goes_on(self, max_steps: int | None) -> bool:
        """Whether to take another batch, as all ranks decide after the same boundary."""
        self._check("asked for a batch")
        if self._training.steps.is_inside:
            raise StepError(_WITHIN_STEP)
        self._training.steps.pass_owed_boundary()  # at which the other ranks may have agreed to stop
        return not self._training.session.should_stop and (max_steps is None or self._counts.global_step < max_steps)

    def _advance(self, max_steps: int | None) -> bool:
        """Put the next batch in hand; False where no more are to be taken."""
        while self._goes_on(max_steps):
            if not self.is_open:
                self._begin()
            if self._loop is None:
                self._begin_loop()
            assert self._loop is not None
            had_failed, self._has_failed = self._has_failed, True
            try:
                self._in_hand.append(next(self._loop))
            except StopIteration:
                self._pass_end(had_failed=had_failed)
            else:
                self._has_failed = False
                self._num_batches += 1
                return True
        return False

    def _begin(self) -> None:
        """Begin the next epoch, or go on with one that was left where the dataloader can, with all ranks."""
        if not isinstance(self._batches.loader, ResumableSource):
            self._epochs.leave_unfinished()
        epoch = self._counts.epoch_to_resume
        if self._batches.source is None:
            name_epoch(self._batches.loader, epoch)
        self._epochs.begin(epoch)
        self.is_open = True

    def _begin_loop(self) -> None:
        """Begin a loop over the dataloader, and have it refuse others until this one is let go."""
        self._num_batches, self._num_boundaries, self._has_failed = 0, self._counts.num_boundaries, False
        loader = self._batches.loader
        self._loop = iter(loader)
        if isinstance(loader, ReenteredSource):
            loader.on_loop = self._refuse_loop

    def _refuse_loop(self) -> None:
        raise StepError(_SECOND_LOOP)

    def _pass_end(self, *, had_failed: bool) -> None:
        """End the epoch whose data has ended; an error where no epoch to come would have a step either."""
        if had_failed:
            _logger.warning(_ENDED_BY_ERROR, type(self._batches.loader).__name__, self._counts.epoch)
        self._num_idle = 0 if self._counts.num_boundaries > self._num_boundaries else self._num_idle + 1
        error = None if self._num_idle < 2 else self._why_idle()
        self.end(error)
        if error is not None:
            raise error
        self._epochs.leave_unfinished()  # a loop that passes over batches seems to leave some behind

    def _why_idle(self) -> Exception:
        """The error of two epochs in a row without a step; one alone may be the rest of an epoch, with nothing left."""
        kind, size, num = type(self._batches.loader).__name__, self._batches.global_batch, self._num_batches
        of = "" if size is None else f" of {size} samples"
        if num == 0:
            return ValueError(_NO_BATCH.format(kind=kind, of=of))
        return StepError(_NO_STEP_IN_EPOCHS.format(kind=kind, num=num, of=of))
