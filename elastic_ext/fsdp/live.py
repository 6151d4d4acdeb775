"""Live: a model in training is spread otherwise over its ranks, in the same processes, no value altered.

Everything that can be refused is refused before an element moves, and what was there is then there again. From the
first bucket that ranks have exchanged on there is no way back: a failure is raised on all ranks, and leaves a state
that only a checkpoint mends.

Words: parameters are *sharded*, each rank's part a DTensor in one of fully_shard's units; or *whole*, plain tensors on
every rank, their gradients averaged by DDP. Sharded parameters stay the same objects as long as they are sharded;
between sharded and whole others take their place.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from . import rewire
from .carrier import carry
from .companions import Tensors, companions_in, replace_parameter
from .freight import Item, buckets_of
from .holders import replace_in
from .layout import Box, Layout
from .names import named_tensors
from .plan import UNEVEN, Degrees, parts_of
from .rewire import Place, Slot, Survey, Unit
from .state import local_of

__all__ = ["Agree", "Change", "Moved", "Sharded", "Whole", "layout_on"]

Agree = Callable[[BaseException | None], None]
"""Called by all ranks: returns where none brings an error, and raises on all where one does."""


@dataclass(frozen=True, eq=False)
class Sharded:
    """The units that fully_shard shall make, innermost first."""

    units: Sequence[Unit]
    degrees: Degrees
    mesh: Callable[[], DeviceMesh]
    """Of these degrees; all ranks call this, which may make groups."""


@dataclass(frozen=True, eq=False)
class Whole:
    """Plain parameters; ``wake`` has their gradients averaged once they are there."""

    wake: Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What a change has cost."""

    num_tensors: int
    num_sent: int
    """Bytes, between all ranks."""
    num_replaced: int
    """Parameters that are other objects now."""
    load: int
    """Bytes: the most that a bucket took on a rank beside what the state took before and after."""
    wiring_seconds: float
    moving_seconds: float


@dataclass(eq=False)
class _Parameter:
    """A parameter, and where the model has it."""

    tensor: nn.Parameter
    places: tuple[Place, ...]
    dim: int


@dataclass(frozen=True, eq=False)
class _Carried:
    """A tensor that lies elsewhere afterwards."""

    tensor: torch.Tensor
    dim: int
    parameter: int | None
    """Which one it is, None where it is none."""
    put: Callable[[torch.Tensor], None]
    """Put another object in its place."""
    item: Item


class Change:
    """One change of how a model is spread: made, and with that checked, on every rank; then ``run``."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        registered: Sequence[Tensors],
        *,
        after: Callable[[Survey | None], Sharded | Whole],
        rest: Callable[[], None],
        bucket_bytes: int,
    ) -> None:
        """``after`` says what it shall be, from what fully_shard has made; None where nothing is sharded.

        ``rest`` has DDP leave the model; it is called where there may be one. ValueError says why it cannot be.
        """
        self._model = model
        self._optimizers = optimizers
        self._registered = registered
        is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        self._survey = rewire.survey(model) if is_sharded else None
        self._after = after(self._survey)
        self._rest = rest
        self._bucket_bytes = bucket_bytes
        self._parameters = list(self._find_parameters())
        managed = {id(each.tensor) for each in self._parameters}
        self._left_out = {parameter for parameter in model.parameters() if id(parameter) not in managed}
        self._carried = list(self._find(registered))

    @property
    def items(self) -> list[Item]:
        """What has to be moved."""
        return [each.item for each in self._carried]

    @property
    def replaced(self) -> list[torch.Tensor]:
        """The parameters that will be other objects."""
        stays = (self._survey is None) is isinstance(self._after, Whole)
        return [] if stays else [each.tensor for each in self._parameters]

    @property
    def units_before(self) -> Sequence[Unit]:
        """What fully_shard has made so far."""
        return () if self._survey is None else self._survey.units

    @property
    def holders(self) -> list[object]:
        """What of this change refers to parameters."""
        own: list[object] = [self._left_out, *self._parameters, *self._carried]
        if self._survey is not None:
            own += [*self._survey.slots, *(slot.keeper for slot in self._survey.slots)]
        return own + [vars(each) for each in own if hasattr(each, "__dict__")]

    def run(self, agree: Agree, *, group: dist.ProcessGroup, device: torch.device) -> Moved:
        """Change it; all ranks call this between two steps. ``group`` has all of them, for ``device``."""
        began = time.perf_counter()
        num_replaced = len(self.replaced)
        mesh = self._after.mesh() if isinstance(self._after, Sharded) else None
        error: BaseException | None = None
        locals_before = [local_of(each.tensor) for each in self._parameters]
        slots: list[Slot] = []
        try:
            slots = self._wire(mesh)
        except Exception as caught:  # whatever it is, what was there has to come back
            error = caught.with_traceback(None)  # which keeps alive what has been taken off
        self._agree_or_go_back(agree, error, locals_before)
        wired = time.perf_counter()
        num_sent = load = 0
        for bucket in buckets_of(self.items, 2 * self._bucket_bytes):
            carried = self._carried[bucket.first : bucket.first + len(bucket.items)]
            old = [local_of(each.tensor) for each in carried]
            new: list[torch.Tensor] = []
            try:
                new = [self._memory(each, local, slots) for each, local in zip(carried, old, strict=True)]
            except Exception as caught:  # there is not enough of it, as a rule
                error = caught.with_traceback(None)
            if bucket.first == 0:
                self._agree_or_go_back(agree, error, locals_before)
                locals_before.clear()
                self._survey = None  # which keeps what was there
            else:
                agree(error)
            carry(bucket, old, new, group=group, device=device)
            for each, local in zip(carried, new, strict=True):
                self._bind(each, local, slots, mesh)
            num_sent, load = num_sent + bucket.num_sent, max(load, bucket.load)
            self._carried[bucket.first : bucket.first + len(bucket.items)] = [_DONE] * len(carried)
            del old, new, carried
        if isinstance(self._after, Whole):
            self._after.wake()
        return Moved(
            num_tensors=len(self._carried),
            num_sent=num_sent,
            num_replaced=num_replaced,
            load=load,
            wiring_seconds=wired - began,
            moving_seconds=time.perf_counter() - wired,
        )

    # --- before ------------------------------------------------------------------------------------------------------

    def _find_parameters(self) -> Iterator[_Parameter]:
        if self._survey is not None:
            for slot in self._survey.slots:
                yield _Parameter(slot.parameter, slot.places, rewire.dim_of(slot))
            return
        places: dict[int, list[Place]] = {}
        found: dict[int, nn.Parameter] = {}
        for module in self._model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    places.setdefault(id(parameter), []).append((module, name))
                    found[id(parameter)] = parameter
        for key, parameter in found.items():
            if isinstance(parameter, DTensor):
                raise ValueError("the model is cut by tensor parallelism without fully_shard; its sharding has to stay")
            yield _Parameter(parameter, tuple(places[key]), 0)

    def _find(self, registered: Sequence[Tensors]) -> Iterator[_Carried]:
        names = {id(each.tensor): each.is_alias_of or each.name for each in named_tensors(self._model)}
        for at, each in enumerate(self._parameters):
            parameter, name, dim = each.tensor, names[id(each.tensor)], each.dim
            yield self._carry(name, parameter, dim, _keep, at)
            if parameter.grad is not None:
                yield self._carry(f"{name} (gradient)", parameter.grad, dim, _PutGradient(each))
            for optimizer in self._optimizers:
                state = optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if _lies_like(parameter, value, f"{name}/{key}"):
                        yield self._carry(f"{name}/{key}", value, dim, _PutIn(state, key))
        companions = companions_in(
            registered,
            dict(self._by_any_name()),
            was_sharded=self._survey is not None,
            is_sharded=isinstance(self._after, Sharded),
        )
        for companion in companions:
            yield self._carry(companion.name, companion.tensor, companion.dim, companion.put)

    def _by_any_name(self) -> Iterator[tuple[str, tuple[nn.Parameter, int]]]:
        """Parameters with the dimensions that cut them, by what users may call them: with the names of wrappers too."""
        own = {id(each.tensor): (each.tensor, each.dim) for each in self._parameters}
        bare = ((each.name, each.tensor) for each in named_tensors(self._model))
        for name, parameter in (*bare, *self._model.named_parameters(remove_duplicate=False)):
            if id(parameter) in own:
                yield name, own[id(parameter)]

    def _carry(
        self,
        name: str,
        tensor: torch.Tensor,
        dim: int | None,
        put: Callable[[torch.Tensor], None],
        parameter: int | None = None,
    ) -> _Carried:
        shape = tuple(tensor.shape)
        if isinstance(tensor, DTensor):
            *outer, last = tensor.placements
            dim = last.dim if isinstance(last, Shard) else None
            if dim is None or not all(placement.is_replicate() for placement in outer):
                raise ValueError(
                    f"{name} is placed {tensor.placements}; allowed where sharding changes: cut once, by the last "
                    "dimension of its mesh, as fully_shard does"
                )
            old = layout_on(tensor.device_mesh, shape, dim)
        else:
            old = _whole(shape)
        assert dim is not None
        new = _whole(shape) if isinstance(self._after, Whole) else self._after.degrees.layout(shape, dim)
        if isinstance(self._after, Sharded):
            if dim > 0 and shape[dim] % self._after.degrees.shard:
                raise ValueError(UNEVEN.format(name, dim, shape[dim], self._after.degrees.shard))
            if tensor.dim() == 0:
                raise ValueError(f"{name} has no dimension that fully_shard could cut; give it the shape (1,)")
        return _Carried(tensor, dim, parameter, put, Item(name, old, new, tensor.element_size()))

    # --- changing ----------------------------------------------------------------------------------------------------

    def _wire(self, mesh: DeviceMesh | None) -> list[Slot]:
        """Take off what is there and put on what shall be; gives the slots in the order of the parameters."""
        if self._survey is not None:
            rewire.take_off(self._model)
        elif self.replaced:
            self._rest()
        rewire.stand_in((each.tensor, each.places) for each in self._parameters)
        return self._put_on(self._after.units, mesh) if isinstance(self._after, Sharded) else []

    def _put_on(self, units: Sequence[Unit], mesh: DeviceMesh | None) -> list[Slot]:
        dims = {each.places[0]: each.dim for each in self._parameters}
        rewire.put_on(units, mesh, dims, self._left_out)
        by_place = {place: slot for slot in rewire.slots_of(self._model) for place in slot.places}
        return [by_place[each.places[0]] for each in self._parameters]

    def _agree_or_go_back(
        self, agree: Agree, error: BaseException | None, locals_before: Sequence[torch.Tensor]
    ) -> None:
        try:
            agree(error)
        except BaseException:
            rewire.take_off(self._model)
            if self._survey is None:
                for each in self._parameters:
                    _register(each.tensor, each.places)
            else:
                rewire.stand_in((each.tensor, each.places) for each in self._parameters)
                slots = self._put_on(self._survey.units, None)
                for slot, each, local in zip(slots, self._parameters, locals_before, strict=True):
                    rewire.bind(slot, each.tensor, local)
            raise

    def _memory(self, each: _Carried, local: torch.Tensor, slots: Sequence[Slot]) -> torch.Tensor:
        """Where this rank's new part goes: where it is, if it stays the same."""
        rank = dist.get_rank()
        box = each.item.new.boxes[rank]
        if each.item.old.boxes[rank] == box:
            return local
        shape = list(each.tensor.shape)
        num_across = math.prod(size for dim, size in enumerate(shape) if dim != each.dim)
        shape[each.dim] = box.num_elements // max(1, num_across)
        if each.parameter is None or not slots:
            return local.new_empty(shape)
        padded = local.new_zeros(rewire.padded_size(slots[each.parameter]))
        return padded[: box.num_elements].view(shape)

    def _bind(self, each: _Carried, local: torch.Tensor, slots: Sequence[Slot], mesh: DeviceMesh | None) -> None:
        if each.parameter is not None:
            slot = slots[each.parameter] if slots else None
            self._bind_parameter(self._parameters[each.parameter], local, slot, mesh)
        elif mesh is None:
            if each.tensor is not local:
                each.put(local)
        else:
            made = _sharded(each.tensor, each.dim, local, mesh)
            if isinstance(each.tensor, DTensor):
                rewire.rebind(each.tensor, local, made)
            else:
                each.put(made)

    def _bind_parameter(
        self, each: _Parameter, local: torch.Tensor, slot: Slot | None, mesh: DeviceMesh | None
    ) -> None:
        old = each.tensor
        if slot is not None and isinstance(old, DTensor):
            rewire.bind(slot, old, local)
            return
        if slot is not None:
            assert mesh is not None
            new = nn.Parameter(_sharded(old, each.dim, local, mesh), requires_grad=old.requires_grad)
            rewire.bind(slot, new, local)
        elif isinstance(old, DTensor):
            new = nn.Parameter(local, requires_grad=old.requires_grad)
        else:
            new = old
        if new is not old:
            new.__dict__.update(rewire.noted_on(old))
            replace_in(self._optimizers, old, new)
            replace_parameter(self._registered, old, new)
            each.tensor = new
        _register(new, each.places)


class _PutGradient:
    """Puts a gradient where its parameter is, whichever object that is by then."""

    def __init__(self, parameter: _Parameter) -> None:
        self._parameter = parameter

    def __call__(self, new: torch.Tensor) -> None:
        self._parameter.tensor.grad = new


class _PutIn:
    """Puts a tensor under its key."""

    def __init__(self, holder: MutableMapping[Any, Any], key: str) -> None:
        self._holder, self._key = holder, key

    def __call__(self, new: torch.Tensor) -> None:
        self._holder[self._key] = new


def _keep(new: torch.Tensor) -> None:
    """A parameter's place is the model's."""


_DONE = _Carried(torch.empty(0), 0, None, _keep, Item("", Layout((0,), ()), Layout((0,), ()), 1))


def _register(parameter: nn.Parameter, places: Sequence[Place]) -> None:
    for module, name in places:
        module._parameters[name] = parameter


def _sharded(tensor: torch.Tensor, dim: int, local: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """``local`` as this rank's part of a tensor like another."""
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(dim)]
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _whole(shape: tuple[int, ...]) -> Layout:
    return Layout(shape, (Box.whole(shape),) * dist.get_world_size())


def _lies_like(parameter: nn.Parameter, value: object, name: str) -> bool:
    """Whether a value of an optimizer's state moves with its parameter; ValueError where it would be left behind."""
    if not isinstance(value, torch.Tensor):
        if any(isinstance(each, torch.Tensor) and each.numel() > 1 for each in tree_leaves(value)):
            raise ValueError(
                f"{name} is a {type(value).__name__} with tensors, and no other sharding could take it over"
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
        "lies on this rank now, and no other sharding could take it over"
    )


def layout_on(mesh: DeviceMesh, shape: tuple[int, ...], dim: int) -> Layout:
    """Where a tensor lies that the last dimension of a mesh cuts along ``dim``, by global rank."""
    num_parts = mesh.mesh.shape[-1]
    part_of = {int(rank): at % num_parts for at, rank in enumerate(mesh.mesh.flatten().tolist())}
    if set(part_of) != set(range(dist.get_world_size())):
        raise ValueError(
            f"a mesh of the model has the ranks {sorted(part_of)}, and training has {dist.get_world_size()}; allowed: "
            "meshes of all ranks"
        )
    boxes = parts_of(shape, dim, num_parts)
    return Layout(shape, tuple(boxes[part_of[rank]] for rank in range(len(part_of))))
