"""fully_shard's private state by torch version, and the order of a module's hooks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from elastic_ext.errors import ElasticError

from .units import UnitSettings

__all__ = [
    "HOOK_HANDLES",
    "OF_MEMORY",
    "before",
    "drop_groups",
    "found",
    "groups_of",
    "has_own_scatter_group",
    "hooks_of",
    "make_memory",
    "make_sure_of_torch",
    "put_after",
    "registered_ahead",
    "registries",
    "set_on",
    "settings_of",
    "unknown",
]


# --- which versions of torch are known, and where each keeps what others keep elsewhere, for rewire.py ---------------
# What all known versions keep in one place is said there. ``found`` looks for a part, and says what is missing where
# torch has moved it.

_KNOWN = ((2, 11), (2, 13))
_IN_WORDS = " or ".join(".".join(map(str, version)) for version in _KNOWN)

HOOK_HANDLES = ("_pre_forward_hook_handle", "_post_forward_hook_handle")
"""Attributes of a unit's state: the handles by which its hooks are taken off its modules."""
OF_MEMORY = ("init_all_gather_outputs", "init_unsharded_param", "free_unsharded_param", "_sharded_local_tensor")
"""Attributes of fully_shard's object for a parameter that ``make_memory`` needs."""


def make_sure_of_torch() -> None:
    """Raise ElasticError where this torch is not one whose private parts are known here."""
    if _version() not in _KNOWN:
        raise ElasticError(
            f"torch {torch.__version__} is not known here; sharding is changed in place with torch {_IN_WORDS}, and "
            "otherwise by a restart from a checkpoint"
        )
    registries()


def registries() -> tuple[Any, Any, Any]:
    """The registries in which torch notes what was put on a module, such as fully_shard.

    Two keys of a module's ``__dict__``, under which its states and their names stand, and the states of all modules.
    """
    try:
        from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
        from torch.distributed._composable_state import _module_state_mapping
    except ImportError as error:  # here, so that this file can be imported with any torch
        raise unknown(str(error)) from None
    return STATE_KEY, REGISTRY_KEY, _module_state_mapping


def found(holder: Any, name: str) -> Any:
    """An attribute of torch's private state; ElasticError names it where it is not there."""
    try:
        return getattr(holder, name)
    except AttributeError:
        raise unknown(f"{name} of a {type(holder).__name__}") from None


def unknown(name: str) -> ElasticError:
    """The error to raise where a private part of torch is missing."""
    return ElasticError(
        f"torch {torch.__version__} keeps {name} in another place than the versions that this library knows "
        f"({_IN_WORDS}); change the sharding by a restart from a checkpoint"
    )


def hooks_of(state: Any) -> frozenset[int]:
    """The numbers of a unit's hooks, on all of its modules."""
    given = [found(state, name) for name in HOOK_HANDLES]
    handles = [handle for each in given for handle in getattr(each, "handles", (each,))]  # of several modules
    return frozenset(found(handle, "id") for handle in handles)


def make_memory(group: Any) -> None:
    """Set up the memory where parameters are gathered, as a first pass does; the memory itself is given back."""
    group.lazy_init()  # says in which dtype
    for keeper in group.fsdp_params:
        if hasattr(keeper._sharded_local_tensor, "fsdp_post_all_gather"):
            continue  # a subclass's own way, which needs what was gathered
        num_elements = keeper._sharded_param_data.numel()
        dtype = keeper.param_dtype or keeper.orig_dtype
        keeper.init_all_gather_outputs([num_elements], [dtype], group.mesh_info.shard_mesh_size, group.device)
        keeper.init_unsharded_param()
        keeper.free_unsharded_param()


# --- what differs -----------------------------------------------------------------------------------------------------


def groups_of(state: Any) -> list[Any]:
    """The groups of parameters that a unit gathers: none or one; torch 2.13 has a list of them."""
    if _is_2_11():
        group = found(state, "_fsdp_param_group")
        return [] if group is None else [group]
    return list(found(state, "_fsdp_param_groups"))


def drop_groups(state: Any) -> None:
    """Have a unit keep no parameter groups."""
    if _is_2_11():
        state._fsdp_param_group = None
    else:
        state._fsdp_param_groups.clear()


def settings_of(group: Any) -> UnitSettings:
    """The settings that the user has made on a unit; torch 2.11 has fewer of them."""
    is_2_11 = _is_2_11()
    return UnitSettings(
        found(group, "gradient_divide_factor"),
        found(group, "force_sum_reduction_for_comms"),
        False if is_2_11 else found(group, "reduce_scatter_unused_params"),
        found(group, "reshard_after_backward"),
        1 if is_2_11 else found(group, "reduce_scatter_max_input_buffers"),
    )


def has_own_scatter_group(group: Any) -> bool:
    """Whether gradients are shared on other process groups than parameters are gathered on."""
    return not _is_2_11() and found(found(group, "mesh_info"), "reduce_scatter_process_group") is not None


def set_on(unit: Any, settings: UnitSettings) -> None:
    """Make these settings on a module that fully_shard has just been put on."""
    if settings.divide_factor is not None:
        unit.set_gradient_divide_factor(settings.divide_factor)
    if settings.sums_only:
        unit.set_force_sum_reduction_for_comms(True)
    if settings.shares_unused:
        unit.set_reduce_scatter_unused_params(True, recurse=False)
    if not settings.reshards_after_backward:
        unit.set_reshard_after_backward(False, recurse=False)
    if settings.num_scatter_buffers > 1:
        unit.set_reduce_scatter_max_input_buffers(settings.num_scatter_buffers, recurse=False)


def _is_2_11() -> bool:
    return _version() == (2, 11)


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


# --- where among the hooks of a module one stands, and where it shall ------------------------------------------------
# Pure; whose hook it is, others know.
#
# torch calls hooks in the order of a dict, and numbers them as they are registered, over all modules.


def before(hooks: Mapping[int, object], own: Collection[int]) -> frozenset[int]:
    """The hooks that are called before the first one of ``own``; all of them where none is there."""
    found = []
    for number in hooks:
        if number in own:
            break
        found.append(number)
    return frozenset(found)


def put_after(hooks: OrderedDict[int, Any], own: int, ahead: Collection[int]) -> None:
    """Have the hook ``own`` called after those ``ahead``, and before the others, which keep their order."""
    behind = [number for number in hooks if number != own and number not in ahead]
    for number in (own, *behind):
        hooks.move_to_end(number)


def registered_ahead(hooks: Mapping[int, Any], is_ahead: Callable[[Any], bool]) -> frozenset[int]:
    """The hooks that were registered to come first (``prepend=True``), as far as their numbers tell.

    The oldest hook counts as one that was not, but where ``is_ahead`` knows it.
    """
    known = {number for number, hook in hooks.items() if is_ahead(hook)}
    oldest = min((number for number in hooks if number not in known), default=None)
    return frozenset(known) | (before(hooks, {oldest}) if oldest is not None else frozenset())
