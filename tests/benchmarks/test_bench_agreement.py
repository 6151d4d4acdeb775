"""What the benchmarks of agreement and config latency stand on: quantiles, their verdicts, and gangs of processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gang import Gang, GangError
from benchmarks.harness import Claim, Readings, Side, compare_measures, decide, table
from benchmarks.quantiles import (
    QuantileTable,
    QuantileTarget,
    Samples,
    decide_quantile,
    interval_of_quantile,
    quantile,
)

values_of_occasions = st.lists(st.lists(st.floats(0, 10), min_size=1, max_size=4), min_size=1, max_size=10)


@pytest.mark.parametrize(
    ("values", "share", "found"),
    [
        ([3.0], 0.5, 3.0),
        ([4.0, 1.0, 3.0, 2.0], 0.5, 2.0),
        ([1.0, 2.0], 0.99, 2.0),
        ([*map(float, range(100))], 0.99, 98.0),
    ],
)
def test_quantile_is_a_value_that_was_seen(values: list[float], share: float, found: float) -> None:
    assert quantile(values, share) == found


@settings(max_examples=15, deadline=None)
@given(values_of_occasions, st.sampled_from([0.5, 0.99]))
def test_interval_of_a_quantile_lies_within_the_samples(occasions: list[list[float]], share: float) -> None:
    low, high = interval_of_quantile(occasions, share)
    seen = [value for occasion in occasions for value in occasion]
    assert min(seen) <= low <= high <= max(seen)


@pytest.mark.parametrize(("at_most", "verdict"), [(0.5, "fail"), (1.5, "inconclusive"), (2.5, "pass")])
def test_target_that_lies_within_the_interval_is_not_decided(at_most: float, verdict: str) -> None:
    occasions = [[1.0] * 4, [2.0] * 4] * 6
    row = Samples(name="x", occasions=occasions, target=QuantileTarget(quantile=0.5, at_most=at_most))
    assert interval_of_quantile(occasions, 0.5) == (1.0, 2.0)
    assert decide_quantile(row)[0] == verdict


def test_table_of_quantiles_shows_samples_targets_and_notes() -> None:
    target = QuantileTarget(quantile=0.5, at_most=0.002)
    rows = (Samples(name="ours", occasions=[[0.001], [0.001]], target=target), Samples(name="b", occasions=[[1.0]]))
    shown = QuantileTable(title="Latency", rows=rows, notes=("eight processes",))
    lines = table(shown).splitlines()
    assert lines[0] == "**Latency**"
    assert lines[4].startswith("| ours | 2 | 1 ms (1 ms to 1 ms) |")
    assert lines[4].endswith("| 1 ms | p50 ≤ 2 ms | pass: 1 ms is at most 2 ms |")
    assert lines[-1] == "- eight processes"
    assert shown.verdicts == ("pass", "none claimed")


def test_measures_of_one_run_become_a_comparison_each() -> None:
    def side(name: str, wall: float, cpu: float, claim: Claim | None = None) -> Side:
        return Side(name=name, run=lambda: Readings(values={"wall": wall, "cpu": cpu}, work=1), claim=claim)

    sides = [side("base", 2.0, 1.0), side("ours", 2.006, 3.0, Claim(at_most=1.005))]
    wall, cpu = compare_measures(["wall", "cpu"], sides, num_rounds=3)
    assert wall.rows[1].ratio == pytest.approx(1.003)
    assert cpu.rows[1].ratio == 3.0
    assert (wall.verdicts, cpu.verdicts) == (("none claimed", "pass"), ("none claimed", "fail"))
    assert "| 1.0030 | 1.0000 to 1.0000 | ≤ 1.005 | pass: 1.0030 is at most 1.0050 |" in table(wall)


def test_fine_claim_is_decided_with_digits_that_show_it() -> None:
    assert decide(1.0051, (1.0, 1.001), Claim(at_most=1.005)) == ("fail", "1.0051 is more than 1.0050")
    assert "spans 0.60%, the claim's margin is 0.50%" in decide(1.0, (1.0, 1.006), Claim(at_most=1.005))[1]


@contextmanager
def counting_member(file: Path) -> Iterator[Callable[[str], int]]:
    """Answers with its pid, fails or dies as told, and leaves a mark when it is left."""

    def answer(question: str) -> int:
        if question == "fail":
            raise ValueError("as told")
        if question == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    try:
        yield answer
    finally:
        file.write_text("left")


def test_gang_answers_side_by_side_and_is_left_in_order(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    with Gang(counting_member, files) as gang:
        pids = gang.ask("who")
        assert gang.ask("who") == pids
        assert len(set(pids)) == 2
    assert [file.read_text() for file in files] == ["left", "left"]
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize(("question", "said"), [("fail", "ValueError: as told"), ("die", "member 0 died")])
def test_member_that_fails_or_dies_ends_the_gang(question: str, said: str, tmp_path: Path) -> None:
    asked: list[int] = []

    def run() -> None:
        with Gang(counting_member, [tmp_path / "a", tmp_path / "b"]) as gang:
            asked.extend(gang.ask("who"))
            gang.ask(question)

    with pytest.raises(GangError, match=said):
        run()
    assert len(asked) == 2
    assert not any(psutil.pid_exists(pid) for pid in asked)
