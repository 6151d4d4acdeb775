"""What a worker that joins has to have in common with the ranks that train, and how its loop has to begin."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from elastic_ext import CheckpointInterval, ElasticDataLoader, StepError
from elastic_ext.members.checks import differences
from elastic_ext.training.joining import facts_of
from tests.support.training import trainer_of


class Norm(nn.Module):
    """A model with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("scale", torch.ones(6))


def prepared(folder: Path, differ: Callable[[dict[str, Any]], None] = lambda parts: None) -> Any:
    """A trainer whose script was changed by ``differ`` before it made its parts."""
    folder.mkdir(exist_ok=True)
    model = Norm()
    parts: dict[str, Any] = {
        "model": model,
        "groups": [[*model.parameters()]],
        "loader": {},
        "trainer": {"shared_storage_path": folder.parent / "saved"},
        "early": [],
        "late": [],
    }
    differ(parts)
    loader = ElasticDataLoader(TensorDataset(torch.zeros(16, 6)), batch_size=4, **parts["loader"])
    trainer = trainer_of(folder, model, loader, **parts["trainer"])
    for function in parts["early"]:
        trainer.on_members(function)
    trainer.prepare(SGD([{"params": each} for each in parts["groups"]], lr=0.1))
    for function in parts["late"]:
        trainer.on_members(function)
    return trainer


def another_buffer(parts: dict[str, Any]) -> None:
    parts["model"].scale = torch.ones(3)


def a_frozen_one(parts: dict[str, Any]) -> None:
    parts["model"].linear.bias.requires_grad_(False)


def other_groups(parts: dict[str, Any]) -> None:
    parts["groups"] = [[parts["model"].linear.weight], [parts["model"].linear.bias]]


def drops_last(parts: dict[str, Any]) -> None:
    parts["loader"]["drop_last"] = True


def keeps_all(parts: dict[str, Any]) -> None:
    parts["trainer"]["rollback"] = "full"


def another_interval(parts: dict[str, Any]) -> None:
    parts["trainer"]["checkpoint_interval"] = CheckpointInterval(steps=3)


def a_function(parts: dict[str, Any]) -> None:
    parts["early"].append(print)


def a_late_function(parts: dict[str, Any]) -> None:
    parts["late"].append(print)


@pytest.mark.parametrize(
    ("differ", "words"),
    [
        (another_buffer, "the buffer scale is [[6], "),
        (a_frozen_one, "the parameter linear.bias is [[6], "),
        (other_groups, "the groups of parameters is [[2]] here and [[1, 1]] there"),
        (drops_last, "drop_last is false here and true there"),
        (keeps_all, 'rollback is "gradients" here and "full" there'),
        (another_interval, "arguments for checkpoints is "),
        (a_function, "functions given to on_members is 0 here and 1 there"),
        (a_late_function, "functions given to on_members is 0 here and 1 there"),
    ],
)
def test_a_script_that_differs_is_told_so(tmp_path: Path, differ: Any, words: str) -> None:
    mine = prepared(tmp_path / "mine")
    with mine:
        facts = facts_of(mine._training)
        assert not differences(facts_of(mine._training), facts)
    others = prepared(tmp_path / "others", differ)
    with others:
        told = differences(facts, facts_of(others._training))
    assert told.startswith(words), told


def test_what_a_worker_is_told_as_it_joins_says_how_far_the_others_are_and_what_they_have_learnt(
    tmp_path: Path,
) -> None:
    with prepared(tmp_path / "others") as others:
        training = others._training
        training.counts.num_boundaries = 12
        training.growing._failed_with, training.growing._takes_one = 8, False
        pending: Any = SimpleNamespace(drawn=[], tells=False)
        told = json.loads(json.dumps(training.members._to_tell(pending)))
    with prepared(tmp_path / "mine") as mine:
        joiner = mine._training
        joiner.members._take_over(told)
        assert joiner.counts.num_boundaries == 12
        assert joiner.reports._speed.measure().steps_per_second is None, "none of them was taken here"
        assert joiner.growing.tell() == told["growing"] and joiner.growing.has_shrunk


@pytest.mark.parametrize(("begun", "is_within", "is_right"), [(3, True, True), (0, True, False), (0, False, False)])
def test_a_loop_that_begins_with_another_epoch_than_the_others_are_in_ends_with_a_sentence(
    tmp_path: Path, begun: int, is_within: bool, is_right: bool
) -> None:
    trainer = prepared(tmp_path / "mine")
    with trainer:
        training = trainer._training
        training.counts.go_on_in(3)
        training.session.epochs.join(is_within=is_within)
        if is_right:
            with trainer.epoch(begun):
                return
        words = r"the loop begins with epoch 0, and the ranks .* are in epoch 3; loop over range\(trainer.start_epoch"
        with pytest.raises(StepError, match=words), trainer.epoch(begun):
            pass
        with trainer.epoch(3):
            pass


@pytest.mark.parametrize("gathers", [False, True])
def test_only_a_step_whose_gradients_stay_is_one_of_a_loop_that_gathers_by_itself(
    tmp_path: Path, gathers: bool
) -> None:
    model = nn.Linear(4, 1)
    trainer = trainer_of(tmp_path, model, micro_batch_size=2)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    with trainer:
        for step in range(4):
            with trainer.step():
                loss = model(torch.randn(2, 4)).sum()
                if gathers or step != 1:  # else a loss that the loop passes over, as one that is not finite
                    loss.backward()
                if step != 1:
                    optimizer.step()
                    optimizer.zero_grad()
        assert trainer._training.batches.is_gathered_by_hand is gathers
