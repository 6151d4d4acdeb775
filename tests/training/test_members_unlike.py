"""What is unlike between ranks that train and those that join, or does not let a job go on with other members: it is
refused with a sentence, or made alike, and training goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_ext import CheckpointInterval
from elastic_ext.members.regroup import answer_for
from elastic_ext.members.store import GO
from tests.support.living import Agents, Job, live, plan_after, plan_of, record_of
from tests.support.ranks import RankPool, RanksFailed
from tests.training.test_members import check_samples, going_back, lived, outcomes

# ---- rates that the loop writes ----


def test_a_joiner_whose_script_makes_its_optimizer_with_another_rate_uses_the_rates_of_the_others(
    ranks: RankPool, tmp_path: Path, port: int
) -> None:
    first = plan_of([0, 1])
    joined = plan_after(first, port, joined=[2])
    job = Job(
        folder=tmp_path, port=port, first=(0, 1), last_step=9, joins={2: 2}, holds={3: 2}, writes_rates="as others join"
    )
    zero, one, two = lived(ranks, job, [first, joined], 3)
    assert two.changes and zero.state == one.state == two.state


def test_where_the_loop_writes_rates_already_it_could_start_from_another_and_workers_are_restarted(
    ranks: RankPool, tmp_path: Path, port: int
) -> None:
    first = plan_of([0, 1])
    joined = plan_after(first, port, joined=[2])
    back = plan_after(joined, port, left=[2])

    def script(agents: Agents) -> None:
        agents.tell(first, joined)
        agents.wait_for(0, lambda record: record.refused == 2)
        agents.write([2], back)

    job = Job(folder=tmp_path, port=port, first=(0, 1), last_step=7, joins={2: 2}, holds={3: 2}, writes_rates="always")
    zero, one, _ = outcomes(ranks, job, [first, joined, back], 3, script)
    assert zero.ok and one.ok and not zero.value.changes, RanksFailed([zero, one], 90.0)
    record = record_of(job, 1)
    assert record is not None and record.refused_seats == (), "a restart can give all of them the same rate"
    assert record.why_refused == (
        "the worker in seat 2: the loop writes learning rates, which start from the one that AdamW was made with: "
        "0.01 here, and 0.02 on the ranks that train"
    )


# ---- what nobody can be told ----


def test_a_schedule_that_cannot_be_told_to_a_joiner_is_found_before_anything_moves_and_training_goes_on(
    ranks: RankPool, tmp_path: Path, port: int
) -> None:
    first = plan_of([0, 1])
    joined = plan_after(first, port, joined=[2])
    left = plan_after(joined, port, left=[1, 2])

    def script(agents: Agents) -> None:
        agents.tell(first, joined)
        agents.wait_for(0, lambda record: record.refused == 2)
        agents.write([2], left)
        agents.tell(first, left)

    job = Job(
        folder=tmp_path,
        port=port,
        first=(0, 1),
        last_step=10,
        joins={2: 2},
        holds={3: 2, 6: 3},
        keeps_function=True,
    )
    zero, one, _ = outcomes(ranks, job, [first, joined, left], 3, script)
    assert zero.ok and one.ok, RanksFailed([zero, one], 90.0)
    assert [change[0] for change in zero.value.changes] == [3], "where nobody joins nothing has to be told"
    record = record_of(job, 0)
    assert record is not None and record.refused_seats == (2,) and "TypeError" in record.why_refused


# ---- what one rank alone may do ----


def test_a_model_of_which_a_part_alone_is_sharded_is_trained_by_one_rank_and_no_other_joins(
    ranks: RankPool, tmp_path: Path, port: int
) -> None:
    first = plan_of([0])
    joined = plan_after(first, port, joined=[1])
    back = plan_after(joined, port, left=[1])

    def script(agents: Agents) -> None:
        agents.tell(first, joined)
        agents.wait_for(0, lambda record: record.refused == 2)
        agents.write([1], back)

    job = Job(folder=tmp_path, port=port, first=(0,), last_step=7, joins={1: 2}, holds={3: 2}, wraps="blocks")
    zero, _ = outcomes(ranks, job, [first, joined, back], 2, script)
    assert zero.ok and not zero.value.changes, RanksFailed([zero], 90.0)
    record = record_of(job, 0)
    assert record is not None and record.refused_seats == (1,), "a restart would end at this"
    assert "embed.weight; nothing averages their gradients, and each rank would train its own" in record.why_refused


def test_where_the_loop_gathers_gradients_by_itself_it_is_told_once_it_does_that_members_change_by_a_restart(
    ranks: RankPool, tmp_path: Path, port: int
) -> None:
    first = plan_of([0])
    joined = plan_after(first, port, joined=[1])
    back = plan_after(joined, port, left=[1])
    told: list[str] = []

    def script(agents: Agents) -> None:
        told.append(agents.wait_for(0, lambda record: bool(record.why_restart)).why_restart)
        agents.tell(first, joined)
        agents.wait_for(0, lambda record: record.refused == 2)
        agents.write([1], back)

    job = Job(folder=tmp_path, port=port, first=(0,), last_step=5, joins={1: 2}, holds={2: 2}, gathers=4)
    zero, _ = outcomes(ranks, job, [first, joined, back], 2, script)
    assert zero.ok and not zero.value.changes, RanksFailed([zero], 90.0)
    record = record_of(job, 0)
    assert record is not None and record.refused_seats == () and told[0] in record.why_refused
    assert told[0].startswith("the loop gathers gradients over several micro-batches by itself")


# ---- a plan of sharding that comes into force once workers that join were called ----


def test_where_the_model_is_sharded_otherwise_since_they_were_called_workers_do_not_join(
    ranks: RankPool, tmp_path: Path, port: int
) -> None:
    first = plan_of([0, 1])
    joined = plan_after(first, port, joined=[2])
    back = plan_after(joined, port, left=[2])

    def script(agents: Agents) -> None:
        agents.tell(first, joined)
        agents.wait_for(0, lambda record: record.refused == 2)
        agents.write([2], back)

    job = going_back(tmp_path, port, proposes={"parallelism.strategy": "full_shard"})
    zero, one, _ = outcomes(ranks, job, [first, joined, back], 3, script)
    assert zero.ok and one.ok and not zero.value.changes, RanksFailed([zero, one], 90.0)
    assert zero.value.state == one.value.state and "'full_shard'" in str(zero.value.state)
    record = record_of(job, 1)
    assert record is not None and "sharded otherwise since the workers that join were called" in record.why_refused


# ---- a checkpoint that was not saved as members were to change ----


@pytest.mark.parametrize(
    ("goes_on", "num_samples"), [("with the epoch", 48), pytest.param("with the step", 96, marks=pytest.mark.slow)]
)
def test_where_a_save_fails_before_members_change_they_stay_and_no_sample_is_left_out_or_comes_twice(
    ranks: RankPool, tmp_path: Path, port: int, goes_on: Any, num_samples: int
) -> None:
    first = plan_of([0, 1])
    joined = plan_after(first, port, joined=[2])
    back = plan_after(joined, port, left=[2])
    told: list[Any] = []

    def script(agents: Agents) -> None:
        agents.tell(first, joined)
        agents.wait_for(0, lambda record: record.refused == 2)
        told.append(agents.board_of(joined).take(GO, seconds=20.0))
        agents.write([2], back)

    job = Job(
        folder=tmp_path,
        port=port,
        first=(0, 1),
        last_step=8,
        joins={2: 2},
        holds={2: 2},
        num_samples=num_samples,
        saves=True,
        options={"checkpoint_interval": CheckpointInterval(steps=3)},
        fails_to_save=2,
        goes_on=goes_on,
    )
    zero, one, _ = outcomes(ranks, job, [first, joined, back], 3, script)
    assert zero.ok and one.ok and not zero.value.changes, RanksFailed([zero, one], 90.0)
    record = record_of(job, 1)
    assert record is not None and "No space left on device" in record.why_refused
    assert "No space left on device" in told[0]["why"]
    check_samples(ranks, replace(job, options={}), [zero.value, one.value])


# ---- a step that is taken back, since members did not change as it began ----


@pytest.mark.parametrize("rollback", ["gradients", pytest.param("full", marks=pytest.mark.slow)])
def test_the_step_that_is_taken_back_as_a_change_fails_leaves_no_trace(
    ranks: RankPool, tmp_path: Path, port: int, rollback: str
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
        last_step=7,
        joins={2: 2},
        holds={3: 2},
        waits_for={5: "is dead"},
        form_seconds=1.0,
        leaves_traces=True,
        options={"rollback": rollback},
    )
    zero, one, _ = outcomes(ranks, job, [first, joined], 3, script)
    assert zero.ok and one.ok and not zero.value.changes, RanksFailed([zero, one], 90.0)
    assert (zero.value.num_undone, one.value.num_undone) == (1, 1)
    never = replace(job, folder=tmp_path / "never", joins={}, holds={}, waits_for={})
    with Agents(never, [first]):
        same = ranks.run(2, live, never, process_group=False)
    assert [zero.value.state, one.value.state] == [each.state for each in same if each is not None]


# ---- a joiner that is no more ----


@pytest.mark.parametrize("when", [pytest.param("before it answers", marks=pytest.mark.slow), "once it has answered"])
def test_of_a_joiner_that_dies_its_agent_tells_the_ranks_and_these_do_not_wait_for_it(
    ranks: RankPool, tmp_path: Path, port: int, when: str
) -> None:
    first = plan_of([0, 1])
    joined = plan_after(first, port, joined=[2, 3])

    def script(agents: Agents) -> None:
        if when == "before it answers":
            agents.wait_for(2, lambda record: record.ready == 2)
            agents.kill(2)
            answer_for(joined, [2], "it was killed")
        agents.tell(first, joined)
        if when == "once it has answered":
            agents.wait_for(0, lambda record: record.agreed == 2)
            agents.kill(2)
            answer_for(joined, [2], "it was killed")
        agents.touch("is dead")
        agents.wait_for(0, lambda record: record.refused == 2)
        agents.kill(3)

    job = Job(
        folder=tmp_path,
        port=port,
        first=(0, 1),
        last_step=7,
        joins={2: 2, 3: 2},
        holds={3: 2},
        waits_for={5: "is dead"},
    )
    zero, one, two, three = outcomes(ranks, job, [first, joined], 4, script)
    assert (two.exit_signal, three.exit_signal) == (9, 9)
    assert zero.ok and one.ok and not zero.value.changes, RanksFailed([zero, one], 90.0)
    record = record_of(job, 1)
    assert record is not None and record.why_refused == "the worker in seat 2: it was killed"
    assert record.refused_seats == (2,), "the other may join without it"
