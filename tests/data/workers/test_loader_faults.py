"""A loader whose workers die, hang, or are left alone: its batches are what they would have been, and nothing is left.

What a pool of workers does by itself is in test_pool.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import random
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ext.data.batch_plan import BatchPlan
from elastic_ext.data.loader import ElasticDataLoader
from elastic_ext.errors import WorkerDiedError
from tests.support import pools
from tests.support.loading import (
    SizedSamples,
    changed,
    collate_by_hand,
    indices_in,
    loader_of,
    settled,
)
from tests.support.pools import Both, Once, Raise, WaitAt, gate, however_late, open_gate, worker_pids
from tests.support.ranks import RankPool
from tests.support.scripts import Script

SECONDS = 60


@pytest.fixture(scope="module", autouse=True)
def _opened_once() -> None:
    list(loader_of(4, num_workers=1))  # what is opened once and stays


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """No process, descriptor, thread or shared memory of a test outlives it."""
    before = settled()
    with pools.within(SECONDS):
        yield
    assert settled() == before


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def makers_of(batch: Any) -> set[int]:
    return {int(pid) for pid in batch[1]}


# --- a worker dies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("die", "how"),
    [
        (pools.die_by_sigkill, "was killed by SIGKILL"),
        (pools.die_by_segfault, "was killed by SIGSEGV"),
        (pools.die_by_exit, "exited with code 3"),
    ],
    ids=["SIGKILL", "segfault", "exit"],
)
@pytest.mark.parametrize("collate_fn", [None, pools.as_they_are], ids=["default", "own"])
def test_what_a_dead_worker_had_comes_in_order_and_one_warning_tells_of_it(
    die: Callable[[], None], how: str, collate_fn: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pid_file = tmp_path / "pid"
    doing = {9: Once(tmp_path / "mark", Both(WritePid(pid_file), die))}
    loader = ElasticDataLoader(SizedSamples(doing, 24), 4, num_workers=2, collate_fn=collate_fn)
    assert [int(sample) for batch in loader for sample in batch] == list(range(24))
    (warning,) = warnings_in(caplog)
    assert f"pid {pid_file.read_text()} {how}" in warning
    assert "samples 8, 9, 10, 11" in warning


class WritePid:
    """Tell who makes the sample."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(self) -> None:
        self._file.write_text(str(os.getpid()))


def test_workers_that_the_kernel_kills_in_the_middle_of_anything_are_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the OOM killer does: all at once, from outside, while they make, send, or wait."""
    busy = gate(tmp_path / "busy")
    doing: dict[int, Callable[[], Any]] = dict.fromkeys(range(0, 40, 2), pools.a_megabyte)
    doing[5] = Once(tmp_path / "mark", WaitAt(busy))
    before = worker_pids()
    loader = ElasticDataLoader(SizedSamples(doing, 40), 2, num_workers=2, collate_fn=pools.as_they_are)
    batches = iter(loader)
    found = [next(batches), next(batches)]
    open_gate(busy)
    victims = worker_pids() - before
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    found += batches
    assert found == [[pools.a_megabyte(), index + 1] for index in range(0, 40, 2)]
    told = warnings_in(caplog)
    assert len(told) == len(victims)
    assert all(f"pid {pid} was killed by SIGKILL" in " ".join(told) for pid in victims)


@pytest.mark.parametrize("num_kills", [8, pytest.param(150, marks=pytest.mark.slow)])
def test_samples_come_once_and_in_order_however_often_workers_are_killed_and_changed(num_kills: int) -> None:
    draw = random.Random(num_kills)
    before = worker_pids()
    loader = loader_of(20 * num_kills, 2, shuffle=True, seed=1, num_workers=2)
    expected = indices_in(loader_of(20 * num_kills, 2, shuffle=True, seed=1))
    found: list[int] = []
    for number, batch in enumerate(loader):
        found += indices_in([batch])
        if number % 10 == 5:
            changed(loader, num_workers=draw.choice([1, 2, 3]))
        if number % 10 == 9 and (alive := sorted(worker_pids() - before)):
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(draw.choice(alive), signal.SIGKILL)
    assert found == expected


class ShareUntilKilled:
    """Say who does it, then share one tensor after another as torch does to send them."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(self) -> None:
        self._file.write_text(str(os.getpid()))
        while True:
            torch.zeros(4).share_memory_()  # type: ignore[no-untyped-call]


def test_workers_that_are_killed_while_they_share_tensors_leave_no_memory_of_the_machine(tmp_path: Path) -> None:
    """Many of the kills come while a tensor's memory has a name; what is left is seen after each test."""
    num_kills = 12
    files = [tmp_path / f"pid of {number}" for number in range(num_kills)]
    doing = {number: Once(tmp_path / f"mark of {number}", ShareUntilKilled(file)) for number, file in enumerate(files)}

    def kill_each() -> None:
        for number, file in enumerate(files):
            while not file.exists() or not file.read_text():
                time.sleep(0.01)
            time.sleep(random.Random(number).uniform(0.0, 0.02))
            os.kill(int(file.read_text()), signal.SIGKILL)

    killing = threading.Thread(target=kill_each, daemon=True)
    killing.start()
    loader = ElasticDataLoader(SizedSamples(doing, num_kills), 1, num_workers=1)
    assert [batch.tolist() for batch in loader] == [[number] for number in range(num_kills)]
    killing.join()


def test_a_sample_that_kills_three_workers_is_an_error_that_names_it_and_the_epoch_goes_on() -> None:
    loader = ElasticDataLoader(SizedSamples({5: pools.die_by_sigkill}, 12), 3, num_workers=2)
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1, 2]
    with pytest.raises(WorkerDiedError, match=r"sample 5 of the dataset .*was killed by SIGKILL") as caught:
        next(batches)
    assert caught.value.indices == (5,)
    assert [batch.tolist() for batch in batches] == [[6, 7, 8], [9, 10, 11]]


def test_workers_that_persist_are_replaced_between_loops_too(caplog: pytest.LogCaptureFixture) -> None:
    loader = loader_of(6, 1, num_workers=1, persistent_workers=True)
    (pid,) = set().union(*map(makers_of, loader))
    os.kill(pid, signal.SIGKILL)
    assert indices_in(loader) == list(range(6))
    (warning,) = warnings_in(caplog)
    assert f"pid {pid} was killed by SIGKILL" in warning


# --- a dataset raises, a worker hangs -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", [ValueError, KeyError, OSError])
def test_an_exception_of_the_dataset_tells_its_sample(num_workers: int, kind: type[Exception]) -> None:
    loader = ElasticDataLoader(SizedSamples({7: Raise(kind, ("bad",))}), 4, num_workers=num_workers)
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1, 2, 3]
    with pytest.raises(kind) as caught:
        next(batches)
    told = "".join(traceback.format_exception(caught.value))
    assert "sample 7" in told or (sys.version_info < (3, 11) and not num_workers)
    assert next(batches).tolist() == [8, 9]


def test_a_sample_that_cannot_be_had_is_told_by_its_batch_alone_when_sizes_have_changed() -> None:
    loader = ElasticDataLoader(SizedSamples({7: Raise(ValueError, ("bad",))}, 12), 6, num_workers=1)
    loader.plan(BatchPlan(global_batch=6, num_ranks=1, micro_batch=6), 0)
    batches = iter(loader)
    next(batches)
    loader.commit()
    loader.plan(BatchPlan(global_batch=2, num_ranks=1, micro_batch=2), 0)
    with pytest.raises(ValueError, match="bad"):
        next(batches)
    loader.commit()
    assert [batch.tolist() for batch in batches] == [[8, 9], [10, 11]]


def test_a_worker_that_hangs_is_an_error_that_says_where_once_the_timeout_is_over(tmp_path: Path) -> None:
    never = gate(tmp_path / "never")
    before = worker_pids()
    batches = iter(ElasticDataLoader(SizedSamples({5: WaitAt(never)}), 2, num_workers=1, timeout=0.3))
    for _ in range(2):
        however_late(lambda: next(batches))
    (pid,) = worker_pids() - before
    with pytest.raises(RuntimeError, match=r"^DataLoader timed out after 0\.3 seconds") as caught:
        next(batches)
    told = str(caught.value)
    assert f"pid {pid}" in told and "samples 4, 5" in told
    assert "pools.py" in told and "in __call__" in told and "in __getitem__" in told
    open_gate(never)


# --- nothing is left ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_changes", [20, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("collate_fn", [None, collate_by_hand], ids=["cut", "made again"])
def test_changes_of_workers_prefetch_and_size_leave_nothing(num_changes: int, collate_fn: Any) -> None:
    draw = random.Random(num_changes)
    loader = loader_of(100_000, 2, num_workers=2, collate_fn=collate_fn)
    found: list[int] = []
    most, num_done, num_wanted = 0, 0, 2
    with pools.within(10 * SECONDS):
        for batch in loader:
            found += indices_in([batch])
            loader.commit()
            if (num_wanted > 0) != (0 not in makers_of(batch)):
                continue  # the last change is yet to be seen
            if num_done == num_changes:
                break
            num_done += 1
            num_wanted = draw.randint(0, 3)
            changed(loader, num_workers=num_wanted, prefetch_factor=draw.randint(1, 4))
            size = draw.randint(1, 8)
            loader.plan(BatchPlan(global_batch=size, num_ranks=1, micro_batch=size), 0)
            most = max(most, len(settled().descriptors))
    assert found == list(range(len(found)))
    assert most < 250  # what is used no more is given back soon, and not in the end


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loop_that_is_left_early_leaves_nothing(num_workers: int) -> None:
    doing = dict.fromkeys(range(0, 100, 3), pools.a_tensor)
    loader = ElasticDataLoader(SizedSamples(doing, 100), 1, num_workers=num_workers)
    before = settled()
    batches = iter(loader)
    assert sum(len(batch) for batch in itertools.islice(batches, 7)) == 7
    del batches
    assert settled() == before
    assert sum(1 for _ in loader) == 100


def running(ranks: RankPool, folder: Path, main: str, *arguments: str, stderr: int | None = None) -> Script:
    """A process group of its own, in a function of tests/support/loading.py."""
    script = folder / "script.py"
    main_of_its_own = f"if __name__ == '__main__':\n    {main}(*{arguments})\n"  # a worker that is spawned imports it
    script.write_text(f"from tests.support.loading import {main}\n{main_of_its_own}")
    return Script(ranks, [str(script)], folder=folder, env=os.environ, stderr=stderr)


def workers_of(job: Script) -> list[int]:
    """Descriptors that are readable once its two workers have ended; it says who they are, and that somebody hangs."""
    told = {job.stdout.readline().strip() for _ in range(3)}
    assert len(told) == 3 and "hangs" in told
    return [os.pidfd_open(int(pid)) for pid in told - {"hangs"}]


def have_ended(watched: list[int]) -> bool:
    """Whether all of them have, or do so within seconds."""
    try:
        return all(select.select([descriptor], [], [], 20)[0] for descriptor in watched)
    finally:
        for descriptor in watched:
            os.close(descriptor)


def test_ctrl_c_leaves_nothing_whether_it_is_caught_or_not(ranks: RankPool, tmp_path: Path) -> None:
    stderr = tmp_path / "stderr"
    with stderr.open("w") as file, running(ranks, tmp_path, "main_that_is_interrupted", stderr=file.fileno()) as job:
        first = workers_of(job)
        os.killpg(job.pid, signal.SIGINT)  # as a terminal does: the workers are told too
        before, after = json.loads(job.stdout.readline())
        second = workers_of(job)
        os.killpg(job.pid, signal.SIGINT)
        assert job.wait(60) == -signal.SIGINT
        assert have_ended(first + second)
    assert before == after
    told = stderr.read_text()
    assert told.count("Traceback") == 1 and told.rstrip().endswith("KeyboardInterrupt"), told


@pytest.mark.parametrize(
    "start_method",
    ["fork", pytest.param("forkserver", marks=pytest.mark.slow), pytest.param("spawn", marks=pytest.mark.slow)],
)
def test_workers_end_with_a_parent_that_is_killed_also_one_that_hangs(
    ranks: RankPool, tmp_path: Path, start_method: str
) -> None:
    with running(ranks, tmp_path, "main_that_is_killed", start_method) as job:
        watched = workers_of(job)
        job.kill()
        assert have_ended(watched)
