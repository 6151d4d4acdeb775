"""Ranks are lost in the middle of a step, and the others go on in their processes: what comes out is what checkpoints
and restarts of the same worlds at the same steps give, bit for bit, and the samples of each step are those of one
process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_ext.members.plan import MembershipPlan
from tests.support.living import Agents, Job, Lived, events_of, in_segments, live, plan_after, plan_of, samples_by_step
from tests.support.ranks import RankPool, RanksFailed


def survivors(ranks: RankPool, job: Job, plans: Sequence[MembershipPlan], num_workers: int) -> list[Lived]:
    """What the workers that are left have lived through, where agents write each plan once its lost ones have ended."""

    def script(agents: Agents) -> None:
        for before, plan in zip(plans, plans[1:], strict=False):
            for seat in plan.lost:
                agents.wait_for_end(seat)
            agents.write([member.seat for member in before.members if member.seat not in plan.lost], plan)

    with Agents(job, plans, script):
        found = ranks.run_outcomes(num_workers, live, job, process_group=False, deadline_seconds=90.0)
    if [seat for seat, each in enumerate(found) if not each.ok] != sorted(job.dies):
        raise RanksFailed(found, 90.0)
    return [each.value for each in found if each.ok and each.value is not None]


@pytest.mark.parametrize("moment", ["before forward", "after forward", "in backward", "after backward"])
def test_a_rank_is_killed_in_a_step_and_the_others_take_it_again(
    ranks: RankPool, tmp_path: Path, port: int, moment: str
) -> None:
    first = plan_of([0, 1, 2])
    job = Job(
        folder=tmp_path,
        port=port,
        first=(0, 1, 2),
        last_step=9,
        dies={1: (4, moment)},
        outlives=True,
        draws=True,
    )
    found = survivors(ranks, job, [first, plan_after(first, port, lost=[1])], 3)
    zero, two = found
    assert zero.changes == [(2, 4, 0, 2)] and two.changes == [(2, 4, 1, 2)]
    assert zero.ids_stay and two.ids_stay
    again: list[Lived] = []
    for each in in_segments(replace(job, dies={}), [(4, 3), (9, 2)]):
        again = [one for one in ranks.run(each.first[-1] + 1, live, each, process_group=False) if one is not None]
    assert zero.state == two.state == again[0].state
    event = events_of(job, 0, "members-changed")[0]
    assert "2 ranks go on after step 4 without it" in event.text
    committed = [replace(one, rows=[row for row in one.rows if row[0] != 4 or row[1] == 2]) for one in found]
    alone = replace(job, folder=tmp_path / "alone", first=(0,), dies={}, outlives=False, draws=False)
    with Agents(alone, [plan_of([0])]):
        one = ranks.run(1, live, alone, process_group=False)
    later = {step: numbers for step, numbers in samples_by_step(one).items() if step >= 4}
    assert {step: numbers for step, numbers in samples_by_step(committed).items() if step >= 4} == later
