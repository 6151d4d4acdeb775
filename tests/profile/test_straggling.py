"""Who keeps the others waiting: named after three rounds in a row, whoever it is, and nobody where nobody does."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ext.profile.phases import Phase
from elastic_ext.profile.stragglers import RankBusyTime, Straggler, Stragglers, is_far, rank_busy_times, usual
from tests.support.profiles import made_view


def _times(seconds: Mapping[int, float] | Sequence[float], host: str = "node") -> list[RankBusyTime]:
    each = seconds if isinstance(seconds, Mapping) else dict(enumerate(seconds))
    longest = max(each.values(), default=0.0)
    return [
        RankBusyTime(rank=rank, host=f"{host}{rank}", seconds=own, step_seconds=longest * 1.25)
        for rank, own in each.items()
    ]


def _named(found: Sequence[Straggler]) -> list[int]:
    return [each.rank for each in found]


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        ([1.0], []),
        ([1.0, 1.19], []),
        ([1.0, 1.21], [1]),
        ([1.5, 1.0], [0]),
        ([1.0, 1.0, 2.0], [2]),
        ([0.3, 1.0, 1.0, 1.0], []),  # one that is quicker keeps nobody waiting
        ([1.0, 2.0, 1.0, 2.0], [1, 3]),
        ([1.0, 1.0, 1.0, 3.0, 2.0], [3, 4]),  # the slowest first
        ([1.0, 1.3, 2.0], []),  # they differ as much among themselves
        ([1.0, 1.02, 0.98, 1.4], [3]),
    ],
)
def test_who_is_slow_is_named_in_the_third_round(seconds: list[float], slow: list[int]) -> None:
    seen = Stragglers()
    assert [_named(seen.see(_times(seconds))) for _ in range(4)] == [[], [], slow, slow]


def test_one_quick_round_begins_the_count_anew() -> None:
    seen = Stragglers()
    rounds = [[1.0, 2.0], [1.0, 2.0], [1.0, 1.0], [1.0, 2.0], [1.0, 2.0], [1.0, 2.0]]
    assert [_named(seen.see(_times(each))) for each in rounds] == [[], [], [], [], [], [1]]


def test_how_much_the_job_is_slowed_and_how_long_it_lasts_is_told() -> None:
    seen = Stragglers()
    times = [dataclasses.replace(each, step_seconds=2.5) for each in _times([1.0, 2.0, 1.0])]
    found = [seen.see(times) for _ in range(5)][-1]
    assert found == [Straggler(rank=1, host="node1", score=0.5, own_score=1.0, slowed=0.4, num_rounds=5)]
    assert found[0].text == (
        "rank 1 on node1 takes 2.00 times as long as is usual for its own part of a step; "
        "under this config it always took as long; "
        "waiting for it takes 40% of every step"
    )


def test_one_that_has_become_slow_is_told_from_one_that_always_was() -> None:
    seen = Stragglers()
    for _ in range(10):
        assert seen.see(_times([1.0, 1.0])) == []
    found = [seen.see(_times([1.0, 3.0])) for _ in range(40)][-1]
    assert found[0].own_score == pytest.approx(1 / 3)  # the past that it is measured by is that before it became slow
    assert "3.00 times as long as it took before" in found[0].text


def test_all_that_become_slower_together_keep_nobody_waiting() -> None:
    seen = Stragglers()
    rounds = [[1.0, 1.0]] * 5 + [[3.0, 3.0]] * 5
    assert [seen.see(_times(each)) for each in rounds] == [[]] * 10


def test_a_rank_that_comes_or_goes_changes_nothing_for_the_others() -> None:
    seen = Stragglers()
    rounds = [{0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0, 2: 1.0}, {1: 2.0, 2: 1.0}]
    assert [_named(seen.see(_times(each))) for each in rounds] == [[], [], [1]]


def test_a_rank_that_was_away_or_has_moved_begins_anew() -> None:
    seen = Stragglers()
    for _ in range(2):
        seen.see(_times([1.0, 2.0]))
    seen.see(_times({0: 1.0}))
    assert [_named(seen.see(_times([1.0, 2.0]))) for _ in range(3)] == [[], [], [1]]
    assert [_named(seen.see(_times([1.0, 2.0], "other"))) for _ in range(3)] == [[], [], [1]]


def test_another_config_begins_anew() -> None:
    seen = Stragglers()
    assert [_named(seen.see(_times([1.0, 2.0]), (1, 0))) for _ in range(3)] == [[], [], [1]]
    assert [_named(seen.see(_times([1.0, 2.0]), (2, 0))) for _ in range(3)] == [[], [], [1]]


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_length_of_time_counts_for_nothing(value: float) -> None:
    seen = Stragglers()
    assert [_named(seen.see(_times([1.0, 2.0, value]))) for _ in range(3)] == [[], [], [1]]
    assert seen.see(_times([value])) == []
    assert seen.see([]) == []


def test_local_times_leave_out_waiting_for_others_and_ranks_that_nobody_looked_at() -> None:
    step = {Phase.DATA: 0.01, Phase.FORWARD: 0.02, Phase.COMMUNICATION: 0.5, Phase.AGREEMENT: 0.1}
    looked_at = made_view(step, rank=3, host="a")
    (found,) = rank_busy_times(
        [looked_at, made_view(step, rank=4, num_undetailed=100), made_view(step, rank=5, num_steps=1)]
    )
    assert (found.rank, found.host) == (3, "a")
    assert found.seconds == pytest.approx(0.03)
    assert found.step_seconds == pytest.approx(0.63)


def test_usual_of_two_is_the_quicker_and_far_is_beyond_what_others_differ() -> None:
    assert usual([2.0, 1.0]) == 1.0
    assert is_far(1.5, [1.0, 1.5])
    assert not is_far(2.0, [1.0, 1.3, 2.0])


def test_noise_names_nobody_and_a_slow_rank_in_it_is_named() -> None:
    draw = random.Random(0)
    for num_ranks in (2, 3, 8, 64):
        seen, slow = Stragglers(), draw.randrange(num_ranks)
        for _ in range(200):
            assert seen.see(_times([draw.lognormvariate(0, 0.05) for _ in range(num_ranks)])) == []
        for number in range(20):
            times = [draw.lognormvariate(0.5 if rank == slow else 0, 0.05) for rank in range(num_ranks)]
            assert _named(seen.see(_times(times))) == ([slow] if number >= 2 else [])


@settings(deadline=None)
@given(st.integers(2, 30), st.data(), st.floats(1.25, 100), st.floats(1e-6, 1e6))
def test_whoever_is_slow_is_named(num_ranks: int, data: st.DataObject, times: float, usually: float) -> None:
    slow = data.draw(st.integers(0, num_ranks - 1))
    seconds = [usually * (times if rank == slow else 1.0) for rank in range(num_ranks)]
    seen = Stragglers()
    found = [seen.see(_times(seconds)) for _ in range(3)][-1]
    assert _named(found) == [slow]
    assert found[0].score == pytest.approx(1 / times)
    assert 0 < found[0].slowed < 1


rounds = st.lists(st.dictionaries(st.integers(0, 5), st.floats(), max_size=6), max_size=12)


@given(rounds)
def test_whatever_is_given_nothing_is_raised(given_rounds: list[dict[int, float]]) -> None:
    seen = Stragglers()
    for each in given_rounds:
        for found in seen.see(_times(each)):
            assert found.text.isprintable()
            assert found.num_rounds >= 3


@given(rounds, st.randoms(use_true_random=False))
def test_the_order_of_ranks_does_not_matter(given_rounds: list[dict[int, float]], shuffled: random.Random) -> None:
    plain, other = Stragglers(), Stragglers()
    for each in given_rounds:
        times = _times(each)
        expected = plain.see(times)
        shuffled.shuffle(times)
        assert other.see(times) == expected
