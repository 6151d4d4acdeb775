"""Steps that take longer or shorter than they did: seen soon, and not where nothing has changed."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import change_detector
from elastic_ext.profile.stragglers import ChangeDetector, PaceChange


def _changes(seconds: Iterable[float], detector: ChangeDetector | None = None) -> list[PaceChange]:
    detector = detector or ChangeDetector()
    seen = (detector.see(step, each) for step, each in enumerate(seconds))
    return [each for each in seen if each is not None]


def _noise(spread: float, num: int, seed: int = 0, factor: float = 1.0) -> list[float]:
    """Steps of seventy milliseconds, every hundredth three times as long."""
    draw = random.Random(seed)
    return [factor * 0.07 * math.exp(draw.gauss(0, spread)) * (3 if draw.random() < 0.01 else 1) for _ in range(num)]


@pytest.mark.parametrize(
    ("factor", "num_steps"), [(1.08, 5), (1.14, 5), (1.15, 4), (1.30, 4), (2.0, 4), (1 / 1.08, 5), (0.5, 4)]
)
def test_steps_that_are_alike_show_a_change_when_half_of_eight_have_it(factor: float, num_steps: int) -> None:
    (found,) = _changes([0.07] * 50 + [0.07 * factor] * 30)
    assert found.step == 50 + num_steps - 1
    assert found.since_step == 50
    assert found.before_seconds == pytest.approx(0.07)
    assert found.ratio == pytest.approx(factor)


@pytest.mark.parametrize("factor", [1.0, 1.06, 1 / 1.06])
def test_a_small_change_is_none(factor: float) -> None:
    assert _changes([0.07] * 50 + [0.07 * factor] * 500) == []


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
    assert _changes([0.07] * 100 + [5.0] * 3 + [0.07] * 100) == []


def test_very_short_steps_that_are_slow_for_a_moment_are_no_change_and_those_that_stay_slow_are() -> None:
    steps = [1e-3] * 3000 + [3e-3] * 200 + [1e-3] * 3000
    assert _changes(steps) == []
    assert len(_changes(steps, ChangeDetector(least_seconds=0.0))) == 2
    (found,) = _changes([1e-3] * 3000 + [3e-3] * 2000)
    assert (found.step, found.since_step) == (3255, 3000)


def test_it_begins_anew_after_a_change() -> None:
    found = _changes([0.07] * 60 + [0.14] * 60 + [0.07] * 60)
    assert [round(each.ratio, 6) for each in found] == [2.0, 0.5]
    assert [each.since_step for each in found] == [60, 120]


def test_another_config_is_no_change_of_pace() -> None:
    detector = ChangeDetector()
    lengths = {(1, 0): 0.07, (2, 0): 0.25, (2, 1): 0.1}
    seen = [detector.see(step, lengths[config], config) for config in lengths for step in range(100)]
    assert seen == [None] * 300
    assert [detector.see(step, 0.15, (2, 1)) for step in range(4)][-1] is not None


@pytest.mark.parametrize("value", [0.0, -1.0, 5e-324, 1e308, math.nan, math.inf, -math.inf])
def test_what_is_no_length_of_time_is_passed_over(value: float) -> None:
    detector = ChangeDetector()
    assert _changes(([0.07] * 20 + [value]) * 20, detector) == []
    assert len(_changes([0.1] * 4, detector)) == 1


def test_the_words_are_one_line_with_numbers() -> None:
    (found,) = _changes([0.07] * 60 + [0.105] * 10)
    assert found.text == "steps take 1.50 times as long as before since step 60: 105 ms, before 70 ms"


@given(st.lists(st.floats(allow_nan=True), max_size=8))
def test_whatever_is_given_nothing_is_raised(values: list[float]) -> None:
    for found in _changes(each for value in values for each in [value] * 40):
        assert found.text.isprintable()


@given(st.lists(st.floats(min_value=0.1, max_value=1e3), max_size=200), st.integers(0, 20))
def test_the_unit_does_not_matter(values: list[float], power: int) -> None:
    plain, scaled = _changes(values), _changes([each * 2.0**power for each in values])
    assert [each.step for each in plain] == [each.step for each in scaled]


# ---- the benchmark ----


def test_recorded_noise_is_made_level_and_quiet() -> None:
    recorded = [each * (1 + number / 5000) for number, each in enumerate(_noise(0.1, 5000))]
    level = change_detector.without_drift(recorded)
    early, late = statistics.median(level[:500]), statistics.median(level[-500:])
    assert early == pytest.approx(late, rel=0.05)
    quiet = change_detector.as_quiet(level)
    usual = statistics.median(quiet)
    assert statistics.median(abs(each / usual - 1) for each in quiet) == pytest.approx(0.015, rel=0.05)


@pytest.mark.parametrize("name", change_detector.DETECTORS)
def test_each_detector_of_the_benchmark_sees_a_large_change_in_little_noise(name: str) -> None:
    found = change_detector.find(name, [each / 10 for each in _noise(0.02, 5000)])
    assert found.middles[-1] is not None


def test_the_table_of_the_benchmark_shows_what_was_seen_and_decides_what_is_claimed() -> None:
    row = change_detector.Found(name="ours", num_alarms=1, delays=[[3, 4, None], [None, None, 2], [1, 1, 1]])
    assert row.middles == (4, None, 1)
    assert row.decided()[0] == "none claimed"
    assert dataclasses.replace(row, most_alarms=0).decided() == ("fail", "1 alarms are more than 0")
    assert dataclasses.replace(row, most_delays=(4, 9, 9)).decided()[1] == "1.15 times as long takes None steps, not 9"
    claimed = dataclasses.replace(row, delays=[[1], [2], [3]], most_alarms=1, most_delays=(1, 2, 3))
    assert claimed.decided()[0] == "pass"
    table = change_detector.DetectorTable(title="Noise", num_steps=4000, rows=(row, claimed))
    assert table.heading == "**Noise** (4,000 steps)"
    assert table.verdicts == ("none claimed", "pass")
    assert table.table_lines()[2] == "| ours | 1 | 4 (2 of 3) | - (1 of 3) | 1 (3 of 3) |  |  |"
    assert "alarms ≤ 1, steps ≤ 1, 2, 3" in table.table_lines()[3]
