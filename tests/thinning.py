"""Tests of which a run tries some parameters, and `make test-slow` the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["the_first"]


def the_first(values: Iterable[Any], num: int = 1) -> list[Any]:
    """``values`` as parameters, of which all but the first few are slow."""
    return [value if place < num else _slow(value) for place, value in enumerate(values)]


def _slow(value: Any) -> Any:
    several = value if type(value) is tuple else (value,)
    return pytest.param(*several, marks=pytest.mark.slow)
