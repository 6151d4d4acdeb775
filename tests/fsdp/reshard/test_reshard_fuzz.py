"""Trainings that are disturbed at random, by changes of plan, failures, saves and rewinds, end as undisturbed ones."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_ext import CheckpointInterval
from elastic_ext.fsdp.plan import ParallelPlan
from tests.support.faults import PlantedFault
from tests.support.ranks import RankPool
from tests.support.resharding import FULL, any_plan
from tests.support.retraining import Retraining, differing, needs_passes_taken_back, stayed

NUM_STEPS = 10


@dataclass(frozen=True)
class Disturbed:
    """What happens in one training: the same on all ranks, but for who asks for a plan."""

    num_micro_steps: int
    given: dict[str, Any]
    first: ParallelPlan
    plans: dict[int, tuple[ParallelPlan, int | None]]
    """After a step: which one is asked for, and by which rank; by all where that is None."""
    failures: dict[int, tuple[int, str]]
    """In a step's micro-step."""
    rewinds: dict[int, int]
    """After a step, and by how many steps."""

    @classmethod
    def drawn(cls, seed: int, folder: Path) -> Disturbed:
        draw = random.Random(seed)
        num_micro_steps, every = draw.choice([1, 1, 2, 4]), draw.choice([None, 1, 2, 3])
        given: dict[str, Any] = {}
        if every is not None:
            in_background = draw.random() < 0.7
            given = {
                "shared_storage_path": folder / "kept",
                "checkpoint_interval": CheckpointInterval(steps=every),
                "overlap_saving": draw.choice([True, False, "auto"]),
                "save_in_background": in_background,
                "keep_previous": in_background and draw.random() < 0.5,
            }
        steps = range(1, NUM_STEPS)
        ways = ["before", "backward", "called"]
        return cls(
            num_micro_steps,
            given,
            any_plan(draw),
            {step: (any_plan(draw), draw.choice([None, 0, 1])) for step in steps if draw.random() < 0.5},
            {step: (draw.randrange(num_micro_steps), draw.choice(ways)) for step in steps if draw.random() < 0.3},
            {draw.randrange(3, NUM_STEPS - 1): draw.randrange(1, 3)} if every == 1 and draw.random() < 0.7 else {},
        )


def disturb(rank: int, folder: Path, seed: int) -> None:
    what = Disturbed.drawn(seed, folder)
    losses, state = stayed(rank, folder, FULL, NUM_STEPS, num_micro_steps=what.num_micro_steps)
    run = Retraining(rank, folder, what.first, num_micro_steps=what.num_micro_steps, rollback="full", **what.given)
    trainer = run.trainer
    plans, failures, rewinds = dict(what.plans), dict(what.failures), dict(what.rewinds)
    with trainer:
        while trainer.global_step < NUM_STEPS:
            for inputs, targets in run.loader:
                step, index = trainer.global_step, trainer._session.steps._state.index
                if failures.get(step, (None, ""))[0] == index:
                    fail_in(run, inputs, targets, failures.pop(step)[1])
                    del run.losses[what.num_micro_steps * step :]
                    continue
                run.micro_step(inputs, targets)
                step = trainer.global_step
                if trainer._session.steps.is_partial:
                    continue
                plan, who = plans.pop(step, (None, None))
                if plan is not None and who in (None, rank):
                    run.proposals.append(trainer.reshard(plan))
                if step in rewinds:
                    target = step - rewinds.pop(step)
                    trainer.rewind(target)
                    del run.losses[what.num_micro_steps * target :]
                    break  # a loop that begins anew goes on from there
                if step >= NUM_STEPS:
                    break
        found = run.state()
    assert differing(found, state) == [], what
    assert run.losses == losses, what
    assert [each.refusal for each in run.proposals if each.outcome == "refused"] == [], what


def fail_in(run: Retraining, inputs: torch.Tensor, targets: torch.Tensor, how: str) -> None:
    """A micro-step that never happens."""
    try:
        with run.trainer.step():
            loss = nn.functional.cross_entropy(run.model(inputs), targets)
            if how == "called":
                run.trainer.rollback()
                return
            if how == "backward":
                loss.backward()  # type: ignore[no-untyped-call]
            raise PlantedFault(how)
    except PlantedFault:
        pass


@needs_passes_taken_back
@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 120))])
def test_whatever_disturbs_a_training_it_ends_as_if_nothing_had(ranks: RankPool, tmp_path: Path, seed: int) -> None:
    ranks.run(2, disturb, tmp_path, seed, deadline_seconds=120)
