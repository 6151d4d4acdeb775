"""Stragglers: the workers that keep the others waiting, found every few seconds from each worker's busy time.

A worker's busy time is what its own work of a step takes, without waiting for others. A *round* here is the busy
times of all workers since the round before. Each agent reads those of its own workers, from the ends of their profiles;
the agent of the first node judges all, and the others hear from it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastic_ext.profile.breakdown import RankView
from elastic_ext.profile.reader import present_windows, read_profiles, view_of
from elastic_ext.profile.stragglers import RankBusyTime, Straggler, Stragglers, rank_busy_times
from elastic_ext.ranks.board import Board
from elastic_ext.records.json import records_of
from elastic_ext.records.measures import Measures
from elastic_ext.records.metrics import StepTrace, StepWindow

__all__ = ["SlowNews", "SlowWorker", "SlowWorkers", "StragglerRounds"]

_EVERY_SECONDS = 10.0
_NUM_WINDOWS = 16  # more than end in so long
_CALM_ROUNDS = 6  # in which it is not named, before a worker is slow no more
_ROUND, _SLOW = "local-times", "slow-workers"


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowWorker:
    """A worker that is a straggler now."""

    rank: int
    host: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowNews:
    """News of a straggler: a worker has become slow, or is slow no longer."""

    rank: int
    host: str
    is_slow: bool
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRound:
    """The busy times of one node's workers in one round of measurements."""

    until: float
    """When the last profile window in it ends, in seconds since 1970."""
    config: tuple[int, int]
    """The version and revision of the config that was in force."""
    times: tuple[RankBusyTime, ...]

    def to_row(self) -> list[Any]:
        """The round as values for JSON."""
        return [self.until, *self.config, [asdict(each) for each in self.times]]

    @classmethod
    def from_row(cls, row: Any) -> NodeRound:
        """The round that ``to_row`` made ``row`` of; ValueError for anything else."""
        try:
            until, version, revision, times = row
            return cls(
                until=float(until),
                config=(int(version), int(revision)),
                times=records_of(RankBusyTime, times),
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"no round: {error}") from None


class StragglerRounds:
    """Judges which workers are slow, from rounds of busy times of all nodes; pure."""

    def __init__(self) -> None:
        self.slow: tuple[SlowWorker, ...] = ()
        """The workers that are slow by now."""
        self._stragglers = Stragglers()
        self._counted: dict[int, float] = {}  # place -> until when its rounds have been judged
        self._calm: dict[tuple[int, str], int] = {}  # rounds, of those who are slow

    def see(self, rounds: Mapping[int, NodeRound]) -> None:
        """Judge the newest round of each node, by place, once every node has a new one and all have one config."""
        if any(each.until <= self._counted.get(place, 0.0) for place, each in rounds.items()):
            return
        if len({each.config for each in rounds.values()}) > 1:
            return
        self._counted = {place: each.until for place, each in rounds.items()}
        config = next(iter(rounds.values())).config
        named = self._stragglers.see([time for each in rounds.values() for time in each.times], config)
        self.slow = self._with_calm(named)

    def _with_calm(self, named: Sequence[Straggler]) -> tuple[SlowWorker, ...]:
        """The workers named as stragglers now, and those that were named not long ago."""
        found = {(each.rank, each.host): each for each in self.slow}
        fresh = {(each.rank, each.host): each for each in named}
        self._calm = {key: 0 if key in fresh else self._calm.get(key, 0) + 1 for key in {**found, **fresh}}
        for key, each in fresh.items():
            found.setdefault(key, SlowWorker(rank=each.rank, host=each.host, text=each.text))
        return tuple(each for key, each in sorted(found.items()) if self._calm[key] < _CALM_ROUNDS)


class SlowWorkers:
    """Finds a job's stragglers together with the agents of other nodes, and says what has changed."""

    def __init__(
        self,
        run_dir: Path,
        *,
        host: str,
        every_seconds: float = _EVERY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir = run_dir
        self._host = host
        self._every_seconds = every_seconds
        self._clock = clock
        self.forget(since=0.0)

    def forget(self, *, since: float) -> None:
        """Begin anew, as other workers start at ``since``, in seconds since 1970."""
        self._due_at = self._clock() + self._every_seconds
        self._since = since
        self._rounds = StragglerRounds()
        self._told: tuple[SlowWorker, ...] = ()

    def look(self, seats: Sequence[int], board: Board | None, together: Collection[int]) -> list[SlowNews]:
        """The news of stragglers, if a look is due; ``seats`` are those of this node's running workers.

        Nodes exchange their rounds on ``board``; None where there is no other node. Those at the places ``together``
        have workers that train together, and the first of them judges.
        """
        now = self._clock()
        if now < self._due_at:
            return []
        self._due_at = now + self._every_seconds
        own = self._own_round(seats)
        if board is None or board.num_peers == 1:
            if own is not None:
                self._rounds.see({0: own})
            return self._news(self._rounds.slow)
        if own is not None:
            board.tell(_ROUND, own.to_row())
        if board.place != min(together):
            return self._news(_announced(board))
        told = {place: row for place, row in board.values_of(_ROUND).items() if place in together}
        if len(told) == len(together):
            self._rounds.see({place: NodeRound.from_row(row) for place, row in told.items()})
            board.post(_SLOW, [asdict(each) for each in self._rounds.slow])
        return self._news(self._rounds.slow)

    def _own_round(self, seats: Sequence[int]) -> NodeRound | None:
        """The busy times of this node's workers since the round before; None until each has written enough windows."""
        profiles = read_profiles(self._run_dir, seats, num_windows=_NUM_WINDOWS)
        windows = present_windows(profiles.windows, seconds=math.inf, since=self._since)
        views = [self._view(row, profiles.traces.get(rank)) for rank, row in windows.items()]
        times = rank_busy_times(views)
        if not times or len(times) < len(seats):
            return None
        last = max((row[-1] for row in windows.values()), key=lambda each: each.end)
        self._since = last.end
        return NodeRound(until=last.end, config=(last.config_version, last.config_revision), times=tuple(times))

    def _view(self, windows: Sequence[StepWindow], trace: StepTrace | None) -> RankView:
        measures = Measures(waits_in_passes=trace is not None)
        return view_of(windows, host=self._host, measures=measures, trace=trace)

    def _news(self, slow: tuple[SlowWorker, ...]) -> list[SlowNews]:
        """What has changed since the last look, where ``slow`` are the stragglers now."""
        before, self._told = self._told, slow
        known, present = ({(each.rank, each.host) for each in row} for row in (before, slow))
        found = [
            SlowNews(rank=each.rank, host=each.host, is_slow=True, text=f"slow worker: {each.text}")
            for each in slow
            if (each.rank, each.host) not in known
        ]
        over = [each for each in before if (each.rank, each.host) not in present]
        words = "is as fast as the other workers again"
        return found + [
            SlowNews(rank=each.rank, host=each.host, is_slow=False, text=f"rank {each.rank} on {each.host} {words}")
            for each in over
        ]


def _announced(board: Board) -> tuple[SlowWorker, ...]:
    """The stragglers that the first node has announced."""
    rows = board.read(_SLOW)
    return () if rows is None else records_of(SlowWorker, rows)
