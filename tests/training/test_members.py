"""Members come to a training and leave it while its processes live: what comes out is what checkpoints and restarts of
the same worlds at the same steps give, bit for bit, and the samples of each step are those of one process."""

from __future__ import annotations

import random
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from elastic_ext import CheckpointInterval
from elastic_ext.fsdp.checkpoint.folder.commit import Commit
from elastic_ext.members.plan import MembershipPlan
from elastic_ext.members.store import here, prefix_of
from elastic_ext.ranks.board import Board
from elastic_ext.ranks.world import PeerName, World
from elastic_ext.training.checks import SamplersOfBefore
from tests.support.living import (
    Agents,
    Job,
    Lived,
    events_of,
    in_segments,
    live,
    plan_after,
    plan_of,
    record_of,
    samples_by_step,
)
from tests.support.ranks import Outcome, RankPool, RanksFailed


def outcomes(
    ranks: RankPool,
    job: Job,
    plans: Sequence[MembershipPlan],
    num_workers: int,
    script: Callable[[Agents], None] | None = None,
) -> list[Outcome]:
    """What became of the workers in the seats from 0 on, while agents went through a script."""
    with Agents(job, plans, script):
        return ranks.run_outcomes(num_workers, live, job, process_group=False, deadline_seconds=90.0)


def lived(
    ranks: RankPool,
    job: Job,
    plans: Sequence[MembershipPlan],
    num_workers: int,
    script: Callable[[Agents], None] | None = None,
) -> list[Lived]:
    """What the workers in the seats from 0 on have lived through; all of them have ended well."""
    found = outcomes(ranks, job, plans, num_workers, script)
    if not all(each.ok for each in found):
        raise RanksFailed(found, 90.0)
    return [each.value for each in found if each.value is not None]


def restarted(ranks: RankPool, job: Job, worlds: Sequence[tuple[int, int]]) -> list[Lived]:
    """What the last of these worlds comes to, where each begins with the checkpoint of the one before."""
    found: list[Lived] = []
    for each in in_segments(job, worlds):
        found = [one for one in ranks.run(each.first[-1] + 1, live, each, process_group=False) if one is not None]
    return found


def check_samples(ranks: RankPool, job: Job, found: Sequence[Lived]) -> None:
    """The samples of each step are those of one process."""
    alone = replace(
        job,
        folder=job.folder / "alone",
        first=(0,),
        joins={},
        holds={},
        saves=False,
        strategy="no_shard",
        shard_degree=None,
        configs={},
        waits_for={},
    )
    with Agents(alone, [plan_of([0])]):
        one = ranks.run(1, live, alone, process_group=False)
    assert samples_by_step(found) == samples_by_step(one)


def steps_of(each: Lived) -> dict[int, int]:
    """The steps at which a worker has lived through changes, by version."""
    return {version: step for version, step, *_ in each.changes}


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
    steps = steps_of(zero)
    assert zero.changes == [(2, steps[2], 0, 3), (3, steps[3], 0, 2)]
    assert two.changes == [(2, steps[2], 2, 3), (3, steps[3], 1, 2)]
    assert one.changes == zero.changes[:1] or one.changes == [(2, steps[2], 1, 3)]
    assert one.exit_status == 143 and one.rows[-1][0] == steps[3] - 1
    assert zero.state == two.state
    assert zero.num_ended == two.num_ended == 18, "by which agents see who is behind"
    assert zero.ids_stay and one.ids_stay
    again = restarted(ranks, job, [(steps[2], 2), (steps[3], 3), (18, 2)])
    assert zero.state == again[0].state
    check_samples(ranks, job, found)
    sizes = {step: size for step, size, _ in zero.rows}
    assert [sizes[step] for step in (steps[2] - 1, steps[2], steps[3] - 1, steps[3])] == [2, 3, 3, 2]
    for seat in (0, 2):
        record = record_of(job, seat)
        assert record is not None and (record.version, record.refused, record.why_restart) == (3, 0, "")
        joined_at, left_at = (event.details for event in events_of(job, seat, "members-changed"))
        assert (joined_at["version"], joined_at["before"], joined_at["after"]) == (2, [0, 1], [0, 1, 2])
        assert (left_at["version"], left_at["before"], left_at["after"]) == (3, [0, 1, 2], [0, 2])
        parts = ("deciding", "wiring", "forming", "moving", "all")
        assert tuple(joined_at["seconds"]) == tuple(left_at["seconds"]) == parts  # type: ignore[arg-type]


def test_shards_of_two_copies_become_four_and_two_again(ranks: RankPool, tmp_path: Path, port: int) -> None:
    first = plan_of([0, 1])
    joined = plan_after(first, port, joined=[2, 3])
    left = plan_after(joined, port, left=[0, 1])
    job = Job(
        folder=tmp_path,
        port=port,
        first=(0, 1),
        last_step=14,
        joins={2: 2, 3: 2},
        holds={3: 2, 7: 3},
        strategy="hybrid_shard",
        shard_degree=2,
    )
    found = lived(ranks, job, [first, joined, left], 4)
    steps = steps_of(found[2])
    assert found[3].changes == [(2, steps[2], 3, 4), (3, steps[3], 1, 2)]
    assert [each.exit_status for each in found] == [143, 143, None, None]
    again = restarted(ranks, job, [(steps[2], 2), (steps[3], 4), (14, 2)])
    assert found[2].state == found[3].state == again[0].state
    check_samples(ranks, job, found)
    records = [record_of(job, seat) for seat in range(4)]
    assert [None if each is None else each.rank_multiple for each in records] == [2] * 4


@pytest.mark.parametrize(("strategy", "shard_degree"), [("shard_grad_op", None), ("hybrid_shard", 2)])
def test_one_node_leaves_as_another_joins_and_each_draws_as_the_rank_of_before(
    ranks: RankPool, tmp_path: Path, port: int, strategy: Any, shard_degree: int | None
) -> None:
    first = plan_of([0, 1])
    moved = plan_after(first, port, joined=[2], left=[0])
    job = Job(
        folder=tmp_path,
        port=port,
        first=(0, 1),
        last_step=9,
        joins={2: 2},
        holds={3: 2},
        strategy=strategy,
        shard_degree=shard_degree,
        draws=True,
    )
    zero, one, two = lived(ranks, job, [first, moved], 3)
    steps = steps_of(one)
    assert one.changes == [(2, steps[2], 0, 2)] and two.changes == [(2, steps[2], 1, 2)]
    assert zero.exit_status == 143
    again = restarted(ranks, job, [(steps[2], 2), (9, 2)])
    assert one.state == again[0].state
    check_samples(ranks, job, [zero, one, two])


def test_one_process_without_a_group_becomes_two_ranks(ranks: RankPool, tmp_path: Path, port: int) -> None:
    first = plan_of([0])
    joined = plan_after(first, port, joined=[1])
    job = Job(folder=tmp_path, port=port, first=(0,), last_step=7, joins={1: 2}, holds={2: 2}, is_bare=True)
    zero, one = lived(ranks, job, [first, joined], 2)
    assert zero.changes == [(2, 4, 0, 2)] and zero.state == one.state
    assert zero.state == restarted(ranks, job, [(4, 1), (7, 2)])[0].state


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
def test_one_rank_becomes_two_and_the_first_one_leaves(
    ranks: RankPool, tmp_path: Path, port: int, strategy: Any
) -> None:
    first = plan_of([0])
    joined = plan_after(first, port, joined=[1])
    left = plan_after(joined, port, left=[0])
    job = Job(
        folder=tmp_path,
        port=port,
        first=(0,),
        last_step=14,
        joins={1: 2},
        holds={3: 2, 7: 3},
        strategy=strategy,
        accumulates=True,
    )
    zero, one = lived(ranks, job, [first, joined, left], 2)
    steps = steps_of(one)
    assert one.changes == [(2, steps[2], 1, 2), (3, steps[3], 0, 1)]
    again = restarted(ranks, job, [(steps[2], 1), (steps[3], 2), (14, 1)])
    assert one.state == again[0].state
    check_samples(ranks, job, [zero, one])


def test_members_change_between_two_epochs_where_the_plan_is_agreed_on_in_the_last_step_of_one(
    ranks: RankPool, tmp_path: Path, port: int
) -> None:
    first = plan_of([0, 1])
    joined = plan_after(first, port, joined=[2])
    left = plan_after(joined, port, left=[0])
    job = Job(
        folder=tmp_path,
        port=port,
        first=(0, 1),
        last_step=14,
        joins={2: 2},
        holds={2: 2, 6: 3},
        num_samples=48,
    )
    zero, one, two = lived(ranks, job, [first, joined, left], 3)
    assert two.changes == [(2, 4, 2, 3), (3, 8, 1, 2)], "each at the end of an epoch of four steps"
    assert one.state == two.state
    again = restarted(ranks, job, [(4, 2), (8, 3), (14, 2)])
    assert one.state == again[0].state
    check_samples(ranks, job, [zero, one, two])


def test_what_each_rank_has_registered_for_itself_is_that_of_the_first_as_after_a_restart(
    ranks: RankPool, tmp_path: Path, port: int
) -> None:
    first = plan_of([0, 1])
    joined = plan_after(first, port, joined=[2])
    job = Job(folder=tmp_path, port=port, first=(0, 1), last_step=8, joins={2: 2}, holds={3: 2}, keeps_own=True)
    zero, one, two = lived(ranks, job, [first, joined], 3)
    again = restarted(ranks, job, [(steps_of(zero)[2], 2), (8, 3)])
    assert zero.state == one.state == two.state == again[0].state


def test_where_it_would_be_that_of_the_rank_whose_place_is_taken_the_plan_is_refused(
    ranks: RankPool, tmp_path: Path, port: int
) -> None:
    first = plan_of([0, 1])
    moved = plan_after(first, port, joined=[2], left=[0])
    back = plan_after(moved, port, left=[2])

    def script(agents: Agents) -> None:
        agents.tell(first, moved)
        agents.wait_for(0, lambda record: record.refused == 2)
        agents.write([2], back)

    job = Job(folder=tmp_path, port=port, first=(0, 1), last_step=8, joins={2: 2}, holds={3: 2}, keeps_own=True)
    zero, one, _ = outcomes(ranks, job, [first, moved, back], 3, script)
    assert zero.ok and one.ok and not zero.value.changes
    record = record_of(job, 1)
    assert record is not None and record.why_refused.startswith("registered tensors, or buffers of a sharded model")


def going_back(folder: Path, port: int, **changes: Any) -> Job:
    """A job whose loop goes back to a checkpoint once a third worker is agreed on, and before it joins."""
    options = {"checkpoint_interval": CheckpointInterval(steps=2)}
    job = Job(folder=folder, port=port, first=(0, 1), last_step=9, joins={2: 2}, holds={3: 2}, options=options)
    return replace(job, saves=True, rewinds=True, **changes)


def test_training_goes_back_while_a_plan_waits_for_the_step_to_begin(
    ranks: RankPool, tmp_path: Path, port: int
) -> None:
    first = plan_of([0, 1])
    job = going_back(tmp_path, port, draws=True)
    zero, one, two = lived(ranks, job, [first, plan_after(first, port, joined=[2])], 3)
    assert zero.changes == [(2, 4, 0, 3)] and zero.rows[-1][0] == 8
    again = restarted(ranks, replace(job, rewinds=False, options={}), [(4, 2), (9, 3)])
    assert zero.state == one.state == two.state == again[0].state


def test_a_proposal_that_comes_into_force_as_training_goes_back_leaves_steps_cut_for_the_world_to_come(
    ranks: RankPool, tmp_path: Path, port: int
) -> None:
    first = plan_of([0, 1])
    job = going_back(tmp_path, port, proposes={"dataloader.batch_size": 3})  # which two ranks share out otherwise
    found = lived(ranks, job, [first, plan_after(first, port, joined=[2])], 3)
    assert found[0].changes == [(2, 4, 0, 3)]
    assert all("'batch_size', '3'" in str(each.state) for each in found)
    taken = [replace(each, rows=[row for row in each.rows if row[0] < 4 or row[1] == 3]) for each in found]
    check_samples(ranks, replace(job, rewinds=False, proposes={}, options={}), taken)


def test_samples_at_the_end_of_an_epoch_too_few_for_more_ranks_are_taken_first(
    ranks: RankPool, tmp_path: Path, port: int
) -> None:
    first = plan_of([0, 1])
    joined = plan_after(first, port, joined=[2, 3])
    job = Job(folder=tmp_path, port=port, first=(0, 1), last_step=8, joins={2: 2, 3: 2}, holds={2: 2}, num_samples=50)
    found = lived(ranks, job, [first, joined], 4)
    assert [each.changes[0][:2] for each in found] == [(2, 5)] * 4, "after the fifth step, of two samples"
    check_samples(ranks, job, found)


def test_checkpoints_go_on_through_changes_and_the_folder_goes_to_the_next_first_rank(
    ranks: RankPool, tmp_path: Path, port: int
) -> None:
    first = plan_of([0, 1])
    joined = plan_after(first, port, joined=[2])
    left = plan_after(joined, port, left=[0])
    job = Job(
        folder=tmp_path,
        port=port,
        first=(0, 1),
        last_step=16,
        joins={2: 2},
        holds={3: 2, 8: 3},
        saves=True,
        strategy="full_shard",
        options={"checkpoint_interval": CheckpointInterval(steps=2)},
    )
    zero, one, two = lived(ranks, job, [first, joined, left], 3)
    assert one.state == two.state and zero.exit_status == 143
    assert one.newest[-1] == (steps_of(one)[3] - 1) // 2 * 2, "what the first rank of before had committed"
    assert one.analyzes and not two.analyzes
    saved = {path.parent.name: path for path in tmp_path.glob("saved/fsdp_checkpoint/*/step_*/COMMIT")}
    assert {f"step_{step}" for step in range(2, 17, 2)} <= saved.keys()
    commits = [Commit.from_json(path.read_bytes(), where=name) for name, path in saved.items()]
    assert {each.num_ranks for each in commits} == {2, 3}
    assert len({each.run_id for each in commits}) == 1, "one run, whoever leaves"
    more = replace(job, first=(0,), joins={}, holds={}, last_step=18, num_epochs=8)
    with Agents(more, [plan_of([0])]):
        (resumed,) = ranks.run(1, live, more, process_group=False)
    assert resumed is not None
    assert resumed.rows[0][0] == 16


@pytest.mark.parametrize(
    ("at", "changed_at", "saved"),
    [
        pytest.param(3, 6, "step_5", id="with the plan, which waits for the save"),
        pytest.param(4, 5, "step_6", id="as ranks meet for the plan: who joins saves with the others"),
    ],
)
def test_a_config_and_a_save_come_at_the_boundary_of_a_plan(
    ranks: RankPool, tmp_path: Path, port: int, at: int, changed_at: int, saved: str
) -> None:
    first = plan_of([0, 1])
    joined = plan_after(first, port, joined=[2])
    config = {"version": 5, "global_batch_size": 24, "checkpoint": {"now": True}, "optimizer": {"weight_decay": 0.5}}
    job = Job(
        folder=tmp_path,
        port=port,
        first=(0, 1),
        last_step=12,
        joins={2: 2},
        holds={3: 2},
        configs={at: config},
        saves=True,
        num_samples=192,
    )
    zero, one, two = lived(ranks, job, [first, joined], 3)
    assert zero.changes == [(2, changed_at, 0, 3)]
    assert zero.state == one.state == two.state
    taken = samples_by_step([zero, one, two])
    assert [len(taken[step]) for step in (4, 5, 6, 11)] == [12, 24, 24, 24]
    assert [path.parent.name for path in tmp_path.glob("saved/fsdp_checkpoint/*/*/COMMIT")] == [saved]


@pytest.mark.parametrize(
    "options",
    [
        {"way": "run", "accumulates": True},
        {"way": "batches", "num_samples": 48},
        {"num_workers": 1},
        {"keeps_mean": True, "strategy": "full_shard"},
        {"compiles": True},
        pytest.param({"compiles": True, "strategy": "full_shard"}, marks=pytest.mark.slow),
        {"wraps": "ddp"},
        {"wraps": "fully_shard"},
    ],
    ids=["run", "batches", "workers", "mean", "compiled", "compiled and sharded", "own ddp", "own fully_shard"],
)
def test_so_it_is_however_the_loop_takes_batches_and_whatever_the_script_does(
    ranks: RankPool, tmp_path: Path, port: int, options: dict[str, Any]
) -> None:
    first = plan_of([0, 1])
    joined = plan_after(first, port, joined=[2])
    left = plan_after(joined, port, left=[1])
    base = Job(folder=tmp_path, port=port, first=(0, 1), last_step=12, joins={2: 2}, holds={2: 2, 6: 3})
    job = replace(base, **options)
    zero, one, two = lived(ranks, job, [first, joined, left], 3)
    steps = steps_of(zero)
    assert two.changes == [(2, steps[2], 2, 3), (3, steps[3], 1, 2)]
    assert zero.state == two.state
    again = restarted(ranks, job, [(steps[2], 2), (steps[3], 3), (12, 2)])
    assert zero.state == again[0].state
    check_samples(ranks, job, [zero, one, two])
    if job.compiles:
        assert zero.num_graphs[0] < zero.num_graphs[1] == zero.num_graphs[2], "once, for sizes that may change"
        told = events_of(job, 0, "members-changed")[0].text
        assert "; compiled modules are compiled anew where their micro-batches have a size that is new" in told


@pytest.mark.parametrize(("evaluates", "num_samples"), [("kept", 24), ("told", 36), ("anew", 48)])
def test_a_sampler_that_was_made_for_other_ranks_is_told_of_once(
    ranks: RankPool, tmp_path: Path, port: int, evaluates: Any, num_samples: int
) -> None:
    first = plan_of([0, 1])
    joined = plan_after(first, port, joined=[2])
    left = plan_after(joined, port, left=[1])
    job = Job(
        folder=tmp_path,
        port=port,
        first=(0, 1),
        last_step=12,
        joins={2: 2},
        holds={2: 2, 6: 3},
        evaluates=evaluates,
        num_evaluated=num_samples,
        strategy="full_shard" if evaluates == "anew" else "no_shard",
    )
    zero, _, two = lived(ranks, job, [first, joined, left], 3)
    steps = steps_of(zero)
    named = f"a DistributedSampler over a Numbered of {num_samples} samples "  # processes have those of earlier tests
    warned = {
        seat: [event.text for event in events_of(job, seat, "remark") if named in event.text] for seat in range(3)
    }
    assert zero.best == two.best == 99.0, "who joins has what the others have registered"
    counts = {step: num for step, _, num in zero.evaluated}
    if evaluates != "kept":
        assert not any(warned.values()) and {*counts.values()} == {num_samples}
        assert {own for step, own, _ in zero.evaluated if step > steps[3]} == {num_samples // 2}
        return
    assert counts[steps[2] + 1] == 12 + 12 + 24, "two have kept their halves, and the third has evaluated all"
    (of_zero,), (of_two,) = warned[0], warned[2]
    assert of_zero.startswith(
        f"{named}was made for rank 0 of 2, and this is rank 0 of 3 since membership 2 at step {steps[2]}: "
    )
    assert f"{named}was made for rank 0 of 1, and this is rank 2 of 3 since" in of_two
    assert "make the sampler and its DataLoader in each evaluation, or anew in a function" in of_two


def test_the_trainers_own_sampler_and_those_of_another_number_of_ranks_are_not_told_of() -> None:
    names = [PeerName(rank=rank, host="h", pid=rank, seat=rank) for rank in range(7)]
    before, now = World(rank=6, names=tuple(names)), World(rank=5, names=tuple(names[:6]))
    samples: Any = [0] * 71
    made = {place: DistributedSampler[int](samples, *place) for place in ((7, 6), (7, 5), (6, 5), (1, 0))}
    own = DistributedSampler[int](samples, 7, 6)
    samplers = SamplersOfBefore()
    assert samplers.look(now, now, own=own, since="") == []
    (text,) = samplers.look(before, now, own=own, since="since then")
    assert text.startswith(
        "a DistributedSampler over a list of 71 samples was made for rank 6 of 7, and this is rank 5 "
    )
    assert samplers.look(before, now, own=own, since="since then") == [] and len(made) == 4


def test_of_samplers_that_were_found_before_those_are_told_of_that_are_still_there() -> None:
    names = [PeerName(rank=rank, host="h", pid=rank, seat=rank) for rank in range(8)]
    before, now = World(rank=7, names=tuple(names)), World(rank=5, names=tuple(names[:6]))
    samples: Any = [0] * 73
    kept, dropped = (DistributedSampler[int](samples, 8, 7) for _ in range(2))
    samplers = SamplersOfBefore()
    samplers.find()
    del dropped
    late = DistributedSampler[int](samples, 8, 7)
    (text,) = samplers.look(before, now, own=None, since="since then")
    assert text.startswith("a DistributedSampler over a list of 73 samples was made for rank 7 of 8")
    (text,) = samplers.look(before, now, own=kept, since="since then")
    assert "of 73 samples" in text and late.rank == 7, "they are looked for anew"


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
def test_many_changes_leave_nothing_behind(ranks: RankPool, tmp_path: Path, port: int, strategy: Any) -> None:
    draw, plans, members = random.Random(3), [plan_of([0, 1])], [0, 1]
    num_seats = 2
    while len(plans) < 9:
        if len(members) == 3 or (len(members) == 2 and draw.random() < 0.3):
            gone = draw.choice(members[1:])
            members.remove(gone)
            plans.append(plan_after(plans[-1], port, left=[gone]))
        else:
            members.append(num_seats)
            plans.append(plan_after(plans[-1], port, joined=[num_seats]))
            num_seats += 1
    joins = {seat: next(each.version for each in plans if each.member_at(seat)) for seat in range(2, num_seats)}
    job = Job(
        folder=tmp_path,
        port=port,
        first=(0, 1),
        last_step=10_000,
        num_epochs=1000,
        joins=joins,
        strategy=strategy,
        last_version=plans[-1].version,
    )
    found = lived(ranks, job, plans, num_seats)
    zero = found[0]
    assert [version for version, *_ in zero.changes] == [plan.version for plan in plans[1:]]
    assert len({str(found[seat].state) for seat in members}) == 1
    for size in {size for *_, size in zero.changes}:
        counts = [each for each, change in zip(zero.held, zero.changes, strict=True) if change[3] == size][1:]
        for what in ("descriptors", "sockets", "threads"):
            seen = [each[what] for each in counts]
            assert not seen or max(seen) <= seen[0] + 1, (size, what, seen)


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_joiner_that_dies_before_it_is_called_is_refused_and_training_goes_on(
    ranks: RankPool, tmp_path: Path, port: int
) -> None:
    first = plan_of([0, 1])
    joined = plan_after(first, port, joined=[2])

    def script(agents: Agents) -> None:
        agents.wait_for(2, lambda record: record.ready == 2)
        agents.kill(2)
        for seat in (0, 1):
            agents.wait_for(seat, lambda record: record.version == 1)
        agents.write([0, 1], joined)

    job = Job(folder=tmp_path, port=port, first=(0, 1), last_step=9, joins={2: 2}, holds={3: 2}, answer_seconds=0.5)
    zero, one, two = outcomes(ranks, job, [first, joined], 3, script)
    assert two.exit_signal == 9
    assert zero.ok and one.ok and zero.value.state == one.value.state and not zero.value.changes
    for seat in (0, 1):
        record = record_of(job, seat)
        assert record is not None and (record.version, record.refused) == (1, 2)
        assert "the worker in seat 2 on here has not answered in 0.5 s" in record.why_refused
        assert record.refused_seats == (2,) and record.agreed == 0
        assert [each.details["version"] for each in events_of(job, seat, "members-refused")] == [2]
    check_samples(ranks, job, [zero.value, one.value])


@pytest.mark.parametrize("accumulates", [False, True], ids=["", "several micro-batches"])
def test_a_joiner_that_dies_after_its_answer_has_the_groups_of_before_formed_anew_and_the_batch_comes_again(
    ranks: RankPool, tmp_path: Path, port: int, accumulates: bool
) -> None:
    first = plan_of([0, 1])
    joined = plan_after(first, port, joined=[2])

    def script(agents: Agents) -> None:
        agents.tell(first, joined)
        agents.wait_for_answer(joined, 2)
        agents.kill(2)
        agents.touch("is dead")

    job = Job(
        folder=tmp_path,
        port=port,
        first=(0, 1),
        last_step=9,
        joins={2: 2},
        holds={3: 2},
        waits_for={5: "is dead"},
        form_seconds=2.0,
        strategy="full_shard",
        saves=True,
        accumulates=accumulates,
    )
    zero, one, two = outcomes(ranks, job, [first, joined], 3, script)
    assert two.exit_signal == 9
    assert zero.ok and one.ok, RanksFailed([zero, one], 90.0)
    assert zero.value.state == one.value.state and not zero.value.changes
    record = record_of(job, 0)
    assert record is not None and (record.version, record.refused) == (1, 2) and record.why_refused
    assert record.refused_seats == (2,) and record.agreed == 2
    never = replace(job, folder=tmp_path / "never", joins={}, holds={}, waits_for={})
    with Agents(never, [first]):
        same, _ = ranks.run(2, live, never, process_group=False)
    assert same is not None and zero.value.state == same.state, "as if nothing had been"
    assert (zero.value.num_undone, one.value.num_undone) == (1, 1)
    check_samples(ranks, job, [zero.value, one.value])


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_so_it_is_where_a_joiner_dies_or_stops_once_groups_are_formed(
    ranks: RankPool, tmp_path: Path, port: int, number: signal.Signals, strategy: Any
) -> None:
    first = plan_of([0, 1])
    joined = plan_after(first, port, joined=[2])

    def script(agents: Agents) -> None:
        agents.tell(first, joined)
        for seat in (0, 1):
            agents.wait_for(seat, lambda record: record.refused == 2)
        agents.kill(2)

    job = Job(
        folder=tmp_path,
        port=port,
        first=(0, 1),
        last_step=9,
        joins={2: 2},
        holds={3: 2},
        signals={2: number},
        form_seconds=2.0,
        strategy=strategy,
    )
    zero, one, two = outcomes(ranks, job, [first, joined], 3, script)
    assert two.exit_signal == 9
    assert zero.ok and one.ok, RanksFailed([zero, one], 90.0)
    assert zero.value.state == one.value.state and not zero.value.changes
    check_samples(ranks, job, [zero.value, one.value])


def test_a_rank_that_fails_at_once_where_groups_are_formed_waits_for_those_who_wait_for_them(
    ranks: RankPool, tmp_path: Path, port: int
) -> None:
    first = plan_of([0, 1, 2])
    joined = plan_after(first, port, joined=[3])
    back = plan_after(joined, port, left=[3])

    def script(agents: Agents) -> None:
        agents.tell(first, joined)
        agents.wait_for(0, lambda record: record.refused == 2)
        agents.write([3], back)

    job = Job(
        folder=tmp_path,
        port=port,
        first=(0, 1, 2),
        last_step=8,
        joins={3: 2},
        holds={3: 2},
        cannot_form=(0,),
        form_seconds=1.0,
    )
    found = outcomes(ranks, job, [first, joined, back], 4, script)
    assert all(each.ok and not each.value.changes for each in found[:3]), RanksFailed(found, 90.0)
    record = record_of(job, 1)
    assert record is not None and record.refused == 2
    check_samples(ranks, job, [each.value for each in found[:3]])


def test_a_store_that_is_lost_before_groups_are_formed_has_those_of_before_formed_anew(
    ranks: RankPool, tmp_path: Path, port: int
) -> None:
    first = plan_of([0, 1])
    held: list[Any] = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]  # type: ignore[attr-defined]
    joined = plan_after(first, held[0].port, joined=[2])

    def script(agents: Agents) -> None:
        agents.tell(first, joined)
        boards = [Board(held[0], prefix_of(joined.generation, joined.version))]
        agents.wait_until(lambda: boards[0].has(here(2)))
        held.clear()
        boards.clear()
        agents.touch("is lost")

    job = Job(
        folder=tmp_path,
        port=port,
        first=(0, 1),
        last_step=9,
        joins={2: 2},
        holds={3: 2},
        waits_for={5: "is lost"},
        form_seconds=2.0,
    )
    zero, one, two = outcomes(ranks, job, [first, joined], 3, script)
    assert two.error is not None and two.error.type_name == "BoardGone"
    assert zero.ok and one.ok, RanksFailed([zero, one], 90.0)
    record = record_of(job, 0)
    assert record is not None and (record.version, record.refused) == (1, 2)
    check_samples(ranks, job, [zero.value, one.value])


def test_a_plan_that_takes_another_back_ends_the_joiner_with_a_sentence(
    ranks: RankPool, tmp_path: Path, port: int
) -> None:
    first = plan_of([0, 1])
    joined = plan_after(first, port, joined=[2])
    back = plan_after(joined, port, left=[2])

    def script(agents: Agents) -> None:
        agents.wait_for(2, lambda record: record.ready == 2)
        agents.write([0, 1, 2], back)

    job = Job(folder=tmp_path, port=port, first=(0, 1), last_step=9, joins={2: 2}, holds={3: 3})
    zero, one, two = outcomes(ranks, job, [first, joined, back], 3, script)
    assert two.error is not None and "membership 3 has no worker in seat 2 that joins" in two.error.message
    assert zero.ok and one.ok and zero.value.state == one.value.state and not zero.value.changes
    record = record_of(job, 1)
    assert record is not None and (record.version, record.refused) == (3, 0)


def test_of_two_plans_before_the_first_is_applied_the_newer_one_is(ranks: RankPool, tmp_path: Path, port: int) -> None:
    first = plan_of([0, 1])
    joined = plan_after(first, port, joined=[2])
    more = plan_after(joined, port, joined=[3])

    def script(agents: Agents) -> None:
        agents.wait_for(2, lambda record: record.ready == 2)
        agents.write([2], more)
        for seat in (2, 3):
            agents.wait_for(seat, lambda record: record.ready == 3)
        agents.write([0, 1], more)

    job = Job(folder=tmp_path, port=port, first=(0, 1), last_step=9, joins={2: 2, 3: 3}, holds={3: 3})
    found = lived(ranks, job, [first, joined, more], 4, script)
    assert [each.changes[0][2:] for each in found] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert len({str(each.state) for each in found}) == 1


def test_a_plan_that_comes_while_another_waits_for_the_step_to_begin_is_applied_after_it(
    ranks: RankPool, tmp_path: Path, port: int
) -> None:
    first = plan_of([0, 1])
    joined = plan_after(first, port, joined=[2])
    left = plan_after(joined, port, left=[1])

    def script(agents: Agents) -> None:
        agents.tell(first, joined)
        agents.wait_for_answer(joined, 2)
        agents.write([0, 1, 2], left)
        agents.touch("written")

    job = Job(
        folder=tmp_path,
        port=port,
        first=(0, 1),
        last_step=12,
        joins={2: 2},
        holds={3: 2},
        waits_for={5: "written"},
        looks=True,
    )
    zero, one, two = lived(ranks, job, [first, joined, left], 3, script)
    assert zero.changes[0] == (2, 5, 0, 3) and zero.changes[1][0] == 3
    assert one.exit_status == 143 and zero.state == two.state
    steps = steps_of(zero)
    assert zero.state == restarted(ranks, job, [(5, 2), (steps[3], 3), (12, 2)])[0].state
    check_samples(ranks, job, [zero, one, two])


def test_a_joiner_with_another_model_is_refused_with_the_difference(ranks: RankPool, tmp_path: Path, port: int) -> None:
    first = plan_of([0, 1])
    joined = plan_after(first, port, joined=[2])
    back = plan_after(joined, port, left=[2])

    def script(agents: Agents) -> None:
        agents.tell(first, joined)
        agents.wait_for(0, lambda record: record.refused == 2)
        agents.write([2], back)

    job = Job(folder=tmp_path, port=port, first=(0, 1), last_step=9, joins={2: 2}, holds={3: 2}, num_blocks={2: 1})
    zero, one, two = outcomes(ranks, job, [first, joined, back], 3, script)
    assert zero.ok and one.ok and not zero.value.changes
    assert two.error is not None
    record = record_of(job, 0)
    assert record is not None
    assert record.why_refused.startswith("the worker in seat 2: the parameter blocks.1.gain is null here and")
    assert record.refused_seats == (2,)


@pytest.mark.parametrize(("seat", "where"), [(2, "on_change"), (2, "on_members"), (1, "on_members")])
def test_what_the_script_raises_on_one_rank_once_tensors_have_moved_is_raised_on_all(
    ranks: RankPool, tmp_path: Path, port: int, seat: int, where: Any
) -> None:
    first = plan_of([0, 1])
    joined = plan_after(first, port, joined=[2])
    config = {"version": 5, "user": {"a": 1}}
    job = Job(
        folder=tmp_path,
        port=port,
        first=(0, 1),
        last_step=12,
        joins={2: 2},
        configs={1: config},
        holds={4: 2},
        raises={seat: where},
    )
    found = outcomes(ranks, job, [first, joined], 3)
    assert all(each.error is not None and f"planted in {where}" in each.error.message for each in found), found
    assert {each.error.type_name for each in found if each.error is not None} == {"RanksFailedError"}


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        number: int = found.getsockname()[1]
        return number


def test_a_plan_whose_store_does_not_answer_is_refused_and_the_next_one_is_applied(
    ranks: RankPool, tmp_path: Path, port: int
) -> None:
    first = plan_of([0, 1])
    dead = plan_after(first, free_port(), left=[1])
    alive = replace(plan_after(first, port, left=[1]), version=3)
    job = Job(folder=tmp_path, port=port, first=(0, 1), last_step=12, holds={2: 2, 6: 3})

    def script(agents: Agents) -> None:
        agents.tell(first, dead)
        agents.wait_for(0, lambda record: record.refused == 2)
        agents.tell(first, alive)

    zero, one = lived(ranks, job, [first, dead, alive], 2, script)
    assert [version for version, *_ in zero.changes] == [3] and one.exit_status == 143
    record = record_of(job, 0)
    assert record is not None and (record.version, record.refused) == (3, 2)
    assert record.why_refused.startswith("rank 0 (") and "of membership 2 does not answer" in record.why_refused
    check_samples(ranks, job, [zero, one])


def test_a_plan_of_more_ranks_than_a_step_has_samples_is_refused(ranks: RankPool, tmp_path: Path, port: int) -> None:
    first = plan_of([0, 1])
    joined = plan_after(first, port, joined=[2])
    back = plan_after(joined, port, left=[2])
    job = Job(folder=tmp_path, port=port, first=(0, 1), last_step=9, batch=2, joins={2: 2}, holds={2: 2})

    def script(agents: Agents) -> None:
        agents.tell(first, joined)
        agents.wait_for(0, lambda record: record.refused == 2)
        agents.write([2], back)

    zero, one, two = outcomes(ranks, job, [first, joined, back], 3, script)
    assert zero.ok and one.ok and not zero.value.changes and two.error is not None
    record = record_of(job, 1)
    assert record is not None and "a global batch of 2 samples leaves some of 3 ranks without any" in record.why_refused
    assert record.refused_seats == (), "no worker that joins can help it"


def test_a_loop_that_takes_batches_ahead_keeps_its_members(ranks: RankPool, tmp_path: Path, port: int) -> None:
    first = plan_of([0, 1])
    left = plan_after(first, port, left=[1])
    job = Job(folder=tmp_path, port=port, first=(0, 1), last_step=6, holds={2: 2}, way="ahead")
    zero, one = lived(ranks, job, [first, left], 2)
    assert zero.state == one.state and not zero.changes
    record = record_of(job, 0)
    assert record is not None and "the loop takes batches ahead of their steps" in record.why_refused


@pytest.mark.parametrize("contents", ["{", '{"version": 1}', "older", "foreign"])
def test_a_damaged_an_older_or_a_foreign_plan_is_refused_and_training_goes_on(
    ranks: RankPool, tmp_path: Path, port: int, contents: str
) -> None:
    first = replace(plan_of([0, 1]), version=4)
    written = {
        "older": replace(plan_after(first, port, left=[1]), version=3).to_json(),
        "foreign": replace(plan_of([7, 8]), version=9, mode="live", store=f"127.0.0.1:{port}").to_json(),
    }.get(contents, contents)

    def script(agents: Agents) -> None:
        for seat in (0, 1):
            agents.wait_for(seat, lambda record: record.version == 4)
            (job.run_dir(seat) / "membership.json").write_text(written)
        agents.touch("written")

    job = Job(folder=tmp_path, port=port, first=(0, 1), last_step=12, waits_for={3: "written"}, looks=True)
    zero, one = outcomes(ranks, job, [first], 2, script)
    assert zero.ok and one.ok and not zero.value.changes and zero.value.state == one.value.state
    record = record_of(job, 0)
    assert record is not None and record.version == 4
    if contents == "foreign":
        assert record.refused == 9 and "none of the workers that train, in seats [0, 1]" in record.why_refused
    else:
        assert record.refused == 0
    if contents in ("{", '{"version": 1}'):
        for each in (zero, one):  # two nodes of one machine, of which each has a file of its own
            assert each.output.count("membership.json was refused, the members stay as they are") == 1
    check_samples(ranks, job, [zero.value, one.value])
