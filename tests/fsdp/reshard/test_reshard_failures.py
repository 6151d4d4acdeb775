"""Memory that runs out, ranks that die, and versions of torch that are not known, while a model is spread otherwise."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.fsdp.reshard.fully_shard import groups_of
from elastic_ext.fsdp.reshard.sharded_model import Spread
from tests.support.ranks import RankPool
from tests.support.resharding import FULL, GRAD_OP, KEPT, WHOLE, Net, agreeing, all_of_it, change, make, take_step
from tests.support.thinning import the_first

# --- failures ---------------------------------------------------------------------------------------------------------


def _run_out(rank: int, old: ParallelPlan, new: ParallelPlan, at: str) -> str:
    """Memory is exhausted on one rank: in the first bucket, or later."""
    model = Net(width=7, num_blocks=2)
    spread, optimizer = make(old, model=model, bucket_bytes=200 if at == "a later one" else 8 << 20)
    take_step(spread, optimizer, 0, clears=False)
    before = all_of_it(model, optimizer)
    num_agreed, num_made = [0], [0]
    real = torch.Tensor.new_empty

    def failing(tensor: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        num_made[0] += tensor.device.type != "meta"
        if tensor.device.type != "meta" and num_made[0] > (0 if at == "the first" else 14):  # some for each bucket
            raise torch.OutOfMemoryError("no memory is left")
        return real(tensor, *given, **options)

    def agree(error: BaseException | None) -> None:
        num_agreed[0] += 1
        agreeing(error)

    made, _ = spread.transition(new, [optimizer])
    assert made is not None
    assert len(made.bucket_plan.buckets) > 2 or at == "the first"
    prepared = spread.prepare(new, [optimizer], [], [])
    if rank == 1:
        torch.Tensor.new_empty = failing  # type: ignore[method-assign, assignment]
    try:
        with pytest.raises(RuntimeError, match="a rank has failed"):
            spread.change(made, prepared, agree)
    finally:
        torch.Tensor.new_empty = real  # type: ignore[method-assign]
    assert num_agreed == [2 if at == "the first" else 1]
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


@pytest.mark.parametrize(("old", "new"), the_first([(FULL, KEPT), (WHOLE, FULL), (FULL, WHOLE)], 2))
def test_memory_that_runs_out_before_anything_moved_leaves_everything_as_it_was(
    ranks: RankPool, old: ParallelPlan, new: ParallelPlan
) -> None:
    assert ranks.run(2, _run_out, old, new, "the first") == ["went on"] * 2


@pytest.mark.parametrize(("old", "new"), the_first([(FULL, KEPT), (WHOLE, FULL), (FULL, WHOLE)], 2))
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
            return f"after {num_exchanged[0]}: {error}"
    return "nothing was raised"


def test_a_rank_that_dies_in_the_middle_of_a_change_is_an_error_on_the_others(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks.run_outcomes(2, _die, tmp_path)
    assert outcomes[1].exit_signal == signal.SIGKILL
    assert outcomes[0].ok, outcomes[0]
    assert outcomes[0].value.startswith("after 3: ")  # of the exchange that it died in, and none is begun after that
    assert "Connection closed by peer" in outcomes[0].value or "Connection reset by peer" in outcomes[0].value


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


OTHER_BUCKETS = ParallelPlan(strategy="no_shard", bucket_cap_mb=2.0)


def _then_another_torch(rank: int, old: ParallelPlan, new: ParallelPlan) -> tuple[bool, str]:
    spread, optimizer = make(old)
    take_step(spread, optimizer, 0)
    if new == GRAD_OP:
        spread.model.set_all_reduce_hook(lambda tensor: None)  # type: ignore[operator]
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        if new == OTHER_BUCKETS or (old, new) == (KEPT, WHOLE):
            patched.delattr(DistributedDataParallel, "_post_forward")
        elif new != GRAD_OP:
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
        (KEPT, WHOLE, "has no _post_forward in DistributedDataParallel"),
        (WHOLE, OTHER_BUCKETS, "has no _post_forward in DistributedDataParallel"),
    ],
)
def test_what_cannot_be_reached_is_refused_before_ranks_agree(
    ranks: RankPool, old: ParallelPlan, new: ParallelPlan, words: str
) -> None:
    for is_refused, told in ranks.run(2, _then_another_torch, old, new):
        assert is_refused is (words not in ("buckets", "recompute"))
        assert words in told
