"""The metrics of a job, added up from the reports of its nodes, and their history over time. Pure, and bounded."""

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
from elastic_ext.records.logged import mean_logged
from elastic_ext.records.measures import Measures
from elastic_ext.records.metrics import StepWindow

from .node_metrics import METRICS_OF_A_JOB, MOST_WORKERS, NodeReport, SlowRanks, report_of, window_in
from .wire import filled, master_pb2, put_logged, put_metrics

__all__ = ["FINEST_SECONDS", "Collector", "History", "MeanPoint", "mean_of"]


# --- how fast a job has been, in fewer points the longer ago it was --------------------------------------------------
# A *point* is the mean over some seconds. There is one for each ten seconds of the last hour, each minute of the last
# day, and each ten minutes of the last week, made of the finer ones; where nothing was reported there is none.

FINEST_SECONDS = 10.0
_LEVELS = ((FINEST_SECONDS, 360), (60.0, 1440), (600.0, 1008))
"""The levels of the history: seconds between points, and how many points are kept."""
_MOST = 1e15
_MOST_SHARES = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanPoint:
    """The mean of each of a job's metrics over an interval; None where a metric was not known."""

    time: float
    """When the interval ends, in seconds since 1970."""
    seconds: float
    """The length of the interval."""
    step: int | None = None
    """The last step of any rank."""
    step_seconds: float | None = None
    steps_per_second: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    num_nodes: int = 0
    """Nodes with workers that run."""
    num_workers: int = 0
    """Workers that run."""
    config_version: int = 0
    """The newest config version in force at the end of the interval."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """The share of ranks' time in each phase."""

    def to_json(self) -> str:
        """The point as a line of JSON, for the store."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(values, separators=(",", ":"))


class History:
    """The metrics of one job over the last week, in points that are coarser the older they are."""

    def __init__(self) -> None:
        self._levels = [_Level(every, num) for every, num in _LEVELS]
        self.last_time = -math.inf
        """When the last point that was added ended; minus infinity before the first."""

    def add(self, point: MeanPoint) -> MeanPoint | None:
        """Add the mean of the last few seconds; gives the ten-second point that this completes, if any.

        Where the clock was set back, points later than ``point`` are dropped.
        """
        if point.time < self.last_time:
            for level in self._levels:
                level.forget_after(point.time)
        self.last_time = point.time
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
        """The points that ended after ``time``, oldest first: for each interval the finest that are kept."""
        found: list[MeanPoint] = []
        for level in self._levels:
            begin = found[0].time - found[0].seconds if found else math.inf
            found = [each for each in level.points if time < each.time <= begin] + found
        return found

    def rows(self, since: float = -math.inf) -> list[tuple[float, str]]:
        """The one-minute points that ended after ``since``, for the store: when each ended, and its JSON."""
        return [(each.time, each.to_json()) for each in self._levels[1].points if each.time > since]

    def restore(self, rows: Iterable[str]) -> None:
        """Add the points that the store has kept, before any other; a row that is no point is left out."""
        points = sorted((point for each in rows if (point := _read(each)) is not None), key=lambda each: each.time)
        _, minutes, coarse = self._levels
        for each in points:
            if each.time > self.last_time:
                self.last_time = each.time
                minutes.points.append(each)
                coarse.add(each)


class _Level:
    """The points of one length in the history, ``every`` seconds apart, at most ``num``."""

    def __init__(self, every: float, num: int) -> None:
        self.every = every
        self.points: deque[MeanPoint] = deque(maxlen=num)
        self._open: list[MeanPoint] = []

    def add(self, point: MeanPoint | None) -> MeanPoint | None:
        """Add a finer point; gives the point of this level that is complete by it, if any."""
        assert point is not None
        stretch = self._stretch_of(point)
        finished = None
        if self._open and self._stretch_of(self._open[-1]) != stretch:
            finished = replace(mean_of(self._open), time=self._stretch_of(self._open[-1]) * self.every)
            self.points.append(finished)
            self._open = []
        self._open.append(point)
        if len(self._open) > self.every:  # more than one a second, whoever adds so many: their mean stands for them
            self._open = [mean_of(self._open)]
        while self.points and self.points[0].time < point.time - self.every * (self.points.maxlen or 0):
            self.points.popleft()
        return finished

    def forget_after(self, time: float) -> None:
        while self.points and self.points[-1].time > time:
            self.points.pop()
        self._open = [each for each in self._open if each.time <= time]

    def _stretch_of(self, point: MeanPoint) -> int:
        """The number, counted since 1970, of the interval in which a point ends; the end belongs to the interval."""
        return math.ceil(point.time / self.every)


def mean_of(points: Sequence[MeanPoint]) -> MeanPoint:
    """The mean of several points, weighted by their lengths; ``points`` has at least one, oldest first."""
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
    """The share of a phase in a point, 0 where the point does not name it; None where the point has no shares."""
    return point.shares.get(name, 0.0) if point.shares else None


def _read(text: str) -> MeanPoint | None:
    """The point that ``to_json`` wrote; None for anything else."""
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
_LEAST_TICK_SECONDS = 4.0  # between two points
_MOST_TICK_SECONDS = 30.0  # ago the point before was, else this one counts for _LEAST_TICK_SECONDS
_LABELS = tuple(phase.label for phase in Phase)

Windows = dict[int, tuple[bytes, ...]]
"""The profile windows of a node by rank, each as it was sent, the newest first."""


class Collector:
    """Adds up what the nodes of one job report of their workers: progress, verdict, stragglers, and history."""

    def __init__(self, *, fresh_seconds: float = _FRESH_SECONDS) -> None:
        """Reports older than ``fresh_seconds`` do not count in the job's present metrics, nor those of nodes gone."""
        self._fresh_seconds = fresh_seconds
        self._reports: dict[str, NodeReport] = {}  # by node; the report that is oldest first
        self._windows: dict[str, Windows] = {}
        self._num_bytes = 0
        self._gone: set[str] = set()  # nodes with a report that are lost or have left
        self._num_ranks = 0  # of the other nodes
        self._num_kept = 0  # ranks whose windows are kept
        self._slow = SlowRanks()
        self._history = History()
        self._pace = ChangeDetector(least_seconds=0.0)
        self._ticked = -math.inf
        self._verdict: tuple[float, Verdict] | None = None

    def take(self, now: float, node_id: str, workers: Sequence[master_pb2.Worker], *, host: str = "") -> None:
        """Take the workers in a node's beat as its newest report; their windows are removed from the messages.

        ``host`` names the node for people.
        """
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

    def note_gone(self, node_id: str) -> None:
        """Note that a node is lost or has left: what it has reported does not count until it reports again.

        Its ranks are no stragglers any more from the next ten-second point of the history on, and the verdict changes
        once it is made again, within seconds.
        """
        self._num_kept -= len(self._windows.pop(node_id, ()))
        report = self._reports.get(node_id)
        if report is not None and node_id not in self._gone:
            self._gone.add(node_id)
            self._num_ranks -= len(report.ranks)

    def forget(self, node_id: str) -> None:
        """Forget a node's report; a node that is not known is ignored."""
        self.note_gone(node_id)
        self._gone.discard(node_id)
        report = self._reports.pop(node_id, None)
        if report is not None:
            self._num_bytes -= report.num_bytes

    @property
    def num_ranks(self) -> int:
        """How many ranks the newest reports have, without those of nodes that are lost or have left."""
        return self._num_ranks

    def workers(self, node_id: str, *, ranks_below: float = math.inf) -> list[master_pb2.Worker]:
        """The newest reports of a node's workers with ranks less than ``ranks_below``, without impossible values.

        Empty for an unknown node.
        """
        report = self._reports.get(node_id)
        return [] if report is None else report.workers(ranks_below=ranks_below)

    def progress(self, now: float) -> master_pb2.Progress:
        """The job's progress by the reports that are fresh at ``now``: step, rates, shares by phase, and metrics."""
        progress = filled(master_pb2.Progress(), self._point(now, 0.0))
        fresh = [report for _, report in self._fresh(now)]
        put_metrics(progress, _middles_of(fresh))
        rows = (row for each in fresh for row in each.logged.items())
        put_logged(progress, mean_logged(({name: total / num_ranks}, num_ranks) for name, (total, num_ranks) in rows))
        return progress

    def versions_in_force(self, now: float) -> list[int]:
        """The config versions in force, the newest of each node with a fresh report and running workers."""
        return sorted({each.config_version for _, each in self._fresh(now) if each.num_running})

    @property
    def stragglers(self) -> tuple[Straggler, ...]:
        """Ranks that have kept the others waiting for a while, the slowest first."""
        return self._slow.named

    def verdict(self, now: float) -> Verdict:
        """The verdict on what holds training up; it is made again at most every few seconds."""
        if self._verdict is None or not 0 <= now - self._verdict[0] < _VERDICT_SECONDS:
            self._verdict = now, self._judged(now)
        return self._verdict[1]

    def tick(self, now: float) -> list[str]:
        """Add to the history and look for stragglers and changes of pace; called about once a second.

        Gives sentences for events. For a thousand nodes every few seconds it takes some milliseconds, else next to
        nothing.
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
        """The history's points that ended after ``since``, oldest first, as a message."""
        points = [filled(master_pb2.MetricPoint(), each) for each in self._history.since(since)]
        return master_pb2.MetricHistory(points=points)

    @property
    def last_time(self) -> float:
        """When the last point of the history ended, before which the next one lies if the clock was set back."""
        return self._history.last_time

    def rows(self, since: float = -math.inf) -> list[tuple[float, str]]:
        """The history's points for the store that ended after ``since``: when each ended, and its JSON."""
        return self._history.rows(since)

    def restore(self, rows: Iterable[str]) -> None:
        """Add the points that the store has kept, before the first tick; a row that is no point is left out."""
        self._history.restore(rows)

    def _stride(self) -> int:
        """The stride of ranks whose windows are kept; odd, as ranks within nodes differ by twos and eights."""
        return 1 if self._num_ranks <= _MOST_JUDGED else -(-self._num_ranks // _MOST_JUDGED) | 1

    def _fresh(self, now: float) -> Iterable[tuple[str, NodeReport]]:
        """The reports that count at ``now``, by node: fresh ones, of nodes that are neither lost nor have left."""
        for node_id, report in self._reports.items():
            if abs(now - report.time) <= self._fresh_seconds and node_id not in self._gone:
                yield node_id, report

    def _point(self, now: float, seconds: float) -> MeanPoint:
        """The job's metrics at ``now`` as a point of the history of length ``seconds``."""
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
        """The verdict on what holds training up, from the windows of some ranks."""
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
    """The newest two of a rank's windows, as bytes; three where the new ones have too few steps to judge by."""
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
    """The metrics of a job by name, each the median of the nodes."""
    return {name: _middle(each.middles[place] for each in reports) for place, name in enumerate(METRICS_OF_A_JOB)}


def _middle(values: Iterable[float]) -> float | None:
    """The lower median of the values that are known (not NaN); None where none is."""
    known = [each for each in values if each == each]
    return median_low(known) if known else None
