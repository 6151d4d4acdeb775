"""Undoing: what a step has left in the parts of training on this rank: taken back, forgotten, or why it cannot be.

When that is done, and what becomes of the step, is said in steps.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .batches import Batches
from .config.control_word import Purpose
from .step_state import StepState

if TYPE_CHECKING:
    from .amp import ElasticScaler
    from .finite_gradients import FiniteGradients
    from .gradients import Gradients
    from .optimizer import ElasticOptimizer
    from .snapshot import Snapshot

__all__ = ["Retry", "StepParts", "Undoing"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """What ranks compare of a step that was rolled back, before they take it again."""

    purpose: Purpose = Purpose.RETRY
    """How far it had come."""
    num_exchanges: int = 0
    """How many collectives of the model it had begun."""
    num_lost: int = 0
    """Micro-batches that it took and that do not come again."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepParts:
    """The parts of training in which a step leaves something on this rank."""

    state: StepState
    gradients: Gradients
    finite: FiniteGradients
    batches: Batches
    optimizers: Sequence[ElasticOptimizer]
    snapshot: Snapshot
    keeps_all: bool
    """Everything is to be rolled back in all steps, not in guarded ones alone."""
    scaler: ElasticScaler | None


class Undoing:
    """Of the step under way."""

    def __init__(self, parts: StepParts) -> None:
        self._state = parts.state
        self._gradients = parts.gradients
        self._batches = parts.batches
        self._optimizers = parts.optimizers
        self._scaler = parts.scaler
        self._has_warned = False
        self.snapshot: Snapshot | None = None
        """Of the step under way, where everything of it is to be rolled back."""

    def retry(self, num_taken: int, *, num_exchanges: int, is_called: bool) -> Retry:
        """What is to be said of the step; asked before ``roll_back``. ``num_exchanges`` there were when it began."""
        purpose = Purpose.RETRY_CALLED if is_called else Purpose.RETRY
        return Retry(
            purpose=Purpose.RETRY_AWAITED if self._gradients.awaited else purpose,
            num_exchanges=self._gradients.sharing.num_exchanges - num_exchanges,
            num_lost=0 if self._batches.can_replay else num_taken,
        )

    def roll_back(self, num_taken: int, *, is_called: bool) -> None:
        """Nothing of the step has happened; ``is_called`` says that the model was called in it."""
        if is_called:
            self._gradients.sharing.have_shared_buffers()
        self._gradients.drop()
        self._batches.rollback(num_taken)
        if self._scaler is not None:
            self._scaler.rollback()
        self._state.begin_anew()
        if self.snapshot is not None:
            self.snapshot.restore()
        if not self._batches.can_replay and not self._has_warned:
            self._has_warned = True
            which = "the trainer was given no dataloader, and the loop's own has gone past them"
            if self._batches.loader is not None:
                which = "this dataloader cannot hand them out twice"
            _logger.warning(
                "a step was rolled back, and its samples do not come again: %s; an ElasticDataLoader can hand them out "
                "again",
                which,
            )

    def leave_out(self, *, restores: bool) -> None:
        """Optimizers were kept from the step, whose samples are consumed: nothing else stays, with ``restores``."""
        self._gradients.drop()
        if restores and self.snapshot is not None:
            self.snapshot.restore()

    def start_over(self, num_torn: int, *, passes_over: bool) -> None:
        """Nothing of a step is under way, nor left of the last one, of which ``num_torn`` micro-steps were torn.

        ``passes_over`` says that what those have taken does not come again.
        """
        if num_torn:
            settle_samples = self._batches.commit if passes_over else self._batches.rollback
            settle_samples(num_torn)
        self.forget()
        self._gradients.end_step()
        if self.snapshot is not None:
            self.snapshot.end_step()
        self._state.begin_anew()

    def forget(self) -> None:
        """Leave no gradients, and nothing that a scaler has noted of them."""
        self.forget_gradients()
        if self._scaler is not None:
            self._scaler.forget()

    def forget_gradients(self) -> None:
        """Leave none, and have no optimizer wait for its ``zero_grad()``."""
        self._gradients.drop()
        for optimizer in self._optimizers:
            optimizer.forget_zeroing()

    def why_torn(self, error: BaseException | None) -> str | None:
        """Said where an optimizer began and did not end, or one of several ended and ``error`` came."""
        state = self._state
        if not state.is_torn and (error is None or state.num_begun == 0 or state.has_committed):
            return None
        return (
            f"an optimizer failed in the middle of its step ({state.num_stepped} of {state.num_optimizers} had ended): "
            f"parameters may be half updated; resume from a checkpoint, or have all ranks call trainer.rewind()"
        )

    def why_stuck(self) -> str | None:
        """Said where a pass through the model was begun that cannot be taken back."""
        state = self._state
        if not (state.is_inside and state.has_forward and state.num_begun == 0):
            return None
        why = self._gradients.sharing.why_not_forget()
        return None if why is None else f"a step failed after the model was called, and {why}; resume from a checkpoint"
