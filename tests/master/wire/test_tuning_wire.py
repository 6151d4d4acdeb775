"""What a master makes of what nodes tell of a job and its steps, before a tuner hears of it: all that can be."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ext.master.facts import MOST_FACTS, checked_facts
from elastic_ext.master.node_metrics import fitting_window
from elastic_ext.master.observations import MeasurementRounds
from elastic_ext.master.wire import master_pb2 as wire
from elastic_ext.master.wire import window_record
from elastic_ext.profile.phases import Phase
from elastic_ext.records.metrics import MemoryFacts, PassesMemory
from elastic_ext.tuner.measurements import StepReport, why_untrusted
from tests.support.job_facts import made_facts
from tests.support.tuned import STEP, reported

NOW = 5000.0
MEMORY = MemoryFacts(
    source="fake",
    parameter_bytes=1,
    gradient_bytes=1,
    optimizer_bytes=2,
    buffer_bytes=0,
    passes=(PassesMemory(micro_batch=1, activation_checkpoint=0.0, forward_bytes=1, loss_bytes=2, backward_bytes=3),),
)


def test_numbers_of_new_fields_stay_as_they_are() -> None:
    messages = wire.DESCRIPTOR.message_types_by_name
    assert messages["BeatRequest"].fields_by_name["facts"].number == 12
    assert messages["JobStatus"].fields_by_name["tuning"].number == 16
    numbers = {each.name: each.number for each in messages["TuningDecision"].fields}
    assert list(numbers.values()) == list(range(1, 13)) and numbers["changes"] == 6


# ---- facts ----


def test_facts_are_the_same_after_the_wire() -> None:
    facts = made_facts(memory=MEMORY, values={"parallelism.strategy": "no_shard", "communication.bucket_cap_mb": None})
    assert checked_facts(facts.to_json()) == facts


def test_what_a_newer_version_has_added_is_left_out_of_facts() -> None:
    told = json.loads(made_facts().to_json())
    told["values"]["kernel.tile"] = [1, {}]
    told["choices"]["kernel.tile"] = [None]
    told["fixed"] = {"kernel.tile": "x", "optimizer.learning_rate": "it is\nlearned"}
    told["weather"] = "fine"
    found = checked_facts(json.dumps(told))
    assert "kernel.tile" not in {**found.values, **found.choices}
    assert found.fixed == {"optimizer.learning_rate": "it is learned"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world_size": 0}, "no number above 0"),
        ({"world_size": 1 << 40, "num_local": 1}, "allowed: at most 16777216 ranks"),
        ({"num_replicas": 5}, "num_replicas 5; allowed: at most the world_size, 4"),
        ({"share": 1}, "to share times num_replicas"),
        ({"global_batch": 257}, "global_batch is 257; allowed: from share"),
        ({"global_batch": math.nan}, "global_batch"),
        ({"bound": 0}, "bound"),
        ({"num_blocks": -1}, "is no amount"),
        ({"time": math.inf}, "time"),
        ({"values": {"dataloader.batch_size": math.nan}}, "dataloader.batch_size"),
        ({"values": {"dataloader.num_workers": 10**9}}, "dataloader.num_workers"),
        ({"choices": {"dataloader.num_workers": ["many"]}}, "dataloader.num_workers"),
        ({"choices": {"dataloader.num_workers": list(range(300))}}, "300 values"),
        ({"choices": {"dataloader.num_workers": 3}}, "choices holds a value that is no list"),
        ({"memory": {**asdict(MEMORY), "scale": 0}}, "memory.scale"),
        ({"memory": {**asdict(MEMORY), "parameter_bytes": -1}}, "memory.parameter_bytes"),
        (
            {"memory": {**asdict(MEMORY), "block_activation_bytes": [4, -1]}},
            "memory.block_activation_bytes is no amount",
        ),
        ({"memory": {**asdict(MEMORY), "block_activation_bytes": [1] * 20_000}}, "has too many numbers"),
    ],
)
def test_facts_that_cannot_be_are_refused_with_a_reason(changes: dict[str, Any], words: str) -> None:
    told = {**json.loads(made_facts().to_json()), **changes}
    with pytest.raises(ValueError, match=words):
        checked_facts(json.dumps(told))


def test_facts_that_are_too_long_are_not_even_read() -> None:
    with pytest.raises(ValueError, match="allowed: 262144"):
        checked_facts("[" * (MOST_FACTS + 1))


@settings(max_examples=200, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=4))
def test_facts_with_anything_in_them_are_told_or_refused(value: Any) -> None:
    told = json.loads(made_facts(memory=MEMORY).to_json())
    for name in told:
        try:
            found = checked_facts(json.dumps({**told, name: value}))
        except ValueError:
            continue
        assert 0 < found.world_size <= 1 << 24 and found.share <= found.global_batch


# ---- steps ----


def begun(world_size: int = 2) -> MeasurementRounds:
    seeing = MeasurementRounds(patience_seconds=30.0)
    seeing.expect(0, world_size)
    return seeing


def told_by(*workers: wire.Worker, world_size: int = 2) -> StepReport | None:
    seeing = begun(world_size)
    seeing.take(NOW, workers)
    return seeing.take_measurement(NOW)


def test_a_round_is_what_all_ranks_have_told_since_the_last_one() -> None:
    seeing = begun()
    seeing.take(NOW, [reported(0)])
    assert seeing.take_measurement(NOW) is None, "rank 1 has told nothing"
    seeing.take(NOW + 1, [reported(0, number=2)])
    seeing.take(NOW + 1, [reported(1)])
    seen = seeing.take_measurement(NOW + 1)
    assert seen is not None and (seen.num_steps, seen.num_ranks, seen.world_size) == (10, 2, 2)
    assert (seen.version, seen.step, seen.trouble) == (0, 20, "")
    assert seen.step_seconds == pytest.approx(sum(STEP.values()))
    assert seen.phases == pytest.approx({phase.label: seconds for phase, seconds in STEP.items()})
    assert seen.processor_share == pytest.approx(1.0)
    assert seeing.take_measurement(NOW + 2) is None, "and none of it comes a second time"


def test_steps_under_an_earlier_version_count_no_more_once_a_rank_has_told_of_a_newer_one() -> None:
    seeing = begun()
    seeing.take(NOW, [reported(0), reported(1, config_version=1)])
    assert seeing.take_measurement(NOW) is None
    seeing.take(NOW, [reported(0, number=2), reported(1, number=2)])
    assert seeing.take_measurement(NOW) is None, "both of which were begun before it came into force"
    seeing.take(NOW, [reported(0, number=3, config_version=1)])
    seen = seeing.take_measurement(NOW)
    assert seen is not None and (seen.version, seen.num_steps) == (1, 10) and seeing.version == 1


def test_steps_before_all_workers_are_there_do_not_count_for_a_while() -> None:
    seeing = begun()
    seeing.take(NOW, [reported(0, is_settling=True), reported(1)])
    assert seeing.take_measurement(NOW) is None
    seeing.take(NOW + 1, [reported(0, number=2)])
    seen = seeing.take_measurement(NOW + 1)
    assert seen is not None and seen.num_steps == 10
    for number in range(40):  # of workers that never come
        seeing.take(NOW + 2, [reported(rank, number=3 + number, is_settling=True) for rank in (0, 1)])
    assert seeing.take_measurement(NOW + 2) is not None


def test_who_waits_for_workers_is_not_silent() -> None:
    seeing = begun()
    seeing.take(NOW, [reported(1)])
    for second in range(1, 20):
        seeing.take(NOW + 10 * second, [reported(0, number=second, is_settling=True)])
        assert seeing.take_measurement(NOW + 10 * second) is None


def test_ranks_of_an_earlier_start_or_of_another_number_tell_nothing() -> None:
    assert told_by(reported(0, restart=1), reported(1, restart=1)) is None
    assert told_by(reported(0, world_size=4), reported(1, world_size=4)) is None
    assert told_by(reported(0, members=3), reported(1, members=3)) is None
    assert told_by(reported(0), reported(1, num_steps=0)) is None
    assert told_by(reported(7), reported(0)) is None


def test_after_a_change_of_members_to_as_many_ranks_no_step_of_before_counts() -> None:
    seeing = begun()
    seeing.take(NOW, [reported(0)])
    seeing.expect(0, 2, members=3)
    seeing.take(NOW + 1, [reported(1), reported(0, members=3)])
    assert seeing.take_measurement(NOW + 1) is None
    seeing.take(NOW + 2, [reported(1, members=3)])
    seen = seeing.take_measurement(NOW + 2)
    assert seen is not None and seen.num_ranks == 2


def test_bursts_count_as_they_are_and_what_holds_training_up_is_told_apart() -> None:
    """Of ten steps one waits for all samples: the one in the middle waits for none."""
    held = {Phase.CHECKPOINT: 2.0, Phase.CHANGE: 0.5}
    typical = {phase.label: seconds for phase, seconds in STEP.items() if phase is not Phase.DATA}
    seen = told_by(*(reported(rank, besides=held, typical=typical) for rank in (0, 1)))
    assert seen is not None
    assert seen.step_seconds == pytest.approx(sum(STEP.values())), "the mean, and not what most steps took"
    assert seen.held_up_seconds == pytest.approx(2.5)


def test_it_is_told_whether_samples_are_waited_for_or_worked_out() -> None:
    had = {"data": 0.03, "forward": 0.2}
    seen = told_by(*(reported(rank, processor_seconds=had) for rank in (0, 1)))
    assert seen is not None and seen.loading_processor_share == pytest.approx(0.1)
    seen = told_by(*(reported(rank, step={**STEP, Phase.DATA: 0.0}) for rank in (0, 1)))
    assert seen is not None and seen.loading_processor_share is None


def test_a_step_takes_as_long_as_on_the_rank_where_it_takes_longest() -> None:
    slow = {**STEP, Phase.FORWARD: 0.05}
    seen = told_by(reported(0), reported(1, step=slow))
    assert seen is not None and seen.step_seconds == pytest.approx(sum(slow.values())) and not seen.trouble


def test_a_rank_that_is_silent_is_named_once() -> None:
    seeing = begun()
    for second in range(0, 200, 10):
        seeing.take(NOW + second, [reported(0, number=second)])
        seen = seeing.take_measurement(NOW + second)
        assert (seen is not None) == (second == 40), "after more than thirty seconds, and not again"
        if seen is not None:
            assert seen.trouble == "rank 1 reported no steps for a while, and other ranks did"
    seeing.take(NOW + 200, [reported(1), reported(0, number=99)])
    seen = seeing.take_measurement(NOW + 200)
    assert seen is not None and not seen.trouble


@pytest.mark.parametrize("absurd", [math.nan, math.inf, -1.0])
def test_times_that_cannot_be_are_trouble_at_once(absurd: float) -> None:
    broken = reported(1)
    broken.windows[0].seconds["forward"] = absurd
    seen = told_by(reported(0), broken)
    assert seen is not None and seen.trouble.startswith("rank 1 reported impossible values of steps")


def test_times_of_all_ranks_that_cannot_be_are_trouble_once() -> None:
    broken = reported(0)
    broken.windows[0].seconds["forward"] = math.nan
    seeing = begun(world_size=1)
    for second in (0, 10, 20):
        seeing.take(NOW + second, [broken])
        seen = seeing.take_measurement(NOW + second)
        assert (seen is not None) == (second == 0)
        if seen is not None:
            assert seen.trouble.startswith("rank 0 reported impossible values of steps")
            assert (seen.num_steps, seen.num_ranks, seen.num_asked, seen.world_size) == (0, 0, 1, 1)
    seeing.take(NOW + 30, [reported(0, world_size=1)])
    seen = seeing.take_measurement(NOW + 30)
    assert seen is not None and not seen.trouble


def test_ranks_that_tell_of_steps_that_cannot_be_the_same_are_trouble() -> None:
    lies = {phase: seconds / 100 for phase, seconds in STEP.items()}
    seen = told_by(reported(0), reported(1, step=lies))
    assert seen is not None and "though ranks take them together" in seen.trouble
    nothing = {Phase.FORWARD: 1e-12}
    seen = told_by(reported(0, step=nothing), reported(1, step=nothing))
    assert seen is not None and seen.trouble == "rank 0 told of steps that took no time"


def test_the_peak_of_memory_is_the_highest_of_any_rank() -> None:
    seen = told_by(reported(0, accelerator_peak_bytes=5 << 30), reported(1, accelerator_peak_bytes=6 << 30))
    assert seen is not None and seen.peak_bytes == 6 << 30


def test_of_a_very_large_job_some_ranks_are_looked_at() -> None:
    seeing = begun(100_000)
    assert 500 < seeing.num_ranks <= 1024
    for rank in range(0, 100_000, 99):
        seeing.take(NOW, [reported(rank, world_size=100_000)])
    seen = seeing.take_measurement(NOW)
    assert seen is not None and seen.num_ranks == seeing.num_ranks and seen.world_size == 100_000
    facts = made_facts(world_size=100_000)
    assert why_untrusted(seen, facts) == ""
    assert "ranks have reported their steps" in why_untrusted(replace(seen, num_ranks=7), facts)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["seconds", "typical", "begin", "end", "num_steps"]), st.floats()), max_size=4)
)
def test_windows_with_anything_in_them_are_seen_or_are_trouble(changes: list[tuple[str, float]]) -> None:
    worker = reported(1)
    for name, value in changes:
        if name in ("seconds", "typical"):
            getattr(worker.windows[0], name)["forward"] = value
        elif name == "num_steps":
            worker.windows[0].num_steps = int(min(abs(value), 2**31)) if math.isfinite(value) else 0
        else:
            setattr(worker.windows[0], name, value)
    seen = told_by(reported(0), worker)
    if seen is not None:
        assert 0 <= seen.step_seconds < math.inf or seen.trouble
        assert all(0 <= each < math.inf for each in seen.phases.values())


def test_what_ranks_tell_of_their_steps_comes_through() -> None:
    told: dict[str, Any] = {
        "waiting_seconds": 0.01,
        "computing_seconds": 0.05,
        "is_settling": True,
        "accelerator_peak_bytes": 7,
    }
    said = reported(3, **told).windows[0]
    window = fitting_window(said, 3)
    assert window is not None and {name: getattr(window, name) for name in told} == told
    assert window.to_json() == window_record(said).to_json()
    said.accelerator_peak_bytes = 1 << 62
    large = fitting_window(said, 3)
    assert large is not None and large == replace(window, accelerator_peak_bytes=None), "no size of a memory"
    for broken in (float("nan"), -1.0, 1e300):
        said.waiting_seconds = broken
        assert fitting_window(said, 3) is None
