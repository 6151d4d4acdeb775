"""Whose config comes next, how often to ask, and when to name those that lag."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.config.control_word import IntervalEstimator, Lag, RankReport, RoundPlace, choose
from tests.support.configs import unhurried

HERE = RoundPlace(boundary=3, step=40)
reports = st.builds(
    RankReport,
    place=st.just(HERE),
    version=st.none() | st.integers(1, 4),
    digest=st.sampled_from(["x", "y"]),
    changes=st.none() | st.just({"user.x": 1}),
    reason=st.sampled_from(["", "memory"]),
)


def report(**news: Any) -> RankReport:
    return RankReport(place=HERE, **news)


FILE_1, FILE_2 = report(version=1, digest="a"), report(version=2, digest="b")
NOTHING = report()
WISH = report(changes={"dataloader.batch_size": 2}, reason="memory")


@pytest.mark.parametrize(
    ("given_reports", "kind", "source"),
    [
        ([NOTHING], "nothing", 0),
        ([NOTHING, NOTHING], "nothing", 0),
        ([FILE_1], "file", 0),
        ([FILE_1, FILE_1, FILE_1], "file", 0),
        ([FILE_1, NOTHING], "nothing", 0),
        ([NOTHING, FILE_2], "nothing", 0),
        ([FILE_2, FILE_1], "file", 1),
        ([FILE_2, FILE_2, FILE_1, FILE_1], "file", 2),
        ([FILE_1, report(version=1, digest="b")], "nothing", 0),
        ([FILE_2, FILE_1, report(version=1, digest="b")], "nothing", 0),
        ([FILE_1, report(version=1, digest="b", changes={})], "revision", 1),
        ([FILE_1, FILE_2, report(version=2, digest="c")], "file", 0),
        ([WISH, NOTHING], "revision", 0),
        ([NOTHING, WISH, WISH], "revision", 1),
        ([FILE_1, WISH], "revision", 1),
        ([report(version=1, digest="a", changes={}, reason="both"), FILE_1], "file", 0),
        ([report(version=1, digest="a", changes={}, reason="both"), NOTHING], "revision", 0),
    ],
)
def test_the_choice_is(given_reports: list[RankReport], kind: str, source: int) -> None:
    choice = choose(given_reports)
    assert (choice.kind, choice.source) == (kind, source)


def test_a_conflict_names_the_ranks_of_each_content_and_what_to_do() -> None:
    other = report(version=1, digest="b")
    conflict = choose([FILE_1, other, FILE_1, FILE_2]).conflict
    assert conflict == (
        "version 1 has different contents on ranks 0, 2 and on ranks 1; put one content under a higher version"
    )


@unhurried
@given(st.lists(reports, min_size=1, max_size=6))
def test_what_is_chosen_is_held_by_its_source_and_possible_for_all(ranks: list[RankReport]) -> None:
    choice = choose(ranks)
    source = ranks[choice.source]
    if choice.kind == "file":
        assert all(report.version is not None and report.version >= (source.version or 0) for report in ranks)
        assert {report.digest for report in ranks if report.version == source.version} == {source.digest}
        assert not choice.conflict
        return
    everyone = all(report.version is not None for report in ranks)
    assert bool(choice.conflict) == everyone, "files that all ranks hold are taken unless they contradict each other"
    assert (choice.kind == "revision") == any(report.changes is not None for report in ranks)
    assert choice.kind == "nothing" or source.changes is not None


@unhurried
@given(st.lists(reports, min_size=1, max_size=6), st.randoms())
def test_the_order_of_ranks_does_not_change_what_is_chosen(ranks: list[RankReport], random: object) -> None:
    shuffled = list(ranks)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = choose(ranks), choose(shuffled)
    assert one.kind == other.kind
    if one.kind == "file":
        assert ranks[one.source].version == shuffled[other.source].version
        assert ranks[one.source].digest == shuffled[other.source].digest


@unhurried
@given(
    st.builds(
        RankReport,
        place=st.builds(RoundPlace, boundary=st.integers(0), step=st.integers(0)),
        version=st.none() | st.integers(1),
        digest=st.text(st.characters(codec="utf-8")),
        changes=st.none() | st.dictionaries(st.text(max_size=9), st.none() | st.integers() | st.text(max_size=9)),
        reason=st.text(),
    )
)
def test_a_report_comes_back_from_its_bytes(report: RankReport) -> None:
    assert RankReport.from_bytes(report.to_bytes()) == report


# ---- pace ----


def paced(cost_seconds: float, step_seconds: list[float], **arguments: float) -> int:
    pace = IntervalEstimator(pulse_seconds=cost_seconds, **arguments)  # type: ignore[arg-type]
    for seconds in step_seconds:
        pace.note_step(seconds)
    return pace.interval()


@pytest.mark.parametrize(
    ("cost_seconds", "step_seconds", "interval"),
    [
        (0.0, [0.1] * 8, 1),
        (0.0005, [0.1] * 8, 1),
        (0.0006, [0.1] * 8, 2),
        (0.001, [0.01] * 8, 20),
        (0.001, [0.01] * 7, 1),
        (0.001, [], 1),
        (1.0, [0.01] * 8, 10_000),
        (1e9, [1e-9] * 8, 10_000),
        (0.001, [0.01] * 20 + [60.0], 20),
        (0.001, [60.0] + [0.01] * 20, 20),
        (0.001, [0.0] * 8, 10_000),
        (0.001, [60.0] * 100 + [0.01] * 32, 20),
    ],
)
def test_the_interval_is(cost_seconds: float, step_seconds: list[float], interval: int) -> None:
    assert paced(cost_seconds, step_seconds) == interval


@unhurried
@given(st.floats(0, 10), st.floats(1e-6, 100), st.floats(1e-4, 0.1), st.integers(1, 5000))
def test_the_interval_keeps_the_share_and_is_the_smallest_that_does(
    cost: float, step: float, share: float, longest: int
) -> None:
    interval = paced(cost, [step] * 8, share=share, longest=longest)
    assert 1 <= interval <= longest
    if interval < longest:
        assert cost <= interval * step * share * (1 + 1e-9)
    if interval > 1:
        assert cost >= (interval - 1) * step * share * (1 - 1e-9)


@pytest.mark.parametrize(
    ("pulse_seconds", "agreement_seconds", "interval"),
    [
        (0.0, [0.001] * 4, 20),
        (0.001, [0.001] * 4, 40),
        (0.001, [0.001] * 12 + [5.0] * 20, 40),  # what is long only because a slower rank was waited for
        (0.001, [9.0] + [0.001] * 32, 40),
    ],
)
def test_what_an_agreement_takes_of_the_training_thread_counts_too(
    pulse_seconds: float, agreement_seconds: list[float], interval: int
) -> None:
    pace = IntervalEstimator(pulse_seconds=pulse_seconds)
    for _ in range(8):
        pace.note_step(0.01)
    for seconds in agreement_seconds:
        pace.note_agreement(seconds)
    assert pace.interval() == interval


@pytest.mark.parametrize(
    ("idle_seconds", "interval"), [([], 20), ([0.000025] * 8, 40), ([0.00001] * 8, 25), ([1.0] * 8, 40)]
)
def test_what_boundaries_take_without_an_agreement_comes_off_the_share_up_to_half_of_it(
    idle_seconds: list[float], interval: int
) -> None:
    pace = IntervalEstimator(pulse_seconds=0.001)
    for _ in range(8):
        pace.note_step(0.01)
    for seconds in idle_seconds:
        pace.note_idle(seconds)
    assert pace.interval() == interval


# ---- lag ----


def test_a_version_that_some_ranks_lack_is_due_after_the_patience_and_until_it_is_named() -> None:
    lag = Lag(patience_seconds=30.0)
    assert not lag.is_due(1e9)
    lag.note(1, 2, now=100.0)
    assert not lag.is_due(130.0)
    assert lag.is_due(130.1)
    lag.note(1, 2, now=131.0)
    assert lag.is_due(131.0)
    lag.mark_named()
    assert not lag.is_due(1e9)


def test_newer_versions_do_not_give_a_rank_that_stays_behind_its_time_anew() -> None:
    lag = Lag(patience_seconds=30.0)
    for version in range(2, 10):
        lag.note(1, version, now=10.0 * version)
    assert lag.is_due(51.0)
    lag.mark_named()
    lag.note(1, 11, now=200.0)
    assert not lag.is_due(1e9)


def test_a_rank_that_moves_on_and_stays_behind_is_named_again() -> None:
    lag = Lag(patience_seconds=30.0)
    lag.note(1, 2, now=100.0)
    lag.mark_named()
    lag.note(2, 3, now=200.0)
    assert not lag.is_due(229.0)
    assert lag.is_due(231.0)


def test_ranks_that_caught_up_are_not_named() -> None:
    lag = Lag(patience_seconds=30.0)
    lag.note(1, 2, now=100.0)
    lag.note(2, 2, now=110.0)
    assert not lag.is_due(1e9)
    lag.note(2, 3, now=200.0)
    assert not lag.is_due(230.0)
    assert lag.is_due(230.1)
