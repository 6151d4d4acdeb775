"""What the benchmark of changes of plan stands on: both sides come to the same state, and what is sent is counted."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from benchmarks.harness import table
from benchmarks.quantiles import QuantileTable
from benchmarks.reshard import (
    FULL,
    GRAD_OP,
    HYBRID,
    TOUR,
    WHOLE,
    ChangeRow,
    ChangeTable,
    Plan,
    main,
)
from benchmarks.reshard_by_hand import Part, Task, Way, full_digest, parts_of, rows_on
from benchmarks.reshard_ranks import Done, Pair, Train, Trained, digest_of
from tests.support.ranks import RankPool

SMALL = Plan(
    task=Task(num_blocks=2, width=16, num_words=11, length=4),
    tour=(FULL, HYBRID),
    num_rounds=2,
    num_restarts=1,
    num_memory_rounds=1,
    stepping=Task(num_blocks=2, width=16, num_words=11, length=4),
    arrivals=((FULL, WHOLE), (WHOLE, HYBRID), (HYBRID, GRAD_OP)),
    num_in_block=1,
    num_step_rounds=3,
)


@pytest.mark.slow  # processes that begin anew
def test_changes_and_restarts_come_to_the_same_state_and_send_no_more_than_they_have_to() -> None:
    tour = (FULL, HYBRID, WHOLE, Way("full_shard", 2), Way("full_shard", is_recomputed=True))
    changes, memory, *steps = main(dataclasses.replace(SMALL, tour=tour))
    assert isinstance(changes, ChangeTable)
    assert [row.sent_bytes > 0 for row in changes.rows] == [True, True, False, False]
    assert all(row.sent_bytes - row.least_bytes in range(row.tail_bytes + 1) for row in changes.rows)
    assert all(len(row.live) == 2 and len(row.saves) == len(row.restarts) == 1 for row in changes.rows)
    assert isinstance(memory, QuantileTable)
    assert [len(row.occasions[0]) for row in memory.rows] == [4] * 4
    assert [len(each.verdicts) for each in steps] == [2, 2, 2]


def _change_and_train(rank: int) -> tuple[list[Done], list[Done]]:
    trained = Trained(SMALL.task, FULL)
    trained.train(1)
    changed = []
    for way in (HYBRID, WHOLE, Way("full_shard", 2)):
        before = parts_of(trained.model, trained.optimizer)
        done = trained.change(way)
        after = parts_of(trained.model, trained.optimizer)
        changed += [dataclasses.replace(done, parts=before), dataclasses.replace(done, parts=after)]
    trained.close()
    pair = Pair(SMALL.stepping, HYBRID, FULL)
    taken = [
        pair.train(Train(1, is_by_hand=is_by_hand, is_recorded=is_recorded))
        for is_recorded in (False, True)
        for is_by_hand in (False, True)
    ]
    pair.close()
    return changed, taken


def test_a_change_leaves_the_state_and_steps_are_those_by_hand(ranks: RankPool) -> None:
    found = ranks.run(4, _change_and_train, deadline_seconds=60)
    changed = list(zip(*(changed for changed, _ in found), strict=True))
    assert len({digest_of(answers) for answers in changed}) == 1
    for answers in changed:
        over = sum(done.sent_bytes - done.least_bytes for done in answers)
        assert over in range(sum(16 * done.num_letters for done in answers) + 1)
        assert all(done.seconds > 0 for done in answers)
    assert [sum(done.sent_bytes for done in answers) > 0 for answers in changed[::2]] == [True, True, False]
    for _, taken in found:
        assert len({done.losses for done in taken}) == 1
        assert [bool(done.exchanged) for done in taken] == [False] * 2 + [True] * 2
        assert len({done.exchanged for done in taken[2:]}) == 1
    assert len({digest_of(answers) for answers in list(zip(*(taken for _, taken in found), strict=True))[:2]}) == 1


def test_tour_goes_from_each_strategy_to_each_other_one_and_back_to_where_it_began() -> None:
    plain = [(old, new) for old, new in itertools.pairwise(TOUR) if old.strategy != new.strategy]
    assert len(plain) == len(set(plain)) == 12
    assert TOUR[0] == TOUR[-1] == FULL


def test_rows_of_all_ranks_are_those_of_the_tensor_once_for_each_copy() -> None:
    assert [rows_on(rank, 4, FULL, 6) for rank in range(4)] == [range(2), range(2, 4), range(4, 6), range(6, 6)]
    assert [rows_on(rank, 4, HYBRID, 5) for rank in range(4)] == [range(3), range(3, 5)] * 2
    assert {rows_on(rank, 4, WHOLE, 5) for rank in range(4)} == {range(5)}


def test_digest_is_the_same_however_rows_are_spread_and_copies_have_to_be_equal() -> None:
    whole = {"a": Part(0, 3, b"xyz")}
    top, end, none = {"a": Part(0, 2, b"xy")}, {"a": Part(2, 1, b"z")}, {"a": Part(0, 0, b"")}
    assert full_digest([whole, whole]) == full_digest([top, end, top, end]) == full_digest([top, end, none])
    assert full_digest([whole]) != full_digest([{"a": Part(0, 3, b"xya")}])
    with pytest.raises(AssertionError, match="do not fit together"):
        full_digest([top, end, {"a": Part(0, 2, b"xx")}, end])


def test_change_is_claimed_to_be_ten_times_faster_and_to_send_the_least() -> None:
    row = ChangeRow(
        name="a to b",
        live=[0.5, 0.6, 0.4],
        wiring=[0.1] * 3,
        moving=[0.2] * 3,
        sent_bytes=8,
        least_bytes=8,
        saves=[2.0, 1.0, 3.0],
        restarts=[10.0, 9.0, 90.0],
    )
    shown = ChangeTable(title="Changes", rows=(row,))
    assert shown.verdicts == ("pass",)
    (line,) = table(shown).splitlines()[4:]
    assert line.startswith("| a to b | 500 ms | 100 ms, 200 ms | 2 s + 10 s | 24.0 | 8 B | 1.000 | ≤ 0.1, 1 | pass: ")
    for altered, verdict in (
        ({"live": [2.0] * 3}, "fail"),
        ({"live": [0.5, 2.0, 0.6, 1.4]}, "inconclusive"),
        ({"sent_bytes": 7}, "fail"),
        ({"sent_bytes": 24, "tail_bytes": 16}, "pass"),
        ({"sent_bytes": 25, "tail_bytes": 16}, "fail"),
    ):
        assert dataclasses.replace(row, **altered).decided[0] == verdict
