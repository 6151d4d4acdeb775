"""Tests of which a run tries some parameters, and `make test-slow` the others."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

__all__ = ["each_once", "the_first"]


def the_first(values: Iterable[Any], num: int = 1) -> list[Any]:
    """``values`` as parameters, of which all but the first few are slow."""
    return [value if place < num else _slow(value) for place, value in enumerate(values)]


def each_once(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """All pairs of two kinds of values as parameters, of which all but as many as show each value are slow."""
    num = max(len(first), len(second))
    quick = {(place % len(first), place % len(second)) for place in range(num)}
    places = itertools.product(range(len(first)), range(len(second)))
    pairs = {place: (first[place[0]], second[place[1]]) for place in places}
    return [pair if place in quick else _slow(pair) for place, pair in pairs.items()]


def _slow(value: Any) -> Any:
    several = value if type(value) is tuple else (value,)
    return pytest.param(*several, marks=pytest.mark.slow)
