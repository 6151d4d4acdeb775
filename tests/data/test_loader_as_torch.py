"""The public behaviour of torch's DataLoader as its documentation states it, a test per sentence: what it is given, in
which order samples come, how they become batches. What workers do is in test_loader_workers_as_torch.py.

Each runs on torch's own loader too, which proves the test. Where ours is another, a test of ours alone says so and why.
"""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import sys
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
    default_convert,
    get_worker_info,
)

from elastic_ext.data.loader import ElasticDataLoader

pytestmark = pytest.mark.usefixtures("started_once", "no_process_left")
Point = namedtuple("Point", ["x", "y"])


class Letters(Dataset[str]):
    """Samples that are no tensors."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> str:
        return "abcdefg"[index]


class Drawing(Sampler[int]):
    """A sampler of a user's own."""

    def __iter__(self) -> Iterator[int]:
        return iter([5, 2, 2, 6])

    def __len__(self) -> int:
        return 4


def as_they_are(samples: Any) -> Any:
    return samples


# --- what it is given -----------------------------------------------------------------------------------------------


def test_arguments_have_torchs_defaults(loader_class: Any) -> None:
    loader = loader_class(range(10))
    told = {
        "batch_size": 1,
        "num_workers": 0,
        "pin_memory": False,
        "drop_last": False,
        "timeout": 0,
        "worker_init_fn": None,
        "multiprocessing_context": None,
        "generator": None,
        "prefetch_factor": None,
        "persistent_workers": False,
        "pin_memory_device": "",
        "in_order": True,
        "collate_fn": default_collate,
    }
    assert {name: getattr(loader, name) for name in told} == told
    assert type(loader.sampler) is SequentialSampler and type(loader.batch_sampler) is BatchSampler
    assert isinstance(loader, DataLoader)


def test_arguments_may_be_given_by_position(loader_class: Any) -> None:
    context = torch.multiprocessing.get_context("fork")
    generator = torch.Generator()
    sampler = [4, 5, 6]
    loader = loader_class(range(10), 2, False, sampler, None, 1, list, False, True, 9, print, context, generator)
    assert (loader.batch_size, loader.sampler, loader.num_workers, loader.collate_fn) == (2, sampler, 1, list)
    assert (loader.pin_memory, loader.drop_last, loader.timeout, loader.worker_init_fn) == (False, True, 9, print)
    assert (loader.multiprocessing_context, loader.generator) == (context, generator)


def test_prefetch_factor_is_2_by_default_where_there_are_workers(loader_class: Any) -> None:
    assert loader_class(range(10), num_workers=1).prefetch_factor == 2
    assert loader_class(range(10), num_workers=1, prefetch_factor=5).prefetch_factor == 5


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"sampler": [1], "shuffle": True}, ValueError, "sampler option is mutually exclusive with shuffle"),
        ({"batch_sampler": [[1]], "batch_size": 2}, ValueError, "batch_sampler option is mutually exclusive with"),
        ({"batch_sampler": [[1]], "shuffle": True}, ValueError, "batch_sampler option is mutually exclusive with"),
        ({"batch_sampler": [[1]], "sampler": [1]}, ValueError, "batch_sampler option is mutually exclusive with"),
        ({"batch_sampler": [[1]], "drop_last": True}, ValueError, "batch_sampler option is mutually exclusive with"),
        ({"batch_size": None, "drop_last": True}, ValueError, "mutually exclusive with drop_last"),
        ({"batch_size": 0}, ValueError, "batch_size should be a positive integer"),
        ({"batch_size": 1.5}, ValueError, "batch_size should be a positive integer"),
        ({"num_workers": -1}, ValueError, "num_workers option should be non-negative"),
        ({"timeout": -1}, ValueError, "timeout option should be non-negative"),
        ({"prefetch_factor": 2}, ValueError, "prefetch_factor option could only be specified in multiprocessing"),
        ({"prefetch_factor": -2, "num_workers": 1}, ValueError, "prefetch_factor option should be non-negative"),
        ({"persistent_workers": True}, ValueError, "persistent_workers option needs num_workers > 0"),
        ({"multiprocessing_context": "fork"}, ValueError, "multiprocessing_context can only be used with"),
        ({"multiprocessing_context": "frok", "num_workers": 1}, ValueError, "valid start method in"),
        ({"multiprocessing_context": 3, "num_workers": 1}, TypeError, "should be a valid context object"),
        ({"colour": "blue"}, TypeError, "unexpected keyword argument 'colour'"),
    ],
)
def test_arguments_that_exclude_one_another_are_refused(
    loader_class: Any, arguments: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        loader_class(range(10), **arguments)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"shuffle": True}, "expected unspecified shuffle option, but got shuffle=True"),
        ({"shuffle": 3}, "expected unspecified shuffle option, but got shuffle=3"),
        ({"sampler": SequentialSampler(range(3))}, "expected unspecified sampler option, but got sampler="),
        ({"sampler": 3}, "expected unspecified sampler option, but got sampler=3"),
        (
            {"batch_sampler": BatchSampler(SequentialSampler(range(3)), 3, False)},
            "expected unspecified batch_sampler option, but got batch_sampler=",
        ),
        ({"batch_sampler": 3}, "expected unspecified batch_sampler option, but got batch_sampler=3"),
    ],
)
def test_arguments_that_say_an_order_are_refused_beside_a_stream(
    loader_class: Any, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        loader_class(Stream(), **arguments)


def test_an_empty_dataset_cannot_be_shuffled(loader_class: Any) -> None:
    with pytest.raises(ValueError, match="num_samples should be a positive integer value, but got num_samples=0"):
        loader_class([], shuffle=True)


@pytest.mark.parametrize(
    "name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
)
def test_what_batches_are_made_of_cannot_be_set_afterwards(loader_class: Any, name: str) -> None:
    loader = loader_class(range(10))
    before = getattr(loader, name)
    with pytest.raises(ValueError, match=f"{name} attribute should not be set after {loader_class.__name__} is init"):
        setattr(loader, name, 2)
    assert getattr(loader, name) is before


def test_collate_fn_may_be_set_afterwards(loader_class: Any) -> None:
    loader = loader_class(range(4), batch_size=2)
    loader.collate_fn = as_they_are
    assert list(loader) == [[0, 1], [2, 3]]


def test_more_workers_than_processors_are_warned_of(loader_class: Any) -> None:
    with pytest.warns(UserWarning, match="This DataLoader will create 1000 worker processes"):
        loader_class(range(10), num_workers=1000)


# --- order and sampler ----------------------------------------------------------------------------------------------


def test_a_dataset_may_have_keys_that_are_no_numbers(loader_class: Any) -> None:
    dataset = {"a": 1, "b": 2, ("c", 0): 3}
    loader = loader_class(dataset, batch_size=2, sampler=["b", ("c", 0), "a"], collate_fn=as_they_are)
    assert list(loader) == [[2, 3], [1]]


def test_a_dataset_without_a_length_is_loaded_by_a_sampler(loader_class: Any) -> None:
    class Squares:
        def __getitem__(self, index: int) -> int:
            return index**2

    assert list(loader_class(Squares(), batch_size=None, sampler=[3, 4])) == [9, 16]
    with pytest.raises(TypeError, match="has no len"):
        iter(loader_class(Squares())).__next__()


def test_without_shuffle_samples_come_in_turn(loader_class: Any) -> None:
    assert list(loader_class(Letters(), batch_size=None)) == list("abcdefg")


def test_shuffle_gives_each_sample_once_and_reshuffles_at_every_epoch(loader_class: Any) -> None:
    loader = loader_class(range(40), batch_size=None, shuffle=True, generator=torch.Generator().manual_seed(1))
    epochs = [list(loader) for _ in range(3)]
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_generator_of_the_same_seed_shuffles_alike(loader_class: Any) -> None:
    def epochs(seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        loader = loader_class(range(40), batch_size=None, shuffle=True, generator=generator)
        return [list(loader) for _ in range(2)]

    assert epochs(1) == epochs(1) != epochs(2)


def test_a_sampler_says_which_sample_comes_next(loader_class: Any) -> None:
    loader = loader_class(Letters(), batch_size=None, sampler=Drawing())
    assert [list(loader) for _ in range(2)] == [["f", "c", "c", "g"]] * 2


@pytest.mark.parametrize("sampler", [[3, 1], (3, 1), {3: "", 1: ""}, np.array([3, 1]), torch.tensor([3, 1])])
def test_a_sampler_may_be_any_iterable_with_a_length(loader_class: Any, sampler: Any) -> None:
    loader = loader_class(Letters(), batch_size=1, sampler=sampler, collate_fn=as_they_are)
    assert list(loader) == [["d"], ["b"]] and len(loader) == 2


def test_a_sampler_may_give_lists_of_keys_that_are_read_at_once(loader_class: Any) -> None:
    data = torch.arange(10) * 10
    loader = loader_class(data, batch_size=None, sampler=BatchSampler(SequentialSampler(range(10)), 4, False))
    assert [batch.tolist() for batch in loader] == [[0, 10, 20, 30], [40, 50, 60, 70], [80, 90]]
    assert len(loader) == 3


@pytest.mark.parametrize(
    "sampler",
    [RandomSampler(range(20), replacement=True, num_samples=30), SubsetRandomSampler(range(5, 15))],
    ids=["with replacement", "of a subset"],
)
def test_torchs_samplers_that_draw_are_taken(loader_class: Any, sampler: Any) -> None:
    samples = list(loader_class(range(20), batch_size=None, sampler=sampler))
    assert len(samples) == len(sampler) and set(samples) <= set(range(20))


# --- batches --------------------------------------------------------------------------------------------------------


def test_batches_are_of_one_sample_by_default(loader_class: Any) -> None:
    assert [batch.tolist() for batch in loader_class(range(3))] == [[0], [1], [2]]


def test_the_last_batch_is_smaller_where_samples_run_out_unless_it_is_dropped(loader_class: Any) -> None:
    assert [len(batch) for batch in loader_class(range(7), batch_size=3)] == [3, 3, 1]
    assert [len(batch) for batch in loader_class(range(7), batch_size=3, drop_last=True)] == [3, 3]
    assert [len(batch) for batch in loader_class(range(6), batch_size=3, drop_last=True)] == [3, 3]


@pytest.mark.parametrize(
    ("arguments", "length"),
    [
        ({}, 7),
        ({"batch_size": 3}, 3),
        ({"batch_size": 3, "drop_last": True}, 2),
        ({"batch_size": None}, 7),
        ({"batch_size": 3, "sampler": Drawing()}, 2),
        ({"batch_size": 3, "sampler": Drawing(), "drop_last": True}, 1),
        ({"batch_size": 50}, 1),
        ({"batch_size": 50, "drop_last": True}, 0),
    ],
)
def test_the_length_is_that_of_the_sampler_in_batches(
    loader_class: Any, arguments: dict[str, Any], length: int
) -> None:
    loader = loader_class(Letters(), **arguments)
    assert len(loader) == length == len(list(loader))
    iterator = iter(loader)
    assert len(iterator) == length


def test_loading_is_collating_the_samples_of_what_the_batch_sampler_gives(loader_class: Any) -> None:
    data = torch.arange(22).reshape(11, 2)
    loader = loader_class(data, batch_size=4)
    by_hand = [loader.collate_fn([data[index] for index in indices]) for indices in loader.batch_sampler]
    assert all(torch.equal(*pair) for pair in zip(loader, by_hand, strict=True))


def test_without_batches_loading_is_collating_each_sample_by_itself(loader_class: Any) -> None:
    seen: list[str] = []

    def collate(sample: str) -> str:
        seen.append(sample)
        return sample.upper()

    loader = loader_class(Letters(), batch_size=None, collate_fn=collate)
    assert list(loader) == list("ABCDEFG") and seen == list("abcdefg")
    assert loader.batch_sampler is None


def test_collate_fn_is_called_with_a_list_of_samples_and_what_it_gives_is_the_batch(loader_class: Any) -> None:
    seen: list[list[str]] = []

    def collate(samples: list[str]) -> str:
        seen.append(samples)
        return "+".join(samples)

    assert list(loader_class(Letters(), batch_size=3, collate_fn=collate)) == ["a+b+c", "d+e+f", "g"]
    assert seen == [["a", "b", "c"], ["d", "e", "f"], ["g"]]


def test_collate_fn_may_pad_samples_of_various_lengths(loader_class: Any) -> None:
    sequences = [torch.arange(length) for length in (1, 3, 2, 5)]
    loader = loader_class(sequences, batch_size=2, collate_fn=torch.nn.utils.rnn.pad_sequence)
    assert [tuple(batch.shape) for batch in loader] == [(3, 2), (5, 2)]


def test_a_dataset_that_gives_several_samples_at_once_is_asked_for_a_batch(loader_class: Any) -> None:
    class Whole(Letters):
        def __getitems__(self, indices: list[int]) -> list[str]:
            return [f"{self[index]}/{len(indices)}" for index in indices]

    loader = loader_class(Whole(), batch_size=4, collate_fn=as_they_are)
    assert list(loader) == [["a/4", "b/4", "c/4", "d/4"], ["e/3", "f/3", "g/3"]]


# --- the default collate_fn -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "batch"),
    [
        ([torch.ones(2, 3), torch.zeros(2, 3)], torch.stack([torch.ones(2, 3), torch.zeros(2, 3)])),
        ([np.ones(2, np.float32), np.zeros(2, np.float32)], torch.tensor([[1.0, 1.0], [0.0, 0.0]])),
        ([np.int16(1), np.int16(2)], torch.tensor([1, 2], dtype=torch.int16)),
        ([1.5, 2.5], torch.tensor([1.5, 2.5], dtype=torch.float64)),
        ([1, 2], torch.tensor([1, 2])),
        ([True, False], torch.tensor([True, False])),
        (["one", "two"], ["one", "two"]),
        ([b"one", b"two"], [b"one", b"two"]),
        ([(1, "a"), (2, "b")], [torch.tensor([1, 2]), ("a", "b")]),
        ([[1, 2.0], [3, 4.0]], [torch.tensor([1, 3]), torch.tensor([2.0, 4.0], dtype=torch.float64)]),
        ([{"A": 0, "B": "x"}, {"A": 100, "B": "y"}], {"A": torch.tensor([0, 100]), "B": ["x", "y"]}),
        ([OrderedDict(b=1, a=2), OrderedDict(b=3, a=4)], OrderedDict(b=torch.tensor([1, 3]), a=torch.tensor([2, 4]))),
        ([Point(0, 0.0), Point(1, 1.0)], Point(torch.tensor([0, 1]), torch.tensor([0.0, 1.0], dtype=torch.float64))),
        ([{"a": [(1, 2)]}, {"a": [(3, 4)]}], {"a": [[torch.tensor([1, 3]), torch.tensor([2, 4])]]}),
    ],
    ids=lambda value: type(value[0]).__name__ if isinstance(value, list) else "",
)
def test_the_default_batches_tensors_and_numbers_and_keeps_the_structure(
    loader_class: Any, samples: list[Any], batch: Any
) -> None:
    (found,) = loader_class(samples, batch_size=2)
    assert_alike(found, batch)


def assert_alike(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            assert_alike(found[name], expected[name])
    elif isinstance(expected, (list, tuple)) and not hasattr(expected, "_fields"):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other)
    elif isinstance(expected, tuple):
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other)
    else:
        assert found == expected


def test_images_with_classes_become_images_and_classes(loader_class: Any) -> None:
    images, classes = torch.rand(6, 3, 4, 4), torch.arange(6)
    for number, (image, label) in enumerate(loader_class(TensorDataset(images, classes), batch_size=2)):
        assert torch.equal(image, images[2 * number : 2 * number + 2])
        assert torch.equal(label, classes[2 * number : 2 * number + 2])


def test_samples_that_cannot_be_batched_are_refused_by_kind_and_by_size(loader_class: Any) -> None:
    with pytest.raises(TypeError, match="default_collate: batch must contain tensors, numpy arrays, numbers, dicts"):
        list(loader_class([object(), object()], batch_size=2))
    with pytest.raises(RuntimeError, match="each element in list of batch should be of equal size"):
        list(loader_class([[1], [1, 2]], batch_size=2))
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        list(loader_class([torch.ones(1), torch.ones(2)], batch_size=2))


@pytest.mark.parametrize(
    ("sample", "given"),
    [
        (0, 0),
        ("text", "text"),
        (2.5, 2.5),
        (np.array([0, 1]), torch.tensor([0, 1])),
        (np.float32(2), torch.tensor(2.0)),
        (torch.ones(2), torch.ones(2)),
        ({"a": np.array(1), "b": 2}, {"a": torch.tensor(1), "b": 2}),
        (Point(0, 0), Point(0, 0)),
        (Point(np.array(0), 1), Point(torch.tensor(0), 1)),
        ([np.array([0]), "x"], [torch.tensor([0]), "x"]),
        ((np.array([0]), "x"), [torch.tensor([0]), "x"]),
    ],
    ids=repr,
)
def test_without_batches_the_default_makes_tensors_of_arrays_and_leaves_the_rest(
    loader_class: Any, sample: Any, given: Any
) -> None:
    loader = loader_class([sample], batch_size=None)
    assert loader.collate_fn is default_convert
    (found,) = loader
    assert_alike(found, given)


# --- one process ----------------------------------------------------------------------------------------------------


def test_by_default_samples_are_made_in_this_process_when_they_are_wanted(loader_class: Any) -> None:
    made: list[tuple[int, int, Any]] = []

    class Noted(Letters):
        def __getitem__(self, index: int) -> str:
            made.append((index, os.getpid(), get_worker_info()))
            return super().__getitem__(index)

    batches = iter(loader_class(Noted(), batch_size=2))
    assert made == []
    next(batches)
    assert made == [(0, os.getpid(), None), (1, os.getpid(), None)]


def test_an_exception_of_the_dataset_arrives_as_it_is_and_the_next_batch_after_it(loader_class: Any) -> None:
    error = KeyError("no such letter")

    class Broken(Letters):
        def __getitem__(self, index: int) -> str:
            if index == 2:
                raise error
            return super().__getitem__(index)

    batches = iter(loader_class(Broken(), batch_size=2, collate_fn=as_they_are))
    next(batches)
    with pytest.raises(KeyError) as caught:
        next(batches)
    assert caught.value is error
    if loader_class is ElasticDataLoader and sys.version_info >= (3, 11):
        assert error.__notes__ == ["raised by the dataset for sample 2"]
    assert list(batches) == [["e", "f"], ["g"]]


def test_several_loops_over_a_loader_may_go_on_side_by_side(loader_class: Any) -> None:
    loader = loader_class(Letters(), batch_size=None, shuffle=True)
    pairs = [(one, other) for one in loader for other in loader]
    assert sorted(pairs) == sorted(itertools.product("abcdefg", repeat=2))


def test_a_loop_that_is_over_stays_over(loader_class: Any) -> None:
    batches = iter(loader_class(range(3)))
    assert iter(batches) is batches
    assert len(list(batches)) == 3
    assert list(batches) == []


def test_a_loader_can_be_copied_and_pickled(loader_class: Any) -> None:
    loader = loader_class(range(6), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2))
    next(iter(loader))
    for other in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert sorted(sample for batch in other for sample in batch.tolist()) == list(range(6))


# --- pinning --------------------------------------------------------------------------------------------------------


class Batch:
    """A batch of a type that pins itself."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples
        self.is_asked_to_pin = False

    def pin_memory(self) -> Batch:
        self.is_asked_to_pin = True
        return self


@pytest.mark.skipif(torch.accelerator.is_available(), reason="here batches are pinned")
def test_where_there_is_no_accelerator_nothing_is_pinned(loader_class: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true but no accelerator is found")
        (batch,) = loader_class(range(4), batch_size=4, collate_fn=Batch, pin_memory=True)
        (tensor,) = loader_class(range(4), batch_size=4, pin_memory=True)
    assert batch.samples == [0, 1, 2, 3] and not batch.is_asked_to_pin
    assert not tensor.is_pinned()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="here batches are pinned")
def test_pinning_that_cannot_be_done_and_its_device_are_warned_of(loader_class: Any) -> None:
    with pytest.warns(UserWarning, match="no accelerator is found, then device pinned memory won't be used"):
        list(loader_class(range(4), pin_memory=True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(loader_class(range(4), pin_memory=True, pin_memory_device="cuda"))
    assert "pin_memory_device is deprecated, the current accelerator will be used" in str(caught[0].message)
    assert len(caught) == 2


# --- where ours is another on purpose -------------------------------------------------------------------------------


def test_the_order_is_chosen_by_the_generators_seed_and_the_epoch_so_that_it_can_be_gone_on_with_anywhere() -> None:
    """torch's is chosen by the generator's state, of which nothing is left in the middle of an epoch."""
    generator = torch.Generator().manual_seed(1)
    loader = ElasticDataLoader(range(40), None, shuffle=True, generator=generator)
    first = list(loader)
    torch.rand(100, generator=generator)
    loader.set_epoch(0)
    assert list(loader) == first
    torch.manual_seed(5)
    assert list(ElasticDataLoader(range(40), None, shuffle=True, seed=1)) == first


def test_a_sampler_is_asked_for_a_whole_epoch_at_its_beginning_so_that_positions_in_it_can_be_told() -> None:
    """torch asks for a batch at a time, and so it must not be endless here."""
    asked: list[int] = []

    class Slowly(Drawing):
        def __iter__(self) -> Iterator[int]:
            for index in super().__iter__():
                asked.append(index)
                yield index

    batches = iter(ElasticDataLoader(Letters(), None, sampler=Slowly()))
    next(batches)
    assert asked == [5, 2, 2, 6]


def test_a_timeout_without_workers_waits_for_some_to_come() -> None:
    """torch asserts that there is none, in the loop; here workers may come in its middle."""
    assert len(list(ElasticDataLoader(range(3), timeout=5))) == 3
