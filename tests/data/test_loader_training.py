"""Training from a loader whose sizes, workers, prefetching and pinning change while it trains: losses and weights are
those of a training in which nothing changes.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import get_worker_info

from elastic_ext.data.loader import ElasticDataLoader
from tests.support.loops import put
from tests.support.pools import child_pids
from tests.support.ranks import RankPool
from tests.support.thinning import the_first
from tests.support.training import Batch, bits_of, make_data, make_model, plain_losses, shared, trainer_of

NUM_SAMPLES = 110  # and so epochs have a tail
GLOBAL_BATCH = 24
NUM_STEPS = 14
SEED = 3
Change = dict[str, Any]

EVERYTHING: dict[int, Change] = {  # by the step after which it is put in place
    1: {"batch_size": 5, "num_workers": 2},
    3: {"batch_size": 5, "num_workers": 1, "prefetch_factor": 4, "pin_memory": True},
    5: {"batch_size": 12, "num_workers": 0},
    7: {"batch_size": 3, "num_workers": 3, "prefetch_factor": 1, "pin_memory": False},
    9: {"batch_size": 7, "num_workers": 3, "prefetch_factor": 3},
    11: {"batch_size": 4, "num_workers": 1},
}
NO_SIZES: dict[int, Change] = {
    step: {name: value for name, value in change.items() if name != "batch_size"} for step, change in EVERYTHING.items()
}

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found")


class Samples:
    """What a model learns from, with each sample's index and whether a worker has made it."""

    def __init__(self) -> None:
        self.inputs, self.targets = make_data(NUM_SAMPLES)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int, bool]:
        return self.inputs[index], self.targets[index], index, get_worker_info() is not None


def sgd(parameters: list[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=1e-2)


class Trained:
    """What one rank saw of its training, step by step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        """Of this rank's part, summed over its samples."""
        self.samples: list[list[int]] = []
        self.by_workers: list[bool] = []
        self.settings: list[tuple[Any, int, bool]] = []
        """The micro-batch, the workers, whether batches are pinned."""
        self.weights: list[torch.Tensor] = []
        self.bits: list[Any] = []
        self.num_left = 0
        """Processes."""


def trained_by_rank(
    rank: int,
    folder: Path,
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
    changes: dict[int, Change],
    world_size: int,
    with_dropout: bool = False,
) -> Trained:
    """Train so many steps while configs are put in place."""
    before = child_pids()
    seen = Trained()
    model: Any = make_model()
    if with_dropout:
        model.insert(2, nn.Dropout(0.5))
    loader = ElasticDataLoader(Samples(), 8, shuffle=True, seed=SEED)
    trainer = trainer_of(folder, shared(model, world_size), loader, rank=rank, global_batch_size=GLOBAL_BATCH)
    optimizer = trainer.prepare(make_optimizer(list(model.parameters())))
    with trainer:
        begin(seen)
        while trainer.global_step < NUM_STEPS:
            with trainer.epoch():
                train_epoch(seen, trainer, optimizer, loader, rank, folder, changes)
    seen.weights = [part.detach().clone() for part in model.parameters()]
    seen.bits = bits_of(model, optimizer.state_dict()["state"])
    gc.collect()
    seen.num_left = len(child_pids() - before)
    return seen


def begin(seen: Trained) -> None:
    seen.losses.append(0.0)
    seen.samples.append([])


def train_epoch(
    seen: Trained, trainer: Any, optimizer: Any, loader: ElasticDataLoader, rank: int, folder: Path, changes: Any
) -> None:
    for inputs, targets, indices, are_of_workers in loader:
        with trainer.step():
            loss = nn.functional.cross_entropy(trainer._model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        seen.losses[-1] += loss.item() * len(inputs)
        seen.samples[-1] += indices.tolist()
        seen.by_workers += are_of_workers.tolist()
        if not trainer.sync_gradients:
            continue
        seen.settings.append((trainer.config.dataloader.batch_size, loader.num_workers, loader.pin_memory))
        if trainer.global_step == NUM_STEPS:
            return
        begin(seen)
        change = changes.get(trainer.global_step)
        if change is not None:
            contents = {"version": trainer.global_step, "dataloader": change}
            put(folder, rank, contents, seen_by=trainer._session.follower)


def trained(
    ranks: RankPool,
    folder: Path,
    world_size: int,
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
    changes: dict[int, Change],
    with_dropout: bool = False,
) -> list[Trained]:
    folder.mkdir()
    arguments = (folder, make_optimizer, changes, world_size, with_dropout)
    if world_size == 1:
        torch.manual_seed(0)
        return [trained_by_rank(0, *arguments)]
    return ranks.run(world_size, trained_by_rank, *arguments, process_group=True)


def losses_of(everyone: list[Trained]) -> list[float]:
    """Of each step's whole batch."""
    sizes = [sum(map(len, samples)) for samples in zip(*(each.samples for each in everyone), strict=True)]
    sums = [sum(losses) for losses in zip(*(each.losses for each in everyone), strict=True)]
    return [loss / size for loss, size in zip(sums, sizes, strict=True)]


def batches_of_plain_loop() -> list[list[int]]:
    """The samples of each step, as an epoch's order has them; a tail is a step of its own."""
    order = ElasticDataLoader(range(NUM_SAMPLES), None, shuffle=True, seed=SEED)
    found: list[list[int]] = []
    while len(found) < NUM_STEPS:
        epoch = list(order)
        found += [epoch[start : start + GLOBAL_BATCH] for start in range(0, NUM_SAMPLES, GLOBAL_BATCH)]
    return found[:NUM_STEPS]


def pick(indices: list[int]) -> Batch:
    inputs, targets = make_data(NUM_SAMPLES)
    return inputs[indices], targets[indices]


@pytest.mark.parametrize("make_optimizer", [sgd, pytest.param(adamw, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", the_first([2, 1, 3]))
def test_losses_and_weights_are_those_of_a_run_in_which_nothing_changes(
    ranks: RankPool, tmp_path: Path, make_optimizer: Callable[[list[nn.Parameter]], Optimizer], world_size: int
) -> None:
    changing = trained(ranks, tmp_path / "changing", world_size, make_optimizer, EVERYTHING)
    steady = trained(ranks, tmp_path / "steady", world_size, make_optimizer, {})
    plain_samples = batches_of_plain_loop()
    plain, plain_model = plain_losses(make_optimizer, [pick(indices) for indices in plain_samples])

    for everyone in (changing, steady):
        steps = zip(*(each.samples for each in everyone), strict=True)
        together = [sorted(itertools.chain(*samples)) for samples in steps]
        assert together == [sorted(indices) for indices in plain_samples]
        assert losses_of(everyone) == pytest.approx(plain, rel=1e-12, abs=0)
        for each in everyone:
            for ours, theirs in zip(each.weights, plain_model.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
            assert each.num_left == 0
    for each in changing:
        assert {size for size, _, _ in each.settings} == {8, 5, 12, 3, 7, 4}
        assert {workers for _, workers, _ in each.settings} == {0, 1, 2, 3}
        assert {is_pinned for _, _, is_pinned in each.settings} == {False, True}
        assert set(each.by_workers) == {False, True}


@pytest.mark.parametrize("world_size", the_first([1, 2]))
def test_changes_of_workers_alone_change_no_bit_dropout_included(
    ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    changing = trained(ranks, tmp_path / "changing", world_size, adamw, NO_SIZES, with_dropout=True)
    steady = trained(ranks, tmp_path / "steady", world_size, adamw, {}, with_dropout=True)
    for one, other in zip(changing, steady, strict=True):
        assert one.samples == other.samples and one.losses == other.losses
        assert one.bits == other.bits
        assert set(one.by_workers) == {False, True} and set(other.by_workers) == {False}
        assert one.num_left == other.num_left == 0
