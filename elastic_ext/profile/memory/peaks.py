"""The most memory that each stage of a micro-step held at once, from what came and went, in order. Pure.

Whoever sees memory come and go tells it: the analysis, which runs on fake tensors; a profiler; an allocator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from elastic_ext.records.metrics import PassesMemory

__all__ = ["PeakTally", "Peaks", "Stage"]

Stage: TypeAlias = Literal["forward", "loss", "backward", "update", "after"]
"""A stage of a micro-step: ``loss`` is up to the first gradient of the outputs, ``update`` is the optimizer's step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """The most bytes that each stage of a micro-step held beside what was there before it.

    The model's inputs are counted, wherever they were made. Gradients of parameters are not, but where a field says so.
    """

    forward_bytes: int = 0
    loss_bytes: int = 0
    backward_bytes: int = 0
    with_gradients_bytes: int = 0
    """The most bytes in the backward pass together with the gradients that had come by then."""
    update_bytes: int | None = None
    """The most bytes in the optimizer's step beside those before it; None where there was no such step."""

    def passes(self, *, micro_batch: int, activation_checkpoint: float) -> PassesMemory:
        """These peaks as those of a micro-batch of so many samples, with a share of blocks computed again."""
        return PassesMemory(
            micro_batch=micro_batch,
            activation_checkpoint=activation_checkpoint,
            forward_bytes=self.forward_bytes,
            loss_bytes=self.loss_bytes,
            backward_bytes=self.backward_bytes,
            with_gradients_bytes=self.with_gradients_bytes,
        )


class PeakTally:
    """Keeps the peak of each stage of one micro-step, and what each block holds, by changes that it is told of."""

    def __init__(self) -> None:
        self._held = self._gradients = 0
        self._stage: Stage = "forward"
        self._most: dict[Stage, int] = {}
        self._most_with_gradients = 0
        self._held_before_update = 0
        self._held_of_blocks: dict[int, int] = {}
        self.held_before_passes: int | None = None
        """Bytes that were held as the first forward pass began; None before it."""
        self.block: int | None = None
        """The number of the model's block that computes now, and makes what comes; None outside of blocks."""

    def change(self, num_bytes: int, *, block: int | None = None) -> None:
        """Count memory that has come, or has gone where negative; made by ``block``, if by any."""
        self._held += num_bytes
        if block is not None:
            self._held_of_blocks[block] = self._held_of_blocks.get(block, 0) + num_bytes
        self._note()

    def peak(self, num_bytes: int) -> None:
        """Count memory that was taken for a moment beside what is held, and was given back."""
        self.change(num_bytes)
        self._held -= num_bytes

    def count_given(self, num_bytes: int) -> None:
        """Count the model's inputs, of ``num_bytes``, unless they were made within this tally.

        Where less than ``num_bytes`` has come so far, the inputs were there before the micro-step, and are added.
        """
        if self._held < num_bytes:
            self.change(num_bytes)

    def enter(self, stage: Stage) -> None:
        """Begin a stage of the micro-step."""
        self._stage = stage
        if stage == "forward" and self.held_before_passes is None:
            self.held_before_passes = self._held
        if stage == "update":
            self._held_before_update = self._held
        self._note()

    def keep_gradient(self, num_bytes: int) -> None:
        """Count some of the held memory as a parameter's gradient, which stays."""
        self._held -= num_bytes
        self._gradients += num_bytes

    @property
    def held_of_blocks(self) -> Mapping[int, int]:
        """Bytes held now of all that each block has made, by the block's number."""
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
