"""Rewinding: a training state into which an earlier checkpoint is loaded while training is under way.

Which checkpoint that is, and what is saved afterwards, is in checkpoints.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from .errors import CheckpointError
from .fsdp.checkpoint.opened import Opened
from .training_state import Resumed, TrainingState

__all__ = ["Rewinding"]


class Rewinding:
    """What a checkpoint is loaded into, on one rank."""

    def __init__(self, state: TrainingState, *, replays: bool, on_begin: Callable[[], None]) -> None:
        self._state = state
        self._replays = replays
        self._on_begin = on_begin

    def check(self, opened: Opened) -> None:
        """Raise where the checkpoint does not fit, or its place in the data cannot be gone back to."""
        why_not = self._state.why_not_replay(opened) if self._replays else None
        if why_not is not None:
            raise CheckpointError(why_not)
        self._state.check(opened)

    def refilled(self, opened: Opened, touched: Collection[str]) -> set[str]:
        """Of what another checkpoint has ``touched``, what this one would not leave a part of."""
        return self._state.refilled(opened, touched)

    def load(self, opened: Opened) -> Resumed:
        """Fill all tensors, as when a run is resumed; until all is done training cannot go on."""
        self._on_begin()
        return self._state.load(opened)
