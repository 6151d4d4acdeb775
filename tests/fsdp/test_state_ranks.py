"""State of models that are spread over ranks: put together by its boxes it is the plain model's, and what is written
into it is what the model then trains with. Every way to spread a model, each with optimizers that keep state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Muon, Optimizer

from elastic_ext.fsdp.layout import Box, Layout
from elastic_ext.fsdp.optimizers import held_of_optimizers, make_missing, put_groups, put_values
from elastic_ext.fsdp.state import Kind, LocalShard, box_of, held_of_model
from elastic_ext.fsdp.value_encoding import Plain
from tests.support.ranks import RankPool
from tests.support.sharded import WAYS, values_of
from tests.support.training import bits_of, make_data, make_model

NUM_STEPS = 3


class Odd(nn.Module):
    """Weights that are tied, frozen, uneven, of one element, and of a single row, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(6, 11)
        self.norm = nn.BatchNorm1d(11)
        self.wide = nn.Linear(11, 6)
        self.row = nn.Parameter(torch.randn(1, 6))
        self.one = nn.Parameter(torch.randn(1))
        self.frozen = nn.Parameter(torch.randn(3, 6), requires_grad=False)
        self.again = nn.Linear(6, 11)
        self.again.weight = self.embed.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.wide(torch.tanh(self.norm(self.embed(inputs)))) * self.one + self.row
        result: torch.Tensor = torch.tanh(self.again(torch.tanh(hidden @ self.frozen.T @ self.frozen)))
        return result


Wrap = Callable[[Any], nn.Module]


@dataclass(frozen=True, slots=True)
class Spread:
    """A way to spread a model, and the model that it can be done with."""

    num_ranks: int
    wrap: Wrap
    make: Callable[[], nn.Module] = Odd


def _shard_columns(model: Any) -> nn.Module:
    """fully_shard along the second dimension where it can be, so that what lies on a rank is no run."""

    def where(parameter: nn.Parameter) -> Shard:
        return Shard(1) if parameter.dim() > 1 and parameter.shape[1] % 2 == 0 else Shard(0)

    sharded: nn.Module = fully_shard(model, mesh=init_device_mesh("cpu", (2,)), shard_placement_fn=where)
    return sharded


def _tensor_and_fully_of_all(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    sharded: nn.Module = fully_shard(model, mesh=mesh["data"])
    return sharded


def _compiled(model: Any) -> nn.Module:
    compiled: Any = torch.compile(DistributedDataParallel(model), backend="eager")
    whole: nn.Module = compiled
    return whole


def _flat(strategy: ShardingStrategy) -> Wrap:
    def wrap(model: Any) -> nn.Module:
        model.wide = FullyShardedDataParallel(
            model.wide, use_orig_params=True, sharding_strategy=strategy, device_id=torch.device("cpu")
        )
        return FullyShardedDataParallel(
            model, use_orig_params=True, sharding_strategy=strategy, device_id=torch.device("cpu")
        )

    return wrap


def _flat_hybrid(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return FullyShardedDataParallel(
        model,
        use_orig_params=True,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=mesh,
        device_id=torch.device("cpu"),
    )


def _plain_make() -> nn.Module:
    return make_model(torch.float64)


def _fully(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.wide, mesh=mesh)
    sharded: nn.Module = fully_shard(model, mesh=mesh)
    return sharded


def _hybrid(model: Any) -> nn.Module:
    sharded: nn.Module = fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return sharded


SPREAD: Mapping[str, Spread] = {
    **{name: Spread(way.num_ranks, way.wrap, _plain_make) for name, way in WAYS.items()},
    "fully_shard of odd shapes": Spread(4, _fully),
    "hybrid of odd shapes": Spread(4, _hybrid),
    "fully_shard by columns": Spread(2, _shard_columns),
    "all in tensor and fully_shard": Spread(4, _tensor_and_fully_of_all, _plain_make),
    "compiled DDP": Spread(2, _compiled),
    "FSDP1 of odd shapes": Spread(3, _flat(ShardingStrategy.FULL_SHARD)),
    "FSDP1 that keeps what it gathers": Spread(2, _flat(ShardingStrategy.SHARD_GRAD_OP)),
    "FSDP1, hybrid": Spread(4, _flat_hybrid),
    "FSDP1 without sharding": Spread(2, _flat(ShardingStrategy.NO_SHARD)),
}

OPTIMIZERS: Mapping[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: AdamW(model.parameters(), lr=1e-2, amsgrad=True),
}


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor on its way between processes: what a rank has of it, or the whole."""

    name: str
    tensor: torch.Tensor
    box: Box
    dtype: str
    kind: Kind
    is_alias_of: str | None

    @property
    def layout(self) -> Layout:
        return Layout(self.box.shape, (self.box,))


@dataclass(frozen=True, slots=True)
class State:
    """A model and its optimizer, put down."""

    model: list[Saved]
    optimizer: list[Saved]
    values: dict[str, Plain]
    groups: list[Plain]


# --- on the ranks ---------------------------------------------------------------------------------------------------


def one_step(model: nn.Module, optimizer: Optimizer, index: int) -> None:
    inputs, targets = make_data(8 * (index + 1))
    loss = nn.functional.cross_entropy(model(inputs[-8:]), targets[-8:])
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def copied(held: Sequence[LocalShard]) -> list[Saved]:
    return [
        Saved(one.name, one.tensor.reshape(-1).clone(), one.box, one.dtype, one.kind, one.is_alias_of) for one in held
    ]


def put_down(model: nn.Module, optimizer: Optimizer, rank: int) -> State:
    found = held_of_optimizers([optimizer], held_of_model(model).parameters, rank=rank)
    return State(copied(held_of_model(model).tensors), copied(found.tensors), found.values, found.groups)


def take_up(model: nn.Module, optimizer: Optimizer, rank: int, whole: State) -> None:
    parameters = held_of_model(model).parameters
    assert make_missing([optimizer], parameters, {one.name: one for one in whole.optimizer}, rank=rank) == []
    put_groups([optimizer], parameters, whole.groups)
    put_values([optimizer], parameters, whole.values, {})
    by_name = {one.name: one for one in whole.model + whole.optimizer}
    for one in held_of_model(model).tensors + held_of_optimizers([optimizer], parameters, rank=rank).tensors:
        part = by_name[one.name].tensor[places(one.box)]
        one.tensor.copy_(part.view(one.tensor.shape))


def train_and_resume(rank: int, name: str, optimizer_name: str, whole: State) -> tuple[State, State, State]:
    """What a spread training comes to; a fresh one that took up the whole state; and that one after one more step."""
    spread, make_optimizer = SPREAD[name], OPTIMIZERS[optimizer_name]
    model = spread.wrap(spread.make().double())
    optimizer = make_optimizer(model)
    for index in range(NUM_STEPS):
        one_step(model, optimizer, index)
    evaluate(model)
    trained = put_down(model, optimizer, rank)
    evaluate(model)
    assert agrees_with_full_values(model, trained)

    model = spread.wrap(spread.make().double())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    optimizer = make_optimizer(model)
    evaluate(model)
    take_up(model, optimizer, rank, whole)
    evaluate(model)
    resumed = put_down(model, optimizer, rank)
    one_step(model, optimizer, NUM_STEPS)
    return trained, resumed, put_down(model, optimizer, rank)


def evaluate(model: nn.Module) -> None:
    """A pass without one backwards, after which some ways keep parameters gathered."""
    model.eval()
    with torch.no_grad():
        model(make_data(4)[0])
    model.train()


def agrees_with_full_values(model: nn.Module, trained: State) -> bool:
    name_of = {id(one.tensor): one.name for one in held_of_model(model).parameters}
    names = [name_of[id(parameter)] for parameter in model.parameters()]
    mine = {one.name: one for one in trained.model}
    for name, full in zip(names, values_of(getattr(model, "_orig_mod", model)), strict=True):
        assert torch.equal(mine[name].tensor, full.reshape(-1)[places(mine[name].box)]), name
    return True


def places(box: Box) -> torch.Tensor:
    """Where the elements of a box are in the flattened tensor, in its order."""
    numbers = torch.arange(Box.whole(box.shape).num_elements)
    if box.is_flat:
        return numbers[box.start[0] : box.end[0]]
    return numbers.view(box.shape)[tuple(slice(*ends) for ends in zip(box.start, box.end, strict=True))].reshape(-1)


# --- in the tests' process ------------------------------------------------------------------------------------------


def plain_states(name: str, optimizer_name: str) -> tuple[State, State]:
    """The plain training's state, and the same one step later."""
    model = SPREAD[name].make().double()
    optimizer = OPTIMIZERS[optimizer_name](model)
    for index in range(NUM_STEPS):
        one_step(model, optimizer, index)
    evaluate(model)
    before = put_down(model, optimizer, 0)
    one_step(model, optimizer, NUM_STEPS)
    return before, put_down(model, optimizer, 0)


def put_together(states: Sequence[State]) -> dict[str, Saved]:
    """The whole tensors of several ranks' states; what ranks both have must be the same."""
    names = {one.name: one for state in states for one in state.model + state.optimizer}
    found = {}
    for name, first in names.items():
        parts = [one for state in states for one in state.model + state.optimizer if one.name == name]
        assert {(one.dtype, one.kind, one.is_alias_of, one.box.shape) for one in parts} == {
            (first.dtype, first.kind, first.is_alias_of, first.box.shape)
        }
        assert Layout(first.box.shape, tuple(one.box for one in parts)).fault(replicas=True) is None, name
        whole = torch.zeros(Box.whole(first.box.shape).num_elements, dtype=first.tensor.dtype)
        for one in parts:
            whole[places(one.box)] = one.tensor
        for one in parts:
            assert torch.equal(whole[places(one.box)], one.tensor), f"replicas of {name} differ"
        found[name] = replace(first, tensor=whole, box=Box.whole(first.box.shape))
    return found


def alike(found: Mapping[str, Saved], expected: Mapping[str, Saved]) -> bool:
    assert set(found) == set(expected)
    for name, one in found.items():
        other = expected[name]
        assert replace(one, tensor=other.tensor) == other
        torch.testing.assert_close(one.tensor, other.tensor, rtol=1e-9, atol=1e-12, msg=name)
    return True


CONTAINED = (
    "fully_shard",
    "fully_shard, kept after forward",
    "fully_shard, offloaded",
    "fully_shard of blocks alone",
    "hybrid",
    "tensor and fully_shard",
    "FSDP1",
)
"""Of which nothing lies otherwise than in another: one of odd shapes, of all parameters, or one that keeps what it
gathers."""


def cases() -> Iterator[Any]:
    for index, name in enumerate(SPREAD):
        marks = [pytest.mark.slow] if name in CONTAINED else []
        yield pytest.param(name, ("adamw", "sgd")[index % 2], id=name, marks=marks)
    for name in ("fully_shard of odd shapes", "FSDP1 of odd shapes"):
        yield pytest.param(name, "sgd", id=f"{name}, sgd", marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "optimizer_name"), list(cases()))
def test_spread_state_is_the_plain_one_cut_up_and_takes_the_plain_one_in(
    ranks: RankPool, name: str, optimizer_name: str
) -> None:
    before, after = plain_states(name, optimizer_name)
    per_rank = ranks.run(SPREAD[name].num_ranks, train_and_resume, name, optimizer_name, before)
    trained, resumed, later = (put_together(states) for states in zip(*per_rank, strict=True))
    plain = put_together([before])
    assert alike(trained, plain)
    assert bits_of({key: one.tensor for key, one in sorted(resumed.items())}) == bits_of(
        {key: one.tensor for key, one in sorted(plain.items())}
    )
    assert alike(later, put_together([after]))
    assert all(state.groups == before.groups for states in per_rank for state in states)


# --- placements and wrappers of their own ---------------------------------------------------------------------------


class RowMeans(Optimizer):
    """Keeps a mean per row, of the shape (rows, 1), and the largest gradient of what lies on this rank."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for part in group["params"]:
                state = self.state[part]
                state.setdefault("rows", part.new_zeros((part.shape[0], 1))).add_(1)
                assert isinstance(part.grad, DTensor)
                state["largest"] = part.grad.to_local().abs().amax(dim=1)


def step_with_state_of_its_own_shape(rank: int) -> tuple[list[Saved], list[Saved], list[str]]:
    model: Any = fully_shard(nn.Linear(6, 7), mesh=init_device_mesh("cpu", (2,)))
    optimizer = RowMeans([model.weight], lr=0.1)
    model(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    parameters = held_of_model(model).parameters
    found = copied(held_of_optimizers([optimizer], parameters, rank=rank).tensors)
    fresh = RowMeans([model.weight], lr=0.1)
    left = make_missing([fresh], parameters, {one.name: one for one in found}, rank=rank)
    left += make_missing([fresh], parameters, {f"weight/largest@{1 - rank}": found[1]}, rank=rank)
    return found, copied(held_of_optimizers([fresh], parameters, rank=rank).tensors), left


def test_state_of_its_own_shape_is_whole_and_state_of_one_rank_alone_bears_its_number(ranks: RankPool) -> None:
    for rank, (found, made, left) in enumerate(ranks.run(2, step_with_state_of_its_own_shape)):
        described = [(one.name, one.kind, one.box) for one in found]
        assert described == [
            ("weight/rows", "own", Box.whole((7, 1))),
            (f"weight/largest@{rank}", "opaque", Box.whole((4 - rank,))),
        ]
        assert [(one.name, one.kind, one.box) for one in made] == described
        assert left == []


def muon_by_fully_shard(rank: int) -> tuple[list[Saved], list[Saved]]:
    model: Any = fully_shard(nn.Linear(6, 7, bias=False), mesh=init_device_mesh("cpu", (2,)))
    optimizer: Optimizer = Muon(model.parameters(), lr=0.1)
    model(torch.ones(3, 6)).sum().backward()
    optimizer.step()
    parameters = held_of_model(model).parameters
    found = copied(held_of_optimizers([optimizer], parameters, rank=rank).tensors)
    fresh = Muon(model.parameters(), lr=0.1)
    make_missing([fresh], parameters, {one.name: one for one in found}, rank=rank)
    return found, copied(held_of_optimizers([fresh], parameters, rank=rank).tensors)


def test_state_of_muon_lies_as_its_parameter(ranks: RankPool) -> None:
    for rank, (found, made) in enumerate(ranks.run(2, muon_by_fully_shard)):
        box = Box.block((7, 6), (4 * rank, 0), (4 + 3 * rank, 6))
        assert [(one.name, one.kind, one.box) for one in found] == [("weight/momentum_buffer", "like", box)]
        assert [(one.name, one.kind, one.box) for one in made] == [("weight/momentum_buffer", "like", box)]


def boxes_of_placements(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    half = DeviceMesh("cpu", [0, 1])
    whole = torch.arange(35).view(7, 5)
    faults = []
    across: list[Sequence[Placement]] = [[Replicate(), Shard(-1)], [Shard(1), Replicate()], [Replicate(), Replicate()]]
    in_two: Any = _StridedShard(0, split_factor=2)
    for placements in [[Shard(first), Shard(second)] for first in (0, 1) for second in (0, 1)] + across:
        tensor = distribute_tensor(whole, mesh, placements)
        box = box_of("it", tensor)
        if not torch.equal(tensor.to_local().reshape(-1), places(box)):
            faults.append(f"{placements}: {box}")
    if box_of("it", distribute_tensor(whole, half, [Shard(0)])).is_empty != (rank >= 2):
        faults.append("ranks outside of the mesh")
    for placements, words in (([Partial(), Shard(0)], "redistribute"), ([in_two, Replicate()], "several blocks")):
        try:
            box_of("it", DTensor.from_local(whole, mesh, placements, run_check=False))
        except ValueError as error:
            if words not in str(error):
                faults.append(str(error))
        else:
            faults.append(str(placements))
    return faults


def test_boxes_are_where_placements_put_elements(ranks: RankPool) -> None:
    assert ranks.run(4, boxes_of_placements) == [[], [], [], []]


def uneven_in_both(rank: int) -> list[float]:
    """Rows of one's own of a weight of 7, cut in 2 by tensor parallelism and each part in 3 by fully_shard."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("data", "tensor"))
    model: Any = nn.Sequential(nn.Linear(1, 7, bias=False))
    model[0].weight.data = torch.arange(7.0).view(7, 1)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    (one,) = held_of_model(model).tensors
    assert torch.equal(one.tensor.view(-1), places(one.box).float())
    return [float(value) for value in one.tensor.view(-1)]


def test_uneven_parts_of_uneven_parts_are_where_they_were_put(ranks: RankPool) -> None:
    assert ranks.run(6, uneven_in_both) == [[0, 1], [4], [2, 3], [5], [], [6]]


def channels_last() -> nn.Module:
    model: Any = nn.Conv2d(4, 4, 2)
    moved: nn.Module = model.to(memory_format=torch.channels_last)
    return moved


def refusals_of_flat(rank: int) -> list[str]:
    told = []
    for model, orig in ((nn.Linear(4, 4), False), (channels_last(), True)):
        whole: Any = model
        flat = FullyShardedDataParallel(whole, use_orig_params=orig, device_id=torch.device("cpu"))
        try:
            held_of_model(flat)
        except ValueError as error:
            told.append(str(error))
    return told


def test_flat_parameters_without_names_or_in_another_order_are_refused_with_the_reason(ranks: RankPool) -> None:
    for without_names, in_another_order in ranks.run(2, refusals_of_flat):
        assert "give use_orig_params=True" in without_names
        assert in_another_order.startswith("weight was not contiguous when FSDP1 flattened it")
