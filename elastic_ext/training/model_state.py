"""The model's state_dict: whole, however the model is sharded; and what guards a script that asks the model itself.

How the sharding changes is in parallelism.py.
"""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from elastic_ext.fsdp.state import local_of
from elastic_ext.torch_private.module_hooks import Hook, beside_graphs

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from elastic_ext.fsdp.reshard.sharded_model import Spread

    from .steps.state import StepState

__all__ = ["StateDictGuard", "whole_state_dict"]


# --- the whole state_dict, on rank 0 ----------------------------------------------------------------------------------


def whole_state_dict(model: nn.Module) -> dict[str, Any]:
    """Whole tensors on the CPU by the names of the bare model, on rank 0; an empty dict on the others. All call this.

    They are copies: what is trained on does not change them.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    own = {_address(part) for part in (*model.parameters(), *model.buffers())}
    trained_in = {
        name: value for name, value in found.items() if isinstance(value, torch.Tensor) and _address(value) in own
    }
    return found | copy.deepcopy(trained_in)  # at once, so that tied ones stay one


def _address(tensor: torch.Tensor) -> tuple[torch.device, object]:
    local = local_of(tensor)
    return local.device, local.untyped_storage().data_ptr() if local.layout is torch.strided else local.layout


# --- a script that was written for a whole model, and calls its state_dict() ------------------------------------------

_SHARDED = (
    "the script gave the model whole, and it is sharded now ({strategy} on {num_ranks} ranks): its state_dict() holds "
    "this rank's part of each parameter, as a DTensor; call trainer.model_state_dict() on all ranks, and save what "
    "rank 0 gets: whole tensors, by the same names without `module.`. Averages of parameters (EMA) are sharded along "
    "where they are tensors in a dict by the parameters' names, given to trainer.register_state(); those in a module "
    "of their own stay whole, and do not go together with shards"
)
_GATHERS = ("torch.distributed.checkpoint", "elastic_ext.")  # their own calls of state_dict() know of shards


class StateDictGuard:
    """Keeps ranks alike, and warns, where one calls ``state_dict()`` of a model that its script gave whole.

    After a pass without a backward pass fully_shard keeps some parameters gathered. One rank's ``state_dict()`` frees
    them on that rank, which in the next pass would gather them without the others. So all ranks free them at the end of
    each pass outside of training.
    """

    def __init__(self, spread: Spread, state: StepState) -> None:
        self._spread = spread
        self._state = state
        self._came_whole = spread.plan is not None and spread.plan.is_replicated
        self._units: list[FSDPModule] = []
        self._handles: list[RemovableHandle] = []

    def follow(self) -> None:
        """Guard the model as it is sharded now; nothing where it is whole, or was sharded by the script."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        plan, root = self._spread.plan, self._spread.root
        self._units = [part for part in root.modules() if isinstance(part, FSDPModule)]
        if not self._came_whole or plan is None or plan.is_replicated:
            return
        free = beside_graphs(self._free)
        inner: Any = getattr(root, "_orig_mod", root)  # of a compiled model, which may be asked without its wrapper
        self._handles = [
            root.register_forward_hook(Hook(free)),
            inner.register_state_dict_pre_hook(Hook(self._warn)),
        ]

    def _free(self, *_: object) -> None:
        """Free what a pass has gathered, unless it is one of training, whose backward pass does."""
        state = self._state
        if state.phase.is_inside and (torch.is_grad_enabled() or not state.num_begun):
            return
        for unit in self._units:
            unit.reshard()

    def _warn(self, *_: object) -> None:
        plan = self._spread.plan
        if plan is not None and not _caller().startswith(_GATHERS):
            told = _SHARDED.format(strategy=plan.strategy, num_ranks=self._spread.num_ranks)
            self._state.remarks.say("a part of a state_dict", told, on_any_rank=True)


def _caller() -> str:
    """The name of the module that has called ``state_dict()``, of the model or of one that holds it."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") in (__name__, nn.Module.__module__):
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))
