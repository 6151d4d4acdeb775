"""Packed: what a plain value refers to, as ``plain.py`` packs it; without torch."""

from __future__ import annotations

__all__ = ["MARK", "tensors_in"]

MARK = "!"
"""The key of an object that stands for what JSON does not have."""


def tensors_in(packed: object) -> dict[str, str]:
    """The names of the tensors that a packed value has, and whether each is to be a ``tensor`` or an ``array``."""
    found: dict[str, str] = {}
    for each in packed.values() if isinstance(packed, dict) else packed if isinstance(packed, list) else ():
        found |= tensors_in(each)
    if isinstance(packed, dict) and packed.get(MARK) in ("tensor", "array"):
        found[str(packed["of"])] = str(packed[MARK])
    return found
