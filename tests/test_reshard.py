"""A model in training is spread otherwise: every value, and what people hold of it, is as it was."""

from __future__ import annotations

import gc
import itertools
import os
import random
import re
import signal
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from elastic_ext.fsdp.fsdp2 import groups_of
from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.fsdp.spread import Spread
from tests.ranks import RankPool
from tests.resharding import (
    FULL,
    GRAD_OP,
    HYBRID,
    KEPT,
    PLANS,
    WHOLE,
    Net,
    agreeing,
    all_of_it,
    change,
    hash_of,
    in_rank_order,
    make,
    take_step,
)


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


def _go_round(rank: int, plans: list[ParallelPlan]) -> list[tuple[bool, bool, int, int]]:
    spread, optimizer = make(plans[0])
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
        found.append((stays, moved is not None, 0 if moved is None else moved.num_sent, made.num_sent))
    take_step(spread, optimizer, 99)
    spread.close()
    return found


def test_every_change_of_strategy_leaves_every_value_and_moves_what_it_has_to(ranks: RankPool) -> None:
    tour = _tour(PLANS)
    found = ranks.run(4, _go_round, tour, deadline_seconds=120)[0]
    for (old, new), (_, _, sent, foreseen) in zip(itertools.pairwise(tour), found, strict=True):
        assert sent == foreseen, (old, new)
        if old in (WHOLE, KEPT):
            assert sent == 0, (old, new)  # every rank has everything
    assert any(sent for _, _, sent, _ in found)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_on_any_number_of_ranks(ranks: RankPool, num_ranks: int) -> None:
    ranks.run(num_ranks, _go_round, [FULL, WHOLE, KEPT, GRAD_OP, WHOLE, FULL], deadline_seconds=120)


def test_units_too(ranks: RankPool) -> None:
    units: list[Any] = [1, 2, "whole", 3, 1]
    plans = [
        ParallelPlan(strategy=strategy, unit=unit) for strategy in ("full_shard", "hybrid_shard") for unit in units
    ]
    ranks.run(2, _go_round, plans, deadline_seconds=120)


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


def test_losses_are_those_of_a_training_that_never_changed(ranks: RankPool) -> None:
    recomputed = ParallelPlan(strategy="hybrid_shard", shard_degree=2, unit=2, activation_checkpoint=0.5)
    ahead = ParallelPlan(strategy="full_shard", prefetch=2, activation_checkpoint="all")
    plans = [FULL, WHOLE, HYBRID, GRAD_OP, ahead, KEPT, recomputed, WHOLE, FULL]
    stayed = ranks.run(4, _train_in_order, [FULL] * len(plans), deadline_seconds=120)
    changed = ranks.run(4, _train_in_order, plans, deadline_seconds=120)
    for (losses, state), (expected, whole) in zip(changed, stayed, strict=True):
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


@pytest.mark.parametrize("num_changes", [10, pytest.param(50, marks=pytest.mark.slow)])
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


@pytest.mark.parametrize("num_changes", [16, pytest.param(100, marks=pytest.mark.slow)])
def test_changes_leave_nothing_behind(ranks: RankPool, num_changes: int) -> None:
    for counts in ranks.run(2, _leave_nothing, num_changes, deadline_seconds=300):
        assert all(last <= first for last, first in zip(counts[-1], counts[1], strict=True)), counts


def _keep_users_things(rank: int) -> None:
    spread, optimizer = make(FULL)
    model: Any = spread.model
    seen: list[str] = []
    model.embed.weight.register_hook(lambda gradient: seen.append("gradient"))
    model.blocks[0].register_forward_hook(lambda *_: seen.append("forward"))
    model.blocks[0].up.weight.of_the_user = "a note"
    average = {name: part.detach().clone() for name, part in model.named_parameters()}
    take_step(spread, optimizer, 0)
    change(spread, HYBRID if dist.get_world_size() > 2 else KEPT, optimizer, registered=[average])
    for name, part in model.named_parameters():
        average[name].lerp_(part.detach(), 0.5)
    assert model.blocks[0].up.weight.of_the_user == "a note"
    seen.clear()
    take_step(spread, optimizer, 1)
    assert seen.count("forward") == 1
    model.embed.weight._backward_hooks.clear()
    change(spread, WHOLE, optimizer, registered=[average])
    assert model.blocks[0].up.weight.of_the_user == "a note"
    for name, part in model.named_parameters():
        assert not isinstance(average[name], DTensor)
        average[name].lerp_(part.detach(), 0.5)
    saved = model.state_dict()
    change(spread, FULL, optimizer, registered=[])
    model.load_state_dict(
        {name: part.to_dense() if part.is_sparse else part for name, part in model.state_dict().items()}
    )
    assert saved.keys() == model.state_dict().keys()
    spread.close()


def test_hooks_notes_and_registered_tensors_stay(ranks: RankPool) -> None:
    ranks.run(2, _keep_users_things)


# --- models that others have spread ---------------------------------------------------------------------------------


def _users_own(rank: int, how: str) -> None:
    torch.manual_seed(0)
    model: Any = Net()
    outer = model
    if how == "DDP":
        outer = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        policy = (
            MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
            if how == "mixed"
            else MixedPrecisionPolicy()
        )
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model)
        for part in (*model.blocks, model):
            part.set_gradient_divide_factor(4.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo cannot divide by itself
            if hasattr(part, "set_reduce_scatter_max_input_buffers"):  # from torch 2.13 on
                part.set_reduce_scatter_max_input_buffers(3)
                part.set_reduce_scatter_unused_params(True)
    optimizer = AdamW([part for part in outer.parameters() if part.requires_grad], lr=1e-2)
    spread = Spread(outer, num_local=2)
    assert spread.why_not is None
    assert spread.plan is not None
    assert spread.plan.strategy == ("no_shard" if how == "DDP" else "full_shard")
    take_step(spread, optimizer, 0)
    names = list(outer.state_dict())
    for number, plan in enumerate((KEPT, GRAD_OP, FULL)):
        before = all_of_it(outer, optimizer)
        change(spread, plan, optimizer)
        after = all_of_it(outer, optimizer)
        assert all(torch.equal(before[name], after[name]) for name in before)
        take_step(spread, optimizer, number + 1)
    assert list(outer.state_dict()) == names
    if how != "DDP":
        states = [part._get_fsdp_state() for part in model.modules() if isinstance(part, FSDPModule)]
        groups = [group for state in states for group in groups_of(state)]
        assert groups
        assert {(group.gradient_divide_factor, group.force_sum_reduction_for_comms) for group in groups} == {
            (4.0, True)
        }
        for name, value in (("reduce_scatter_max_input_buffers", 3), ("reduce_scatter_unused_params", True)):
            assert all(getattr(group, name, value) == value for group in groups)
        with pytest.raises(ValueError, match="DDP does not know of"):
            change(spread, WHOLE, optimizer)
    else:
        change(spread, WHOLE, optimizer)
        take_step(spread, optimizer, 9)
    spread.close()


@pytest.mark.parametrize("how", ["DDP", "fully_shard", "mixed"])
def test_a_model_that_its_user_has_spread_is_known_and_changed(ranks: RankPool, how: str) -> None:
    ranks.run(2, _users_own, how)


# --- what is refused, before anything is touched --------------------------------------------------------------------


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
    with pytest.raises(ValueError, match=re.escape(said)):
        change(spread, plan, optimizer)
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


# --- failures ---------------------------------------------------------------------------------------------------------


def _run_out(rank: int, old: ParallelPlan, new: ParallelPlan, at: str) -> str:
    """Memory is exhausted on one rank: in the first bucket, or later."""
    model = Net(width=7, num_blocks=2)
    spread, optimizer = make(old, model=model, bucket_bytes=200 if at == "a later one" else 8 << 20)
    take_step(spread, optimizer, 0, clears=False)
    before = all_of_it(model, optimizer)
    num_agreed = [0]
    real = torch.Tensor.new_empty

    def failing(tensor: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        has_begun = num_agreed[0] == 2  # on the wiring, and on the first bucket
        if tensor.device.type != "meta" and has_begun is (at == "a later one"):
            raise torch.OutOfMemoryError("no memory is left")
        return real(tensor, *given, **options)

    def agree(error: BaseException | None) -> None:
        num_agreed[0] += 1
        agreeing(error)

    made, _ = spread.transition(new, [optimizer])
    assert made is not None
    assert len(made.freight.buckets) > 2 or at == "the first"
    prepared = spread.prepare(new, [optimizer], [], [])
    if rank == 1:
        torch.Tensor.new_empty = failing  # type: ignore[method-assign, assignment]
    try:
        with pytest.raises(RuntimeError, match="a rank has failed"):
            spread.change(made, prepared, agree)
    finally:
        torch.Tensor.new_empty = real  # type: ignore[method-assign]
    assert num_agreed == [2 if at == "the first" else 3]
    del prepared
    if at == "the first":
        after = all_of_it(model, optimizer)
        assert all(torch.equal(before[name], after[name]) for name in before)
        optimizer.zero_grad()
        take_step(spread, optimizer, 1)
        alike = [torch.empty(()) for _ in range(dist.get_world_size())]
        own = all_of_it(model, optimizer)["embed.weight"].sum()
        dist.all_gather(alike, own)
        assert all(torch.equal(own, other) for other in alike), "gradients are averaged as before"
        change(spread, new, optimizer)
        take_step(spread, optimizer, 2)
    spread.close()
    return "went on"


@pytest.mark.parametrize(("old", "new"), [(FULL, KEPT), (FULL, WHOLE), (WHOLE, FULL)])
def test_memory_that_runs_out_before_anything_moved_leaves_everything_as_it_was(
    ranks: RankPool, old: ParallelPlan, new: ParallelPlan
) -> None:
    assert ranks.run(2, _run_out, old, new, "the first") == ["went on"] * 2


@pytest.mark.parametrize(("old", "new"), [(FULL, KEPT), (FULL, WHOLE), (WHOLE, FULL)])
def test_memory_that_runs_out_later_is_an_error_on_all_ranks(
    ranks: RankPool, old: ParallelPlan, new: ParallelPlan
) -> None:
    assert ranks.run(2, _run_out, old, new, "a later one") == ["went on"] * 2


def _die(rank: int, folder: Path) -> str:
    spread, optimizer = make(FULL, bucket_bytes=200)
    take_step(spread, optimizer, 0)
    num_exchanged, real = [0], dist.all_to_all_single

    def exchange(*given: Any, **options: Any) -> Any:
        num_exchanged[0] += 1
        if rank == 1 and num_exchanged[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*given, **options)

    with pytest.MonkeyPatch().context() as patched:
        patched.setattr(dist, "all_to_all_single", exchange)
        try:
            change(spread, KEPT, optimizer)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_a_rank_that_dies_in_the_middle_of_a_change_is_an_error_on_the_others(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks.run_outcomes(2, _die, tmp_path)
    assert outcomes[1].exit_signal == signal.SIGKILL
    assert outcomes[0].ok, outcomes[0]
    assert "nothing" not in outcomes[0].value


def _estimated_again(rank: int) -> tuple[float, float]:
    spread, optimizer = make(FULL)
    take_step(spread, optimizer, 0)
    first, _ = spread.transition(KEPT, [optimizer])
    change(spread, KEPT, optimizer)
    then, _ = spread.transition(FULL, [optimizer])
    assert first is not None
    assert then is not None
    return first.pace.seconds_per_tensor, then.pace.seconds_per_tensor


def test_what_a_change_took_is_what_the_next_is_thought_to_take(ranks: RankPool) -> None:
    for first, then in ranks.run(2, _estimated_again):
        assert then not in (0, first)


# --- a torch that is not known ----------------------------------------------------------------------------------------


def _another_torch(rank: int, what: str) -> str | None:
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)))
    fully_shard(model[0])
    fully_shard(model)
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        if what == "a version":
            patched.setattr(torch, "__version__", "2.99.0")
        elif what in ("groups", "a setting"):
            state = model._get_fsdp_state() if what == "groups" else groups_of(model[0]._get_fsdp_state())[0]
            names = ("_fsdp_param_group", "_fsdp_param_groups", "force_sum_reduction_for_comms")
            for name in vars(state).keys() & names:
                patched.delattr(state, name)
        elif what == "a part":
            patched.delattr("torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.reset_sharded_param")
        else:
            patched.delattr(sys.modules["torch.distributed._composable.contract"], "REGISTRY_KEY")
        spread = Spread(model, num_local=2)
    model(torch.ones(1, 4)).sum().backward()
    assert spread.plan is None
    return spread.why_not


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("a version", "torch 2.99.0 is not known here; sharding is changed in place with torch 2.11 or 2.13,"),
        ("a part", "keeps reset_sharded_param of a FSDPParam in another place"),
        ("groups", "keeps _fsdp_param_group"),
        ("a setting", "keeps force_sum_reduction_for_comms of a FSDPParamGroup"),
        ("a name", "REGISTRY_KEY"),
    ],
)
def test_a_torch_that_is_not_known_leaves_training_as_it_is(ranks: RankPool, what: str, words: str) -> None:
    for why in ranks.run(2, _another_torch, what):
        assert why is not None
        assert words in why


def _then_another_torch(rank: int, old: ParallelPlan, new: ParallelPlan) -> tuple[bool, str]:
    spread, optimizer = make(old)
    take_step(spread, optimizer, 0)
    if new == GRAD_OP:
        spread.model.set_all_reduce_hook(lambda tensor: None)  # type: ignore[operator]
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        if new != GRAD_OP:
            patched.setattr(torch, "__version__", "2.99.0")
        made, told = spread.transition(new, [optimizer])
    spread.close()
    return made is None, told


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (FULL, ParallelPlan(strategy="full_shard", prefetch=1), "torch 2.99.0 is not known here"),
        (FULL, WHOLE, "torch 2.99.0 is not known here"),
        (WHOLE, FULL, "torch 2.99.0 is not known here"),
        (WHOLE, ParallelPlan(strategy="no_shard", bucket_cap_mb=1.0), "buckets"),
        (FULL, ParallelPlan(strategy="full_shard", activation_checkpoint=1), "recompute"),
        (FULL, GRAD_OP, "has an all-reduce hook of your own"),
    ],
)
def test_what_cannot_be_reached_is_refused_before_ranks_agree(
    ranks: RankPool, old: ParallelPlan, new: ParallelPlan, words: str
) -> None:
    for is_refused, told in ranks.run(2, _then_another_torch, old, new):
        assert is_refused is (words not in ("buckets", "recompute"))
        assert words in told


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
