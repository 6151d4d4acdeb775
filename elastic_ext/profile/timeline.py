"""Timeline: in which phase the training thread is, and how long it has been in each.

The thread says when a phase begins; the one before ends there. So nothing is counted twice, and nothing is left out.
"""

from __future__ import annotations

from time import perf_counter_ns, thread_time_ns

from .phases import Phase

__all__ = ["Spent", "Timeline"]

_NUM_PHASES = len(Phase)
_LOST = frozenset((Phase.DATA, Phase.TRANSFER, Phase.FORWARD, Phase.BACKWARD, Phase.COMMUNICATION, Phase.STEP))

Spent = tuple[list[int], list[int]]
"""Nanoseconds by phase: of the clock, and of this thread's processor time."""


class Timeline:
    """One thread's; called from nowhere else."""

    __slots__ = ("_cpu", "_phase", "_processor", "_since", "_wall")

    def __init__(self, phase: Phase) -> None:
        self._phase = int(phase)
        self._wall, self._processor = [0] * _NUM_PHASES, [0] * _NUM_PHASES
        self._since, self._cpu = perf_counter_ns(), thread_time_ns()

    @property
    def phase(self) -> int:
        """The one that it is in."""
        return self._phase

    # Training waits for this one: about half a microsecond.
    def enter(self, phase: int) -> int:
        """From here on it is in ``phase``; gives the one before."""
        now, cpu, before = perf_counter_ns(), thread_time_ns(), self._phase
        self._wall[before] += now - self._since
        self._processor[before] += cpu - self._cpu
        self._since, self._cpu, self._phase = now, cpu, phase
        return before

    def add_past(self, phase: int, nanoseconds: int) -> None:
        """Count what went before it began."""
        self._wall[phase] += nanoseconds

    def lose(self) -> None:
        """What was spent on the step under way comes to nothing: it is taken back."""
        self.enter(self._phase)
        for kind in (self._wall, self._processor):
            for phase in _LOST:
                kind[Phase.ROLLED_BACK] += kind[phase]
                kind[phase] = 0

    def take(self) -> Spent:
        """What was spent since the last call."""
        self.enter(self._phase)
        spent = self._wall, self._processor
        self._wall, self._processor = [0] * _NUM_PHASES, [0] * _NUM_PHASES
        return spent
