"""The demo fails where what it shows did not happen."""

from __future__ import annotations

from typing import cast

import pytest

from examples import nodes_come_and_go, tunes_itself
from examples.live_config import check, main
from examples.training_job import DemoError, Training

Taken = dict[int, tuple[int, int]]


class Finished:
    """What a training leaves behind for the demo to check."""

    def __init__(self, versions: set[int], result: str, taken: Taken, checksums: dict[int, list[str]]) -> None:
        self._checksums = checksums
        self._versions = versions
        self._result = result
        self._taken = taken
        self.num_processes = 2

    def pids(self) -> list[str]:
        return [*map(str, range(self.num_processes))]

    def versions_applied(self) -> set[int]:
        return self._versions

    @property
    def lines(self) -> list[str]:
        return [
            f"step {step}: loss 1.000, {num_windows} windows in {num_micro_steps} micro-steps, 1.0 s"
            for step, (num_windows, num_micro_steps) in self._taken.items()
        ]

    def checksums(self) -> dict[int, list[str]]:
        return self._checksums

    def wait_for_line(self, pattern: str) -> str:
        return self._result


LEARNED = "trained 320 steps: loss 0.700 (guessing: 2.944)"
AGAIN = {1: ["a"], 2: ["b", "b"]}
TAKEN = {20: (16, 1), 40: (16, 2)}  # by step: windows and micro-steps


@pytest.mark.parametrize(
    ("effects", "versions", "taken", "result", "fault"),
    [
        ([(1, [50, 51])], {1}, TAKEN, LEARNED, "different steps"),
        ([(1, [50, 50])], {1, 3}, TAKEN, LEARNED, "should have been refused"),
        ([(1, [50, 50])], {1}, {20: (16, 1), 40: (8, 2)}, LEARNED, "global batch did not stay"),
        ([(1, [50, 50])], {1}, {20: (16, 1), 40: (16, 1)}, LEARNED, "micro-batch did not change"),
        ([(1, [50, 50])], {1}, {}, LEARNED, "global batch did not stay"),
        ([(1, [50, 50])], {1}, TAKEN, "trained 320 steps: loss 2.900 (guessing: 2.944)", "learned nothing"),
    ],
)
def test_the_demo_fails_when(
    effects: list[tuple[int, list[int]]], versions: set[int], taken: Taken, result: str, fault: str
) -> None:
    with pytest.raises(DemoError, match=fault):
        check(cast(Training, Finished(versions, result, taken, AGAIN)), effects)


@pytest.mark.parametrize(
    ("checksums", "fault"),
    [({2: ["a"]}, "left out"), ({1: ["a"], 3: ["b"]}, "left out"), ({1: ["a", "b"]}, "other samples")],
)
def test_the_demo_fails_where_steps_are_left_out_or_come_again_with_other_samples(
    checksums: dict[int, list[str]], fault: str
) -> None:
    with pytest.raises(DemoError, match=fault):
        check(cast(Training, Finished({1}, LEARNED, TAKEN, checksums)), [(1, [50, 50])])


def test_the_demo_passes_when_everything_happened() -> None:
    check(cast(Training, Finished({1, 2}, LEARNED, TAKEN, AGAIN)), [(1, [50, 50]), (2, [60, 60])])


def test_the_demo_exits_with_an_error_when_its_time_is_up() -> None:
    assert main(deadline_seconds=0.5) == 1


def _decision(version: int | None, outcome: str = "kept") -> dict[str, object]:
    return {
        "number": 1,
        "kind": "probe",
        "version": version,
        "reason": "why",
        "predicted": 900.0,
        "measured": 1000.0,
        "outcome": outcome,
    }


@pytest.mark.parametrize(
    ("after", "decisions", "versions", "checksums", "fault"),
    [
        (1000.0, [], set(), AGAIN, "changed nothing"),
        (1000.0, [_decision(None)], set(), AGAIN, "changed nothing"),
        (1000.0, [_decision(1, outcome="")], set(), AGAIN, "never in force"),
        (150.0, [_decision(1)], {1}, AGAIN, "less than 2 times"),
        (1000.0, [_decision(1)], {1}, {2: ["a"]}, "left out"),
        (1000.0, [_decision(1)], {1}, {1: ["a", "b"]}, "other samples"),
    ],
)
def test_the_demo_of_tuning_fails_when(
    after: float,
    decisions: list[dict[str, object]],
    versions: set[int],
    checksums: dict[int, list[str]],
    fault: str,
) -> None:
    finished = cast(Training, Finished(versions, "", {}, checksums))
    with pytest.raises(DemoError, match=fault):
        tunes_itself.check(finished, 100.0, after, decisions)


def test_the_demo_of_tuning_passes_when_everything_happened() -> None:
    tunes_itself.check(cast(Training, Finished({1}, "", {}, AGAIN)), 100.0, 1000.0, [_decision(1)])
    assert tunes_itself.rates(["step 3: 40 samples/s, loss", "else"]) == [40.0]
    assert tunes_itself.in_words(_decision(1)) == "1. probe, version 1: why; measured 1,000 samples/s -> kept"
    assert tunes_itself.in_words({**_decision(None, outcome=""), "measured": None}) == "1. probe: why"
    assert tunes_itself.in_words({**_decision(None, outcome="undone"), "measured": None}) == (
        "1. probe: why; not measured -> undone"
    )


_RUN = "/tmp/elastic_ext-demo-1/checkpoints/fsdp_checkpoint/slow_samples-1_20261128-112254"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("step 6: 179 samples/s, loss 1.752", "step 6: 179 samples/s, loss 1.752"),
        (f"INFO checkpoint {_RUN}/step_40 was saved in 0.09 s", None),
        ("INFO job slow_samples, 2 ranks, config file /tmp/c.json; version 0 in force: {}", None),
        ("INFO profile: step 1976, 17.9 ms a step", None),
        ("INFO SIGTERM: training is to end; the step under way is saved first, if it ends in time", None),
        ("elastic-run 11:22:34   settings     max_restarts=1", None),
        ("elastic-run 11:22:35 workers started", "elastic-run 11:22:35 workers started"),
        (
            "INFO version 1 in force from step 44: dataloader.batch_size 1 -> 32 (the reason), on all 2 ranks",
            "version 1 in force from step 44: dataloader.batch_size 1 -> 32",
        ),
        (
            f"INFO job slow, 2 ranks: training goes on after step 40 of {_RUN}/step_40; config file /tmp/c.json",
            "job slow, 2 ranks: training goes on after step 40 of step_40",
        ),
        (f"WARNING resuming from {_RUN}/step_40, saved then", "WARNING resuming from step_40, saved then"),
        ("ValueError: wrong", "ValueError: wrong"),
    ],
)
def test_the_demo_of_tuning_shows_what_happens_in_short(line: str, shown: str | None) -> None:
    assert tunes_itself.Story().shown(line) == shown


def test_the_demo_of_tuning_shows_one_of_four_of_the_scripts_lines_and_the_beginning_of_long_ones() -> None:
    story = tunes_itself.Story()
    lines = [f"step {step}: 40 samples/s" for step in range(8)]
    assert [line for line in lines if story.shown(line) is not None] == [lines[0], lines[4]]
    assert story.shown("x" * 300) == "x" * 200 + "..."


def test_the_demo_of_tuning_exits_with_an_error_when_its_time_is_up() -> None:
    assert tunes_itself.main(deadline_seconds=0.5) == 1


@pytest.mark.parametrize(
    ("num_processes", "checksums", "fault"),
    [
        (4, {1: ["a"]}, "workers of the first node were restarted"),
        (2, {2: ["a"]}, "left out"),
        (2, {1: ["a", "a"]}, "taken twice"),
    ],
)
def test_the_demo_of_members_fails_when(num_processes: int, checksums: dict[int, list[str]], fault: str) -> None:
    finished = Finished(set(), "", {}, checksums)
    finished.num_processes = num_processes
    with pytest.raises(DemoError, match=fault):
        nodes_come_and_go.check(cast(Training, finished))


def test_the_demo_of_members_passes_when_everything_happened() -> None:
    nodes_come_and_go.check(cast(Training, Finished(set(), "", {}, {1: ["a"], 2: ["b"]})))


def test_the_demo_of_members_exits_with_an_error_when_its_time_is_up() -> None:
    assert nodes_come_and_go.main(deadline_seconds=0.5) == 1
