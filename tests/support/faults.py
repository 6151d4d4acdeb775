"""Failures that a test scripts in advance: which rank, at which step, in which phase of it, and what goes wrong.

The code under test, or the function a test gives its ranks, calls `faults.at(...)` at the places where things may fail.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from typing import Literal

__all__ = ["Action", "Fault", "Faults", "PlantedFault"]

Action = Literal["raise", "kill", "hang", "stop", "skip"]


class PlantedFault(Exception):
    """The exception of a fault whose action is "raise"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One failure: `raise` PlantedFault, `kill` or `stop` the process by signal, `hang` for ever, or `skip` something.

    A phase of None means the first place of that step where the rank asks, whatever the phase is there.
    """

    rank: int
    step: int
    action: Action
    phase: str | None = None


class Faults:
    """The failures of one test, each to happen once in a process; pickled, those that have not happened go along."""

    def __init__(self, *faults: Fault) -> None:
        self._waiting: dict[tuple[int, int], list[Fault]] = {}
        for fault in faults:
            self._waiting.setdefault((fault.rank, fault.step), []).append(fault)

    def is_empty_for(self, rank: int) -> bool:
        """Whether nothing is to happen, or has happened, on that rank."""
        return all(of_rank != rank for of_rank, _ in self._waiting)

    def at(self, *, rank: int, step: int, phase: str | None = None) -> Literal["skip"] | None:
        """None where nothing is to happen, "skip" where the caller is to leave something out; the rest strike here."""
        for index, fault in enumerate(self._waiting.get((rank, step), ())):
            if fault.phase in (None, phase):
                del self._waiting[rank, step][index]
                return _strike(fault, f"rank {rank}, step {step}" + (f", phase {phase}" if phase else ""))
        return None


def _strike(fault: Fault, place: str) -> Literal["skip"] | None:
    """ "skip" for that action, None after a stopped process was continued; the other actions do not return."""
    if fault.action == "raise":
        raise PlantedFault(f"planted at {place}")
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault.action == "hang":
        threading.Event().wait()
    return "skip" if fault.action == "skip" else None
