"""Models that may be changed, though something of them is like what may not: no false refusal, and no crash."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.fsdp.reshard.sharded_model import Spread
from tests.support.ranks import RankPool
from tests.support.resharding import FULL, HYBRID, KEPT, WHOLE, agreeing, all_of_it, change, make, take_step


class Masked(nn.Module):
    """Both blocks see one table, by views of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        table = torch.ones(1, 7)
        for number, block in enumerate(self.blocks):
            block.register_buffer("table", table.view(7) if number else table[:1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * block.table
        return x


def _flat() -> nn.Module:
    """Parameters that are parts of one vector, apart from each other."""
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
    vector_to_parameters(parameters_to_vector(model.parameters()), model.parameters())
    return model


MODELS: dict[str, Any] = {
    "views of one table": Masked,
    "parts of one vector": _flat,
    "one row": lambda: nn.Linear(7, 1),
}


def _goes_round(rank: int, name: str, plans: list[ParallelPlan]) -> None:
    model = MODELS[name]()
    spread, optimizer = make(plans[0], model=model)
    take_step(spread, optimizer, 0)
    before = all_of_it(model, optimizer)
    for plan in [*plans[1:], plans[0]]:
        change(spread, plan, optimizer)
        after = all_of_it(model, optimizer)
        assert all(torch.equal(before[key], after[key]) for key in before)
    take_step(spread, optimizer, 1)
    spread.close()


@pytest.mark.parametrize("name", MODELS)
def test_it_goes_through_plans_and_keeps_every_value(ranks: RankPool, name: str) -> None:
    ranks.run(4, _goes_round, name, [FULL, HYBRID, WHOLE, KEPT])


def _left_out(rank: int) -> None:
    model: Any = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
    model.register_parameter("scale", nn.Parameter(torch.ones(()), requires_grad=False))
    for part in (model[0], model):
        fully_shard(part, ignored_params={model.scale})
    spread = Spread(model, num_local=2)
    optimizer = torch.optim.AdamW([part for part in model.parameters() if part.requires_grad])
    take_step(spread, optimizer, 0)
    scale = model.scale
    change(spread, KEPT, optimizer)
    take_step(spread, optimizer, 1)
    assert model.scale is scale
    spread.close()


def test_what_fully_shard_leaves_alone_may_be_of_any_shape(ranks: RankPool) -> None:
    ranks.run(2, _left_out)


def _groups(rank: int) -> None:
    """Lists from which groups were made have the model's parameters after each change."""
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
    spread = make(WHOLE, model=model)[0]
    gc.collect()  # the optimizer that was made with it, and refers to the parameters
    decay = [part for part in model.parameters() if part.ndim > 1]
    rest = [part for part in model.parameters() if part.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])
    for number, plan in enumerate([FULL, KEPT, WHOLE, FULL]):
        take_step(spread, optimizer, number)
        before = all_of_it(model, optimizer)
        change(spread, plan, optimizer)
        after = all_of_it(model, optimizer)
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert [id(part) for part in decay] == [id(layer.weight) for layer in (model[0], model[1])]
        assert [id(part) for part in rest] == [id(layer.bias) for layer in (model[0], model[1])]
    take_step(spread, optimizer, 9)
    spread.close()


def test_lists_from_which_an_optimizers_groups_were_made_keep_nothing_from_changing(ranks: RankPool) -> None:
    ranks.run(2, _groups)


def _registered(rank: int) -> None:
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
    spread, optimizer = make(WHOLE, model=model)
    take_step(spread, optimizer, 0)
    made, _ = spread.transition(FULL, [optimizer])
    assert made is not None
    for shared in ({name: part.detach() for name, part in model.named_parameters()}, model.state_dict()):
        with pytest.raises(ValueError, match=r"share memory|state_dict"):
            spread.prepare(FULL, [optimizer], [shared], [])
    average = copy.deepcopy(model.state_dict())
    kept = {name: tensor.clone() for name, tensor in average.items()}
    spread.change(made, spread.prepare(FULL, [optimizer], [average], []), agreeing)
    change(spread, WHOLE, optimizer, registered=[average])
    assert all(torch.equal(average[name], kept[name]) for name in kept)
    spread.close()


def test_a_copy_of_a_state_dict_moves_and_the_memory_of_parameters_does_not(ranks: RankPool) -> None:
    ranks.run(2, _registered)
