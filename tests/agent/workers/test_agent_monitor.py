"""What a monitor sees of real workers: their pulses, what they take of the machine, and that they hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from elastic_ext.agent.workers.hangs import HangLimits
from elastic_ext.agent.workers.monitor import GpuUse, Monitor, NvidiaGpus, ProcessTable, Watched, WorkersLook
from elastic_ext.ranks.heartbeat import begin_heartbeat, heartbeat_file
from elastic_ext.ranks.processes import ProcessIdentity, process_of, this_process
from elastic_ext.records.agent import WorkersRecord
from elastic_ext.records.measures import Measures
from elastic_ext.records.metrics import RankMetrics
from tests.support.beating import reading_of, state_of, until, worker


class Clock:
    """Time that passes as a test says, from a reading on the real clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def monitor_of(folder: Path, clock: Clock, limits: HangLimits | None = None, gpus: Gpus | None = None) -> Monitor:
    return Monitor(run_dir=folder / "run", pulse_dir=folder, limits=limits or HangLimits(), gpus=gpus, clock=clock)


def look(monitor: Monitor, *workers: Watched) -> WorkersLook:
    found = monitor.look(workers, restart=0, membership_version=7, world_size=len(workers))
    assert found is not None
    return found


def seen_for(monitor: Monitor, clock: Clock, seconds: int, *workers: Watched) -> WorkersLook:
    """What is seen in the end when workers are looked at for so long, every second."""
    for _ in range(seconds):
        clock.now += 1
        found = look(monitor, *workers)
    return found


class Gpus:
    """GPUs that tell what a test says."""

    def __init__(self, uses: Mapping[int, GpuUse]) -> None:
        self.uses, self.is_closed = uses, False

    def by_pid(self) -> Mapping[int, GpuUse]:
        return self.uses

    def close(self) -> None:
        self.is_closed = True


def test_a_worker_that_gets_on_is_seen_with_its_step_rate_and_what_it_takes(tmp_path: Path, clock: Clock) -> None:
    with worker("gets on", tmp_path) as found:
        pid = found.process.pid
        gpus = Gpus({pid: GpuUse(memory_bytes=5 << 30, percent=80.0), 1: GpuUse(memory_bytes=1, percent=1.0)})
        clock.now = reading_of(tmp_path).since_ns * 1e-9
        monitor = monitor_of(tmp_path, clock, gpus=gpus)
        (first,) = look(monitor, found.watched).record.workers
        assert (first.rank, first.pid, first.state, first.cpu_percent) == (0, pid, "running", None)
        assert first.steps_per_second is None
        before = reading_of(tmp_path).step
        until(lambda: reading_of(tmp_path).step > before + 300)
        (second,) = seen_for(monitor, clock, 1, found.watched).record.workers
        assert second.step is not None
        assert second.step >= before + 300
        assert second.steps_per_second is not None
        assert second.steps_per_second >= 300  # in the second that passed on this clock
        assert second.cpu_percent is not None
        assert second.memory_bytes is not None
        assert second.memory_bytes > 1 << 20
        assert (second.num_processes, second.gpu_percent, second.gpu_memory_bytes) == (1, 80.0, 5 << 30)
        assert second.num_threads == 3  # one of them its pulse's
        assert second.trouble is None
        monitor.close()
        assert gpus.is_closed


def test_between_two_looks_nothing_is_looked_at(tmp_path: Path, clock: Clock) -> None:
    with worker("is in a step", tmp_path) as found:
        monitor = monitor_of(tmp_path, clock)
        assert look(monitor, found.watched)
        clock.now += 0.5
        assert monitor.look([found.watched], restart=0, membership_version=0, world_size=1) is None
        clock.now += 0.5
        assert look(monitor, found.watched)


def test_what_is_seen_can_be_written_and_read_again(tmp_path: Path, clock: Clock) -> None:
    with worker("is in a step", tmp_path) as found:
        gone = Watched(
            local_rank=1,
            rank=1,
            seat=1,
            process=ProcessIdentity(pid=found.process.pid, start_ticks=1),
            state="failed",
            exit_code=-9,
        )
        record = look(monitor_of(tmp_path, clock), found.watched, gone).record
        assert WorkersRecord.from_json(record.to_json()) == record
        assert (record.membership_version, record.restart) == (7, 0)
        assert [(each.state, each.exit_code) for each in record.workers] == [("running", None), ("failed", -9)]


def test_one_rank_in_a_step_while_another_is_outside_is_no_hang_and_is_said(tmp_path: Path, clock: Clock) -> None:
    with worker("is in a step", tmp_path, 0) as one, worker("is outside", tmp_path, 1) as other:
        clock.now = reading_of(tmp_path, 1).since_ns * 1e-9
        monitor = monitor_of(tmp_path, clock)
        found = seen_for(monitor, clock, 400, one.watched, other.watched)
        assert found.hang is None
        assert "rank 1 has been outside of steps for 399 s; rank 0 waits for it" in found.said
        assert [each.activity for each in found.record.workers] == ["in a step", "outside of steps"]
        assert "(limit 300 s)" in (found.record.workers[0].trouble or "")


def test_a_stopped_worker_is_named_as_what_the_others_wait_for(tmp_path: Path, clock: Clock) -> None:
    with worker("is in a step", tmp_path, 0) as one, worker("is in a step", tmp_path, 1) as other:
        os.kill(other.process.pid, signal.SIGSTOP)
        until(lambda: state_of(other.process.pid) == "T")
        clock.now = reading_of(tmp_path, 1).since_ns * 1e-9
        monitor = monitor_of(tmp_path, clock, HangLimits(first_seconds=20.0))
        assert "stopped it (state T)" in seen_for(monitor, clock, 3, one.watched, other.watched).said
        found = seen_for(monitor, clock, 40, one.watched, other.watched).hang
        assert found is not None
        assert found.ranks == (1,)
        assert f"`kill -CONT {other.process.pid}`" in found.reason


def test_a_worker_that_goes_away_meanwhile_is_no_error(tmp_path: Path, clock: Clock) -> None:
    with worker("is in a step", tmp_path) as found:
        monitor = monitor_of(tmp_path, clock)
        look(monitor, found.watched)
        found.process.kill()
        found.process.wait()
        later = seen_for(monitor, clock, 1, found.watched)
        assert later.standings == ()
        assert later.record.workers[0].memory_bytes is None


def test_a_pulse_of_another_process_says_nothing_of_a_worker(tmp_path: Path, clock: Clock) -> None:
    with worker("is in a step", tmp_path), worker("tells nothing", tmp_path) as silent:
        (seen,) = look(monitor_of(tmp_path, clock), silent.watched).record.workers
        assert (seen.state, seen.activity, seen.step) == ("running", None, None)


def test_a_worker_may_start_what_trains(tmp_path: Path, clock: Clock) -> None:
    with worker("starts another", tmp_path) as found:
        trains = reading_of(tmp_path).pid
        assert trains != found.process.pid
        (seen,) = look(monitor_of(tmp_path, clock), found.watched).record.workers
        assert (seen.activity, seen.num_processes) == ("in a step", 2)
        os.kill(trains, signal.SIGKILL)


def test_after_a_restart_pulses_of_before_are_gone(tmp_path: Path, clock: Clock) -> None:
    with worker("is in a step", tmp_path) as found:
        monitor = monitor_of(tmp_path, clock)
        look(monitor, found.watched)
        monitor.forget()
        assert not heartbeat_file(tmp_path, 0).exists()
        assert seen_for(monitor, clock, 1, found.watched).record.workers[0].activity is None


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder / "metrics-0.json"


@pytest.mark.parametrize("is_its", [True, False])
def test_without_a_pulse_the_step_rate_is_that_of_the_metrics(
    tmp_path: Path, clock: Clock, metrics: Path, is_its: bool
) -> None:
    with worker("tells nothing", tmp_path) as found:
        told = RankMetrics(
            time=0.0,
            job="job",
            generation=0,
            rank=0,
            world_size=1,
            host="host",
            pid=found.process.pid if is_its else 1,
            step=12,
            config_version=1,
            config_revision=0,
            agree_every_steps=1,
            measures=Measures(steps_per_second=2.5),
        )
        metrics.write_text(told.to_json())
        monitor = monitor_of(tmp_path, clock)
        (seen,) = look(monitor, found.watched).record.workers
        assert (seen.step, seen.steps_per_second) == ((12, 2.5) if is_its else (None, None))


def test_steps_that_a_worker_has_taken_over_as_it_joined_others_do_not_count_as_speed(
    tmp_path: Path, clock: Clock
) -> None:
    heartbeat = begin_heartbeat(tmp_path, seat=0, rank=0, restart=0, run_dir=tmp_path)
    try:
        watched = Watched(local_rank=0, rank=0, seat=0, process=this_process())
        monitor = monitor_of(tmp_path, clock)
        look(monitor, watched)
        heartbeat.join(300, 300)
        monitor.count_anew()  # as the plan by which it joined is in force
        for step in range(301, 304):
            heartbeat.leave(step, step, 0)
            (seen,) = seen_for(monitor, clock, 1, watched).record.workers
        assert (seen.step, seen.steps_per_second) == (303, 1.0)
    finally:
        heartbeat.end()


@pytest.mark.parametrize(
    "text", ["", "[1]", "{", json.dumps({"pid": 1}), "[" * 100_000, '{"generation": 0, "step": "x"}']
)
def test_metrics_that_cannot_be_read_say_nothing(tmp_path: Path, clock: Clock, metrics: Path, text: str) -> None:
    metrics.write_text(text)
    with worker("tells nothing", tmp_path) as found:
        (seen,) = look(monitor_of(tmp_path, clock), found.watched).record.workers
        assert (seen.step, seen.steps_per_second) == (None, None)


def test_what_a_process_has_started_is_counted_with_its_processor_time_and_beside_its_memory(tmp_path: Path) -> None:
    busy = "import os, sys\nchild = os.fork()\nif child == 0:\n    os.write(1, b'x')\nwhile True:\n    pass"
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.read(1)
            found = process_of(process.pid)
            assert found is not None
            table = ProcessTable()
            first = table.sample(found, 0.0)
            assert first is not None
            assert (len(first.children), first.cpu_percent) == (1, None)
            own = table.sample(ProcessIdentity(pid=first.children[0], start_ticks=-1), 0.0)
            assert own is None, "it is another process than that one"
            child = psutil.Process(first.children[0])
            before = child.cpu_times().user
            until(lambda: child.cpu_times().user > before + 0.1)
            used = table.sample(found, 1.0)
            assert used is not None
            assert used.cpu_percent is not None
            assert used.cpu_percent >= 10  # in the second that passed on this clock, of the child alone
            assert used.memory_bytes > 2 << 20 and used.children_bytes > 1 << 20
            child.kill()
            until(lambda: child.status() == psutil.STATUS_ZOMBIE)
            alone = table.sample(found, 2.0)
            assert alone is not None and alone.children_bytes == 0
            assert alone.memory_bytes > 2 << 20, "that of the process itself does not change as others come and go"
        finally:
            os.killpg(process.pid, signal.SIGKILL)


class Driver:
    """Two GPUs as the driver's library tells of them; one has nothing new of how busy it is."""

    class NVMLError(Exception):
        """As the library raises."""

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=10, usedGpuMemory=1 << 30), SimpleNamespace(pid=11 + handle, usedGpuMemory=None)]

    def nvmlDeviceGetProcessUtilization(self, handle: int, since: int) -> list[SimpleNamespace]:
        if handle == 1 or since >= 7:
            raise self.NVMLError
        return [SimpleNamespace(pid=10, smUtil=40, timeStamp=7), SimpleNamespace(pid=10, smUtil=60, timeStamp=6)]


def test_what_a_process_has_of_several_gpus_is_added_up() -> None:
    probe = NvidiaGpus(Driver(), [0, 1])
    assert probe.by_pid() == {
        10: GpuUse(memory_bytes=2 << 30, percent=60.0),
        11: GpuUse(memory_bytes=None, percent=None),
        12: GpuUse(memory_bytes=None, percent=None),
    }
    assert probe.by_pid()[10].percent is None, "that was told before"


def test_where_there_is_no_gpu_there_is_no_probe() -> None:
    probe = NvidiaGpus.open()
    if probe is not None:  # on a machine that has one
        assert isinstance(probe.by_pid(), dict)
        probe.close()
