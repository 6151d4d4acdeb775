"""Ranks come and leave: parameters and moments are those of before, bit for bit, and so is the step after that."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.fsdp.reshard import rewire
from elastic_ext.fsdp.reshard.sharded_model import Spread
from tests.support.ranks import RankPool
from tests.support.regrouping import Members, fresh_like
from tests.support.resharding import (
    FULL,
    GRAD_OP,
    HYBRID,
    KEPT,
    WHOLE,
    Net,
    agreeing,
    all_of_it,
    by_blocks,
    change,
    make,
    take_step,
)

A, B, C, D, E, F = range(6)
TOUR = [[A], [A, B], [A, B, C], [B, C], [B, D], [B]]
"""One rank and back, the first one leaves, and one leaves as another comes."""
FOUR = [[A, B, C, D], [A, B], [A, B, E, F]]
"""Back to a number of ranks that was there before: meshes of equal ranks compare equal."""
HALVES = [[A, B], [A, B, C, D], [C, D]]
BACK = [[A, B, C], [A, B], [A, B, C]]
"""A process leaves, and comes again from no world."""


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a store that outlives all groups."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    yield store.port
    del store  # which ends it


def _small() -> nn.Module:
    torch.manual_seed(0)
    return Net(num_blocks=1)


def _live(rank: int, port: int, plan: ParallelPlan, worlds: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
    """Live through worlds, with a step in each; gives how many sockets were left, and the bytes that were sent."""
    members = Members(rank, port, worlds)
    spread, optimizer = make(plan, model=_small(), bucket_bytes=1 << 10)
    sent = []
    if rank in worlds[0]:
        take_step(spread, optimizer, 0)
        take_step(spread, optimizer, 1, clears=False)
    for at, (old, new) in enumerate(itertools.pairwise(worlds), 1):
        if rank not in (*old, *new):
            continue
        sent.append(_go_on(members, at, plan, spread, optimizer))
    return members.left_sockets, sent


def _go_on(members: Members, at: int, plan: ParallelPlan, spread: Spread, optimizer: Optimizer) -> int:
    """Go to the next world, and take a step there as a new model of that world does."""
    model, own = spread.model, members.own
    if own in members.worlds[at - 1]:
        members.tell(f"state {at}", all_of_it(model, optimizer))
    ids = list(map(id, model.parameters()))
    sent_bytes = members.change(at, spread, optimizer).sent_bytes
    assert list(map(id, model.parameters())) == ids
    if own not in members.worlds[at]:
        return sent_bytes
    before = members.told(f"state {at}")
    assert _differing(before, all_of_it(model, optimizer)) == []
    other, its = fresh_like(plan, _small(), before)
    assert torch.equal(_norm(model), _norm(other.model))
    assert take_step(spread, optimizer, 10 + at) == take_step(other, its, 10 + at)
    assert _differing(all_of_it(other.model, its), all_of_it(model, optimizer)) == []
    _check_meshes(model, optimizer)
    take_step(spread, optimizer, 20 + at, clears=False)  # the next world gets gradients, too
    _take_apart(other)
    return sent_bytes


def _differing(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[str]:
    """The names of tensors that one of two states lacks, or that are not equal, bit for bit."""
    unequal = {name for name in before.keys() & after.keys() if not torch.equal(before[name], after[name])}
    return sorted(unequal | (before.keys() ^ after.keys()))


def _norm(model: nn.Module) -> torch.Tensor:
    """The sum of the squares of all parameters, which ranks add up on the mesh of each."""
    squares = [part.detach().square().sum() for part in model.parameters()]
    return torch.stack([each.full_tensor() if isinstance(each, DTensor) else each for each in squares])


def _check_meshes(model: nn.Module, optimizer: Optimizer) -> None:
    """All that is computed lies on the present mesh: none of it on an equal one whose groups are gone."""
    for part in model.parameters():
        for each in (part + 1, *optimizer.state.get(part, {}).values()):
            if isinstance(part, DTensor) and isinstance(each, DTensor):
                assert each.device_mesh is part.device_mesh


def _take_apart(spread: Spread) -> None:
    """Have a model that was only to be compared with keep no process group alive."""
    if spread.engine is not None:
        spread.rest()
    rewire.take_off(spread.model)
    spread.let_go_of_groups()


@pytest.mark.parametrize(
    "plan", [WHOLE, FULL, pytest.param(GRAD_OP, marks=pytest.mark.slow)], ids=lambda plan: plan.strategy
)
def test_state_is_that_of_before_and_the_next_step_is_that_of_a_new_model_of_that_world(
    ranks: RankPool, port: int, plan: ParallelPlan
) -> None:
    _check(ranks.run(4, _live, port, plan, TOUR, deadline_seconds=120, process_group=False), TOUR)


@pytest.mark.parametrize(
    "plan",
    [HYBRID, GRAD_OP, *(pytest.param(plan, marks=pytest.mark.slow) for plan in (WHOLE, FULL))],
    ids=lambda plan: plan.strategy,
)
def test_so_it_is_where_the_number_of_ranks_was_there_before(ranks: RankPool, port: int, plan: ParallelPlan) -> None:
    _check(ranks.run(6, _live, port, plan, FOUR, deadline_seconds=120, process_group=False), FOUR)


def test_so_it_is_where_copies_of_shards_come_and_the_first_ones_leave(ranks: RankPool, port: int) -> None:
    _check(ranks.run(4, _live, port, HYBRID, HALVES, deadline_seconds=120, process_group=False), HALVES)


@pytest.mark.parametrize("plan", [WHOLE, FULL], ids=lambda plan: plan.strategy)
def test_so_it_is_where_one_that_has_left_comes_again(ranks: RankPool, port: int, plan: ParallelPlan) -> None:
    _check(ranks.run(3, _live, port, plan, BACK, deadline_seconds=120, process_group=False), BACK)


def _come_otherwise(rank: int, port: int, own: ParallelPlan) -> bool:
    """Who comes lies by a plan of its own until then; gives whether parameters are the same objects."""
    members = Members(rank, port, HALVES[:2])
    spread, optimizer = make(HYBRID if rank in HALVES[0] else own, model=_small())
    if rank in HALVES[0]:
        take_step(spread, optimizer, 0)
        members.tell("before", all_of_it(spread.model, optimizer))
    ids = list(map(id, spread.model.parameters()))
    members.change(1, spread, optimizer, plan=HYBRID)
    assert spread.plan == HYBRID
    before = members.told("before")
    assert _differing(before, all_of_it(spread.model, optimizer)) == []
    other, its = fresh_like(HYBRID, _small(), before)
    assert take_step(spread, optimizer, 1) == take_step(other, its, 1)
    assert _differing(all_of_it(other.model, its), all_of_it(spread.model, optimizer)) == []
    return list(map(id, spread.model.parameters())) == ids


@pytest.mark.parametrize("own", [KEPT, WHOLE], ids=["kept whole", "no_shard"])
def test_who_comes_may_lie_by_another_plan_until_then(ranks: RankPool, port: int, own: ParallelPlan) -> None:
    stay = ranks.run(4, _come_otherwise, port, own, process_group=False)
    assert stay == [True, True, own == KEPT, own == KEPT]


def _check(found: list[tuple[int, list[int]]], worlds: Sequence[Sequence[int]]) -> None:
    """No socket was left, and all ranks of a change tell the same bytes of it, but for those that are yet to come."""
    assert [left for left, _ in found] == [0] * len(found)
    sent = [dict(zip(_changes_of(own, worlds), each, strict=True)) for own, (_, each) in enumerate(found)]
    for at in range(1, len(worlds)):
        assert len({each[at] for each in sent if at in each}) == 1


def _changes_of(own: int, worlds: Sequence[Sequence[int]]) -> list[int]:
    return [at for at in range(1, len(worlds)) if own in (*worlds[at - 1], *worlds[at])]


# --- many changes ----------------------------------------------------------------------------------------------------


def _any_worlds(num_changes: int, seed: int) -> list[list[int]]:
    """Worlds of one to four processes, which come and leave at random, several at once, and come again."""
    draw = random.Random(seed)
    worlds = [[A, B]]
    while len(worlds) <= num_changes:
        stay = [each for each in worlds[-1] if draw.random() < 0.7] or worlds[-1][:1]
        come = [each for each in (A, B, C, D) if each not in worlds[-1] and draw.random() < 0.5]
        if [*stay, *come] != worlds[-1]:
            worlds.append([*stay, *come])
    return worlds


def _walk(rank: int, port: int, plan: ParallelPlan, worlds: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Live through many worlds; gives what there was in each that this process was in, the world's size first."""
    members = Members(rank, port, worlds)
    spread, optimizer = make(plan, model=_small(), bucket_bytes=1 << 10)
    if rank in worlds[0]:
        take_step(spread, optimizer, 0)
    counts: list[tuple[int, ...]] = []
    for at, (old, new) in enumerate(itertools.pairwise(worlds), 1):
        if rank not in (*old, *new):
            continue
        if rank in old:
            members.tell(f"state {at}", all_of_it(spread.model, optimizer))
        members.change(at, spread, optimizer)
        if rank in new:
            assert _differing(members.told(f"state {at}"), all_of_it(spread.model, optimizer)) == [], (at, old, new)
            take_step(spread, optimizer, at)
            gc.collect()
            known = [there[1] for there in counts if there[0] == len(new)]
            counts.append((len(new), _num_descriptors(known[0] if known else None), *_counts(spread.model)))
    assert members.left_sockets == 0
    return counts


def _counts(model: nn.Module) -> tuple[int, ...]:
    """Threads, groups and hooks that there are now."""
    modules = list(model.modules())
    hooks = sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in modules)
    return threading.active_count(), len(dist.distributed_c10d._world.pg_map), hooks


def _num_descriptors(expected: int | None) -> int:
    """How many descriptors are open, once they are as few as expected: gloo closes some on a thread of its own."""
    deadline = time.monotonic() + 5.0
    while (found := len(os.listdir("/proc/self/fd"))) > (expected or found) and time.monotonic() < deadline:
        time.sleep(0.001)
    return found


@pytest.mark.parametrize("plan", [WHOLE, FULL], ids=lambda plan: plan.strategy)
@pytest.mark.parametrize("num_changes", [8, pytest.param(30, marks=pytest.mark.slow)])
def test_many_changes_leave_the_state_and_nothing_behind(
    ranks: RankPool, port: int, plan: ParallelPlan, num_changes: int
) -> None:
    worlds = _any_worlds(num_changes, seed=3)
    for counts in ranks.run(4, _walk, port, plan, worlds, deadline_seconds=300, process_group=False):
        last = {size: there for size, *there in counts}
        first = {size: there for size, *there in reversed(counts)}
        for size, there in last.items():
            assert all(now <= before for now, before in zip(there, first[size], strict=True)), counts


# --- more than parameters and moments --------------------------------------------------------------------------------


def _bring_more(rank: int, port: int, plan: ParallelPlan, worlds: Sequence[Sequence[int]]) -> None:
    """Registered tensors, whole and sharded, and a parameter that was left out of fully_shard."""
    members = Members(rank, port, worlds)
    comes = rank not in worlds[0]
    model: Any = _small()
    alone = {model.blocks[0].gain.requires_grad_(False)}
    if not plan.is_replicated:
        by_blocks(ignored_params=alone)(model)
    spread = Spread(model, num_local=dist.get_world_size())
    if plan.is_replicated:
        spread.put_on(plan)
    optimizer = AdamW([part for part in model.parameters() if part.requires_grad], lr=1e-2)
    if not comes:
        take_step(spread, optimizer, 0)
    whole = {"step size": torch.full((3,), 0.0 if comes else 7.0), "count": torch.tensor(0 if comes else 5)}
    average = {name: part.detach().clone().zero_() for name, part in model.named_parameters()}
    for name, part in model.named_parameters() if not comes else ():
        average[name].copy_(part.detach() * 3)
    model.blocks[0].gain.data.fill_(0.0 if comes else 2.5)
    members.change(1, spread, optimizer, [whole, average])
    if rank not in worlds[1]:
        return
    assert whole["step size"].tolist() == [7.0] * 3 and whole["count"].item() == 5
    assert model.blocks[0].gain.item() == 2.5
    state = all_of_it(model, optimizer)
    if not comes:
        members.tell("told", {**state, **{f"average {name}": _whole(each) for name, each in average.items()}})
    else:
        for each in average.values():
            _whole(each)  # all ranks gather it
    told = members.told("told")
    assert _differing({name: each for name, each in told.items() if not name.startswith("average")}, state) == []
    for name, part in model.named_parameters():
        assert torch.equal(told[f"average {name}"], _whole(average[name]))
        assert isinstance(average[name], DTensor) is isinstance(part, DTensor)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@pytest.mark.parametrize("plan", [WHOLE, FULL], ids=lambda plan: plan.strategy)
def test_registered_tensors_and_parameters_left_out_come_along(ranks: RankPool, port: int, plan: ParallelPlan) -> None:
    ranks.run(3, _bring_more, port, plan, [[A, B], [A, B, C]], process_group=False)


def _leave_wrapped(rank: int, port: int) -> int:
    """A model in a user's own DDP, which the loop goes on to call; gives how many sockets were left."""
    members = Members(rank, port, [[A, B, C], [A, C]])
    wrapped = DistributedDataParallel(_small())
    spread = Spread(wrapped, num_local=3)
    optimizer = AdamW([part for part in wrapped.parameters() if part.requires_grad], lr=1e-2)
    spread.look()
    take_step(spread, optimizer, 0)
    before = all_of_it(spread.root, optimizer)
    members.tell("before", before)
    members.change(1, spread, optimizer)
    if rank != B:
        before = members.told("before")
        other, its = fresh_like(WHOLE, _small(), before)
        assert take_step(spread, optimizer, 1) == take_step(other, its, 1)
        assert _differing(all_of_it(other.model, its), all_of_it(spread.root, optimizer)) == []
    return members.left_sockets


def test_a_model_in_a_users_own_ddp_goes_on_in_another_world(ranks: RankPool, port: int) -> None:
    assert ranks.run(3, _leave_wrapped, port, process_group=False) == [0, 0, 0]


# --- what is refused, and changes that fail --------------------------------------------------------------------------


def _refuse(rank: int, port: int) -> None:
    members = Members(rank, port, [[A, B], [A]])
    spread, optimizer = make(HYBRID, model=_small())
    with pytest.raises(ValueError, match="shard_degree: 2 does not divide the 1 ranks"):
        members.prepare(1, spread, optimizer)
    for options, words in (
        ({"process_group": dist.new_group()}, "the model is in DDP on a process group of its own"),
        ({"static_graph": True}, "the model is in DDP with static_graph=True"),
    ):
        wrapped: Any = DistributedDataParallel(_small(), **options)
        with pytest.raises(ValueError, match=words):
            members.prepare(1, Spread(wrapped, num_local=2), AdamW(wrapped.parameters()))


def test_what_does_not_fit_another_world_is_refused_in_words(ranks: RankPool, port: int) -> None:
    ranks.run(2, _refuse, port, process_group=False)


def _fail(rank: int, port: int, plan: ParallelPlan, where: str) -> tuple[str, int]:
    """A rank that comes has another model, groups cannot be formed, or a rank has no memory for what others give."""
    members = Members(rank, port, [[A, B, C], [A, C]] if where == "memory" else [[A, B], [A, B, C]])
    comes = rank == C and where != "memory"
    model = Net(num_blocks=2) if comes and where == "model" else _small()
    spread, optimizer = make(plan, model=model, bucket_bytes=1 << 10)
    if not comes:
        take_step(spread, optimizer, 0)
    before = {} if comes else all_of_it(spread.model, optimizer)
    ids = list(map(id, spread.model.parameters()))
    groups = members.form_to(1)
    groups.fails = where == "groups"
    prepared = members.prepare(1, spread, optimizer)
    with pytest.MonkeyPatch().context() as patched:
        if where == "memory" and rank == A:
            patched.setattr(torch.Tensor, "new_empty", _failing_once(torch.Tensor.new_empty))
        with pytest.raises((RuntimeError, ConnectionError)) as caught:
            spread.regroup(prepared, agreeing, groups)
    told, is_as_before = str(caught.value), prepared.is_as_before
    del caught, prepared  # which hold parameters
    assert is_as_before is not comes
    if comes:
        return told, 0
    assert list(map(id, spread.model.parameters())) == ids
    assert _differing(before, all_of_it(spread.model, optimizer)) == []
    other, its = fresh_like(plan, _small(), before)
    assert take_step(spread, optimizer, 5) == take_step(other, its, 5)
    change(spread, FULL if plan == WHOLE else WHOLE, optimizer)
    take_step(spread, optimizer, 6)
    return told, members.left_sockets


def _failing_once(real: Any) -> Any:
    fails = iter([True])

    def call(*given: Any, **options: Any) -> Any:
        if next(fails, False):
            raise torch.OutOfMemoryError("planted")
        return real(*given, **options)

    return call


@pytest.mark.parametrize(
    ("plan", "where"), [(WHOLE, "model"), (FULL, "model"), (WHOLE, "groups"), (FULL, "groups"), (FULL, "memory")]
)
def test_ranks_go_on_as_they_were_where_a_change_fails_before_anything_has_moved(
    ranks: RankPool, port: int, plan: ParallelPlan, where: str
) -> None:
    for told, left in ranks.run(3, _fail, port, plan, where, process_group=False):
        assert ("planted" if where == "groups" else "a rank has failed") in told
        assert left == 0
