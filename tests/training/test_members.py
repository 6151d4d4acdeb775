"""Members come to a training and leave it while its processes live: what comes out is what checkpoints and restarts of
the same worlds at the same steps give, bit for bit, and the samples of each step are those of one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from elastic_ext.members.plan import MembershipPlan
from tests.support.living import (
    Job,
    Lived,
    Plans,
    events_of,
    in_segments,
    live,
    plan_after,
    plan_of,
    record_of,
    samples_by_step,
)
from tests.support.ranks import RankPool
from tests.support.worlds import agents_store


@pytest.fixture
def port() -> Iterator[int]:
    """The port of the store that agents hold."""
    with agents_store() as number:
        yield number


def lived(ranks: RankPool, job: Job, plans: Sequence[MembershipPlan], num_workers: int) -> list[Lived]:
    with Plans(job, plans):
        return [each for each in ranks.run(num_workers, live, job, process_group=False, deadline_seconds=90.0) if each]


def restarted(ranks: RankPool, job: Job, worlds: Sequence[tuple[int, int]]) -> list[Lived]:
    """What the last of these worlds comes to, where each begins with the checkpoint of the one before."""
    found: list[Lived] = []
    for each in in_segments(job, worlds):
        found = [one for one in ranks.run(each.first[-1] + 1, live, each, process_group=False) if one is not None]
    return found


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
def test_two_ranks_become_three_and_two_again_as_by_checkpoints_and_restarts(
    ranks: RankPool, tmp_path: Path, port: int, strategy: Any
) -> None:
    first = plan_of([0, 1])
    joined = plan_after(first, port, joined=[2])
    left = plan_after(joined, port, left=[1])
    job = Job(
        folder=tmp_path, port=port, first=(0, 1), last_step=18, joins={2: 2}, holds={3: 2, 8: 3}, strategy=strategy
    )
    found = lived(ranks, job, [first, joined, left], 3)
    zero, one, two = found
    steps = {version: step for version, step, *_ in zero.changes}
    assert zero.changes == [(2, steps[2], 0, 3), (3, steps[3], 0, 2)]
    assert two.changes == [(2, steps[2], 2, 3), (3, steps[3], 1, 2)]
    assert one.changes == zero.changes[:1] or one.changes == [(2, steps[2], 1, 3)]
    assert one.exit_status == 143 and one.rows[-1][0] == steps[3] - 1
    assert zero.state == two.state
    assert zero.ids_stay and one.ids_stay
    again = restarted(ranks, job, [(steps[2], 2), (steps[3], 3), (18, 2)])
    assert zero.state == again[0].state
    alone = restarted(ranks, Job(folder=tmp_path / "alone", port=port, first=(0,), last_step=18), [(18, 1)])
    assert samples_by_step(found) == samples_by_step(alone)
    sizes = {step: size for step, size, _ in zero.rows}
    assert [sizes[step] for step in (steps[2] - 1, steps[2], steps[3] - 1, steps[3])] == [2, 3, 3, 2]
    for seat in (0, 2):
        record = record_of(job, seat)
        assert record is not None and (record.version, record.refused, record.why_restart) == (3, 0, "")
        assert [event.details["version"] for event in events_of(job, seat, "members-changed")] == [2, 3]
