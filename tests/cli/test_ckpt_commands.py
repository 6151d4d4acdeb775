"""elastic-ext ckpt: what each command tells, exits with and leaves alone; damage of every kind; no torch."""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import nn

from elastic_ext.cli import main
from elastic_ext.cli.ckpt import COMMANDS, Terminal
from elastic_ext.fsdp import ShardCheckpointer
from elastic_ext.fsdp.checkpoint.contents import KINDS, STATE_FILE, meta_file, shard_file
from elastic_ext.fsdp.checkpoint.folder.claim import Reading, read_holder
from elastic_ext.fsdp.checkpoint.folder.cleanup import IDLE_SECONDS
from elastic_ext.fsdp.checkpoint.folder.commit import COMMIT, Commit, FileSummary, Lineage, checksum_of, read_commit
from elastic_ext.fsdp.checkpoint.format.metadata import StateMeta, TensorMeta
from elastic_ext.fsdp.checkpoint.format.shardfile import BLOCK_BYTES, ShardSummary, SumTable, laid_out
from elastic_ext.fsdp.checkpoint.format.shardfile import checksum_of as shard_checksum_of
from elastic_ext.fsdp.layout import Box, Layout
from elastic_ext.records.text import age_in_words, size_in_words
from tests.support.ranks import RankPool
from tests.support.saves import Run, runs
from tests.support.saving import begin_job, job_folder

REPOSITORY = str(Path(__file__).resolve().parents[2])
END_SECONDS = 120.0
MOST_MEGABYTES = 256


class Shell:
    """Runs commands in this process; keeps what they wrote."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, command: str, path: Path, *arguments: str) -> int:
        self._capsys.readouterr()
        status = main(["ckpt", command, str(path), *arguments])
        self.out, self.err = self._capsys.readouterr()
        return status

    def records(self, command: str, path: Path, *arguments: str) -> list[dict[str, Any]]:
        self.status = self(command, path, *arguments, "--json")
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage with a job of three checkpoints, which nobody changes."""
    storage = tmp_path_factory.mktemp("saved")
    begin_job(0, storage, 3, width=2048)
    return storage


@pytest.fixture
def storage(saved: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    shutil.copytree(saved, tmp_path / "storage")
    return tmp_path / "storage"


def disk(path: Path) -> dict[str, bytes]:
    """Every file below a folder, but for the lock, which is empty."""
    files = (file for file in sorted(path.rglob("*")) if file.is_file() and file.name != "RUN.lock")
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def flip(file: Path, at: int) -> None:
    """Change one bit, in a file of its own."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.unlink()  # which may have another name too
    file.write_bytes(data)


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    for each in [*path.rglob("*"), path]:
        os.utime(each, (then, then))


def start(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=END_SECONDS, check=False)


# ---- ls ----


def test_ls_tells_of_every_checkpoint_of_every_job_whatever_path_leads_there(run: Shell, storage: Path) -> None:
    job = job_folder(storage)
    for path in (storage, storage / "fsdp_checkpoint", job):
        assert run("ls", path) == 0
        lines = run.out.splitlines()
        assert lines[0] == str(job)
        assert re.split("  +", lines[1]) == ["NAME", "STEP", "EPOCHS DONE", "SIZE", "LAYOUT", "RUNS", "AGE"]
        assert [line.split()[0] for line in lines[2:]] == ["step_1", "step_2", "step_3"]
    assert run("ls", job / "step_2") == 0 and "step_2" in run.out and "step_1" not in run.out
    shutil.copytree(job, job.with_name("other_20261120-000000"))
    records = run.records("ls", storage)
    assert [(record["job"], record["step"]) for record in records] == [
        *((job.name, step) for step in (1, 2, 3)),
        *(("other_20261120-000000", step) for step in (1, 2, 3)),
    ]
    commit = read_commit(job / "step_1")
    assert records[0]["num_bytes"] == sum(commit.sizes().values()) and records[0]["num_ranks"] == 1
    assert records[0]["run"] == commit.run_id and 0 <= records[0]["age_seconds"] < 3600


def test_ls_tells_of_lineages_and_of_what_is_no_checkpoint(run: Shell, tmp_path: Path) -> None:
    runs(
        tmp_path,
        {"a": (None, ["step_1", "step_2", "step_3"]), "b": ("step_2", ["step_4"]), "c": ("step_4", ["step_5"])},
    )
    (tmp_path / "step_6").mkdir()
    (tmp_path / "step_7").mkdir()
    (tmp_path / "step_7" / COMMIT).write_bytes(b"nonsense")
    (tmp_path / ".garbage-0123456789abcdef-step_0").mkdir()
    assert run("ls", tmp_path) == 1
    assert "b (from a at step 2)" in run.out and "c (from b at step 4, 3 runs)" in run.out
    states = {record["name"]: record["state"] for record in run.records("ls", tmp_path)}
    assert states == {
        **{f"step_{number}": "committed" for number in (1, 2, 4, 5)},
        "step_3.abandoned-b": "abandoned",
        "step_6": "unfinished",
        "step_7": "unreadable",
        ".garbage-0123456789abcdef-step_0": "garbage",
    }


def test_another_name_of_a_checkpoint_beside_it_is_no_second_one(run: Shell, storage: Path, tmp_path: Path) -> None:
    job = job_folder(storage)
    (job / "step_10").symlink_to("step_3")
    (job / "step_11").symlink_to(job / "step_3")
    shutil.move(job / "step_1", tmp_path / "archive")
    (job / "step_1").symlink_to(tmp_path / "archive")  # its only name here
    names = ["step_1", "step_2", "step_3"]
    assert [record["name"] for record in run.records("ls", job)] == names
    assert run("verify", job) == 0 and run.out.count(": whole, ") == 3
    assert run("prune", job, "--keep-last", "2", "--dry-run") == 0
    assert "step_2 stays" in run.out and "step_3 stays: the newest" in run.out and "step_1 " in run.out


# ---- show ----


def test_show_tells_of_all_tensors_of_the_newest_or_the_given_one(run: Shell, storage: Path) -> None:
    job = job_folder(storage)
    assert run("show", job) == 0 and run.out.splitlines()[0] == str(job / "step_3")
    assert "  0.weight  F32 [2048, 6]  parameter  all on rank 0" in run.out.splitlines()
    assert "  0.weight/exp_avg  F32 [2048, 6]  like  all on rank 0" in run.out.splitlines()
    assert "model_meta.json: 4 tensors, 96.0 KiB" in run.out and 'extra: {"step": 3' in run.out
    records = run.records("show", job / "step_2")
    assert records[0]["checkpoint"]["step"] == 2
    assert {record["state"] for record in records if "state" in record} == json.loads(
        (job / "step_2" / STATE_FILE).read_bytes()
    ).keys()
    tensors = {record["name"]: record for record in records if record.get("kind") == "model"}
    assert tensors["0.weight"] == {
        **{"kind": "model", "name": "0.weight", "dtype": "F32", "shape": [2048, 6], "of": "parameter"},
        **{"num_bytes": 2048 * 6 * 4, "boxes": [[0, [0], [2048 * 6]]]},
    }


def test_show_tells_which_rank_has_what(run: Shell, ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, begin_job, tmp_path, 1)
    assert run("show", tmp_path) == 0
    assert "2 ranks" in run.out and "  0.weight  F32 [16, 6]  parameter  rank 0 0:48, rank 1 48:96" in run.out
    assert run("show", tmp_path, "--boxes") == 0
    assert "  0.weight  F32 [16, 6]  parameter\n    rank 0: 0:48\n    rank 1: 48:96\n" in run.out
    assert run("verify", tmp_path) == 0


def test_show_tells_of_tied_tensors(run: Shell, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    with ShardCheckpointer(tmp_path, job="tied") as checkpointer:
        checkpointer.save(1, model)
    assert run("show", tmp_path) == 0 and "  1.weight is 0.weight" in run.out.splitlines()
    assert {"kind": "model", "name": "1.weight", "alias_of": "0.weight"} in run.records("show", tmp_path)


# ---- verify ----


def test_verify_finds_whole_what_was_saved(run: Shell, saved: Path) -> None:
    job = job_folder(saved)
    assert run("verify", saved) == 0
    assert [line.split(": ")[0] for line in run.out.splitlines()] == [str(job / f"step_{step}") for step in (1, 2, 3)]
    assert all(": whole, " in line for line in run.out.splitlines())
    assert run("verify", job / "step_1") == 0 and run.out.count("\n") == 1
    assert [(record["state"], record["damage"]) for record in run.records("verify", job)] == [("whole", [])] * 3
    assert not list(job.rglob(".*")), "no marks are left"


def test_verify_names_file_blocks_and_tensors_of_every_damage(run: Shell, storage: Path) -> None:
    path = job_folder(storage) / "step_2"
    model, optim = (path / shard_file(kind, 0, 1) for kind in ("model", "optim"))
    begins = 8 + int.from_bytes(model.read_bytes()[:8], "little")
    for at in (begins, begins + BLOCK_BYTES + 5, begins + 4 * BLOCK_BYTES):
        flip(model, at)
    flip(optim, optim.stat().st_size - 1)  # of its table
    assert run("verify", storage) == 1
    assert f"{path}: damaged" in run.out and run.out.count("whole") == 2
    by_path = {record["path"]: record for record in run.records("verify", storage)}
    first, second, third = by_path[str(path)]["damage"]
    assert (first["file"], first["blocks"]) == (model.name, [0, 1])
    assert set(first["tensors"]) >= {"2.bias", "0.bias"}
    assert (second["file"], second["blocks"]) == (model.name, [4, 4]) and second["tensors"] == ["0.weight"]
    assert third["file"] == optim.name and "table of checksums is not what was saved" in third["what"]
    assert third["blocks"] is None


def test_verify_sees_any_bit_of_any_file(run: Shell, storage: Path) -> None:
    path = job_folder(storage) / "step_1"
    chance = random.Random(6)
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for at in {0, len(data) - 1, *(chance.randrange(len(data)) for _ in range(6))}:
            flip(file, at)
            assert run("verify", path) == 1, f"{file.name}, byte {at}"
            assert file.name in run.out and "Traceback" not in run.err
            file.write_bytes(data)
    assert run("verify", path) == 0


def _remove(path: Path) -> None:
    path.unlink()


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _lengthen(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"\0")


def _be_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _be_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("harm", [_remove, _cut, _lengthen, _be_a_folder, _be_a_pipe])
def test_verify_names_a_file_that_is_missing_cut_or_something_else(
    run: Shell, storage: Path, harm: Callable[[Path], None]
) -> None:
    path = job_folder(storage) / "step_1"
    for file in (STATE_FILE, meta_file("optim"), shard_file("model", 0, 1)):
        shutil.copytree(path, path.with_name("step_9"))
        harm(path.with_name("step_9") / file)
        assert run("verify", path.with_name("step_9")) == 1
        assert f"  {file}: " in run.out and run.err == ""
        assert [damage["file"] for damage in run.records("verify", path.with_name("step_9"))[0]["damage"]] == [file]
        shutil.rmtree(path.with_name("step_9"))


def test_verify_sees_files_of_another_save(run: Shell, storage: Path) -> None:
    job = job_folder(storage)
    for file in (STATE_FILE, shard_file("optim", 0, 1)):
        shutil.copy(job / "step_1" / file, job / "step_2" / file)
    assert run("verify", job / "step_2") == 1
    assert f"  {STATE_FILE}: " in run.out and "it was written by another save" in run.out


def test_verify_sees_metadata_and_files_that_do_not_go_together(run: Shell, tmp_path: Path) -> None:
    path = tmp_path / "step_1"
    write_checkpoint(path, {"a": 4000, "b": 40}, told={"a": 4000, "b": 80, "c": 40})
    assert run("verify", path) == 1
    assert "the metadata says that the file has 'c', and the file has not" in run.out
    assert "'b' is U8 (40,) in it; the metadata says U8, elements 0:80 of (80,)" in run.out


def test_verify_tells_of_a_disk_that_fails_and_goes_on_with_the_next_file(storage: Path) -> None:
    path = job_folder(storage) / "step_1"
    script = (
        "import sys\nfrom pathlib import Path\nfrom tests.support.file_operations import FileOperations\n"
        "from elastic_ext.cli import main\n"
        "FileOperations(Path(sys.argv[1]), 'broken', range(9), like='open step_1/optim_param')\n"
        "sys.exit(main(['ckpt', 'verify', sys.argv[1], '--json']))\n"
    )
    done = start(script, path.parent)
    assert done.returncode == 1 and done.stderr == ""
    states = [json.loads(line) for line in done.stdout.splitlines()]
    assert [state["state"] for state in states] == ["damaged", "whole", "whole"]
    assert [(damage["file"], damage["what"]) for damage in states[0]["damage"]] == [
        (shard_file("optim", 0, 1), "it cannot be read: Input/output error")
    ]


def test_verify_beside_one_who_prunes_keeps_what_it_reads(run: Shell, storage: Path) -> None:
    job = job_folder(storage)
    with Reading(job / "step_1"):
        assert run("prune", job, "--keep-last", "1") == 0
        assert "  step_1 stays: being read by process" in run.out
    assert sorted(path.name for path in job.glob("step_*")) == ["step_1", "step_3"]


# ---- prune ----


def test_prune_keeps_the_last_and_milestones_and_a_dry_run_changes_nothing(run: Shell, tmp_path: Path) -> None:
    runs(tmp_path, {"a": (None, [f"step_{number}" for number in range(1, 10)]), "b": ("step_8", ["step_10"])})
    before = disk(tmp_path)
    arguments = ("--keep-last", "2", "--keep-every", "4")
    records = run.records("prune", tmp_path, *arguments, "--dry-run")
    stay = [record["path"] for record in records if record["done"] == "stays"]
    assert [os.path.basename(path) for path in stay] == ["step_4", "step_8", "step_10"]
    assert disk(tmp_path) == before
    assert run("prune", tmp_path, *arguments) == 0
    assert "  6 of 9 removed, " in run.out and "  step_10 stays: the newest" in run.out
    assert sorted(path.name for path in tmp_path.glob("step_*")) == [
        "step_10",
        "step_4",
        "step_8",
        "step_9.abandoned-b",
    ]
    assert run("prune", tmp_path, "--abandoned") == 0
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_10", "step_4", "step_8"]
    assert run("prune", tmp_path, "--keep-every", "8") == 0
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_10", "step_8"]
    before = disk(tmp_path)
    assert run("prune", tmp_path) == 0 and run.out == f"{tmp_path}\n  no garbage\n"
    assert disk(tmp_path) == before


def _with_garbage(path: Path) -> None:
    runs(path, {"a": (None, ["step_1", "step_2"]), "b": ("step_1", ["step_3"])})
    (path / ".garbage-0123456789abcdef-step_9" / "folder").mkdir(parents=True)
    (path / "step_2.abandoned-b" / COMMIT).unlink()  # whose removal was killed
    for name in ("step_4", "step_5"):
        (path / name).mkdir()
        (path / name / "model_param.00000-00001.safetensors").write_bytes(b"half")
    (path / "step_1" / ".COMMIT.0123456789abcdef.tmp").write_bytes(b"half")
    (path / "meta" / ("0" * 32 + ".json")).write_bytes(b"of nobody")
    for name in ("step_1", "step_4"):
        age(path / name, IDLE_SECONDS + 60)


def test_prune_removes_what_dead_saves_have_left_and_nothing_else(run: Shell, tmp_path: Path) -> None:
    _with_garbage(tmp_path)
    before = disk(tmp_path)
    dry = run.records("prune", tmp_path, "--dry-run")
    assert {os.path.basename(record["path"]) for record in dry if record["done"] != "stays"} == {
        *("step_4", ".garbage-0123456789abcdef-step_9", "step_2.abandoned-b", ".COMMIT.0123456789abcdef.tmp")
    }
    assert disk(tmp_path) == before
    assert run("prune", tmp_path) == 0
    assert "  step_5 stays: something was written there within the last hour" in run.out
    left = {*before} - {*disk(tmp_path)}
    assert {name.partition("/")[0] for name in left} == {"step_1", "step_2.abandoned-b", "step_4"}
    assert "meta/" + "0" * 32 + ".json" in disk(tmp_path)  # while something is unfinished
    age(tmp_path / "step_5", IDLE_SECONDS + 60)
    assert run("prune", tmp_path) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["RUN.json", "RUN.lock", "meta", "step_1", "step_3"]
    assert run("prune", tmp_path) == 0
    assert len(list((tmp_path / "meta").iterdir())) == 1


def everything(path: Path) -> dict[str, tuple[int, int]]:
    """All names below a folder, with what changes when anything there does."""
    return {
        str(each): (each.lstat().st_mtime_ns, each.lstat().st_ctime_ns) for each in sorted([path, *path.rglob("*")])
    }


@pytest.mark.parametrize("arguments", [(), ("--keep-last", "1", "--abandoned"), ("--keep-every", "2")])
def test_a_dry_run_writes_nothing_and_tells_of_all_that_a_real_one_removes(
    run: Shell, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    runs(tmp_path, {"a": (None, ["step_1", "step_2"]), "b": ("step_1", ["step_3"])})
    for name in ("step_4", ".garbage-0123456789abcdef-step_9"):
        (tmp_path / name).mkdir()
    age(tmp_path / "step_4", IDLE_SECONDS + 60)
    (tmp_path / "step_1" / ".COMMIT.0123456789abcdef.tmp").write_bytes(b"half")
    age(tmp_path / "step_1", IDLE_SECONDS + 60)
    (tmp_path / "meta" / ("0" * 32 + ".json")).write_bytes(b"of nobody")
    (tmp_path / "RUN.lock").unlink()  # as in a copy
    before = everything(tmp_path)
    dry = run.records("prune", tmp_path, "--dry-run", *arguments)
    assert everything(tmp_path) == before
    real = run.records("prune", tmp_path, *arguments)
    told, removed = (
        {  # what is put aside to be removed keeps the end of its name
            os.path.basename(record["path"]).rpartition("-")[2] for record in records if record["done"] != "stays"
        }
        for records in (dry, real)
    )
    assert told == removed >= {"step_4", "step_9", "0" * 32 + ".json"}


def test_a_dry_run_beside_a_run_that_is_alive_says_so(run: Shell, tmp_path: Path) -> None:
    (tmp_path / "step_1").mkdir()
    age(tmp_path / "step_1", IDLE_SECONDS + 60)
    alive = Run(tmp_path, "a")
    alive.folder.begin("step_1", "g", alive.chain)
    age(tmp_path / "step_1", IDLE_SECONDS + 60)
    assert run("prune", tmp_path, "--dry-run") == 0
    assert f"  step_1 stays: a run has this folder: process {os.getpid()} on" in run.out
    alive.end()


def test_prune_beside_a_run_that_is_alive_does_it_no_harm(run: Shell, tmp_path: Path) -> None:
    _with_garbage(tmp_path)
    alive = Run(tmp_path, "c", patience_seconds=0)
    alive.go_on(alive.folder.latest())
    alive.folder.begin("step_4", "g", alive.chain)
    age(tmp_path / "step_4", IDLE_SECONDS + 60)
    holder = read_holder(tmp_path)
    records = run.records("prune", tmp_path, "--keep-last", "1")
    assert run.status == 0
    done = {os.path.basename(record["path"]): record["done"] for record in records}
    assert (done["step_1"], done["step_3"], done["step_4"]) == ("removed", "stays", "stays")
    assert f"a run has this folder: process {os.getpid()} on " in records[-1]["why"]
    assert read_holder(tmp_path) == holder and (tmp_path / "step_4").is_dir()
    alive.folder.discard("step_4")
    alive.save("step_4")
    alive.end()


def test_prune_says_what_could_not_be_removed(tmp_path: Path) -> None:
    runs(tmp_path, {"a": (None, ["step_1", "step_2", "step_3"])})
    script = (
        "import sys\nfrom pathlib import Path\nfrom tests.support.file_operations import FileOperations\n"
        "from elastic_ext.cli import main\n"
        "FileOperations(Path(sys.argv[1]), 'broken', range(99), like='os.remove step_1/COMMIT')\n"
        "sys.exit(main(['ckpt', 'prune', sys.argv[1], '--keep-last', '1']))\n"
    )
    done = start(script, tmp_path)
    assert done.returncode == 1
    assert "  step_1 stays: it cannot be removed now: [Errno 5] Input/output error" in done.stdout
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_1", "step_3"]


@pytest.mark.parametrize("arguments", [["--keep-last", "0"], ["--keep-every", "x"], ["--keep-last", "1_0"]])
def test_prune_refuses_numbers_that_cannot_be(run: Shell, storage: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("prune", storage, *arguments)


# ---- what cannot be read ----

EVERY_COMMAND = pytest.mark.parametrize("command", ["ls", "show", "verify", "prune"])


@EVERY_COMMAND
def test_paths_that_lead_to_no_checkpoint_are_refused_in_words(run: Shell, tmp_path: Path, command: str) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign" / "checkpoint-100").mkdir(parents=True)
    (tmp_path / "foreign" / ".metadata").write_bytes(b"x")
    (tmp_path / "storage" / "fsdp_checkpoint").mkdir(parents=True)
    (tmp_path / "step_3").mkdir()
    for name, words in {
        "missing": "does not exist",
        "file": "is no folder",
        "empty": "is empty",
        "foreign": "holds no checkpoints of elastic_ext (but .metadata, checkpoint-100, ...)",
        "storage": "is empty",
        "step_3": "holds no COMMIT",
        "missing\x1b[2J\n": "does not exist",
    }.items():
        assert run(command, tmp_path / name) == 2
        assert words in run.err and run.out == ""
        assert run.err.startswith("elastic-ext: ") and run.err.count("\n") == 1 and "\x1b" not in run.err
        assert run(command, tmp_path / name, "--json") == 2 and run.out == ""


@pytest.mark.parametrize(
    "command",
    [["ls", ""], ["verify", ""], ["prune", ""], ["export", "", "out"], ["export", ".", ""], ["convert", ".", ""]],
    ids=str,
)
def test_a_path_of_no_text_is_not_the_current_folder(
    storage: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    monkeypatch.chdir(storage)
    before = disk(storage)
    with pytest.raises(SystemExit) as ended:
        main(["ckpt", *command, *(["--to", "dcp"] if command[0] == "convert" else [])])
    assert ended.value.code == 2
    assert "as where a variable is not set; allowed: a path, and '.' for the current folder" in capsys.readouterr().err
    assert disk(storage) == before


def test_what_needs_one_job_or_checkpoint_says_so(run: Shell, storage: Path) -> None:
    job = job_folder(storage)
    assert run("prune", job / "step_1", "--keep-last", "1") == 2 and f"give its job's folder, {job}" in run.err
    shutil.copytree(job, job.with_name("other_20261120-000000"))
    assert run("show", storage) == 2 and "several jobs" in run.err and "other_20261120-000000" in run.err


@EVERY_COMMAND
def test_a_newer_format_is_refused_and_nothing_of_it_is_touched(run: Shell, storage: Path, command: str) -> None:
    job = job_folder(storage)
    for step in (2, 3):
        rewrite_commit(job / f"step_{step}", b'"format": 1', b'"format": 7')
    before = disk(job)
    status = run(command, job, *(("--keep-last", "1") if command == "prune" else ()))
    assert status == (0 if command == "prune" else 2)
    if command == "ls":
        assert [record["state"] for record in run.records("ls", job)] == ["committed", "newer", "newer"]
    if command == "prune":
        assert "  step_3 stays, and does not count among those kept: " in run.out
    if command in ("ls", "verify"):
        assert "step_3" in run.out and "has format 7, and this elastic_ext reads formats up to 1" in run.out
    assert disk(job) == before
    assert run("verify", job / "step_3") == 2 and run("show", job / "step_3") == 2


@EVERY_COMMAND
def test_a_folder_that_the_disk_does_not_give_exits_1_in_words(storage: Path, command: str) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom tests.support.file_operations import FileOperations\n"
        "from elastic_ext.cli import main\n"
        "FileOperations(Path(sys.argv[1]), 'broken', range(99), like='os.listdir')\n"
        "sys.exit(main(['ckpt', sys.argv[2], sys.argv[1]]))\n"
    )
    done = start(script, storage, command)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"elastic-ext: {storage}: Input/output error\n"


@pytest.mark.parametrize("commit", [b"", b"nonsense", b"{" * 100_000, b"\xff" * 100])
@EVERY_COMMAND
def test_a_commit_of_nonsense_is_told_without_a_traceback(
    run: Shell, storage: Path, command: str, commit: bytes
) -> None:
    job = job_folder(storage)
    (job / "step_3" / COMMIT).write_bytes(commit)
    run(command, job)
    assert "Traceback" not in run.err
    if command != "prune":
        assert run(command, job / "step_3") == 1 and "COMMIT" in run.out + run.err


def test_whatever_names_hold_a_terminal_is_not_steered(run: Shell, tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("a\x1b[2J\nb", torch.zeros(3))
    with ShardCheckpointer(tmp_path, job="\x1b[2J") as checkpointer:
        path = checkpointer.save(1, model)
    flip(path / shard_file("model", 0, 1), -1)
    shutil.copytree(path.parent, tmp_path / "c\x1b[2J")
    for command in ("ls", "show", "verify", "prune"):
        for place in (tmp_path, tmp_path / "c\x1b[2J"):
            run(command, place)
            assert run.out and all(line.isprintable() for line in run.out.splitlines())


@EVERY_COMMAND
def test_files_that_match_their_checksums_and_make_no_sense_are_told_of(
    run: Shell, tmp_path: Path, command: str
) -> None:
    runs(tmp_path, {"a": (None, ["step_1"])})  # whose metadata and values are nothing that is ever saved
    assert run(command, tmp_path) == {"ls": 0, "prune": 0, "show": 1, "verify": 2}[command]
    assert (STATE_FILE in run.err) == (command == "show")


# ---- how it is told ----


@EVERY_COMMAND
def test_a_reader_who_has_seen_enough_hears_nothing(storage: Path, command: str) -> None:
    script = "import sys\nfrom elastic_ext.cli import main\nsys.exit(main(['ckpt', *sys.argv[1:]]))\n"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", script, command, str(storage)],
        stdout=writing,
        stderr=subprocess.PIPE,
        cwd=REPOSITORY,
        timeout=END_SECONDS,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


class Screen(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_is_there_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    screen = Screen(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    with Terminal(io.StringIO(), screen, as_json=False).bar("step_1", 1 << 30) as advance:
        advance(1 << 29)
    assert ("step_1" in screen.getvalue() and "1.00G" in screen.getvalue()) == is_terminal
    assert bool(screen.getvalue()) == is_terminal


def test_what_a_terminal_cannot_show_is_escaped() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Terminal(out, out, as_json=False).say("größe")
    out.flush()
    assert out.buffer.getvalue() == b"gr\\xf6\\xdfe\n"


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        *((0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (10 << 10, "10.0 KiB"), (1023 << 10, "1.00 MiB")),
        *((150 << 20, "150 MiB"), (3 << 29, "1.50 GiB"), (1 << 70, "1024 EiB")),
    ],
)
def test_sizes_have_three_digits_and_a_unit(num_bytes: int, words: str) -> None:
    assert size_in_words(num_bytes) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-5, "0 s"), (0, "0 s"), (59.9, "59 s"), (60, "1 min"), (3599, "59 min"), (7200, "2 h"), (86400 * 400, "400 d")],
)
def test_ages_are_told_in_the_largest_unit_that_fits(seconds: float, words: str) -> None:
    assert age_in_words(seconds) == words


def test_every_command_of_the_table_has_help_and_a_module(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            main(["ckpt", name, "--help"])
        out = capsys.readouterr().out
        assert "PATH" in out and "--json" in out
    with pytest.raises(SystemExit, match="2"):
        main(["ckpt"])


# ---- memory, and no torch ----

MEASURED = """
import sys
from pathlib import Path
from elastic_ext.cli import main
status = main(["ckpt", *sys.argv[1:]])
heavy = {"torch", "numpy", "grpc", "accelerate"} & set(sys.modules)
assert not heavy, heavy
(peak,) = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
print("peak", int(peak) // 1024)
sys.exit(status)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="tells of memory on Linux")
def test_no_command_needs_torch_or_much_memory_however_large_the_model(tmp_path: Path) -> None:
    path = tmp_path / "step_1"
    write_checkpoint(path, {"large": 400 << 20, "small": 1000})
    assert (path / shard_file("model", 0, 1)).stat().st_size > 400 << 20
    for arguments, words in (
        (["ls", path], "step_1"),
        (["show", path], "large  U8 [419430400]"),
        (["verify", path], "whole, 400 MiB"),
        (["prune", tmp_path], "no garbage"),
    ):
        done = start(MEASURED, *arguments)
        assert done.returncode == 0, done.stderr
        assert words in done.stdout
        assert int(done.stdout.split()[-1]) < MOST_MEGABYTES, f"{arguments}: {done.stdout}"
    with open(path / shard_file("model", 0, 1), "r+b") as file:
        file.seek(300 << 20)
        file.write(b"x")
    done = start(MEASURED, "verify", path)
    assert done.returncode == 1 and "it holds 'large'" in done.stdout
    assert int(done.stdout.split()[-1]) < MOST_MEGABYTES


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="tells of memory on Linux")
@pytest.mark.parametrize(
    ("num_tensors", "most_megabytes"), [(20_000, 64), pytest.param(250_000, MOST_MEGABYTES, marks=pytest.mark.slow)]
)
def test_no_command_needs_much_memory_however_many_tensors_there_are(
    tmp_path: Path, num_tensors: int, most_megabytes: int
) -> None:
    path = tmp_path / "step_1"
    write_checkpoint(path, {f"model.layers.{number}.mlp.experts.gate_proj.weight": 3 for number in range(num_tensors)})
    for arguments, words in (
        (["verify", path], "whole"),
        (["show", path], f"{num_tensors} tensors"),
        (["export", path, tmp_path / "exported"], f"{num_tensors} tensors"),
    ):
        done = start(MEASURED, *arguments)
        assert done.returncode == 0, done.stderr
        assert words in done.stdout
        assert int(done.stdout.split()[-1]) < most_megabytes, f"{arguments}: {done.stdout[-100:]}"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="tells of memory on Linux")
@pytest.mark.parametrize("num_values", [500_000, pytest.param(3_500_000, marks=pytest.mark.slow)])
def test_plain_values_are_verified_and_shown_in_little_memory_however_many_they_are(
    tmp_path: Path, num_values: int
) -> None:
    path = tmp_path / "step_1"
    values = json.dumps({"extra": {"history": [number / 7 for number in range(num_values)]}, "last": 5})
    write_checkpoint(path, {"small": 1000}, state=values.encode())
    for arguments, words in (
        (["verify", path], "whole"),
        (["show", path], '  extra: {"history": [0.0, 0.14285714285714285'),
        (["export", path, tmp_path / "exported"], "1 tensors"),
    ):
        done = start(MEASURED, *arguments)
        assert done.returncode == 0, done.stderr
        assert words in done.stdout
        assert int(done.stdout.split()[-1]) < 48, f"{arguments}: {done.stdout}"


def test_of_a_large_table_a_part_is_in_memory_and_every_sum_is_found() -> None:
    num_blocks = 20 * (1 << 16) + 7
    reads = []

    def read(at: int, num_bytes: int) -> bytes:
        reads.append(num_bytes)
        return b"".join(number.to_bytes(8, "little") for number in range(at // 8, (at + num_bytes) // 8))

    table = SumTable(num_blocks, read)
    assert sum(map(len, table.pieces())) == num_blocks * 8
    places = [0, 1, (1 << 16) - 1, 1 << 16, num_blocks - 1, 5, 3 << 16]
    assert [table[place] for place in places] == places
    assert max(reads) == 8 << 16 and len(reads) < 21 + len(places)


# ---- checkpoints as they are made here ----


def rewrite_commit(path: Path, old: bytes, new: bytes) -> None:
    """Change what a COMMIT says, and have it match its own checksum."""
    body = (path / COMMIT).read_bytes().rpartition(b',\n "checksum"')[0].replace(old, new)
    seal = b',\n "checksum": "%s"\n}\n' % xxhash.xxh3_128_hexdigest(body).encode()
    (path / COMMIT).write_bytes(body + seal)


def write_checkpoint(
    path: Path, sizes: dict[str, int], told: dict[str, int] | None = None, state: bytes = b"{}"
) -> None:
    """A checkpoint of tensors of zeros, of so many bytes each, which takes no room on the disk.

    The metadata is of those that are ``told``, where that is not the same.
    """
    path.mkdir()
    metas = {kind: StateMeta(num_ranks=1, tensors={}, aliases={}) for kind in KINDS}
    tensors = {
        name: TensorMeta(name, "U8", Layout((size,), (Box.whole((size,)),)), "parameter")
        for name, size in (told or sizes).items()
    }
    metas["model"] = StateMeta(num_ranks=1, tensors=tensors, aliases={})
    for kind, meta in metas.items():
        (path / meta_file(kind)).write_bytes(meta.to_json())
    (path / STATE_FILE).write_bytes(state)
    file = shard_file("model", 0, 1)
    commit = Commit(
        generation="g",
        lineage=(Lineage(id="a"),),
        global_step=1,
        epoch=0,
        num_ranks=1,
        metas={meta_file(kind): checksum_of(meta.to_json()) for kind, meta in metas.items()},
        states={STATE_FILE: FileSummary(num_bytes=len(state), checksum=checksum_of(state))},
        shards={file: write_zeros(path / file, sizes)},
        saved_at="2026-11-20T19:30:00+00:00",
    )
    (path / COMMIT).write_bytes(commit.to_json())


def write_zeros(path: Path, sizes: dict[str, int]) -> ShardSummary:
    header = laid_out(((name, "U8", (size,)) for name, size in sizes.items()), generation="g")
    encoded = header.encoded()
    whole, rest = divmod(header.data_bytes, header.block_bytes)
    table = xxhash.xxh3_64_intdigest(bytes(header.block_bytes)).to_bytes(8, "little") * whole
    if rest:
        table += xxhash.xxh3_64_intdigest(bytes(rest)).to_bytes(8, "little")
    with open(path, "wb") as file:
        file.write(encoded)
        file.seek(header.data_bytes, os.SEEK_CUR)
        file.write(table)
    return ShardSummary(num_bytes=path.stat().st_size, checksum=shard_checksum_of(encoded, table))
