"""StepState: where the step under way stands; one object that the trainer writes and its optimizers read.

What these words mean is said in training/trainer.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elastic_ext.training.remarks import Remarks

if TYPE_CHECKING:
    import torch

__all__ = ["StepState"]


@dataclass(slots=True)
class StepState:
    """Where the step under way stands on this rank, from one boundary to the next."""

    number: int = 0
    """The number of the step; a step that is taken again has another one."""
    num_micro_steps: int = 1
    """The number of micro-steps of the step under way, or of the one that ended last."""
    index: int = 0
    """The index, from 0, of the micro-step under way, or of the next one."""
    is_inside: bool = False
    """Whether the loop is within ``with trainer.step()``."""
    is_last: bool = False
    """Whether the micro-step under way is the one that commits the step."""
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
        self.is_last = self.is_guarded = self.is_shared = False
