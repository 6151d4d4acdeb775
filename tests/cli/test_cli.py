"""elastic-ext config: what each command writes, prints and exits with; what a refusal leaves alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from elastic_ext.cli import main
from elastic_ext.cli.config import parse_assignment
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.history import ConfigHistory
from elastic_ext.errors import ConfigError
from tests.test_saved import ALL_KEYS

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_WRITERS = 8
SETS_PER_WRITER = 5
END_SECONDS = 120.0


class Shell:
    """Runs commands on one config file in this process; keeps what they wrote."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path = path
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, command: str, *arguments: str) -> int:
        self._capsys.readouterr()
        status = main(["config", command, "--file", str(self.path), *arguments])
        self.out, self.err = self._capsys.readouterr()
        return status

    def read(self) -> ElasticConfig:
        return ElasticConfig.parse(self.path.read_bytes())

    def disk(self) -> dict[str, bytes]:
        """Every file beside the config, without the lock, which is empty."""
        names = sorted(os.listdir(self.path.parent)) if self.path.parent.is_dir() else []
        return {name: (self.path.parent / name).read_bytes() for name in names if not name.endswith(".lock")}


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path / "config.json", capsys)


# ---- KEY=VALUE ----


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("optimizer.learning_rate=0.001", "optimizer.learning_rate", 0.001),
        ("a=1e-3", "a", 0.001),
        ("a=3", "a", 3),
        ("a=-3", "a", -3),
        ("a=true", "a", True),
        ("a=True", "a", "True"),
        ("a=null", "a", None),
        ("a=", "a", None),
        ('a=""', "a", ""),
        ("a= ", "a", " "),
        ("a= 5 ", "a", 5),
        ("a=full_shard", "a", "full_shard"),
        ('a="full_shard"', "a", "full_shard"),
        ("a=[1, 2]", "a", [1, 2]),
        ("a=[1,", "a", "[1,"),
        ('a={"b": [1]}', "a", {"b": [1]}),
        ("a=b=c", "a", "b=c"),
        ("a==", "a", "="),
        ("a=007", "a", "007"),
        ("a=0x10", "a", "0x10"),
        ("a=1_000", "a", "1_000"),
        ("a=größe", "a", "größe"),
        ("user.a b=1", "user.a b", 1),
    ],
)
def test_an_assignment_is_json_where_it_is_json_and_else_text(text: str, path: str, value: object) -> None:
    parsed = parse_assignment(text)
    assert parsed == (path, value) and type(parsed[1]) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        *("", "=", "=1", "a", "--a", "a=NaN", "a=-Infinity", "a=1e999"),
        *("a=" + "9" * 20, "a=" + "9" * 5000, "a=" + "[" * 100_000, "a=" + "[" * 9 + "]" * 9),
        *('a="\\ud800"', 'a={"b":1,"b":2}'),
    ],
)
def test_an_assignment_that_no_config_could_hold_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_assignment(text)


# ---- show, set ----


def test_show_prints_the_file_as_a_config_that_can_be_put_back(run: Shell) -> None:
    run("set", "optimizer.learning_rate=0.1", "user.name=größe", "--reason", "first")
    assert run("show") == 0
    assert ElasticConfig.parse(run.out.encode()) == run.read()
    assert run.out.encode() == run.path.read_bytes()


def test_set_writes_the_next_version_with_its_reason_and_prints_what_changed(run: Shell) -> None:
    assert run("set", "dataloader.batch_size=4", "--reason", "a start") == 0
    assert run.out == "version 1 written\ndataloader.batch_size: not set -> 4\n"
    assert run("set", "dataloader.batch_size=8", "user.mixup=0.2", "--at-step", "100", "--reason", "faster") == 0
    assert run.out == "version 2 written\ndataloader.batch_size: 4 -> 8\nuser.mixup: not set -> 0.2\n"
    config = run.read()
    assert (config.version, config.reason, config.apply_at_step) == (2, "faster", 100)
    assert run("set", "dataloader.batch_size=") == 0
    assert run.out == (
        "version 3 written\ndataloader.batch_size: 8 -> not set\n"
        "version 3 holds what version 2 set for step 100 as well (user.mixup): it comes into force with this version, "
        "unless that step has passed; --at-step 100 would keep it waiting\n"
    )
    assert run.read().values() == {"user.mixup": 0.2}
    assert run.read().apply_at_step is None


@pytest.mark.parametrize(
    "arguments",
    [
        ["typo=1"],
        ["optimizer.lr=1"],
        ["version=9"],
        ["reason=x"],
        ["optimizer.learning_rate=fast"],
        ["optimizer.learning_rate=0"],
        ["optimizer.learning_rate=NaN"],
        ["dataloader.batch_size=true"],
        ["dataloader.batch_size=" + "9" * 5000],
        ["dataloader.batch_size=null"],
        ["user.x=null"],
        ["user.x={}"],
        ["user.x=" + "[" * 7 + "]" * 7],
        ["user.x=" + "[" * 100_000],
        ['user.x="\\ud800"'],
        ["user.x=\udcff"],
        ["user.\udcff=1"],
        ["user.=1"],
        ["user.x=" + "y" * (1 << 20)],
        ["user.absent="],
        ["optimizer.weight_decay="],
        ["novalue"],
        ["=1"],
        ["user.x=1", "typo=1"],
        ["checkpoint.steps=1", "checkpoint.epochs=1"],
        ["user.x=1", "--at-step", "-1"],
        ["user.x=1", "--reason", "z" * 2001],
        ["user.x=1", "--reason", "\udcff"],
    ],
)
def test_a_refused_set_exits_2_with_the_reason_and_changes_nothing_on_disk(run: Shell, arguments: list[str]) -> None:
    run("set", "user.name=old")
    before = run.disk()
    assert run("set", *arguments) == 2
    assert run.out == "" and run.err.startswith("elastic-ext: refused: ") and "allowed: " in run.err
    assert run.err.count("\n") == 1 and len(run.err) < 3000
    assert run.disk() == before


@pytest.mark.parametrize("arguments", [[], ["user.x=1", "--at-step", "soon"], ["user.x=1", "--why", "x"]])
def test_a_command_that_makes_no_sense_exits_2_with_its_usage(run: Shell, arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("set", *arguments)
    assert run.disk() == {}


@pytest.mark.parametrize("broken", [b"", b"half a fi", b'{"version": 1, "typo": 1}', b'{"version": 1, "version": 2}'])
@pytest.mark.parametrize("command", [["show"], ["set", "user.x=1"], ["diff"], ["history"], ["undo"]])
def test_a_refused_file_without_a_history_is_reported_and_left_alone(
    run: Shell, broken: bytes, command: list[str]
) -> None:
    run.path.write_bytes(broken)
    assert run(*command) == 2
    assert run.err.startswith("elastic-ext: refused: ")
    assert run.disk() == {"config.json": broken}


@pytest.mark.parametrize("command", ["show", "diff", "undo"])
def test_a_file_that_does_not_exist_is_refused_by_what_needs_one(run: Shell, command: str) -> None:
    assert run(command) == 2
    assert run.disk() == {}


def test_what_is_no_file_exits_1_and_stays_as_it_is(run: Shell) -> None:
    os.mkfifo(run.path)
    for command in (["show"], ["set", "user.x=1"], ["undo"]):
        assert run(*command) == 1
        assert "regular file" in run.err
    assert run.path.is_fifo()


def test_a_folder_that_cannot_be_made_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_bytes(b"in the way")
    run = Shell(tmp_path / "file" / "below" / "config.json", capsys)
    assert run("set", "user.x=1") == 1
    assert run.err.startswith("elastic-ext: ")


@pytest.mark.parametrize("command", [["config", "--help"], ["config", "set", "--help"]])
def test_help_lists_every_key_that_set_takes(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(command)
    words = capsys.readouterr().out.replace(",", " ").split()
    assert {*words} >= {*ALL_KEYS, "user.NAME"} - {"user.größe"}


# ---- diff, history, undo ----


def test_diff_shows_what_differs_between_versions(run: Shell) -> None:
    for value in (1, 2, 3):
        run("set", f"user.x={value}", f"user.only{value}=true")
    assert run("diff") == 0
    assert run.out == "user.x: 2 -> 3\nuser.only3: not set -> true\n"
    assert run("diff", "1") == 0
    assert run.out == "user.x: 1 -> 3\nuser.only2: not set -> true\nuser.only3: not set -> true\n"
    assert run("diff", "2", "1") == 0
    assert run.out == "user.x: 2 -> 1\nuser.only2: true -> not set\n"
    assert run("diff", "2", "2") == 0 and run.out == ""
    assert run("diff", "9") == 2 and "version 9 is not in the history; allowed: one of 1, 2, 3" in run.err
    assert run("diff", "1", "2", "3") == 2 and "at most two" in run.err


def test_diff_of_a_file_with_one_version_is_empty(run: Shell) -> None:
    run("set", "user.x=1")
    assert run("diff") == 0 and run.out == ""


def test_diff_shows_an_edit_by_hand_even_without_a_new_version(run: Shell) -> None:
    run("set", "user.x=1")
    run.path.write_text('{"version": 1, "user": {"x": 2}}')
    assert run("diff") == 0 and run.out == "user.x: 1 -> 2\n"


def test_history_lists_every_version_with_time_reason_and_changes(run: Shell) -> None:
    run("set", "user.x=1", "--reason", "größe")
    run("set", "user.x=2")
    run.path.write_text('{"version": 7, "reason": "by hand", "user": {"x": 3}}')
    run("undo")
    assert run("history") == 0
    lines = run.out.splitlines()
    assert [line.partition(",")[0] for line in lines[::2]] == ["version 1", "version 2", "version 7", "version 8"]
    assert [line.strip() for line in lines[1::2]] == [
        "user.x: not set -> 1",
        "user.x: 1 -> 2",
        "user.x: 2 -> 3",
        "user.x: 3 -> 2",
    ]
    assert lines[0].endswith(": größe") and lines[4].endswith(": by hand") and lines[6].endswith(": back to version 2")
    assert run("history", "--json") == 0
    records = [json.loads(line) for line in run.out.splitlines()]
    assert [(record["config"]["version"], record["restores"]) for record in records] == [
        (1, None),
        (2, None),
        (7, None),
        (8, 2),
    ]


def test_history_of_no_file_is_empty(run: Shell) -> None:
    assert run("history") == 0 and run.out == ""


def test_a_reason_made_to_steer_a_terminal_is_printed_harmless(run: Shell) -> None:
    run("set", "user.x=\x1b[2J", "--reason", "a\x1b[2J\nversion 99, \u202e")
    assert run("history") == 0
    assert len(run.out.splitlines()) == 2
    assert all(line.isprintable() for line in run.out.splitlines())


def test_undo_writes_the_earlier_content_as_a_new_version_again_and_again(run: Shell) -> None:
    for value in (1, 2, 3):
        run("set", f"user.x={value}")
    for version, value in ((4, 2), (5, 1)):
        assert run("undo") == 0
        assert run.out == f"version {version} written\nuser.x: {value + 1} -> {value}\n"
        assert run.read().version == version and run.read().get("user.x") == value
    assert run("undo") == 0 and run.out == "version 6 written\nuser.x: 1 -> not set\n"
    before = run.disk()
    assert run("undo") == 2 and "no earlier version" in run.err
    assert run.disk() == before


def test_undo_repairs_a_broken_file(run: Shell) -> None:
    run("set", "user.x=1")
    run.path.write_bytes(b"half a fi")
    assert run("set", "user.x=2") == 2
    assert run("undo") == 0
    assert run.read().get("user.x") == 1 and run.read().version == 2


# ---- which file ----


def test_the_file_comes_from_the_argument_then_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ELASTIC_EXT_CONFIG_FILE", raising=False)
    monkeypatch.delenv("ELASTIC_EXT_RUN_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["config", "show"]) == 2
    assert "no config file is named" in capsys.readouterr().err
    monkeypatch.setenv("ELASTIC_EXT_RUN_DIR", "~/run")
    assert main(["config", "set", "user.x=1"]) == 0
    monkeypatch.setenv("ELASTIC_EXT_CONFIG_FILE", "~/file.json")
    assert main(["config", "set", "user.x=2"]) == 0
    assert main(["config", "set", "--file", str(tmp_path / "given.json"), "user.x=3"]) == 0
    found = {path.name: json.loads(path.read_bytes())["user"]["x"] for path in tmp_path.rglob("*.json")}
    assert found == {"config.json": 1, "file.json": 2, "given.json": 3}
    assert (tmp_path / "run" / "config.json").is_file()
    capsys.readouterr()
    for name in ("ELASTIC_EXT_CONFIG_FILE", "ELASTIC_EXT_RUN_DIR"):
        monkeypatch.delenv("ELASTIC_EXT_CONFIG_FILE")
        monkeypatch.setenv(name, "~nobody-is-called-so/x")
        assert main(["config", "show"]) == 2
        assert f'{name} is "~nobody-is-called-so/x"; allowed: a path' in capsys.readouterr().err
    assert main(["status"]) == 2
    assert "elastic-ext: ~nobody-is-called-so/x" in capsys.readouterr().err


# ---- processes ----


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY)


WRITER = """
import sys
from elastic_ext.cli import main
path, name, count = sys.argv[1:]
for number in range(int(count)):
    status = main(["config", "set", "--file", path, f"user.{name}={number}", "--reason", name])
    if status:
        sys.exit(status)
"""


def test_eight_processes_that_set_at_once_lose_no_update(run: Shell) -> None:
    writers = [start(WRITER, str(run.path), f"w{number}", str(SETS_PER_WRITER)) for number in range(NUM_WRITERS)]
    outputs = [writer.communicate(timeout=END_SECONDS) for writer in writers]
    assert [writer.returncode for writer in writers] == [0] * NUM_WRITERS, outputs
    num_sets = NUM_WRITERS * SETS_PER_WRITER
    config = run.read()
    assert config.version == num_sets
    assert config.values() == {f"user.w{number}": SETS_PER_WRITER - 1 for number in range(NUM_WRITERS)}
    entries = ConfigHistory(run.path).entries()
    assert [entry.config.version for entry in entries] == list(range(1, num_sets + 1))
    printed = [line for out, _ in outputs for line in out.splitlines() if line.startswith("version ")]
    assert sorted(printed) == sorted(f"version {version} written" for version in range(1, num_sets + 1))
    for out, _ in outputs:
        changes = [line for line in out.splitlines() if not line.startswith("version ")]
        assert len(changes) == SETS_PER_WRITER  # each told of its own change only
    assert sorted(os.listdir(run.path.parent)) == [".config.json.history", ".config.json.lock", "config.json"]


FULL_DISK = """
import resource, sys
from elastic_ext.cli import main
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
sys.exit(main(["config", *sys.argv[2:]]))
"""


@pytest.mark.parametrize("command", [["set", "user.x=2"], ["undo"]])
def test_a_full_disk_exits_1_and_leaves_every_file_as_it_was(run: Shell, command: list[str]) -> None:
    run("set", "user.x=0")
    run("set", "user.x=1")
    before = run.disk()
    full = start(FULL_DISK, "10", *command, "--file", str(run.path))
    out, err = full.communicate(timeout=END_SECONDS)
    assert (full.returncode, out) == (1, "")
    assert "File too large" in err and "the config file is as it was" in err and "Traceback" not in err
    assert run.disk() == before


def test_a_disk_with_room_for_the_config_but_not_for_its_history_says_so_and_the_config_counts(run: Shell) -> None:
    for value in range(4):
        run("set", f"user.x={value}", "--reason", "r" * 100)
    full = start(FULL_DISK, "400", "set", "user.x=5", "--file", str(run.path))
    out, err = full.communicate(timeout=END_SECONDS)
    assert full.returncode == 0
    assert out == "version 5 written\nuser.x: 3 -> 5\n"
    assert "version 5 was written to the config file, but not to its history" in err
    assert run.read().version == 5
    run("set", "user.x=6")
    assert [entry.config.version for entry in ConfigHistory(run.path).entries()] == [1, 2, 3, 4, 5, 6]


def test_a_set_that_is_killed_leaves_a_file_that_the_next_set_goes_on_from(run: Shell) -> None:
    for _ in range(5):
        writer = start(WRITER, str(run.path), "w", "100000")
        assert writer.stdout is not None
        for _ in range(6):
            writer.stdout.readline()
        writer.kill()
        writer.communicate(timeout=END_SECONDS)
        version = run.read().version
        assert run("set", "user.after=1") == 0
        assert run.read().version == version + 1


def test_the_command_line_imports_neither_torch_nor_watchdog(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom elastic_ext.cli import main\n"
        "assert main(['config', 'set', '--file', sys.argv[1], 'user.x=1']) == 0\n"
        "heavy = {'torch', 'numpy', 'grpc', 'watchdog', 'accelerate'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    process = start(script, str(tmp_path / "config.json"))
    _, err = process.communicate(timeout=END_SECONDS)
    assert process.returncode == 0, err


def test_the_module_runs_as_a_program_whatever_the_terminal_can_show(run: Shell) -> None:
    run("set", "user.name=größe \N{GRINNING FACE}", "--reason", "größe")
    for command in ("show", "history", "diff"):
        done = subprocess.run(
            [sys.executable, "-m", "elastic_ext.cli", "config", command, "--file", str(run.path)],
            capture_output=True,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            timeout=END_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
