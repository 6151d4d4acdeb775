"""Nodes as a master knows them: leases, incarnations, and a master that was stopped itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.master.nodes import Fenced, Nodes, TooMany, UnknownNode

LEASE = 30.0


def nodes_of(**given: int) -> Nodes:
    found = Nodes(lease_seconds=LEASE, **given)
    found.tick(0.0)
    return found


def join(nodes: Nodes, now: float, node_id: str = "a", incarnation: int = 1) -> str:
    change = nodes.join(
        now, node_id, incarnation, host="h", pid=incarnation, library="1", started_at=float(incarnation)
    )
    return change.kind


def tick_until(nodes: Nodes, begin: float, end: float) -> list[str]:
    """The kinds of what happened while the master was there every second."""
    kinds: list[str] = []
    for second in range(int(end - begin)):
        kinds += [each.kind for each in nodes.tick(begin + second + 1)]
    return kinds


def state_of(nodes: Nodes, node_id: str = "a") -> str:
    node = nodes.get(node_id)
    assert node is not None
    return node.state


def test_a_node_that_is_not_heard_of_is_late_and_then_lost_and_comes_back() -> None:
    nodes = nodes_of()
    assert join(nodes, 0.0) == "joined"
    assert tick_until(nodes, 0, 16) == [] and state_of(nodes) == "late"
    assert tick_until(nodes, 16, 40) == ["lost"] and state_of(nodes) == "lost"
    assert not nodes.present
    node, change = nodes.renew(41.0, "a", 1)
    assert node.state == "live" and change is not None and change.kind == "back" and "41 seconds" in change.text
    assert tick_until(nodes, 41, 60) == []


def test_words_renew_a_lease() -> None:
    nodes = nodes_of()
    join(nodes, 0.0)
    for second in range(10, 200, 10):
        assert tick_until(nodes, second - 10, second) == []
        nodes.renew(float(second), "a", 1)


def test_the_highest_incarnation_is_the_node() -> None:
    nodes = nodes_of()
    join(nodes, 0.0, incarnation=5)
    with pytest.raises(Fenced, match="another agent \\(pid 5 on h\\) has the place of node a"):
        join(nodes, 1.0, incarnation=4)
    assert join(nodes, 1.0, incarnation=6) == "replaced"
    with pytest.raises(Fenced, match="pid 6"):
        nodes.renew(2.0, "a", 5)
    with pytest.raises(UnknownNode):
        nodes.renew(2.0, "a", 7)
    assert nodes.renew(2.0, "a", 6)[0].incarnation == 6


def test_a_place_whose_holder_is_gone_is_for_whoever_comes() -> None:
    nodes = nodes_of()
    join(nodes, 0.0, incarnation=5)
    tick_until(nodes, 0, 40)
    assert join(nodes, 41.0, incarnation=4) == "replaced", "its clock may have gone back"


def test_who_joins_again_is_the_same_node_and_holds_what_it_held() -> None:
    nodes = nodes_of()
    join(nodes, 0.0)
    nodes.renew(1.0, "a", 1)[0].held_version = 7
    assert join(nodes, 2.0) == "rejoined"
    assert nodes.renew(3.0, "a", 1)[0].held_version == 7


def test_who_has_left_has_to_join_again_and_is_never_lost() -> None:
    nodes = nodes_of()
    join(nodes, 0.0)
    assert "done" in nodes.leave(1.0, "a", 1, "done").text
    assert tick_until(nodes, 1, 100) == [] and state_of(nodes) == "left"
    with pytest.raises(UnknownNode):
        nodes.renew(101.0, "a", 1)
    assert join(nodes, 102.0) == "rejoined"


def test_a_master_that_was_stopped_takes_nobody_for_lost_by_that() -> None:
    nodes = nodes_of()
    join(nodes, 0.0)
    tick_until(nodes, 0, 5)
    assert nodes.tick(605.0) == [] and state_of(nodes) != "lost"
    assert tick_until(nodes, 605, 620) == []
    assert tick_until(nodes, 620, 640) == ["lost"], "one that is silent afterwards is lost all the same"


def test_there_is_no_room_for_more_nodes_than_may_be_unless_some_are_gone() -> None:
    nodes = nodes_of(most_nodes=2)
    join(nodes, 0.0, "a")
    join(nodes, 0.0, "b")
    with pytest.raises(TooMany, match="2 nodes"):
        join(nodes, 0.0, "c")
    nodes.leave(1.0, "a", 1, "")
    join(nodes, 2.0, "c")
    assert {each.node_id for each in nodes} == {"b", "c"} and nodes.take_forgotten() == ["a"]


def test_nodes_that_have_been_gone_for_a_day_are_forgotten() -> None:
    nodes = nodes_of()
    join(nodes, 0.0)
    nodes.leave(1.0, "a", 1, "")
    nodes.tick(24 * 3600 + 2.0)
    assert len(nodes) == 0 and nodes.take_forgotten() == ["a"] and nodes.take_forgotten() == []


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["join", "renew", "leave", "tick"]),
            st.sampled_from("abc"),
            st.integers(1, 3),
            st.floats(0, 50),
        ),
        max_size=60,
    )
)
def test_whatever_comes_a_node_has_one_incarnation_which_only_a_lease_that_ran_out_lowers(
    steps: list[tuple[str, str, int, float]],
) -> None:
    nodes, now = nodes_of(), 0.0
    for what, node_id, incarnation, seconds in steps:
        now += seconds
        before = nodes.get(node_id)
        was = None if before is None else (before.incarnation, before.state)
        try:
            if what == "join":
                join(nodes, now, node_id, incarnation)
            elif what == "renew":
                nodes.renew(now, node_id, incarnation)
            elif what == "leave":
                nodes.leave(now, node_id, incarnation, "")
            else:
                nodes.tick(now)
        except (Fenced, UnknownNode):
            continue
        after = nodes.get(node_id)
        if was is not None and after is not None and after.incarnation < was[0]:
            assert was[1] in ("lost", "left")
        if what in ("join", "renew"):
            assert after is not None and after.incarnation == incarnation and after.lease_until == now + LEASE
    assert all((each.state in ("live", "late")) == (each in nodes.present) for each in nodes)
