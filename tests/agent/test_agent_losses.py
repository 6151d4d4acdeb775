"""What a restart has cost, in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_ext.agent.event_files import newest_event
from elastic_ext.agent.node_tasks import Begun, LastProgress, begun_in, cost_in_words, left_in, resumed_in_words
from elastic_ext.records.metrics import JobEvent

BEGUN = Begun(step=8, global_batch_size=12, checkpoints="/shared")


@pytest.mark.parametrize(
    ("ended", "begun", "words"),
    [
        (10, BEGUN, "after step 8: 2 steps taken again (24 samples), and 6.5 seconds without a step"),
        (9, BEGUN, "after step 8: 1 step taken again (12 samples)"),
        (8, BEGUN, "after step 8: no step is taken again"),
        (3, Begun(step=0, global_batch_size=None, checkpoints=None), "after step 0: 3 steps taken again, and"),
    ],
)
def test_steps_samples_and_seconds_are_told(ended: int, begun: Begun, words: str) -> None:
    assert words in cost_in_words(LastProgress(step=ended, clock=100.0), begun, now=106.5)


def event(step: int, time: float, kind: str = "training-began", text: str = "", **details: object) -> str:
    found = JobEvent(time=time, generation=0, rank=0, step=step, kind=kind, text=text, details=details)
    return found.to_json() + "\n"


def test_the_last_beginning_counts_where_it_is_of_this_round(tmp_path: Path) -> None:
    file = tmp_path / "events-0.jsonl"
    assert begun_in(file, since=0.0) is None
    file.write_text(event(0, 1.0) + event(8, 5.0, global_batch_size=12, checkpoints="/shared") + event(9, 6.0, "other"))
    assert begun_in(file, since=4.0) == BEGUN
    assert begun_in(file, since=5.5) is None


def test_a_beginning_says_where_and_how_often_checkpoints_are_saved(tmp_path: Path) -> None:
    file = tmp_path / "events-0.jsonl"
    file.write_text(event(0, 1.0, checkpoints="/shared", checkpoint_interval="every 50 steps"))
    begun = begun_in(file, since=0.0)
    assert begun is not None and begun.checkpoints == "/shared, every 50 steps"
    file.write_text(event(0, 1.0, checkpoints=None, checkpoint_interval=None))
    begun = begun_in(file, since=0.0)
    assert begun is not None and begun.checkpoints is None


def test_a_start_that_resumes_says_from_which_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "events-0.jsonl"
    file.write_text(event(192, 1.0, resumed_from="/shared/step_192", saved_by_ranks=2))
    begun = begun_in(file, since=0.0)
    assert begun is not None
    assert resumed_in_words(begun) == "training resumes from /shared/step_192, of step 192, saved by 2 ranks"


def test_what_a_rank_says_that_was_told_to_end_is_found_where_it_is_of_this_round(tmp_path: Path) -> None:
    file = tmp_path / "events-0.jsonl"
    assert left_in(file, since=0.0) is None
    words = "training was told to end, and can go on from step 8"
    left = event(8, 5.0, "can-go-on", words)
    file.write_text(event(0, 1.0) + left + event(8, 6.0, "other"))
    assert left_in(file, since=4.0) == words
    assert left_in(file, since=5.5) is None


@pytest.mark.parametrize("line", ["", "[]", "{}", "[" * 100_000, '{"kind": "training-began", "step": 1}', "\x00\xff"])
def test_lines_that_are_no_events_are_left_out(line: str, tmp_path: Path) -> None:
    file = tmp_path / "events-0.jsonl"
    file.write_text(event(8, 5.0, global_batch_size=12, checkpoints="/shared") + line[:60_000])
    assert begun_in(file, since=0.0) == BEGUN


@pytest.mark.parametrize("later", [0, (1 << 20) - 20, 1 << 20, (1 << 20) + 20, 5 << 19])
def test_the_last_event_of_a_kind_is_found_however_much_was_written_since(later: int, tmp_path: Path) -> None:
    file = tmp_path / "events-0.jsonl"
    line = event(9, 6.0, "other", "x" * 1000)
    rest = (line * (later // len(line))).rjust(later, "\n")
    file.write_text(event(0, 1.0) + event(8, 5.0) + rest)
    found = newest_event(file, ("training-began",), most_bytes=1 << 30)
    assert found is not None and found.step == 8
    if later >= 1 << 20:
        assert newest_event(file, ("training-began",), most_bytes=1 << 20) is None
