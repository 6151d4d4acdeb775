"""A model of all that a checkpoint has to hold, spread over ranks in every way, and its state put together: for tests.

Which elements a rank has is not asked of the library, but seen: a model whose elements are their own numbers is spread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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

__all__ = [
    "SPREADS",
    "Everything",
    "Spread",
    "State",
    "any_bits",
    "differences",
    "overwrite",
    "places_in",
    "put_together",
    "state_here",
    "train",
]

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


@torch.no_grad()
def places_in(spread: Spread) -> dict[str, torch.Tensor]:
    """The numbers of the elements that this rank has of each parameter."""
    model = Everything(0)
    for parameter in model.parameters():
        parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape))
    return {name: _local(tensor).reshape(-1).long() for name, tensor in _parameters(spread.wrap(model)).items()}


State = dict[str, Any]
"""By names, tensors of a model and its optimizers, as (elements' numbers, elements), and other values as they are."""


def state_here(model: nn.Module, optimizers: Sequence[Optimizer], places: Mapping[str, torch.Tensor]) -> State:
    """What this rank has."""
    found: State = {name: (places[name], _copy(tensor)) for name, tensor in _parameters(model).items()}
    for name, buffer in model.named_buffers():
        if not name.endswith("passing"):
            found[_bare(name)] = _all_of(buffer)
    for number, optimizer in enumerate(optimizers):
        found[f"groups {number}"] = [_values_of(group) for group in optimizer.param_groups]
        for name, parameter in _parameters(model).items():
            if parameter not in optimizer.state or _is_elsewhere(model, parameter):
                continue
            for key, value in optimizer.state[parameter].items():
                is_like = isinstance(value, torch.Tensor) and value.shape == parameter.shape
                found[f"{name}/{key}"] = (places[name], _copy(value)) if is_like else _all_of(value)
    return found


def put_together(states: Sequence[State]) -> State:
    """The same for all ranks' states: whole tensors. What several ranks have of one has to be the same."""
    whole: State = {}
    for state in states:
        for name, value in state.items():
            if not isinstance(value, tuple):
                assert whole.setdefault(name, value) == value
                continue
            parts = [other[name] for other in states if name in other]
            places = torch.cat([places for places, _ in parts])
            elements = torch.empty(len(set(places.tolist())), dtype=value[1].dtype)
            elements[places] = torch.cat([elements for _, elements in parts])
            whole[name] = (torch.arange(len(elements)), elements)
    for state in states:
        assert differences(state, whole) == []
    return whole


def differences(here: State, whole: State) -> list[str]:
    """What is not as it is in the whole, bit for bit."""
    told = [f"{name} is in it alone" for name in sorted(here.keys() - whole.keys())]
    for name in sorted(here.keys() & whole.keys()):
        mine, expected = here[name], whole[name]
        if isinstance(mine, tuple):
            mine, expected = mine[1], expected[1][mine[0]]
            is_same = mine.dtype == expected.dtype and torch.equal(mine.view(torch.uint8), expected.view(torch.uint8))
        else:
            is_same = type(mine) is type(expected) and mine == expected
        if not is_same:
            told.append(f"{name} is {mine}, expected {expected}")
    return told


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return _local(tensor).clone(memory_format=torch.contiguous_format).reshape(-1)


def _all_of(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return (torch.arange(value.numel()), _copy(value)) if isinstance(value, torch.Tensor) else value


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Once each, by the name that comes first in the alphabet."""
    names = [(_bare(name), parameter) for name, parameter in model.named_parameters(remove_duplicate=False)]
    own = {parameter: name for name, parameter in sorted(names, key=lambda named: named[0], reverse=True)}
    return {name: parameter for parameter, name in own.items()}


def _bare(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")  # of DDP; no model here calls a part of itself so


def _is_elsewhere(model: nn.Module, parameter: nn.Parameter) -> bool:
    """FSDP1 has the optimizer pass over what a rank has nothing of."""
    return isinstance(model, FullyShardedDataParallel) and parameter.numel() == 0


def _values_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "foreach", "fused")}
