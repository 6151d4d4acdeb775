"""The batches of ``trainer.batches()``: those of the dataloader, epoch after epoch, for loops that count steps.

A loop is left by ``break`` or by an exception, and Python ends its generator then, or later. The generator cannot tell
one from the other, and after an exception the other ranks are elsewhere: so it does nothing that takes all ranks. The
epoch stays open; the next batch is of the same epoch, and ``Session`` ends the epoch at a call that all ranks make.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from threading import get_ident
from typing import TYPE_CHECKING, Any

from elastic_ext.data.sources import ReenteredSource, ResumableSource
from elastic_ext.errors import ElasticError, StepError

if TYPE_CHECKING:
    from .session import Session
    from .training import Training

__all__ = ["EndlessBatches", "name_epoch"]

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


def name_epoch(loader: object, epoch: int) -> None:
    """Call ``set_epoch(epoch)`` of a loader, or else of its samplers, where they have it: some shuffle by the epoch."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    for part in (loader,) if hasattr(loader, "set_epoch") else samplers:
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


class EndlessBatches:
    """The batches of a trainer's dataloader, epoch after epoch, for loops that count steps and not epochs.

    A training has one of these, with one loop over the dataloader: whoever takes batches goes on where the one before
    has stopped. An epoch that was begun here stays open until its data has ended, ``make_way`` ends it for another way
    to train, or training ends. All ranks take batches alike.
    """

    def __init__(self, session: Session, training: Training) -> None:
        self._session = session
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
                self._session.go_on_in_epoch()
            while self._advance(max_steps):
                yield self._in_hand.pop()
        finally:
            self._num_takers -= 1
            is_left_here = get_ident() == thread  # and not by another thread, whose garbage collection ends generators
            if is_left_here and self.is_open and self._num_takers == 0 and not self._training.steps.is_inside:
                self._session.pause_epoch()

    def make_way(self, doing: str) -> None:
        """End the epoch that is open, for ``doing``, another way to train; StepError while a loop takes batches."""
        if self._num_takers > 0:
            raise StepError(_MAKE_WAY.format(doing))
        self.end(None)

    def end(self, error: BaseException | None) -> None:
        """End the epoch that is open, if one is, as ``Session.end_epoch`` does."""
        is_open = self.is_open
        self.let_go()
        if is_open:
            self._session.end_epoch(error)

    def let_go(self) -> None:
        """Keep no loop over the dataloader, and with that none of its workers."""
        self._loop, self.is_open = None, False
        if isinstance(self._batches.loader, ReenteredSource):
            self._batches.loader.on_loop = None

    def _check(self, how: str) -> None:
        """Raise where training has ended, or is in an epoch that was not begun here."""
        if self._session.has_ended:
            raise ElasticError(_HAS_ENDED)
        if self._session.is_in_epoch and not self.is_open:
            raise StepError(_WITHIN_EPOCH.format(how))

    def _goes_on(self, max_steps: int | None) -> bool:
        """Whether to take another batch, as all ranks decide after the same boundary."""
        self._check("asked for a batch")
        if self._training.steps.is_inside:
            raise StepError(_WITHIN_STEP)
        self._training.steps.pass_owed_boundary()  # at which the other ranks may have agreed to stop
        return not self._session.should_stop and (max_steps is None or self._counts.global_step < max_steps)

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
            self._session.leave_unfinished()
        epoch = self._counts.epoch_to_resume
        if self._batches.source is None:
            name_epoch(self._batches.loader, epoch)
        self._session.begin_epoch(epoch)
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
        self._session.leave_unfinished()  # a loop that passes over batches seems to leave some behind

    def _why_idle(self) -> Exception:
        """The error of two epochs in a row without a step; one alone may be the rest of an epoch, with nothing left."""
        kind, size, num = type(self._batches.loader).__name__, self._batches.global_batch, self._num_batches
        of = "" if size is None else f" of {size} samples"
        if num == 0:
            return ValueError(_NO_BATCH.format(kind=kind, of=of))
        return StepError(_NO_STEP_IN_EPOCHS.format(kind=kind, num=num, of=of))
