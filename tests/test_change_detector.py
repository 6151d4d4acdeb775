"""Steps that take longer or shorter than they did: seen soon, and not where nothing has changed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.profile.changing import ChangeDetector, PaceChange


def _changes(seconds: Iterable[float], detector: ChangeDetector | None = None) -> list[PaceChange]:
    detector = detector or ChangeDetector()
    seen = (detector.see(step, each) for step, each in enumerate(seconds))
    return [each for each in seen if each is not None]


def _noise(spread: float, num: int, seed: int = 0, factor: float = 1.0) -> list[float]:
    """Steps of ten milliseconds, every hundredth three times as long."""
    draw = random.Random(seed)
    return [factor * 0.01 * math.exp(draw.gauss(0, spread)) * (3 if draw.random() < 0.01 else 1) for _ in range(num)]


@pytest.mark.parametrize(
    ("factor", "num_steps"), [(1.08, 5), (1.14, 5), (1.15, 4), (1.30, 4), (2.0, 4), (1 / 1.08, 5), (0.5, 4)]
)
def test_steps_that_are_alike_show_a_change_when_half_of_eight_have_it(factor: float, num_steps: int) -> None:
    (found,) = _changes([0.01] * 50 + [0.01 * factor] * 30)
    assert found.step == 50 + num_steps - 1
    assert found.since_step == 50
    assert found.before_seconds == pytest.approx(0.01)
    assert found.ratio == pytest.approx(factor)


@pytest.mark.parametrize("factor", [1.0, 1.06, 1 / 1.06])
def test_a_small_change_is_none(factor: float) -> None:
    assert _changes([0.01] * 50 + [0.01 * factor] * 500) == []


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.03])
@pytest.mark.parametrize(("factor", "within"), [(1.15, 9), (1.3, 6)])
def test_a_change_is_seen_within_a_few_steps_of_little_noise(spread: float, factor: float, within: int) -> None:
    delays = []
    for seed in range(20):
        steps = _noise(spread, 300, seed) + _noise(spread, 300, seed + 100, factor)
        found = _changes(steps)
        assert found[0].step >= 300, "a false alarm"
        delays.append(found[0].step - 299)
    assert sorted(delays)[10] <= (within if spread < 0.03 else 3 * within)


@pytest.mark.parametrize("spread", [0.01, 0.03, 0.1, 0.3])
def test_noise_of_twenty_thousand_steps_is_no_change(spread: float) -> None:
    assert _changes(_noise(spread, 20_000)) == []


def test_a_few_long_steps_are_no_change() -> None:
    assert _changes([0.01] * 100 + [5.0] * 3 + [0.01] * 100) == []


def test_it_begins_anew_after_a_change() -> None:
    found = _changes([0.01] * 60 + [0.02] * 60 + [0.01] * 60)
    assert [round(each.ratio, 6) for each in found] == [2.0, 0.5]
    assert [each.since_step for each in found] == [60, 120]


def test_another_config_is_no_change_of_pace() -> None:
    detector = ChangeDetector()
    lengths = {(1, 0): 0.01, (2, 0): 0.05, (2, 1): 0.02}
    seen = [detector.see(step, lengths[config], config) for config in lengths for step in range(100)]
    assert seen == [None] * 300
    assert [detector.see(step, 0.03, (2, 1)) for step in range(4)][-1] is not None


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_what_is_no_length_of_time_is_passed_over(value: float) -> None:
    detector = ChangeDetector()
    assert _changes(([0.01] * 20 + [value]) * 20, detector) == []
    assert len(_changes([0.02] * 4, detector)) == 1


def test_the_words_are_one_line_with_numbers() -> None:
    (found,) = _changes([0.01] * 60 + [0.015] * 10)
    assert found.text == "steps take 1.50 times as long as before since step 60: 15 ms, before 10 ms"


@given(st.lists(st.floats(allow_nan=True), max_size=200))
def test_whatever_is_given_nothing_is_raised(values: list[float]) -> None:
    for found in _changes(values):
        assert found.text.isprintable()


@given(st.lists(st.floats(min_value=1e-3, max_value=1e3), max_size=200), st.integers(-20, 20))
def test_the_unit_does_not_matter(values: list[float], power: int) -> None:
    plain, scaled = _changes(values), _changes([each * 2.0**power for each in values])
    assert [each.step for each in plain] == [each.step for each in scaled]
