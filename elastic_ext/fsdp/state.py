"""What a model holds on this rank, as named tensors, each with the part of the whole that it is; and which parameters
optimizers train.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from elastic_ext.errors import ElasticError
from elastic_ext.torch_private import sharded
from elastic_ext.torch_private.sharded import FlatPart

from .layout import Box, Cut, box_after
from .names import NamedTensor, named_modules, named_tensors
from .value_encoding import DTYPES, name_of

__all__ = [
    "HeldModel",
    "Kind",
    "LocalShard",
    "OptimizedParameter",
    "Trained",
    "box_of",
    "by_name_of",
    "extra_states",
    "held",
    "held_of_model",
    "local_of",
    "memory_of",
    "place_of",
    "put_extra_states",
    "put_in",
    "trained_by",
]


# --- what a model holds on this rank, as named tensors, each with the part of the whole tensor that it is ------------
# A saver reads these tensors and a loader writes into them: they are the memory that the model trains in, never copies.
# What optimizers hold is in ``optimizers.py``.

Kind: TypeAlias = Literal["parameter", "buffer", "like", "scalar", "own", "opaque"]


@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """The part of one tensor that lies on this rank."""

    name: str
    tensor: torch.Tensor
    """A plain, detached tensor in the memory that is trained in.

    Its elements in row-major order are the box's, though its shape may be another, and its memory strided.
    """
    box: Box
    dtype: str
    """The name of the dtype in safetensors."""
    kind: Kind
    is_alias_of: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class OptimizedParameter:
    """A parameter as its optimizer has it: its name, its tensor, and the part that lies on this rank."""

    name: str
    tensor: torch.Tensor
    """The parameter's own object, by which optimizers know it."""
    box: Box
    """The part of the parameter that lies on this rank."""
    is_range: bool
    """Whether FSDP1 cuts the parameter: ``tensor`` is then flat, and holds the range of elements that lies here."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether all of it lies on other ranks: FSDP1 has this rank's optimizer pass it over, its state is stale."""
        return self.is_range and self.box.is_empty and 0 not in self.box.shape


@dataclass(frozen=True, slots=True, eq=False)
class HeldModel:
    """What a model holds on this rank: its tensors, and its parameters."""

    tensors: list[LocalShard]
    """Parameters and buffers; further names of a tensor are aliases."""
    parameters: list[OptimizedParameter]
    """Each parameter once, under its own name, for whoever looks into its optimizer's state."""


def held_of_model(model: nn.Module) -> HeldModel:
    """The parameters of a model, and the buffers that ``state_dict()`` has, as they lie on this rank.

    Called between two steps. What was gathered for a pass that is over is given back first; otherwise nothing is
    exchanged.
    """
    placed = list(_placed(model))
    parameters = [each for each in placed if each.named.kind == "parameter" and each.named.is_alias_of is None]
    return HeldModel(list(map(_held_at, placed)), list(map(_parameter_at, parameters)))


def extra_states(model: nn.Module) -> dict[str, object]:
    """The extra states of modules that define ``get_extra_state``, by their names in ``state_dict()``."""
    return {
        f"{prefix}_extra_state": module.get_extra_state()
        for prefix, module in named_modules(model)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def put_extra_states(model: nn.Module, values: Mapping[str, object]) -> None:
    """Give modules back what ``extra_states`` found; names that the model does not have are passed over."""
    for prefix, module in named_modules(model):
        if type(module).set_extra_state is not nn.Module.set_extra_state and f"{prefix}_extra_state" in values:
            module.set_extra_state(values[f"{prefix}_extra_state"])


def box_of(name: str, tensor: torch.Tensor) -> Box:
    """The part of a tensor that lies on this rank: all of it, or what its placements say."""
    if not isinstance(tensor, DTensor):
        return Box.whole(tuple(tensor.shape))
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh
        return Box.empty(tuple(tensor.shape))
    cuts = []
    for placement, num_parts, part in zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True):
        if placement.is_partial():
            raise ValueError(
                f"{name} is {placement}: what ranks hold of it has yet to be added up; redistribute it before saving"
            )
        dim = sharded.sharded_dim(placement)
        if dim is not None:
            cuts.append(Cut(dim % tensor.ndim, num_parts, part, sharded.num_outer(placement)))
        elif not placement.is_replicate():
            raise ValueError(
                f"{name} is placed {placement}; allowed: Shard and Replicate; redistribute it before saving"
            )
    box = box_after(tuple(tensor.shape), cuts)
    if box is None:
        raise ValueError(
            f"{name}, of shape {tuple(tensor.shape)}, is placed {tensor.placements} on the mesh "
            f"{tuple(tensor.device_mesh.shape)}, which leaves this rank several blocks; allowed: placements that "
            "leave one, as Shard does, and fully_shard of tensor parallelism"
        )
    if box.num_elements != local_of(tensor).numel():
        raise ElasticError(
            f"{name} holds {local_of(tensor).numel()} elements on this rank, while its placements {tensor.placements} "
            f"say {box}; torch {torch.__version__} places it in a way that this library does not know"
        )
    return box


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that lies on this rank, in the same memory, detached."""
    with torch.no_grad():
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    if local.layout == torch.strided and local.numel() == 1 and 0 in local.stride():
        return local.as_strided(local.shape, [1] * local.dim())  # an expanded one has bytes that torch does not view
    return local


def held(name: str, tensor: torch.Tensor, box: Box, kind: Kind, is_alias_of: str | None = None) -> LocalShard:
    """A LocalShard of a tensor; ValueError where its memory cannot be read and written as it is."""
    local = local_of(tensor)
    dtype = name_of(local.dtype)
    fault = _fault(local)
    if dtype is None or fault is not None:
        allowed = f"has dtype {local.dtype}; allowed: {', '.join(str(one) for one in DTYPES.values())}"
        raise ValueError(f"{name} {fault or allowed}")
    return LocalShard(name, local, box, dtype, kind, is_alias_of)


def memory_of(tensor: torch.Tensor) -> memoryview | None:
    """The bytes of a tensor, to be read and written in place; None where they are not one run in the host's memory."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy().data)


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """A tensor of the model, with the part that lies on this rank."""

    named: NamedTensor
    box: Box
    is_range: bool
    """Whether FSDP1 cuts the tensor."""


def _placed(model: nn.Module) -> Iterator[_Placed]:
    """Every tensor of the model, with the part that lies on this rank."""
    flat: dict[int, FlatPart] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
        elif isinstance(module, FullyShardedDataParallel):
            sharded.reshard_flat(module)
            flat.update((id(part.parameter), part) for part in sharded.flat_parts(module))
    for each in named_tensors(model):
        if is_lazy(each.tensor):
            raise ValueError(
                f"{each.name} has no shape yet; run a batch through the model before it is saved or loaded"
            )
        part = flat.get(id(each.tensor))
        if part is None:
            yield _Placed(each, box_of(each.name, each.tensor), False)
        else:
            yield _Placed(each, _flat_box(each, part), part.is_cut)


def _held_at(placed: _Placed) -> LocalShard:
    each = placed.named
    return held(each.name, each.tensor, placed.box, each.kind, each.is_alias_of)


def _parameter_at(placed: _Placed) -> OptimizedParameter:
    return OptimizedParameter(placed.named.name, placed.named.tensor, placed.box, placed.is_range)


def _flat_box(each: NamedTensor, part: FlatPart) -> Box:
    if part.fault is not None:
        raise ValueError(f"{each.name} {part.fault}")
    box = Box.flat(part.shape, part.start, part.end) if part.start < part.end else Box.empty(part.shape)
    if box.num_elements != each.tensor.numel():
        raise ElasticError(
            f"FSDP1 says that this rank has {box} of {each.name}, and the parameter holds {each.tensor.numel()}; save "
            "and load between two steps, outside of summon_full_params"
        )
    return box


def _fault(tensor: torch.Tensor) -> str | None:
    """Why the memory of a local tensor is not simply its elements; None where it is."""
    if tensor.device.type == "meta":
        return "is on the meta device, where there is nothing to save or to load into; call to_empty() first"
    if tensor.layout != torch.strided:
        return f"has layout {tensor.layout}; allowed: torch.strided, as to_dense() gives"
    if hasattr(tensor, "__tensor_flatten__"):
        return f"is a {type(tensor).__name__}, made of other tensors; allowed: plain tensors and DTensors of them"
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return "was expanded, so that several elements share memory; allowed: elements of their own, as clone() gives"
    if tensor.is_conj() or tensor.is_neg():
        return "is a view that conjugates or negates; allowed: what resolve_conj() and resolve_neg() give"
    return None


# --- parameters in the groups that optimizers have them in, and which of them a state's name belongs to --------------


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A parameter with the optimizer that trains it, and the group in which it is."""

    parameter: OptimizedParameter
    optimizer: Optimizer
    group: dict[str, Any]

    @property
    def state(self) -> dict[Any, Any]:
        found: dict[Any, Any] = self.optimizer.state[self.parameter.tensor]
        return found


def trained_by(optimizers: Sequence[Optimizer], parameters: Iterable[OptimizedParameter]) -> dict[int, Trained]:
    """Every parameter in a group, by the identity of its tensor."""
    known = {id(parameter.tensor): parameter for parameter in parameters}
    found: dict[int, Trained] = {}
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for tensor in group["params"]:
                parameter = known.get(id(tensor))
                if parameter is None:
                    raise ValueError(
                        f"group {number} of {type(optimizer).__name__} has a parameter of shape {tuple(tensor.shape)} "
                        "that is not one of the model's; make the optimizer once the model is wrapped"
                    )
                if id(tensor) in found and found[id(tensor)].optimizer is not optimizer:
                    raise ValueError(f"{parameter.name} is in two optimizers; allowed: each parameter in one of them")
                found[id(tensor)] = Trained(parameter, optimizer, group)
    return found


def by_name_of(trained: Mapping[int, Trained]) -> dict[str, Trained]:
    """Trained parameters by the parameters' own names."""
    return {each.parameter.name: each for each in trained.values()}


def place_of(name: str, by_name: Mapping[str, Trained]) -> tuple[Trained, str] | None:
    """The parameter and the key that a state's name is made of; names may have a slash in them, so the longest fits."""
    cut = len(name)
    while (cut := name.rfind("/", 0, cut)) >= 0:
        if name[:cut] in by_name:
            return by_name[name[:cut]], name[cut + 1 :]
    return None


def put_in(current: object, new: object) -> object:
    """The value to put in place of ``current``: a tensor stays the tensor that it is, and gets the new number."""
    if isinstance(current, torch.Tensor) and isinstance(new, (bool, int, float, complex)):
        with torch.no_grad():
            current.fill_(new)
        return current
    if isinstance(current, (tuple, list)) and isinstance(new, (tuple, list)) and len(current) == len(new):
        return type(new)(put_in(mine, its) for mine, its in zip(current, new, strict=True))
    return new
