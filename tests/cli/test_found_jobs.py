"""The job that a command is about where nothing names it, and what its run directories say of the files it uses."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_ext.agent.config_writer import agent_in
from elastic_ext.cli import main
from elastic_ext.cli.jobs import JobHere, config_file_in, only_one
from elastic_ext.ranks.processes import this_process
from elastic_ext.records.agent import AGENT_FILE
from elastic_ext.records.metrics import JobEvent
from tests.agent.status.test_agent_status import write_all
from tests.saved.job import JOB
from tests.test_saved import CHECKPOINT, SAVED

RUNNING = this_process()
ENDED = replace(RUNNING, start_ticks=1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where run directories are by default in these tests."""
    for name in ("ELASTIC_EXT_RUN_DIR", "ELASTIC_EXT_CONFIG_FILE", "ELASTIC_EXT_MASTER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "cache" / "elastic_ext"


def begun(run_dir: Path, **details: object) -> None:
    """Write the event that training has begun in a run directory, after those that are there."""
    event = JobEvent(
        time=time.time(), generation=0, rank=0, step=0, kind="training-began", text="training begins", details=details
    )
    with open(run_dir / "events-0.jsonl", "a") as file:
        file.write(event.to_json() + "\n")


def job(name: str) -> JobHere:
    return JobHere(name=name, folder=Path(name), run_directories=(Path(name),))


# ---- which job ----


def test_the_only_job_that_runs_is_meant_and_where_none_runs_the_only_one() -> None:
    a, b = job("a"), job("b")
    assert only_one([a, b], [b], ways="--job NAME") == b
    assert only_one([a], [], ways="--job NAME") == a


def test_several_jobs_are_listed_with_the_way_to_name_one() -> None:
    many = [job(f"j{number}") for number in range(12)]
    with pytest.raises(ValueError, match=r"^2 jobs run on this machine: j0, j1; name one with --job NAME$"):
        only_one(many, many[:2], ways="--job NAME")
    with pytest.raises(ValueError, match=r"^no job runs .*, and 12 have .*: j0, .*, j9 and 2 more; name one with X$"):
        only_one(many, [], ways="X")


@pytest.mark.parametrize(
    "command",
    [["config", "show"], ["tuning", "log"], ["tuning", "memory"], ["ckpt", "ls"], ["ckpt", "verify"], ["events"]],
)
def test_every_command_says_that_no_job_or_several_are_there(
    cache: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    assert f"no job has a run directory in {cache}" in capsys.readouterr().err
    for name in ("nano", "mini"):
        write_all(cache / name, ENDED, job=name)
    assert main(command) == 2
    err = capsys.readouterr().err
    assert "no job runs on this machine, and 2 have run there: " in err and "nano" in err and "mini" in err
    assert main([*command, "--job", "micro"]) == 2
    assert "job 'micro' has no run directory" in capsys.readouterr().err


# ---- its config file ----


def test_config_finds_the_only_job_that_runs_or_the_one_that_is_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_all(cache / "runs", RUNNING, job="runs")
    write_all(cache / "died", ENDED, job="died")
    assert main(["config", "set", "user.x=1"]) == 0
    assert main(["config", "set", "user.x=2", "--job", "died"]) == 0
    assert main(["config", "set", "user.x=3", "--file", str(tmp_path / "own.json")]) == 0
    monkeypatch.setenv("ELASTIC_EXT_CONFIG_FILE", str(tmp_path / "of-environment.json"))
    assert main(["config", "set", "user.x=4"]) == 0
    assert main(["config", "set", "user.y=5", "--job", "died"]) == 0
    values = {
        str(path.relative_to(tmp_path)): json.loads(path.read_bytes())["user"]
        for path in (*cache.rglob("config.json"), tmp_path / "own.json", tmp_path / "of-environment.json")
    }
    assert values == {
        "cache/elastic_ext/runs/config.json": {"x": 1},
        "cache/elastic_ext/died/config.json": {"x": 2, "y": 5},
        "own.json": {"x": 3},
        "of-environment.json": {"x": 4},
    }
    with pytest.raises(SystemExit, match="2"):
        main(["config", "show", "--job", "died", "--file", str(tmp_path / "own.json")])


def test_a_folder_stands_for_the_config_file_of_its_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["config", "show", "--file", str(tmp_path / "empty")]) == 2
    assert f"{tmp_path}/empty/config.json does not exist" in capsys.readouterr().err
    write_all(tmp_path / "run", RUNNING)
    assert main(["config", "show", "--file", str(tmp_path / "run")]) == 0
    assert json.loads(capsys.readouterr().out) == {"version": 3}


def test_the_config_file_of_a_job_is_its_agents_or_the_one_that_its_ranks_follow(tmp_path: Path) -> None:
    assert config_file_in(tmp_path) == tmp_path / "config.json"
    begun(tmp_path, config_file="/first.json")
    begun(tmp_path, config_file="/then.json")
    assert config_file_in(tmp_path) == Path("/then.json")
    begun(tmp_path)  # an earlier version of the library
    assert config_file_in(tmp_path) == tmp_path / "config.json"
    write_all(tmp_path, RUNNING)
    agent = agent_in(tmp_path)
    assert agent is not None
    agents = tmp_path / "agents.json"
    (tmp_path / AGENT_FILE).write_text(replace(agent, config_file=str(agents)).to_json())
    assert config_file_in(tmp_path) == tmp_path / "config.json"  # the folder was copied from elsewhere
    agents.touch()
    assert config_file_in(tmp_path) == agents


# ---- its checkpoints ----


def test_ckpt_finds_the_checkpoints_of_a_job_and_of_no_other_in_the_same_storage(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_all(cache / JOB, RUNNING, job=JOB)
    assert main(["ckpt", "ls"]) == 2
    assert "training has not begun; give PATH" in capsys.readouterr().err
    begun(cache / JOB, checkpoints=None)
    assert main(["ckpt", "ls"]) == 2
    assert "no shared_storage_path; give PATH" in capsys.readouterr().err
    begun(cache / JOB, checkpoints=str(SAVED / "storage"), checkpoint_job="another")
    assert main(["ckpt", "ls"]) == 2
    assert f"has saved no checkpoint in {SAVED / 'storage'} so far" in capsys.readouterr().err
    begun(cache / JOB, checkpoints=str(SAVED / "storage"), checkpoint_job=JOB)
    for command in (["ls"], ["show"], ["verify"], ["ls", "--job", JOB]):
        assert main(["ckpt", *command, "--json"]) == 0
        assert str(CHECKPOINT) in capsys.readouterr().out, command


def test_what_removes_checkpoints_wants_a_path_or_a_name(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_all(cache / "nano", RUNNING, job="nano")
    begun(cache / "nano", checkpoints=str(SAVED / "storage"), checkpoint_job=JOB)
    with pytest.raises(SystemExit, match="2"):
        main(["ckpt", "prune", "--keep-last", "1", "--dry-run"])
    assert "one of the arguments PATH --job is required" in capsys.readouterr().err
    assert main(["ckpt", "prune", "--job", "nano", "--keep-last", "1", "--dry-run"]) == 0
