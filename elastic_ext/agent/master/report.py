"""NodeReporter: a node's report for its master, made from the files of its run directory: its workers' progress and
profile windows, the membership of the job, and the machine's hardware.

Nothing here writes these files. Records of an earlier agent in the same directory are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from elastic_ext.master.wire import filled, put_logged, put_metrics, window_message
from elastic_ext.master.wire import master_pb2 as pb
from elastic_ext.members.plan import MembershipPlan
from elastic_ext.profile.reader import tails_of
from elastic_ext.ranks.processes import process_of
from elastic_ext.records.agent import (
    HARDWARE_FILE,
    MEMBERSHIP_FILE,
    MOST_BYTES,
    WORKERS_FILE,
    Since,
    WorkerSeen,
    WorkersRecord,
)
from elastic_ext.records.files import read_at_most
from elastic_ext.records.metrics import FILE as JOB_FILE
from elastic_ext.records.metrics import JobEvent, JobFacts, RankMetrics, StepWindow

__all__ = ["NodeReporter", "event_message", "wire_text"]

_MOST_METRICS_BYTES = 64 << 10
_MOST_HARDWARE_BYTES = _MOST_FACTS_BYTES = 256 << 10
_MOST_WINDOWS = 512
"""The most profile windows of all workers of a node in one message."""
_MOST_WINDOWS_OF_RANK = 16
_MOST_TEXT = 2000
_MOST_WORD = 200
_MOST_DETAILS = 4000
_Record = TypeVar("_Record")


class NodeReporter:
    """Puts into each beat what the master does not have yet of one node; ``since`` is when the agent was started."""

    def __init__(self, run_dir: Path, *, since: Since) -> None:
        self._run_dir = run_dir
        self._began = since
        self._known_plan = self._told_plan = 0
        self._known_hardware = self._told_hardware = ""
        self._known_facts = self._told_facts = ""
        self._known_windows: dict[int, float] = {}  # rank -> when the last one has ended that the master has
        self._told_windows: dict[int, float] = {}

    def hardware(self) -> str:
        """The machine's hardware record as JSON; empty where it is not written yet."""
        data = self._data(HARDWARE_FILE, _MOST_HARDWARE_BYTES)
        return "" if data is None else data.decode(errors="replace")

    def fill(self, request: pb.BeatRequest, most_bytes: int) -> None:
        """Put into ``request`` what the master does not have yet, so that it has no more than ``most_bytes``.

        What has no room comes with a later request.
        """
        self._told_plan, self._told_hardware = self._known_plan, self._known_hardware  # none of them is in it yet
        self._told_facts, self._told_windows = self._known_facts, {}
        record = self._record(WORKERS_FILE, MOST_BYTES, WorkersRecord.from_json)
        if record is not None and record.time >= self._began.seconds:
            told = pb.BeatRequest(workers=self._workers(record))
            if not _merged(request, told, most_bytes):
                self._told_windows = {}
                for each in told.workers:
                    each.ClearField("windows")
                _merged(request, told, most_bytes)
            if any(each.rank == 0 for each in record.workers):
                facts = self._facts(record.restart)
                if facts and facts != self._known_facts and _merged(request, pb.BeatRequest(facts=facts), most_bytes):
                    self._told_facts = facts
        plan = self._record(MEMBERSHIP_FILE, MOST_BYTES, MembershipPlan.from_json)
        is_news = plan is not None and plan.time >= self._began.seconds and plan.version != self._known_plan
        if plan is not None and is_news:
            told = pb.BeatRequest(membership=_membership_message(plan))
            self._told_plan = plan.version if _merged(request, told, most_bytes) else self._known_plan
        hardware = self.hardware()
        if hardware != self._known_hardware and _merged(request, pb.BeatRequest(hardware=hardware), most_bytes):
            self._told_hardware = hardware

    def confirm(self) -> None:
        """Count as known to the master what ``fill`` put into the last request."""
        self._known_plan, self._known_hardware = self._told_plan, self._told_hardware
        self._known_facts = self._told_facts
        self._known_windows.update(self._told_windows)

    def forget(self) -> None:
        """Report everything again, as to a master that may not know this node; but not windows that a master had."""
        self._known_plan = self._told_plan = 0
        self._known_hardware = self._told_hardware = ""
        self._known_facts = self._told_facts = ""

    def forget_hardware(self) -> bool:
        """Report the hardware again, as the master asks for it; whether that is hardware it was not told before."""
        is_new = self.hardware() != self._known_hardware
        self._known_hardware = self._told_hardware = ""
        return is_new

    def _facts(self, restart: int) -> str:
        """The job's facts (JobFacts) as rank 0, of this node, wrote them, as JSON; empty if an earlier process did."""
        data = self._data(JOB_FILE, _MOST_FACTS_BYTES)
        text = "" if data is None else data.decode(errors="replace").strip()
        if text == self._known_facts:
            return text
        try:
            facts = JobFacts.from_json(text)
        except ValueError:
            return ""
        return text if facts.time >= self._began.seconds and facts.restart == restart else ""

    # ---- workers ----

    def _workers(self, record: WorkersRecord) -> list[pb.Worker]:
        windows = self._new_windows([_seat_of(each) for each in record.workers])
        found = (
            _worker_message(each, self._metrics_of(each, record.restart), windows.get(each.rank, ()))
            for each in record.workers
        )
        return [each for each in found if each is not None]

    def _new_windows(self, seats: Sequence[int]) -> Mapping[int, Sequence[StepWindow]]:
        """The profile windows of each rank that the master does not have yet; of too many the newest."""
        most = max(min(_MOST_WINDOWS_OF_RANK, _MOST_WINDOWS // max(len(seats), 1)), 1)
        found = {}
        for rank, windows in tails_of(self._run_dir, seats, most).items():
            ends = [each.end for each in windows]
            known = self._known_windows.get(rank)
            first = ends.index(known) + 1 if known in ends else 0  # in the order in which they were written
            found[rank] = [each for each in windows[first:] if each.end > self._began.seconds]
        self._told_windows = {rank: windows[-1].end for rank, windows in found.items() if windows}
        return found

    def _metrics_of(self, worker: WorkerSeen, restart: int) -> RankMetrics | None:
        """The metrics that a worker has written; None where an earlier process in its seat wrote them."""
        metrics = self._record(f"metrics-{_seat_of(worker)}.json", _MOST_METRICS_BYTES, RankMetrics.from_json)
        if metrics is None or metrics.generation != restart or metrics.time < self._began.seconds:
            return None
        is_its = metrics.pid == worker.pid or (0 < metrics.pid < 1 << 31 and process_of(metrics.pid) is not None)
        return metrics if is_its else None

    # ---- files ----

    def _record(self, name: str, most_bytes: int, parse: Callable[[str], _Record]) -> _Record | None:
        data = self._data(name, most_bytes)
        try:
            return None if data is None else parse(data.decode())
        except ValueError:
            return None

    def _data(self, name: str, most_bytes: int) -> bytes | None:
        try:
            data = read_at_most(self._run_dir / name, most_bytes)
        except OSError:
            return None
        return data if len(data) <= most_bytes else None


def event_message(event: JobEvent, node_id: str) -> pb.JobEvent:
    """The protobuf message of an event, its texts cut to the lengths that a master takes."""
    try:
        return pb.JobEvent(
            time=event.time,
            node_id=node_id,
            rank=event.rank,
            step=event.step,
            kind=wire_text(event.kind, _MOST_WORD),
            text=wire_text(event.text, _MOST_TEXT),
            details=_details(event),
            restart=event.generation,
        )
    except ValueError:  # a number in it is none that can be sent
        text = f"an event cannot be sent: {wire_text(event.text, _MOST_TEXT)}"
        return pb.JobEvent(node_id=node_id, rank=-1, step=-1, kind=wire_text(event.kind, _MOST_WORD), text=text)


def wire_text(text: str, most: int = _MOST_TEXT) -> str:
    """``text`` as protobuf allows it, not longer than ``most`` characters."""
    return text[:most].encode(errors="replace").decode()


def _merged(request: pb.BeatRequest, more: pb.BeatRequest, most_bytes: int) -> bool:
    """Merge ``more`` into ``request`` if the sum has no more than ``most_bytes``; whether it was merged."""
    if request.ByteSize() + more.ByteSize() > most_bytes:
        return False
    request.MergeFrom(more)
    return True


def _details(event: JobEvent) -> str:
    text = json.dumps(dict(event.details))
    return text if len(text) <= _MOST_DETAILS else "{}"


def _membership_message(plan: MembershipPlan) -> pb.Membership:
    message = pb.Membership(version=plan.version, reason=wire_text(plan.reason), time=plan.time)
    message.nodes.extend(
        pb.NodeShare(
            node_id=wire_text(each.node_id),
            host=wire_text(each.host),
            first_rank=each.first_rank,
            num_workers=each.num_workers,
        )
        for each in plan.nodes
    )
    return message


def _seat_of(worker: WorkerSeen) -> int:
    return worker.rank if worker.seat is None else worker.seat


def _worker_message(worker: WorkerSeen, metrics: RankMetrics | None, windows: Sequence[StepWindow]) -> pb.Worker | None:
    """The message of one worker: what its agent has observed, else what the worker has written; None if unsendable."""
    message = pb.Worker()
    try:
        if metrics is not None:
            put_metrics(message, metrics.measures.at_rate(worker.steps_per_second).told())
            put_logged(message, metrics.measures.logged)
            message.shares.update(metrics.measures.shares)
            message.step, message.config_version = metrics.step, metrics.config_version
            message.config_revision = metrics.config_revision
        filled(message, worker)
        if worker.gpu_memory_bytes is not None:
            message.accelerator_bytes = worker.gpu_memory_bytes
        message.windows.extend(window_message(each) for each in windows)
    except ValueError:  # a number that is too large, as in a damaged file
        return None
    return message
