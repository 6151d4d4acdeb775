"""Elements copied between strided memories, and cast from one floating-point type to another. Knows
nothing of files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

if TYPE_CHECKING:
    import numpy

__all__ = ["FLOATS", "TARGETS", "Dimension", "Target", "caster", "copy_strided", "dimensions_of", "extent_of"]


# --- elements copied between two memories in each of which they lie at strides of their own --------------------------
# Knows nothing of files.
#
# Where elements lie is given in bytes by dimensions, outermost first, and by a run: what lies together in both memories
# at each place that the dimensions lead to.

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
    """A loop of a strided copy: ``size`` steps, each of ``source`` bytes in one memory and ``target`` in the other."""

    size: int
    source: int
    target: int


def dimensions_of(
    sizes: Sequence[int], source_strides: Sequence[int], target_strides: Sequence[int], item_bytes: int
) -> tuple[tuple[Dimension, ...], int]:
    """The fewest dimensions of a strided copy, in the source's order, and its run in bytes; strides count items."""
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
    """How many bytes a strided copy spans, from its first to its last, in the source and in the target."""
    source = sum((dimension.size - 1) * dimension.source for dimension in dimensions)
    target = sum((dimension.size - 1) * dimension.target for dimension in dimensions)
    return source + run, target + run


def copy_strided(source: memoryview, target: memoryview, dimensions: Sequence[Dimension], run: int) -> None:
    """Copy runs of ``run`` bytes at each step of ``dimensions``, from ``source``'s beginning to ``target``'s."""
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
    """The nanoseconds that an item of a copy costs if ``left``, in items, is the dimension that a memoryview copies."""
    return _COPY / left.size + (_ITEM_TOGETHER if left.source == left.target == 1 else _ITEM_APART)


# --- numbers of one floating-point type as another, rounded to the nearest, of two as near to the even one -----------
# NaN stays NaN, what is too large becomes infinite, and nothing is rounded twice. Without torch; numpy is imported by
# who casts, and by nobody else.

Target: TypeAlias = Literal["F32", "F16", "BF16"]
TARGETS: tuple[Target, ...] = get_args(Target)

_Array: TypeAlias = "numpy.ndarray[Any, numpy.dtype[Any]]"

# Bits of the exponent and of the mantissa, what is added to the exponent, and whether there are infinities.
_SMALL: Mapping[str, tuple[int, int, int, bool]] = MappingProxyType(
    {
        "F8_E4M3": (4, 3, 7, False),
        "F8_E5M2": (5, 2, 15, True),
        "F8_E4M3FNUZ": (4, 3, 8, False),
        "F8_E5M2FNUZ": (5, 2, 16, False),
        "F8_E8M0": (8, 0, 127, False),
    }
)
FLOATS = frozenset({"F64", "F32", "F16", "BF16", *_SMALL})
"""The types that can be cast; complex numbers, integers and booleans stay as they are."""


def caster(source: str, target: str) -> Callable[[memoryview], memoryview]:
    """A function that casts little-endian numbers from type ``source`` to ``target``, one of TARGETS or the same."""
    if source == target:
        return lambda data: data
    assert source in FLOATS and target in TARGETS
    import numpy

    table: _Array | None = None
    if source in _SMALL:
        values = numpy.array([_small_value(source, byte) for byte in range(256)], "<f8")
        table = _narrowed(numpy, values, target)

    def cast(data: memoryview) -> memoryview:
        if table is not None:
            return _bytes(numpy, table[numpy.frombuffer(data, "u1")])
        return _bytes(numpy, _narrowed(numpy, _wide(numpy, data, source), target))

    return cast


def _wide(numpy: Any, data: memoryview, source: str) -> _Array:
    """The numbers in a type that numpy has and that holds them exactly."""
    array: _Array
    if source == "BF16":
        array = (numpy.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        array = numpy.frombuffer(data, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[source])
    return array


def _narrowed(numpy: Any, array: _Array, target: str) -> _Array:
    """Numbers rounded to the type ``target``; BF16 as its bits."""
    with numpy.errstate(all="ignore"):  # what overflows, and a signalling NaN
        if target != "BF16":
            return array.astype("<f4" if target == "F32" else "<f2", copy=False)
        return _as_bfloat16(numpy, _to_odd(numpy, array) if array.dtype == "<f8" else array.astype("<f4", copy=False))


def _to_odd(numpy: Any, array: _Array) -> _Array:
    """F64 as F32 towards zero, the last bit set where that is not exact: rounded on, it is as if rounded once."""
    near = array.astype("<f4")
    bits: _Array = near.view("<u4")
    is_inexact = (near.astype("<f8") != array) & ~numpy.isnan(array)
    bits = bits - (is_inexact & (numpy.abs(near.astype("<f8")) > numpy.abs(array)))  # an infinity: the largest number
    odd: _Array = (bits | is_inexact).astype("<u4").view("<f4")
    return odd


def _as_bfloat16(numpy: Any, array: _Array) -> _Array:
    """F32 rounded to BF16, as bits: the upper halves, rounded; a NaN becomes quiet."""
    bits: _Array = array.view("<u4")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    halves: _Array = numpy.where(numpy.isnan(array), quiet, rounded).astype("<u2")
    return halves


def _bytes(numpy: Any, array: _Array) -> memoryview:
    return memoryview(numpy.ascontiguousarray(array).view("u1").data) if array.size else memoryview(b"")


def _small_value(name: str, byte: int) -> float:
    """The number that a byte stands for in an 8-bit floating-point type."""
    exponent_bits, mantissa_bits, bias, has_infinity = _SMALL[name]
    if name == "F8_E8M0":  # a power of two, without a sign
        return math.nan if byte == 0xFF else math.ldexp(1.0, byte - bias)
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte & 0x7F) >> mantissa_bits, byte & ((1 << mantissa_bits) - 1)
    is_highest = exponent == (1 << exponent_bits) - 1
    if name.endswith("FNUZ"):
        if byte == 0x80:
            return math.nan
    elif has_infinity and is_highest:
        return sign * math.inf if mantissa == 0 else math.nan
    elif is_highest and mantissa == (1 << mantissa_bits) - 1:
        return math.copysign(math.nan, sign)
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)
