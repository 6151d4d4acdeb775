"""What a loader can be given beyond torch's arguments, and batch samplers: order, seeds, a file to follow, pinning."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, get_worker_info

from elastic_ext import ElasticTrainer, FollowOptions
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.data.batch_plan import BatchPlan
from elastic_ext.data.loader import ElasticDataLoader
from elastic_ext.data.order import Drawn
from elastic_ext.data.sampler import ElasticDistributedSampler
from elastic_ext.data.workers.producer import Pinning
from elastic_ext.records.files import write_whole
from tests.support.training import make_model
from tests.support.watching import DEADLINE_SECONDS, collected_warnings


def listed(samples: list[int]) -> list[int]:
    return list(samples)


def config_of(**values: Any) -> ElasticConfig:
    return ElasticConfig.from_values({f"dataloader.{name}": value for name, value in values.items()})


# --- batch samplers -------------------------------------------------------------------------------------------------


class Lengths:
    """A batch sampler of the user's: batches of 1, 2, 3 and so on."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for size in range(1, self.num_batches + 1):
            yield list(range(start, start + size))
            start += size

    def __len__(self) -> int:
        return self.num_batches


class Resizable(Lengths):
    """One whose batches all have a size that can be set."""

    batch_size = 4

    def set_batch_size(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return iter(BatchSampler(SequentialSampler(range(24)), self.batch_size, False))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_batches_of_a_batch_sampler_are_made_as_torch_makes_them(num_workers: int) -> None:
    settings: dict[str, Any] = {"batch_sampler": Lengths(6), "num_workers": num_workers, "collate_fn": listed}
    dataset: Any = range(21)
    ours, theirs = ElasticDataLoader(dataset, **settings), DataLoader[Any](dataset, **settings)
    assert list(ours) == list(ours) == list(theirs) and len(ours) == len(theirs) == 6


def test_a_loop_over_a_batch_sampler_goes_on_where_another_was() -> None:
    first = ElasticDataLoader(range(21), batch_sampler=Lengths(6), num_workers=2, collate_fn=listed)
    batches = iter(first)
    assert list(itertools.islice(batches, 2)) == [[0], [1, 2]]
    state = json.loads(json.dumps(first.state_dict()))
    second = ElasticDataLoader(range(21), batch_sampler=Lengths(6), collate_fn=listed)
    second.load_state_dict(state)
    assert list(second) == list(batches) and len(list(second)) == 6
    with pytest.raises(ValueError, match="the state is of the order"):
        ElasticDataLoader(range(21), batch_sampler=Lengths(5)).load_state_dict(state)


def test_a_batch_sampler_of_torch_is_its_sampler_and_its_size() -> None:
    loader = ElasticDataLoader(range(24), batch_sampler=BatchSampler(RandomSampler(range(24)), 5, True))
    loader.plan(BatchPlan(global_batch=8, num_ranks=1, micro_batch=8), 0)
    assert [len(batch) for batch in loader] == [8, 8, 8] and loader.batch_size == 5 and loader.drop_last
    with pytest.raises(ValueError, match="mutually exclusive"):
        ElasticDataLoader(range(24), 3, batch_sampler=BatchSampler(SequentialSampler(range(24)), 5, True))


def test_the_size_of_a_batch_sampler_changes_where_it_can_be_set() -> None:
    told = ElasticDataLoader(range(21), batch_sampler=Lengths(6)).check(config_of(batch_size=3))
    assert told is not None and "set_batch_size(batch_size)" in told
    assert ElasticDataLoader(range(21), batch_sampler=Lengths(6)).check(config_of(num_workers=3)) is None
    loader = ElasticDataLoader(range(24), batch_sampler=Resizable(6), collate_fn=listed)
    batches = iter(loader)
    next(batches)
    assert loader.check(config_of(batch_size=8)) is None
    loader.apply(config_of(), config_of(batch_size=8))
    assert [len(batch) for batch in batches] == [4] * 5  # which are drawn
    assert [len(batch) for batch in loader] == [8] * 3


def test_a_trainer_takes_the_batches_of_a_batch_sampler_as_they_are(tmp_path: Path) -> None:
    model = make_model(torch.float32)
    loader = ElasticDataLoader(torch.randn(21, 6), batch_sampler=Lengths(6), num_workers=1)
    trainer = ElasticTrainer(model, loader, follow_options=FollowOptions(run_dir=tmp_path))
    optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
    sizes = []
    with trainer, trainer.epoch(0):
        for inputs in loader:
            with trainer.step():
                model(inputs).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            sizes.append(len(inputs))
    assert sizes == [1, 2, 3, 4, 5, 6] and trainer.global_step == 6


def test_a_sampler_that_never_ends_is_refused_and_not_waited_for() -> None:
    class Endless:
        """As infinite samplers are that say how many samples the dataset has."""

        def __len__(self) -> int:
            return 5

        def __iter__(self) -> Iterator[int]:
            return itertools.cycle(range(5))

    loader = ElasticDataLoader(range(5), sampler=Endless())
    with pytest.raises(ValueError, match="a length of 5, and gave 16777216 samples without coming to an end"):
        next(iter(loader))


@pytest.mark.parametrize(("num_told", "length"), [(None, "no length"), (7, "a length of 7")])
def test_a_batch_sampler_that_never_ends_is_refused_while_it_takes_little_memory(
    num_told: int | None, length: str
) -> None:
    class Endless:
        num_given = 0

        def __len__(self) -> int:
            if num_told is None:
                raise TypeError("it has none")
            return num_told

        def __iter__(self) -> Iterator[list[int]]:
            while True:
                self.num_given += 1
                yield [0] * 64

    batches = Endless()
    loader = ElasticDataLoader(range(5), batch_sampler=batches)
    with pytest.raises(ValueError, match=rf"has {length}, and gave 16385 batches of more than 1048576 samples in all"):
        next(iter(loader))
    assert batches.num_given == 16385


def test_a_batch_sampler_may_give_as_many_batches_as_it_says_and_go_through_a_dataset_some_times() -> None:
    batches = [range(64)] * 20_000
    assert len(list(Drawn.of_batches(batches, 64).indices(0, 30_000))) == 20_000
    assert Drawn.of_batches(iter(batches), 64 * 5_000).num_samples == 20_000
    with pytest.raises(ValueError, match="no length, and gave 19985 batches of more than 1279000 samples"):
        Drawn.of_batches(iter(batches), 64 * 5_000 - 250)


# --- shares ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1])
def test_ranks_whose_shares_weigh_more_have_more_of_each_step(num_workers: int) -> None:
    weights = (3, 1)
    loaders = [
        ElasticDataLoader(
            range(100),
            2 * weight,
            sampler=ElasticDistributedSampler(range(100), 2, rank, shuffle=False, share_weights=weights),
            num_workers=num_workers,
            collate_fn=listed,
        )
        for rank, weight in enumerate(weights)
    ]
    batches = list(zip(*loaders, strict=True))
    assert [tuple(map(len, each)) for each in batches] == [(6, 2)] * 12 + [(3, 1)]
    assert sorted(itertools.chain(*itertools.chain(*batches))) == list(range(100))
    uneven = ElasticDataLoader(range(100), 4, sampler=loaders[0].sampler)
    with pytest.raises(ValueError, match="with one k for all ranks"):
        iter(uneven)


# --- seeds ----------------------------------------------------------------------------------------------------------


class Drawing:
    """Each sample is what the three generators give."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        if index >= 12:
            raise IndexError(index)
        return random.random(), float(np.random.rand()), float(torch.rand(()))


def drawn(num_workers: int, batch_size: int, *, epoch: int = 0, seed: int = 0, **arguments: Any) -> list[Any]:
    loader = ElasticDataLoader(
        Drawing(), batch_size, num_workers=num_workers, seed_samples=True, seed=seed, collate_fn=listed, **arguments
    )
    loader.set_epoch(epoch)
    return list(itertools.chain(*loader))


def test_what_a_seeded_sample_draws_depends_on_seed_epoch_and_index_alone() -> None:
    expected = drawn(0, 4)
    assert len(set(expected)) == 12
    assert drawn(2, 3) == drawn(1, 12) == expected
    assert sorted(drawn(1, 4, shuffle=True)) == sorted(expected)
    assert set(expected).isdisjoint(drawn(0, 4, epoch=1)) and set(expected).isdisjoint(drawn(0, 4, seed=1))


def test_seeding_samples_leaves_the_random_states_of_the_process() -> None:
    def own() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = own()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    drawn(0, 4, generator=torch.Generator())  # from which a loop draws what its workers are seeded from
    assert own() == expected


def test_a_seeded_dataset_is_the_users_in_a_worker_and_its_errors_name_the_index() -> None:
    def told(worker: int) -> None:
        info = get_worker_info()
        assert info is not None and isinstance(info.dataset, Drawing)

    loader = ElasticDataLoader(
        Drawing(), seed_samples=True, num_workers=1, worker_init_fn=told, sampler=[0, 77], collate_fn=listed
    )
    batches = iter(loader)
    next(batches)
    with pytest.raises(IndexError, match="77") as caught:
        next(batches)
    assert any("sample 77" in note for note in getattr(caught.value, "__notes__", ["sample 77"]))


# --- a file ---------------------------------------------------------------------------------------------------------


def test_a_loader_by_itself_follows_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    loader = ElasticDataLoader(range(4000), 2, config_file=file, collate_fn=listed)
    batches = iter(loader)
    found = next(batches)
    values = {"batch_size": 5, "num_workers": 1, "prefetch_factor": 3, "pin_memory": False}
    write_whole(file, json.dumps({"version": 1, "dataloader": values}).encode())
    sizes = []
    for batch in batches:
        found += batch
        sizes.append(len(batch))
        assert loader._config_follower is not None
        if loader.num_workers == 0:  # until the watcher has seen the file
            assert loader._config_follower._watcher.wait_for_version(1, DEADLINE_SECONDS)
    assert found == list(range(4000))
    assert sizes[-2] == 5 and (loader.num_workers, loader.prefetch_factor) == (1, 3)
    write_whole(file, b'{"version": 2}')
    assert loader._config_follower is not None
    assert loader._config_follower._watcher.wait_for_version(2, DEADLINE_SECONDS)
    assert len(next(iter(loader))) == 2 and loader.num_workers == 0  # what it was made with


def test_a_file_that_asks_for_what_cannot_be_changes_nothing_and_is_told(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    write_whole(file, json.dumps({"version": 1, "dataloader": {"batch_size": 5, "num_workers": 1}}).encode())
    with collected_warnings() as warnings:
        loader = ElasticDataLoader(range(21), batch_sampler=Lengths(6), config_file=file, collate_fn=listed)
        assert len(list(loader)) == 6 and loader.num_workers == 0
    assert len(warnings.about("was refused: the batch_sampler decides")) == 1


def test_a_loader_that_follows_a_file_is_no_trainers() -> None:
    loader = ElasticDataLoader(range(8), 2, config_file="config.json")
    with pytest.raises(ValueError, match="and this loader's trainer follows the config file itself"):
        loader.plan(BatchPlan(global_batch=2, num_ranks=1, micro_batch=2), 0)


def test_a_loader_that_is_gone_follows_nothing(tmp_path: Path) -> None:
    loader = ElasticDataLoader(range(8), 2, config_file=tmp_path / "config.json")
    list(loader)
    assert any("watcher of config.json" in thread.name for thread in threading.enumerate())
    del loader
    assert not any("watcher of config.json" in thread.name for thread in threading.enumerate())


# --- pinning --------------------------------------------------------------------------------------------------------


def test_what_workers_have_made_is_pinned_on_a_thread_of_its_own() -> None:
    seen: list[str] = []

    def pin(batch: Any) -> Any:
        seen.append(threading.current_thread().name)
        return ("pinned", batch)

    pinning = Pinning(pin)
    assert pinning.pin_now(1) == ("pinned", 1) and seen == [threading.current_thread().name]
    assert pinning.pin_later(2).result() == ("pinned", 2) and "pinning" in seen[1]
    pinning.pin = None
    assert pinning.pin_later(3) == pinning.pin_now(3) == 3
    pinning.close()
    pinning.close()
    assert not any("pinning" in thread.name for thread in threading.enumerate())


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_nothing_is_pinned_and_that_is_told() -> None:
    with pytest.warns(UserWarning, match="no accelerator"):
        assert [len(batch) for batch in ElasticDataLoader(range(6), 3, pin_memory=True)] == [3, 3]
