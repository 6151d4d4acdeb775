"""The memory of passes at batch sizes that were never run, from lines through measured ones. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from elastic_ext.records.metrics import PassesMemory

__all__ = ["correction", "lines_through", "sizes_up_to"]


# --- what passes take at sizes that no step has had, from those that were measured -----------------------------------
# What was worked out for a size is corrected by what was measured; where nothing was worked out, straight lines go
# through the measured sizes. Each stage of a step has its own line, since the stage with the peak changes by the size:
# a line through the peaks of whole steps would be wrong by a quarter where that happens.

_MOST_TIMES = 4  # as large as the largest size that was measured: beyond, a line is a guess
_LEAST_SCALE, _MOST_SCALE = 0.5, 2.0  # of measured over worked out: beyond, what was worked out is of another model


def correction(
    measured: Sequence[PassesMemory], worked_out: Sequence[PassesMemory], gradient_bytes: int
) -> tuple[float, str]:
    """The factor from predicted to measured bytes, and why they cannot be compared, or "".

    ``measured`` has only micro-steps before which no parameter had a gradient, ``worked_out`` what was predicted.

    The factor is the larger ratio of the two largest micro-batches that were both measured and worked out. Both may be
    of one size, with other shares of blocks computed again. One size alone corrects upwards only: what was worked out
    too large there may be a part that does not grow with the size, and a smaller factor would make other sizes too
    small.
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
                f"micro-steps of {each.micro_batch} samples take {seen_bytes} bytes and {expected_bytes} were "
                "predicted, so that model_factory or loss_fn cannot be like what is trained"
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
