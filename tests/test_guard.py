"""Gradients that are changed in a micro-step that does not end a step are noticed, and the step is taken back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from elastic_ext import StepError
from tests.ranks import RankPool
from tests.training import Slices, bits_of, make_data, make_model, shared, trainer_of

Change = Callable[[nn.Module, SGD], object]


def clips(model: nn.Module, optimizer: SGD) -> object:
    return nn.utils.clip_grad_norm_(model.parameters(), 1e3)  # larger than any norm here: it multiplies by 1


def clips_values(model: nn.Module, optimizer: SGD) -> object:
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    return None


def clips_one(model: nn.Module, optimizer: SGD) -> object:
    last = list(model.parameters())[-1]
    return nn.utils.clip_grad_norm_([last], 1e3)


def unscales(model: nn.Module, optimizer: SGD) -> object:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    return None


CHANGES: dict[str, Change] = {
    "clip_grad_norm_": clips,
    "clip_grad_value_": clips_values,
    "clip_grad_norm_ of one": clips_one,
    "unscale_": unscales,
}


class Run:
    """A training whose gradients are changed in some micro-steps."""

    def __init__(self, folder: Path, rank: int = 0, world_size: int = 1, num_micro_steps: int = 3) -> None:
        self.model = make_model(torch.float32)
        self.source = Slices(make_data(64 * world_size, torch.float32), 4, is_endless=True)
        called = shared(self.model, world_size)
        batch = 4 * num_micro_steps * world_size
        self.trainer = trainer_of(folder, called, self.source, rank=rank, global_batch_size=batch)
        self.called = called
        self.said: list[str] = []
        self.optimizer = self.trainer.prepare(SGD(self.model.parameters(), lr=0.1))

    def train(self, num_steps: int, change: Change, changes_at: Callable[[int, bool], bool]) -> list[int]:
        """Train on over every StepError; the steps that had one."""
        refused: list[int] = []
        for inputs, targets in self.source:
            step = self.trainer.global_step
            before = bits_of(self.model)
            try:
                with self.trainer.step():
                    nn.functional.cross_entropy(self.called(inputs), targets).backward()  # type: ignore[no-untyped-call]
                    if changes_at(step, self.trainer.sync_gradients) and step not in refused:
                        change(self.model, self.optimizer.inner)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            except StepError as error:
                self.said.append(str(error))
                assert bits_of(self.model) == before
                assert all(part.grad is None for part in self.model.parameters())
                refused.append(step)
            if self.trainer.global_step == num_steps:
                break
        return refused


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_a_micro_step_that_ends_no_step_is_refused(tmp_path: Path, change: str) -> None:
    run, other = Run(tmp_path), Run(tmp_path)
    with run.trainer, other.trainer:
        assert run.train(5, CHANGES[change], lambda step, is_last: step == 1 and not is_last) == [1]
        assert ["trainer.clip_grad_norm_()" in text for text in run.said] == [True]
        assert other.train(5, CHANGES[change], lambda step, is_last: False) == []
    assert bits_of(run.model) == bits_of(other.model)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_the_micro_step_that_ends_a_step_is_the_users_own_affair(tmp_path: Path, change: str) -> None:
    run = Run(tmp_path)
    with run.trainer:
        assert run.train(5, CHANGES[change], lambda step, is_last: is_last) == []


def test_a_change_that_begins_later_is_noticed_before_long(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.trainer:
        refused = run.train(150, clips, lambda step, is_last: step >= 10 and not is_last)
    assert refused
    assert refused[0] < 10 + 64


def test_what_a_step_is_looked_on_costs_no_hooks_in_the_others(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first = next(run.model.parameters())
    with run.trainer:
        run.train(2, clips, lambda step, is_last: False)
        assert first._post_accumulate_grad_hooks
        run.train(6, clips, lambda step, is_last: False)
        assert not first._post_accumulate_grad_hooks
    assert not first._backward_hooks


def guarded_rank(rank: int, folder: Path) -> Any:
    run = Run(folder, rank, 2)
    with run.trainer:
        return run.train(5, clips, lambda step, is_last: step == 1 and not is_last)


def test_a_change_is_refused_on_ranks_in_ddp(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, guarded_rank, tmp_path) == [[1], [1]]
