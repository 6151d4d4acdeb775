"""Whole trainings whose model is spread otherwise while they go on: as if nothing had happened, or refused by all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import TensorDataset

from elastic_ext import CheckpointInterval, ElasticDataLoader, ElasticError
from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.fsdp.reshard import rewire
from tests.support.faults import PlantedFault
from tests.support.loops import put, seen_by
from tests.support.ranks import RankPool
from tests.support.resharding import FULL, GRAD_OP, KEPT, WHOLE
from tests.support.retraining import (
    TOUR,
    WIDTH,
    Retraining,
    are_in_force,
    differing,
    needs_passes_taken_back,
    resharded,
    stayed,
)
from tests.support.training import make_data

# --- losses are those of a training that never changed ---------------------------------------------------------------


def go_through(rank: int, folder: Path, start: ParallelPlan, given: dict[str, Any]) -> None:
    losses, state = stayed(rank, folder, FULL, 15, **given)
    run = Retraining(rank, folder, start, **given)
    with run.trainer:
        run.train(15, TOUR)
        assert differing(run.state(), state) == []
    assert are_in_force(run)
    assert run.losses == losses


@pytest.mark.parametrize(
    ("start", "given"),
    [
        (WHOLE, {"num_micro_steps": 2, "rollback": "full"}),
        pytest.param(WHOLE, {"num_micro_steps": 4}, marks=pytest.mark.slow),
        pytest.param(FULL, {"num_micro_steps": 2, "rollback": "full"}, marks=pytest.mark.slow),
        pytest.param(FULL, {}, marks=pytest.mark.slow),
    ],
)
def test_losses_and_all_state_are_those_of_a_training_that_never_changed(
    ranks: RankPool, tmp_path: Path, start: ParallelPlan, given: dict[str, Any]
) -> None:
    ranks.run(2, go_through, tmp_path, start, given)


def go_through_otherwise(rank: int, folder: Path, num_ranks: int, given: dict[str, Any]) -> None:
    """A norm is added up over what each rank has, and the gradients of four ranks, in another order by another plan."""
    losses, _ = stayed(rank, folder, FULL, 9, **given)
    run = Retraining(rank, folder, FULL, **given)
    with run.trainer:
        hybrid = ParallelPlan(strategy="hybrid_shard", shard_degree=2) if num_ranks == 4 else GRAD_OP
        run.train(9, {1: WHOLE, 4: hybrid})
    assert are_in_force(run)
    assert run.losses == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize(
    ("num_ranks", "given"),
    [
        (2, {"num_micro_steps": 2, "max_norm": 0.5}),
        pytest.param(2, {"num_micro_steps": 3, "sync_every_micro_step": True}, marks=pytest.mark.slow),
        pytest.param(4, {"num_micro_steps": 2}, marks=pytest.mark.slow),
    ],
)
def test_what_is_added_up_in_another_order_differs_by_that_alone(
    ranks: RankPool, tmp_path: Path, num_ranks: int, given: dict[str, Any]
) -> None:
    ranks.run(num_ranks, go_through_otherwise, tmp_path, num_ranks, given)


def go_through_bf16(rank: int, folder: Path) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)

    def wrap(_: Any) -> Any:
        model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
        for block in model:
            fully_shard(block, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)

    losses, state = stayed(rank, folder, None, 9, wrap=wrap, num_micro_steps=2)
    run = Retraining(rank, folder, None, wrap=wrap, num_micro_steps=2)
    with run.trainer:
        run.train(9, {1: GRAD_OP, 3: KEPT, 5: WHOLE, 7: FULL})
        assert differing(run.state(), state) == []
    assert run.losses == losses
    assert [each.outcome for each in run.proposals] == ["in force", "in force", "refused", "in force"]
    assert "which DDP does not know of" in run.proposals[2].refusal


def test_a_policy_of_lower_precision_stays_and_keeps_the_model_sharded(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, go_through_bf16, tmp_path)


def go_through_alone(rank: int, folder: Path) -> None:
    losses, state = stayed(rank, folder, None, 9)
    run = Retraining(rank, folder, WHOLE)
    with run.trainer:
        run.train(9, {1: FULL, 3: WHOLE, 5: KEPT})
        assert run.plan == KEPT
        assert differing(run.state(), state) == []
    assert are_in_force(run)
    assert run.losses == losses


def test_one_rank_changes_its_plan_too(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, go_through_alone, tmp_path)


def parallelized_as_said(rank: int, folder: Path) -> None:
    """With ``use_fsdp`` a model is sharded by ``prepare``; no_shard is refused, and so is one that nobody shards."""
    with pytest.raises(ValueError, match="use_fsdp is True, and no_shard shards nothing; choose another strategy"):
        Retraining(rank, folder, WHOLE, name="replicated", use_fsdp=True)
    with pytest.raises(ValueError, match=r"or trainer\.parallelize\(model, ParallelPlan"):
        Retraining(rank, folder, None, name="unsharded", use_fsdp=True)
    run = Retraining(rank, folder, FULL, use_fsdp=True)
    with run.trainer:
        run.train(6, {2: WHOLE})  # said of how training begins
        assert run.plan == WHOLE


def test_a_trainer_with_use_fsdp_takes_what_parallelize_has_sharded(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, parallelized_as_said, tmp_path)


def test_without_parallelize_a_process_by_itself_trains_as_ever_and_a_plan_is_refused(tmp_path: Path) -> None:
    run = Retraining(0, tmp_path, None)
    with run.trainer:
        with pytest.raises(ElasticError, match=r"call trainer\.parallelize"):
            run.trainer.reshard(FULL)
        proposal = run.trainer.propose({"parallelism.strategy": "full_shard"}, "to see")
        run.train(2)
        assert run.trainer.reshard_report is None
    assert proposal.outcome == "refused"
    assert "call trainer.parallelize" in proposal.refusal


# --- how it is asked for, agreed on and told -------------------------------------------------------------------------


def ask_in_every_way(rank: int, folder: Path) -> tuple[list[str], list[Any]]:
    with seen_by() as seen:
        run = Retraining(rank, folder, FULL)
        trainer = run.trainer
        follower = trainer._session.follower
        at_step: list[tuple[int, str]] = []

        def note(_: Retraining) -> None:
            at_step.append((trainer.global_step, run.plan.strategy))

        def by_file(_: Retraining) -> None:
            plan = {"strategy": "no_shard", "activation_checkpoint": 0.5}
            put(run.folder, rank, {"version": 1, "parallelism": plan, "apply_at_step": 8}, seen_by=follower)

        def by_file_without(_: Retraining) -> None:
            put(run.folder, rank, {"version": 2}, seen_by=follower)

        def by_one_rank(_: Retraining) -> None:
            if rank == 1:
                run.proposals.append(trainer.reshard(KEPT))

        def by_keys(_: Retraining) -> None:
            run.proposals.append(trainer.propose({"parallelism.unit": "whole"}, "fewer units"))

        with trainer:
            run.train(2, {1: by_file}).train(7, {7: note}).train(8, {8: note})
            report = trainer.reshard_report
            assert report is not None
            assert report.replaced == 25
            assert report.extra_bytes > 0 < report.seconds
            run.train(12, {9: by_file_without, 12: note}).train(15, {12: by_one_rank, 15: note})
            run.train(18, {15: by_keys})
            assert run.plan == ParallelPlan(strategy="hybrid_shard", shard_degree=1, unit="whole")
        assert are_in_force(run) == (rank == 1) or rank == 0
        assert at_step == [(7, "full_shard"), (8, "no_shard"), (12, "full_shard"), (15, "hybrid_shard")]
    return [line for line in seen.log if " -> " in line and " in 0." in line], resharded(run.folder, rank)


def test_a_plan_comes_by_the_config_file_by_one_rank_and_by_keys_and_is_told(ranks: RankPool, tmp_path: Path) -> None:
    (log, events), (other_log, other_events) = ranks.run(2, ask_in_every_way, tmp_path)
    assert [line.split(" in 0.")[0] for line in log] == [
        "INFO the model was resharded: full_shard, unit 1 -> no_shard, 50% recomputed",
        "INFO the model was resharded: no_shard, 50% recomputed -> full_shard, unit 1",
        "INFO the model was resharded: full_shard, unit 1 -> hybrid_shard of 1, unit 1",
        "INFO the model was resharded: hybrid_shard of 1, unit 1 -> hybrid_shard of 1, unit whole",
    ]
    assert other_log == []
    for told in (events, other_events):
        assert told[0]["step"] == 8
        assert told[0]["details"]["new"]["parallelism.strategy"] == "no_shard"
        assert told[0]["details"]["replaced"] == 25
        assert "full_shard, unit 1 -> no_shard" in told[0]["text"]


def leave_to_torch(rank: int, folder: Path) -> None:
    ahead, small = replace(FULL, prefetch=1), replace(WHOLE, bucket_cap_mb=0.01)
    run = Retraining(rank, folder, ahead)
    seen: dict[int, ParallelPlan] = {}
    depths: list[int] = []

    def ask(plan: ParallelPlan) -> Callable[[Retraining], None]:
        def asking(run: Retraining) -> None:
            units = rewire.survey(run.model).units
            depths.append(max((len(unit.forward_prefetch) for unit in units), default=0))
            seen[run.trainer.global_step] = run.plan
            run.proposals.append(run.trainer.reshard(plan))

        return asking

    with run.trainer:
        run.train(16, {1: ask(FULL), 4: ask(ahead), 7: ask(small), 10: ask(WHOLE), 13: ask(small)})
        assert run.trainer.config.communication.bucket_cap_mb == 0.01
        assert run.trainer.config.parallelism.prefetch == "torch"
    assert are_in_force(run)
    assert [*seen.values(), run.plan] == [ahead, FULL, ahead, small, WHOLE, small]
    assert depths == [1, 0, 1, 0, 0]


def test_what_a_plan_leaves_to_torch_is_left_to_torch_again(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, leave_to_torch, tmp_path)


def refuse_on_one(rank: int, folder: Path) -> tuple[str, list[str]]:
    losses, state = stayed(rank, folder, FULL, 6)
    with seen_by() as seen:
        run = Retraining(rank, folder, FULL)
        held = list(run.model.parameters()) if rank == 1 else []
        with run.trainer:
            run.train(6, {1: WHOLE})
            assert run.plan == FULL
            assert run.trainer.reshard_report is None
            assert differing(run.state(), state) == []
            assert run.losses == losses
            held.clear()
            run.train(8, {6: WHOLE})
            assert run.plan == WHOLE
    return run.proposals[0].refusal, [line for line in seen.log if line.startswith("WARNING")]


def test_a_list_of_parameters_on_one_rank_keeps_all_from_changing(ranks: RankPool, tmp_path: Path) -> None:
    (refusal, log), (other, _) = ranks.run(2, refuse_on_one, tmp_path)
    assert refusal == other
    assert refusal.startswith("rank 1: parallelism: a parameter is also held by a list of 25")
    assert any(refusal in line for line in log)


def change_all_at_once(rank: int, folder: Path) -> tuple[list[float], list[int]]:
    """The plan, the size of micro-batches and the workers by one version; samples come once each."""
    data = make_data(64, torch.float32)
    torch.manual_seed(3)
    loader = ElasticDataLoader(TensorDataset(*data), 2, shuffle=True, seed=5)
    run = Retraining(rank, folder, WHOLE, loader=loader, global_batch_size=8, averages=False)
    follower = run.trainer._session.follower
    sizes = []
    with run.trainer:
        for epoch in range(2):
            with run.trainer.epoch(epoch):
                for inputs, targets in loader:
                    sizes.append(len(inputs))
                    run.micro_step(inputs, targets)
                    if run.trainer.global_step == 2 and not run.trainer._session.steps.is_partial:
                        told = {"parallelism": {"strategy": "full_shard", "unit": 2}}
                        told["dataloader"] = {"batch_size": 4, "num_workers": 1}
                        put(run.folder, rank, {"version": 1, **told}, seen_by=follower)
        assert run.plan == ParallelPlan(strategy="full_shard", unit=2)
        assert run.trainer.global_step == 16
        return [float(whole.sum()) for whole in run.state().values()], sizes


def test_micro_batches_and_workers_change_with_the_plan_in_one_version(ranks: RankPool, tmp_path: Path) -> None:
    (state, sizes), (other, other_sizes) = ranks.run(2, change_all_at_once, tmp_path)
    assert state == other
    assert sizes == other_sizes
    assert sizes[:4] == [2] * 4
    assert sizes[-4:] == [4] * 4
    assert sum(sizes) == 64


# --- steps that fail, are undone, or are taken again ------------------------------------------------------------------


def fail_after_changes(rank: int, folder: Path) -> None:
    losses, state = stayed(rank, folder, FULL, 14, num_micro_steps=2)
    run = Retraining(rank, folder, FULL, num_micro_steps=2, rollback="full")
    recomputed = [
        replace(WHOLE, activation_checkpoint=ratio) for ratio in (0.4, 1.0)
    ]  # DDP stays, and what it waits for
    plans = {1: WHOLE, 3: FULL, 5: KEPT, 7: WHOLE, 9: recomputed[0], 11: recomputed[1]}
    trainer = run.trainer
    to_do = {2: (0, "backward"), 3: (1, "before"), 4: (0, "backward"), 5: (1, "backward"), 6: (0, "called")}
    to_do |= {7: (1, "called"), 8: (0, "backward"), 9: (0, "before")}
    to_do |= dict.fromkeys(range(10, 14), (1, "called"))
    real = run.micro_step

    def micro_step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        step = trainer.global_step
        index, how = to_do.get(step, (-1, ""))
        if index != trainer._session.steps.is_partial:
            real(inputs, targets)
            return
        del to_do[step]
        try:
            with trainer.step():
                loss = nn.functional.cross_entropy(run.model(inputs), targets)
                if how == "called":
                    trainer.rollback()
                    return
                if how == "backward":
                    loss.backward()  # type: ignore[no-untyped-call]
                raise PlantedFault(how)
        except PlantedFault:
            pass
        finally:
            del run.losses[2 * step :]  # of micro-steps that never happened

    run.micro_step = micro_step  # type: ignore[method-assign]
    with trainer:
        run.train(14, plans)  # in force in the middle of a step that is taken again
        assert differing(run.state(), state) == []
    assert are_in_force(run)
    assert not to_do
    assert run.losses == losses


@needs_passes_taken_back
def test_steps_that_fail_or_are_rolled_back_right_after_a_change_are_taken_again(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(2, fail_after_changes, tmp_path)


def rewind_across(rank: int, folder: Path) -> None:
    losses, state = stayed(rank, folder, FULL, 9)
    given: dict[str, Any] = {"shared_storage_path": folder / "kept", "checkpoint_interval": CheckpointInterval(steps=1)}
    run = Retraining(rank, folder, FULL, keep_previous=True, overlap_saving=True, **given)
    with run.trainer:
        run.train(5, {1: WHOLE, 3: KEPT})
        assert run.plan == KEPT
        assert run.trainer.rewind(1).name == "step_1"
        assert run.plan == KEPT
        del run.losses[1:]
        run.train(5, {2: WHOLE})
        assert run.plan == WHOLE
        run.trainer.rewind(2)
        del run.losses[2:]
        run.train(7, {4: FULL})
        assert run.plan == FULL
        run.trainer.rewind(4)
        del run.losses[4:]
        run.train(9)
        assert differing(run.state(), state) == []
    assert are_in_force(run)
    assert run.losses == losses


def test_rewinding_across_a_change_loads_into_the_plan_in_force(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, rewind_across, tmp_path)
