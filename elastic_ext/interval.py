"""CheckpointInterval: when a checkpoint is due, by steps or by epochs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CheckpointInterval"]


@dataclass(frozen=True, slots=True)
class CheckpointInterval:
    """Save every ``steps`` steps or every ``epochs`` epochs; with neither, never by itself."""

    steps: int | None = None
    epochs: int | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("Only one of 'steps' or 'epochs' should be set.")
        for name, value in (("steps", self.steps), ("epochs", self.epochs)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is {value!r}; allowed: an integer >= 1, or None")

    def should_save(self, current_step: int | None = None, current_epoch: int | None = None) -> bool:
        """Whether the given step or epoch is a multiple of the interval, other than zero."""
        return _is_due(current_step, self.steps) or _is_due(current_epoch, self.epochs)


def _is_due(current: int | None, every: int | None) -> bool:
    return current is not None and every is not None and current > 0 and current % every == 0
