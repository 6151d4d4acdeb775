"""Hanging: whether a node's workers get on, and if they do not, whether that is a hang, and whose; pure.

Time counts within steps, between two of them, at boundaries and in changes: how much is too much follows from what
such took before. Outside of steps (between epochs, in an evaluation that says so) a loop may do what it likes for as
long as it likes, and others wait for it: that is said, and is no hang.

Words: a worker's *place* is how many steps it has ended, how many micro-steps of the next one, whether it has begun a
save before that, and whether it has come to what ranks do together. Who is at another's place or behind it, and may
still come, is a reason to wait: a *hang* is where somebody waits and nobody is one.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from elastic_ext.ranks.heartbeat import Activity, PulseReading
from elastic_ext.records.json import records_of

__all__ = [
    "Hang",
    "HangLimits",
    "HangVerdict",
    "Judge",
    "WaitingNews",
    "WorkerLook",
    "WorkerStanding",
    "find_hang",
    "ranks_in_words",
    "standings_from_json",
    "standings_to_json",
]

Progress = Literal["getting on", "slow", "stuck"]
Place = tuple[int, ...]

_NUM_DURATIONS = 200  # of the last steps, whose slowest in a hundred the limit follows
_NUM_FIRST = 3  # steps that may compile, or look for the fastest way
_LEAST_UNTIL_TOLD_AGAIN = 10.0  # seconds
_SECONDS_IN_WORDS = re.compile(r"\b\d+ s\b")
_MOST_BETWEEN_LOOKS = 5.0  # seconds; whoever did not look for longer, stopped or asleep, knows of no more
_SLOW = 0.5  # of the limit
_WITH_LIMIT = frozenset({Activity.STEP, Activity.BOUNDARY, Activity.CHANGING, Activity.BETWEEN})
_TOGETHER = frozenset({Activity.STEP, Activity.BOUNDARY})
_LONG = frozenset({Activity.STARTING, Activity.RESUMING, Activity.SAVING})
_SAY_SO = "; what may take longer, such as an evaluation, goes into `with trainer.evaluation():`"
_HELD = ("T", "t")
_ASLEEP = 3  # looks: a moment of it is what every read of a disk takes
_WORDS = {
    Activity.STARTING: "starting",
    Activity.RESUMING: "resuming",
    Activity.OUTSIDE: "outside of steps",
    Activity.STEP: "in a step",
    Activity.BOUNDARY: "at a boundary",
    Activity.SAVING: "saving",
    Activity.CHANGING: "changing",
    Activity.ENDED: "ended",
    Activity.BETWEEN: "between two steps",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HangLimits:
    """How long a worker may take."""

    step_seconds: float | None = None
    """In a step; None for ten times what the slowest of a hundred steps took, and no less than ``least_seconds``."""
    least_seconds: float = 30.0
    factor: float = 10.0
    first_seconds: float = 300.0
    """In each of the first steps, which compile and choose, and in a change; also where ``step_seconds`` is less."""
    between_seconds: float = 600.0
    """Between two steps, or ``factor`` times the longest time that it has taken there, if that is more."""
    long_seconds: float = 1800.0
    """For starting, resuming, a checkpoint that training waits for, and between two of the first steps."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; allowed: a number > 0")

    @classmethod
    def of(cls, given: str) -> HangLimits | None:
        """What ``auto``, ``off`` or a number of seconds asks for; None for off. ValueError for anything else."""
        word = given.strip().lower()
        if word in ("", "auto"):
            return cls()
        if word == "off":
            return None
        try:
            return cls(step_seconds=float(word))
        except ValueError:
            raise ValueError(f"the hang limit is {given!r}; allowed: auto, off, or seconds > 0") from None

    def usual_seconds(self, durations: Sequence[float]) -> float:
        """For a step after such ones."""
        if self.step_seconds is not None:
            return self.step_seconds
        slowest = sorted(durations)[math.ceil(0.99 * len(durations)) - 1] if durations else 0.0
        return max(self.least_seconds, self.factor * slowest)

    def seconds_for(self, reading: PulseReading, durations: Sequence[float], longest_between: float = 0.0) -> float:
        """For what a worker does; without end outside of steps. So long it has been between two at most."""
        usual = self.usual_seconds(durations)
        if reading.activity in _LONG:
            return max(self.long_seconds, usual)
        if reading.activity not in _WITH_LIMIT:
            return math.inf
        if reading.activity is Activity.BETWEEN:
            least = self.long_seconds if reading.num_alike < _NUM_FIRST else self.between_seconds
            return max(least, usual, self.factor * longest_between)
        is_first = reading.num_alike < _NUM_FIRST or reading.activity is Activity.CHANGING
        return max(self.first_seconds, usual) if is_first else usual


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLook:
    """One worker at one moment."""

    rank: int
    pid: int
    reading: PulseReading | None
    """None where it tells nothing."""
    process_state: str
    """As Linux has it: R runs, S sleeps, D sleeps and cannot be woken, T is stopped; empty where that is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStanding:
    """Whether one worker makes progress, and why not."""

    rank: int
    progress: Progress = "getting on"
    reason: str = ""
    """Why it does not get on, in a sentence."""
    activity: str | None = None
    """In a word; None where it tells nothing."""
    seconds: float = 0.0
    """For how long it has been seen to do that."""
    where: str = ""
    """What it does, in words: ``in step 101``."""
    place: Place | None = None
    limit_seconds: float | None = None
    """None where it may take as long as it likes."""
    is_over: bool = False
    """It has taken longer than that."""
    is_held: bool = False
    """A signal or a debugger has stopped it."""

    @property
    def may_come(self) -> bool:
        """Whether others may still wait for it."""
        return not (self.is_over or self.is_held or self.activity == _WORDS[Activity.ENDED])


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """Workers that will not get on."""

    ranks: tuple[int, ...]
    """Those that it may be for; the others wait for them."""
    reason: str
    seconds: float
    """How long the first of them has been where it is."""
    may_be_elsewhere: bool
    """It may as well be for a rank that is not among those that were looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HangVerdict:
    """Which of the workers that train together hang, and who waits for whom."""

    hang: Hang | None = None
    said: str = ""
    """Who waits for whom, where that is no hang."""


@dataclass(slots=True)
class _Worker:
    """What was seen of one worker so far."""

    key: object = None
    """Another one whenever it has got on."""
    activity: Activity | None = None
    seconds: float = 0.0
    num_asleep: int = 0
    """Looks one after another that found it asleep where nothing can wake it."""
    num_boundaries: int = 0
    longest_between: float = 0.0
    """Two steps, in seconds."""
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_DURATIONS))


class Judge:
    """Judges a node's workers by what is seen of them, look by look."""

    def __init__(self, limits: HangLimits | None) -> None:
        """Without ``limits`` nobody is stuck for taking long."""
        self._limits = limits
        self._workers: dict[int, _Worker] = {}
        self._looked_at: float | None = None

    def look(self, now: float, looks: Sequence[WorkerLook]) -> tuple[WorkerStanding, ...]:
        """How each stands; ``now`` is on the clock of ``time.monotonic``.

        What lies between two looks counts for a few seconds at most: who looks may have been stopped, or the machine.
        """
        passed = 0.0 if self._looked_at is None else min(now - self._looked_at, _MOST_BETWEEN_LOOKS)
        self._looked_at = now
        return tuple(self._judge(now, passed, look) for look in looks)

    def forget(self) -> None:
        """Other workers come."""
        self._workers.clear()

    def _judge(self, now: float, passed: float, look: WorkerLook) -> WorkerStanding:
        reading, is_held = look.reading, look.process_state in _HELD
        if reading is None:
            reason = _held_in_words(look.pid) if is_held else ""
            return WorkerStanding(
                rank=look.rank, is_held=is_held, progress="stuck" if is_held else "getting on", reason=reason
            )
        worker = self._workers.setdefault(look.rank, _Worker())
        _note(worker, look, reading, now, passed)
        is_asleep = worker.num_asleep >= _ASLEEP
        limit = math.inf
        if self._limits is not None:
            limit = self._limits.seconds_for(reading, worker.durations, worker.longest_between)
        is_over = worker.seconds > limit
        where, reason = _where(reading), ""
        progress: Progress = "getting on"
        if is_over or is_held:
            progress = "stuck"
        elif worker.seconds > _SLOW * limit or is_asleep:
            progress = "slow"
        if progress != "getting on":
            reason = f"it has been {where} for {_seconds(worker.seconds)}"
            if is_over:
                advice = _SAY_SO if reading.activity is Activity.BETWEEN else ""
                reason += f" (limit {_seconds(limit)}{advice})"
            elif worker.seconds > _SLOW * limit:
                reason += f" (that is a hang after {_seconds(limit)})"
            if is_held:
                reason += f"; {_held_in_words(look.pid)}"
            elif is_asleep:
                reason += "; it waits for a device or a file system, where nothing can wake it (state D)"
        return WorkerStanding(
            rank=look.rank,
            progress=progress,
            reason=reason,
            activity=_WORDS[reading.activity],
            seconds=worker.seconds,
            where=where,
            place=_place(reading),
            limit_seconds=None if limit == math.inf else limit,
            is_over=is_over,
            is_held=is_held,
        )


def find_hang(standings: Sequence[WorkerStanding], *, world_size: int) -> HangVerdict:
    """Whether workers that train together hang, and if not, who waits for whom; some of ``world_size`` are looked at.

    They may be those of several nodes: then what looked like a hang on one may be a rank of another that evaluates.
    """
    over = [each for each in standings if each.is_over and each.place is not None]
    if not over:
        return HangVerdict(said="; ".join(f"rank {each.rank}: {each.reason}" for each in standings if each.is_held))
    ahead = max(each.place or () for each in over)
    behind = [each for each in standings if each.may_come and (each.place is None or each.place <= ahead)]
    stuck = [each for each in over if not any(_may_wait_for(each, other) for other in behind)]
    if not stuck:
        causes = "; ".join(_doing(each) for each in behind)
        whom = "it" if len(behind) == 1 else "them"
        return HangVerdict(said=f"{causes}; {ranks_in_words(over)} {_wait(over)} for {whom}")
    held = [each for each in standings if each.is_held and any(_may_wait_for(one, each) for one in stuck)]
    least = min(each.place or () for each in stuck)
    last = held or [each for each in stuck if each.place == least]
    others = [each for each in over if each not in last]
    is_sure = bool(held or others) or len(standings) >= world_size
    reason = "; ".join(f"rank {each.rank}: {each.reason}" for each in last)
    if others:
        reason += f"; {ranks_in_words(others)} {_wait(others)} for {'it' if len(last) == 1 else 'them'}"
    elif len(last) > 1 or not is_sure:
        reason += f"; {'one of them' if len(last) > 1 else 'it'} hangs"
        reason += "" if is_sure else ", or waits for a rank of another node that does"
    return HangVerdict(
        hang=Hang(
            ranks=tuple(sorted(each.rank for each in last)),
            reason=reason,
            seconds=max(each.seconds for each in stuck),
            may_be_elsewhere=not is_sure,
        )
    )


class WaitingNews:
    """When to tell who waits for whom: as it begins, and again each time that it has lasted twice as long."""

    def __init__(self) -> None:
        self._who = ""
        self._since = self._next = 0.0

    def is_due(self, said: str, now: float) -> bool:
        """Whether ``HangVerdict.said`` is to be told at this time, in seconds of a clock that only goes forward."""
        who = _SECONDS_IN_WORDS.sub("", said)
        if who != self._who:
            self._who, self._since, self._next = who, now, now
        if not said or now < self._next:
            return False
        self._next = now + max(now - self._since, _LEAST_UNTIL_TOLD_AGAIN)
        return True


def standings_to_json(standings: Sequence[WorkerStanding]) -> str:
    """As one line, for the agents of other nodes."""
    return json.dumps([asdict(each) for each in standings])


def standings_from_json(text: str) -> tuple[WorkerStanding, ...]:
    """What ``standings_to_json`` gave; ValueError for anything else."""
    try:
        return records_of(WorkerStanding, json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"no standings of workers: {error}") from None


def ranks_in_words(standings: Sequence[WorkerStanding]) -> str:
    """``rank 1``, ``ranks 0, 2 and 3``."""
    numbers = [str(rank) for rank in sorted(each.rank for each in standings)]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def _note(worker: _Worker, look: WorkerLook, reading: PulseReading, now: float, passed: float) -> None:
    """Note in ``worker`` what is new."""
    key = (reading.pid, reading.restart, reading.activity, reading.since_ns)
    if key != worker.key:
        if worker.activity is Activity.BETWEEN:
            worker.longest_between = max(worker.longest_between, worker.seconds)
        worker.key, worker.activity, worker.seconds, worker.num_asleep = key, reading.activity, 0.0, 0
    worker.num_asleep = worker.num_asleep + 1 if look.process_state == "D" else 0
    worker.seconds = max(min(worker.seconds + passed, (round(now * 1e9) - reading.since_ns) / 1e9), 0.0)
    if reading.num_alike < _NUM_FIRST:
        worker.durations.clear()
    elif reading.num_boundaries != worker.num_boundaries:
        worker.durations.append(reading.last_step_seconds)
    worker.num_boundaries = reading.num_boundaries


def _may_wait_for(waiting: WorkerStanding, other: WorkerStanding) -> bool:
    """Whether ``other``, which may still come, has not passed where ``waiting`` is."""
    return other.place is None or waiting.place is None or other.place <= waiting.place


def _place(reading: PulseReading) -> Place:
    is_together = reading.activity in _TOGETHER
    return reading.num_boundaries, reading.micro_step, int(reading.has_begun_save), int(is_together)


def _where(reading: PulseReading) -> str:
    """What a worker does, in words."""
    if reading.activity is not Activity.STEP:
        return _WORDS[reading.activity]
    micro_step = f", micro-step {reading.micro_step + 1}" if reading.micro_step else ""
    return f"in step {reading.step + 1}{micro_step}"


def _doing(standing: WorkerStanding) -> str:
    if standing.activity is None:
        return f"rank {standing.rank} tells nothing"
    return f"rank {standing.rank} has been {standing.where} for {_seconds(standing.seconds)}"


def _held_in_words(pid: int) -> str:
    return f"a signal or a debugger has stopped it (state T); `kill -CONT {pid}` lets it go on"


def _wait(standings: Sequence[WorkerStanding]) -> str:
    return "waits" if len(standings) == 1 else "wait"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s"
