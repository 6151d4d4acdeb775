"""Where the time goes, as `elastic-ext status` says it: by the files of a run directory alone."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_ext.agent.status.files import read_run_directory
from elastic_ext.agent.status.status import NodeStatus, status_of
from elastic_ext.agent.status.text import words
from elastic_ext.cli import main
from elastic_ext.profile.phases import Phase
from elastic_ext.ranks.processes import this_process
from elastic_ext.records.measures import Measures
from elastic_ext.records.metrics import RankMetrics
from elastic_ext.records.run_dir import RunDirectory
from tests.support.nodes import TORCHRUN, Node, nodes, until
from tests.support.profiles import calibration, census, made_window

HOST = socket.gethostname()
STEP = {Phase.DATA: 0.004, Phase.FORWARD: 0.002, Phase.BACKWARD: 0.003, Phase.OPTIMIZER: 0.001}
SLOW = {**STEP, Phase.FORWARD: 0.014}
WAITING = {**STEP, Phase.COMMUNICATION: 0.012}


def write_metrics(folder: Path, rank: int, *, world_size: int, **values: Any) -> None:
    usual: dict[str, Any] = {"shares": {"data": 0.4, "forward": 0.2, "backward": 0.3, "optimizer": 0.1}}
    usual |= {"samples_per_second": 100.0, "tokens_per_second": 1.3e6, "step_seconds": 0.01}
    metrics = RankMetrics(
        time=time.time(),
        job="j",
        generation=0,
        rank=rank,
        world_size=world_size,
        host=HOST,
        pid=this_process().pid,
        step=40,
        config_version=1,
        config_revision=0,
        agree_every_steps=1,
        measures=Measures(**usual | values),
    )
    RunDirectory(folder, seat=rank).write_metrics(metrics)


def write_windows(folder: Path, rank: int, step: Mapping[Phase, float], num_windows: int = 3, /, **values: Any) -> None:
    for number in range(num_windows):
        window = made_window(step, rank=rank, **values)
        RunDirectory(folder, seat=rank).add_window(replace(window, begin=100.0 + number, end=101.0 + number))


def seen(folder: Path) -> NodeStatus:
    return status_of(read_run_directory(folder, now=time.time(), host=HOST))


def test_what_holds_training_up_is_said_for_the_job_and_what_takes_most_for_each_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        write_metrics(tmp_path, rank, world_size=2, num_workers=1, shares={"other": 0.36, "data": 0.34})
        write_windows(tmp_path, rank, STEP, world_size=2)
    assert main(["status", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "speed          100 samples/s, 1.3M tokens/s over all ranks\n" in text
    told = (
        "profile        data-bound: 40% of training's time goes to waiting for samples on all ranks; 2 workers deliver"
    )
    assert told in text and re.search(r"profile  .*\(over steps \d+ to \d+, \d+ s\)\n", text)
    assert text.count("data 40%, backward 30%") == 2, "the last window's shares, which metrics have, are of less time"
    assert "slow  " not in text
    assert main(["status", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["profile"]["verdict"]["kind"] == "data" and found["profile"]["stragglers"] == []
    assert found["profile"]["shares"]["0"] == {"data": 0.4, "forward": 0.2, "backward": 0.3, "optimizer": 0.1}
    assert found["ranks"][0]["shares"]["data"] == 0.34 and found["ranks"][0]["step_seconds"] == 0.01


def test_the_shares_of_a_rank_are_those_that_the_sentence_is_made_of(tmp_path: Path) -> None:
    write_metrics(tmp_path, 0, world_size=1)
    write_windows(tmp_path, 0, STEP, besides={Phase.OUTSIDE: 0.9, Phase.CHECKPOINT: 0.25})
    text = words(seen(tmp_path))
    assert "data-bound: 32% of training's time goes to waiting for samples" in text
    assert "  data 32%, backward 24%  " in text


def test_a_rank_that_was_slow_three_times_is_named(tmp_path: Path) -> None:
    for rank in range(3):
        write_metrics(tmp_path, rank, world_size=3)
        write_windows(tmp_path, rank, SLOW if rank == 1 else WAITING, world_size=3)
    status = seen(tmp_path)
    assert status.profile is not None
    (slow,) = status.profile.stragglers
    assert (slow.rank, slow.host, slow.num_rounds) == (1, HOST, 3)
    assert status.profile.verdict.kind == "straggler" and status.profile.verdict.ranks == (1,)
    assert f"slow           rank 1 on {HOST} takes 2.20 times as long as is usual" in words(status)
    (tmp_path / "profile-1.jsonl").unlink()
    write_windows(tmp_path, 1, SLOW, 2, world_size=3)
    assert seen(tmp_path).profile.stragglers == ()  # type: ignore[union-attr]


def test_with_ranks_elsewhere_it_is_said_that_they_are_not_looked_at(tmp_path: Path) -> None:
    write_metrics(tmp_path, 0, world_size=4)
    write_windows(tmp_path, 0, STEP, world_size=4)
    assert "(3 ranks more not looked at)" in words(seen(tmp_path))


def test_arithmetic_is_compared_with_the_devices_best(tmp_path: Path) -> None:
    write_metrics(tmp_path, 0, world_size=1)
    write_windows(tmp_path, 0, STEP, num_samples=1600)
    directory = RunDirectory(tmp_path, seat=0)
    directory.write_census(census(num_flops=5 * 10**8))
    directory.write_calibration(replace(calibration(), host=HOST))
    assert "samples/s, 1.3M tokens/s over all ranks; MFU 50%\n" in words(seen(tmp_path))


def test_without_profiles_or_of_ranks_that_are_gone_nothing_is_said(tmp_path: Path) -> None:
    write_metrics(tmp_path, 0, world_size=1, shares={})
    assert seen(tmp_path).profile is None and "profile " not in words(seen(tmp_path))
    write_windows(tmp_path, 5, STEP)
    assert seen(tmp_path).profile is None


windows = st.builds(
    made_window,
    st.dictionaries(st.sampled_from(Phase), st.floats(0, 1e300), max_size=4),
    rank=st.just(0),
    num_steps=st.integers(0, 1 << 70),
    num_samples=st.integers(0, 1 << 70),
    num_tokens=st.integers(0, 1 << 70),
    world_size=st.integers(-1, 3),
    restart=st.integers(-1, 2),
    config_version=st.integers(-1, 3),
    step_seconds=st.lists(st.floats(0, 1e300), max_size=5).map(tuple),
)


@given(rows=st.lists(windows, max_size=5), shares=st.dictionaries(st.text(max_size=3), st.floats(0, 1), max_size=3))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_the_profiles_say_there_is_a_status(tmp_path: Path, rows: list[Any], shares: dict[str, float]) -> None:
    for each in tmp_path.iterdir():
        each.unlink()
    write_metrics(tmp_path, 0, world_size=1, shares=shares, num_micro_steps=3, num_replicas=1)
    directory = RunDirectory(tmp_path, seat=0)
    directory.write_census(census(num_flops=1))
    directory.write_calibration(replace(calibration(), host=HOST))
    for window in rows:
        directory.add_window(window)
    status = seen(tmp_path)
    assert all(line.isprintable() for line in words(status).split("\n"))
    json.dumps(status.to_dict(), allow_nan=False)


def slow_ranks(folder: Path) -> list[int]:
    profile = seen(folder).profile
    return [] if profile is None else [each.rank for each in profile.stragglers]


@pytest.mark.slow
def test_under_plain_torchrun_the_log_and_the_files_name_the_slow_rank(tmp_path: Path) -> None:
    launch = ["--standalone", "--nproc-per-node=2", "-m", "tests.support.slow_job"]
    environ = {"ELASTIC_EXT_PROFILE_SECONDS": "4"}
    with nodes(Node(tmp_path, launch, launcher=TORCHRUN, environ=environ)) as (node,):
        line = node.wait_for(r"^profile: step", times=2)
        assert until(lambda: slow_ranks(tmp_path) or None) == [1]
        node.send(signal.SIGTERM)
        node.end()
    assert "straggler: rank 1 on" in line and "of the excess is in forward" in line
