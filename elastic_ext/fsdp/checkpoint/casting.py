"""Casting: numbers of one floating-point type as another, rounded to the nearest, of two as near to the even one.

NaN stays NaN, what is too large becomes infinite, and nothing is rounded twice. Without torch; numpy is imported by
who casts, and by nobody else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

if TYPE_CHECKING:
    import numpy

__all__ = ["FLOATS", "TARGETS", "Target", "caster"]

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
"""What can be cast. Complex numbers, integers and truth values stay as they are."""


def caster(source: str, target: str) -> Callable[[memoryview], memoryview]:
    """What gives numbers of the type ``source``, as little-endian bytes, as ``target``, one of TARGETS or the same."""
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
    """The numbers in a type that numpy has, exactly."""
    array: _Array
    if source == "BF16":
        array = (numpy.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        array = numpy.frombuffer(data, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[source])
    return array


def _narrowed(numpy: Any, array: _Array, target: str) -> _Array:
    """The numbers as ``target``; BF16 as its bits."""
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
    """The upper halves of F32, rounded; of NaN the quiet one."""
    bits: _Array = array.view("<u4")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    halves: _Array = numpy.where(numpy.isnan(array), quiet, rounded).astype("<u2")
    return halves


def _bytes(numpy: Any, array: _Array) -> memoryview:
    return memoryview(numpy.ascontiguousarray(array).view("u1").data) if array.size else memoryview(b"")


def _small_value(name: str, byte: int) -> float:
    """The number that a byte is."""
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
