"""A trainer's checkpoints hold where each rank's stream of an IterableDataset stands; all ranks have the same order."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset, Sampler, get_worker_info

from elastic_ext import CheckpointInterval, ElasticTrainer, FollowOptions
from elastic_ext.data.loader import ElasticDataLoader
from elastic_ext.errors import RanksDisagreeError
from tests.support.ranks import RankPool
from tests.support.thinning import the_first
from tests.support.watching import collected_warnings

SIZE = 96
BATCH = 8


class OfRank(IterableDataset[torch.Tensor]):
    """Every so many numbers, for each worker of each rank; it can tell where it is, as a tensor."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.at = torch.tensor(0)

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        own, num = (0, 1) if worker is None else (worker.id, worker.num_workers)
        mine = range(self.rank * num + own, SIZE, self.num_ranks * num)
        start, self.at = int(self.at), torch.tensor(0)
        for number in range(start, len(mine)):
            self.at += number + 1 - self.at
            yield torch.tensor([float(mine[number])])
        self.at = torch.tensor(0)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.at = state["at"].clone()


class Silent(OfRank):
    state_dict = load_state_dict = property()


class Indexed(OfRank):
    """The numbers themselves."""


def loader_of(kind: type[OfRank], rank: int, num_ranks: int, num_workers: int) -> ElasticDataLoader:
    if kind is Indexed:
        numbers = torch.arange(float(SIZE))[:, None]
        return ElasticDataLoader(numbers, 2, shuffle=True, seed=5, num_workers=num_workers)
    return ElasticDataLoader(kind(rank, num_ranks), 2, num_workers=num_workers)


def train(
    rank: int,
    folder: Path,
    num_workers: int,
    stops_at: int | None,
    kind: type[OfRank] = OfRank,
    goes_back: bool = False,
) -> list[list[float]]:
    """Take an epoch, or a part of it; gives the samples of the committed steps on this rank."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    model = torch.nn.Linear(1, 1)
    trained = DistributedDataParallel(model) if num_ranks > 1 else model
    loader = loader_of(kind, rank, num_ranks, num_workers)
    trainer = ElasticTrainer(
        trained,
        loader,
        global_batch_size=BATCH,
        shared_storage_path=folder / "storage",
        checkpoint_interval=CheckpointInterval(),
        follow_options=FollowOptions(job="job", run_dir=folder / f"run {rank}"),
    )
    optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
    steps: list[list[float]] = []
    taken: list[float] = []
    with trainer, trainer.epoch(trainer.start_epoch):
        for inputs in loader:
            before = trainer.global_step
            with trainer.step():
                trained(inputs).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            taken += inputs.flatten().tolist()
            if trainer.global_step > before:
                steps.append(taken)
                taken = []
                if trainer.global_step == 2:
                    trainer.save_checkpoint()
                if trainer.global_step == 4 and goes_back:
                    goes_back = False
                    trainer.rewind(2)
                    del steps[-2:]
                if trainer.global_step == stops_at:
                    break
    return steps


def expected(rank: int, num_ranks: int, num_workers: int) -> list[list[float]]:
    """The samples of each step of an epoch that nothing interrupts."""
    num = max(num_workers, 1)
    streams = [iter(range(rank * num + own, SIZE, num_ranks * num)) for own in range(num)]
    found: list[float] = []
    for stream in itertools.cycle(streams):
        batch = [float(sample) for sample in itertools.islice(stream, 2)]
        if not batch:
            break
        found += batch
    size = BATCH // num_ranks
    return [found[start : start + size] for start in range(0, len(found), size)]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_ranks", the_first([2, 1]))
def test_each_rank_goes_on_where_its_streams_were(
    ranks: RankPool, tmp_path: Path, num_ranks: int, num_workers: int
) -> None:
    ranks.run(num_ranks, train, tmp_path, num_workers, 4)
    rest = ranks.run(num_ranks, train, tmp_path, 3 - num_workers, None)  # as many as there were, until the epoch ends
    assert rest == [expected(rank, num_ranks, num_workers)[2:] for rank in range(num_ranks)]


def test_samples_with_an_index_go_on_with_any_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    first = ranks.run(2, train, tmp_path, 1, 2, Indexed)
    rest = ranks.run(3, train, tmp_path, 0, None, Indexed)
    order = [float(number) for numbers in loader_of(Indexed, 0, 1, 0) for number in numbers]
    taken = [sorted(itertools.chain(*parts)) for run in (first, rest) for parts in zip(*run, strict=True)]
    assert taken == [sorted(order[start : start + BATCH]) for start in range(0, SIZE, BATCH)]  # step by step


def test_going_back_within_an_epoch_takes_the_same_samples_again(ranks: RankPool, tmp_path: Path) -> None:
    taken = ranks.run(2, train, tmp_path, 1, None, OfRank, True)
    assert taken == [expected(rank, 2, 1) for rank in range(2)]


def test_other_numbers_of_ranks_and_silent_datasets_begin_the_epoch_anew_and_say_so(
    ranks: RankPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranks.run(2, train, tmp_path, 0, 2)
    with caplog.at_level(logging.WARNING):
        assert train(0, tmp_path, 0, None) == expected(0, 1, 0)
    assert "each rank had its own position in the dataset, and the number of ranks is another now" in caplog.text
    caplog.clear()
    train(0, tmp_path / "silent", 0, 3, Silent)
    with caplog.at_level(logging.WARNING):
        assert train(0, tmp_path / "silent", 0, None, Silent) == expected(0, 1, 0)
    assert "has no state_dict() and load_state_dict()" in caplog.text


class BatchesOfRank:
    """Every so many batches of two."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.batches = [[first, first + 1] for first in range(0, 16, 2)][rank::num_ranks]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


def train_batches(rank: int, folder: Path, stops_at: int | None, goes_back: bool = False) -> list[int]:
    """Take batches of this rank's own; gives their samples."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    model = torch.nn.Linear(1, 1)
    trained = DistributedDataParallel(model) if num_ranks > 1 else model
    loader = ElasticDataLoader(torch.arange(16.0)[:, None], batch_sampler=BatchesOfRank(rank, num_ranks))
    trainer = ElasticTrainer(
        trained,
        loader,
        shared_storage_path=folder / "storage",
        checkpoint_interval=CheckpointInterval(),
        follow_options=FollowOptions(job="job", run_dir=folder / f"run {rank}"),
    )
    optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
    taken: list[int] = []
    with trainer, trainer.epoch(trainer.start_epoch):
        for inputs in loader:
            with trainer.step():
                trained(inputs).sum().backward()
                optimizer.step()
            taken += inputs.flatten().int().tolist()
            if trainer.global_step == 2:
                trainer.save_checkpoint()
            if trainer.global_step == 3 and goes_back:
                goes_back = False
                trainer.rewind(2)
                del taken[-2:]
            if trainer.global_step == stops_at:
                break
    return taken


def test_each_rank_goes_on_in_batches_of_its_own(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, train_batches, tmp_path, 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert ranks.run(2, train_batches, tmp_path, None, True) == [[8, 9, 12, 13], [10, 11, 14, 15]]


def test_more_or_fewer_ranks_begin_an_epoch_of_batches_of_their_own_anew(
    ranks: RankPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranks.run(2, train_batches, tmp_path, 2)
    with caplog.at_level(logging.WARNING):
        assert train_batches(0, tmp_path, None) == list(range(16))
    assert "the number of ranks is another now: the epoch begins anew" in caplog.text


class Tens:
    """Ten batches of two, the last of one sample: of a known size, as torch's own batch sampler has it."""

    batch_size, drop_last, sampler = 2, False, range(19)

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(first, min(first + 2, 19))) for first in range(0, 20, 2)])


Step = tuple[
    int, int, tuple[float, ...]
]  # the epoch, the step after it, and each micro-batch's weight with its samples


def train_tens(
    folder: Path,
    stops_at: int | None = None,
    *,
    how: str = "crash",
    global_batch: int | None = BATCH,
    names_epochs: bool = True,
) -> list[Step]:
    """Two epochs; training stops at a step that was saved, or goes back one step or on once, as ``how`` says."""
    model = torch.nn.Linear(1, 1, bias=False).double()
    loader = ElasticDataLoader(torch.arange(1.0, 20.0).double()[:, None], batch_sampler=Tens())
    trainer = ElasticTrainer(
        model,
        loader,
        global_batch_size=global_batch,
        shared_storage_path=folder / "storage",
        checkpoint_interval=CheckpointInterval(),
        follow_options=FollowOptions(job="job", run_dir=folder / "run"),
    )
    optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
    steps: list[Step] = []

    def take(epoch: int) -> bool:
        nonlocal stops_at
        taken: list[float] = []
        for inputs in loader:
            with trainer.step():
                model(inputs).mean().backward()
                optimizer.step()
                gradient = model.weight.grad
                assert gradient is not None
                mean = gradient.item()
                optimizer.zero_grad()
            taken += [mean, *inputs.flatten().tolist()]
            if not trainer.sync_gradients:
                continue
            steps.append((epoch, trainer.global_step, tuple(taken)))
            taken = []
            if trainer.global_step + (how == "rewind") == stops_at:
                trainer.save_checkpoint()
            if trainer.global_step == stops_at:
                stops_at = None
                if how == "rewind":
                    trainer.rewind(trainer.global_step - 1)
                    steps.pop()
                    continue
                if how == "leave":
                    return True
                raise InterruptedError
        return False

    with contextlib.suppress(InterruptedError), trainer:
        epoch = trainer.start_epoch
        while epoch < 2:
            with trainer.epoch(epoch) if names_epochs else contextlib.nullcontext():
                is_left = take(epoch)
            epoch += not is_left
    return steps


@pytest.mark.parametrize("global_batch", [BATCH, None])
def test_an_epoch_of_batches_of_a_known_size_goes_on_to_its_last_step(
    tmp_path: Path, global_batch: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    whole = train_tens(tmp_path / "whole", global_batch=global_batch)
    of_epoch = 3 if global_batch else 10
    assert [step for _, step, _ in whole] == list(range(1, 2 * of_epoch + 1))
    assert [epoch for epoch, _, _ in whole] == [0] * of_epoch + [1] * of_epoch
    resumed = [train_tens(tmp_path, stop, global_batch=global_batch) for stop in (1, of_epoch - 1, of_epoch, None)]
    assert list(itertools.chain(*resumed)) == whole
    for how in ("rewind", "leave"):
        assert train_tens(tmp_path / how, of_epoch - 1, how=how, global_batch=global_batch) == whole, how
    assert "were dropped" not in caplog.text


def test_so_does_a_loop_that_names_no_epochs(tmp_path: Path) -> None:
    whole = train_tens(tmp_path / "whole", names_epochs=False)
    first = train_tens(tmp_path, 1, names_epochs=False)
    resumed = train_tens(tmp_path, names_epochs=False)
    assert [step[1:] for step in first + resumed] == [step[1:] for step in whole]


# --- the same order on all ranks ------------------------------------------------------------------------------------


class Unseeded(Sampler[int]):
    """Draws on each rank from what is that rank's own, after so many epochs."""

    def __init__(self, rank: int, num_alike: int) -> None:
        self.rank, self.num_alike, self.epoch = rank, num_alike, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(0 if self.epoch < self.num_alike else self.rank).sample(range(12), 12))


def train_with_own_draws(rank: int, folder: Path, num_alike: int | None) -> tuple[list[list[int]], str]:
    """Two epochs with a generator of each rank's own, or a sampler; samples by epoch."""
    model = torch.nn.Linear(1, 1)
    numbers = torch.arange(12.0)[:, None]
    if num_alike is None:
        generator = torch.Generator().manual_seed(100 + rank)
        seed = np.int64(7) if rank == 0 else None
        loader = ElasticDataLoader(numbers, 2, shuffle=True, generator=generator, seed=seed)
    else:
        loader = ElasticDataLoader(numbers, 2, sampler=Unseeded(rank, num_alike))
    trained = DistributedDataParallel(model)
    trainer = ElasticTrainer(
        trained, loader, global_batch_size=4, follow_options=FollowOptions(job="job", run_dir=folder / str(rank))
    )
    taken: list[list[int]] = []
    try:
        with trainer:
            optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
            for epoch in range(2):
                with trainer.epoch(epoch):
                    taken.append([])
                    for inputs in loader:
                        with trainer.step():
                            trained(inputs).sum().backward()
                            optimizer.step()
                        taken[-1] += inputs.flatten().int().tolist()
    except RanksDisagreeError as error:
        return taken, str(error)
    return taken, ""


def test_ranks_with_seeds_of_their_own_take_that_of_the_first(ranks: RankPool, tmp_path: Path) -> None:
    everyone = ranks.run(2, train_with_own_draws, tmp_path, None)
    for epoch in range(2):
        assert sorted(sample for taken, _ in everyone for sample in taken[epoch]) == list(range(12))


class DrawnBatches:
    """A batch sampler that shares nothing out, and counts how often it is asked."""

    num_draws = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.num_draws += 1
        order = random.sample(range(12), 12)
        return iter([order[start : start + 2] for start in range(0, 12, 2)])


def train_on_drawn_batches(rank: int, folder: Path) -> list[tuple[list[str], int]]:
    """What is warned of with equal seeds and with unequal ones, and how often two epochs draw."""
    told = []
    for name, seed in {"equal": 0, "own": rank}.items():
        (folder / name).mkdir(exist_ok=True)
        model, batches = DistributedDataParallel(torch.nn.Linear(1, 1)), DrawnBatches()
        loader = ElasticDataLoader(torch.arange(12.0)[:, None], batch_sampler=batches, seed=seed)
        trainer = ElasticTrainer(
            model, loader, follow_options=FollowOptions(job="job", run_dir=folder / name / str(rank))
        )
        with collected_warnings() as warned, trainer:
            optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
            batches.num_draws = 0
            for epoch in range(2):
                with trainer.epoch(epoch):
                    for inputs in loader:
                        with trainer.step():
                            model(inputs).sum().backward()
                            optimizer.step()
        told.append((warned.about("batch_sampler"), batches.num_draws))
    return told


def test_batches_that_all_ranks_draw_alike_are_warned_of_once(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, train_on_drawn_batches, tmp_path)
    assert [len(warned) for warned, _ in first + second] == [1, 0, 0, 0]
    assert "each sample is trained on 2 times in an epoch; have the batch_sampler give each rank its" in first[0][0][0]
    assert [num_draws for _, num_draws in first + second] == [2] * 4  # what is compared is what is trained on


@pytest.mark.parametrize(("num_alike", "num_epochs"), [(0, 0), (1, 1)])
def test_ranks_whose_samplers_draw_differently_all_say_so(
    ranks: RankPool, tmp_path: Path, num_alike: int, num_epochs: int
) -> None:
    for taken, told in ranks.run(2, train_with_own_draws, tmp_path, num_alike):
        assert len(taken) == num_epochs and "the ranks' samplers draw different orders" in told
