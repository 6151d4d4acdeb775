"""The phases that a rank's time is divided into: pure.

Every moment is of one phase, so that what a rank spent in all of them adds up to the time that has passed.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["COMPUTING", "IN_STEPS", "LEAST_SECONDS", "WAITING", "Phase"]

LEAST_SECONDS = 1e-9
"""Less is nothing: no clock tells it."""


class Phase(IntEnum):
    """What a rank spends time on; their names stand in files."""

    DATA = 0
    """Waiting for a batch."""
    TRANSFER = 1
    """From the host's memory to the accelerator's."""
    FORWARD = 2
    """The model's forward pass, and the loss."""
    BACKWARD = 3
    COMMUNICATION = 4
    """Waiting for gradients on their way between ranks, when nothing is left to compute meanwhile: what is exposed."""
    OPTIMIZER = 5
    STEP = 6
    """Within steps that were not looked at more closely."""
    OTHER = 7
    """What the loop does besides: logging, metrics, learning-rate schedules."""
    AGREEMENT = 8
    """Words with the other ranks at boundaries."""
    CHANGE = 9
    """A config coming into force."""
    CHECKPOINT = 10
    """Training waits for a checkpoint."""
    ROLLED_BACK = 11
    """Steps that were taken back."""
    OUTSIDE = 12
    """Outside of epochs: evaluation, for one."""
    STARTUP = 13
    """From the start of the process to the first step."""

    @property
    def label(self) -> str:
        """What it is called in files and words."""
        return self.name.lower().replace("_", "-")


COMPUTING = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
WAITING = (Phase.COMMUNICATION, Phase.AGREEMENT)
"""For other ranks."""
IN_STEPS = (
    Phase.DATA,
    Phase.TRANSFER,
    *COMPUTING,
    Phase.COMMUNICATION,
    Phase.STEP,
    Phase.OTHER,
    Phase.AGREEMENT,
)
"""Of a step that nothing out of the ordinary befalls."""
