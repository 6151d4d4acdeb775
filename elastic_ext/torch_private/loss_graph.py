"""How a loss was made, read from torch's graph before its backward pass; only this file reads values of nodes.

Tried first with a small graph: where this torch keeps other values there, nothing is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["BackwardLook", "factor_of", "is_addition", "is_sum_over", "reads_graphs"]

_SCALING = {"MulBackward0": 1, "DivBackward0": -1}
_SUM = 2  # as torch's losses note reduction="sum"
_MOST_SCALINGS = 4


class BackwardLook(TorchFunctionMode):
    """A context in which ``see`` is given each tensor that ``backward()`` is called on, before the pass begins."""

    def __init__(self, see: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.backward and not torch.compiler.is_compiling():
            self._see(args[0])
        return func(*args, **(kwargs or {}))


def factor_of(loss: torch.Tensor) -> tuple[float, Any]:
    """The product of the constants that a loss was multiplied with last, and the graph's node before those."""
    factor = 1.0
    node: Any = loss.grad_fn
    for _ in range(_MOST_SCALINGS):
        power = 0 if node is None else _SCALING.get(node.name(), 0)
        above = [edge[0] for edge in node.next_functions if edge[0] is not None] if power else []
        constant = _constant_of(node) if len(above) == 1 else None
        if constant is None:
            break
        factor, node = factor * constant**power, above[0]
    return factor, node


def is_sum_over(node: Any, num_samples: int) -> bool:
    """Whether a graph's node adds up the losses of ``num_samples`` samples, as with ``reduction="sum"``."""
    if node is None:
        return False
    if node.name() == "NegBackward0":
        node = node.next_functions[0][0]
    if getattr(node, "_saved_reduction", None) == _SUM:
        return True
    sizes: Sequence[int] = getattr(node, "_saved_self_sym_sizes", ())
    return node.name() == "SumBackward0" and len(sizes) > 0 and int(sizes[0]) == num_samples


def is_addition(node: Any) -> bool:
    """Whether a graph's node is an addition, as of losses of single samples that a loop adds up."""
    return node is not None and node.name() == "AddBackward0"


def reads_graphs() -> bool:
    """Whether this torch keeps in a graph's nodes what this file reads, tried with a small graph."""
    with torch.enable_grad():
        leaf = torch.ones(2, requires_grad=True)
        losses = leaf * 2.0
        try:
            factor, node = factor_of(losses.sum() * 0.5 / 4)
        except (AttributeError, RuntimeError, TypeError):
            return False
    return factor == 0.125 and is_sum_over(node, 2)


def _constant_of(node: Any) -> float | None:
    """The number that a node multiplies with or divides by; None where that is not one constant, finite and not 0."""
    other = getattr(node, "_saved_other", None)
    if other is None or other.numel() != 1 or other.requires_grad:
        return None
    value = float(other)
    return value if math.isfinite(value) and value != 0.0 else None
