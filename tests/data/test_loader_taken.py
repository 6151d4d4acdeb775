"""Batches that a loop takes and no micro-step uses: what a loader hands out, a step trains on, or an error says so."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset

from elastic_ext import ElasticError, StepError
from elastic_ext.data.loader import ElasticDataLoader
from tests.support.ranks import RankPool
from tests.support.training import shared, trainer_of

NUMBERS = torch.arange(8.0).unsqueeze(1)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(NUMBERS)


class Trained:
    """A model whose gradient is the mean of the samples, in steps of four samples and micro-steps of two."""

    def __init__(self, folder: Path, loader: Any, *, rank: int = 0, num_ranks: int = 1, **options: Any) -> None:
        self.loader = loader
        self.model = nn.Linear(1, 1, bias=False)
        self.trainer = trainer_of(
            folder, shared(self.model, num_ranks), loader, rank=rank, global_batch_size=4 * num_ranks, **options
        )
        self.optimizer = self.trainer.prepare(SGD(self.model.parameters(), lr=1.0))
        self.means: list[float] = []
        self.samples: list[float] = []
        """Of the steps that committed."""
        self._taken: list[float] = []

    def take(self, batch: torch.Tensor, *, num_items: int | None = None) -> None:
        """A micro-step; with ``num_items`` by the trainer's backward."""
        before = self.model.weight.item()
        with self.trainer.step():
            losses = self.trainer._model(batch)
            if num_items is None:
                losses.mean().backward()
            else:
                self.trainer.backward(losses.sum() if num_items else losses.sum() * 0, num_items=num_items)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._taken += batch.flatten().tolist()
        if self.trainer.sync_gradients:
            self.means.append(round(before - self.model.weight.item(), 4))
            self.samples += self._taken
            self._taken = []


def one_ahead(loader: Iterable[Any]) -> Iterator[Any]:
    """What device prefetchers do."""
    batches = iter(loader)
    held = next(batches)
    for batch in batches:
        yield held
        held = batch
    yield held


@pytest.fixture(params=[NUMBERS, Stream()], ids=["indexed", "stream"])
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> Trained:
    return Trained(tmp_path, ElasticDataLoader(request.param, 2))


def test_a_loop_that_takes_batches_ahead_is_refused_before_it_trains(trained: Trained) -> None:
    with trained.trainer as trainer, trainer.epoch():
        with pytest.raises(StepError, match=r"2 batches were taken .* micro-step 1 of the step.* at most 1 "):
            trained.take(next(one_ahead(trained.loader)))
        assert trainer.global_step == 0
        for batch in trained.loader:  # nothing is lost
            trained.take(batch)
    assert trained.samples == NUMBERS.flatten().tolist()


def test_a_batch_that_is_left_out_is_refused_and_its_step_comes_again(trained: Trained) -> None:
    told: list[tuple[int, str]] = []
    with trained.trainer, trained.trainer.epoch():
        for number, batch in enumerate(trained.loader):
            if number == 2:
                continue
            try:
                trained.take(batch)
            except StepError as error:
                told.append((number, str(error)))
    assert [(number, "num_items=0" in text) for number, text in told] == [(3, True)]
    assert trained.samples == NUMBERS.flatten().tolist() and trained.means == [1.5, 5.5]


def test_a_batch_that_counts_nothing_leaves_the_mean_of_the_others(trained: Trained) -> None:
    with trained.trainer, trained.trainer.epoch():
        for number, batch in enumerate(trained.loader):
            trained.take(batch, num_items=0 if number == 2 else len(batch))
    assert trained.means == [1.5, 6.5]


def test_batches_may_be_taken_within_a_step_or_none_at_all(trained: Trained) -> None:
    with trained.trainer as trainer, trainer.epoch():
        batches = iter(trained.loader)
        held = next(batches)
        for _ in range(3):
            trained.take(held)
        with trainer.step():
            trained.model(next(batches)).mean().backward()
            trained.optimizer.step()
            trained.optimizer.zero_grad()
        assert trainer.global_step == 2


def test_a_loader_with_sizes_of_its_own_may_be_ahead_as_its_batches_are_counted_by_micro_steps(tmp_path: Path) -> None:
    trained = Trained(tmp_path, DataLoader(NUMBERS, 2))  # type: ignore[arg-type]
    with trained.trainer, trained.trainer.epoch():
        for batch in one_ahead(trained.loader):
            trained.take(batch)
    assert trained.means == [1.5, 5.5]


def skipping_rank(rank: int, folder: Path, ends: bool) -> str:
    """What this rank saw where rank 1 leaves a batch out, and goes on, or ends as an error has a script end."""
    trained = Trained(folder, ElasticDataLoader(NUMBERS, 1), rank=rank, num_ranks=2, timeout_seconds=3.0)
    try:
        with trained.trainer as trainer, trainer.epoch():
            for number, batch in enumerate(trained.loader):
                if (number, rank) == (1, 1):
                    continue
                try:
                    trained.take(batch)
                except StepError:
                    if ends:
                        raise
    except StepError:
        os._exit(3)
    except (ElasticError, RuntimeError) as error:  # gloo's, of a connection that ended
        return f"{type(error).__name__}: {error}"
    return str(trained.means)


def test_a_rank_that_leaves_a_batch_out_takes_its_step_again_alone(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, skipping_rank, tmp_path, False, process_group=True) == ["[3.5]"] * 2


def test_a_rank_that_ends_for_it_does_not_leave_the_others_waiting(ranks: RankPool, tmp_path: Path) -> None:
    arguments: tuple[Any, ...] = (tmp_path, True)
    healthy, failed = ranks.run_outcomes(2, skipping_rank, *arguments, process_group=True, deadline_seconds=40)
    assert healthy.error is None and "peer" in str(healthy.value).lower()
    assert failed.exit_code == 3
