"""Tally: the most that the passes of a micro-step held at once, from what came and went, in order: pure.

Whoever sees memory come and go tells it: an account of tensors without memory, a profiler, an allocator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from elastic_ext.records.metrics import PassesMemory

__all__ = ["Peaks", "Stage", "Tally"]

Stage: TypeAlias = Literal["forward", "loss", "backward", "update", "after"]
"""``loss`` lasts from the end of the forward pass to the first gradient of what it gave; ``update`` is the
optimizer's step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """Bytes beside what was there before the micro-step; without gradients of parameters, but where it says so."""

    forward_bytes: int = 0
    loss_bytes: int = 0
    backward_bytes: int = 0
    with_gradients_bytes: int = 0
    """In the backward pass, with the gradients that have come by then."""
    update_bytes: int | None = None
    """Beside what the optimizer's step found; None where there was none."""

    def passes(self, *, micro_batch: int, activation_checkpoint: float) -> PassesMemory:
        """Of so many samples, with such a share of blocks computed again."""
        return PassesMemory(
            micro_batch=micro_batch,
            activation_checkpoint=activation_checkpoint,
            forward_bytes=self.forward_bytes,
            loss_bytes=self.loss_bytes,
            backward_bytes=self.backward_bytes,
            with_gradients_bytes=self.with_gradients_bytes,
        )


class Tally:
    """One micro-step's."""

    def __init__(self) -> None:
        self._held = self._gradients = 0
        self._stage: Stage = "forward"
        self._most: dict[Stage, int] = {}
        self._most_with_gradients = 0
        self._held_before_update = 0
        self._held_of_blocks: dict[int, int] = {}
        self.block: int | None = None
        """The number of the block of the model that computes now; what comes is made by it."""

    def change(self, num_bytes: int, *, block: int | None = None) -> None:
        """So much has come, or has gone; made by ``block``, if by any."""
        self._held += num_bytes
        if block is not None:
            self._held_of_blocks[block] = self._held_of_blocks.get(block, 0) + num_bytes
        self._note()

    def peak(self, num_bytes: int) -> None:
        """So much came for a moment beside what is held, and is gone."""
        self.change(num_bytes)
        self._held -= num_bytes

    def count_given(self, num_bytes: int) -> None:
        """What the model is given takes so much: where less has come so far, it was there before."""
        if self._held < num_bytes:
            self.change(num_bytes)

    def enter(self, stage: Stage) -> None:
        """What comes is of this stage."""
        self._stage = stage
        if stage == "update":
            self._held_before_update = self._held
        self._note()

    def keep_gradient(self, num_bytes: int) -> None:
        """Of what is held, so much is the gradient of a parameter, which stays."""
        self._held -= num_bytes
        self._gradients += num_bytes

    @property
    def held_of_blocks(self) -> Mapping[int, int]:
        """By the number of a block, what is held now of all that it has made."""
        return dict(self._held_of_blocks)

    @property
    def peaks(self) -> Peaks:
        most = self._most
        update = None if "update" not in most else max(most["update"] - self._held_before_update, 0)
        return Peaks(
            forward_bytes=most.get("forward", 0),
            loss_bytes=most.get("loss", 0),
            backward_bytes=most.get("backward", 0),
            with_gradients_bytes=self._most_with_gradients,
            update_bytes=update,
        )

    def _note(self) -> None:
        stage = self._stage
        self._most[stage] = max(self._most.get(stage, 0), self._held)
        if stage == "backward":
            self._most_with_gradients = max(self._most_with_gradients, self._held + self._gradients)
