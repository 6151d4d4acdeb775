"""Probe: when the phases of a step begin and end, learnt from hooks on a model and its optimizers.

The loop stays as it is. What is seen on the processor's clock is where the training thread waits and works; on an
accelerator that lags behind, device.py asks for the same marks there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from elastic_ext.engine import at_end_of_pass
from elastic_ext.hooks import Hook

from .phases import Phase

__all__ = ["Probe"]

_NOT_COMPILED = "it only reads a clock; compile the model before ElasticTrainer is given it"
_DEPTH = 3  # of containers in which an output is looked for

Mark = Callable[[int], object]
"""Called with a phase as it begins."""


class Probe:
    """Marks on one model and its optimizers; ``turn_on`` and ``turn_off`` between two steps."""

    def __init__(self, mark: Mark, *, is_on_accelerator: bool) -> None:
        self.num_tokens = self.num_bytes = 0
        """What the model was given in forward passes: whole numbers in tables of two dimensions or more, and bytes."""
        self.num_rows = 0
        """Of the first tensor in each: samples, as a rule; since the probe was made."""
        self._mark = mark
        self._is_on_accelerator = is_on_accelerator
        self._handles: list[RemovableHandle] = []
        self._is_inside = False  # a micro-step
        self._depth = 0  # calls of the model within one another
        self._is_in_pass = False  # a backward pass

    @property
    def is_on(self) -> bool:
        return bool(self._handles)

    def turn_on(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        """Look at the passes of ``model``, which is what the loop calls, and at the steps of ``optimizers``."""
        self.turn_off()
        if not isinstance(model, torch.jit.ScriptModule):  # which takes no hooks
            before, after = self._before_forward, self._after_forward
            dynamo: Any = sys.modules.get("torch._dynamo")
            if dynamo is not None:
                before, after = (dynamo.disable(each, reason=_NOT_COMPILED) for each in (before, after))
            # Ours on the output comes before what FSDP has there: so the end of its pass comes between the two marks.
            self._handles.append(model.register_forward_pre_hook(Hook(before), prepend=True, with_kwargs=True))
            self._handles.append(model.register_forward_hook(Hook(after), prepend=True))
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_optimizer))
            self._handles.append(optimizer.register_step_post_hook(self._after_optimizer))

    def turn_off(self) -> None:
        """Look at nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def enter_micro_step(self) -> None:
        """The loop is within a micro-step, and has its batch."""
        self._is_inside = True
        self._depth, self._is_in_pass = 0, False  # whatever became of the one before
        self._mark(Phase.TRANSFER if self._is_on_accelerator else Phase.OTHER)

    def leave_micro_step(self) -> None:
        """What comes is no part of a step."""
        self._is_inside = False

    def take_counts(self) -> tuple[int, int]:
        """Tokens and bytes since the last call."""
        found = self.num_tokens, self.num_bytes
        self.num_tokens = self.num_bytes = 0
        return found

    def _before_forward(self, module: nn.Module, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1 or self._is_in_pass or not self._is_inside:  # or activations are computed again
            return
        self._mark(Phase.FORWARD)
        self._count(arguments)
        if options:
            self._count(options.values())

    def _after_forward(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth > 0 or self._is_in_pass or not self._is_inside:
            return
        found = _first_with_gradient(output, _DEPTH)
        if found is None:
            self._mark(Phase.OTHER)  # an evaluation
        else:
            found.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]

    def _begin_backward(self, gradient: torch.Tensor) -> None:
        if not self._is_inside:
            return
        self._mark(Phase.BACKWARD)
        if not self._is_in_pass:
            self._is_in_pass = at_end_of_pass(self._end_computing, self._end_backward)

    def _end_computing(self) -> None:
        """All gradients of the pass are computed; what follows is to wait for other ranks."""
        self._mark(Phase.COMMUNICATION)

    def _end_backward(self) -> None:
        self._is_in_pass = False
        self._mark(Phase.OTHER)

    def _before_optimizer(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        if self._is_inside:
            self._mark(Phase.OPTIMIZER)

    def _after_optimizer(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        if self._is_inside:
            self._mark(Phase.OTHER)

    def _count(self, values: Iterable[Any]) -> None:
        is_first = True
        for value in values:
            if isinstance(value, torch.Tensor):
                size = value.numel()
                self.num_bytes += size * value.element_size()
                if is_first and value.dim() > 0:
                    self.num_rows += value.shape[0]
                if is_first and value.dim() > 1 and not value.is_floating_point():
                    self.num_tokens += size
                is_first = False


def _first_with_gradient(value: Any, depth: int) -> torch.Tensor | None:
    """The first tensor in it that a backward pass comes to."""
    if isinstance(value, torch.Tensor):
        return value if value.requires_grad else None
    if depth > 0:
        parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
        for part in parts:
            found = _first_with_gradient(part, depth - 1)
            if found is not None:
                return found
    return None
