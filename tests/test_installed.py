"""What is installed from a wheel, far from this repository: all files are there, every command starts and ends with the
status and the words that it had, and what an earlier commit has recorded, in tests/saved, is read for what it was.

The wheel is made of the sdist, as that of a release is, and installed, once. Commands are told to one process, which
runs each as a shell would; what is to be shown of a process of its own is shown with one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
import time
import urllib.request
import venv
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from email.parser import HeaderParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from elastic_ext.version import VERSION
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
SAVED = ROOT / "tests" / "saved"
COMMANDS: Mapping[str, Sequence[str]] = json.loads((SAVED / "commands.json").read_text())
"""Each command with its options."""
OUTPUTS: Mapping[str, Any] = json.loads((SAVED / "outputs.json").read_text())
"""What commands tell of what is saved here, as JSON."""
DEADLINE_SECONDS = 60.0

_RUN_EACH = """
import contextlib, io, json, os, runpy, sys
told = []
for argv in json.loads(sys.stdin.read()):
    before, out, err, status = dict(os.environ), io.StringIO(), io.StringIO(), 0
    sys.argv = argv
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if argv[0] == "-m":
                sys.argv = argv[1:]
                runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(argv[0], run_name="__main__")
        except SystemExit as ended:
            status = ended.code or 0
    os.environ.clear()
    os.environ.update(before)
    told.append([status, out.getvalue(), err.getvalue()])
import elastic_ext
told.append([elastic_ext.__file__, "torch" in sys.modules, ""])
print(json.dumps(told))
"""


class Ended(NamedTuple):
    """What a command has come to."""

    status: int
    out: str
    err: str

    def json(self) -> Any:
        return [json.loads(line) for line in self.out.splitlines()]


class Installed:
    """The library as a user has it, and a folder to work in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.site = folder / "site"
        self.sdist = made_sdist(folder)
        with tarfile.open(self.sdist) as sdist:
            sdist.extractall(folder, filter="data")
        self.source = folder / self.sdist.name.removesuffix(".tar.gz")
        self.wheel = made_of(self.source, "build_wheel", folder)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        self._done([*pip, "--no-index", "--no-deps", "--target", str(self.site), str(self.wheel)])
        self.work = folder / "work"
        self.work.mkdir()

    @property
    def environ(self) -> dict[str, str]:
        theirs = ("ELASTIC_EXT", "PET_", "TORCHELASTIC")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
        return {**kept, "PYTHONPATH": str(self.site), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(self.work)}

    def script(self, name: str) -> str:
        return str(self.site / "bin" / name)

    def run(self, *commands: Sequence[str], needs_torch: bool = False) -> list[Ended]:
        """What became of each; the first word is a console script, or -m before a module."""
        told = [[str(word) for word in command] for command in commands]
        for words in told:
            words[0] = "-m" if words[0] == "-m" else self.script(words[0])
        done = self._done([sys.executable, "-c", _RUN_EACH], input=json.dumps(told))
        *ended, (file, has_torch, _) = json.loads(done)
        assert Path(file).is_relative_to(self.site), f"{file} is not what was installed"
        assert has_torch == needs_torch, "what these commands need is not what they needed"
        return [Ended(*each) for each in ended]

    def start(self, argv: Sequence[str], **environ: str) -> subprocess.Popen[str]:
        """A process of its own; what it prints goes to ``work``/printed, of which nothing fills up."""
        with open(self.work / "printed", "w") as printed:
            return subprocess.Popen(
                argv, cwd=self.work, env={**self.environ, **environ}, stdout=printed, stderr=printed, text=True
            )

    def printed(self) -> str:
        return (self.work / "printed").read_text()

    def _done(self, argv: Sequence[str], input: str = "") -> str:
        done = subprocess.run(
            argv,
            cwd=self.folder,
            env=self.environ if self.site.exists() else None,
            input=input,
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


SOURCES = ("benchmarks", "docs", "elastic_ext", "examples", "tests", ".ci", ".github")
"""The folders of the repository, all of which an sdist has."""
NOTES = ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md")
SETTINGS = (
    ".gitignore",
    "MANIFEST.in",
    "Makefile",
    "constraints.txt",
    "pyproject.toml",
    "ruff.toml",
    "setup.cfg",
    "setup.py",
)


def made_sdist(folder: Path) -> Path:
    """It is made of a copy, so that nothing is left in the repository, and nothing that lies there is taken along."""
    source = folder / "copy"
    source.mkdir()
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*NOTES, *SETTINGS):
        shutil.copy(ROOT / name, source)
    return made_of(source, "build_sdist", folder)


def made_of(source: Path, what: str, folder: Path) -> Path:
    """The file that setuptools makes of a source tree, as pip and other tools have it do."""
    make = f"from setuptools import build_meta; print(build_meta.{what}({str(folder)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", make], cwd=source, capture_output=True, text=True, timeout=DEADLINE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


def files_in(folder: Path, *names: str) -> set[str]:
    """The files of some folders, by their path below ``folder``; without what Python leaves there."""
    files = (path for name in names for path in (folder / name).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix() for path in files if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="module")
def saved(installed: Installed) -> Path:
    """A copy of what is saved."""
    for name in ("run", "storage"):
        shutil.copytree(SAVED / name, installed.folder / name)
    shutil.copytree(SAVED / "storage", installed.folder / "damaged")
    (data,) = (installed.folder / "damaged").rglob("model_param.00000-*")
    data.write_bytes(data.read_bytes()[:-1] + b"\xff")
    return installed.folder


def until(look: Callable[[], object], process: subprocess.Popen[str], told: Callable[[], str]) -> None:
    """Wait for what a process does."""
    end = time.monotonic() + DEADLINE_SECONDS
    while not look():
        assert process.poll() is None and time.monotonic() < end, told()
        time.sleep(0.02)


# --- what is in it --------------------------------------------------------------------------------------------------


def test_a_wheel_has_every_file_of_the_library_and_nothing_besides(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (about,) = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
        scripts = re.findall(r"(?m)^([\w-]+) = ", wheel.read(about).decode())
    assert held == files_in(ROOT, "elastic_ext")
    assert "elastic_ext/py.typed" in held and any(name.endswith("/at_start/sitecustomize.py") for name in held)
    assert sorted(scripts) == ["elastic-ext", "elastic-run"]


def test_an_sdist_has_what_its_tests_documents_and_examples_need(installed: Installed) -> None:
    with tarfile.open(installed.sdist) as sdist:
        files = {each.name.partition("/")[2] for each in sdist if each.isfile()}
    held = {name for name in files if ".egg-info/" not in name}
    assert held == {"PKG-INFO", *NOTES, *SETTINGS, *files_in(ROOT, *SOURCES)}


def test_a_wheel_says_what_it_is_and_which_torch_it_takes(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        said = HeaderParser().parsestr(wheel.read(name).decode())
    assert (said["Name"], said["Version"], said["Author"]) == ("elastic-ext", VERSION, "the authors of elastic_ext")
    needed = [each for each in said.get_all("Requires-Dist", []) if "extra ==" not in each]
    (torch,) = [each for each in needed if each.startswith("torch")]
    assert re.fullmatch(r"torch(<[\d.]+|>=[\d.]+|,)+", torch) and "<" in torch and ">=" in torch
    assert "tensorboard" in said.get_all("Provides-Extra", [])


def test_mypy_finds_what_is_installed_in_place_from_any_folder(installed: Installed, tmp_path: Path) -> None:
    """As ``pip install --editable`` does: setuptools says by which file of the environment the sources are found."""
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    (site,) = environment.glob("lib/python*/site-packages")
    with zipfile.ZipFile(made_of(installed.source, "build_editable", tmp_path)) as wheel:
        wheel.extractall(site)
    python = str(environment / "bin" / "python")
    shown = subprocess.run(
        [python, "-c", "import elastic_ext; print(elastic_ext.__file__)"], cwd=tmp_path, capture_output=True, text=True
    )
    assert Path(shown.stdout.strip()) == installed.source / "elastic_ext" / "__init__.py", shown.stderr
    asked = [sys.executable, "-m", "mypy", "--python-executable", python, "--cache-dir", str(tmp_path / "cache")]
    checked = subprocess.run(
        [*asked, "--follow-imports=skip", "-c", "import elastic_ext"], cwd=tmp_path, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


# --- the command lines ----------------------------------------------------------------------------------------------


def options_in(text: str) -> list[str]:
    """Of a command's --help."""
    lines = re.findall(r"(?m)^ +(-.+)$", text.partition("\n\n")[2])
    return sorted({option for line in lines for option in re.findall(r"(?<!\S)--[a-z][\w-]*", line.partition("  ")[0])})


def words(command: str) -> list[str]:
    return ["-m", *command.split()[2:]] if command.startswith("python -m ") else command.split()


def test_every_command_that_needs_no_torch_has_its_options(installed: Installed) -> None:
    commands = [command for command in COMMANDS if "run" not in re.split(r"\W", command)]
    told = installed.run(*([*words(command), "--help"] for command in commands))
    assert [each.status for each in told] == [0] * len(commands), told
    assert {command: options_in(each.out) for command, each in zip(commands, told, strict=True)} == {
        command: COMMANDS[command] for command in commands
    }
    groups = {
        f"{command} {name}"
        for command, each in zip(commands, told, strict=True)
        for names in re.findall(r"^\s+\{([\w,]+)\}|(?<=\s)\{([\w,]+)\}\s+\.\.\.", each.out.partition("\n\n")[0])
        for name in (names[0] or names[1]).split(",")
    }
    assert groups == {command for command in COMMANDS if command.startswith("elastic-ext ")}


def test_whatever_needs_torch_starts_and_has_its_options(installed: Installed, saved: Path) -> None:
    commands = [command for command in COMMANDS if "run" in re.split(r"\W", command)]
    assert len(commands) == 3
    missing = str(installed.work / "no-such-script.py")
    *told, refused, converted = installed.run(
        *([*words(command), "--help"] for command in commands),
        ["elastic-run", "--standalone", missing],
        ["elastic-ext", "ckpt", "convert", "storage", "--to", "dcp", "converted"],
        needs_torch=True,
    )
    for command, each in zip(commands, told, strict=True):
        assert each.status == 0 and {*COMMANDS[command]} <= {*options_in(each.out)}, command
    assert refused.status == 2 and "no-such-script.py" in refused.err
    assert converted.status == 0 and (saved / "converted" / ".metadata").exists(), converted.err


def test_the_processes_that_the_library_starts_by_itself_start(installed: Installed) -> None:
    """The commands as a module, the process that predicts memory, and the one that outlives its agent."""
    as_command, as_module = installed.run(["elastic-ext", "--help"], ["-m", "elastic_ext.cli", "--help"])
    assert as_module.status == 0 and options_in(as_module.out) == options_in(as_command.out)

    begin = "from elastic_ext.profile.memory.analysis_process import main; main()"
    where: Any = {"cwd": installed.work, "env": installed.environ, "text": True}
    with subprocess.Popen(
        [sys.executable, "-c", begin], **where, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1
    ) as analysis:
        assert analysis.stdin is not None and analysis.stdout is not None
        analysis.stdin.write("no question\n")
        assert "problem" in json.loads(analysis.stdout.readline())
        assert analysis.wait(DEADLINE_SECONDS) == 0
    memory = installed.work / "elastic_ext-memory"
    memory.mkdir()
    warden = [sys.executable, "-m", "elastic_ext.agent.orphan_guard", str(memory), "1"]
    dismissed, orphaned = (
        subprocess.run(warden, **where, input=told, capture_output=True, timeout=DEADLINE_SECONDS)
        for told in ('["done"]\n', "[]\n")
    )
    assert (dismissed.returncode, dismissed.stderr) == (0, "")
    assert orphaned.returncode == 0 and "the agent was killed" in orphaned.stderr and not memory.exists()


STATUSES: Sequence[tuple[int, Sequence[str]]] = [
    (2, []),
    (2, ["no-such-command"]),
    (0, ["config", "set", "user.a=1", "--file", "new/config.json"]),
    (2, ["config", "set", "user.a=", "no.such.key=1", "--file", "new/config.json"]),
    (0, ["config", "show", "--file", "new/config.json"]),
    (2, ["config", "show", "--file", "missing/config.json"]),
    (0, ["config", "show", "--file", "run"]),  # the config file in it
    (1, ["config", "show", "--file", "/dev/null"]),
    (2, ["config", "undo", "--file", "new/config.json", "--no-such-option"]),
    (1, ["config", "show", "--master", "127.0.0.1:9"]),
    (2, ["config", "show", "--master", "nowhere"]),
    (1, ["status", "run"]),
    (2, ["status", "missing"]),
    (1, ["status", "--master", "127.0.0.1:9"]),
    (0, ["events", "run"]),
    (2, ["events", "missing"]),
    (0, ["report", "run", "--out", "report.html"]),
    (2, ["report", "missing"]),
    (2, ["tuning", "log"]),
    (1, ["tuning", "log", "--master", "127.0.0.1:9"]),
    (2, ["tuning", "memory", "missing"]),
    (0, ["ckpt", "ls", "storage"]),
    (0, ["ckpt", "verify", "storage"]),
    (1, ["ckpt", "verify", "damaged"]),
    (2, ["ckpt", "show", "missing"]),
    (0, ["ckpt", "export", "storage", "exported"]),
    (2, ["ckpt", "export", "storage", "exported"]),
    (0, ["ckpt", "prune", "storage", "--keep-last", "1", "--dry-run"]),
    (2, ["ckpt", "prune", "storage", "--keep-last", "0"]),
    (2, ["ckpt", "convert", "storage", "elsewhere"]),
    (2, ["doctor", "--nnodes", "two"]),
]
"""Of commands in a folder with what is saved here, and a damaged copy of its checkpoints."""


def test_commands_exit_with_the_status_that_they_had(installed: Installed, saved: Path) -> None:
    *told, doctor = installed.run(
        *(["elastic-ext", *arguments] for _, arguments in STATUSES), ["elastic-ext", "doctor", "--path", ".", "--json"]
    )
    assert doctor.status in (0, 1) and doctor.json(), doctor.err  # as this machine is
    found = [(each.status, arguments) for each, (_, arguments) in zip(told, STATUSES, strict=True)]
    assert found == STATUSES, [each.err for each in told]
    assert not any("Traceback" in each.err for each in told)


# --- what an earlier commit has recorded ----------------------------------------------------------------------------

READ = {
    "history": ["config", "history", "--file", "run/config.json", "--json"],
    "diff": ["config", "diff", "--file", "run/config.json", "1", "2", "--json"],
    "events": ["events", "run", "--json"],
    "report": ["report", "run", "--json"],
    "status": ["status", "run", "--json"],
    "checkpoints": ["ckpt", "ls", "storage", "--json"],
    "checkpoint": ["ckpt", "show", "storage", "--boxes", "--json"],
    "verified": ["ckpt", "verify", "storage", "--json"],
}
NOW: Mapping[str, frozenset[str]] = {
    "status": frozenset(
        {"time", "seen_seconds", "measured_seconds", "cpu_percent", "text", "troubles", "notes", "profile"}
    ),
    "checkpoints": frozenset({"age_seconds"}),
    "master status": frozenset({"time", "up_seconds", "seen_seconds", "text", "troubles", "recommendations"}),
    "master events": frozenset({"time", "text"}),
}
"""What is of the time and the place at which it is asked for."""


def likened(value: Any, *, changing: frozenset[str] = frozenset()) -> Any:
    """Without what is another when it is told again, and with numbers as no machine adds them up otherwise."""
    if isinstance(value, dict):
        return {key: "..." if key in changing else likened(each, changing=changing) for key, each in value.items()}
    if isinstance(value, list):
        return [likened(each, changing=changing) for each in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def read_by_commands(installed: Installed) -> dict[str, Any]:
    """What commands tell of the copy of what is saved."""
    told = installed.run(*(["elastic-ext", *arguments] for arguments in READ.values()))
    found = {}
    for name, each in zip(READ, told, strict=True):
        each = each._replace(out=each.out.replace(str(installed.folder), "/jobs/saved"))
        found[name] = likened(each.json(), changing=NOW.get(name, frozenset()))
    return found


def test_records_of_an_earlier_commit_are_told_of_as_they_were(installed: Installed, saved: Path) -> None:
    told = read_by_commands(installed)
    assert told.keys() == READ.keys()
    for name in READ:
        assert told[name] == OUTPUTS[name], name


def test_a_config_and_its_history_go_on_as_they_did(installed: Installed, saved: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(SAVED / "run", run_dir)
    before = (run_dir / ".config.json.history").read_bytes()
    (undone,) = installed.run(["elastic-ext", "config", "undo", "--file", str(run_dir / "config.json")])
    assert undone.status == 0 and undone.out.startswith("version 5 written\n")
    written = (run_dir / "config.json").read_text()
    assert written == (
        '{\n  "version": 5,\n  "reason": "back to version 1",\n'
        '  "optimizer": {\n    "learning_rate": 0.125\n  },\n  "user": {\n    "note": "one"\n  }\n}\n'
    )
    after = (run_dir / ".config.json.history").read_bytes()
    assert after.startswith(before)
    line = re.sub(rb'^{"time": [0-9.]+', b'{"time": 0', after[len(before) :])
    assert line == b'{"time": 0, "restores": 1, "config": %s}\n' % json.dumps(json.loads(written)).encode()


# --- the master -----------------------------------------------------------------------------------------------------


@contextmanager
def master(installed: Installed, folder: Path, **options: str) -> Iterator[str]:
    """A process that goes on with the saved store; its address. It ends as a master does that is told to."""
    (folder / "state").mkdir(parents=True)
    with closing(sqlite3.connect(folder / "state" / "master.db")) as store:
        store.executescript((SAVED / "master.sql").read_text())
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    arguments += ["--port=0", f"--port-file={folder}/port", f"--state-dir={folder}/state"]
    process = installed.start([sys.executable, "-m", "elastic_ext.master", *arguments])
    try:
        until((folder / "port").exists, process, installed.printed)
        yield f"127.0.0.1:{int((folder / 'port').read_text())}"
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == 0, installed.printed()
    finally:
        process.kill()
        process.wait()


ASKED = {
    "master history": ["config", "history", "--json"],
    "master config": ["config", "show"],
    "master events": ["events", "--last", "0", "--json"],
    "master status": ["status", "--json"],
    "master decisions": ["tuning", "log", "--json"],
}


def asked_of_master(installed: Installed, *who: str) -> dict[str, Any]:
    """What a master that goes on with the saved store tells of it."""
    told = installed.run(*(["elastic-ext", *arguments, *who] for arguments in ASKED.values()))
    assert [each.status for each in told] == [0] * len(ASKED), told
    return {
        name: each.out if name == "master config" else likened(each.json(), changing=NOW.get(name, frozenset()))
        for name, each in zip(ASKED, told, strict=True)
    }


def test_a_master_goes_on_with_what_an_earlier_one_has_kept(installed: Installed, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("a-token-of-tests-alone\n")
    metrics = free_port()
    with master(installed, tmp_path, token_file=str(token), metrics_port=str(metrics)) as address:
        who = ("--master", address, "--token-file", str(token))
        found = asked_of_master(installed, *who)
        (refused,) = installed.run(["elastic-ext", "config", "set", "typo=1", *who])
        request = urllib.request.Request(
            f"http://127.0.0.1:{metrics}/metrics", headers={"Authorization": f"Bearer {token.read_text().strip()}"}
        )
        with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as page:
            names = set(re.findall(r"(?m)^# TYPE (\S+)", page.read().decode()))
    assert refused.status == 2 and refused.err.startswith("elastic-ext: refused: typo is not a known key")
    (status,) = found["master status"]
    assert status["library"] == VERSION  # a master's own, which no earlier one has kept
    status["library"] = OUTPUTS["master status"][0]["library"]
    for name in ASKED:
        assert found[name] == OUTPUTS[name], name
    assert {"elastic_ext_master_epoch", "elastic_ext_config_version"} <= names
    assert names <= json.loads((SAVED / "metrics.json").read_text()).keys()


# --- a job ----------------------------------------------------------------------------------------------------------

ENVIRONMENT = [
    "ELASTIC_EXT_CONFIG_FILE",
    "ELASTIC_EXT_JOB",
    "ELASTIC_EXT_PULSE_DIR",
    "ELASTIC_EXT_RUN_DIR",
    "ELASTIC_EXT_SEAT",
    "ELASTIC_EXT_SHUTDOWN_SECONDS",
    "ELASTIC_EXT_STAGING_DIR",
]
"""What an agent tells its workers, besides what torchrun does."""
SAMPLES = [7, 23, 29, 0, 19, 3, 8, 12, 25, 9, 2, 27]
"""Of the three steps after the saved ones."""
NAMED_FREELY = {"shares", "seconds", "processor_seconds", "typical", "details", "values", "choices", "fixed"}
"""Of records, those whose keys are the job's."""


ADDED = {
    "metrics-0.json": {"from_checkpoint", "not_from_checkpoint"},
    "metrics-0.json measures": {
        "epoch",
        "num_epoch_steps_left",
        "checkpoint_step",
        "checkpoint_time",
        "logged",
        "global_batch_size",
        "micro_batch_size",
        "learning_rate",
        "num_processors",
    },
    "profile-0.jsonl": {"logged", "logged_weights", "members"},
    "job.json": {"members"},
    "workers.json": {"waiting"},
    "workers.json workers": {"seat", "children_bytes"},
    "membership.json": {"mode", "generation", "store", "num_seats", "lost"},
    "membership.json nodes": {"seats"},
}
"""What records have got since, by where it stands: a reader of before passes over it."""
ADDED_FILES = frozenset({"member-0.json"})


def unlike(was: Any, now: Any, where: str) -> list[str]:
    """Where the fields of two records are not the same; of what either has not, nothing can be said."""
    if isinstance(was, dict) and isinstance(now, dict):
        kept = [key for key in now if key not in ADDED.get(where, ())]
        keys = [f"{where}: {list(was)}, and now {list(now)}"] * (list(was) != kept)
        inner = [key for key in was.keys() & now.keys() if key not in NAMED_FREELY]
        return keys + [fault for key in inner for fault in unlike(was[key], now[key], f"{where} {key}")]
    if isinstance(was, list) and isinstance(now, list) and was and now:
        return unlike(was[0], now[0], where)
    return [f"{where} was {was!r} and is {now!r}"] * (
        isinstance(was, (dict, list)) != isinstance(now, (dict, list)) and None not in (was, now)
    )


def records(run_dir: Path) -> dict[str, Any]:
    """The first record of each file of rank 0, of the agent and of the node."""
    return {
        path.name: json.JSONDecoder().raw_decode(path.read_text())[0]
        for path in sorted(run_dir.iterdir())
        if path.suffix in (".json", ".jsonl", ".history") and not re.search(r"-[1-9]", path.name)
    }


def test_a_job_goes_on_from_an_earlier_commits_checkpoint_and_is_told_of(installed: Installed, tmp_path: Path) -> None:
    """Its loader's worker outlives the signal that ends jobs; a master comes beside it; and it ends by an exception."""
    shutil.copytree(SAVED / "storage", tmp_path / "storage")
    shutil.copy(SAVED / "job.py", tmp_path)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for name in ("config.json", ".config.json.history"):
        shutil.copy(SAVED / "run" / name, run_dir)
    process = installed.start(
        [sys.executable, installed.script("elastic-run"), "--standalone", str(tmp_path / "job.py"), str(tmp_path)],
        ELASTIC_EXT_RUN_DIR=str(run_dir),
        ELASTIC_EXT_JOB="saved",
    )
    try:
        until(lambda: re.search("^told .*\n", installed.printed(), re.M), process, installed.printed)
        until((run_dir / "master.json").exists, process, installed.printed)
        (status, masters) = installed.run(
            ["elastic-ext", "status", str(run_dir), "--json"],
            ["elastic-ext", "config", "show", "--master", str(run_dir)],
        )
        of_master = json.loads((run_dir / "master.json").read_text())
        (tmp_path / "seen").touch()
        assert process.wait(DEADLINE_SECONDS) == 1, installed.printed()
    finally:
        process.kill()
        process.wait()
    found = json.loads(re.findall(r"(?m)^told (.*)$", installed.printed())[0])
    expected = json.loads((SAVED / "expected.json").read_text())
    for key in ("model", "momenta", "average", "rate", "counts"):
        assert found["facts"][key] == expected[key], key
    assert found["facts"]["config"]["version"] == expected["config"]["version"] == 4
    assert found["samples"] == SAMPLES and found["num_makers"] == 1 and found["environment"] == ENVIRONMENT
    assert status.status == 0 and status.json()[0]["state"] == "running" and status.json()[0]["master"]["epoch"] == 1
    assert list(of_master) == ["address", "token_file", "ca_file", "pid", "job_id", "epoch", "time"]
    assert masters.status == 0 and json.loads(masters.out)["version"] == 4
    assert re.search(
        r"elastic-run \S+ rank 0 \(.*\) on .* exited with status 1: ValueError: negative loss\n", installed.printed()
    )
    was, now = records(SAVED / "run"), records(run_dir)
    assert now.keys() - ADDED_FILES == was.keys()
    faults = [fault for name in was for fault in unlike(was[name], now[name], name)]
    assert not faults, "\n".join(faults)
