"""What the benchmark of profiles stands on: sides that do the same work, of which one keeps a profile."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks import profile
from benchmarks.harness import Claim, Reading

pytestmark = pytest.mark.slow  # what it measures with is tried where that is changed


def test_both_sides_come_to_the_same_parameters(tmp_path: Path) -> None:
    with ExitStack() as stack:
        done = [side.run() for side in profile.sides(profile.SMALL, tmp_path, 5, stack)]
        assert all(isinstance(each, Reading) for each in done)
        assert len({each.work for each in done if isinstance(each, Reading)}) == 1


def test_tables_and_words_are_made() -> None:
    found = profile.cost_of_looking(num_rounds=3, is_every_step=True)
    assert [row.name for row in found.rows] == list(profile.NAMES.values())
    assert found.rows[1].at_most is None and "a phase begins takes" in found.notes[0]
    claim = Claim(at_most=2.0)
    shares = profile.share_of_steps("short", profile.SMALL, claim, num_in_block=4, num_rounds=3)
    assert shares.rows[1].claim == claim
