"""What nodes tell of their workers, added up over the job, and how fast the job has been over time.
Pure, and bounded.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median_low

from elastic_ext.profile.phases import Phase
from elastic_ext.profile.reader import present_windows, view_of
from elastic_ext.profile.stragglers import ChangeDetector, Straggler
from elastic_ext.profile.verdict import Verdict, verdict
from elastic_ext.records.json import object_of, record_of
from elastic_ext.records.measures import Measures
from elastic_ext.records.metrics import StepWindow

from .node_metrics import METRICS_OF_A_JOB, MOST_WORKERS, NodeReport, SlowRanks, report_of, window_in
from .wire import filled, master_pb2, put_metrics

__all__ = ["FINEST_SECONDS", "Collector", "History", "MeanPoint", "mean_of"]


# --- how fast a job has been, in fewer points the longer ago it was --------------------------------------------------
# A *point* is the mean of some seconds. There is one for ten seconds for an hour, for a minute for a day, and for ten
# minutes for a week, each made of the finer ones; where nobody has told anything there is none.

FINEST_SECONDS = 10.0
_LEVELS = ((FINEST_SECONDS, 360), (60.0, 1440), (600.0, 1008))
"""Seconds between points, and how many are kept."""
_MOST = 1e15
_MOST_SHARES = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanPoint:
    """The mean of each metric over an interval; None where none was known."""

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

    def add(self, point: MeanPoint) -> MeanPoint | None:
        """Some seconds have passed, and this was their mean; gives the point of ten seconds that is complete by it.

        Where the clock was set back, points that would lie ahead of it are dropped.
        """
        if point.time < self._last:
            for level in self._levels:
                level.forget_after(point.time)
        self._last = point.time
        finished: MeanPoint | None = point
        complete = None
        for number, level in enumerate(self._levels):
            finished = level.add(finished)
            if number == 0:
                complete = finished
            if finished is None:
                break
        return complete

    def since(self, time: float) -> list[MeanPoint]:
        """What ended after ``time``, the oldest first: in each stretch the finest points that are left of it."""
        found: list[MeanPoint] = []
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
        self.points: deque[MeanPoint] = deque(maxlen=num)
        self._open: list[MeanPoint] = []

    def add(self, point: MeanPoint | None) -> MeanPoint | None:
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

    def _stretch_of(self, point: MeanPoint) -> int:
        """Its number since 1970; a stretch ends with a point at its end."""
        return math.ceil(point.time / self.every)


def mean_of(points: Sequence[MeanPoint]) -> MeanPoint:
    """One point that says what several say, each counting by its seconds; the oldest first, and at least one."""
    last = points[-1]
    if len(points) == 1:
        return last

    def mean(ask: Callable[[MeanPoint], float | None]) -> float | None:
        known = [(each.seconds, value) for each in points if (value := ask(each)) is not None]
        total = sum(seconds for seconds, _ in known)
        return sum(seconds * value for seconds, value in known) / total if total > 0 else None

    steps = [each.step for each in points if each.step is not None]
    names = dict.fromkeys(name for each in points for name in each.shares)
    shares = {name: mean(lambda each, name=name: _share_of(each, name)) for name in names}  # type: ignore[misc]
    return MeanPoint(
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


def _share_of(point: MeanPoint, name: str) -> float | None:
    """None where a point tells of no shares at all; else what it does not name took no time."""
    return point.shares.get(name, 0.0) if point.shares else None


def _read(text: str) -> MeanPoint | None:
    """The point that ``to_json`` gave; None for anything else."""
    try:
        point = record_of(MeanPoint, object_of(text))
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


# --- what nodes tell of their workers, added up over the job ---------------------------------------------------------
# Pure, and bounded whatever comes.
#
# It keeps the newest report of each node, the last windows of some ranks, who is slow, and a history that is finer the
# newer it is. Times are seconds since 1970; a clock that is set does no more harm than a gap.
#
# Of a job of up to 128 ranks it keeps the windows of all. Of a larger one those of about as many, spread evenly over
# it, and of ranks that may be slow: a verdict is judged from them, in bounded time.

_MOST_BYTES = 64 << 20  # of all reports
_MOST_JUDGED = 128
_MOST_KEPT = 4 * _MOST_JUDGED
_MOST_WINDOWS = 3  # of a rank
_LEAST_STEPS = 3
_MOST_WINDOW_BYTES = 2048
_FRESH_SECONDS = 45.0
_VERDICT_SECONDS = 5.0
_LEAST_TICK_SECONDS = 4.0
_MOST_TICK_SECONDS = 30.0  # of a point, however long ago the one before was
_LABELS = tuple(phase.label for phase in Phase)

Windows = dict[int, tuple[bytes, ...]]
"""By rank, each as it was sent, the newest first."""


class Collector:
    """What nodes tell of one job."""

    def __init__(self, *, fresh_seconds: float = _FRESH_SECONDS) -> None:
        """A report that is older than ``fresh_seconds`` says nothing of how the job does now."""
        self._fresh_seconds = fresh_seconds
        self._reports: dict[str, NodeReport] = {}  # the one that was told of longest ago first
        self._windows: dict[str, Windows] = {}
        self._num_bytes = 0
        self._num_ranks = 0
        self._num_kept = 0  # ranks whose windows are
        self._slow = SlowRanks()
        self._history = History()
        self._pace = ChangeDetector(least_seconds=0.0)
        self._ticked = -math.inf
        self._verdict: tuple[float, Verdict] | None = None

    def take(self, now: float, node_id: str, workers: Sequence[master_pb2.Worker], *, host: str = "") -> None:
        """What a node's Beat says of its workers, whose windows are taken out of them; ``host`` is for people."""
        if len(workers) > MOST_WORKERS:
            workers = workers[:MOST_WORKERS]
        windows: Windows = {}
        kept = self._windows.get(node_id)
        stride, suspected = self._stride(), self._slow.suspected
        for worker in workers:
            rank = worker.rank
            if rank % stride == 0 or rank in suspected:
                windows[rank] = _newest(kept.get(rank, ()) if kept else (), worker.windows)
            worker.ClearField("windows")
        report = report_of(now, host or node_id, workers)
        self.forget(node_id)
        self._reports[node_id] = report
        self._num_bytes += report.num_bytes
        self._num_ranks += len(report.ranks)
        if self._num_kept + len(windows) <= _MOST_KEPT:
            self._windows[node_id] = windows
            self._num_kept += len(windows)
        while self._num_bytes > _MOST_BYTES:
            self.forget(next(iter(self._reports)))

    def forget(self, node_id: str) -> None:
        """A node is gone; nothing happens where it is not known."""
        report = self._reports.pop(node_id, None)
        self._num_kept -= len(self._windows.pop(node_id, ()))
        if report is not None:
            self._num_bytes -= report.num_bytes
            self._num_ranks -= len(report.ranks)

    @property
    def num_ranks(self) -> int:
        """Of which there is a report."""
        return self._num_ranks

    def workers(self, node_id: str) -> list[master_pb2.Worker]:
        """The newest that a node has told of each worker, without what cannot be; none where it is not known."""
        report = self._reports.get(node_id)
        return [] if report is None else report.workers

    def progress(self, now: float) -> master_pb2.Progress:
        """How far the job is and how fast, by what is fresh."""
        progress = filled(master_pb2.Progress(), self._point(now, 0.0))
        put_metrics(progress, _middles_of([report for _, report in self._fresh(now)]))
        return progress

    def versions_in_force(self, now: float) -> list[int]:
        """Of the config, on nodes of which something fresh is known: the newest on each."""
        return sorted({each.config_version for _, each in self._fresh(now) if each.num_running})

    @property
    def stragglers(self) -> tuple[Straggler, ...]:
        """Ranks that have kept the others waiting for a while, the slowest first."""
        return self._slow.named

    def verdict(self, now: float) -> Verdict:
        """What holds training up; the same again where it was asked less than some seconds ago."""
        if self._verdict is None or not 0 <= now - self._verdict[0] < _VERDICT_SECONDS:
            self._verdict = now, self._judged(now)
        return self._verdict[1]

    def tick(self, now: float) -> list[str]:
        """Some time has passed, about a second; gives what has happened, in words for events.

        It takes a few milliseconds for a thousand nodes, every few seconds; else next to nothing.
        """
        if 0 <= now - self._ticked < _LEAST_TICK_SECONDS:
            return []
        seconds = now - self._ticked if 0 < now - self._ticked < _MOST_TICK_SECONDS else _LEAST_TICK_SECONDS
        self._ticked = now
        point = self._point(now, seconds)
        if point.num_workers == 0:
            self._slow.see({})
            return []
        complete = self._history.add(point)
        if complete is None:
            return []
        self._slow.see(dict(self._fresh(now)), complete.config_version)
        if complete.step_seconds is None or complete.step is None:
            return []
        change = self._pace.see(complete.step, complete.step_seconds, (complete.config_version, complete.num_workers))
        return [] if change is None else [change.text]

    def history(self, since: float = 0.0) -> master_pb2.MetricHistory:
        """Points that ended after ``since``, the oldest first."""
        points = [filled(master_pb2.MetricPoint(), each) for each in self._history.since(since)]
        return master_pb2.MetricHistory(points=points)

    def rows(self, since: float = -math.inf) -> list[tuple[float, str]]:
        """What a store should keep of the history, of points that ended after ``since``, each with when it did."""
        return self._history.rows(since)

    def restore(self, rows: Iterable[str]) -> None:
        """Take up what a store has kept, before the first tick; a row that is none is left out."""
        self._history.restore(rows)

    def _stride(self) -> int:
        """Of so many ranks the windows of one are kept; odd, as what differs within nodes comes in twos and eights."""
        return 1 if self._num_ranks <= _MOST_JUDGED else -(-self._num_ranks // _MOST_JUDGED) | 1

    def _fresh(self, now: float) -> Iterable[tuple[str, NodeReport]]:
        for node_id, report in self._reports.items():
            if abs(now - report.time) <= self._fresh_seconds:
                yield node_id, report

    def _point(self, now: float, seconds: float) -> MeanPoint:
        """The job as it is now."""
        fresh = [report for _, report in self._fresh(now)]
        middles = _middles_of(fresh)
        num_shared = sum(each.num_shared for each in fresh)
        sums = [sum(column) for column in zip(*(each.shares for each in fresh if each.num_shared), strict=True)]
        shares = zip(_LABELS, sums, strict=False)
        step = max((each.step for each in fresh), default=-1)
        return MeanPoint(
            time=now,
            seconds=seconds,
            step=step if step >= 0 else None,
            step_seconds=_middle(each.step_seconds for each in fresh),
            steps_per_second=middles["steps_per_second"],
            samples_per_second=middles["samples_per_second"],
            tokens_per_second=middles["tokens_per_second"],
            num_nodes=sum(each.num_running > 0 for each in fresh),
            num_workers=sum(each.num_running for each in fresh),
            config_version=max((each.config_version for each in fresh), default=0),
            shares={label: round(total / num_shared, 4) for label, total in shares if total > 0},
        )

    def _judged(self, now: float) -> Verdict:
        windows: dict[int, list[StepWindow]] = {}
        hosts: dict[int, str] = {}
        for node_id, report in self._fresh(now):
            for rank, row in self._windows.get(node_id, {}).items():
                found = [window for data in reversed(row) if (window := window_in(data, rank)) is not None]
                if found:
                    windows[rank], hosts[rank] = found, report.host
        suspected = self._slow.suspected
        chosen = sorted(windows, key=lambda rank: (rank not in suspected, rank))[:_MOST_JUDGED]
        present = present_windows({rank: windows[rank] for rank in chosen}, seconds=math.inf)
        views = [view_of(row, host=hosts[rank], measures=Measures()) for rank, row in present.items()]
        return verdict(views, is_partial=True)


def _newest(kept: tuple[bytes, ...], windows: Sequence[master_pb2.StepWindow]) -> tuple[bytes, ...]:
    """The last two of a rank's windows; a third where those came with too few steps to judge by."""
    if not windows:
        return kept
    num_steps = 0
    found: list[bytes] = []
    for window in windows[: -_MOST_WINDOWS - 1 : -1]:
        data = window.SerializeToString()
        if len(data) <= _MOST_WINDOW_BYTES:
            found.append(data)
            num_steps += window.num_steps
    return (*found, *kept)[: _MOST_WINDOWS if num_steps < _LEAST_STEPS else _MOST_WINDOWS - 1]


def _middles_of(reports: Sequence[NodeReport]) -> dict[str, float | None]:
    """The metrics of a job, each as the node in the middle tells it."""
    return {name: _middle(each.middles[place] for each in reports) for place, name in enumerate(METRICS_OF_A_JOB)}


def _middle(values: Iterable[float]) -> float | None:
    """The lower median of those that are known."""
    known = [each for each in values if each == each]
    return median_low(known) if known else None
