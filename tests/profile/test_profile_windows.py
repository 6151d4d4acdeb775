"""Phases, the timeline, windows and pace: no process, and hardly any torch."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic_ext.profile import phases as timeline_room
from elastic_ext.profile import recorder as recorder_room
from elastic_ext.profile.breakdown import RankView, breakdown_of, merged
from elastic_ext.profile.ledger import TimeUse, TrainingHistory, ledger_of_slices, processes_of, slices_of
from elastic_ext.profile.phases import IN_STEPS, Phase, Timeline
from elastic_ext.profile.probe import Probe, ProbePace
from elastic_ext.profile.recorder import Recorder
from elastic_ext.profile.verdict import verdict
from elastic_ext.profile.windows import MemoryInUse, TrainingProgress, WindowAccumulator, window_seconds
from elastic_ext.ranks.heartbeat import Heartbeat
from elastic_ext.records.metrics import NodeCalibration, StepCensus, StepWindow


@dataclass
class Clock:
    """One that stands still until it is told."""

    nanoseconds: int = 0
    cpu: int = 0

    def __call__(self) -> float:
        return self.nanoseconds * 1e-9

    def go(self, seconds: float, cpu: float | None = None) -> None:
        self.nanoseconds += round(seconds * 1e9)
        self.cpu += round((seconds if cpu is None else cpu) * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(timeline_room, "perf_counter_ns", lambda: found.nanoseconds)
    monkeypatch.setattr(timeline_room, "thread_time_ns", lambda: found.cpu)
    monkeypatch.setattr(recorder_room, "perf_counter_ns", lambda: found.nanoseconds)
    return found


@dataclass
class Profile:
    """A rank's windows under a clock."""

    clock: Clock
    timeline: Timeline = field(init=False)
    windows: WindowAccumulator = field(init=False)
    kept: list[StepWindow] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.timeline = Timeline(Phase.STARTUP)
        self.windows = WindowAccumulator(
            self.timeline,
            rank=1,
            world_size=2,
            restart=3,
            begin=100.0,
            memory=lambda: MemoryInUse(memory_bytes=1000),
            clock=self.clock,
        )

    def close(self, standing: TrainingProgress) -> StepWindow:
        self.kept.append(self.windows.close(standing))
        return self.kept[-1]

    def step(self, seconds: dict[Phase, float], *, is_measured: bool = True) -> bool:
        for phase, length in seconds.items():
            self.timeline.enter(phase)
            self.clock.go(length, length / 2)
        self.timeline.enter(Phase.OTHER)
        return self.windows.end_step(is_measured=is_measured)


@dataclass
class Loop:
    """A loop that a recorder is told of: steps of one micro-step, each after a wait for its batch."""

    profile: Profile
    model: nn.Module = field(default_factory=nn.Identity)
    num_ended: int = 0

    def __post_init__(self) -> None:
        timeline = self.profile.timeline
        self.recorder = Recorder(
            Heartbeat(),
            Probe(timeline.enter, self.model, [], is_on_accelerator=False),
            self.profile.windows,
            progress=lambda: TrainingProgress(self.num_ended, 0, 1, 0),
            on_window=self.profile.kept.append,
            loader=None,
        )

    def step(self, data: float, seconds: float, *, fails: bool = False) -> None:
        self.profile.timeline.enter(Phase.DATA)
        self.profile.clock.go(data)
        self.recorder.enter(0)
        self.profile.clock.go(seconds)
        self.num_ended += not fails
        self.recorder.leave(self.num_ended, self.num_ended, 0)

    def total(self, phase: Phase) -> float:
        return sum(each.seconds.get(phase.label, 0.0) for each in self.profile.kept)


STEP = {Phase.DATA: 0.5, Phase.FORWARD: 0.25, Phase.BACKWARD: 0.5, Phase.OPTIMIZER: 0.125}


def test_time_is_counted_for_the_phase_that_it_was_spent_in(clock: Clock) -> None:
    timeline = Timeline(Phase.STARTUP)
    clock.go(2.0, 1.0)
    assert timeline.enter(Phase.DATA) == Phase.STARTUP
    clock.go(3.0, 0.0)
    assert timeline.enter(Phase.STARTUP) == Phase.DATA and timeline.phase == Phase.STARTUP
    clock.go(4.0)
    spent = timeline.take_spent()
    wall, processor = spent[: len(Phase)], spent[len(Phase) :]
    assert wall[Phase.STARTUP] == 6e9 and wall[Phase.DATA] == 3e9 and sum(wall) == clock.nanoseconds
    assert processor[Phase.STARTUP] == 5e9 and processor[Phase.DATA] == 0
    assert timeline.take_spent() == spent


def test_cpu_time_of_unmeasured_steps_is_read_seldom_and_counts_as_theirs(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(Profile(clock))
    for _ in range(100):
        loop.step(0.5e-3, 1e-3)
    reads = list[int]()

    def read() -> int:
        reads.append(clock.cpu)
        return clock.cpu

    monkeypatch.setattr(timeline_room, "thread_time_ns", read)
    before = clock.cpu
    for _ in range(200):  # the loader, which says when it is waited for, waits for none
        loop.recorder.enter(0)
        clock.go(1e-3)
        loop.num_ended += 1
        loop.recorder.leave(loop.num_ended, loop.num_ended, 0)
    assert 0 < len(reads) < 10
    loop.profile.close(TrainingProgress(300, 0, 0, 0))
    step = sum(each.processor_seconds.get("step", 0.0) for each in loop.profile.kept)
    assert step >= (clock.cpu - before) * 1e-9 and sum(loop.profile.kept[-1].processor_seconds.values()) > 0


def test_what_comes_to_nothing_is_counted_as_that_and_no_moment_is_lost(clock: Clock) -> None:
    timeline = Timeline(Phase.DATA)
    clock.go(1.0)
    timeline.enter(Phase.CHECKPOINT)
    clock.go(2.0)
    timeline.enter(Phase.FORWARD)
    clock.go(4.0)
    timeline.roll_back()
    wall = timeline.take_spent()[: len(Phase)]
    assert wall[Phase.ROLLED_BACK] == 5e9 and wall[Phase.CHECKPOINT] == 2e9 and sum(wall) == 7e9
    clock.go(1.0)
    assert timeline.take_spent()[Phase.FORWARD] == 1e9
    timeline.roll_back()
    assert timeline.take_spent()[Phase.FORWARD] == 1e9, "what was told before is not taken back"


def test_what_the_loop_did_besides_within_a_step_comes_to_nothing_with_it(clock: Clock) -> None:
    timeline = Timeline(Phase.OTHER)
    clock.go(1.0)
    timeline.enter(Phase.OTHER)
    timeline.begin_step()
    clock.go(2.0)
    timeline.enter(Phase.FORWARD)
    clock.go(4.0)
    timeline.roll_back()
    wall = timeline.take_spent()[: len(Phase)]
    assert wall[Phase.OTHER] == 1e9 and wall[Phase.ROLLED_BACK] == 6e9


@pytest.mark.parametrize("num_steps", [10, 70, 80])
def test_a_step_that_is_rolled_back_is_counted_alike_whether_steps_are_measured_or_not(
    clock: Clock, num_steps: int
) -> None:
    loop = Loop(Profile(clock))
    for _ in range(num_steps):
        loop.step(0.5e-3, 1e-3)
    loop.step(0.25, 0.125, fails=True)
    loop.step(0.5e-3, 1e-3)
    loop.recorder.end()
    assert loop.total(Phase.ROLLED_BACK) == pytest.approx(0.375), "with the wait for its batch"
    assert loop.total(Phase.DATA) == pytest.approx((num_steps + 1) * 0.5e-3)
    assert loop.total(Phase.STEP) == pytest.approx((num_steps + 1) * 1e-3), "and none of another step"
    assert sum(each.num_detailed for each in loop.profile.kept) == 0, "hooks have seen no model"


def test_communication_takes_the_share_that_it_takes_whether_steps_are_measured_or_not(clock: Clock) -> None:
    class Passing(nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            clock.go(0.9e-3)
            return given

    loop = Loop(Profile(clock), Passing())
    for _ in range(1000):
        loop.recorder.enter(0)
        loop.model(torch.ones(2, 2))
        with loop.recorder.communicating():
            clock.go(0.1e-3)
        loop.num_ended += 1
        loop.recorder.leave(loop.num_ended, loop.num_ended, 0)
    loop.recorder.end()
    windows = [each for each in loop.profile.kept if each.num_steps > 0]
    assert 0 < sum(each.num_detailed for each in windows) < loop.num_ended / 2
    shares = breakdown_of(RankView(host="node", window=merged(windows))).shares
    assert shares[Phase.COMMUNICATION] == pytest.approx(0.1) and shares[Phase.FORWARD] == pytest.approx(0.9)
    seconds = ledger_of_slices(slices_of(processes_of(loop.profile.kept), TrainingHistory())).seconds
    assert seconds[TimeUse.COMMUNICATION] == pytest.approx(0.1) and seconds[TimeUse.FORWARD] == pytest.approx(0.9)


@pytest.mark.parametrize("length", [1e-3, 4e-3, 0.02, 0.1])
@pytest.mark.parametrize(("data", "kind"), [(0.05, "busy"), (0.4, "data")])
def test_verdicts_stand_on_a_few_steps_in_a_second(clock: Clock, length: float, data: float, kind: str) -> None:
    drawn = random.Random(0)

    class Passing(nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            clock.go((1 - data) * length * drawn.uniform(0.8, 1.2))
            return given

    loop = Loop(Profile(clock), Passing())
    for _ in range(round(20 / length)):
        loop.profile.timeline.enter(Phase.DATA)
        clock.go(data * length * drawn.uniform(0.5, 1.5))
        loop.recorder.enter(0)
        loop.model(torch.ones(1, 1))
        loop.num_ended += 1
        loop.recorder.leave(loop.num_ended, loop.num_ended, 0)
    loop.recorder.end()
    windows = [each for each in loop.profile.kept if each.num_steps > 0]
    assert len(windows) > 15 and all(each.num_detailed >= 2 for each in windows[:-1]), "each window has some steps"
    assert sum(each.num_detailed for each in windows) < 0.65 * loop.num_ended
    for row in (windows, windows[-4:-1]):
        views = [RankView(host="node", window=replace(merged(row), rank=rank)) for rank in (0, 1)]
        assert breakdown_of(views[0]).shares[Phase.DATA] == pytest.approx(data, rel=0.15)
        assert verdict(views).kind == kind


@given(st.lists(st.tuples(st.sampled_from(list(Phase)), st.integers(0, 10**9), st.sampled_from("eltbum"))))
def test_phases_add_up_to_the_time_that_has_passed(told: list[tuple[Phase, int, str]]) -> None:
    found = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline_room, "perf_counter_ns", lambda: found.nanoseconds)
        patch.setattr(timeline_room, "thread_time_ns", lambda: found.cpu)
        timeline = Timeline(Phase.STARTUP)
        for phase, nanoseconds, kind in told:
            found.nanoseconds += nanoseconds
            found.cpu += nanoseconds // 3
            if kind == "e":
                timeline.enter(phase)
            elif kind == "l":
                timeline.roll_back()
            elif kind == "u":
                timeline.end_unmeasured_step()
            elif kind == "m":
                timeline.enter_unmeasured(phase)
            elif kind == "b":
                timeline.begin_step()
            else:
                assert min(timeline.take_spent()) >= 0
        assert sum(timeline.take_spent()[: len(Phase)]) == found.nanoseconds
        assert sum(timeline.take_spent()[len(Phase) :]) == found.cpu


def test_a_window_says_what_steps_took_in_all_and_in_the_middle(clock: Clock) -> None:
    profile = Profile(clock)
    clock.go(5.0)
    assert profile.close(TrainingProgress(0, 0, 1, 0)).seconds == {"startup": 5.0}
    for factor in (1.0, 2.0, 1.0, 1.0, 9.0):
        profile.step({phase: seconds * factor for phase, seconds in STEP.items()})
    profile.windows.count(7, 8)
    clock.go(0.25)
    window = profile.close(TrainingProgress(5, 80, 2, 0))
    assert window.begin == 105.0 and window.end == 105.0 + sum(window.seconds.values())
    assert window.seconds == {"data": 7.0, "forward": 3.5, "backward": 7.0, "optimizer": 1.75, "other": 0.25}
    assert window.processor_seconds["data"] == 3.5
    assert window.typical == {"data": 0.5, "forward": 0.25, "backward": 0.5, "optimizer": 0.125}
    assert window.step_seconds == (1.375, 1.375, 2.75, 12.375)
    assert (window.num_steps, window.num_detailed, window.step, window.num_samples) == (5, 5, 5, 80)
    assert (window.num_tokens, window.num_bytes, window.memory_bytes) == (7, 8, 1000)
    assert (window.rank, window.world_size, window.restart) == (1, 2, 3)
    assert window.config_version == 1, "the one that was in force while it went on"
    assert profile.close(TrainingProgress(5, 80, 2, 0)).config_version == 2
    assert profile.kept[1] is window and StepWindow.from_json(window.to_json()) == window


def test_a_window_says_what_all_steps_but_a_few_wait_for_others(clock: Clock) -> None:
    profile = Profile(clock)
    for waiting in (8.0, 1.0, 6.0, 4.0, 2.0, 7.0, 5.0, 3.0):
        profile.step({Phase.FORWARD: 1.0, Phase.COMMUNICATION: waiting, Phase.AGREEMENT: 0.5})
    window = profile.close(TrainingProgress(8, 0, 0, 0))
    assert window.waiting_seconds == 3.5 and window.typical["communication"] == 5.0
    assert window.computing_seconds == 1.0
    assert StepWindow.from_json(window.to_json()) == window
    profile.step({Phase.STEP: 2.0}, is_measured=False)
    assert profile.close(TrainingProgress(9, 0, 0, 0)).waiting_seconds is None


def test_a_window_says_whether_something_was_still_on_its_way_then(clock: Clock) -> None:
    profile = Profile(clock)
    for is_settled in (True, False, False, True, True):
        profile.step(STEP)
        profile.close(TrainingProgress(1, 0, 0, 0, is_settled))
    assert [each.is_settling for each in profile.kept] == [False, True, True, True, False]


def test_steps_that_are_not_looked_at_are_counted_and_their_time_too(clock: Clock) -> None:
    profile = Profile(clock)
    for _ in range(3):
        profile.step({Phase.DATA: 1.0, Phase.STEP: 2.0}, is_measured=False)
    profile.step(STEP)
    window = profile.close(TrainingProgress(4, 0, 0, 0))
    assert window.seconds["step"] == 6.0 and window.seconds["data"] == 3.5
    assert (window.num_steps, window.num_detailed) == (4, 1)
    assert window.typical["data"] == 0.5


def test_quantiles_of_very_many_steps_are_those_of_steps_from_all_over(clock: Clock) -> None:
    profile = Profile(clock)
    for number in range(5000):
        profile.step({Phase.FORWARD: 1.0 + number})
    window = profile.close(TrainingProgress(5000, 0, 0, 0))
    assert window.num_detailed == 5000 and sum(window.seconds.values()) == pytest.approx(5000 * 5001 / 2)
    tenth, middle, most, longest = window.step_seconds
    assert tenth == pytest.approx(500, rel=0.05) and middle == pytest.approx(2500, rel=0.05)
    assert most == pytest.approx(4500, rel=0.05) and longest == pytest.approx(5000, rel=0.05)


def test_a_window_is_due_after_a_second_and_later_ones_take_longer(clock: Clock) -> None:
    profile = Profile(clock)
    assert not profile.step({Phase.FORWARD: 0.9})
    assert profile.step({Phase.FORWARD: 0.2})
    assert window_seconds(10.0, 10.0) == 1.0
    assert window_seconds(20_000.0, 20_000.0) == 20.0
    assert window_seconds(1e9, 1e9) == 60.0
    assert window_seconds(1e9, 29.0) == 1.0, "after a change all is looked at closely again"


def test_after_a_change_the_window_that_is_open_is_short_too(clock: Clock) -> None:
    profile = Profile(clock)
    clock.go(50_000.0)
    profile.close(TrainingProgress(0, 0, 0, 0))
    assert not profile.step({Phase.FORWARD: 30.0})
    profile.windows.expect_change()
    assert profile.step({Phase.FORWARD: 0.01})


def test_phases_of_a_step_are_all_but_what_is_out_of_the_ordinary() -> None:
    special = {Phase.CHANGE, Phase.CHECKPOINT, Phase.MEMBERSHIP, Phase.ROLLED_BACK, Phase.OUTSIDE, Phase.STARTUP}
    assert set(IN_STEPS) == set(Phase) - special and len(IN_STEPS) == len(set(IN_STEPS))
    assert len({phase.label for phase in Phase}) == len(Phase)


def looked_at(seconds: Iterable[float]) -> list[float]:
    """When the steps began that are looked at, where steps take so long one after another."""
    pace, now, until, found = ProbePace(), 0, 0, list[float]()
    pace.begin_look(now)
    for each in seconds:
        begin, now = now, now + round(each * 1e9)
        if until == 0:
            found.append(begin * 1e-9)
            until = pace.end_step(now)
        elif now >= until:
            until = 0
            pace.begin_look(now)
    return found


@pytest.mark.parametrize("seconds", [0.25, 2.0])
def test_long_steps_are_all_looked_at(seconds: float) -> None:
    assert len(looked_at([seconds] * 1000)) == 1000


@pytest.mark.parametrize("seconds", [20e-6, 200e-6, 1e-3, 4e-3, 0.02, 0.04, 0.1, 0.2])
def test_of_shorter_steps_a_few_in_a_row_are_looked_at_about_once_a_second(seconds: float) -> None:
    found = looked_at([seconds] * round(100 / seconds))[64:]
    begins = [now for before, now in pairwise(found) if now - before > 1.5 * seconds]
    assert all(now - before < 1.001 for before, now in pairwise(begins)), "each window has steps that were looked at"
    together = len(found) / len(begins)
    assert 3.5 <= together <= 8.5 and (seconds > 6e-3 or together > 7.5)
    assert 80 <= len(begins) <= 115
    assert len(found) * 250e-6 <= 0.0025 * 100, "a look at a step takes so long at most"


def test_steps_are_looked_at_again_after_a_second_however_long_they_have_become() -> None:
    lengths = [300e-6] * 200 + [0.3] * 20
    late = [begin for begin in looked_at(lengths) if begin > 200 * 300e-6]
    assert len(late) >= 20 - 4


def test_records_with_what_is_no_length_of_time_are_refused() -> None:
    window = StepWindow(
        begin=1.0,
        end=2.0,
        rank=0,
        world_size=1,
        restart=0,
        step=1,
        num_steps=1,
        config_version=0,
        config_revision=0,
        seconds={"data": 1.0},
        step_seconds=(1.0, 1.0, 1.0, 1.0),
    )
    for broken in (
        replace(window, seconds={"data": -1.0}),
        replace(window, seconds={"data": float("nan")}),
        replace(window, typical={"data": "1"}),  # type: ignore[dict-item]
        replace(window, step_seconds=(float("inf"),)),
    ):
        with pytest.raises(ValueError, match=r"no length of time|step_seconds\[0\] is Infinity"):
            StepWindow.from_json(broken.to_json())
    for text in ("", "[]", "{}", '{"begin": 1}', window.to_json().replace("[1.0,1.0,1.0,1.0]", "3")):
        with pytest.raises(ValueError, match=r"missing|JSON|list|Expecting"):
            StepWindow.from_json(text)


def test_what_a_step_asks_and_a_machine_does_can_be_written_and_read_again() -> None:
    census = StepCensus(
        time=1.0,
        rank=0,
        num_samples=2,
        num_ops=3,
        num_bytes=4,
        num_flops=5,
        optimizer_ops=1,
        optimizer_bytes=2,
        device="cpu",
    )
    assert StepCensus.from_json(census.to_json()) == census
    best = NodeCalibration(
        time=time.time(),
        host="h",
        device="cpu",
        num_threads=1,
        torch="2",
        flops_per_second=1.0,
        bytes_per_second=2.0,
        seconds_per_op=3.0,
    )
    assert NodeCalibration.from_json(best.to_json()) == best
