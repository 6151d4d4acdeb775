"""What the benchmark of the trainer's own saves stands on: loops that save the same bits, and what is made of times."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import trainer_save
from benchmarks.harness import Comparison, Readings, Side, check_same_work
from benchmarks.quantiles import QuantileTable
from benchmarks.trainer_save import BLOCKED, BUSY, LOST, NAMES, NO_GPU, Seen, main, sides_of_saves, started
from benchmarks.trainer_save_ranks import Done, LoopName, Task

pytestmark = pytest.mark.slow  # a process for each loop

SMALL = Task(widths=(6, 8, 4), num_samples=2, num_steps=3)


def test_every_loop_comes_to_the_same_bits_and_saves_them(tmp_path: Path) -> None:
    seen = Seen()
    with started(SMALL, tmp_path) as gangs:
        sides = sides_of_saves(gangs, seen)
        for _ in range(2):  # each begins anew
            done = {side.name: side.run() for side in sides}
            check_same_work({name: _readings(each).work for name, each in done.items()})
            assert all(_readings(each).values[BUSY] > 0 for each in done.values())
    (work,) = {_readings(each).work for each in done.values()}
    assert isinstance(work, tuple)
    ended, saved = work
    assert saved is not None and ended != saved, "what is trained after the step that is saved is in it"
    assert set(seen.num_late) == set(NAMES)
    assert not [path for pattern in ("**/step_*", "**/async_*") for path in tmp_path.glob(pattern)]


def test_what_is_measured_on_the_host_says_that_a_gpu_is_not_among_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_save, "ON_HOST", SMALL)
    monkeypatch.setattr(trainer_save, "HOST_SECONDS", 1.0)
    results = main()
    assert len(results) == 4
    assert NO_GPU in results[0].notes
    assert {verdict for result in results for verdict in result.verdicts} == {"none claimed"}


def test_of_a_gpu_what_blocks_beside_the_passes_is_claimed_to_be_a_part_of_one_copy() -> None:
    seconds: dict[LoopName, float] = {"copy": 1.0, "reused": 2.0, "before": 1.1, "beside": 0.2, "shelf": 0.5}
    values = [[{BLOCKED: took, BUSY: 9.0 + took, LOST: took}] * 5 for took in (1.0, *seconds.values())]
    sides = [Side(name=name, run=int) for name in NAMES.values()]
    task = Task(widths=(6, 4), num_samples=2, num_steps=3, device="cuda")
    blocked, busy, lost, over = trainer_save.tables_of_saves(sides, values, task, Seen(state_bytes=1 << 20))
    assert isinstance(blocked, Comparison) and isinstance(busy, Comparison)
    assert blocked.heading == "**Blocked by a save, a GPU, 1 MiB of state** (5 rounds)"
    assert [row.verdict for row in blocked.rows] == [*["none claimed"] * 3, "pass", "none claimed"]
    assert {row.verdict for row in busy.rows} == {"none claimed"}
    assert isinstance(lost, QuantileTable) and isinstance(over, QuantileTable)
    assert [row.occasions[0][0] for row in lost.rows] == list(seconds.values())
    assert [row.occasions[0][0] for row in over.rows] == [0.55, 0.1, 0.25]


def test_late_saves_are_told() -> None:
    seen = Seen()
    for is_late in (True, False, True):
        seen.add("beside", _done(is_late=is_late))
        seen.add("copy", _done(is_late=False))
    sides = [Side(name=name, run=int) for name in NAMES.values()]
    values = [[{BLOCKED: 1.0, BUSY: 2.0, LOST: 1.0}] * 5 for _ in range(1 + len(sides))]
    _, busy, *_ = trainer_save.tables_of_saves(sides, values, SMALL, seen)
    assert busy.notes[0].endswith(f"is waited for: {NAMES['beside']} 2")


def test_time_is_lost_to_a_save_beside_which_steps_are_slower() -> None:
    assert _done(is_late=False).lost_seconds == 1.0


def _done(*, is_late: bool) -> Done:
    return Done(
        quiet_seconds=2.0,
        busy_seconds=3.0,
        blocked_seconds=0.5,
        is_late=is_late,
        state_bytes=1,
        digest="",
        saved_digest=None,
    )


def _readings(done: object) -> Readings:
    assert isinstance(done, Readings)
    return done
