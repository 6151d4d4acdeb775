"""What the benchmark of saves in the background stands on: ways that save the same state, and what is made of times."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from benchmarks.checkpoint_ranks import Task
from benchmarks.checkpoint_save import (
    BLOCKED,
    CPU,
    DURABLE,
    EXTRA,
    LOST,
    NAMES,
    STEP,
    TRAINED,
    SavingRanks,
    first_saves,
    saving_ranks,
    sides_of_saves,
    sides_of_training,
    tables_of_saves,
    tables_of_training,
)
from benchmarks.checkpoint_save_ranks import Trained
from benchmarks.checkpoint_ways import BACKGROUND_WAYS, BackgroundName
from benchmarks.harness import Comparison, Readings, Side, check_same_work
from benchmarks.quantiles import QuantileTable

pytestmark = pytest.mark.slow  # all ways of saving, on ranks of their own

SMALL = Task(num_blocks=1, width=16, num_words=11)


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def ranks(storage: Path) -> Iterator[SavingRanks]:
    with saving_ranks(2, SMALL, storage) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def sides(ranks: SavingRanks) -> list[Side]:
    return sides_of_saves(ranks)


def test_every_way_has_a_name() -> None:
    assert set(NAMES) == set(BACKGROUND_WAYS) == set(get_args(BackgroundName))


def test_every_way_saves_the_state_of_the_call_though_it_changes_afterwards(
    ranks: SavingRanks, sides: list[Side], storage: Path
) -> None:
    values = _run(sides)
    for of_side in values:
        assert of_side[BLOCKED] > 0
        assert min(of_side[DURABLE], of_side[CPU]) > 0
    assert set(ranks.kept_bytes) == set(NAMES)
    assert not [path for pattern in ("dcp_*", "async_*", "machine_*", "**/step_*") for path in storage.rglob(pattern)]


def test_training_goes_on_while_each_way_saves(ranks: SavingRanks, sides: list[Side]) -> None:
    assert len(sides) == len(NAMES)
    training = sides_of_training(ranks)
    assert all(of_side[STEP] > 0 for of_side in _run(training))
    assert [side.name for side in training[1:]] == [NAMES[way] for way in TRAINED]


@pytest.mark.slow
def test_first_saves_are_told_way_by_way(storage: Path) -> None:
    table = first_saves(["ours", "dcp", "ours"], SMALL, storage)
    assert [(row.name, len(row.occasions)) for row in table.rows] == [(NAMES["ours"], 2), (NAMES["dcp"], 1)]
    assert table.title.endswith("B of state each")


def test_claims_are_of_ours_and_over_the_peer_that_is_named(ranks: SavingRanks) -> None:
    values = [[_taken(way)] * 5 for way in ("dcp", *NAMES)]
    named = [Side(name=name, run=int) for name in NAMES.values()]
    blocked, over, durable, cpu, extra = tables_of_saves(ranks, named, values)
    for each, verdict in ((blocked, "pass"), (durable, "fail"), (cpu, "pass")):
        assert isinstance(each, Comparison)
        assert [row.verdict for row in each.rows] == ["none claimed", verdict, *["none claimed"] * 4]
    assert isinstance(over, QuantileTable)
    assert isinstance(extra, QuantileTable)
    assert list(over.verdicts) == ["pass", "fail"]
    assert list(extra.verdicts) == ["none claimed", "pass", *["none claimed"] * 4]
    assert all(f", {ranks.what}" in table.heading for table in (blocked, over, durable, cpu, extra))


def test_table_of_lost_time_has_no_row_of_training_without_a_save(ranks: SavingRanks) -> None:
    names = ["no save", *(NAMES[way] for way in TRAINED)]
    values = [[{STEP: 1.0 + place, LOST: float(place)}] * 5 for place in (0, *range(len(names)))]
    sides = [Side(name=name, run=int) for name in names]
    steps, lost, over = tables_of_training(ranks, sides, values, dcp_seconds=10.0)
    assert isinstance(steps, Comparison)
    assert isinstance(lost, QuantileTable)
    assert isinstance(over, QuantileTable)
    assert [row.occasions[0] for row in over.rows] == [[0.1], [0.5], [pytest.approx(1 / 3)]]
    assert over.verdicts == ("pass", "fail", "fail")
    assert [row.ratio for row in steps.rows] == [1, 2, 3, 4, 5]
    assert all(f", {ranks.what}" in table.heading for table in (steps, lost))
    assert [(row.name, row.occasions[0]) for row in lost.rows] == [
        (name, [float(place)]) for place, name in enumerate(names) if place
    ]


def test_time_is_lost_to_blocking_and_to_slower_steps() -> None:
    trained = Trained(quiet_seconds=[1.0, 3.0], blocked_seconds=5.0, busy_seconds=[2.5, 4.0])
    assert trained.lost_seconds == 5.0 + 6.5 - 4.0
    assert Trained(quiet_seconds=[1.0]).lost_seconds == 0


def _taken(way: str) -> dict[str, float]:
    """As if ours blocked half as long as defaults would allow, but longer than a stager that is kept."""
    seconds = {"dcp": 10.0, "ours": 0.5, "default": 5.0, "reused": 0.4}.get(way, 1.0)
    is_ours = way == "ours"
    return {BLOCKED: seconds, DURABLE: 6.0 if is_ours else 10.0, CPU: 3.0 if is_ours else 10.0, EXTRA: 1e6}


def _run(sides: list[Side]) -> list[dict[str, float]]:
    """What each side reads, and all do the same work."""
    work: dict[str, object] = {}
    values = []
    for side in sides:
        done = side.run()
        assert isinstance(done, Readings)
        work[side.name] = done.work
        values.append(dict(done.values))
    check_same_work(work)
    return values
