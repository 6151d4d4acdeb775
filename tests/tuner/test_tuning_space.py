"""What there is to choose from in a job."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.keys import KEYS, TuningSection
from elastic_ext.records.metrics import JobFacts, MemoryFacts, PassesMemory
from elastic_ext.tuner.costs import Budget
from elastic_ext.tuner.decisions import Decision
from elastic_ext.tuner.measurements import PROBE_STEPS
from elastic_ext.tuner.memory import HEADROOM
from elastic_ext.tuner.space import MOST_POINTS, Point, Space, point_of, space_of, values_of
from tests.support.job_facts import ALL_CHOICES, made_facts

FREE = TuningSection()


def _space(facts: JobFacts | None = None, **knobs: Any) -> Space:
    return space_of(facts or made_facts(), TuningSection(knobs=knobs or None))


def test_a_job_that_can_change_nothing_has_one_point() -> None:
    space = _space(made_facts(choices={}))
    assert not space.is_open and space.points == (space.present,)


def test_micro_batches_are_those_that_make_another_number_of_micro_steps() -> None:
    space = _space(made_facts(choices={"dataloader.batch_size": ()}, share=30))
    assert space.choices["batch_size"] == (1, 2, 3, 4, 5, 8, 10, 15, 30)
    assert [point.batch_size for point in space.points] == [1, 2, 3, 4, 5, 8, 10, 15, 30]


def test_the_present_point_is_there_whatever_is_allowed() -> None:
    facts = made_facts(choices={"dataloader.batch_size": ()}, values={"dataloader.batch_size": 7})
    space = space_of(facts, TuningSection(knobs={"dataloader.batch_size": (16, 32)}))
    assert space.present.batch_size == 7 and space.present in space.points
    assert set(space.choices["batch_size"]) == {7, 16, 22, 32}


@pytest.mark.parametrize(
    ("bounds", "allowed"),
    [((4, 4), (2, 4)), ((3, 6), (2, 3, 4, 6)), ((0, 1, 9), (0, 1, 2, 9)), ((5,), (2, 5))],
)
def test_a_person_says_what_a_knob_may_be(bounds: tuple[int, ...], allowed: tuple[int, ...]) -> None:
    facts = made_facts(choices={"dataloader.num_workers": ()}, values={"dataloader.num_workers": 2})
    space = space_of(facts, TuningSection(knobs={"dataloader.num_workers": bounds}))
    assert space.choices["num_workers"] == allowed


@pytest.mark.parametrize(
    ("bounds", "allowed"), [((2, 3), (None, 2)), ((3, 8), (None, 4)), ((3, 4, 6), (None, 3, 4, 6))]
)
def test_the_ends_of_a_range_are_no_choices_where_the_job_lists_them(
    bounds: tuple[int, ...], allowed: tuple[int | None, ...]
) -> None:
    """Shard degrees divide the ranks; of a list, a rank says what is wrong with it."""
    facts = made_facts(choices={**ALL_CHOICES, "parallelism.shard_degree": (2, 4)}, world_size=8)
    assert _space(facts, **{"parallelism.shard_degree": bounds}).choices["shard_degree"] == allowed


def test_a_knob_that_a_person_names_and_the_job_cannot_change_stays() -> None:
    space = space_of(made_facts(choices={}), TuningSection(knobs={"dataloader.num_workers": (1, 8)}))
    assert not space.is_open


def test_the_learning_rate_and_the_global_batch_are_no_knobs_of_a_space() -> None:
    facts = made_facts(choices={"optimizer.learning_rate": (), "global_batch_size": ()})
    knobs = {"optimizer.learning_rate": (1e-4, 1e-2), "global_batch_size": (64, 128)}
    assert not space_of(facts, TuningSection(knobs=knobs)).is_open


def test_what_makes_no_difference_is_as_at_present() -> None:
    values = {"parallelism.strategy": "no_shard", "parallelism.unit": 1, "communication.bucket_cap_mb": 25.0}
    space = _space(made_facts(choices=ALL_CHOICES, values=values))
    for point in space.points:
        if point.strategy == "no_shard":
            assert (point.unit, point.prefetch, point.shard_degree) == (1, None, None)
        else:
            assert point.bucket_cap_mb == 25.0
        if point.num_workers == 0:
            assert point.prefetch_factor == space.present.prefetch_factor
        assert (point.shard_degree is not None) == (point.strategy == "hybrid_shard")
    assert len(set(space.points)) == len(space.points) and space.present in space.points


def test_every_point_is_a_config() -> None:
    space = _space(made_facts(choices=ALL_CHOICES, values={"parallelism.strategy": "hybrid_shard"}, world_size=8))
    some = random.Random(1).sample(space.points, 200)
    for point in some:
        for before in random.Random(2).sample(some, 3):
            changes = {key: value for key, value in values_of(point, before).items() if value is not None}
            assert ElasticConfig.from_values(changes, version=1).values() == changes
            assert point_of({**_all_values(before), **values_of(point, before)}) == point


def _all_values(point: Point) -> dict[str, Any]:
    return values_of(point, Point(*["nothing"] * len(Point._fields)))


def test_a_space_stays_small_and_keeps_the_ends() -> None:
    choices = {**ALL_CHOICES, "dataloader.num_workers": tuple(range(200)), "parallelism.prefetch": tuple(range(50))}
    space = _space(made_facts(choices=choices, share=512, world_size=64))
    assert 1000 < len(space.points) <= MOST_POINTS + 1
    assert space.choices["num_workers"][0] == 0 and space.choices["num_workers"][-1] == 199
    assert space.choices["batch_size"][0] == 1 and space.choices["batch_size"][-1] == 512


def test_where_there_are_too_many_points_micro_batches_are_the_last_to_be_left_out() -> None:
    values = {"parallelism.strategy": "no_shard", "dataloader.batch_size": 2, "parallelism.activation_checkpoint": 0.0}
    facts = made_facts(choices=ALL_CHOICES, share=64, world_size=16, num_local=8, num_processors=8, values=values)
    choices = _space(dataclasses.replace(facts, device="cuda")).choices
    assert choices["batch_size"] == (1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 64)
    assert choices["activation_checkpoint"] == (0.0, 0.25, 0.5, 0.75, 1.0)


def test_what_is_so_by_itself_is_no_choice_beside_it() -> None:
    choices = _space(made_facts(choices=ALL_CHOICES)).choices
    assert 2 not in choices["prefetch_factor"] and 1 not in choices["unit"] and 25.0 not in choices["bucket_cap_mb"]
    said = _space(made_facts(choices=ALL_CHOICES, values={"parallelism.unit": 2})).choices
    assert said["unit"] == (1, 2, 4)


@pytest.mark.parametrize(
    ("present", "num_blocks", "choices"),
    [
        ("torch", 12, ("torch", 2)),
        (None, 3, (None, 2)),
        (1, 12, (1, 2)),
        (0, 12, (0, 1, 2)),
        (3, 12, (1, 2, 3)),
        ("torch", 2, ("torch",)),
        (1, 0, (1,)),
    ],
)
def test_units_are_gathered_ahead_where_there_are_some_and_the_model_is_sharded(
    present: Any, num_blocks: int, choices: tuple[Any, ...]
) -> None:
    values = {"parallelism.strategy": "full_shard", "parallelism.prefetch": present}
    ways = {"parallelism.strategy": ("no_shard", "full_shard"), "parallelism.prefetch": ()}
    space = _space(made_facts(choices=ways, values=values, num_blocks=num_blocks))
    assert space.choices["prefetch"] == choices
    assert {point.prefetch for point in space.points if point.strategy == "full_shard"} == set(choices)
    assert {point.prefetch for point in space.points if point.strategy == "no_shard"} == {present}


def test_where_there_are_too_many_points_units_ahead_are_left_out_first() -> None:
    values = {"parallelism.strategy": "full_shard", "parallelism.prefetch": "torch", "dataloader.batch_size": 2}
    ways = {**ALL_CHOICES, "parallelism.prefetch": ()}
    facts = made_facts(choices=ways, share=64, world_size=16, num_local=8, num_processors=8, values=values)
    facts = dataclasses.replace(facts, device="cuda")
    choices = _space(facts).choices
    assert choices["prefetch"] == ("torch",)
    without = dataclasses.replace(facts, choices=ALL_CHOICES)
    assert choices == _space(without).choices


def test_the_same_facts_make_the_same_space() -> None:
    assert _space(made_facts(choices=ALL_CHOICES)) == _space(made_facts(choices=ALL_CHOICES))


def test_facts_and_decisions_can_be_written_and_read_again() -> None:
    passes = PassesMemory(micro_batch=4, activation_checkpoint=0.5, forward_bytes=1, loss_bytes=2, backward_bytes=3)
    memory = MemoryFacts(
        source="fake", parameter_bytes=1, gradient_bytes=2, optimizer_bytes=3, buffer_bytes=0, passes=(passes,)
    )
    facts = dataclasses.replace(made_facts(choices=ALL_CHOICES), memory=memory)
    read = JobFacts.from_json(facts.to_json())
    assert read.memory == memory and space_of(read, FREE) == space_of(facts, FREE)
    assert read.to_json() == facts.to_json()
    with pytest.raises(ValueError, match="choices"):
        JobFacts.from_json(dataclasses.replace(facts, choices={"a": 5}).to_json())  # type: ignore[dict-item]
    decision = Decision(number=1, time=2.0, kind="probe", reason="why", base=3, changes={"a": None}, predicted=4.0)
    assert Decision.from_json(decision.to_json()) == decision
    with pytest.raises(ValueError, match="before"):
        Decision.from_json(dataclasses.replace(decision, measured=-1.0).to_json())
    for broken in (dataclasses.replace(facts, share=0), dataclasses.replace(facts, world_size=-1)):
        with pytest.raises(ValueError, match="share"):
            JobFacts.from_json(broken.to_json())


def test_the_table_of_keys_tells_what_the_tuner_takes_where_a_key_is_absent() -> None:
    def absent(name: str) -> float:
        return float(KEYS[f"tuning.{name}"].meaning.rpartition("; absent: ")[2])

    assert (absent("headroom"), absent("probe_steps")) == (HEADROOM, PROBE_STEPS)
    assert Budget(absent("probe_budget"))._least_pace == Budget()._least_pace
