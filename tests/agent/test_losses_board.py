"""How agents decide on plans without workers that are lost, on the board of their round."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from elastic_ext.agent.journal import FailedNode, Failure
from elastic_ext.agent.losses import LostWorkers, gone_in_words, lost_in_words
from elastic_ext.members.plan import MembershipPlan, NodeShare
from elastic_ext.ranks.node_board import RoundBoard

PLAN = MembershipPlan(
    version=4,
    nodes=tuple(
        NodeShare(node_id=name, host=f"host-{name}", first_rank=2 * place, num_workers=2)
        for place, name in enumerate("abc")
    ),
    reason="the job starts",
    time=1.0,
    generation=2,
)
PLACES = dict(enumerate("abc"))


class Agents:
    """Three agents of one round, each with its part in decisions."""

    def __init__(self) -> None:
        store = HashStore()
        self.boards = [RoundBoard(store, place=place, num_nodes=3) for place in range(3)]
        self.losses = [
            LostWorkers(min_nodes=1, node_id=node, open_store=lambda node=node: f"store of {node}")  # type: ignore[misc]
            for node in "abc"
        ]

    def next_plan(self, place: int, plan: MembershipPlan, version: int) -> MembershipPlan | None:
        return self.losses[place].next_plan(self.boards[place], plan, version)

    def why(self, place: int, *lost: int, num_left: int = 1) -> str:
        return self.losses[place].why_restart(self.boards[place], PLAN, lost, PLACES, num_left)


@pytest.fixture
def agents() -> Agents:
    return Agents()


def test_as_long_as_nobody_is_lost_there_is_no_plan(agents: Agents) -> None:
    assert [agents.next_plan(place, PLAN, 5) for place in range(3)] == [None] * 3


def test_of_two_plans_for_one_version_all_take_the_first_and_who_is_left_out_comes_with_the_next(
    agents: Agents,
) -> None:
    agents.losses[0].add({1: "rank 1 ended"})
    agents.losses[2].add({4: "rank 4 ended", 5: ""})
    assert agents.next_plan(2, PLAN, 5) is None, "the first node that is left has the store, and has not heard of it"
    first = agents.next_plan(0, PLAN, 5)
    assert first is not None
    assert (first.version, first.lost, first.store, first.generation) == (5, (4, 5), "store of a", 3)
    assert first.reason == "rank 4 ended, and 1 worker of that node with it"
    assert agents.next_plan(2, PLAN, 5) == agents.next_plan(1, PLAN, 5) == first
    second = agents.next_plan(0, first, 6)
    assert second is not None
    assert (second.lost, second.store) == ((1,), "store of a")
    assert [member.seat for member in second.members] == [0, 2, 3]
    assert agents.next_plan(2, first, 6) == second
    assert [agents.next_plan(place, second, 7) for place in range(3)] == [None] * 3


def test_a_plan_has_a_generation_of_its_own_also_after_one_that_did_not_come(agents: Agents) -> None:
    agents.losses[0].add({0: "rank 0 ended"})
    found = agents.next_plan(0, PLAN, 7)
    assert found is not None and (found.version, found.generation) == (7, 5)


def test_others_go_on_where_all_nodes_that_are_left_have_said_that_they_can(agents: Agents) -> None:
    assert agents.why(0, 5) == "a, b, c have not said that their workers can go on"
    for place in (0, 1):
        agents.losses[place].tell(agents.boards[place], "")
    assert agents.why(0, 4, 5) == "", "nothing is asked of a node that is lost"
    assert agents.why(0, 5) == "c has not said that its workers can go on"
    agents.losses[2].tell(agents.boards[2], "the model is sharded")
    assert agents.why(0, 5) == "the model is sharded (c)"
    assert "--max-restarts" in agents.why(0, 4, 5, num_left=0)


def test_the_words_of_nodes_whose_workers_have_just_begun_are_waited_for_and_those_of_a_silent_one_up_to_a_limit(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, board = agents.losses[2], agents.boards[2]
    words.tell(board, "")
    later = iter([lambda: None, *(lambda at=at: agents.losses[at].tell(agents.boards[at], "") for at in (0, 1))])
    monkeypatch.setattr("elastic_ext.agent.losses.time.sleep", lambda _: next(later)())
    words.wait_for_words(board, {0, 1, 2}, seconds=60.0)
    assert agents.why(2, 4, 5) == ""
    assert next(later, None) is None, "it was waited for both"
    words.wait_for_words(board, {0, 1, 2, 3}, seconds=0.0)


def test_who_has_ended_well_goes_on_with_nobody(agents: Agents) -> None:
    for place in range(3):
        agents.losses[place].tell(agents.boards[place], "")
    agents.boards[1].tell("finished", True)
    assert agents.why(0, 4, 5) == "the workers of b have ended well"
    assert agents.why(0, 2, 3) == ""


def test_who_was_lost_before_counts_too(agents: Agents) -> None:
    for place in range(3):
        agents.losses[place].tell(agents.boards[place], "")
    agents.losses[0].add({0: "", 1: "", 2: ""})
    assert agents.why(0, 3) == "only 1 of 3 nodes are left, and the others may train on"


def test_what_is_said_of_who_is_lost() -> None:
    node = FailedNode(host="two", node_id="b")
    failure = Failure(
        rank=2,
        local_rank=0,
        seat=2,
        host=node.host,
        node_id=node.node_id,
        pid=4711,
        exit_code=-9,
        time=1.0,
        message="",
        traceback="",
    )
    assert lost_in_words(failure) == "rank 2 (pid 4711) on two ended by SIGKILL"
    assert gone_in_words(PLAN, {"b"}) == {
        2: "rank 2 is lost with its node b",
        3: "rank 3 is lost with its node b",
    }
