"""A model of all that a checkpoint has to hold, spread over ranks in every way, and what is whole of it: for tests.

What a rank is to have is told by torch's own means (``full_tensor``, ``summon_full_params``), never by the library.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

__all__ = ["SPREADS", "Everything", "Spread", "any_bits", "differences", "overwrite", "train", "whole_state"]

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


class Everything(nn.Module):
    """Weights that are tied, frozen, uneven, empty, of one element, of three dimensions and of none; and buffers."""

    frozen: torch.Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 7)
        self.norm = nn.BatchNorm1d(7)
        self.out = nn.Linear(7, 5)
        self.again = nn.Linear(7, 5)
        self.again.weight = self.out.weight
        self.mix = nn.Parameter(torch.randn(3, 2, 5))
        self.row = nn.Parameter(torch.randn(1, 5))
        self.one = nn.Parameter(torch.randn(1))
        self.none = nn.Parameter(torch.randn(0, 5), requires_grad=False)  # or fully_shard would not train it
        self.number = nn.Parameter(torch.randn(()))
        self.frozen = nn.Parameter(any_bits((3, 5), torch.float32, seed), requires_grad=False)
        for dtype in (torch.float16, torch.float64, torch.int32):
            self.register_buffer(f"a {dtype} é".replace("torch.", ""), any_bits((2, 3), dtype, seed))
        self.register_buffer("passing", torch.full((2,), float(seed)), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.down(torch.tanh(self.up(inputs)))))
        mixed = (self.out(hidden) * self.again(hidden))[:, None, None] * self.mix
        result: torch.Tensor = mixed.sum(dim=(1, 2)) * self.one * self.number + self.row + self.none.sum()
        return result


def any_bits(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Elements of whatever bits, so that floats are not all numbers."""
    draw = torch.Generator().manual_seed(seed)
    item_bytes = torch.empty((), dtype=dtype).element_size()
    if dtype == torch.bool:
        return torch.randint(2, tuple(shape), generator=draw).bool()
    flat = torch.randint(256, (torch.Size(shape).numel() * item_bytes,), generator=draw, dtype=torch.uint8)
    return flat.view(dtype).view(tuple(shape))


# --- ways to spread it ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spread:
    """A way to spread the model over so many ranks."""

    num_ranks: int
    wrap: Callable[[Everything], nn.Module]


def _mesh(*shape: int) -> Any:
    # No mesh is called like one of an earlier run: torch takes equal ones for the same, and its groups are gone.
    now = time.monotonic_ns()
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"{dim} at {now}" for dim in range(len(shape))))


def _fully(model: Everything, mesh: Any = None, **options: Any) -> nn.Module:
    mesh = _mesh(dist.get_world_size()) if mesh is None else mesh
    fully_shard(model.up, mesh=mesh, **options)
    return _root(model, mesh, **options)


def _root(model: Any, mesh: Any, **options: Any) -> nn.Module:
    sharded: nn.Module = fully_shard(model, mesh=mesh, ignored_params={model.number}, **options)  # of no dimension
    return sharded


def _by_columns(model: Everything) -> nn.Module:
    def where(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.dim() > 1 and parameter.shape[1] % 2 == 0 else None

    return _fully(model, shard_placement_fn=where)


_PLAN: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def _tensor(model: Everything) -> nn.Module:
    return parallelize_module(model, _mesh(dist.get_world_size()), _PLAN)


def _tensor_and_fully(model: Everything) -> nn.Module:
    mesh = _mesh(2, 2)
    outer, inner = mesh.mesh_dim_names
    parallelize_module(model, mesh[inner], _PLAN)
    return _fully(model, mesh[outer])


def _flat(strategy: ShardingStrategy) -> Callable[[Everything], nn.Module]:
    def wrap(model: Any) -> nn.Module:
        options: dict[str, Any] = {"sharding_strategy": strategy, "device_id": torch.device("cpu")}
        if strategy == ShardingStrategy.HYBRID_SHARD:
            options["device_mesh"] = _mesh(2, 2)
        model.up = FullyShardedDataParallel(model.up, use_orig_params=True, **options)
        return FullyShardedDataParallel(model, use_orig_params=True, ignored_states=[model.number], **options)

    return wrap


def _replicated(model: Any) -> nn.Module:
    return DistributedDataParallel(model)


SPREADS: Mapping[str, Spread] = {
    "plain": Spread(1, lambda model: model),
    "DDP 2": Spread(2, _replicated),
    "FSDP2 2": Spread(2, _fully),
    "FSDP2 3": Spread(3, _fully),
    "FSDP2 4": Spread(4, _fully),
    "FSDP2 2 by columns": Spread(2, _by_columns),
    "HSDP 2x2": Spread(4, lambda model: _fully(model, _mesh(2, 2))),
    "TP 2": Spread(2, _tensor),
    "TP x FSDP 2x2": Spread(4, _tensor_and_fully),
    "FSDP1 2": Spread(2, _flat(ShardingStrategy.FULL_SHARD)),
    "FSDP1 3": Spread(3, _flat(ShardingStrategy.FULL_SHARD)),
    "FSDP1 2x2": Spread(4, _flat(ShardingStrategy.HYBRID_SHARD)),
}


# --- what is done with it on the ranks ------------------------------------------------------------------------------


def train(model: nn.Module, optimizers: Sequence[Optimizer], num_steps: int, *, first: int = 0) -> None:
    """Steps on data that is the same on every rank, and another at every step."""
    for step in range(first, first + num_steps):
        draw = torch.Generator().manual_seed(step)
        model(torch.randn(8, 6, generator=draw)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@torch.no_grad()
def overwrite(model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
    """Make everything another value than what was trained."""
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    kept = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    for tensor in [*model.parameters(), *model.buffers(), *kept]:
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(77)


def whole_state(model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> dict[str, Any]:
    """Every tensor of the model and its optimizers, whole, and other state, by names; all ranks call this."""
    with _summoned(model), torch.no_grad():
        found: dict[str, Any] = {name: _whole(tensor) for name, tensor in _parameters(model)}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if not name.endswith("passing"):
            found[_bare(name)] = _whole(buffer)
    for number, optimizer in enumerate(optimizers):
        found[f"groups {number}"] = [_values_of(group) for group in optimizer.param_groups]
    states = {key: state for optimizer in optimizers for key, state in optimizer.state.items()}
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return {**found, **_flat_states(model, states)}
    for name, parameter in _tied_once(model).items():
        found.update((f"{name}/{key}", _whole(value)) for key, value in states.get(parameter, {}).items())
    return found


def differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """What is not the same, bit for bit."""
    told = [f"{name} is in one of them alone" for name in sorted(found.keys() ^ expected.keys())]
    for name in sorted(found.keys() & expected.keys()):
        mine, other = found[name], expected[name]
        if not isinstance(mine, torch.Tensor) or not isinstance(other, torch.Tensor):
            if type(mine) is not type(other) or mine != other:
                told.append(f"{name} is {mine}, expected {other}")
        elif (mine.shape, mine.dtype) != (other.shape, other.dtype):
            told.append(f"{name} is {mine.dtype} {mine.shape}, expected {other.dtype} {other.shape}")
        elif not torch.equal(_bytes_of(mine), _bytes_of(other)):
            told.append(f"{name} is {mine}, expected {other}")
    return told


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _bare(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")  # of DDP; no model here calls a part of itself so


def _parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(_bare(name), parameter) for name, parameter in model.named_parameters(remove_duplicate=False)]


def _tied_once(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by the name that comes first in the alphabet."""
    names = {id(parameter): name for name, parameter in sorted(_parameters(model), key=lambda named: named[0], reverse=True)}
    return {name: parameter for name, parameter in _parameters(model) if names[id(parameter)] == name}


def _summoned(model: nn.Module) -> AbstractContextManager[Any]:
    is_flat = isinstance(model, FullyShardedDataParallel)
    return FullyShardedDataParallel.summon_full_params(model, writeback=False) if is_flat else nullcontext()


def _values_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "foreach", "fused")}


@torch.no_grad()
def _flat_states(model: nn.Module, states: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
    """State of FSDP1's parameters, made whole as parameters are: it is put in their place for a moment."""
    parameters = _tied_once(model)
    mine = {
        f"{name}/{key}": value
        for name, parameter in parameters.items()
        if parameter.numel()
        for key, value in states.get(parameter, {}).items()
    }
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, {name: value.dim() == 0 and value for name, value in mine.items()})
    everywhere = {name: value for of_rank in of_ranks for name, value in of_rank.items()}
    found = {name: value for name, value in everywhere.items() if isinstance(value, torch.Tensor)}
    kept = {name: parameter.clone() for name, parameter in parameters.items()}
    for key in sorted({name.rpartition("/")[2] for name in everywhere.keys() - found.keys()}):
        for name, parameter in parameters.items():
            parameter.copy_(mine.get(f"{name}/{key}", torch.zeros(())))
        with _summoned(model):
            whole = {f"{name}/{key}": _whole(parameter) for name, parameter in _parameters(model)}
        found.update((name, tensor) for name, tensor in whole.items() if name in everywhere)
    for name, parameter in parameters.items():
        parameter.copy_(kept[name])
    return found
