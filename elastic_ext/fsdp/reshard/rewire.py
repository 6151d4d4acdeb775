"""What fully_shard leaves on a model: read, taken off, and put on again as metadata, without moving an element.

The one place that reaches into FSDP2's private parts, with fully_shard.py, which has the versions of torch that they
are known of and what differs between these: ``survey`` looks for all of them before anything is touched, and raises on
another version or where one is missing.

What units, slots and places are is said in units.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from .fully_shard import (
    HOOK_HANDLES,
    OF_MEMORY,
    before,
    drop_groups,
    found,
    groups_of,
    has_own_scatter_group,
    hooks_of,
    make_memory,
    make_sure_of_torch,
    put_after,
    registered_ahead,
    registries,
    set_on,
    settings_of,
    unknown,
)
from .units import Ahead, Modules, ParameterSlot, Place, Survey, Unit, UnitSettings

__all__ = [
    "bind",
    "dim_of",
    "dim_of_tensor",
    "make_sure_of",
    "noted_on",
    "patched_methods",
    "place_hooks",
    "put_on",
    "rebind",
    "set_prefetch",
    "settle",
    "slots_of",
    "stand_in",
    "survey",
    "take_off",
]

_NOT_SHARED = "gradients were accumulated that the ranks have not averaged yet; the change waits for the next step"
_DEFAULT_COMMUNICATION = ("DefaultAllGather", "DefaultReduceScatter")
_OF_A_STATE = (
    "_is_root",
    "_lazy_init",
    "_training_state",
    "_state_ctx",
    "_comm_ctx",
)
_OF_A_GROUP = ("_module_to_pre_save_state_dict_hook_handle", "_module_to_pre_load_state_dict_hook_handle")
_RECOMPUTES = "torch.distributed._composable.checkpoint_activation"  # whose hook ends a pass before all others
_AFTER_LOADING = "FSDPParam."  # hooks of the class that keeps a parameter
_LEFT_ON_MODULES = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


def make_sure_of(model: nn.Module) -> None:
    """Raise where a model's sharding cannot be changed: ElasticError for this torch, ValueError as ``survey`` does."""
    make_sure_of_torch()
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        survey(model)


def survey(model: nn.Module) -> Survey:
    """What fully_shard has made of a model; ElasticError for an unknown torch, ValueError if not to be made again."""
    make_sure_of_torch()
    kept = [(state, groups_of(state)) for state in _states(model)]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # give back what a pass without one backwards has gathered
    units: list[Unit] = []
    slots: list[ParameterSlot] = []
    for state, groups in kept:
        if len(groups) > 1:
            raise ValueError(
                f"{_called(model, state)} has parameters on several meshes; allowed: all parameters on one mesh"
            )
        for name in _OF_A_STATE:
            found(state, name)
        units.append(_unit(model, state, groups[0]) if groups else _empty_unit(state))
        for group in groups:
            slots += [_slot(keeper) for keeper in found(group, "fsdp_params")]
    return Survey(tuple(reversed(units)), tuple(slots), {module: ahead for module, _, ahead in _hooked(model)})


def take_off(model: nn.Module) -> None:
    """Undo fully_shard between two steps, also where it has failed; sharded parameters stay where they are registered.

    Nothing of what it held is kept alive by what refers to it in a circle.
    """
    for state in _states(model):
        for group in groups_of(state):
            for keeper in group.fsdp_params:
                keeper.__dict__.clear()
            for handles in (
                group._module_to_pre_save_state_dict_hook_handle,
                group._module_to_pre_load_state_dict_hook_handle,
            ):
                for handle in handles.values():
                    handle.remove()
            group.__dict__.clear()
        for name in HOOK_HANDLES:
            if hasattr(state, name):
                getattr(state, name).remove()
        drop_groups(state)
        state._state_ctx.all_states.clear()
        state._state_ctx.iter_forward_root = None
        state._comm_ctx.__dict__.clear()
    for module in model.modules():
        _take_off_module(module)


def stand_in(parameters: Iterable[tuple[nn.Parameter, Sequence[Place]]]) -> None:
    """Put parameters without memory in the places of others, for fully_shard to cut."""
    for parameter, places in parameters:
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        stand = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for module, name in places:
            module._parameters[name] = stand


def put_on(units: Sequence[Unit], mesh: DeviceMesh | None, dims: dict[Place, int], left_out: set[nn.Parameter]) -> None:
    """Have fully_shard make these units, innermost first, on ``mesh``, or on their own where it is None.

    Parameters are cut along ``dims`` (0 where not named), but for those that are ``left_out``. Its hooks come after
    those that were there; ``place_hooks`` has them elsewhere.
    """
    own = next((unit.mesh for unit in units if unit.mesh is not None), None)
    for unit in units:
        by_identity = {id(module._parameters[name]): dim for (module, name), dim in dims.items()}

        def placed(parameter: nn.Parameter, by_identity: dict[int, int] = by_identity) -> Shard | None:
            dim = by_identity.get(id(parameter), 0)
            return Shard(dim) if dim else None

        modules: Any = unit.modules[0] if len(unit.modules) == 1 else list(unit.modules)
        fully_shard(
            modules,
            mesh=mesh or unit.mesh or own,
            reshard_after_forward=unit.reshard_after_forward,
            mp_policy=unit.precision,
            offload_policy=unit.offload,
            ignored_params=left_out or None,
            shard_placement_fn=placed if any(dims.values()) else None,
        )
        set_on(unit.modules[0], unit.settings)
    set_prefetch(units)


def place_hooks(model: nn.Module, ahead: Ahead) -> None:
    """Have fully_shard's hooks, which it has just registered, after those that were ``ahead`` of them before.

    On other modules they come to where they would be if all others had been registered later.
    """
    for module, own, _ in _hooked(model):
        before_pass, after_pass = _hooks(module)
        default = (
            registered_ahead(_without(before_pass, own), lambda hook: False),
            registered_ahead(_without(after_pass, own), lambda hook: getattr(hook, "__module__", "") == _RECOMPUTES),
        )
        for hooks, first in zip((before_pass, after_pass), ahead.get(module, default), strict=True):
            for number in own & hooks.keys():
                put_after(hooks, number, first)


def settle(model: nn.Module) -> None:
    """Do what fully_shard leaves for the first pass, so that any pass of the model may come first.

    In one under ``torch.inference_mode()``, what is gathered would lie in memory that training cannot use later on; one
    through a part of the model alone would have that part be the outermost.
    """
    states = _states(model)
    if not states or any(part.is_meta for part in model.parameters()):
        return
    with torch.inference_mode(mode=False):
        if len(states[0]._modules) == 1:
            states[0]._lazy_init()
        for state in states:
            for group in groups_of(state):
                make_memory(group)


def set_prefetch(units: Sequence[Unit]) -> None:
    """Have units gather others ahead."""
    for unit in units:
        first = _as_unit(unit.modules[0])
        first.set_modules_to_forward_prefetch([_as_unit(modules[0]) for modules in unit.forward_prefetch])
        first.set_modules_to_backward_prefetch([_as_unit(modules[0]) for modules in unit.backward_prefetch])


def slots_of(model: nn.Module) -> list[ParameterSlot]:
    """The slots of all parameters, in which fully_shard keeps them, as it has just been put on."""
    return [_slot(keeper) for state in _states(model) for group in groups_of(state) for keeper in group.fsdp_params]


def bind(slot: ParameterSlot, parameter: nn.Parameter, local: torch.Tensor) -> None:
    """Put a parameter into a slot, the same object as ever, with ``local`` for its memory on this rank.

    ``local`` is dense; where the parts of a tensor are uneven, its storage has room for the largest one.
    """
    keeper = slot.keeper
    rebind(cast(DTensor, parameter), local, keeper.sharded_param)
    for module, name in slot.places:
        module._parameters[name] = parameter
    padded = keeper.padded_sharded_param_size
    if local.untyped_storage().nbytes() >= padded.numel() * local.element_size() and local.storage_offset() == 0:
        keeper._sharded_param_data = local.as_strided((padded.numel(),), (1,))
    keeper.sharded_param = parameter
    keeper.reset_sharded_param()


def rebind(tensor: DTensor, local: torch.Tensor, like: DTensor) -> None:
    """Give a DTensor, the same object as ever, the layout of ``like``, and ``local`` for its memory on this rank."""
    held, model = cast(Any, tensor), cast(Any, like)
    held._local_tensor = local
    held._spec = model._spec


def dim_of(slot: ParameterSlot) -> int:
    """The dimension along which a slot's parameter is cut."""
    dim: int = slot.keeper.fsdp_placement.dim
    return dim


def dim_of_tensor(tensor: DTensor) -> int:
    """The dimension along which the last dimension of a mesh cuts a tensor; 0 where it does not."""
    last = tensor.placements[-1]
    return last.dim if isinstance(last, Shard) else 0


def noted_on(parameter: torch.Tensor) -> dict[str, Any]:
    """The attributes that users have set on a parameter."""
    return {name: value for name, value in vars(parameter).items() if name != "_is_param" and name[:5] != "_fsdp"}


def patched_methods(model: nn.Module) -> list[str]:
    """Methods that were registered to be called as ``forward`` is, and look for fully_shard's state."""
    return [
        name
        for module in model.modules()
        for name, value in vars(module).items()
        if "_fully_shard" in getattr(getattr(value, "__code__", None), "co_filename", "")
    ]


# --- reading ---------------------------------------------------------------------------------------------------------


def _states(model: nn.Module) -> list[Any]:
    """The state that fully_shard keeps of each unit, outermost first; also of one that it has begun to make."""
    state_key, _, _ = registries()
    kept = [module.__dict__.get(state_key, {}).items() for module in model.modules()]
    states = [state for items in kept for key, state in items if getattr(key, "__name__", "") == fully_shard.__name__]
    return list(dict.fromkeys(states))


def _hooked(model: nn.Module) -> Iterator[tuple[nn.Module, frozenset[int], tuple[frozenset[int], frozenset[int]]]]:
    """Each module on which fully_shard has hooks, their numbers, and those of the hooks that are called before them."""
    for state in _states(model):
        own = hooks_of(state)
        for module in found(state, "_modules"):
            before_pass, after_pass = _hooks(module)
            yield module, own, (before(before_pass, own), before(after_pass, own))


def _hooks(module: nn.Module) -> tuple[OrderedDict[int, Any], OrderedDict[int, Any]]:
    pre: Any = module._forward_pre_hooks
    post: Any = module._forward_hooks
    return pre, post


def _without(hooks: OrderedDict[int, Any], own: frozenset[int]) -> dict[int, Any]:
    return {number: hook for number, hook in hooks.items() if number not in own}


def _unit(model: nn.Module, state: Any, group: Any) -> Unit:
    modules = tuple(found(state, "_modules"))
    who = _called(model, state)
    if found(found(group, "_training_state"), "name") != "IDLE":
        raise ValueError(f"{who} is in the middle of a pass; its sharding is changed between two steps")
    if found(group, "_all_reduce_hook") is not None:
        raise ValueError(f"{who} has an all-reduce hook of your own, made for its mesh; its sharding has to stay")
    for name in ("_all_gather_comm", "_reduce_scatter_comm"):
        kind = type(found(group, name)).__name__
        if kind not in _DEFAULT_COMMUNICATION:
            raise ValueError(
                f"{who} has communication of its own ({kind}), made for its mesh; its sharding has to stay"
            )
    if has_own_scatter_group(group):
        raise ValueError(
            f"{who} has a group of its own for reduce-scatter, made for its mesh; its sharding has to stay"
        )
    if found(group, "_partial_reduce_output") is not None:
        raise ValueError(_NOT_SHARED)
    for name in _OF_A_GROUP:
        found(group, name)
    if not found(group, "unshard_in_backward") or found(group, "unshard_async_op"):
        raise ValueError(
            f"{who} has been told how to unshard, by set_unshard_in_backward() or _set_unshard_async_op(); its "
            "sharding has to stay"
        )
    for keeper in found(group, "fsdp_params"):
        _make_sure_of(keeper)
    return Unit(
        modules,
        found(found(group, "mesh_info"), "mesh"),
        _reshards(state, group),
        found(group, "mp_policy"),
        found(group, "offload_policy"),
        settings_of(group),
        _prefetched(state, "_states_to_forward_prefetch"),
        _prefetched(state, "_states_to_backward_prefetch"),
    )


def _empty_unit(state: Any) -> Unit:
    return Unit(
        tuple(found(state, "_modules")),
        None,
        None if found(state, "_auto_reshard_after_forward") else True,
        found(state, "_mp_policy"),
        OffloadPolicy(),
        UnitSettings(),
        _prefetched(state, "_states_to_forward_prefetch"),
        _prefetched(state, "_states_to_backward_prefetch"),
    )


def _reshards(state: Any, group: Any) -> bool | int | None:
    if found(state, "_auto_reshard_after_forward"):
        return None
    after = found(group, "post_forward_mesh_info")
    if after is None:
        return False
    return True if after is group.mesh_info else int(found(after, "shard_mesh_size"))


def _prefetched(state: Any, name: str) -> tuple[Modules, ...]:
    return tuple(tuple(other._modules) for other in found(state, name))


def _slot(keeper: Any) -> ParameterSlot:
    info = found(keeper, "_module_info")
    tied = zip(found(info, "shared_modules"), found(info, "shared_param_names"), strict=True)
    places = [(found(info, "module"), found(info, "param_name")), *tied]
    return ParameterSlot(found(keeper, "sharded_param"), tuple(places), keeper)


def _make_sure_of(keeper: Any) -> None:
    """Look for all private parts of a parameter's object that are used; refuse what cannot be made again."""
    for name in (
        *OF_MEMORY,
        "_post_load_hook_handle",
        "_sharding_spec",
        "_sharded_param_data",
        "fsdp_placement",
        "padded_sharded_param_size",
        "reset_sharded_param",
        "unsharded_accumulated_grad",
    ):
        found(keeper, name)
    parameter = _slot(keeper).parameter
    if not isinstance(parameter, DTensor):
        raise unknown("the DTensor")
    for name in ("_local_tensor", "_spec"):
        found(parameter, name)
    if found(keeper, "is_dtensor"):
        raise ValueError(
            "the model is cut by tensor parallelism inside fully_shard; its sharding is changed by a restart from a "
            "checkpoint, which any layout loads"
        )
    unsharded = getattr(keeper, "_unsharded_param", None)  # from the first pass on
    if keeper.unsharded_accumulated_grad is not None or (unsharded is not None and unsharded.grad is not None):
        raise ValueError(_NOT_SHARED)


def _called(model: nn.Module, state: Any) -> str:
    names = [name for name, module in model.named_modules() if module in found(state, "_modules")]
    return f"the unit {', '.join(name or '(the model)' for name in names)}"


# --- writing ---------------------------------------------------------------------------------------------------------


def _as_unit(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def _take_off_module(module: nn.Module) -> None:
    kind: Any = type(module)
    if isinstance(module, FSDPModule):
        module.__class__ = kind.__mro__[kind._orig_cls_mro_index]
    state_key, registry_key, states = registries()
    for name in (state_key, registry_key):
        kept: dict[Any, Any] = module.__dict__.get(name, {})
        for key in [key for key in kept if getattr(key, "__name__", key) == fully_shard.__name__]:
            del kept[key]
    states.pop(module, None)
    for name in _LEFT_ON_MODULES:
        module.__dict__.pop(name, None)
    after_loading: dict[int, Any] = module._load_state_dict_post_hooks
    for number, hook in list(after_loading.items()):
        if getattr(hook, "__qualname__", "").startswith(_AFTER_LOADING):
            del after_loading[number]
