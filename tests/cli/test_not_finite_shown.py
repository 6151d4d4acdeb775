"""Steps that were not finite, where people look: the run directory, status, the report page, the master, Prometheus."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from elastic_ext.agent.master.report import NodeReporter
from elastic_ext.cli import main
from elastic_ext.cli.master import status_words
from elastic_ext.master.address import MOST_BEAT_BYTES
from elastic_ext.master.metrics import exposition
from elastic_ext.master.node_metrics import fitting_worker
from elastic_ext.master.wire import as_dict, master_pb2
from elastic_ext.records.agent import WORKERS_FILE, Since, WorkerSeen, WorkersRecord
from elastic_ext.records.measures import words_of
from elastic_ext.report.load import find_places, gather
from elastic_ext.report.page import page
from tests.master.test_master_prometheus import parsed
from tests.training.gradients.test_finite_gradients import Run, at

pytestmark = pytest.mark.usefixtures("one_thread")


def in_words(number: int, num_skipped: int) -> str:
    return words_of("num_not_finite", {"num_not_finite": number, "num_skipped": num_skipped})


@pytest.fixture(params=["warn", "skip"])
def run_dir(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """A training of which two steps were not finite: committed, or left out."""
    run = Run(tmp_path, at(2, 3), when_not_finite=request.param)
    with run.trainer:
        run.take(4)
    return request.param, tmp_path / "0"


def test_the_status_of_a_run_says_how_many_there_were(
    run_dir: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    when, folder = run_dir
    status = main(["status", str(folder)])
    told = capsys.readouterr().out
    assert ("2 steps not finite" if when == "warn" else "2 steps not finite, 2 left out") in told
    trouble = "rank 0: 2 steps not finite; parameters may not be finite any more"
    assert (trouble in told) is (when == "warn") and status == (1 if when == "warn" else 0)
    assert "were not finite in the step after step 2" in told, "the event"
    main(["status", "--json", str(folder)])
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert (rank["num_not_finite"], rank["num_skipped"]) == (2, 0 if when == "warn" else 2)


def test_the_report_page_of_a_run_says_how_many_there_were_and_when(run_dir: tuple[str, Path]) -> None:
    when, folder = run_dir
    record = gather(find_places(folder), None, lambda num_bytes: None)
    skipped = 0 if when == "warn" else 2
    assert record.metrics == {"num_not_finite": 2, "num_skipped": skipped}
    told = record.to_dict()
    assert (told["steps_not_finite"], told["steps_skipped"]) == (2, skipped)
    (event,) = [each for each in record.happenings if each.kind == "not-finite"]
    assert (event.group, event.step, event.ranks) == ("numbers", 2, (0,))
    shown = page(record, made_at=time.time(), version="1.2.3")
    assert "Not finite" in shown and f"{skipped} left out, since the last start" in shown
    assert in_words(2, skipped) in shown and "mark-numbers" in shown


def test_the_report_page_of_a_run_without_any_says_nothing_of_it(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.trainer:
        run.take(3)
    record = gather(find_places(tmp_path / "0"), None, lambda num_bytes: None)
    assert record.metrics == {"num_not_finite": 0, "num_skipped": 0}
    assert "ot finite" not in page(record, made_at=time.time(), version="1.2.3")


def test_a_master_tells_people_and_prometheus_how_many_there_were(run_dir: tuple[str, Path]) -> None:
    when, folder = run_dir
    metrics = json.loads((folder / "metrics-0.json").read_text())
    worker = WorkerSeen(local_rank=0, rank=0, pid=metrics["pid"], start_ticks=1, state="running")
    record = WorkersRecord(time=time.time(), restart=0, membership_version=1, workers=(worker,))
    (folder / WORKERS_FILE).write_text(record.to_json())
    request = master_pb2.BeatRequest()
    NodeReporter(folder, since=Since(0.0)).fill(request, MOST_BEAT_BYTES)
    (sent,) = master_pb2.BeatRequest.FromString(request.SerializeToString()).workers
    skipped = 0 if when == "warn" else 2
    assert sent.metrics == {"num_not_finite": 2.0, "num_skipped": skipped}
    status = master_pb2.JobStatus(time=1.7e9, job="nano", epoch=1)
    node = master_pb2.Node(node_id="n0", host="host-0")
    status.nodes.add(node=node, state="live", workers=[fitting_worker(sent)])
    found = parsed(exposition(status))
    label = (("node", "n0"), ("rank", "0"))
    for name, number in (("not_finite", 2), ("skipped", skipped)):
        metric = found[f"elastic_ext_rank_steps_{name}_total"]
        assert (metric.kind, metric.series) == ("counter", {label: number})
    assert in_words(2, skipped) in status_words(status, "here:1")
    (told,) = as_dict(status)["nodes"][0]["workers"]
    assert (repr(told["num_not_finite"]), repr(told["num_skipped"])) == ("2", str(skipped)), "whole numbers, by name"


def test_a_number_that_cannot_be_is_not_kept_and_an_older_worker_says_none() -> None:
    worker = master_pb2.Worker(metrics={"num_not_finite": 2.0**60, "num_skipped": math.nan})
    assert not fitting_worker(worker).metrics
    status = master_pb2.JobStatus()
    status.nodes.add(node=master_pb2.Node(node_id="n0"), state="live", workers=[master_pb2.Worker(rank=0)])
    assert "not_finite" not in exposition(status)


@pytest.mark.parametrize(
    ("number", "num_skipped", "told"),
    [(1, 0, "1 step not finite"), (3, 0, "3 steps not finite"), (3, 2, "3 steps not finite, 2 left out")],
)
def test_how_many_in_words(number: int, num_skipped: int, told: str) -> None:
    assert in_words(number, num_skipped) == told
