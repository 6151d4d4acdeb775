"""Timeline: in which phase the training thread is, and how long it has been in each.

The thread says when a phase begins; the one before ends there. So nothing is counted twice, and nothing is left out.
"""

from __future__ import annotations

from threading import get_ident
from time import perf_counter_ns, thread_time_ns

from .phases import Phase

__all__ = ["LOST", "NUM_PHASES", "Spent", "Timeline"]

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
