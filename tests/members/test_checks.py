"""What ranks have against a membership plan, and what all of them decide: tables of values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.fsdp.worlds import Worlds
from elastic_ext.members.checks import (
    Answer,
    MembersDecision,
    decide,
    differences,
    digest_of,
    seconds_to_settle,
    why_not_members,
)
from elastic_ext.members.plan import MembershipPlan, NodeShare


def plan(*seats: int, store: str = "host:29400", version: int = 2) -> MembershipPlan:
    """A live plan with a node for each seat."""
    nodes = tuple(
        NodeShare(node_id=f"n{seat}", host="h", first_rank=rank, num_workers=1, seats=(seat,))
        for rank, seat in enumerate(seats)
    )
    return MembershipPlan(version=version, nodes=nodes, reason="a test", time=1.0, mode="live", store=store)


@pytest.mark.parametrize(
    ("seats", "new"), [([0], (0, 1)), ([0, 1], (0,)), ([0, 1], (1,)), ([3, 1], (3, 1, 4)), ([0, 1, 2], (2, 3))]
)
def test_who_stays_keeps_the_order_and_who_joins_follows(seats: list[int], new: tuple[int, ...]) -> None:
    assert why_not_members(plan(*new), seats) is None


@pytest.mark.parametrize(
    ("seats", "asked", "words"),
    [
        ([0, 1], plan(1, 0), "allowed: [0, 1], in which who stays keeps the order"),
        ([0, 1], plan(2, 0, 1), "allowed: [0, 1, 2]"),
        ([0, 1], plan(5, 6), "none of the workers that train, in seats [0, 1], is in the plan"),
        ([0, 1], plan(0, store=""), "names the store ''; allowed: HOST:PORT"),
        ([0, 1], plan(0, store="host"), "names the store 'host'"),
    ],
)
def test_what_no_ranks_can_become_is_refused_with_what_is_allowed(
    seats: list[int], asked: MembershipPlan, words: str
) -> None:
    assert words in str(why_not_members(asked, seats))


@given(st.lists(st.integers(0, 5), unique=True, min_size=1), st.lists(st.integers(0, 8), unique=True, min_size=1))
def test_ranks_can_become_the_members_of_a_plan_just_where_there_are_worlds_of_both(
    seats: list[int], new: list[int]
) -> None:
    try:
        Worlds.between(seats, new, num_local=(1, 1))
    except ValueError:
        assert why_not_members(plan(*new), seats) is not None
    else:
        assert why_not_members(plan(*new), seats) is None


def answer(
    why_not: str = "", why_later: str = "", *, version: int = 2, digest: str = "a", registered: str = ""
) -> Answer:
    return Answer(version=version, digest=digest, why_not=why_not, why_later=why_later, registered=registered)


@pytest.mark.parametrize(
    ("answers", "decision"),
    [
        ([answer(), answer()], MembersDecision(kind="apply")),
        ([answer("no room"), answer()], MembersDecision(kind="refuse", why="r0: no room")),
        ([answer("no"), answer("no")], MembersDecision(kind="refuse", why="r0, r1: no")),
        ([answer(), answer(why_later="a save")], MembersDecision(kind="later", why="r1: a save")),
        ([answer("no"), answer(why_later="a save")], MembersDecision(kind="refuse", why="r0: no")),
        (
            [answer(version=2), answer("no", version=3)],
            MembersDecision(kind="newer", why="some ranks hold a newer membership plan than others"),
        ),
        (
            [answer(digest="a"), answer(digest="b")],
            MembersDecision(
                kind="refuse",
                why="the ranks were told different plans of this version: one of digest a on r0; one of digest b on r1",
            ),
        ),
    ],
)
def test_all_ranks_draw_one_decision_from_the_answers_of_all(answers: list[Answer], decision: MembersDecision) -> None:
    assert decide(answers, ["r0", "r1"]) == decision
    assert [Answer.from_json(each.to_json()) for each in answers] == answers


def test_a_digest_tells_plans_apart() -> None:
    assert digest_of(plan(0, 1)) == digest_of(plan(0, 1))
    assert len({digest_of(each) for each in (plan(0, 1), plan(0), plan(0, 1, store="other:1"))}) == 3


def test_a_joiner_that_differs_is_told_in_what() -> None:
    ours = {"torch": "2.13", "the model": "Net", "the parameter w": [[2], "torch.float32"]}
    assert differences(ours, ours) == ""
    assert differences({**ours, "torch": "2.12"}, ours) == 'torch is "2.12" here and "2.13" there'
    assert differences({"torch": "2.13"}, ours).startswith('the model is null here and "Net" there; the parameter w')
    many = {str(number): number for number in range(9)}
    assert differences({}, many).endswith("; and 4 more")


def test_ranks_that_keep_something_for_themselves_do_not_let_another_take_the_place_of_one() -> None:
    apart = [answer(registered="a"), answer(registered="b")]
    assert decide(apart, "ab").why.startswith("registered tensors, or buffers of a sharded model, differ")
    assert decide([apart[0], apart[0]], "ab").kind == "apply"
    saving = [apart[0], answer(why_later="a checkpoint is being written")]
    assert decide(saving, "ab").kind == "later", "who waits has not looked at its tensors"


@pytest.mark.parametrize(("waited", "seconds"), [(0.0, 2.0), (0.5, 1.5), (2.5, 0.0), (20.0, 0.0), (20.1, None)])
def test_a_save_keeps_training_for_two_seconds_in_all_until_the_plan_has_waited_long(
    waited: float, seconds: float | None
) -> None:
    assert seconds_to_settle(waited) == seconds
