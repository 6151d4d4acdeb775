"""Happenings: what ranks and agents told of a training, sorted out: pure.

What many ranks tell alike counts as one. A *launcher* is an agent of this library's; where none was, nobody tells of
failures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from elastic_ext.profile.ledger import Happened
from elastic_ext.records.metrics import JobEvent

__all__ = ["GROUPS", "Group", "Happening", "happened_of", "happenings_of", "last_word", "launches_of", "within"]

Group = Literal["failure", "hang", "restart", "membership", "memory", "numbers", "config", "checkpoint", "other"]
GROUPS: tuple[Group, ...] = (
    "failure",
    "hang",
    "restart",
    "membership",
    "memory",
    "numbers",
    "config",
    "checkpoint",
    "other",
)
_GROUP_OF: dict[str, Group] = {
    "worker-failed": "failure",
    "failed": "failure",
    "over": "failure",
    "refused": "failure",
    "rendezvous-failed": "failure",
    "meeting-failed": "failure",
    "trouble": "failure",
    "hang": "hang",
    "stacks": "hang",
    "went-on": "restart",
    "workers-started": "restart",
    "started": "restart",
    "training-began": "restart",
    "succeeded": "restart",
    "ended": "restart",
    "membership": "membership",
    "membership-changing": "membership",
    "waiting": "membership",
    "left-out": "membership",
    "leaving": "membership",
    "out-of-memory": "memory",
    "not-finite": "numbers",
    "config-applied": "config",
    "config-refused": "config",
    "config-foreign": "config",
    "config-aside": "config",
    "resharded": "config",
    "checkpoints": "checkpoint",
    "staged": "checkpoint",
    "can-go-on": "checkpoint",
    "told-to-end": "failure",
    "nothing-left": "restart",
}
_FAILURES = frozenset(("worker-failed", "failed", "over", "hang"))
_LAST_WORDS = frozenset(("succeeded", "failed", "ended", "left-out", "refused", "rendezvous-failed"))
_OF_AGENT = -1
_TOGETHER_SECONDS = 60.0
"""What several ranks tell alike within so long is one happening."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Happening:
    """One thing that happened, however many ranks have told of it."""

    time: float
    kind: str
    group: Group
    text: str
    step: int | None
    ranks: tuple[int, ...]
    """Who told of it; none where that was an agent."""

    def to_dict(self) -> dict[str, object]:
        """As JSON has it."""
        return {
            "time": self.time,
            "kind": self.kind,
            "group": self.group,
            "text": self.text,
            "step": self.step,
            "ranks": list(self.ranks),
        }


def happenings_of(events: Iterable[JobEvent]) -> list[Happening]:
    """One for each that is not another rank's word of the same, oldest first."""
    found: list[Happening] = []
    latest: dict[tuple[str, int, str], int] = {}
    for event in sorted(events, key=lambda each: each.time):
        number = latest.get((event.kind, event.step, event.text))
        if number is not None and event.rank != _OF_AGENT:
            before = found[number]
            if event.time - before.time < _TOGETHER_SECONDS and event.rank not in before.ranks:
                found[number] = replace(before, ranks=(*before.ranks, event.rank))
                continue
        if event.rank != _OF_AGENT:
            latest[event.kind, event.step, event.text] = len(found)
        found.append(_happening(event))
    return found


def within(events: Iterable[JobEvent], begin: float, end: float) -> list[JobEvent]:
    """Those of that time."""
    return [each for each in events if begin <= each.time < end]


def launches_of(journal: Iterable[JobEvent]) -> list[float]:
    """When a launcher was started, by its journal."""
    return [each.time for each in journal if each.kind == "started"]


def happened_of(
    of_ranks: Iterable[JobEvent], journals: Sequence[Sequence[JobEvent]], begin: float, end: float
) -> Happened:
    """What a ledger has to know of these events, of a training from ``begin`` to ``end``."""
    begun = [
        (each.time, each.step)
        for each in of_ranks
        if each.kind == "training-began" and each.step >= 0 and begin <= each.time < end
    ]
    told = [each for journal in journals for each in journal]
    return Happened(
        begun=tuple(sorted(set(begun))),
        failures=tuple(sorted(each.time for each in told if each.kind in _FAILURES and begin <= each.time < end)),
        stopped=tuple(_stopped(journals)),
        has_launcher=any(launches_of(journal) for journal in journals),
    )


def last_word(journals: Sequence[Sequence[JobEvent]], begin: float, end: float) -> float:
    """When a launcher last told of a failure or of its end; 0 where it did not."""
    told = (each for journal in journals for each in journal if each.kind in _LAST_WORDS | _FAILURES)
    return max((each.time for each in told if begin <= each.time < end), default=0.0)


def _stopped(journals: Sequence[Sequence[JobEvent]]) -> list[tuple[float, float]]:
    """From when to when no launcher ran, between the first start of one and the last."""
    running = sorted(span for journal in journals for span in _running(journal))
    stopped: list[tuple[float, float]] = []
    until: float | None = None
    for begin, end in running:
        if until is not None and begin > until:
            stopped.append((until, begin))
        until = end if until is None else max(until, end)
    return stopped


def _running(journal: Sequence[JobEvent]) -> list[tuple[float, float]]:
    """From when to when a node's launchers ran; one that had no last word counts until there is another."""
    spans: list[tuple[float, float]] = []
    begin: float | None = None
    for event in sorted(journal, key=lambda each: each.time):
        if event.kind == "started":
            if begin is not None:
                spans.append((begin, event.time))
            begin = event.time
        elif event.kind in _LAST_WORDS and begin is not None:
            spans.append((begin, event.time))
            begin = None
    if begin is not None:
        spans.append((begin, float("inf")))
    return spans


def _happening(event: JobEvent) -> Happening:
    return Happening(
        time=event.time,
        kind=event.kind,
        group=_GROUP_OF.get(event.kind, "other"),
        text=event.text,
        step=event.step if event.step >= 0 else None,
        ranks=() if event.rank == _OF_AGENT else (event.rank,),
    )
