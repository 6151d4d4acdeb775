"""What is recorded of benchmarks: the files, their shape, the page that is made of them, and the plan of runs."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import known_benchmarks, main
from benchmarks.change_detector import DetectorTable, Found
from benchmarks.differences import Differences, DifferenceTable
from benchmarks.harness import Claim, Comparison, Finding, Machine, Result, Row, table
from benchmarks.master_load import LoadTable
from benchmarks.master_load import Row as Measure
from benchmarks.model_memory import ErrorTable, Point
from benchmarks.plan import PARTS, SHORT_SHARE, on_gpu, planned
from benchmarks.quantiles import QuantileTable, QuantileTarget, Samples
from benchmarks.rates import Rates, RateTable
from benchmarks.readme_numbers import README, lines_shown, with_numbers
from benchmarks.recording import (
    CommitError,
    Record,
    RecordError,
    as_json,
    commit_of,
    from_json,
    path_of,
    read_records,
    record_of,
    recorded_table,
    write_record,
)
from benchmarks.results_page import PAGE, docstrings, page_of
from benchmarks.tuning_live import Found as Tuned
from benchmarks.tuning_live import LiveTable
from benchmarks.tuning_search import Target, TuningTable
from benchmarks.verdicts import VerdictTable

ROOT = PAGE.parent.parent
MACHINE = Machine(num_cpus=2, cpu="Some Family (x86_64)", memory_bytes=8 * 2**30, accelerator=None)
COMMIT = "0123456789abcdef0123456789abcdef01234567"

COMPARISON = Comparison(
    title="A step",
    unit="seconds",
    num_rounds=9,
    rows=(
        Row(
            name="by hand",
            median=2.0,
            ratio=1.0,
            aa_interval=(0.98, 1.01),
            claim=None,
            verdict="none claimed",
            reason="",
        ),
        Row(
            name="a|b",
            median=1.0,
            ratio=0.512345,
            aa_interval=(0.98, 1.01),
            claim=Claim(at_most=0.6),
            verdict="pass",
            reason="0.512 is at most 0.600",
        ),
    ),
    notes=("two", "notes"),
)
DIFFERENCES = DifferenceTable(
    title="A micro-step",
    rows=(
        Differences(name="by hand", values=(1e-4, 1e-4, 1e-4), differences=(0.0, 0.0, 0.0)),
        Differences(name="ours", values=(1.2e-4,) * 3, differences=(2e-5,) * 3, at_most=1e-5),
    ),
    aa_interval=(-1e-6, 2e-6),
)
QUANTILES = QuantileTable(
    title="Latency",
    rows=(
        Samples(name="ours", occasions=[[0.001, 0.003]], target=QuantileTarget(quantile=1.0, at_most=0.002)),
        Samples(name="by hand", occasions=[[0.001]]),
    ),
)
RATES = RateTable(
    title="tiny samples",
    what="batches",
    rows=(
        Rates(name="torch's", values=(100.0,) * 3, ratios=(1.0,) * 3),
        Rates(name="ours", values=(110.0,) * 3, ratios=(1.1,) * 3, at_least=0.95),
    ),
    aa_interval=(0.99, 1.01),
)
DETECTORS = DetectorTable(
    title="Changes of pace",
    num_steps=20_000,
    rows=(
        Found(name="ours", num_alarms=0, delays=[[1], [1], [1]], most_alarms=0),
        Found(name="CUSUM", num_alarms=3, delays=[[1], [1], [1]]),
    ),
)
ERRORS = ErrorTable(
    heading="**Memory: GPT, on cpu**",
    points=[Point(size=1, true_bytes=100, worked_out=0.0, compared=-0.01, straight=0.2, by_phase=0.0)],
    most_error=0.02,
)
LOADS = LoadTable(
    title="200 nodes",
    rows=(
        Measure(
            name="until the last node has a config, p50", value=0.1, shown="100 ms", at_most=0.5, wanted="≤ 500 ms"
        ),
        Measure(name="... at most", value=0.7, shown="700 ms", at_most=0.5, wanted="≤ 500 ms"),
    ),
)
TUNING = TuningTable(
    title="Tuning",
    columns=["share of the best"],
    rows=[("stay", ["0.312"], []), ("ours", ["0.988"], [Target(name="share", found=0.988, at_least=0.9)])],
)
LIVE = LiveTable(
    found=[
        Tuned(
            name="balanced",
            start=1.0,
            best=2.0,
            tuned=1.9,
            best_config={"a": 1},
            tuned_config={"a": 1},
            num_configs=4,
            seconds=10.0,
            num_samples=9.0,
            reached_seconds=None,
            has_settled=True,
            num_probes=1,
            num_failures=0,
            tries_seconds=1.0,
        )
    ]
)
RESULTS: dict[str, Result] = {
    "comparison": COMPARISON,
    "differences": DIFFERENCES,
    "quantiles": QUANTILES,
    "rates": RATES,
    "detectors": DETECTORS,
    "errors": ERRORS,
    "loads": LOADS,
    "tuning": TUNING,
    "live": LIVE,
    "verdicts": VerdictTable(judged=()),
}


def recorded(*results: Result, accelerator: str | None = None, **changes: Any) -> Record:
    record = record_of(
        "trainer_steps",
        results,
        date="2031-02-03",
        commit=COMMIT,
        command="python -m benchmarks trainer_steps --record",
        form="whole",
        machine=dataclasses.replace(MACHINE, accelerator=accelerator),
        seconds=12.4,
    )
    return dataclasses.replace(record, **changes)


# ---- what is recorded of a table ----


@pytest.mark.parametrize("name", RESULTS)
def test_every_kind_of_table_is_recorded_cell_by_cell_and_comes_back(name: str) -> None:
    record = recorded(RESULTS[name])
    assert from_json(as_json(record), "a.json") == record
    (made,) = record.tables
    assert [len(made.columns)] * len(made.rows) == [len(row) for row in made.rows]
    assert made.findings and all(each.claim and each.value for each in made.findings)
    assert [each.verdict for each in made.findings if each.verdict != "none claimed"] == [
        verdict for verdict in RESULTS[name].verdicts if verdict != "none claimed"
    ]


def test_a_comparison_is_recorded_with_its_rounds_its_rows_and_its_claim() -> None:
    made = recorded_table(COMPARISON)
    assert (made.title, made.repeated, made.notes) == ("A step", "9 rounds", ("two", "notes"))
    assert made.rows[1][:2] == ("a|b", "1 s")
    assert made.findings == (
        Finding(
            claim="a|b takes at most 0.6 times what by hand takes",
            side="a|b",
            value="1 s",
            peer="by hand",
            peer_value="2 s",
            ratio=0.51235,
            aa_interval=(0.98, 1.01),
            target="≤ 0.6",
            verdict="pass",
            reason="0.512 is at most 0.600",
        ),
    )


def test_a_difference_is_recorded_in_microseconds_with_the_ratio_beside_it() -> None:
    (ours,) = DIFFERENCES.findings
    assert ours.claim == "ours takes at most 10.0 µs more than by hand"
    assert (ours.ratio, ours.aa_interval, ours.aa_unit, ours.verdict) == (1.2, (-1.0, 2.0), "µs", "fail")
    assert ours.difference == "+20.0 µs (+20.0 µs to +20.0 µs)"


def test_a_claim_of_the_largest_is_recorded_with_the_largest() -> None:
    ours, by_hand = QUANTILES.findings
    assert (ours.claim, ours.value) == ("ours: the largest is at most 2 ms", "largest 3 ms")
    assert (by_hand.claim, by_hand.value, by_hand.verdict) == ("by hand: the p50", "p50 1 ms", "none claimed")


def test_a_measure_that_goes_on_from_the_one_before_is_named_whole() -> None:
    assert [each.side for each in LOADS.findings] == [
        "until the last node has a config, p50",
        "until the last node has a config, at most",
    ]


def test_a_record_says_when_where_and_of_what() -> None:
    record = recorded(RATES)
    assert (record.num_cpus, record.cpu, record.memory, record.accelerator) == (
        2,
        "Some Family (x86_64)",
        "8 GiB",
        None,
    )
    assert (record.commit, record.commit_is, record.seconds) == (COMMIT, "measured", 12)
    assert set(record.versions) == {"python", "torch"}


def test_a_record_tells_the_versions_of_the_peers_that_its_tables_name() -> None:
    rows = tuple(dataclasses.replace(row, name="accelerate" if row.claim else row.name) for row in COMPARISON.rows)
    assert set(recorded(dataclasses.replace(COMPARISON, rows=rows)).versions) == {"python", "torch", "accelerate"}


# ---- files ----


def test_a_row_is_a_line_of_the_file_and_what_is_not_known_has_no_key() -> None:
    text = as_json(recorded(COMPARISON, seconds=None))
    assert '    ["by hand", "2 s", "1.000", "0.980 to 1.010", "", ""],\n' in text
    assert '    "two",\n    "notes"\n' in text
    assert "null" not in text and "seconds" not in json.loads(text)
    assert list(json.loads(text))[:3] == ["benchmark", "date", "commit"]


def test_a_run_takes_the_place_of_the_one_before_and_one_on_a_gpu_has_a_file_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    first, second = recorded(COMPARISON), recorded(COMPARISON, date="2031-02-04")
    on_one = recorded(COMPARISON, accelerator="A GPU")
    for record in (first, second, on_one):
        write_record(record, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["trainer_steps.gpu.json", "trainer_steps.json"]
    assert read_records(folder) == [on_one, second]


def _without_commit(values: dict[str, Any]) -> None:
    del values["commit"]


def _with_a_short_commit(values: dict[str, Any]) -> None:
    values["commit"] = "0123456"


def _with_a_strange_verdict(values: dict[str, Any]) -> None:
    values["tables"][0]["findings"][0]["verdict"] = "nearly"


def _with_a_ragged_row(values: dict[str, Any]) -> None:
    values["tables"][0]["rows"][0].append("")


def _with_a_strange_key(values: dict[str, Any]) -> None:
    values["tables"][0]["ratio"] = 1.0


def _with_another_date(values: dict[str, Any]) -> None:
    values["date"] = "yesterday"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_commit, "a.json is no record: .*commit"),
        (_with_a_short_commit, "commit is '0123456'"),
        (_with_a_strange_verdict, "nearly"),
        (_with_a_ragged_row, "has not 6 cells"),
        (_with_a_strange_key, "no record"),
        (_with_another_date, "date is 'yesterday'"),
    ],
)
def test_a_file_that_is_no_record_is_refused_by_name(change: Callable[[dict[str, Any]], None], message: str) -> None:
    values = json.loads(as_json(recorded(COMPARISON)))
    change(values)
    with pytest.raises(RecordError, match=message):
        from_json(json.dumps(values), "a.json")


def test_a_record_under_another_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "guard.json").write_text(as_json(recorded(COMPARISON)), encoding="utf-8")
    with pytest.raises(RecordError, match=r"guard\.json has a record of trainer_steps"):
        read_records(tmp_path)


def test_the_commit_of_a_clean_checkout_is_told_and_of_a_changed_one_refused(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "--quiet")
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "a.json").write_text("{}")
    (tmp_path / "code.py").write_text("1")
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    (results / "a.json").write_text("[]")
    assert commit_of(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "code.py").write_text("2")
    with pytest.raises(CommitError, match=r"code\.py; commit first"):
        commit_of(tmp_path)


def test_no_commit_can_be_told_where_there_is_no_git(tmp_path: Path) -> None:
    with pytest.raises(CommitError, match="name it: --commit"):
        commit_of(tmp_path)


# ---- what is in the repository ----


def test_what_is_recorded_has_the_shape_and_is_written_as_it_would_be_now() -> None:
    records = read_records()
    assert records
    benchmarks = known_benchmarks()
    for record in records:
        path = path_of(record)
        assert path.read_text(encoding="utf-8") == as_json(record), f"{path.name} was edited by hand"
        assert record.benchmark in benchmarks


def test_the_page_is_what_make_results_would_make() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_of(read_records(), docstrings()), "run make results"


def test_readme_has_the_numbers_that_make_results_would_put_in() -> None:
    page = README.read_text(encoding="utf-8")
    assert page == with_numbers(page, read_records()), "run make results"


def test_a_line_of_readme_that_names_no_recorded_claim_is_an_error() -> None:
    without = [record for record in read_records() if record.benchmark != "loader_switch"]
    with pytest.raises(AssertionError, match=r"loader_switch.* names 0 recorded claims"):
        lines_shown(without)


def test_every_line_of_the_page_names_its_date_and_commit() -> None:
    records = read_records()
    named = {f"| {each.date} | {each.commit[:10]}{'+' if each.commit_is == 'added' else ''} |" for each in records}
    lines = page_of(records, docstrings()).splitlines()
    verdicts = ("pass", "**fail**", "inconclusive", "none claimed")
    rows = [line for line in lines if any(f" | {verdict} | " in line for verdict in verdicts) and "| 20" in line]
    assert len(rows) > 100
    assert all(any(one in row for one in named) for row in rows)


def test_the_documents_say_that_nothing_ran_on_a_gpu_as_long_as_nothing_did() -> None:
    has_run = any(record.accelerator for record in read_records())
    for path in (README, ROOT / "docs" / "support.md", PAGE):
        says_none = "othing has run on" in path.read_text(encoding="utf-8")
        assert says_none is not has_run, path


def test_what_ran_on_a_gpu_is_told_with_its_name() -> None:
    on_one = recorded(COMPARISON, accelerator="Some GPU")
    page = page_of([recorded(COMPARISON), on_one], docstrings())
    assert "On a GPU: only what has a GPU's name below (Some GPU)." in page
    assert "**On Some GPU**, 2 processors" in page


def test_a_short_run_is_told_as_such() -> None:
    assert "A short run." in page_of([recorded(COMPARISON, form="short")], docstrings())


# ---- the plan ----


def test_every_benchmark_stands_in_the_plan_once() -> None:
    names = [each.name for each in planned()]
    assert sorted(names) == known_benchmarks()
    assert len({part.title for part in PARTS}) == len(PARTS)


def test_what_is_recorded_takes_less_than_an_hour_in_short() -> None:
    assert sum(each.short_minutes for each in planned()) < 60
    assert all(each.short_minutes <= each.minutes for each in planned())


@pytest.mark.parametrize("name", [each.name for each in planned()])
def test_a_benchmark_that_is_shorter_in_short_takes_a_share(name: str) -> None:
    (entry,) = [each for each in planned() if each.name == name]
    parameters = inspect.signature(importlib.import_module(f"benchmarks.{name}").main).parameters
    assert ("share" in parameters) == (entry.short_minutes < entry.minutes)
    assert 0 < SHORT_SHARE < 1


def test_what_needs_a_gpu_has_something_to_run_there() -> None:
    for name in known_benchmarks():
        has_some = hasattr(importlib.import_module(f"benchmarks.{name}"), "main_on_gpu")
        assert has_some == (name in on_gpu()), name


def test_the_command_tells_minutes_and_refuses_what_no_gpu_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--minutes", "--short", "guard", "launcher"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "together: about 8 min"
    assert main(["--gpu", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == on_gpu()
    with pytest.raises(SystemExit):
        main(["--gpu", "guard"])
    assert "nothing of guard needs a GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--record", "--commit", "0123456", "guard"])
    assert "--commit is '0123456'" in capsys.readouterr().err


def test_a_table_in_markdown_is_what_is_recorded_of_it() -> None:
    assert "| a\\|b | 1 s | 0.512 |" in table(COMPARISON)
