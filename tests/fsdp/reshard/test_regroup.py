"""Ranks come and leave: parameters and moments are those of before, bit for bit, and so is the step after that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_ext.fsdp.plan import ParallelPlan
from tests.support.ranks import RankPool
from tests.support.regrouping import Members, fresh_like
from tests.support.resharding import FULL, GRAD_OP, HYBRID, WHOLE, Net, all_of_it, make, take_step


def _live(rank: int, plan: ParallelPlan, worlds: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Live through worlds, with a step in each."""
    members = Members(rank, worlds)
    torch.manual_seed(0)
    spread, optimizer = make(plan, model=Net(num_blocks=1), bucket_bytes=1 << 10)
    model: Any = spread.model
    is_in, costs = rank in worlds[0], []
    if is_in:
        take_step(spread, optimizer, 0)
        take_step(spread, optimizer, 1, clears=False)
    for at in range(1, len(worlds)):
        old, new = worlds[at - 1], worlds[at]
        if rank not in old and rank not in new:
            continue
        comes = rank not in old
        if comes and is_in is False and members.come_in(at) != [each for each in new if each not in old]:
            continue
        if not comes:
            state = all_of_it(model, optimizer)
            if dist.get_rank() == 0:
                members.tell(f"state {at}", state)
        objects = list(model.parameters()), dict(optimizer.state)
        ids = list(map(id, objects[0]))
        del objects
        cost = members.change(at, spread, optimizer)
        if rank not in new:
            dist.destroy_process_group()
            assert members.num_sockets == __import__("tests.support.regrouping", fromlist=["x"]).num_sockets()
            return {"left": True, "sockets": members.left_sockets}
        is_in = True
        costs.append(cost)
        before, after = members.told(f"state {at}"), all_of_it(model, optimizer)
        assert before.keys() == after.keys(), sorted(before.keys() ^ after.keys())
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
        assert list(map(id, model.parameters())) == ids
        other, other_optimizer = fresh_like(plan, Net(num_blocks=1), before)
        losses = [take_step(each, its, 10 + at) for each, its in ((spread, optimizer), (other, other_optimizer))]
        assert losses[0] == losses[1]
        one, two = all_of_it(model, optimizer), all_of_it(other.model, other_optimizer)
        assert [name for name in one if not torch.equal(one[name], two[name])] == []
        if other.engine is not None:
            other.rest()
        other.close()
        del other, other_optimizer
    spread.close()
    return {"sockets": members.left_sockets, "costs": costs}


A, B, C, D = range(4)
JOIN = [[A, B], [A, B, C]]
LEAVE = [[A, B, C], [A, B]]
FIRST = [[A, B, C], [B, C]]


@pytest.mark.parametrize("plan", [WHOLE, GRAD_OP, FULL], ids=lambda plan: plan.strategy)
@pytest.mark.parametrize("worlds", [JOIN, LEAVE, FIRST], ids=str)
def test_state_is_that_of_before(ranks: RankPool, plan: ParallelPlan, worlds: list[list[int]]) -> None:
    num = 1 + max(map(max, worlds))
    found = ranks.run(num, _live, plan, worlds, deadline_seconds=60)
    print(found)
