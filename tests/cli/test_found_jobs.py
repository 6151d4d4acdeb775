"""The job that a command is about where nothing names it, and what its run directories say of the files it uses."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_ext.agent.config_writer import agent_in
from elastic_ext.agent.folder import NODES, NodeFolders, spare_cache
from elastic_ext.cli import main
from elastic_ext.cli.jobs import JobHere, config_file_in, jobs_here, named_job, only_one
from elastic_ext.ranks.processes import this_process
from elastic_ext.records.agent import AGENT_FILE, WORKERS_FILE
from elastic_ext.records.metrics import JobEvent
from elastic_ext.records.run_dir import StartSettings
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
    monkeypatch.setattr("elastic_ext.cli.config._JUDGED_SECONDS", 0.2)  # no ranks are there to judge a config
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


def test_a_job_is_found_by_the_name_of_its_script_where_only_one_is_called_so(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_all(cache / "train_slow-ff9f5fbd", RUNNING, job="train_slow-ff9f5fbd")
    write_all(cache / "train_slow-too", ENDED, job="train_slow-too")
    assert main(["status", "--job", "train_slow"]) == 0
    assert capsys.readouterr().out.startswith("train_slow-ff9f5fbd: running")
    assert main(["config", "set", "user.x=1", "--job", "train_slow"]) == 0
    found = named_job(None, "train_slow", os.environ)
    assert found is not None and found.name == "train_slow-ff9f5fbd"
    write_all(cache / "train_slow-00000000", ENDED, job="train_slow-00000000")
    with pytest.raises(ValueError, match=r"job 'train_slow' has no run directory .*: .*train_slow-ff9f5fbd"):
        named_job(None, "train_slow", os.environ)
    write_all(cache / "train_slow", ENDED, job="train_slow")
    found = named_job(None, "train_slow", os.environ)
    assert found is not None and found.name == "train_slow"


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


def test_a_command_that_writes_takes_no_job_that_it_was_not_told_and_does_not_run(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_all(cache / "died", ENDED, job="died")
    assert main(["config", "show"]) == 0
    for command in (["config", "set", "user.x=1"], ["config", "undo"], ["tuning", "pause"]):
        assert main(command) == 2
        assert "no job runs on this machine, and 1 has run there: died; name one with --job" in capsys.readouterr().err
    assert main(["config", "set", "user.x=1", "--job", "died"]) == 0
    assert capsys.readouterr().out.startswith("version 4 written\n")
    write_all(cache / "runs", RUNNING, job="runs")
    assert main(["config", "set", "user.x=1"]) == 0
    assert capsys.readouterr().out.startswith(f"version 4 written to {cache / 'runs' / 'config.json'}\n")
    assert main(["config", "undo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["place"] == str(cache / "runs" / "config.json")


@pytest.mark.parametrize(
    "command",
    [["config", "show"], ["config", "set", "user.x=1"], ["tuning", "log"], ["ckpt", "ls"], ["events"], ["report"]],
)
def test_two_runs_of_one_script_are_not_taken_for_one(
    cache: Path, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [cache / "nano" / NODES / name for name in ("h", "h-2")]
    for folder in folders:
        write_all(folder, RUNNING, job="nano")
    main(command)
    assert "several runs" not in capsys.readouterr().err  # two agents of one run
    agent = agent_in(folders[1])
    assert agent is not None
    (folders[1] / AGENT_FILE).write_text(replace(agent, run_id="another").to_json())
    for named in ([], ["--job", "nano"]):
        assert main([*command, *named]) == 2
        err = capsys.readouterr().err
        assert "several runs of job nano go on at once" in err and all(str(folder) in err for folder in folders)
    monkeypatch.setenv("ELASTIC_EXT_RUN_DIR", str(folders[1]))
    main(command)
    assert "several runs" not in capsys.readouterr().err


def test_a_job_runs_here_where_an_agent_or_a_rank_of_it_does(tmp_path: Path) -> None:
    def runs(run_dir: Path) -> bool:
        return JobHere(name="nano", folder=run_dir, run_directories=(run_dir,)).is_running()

    for host, is_here in ((socket.gethostname(), True), ("elsewhere", False)):
        folder = tmp_path / host
        write_all(folder, RUNNING, host=host)
        assert runs(folder) is is_here
        for name in (AGENT_FILE, WORKERS_FILE):
            (folder / name).unlink()
        assert runs(folder) is is_here  # a plain job
    write_all(tmp_path / "ended", ENDED)
    assert not runs(tmp_path / "ended") and not runs(tmp_path / "gone")


def test_the_run_directory_where_something_has_begun_last_is_meant_unless_an_agent_runs(cache: Path) -> None:
    nodes = cache / "nano" / NODES

    def first() -> Path:
        found = named_job(None, "nano", os.environ)
        assert found is not None
        return found.newest_first()[0]

    nodes.mkdir(parents=True)
    begun(nodes.parent)
    write_all(nodes / "h", ENDED, since=-10.0)
    assert first() == nodes / "h"
    write_all(nodes / "h-2", RUNNING, since=100.0)
    assert first() == nodes / "h-2"
    (nodes / "h-2" / AGENT_FILE).unlink()
    begun(nodes / "h-2")
    write_all(nodes / "h", ENDED, since=100.0)
    assert first() == nodes / "h-2"


def test_a_folder_that_cannot_be_read_is_passed_over(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("closed", "gone"):
        (cache / name).mkdir(parents=True)
    write_all(cache / "nano", RUNNING, job="nano")
    listdir, stat = os.listdir, Path.stat

    def listed(path: str | Path) -> list[str]:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return listdir(path)

    def looked_at(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path.name == "gone":
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(os, "listdir", listed)
    monkeypatch.setattr(Path, "stat", looked_at)
    for named in ([], ["--job", "nano"]):
        assert main(["config", "show", *named]) == 0
    assert [each.name for each in jobs_here(os.environ)] == ["nano"]


def test_a_job_whose_nodes_are_the_newest_is_among_the_newest(cache: Path) -> None:
    for number in range(200):
        folder = cache / f"j{number}"
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
    write_all(cache / "nano" / NODES / "h", RUNNING, job="nano")
    os.utime(cache / "nano", (1.0, 1.0))
    assert jobs_here(os.environ)[0].name == "nano"


def test_a_long_name_is_accepted_as_it_was_given_and_as_it_is_listed(cache: Path) -> None:
    name = "x" * 90
    folder = StartSettings.run_dir_of(os.environ, name)
    write_all(folder, RUNNING, job=name)
    (listed,) = jobs_here(os.environ)
    for given in (name, listed.name):
        assert main(["config", "show", "--job", given]) == 0
    with pytest.raises(ValueError, match="has no run directory"):
        named_job(None, "..", os.environ)


# ---- the spare place ----


def test_the_spare_place_is_looked_at_where_it_is_this_users_and_no_link(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spare, other = spare_cache(), tmp_path / "other"
    write_all(other / "elastic_ext" / "nano", RUNNING, job="nano")
    spare.symlink_to(other)
    assert main(["config", "show", "--job", "nano"]) == 2
    spare.unlink()
    other.rename(spare)
    assert main(["config", "show", "--job", "nano"]) == 0
    assert main(["report", "--job", "nano"]) == 2
    assert f"{spare / 'elastic_ext' / 'nano'} has no profile" in capsys.readouterr().err
    write_all(cache / "nano", ENDED, job="nano")
    found = named_job(None, "nano", os.environ)
    assert found is not None and found.run_directories == (cache / "nano",)
    shutil.rmtree(cache)
    somebody = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: somebody)
    spare.rename(spare_cache())
    assert main(["config", "show", "--job", "nano"]) == 2
    assert f"no run directory {cache / 'nano'}" in capsys.readouterr().err


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


def test_a_home_folder_that_nobody_has_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "~nobody-is-called-so/run"

    def is_refused(command: list[str]) -> bool:
        return main(command) == 2 and f"{path}: " in (said := capsys.readouterr().err) and "allowed: a path" in said

    for command in (["report", path], ["tuning", "memory", "--file", path]):
        assert is_refused(command)
    monkeypatch.setenv("ELASTIC_EXT_RUN_DIR", path)
    for command in (["report"], ["status"], ["events"], ["tuning", "memory"]):
        assert is_refused(command)


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


def test_a_copy_of_a_run_directory_has_its_own_config_file(tmp_path: Path) -> None:
    live, copy = tmp_path / "live", tmp_path / "copy"
    for has_agent in (True, False):
        write_all(live, RUNNING)
        begun(live, config_file=str(live / "config.json"))
        if not has_agent:
            (live / AGENT_FILE).unlink()
        shutil.copytree(live, copy)
        assert config_file_in(live) == live / "config.json"
        assert config_file_in(copy) == copy / "config.json"
        (copy / "config.json").unlink()
        assert config_file_in(copy) == copy / "config.json"
        shutil.rmtree(copy)
    shutil.copytree(live, copy)
    agent = NodeFolders.make(copy, is_given=True)  # which was given the other's file
    assert config_file_in(copy) == live / "config.json"
    agent.close()
    assert config_file_in(copy) == copy / "config.json"
    node = live / NODES / "h"  # which follows the file of the job's folder, as somebody has asked
    node.mkdir(parents=True)
    begun(node, config_file=str(live / "config.json"))
    assert config_file_in(node) == live / "config.json"


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


def test_nothing_is_removed_where_it_is_not_known_which_folder_is_the_jobs(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_all(cache / "nano", RUNNING, job="nano")
    begun(cache / "nano", checkpoints=str(SAVED / "storage"))  # as version 0.1.0
    assert main(["ckpt", "ls", "--job", "nano"]) == 0
    assert main(["ckpt", "prune", "--job", "nano", "--keep-last", "1", "--dry-run"]) == 2
    assert f"which folder in {SAVED / 'storage'} is the job's; give PATH" in capsys.readouterr().err


def test_the_beginning_of_a_training_is_found_however_much_has_happened_since(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_all(cache / JOB, RUNNING, job=JOB)
    begun(cache / JOB, checkpoints=str(SAVED / "storage"), checkpoint_job=JOB)
    line = (cache / JOB / "events-0.jsonl").read_text().splitlines()[0] + "\n"
    with open(cache / JOB / "events-0.jsonl", "a") as file:
        file.write(line * (3 * (1 << 19) // len(line)))
    assert main(["ckpt", "ls"]) == 0
    assert str(CHECKPOINT.name) in capsys.readouterr().out
