"""The history of a job: finer the newer it is, bounded, and true to what it was made of."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ext.master.collector import History, MeanPoint, mean_of

BEGIN = 1_700_006_400.0  # a whole number of ten minutes
HOUR, DAY, WEEK = 3600.0, 86400.0, 7 * 86400.0


def _point(time: float, rate: float | None = 1.0, *, seconds: float = 5.0, **changes: object) -> MeanPoint:
    return MeanPoint(time=time, seconds=seconds, steps_per_second=rate, **changes)  # type: ignore[arg-type]


def _filled(seconds: float, every: float = 5.0) -> History:
    """Of a job whose rate is how many hours it is old."""
    history = History()
    for number in range(1, int(seconds / every) + 1):
        history.add(_point(BEGIN + number * every, number * every / HOUR, seconds=every))
    return history


def test_a_point_of_ten_seconds_is_complete_with_the_first_of_the_next() -> None:
    history = History()
    assert history.add(_point(BEGIN + 5, 1.0)) is None
    assert history.add(_point(BEGIN + 10, 2.0)) is None
    assert history.add(_point(BEGIN + 15, 9.0)) == _point(BEGIN + 10, 1.5, seconds=10.0)
    assert history.since(0) == [_point(BEGIN + 10, 1.5, seconds=10.0)]


def test_points_lie_further_apart_the_older_they_are() -> None:
    points = _filled(8 * DAY, every=10.0).since(0)
    now = BEGIN + 8 * DAY
    apart = [(now - later.time, later.time - point.time) for point, later in pairwise(points)]
    assert {gap for age, gap in apart if age < HOUR - 100} == {10.0}
    assert {gap for age, gap in apart if HOUR + 100 < age < DAY - 1000} == {60.0}
    assert {gap for age, gap in apart if age > DAY + 1000} == {600.0}
    assert len(points) < 360 + 1440 + 1008
    assert now - points[0].time == pytest.approx(WEEK, abs=1000)
    for point in points:
        middle = point.time - point.seconds / 2
        assert point.steps_per_second == pytest.approx((middle - BEGIN) / HOUR, abs=0.002)


def test_since_gives_what_ended_after() -> None:
    history = _filled(HOUR)
    assert history.since(BEGIN + HOUR - 30) == history.since(0)[-2:]
    assert history.since(math.inf) == []


def test_a_mean_counts_seconds_and_passes_over_what_is_not_known() -> None:
    points = [
        _point(BEGIN + 5, None, step=7, num_workers=8, config_version=1, shares={"data": 0.5, "forward": 0.5}),
        _point(BEGIN + 10, 1.0, seconds=5, num_workers=8, config_version=1),
        _point(BEGIN + 25, 3.0, seconds=15, step=9, num_workers=0, config_version=2, shares={"data": 0.1}),
    ]
    found = mean_of(points)
    assert found.time == BEGIN + 25 and found.seconds == 25
    assert found.steps_per_second == pytest.approx((5 * 1 + 15 * 3) / 20)
    assert (found.step, found.num_workers, found.config_version) == (9, 3, 2)
    assert found.shares == {"data": pytest.approx((5 * 0.5 + 15 * 0.1) / 20), "forward": pytest.approx(0.5 / 4)}
    assert found.samples_per_second is None


def test_where_nothing_was_told_there_are_no_points() -> None:
    history = History()
    for seconds in (5, 10, 1000, 1005, 1015):
        history.add(_point(BEGIN + seconds))
    assert [point.time - BEGIN for point in history.since(0)] == [10, 1000, 1010]


def test_a_clock_that_is_set_back_drops_what_would_lie_ahead() -> None:
    history = _filled(HOUR)
    history.add(_point(BEGIN + 600.5))
    history.add(_point(BEGIN + 611))
    times = [point.time for point in history.since(0)]
    assert times == sorted(times)
    assert times[-1] == BEGIN + 610


def test_a_clock_that_is_set_ahead_leaves_a_gap() -> None:
    history = _filled(HOUR)
    history.add(_point(BEGIN + DAY))
    history.add(_point(BEGIN + DAY + 5))
    times = [point.time for point in history.since(0)]
    assert times[-1] == BEGIN + DAY and times == sorted(times)


def test_what_a_store_has_kept_is_taken_up_again() -> None:
    history = _filled(2 * DAY, every=10.0)
    kept = _filled(DAY, every=10.0).rows() + history.rows(BEGIN + DAY - 60)
    again = History()
    again.restore(text for _, text in reversed(kept))
    assert again.rows() == history.rows()
    assert len(again.rows()) == 1440
    older = again.since(0)[:-1440]
    assert [point.time for point in older] == [BEGIN + 600 * (number + 1) for number in range(len(older))]
    assert len(older) == pytest.approx(144, abs=2)
    again.add(_point(BEGIN + 2 * DAY + 5))
    again.add(_point(BEGIN + 2 * DAY + 65))
    assert again.since(BEGIN + 2 * DAY)[-1].time == BEGIN + 2 * DAY + 10
    newer = history.rows(BEGIN + 2 * DAY - 120)
    assert len(newer) == 1 and newer[0][0] == BEGIN + 2 * DAY - 60


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"time": 60}',
        '{"time": 1e400, "seconds": 60}',
        '{"time": "1", "seconds": 60}',
        '{"time": 1, "seconds": 60, "steps_per_second": -1}',
        '{"time": 1, "seconds": 60, "shares": {"data": 7}}',
        '{"time": 1, "seconds": 60, "shares": [1]}',
        "[" * 100_000,
    ],
)
def test_a_row_that_is_none_is_left_out(text: str) -> None:
    history = History()
    history.restore([text])
    assert history.since(-1) == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(-500, 3000), st.floats(0, 100)), max_size=60))
def test_however_the_clock_goes_points_are_in_order_and_within_what_was_seen(steps: list[tuple[float, float]]) -> None:
    history = History()
    now = BEGIN
    for ahead, rate in steps:
        now += ahead
        history.add(_point(now, rate))
        times = [point.time for point in history.since(0)]
        assert times == sorted(set(times))
        assert all(time <= now for time in times)
    rates = [rate for _, rate in steps]
    for point in history.since(0):
        assert point.steps_per_second is not None
        assert min(rates) - 1e-9 <= point.steps_per_second <= max(rates) + 1e-9


def test_points_that_come_very_often_are_added_up_in_bounded_room() -> None:
    history = History()
    for number in range(1, 50_001):
        history.add(_point(BEGIN + number / 1000, float(number), seconds=0.001))
    assert max(len(level._open) for level in history._levels) < 100
    first = history.since(0)[0]
    assert first.steps_per_second == pytest.approx(mean(range(1, 10_001)))
