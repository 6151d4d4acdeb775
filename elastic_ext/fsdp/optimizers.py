"""What optimizers hold on this rank: state by the parameter that it belongs to, and the values of their groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from elastic_ext.errors import CheckpointMismatch

from .layout import Box
from .pickled_values import tensors_in
from .state import (
    Kind,
    LocalShard,
    OptimizedParameter,
    Trained,
    box_of,
    by_name_of,
    held,
    local_of,
    place_of,
    put_in,
    trained_by,
)
from .value_encoding import Plain, dtype_of, pack, unpack

__all__ = [
    "HeldOptimizers",
    "SavedTensor",
    "are_same_kinds",
    "held_of_optimizers",
    "make_missing",
    "matching_groups",
    "packed_groups",
    "put_groups",
    "put_values",
]


# --- the values of an optimizer's groups, such as lr, by the names of the parameters that they are for ---------------

# How a step is computed, not what it computes: as the optimizer has them that is loaded into.
_WAYS = frozenset({"foreach", "fused", "capturable", "differentiable"})
_NOT_VALUES = frozenset({"params", "param_names"})


def packed_groups(optimizer: Optimizer, trained: Mapping[int, Trained]) -> Plain:
    """The class and the groups of an optimizer, as JSON can hold them; TypeError names a value that it cannot."""
    groups: list[Plain] = []
    for number, group in enumerate(optimizer.param_groups):
        where = f"group {number} of {type(optimizer).__name__}: "
        values: dict[str, Plain] = {
            key: pack(_without_tensors(value), where + key) for key, value in group.items() if key not in _NOT_VALUES
        }
        names: list[Plain] = [*_names(group, trained)]
        groups.append({"params": names, "values": values})
    return {"class": type(optimizer).__name__, "groups": groups}


def put_groups(
    optimizers: Sequence[Optimizer], parameters: Sequence[OptimizedParameter], groups: Sequence[Plain]
) -> None:
    """Give every parameter group the values that were saved of the group with the same parameters, in any order.

    CheckpointMismatch, and nothing is changed, where the parameters were grouped otherwise. Values that were not saved
    stay as they are, and so do ``foreach``, ``fused``, ``capturable`` and ``differentiable``, which only say how a step
    is computed. Tensors, such as an lr for a captured graph, are written into.
    """
    for group, values in matching_groups(optimizers, parameters, groups):
        for key, value in values.items():
            if key not in _WAYS:
                group[key] = put_in(group.get(key), value)


def are_same_kinds(optimizers: Sequence[Optimizer], groups: Sequence[Plain]) -> bool:
    """Whether the saved groups are of optimizers of the same classes."""
    return sorted(type(optimizer).__name__ for optimizer in optimizers) == sorted(_classes(groups))


def matching_groups(
    optimizers: Sequence[Optimizer], parameters: Sequence[OptimizedParameter], groups: Sequence[Plain]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Every parameter group with the values that were saved of it.

    CheckpointMismatch where parameters were grouped otherwise, or for another optimizer.
    """
    if not are_same_kinds(optimizers, groups):
        here = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise CheckpointMismatch(
            f"the checkpoint has the state of {', '.join(_classes(groups)) or 'no optimizer'}, and here is {here}; "
            "give the same, or load the model alone"
        )
    trained = trained_by(optimizers, parameters)
    saved: dict[frozenset[str], list[dict[str, Any]]] = {}
    for names, values in _saved_groups(groups):
        saved.setdefault(names, []).append(values)
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    strange = []
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        names = frozenset(_names(group, trained))
        if saved.get(names):
            found.append((group, saved[names].pop(0)))
        else:
            strange.append(names)
    left = [names for names, rest in saved.items() for _ in rest]
    if strange or left:
        raise _otherwise_grouped(strange, left)
    return found


def _saved_groups(groups: Sequence[Plain]) -> Iterator[tuple[frozenset[str], dict[str, Any]]]:
    try:
        for optimizer in groups:
            for group in _part(optimizer, "groups", list):
                names, values = _part(group, "params", list), _part(group, "values", dict)
                yield frozenset(str(name) for name in names), {key: unpack(value) for key, value in values.items()}
    except (KeyError, TypeError) as error:
        raise ValueError(f"the saved groups of the optimizers cannot be read: {str(groups)[:80]}") from error


def _classes(groups: Sequence[Plain]) -> list[str]:
    try:
        return [str(_part(optimizer, "class", str)) for optimizer in groups]
    except (KeyError, TypeError) as error:
        raise ValueError(f"the saved groups of the optimizers cannot be read: {str(groups)[:80]}") from error


def _part(holder: Any, key: str, kind: type) -> Any:
    if not isinstance(holder[key], kind):
        raise TypeError(f"{key} is {holder[key]!r}")
    return holder[key]


def _names(group: Mapping[str, Any], trained: Mapping[int, Trained]) -> list[str]:
    return [trained[id(tensor)].parameter.name for tensor in group["params"]]


def _without_tensors(value: object) -> object:
    """A group's value, with tensors of one element as numbers."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if type(value) in (tuple, list):
        return type(value)(_without_tensors(each) for each in value)  # type: ignore[attr-defined,call-arg]
    return value


def _otherwise_grouped(strange: Sequence[frozenset[str]], left: Sequence[frozenset[str]]) -> CheckpointMismatch:
    def shown(names: frozenset[str]) -> str:
        first = ", ".join(sorted(names)[:3])
        return f"[{first}]" if len(names) <= 3 else f"[{first} and {len(names) - 3} more]"

    here, there = set().union(*strange), set().union(*left)
    return CheckpointMismatch(
        "the optimizers' groups are not those that were saved: here "
        + (" ".join(map(shown, strange)) or "none besides")
        + ", in the checkpoint "
        + (" ".join(map(shown, left)) or "none besides")
        + "; group the parameters as they were",
        missing=sorted(here - there),
        extra=sorted(there - here),
    )


# --- the state of optimizers -----------------------------------------------------------------------------------------
# Optimizer state: what optimizers hold on this rank, named after the parameters that it belongs to; and its place made
# before it is loaded.
#
# A state tensor is called ``<parameter>/<key>``. Its kind says how it goes with its parameter: *like* it, in shape and
# in where it lies; a *scalar*; of its *own* shape; or *opaque*: of a shape and with contents that belong to what lies
# on this rank alone, which no other layout can take over. Tensors in lists and the like are called
# ``<parameter>/<key>/<index>``, and the list, a value, refers to them by that.


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


class SavedTensor(Protocol):
    """What a checkpoint's metadata tells of a tensor: its ``TensorMeta``."""

    @property
    def dtype(self) -> str: ...
    @property
    def kind(self) -> Kind: ...
    @property
    def layout(self) -> _Shaped: ...


@dataclass(frozen=True, slots=True, eq=False)
class HeldOptimizers:
    """What a model's optimizers hold on this rank: state tensors, other state, and parameter groups."""

    tensors: list[LocalShard]
    values: dict[str, Plain]
    """Optimizer state that is no tensor, such as a count that is an int, or a list of tensors, by name.

    It is of parameters that this rank has something of.
    """
    groups: list[Plain]
    """The class and groups of each optimizer: names of parameters, and values such as lr. The same on every rank."""


def held_of_optimizers(
    optimizers: Sequence[Optimizer], parameters: Sequence[OptimizedParameter], *, rank: int = 0
) -> HeldOptimizers:
    """The state and the groups of a model's optimizers; ``rank`` tells opaque tensors of several ranks apart.

    ValueError if a parameter of theirs is not the model's, or in two of them; TypeError names what would have to be
    pickled.
    """
    trained = trained_by(optimizers, parameters)
    groups = [packed_groups(optimizer, trained) for optimizer in optimizers]
    by_name = by_name_of(trained)
    tensors: list[LocalShard] = []
    values: dict[str, Plain] = {}
    kinds = [
        _Kinds(optimizer, [each for each in trained.values() if each.optimizer is optimizer])
        for optimizer in optimizers
    ]
    for one in kinds:
        for each, key, value in one.entries():
            name = f"{each.parameter.name}/{key}"
            if place_of(name, by_name) != (each, key):
                raise ValueError(
                    f"the state {key!r} of {each.parameter.name} has a name like another's; rename one of them"
                )
            if isinstance(value, torch.Tensor):
                tensors.append(one.held(each.parameter, key, value, rank))
            else:
                parts: dict[str, torch.Tensor] = {}
                values[name] = _packed(value, name, parts)
                tensors += [one.held_in_list(each.parameter, part, tensor) for part, tensor in parts.items()]
    _refuse_twins(tensors)
    return HeldOptimizers(tensors, values, groups)


def make_missing(
    optimizers: Sequence[Optimizer],
    parameters: Sequence[OptimizedParameter],
    saved: Mapping[str, SavedTensor],
    *,
    rank: int = 0,
) -> list[str]:
    """Make the state tensors that a checkpoint has and the optimizers lack, as zeros, to be loaded into.

    No step is taken. They get the saved dtype, and lie as torch's optimizers would have them: like their
    parameter, on its mesh, or beside it. Gives the names that no optimizer has a place for.
    """
    by_name = by_name_of(trained_by(optimizers, parameters))
    without_place = []
    for name, meta in saved.items():
        if meta.kind == "opaque":
            name, _, owner = name.rpartition("@")
            if owner != str(rank):
                continue
        place = place_of(name, by_name)
        if place is None or (meta.kind == "own" and place[0].parameter.is_range):  # whose state is ranges too
            without_place.append(name)
            continue
        each, key = place
        if not each.parameter.is_elsewhere and not isinstance(each.state.get(key), torch.Tensor):
            each.state[key] = _made(each, key, meta)
    return without_place


def put_values(
    optimizers: Sequence[Optimizer],
    parameters: Sequence[OptimizedParameter],
    values: Mapping[str, Plain],
    saved: Mapping[str, SavedTensor],
) -> list[str]:
    """Put saved state that is no tensor into optimizers; gives the names that no optimizer has a place for.

    Tensors in it that were ``saved`` are made as zeros, to be loaded into.
    """
    by_name = by_name_of(trained_by(optimizers, parameters))
    without_place = []
    for name, packed in values.items():
        place = place_of(name, by_name)
        if place is None:
            without_place.append(name)
        elif not place[0].parameter.is_elsewhere:
            each, key = place
            parts = {part: _made_in_list(each, saved[part], kind) for part, kind in tensors_in(packed).items()}
            each.state[key] = put_in(each.state.get(key), unpack(packed, parts))
    return without_place


class _Kinds:
    """How the state of one optimizer goes with its parameters: decided by key, over all parameters."""

    def __init__(self, optimizer: Optimizer, trained: Sequence[Trained]) -> None:
        self._trained = trained
        strange = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
        if strange:
            raise TypeError(
                f"{type(optimizer).__name__} keeps state that belongs to no parameter, under {strange[0]!r}; allowed: "
                "state of parameters, which goes by their names"
            )
        self._scalars = {"step"}
        self._unlike: set[str] = set()
        for each, key, value in self.entries():
            if isinstance(value, torch.Tensor):
                if value.dim() == 0 and each.parameter.box.shape:
                    self._scalars.add(key)
                if not _is_like(value, each.parameter):
                    self._unlike.add(key)

    def entries(self) -> Iterator[tuple[Trained, str, object]]:
        """All state that the optimizer holds of parameters which this rank has something of."""
        for each in self._trained:
            if each.parameter.tensor not in each.optimizer.state or each.parameter.is_elsewhere:
                continue
            for key, value in each.state.items():
                if not isinstance(key, str):
                    raise TypeError(
                        f"the optimizer's state of {each.parameter.name} has the key {key!r}; allowed: text"
                    )
                yield each, key, value

    def held(self, parameter: OptimizedParameter, key: str, value: torch.Tensor, rank: int) -> LocalShard:
        name = f"{parameter.name}/{key}"
        if key not in self._unlike and not (value.dim() == 0 and key in self._scalars):
            return held(name, value, parameter.box, "like")
        box = box_of(name, value)
        if value.dim() == 0 and key in self._scalars:
            return held(name, value, box, "scalar")
        is_whole = parameter.box == Box.whole(parameter.box.shape) and not parameter.is_range
        if is_whole or isinstance(value, DTensor) or tuple(value.shape) == parameter.box.shape:
            return held(name, value, box, "own")
        return held(f"{name}@{rank}", value, box, "opaque")

    def held_in_list(self, parameter: OptimizedParameter, name: str, value: torch.Tensor) -> LocalShard:
        is_whole = parameter.box == Box.whole(parameter.box.shape) and not parameter.is_range
        if not is_whole and not isinstance(value, DTensor):
            raise TypeError(
                f"the optimizer's state {name} is a tensor in a list or the like, and belongs to the part of "
                f"{parameter.name} that lies on this rank; allowed: such lists where parameters are not sharded, or "
                "lists of DTensors"
            )
        return held(name, value, box_of(name, value), "own")


def _packed(value: object, name: str, parts: dict[str, torch.Tensor]) -> Plain:
    try:
        return pack(value, name, parts)
    except TypeError:
        return pack(value, f"the optimizer's state {name}", {})  # which raises the same in these words


def _refuse_twins(tensors: Sequence[LocalShard]) -> None:
    names: set[str] = set()
    for each in tensors:
        if each.name in names:
            raise ValueError(f"two tensors of the optimizers' state come to be called {each.name}; rename a key")
        names.add(each.name)


def _is_like(value: torch.Tensor, parameter: OptimizedParameter) -> bool:
    if isinstance(value, DTensor):
        return (
            isinstance(parameter.tensor, DTensor)
            and value.shape == parameter.tensor.shape
            and value.placements == parameter.tensor.placements
            and (value.device_mesh is parameter.tensor.device_mesh or value.device_mesh == parameter.tensor.device_mesh)
        )
    return value.shape == local_of(parameter.tensor).shape


def _made(each: Trained, key: str, meta: SavedTensor) -> torch.Tensor:
    tensor, dtype = each.parameter.tensor.detach(), dtype_of(meta.dtype)
    if meta.kind == "like":
        return torch.zeros_like(tensor, dtype=dtype)
    if meta.kind == "scalar":
        on_device = each.group.get("capturable") or each.group.get("fused") or isinstance(each.optimizer, optim.ASGD)
        return torch.zeros(meta.layout.shape, dtype=dtype, device=tensor.device if on_device else "cpu")
    if meta.kind == "own":
        return tensor.new_zeros(meta.layout.shape, dtype=dtype)  # a DTensor where the parameter is one
    return torch.zeros(meta.layout.shape, dtype=dtype, device=tensor.device)


def _made_in_list(each: Trained, meta: SavedTensor, kind: str) -> torch.Tensor:
    shape, dtype = meta.layout.shape, dtype_of(meta.dtype)
    return (
        torch.zeros(shape, dtype=dtype)
        if kind == "array"
        else each.parameter.tensor.detach().new_zeros(shape, dtype=dtype)
    )
