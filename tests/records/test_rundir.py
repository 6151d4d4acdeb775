"""The run directory of a rank: written where it can be, and one warning where it cannot."""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path

import pytest

from elastic_ext.profile.phases import Phase
from elastic_ext.records.run_dir import RunDirectory
from tests.records.test_metrics import EVENT, METRICS
from tests.support.profiles import made_window


def test_metrics_are_replaced_and_events_are_added(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "a" / "b", seat=3)
    directory.prepare()
    for _ in range(3):
        directory.write_metrics(METRICS)
        directory.add_event(EVENT)
    assert json.loads((tmp_path / "a/b/metrics-3.json").read_bytes())["config_version"] == 7
    assert len((tmp_path / "a/b/events-3.jsonl").read_text().splitlines()) == 3
    assert sorted(os.listdir(directory.path)) == ["events-3.jsonl", "metrics-3.json"]


def test_a_new_directory_belongs_to_its_owner_alone_and_an_old_one_stays_as_it_is(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.mkdir()
    old.chmod(0o750)
    for path in (new, old):
        RunDirectory(path, seat=0).prepare()
    assert stat.S_IMODE(new.stat().st_mode) == 0o700
    assert stat.S_IMODE(old.stat().st_mode) == 0o750


@pytest.mark.parametrize("below", ["", "deep/er"])
def test_a_directory_that_cannot_be_written_is_one_warning_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, below: str
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"in the way")
    directory = RunDirectory(file / below, seat=0)
    with caplog.at_level(logging.WARNING):
        directory.prepare()
        for _ in range(3):
            directory.write_metrics(METRICS)
            directory.add_event(EVENT)
    (record,) = caplog.records
    assert str(file) in record.getMessage() and "ELASTIC_EXT_RUN_DIR" in record.getMessage()
    assert file.read_bytes() == b"in the way"


def test_a_pipe_that_nobody_reads_is_waited_for_never(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = RunDirectory(tmp_path, seat=0)
    os.mkfifo(directory.profile_file)
    os.mkfifo(directory.events_file)
    with caplog.at_level(logging.WARNING):
        assert directory.profiled_until() == 0.0
        directory.add_window(made_window({Phase.FORWARD: 0.01}))
        directory.add_event(EVENT)
    assert len(caplog.records) == 1


def test_a_directory_that_goes_away_under_way_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = RunDirectory(tmp_path / "run", seat=0)
    directory.prepare()
    directory.write_metrics(METRICS)
    directory.metrics_file.unlink()
    directory.path.rmdir()
    directory.write_metrics(METRICS)
    directory.add_event(EVENT)
    assert len(caplog.records) == 1
