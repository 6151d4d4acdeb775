"""What nodes that have met decide of their members, and how far a change is in which workers go on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.members.decision import (
    CHOICES,
    ChangeRow,
    LeavingNode,
    NodeWords,
    decide_members,
    fitting,
    settle,
    stage_of,
    why_restart_at_loss,
    why_restart_of,
)
from elastic_ext.members.plan import MembershipPlan, NodeShare
from elastic_ext.records.member import MemberRecord

STORE = "127.0.0.1:29500"
PLAN = MembershipPlan(
    version=3,
    nodes=(
        NodeShare(node_id="a", host="ha", first_rank=0, num_workers=2),
        NodeShare(node_id="b", host="hb", first_rank=2, num_workers=1),
    ),
    reason="the job starts",
    time=1.0,
)
ALONE = (NodeShare(node_id="c", host="hc", first_rank=0, num_workers=1),)
WHY = "the loader cannot replay (rank 0 on ha)"


def stays(name: str, **changes: Any) -> NodeWords:
    """The words of a node of the plan in force, whose workers can go on."""
    words = NodeWords(
        node_id=name,
        host=f"h{name}",
        num_workers=2 if name == "a" else 1,
        num_failures=0,
        has_failed=False,
        is_finished=False,
        version=3,
        plan=PLAN,
        written=3,
        keeps_workers=True,
        time=7.0,
    )
    return replace(words, **changes)


def joins(name: str, **changes: Any) -> NodeWords:
    return stays(name, **{"version": 0, "plan": None, "written": 0, "keeps_workers": False, **changes})


def leaving(*names: str, why: str = "") -> tuple[LeavingNode, ...]:
    return tuple(LeavingNode(node_id=name, why_restart=why) for name in names)


def seats_of(words: list[NodeWords]) -> list[tuple[int, int, str]]:
    plan = settle(words, max_restarts=0, store=STORE).plan
    plan.check()
    return [(member.rank, member.seat, member.node_id) for member in plan.members]


# ---- live, the same, or all workers started anew ----


def test_a_node_joins_live_where_all_workers_can_and_none_is_started_but_its_own() -> None:
    words = [joins("c"), stays("b"), stays("a")]  # in whatever order they meet
    settled = settle(words, max_restarts=2, store=STORE)
    assert (settled.decision.kind, settled.decision.joined, settled.decision.holder) == ("live", ("c",), "a")
    plan = settled.plan
    assert (plan.version, plan.generation, plan.mode, plan.store) == (4, 1, "live", STORE)
    assert (plan.reason, plan.time, settled.is_old, settled.num_failures) == ("c joins", 7.0, True, 0)
    assert seats_of(words) == [(0, 0, "a"), (1, 1, "a"), (2, 2, "b"), (3, 3, "c")]


def test_the_first_node_leaves_live_and_another_has_the_store() -> None:
    words = [stays("b", leaving=leaving("a"))]
    settled = settle(words, max_restarts=0, store=STORE)
    assert (settled.decision.kind, settled.decision.left, settled.decision.holder) == ("live", ("a",), "b")
    assert settled.plan.reason == "a leaves" and seats_of(words) == [(0, 2, "b")]


def test_who_leaves_does_not_wait_until_who_joins_is_ready_and_two_plans_follow_one_another() -> None:
    settled = settle([joins("c"), stays("a", version=4, leaving=leaving("b"))], max_restarts=0, store=STORE)
    assert (settled.decision.kind, settled.decision.joined, settled.decision.left) == ("live", ("c",), ("b",))
    first, then = settled.plan, settled.then
    assert then is not None
    then.check()
    assert [(each.version, each.generation, each.reason, each.store) for each in (first, then)] == [
        (5, 2, "b leaves", STORE),
        (6, 3, "c joins", STORE),
    ]
    assert [(each.rank, each.seat) for each in first.members] == [(0, 0), (1, 1)]
    assert [(each.rank, each.seat) for each in then.members] == [(0, 0), (1, 1), (2, 3)]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([stays("a"), stays("b", why_restart=WHY), joins("c")], WHY),
        (
            [stays("a"), stays("b"), joins("c", why_restart="--members=restart asks for that on hc")],
            "--members=restart",
        ),
        ([stays("a", leaving=leaving("b", why=WHY))], WHY),
        ([stays("a", unsettled="membership 4 was under way"), stays("b")], "membership 4 was under way"),
        ([stays("a"), stays("b", plan=replace(PLAN, version=2)), joins("c")], "b has another membership plan in force"),
        (  # where nodes have met apart, and each of them has begun the job
            [stays("a"), stays("b"), stays("c", plan=replace(PLAN, nodes=ALONE))],
            "c has another membership plan in force",
        ),
        ([stays("a", choice="live", why_restart=WHY, leaving=leaving("b"))], WHY),  # who leaves is not made to stay
    ],
)
def test_where_members_cannot_change_live_all_workers_are_started_and_it_is_said_why(
    words: list[NodeWords], why: str
) -> None:
    settled = settle(words, max_restarts=0)
    assert settled.decision.kind == "start" and settled.decision.why.startswith(why)
    assert settled.plan.mode == "restart" and settled.then is None
    assert [member.seat for member in settled.plan.members] == [*range(settled.plan.world_size)]


@pytest.mark.parametrize(
    "words",
    [
        [stays("a", has_failed=True), stays("b")],
        [stays("a"), stays("b", keeps_workers=False), joins("c")],
        [stays("a", choice="live")],  # b is lost: nobody has heard that it leaves
        [stays("a", keeps_workers=False, is_finished=True), stays("b")],
        [joins("c"), joins("d")],
    ],
)
def test_after_a_failure_a_loss_or_at_the_start_nothing_is_said_of_members(words: list[NodeWords]) -> None:
    decision = decide_members(words)
    assert decision.kind == "start" and decision.why == ""


@pytest.mark.parametrize("why", ["", WHY])
def test_where_who_would_join_is_gone_the_workers_go_on_by_their_plan(why: str) -> None:
    settled = settle([stays("a", version=4, why_restart=why), stays("b", version=4)], max_restarts=0)
    assert settled.decision.kind == "same" and settled.is_as_before and settled.plan == PLAN
    assert settled.decision.why == "" and settled.decision.kept_out == ()


REFUSED: dict[str, Any] = {"version": 4, "written": 4, "refused": ("c",), "why_refused": "another model on c"}


@pytest.mark.parametrize("choice", ["auto", "live"])
def test_who_joins_and_is_refused_for_what_it_is_is_kept_out_and_nobody_is_started_anew(choice: Any) -> None:
    words = [stays("a", choice=choice, **REFUSED), stays("b", choice=choice, **REFUSED), joins("c", version=4)]
    settled = settle(words, max_restarts=0)
    decision = settled.decision
    assert (decision.kind, decision.kept_out, decision.joined) == ("same", ("c",), ())
    assert decision.why == "another model on c" and decision.takes_back and settled.plan.has_members_of(PLAN)


def test_who_joins_beside_one_that_is_kept_out_joins() -> None:
    words = [stays("a", **REFUSED), stays("b", **REFUSED), joins("c", why_restart=WHY), joins("d")]
    settled = settle(words, max_restarts=0, store=STORE)
    assert (settled.decision.kind, settled.decision.joined, settled.decision.kept_out) == ("live", ("d",), ("c",))
    assert [node.node_id for node in settled.plan.nodes] == ["a", "b", "d"]


def test_who_would_need_a_restart_does_not_join_where_members_change_live_alone() -> None:
    words = [stays("a", choice="live"), stays("b", why_restart=WHY), joins("c")]
    settled = settle(words, max_restarts=0)
    assert (settled.decision.kind, settled.decision.why) == ("same", WHY) and settled.plan == PLAN
    assert settled.decision.kept_out == ("c",)


def test_a_plan_that_workers_were_told_and_does_not_come_is_taken_back_in_a_generation_of_its_own() -> None:
    words = [stays("a", written=4, version=4), stays("b", written=4, version=4)]
    settled = settle(words, max_restarts=0, store=STORE)
    assert settled.decision.takes_back and not settled.is_as_before
    plan = settled.plan
    assert plan.has_members_of(PLAN) and (plan.version, plan.generation) == (5, 2)
    assert plan.store == PLAN.store, "the store in which the groups of now were formed"


def test_a_plan_that_did_not_come_leaves_its_version_and_generation_to_nobody() -> None:
    words = [stays("a", version=4), stays("b", version=4), joins("d")]
    plan = settle(words, max_restarts=0, store=STORE).plan
    assert (plan.version, plan.generation) == (5, 2)
    assert [member.seat for member in plan.members] == [0, 1, 2, 3]


@given(st.permutations([stays("a", leaving=leaving("b")), joins("c"), joins("d")]))
def test_whatever_their_order_who_stays_comes_first(words: list[NodeWords]) -> None:
    plan = settle(words, max_restarts=0, store=STORE).then
    assert plan is not None and plan.nodes[0].node_id == "a" and plan.world_size == 4
    assert [member.seat for member in plan.members] == [0, 1, 3, 4]


def test_what_a_node_says_of_members_comes_through_json() -> None:
    words = stays("a", leaving=leaving("b", why=WHY), choice="live")
    assert NodeWords.from_row(json.loads(json.dumps(words.to_row()))) == words


# ---- spares ----


def best_of(num_ranks: int, sizes: Sequence[int], multiple: int) -> int | None:
    """The largest sum of some of the sizes with which the number of ranks fits, by trying all; None for no such."""
    sums = [sum(some) for number in range(len(sizes) + 1) for some in itertools.combinations(sizes, number)]
    return max((each for each in sums if (num_ranks + each) % multiple == 0), default=None)


def test_the_most_ranks_are_taken_in_with_which_the_number_fits() -> None:
    for multiple, num_ranks, number in itertools.product(range(1, 5), range(7), range(5)):
        for sizes in itertools.product(range(1, 4), repeat=number):
            found = fitting(num_ranks, sizes, multiple)
            assert (None if found is None else sum(sizes[each] for each in found)) == best_of(
                num_ranks, sizes, multiple
            )
    assert fitting(2, [1, 1, 1], 2) == (0, 1), "of equal ones the first"
    assert fitting(2, [1, 2, 1], 2) == (0, 1, 2) and fitting(4, [3], 4) == () and fitting(3, [2], 4) is None


def with_sizes(**sizes: int) -> MembershipPlan:
    """A plan with so many workers on each node."""
    firsts = itertools.accumulate(sizes.values(), initial=0)
    shares = [
        NodeShare(node_id=name, host=f"h{name}", first_rank=first, num_workers=size)
        for (name, size), first in zip(sizes.items(), firsts, strict=False)
    ]
    return MembershipPlan(version=3, nodes=tuple(shares), reason="the job starts", time=1.0)


def met(
    plan: MembershipPlan, come: Sequence[int], *, multiple: int, left: Sequence[str] = (), **changes: Any
) -> list[NodeWords]:
    """The words of nodes that have met: those of a plan but who leaves, and nodes with so many workers each."""
    stay = [node for node in plan.nodes if node.node_id not in left]
    words = [
        stays(
            node.node_id,
            plan=plan,
            num_workers=node.num_workers,
            rank_multiple=multiple,
            leaving=leaving(*left),
            **changes,
        )
        for node in stay
    ]
    return words + [joins(f"z{number}", num_workers=size) for number, size in enumerate(come)]


def many_meetings() -> Iterator[tuple[list[NodeWords], int]]:
    """Meetings of two or three nodes that train, some of which leave, with up to three that come; and the multiple."""
    for sizes in itertools.product((1, 2, 3), repeat=3):
        plan = with_sizes(a=sizes[0], b=sizes[1], c=sizes[2])
        for multiple in (1, 2, 3, 4, 6):
            for number, left in itertools.product(range(4), ((), ("c",), ("a", "b"))):
                if plan.world_size % multiple == 0:
                    for come in itertools.product((1, 2), repeat=number):
                        yield met(plan, come, multiple=multiple, left=left), multiple


def test_workers_go_on_by_plans_alone_whose_number_of_ranks_fits_and_nobody_is_spare_without_need() -> None:
    kinds = dict.fromkeys(("live", "same", "start", "one plan", "two plans", "spares", "no spares"), 0)
    for words, multiple in many_meetings():
        settled = settle(words, max_restarts=0, store=STORE)
        decision, plan = settled.decision, words[0].plan
        assert plan is not None
        plans = [each for each in (settled.plan, settled.then) if each is not None]
        kinds[decision.kind] += 1
        kinds["spares" if decision.spares else "no spares"] += 1
        stay = [each for each in words if each.plan is not None]
        come = [each for each in words if each.plan is None]
        assert bool(decision.why_spares) == bool(decision.spares)
        for each in plans:
            each.check()
            assert not {node.node_id for node in each.nodes} & {*decision.spares}
        num_staying = sum(each.num_workers for each in stay)
        best = best_of(num_staying, [each.num_workers for each in come], multiple)
        if decision.kind == "start":
            assert best is None and decision.left, "no number that fits could be come to with all who stay"
            most = best_of(0, [each.num_workers for each in words], multiple)
            assert settled.plan.world_size == (most or sum(each.num_workers for each in words))
            continue
        assert {*decision.joined, *decision.spares} == {each.node_id for each in come}
        assert all(each.world_size % multiple == 0 for each in plans)
        assert best is not None and plans[-1].world_size == num_staying + best
        assert decision.is_one_plan == (bool(decision.left and decision.joined) and num_staying % multiple > 0)
        kinds["one plan"] += decision.is_one_plan
        kinds["two plans"] += len(plans) == 2
    assert all(kinds.values()), kinds


def test_a_node_waits_as_a_spare_until_another_comes_and_both_join() -> None:
    plan = with_sizes(a=2)
    decision = decide_members(met(plan, [1], multiple=2))
    assert (decision.kind, decision.joined, decision.spares, decision.holder) == ("same", (), ("z0",), "")
    assert decision.why_spares == (
        "z0 waits as a spare: it has 1 rank, 2 train, and the number of ranks that train is to be a multiple of 2 "
        "(the shard degree)"
    )
    assert not decision.takes_back and settle(met(plan, [1], multiple=2), max_restarts=0).is_as_before
    decision = decide_members(met(plan, [1, 1], multiple=2))
    assert (decision.kind, decision.joined, decision.spares) == ("live", ("z0", "z1"), ())
    four = decide_members(met(with_sizes(a=4), [1, 2], multiple=4)).why_spares
    assert four.startswith("z0, z1 wait as spares: they have 3 ranks, 4 train, and")


def test_a_spare_joins_once_the_workers_say_that_the_model_is_sharded_in_another_way() -> None:
    words = met(with_sizes(a=2), [1], multiple=1)
    words[-1] = replace(words[-1], version=3, rank_multiple=2)  # as it has heard before
    decision = decide_members(words)
    assert (decision.kind, decision.joined, decision.spares) == ("live", ("z0",), ())


def test_a_spare_takes_the_place_of_a_node_that_leaves_by_one_plan() -> None:
    settled = settle(met(with_sizes(a=1, b=1), [1], multiple=2, left=["b"]), max_restarts=0, store=STORE)
    assert settled.decision.is_one_plan and settled.then is None
    plan = settled.plan
    assert (plan.version, plan.generation, plan.reason, plan.store) == (4, 1, "b leaves, z0 joins", STORE)
    assert [(each.rank, each.seat, each.node_id) for each in plan.members] == [(0, 0, "a"), (1, 2, "z0")]


def test_who_waited_before_joins_before_who_has_just_come() -> None:
    words = met(with_sizes(a=2), [1, 1, 1], multiple=2)
    words[-1] = replace(words[-1], version=3)
    assert decide_members(words).joined == ("z0", "z2")


@pytest.mark.parametrize("choice", CHOICES)
def test_a_spare_has_nobody_started_anew_however_members_change(choice: Any) -> None:
    words = met(with_sizes(a=2), [1], multiple=2, choice=choice, why_restart=WHY)
    words[-1] = replace(words[-1], why_restart=WHY)
    decision = decide_members(words)
    assert (decision.kind, decision.spares, decision.kept_out, decision.why) == ("same", ("z0",), (), "")
    words += [replace(words[-1], node_id="z1")]
    assert decide_members(words).kind == ("same" if choice == "live" else "start")


@pytest.mark.parametrize(
    ("words", "trains", "why"),
    [
        (met(with_sizes(a=1, b=1), [1], multiple=2, has_failed=True), "a b", ""),
        (met(with_sizes(a=1, b=1), [1], multiple=2, keeps_workers=False), "a b", ""),
        (met(with_sizes(a=1, b=1), [1], multiple=2)[1:], "b z0", ""),  # a is lost
        (met(with_sizes(a=1, b=1, c=1, d=1), [], multiple=2, left=["b"]), "a c", "without b the number of ranks is no"),
        (met(with_sizes(a=1, b=1), [], multiple=2, left=["a"]), "b", "without a the number of ranks is no multiple"),
        (met(with_sizes(a=1, b=1), [1], multiple=2, has_failed=True)[2:], "z0", ""),
    ],
)
def test_workers_are_started_anew_on_so_many_nodes_that_the_number_of_ranks_fits_if_any_does(
    words: list[NodeWords], trains: str, why: str
) -> None:
    settled = settle(words, max_restarts=3, store=STORE)
    decision = settled.decision
    assert decision.kind == "start" and decision.why.startswith(why) and bool(why) == bool(decision.why)
    assert [node.node_id for node in settled.plan.nodes] == trains.split()
    settled.plan.check()
    assert decision.spares == tuple(each.node_id for each in words if each.node_id not in trains.split())
    assert decision.holder == (trains.split()[0] if decision.spares else "")
    assert settled.plan.store == "", "they meet as torch has them, if in another store"


# ---- why not live, by what workers say ----


def record(seat: int, **changes: Any) -> MemberRecord:
    return replace(MemberRecord(seat=seat, pid=1, time=1.0, why_restart="", version=3), **changes)


def test_workers_can_change_live_where_each_of_them_says_so() -> None:
    assert why_restart_of("auto", {2: record(2), 5: record(5)}, {2: 0, 5: 1}, host="ha") == ""
    assert why_restart_of("live", {}, {}, host="ha") == ""


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ({2: record(2), 5: None}, "the workers do not say that they can change live (rank 1 on ha)"),
        ({2: record(2), 5: record(5, why_restart="FSDP1 cannot")}, "FSDP1 cannot (rank 1 on ha)"),
    ],
)
def test_why_they_cannot_names_the_rank(records: dict[int, MemberRecord | None], why: str) -> None:
    assert why_restart_of("auto", records, {2: 0, 5: 1}, host="ha") == why
    assert why_restart_of("restart", records, {2: 0, 5: 1}, host="ha") == "--members=restart asks for that on ha"


# ---- how far a change is ----

NEXT = settle([stays("a"), stays("b"), joins("c")], max_restarts=0, store=STORE).plan


@pytest.mark.parametrize(
    ("states", "kind", "why"),
    [
        ("", "warming", "of the nodes that join 0 of 1 are ready"),
        ("a=waiting b=waiting c=warming", "warming", "of the nodes that join 0 of 1 are ready"),
        ("a=waiting c=ready", "ready", ""),
        ("a=waiting b=applied c=ready", "ready", ""),
        ("a=waiting b=waiting c=lost", "ready", ""),
        ("a=applied b=applied c=applied", "applied", ""),
        ("a=applied b=applied", "warming", "of the nodes that join 0 of 1 are ready"),
        ("a=waiting c=failed", "failed", "c: why of c"),
        ("a=waiting b=refused c=failed", "refused", "why of b"),
    ],
)
def test_how_far_a_change_is_follows_from_what_nodes_say(states: str, kind: str, why: str) -> None:
    rows = []
    for each in states.split():
        name, _, state = each.partition("=")
        rows.append(ChangeRow(node_id=name, version=4, state=state, why=f"why of {name}"))  # type: ignore[arg-type]
    stage = stage_of(NEXT, ["c"], rows)
    assert (stage.kind, stage.why) == (kind, why)
    old = [replace(row, version=3, state="failed") for row in rows]
    assert stage_of(NEXT, ["c"], old).kind == "warming", "what was said of the plan before says nothing"
    newer = [ChangeRow(node_id=name, version=5, state="waiting") for name in ("a", "b")]
    assert stage_of(NEXT, ["c"], [*newer, ChangeRow(node_id="c", version=4, state="applied")]).kind == "applied"


def test_a_plan_that_nobody_joins_by_is_told_at_once() -> None:
    plan = settle([stays("b", leaving=leaving("a"))], max_restarts=0, store=STORE).plan
    assert stage_of(plan, [], []).kind == "ready"


def test_the_choices_are_what_the_launcher_allows() -> None:
    assert CHOICES == ("auto", "live", "restart")


# --- once workers are lost --------------------------------------------------------------------------------------------


def why_at_loss(*lost: int, told: Mapping[str, str] | None = None, min_nodes: int = 1, num_left: int = 1) -> str:
    """Why all workers are started anew, of four nodes with a worker each."""
    names = ["a", "b", "c", "d"]
    shares = [NodeShare(node_id=name, host=name, first_rank=rank, num_workers=1) for rank, name in enumerate(names)]
    plan = MembershipPlan(version=1, nodes=tuple(shares), reason="", time=0.0)
    told = dict.fromkeys(names, "") if told is None else told
    return why_restart_at_loss(plan, lost, told, min_nodes=min_nodes, num_left=num_left)


def test_the_larger_part_of_the_nodes_goes_on_and_of_equal_parts_that_with_the_store() -> None:
    assert why_at_loss(3) == why_at_loss(2, 3) == ""
    assert "only 1 of 4 nodes are left" in why_at_loss(1, 2, 3)
    assert "all workers are lost" in why_at_loss(0, 1, 2, 3)


def test_others_go_on_where_all_that_are_left_have_said_that_they_can() -> None:
    assert why_at_loss(1, told={"a": "", "c": "", "d": ""}) == "", "of the lost nothing is asked"
    assert "d has not said" in why_at_loss(1, told={"a": "", "b": "", "c": ""})
    assert why_at_loss(1, told={"a": "", "c": "sharded", "d": ""}) == "sharded (c)"


def test_others_go_on_as_long_as_there_are_enough_nodes_and_failures_may_be_counted() -> None:
    assert "2 nodes have workers left, and the job needs 3" in why_at_loss(2, 3, min_nodes=3)
    assert "--max-restarts" in why_at_loss(3, num_left=0)
