"""How a tuner has steps grow where a user lets them: as far as that teaches more in the same time, and no further."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.keys import TuningSection
from elastic_ext.records.metrics import JobFacts, LearningFacts, MemoryFacts, PassesMemory
from elastic_ext.tuner.batch_efficiency import AllowedBatchSizes, allowed_sizes, facts_at
from elastic_ext.tuner.decisions import Decision
from elastic_ext.tuner.memory import JobMemory
from elastic_ext.tuner.space import Point, point_of
from tests.support.job_facts import made_facts
from tests.support.thinning import each_once
from tests.support.tuned_jobs import TunedJob

FIRST, ENOUGH = 256, 250
"""Samples of a step at first; steps after which it has settled at some size."""
CHOICES: Mapping[str, tuple[Any, ...]] = {"dataloader.batch_size": (), "global_batch_size": ()}
KNOBS: Mapping[str, Any] = {"global_batch_size": (64, 8192)}
HYSTERESIS = 0.08
"""What the sizes that are tried may lie below the best of all."""


def _seconds(point: Point, share: int, waiting: float = 0.15) -> dict[str, float]:
    """A step has micro-steps, and is ended by all ranks together."""
    micro_batch = min(int(point.batch_size or 1), share)
    passes = -(-share // micro_batch) * 0.004 + share * 0.001
    return {"forward": passes / 3, "backward": passes * 2 / 3, "communication": waiting, "optimizer": 0.01}


def _quick_seconds(point: Point, share: int) -> dict[str, float]:
    return _seconds(point, share, waiting=0.0002)


def _facts(noise: float | None = 2000.0, rule: str = "sqrt", **changes: Any) -> JobFacts:
    learning = LearningFacts(rule=rule, first_batch=FIRST, noise_scale=noise)
    values = {"dataloader.batch_size": 16, "optimizer.learning_rate": 1e-3, "global_batch_size": FIRST}
    given = {"choices": CHOICES, "values": values, "learning": learning, "num_parameters": 10_000_000}
    return made_facts(**{**given, **changes})


def _job(facts: JobFacts | None = None, knobs: Mapping[str, Any] | None = None, **options: Any) -> TunedJob:
    config = {"tuning.knobs": dict(KNOBS if knobs is None else knobs), **options.pop("config", {})}
    return TunedJob(facts=facts or _facts(), sized=options.pop("sized", _seconds), config=config, **options)


def _grown(facts: JobFacts | None = None, knobs: Mapping[str, Any] | None = None, **options: Any) -> TunedJob:
    job = _job(facts, knobs, **options)
    job.run(ENOUGH)
    assert job.controller.standing.stand == "settled"
    return job


def _pace(size: int, noise: float, sized: Callable[[Point, int], dict[str, float]] = _seconds) -> float:
    """Samples of the first size's worth per second, by the best micro-batches; of those that make as many micro-steps,
    which take the same time, the smallest is tried."""
    share = -(-size // 4)
    micro_batches = {-(-share // num_micro_steps) for num_micro_steps in range(1, share + 1)}
    best = min(sum(sized(Point(batch_size=each), share).values()) for each in micro_batches)
    return size / best * (noise + FIRST) / (noise + size)


def _sizes_told(job: TunedJob) -> list[int]:
    return [each.changes["global_batch_size"] for each in job.told if "global_batch_size" in each.changes]


def _in_a_try(**options: Any) -> TunedJob:
    """A job whose steps have been of another size for a step or two."""
    job = _job(**options)
    while job.size == FIRST:
        job.run(1)
    job.run(2)
    return job


@pytest.mark.parametrize(("noise", "rule"), each_once([300.0, 2000.0, 10_000.0, 1e6], ["linear", "sqrt", "adascale"]))
def test_steps_grow_to_the_size_that_teaches_most_in_the_same_time(noise: float, rule: str) -> None:
    job = _job(_facts(noise, rule), knobs={"global_batch_size": (64, 4096)})
    job.run(2 * ENOUGH)
    assert job.controller.standing.stand == "settled"
    best = max(_pace(size, noise) for size in range(FIRST, 4097, 4))
    assert _pace(job.size, noise) >= (1 - HYSTERESIS) * best
    if noise >= 2000:
        assert job.size > FIRST
    assert min(_sizes_told(job), default=FIRST) >= FIRST and max(_sizes_told(job), default=FIRST) <= 4096


def test_a_size_is_a_probe_that_is_measured_and_says_what_it_means_to_what_is_learned() -> None:
    job = _grown()
    first = next(each for each in job.told if "global_batch_size" in each.changes)
    assert first.kind == "probe" and not first.outcome
    assert first.changes["global_batch_size"] > FIRST and first.instead["global_batch_size"] == FIRST
    assert f"samples a step instead of {FIRST}" in first.reason and "a noise scale of 2,000 samples" in first.reason
    assert "a sample teaches 0.898 times as much" in first.reason and "learning rates become 1.41 times" in first.reason
    assert "(sqrt)" in first.reason
    (ended,) = [each for each in job.told if each.number == first.number and each.outcome]
    assert ended.outcome == "kept" and "training learns 1." in ended.reason
    assert ended.before and ended.predicted and ended.measured
    assert ended.measured == pytest.approx(ended.predicted, rel=0.15) and ended.measured > 1.2 * ended.before
    for each in job.told:
        assert Decision.from_json(each.to_json()) == each
    assert job.configs[job.version]["global_batch_size"] == job.size


@pytest.mark.parametrize(
    ("facts", "knobs"),
    [
        (_facts(), {}),
        (_facts(rule="none"), KNOBS),
        (_facts(learning=None), KNOBS),
        (_facts(None), KNOBS),
        (_facts(choices={"dataloader.batch_size": ()}), KNOBS),
        (_facts(), {"global_batch_size": (FIRST, FIRST)}),
        (_facts(), {"global_batch_size": (FIRST,)}),
        (_facts(0.0), KNOBS),
    ],
)
def test_nothing_grows_unless_a_user_lets_it_and_it_is_known_what_comes_of_it(
    facts: JobFacts, knobs: Mapping[str, Any]
) -> None:
    job = _grown(facts, knobs)
    assert _sizes_told(job) == [] and job.size == FIRST


def test_steps_do_not_grow_where_little_is_waited_for_at_their_end() -> None:
    assert _pace(FIRST, 2000.0, _quick_seconds) > 0.99 * _pace(2 * FIRST, 2000.0, _quick_seconds)
    job = _grown(sized=_quick_seconds)
    assert job.size == FIRST and not _sizes_told(job), "by what smaller micro-batches have shown"
    facts = _facts(values={**_facts().values, "dataloader.batch_size": 64})
    job = _grown(facts, sized=_quick_seconds)
    assert job.size == FIRST and set(_sizes_told(job)) <= {FIRST, 2 * FIRST}, "a try shows it where nothing else has"


def test_why_steps_do_not_grow_is_said_once() -> None:
    job = _grown(_facts(rule="none"))
    (told,) = [each.reason for each in job.told if each.kind == "hold"]
    assert "global_batch_size in tuning.knobs: not tuned" in told and "give the trainer learning_rate_rule" in told
    fixed = {"global_batch_size": "the loader draws batches of its own"}
    job = _grown(_facts(choices={"dataloader.batch_size": ()}, fixed=fixed))
    (told,) = [each.reason for each in job.told if each.kind == "hold"]
    assert told.endswith("not tuned, since the loader draws batches of its own")
    values = {"dataloader.batch_size": 16}
    job = _grown(_facts(values=values), {**KNOBS, "optimizer.learning_rate": (1e-4, 1e-2)})
    (told,) = [each.reason for each in job.told if each.kind == "hold"]
    assert "the job tells of no learning rate" in told and job.size == FIRST


def test_as_long_as_noise_is_not_known_that_is_said_where_it_stands() -> None:
    job = _grown(_facts(None))
    assert "once it is known how noisy gradients are" in job.controller.standing.sentence
    assert "hold" not in job.kinds()
    job.tell_facts(learning=LearningFacts(rule="sqrt", first_batch=FIRST, noise_scale=2000.0))
    job.run(ENOUGH)
    assert job.size > FIRST and "noisy" not in job.controller.standing.sentence


@pytest.mark.parametrize(("rule", "most"), [("linear", 2.0), ("sqrt", 2.0), ("adascale", 1.5), ("linear", 1.2)])
def test_a_learning_rate_stays_within_the_bounds_that_a_user_gives(rule: str, most: float) -> None:
    noise = 4000.0
    job = _grown(_facts(noise, rule), {**KNOBS, "optimizer.learning_rate": (1e-4, most * 1e-3)})
    sizes = {FIRST, *_sizes_told(job)}
    factors: Mapping[str, Callable[[int], float]] = {
        "linear": lambda size: size / FIRST,
        "sqrt": lambda size: math.sqrt(size / FIRST),
        "adascale": lambda size: (noise / FIRST + 1) / (noise / size + 1),
    }
    assert all(factors[rule](size) <= most * (1 + 1e-9) for size in sizes)
    assert (job.size > FIRST) is (most > 1.2)


def test_a_rate_that_leaves_its_bounds_as_noise_grows_has_steps_shrink() -> None:
    """AdaScale's gain grows with the noise scale, up to the size itself."""
    job = _grown(_facts(2000.0, "adascale"), {**KNOBS, "optimizer.learning_rate": (1e-4, 3.5e-3)})
    size = job.size
    assert size > 3.5 * FIRST
    job.tell_facts(learning=LearningFacts(rule="adascale", first_batch=FIRST, noise_scale=1e6))
    job.run(ENOUGH)
    assert FIRST < job.size <= 3.5 * FIRST
    shrunk = next(each for each in job.told if each.instead.get("global_batch_size") == size)
    assert "beyond what tuning.knobs allow" in shrunk.reason


def test_only_sizes_that_a_user_lists_are_tried() -> None:
    job = _grown(_facts(1e6), {"global_batch_size": (FIRST, 400, 700, 1001, 5000)})
    assert set(_sizes_told(job)) <= {FIRST, 400, 700, 5000} and job.size in (700, 5000)


def test_a_size_that_measures_worse_is_taken_back_and_not_tried_again() -> None:
    def seconds(point: Point, share: int) -> dict[str, float]:
        """Whatever is larger is much slower than anything tells of."""
        found = _seconds(point, share)
        return found if share <= 64 else {**found, "communication": found["communication"] + share * 0.02}

    job = _grown(_facts(1e6), sized=seconds)
    assert job.size == FIRST
    tried = [each for each in job.told if each.kind == "probe" and "global_batch_size" in each.changes]
    undone = [each for each in tried if each.outcome]
    assert 1 <= len(undone) <= 2 and {each.outcome for each in undone} == {"undone"}
    assert all(each.measured and "times as fast" in each.reason for each in undone)
    back = [each for each in job.told if each.kind == "undo" and not each.outcome]
    assert [each.changes["global_batch_size"] for each in back] == [FIRST] * len(undone)
    assert [each.outcome for each in job.told if each.kind == "undo" and each.outcome] == ["kept"] * len(undone)
    before = len(_sizes_told(job))
    job.run(3 * ENOUGH)
    assert len(_sizes_told(job)) == before and "reopen" not in job.kinds()


def test_training_does_not_fall_behind_while_a_bad_size_is_tried() -> None:
    def seconds(point: Point, share: int) -> dict[str, float]:
        found = _seconds(point, share)
        return found if share <= 64 else {**found, "other": 1.2}

    job = _job(_facts(1e6), sized=seconds)
    began, samples = job.now, 0
    own = FIRST / sum(_seconds(job.point, 64).values())
    for _ in range(ENOUGH):
        job.run(1)
        samples += job.size
        if job.now - began > 60:
            assert samples / (job.now - began) >= 0.88 * own


def test_a_noisier_gradient_lets_steps_grow_further_and_a_calmer_one_has_them_shrink() -> None:
    job = _grown(_facts(600.0))
    first = job.size
    learning = LearningFacts(rule="sqrt", first_batch=FIRST, noise_scale=20_000.0)
    job.tell_facts(learning=learning)
    job.run(2 * ENOUGH)
    grown = job.size
    assert grown > first
    job.tell_facts(learning=dataclasses.replace(learning, noise_scale=1.0))
    job.run(2 * ENOUGH)
    assert job.size == FIRST, "never below what the user began with"
    assert min(_sizes_told(job)) >= FIRST and _pace(FIRST, 1.0) > _pace(grown, 1.0)


def test_bounds_that_a_person_makes_narrower_are_kept_to() -> None:
    job = _grown(_facts(1e6), {"global_batch_size": (64, 2048)})
    assert job.size == 2048
    job.edit({"tuning.knobs": {"global_batch_size": (64, 700)}})
    job.tell_facts()
    job.run(ENOUGH)
    assert FIRST <= job.size <= 700 and "pause" not in job.kinds()
    shrunk = next(each for each in job.told if each.version is None and each.instead.get("global_batch_size") == 2048)
    assert shrunk.kind == "probe" and "beyond what tuning.knobs allow" in shrunk.reason


def test_a_persons_size_pauses_it() -> None:
    job = _grown()
    (paused,) = job.edit({"global_batch_size": 512})
    assert paused.kind == "pause" and "a person set global_batch_size" in paused.reason
    job.tell_facts()
    assert job.run(50) == [] and job.size == 512
    job.take(job.controller.resume(job.now))
    job.run(ENOUGH)
    assert job.controller.standing.stand == "settled" and job.size >= FIRST


def test_a_persons_edit_while_a_size_is_tried_pauses_it_and_stays() -> None:
    job = _in_a_try()
    told = job.edit({"global_batch_size": FIRST})
    assert [(each.kind, each.outcome) for each in told] == [("probe", "undone"), ("undo", ""), ("pause", "")]
    assert "global_batch_size" not in told[1].changes, "which the person has set"
    job.tell_facts()
    assert job.run(50) == [] and job.size == FIRST
    job.take(job.controller.resume(job.now))
    job.run(ENOUGH)
    assert job.size > FIRST


def test_pause_takes_back_the_size_that_is_tried() -> None:
    job = _in_a_try()
    told = job.take(job.controller.pause(job.now, "a person wants to look at it"))
    assert [(each.kind, each.outcome) for each in told] == [("probe", "undone"), ("undo", ""), ("pause", "")]
    assert job.size == FIRST and job.run(30) == []
    job.take(job.controller.resume(job.now))
    job.run(ENOUGH)
    assert job.size > FIRST and job.controller.standing.stand == "settled"


def test_bounds_that_a_person_changes_while_a_size_is_tried_begin_anew_with_the_size_before() -> None:
    job = _in_a_try()
    assert job.edit({"tuning.knobs": {"dataloader.batch_size": (1, 64)}}) == []
    told = job.tell_facts()
    assert [(each.kind, each.outcome) for each in told] == [("probe", "undone"), ("undo", "")]
    job.run(ENOUGH)
    assert job.size == FIRST and job.controller.standing.stand == "settled"


@pytest.mark.parametrize(("version", "missing"), [(0, "reported no steps of"), (2, "not described itself with")])
def test_a_size_of_which_the_job_never_tells_is_taken_back(version: int, missing: str) -> None:
    job = _job(_facts(choices={"global_batch_size": ()}))
    told = [each for _ in range(20) for each in job.controller.see(job.now, job.seen())]
    (asked,) = [each for each in told if each.changes]
    job.controller.written(job.now, asked.number, 2)
    back = [each for _ in range(60) for each in job.controller.see(job.now, job.seen(version=version))]
    assert [(each.kind, each.outcome) for each in back] == [("probe", "undone"), ("undo", "")]
    assert f"the job has {missing} that size" in back[-1].reason and back[-1].changes["global_batch_size"] == FIRST


def test_a_size_that_cannot_be_measured_is_taken_back() -> None:
    job = _in_a_try()
    told = job.run(40, trouble="rank 2 is silent")
    assert [each.kind for each in told if not each.outcome] == ["hold", "undo"]
    assert job.size == FIRST


def test_undo_takes_back_a_size_that_was_kept_and_it_is_not_tried_again() -> None:
    job = _grown(knobs={"global_batch_size": (64, 512)})
    assert job.size == 512
    while job.size == 512:
        assert any(each.kind == "undo" for each in job.take(job.controller.undo(job.now)))
    assert job.size == FIRST and job.controller.standing.stand == "paused"
    assert "256 samples a step instead of 512" in job.last("undo").reason
    job.take(job.controller.resume(job.now))
    job.run(ENOUGH)
    assert job.size < 512


def test_undo_while_a_size_is_tried_takes_that_back_as_well() -> None:
    job = _in_a_try()
    kept = [each for each in job.told if each.outcome == "kept" and each.changes][-1]
    job.take(job.controller.undo(job.now))
    assert job.size == FIRST and job.run(20) == []
    now = {**job.start, **job.configs[job.version]}
    assert all(now.get(key) == value for key, value in kept.instead.items())


def test_undo_while_a_size_is_tried_knows_the_values_that_it_sets_back() -> None:
    """Where ranks refuse it, the next config has these again."""

    def seconds(point: Point, share: int) -> dict[str, float]:
        return {**_seconds(point, share), "data": 0.0 if point.num_workers else 0.5}

    job = _in_a_try(facts=_facts(choices={"dataloader.num_workers": (), "global_batch_size": ()}), sized=seconds)
    in_force = {**job.start, **job.configs[job.version]}
    assert in_force["dataloader.num_workers"] and in_force["global_batch_size"] > FIRST
    job.take(job.controller.undo(job.now))
    undo = job.last("undo")
    assert undo.changes == {"global_batch_size": FIRST, "dataloader.num_workers": 0}
    assert undo.instead == {key: in_force[key] for key in undo.changes}


def test_a_restarted_master_takes_back_a_size_that_was_being_tried() -> None:
    job = _in_a_try()
    again = _again(job)
    assert again.told[0].outcome == "undone" and again.told[1].kind == "undo"
    assert "256 samples a step instead of" in again.told[1].reason
    assert "was not measured to its end" in again.told[1].reason
    assert again.size == FIRST and "reopen" not in again.kinds()
    again.run(ENOUGH)
    assert again.size > FIRST and again.controller.standing.stand == "settled"


def test_a_restarted_master_takes_back_a_size_and_leaves_what_a_person_has_set_since() -> None:
    job = _in_a_try()
    assert job.point.batch_size != 5
    job.configs[job.version + 1] = {**job.configs[job.version], "dataloader.batch_size": 5}
    again = _again(job)
    assert again.last("undo").changes == {"global_batch_size": FIRST}
    assert again.size == FIRST and again.point.batch_size == 5


def test_a_restarted_master_goes_on_from_a_size_that_was_kept_and_knows_those_that_were_not() -> None:
    def seconds(point: Point, share: int) -> dict[str, float]:
        found = _seconds(point, share)
        return found if share <= 128 else {**found, "communication": 4.0}

    job = _grown(_facts(1e6), sized=seconds)
    assert job.size == 512
    again = _again(job, sized=seconds)
    again.run(2 * ENOUGH)
    assert again.size == 512 and not [each for each in _sizes_told(again) if each in _sizes_told(job)]
    again.take(again.controller.undo(again.now))
    assert "undo" in again.kinds()


def test_a_restarted_master_does_not_try_a_size_again_that_a_person_took_back() -> None:
    job = _grown(knobs={"global_batch_size": (64, 512)})
    while job.size == 512:
        assert any(each.kind == "undo" for each in job.take(job.controller.undo(job.now)))
    again = _again(job)
    again.take(again.controller.resume(again.now))
    again.run(2 * ENOUGH)
    assert again.size < 512 and 512 not in [each.changes.get("global_batch_size") for each in again.told]


def _again(job: TunedJob, sized: Callable[[Point, int], dict[str, float]] = _seconds) -> TunedJob:
    """Its master is started again."""
    decisions = list({each.number: each for each in job.told}.values())
    facts = dataclasses.replace(job.facts, values={**job.start}, global_batch=FIRST, share=64)
    return TunedJob(decisions=decisions, configs=job.configs, facts=facts, sized=sized)


def test_sizes_that_ranks_refuse_are_not_tried_again() -> None:
    job = _job(_facts(1e6))
    asked: list[int] = []

    def refusing(point: Point) -> str:
        size = job.configs[max(job.configs)].get("global_batch_size", FIRST)
        asked.extend([size] if size != FIRST else [])
        return "the loader has too few samples" if size != FIRST else ""

    job.refusing = refusing
    job.run(2 * ENOUGH)
    assert asked and len(set(asked)) == len(asked) and job.size == FIRST
    refused = [each for each in job.told if each.outcome == "refused"]
    assert len(refused) == len(asked) and all("too few samples" in each.reason for each in refused)


@pytest.mark.parametrize("facts_come_first", [False, True])
def test_a_size_at_which_memory_does_not_suffice_is_taken_back(facts_come_first: bool) -> None:
    """The rank takes fewer samples at once, and tells so as a revision."""
    job = _in_a_try()
    tried = job.size
    job.change_inside({"dataloader.batch_size": 2})
    if facts_come_first:
        job.tell_facts()
    else:
        assert job.run(1) == [], "it may have changed what is no knob"
        job.tell_facts()
    told = job.run(1)
    assert [(each.kind, each.outcome) for each in told] == [("probe", "refused"), ("undo", "")]
    assert "the job itself put revision 1" in told[0].reason and job.size == FIRST
    job.run(ENOUGH)
    assert tried not in _sizes_told(job)[_sizes_told(job).index(FIRST) :]
    assert job.controller.standing.stand == "settled"


@pytest.mark.parametrize("facts_come_first", [False, True])
def test_a_size_is_tried_to_its_end_where_the_job_itself_changes_what_is_no_knob(facts_come_first: bool) -> None:
    job = _in_a_try()
    tried = job.size
    job.change_inside({"user.mixup": 0.1})
    if not facts_come_first:
        job.run(1)
    job.tell_facts()
    told = job.run(ENOUGH)
    (probe, *_) = [each for each in told if each.kind == "probe"]
    assert (probe.changes["global_batch_size"], probe.outcome) == (tried, "kept") and job.size >= tried


def test_memory_that_does_not_suffice_later_at_a_grown_size_changes_micro_batches_alone() -> None:
    job = _grown(_facts(1e6), {"global_batch_size": (64, 512)})
    size = job.size
    job.change_inside({"dataloader.batch_size": 4})
    job.tell_facts(bound=16)
    job.run(ENOUGH)
    assert job.size == size and int(job.point.batch_size or 0) < 16


def test_no_size_is_tried_for_which_memory_may_not_suffice() -> None:
    """Steps of one micro-step hold no gradients of an earlier one: those of two do."""
    gib = 2**30
    passes = tuple(
        PassesMemory(
            micro_batch=size,
            activation_checkpoint=0.0,
            forward_bytes=size * gib // 64,
            loss_bytes=size * gib // 64,
            backward_bytes=size * gib // 64,
        )
        for size in (1, 64, 256)
    )

    def memory(capacity: float) -> MemoryFacts:
        return MemoryFacts(
            source="fake",
            parameter_bytes=gib,
            gradient_bytes=4 * gib,
            optimizer_bytes=gib,
            buffer_bytes=0,
            block_bytes=gib // 8,
            passes=passes,
            capacity_bytes=int(capacity * gib),
        )

    def trained(facts: JobFacts) -> tuple[TunedJob, int]:
        job, held = _job(facts), 0
        for _ in range(ENOUGH):
            size = min(int(job.point.batch_size or 1), job.share)
            held = max(held, int(((5.25 if job.share > size else 2.75) + size / 64) * gib))
            job.run(1, peak_bytes=held)
        return job, held

    values = {
        **_facts().values,
        "dataloader.batch_size": 64,
        "parallelism.strategy": "full_shard",
        "parallelism.unit": 1,
    }
    sizes = []
    for capacity in (4.2, 5.6, 9.0):
        facts = _facts(1e6, memory=memory(capacity), device="cuda", values=values, num_blocks=8)
        job, held = trained(facts)
        assert held <= 0.94 * capacity * gib
        sizes.append(job.size)
    assert sizes[0] == FIRST < sizes[1] <= 2 * FIRST < sizes[2]


def test_memory_knows_of_other_sizes_what_it_has_learnt_of_one() -> None:
    passes = PassesMemory(
        micro_batch=16, activation_checkpoint=0.0, forward_bytes=9000, loss_bytes=9000, backward_bytes=9000
    )
    told = MemoryFacts(
        source="fake",
        parameter_bytes=1000,
        gradient_bytes=1000,
        optimizer_bytes=2000,
        buffer_bytes=0,
        passes=(passes,),
        capacity_bytes=100_000,
    )
    facts = _facts(device="cuda", memory=told)
    memory, point = JobMemory(facts), point_of(facts.values)
    memory.see(point, 20_000)
    before = memory.expected_bytes(point)
    assert before == pytest.approx(20_000, rel=0.01)
    other = facts_at(facts, 512)
    at_other = JobMemory(other, before=memory)
    assert at_other.expected_bytes(point) == before
    at_other.see(point, 19_000)
    again = JobMemory(dataclasses.replace(other, time=2000.0), before=at_other)
    assert again.expected_bytes(point) == before, "newer facts of that size change nothing"


def test_in_advise_mode_it_is_said_once_and_nothing_is_written() -> None:
    job = _job(mode="advise")
    job.run(ENOUGH)
    said = [each for each in job.told if "global_batch_size" in each.changes]
    assert [each.kind for each in said] == ["advise"] and job.size == FIRST and job.version == 1
    assert "training learns" in said[0].reason and said[0].predicted


def test_no_more_than_a_goal_is_asked_of_sizes() -> None:
    job = _job(config={"tuning.goal": 1.0})
    job.run(ENOUGH)
    assert job.size == FIRST


def test_the_same_calls_give_the_same_decisions() -> None:
    assert _job().run(ENOUGH) == _job().run(ENOUGH)


def test_another_world_while_a_size_is_tried_begins_anew_with_the_size_before() -> None:
    job = _in_a_try()
    told = job.tell_facts(world_size=2, num_replicas=2, num_local=2, share=job.size // 2)
    assert [each.kind for each in told if not each.outcome] == ["reopen", "undo"]
    assert job.size == FIRST
    job.run(ENOUGH, world_size=2, num_ranks=2)
    assert job.controller.standing.stand in ("settled", "probing")


_EVENTS = st.one_of(
    st.sampled_from(["pause", "resume", "undo", "edit", "widen", "again", "inside"]),
    st.floats(0, allow_nan=False, allow_infinity=False),
    st.none(),
)


@settings(deadline=None, max_examples=10)
@given(st.lists(_EVENTS, max_size=12), st.sampled_from(["linear", "sqrt", "adascale"]))
def test_whatever_noise_is_told_sizes_stay_within_bounds(events: list[Any], rule: str) -> None:
    knobs = {"global_batch_size": (64, 1500), "optimizer.learning_rate": (1e-4, 4e-3)}
    job = _job(_facts(500.0, rule), knobs)
    by_person = {FIRST}
    for event in events:
        if event == "edit":
            job.edit({"global_batch_size": 300})
            by_person.add(300)
            job.tell_facts()
        elif event == "widen":
            job.edit({"tuning.knobs": {**knobs, "global_batch_size": (64, 1400)}})
            job.tell_facts()
        elif event == "again":
            job = _again(job)
        elif event == "inside":
            job.change_inside({"dataloader.batch_size": 1})
            job.tell_facts()
        elif isinstance(event, str):
            ask = getattr(job.controller, event)
            job.take(ask(job.now, "why") if event == "pause" else ask(job.now))
        else:
            job.tell_facts(learning=LearningFacts(rule=rule, first_batch=FIRST, noise_scale=event))
        job.run(30)
        for each in job.told:
            size = each.changes.get("global_batch_size", FIRST)
            assert size in by_person or FIRST <= size <= 1500
            assert ElasticConfig.from_values(
                {key: value for key, value in each.changes.items() if value is not None}, version=1
            )
            assert math.isfinite(each.predicted or 0.0)
            if each.kind == "probe" and rule == "linear":
                assert size <= 4 * FIRST, "as far as the learning rate may follow"


@given(
    st.integers(1, 10**6),
    st.integers(1, 64),
    st.floats(0, 2.0**60),
    st.floats(1, 4),
    st.sampled_from(["linear", "sqrt", "adascale"]),
)
def test_sizes_are_whole_within_bounds_and_what_a_sample_teaches_falls(
    share: int, num_replicas: int, noise: float, times: float, rule: str
) -> None:
    present = share * num_replicas
    learning = LearningFacts(rule=rule, first_batch=max(present // 3, 1), noise_scale=noise)
    facts = made_facts(
        choices=CHOICES, share=share, world_size=num_replicas, learning=learning, values={"dataloader.batch_size": 1}
    )
    most = int(times * present)
    sizes = allowed_sizes(facts, TuningSection(knobs={"global_batch_size": (1, most)}))
    assert isinstance(sizes, AllowedBatchSizes)
    larger, smaller = sizes.larger(), sizes.smaller()
    assert all(present < size <= min(most, 2 * present + num_replicas) for size in larger)
    assert all(size % num_replicas == 0 for size in larger)
    assert all(learning.first_batch <= size < present for size in smaller)
    assert larger or most < present + num_replicas
    ladder = sorted({*larger, present, *smaller})
    efficiencies = [sizes.efficiency(size, noise) for size in ladder]
    factors = [sizes.learning_rate_factor(size, noise) for size in ladder]
    assert all(one >= other * (1 - 1e-12) for one, other in itertools.pairwise(efficiencies))
    assert all(one <= other * (1 + 1e-12) for one, other in itertools.pairwise(factors))
    assert all(
        1 - 1e-9 <= factor <= size / learning.first_batch * (1 + 1e-9)
        for factor, size in zip(factors, ladder, strict=True)
    )


def test_where_noise_is_no_longer_known_a_try_is_judged_by_what_was_known_as_it_began() -> None:
    job = _in_a_try(facts=_facts(1e6))
    job.tell_facts(learning=LearningFacts(rule="sqrt", first_batch=FIRST, noise_scale=None))
    while (now := job.controller.standing).stand == "probing" and "another global batch size" in now.sentence:
        job.run(1)
    ended = [each for each in job.told if each.outcome and "global_batch_size" in each.changes][-1]
    assert ended.outcome == "kept" and "at the noise scale that was expected" in ended.reason
    size = job.size
    job.run(ENOUGH)
    assert job.size == size > FIRST, "nothing further is tried by it"


def test_noise_that_falls_while_a_size_is_tried_has_it_taken_back() -> None:
    job = _in_a_try(facts=_facts(1e6))
    job.tell_facts(learning=LearningFacts(rule="sqrt", first_batch=FIRST, noise_scale=1.0))
    job.run(ENOUGH)
    tried = [each for each in job.told if each.outcome and each.kind == "probe" and "global_batch_size" in each.changes]
    assert [each.outcome for each in tried] == ["undone"] and job.size == FIRST
    back = job.last("undo")
    assert back.predicted == tried[0].before and back.outcome == "kept" and back.measured
