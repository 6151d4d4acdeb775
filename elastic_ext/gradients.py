"""Gradients: what a step does to the gradients of a plain or DDP model: weigh them, share them, divide them, drop them.

Weighing acts where a backward pass enters the model, on the gradients of its outputs, and takes itself back where it
leaves through the model's inputs. So each path through the model counts once, however often the model was called, and
``loss.backward()`` needs no help.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from .errors import StepError
from .step_state import StepState

__all__ = ["Gradients"]

_MARK = "elastic_ext: the output behind this view"
_NEEDS_EXACT = (
    "the model cannot weigh its own gradients here: {}; call trainer.backward(loss) instead of loss.backward()"
)
_UNWEIGHTED = (
    "gradients came from a loss that does not go through the model's outputs, so they do not count as a part of the "
    "step; call trainer.backward(loss) instead of loss.backward()"
)

_UNSHARED = (
    "optimizer.step() was called in a micro-step that ends a step, and no backward pass through the model went before "
    "it in that micro-step: the ranks have not shared their gradients; call loss.backward() in every micro-step, or "
    "leave the optimizer out as well, on all ranks"
)


class Gradients:
    """The gradients of one model on this rank, in a step."""

    def __init__(self, model: nn.Module, state: StepState) -> None:
        self._model = model
        self._state = state
        self._replicas = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
        self._entries: list[nn.Module] = list(self._replicas) or list(_callable_parts(model))
        self._handles: list[RemovableHandle] = []
        self._is_backward_exact = False  # inside backward(), which weighs the loss itself
        self._awaited: list[torch.Tensor] = []  # outputs of a pass whose gradients the other ranks wait for
        self._needs_exact = ""  # why only backward() can weigh the loss of this micro-step
        self.on_shared_buffers: Callable[[], None] | None = None
        """Called in a step's first pass, when the buffers of all ranks are those of the first one."""
        self._has_shared_buffers = False  # in the step under way
        self.optimizers: list[torch.optim.Optimizer] = []
        self._num_items: torch.Tensor | None = None
        self._seeds: dict[tuple[float, torch.dtype, torch.device], torch.Tensor] = {}

    @property
    def num_ranks(self) -> int:
        """The data-parallel degree: how many ranks have this model and average its gradients."""
        return dist.get_world_size(self._group) if self._replicas else 1

    @property
    def rank(self) -> int:
        """This one's place among them."""
        return dist.get_rank(self._group) if self._replicas else 0

    @property
    def are_shared(self) -> bool:
        """Whether anything averages gradients over ranks."""
        return bool(self._replicas)

    @property
    def num_items(self) -> torch.Tensor | None:
        """What ``backward(num_items=)`` has counted in this step, None where it was not used."""
        return self._num_items

    def parameters(self) -> Iterator[torch.Tensor]:
        """What has gradients: the model's parameters, and what else the optimizers train."""
        trained = (
            part for optimizer in self.optimizers for group in optimizer.param_groups for part in group["params"]
        )
        yield from dict.fromkeys([*self._model.parameters(), *trained])

    def watch(self, *, needed: bool) -> None:
        """See forward and backward passes, and weigh them; where it is not needed, stay out of the model's way."""
        if needed == bool(self._handles):
            return
        if needed:
            for entry in self._entries:
                self._handles.append(entry.register_forward_pre_hook(self._before_forward, with_kwargs=True))
                self._handles.append(entry.register_forward_hook(self._after_forward))
            for replica in self._replicas if self.on_shared_buffers is not None else ():
                self._handles.append(replica.module.register_forward_pre_hook(self._after_sharing_buffers))
        else:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    def release(self) -> None:
        """Leave the model as it was found."""
        self.watch(needed=False)
        self.share(now=True)

    def share(self, *, now: bool) -> None:
        """Have the next backward pass average gradients over the ranks, or keep them to this rank."""
        for replica in self._replicas:
            replica.require_backward_grad_sync = now

    def backward(self, loss: torch.Tensor, num_items: float | torch.Tensor | None, **options: Any) -> None:
        """``loss.backward()`` with this micro-batch's weight, however the loss came about."""
        state = self._state
        weight = state.weight
        if num_items is not None:
            weight = 1.0
            self._count(loss, num_items)
        elif self._num_items is not None:
            raise StepError(
                "backward() was called with num_items before in this step, and without here; always give it"
            )
        self._is_backward_exact = state.is_exact = True
        try:
            if weight == 1.0:
                loss.backward(**options)  # type: ignore[no-untyped-call]
            elif loss.numel() == 1 and "gradient" not in options:
                loss.backward(self._seed(weight, loss), **options)  # type: ignore[no-untyped-call]
            else:
                (loss * weight).backward(**options)  # type: ignore[no-untyped-call]
        finally:
            self._is_backward_exact = False
        state.has_backward = True
        if state.is_last and num_items is not None:
            self._divide()

    def check(self) -> None:
        """Raise where this micro-step's gradients cannot be those of the step."""
        state = self._state
        if state.is_last and not state.has_backward and self.num_ranks > 1 and state.num_begun == 0:
            raise StepError(_UNSHARED)
        if state.is_exact or not self._handles or state.weight == 1.0:
            return
        if state.has_forward and self._needs_exact:
            raise StepError(_NEEDS_EXACT.format(self._needs_exact))
        if not state.has_backward and state.index == 0 and any(part.grad is not None for part in self.parameters()):
            raise StepError(_UNWEIGHTED)

    def have_shared_buffers(self) -> None:
        """A step that is taken again does not share buffers again: DDP does so in a step's first pass alone.

        Where that pass failed, DDP has shared them and not noted it.
        """
        for replica in self._replicas:
            replica.require_forward_param_sync = False

    @property
    def is_awaited(self) -> bool:
        """Whether a forward pass was made whose backward pass shares gradients, and has not begun."""
        return bool(self._awaited)

    def answer(self) -> None:
        """Make the backward pass that other ranks wait for, with zeros, where this rank has left it out.

        Torch's DDP counts on it: without it a later pass would be taken for it.
        """
        outputs, self._awaited = self._awaited, []
        if outputs:
            is_exact, self._is_backward_exact = self._is_backward_exact, True
            try:
                torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
            finally:
                self._is_backward_exact = is_exact

    def drop(self) -> None:
        """Forget what this step has gathered."""
        self._num_items = None
        for parameter in self.parameters():
            parameter.grad = None

    def end_step(self) -> None:
        """The next step counts its items anew, and shares buffers."""
        self._num_items = None
        self._has_shared_buffers = False

    @property
    def _group(self) -> dist.ProcessGroup:
        return self._replicas[0].process_group

    def _seed(self, weight: float, loss: torch.Tensor) -> torch.Tensor:
        """What a backward pass starts with; kept, since making it costs as much as the rest of the call."""
        key = (weight, loss.dtype, loss.device)
        seed = self._seeds.get(key)
        if seed is None or seed.shape != loss.shape:
            if len(self._seeds) > 64:  # tails of many sizes
                self._seeds.clear()
            seed = self._seeds[key] = torch.full_like(loss, weight, requires_grad=False)
        return seed

    def _count(self, loss: torch.Tensor, num_items: float | torch.Tensor) -> None:
        state = self._state
        if self._num_items is None and state.index > 0:
            raise StepError("backward() was called without num_items before in this step, and with it here")
        if self._num_items is not None and state.is_last and state.has_backward:
            raise StepError("backward(num_items=) was called twice in the last micro-step; add the losses up first")
        count = torch.as_tensor(num_items, dtype=torch.float64, device=loss.device).detach()
        self._num_items = count.clone() if self._num_items is None else self._num_items + count

    def _divide(self) -> None:
        """Turn the ranks' averaged sums into the mean over all items of the step."""
        total = self._num_items
        assert total is not None
        if self._replicas:
            dist.all_reduce(total, group=self._group)
        if not total.item() > 0:
            raise StepError(
                f"the num_items of the step add up to {total.item():g} over all ranks; allowed: more than 0"
            )
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        torch._foreach_div_(gradients, float(total.item() / self.num_ranks))

    def _after_sharing_buffers(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self._state.is_inside and not self._has_shared_buffers and self.on_shared_buffers is not None:
            self._has_shared_buffers = True
            self.on_shared_buffers()

    def _before_forward(
        self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        state = self._state
        if not (torch.is_grad_enabled() and state.is_inside):
            return None
        if not state.has_forward:
            state.has_forward = True
            self._needs_exact = ""
            return None
        if state.weight == 1.0 or not any(tensor.requires_grad for tensor in _tensors((arguments, options))):
            return None
        return _replaced(arguments, self._unweighed), _replaced(options, self._unweighed)

    def _after_forward(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        if not (torch.is_grad_enabled() and self._state.is_inside):
            return None
        return _replaced(output, self._weighed)

    def _weighed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values; a gradient that enters the model here counts by the weight."""
        weight, state = self._state.weight, self._state

        def weigh(gradient: torch.Tensor) -> torch.Tensor | None:
            if torch.is_grad_enabled():  # a gradient that is itself to be differentiated
                self._needs_exact = self._needs_exact or "its gradient was differentiated"
                return None
            state.has_backward = True
            self._awaited.clear()
            if self._is_backward_exact or weight == 1.0:
                return None
            if self._needs_exact:
                raise StepError(_NEEDS_EXACT.format(self._needs_exact))
            return gradient * weight

        same = tensor.view_as(tensor)
        same.register_hook(weigh)  # type: ignore[no-untyped-call]
        if self._replicas and state.is_last:
            self._awaited.append(same)
        if weight != 1.0:
            _notes_of(same)[_MARK] = tensor
        return same

    def _unweighed(self, tensor: torch.Tensor) -> torch.Tensor:
        """An input of a model that was called before in this micro-step, without the weight of what it came from."""
        if tensor.grad_fn is None:
            return tensor
        original = _notes_of(tensor).get(_MARK)
        if original is not None:
            return original  # type: ignore[no-any-return]
        is_weighed, has_others = _origins(tensor)
        if not is_weighed:
            return tensor
        if has_others:
            self._needs_exact = "it was called with something made from its own output and from other parameters"
        weight = self._state.weight
        same = tensor.view_as(tensor)
        same.register_hook(lambda gradient: None if self._is_backward_exact else gradient / weight)  # type: ignore[no-untyped-call]
        return same


def _notes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """What can be noted on the place in the graph that a tensor came from."""
    assert tensor.grad_fn is not None
    return cast("dict[str, Any]", tensor.grad_fn.metadata)  # torch's annotation takes the property for a method


def _origins(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Whether a model's weighed output, and whether anything else that is trained, is among what it was made from."""
    is_weighed = has_others = False
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _MARK in cast("dict[str, Any]", node.metadata):
            is_weighed = True
        elif not node.next_functions:
            has_others = True
        else:
            waiting += [above for above, _ in node.next_functions]
    return is_weighed, has_others


def _callable_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The module, or where it only holds others, such as a ModuleDict, those that can be called."""
    if type(module).forward is not nn.Module.forward:
        yield module
        return
    for child in module.children():
        yield from _callable_parts(child)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))


def _replaced(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of nested containers with those tensors changed that need gradients."""
    if isinstance(value, torch.Tensor):
        return change(value) if value.requires_grad else value
    if isinstance(value, tuple):
        items = [_replaced(item, change) for item in value]
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    if isinstance(value, list):
        return [_replaced(item, change) for item in value]
    if isinstance(value, dict):
        value = copy.copy(value)  # of its own class, which may do more than hold
        for name, item in list(value.items()):
            value[name] = _replaced(item, change)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(value, field.name, _replaced(getattr(value, field.name), change))
    return value
