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
    """One rank's step, from one boundary to the next."""

    number: int = 0
    """Another one for every step, and for one that is taken again."""
    num_micro_steps: int = 1
    index: int = 0
    """Of the micro-step under way, or of the next one."""
    is_inside: bool = False
    """Within ``with trainer.step()``."""
    is_last: bool = False
    """Within the micro-step that commits."""
    weight: float = 1.0
    """What a mean loss of this micro-batch counts."""
    has_forward: bool = False
    """The model has been called with gradients, in this micro-step."""
    has_backward: bool = False
    """A gradient has come back to the model's outputs, in this micro-step."""
    is_exact: bool = False
    """``trainer.backward`` was used in this micro-step."""
    is_guarded: bool = False
    """Its gradients are shared after its passes, once memory has sufficed for them on all ranks."""
    is_shared: bool = False
    """That has been done."""
    keeps_batch: bool = False
    """Steps have a global batch of their own; else every micro-step commits, as a loop without a trainer would."""
    before_optimizer: Callable[[], None] | None = None
    """Raises where the gradients are not those of the step; None where they cannot be others."""
    check_batch: Callable[[], None] | None = None
    """Raises where what is trained on was not taken from the trainer's dataloader; None where it was."""
    on_cleared: Callable[[], None] | None = None
    """Told that what the step before has left is gone; None where nobody waits for that."""
    before_change: Callable[[], None] | None = None
    """Returns once parameters and optimizer state may change; None where nobody needs them as they are."""
    on_gradients: Callable[[Iterable[torch.Tensor], torch.Tensor | None], None] | None = None
    """Told of parameters whose gradients are those of the step, before these are clipped or used, and of what they are
    still multiplied with; None where nobody looks at them."""
    looks_from: int = sys.maxsize
    """In steps with this number and later ones it is looked for gradients that are not finite."""
    may_step: Callable[[Iterable[torch.Tensor]], bool] = lambda parameters: True
    """Asked in those steps, before an optimizer uses the gradients of its parameters."""
    on_left_out: Callable[[], None] | None = None
    """Called when a scaler has kept an optimizer from the step."""
    num_optimizers: int = 1
    num_begun: int = 0
    """Optimizers that have begun to change parameters in this step."""
    num_stepped: int = 0
    """Those of them that have ended."""
    num_scheduled: int = 0
    """How often schedules have stepped, since training began in this process."""
    remarks: Remarks = field(default_factory=Remarks)
    """What is said once about the loop."""

    @property
    def is_torn(self) -> bool:
        """Whether an optimizer began and did not end."""
        return self.num_begun > self.num_stepped

    @property
    def has_committed(self) -> bool:
        return self.num_stepped == self.num_optimizers

    def begin_anew(self) -> None:
        """A step ended or was rolled back: nothing of the next one has happened."""
        self.number += 1
        self.index = self.num_begun = self.num_stepped = 0
        self.is_last = self.is_guarded = self.is_shared = False
