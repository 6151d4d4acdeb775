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
from tests.support.ranks import RankPool
from tests.support.sharded import WAYS
from tests.support.training import Slices, bits_of, make_data, make_model, trainer_of

Change = Callable[[nn.Module, SGD], object]


def clips(model: nn.Module, optimizer: SGD) -> object:
    return nn.utils.clip_grad_norm_(model.parameters(), 1e3)  # larger than any norm here: it multiplies by 1


def clips_hard(model: nn.Module, optimizer: SGD) -> object:
    return nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


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
    "clip_grad_norm_": clips_hard,
    "clip_grad_norm_ of larger ones": clips,
    "clip_grad_value_": clips_values,
    "clip_grad_norm_ of one": clips_one,
    "unscale_": unscales,
}


class Run:
    """A training whose gradients are changed in some micro-steps."""

    def __init__(
        self,
        folder: Path,
        rank: int = 0,
        world_size: int = 1,
        *,
        wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
        **arguments: Any,
    ) -> None:
        self.source = Slices(make_data(64 * world_size, torch.float32), 4, is_endless=True)
        self.model = self.called = wrap(make_model(torch.float32))
        self.trainer = trainer_of(
            folder, self.called, self.source, rank=rank, global_batch_size=12 * world_size, **arguments
        )
        self.said: list[str] = []
        self.optimizer = self.trainer.prepare(SGD(self.model.parameters(), lr=0.1))

    def train(self, num_steps: int, change: Change, changes_at: Callable[[int, bool], bool]) -> list[int]:
        """Train on over every StepError; the steps that had one."""
        refused: list[int] = []
        for inputs, targets in self.source:
            step = self.trainer.global_step
            before = bits_of(list(self.model.parameters()))
            try:
                with self.trainer.step():
                    nn.functional.cross_entropy(self.called(inputs), targets).backward()  # type: ignore[no-untyped-call]
                    if changes_at(step, self.trainer.sync_gradients) and step not in refused:
                        change(self.model, self.optimizer.inner)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            except StepError as error:
                self.said.append(str(error))
                assert bits_of(list(self.model.parameters())) == before
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
    run, last = Run(tmp_path), 100 + 16
    with run.trainer:
        refused = run.train(last, clips, lambda step, is_last: step >= 97 and not is_last)
    assert refused
    assert refused[0] < last


def guarded_rank(rank: int, folder: Path, way: str, change: str, shares_always: bool) -> Any:
    run = Run(folder, rank, 2, wrap=WAYS[way].wrap, sync_every_micro_step=shares_always)
    with run.trainer:
        return run.train(5, CHANGES[change], lambda step, is_last: step == 1 and not is_last)


@pytest.mark.parametrize(
    ("way", "shares_always"),
    [("ddp", False), ("ddp", True), ("fully_shard", True), ("FSDP1", False), ("FSDP1", True)],
)
@pytest.mark.parametrize("change", ["clip_grad_norm_", "unscale_"])
def test_a_change_is_refused_however_the_model_is_wrapped(
    ranks: RankPool, tmp_path: Path, way: str, shares_always: bool, change: str
) -> None:
    assert ranks.run(2, guarded_rank, tmp_path, way, change, shares_always) == [[1], [1]]


def test_under_fully_shard_there_is_nothing_to_clip_too_early(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, guarded_rank, tmp_path, "fully_shard", "clip_grad_norm_", False) == [[], []]
