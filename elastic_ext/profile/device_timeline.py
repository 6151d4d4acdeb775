"""DeviceTimeline: a timeline by an accelerator's clock: what its stream has come to, and not what the host asked for.

Each mark is an event on the stream too. The time between two of them is what the device spent on what lies between,
idle or not: so waiting for data counts only as far as the device waits. Events are read when the device has come past
all of a step's, so that nobody waits for them: a step is known a step or two late.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from operator import add
from typing import Any, NamedTuple, Protocol

from .phases import NUM_PHASES, ROLLED_BACK_WITH_STEP, Phase, Spent, Timeline

__all__ = ["DeviceTimeline", "Event"]

_logger = logging.getLogger(__name__)

_MOST_BEHIND = 64  # steps
_Marks = list[tuple[int, "Event"]]
"""Phases that ended, each with the event on the stream at its end."""


class Event(Protocol):
    """A mark on a stream, as ``torch.cuda.Event`` is one."""

    def record(self) -> Any: ...

    def query(self) -> bool:
        """Whether the device has come past this event."""

    def synchronize(self) -> Any:
        """Wait until the device has come past this event."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds on the device from this event to ``end_event``."""


class _EndedStep(NamedTuple):
    """A step, or several unmeasured ones, that the host has ended and that the device may not have come past."""

    marks: _Marks
    is_measured: bool
    host: Spent
    """The time spent by the host's clock as the step ended on the host."""

    @property
    def is_past(self) -> bool:
        """Whether the device has come past the end of this step."""
        return not self.marks or self.marks[-1][1].query()


class DeviceTimeline(Timeline):
    """The training thread's time by phase, on one device's clock; where events fail, by the host's, with a warning."""

    __slots__ = (
        "_added",
        "_begun",
        "_device",
        "_free",
        "_has_marks",
        "_host",
        "_is_by_host",
        "_is_captured",
        "_last",
        "_make",
        "_marks",
        "_num_ended",
        "_steps",
    )

    def __init__(self, phase: Phase, make: Callable[[], Event], is_captured: Callable[[], bool]) -> None:
        """``make`` gives a new event. ``is_captured`` says whether a CUDA graph is captured on the stream now.

        No event may be recorded during a capture.
        """
        super().__init__(phase)
        self._make, self._is_captured = make, is_captured
        self._device = [0] * NUM_PHASES  # nanoseconds by phase, as far as events are read
        self._host = [0] * NUM_PHASES  # those by the host's clock as it ended the last step whose events are read
        self._has_marks = False  # whether an event was ever recorded
        self._free: list[Event] = []
        self._marks: _Marks = []  # since ``end_step``
        self._num_ended = 0  # how many of ``_marks`` are of unmeasured steps that have ended
        self._begun: int | None = None  # how many of ``_marks`` came before the measured step under way
        self._steps: deque[_EndedStep] = deque()  # whose events are not read yet
        self._last: Event | None = None  # the event before the first mark in ``_steps`` and ``_marks``
        self._is_by_host = False
        """Whether times go on by the host's clock, since the device's cannot be read any more."""
        self._added = [0] * NUM_PHASES  # nanoseconds by phase to add to the host's then

    def enter(self, phase: int) -> int:
        before = super().enter(phase) if self.is_here else super().enter_elsewhere(phase)
        if self._is_by_host:
            return before
        try:
            if not self._is_captured():
                event = self._free.pop() if self._free else self._make()
                event.record()
                if not self._has_marks:  # what was before the first event, no event tells
                    self._has_marks = True
                    self._device, self._host = self._spent[:NUM_PHASES], self._spent[:NUM_PHASES]
                self._marks.append((before, event))
        except RuntimeError as error:
            self._go_on_by_host(error)
        return before

    def enter_unmeasured(self, phase: int) -> None:
        self.enter(phase)

    def add_past(self, phase: int, nanoseconds: int) -> None:
        super().add_past(phase, nanoseconds)
        self._device[phase] += nanoseconds
        self._host[phase] += nanoseconds

    def begin_step(self) -> None:
        super().begin_step()
        self._begun = len(self._marks)

    def end_unmeasured_step(self) -> None:
        super().end_unmeasured_step()
        self._num_ended, self._begun = len(self._marks), None

    def roll_back(self) -> None:
        super().roll_back()
        begun, self._begun = self._begun, None
        for number in range(self._num_ended, len(self._marks)):
            phase, event = self._marks[number]
            if phase in ROLLED_BACK_WITH_STEP or _is_within(number, begun, phase):
                self._marks[number] = Phase.ROLLED_BACK, event

    def take_spent(self) -> Spent:
        return self._told(super().take_spent())

    def end_step(self, *, is_measured: bool) -> list[tuple[Spent, Spent]]:
        begun, before = self._before, self.take_spent()
        self._others = None
        if self._is_by_host:
            return [(self._told(begun), before)] if is_measured else []
        self._steps.append(_EndedStep(self._marks, is_measured, self._before))
        self._marks, self._num_ended, self._begun = [], 0, None
        found = []
        try:
            while self._steps and self._steps[0].is_past:
                step = self._steps.popleft()
                self._read(step)
                after = [*self._device, *before[NUM_PHASES:]]
                if step.is_measured:
                    found.append((before, after))
                before = after
            if len(self._steps) > _MOST_BEHIND:
                raise RuntimeError(f"the device is {len(self._steps)} steps behind the host")
        except RuntimeError as error:
            self._go_on_by_host(error)
        return found

    def finish(self) -> None:
        """Wait for the device, and count the time of all events that were recorded."""
        super().finish()
        if self._is_by_host:
            return
        host = super().take_spent()
        self._steps.append(_EndedStep(self._marks, is_measured=False, host=host))
        self._marks = []
        try:
            for step in self._steps:
                if step.marks:
                    step.marks[-1][1].synchronize()
                self._read(step)
        except RuntimeError as error:
            self._go_on_by_host(error)
        self._steps.clear()

    def _read(self, step: _EndedStep) -> None:
        for phase, event in step.marks:
            if self._last is not None:
                self._device[phase] += max(round(self._last.elapsed_time(event) * 1e6), 0)
                self._free.append(self._last)
            self._last = event
        self._host = step.host[:NUM_PHASES]

    def _told(self, host: Spent) -> Spent:
        """The time spent by phase as this timeline counts it, where by the host's clock it is ``host``.

        Wall time is the device's, as far as events are read, or the host's and ``_added``; CPU time is the host's.
        """
        if not self._is_by_host:
            return [*self._device, *host[NUM_PHASES:]]
        return [*map(add, host, self._added), *host[NUM_PHASES:]]

    def _go_on_by_host(self, error: RuntimeError) -> None:
        """Count by the host's clock from now on.

        The time of events that were not read is that which has passed on the host and that the device has not told of;
        it is divided among phases as the host has spent it since the last step that was read.
        """
        self._is_by_host = True
        host = self._spent[:NUM_PHASES]
        unread = [max(now - then, 0) for then, now in zip(self._host, host, strict=True)]
        scale = max(sum(host) - sum(self._device), 0) / max(sum(unread), 1)
        self._added = [
            told + int(scale * more) - now for told, more, now in zip(self._device, unread, host, strict=True)
        ]
        self._marks, self._num_ended, self._begun, self._last = [], 0, None, None
        self._steps.clear()
        self._free.clear()
        _logger.warning("the profile goes on by the host's clock, since the device's clock cannot be read: %s", error)


def _is_within(number: int, begun: int | None, phase: int) -> bool:
    """Whether a mark is of ``Phase.OTHER`` and within the step that has begun."""
    return phase == Phase.OTHER and begun is not None and number >= begun
