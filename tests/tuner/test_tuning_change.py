"""When a search begins again."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from elastic_ext.tuner.measurements import PaceWatch, StepReport, changed_facts
from tests.support.job_facts import made_facts


def _seen(step: int, seconds: float, **changes: Any) -> StepReport:
    seen = StepReport(
        time=float(step), version=3, step=step, num_steps=1, num_ranks=4, world_size=4, step_seconds=seconds
    )
    return dataclasses.replace(seen, **changes)


def _noisy(seconds: float, at: random.Random) -> float:
    return seconds * at.lognormvariate(0, 0.03) * (1 + (at.random() < 0.02) * at.uniform(0.2, 2))


@pytest.mark.parametrize("factor", [1.15, 1.3, 0.7])
def test_a_change_of_pace_is_seen_within_some_steps(factor: float) -> None:
    watch, at = PaceWatch(), random.Random(1)
    assert all(watch.see(_seen(step, _noisy(0.1, at))) is None for step in range(200))
    found = [step for step in range(200, 232) if watch.see(_seen(step, _noisy(0.1 * factor, at)))]
    assert found


def test_nothing_is_seen_where_nothing_changes() -> None:
    watch, at = PaceWatch(), random.Random(2)
    found = sum(watch.see(_seen(step, _noisy(0.1, at))) is not None for step in range(20_000))
    assert found <= 1


def test_who_is_slow_is_named_before_the_pace() -> None:
    watch = PaceWatch()
    for step in range(40):
        watch.see(_seen(step, 0.1))
    changes = [watch.see(_seen(step, 0.15, slow_rank="rank 3 is slow" if step == 41 else "")) for step in range(40, 60)]
    (change,) = [each for each in changes if each is not None]
    assert watch.why(change).startswith("rank 3 is slow: steps take 1.50 times as long as before")
    shorter = dataclasses.replace(change, after_seconds=0.05)
    assert watch.why(shorter).startswith("steps take 0.50 times"), "nobody is to blame for that"


def test_whoever_was_slow_long_ago_is_not_named() -> None:
    watch = PaceWatch()
    for step in range(400):
        watch.see(_seen(step, 0.1, slow_rank="rank 3 is slow" if step == 10 else ""))
    change = next(found for step in range(400, 440) if (found := watch.see(_seen(step, 0.15))))
    assert watch.why(change).startswith("steps take")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world_size": 3}, "3 ranks train instead of 4"),
        ({"members": 3}, "others of the job's workers train together"),
        ({"restart": 1}, "started again"),
        ({"num_local": 2}, "the job has 2 ranks with cpu per machine, before 4 with cpu"),
        ({"global_batch": 512}, "a step has 512 samples instead of 256"),
        ({"num_replicas": 2}, "2 replicas of the model have samples of their own instead of 4"),
        ({"num_replicas": 2, "share": 128}, "2 replicas of the model have samples of their own instead of 4"),
        ({"share": 32}, "a rank has 32 samples of a step instead of 64"),
        ({"num_blocks": 6}, "the model has 6 blocks instead of 12"),
        ({"choices": {}}, "the keys that the job can change"),
        ({"fixed": {"dataloader.num_workers": "why"}}, "the keys that the job can change"),
        ({"time": 2000.0, "config_version": 7, "values": {"dataloader.batch_size": 4}, "bound": 16}, ""),
    ],
)
def test_facts_that_make_another_job_of_it_are_told(changes: dict[str, Any], words: str) -> None:
    before = made_facts()
    found = changed_facts(before, dataclasses.replace(before, **changes))
    assert words in found and bool(words) == bool(found)


def test_choices_are_compared_by_what_they_are() -> None:
    before = made_facts(choices={"dataloader.num_workers": (1, 2)})
    assert not changed_facts(before, dataclasses.replace(before, choices={"dataloader.num_workers": [1, 2]}))
