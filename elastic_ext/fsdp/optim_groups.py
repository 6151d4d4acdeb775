"""Groups: the values of an optimizer's groups, such as lr, by the names of the parameters that they are for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from elastic_ext.errors import CheckpointMismatch

from .plain import Plain, pack, unpack
from .state import Parameter
from .trained import Trained, put_in, trained_by

__all__ = ["are_same_kinds", "matching_groups", "packed_groups", "put_groups"]

# How a step is computed, not what it computes: as the optimizer has them that is loaded into.
_WAYS = frozenset({"foreach", "fused", "capturable", "differentiable"})
_NOT_VALUES = frozenset({"params", "param_names"})


def packed_groups(optimizer: Optimizer, trained: Mapping[int, Trained]) -> Plain:
    """The class of an optimizer and its groups, as JSON can hold them; TypeError names a value that it cannot."""
    groups: list[Plain] = []
    for number, group in enumerate(optimizer.param_groups):
        where = f"group {number} of {type(optimizer).__name__}: "
        values: dict[str, Plain] = {
            key: pack(_without_tensors(value), where + key) for key, value in group.items() if key not in _NOT_VALUES
        }
        names: list[Plain] = [*_names(group, trained)]
        groups.append({"params": names, "values": values})
    return {"class": type(optimizer).__name__, "groups": groups}


def put_groups(optimizers: Sequence[Optimizer], parameters: Sequence[Parameter], groups: Sequence[Plain]) -> None:
    """Give every group the values that were saved of the group of the same parameters, in whatever order.

    CheckpointMismatch, and nothing is changed, where the parameters were grouped otherwise. Values that were not saved
    stay as they are, and so do ``foreach``, ``fused``, ``capturable`` and ``differentiable``, which only say how a step
    is computed. Tensors, such as an lr for a captured graph, are written into.
    """
    for group, values in matching_groups(optimizers, parameters, groups):
        for key, value in values.items():
            if key not in _WAYS:
                group[key] = put_in(group.get(key), value)


def are_same_kinds(optimizers: Sequence[Optimizer], groups: Sequence[Plain]) -> bool:
    """Whether what was saved is of optimizers of the same classes."""
    return sorted(type(optimizer).__name__ for optimizer in optimizers) == sorted(_classes(groups))


def matching_groups(
    optimizers: Sequence[Optimizer], parameters: Sequence[Parameter], groups: Sequence[Plain]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Every group with the values that were saved of it; CheckpointMismatch where parameters were grouped otherwise,
    or for another optimizer."""
    if not are_same_kinds(optimizers, groups):
        here = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise CheckpointMismatch(
            f"the checkpoint has the state of {', '.join(_classes(groups)) or 'no optimizer'}, and here is {here}; "
            "give the same, or load the model alone"
        )
    trained = trained_by(optimizers, parameters)
    saved: dict[frozenset[str], list[dict[str, Any]]] = {}
    for names, values in _saved_groups(groups):
        saved.setdefault(names, []).append(values)
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    strange = []
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        names = frozenset(_names(group, trained))
        if saved.get(names):
            found.append((group, saved[names].pop(0)))
        else:
            strange.append(names)
    left = [names for names, rest in saved.items() for _ in rest]
    if strange or left:
        raise _otherwise_grouped(strange, left)
    return found


def _saved_groups(groups: Sequence[Plain]) -> Iterator[tuple[frozenset[str], dict[str, Any]]]:
    try:
        for optimizer in groups:
            for group in _part(optimizer, "groups", list):
                names, values = _part(group, "params", list), _part(group, "values", dict)
                yield frozenset(str(name) for name in names), {key: unpack(value) for key, value in values.items()}
    except (KeyError, TypeError) as error:
        raise ValueError(f"these are no groups of optimizers that were saved: {str(groups)[:80]}") from error


def _classes(groups: Sequence[Plain]) -> list[str]:
    try:
        return [str(_part(optimizer, "class", str)) for optimizer in groups]
    except (KeyError, TypeError) as error:
        raise ValueError(f"these are no groups of optimizers that were saved: {str(groups)[:80]}") from error


def _part(holder: Any, key: str, kind: type) -> Any:
    if not isinstance(holder[key], kind):
        raise TypeError(f"{key} is {holder[key]!r}")
    return holder[key]


def _names(group: Mapping[str, Any], trained: Mapping[int, Trained]) -> list[str]:
    return [trained[id(tensor)].parameter.name for tensor in group["params"]]


def _without_tensors(value: object) -> object:
    """A group's value, with tensors of one element as numbers."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if type(value) in (tuple, list):
        return type(value)(_without_tensors(each) for each in value)  # type: ignore[attr-defined,call-arg]
    return value


def _otherwise_grouped(strange: Sequence[frozenset[str]], left: Sequence[frozenset[str]]) -> CheckpointMismatch:
    def shown(names: frozenset[str]) -> str:
        first = ", ".join(sorted(names)[:3])
        return f"[{first}]" if len(names) <= 3 else f"[{first} and {len(names) - 3} more]"

    here, there = set().union(*strange), set().union(*left)
    return CheckpointMismatch(
        "the optimizers' groups are not those that were saved: here "
        + (" ".join(map(shown, strange)) or "none besides")
        + ", in the checkpoint "
        + (" ".join(map(shown, left)) or "none besides")
        + "; group the parameters as they were",
        missing=sorted(here - there),
        extra=sorted(there - here),
    )
