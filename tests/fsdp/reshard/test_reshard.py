"""A model in training is spread otherwise: every value, and what people hold of it, is as it was."""

from __future__ import annotations

import gc
import itertools
import os
import random
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from elastic_ext.fsdp.plan import ParallelPlan
from tests.support import retraining
from tests.support.ranks import RankPool
from tests.support.resharding import (
    FULL,
    GRAD_OP,
    HYBRID,
    KEPT,
    PLANS,
    WHOLE,
    Net,
    all_of_it,
    change,
    hash_of,
    in_rank_order,
    make,
    take_step,
)
from tests.support.thinning import the_first


def _tour(plans: Sequence[ParallelPlan]) -> list[ParallelPlan]:
    """From each plan to each other one, once."""
    left = {plan: [other for other in plans if other != plan] for plan in plans}
    path, here = [], [plans[0]]
    while here:
        if left[here[-1]]:
            here.append(left[here[-1]].pop())
        else:
            path.append(here.pop())
    return path[::-1]


# --- nothing is altered ---------------------------------------------------------------------------------------------


def _go_round(rank: int, plans: list[ParallelPlan], num_blocks: int = 1) -> list[tuple[bool, bool, int, int]]:
    torch.manual_seed(0)
    spread, optimizer = make(plans[0], model=Net(num_blocks=num_blocks))
    model: Any = spread.model
    outer = model
    take_step(spread, optimizer, 0)
    found = []
    for number, plan in enumerate(plans[1:], 1):
        take_step(spread, optimizer, number, clears=number % 2 == 0)  # gradients, too, or none
        was_whole = spread.plan is not None and spread.plan.is_replicated
        before, objects = all_of_it(model, optimizer), [weakref.ref(part) for part in model.parameters()]
        names = [name for name, _ in model.named_parameters()]
        made, moved = change(spread, plan, optimizer)
        after = all_of_it(model, optimizer)
        assert before.keys() == after.keys()
        altered = [name for name in before if not torch.equal(before[name], after[name])]
        assert not altered, (plan, altered)
        assert [name for name, _ in model.named_parameters()] == names
        assert model is outer
        assert model.head.weight is model.embed.weight
        assert not model.frozen.requires_grad
        trained = [part for part in model.parameters() if part.requires_grad]
        assert all(one is other for one, other in zip(trained, optimizer.param_groups[0]["params"], strict=True))
        assert set(optimizer.state) == set(trained)
        del trained  # whoever holds parameters keeps them from becoming others
        stays = all(one is other() for one, other in zip(model.parameters(), objects, strict=True))
        assert stays is (was_whole is plan.is_replicated)
        optimizer.zero_grad()
        found.append((stays, moved is not None, 0 if moved is None else moved.sent_bytes, made.sent_bytes))
    take_step(spread, optimizer, 99)
    spread.close()
    return found


@pytest.mark.parametrize(
    "plans",
    [
        (
            WHOLE,
            FULL,
            HYBRID,
        ),  # the next test has shard_grad_op, which lies as full_shard does, and KEPT
        pytest.param(PLANS, marks=pytest.mark.slow),
    ],
)
def test_every_change_of_strategy_leaves_every_value_and_moves_what_it_has_to(
    ranks: RankPool, plans: Sequence[ParallelPlan]
) -> None:
    tour = _tour(plans)
    found = ranks.run(4, _go_round, tour, deadline_seconds=120)[0]
    for (old, new), (_, _, sent, foreseen) in zip(itertools.pairwise(tour), found, strict=True):
        assert sent == foreseen, (old, new)
        if old in (WHOLE, KEPT):
            assert sent == 0, (old, new)  # every rank has everything
    assert any(sent for _, _, sent, _ in found)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_on_any_number_of_ranks(ranks: RankPool, num_ranks: int) -> None:
    ranks.run(num_ranks, _go_round, [FULL, WHOLE, KEPT, GRAD_OP, WHOLE, FULL], deadline_seconds=120)


@pytest.mark.parametrize(
    "strategies", [["full_shard"], pytest.param(["full_shard", "hybrid_shard"], marks=pytest.mark.slow)]
)
def test_units_too(ranks: RankPool, strategies: list[Any]) -> None:
    units: list[Any] = [1, 2, "whole", 3, 1]
    plans = [ParallelPlan(strategy=strategy, unit=unit) for strategy in strategies for unit in units]
    ranks.run(2, _go_round, plans, 3, deadline_seconds=120)


# --- training goes on as if nothing had happened --------------------------------------------------------------------


def _train_in_order(rank: int, plans: list[ParallelPlan]) -> tuple[list[float], dict[str, torch.Tensor]]:
    spread, optimizer = make(plans[0])
    losses = []
    with in_rank_order(spread) as arm:
        for number, plan in enumerate(plans):
            if plan != spread.plan:
                change(spread, plan, optimizer)
                arm()
            losses.append(take_step(spread, optimizer, number))
    state = all_of_it(spread.model, optimizer)
    spread.close()
    return losses, state


def _change_and_stay(rank: int, plans: list[ParallelPlan]) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    return [_train_in_order(rank, plans), _train_in_order(rank, [FULL] * len(plans))]


RECOMPUTED = ParallelPlan(strategy="hybrid_shard", shard_degree=2, unit=2, activation_checkpoint=0.5)
AHEAD = ParallelPlan(strategy="full_shard", prefetch=2, activation_checkpoint="all")


@pytest.mark.parametrize(
    "plans",
    the_first(
        [
            [FULL, WHOLE, AHEAD, KEPT, RECOMPUTED, FULL],
            [FULL, WHOLE, HYBRID, GRAD_OP, AHEAD, KEPT, RECOMPUTED, WHOLE, FULL],
        ]
    ),
    ids=len,
)
def test_losses_are_those_of_a_training_that_never_changed(ranks: RankPool, plans: list[ParallelPlan]) -> None:
    for (losses, state), (expected, whole) in ranks.run(4, _change_and_stay, plans, deadline_seconds=120):
        assert losses == expected
        trained = [name for name in whole if not name.startswith("buffer")]  # which DDP has rank 0 give to all
        assert [name for name in trained if not torch.equal(state[name], whole[name])] == []


def _many(rank: int, num_changes: int) -> None:
    spread, optimizer = make(FULL)
    draw = random.Random(7)
    take_step(spread, optimizer, 0)
    expected = hash_of(all_of_it(spread.model, optimizer))
    for _ in range(num_changes):
        change(spread, _any_plan(draw), optimizer)
        assert hash_of(all_of_it(spread.model, optimizer)) == expected, spread.plan
    spread.close()


def _any_plan(draw: random.Random) -> ParallelPlan:
    plan = draw.choice(PLANS)
    return ParallelPlan(
        strategy=plan.strategy,
        shard_degree=plan.shard_degree,
        unit=draw.choice([1, 2, 3, "whole"]),
        activation_checkpoint=draw.choice([0.0, 0.4, 1.0]),
        prefetch=draw.choice([None, 0, 1, 2]),
        bucket_cap_mb=draw.choice([None, 0.01, 25.0]),
    )


@pytest.mark.parametrize("num_changes", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_any_plans_in_a_row_leave_the_state(ranks: RankPool, num_changes: int) -> None:
    ranks.run(4, _many, num_changes, deadline_seconds=300)


# --- what stays ------------------------------------------------------------------------------------------------------


def _leave_nothing(rank: int, num_changes: int) -> list[tuple[int, ...]]:
    spread, optimizer = make(FULL)
    counts: list[tuple[int, ...]] = []
    for number in range(num_changes):
        change(spread, [WHOLE, GRAD_OP, HYBRID if dist.get_world_size() == 4 else KEPT, FULL][number % 4], optimizer)
        take_step(spread, optimizer, number)
        if number % 4 == 3:
            gc.collect()
            hooks = [
                len(hooks)
                for module in spread.model.modules()
                for hooks in (module._forward_hooks, module._forward_pre_hooks, module._state_dict_pre_hooks)
            ]
            tensors = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
            groups = len(dist.distributed_c10d._world.pg_map)
            counts.append((len(os.listdir("/proc/self/fd")), groups, sum(hooks), tensors))
    spread.close()
    return counts


@pytest.mark.parametrize("num_changes", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_changes_leave_nothing_behind(ranks: RankPool, num_changes: int) -> None:
    for counts in ranks.run(2, _leave_nothing, num_changes, deadline_seconds=300):
        assert all(last <= first for last, first in zip(counts[-1], counts[1], strict=True)), counts


def _keep_users_things(rank: int) -> None:
    spread, optimizer = make(FULL)
    model: Any = spread.model
    seen: list[str] = []
    unused = model.embed.weight.register_hook(lambda gradient: seen.append("gradient"))
    model.embed.weight.register_post_accumulate_grad_hook(lambda part: seen.append("accumulated"))
    model.blocks[0].register_forward_hook(lambda *_: seen.append("forward"))
    model.blocks[0].up.weight.of_the_user = "a note"
    average = {name: part.detach().clone() for name, part in model.named_parameters()}

    def values() -> dict[str, torch.Tensor]:
        return {name: retraining.whole(tensor) for name, tensor in average.items()}

    def go_to(plan: ParallelPlan) -> None:
        before = values()
        change(spread, plan, optimizer, registered=[average])
        after = values()
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
        assert model.blocks[0].up.weight.of_the_user == "a note"
        for name, part in model.named_parameters():
            assert isinstance(average[name], DTensor) is not plan.is_replicated
            average[name].lerp_(part.detach(), 0.5)

    take_step(spread, optimizer, 0)
    calls = sorted(seen)
    assert set(calls) == {"accumulated", "forward"}  # torch calls no hook of a sharded gradient itself
    go_to(HYBRID if dist.get_world_size() > 2 else KEPT)
    seen.clear()
    take_step(spread, optimizer, 1)
    assert sorted(seen) == calls
    assert len(model.embed.weight._backward_hooks) == 1
    unused.remove()
    model.embed.weight._post_accumulate_grad_hooks.clear()
    go_to(WHOLE)
    saved = model.state_dict()
    go_to(FULL)
    again = model.state_dict()
    assert saved.keys() == again.keys()
    model.load_state_dict(again)
    assert all(
        torch.equal(retraining.whole(again[name]), retraining.whole(part)) for name, part in model.state_dict().items()
    )
    spread.close()


def test_hooks_notes_and_registered_tensors_stay(ranks: RankPool) -> None:
    ranks.run(2, _keep_users_things)


def _all_blocks(rank: int) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(7, 7), nn.ReLU()) for _ in range(3)))
    spread, optimizer = make(FULL, model=model)
    take_step(spread, optimizer, 0)
    for number, plan in enumerate((WHOLE, FULL, KEPT, GRAD_OP), 1):
        before = all_of_it(model, optimizer)
        change(spread, plan, optimizer)
        after = all_of_it(model, optimizer)
        assert all(torch.equal(before[name], after[name]) for name in before)
        take_step(spread, optimizer, number)
    spread.close()


def test_a_model_that_is_a_list_of_blocks_has_nothing_beside_them(ranks: RankPool) -> None:
    ranks.run(2, _all_blocks)


# --- compiled blocks --------------------------------------------------------------------------------------------------


def _compiled(rank: int, plans: list[ParallelPlan]) -> tuple[list[float], list[int]]:
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        block.compile(backend="eager")
    spread, optimizer = make(plans[0], model=model)
    losses, graphs = [], []
    for number, plan in enumerate(plans):
        if plan != spread.plan:
            change(spread, plan, optimizer)
        losses.append(take_step(spread, optimizer, number))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    spread.close()
    torch._dynamo.reset()
    return losses, graphs


def test_compiled_blocks_train_alike_and_are_compiled_again_for_whole_parameters_alone(ranks: RankPool) -> None:
    recomputed = ParallelPlan(strategy="full_shard", unit=2, activation_checkpoint=1)
    plans = [FULL, KEPT, recomputed, FULL, WHOLE, KEPT, WHOLE]
    ((losses, graphs),) = ranks.run(1, _compiled, plans, deadline_seconds=120)
    ((expected, _),) = ranks.run(1, _compiled, [FULL] * len(plans), deadline_seconds=120)
    assert losses == expected
    first, whole = graphs[0], graphs[4]
    assert graphs == [first] * 4 + [whole] * 3
