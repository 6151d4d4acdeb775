"""Types of numbers by the names that safetensors gives them, and how much memory one number takes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["ITEM_BYTES"]

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "F64": 8,
        "F32": 4,
        "F16": 2,
        "BF16": 2,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
        "F8_E4M3FNUZ": 1,
        "F8_E5M2FNUZ": 1,
        "F8_E8M0": 1,
        "C64": 8,
        "I64": 8,
        "I32": 4,
        "I16": 2,
        "I8": 1,
        "U64": 8,
        "U32": 4,
        "U16": 2,
        "U8": 1,
        "BOOL": 1,
    }
)
