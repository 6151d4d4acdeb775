"""StepState: where the step under way stands; one object that the trainer writes and its optimizers read.

What these words mean is said in training/trainer.py. The phases of steps and what leads from one to the next are the
table ``TRANSITIONS``: what it does not list does not happen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from elastic_ext.training.remarks import Remarks

if TYPE_CHECKING:
    import torch

__all__ = ["TRANSITIONS", "StepEvent", "StepPhase", "StepState"]


class StepPhase(IntEnum):
    """Where a rank's loop stands in its steps."""

    is_inside: bool
    """Whether the loop is within ``with trainer.step()``."""
    is_last: bool
    """Whether it is within the micro-step that ends the step."""

    def __new__(cls, number: int, is_inside: bool = False, is_last: bool = False) -> StepPhase:
        self = int.__new__(cls, number)
        self._value_ = number
        self.is_inside, self.is_last = is_inside, is_last
        return self

    UNBEGUN = 0
    """Before the first step."""
    IDLE = 1
    """Between two steps, after one that has ended."""
    TAKEN_BACK = 2
    """Between two steps, after one that was taken back."""
    PARTIAL = 3
    """Between two micro-steps of a step."""
    OWING = 4
    """After a step that has ended, before its boundary, which an exception kept this rank from passing."""
    TORN = 5
    """After a step that left parameters half updated, or while a checkpoint is loaded: going back to one helps."""
    LOST = 6
    """After a failure that no checkpoint mends in this process."""
    GATHERING = 7, True
    """Within a micro-step after which the step goes on."""
    ENDING = 8, True, True
    """Within the micro-step that ends a step."""
    UNDONE = 9, True
    """Within a micro-step whose step was taken back."""


class StepEvent(IntEnum):
    """What leads from one phase of a step to another."""

    ENTER = 0
    """A micro-step begins after which the step goes on."""
    ENTER_LAST = 1
    """The micro-step begins that ends the step."""
    LEAVE = 2
    """A micro-step has ended, and the step has not."""
    END = 3
    """The step has ended."""
    BREAK_OFF = 4
    """The step has ended, and an exception leaves it before its boundary."""
    PASS = 5
    """The boundary that was owed is passed."""
    TAKE_BACK = 6
    """The step is taken back."""
    LEAVE_UNDONE = 7
    """The micro-step whose step was taken back is left."""
    TEAR = 8
    """Parameters are half updated, or a checkpoint begins to be loaded."""
    GIVE_UP = 9
    """Training cannot go on in this process."""
    LOAD = 10
    """A checkpoint was loaded, and the samples since do not come again."""
    LOAD_TO_REPLAY = 11
    """A checkpoint was loaded, and the samples since come again."""


_BETWEEN = (StepPhase.UNBEGUN, StepPhase.IDLE, StepPhase.TAKEN_BACK)
_WITHIN = (StepPhase.GATHERING, StepPhase.ENDING)


def _to(phase: StepPhase, *before: StepPhase) -> dict[StepPhase, StepPhase]:
    return dict.fromkeys(before, phase)


TRANSITIONS: Mapping[StepEvent, Mapping[StepPhase, StepPhase]] = {
    StepEvent.ENTER: _to(StepPhase.GATHERING, *_BETWEEN, StepPhase.PARTIAL),
    StepEvent.ENTER_LAST: _to(StepPhase.ENDING, *_BETWEEN, StepPhase.PARTIAL),
    StepEvent.LEAVE: _to(StepPhase.PARTIAL, *_WITHIN),  # the last one too, where the step is to be taken back
    StepEvent.END: _to(StepPhase.IDLE, StepPhase.ENDING),
    StepEvent.BREAK_OFF: _to(StepPhase.OWING, StepPhase.ENDING),
    StepEvent.PASS: _to(StepPhase.IDLE, StepPhase.OWING),
    StepEvent.TAKE_BACK: _to(StepPhase.TAKEN_BACK, StepPhase.PARTIAL) | _to(StepPhase.UNDONE, *_WITHIN),
    StepEvent.LEAVE_UNDONE: _to(StepPhase.TAKEN_BACK, StepPhase.UNDONE),
    StepEvent.TEAR: _to(StepPhase.TORN, *_BETWEEN, StepPhase.ENDING, StepPhase.TORN),
    StepEvent.GIVE_UP: _to(StepPhase.LOST, *_BETWEEN, *_WITHIN, StepPhase.PARTIAL, StepPhase.OWING),
    StepEvent.LOAD: _to(StepPhase.IDLE, StepPhase.TORN),
    StepEvent.LOAD_TO_REPLAY: _to(StepPhase.TAKEN_BACK, StepPhase.TORN),
}
"""The phase that follows each event, by the phase before; what is not listed does not happen."""


@dataclass(slots=True)
class StepState:
    """Where the step under way stands on this rank, from one boundary to the next."""

    number: int = 0
    """The number of the step; a step that is taken again has another one."""
    num_micro_steps: int = 1
    """The number of micro-steps of the step under way, or of the one that ended last."""
    index: int = 0
    """The index, from 0, of the micro-step under way, or of the next one."""
    phase: StepPhase = StepPhase.UNBEGUN
    """Where the loop stands."""
    weight: float = 1.0
    """The weight of this micro-batch's mean loss in the gradient of the step."""
    has_forward: bool = False
    """Whether the model has been called with gradients, in this micro-step."""
    has_backward: bool = False
    """Whether a gradient has come back to the model's outputs, in this micro-step."""
    is_exact: bool = False
    """Whether ``trainer.backward`` was used in this micro-step."""
    is_guarded: bool = False
    """Whether gradients are shared after the step's passes, once memory has sufficed for those on all ranks."""
    is_shared: bool = False
    """Whether the gradients of a guarded step have been shared."""
    keeps_batch: bool = False
    """Whether steps have a global batch; else every micro-step commits, as a loop without a trainer would."""
    before_optimizer: Callable[[], None] | None = None
    """Called before an optimizer steps; raises where gradients are not the step's. None where no check is needed."""
    check_batch: Callable[[], None] | None = None
    """Raises where the micro-step's batch was not taken from the trainer's dataloader; None where it was."""
    on_cleared: Callable[[], None] | None = None
    """Called when the gradients of the step before are cleared; None where nobody waits for that."""
    before_change: Callable[[], None] | None = None
    """Called before parameters or optimizer state change, and waits for staging; None where nothing is staged."""
    on_gradients: Callable[[Iterable[torch.Tensor], torch.Tensor | None], None] | None = None
    """Called with parameters before their gradients, which are those of the step, are clipped or used, and with the
    factor that these are still multiplied with; None where nobody looks at them."""
    looks_from: int = sys.maxsize
    """The number of the first step in which gradients are checked to be finite."""
    may_step: Callable[[Iterable[torch.Tensor]], bool] = lambda parameters: True
    """Whether an optimizer may use its parameters' gradients; asked in steps that are checked (``looks_from``)."""
    on_left_out: Callable[[], None] | None = None
    """Called when a scaler has kept an optimizer from stepping."""
    num_optimizers: int = 1
    """Optimizers that have to step for a step to commit."""
    num_begun: int = 0
    """Optimizers that have begun to change parameters in this step."""
    num_stepped: int = 0
    """Optimizers that have finished stepping in this step."""
    num_scheduled: int = 0
    """How often schedules have stepped, since training began in this process."""
    remarks: Remarks = field(default_factory=Remarks)
    """What is logged about the loop, each remark once."""

    @property
    def is_torn(self) -> bool:
        """Whether an optimizer began to step and did not end."""
        return self.num_begun > self.num_stepped

    @property
    def has_committed(self) -> bool:
        return self.num_stepped == self.num_optimizers

    def begin_anew(self) -> None:
        """Begin the state of the next step, after one has ended or was rolled back."""
        self.number += 1
        self.index = self.num_begun = self.num_stepped = 0
        self.is_guarded = self.is_shared = False

    def move(self, event: StepEvent) -> None:
        """Come to the phase that follows ``event``."""
        try:
            self.phase = TRANSITIONS[event][self.phase]
        except KeyError:
            raise AssertionError(f"{event.name} of a step that is {self.phase.name}") from None
