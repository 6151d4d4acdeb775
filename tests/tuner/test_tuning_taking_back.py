"""What a tuner takes back, and to what: nothing that was slow, or that nobody has measured, stays in force."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.keys import TuningSection
from elastic_ext.records.metrics import LearningFacts
from elastic_ext.tuner.costs import Budget
from elastic_ext.tuner.course import Course
from elastic_ext.tuner.decisions import Book, Decision
from elastic_ext.tuner.measurements import PointMeasurement, StepReport
from elastic_ext.tuner.search import Search
from elastic_ext.tuner.space import Point, point_of
from tests.support.job_facts import made_facts
from tests.support.tuned_jobs import LOADER, TunedJob, loader_seconds

ENOUGH = 150


def _seconds(point: Point) -> dict[str, float]:
    """Micro-batches of 8 and more, and workers beyond two, are slower than anything tells of."""
    longer = 1.35 if int(point.batch_size or 1) >= 8 else 1.0
    longer *= 1.4 if int(point.num_workers or 0) >= 3 else 1.0
    return {name: longer * each for name, each in loader_seconds(point).items()}


def _after_a_bad_try() -> TunedJob:
    """Something is tried right after what was slow, and that was put in force before it."""
    job = TunedJob(seconds=_seconds)
    while not _is_after_a_bad_try(job.told):
        job.run(1)
        assert job.step < ENOUGH
    job.run(1)
    return job


def _is_after_a_bad_try(told: list[Decision]) -> bool:
    decisions = [each for each in {each.number: each for each in told}.values() if each.changes]
    return [(each.kind, each.outcome) for each in decisions[-2:]] == [("probe", "undone"), ("probe", "")]


def _kept(job: TunedJob) -> list[Point]:
    """Where it began, and each point that was tried and kept, one after another."""
    versions = [each.version or 0 for each in job.told if each.kind == "probe" and each.outcome == "kept"]
    return [point_of({**job.start, **job.configs[version]}) for version in (0, *versions)]


def _best(job: TunedJob) -> Point:
    """The point of the newest decision that was kept."""
    kept = [each for each in job.told if each.outcome == "kept" and each.version is not None]
    version = max((each.version or 0 for each in kept), default=0)
    return point_of({**job.start, **job.configs[version]})


@pytest.mark.parametrize("changes", [{"user.mixup": 0.1}, {"tuning.mode": "off"}, {"tuning.mode": "advise"}])
def test_who_edits_it_after_a_bad_try_trains_on_with_the_best_and_not_with_that(changes: dict[str, Any]) -> None:
    job = _after_a_bad_try()
    best = _best(job)
    assert job.point != best
    job.edit(changes)
    job.run(20)
    assert job.point == best


def test_a_master_that_is_started_again_after_a_bad_try_goes_back_to_the_best() -> None:
    job = _after_a_bad_try()
    best = _best(job)
    again = TunedJob(
        decisions=list({each.number: each for each in job.told}.values()), configs=job.configs, seconds=_seconds
    )
    assert again.point == best


@pytest.mark.parametrize("mode", ["advise", "off"])
def test_a_master_that_is_started_again_to_advise_leaves_nothing_in_force_that_was_being_tried(mode: Any) -> None:
    job = TunedJob()
    while "probe" not in job.kinds():
        job.run(1)
    decisions = list({each.number: each for each in job.told}.values())
    again = TunedJob(decisions=decisions, configs=job.configs, mode=mode)
    assert again.point == point_of(job.start)


def test_undo_in_the_middle_of_a_try_takes_that_back_too() -> None:
    job = _after_a_bad_try()
    (kept,) = [each for each in job.told if each.outcome == "kept"]
    assert kept.kind == "probe" and kept.base == 0 and _best(job) != job.point
    job.take(job.controller.undo(job.now))
    assert job.point == point_of(job.start)
    assert job.run(20) == [] and job.controller.standing.stand == "paused"


def test_undo_does_not_bring_back_what_was_found_slow() -> None:
    job = TunedJob(seconds=_seconds)
    job.run(ENOUGH)
    closed = [each for each in job.told if each.changes and each.outcome]
    assert [(each.kind, each.outcome) for each in closed[-2:]] == [("probe", "undone"), ("undo", "kept")]
    before, kept = _kept(job)[-2:]
    job.take(job.controller.undo(job.now))
    assert job.point == before
    assert job.point != kept


def test_a_version_that_comes_into_force_late_is_gone_on_from() -> None:
    """Facts of a person's version come after it was taken for refused."""
    job = TunedJob()
    job.run(10)
    late = {"tuning.headroom": 0.1}
    version = max(job.configs) + 1
    job.configs[version] = {**job.configs[job.version], **late}
    config = ElasticConfig.from_values(job.configs[version], version=version)
    job.take(job.controller.take_config(job.now, config, "person"))
    for _ in range(8):
        job.controller.see(job.now, job.seen())
    assert job.controller.standing.stand != "waiting", "it was taken for refused"
    job.version = version
    job.tell_facts()
    job.run(ENOUGH)
    assert job.controller.standing.stand == "settled" and job.rate() > 1000


def test_nothing_is_decided_before_a_version_that_is_still_to_come() -> None:
    job = TunedJob()
    job.run(2)
    values = {"tuning.headroom": 0.1}
    config = ElasticConfig.parse(json.dumps({"version": 1, "apply_at_step": 60, "tuning": {"headroom": 0.1}}).encode())
    job.configs[1] = values
    assert job.take(job.controller.take_config(job.now, config, "person")) == []
    assert job.run(50, version=0) == [] and job.version == 0
    job.version = 1
    job.tell_facts()
    job.run(ENOUGH)
    assert job.controller.standing.stand == "settled" and job.rate() > 1000


def test_a_try_is_taken_back_where_nothing_is_heard_of_it() -> None:
    job = TunedJob()
    while "probe" not in job.kinds():
        job.run(1)
    job.run(2)
    assert job.point != point_of(job.start)
    told = job.take(job.controller.tick(job.now + 600))
    assert [(each.kind, each.outcome) for each in told] == [("hold", ""), ("probe", "undone"), ("undo", "")]
    assert job.point == point_of(job.start)
    job.run(ENOUGH)
    assert job.controller.standing.stand == "settled" and job.rate() > 1000


def test_a_try_that_is_written_after_it_was_given_up_is_taken_back() -> None:
    """Somebody pauses the tuner while the version is on its way to the store."""
    job = TunedJob()
    told: list[Decision] = []
    while not told:
        told = [each for each in job.controller.see(job.now, job.seen()) if each.changes]
    (asked,) = told
    (closed, paused) = job.controller.pause(job.now, "a person wants to look at it")
    assert (closed.number, closed.outcome, paused.kind) == (asked.number, "undone", "pause")
    job.configs[1] = dict(asked.changes)
    job.controller.written(job.now, asked.number, 1)
    config = ElasticConfig.from_values(job.configs[1], version=1)
    (back,) = job.controller.take_config(job.now, config, "generated")
    assert back.kind == "undo" and back.base == 1
    assert point_of({**job.start, **asked.changes, **back.changes}) == point_of(job.start)


def test_a_size_that_never_came_into_force_is_gone_back_from() -> None:
    """Both versions are written before ranks look: facts tell of the second one alone."""
    learning = LearningFacts(rule="sqrt", first_batch=256, noise_scale=1e6)
    values = {"dataloader.batch_size": 16, "global_batch_size": 256}
    facts = made_facts(choices={"global_batch_size": ()}, values=values, learning=learning)
    knobs = {"tuning.knobs": {"global_batch_size": (64, 8192)}}
    job = TunedJob(facts=facts, config=knobs, sized=lambda point, share: {"forward": share * 0.001, "other": 0.2})
    asked = next(each for _ in range(20) for each in job.controller.see(job.now, job.seen()) if each.changes)
    job.controller.written(job.now, asked.number, 2)
    job.controller.take_config(job.now, _config(job, 2, asked), "generated")
    back = [each for _ in range(60) for each in job.controller.see(job.now, job.seen(version=2))][-1]
    assert back.kind == "undo" and back.changes["global_batch_size"] == 256
    job.controller.written(job.now, back.number, 3)
    job.controller.take_config(job.now, _config(job, 3, back), "generated")
    job.version = 3
    job.tell_facts()
    for _ in range(20):
        job.controller.see(job.now, job.seen())
    assert "another global batch size" not in job.controller.standing.sentence


def _config(job: TunedJob, version: int, decision: Decision) -> ElasticConfig:
    job.configs[version] = {**job.configs[decision.base], **decision.changes}
    return ElasticConfig.from_values(job.configs[version], version=version)


def test_what_tries_may_cost_is_what_a_person_allows_from_then_on() -> None:
    """Whatever is tried is bad here, and what was saved so far is spent."""

    def seconds(point: Point) -> dict[str, float]:
        is_start = point.batch_size == 1 and point.num_workers == 0
        return {"data": 0.1, "forward": 0.1 if is_start else 0.25, "backward": 0.1 if is_start else 0.25}

    def num_probes(share: float) -> int:
        job = TunedJob(seconds=seconds)
        job.run(30)
        job.edit({"tuning.probe_budget": share})
        job.tell_facts()
        before = job.kinds().count("probe")
        job.run(400)
        return job.kinds().count("probe") - before

    assert num_probes(0.001) < num_probes(0.5)


def test_undo_of_the_very_first_try_takes_it_back_and_pauses() -> None:
    job = TunedJob()
    while "probe" not in job.kinds():
        job.run(1)
    told = job.take(job.controller.undo(job.now))
    assert [(each.kind, each.outcome) for each in told] == [("probe", "undone"), ("undo", ""), ("pause", "")]
    assert job.point == point_of(job.start) and job.controller.standing.stand == "paused"


@pytest.mark.parametrize("stays_slow", [False, True])
def test_slow_steps_that_look_like_a_slower_job_do_not_make_tries_cheaper(stays_slow: bool) -> None:
    """What may be spent goes by the baseline, which is measured again."""
    facts, budget, book = made_facts(choices={}), Budget(), Book()
    course = Course(facts, TuningSection(), book, Search(facts, TuningSection()), budget)

    def see(seconds: float, *, until: str) -> None:
        for step in range(100):
            seen = StepReport(
                time=0.0, version=0, step=step, num_steps=1, num_ranks=4, world_size=4, step_seconds=seconds
            )
            if any(each.kind == until for each in course.see(0.0, seen, writes=True)):
                return
        assert not until

    see(0.3, until="settle")
    see(0.3, until="")
    assert budget.baseline_seconds == pytest.approx(0.3)
    see(1.2, until="reopen")
    see(1.2 if stays_slow else 0.3, until="settle")
    assert budget.baseline_seconds == pytest.approx(1.2 if stays_slow else 0.3)


def _until_a_probe(course: Course) -> Decision:
    """The course's first probe, of which no config is written yet."""
    for step in range(20):
        for each in course.see(0.0, _report(course.in_force, step), writes=True):
            if each.kind == "probe":
                return each
    raise AssertionError("nothing is tried")


def _report(point: Point, step: int, **changes: Any) -> StepReport:
    phases = loader_seconds(point)
    seconds = sum(phases.values())
    seen = StepReport(
        time=0.0, version=0, step=step, num_steps=1, num_ranks=4, world_size=4, step_seconds=seconds, phases=phases
    )
    return dataclasses.replace(seen, **changes)


def _course() -> Course:
    facts = made_facts(choices=LOADER)
    return Course(facts, TuningSection(), Book(), Search(facts, TuningSection()), Budget())


def test_what_the_job_changes_before_a_probe_is_written_speaks_against_the_point_in_force_alone() -> None:
    course = _course()
    probe, here = _until_a_probe(course), course.in_force
    asked = here._replace(**{key.rpartition(".")[2]: value for key, value in probe.changes.items()})
    (closed,) = course.see(0.0, _report(here, 20, revision=1), writes=True)
    assert (closed.number, closed.outcome) == (probe.number, "refused"), "it was made from what is in force no longer"
    for point, is_left_out in ((here, True), (asked, False)):
        again = course.search.begun_again()
        again.tell(PointMeasurement(point=point, seconds=0.1, spread=0.0, num_steps=3, num_reports=3))
        assert (again.best is None) is is_left_out


def test_steps_before_a_probe_is_written_do_not_count_as_steps_under_an_older_version() -> None:
    course = _course()
    probe, here = _until_a_probe(course), course.in_force
    before = [each for step in range(20, 80) for each in course.see(0.0, _report(here, step), writes=True)]
    course.written(probe.number, 1)
    after = [course.see(0.0, _report(here, step), writes=True) for step in range(80, 130)]
    assert before == [] and after[:-1] == [[]] * 49
    (told,) = after[-1]
    assert "steps are taken under version 0, and version 1 was written 50 reports ago" in told.reason


def test_undo_while_a_version_is_waited_for_is_made_from_that_version() -> None:
    """A person changes what the tuner may do, and takes something back before ranks tell of that."""
    job = TunedJob(seconds=_seconds)
    job.run(ENOUGH)
    job.edit({"tuning.headroom": 0.2})
    before = _kept(job)[-2]
    told = job.take(job.controller.undo(job.now))
    assert "undo" in [each.kind for each in told] and job.point == before
    assert job.configs[job.version]["tuning.headroom"] == 0.2


def test_undo_of_two_sizes_one_after_the_other_is_made_from_the_newest_version() -> None:
    learning = LearningFacts(rule="sqrt", first_batch=256, noise_scale=1e6)
    values = {"dataloader.batch_size": 16, "global_batch_size": 256}
    facts = made_facts(choices={"global_batch_size": ()}, values=values, learning=learning)
    knobs = {"tuning.knobs": {"global_batch_size": (64, 1024)}}
    job = TunedJob(facts=facts, config=knobs, sized=lambda point, share: {"forward": share * 0.001, "other": 0.2})
    job.run(ENOUGH)
    assert job.size == 1024
    job.take(job.controller.undo(job.now))
    assert job.size == 512
    job.edit({"tuning.headroom": 0.2})
    job.take(job.controller.undo(job.now))
    assert job.size == 256 and job.configs[job.version]["tuning.headroom"] == 0.2


def test_who_stops_it_before_a_version_comes_into_force_does_not_train_on_with_what_was_tried() -> None:
    """What the tuner may do is changed, and changed again before ranks tell of the first of these versions."""
    job = TunedJob()
    while "probe" not in job.kinds():
        job.run(1)
    assert job.edit({"tuning.headroom": 0.2}) == []
    job.edit({"tuning.mode": "off"})
    assert job.point == point_of(job.start)


def test_what_follows_a_way_back_that_ranks_refused_is_taken_back_to_what_was_there_before() -> None:
    """A slow try is in force as ranks refuse what takes it back, and something else is tried from there."""
    slow, usual = {"dataloader.batch_size": 8}, {"dataloader.batch_size": 1}
    book = Book()
    tried = book.add(time=0.0, kind="probe", reason="slow", base=0, changes=slow, instead=usual)
    book.written(tried.number, 1)
    book.close(tried.number, "undone")
    back = book.add(time=0.0, kind="undo", reason="back", base=1, changes=usual, instead=slow)
    book.written(back.number, 2)
    book.close(back.number, "refused")
    other = book.add(
        time=0.0,
        kind="probe",
        reason="another",
        base=1,
        changes={"dataloader.num_workers": 2},
        instead={"dataloader.num_workers": 0},
    )
    assert other.base == 2 and other.changes["dataloader.batch_size"] == 8
    book.written(other.number, 3)
    assert book.tried(other).instead == {"dataloader.batch_size": 1, "dataloader.num_workers": 0}
    assert book.not_kept(2).left_in({"dataloader.batch_size": 1}) == {}, "that version has it back already"
