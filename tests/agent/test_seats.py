"""Seats: workers whose ranks have changed write their own files still, and who reads those names the right ranks."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_ext.agent.arguments import OF_AGENT
from elastic_ext.agent.master.report import NodeReporter
from elastic_ext.agent.status.files import RunFiles, read_run_directory
from elastic_ext.agent.status.status import status_of
from elastic_ext.agent.workers.hangs import HangLimits
from elastic_ext.agent.workers.monitor import Monitor, Watched, WorkersLook
from elastic_ext.agent.workers.stacks import capture
from elastic_ext.agent.workers.workers import free_seats
from elastic_ext.master.wire import master_pb2 as pb
from elastic_ext.ranks.heartbeat import HeartbeatReading, heartbeat_file, read_heartbeat
from elastic_ext.ranks.processes import process_of
from elastic_ext.records.agent import WORKERS_FILE, Since
from elastic_ext.records.metrics import RankMetrics, StepWindow
from elastic_ext.records.run_dir import GivenSeat
from elastic_ext.report.load import find_places, gather
from tests.support.beating import until
from tests.support.ranks import RankPool
from tests.support.training import make_data, make_model, trainer_of
from tests.support.worlds import Former, Workers, agents_store

WORLDS: list[Workers] = [(0, 1), (1, 0)]
"""Both workers begin in a world of their own, as rank 0 of 1."""
STEPS = 3
"""In each world; in the last one some more, and the worker in seat 0 stays in one of those."""
MOST_BYTES = 1 << 20


# --- which seats there are ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "taken", "seats"),
    [
        ([0, 1], (), [0, 1]),
        ([2, 3], (), [2, 3]),  # of the second node
        ([2], (0, 1), [2]),
        ([2], (1, 2), [0]),  # that of one that has gone
        ([1, 2, 3], (1, 2), [0, 4, 3]),
        ([1, 0], (0, 1), [2, 3]),
    ],
)
def test_a_seat_is_the_rank_where_that_is_free_else_the_next_free_number(
    ranks: list[int], taken: tuple[int, ...], seats: list[int]
) -> None:
    assert free_seats(ranks, taken=taken) == seats


def test_what_a_worker_starts_as_ranks_of_their_own_does_not_take_its_seat() -> None:
    environ = {"ELASTIC_EXT_SEAT": "5", "RANK": "1", "WORLD_SIZE": "2"}
    seat = GivenSeat.in_environment(environ)
    assert seat is not None
    assert [seat.of(1, 2), seat.of(0, 2), seat.of(1, 4), seat.of(0, 1)] == [5, 0, 1, 0]
    assert GivenSeat.in_environment({"RANK": "1", "WORLD_SIZE": "2"}) is None
    with pytest.raises(ValueError, match="ELASTIC_EXT_SEAT is 'x'; allowed: an integer >= 0"):
        GivenSeat.in_environment({**environ, "ELASTIC_EXT_SEAT": "x"})
    assert "SEAT" in OF_AGENT, "an agent that a worker starts has seats of its own to give"


# --- two workers whose ranks change ---------------------------------------------------------------------------------


def change_ranks(own: int, port: int, folder: Path) -> dict[str, Any]:
    """Train in a world of its own, then with the other worker, then with it and with ranks swapped."""
    os.environ.update({"ELASTIC_EXT_SEAT": str(own), "RANK": "0", "WORLD_SIZE": "1"})
    former, model = Former(own, port), make_model()
    trainer = trainer_of(folder, model)
    optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    session = trainer._training.session
    ranks, reports = trainer._training.ranks, trainer._training.follower.reports
    inputs, targets = make_data(4)
    seen = []

    def take_step(within: Callable[[], object] = bool) -> None:
        with trainer.step():
            within()
            nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

    def take_steps() -> None:
        seen.append((ranks.rank, ranks.world_size, ranks.seat))
        training = trainer._training
        told = [training.settings.tells, training.state.remarks.are_logged, training.profile_output._world.rank == 0]
        assert told == [ranks.rank == 0] * 3, "who logs what all ranks would is the first one now"
        for _ in range(STEPS):
            take_step()
        text = f"of worker {own} in a world of {ranks.world_size}"
        reports.write_event("noted", step=trainer.global_step, text=text, details={})

    with trainer:
        take_steps()
        for generation, workers in enumerate(WORLDS):
            trainer._training.follower.end_epoch()  # no agreement is under way
            session.take_world(ranks.regroup(former.of(generation, workers)))
            take_steps()
        windows: list[StepWindow] = []
        reports.on_window = windows.append
        while ranks.sum([bool(windows)], "seeing whether each has written a window")[0] < 2:
            take_step()
        begun, go = folder / "begun", folder / "go"
        if own == 1:
            until(begun.exists)
            take_step()  # and is ahead by it
            (folder / "ahead").touch()
            until(go.exists)
        else:
            begun.touch()
            take_step(lambda: until(go.exists))
    former.of(len(WORLDS), ())()
    return {"seen": seen, "pid": os.getpid(), "steps": trainer.global_step}


@contextmanager
def swapped(ranks: RankPool, folder: Path) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Two workers with swapped ranks that stay where they are; gives what ends them, and gives what they tell."""
    pulses = folder / "pulses"
    pulses.mkdir()
    with agents_store() as port, ThreadPoolExecutor(1) as pool:
        env = {"ELASTIC_EXT_PULSE_DIR": str(pulses)}
        outcomes = pool.submit(
            ranks.run, 2, change_ranks, port, folder, env=env, process_group=False, deadline_seconds=120.0
        )

        def end() -> list[dict[str, Any]]:
            (folder / "go").touch()
            return outcomes.result()

        try:
            until(lambda: (folder / "ahead").exists() or outcomes.done())
            if outcomes.done():
                end()
            yield end
        finally:
            (folder / "go").touch()


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_workers_whose_ranks_are_swapped_write_their_own_files_and_are_named_by_their_new_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    run_dir, pulses = tmp_path / "0", tmp_path / "pulses"
    with swapped(ranks, tmp_path) as end:
        readings = [until(partial(read_heartbeat, heartbeat_file(pulses, seat))) for seat in (0, 1)]
        pids = [each.pid for each in readings]
        check_agent(readings, run_dir, pulses)
        check_status(read_run_directory(run_dir, now=time.time(), host=socket.gethostname()), pids)
        told = end()
    assert [each["pid"] for each in told] == pids and told[0]["steps"] == told[1]["steps"]
    assert [each["seen"] for each in told] == [[(0, 1, 0), (0, 2, 0), (1, 2, 0)], [(0, 1, 1), (1, 2, 1), (0, 2, 1)]]
    for seat in (0, 1):
        metrics = RankMetrics.from_json((run_dir / f"metrics-{seat}.json").read_text())
        assert (metrics.rank, metrics.world_size, metrics.pid) == (1 - seat, 2, pids[seat])
        events = [each for each in lines_of(run_dir / f"events-{seat}.jsonl") if each["kind"] == "noted"]
        assert [(each["rank"], each["text"]) for each in events] == [
            (0, f"of worker {seat} in a world of 1"),
            (seat, f"of worker {seat} in a world of 2"),
            (1 - seat, f"of worker {seat} in a world of 2"),
        ]
        windows = [each for each in lines_of(run_dir / f"profile-{seat}.jsonl") if each["num_steps"] > 0]
        worlds = list(dict.fromkeys((each["rank"], each["world_size"]) for each in windows))
        assert worlds == [(0, 1), (seat, 2), (1 - seat, 2)], "a window is of one world"
        assert sum(each["num_steps"] for each in windows if each["world_size"] == 1) == STEPS
    check_report(run_dir, told[0]["steps"])


def check_agent(readings: list[HeartbeatReading], run_dir: Path, pulses: Path) -> None:
    """An agent that has started worker 0 as rank 0 finds that rank 1 hangs, and that it is worker 0."""
    workers = []
    for seat, each in enumerate(readings):
        process = process_of(each.pid)
        assert process is not None
        workers.append(Watched(local_rank=seat, rank=seat, seat=seat, process=process))
    limits = HangLimits(step_seconds=0.5, first_seconds=0.5)
    monitor = Monitor(run_dir=run_dir, pulse_dir=pulses, limits=limits, every_seconds=0.05)

    def hung() -> WorkersLook | None:
        seen = monitor.look(workers, restart=0, membership_version=0, world_size=2)
        return seen if seen is not None and seen.hang is not None else None

    seen = until(hung)
    assert seen.hang is not None and seen.hang.ranks == (1,)
    assert seen.hang.reason.startswith("rank 1: it has been in step ")
    rows = [(each.rank, each.seat, each.pid) for each in seen.record.workers]
    assert rows == [(1, 0, readings[0].pid), (0, 1, readings[1].pid)]
    present = monitor.with_present_ranks(workers)
    found = capture(present, run_dir=run_dir, pulse_dir=pulses, reason=seen.hang.reason, patience_seconds=30.0)
    assert [each.rank for each in found.places] == [1, 0] and found.path is not None
    text = found.path.read_text()
    assert f"==== rank 1 (process {readings[0].pid}," in text and f"==== rank 0 (process {readings[1].pid}," in text
    (run_dir / WORKERS_FILE).write_text(seen.record.to_json())
    request = pb.BeatRequest()
    NodeReporter(run_dir, since=Since(0.0)).fill(request, MOST_BYTES)
    beaten = {each.rank: each for each in request.workers}
    assert {rank: each.pid for rank, each in beaten.items()} == {1: readings[0].pid, 0: readings[1].pid}
    for told in beaten.values():
        assert told.windows and {(window.rank, window.world_size) for window in told.windows} == {(told.rank, 2)}
        assert told.config_version == 0 and told.HasField("config_version"), "its metrics were found"


def check_status(files: RunFiles, pids: list[int]) -> None:
    """Status names ranks as they are now, and of events the ranks as they were."""
    status = status_of(files)
    assert {each.rank: each.pid for each in status.ranks} == {1: pids[0], 0: pids[1]}
    assert {each.rank: each.pid for each in files.metrics} == {1: pids[0], 0: pids[1]}
    assert {rank: {each.rank for each in row} for rank, row in files.profiles.windows.items()} == {0: {0}, 1: {1}}
    told = [(each.source, each.text) for each in files.events if each.kind == "noted"]
    assert sorted(told) == [
        ("rank 0", "of worker 0 in a world of 1"),
        ("rank 0", "of worker 0 in a world of 2"),
        ("rank 0", "of worker 1 in a world of 1"),
        ("rank 0", "of worker 1 in a world of 2"),
        ("rank 1", "of worker 0 in a world of 2"),
        ("rank 1", "of worker 1 in a world of 2"),
    ]


def check_report(run_dir: Path, num_steps: int) -> None:
    """A report has the steps of each rank from whichever worker had that rank."""
    record = gather(find_places(run_dir), None, lambda num_bytes: None)
    assert [each.rank for each in record.ranks] == [0, 1]
    by_rank = {each.rank: each.num_steps for each in record.ranks}
    assert by_rank[1] == num_steps - STEPS, "there was no rank 1 in the worlds of one"
    assert not [each for each in record.notes if "broken" in each]
