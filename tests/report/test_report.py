"""elastic-ext report: what is read of a run directory, what stands on the page, and where the page goes."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.cli import main
from elastic_ext.profile.ledger import ENTRIES, TimeUse
from elastic_ext.records.measures import Measures
from elastic_ext.records.metrics import RankMetrics
from elastic_ext.records.run_dir import RunDirectory
from elastic_ext.report.axes import AmountScale, TimeScale, nice_ends, nice_top
from elastic_ext.report.events import Period, Quartiles
from elastic_ext.report.load import Broken, events_in, find_places, gather, windows_in
from elastic_ext.report.markup import amount, elapsed_in_words, number, percent, seconds_in_words, tag, text
from elastic_ext.report.page import MARK, page, summary
from elastic_ext.report.record import Bins, Remark, RunRecord
from tests.support.profiles import calibration, census
from tests.support.run_profiles import (
    START,
    agent_event,
    event,
    first_window,
    life,
    window,
    write_events,
    write_job,
    write_windows,
)

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x00\x1b[31m\ud800]]>{}<!--"


def gathered(folder: Path, training: int | None = None) -> RunRecord:
    return gather(find_places(folder), training, lambda num_bytes: None)


def shown(record: RunRecord) -> str:
    return page(record, made_at=START, version="1.2.3")


def test_how_many_ranks_there_were_is_told_with_why_others_came_or_left(tmp_path: Path) -> None:
    sizes = {0: 2, 100: 3, 200: 3, 300: 1}
    windows = [first_window(START, 5.0)]
    for place, (begin, size) in enumerate(sizes.items(), start=1):
        windows.append(
            window(START + 5 + begin, {"step": 99.0, "membership": 1.0}, step=9 * place, num_steps=9, world_size=size)
        )
    write_windows(tmp_path, 0, windows)
    joined, left = "membership 2 at step 9: node-b joins; 3 ranks", "membership 3: node-b left or was lost"
    write_events(tmp_path, "0", [event(START + 105.5, "members-changed", joined, step=9)])
    write_events(tmp_path, "agent", [agent_event(START + 300, "membership", left)])
    record = gathered(tmp_path)
    assert [(each.begin - START, each.end - START, each.num_ranks, each.text) for each in record.worlds] == [
        (5, 105, 2, ""),
        (105, 305, 3, joined),
        (305, 405, 1, left),
    ]
    assert record.ledger.seconds[TimeUse.MEMBERSHIP] == pytest.approx(4.0)
    assert [each.group for each in record.happenings] == ["membership", "membership"]
    checked = check_page(shown(record))
    assert "Numbers of ranks" in checked.words and "Ranks that train together" in checked.words
    assert joined in checked.words and left in checked.words
    assert [each["ranks"] for each in record.to_dict()["worlds"]] == [2, 3, 1]  # type: ignore[attr-defined]


# --- pages ----------------------------------------------------------------------------------------------------------


class Checked(HTMLParser):
    """A page, in which every element is closed in its turn and nothing is fetched."""

    VOID = frozenset(("meta", "br", "col", "rect", "line", "path", "circle", "polygon"))

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.scripts = 0
        self.words = ""
        self.feed(source)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert not {"src", "href", "action", "srcset"} & set(given), (tag, attrs)
        assert not any(name.startswith("on") for name in given), (tag, attrs)
        assert tag not in ("img", "link", "iframe", "object", "form", "use", "image")
        self.scripts += tag == "script"
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def drawings(source: str) -> Iterator[ElementTree.Element]:
    """Every drawing, read as XML."""
    for found in re.findall(r"<svg\b.*?</svg>", source, re.DOTALL):
        yield ElementTree.fromstring(found)


def check_page(source: str) -> Checked:
    found = Checked(source)
    assert found.scripts == 2  # what is shown, and what shows it
    names = set()
    for drawing in drawings(source):
        assert "nan" not in ElementTree.tostring(drawing, encoding="unicode").lower().replace("nano", "")
        if drawing.get("aria-hidden") != "true":
            children = {child.tag.rpartition("}")[2]: child.text for child in drawing}
            assert children["title"] and children["desc"]
            names.add(drawing.get("id"))
    assert {"stack", "bar", "lanes"} <= names
    outside = re.findall(r"(?:https?:)?//[\w.]+", source.replace("http://www.w3.org/2000/svg", ""))
    assert outside == []
    columns = json.loads(re.findall(r'id="columns">(.*?)</script>', source, re.DOTALL)[0])
    assert all(0 <= begin <= end <= 1 for begin, end, _ in columns["columns"])
    return found


@pytest.mark.parametrize(
    ("num_ranks", "seconds"), [(1, 1.0), (1, 60.0), (2, 3600.0), (40, 120.0)], ids=lambda each: str(each)
)
def test_page_is_whole_for_short_and_long_runs_of_few_and_many_ranks(
    tmp_path: Path, num_ranks: int, seconds: float
) -> None:
    write_job(tmp_path, num_ranks, seconds)
    record = gathered(tmp_path)
    source = shown(record)
    assert len(source) < 2_000_000
    words = check_page(source).words
    assert percent(record.ledger.goodput) in words and "rank 1 ended by SIGKILL" in words
    assert math.isclose(sum(record.ledger.seconds.values()), record.ledger.wall_seconds, abs_tol=1e-6)
    assert math.isclose(record.ledger.wall_seconds, seconds, rel_tol=0.01)
    assert record.num_restarts == 1 and record.num_failures == 1


@pytest.mark.parametrize("num_ranks", [100, pytest.param(300, marks=pytest.mark.slow)])
def test_page_of_many_ranks_stays_small(tmp_path: Path, num_ranks: int) -> None:
    for rank in range(num_ranks):
        write_windows(tmp_path, rank, list(life(START, START + 40.0, rank=rank, num_ranks=num_ranks)))
    source = shown(gathered(tmp_path))
    assert len(source) < 2_000_000
    words = check_page(source).words
    assert f"and {num_ranks - 64} ranks that are less busy" in words


def test_page_of_thousands_of_configs_and_events_stays_small(tmp_path: Path) -> None:
    changes = {START + 10.0 + each: each for each in range(3000)}
    write_windows(tmp_path, 0, list(life(START, START + 3100.0, changes=changes)))
    told = "optimizer.learning_rate changes " * 20
    events = [
        event(moment, "config-applied", f"{version} {told}", version=version, revision=0)
        for moment, version in changes.items()
    ]
    write_events(tmp_path, "0", events + [event(START + each / 4, "out-of-memory", told) for each in range(9000)])
    record = gathered(tmp_path)
    assert len(record.periods) > 1000 and len(record.happenings) == 12_000
    source = shown(record)
    assert len(source) < 2_000_000
    assert "more, which elastic-ext report --json has" in check_page(source).words


def test_slow_rank_stands_out_in_local_busy_time(tmp_path: Path) -> None:
    write_job(tmp_path, 8, 600.0, slow_rank=5)
    record = gathered(tmp_path)
    busy = {each.rank: each.busy_seconds.middle for each in record.ranks if each.busy_seconds}
    assert max(busy, key=busy.__getitem__) == 5
    source = shown(record)
    table = source[source.index('aria-label="Ranks"') :]
    assert re.findall(r'<th scope="row">(\d+)</th>', table)[0] == "5"
    busy_map = next(each for each in drawings(source) if each.get("id") == "busy-map")
    colours = {each.get("class") for each in busy_map.iter() if each.get("class")}
    assert {"apart-4", "apart-7"} <= colours


def test_everything_that_people_write_is_escaped(tmp_path: Path) -> None:
    write_windows(tmp_path, 0, list(life(START, START + 60.0, changes={START + 20.0: 1, START + 40.0: 2})))
    hostile = HOSTILE.replace("\ud800", "")  # which no file can hold
    write_events(
        tmp_path,
        "0",
        [
            event(START + 20.0, "config-applied", hostile, step=3, version=1, revision=0),
            event(START + 30.0, hostile, hostile),
        ],
    )
    write_events(tmp_path, "agent", [agent_event(START + 1.0, "worker-failed", hostile)])
    (tmp_path / "agent.json").write_text(json.dumps({"job": HOSTILE}))
    record = gathered(tmp_path)
    remark = Remark(START + 10.0, START + 50.0, HOSTILE, HOSTILE)
    found = check_page(shown(replaced(record, remark)))
    assert found.words.count("alert(1)") >= 6


def replaced(record: RunRecord, *remarks: Remark) -> RunRecord:
    return replace(record, remarks=remarks)


def test_verdicts_have_their_place_in_words_and_over_time(tmp_path: Path) -> None:
    write_job(tmp_path, 2, 600.0)
    record = gathered(tmp_path)
    assert "What holds training up" not in shown(replace(record, remarks=()))
    source = shown(replaced(record, Remark(START + 60.0, START + 300.0, "data", "41% waits for samples")))
    assert "data (1 min to 5 min): 41% waits for samples" in check_page(source).words


def test_each_config_has_a_verdict_on_all_ranks(tmp_path: Path) -> None:
    step = {"data": 0.6, "forward": 0.2, "backward": 0.2}
    for rank in range(2):
        rows = [first_window(START, 5.0, rank=rank)]
        for index in range(20):
            version, phases = (1, step) if index < 10 else (2, {**step, "data": 0.01})
            begin = rows[-1].end
            rows.append(
                window(begin, phases, step=10 * (index + 1), num_steps=10, rank=rank, version=version, world_size=2)
            )
        write_windows(tmp_path, rank, rows)
    remarks = gathered(tmp_path).remarks
    assert [each.kind for each in remarks] == ["data", "busy"]
    assert "data-bound: 60% of training's time goes to waiting for samples on all ranks" in remarks[0].text
    assert [each.text.rpartition(" (")[2] for each in remarks] == [
        "over steps 1 to 100, 10 s)",
        "over steps 101 to 200, 4 s)",
    ]
    assert remarks[0].begin == pytest.approx(START + 5.0) and remarks[0].end == pytest.approx(START + 15.0)
    assert "data-bound" in check_page(shown(gathered(tmp_path))).words


def write_arithmetic(folder: Path, num_ranks: int, *, host: str = "node") -> None:
    """Two configs of ten seconds each, under the second of which models are given twice as much."""
    for rank in range(num_ranks):
        rows = [first_window(START, 5.0, rank=rank)]
        for index in range(20):
            given = {"version": 1 + index // 10, "world_size": num_ranks, "num_samples": 160 * num_ranks}
            phases = {"forward": 0.5, "backward": 0.3, "checkpoint": 0.2}
            row = window(rows[-1].end, phases, step=10 * (index + 1), num_steps=10, rank=rank, **given)  # type: ignore[arg-type]
            larger = 1 + index // 10
            rows.append(replace(row, num_samples=row.num_samples * larger, num_tokens=40_000 * larger, num_detailed=5))
        write_windows(folder, rank, rows)
        directory = RunDirectory(folder, seat=rank)
        directory.write_census(census(num_flops=10**9))  # of 16 samples
        metrics = RankMetrics(
            time=START, job="made", generation=0, rank=rank, world_size=num_ranks, host=host, pid=1, step=200,
            config_version=2, config_revision=0, agree_every_steps=1, measures=Measures(num_replicas=num_ranks),
        )  # fmt: skip
        directory.write_metrics(metrics)
    RunDirectory(folder, seat=0).write_calibration(calibration())


def test_tokens_and_arithmetic_are_told_as_the_log_tells_them(tmp_path: Path) -> None:
    write_arithmetic(tmp_path, 2)
    record = gathered(tmp_path)
    assert record.tokens_per_second is not None
    assert record.mfu is not None
    tokens = [each.tokens_per_second.middle for each in record.periods if each.tokens_per_second]
    assert tokens == pytest.approx([160_000.0, 320_000.0]), "of both ranks, and of the steps that were not measured"
    shares = [each.mfu.middle for each in record.periods if each.mfu]
    assert shares == pytest.approx([0.1, 0.2]), "10 GFLOP of a rank in a second, checkpoints included, of 100 GFLOP/s"
    assert [each.mfu.high for each in record.ranks if each.mfu] == pytest.approx([0.2, 0.2])
    source = shown(record)
    found = check_page(source)
    assert {"tokens", "mfu"} <= set(found.ids)
    assert "MFU20.0%10.0% to 20.0% of the device" in re.sub(r"\s+", " ", found.words)
    assert "320,000 (320,000 to 320,000)" in found.words and "20.0% (20.0% to 20.0%)" in found.words
    told = record.to_dict()
    assert told["mfu"] == {"low": 0.1, "median": 0.2, "high": 0.2, "windows": 20}
    assert told["config"][1]["tokens_per_second"]["median"] == 320_000.0  # type: ignore[index]


def test_logged_numbers_are_drawn_over_time_as_means_of_ranks(tmp_path: Path) -> None:
    for rank in range(2):
        rows = [first_window(START, 5.0, rank=rank)]
        for index in range(20):
            row = window(rows[-1].end, {"forward": 1.0}, step=10 * (index + 1), num_steps=10, rank=rank, world_size=2)
            logged = {
                "loss": 4.0 - 0.1 * index + rank,
                "<b>": 1.0,
                "bad": math.nan,
                "gone": -3.0 if index < 10 else math.inf,
            }
            rows.append(replace(row, logged=logged))
        write_windows(tmp_path, rank, rows)
    record = gathered(tmp_path)
    told: Any = record.to_dict()["logged"]
    assert told["loss"] == {"first": pytest.approx(4.5, abs=0.1), "last": pytest.approx(2.6, abs=0.1)}
    assert told["bad"] == {"first": "NaN", "last": "NaN"} and told["gone"]["last"] == "Infinity"
    assert set(told) == {"loss", "bad", "gone"}, "what no script can log is left out"
    source = shown(record)
    found = check_page(source)
    assert "Logged: loss" in found.words and "loss, over time" in source
    assert "Logged: gone" in found.words and "gone, over time" in source
    assert "Logged: bad" not in found.words, "of what has no place in a drawing there is none"


def test_a_logged_number_weighs_as_often_as_it_was_logged_and_in_older_files_as_the_windows_steps(
    tmp_path: Path,
) -> None:
    cases: list[tuple[str, dict[str, float], float]] = [
        ("weighed", {"acc": 16.0}, 0.75), ("older", {}, 0.55), ("bad", {"acc": -1.0}, 0.55)
    ]  # fmt: skip
    for name, weights, expected in cases:
        rows, folder = [first_window(START, 5.0)], tmp_path / name
        folder.mkdir()
        for accuracy, num_steps in ((0.5, 9), (1.0, 1)):
            row = window(rows[-1].end, {"forward": 1e-4}, step=10, num_steps=num_steps)
            rows.append(replace(row, logged={"acc": accuracy}, logged_weights=weights))
        write_windows(folder, 0, rows)
        told: Any = gathered(folder).to_dict()["logged"]
        assert told["acc"]["last"] == pytest.approx(expected), name


@given(st.floats(-1e15, 1e15), st.floats(-1e15, 1e15))
def test_axes_of_any_numbers_have_few_marks_within_their_ends(one: float, other: float) -> None:
    low, high = sorted((one, other))
    least, most = nice_ends(low, high)
    slack = 1e-6 * max(abs(low), abs(high), 1.0)
    assert least <= low + slack and high <= most + slack
    amounts = AmountScale(least=least, most=most, bottom=100.0, top=0.0)
    assert len(amounts.ticks()) <= 8
    assert 0.0 <= amounts.y(high) <= amounts.y(low) <= 100.0


def test_arithmetic_is_compared_with_the_best_of_the_same_machine_alone(tmp_path: Path) -> None:
    write_arithmetic(tmp_path, 1, host="another")
    record = gathered(tmp_path)
    assert record.mfu is None and record.tokens_per_second is not None
    assert not {"mfu"} & set(check_page(shown(record)).ids)


def test_page_reads_without_scripts_and_says_so_to_those_who_cannot_see_it(tmp_path: Path) -> None:
    write_job(tmp_path, 2, 600.0)
    source = re.sub(r"<script.*?</script>", "", shown(gathered(tmp_path)), flags=re.DOTALL)
    found = Checked(source)
    for words in ("Goodput ledger", "Configs in force", "Events", "waiting for data", "wall time", "100.0%"):
        assert words in found.words
    assert '<html lang="en">' in source and "prefers-color-scheme:dark" in source and "@media print" in source


# --- what is read ---------------------------------------------------------------------------------------------------


def test_broken_half_and_foreign_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    good = list(life(START, START + 30.0))
    write_windows(tmp_path, 0, good)
    broken = [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff\xfe\x00",
        b"[" * 5000,
        b'{"begin": NaN}',
        b"x" * 200_000,
        json.dumps({**json.loads(good[3].to_json()), "rank": -7}).encode(),
        json.dumps({**json.loads(good[3].to_json()), "end": 0}).encode(),
        json.dumps({**json.loads(good[3].to_json()), "begin": 1e308}).encode(),
        json.dumps({**json.loads(good[3].to_json()), "step": -1}).encode(),
        json.dumps({**json.loads(good[3].to_json()), "step": 10**400}).encode()[:60_000],
        json.dumps({**json.loads(good[3].to_json()), "seconds": {"data": -1}}).encode(),
        json.dumps({**json.loads(good[3].to_json()), "seconds": {"data": float("inf")}}).encode(),
        json.dumps({**json.loads(good[3].to_json()), "seconds": [1]}).encode(),
        json.dumps({**json.loads(good[3].to_json()), "step_seconds": "abc"}).encode(),
        json.dumps({**json.loads(good[3].to_json()), "memory_bytes": "much"}).encode(),
    ]
    with open(tmp_path / "profile-0.jsonl", "ab") as file:
        file.write(b"\n".join(broken) + b"\n" + good[-1].to_json().encode()[:50])  # the last is being written
    (tmp_path / "events-0.jsonl").write_bytes(b'{"time": 1}\nnot json\n')
    read = Broken()
    assert list(windows_in(tmp_path / "profile-0.jsonl", 0, read, lambda num_bytes: None)) == good
    assert read.num_lines == len(broken) - 1 + 1  # an empty line is none, and the last has no end
    assert list(events_in(tmp_path / "events-0.jsonl", read)) == []
    record = gathered(tmp_path)
    assert f"{read.num_lines} lines of the run's files are broken" in record.notes[0]
    check_page(shown(record))


def changed(path: Path, **values: object) -> None:
    """Write this into every record of a file, or into its measures; after the first of a profile."""
    first, *lines = path.read_text().splitlines(keepends=True)
    records = [json.loads(line) for line in lines or [first]]
    for each in records:
        each.get("measures", each).update(values)
    made = "".join(json.dumps(each) + "\n" for each in records)
    path.write_text(first + made if lines else made)


MANY, TINY = 10**400, 5e-324


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("census-0.json", {"num_flops": MANY}),
        ("census-0.json", {"num_samples": MANY}),
        ("calibration.json", {"flops_per_second": TINY}),
        ("metrics-0.json", {"num_replicas": MANY}),
        ("metrics-0.json", {"num_replicas": -1, "num_micro_steps": MANY}),
        ("profile-0.jsonl", {"seconds": {"forward": TINY}, "num_tokens": 2**53 - 1}),
        ("profile-0.jsonl", {"seconds": {"forward": 1e-300}, "num_steps": 2**53 - 1, "step_seconds": [TINY] * 4}),
        ("profile-0.jsonl", {"seconds": {HOSTILE: 1.0, "forward": 1.0}, "typical": {HOSTILE: 1.0}, "world_size": 0}),
    ],
    ids=lambda each: each if isinstance(each, str) else "-".join(name.replace(HOSTILE, "hostile") for name in each),
)
def test_whatever_the_files_say_there_is_a_page_and_a_status(
    tmp_path: Path, name: str, values: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    write_arithmetic(tmp_path, 2)
    changed(tmp_path / name, **values)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r.html"), "--json"]) == 0
    json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    check_page((tmp_path / "r.html").read_text())
    assert main(["status", str(tmp_path)]) == 0


def test_what_cannot_be_opened_is_left_out_and_named(tmp_path: Path) -> None:
    write_arithmetic(tmp_path, 2)
    (tmp_path / "profile-2.jsonl").symlink_to("nowhere")
    (tmp_path / "profile-3.jsonl").symlink_to("profile-3.jsonl")
    record = gathered(tmp_path)
    assert find_places(tmp_path).num_bytes > 0
    assert [each.rank for each in record.ranks] == [0, 1] and len(record.notes) == 2


@given(st.lists(st.one_of(st.binary(max_size=80), st.sampled_from([b'{"begin":1,', b'"step":1}', b"\n"])), max_size=8))
def test_nothing_in_a_file_is_a_traceback(parts: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile-0.jsonl"
        path.write_bytes(b"".join(parts))
        assert list(windows_in(path, 0, Broken(), lambda num_bytes: None)) == []
        assert list(events_in(path, Broken())) == []


def test_a_rank_has_the_time_of_each_worker_that_had_its_number(tmp_path: Path) -> None:
    lives = [list(life(START, START + 60.0, rank=rank, num_ranks=2)) for rank in (0, 1)]
    half = len(lives[0]) // 2
    for seat, rows in enumerate(lives):
        write_windows(tmp_path, seat, [*rows[:half], *(replace(each, rank=1 - seat) for each in rows[half:])])
    places, read = find_places(tmp_path), list[int]()
    names = [[path.name for path in places.profiles[rank]] for rank in (0, 1)]
    assert names == [["profile-0.jsonl", "profile-1.jsonl"]] * 2
    record = gather(places, None, read.append)
    assert sum(read) == places.num_bytes, "a file that is read for two ranks counts once"
    parts = [lives[rank][:half] + lives[1 - rank][half:] for rank in (0, 1)]
    assert [each.rank for each in record.ranks] == [0, 1]
    assert [each.num_steps for each in record.ranks] == [sum(each.num_steps for each in part) for part in parts]
    assert [(each.begin, each.end) for each in record.ranks] == [(part[0].begin, part[-1].end) for part in parts]
    assert not record.notes
    check_page(shown(record))


def test_run_directories_of_several_nodes_are_one_job(tmp_path: Path) -> None:
    for host in range(2):
        for rank in (2 * host, 2 * host + 1):
            write_windows(tmp_path / "nodes" / f"node{host}", rank, list(life(START, START + 60.0, rank=rank)))
        write_events(tmp_path / "nodes" / f"node{host}", "agent", [agent_event(START, "started", "job x")])
    record = gathered(tmp_path)
    assert [each.rank for each in record.ranks] == [0, 1, 2, 3]
    assert [each.kind for each in record.happenings] == ["started", "started"]
    copied = gathered(tmp_path / "nodes")  # a folder with run directories in it
    assert copied.ledger == record.ledger


def test_workers_that_failed_together_are_one_failure_however_many_tell_of_it(tmp_path: Path) -> None:
    write_windows(tmp_path, 0, list(life(START, START + 60.0)))

    def told(host: str, *kinds_by_launch: list[list[str]], late: float = 0.0) -> None:
        events, time = [], START + late
        for launch in kinds_by_launch:
            rounds = [["started"], *[["workers-started", *kinds] for kinds in launch]]
            for place, kinds in enumerate(rounds):
                for kind in kinds:
                    time += 1.0
                    events.append(replace(agent_event(time, kind, "told"), generation=max(place - 1, 0)))
        write_events(tmp_path / "nodes" / host, "agent", events)

    told("a", [["hang", "worker-failed", "worker-failed"], [], ["worker-failed"] * 2 + ["failed"]], [["failed"]])
    told("b", [["worker-failed"], ["worker-failed"], ["over", "failed"]], late=0.5)
    record = gathered(tmp_path)
    assert record.num_failures == 4  # three rounds of the first launch, and one of the second
    assert "4 failures" in check_page(shown(record)).words


def test_rank_that_moved_to_another_node_is_one_rank(tmp_path: Path) -> None:
    write_windows(tmp_path / "nodes" / "b", 0, list(life(START, START + 60.0)))
    write_windows(tmp_path / "nodes" / "a", 0, list(life(START + 70.0, START + 100.0, restart=1, first_step=550)))
    record = gathered(tmp_path)
    assert len(record.ranks) == 1 and record.ranks[0].num_processes == 2
    assert record.ledger.wall_seconds == pytest.approx(100.0)


def test_each_training_of_a_directory_can_be_shown_and_the_last_is_by_default(tmp_path: Path) -> None:
    for rank in range(2):
        write_windows(tmp_path, rank, list(life(START, START + 60.0, rank=rank)))
        write_windows(tmp_path, rank, list(life(START + 1000.0, START + 1030.0, rank=rank)))
    write_events(tmp_path, "0", [event(START + 10.0, "x", "the first"), event(START + 1010.0, "x", "the second")])
    last, first = gathered(tmp_path), gathered(tmp_path, 1)
    assert (last.number, last.num_trainings) == (2, 2)
    assert (round(first.ledger.wall_seconds), round(last.ledger.wall_seconds)) == (60, 30)
    assert [each.text for each in last.happenings] == ["the second"]
    assert "training 2 of 2" in check_page(shown(last)).words
    with pytest.raises(ValueError, match=r"training 3 is not in .* 1 to 2"):
        gathered(tmp_path, 3)


def test_effect_of_a_config_is_told_where_it_is_clear(tmp_path: Path) -> None:
    slow = list(life(START, START + 60.0, step_seconds=0.2))
    parts = [*slow]
    now, step = slow[-1].end, slow[-1].step
    for _ in range(40):
        step += 10
        seconds = {"forward": 0.5, "backward": 0.5}
        parts.append(window(now, seconds, step=step, num_steps=10, num_samples=320, version=1))
        now = parts[-1].end
    write_windows(tmp_path, 0, parts)
    changed = event(slow[-1].end, "config-applied", "version 1: larger batches", version=1, revision=0)
    write_events(tmp_path, "0", [changed])
    before, after = gathered(tmp_path).periods
    assert (before.version, after.version, after.text) == (0, 1, "version 1: larger batches")
    assert re.fullmatch(r"\d+\.\d% faster", after.compared_with(before))
    assert before.compared_with(None) == "the first"


def test_events_of_many_ranks_are_one(tmp_path: Path) -> None:
    write_job(tmp_path, 8, 60.0)
    told = [each for each in gathered(tmp_path).happenings if each.kind == "config-applied"]
    assert [len(each.ranks) for each in told] == [8, 8]


# --- the command ----------------------------------------------------------------------------------------------------


def test_report_is_written_where_it_is_told_and_here_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(tmp_path / "run", 1, 60.0)
    monkeypatch.chdir(tmp_path)
    assert main(["report", "run"]) == 0
    assert (tmp_path / "report.html").read_text().startswith(f"<!DOCTYPE html>\n{MARK}")
    told, record = capsys.readouterr().out.splitlines(), gathered(tmp_path / "run")
    assert "went into useful steps" in told[0]
    assert told[1].startswith("  Of the rest, most went into restarts (")
    assert told[1][2:] in summary(record)
    assert told[2] == f"  {record.remarks[-1].text}" and told[-1] == "the report is report.html"
    assert main(["report", "run", "--out", "other.html"]) == 0
    monkeypatch.setenv("ELASTIC_EXT_RUN_DIR", str(tmp_path / "run"))
    assert main(["report"]) == 0  # a report is replaced
    assert sorted(each.name for each in tmp_path.iterdir()) == ["other.html", "report.html", "run"]


def test_file_that_is_no_report_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_job(tmp_path / "run", 1, 60.0)
    mine = tmp_path / "mine.html"
    mine.write_text("<!DOCTYPE html>\nmy own page")
    arguments = ["report", str(tmp_path / "run"), "--out", str(mine)]
    assert main(arguments) == 2
    assert mine.read_text() == "<!DOCTYPE html>\nmy own page" and "is no report" in capsys.readouterr().err
    assert main([*arguments, "--force"]) == 0
    assert MARK in mine.read_text()


def test_json_has_the_ledger_and_writes_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(tmp_path / "run", 2, 600.0)
    monkeypatch.chdir(tmp_path)
    assert main(["report", "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["ledger"]["seconds"]) == {each.value for each in ENTRIES}
    assert sum(found["ledger"]["seconds"].values()) == pytest.approx(found["wall_seconds"], abs=1e-6)
    assert [each["rank"] for each in found["ranks"]] == [0, 1]
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({}, "holds nothing of a job"),
        ({"notes.txt": b"x"}, "holds nothing of a job"),
        ({"events-0.jsonl": b""}, "has no profile"),
        ({"profile-0.jsonl": b""}, "no line of a profile that can be read"),
        ({"profile-0.jsonl": b"\x00\xff\n"}, "broken lines: 1"),
    ],
)
def test_folder_without_a_profile_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: dict[str, bytes], words: str
) -> None:
    (tmp_path / "run").mkdir()
    for name, data in names.items():
        (tmp_path / "run" / name).write_bytes(data)
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "report.html")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_what_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ELASTIC_EXT_RUN_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["report", str(tmp_path / "none")]) == 2
    assert main(["report"]) == 2
    assert main(["report", str(tmp_path), "--job", "x"]) == 2
    write_job(tmp_path / "run", 1, 60.0)
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "no" / "report.html")]) == 2
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path)]) == 2
    assert main(["report", str(tmp_path / "run"), "--training", "9", "--out", str(tmp_path / "r.html")]) == 2
    said = capsys.readouterr().err
    for words in ("is not a folder", "no run is named", "one of them", "is not a regular file", "training 9 is not"):
        assert words in said
    assert not (tmp_path / "r.html").exists()


def test_profile_that_is_no_file_is_named_and_left_out(tmp_path: Path) -> None:
    write_windows(tmp_path, 0, list(life(START, START + 60.0)))
    (tmp_path / "profile-1.jsonl").mkdir()
    record = gathered(tmp_path)
    assert [each.rank for each in record.ranks] == [0]
    assert "profile-1.jsonl" in record.notes[0]


# --- parts ----------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.floats(START, START + 1e6), st.floats(0, 1e5), st.floats(0, 1e3)), min_size=1, max_size=30),
    st.integers(2, 40),
)
def test_bins_keep_sums_and_stay_few(parts: list[tuple[float, float, float]], most: int) -> None:
    bins = Bins(2, most)
    for begin, length, value in parts:
        bins.add(begin, begin + length, (value, 1.0))
    assert len(bins) <= most
    sums = [sum(column) for column in zip(*(row for _, row in bins.items()), strict=True)]
    assert sums[0] == pytest.approx(sum(value for _, _, value in parts), abs=1e-6, rel=1e-6)
    assert sums[1] == pytest.approx(len(parts), rel=1e-6)


@given(st.floats(1e-6, 1e9), st.floats(0, 1e12))
def test_axes_have_few_marks_within_their_ends(seconds: float, most: float) -> None:
    scale = TimeScale(begin=START, end=START + seconds, left=0.0, right=100.0)
    assert 1 <= len(scale.ticks()) <= 11
    assert all(0 <= x <= 100.001 for x, _ in scale.ticks())
    amounts = AmountScale(most=nice_top(most), bottom=100.0, top=0.0)
    assert nice_top(most) >= most * 0.999 and 1 <= len(amounts.ticks()) <= 7
    assert all(0 <= amounts.y(each) <= 100 for each in amounts.ticks())


@given(st.text())
def test_text_is_escaped_and_xml_can_hold_it(value: str) -> None:
    found = ElementTree.fromstring(tag("a", text(value), name=value))
    assert "\x00" not in (found.text or "")
    assert not re.search("[<>]", text(value))


@pytest.mark.parametrize(
    ("given_value", "words"),
    [(0.0, "0 ms"), (5e-6, "5 µs"), (0.0499, "49.9 ms"), (12.34, "12.3 s"), (59.96, "1 min"), (7505.0, "2 h 5 min")],
)
def test_lengths_of_time_in_words(given_value: float, words: str) -> None:
    assert seconds_in_words(given_value) == words


def test_numbers_in_words() -> None:
    assert [amount(each) for each in (0, 0.01234, 12.34, 99.99, 12345.6)] == ["0", "0.0123", "12.3", "100", "12,346"]
    assert [percent(each) for each in (0.0, 1e-5, 0.4163, 1.0)] == ["0.0%", "<0.1%", "41.6%", "100.0%"]
    assert [elapsed_in_words(each) for each in (0, 0.5, 30, 5400)] == ["0", "500 ms", "30 s", "1 h 30 min"]
    assert [number(each) for each in (0.0, -0.01, 1.0, 1.26, -3.0)] == ["0", "0", "1", "1.3", "-3"]


def test_a_config_of_few_windows_has_no_effect_to_tell() -> None:
    def period(spread: Quartiles) -> Period:
        return Period(
            version=1,
            revision=0,
            begin=0.0,
            end=1.0,
            num_steps=9,
            text="",
            samples_per_second=spread,
            step_seconds=None,
        )

    calm = period(Quartiles(low=99.0, middle=100.0, high=101.0, count=9))
    assert period(Quartiles(low=1.0, middle=1.0, high=1.0, count=2)).compared_with(calm) == "too short to tell"
    assert period(Quartiles(low=119.0, middle=120.0, high=121.0, count=9)).compared_with(calm) == "20.0% faster"
    wide = period(Quartiles(low=80.0, middle=110.0, high=130.0, count=9))
    assert wide.compared_with(calm) == "no clear change (10.0% faster, within the spread)"


def test_one_window_is_enough(tmp_path: Path) -> None:
    write_windows(tmp_path, 3, [first_window(START, 0.5, rank=3)])
    record = gathered(tmp_path)
    assert record.ledger.goodput == 0 and record.ledger.wall_seconds == pytest.approx(0.5)
    check_page(shown(record))


_TRAINING = """
import sys, time, torch
from torch import nn
from elastic_ext import ElasticDataLoader, ElasticTrainer

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 600
    def __getitem__(self, index):
        time.sleep(0.0005)
        return torch.randn(64), index % 10

torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters())
loader = ElasticDataLoader(Slow(), batch_size=8)
trainer = ElasticTrainer(model, loader, global_batch_size=16)
with trainer:
    optimizer = trainer.prepare(optimizer)
    with trainer.epoch(0):
        for inputs, targets in loader:
            with trainer.step():
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
    time.sleep(0.5)
"""


@pytest.mark.slow
def test_report_of_a_training_tells_what_it_did(tmp_path: Path) -> None:
    begin = time.time()
    environ = {**os.environ, "ELASTIC_EXT_RUN_DIR": str(tmp_path / "run"), "PYTHONPATH": os.getcwd()}
    subprocess.run([sys.executable, "-c", _TRAINING], env=environ, check=True, timeout=100)
    took = time.time() - begin
    record = gathered(tmp_path / "run")
    check_page(shown(record))
    seconds = record.ledger.seconds
    assert took - 2.5 < record.ledger.wall_seconds < took
    assert seconds[TimeUse.DATA] >= 600 * 0.0005 * 0.95
    assert seconds[TimeUse.OUTSIDE] >= 0.5
    assert 0 < record.ledger.goodput < 1
    assert (record.last_step, record.num_samples, record.num_steps_again) == (38, 600, 0)
    assert not record.notes
