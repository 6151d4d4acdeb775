"""Decisions of an agreement, as pure functions: whose config comes next, and how often to ask.

Words: a *round* is the exchange that follows a control word which says that there is something to decide. A
*report* is what one rank brings to a round; a *choice* is what all ranks make of the reports.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .records.json import shown

__all__ = ["Choice", "Lag", "Pace", "Place", "Report", "choose", "start_differences"]

_FEWEST_STEPS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a rank is when it comes to a round; all must be at the same."""

    boundary: int
    step: int

    def __str__(self) -> str:
        return f"{self.step} steps, {self.boundary} boundaries"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What one rank brings to a round."""

    place: Place
    version: int | None = None
    """Of the config file it holds, where that is news."""
    digest: str = ""
    changes: Mapping[str, Any] | None = None
    """Of the revision it proposes, if it does."""
    reason: str = ""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Report:
        record = json.loads(data)
        return cls(**record | {"place": Place(**record["place"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What all ranks make of the reports."""

    kind: Literal["file", "revision", "nothing"]
    source: int = 0
    """The rank whose contents are taken."""
    conflict: str = ""
    """Why the files that the ranks hold cannot be taken, where they contradict each other."""


def choose(reports: Sequence[Report]) -> Choice:
    """A config that every rank holds a file for comes first, else the lowest rank's proposal.

    Where ranks hold different versions the lowest of them is next: the others pass through it. One version with
    different contents is a conflict, and no file is taken.
    """
    held = [report.version for report in reports if report.version is not None]
    conflict = ""
    if len(held) == len(reports):
        version = min(held)
        digests: dict[str, list[int]] = {}
        for rank, report in enumerate(reports):
            if report.version == version:
                digests.setdefault(report.digest, []).append(rank)
        if len(digests) == 1:
            return Choice(kind="file", source=held.index(version))
        groups = " unlike ".join("ranks " + ", ".join(map(str, ranks)) for ranks in digests.values())
        conflict = f"version {version} has different contents: {groups}; put one content under a higher version"
    for rank, report in enumerate(reports):
        if report.changes is not None:
            return Choice(kind="revision", source=rank, conflict=conflict)
    return Choice(kind="nothing", conflict=conflict)


def start_differences(answers: Sequence[Mapping[str, Any]]) -> str:
    """What the ranks start with that is not the same on all, and who has what; empty where there is nothing."""
    told = []
    for name in dict.fromkeys(name for answer in answers for name in answer):
        held: dict[str, list[str]] = {}
        for rank, answer in enumerate(answers):
            held.setdefault(shown(answer[name]) if name in answer else "nothing", []).append(str(rank))
        if len(held) > 1:
            values = ", ".join(f"{value} on rank {', '.join(ranks)}" for value, ranks in held.items())
            told.append(f"{name} is {values}")
    return "; ".join(told)


class Pace:
    """How many boundaries should lie between two agreements for their cost to stay below a share of the time.

    ``pulse_seconds`` is what a pulse takes in threads that this one does not see; what it takes of the training thread
    is noted while it runs.
    """

    def __init__(self, *, pulse_seconds: float, share: float = 0.005, longest: int = 10_000, window: int = 32) -> None:
        self._pulse_seconds = pulse_seconds
        self._share = share
        self._longest = longest
        self._step_seconds: deque[float] = deque(maxlen=window)
        self._agreement_seconds: deque[float] = deque(maxlen=window)
        self._idle_seconds: deque[float] = deque(maxlen=window)

    def note_step(self, seconds: float) -> None:
        """Take in how long one step lasted."""
        self._step_seconds.append(seconds)

    def note_agreement(self, seconds: float) -> None:
        """Take in how long one agreement kept the training thread."""
        self._agreement_seconds.append(seconds)

    def note_idle(self, seconds: float) -> None:
        """Take in how long a boundary without an agreement kept the training thread."""
        self._idle_seconds.append(seconds)

    def interval(self) -> int:
        """The smallest number of boundaries that keeps the share; 1 until enough steps were seen.

        What boundaries take without an agreement comes off the share, up to half of it: no thinning helps against it.
        """
        if len(self._step_seconds) < _FEWEST_STEPS:
            return 1
        cost = self._pulse_seconds + _lower_quartile(self._agreement_seconds)
        allowed = statistics.median(self._step_seconds) * self._share
        affordable = max(allowed - _lower_quartile(self._idle_seconds), allowed / 2)
        if affordable * self._longest <= cost:
            return self._longest
        return max(1, math.ceil(cost / affordable))


def _lower_quartile(seconds: Sequence[float]) -> float:
    """What something takes when it waits for nobody; 0 where it was not seen."""
    return sorted(seconds)[len(seconds) // 4] if seconds else 0.0


class Lag:
    """Since when some rank has been behind the others, and whether it is time to name it."""

    def __init__(self, *, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        self._lowest: int | None = None  # what the rank furthest behind holds; None while none is
        self._since = 0.0
        self._named = False

    def note(self, lowest_version: int, highest_version: int, now: float) -> None:
        """Take in which versions the ranks hold at ``now``. A rank that moves on gets its time anew."""
        lowest = lowest_version if highest_version > lowest_version else None
        if lowest != self._lowest:
            self._lowest, self._since, self._named = lowest, now, False

    def mark_named(self) -> None:
        """Whoever is behind now was named."""
        self._named = True

    def is_due(self, now: float) -> bool:
        """Whether some rank has been behind for too long, and was not named for it."""
        return self._lowest is not None and not self._named and now - self._since > self._patience_seconds
