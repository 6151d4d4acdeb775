"""What a model of steps learns from steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from elastic_ext.records.metrics import JobFacts, MemoryFacts
from elastic_ext.tuner.measurements import PointMeasurement
from elastic_ext.tuner.performance_model import COEFFICIENTS, Fitted, PointColumns, columns_of, fit, phases_of, prior_of
from elastic_ext.tuner.space import Point
from tests.support.job_facts import made_facts

MEMORY = MemoryFacts(
    source="fake",
    parameter_bytes=4 * 10**9,
    gradient_bytes=4 * 10**9,
    optimizer_bytes=8 * 10**9,
    buffer_bytes=0,
    block_bytes=3 * 10**8,
    other_bytes=4 * 10**8,
)
START = Point(batch_size=2, num_workers=0, pin_memory=False, strategy="no_shard", activation_checkpoint=0.0)


def _facts(**changes: object) -> JobFacts:
    return made_facts(**{"memory": MEMORY, "device": "cuda", "num_processors": 8, **changes})  # type: ignore[arg-type]


def _numbers(**seconds: float) -> np.ndarray:
    usual = {
        "micro_step": 0.01,
        "sample": 0.004,
        "least_micro_step": 0.001,
        "recomputing": 0.33,
        "sharded_passes": 1.02,
        "unit": 1e-4,
        "gather": 0.7,
        "near": 1e-11,
        "far": 2e-10,
        "message": 5e-5,
        "beside": 3.0,
        "loading": 0.001,
        "working": 1.0,
        "collating": 5e-5,
        "handing": 2e-4,
        "loaders": 8.0,
        "hindering": 0.02,
        "unevenness": 0.1,
        "optimizer": 0.02,
        "copying": 1e-4,
        "pinned": 0.2,
        "other": 0.001,
    }
    assert tuple(usual) == COEFFICIENTS
    found: np.ndarray = np.log(np.array(list({**usual, **seconds}.values())))
    return found


def _measured(
    numbers: np.ndarray, points: Sequence[Point], facts: JobFacts, noise: float = 0.0
) -> list[PointMeasurement]:
    """What a job whose steps are as the model has them would show."""
    said = phases_of(numbers, columns_of(points, facts), facts.share)
    random = np.random.default_rng(1)
    found = []
    for at, point in enumerate(points):
        phases = {name: float(each[at]) * math.exp(random.normal(0, noise)) for name, each in said.items()}
        passes = phases.pop("passes")
        phases |= {"forward": passes / 3, "backward": passes * 2 / 3}
        seconds = sum(phases.values())
        found.append(
            PointMeasurement(point=point, seconds=seconds, spread=0.0, num_steps=3, num_reports=3, phases=phases)
        )
    return found


def _fitted(numbers: np.ndarray, points: Sequence[Point], facts: JobFacts, noise: float = 0.0) -> Fitted:
    columns = columns_of(points, facts)
    measured = _measured(numbers, points, facts, noise)
    return fit(prior_of(facts, measured[0], columns.at([0])), measured, columns, facts.share)


def _steps(numbers: np.ndarray, points: Sequence[Point], facts: JobFacts) -> np.ndarray:
    return np.array(sum(phases_of(numbers, columns_of(points, facts), facts.share).values()))


def test_two_sizes_tell_what_a_micro_step_and_a_sample_take() -> None:
    facts, numbers = _facts(), _numbers()
    points = [START, START._replace(batch_size=32)]
    others = [START._replace(batch_size=size) for size in (1, 4, 8, 16, 64)]
    found = _steps(_fitted(numbers, points, facts).log_coefficients, others, facts)
    assert found == pytest.approx(_steps(numbers, others, facts), rel=0.05)


def test_one_size_leaves_that_open_and_it_is_known_to_be_open() -> None:
    facts, numbers = _facts(), _numbers()
    large = columns_of([START, START._replace(batch_size=64)], facts)
    deviations = _fitted(numbers, [START], facts).log_seconds(large, facts.share).std(axis=0)
    assert deviations[0] < 0.12 < 0.2 < deviations[1]


def test_workers_load_side_by_side_and_steps_wait_for_the_rest() -> None:
    facts, numbers = _facts(), _numbers(loading=0.05)
    points = [START, START._replace(num_workers=2)]
    fitted = _fitted(numbers, points, facts)
    steps = _steps(fitted.log_coefficients, [START._replace(num_workers=each) for each in (0, 2, 4, 8)], facts)
    assert (np.diff(steps) < 0).all()
    true = _steps(numbers, [START._replace(num_workers=4)], facts)
    assert steps[2] == pytest.approx(true[0], rel=0.1)


def test_loaders_that_sleep_are_learnt_to_scale_beyond_the_processors() -> None:
    facts = _facts(num_processors=2)
    numbers = _numbers(loading=0.2, working=0.02, loaders=64.0, hindering=0.001, unevenness=0.01)
    workers = (0, 2, 4, 8)
    fitted = _fitted(numbers, [START._replace(num_workers=each) for each in workers], facts)
    columns = columns_of([START._replace(num_workers=each) for each in (8, 16)], facts)
    drawn = fitted.log_seconds(columns, facts.share)
    assert np.mean(drawn[:, 1] < drawn[:, 0] - 0.1) > 0.25, "that it may go on so is thought possible"
    busy = _fitted(_numbers(loading=0.2, loaders=2.0), [START._replace(num_workers=each) for each in workers], facts)
    more = _steps(busy.log_coefficients, [START._replace(num_workers=each) for each in (8, 16)], facts)
    assert more[1] >= more[0]


def test_loaders_that_wait_are_expected_to_scale_beyond_the_processors_and_others_are_not() -> None:
    facts = _facts(num_processors=1)
    columns = columns_of([START, START._replace(num_workers=8)], facts)

    def expected(loading_share: float) -> np.ndarray:
        phases = {"data": 0.9, "forward": 0.03, "backward": 0.06, "optimizer": 0.01}
        first = PointMeasurement(START, 1.0, 0.0, 3, 3, phases=phases, loading_share=loading_share)
        prior = prior_of(facts, first, columns.at([0]))
        found: np.ndarray = np.exp(
            fit(prior, [first], columns.at([0]), facts.share).log_seconds(columns, facts.share)[0]
        )
        return found

    waiting, working = expected(0.03), expected(0.95)
    assert waiting[1] < 0.5 * waiting[0]
    assert working[1] > 0.8 * working[0]


def test_a_slow_link_is_learnt_from_what_is_waited_for_gradients() -> None:
    facts = _facts(world_size=16, num_local=4)
    for far in (1e-10, 2e-9):
        numbers = _numbers(far=far)
        fitted = _fitted(numbers, [START], facts)
        full, hybrid = (
            START._replace(batch_size=16, strategy="full_shard"),
            START._replace(batch_size=16, strategy="hybrid_shard", shard_degree=4),
        )
        found, true = _steps(fitted.log_coefficients, [full, hybrid], facts), _steps(numbers, [full, hybrid], facts)
        assert (found[0] > found[1]) == (true[0] > true[1])
        assert found == pytest.approx(true, rel=0.35)


def test_noise_in_what_was_measured_does_little() -> None:
    facts, numbers = _facts(), _numbers(loading=0.02)
    points = [START._replace(batch_size=size, num_workers=workers) for size, workers in ((2, 0), (8, 2), (32, 4))]
    found = _steps(_fitted(numbers, points, facts, noise=0.05).log_coefficients, points, facts)
    assert found == pytest.approx(_steps(numbers, points, facts), rel=0.12)


def test_steps_that_were_not_looked_at_teach_by_their_length_alone() -> None:
    facts, numbers = _facts(), _numbers()
    points = [START, START._replace(batch_size=64)]
    columns = columns_of(points, facts)
    bare = [PointMeasurement(each.point, each.seconds, 0.0, 3, 3) for each in _measured(numbers, points, facts)]
    fitted = fit(prior_of(facts, bare[0], columns.at([0])), bare, columns, facts.share)
    assert _steps(fitted.log_coefficients, points, facts) == pytest.approx([each.seconds for each in bare], rel=0.1)


def test_the_same_measurements_give_the_same_numbers() -> None:
    facts, points = _facts(), [START, START._replace(batch_size=8)]
    one, other = (_fitted(_numbers(), points, facts, noise=0.05) for _ in range(2))
    columns: PointColumns = columns_of(points, facts)
    assert (one.log_coefficients == other.log_coefficients).all()
    assert (one.log_seconds(columns, 64) == other.log_seconds(columns, 64)).all()


def test_points_that_come_to_the_same_have_the_same_number() -> None:
    same = columns_of(
        [START, START._replace(prefetch_factor=8), START._replace(unit=4), START._replace(batch_size=4)], _facts()
    ).shape_ids
    assert list(same) == [0, 0, 0, 1]


def test_what_is_gathered_further_ahead_is_waited_for_less() -> None:
    facts = _facts(world_size=8)
    sharded = START._replace(strategy="full_shard", unit=1, batch_size=8)
    ways = [sharded._replace(prefetch=ahead) for ahead in (0, "torch", 1, 2)] + [START]
    columns = columns_of(ways, facts)
    said = phases_of(_numbers(near=3e-11), columns, facts.share)
    nothing, usual, one, two, plain = said["passes"].tolist()
    assert nothing > usual == one > two > plain
    assert columns.shape_ids[1] == columns.shape_ids[2] != columns.shape_ids[3]
    few = columns_of([sharded._replace(unit=12, prefetch=ahead) for ahead in (1, 2, 5)], facts)
    assert len(set(few.shape_ids.tolist())) == 1, "there is one unit besides"
