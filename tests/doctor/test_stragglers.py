"""Who is slower than the others, and when nobody can tell."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.doctor.report import compared_nodes

SHARE = 0.15
speeds = st.floats(min_value=1e-6, max_value=1e12)
measured = st.dictionaries(st.text(max_size=3), st.lists(speeds, min_size=3, max_size=3), max_size=12)


def _states(values: dict[str, list[float]], *, is_rate: bool = False) -> dict[str, str]:
    return {name: one.state for name, one in compared_nodes(values, is_rate=is_rate, least_share=SHARE).items()}


@pytest.mark.parametrize(
    ("costs", "states"),
    [
        ([1.0], ["undecided"]),
        ([1.0, 1.1], ["normal", "normal"]),
        ([1.0, 2.0], ["normal", "undecided"]),
        ([1.0, 1.0, 2.0], ["normal", "normal", "straggler"]),
        ([1.0, 1.3, 2.0], ["normal", "normal", "undecided"]),
        ([1.0, 1.02, 0.98, 1.4], ["normal", "normal", "normal", "straggler"]),
        ([1.0, 1.0, 2.0, 2.0], ["normal", "normal", "undecided", "undecided"]),
        ([1.0, 1.01, 1.02, 1.03, 3.0, 4.0], ["normal"] * 4 + ["straggler"] * 2),
        ([0.2, 1.0, 1.0, 1.0], ["normal"] * 4),
    ],
)
def test_a_table_of_times(costs: list[float], states: list[str]) -> None:
    times = {str(number): [cost] * 3 for number, cost in enumerate(costs)}
    assert list(_states(times).values()) == states
    rates = {name: [1 / cost for cost in windows] for name, windows in times.items()}
    assert list(_states(rates, is_rate=True).values()) == states


def test_one_slow_window_makes_no_straggler() -> None:
    values = {"a": [1.0, 1.0, 1.0], "b": [1.0, 1.0, 1.0], "c": [1.0, 9.0, 1.0], "d": [1.0, 1.0, 1.0]}
    assert set(_states(values).values()) == {"normal"}
    values["c"] = [9.0, 9.0, 1.0]
    assert _states(values)["c"] == "straggler"


def test_who_has_not_been_measured_is_undecided_and_counts_for_nothing() -> None:
    values = {"a": [1.0], "b": [1.0], "c": [2.0], "d": []}
    assert _states(values) == {"a": "normal", "b": "normal", "c": "straggler", "d": "undecided"}
    assert compared_nodes(values, is_rate=False, least_share=SHARE)["d"].times_slower is None


def test_the_reason_says_by_how_much_and_of_how_many() -> None:
    standing = compared_nodes({"a": [1.0], "b": [1.0], "c": [2.0]}, is_rate=False, least_share=SHARE)["c"]
    assert standing.reason == "2.00 times as slow as the median of 3"
    assert standing.times_slower == 2.0


@given(measured, st.floats(min_value=0.01, max_value=100))
def test_the_unit_does_not_matter(values: dict[str, list[float]], factor: float) -> None:
    scaled = {name: [value * 2 ** round(factor) for value in windows] for name, windows in values.items()}
    assert _states(scaled) == _states(values)


@given(measured, st.randoms(use_true_random=False))
def test_the_order_of_nodes_does_not_matter(values: dict[str, list[float]], random: object) -> None:
    names = list(values)
    random.shuffle(names)  # type: ignore[attr-defined]
    assert _states({name: values[name] for name in names}) == _states(values)


@given(measured)
def test_fewer_than_half_are_stragglers_in_a_window_and_none_of_two(values: dict[str, list[float]]) -> None:
    one_window = {name: windows[:1] for name, windows in values.items()}
    found = list(_states(one_window).values())
    assert 2 * found.count("straggler") < max(len(found), 1)
    if len(found) <= 2:
        assert "straggler" not in found


@given(st.integers(min_value=3, max_value=50), speeds, st.floats(min_value=1.2, max_value=100))
def test_one_slow_node_among_equals_is_found_from_three_nodes_on(num_nodes: int, cost: float, times: float) -> None:
    values = {str(number): [cost] * 3 for number in range(num_nodes)}
    values["0"] = [cost * times] * 3
    states = _states(values)
    assert [name for name, state in states.items() if state != "normal"] == ["0"]
    assert states["0"] == "straggler"
