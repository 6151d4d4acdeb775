"""The public behaviour of torch's DataLoader over an IterableDataset as its documentation states it, a test per
sentence. Datasets that are asked for samples by index are in test_loader_as_torch.py.

Each runs on torch's own loader too, which proves the test. Where ours is another, a test of ours alone says so and why.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
import os
import pickle
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    DataLoader,
    IterableDataset,
    IterDataPipe,
    Sampler,
    default_collate,
    default_convert,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper

from elastic_ext.data.batch_plan import BatchPlan
from elastic_ext.data.loader import ElasticDataLoader
from tests.support import pools
from tests.support.loading import settled
from tests.support.pools import WaitAt, gate, open_gate

pytestmark = [
    pytest.mark.usefixtures("started_once", "no_process_left"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than processors
]
slow = pytest.mark.slow
Point = namedtuple("Point", ["x", "y"])


class Between(IterableDataset[int]):
    """The numbers from ``start`` to before ``end``, the same for every worker that is not told otherwise."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.start, self.end))


class Shared(Between):
    """The first example of torch's documentation: each worker has a part of as many."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is None:
            return iter(range(self.start, self.end))
        size = math.ceil((self.end - self.start) / info.num_workers)
        start = self.start + info.id * size
        return iter(range(start, min(start + size, self.end)))


def share(worker_id: int) -> None:
    """The second one: the same for a dataset that does not do so itself."""
    info: Any = get_worker_info()
    dataset = info.dataset
    size = math.ceil((dataset.end - dataset.start) / info.num_workers)
    dataset.start = dataset.start + worker_id * size
    dataset.end = min(dataset.start + size, dataset.end)


class Sized(Shared):
    """One that says how many there are."""

    def __len__(self) -> int:
        return self.end - self.start


class Given(IterableDataset[Any]):
    """Whatever a function gives when a loop begins."""

    def __init__(self, give: Callable[[], Iterator[Any]]) -> None:
        self.give = give

    def __iter__(self) -> Iterator[Any]:
        return self.give()


class GivenWithState(Given):
    """One that could go on where it was."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def listed(samples: Any) -> list[Any]:
    return list(samples)


def ended(batches: Any) -> None:
    """Have the workers of a loop end that an exception refers to: torch's as garbage would be waited for."""
    getattr(batches, "_shutdown_workers", gc.collect)()


def numbers_in(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in batch]


# --- what it is given -----------------------------------------------------------------------------------------------


def test_a_dataset_counts_as_iterable_by_its_class_and_not_by_what_it_can(loader_class: Any) -> None:
    class OnlyIterable:
        def __iter__(self) -> Iterator[int]:
            return iter([1, 2])

    with pytest.raises(TypeError, match="has no len"):
        list(loader_class(OnlyIterable()))
    assert numbers_in(loader_class(Between(1, 3))) == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"shuffle": True}, "expected unspecified shuffle option, but got shuffle=True"),
        ({"sampler": [1, 2]}, "expected unspecified sampler option"),
        ({"batch_sampler": [[1, 2]]}, "expected unspecified batch_sampler option"),
        ({"batch_sampler": BatchSampler([1, 2], 2, False)}, "expected unspecified (batch_)?sampler option"),
        ({"batch_size": None, "drop_last": True}, "mutually exclusive with drop_last"),
        ({"batch_size": 0}, "batch_size should be a positive integer"),
    ],
)
def test_what_needs_an_index_is_refused(loader_class: Any, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        loader_class(Between(0, 4), **arguments)


@pytest.mark.parametrize("shuffle", [False, None])
def test_shuffle_may_be_given_where_it_asks_for_nothing(loader_class: Any, shuffle: bool | None) -> None:
    assert numbers_in(loader_class(Between(0, 4), 2, shuffle)) == [0, 1, 2, 3]


def test_its_sampler_is_a_dummy_without_an_end(loader_class: Any) -> None:
    loader = loader_class(Between(0, 4), 3)
    assert isinstance(loader.sampler, Sampler) and list(itertools.islice(loader.sampler, 3)) == [None] * 3
    assert isinstance(loader.batch_sampler, BatchSampler) and next(iter(loader.batch_sampler)) == [None] * 3
    assert loader_class(Between(0, 4), None).batch_sampler is None
    with pytest.raises(TypeError, match="has no len"):
        len(loader.sampler)  # type: ignore[arg-type]


def test_collate_fn_is_torchs_default_with_and_without_batches(loader_class: Any) -> None:
    assert loader_class(Between(0, 4)).collate_fn is default_collate
    assert loader_class(Between(0, 4), None).collate_fn is default_convert


# --- order and batches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=slow), 1])
def test_the_order_is_the_datasets_alone(loader_class: Any, num_workers: int) -> None:
    dataset = Given(lambda: iter([3, 1, 2, 1]))
    loader = loader_class(dataset, 2, num_workers=num_workers)
    assert [numbers_in([batch]) for batch in loader] == [[3, 1], [2, 1]]


def test_loading_is_collating_what_the_dataset_gives_next(loader_class: Any) -> None:
    dataset = Given(lambda: iter(torch.arange(22).reshape(11, 2)))
    loader = loader_class(dataset, batch_size=4)
    samples = list(dataset)
    by_hand = [loader.collate_fn(samples[start : start + 4]) for start in range(0, 11, 4)]
    assert all(torch.equal(*pair) for pair in zip(loader, by_hand, strict=True))


@pytest.mark.parametrize(
    ("size", "drop_last", "num_workers", "sizes"),
    [(7, False, 0, [3, 3, 1]), (7, True, 0, [3, 3]), (6, True, 0, [3, 3]), (7, True, 1, [3, 3])],
)
def test_the_last_batch_is_smaller_where_samples_run_out_unless_it_is_dropped(
    loader_class: Any, size: int, drop_last: bool, num_workers: int, sizes: list[int]
) -> None:
    loader = loader_class(Between(0, size), 3, drop_last=drop_last, num_workers=num_workers)
    assert [len(batch) for batch in loader] == sizes


def test_drop_last_drops_the_last_batch_of_each_workers_replica(loader_class: Any) -> None:
    batches = list(loader_class(Shared(0, 10), 2, num_workers=2, collate_fn=listed, drop_last=True))
    assert batches == [[0, 1], [5, 6], [2, 3], [7, 8]]
    assert [4] in list(loader_class(Shared(0, 10), 2, num_workers=2, collate_fn=listed))


def test_collate_fn_is_called_with_a_list_of_samples_and_what_it_gives_is_the_batch(loader_class: Any) -> None:
    seen: list[list[int]] = []

    def collate(samples: list[int]) -> str:
        seen.append(samples)
        return "+".join(map(str, samples))

    assert list(loader_class(Between(0, 5), 2, collate_fn=collate)) == ["0+1", "2+3", "4"]
    assert seen == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=slow), 1])
def test_without_batches_each_sample_goes_through_collate_fn(loader_class: Any, num_workers: int) -> None:
    loader = loader_class(Between(0, 3), batch_size=None, collate_fn=str, num_workers=num_workers)
    assert list(loader) == ["0", "1", "2"]


def test_without_batches_the_default_makes_tensors_of_arrays_and_leaves_the_rest(loader_class: Any) -> None:
    samples = [0, "text", np.array([0, 1]), Point(np.array(0), 1), {"a": np.array(1), "b": "c"}]
    number, text, array, point, mapping = loader_class(Given(lambda: iter(samples)), batch_size=None)
    assert (number, text) == (0, "text") and torch.equal(array, torch.tensor([0, 1]))
    assert type(point) is Point and torch.equal(point.x, torch.tensor(0)) and point.y == 1
    assert torch.equal(mapping["a"], torch.tensor(1)) and mapping["b"] == "c"


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=slow), 1])
def test_a_dataset_may_give_batches_of_sizes_that_its_data_decide(loader_class: Any, num_workers: int) -> None:
    dataset = Given(lambda: (torch.arange(size) for size in (1, 3, 2)))
    loader = loader_class(dataset, batch_size=None, num_workers=num_workers)
    assert [batch.tolist() for batch in loader] == [[0], [0, 1, 2], [0, 1]]


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=slow), 1])
def test_the_default_collate_keeps_the_structure(loader_class: Any, num_workers: int) -> None:
    samples = [{"tensor": torch.ones(2) * n, "text": str(n), "pair": (n, 2.5), "point": Point(n, n)} for n in (1, 2)]
    (batch,) = loader_class(Given(lambda: iter(samples)), batch_size=2, num_workers=num_workers)
    assert torch.equal(batch["tensor"], torch.tensor([[1.0, 1.0], [2.0, 2.0]])) and batch["text"] == ["1", "2"]
    assert torch.equal(batch["pair"][0], torch.tensor([1, 2])) and batch["pair"][1].dtype == torch.float64
    assert torch.equal(batch["point"].y, torch.tensor([1, 2])) and type(batch["point"]) is Point


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_without_an_end_is_loaded_as_far_as_it_is_asked_for(loader_class: Any, num_workers: int) -> None:
    batches = iter(loader_class(Given(itertools.count), 2, num_workers=num_workers))
    assert numbers_in(itertools.islice(batches, 5)) == list(range(10))


def test_streams_may_be_chained(loader_class: Any) -> None:
    chained = Sized(0, 3) + Sized(7, 9)
    assert isinstance(chained, ChainDataset)
    loader = loader_class(chained, 2, collate_fn=listed)
    assert list(loader) == [[0, 1], [2, 7], [8]] and len(loader) == 3


# --- how long it is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 3])
@pytest.mark.parametrize(
    ("arguments", "length"),
    [({}, 7), ({"batch_size": 3}, 3), ({"batch_size": 3, "drop_last": True}, 2), ({"batch_size": None}, 7)],
)
def test_the_length_is_the_datasets_in_batches_whatever_the_workers(
    loader_class: Any, arguments: dict[str, Any], length: int, num_workers: int
) -> None:
    assert len(loader_class(Sized(3, 10), num_workers=num_workers, **arguments)) == length


def test_the_length_of_a_dataset_without_one_is_a_type_error(loader_class: Any) -> None:
    loader = loader_class(Between(0, 4))
    with pytest.raises(TypeError, match="has no len"):
        len(loader)
    with pytest.raises(TypeError, match="has no len"):
        len(iter(loader))


def test_the_length_may_be_wrong_where_several_workers_have_incomplete_batches(loader_class: Any) -> None:
    broken = loader_class(Sized(0, 10), 4, num_workers=2, collate_fn=listed)
    assert len(broken) == 3 and list(broken) == [[0, 1, 2, 3], [5, 6, 7, 8], [4], [9]]
    dropped = loader_class(Sized(0, 6), 4, num_workers=2, collate_fn=listed, drop_last=True)
    assert len(dropped) == 1 and list(dropped) == []


class Understated(Between):
    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_more_samples_than_the_dataset_said_are_warned_of(loader_class: Any, num_workers: int) -> None:
    loader = loader_class(Understated(0, 3), num_workers=num_workers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(loader)) == 3 * max(num_workers, 1)  # nobody had asked for the length when it began
    assert len(loader) == 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(loader)
    told = str(caught[0].message)
    assert told.startswith("Length of IterableDataset ") and "was reported to be 2" in told and "but 3 samples" in told
    assert caught[0].filename == __file__


# --- one process ----------------------------------------------------------------------------------------------------


def test_by_default_samples_are_drawn_in_this_process_when_they_are_wanted(loader_class: Any) -> None:
    drawn: list[tuple[int, int, Any]] = []

    def give() -> Iterator[int]:
        for number in range(5):
            drawn.append((number, os.getpid(), get_worker_info()))
            yield number

    batches = iter(loader_class(Given(give), batch_size=2))
    assert drawn == []
    next(batches)
    assert drawn == [(0, os.getpid(), None), (1, os.getpid(), None)]


def test_a_loop_that_is_over_stays_over(loader_class: Any) -> None:
    batches = iter(loader_class(Between(0, 3)))
    assert iter(batches) is batches
    assert numbers_in(batches) == [0, 1, 2]
    assert list(batches) == []


@pytest.mark.parametrize("num_workers", [0, 1])
def test_several_loops_over_a_loader_may_go_on_side_by_side(loader_class: Any, num_workers: int) -> None:
    loader = loader_class(Between(0, 3), batch_size=None, num_workers=num_workers)
    assert [(one, other) for one in loader for other in loader] == list(itertools.product(range(3), repeat=2))


def test_a_loader_can_be_copied_and_pickled(loader_class: Any) -> None:
    loader = loader_class(Between(0, 6), batch_size=4)
    next(iter(loader))
    for other in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert numbers_in(other) == list(range(6))


class OneShot(IterableDataset[int]):
    """One that is an iterator itself."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> OneShot:
        return self

    def __next__(self) -> int:
        if self.next == 5:
            raise StopIteration
        self.next += 1
        return self.next - 1


def test_a_dataset_that_is_an_iterator_goes_on_where_it_was_in_this_process_and_anew_in_workers(
    loader_class: Any,
) -> None:
    for num_workers, then in ((0, [2, 3, 4]), (1, [0, 1, 2, 3, 4])):
        loader = loader_class(OneShot(), 2, num_workers=num_workers)
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1]
        del batches
        assert numbers_in(loader) == then


class Stumbling(IterableDataset[int]):
    """One whose iterator raises in the place of a sample, and goes on after it."""

    def __init__(self, at: int, error: Exception) -> None:
        self.at, self.error = at, error

    def __iter__(self) -> Iterator[int]:
        return _Steps(self)


class _Steps(Iterator[int]):
    def __init__(self, dataset: Stumbling) -> None:
        self.dataset, self.number = dataset, -1

    def __next__(self) -> int:
        self.number += 1
        if self.number == self.dataset.at:
            raise self.dataset.error
        if self.number == 14:
            raise StopIteration
        return self.number


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_exception_of_the_dataset_arrives_and_the_next_batch_after_it(loader_class: Any, num_workers: int) -> None:
    error = KeyError("no such sample")
    batches = iter(loader_class(Stumbling(5, error), 2, num_workers=num_workers, collate_fn=listed))
    assert list(itertools.islice(batches, 2)) == [[0, 1], [2, 3]]
    with pytest.raises(KeyError, match="no such sample") as caught:
        next(batches)
    assert num_workers or caught.value is error
    assert list(batches) == [[6, 7], [8, 9], [10, 11], [12, 13]]


def raising() -> Iterator[int]:
    raise KeyError("no such file")


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("dataset_class", [Given, GivenWithState])
def test_a_dataset_that_cannot_begin_says_why_however_often_it_is_asked(dataset_class: Any, num_workers: int) -> None:
    """torch's loader does so once; asked again, its workers say that they have no local variable 'fetcher'."""
    loader = ElasticDataLoader(dataset_class(raising), 2, num_workers=num_workers)
    theirs = DataLoader(dataset_class(raising), 2, num_workers=num_workers)
    with pytest.raises(KeyError, match="no such file"):
        next(iter(theirs))
    for _ in range(2):
        batches = iter(loader)
        for _ in range(3):
            with pytest.raises(KeyError, match="no such file") as caught:
                next(batches)
            assert num_workers == 0 or 'raise KeyError("no such file")' in str(caught.value)  # the worker's traceback
    ended(batches)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterator_that_has_ended_is_asked_for_no_more(loader_class: Any, num_workers: int) -> None:
    lines = ["a", "b", None, "c", "d"]  # as of a log that is being written

    class Log(IterableDataset[str]):
        def __iter__(self) -> Log:
            return self

        def __next__(self) -> str:
            line = lines.pop(0)
            if line is None:
                raise StopIteration
            return line

    assert list(loader_class(Log(), None, num_workers=num_workers, prefetch_factor=4 if num_workers else None)) == [
        "a",
        "b",
    ]


# --- workers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_workers", "numbers"), [(0, [3, 4, 5, 6]), (2, [3, 5, 4, 6]), pytest.param(5, [3, 4, 5, 6], marks=slow)]
)
def test_workers_may_share_the_samples_out_where_iteration_begins(
    loader_class: Any, num_workers: int, numbers: list[int]
) -> None:
    assert numbers_in(loader_class(Shared(3, 7), num_workers=num_workers)) == numbers


def test_workers_may_share_the_samples_out_by_worker_init_fn(loader_class: Any) -> None:
    dataset = Between(3, 7)
    assert numbers_in(loader_class(dataset, num_workers=2)) == [3, 3, 4, 4, 5, 5, 6, 6]  # which nobody shares out
    assert numbers_in(loader_class(dataset, num_workers=2, worker_init_fn=share)) == [3, 5, 4, 6]
    assert numbers_in(loader_class(dataset, num_workers=3, worker_init_fn=share)) == [3, 5, 4, 6]
    assert (dataset.start, dataset.end) == (3, 7)  # each worker has a copy


def test_samples_are_drawn_and_collated_in_the_worker(loader_class: Any) -> None:
    dataset = Given(lambda: iter([os.getpid()] * 4))
    for batch in loader_class(dataset, 2, num_workers=1, collate_fn=lambda pids: [*pids, os.getpid()]):
        assert len(set(batch)) == 1 and batch[0] != os.getpid()


def test_worker_info_tells_a_dataset_who_it_is(loader_class: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(3)))

    class Telling(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            info: Any = get_worker_info()
            yield [info.id, info.num_workers, info.seed, torch.initial_seed(), info.dataset is self]

    told = list(loader_class(Telling(), batch_size=None, num_workers=2, generator=generator))
    assert told == [[each, 2, base_seed + each, base_seed + each, True] for each in range(2)]
    assert get_worker_info() is None


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loop_uses_up_one_random_number_of_this_process(loader_class: Any, num_workers: int) -> None:
    torch.manual_seed(5)
    list(loader_class(Between(0, 2), num_workers=num_workers))
    after = torch.rand(1)
    torch.manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(after, torch.rand(1))


def test_workers_are_made_for_each_loop_with_datasets_as_they_are_now_and_end_with_it(loader_class: Any) -> None:
    before = settled().processes
    dataset = Between(0, 3)
    loader = loader_class(dataset, num_workers=1)
    assert numbers_in(loader) == [0, 1, 2] and settled().processes == before
    dataset.start = 1
    assert numbers_in(loader) == [1, 2]


def test_workers_end_when_a_loop_that_is_left_is_collected(loader_class: Any) -> None:
    before = settled().processes
    batches = iter(loader_class(Given(itertools.count), num_workers=1))
    next(batches)
    assert settled().processes > before
    del batches
    assert settled().processes == before


class Passes(IterableDataset[Any]):
    """Tells how often this copy was iterated over, and in which process."""

    num_passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.num_passes += 1
        yield self.num_passes, os.getpid()


def test_persistent_workers_stay_and_their_datasets_are_iterated_over_again(loader_class: Any) -> None:
    loader = loader_class(Passes(), None, num_workers=1, persistent_workers=True)
    ((one, first),), ((two, second),) = list(loader), list(loader)
    assert (one, two) == (1, 2) and first == second


def test_so_many_batches_per_worker_are_drawn_in_advance(loader_class: Any, tmp_path: Path) -> None:
    never = gate(tmp_path / "never")

    def give() -> Iterator[int]:
        for number in range(20):
            if number == 7:  # the first of the batch after the three that may be drawn ahead of one
                WaitAt(never)()
            yield number

    batches = iter(loader_class(Given(give), 1, num_workers=1, prefetch_factor=3, collate_fn=listed, timeout=1.5))
    assert list(itertools.islice(batches, 7)) == [[number] for number in range(7)]
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 1\.5 seconds"):
        next(batches)
    open_gate(never)


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=slow)])
def test_workers_of_other_start_methods_are_sent_the_dataset(loader_class: Any, method: str) -> None:
    dataset = pools.Numbered(4)
    assert numbers_in(loader_class(dataset, 2, num_workers=1, multiprocessing_context=method)) == [0, 1, 2, 3]


def test_an_exception_in_a_worker_arrives_with_its_type_and_the_workers_traceback(loader_class: Any) -> None:
    batches = iter(loader_class(Stumbling(2, ValueError("bad")), 2, num_workers=1))
    next(batches)
    with pytest.raises(ValueError, match="bad") as caught:
        next(batches)
    told = str(caught.value)
    assert "in DataLoader worker process 0" in told and "in __next__" in told
    ended(batches)


# --- where ours is another on purpose -------------------------------------------------------------------------------


def test_an_exception_takes_a_whole_batch_with_it_whoever_was_to_have_the_samples_behind_it() -> None:
    """torch's next batch begins behind the sample that raised; here it may be on its way by then, as with indices."""
    batches = iter(ElasticDataLoader(Stumbling(5, KeyError()), 4, collate_fn=listed))
    assert next(batches) == [0, 1, 2, 3]
    with pytest.raises(KeyError):
        next(batches)
    assert list(batches) == [[8, 9, 10, 11], [12, 13]]


def test_an_exception_comes_again_with_the_batch_that_is_taken_again() -> None:
    """torch takes none again."""
    loader = ElasticDataLoader(Stumbling(5, KeyError("bad")), 4, num_workers=1, collate_fn=listed)
    loader.plan(BatchPlan(global_batch=4, num_ranks=1, micro_batch=4), 0)
    batches = iter(loader)
    next(batches)
    loader.commit()
    for _ in range(2):
        with pytest.raises(KeyError, match="bad"):
            next(batches)
        loader.rollback()
    with pytest.raises(KeyError, match="bad"):
        next(batches)
    assert next(batches) == [8, 9, 10, 11]


def test_what_is_more_than_the_length_is_counted_in_samples_and_told_with_each_batch() -> None:
    """torch counts batches, so that copies of the same samples stay unseen where a batch has several."""
    settings: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "collate_fn": listed}
    for loader_class, num_warnings in ((DataLoader[Any], 0), (ElasticDataLoader, 2)):
        loader = loader_class(Understated(0, 8), **settings)
        assert len(loader) == 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            list(itertools.islice(loader, 2))
        assert len(caught) == num_warnings
        assert all("share them out by get_worker_info()" in str(each.message) for each in caught)


def test_each_batch_beyond_the_length_is_warned_of_in_torchs_words(loader_class: Any) -> None:
    loader = loader_class(Understated(0, 5), num_workers=2)
    assert len(loader) == 2
    batches = iter(loader)
    next(batches), next(batches)
    for _ in range(3):
        with pytest.warns(
            UserWarning, match=r"but [0-9]+ samples have been fetched\. For multiprocessing data-loading, "
        ):
            next(batches)


def test_a_loop_in_a_loop_has_persistent_workers_of_its_own() -> None:
    """torch begins the same loop again, so that the outer one is over with the inner one."""
    settings: dict[str, Any] = {"batch_size": None, "num_workers": 1, "persistent_workers": True}
    for loader_class, size in ((DataLoader[Any], 3), (ElasticDataLoader, 9)):
        loader = loader_class(Between(0, 3), **settings)
        assert len([(one, other) for one in loader for other in loader]) == size


def pipe_of(size: int) -> IterDataPipe[int]:
    return IterableWrapper(range(size)).shuffle().sharding_filter()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_pipe_is_shared_out_among_workers_and_shuffled_where_it_is_asked_to_be(
    loader_class: Any, num_workers: int
) -> None:
    assert numbers_in(loader_class(pipe_of(6), num_workers=num_workers, shuffle=False)) == [0, 1, 2, 3, 4, 5]
    loader = loader_class(pipe_of(60), num_workers=num_workers, shuffle=True)
    one, other = numbers_in(loader), numbers_in(loader)
    assert sorted(one) == sorted(other) == list(range(60))
    assert one != other != list(range(60)) != one


def test_a_data_pipe_is_shuffled_by_the_seed_of_this_process_or_of_the_generator(loader_class: Any) -> None:
    loader = loader_class(pipe_of(30), num_workers=2, shuffle=True, persistent_workers=True)
    orders = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        orders.append(numbers_in(loader))
    assert orders[0] == orders[1] != orders[2]
    drawn = [
        numbers_in(loader_class(pipe_of(30), shuffle=True, generator=torch.Generator().manual_seed(5)))
        for _ in range(2)
    ]
    assert drawn[0] == drawn[1]


def test_a_data_pipe_looped_over_before_ranks_were_joined_is_shuffled_alike_on_all_from_then_on() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend "fake"

    shares = []
    for rank in range(2):
        torch.manual_seed(rank)  # as processes draw, each by itself
        loader = ElasticDataLoader(pipe_of(30), shuffle=True)
        assert len(numbers_in(loader)) == 30
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            shares.append(numbers_in(loader))
        finally:
            dist.destroy_process_group()
    assert sorted(shares[0] + shares[1]) == list(range(30))


@pytest.mark.parametrize("seed", [None, 3])
def test_a_shuffled_data_pipe_goes_on_where_it_was(seed: int | None) -> None:
    arguments: dict[str, Any] = {"num_workers": 2, "shuffle": True, "fast_forward": True, "seed": seed}
    loader = ElasticDataLoader(pipe_of(30), **arguments)
    batches = iter(loader)
    begun = numbers_in(itertools.islice(batches, 7))
    again = ElasticDataLoader(pipe_of(30), **arguments)
    again.load_state_dict(loader.state_dict())
    rest = numbers_in(again)
    assert rest == numbers_in(batches) and sorted(begun + rest) == list(range(30))
    if seed is not None:
        assert numbers_in(ElasticDataLoader(pipe_of(30), **arguments)) == begun + rest
        assert numbers_in(ElasticDataLoader(pipe_of(30), **arguments | {"seed": 4})) != begun + rest
