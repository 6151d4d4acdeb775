"""Ranks come and leave: parameters and moments are those of before, bit for bit, and so is the step after that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.fsdp.reshard import rewire
from elastic_ext.fsdp.reshard.sharded_model import Spread
from elastic_ext.fsdp.worlds import Worlds
from tests.support.ranks import RankPool
from tests.support.regrouping import Members, fresh_like
from tests.support.resharding import FULL, GRAD_OP, HYBRID, WHOLE, Net, agreeing, all_of_it, change, make, take_step

A, B, C, D, E, F = range(6)
TOUR = [[A], [A, B], [A, B, C], [B, C], [B, D], [B]]
"""One rank and back, the first one leaves, and one leaves as another comes."""
FOUR = [[A, B, C, D], [A, B], [A, B, E, F]]
"""Back to a number of ranks that was there before: meshes of equal ranks compare equal."""
HALVES = [[A, B], [A, B, C, D], [C, D]]


def _live(rank: int, plan: ParallelPlan, worlds: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
    """Live through worlds, with a step in each; gives how many sockets were left, and the bytes that were sent."""
    members = Members(rank, worlds)
    torch.manual_seed(0)
    spread, optimizer = make(plan, model=Net(num_blocks=1), bucket_bytes=1 << 10)
    sent = []
    if rank in worlds[0]:
        take_step(spread, optimizer, 0)
        take_step(spread, optimizer, 1, clears=False)
    for at, (old, new) in enumerate(zip(worlds, worlds[1:], strict=False), 1):
        if rank not in (*old, *new):
            continue
        sent.append(_go_on(members, at, plan, spread, optimizer))
        if rank not in new:
            break
    if rank in worlds[-1]:  # where the model still trains
        return members.left_sockets, sent
    dist.destroy_process_group()
    return max(members.left_sockets, members.num_left()), sent


def _go_on(members: Members, at: int, plan: ParallelPlan, spread: Spread, optimizer: torch.optim.Optimizer) -> int:
    """Go to the next world, and take a step there as a new model of that world does."""
    model, own = spread.model, members.own
    before: dict[str, torch.Tensor] = {}
    if own in members.worlds[at - 1]:
        before = all_of_it(model, optimizer)
        members.tell(f"state {at}", before)
    ids = list(map(id, model.parameters()))
    cost = members.change(at, spread, optimizer)
    assert list(map(id, model.parameters())) == ids
    if own not in members.worlds[at]:
        return cost.sent_bytes
    before = members.told(f"state {at}")
    after = all_of_it(model, optimizer)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    other, its = fresh_like(plan, Net(num_blocks=1), before)
    assert take_step(spread, optimizer, 10 + at) == take_step(other, its, 10 + at)
    lies_on = [part.device_mesh for part in model.parameters() if isinstance(part, DTensor)]
    for part in model.parameters():
        for each in (part, part + 1, *optimizer.state.get(part, {}).values()):
            assert not isinstance(each, DTensor) or each.device_mesh is lies_on[0]
    there, here = all_of_it(other.model, its), all_of_it(model, optimizer)
    assert [name for name in there if not torch.equal(there[name], here[name])] == []
    take_step(spread, optimizer, 20 + at, clears=False)  # the next world gets gradients, too
    if other.engine is not None:
        other.rest()
    rewire.take_off(other.model)
    other.let_go_of_groups()
    return cost.sent_bytes


@pytest.mark.parametrize("plan", [WHOLE, FULL, pytest.param(GRAD_OP, marks=pytest.mark.slow)], ids=str)
def test_state_is_that_of_before_and_the_next_step_is_that_of_a_new_model_of_that_world(
    ranks: RankPool, plan: ParallelPlan
) -> None:
    _check(ranks.run(4, _live, plan, TOUR, deadline_seconds=120))


@pytest.mark.parametrize(
    "plan", [HYBRID, GRAD_OP, *(pytest.param(plan, marks=pytest.mark.slow) for plan in (WHOLE, FULL))], ids=str
)
def test_so_it_is_where_the_number_of_ranks_was_there_before(ranks: RankPool, plan: ParallelPlan) -> None:
    _check(ranks.run(6, _live, plan, FOUR, deadline_seconds=120))


def test_so_it_is_where_copies_of_shards_come_and_the_first_ones_leave(ranks: RankPool) -> None:
    _check(ranks.run(4, _live, HYBRID, HALVES, deadline_seconds=120))


def _check(found: list[tuple[int, list[int]]]) -> None:
    assert [left for left, _ in found] == [0] * len(found)


# --- a change that fails before anything has moved ------------------------------------------------------------------


def _fail(rank: int, plan: ParallelPlan, where: str) -> tuple[str, int]:
    """A rank that comes has another model, or groups cannot be formed: the others go on as they were."""
    members = Members(rank, [[A, B], [A, B, C]])
    comes = rank == C
    torch.manual_seed(0)
    spread, optimizer = make(plan, model=Net(num_blocks=2 if comes and where == "model" else 1), bucket_bytes=1 << 10)
    if not comes:
        take_step(spread, optimizer, 0)
    before = {} if comes else all_of_it(spread.model, optimizer)
    ids = list(map(id, spread.model.parameters()))
    groups = members.form_to(1)
    if where == "groups":
        groups.fails = True
    prepared = spread.prepare_regroup(*_place(members), [optimizer])
    with pytest.raises((RuntimeError, ValueError, ConnectionError)) as caught:
        spread.regroup(prepared, agreeing, groups)
    told, is_as_before = str(caught.value), prepared.is_as_before
    del caught, prepared  # which hold parameters
    if comes:
        return told, 0
    assert is_as_before
    after = all_of_it(spread.model, optimizer)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert list(map(id, spread.model.parameters())) == ids
    other, its = fresh_like(plan, Net(num_blocks=1), before)
    assert take_step(spread, optimizer, 5) == take_step(other, its, 5)
    change(spread, FULL if plan == WHOLE else WHOLE, optimizer)
    take_step(spread, optimizer, 6)
    return told, members.left_sockets


def _place(members: Members) -> tuple[Worlds, int]:
    worlds, holder = members.between(1)
    assert holder is not None
    return worlds, holder


@pytest.mark.parametrize("plan", [WHOLE, FULL], ids=str)
@pytest.mark.parametrize("where", ["model", "groups"])
def test_ranks_go_on_as_they_were_where_one_that_comes_does_not_fit(
    ranks: RankPool, plan: ParallelPlan, where: str
) -> None:
    for told, left in ranks.run(3, _fail, plan, where, deadline_seconds=60):
        assert ("a rank has failed" if where == "model" else "planted") in told
        assert left == 0
