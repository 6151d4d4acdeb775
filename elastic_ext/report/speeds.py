"""Tokens per second and MFU of a rank's windows, by what lies beside them in the run directory: pure."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_ext.profile.summary import flops_share, num_tokens, training_seconds
from elastic_ext.records.metrics import NodeCalibration, StepCensus, StepWindow

__all__ = ["Speeds"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """What one has to know of a rank to tell them; None for what nobody has written."""

    num_replicas: int | None = None
    census: StepCensus | None = None
    best: NodeCalibration | None = None
    """Of the rank's node."""

    def num_tokens(self, window: StepWindow) -> float:
        """Of all ranks together."""
        return num_tokens(window, num_replicas=self.num_replicas)

    def tokens_per_second(self, window: StepWindow) -> float | None:
        """Of all ranks together, over the time of training."""
        tokens, seconds = self.num_tokens(window), training_seconds(window)
        return tokens / seconds if tokens > 0 and seconds > 0 else None

    def mfu(self, window: StepWindow) -> float | None:
        """The part that the model did of what the device could have done at best, over the time of training."""
        return flops_share(window, self.census, self.best, num_replicas=self.num_replicas)

    def ideal_seconds(self, window: StepWindow) -> float:
        """In which the device, at its best, would have done the model's arithmetic; 0 where that is not known."""
        return (self.mfu(window) or 0.0) * training_seconds(window)
