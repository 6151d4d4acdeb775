"""Membership plans that follow from one another, and what of a plan nobody could train by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.members.plan import MembershipPlan, NodeShare

STORE = "127.0.0.1:29500"


def node(name: str, num_workers: int = 2, first_rank: int = 0, seats: tuple[int, ...] = ()) -> NodeShare:
    return NodeShare(node_id=name, host=f"host-{name}", first_rank=first_rank, num_workers=num_workers, seats=seats)


def plan_of(*nodes: NodeShare) -> MembershipPlan:
    return MembershipPlan(version=1, nodes=nodes, reason="the job starts", time=5.0)


def changed(plan: MembershipPlan, joined: Sequence[NodeShare] = (), left: Sequence[str] = ()) -> MembershipPlan:
    return plan.changed(joined=joined, left=left, reason="why", time=6.0, store=STORE)


def members_of(plan: MembershipPlan) -> list[tuple[int, int, str]]:
    return [(member.rank, member.seat, member.node_id) for member in plan.members]


FIRST = plan_of(node("a"), node("b", 1, 2))


def test_in_a_job_that_never_changes_seats_are_ranks() -> None:
    assert members_of(FIRST) == [(0, 0, "a"), (1, 1, "a"), (2, 2, "b")]
    assert FIRST.mode == "restart" and FIRST.generation == 0


def test_who_joins_comes_after_those_that_stay_in_seats_that_nobody_had() -> None:
    then = changed(FIRST, joined=[node("c", 2)])
    assert members_of(then) == [(0, 0, "a"), (1, 1, "a"), (2, 2, "b"), (3, 3, "c"), (4, 4, "c")]
    assert (then.version, then.generation, then.mode, then.store) == (2, 1, "live", STORE)


def test_who_stays_keeps_order_and_seat_where_the_first_node_leaves() -> None:
    then = changed(FIRST, left=["a"], joined=[node("c", 1)])
    assert members_of(then) == [(0, 2, "b"), (1, 3, "c")]
    assert then.member_at(2) == then.members[0] and then.member_at(0) is None


def test_a_seat_is_given_once_also_where_its_worker_has_left() -> None:
    without = changed(changed(FIRST, joined=[node("c", 1)]), left=["c"])
    assert members_of(without) == members_of(FIRST)
    assert members_of(changed(without, joined=[node("d", 1)]))[-1] == (3, 4, "d")


@pytest.mark.parametrize(
    ("joined", "left", "told"),
    [
        ([], ["a", "b"], "all nodes of the plan would leave at once"),
        ([], ["z"], "nodes z are to leave, and the plan does not have them; its nodes are a, b"),
        ([node("a")], [], "nodes a are to join, and the plan has them"),
    ],
)
def test_what_cannot_be_is_refused_in_words(joined: list[NodeShare], left: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        changed(FIRST, joined=joined, left=left)


@given(st.data())
def test_after_any_changes_a_plan_can_be_trained_by_and_read_again(data: st.DataObject) -> None:
    plan, num_named = FIRST, 0
    seen = {member.seat: member.node_id for member in plan.members}
    for _ in range(data.draw(st.integers(1, 6))):
        names = [each.node_id for each in plan.nodes]
        left = data.draw(st.lists(st.sampled_from(names), unique=True, max_size=len(names) - 1))
        sizes = data.draw(st.lists(st.integers(1, 3), max_size=3))
        joined = [node(f"n{num_named + number}", size) for number, size in enumerate(sizes)]
        num_named += len(joined)
        before, plan = plan, changed(plan, joined=joined, left=left)
        plan.check()
        assert MembershipPlan.from_json(plan.to_json()) == plan
        stay = [member.seat for member in before.members if member.node_id not in left]
        assert [member.seat for member in plan.members][: len(stay)] == stay
        for member in plan.members:
            assert seen.setdefault(member.seat, member.node_id) == member.node_id


@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        ([node("a"), node("b", 2, 1)], "node b has ranks from 1, 2 of them; allowed: at least one, from 2"),
        ([node("a", 0)], "node a has ranks from 0, 0 of them"),
        ([node("a", 2, 0, (0,))], "node a has 2 workers and 1 seats"),
        ([node("a", 2, 0, (0, 1)), node("b", 1, 2, (1,))], r"the seats are \[0, 1, 1\]"),
        ([node("a", 10**12)], "node a has 1000000000000 workers; allowed: 4096 at most"),
    ],
)
def test_a_plan_that_nobody_can_train_by_is_refused(nodes: list[NodeShare], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        plan_of(*nodes).check()


def test_plans_of_the_same_workers_in_the_same_places_are_told_from_others() -> None:
    back = changed(changed(FIRST, joined=[node("c", 1)]), left=["c"])
    assert back.has_members_of(FIRST) and not changed(FIRST, left=["b"]).has_members_of(FIRST)


def test_a_plan_that_an_earlier_version_wrote_is_read() -> None:
    text = '{"version":3,"nodes":[{"node_id":"a","host":"h","first_rank":0,"num_workers":2}],"reason":"r","time":1.0}'
    plan = MembershipPlan.from_json(text)
    assert plan == replace(plan_of(replace(node("a"), host="h")), version=3, reason="r", time=1.0)


def lose(plan: MembershipPlan, *lost: int) -> MembershipPlan:
    return plan.changed(lost=lost, reason="why", time=6.0, store=STORE)


def test_without_workers_that_are_lost_the_others_keep_their_order_and_seats() -> None:
    then = lose(FIRST, 0)
    assert members_of(then) == [(0, 1, "a"), (1, 2, "b")] and then.lost == (0,)
    assert (then.version, then.generation, then.mode) == (2, 1, "live")
    assert members_of(lose(then, 2)) == [(0, 1, "a")], "a node without workers is in no plan"
    assert MembershipPlan.from_json(then.to_json()) == then


def test_a_seat_is_given_once_also_where_its_worker_is_lost() -> None:
    assert members_of(changed(lose(FIRST, 2), joined=[node("b", 1)]))[-1] == (2, 3, "b")
    assert changed(lose(FIRST, 2), joined=[node("b", 1)]).lost == ()


def test_workers_that_nobody_has_cannot_be_lost_nor_all() -> None:
    with pytest.raises(ValueError, match=r"seats \[7\] are to be lost; the plan has the seats \[0, 1, 2\]"):
        lose(FIRST, 7)
    with pytest.raises(ValueError, match="all workers of the plan are lost"):
        lose(FIRST, 0, 1, 2)


def test_a_plan_after_others_that_did_not_come_has_a_generation_of_its_own() -> None:
    assert (FIRST.at_version(4).version, FIRST.at_version(4).generation) == (4, 3)
