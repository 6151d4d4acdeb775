"""How large a model in training is, whole, whatever part of it a rank has; and what else its device holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

__all__ = ["ModelSizes", "besides_bytes", "capacity_bytes"]


class ModelSizes:
    """Of one model and its optimizers; asked anew each time, since optimizers make their state as they step."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], blocks: Sequence[nn.Module]) -> None:
        self._model, self._optimizers, self._blocks = model, optimizers, blocks

    @property
    def parameter_bytes(self) -> int:
        return _whole(self._model.parameters())

    @property
    def gradient_bytes(self) -> int:
        """Of all that is trained."""
        return _whole(each for each in self._model.parameters() if each.requires_grad)

    @property
    def optimizer_bytes(self) -> int:
        states = [each for optimizer in self._optimizers for each in optimizer.state.values()]
        values = [value for state in states if isinstance(state, Mapping) for value in state.values()]
        return _whole(value for value in values if isinstance(value, torch.Tensor))

    @property
    def buffer_bytes(self) -> int:
        return _whole(self._model.buffers())

    @property
    def block_bytes(self) -> int:
        """Of the parameters of the largest block,"""
        return max((_whole(block.parameters()) for block in self._blocks), default=0)

    @property
    def other_bytes(self) -> int:
        """... and of those that are in no block."""
        in_blocks = {id(each) for block in self._blocks for each in block.parameters()}
        return _whole(each for each in self._model.parameters() if id(each) not in in_blocks)


def capacity_bytes(device: torch.device) -> int | None:
    """What there is for this process, None where that is not known."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total
    return int(min(free + torch.cuda.memory_reserved(device), allowed))


def besides_bytes(device: torch.device, allocated_bytes: int, sizes: ModelSizes) -> int:
    """What a CUDA device holds for this process between steps beside a whole model: its other tensors, and pieces of
    memory that its allocator has and cannot use."""
    known = sizes.parameter_bytes + sizes.optimizer_bytes + sizes.buffer_bytes
    split = torch.cuda.memory_stats(device).get("inactive_split_bytes.all.current", 0)
    return max(allocated_bytes - known, 0) + int(split)


def _whole(tensors: Iterable[torch.Tensor]) -> int:
    """Of tensors that are sharded, what all ranks hold of them together."""
    return sum(each.numel() * each.element_size() for each in tensors if not is_lazy(each))
