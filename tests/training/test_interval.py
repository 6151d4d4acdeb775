"""When a checkpoint is due."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext import CheckpointInterval

counts = st.integers(0, 10**9)
intervals = st.integers(1, 10**6)


@given(intervals, counts)
def test_multiples_of_the_interval_are_due_other_than_zero(every: int, count: int) -> None:
    is_due = count > 0 and count % every == 0
    assert CheckpointInterval(steps=every).should_save(current_step=count) is is_due
    assert CheckpointInterval(epochs=every).should_save(current_epoch=count) is is_due


@given(intervals, st.integers(1, 200))
def test_every_interval_has_one_save(every: int, num_intervals: int) -> None:
    interval = CheckpointInterval(steps=every)
    assert all(interval.should_save(current_step=every * number) for number in range(1, num_intervals))
    assert not any(
        interval.should_save(current_step=every * number + 1) for number in range(num_intervals * (every > 1))
    )


@given(intervals, counts)
def test_the_other_count_has_no_say(every: int, count: int) -> None:
    assert not CheckpointInterval(steps=every).should_save(current_epoch=count)
    assert not CheckpointInterval(epochs=every).should_save(current_step=count)


@pytest.mark.parametrize(
    ("interval", "step", "epoch", "is_due"),
    [
        (CheckpointInterval(steps=10), 20, None, True),
        (CheckpointInterval(steps=10), 20, 3, True),
        (CheckpointInterval(steps=10), 19, 10, False),
        (CheckpointInterval(epochs=2), 7, 4, True),
        (CheckpointInterval(epochs=2), 4, 3, False),
        (CheckpointInterval(epochs=2), None, 0, False),
        (CheckpointInterval(steps=1), 0, 0, False),
        (CheckpointInterval(steps=1), 1, None, True),
        (CheckpointInterval(steps=10), -10, None, False),
        (CheckpointInterval(steps=10), None, None, False),
        (CheckpointInterval(), 10, 10, False),
        (CheckpointInterval(), None, None, False),
    ],
)
def test_what_is_due(interval: CheckpointInterval, step: int | None, epoch: int | None, is_due: bool) -> None:
    assert interval.should_save(current_step=step, current_epoch=epoch) is is_due
    assert interval.should_save(step, epoch) is is_due


def test_nothing_given_is_never_due() -> None:
    assert CheckpointInterval(steps=1).should_save() is False


@pytest.mark.parametrize(("steps", "epochs"), [(1, 1), (100, 1), (0, 0)])
def test_steps_and_epochs_together_are_refused(steps: int, epochs: int) -> None:
    with pytest.raises(ValueError, match=r"^Only one of 'steps' or 'epochs' should be set\.$"):
        CheckpointInterval(steps=steps, epochs=epochs)
    with pytest.raises(ValueError, match=r"^Only one of 'steps' or 'epochs' should be set\.$"):
        CheckpointInterval(steps, epochs)


@pytest.mark.parametrize("value", [0, -1, True, 1.0, 2.5, "10"])
@pytest.mark.parametrize("name", ["steps", "epochs"])
def test_an_interval_that_is_none_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value!r}; allowed: an integer >= 1, or None"):
        CheckpointInterval(**{name: value})


def test_an_interval_is_a_value() -> None:
    interval = CheckpointInterval(steps=5)
    assert interval == CheckpointInterval(5) == CheckpointInterval(steps=5, epochs=None)
    assert len({interval, CheckpointInterval(5), CheckpointInterval(epochs=5)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        interval.steps = 6  # type: ignore[misc]
