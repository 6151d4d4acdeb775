"""The plan that is made out of what a user has sharded by hand."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard

from elastic_ext import ParallelPlan
from elastic_ext.fsdp.reshard.sharded_model import Spread
from tests.support.ranks import RankPool


def plan_of(rank: int, after_forward: bool | None) -> ParallelPlan | None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    given: dict[str, Any] = {} if after_forward is None else {"reshard_after_forward": after_forward}
    for part in model:
        fully_shard(part, **given)
    fully_shard(model, **given)
    spread = Spread(model, num_local=2)
    spread.look()
    return spread.plan


@pytest.mark.parametrize(
    ("after_forward", "strategy"), [(None, "full_shard"), (True, "full_shard"), (False, "shard_grad_op")]
)
def test_a_part_without_parameters_says_nothing_of_the_strategy(
    ranks: RankPool, after_forward: bool | None, strategy: str
) -> None:
    for plan in ranks.run(2, plan_of, after_forward):
        assert plan is not None and plan.strategy == strategy
