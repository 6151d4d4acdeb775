"""Whole trainings whose model is spread otherwise while they go on: as if nothing had happened, or refused by all."""

from __future__ import annotations

import copy
import gc
import io
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, Adafactor, AdamW
from torch.utils.data import TensorDataset

from elastic_ext import CheckpointInterval, ElasticDataLoader, ElasticError
from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.leaving import EXIT_STATUS
from tests.faults import PlantedFault
from tests.loops import put, seen_by
from tests.ranks import RankPool
from tests.resharding import FULL, GRAD_OP, KEPT, WHOLE, Net
from tests.retraining import WIDTH, Retraining
from tests.test_accelerate import accelerate_forgotten
from tests.training import make_data, trainer_of

RECOMPUTED = ParallelPlan(strategy="full_shard", unit=2, activation_checkpoint="all", prefetch=1)
TOUR = {1: WHOLE, 3: KEPT, 5: WHOLE, 7: GRAD_OP, 9: RECOMPUTED, 11: WHOLE, 13: FULL}
"""After which step for which plan is asked; it is in force two steps later at the latest."""
SHORT_TOUR = {1: WHOLE, 3: FULL, 5: WHOLE}

State = dict[str, torch.Tensor]


def differing(one: State, other: State) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def stayed(rank: int, folder: Path, plan: ParallelPlan | None, until: int, **given: Any) -> tuple[list[float], State]:
    """A training that never changes: its losses, and what came of it."""
    run = Retraining(rank, folder, plan, name="stayed", **given)
    with run.trainer:
        run.train(until)
        return run.losses, run.state()


def are_in_force(run: Retraining) -> bool:
    """Every plan that was asked for."""
    assert [each.refusal for each in run.proposals if each.outcome != "in force"] == []
    return bool(run.proposals)


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
        (WHOLE, {"num_micro_steps": 4}),
        (FULL, {"num_micro_steps": 2, "rollback": "full"}),
        pytest.param(FULL, {}, marks=pytest.mark.slow),
        pytest.param(WHOLE, {"num_micro_steps": 3, "sync_every_micro_step": True}, marks=pytest.mark.slow),
    ],
)
def test_losses_and_all_state_are_those_of_a_training_that_never_changed(
    ranks: RankPool, tmp_path: Path, start: ParallelPlan, given: dict[str, Any]
) -> None:
    ranks.run(2, go_through, tmp_path, start, given)


def go_through_clipped(rank: int, folder: Path, num_ranks: int) -> None:
    """A norm is added up over what each rank has: in another order under another plan. Four ranks add gradients so."""
    given: dict[str, Any] = {"max_norm": 0.5 if num_ranks == 2 else None, "num_micro_steps": 2}
    losses, _ = stayed(rank, folder, FULL, 9, **given)
    run = Retraining(rank, folder, FULL, **given)
    with run.trainer:
        hybrid = ParallelPlan(strategy="hybrid_shard", shard_degree=2) if num_ranks == 4 else GRAD_OP
        run.train(9, {1: WHOLE, 4: hybrid})
    assert are_in_force(run)
    assert run.losses == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_clipped_and_on_four_ranks_they_differ_by_the_order_of_sums(
    ranks: RankPool, tmp_path: Path, num_ranks: int
) -> None:
    ranks.run(num_ranks, go_through_clipped, tmp_path, num_ranks)


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
    lines = (run.folder / str(rank) / f"events-{rank}.jsonl").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event["kind"] == "resharded"]
    return [line for line in seen.log if " -> " in line and " in 0." in line], events


def test_a_plan_comes_by_the_config_file_by_one_rank_and_by_keys_and_is_told(ranks: RankPool, tmp_path: Path) -> None:
    (log, events), (other_log, other_events) = ranks.run(2, ask_in_every_way, tmp_path)
    assert [line.split(" in 0.")[0] for line in log] == [
        "INFO full_shard, unit 1 -> no_shard, 50% recomputed",
        "INFO no_shard, 50% recomputed -> full_shard, unit 1",
        "INFO full_shard, unit 1 -> hybrid_shard of 1, unit 1",
        "INFO hybrid_shard of 1, unit 1 -> hybrid_shard of 1, unit whole",
    ]
    assert other_log == []
    for told in (events, other_events):
        assert told[0]["step"] == 8
        assert told[0]["details"]["new"]["parallelism.strategy"] == "no_shard"
        assert told[0]["details"]["replaced"] == 25
        assert "full_shard, unit 1 -> no_shard" in told[0]["text"]


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
    losses, state = stayed(rank, folder, FULL, 10, num_micro_steps=2)
    run = Retraining(rank, folder, FULL, num_micro_steps=2, rollback="full")
    trainer = run.trainer
    to_do = {2: (0, "backward"), 3: (1, "before"), 4: (0, "backward"), 5: (1, "backward"), 6: (0, "called")}
    to_do |= {7: (1, "called"), 8: (0, "backward"), 9: (0, "before")}
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
        run.train(10, {1: WHOLE, 3: FULL, 5: KEPT, 7: WHOLE})  # in force in the middle of a step that is taken again
        assert differing(run.state(), state) == []
    assert are_in_force(run)
    assert not to_do
    assert run.losses == losses


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


# --- checkpoints ------------------------------------------------------------------------------------------------------


def save_through(rank: int, folder: Path, given: dict[str, Any]) -> dict[int, State]:
    """Of some steps what was there."""
    kept: dict[int, State] = {}
    run = Retraining(
        rank,
        folder,
        FULL,
        shared_storage_path=folder / "kept",
        checkpoint_interval=CheckpointInterval(steps=1),
        **given,
    )

    def keep(run: Retraining) -> None:
        kept[run.trainer.global_step] = run.state()

    at = {
        step: lambda run, step=step: (keep(run), run.proposals.append(run.trainer.reshard(TOUR[step]))) for step in TOUR
    }
    with run.trainer:
        run.train(15, {**at, 15: keep})
    assert are_in_force(run)
    return kept


def go_on_from(rank: int, folder: Path, plan: ParallelPlan, step: int, expected: State) -> None:
    run = Retraining(
        rank, folder, plan, name=f"from {step}", shared_storage_path=folder / "kept", save_on_signals=False
    )
    with run.trainer:
        if run.trainer.global_step != step:
            run.trainer.rewind(step)
        assert run.plan == plan  # what the script says wins over the config that was saved
        assert differing(run.state(), expected) == []
        if run.num_ranks <= 2:  # more have too few samples each for a normalisation
            run.train(step + 2)


@pytest.mark.parametrize(
    "given",
    [
        {"overlap_saving": True, "keep_previous": True},
        pytest.param({"overlap_saving": False}, marks=pytest.mark.slow),
        pytest.param({"save_in_background": False}, marks=pytest.mark.slow),
    ],
)
def test_checkpoints_of_all_plans_load_into_each_other_on_any_number_of_ranks(
    ranks: RankPool, tmp_path: Path, given: dict[str, Any]
) -> None:
    kept = ranks.run(2, save_through, tmp_path, given)[0]
    assert sorted(kept) == [1, 3, 5, 7, 9, 11, 13, 15]
    ranks.run(2, go_on_from, tmp_path, WHOLE, 15, kept[15])
    ranks.run(1, go_on_from, tmp_path, FULL, 11, kept[11])
    ranks.run(4, go_on_from, tmp_path, GRAD_OP, 5, kept[5])
    ranks.run(2, go_on_from, tmp_path, KEPT, 3, kept[3])


def go_on_by_file(rank: int, folder: Path, name: str, until: int) -> tuple[str, State, list[str]]:
    (folder / name / str(rank)).mkdir(parents=True)
    if name == "file":
        put(folder / name, rank, {"version": 1, "parallelism": {"strategy": "no_shard"}})
    run = Retraining(rank, folder, KEPT, name=name, shared_storage_path=folder / "kept", save_on_signals=False)
    seen = [run.plan.strategy]

    def without(_: Retraining) -> None:
        put(run.folder, rank, {"version": 2}, seen_by=run.trainer._session.follower)

    with run.trainer:
        run.train(until, {until - 3: without} if name == "file" else None)
        seen.append(run.plan.strategy)
        run.trainer.save_checkpoint()
        return str(run.plan.strategy), run.state(), seen


def test_the_file_wins_over_the_script_and_the_script_over_what_was_saved(ranks: RankPool, tmp_path: Path) -> None:
    (first, _, _), _ = ranks.run(2, go_on_by_file, tmp_path, "first", 2)
    assert first == "hybrid_shard"
    (_, _, seen), _ = ranks.run(2, go_on_by_file, tmp_path, "file", 7)
    assert seen == ["no_shard", "hybrid_shard"]  # and what a file leaves out is what the script says


def leave(rank: int, folder: Path) -> None:
    run = Retraining(
        rank, folder, FULL, shared_storage_path=folder / "kept", checkpoint_interval=CheckpointInterval(steps=100)
    )
    with run.trainer:
        run.train(4, {2: WHOLE})
        assert run.plan == WHOLE
        if rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        run.train(100)


def step_to_go_on_from(rank: int, folder: Path) -> int:
    run = Retraining(rank, folder, GRAD_OP, name="after", shared_storage_path=folder / "kept", save_on_signals=False)
    with run.trainer:
        step: int = run.trainer.global_step
        run.train(step + 2)
    return step


def test_a_signal_right_after_a_change_saves_what_there_is(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks.run_outcomes(2, leave, tmp_path)
    assert [outcome.error and outcome.error.message for outcome in outcomes] == [str(EXIT_STATUS)] * 2, outcomes
    for step in ranks.run(2, step_to_go_on_from, tmp_path):
        assert 4 <= step < 10


# --- what was registered ----------------------------------------------------------------------------------------------


def refuse_registered(rank: int, folder: Path) -> None:
    for name, start, registered, why in (
        ("alone", FULL, lambda model: next(model.parameters()).detach().clone(), "by itself"),
        ("module", WHOLE, lambda model: model.state_dict(), "module's state_dict"),
    ):
        run = Retraining(rank, folder, start, name=name, averages=False)
        run.trainer.register_state("own", registered(run.model))
        with run.trainer:
            run.train(4, {1: WHOLE if start is FULL else FULL})
            assert run.plan == start
            assert why in run.proposals[0].refusal
            if start is FULL:
                run.train(7, {4: KEPT})
                assert run.plan == KEPT


def test_what_could_not_follow_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, refuse_registered, tmp_path)


def hold_parameters(rank: int, folder: Path) -> None:
    """Parameters themselves, under two keys and with something else beside them."""
    run = Retraining(rank, folder, WHOLE, averages=False)
    held = {"one": run.model.embed.weight, "two": run.model.head.weight, "count": torch.zeros(3)}
    count = held["count"]
    run.trainer.register_state("held", held)
    with run.trainer:
        run.train(4, {1: FULL})
        assert held["one"] is held["two"] is run.model.embed.weight
        run.train(7, {4: WHOLE})
        assert held["one"] is held["two"] is run.model.embed.weight
        assert held["count"] is count
    assert are_in_force(run)


def test_registered_parameters_are_those_that_are_trained(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, hold_parameters, tmp_path)


# --- models and optimizers of many kinds ------------------------------------------------------------------------------


def _by_blocks(**options: Any) -> Callable[[Any], Any]:
    def wrap(model: Any) -> Any:
        for block in model.blocks:
            fully_shard(block, **options)
        return fully_shard(model, **options)

    return wrap


WRAPS: dict[str, Callable[[Any], Any]] = {
    "DDP": DistributedDataParallel,
    "DDP, by hand": lambda model: DistributedDataParallel(
        model, find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=1
    ),
    "fully_shard": _by_blocks(),
    "fully_shard, kept": _by_blocks(reshard_after_forward=False),
    "fully_shard of the whole": fully_shard,
}


def change_the_users(rank: int, folder: Path, how: str) -> None:
    given: dict[str, Any] = {"wrap": WRAPS[how], "num_micro_steps": 2, "averages": False}
    losses, state = stayed(rank, folder, None, 11, **given)
    run = Retraining(rank, folder, None, **given)
    outer, names = run.model, list(run.model.state_dict())
    called = []
    outer.register_forward_hook(lambda *_: called.append("after"))
    outer.register_forward_pre_hook(lambda *_: called.append("before"))
    with run.trainer:
        run.train(11, {1: WHOLE, 3: KEPT, 5: WHOLE, 7: RECOMPUTED})
        assert run.model is outer
        assert differing(run.state(), state) == []
    assert are_in_force(run)
    assert run.losses == losses
    assert list(outer.state_dict()) == names
    assert called == ["before", "after"] * 22


@pytest.mark.parametrize(
    "how",
    [
        "DDP",
        "fully_shard",
        *(pytest.param(how, marks=pytest.mark.slow) for how in WRAPS if how not in ("DDP", "fully_shard")),
    ],
)
def test_a_model_that_its_user_has_spread_changes_as_well(ranks: RankPool, tmp_path: Path, how: str) -> None:
    ranks.run(2, change_the_users, tmp_path, how)


def refuse_flat(rank: int, folder: Path) -> str:
    model = FullyShardedDataParallel(Net(WIDTH), use_orig_params=True, device_id=torch.device("cpu"))
    run = Retraining(rank, folder, None, model=model, averages=False)
    with run.trainer:
        with pytest.raises(ElasticError, match="FSDP1"):
            run.trainer.reshard(FULL)
        proposal = run.trainer.propose({"parallelism.strategy": "no_shard"}, "to see")
        run.train(3)
    return proposal.refusal


def test_fsdp1_is_refused_with_what_to_do(ranks: RankPool, tmp_path: Path) -> None:
    refusal = ranks.run(2, refuse_flat, tmp_path)[0]
    assert "start the job anew" in refusal


def accelerated(rank: int, folder: Path, is_sharded: bool, plans: dict[int, ParallelPlan]) -> list[float]:
    with accelerate_forgotten(rank, 2):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap") if is_sharded else None
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        if is_sharded:
            from accelerate.state import PartialState

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


def compiled(rank: int, folder: Path, is_whole: bool) -> int:
    torch._dynamo.reset()
    frames = torch._dynamo.utils.counters["frames"]

    def wrap(model: Any) -> Any:
        if is_whole:
            return torch.compile(model, backend="eager")
        for block in model.blocks:
            block.compile(backend="eager")
        return model

    losses, state = stayed(rank, folder, FULL, 9, averages=False)
    run = Retraining(rank, folder, FULL, wrap=wrap, averages=False)
    with run.trainer:
        before: list[int] = []
        run.train(9, {1: lambda _: before.append(frames["total"]), 2: WHOLE, 4: GRAD_OP, 6: WHOLE})
        assert differing(run.state(), state) == []
    assert are_in_force(run)
    assert run.losses == losses
    return int(frames["total"] - before[0])


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_blocks_give_the_same_numbers_and_are_compiled_once_more(
    ranks: RankPool, tmp_path: Path, is_whole: bool
) -> None:
    for num_compiled in ranks.run(2, compiled, tmp_path, is_whole):
        assert num_compiled <= 3  # once for each class of parameters that they have not had


class Adversaries(nn.Module):
    """Two parts, an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, WIDTH))
        self.judge = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.judge(self.maker(noise))
        return result


def train_adversaries(rank: int, folder: Path, plans: dict[int, ParallelPlan]) -> list[float]:
    torch.manual_seed(0)
    model = Adversaries()
    trainer = trainer_of(folder, model, rank=rank, micro_batch_size=4, global_batch_size=8)
    trainer.parallelize(model, FULL)
    maker = AdamW(model.maker.parameters(), lr=0.01)
    judge = SGD(model.judge.parameters(), lr=0.1, momentum=0.9)
    makers, judges = trainer.prepare([maker, judge])
    losses = []
    with trainer:
        for number in range(10):
            noise = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * number + rank))
            with trainer.step():
                loss = model(noise).square().mean()
                loss.backward()
                for optimizer in (makers, judges):
                    optimizer.step()
                    optimizer.zero_grad()
            losses.append(loss.item())
            if number in plans:
                trainer.reshard(plans[number])
    assert trainer.global_step == 10
    assert set(maker.state) == set(model.maker.parameters())
    return losses


def test_two_optimizers_keep_their_parts(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(2, train_adversaries, tmp_path, {})
    assert ranks.run(2, train_adversaries, tmp_path, {1: WHOLE, 3: KEPT, 5: WHOLE, 7: FULL}) == expected


def refuse_container(rank: int, folder: Path) -> None:
    for plan in (WHOLE, FULL):
        model = nn.ModuleDict({"maker": nn.Linear(4, 6), "judge": nn.Linear(6, 1)})
        with pytest.raises(ValueError, match="only holds others and is not called"):
            trainer_of(folder, model, rank=rank).parallelize(model, plan)


def test_a_container_that_nobody_calls_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, refuse_container, tmp_path)


def with_unlike_optimizers(rank: int, folder: Path) -> None:
    makes: dict[str, Callable[[Any], Any]] = {
        "LBFGS": lambda parameters: LBFGS(parameters, lr=1e-3, max_iter=1),
        "Adafactor": lambda parameters: Adafactor(parameters, lr=1e-3),
        "lists": lambda parameters: Listing(parameters, lr=1e-3),
    }
    for name, make in makes.items():
        run = Retraining(rank, folder, WHOLE, name=name, make_optimizer=make, averages=False)
        if name == "LBFGS":  # which takes a closure
            step = run.optimizer.step
            run.optimizer.step = lambda step=step: step(lambda: torch.zeros(()))
        with run.trainer:
            run.train(4, {1: FULL})
            assert run.plan == WHOLE
            assert run.proposals[0].outcome == "refused", name
            assert run.proposals[0].refusal


class Listing(SGD):
    """Keeps tensors of each parameter where nobody looks for them."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for part in group["params"]:
                self.state[part].setdefault("past", []).append(part.detach().clone())
        return super().step(closure)


def test_optimizers_whose_state_could_not_follow_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, with_unlike_optimizers, tmp_path)


# --- what a user does with the model ----------------------------------------------------------------------------------


def use_the_model(rank: int, folder: Path) -> None:
    run = Retraining(rank, folder, WHOLE)
    model = run.model
    names, inputs = list(Net(WIDTH).state_dict()), make_data(4, torch.float32)[0]
    with run.trainer:
        for plan in (WHOLE, FULL, WHOLE):
            step = run.trainer.global_step
            run.train(step + 3, {step: plan, step + 1: plan})
            assert run.plan == plan
            state = model.state_dict()
            assert list(state) == names
            written = io.BytesIO()
            torch.save(state, written)
            before = run.state()
            model.load_state_dict(state)
            assert differing(run.state(), before) == []
            if plan == WHOLE:
                written.seek(0)
                assert torch.load(written).keys() == state.keys()
                model.eval()
                with torch.no_grad():
                    given = model(inputs)  # under DDP with the first rank's buffers
                copied = copy.deepcopy(model)
                assert not any(isinstance(each, DistributedDataParallel) for each in held_by(copied))
                assert torch.equal(copied(inputs), given)
                if rank == 0:  # alone: it talks to nobody
                    copied.train()(inputs).sum().backward()
                model.train()


def held_by(model: nn.Module) -> list[object]:
    """What hooks of its modules hold."""
    hooks = [
        hook for part in model.modules() for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values())
    ]
    return [each for hook in hooks for each in getattr(hook, "args", ())]


def test_names_states_and_copies_of_the_model_are_its_own_under_each_plan(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, use_the_model, tmp_path)


# --- the same collectives as by hand ----------------------------------------------------------------------------------

COLLECTIVES = (
    "all_reduce",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "broadcast",
)


def recorded(model: Any, engine: DistributedDataParallel | None, take: Callable[[], None]) -> list[tuple[Any, ...]]:
    """The collectives on training's groups while steps are taken: kind, elements, type and size of the group."""
    found: list[tuple[Any, ...]] = []
    real = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}

    def recording(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            tensors = [each for each in (*arguments, *options.values()) if isinstance(each, torch.Tensor)]
            if tensors[0].dtype.is_floating_point:
                told = [(each.numel(), str(each.dtype)) for each in tensors]
                found.append((name, told, dist.get_world_size(options.get("group"))))
            return real[name](*arguments, **options)

        return call

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        found.append(("bucket", bucket.index(), bucket.buffer().numel(), [each.numel() for each in bucket.gradients()]))
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        return allreduce_hook(dist.group.WORLD, bucket)

    hook.__annotations__ = {"bucket": dist.GradBucket}  # type: ignore[attr-defined]  # which torch looks at
    if engine is not None:
        engine.register_comm_hook(None, hook)
    for name in real:
        setattr(dist, name, recording(name))
    try:
        take()
    finally:
        for name, function in real.items():
            setattr(dist, name, function)
    return found


def collectives(rank: int, folder: Path) -> None:
    def by_hand(plan: ParallelPlan) -> Callable[[Any], Any]:
        options: dict[str, Any] = {}
        if plan == WHOLE:
            return DistributedDataParallel
        if plan == KEPT:
            options["mesh"] = torch.distributed.device_mesh.init_device_mesh(
                "cpu", (2, 1), mesh_dim_names=("replicate", "shard")
            )
        if plan == GRAD_OP:
            options["reshard_after_forward"] = False
        return _by_blocks(**options)

    expected = {}
    for plan in (WHOLE, GRAD_OP, FULL, KEPT):
        run = Retraining(rank, folder, None, wrap=by_hand(plan), name=f"by hand {plan.strategy}", num_micro_steps=2)
        engine = run.model if plan == WHOLE else None
        with run.trainer:
            run.train(2)  # DDP orders its buckets anew in the first
            expected[plan] = recorded(run.model, engine, lambda run=run: run.train(4))
    for start, tour in ((FULL, (WHOLE, GRAD_OP, KEPT, FULL)), (WHOLE, (FULL, KEPT, WHOLE, GRAD_OP))):
        run = Retraining(rank, folder, start, name=f"changed {start.strategy}", num_micro_steps=2)
        with run.trainer:
            for plan in tour:
                step = run.trainer.global_step
                run.train(step + 5, {step + 1: plan})
                assert run.plan == plan
                spread = run.trainer._spread
                found = recorded(run.model, spread.engine, lambda run=run, step=step: run.train(step + 7))
                assert found == expected[plan], (plan, found, expected[plan])


def test_steps_after_a_change_make_the_collectives_of_the_plan_written_by_hand(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, collectives, tmp_path)


# --- nothing is left --------------------------------------------------------------------------------------------------


def leak_nothing(rank: int, folder: Path, num_changes: int) -> list[tuple[int, ...]]:
    run = Retraining(
        rank,
        folder,
        FULL,
        num_micro_steps=2,
        rollback="full",
        shared_storage_path=folder / "kept",
        checkpoint_interval=CheckpointInterval(steps=1),
        keep_last=2,
    )
    counts = []
    plans = [WHOLE, GRAD_OP, KEPT, RECOMPUTED, WHOLE, FULL]
    with run.trainer:
        for number in range(num_changes):
            step = run.trainer.global_step
            run.train(step + 2, {step + 1: plans[number % 6]} if number else {1: plans[0]})
            if number % 6 == 5:
                run.trainer.save_checkpoint()
                gc.collect()
                storages = {
                    each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
                    for each in gc.get_objects()
                    if type(each) in (torch.Tensor, nn.Parameter) and each.device.type == "cpu" and not each.is_sparse
                }
                counts.append(
                    (
                        threading.active_count(),
                        len(os.listdir("/proc/self/fd")),
                        len(dist.distributed_c10d._world.pg_map),
                        sum(storages.values()),
                        sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in run.model.modules()),
                    )
                )
    return counts


@pytest.mark.parametrize("num_changes", [36, pytest.param(120, marks=pytest.mark.slow)])
def test_many_changes_in_one_training_leave_nothing_behind(ranks: RankPool, tmp_path: Path, num_changes: int) -> None:
    for counts in ranks.run(2, leak_nothing, tmp_path, num_changes, deadline_seconds=300):
        assert all(last <= first for last, first in zip(counts[-1], counts[1], strict=True)), counts
