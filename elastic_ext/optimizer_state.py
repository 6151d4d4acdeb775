"""Optimizer state made before the first step, so that running out of memory for it cannot tear a step in two."""

from __future__ import annotations

from typing import Any

import torch
from torch import optim
from torch.optim import Optimizer

__all__ = ["can_materialise", "materialise"]

# Those whose state begins as zeros, so that the first step does the same with it as without. Of any other optimizer,
# such as a subclass, nothing is known.
_BEGIN_AT_ZERO = tuple(
    getattr(optim, name)
    for name in ("Adadelta", "Adafactor", "Adam", "AdamW", "Adamax", "Muon", "RAdam", "RMSprop", "SGD")
    if hasattr(optim, name)
)


def can_materialise(optimizer: Optimizer) -> bool:
    """Whether a first step does the same bit for bit when the state was made before it."""
    if type(optimizer) not in _BEGIN_AT_ZERO:
        return False
    groups = optimizer.param_groups
    return not any(group.get("dampening") or group.get("differentiable") for group in groups)


def materialise(optimizer: Optimizer) -> None:
    """Make the state of every trained parameter that has none, as it is before the first step.

    A step with zero gradients is taken for one parameter at a time, and the parameter put back: so no more memory is
    used than the state itself and two copies of the largest parameter.
    """
    groups = optimizer.param_groups
    try:
        for group in groups:
            for part in group["params"]:
                if part.requires_grad and not optimizer.state.get(part):
                    optimizer.param_groups = [{**group, "params": [part]}]  # a step goes by this one alone
                    _materialise_one(optimizer, part)
    finally:
        optimizer.param_groups = groups


def _materialise_one(optimizer: Optimizer, part: torch.Tensor) -> None:
    before, gradient = part.detach().clone(), part.grad
    part.grad = torch.zeros_like(part)
    try:
        _bare_step(optimizer)(optimizer)
    finally:
        part.grad = gradient
        with torch.no_grad():
            part.copy_(before)
    state = optimizer.state.get(part, {})
    for name, value in state.items():
        # SGD's first step takes the gradient for its momentum, as 0.9 * -0.0 + gradient does, whatever its sign.
        _clear(value, zero=-0.0 if name == "momentum_buffer" and isinstance(optimizer, optim.SGD) else 0.0)
    _reset_count(state)


def _bare_step(optimizer: Optimizer) -> Any:
    """The class's ``step`` without the user's hooks: nothing that they could see has happened."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step)


def _clear(value: object, *, zero: float) -> None:
    if isinstance(value, torch.Tensor):
        value.fill_(zero)


def _reset_count(state: dict[str, Any]) -> None:
    if isinstance(state.get("step"), (int, float)):
        state["step"] = 0
