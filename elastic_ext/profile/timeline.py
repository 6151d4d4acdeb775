"""Timeline: in which phase the training thread is, and how long it has been in each.

The thread says when a phase begins; the one before ends there. So nothing is counted twice, and nothing is left out.
"""

from __future__ import annotations

from time import perf_counter_ns, thread_time_ns

from .phases import Phase

__all__ = ["LOST", "NUM_PHASES", "Spent", "Timeline"]

NUM_PHASES = len(Phase)
LOST = frozenset((Phase.DATA, Phase.TRANSFER, Phase.FORWARD, Phase.BACKWARD, Phase.COMMUNICATION, Phase.STEP))

Spent = list[int]
"""Nanoseconds by phase: of the clock, and then, as many again, of this thread's processor time."""


class Timeline:
    """One thread's; called from nowhere else."""

    __slots__ = ("_before", "_cpu", "_phase", "_since", "_spent")

    def __init__(self, phase: Phase) -> None:
        self._phase = int(phase)
        self._spent = [0] * (2 * NUM_PHASES)  # since it began
        self._before = self._spent.copy()  # when it was last asked
        self._since, self._cpu = perf_counter_ns(), thread_time_ns()

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

    def add_past(self, phase: int, nanoseconds: int) -> None:
        """Count what went before it began."""
        self._spent[phase] += nanoseconds

    def lose(self) -> None:
        """What was spent since it was last asked comes to nothing: the step under way is taken back."""
        self.enter(self._phase)
        spent = self._spent
        for first in (0, NUM_PHASES):
            for phase in LOST:
                place = first + phase
                spent[first + Phase.ROLLED_BACK] += spent[place] - self._before[place]
                spent[place] = self._before[place]

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
