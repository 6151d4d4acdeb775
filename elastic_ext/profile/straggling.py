"""Who keeps the others waiting: pure.

All ranks end a step together, so that its length tells of nobody. What a rank is busy with by itself, *local*, does.
A *score* is what is usual among ranks over what a rank takes: 1 is as usual, 0.5 twice as slow. *Usual* is the lower
median: of two ranks the faster one, and where every second rank is slow those that are not.

Nobody is named before it has been slow three rounds in a row: a round is one window of each rank.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elastic_ext.records.text import on_one_line

from .weighed import RankView, weigh, why_not

__all__ = ["LocalTime", "Straggler", "Stragglers", "is_far", "local_times", "usual"]

_SLOW = 1.2
"""Times as long as is usual."""
_ROUNDS_IN_A_ROW = 3
_NUM_KEPT = 32  # rounds of a rank's own past
_LEAST_KEPT = 3
_OF_A_NORMAL_DISTRIBUTION = 1.4826  # the standard deviation, over the median distance from the median
_FAR = 3.0
_LEAST, _MOST = 1e-12, 1e12  # seconds; beyond them numbers are taken for broken


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalTime:
    """What one rank was busy with by itself in a round."""

    rank: int
    host: str
    seconds: float
    """Of a step,"""
    step_seconds: float
    """... and what the step took in all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """One who has kept the others waiting for several rounds."""

    rank: int
    host: str
    score: float
    own_score: float | None
    """The same against its own past; None where it has none yet."""
    slowed: float
    """Which part of the job's steps goes to waiting for it."""
    num_rounds: int
    """In a row."""

    @property
    def text(self) -> str:
        """What a person reads."""
        past = ""
        if self.own_score is not None:
            past = (
                f"; {1 / self.own_score:.2f} times as long as it took before"
                if self.own_score * _SLOW < 1
                else "; it always took as long"
            )
        return on_one_line(
            f"rank {self.rank} on {self.host} takes {1 / self.score:.2f} times as long as is usual for its own part of "
            f"a step{past}; waiting for it takes {self.slowed:.0%} of every step"
        )


@dataclass(slots=True)
class _Past:
    """Of one rank on one host."""

    calm: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    """What it took in rounds in which it was not slow, or in which it has been from the beginning."""
    num_slow: int = 0


class Stragglers:
    """Rounds of a job, one after another; it knows no clock, and no rank but by what it is told."""

    def __init__(self) -> None:
        self._pasts: dict[tuple[int, str], _Past] = {}
        self._config: object = None

    def see(self, times: Iterable[LocalTime], config: object = None) -> list[Straggler]:
        """A round is over, under a config that compares with others; gives who is slow by now, the slowest first.

        A rank that is missing, or is on another host, begins anew; so do all under another config.
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
        self, key: tuple[int, str], own: LocalTime, middle: float, all_times: Iterable[LocalTime]
    ) -> Straggler | None:
        past = self._pasts[key]
        is_slow = own.seconds > _SLOW * middle and is_far(own.seconds, [each.seconds for each in all_times])
        past.num_slow = past.num_slow + 1 if is_slow else 0
        before = statistics.median(past.calm) if len(past.calm) >= _LEAST_KEPT else None
        if not is_slow or before is None:
            past.calm.append(own.seconds)
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


def local_times(views: Sequence[RankView]) -> list[LocalTime]:
    """What a round says of ranks; nothing of those whose steps were not looked at, or are too few."""
    found = []
    for view in views:
        if why_not([view], is_partial=True) is None:
            seen = weigh(view)
            if seen.is_known:
                found.append(
                    LocalTime(
                        rank=seen.rank, host=seen.host, seconds=seen.local_seconds, step_seconds=seen.step_seconds
                    )
                )
    return found


def usual(values: Sequence[float]) -> float:
    """What is usual among ranks."""
    return statistics.median_low(values)


def is_far(value: float, values: Sequence[float]) -> bool:
    """Whether a value lies further above what is usual than such values lie from it by themselves."""
    middle = usual(values)
    spread = statistics.median_low([abs(each - middle) for each in values])
    return value - middle > _FAR * _OF_A_NORMAL_DISTRIBUTION * spread


def _is_timed(seconds: float) -> bool:
    return _LEAST <= seconds <= _MOST
