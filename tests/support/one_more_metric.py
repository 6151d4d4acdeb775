"""A training that measures two metrics more than the library knows, and logs numbers of its own, followed to all places
that show metrics.

Run by ``python -m`` where ``elastic_ext`` is a copy whose table of metrics has their rows; it prints JSON.
"""

from __future__ import annotations

import json
import math
import socket
import sys
import time
from pathlib import Path

from elastic_ext.agent.master.report import NodeReporter
from elastic_ext.agent.status.files import read_run_directory
from elastic_ext.agent.status.status import status_of
from elastic_ext.agent.status.text import words
from elastic_ext.cli.master import status_words
from elastic_ext.master.address import MOST_BEAT_BYTES
from elastic_ext.master.collector import Collector
from elastic_ext.master.metrics import exposition
from elastic_ext.master.wire import as_dict, master_pb2
from elastic_ext.records.agent import WORKERS_FILE, Since, WorkerSeen, WorkersRecord
from elastic_ext.records.measures import metric_table
from elastic_ext.report.load import find_places, gather
from elastic_ext.report.page import page
from tests.training.gradients.test_finite_gradients import Run

__all__ = ["ROWS"]

ROWS = """
    num_odd: int | None = _row(
        Metric(
            "Steps with an odd number.",
            _STEPS,
            over_steps="total",
            over_ranks="most",
            prometheus="steps_odd",
            words="odd",
            in_status=True,
            on_page=True,
            trouble="odd steps were not wanted",
        )
    )
    things_per_second: float | None = _row(
        Metric(
            "Things of all ranks together, of late.",
            _rate("things/s", 1e6),
            over_ranks="middle",
            prometheus="things_per_second",
            in_status=True,
        )
    )
"""
"""Of the two: one is added up and told of each rank, one is a rate of the whole job."""


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir()
    run = Run(folder)
    with run.trainer:
        for number in range(4):
            run.take(1)
            measured = run.trainer._counts.measured
            measured["num_odd"] += number % 2
            measured["things_per_second"] = 7.5
            run.trainer.log(loss=0.5 * number, drift=math.nan)
    folder /= "0"
    found: dict[str, object] = {"file": json.loads((folder / "metrics-0.json").read_text())}
    local = status_of(read_run_directory(folder, now=time.time(), host=socket.gethostname()))
    found |= {"status": words(local), "status JSON": local.to_dict()}
    record = gather(find_places(folder), None, lambda num_bytes: None)
    found |= {"page": page(record, made_at=time.time(), version="1.2.3"), "report JSON": record.to_dict()}
    found |= {"table": metric_table(), **told_by_a_master(folder)}
    json.dump(found, sys.stdout)


def told_by_a_master(folder: Path) -> dict[str, object]:
    """What a master tells that hears of the run directory by one beat."""
    pid = json.loads((folder / "metrics-0.json").read_text())["pid"]
    worker = WorkerSeen(local_rank=0, rank=0, pid=pid, start_ticks=1, state="running")
    seen = WorkersRecord(time=time.time(), restart=0, membership_version=1, workers=(worker,))
    (folder / WORKERS_FILE).write_text(seen.to_json())
    request = master_pb2.BeatRequest()
    NodeReporter(folder, since=Since(0.0)).fill(request, MOST_BEAT_BYTES)
    beat = master_pb2.BeatRequest.FromString(request.SerializeToString())
    collector = Collector()
    collector.take(1.7e9, "n0", beat.workers, host="h")
    status = master_pb2.JobStatus(time=1.7e9, epoch=1, progress=collector.progress(1.7e9))
    status.nodes.add(node=master_pb2.Node(node_id="n0"), state="live", workers=collector.workers("n0"))
    status = master_pb2.JobStatus.FromString(status.SerializeToString())
    return {
        "master": status_words(status, "here:1"),
        "master JSON": as_dict(status),
        "prometheus": exposition(status),
    }


if __name__ == "__main__":
    main()
