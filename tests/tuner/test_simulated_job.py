"""The jobs that searches are tried on: the same again by the same seed, and hard in the ways that real ones are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulated_cases import CHANGES, DEVELOPMENT_SEEDS, REPORT_SEEDS, is_tried, seeds_tried
from benchmarks.simulated_draw import columns_of, quirk
from benchmarks.simulated_job import NUM_STEPS_UNKNOWN, RESTART_SECONDS, SimulatedJob
from benchmarks.simulated_memory import HEADROOM
from elastic_ext.profile.phases import Phase
from elastic_ext.records.metrics import JobFacts
from elastic_ext.tuner.space import Point

SEEDS = DEVELOPMENT_SEEDS[:6]


def _job(seed: int = SEEDS[0]) -> SimulatedJob:
    return SimulatedJob(seed)


def _tight() -> tuple[SimulatedJob, Point]:
    """A job with a point that takes more memory than there is."""
    for seed in seeds_tried(DEVELOPMENT_SEEDS, 60):
        job = SimulatedJob(seed)
        at = int(np.argmax(job.all_bytes))
        if job.all_bytes[at] > job.hidden.capacity_bytes:
            return job, job.space.points[at]
    raise AssertionError("no job is short of memory")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_gives_the_same_job_and_the_same_steps_again(seed: int) -> None:
    first, second = SimulatedJob(seed), SimulatedJob(seed)
    assert first.hidden == second.hidden and first.space == second.space and first.oracle == second.oracle
    assert [first.step() for _ in range(20)] == [second.step() for _ in range(20)]
    assert first.facts == second.facts
    other = SimulatedJob(seed, noise_seed=1)
    assert other.hidden == first.hidden and other.step() != SimulatedJob(seed).step()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_oracle_is_the_fastest_of_all_safe_points(seed: int) -> None:
    job = SimulatedJob(seed)
    assert job.oracle is not None and job.is_safe(job.oracle) and job.is_safe(job.start)
    best = job.true_step_seconds(job.oracle)
    safe = job.all_bytes <= (1 - HEADROOM) * job.hidden.capacity_bytes
    assert best <= job.all_step_seconds[safe].min() * (1 + 1e-9)
    assert best <= job.true_step_seconds(job.start)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_point_by_itself_is_what_it_is_among_all(seed: int) -> None:
    job = SimulatedJob(seed)
    for point in job.space.points[:: max(len(job.space.points) // 40, 1)]:
        at = job.space.points.index(point)
        assert job.true_step_seconds(point) == pytest.approx(job.all_step_seconds[at], rel=1e-12)
        assert job.bytes_of(point) == pytest.approx(job.all_bytes[at], rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_larger_micro_batches_take_more_memory_and_recomputed_blocks_less(seed: int) -> None:
    job = SimulatedJob(seed)
    sizes = [size for size in job.space.choices["batch_size"] if size != job.hidden.share]
    taken = [job.bytes_of(job.start._replace(batch_size=size)) for size in sizes]
    assert taken == sorted(taken) and taken[-1] > taken[0]
    large = job.start._replace(batch_size=job.hidden.share)
    by_ratio = [job.bytes_of(large._replace(activation_checkpoint=ratio)) for ratio in (0.0, 0.5, 1.0)]
    assert by_ratio[0] > by_ratio[1] > by_ratio[2]


def test_knobs_that_make_no_difference_make_none() -> None:
    job = _job()
    whole = job.start._replace(strategy="no_shard", shard_degree=None, num_workers=0)
    sharded = whole._replace(strategy="full_shard")
    for first, second in (
        (whole, whole._replace(unit=4)),
        (whole, whole._replace(prefetch_factor=8)),
        (sharded, sharded._replace(bucket_cap_mb=1.0)),
        (sharded, sharded._replace(shard_degree=None)),
    ):
        assert job.true_step_seconds(first) == job.true_step_seconds(second)
        assert job.bytes_of(first) == job.bytes_of(second)


def test_what_is_seen_is_noisy_and_adds_up() -> None:
    job = _job()
    job.step()
    seen = [found for found in (job.step() for _ in range(400)) if found is not None]
    assert len(seen) == 400
    for each in seen:
        assert sum(each.phases.values()) == pytest.approx(each.step_seconds)
        assert set(each.phases) <= {phase.label for phase in Phase}
    logs = np.log([each.step_seconds / job.true_step_seconds(job.point) for each in seen])
    assert abs(float(np.median(logs))) < 0.01
    assert 0.02 < float(np.percentile(logs, 84) - np.median(logs)) < 0.05
    assert 1 <= int((logs > 0.15).sum()) <= 25
    assert [each.step for each in seen] == list(range(2, 402)) and seen[-1].time == job.now


def test_facts_come_with_the_first_steps_and_can_be_written() -> None:
    job = _job()
    assert job.facts.memory is None and job.facts.census is None
    for _ in range(NUM_STEPS_UNKNOWN):
        job.step()
    facts = job.facts
    assert facts.memory is not None and facts.census is not None and facts.calibration is not None
    assert JobFacts.from_json(facts.to_json()).to_json() == facts.to_json()
    assert len(job.space.points) > 1000


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_expected_of_memory_is_right_where_it_was_measured_and_never_far_under(seed: int) -> None:
    job = SimulatedJob(seed)
    for _ in range(NUM_STEPS_UNKNOWN + 1):
        job.step()
    assert job.expected_bytes([job.point])[0] == pytest.approx(job.bytes_of(job.point), rel=0.01)
    expected = job.expected_bytes(job.space.points)
    capacity = job.hidden.capacity_bytes
    truly = job.all_bytes[expected <= (1 - HEADROOM) * capacity]
    assert truly.max() <= capacity


def test_too_large_a_micro_batch_is_counted_costs_time_and_is_halved() -> None:
    job, point = _tight()
    for _ in range(NUM_STEPS_UNKNOWN):
        job.step()
    before, done = job.now, job.num_steps
    job.change(point)
    lost = job.lost_seconds
    assert job.step() is None
    assert job.num_failures == 1 and job.num_steps == done
    assert job.now > before and job.lost_seconds > lost
    assert job.facts.bound == point.batch_size and job.revision >= 1
    failures = 1
    while job.step() is None:
        failures += 1
    assert job.bytes_of(job.point) <= job.hidden.capacity_bytes and job.num_failures == failures


def test_a_change_costs_what_it_moves() -> None:
    job = next(job for job in map(SimulatedJob, SEEDS) if job.hidden.world_size > 1)
    start = job.start._replace(strategy="no_shard")
    assert job.change_seconds(start, start._replace(batch_size=7)) == 0
    workers = job.change_seconds(start, start._replace(num_workers=4))
    sharding = job.change_seconds(start, start._replace(strategy="full_shard"))
    assert 0 < workers < sharding < RESTART_SECONDS
    before = job.now
    job.change(job.point._replace(num_workers=4))
    assert job.now - before == pytest.approx(workers) and job.version == 1
    found = job.step()
    assert found is not None and found.version == 1 and found.held_up_seconds == pytest.approx(workers)
    job.change(job.point)
    assert job.version == 2 and job.lost_seconds == pytest.approx(workers)


def test_circumstances_change_what_is_best_or_what_it_takes() -> None:
    seeds = list(seeds_tried(DEVELOPMENT_SEEDS, 8))
    for name, circumstances in CHANGES.items():
        jobs = [SimulatedJob(seed) for seed in seeds]
        slower = 0
        for job in jobs:
            before = job.true_step_seconds(job.start)
            job.meet(circumstances)
            assert job.true_step_seconds(job.start) >= before * 0.999
            slower += job.true_step_seconds(job.start) > before * 1.05
            assert job.oracle is not None
        assert slower >= 2, name


def test_a_slow_rank_is_seen_as_waiting() -> None:
    job = next(job for job in map(SimulatedJob, SEEDS) if job.hidden.world_size > 1)
    job.step()
    before = job.step()
    job.meet(replace(job.circumstances, slow_rank=1.5))
    after = job.step()
    assert before is not None and after is not None
    assert after.phases["communication"] > before.phases["communication"] + 0.3 * before.phases["backward"]
    assert after.phases["backward"] < 1.2 * before.phases["backward"]


def test_what_cannot_be_a_point_is_refused() -> None:
    job = _job()
    with pytest.raises(ValueError, match="empty micro-batch"):
        columns_of(job.hidden, [job.start._replace(batch_size=0)])


def test_quirks_are_the_same_again_and_spread() -> None:
    sizes = np.arange(1.0, 2001.0)
    found = quirk(5, "size", sizes)
    assert (found == quirk(5, "size", sizes)).all() and (found != quirk(6, "size", sizes)).any()
    assert abs(float(found.mean())) < 0.05 and found.min() < -0.95 and found.max() > 0.95


def test_seeds_to_report_with_are_none_to_develop_with() -> None:
    assert not set(REPORT_SEEDS) & set(DEVELOPMENT_SEEDS) and len(set(REPORT_SEEDS)) == len(REPORT_SEEDS) >= 60
    assert all(is_tried(SimulatedJob(seed)) for seed in SEEDS)
    assert list(seeds_tried(DEVELOPMENT_SEEDS, 12)) == list(DEVELOPMENT_SEEDS[:12]), "tests take the first ones"
