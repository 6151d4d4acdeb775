"""Census: what one step asks of its machine: operations, the bytes that they move, the arithmetic in them.

It stands between autograd and the operations for one step, sees each go by, and changes none. That makes the step about
twice as long, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from elastic_ext.records.metrics import StepCensus
from elastic_ext.torch_private.module_hooks import is_compiled, num_graphs_compiled

__all__ = ["Census", "why_no_census"]

_OF_RANKS = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
_MOST_DEPTH = 4  # of containers among an operation's arguments


class Census(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """``with`` it around a step. ``is_optimizing`` says whether an operation is the optimizer's."""

    # Without these two torch refuses operators that take functions, and to compile, as long as this is there.
    supports_higher_order_operators = True

    def __init__(self, is_optimizing: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_optimizing = is_optimizing
        self._ops, self._bytes = [0, 0], [0, 0]  # of passes and the loop, of the optimizer
        self._flops = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled runs as it is."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it does the same to what lies on this rank, which comes by again
        result = func(*args, **(kwargs or {}))
        with suppress(RuntimeError, TypeError, ValueError, AttributeError):  # a kind of tensor that tells no size
            self._count(func, args, kwargs or {}, result)
        return result

    def record(self, *, rank: int, num_samples: int, num_micro_steps: int, device: str) -> StepCensus:
        """What was seen, as a micro-step and the optimizer's step; ``num_samples`` went into all of them."""
        passes, optimizer = 0, 1
        return StepCensus(
            time=time.time(),
            rank=rank,
            num_samples=num_samples // num_micro_steps,
            num_ops=self._ops[passes] // num_micro_steps + self._ops[optimizer],
            num_bytes=self._bytes[passes] // num_micro_steps + self._bytes[optimizer],
            num_flops=self._flops // num_micro_steps,
            optimizer_ops=self._ops[optimizer],
            optimizer_bytes=self._bytes[optimizer],
            device=device,
        )

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func.namespace in _OF_RANKS:
            return
        place = int(self._is_optimizing())
        self._ops[place] += 1
        if not func.is_view:
            self._bytes[place] += _num_bytes((args, list(kwargs.values()), result), _MOST_DEPTH)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self._flops += int(formula(*args, **kwargs, out_val=result))


def why_no_census(model: nn.Module) -> str | None:
    """Why a step of this model is not to be looked at so, None where it may be."""
    if isinstance(model, torch.jit.ScriptModule):
        return "it is a ScriptModule"
    if any(map(is_compiled, model.modules())):
        return "it is compiled, and its operations are not seen one by one"
    if num_graphs_compiled() > 0:
        return "something is compiled in this process, and its operations are not seen one by one"
    return None


def _num_bytes(values: Iterable[Any], depth: int) -> int:
    total = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            total += value.numel() * value.element_size()
        elif isinstance(value, (tuple, list)) and depth > 0:
            total += _num_bytes(value, depth - 1)
    return total
