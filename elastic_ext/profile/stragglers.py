"""Which ranks keep the others waiting, and whether steps take longer than they did. Pure."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elastic_ext.records.text import on_one_line

from .breakdown import RankView, breakdown_of, why_no_verdict

__all__ = [
    "ChangeDetector",
    "PaceChange",
    "RankBusyTime",
    "Straggler",
    "Stragglers",
    "is_far",
    "rank_busy_times",
    "usual",
]


# --- who keeps the others waiting ------------------------------------------------------------------------------------
# All ranks end a step together, so that its length tells of nobody. What a rank is busy with by itself, *local*, does.
# A *score* is what is usual among ranks over what a rank takes: 1 is as usual, 0.5 twice as slow. *Usual* is the lower
# median: of two ranks the faster one, and where every second rank is slow those that are not.
#
# Nobody is named before it has been slow three rounds in a row: a round is one window of each rank.

_SLOW = 1.2
"""How many times as long as usual a slow rank takes."""
_ROUNDS_IN_A_ROW = 3
_NUM_KEPT = 32  # rounds of a rank's own past
_LEAST_KEPT = 3  # rounds of its own past, from which on a rank is compared with them
_OF_A_NORMAL_DISTRIBUTION = 1.4826  # the standard deviation, over the median distance from the median
_FAR = 3.0  # standard deviations above the median
_LEAST, _MOST = 1e-12, 1e12  # seconds; beyond them numbers are taken for broken


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBusyTime:
    """Seconds of a step that one rank was busy with by itself, measured over one window."""

    rank: int
    host: str
    seconds: float
    """Seconds of a step that the rank was busy with by itself."""
    step_seconds: float
    """Seconds that a step took in all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A rank that has kept the others waiting for several rounds."""

    rank: int
    host: str
    score: float
    """The usual time among ranks over this rank's: 0.5 is twice as slow as usual."""
    own_score: float | None
    """The score against the rank's own past; None where it has none yet."""
    slowed: float
    """The share of a step's time that the other ranks wait for this rank."""
    num_rounds: int
    """How many rounds in a row the rank has been slow."""

    @property
    def text(self) -> str:
        """A sentence for people: the rank, how slow it is, and what that costs."""
        past = ""
        if self.own_score is not None:
            past = (
                f"; {1 / self.own_score:.2f} times as long as it took before"
                if self.own_score * _SLOW < 1
                else "; under this config it always took as long"
            )
        return on_one_line(
            f"rank {self.rank} on {self.host} takes {1 / self.score:.2f} times as long as is usual for its own part of "
            f"a step{past}; waiting for it takes {self.slowed:.0%} of every step"
        )


@dataclass(slots=True)
class _Past:
    """What one rank on one host took in the rounds before."""

    reference: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    """Seconds of the rounds in which the rank was not slow, and of its first rounds, slow or not."""
    num_slow: int = 0


class Stragglers:
    """Finds the ranks that keep the others waiting, round by round; it reads no clock and no files."""

    def __init__(self) -> None:
        self._pasts: dict[tuple[int, str], _Past] = {}
        self._config: object = None

    def see(self, times: Iterable[RankBusyTime], config: object = None) -> list[Straggler]:
        """Take in a round; gives the ranks that are slow by now, the slowest first.

        Rounds under an equal ``config`` are compared; under another one all ranks begin anew, as does a rank that is
        missing or on another host.
        """
        if config != self._config:
            self._config = config
            self._pasts = {}
        here = {(each.rank, each.host): each for each in times if _is_timed(each.seconds)}
        self._pasts = {key: self._pasts.get(key, _Past()) for key in here}
        if not here:
            return []
        middle = usual([each.seconds for each in here.values()])
        found = [self._judge(key, each, middle, here.values()) for key, each in sorted(here.items())]
        return sorted((each for each in found if each is not None), key=lambda each: (each.score, each.rank))

    def _judge(
        self, key: tuple[int, str], own: RankBusyTime, middle: float, all_times: Iterable[RankBusyTime]
    ) -> Straggler | None:
        past = self._pasts[key]
        is_slow = own.seconds > _SLOW * middle and is_far(own.seconds, [each.seconds for each in all_times])
        past.num_slow = past.num_slow + 1 if is_slow else 0
        before = statistics.median(past.reference) if len(past.reference) >= _LEAST_KEPT else None
        if not is_slow or before is None:
            past.reference.append(own.seconds)
        if past.num_slow < _ROUNDS_IN_A_ROW:
            return None
        return Straggler(
            rank=own.rank,
            host=own.host,
            score=middle / own.seconds,
            own_score=None if before is None else before / own.seconds,
            slowed=min((own.seconds - middle) / max(own.step_seconds, own.seconds), 1.0),
            num_rounds=past.num_slow,
        )


def rank_busy_times(views: Sequence[RankView]) -> list[RankBusyTime]:
    """The time that each rank was busy with by itself, of a step; without ranks whose phases are not known."""
    found = []
    for view in views:
        if why_no_verdict([view], is_partial=True) is None:
            seen = breakdown_of(view)
            if seen.is_known:
                found.append(
                    RankBusyTime(
                        rank=seen.rank, host=seen.host, seconds=seen.local_seconds, step_seconds=seen.step_seconds
                    )
                )
    return found


def usual(values: Sequence[float]) -> float:
    """The lower median: what is usual among ranks."""
    return statistics.median_low(values)


def is_far(value: float, values: Sequence[float]) -> bool:
    """Whether a value lies much further above the median than values usually lie from it."""
    middle = usual(values)
    spread = statistics.median_low([abs(each - middle) for each in values])
    return value - middle > _FAR * _OF_A_NORMAL_DISTRIBUTION * spread


def _is_timed(seconds: float) -> bool:
    return _LEAST <= seconds <= _MOST


# --- whether steps take longer or shorter than they did: pure, one step after another --------------------------------
# The median of the last steps is compared with that of the steps with which it all began, both of logarithms, so that
# twice as slow is as far away as twice as fast. Eight steps against 32 are enough where steps are alike. Where they
# differ, more of both are needed to see so small a change, and where even many are too few, it has to be a larger one.

_LEAST_RATIO = 1.07
_NUM_RECENT = 8
_TIMES_AS_MANY = 4  # steps in the reference for each of the last steps
_MOST_RECENT = 256  # of the last steps, where noise asks for more
_MOST_SHORT = 512  # of the last steps, where more are needed because steps are short
_LEAST_SECONDS = 0.5
_OF_A_MEDIAN = 1.25  # the standard error of a median, over that of a mean
_SURE = 4.0
"""From how many standard deviations on a difference is no chance, though it is looked for at every step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PaceChange:
    """A change in how long steps take."""

    step: int
    """The step at which the change was found."""
    since_step: int
    """The step from which on steps take longer or shorter, about."""
    before_seconds: float
    after_seconds: float

    @property
    def ratio(self) -> float:
        """The new length of a step over the old one: above 1 where steps take longer."""
        return self.after_seconds / self.before_seconds

    @property
    def text(self) -> str:
        """A sentence for people: how much longer steps take, and since when."""
        longer = f"{self.ratio:.2f} times as long as before"
        times = f"{1e3 * self.after_seconds:.4g} ms, before {1e3 * self.before_seconds:.4g} ms"
        return f"steps take {longer} since step {self.since_step}: {times}"


class ChangeDetector:
    """Finds changes in how long one rank's steps take.

    After a change has been told, and under another config, it begins anew with what steps take then.
    """

    def __init__(self, *, least_seconds: float = _LEAST_SECONDS) -> None:
        """Steps that are so short that eight take less than ``least_seconds`` are compared in larger numbers.

        On a machine that others use too, some steps in a row are slow for a moment, and that is no change.
        """
        self._least_seconds = least_seconds
        self._config: object = None
        self._begin()

    def see(self, step: int, seconds: float, config: object = None) -> PaceChange | None:
        """Take in a step's length; gives a change at the step that shows it. Another ``config`` begins anew."""
        if config != self._config:
            self._config = config
            self._begin()
        if not _LEAST <= seconds <= _MOST:
            return None
        length = math.log(seconds)
        if not self._is_ready:
            self._learn(length)
            return None
        self._add(step, length)
        if len(self._recent) < self._num_recent:
            return None
        distance = _middle(self._sorted) - self._usual
        if abs(distance) <= self._least:
            return None
        found = self._found(distance)
        self._begin()
        return found

    def _begin(self) -> None:
        self._reference: list[float] = []
        self._usual = self._least = 0.0
        self._num_recent = _NUM_RECENT
        self._is_ready = False
        self._recent: deque[tuple[int, float]] = deque()
        self._sorted: list[float] = []

    def _learn(self, length: float) -> None:
        """Add a step to the reference, and check whether it is long enough each time that it has its wanted length."""
        self._reference.append(length)
        if len(self._reference) < _TIMES_AS_MANY * self._num_recent:
            return
        self._usual = statistics.median(self._reference)
        distances = (abs(each - self._usual) for each in self._reference)
        spread = _OF_A_NORMAL_DISTRIBUTION * statistics.median(distances)
        wanted = _num_needed(spread, self._least_seconds / math.exp(self._usual))
        if wanted > self._num_recent:
            self._num_recent = wanted
            return
        self._least = max(math.log(_LEAST_RATIO), _by_chance(spread, self._num_recent))
        self._is_ready = True
        self._reference = []

    def _add(self, step: int, length: float) -> None:
        self._recent.append((step, length))
        insort(self._sorted, length)
        if len(self._recent) > self._num_recent:
            _, gone = self._recent.popleft()
            del self._sorted[bisect_left(self._sorted, gone)]

    def _found(self, distance: float) -> PaceChange:
        """The change that was found: steps further than half of ``distance`` from the old median came after it."""
        side = math.copysign(1.0, distance)
        beyond = [(step, length) for step, length in self._recent if side * (length - self._usual) > abs(distance) / 2]
        return PaceChange(
            step=self._recent[-1][0],
            since_step=beyond[0][0],
            before_seconds=math.exp(self._usual),
            after_seconds=math.exp(statistics.median(length for _, length in beyond)),
        )


def _num_needed(spread: float, least: float) -> int:
    """How many of the last steps are needed to show the smallest change that is told, at this spread.

    Twice as many, and again, until noise hides no such change; then until they are at least ``least``, each up to its
    own limit.
    """
    num = _NUM_RECENT
    while num < _MOST_RECENT and _by_chance(spread, num) > math.log(_LEAST_RATIO):
        num *= 2
    while num < min(least, _MOST_SHORT):
        num *= 2
    return num


def _by_chance(spread: float, num_recent: int) -> float:
    """How far the medians of the last steps and of the reference may lie apart by chance, where nothing has changed.

    It is ``_SURE`` standard errors of the difference of the two medians.
    """
    return _SURE * _OF_A_MEDIAN * spread * math.sqrt((1 + 1 / _TIMES_AS_MANY) / num_recent)


def _middle(ordered: list[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
