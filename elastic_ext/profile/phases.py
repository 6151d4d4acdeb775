"""The phases that a rank's time is divided into, the timeline that measures them, and what a data source offers to be
timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from threading import get_ident
from time import perf_counter_ns, thread_time_ns
from typing import Protocol, runtime_checkable

__all__ = [
    "COMPUTING",
    "IN_STEPS",
    "LEAST_SECONDS",
    "LOST",
    "NUM_PHASES",
    "WAITING",
    "ChangingSource",
    "Phase",
    "Span",
    "Spent",
    "TimedSource",
    "Timeline",
    "length",
    "outside",
    "united",
]


# --- the phases that a rank's time is divided into -------------------------------------------------------------------
# Every moment is of one phase, so that what a rank spent in all of them adds up to the time that has passed.

LEAST_SECONDS = 1e-9
"""Less is nothing: no clock tells it."""


class Phase(IntEnum):
    """What a rank spends time on; their names stand in files."""

    DATA = 0
    """Waiting for a batch."""
    TRANSFER = 1
    """From the host's memory to the accelerator's."""
    FORWARD = 2
    """The model's forward pass, and the loss."""
    BACKWARD = 3
    COMMUNICATION = 4
    """Waiting for gradients on their way between ranks, when nothing is left to compute meanwhile: what is exposed."""
    OPTIMIZER = 5
    STEP = 6
    """Within steps that were not looked at more closely."""
    OTHER = 7
    """What the loop does besides: logging, metrics, learning-rate schedules."""
    AGREEMENT = 8
    """Words with the other ranks at boundaries."""
    CHANGE = 9
    """A config coming into force."""
    CHECKPOINT = 10
    """Training waits for a checkpoint."""
    ROLLED_BACK = 11
    """Steps that were taken back."""
    OUTSIDE = 12
    """Outside of epochs: evaluation, for one."""
    STARTUP = 13
    """From the start of the process to the first step."""

    @property
    def label(self) -> str:
        """What it is called in files and words."""
        return self.name.lower().replace("_", "-")


COMPUTING = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
WAITING = (Phase.COMMUNICATION, Phase.AGREEMENT)
"""For other ranks."""
IN_STEPS = (
    Phase.DATA,
    Phase.TRANSFER,
    *COMPUTING,
    Phase.COMMUNICATION,
    Phase.STEP,
    Phase.OTHER,
    Phase.AGREEMENT,
)
"""Of a step that nothing out of the ordinary befalls."""


# --- in which phase the training thread is, and how long it has been in each -----------------------------------------
# The thread says when a phase begins; the one before ends there. So nothing is counted twice, and nothing is left out.

NUM_PHASES = len(Phase)
LOST = frozenset((Phase.DATA, Phase.TRANSFER, Phase.FORWARD, Phase.BACKWARD, Phase.COMMUNICATION, Phase.STEP))

Spent = list[int]
"""Nanoseconds by phase: of the clock, and then, as many again, of this thread's processor time."""


class Timeline:
    """The training thread's; others ask whether it ``is_here``, or say what begins with ``enter_elsewhere``."""

    __slots__ = ("_before", "_cpu", "_others", "_phase", "_since", "_spent", "_thread")

    def __init__(self, phase: Phase) -> None:
        self._phase = int(phase)
        self._spent = [0] * (2 * NUM_PHASES)  # since it began
        self._before = self._spent.copy()  # when it was last asked
        self._others: tuple[int, int] | None = None  # what went into Phase.OTHER before the step under way began
        self._since = perf_counter_ns()
        self.take_thread()

    def take_thread(self) -> None:
        """From here on it is of the thread that calls this."""
        self._thread, self._cpu = get_ident(), thread_time_ns()

    @property
    def is_here(self) -> bool:
        """Whether it is of the thread that asks."""
        return get_ident() == self._thread

    @property
    def phase(self) -> int:
        """The one that it is in."""
        return self._phase

    # Training waits for this one: about half a microsecond.
    def enter(self, phase: int) -> int:
        """From here on it is in ``phase``; gives the one before."""
        now, cpu, before, spent = perf_counter_ns(), thread_time_ns(), self._phase, self._spent
        spent[before] += now - self._since
        spent[before + NUM_PHASES] += cpu - self._cpu
        self._since = now
        self._cpu = cpu
        self._phase = phase
        return before

    def enter_elsewhere(self, phase: int) -> int:
        """The same from another thread, as of those that run backward passes on accelerators.

        What processor time the training thread has had since the last mark counts for ``phase``.
        """
        now, before = perf_counter_ns(), self._phase
        self._spent[before] += now - self._since
        self._since = now
        self._phase = phase
        return before

    def add_past(self, phase: int, nanoseconds: int) -> None:
        """Count what went before it began."""
        self._spent[phase] += nanoseconds

    def begin_step(self) -> None:
        """What the loop does besides is a part of the step from here on; just after ``enter``."""
        self._others = self._spent[Phase.OTHER], self._spent[NUM_PHASES + Phase.OTHER]

    def lose(self) -> None:
        """What was spent since it was last asked comes to nothing: the step under way is taken back."""
        self.enter(self._phase)
        for first in (0, NUM_PHASES):
            for phase in LOST:
                self._lose(phase, first, self._before[first + phase])
        if self._others is not None:
            for first, before in zip((0, NUM_PHASES), self._others, strict=True):
                self._lose(Phase.OTHER, first, max(before, self._before[first + Phase.OTHER]))
            self._others = None

    def lose_since(self, then: int) -> None:
        """What went into the phase that it is in since ``then``, by ``perf_counter_ns``, comes to nothing."""
        self.enter(self._phase)
        spent, phase = self._spent, self._phase
        lost = min(self._since - then, spent[phase])
        spent[phase] -= lost
        spent[Phase.ROLLED_BACK] += lost

    def _lose(self, phase: int, first: int, before: int) -> None:
        spent, place = self._spent, first + phase
        spent[first + Phase.ROLLED_BACK] += spent[place] - before
        spent[place] = before

    def spent(self) -> Spent:
        """What was spent since it began; a list that nobody changes."""
        self.enter(self._phase)
        self._before = found = self._spent.copy()
        return found

    def end_step(self) -> list[tuple[Spent, Spent]]:
        """A step has ended; gives what was spent up to the beginning and to the end of each that is known now."""
        before = self._before
        return [(before, self.spent())]

    def finish(self) -> None:
        """Have all that was spent be known."""


# --- spans of time, and what of some lies outside of others ----------------------------------------------------------

Span = tuple[int, int]
"""From, and up to."""


def united(spans: Iterable[Span]) -> list[Span]:
    """The same moments, each in one span, in order."""
    found: list[Span] = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def length(spans: Iterable[Span]) -> int:
    """How long they are together, each moment counted once."""
    return sum(end - begin for begin, end in united(spans))


def outside(spans: Iterable[Span], others: Iterable[Span]) -> int:
    """How long ``spans`` are where none of ``others`` is."""
    spans, others = list(spans), list(others)
    return length([*spans, *others]) - length(others)


# --- what a loader offers to whoever times it: where it marks what it does, and which of its settings change ---------


@runtime_checkable
class TimedSource(Protocol):
    """A loader that says when the loop waits for it."""

    timeline: Timeline | None
    """Where it says so."""


@runtime_checkable
class ChangingSource(Protocol):
    """A loader whose workers and their like follow the config while a loop is over it."""

    @property
    def fixed_settings(self) -> Mapping[str, str]:
        """The keys of the section ``dataloader`` that cannot change in that loop, each with the reason."""

    @property
    def least_workers(self) -> int:
        """The fewest that it can have."""
