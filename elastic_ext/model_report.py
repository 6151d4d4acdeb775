"""What a rank reports of its model, once, as training begins: for those who say how it could be trained better."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from .records.metrics import ModelProfile

__all__ = ["profile_of"]

_MOST_BLOCKS = 8


def profile_of(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, rank: int, sharing: str, plan: str | None
) -> ModelProfile:
    """What ``model`` is, and what this rank holds of it and of its optimizers' state; ``sharing`` says how."""
    parameters = [each for each in model.parameters() if not is_lazy(each)]  # those have no size before the first step
    kept = [each for optimizer in optimizers for each in optimizer.state.values() if isinstance(each, Mapping)]
    state = [value for each in kept for value in each.values()]
    kinds: Counter[str] = Counter()
    for each in parameters:
        kinds[str(each.dtype).removeprefix("torch.")] += each.numel()
    blocks = Counter(type(each).__name__ for each in model.modules() if any(True for _ in each.children()))
    repeated = [f"{number} x {name}" for name, number in blocks.most_common() if number > 1]
    return ModelProfile(
        time=time.time(),
        rank=rank,
        name=type(model).__name__,
        num_parameters=sum(kinds.values()),
        num_trainable=sum(each.numel() for each in parameters if each.requires_grad),
        by_dtype=", ".join(f"{name} {number}" for name, number in kinds.most_common()),
        parameter_bytes=_held(parameters),
        buffer_bytes=_held(model.buffers()),
        optimizer_bytes=_held(value for value in state if isinstance(value, torch.Tensor)),
        optimizers=", ".join(type(each).__name__ for each in optimizers),
        blocks=", ".join(repeated[:_MOST_BLOCKS]),
        device=str(parameters[0].device) if parameters else "",
        sharing=sharing,
        plan=plan,
    )


def _held(tensors: Iterable[torch.Tensor]) -> int:
    """How many bytes of these lie on this rank."""
    own = (each.to_local() if isinstance(each, DTensor) else each for each in tensors)
    return sum(each.numel() * each.element_size() for each in own)
