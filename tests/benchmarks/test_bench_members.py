"""What the benchmark of members stands on: what processes have written, and the longest time without a step in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.members import gap_after, longest_gap, read_steps
from benchmarks.members_job import Record


def test_what_processes_write_is_read_with_samples_that_were_lost_or_repeated(tmp_path: Path) -> None:
    for pid, first in ((1, 0), (2, 100)):
        with open(tmp_path / f"steps-{pid}.txt", "w") as file:
            record = Record(file)
            for step in range(1, 8):
                record.drawn(torch.tensor([first + step]))
                if step == 3 and pid == 2:
                    record.discarded()
                else:
                    record.committed(step, 2)
            record.drawn(torch.tensor([1]))
            record.committed(8, 3, counts=pid == 1)
            file.write("step 9 17")  # half a line, as it is being written
    run = read_steps(tmp_path)
    assert [step for step, _, _ in run.steps[:2]] == [1, 2]  # by time, of one process after another
    assert (run.num_ranks, run.num_steps_among(2), run.num_steps_among(3)) == (3, 7, 1)
    assert run.drawn.keys() - run.trained.keys() == {103}
    assert [sample for sample, count in run.trained.items() if count > 1] == [1]


def test_the_longest_time_without_a_step_is_that_around_the_new_world() -> None:
    usual = [(step, float(step), 2) for step in range(1, 11)]
    after = [(step, 5.0 + step, 3) for step in range(11, 21)]
    assert longest_gap([(0, -50.0, 2), *usual, *after], 3) == 6.0  # the job's beginning is too far away to count
    slow = [(step, when + (2.0 if step > 12 else 0.0), ranks) for step, when, ranks in after]
    assert longest_gap([*usual, *slow], 3) == 6.0
    just_before = [(step, when - (9.0 if step < 9 else 0.0), ranks) for step, when, ranks in usual]
    assert longest_gap([*just_before, *after], 3) == 10.0
    with pytest.raises(StopIteration):
        longest_gap(usual, 3)


def test_the_time_without_a_step_after_a_kill_begins_with_the_last_step_before_it() -> None:
    usual = [(step, float(step), 3) for step in range(1, 11)]
    after = [(10, 10.5, 3), *((step, 7.0 + step, 2) for step in range(11, 40))]
    assert gap_after([*usual, *after], 10.2) == 7.5
    assert gap_after([(0, -50.0, 3), *usual, *after], 10.2) == 7.5
    later = [(step, when + (90.0 if step > 30 else 0.0), ranks) for step, when, ranks in after]
    assert gap_after([*usual, *later], 10.2) == 7.5
