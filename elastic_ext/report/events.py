"""What happened in a training and what config changes did to its speed. Pure."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from elastic_ext.profile.ledger import Slice, TrainingHistory
from elastic_ext.profile.phases import IN_STEPS, LEAST_SECONDS
from elastic_ext.profile.summary import flops_share, num_tokens, training_seconds
from elastic_ext.records.metrics import JobEvent, NodeCalibration, StepCensus, StepWindow

__all__ = [
    "GROUPS",
    "Group",
    "Happening",
    "Period",
    "Quartiles",
    "Speeds",
    "WorldSpan",
    "happenings_of",
    "history_of",
    "in_step_seconds",
    "last_word",
    "launches_of",
    "num_failures_of",
    "periods_of",
    "spread_of",
    "within",
    "worlds_of",
]


# --- the events of ranks and agents as happenings of a training ------------------------------------------------------
# What many ranks tell alike counts as one. A *launcher* is an agent of this library's; where none was, nobody tells of
# failures.

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
    "resumed": "restart",
    "workers-started": "restart",
    "started": "restart",
    "training-began": "restart",
    "succeeded": "restart",
    "ended": "restart",
    "membership": "membership",
    "membership-changing": "membership",
    "membership-in-force": "membership",
    "members-changed": "membership",
    "worker-lost": "failure",
    "rendezvous": "membership",
    "members": "membership",
    "members-planned": "membership",
    "members-refused": "membership",
    "members-waiting": "membership",
    "not-taken": "membership",
    "left": "membership",
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
    "went-back": "checkpoint",
    "told-to-end": "failure",
    "nothing-left": "restart",
}
_FAILURES = frozenset(("worker-failed", "worker-lost", "failed", "over", "hang"))
_LAST_WORDS = frozenset(("succeeded", "failed", "ended", "left-out", "refused", "rendezvous-failed"))
_OF_AGENT = -1
_TOGETHER_SECONDS = 60.0
"""Seconds within which equal events of several ranks count as one happening."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Happening:
    """One thing that happened, however many ranks have told of it."""

    time: float
    kind: str
    group: Group
    text: str
    step: int | None
    ranks: tuple[int, ...]
    """The ranks that told of it; empty where an agent did."""

    def to_dict(self) -> dict[str, object]:
        """The happening as it is in the JSON of a report."""
        return {
            "time": self.time,
            "kind": self.kind,
            "group": self.group,
            "text": self.text,
            "step": self.step,
            "ranks": list(self.ranks),
        }


def happenings_of(events: Iterable[JobEvent]) -> list[Happening]:
    """The happenings that events tell of, oldest first: equal events of several ranks are one happening."""
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
    """The events from ``begin`` up to ``end``."""
    return [each for each in events if begin <= each.time < end]


def launches_of(journal: Iterable[JobEvent]) -> list[float]:
    """The times at which launchers were started, by the journal of their node."""
    return [each.time for each in journal if each.kind == "started"]


def history_of(
    of_ranks: Iterable[JobEvent], journals: Sequence[Sequence[JobEvent]], begin: float, end: float
) -> TrainingHistory:
    """The moments that a ledger needs, of a training from ``begin`` to ``end``: begins, failures, and stops."""
    begun = [
        (each.time, each.step)
        for each in of_ranks
        if each.kind == "training-began" and each.step >= 0 and begin <= each.time < end
    ]
    told = [each for journal in journals for each in journal]
    return TrainingHistory(
        begun=tuple(sorted(set(begun))),
        failures=tuple(sorted(each.time for each in told if each.kind in _FAILURES and begin <= each.time < end)),
        stopped=tuple(_stopped(journals)),
        has_launcher=any(launches_of(journal) for journal in journals),
    )


def num_failures_of(journals: Sequence[Sequence[JobEvent]], begin: float, end: float) -> int:
    """The number of failures from ``begin`` to ``end``: one for each time the workers ran, however many of them failed.

    Agents write each event with the number of failures before it, alike on all nodes: it tells the rounds apart.
    """
    launches = [until for _, until in _stopped(journals)]
    told = (each for journal in journals for each in journal if each.kind in _FAILURES and begin <= each.time < end)
    return len({(bisect(launches, each.time), each.generation) for each in told})


def last_word(journals: Sequence[Sequence[JobEvent]], begin: float, end: float) -> float:
    """The time at which a launcher last told of a failure or of its end; 0 where none did."""
    told = (each for journal in journals for each in journal if each.kind in _LAST_WORDS | _FAILURES)
    return max((each.time for each in told if begin <= each.time < end), default=0.0)


def _stopped(journals: Sequence[Sequence[JobEvent]]) -> list[tuple[float, float]]:
    """The spans of time in which no launcher ran, between the first start of one and the last."""
    running = sorted(span for journal in journals for span in _running(journal))
    stopped: list[tuple[float, float]] = []
    until: float | None = None
    for begin, end in running:
        if until is not None and begin > until:
            stopped.append((until, begin))
        until = end if until is None else max(until, end)
    return stopped


def _running(journal: Sequence[JobEvent]) -> list[tuple[float, float]]:
    """The spans of time in which a node's launchers ran; one that told of no end ran until the next one started."""
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


# --- how many ranks there were, and why others came or left -----------------------------------------------------------

_OF_WORLDS = frozenset(("members-changed", "membership"))


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldSpan:
    """A span of time in which a training had one number of ranks."""

    begin: float
    end: float
    num_ranks: int
    text: str
    """Why the number of ranks became that, as the event of it says; empty where there is none."""

    def to_dict(self) -> dict[str, object]:
        """The span as it is in the JSON of a report."""
        return {"begin": self.begin, "end": self.end, "ranks": self.num_ranks, "text": self.text}


def worlds_of(slices: Iterable[Slice], events: Iterable[JobEvent]) -> list[WorldSpan]:
    """How many ranks there were when, by the slices of one rank, and why, by the events of ranks and agents."""
    told = sorted((each for each in events if each.kind in _OF_WORLDS), key=lambda each: each.time)
    found: list[WorldSpan] = []
    for each in slices:
        if each.piece is None or each.piece.window.num_steps == 0:
            continue
        size = each.piece.window.world_size
        if found and found[-1].num_ranks == size:
            found[-1] = replace(found[-1], end=each.end)
            continue
        text = next((event.text for event in reversed(told) if event.time <= each.end), "")
        found.append(WorldSpan(begin=each.begin, end=each.end, num_ranks=size, text=text))
    return found


# --- tokens per second and MFU of a rank's windows, by what lies beside them in the run directory --------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """Computes tokens per second and MFU of a rank's windows; each field is None where nobody has written it."""

    num_replicas: int | None = None
    census: StepCensus | None = None
    best: NodeCalibration | None = None
    """What the devices of the rank's node can do at best."""

    def num_tokens(self, window: StepWindow) -> float:
        """Tokens of all ranks together in a window; 0 where they are not known."""
        return num_tokens(window, num_replicas=self.num_replicas)

    def tokens_per_second(self, window: StepWindow) -> float | None:
        """Tokens per second of all ranks together, over the time of training in a window; None where not known."""
        tokens, seconds = self.num_tokens(window), training_seconds(window)
        return tokens / seconds if tokens > 0 and seconds > 0 else None

    def mfu(self, window: StepWindow) -> float | None:
        """The model FLOPs utilisation in a window, over the time of training; None where it is not known."""
        return flops_share(window, self.census, self.best, num_replicas=self.num_replicas)

    def ideal_seconds(self, window: StepWindow) -> float:
        """Seconds in which the device, at its best, would have done the model's arithmetic; 0 where not known."""
        return (self.mfu(window) or 0.0) * training_seconds(window)


# --- what config versions have done to speed: the windows under each, compared with those under the one before -------

_LABELS = frozenset(phase.label for phase in IN_STEPS)
_LEAST_WINDOWS = 3
_MOST_WINDOWS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Quartiles:
    """The median and the quartiles of several numbers."""

    low: float
    middle: float
    high: float
    count: int

    def is_apart(self, other: Quartiles) -> bool:
        """Whether the interquartile ranges of both do not overlap."""
        return self.low > other.high or self.high < other.low

    def to_dict(self) -> dict[str, object]:
        """The quartiles as they are in the JSON of a report."""
        return {"low": self.low, "median": self.middle, "high": self.high, "windows": self.count}


@dataclass(frozen=True, kw_only=True, slots=True)
class Period:
    """A span of time for which one config was in force, and how fast training was in it."""

    version: int
    revision: int
    begin: float
    end: float
    num_steps: int
    text: str
    """What the config changed, as the event of its coming into force says; empty where there is none."""
    samples_per_second: Quartiles | None
    """Samples per second of all ranks together, in steps."""
    step_seconds: Quartiles | None
    tokens_per_second: Quartiles | None = None
    """Tokens per second of all ranks together, over the time of training."""
    mfu: Quartiles | None = None
    """The model FLOPs utilisation, over the time of training."""

    @property
    def name(self) -> str:
        """The version of the config, with its revision if it has one, such as ``3.1``."""
        return f"{self.version}.{self.revision}" if self.revision else str(self.version)

    def compared_with(self, before: Period | None) -> str:
        """The effect of the config on speed, against the period before, in words."""
        if before is None:
            return "the first"
        is_by_samples = self.samples_per_second is not None and before.samples_per_second is not None
        mine = self.samples_per_second if is_by_samples else self.step_seconds
        its = before.samples_per_second if is_by_samples else before.step_seconds
        if mine is None or its is None or min(mine.count, its.count) < _LEAST_WINDOWS or its.middle <= 0:
            return "too short to tell"
        ratio = mine.middle / its.middle if is_by_samples else its.middle / max(mine.middle, 1e-12)
        words = f"{abs(ratio - 1):.1%} {'faster' if ratio >= 1 else 'slower'}"
        return words if mine.is_apart(its) else f"no clear change ({words}, within the spread)"

    def to_dict(self) -> dict[str, object]:
        """The period as it is in the JSON of a report."""
        return {
            "version": self.version,
            "revision": self.revision,
            "begin": self.begin,
            "end": self.end,
            "steps": self.num_steps,
            "text": self.text,
            "samples_per_second": self.samples_per_second and self.samples_per_second.to_dict(),
            "step_seconds": self.step_seconds and self.step_seconds.to_dict(),
            "tokens_per_second": self.tokens_per_second and self.tokens_per_second.to_dict(),
            "mfu": self.mfu and self.mfu.to_dict(),
        }


def periods_of(slices: Iterable[Slice], events: Sequence[JobEvent], speeds: Speeds) -> list[Period]:
    """The spans of time in which each config was in force, by the slices of one rank and the events of all ranks."""
    groups: list[list[Slice]] = []
    for each in slices:
        if each.piece is None or each.piece.window.num_steps == 0:
            continue
        if not groups or _config_of(groups[-1][-1]) != _config_of(each):
            groups.append([])
        groups[-1].append(each)
    applied = [each for each in events if each.kind == "config-applied"]
    return [_period(group, applied, speeds) for group in groups]


def in_step_seconds(window: StepWindow) -> float:
    """Seconds that the steps of a window took, without what comes between them."""
    found = sum(spent for label, spent in window.seconds.items() if label in _LABELS)
    return found if found >= LEAST_SECONDS else 0.0


def spread_of(values: Iterable[float | None]) -> Quartiles | None:
    """The quartiles of the values that are known; None where none are."""
    ordered = sorted(each for each in values if each is not None)
    if not ordered:
        return None
    low, middle, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.25, 0.5, 0.75))
    return Quartiles(low=low, middle=middle, high=high, count=len(ordered))


def _config_of(each: Slice) -> tuple[int, int]:
    assert each.piece is not None
    return each.piece.window.config_version, each.piece.window.config_revision


def _period(group: Sequence[Slice], applied: Sequence[JobEvent], speeds: Speeds) -> Period:
    version, revision = _config_of(group[0])
    begin, end = group[0].begin, group[-1].end
    windows = [each.piece.window for each in group[-_MOST_WINDOWS:] if each.piece is not None]
    steady = [each for each in windows if in_step_seconds(each) > 0]
    told = [each for each in applied if _is_of(each.details, version, revision) and each.time <= end]
    return Period(
        version=version,
        revision=revision,
        begin=begin,
        end=end,
        num_steps=sum(each.piece.window.num_steps for each in group if each.piece is not None),
        text=max(told, key=lambda each: each.time).text if told else "",
        samples_per_second=spread_of([each.num_samples / in_step_seconds(each) for each in steady if each.num_samples]),
        step_seconds=spread_of([in_step_seconds(each) / each.num_steps for each in steady]),
        tokens_per_second=spread_of(map(speeds.tokens_per_second, steady)),
        mfu=spread_of(map(speeds.mfu, steady)),
    )


def _is_of(details: Mapping[str, object], version: int, revision: int) -> bool:
    return details.get("version") == version and details.get("revision", 0) == revision
