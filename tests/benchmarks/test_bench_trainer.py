"""What the benchmark of the trainer's steps stands on: loops that do the same work, and differences with a verdict."""

from __future__ import annotations

import dataclasses
import math
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.differences import compare_differences, decide_difference
from benchmarks.gang import Gang
from benchmarks.harness import Reading, Readings, Side, check_same_work, table
from benchmarks.trainer_ranks import LoopName, Rank, Task, Work, training_rank
from benchmarks.trainer_steps import ON_RANKS, SMALL, sides_of_one_rank, sides_of_ranks

HAS_FABRIC = find_spec("lightning_fabric") is not None  # which `make bench` installs, and the tests do without


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("num_micro_steps", [1, 4])
def test_all_loops_lead_to_the_same_parameters_on_one_rank(tmp_path: Path, num_micro_steps: int) -> None:
    task = dataclasses.replace(SMALL, num_micro_steps=num_micro_steps)
    names: list[LoopName] = ["hand", "ours", "backward", "full", "accelerate"]
    names += ["default"] if num_micro_steps == 1 else []
    names += ["fabric"] if HAS_FABRIC else []
    with ExitStack() as stack:
        sides = sides_of_one_rank(task, tuple(names), 8, tmp_path, stack)
        for _ in range(2):  # each begins anew
            work = {side.name: _work(side) for side in sides}
            check_same_work(work)
        (shorter,) = sides_of_one_rank(task, ("hand",), 4, tmp_path, stack)
    num_taken, parameters = work[sides[0].name]
    assert num_taken == 8
    assert _work(shorter)[1] != parameters, "nothing was trained"


def test_all_loops_lead_to_the_same_parameters_on_ranks(tmp_path: Path) -> None:
    task = Task(widths=(6, 8, 4), micro_batch=2, num_micro_steps=2)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        Rank(rank=rank, world_size=2, port=store.port, folder=tmp_path, task=task, names=ON_RANKS) for rank in (0, 1)
    ]
    work: dict[str, object] = {}
    with Gang(training_rank, ranks) as gang:
        for side in sides_of_ranks(gang, ON_RANKS, 4, "wall", "cpu"):
            done = side.run()
            assert isinstance(done, Readings)
            assert min(done.values["wall"], done.values["cpu"]) > 0
            work[side.name] = done.work
            assert isinstance(done.work, tuple)
            assert len(set(done.work)) == 1, "the ranks' parameters differ"
    check_same_work(work)


@pytest.mark.parametrize(
    ("difference", "interval", "aa_interval", "at_most", "verdict", "reason"),
    [
        (8e-6, (7e-6, 9e-6), (-1e-6, 1e-6), 10e-6, "pass", "+8.0 µs is at most +10.0 µs"),
        (-2e-6, (-3e-6, -1e-6), (-1e-6, 1e-6), 10e-6, "pass", "-2.0 µs is at most +10.0 µs"),
        (12e-6, (11e-6, 13e-6), (-1e-6, 1e-6), 10e-6, "fail", "+12.0 µs is more than +10.0 µs"),
        (
            9e-6,
            (8e-6, 11e-6),
            (-1e-6, 1e-6),
            10e-6,
            "inconclusive",
            "its interval, +8.0 µs to +11.0 µs, holds +10.0 µs",
        ),
        (
            1e-6,
            (0.0, 2e-6),
            (-6e-6, 6e-6),
            10e-6,
            "inconclusive",
            "the baseline against itself spans 12 µs, the claim is 10 µs",
        ),
        (1e-6, (0.0, 2e-6), (3e-6, 11e-6), 10e-6, "inconclusive", "the baseline against itself spans 11 µs"),
        (1e-6, (0.0, 2e-6), (0.0, 0.0), None, "none claimed", "nothing is claimed of it"),
    ],
)
def test_difference_is_decided_where_the_baseline_and_its_own_interval_allow_it(
    difference: float,
    interval: tuple[float, float],
    aa_interval: tuple[float, float],
    at_most: float | None,
    verdict: str,
    reason: str,
) -> None:
    found = decide_difference(difference, interval, aa_interval, at_most)
    assert found[0] == verdict
    assert found[1].startswith(reason)


def test_table_of_differences_shows_what_each_side_takes_more_in_the_same_round() -> None:
    drift = iter([value for value in (1.0, 1.5, 3.0, 2.0) for _ in range(3)])  # one value for each round's three runs

    def side(name: str, more: float) -> Side:
        return Side(name=name, run=lambda: Reading(value=next(drift) + more, work=1))

    sides = [side("base", 0.0), side("ours", 4e-6)]
    shown = compare_differences("A step", sides, {"ours": 5e-6}, num_rounds=3, settle=lambda: None)
    lines = table(shown).splitlines()
    assert lines[0] == "**A step** (3 rounds)"
    assert lines[4] == "| base | 2 s | | | +0.0 µs to +0.0 µs | | |"
    assert lines[5].startswith("| ours | 2 s | +4.0 µs (+4.0 µs to +4.0 µs) | 1.000 | +0.0 µs to +0.0 µs | ≤ +5.0 µs |")
    assert lines[5].endswith("| pass: +4.0 µs is at most +5.0 µs |")
    assert shown.verdicts == ("none claimed", "pass")
    assert math.isclose(shown.rows[1].difference, 4e-6, rel_tol=1e-6)


def _work(side: Side) -> Work:
    done = side.run()
    assert isinstance(done, Reading)
    assert done.value > 0
    work: Work = done.work  # type: ignore[assignment]
    return work
