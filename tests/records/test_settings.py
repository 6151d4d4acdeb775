"""Where a process keeps its files and how long it waits: argument over environment over default."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.fsdp.checkpoint.folder.claim import job_name
from elastic_ext.records.run_dir import StartSettings
from tests.support.configs import unhurried

HOME = Path("~").expanduser()


@pytest.mark.parametrize(
    ("environ", "enabled"),
    [({}, True)]
    + [({"ELASTIC_EXT": word}, False) for word in ("off", "OFF", " off ", "0", "false", "no", "No")]
    + [({"ELASTIC_EXT": word}, True) for word in ("", "on", "ON", "1", "true", "yes", " 1\n")],
)
def test_one_variable_switches_the_library_off(environ: dict[str, str], enabled: bool) -> None:
    assert StartSettings.resolve(environ, script="train.py").enabled is enabled


@pytest.mark.parametrize("word", ["of", "disabled", "2", "nein", "offf", "none"])
def test_a_word_that_is_neither_on_nor_off_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match=f"ELASTIC_EXT is '{word}'; allowed: on or off"):
        StartSettings.resolve({"ELASTIC_EXT": word}, script="train.py")


@pytest.mark.parametrize("name", ["job", "run_dir", "config_file"])
def test_an_argument_of_no_text_is_refused_and_not_replaced(name: str) -> None:
    environ = {"ELASTIC_EXT_JOB": "j", "ELASTIC_EXT_RUN_DIR": "/r", "ELASTIC_EXT_CONFIG_FILE": "/c"}
    arguments: dict[str, Any] = {name: ""}
    with pytest.raises(ValueError, match=f"{name} is '', as where a variable is not set; allowed: a"):
        StartSettings.resolve(environ, script="train.py", **arguments)


@pytest.mark.parametrize("seconds", ["soon", True])
def test_a_time_that_was_given_and_is_none_is_named_as_it_was_given(seconds: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout_seconds is ('soon'|True); allowed: seconds"):
        StartSettings.resolve({}, script="train.py", timeout_seconds=seconds)


TIMES = [
    ("timeout_seconds", "ELASTIC_EXT_TIMEOUT_SECONDS", 1800.0),
    ("lag_warning_seconds", "ELASTIC_EXT_LAG_WARNING_SECONDS", 30.0),
    ("poll_seconds", "ELASTIC_EXT_POLL_SECONDS", 1.0),
]


@pytest.mark.parametrize(("name", "variable", "default"), TIMES)
def test_a_time_is_taken_from_the_argument_then_the_environment_then_the_default(
    name: str, variable: str, default: float
) -> None:
    def resolved(environ: dict[str, str], **arguments: float) -> object:
        return getattr(StartSettings.resolve(environ, script="train.py", **arguments), name)  # type: ignore[arg-type]

    assert resolved({}) == default
    assert resolved({variable: ""}) == default
    assert resolved({variable: "2.5"}) == 2.5
    assert resolved({variable: "2.5"}, **{name: 7}) == 7.0
    assert resolved({variable: "nonsense"}, **{name: 7}) == 7.0


@pytest.mark.parametrize(("name", "variable", "default"), TIMES)
@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "-inf", "1e999", "soon", "1s", "1,5"])
def test_a_time_that_nobody_can_wait_is_refused(name: str, variable: str, default: float, text: str) -> None:
    with pytest.raises(ValueError, match=f"{variable} is {text!r}; allowed: seconds, a number > 0"):
        StartSettings.resolve({variable: text}, script="train.py")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), "soon", True, object()])
def test_a_time_given_as_argument_is_checked_too(value: Any) -> None:
    with pytest.raises(ValueError, match=r"poll_seconds is .*; allowed: seconds, a number > 0"):
        StartSettings.resolve({}, script="train.py", poll_seconds=value)


@pytest.mark.parametrize(
    ("environ", "arguments", "run_dir", "config_file"),
    [
        ({}, {"job": "a"}, HOME / ".cache/elastic_ext/a", "config.json"),
        ({"XDG_CACHE_HOME": "/c"}, {"job": "a"}, "/c/elastic_ext/a", "config.json"),
        ({"XDG_CACHE_HOME": "relative"}, {"job": "a"}, HOME / ".cache/elastic_ext/a", "config.json"),
        ({"ELASTIC_EXT_RUN_DIR": "/r"}, {"job": "a"}, "/r", "config.json"),
        ({"ELASTIC_EXT_RUN_DIR": "~/r"}, {}, HOME / "r", "config.json"),
        ({"ELASTIC_EXT_RUN_DIR": "/r"}, {"run_dir": "/s"}, "/s", "config.json"),
        ({"ELASTIC_EXT_RUN_DIR": "/r", "ELASTIC_EXT_CONFIG_FILE": "/f.json"}, {}, "/r", "/f.json"),
        ({"ELASTIC_EXT_CONFIG_FILE": "/f.json"}, {"run_dir": "/s", "config_file": "/g.json"}, "/s", "/g.json"),
        ({}, {"run_dir": "r"}, Path.cwd() / "r", "config.json"),
        ({}, {"run_dir": "/r", "config_file": "c.json"}, "/r", Path.cwd() / "c.json"),
    ],
)
def test_paths_come_from_the_argument_then_the_environment_then_the_cache(
    environ: dict[str, str], arguments: dict[str, str], run_dir: str | Path, config_file: str | Path
) -> None:
    settings = StartSettings.resolve(environ, script="train.py", **arguments)  # type: ignore[arg-type]
    assert settings.run_dir == Path(run_dir)
    assert settings.config_file == Path(run_dir) / config_file


def test_the_home_of_a_user_who_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="no_such_user_here"):
        StartSettings.resolve({"ELASTIC_EXT_RUN_DIR": "~no_such_user_here/run"}, script="train.py")


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({"ELASTIC_EXT_JOB": "mine", "TORCHELASTIC_RUN_ID": "theirs"}, "mine"),
        ({"TORCHELASTIC_RUN_ID": "theirs"}, "theirs"),
        ({"ELASTIC_EXT_JOB": "", "TORCHELASTIC_RUN_ID": "theirs"}, "theirs"),
    ],
)
def test_the_job_is_named_by_the_user_or_the_launcher(environ: dict[str, str], job: str) -> None:
    assert StartSettings.resolve(environ, script="train.py").job == job
    assert StartSettings.resolve(environ, script="train.py", job="argument").job == "argument"


def test_a_job_that_nobody_named_is_named_by_its_script_and_where_it_lies() -> None:
    made_up = str(uuid.uuid4())  # as by torchrun --standalone
    for environ in ({}, {"TORCHELASTIC_RUN_ID": "none"}, {"TORCHELASTIC_RUN_ID": made_up}):
        one = StartSettings.resolve(environ, script="/a/train.py").job
        other = StartSettings.resolve(environ, script="/b/train.py").job
        assert one.startswith("train-") and other.startswith("train-") and one != other
        assert StartSettings.resolve(environ, script="/a/train.py").job == one
        assert one == job_name(None, environ.get("TORCHELASTIC_RUN_ID"), "/a/train.py"), "as its checkpoints are named"
    assert StartSettings.resolve({}, script="").job.startswith("interactive-")


HOSTILE_NAMES = [
    "..",
    ".",
    "/",
    "../../etc",
    "/etc/passwd",
    "a/b",
    ".hidden",
    "x" * 500,
    "\0",
    "a\nb",
    "\udcff",
    "-",
    "größe",
]


@pytest.mark.parametrize("job", HOSTILE_NAMES)
def test_a_run_directory_is_one_folder_below_the_cache_whatever_the_job_is_called(job: str) -> None:
    settings = StartSettings.resolve(
        {"XDG_CACHE_HOME": "/c"}, script="train.py", job=job.encode(errors="replace").decode()
    )
    assert settings.run_dir.parent == Path("/c/elastic_ext")
    assert not settings.run_dir.name.startswith(".")
    assert len(os.fsencode(settings.run_dir.name)) <= 255


@unhurried
@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=2, max_size=2, unique=True))
def test_unlike_jobs_have_unlike_run_directories(jobs: list[str]) -> None:
    one, other = (StartSettings.resolve({"XDG_CACHE_HOME": "/c"}, script="train.py", job=job).run_dir for job in jobs)
    assert one != other


@pytest.mark.parametrize(("text", "folder"), [(None, None), ("", None), ("/p", Path("/p")), ("p", Path.cwd() / "p")])
def test_an_agent_says_where_it_looks_for_a_pulse(text: str | None, folder: Path | None) -> None:
    environ = {} if text is None else {"ELASTIC_EXT_PULSE_DIR": text}
    assert StartSettings.resolve(environ, script="train.py").pulse_dir == folder


@pytest.mark.parametrize(("text", "restart"), [("", 0), ("0", 0), ("3", 3)])
def test_the_restart_is_counted_by_the_launcher(text: str, restart: int) -> None:
    assert StartSettings.resolve({"TORCHELASTIC_RESTART_COUNT": text}, script="train.py").restart == restart


@pytest.mark.parametrize("text", ["-1", "one", "1.0", " "])
def test_a_restart_count_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="TORCHELASTIC_RESTART_COUNT"):
        StartSettings.resolve({"TORCHELASTIC_RESTART_COUNT": text}, script="train.py")


@pytest.mark.parametrize("job", ["train", "a/b", "..", "größe"])
def test_the_run_directory_of_a_job_that_was_given_none_is_found_by_its_name(job: str) -> None:
    for environ in ({"XDG_CACHE_HOME": "/c"}, {"XDG_CACHE_HOME": "not absolute"}, {}):
        found = StartSettings.run_dir_of(environ, job)
        assert found == StartSettings.resolve(environ, script="train.py", job=job).run_dir
        assert found.parent == StartSettings.jobs_folder(environ)


def test_the_log_tells_of_the_profile_once_a_minute_unless_told_otherwise() -> None:
    for text, seconds in (("", 60.0), ("5", 5.0), ("0", 0.0)):
        assert StartSettings.resolve({"ELASTIC_EXT_PROFILE_SECONDS": text}, script="t").profile_seconds == seconds
    for text in ("-1", "nan", "inf", "never"):
        with pytest.raises(ValueError, match=r"ELASTIC_EXT_PROFILE_SECONDS is .* 0 for never"):
            StartSettings.resolve({"ELASTIC_EXT_PROFILE_SECONDS": text}, script="t")
