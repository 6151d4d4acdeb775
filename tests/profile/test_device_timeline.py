"""A timeline by the clock of a device that lags behind: one that is made up, and a GPU."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_ext.profile.device_timeline import DeviceTimeline
from elastic_ext.profile.phases import Phase
from elastic_ext.profile.windows import MemoryInUse, TrainingProgress, WindowAccumulator
from elastic_ext.records.metrics import StepWindow
from tests.support.training import make_data, trainer_of


@dataclass
class Device:
    """Comes to what it is given when it is let, and has a clock of its own."""

    now: float = 0.0  # milliseconds
    queue: deque[Any] = field(default_factory=deque)
    num_events: int = 0
    fails: bool = False

    def event(self) -> Mark:
        self.num_events += 1
        return Mark(self)

    def work(self, milliseconds: float) -> None:
        self.queue.append(milliseconds)

    def run(self, num: int | None = None) -> None:
        for _ in range(len(self.queue) if num is None else num):
            item = self.queue.popleft()
            if isinstance(item, Mark):
                item.at = self.now
            else:
                self.now += item


@dataclass
class Mark:
    device: Device
    at: float | None = None

    def record(self) -> None:
        if self.device.fails:
            raise RuntimeError("planted")
        self.at = None
        self.device.queue.append(self)

    def query(self) -> bool:
        return self.at is not None

    def synchronize(self) -> None:
        self.device.run()

    def elapsed_time(self, end_event: Mark) -> float:
        assert self.at is not None and end_event.at is not None
        return end_event.at - self.at


def timeline_on(device: Device) -> DeviceTimeline:
    return DeviceTimeline(Phase.STARTUP, device.event, lambda: False)


def take_step(
    timeline: DeviceTimeline,
    device: Device,
    forward: float,
    backward: float,
    data: float = 0.0,
    *,
    is_measured: bool = True,
) -> int:
    """How many steps are known once it has ended."""
    for phase, spent in ((Phase.DATA, data), (Phase.FORWARD, forward), (Phase.BACKWARD, backward)):
        timeline.enter(phase)
        if spent:
            device.work(spent)
    timeline.enter(Phase.OTHER)
    return len(timeline.end_step(is_measured=is_measured))


def test_steps_are_known_once_the_device_has_come_past_them() -> None:
    device = Device()
    timeline = timeline_on(device)
    assert take_step(timeline, device, 3.0, 5.0) == 0
    assert take_step(timeline, device, 4.0, 6.0) == 0
    device.run()
    timeline.enter(Phase.FORWARD)
    device.work(7.0)
    timeline.enter(Phase.OTHER)
    found = timeline.end_step(is_measured=True)
    assert [after[Phase.FORWARD] - before[Phase.FORWARD] for before, after in found] == [3e6, 4e6]
    assert [after[Phase.BACKWARD] - before[Phase.BACKWARD] for before, after in found] == [5e6, 6e6]
    assert found[0][1] == found[1][0]
    timeline.finish()
    spent = timeline.take_spent()[: len(Phase)]
    assert spent[Phase.FORWARD] == 14e6 and sum(spent) - spent[Phase.STARTUP] == 25e6


def test_steps_that_become_known_late_are_those_that_were_measured() -> None:
    device = Device()
    timeline = timeline_on(device)
    windows = WindowAccumulator(
        timeline, rank=0, world_size=1, restart=0, begin=100.0, memory=lambda: MemoryInUse(memory_bytes=1000)
    )

    def take(forward: float, *, is_measured: bool) -> None:
        timeline.enter(Phase.FORWARD)
        device.work(forward)
        timeline.enter(Phase.OTHER)
        windows.end_step(is_measured=is_measured)

    for _ in range(3):
        take(4.0, is_measured=True)
    device.run()
    take(400.0, is_measured=False)  # a hundred steps, counted at once
    take(4.0, is_measured=True)
    window = windows.close(TrainingProgress(104, 0, 1, 0))
    assert window.num_detailed == 4, "as many as tokens are counted of"
    assert window.typical["forward"] == 0.004 and window.step_seconds == (0.004,) * 4
    device.run()
    take(4.0, is_measured=False)
    window = windows.close(TrainingProgress(105, 0, 1, 0))
    assert (window.num_detailed, window.step_seconds) == (0, (0.004,) * 4), "and none that was not measured"


def test_waiting_counts_as_far_as_the_device_waits() -> None:
    device = Device()
    timeline = timeline_on(device)
    take_step(timeline, device, 1.0, 1.0)
    timeline.enter(Phase.DATA)
    device.run()
    device.now += 30.0  # it has nothing to do
    timeline.enter(Phase.FORWARD)
    timeline.finish()
    assert timeline.take_spent()[Phase.DATA] == 30e6


def test_events_are_used_again() -> None:
    device = Device()
    timeline = timeline_on(device)
    for _ in range(200):
        take_step(timeline, device, 1.0, 1.0)
        device.run()
    assert device.num_events < 30


def test_a_step_that_is_taken_back_is_counted_as_that() -> None:
    device = Device()
    timeline = timeline_on(device)
    take_step(timeline, device, 1.0, 2.0)
    timeline.enter(Phase.FORWARD)
    device.work(8.0)
    timeline.enter(Phase.OTHER)
    timeline.roll_back()
    take_step(timeline, device, 1.0, 2.0)
    timeline.finish()
    spent = timeline.take_spent()
    assert spent[Phase.ROLLED_BACK] == 8e6 and spent[Phase.FORWARD] == 2e6 and spent[Phase.BACKWARD] == 4e6


def test_unmeasured_steps_that_have_ended_are_not_rolled_back_with_the_one_after() -> None:
    device = Device()
    timeline = timeline_on(device)

    def go_through_step(milliseconds: float) -> None:
        timeline.enter(Phase.STEP)
        device.work(milliseconds)
        timeline.enter(Phase.OTHER)

    for _ in range(2):
        go_through_step(4.0)
        timeline.end_unmeasured_step()
    go_through_step(16.0)
    timeline.roll_back()
    timeline.end_step(is_measured=False)
    timeline.finish()
    spent = timeline.take_spent()
    assert spent[Phase.STEP] == 8e6 and spent[Phase.ROLLED_BACK] == 16e6


def test_what_the_loop_did_besides_within_a_step_comes_to_nothing_with_it() -> None:
    device = Device()
    timeline = timeline_on(device)
    timeline.enter(Phase.OTHER)
    device.work(1.0)
    timeline.enter(Phase.OTHER)
    timeline.begin_step()
    device.work(2.0)
    timeline.enter(Phase.FORWARD)
    device.work(4.0)
    timeline.roll_back()
    device.run()
    timeline.finish()
    wall = timeline.take_spent()
    assert wall[Phase.OTHER] == 1e6 and wall[Phase.ROLLED_BACK] == 6e6


def test_marks_of_another_thread_take_no_processor_time_of_its() -> None:
    device = Device()
    timeline = DeviceTimeline(Phase.OTHER, device.event, lambda: False)

    def run_backward() -> None:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        timeline.enter(Phase.BACKWARD)
        timeline.enter(Phase.OTHER)

    for _ in range(3):
        thread = threading.Thread(target=run_backward)
        thread.start()
        thread.join()
    timeline.enter(Phase.OTHER)
    had = timeline.take_spent()[len(Phase) :]
    assert min(had) >= 0 and sum(had) < 0.05e9, "and none of the other's is taken for more or less of its own"


def test_a_stream_that_is_captured_takes_no_marks() -> None:
    device, captured = Device(), [True]
    timeline = DeviceTimeline(Phase.STARTUP, device.event, lambda: captured[0])
    take_step(timeline, device, 1.0, 1.0)
    assert device.num_events == 0
    captured[0] = False
    take_step(timeline, device, 1.0, 1.0)
    assert device.num_events > 0


@pytest.mark.parametrize("is_behind", [False, True])
def test_where_the_device_cannot_be_read_the_hosts_clock_is(caplog: pytest.LogCaptureFixture, is_behind: bool) -> None:
    device = Device()
    timeline = timeline_on(device)
    take_step(timeline, device, 1.0, 1.0)
    device.fails = not is_behind
    with caplog.at_level(logging.WARNING, logger="elastic_ext"):
        for _ in range(100 if is_behind else 3):
            take_step(timeline, device, 1.0, 1.0)
    assert sum("goes on by the host's clock" in message for message in caplog.messages) == 1
    before = sum(timeline.take_spent()[: len(Phase)])
    assert take_step(timeline, device, 1.0, 1.0) == 1
    assert sum(timeline.take_spent()[: len(Phase)]) > before
    timeline.finish()


def test_no_time_is_lost_or_counted_twice_where_the_device_can_no_longer_be_read() -> None:
    device = Device()
    began = time.perf_counter()
    timeline = timeline_on(device)
    for _ in range(3):
        time.sleep(0.01)
        take_step(timeline, device, 2.0, 4.0)
    device.run()
    time.sleep(0.01)
    take_step(timeline, device, 2.0, 4.0)
    before = timeline.take_spent()[: len(Phase)]
    assert before[Phase.BACKWARD] == 12e6
    device.fails = True
    timeline.enter(Phase.DATA)
    time.sleep(0.01)
    timeline.enter(Phase.OTHER)
    after = timeline.take_spent()[: len(Phase)]
    took = time.perf_counter() - began
    assert all(then <= now for then, now in zip(before, after, strict=True)), "a window's times cannot be negative"
    assert after[Phase.DATA] >= 10e6 and sum(after) <= took * 1e9
    assert sum(after) >= 50e6, "what was slept, on a device that has told of less"


def test_what_goes_by_before_the_first_event_is_counted_by_the_hosts_clock() -> None:
    device = Device()
    timeline = timeline_on(device)
    timeline.add_past(Phase.STARTUP, 5_000_000_000)
    time.sleep(0.02)
    take_step(timeline, device, 1.0, 1.0)
    timeline.finish()
    assert timeline.take_spent()[Phase.STARTUP] >= 5_020_000_000


@pytest.mark.gpu
def test_a_training_on_a_gpu_is_timed_by_it(tmp_path: Path) -> None:
    inputs, targets = make_data(64, torch.float32)
    wide = nn.Sequential(nn.Linear(6, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 5)).cuda()
    trainer = trainer_of(tmp_path, wide, micro_batch_size=64, global_batch_size=64)
    with trainer:
        optimizer = trainer.prepare(torch.optim.SGD(wide.parameters(), lr=0.1))
        for _ in range(200):
            with trainer.step():
                loss: Any = nn.functional.cross_entropy(wide(inputs.cuda()), targets.cuda())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    windows = [StepWindow.from_json(line) for line in (tmp_path / "0" / "profile-0.jsonl").read_text().splitlines()]
    spent = {name: sum(each.seconds.get(name, 0.0) for each in windows) for name in ("forward", "backward", "transfer")}
    assert all(spent.values()) and spent["backward"] > spent["transfer"]
    made: Any = torch.cuda.Event
    begin, wide_enough = made(enable_timing=True), made(enable_timing=True)
    begin.record()
    wide(inputs.cuda()).sum().backward()
    wide_enough.record()
    wide_enough.synchronize()
    a_pass = begin.elapsed_time(wide_enough) / 1000
    middle = [each.typical for each in windows if each.typical][-1]
    assert 0.2 * a_pass < middle["forward"] + middle["backward"] < 5 * a_pass
