"""NodeReport: the newest of what a node has told of its workers, in little memory and little time. Pure.

It is made for every beat of every node: what people are shown is only kept here, as it was sent, and made fit when it
is asked for; what is added up over the job is looked at once, here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

from elastic_ext.profile.phases import IN_STEPS, Phase

from .amounts import fitting_worker
from .wire import master_pb2

__all__ = ["MOST_WORKERS", "NodeReport", "report_of"]

MOST_WORKERS = 64
"""Of one node; of more than these nothing is kept."""
_MOST_BYTES = 640  # of a report as it was sent, before it is made fit
_OF_ITSELF, _OF_A_WORKER = 1600, 140
_MOST_RATE = 1e15
_MOST_COUNT = 2**53
_LABELS = tuple(phase.label for phase in Phase)
_NOTHING = (0.0,) * len(_LABELS)
_NUM_IN_STEPS = len(IN_STEPS)  # which come first
_FORWARD, _BACKWARD = int(Phase.FORWARD), int(Phase.BACKWARD)
_COMMUNICATION, _AGREEMENT, _STEP = int(Phase.COMMUNICATION), int(Phase.AGREEMENT), int(Phase.STEP)
_MOST_SUM = 1.1  # of all shares of a worker


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """What a node's workers do, as of ``time``, in seconds since 1970. Rates that are not known are NaN."""

    time: float
    host: str
    said: tuple[bytes, ...]
    """What each worker's report was, without its windows."""
    ranks: tuple[int, ...]
    local_seconds: tuple[float, ...]
    """What each worker is busy with by itself in a step; 0 where that is not known."""
    num_running: int
    step: int
    """The furthest; -1 where none is known."""
    step_seconds: float
    steps_per_second: float
    samples_per_second: float
    tokens_per_second: float
    config_version: int
    """The newest in force."""
    shares: tuple[float, ...]
    """Sums over workers, by the number of the phase,"""
    num_shared: int
    """... of which so many told them."""

    @property
    def num_bytes(self) -> int:
        """What is kept of it, about."""
        return _OF_ITSELF + sum(map(len, self.said)) + _OF_A_WORKER * len(self.said)

    @property
    def workers(self) -> list[master_pb2.Worker]:
        """What fits of each worker's report."""
        return [fitting_worker(master_pb2.Worker.FromString(each)) for each in self.said]


def report_of(time: float, host: str, workers: Sequence[master_pb2.Worker]) -> NodeReport:
    """What these workers, whose windows were taken out, say of their node."""
    said: list[bytes] = []
    ranks: list[int] = []
    local: list[float] = []
    lengths: list[float] = []
    steps: list[float] = []
    samples: list[float] = []
    tokens: list[float] = []
    shares = list(_NOTHING)
    step, num_running, config_version, num_shared = -1, 0, 0, 0
    for worker in workers:
        data = worker.SerializeToString()
        said.append(data if len(data) <= _MOST_BYTES else fitting_worker(worker).SerializeToString())
        ranks.append(worker.rank)
        seconds = worker.step_seconds  # of this and other numbers that are absent: 0
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
        steps.append(worker.steps_per_second)
        samples.append(worker.samples_per_second)
        tokens.append(worker.tokens_per_second)
    return NodeReport(
        time=time,
        host=host,
        said=tuple(said),
        ranks=tuple(ranks),
        local_seconds=tuple(local),
        num_running=num_running,
        step=step,
        step_seconds=_middle(lengths),
        steps_per_second=_middle(steps),
        samples_per_second=_middle(samples),
        tokens_per_second=_middle(tokens),
        config_version=config_version,
        shares=tuple(shares),
        num_shared=num_shared,
    )


def _local_seconds(step_seconds: float, row: Sequence[float]) -> float:
    """What a worker is busy with by itself in a step, by its shares; 0 where that is not known."""
    if row[_FORWARD] + row[_BACKWARD] <= 0 or not 0 < step_seconds <= _MOST_RATE:
        return 0.0
    return step_seconds * (1 - (row[_COMMUNICATION] + row[_AGREEMENT] + row[_STEP]) / sum(row[:_NUM_IN_STEPS]))


def _middle(values: list[float]) -> float:
    """The lower median of those that can be; NaN where none can."""
    known = sorted(each for each in values if 0 < each <= _MOST_RATE)
    return known[(len(known) - 1) // 2] if known else math.nan
