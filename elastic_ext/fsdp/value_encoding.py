"""Plain Python values and torch's dtypes as JSON and back, without pickle."""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, TypeAlias

import numpy
import torch

from .pickled_values import MARK, MAX_DEPTH

__all__ = ["DTYPES", "Plain", "dtype_of", "name_of", "pack", "unpack"]


# --- python's own as JSON and back, each as what it was, without pickle ----------------------------------------------
# JSON's numbers, text, lists and objects stand for themselves; an object with the key ``!`` says what else a value is.

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"

_ALLOWED = (
    "allowed: numbers, text, bytes, None, tensors, arrays, torch's dtypes and devices, and tuples, lists, sets, deques "
    "and dicts of these; have its owner's state_dict() give some of them"
)
_SEQUENCES: Mapping[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
}
_MAPPINGS: Mapping[str, Callable[[list[tuple[Any, Any]]], Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda pairs: Counter(dict(pairs)),
}
_NAMES_OF_TYPES: Mapping[type, str] = {
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "size",
    dict: "dict",
    OrderedDict: "ordered",
    Counter: "counter",
}


def pack(value: object, where: str, tensors: dict[str, torch.Tensor] | None = None) -> Plain:
    """A value as JSON can hold it; TypeError names the part of it that would have to be pickled.

    Tensors and arrays in it go into ``tensors``, under names that begin with ``where``; without one, they are refused.
    """
    return _pack(value, where, tensors, 0)


def unpack(packed: Plain, tensors: Mapping[str, torch.Tensor] | None = None) -> Any:
    """The value that ``pack`` has packed; ValueError where ``pack`` has not made ``packed``."""
    if isinstance(packed, list):
        return [unpack(each, tensors) for each in packed]
    if not isinstance(packed, dict):
        return packed
    if MARK not in packed:
        return {key: unpack(each, tensors) for key, each in packed.items()}
    try:
        return _unpack_marked(packed[MARK], packed.get("of"), packed, tensors or {})
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"{str(packed)[:80]} is not a value that was saved: {type(error).__name__}: {error}"
        ) from error


def _pack(value: object, where: str, tensors: dict[str, torch.Tensor] | None, depth: int) -> Plain:
    if depth > MAX_DEPTH:
        raise TypeError(f"{where} nests more than {MAX_DEPTH} levels deep, or holds itself; give it flatter")

    def inner(each: object, name: object) -> Plain:
        return _pack(each, f"{where}/{name}", tensors, depth + 1)

    if isinstance(value, (torch.Tensor, numpy.ndarray)):
        return _pack_tensor(value, where, tensors)
    if isinstance(value, numpy.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        return _pack_one(value, where)
    if type(value) is list:
        return [inner(each, index) for index, each in enumerate(value)]
    if type(value) is deque:
        return {MARK: "deque", "most": value.maxlen, "of": [inner(each, index) for index, each in enumerate(value)]}
    kind = _NAMES_OF_TYPES.get(type(value))
    if kind in _SEQUENCES:
        assert isinstance(value, (tuple, set, frozenset))
        return {MARK: kind, "of": [inner(each, index) for index, each in enumerate(value)]}
    if kind in _MAPPINGS:
        assert isinstance(value, dict)
        if kind == "dict" and all(isinstance(key, str) for key in value) and MARK not in value:
            return {str(key): inner(each, key) for key, each in value.items()}
        return {MARK: kind, "of": [[inner(key, f"key {key!r}"), inner(each, key)] for key, each in value.items()]}
    raise TypeError(f"{where} is a {type(value).__name__}, which cannot be saved without pickle; {_ALLOWED}")


def _pack_one(value: object, where: str) -> Plain:
    if isinstance(value, Enum):
        raise TypeError(f"{where} is an Enum, {value!r}, which cannot be saved without pickle; {_ALLOWED}")
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {MARK: "float", "of": repr(float(value))}
    if isinstance(value, complex):
        return {MARK: "complex", "of": repr(complex(value))}
    if isinstance(value, bytes):
        return {MARK: "bytes", "of": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {MARK: "dtype", "of": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {MARK: "device", "of": str(value)}
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise TypeError(
                f"{where} holds half a character, {value!r} (a lone surrogate); allowed: whole Unicode characters"
            ) from None
        return str(value)
    assert value is None or isinstance(value, int)
    return value if value is None or isinstance(value, bool) else int(value)


def _pack_tensor(value: Any, where: str, tensors: dict[str, torch.Tensor] | None) -> Plain:
    is_array = isinstance(value, numpy.ndarray)
    if tensors is None:
        raise TypeError(f"{where} is a {type(value).__name__}, where only plain values are kept; have it as a number")
    if where in tensors:
        raise TypeError(f"two tensors come to be called {where!r}; rename the keys that they go by")
    try:
        tensors[where] = _tensor_of(value) if is_array else value.detach()
    except (TypeError, ValueError) as error:
        raise TypeError(f"{where} is an array of {value.dtype}: {error}") from None
    return {MARK: "array" if is_array else "tensor", "of": where}


def _tensor_of(array: numpy.ndarray[Any, Any]) -> torch.Tensor:
    """A tensor in an array's memory, or in a copy where the array is read-only or goes through memory backwards."""
    can_be_shared = array.flags.writeable and min(array.strides, default=0) >= 0
    return torch.from_numpy(array if can_be_shared else array.copy())


def _unpack_marked(kind: Plain, of: Any, packed: Mapping[str, Plain], tensors: Mapping[str, torch.Tensor]) -> Any:
    if kind in ("tensor", "array"):
        return tensors[of] if kind == "tensor" else tensors[of].numpy()
    if kind == "float":
        return float(of)
    if kind == "complex":
        return complex(of)
    if kind == "bytes":
        return base64.b64decode(of)
    if kind == "device":
        return torch.device(of)
    if kind == "dtype":
        dtype = getattr(torch, of)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{of} is no dtype")
        return dtype
    if kind == "deque":
        most: Any = packed.get("most")
        return deque((unpack(each, tensors) for each in of), maxlen=most)
    if kind in _SEQUENCES:
        return _SEQUENCES[str(kind)]([unpack(each, tensors) for each in of])
    if kind in _MAPPINGS:
        return _MAPPINGS[str(kind)]([(unpack(key, tensors), unpack(each, tensors)) for key, each in of])
    raise TypeError(f"there is no kind {kind!r}")


# --- what checkpoints call them, which is what safetensors files do, and what torch does -----------------------------

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
_NAMES_OF_DTYPES = {dtype: name for name, dtype in DTYPES.items()}


def name_of(dtype: torch.dtype) -> str | None:
    """The name of a dtype in files; None where no file could hold it."""
    return _NAMES_OF_DTYPES.get(dtype)


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name in files."""
    if name not in DTYPES:
        raise ValueError(f"{name} is not a dtype that torch {torch.__version__} has; allowed: {', '.join(DTYPES)}")
    return DTYPES[name]
