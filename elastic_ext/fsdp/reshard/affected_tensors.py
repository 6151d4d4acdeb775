"""The tensors of a model that lie by its plan, and that a change of plan moves.

Parameters, their gradients, what optimizers keep of them in their shape, and registered tensors that are sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from elastic_ext.fsdp.layout import Box, Layout
from elastic_ext.fsdp.names import named_tensors
from elastic_ext.fsdp.plan import UNEVEN, Degrees, Layouts, parts_of
from elastic_ext.fsdp.state import local_of

from . import rewire
from .buckets import BucketItem, Router
from .companions import Tensors, companions_in
from .refusals import why_not_parted
from .units import Place, Survey

__all__ = ["MovedTensor", "PlacedParameter", "moved_tensors", "parameters_of"]


@dataclass(eq=False)
class PlacedParameter:
    """A parameter in a change of plan, and the modules that have it."""

    tensor: nn.Parameter
    places: tuple[Place, ...]
    """The modules that have the parameter, each with the name that it has there."""
    dim: int
    """The dimension along which the parameter is cut, before or after."""
    is_there: bool = False
    """Whether the parameter lies by the new plan, and may have a gradient that does."""
    _gradient: torch.Tensor | None = None  # that came before it

    def register(self) -> None:
        """Put the parameter's tensor into the modules that have it."""
        for module, name in self.places:
            setattr(module, name, self.tensor)  # as torch does, for modules that note it elsewhere too

    def put_gradient(self, new: torch.Tensor) -> None:
        """Give the parameter another gradient, now or once it lies by the new plan; let go of the present one."""
        self.tensor.grad = new if self.is_there else None
        self._gradient = None if self.is_there else new

    def arrive(self) -> None:
        """Note that the parameter lies by the new plan from now on; it gets a gradient that came before it."""
        self.is_there = True
        if self._gradient is not None:
            self.put_gradient(self._gradient)


@dataclass(frozen=True, eq=False)
class MovedTensor:
    """A tensor that a change of plan moves, and the places that refer to it."""

    tensor: torch.Tensor
    dim: int
    """The dimension along which the tensor is cut, before or after."""
    parameter: int | None
    """The index of the parameter that it is; None where it is another tensor."""
    puts: tuple[Callable[[torch.Tensor], None], ...]
    """Functions that each put another tensor in one of its places, but for a parameter's in the model."""
    item: BucketItem
    is_gradient: bool = False

    def put(self, new: torch.Tensor) -> None:
        """Put another tensor in all places that have this one."""
        for put in self.puts:
            put(new)


def parameters_of(model: nn.Module, survey: Survey | None) -> Iterator[PlacedParameter]:
    """The parameters that lie by the plan: those that fully_shard has, or all where it has none."""
    if survey is not None:
        for slot in survey.slots:
            yield PlacedParameter(slot.parameter, slot.places, rewire.dim_of(slot))
        return
    places: dict[int, list[Place]] = {}
    found: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
                found[id(parameter)] = parameter
    refusal = why_not_parted(found.values())
    if refusal is not None:
        raise ValueError(refusal)
    for key, parameter in found.items():
        yield PlacedParameter(parameter, tuple(places[key]), 0)


def moved_tensors(
    model: nn.Module,
    parameters: Sequence[PlacedParameter],
    optimizers: Sequence[Optimizer],
    registered: Sequence[Tensors],
    degrees: Degrees | None,
) -> list[MovedTensor]:
    """All tensors that a change to these degrees moves; ValueError where one cannot move.

    Without degrees all become whole on each rank. Ranks that were given the same have the same in the same order.
    """
    names = {id(each.tensor): each.is_alias_of or each.name for each in named_tensors(model)}
    carrying = _Carrying(degrees)
    for optimizer in optimizers:
        _refuse_hidden(optimizer)
    for at, each in enumerate(parameters):
        parameter, name, dim = each.tensor, names[id(each.tensor)], each.dim
        carrying.add(name, parameter, dim, parameter=at)
        if parameter.grad is not None:
            carrying.add(f"{name} (gradient)", parameter.grad, dim, each.put_gradient, is_gradient=True)
        for optimizer in optimizers:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if _lies_like(parameter, value, f"{name}/{key}"):
                    carrying.add(f"{name}/{key}", value, dim, _PutIn(state, key))
    was_sharded = any(isinstance(each.tensor, DTensor) for each in parameters)
    by_name = dict(_by_any_name(model, parameters))
    for companion in companions_in(registered, by_name, was_sharded=was_sharded, is_sharded=degrees is not None):
        carrying.add(f"{companion.name} (registered)", companion.tensor, companion.dim, companion.put)
    carrying.refuse_shared(model)
    return _gradients_aside(carrying.found)


def _gradients_aside(found: Sequence[MovedTensor]) -> list[MovedTensor]:
    """Tensors to move in the order in which the least memory is taken: gradients first, or last.

    Gradients of a unit lie in one memory, which goes when the last of them has moved: so they are the first to go where
    there will be more of everything, and the last where there will be less.
    """
    grows = sum(sum(each.item.taken_bytes) - sum(each.item.freed_bytes) for each in found) > 0
    return sorted(found, key=lambda each: each.is_gradient is not grows)


def _by_any_name(
    model: nn.Module, parameters: Sequence[PlacedParameter]
) -> Iterator[tuple[str, tuple[nn.Parameter, int]]]:
    """Parameters with the dimensions that cut them, by what users may call them: with the names of wrappers too."""
    own = {id(each.tensor): (each.tensor, each.dim) for each in parameters}
    bare = ((each.name, each.tensor) for each in named_tensors(model))
    for name, parameter in (*bare, *model.named_parameters(remove_duplicate=False)):
        if id(parameter) in own:
            yield name, own[id(parameter)]


class _Carrying:
    """Gathers the tensors that a change moves, each once, with its layouts; those of alike tensors are found once."""

    def __init__(self, degrees: Degrees | None) -> None:
        self._degrees = degrees
        self._router = Router()
        self._after = None if degrees is None else Layouts(degrees)
        self._before: dict[tuple[DeviceMesh, tuple[int, ...], int], Layout] = {}
        self._parts: dict[DeviceMesh, tuple[int, ...]] = {}
        self._found: dict[int, MovedTensor] = {}
        self._own_memory: dict[int, list[tuple[str, int, int]]] = {}  # by the address of what it is a part of

    @property
    def found(self) -> list[MovedTensor]:
        """The gathered tensors in the order in which they were added."""
        return list(self._found.values())

    def add(
        self,
        name: str,
        tensor: torch.Tensor,
        dim: int,
        put: Callable[[torch.Tensor], None] | None = None,
        *,
        parameter: int | None = None,
        is_gradient: bool = False,
    ) -> None:
        """Add a tensor to move; ``dim`` counts where it is whole, and one that is cut says it itself."""
        known = self._found.get(id(tensor))
        puts = () if put is None else (put,)
        if known is not None:
            self._found[id(tensor)] = replace(known, puts=(*known.puts, *puts))
            return
        shape = tuple(tensor.shape)
        whole = Layout(shape, (Box.whole(shape),) * dist.get_world_size())
        old = whole
        if isinstance(tensor, DTensor):
            *outer, last = tensor.placements
            if not (isinstance(last, Shard) and all(placement.is_replicate() for placement in outer)):
                raise ValueError(
                    f"{name} is placed {tensor.placements}; allowed where sharding changes: cut once, by the last "
                    "dimension of its mesh, as fully_shard does"
                )
            dim = last.dim
            old = self._layout_on(tensor.device_mesh, shape, dim)
        new = whole
        if self._degrees is not None and self._after is not None:
            if tensor.dim() == 0:
                raise ValueError(f"{name} has no dimension that fully_shard could cut; give it the shape (1,)")
            if dim > 0 and shape[dim] % self._degrees.shard:
                raise ValueError(UNEVEN.format(name, dim, shape[dim], self._degrees.shard))
            new = self._after.of(shape, dim)
        item = self._router.item(name, old, new, tensor.element_size())
        self._found[id(tensor)] = MovedTensor(tensor, dim, parameter, puts, item, is_gradient)
        if not is_gradient:  # those of a unit lie in one memory
            self._refuse_memory_of_another(name, tensor)

    def refuse_shared(self, model: nn.Module) -> None:
        """Raise where a buffer shares memory with a tensor that is to move."""
        for name, buffer in model.named_buffers():
            if id(buffer) not in self._found:
                self._refuse_memory_of_another(name, buffer, is_moved=False)

    def _refuse_memory_of_another(self, name: str, tensor: torch.Tensor, *, is_moved: bool = True) -> None:
        local = local_of(tensor)
        if local.layout is not torch.strided:
            raise ValueError(f"{name} is {local.layout}, which has no part that could be moved; keep it dense")
        if local.device.type == "meta" or not local.numel():
            return
        start = local.data_ptr()
        end = start + (sum(map(_reach, local.shape, local.stride())) + 1) * local.element_size()
        others = self._own_memory.setdefault(local.untyped_storage().data_ptr(), [])
        for other, low, high in others:
            if low < end and start < high:
                raise ValueError(
                    f"{name} and {other} share memory, and would not after the change of plan; make one of them a "
                    "clone(), or have both be one tensor"
                )
        if is_moved:
            others.append((name, start, end))

    def _layout_on(self, mesh: DeviceMesh, shape: tuple[int, ...], dim: int) -> Layout:
        """The layout, by global rank, of a tensor that the last dimension of a mesh cuts along ``dim``."""
        key = mesh, shape, dim
        if key not in self._before:
            if mesh not in self._parts:
                self._parts[mesh] = _parts_by_rank(mesh)
            boxes = parts_of(shape, dim, 1 + max(self._parts[mesh]))
            self._before[key] = Layout(shape, tuple(boxes[part] for part in self._parts[mesh]))
        return self._before[key]


def _reach(size: int, stride: int) -> int:
    return (size - 1) * stride


def _parts_by_rank(mesh: DeviceMesh) -> tuple[int, ...]:
    """The part that each rank has of what the last dimension of a mesh cuts; ValueError where it lacks a rank."""
    ranks = mesh.mesh
    part_of = {int(rank): at % ranks.shape[-1] for at, rank in enumerate(ranks.flatten().tolist())}
    if set(part_of) != set(range(dist.get_world_size())):
        raise ValueError(
            f"a mesh of the model has the ranks {sorted(part_of)}, and training has {dist.get_world_size()}; allowed: "
            "meshes of all ranks"
        )
    return tuple(part_of[rank] for rank in range(len(part_of)))


class _PutIn:
    """A function that puts a tensor into a mapping under a fixed key."""

    def __init__(self, holder: MutableMapping[Any, Any], key: str) -> None:
        self._holder, self._key = holder, key

    def __call__(self, new: torch.Tensor) -> None:
        self._holder[self._key] = new


def _refuse_hidden(optimizer: Optimizer) -> None:
    """Raise where an optimizer has tensors elsewhere than in its state: nothing says what they belong to."""
    own = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups", "defaults")}
    of_groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    for holder in (own, *of_groups):
        for key, value in holder.items():
            if any(isinstance(each, torch.Tensor) and each.numel() > 1 for each in tree_leaves(value)):
                raise ValueError(
                    f"{key!r} of {type(optimizer).__name__} has tensors, and only those in its state would move with "
                    "the parameters; keep such tensors in optimizer.state, under the parameter that they belong to"
                )


def _lies_like(parameter: nn.Parameter, value: object, name: str) -> bool:
    """Whether a value of an optimizer's state moves with its parameter; ValueError where it would be left behind."""
    if not isinstance(value, torch.Tensor):
        if any(isinstance(each, torch.Tensor) and each.numel() > 1 for each in tree_leaves(value)):
            raise ValueError(
                f"{name} is a {type(value).__name__} with tensors, which cannot be resharded; keep each tensor under a "
                "key of its own in optimizer.state, or keep the plan"
            )
        return False
    if value.dim() == 0:
        return False
    if isinstance(value, DTensor) is isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return True
    if value.numel() == 1 and not isinstance(value, DTensor):
        return False  # a count, the same on all ranks
    raise ValueError(
        f"{name} is of shape {tuple(value.shape)}, and the parameter of {tuple(parameter.shape)}: it belongs to what "
        "lies on this rank now, and cannot be resharded; restart from a checkpoint to change the sharding"
    )
