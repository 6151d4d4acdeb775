"""What memory passes take at sizes that were never run, from lines through measured ones. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from elastic_ext.records.metrics import PassesMemory

__all__ = ["Peaks", "Stage", "Tally", "correction", "lines_through", "sizes_up_to"]


# --- what passes take at sizes that no step has had, from those that were measured -----------------------------------
# What was worked out for a size is corrected by what was measured; where nothing was worked out, straight lines go
# through the measured sizes. Each stage of a step has its own line, since the stage with the peak changes by the size:
# a line through the peaks of whole steps would be wrong by a quarter where that happens.

_MOST_TIMES = 4  # the largest that was measured: beyond, a line is a guess
_LEAST_SCALE, _MOST_SCALE = 0.5, 2.0  # beyond, what was worked out is of another model


def correction(
    measured: Sequence[PassesMemory], worked_out: Sequence[PassesMemory], gradient_bytes: int
) -> tuple[float, str]:
    """The factor from worked out to measured bytes, and why there is none; by measured steps with new gradients.

    The factor is the larger ratio of the two largest sizes that were both measured and worked out. One size alone
    corrects upwards only: what was worked out too large there may be a part that does not grow with the size, and a
    smaller factor would make other sizes too small.
    """
    known = {(each.micro_batch, each.activation_checkpoint): each for each in worked_out}
    ratios: list[tuple[int, float]] = []
    for each in sorted(measured, key=lambda one: -one.micro_batch):
        expected = known.get((each.micro_batch, each.activation_checkpoint))
        if expected is None:
            continue
        seen_bytes = each.most_bytes(gradient_bytes, has_gradients=False)
        expected_bytes = max(expected.most_bytes(gradient_bytes, has_gradients=False), 1)
        if not _LEAST_SCALE <= seen_bytes / expected_bytes <= _MOST_SCALE:
            return 1.0, (
                f"steps of {each.micro_batch} samples take {seen_bytes} bytes and {expected_bytes} were worked out, as "
                "of another model than the one that is trained"
            )
        ratios.append((each.micro_batch, seen_bytes / expected_bytes))
    largest = ratios[:2]
    scale = max((ratio for _, ratio in largest), default=1.0)
    has_two_sizes = len({size for size, _ in largest}) == 2
    return (scale if has_two_sizes else max(scale, 1.0)), ""


def lines_through(measured: Sequence[PassesMemory], sizes: Iterable[int]) -> tuple[PassesMemory, ...]:
    """Measured passes, and passes at other sizes on lines through them, for each share of blocks computed again."""
    found: list[PassesMemory] = []
    wanted = sorted(set(sizes))
    for ratio in sorted({each.activation_checkpoint for each in measured}):
        known = {each.micro_batch: each for each in measured if each.activation_checkpoint == ratio}
        points = [known[size] for size in sorted(known)]
        limit = _MOST_TIMES * points[-1].micro_batch
        found += points
        found += [_at(points, size) for size in wanted if size not in known and size <= limit]
    return tuple(found)


def sizes_up_to(largest: int, *more: int) -> list[int]:
    """Micro-batches to work out: powers of two up to ``largest``, and ``largest``; the sizes ``more`` come first."""
    sizes = [size for size in more if 0 < size <= largest]
    power = 1
    while power < largest:
        sizes.append(power)
        power *= 2
    return list(dict.fromkeys([*sizes, largest]))


def _at(points: Sequence[PassesMemory], size: int) -> PassesMemory:
    below, above = _neighbours(points, size)

    def value(first: int, second: int) -> int:
        if below is above:  # one point: in proportion, which is too much rather than too little for a larger size
            return -(-first * size // above.micro_batch)
        slope = (second - first) / (above.micro_batch - below.micro_batch)
        line = first + slope * (size - below.micro_batch)
        is_beyond = size > above.micro_batch
        return max(round(line), second if is_beyond else 0)  # nothing becomes less in a larger micro-batch

    with_gradients = None
    if below.with_gradients_bytes is not None and above.with_gradients_bytes is not None:
        with_gradients = value(below.with_gradients_bytes, above.with_gradients_bytes)
    return replace(
        above,
        micro_batch=size,
        forward_bytes=value(below.forward_bytes, above.forward_bytes),
        loss_bytes=value(below.loss_bytes, above.loss_bytes),
        backward_bytes=value(below.backward_bytes, above.backward_bytes),
        with_gradients_bytes=with_gradients,
    )


def _neighbours(points: Sequence[PassesMemory], size: int) -> tuple[PassesMemory, PassesMemory]:
    """The two measured sizes that the line for this size goes through, in order; one of them twice if alone."""
    if len(points) == 1:
        return points[0], points[0]
    for at in range(1, len(points)):
        if size <= points[at].micro_batch:
            return points[at - 1], points[at]
    return points[-2], points[-1]


# --- the most that the passes of a micro-step held at once, from what came and went, in order ------------------------
# Whoever sees memory come and go tells it: an account of tensors without memory, a profiler, an allocator.

Stage: TypeAlias = Literal["forward", "loss", "backward", "update", "after"]
"""A stage of a micro-step: ``loss`` is up to the first gradient of the outputs, ``update`` is the optimizer's step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """The most bytes that each stage of a micro-step held beside what was there before it.

    Gradients of parameters are not counted, but where a field says so.
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


class Tally:
    """Counts the memory that comes and goes in one micro-step, by stage and by block."""

    def __init__(self) -> None:
        self._held = self._gradients = 0
        self._stage: Stage = "forward"
        self._most: dict[Stage, int] = {}
        self._most_with_gradients = 0
        self._held_before_update = 0
        self._held_of_blocks: dict[int, int] = {}
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
        """Count the model's inputs as ``num_bytes``: where less has come so far, they were there before."""
        if self._held < num_bytes:
            self.change(num_bytes)

    def enter(self, stage: Stage) -> None:
        """Begin a stage of the micro-step."""
        self._stage = stage
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
