"""Trained: parameters in the groups that optimizers have them in, and which of them a state's name belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from .state import Parameter

__all__ = ["Trained", "by_name_of", "place_of", "put_in", "trained_by"]


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A parameter in the group that an optimizer has it in."""

    parameter: Parameter
    optimizer: Optimizer
    group: dict[str, Any]

    @property
    def state(self) -> dict[Any, Any]:
        found: dict[Any, Any] = self.optimizer.state[self.parameter.tensor]
        return found


def trained_by(optimizers: Sequence[Optimizer], parameters: Iterable[Parameter]) -> dict[int, Trained]:
    """Every parameter in a group, by the identity of its tensor."""
    known = {id(parameter.tensor): parameter for parameter in parameters}
    found: dict[int, Trained] = {}
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for tensor in group["params"]:
                parameter = known.get(id(tensor))
                if parameter is None:
                    raise ValueError(
                        f"group {number} of {type(optimizer).__name__} has a parameter of shape {tuple(tensor.shape)} "
                        "that is not one of the model's; make the optimizer once the model is wrapped"
                    )
                if id(tensor) in found and found[id(tensor)].optimizer is not optimizer:
                    raise ValueError(f"{parameter.name} is in two optimizers; allowed: each parameter in one of them")
                found[id(tensor)] = Trained(parameter, optimizer, group)
    return found


def by_name_of(trained: Mapping[int, Trained]) -> dict[str, Trained]:
    """The same by the parameters' own names."""
    return {each.parameter.name: each for each in trained.values()}


def place_of(name: str, by_name: Mapping[str, Trained]) -> tuple[Trained, str] | None:
    """The parameter and the key that a state's name is made of; names may have a slash in them, so the longest fits."""
    cut = len(name)
    while (cut := name.rfind("/", 0, cut)) >= 0:
        if name[:cut] in by_name:
            return by_name[name[:cut]], name[cut + 1 :]
    return None


def put_in(current: object, new: object) -> object:
    """What takes the place of a value: a tensor stays the tensor that it is, and gets the new number."""
    if isinstance(current, torch.Tensor) and isinstance(new, (bool, int, float, complex)):
        with torch.no_grad():
            current.fill_(new)
        return current
    if isinstance(current, (tuple, list)) and isinstance(new, (tuple, list)) and len(current) == len(new):
        return type(new)(put_in(mine, its) for mine, its in zip(current, new, strict=True))
    return new
