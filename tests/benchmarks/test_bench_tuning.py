"""What the benchmark of tuners stands on: tuners that do what they are said to do, and a referee who counts right."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from benchmarks import tuning_search
from benchmarks.gaussian_process import chosen_by_improvement, features_of
from benchmarks.simulated_cases import CHANGES, DEVELOPMENT_SEEDS, is_tried
from benchmarks.simulated_draw import draw
from benchmarks.simulated_job import RESTART_SECONDS, SimulatedJob
from benchmarks.simulated_memory import HEADROOM
from benchmarks.tuning_ours import Ours
from benchmarks.tuning_peers import PEERS, Way, deepspeed_style, dlrover_style, stay
from benchmarks.tuning_race import NUM_STEPS, Raced, holds_from, is_felt, oracle, race, race_after_change
from benchmarks.tuning_search import Target, TuningTable

SEEDS = DEVELOPMENT_SEEDS[:5]


def _trained(way: Way, seed: int, num_steps: int) -> SimulatedJob:
    job = SimulatedJob(seed)
    tuner = way(job)
    next(tuner)
    for _ in range(num_steps):
        tuner.send(job.step())
    return job


def test_training_holds_from_the_first_step_after_which_nearly_all_are_good() -> None:
    good, bad = [1.0], [0.5]
    assert holds_from(np.array(good * 100)) == 0
    assert holds_from(np.array(bad * 30 + good * 100)) == 30
    assert holds_from(np.array(bad * 30 + good * 70 + bad + good * 100)) == 30
    assert holds_from(np.array(bad * 30 + good * 10 + bad * 20 + good * 100)) == 60
    assert holds_from(np.array(good * 100 + bad)) is None
    assert holds_from(np.array(bad * 10)) is None and holds_from(np.array([])) is None


@functools.cache
def _best_race(seed: int) -> Raced:
    return race(SimulatedJob(seed), oracle)


@pytest.mark.parametrize("name", [name for name in PEERS if name != "Gaussian process alone"])
def test_no_peer_does_better_than_the_best(name: str) -> None:
    for seed in SEEDS[:2]:
        raced, best = race(SimulatedJob(seed), PEERS[name]), _best_race(seed)
        assert best.share_at_end == 1 and best.held_from == 0 and 0.8 < best.efficiency <= 1.1
        assert raced.efficiency < best.efficiency and 0 < raced.share_at_end <= 1


def test_who_stays_has_the_share_that_the_start_has() -> None:
    job = SimulatedJob(SEEDS[0])
    assert job.oracle is not None
    share = job.true_step_seconds(job.oracle) / job.true_step_seconds(job.start)
    raced = race(job, stay)
    assert raced.share_at_end == pytest.approx(share) and (raced.shares == raced.share_at_end).all()
    assert raced.efficiency == pytest.approx(share, rel=0.06) and raced.num_failures == 0


def test_restarts_happen_before_training_begins() -> None:
    job = SimulatedJob(SEEDS[0])
    began = job.now
    next(deepspeed_style(job))
    num_restarts = (job.now - began) // RESTART_SECONDS
    assert num_restarts >= 3 and job.point.batch_size != job.start.batch_size
    assert job.bytes_of(job.point) <= job.hidden.capacity_bytes and job.point.num_workers == job.start.num_workers


def test_polls_raise_the_micro_batch_and_nothing_else() -> None:
    grown = 0
    for seed in SEEDS:
        job = _trained(dlrover_style, seed, 400)
        size, start = job.point.batch_size, job.start.batch_size
        assert isinstance(size, int) and isinstance(start, int) and size >= start
        assert job.point._replace(batch_size=start) == job.start
        grown += size > start
    assert grown >= 2


@pytest.mark.parametrize("name", ["random", "coordinate descent"])
def test_searches_come_to_something_better_that_is_expected_to_fit(name: str) -> None:
    num_better = 0
    for seed in SEEDS[:3]:
        job = _trained(PEERS[name], seed, 800)
        num_better += job.true_step_seconds(job.point) < job.true_step_seconds(job.start)
        assert job.expected_bytes([job.point])[0] <= (1 - HEADROOM) * job.hidden.capacity_bytes
        assert job.num_failures == 0
    assert num_better >= 2


def test_a_gaussian_process_finds_the_least_of_a_bowl() -> None:
    places = np.stack(np.meshgrid(np.linspace(0, 1, 21), np.linspace(0, 1, 21)), axis=-1).reshape(-1, 2)
    values = ((places - [0.3, 0.7]) ** 2).sum(axis=1)
    tried = [0, 20, 420, 440, 220]
    for _ in range(15):
        rest = [at for at in range(len(places)) if at not in tried]
        at, improvement = chosen_by_improvement(places[rest], places[tried], values[tried])
        assert improvement >= 0
        tried.append(rest[at])
    assert values[tried].min() < 0.005


def test_points_are_places_from_0_to_1() -> None:
    job = SimulatedJob(SEEDS[0])
    found = features_of(job.space.points, job.space.choices)
    assert found.min() == 0 and found.max() == 1 and len(np.unique(found, axis=0)) == len(job.space.points)


def test_a_change_that_is_not_felt_is_none_to_be_tried() -> None:
    alone = next(seed for seed in DEVELOPMENT_SEEDS if draw(seed).world_size == 1 and is_tried(SimulatedJob(seed)))
    assert not is_felt(alone, CHANGES["links an eighth as fast"])
    assert is_felt(alone, CHANGES["one rank 1.5 times as slow"])


def test_after_a_change_what_counts_is_the_new_best() -> None:
    circumstances = CHANGES["one rank 1.5 times as slow"]
    found = race_after_change(SimulatedJob(SEEDS[0]), oracle, circumstances)
    assert found.share_at_end == 1 and found.held_from == 0 and len(found.shares) > 0.7 * NUM_STEPS


def test_targets_are_met_or_named() -> None:
    met, missed = Target(name="a", found=0.9, at_least=0.9), Target(name="b", found=2, at_most=1)
    table = TuningTable(
        title="t", columns=["c"], rows=[("x", ["1"], [met]), ("y", ["1"], [met, missed]), ("z", ["1"], [])]
    )
    assert table.verdicts == ("pass", "fail", "none claimed")
    assert "fail: b is 2" in table.table_lines()[3] and "a ≥ 0.9, b ≤ 1" in table.table_lines()[3]


def test_ours_makes_a_bad_start_better_and_numbers_what_it_decides() -> None:
    ours = Ours()
    job = _trained(ours, SEEDS[0], 150)
    assert job.true_step_seconds(job.point) < 0.7 * job.true_step_seconds(job.start)
    assert job.num_failures == 0 and job.version > 0
    assert list(ours.decisions) == sorted(ours.decisions) and set(ours.steps) == set(ours.decisions)
    assert any(each.changes and each.version is not None for each in ours.decisions.values())


@pytest.mark.slow  # some hundred runs of thousands of steps
def test_tables_are_made() -> None:
    tables = [
        tuning_search.from_a_bad_start(SEEDS[:2]),
        tuning_search.after_changes(SEEDS, 1),
        tuning_search.without_change(SEEDS[:1]),
    ]
    for table in tables:
        assert all(line.count("|") == table.table_lines()[0].count("|") for line in table.table_lines())
        assert sum(verdict != "none claimed" for verdict in table.verdicts) == 1
