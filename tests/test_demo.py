"""The demo fails where what it shows did not happen."""

from __future__ import annotations

from typing import cast

import pytest

from examples.live_config import DemoError, Training, check, main


class Finished:
    """What a training leaves behind for the demo to check."""

    def __init__(self, versions: set[int], result: str) -> None:
        self._versions = versions
        self._result = result

    def versions_applied(self) -> set[int]:
        return self._versions

    def wait_for_line(self, pattern: str) -> str:
        return self._result


LEARNED = "trained 320 steps: loss 0.700 (guessing: 2.944)"


@pytest.mark.parametrize(
    ("effects", "versions", "result", "fault"),
    [
        ([(1, [50, 51])], {1}, LEARNED, "different steps"),
        ([(1, [50, 50])], {1, 3}, LEARNED, "should have been refused"),
        ([(1, [50, 50])], {1}, "trained 320 steps: loss 2.900 (guessing: 2.944)", "learned nothing"),
    ],
)
def test_the_demo_fails_when(effects: list[tuple[int, list[int]]], versions: set[int], result: str, fault: str) -> None:
    with pytest.raises(DemoError, match=fault):
        check(cast(Training, Finished(versions, result)), effects)


def test_the_demo_passes_when_everything_happened() -> None:
    check(cast(Training, Finished({1, 2}, LEARNED)), [(1, [50, 50]), (2, [60, 60])])


def test_the_demo_exits_with_an_error_when_its_time_is_up() -> None:
    assert main(deadline_seconds=0.5) == 1
