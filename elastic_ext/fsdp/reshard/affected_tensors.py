"""The tensors of a model that lie by its plan, and that a change of plan or of members moves.

Parameters, their gradients, what optimizers keep of them in their shape, and registered tensors that are sharded. Where
ranks come or leave, also what each rank has whole: buffers, registered tensors, and parameters left out of fully_shard;
and their outline, by which a rank that comes has the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from elastic_ext.fsdp.layout import Layout, row_major
from elastic_ext.fsdp.names import named_tensors
from elastic_ext.fsdp.plan import UNEVEN, Degrees, over_holders, parts_of
from elastic_ext.fsdp.state import local_of
from elastic_ext.fsdp.value_encoding import pack, unpack
from elastic_ext.fsdp.worlds import LayoutsBetween, ThreeLayouts, Worlds

from . import rewire
from .buckets import BucketItem, Router
from .companions import Tensors, companions_in
from .refusals import why_not_parted
from .units import Place, Survey

__all__ = [
    "MemberRoute",
    "MovedParts",
    "MovedTensor",
    "PlacedParameter",
    "begin_like",
    "moved_tensors",
    "outline_of",
    "parameters_of",
    "tell_outline",
]


@dataclass(eq=False)
class PlacedParameter:
    """A parameter in a change, and the modules that have it."""

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
    """A tensor that a change moves, and the places that refer to it."""

    tensor: torch.Tensor
    dim: int
    """The dimension along which the tensor is cut, before or after."""
    parameter: int | None
    """The index of the parameter that it is; None where it is another tensor."""
    puts: tuple[Callable[[torch.Tensor], None], ...]
    """Functions that each put another tensor in one of its places, but for a parameter's in the model."""
    item: BucketItem
    """The move among the ranks of the new world."""
    given: BucketItem | None
    """The move among the ranks of the old world that goes before; None where nobody leaves."""
    is_gradient: bool = False
    is_copy: bool = False
    """Whether each rank has the tensor whole, however the model is sharded."""

    @property
    def items(self) -> tuple[BucketItem, ...]:
        """All moves of the tensor, in order."""
        return (self.item,) if self.given is None else (self.given, self.item)

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


@dataclass(frozen=True, eq=False)
class MovedParts:
    """What a change moves: parameters that lie by the plan, those left out, optimizers and registered tensors."""

    model: nn.Module
    parameters: Sequence[PlacedParameter]
    left_out: Sequence[nn.Parameter]
    """Parameters that the user has left out of fully_shard."""
    optimizers: Sequence[Optimizer]
    registered: Sequence[Tensors]

    def names(self) -> dict[int, str]:
        """The names of all parameters and buffers, by identity."""
        return {id(each.tensor): each.is_alias_of or each.name for each in named_tensors(self.model)}


def moved_tensors(parts: MovedParts, names: Mapping[int, str], route: MemberRoute) -> list[MovedTensor]:
    """All tensors that a change moves; ValueError where one cannot move. ``names`` are those of the parts.

    Ranks that were given the same have the same in the same order.
    """
    carrying = _Carrying(route)
    for optimizer in parts.optimizers:
        _refuse_hidden(optimizer)
    for at, each in enumerate(parts.parameters):
        parameter, name, dim = each.tensor, names[id(each.tensor)], each.dim
        carrying.add(name, parameter, dim, parameter=at)
        if parameter.grad is not None:
            carrying.add(f"{name} (gradient)", parameter.grad, dim, each.put_gradient, is_gradient=True)
        for key, value, put in _state_of(parameter, name, parts.optimizers):
            carrying.add(f"{name}/{key}", value, dim, put)
    was_sharded = any(isinstance(each.tensor, DTensor) for each in parts.parameters)
    by_name = dict(_by_any_name(parts.model, parts.parameters))
    for companion in companions_in(parts.registered, by_name, was_sharded=was_sharded, is_sharded=route.is_sharded):
        carrying.add(f"{companion.name} (registered)", companion.tensor, companion.dim, companion.put)
    if not route.worlds.is_same:
        _add_copies(carrying, parts, names)
    carrying.refuse_shared(parts.model)
    return _gradients_aside(carrying.found)


def _state_of(
    parameter: nn.Parameter, name: str, optimizers: Sequence[Optimizer]
) -> Iterator[tuple[str, torch.Tensor, Callable[[torch.Tensor], None]]]:
    """What optimizers keep of a parameter in its shape: keys, tensors, and functions that put others in their place."""
    for optimizer in optimizers:
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if _lies_like(parameter, value, f"{name}/{key}"):
                yield key, value, _PutIn(state, key)


def _add_copies(carrying: _Carrying, parts: MovedParts, names: Mapping[int, str]) -> None:
    """Add what each rank has whole, for ranks that come; of buffers, which may differ, all take the first rank's.

    So it is for registered tensors where there are more ranks now, or fewer, as where these resume from a checkpoint.
    Where there are as many the ranks have made sure that theirs are equal: else each would go on with its own.
    """
    worlds = carrying.worlds
    for parameter in parts.left_out:
        name = names[id(parameter)]
        carrying.add_copy(name, parameter)
        if parameter.grad is not None:
            carrying.add_copy(f"{name} (gradient)", parameter.grad, _PutGradient(parameter))
        for key, value, put in _state_of(parameter, name, parts.optimizers):
            carrying.add_copy(f"{name}/{key}", value, put)
    own = {id(parameter) for parameter in parts.model.parameters()}
    for at, holder in enumerate(parts.registered):
        for key, tensor in sorted(holder.items()):
            if not (isinstance(tensor, DTensor) or id(tensor) in own):
                of_first = worlds.num_old != worlds.num_new
                carrying.add_copy(f"{key} (registered {at})", tensor, of_first=of_first)
    for name, buffer in parts.model.named_buffers():
        if isinstance(buffer, DTensor):
            raise ValueError(f"the buffer {name} is a DTensor; allowed where ranks come or leave: plain buffers")
        if buffer.device.type != "meta":
            carrying.add_copy(f"{name} (buffer)", buffer, of_first=True)


def _gradients_aside(found: Sequence[MovedTensor]) -> list[MovedTensor]:
    """Tensors to move in the order in which the least memory is taken: gradients first, or last.

    Gradients of a unit lie in one memory, which goes when the last of them has moved: so they are the first to go where
    there will be more of everything, and the last where there will be less.
    """
    grows = sum(sum(item.taken_bytes) - sum(item.freed_bytes) for each in found for item in each.items) > 0
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


@dataclass(frozen=True, eq=False)
class MemberRoute:
    """The worlds and degrees between which a change moves tensors, and whether this rank comes."""

    worlds: Worlds
    before: Degrees
    after: Degrees
    is_sharded: bool
    """Whether parameters are sharded afterwards; else they are whole."""
    comes: bool = False
    """Whether this rank has nothing of what is moved, whatever lies on it."""


class _Carrying:
    """Gathers the tensors that a change moves, each once, with its layouts; those of alike tensors are found once."""

    def __init__(self, route: MemberRoute) -> None:
        self._route = route
        self._router = Router()
        self._layouts = LayoutsBetween(route.worlds, route.before, route.after)
        self._before: dict[tuple[DeviceMesh, tuple[int, ...], int], Layout] = {}
        self._parts: dict[DeviceMesh, tuple[int, ...]] = {}
        self._found: dict[int, MovedTensor] = {}
        self._own_memory: dict[int, list[tuple[str, int, int]]] = {}  # by the address of what it is a part of

    @property
    def worlds(self) -> Worlds:
        """The ranks that there were, and that there will be."""
        return self._route.worlds

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
        if self._is_known(tensor, put):
            return
        shape, route = tuple(tensor.shape), self._route
        old = None
        if isinstance(tensor, DTensor):
            *outer, last = tensor.placements
            if not (isinstance(last, Shard) and all(placement.is_replicate() for placement in outer)):
                raise ValueError(
                    f"{name} is placed {tensor.placements}; allowed where sharding changes: cut once, by the last "
                    "dimension of its mesh, as fully_shard does"
                )
            dim = last.dim
            old = None if route.comes else self._layout_on(tensor.device_mesh, shape, dim)
            if not (old is None or route.worlds.is_same or old == self._layouts.old(shape, dim)):
                raise ValueError(
                    f"{name} lies on a mesh of its own; allowed where ranks come or leave: as the model's parameters do"
                )
        if route.is_sharded:
            if tensor.dim() == 0:
                raise ValueError(f"{name} has no dimension that fully_shard could cut; give it the shape (1,)")
            if dim > 0 and shape[dim] % route.after.shard:
                raise ValueError(UNEVEN.format(name, dim, shape[dim], route.after.shard))
        laid = self._layouts.of(shape, dim, old=old)
        self._note(
            MovedTensor(tensor, dim, parameter, _puts_of(put), *self._routes(name, tensor, laid), is_gradient), name
        )

    def add_copy(
        self,
        name: str,
        tensor: torch.Tensor,
        put: Callable[[torch.Tensor], None] | None = None,
        *,
        of_first: bool = False,
    ) -> None:
        """Add a plain tensor that each rank has whole; with ``of_first`` all take that of the first rank."""
        if not self._is_known(tensor, put):
            laid = self._layouts.of_copies(tuple(tensor.shape), of_first=of_first)
            routes = self._routes(name, tensor, laid)
            self._note(MovedTensor(tensor, 0, None, _puts_of(put), *routes, is_copy=True), name)

    def _is_known(self, tensor: torch.Tensor, put: Callable[[torch.Tensor], None] | None) -> bool:
        """Whether a tensor was added already; what it is put in by then is noted."""
        known = self._found.get(id(tensor))
        if known is not None:
            self._found[id(tensor)] = replace(known, puts=(*known.puts, *_puts_of(put)))
        return known is not None

    def _routes(self, name: str, tensor: torch.Tensor, laid: ThreeLayouts) -> tuple[BucketItem, BucketItem | None]:
        item = self._router.item(name, laid.between, laid.new, tensor.element_size())
        if not self._route.worlds.has_leavers:
            return item, None
        return item, self._router.item(name, laid.old, laid.between, tensor.element_size())

    def _note(self, each: MovedTensor, name: str) -> None:
        self._found[id(each.tensor)] = each
        if not each.is_gradient:  # those of a unit lie in one memory
            self._refuse_memory_of_another(name, each.tensor)

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
        """The layout, by holder, of a tensor that the last dimension of a mesh cuts along ``dim``."""
        key = mesh, shape, dim
        if key not in self._before:
            worlds = self._route.worlds
            if mesh not in self._parts:
                self._parts[mesh] = _parts_by_rank(mesh, worlds.num_old)
            boxes = parts_of(shape, dim, 1 + max(self._parts[mesh]))
            by_rank = Layout(shape, tuple(boxes[part] for part in self._parts[mesh]))
            self._before[key] = over_holders(by_rank, worlds.old)
        return self._before[key]


def _reach(size: int, stride: int) -> int:
    return (size - 1) * stride


def _parts_by_rank(mesh: DeviceMesh, num_ranks: int) -> tuple[int, ...]:
    """The part that each rank has of what the last dimension of a mesh cuts; ValueError where it lacks a rank."""
    ranks = mesh.mesh
    part_of = {int(rank): at % ranks.shape[-1] for at, rank in enumerate(ranks.flatten().tolist())}
    if set(part_of) != set(range(num_ranks)):
        raise ValueError(
            f"a mesh of the model has the ranks {sorted(part_of)}, and training has {num_ranks}; allowed: "
            "meshes of all ranks"
        )
    return tuple(part_of[rank] for rank in range(len(part_of)))


def _puts_of(put: Callable[[torch.Tensor], None] | None) -> tuple[Callable[[torch.Tensor], None], ...]:
    return () if put is None else (put,)


class _PutIn:
    """A function that puts a tensor into a mapping under a fixed key."""

    def __init__(self, holder: MutableMapping[Any, Any], key: str) -> None:
        self._holder, self._key = holder, key

    def __call__(self, new: torch.Tensor) -> None:
        self._holder[self._key] = new


class _PutGradient:
    """A function that gives a parameter another gradient."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter

    def __call__(self, new: torch.Tensor) -> None:
        self._parameter.grad = new


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


# --- the outline of a training's tensors -----------------------------------------------------------------------------
# What a rank that comes is told, so that it has the same tensors to be filled: parameters, to be compared, and which
# gradients and optimizer state there are. Numbers that optimizers keep, such as counts of steps, are in it.


_TOLD_AT_ONCE = 16_376  # bytes of an outline that go with its length, in one collective


def outline_of(parameters: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """The outline of these parameters, their gradients, and the state that optimizers keep of them, as JSON has it.

    ValueError where there is state of them that cannot be told.
    """
    state: list[Any] = []
    for number, optimizer in enumerate(optimizers):
        for name, parameter in parameters.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                where = f"the optimizer's state {key!r} of {name}"
                if not isinstance(key, str):
                    raise ValueError(f"{where} has a key that is no text")
                if _lies_like(parameter, value, f"{name}/{key}"):
                    state.append([number, name, key, "like", _dtype(value)])
                elif isinstance(value, torch.Tensor):
                    is_beside = value.device.type == parameter.device.type
                    told = [list(value.shape), value.flatten().tolist(), is_beside]
                    state.append([number, name, key, "number", _dtype(value), *told])
                else:
                    try:
                        state.append([number, name, key, "value", pack(value, where)])
                    except TypeError as error:
                        raise ValueError(str(error)) from error
    return {
        "parameters": [[name, list(each.shape), _dtype(each)] for name, each in parameters.items()],
        "gradients": [name for name, each in parameters.items() if each.grad is not None],
        "state": state,
    }


def tell_outline(outline: Mapping[str, Any] | None, device: torch.device) -> dict[str, Any]:
    """The outline that rank 0 gives, on all ranks of the default group; all of them call this."""
    told = b"" if outline is None else json.dumps(outline).encode()
    at_once = len(told).to_bytes(8, "big") + told[:_TOLD_AT_ONCE].ljust(_TOLD_AT_ONCE, b"\0")
    head = _broadcast(at_once, device)
    num_bytes = int.from_bytes(head[:8], "big")
    if num_bytes <= _TOLD_AT_ONCE:
        found: dict[str, Any] = json.loads(head[8 : 8 + num_bytes])
        return found
    rest = told[_TOLD_AT_ONCE:] if told else bytes(num_bytes - _TOLD_AT_ONCE)
    found = json.loads(head[8:] + _broadcast(rest, device))
    return found


def _broadcast(data: bytes, device: torch.device) -> bytes:
    """The bytes that rank 0 of the default group gives, as many as this rank gives."""
    memory = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    dist.broadcast(memory, 0)
    return bytes(memory.cpu().numpy())


def begin_like(
    outline: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]
) -> None:
    """Have the gradients and the state that an outline tells of, without memory, in place of what is there.

    ValueError where the parameters are not those of the outline.
    """
    own = [[name, list(each.shape), _dtype(each)] for name, each in parameters.items()]
    told = outline["parameters"]
    if own != told:
        differing = [each for each in (*own, *told) if each not in own or each not in told] or ["their order"]
        raise ValueError(
            f"the model of this rank has {len(own)} parameters and that of the others {len(told)}; they differ in "
            f"{differing[0]}: run the same script with the same model on all ranks"
        )
    if outline["state"] and max(row[0] for row in outline["state"]) >= len(optimizers):
        raise ValueError(f"this rank has {len(optimizers)} optimizers, and the others have more; give it the same ones")
    for name, parameter in parameters.items():
        parameter.grad = _without_memory(parameter, parameter.dtype) if name in outline["gradients"] else None
    for optimizer in optimizers:
        optimizer.state.clear()
    for number, name, key, kind, *rest in outline["state"]:
        parameter = parameters[name]
        optimizers[number].state[parameter][key] = _made(parameter, kind, rest)


def _made(parameter: nn.Parameter, kind: str, told: Sequence[Any]) -> object:
    if kind == "value":
        return unpack(told[0])
    dtype = getattr(torch, told[0])
    if kind == "like":
        return _without_memory(parameter, dtype)
    shape, numbers, is_beside = told[1:]
    return torch.tensor(numbers, dtype=dtype, device=parameter.device if is_beside else "cpu").view(shape)


def _without_memory(parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of a parameter's shape, spread as the parameter is, that takes no memory but that of one element."""
    zero = torch.zeros(1, dtype=dtype, device=parameter.device)

    def spread(shape: torch.Size) -> torch.Tensor:
        return zero.view(shape) if shape.numel() == 1 else zero.expand(shape)  # of one element it is the whole tensor

    if not isinstance(parameter, DTensor):
        return spread(parameter.shape)
    shape = tuple(parameter.shape)
    return DTensor.from_local(
        spread(parameter._local_tensor.shape),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=row_major(shape),
    )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
