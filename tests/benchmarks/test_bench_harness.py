"""The benchmark harness: its statistics, its order of runs, its verdicts, and what it prints."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.__main__ import benchmarks_in, defines_main, main
from benchmarks.harness import (
    Claim,
    Reading,
    Side,
    Unit,
    UnlikeWorkError,
    bootstrap_interval,
    check_same_work,
    compare,
    decide,
    frozen,
    generic_cpu_name,
    paired_ratios,
    rotated,
    rounded,
    shortened,
    shown_value,
    table,
    this_machine,
)

positive = st.floats(min_value=1e-3, max_value=1e3)


def no_settling() -> None:
    """Collecting garbage before each run takes its time where torch is loaded, and a fake clock needs none."""


class FakeTime:
    """A clock that moves only when a side works."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def clock(self) -> float:
        return self.now

    def side(self, name: str, seconds: Callable[[], float], *, work: object = 1, claim: Claim | None = None) -> Side:
        def run() -> object:
            self.order.append(name)
            self.now += seconds()
            return work

        return Side(name=name, run=run, claim=claim)


@given(st.integers(1, 6), st.integers(0, 100))
def test_every_round_runs_every_side_once(num_sides: int, index: int) -> None:
    assert sorted(rotated(num_sides, index)) == list(range(num_sides))


@given(st.integers(2, 6))
def test_each_side_stands_in_each_place_as_often_and_before_each_other(num_sides: int) -> None:
    rounds = [rotated(num_sides, index) for index in range(2 * num_sides)]
    for place in range(num_sides):
        assert sorted(order[place] for order in rounds) == sorted([*range(num_sides)] * 2)
    for one in range(num_sides):
        for other in set(range(num_sides)) - {one}:
            assert sum(order.index(one) < order.index(other) for order in rounds) == num_sides


@given(st.lists(positive, min_size=1), positive)
def test_paired_ratio_of_a_steady_factor_is_that_factor_whatever_the_drift(drift: list[float], factor: float) -> None:
    ratios = paired_ratios([factor * one for one in drift], drift)
    assert ratios == pytest.approx([factor] * len(drift))


def test_paired_ratios_refuse_unlike_lengths_and_readings_of_nothing() -> None:
    with pytest.raises(ValueError, match=r"shorter|longer"):
        paired_ratios([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="the baseline read 0"):
        paired_ratios([1.0], [0.0])


@settings(max_examples=25, deadline=None)
@given(st.lists(positive, min_size=1, max_size=30))
def test_interval_lies_within_the_values_and_is_the_same_each_time(values: list[float]) -> None:
    low, high = bootstrap_interval(values)
    assert min(values) <= low <= high <= max(values)
    assert bootstrap_interval(values) == (low, high)


@settings(max_examples=25, deadline=None)
@given(st.lists(positive, min_size=5, max_size=30), st.floats(0.1, 10))
def test_interval_scales_with_its_values(values: list[float], factor: float) -> None:
    low, high = bootstrap_interval(values)
    assert bootstrap_interval([factor * one for one in values]) == pytest.approx((factor * low, factor * high))


def test_interval_of_many_steady_values_is_narrow_and_of_restless_ones_wide() -> None:
    steady = [1 + 0.001 * (index % 3 - 1) for index in range(60)]
    restless = [1 + 0.3 * (index % 7 - 3) for index in range(15)]
    narrow, wide = bootstrap_interval(steady), bootstrap_interval(restless)
    assert narrow[1] - narrow[0] <= 0.002
    assert wide[1] - wide[0] > 0.2


@pytest.mark.parametrize(
    ("ratio", "aa_interval", "at_most", "verdict"),
    [
        (1.01, (0.995, 1.005), 1.02, "pass"),
        (1.02, (0.995, 1.005), 1.02, "pass"),
        (1.03, (0.995, 1.005), 1.02, "fail"),
        (1.00, (0.98, 1.02), 1.02, "inconclusive"),
        (5.00, (0.98, 1.02), 1.02, "inconclusive"),
        (0.40, (0.90, 1.10), 0.5, "pass"),
        (0.60, (0.90, 1.10), 0.5, "fail"),
        (0.40, (0.70, 1.40), 0.5, "inconclusive"),
        (1.00, (1.08, 1.09), 1.02, "inconclusive"),  # narrow, and far from 1
    ],
)
def test_verdict(ratio: float, aa_interval: tuple[float, float], at_most: float, verdict: str) -> None:
    decided, reason = decide(ratio, aa_interval, Claim(at_most=at_most))
    assert decided == verdict
    assert reason


def test_nothing_claimed_is_nothing_decided() -> None:
    assert decide(3.0, (0.1, 9.0), None)[0] == "none claimed"


@given(positive, st.tuples(positive, positive), positive.filter(lambda one: one != 1))
def test_claim_is_decided_only_where_the_machine_can_tell(
    ratio: float, interval: tuple[float, float], at_most: float
) -> None:
    claim = Claim(at_most=at_most)
    verdict, _ = decide(ratio, (min(interval), max(interval)), claim)
    if max(interval) - min(interval) > claim.margin:
        assert verdict == "inconclusive"
    elif verdict != "inconclusive":
        assert (verdict == "pass") == (ratio <= at_most)


@pytest.mark.parametrize("at_most", [1.0, 0.0, -1.0, math.inf, math.nan])
def test_claim_without_a_margin_or_meaning_is_refused(at_most: float) -> None:
    with pytest.raises(ValueError, match="at_most is"):
        Claim(at_most=at_most)


def test_unlike_work_is_an_error_that_shows_both() -> None:
    check_same_work({"ours": (10, "x"), "theirs": (10, "x")})
    with pytest.raises(UnlikeWorkError, match="'theirs' did 9 and 'ours' did 10"):
        check_same_work({"ours": 10, "theirs": 9})


def test_comparison_is_interleaved_and_runs_the_baseline_twice_a_round() -> None:
    fake = FakeTime()
    sides = [fake.side("base", lambda: 2.0), fake.side("ours", lambda: 1.0)]
    compare("t", sides, num_rounds=6, num_warmup_rounds=1, clock=fake.clock, settle=no_settling)
    rounds = [fake.order[start : start + 3] for start in range(0, len(fake.order), 3)]
    assert len(rounds) == 7
    assert all(sorted(one) == ["base", "base", "ours"] for one in rounds)
    assert {one.index("ours") for one in rounds[1:]} == {0, 1, 2}


def test_ratio_survives_a_machine_that_slows_down() -> None:
    fake = FakeTime()
    sides = [
        fake.side("base", lambda: 2.0 + 0.001 * len(fake.order)),
        fake.side("ours", lambda: 1.0 + 0.0005 * len(fake.order), claim=Claim(at_most=0.55)),
        fake.side("other", lambda: 4.0 + 0.002 * len(fake.order), claim=Claim(at_most=1.5)),
    ]
    compared = compare("t", sides, num_rounds=12, clock=fake.clock, settle=no_settling)
    base, ours, other = compared.rows
    assert (base.ratio, base.verdict) == (1.0, "none claimed")
    assert ours.ratio == pytest.approx(0.5, rel=0.01)
    assert (ours.verdict, other.verdict) == ("pass", "fail")
    assert base.aa_interval == ours.aa_interval
    assert base.aa_interval[0] <= 1.0 <= base.aa_interval[1]


def test_warm_up_rounds_are_not_read() -> None:
    fake = FakeTime()
    sides = [fake.side(name, lambda: 100.0 if len(fake.order) <= 3 else 1.0) for name in ("base", "ours")]
    assert [
        row.median for row in compare("t", sides, num_rounds=3, clock=fake.clock, settle=no_settling).rows
    ] == pytest.approx([1.0, 1.0])


def test_time_to_settle_is_outside_the_reading() -> None:
    fake = FakeTime()

    def settle() -> None:
        fake.now += 50.0

    sides = [fake.side(name, lambda: 1.0) for name in ("base", "ours")]
    compared = compare("t", sides, num_rounds=3, clock=fake.clock, settle=settle)
    assert [row.median for row in compared.rows] == [1.0, 1.0]


def test_side_may_measure_itself() -> None:
    sides = [
        Side(name="base", run=lambda: Reading(value=2.0**21, work="w")),
        Side(name="ours", run=lambda: Reading(value=2.0**20, work="w"), claim=Claim(at_most=0.6)),
    ]
    compared = compare("memory", sides, num_rounds=3, unit="bytes")
    assert compared.rows[1].ratio == 0.5
    assert compared.rows[1].verdict == "pass"
    assert "| ours | 1 MiB | 0.500 |" in table(compared)


def test_what_was_frozen_before_a_benchmark_stays_frozen_after_it_and_nothing_else() -> None:
    assert gc.get_freeze_count() > 0  # by the test run
    with frozen():
        pass
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        with frozen():
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()


def test_sides_that_do_unlike_work_end_the_comparison_in_its_first_round() -> None:
    fake = FakeTime()
    sides = [fake.side("base", lambda: 1.0, work=10), fake.side("ours", lambda: 1.0, work=9)]
    with pytest.raises(UnlikeWorkError, match="10"):
        compare("t", sides, num_rounds=50, clock=fake.clock, settle=no_settling)
    assert len(fake.order) == 3


def test_baseline_that_does_unlike_work_the_second_time_is_an_error() -> None:
    counter = iter(range(1000))
    sides = [Side(name="base", run=lambda: next(counter)), Side(name="ours", run=lambda: 0)]
    with pytest.raises(UnlikeWorkError):
        compare("t", sides, num_rounds=3)


def test_comparison_refuses_too_few_rounds_or_sides_or_like_names() -> None:
    side = Side(name="base", run=lambda: 1)
    with pytest.raises(ValueError, match="num_rounds is 2"):
        compare("t", [side, Side(name="ours", run=lambda: 1)], num_rounds=2)
    with pytest.raises(ValueError, match="two or more"):
        compare("t", [side], num_rounds=3)
    with pytest.raises(ValueError, match="unlike names"):
        compare("t", [side, side], num_rounds=3)


def test_table_is_markdown_with_a_line_for_each_side() -> None:
    fake = FakeTime()
    sides = [fake.side("base", lambda: 0.002), fake.side("a|b", lambda: 0.001, claim=Claim(at_most=0.75))]
    lines = table(compare("Reading a config", sides, num_rounds=4, clock=fake.clock, settle=no_settling)).splitlines()
    assert lines[0] == "**Reading a config** (4 rounds)"
    assert lines[2] == "| name | median | ratio | A/A interval | target | verdict |"
    assert lines[4] == "| base | 2 ms | 1.000 | 1.000 to 1.000 |  |  |"
    assert lines[5] == "| a\\|b | 1 ms | 0.500 | 1.000 to 1.000 | ≤ 0.75 | pass: 0.500 is at most 0.750 |"


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (1.5, "seconds", "1.5 s"),
        (0.0123, "seconds", "12.3 ms"),
        (-0.0123, "seconds", "-12.3 ms"),
        (4.2e-6, "seconds", "4.2 µs"),
        (5e-10, "seconds", "0.5 ns"),
        (0.0, "seconds", "0 ns"),
        (3 * 2.0**30, "bytes", "3 GiB"),
        (10.0, "bytes", "10 B"),
        (12.0, "count", "12"),
    ],
)
def test_reading_is_shown_in_the_unit_that_suits_it(value: float, unit: Unit, shown: str) -> None:
    assert shown_value(value, unit) == shown


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Intel(R) Xeon(R) Platinum 8175M CPU @ 2.50GHz", "Intel Xeon Platinum"),
        ("AMD EPYC 7B13 64-Core Processor", "AMD EPYC"),
        ("", "unknown processor"),
    ],
)
def test_processor_is_named_by_its_family(model: str, name: str) -> None:
    assert generic_cpu_name(model) == name


def test_findings_have_a_line_for_each_side_beside_the_baseline() -> None:
    fake = FakeTime()
    sides = [
        fake.side("base", lambda: 2.0),
        fake.side("ours", lambda: 1.0, claim=Claim(at_most=0.75)),
        fake.side("other", lambda: 3.0),
    ]
    ours, other = compare("t", sides, num_rounds=4, clock=fake.clock, settle=no_settling).findings
    assert ours.claim == "ours takes at most 0.75 times what base takes"
    assert (ours.value, ours.peer, ours.peer_value, ours.ratio) == ("1 s", "base", "2 s", 0.5)
    assert (ours.aa_interval, ours.aa_unit, ours.target, ours.verdict) == ((1.0, 1.0), "ratio", "≤ 0.75", "pass")
    assert (other.claim, other.ratio, other.target, other.verdict) == ("other, beside base", 1.5, None, "none claimed")


@pytest.mark.parametrize(
    ("number", "share", "least", "short"), [(11, 1.0, 3, 11), (11, 0.25, 3, 3), (40, 0.25, 3, 10), (2, 0.25, 3, 2)]
)
def test_a_short_run_takes_fewer_and_never_more(number: int, share: float, least: int, short: int) -> None:
    assert shortened(number, share, least=least) == short


def test_a_ratio_keeps_five_digits() -> None:
    assert [rounded(each) for each in (1.02345678, 0.000189141, 58.3184)] == [1.0235, 0.00018914, 58.318]


def test_this_machine_has_processors_and_memory() -> None:
    machine = this_machine()
    assert machine.num_cpus >= 1
    assert machine.memory_bytes > 2**20


def test_benchmarks_are_the_modules_that_define_main() -> None:
    assert defines_main("def main() -> list[int]:\n    return []")
    assert defines_main("def main(num_rounds: int = 3) -> list[int]:\n    return []")
    assert not defines_main("def main(folder: str) -> int:\n    return 0")
    assert not defines_main("class A:\n    def main(self) -> None: ...\nfrom x import main")
    sources = {"b": "def main(): ...", "a": "def main(): ...", "harness": "", "__main__": "def main(): ..."}
    assert benchmarks_in(sources) == ["a", "b"]


def test_unknown_benchmark_is_refused_with_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["no_such_benchmark"])
    assert "no such benchmark: no_such_benchmark; there are:" in capsys.readouterr().err


def test_median_of_a_row_is_of_its_own_readings() -> None:
    fake = FakeTime()
    times = iter(range(1, 13))  # three runs of warm-up, three rounds of three
    seen: dict[str, list[float]] = {"base": [], "ours": []}

    def seconds_of(name: str) -> Callable[[], float]:
        def seconds() -> float:
            value = float(next(times))
            seen[name].append(value)
            return value

        return seconds

    sides = [fake.side(name, seconds_of(name)) for name in ("base", "ours")]
    ours = compare("t", sides, num_rounds=3, clock=fake.clock, settle=no_settling).rows[1]
    assert ours.median == median(seen["ours"][1:])
