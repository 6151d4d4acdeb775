"""Ranks are lost in the middle of a step, and the others go on in their processes: what comes out is what checkpoints
and restarts of the same worlds at the same steps give, bit for bit, and the samples of each step are those of one
process."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_ext import CheckpointInterval
from elastic_ext.fsdp.checkpoint.folder.commit import Commit
from elastic_ext.members.plan import MembershipPlan
from tests.support.living import Agents, Job, Lived, events_of, in_segments, live, plan_after, plan_of, samples_by_step
from tests.support.ranks import RankPool, RanksFailed


def survivors(ranks: RankPool, job: Job, plans: Sequence[MembershipPlan], num_workers: int) -> list[Lived]:
    """What the workers that are left have lived through, where agents write each plan once its lost ones have ended.

    One with workers that join is written once those are ready.
    """

    def script(agents: Agents) -> None:
        for before, plan in itertools.pairwise(plans):
            if not plan.lost:
                agents.tell(before, plan)
                continue
            for seat in plan.lost:
                agents.wait_for_end(seat)
            agents.write([member.seat for member in before.members if member.seat not in plan.lost], plan)

    ranks.renew()  # a rank knows its process groups' connections by there being no others between the ranks
    with Agents(job, plans, script):
        found = ranks.run_outcomes(num_workers, live, job, process_group=False, deadline_seconds=90.0)
    if [seat for seat, each in enumerate(found) if not each.ok] != sorted({*job.dies, *job.signals}):
        raise RanksFailed(found, 90.0)
    return [each.value for each in found if each.ok and each.value is not None]


def of_restarts(ranks: RankPool, job: Job, worlds: Sequence[tuple[int, int]]) -> Lived:
    """What the first rank of the last of these worlds comes to, where each begins with the one before's checkpoint."""
    found: Lived | None = None
    for each in in_segments(replace(job, dies={}, breaks={}, signals={}, outlives=False), worlds):
        found = ranks.run(each.first[-1] + 1, live, each, process_group=False)[0]
    assert found is not None
    return found


def check_samples(ranks: RankPool, job: Job, found: Sequence[Lived], *, since: int) -> None:
    """The samples of each step since that one, as the survivors have taken it in the end, are those of one process."""
    alone = replace(
        job,
        folder=job.folder / "alone",
        first=(0,),
        dies={},
        breaks={},
        signals={},
        outlives=False,
        saves=False,
        options={},
    )
    with Agents(alone, [plan_of([0])]):
        one = ranks.run(1, live, alone, process_group=False)
    last = {step: size for each in found for step, size, _ in each.rows}  # that which it was taken with at last
    taken = [replace(each, rows=[row for row in each.rows if row[1] == last[row[0]]]) for each in found]
    expected = {step: numbers for step, numbers in samples_by_step(one).items() if step >= since}
    assert {step: numbers for step, numbers in samples_by_step(taken).items() if step >= since} == expected


@pytest.mark.parametrize(
    ("moment", "loop"),
    [
        ("in backward", {}),
        pytest.param("before forward", {"way": "run"}, marks=pytest.mark.slow),
        pytest.param("after forward", {"accumulates": True, "draws": False}, marks=pytest.mark.slow),
        pytest.param("after backward", {"way": "batches", "leaves_traces": True}, marks=pytest.mark.slow),
    ],
)
def test_a_rank_is_killed_in_a_step_and_the_others_take_it_again(
    ranks: RankPool, tmp_path: Path, port: int, moment: str, loop: Mapping[str, Any]
) -> None:
    first = plan_of([0, 1, 2])
    job = Job(folder=tmp_path, port=port, first=(0, 1, 2), last_step=9, dies={1: (4, moment)}, outlives=True)
    job = replace(job, **{"draws": True, **loop})
    found = survivors(ranks, job, [first, plan_after(first, port, lost=[1])], 3)
    zero, two = found
    step = zero.changes[0][1]  # where its sums had come through the others commit the step
    assert step in ((4, 5) if moment == "after backward" else (4,))
    assert zero.changes == [(2, step, 0, 2)] and two.changes == [(2, step, 1, 2)]
    assert zero.ids_stay and two.ids_stay
    assert zero.state == of_restarts(ranks, job, [(step, 3), (9, 2)]).state
    assert job.leaves_traces or zero.state == two.state, "but for what each has seen in its last passes"
    event = events_of(job, 0, "members-changed")[0]
    assert f"2 ranks go on after step {step} without it" in event.text and event.details["from"] == "peers"
    check_samples(ranks, job, found, since=step)


@pytest.mark.slow
@pytest.mark.parametrize("behind", [0, 1])
def test_who_is_behind_takes_the_step_that_another_rank_has_committed(
    ranks: RankPool, tmp_path: Path, port: int, behind: int
) -> None:
    first = plan_of([0, 1, 2])
    job = Job(
        folder=tmp_path,
        port=port,
        first=(0, 1, 2),
        last_step=9,
        breaks={behind: 4},
        dies={2: (5, "after step")},
        outlives=True,
        leaves_traces=behind != 0,  # who is ahead has drawn and seen other things than the first rank has
    )
    found = survivors(ranks, job, [first, plan_after(first, port, lost=[2])], 3)
    assert [each.changes for each in found] == [[(2, 5, 0, 2)], [(2, 5, 1, 2)]]
    assert found[0].state == of_restarts(ranks, job, [(5, 3), (9, 2)]).state
    assert job.leaves_traces or found[0].state == found[1].state, "but for what each has seen in its last passes"
    check_samples(ranks, job, found, since=5)


def test_a_rank_is_killed_as_an_epoch_ends_and_who_has_joined_in_it_ends_it_again_with_the_others(
    ranks: RankPool, tmp_path: Path, port: int
) -> None:
    first = plan_of([0, 1])
    together = plan_after(first, port, joined=[2])
    job = Job(folder=tmp_path, port=port, first=(0, 1), last_step=12, dies={1: (8, "after step")}, outlives=True)
    joins = replace(job, joins={2: 2}, holds={3: 2})
    found = survivors(ranks, joins, [first, together, plan_after(together, port, lost=[1])], 3)
    step = found[0].changes[0][1]
    assert [each.changes for each in found] == [[(2, step, 0, 3), (3, 8, 0, 2)], [(2, step, 2, 3), (3, 8, 1, 2)]]
    assert found[0].state == found[1].state == of_restarts(ranks, job, [(step, 2), (8, 3), (12, 2)]).state
    check_samples(ranks, job, found, since=8)


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_was_being_saved_as_a_rank_was_killed_is_saved_by_those_that_are_left(
    ranks: RankPool, tmp_path: Path, port: int, lost: int
) -> None:
    first = plan_of([0, 1, 2])
    job = Job(
        folder=tmp_path,
        port=port,
        first=(0, 1, 2),
        last_step=9,
        dies={lost: (4, "in backward")},
        outlives=True,
        saves=True,
        options={"checkpoint_interval": CheckpointInterval(steps=1)},
    )
    found = survivors(ranks, job, [first, plan_after(first, port, lost=[lost])], 3)
    assert [each.changes for each in found] == [[(2, 4, 0, 2)], [(2, 4, 1, 2)]]
    assert found[0].state == found[1].state
    saved = [Commit.from_json(file.read_bytes(), where=str(file)) for file in (tmp_path / "saved").rglob("COMMIT")]
    by_step = {each.global_step: each for each in saved}
    assert {4, 5, 6, 7, 8, 9} <= by_step.keys(), "that of step 4 was under way, or made"
    assert all(by_step[step].num_ranks == 2 for step in range(5, 10))
    check_samples(ranks, job, found, since=4)


@pytest.mark.parametrize("ends", ["as groups are formed", pytest.param("at once", marks=pytest.mark.slow)])
def test_two_ranks_are_lost_one_after_the_other_or_together(
    ranks: RankPool, tmp_path: Path, port: int, ends: str
) -> None:
    first = plan_of([0, 1, 2, 3])
    job = Job(folder=tmp_path, port=port, first=(0, 1, 2, 3), last_step=9, outlives=True, draws=True)
    if ends == "at once":
        job = replace(job, dies={1: (4, "in backward"), 2: (4, "after forward")})
        plans = [first, plan_after(first, port, lost=[1, 2])]
    else:
        job = replace(job, dies={1: (4, "in backward")}, signals={2: signal.SIGKILL})
        second = plan_after(first, port, lost=[1])
        plans = [first, second, plan_after(second, port, lost=[2])]
    found = survivors(ranks, job, plans, 4)
    assert [each.changes for each in found] == [[(len(plans), 4, 0, 2)], [(len(plans), 4, 1, 2)]]
    assert found[0].state == found[1].state == of_restarts(ranks, job, [(4, 4), (9, 2)]).state
    check_samples(ranks, job, found, since=4)
