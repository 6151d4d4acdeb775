"""A sampler whose order no number of ranks changes: from one position any of them go on, and no sample is lost."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from elastic_ext.data.loader import ElasticDataLoader
from elastic_ext.data.sampler import ElasticDistributedSampler


def samplers(size: int, num_ranks: int, **arguments: Any) -> list[ElasticDistributedSampler]:
    return [ElasticDistributedSampler(range(size), num_ranks, rank, **arguments) for rank in range(num_ranks)]


@given(size=st.integers(0, 60), data=st.data())
def test_ranks_that_come_and_go_take_every_sample_once(size: int, data: st.DataObject) -> None:
    state: dict[str, Any] | None = None
    taken: list[int] = []
    for _ in range(4):
        ranks = samplers(size, data.draw(st.integers(1, 5)), seed=3)
        streams = []
        for each in ranks:
            if state is not None:
                each.load_state_dict(json.loads(json.dumps(state)))
            streams.append(iter(each))
        if state is not None and state["position"] == size:
            break
        for _ in range(data.draw(st.integers(0, min(map(len, ranks))))):
            taken += [next(stream) for stream in streams]
        states = [each.state_dict() for each in ranks]
        assert all(each == states[0] for each in states)
        state = states[0]
    else:
        (last,) = samplers(size, 1, seed=3)
        assert state is not None
        last.load_state_dict(state)
        if state["position"] < size:
            taken += list(last)
    assert sorted(taken) == list(range(size))
    assert taken == list(samplers(size, 1, seed=3)[0])


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [0, 1, 3, 10, 12])
def test_the_last_samples_are_shared_left_out_or_completed_as_it_is_asked(size: int, num_ranks: int) -> None:
    shared = [list(each) for each in samplers(size, num_ranks)]
    assert sorted(itertools.chain(*shared)) == list(range(size))
    assert max(map(len, shared)) - min(map(len, shared)) <= 1
    dropped = [list(each) for each in samplers(size, num_ranks, drop_last=True)]
    assert {len(part) for part in dropped} == {size // num_ranks}
    padding = samplers(size, num_ranks, pad=True)
    num_padded = {each.num_padded for each in padding}
    padded = [list(each) for each in padding]
    assert {len(part) for part in padded} == {-(-size // num_ranks)}
    assert num_padded == {sum(map(len, padded)) - size}
    assert set(itertools.chain(*padded)) == set(range(size))
    for each, part in zip(samplers(size, num_ranks), shared, strict=True):
        assert len(each) == len(part)


def test_the_order_is_that_of_seed_and_epoch_whatever_the_ranks() -> None:
    def order(num_ranks: int, **arguments: Any) -> list[int]:
        ranks = samplers(24, num_ranks, **arguments)
        for each in ranks:
            each.set_epoch(2)
        return [index for row in zip(*ranks, strict=True) for index in row]

    assert order(1) == order(2) == order(3) == order(4) != order(2, seed=1)
    assert order(2, shuffle=False) == list(range(24))
    (again,) = samplers(24, 1)
    assert list(again) != order(1)


def test_an_epoch_that_goes_on_does_so_once() -> None:
    (first,) = samplers(10, 1)
    first.set_epoch(4)
    stream = iter(first)
    taken = [next(stream) for _ in range(4)]
    (second,) = samplers(10, 1)
    second.load_state_dict(first.state_dict())
    second.set_epoch(4)  # as a loop does that begins with the epoch that was saved
    assert len(second) == 6
    assert sorted(taken + list(second)) == list(range(10))
    assert sorted(second) == list(range(10))
    second.set_epoch(5)
    assert len(second) == 10


def test_an_iteration_that_was_left_early_begins_anew() -> None:
    (sampler,) = samplers(10, 1)
    first = next(iter(sampler))
    assert next(iter(sampler)) == first and len(sampler) == 10


def test_a_loader_that_reads_ahead_says_how_far_its_loop_has_come() -> None:
    sampler = ElasticDistributedSampler(range(40), 2, 1)
    batches = iter(DataLoader(torch.arange(40), batch_size=4, sampler=sampler))  # type: ignore[arg-type]
    for _ in range(3):
        next(batches)
    assert sampler.state_dict(num_taken=8)["position"] == 16


def test_ranks_whose_iterations_have_ended_in_an_incomplete_round_stand_at_the_epochs_end() -> None:
    ranks = samplers(5, 2)
    assert sorted(itertools.chain(*map(list, ranks))) == list(range(5))
    assert [each.state_dict()["position"] for each in ranks] == [5, 5]
    dropping = samplers(5, 2, drop_last=True)
    assert [len(list(each)) for each in dropping] == [2, 2]
    assert [each.state_dict()["position"] for each in dropping] == [4, 4]


@given(size=st.integers(1, 30), num_ranks=st.integers(1, 4), weight=st.integers(1, 2), drop_last=st.booleans())
def test_a_state_at_an_epochs_end_begins_that_epoch_anew(
    size: int, num_ranks: int, weight: int, drop_last: bool
) -> None:
    options: dict[str, Any] = {"drop_last": drop_last, "share_weights": [weight] + [1] * (num_ranks - 1)}
    for first, second in zip(*(samplers(size, num_ranks, **options) for _ in range(2)), strict=True):
        taken = list(first)
        second.load_state_dict(first.state_dict())
        assert len(second) == len(taken)
        assert list(second) == taken


def test_a_state_within_a_ranks_part_of_an_incomplete_round_is_refused_and_loses_no_sample() -> None:
    first, second = samplers(6, 2, share_weights=[3, 1])
    stream, other = iter(first), iter(second)
    taken = [next(stream) for _ in range(4)]
    next(other)
    with pytest.raises(ValueError, match="1 of its 2 samples in a round"):
        first.state_dict()
    assert len({*taken, next(stream)}) == 5
    assert [next(each, None) for each in (stream, other)] == [None, None]
    assert [each.state_dict()["position"] for each in (first, second)] == [6, 6]


@pytest.mark.parametrize(
    "make",
    [
        lambda: WeightedRandomSampler([0.1, 0.9, 0.5], 20),
        lambda: SubsetRandomSampler([5, 6, 7, 8, 9]),
        lambda: RandomSampler(range(9), replacement=True, num_samples=30),
        lambda: [3, 1, 2],
        lambda: range(5, 12),
    ],
)
def test_the_order_of_another_sampler_is_shared_out(make: Any) -> None:
    def of(num_ranks: int, epoch: int = 1) -> list[ElasticDistributedSampler]:
        ranks = [ElasticDistributedSampler(None, num_ranks, rank, sampler=make()) for rank in range(num_ranks)]
        for each in ranks:
            each.set_epoch(epoch)
        return ranks

    whole = list(of(1)[0])
    assert [index for row in zip(*of(2), strict=False) for index in row] == whole[: len(whole) // 2 * 2]
    ranks = of(2)
    streams = [iter(each) for each in ranks]
    for stream in streams:
        next(stream)
    (after,) = of(1, epoch=0)
    after.load_state_dict(ranks[0].state_dict())
    assert list(after) == whole[2:]


def test_another_order_is_refused_and_nothing_is_changed() -> None:
    (sampler,) = samplers(10, 1)
    sampler.set_epoch(3)
    for state in (
        ElasticDistributedSampler(range(11), 1, 0).state_dict(),
        ElasticDistributedSampler(range(10), 1, 0, shuffle=False).state_dict(),
        ElasticDistributedSampler(None, 1, 0, sampler=[1, 2]).state_dict(),
    ):
        with pytest.raises(ValueError, match="give it the dataset and the arguments with which the state was saved"):
            sampler.load_state_dict(state)
    assert sampler.state_dict()["epoch"] == 3
    drawn = ElasticDistributedSampler(None, 1, 0, sampler=[1, 2, 3])
    with pytest.raises(ValueError, match="the state is of the order"):
        drawn.load_state_dict(ElasticDistributedSampler(None, 1, 0, sampler=[1, 3, 2]).state_dict())


def test_a_loader_that_is_given_a_samplers_state_says_whose_it_is() -> None:
    (sampler,) = samplers(8, 1)
    with pytest.raises(ValueError, match=r"give it to the sampler's load_state_dict\(\)"):
        ElasticDataLoader(range(8)).load_state_dict(sampler.state_dict())


def test_the_seed_of_a_state_is_taken_over() -> None:
    (saved,) = samplers(20, 1, seed=9)
    (sampler,) = samplers(20, 1, seed=1)
    sampler.load_state_dict(saved.state_dict())
    assert list(sampler) == list(saved)


def test_a_dataset_that_grows_between_epochs_is_shuffled_anew() -> None:
    dataset = [0, 1, 2]
    sampler = ElasticDistributedSampler(dataset, 1, 0)
    assert sorted(sampler) == [0, 1, 2]
    dataset.append(3)
    sampler.set_epoch(1)
    assert sorted(sampler) == [0, 1, 2, 3] and len(sampler) == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dataset": None}, "give a dataset, or a sampler"),
        ({"sampler": [1]}, "and not both"),
        ({"num_replicas": 2, "rank": 2}, "rank is 2 of 2 replicas; allowed: 0 to num_replicas - 1"),
        ({"num_replicas": 0, "rank": 0}, "rank is 0 of 0 replicas"),
        ({"pad": True, "drop_last": True}, "pad and drop_last are both True"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ElasticDistributedSampler(**{"dataset": range(5)} | arguments)


def test_a_sampler_that_shares_out_by_itself_is_refused_where_another_shares_its_order_out() -> None:
    sampler = ElasticDistributedSampler(None, 1, 0, sampler=DistributedSampler(range(5), 2, 0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="DistributedSampler shares its samples out by itself"):
        iter(sampler).__next__()
