"""Models that their users have spread, by hand or with accelerate: their plan is seen, and can be changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from elastic_ext import ElasticError
from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.fsdp.reshard.fully_shard import groups_of
from elastic_ext.fsdp.reshard.sharded_model import Spread
from tests.support.ranks import RankPool
from tests.support.resharding import FULL, GRAD_OP, KEPT, WHOLE, Net, all_of_it, by_blocks, change, take_step
from tests.support.retraining import MICRO_BATCH, RECOMPUTED, WIDTH, Retraining, are_in_force, differing, stayed
from tests.support.thinning import the_first
from tests.support.training import ResumableSlices, make_data, trainer_of
from tests.training.optimizers.test_accelerate import accelerate_forgotten

WRAPS: dict[str, Callable[[Any], Any]] = {
    "DDP": DistributedDataParallel,
    "DDP, by hand": lambda model: DistributedDataParallel(
        model, gradient_as_bucket_view=True, broadcast_buffers=False, bucket_cap_mb=1
    ),
    "fully_shard": by_blocks(),
    "fully_shard, kept": by_blocks(reshard_after_forward=False),
    "fully_shard of the whole": fully_shard,
}


def change_the_users(rank: int, folder: Path, how: str) -> None:
    given: dict[str, Any] = {"wrap": WRAPS[how], "num_micro_steps": 2, "averages": False}
    losses, state = stayed(rank, folder, None, 11, **given)
    run = Retraining(rank, folder, None, **given)
    assert run.plan.bucket_cap_mb == (1.0 if how == "DDP, by hand" else None)
    outer, names = run.model, list(run.model.state_dict())
    called = []
    outer.register_forward_hook(lambda *_: called.append("after"))
    outer.register_forward_pre_hook(lambda *_: called.append("before"))
    engines: list[Any] = []

    def ask(run: Retraining) -> None:
        engines.append(run.trainer._training.spread.engine)
        run.proposals.append(run.trainer.reshard(RECOMPUTED))

    with run.trainer:
        run.train(11, {1: WHOLE, 3: KEPT, 5: WHOLE, 7: ask})
        assert run.model is outer
        assert differing(run.state(), state) == []
    assert are_in_force(run)
    assert run.losses == losses
    if how == "DDP, by hand":
        assert (engines[0].gradient_as_bucket_view, engines[0].broadcast_buffers) == (True, False)
    assert list(outer.state_dict()) == names
    assert called == ["before", "after"] * 22


@pytest.mark.parametrize(
    "how",
    [
        "DDP, by hand",  # whose buckets are changed, before it is sharded
        "fully_shard",
        *(pytest.param(how, marks=pytest.mark.slow) for how in WRAPS if how not in ("DDP, by hand", "fully_shard")),
    ],
)
def test_a_model_that_its_user_has_spread_changes_as_well(ranks: RankPool, tmp_path: Path, how: str) -> None:
    ranks.run(2, change_the_users, tmp_path, how)


def change_static(rank: int, folder: Path, options: dict[str, Any], given: dict[str, Any]) -> None:
    """DDP that records its graph shares every pass of its first step, and of the first after it has come back."""
    given = {"num_micro_steps": 3, "averages": False, **given}

    def wrapped(**options: Any) -> dict[str, Any]:
        """In double precision, where rounding is far from what a pass that is shared wrongly would make."""
        loader = ResumableSlices(make_data(64, torch.float64), MICRO_BATCH, is_endless=True)
        return {**given, "loader": loader, "wrap": lambda model: DistributedDataParallel(model.double(), **options)}

    losses, state = stayed(rank, folder, None, 16, **wrapped())
    run = Retraining(rank, folder, None, **wrapped(static_graph=True, **options))
    is_static: list[bool] = []

    def ask(plan: ParallelPlan) -> Callable[[Retraining], None]:
        def asking(run: Retraining) -> None:
            engine = run.trainer._training.spread.engine
            is_static.append(engine is not None and engine.static_graph)
            run.proposals.append(run.trainer.reshard(plan))

        return asking

    small = replace(WHOLE, bucket_cap_mb=0.001)
    again = replace(small, activation_checkpoint="all")
    # recomputing is tried in a pass each time it is turned on, and comes into force a step later
    plans = {1: FULL, 3: WHOLE, 5: small, 7: again, 9: KEPT, 11: again, 14: replace(again, activation_checkpoint=0)}
    with run.trainer:
        run.train(16, {step: ask(plan) for step, plan in plans.items()})
        changed = run.state()
    assert are_in_force(run)
    assert is_static == [False, False, True, True, True, False, True]  # the user's own wrapper at first
    assert run.losses == pytest.approx(losses, rel=1e-10)
    assert state.keys() == changed.keys()
    for name, whole in state.items():
        torch.testing.assert_close(changed[name], whole, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({}, {}),
        pytest.param({"gradient_as_bucket_view": True}, {"num_micro_steps": 2}, marks=pytest.mark.slow),
        pytest.param({"broadcast_buffers": False}, {"sync_every_micro_step": True}, marks=pytest.mark.slow),
    ],
)
def test_ddp_with_a_static_graph_gathers_over_micro_steps_as_any_ddp_does(
    ranks: RankPool, tmp_path: Path, options: dict[str, Any], given: dict[str, Any]
) -> None:
    ranks.run(2, change_static, tmp_path, options, given)


def refuse_what_ddp_was_told(rank: int) -> None:
    def hooked() -> nn.Module:
        model = DistributedDataParallel(Net(WIDTH))
        model.register_comm_hook(dist.group.WORLD, allreduce_hook)
        return model

    cases: dict[str, Callable[[], nn.Module]] = {
        "a communication hook": hooked,
        "buckets that are sized one by one": lambda: DistributedDataParallel(Net(WIDTH), bucket_cap_mb_list=[1, 2]),
        "each by itself": lambda: nn.Sequential(*(DistributedDataParallel(nn.Linear(2, 2)) for _ in range(2))),
    }
    for words, make in cases.items():
        spread = Spread(make(), num_local=2)
        made, told = spread.transition(FULL)
        assert made is None
        assert words in told
        assert spread.plan is None


def test_ddp_that_could_not_be_made_again_is_refused_with_what_it_was_told(ranks: RankPool) -> None:
    ranks.run(2, refuse_what_ddp_was_told)


def refuse_flat(rank: int, folder: Path) -> str:
    model = FullyShardedDataParallel(Net(WIDTH), use_orig_params=True, device_id=torch.device("cpu"))
    run = Retraining(rank, folder, None, model=model, averages=False)
    with run.trainer:
        with pytest.raises(ElasticError, match="FSDP1"):
            run.trainer.reshard(FULL)
        proposal = run.trainer.propose({"parallelism.strategy": "no_shard"}, "to see")
        run.train(3)
    return str(proposal.refusal)


def test_fsdp1_is_refused_with_what_to_do(ranks: RankPool, tmp_path: Path) -> None:
    refusal = ranks.run(2, refuse_flat, tmp_path)[0]
    assert "restart the job" in refusal


def repair(rank: int, folder: Path) -> None:
    """What a user has set on sharded modules stands against a change, until it is set back before prepare()."""
    for is_repaired in (True, False):
        torch.manual_seed(0)
        model: Any = by_blocks()(Net(WIDTH))
        model.set_unshard_in_backward(False)
        run_dir = folder / str(is_repaired)
        run_dir.mkdir(exist_ok=True)
        trainer = trainer_of(run_dir, model, rank=rank, micro_batch_size=4, global_batch_size=8)
        if is_repaired:
            for module in (model, *model.blocks):
                module.set_unshard_in_backward(True)
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
        inputs, targets = make_data(4, torch.float32)
        answer = trainer.propose({"parallelism.strategy": "no_shard"}, "to see")
        with trainer:
            for _ in range(4):
                with trainer.step():
                    nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    optimizer.zero_grad()
        assert answer.outcome == ("in force" if is_repaired else "refused")
        assert is_repaired or "has been told how to unshard" in answer.refusal


def test_what_stands_against_a_change_is_looked_for_again_when_training_is_prepared(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(2, repair, tmp_path)


def accelerated(rank: int, folder: Path, is_sharded: bool, plans: dict[int, ParallelPlan]) -> list[float]:
    with accelerate_forgotten(rank, 2):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap") if is_sharded else None
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        if is_sharded:
            for state in (PartialState(), accelerator.state):
                state.distributed_type = DistributedType.FSDP
            accelerator.state.fsdp_plugin = plugin
        torch.manual_seed(0)
        plain: Any = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
        model, optimizer = accelerator.prepare(plain, AdamW(plain.parameters(), lr=0.1))
        data = make_data(64, torch.float32)
        trainer = trainer_of(
            folder, model, rank=rank, micro_batch_size=4, global_batch_size=16, accelerator=accelerator
        )
        optimizer = trainer.prepare(optimizer)
        losses, proposals = [], []
        with trainer:
            for number in range(16):
                with trainer.step():
                    rows = range(8 * (number % 8) + 4 * rank, 8 * (number % 8) + 4 * rank + 4)
                    loss = nn.functional.cross_entropy(model(data[0][list(rows)]), data[1][list(rows)])
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 100.0)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
                if trainer.global_step in plans and not trainer._session.steps.is_partial:
                    proposals.append(trainer.reshard(plans[trainer.global_step]))
        assert [each.refusal for each in proposals if each.outcome != "in force"] == []
        return losses


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_model_that_accelerate_has_prepared_changes_as_well(
    ranks: RankPool, tmp_path: Path, is_sharded: bool
) -> None:
    expected = ranks.run(2, accelerated, tmp_path, is_sharded, {})
    plans = {1: GRAD_OP, 3: WHOLE, 5: KEPT}
    for losses, plain in zip(ranks.run(2, accelerated, tmp_path, is_sharded, plans), expected, strict=True):
        assert losses == pytest.approx(plain, rel=1e-5)


TOLD: dict[str, Any] = {"gradient_as_bucket_view": True, "broadcast_buffers": False}
MIXED = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)


def _users_own(rank: int, how: str) -> None:
    torch.manual_seed(0)
    model: Any = Net()
    outer = model
    if how == "DDP":
        outer = DistributedDataParallel(model, **TOLD)
    else:
        policy = MIXED if how == "mixed" else MixedPrecisionPolicy()
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
        policies = {id(group): group.mp_policy for group in groups}
        blocks = [group for part in model.blocks for group in groups_of(part._get_fsdp_state())]
        assert {policies.pop(id(group)) for group in blocks} == {policy}
        assert set(policies.values()) == {MixedPrecisionPolicy()}
        assert {(group.gradient_divide_factor, group.force_sum_reduction_for_comms) for group in groups} == {
            (4.0, True)
        }
        for name, value in (("reduce_scatter_max_input_buffers", 3), ("reduce_scatter_unused_params", True)):
            assert all(getattr(group, name, value) == value for group in groups)
        with pytest.raises(ValueError, match="DDP does not know of"):
            change(spread, WHOLE, optimizer)
    else:
        for cap in (None, 0.01):  # the second one makes DDP anew by itself
            change(spread, ParallelPlan(strategy="no_shard", bucket_cap_mb=cap), optimizer)
            assert spread.engine is not None
            assert {name: getattr(spread.engine, name) for name in TOLD} == TOLD
            take_step(spread, optimizer, 9)
    spread.close()


@pytest.mark.parametrize("how", the_first(["DDP", "mixed", "fully_shard"], 2))
def test_a_model_that_its_user_has_spread_is_known_and_changed(ranks: RankPool, how: str) -> None:
    ranks.run(2, _users_own, how)
