"""Counts: how far training has come; the words are explained in trainer.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .noise_scale import NoiseScale

__all__ = ["Counts"]


@dataclass(slots=True)
class Counts:
    """The same on every rank, but for what each has seen by itself."""

    global_step: int = 0
    num_steps: int = 0
    epoch: int = 0
    start_epoch: int = 0
    is_in_epoch: bool = False
    """Within ``with trainer.epoch()``."""
    unfinished_epoch: int | None = None
    """The epoch whose loop was left before its end, where no other has begun since."""
    reference_batch: int | None = None
    """The global batch of the first start: what rates were chosen for."""
    noise_scale: NoiseScale = field(default_factory=NoiseScale)
    """What was seen of the noise of gradients, where anybody looks."""
    num_boundaries: int = 0
    """Steps that ended since this run began, whether they committed or not."""
    num_samples: int = 0
    """Of those steps, over all ranks, as far as they are known."""
    num_not_finite: int = 0
    """Steps in which this rank has seen gradients or a loss that are not finite, since this run began,"""
    num_skipped: int = 0
    """... and those of them that were left out for it."""

    @property
    def epoch_to_resume(self) -> int:
        """The epoch with which a run begins that resumes from here: an unfinished one, or else ``epoch``."""
        return self.epoch if self.unfinished_epoch is None else self.unfinished_epoch

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "global_step": self.global_step,
            "num_steps": self.num_steps,
            "epoch": self.epoch_to_resume,
            "reference_batch": self.reference_batch,
        }
        if self.noise_scale.num_steps > 0:
            state["noise_scale"] = self.noise_scale.state_dict()
        return state

    def remark_on_beginning(self, epoch: int) -> str | None:
        """What is odd about the first epoch of a run that was resumed, None where nothing is."""
        if epoch >= self.start_epoch:
            return None
        return (
            f"training goes on in epoch {self.start_epoch}, and the loop begins with epoch {epoch}: it would train "
            f"{self.start_epoch - epoch} epochs again; loop over range(trainer.start_epoch, num_epochs)"
        )

    def undo(self, global_step: int) -> None:
        """Have the steps after this one not be counted; the epoch goes on where it is, or comes next."""
        self.num_steps = max(self.num_steps - (self.global_step - global_step), 0)
        self.global_step = global_step
        self.go_on_in(self.epoch)

    def go_on_in(self, epoch: int) -> None:
        """What comes is of this epoch."""
        self.epoch = self.start_epoch = epoch

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.global_step, self.num_steps = state["global_step"], state["num_steps"]
        self.unfinished_epoch = None
        self.go_on_in(state["epoch"])
        self.reference_batch = state["reference_batch"]
        self.noise_scale.load_state_dict(state.get("noise_scale", {}))
