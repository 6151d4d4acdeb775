"""What passes take at sizes that no step has had, by straight lines through those that were measured: pure.

Each phase has its own line, since the highest one changes with the size: a line through what is highest in all would
be wrong by a quarter where that happens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from elastic_ext.job_facts import PassesMemory

__all__ = ["lines_through", "sizes_up_to"]

_MOST_TIMES = 4  # the largest that was measured: beyond, a line is a guess


def lines_through(measured: Sequence[PassesMemory], sizes: Iterable[int]) -> tuple[PassesMemory, ...]:
    """What was measured, and what follows for other sizes of each share of blocks that are computed again."""
    found: list[PassesMemory] = []
    wanted = sorted(set(sizes))
    for ratio in sorted({each.activation_checkpoint for each in measured}):
        known = {each.micro_batch: each for each in measured if each.activation_checkpoint == ratio}
        points = [known[size] for size in sorted(known)]
        limit = _MOST_TIMES * points[-1].micro_batch
        found += points
        found += [_at(points, size) for size in wanted if size not in known and size <= limit]
    return tuple(found)


def sizes_up_to(share: int, *more: int) -> list[int]:
    """Powers of two, and ``share`` itself, the present sizes first where they are given."""
    sizes = [size for size in more if 0 < size <= share]
    power = 1
    while power < share:
        sizes.append(power)
        power *= 2
    return list(dict.fromkeys([*sizes, share]))


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
    """The two that a line for this size goes through, in order; the same one twice where there is one alone."""
    if len(points) == 1:
        return points[0], points[0]
    for at in range(1, len(points)):
        if size <= points[at].micro_batch:
            return points[at - 1], points[at]
    return points[-2], points[-1]
