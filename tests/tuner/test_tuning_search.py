"""Which point is tried next, and which is the best."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from benchmarks.simulated_cases import DEVELOPMENT_SEEDS
from benchmarks.simulated_job import SimulatedJob
from elastic_ext.config.keys import TuningSection
from elastic_ext.records.metrics import JobFacts
from elastic_ext.tuner.costs import Budget
from elastic_ext.tuner.measurements import PointMeasurement, StepReport
from elastic_ext.tuner.search import Search, Switching, cost_of_probes
from elastic_ext.tuner.space import Point, point_of
from tests.support.job_facts import ALL_CHOICES, made_facts
from tests.support.tuned_jobs import LOADER, loader_seconds


def _saved(seconds: float, *, baseline_seconds: float = 1.0, report_seconds: float = 0.0) -> Budget:
    """What probes may cost, where a step at the baseline takes so long."""
    budget = Budget(share=0.0)
    budget.take_baseline(baseline_seconds)
    budget.see(_seen(num_steps=1, step_seconds=baseline_seconds - seconds))
    if report_seconds:
        budget.see(_seen(num_steps=round(report_seconds / baseline_seconds), step_seconds=baseline_seconds))
    return budget


def _seen(num_steps: int, step_seconds: float) -> StepReport:
    return StepReport(
        time=0.0, version=0, step=1, num_steps=num_steps, num_ranks=1, world_size=1, step_seconds=step_seconds
    )


ANY = _saved(1e9)
"""A probe may cost whatever it costs."""


def _measured(point: Point, factor: float = 1.0, **changes: object) -> PointMeasurement:
    phases = {name: each * factor for name, each in loader_seconds(point).items()}
    measured = PointMeasurement(
        point=point, seconds=sum(phases.values()), spread=0.01, num_steps=3, num_reports=3, phases=phases
    )
    return dataclasses.replace(measured, **changes)  # type: ignore[arg-type]


def _search(facts: JobFacts | None = None) -> Search:
    facts = facts or made_facts(choices=LOADER)
    search = Search(facts, TuningSection())
    search.tell(_measured(point_of(facts.values)))
    return search


def _finished(search: Search, most: int = 30) -> list[Point]:
    """Points that were tried, until nothing else is worth it."""
    tried: list[Point] = []
    while len(tried) < most:
        assert search.best is not None
        proposal = search.propose(search.best.point, ANY, 3)
        if proposal is None:
            return tried
        tried.append(proposal.point)
        search.tell(_measured(proposal.point))
    raise AssertionError(f"it never ends: {tried}")


def test_a_search_ends_at_a_good_point_after_few_others() -> None:
    search = _search()
    tried = _finished(search)
    assert len(tried) <= 12 and len(set(tried)) == len(tried)
    assert search.best is not None
    points = [Point(batch_size=size, num_workers=workers) for size in (1, 2, 4, 8, 16, 32, 64) for workers in range(9)]
    best = min(sum(loader_seconds(point).values()) for point in points)
    assert sum(loader_seconds(search.best.point).values()) <= best / 0.95


def test_the_same_told_gives_the_same_points() -> None:
    assert _finished(_search()) == _finished(_search())


def test_where_samples_are_waited_for_one_worker_less_and_more_are_tried_whatever_is_expected() -> None:
    """Loaders are in each other's way from three on, which no model expects."""

    def measured(point: Point) -> PointMeasurement:
        workers = int(point.num_workers or 0)
        waiting = 64 * 0.02 / min(max(workers, 1), 3) * (1 + 0.15 * max(workers - 3, 0))
        phases = {"data": waiting, "forward": 0.01, "backward": 0.02}
        return PointMeasurement(point, sum(phases.values()), 0.01, 3, 3, phases=phases)

    search = Search(made_facts(choices={"dataloader.num_workers": ()}), TuningSection())
    search.tell(measured(point_of({"dataloader.batch_size": 1, "dataloader.num_workers": 8})))
    tried: dict[int, None] = {}
    while (best := search.best) is not None and (proposal := search.propose(best.point, ANY, 3)) is not None:
        tried[int(proposal.point.num_workers or 0)] = None
        search.tell(measured(proposal.point))
    assert best is not None and best.point.num_workers == 3, tried
    assert {2, 4} <= set(tried)


def test_refused_points_and_values_that_are_named_are_not_proposed() -> None:
    search = _search()
    assert search.best is not None
    proposal = search.propose(search.best.point, ANY, 3)
    assert proposal is not None
    search.refuse(proposal.point, "there is no dataloader.num_workers of that size here")
    tried = _finished(search)
    assert tried and proposal.point not in tried
    assert all(point.num_workers != proposal.point.num_workers for point in tried)


def test_what_cannot_be_paid_for_is_not_proposed_but_saved_for() -> None:
    search = _search()
    assert search.best is not None
    here = search.best.point
    proposal = search.propose(here, _saved(-1e9), 3)
    assert proposal is not None and not proposal.is_affordable
    again = search.propose(here, _saved(proposal.cost + 0.01), 3)
    assert again is not None and again.is_affordable


def test_whatever_is_saved_for_costs_more_than_was_saved() -> None:
    """Else a course looks again at each report. Half of the largest gain, which is small here, is not worth a probe."""
    facts = made_facts(choices=LOADER, share=8, values={"dataloader.batch_size": 4})
    search = _search(facts)
    assert search.best is not None
    first = search.propose(search.best.point, ANY, 3)
    assert first is not None
    search.tell(_measured(first.point, 0.924))
    here, found = search.best.point, []
    for thousandths in range(-3500, -3300):
        budget = _saved(thousandths / 1000)
        proposal = search.propose(here, budget, 3)
        assert proposal is not None
        found.append(proposal.is_affordable)
        assert proposal.is_affordable or proposal.cost > budget.saved
    assert {True, False} == set(found)


def test_a_probe_of_short_steps_lasts_until_as_many_are_told_of_as_are_measured() -> None:
    """A step of a tenth of a second, where one of the user's takes half of that: as many as there are in a report."""
    seconds, none = np.array([0.1]), np.zeros(1)
    told_of_each = cost_of_probes(_saved(0.0, baseline_seconds=0.05), seconds, none, 3, 1.0)
    assert told_of_each == pytest.approx([4 * (0.1 - 0.05)])
    by_the_second = cost_of_probes(_saved(0.0, baseline_seconds=0.05, report_seconds=1.0), seconds, none, 3, 1.0)
    assert by_the_second == pytest.approx([4 * 10 * (0.1 - 0.05)])
    with_change = cost_of_probes(_saved(0.0, baseline_seconds=0.05), seconds, none + 0.7, 3, 1.0)
    assert with_change == pytest.approx(told_of_each + 0.7)


def test_a_search_that_begins_again_wants_more_and_remembers() -> None:
    search = _search()
    _finished(search)
    best = search.best
    assert best is not None
    again = search.begun_again()
    assert again.best is None and again.seconds_at(best.point) is None
    again.tell(_measured(best.point))
    assert len(_finished(again)) < len(_finished(_search()))
    little = search.begun_again()
    little.tell(_measured(best.point))
    proposal = little.propose(best.point, ANY, 3)
    assert proposal is None or proposal.least_seconds < 0.95 * best.seconds


def test_advice_is_what_is_expected_to_be_fastest() -> None:
    search = _search()
    here = point_of(made_facts().values)
    advice = search.advise(here)
    assert advice is not None and sum(loader_seconds(advice.point).values()) < sum(loader_seconds(here).values()) / 2
    _finished(search)
    assert search.best is not None and search.advise(search.best.point) is None


def test_measuring_a_point_again_makes_it_surer() -> None:
    search = _search()
    point = Point(batch_size=8, num_workers=2)
    search.tell(_measured(point, 1.1))
    once = search.seconds_at(point)
    search.tell(_measured(point, 0.9))
    twice = search.seconds_at(point)
    assert once and twice and twice < once


def test_a_single_point_is_all_there_is() -> None:
    search = _search(made_facts(choices={}))
    assert search.best is not None
    assert search.propose(search.best.point, ANY, 3) is None and search.advise(search.best.point) is None


def test_changes_that_stand_still_longer_than_was_guessed_are_learnt() -> None:
    facts = made_facts(choices=ALL_CHOICES)
    switching = Switching(facts)
    plain, sharded = Point(strategy="no_shard"), Point(strategy="full_shard")
    loaded = Point(strategy="no_shard", num_workers=4)
    before = switching.seconds(plain, [plain, loaded, sharded])
    assert before[0] == 0 < before[1] < before[2]
    for _ in range(8):
        switching.see(plain, sharded, 40.0)
        switching.see(plain, loaded, 3.0)
    after = switching.seconds(plain, [plain, loaded, sharded])
    assert after[1] == pytest.approx(3.0, rel=0.1) and after[2] == pytest.approx(40.0, rel=0.1)


def test_a_costly_change_has_to_pay_for_itself() -> None:
    """Sharding would take a tenth off each step, and standing still for an hour."""
    values = {"parallelism.strategy": "no_shard", "dataloader.num_workers": 4, "dataloader.batch_size": 64}
    facts = made_facts(choices={"parallelism.strategy": ALL_CHOICES["parallelism.strategy"]}, values=values)
    here = point_of(facts.values)

    def told(stood_still: float) -> Search:
        search = Search(facts, TuningSection())
        search.tell(_measured(here, phases={"forward": 0.05, "communication": 0.05}, seconds=0.1))
        other = here._replace(strategy="shard_grad_op")
        search.tell(_measured(other, 1.0, phases={"forward": 0.1}, seconds=0.1, held_up_seconds=stood_still))
        return search

    assert told(0.1).propose(here, ANY, 3) is not None
    assert told(7200.0).propose(here, ANY, 3) is None


@pytest.mark.parametrize("seed", DEVELOPMENT_SEEDS[:3])
def test_simulated_jobs_are_tuned_within_few_probes_and_without_running_out_of_memory(seed: int) -> None:
    job = SimulatedJob(seed)
    seen = [job.step() for _ in range(8)]
    search = Search(job.facts, TuningSection())
    for _ in range(20):
        last = seen[-1]
        assert last is not None
        search.tell(
            PointMeasurement(
                point=job.point,
                seconds=job.true_step_seconds(job.point),
                spread=0.0,
                num_steps=3,
                num_reports=3,
                phases=last.phases,
                peak_bytes=last.peak_bytes,
                held_up_seconds=seen[-4].held_up_seconds if seen[-4] else 0.0,
            )
        )
        search.take_facts(job.facts)
        proposal = search.propose(job.point, ANY, 3)
        if proposal is None:
            break
        job.change(proposal.point)
        seen = [job.step() for _ in range(4)]
        assert None not in seen
    assert job.num_failures == 0 and search.best is not None and job.oracle is not None
    assert job.true_step_seconds(job.oracle) / job.true_step_seconds(search.best.point) >= 0.93


@pytest.mark.parametrize("tried", [(2,), (64, 2), (64, 32, 16, 2)])
@pytest.mark.parametrize("times", [1.8, 2.0])
def test_what_was_measured_as_slow_is_not_taken_for_the_best_since_it_was_expected_to_be(
    tried: tuple[int, ...], times: float
) -> None:
    """All but the present point is slower than anything explains."""
    search = Search(made_facts(choices=LOADER), TuningSection())
    for micro_batch in (1, *tried, 1):
        point = Point(batch_size=micro_batch, num_workers=0)
        longer = 1.0 if micro_batch == 1 else times
        phases = {name: longer * each for name, each in loader_seconds(point).items()}
        seconds, num = math.fsum(phases.values()), 3 if micro_batch == 1 else 2
        is_brief = micro_batch != 1
        search.tell(PointMeasurement(point, seconds, 0.01, num, num, phases=phases, is_brief=is_brief))
    assert search.best is not None and search.best.point.batch_size == 1
