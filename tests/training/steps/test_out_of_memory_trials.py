"""Memory that runs out anywhere: never a hang, never a wrong number, and every sample once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from elastic_ext import CheckpointInterval
from tests.support.ranks import RankPool
from tests.support.retraining import needs_passes_taken_back, whole
from tests.support.shortage import NUM_STEPS, Short, Shortage, Trial, again, trials_of
from tests.support.training import ResumableSlices, make_data

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("num_ranks", "num_trials"), [(1, 60), (2, 60), (3, 40)])
def test_steps_come_again(ranks: RankPool, tmp_path: Path, num_ranks: int, num_trials: int) -> None:
    told = ranks.run(
        num_ranks, again, tmp_path, trials_of(num_trials, num_ranks, seed=100 + num_ranks), deadline_seconds=400
    )
    assert len(told[0]) == num_trials


def sharded(model: nn.Module) -> Any:
    return fully_shard(model)


def train_on(rank: int, folder: Path, trial: Trial | None, num_micro_steps: int, by: str) -> tuple[Any, list[int], int]:
    """From the newest checkpoint on; what comes of it, the samples, and from which step on."""
    shortage = Shortage()
    if trial is not None and trial[0] == rank:
        shortage = Shortage(phase=trial[3], at=(trial[1], trial[2]))
    run = Short(
        rank,
        folder,
        batch_size=4,
        num_micro_steps=num_micro_steps,
        shortage=shortage,
        wrap=sharded if by == "fully_shard" else None,
        guard="never",
        loader=ResumableSlices(make_data(256), 4, is_endless=True),
        shared_storage_path=folder / "kept",
        checkpoint_interval=CheckpointInterval(steps=1),
    )
    began_at = run.trainer.global_step
    with run.trainer:
        run.train(NUM_STEPS)
        model = {name: whole(value) for name, value in run.model.named_parameters()}
        model |= dict(run.model.named_buffers())
    return {name: value.detach().clone() for name, value in model.items()}, run.loader.committed, began_at


@needs_passes_taken_back
@pytest.mark.parametrize(("by", "num_trials"), [("fully_shard", 40), ("DDP", 8)])
def test_elsewhere_all_ranks_raise_and_a_new_start_goes_on_from_the_checkpoint(
    ranks: RankPool, tmp_path: Path, by: str, num_trials: int
) -> None:
    undisturbed = {
        num: ranks.run(2, train_on, tmp_path / f"whole {num}", None, num, by, deadline_seconds=60) for num in (1, 4)
    }
    for number, trial in enumerate(trials_of(num_trials, 2, seed=7)):
        here, num_micro_steps = tmp_path / str(number), trial[4]
        outcomes = ranks.run_outcomes(2, train_on, here, trial, num_micro_steps, by, deadline_seconds=60)
        assert all(outcome.error is not None for outcome in outcomes), (trial, outcomes)
        for rank, (state, samples, began_at) in enumerate(
            ranks.run(2, train_on, here, None, num_micro_steps, by, deadline_seconds=60)
        ):
            expected, every, _ = undisturbed[num_micro_steps][rank]
            assert began_at in (trial[1], trial[1] - 1, 0), trial
            assert samples == every[len(every) - len(samples) :], trial
            assert len(samples) == 4 * num_micro_steps * (NUM_STEPS - began_at)
            assert all(torch.equal(state[name], expected[name]) for name in expected), trial
