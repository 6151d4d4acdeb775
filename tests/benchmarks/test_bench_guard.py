"""What the benchmark of guarded steps stands on: ways that lead to the same bits, and guard what they say they do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks import guard
from benchmarks.__main__ import main
from benchmarks.guard import NAMES, costs_of_steps, costs_of_trials
from benchmarks.guard_ranks import Done, Rank, Task, Training, WayName
from benchmarks.harness import Comparison, Row, table

SMALL = Task(widths=(6, 8, 8, 4), num_samples=8)
NUM_STEPS = 5
GUARDED: dict[WayName, list[bool]] = {
    "never": [False] * NUM_STEPS,
    "always": [True] * NUM_STEPS,
    "step": [False] * NUM_STEPS,
    "auto": [True, True, True, False, False],
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("num_micro_steps", [1, 4])
def test_all_ways_lead_to_the_same_bits_and_guard_the_steps_that_they_say(tmp_path: Path, num_micro_steps: int) -> None:
    task = dataclasses.replace(SMALL, num_micro_steps=num_micro_steps)
    work = set()
    for way in NAMES:
        with _training(tmp_path, task, way) as training:
            state = training.trainer._training.state
            seen: list[bool] = []
            noting = training.model.register_forward_hook(
                lambda *_, seen=seen, state=state: seen.append(state.is_guarded)
            )
            work.add(training.run(NUM_STEPS).work)
            assert seen == [each for each in GUARDED[way] for _ in range(num_micro_steps)]
            noting.remove()
            work.add(training.run(NUM_STEPS).work)  # which begins anew
            assert training.run(NUM_STEPS - 1).work[1] not in {digest for _, digest in work}, "nothing was trained"
    assert len(work) == 1


def test_what_calls_cost_is_told_in_microseconds() -> None:
    found = guard.cost_of_calls(num_steps=20, budget_seconds=0.1)
    assert [row.name for row in found.rows] == [NAMES["step"], NAMES["auto"]]
    assert [row.at_most for row in found.rows] == [None, guard.MOST_SECONDS]


def test_a_step_that_comes_again_leads_to_the_same_as_one_in_two_micro_batches(tmp_path: Path) -> None:
    with _training(tmp_path, SMALL, "always") as training:
        whole = training.run(1)
        training.planted.is_armed = True
        again = training.run(1)
    with _training(tmp_path, dataclasses.replace(SMALL, num_micro_steps=2), "always") as training:
        alone = training.run(1)
    assert whole.failed is None
    assert again.failed is not None
    assert again.began < again.failed < again.ended
    assert again.work == alone.work != whole.work


@pytest.mark.parametrize(
    ("failed", "seconds"),
    [((None, None), 4.0), ((4.5, None), 1.5), ((None, 5.0), 1.0)],
)
def test_it_takes_from_the_failure_until_the_last_rank_has_ended(
    failed: tuple[float | None, float | None], seconds: float
) -> None:
    answers = [_done(2.0, 5.5, failed[0]), _done(2.5, 6.0, failed[1])]
    assert guard.seconds_of_trial(answers) == seconds


@pytest.mark.parametrize(
    ("ratio", "note"),
    [
        (1.05, "b: +5.00 ms a step; 1.0500 is above the A/A interval, 0.9900 to 1.0200"),
        (1.01, "b: +1.00 ms a step; 1.0100 is within the A/A interval, 0.9900 to 1.0200"),
        (0.95, "b: -5.00 ms a step; 0.9500 is below the A/A interval, 0.9900 to 1.0200"),
    ],
)
def test_the_note_says_where_a_ratio_lies(ratio: float, note: str) -> None:
    rows = (_row("a", 0.1, 1.0), _row("b", 0.1 * ratio, ratio))
    assert guard.in_words(Comparison(title="", unit="seconds", num_rounds=3, rows=rows)) == note


def test_the_command_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert "guard" in capsys.readouterr().out.splitlines()


@pytest.mark.slow  # processes, some of which load torch once for each step
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_small_runs_give_their_tables(num_ranks: int) -> None:
    task = dataclasses.replace(SMALL, num_micro_steps=2)
    compared = costs_of_steps(task, num_ranks, budget_seconds=0.1)
    assert [[row.name for row in each.rows] for each in compared] == [
        *[[NAMES["never"], NAMES["always"]]] * 2,
        *[[NAMES["step"], NAMES["auto"]]] * 2,
    ]
    assert all(row.median > 0 for each in compared for row in each.rows)
    assert [each.rows[1].claim for each in compared] == [None, None, guard.FREE, guard.FREE]
    tried = costs_of_trials(SMALL, num_ranks, num_trials=3)
    alone, again, anew = tried.rows
    assert 0 < alone.median < again.median < anew.median
    assert "times as long as taking the step again" in table(tried)


def _training(folder: Path, task: Task, way: WayName) -> Training:
    return Training(Rank(rank=0, world_size=1, port=0, folder=folder, task=task), task, way, job=way)


def _done(began: float, ended: float, failed: float | None) -> Done:
    return Done(began=began, ended=ended, cpu_seconds=1.0, failed=failed, step_seconds=1.0, work=(1, ""))


def _row(name: str, median: float, ratio: float) -> Row:
    return Row(
        name=name,
        median=median,
        ratio=ratio,
        aa_interval=(0.99, 1.02),
        claim=None,
        verdict="none claimed",
        reason="",
    )
