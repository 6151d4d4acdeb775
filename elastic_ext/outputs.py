"""What goes into a model and what comes out: tensors found in it, exchanged for others, and where they came from."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

import torch

__all__ = ["Same", "is_made_of_marked", "mark", "mark_end", "needs_look", "origins", "replaced"]

_MARK = "elastic_ext: an output of the model"
_END = "elastic_ext: an input of the model"


class Same(torch.autograd.Function):
    """The same tensor with a place of its own in the graph. Not a view: where one changes in place, hooks are lost."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def mark(output: torch.Tensor) -> None:
    """Note in the graph that here the model ends, for ``origins``."""
    node: Any = output.grad_fn
    node.metadata[_MARK] = True


def mark_end(inner: torch.Tensor) -> None:
    """Note in the graph that here the model begins, for ``is_made_of_marked``."""
    node: Any = inner.grad_fn
    node.metadata[_END] = True


def is_made_of_marked(tensor: torch.Tensor) -> bool:
    """Whether an output of the model is among what this was made from, other than by way of its inputs."""
    waiting: list[Any] = [tensor.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or _END in node.metadata:
            continue
        seen.add(node)
        if _MARK in node.metadata:
            return True
        waiting += [above for above, _ in node.next_functions]
    return False


def origins(tensor: torch.Tensor, own: set[int]) -> tuple[bool, bool]:
    """Whether the model's own parameters are among what it was made from other than by its outputs; whether else is."""
    if tensor.grad_fn is None:
        return id(tensor) in own, id(tensor) not in own
    is_own = is_other = False
    waiting: list[Any] = [tensor.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _MARK in node.metadata or not node.next_functions:
            is_mine = id(getattr(node, "variable", None)) in own
            is_own, is_other = is_own or is_mine, is_other or not is_mine
        else:
            waiting += [above for above, _ in node.next_functions]
    return is_own, is_other


def needs_look(value: object) -> bool:
    """Whether there may be something in it that needs gradients."""
    return value.requires_grad if type(value) is torch.Tensor else value is not None


def _nothing(value: object) -> None:
    return None


def replaced(
    value: Any, change: Callable[[torch.Tensor], torch.Tensor], give_up: Callable[[object], None] = _nothing
) -> Any:
    """Nested containers with those tensors changed that need gradients: copies of what holds such."""
    same: Any
    if isinstance(value, torch.Tensor):
        return change(value) if value.requires_grad else value
    if isinstance(value, (tuple, list)):
        items = [replaced(item, change, give_up) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, list):
            same = copy.copy(value)
            same[:] = items
            return same
        if hasattr(value, "_make"):
            return value._make(items)
        return type(value)(items) if type(value).__module__ == "torch.return_types" else tuple(items)
    if isinstance(value, MutableMapping):
        changed = {name: new for name, old in value.items() if (new := replaced(old, change, give_up)) is not old}
        if not changed:
            return value
        same = copy.copy(value)  # of its own class, which may do more than hold
        if getattr(value, "__dict__", None) is value:  # the items of some are their attributes
            same.__dict__ = same
        for name, new in changed.items():
            same[name] = new
        return same
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, torch.distributions.Distribution):
        held = vars(value)
    else:
        if any(
            isinstance(each, torch.Tensor) and each.requires_grad for each in getattr(value, "__dict__", {}).values()
        ):
            give_up(value)
        return value
    changed = {name: new for name, old in held.items() if (new := replaced(old, change, give_up)) is not old}
    if not changed:
        return value
    same = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(same, name, new)
    return same
