"""torch's DistributedSampler as an ElasticDataLoader's sampler: what it says is taken over, and ranks stay even."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from elastic_ext.data.batch_plan import BatchPlan
from elastic_ext.data.loader import ElasticDataLoader
from elastic_ext.data.sampler import ElasticDistributedSampler


def sampler_of(size: int, num_ranks: int, rank: int, **arguments: Any) -> Any:
    return DistributedSampler(range(size), num_ranks, rank, **arguments)  # type: ignore[arg-type]


def loaders_of(
    size: int, num_ranks: int, loader_class: Any = ElasticDataLoader, *, batch_size: int = 3, **arguments: Any
) -> list[Any]:
    drops = arguments.pop("drops_batches", False)
    return [
        loader_class(range(size), batch_size, sampler=sampler_of(size, num_ranks, rank, **arguments), drop_last=drops)
        for rank in range(num_ranks)
    ]


def samples_of(batches: Any) -> list[int]:
    return [int(sample) for batch in batches for sample in batch]


SIZES = [(12, 2), (13, 4), (7, 3), (2, 3), (1, 4), (101, 4)]


@pytest.mark.parametrize("drops_batches", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("size", "num_ranks"), SIZES)
def test_each_rank_has_as_many_batches_of_the_same_sizes_as_with_torchs_loader(
    size: int, num_ranks: int, drop_last: bool, drops_batches: bool
) -> None:
    found: list[Any] = []
    for loader_class in (DataLoader, ElasticDataLoader):
        loaders = loaders_of(
            size, num_ranks, loader_class, shuffle=False, drop_last=drop_last, drops_batches=drops_batches
        )
        batches = [list(loader) for loader in loaders]
        sizes = [[len(batch) for batch in mine] for mine in batches]
        found.append((sizes, [len(loader) for loader in loaders], sorted(samples_of(itertools.chain(*batches)))))
    assert found[0] == found[1]
    assert found[1][1] == [len(mine) for mine in found[1][0]]


@pytest.mark.parametrize(("size", "num_ranks"), SIZES)
def test_shuffled_samples_come_once_but_for_those_that_make_ranks_even(size: int, num_ranks: int) -> None:
    came = Counter(samples_of(itertools.chain(*loaders_of(size, num_ranks, shuffle=True, seed=4))))
    assert set(came) == set(range(size))
    assert sum(came.values()) == -(-size // num_ranks) * num_ranks
    left = Counter(samples_of(itertools.chain(*loaders_of(size, num_ranks, shuffle=True, drop_last=True))))
    assert sum(left.values()) == size // num_ranks * num_ranks and set(left.values()) <= {1}


def test_order_is_that_of_our_own_sampler_with_its_seed_and_epoch() -> None:
    for rank in range(2):
        loader = ElasticDataLoader(range(20), 4, sampler=sampler_of(20, 2, rank, seed=7))
        ours = ElasticDataLoader(range(20), 4, sampler=ElasticDistributedSampler(range(20), 2, rank, seed=7))
        for _ in range(2):
            assert samples_of(loader) == samples_of(ours)


def test_its_set_epoch_names_the_epoch_and_a_loop_without_is_over_another_one() -> None:
    sampler = sampler_of(40, 2, 1)
    loader = ElasticDataLoader(range(40), 4, sampler=sampler)
    orders = []
    for epoch in (0, 1, 2):
        sampler.set_epoch(epoch)
        orders.append(samples_of(loader))
    assert len(set(map(tuple, orders))) == 3
    sampler.set_epoch(1)
    assert samples_of(loader) == orders[1]
    assert samples_of(loader) == orders[2] and sampler.epoch == 2
    before = sampler_of(40, 2, 1)
    before.set_epoch(2)
    assert samples_of(ElasticDataLoader(range(40), 4, sampler=before)) == orders[2]


def test_a_batch_sampler_of_torchs_over_one_is_taken_over_too() -> None:
    loader = ElasticDataLoader(range(12), batch_sampler=BatchSampler(sampler_of(12, 2, 0, shuffle=False), 3, False))
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [6, 7, 8]]
    assert loader.batch_size == 3


@pytest.mark.parametrize("then", [2, 3])
def test_an_epoch_goes_on_where_it_was_with_as_many_ranks_or_others(then: int) -> None:
    size = 41
    loaders = loaders_of(size, 2, seed=3)
    loops = [iter(loader) for loader in loaders]
    begun = samples_of(next(loop) for _ in range(4) for loop in loops)
    states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
    assert states[0] == states[1]
    again = loaders_of(size, then, seed=3)
    for loader in again:
        loader.sampler.set_epoch(5)  # which the state is not of
        loader.load_state_dict(states[0])
        assert loader.sampler.epoch == 0
    rest = [list(loader) for loader in again]
    came = Counter(begun + samples_of(itertools.chain(*rest)))
    assert set(came) == set(range(size)) and sum(came.values()) == size + -(size - 24) % then
    assert len({tuple(map(len, mine)) for mine in rest}) == 1
    if then == 2:  # bit for bit what a loop that went on would have had
        gone_on = [list(loop) for loop in loops]
        assert [samples_of(mine) for mine in rest] == [samples_of(mine) for mine in gone_on]
    assert all(loader.state_dict()["is_over"] for loader in again)


@pytest.mark.parametrize(("drop_last", "num_taken"), [(False, 21), (True, 20)])
def test_a_trainer_that_shares_samples_out_gives_none_twice(drop_last: bool, num_taken: int) -> None:
    came = []
    for rank in range(2):
        loader = ElasticDataLoader(range(21), 4, sampler=sampler_of(21, 2, rank, drop_last=drop_last))
        loader.plan(BatchPlan(global_batch=8, num_ranks=2, micro_batch=4), rank)
        for batch in loader:
            came += batch.tolist()
            loader.commit()
        assert loader.is_at_end
    assert len(came) == len(set(came)) == num_taken


class Backwards(DistributedSampler[int]):
    """One with a way of its own."""

    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__())[::-1])


def test_one_that_shares_out_in_a_way_of_its_own_is_refused_in_words() -> None:
    loader = ElasticDataLoader(range(12), 3, sampler=Backwards(range(12), 2, 0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Backwards shares its samples out by itself, in a way of its own; with a "):
        list(loader)


@pytest.mark.parametrize(("arguments", "sizes"), [({"pad": True}, [3, 3]), ({"drop_last": True}, [2, 2]), ({}, [3, 2])])
def test_our_own_sampler_may_pad_or_leave_out_in_a_loader_as_well(arguments: Any, sizes: list[int]) -> None:
    loaders = [
        ElasticDataLoader(range(5), 4, sampler=ElasticDistributedSampler(range(5), 2, rank, shuffle=False, **arguments))
        for rank in range(2)
    ]
    assert [len(samples_of(loader)) for loader in loaders] == sizes
