"""The goodput ledger: what all the time of a training went into; its entries add up to the wall time: pure.

The wall time of a rank is from the start of its first process to the last moment that is known of it; that of the job
from the first start on any rank to the last moment on any. *Goodput* is the share of useful entries in it.

Exposed communication is useful here: steps of several ranks cannot be without it. It is an entry of its own, so that
whoever thinks otherwise can take it off. Steps that were not looked at closely are divided as those before them were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from elastic_ext.records.metrics import StepWindow

from .history_of_run import Life, Piece, pieces_of
from .phases import IN_STEPS, LEAST_SECONDS, Phase

__all__ = [
    "ENTRIES",
    "USEFUL",
    "Entry",
    "Happened",
    "Ledger",
    "Slice",
    "ledger_of_job",
    "ledger_of_slices",
    "slices_of",
]


class Entry(Enum):
    """What time went into; the names stand in JSON."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    TRANSFER = "transfer"
    STEP = "step"
    """Steps of a process of which none was looked at closely."""
    COMMUNICATION = "communication"
    OTHER = "other"
    DATA = "data"
    AGREEMENT = "agreement"
    CHECKPOINT = "checkpoint"
    CHANGE = "change"
    ROLLED_BACK = "rolled-back"
    """Steps that were taken back by the process itself."""
    AGAIN = "again"
    """Steps that came to nothing, as training went on from a step before them."""
    STARTUP = "startup"
    """Of a rank's first process, and of one that begins after nothing was running."""
    RESTART = "restart"
    """From a failure, or another end of a process, to the first step of the one in its place."""
    UNSEEN = "unseen"
    """What a process did after its last window, which it had no time to write; up to its failure."""
    OUTSIDE = "outside"
    STOPPED = "stopped"
    """Nothing was running, and nobody was about to start it."""


ENTRIES = tuple(Entry)
USEFUL = frozenset(
    (
        Entry.FORWARD,
        Entry.BACKWARD,
        Entry.OPTIMIZER,
        Entry.TRANSFER,
        Entry.STEP,
        Entry.COMMUNICATION,
        Entry.OTHER,
    )
)
_OF_PHASE = {phase.label: Entry(phase.label) for phase in Phase}
_STEP = Phase.STEP.label
_REPEATED = frozenset(Entry(phase.label) for phase in IN_STEPS)
"""What of a step is lost with it."""
_LOOKED_AT = tuple(
    phase.label
    for phase in (Phase.TRANSFER, Phase.FORWARD, Phase.BACKWARD, Phase.COMMUNICATION, Phase.OPTIMIZER, Phase.OTHER)
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Happened:
    """What is known from others than the rank itself."""

    begun: tuple[tuple[float, int], ...] = ()
    """When training began on any rank, and the step that it went on from."""
    failures: tuple[float, ...] = ()
    """When processes were seen to have failed, or to hang."""
    stopped: tuple[tuple[float, float], ...] = ()
    """From when to when no launcher ran."""
    has_launcher: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A part of a rank's time, and what went into it; the parts follow one another without a gap."""

    begin: float
    end: float
    seconds: Mapping[Entry, float]
    """They add up to its length."""
    piece: Piece | None = None
    """What it is known from; None where nothing was written."""
    kept: float = 1.0
    """Which share of its steps did not come to nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """What went into a wall time; ``seconds`` has every entry."""

    wall_seconds: float
    seconds: Mapping[Entry, float]

    @property
    def useful_seconds(self) -> float:
        return sum(self.seconds[each] for each in USEFUL)

    @property
    def goodput(self) -> float:
        """The share of useful time; 0 where there was no time."""
        return self.useful_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0

    def to_dict(self) -> dict[str, object]:
        """As JSON has it."""
        return {
            "wall_seconds": self.wall_seconds,
            "goodput": self.goodput,
            "useful_seconds": self.useful_seconds,
            "seconds": {entry.value: self.seconds[entry] for entry in ENTRIES},
        }


def slices_of(lives: Sequence[Life], happened: Happened, *, until: float = 0.0) -> list[Slice]:
    """A rank's time from its first process on, without a gap; ``lives`` in order.

    It ends with the rank's last window, or at ``until`` if that is later: what lies between is time without a process.
    """
    pieces = pieces_of(lives)
    kept = _kept(pieces, happened)
    division: Mapping[str, float] = {}
    slices: list[Slice] = []
    previous: Piece | None = None
    is_again = False  # whether a process starts in another's place
    for piece, share in zip(pieces, kept, strict=True):
        if previous is not None and previous.life is not piece.life:
            gap = _gap(previous, piece, happened)
            slices += gap
            is_again = not gap or any(Entry.STOPPED not in each.seconds for each in gap)
            division = {}
        division = _division(piece.window) or division
        slices.append(_told(piece, share, division, is_again=is_again))
        previous = piece
    if previous is not None and until > previous.end:
        slices += _without(previous.end, until, happened, default=Entry.STOPPED)
    return slices


def ledger_of_slices(slices: Sequence[Slice]) -> Ledger:
    """One rank's."""
    seconds = dict.fromkeys(ENTRIES, 0.0)
    for each in slices:
        for entry, spent in each.seconds.items():
            seconds[entry] += spent
    wall = slices[-1].end - slices[0].begin if slices else 0.0
    return Ledger(wall_seconds=wall, seconds=seconds)


def ledger_of_job(ledgers: Iterable[Ledger], spans: Sequence[tuple[float, float]]) -> Ledger:
    """All ranks' together; ``spans`` is from when to when each rank was known.

    Each entry is a mean over the ranks that there were, so that it adds up to the job's wall time; a moment at which no
    rank was known is one at which nothing was running.
    """
    known = _union_seconds(spans)
    wall = max(end for _, end in spans) - min(begin for begin, _ in spans) if spans else 0.0
    seconds, total = dict.fromkeys(ENTRIES, 0.0), 0.0
    for ledger in ledgers:
        total += ledger.wall_seconds
        for entry, spent in ledger.seconds.items():
            seconds[entry] += spent
    scale = known / total if total > 0 else 0.0
    seconds = {entry: spent * scale for entry, spent in seconds.items()}
    seconds[Entry.STOPPED] += max(wall - known, 0.0)
    return Ledger(wall_seconds=wall, seconds=seconds)


def _kept(pieces: Sequence[Piece], happened: Happened) -> list[float]:
    """For each piece, which share of its steps was not taken again later."""
    kept = [1.0] * len(pieces)
    lowest = float("inf")  # the step that later ones went on from
    begun = sorted(happened.begun, reverse=True)
    number = 0
    for index in range(len(pieces) - 1, -1, -1):
        window, life, first = pieces[index].window, pieces[index].life, pieces[index].first_step
        while number < len(begun) and begun[number][0] > life.end:
            lowest = min(lowest, begun[number][1])
            number += 1
        if window.step > first:
            kept[index] = min(max((lowest - first) / (window.step - first), 0.0), 1.0)
        elif window.step == first and lowest < first:
            kept[index] = 0.0
        lowest = min(lowest, first, window.step)
    return kept


def _division(window: StepWindow) -> dict[str, float]:
    """How a step that was looked at closely is divided; empty where none was."""
    found = {label: window.typical.get(label, 0.0) for label in _LOOKED_AT}
    total = sum(found.values())
    return {label: part / total for label, part in found.items() if part > 0} if total > 0 else {}


def _told(piece: Piece, kept: float, division: Mapping[str, float], *, is_again: bool) -> Slice:
    """What a window says, brought to the length of the piece."""
    length = piece.end - piece.begin
    phases = {label: spent for label, spent in piece.window.seconds.items() if label in _OF_PHASE and spent > 0}
    total = sum(phases.values())
    if total < LEAST_SECONDS:
        return Slice(begin=piece.begin, end=piece.end, seconds={Entry.UNSEEN: length}, piece=piece, kept=kept)
    seconds: dict[Entry, float] = {}

    def add(entry: Entry, spent: float) -> None:
        seconds[entry] = seconds.get(entry, 0.0) + spent

    for label, spent in phases.items():
        spent = spent / total * length
        for part, share in division.items() if label == _STEP and division else ((label, 1.0),):
            entry = _OF_PHASE[part]
            if entry is Entry.STARTUP and is_again:
                entry = Entry.RESTART
            is_lost = entry in _REPEATED
            add(entry, spent * share * (kept if is_lost else 1.0))
            if is_lost and kept < 1:
                add(Entry.AGAIN, spent * share * (1 - kept))
    return Slice(begin=piece.begin, end=piece.end, seconds=seconds, piece=piece, kept=kept)


def _gap(before: Piece, after: Piece, happened: Happened) -> list[Slice]:
    """The time between two lives."""
    begin, end = before.end, after.begin
    if end <= begin:
        return []
    if not after.life.is_whole and after.life.restart == before.life.restart:
        return [Slice(begin=begin, end=end, seconds={Entry.UNSEEN: end - begin})]  # lines that could not be read
    is_restart = happened.has_launcher or after.life.restart > before.life.restart
    return _without(begin, end, happened, default=Entry.RESTART if is_restart else Entry.STOPPED)


def _without(begin: float, end: float, happened: Happened, *, default: Entry) -> list[Slice]:
    """Time without a process: up to a failure it is unseen, then the job restarts, unless no launcher runs."""
    marks = [(begin, default)]
    failed = [each for each in happened.failures if begin < each < end]
    if failed:
        marks = [(begin, Entry.UNSEEN), (min(failed), Entry.RESTART)]
    for first, last in happened.stopped:
        first, last = max(first, begin), min(last, end)
        if first < last:
            after = [entry for moment, entry in marks if moment <= last][-1]
            marks = [each for each in marks if not first <= each[0] <= last] + [(first, Entry.STOPPED), (last, after)]
            marks.sort(key=lambda each: each[0])
    ends = [moment for moment, _ in marks[1:]] + [end]
    return [
        Slice(begin=moment, end=until, seconds={entry: until - moment})
        for (moment, entry), until in zip(marks, ends, strict=True)
        if until > moment
    ]


def _union_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of them lasted."""
    total, told = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(end - max(begin, told), 0.0)
        told = max(told, end)
    return total
