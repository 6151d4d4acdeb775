"""The phases that a rank's time is divided into, and the timeline that measures them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from threading import get_ident
from time import perf_counter_ns, thread_time_ns
from typing import Protocol, runtime_checkable

__all__ = [
    "COMPUTING",
    "IN_STEPS",
    "LEAST_SECONDS",
    "NUM_PHASES",
    "ROLLED_BACK_WITH_STEP",
    "WAITING",
    "WITHIN_MICRO_STEPS",
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
#
# In a *measured* step hooks tell where each phase begins. Of others the trainer tells when it agrees, saves or changes
# a config or members; all else within their micro-steps is ``Phase.STEP``. How many steps are measured is decided in
# probe.py.

LEAST_SECONDS = 1e-9
"""The shortest time that counts as time; shorter ones are taken for nothing."""


class Phase(IntEnum):
    """A kind of thing that a rank spends time on; the names of phases stand in files."""

    DATA = 0
    """Waiting for a batch. Of a loader that is no ``TimedSource``, all time between two micro-steps counts, but for
    calls of the model in measured steps."""
    TRANSFER = 1
    """Copying a batch to the accelerator: there, all of a measured micro-step up to its first forward pass."""
    FORWARD = 2
    """The model's forward pass, and the loss."""
    BACKWARD = 3
    COMMUNICATION = 4
    """Waiting for gradients on their way between ranks, when nothing is left to compute meanwhile: what is exposed."""
    OPTIMIZER = 5
    STEP = 6
    """Within micro-steps that were not measured."""
    OTHER = 7
    """What the loop does beside passes and optimizers: logging, metrics, learning-rate schedules."""
    AGREEMENT = 8
    """Agreeing with the other ranks at step boundaries."""
    CHANGE = 9
    """Putting a config in force."""
    CHECKPOINT = 10
    """Waiting for a checkpoint that is saved or, once training has begun, loaded."""
    ROLLED_BACK = 11
    """Time of steps that were rolled back."""
    OUTSIDE = 12
    """Time outside of epochs: evaluation, for one."""
    STARTUP = 13
    """Time from the start of the process to its first step, as far as it is of no other phase."""
    MEMBERSHIP = 14
    """Ranks decide on other members, or go to their world."""

    @property
    def label(self) -> str:
        """The phase's name in files and texts."""
        return self.name.lower().replace("_", "-")


COMPUTING = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
WAITING = (Phase.COMMUNICATION, Phase.AGREEMENT)
"""The phases in which a rank waits for other ranks."""
IN_STEPS = (
    Phase.DATA,
    Phase.TRANSFER,
    *COMPUTING,
    Phase.COMMUNICATION,
    Phase.STEP,
    Phase.OTHER,
    Phase.AGREEMENT,
)
"""The phases of a usual step: nothing is rolled back, changed or saved."""
WITHIN_MICRO_STEPS = (Phase.TRANSFER, *COMPUTING, Phase.COMMUNICATION)
"""The phases that share ``Phase.STEP``, the time within unmeasured micro-steps, as they share it in measured ones.

``Phase.OTHER`` is within micro-steps too, and between them, where it is counted of unmeasured steps as well. It gets no
share here, lest a loop be blamed for what nobody has seen. In the ledger it gets one: there nobody is blamed, since all
of these phases count as useful time.
"""


# --- in which phase the training thread is, and how long it has been in each -----------------------------------------
# The thread says when a phase begins; the one before ends there. So nothing is counted twice, and nothing is left out.

NUM_PHASES = len(Phase)
_STEP = Phase.STEP.value
ROLLED_BACK_WITH_STEP = frozenset(
    (Phase.DATA, Phase.TRANSFER, Phase.FORWARD, Phase.BACKWARD, Phase.COMMUNICATION, Phase.STEP)
)
"""The phases whose time since the step before becomes ``Phase.ROLLED_BACK`` where a step is rolled back.

From ``begin_step`` on ``Phase.OTHER`` is one too. The optimizer is none: once it has stepped, no step is rolled back.
"""

Spent = list[int]
"""Nanoseconds by phase, twice: ``NUM_PHASES`` numbers of wall time, then as many of the training thread's CPU time."""


class Timeline:
    """The training thread's time by phase: ``enter`` begins a phase; from other threads, ``enter_elsewhere`` does."""

    __slots__ = ("_before", "_cpu", "_cpu_phase", "_others", "_phase", "_since", "_spent", "_thread")

    def __init__(self, phase: Phase) -> None:
        self._phase = self._cpu_phase = int(phase)  # the second is what CPU time counts for that is read next
        self._spent = [0] * (2 * NUM_PHASES)  # since it began
        self._before = self._spent.copy()  # as the last step ended, or as ``take_spent`` gave it since
        self._others: tuple[int, int] | None = None  # what went into Phase.OTHER before the measured step under way
        self._since = perf_counter_ns()
        self.take_thread()

    def take_thread(self) -> None:
        """Measure the calling thread from now on, as the training thread."""
        self._thread, self._cpu = get_ident(), thread_time_ns()

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the one that this timeline measures."""
        return get_ident() == self._thread

    @property
    def phase(self) -> int:
        """The phase that the training thread is in."""
        return self._phase

    # Training waits for this one: about half a microsecond.
    def enter(self, phase: int) -> int:
        """Begin ``phase``, on the training thread; gives the phase before."""
        now, cpu, before, spent = perf_counter_ns(), thread_time_ns(), self._phase, self._spent
        spent[before] += now - self._since
        spent[self._cpu_phase + NUM_PHASES] += cpu - self._cpu
        self._since = now
        self._cpu = cpu
        self._phase = self._cpu_phase = phase
        return before

    def enter_unmeasured(self, phase: int) -> None:
        """Begin ``phase``, as an unmeasured micro-step begins or ends, on the training thread.

        CPU time is read later, together for all since the last ``enter``, and counts for ``Phase.STEP``: to read it
        takes longer than all else here.
        """
        now = perf_counter_ns()
        self._spent[self._phase] += now - self._since
        self._since = now
        self._phase = phase
        self._cpu_phase = _STEP

    def enter_elsewhere(self, phase: int) -> int:
        """Begin ``phase`` from another thread, as one that runs backward passes on accelerators; gives the one before.

        What processor time the training thread has had since the last change of phase counts for ``phase``.
        """
        now, before = perf_counter_ns(), self._phase
        self._spent[before] += now - self._since
        self._since = now
        self._phase = self._cpu_phase = phase
        return before

    def add_past(self, phase: int, nanoseconds: int) -> None:
        """Count time that went by before this timeline began."""
        self._spent[phase] += nanoseconds

    def begin_step(self) -> None:
        """Note that a measured step begins: if it is rolled back, ``Phase.OTHER`` from now on is too.

        Called just after ``enter``.
        """
        self._others = self._spent[Phase.OTHER], self._spent[NUM_PHASES + Phase.OTHER]

    def end_unmeasured_step(self) -> None:
        """Note that a step has ended of which ``end_step`` is told later, together with others.

        Called just after ``enter``. Training waits for this one too: about a tenth of a microsecond.
        """
        self._before, self._others = self._spent.copy(), None

    def roll_back(self) -> None:
        """Count the step under way as rolled back, with the wait for its batch, as ``ROLLED_BACK_WITH_STEP`` says.

        What ``take_spent`` has given in between stays as it is.
        """
        self.enter(self._phase)
        for first in (0, NUM_PHASES):
            for phase in ROLLED_BACK_WITH_STEP:
                self._roll_back(phase, first, self._before[first + phase])
        if self._others is not None:
            for first, before in zip((0, NUM_PHASES), self._others, strict=True):
                self._roll_back(Phase.OTHER, first, max(before, self._before[first + Phase.OTHER]))
            self._others = None

    def _roll_back(self, phase: int, first: int, before: int) -> None:
        spent, place = self._spent, first + phase
        spent[first + Phase.ROLLED_BACK] += spent[place] - before
        spent[place] = before

    def take_spent(self) -> Spent:
        """The time spent by phase since this timeline began; from here on ``roll_back`` leaves it as it is.

        The list is never changed afterwards.
        """
        self.enter(self._phase)
        self._before = found = self._spent.copy()
        return found

    def end_step(self, *, is_measured: bool) -> list[tuple[Spent, Spent]]:
        """End a step; gives the time spent at the beginning and at the end of each measured step that is known now."""
        before, after = self._before, self.take_spent()
        self._others = None
        return [(before, after)] if is_measured else []

    def finish(self) -> None:
        """Wait until all time that was spent is known."""


# --- spans of time, and what of some lies outside of others ----------------------------------------------------------

Span = tuple[int, int]
"""A span of time: its begin and its end."""


def united(spans: Iterable[Span]) -> list[Span]:
    """The moments that any of these spans covers, as spans that do not overlap, in order."""
    found: list[Span] = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def length(spans: Iterable[Span]) -> int:
    """How long these spans are together, each moment counted once."""
    return sum(end - begin for begin, end in united(spans))


def outside(spans: Iterable[Span], others: Iterable[Span]) -> int:
    """How long the moments are, together, that ``spans`` cover and none of ``others`` does."""
    spans, others = list(spans), list(others)
    return length([*spans, *others]) - length(others)


# --- a loader that says when it is waited for ------------------------------------------------------------------------


@runtime_checkable
class TimedSource(Protocol):
    """A loader that notes in a timeline when the loop waits for a batch."""

    timeline: Timeline | None
    """The timeline in which the loader notes that the loop waits for it."""
