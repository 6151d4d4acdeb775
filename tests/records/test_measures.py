"""The table of metrics: another one is one row, and all that writes, sends, shows and documents metrics goes by it."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic_ext.master.metrics import exposition
from elastic_ext.master.node_metrics import fitting_worker
from elastic_ext.master.wire import as_dict, master_pb2, metrics_of
from elastic_ext.records.measures import METRICS, metric_table, parts_of, shown_in_words, words_of
from elastic_ext.records.metrics import RankMetrics
from tests.support.one_more_metric import ROWS

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path("elastic_ext/records/measures.py")
LONGEST_NAME = 32


def with_rows(source: str) -> str:
    """The table's source with more rows behind the last field of Measures."""
    (table,) = [each for each in ast.parse(source).body if isinstance(each, ast.ClassDef) and each.name == "Measures"]
    last = max(each.end_lineno or 0 for each in table.body if isinstance(each, ast.AnnAssign))
    lines = source.splitlines(keepends=True)
    return "".join([*lines[:last], ROWS, *lines[last:]])


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What a copy of the library tells of a training, in which nothing but the table was changed."""
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "elastic_ext", copy / "elastic_ext")  # with what is compiled of it, which stays valid
    (copy / TABLE).write_text(with_rows((ROOT / TABLE).read_text()))
    command = [sys.executable, "-m", "tests.support.one_more_metric", str(copy / "run")]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=copy, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_number_that_has_a_row_comes_to_the_ranks_file_and_the_nodes_status(told: Mapping[str, Any]) -> None:
    measures = told["file"]["measures"]
    assert (measures["num_odd"], measures["things_per_second"]) == (2, 7.5)
    (rank,) = told["status JSON"]["ranks"]
    assert (rank["num_odd"], rank["things_per_second"]) == (2, 7.5)
    assert "  2 steps odd  " in told["status"] and "  7.5 things/s  " in told["status"]
    assert "rank 0: 2 steps odd; odd steps were not wanted" in told["status JSON"]["troubles"]


def test_a_number_that_has_a_row_comes_to_the_master_and_prometheus(told: Mapping[str, Any]) -> None:
    (worker,) = told["master JSON"]["nodes"][0]["workers"]
    assert (repr(worker["num_odd"]), worker["things_per_second"]) == ("2", 7.5)
    assert told["master JSON"]["progress"]["things_per_second"] == 7.5
    assert "  2 steps odd" in told["master"] and "  7.5 things/s  " in told["master"]
    for lines in (
        "# HELP elastic_ext_rank_steps_odd_total Steps with an odd number.\n"
        "# TYPE elastic_ext_rank_steps_odd_total counter\n"
        'elastic_ext_rank_steps_odd_total{rank="0",node="n0"} 2\n',
        "# HELP elastic_ext_things_per_second Things of all ranks together, of late.\n"
        "# TYPE elastic_ext_things_per_second gauge\n"
        "elastic_ext_things_per_second 7.5\n",
    ):
        assert lines in told["prometheus"]


def test_a_number_that_has_a_row_comes_to_the_report_and_the_documents(told: Mapping[str, Any]) -> None:
    assert told["report JSON"]["steps_odd"] == told["report JSON"]["ranks"][0]["steps_odd"] == 2
    assert '<dt>Odd</dt><dd>2 steps<span class="small">since the last start</span></dd>' in told["page"]
    assert "<td>2 steps odd</td>" in told["page"]
    for row in (
        "| `measures.num_odd` | steps, since the run began | Steps with an odd number. "
        "| `elastic_ext_rank_steps_odd_total` |\n",
        "| `measures.things_per_second` | things/s | Things of all ranks together, of late. "
        "| `elastic_ext_things_per_second` |\n",
    ):
        assert row in told["table"]


def test_numbers_that_the_script_logs_come_to_all_places_that_show_metrics(told: Mapping[str, Any]) -> None:
    logged = {"loss": 0.75, "drift": "NaN"}
    assert told["file"]["measures"]["logged"]["loss"] == 0.75
    assert told["status JSON"]["logged"] == told["status JSON"]["ranks"][0]["logged"] == logged
    assert "  logged         loss 0.75, drift nan\n" in told["status"]
    assert told["master JSON"]["progress"]["logged"] == logged
    assert told["master JSON"]["nodes"][0]["workers"][0]["logged"] == logged
    assert not [name for name in told["master JSON"]["progress"] if name.startswith("logged.")]
    assert "  logged         drift nan, loss 0.75; means of all ranks\n" in told["master"]
    assert (
        "# HELP elastic_ext_logged The numbers that the script gives to trainer.log(), by name: the mean over ranks.\n"
        "# TYPE elastic_ext_logged gauge\n"
        'elastic_ext_logged{name="drift"} NaN\n'
        'elastic_ext_logged{name="loss"} 0.75\n'
    ) in told["prometheus"]
    assert told["report JSON"]["logged"]["loss"]["last"] == pytest.approx(0.75)
    assert told["report JSON"]["logged"]["drift"]["last"] == "NaN"
    assert "Logged: loss" in told["page"] and 'id="logged-' in told["page"]


NAMING: Mapping[str, Mapping[str, str]] = {
    "num_skipped": {
        "elastic_ext/records/measures.py": "its row",
        "elastic_ext/training/gradients/finite.py": "what measures it",
        "elastic_ext/data/sources.py": "batches that a loader passes over, which are called so too",
        "docs/trainer.md": "what to do about it",
    },
    "accelerator_peak_bytes": {
        "elastic_ext/records/measures.py": "its row",
        "elastic_ext/records/metrics.py": "the field of a window, with how it is added up",
        "elastic_ext/profile/windows.py": "what measures it",
        "elastic_ext/profile/summary.py": "StepProfile, which is public",
        "elastic_ext/profile/output.py": "the curve in TensorBoard",
        "elastic_ext/report/record.py": "the curve on the report page",
        "elastic_ext/master/observations.py": "the tuner, which decides by it",
        "elastic_ext/master/wire/master.proto": "the tuner's wire",
        "elastic_ext/master/wire/master_pb2.pyi": "made from that",
        "docs/profile.md": "the fields of a window",
    },
}
"""The files that name a metric, and why: its row, what measures it, and besides those alone that use its meaning."""


@pytest.mark.parametrize("name", NAMING)
def test_a_metric_is_named_by_its_row_and_by_what_measures_or_means_it_alone(name: str) -> None:
    files = [path for folder in ("elastic_ext", "docs") for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = {path: path.read_bytes() for path in files if "__pycache__" not in path.parts}
    word = re.compile(rb"(?<![\w\\])%s\b" % name.encode())
    assert {str(path.relative_to(ROOT)) for path, text in texts.items() if word.search(text)} == NAMING[name].keys()


# ---- the rows ----


def test_rows_go_together() -> None:
    for name, metric in METRICS.items():
        assert len(name) <= LONGEST_NAME and name.isidentifier()
        assert metric.meaning[0].isupper() and metric.meaning.endswith(".")
        assert not metric.is_told or metric.unit is not None or name in ("shares", "logged")
        assert not metric.on_page or (metric.prometheus and metric.words and metric.is_told)
        assert not metric.in_status or metric.is_told
        assert not (metric.trouble or metric.part_of) or metric.over_steps == "total"
        assert not metric.part_of or not METRICS[metric.part_of].part_of
    series = [(metric.full_name, *metric.labels.items()) for metric in METRICS.values() if metric.prometheus]
    assert len(set(series)) == len(series)
    assert parts_of("num_not_finite") == ["num_skipped"] and parts_of("num_skipped") == []


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("steps_per_second", 2.5, "2.5 steps/s"),
        ("memory_bytes", 1 << 30, "1.00 GiB"),
        ("memory_bytes", 0, "0 B"),
        ("accelerator_bytes", 3 << 20, "3.00 MiB on its accelerator"),
        ("num_not_finite", 1, "1 step not finite"),
        ("num_not_finite", 0, ""),
        ("num_not_finite", None, ""),
        ("waits_in_passes", True, ""),
    ],
)
def test_a_metric_in_words(name: str, value: object, words: str) -> None:
    assert words_of(name, {name: value}) == words


def test_a_row_of_a_status_has_a_cell_for_each_metric_that_it_shows() -> None:
    assert shown_in_words({"memory_bytes": 1}, "last") == ["", "1 B", ""]
    assert shown_in_words({"num_not_finite": 3, "num_skipped": 2}, "total") == ["3 steps not finite, 2 left out"]


def test_the_documents_have_the_table_where_a_page_names_it() -> None:
    with_tables = runpy.run_path(str(ROOT / "docs" / "conf.py"))["with_tables"]
    page = (ROOT / "docs" / "trainer.md").read_text()
    assert metric_table() not in page and metric_table() in with_tables(page)
    assert with_tables("no <!-- comment --> is changed") == "no <!-- comment --> is changed"


# ---- files and peers of other versions ----


def test_metrics_that_an_earlier_commit_has_written_are_read() -> None:
    measures = RankMetrics.from_json((ROOT / "tests" / "saved" / "run" / "metrics-0.json").read_text()).measures
    assert (measures.memory_bytes, measures.num_replicas, measures.waits_in_passes) == (339107840, 2, True)
    assert (measures.accelerator_bytes, measures.num_not_finite, measures.num_skipped) == (None, 0, 0)


def test_a_master_leaves_out_metrics_that_it_does_not_know() -> None:
    sent = master_pb2.Worker(rank=1, state="running", metrics={"num_new": 3.0, "num_skipped": 1.0, "step": 9.0})
    kept = fitting_worker(master_pb2.Worker.FromString(sent.SerializeToString()))
    assert kept.metrics == {"num_skipped": 1.0} and not kept.HasField("step")


def test_metrics_of_a_newer_master_stand_in_json_and_nowhere_else() -> None:
    worker = master_pb2.Worker(rank=1, step=2, metrics={"num_new": 3.5, "num_skipped": 1.0, "step": 9.0})
    found = as_dict(worker)
    assert (found["num_new"], found["num_skipped"], found["num_not_finite"], found["step"]) == (3.5, 1, None, 2)
    assert "metrics" not in found
    assert "things" not in as_dict(master_pb2.Progress()) and "metrics" not in as_dict(master_pb2.Progress())
    status = master_pb2.JobStatus()
    status.nodes.add(node=master_pb2.Node(node_id="n0"), state="live", workers=[worker])
    assert "num_new" not in exposition(status) and "3.5" not in exposition(status)


def test_an_earlier_node_or_master_tells_of_no_metrics_in_the_map() -> None:
    as_field_23_was = b"\xb8\x01\x02"
    worker = master_pb2.Worker.FromString(
        master_pb2.Worker(rank=1, memory_bytes=5).SerializeToString() + as_field_23_was
    )
    assert metrics_of(worker) == {"memory_bytes": 5}
