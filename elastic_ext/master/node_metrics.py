"""What a node reports in its beats, kept in little memory and bounded, and the ranks that keep others waiting. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add, attrgetter
from typing import Any

from google.protobuf.message import DecodeError

from elastic_ext.profile.phases import IN_STEPS, Phase
from elastic_ext.profile.stragglers import Straggler
from elastic_ext.records.logged import sum_logged
from elastic_ext.records.measures import METRICS
from elastic_ext.records.metrics import SIZES, StepWindow
from elastic_ext.records.text import on_one_line

from .wire import logged_of, master_pb2, metrics_of, put_logged, put_metrics, window_record

__all__ = [
    "METRICS_OF_A_JOB",
    "MOST_CHARACTERS",
    "MOST_SHARE",
    "MOST_WORKERS",
    "NodeReport",
    "SlowRanks",
    "amount",
    "fitting_table",
    "fitting_window",
    "fitting_worker",
    "report_of",
    "shortened",
    "window_in",
]


# --- the check of nodes' reports: numbers that can be, texts that are short, tables of a few rows --------------------
# A caller of a master may be broken, or mean harm: what is out of bounds is left out, and the rest is kept.

MOST_SHARE = 1.001
MOST_CHARACTERS = 240
_MOST_NAME = 32
_MOST_ROWS = 24
_MOST_QUANTILES = 16
_MOST_STATE = 32
_MOST_SECONDS = 1e9
_MOST_TIME = 1e11
_MOST_COUNT = 2**53
_MOST_MEMORY_BYTES = 2**60
_MOST_OF: Mapping[str, float] = {
    "step": _MOST_COUNT,
    "cpu_percent": 1e6,
    "gpu_percent": 100.0,
    "config_version": _MOST_COUNT,
    "config_revision": _MOST_COUNT,
    "activity_seconds": _MOST_SECONDS,
}
"""The largest value allowed for each number of a worker that is not in the table METRICS."""


def amount(value: float, most: float) -> float | None:
    """``value`` if it is from 0 to ``most``; else, and for NaN, None."""
    return value if 0 <= value <= most else None


def shortened(text: str, most_characters: int = MOST_CHARACTERS) -> str:
    """``text`` on one line, cut to ``most_characters``."""
    return on_one_line(text[:most_characters])


def fitting_table(table: Mapping[str, float], most: float) -> dict[str, float]:
    """The rows of a table by name, such as shares by phase, whose names and values are within bounds."""
    found: dict[str, float] = {}
    for name, value in table.items():
        if len(found) < _MOST_ROWS and len(name) <= _MOST_NAME and name.isprintable() and 0 <= value <= most:
            found[name] = value
    return found


def fitting_worker(worker: master_pb2.Worker) -> master_pb2.Worker:
    """A worker's report with the values that are within bounds, and without its windows."""
    found = master_pb2.Worker(
        rank=worker.rank,
        local_rank=worker.local_rank,
        pid=worker.pid,
        state=shortened(worker.state, _MOST_STATE),
        activity=shortened(worker.activity),
        trouble=shortened(worker.trouble),
        shares=fitting_table(worker.shares, MOST_SHARE),
    )
    put_metrics(found, metrics_of(worker))
    put_logged(found, logged_of(worker))
    if worker.HasField("exit_code"):
        found.exit_code = worker.exit_code
    for name, most in _MOST_OF.items():
        if worker.HasField(name) and 0 <= getattr(worker, name) <= most:
            setattr(found, name, getattr(worker, name))
    return found


def window_in(data: bytes, rank: int) -> StepWindow | None:
    """The profile window of ``rank`` in serialized ``data``; None where that is none, or a value is out of bounds."""
    try:
        return fitting_window(master_pb2.StepWindow.FromString(data), rank)
    except DecodeError:
        return None


def fitting_window(said: master_pb2.StepWindow, rank: int) -> StepWindow | None:
    """The profile window of ``rank`` in a message; None where a value in it is out of bounds."""
    tables = (said.seconds, said.processor_seconds, said.typical)
    numbers: Iterable[float] = (
        *(value for table in tables for value in table.values()),
        *said.step_seconds,
        *(said.waiting_seconds, said.computing_seconds),
        *(said.step, said.num_steps, said.num_samples, said.num_tokens, said.num_bytes, said.num_detailed),
    )
    fits = (
        said.rank == rank
        and 0 <= said.begin <= said.end <= _MOST_TIME
        and all(0 <= each <= 1e15 for each in numbers)
        and all(len(table) <= _MOST_ROWS and max(map(len, table), default=0) <= _MOST_NAME for table in tables)
        and len(said.step_seconds) <= _MOST_QUANTILES
    )
    if not fits:
        return None
    window = window_record(said)
    too_large: dict[str, Any] = {name: None for name in SIZES if (getattr(window, name) or 0) > _MOST_MEMORY_BYTES}
    return replace(window, **too_large) if too_large else window


# --- the newest of what a node has told of its workers, in little memory and little time -----------------------------
# It is made for every beat of every node: what people are shown is only kept here, as it was sent, and checked when it
# is asked for; what is added up over the job is checked once, here.

MOST_WORKERS = 64
"""The most workers of one node; nothing is kept of more."""
_MOST_WORKER_BYTES = 640  # of a report as it was sent, before it is made fit
_REPORT_BYTES, _WORKER_BYTES = 1600, 140  # the memory of a report's objects, and of those for each of its workers
_LOGGED_BYTES = 230  # the memory of a number that the script has logged, with its name and the number of ranks
_MOST_RATE = 1e15
_LABELS = tuple(phase.label for phase in Phase)
_NOTHING = (0.0,) * len(_LABELS)
_NUM_IN_STEPS = len(IN_STEPS)  # which come first
_FORWARD, _BACKWARD = int(Phase.FORWARD), int(Phase.BACKWARD)
_NOT_OWN = (int(Phase.COMMUNICATION), int(Phase.AGREEMENT), int(Phase.STEP))
"""The phases of a step that do not count as a rank's own work: waiting for other ranks, and time in steps that were not
timed by phase, of which nobody knows how much is waiting."""
_MOST_SUM = 1.1  # of all shares of a worker
METRICS_OF_A_JOB = tuple(name for name, metric in METRICS.items() if metric.over_ranks == "middle")
"""The names of metrics that have one value for the job: the median over nodes of each node's median over ranks."""


def _in_worker(name: str) -> Callable[[master_pb2.Worker], float]:
    """A function that reads the metric ``name`` of a worker, and gives 0 where it is absent."""
    if name in master_pb2.Worker.DESCRIPTOR.fields_by_name:
        return attrgetter(name)
    return lambda worker: worker.metrics.get(name, 0.0)


_METRIC_READERS = tuple(map(_in_worker, METRICS_OF_A_JOB))


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """The newest report of one node's workers, as of ``time``, in seconds since 1970."""

    time: float
    host: str
    said: tuple[bytes, ...]
    """Each worker's report as serialized message, without its windows."""
    ranks: tuple[int, ...]
    local_seconds: tuple[float, ...]
    """The local time of each worker: seconds of its own work in a step, without waiting; 0 where not known."""
    num_running: int
    step: int
    """The last step of any worker of the node; -1 where none is known."""
    step_seconds: float
    """The median of the workers' step times that are more than 0; NaN where none is."""
    middles: tuple[float, ...]
    """The median of each of METRICS_OF_A_JOB over workers that report more than 0; NaN where none does."""
    config_version: int
    """The newest config version in force on any worker of the node."""
    shares: tuple[float, ...]
    """The shares of time in each phase, by the phase's number, summed over ``num_shared`` workers."""
    num_shared: int
    """How many workers have reported shares."""
    logged: Mapping[str, tuple[float, float]]
    """The sum over workers of each number that the script has logged, and how many workers have logged it."""

    @property
    def num_bytes(self) -> int:
        """About how much memory the report takes."""
        said = sum(map(len, self.said)) + _WORKER_BYTES * len(self.said)
        return _REPORT_BYTES + said + _LOGGED_BYTES * len(self.logged)

    def workers(self, *, ranks_below: float = math.inf) -> list[master_pb2.Worker]:
        """The reports of workers whose rank is less than ``ranks_below``, with the values that are within bounds."""
        return [
            fitting_worker(master_pb2.Worker.FromString(each))
            for rank, each in zip(self.ranks, self.said, strict=True)
            if rank < ranks_below
        ]


def report_of(time: float, host: str, workers: Sequence[master_pb2.Worker]) -> NodeReport:
    """The report of a node from the messages of its workers, without windows; ``time`` in seconds since 1970."""
    said: list[bytes] = []
    ranks: list[int] = []
    local: list[float] = []
    lengths: list[float] = []
    shares = list(_NOTHING)
    step, num_running, config_version, num_shared = -1, 0, 0, 0
    for worker in workers:
        data = worker.SerializeToString()
        said.append(data if len(data) <= _MOST_WORKER_BYTES else fitting_worker(worker).SerializeToString())
        ranks.append(worker.rank)
        seconds = worker.step_seconds  # 0 where it is absent, as any number of a message
        lengths.append(seconds)
        row = tuple(map(worker.shares.get, _LABELS, _NOTHING))
        if min(row) >= 0 and 0 < sum(row) <= _MOST_SUM:  # and none of them is NaN
            shares = list(map(add, shares, row))
            num_shared += 1
            local.append(_local_seconds(seconds, row))
        else:
            local.append(0.0)
        if worker.state == "running":
            num_running += 1
        if step < worker.step <= _MOST_COUNT and worker.HasField("step"):
            step = worker.step
        if config_version < worker.config_version <= _MOST_COUNT:
            config_version = worker.config_version
    return NodeReport(
        time=time,
        host=host,
        said=tuple(said),
        ranks=tuple(ranks),
        local_seconds=tuple(local),
        num_running=num_running,
        step=step,
        step_seconds=_middle(lengths),
        middles=tuple([_middle(list(map(told, workers))) for told in _METRIC_READERS]),
        config_version=config_version,
        shares=tuple(shares),
        num_shared=num_shared,
        logged=sum_logged((logged_of(worker), 1.0) for worker in workers if worker.metrics),
    )


def _local_seconds(step_seconds: float, row: Sequence[float]) -> float:
    """A worker's local time, in seconds of its own work in a step, from its shares; 0 where that is not known."""
    if row[_FORWARD] + row[_BACKWARD] <= 0 or not 0 < step_seconds <= _MOST_RATE:
        return 0.0
    return step_seconds * (1 - sum(row[phase] for phase in _NOT_OWN) / sum(row[:_NUM_IN_STEPS]))


def _middle(values: list[float]) -> float:
    """The lower median of the values that are within bounds; NaN where none is."""
    known = sorted(each for each in values if 0 < each <= _MOST_RATE)
    return known[(len(known) - 1) // 2] if known else math.nan


# --- which ranks keep the others waiting, by what all nodes tell in their beats: pure, one round after another -------
# It judges as profile/stragglers.py does, by each rank's local time (its own work in a step), and keeps a few numbers
# for each rank: jobs may have tens of thousands. A *round* is the newest report of every node.

_SLOW = 1.2  # times as long as is usual
_ROUNDS_IN_A_ROW = 3
_CALM_ROUNDS = 6  # in which it is not slow, before a rank that was named is named no more
_LEAST_OWN_ROUNDS = 3  # before a rank is compared with itself, too
_OWN_ROUND_SECONDS = 60  # between rounds that count in a rank's own usual time: its moving mean,
_OWN_MEAN_STEP = 0.1  # ... to which the newest round adds this share of its difference
_MOST_COMPARED = 2048  # ranks that tell what is usual
_OF_A_NORMAL_DISTRIBUTION = 1.4826  # the standard deviation, over the median distance from the median
_FAR = 3.0  # standard deviations above the median, beyond which a rank is slow
_MOST_NAMED = 64


@dataclass(slots=True)
class _NodeRanks:
    """Metrics of a node's ranks, each at its place in the node's report."""

    ranks: tuple[int, ...]
    own_usual: array[float]
    """Each rank's usual local time: a moving mean over rounds in which it was not slow; 0 where none is known."""
    time: float = 0.0
    """The time of the report that was judged last."""
    num_own_rounds: int = 0
    """How many rounds ``own_usual`` was taken from."""


@dataclass(slots=True)
class _Suspect:
    """A rank that was slow not long ago."""

    num_slow: int = 0
    num_calm: int = 0
    named: Straggler | None = None


class SlowRanks:
    """Finds the stragglers of one job from the reports of all its nodes, round by round."""

    def __init__(self) -> None:
        self._nodes: dict[str, _NodeRanks] = {}
        self._suspects: dict[tuple[str, int], _Suspect] = {}
        self._config: object = None
        self.suspected: frozenset[int] = frozenset()
        """Ranks that were slow of late, and may turn out to be stragglers."""

    @property
    def named(self) -> tuple[Straggler, ...]:
        """The stragglers by now, the slowest first."""
        found = [each.named for each in self._suspects.values() if each.named is not None]
        return tuple(sorted(found, key=lambda each: (each.score, each.rank))[:_MOST_NAMED])

    def see(self, reports: Mapping[str, NodeReport], config: object = None) -> None:
        """Judge a round: the newest report of each node, where not judged before; another ``config`` begins anew."""
        if config != self._config:
            self._config = config
            self._nodes, self._suspects = {}, {}
        self._nodes = {node_id: self._node(node_id, report) for node_id, report in reports.items()}
        self._suspects = {key: each for key, each in self._suspects.items() if _is_of(key, reports)}
        found = _usual_and_limit([each for report in reports.values() for each in report.local_seconds])
        if found is not None:
            suspects = {node_id for node_id, _ in self._suspects}
            for node_id, report in reports.items():
                node = self._nodes[node_id]
                if report.time != node.time:  # be it earlier, as once the master's clock was put back
                    is_new = node.num_own_rounds < _LEAST_OWN_ROUNDS
                    is_due = is_new or int(report.time) // _OWN_ROUND_SECONDS != int(node.time) // _OWN_ROUND_SECONDS
                    node.time = report.time
                    if is_due or node_id in suspects or max(report.local_seconds, default=0.0) > found[1]:
                        self._judge(node_id, node, report, *found, is_due=is_due)
        self.suspected = frozenset(rank for _, rank in list(self._suspects)[:_MOST_NAMED])

    def _node(self, node_id: str, report: NodeReport) -> _NodeRanks:
        known = self._nodes.get(node_id)
        if known is not None and known.ranks == report.ranks:
            return known
        return _NodeRanks(ranks=report.ranks, own_usual=array("f", bytes(4 * len(report.ranks))))

    def _judge(
        self, node_id: str, node: _NodeRanks, report: NodeReport, usual: float, limit: float, *, is_due: bool
    ) -> None:
        """Judge the ranks of a node: slow above ``limit``; if ``is_due``, the round counts in their own usual times."""
        has_own_usual = node.num_own_rounds >= _LEAST_OWN_ROUNDS
        node.num_own_rounds += is_due
        own_usual = node.own_usual
        for place, seconds in enumerate(report.local_seconds):
            key = node_id, report.ranks[place]
            is_slow = seconds > limit
            if is_slow or key in self._suspects:
                self._suspect(key, report, place, usual, own_usual[place] if has_own_usual else 0.0, is_slow=is_slow)
            if is_due and seconds > 0 and not (is_slow and has_own_usual):
                old = own_usual[place]
                own_usual[place] = old + _OWN_MEAN_STEP * (seconds - old) if old > 0 else seconds

    def _suspect(
        self,
        key: tuple[str, int],
        report: NodeReport,
        place: int,
        usual: float,
        own_usual: float,
        *,
        is_slow: bool,
    ) -> None:
        """Count a rank's slow and calm rounds: a straggler is one after some slow rounds in a row, until calm ones."""
        known = self._suspects.setdefault(key, _Suspect())
        known.num_slow = known.num_slow + 1 if is_slow else 0
        known.num_calm = 0 if is_slow else known.num_calm + 1
        if not is_slow and (known.named is None or known.num_calm >= _CALM_ROUNDS):
            del self._suspects[key]
        elif known.num_slow >= _ROUNDS_IN_A_ROW:
            seconds = report.local_seconds[place]
            step_seconds = report.step_seconds if report.step_seconds > 0 else seconds
            known.named = Straggler(
                rank=key[1],
                host=report.host,
                score=usual / seconds,
                own_score=own_usual / seconds if own_usual > 0 else None,
                slowed=min((seconds - usual) / max(step_seconds, seconds), 1.0),
                num_rounds=known.num_slow,
            )


def _is_of(key: tuple[str, int], reports: Mapping[str, NodeReport]) -> bool:
    report = reports.get(key[0])
    return report is not None and key[1] in report.ranks


def _usual_and_limit(times: list[float]) -> tuple[float, float] | None:
    """The median local time and the limit above which a rank is slow, from a sample of ranks; None if none is known.

    The limit is the larger of 1.2 times the median, and the median plus 3 standard deviations; a standard deviation is
    taken to be 1.4826 times the median distance from the median, as in a normal distribution.
    """
    stride = -(-len(times) // _MOST_COMPARED) | 1  # odd, as what differs within nodes comes in twos and eights
    known = sorted(each for each in times[::stride] if each > 0)
    if not known:
        return None
    usual = _middle_of_ordered(known)
    distance = _middle_of_ordered(sorted(abs(each - usual) for each in known))
    return usual, max(_SLOW * usual, usual + _FAR * _OF_A_NORMAL_DISTRIBUTION * distance)


def _middle_of_ordered(ordered: list[float]) -> float:
    """The lower median: the faster of two, so that where every second rank is slow the usual time is not a slow one."""
    return ordered[(len(ordered) - 1) // 2]
