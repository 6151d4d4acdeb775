"""Probe: when the phases of a step begin and end, learnt from hooks on a model and its optimizers.

The loop stays as it is. What is seen on the processor's clock is where the training thread waits and works; on an
accelerator that lags behind, device_timeline.py asks for the same marks there.

Hooks stay from the first step to the last, whether steps are looked at or not: a compiler that has seen them once sees
nothing new. What it makes a graph of has no part of them, and is not cut by them: a pass whose model is called within
such a graph is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from elastic_ext.engine import at_end_of_pass
from elastic_ext.hooks import Hook

from .phases import Phase

__all__ = ["Probe"]

_DEPTH = 3  # of containers in which an output is looked for

Mark = Callable[[int], object]
"""Called with a phase as it begins."""


class Probe:
    """Marks on one model and its optimizers, in micro-steps that it is told of."""

    def __init__(self, mark: Mark, *, is_on_accelerator: bool) -> None:
        self.num_tokens = self.num_bytes = 0
        """What the model was given in forward passes: whole numbers in tables of two dimensions or more, and bytes."""
        self.num_rows = 0
        """Of the first tensor in each: samples, as a rule; since the probe was made."""
        self.has_seen = False
        """Whether the model was ever called in a micro-step that it was told of."""
        self._mark = mark
        self._is_on_accelerator = is_on_accelerator
        self._handles: list[RemovableHandle] = []
        self._is_inside = False  # a micro-step
        self._depth = 0  # calls of the model within one another
        self._is_in_pass = False  # a backward pass

    def attach(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        """See the passes of ``model``, which is what the loop calls, and the steps of ``optimizers``, from here on."""
        if not isinstance(model, torch.jit.ScriptModule):  # which takes no hooks
            before, after = self._unless_compiled(self._before_forward), self._unless_compiled(self._after_forward)
            # Ours on the output comes before what FSDP has there: so the end of its pass comes between the two marks.
            self._handles.append(model.register_forward_pre_hook(Hook(before), prepend=True, with_kwargs=True))
            self._handles.append(model.register_forward_hook(Hook(after), prepend=True))
        before, after = self._unless_compiled(self._before_optimizer), self._unless_compiled(self._after_optimizer)
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(before))
            self._handles.append(optimizer.register_step_post_hook(after))

    def detach(self) -> None:
        """See nothing any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def enter_micro_step(self) -> None:
        """The loop is within a micro-step, and has its batch."""
        self._is_inside = True
        self._depth, self._is_in_pass = 0, False  # whatever became of the one before
        if not self.has_seen:
            self._mark(Phase.STEP)  # nobody knows whether the model will be
        else:
            self._mark(Phase.TRANSFER if self._is_on_accelerator else Phase.OTHER)

    def leave_micro_step(self) -> None:
        """What comes is no part of a step."""
        self._is_inside = False

    def take_counts(self) -> tuple[int, int]:
        """Tokens and bytes since the last call."""
        found = self.num_tokens, self.num_bytes
        self.num_tokens = self.num_bytes = 0
        return found

    def _unless_compiled(self, act: Callable[..., None]) -> Callable[..., None]:
        """``act`` as a hook: called within micro-steps, and not by what a compiler makes a graph of."""
        dynamo: Any = sys.modules.get("torch._dynamo")
        if dynamo is not None:
            act = dynamo.disable(act)  # called beside a graph, its frames are none of the compiler's

        def hook(*arguments: Any) -> None:
            if is_compiling() or not self._is_inside:  # a compiler reads no further than to the first
                return
            act(*arguments)

        skip = getattr(getattr(dynamo, "eval_frame", None), "skip_code", None)
        if skip is not None:  # else a graph may be made of the hook alone, in which it does nothing
            skip(hook.__code__)
        return hook

    def _before_forward(self, module: nn.Module, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1 or self._is_in_pass:  # or activations are computed again
            return
        self._mark(Phase.FORWARD)
        self.has_seen = True
        self._count(arguments)
        if options:
            self._count(options.values())

    def _after_forward(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth > 0 or self._is_in_pass:
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
        self._mark(Phase.OPTIMIZER)

    def _after_optimizer(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
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
