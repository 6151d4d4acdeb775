"""What of a step's communication nothing was computed beside, from events that are made up and from torch's."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from elastic_ext.config.follower import Reports
from elastic_ext.profile import step_costs
from elastic_ext.profile.phases import Phase, Timeline, length, outside, united
from elastic_ext.profile.probe import Probe
from elastic_ext.profile.sampled_steps import Surveyor
from elastic_ext.profile.step_costs import Trace, can_trace, trace_of
from elastic_ext.ranks.group import Ranks
from elastic_ext.ranks.world import PeerName, World
from elastic_ext.records.metrics import StepTrace
from elastic_ext.records.run_dir import StartSettings

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


@given(SPANS, SPANS)
def test_each_moment_is_counted_once(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    ones = {moment for begin, end in one for moment in range(begin, end)}
    others = {moment for begin, end in other for moment in range(begin, end)}
    assert length(one) == len(ones) and outside(one, other) == len(ones - others)
    found = united(one)
    assert {moment for begin, end in found for moment in range(begin, end)} == ones
    assert all(before[1] < after[0] for before, after in pairwise(found))


@dataclass
class Event:
    """As torch's profiler gives them."""

    called: str
    begin: int
    end: int
    thread: int = 1
    device: str = "DeviceType.CPU"

    def name(self) -> str:
        return self.called

    def start_ns(self) -> int:
        return self.begin

    def duration_ns(self) -> int:
        return self.end - self.begin

    def start_thread_id(self) -> int:
        return self.thread

    def device_type(self) -> str:
        return self.device


HERE = Event("elastic_ext: a step that is traced", 0, 1)


def test_on_a_processor_what_its_thread_computes_is_beside_communication_and_nothing_else() -> None:
    events = [
        HERE,
        Event("gloo:all_gather", 100, 200, thread=2),
        Event("gloo:all_gather", 150, 300, thread=3),
        Event("aten::copy_", 150, 300, thread=3),
        Event("aten::linear", 180, 250),
        Event("aten::addmm", 190, 240),
        Event("FSDP::all_gather (2)", 100, 180),
    ]
    found = trace_of(events, rank=3, step_seconds=1e-6)
    assert found.communication_seconds == 200e-9 and found.exposed_seconds == pytest.approx(130e-9)
    assert found.overlapped_seconds == pytest.approx(70e-9) and found.computing_seconds == 70e-9
    assert found.rank == 3 and list(found.top) == ["aten::linear", "aten::addmm"]
    assert StepTrace.from_json(found.to_json()) == found


def test_on_an_accelerator_its_own_kernels_count() -> None:
    cuda = "DeviceType.CUDA"
    events = [
        HERE,
        Event("ncclDevKernel_AllGather_RING", 100, 200, device=cuda),
        Event("ampere_sgemm", 150, 300, device=cuda),
        Event("aten::mm", 0, 90),
        Event("nccl:all_gather", 0, 10),
    ]
    found = trace_of(events, rank=0, step_seconds=1e-6)
    assert found.communication_seconds == 100e-9 and found.exposed_seconds == 50e-9
    assert found.computing_seconds == 150e-9
    assert list(found.top) == ["ampere_sgemm"], "what starts it on the processor is no second operation"


def test_a_real_step_is_seen_and_no_word_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    assert can_trace()
    trace = Trace(0)
    trace.begin()
    began = time.perf_counter()
    product = torch.ones(64, 64) @ torch.ones(64, 64)
    took = time.perf_counter() - began
    found = trace.end()
    assert found is not None and product[0, 0] == 64
    assert 0 < found.computing_seconds <= found.step_seconds and found.step_seconds >= took
    assert found.communication_seconds == found.exposed_seconds == 0.0
    assert "aten::mm" in found.top
    assert capfd.readouterr().err == ""


def test_a_step_that_is_taken_again_is_traced_alone(tmp_path: Path) -> None:
    timeline, written = Timeline(Phase.OTHER), tmp_path / "trace-0.json"
    surveyor = Surveyor(
        timeline,
        Probe(timeline.enter, nn.Identity(), [], is_on_accelerator=False),
        world=World(rank=0, names=(PeerName(rank=0, host="node", pid=1, seat=0),)),
        device=torch.device("cpu"),
        reports=Reports(StartSettings.resolve({}, script="train.py", run_dir=tmp_path), Ranks.alone()),
        why_no_census=lambda: "planted",
        needs_trace=lambda: True,
    )
    surveyor.enter(0)  # the first step would have its operations counted
    surveyor.reach_boundary()
    surveyor.leave(has_ended=True)
    surveyor.enter(0)
    torch.ones(8, 8) @ torch.ones(8, 8)
    surveyor.leave(has_ended=False)
    surveyor.enter(0)
    assert not written.exists()
    torch.ones(8).add_(1)
    surveyor.reach_boundary()
    surveyor.leave(has_ended=True)
    surveyor.close()
    trace = StepTrace.from_json(written.read_text())
    assert "aten::add_" in trace.top and "aten::mm" not in trace.top


def test_where_torch_gives_no_such_events_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_costs, "events_of", lambda found: None)
    assert not can_trace()
    trace = Trace(0)
    trace.begin()
    assert trace.end() is None


def test_a_profile_that_somebody_else_has_is_left_alone() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as theirs:
        torch.ones(3).add_(1)
        assert not can_trace()
        torch.ones(3).mul_(2)
    assert {"aten::add_", "aten::mul_"} <= {each.key for each in theirs.key_averages()}


def test_one_that_waits_for_its_turn_is_left_alone_too() -> None:
    seen: list[str] = []
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=1),
        on_trace_ready=lambda found: seen.extend(each.key for each in found.key_averages()),
    ) as theirs:
        for _ in range(3):
            assert not can_trace()
            torch.ones(3).add_(1)
            theirs.step()
    assert "aten::add_" in seen
    del theirs
    gc.collect()
    assert can_trace()
