"""Companions: tensors of the user's that lie as a model's parameters do, such as a moving average of them.

They are registered in mappings. A sharded one moves with the model. A plain one under a parameter's name, and of its
shape, is sharded with the model when that is sharded; whatever else is plain stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from elastic_ext.fsdp.state import local_of

__all__ = ["Companion", "Tensors", "companions_in", "replace_parameter"]

Tensors: TypeAlias = Mapping[str, torch.Tensor]
"""Tensors registered under one name; a MutableMapping where the user has it, and sees what is put into it."""


@dataclass(frozen=True, eq=False)
class Companion:
    """A registered tensor that moves with the parameters, and all places that have it."""

    name: str
    tensor: torch.Tensor
    dim: int
    """The dimension along which the tensor will be cut, where it is whole so far."""
    places: tuple[tuple[MutableMapping[str, torch.Tensor], str], ...]

    def put(self, new: torch.Tensor) -> None:
        """Put ``new`` in all places that have this tensor."""
        for holder, key in self.places:
            holder[key] = new


def companions_in(
    registered: Sequence[Tensors],
    parameters: Mapping[str, tuple[nn.Parameter, int]],
    *,
    was_sharded: bool,
    is_sharded: bool,
) -> Iterator[Companion]:
    """The registered tensors that move with the parameters, each once.

    ``parameters`` are by name, each with the dimension that cuts it. ValueError where somebody would be left with a
    tensor that nothing moves.
    """
    own = {id(parameter) for parameter, _ in parameters.values()}
    memory = {_memory_of(parameter) for parameter, _ in parameters.values()} - {0, None}
    found: dict[int, tuple[str, torch.Tensor, int]] = {}
    places: dict[int, list[tuple[MutableMapping[str, torch.Tensor], str]]] = {}
    for holder in registered:
        for key, tensor in sorted(holder.items()):  # ranks may have filled it in another order
            parameter, dim = parameters.get(key, (None, 0))
            if isinstance(tensor, DTensor) and not tensor.numel():
                raise ValueError(f"{key} was registered and has no elements to move; leave it out")
            is_like = parameter is not None and parameter.shape == tensor.shape and parameter.device == tensor.device
            if id(tensor) in own:
                continue
            if not (isinstance(tensor, DTensor) or (is_sharded and not was_sharded and is_like)):
                if _memory_of(tensor) in memory:
                    raise ValueError(
                        f"{key or 'a tensor'} was registered and shows the memory of a parameter, which lies elsewhere "
                        "after the change; register a clone(), or the parameter itself"
                    )
                continue
            if hasattr(holder, "_metadata") and _is_memory_of(parameter, tensor):  # what torch puts on them
                raise ValueError(
                    f"{key} was registered in a module's state_dict(), and the module would not follow when it moves; "
                    "register a dict of tensors, and update these"
                )
            if not isinstance(holder, MutableMapping):
                if was_sharded is not is_sharded:
                    raise ValueError(
                        f"{key or 'a tensor'} was registered by itself or in a mapping that cannot be written to, and "
                        "it becomes another object when the model goes between no_shard and a sharded plan; register a "
                        "dict, and take it from there"
                    )
                holder = {}  # it stays the same object
            found.setdefault(id(tensor), (key, tensor, dim))
            places.setdefault(id(tensor), []).append((holder, key))
    for name, tensor, dim in found.values():
        yield Companion(name, tensor, dim, tuple(places[id(tensor)]))


def _is_memory_of(parameter: nn.Parameter | None, tensor: torch.Tensor) -> bool:
    return parameter is not None and _memory_of(parameter) == _memory_of(tensor)


def _memory_of(tensor: torch.Tensor) -> int | None:
    """The address of a tensor's memory; None where it is not one piece."""
    local = local_of(tensor)
    return local.untyped_storage().data_ptr() if local.layout is torch.strided else None


def replace_parameter(registered: Sequence[Tensors], old: torch.Tensor, new: torch.Tensor) -> None:
    """Put ``new`` in the place of a parameter in the registered mappings that hold it."""
    for holder in registered:
        for key, tensor in list(holder.items()):
            if tensor is old and isinstance(holder, MutableMapping):
                holder[key] = new
