"""How much a micro-batch counts, put on the gradients with which a backward pass enters the model."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from elastic_ext.errors import StepError
from elastic_ext.torch_private import pipelines
from elastic_ext.torch_private.engine import Engine, above
from elastic_ext.torch_private.module_hooks import Hook, beside_graphs, skipped_by_compiler
from elastic_ext.training.steps.state import StepState

__all__ = [
    "Same",
    "Weighing",
    "callable_parts",
    "is_made_of_marked",
    "mark",
    "mark_end",
    "needs_look",
    "origins",
    "replaced",
]


# --- what goes into a model and what comes out -----------------------------------------------------------------------
# Tensors found in a model's inputs and outputs, exchanged for others, and where they came from.

_MARK = "elastic_ext: an output of the model"
_END = "elastic_ext: an input of the model"


class Same(torch.autograd.Function):
    """Identity with a node of its own in autograd's graph. Not a view: where one changes in place, hooks are lost."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def mark(output: torch.Tensor) -> None:
    """Mark the graph node of ``output`` as an output of the model, for ``origins``."""
    node: Any = output.grad_fn
    node.metadata[_MARK] = True


def mark_end(inner: torch.Tensor) -> None:
    """Mark the graph node of ``inner`` as an input of the model, for ``is_made_of_marked``."""
    node: Any = inner.grad_fn
    node.metadata[_END] = True


def is_made_of_marked(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` was computed from an output of the model, other than by way of the model's inputs."""
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
    """Whether ``tensor`` was computed from parameters in ``own``, not by way of model outputs; and from others."""
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
    """Whether an argument of a model may hold a tensor that needs gradients."""
    return value.requires_grad if type(value) is torch.Tensor else value is not None


def _nothing(value: object) -> None:
    return None


def replaced(
    value: Any, change: Callable[[torch.Tensor], torch.Tensor], give_up: Callable[[object], None] = _nothing
) -> Any:
    """``value`` with ``change`` applied to each tensor that needs gradients, in copies of the containers around it.

    ``give_up`` is called with an object that has such tensors, and cannot be copied so.
    """
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


# --- how much a micro-batch counts, put on the gradients with which a backward pass enters the model -----------------
# It acts on the gradients of the model's outputs, and takes itself back where a pass leaves through the model's inputs:
# within the model gradients are weighed, outside of it they are not, until they come to a parameter there. So each path
# counts once, however often the model was called, and ``loss.backward()`` needs no help. What cannot be followed so is
# noticed and refused, with the advice to use ``trainer.backward(loss)``. What is done to values stands above.

_NEEDS_EXACT = (
    "the model cannot weigh its own gradients here: {}; call trainer.backward(loss) instead of loss.backward()"
)
_NOT_COMPILED = "it weighs gradients, outside of the graph; compile the model before ElasticTrainer is given it"


class Weighing:
    """Multiplies the gradients that enter a model backwards by the micro-batch's weight.

    ``parts`` are the modules that the loop calls, or that hold those.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        state: StepState,
        *,
        on_output: Callable[[torch.Tensor], None],
        on_backward: Callable[[], None],
    ) -> None:
        self.is_exact = False
        """Whether the loss itself is weighed, so that gradients are left as they are."""
        self.counts = True
        """Whether passes with a weight of 1 are noticed too."""
        self._entries = list(dict.fromkeys(entry for part in parts for entry in callable_parts(part)))
        self._state = state
        self._on_output = on_output
        self._on_backward = on_backward
        self._engine = Engine()
        self._handles: list[RemovableHandle] = []
        self._own: set[int] = set()  # the model's parameters
        self._has_outside = False  # parameters that are trained and not the model's
        self._depth = 0  # calls of entries within one another that are under way
        self._num_calls = 0  # in this micro-step, those within one another counted as one
        self._is_called_once = False  # in the micro-step before in which anything was weighed or counted
        self._given: list[tuple[torch.Tensor, int]] = []  # to the call under way: inputs and their versions
        self.is_in_pipeline = False
        """Whether a pipeline's stage has called the model in this micro-step."""
        self._needs_exact = ""  # why the loss of this micro-step must be weighed itself

    def turn_on(self, trained: Iterable[torch.Tensor]) -> None:
        """Set the hooks that see and weigh passes; ``trained`` are all parameters, the model's and others."""
        self.turn_off()
        self._own = {id(part) for entry in self._entries for part in entry.parameters()}
        before, after = self._where_weighed(self._before_forward), self._where_weighed(self._after_forward)
        for entry in self._entries:
            if not isinstance(entry, torch.jit.ScriptModule):  # which takes no hooks: its gradients are found unweighed
                self._handles.append(entry.register_forward_pre_hook(Hook(before), with_kwargs=True))
                self._handles.append(entry.register_forward_hook(Hook(after), always_call=True))
        outside = [part for part in trained if id(part) not in self._own and part.requires_grad]
        self._has_outside = bool(outside)
        for part in outside:
            self._handles.append(part.register_hook(self._weigh_outside))  # type: ignore[no-untyped-call]

    def turn_off(self) -> None:
        """Remove the hooks that see and weigh passes."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def refuse_pipeline(self) -> None:
        """Raise where a pipeline's stage has called the model in this micro-step."""
        if self.is_in_pipeline:
            self.is_in_pipeline = False
            raise StepError(pipelines.REFUSED.format("the model was called by a stage of a pipeline"))

    def check(self) -> None:
        """Raise where the model's outputs could not be weighed in this micro-step, so that the loss had to be."""
        if self._state.has_forward and self._needs_exact:
            raise StepError(_NEEDS_EXACT.format(self._needs_exact))

    def _where_weighed(self, act: Callable[..., Any]) -> Callable[..., Any]:
        """``act`` as a hook, in micro-steps that are weighed or noticed: in the others it takes next to nothing.

        A compiler makes no graph of it, nor of what it calls.
        """
        act, state = beside_graphs(act, _NOT_COMPILED), self._state

        def hook(*given: Any) -> Any:
            if is_compiling() or self.counts or state.weight != 1.0:  # a compiler reads no further than to its question
                return act(*given)
            return None

        return skipped_by_compiler(hook)

    def _before_forward(
        self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        state = self._state
        if not (state.phase.is_inside and torch.is_grad_enabled()):
            return None
        if not state.has_forward:
            state.has_forward = True
            self._needs_exact = ""
            self.is_in_pipeline = pipelines.is_running_a_stage()
            self._depth = 0
            self._is_called_once = self._num_calls == 1
            self._num_calls = 0
        self._depth += 1
        if self._depth > 1:  # a part of the model, or the model itself, within a call
            return None
        self._num_calls += 1
        if state.weight == 1.0:
            return None
        self._given.clear()
        if self._has_outside and any(id(part) not in self._own for part in module.parameters()):
            self._needs_exact = "it was called with other parameters than its own"
        if not options and not any(needs_look(argument) for argument in arguments):
            return None
        return replaced(arguments, self._unweighed), replaced(options, self._unweighed)

    def _after_forward(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        state = self._state
        if not (state.phase.is_inside and torch.is_grad_enabled()):
            return None
        self._depth = max(self._depth - 1, 0)
        if self._depth > 0:
            return None
        if state.weight == 1.0:
            replaced(output, self._counted)
            return None
        if self._given:
            if any(tensor._version != version for tensor, version in self._given):
                self._needs_exact = "it changes its inputs in place"
            self._given.clear()
        if (
            isinstance(output, torch.Tensor)
            and output.grad_fn is not None
            and not output._is_view()
            and self._is_called_once
            and self._num_calls == 1
        ):
            self._hook(output, above(output.grad_fn))  # nothing else is made of it within the model
            return None
        return replaced(output, self._weighed, self._cannot_look_into)

    def _counted(self, tensor: torch.Tensor) -> torch.Tensor:
        """The output itself, with a hook by which a backward pass that comes to it is noticed."""
        if tensor.grad_fn is not None:
            self._hook(tensor, above(tensor.grad_fn))
        return tensor

    def _weighed(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of an output in the graph, whose gradient is weighed; other outputs may be made of the original."""
        if self._is_called_once and self._num_calls > 1 and is_made_of_marked(tensor):
            self._needs_exact = "it was called once per micro-step so far, and now again with what it had kept"
        try:
            # A leaf may not change in place, and torch knows it for views.
            same: torch.Tensor = tensor.view_as(tensor) if tensor.is_leaf else Same.apply(tensor)  # type: ignore[no-untyped-call]
        except RuntimeError:  # within torch.func's transforms, which would need more of it
            self._needs_exact = "it was called within a transform of torch.func"
            return tensor
        self._hook(same, [get_gradient_edge(tensor).node])
        return same

    def _hook(self, output: torch.Tensor, before: Sequence[Any]) -> None:
        output.register_hook(lambda gradient: self._weigh(gradient, before))  # type: ignore[no-untyped-call]
        if self._state.weight != 1.0:
            mark(output)
        self._on_output(output)

    def _unweighed(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of an input in the graph; a gradient that leaves the model by it is divided by the weight again."""
        is_own, is_other = origins(tensor, self._own)
        if not is_other:  # made by the model without leaving it: from its parameters, or kept from a call before
            return tensor
        if is_own:
            self._needs_exact = "it was called with something made from its own parameters and from others"
        self._given.append((tensor, tensor._version))
        same = tensor.view_as(tensor)  # a view, so that changes in place are known to both
        before = [get_gradient_edge(tensor).node]
        same.register_hook(lambda gradient: self._unweigh(gradient, before))  # type: ignore[no-untyped-call]
        mark_end(same)
        return same

    def _weigh(self, gradient: torch.Tensor, before: Sequence[Any]) -> torch.Tensor | None:
        state = self._state
        if torch.is_grad_enabled():  # a gradient that is itself to be differentiated
            self._needs_exact = self._needs_exact or "its gradient was differentiated"
            return None
        if not self._engine.is_adding(before):
            return None
        if self.is_exact or state.weight == 1.0:
            self._on_backward()
            return None
        if self._needs_exact:
            raise StepError(_NEEDS_EXACT.format(self._needs_exact))
        self._on_backward()
        return gradient * state.weight

    def _unweigh(self, gradient: torch.Tensor, before: Sequence[Any]) -> torch.Tensor | None:
        if self.is_exact or torch.is_grad_enabled() or not self._engine.is_adding(before):
            return None
        return gradient / self._state.weight

    def _weigh_outside(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """The weighed gradient of a parameter that is trained and not the model's; None to leave it."""
        if not self._state.phase.is_inside or self.is_exact or torch.is_grad_enabled():
            return None
        return gradient * self._state.weight

    def _cannot_look_into(self, value: object) -> None:
        self._needs_exact = f"its output holds a {type(value).__name__}, whose tensors it cannot find"


def callable_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that a loop can call: ``module``, or the children where it only holds them, as a ModuleDict does."""
    own = vars(module).get("forward") or inspect.getattr_static(type(module), "forward")  # compiled, and scripted ones
    if own is not nn.Module.forward:
        yield module
        return
    for child in module.children():
        yield from callable_parts(child)
