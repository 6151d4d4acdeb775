"""Plain values as ``value_encoding.py`` packs them: read from JSON, and what tensors they refer to; without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

__all__ = ["MARK", "MAX_DEPTH", "read_plain", "tensors_in"]

MARK = "!"
"""The key of a JSON object that stands for a value that JSON does not have."""
MAX_DEPTH = 100
"""How many levels deep a packed value may nest."""
_MAX_DEPTH_OF_FILE = MAX_DEPTH + 20  # levels around values
_MAPPINGS = ("dict", "ordered", "counter")
"""Marks of values that have pairs."""


def read_plain(data: bytes) -> Any:
    """The value of JSON text that holds packed values; ValueError where they nest deeper than ``pack`` allows."""
    too_deep = f"it nests deeper than what is saved, which has at most {MAX_DEPTH} levels"
    try:
        read = json.loads(data)
    except RecursionError:
        raise ValueError(too_deep) from None
    level = [read]
    for _ in range(_MAX_DEPTH_OF_FILE):
        if not level:
            return read
        level = [inner for each in level for inner in _within(each) if isinstance(inner, (list, dict))]
    raise ValueError(too_deep)


def tensors_in(packed: object) -> dict[str, str]:
    """The names of the tensors that a packed value has, and whether each is to be a ``tensor`` or an ``array``."""
    found: dict[str, str] = {}
    waiting = [packed]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict) and each.get(MARK) in ("tensor", "array") and isinstance(each.get("of"), str):
            found[each["of"]] = each[MARK]
        if isinstance(each, (dict, list)):
            waiting += each.values() if isinstance(each, dict) else each
    return found


def _within(packed: Any) -> Iterator[Any]:
    """The values one level deeper in a packed value: a dict is packed as pairs, which are no values themselves."""
    if isinstance(packed, dict) and MARK in packed:
        is_mapping = packed[MARK] in _MAPPINGS
        packed = packed.get("of")
        if is_mapping and isinstance(packed, list):
            packed = [each for pair in packed for each in (pair if isinstance(pair, list) else [pair])]
    if isinstance(packed, (list, dict)):
        yield from packed.values() if isinstance(packed, dict) else packed
