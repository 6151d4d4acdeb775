"""Checkpoints of trainings whose model is spread otherwise, and which plan a run that is resumed has."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from elastic_ext import CheckpointInterval
from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.training.checkpoints.signals import EXIT_STATUS
from tests.support.loops import put, seen_by
from tests.support.ranks import RankPool
from tests.support.resharding import FULL, GRAD_OP, KEPT, WHOLE
from tests.support.retraining import TOUR, Retraining, State, are_in_force, differing, resharded


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
        step = run.trainer.global_step
        kept[step] = run.state()
        if step in TOUR:
            run.proposals.append(run.trainer.reshard(TOUR[step]))

    with run.trainer:
        run.train(15, dict.fromkeys([*TOUR, 15], keep))
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
    seen: list[str] = [run.plan.strategy]

    def without(_: Retraining) -> None:
        put(run.folder, rank, {"version": 2}, seen_by=run.trainer._session.follower)

    with run.trainer:
        run.train(until, {until - 3: without} if name == "file" else None)
        seen.append(run.plan.strategy)
        run.trainer.save_checkpoint()
        return str(run.plan.strategy), run.state(), seen


@pytest.fixture(scope="module")
def first(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run has saved step 2 under a plan that is neither the one of the scripts nor that of the files below."""
    folder = tmp_path_factory.mktemp("first")
    (strategy, _, _), _ = ranks.run(2, go_on_by_file, folder, "first", 2)
    assert strategy == "hybrid_shard"
    return folder


@pytest.fixture
def resumable(first: Path, tmp_path: Path) -> Path:
    """A folder of a test's own with what that run has saved."""
    shutil.copytree(first / "kept", tmp_path / "kept")
    return tmp_path


def test_the_file_wins_over_the_script_and_the_script_over_what_was_saved(ranks: RankPool, resumable: Path) -> None:
    (_, _, seen), _ = ranks.run(2, go_on_by_file, resumable, "file", 7)
    assert seen == ["no_shard", "hybrid_shard"]  # and what a file leaves out is what the script says


def go_on_told(rank: int, folder: Path, told: dict[str, Any], until: int) -> tuple[list[Any], str, list[str]]:
    """The changes of plan of a run that is resumed beneath a file: after how many steps, and to what."""
    (folder / "told" / str(rank)).mkdir(parents=True)
    put(folder / "told", rank, told)
    with seen_by() as seen:
        run = Retraining(rank, folder, FULL, name="told", shared_storage_path=folder / "kept", save_on_signals=False)
        with run.trainer:
            run.train(until)
    changes = [(e["step"], e["details"]["new"]["parallelism.strategy"]) for e in resharded(run.folder, rank)]
    return changes, run.plan.strategy, seen.log


@pytest.mark.parametrize(
    ("told", "changes"),
    [
        ({"version": 1, "parallelism": {"strategy": "no_shard"}}, [(0, "no_shard")]),
        pytest.param(
            {"version": 1, "parallelism": {"strategy": "shard_grad_op", "unit": "whole"}},
            [(0, "shard_grad_op")],
            marks=pytest.mark.slow,
        ),
        ({"version": 1, "parallelism": {"strategy": "no_shard"}, "apply_at_step": 5}, [(5, "no_shard")]),
        ({"version": 1, "parallelism": {"strategy": "hybrid_shard", "shard_degree": 5}}, []),
        ({"version": 1, "user": {"mixup": 1}}, []),
    ],
)
def test_a_run_that_is_resumed_beneath_a_file_changes_once_to_the_plan_of_that(
    ranks: RankPool, resumable: Path, told: dict[str, Any], changes: list[Any]
) -> None:
    for made, strategy, log in ranks.run(2, go_on_told, resumable, told, 7):
        assert made == changes, log
        assert strategy == (changes[-1][1] if changes else "full_shard")
        assert not any("parallelism" in line for line in log if "resuming from" in line)


def go_on_plain(rank: int, folder: Path) -> None:
    """A process by itself, whose script spreads nothing."""
    run = Retraining(rank, folder, None, name="plain", shared_storage_path=folder / "kept", save_on_signals=False)
    with run.trainer:
        assert run.trainer.global_step == 2
        assert run.trainer.config.parallelism.strategy is None
        run.train(4)


def test_a_process_that_spreads_nothing_goes_on_from_a_spread_one(ranks: RankPool, resumable: Path) -> None:
    ranks.run(1, go_on_plain, resumable, process_group=False)


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
