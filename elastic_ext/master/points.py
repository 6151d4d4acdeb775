"""History: how fast a job has been, in fewer points the longer ago it was. Pure.

A *point* is the mean of some seconds. There is one for ten seconds for an hour, for a minute for a day, and for ten
minutes for a week, each made of the finer ones; where nobody has told anything there is none.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from elastic_ext.records.json import object_of, record_of

__all__ = ["FINEST_SECONDS", "History", "Point", "mean_of"]

FINEST_SECONDS = 10.0
_LEVELS = ((FINEST_SECONDS, 360), (60.0, 1440), (600.0, 1008))
"""Seconds between points, and how many are kept."""
_MOST = 1e15
_MOST_SHARES = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A mean; None is what was not known."""

    time: float
    """When it ends, in seconds since 1970."""
    seconds: float
    """Of how much time it is the mean."""
    step: int | None = None
    """The furthest."""
    step_seconds: float | None = None
    steps_per_second: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    num_nodes: int = 0
    num_workers: int = 0
    config_version: int = 0
    """The last."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Where the time of ranks went, by phase."""

    def to_json(self) -> str:
        """For a store."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(values, separators=(",", ":"))


class History:
    """The points of one job."""

    def __init__(self) -> None:
        self._levels = [_Level(every, num) for every, num in _LEVELS]
        self._last = -math.inf

    def add(self, point: Point) -> Point | None:
        """Some seconds have passed, and this was their mean; gives the point of ten seconds that is complete by it.

        Where the clock was set back, points that would lie ahead of it are dropped.
        """
        if point.time < self._last:
            for level in self._levels:
                level.forget_after(point.time)
        self._last = point.time
        finished: Point | None = point
        complete = None
        for number, level in enumerate(self._levels):
            finished = level.add(finished)
            if number == 0:
                complete = finished
            if finished is None:
                break
        return complete

    def since(self, time: float) -> list[Point]:
        """What ended after ``time``, the oldest first: in each stretch the finest points that are left of it."""
        found: list[Point] = []
        for level in self._levels:
            begin = found[0].time - found[0].seconds if found else math.inf
            found = [each for each in level.points if time < each.time <= begin] + found
        return found

    def rows(self, since: float = -math.inf) -> list[tuple[float, str]]:
        """What a store should keep for a week: points of a minute that ended after ``since``, and when each did."""
        return [(each.time, each.to_json()) for each in self._levels[1].points if each.time > since]

    def restore(self, rows: Iterable[str]) -> None:
        """Take up what a store has kept, before anything is added; a row that is none is left out."""
        points = sorted((point for each in rows if (point := _read(each)) is not None), key=lambda each: each.time)
        _, minutes, coarse = self._levels
        for each in points:
            if each.time > self._last:
                self._last = each.time
                minutes.points.append(each)
                coarse.add(each)


class _Level:
    """Points that lie equally far apart."""

    def __init__(self, every: float, num: int) -> None:
        self.every = every
        self.points: deque[Point] = deque(maxlen=num)
        self._open: list[Point] = []

    def add(self, point: Point | None) -> Point | None:
        """The point that is complete, now that one of the next stretch has come."""
        assert point is not None
        stretch = self._stretch_of(point)
        finished = None
        if self._open and self._stretch_of(self._open[-1]) != stretch:
            finished = replace(mean_of(self._open), time=self._stretch_of(self._open[-1]) * self.every)
            self.points.append(finished)
            self._open = []
        self._open.append(point)
        if len(self._open) > self.every:  # whoever adds points that often; their mean is one too
            self._open = [mean_of(self._open)]
        while self.points and self.points[0].time < point.time - self.every * (self.points.maxlen or 0):
            self.points.popleft()
        return finished

    def forget_after(self, time: float) -> None:
        while self.points and self.points[-1].time > time:
            self.points.pop()
        self._open = [each for each in self._open if each.time <= time]

    def _stretch_of(self, point: Point) -> int:
        """Its number since 1970; a stretch ends with a point at its end."""
        return math.ceil(point.time / self.every)


def mean_of(points: Sequence[Point]) -> Point:
    """One point that says what several say, each counting by its seconds; the oldest first, and at least one."""
    last = points[-1]
    if len(points) == 1:
        return last

    def mean(ask: Callable[[Point], float | None]) -> float | None:
        known = [(each.seconds, value) for each in points if (value := ask(each)) is not None]
        total = sum(seconds for seconds, _ in known)
        return sum(seconds * value for seconds, value in known) / total if total > 0 else None

    steps = [each.step for each in points if each.step is not None]
    names = dict.fromkeys(name for each in points for name in each.shares)
    shares = {name: mean(lambda each, name=name: _share_of(each, name)) for name in names}  # type: ignore[misc]
    return Point(
        time=last.time,
        seconds=sum(each.seconds for each in points),
        step=max(steps, default=None),
        step_seconds=mean(lambda each: each.step_seconds),
        steps_per_second=mean(lambda each: each.steps_per_second),
        samples_per_second=mean(lambda each: each.samples_per_second),
        tokens_per_second=mean(lambda each: each.tokens_per_second),
        num_nodes=round(mean(lambda each: each.num_nodes) or 0),
        num_workers=round(mean(lambda each: each.num_workers) or 0),
        config_version=last.config_version,
        shares={name: share for name, share in shares.items() if share is not None},
    )


def _share_of(point: Point, name: str) -> float | None:
    """None where a point tells of no shares at all; else what it does not name took no time."""
    return point.shares.get(name, 0.0) if point.shares else None


def _read(text: str) -> Point | None:
    """The point that ``to_json`` gave; None for anything else."""
    try:
        point = record_of(Point, object_of(text))
    except ValueError:
        return None
    numbers = [point.time, point.seconds, point.num_nodes, point.num_workers, point.config_version]
    known = [point.step, point.step_seconds, point.steps_per_second, point.samples_per_second, point.tokens_per_second]
    numbers += [each for each in known if each is not None]
    shares = point.shares.values()
    fits = (
        all(0 <= each <= _MOST for each in numbers)
        and len(point.shares) <= _MOST_SHARES
        and all(type(each) in (int, float) and 0 <= each <= 1.001 for each in shares)
    )
    return point if fits else None
