"""What is said of a job by the files of its run directory: who runs, what is old, what is wrong."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_ext.agent.folder import NodeFolders
from elastic_ext.agent.status.files import EventSeen, RunFiles, read_run_directory
from elastic_ext.agent.status.status import NodeStatus, status_of
from elastic_ext.agent.status.text import line_of, words
from elastic_ext.cli import main
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.members.plan import MembershipPlan, NodeShare
from elastic_ext.ranks.processes import ProcessIdentity, process_of, this_process
from elastic_ext.records.agent import (
    AGENT_FILE,
    EVENTS_FILE,
    MEMBERSHIP_FILE,
    WORKERS_FILE,
    AgentRecord,
    WorkerSeen,
    WorkersRecord,
)
from elastic_ext.records.measures import Measures
from elastic_ext.records.metrics import JobEvent, RankMetrics

REPOSITORY = Path(__file__).resolve().parents[3]
END_SECONDS = 240.0
RECORDS = (AGENT_FILE, MEMBERSHIP_FILE, WORKERS_FILE)
PROFILES = ("profile-0.jsonl", "census-0.json", "calibration.json")
NOW = 1_000_000.0
HOST = "node-a"


def worker(rank: int, **values: Any) -> WorkerSeen:
    usual: dict[str, Any] = {"local_rank": rank, "rank": rank, "pid": 100 + rank, "start_ticks": 1, "state": "running"}
    return WorkerSeen(**usual | values)


def metrics(rank: int, **values: Any) -> RankMetrics:
    usual: dict[str, Any] = {"time": NOW - 5, "job": "j", "generation": 0, "rank": rank, "world_size": 2, "host": HOST}
    usual |= {"pid": 100 + rank, "step": 40, "config_version": 3, "config_revision": 0, "agree_every_steps": 1}
    return RankMetrics(**usual | values)


AGENT = AgentRecord(
    node_id="n0",
    job="j",
    run_id="r",
    host=HOST,
    pid=99,
    start_ticks=1,
    time=NOW - 1000,
    version="1",
    config_file="/c",
    memory_folder="",
    socket="",
    log_folder="",
)
WORKERS = WorkersRecord(time=NOW - 2, restart=1, membership_version=1, workers=(worker(0, step=50), worker(1, step=50)))
LEFT = replace(WORKERS, workers=(worker(0, state="left", exit_code=143), worker(1, state="left", exit_code=143)))
PLAN = MembershipPlan(
    version=4,
    nodes=(
        NodeShare(node_id="n0", host=HOST, first_rank=0, num_workers=2),
        NodeShare(node_id="n1", host="node-b", first_rank=2, num_workers=2),
    ),
    reason="n1 joined",
    time=NOW - 100,
)
PLAIN = RunFiles(path="/run", time=NOW, host=HOST, metrics=(metrics(0), metrics(1)), living=frozenset({100, 101}))
WITH_AGENT = replace(PLAIN, agent=AGENT, is_agent_running=True, workers=WORKERS, membership=PLAN)


def version(number: int, at_step: int | None = None) -> ElasticConfig:
    return replace(ElasticConfig.from_values({}, version=number), apply_at_step=at_step)


# ---- what is said ----


def test_a_job_that_runs_well_under_an_agent_is_said_to() -> None:
    status = status_of(replace(WITH_AGENT, config=version(3)))
    assert (status.state, status.job, status.world_size, status.restart) == ("running", "j", 4, 1)
    assert [(each.rank, each.state, each.step, each.config_version) for each in status.ranks] == [
        (0, "running", 50, 3),
        (1, "running", 50, 3),
    ]
    assert status.troubles == status.notes == ()
    assert status.to_dict()["healthy"]


def test_a_job_without_an_agent_is_told_of_by_its_metrics() -> None:
    status = status_of(replace(PLAIN, metrics=(metrics(0, measures=Measures(samples_per_second=5.0)), metrics(1))))
    assert (status.state, status.job, status.world_size, status.restart) == ("running", "j", 2, 0)
    assert [(each.state, each.step, each.samples_per_second) for each in status.ranks] == [
        ("running", 40, 5.0),
        ("running", 40, None),
    ]
    assert status.troubles == status.notes == () and status.config.in_force == (3,)


def test_values_of_the_script_in_place_of_the_checkpoints_are_told_and_which_version_a_file_needs() -> None:
    own = {"parallelism.strategy": '"no_shard" (the checkpoint has "full_shard")'}
    rows = metrics(0, config_version=14, not_from_checkpoint=own), metrics(1, config_version=14)
    status = status_of(replace(PLAIN, metrics=rows))
    told = "from the script, and not from the checkpoint that was resumed: parallelism.strategy"
    assert status.notes == (f'{told} "no_shard" (the checkpoint has "full_shard")',)
    assert "version 14 in force, no file (one that is written needs version 15)\n" in words(status)


def test_values_that_a_checkpoint_has_brought_and_the_file_leaves_out_are_told() -> None:
    brought = {"dataloader.num_workers": "6 (the script has 1)", "user.x": "2"}
    config = ElasticConfig(version=3, user={"x": 2})
    status = status_of(replace(PLAIN, metrics=(metrics(0, from_checkpoint=brought), metrics(1)), config=config))
    assert status.notes == (
        "from the checkpoint that was resumed, as the config file leaves it out: dataloader.num_workers 6 (the script "
        "has 1)",
    )


def test_numbers_that_scripts_log_are_told_as_the_mean_of_the_ranks() -> None:
    told = (
        metrics(0, measures=Measures(logged={"loss": 2.0, "acc": 0.5})),
        metrics(1, measures=Measures(logged={"loss": 3.0})),
    )
    status = status_of(replace(PLAIN, metrics=told))
    assert "  logged         loss 2.5, acc 0.5; means of the 2 ranks here\n" in words(status)
    assert status.to_dict()["logged"] == {"loss": 2.5, "acc": 0.5}
    assert [each["logged"] for each in status.to_dict()["ranks"]] == [{"loss": 2.0, "acc": 0.5}, {"loss": 3.0}]
    assert "logged" not in words(status_of(PLAIN))


@pytest.mark.parametrize(
    ("steps", "speed"), [(10.0, "320 samples/s, 20,480 tokens/s"), (0.0, "0 samples/s, 0 tokens/s")]
)
def test_samples_and_tokens_go_at_the_steps_per_second_that_the_agent_has_counted(steps: float, speed: str) -> None:
    measures = Measures(steps_per_second=8.0, samples_per_second=256.0, tokens_per_second=16384.0)
    status = status_of(
        replace(
            WITH_AGENT,
            metrics=(metrics(0, measures=measures), metrics(1, measures=measures)),
            workers=replace(WORKERS, workers=(worker(0, steps_per_second=steps), worker(1))),
        )
    )
    assert f"  speed          {speed} over all ranks\n" in words(status)
    assert status.ranks[0].steps_per_second == status.to_dict()["ranks"][0]["steps_per_second"] == steps
    assert (status.ranks[1].steps_per_second, status.ranks[1].samples_per_second) == (8.0, 256.0)


@pytest.mark.parametrize(
    ("replicas", "micro_batch", "told"),
    [
        (2, 16, "64 samples a step: 2 ranks x 2 micro-batches of 16"),
        (2, 32, "64 samples a step: 2 ranks x 1 micro-batch of 32"),
        (2, 24, "64 samples a step: 2 ranks x 2 micro-batches of at most 24"),
        (1, 16, "64 samples a step: 1 replica x 4 micro-batches of 16"),
        (2, None, "64 samples a step"),
    ],
)
def test_the_batch_and_the_learning_rate_in_use_are_told(replicas: int, micro_batch: int | None, told: str) -> None:
    measures = Measures(
        global_batch_size=64, micro_batch_size=micro_batch, num_replicas=replicas, learning_rate=1e-4 / 3
    )
    text = words(status_of(replace(PLAIN, metrics=(metrics(0, measures=measures), metrics(1, measures=measures)))))
    assert f"  batch          {told}\n  learning rate  3.333e-05\n" in text
    assert "  batch " not in words(status_of(PLAIN)) and "learning rate" not in words(status_of(PLAIN))


def test_numbers_that_are_older_than_the_step_say_of_when_they_are() -> None:
    measures = Measures(learning_rate=0.0018, logged={"loss": 1.82})
    rows = metrics(0, measures=measures), metrics(1, measures=measures)
    status = status_of(replace(WITH_AGENT, metrics=rows))
    assert "  learning rate  0.0018 (as of step 40, 5 s ago)\n" in words(status)
    assert "  logged         loss 1.82; means of the 2 ranks here (as of step 40, 5 s ago)\n" in words(status)
    assert status.to_dict()["ranks"][0]["measured_step"] == 40 and status.to_dict()["ranks"][0]["step"] == 50
    assert "as of" not in words(status_of(replace(WITH_AGENT, metrics=tuple(replace(row, step=50) for row in rows))))
    assert "as of" not in words(status_of(replace(PLAIN, metrics=rows))), "without an agent all is of the metrics"


@pytest.mark.parametrize(
    ("num_workers", "told"),
    [
        ((4, 4), "4 workers on each rank"),
        ((1, 1), "1 worker on each rank"),
        ((2, 4), "2 to 4 workers on a rank"),
        ((None, 3), "3 workers on each rank"),
        ((0, 0), "no workers: each rank loads samples itself"),
        ((None, None), ""),
    ],
)
def test_how_many_workers_load_samples_is_told(num_workers: tuple[int | None, ...], told: str) -> None:
    rows = tuple(metrics(rank, measures=Measures(num_workers=each)) for rank, each in enumerate(num_workers))
    text = words(status_of(replace(PLAIN, metrics=rows)))
    assert (f"  loader         {told}\n" in text) if told else ("loader" not in text)


def test_the_memory_of_a_ranks_child_processes_is_told_apart_from_its_own() -> None:
    seen = tuple(worker(rank, memory_bytes=2**31, children_bytes=2**29) for rank in range(2))
    rows = tuple(metrics(rank, measures=Measures(num_workers=3)) for rank in range(2))
    status = status_of(replace(WITH_AGENT, workers=replace(WORKERS, workers=seen), metrics=rows))
    assert "3 workers on each rank; child processes of the ranks here hold 1.00 GiB\n" in words(status)
    assert [(each.memory_bytes, each.children_bytes) for each in status.ranks] == [(2**31, 2**29)] * 2


def test_the_step_is_that_of_the_newest_record_or_of_the_save_that_ended_training() -> None:
    ended = replace(WITH_AGENT, is_agent_running=False, living=frozenset())
    for at, metrics_step, step in ((NOW - 5, 40, 50), (NOW - 1, 63, 63)):  # the agent's record is two seconds old
        rows = metrics(0, time=at, step=metrics_step), metrics(1, time=at, step=metrics_step)
        status = status_of(replace(ended, metrics=rows))
        assert {each.step for each in status.ranks} == {step} and f", step {step}, " in line_of(status)
    saved = replace(ended, workers=LEFT, events=(told("can-go-on", 84, at=NOW - 1),))
    status = status_of(saved)
    assert status.progress is not None and status.progress.step == 84
    assert ", step 84, can go on from step 84" in line_of(status)


def test_steps_of_ranks_that_an_agent_watches_are_of_one_moment() -> None:
    """Though one of them has written its metrics since the agent looked, and the others have not."""
    rows = metrics(0, time=NOW - 0.1, step=58), metrics(1, time=NOW - 9, step=30)
    status = status_of(replace(WITH_AGENT, metrics=rows))
    assert [each.step for each in status.ranks] == [50, 50]
    assert status.progress is not None and status.progress.step == 58
    silent = replace(WORKERS, time=NOW - 90)
    assert [each.step for each in status_of(replace(WITH_AGENT, workers=silent, metrics=rows)).ranks] == [58, 30]


def test_a_folder_without_any_process_is_empty_and_healthy() -> None:
    status = status_of(RunFiles(path="/run", time=NOW, host=HOST, config=version(1)))
    assert status.state == "empty" and status.troubles == ()
    assert "no process has written anything here" in words(status)


@pytest.mark.parametrize(
    ("files", "state", "troubles"),
    [
        # without an agent
        (replace(PLAIN, living=frozenset()), "ended", []),
        (
            replace(PLAIN, living=frozenset({100})),
            "running",
            ["rank 1 (pid 101) has ended, and others of the job have not"],
        ),
        (
            replace(PLAIN, metrics=(metrics(0), metrics(1, time=NOW - 300))),
            "running",
            ["rank 1 (pid 101) has said nothing for 5 min; it was at step 40"],
        ),
        (
            replace(PLAIN, metrics=(metrics(0, time=NOW - 300, measures=Measures(steps_per_second=0.01)),)),
            "running",
            [],
        ),
        (
            replace(PLAIN, host="elsewhere", living=frozenset(), metrics=(metrics(0), metrics(1, time=NOW - 300))),
            "running",
            ["rank 1 (pid 101) has said nothing for 5 min; it was at step 40"],
        ),
        (replace(PLAIN, host="elsewhere", living=frozenset(), metrics=(metrics(0, time=NOW - 300),)), "ended", []),
        # with one
        (
            replace(WITH_AGENT, workers=replace(WORKERS, time=NOW - 120)),
            "running",
            ["the agent (pid 99) has said nothing of its workers for 2 min: look at its log"],
        ),
        (
            replace(WITH_AGENT, is_agent_running=False, living=frozenset()),
            "ended",
            ["the agent (pid 99 on node-a) has ended without a word, while its workers were running"],
        ),
        (
            replace(WITH_AGENT, is_agent_running=False, living=frozenset({101})),
            "running",
            [
                "the agent (pid 99 on node-a) has ended without a word, while its workers were running",
                "workers of an agent that has ended still run: pid 101; end them before the job is started again",
            ],
        ),
        (
            replace(
                WITH_AGENT,
                is_agent_running=False,
                living=frozenset(),
                workers=replace(
                    WORKERS,
                    workers=(
                        worker(0, state="succeeded", exit_code=0),
                        worker(1, state="failed", exit_code=-9),
                        worker(2, state="failed", exit_code=3),
                        worker(3, state="failed", exit_code=-999),
                        worker(4, state="failed"),
                    ),
                ),
            ),
            "ended",
            [
                "rank 1 (pid 101) has failed: ended by SIGKILL",
                "rank 2 (pid 102) has failed: exit code 3",
                "rank 3 (pid 103) has failed: ended by signal 999",
                "rank 4 (pid 104) has failed: nothing says how",
            ],
        ),
        (
            replace(WITH_AGENT, is_agent_running=False, living=frozenset(), workers=LEFT),
            "ended",
            [
                "rank 0 (pid 100) was told to end (exit code 143), and says nothing of having saved: look at its log",
                "rank 1 (pid 101) was told to end (exit code 143), and says nothing of having saved: look at its log",
            ],
        ),
        (
            replace(WITH_AGENT, workers=replace(WORKERS, workers=(worker(0), worker(1, trouble="it waits for data")))),
            "running",
            ["rank 1 (pid 101): it waits for data"],
        ),
        (
            replace(WITH_AGENT, is_agent_running=False, living=frozenset(), workers=None),
            "ended",
            [],
        ),
        (
            replace(PLAIN, damaged=("workers.json is damaged",)),
            "running",
            ["workers.json is damaged; left out here"],
        ),
    ],
)
def test_what_is_wrong_is_said(files: RunFiles, state: str, troubles: list[str]) -> None:
    status = status_of(files)
    assert (status.state, list(status.troubles)) == (state, troubles)
    assert all(trouble in words(status) for trouble in troubles)


def told(kind: str, step: int, *, at: float, rank: int = 0) -> EventSeen:
    return EventSeen(time=at, source=f"rank {rank}", step=step, kind=kind, text="...")


def test_a_job_that_was_told_to_end_and_saved_can_go_on_and_is_in_no_trouble() -> None:
    events = (told("training-began", 0, at=NOW - 50), told("can-go-on", 84, at=NOW - 5))
    ended = replace(WITH_AGENT, is_agent_running=False, living=frozenset(), workers=LEFT, events=events)
    without_agent = replace(PLAIN, living=frozenset(), events=events)
    for files in (ended, without_agent):
        status = status_of(files)
        assert (status.state, status.troubles, status.goes_on_from) == ("ended", (), 84)
        assert status.notes == ("training was told to end, and can go on from step 84",)
        assert "j: has ended, and can go on from step 84" in words(status) and "in trouble" not in words(status)
        assert "can go on from step 84" in line_of(status)
    one = replace(LEFT, workers=(*LEFT.workers, worker(2, state="failed", exit_code=3)))
    status = status_of(replace(ended, workers=one))
    assert status.troubles == ("rank 2 (pid 102) has failed: exit code 3",) and status.goes_on_from == 84


def test_a_node_whose_workers_have_left_those_of_others_is_in_no_trouble() -> None:
    events = (
        told("training-began", 0, at=NOW - 50),
        told("members-changed", 338, at=NOW - 5),
        EventSeen(time=NOW - 4, source="agent", kind="left", text="..."),
    )
    batch = Measures(global_batch_size=32, micro_batch_size=8, num_replicas=2)
    rows = metrics(0, measures=batch), metrics(1, measures=batch)
    after = replace(PLAN, nodes=PLAN.nodes[1:], version=5)
    left = replace(WITH_AGENT, living=frozenset(), workers=LEFT, events=events, metrics=rows, membership=after)
    for is_agent_running in (True, False):
        status = status_of(replace(left, is_agent_running=is_agent_running))
        assert (status.troubles, status.left_at, status.goes_on_from) == ((), 338, None)
        assert status.notes == ("its workers have left those of other nodes, which go on with the training",)
        assert words(status).startswith("j: has left the job at step 338\n")
        assert "32 samples a step: 2 ranks x 2 micro-batches of 8" in words(status)
        assert line_of(status).startswith("j: has left the job, ") and "step 338" in line_of(status)
    for more in (told("training-began", 338, at=NOW - 3), told("told-to-end", 338, at=NOW - 3)):
        again = status_of(replace(left, is_agent_running=False, events=(*events, more)))
        assert again.left_at is None and len(again.troubles) == 2


def test_a_job_whose_workers_have_saved_and_ended_is_ending_until_its_agent_has() -> None:
    saved = told("can-go-on", 84, at=NOW - 5)
    leaving = EventSeen(time=NOW - 6, source="agent", kind="leaving", text="...")
    over = replace(WITH_AGENT, living=frozenset(), workers=LEFT)
    status = status_of(replace(over, events=(leaving, saved)))
    assert (status.state, status.is_ending, status.troubles, status.goes_on_from) == ("running", True, (), 84)
    assert words(status).startswith("j: ending, and can go on from step 84\n")
    assert line_of(status).startswith("j: ending, step 84, ")
    between = status_of(replace(over, events=(saved,)))  # the workers are started anew, as nodes come or go
    assert (between.state, between.is_ending, between.troubles, between.goes_on_from) == ("running", False, (), None)
    begun = told("training-began", 84, at=NOW - 3)
    again = status_of(replace(WITH_AGENT, events=(leaving, saved, begun)))
    assert (again.is_ending, again.troubles, again.goes_on_from) == (False, (), None)
    assert "2 ranks of 4 here" in words(again)


def test_a_job_that_a_person_has_ended_with_ctrl_c_is_in_no_trouble() -> None:
    ended = replace(WORKERS, workers=tuple(worker(rank, state="failed", exit_code=-2) for rank in range(2)))
    status = status_of(replace(WITH_AGENT, is_agent_running=False, living=frozenset(), workers=ended))
    assert (status.state, status.troubles) == ("ended", ())
    assert status.notes == ("its ranks were ended by SIGINT (Ctrl-C)",)
    one = replace(ended, workers=(*ended.workers, worker(2, state="failed", exit_code=-9)))
    status = status_of(replace(WITH_AGENT, is_agent_running=False, living=frozenset(), workers=one))
    assert status.troubles == ("rank 2 (pid 102) has failed: ended by SIGKILL",)


@pytest.mark.parametrize(
    "events",
    [
        (),
        (told("can-go-on", 84, at=NOW - 2000),),  # of the agent before
        (told("can-go-on", 84, at=NOW - 50), told("training-began", 84, at=NOW - 40)),
        (told("can-go-on", 84, at=NOW - 50), told("told-to-end", 90, at=NOW - 40, rank=1)),
    ],
)
def test_a_job_of_which_nothing_says_that_it_has_saved_is_not_said_to_go_on(events: tuple[EventSeen, ...]) -> None:
    ended = replace(WITH_AGENT, is_agent_running=False, living=frozenset(), workers=LEFT, events=events)
    status = status_of(ended)
    assert status.goes_on_from is None and len(status.troubles) == 2


@pytest.mark.parametrize(
    ("changes", "trouble", "note"),
    [
        ({"config": version(3)}, "", ""),
        ({"config": None}, "", ""),
        ({"config": version(4), "config_time": NOW - 5}, "", "version 4 has been in the config file for 5 s"),
        ({"config": version(4), "config_time": NOW - 90}, "for 1 min; version 3 is in force; the log of rank 0", ""),
        ({"config": version(4, at_step=60), "config_time": NOW - 90}, "", "waits for step 60"),
        ({"config": version(4, at_step=30), "config_time": NOW - 90}, "the log of rank 0 says why", ""),
        ({"config": version(2)}, "which is not above version 3 in force: ranks refuse it; give it version 4", ""),
        ({"config_refusal": "typo"}, "the config file is refused: typo", ""),
        ({"config_refusal": "typo", "living": frozenset()}, "the config file is refused: typo", "nothing says how"),
        ({"config": version(4), "config_time": 0.0, "living": frozenset()}, "", "nothing says how"),
        ({"metrics": (metrics(0), metrics(1, config_version=2))}, "", "different versions of the config: 2, 3"),
    ],
)
def test_the_config_in_force_is_compared_with_the_file(changes: dict[str, Any], trouble: str, note: str) -> None:
    status = status_of(replace(PLAIN, **changes))
    for found, wanted in ((status.troubles, trouble), (status.notes, note)):
        assert len(found) == bool(wanted) and all(wanted in each for each in found)


# ---- what is old ----


def test_metrics_of_an_earlier_start_are_left_out_and_named() -> None:
    old = [metrics(rank, generation=0, pid=50 + rank, time=NOW - 500, world_size=4, step=999) for rank in (2, 3)]
    status = status_of(replace(PLAIN, metrics=(*PLAIN.metrics, *old)))
    assert [each.rank for each in status.ranks] == [0, 1]
    assert status.notes == ("metrics of rank 2, 3 are of an earlier start, and left out",) and status.troubles == ()


def test_of_an_ended_job_the_newest_start_is_told_of() -> None:
    old = metrics(1, generation=0, time=NOW - 500)
    status = status_of(replace(PLAIN, living=frozenset(), metrics=(metrics(0, generation=1, step=7), old)))
    assert [(each.rank, each.step, each.state) for each in status.ranks] == [(0, 7, "ended")]


def test_a_start_that_runs_counts_even_where_a_clock_says_that_another_is_newer() -> None:
    ahead = metrics(0, generation=5, time=NOW + 9999, pid=3)
    status = status_of(replace(PLAIN, metrics=(ahead, metrics(1)), living=frozenset({101})))
    assert [each.rank for each in status.ranks] == [1]


def test_metrics_of_a_worker_that_was_replaced_are_left_out() -> None:
    status = status_of(replace(WITH_AGENT, metrics=(metrics(0), metrics(1, pid=55, step=999))))
    assert [each.config_version for each in status.ranks] == [3, None]
    assert status.notes == ("metrics of rank 1 are of an earlier start, and left out",)


def test_metrics_are_a_workers_by_its_process_though_it_had_another_rank_when_it_wrote_them() -> None:
    told = [metrics(rank, measures=Measures(samples_per_second=speed)) for rank, speed in enumerate((5.0, 7.0))]
    now = (worker(1, pid=100, local_rank=0, seat=0), worker(0, pid=101, local_rank=1, seat=1))
    status = status_of(replace(WITH_AGENT, metrics=tuple(told), workers=replace(WORKERS, workers=now)))
    assert [(each.rank, each.pid, each.samples_per_second) for each in status.ranks] == [(0, 101, 7.0), (1, 100, 5.0)]
    gone = replace(WORKERS, workers=(worker(0, pid=101, local_rank=1, seat=1),))
    left = status_of(replace(WITH_AGENT, metrics=tuple(told), workers=gone, living=frozenset({101})))
    assert [(each.rank, each.pid, each.samples_per_second) for each in left.ranks] == [(0, 101, 7.0)]


def test_metrics_of_a_process_that_a_worker_has_started_are_the_workers() -> None:
    files = replace(WITH_AGENT, metrics=(metrics(0, pid=555),), living=frozenset({100, 101, 555}))
    assert [each.config_version for each in status_of(files).ranks] == [3, None]


def test_records_from_before_this_agent_count_for_nothing() -> None:
    files = replace(WITH_AGENT, agent=replace(AGENT, time=NOW - 1), membership=None)
    status = status_of(files)
    assert status.ranks == () and status.state == "running" and status.troubles == ()


def test_where_the_agent_has_members_change_by_a_restart_it_is_said() -> None:
    plan = replace(PLAN, nodes=(*PLAN.nodes, NodeShare(node_id="n9", host="other", first_rank=9, num_workers=1)))
    how = "nodes join and leave by a restart of all workers: --members=restart asks for that"
    told = EventSeen(time=NOW - 9, source="agent", kind="members", text=how)
    files = replace(WITH_AGENT, membership=plan, events=(told,))
    note = "as nodes join or leave, all workers are started anew: --members=restart asks for that"
    assert note in status_of(files).notes
    assert note not in status_of(replace(files, events=(replace(told, time=NOW - 5000),))).notes, (
        "of an agent before it"
    )


def test_who_waits_to_join_is_said_while_the_job_runs() -> None:
    words = "n2 waits as a spare: it has 1 rank"
    files = replace(WITH_AGENT, workers=replace(WORKERS, waiting=words))
    assert status_of(files).notes == (words,)
    spare = replace(files, workers=replace(WORKERS, waiting=words, workers=()), metrics=(), living=frozenset())
    status = status_of(spare)
    assert (status.state, status.notes, status.troubles, status.ranks) == ("running", (words,), (), ())
    assert words not in status_of(replace(spare, is_agent_running=False)).notes


def test_a_job_that_runs_without_an_agent_where_one_has_ended_is_told_of_without_it() -> None:
    done = replace(WORKERS, time=NOW - 500, workers=(worker(0, state="succeeded", pid=7),))
    status = status_of(replace(WITH_AGENT, is_agent_running=False, workers=done))
    assert status.agent is None and status.membership is None
    assert [each.state for each in status.ranks] == ["running", "running"] and status.troubles == ()


# ---- the words ----


def test_the_words_tell_of_nodes_agent_speed_and_events_and_cannot_steer_a_terminal() -> None:
    event = EventSeen(time=NOW, source="rank 1", step=3, kind="k", text="two\nlines\x1b[2J")
    status = status_of(
        replace(
            WITH_AGENT,
            agent=replace(AGENT, job="größe\x1b[2J", log_folder="/logs"),
            metrics=(metrics(0, measures=Measures(samples_per_second=1234.5, memory_bytes=2**31)),),
            events=(event,) * 9,
        )
    )
    text = words(status)
    assert all(line.isprintable() for line in text.splitlines())
    for part in (
        "größe [2J: running, 2 ranks of 4 here",
        "n0, pid 99 on node-a, elastic_ext 1, for 16 min",
        "/logs",
        "n0 on node-a (ranks 0 to 1), n1 on node-b (ranks 2 to 3); version 4",
        "n1 joined",
        "1234 samples/s",
        "2.00 GiB",
        "version 3 in force, no file",
        "rank 1, step 3: two lines [2J",
    ):
        assert part in text
    assert text.count("rank 1, step 3") == 5
    assert line_of(status).startswith("größe [2J: running, 2 ranks, step 50  [/run]")


def test_what_all_ranks_tell_of_a_step_in_the_same_words_is_one_line() -> None:
    applied = [
        EventSeen(time=NOW + step, source=f"rank {rank}", step=step, kind="config-applied", text="version 7")
        for step in (3, 4)
        for rank in range(4)
    ]
    own = EventSeen(time=NOW + 9, source="rank 2", step=4, kind="config-applied", text="version 7, for itself")
    lines = (
        words(status_of(replace(WITH_AGENT, events=(*applied, own, own)))).partition("last events\n")[2].splitlines()
    )
    assert [line.split("  ")[-1] for line in lines] == [
        "4 ranks, step 3: version 7",
        "4 ranks, step 4: version 7",
        "rank 2, step 4: version 7, for itself",
        "rank 2, step 4: version 7, for itself",
    ]


def test_the_line_of_a_job_that_has_ended_says_when_it_was_heard_of_and_its_folder_is_whole() -> None:
    path = "/home/me/.cache/elastic_ext/nano/nodes/node-a-2"
    died = replace(WITH_AGENT, path=path, is_agent_running=False, living=frozenset())
    told = line_of(status_of(replace(died, time=NOW + 7200)))
    assert told.startswith("j: ended, last heard of 2 h ago, step 50, trouble: ") and told.endswith(f"  [{path}]")
    narrow = line_of(status_of(replace(died, time=NOW + 7200)), 80)
    assert len(narrow) == 80 and narrow.endswith(f"...  [{path}]")


some_events = st.builds(
    EventSeen,
    time=st.floats(allow_nan=False, allow_infinity=False),
    source=st.text(),
    step=st.none() | st.integers(),
    kind=st.text(),
    text=st.text(),
)
numbers = st.floats(allow_nan=False, allow_infinity=False)
some_metrics = st.builds(
    RankMetrics,
    time=numbers,
    job=st.text(max_size=3),
    generation=st.integers(-1, 2),
    rank=st.integers(-1, 3),
    world_size=st.integers(-1, 4),
    host=st.sampled_from([HOST, "b"]),
    pid=st.sampled_from([1, 100, 101]),
    step=st.integers(),
    config_version=st.integers(-1, 4),
    config_revision=st.integers(),
    agree_every_steps=st.integers(),
    measures=st.builds(
        Measures,
        steps_per_second=st.none() | numbers,
        memory_bytes=st.none() | st.integers(),
        num_epoch_steps_left=st.none() | st.integers(),
        checkpoint_time=st.none() | numbers,
    ),
)
some_workers = st.builds(
    WorkersRecord,
    time=numbers,
    restart=st.integers(),
    membership_version=st.integers(),
    workers=st.lists(
        st.builds(
            WorkerSeen,
            local_rank=st.integers(),
            rank=st.integers(-1, 3),
            pid=st.sampled_from([1, 100, 101]),
            start_ticks=st.integers(),
            state=st.sampled_from(["running", "succeeded", "failed"]),
            exit_code=st.none() | st.integers(),
            activity=st.none() | st.text(),
            activity_seconds=st.none() | numbers,
            cpu_percent=st.none() | numbers,
        ),
        max_size=4,
    ).map(tuple),
)
some_files = st.builds(
    RunFiles,
    path=st.text(),
    time=st.floats(0, 1e11),  # which is this machine's own clock
    host=st.sampled_from([HOST, "b"]),
    agent=st.none() | st.builds(replace, st.just(AGENT), time=numbers, host=st.sampled_from([HOST, "b"])),
    is_agent_running=st.booleans(),
    membership=st.none() | st.just(PLAN) | st.just(replace(PLAN, nodes=())),
    workers=st.none() | some_workers,
    metrics=st.lists(some_metrics, max_size=4).map(tuple),
    living=st.frozensets(st.sampled_from([1, 100, 101])),
    config=st.none() | st.integers(0, 5).map(version),
    config_refusal=st.sampled_from(["", "no"]),
    config_time=st.none() | numbers,
    events=st.lists(some_events, max_size=2).map(tuple),
)


@given(files=some_files)
@settings(deadline=None)
def test_whatever_the_records_say_there_is_a_status_in_words_and_as_json(files: RunFiles) -> None:
    if files.agent is None:
        files = replace(files, is_agent_running=False)
    status = status_of(files)
    assert json.loads(json.dumps(status.to_dict(), allow_nan=False))["healthy"] == (not status.troubles)
    assert all(line.isprintable() for line in words(status).split("\n")) and line_of(status).isprintable()
    assert status_of(files) == status


# ---- the files ----


@contextmanager
def a_process() -> Iterator[ProcessIdentity]:
    """One that lives until the ``with`` ends."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
        process = process_of(child.pid)
        assert process is not None and child.stdin is not None
        yield process
        child.stdin.close()
        child.wait(END_SECONDS)


def write_all(
    folder: Path,
    process: ProcessIdentity,
    *,
    job: str = "j",
    since: float = 100.0,
    host: str = socket.gethostname(),
    age: float = 0.0,
) -> None:
    now = time.time() - age
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"version": 3}')
    agent = replace(
        AGENT,
        job=job,
        host=host,
        pid=process.pid,
        start_ticks=process.start_ticks,
        time=now - since,
        config_file=str(folder / "config.json"),
    )
    (folder / AGENT_FILE).write_text(agent.to_json())
    (folder / MEMBERSHIP_FILE).write_text(PLAN.to_json())
    seen = worker(0, pid=process.pid, start_ticks=process.start_ticks, step=9)
    (folder / WORKERS_FILE).write_text(replace(WORKERS, time=now, workers=(seen,)).to_json())
    (folder / "metrics-0.json").write_text(metrics(0, time=now, host=host, pid=process.pid, job=job).to_json())
    event = JobEvent(time=now, generation=0, rank=0, step=4, kind="config-applied", text="version 3")
    (folder / "events-0.jsonl").write_text(event.to_json() + "\n")
    (folder / EVENTS_FILE).write_text(json.dumps({"time": now - 1, "kind": "started", "text": "by hand"}) + "\n")


def read(folder: Path) -> RunFiles:
    return read_run_directory(folder, now=time.time(), host=socket.gethostname())


def test_files_are_read_and_processes_told_alive_from_dead(tmp_path: Path) -> None:
    with a_process() as process:
        write_all(tmp_path, process)
        files = read(tmp_path)
        assert files.is_agent_running and files.living == {process.pid} and files.damaged == ()
        assert [(event.source, event.step) for event in files.events] == [("agent", None), ("rank 0", 4)]
        assert files.config is not None and files.config.version == 3 and files.config_time is not None
        assert status_of(files).troubles == ()
    files = read(tmp_path)
    assert not files.is_agent_running and files.living == frozenset()
    assert status_of(files).state == "ended" and len(status_of(files).troubles) == 1


def test_workers_are_told_of_also_once_the_machines_clock_was_put_back(tmp_path: Path) -> None:
    with a_process() as process:
        write_all(tmp_path, process, since=-3600.0)  # the agent started before that, by the clock of then
        status = status_of(read(tmp_path))
    assert [each.step for each in status.ranks] == [9] and status.troubles == ()


def test_a_pid_that_another_process_has_by_now_is_not_alive(tmp_path: Path) -> None:
    me = this_process()
    write_all(tmp_path, replace(me, start_ticks=me.start_ticks + 1))
    files = read(tmp_path)
    assert not files.is_agent_running and files.living == frozenset()
    (tmp_path / WORKERS_FILE).unlink()
    assert read(tmp_path).living == {me.pid}  # the metrics are of now
    long_ago = metrics(0, time=1000.0, host=socket.gethostname(), pid=me.pid)  # before this process was started
    (tmp_path / "metrics-0.json").write_text(long_ago.to_json())
    assert read(tmp_path).living == frozenset()


def test_an_agent_on_another_machine_runs_as_long_as_it_holds_its_folder(tmp_path: Path) -> None:
    write_all(tmp_path, this_process())
    (tmp_path / AGENT_FILE).write_text(replace(AGENT, host="node-b").to_json())
    assert not read(tmp_path).is_agent_running
    folders = NodeFolders.make(tmp_path, is_given=True)
    try:
        assert read(tmp_path).is_agent_running
    finally:
        folders.close()


def test_only_the_last_events_are_read_a_torn_one_is_still_being_written_and_damage_is_said(tmp_path: Path) -> None:
    with open(tmp_path / "events-3.jsonl", "wb") as file:
        for number in range(5000):
            event = JobEvent(time=number, generation=0, rank=3, step=number, kind="k", text="x" * (number % 90))
            file.write(event.to_json().encode() + b"\n")
        file.write(b'{"half\n[]\n\xff\xfe\n{"time": "x", "kind": "k", "text": "t"}\n')
        event = JobEvent(time=6000, generation=0, rank=3, step=6000, kind="k", text="last")
        file.write(event.to_json().encode() + b'\n{"time": 70')
    files = read(tmp_path)
    assert [event.step for event in files.events] == [*range(4981, 5000), 6000]
    (damaged,) = files.damaged
    assert damaged.startswith("events-3.jsonl has 4 damaged lines of the last ")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"{}", b'{"time": NaN}', b"[" * 100_000, b" " * (5 << 20)])
@pytest.mark.parametrize("name", [AGENT_FILE, MEMBERSHIP_FILE, WORKERS_FILE, "metrics-0.json"])
def test_a_damaged_file_is_named_and_the_others_are_told_of(tmp_path: Path, name: str, data: bytes) -> None:
    write_all(tmp_path, this_process())
    (tmp_path / name).write_bytes(data)
    files = read(tmp_path)
    (damaged,) = files.damaged
    assert damaged.startswith(f"{name} is damaged, or another version's: ") and len(damaged) <= 300
    assert status_of(files).state == "running" and f"{damaged}; left out here" in status_of(files).troubles


def test_what_is_no_file_is_named_and_waited_for_never(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics-0.json")
    (tmp_path / WORKERS_FILE).mkdir()
    os.mkfifo(tmp_path / "events-0.jsonl")
    (tmp_path / AGENT_FILE).symlink_to(AGENT_FILE)
    (tmp_path / "config.json").mkdir()
    files = read(tmp_path)
    assert sorted(each.split()[0] for each in files.damaged) == sorted(
        [AGENT_FILE, "events-0.jsonl", "metrics-0.json", WORKERS_FILE]
    )
    assert "cannot be read" in files.config_refusal


@given(
    contents=st.dictionaries(
        st.sampled_from([*RECORDS, "metrics-0.json", "events-0.jsonl", "config.json", *PROFILES]),
        st.binary(max_size=60),
    )
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_lies_in_the_files_there_is_a_status(tmp_path: Path, contents: dict[str, bytes]) -> None:
    for each in tmp_path.iterdir():
        each.unlink()
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    assert words(status_of(read(tmp_path)))


# ---- the command ----


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where run directories are by default in these tests."""
    monkeypatch.delenv("ELASTIC_EXT_RUN_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "cache" / "elastic_ext"


def status_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    capsys.readouterr()
    status = main(["status", "--json", *arguments])
    return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_exit_status_says_whether_a_job_is_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    with a_process() as process:
        write_all(folder, process)
        assert main(["status", str(folder)]) == 0
        assert capsys.readouterr().out.startswith("j: running, 1 rank of 4 here\n")
        status, (found,) = status_json(capsys, str(folder))
        assert status == 0 and found["healthy"] and found["ranks"][0]["step"] == 9
        monkeypatch.setenv("ELASTIC_EXT_RUN_DIR", str(folder))
        assert status_json(capsys) == (0, [found | {"time": _any(), "ranks": _any()}])
    assert main(["status", str(folder)]) == 1
    assert "has ended without a word" in capsys.readouterr().out


def test_a_job_is_found_by_its_name_with_all_its_agents_on_this_machine(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with a_process() as process:
        here = socket.gethostname()
        for name, job in ((f"j/nodes/{here}-2", "j"), (f"j/nodes/{here}", "j"), ("j-3", "j-3"), ("other", "other")):
            write_all(cache / name, process, job=job)
        write_all(cache / "j" / "nodes" / "elsewhere", process, job="j", host="elsewhere")
        status, found = status_json(capsys, "--job", "j")
        assert status == 0 and {Path(each["run_dir"]).name for each in found} == {here, f"{here}-2"}
        assert status_json(capsys, "--job", "j-3")[1][0]["job"] == "j-3"
        assert {each["job"] for each in status_json(capsys)[1]} == {"j", "j-3", "other"}
        assert main(["status", "--job", "k"]) == 2
        assert "job 'k' has no run directory" in (err := capsys.readouterr().err) and "other" in err


def test_without_an_argument_the_only_job_that_runs_is_shown_in_full_and_others_on_a_line_each(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status"]) == 2
    assert f"no job has a run directory in {cache}" in capsys.readouterr().err
    write_all(cache / "died", replace(this_process(), start_ticks=1), job="died")
    (cache / "nothing of ours").mkdir()
    assert main(["status"]) == 1
    assert "run directory" in capsys.readouterr().out
    with a_process() as process:
        write_all(cache / "runs", process, job="runs")
        assert main(["status"]) == 0  # what has ended counts no more
        full, _, others = capsys.readouterr().out.partition("\n\n")
        assert full.startswith("runs: running, 1 rank of 4 here\n  run directory ") and "\n  ranks\n" in full
        starts = [line.partition(":")[0] for line in others.splitlines()]
        assert starts == ["others, which do not run", "died", "one of them in full"]
        (cache / "runs" / WORKERS_FILE).write_bytes(b"{")
        assert main(["status"]) == 1
        assert [each["job"] for each in status_json(capsys)[1]] == ["runs", "died"]
        write_all(cache / "runs too", process, job="runs too")
        assert main(["status"]) == 1
        starts = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
        assert sorted(starts[:2]) == ["runs", "runs too"] and starts[2:] == ["died", "one of them in full"]


def test_of_jobs_that_have_ended_the_newest_are_shown_and_how_to_see_all(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for hours in range(6):
        write_all(cache / f"{hours} h", replace(this_process(), start_ticks=1), job=f"{hours} h", age=hours * 3600.0)
    with a_process() as process:
        write_all(cache / "runs", process, job="runs")
        assert main(["status"]) == 0
        lines = capsys.readouterr().out.partition("\n\n")[2].splitlines()
        assert [line.partition(":")[0] for line in lines[1:-1]] == ["0 h", "1 h", "2 h"]
        assert "2 h: ended, last heard of 2 h ago, " in lines[3]
        assert lines[-1].endswith("or --job NAME; 3 older ones too: elastic-ext status --all")
        assert main(["status", "--all"]) == 0
        lines = capsys.readouterr().out.partition("\n\n")[2].splitlines()
        assert len(lines) == 8 and lines[-1].endswith("or --job NAME")
        assert len(status_json(capsys)[1]) == 7


@pytest.mark.parametrize("what", ["missing", "a file", "empty"])
def test_what_is_no_run_directory_is_refused(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x"
    if what == "a file":
        path.write_bytes(b"")
    elif what == "empty":
        path.mkdir()
    assert main(["status", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"elastic-ext: {path} ") and err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["a", "--job", "b"], ["--what"], ["a", "b"], [""], ["~nobody-is-called-so/x"]])
def test_arguments_that_make_no_sense_exit_2_with_the_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["status", *arguments])


@pytest.mark.parametrize("arguments", [["status"], ["status", "--json"], ["config", "history"], ["doctor"]])
def test_an_output_that_cannot_be_written_is_said_and_one_that_is_closed_is_none(
    arguments: list[str], tmp_path: Path
) -> None:
    write_all(tmp_path, this_process())
    command = [sys.executable, "-m", "elastic_ext.cli", *arguments]
    environ = {**os.environ, "ELASTIC_EXT_RUN_DIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=environ, stdout=full, stderr=subprocess.PIPE, text=True, timeout=240)
    assert done.returncode == 1
    assert done.stderr == "elastic-ext: the output cannot be written: No space left on device\n"
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(shell, env=environ, stderr=subprocess.PIPE, text=True, timeout=240)
    assert done.returncode in (0, 1) and done.stderr == ""


def test_whoever_reads_may_stop_and_nothing_heavy_is_imported(cache: Path) -> None:
    for number in range(100):
        write_all(cache / f"j{number}", this_process(), job=f"j{number}")
    script = (
        "import sys\nfrom elastic_ext.cli import main\nstatus = main(['status', '--json'])\n"
        "heavy = {'torch', 'numpy', 'grpc', 'watchdog', 'psutil', 'accelerate'} & set(sys.modules)\n"
        "assert not heavy, heavy\nsys.exit(status)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
    ) as reader:
        assert reader.stdout is not None and reader.stderr is not None
        assert json.loads(reader.stdout.readline())["healthy"]
        reader.stdout.close()
        assert reader.stderr.read() == "" and reader.wait(END_SECONDS) == 141


class _any:
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def test_a_status_is_what_an_agent_can_answer_with(tmp_path: Path) -> None:
    write_all(tmp_path, this_process())
    status = status_of(read(tmp_path))
    assert isinstance(status, NodeStatus)
    assert json.loads(json.dumps(status.to_dict()))["agent"]["node_id"] == "n0"
