"""What the benchmark of pulses stands on: sides that do the same work, of which one has a pulse."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks import pulse
from benchmarks.harness import Reading

pytestmark = pytest.mark.slow  # what it measures with is tried where that is changed


def test_both_sides_come_to_the_same_parameters(tmp_path: Path) -> None:
    with ExitStack() as stack:
        done = [side.run() for side in pulse.sides(pulse.SMALL, tmp_path, 5, stack)]
        assert all(isinstance(each, Reading) for each in done)
        assert len({each.work for each in done if isinstance(each, Reading)}) == 1


def test_tables_and_words_are_made() -> None:
    found = pulse.cost_of_writing(num_rounds=3)
    assert [row.name for row in found.rows] == list(pulse.NAMES.values())
    assert found.rows[1].at_most == pulse.MOST_SECONDS
    assert "a look at 8 workers takes their agent" in found.notes[0]
    assert pulse.share_of_steps(num_rounds=3).rows[1].claim == pulse.SHARE
