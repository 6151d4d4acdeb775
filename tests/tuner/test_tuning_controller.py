"""What a tuner decides by what it is told, and what it does not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.records.metrics import MemoryFacts, PassesMemory
from elastic_ext.tuner.controller import Controller
from elastic_ext.tuner.decisions import Decision
from elastic_ext.tuner.explain import rate_in_words
from elastic_ext.tuner.measurements import StepReport
from elastic_ext.tuner.space import Point, point_of
from tests.support.job_facts import made_facts
from tests.support.tuned_jobs import LOADER, TunedJob, loader_seconds

ENOUGH = 120
"""Steps after which it has settled."""


def _settled(**options: Any) -> TunedJob:
    job = TunedJob(**options)
    job.run(ENOUGH)
    assert job.controller.standing.stand == "settled"
    return job


def test_a_job_that_waits_for_samples_is_tuned_while_it_trains() -> None:
    job = TunedJob()
    before = job.rate()
    job.run(ENOUGH)
    assert job.rate() > 3 * before
    first = next(each for each in job.told if each.kind == "probe")
    assert "workers instead of 0" in first.reason and "samples/s predicted" in first.reason
    assert "samples were waited for" in first.reason
    assert first.predicted and first.before and first.before == pytest.approx(before, rel=0.05)
    standing = job.controller.standing
    assert standing.stand == "settled" and standing.best_rate == pytest.approx(job.rate(), rel=0.05)


def test_every_probe_is_measured_and_kept_or_undone() -> None:
    job = _settled()
    closed = {each.number: each for each in job.told if each.kind == "probe" and each.outcome}
    assert set(closed) == {each.number for each in job.told if each.kind == "probe"}
    for each in closed.values():
        assert each.outcome in ("kept", "undone") and each.measured and each.version
        point = point_of({**job.start, **job.configs[each.version]})
        assert each.measured == pytest.approx(job.rate(point), rel=0.1)
    assert [each.number for each in job.told if not each.outcome] == sorted({each.number for each in job.told})


def test_the_same_calls_give_the_same_decisions() -> None:
    assert TunedJob().run(ENOUGH) == TunedJob().run(ENOUGH)


def test_a_probe_is_in_force_no_longer_than_it_takes_to_measure_it() -> None:
    """Two steps more than are measured: the first one does not count, and one is on its way as it ends."""
    job = TunedJob(config={"tuning.probe_steps": 4})
    lengths: list[int] = []
    for _ in range(ENOUGH):
        before = len(job.told)
        job.run(1)
        lengths.extend([0] * any(each.changes and not each.outcome for each in job.told[before:]))
        if lengths:
            lengths[-1] += 1
    assert lengths and max(lengths[:-1]) <= 4 * 4 + 2


def test_training_is_never_much_slower_than_it_would_be_without() -> None:
    """Whatever is tried is bad here: the present config is the best there is."""

    def seconds(point: Point) -> dict[str, float]:
        is_start = point.batch_size == 1 and point.num_workers == 0
        return {"data": 0.1, "forward": 0.1 if is_start else 0.25, "backward": 0.1 if is_start else 0.25}

    job = TunedJob(seconds=seconds, noise=0.01)
    began, own = job.now, 0.3
    for _ in range(400):
        job.run(1)
        if job.now - began > 60:
            assert job.step * own >= 0.9 * (job.now - began)
    assert job.step * own >= 0.9 * (job.now - began)
    assert job.point.batch_size == 1 and job.point.num_workers == 0
    undone = [each for each in job.told if each.outcome == "undone"]
    assert undone and all(each.measured is not None for each in undone)


def test_nothing_is_tried_that_may_not_fit_into_memory() -> None:
    passes = tuple(
        PassesMemory(
            micro_batch=size,
            activation_checkpoint=0.0,
            forward_bytes=size * 2**28,
            loss_bytes=size * 2**28,
            backward_bytes=size * 2**28,
        )
        for size in (1, 64)
    )
    memory = MemoryFacts(
        source="fake",
        parameter_bytes=2**28,
        gradient_bytes=2**28,
        optimizer_bytes=2**29,
        buffer_bytes=0,
        passes=passes,
        capacity_bytes=8 * 2**30,
    )
    job = TunedJob(facts=made_facts(choices=LOADER, memory=memory, device="cuda"))
    tried = set()
    for _ in range(ENOUGH):
        job.run(1, peak_bytes=2**28 * (5 + int(job.point.batch_size or 1)))
        tried.add(int(job.point.batch_size or 1))
    assert 8 < max(tried) <= 25, "with 5 parts of state, and 6 percent to be left free"
    assert all(each.predicted_bytes for each in job.told if each.kind == "probe")
    assert " 32 samples at once by the present plan would take " in job.last("settle").reason


def test_advice_is_given_once_and_nothing_is_written() -> None:
    job = TunedJob(mode="advise")
    told = job.run(ENOUGH)
    assert [each.kind for each in told] == ["advise"]
    (advice,) = told
    assert advice.changes and advice.predicted and advice.before and advice.predicted > 1.05 * advice.before
    assert job.version == 0 and job.controller.standing.stand == "watching"


def test_no_advice_is_given_where_nothing_is_much_better() -> None:
    values = {"dataloader.batch_size": 64, "dataloader.num_workers": 4}
    job = TunedJob(mode="advise", facts=made_facts(choices=LOADER, values=values))
    assert job.run(ENOUGH) == []


def test_off_does_nothing_until_a_config_says_otherwise() -> None:
    job = TunedJob(mode="off")
    assert job.run(20) == [] and job.controller.standing.stand == "off"
    job.edit({"tuning.mode": "auto"})
    job.tell_facts()
    assert "probe" in [each.kind for each in job.run(ENOUGH)]


def test_a_config_that_turns_it_off_stops_it_and_what_was_being_tried_is_taken_back() -> None:
    job = _in_a_probe()
    job.edit({"tuning.mode": "off"})
    job.tell_facts()
    assert job.point.num_workers == 0, "what it was before the probe"
    count = len(job.told)
    job.run(50)
    assert len(job.told) == count and job.controller.standing.stand == "off"


def _in_a_probe() -> TunedJob:
    job = TunedJob()
    while "probe" not in job.kinds():
        job.run(1)
    job.run(2)
    assert job.point.num_workers != 0
    return job


def test_training_is_not_behind_nine_tenths_of_its_pace_where_short_steps_are_told_of_by_the_second() -> None:
    """Whatever is tried is bad here, and each try lasts for dozens of steps."""

    def seconds(point: Point) -> dict[str, float]:
        workers, micro_batch = int(point.num_workers or 0), int(point.batch_size or 1)
        passes = 0.04 * (1 + 0.5 * (workers > 0) + 0.3 * (micro_batch > 1))
        return {"data": 0.0 if workers else 0.004, "forward": passes / 3, "backward": passes * 2 / 3}

    job = TunedJob(seconds=seconds)
    own, num_steps, took = sum(seconds(job.point).values()), 25, 0.0
    paces = []
    for number in range(1, 121):
        seen = job.seen(num_steps=num_steps)
        took += num_steps * seen.step_seconds
        paces.append(number * num_steps * own / took)
        job.take(job.controller.see(job.now, seen))
    assert "probe" in job.kinds()
    assert min(paces[60:]) > 0.9, "in the first minute something may be tried that is not what it was taken for"


def test_a_persons_edit_pauses_it_until_resume() -> None:
    job = _in_a_probe()
    (closed, taken_back, paused) = job.edit({"dataloader.batch_size": 2})
    assert (closed.kind, closed.outcome) == ("probe", "undone")
    assert taken_back.kind == "undo" and set(taken_back.changes) == {"dataloader.num_workers"}
    assert "dataloader.num_workers as before" in taken_back.reason
    assert paused.kind == "pause" and "a person set dataloader.batch_size" in paused.reason
    job.tell_facts()
    assert job.run(50) == [] and job.point.batch_size == 2
    assert not job.point.num_workers, "what was being tried is not left in force by a pause"
    assert job.controller.standing.stand == "paused"
    (resumed, in_force) = job.take(job.controller.resume(job.now))
    assert resumed.kind == "resume" and (in_force.number, in_force.outcome) == (taken_back.number, "kept")
    assert "probe" in [each.kind for each in job.run(ENOUGH)] and job.rate() > 1000


@pytest.mark.parametrize("mode", ["off", "advise"])
def test_who_stops_it_while_something_is_tried_does_not_train_on_with_that(mode: str) -> None:
    job = _in_a_probe()
    own = point_of(job.start)
    assert job.point != own
    job.edit({"tuning.mode": mode})
    assert job.point == own
    job.run(50)
    assert job.point == own


def test_a_person_who_sets_what_is_being_tried_keeps_it() -> None:
    job = _in_a_probe()
    (closed, paused) = job.edit({"dataloader.num_workers": job.point.num_workers})
    assert closed.kind == "probe" and paused.kind == "pause" and "which changes nothing" in paused.reason
    wanted = job.point
    job.tell_facts()
    assert job.run(50) == [] and job.point == wanted


def test_nothing_more_is_tried_where_the_goal_is_reached() -> None:
    job = _settled()
    own = TunedJob().rate()
    modest = _settled(config={"tuning.goal": 2 * own})
    assert modest.rate() >= 2 * own and modest.kinds().count("probe") < job.kinds().count("probe")
    assert "as fast as tuning.goal asks for" in modest.last("settle").reason
    content = TunedJob(config={"tuning.goal": own / 2})
    content.run(ENOUGH)
    assert "probe" not in content.kinds() and content.rate() == own


def test_what_tries_may_cost_is_what_a_person_allows() -> None:
    """Whatever is tried is bad here: with next to no budget for it, less is."""

    def seconds(point: Point) -> dict[str, float]:
        is_start = point.batch_size == 1 and point.num_workers == 0
        return {"data": 0.1, "forward": 0.1 if is_start else 0.25, "backward": 0.1 if is_start else 0.25}

    def num_probes(**config: Any) -> int:
        job = TunedJob(seconds=seconds, config=config)
        job.run(400)
        return job.kinds().count("probe")

    assert num_probes(**{"tuning.probe_budget": 0.001}) < num_probes(**{"tuning.probe_budget": 0.5})


def test_memory_that_a_person_gives_is_kept_to_where_nothing_else_says_how_much_there_is() -> None:
    passes = [
        PassesMemory(
            micro_batch=size,
            activation_checkpoint=0.0,
            forward_bytes=1000 * size,
            loss_bytes=1000 * size,
            backward_bytes=1000 * size,
        )
        for size in (1, 2, 4, 8, 16, 32, 64)
    ]
    memory = MemoryFacts(
        source="fake",
        parameter_bytes=100,
        gradient_bytes=100,
        optimizer_bytes=200,
        buffer_bytes=0,
        passes=tuple(passes),
    )
    facts = made_facts(choices=LOADER, memory=memory)
    assert int(_settled(facts=facts).point.batch_size or 0) > 10
    job = _settled(facts=facts, config={"tuning.memory_bytes": 10_000})
    sizes = {point_of({**job.start, **config}).batch_size for config in job.configs.values()}
    assert max(int(size or 0) for size in sizes) <= 9 and int(job.point.batch_size or 0) > 1


def test_edits_of_what_is_not_its_own_do_not_pause_it() -> None:
    job = _settled()
    assert job.edit({"tuning.headroom": 0.1}) == []
    job.tell_facts()
    assert job.controller.standing.stand != "paused"
    assert [each.kind for each in job.edit({"user.mixup": 0.1}, author="node")] == ["pause"]
    assert "the config file of a node" in job.last("pause").reason


def test_pause_takes_back_what_is_being_tried() -> None:
    job = _in_a_probe()
    told = job.take(job.controller.pause(job.now, "a person wants to look at it"))
    assert [(each.kind, each.outcome) for each in told] == [("probe", "undone"), ("undo", ""), ("pause", "")]
    assert job.point.num_workers == 0
    assert job.run(30) == [] and job.controller.pause(job.now, "again") == []


def test_undo_takes_back_the_last_change_that_was_kept() -> None:
    job = _settled()
    kept = [each for each in job.told if each.changes and each.outcome == "kept" and each.kind == "probe"]
    told = job.take(job.controller.undo(job.now))
    assert [each.kind for each in told if each.kind != "probe"] == ["undo", "pause"]
    undone = [each for each in told if each.outcome == "undone"][-1]
    for key, value in undone.instead.items():
        assert {**job.start, **job.configs[job.version]}.get(key) == value
    assert kept and job.run(30) == []
    while any(each.kind == "undo" for each in job.take(job.controller.undo(job.now))):
        pass
    assert {**job.start, **job.configs[job.version]} == job.start
    assert "no change to be taken back" in job.told[-1].reason


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ({"step_seconds": math.nan}, "a step is said to take nan"),
        ({"step_seconds": 0.0}, "a step is said to take 0"),
        ({"phases": {"data": math.nan}}, "data is said to take nan"),
        ({"phases": {"data": 10.0, "forward": 5.0}}, "the parts of a step add up to 1.5e+04 ms"),
        ({"num_ranks": 3}, "only 3 of 4 ranks have reported their steps"),
        ({"trouble": "rank 2 is silent"}, "rank 2 is silent"),
        ({"world_size": 5, "num_ranks": 5}, "reported for a job of 5 ranks"),
    ],
)
def test_what_cannot_be_trusted_decides_nothing_and_is_told_once(lie: Mapping[str, Any], reason: str) -> None:
    job = TunedJob()
    told = job.run(50, **lie)
    assert [each.kind for each in told] == ["hold"] and reason in told[0].reason
    assert job.version == 0
    assert "probe" in [each.kind for each in job.run(ENOUGH)], "it goes on by what can be trusted"


def test_a_probe_that_cannot_be_measured_is_taken_back() -> None:
    job = _in_a_probe()
    told = job.run(40, trouble="rank 2 is silent")
    assert [each.kind for each in told if not each.outcome] == ["hold", "undo"]
    assert job.point.num_workers == 0


def test_steps_that_jump_though_nothing_changes_decide_nothing() -> None:
    job = TunedJob()
    told: list[Decision] = []
    for at in range(60):
        told += job.run(1, step_seconds=0.2 if at % 2 else 3.0, phases={})
    assert [each.kind for each in told] == ["hold"] and "nothing changed between them" in told[0].reason


def test_silence_is_told_once_and_nothing_is_decided() -> None:
    job = _settled()
    assert job.controller.tick(job.now + 5) == []
    (told,) = job.controller.tick(job.now + 600)
    assert told.kind == "hold" and "the job has reported no steps for 600 s" in told.reason
    assert job.controller.tick(job.now + 700) == []


def test_a_job_whose_reports_cannot_be_trusted_is_not_silent() -> None:
    job = _settled()
    for _ in range(10):
        job.now += 30
        job.run(1, trouble="rank 2 is silent")
        assert job.take(job.controller.tick(job.now + 1)) == []
    assert "reported no steps" in job.controller.tick(job.now + 600)[0].reason


@pytest.mark.parametrize("is_paused", [True, False])
def test_a_job_that_is_heard_while_the_tuner_decides_nothing_is_not_taken_for_silent_afterwards(
    is_paused: bool,
) -> None:
    job = _settled()
    if is_paused:
        job.take(job.controller.pause(job.now, "a person wants to look at it"))
    else:
        values = {**job.configs[job.version], "tuning.headroom": 0.1}
        config = ElasticConfig.from_values(values, version=max(job.configs) + 1)
        assert job.controller.take_config(job.now, config, "person") == []
    job.now += 600
    assert job.run(2) == []
    if is_paused:
        job.take(job.controller.resume(job.now))
    assert job.controller.tick(job.now + 5) == []


def test_a_value_that_is_refused_is_not_tried_again() -> None:
    job = TunedJob()
    job.refusing = lambda point: "dataloader.num_workers is 8; rank 3 has no room" if point.num_workers == 8 else ""
    job.run(ENOUGH)
    refused = [each for each in job.told if each.outcome == "refused"]
    assert len(refused) <= 1 and "rank 3 has no room" in (refused[0].reason if refused else "rank 3 has no room")
    assert job.rate() > 1000 and job.controller.standing.stand == "settled"


def test_where_everything_is_refused_it_stays_as_it_was() -> None:
    job = TunedJob()
    job.refusing = lambda point: "no"
    job.run(ENOUGH)
    assert job.version == 0
    asked = [each for each in job.told if each.outcome == "refused"]
    assert asked and len({tuple(each.changes.items()) for each in asked}) == len(asked)


@pytest.mark.parametrize("facts_come_first", [False, True])
def test_what_the_job_itself_changes_back_is_not_tried_again(facts_come_first: bool) -> None:
    """As where memory did not suffice: the rank takes fewer samples at once, and tells so as a revision."""
    job = _in_a_probe()
    tried = job.point
    job.change_inside({"dataloader.batch_size": 1})
    if facts_come_first:
        job.tell_facts()
    (refused, *_) = job.run(1)
    assert refused.outcome == "refused" and "the job itself put revision 1" in refused.reason
    if not facts_come_first:
        job.tell_facts()
    points = {job.point for _ in range(ENOUGH) if job.run(1) is not None}
    assert job.controller.standing.stand == "settled" and job.rate() > 500
    assert tried not in points


@pytest.mark.parametrize("facts_come_first", [False, True])
def test_a_change_of_the_jobs_own_that_changes_no_knob_lets_the_search_go_on(facts_come_first: bool) -> None:
    job = _in_a_probe()
    job.change_inside({"optimizer.learning_rate": 0.5})
    if facts_come_first:
        job.tell_facts()
    job.run(1)
    job.tell_facts()
    job.run(ENOUGH)
    assert job.controller.standing.stand == "settled" and job.controller.standing.best_rate is not None


def test_what_follows_a_change_of_the_jobs_own_does_not_ask_again_for_what_that_has_changed() -> None:
    """The newest config has it still, and what is written next is based on that."""
    job = _in_a_probe()
    too_many = job.configs[job.version]["dataloader.batch_size"]
    job.change_inside({"dataloader.batch_size": 4})
    job.tell_facts(bound=too_many)
    job.run(ENOUGH)
    later = [each for version, each in job.configs.items() if version > 1]
    assert later and all(each["dataloader.batch_size"] < too_many for each in later)


def test_another_world_begins_another_search_and_keeps_what_was_learnt() -> None:
    job = _settled()
    told = job.tell_facts(world_size=3, num_replicas=3, global_batch=192)
    assert [each.kind for each in told] == ["reopen"] and "3 ranks train instead of 4" in told[0].reason
    probes = [each for each in job.run(ENOUGH) if each.kind == "probe" and not each.outcome]
    assert len(probes) <= 2, "nothing better is there, and that is known"
    assert job.controller.standing.stand == "settled"


@pytest.mark.parametrize("is_paused", [True, False])
def test_another_world_while_the_tuner_decides_nothing_gives_the_next_search_a_budget_of_its_own(
    is_paused: bool,
) -> None:
    """By what steps took in the world before, none of these slower steps could ever pay for a probe."""
    job = _settled(seconds=lambda point: _loading(point, 64 * 0.0005))
    before = job.point
    job.seconds = lambda point: _loading(point, 64 * 0.08)
    world = {"world_size": 2, "num_replicas": 2, "global_batch": 128}
    if is_paused:
        job.take(job.controller.pause(job.now, "a person wants to look at it"))
        assert job.tell_facts(**world) == []
        told = job.take(job.controller.resume(job.now))
    else:
        assert job.edit({"tuning.headroom": 0.1}) == []
        told = job.tell_facts(**world)
    assert [each.kind for each in told] == [*["resume"] * is_paused, "reopen"]
    assert "2 ranks train instead of 4" in told[-1].reason
    job.run(ENOUGH)
    assert job.point != before and job.rate() > 1.2 * job.rate(before)


def test_a_slower_job_is_tuned_anew_and_whoever_is_slow_is_named_first() -> None:
    job = _settled(seconds=lambda point: _loading(point, 64 * 0.0005))
    before = job.point
    job.run(60)
    job.seconds = lambda point: _loading(point, 64 * 0.008)
    named = "rank 3 on host b takes 1.50 times as long as is usual"
    told = job.run(2, slow_rank=named) + job.run(200)
    reopened = [each for each in told if each.kind == "reopen"]
    assert reopened and reopened[0].reason.startswith(f"the search for faster settings begins again: {named}")
    assert "times as long as before" in reopened[0].reason
    assert job.point != before and job.rate() > 1.2 * job.rate(before)


def _loading(point: Point, seconds: float) -> dict[str, float]:
    """Workers beyond three take something from training."""
    workers = int(point.num_workers or 0)
    passes = (64 * 0.001 + 0.002 * 64 / int(point.batch_size or 1)) * (1 + 0.05 * max(workers - 3, 0))
    return {"data": max(seconds / workers - passes, 0.0) if workers else seconds, "forward": passes}


def test_a_job_that_becomes_slow_while_something_is_tried_is_not_taken_for_a_bad_try() -> None:
    job = TunedJob()
    while job.kinds().count("probe") < 2:
        job.run(1)
    usual, rate = job.seconds, job.last("probe").before
    job.seconds = lambda point: {name: 3 * each for name, each in usual(point).items()}
    told = job.run(ENOUGH)
    (reopened,) = [each for each in told if each.kind == "reopen"]
    assert "times as long as when the same config was measured before" in reopened.reason
    assert rate is not None and job.rate() >= 0.95 * rate / 3
    assert job.controller.standing.best_rate == pytest.approx(job.rate(), rel=0.05)


def test_a_bad_try_is_told_from_a_job_that_has_become_slow() -> None:
    def seconds(point: Point) -> dict[str, float]:
        usual = loader_seconds(point)
        return {name: 40 * each if point.num_workers else each for name, each in usual.items()}

    job = TunedJob(seconds=seconds)
    told = job.run(ENOUGH)
    again = next(each for each in told if "is measured once more, as the job itself may have" in each.reason)
    doubted = next(each for each in told if each.number == again.number - 1 and each.outcome)
    assert again.kind == "undo" and doubted.kind == "probe" and doubted.outcome == "undone"
    assert doubted.reason.endswith("set aside until the best config before is measured once more")
    assert f"the {rate_in_words(doubted.measured or 0.0)} measured now count as well" in again.reason
    assert "reopen" not in job.kinds() and not job.point.num_workers
    with_workers = [each for each in told if each.kind == "probe" and each.changes.get("dataloader.num_workers")]
    assert len({each.number for each in with_workers}) <= 3, "it is learnt that workers are slow here"


def test_little_gains_are_not_worth_another_search() -> None:
    """The point that is in force has become a little worse than another one: not by enough."""
    job = _settled()
    job.run(60)
    ways, here = job.seconds, job.point

    def seconds(point: Point) -> dict[str, float]:
        return {name: each * 1.3 for name, each in ways(point).items()}

    job.seconds = seconds
    told = job.run(200)
    assert [each.kind for each in told if each.kind in ("reopen", "probe") and not each.outcome][:1] == ["reopen"]
    assert job.rate() >= 0.95 * job.rate(here)


def test_a_restarted_master_goes_on_and_takes_back_what_was_being_tried() -> None:
    job = _in_a_probe()
    again = TunedJob(decisions=list({each.number: each for each in job.told}.values()), configs=job.configs)
    assert again.told[0].outcome == "undone"
    undo = again.told[1]
    assert undo.kind == "undo" and "was not measured to its end" in undo.reason
    assert undo.number > max(each.number for each in job.told)
    assert again.point.num_workers == 0
    again.run(ENOUGH)
    assert again.rate() > 1000


def test_a_restarted_master_stays_paused() -> None:
    job = _settled()
    job.take(job.controller.pause(job.now, "a person wants to look at it"))
    decisions = list({each.number: each for each in job.told}.values())
    again = TunedJob(decisions=decisions, configs=job.configs)
    assert again.controller.standing.stand == "paused" and again.run(50) == []


def test_a_restarted_master_can_still_take_changes_back() -> None:
    job = _settled()
    decisions = list({each.number: each for each in job.told}.values())
    again = TunedJob(decisions=decisions, configs=job.configs)
    told = again.take(again.controller.undo(again.now))
    assert "undo" in [each.kind for each in told]


def test_undo_after_a_persons_edit_is_made_to_what_the_person_wrote() -> None:
    job = _settled()
    job.edit({"user.mixup": 0.5})
    job.tell_facts()
    told = job.take(job.controller.undo(job.now))
    assert [each.kind for each in told if not each.outcome] == ["undo"], "it was paused already"
    assert job.configs[job.version]["user.mixup"] == 0.5 and told[-1].base == job.version - 1


def test_a_paused_master_that_was_restarted_can_take_changes_back() -> None:
    job = _settled()
    job.take(job.controller.pause(job.now, "a person wants to look at it"))
    before = job.point
    again = TunedJob(decisions=list({each.number: each for each in job.told}.values()), configs=job.configs)
    again.take(again.controller.undo(again.now))
    assert again.point != before


def test_undo_of_what_a_restarted_master_finds_open_says_no_second_time_that_the_tuner_is_paused() -> None:
    job = _in_a_probe()
    probe = dataclasses.replace(job.last("probe"), version=job.version)
    controller = Controller(mode="auto", decisions=[probe])
    assert [each.kind for each in controller.pause(job.now, "a person wants to look at it")] == ["pause"]
    config = ElasticConfig.from_values(job.configs[job.version], version=job.version)
    assert controller.take_config(job.now, config, "generated") == []
    assert [each.kind for each in controller.undo(job.now)] == ["probe", "undo"]


def test_what_changes_what_is_learned_is_not_tuned_and_that_is_said() -> None:
    knobs = {"optimizer.learning_rate": (1e-4, 1e-2), "global_batch_size": (64, 128)}
    job = TunedJob(config={"tuning.knobs": knobs})
    job.run(ENOUGH)
    (told,) = [each for each in job.told if each.kind == "hold"]
    assert "optimizer.learning_rate and global_batch_size in tuning.knobs: not tuned" in told.reason
    keys = {key for each in job.told for key in each.changes}
    assert keys <= {"dataloader.batch_size", "dataloader.num_workers"}


def test_what_is_said_before_the_first_search_does_not_make_it_a_repeated_one() -> None:
    """A gain of three percent is worth a first search, whatever people are told first, and not worth a second."""

    def seconds(point: Point) -> dict[str, float]:
        return {"data": 0.0 if point.num_workers else 0.03, "forward": 0.97}

    options: dict[str, Any] = {"seconds": seconds, "noise": 0.0}
    choices = {"dataloader.num_workers": (0, 1)}
    plain = TunedJob(facts=made_facts(choices=choices), **options)
    told = TunedJob(
        facts=made_facts(choices=choices), config={"tuning.knobs": {"optimizer.learning_rate": (1, 2)}}, **options
    )
    plain.run(ENOUGH)
    told.run(ENOUGH)
    assert "hold" in told.kinds() and "probe" in plain.kinds()
    assert [each for each in told.kinds() if each != "hold"] == plain.kinds()


def test_where_there_is_nothing_to_choose_that_is_said_once_with_the_reason() -> None:
    fixed = {"dataloader.num_workers": "the loader is torch's own"}
    job = TunedJob(facts=made_facts(choices={}, fixed=fixed))
    job.run(60)
    assert [each.kind for each in job.told] == ["hold", "settle"]
    assert "the loader is torch's own" in job.told[0].reason


def test_a_config_that_never_comes_into_force_is_waited_for_and_told_of() -> None:
    job = TunedJob()
    while "probe" not in job.kinds():
        job.run(1)
    told = job.run(80, version=0)
    assert [each.kind for each in told] == ["hold"] and "steps are taken under version 0" in told[0].reason


def test_facts_of_a_refused_persons_config_are_not_waited_for_forever() -> None:
    job = TunedJob(mode="advise")
    job.run(10)
    config = ElasticConfig.from_values({"dataloader.batch_size": 4}, version=9)
    assert job.controller.take_config(job.now, config, "person") == []
    stands = [str(job.controller.standing.stand)]
    job.run(20)
    stands.append(str(job.controller.standing.stand))
    assert stands == ["waiting", "watching"]


_LIES = st.fixed_dictionaries(
    {},
    optional={
        "step_seconds": st.one_of(st.floats(), st.sampled_from([0.0, -1.0, 1e-9, 1e9, math.nan, math.inf])),
        "num_ranks": st.integers(0, 5),
        "world_size": st.integers(0, 5),
        "num_steps": st.integers(0, 3),
        "revision": st.integers(0, 2),
        "version": st.integers(0, 3),
        "phases": st.dictionaries(st.sampled_from(["data", "forward", "step", "x"]), st.floats(), max_size=3),
        "peak_bytes": st.integers(0, 2**50),
        "held_up_seconds": st.floats(0, 100),
    },
)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.one_of(_LIES, st.sampled_from(["pause", "resume", "undo", "tick", "edit"])), max_size=40))
def test_whatever_is_told_every_change_is_a_config_and_is_its_own(events: list[Any]) -> None:
    job = TunedJob(facts=made_facts(choices=LOADER))
    for event in events:
        if event == "edit":
            job.edit({"dataloader.batch_size": 1 + job.step % 8})
            job.tell_facts()
        elif isinstance(event, str):
            calls: dict[str, Any] = {
                "pause": lambda: job.controller.pause(job.now, "why"),
                "resume": lambda: job.controller.resume(job.now),
                "undo": lambda: job.controller.undo(job.now),
                "tick": lambda: job.controller.tick(job.now + 1000),
            }
            job.take(calls[event]())
        else:
            job.run(2)
            seen: StepReport = job.seen()
            job.take(job.controller.see(job.now, dataclasses.replace(seen, **event)))
    for each in job.told:
        assert set(each.changes) <= {"dataloader.batch_size", "dataloader.num_workers"}
        assert each.reason and Decision.from_json(each.to_json()) == each
    numbers = [each.number for each in job.told if not each.outcome]
    assert numbers == sorted(numbers)


def test_a_controller_that_is_told_nothing_waits() -> None:
    controller = Controller(mode="auto")
    assert controller.standing.stand == "waiting" and controller.tick(5.0) == [] and controller.resume(5.0) == []
    assert controller.undo(6.0)[0].kind == "hold"
    assert sum(loader_seconds(Point(batch_size=64, num_workers=4)).values()) < 0.1
