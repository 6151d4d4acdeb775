"""WrapperlessDDP: DDP beneath a model that stays what the loop calls, so that it can be put on and taken off.

A module in torch's DistributedDataParallel is wrapped: the loop calls another object, and names change. Here the
wrapper is kept aside, and does its part from two hooks of the module; torch's own composable ``replicate`` does so.
Private to DDP, as of torch 2.13, are the two functions that these hooks call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from elastic_ext.errors import ElasticError
from elastic_ext.torch_private.module_hooks import Hook

__all__ = ["WrapperlessDDP", "arguments_of", "make_sure_of_ddp", "set_aside"]

_PARTS = ("_pre_forward", "_post_forward")
_TAKEN_OVER = (
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "broadcast_buffers",
    "batched_grad_copy",
    "skip_all_reduce_unused_params",
)
_KEPT_ALIVE = ("reducer", "logger", "process_group")
"""What keeps parameters alive that are replaced, or a process group that is to end."""
_OTHERS_TRAINED = (
    "requires_grad of parameters was set within a step, and DDP would average the gradients of those that were trained "
    "when the step began; set it between two steps, before `with trainer.step()`, on all ranks alike"
)


class WrapperlessDDP:
    """DDP of one module without a wrapper: it averages gradients from ``wake`` to ``rest``."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None, options: Mapping[str, Any]) -> None:
        self.module = module
        self.options = dict(options)
        """The options of DDP, by the names of its arguments."""
        self.engine: DistributedDataParallel | None = None
        """The DDP that averages gradients between ``wake`` and ``rest``; else None."""
        self.wrapper: DistributedDataParallel | None = None
        """The user's own DDP, which averages gradients until the first change, and then only calls its module."""
        self._group = group
        self._handles: list[RemovableHandle] = []
        self._parameters: list[nn.Parameter] = []
        self._trained: list[bool] = []  # of each of them, when DDP was made, which averages these alone

    def wake(self, bucket_cap_mb: float | None, *, finds_unused: bool = False) -> DistributedDataParallel:
        """Average the module's gradients over the ranks from now on; all of them call this, with equal parameters.

        ``finds_unused`` has it look in each pass for parameters that the pass has left out, also where its user has not
        told it to.
        """
        options = dict(self.options)
        if finds_unused and not options.get("static_graph"):
            options["find_unused_parameters"] = True
        engine = DistributedDataParallel(
            self.module, process_group=self._group, init_sync=False, bucket_cap_mb=bucket_cap_mb, **options
        )
        self._handles = [
            self.module.register_forward_pre_hook(Hook(_before, self, engine), with_kwargs=True, prepend=True),
            self.module.register_forward_hook(Hook(_after, engine)),
        ]
        self.engine = engine
        self._parameters = list(self.module.parameters())
        self._trained = [part.requires_grad for part in self._parameters]
        return engine

    @property
    def is_outdated(self) -> bool:
        """Whether other parameters are trained than DDP was made for, so that it has to be made anew."""
        if self.engine is None:
            return False
        trained = [part.requires_grad for part in self._parameters]
        if trained == self._trained or not any(trained):
            return False
        is_thawed = any(now and not then for now, then in zip(trained, self._trained, strict=True))
        return is_thawed or not self.engine.find_unused_parameters  # which does without those that are frozen

    def check(self, engine: DistributedDataParallel) -> None:
        """Put DDP's hooks around those of users before a pass; ValueError where other parameters are trained now."""
        before, after = self._handles
        pre_hooks: Any = self.module._forward_pre_hooks
        hooks: Any = self.module._forward_hooks
        if next(iter(pre_hooks)) != before.id:
            pre_hooks.move_to_end(before.id, last=False)
        if next(reversed(hooks)) != after.id:
            hooks.move_to_end(after.id)
        if torch.is_grad_enabled() and engine.require_backward_grad_sync and self.is_outdated:
            raise ValueError(_OTHERS_TRAINED)

    @property
    def holders(self) -> list[object]:
        """The objects of DDP that refer to parameters, and go with it."""
        wrappers = [each for each in (self.engine, self.wrapper) if each is not None]
        found = [part for each in wrappers for part in (vars(each), *vars(each).values())]
        return [self._parameters, *(part for part in found if isinstance(part, (list, dict, set, tuple)))]

    @property
    def is_on_default_group(self) -> bool:
        """Whether gradients are averaged over the default process group."""
        return self._group is None or self._group is dist.group.WORLD

    def let_go_of_group(self) -> None:
        """Refer to no process group while DDP is off, and take the default one from then on."""
        assert self.engine is None and self.wrapper is None
        self._group = None

    def rest(self) -> None:
        """Take DDP off: leave the module as it was."""
        if self.wrapper is not None:
            set_aside(self.wrapper)
            self.wrapper = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._parameters = []
        self.engine = None


def make_sure_of_ddp() -> None:
    """Raise where this torch's DDP lacks the private parts that WrapperlessDDP uses."""
    missing = [name for name in _PARTS if not hasattr(DistributedDataParallel, name)]
    if missing:
        raise ElasticError(
            f"torch {torch.__version__} has no {', '.join(missing)} in DistributedDataParallel, by which gradients are "
            "averaged beneath a model; use a sharded plan, or another torch"
        )


def arguments_of(replica: DistributedDataParallel) -> dict[str, Any]:
    """The options that a user has given to DDP; ValueError where a new DDP could not be given them."""
    for name, what in (
        ("mixed_precision", "mixed precision of its own"),
        ("_comm_hooks", "a communication hook"),
        ("_delay_all_reduce_params", "parameters whose sharing is delayed"),
        ("parameters_to_ignore", "parameters that it ignores"),
        ("bucket_bytes_cap_list", "buckets that are sized one by one"),
    ):
        if getattr(replica, name, None):
            raise ValueError(f"the model is in DDP with {what}; its sharding has to stay")
    told = {name: getattr(replica, name) for name in _TAKEN_OVER if hasattr(replica, name)}
    if told.get("broadcast_buffers") is True:
        del told["broadcast_buffers"]  # as it is by itself; newer ones warn of the name
    return {**told, "device_ids": replica.device_ids}


def set_aside(wrapper: DistributedDataParallel) -> None:
    """Have a user's own wrapper only call its module, and average nothing any more."""
    wrapper.forward = Hook(_straight_through, wrapper.module)  # type: ignore[method-assign]
    for name in _KEPT_ALIVE:
        if hasattr(wrapper, name):
            delattr(wrapper, name)
    wrapper._module_parameters = []  # and so would this


def _straight_through(module: nn.Module, *arguments: Any, **options: Any) -> Any:
    return module(*arguments, **options)


def _before(
    replica: WrapperlessDDP, engine: Any, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    if not torch.compiler.is_compiling():
        replica.check(engine)
    return engine._pre_forward(*arguments, **options)


def _after(engine: Any, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
    return engine._post_forward(output)
