"""Elements copied between two memories in each of which they lie at strides of their own. Knows nothing of files.

Where elements lie is given in bytes by dimensions, outermost first, and by a run: what lies together in both memories
at each place that the dimensions lead to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

__all__ = ["Dimension", "copy_strided", "dimensions_of", "extent_of"]

_FORMATS: Mapping[int, Literal["B", "H", "I", "Q"]] = {
    1: "B",
    2: "H",
    4: "I",
    8: "Q",
}  # what a memoryview moves as one item
_WIDEST = max(_FORMATS)
# Measured, in nanoseconds: a copy, and each of its items where they lie together and where there are gaps.
_COPY, _ITEM_TOGETHER, _ITEM_APART = 350.0, 0.2, 6.0


class Dimension(NamedTuple):
    """``size`` steps, each of so many bytes in the two memories."""

    size: int
    source: int
    target: int


def dimensions_of(
    sizes: Sequence[int], source_strides: Sequence[int], target_strides: Sequence[int], item_bytes: int
) -> tuple[tuple[Dimension, ...], int]:
    """The dimensions, as few as can be and in the order of the source, and the bytes of a run; strides are in items."""
    given = [
        (source * item_bytes, target * item_bytes, size)
        for size, source, target in zip(sizes, source_strides, target_strides, strict=True)
        if size != 1
    ]
    given.sort()
    run = item_bytes
    dimensions: list[Dimension] = []  # innermost first
    for source, target, size in given:
        inner = dimensions[-1] if dimensions else None
        if inner is None and source == target == run:
            run *= size
        elif inner is not None and (source, target) == (inner.source * inner.size, inner.target * inner.size):
            dimensions[-1] = inner._replace(size=inner.size * size)
        else:
            dimensions.append(Dimension(size, source, target))
    return tuple(reversed(dimensions)), run


def extent_of(dimensions: Sequence[Dimension], run: int) -> tuple[int, int]:
    """How many bytes lie between the first and the last that are meant, in the source and in the target."""
    source = sum((dimension.size - 1) * dimension.source for dimension in dimensions)
    target = sum((dimension.size - 1) * dimension.target for dimension in dimensions)
    return source + run, target + run


def copy_strided(source: memoryview, target: memoryview, dimensions: Sequence[Dimension], run: int) -> None:
    """Copy what ``dimensions`` and ``run`` say, from the beginning of ``source`` to that of ``target``, both bytes."""
    if not dimensions:
        target[:run] = source[:run]
        return
    item = 1
    strides = [stride for dimension in dimensions for stride in dimension[1:]]
    while item < _WIDEST and not any(stride % (2 * item) for stride in (run, *strides)):
        item *= 2
    source_bytes, target_bytes = extent_of(dimensions, run)
    items_in = source[:source_bytes].cast(_FORMATS[item])
    items_out = target[:target_bytes].cast(_FORMATS[item])
    # One dimension is left to the memoryview, the others are gone through here.
    choices = [Dimension(size, *(stride // item for stride in both)) for size, *both in dimensions]
    choices.append(Dimension(run // item, 1, 1))
    best = min(choices, key=_cost_per_item)
    places = [(0, 0)]
    for dimension in choices:
        if dimension is not best:
            places = [
                (place_in + step * dimension.source, place_out + step * dimension.target)
                for place_in, place_out in places
                for step in range(dimension.size)
            ]
    size, step_in, step_out = best
    length_in, length_out = (size - 1) * step_in + 1, (size - 1) * step_out + 1
    for place_in, place_out in places:
        items_out[place_out : place_out + length_out : step_out] = items_in[place_in : place_in + length_in : step_in]


def _cost_per_item(left: Dimension) -> float:
    """What an item costs if ``left`` is the dimension left to the memoryview; its strides count items."""
    return _COPY / left.size + (_ITEM_TOGETHER if left.source == left.target == 1 else _ITEM_APART)
