"""The noise of gradients, estimated from pairs of them, beside what it truly is."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from elastic_ext.training.counters import NoiseScale

Pair = tuple[float, float]  # the square of the difference, and the product


def pairs_of(noise_scale: float, batch: int, *, seed: int = 0, shrinks_by: float = 1.0) -> Iterator[Pair]:
    """Gradients of length 1, or ever shorter, with noise in a thousand directions, more in some than in others."""
    draw = torch.Generator().manual_seed(seed)
    spectrum = torch.exp(torch.randn(1000, generator=draw, dtype=torch.float64))
    true = torch.randn(1000, generator=draw, dtype=torch.float64)
    true /= true.norm()
    spread = (spectrum / spectrum.sum() * noise_scale / batch).sqrt()
    size = 1.0
    while True:
        one, other = (size * (true + spread * torch.randn(1000, generator=draw, dtype=torch.float64)) for _ in range(2))
        yield float((one - other).square().sum()), float(one @ other)
        size *= shrinks_by


def seen(pairs: Iterator[Pair], num_pairs: int, batch: int, into: NoiseScale | None = None) -> NoiseScale:
    found = NoiseScale() if into is None else into
    for _, (apart, product) in zip(range(num_pairs), pairs, strict=False):
        found.add(batch, apart=apart, product=product)
    return found


@pytest.mark.parametrize("shrinks_by", [1.0, 0.9])
@pytest.mark.parametrize("noise_scale", [1.0, 10.0, 100.0])
def test_what_is_found_is_what_there_is_also_where_gradients_become_ever_smaller(
    noise_scale: float, shrinks_by: float
) -> None:
    found = seen(pairs_of(noise_scale, 10, shrinks_by=shrinks_by), 100, 10)
    assert found.value == pytest.approx(noise_scale, rel=0.15)


def test_pairs_of_steps_of_different_sizes_tell_of_one_noise_scale() -> None:
    found = seen(pairs_of(100.0, 20), 60, 20)
    seen(pairs_of(100.0, 80, seed=1), 60, 80, into=found)
    assert found.value == pytest.approx(100.0, rel=0.15)


def test_of_few_pairs_nothing_is_said() -> None:
    pairs = pairs_of(10.0, 10)
    assert seen(pairs, 7, 10).value is None
    assert seen(pairs, 9, 10).value is not None


def test_where_pairs_differ_too_much_nothing_is_said() -> None:
    found = NoiseScale()
    for number in range(200):  # products that are little on the average, and always far from it
        found.add(10, apart=70.0, product=0.2 + (30.0 if number % 2 else -30.0))
        assert found.value is None, f"after {number + 1} pairs"


def test_where_there_is_far_more_noise_than_gradient_what_there_is_at_least_is_said() -> None:
    found = seen(pairs_of(10_000.0, 10), 64, 10)
    assert found.value is not None
    assert 80.0 <= found.value <= 10_000.0


def test_what_was_known_stays_known_where_later_pairs_tell_nothing() -> None:
    found = seen(pairs_of(10.0, 10), 50, 10)
    before = found.value
    for _ in range(5):
        found.note_nothing()
        found.add(10, apart=math.nan, product=1.0)
        found.add(10, apart=math.inf, product=1.0)
        found.add(10, apart=0.0, product=0.0)
    assert found.value == before is not None
    assert (found.num_pairs, found.num_tried) == (50, 70)


@pytest.mark.parametrize(("noise_scale", "is_more"), [(2000.0, True), (0.5, False)])
def test_what_was_known_gives_way_where_it_can_no_longer_be_true(noise_scale: float, is_more: bool) -> None:
    found = seen(pairs_of(30.0, 10), 40, 10)
    assert found.value == pytest.approx(30.0, rel=0.15)
    seen(pairs_of(noise_scale, 10, seed=1), 100, 10, into=found)
    assert found.value is not None
    assert 150.0 < found.value <= 3000.0 if is_more else 0.4 < found.value < 1.5


def test_one_pair_of_huge_gradients_does_not_outweigh_all_others() -> None:
    calm, shaken = (seen(pairs_of(10.0, 10), 50, 10) for _ in range(2))
    shaken.add(10, apart=1e9, product=1e9)
    assert calm.value is not None and shaken.value == pytest.approx(calm.value, rel=0.25)


def test_without_noise_there_is_none() -> None:
    found = NoiseScale()
    for _ in range(10):
        found.add(4, apart=0.0, product=2.0)
    assert found.value == 0.0


def test_what_is_saved_goes_on_to_the_bit() -> None:
    pairs = list(zip(range(40), pairs_of(30.0, 10), strict=False))
    whole, first, second = NoiseScale(), NoiseScale(), NoiseScale()
    for number, (apart, product) in pairs:
        whole.add(10, apart=apart, product=product)
        if number == 20:
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        (first if number < 20 else second).add(10, apart=apart, product=product)
    assert second == whole
    second.load_state_dict({})
    assert second == NoiseScale()


@given(st.lists(st.tuples(st.floats(0, 1e12), st.floats(-1e12, 1e12)), max_size=40), st.integers(1, 2**40))
@example([(1.0, 1e-300)] * 10, 8)
def test_whatever_is_seen_what_is_said_is_a_number_of_samples(pairs: list[Pair], batch: int) -> None:
    found = NoiseScale()
    for apart, product in pairs:
        found.add(batch, apart=apart, product=product)
        assert found.value is None or 0.0 <= found.value < math.inf
