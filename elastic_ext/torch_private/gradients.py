"""Gradients of models in DDP, fully_shard and FSDP1, by private parts of torch.

Each function looks for what it needs first, and raises where this torch keeps it elsewhere: nothing is guessed.
``make_sure_of`` tries all of them before training begins, those too that only a failing step would come to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from elastic_ext.errors import ElasticError
from elastic_ext.version import TESTED_TORCH_IN_WORDS

__all__ = [
    "acts_on_gradients",
    "averaged",
    "can_take_back_passes",
    "data_parallel_groups",
    "divides_by",
    "flat_groups",
    "forget_pass",
    "forget_step",
    "is_flat_sharing",
    "is_idle",
    "is_unfinished",
    "leaves_unused",
    "make_sure_of",
    "num_averaged",
    "num_exchanges",
    "num_hidden",
    "share_buffers",
    "shares",
    "shares_otherwise",
    "versions_of_unshared",
]


def make_sure_of(part: nn.Module) -> None:
    """Raise where this torch lacks a private part that is needed of a module in DDP, fully_shard or FSDP1."""
    if isinstance(part, DistributedDataParallel):
        is_unfinished(part)
        _found(part.reducer, "_reset_state")
        _found(part, "_sync_buffers")
        shares_otherwise(part)
        next(averaged(part), None)
        num_averaged(part)
    elif isinstance(part, FSDPModule):
        shares(part, all_of_it=True)
        divides_by(part)
        num_hidden(part)
        leaves_unused(part)
        versions_of_unshared(part)
        _found(_found(part, "_get_fsdp_state")(), "_is_root")
        for group in _parameter_groups(part):
            _found(group, "_partial_reduce_output")
    elif isinstance(part, FullyShardedDataParallel):
        is_flat_sharing(part)
        is_idle(part)


def is_unfinished(replica: DistributedDataParallel) -> bool:
    """Whether a backward pass through DDP was begun that has not averaged all gradients."""
    check = _found(_found(replica, "reducer"), "_check_reducer_finalized")
    try:
        check()
    except RuntimeError:  # so it says that it has not
        return True
    return False


def forget_pass(replica: DistributedDataParallel) -> None:
    """Have DDP give up an unfinished backward pass."""
    _found(_found(replica, "reducer"), "_reset_state")()


def shares_otherwise(replica: DistributedDataParallel) -> str | None:
    """Why DDP does not simply average gradients over its ranks, in words; None where it does."""
    if replica.static_graph:
        return "it has a static graph"
    if _found(replica, "_comm_hooks"):
        return "it has a communication hook"
    if getattr(replica, "buffer_hook", None) is not None:
        return "it has a communication hook for buffers"
    if _found(replica, "mixed_precision") is not None:
        return "it has mixed precision of its own"
    if getattr(replica, "_delay_all_reduce_params", None):
        return "it averages some gradients later than the others (delay_all_reduce_named_params)"
    return None


def averaged(replica: DistributedDataParallel) -> Iterator[nn.Parameter]:
    """The parameters whose gradients a DDP made now would average, in the same order on all ranks."""
    ignored = _found(replica, "parameters_to_ignore")
    seen: set[nn.Parameter] = set()
    for prefix, module in replica.module.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_averaged = parameter.requires_grad and f"{prefix}.{name}" not in ignored  # ".name" of a root's own
            if is_averaged and parameter not in seen:
                seen.add(parameter)
                yield parameter


def num_averaged(replica: DistributedDataParallel) -> int:
    """How many parameters' gradients DDP averages, as of when it was made."""
    number = _found(replica, "_get_ddp_logging_data")().get("num_parameter_tensors")
    if number is None:
        raise _unknown("num_parameter_tensors")
    return int(number)


def share_buffers(replica: DistributedDataParallel) -> None:
    """Broadcast the first rank's buffers to all ranks now, if DDP would at its next call."""
    if _found(replica, "will_sync_module_buffers")():
        with torch.no_grad():
            _found(replica, "_sync_buffers")()


def acts_on_gradients(parameter: nn.Parameter) -> bool:
    """Whether a parameter has a hook that acts on its gradient at once, and may step an optimizer there."""
    return bool(_found(parameter, "_post_accumulate_grad_hooks"))


def data_parallel_groups(module: FSDPModule) -> tuple[dist.ProcessGroup, ...]:
    """The process groups over which fully_shard averages a module's gradients, one after the other, inner first."""
    found: list[dist.ProcessGroup] = []
    info = _mesh_info(module)
    for name in ("shard_process_group", "replicate_process_group"):
        group = getattr(info, name, None)
        if group is not None:
            found.append(group)
    if not found:
        raise _unknown("shard_process_group")
    return tuple(found)


def divides_by(module: FSDPModule) -> float | None:
    """What fully_shard divides summed gradients by, if the user has set that; None for the number of ranks."""
    for part in _parts(module):
        for group in _parameter_groups(part):
            factor: float | None = _found(group, "gradient_divide_factor")
            if factor is not None:
                return factor
    return None


def shares(part: FSDPModule, *, all_of_it: bool) -> bool:
    """Whether the next backward pass shares ``part``'s own gradients over all ranks; without ``all_of_it``, over none.

    Neither is so where ``set_requires_all_reduce`` keeps gradients within one of two meshes.
    """
    return all(
        bool(_found(group, name)) is all_of_it
        for group in _parameter_groups(part)
        for name in ("reduce_grads", "all_reduce_grads")
    )


def is_flat_sharing(module: FullyShardedDataParallel) -> bool:
    """Whether the next backward pass through an FSDP1 module shares its gradients, by its ``no_sync``."""
    return bool(_found(module, "_sync_gradients"))


def num_hidden(root: FSDPModule) -> int:
    """A number that grows with every gradient that fully_shard accumulates without sharing it."""
    number = 0
    for parameter in _sharded_parameters(root):
        number += sum(1 + each._version for each in _unshared(parameter) if each is not None)
    return number


def leaves_unused(root: FSDPModule) -> bool:
    """Whether a trained parameter under fully_shard has no gradient, neither shared nor accumulated unshared."""
    return any(
        sharded.requires_grad and sharded.grad is None and all(each is None for each in _unshared(parameter))
        for parameter in _sharded_parameters(root)
        if (sharded := _found(parameter, "sharded_param")) is not None
    )


def versions_of_unshared(root: FSDPModule) -> list[tuple[torch.Tensor, int]]:
    """For each gradient that a trained parameter has unshared: a counter of the gradient's changes, and its count now.

    The counter is a tensor with the gradient's version, which rises with each change in place, and with none of its
    memory. It still counts once the gradient is shared.
    """
    found = []
    for parameter in _sharded_parameters(root):
        for each in _unshared(parameter) if _found(parameter, "sharded_param").requires_grad else ():
            if each is not None:
                counter = each.detach()
                counter.data = each.new_empty(0)
                found.append((counter, counter._version))
    return found


def can_take_back_passes() -> bool:
    """Whether this torch can give up a pass through fully_shard's modules in its middle; older ones cannot."""
    return hasattr(FSDPModule, "reset_iter_state")


def forget_step(root: FSDPModule) -> None:
    """Have fully_shard give up a failed pass, and drop unshared gradients, which outlive ``zero_grad()``."""
    has_run = _found(_found(root, "_get_fsdp_state")(), "_is_root")  # None before the first pass
    if has_run and can_take_back_passes():
        root.reset_iter_state()
    for part in _parts(root):
        for group in _parameter_groups(part):
            _found(group, "_partial_reduce_output")
            group._partial_reduce_output = None  # shared within one of two meshes
            for parameter in _found(group, "fsdp_params"):
                _found(parameter, "unsharded_accumulated_grad")
                parameter.unsharded_accumulated_grad = None
                unsharded = getattr(parameter, "_unsharded_param", None)  # from the first pass on
                if unsharded is not None:
                    unsharded.grad = None


def flat_groups(module: FullyShardedDataParallel) -> tuple[dist.ProcessGroup, ...]:
    """The process groups over which FSDP1 averages a module's gradients, the inner one first."""
    outer = getattr(module, "_inter_node_pg", None)  # of its hybrid strategies
    inner = module.process_group
    assert inner is not None
    return (inner,) if outer is None else (inner, outer)


def is_idle(module: FullyShardedDataParallel) -> bool:
    """Whether no pass through FSDP1's modules is under way, which they could not give up."""
    return all(
        str(_found(part, "training_state").name) == "IDLE"
        for part in module.modules()
        if isinstance(part, FullyShardedDataParallel)
    )


def num_exchanges(groups: tuple[dist.ProcessGroup, ...]) -> int:
    """How many collectives were begun on some process groups; 0 where a backend does not count them."""
    try:
        counters: list[Any] = [group._get_sequence_number_for_group for group in groups]  # type: ignore[attr-defined]
        return sum(int(counter()) for counter in counters)
    except (AttributeError, RuntimeError):  # a backend that does not count
        return 0


def _parts(root: FSDPModule) -> Iterator[FSDPModule]:
    assert isinstance(root, nn.Module)
    return (part for part in root.modules() if isinstance(part, FSDPModule))


def _parameter_groups(module: FSDPModule) -> list[Any]:
    state = _found(module, "_get_fsdp_state")()
    groups = getattr(state, "_fsdp_param_groups", None)  # older torches have at most one
    if groups is not None:
        return list(groups)
    group = _found(state, "_fsdp_param_group")
    return [] if group is None else [group]


def _sharded_parameters(root: FSDPModule) -> Iterator[Any]:
    """The FSDPParam that fully_shard keeps of each parameter."""
    for part in _parts(root):
        for group in _parameter_groups(part):
            yield from _found(group, "fsdp_params")


def _unshared(parameter: Any) -> list[torch.Tensor | None]:
    """The gradients that fully_shard accumulates for one of its parameters without sharing them, None where none."""
    gathered = [_found(parameter, "unsharded_accumulated_grad")]
    if hasattr(parameter, "_unsharded_param"):
        gathered.append(parameter._unsharded_param.grad)
    return gathered


def _mesh_info(module: FSDPModule) -> Any:
    for part in _parts(module):
        for group in _parameter_groups(part):
            return _found(group, "mesh_info")
    raise ValueError("the model is wrapped with fully_shard and has no parameters; give a model that has some")


def _found(holder: Any, name: str) -> Any:
    try:
        return getattr(holder, name)
    except AttributeError:
        raise _unknown(name) from None


def _unknown(name: str) -> ElasticError:
    return ElasticError(
        f"torch {torch.__version__} keeps {name} of DDP or sharded modules in another place than the versions that "
        f"this library knows ({TESTED_TORCH_IN_WORDS}); install one of these, or train without the trainer"
    )
