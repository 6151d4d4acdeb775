"""Reasons in words why a model, or a holder of its parameters, stands against a change of plan; None without any.

What the plans themselves say against it is in transition.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.torch_private.sharded import has_hooks

from . import rewire
from .ddp import WrapperlessDDP
from .units import Modules, Unit, UnitSettings

__all__ = [
    "why_not_called",
    "why_not_cut",
    "why_not_held",
    "why_not_leave_ddp",
    "why_not_mixed",
    "why_not_other_ranks",
    "why_not_parted",
    "why_not_replace",
    "why_not_tied",
    "why_not_unit",
    "why_not_whole",
]

_KEEPS = (
    'which DDP does not know of; choose the strategy "hybrid_shard" with shard_degree=1 instead of no_shard, which '
    "keeps it"
)
_BECOMES = (
    "and it becomes another object when the model goes between no_shard and a sharded plan; let go of it, or register "
    "it with trainer.register_state"
)
_STAY = "under which parameters stay the same objects"


def why_not_called(model: nn.Module) -> str | None:
    """Why the model's passes would not be seen: the model is never called itself; None where it is."""
    if getattr(type(model), "forward", None) is not nn.Module.forward or "forward" in vars(model):
        return None
    return (
        f"the model is a {type(model).__name__} that only holds others and is not called, and gradients are averaged "
        "in hooks on the model's forward(); give the trainer a module whose forward() calls the others"
    )


def why_not_unit(plan: ParallelPlan, blocks: Sequence[nn.Module]) -> str | None:
    """Why units of several blocks cannot be made: the model has no blocks; None where they can."""
    if plan.is_replicated or plan.unit in (1, "whole") or blocks:
        return None
    return f'unit is {plan.unit}, and no repeated blocks were found; name them with units=, or give "whole"'


def why_not_tied(root: nn.Module, groups: Sequence[Modules]) -> str | None:
    """Why these units cannot be: one parameter would lie in two of them. Units are given innermost first."""
    owner = _owners(groups)
    seen: dict[int, tuple[int, str]] = {}
    for prefix, module in root.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(module) not in owner:
                continue
            full = f"{prefix}.{name}" if prefix else name
            first = seen.setdefault(id(parameter), (owner[id(module)], full))
            if first[0] != owner[id(module)]:
                return (
                    f"{first[1]} and {full} are one parameter, and would lie in two units; choose units that hold "
                    'both, or unit="whole"'
                )
    return None


def why_not_cut(model: nn.Module, left_out: Collection[torch.Tensor] = ()) -> str | None:
    """Why a parameter cannot be sharded, or its gradients cannot; those left out are not looked at."""
    for name, parameter in model.named_parameters():
        if parameter in left_out:
            continue
        if parameter.dim() == 0:
            return f"{name} has no dimension that fully_shard could cut; give it the shape (1,)"
        if parameter.numel() == 0:
            return f"{name} is of shape {tuple(parameter.shape)}, which has nothing to share out; leave it out"
        if not parameter.is_contiguous():
            return (
                f"{name} does not lie in memory in the order of its dimensions, as with memory_format=channels_last or "
                "t(), and fully_shard takes no such parameter; make it contiguous() before the model is spread"
            )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            return f"{name} has sparse gradients, which fully_shard does not share out; make it with sparse=False"
    return None


def why_not_parted(parameters: Iterable[nn.Parameter]) -> str | None:
    """Why the plan has to stay: without fully_shard, some parameters are sharded already."""
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        return "the model is cut by tensor parallelism without fully_shard; its sharding has to stay"
    return None


def why_not_mixed(root: nn.Module, groups: Sequence[Modules]) -> str | None:
    """Why a unit cannot be: its trained parameters are of several types, at which fully_shard fails in a pass."""
    owner = _owners(groups)
    first: dict[int, tuple[torch.dtype, str]] = {}
    for prefix, module in root.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad or id(module) not in owner:
                continue
            full = f"{prefix}.{name}" if prefix else name
            dtype, other = first.setdefault(owner[id(module)], (parameter.dtype, full))
            if dtype != parameter.dtype:
                return (
                    f"{other} is {dtype} and {full} is {parameter.dtype}, and one unit would gather both; choose units "
                    "whose trained parameters are of one type, or convert them"
                )
    return None


def why_not_leave_ddp(options: Mapping[str, Any]) -> str | None:
    """Why DDP has to stay: it was told that ranks may use different parts of the model.

    Under fully_shard, the gathering of such parts would be taken for one another.
    """
    if not options.get("find_unused_parameters"):
        return None
    return (
        "the model is in DDP with find_unused_parameters=True: a sharded plan gathers parameters in the forward pass, "
        "and where ranks do not use the same ones, in the same order, wrong values would come to them; if all ranks "
        "do, wrap the model without find_unused_parameters"
    )


def why_not_other_ranks(replica: WrapperlessDDP) -> str | None:
    """Why ranks cannot come or leave: DDP has a process group of its own, or what was made for this one."""
    if not replica.is_on_default_group:
        return "the model is in DDP on a process group of its own, and ranks come or leave the default one"
    if replica.options.get("static_graph"):
        return "the model is in DDP with static_graph=True, which was recorded for this number of ranks"
    return None


def why_not_whole(model: nn.Module, units: Sequence[Unit], left_out: Collection[torch.Tensor]) -> str | None:
    """Why parameters cannot become whole: something is set on their units that would be lost."""
    if left_out:
        return f"{len(left_out)} parameters were left out of fully_shard with ignored_params, {_KEEPS}"
    for unit in units:
        if unit.precision != MixedPrecisionPolicy() or type(unit.offload) is not OffloadPolicy:
            return f"the model is sharded with a policy for mixed precision or offloading, {_KEEPS}"
        if unit.settings != UnitSettings():
            return f"gradients of the model are divided or shared in a way of your own, {_KEEPS}"
    patched = rewire.patched_methods(model)
    return f"{patched[0]} was registered as a forward method of fully_shard, {_KEEPS}" if patched else None


def why_not_replace(parameters: Sequence[torch.Tensor], *, is_whole: bool) -> str | None:
    """Why parameters cannot become other objects, whole ones or sharded ones: their class, or hooks."""
    for tensor in parameters:
        if type(tensor) not in (nn.Parameter, DTensor):
            return f"a parameter of shape {tuple(tensor.shape)} is a {type(tensor).__qualname__}, {_advice(is_whole)}"
        if has_hooks(tensor):
            return f"a parameter of shape {tuple(tensor.shape)} has hooks, {_advice(is_whole)}"
    return None


def why_not_held(strangers: Sequence[str], *, is_whole: bool) -> str | None:
    """Why parameters cannot become other objects, whole ones or sharded ones: ``strangers`` hold some of them."""
    if not strangers:
        return None
    more = f", and {len(strangers) - 3} more" if len(strangers) > 3 else ""
    return f"a parameter is also held by {', '.join(strangers[:3])}{more}, {_advice(is_whole)}"


def _advice(is_whole: bool) -> str:
    """What to do about a parameter that somebody holds as parameters become whole, or sharded."""
    if is_whole:
        return f'{_BECOMES}, or choose the strategy "hybrid_shard" with shard_degree=1 instead of no_shard, {_STAY}'
    kept = 'trainer.parallelize(model, ParallelPlan(strategy="hybrid_shard", shard_degree=1))'
    return (
        f"{_BECOMES}. Or have the script begin, at its next start, with {kept} instead of no_shard or DDP, {_STAY}: a "
        "job that runs cannot go there any more"
    )


def _owners(groups: Sequence[Modules]) -> dict[int, int]:
    """The unit that has each module, by the module's identity; units are given innermost first."""
    owner: dict[int, int] = {}
    for at, modules in reversed(list(enumerate(groups))):  # the outermost first, then what lies within it
        for module in modules:
            owner.update((id(part), at) for part in module.modules())
    return owner
