"""A loader that nobody tells anything: as one for validation beside a trainer's, and in a progress bar."""

from __future__ import annotations

import io
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from tqdm import tqdm

from elastic_ext.data.loader import ElasticDataLoader
from elastic_ext.data.sampler import ElasticDistributedSampler
from tests.support.loading import changed, indices_in, loader_of
from tests.support.loops import put
from tests.support.pools import worker_pids
from tests.support.training import make_data, make_model, trainer_of

# --- validation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_for_validation_follows_nothing_of_a_trainer_beside_it(tmp_path: Path, num_workers: int) -> None:
    inputs, targets = make_data(60)
    model: Any = make_model()
    loader = ElasticDataLoader(list(zip(inputs, targets, strict=True)), 4)
    validation = loader_of(30, 7, num_workers=num_workers, prefetch_factor=3 if num_workers else None)
    trainer = trainer_of(tmp_path, model, loader, global_batch_size=8)
    optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    change = {"batch_size": 2, "num_workers": 1 - num_workers, "prefetch_factor": 1}
    sizes: list[int] = []
    beside = iter(validation)  # goes on while steps commit and roll back
    found: list[int] = []
    with trainer:
        with trainer.epoch(0):
            for number, (features, labels) in enumerate(loader):
                with trainer.step():
                    nn.functional.cross_entropy(model(features), labels).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    optimizer.zero_grad()
                sizes.append(len(features))
                found += indices_in(itertools.islice(beside, 1))
                if number == 1:
                    put(tmp_path, 0, {"version": 1, "dataloader": change}, seen_by=trainer._session.follower)
                if number == 9:
                    assert [len(indices) for indices, _ in validation] == [7, 7, 7, 7, 2]
        assert set(sizes) == {4, 2} and loader.num_workers == 1 - num_workers
    assert found == list(range(30))
    assert (validation.num_workers, validation.batch_size, len(validation)) == (num_workers, 7, 5)
    assert validation.prefetch_factor == (3 if num_workers else None)
    assert validation.is_alone and not loader.is_alone


def test_a_loader_without_a_file_looks_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"version": 1, "dataloader": {"batch_size": 2}}')
    monkeypatch.chdir(tmp_path)
    threads = set(threading.enumerate())
    before = worker_pids()
    assert [len(indices) for indices, _ in loader_of(6, 3)] == [3, 3]
    assert set(threading.enumerate()) == threads and worker_pids() == before


# --- progress -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_progress_bar_knows_the_length_and_may_be_told_of_another(num_workers: int) -> None:
    loader = loader_of(40, 4, num_workers=num_workers)
    bar = tqdm(loader, file=io.StringIO(), mininterval=0)
    assert bar.total == len(loader) == 10
    found = []
    for number, batch in enumerate(bar, start=1):
        found += indices_in([batch])
        if number == 5:
            assert len(loader) == 10
            changed(loader, batch_size=8)
            bar.total = len(loader)  # the five that have come, and three
            assert bar.total == 8
    assert found == list(range(40)) and bar.n == bar.total == number
    assert len(loader) == 5  # of the loop that comes
    with tqdm(loader, file=io.StringIO()) as bar:
        assert bar.total == 5 and sum(1 for _ in bar) == 5


def test_a_progress_bar_over_what_an_epoch_has_left_has_that_length() -> None:
    first = loader_of(40, 4)
    list(itertools.islice(first, 3))
    second = loader_of(40, 4)
    second.load_state_dict(first.state_dict())
    bar = tqdm(second, file=io.StringIO())
    assert bar.total == 7 and indices_in(bar) == list(range(12, 40)) and bar.n == 7


# --- ranks by themselves --------------------------------------------------------------------------------------------


def loaders_of_ranks(size: int, num_ranks: int, **arguments: Any) -> list[ElasticDataLoader]:
    return [
        ElasticDataLoader(range(size), sampler=ElasticDistributedSampler(range(size), num_ranks, rank), **arguments)
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize(("size", "num_ranks"), [(5, 2), (7, 3), (101, 4), (2, 3)])
@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_ranks_lose_no_sample_of_a_tail_and_have_no_larger_batch(
    size: int, num_ranks: int, batch_size: int | None
) -> None:
    found = []
    for loader in loaders_of_ranks(size, num_ranks, batch_size=batch_size):
        expected = len(loader)
        batches: list[Any] = [[batch] if batch_size is None else batch.tolist() for batch in loader]
        assert all(len(batch) <= (batch_size or 1) for batch in batches) and len(batches) == expected
        found.append(batches)
    assert sorted(index for mine in found for batch in mine for index in batch) == list(range(size))
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_ranks_share_out_the_batches_of_a_batch_sampler() -> None:
    batches = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    samplers = [ElasticDistributedSampler(sampler=batches, num_replicas=2, rank=rank) for rank in range(2)]
    found = [[batch.tolist() for batch in ElasticDataLoader(range(10), batch_sampler=each)] for each in samplers]
    assert found == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7]]]


def test_ranks_that_have_no_part_of_a_tail_say_where_the_others_stand() -> None:
    loaders = loaders_of_ranks(5, 2, batch_size=1)
    loops = [iter(loader) for loader in loaders]
    for _ in range(2):
        for loop in loops:
            next(loop)
    states = [loader.state_dict() for loader in loaders]
    assert states[0] == states[1] and states[0]["position"] == 4 and not states[0]["is_over"]
    assert [len(list(loop)) for loop in loops] == [1, 0]
    assert loaders[0].state_dict() == loaders[1].state_dict() and loaders[0].state_dict()["is_over"]
    again = loaders_of_ranks(5, 2, batch_size=1)
    for loader in again:
        loader.load_state_dict(states[0])
    assert [len(loader) for loader in again] == [len(list(loader)) for loader in again] == [1, 0]
    assert [loader.state_dict()["is_over"] for loader in again] == [True, True]
