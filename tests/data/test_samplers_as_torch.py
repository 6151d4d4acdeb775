"""The public behaviour of torch's DataLoader as its documentation states it, a test per sentence: samplers, batch
samplers, and datasets that are made of others.

Each runs on torch's own loader too, which proves the test. Where ours is another, a test of ours alone says so and why.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)
from torch.utils.data._utils.collate import default_collate_fn_map

from elastic_ext.data.batch_plan import BatchPlan
from elastic_ext.data.loader import ElasticDataLoader
from tests.support.loading import Numbers, changed, indices_in

pytestmark = pytest.mark.usefixtures("started_once", "no_process_left")
WORDS = ["four", "a", "three", "to"]


def as_they_are(samples: Any) -> Any:
    return samples


# --- samplers -------------------------------------------------------------------------------------------------------


class ByLength(Sampler[int]):
    """The first example of torch's documentation: the shortest first."""

    def __init__(self, data: list[str]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        yield from torch.argsort(torch.tensor([len(each) for each in self.data])).tolist()


class BatchesByLength(Sampler[list[int]]):
    """The second one: the same in batches."""

    def __init__(self, data: list[str], batch_size: int) -> None:
        self.data, self.batch_size = data, batch_size

    def __len__(self) -> int:
        return (len(self.data) + self.batch_size - 1) // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for batch in torch.chunk(torch.argsort(torch.tensor([len(each) for each in self.data])), len(self)):
            yield batch.tolist()


def test_a_sampler_of_ones_own_orders_samples(loader_class: Any) -> None:
    loader = loader_class(WORDS, batch_size=None, sampler=ByLength(WORDS))
    assert list(loader) == ["a", "to", "four", "three"] and len(loader) == 4


def test_a_sampler_needs_no_length_to_be_loaded_by(loader_class: Any) -> None:
    class Unmeasured(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([2, 0])

    loader = loader_class(WORDS, batch_size=None, sampler=Unmeasured())
    assert [list(loader) for _ in range(2)] == [["three", "four"]] * 2


def test_a_sampler_that_changes_is_asked_anew_before_and_between_loops(loader_class: Any) -> None:
    sampler = SubsetRandomSampler([0, 1, 2, 3])
    loader = loader_class(Numbers(10), batch_size=2, sampler=sampler)
    assert len(loader) == 2
    sampler.indices = [4, 5, 6, 7, 8, 9]
    assert len(loader) == 3 and sorted(indices_in(loader)) == [4, 5, 6, 7, 8, 9]
    sampler.indices = [1, 2]
    assert len(loader) == 1 and sorted(indices_in(loader)) == [1, 2]


def test_a_batch_sampler_may_give_its_batches_once() -> None:
    loader = ElasticDataLoader(Numbers(4), batch_sampler=iter([[0, 1], [2, 3]]))
    assert len(loader) == 2 and indices_in(loader) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("sampler", "size"),
    [
        (WeightedRandomSampler([0.1, 0.9, 0.4, 0.7, 3.0, 0.6], 5, replacement=False), 5),
        (WeightedRandomSampler([0.0, 0.0, 1.0], 8), 8),
        (RandomSampler(range(6), num_samples=4), 4),
        (RandomSampler(range(6), num_samples=8), 8),
    ],
    ids=["weighted, each once", "weighted", "fewer", "more"],
)
def test_torchs_samplers_draw_as_many_as_they_say(loader_class: Any, sampler: Any, size: int) -> None:
    loader = loader_class(range(6), batch_size=None, sampler=sampler)
    found = list(loader)
    assert len(found) == len(loader) == size
    if size <= 5:
        assert len(set(found)) == size
    elif isinstance(sampler, WeightedRandomSampler):
        assert set(found) == {2}
    else:
        assert set(found) == set(range(6))


# --- batch samplers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_sampler_says_which_samples_a_batch_has(loader_class: Any, num_workers: int) -> None:
    loader = loader_class(WORDS, batch_sampler=BatchesByLength(WORDS, 3), num_workers=num_workers)
    assert list(loader) == [["a", "to"], ["four", "three"]] and len(loader) == 2


@pytest.mark.parametrize(
    "batches",
    [[[0, 2], [1]], ((0, 2), (1,)), [torch.tensor([0, 2]), torch.tensor([1])], {(0, 2): "", (1,): ""}],
    ids=["lists", "tuples", "tensors", "a mapping"],
)
def test_a_batch_sampler_may_be_any_iterable_of_batches_of_keys(loader_class: Any, batches: Any) -> None:
    loader = loader_class(WORDS, batch_sampler=batches)
    assert [list(loader) for _ in range(2)] == [[["four", "three"], ["a"]]] * 2 and len(loader) == 2


def test_keys_of_a_batch_sampler_may_be_no_numbers(loader_class: Any) -> None:
    loader = loader_class({"a": 1, ("b", 0): 2}, batch_sampler=[["a", ("b", 0)], ["a"]], collate_fn=as_they_are)
    assert list(loader) == [[1, 2], [1]]


def test_batches_of_a_batch_sampler_may_have_any_size(loader_class: Any) -> None:
    loader = loader_class(range(9), batch_sampler=[[0], [], [1, 2, 3], [3, 3]], collate_fn=as_they_are)
    assert list(loader) == [[0], [], [1, 2, 3], [3, 3]]


class OneBuffer:
    """Fills the same list, or array, for each batch."""

    def __init__(self, buffer: Any, num_batches: int) -> None:
        self.buffer, self.num_batches = buffer, num_batches

    def __iter__(self) -> Iterator[Any]:
        size = len(self.buffer)
        for number in range(self.num_batches):
            for place in range(size):
                self.buffer[place] = number * size + place
            yield self.buffer

    def __len__(self) -> int:
        return self.num_batches


@pytest.mark.parametrize("buffer", [[0, 0], np.zeros(2, dtype=int), torch.zeros(2, dtype=torch.int)], ids=type)
def test_a_batch_sampler_may_fill_one_list_over_and_over(loader_class: Any, buffer: Any) -> None:
    loader = loader_class(Numbers(6), batch_sampler=OneBuffer(buffer, 3))
    assert [indices.tolist() for indices, _ in loader] == [[0, 1], [2, 3], [4, 5]]


def test_a_batch_sampler_leaves_no_size_and_no_sampler_but_torchs_in_turn(loader_class: Any) -> None:
    batches = [[0], [1]]
    loader = loader_class(WORDS, batch_sampler=batches)
    assert loader.batch_sampler is batches and loader.batch_size is None and loader.drop_last is False
    assert type(loader.sampler) is SequentialSampler and loader.collate_fn is default_collate


def test_samples_of_a_batch_are_collated_together(loader_class: Any) -> None:
    data = torch.arange(12).reshape(6, 2)
    batches = list(loader_class(data, batch_sampler=[[5, 0], [1]]))
    assert torch.equal(batches[0], data[[5, 0]]) and torch.equal(batches[1], data[[1]])


def test_a_dataset_that_gives_several_samples_at_once_is_asked_for_such_a_batch(loader_class: Any) -> None:
    class Whole(Dataset[str]):
        def __len__(self) -> int:
            return 4

        def __getitems__(self, indices: list[int]) -> list[str]:
            return [f"{index}/{len(indices)}" for index in indices]

    loader = loader_class(Whole(), batch_sampler=[[3, 0], [1]], collate_fn=as_they_are)
    assert list(loader) == [["3/2", "0/2"], ["1/1"]]


def test_a_batch_sampler_may_share_batches_out_among_ranks(loader_class: Any) -> None:
    class Shared:
        num_replicas, rank = 2, 1

        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 1], [2, 3], [4, 5], [6, 7]][self.rank :: self.num_replicas])

    assert indices_in(loader_class(Numbers(8), batch_sampler=Shared())) == [2, 3, 6, 7]


def test_a_batch_sampler_is_asked_anew_for_each_loop(loader_class: Any) -> None:
    class Growing(Sampler[list[int]]):
        num_loops = 0

        def __iter__(self) -> Iterator[list[int]]:
            self.num_loops += 1
            return iter([list(range(self.num_loops))])

    loader = loader_class(WORDS, batch_sampler=Growing())
    assert [list(loader) for _ in range(2)] == [[["four"]], [["four", "a"]]]


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [3, 3, 3, 1]), (True, [3, 3, 3])])
def test_torchs_batch_sampler_wraps_a_sampler(loader_class: Any, drop_last: bool, sizes: list[int]) -> None:
    batches = BatchSampler(SequentialSampler(range(10)), batch_size=3, drop_last=drop_last)
    loader = loader_class(range(10), batch_sampler=batches)
    found = list(loader)
    assert [len(batch) for batch in found] == sizes and len(loader) == len(sizes)
    assert list(itertools.chain(*(batch.tolist() for batch in found))) == list(range(sum(sizes)))


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_size_that_is_set_at_torchs_batch_sampler_is_that_of_the_next_loop(
    loader_class: Any, drop_last: bool
) -> None:
    batches = BatchSampler(SequentialSampler(range(10)), 3, drop_last)
    given, made = loader_class(range(10), batch_sampler=batches), loader_class(range(10), 3, drop_last=drop_last)
    assert given.batch_sampler is batches
    for loader in (given, made):
        assert [len(batch) for batch in loader] == ([3, 3, 3] if drop_last else [3, 3, 3, 1])
        loader.batch_sampler.batch_size = 4
        assert len(loader) == (2 if drop_last else 3)
        assert [len(batch) for batch in loader] == ([4, 4] if drop_last else [4, 4, 2])


def test_a_size_that_is_set_at_torchs_batch_sampler_is_refused_where_a_trainer_says_sizes() -> None:
    batches = BatchSampler(SequentialSampler(range(10)), 2, False)
    loader = ElasticDataLoader(range(10), batch_sampler=batches)
    loader.plan(BatchPlan(global_batch=4, num_ranks=1, micro_batch=4), 0)
    assert [len(batch) for batch in loader] == [4, 4, 2]
    batches.batch_size = 5
    with pytest.raises(ValueError, match=r"was set to 5, and a trainer says .* change dataloader\.batch_size"):
        iter(loader)


def test_torchs_batch_sampler_takes_any_iterable(loader_class: Any) -> None:
    loader = loader_class(WORDS, batch_sampler=BatchSampler([3, 1, 0], 2, False))
    assert [list(loader) for _ in range(2)] == [[["to", "a"], ["four"]]] * 2


# --- datasets that are made of others -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_datasets_that_are_made_of_others_are_loaded(loader_class: Any, num_workers: int) -> None:
    numbers: Any = list(range(4))
    words: Any = WORDS
    tensors = TensorDataset(torch.arange(4), torch.arange(4) * 10)

    def loaded(dataset: Any) -> Any:
        return list(loader_class(dataset, 2, num_workers=num_workers, collate_fn=as_they_are))

    assert loaded(ConcatDataset([numbers, words])) == [[0, 1], [2, 3], ["four", "a"], ["three", "to"]]
    assert loaded(StackDataset(numbers, words))[0] == [(0, "four"), (1, "a")]
    assert loaded(StackDataset(number=numbers, word=words))[1][1] == {"number": 3, "word": "to"}
    assert loaded(Subset(tensors, [3, 1])) == [
        [(torch.tensor(3), torch.tensor(30)), (torch.tensor(1), torch.tensor(10))]
    ]
    parts = random_split(numbers, [0.5, 0.5], generator=torch.Generator().manual_seed(42))
    assert sorted(itertools.chain(*loaded(parts[0]), *loaded(parts[1]))) == numbers


# --- default_collate ------------------------------------------------------------------------------------------------


class Custom:
    """Something that default_collate does not know."""


def test_default_collate_may_be_called_by_a_collate_fn_for_what_it_knows(loader_class: Any) -> None:
    def collate(samples: list[Any]) -> Any:
        return "custom" if isinstance(samples[0], Custom) else default_collate(samples)

    assert list(loader_class([Custom(), Custom()], 2, collate_fn=collate)) == ["custom"]
    assert next(iter(loader_class([1, 2], 2, collate_fn=collate))).tolist() == [1, 2]


def test_default_collate_may_be_told_of_other_types(loader_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def collate(samples: list[Any], *, collate_fn_map: Any = None) -> int:
        return len(samples)

    monkeypatch.setitem(default_collate_fn_map, Custom, collate)
    assert list(loader_class([{"custom": Custom()}] * 3, 2)) == [{"custom": 2}, {"custom": 1}]


# --- types ----------------------------------------------------------------------------------------------------------


def test_a_loader_is_generic_in_the_type_of_samples(loader_class: Any) -> None:
    assert issubclass(loader_class[int].__origin__, DataLoader)
    assert len(list(loader_class[int](range(3)))) == 3


# --- where ours is another on purpose -------------------------------------------------------------------------------


def test_torchs_batch_sampler_leaves_the_loader_its_size_which_may_change() -> None:
    """torch's loader has none then; here such a batch sampler is what a loader makes of a sampler and a size."""
    batches = BatchSampler(SequentialSampler(range(10)), batch_size=3, drop_last=True)
    assert DataLoader[Any](range(10), batch_sampler=batches).batch_size is None  # type: ignore[arg-type]
    loader = ElasticDataLoader(range(10), batch_sampler=batches, collate_fn=as_they_are)
    assert (loader.batch_size, loader.drop_last, loader.sampler) == (3, True, batches.sampler)
    found = iter(loader)
    next(found)
    changed(loader, batch_size=5)
    assert next(found) == [3, 4, 5, 6, 7]


def test_a_sampler_without_a_length_has_one_here_as_it_is_asked_for_a_whole_epoch() -> None:
    """torch's loader raises TypeError."""
    loader = ElasticDataLoader(range(5), sampler=(index for index in [1, 2]))
    with pytest.raises(TypeError, match="has no len"):
        len(DataLoader[Any](range(5), sampler=(index for index in [1, 2])))  # type: ignore[arg-type]
    assert len(loader) == 2


class Around(Sampler[int]):
    """A sampler that hides another one, which draws from this process's random numbers."""

    def __init__(self, size: int) -> None:
        self.inner = RandomSampler(range(size))

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


def test_whatever_a_sampler_draws_from_the_epochs_order_is_the_seeds() -> None:
    """torch's order is another in each process; here ranks have to have the same, and so has a run that goes on."""

    def epochs(own_seed: int, seed: int = 0) -> list[list[int]]:
        torch.manual_seed(own_seed)
        loader = ElasticDataLoader(Numbers(20), sampler=Around(20), seed=seed)
        found = [indices_in(loader) for _ in range(2)]
        assert all(sorted(each) == list(range(20)) for each in found)
        return found

    first, second = epochs(1)
    assert epochs(2) == [first, second] and first != second and epochs(1, seed=1)[0] != first
    begun = ElasticDataLoader(Numbers(20), 4, sampler=Around(20))
    batches = iter(begun)
    assert indices_in([next(batches)]) == first[:4]
    going_on = ElasticDataLoader(Numbers(20), 4, sampler=Around(20))
    going_on.load_state_dict(begun.state_dict())
    assert indices_in(going_on) == first[4:]


class Pairs:
    """A batch sampler."""

    def __init__(self, sampler: Sampler[int]) -> None:
        self.order = sampler

    def __iter__(self) -> Iterator[list[int]]:
        order = iter(self.order)
        return (list(pair) for pair in zip(order, order, strict=True))


class Named(Sampler[int]):
    """A sampler whose order is that of the epoch that it was told last."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch])


def test_the_loader_names_its_samplers_epoch() -> None:
    """torch's loader does not know of epochs; here the one that a state or set_epoch of the loader says counts."""
    sampler = Named()
    loader = ElasticDataLoader(Numbers(20), sampler=sampler)
    sampler.set_epoch(5)
    assert indices_in(loader) == [0] and indices_in(loader) == [1]
    loader.set_epoch(5)
    assert indices_in(loader) == [5]


def test_seeding_a_generator_later_changes_no_order() -> None:
    """torch's loader draws a seed from it for each loop."""
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    loaders = [ElasticDataLoader(Numbers(20), shuffle=True, generator=each) for each in generators]
    generators[1].manual_seed(2)
    assert indices_in(loaders[0]) == indices_in(loaders[1])


def test_batches_are_drawn_alike_on_all_ranks_but_where_each_has_a_seed_of_its_own() -> None:
    """torch's loader leaves it to what the script has seeded on each rank."""

    def drawn(rank: int, seed: int | None = None) -> list[int]:
        torch.manual_seed(rank)
        return indices_in(ElasticDataLoader(Numbers(20), batch_sampler=Pairs(Around(20)), seed=seed))

    assert drawn(0) == drawn(1) and drawn(0, seed=0) != drawn(1, seed=1)


def test_drawing_an_order_uses_up_none_of_this_processs_random_numbers() -> None:
    """torch's RandomSampler draws a seed from them; here it is the same order wherever they stand."""
    torch.manual_seed(5)
    list(ElasticDataLoader(range(4), sampler=Around(4), generator=torch.Generator()))
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of torch's loop, which is half made
def test_workers_are_given_one_batch_at_least() -> None:
    """torch's loader can be made without, and its loops raise."""
    with pytest.raises(AssertionError, match="prefetch_factor must be greater than 0"):
        iter(DataLoader[Any](range(3), num_workers=1, prefetch_factor=0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prefetch_factor is 0"):
        ElasticDataLoader(range(3), num_workers=1, prefetch_factor=0)
