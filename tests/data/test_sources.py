"""What is known of a loader's batches from outside, and when whole numbers of them make a step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sized
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from elastic_ext import MicroBatchSource
from elastic_ext.data.sources import FixedBatchSizes
from tests.support.training import Slices, make_data


def dataset_of(num_samples: int) -> Dataset[Any]:
    return TensorDataset(torch.arange(num_samples))


class Stream(IterableDataset[int]):
    """Samples one after another."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_samples))


class SizedStream(Stream):
    """It says how many, as streams may that are not sure of it."""

    def __len__(self) -> int:
        return self.num_samples


class Alternate(Sampler[list[int]]):
    """Batches of one's own making, of a size that no attribute tells."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3]])

    def __len__(self) -> int:
        return 2


class Loader:
    """A loader that is not torch's."""

    def __init__(self, **known: Any) -> None:
        vars(self).update(known)

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class SizedLoader(Loader):
    def __len__(self) -> int:
        return 5


class LoaderWithoutLength(Loader):
    def __len__(self) -> int:
        raise NotImplementedError


def batches_of(loader: Any) -> tuple[int, int | None, int | None] | None:
    known = FixedBatchSizes.of(loader)
    return None if known is None else (known.micro_batch, known.num_batches, known.last_batch)


# --- loaders of every kind ------------------------------------------------------------------------------------------

RANDOM = torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("loader", "known"),
    [
        (DataLoader(dataset_of(12), batch_size=4), (4, 3, None)),
        (DataLoader(dataset_of(14), batch_size=4), (4, 4, 2)),
        (DataLoader(dataset_of(14), batch_size=4, drop_last=True), (4, 3, None)),
        (DataLoader(dataset_of(14), batch_size=4, shuffle=True), (4, 4, 2)),
        (DataLoader(dataset_of(14), batch_size=4, num_workers=2, persistent_workers=True), (4, 4, 2)),
        (DataLoader(dataset_of(3)), (1, 3, None)),
        (DataLoader(dataset_of(3), batch_size=8), (8, 1, 3)),
        (DataLoader(dataset_of(3), batch_size=8, drop_last=True), (8, None, None)),
        (DataLoader(dataset_of(0), batch_size=8), (8, None, None)),
        (DataLoader(dataset_of(12), batch_size=None), None),
    ],
)
def test_batches_of_a_dataset_are_known_from_its_loaders_settings(
    loader: DataLoader[Any], known: tuple[int, int | None, int | None] | None
) -> None:
    assert batches_of(loader) == known


@pytest.mark.parametrize(
    ("sampler", "known"),
    [
        (SequentialSampler(range(14)), (4, 4, 2)),
        (RandomSampler(range(14), replacement=True, num_samples=9), (4, 3, 1)),
        (SubsetRandomSampler([1, 3, 5, 7, 9]), (4, 2, 1)),
        (WeightedRandomSampler([1.0] * 14, num_samples=8, generator=RANDOM), (4, 2, None)),
        (DistributedSampler(dataset_of(14), num_replicas=4, rank=3), (4, 1, None)),  # 4 samples each, 2 of them twice
        (DistributedSampler(dataset_of(14), num_replicas=4, rank=3, drop_last=True), (4, 1, 3)),
        (DistributedSampler(dataset_of(42), num_replicas=3, rank=0), (4, 4, 2)),
    ],
)
def test_a_sampler_says_how_many_samples_there_are(sampler: Sampler[Any], known: tuple[int, int, int | None]) -> None:
    assert batches_of(DataLoader(dataset_of(42), batch_size=4, sampler=sampler)) == known


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_every_rank_of_a_distributed_sampler_knows_the_same(num_ranks: int) -> None:
    def known(rank: int, drop_last: bool) -> Any:
        sampler: Sampler[Any] = DistributedSampler(
            dataset_of(29), num_replicas=num_ranks, rank=rank, drop_last=drop_last
        )
        return batches_of(DataLoader(dataset_of(29), batch_size=4, sampler=sampler, drop_last=drop_last))

    for drop_last in (False, True):
        assert len({known(rank, drop_last) for rank in range(num_ranks)}) == 1


@pytest.mark.parametrize(
    ("batch_sampler", "known"),
    [
        (BatchSampler(SequentialSampler(range(14)), 4, drop_last=False), (4, 4, 2)),
        (BatchSampler(SequentialSampler(range(14)), 4, drop_last=True), (4, 3, None)),
        (BatchSampler(SequentialSampler(range(12)), 4, drop_last=False), (4, 3, None)),
        (BatchSampler(DistributedSampler(dataset_of(14), num_replicas=2, rank=0), 4, drop_last=False), (4, 2, 3)),
        (Alternate(), None),
        ([[0, 1], [2]], None),
    ],
)
def test_a_batch_sampler_of_ones_own_counts_where_it_tells_its_size(
    batch_sampler: Any, known: tuple[int, int, int | None] | None
) -> None:
    assert batches_of(DataLoader(dataset_of(14), batch_sampler=batch_sampler)) == known


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("stream", [Stream(14), SizedStream(14)])
@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
def test_how_long_a_stream_is_nobody_knows(stream: Stream, drop_last: bool) -> None:
    assert batches_of(DataLoader(stream, batch_size=4, drop_last=drop_last)) == (4, None, None)
    assert batches_of(DataLoader(stream, batch_size=None)) is None


@pytest.mark.parametrize(
    ("loader", "known"),
    [
        (Loader(batch_size=4), (4, None, None)),
        (SizedLoader(batch_size=4), (4, 5, None)),
        (LoaderWithoutLength(batch_size=4), (4, None, None)),
        (SizedLoader(batch_size=None, batch_sampler=BatchSampler(range(9), 4, False)), (4, 3, 1)),
        (SizedLoader(), None),
        (Loader(batch_size=0), None),
        (Loader(batch_size=-4), None),
        (Loader(batch_size=True), None),
        (Loader(batch_size=4.0), None),
        (Loader(batch_size="4"), None),
        ([1, 2, 3], None),
        (iter([]), None),
        (None, None),
    ],
)
def test_a_loader_that_is_not_torchs_is_known_by_its_batch_size_and_length(
    loader: Any, known: tuple[int, int | None, int | None] | None
) -> None:
    assert batches_of(loader) == known


@given(num_samples=st.integers(1, 60), size=st.integers(1, 9), drop_last=st.booleans(), num_ranks=st.integers(1, 4))
def test_what_is_known_is_what_the_loader_hands_out(
    num_samples: int, size: int, drop_last: bool, num_ranks: int
) -> None:
    dataset = dataset_of(num_samples)
    sampler: Sampler[Any] = DistributedSampler(
        dataset, num_replicas=num_ranks, rank=0, drop_last=num_samples >= num_ranks
    )
    loader = DataLoader(dataset, batch_size=size, sampler=sampler, drop_last=drop_last)
    sizes = [len(batch) for (batch,) in loader]
    known = FixedBatchSizes.of(loader)
    assert known is not None
    if sizes:
        last = known.micro_batch if known.last_batch is None else known.last_batch
        assert known.num_batches is not None
        assert [known.micro_batch] * (known.num_batches - 1) + [last] == sizes
    else:
        assert known.num_batches is None


# --- steps of whole batches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("micro_batch", "global_batch", "num_ranks", "num_micro_steps"),
    [(4, 4, 1, 1), (4, 12, 1, 3), (4, 24, 3, 2), (1, 7, 7, 1), (1, 7, 1, 7)],
)
def test_a_global_batch_is_so_many_batches_of_every_rank(
    micro_batch: int, global_batch: int, num_ranks: int, num_micro_steps: int
) -> None:
    assert FixedBatchSizes(micro_batch=micro_batch).num_micro_steps(global_batch, num_ranks) == num_micro_steps


@pytest.mark.parametrize(
    ("micro_batch", "global_batch", "num_ranks", "nearest"),
    [(4, 14, 1, "12 or 16"), (4, 3, 1, "4"), (4, 20, 3, "12 or 24"), (4, 1, 3, "12"), (5, 9, 1, "5 or 10")],
)
def test_a_global_batch_of_no_whole_number_of_batches_is_refused_with_the_nearest_that_is(
    micro_batch: int, global_batch: int, num_ranks: int, nearest: str
) -> None:
    words = (
        f"global_batch_size {global_batch} is not a multiple of {micro_batch * num_ranks} "
        f"({num_ranks} ranks with micro-batches of {micro_batch}); use {nearest}, or an "
    )
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        FixedBatchSizes(micro_batch=micro_batch).num_micro_steps(global_batch, num_ranks)
    assert str(refused.value).endswith("or an ElasticDataLoader, which cuts any size")


@pytest.mark.parametrize(
    ("num_taken", "sizes", "global_batch"),
    [
        (0, (4, 4, 4), 24),
        (3, (4, 4, 4), 24),
        (4, (4, 4, 4), 24),
        (5, (4, 4, 2), 20),
        (6, (4, 2), 12),
        (7, (2,), 4),
    ],
)
def test_the_last_step_of_an_epoch_holds_what_is_left(
    num_taken: int, sizes: tuple[int, ...], global_batch: int
) -> None:
    batches = FixedBatchSizes(micro_batch=4, num_batches=8, last_batch=2)
    step = batches.next_step(num_taken, num_micro_steps=3, num_ranks=2)
    assert step.micro_batches == (sizes, sizes)
    assert step.global_batch == global_batch
    weights = [step.weight(rank, index) for rank in range(2) for index in range(len(sizes))]
    assert sum(weights) == pytest.approx(2)


@given(
    size=st.integers(1, 9),
    num_samples=st.integers(1, 80),
    num_micro_steps=st.integers(1, 5),
    num_ranks=st.integers(1, 4),
)
def test_the_steps_of_an_epoch_take_every_sample_once(
    size: int, num_samples: int, num_micro_steps: int, num_ranks: int
) -> None:
    num_batches = -(-num_samples // size)
    last = num_samples - (num_batches - 1) * size
    batches = FixedBatchSizes(micro_batch=size, num_batches=num_batches, last_batch=last if last < size else None)
    num_taken = total = 0
    while num_taken < num_batches:
        step = batches.next_step(num_taken, num_micro_steps, num_ranks)
        assert step.num_micro_steps == min(num_micro_steps, num_batches - num_taken)
        num_taken += step.num_micro_steps
        total += step.global_batch
    assert num_taken == num_batches
    assert total == num_samples * num_ranks


def test_batches_without_an_end_make_full_steps_for_ever() -> None:
    batches = FixedBatchSizes(micro_batch=4)
    for num_taken in (0, 3, 1_000_000):
        assert batches.next_step(num_taken, num_micro_steps=3, num_ranks=2).micro_batches == ((4, 4, 4), (4, 4, 4))


# --- loaders that can be told ---------------------------------------------------------------------------------------


def test_a_loader_that_can_be_told_its_sizes_is_known_by_what_it_offers() -> None:
    assert isinstance(Slices(make_data(8), 2), MicroBatchSource)
    assert not isinstance(DataLoader(dataset_of(8), batch_size=2), MicroBatchSource)
    assert not isinstance(SizedLoader(batch_size=2), MicroBatchSource)
    assert isinstance(SizedLoader(batch_size=2), Sized)
