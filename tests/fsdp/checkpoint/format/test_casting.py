"""Casts between floating-point types: with the bits of torch's where it rounds once, of exact fractions where not."""

from __future__ import annotations

import math
import random
import struct
from fractions import Fraction

import pytest
import torch

from elastic_ext.fsdp.checkpoint.format.copy import FLOATS, TARGETS, Target, caster
from elastic_ext.fsdp.checkpoint.format.json_text import ITEM_BYTES
from elastic_ext.fsdp.value_encoding import dtype_of


def every_bit_pattern(dtype: str, seed: int = 0) -> torch.Tensor:
    """All numbers of a type, or of a wide one many: of all exponents, and on both sides of where rounding turns."""
    item_bytes = ITEM_BYTES[dtype]
    if item_bytes <= 2:
        data = b"".join(number.to_bytes(item_bytes, "little") for number in range(1 << (8 * item_bytes)))
        return torch.frombuffer(bytearray(data), dtype=dtype_of(dtype))
    draw = random.Random(seed)
    words = [draw.getrandbits(8 * item_bytes) for _ in range(50_000)]
    cut = 16 if dtype == "F32" else 45  # the last bit that BF16 keeps, and ties at it
    words += [(word >> cut << cut) + (1 << (cut - 1)) + near for word in words[:5000] for near in (-1, 0, 1)]
    specials = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 6e-8, 65504.0, 65519.9, 65520.0, 3.4e38]
    data = b"".join((word % (1 << (8 * item_bytes))).to_bytes(item_bytes, "little") for word in words)
    data += struct.pack(f"<{len(specials)}{'f' if dtype == 'F32' else 'd'}", *specials)
    return torch.frombuffer(bytearray(data), dtype=dtype_of(dtype))


def cast(numbers: torch.Tensor, source: str, target: Target) -> torch.Tensor:
    data = caster(source, target)(memoryview(numbers.view(torch.uint8).numpy().data))
    return torch.frombuffer(bytearray(data), dtype=dtype_of(target))


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """The same bits, but that any NaN is as good as another."""
    is_nan = theirs.isnan()
    assert torch.equal(ours.isnan(), is_nan)
    assert torch.equal(ours[~is_nan].view(torch.uint8), theirs[~is_nan].view(torch.uint8))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", sorted(FLOATS - {"F64"}))
def test_a_cast_gives_the_bits_that_torch_gives(source: str, target: Target) -> None:
    numbers = every_bit_pattern(source)
    theirs = numbers.to(torch.float32).to(dtype_of(target))  # exact, and then rounded once
    assert_same(cast(numbers, source, target), theirs)


@pytest.mark.parametrize("target", TARGETS)
def test_a_cast_of_doubles_rounds_once(target: Target) -> None:
    numbers = every_bit_pattern("F64")
    narrow = [7, 10, 23][("BF16", "F16", "F32").index(target)]
    draw = random.Random(1)
    near_ties = [
        math.ldexp(1.0 + (2 * draw.getrandbits(narrow) + 1) * 2.0 ** -(narrow + 1), draw.randint(-14, 15)) * (1 + tiny)
        for _ in range(1000)
        for tiny in (0.0, 2.0**-52, -(2.0**-52))
    ]
    numbers = torch.cat([numbers, torch.tensor(near_ties, dtype=torch.float64)])
    ours = cast(numbers, "F64", target)
    assert torch.equal(ours.isnan(), numbers.isnan())
    for number, found in zip(numbers.tolist(), ours.tolist(), strict=True):
        if not math.isnan(number):
            assert found == nearest(number, target), (number, found)
            assert math.copysign(1.0, found) == math.copysign(1.0, number)


def nearest(number: float, target: Target) -> float:
    """By exact fractions: the nearest number that ``target`` has, of two the one that is even."""
    exponent_bits, mantissa_bits = {"F32": (8, 23), "F16": (5, 10), "BF16": (8, 7)}[target]
    highest = (1 << (exponent_bits - 1)) - 1
    if math.isinf(number) or number == 0:
        return number
    exponent = max(math.frexp(number)[1] - 1, 1 - highest)
    unit = Fraction(2) ** (exponent - mantissa_bits)
    rounded = round(Fraction(number) / unit) * unit  # which is to even
    if abs(rounded) >= Fraction(2) ** (highest + 1):
        return math.copysign(math.inf, number)
    return float(rounded)


def test_nothing_at_all_is_cast_to_nothing() -> None:
    assert len(caster("F32", "BF16")(memoryview(b""))) == 0
