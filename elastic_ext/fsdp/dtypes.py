"""Dtypes: what checkpoints call them, which is what safetensors files do, and what torch does."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["DTYPES", "dtype_of", "name_of"]

_TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}

DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, own) for name, own in _TORCH_NAMES.items()}
"""Torch's dtypes by name."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def name_of(dtype: torch.dtype) -> str | None:
    """The name of a dtype, None where no file could hold it."""
    return _NAMES.get(dtype)


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name."""
    if name not in DTYPES:
        raise ValueError(f"{name} is not a dtype that torch {torch.__version__} has; allowed: {', '.join(DTYPES)}")
    return DTYPES[name]
