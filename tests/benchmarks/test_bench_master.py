"""What the benchmark of the master stands on: agents that are made up join, beat and are told of configs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks import master_flood, master_load
from benchmarks.harness import table
from benchmarks.master_flood import Flooded
from benchmarks.master_load import Load, Measured, Row
from benchmarks.master_load_agents import quantile

LOAD = Load(num_agents=20, every_seconds=1.0, num_beats=2, num_pushes=2)


def _made(**changes: float) -> Measured:
    values = {"p50": 0.002, "p99": 0.02, "push": 0.1, "cpu": 0.1, "bytes": 1e8, "last": 1e8, **changes}
    return Measured(
        told={
            "joined": [{"seconds": 1.0, "num_channels": 3}],
            "beaten": [{"p50": values["p50"], "p99": values["p99"], "num": 40, "lag": 0.001, "failures": []}],
            "status": [{"seconds": 0.1}],
            "pushed": [{"seconds": 0.05}, {"seconds": values["push"]}],
            "over": [{"p99": 0.2, "failures": ["Watch: X"], "num_failures": 1}],
        },
        cpu_share=values["cpu"],
        bytes_in_quarters=(9e7, values["bytes"], values["bytes"], values["last"]),
        bytes_at_end=values["last"],
    )


def test_a_table_says_what_is_wanted_and_whether_it_is_so() -> None:
    found = master_load.table_of(Load(num_agents=20, every_seconds=10.0, num_beats=2), _made(), is_sustained=True)
    assert set(found.verdicts) == {"pass", "none claimed"}
    text = table(found)
    assert "| a beat, p99 | 20 ms | ≤ 100 ms | pass |" in text
    assert "1 calls failed, such as: Watch: X" in text


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"p99": 0.11}, "a beat, p99"),
        ({"push": math.inf}, "... at most"),
        ({"cpu": 0.26}, "of a core"),
        ({"bytes": 1.6e8, "last": 1.6e8}, "memory, at most"),
        ({"last": 1.2e8}, "memory in the last quarter, over that in the second"),
    ],
)
def test_what_is_not_as_wanted_fails(changes: dict[str, float], name: str) -> None:
    load = Load(num_agents=20, every_seconds=10.0, num_beats=2)
    rows = master_load.table_of(load, _made(**changes), is_sustained=True).rows
    assert name in [row.name for row in rows if row.verdict == "fail"]


def test_a_start_has_to_take_less_than_a_second_as_a_rule() -> None:
    found = master_load.table_of_starts([0.4, 3.0, 0.6])
    assert found.verdicts == ("pass", "none claimed") and "| 600 ms | ≤ 1 s | pass |" in table(found)
    assert master_load.table_of_starts([0.4, 1.1, 1.2]).verdicts[0] == "fail"


def test_of_a_master_that_plans_it_is_told_how_long_and_nothing_is_claimed_of_what_that_takes() -> None:
    load = Load(num_agents=20, every_seconds=10.0, num_beats=2, has_plans=True)
    found = master_load.table_of(load, replace(_made(cpu=0.9, bytes=1e9, last=1e9), plans="3 plans"))
    verdicts = dict(zip([row.name for row in found.rows], found.verdicts, strict=True))
    assert (verdicts["of a core"], verdicts["memory, at most"], verdicts["a beat, p99"]) == (
        "none claimed",
        "none claimed",
        "pass",
    )
    assert "while the tuner plans" in found.title and "3 plans" in table(found)


def test_a_row_of_which_nothing_is_claimed_has_no_verdict() -> None:
    assert Row(name="", value=1.0, shown="").verdict == "none claimed"


def test_a_quantile_is_one_of_the_values() -> None:
    assert [quantile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 2.0, 3.0, 3.0]
    assert math.isnan(quantile([], 0.5))


def _flooded(p99: float, num_bytes: float = 1e8, num_answered: int = 0) -> Flooded:
    found = _made(p99=p99, bytes=num_bytes)
    return Flooded(measured=found, num_refused=1000, num_answered=num_answered)


@pytest.mark.parametrize(
    ("found", "failing"),
    [
        (_flooded(0.012), set()),
        (_flooded(0.016), {"a beat in a flood, over one beside eight that spin"}),
        (_flooded(0.11), {"a beat in a flood, over one beside eight that spin", "a beat in a flood, p99"}),
        (_flooded(0.012, num_bytes=3.1e8), {"memory, at most"}),
        (_flooded(0.012, num_answered=1), {"calls without the token that were answered"}),
    ],
)
def test_in_a_flood_beats_are_answered_as_they_are_beside_some_that_spin(found: Flooded, failing: set[str]) -> None:
    rows = master_flood.table_of(LOAD, [_flooded(0.01)], [found]).rows
    assert {row.name for row in rows if row.verdict == "fail"} == failing


@pytest.mark.slow  # as below
def test_a_master_is_measured_in_a_flood_and_beside_those_that_spin() -> None:
    found, spun = (
        master_flood.flooded(LOAD, ways) for ways in (("messages", "calls", "connections", "silence"), ("spinning",))
    )
    assert found.num_answered == spun.num_refused == 0 < found.num_refused
    assert found.measured.told["over"][0]["num_failures"] == 0
    assert spun.most_bytes > 1e7 and found.most_bytes < 3e8


@pytest.mark.slow  # what it measures with is tried where that is changed
def test_a_master_is_measured_under_a_small_load() -> None:
    found = master_load.measured(LOAD)
    assert found.told["beaten"][0]["num"] == 40 and found.told["over"][0]["num_failures"] == 0
    assert [each["num_received"] for each in found.told["pushed"]] == [20, 20]
    assert 0 < found.cpu_share < 4 and min(found.bytes_in_quarters) > 1e7
    assert len(master_load.table_of(LOAD, found).rows) == 8


@pytest.mark.slow  # as above
def test_a_master_is_measured_while_it_plans_and_as_it_starts() -> None:
    found = master_load.measured(replace(LOAD, num_beats=6, has_plans=True))
    assert found.told["over"][0]["num_failures"] == 0 and "plans, which took" in found.plans
    assert 0 < master_load.up_seconds() < 60
