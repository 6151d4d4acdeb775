"""What cannot be changed is refused with the reason, before anything is touched, and stays as it is."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.fsdp.reshard.sharded_model import Spread
from tests.support.ranks import RankPool
from tests.support.resharding import FULL, GRAD_OP, KEPT, PLANS, WHOLE, Net, all_of_it, change, make, take_step


def _only(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not hasattr(FSDPModule, name), reason=f"this torch has no {name}()")


def _refused(rank: int, why: str, said: str) -> None:
    if why == "a machine's ranks":
        spread, optimizer = make(FULL)
        spread._num_local = 3
        plan = ParallelPlan(strategy="hybrid_shard")
    elif why == "no dimension":
        plain: Any = Net()
        plain.register_parameter("number", nn.Parameter(torch.ones(())))
        spread, optimizer = make(WHOLE, model=plain)
        plan = FULL
    elif why == "tied across units":
        plain = Net()
        plain.blocks[0].tied = plain.embed.weight
        spread, optimizer = make(WHOLE, model=plain)
        plan = FULL
    else:
        spread, optimizer = make(FULL if why != "a hook" else WHOLE)
        plan = KEPT
    model: Any = spread.model
    if why not in ("no gradients shared", "no dimension"):
        take_step(spread, optimizer, 0)
    held = []
    if why == "a stranger":
        held.append(model.embed.weight)
        plan = WHOLE
    elif why == "a hook":
        model.embed.weight.register_hook(lambda gradient: gradient)
        plan = FULL
    elif why == "no gradients shared":
        model.set_requires_gradient_sync(False)
        model(torch.ones(2, 7)).sum().backward()
        model.set_requires_gradient_sync(True)
    elif why == "shared by some":
        change(spread, KEPT, optimizer)
        model.set_requires_all_reduce(False)
        model(torch.ones(2, 7)).sum().backward()
        model.set_requires_all_reduce(True)
        plan = FULL
    elif why == "own communication":
        model.set_all_reduce_hook(lambda tensor: None)
    elif why == "own group":
        model.set_separate_reduce_scatter_group()
    elif why == "state of its own":
        optimizer.state[model.embed.weight]["rows"] = torch.ones(5)
    elif why == "a method":
        from torch.distributed.fsdp import register_fsdp_forward_method

        register_fsdp_forward_method(model.blocks[0], "extra_repr")
        plan = WHOLE
    before = all_of_it(model, optimizer)
    objects = list(map(id, model.parameters()))
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        change(spread, plan, optimizer)
    advice = {"a stranger": 'or choose the strategy "hybrid_shard"', "a hook": "at its next start, with trainer.paral"}
    assert advice.get(why, "") in str(refused.value)
    assert objects == list(map(id, model.parameters()))
    after = all_of_it(model, optimizer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    if why not in ("no gradients shared", "shared by some", "own communication", "no dimension"):
        take_step(spread, optimizer, 1)
    del held
    spread.close()


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("a machine's ranks", "3 does not divide the 2 ranks; allowed: 1, 2"),
        ("no dimension", "give it the shape (1,)"),
        ("tied across units", "are one parameter, and would lie in two units"),
        ("a stranger", "also held by a list of 1"),
        ("a hook", "has hooks"),
        ("no gradients shared", "the change waits for the next step"),
        ("shared by some", "the change waits for the next step"),
        ("own communication", "all-reduce hook of your own"),
        pytest.param(
            "own group", "a group of its own for reduce-scatter", marks=_only("set_separate_reduce_scatter_group")
        ),
        ("state of its own", "embed.weight/rows is of shape (5,)"),
        ("a method", "extra_repr was registered as a forward method"),
    ],
)
def test_what_cannot_be_changed_is_refused_with_the_reason_and_stays(ranks: RankPool, why: str, said: str) -> None:
    ranks.run(2, _refused, why, said)


# --- models that cannot be sharded, or cannot be whole --------------------------------------------------------------


class Around(nn.Module):
    """Has something beside a model."""

    def __init__(self, inner: nn.Module, **beside: Any) -> None:
        super().__init__()
        self.inner = inner
        for name, value in beside.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used = [part for name, part in self.named_parameters() if name != "table.weight"]
        if hasattr(self, "table"):
            used.append(self.table(torch.arange(3)))  # type: ignore[operator]
        unused = sum(part.float().sum() for part in used)  # or DDP would wait for gradients
        result: torch.Tensor = self.inner(x) + 0.0 * unused
        return result


class Special(nn.Parameter):
    """A user's own kind of parameter."""


def _linear_with(**given: Any) -> Any:
    made: Any = nn.Linear(7, 7)
    for name, value in given.items():
        setattr(made, name, value)
    return made


def _channels_last(module: Any) -> Any:
    return module.to(memory_format=torch.channels_last)


def _tied_by_data() -> nn.Module:
    one, other = nn.Linear(7, 7), nn.Linear(7, 7)
    other.weight = nn.Parameter(one.weight.data)
    return nn.Sequential(one, other)


def _with_a_view() -> nn.Module:
    made = nn.Linear(7, 7)
    made.register_buffer("shown", made.weight.data[:3], persistent=False)
    return made


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "t()": (
        lambda: _linear_with(weight=nn.Parameter(torch.rand(7, 7).t())),
        "weight does not lie in memory in the order of its dimensions",
    ),
    "channels_last": (
        lambda: Around(nn.Linear(7, 7), conv=_channels_last(nn.Conv2d(3, 4, 2))),
        "conv.weight does not lie in memory in the order of its dimensions",
    ),
    "nothing": (
        lambda: Around(nn.Linear(7, 7), empty=nn.Parameter(torch.ones(4, 0))),
        "empty is of shape (4, 0), which has nothing to share out",
    ),
    "sparse": (lambda: Around(nn.Linear(7, 7), table=nn.Embedding(9, 7, sparse=True)), "table has sparse gradients"),
    "two types": (
        lambda: Around(nn.Linear(7, 7), half=nn.Linear(7, 7).bfloat16()),
        "inner.weight is torch.float32 and half.weight is torch.bfloat16, and one unit would gather both",
    ),
}
SHARING: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "two parameters": (_tied_by_data, "1.weight and 0.weight share memory"),
    "a buffer": (_with_a_view, "shown and weight share memory"),
    "of a kind": (lambda: _linear_with(weight=Special(torch.ones(7, 7))), "of shape (7, 7) is a Special"),
}


def _refuse_models(rank: int) -> None:
    for name, (make_model, said) in {**MODELS, **SHARING}.items():
        torch.manual_seed(0)
        spread = make(WHOLE, model=make_model())[0]
        optimizer = SGD(spread.model.parameters(), lr=0.1)  # which takes sparse gradients
        take_step(spread, optimizer, 0)
        before, objects = all_of_it(spread.model, optimizer), list(map(id, spread.model.parameters()))
        for plan in (FULL, KEPT):
            with pytest.raises(ValueError, match=re.escape(said)):
                change(spread, plan, optimizer)
        assert objects == list(map(id, spread.model.parameters())), name
        after = all_of_it(spread.model, optimizer)
        assert all(torch.equal(before[name], after[name]) for name in before)
        take_step(spread, optimizer, 1)
        _is_the_same_on_all_ranks(spread.model)
        spread.close()
        if name in MODELS:
            model = make_model()
            kinds = {type(module) for module in model.modules()}
            with pytest.raises(ValueError, match=re.escape(said)):
                Spread(model, num_local=2).put_on(FULL)
            assert {type(module) for module in model.modules()} == kinds


def _is_the_same_on_all_ranks(model: nn.Module) -> None:
    for part in model.parameters():
        alike = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
        dist.all_gather(alike, part.detach().contiguous())
        assert all(torch.equal(alike[0], other) for other in alike)


def test_models_that_fully_shard_could_not_take_are_refused_and_go_on(ranks: RankPool) -> None:
    ranks.run(2, _refuse_models)


def _refuse_state(rank: int) -> None:
    """What is done to an optimizer, or registered, beside what is said of it."""

    def views(optimizer: Any, weight: Any) -> None:
        optimizer.state[weight]["shown"] = optimizer.state[weight]["exp_avg"].detach()

    def attribute(optimizer: Any, weight: Any) -> None:
        optimizer.slow = {"of": [weight.detach().clone()]}

    def group(optimizer: Any, weight: Any) -> None:
        optimizer.param_groups[0]["ema"] = [weight.detach().clone()]

    def registered(optimizer: Any, weight: Any) -> Any:
        return [{"blocks.0.up.weight": optimizer.state[weight]["exp_avg"].detach()}]

    cases: list[tuple[Callable[[Any, Any], Any], str]] = [
        (views, "blocks.0.up.weight/shown and blocks.0.up.weight/exp_avg share memory"),
        (attribute, "'slow' of AdamW has tensors, and only those in its state would move"),
        (group, "'ema' of AdamW has tensors, and only those in its state would move"),
        (registered, "blocks.0.up.weight (registered) and blocks.0.up.weight/exp_avg share memory"),
    ]
    for do, said in cases:
        for old, new in ((WHOLE, FULL), (FULL, KEPT), (FULL, WHOLE)):
            spread, optimizer = make(old, model=Net(num_blocks=1))
            take_step(spread, optimizer, 0)
            given = do(optimizer, spread.model.blocks[0].up.weight) or []  # type: ignore[index, union-attr]
            with pytest.raises(ValueError, match=re.escape(said)):
                change(spread, new, optimizer, registered=given)
            take_step(spread, optimizer, 1)
            spread.close()


def test_state_that_would_be_parted_or_left_behind_is_refused_and_training_goes_on(ranks: RankPool) -> None:
    ranks.run(2, _refuse_state)


# --- what users have spread -----------------------------------------------------------------------------------------


def _ignoring() -> nn.Module:
    model = Net()
    ignoring: Any = DistributedDataParallel
    ignoring._set_params_and_buffers_to_ignore_for_model(model, ["blocks.1.up.weight"])
    return DistributedDataParallel(model)


def _refuse_users(rank: int) -> None:
    cases: list[tuple[Callable[[], nn.Module], str]] = [
        (lambda: DistributedDataParallel(Net(), find_unused_parameters=True), "find_unused_parameters=True: a sharded"),
        (_ignoring, "in DDP with parameters that it ignores; its sharding has to stay"),
        (
            lambda: Around(DistributedDataParallel(Net()), beside=nn.Linear(2, 2)),
            "lie outside of the part that is in DDP",
        ),
    ]
    for make_model, said in cases:
        model = make_model()
        optimizer = AdamW([part for part in model.parameters() if part.requires_grad])
        spread = Spread(model, num_local=2)
        take_step(spread, optimizer, 0)
        for plan in (FULL, KEPT):
            with pytest.raises(ValueError, match=re.escape(said)):
                change(spread, plan, optimizer)
        take_step(spread, optimizer, 1)
        if "find_unused" in said:
            change(spread, ParallelPlan(strategy="no_shard", bucket_cap_mb=0.01), optimizer)
            assert spread.engine is not None
            assert spread.engine.find_unused_parameters
            take_step(spread, optimizer, 2)
        spread.close()


def test_ddp_that_means_something_else_keeps_its_sharding(ranks: RankPool) -> None:
    ranks.run(2, _refuse_users)


def _leave_out(rank: int) -> None:
    """Parameters that fully_shard was told to ignore are each rank's own, and DDP would share their gradients."""
    model: Any = Net()
    own = {model.blocks[1].up.weight}
    with torch.no_grad():
        model.blocks[1].up.weight.fill_(rank)
    for module in (*model.blocks, model):
        fully_shard(module, ignored_params=own)
    own.clear()
    spread = Spread(model, num_local=2)
    optimizer = AdamW([part for part in model.parameters() if part.requires_grad])
    take_step(spread, optimizer, 0)
    mine = model.blocks[1].up.weight
    for number, plan in enumerate((KEPT, GRAD_OP, FULL), 1):
        with pytest.raises(ValueError, match="1 parameters were left out of fully_shard with ignored_params"):
            change(spread, WHOLE, optimizer)
        before = all_of_it(model, optimizer)
        change(spread, plan, optimizer)
        after = all_of_it(model, optimizer)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert model.blocks[1].up.weight is mine
        take_step(spread, optimizer, number)
    assert round(float(mine.mean())) == rank
    spread.close()


def test_parameters_that_fully_shard_ignores_keep_a_model_sharded(ranks: RankPool) -> None:
    ranks.run(2, _leave_out)


def _cut_by_tensors(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def made() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 7))
        return parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})

    for plan in PLANS:
        model = made()
        with pytest.raises(ValueError, match="cut by tensor parallelism without fully_shard; its sharding has to stay"):
            Spread(model, num_local=4).put_on(plan)
        assert not any(isinstance(module, FSDPModule) for module in model.modules())
    model = fully_shard(made(), mesh=mesh["data"])
    spread, optimizer = Spread(model, num_local=4), AdamW(model.parameters())
    take_step(spread, optimizer, 0)
    for plan in PLANS:
        with pytest.raises(ValueError, match=r"tensor parallelism inside fully_shard.* restart from a checkpoint"):
            change(spread, plan, optimizer)
    take_step(spread, optimizer, 1)


def test_a_model_that_tensor_parallelism_cuts_keeps_its_sharding(ranks: RankPool) -> None:
    ranks.run(4, _cut_by_tensors)
