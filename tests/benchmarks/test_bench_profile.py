"""What the benchmark of profiles stands on: sides that do the same work, of which one keeps a profile."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from statistics import median

import pytest

from benchmarks import profile
from benchmarks.harness import Readings

pytestmark = pytest.mark.slow  # what it measures with is tried where that is changed


def test_both_sides_come_to_the_same_parameters(tmp_path: Path) -> None:
    with ExitStack() as stack:
        done = [side.run() for side in profile.sides(profile.SMALL, tmp_path, 5, stack)]
        read = [each for each in done if isinstance(each, Readings)]
        assert len(read) == len(done) and all(each.values.keys() == {profile.CPU, profile.WALL} for each in read)
        assert len({each.work for each in read}) == 1


def test_tables_and_words_are_made() -> None:
    found = profile.cost_of_looking("every step looked at", num_rounds=3)
    assert [row.name for row in found.rows] == list(profile.NAMES.values())
    assert found.rows[1].at_most is None and "a phase begins takes" in found.notes[0]
    shares = profile.share_of_steps("short", profile.SMALL, 2.0, passing_seconds=0.0, num_rounds=3)
    assert ["CPU time" in each.title for each in shares] == [True, False]
    for each in shares:
        assert [row.name for row in each.rows] == list(profile.LOOKS.values())
        times = float(each.notes[1].partition("may take ")[2].partition(" times")[0])
        assert times > 1 and each.rows[1].at_most == pytest.approx(2 * times * median(each.rows[0].values), rel=0.1)
        assert "200.0% of a step less what is spent on each step" in each.notes[0]
