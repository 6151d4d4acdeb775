"""What nodes that have met settle, and what they tell one another in a round."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]

from elastic_ext.members.decision import NodeWords, settle
from elastic_ext.members.plan import MembershipPlan, NodeShare
from elastic_ext.ranks.board import BoardGone
from elastic_ext.ranks.node_board import RoundBoard

NEW = NodeWords(
    node_id="one",
    host="one",
    num_workers=2,
    num_failures=0,
    has_failed=False,
    is_finished=False,
    version=0,
    time=5.0,
)
PLAN = MembershipPlan(
    version=4,
    nodes=(
        NodeShare(node_id="one", host="one", first_rank=0, num_workers=2),
        NodeShare(node_id="two", host="two", first_rank=2, num_workers=1),
    ),
    reason="the job starts",
    time=1.0,
)
OLD = replace(NEW, version=4, plan=PLAN)


def two(**changes: object) -> NodeWords:
    return replace(OLD, node_id="two", host="two", num_workers=1, **changes)  # type: ignore[arg-type]


def test_at_the_start_nodes_get_their_ranks_in_their_order() -> None:
    settled = settle([NEW, replace(NEW, node_id="two", num_workers=3)], max_restarts=2)
    assert settled.plan.version == 1 and settled.plan.reason == "the job starts" and settled.plan.time == 5.0
    assert [(node.node_id, node.first_rank, node.num_workers) for node in settled.plan.nodes] == [
        ("one", 0, 2),
        ("two", 2, 3),
    ]
    assert settled.plan.world_size == 5 and not settled.is_old and not settled.is_finished
    assert MembershipPlan.from_json(settled.plan.to_json()) == settled.plan


@pytest.mark.parametrize(
    ("words", "reason", "num_failures"),
    [
        ([replace(OLD, has_failed=True), two()], "workers failed", 1),
        ([replace(OLD, has_failed=True), two(has_failed=True)], "workers failed", 1),
        ([OLD, two()], "nodes met again", 0),
        ([replace(OLD, has_failed=True)], "two left or was lost", 0),
        ([OLD, two(), replace(NEW, node_id="three")], "three joined", 0),
        ([replace(OLD, num_failures=2), replace(NEW, node_id="three")], "three joined, two left or was lost", 2),
        ([replace(OLD, num_failures=3, has_failed=True), two()], "workers failed", 3),
    ],
)
def test_a_later_round_says_why_it_came_and_counts_failures_alone(
    words: list[NodeWords], reason: str, num_failures: int
) -> None:
    settled = settle(words, max_restarts=3)
    assert (settled.plan.version, settled.plan.reason, settled.num_failures) == (5, reason, num_failures)
    assert settled.is_old


def test_where_all_that_worked_have_finished_nothing_is_left_for_who_joins() -> None:
    done = replace(OLD, is_finished=True)
    assert settle([done, two(is_finished=True), replace(NEW, node_id="three")], max_restarts=0).is_finished
    assert not settle([done, two()], max_restarts=0).is_finished


@given(st.permutations([OLD, two(num_failures=1), replace(NEW, node_id="three"), replace(NEW, node_id="four")]))
def test_whatever_their_order_nodes_come_to_the_same(words: list[NodeWords]) -> None:
    settled = settle(words, max_restarts=3)
    assert settled.plan.world_size == 7 and settled.num_failures == 1 and settled.plan.version == 5
    assert {node.node_id for node in settled.plan.nodes} == {"one", "two", "three", "four"}


def test_what_a_node_says_comes_through_json() -> None:
    assert NodeWords.from_row(json.loads(json.dumps(OLD.to_row()))) == OLD


def boards(number: int) -> list[RoundBoard]:
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    return [RoundBoard(store, place=place, num_nodes=number) for place in range(number)]


def test_an_exchange_gives_every_node_what_all_have_said() -> None:
    with ThreadPoolExecutor(3) as threads:
        told = [
            threads.submit(board.exchange, "things", {"place": board.place}, timeout_seconds=5.0) for board in boards(3)
        ]
        assert [each.result() for each in told] == [[{"place": 0}, {"place": 1}, {"place": 2}]] * 3


def test_a_node_that_says_nothing_is_not_waited_for_for_ever() -> None:
    first, _ = boards(2)
    with pytest.raises(BoardGone, match="not every node has posted its things within 0 seconds"):
        first.exchange("things", 1, timeout_seconds=0.1)
    with pytest.raises(BoardGone, match="no peer has posted that in the store of this round"):
        first.take("that", seconds=0.1)
    first.part(timeout_seconds=0.1)


def test_what_is_told_is_heard_by_those_who_look() -> None:
    first, second, third = boards(3)
    assert first.values_of("failed") == {} and first.read("over") is None
    second.tell("failed", ["a"])
    third.tell_quietly("leaving", "c")
    second.post_quietly("over", "why")
    assert first.values_of("failed") == {1: ["a"]} and first.read("over") == "why"
    assert first.who_told("failed", "leaving") == {1, 2}
