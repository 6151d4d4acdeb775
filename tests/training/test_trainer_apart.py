"""Ranks that come apart in the middle of a step are found by what they counted, and named on all of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch import nn
from torch.optim import SGD

from elastic_ext import RanksDisagreeError, StepError
from tests.support.loops import seen_by
from tests.support.ranks import RankPool
from tests.support.thinning import the_first
from tests.support.training import Slices, make_data, make_model, shared, trainer_of

NUM_STEPS = 8
STEP = 3


def odd_rank(rank: int, folder: Path, num_micro_steps: int, odd: str, place: int) -> str:
    """Two ranks train; in step 3, micro-step ``place``, rank 1 does something else. What ends this rank?"""
    model = make_model()
    source = Slices(make_data(2 * 4 * num_micro_steps * NUM_STEPS), 4)
    trainer = trainer_of(
        folder, shared(model, 2), source, rank=rank, global_batch_size=8 * num_micro_steps, timeout_seconds=5.0
    )
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    index = 0
    try:
        with trainer, trainer.epoch():
            for inputs, targets in source:
                is_odd = rank == 1 and trainer.global_step == STEP and index == place
                index = (index + 1) % num_micro_steps
                with trainer.step():
                    if is_odd and odd == "continue at once":
                        continue
                    loss = nn.functional.cross_entropy(trainer._model(inputs), targets)
                    if is_odd and odd == "continue":
                        continue
                    if is_odd and odd == "break":
                        break
                    if not (is_odd and odd == "no backward"):
                        loss.backward()  # type: ignore[no-untyped-call]
                    if not (is_odd and odd == "no optimizer"):
                        optimizer.step()
                    optimizer.zero_grad()
    except (RanksDisagreeError, StepError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("ranks that came apart ended well")


@pytest.mark.parametrize(
    ("num_micro_steps", "odd", "place", "differs_in"),
    [
        (1, "continue", 0, "steps, backward passes"),
        (3, "continue", 2, "steps, backward passes"),
        (3, "continue", 1, "backward passes"),
        (3, "continue at once", 1, "backward passes"),
        (3, "no backward", 0, "backward passes"),
        (1, "no optimizer", 0, "steps"),
        (3, "no optimizer", 2, "steps"),
    ],
)
def test_a_rank_that_leaves_something_out_of_a_step_is_named_on_all(
    ranks: RankPool, tmp_path: Path, num_micro_steps: int, odd: str, place: int, differs_in: str
) -> None:
    told = ranks.run(2, odd_rank, tmp_path, num_micro_steps, odd, place, deadline_seconds=30)
    assert told[0] == told[1]
    assert told[0].startswith(f"RanksDisagreeError: ranks differ in {differs_in}: rank 0: {STEP + 1} steps"), told
    passes = (STEP + 1) * num_micro_steps
    rank_1 = STEP if "steps" in differs_in else STEP + 1
    assert f"rank 1: {rank_1} steps, {STEP + 1} boundaries" in told[0]
    assert f"{passes} backward passes" in told[0]
    if "backward" in differs_in:
        assert f"{passes - 1} backward passes" in told[0]


def test_an_optimizer_that_steps_without_the_gradients_of_the_others_is_refused_at_once(
    ranks: RankPool, tmp_path: Path
) -> None:
    told = ranks.run(2, lonely_rank, tmp_path, deadline_seconds=30)
    assert all("the ranks have not shared their gradients" in text for text in told)


def lonely_rank(rank: int, folder: Path) -> str:
    """Every rank leaves the backward pass out, and steps."""
    model = make_model()
    wrapped = shared(model, 2)
    trainer = trainer_of(folder, wrapped, rank=rank)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    before = [parameter.clone() for parameter in model.parameters()]
    try:
        with trainer.step():
            wrapped(make_data(4)[0])
            optimizer.step()
    except StepError as error:
        assert all(old.equal(new) for old, new in zip(before, model.parameters(), strict=True))
        return str(error)
    finally:
        trainer.close()
    raise AssertionError("an optimizer stepped without gradients")


def breaking_rank(rank: int, folder: Path, place: int) -> str:
    """What this rank logs and raises when rank 1 breaks out of its epoch; processes end as uncaught errors end them."""
    with seen_by() as seen:
        try:
            print(odd_rank(rank, folder, place + 1, "break", place), flush=True)
            os._exit(3)
        except RuntimeError as error:
            return "\n".join([*seen.log, str(error)])


@pytest.mark.parametrize("place", the_first([2, 0]))
def test_a_rank_that_breaks_out_of_a_step_is_named_on_all(ranks: RankPool, tmp_path: Path, place: int) -> None:
    """The others wait in torch for its gradients, so it does not wait long for them; its end is theirs too."""
    healthy, broken = ranks.run_outcomes(2, breaking_rank, tmp_path, place, deadline_seconds=40)
    assert broken.exit_code == 3
    assert "RanksDisagreeError: rank 1 (" in broken.output and "after 3 steps, 4 boundaries" in broken.output
    assert "left the backward pass of its last step out" in broken.output
    assert "did not, and waits for rank " in broken.output
    assert healthy.error is None
    assert "rank 1" in healthy.value and "after 3 steps, 4 boundaries" in healthy.value
