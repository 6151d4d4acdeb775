"""A rank's pulse: what it says, that no reader sees half of it, who writes it, and what the trainer notes in it."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_ext import StepError, follow_config
from elastic_ext.ranks.heartbeat import (
    Activity,
    FileHeartbeat,
    Heartbeat,
    HeartbeatReading,
    begin_heartbeat,
    heartbeat_file,
    read_heartbeat,
    stacks_file,
    stacks_pipe,
)
from elastic_ext.ranks.world import World
from elastic_ext.training.steps.steps import Steps
from tests.support.beating import reading_of, until, worker
from tests.support.ranks import RankPool
from tests.support.training import Slices, make_data, make_model, trainer_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pulse(tmp_path: Path) -> Iterator[FileHeartbeat]:
    """One in the folder of the test."""
    made = begin_heartbeat(tmp_path, seat=3, rank=3, restart=2, run_dir=tmp_path / "run")
    assert isinstance(made, FileHeartbeat)
    yield made
    made.end()


def said(folder: Path) -> HeartbeatReading:
    return reading_of(folder, 3)


# --- the file -------------------------------------------------------------------------------------------------------


def test_a_rank_that_gets_another_number_says_so_in_the_same_file(tmp_path: Path, pulse: FileHeartbeat) -> None:
    for step in range(3):
        pulse.enter(0)
        pulse.leave(step + 1, step + 1, 0)
    before = said(tmp_path)
    pulse.take_world(World(rank=70_000, names=()))
    found = said(tmp_path)
    assert (before.rank, before.num_alike, found.rank, found.num_alike) == (3, 3, 70_000, 0)
    assert dataclasses.replace(found, rank=3, num_alike=3) == before


def test_a_rank_that_has_joined_others_is_as_far_as_they_are(tmp_path: Path, pulse: FileHeartbeat) -> None:
    pulse.join(70, 40)
    found = said(tmp_path)
    assert (found.step, found.num_boundaries, found.activity) == (70, 40, Activity.BETWEEN)
    pulse.enter(0)
    pulse.leave(70, 40, 1)
    assert said(tmp_path).num_alike == 0, "that was a micro-step, and no step has ended"


def test_a_new_pulse_says_who_writes_it_and_that_it_starts(tmp_path: Path, pulse: FileHeartbeat) -> None:
    found = said(tmp_path)
    assert (found.pid, found.rank, found.restart) == (os.getpid(), 3, 2)
    assert (found.activity, found.step, found.num_boundaries, found.num_alike) == (Activity.STARTING, 0, 0, 0)
    assert found.since_ns <= time.monotonic_ns()


def test_steps_are_counted_and_timed_without_what_lies_between_their_micro_steps(
    tmp_path: Path, pulse: FileHeartbeat
) -> None:
    pulse.enter(0)
    first = said(tmp_path)
    assert (first.activity, first.micro_step, first.step) == (Activity.STEP, 0, 0)
    pulse.leave(0, 0, 1)
    between = said(tmp_path)
    assert (between.activity, between.micro_step, between.last_step_seconds) == (Activity.BETWEEN, 1, 0.0)
    before = time.monotonic_ns()
    while time.monotonic_ns() - before < 20_000_000:  # as an evaluation would
        pass
    pulse.enter(1)
    pulse.leave(7, 1, 0)
    after = said(tmp_path)
    assert (after.step, after.num_boundaries, after.micro_step, after.num_alike) == (7, 1, 0, 1)
    inside = (between.since_ns - first.since_ns) * 1e-9
    outside = (after.since_ns - between.since_ns) * 1e-9
    assert inside <= after.last_step_seconds <= inside + outside - 0.02 + 1e-9


def test_what_was_going_on_before_goes_on_after_something_else(tmp_path: Path, pulse: FileHeartbeat) -> None:
    pulse.enter(0)
    with contextlib.suppress(KeyError), pulse.during(Activity.SAVING), pulse.during(Activity.BOUNDARY):
        assert said(tmp_path).activity is Activity.BOUNDARY
        raise KeyError
    assert said(tmp_path).activity is Activity.STEP


def test_after_a_change_steps_count_as_first_ones(tmp_path: Path, pulse: FileHeartbeat) -> None:
    for step in (1, 2):
        pulse.enter(0)
        pulse.leave(step, step, 0)
    assert said(tmp_path).num_alike == 2
    pulse.note_change()
    assert (said(tmp_path).num_alike, said(tmp_path).num_boundaries) == (0, 2)


def test_nothing_is_written_after_the_end(tmp_path: Path, pulse: FileHeartbeat) -> None:
    pulse.end()
    pulse.enter(0)
    pulse.leave(1, 1, 0)
    pulse.end()
    assert (said(tmp_path).activity, said(tmp_path).num_boundaries) == (Activity.ENDED, 0)


def test_without_an_agent_nothing_is_written(tmp_path: Path) -> None:
    nobody = begin_heartbeat(None, seat=0, rank=0, restart=0, run_dir=tmp_path)
    nobody.enter(0)
    with nobody.during(Activity.SAVING):
        nobody.leave(1, 1, 0)
    nobody.end()
    assert type(nobody) is Heartbeat
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_leaves_training_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert type(begin_heartbeat(tmp_path / "gone", seat=1, rank=1, restart=0, run_dir=tmp_path / "run")) is Heartbeat
    assert "rank 1 cannot write its heartbeat" in caplog.text


def test_where_no_thread_can_be_started_training_is_left_alone_and_no_pulse_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_more(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more)
    assert type(begin_heartbeat(tmp_path, seat=1, rank=1, restart=0, run_dir=tmp_path / "run")) is Heartbeat
    assert "rank 1 cannot write its heartbeat" in caplog.text and "can't start new thread" in caplog.text
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_what_is_no_pulse_is_read_as_none(tmp_path: Path, pulse: FileHeartbeat) -> None:
    whole = heartbeat_file(tmp_path, 3).read_bytes()
    path = tmp_path / "pulse-9"
    assert read_heartbeat(path) is None
    for data in (
        b"",
        whole[:-1],
        b"\0" * len(whole),
        whole[:8] + struct.pack("<I", 99) + whole[12:],  # another format
        whole[:64] + struct.pack("=q", 7) + whole[72:],  # in the middle of a write
        whole[:80] + struct.pack("=q", 99) + whole[88:],  # another activity
    ):
        path.write_bytes(data)
        assert read_heartbeat(path) is None
    path.write_bytes(whole)
    assert read_heartbeat(path) == said(tmp_path)


def test_no_reader_sees_half_of_what_is_written(tmp_path: Path) -> None:
    with worker("gets on", tmp_path):
        seen = set()
        for _ in range(3000):
            found = read_heartbeat(heartbeat_file(tmp_path, 0))
            if found is None:
                continue
            entered = found.activity is Activity.STEP
            assert found.step == found.num_boundaries == found.num_alike
            assert entered or found.activity in (Activity.BETWEEN, Activity.STARTING)
            seen.add(found.num_boundaries)
        assert len(seen) > 10, "it was not being written meanwhile"


def test_a_forked_process_writes_nothing(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from elastic_ext.ranks.heartbeat import begin_heartbeat
pulse = begin_heartbeat(Path(sys.argv[1]), seat=0, rank=0, restart=0, run_dir=Path(sys.argv[1]))
pulse.enter(2)
child = os.fork()
if child == 0:
    pulse.leave(9, 9, 0)
    pulse.end()
    os._exit(0)
os.waitpid(child, 0)
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, cwd=ROOT)
    assert (reading_of(tmp_path).activity, reading_of(tmp_path).micro_step) == (Activity.STEP, 2)
    assert stacks_pipe(tmp_path, 0).is_fifo()


def test_the_pulse_of_a_process_that_is_alive_is_left_to_it(tmp_path: Path) -> None:
    with worker("is in a step", tmp_path) as other:
        assert type(begin_heartbeat(tmp_path, seat=0, rank=0, restart=0, run_dir=tmp_path)) is Heartbeat
        assert reading_of(tmp_path).pid == other.process.pid
        other.process.kill()
        other.process.wait()
        mine = begin_heartbeat(tmp_path, seat=0, rank=0, restart=0, run_dir=tmp_path)
        assert reading_of(tmp_path).pid == os.getpid()
        mine.end()


# --- stacks ---------------------------------------------------------------------------------------------------------


def test_a_signal_has_the_stacks_added_to_a_file_of_the_owner_alone(tmp_path: Path) -> None:
    file = stacks_file(tmp_path / "run", 3)
    file.parent.mkdir()
    file.write_text("from before\n")
    file.chmod(0o600)
    made = begin_heartbeat(tmp_path, seat=3, rank=3, restart=0, run_dir=tmp_path / "run")
    os.kill(os.getpid(), said(tmp_path).stacks_signal)
    text = file.read_text()
    assert text.startswith("from before\n")
    assert "test_a_signal_has_the_stacks_added" in text
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    made.end()
    fresh = begin_heartbeat(tmp_path / "run", seat=4, rank=4, restart=0, run_dir=tmp_path / "run")
    assert stat.S_IMODE(stacks_file(tmp_path / "run", 4).stat().st_mode) == 0o600
    fresh.end()


def test_signals_that_somebody_has_taken_are_left_alone(tmp_path: Path) -> None:
    in_c, in_python = signal.SIGRTMIN + 4, signal.SIGRTMIN + 5
    heard: list[int] = []
    was_enabled = faulthandler.is_enabled()
    before = signal.signal(in_python, lambda number, _: heard.append(number))
    with open(tmp_path / "theirs", "w+") as theirs:
        faulthandler.register(in_c, theirs)
        try:
            made = begin_heartbeat(tmp_path, seat=3, rank=3, restart=0, run_dir=tmp_path / "run")
            number = said(tmp_path).stacks_signal
            assert number not in (0, in_c, in_python)
            made.end()
            os.kill(os.getpid(), in_c)
            os.kill(os.getpid(), in_python)
            assert "test_signals_that_somebody_has_taken" in (tmp_path / "theirs").read_text()
            assert heard == [in_python]
            assert signal.getsignal(number) is signal.SIG_DFL
            assert faulthandler.is_enabled() is was_enabled
        finally:
            faulthandler.unregister(in_c)
            signal.signal(in_python, before)


def test_a_link_in_the_place_of_the_stacks_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = tmp_path / "target"
    target.touch()
    (tmp_path / "run").mkdir()
    stacks_file(tmp_path / "run", 3).symlink_to(target)
    made = begin_heartbeat(tmp_path, seat=3, rank=3, restart=0, run_dir=tmp_path / "run")
    assert said(tmp_path).stacks_signal == 0
    assert "cannot open the file for its stack traces" in caplog.text
    made.enter(0)
    assert said(tmp_path).activity is Activity.STEP
    made.end()
    assert target.read_text() == ""


# --- the trainer ----------------------------------------------------------------------------------------------------


class Noting(nn.Module):
    """A module that notes what the pulse says while a checkpoint has its state, and while it gets it back."""

    def __init__(self, folder: Path, seen: list[Activity]) -> None:
        super().__init__()
        self.folder, self.seen = folder, seen
        self.layer = nn.Linear(6, 5, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(inputs)
        return found

    def get_extra_state(self) -> dict[str, int]:
        self.seen.append(reading_of(self.folder).activity)
        return {"one": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen.append(reading_of(self.folder).activity)


def take_step(trainer: Any, model: nn.Module, optimizer: Any, batch: Any) -> None:
    with trainer.step():
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def test_a_training_says_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_EXT_PULSE_DIR", str(tmp_path))
    model, loader = make_model(), Slices(make_data(12), 2)
    trainer = trainer_of(tmp_path, model, loader, global_batch_size=4)
    optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    changes: list[Activity] = []
    trainer.on_change("optimizer", lambda old, new: changes.append(reading_of(tmp_path).activity))
    places = []
    with trainer:
        assert reading_of(tmp_path).activity is Activity.OUTSIDE
        for epoch in range(2):
            with trainer.epoch(epoch):
                for batch in loader:
                    before = reading_of(tmp_path)
                    assert (before.activity, before.step) == (Activity.BETWEEN, trainer.global_step)
                    with trainer.step():
                        inside = reading_of(tmp_path)
                        assert inside.activity is Activity.STEP
                        places.append((inside.num_boundaries, inside.micro_step))
                        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
                        optimizer.step()
                        optimizer.zero_grad()
                with trainer.evaluation():
                    assert reading_of(tmp_path).activity is Activity.OUTSIDE
                assert reading_of(tmp_path).activity is Activity.BETWEEN
            assert reading_of(tmp_path).activity is Activity.OUTSIDE
            if epoch == 0:
                assert reading_of(tmp_path).last_step_seconds > 0
                trainer.propose({"optimizer.learning_rate": 0.2}, "a test")
    assert places == [(step, micro_step) for step in range(6) for micro_step in range(2)]
    assert changes == [Activity.CHANGING]
    assert (reading_of(tmp_path).activity, reading_of(tmp_path).step) == (Activity.ENDED, 6)


def test_a_step_that_fails_or_cannot_begin_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_EXT_PULSE_DIR", str(tmp_path))
    model, loader = make_model(), Slices(make_data(4), 2)
    trainer = trainer_of(tmp_path, model, loader, global_batch_size=4)
    trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with trainer:
        batches = iter(loader)
        next(batches)
        with trainer.step():
            pass
        next(batches)
        with contextlib.suppress(KeyError), trainer.step():
            assert reading_of(tmp_path).micro_step == 1
            raise KeyError
        assert (reading_of(tmp_path).activity, reading_of(tmp_path).micro_step) == (Activity.BETWEEN, 0)
        with trainer.step():
            with pytest.raises(StepError, match="inside another"), trainer.step():
                pass
            with pytest.raises(StepError, match="evaluate between two steps"), trainer.evaluation():
                pass
            assert reading_of(tmp_path).activity is Activity.STEP
        assert reading_of(tmp_path).activity is Activity.BETWEEN


def test_a_micro_step_that_is_a_function_is_one_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_EXT_PULSE_DIR", str(tmp_path))
    model, loader = make_model(), Slices(make_data(4), 2)
    trainer = trainer_of(tmp_path, model, loader, global_batch_size=4)
    optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []

    def work(batch: Any) -> None:
        seen.append(reading_of(tmp_path))
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    with trainer:
        for batch in loader:
            trainer.run(work, batch)
            assert reading_of(tmp_path).activity is Activity.BETWEEN
    assert [(each.activity, each.micro_step) for each in seen] == [(Activity.STEP, 0), (Activity.STEP, 1)]


def test_checkpoints_that_training_waits_for_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_EXT_PULSE_DIR", str(tmp_path))
    seen: list[Activity] = []
    batch = make_data(4)
    for _ in range(2):
        model = Noting(tmp_path, seen)
        trainer = trainer_of(
            tmp_path, model, global_batch_size=4, micro_batch_size=4, shared_storage_path=tmp_path / "storage"
        )
        optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        with trainer:
            assert reading_of(tmp_path).activity is Activity.OUTSIDE
            resumed, seen[:] = list(seen), []
            take_step(trainer, model, optimizer, batch)
            trainer.save_checkpoint()
            assert Activity.SAVING in seen
            assert (reading_of(tmp_path).activity, reading_of(tmp_path).has_begun_save) == (Activity.BETWEEN, True)
            take_step(trainer, model, optimizer, batch)
            assert not reading_of(tmp_path).has_begun_save
            seen.clear()
    assert Activity.RESUMING in resumed


def test_a_change_of_sizes_makes_steps_first_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_EXT_PULSE_DIR", str(tmp_path))
    model, batch = make_model(), make_data(4)
    trainer = trainer_of(tmp_path, model, global_batch_size=4, micro_batch_size=4)
    optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with trainer:
        for _ in range(3):
            take_step(trainer, model, optimizer, batch)
        assert reading_of(tmp_path).num_alike == 3
        trainer.propose({"global_batch_size": 8}, "a test")
        alike = []
        for _ in range(6):
            take_step(trainer, model, optimizer, batch)
            alike.append(reading_of(tmp_path).num_alike)
    assert min(alike) <= 1
    assert reading_of(tmp_path).num_boundaries > 3


def test_a_trainer_without_an_agent_and_a_profile_has_steps_that_note_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_EXT_PROFILE", "off")
    model = make_model()
    trainer = trainer_of(tmp_path, model, global_batch_size=4, micro_batch_size=4)
    trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with trainer:
        assert type(trainer._micro_step) is Steps


def test_a_loop_that_only_follows_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_EXT_PULSE_DIR", str(tmp_path))
    with follow_config(run_dir=tmp_path, job="test") as follower:
        for step in (1, 2, 3):
            follower.boundary()
            found = reading_of(tmp_path)
            assert (found.activity, found.step, found.num_boundaries) == (Activity.OUTSIDE, step, step)
    assert reading_of(tmp_path).activity is Activity.ENDED


def test_switched_off_the_library_has_no_pulse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_EXT_PULSE_DIR", str(tmp_path / "pulses"))
    monkeypatch.setenv("ELASTIC_EXT", "off")
    with follow_config(run_dir=tmp_path, job="test") as follower:
        follower.boundary()
    assert not (tmp_path / "pulses").exists()


def wait_for_one_another(rank: int, folder: Path) -> list[str]:
    """Train, and come late to each place where the other rank waits, having seen in its pulse that it does."""
    model = torch.nn.parallel.DistributedDataParallel(make_model())
    trainer = trainer_of(folder, model, rank=rank, global_batch_size=4, micro_batch_size=2)
    optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []

    def wait_for(activity: Activity) -> None:
        if rank == 1:
            until(lambda: reading_of(folder, 0).activity is activity)
            seen.append(activity.name)

    batch = make_data(2)
    with trainer:
        with trainer.epoch(0):
            wait_for(Activity.STEP)
            take_step(trainer, model, optimizer, batch)
            wait_for(Activity.BOUNDARY)
        wait_for(Activity.BOUNDARY)
    return seen


def test_a_rank_that_waits_for_another_says_where(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks.run(2, wait_for_one_another, tmp_path, env={"ELASTIC_EXT_PULSE_DIR": str(tmp_path)})
    assert outcomes == [[], ["STEP", "BOUNDARY", "BOUNDARY"]]
    assert [reading_of(tmp_path, rank).activity for rank in (0, 1)] == [Activity.ENDED] * 2
