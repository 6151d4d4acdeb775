"""Likeness: what a model is given, told in JSON by shapes and types alone, and made again with other sizes.

A tensor is told by its shape, its type, and which dimension counts samples. What it holds is not told: where a model
decides by that, it cannot be worked out what it takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["batch_dim", "dtype_name", "dtype_of", "like", "num_bytes_of", "told"]

_MOST_DEPTH = 6


def told(value: Any, micro_batch: int, dim: int, depth: int = _MOST_DEPTH) -> dict[str, Any]:
    """``value`` as JSON has it; ValueError for what cannot be told.

    In tensors with ``micro_batch`` in dimension ``dim``, that is the number of samples.
    """
    if isinstance(value, torch.Tensor):
        shape = _shape(value)
        if shape is None:
            raise ValueError("a tensor that is not dense")
        has_samples = len(shape) > dim and shape[dim] == micro_batch
        return {"shape": list(shape), "dtype": dtype_name(value.dtype), "dim": dim if has_samples else None}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    if depth == 0:
        raise ValueError("containers within containers, more than six deep")
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: told(part, micro_batch, dim, depth - 1) for key, part in value.items()}}
    if type(value) in (tuple, list):
        return {type(value).__name__: [told(part, micro_batch, dim, depth - 1) for part in value]}
    raise ValueError(f"a {type(value).__name__}")


def like(tree: Mapping[str, Any], num_samples: int) -> Any:
    """What was told, with so many samples; tensors are made where torch makes them now, without contents."""
    if "shape" in tree:
        shape = list(tree["shape"])
        if tree["dim"] is not None:
            shape[tree["dim"]] = num_samples
        return torch.empty(shape, dtype=dtype_of(tree["dtype"]))
    if "value" in tree:
        return tree["value"]
    if "dict" in tree:
        return {key: like(part, num_samples) for key, part in tree["dict"].items()}
    if "tuple" in tree:
        return tuple(like(part, num_samples) for part in tree["tuple"])
    return [like(part, num_samples) for part in tree["list"]]


def batch_dim(value: Any, micro_batch: int) -> tuple[int, int] | None:
    """Which dimension of the first tensor counts samples, and how many they are; None where no tensor comes
    first that has a shape.

    It is the one that has ``micro_batch``, which is what a step takes at once at most; the first, where none has.
    """
    first = next(_tensors_in(value, _MOST_DEPTH), None)
    shape = None if first is None else _shape(first)
    if not shape:
        return None
    for dim, size in enumerate(shape):
        if size == micro_batch:
            return dim, size
    return 0, shape[0]


def num_bytes_of(tree: Mapping[str, Any], num_samples: int) -> int:
    """What the tensors that were told take, with so many samples."""
    if "shape" in tree:
        shape = [num_samples if dim == tree["dim"] else size for dim, size in enumerate(tree["shape"])]
        return math.prod(shape) * dtype_of(tree["dtype"]).itemsize
    parts = tree.get("tuple") or tree.get("list") or list((tree.get("dict") or {}).values())
    return sum(num_bytes_of(part, num_samples) for part in parts)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """ValueError where this torch has none of that name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no type of tensors")
    return found


def _shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """None of a tensor that is not dense, or of one that stands for others."""
    try:
        if tensor.is_sparse or tensor.is_nested or tensor.is_quantized:
            return None
        shape = tuple(tensor.shape)
    except (RuntimeError, TypeError):
        return None
    return shape if all(type(size) is int for size in shape) else None


def _tensors_in(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth > 0 and isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors_in(part, depth - 1)
    elif depth > 0 and isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors_in(part, depth - 1)
