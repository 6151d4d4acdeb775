"""Models that others have written change plans as ours do: no crash after a change that was accepted."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from elastic_ext import StepError
from elastic_ext.fsdp.plan import ParallelPlan
from tests.support.foreign import FOREIGN, ForeignTraining, llama
from tests.support.ranks import RankPool
from tests.support.resharding import FULL, KEPT, WHOLE, any_plan
from tests.support.retraining import Retraining, State, are_in_force, differing
from tests.support.thinning import the_first

# --- random walks -----------------------------------------------------------------------------------------------------


def walk(rank: int, folder: Path, kind: str, seed: int, num_changes: int) -> None:
    """Plans drawn at random, on two ranks with the bits of a training that stays as it is.

    On more, sums are formed in another order. Training makes much of the last digits where gradients are small or
    batch norms divide by little: so steps are small there, by an optimizer that does not divide.
    """
    draw = random.Random(seed)
    num_ranks = torch.distributed.get_world_size()
    make_optimizer: Any = partial(AdamW, lr=1e-2) if num_ranks == 2 else partial(SGD, momentum=0.9, lr=1e-3)
    options: dict[str, Any] = {
        "make_optimizer": make_optimizer,
        "averages": False,
        "num_micro_steps": draw.choice([1, 2]),
    }
    plans = {3 * at + 1: any_plan(draw, num_ranks) for at in range(num_changes)}
    until = 3 * num_changes + 3
    found = []
    for name, first, at in (("stayed", FULL, {}), ("walked", any_plan(draw, num_ranks), plans)):
        torch.manual_seed(0)
        model = FOREIGN[kind]().to(torch.float64 if num_ranks > 2 and kind == "resnet" else torch.float32)
        run = ForeignTraining(rank, folder, first, name=name, model=model, **options)
        with run.trainer:
            run.train(until, at)
            found.append((run.losses, run.state()))
    assert are_in_force(run), plans
    (losses, state), (losses_walked, state_walked) = found
    if num_ranks == 2:
        assert differing(state_walked, state) == [], plans
        assert losses_walked == losses, plans
    else:
        assert losses_walked == pytest.approx(losses, rel=1e-5), plans
        assert _far_apart(state_walked, state) == [], plans


def _far_apart(one: State, other: State) -> list[str]:
    """What differs by more than sums do that are formed in another order, step after step."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-6)]


def walk_both(rank: int, folder: Path) -> None:
    """Language models with all that those have, and convolutions; the others walk where there is more time."""
    for seed, kind in enumerate(("mixtral", "resnet")):
        walk(rank, folder / kind, kind, seed, 2)


def test_models_of_others_walk_through_plans_with_the_bits_of_one_that_stays(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, walk_both, tmp_path, deadline_seconds=300)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [10, 11])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("kind", FOREIGN)
def test_models_of_others_walk_far(ranks: RankPool, tmp_path: Path, kind: str, num_ranks: int, seed: int) -> None:
    ranks.run(num_ranks, walk, tmp_path, kind, seed, 12, deadline_seconds=600)


# --- a key-value cache, which grows when blocks are computed again ---------------------------------------------------

AGAIN = replace(FULL, activation_checkpoint="all")
SAYS = (
    "a block, LlamaDecoderLayer, computes something else when it is computed again: the second time it raises ",
    "call the model with use_cache=False (model.config.use_cache = False), or leave activation_checkpoint at 0",
)


def growing_cache(rank: int, folder: Path, plan: ParallelPlan, by_rank: int) -> None:
    """Refused while the cache is there, in force once it is not; with the bits of a training that never asked."""
    options: dict[str, Any] = {"averages": False}
    found = []
    for name in ("stayed", "asked"):
        torch.manual_seed(0)
        model = llama(use_cache=True, attn_implementation="eager")
        run = ForeignTraining(rank, folder, plan, name=name, model=model, **options)

        def ask(run: Retraining) -> None:
            if rank == by_rank:
                run.proposals.append(run.trainer.reshard(replace(plan, activation_checkpoint="all")))

        def without_cache(run: Retraining, model: Any = model) -> None:
            model.config.use_cache = False

        with run.trainer:
            run.train(13, {} if name == "stayed" else {2: ask, 6: without_cache, 7: ask})
            found.append((run.losses, run.state()))
            lies = run.plan
    assert lies == replace(plan, activation_checkpoint="all")
    if rank == by_rank:
        refused, taken = run.proposals
        assert refused.outcome == "refused" and all(words in refused.refusal for words in SAYS), refused
        assert taken.outcome == "in force", taken
    assert found[0][0] == found[1][0]
    assert differing(found[0][1], found[1][1]) == []


@pytest.mark.parametrize(("plan", "by_rank"), [(FULL, 1), (WHOLE, 0)])
def test_computing_again_is_tried_before_it_is_in_force(
    ranks: RankPool, tmp_path: Path, plan: ParallelPlan, by_rank: int
) -> None:
    ranks.run(2, growing_cache, tmp_path, plan, by_rank, deadline_seconds=240)


def cache_that_comes_later(rank: int, folder: Path) -> None:
    """Computed again without a cache, then not, then asked for again with one, as where a loop has generated text."""
    model = llama(attn_implementation="eager")
    run = ForeignTraining(rank, folder, FULL, model=model, averages=False)

    def ask(run: Retraining) -> None:
        run.proposals.append(run.trainer.reshard(AGAIN))

    def use_cache(run: Retraining) -> None:
        model.config.use_cache = True

    with run.trainer:
        run.train(20, {2: ask, 8: FULL, 12: use_cache, 13: ask})
    assert [each.outcome for each in run.proposals] == ["in force", "in force", "refused"]
    assert all(words in run.proposals[2].refusal for words in SAYS)


def test_computing_again_is_tried_each_time_that_it_is_asked_for(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, cache_that_comes_later, tmp_path, deadline_seconds=240)


def growing_cache_at_start(rank: int, folder: Path, plan: ParallelPlan) -> str:
    """What the first step raises, in which nothing is trained."""
    model = llama(use_cache=True, attn_implementation="eager")
    run = ForeignTraining(rank, folder, plan, model=model, averages=False)
    with run.trainer:
        before = run.state()
        with pytest.raises(ValueError, match="computes something else when it is computed again") as caught:
            run.train(1)
        assert run.trainer.global_step == 0
        assert differing(run.state(), before) == []
        model.config.use_cache = False
        run.train(2)  # the same trainer goes on without it
    return str(caught.value)


@pytest.mark.parametrize("plan", [AGAIN, replace(WHOLE, activation_checkpoint=0.5)])
def test_computing_again_from_the_start_is_refused_in_the_first_pass_on_all_ranks(
    ranks: RankPool, tmp_path: Path, plan: ParallelPlan
) -> None:
    told = ranks.run(2, growing_cache_at_start, tmp_path, plan, deadline_seconds=240)
    assert all(words in each for each in told for words in SAYS)


# --- parameters that some passes do not use --------------------------------------------------------------------------


class Leaving(nn.Module):
    """Two parts, of which some passes leave out the second: the same on all ranks."""

    def __init__(self, are_left_out: Callable[[int], bool]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.are_left_out = are_left_out
        self.num_passes = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        is_left_out = self.are_left_out(self.num_passes)
        self.num_passes += 1
        made: torch.Tensor = self.first(inputs)
        return made if is_left_out else made + self.second(inputs).tanh()


def leaving(are_left_out: Callable[[int], bool]) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Leaving(are_left_out), nn.Linear(6, 5))


class Turning(nn.Module):
    """Some parts, of which each pass uses one: the same on all ranks."""

    def __init__(self, num_parts: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(num_parts))
        self.num_passes = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        part = self.parts[self.num_passes // 2 % len(self.parts)]
        self.num_passes += 1
        result: torch.Tensor = inputs + part(inputs).tanh()
        return result


def turning() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Sequential(Turning(3), Turning(2)), nn.Linear(6, 5))


def takes_turns(rank: int, folder: Path, num_micro_steps: int) -> None:
    found = []
    for name, plans in (("stayed", {}), ("changed", {2: WHOLE, 8: KEPT, 12: replace(WHOLE, bucket_cap_mb=1)})):
        torch.manual_seed(0)
        run = Retraining(
            rank, folder, FULL, name=name, model=turning(), num_micro_steps=num_micro_steps, averages=False
        )
        with run.trainer:
            run.train(18, plans)
            found.append((run.losses, run.state()))
    assert are_in_force(run) and run.plan.is_replicated
    assert found[0][0] == found[1][0]
    assert differing(found[0][1], found[1][1]) == []


@pytest.mark.parametrize("num_micro_steps", the_first([2, 1]))
def test_parameters_that_sharded_passes_have_left_out_may_be_left_out_under_ddp(
    ranks: RankPool, tmp_path: Path, num_micro_steps: int
) -> None:
    ranks.run(2, takes_turns, tmp_path, num_micro_steps, deadline_seconds=120)


def leaves_out_in_last_micro_steps(rank: int, folder: Path) -> None:
    found = []
    for name, plans in (("stayed", {}), ("changed", {2: WHOLE})):
        torch.manual_seed(0)
        model = leaving(lambda number: number % 2 == 1)
        run = Retraining(rank, folder, FULL, name=name, model=model, num_micro_steps=2, averages=False)
        with run.trainer:
            run.train(8, plans)
            found.append((run.losses, run.state()))
    assert run.plan.is_replicated
    assert found[0][0] == found[1][0]
    assert differing(found[0][1], found[1][1]) == []


def test_what_only_a_later_micro_step_of_a_sharded_step_leaves_out_is_seen_too(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, leaves_out_in_last_micro_steps, tmp_path, deadline_seconds=120)


def leaves_out_late(rank: int, folder: Path, plan: ParallelPlan) -> str:
    """What a step raises under no_shard that leaves out what no pass has left out before; it never happened."""
    run = Retraining(rank, folder, plan, model=leaving(lambda number: number == 8), averages=False)
    with run.trainer:
        run.train(8, {2: WHOLE})
        before = run.state()
        with pytest.raises(StepError) as caught:
            run.train(9)
        assert run.plan.is_replicated
        assert run.trainer.global_step == 8
        assert differing(run.state(), before) == []
        run.train(12)  # the next pass leaves out nothing
    return str(caught.value)


@pytest.mark.parametrize("plan", [FULL, WHOLE])
def test_what_ddp_was_not_told_to_look_for_is_said_in_the_step_that_leaves_it_out(
    ranks: RankPool, tmp_path: Path, plan: ParallelPlan
) -> None:
    for told in ranks.run(2, leaves_out_late, tmp_path, plan, deadline_seconds=120):
        assert "DDP, which the plan no_shard has put on, has not shared the gradients of all others" in told
        assert 'ParallelPlan(strategy="hybrid_shard", shard_degree=1)' in told
