"""Plain values: what a scheduler or a script keeps, as JSON and back, without pickle and without running any code.

JSON has no tuples, no keys but strings, no infinities and no tensors: those are objects of one key that says what they
are. Functions are left out: whoever takes the values back has them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["from_plain", "to_plain"]

_MOST_ELEMENTS = 65536
_TUPLE, _FLOAT, _PAIRS, _COUNTS, _TENSOR, _LEFT_OUT = (
    "(tuple)",
    "(float)",
    "(pairs)",
    "(counts)",
    "(tensor)",
    "(function)",
)
_MARKS = frozenset({_TUPLE, _FLOAT, _PAIRS, _COUNTS, _TENSOR, _LEFT_OUT})


def to_plain(value: Any, where: str) -> Any:
    """What JSON can hold of it; TypeError that names ``where`` it lies if that is not all of it."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: repr(float(value))}
    if isinstance(value, torch.Tensor):
        return _from_tensor(value, where)
    if isinstance(value, tuple):
        return {_TUPLE: [to_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]}
    if isinstance(value, list):
        return [to_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return _from_mapping(value, where)
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return to_plain(value.item(), where)
    if callable(value) and hasattr(value, "__name__"):  # a function, a method, a class
        return {_LEFT_OUT: value.__name__}
    raise TypeError(
        f"{where} is a {type(value).__name__}, which is not kept in a checkpoint; allowed: None, numbers, strings, "
        "tensors, and lists, tuples and dicts of them"
    )


def from_plain(value: Any, own: Any = None) -> Any:
    """What ``to_plain`` was given; functions are taken from the same place in ``own``."""
    if isinstance(value, list):
        return [from_plain(item, _at(own, index)) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value)) if len(value) == 1 else None
    if mark == _TUPLE:
        return tuple(from_plain(item, _at(own, index)) for index, item in enumerate(value[_TUPLE]))
    if mark == _FLOAT:
        return float(value[_FLOAT])
    if mark == _PAIRS:
        return {from_plain(key): from_plain(item, _at(own, from_plain(key))) for key, item in value[_PAIRS]}
    if mark == _COUNTS:
        return Counter({from_plain(key): count for key, count in value[_COUNTS]})
    if mark == _TENSOR:
        return _to_tensor(value[_TENSOR])
    if mark == _LEFT_OUT:
        return own
    return {key: from_plain(item, _at(own, key)) for key, item in value.items()}


def _from_mapping(value: Mapping[Any, Any], where: str) -> Any:
    if isinstance(value, Counter):
        return {_COUNTS: [[to_plain(key, where), count] for key, count in value.items()]}
    items = {key: to_plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if all(isinstance(key, str) for key in items) and not _MARKS & items.keys():
        return items
    return {_PAIRS: [[to_plain(key, f"a key of {where}"), item] for key, item in items.items()]}


def _from_tensor(value: torch.Tensor, where: str) -> Any:
    if value.numel() > _MOST_ELEMENTS:
        raise TypeError(
            f"{where} is a tensor of {value.numel()} elements, which plain values do not hold; allowed: at most "
            f"{_MOST_ELEMENTS}; give it to trainer.register_state() or as a tensor of its own"
        )
    exact = value.detach().cpu()
    wide = exact.double() if exact.is_floating_point() else exact
    if exact.is_complex() or (exact.is_floating_point() and exact.element_size() > 8):
        raise TypeError(f"{where} is a tensor of {exact.dtype}, which plain values do not hold")
    numbers = [to_plain(number, where) for number in wide.reshape(-1).tolist()]
    return {_TENSOR: {"dtype": str(exact.dtype).removeprefix("torch."), "shape": list(exact.shape), "values": numbers}}


def _to_tensor(value: Mapping[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, value["dtype"])
    return torch.tensor([from_plain(number) for number in value["values"]], dtype=dtype).reshape(value["shape"])


def _at(own: Any, key: Any) -> Any:
    """What ``own`` has there, None where it has nothing."""
    try:
        return None if own is None else own[key]
    except (LookupError, TypeError):
        return None
