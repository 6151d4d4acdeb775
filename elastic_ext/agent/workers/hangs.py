"""Hang detection: whether a node's workers make progress, and if not, whether that is a hang, and of which ranks; pure.

Time limits hold within steps, between two steps, at boundaries and in changes of config or members: a limit follows
from how long the same took before. Outside of steps (between epochs, in an evaluation that says so) a loop may take as
long as it likes, and others wait for it: that is reported, and is no hang.

Words: a worker's *place* is how many steps it has ended, how many micro-steps of the next one, whether it has begun a
save before that, and whether it has come to what ranks do together. A worker at another's place or behind it, that may
still come, is a reason for the other to wait: a *hang* is where a worker is over its limit and has no such reason.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from elastic_ext.ranks.heartbeat import Activity, HeartbeatReading
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
_WITH_LIMIT = frozenset({Activity.STEP, Activity.BOUNDARY, Activity.CHANGING, Activity.BETWEEN, Activity.MEMBERS})
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
    Activity.MEMBERS: "changing members",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HangLimits:
    """How long a worker may take for a step, and for what else it does, before that is a hang."""

    step_seconds: float | None = None
    """The limit for a step; None for ``factor`` times the slowest in a hundred steps, at least ``least_seconds``."""
    least_seconds: float = 30.0
    factor: float = 10.0
    first_seconds: float = 300.0
    """The limit for each of the first steps, which compile and choose kernels, and for a change; or the limit for other
    steps, if that is more."""
    between_seconds: float = 600.0
    """The limit between two steps, or ``factor`` times the longest time that the worker took there, if that is more."""
    long_seconds: float = 1800.0
    """The limit for starting, resuming, a checkpoint that training waits for, and between two of the first steps."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; allowed: a number > 0")

    @classmethod
    def of(cls, given: str) -> HangLimits | None:
        """The limits that ``auto``, ``off`` or a number of seconds asks for; None for off. ValueError otherwise."""
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
        """The limit for a step, where steps before it took ``durations`` (seconds)."""
        if self.step_seconds is not None:
            return self.step_seconds
        slowest = sorted(durations)[math.ceil(0.99 * len(durations)) - 1] if durations else 0.0
        return max(self.least_seconds, self.factor * slowest)

    def seconds_for(self, reading: HeartbeatReading, durations: Sequence[float], longest_between: float = 0.0) -> float:
        """The limit for what a worker does by its heartbeat; infinite outside of steps.

        ``longest_between`` is the longest time, in seconds, that it has been between two steps so far.
        """
        usual = self.usual_seconds(durations)
        if reading.activity in _LONG:
            return max(self.long_seconds, usual)
        if reading.activity not in _WITH_LIMIT:
            return math.inf
        if reading.activity is Activity.BETWEEN:
            least = self.long_seconds if reading.num_alike < _NUM_FIRST else self.between_seconds
            return max(least, usual, self.factor * longest_between)
        is_first = reading.num_alike < _NUM_FIRST or reading.activity in (Activity.CHANGING, Activity.MEMBERS)
        return max(self.first_seconds, usual) if is_first else usual


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLook:
    """What was observed of one worker at one moment: its heartbeat and the state of its process."""

    rank: int
    pid: int
    reading: HeartbeatReading | None
    """The worker's heartbeat; None where it writes none."""
    process_state: str
    """Linux' letter: R runs, S sleeps, D sleeps and cannot be woken, T is stopped; empty where that is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStanding:
    """Whether one worker makes progress, and why not."""

    rank: int
    progress: Progress = "getting on"
    reason: str = ""
    """Why the worker makes no progress, or little, in a sentence; empty where it makes progress."""
    activity: str | None = None
    """What the worker does, in a word or two; None where it writes no heartbeat."""
    seconds: float = 0.0
    """How long the worker has been seen to do that."""
    where: str = ""
    """What the worker does, with the step: ``in step 101``."""
    place: Place | None = None
    """How far the worker is: ended steps, micro-steps, whether a save has begun, whether it is in a joint operation.

    None where it writes no heartbeat.
    """
    limit_seconds: float | None = None
    """How long the worker may do that; None where there is no limit."""
    is_over: bool = False
    """Whether the worker has taken longer than its limit."""
    is_held: bool = False
    """Whether a signal or a debugger has stopped the worker's process."""

    @property
    def may_come(self) -> bool:
        """Whether other workers may still wait for this one: it is within its limit, not stopped, and has not ended."""
        return not (self.is_over or self.is_held or self.activity == _WORDS[Activity.ENDED])


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """A hang of training: the ranks that make no progress, and why."""

    ranks: tuple[int, ...]
    """The ranks that may be the cause; the others wait for them."""
    reason: str
    seconds: float
    """The longest time that one of the stuck workers has been where it is."""
    may_be_elsewhere: bool
    """Whether a rank that was not looked at, on another node, may be the cause as well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HangVerdict:
    """Which of the workers that train together hang, or which rank waits for which."""

    hang: Hang | None = None
    said: str = ""
    """Which rank waits for which, or is stopped, in words, where that is no hang."""


@dataclass(slots=True)
class _Worker:
    """What was observed of one worker so far."""

    key: object = None
    """What the worker does and since when; it differs whenever the worker has made progress."""
    activity: Activity | None = None
    seconds: float = 0.0
    num_asleep: int = 0
    """How many looks in a row found the process in state D, asleep where nothing can wake it."""
    num_boundaries: int = 0
    longest_between: float = 0.0
    """The longest time between two steps so far, in seconds."""
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_DURATIONS))


class Judge:
    """Judges whether a node's workers make progress, look by look, from their heartbeats and process states."""

    def __init__(self, limits: HangLimits | None) -> None:
        """Without ``limits`` no worker is stuck for taking long."""
        self._limits = limits
        self._workers: dict[int, _Worker] = {}  # by pid: a rank may become another process's
        self._looked_at: float | None = None

    def look(self, now: float, looks: Sequence[WorkerLook]) -> tuple[WorkerStanding, ...]:
        """The standing of each worker; ``now`` is in seconds of ``time.monotonic``.

        The time between two looks counts for a few seconds at most: the agent or the machine may have been stopped.
        """
        passed = 0.0 if self._looked_at is None else min(now - self._looked_at, _MOST_BETWEEN_LOOKS)
        self._looked_at = now
        return tuple(self._judge(now, passed, look) for look in looks)

    def forget(self) -> None:
        """Forget the workers of the round before, as others start."""
        self._workers.clear()

    def _judge(self, now: float, passed: float, look: WorkerLook) -> WorkerStanding:
        reading, is_held = look.reading, look.process_state in _HELD
        if reading is None:
            reason = _held_in_words(look.pid) if is_held else ""
            return WorkerStanding(
                rank=look.rank, is_held=is_held, progress="stuck" if is_held else "getting on", reason=reason
            )
        worker = self._workers.setdefault(look.pid, _Worker())
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
    """Whether workers that train together hang, and if not, which rank waits for which.

    ``standings`` are of some or all of ``world_size`` ranks, of one node or several: what looks like a hang on one node
    may be a wait for a rank of another that evaluates.
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
    """When to log which rank waits for which: as the wait begins, and each time that it has lasted twice as long."""

    def __init__(self) -> None:
        self._who = ""
        self._since = self._next = 0.0

    def is_due(self, said: str, now: float) -> bool:
        """Whether to log ``HangVerdict.said`` at ``now``, in seconds of a clock that only goes forward."""
        who = _SECONDS_IN_WORDS.sub("", said)
        if who != self._who:
            self._who, self._since, self._next = who, now, now
        if not said or now < self._next:
            return False
        self._next = now + max(now - self._since, _LEAST_UNTIL_TOLD_AGAIN)
        return True


def standings_to_json(standings: Sequence[WorkerStanding]) -> str:
    """The standings of workers as one line of JSON, for the agents of other nodes."""
    return json.dumps([asdict(each) for each in standings])


def standings_from_json(text: str) -> tuple[WorkerStanding, ...]:
    """The standings that ``standings_to_json`` wrote; ValueError for anything else."""
    try:
        return records_of(WorkerStanding, json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"no standings of workers: {error}") from None


def ranks_in_words(standings: Sequence[WorkerStanding]) -> str:
    """The ranks of these standings in words, such as ``rank 1`` or ``ranks 0, 2 and 3``."""
    numbers = [str(rank) for rank in sorted(each.rank for each in standings)]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def _note(worker: _Worker, look: WorkerLook, reading: HeartbeatReading, now: float, passed: float) -> None:
    """Note in ``worker`` what a look shows: its activity and for how long, and the durations of its steps."""
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


def _place(reading: HeartbeatReading) -> Place:
    is_together = reading.activity in _TOGETHER
    return reading.num_boundaries, reading.micro_step, int(reading.has_begun_save), int(is_together)


def _where(reading: HeartbeatReading) -> str:
    """What a worker does, in words."""
    if reading.activity is not Activity.STEP:
        return _WORDS[reading.activity]
    micro_step = f", micro-step {reading.micro_step + 1}" if reading.micro_step else ""
    return f"in step {reading.step + 1}{micro_step}"


def _doing(standing: WorkerStanding) -> str:
    if standing.activity is None:
        return f"rank {standing.rank} writes no heartbeat"
    return f"rank {standing.rank} has been {standing.where} for {_seconds(standing.seconds)}"


def _held_in_words(pid: int) -> str:
    return f"a signal or a debugger has stopped it (state T); `kill -CONT {pid}` lets it go on"


def _wait(standings: Sequence[WorkerStanding]) -> str:
    return "waits" if len(standings) == 1 else "wait"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s"
