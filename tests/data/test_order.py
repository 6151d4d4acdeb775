"""An epoch's order depends on seed and epoch alone, has every sample once, and looks as if it were drawn."""

from __future__ import annotations

import hashlib
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ext.data.order import Drawn, Order, SequentialOrder, Shuffled

SIZES = st.one_of(st.integers(0, 300), st.integers(65_500, 65_600), st.integers(65_537, 140_000))


@settings(max_examples=40)
@given(num_samples=SIZES, seed=st.integers(-(1 << 70), 1 << 70), epoch=st.integers(0, 1 << 40))
def test_every_sample_comes_once(num_samples: int, seed: int, epoch: int) -> None:
    order = Shuffled(num_samples, seed=seed, epoch=epoch)
    assert sorted(order.indices(0, num_samples)) == list(range(num_samples))


@given(num_samples=st.integers(1, 10**12), seed=st.integers(0, 99), place=st.floats(0, 1), length=st.integers(0, 9000))
def test_any_part_is_that_of_the_whole(num_samples: int, seed: int, place: float, length: int) -> None:
    start = int(place * (num_samples - 1))
    whole = Shuffled(num_samples, seed=seed, epoch=1).indices(start, start + length)
    order = Shuffled(num_samples, seed=seed, epoch=1)
    cut = start + length // 3
    assert order.indices(cut, start + length) == whole[cut - start :]
    assert order.indices(start, cut) == whole[: cut - start]
    assert len(whole) == min(length, num_samples - start)
    assert len(set(whole)) == len(whole) and all(0 <= index < num_samples for index in whole)


@pytest.mark.parametrize(
    ("num_samples", "digest"),
    [(10, "a689202514a676d5"), (65_536, "d0a4b4776100e041"), (65_537, "d3680a7a6bda6bc2"), (10**9, "0ba0bf57b04fe84d")],
)
def test_what_an_algorithm_gives_never_changes(num_samples: int, digest: str) -> None:
    found = Shuffled(num_samples, seed=7, epoch=3).indices(0, 5000)
    assert hashlib.blake2b(repr(found).encode(), digest_size=8).hexdigest() == digest


@pytest.mark.parametrize(
    ("num_samples", "num_epochs"), [(2_000, 1200), (70_000, 400), pytest.param(70_000, 1200, marks=pytest.mark.slow)]
)
def test_a_sample_is_as_likely_at_any_position(num_samples: int, num_epochs: int) -> None:
    num_bins = 20
    counts = np.zeros((2, num_bins))
    for epoch in range(num_epochs):
        first, second = Shuffled(num_samples, seed=11, epoch=epoch).indices(0, 2)
        counts[0, first * num_bins // num_samples] += 1
        counts[1, (second - first) % num_samples * num_bins // num_samples] += 1
    expected = num_epochs / num_bins
    assert ((counts - expected) ** 2 / expected).sum(axis=1).max() < 50  # 19 degrees of freedom: one in 10,000


@pytest.mark.parametrize("num_samples", [60_000, 1_000_003])
def test_neighbours_have_nothing_to_do_with_each_other(num_samples: int) -> None:
    found = np.array(Shuffled(num_samples, seed=5, epoch=0).indices(0, 60_000))
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(np.arange(len(found)), found)[0, 1]) < 0.02
    assert (found == np.arange(len(found))).sum() < 12  # one is expected
    for lag in (1, 2, 3, 64, 4096):
        steps = (found[lag:] - found[:-lag]) % num_samples
        assert len(np.unique(steps)) > 0.9 * num_samples * (1 - np.exp(-60_000 / num_samples))
        assert abs(np.corrcoef(found[lag:], found[:-lag])[0, 1]) < 0.02


@pytest.mark.parametrize("num_samples", [131_072, 1_000_003])
def test_batches_are_as_mixed_as_those_that_are_drawn(num_samples: int) -> None:
    found = np.array(Shuffled(num_samples, seed=5, epoch=0).indices(0, 128 * 960)).reshape(-1, 128)
    drawn = np.random.default_rng(5).permutation(num_samples)[: 128 * 960].reshape(-1, 128)
    of_ours, of_drawn = ((indices < num_samples // 2).sum(axis=1).var() for indices in (found, drawn))
    assert 0.75 < of_ours / of_drawn < 1.33  # each of 960 batches has its own number of them: 0.065 is one deviation


def test_seeds_and_epochs_give_orders_of_their_own() -> None:
    orders = {tuple(Shuffled(1000, seed=seed, epoch=epoch).indices(0, 20)) for seed in range(9) for epoch in range(9)}
    assert len(orders) == 81


def test_a_thousand_million_samples_take_no_memory() -> None:
    tracemalloc.start()
    order = Shuffled(10**9, seed=1, epoch=1)
    order.indices(8 * 10**8, 8 * 10**8 + 10_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize("indices", [[5, 1, 1, 3], [], ["a", "b"], [(0, 1), (2, 3)], [1 << 70]])
def test_what_a_sampler_drew_is_kept_as_it_came(indices: list[Any]) -> None:
    order = Drawn(indices)
    assert order.num_samples == len(indices)
    assert order.indices(0, 99) == indices
    assert order.indices(1, 3) == indices[1:3]
    assert order.state_dict() == Drawn(list(indices)).state_dict() != Drawn([*indices, 7]).state_dict()


def test_in_turn_is_as_the_dataset_lies() -> None:
    assert SequentialOrder(5).indices(2, 9) == [2, 3, 4]


def test_states_tell_orders_apart() -> None:
    states: list[Order] = [
        SequentialOrder(5),
        SequentialOrder(6),
        Shuffled(5, seed=0, epoch=0),
        Shuffled(5, seed=1, epoch=0),
    ]
    states += [Shuffled(5, seed=0, epoch=1), Shuffled(10**6, seed=0, epoch=1), Drawn(range(5))]
    told = [state.state_dict() for state in states]
    assert all(told.count(one) == 1 for one in told)


def test_an_impossible_size_is_refused() -> None:
    with pytest.raises(ValueError, match="the dataset has -1 samples; allowed: 0 to"):
        Shuffled(-1, seed=0, epoch=0)
