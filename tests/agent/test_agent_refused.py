"""What cannot be started is refused in words, before anything is; what torchrun can do without, an agent can too."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from elastic_ext.agent.arguments import check_options, parse
from tests.support.nodes import FORKING_RUN
from tests.support.scripts import begun

REPOSITORY = Path(__file__).resolve().parents[2]


def start(
    *arguments: str | bytes,
    cwd: Path,
    module: str | None = None,
    within: str | None = None,
    **environ: str | None,
) -> subprocess.CompletedProcess[str]:
    """What came of a launch, or of another ``module``; ``within`` is what its command begins with, as a shell
    has it, and makes it a new interpreter's."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("ELASTIC_EXT", "PET_"))}
    given |= {"PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": str(cwd / "cache"), "OMP_NUM_THREADS": "1"}
    given |= {name: value for name, value in environ.items() if value is not None}
    for name in (name for name, value in environ.items() if value is None):
        given.pop(name, None)
    command = ["-m", module or "elastic_ext.run", *map(os.fsdecode, arguments)]
    with tempfile.TemporaryFile("w+") as errors:
        process = begun(command, env=given, folder=cwd, stderr=errors.fileno(), within=shlex.split(within or ""))
        with process:
            output, _ = process.communicate(timeout=240)
            status = process.wait()
        errors.seek(0)
        return subprocess.CompletedProcess(command, status, output, errors.read())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nnodes=2:1"], "--nnodes is '2:1'; allowed: N, or MIN:MAX"),
        (["--nnodes=1:2:3"], "--nnodes is '1:2:3'; allowed"),
        (["--nnodes=x"], "--nnodes is 'x'; allowed"),
        (["--nnodes=0"], "--nnodes is '0'; allowed"),
        (["--standalone", "--nnodes=2"], "no other node can find this one"),
        (["--nproc-per-node=0"], "--nproc-per-node is '0'; allowed: an integer >= 1"),
        (["--nproc-per-node=-1"], "--nproc-per-node is '-1'; allowed"),
        (["--nproc-per-node=many"], "--nproc-per-node is 'many' ("),
        (["--max-restarts=-1"], "--max-restarts is -1; allowed"),
        (["--monitor-interval=0"], "--monitor-interval is 0.0; allowed"),
        (["--monitor-interval=nan"], "--monitor-interval is nan; allowed"),
        (["--config-file=."], "--config-file is '.', which is a folder"),
        (["--config-file="], "--config-file is '.', which is a folder"),
        (["--event-log-handler=x"], "--event-log-handler is 'x'"),
        (["--master-port=1", "--node-rank=2", "--nnodes=2"], "--node-rank is 2 of 2 nodes; allowed"),
    ],
)
def test_options_that_cannot_be_are_refused_in_words(options: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        check_options(parse([*options, __file__], {}), {})


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (["nowhere.py"], "the script 'nowhere.py' does not exist"),
        (["--run-path", "nowhere.py"], "the script 'nowhere.py' does not exist"),
        ([""], "the script is ''"),
        (["--no-python", "./nowhere"], "'./nowhere' is no program"),
        (["--no-python", __file__], "is no program"),
    ],
)
def test_a_script_that_is_not_there_is_refused_before_workers_are_started_and_restarted(
    script: list[str], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        check_options(parse(script, {}), {})


@pytest.mark.parametrize(
    ("options", "environ"),
    [
        (["nowhere.py"], {"PYTHON_EXEC": "in-a-container"}),
        (["${local_rank}.py"], {}),
        (["--", "-c", "print()"], {}),
        (["-m", "nowhere"], {}),
        (["--no-python", "sh", "nowhere"], {}),
        (["--standalone", "--nnodes=1:2", __file__], {}),
        (["--node-rank=7", __file__], {}),
    ],
)
def test_what_torchrun_may_be_able_to_start_is_not_refused(options: list[str], environ: dict[str, str]) -> None:
    check_options(parse(options, {}), environ)


@pytest.mark.parametrize(
    ("options", "environ", "words"),
    [
        ([], {"PET_STANDALONE": "yes"}, "PET_STANDALONE is 'yes'; allowed: 0 or 1"),
        (["--log-dir=script.py"], {}, "the folder for logs cannot be made"),
        ([], {"ELASTIC_EXT_RUN_DIR": "script.py"}, "the run directory cannot be made: File exists"),
        (
            ["--rdzv-backend=x", "--rdzv-endpoint=localhost:1"],
            {},
            "torch refuses these rendezvous settings: The rendezvous backend 'x'",
        ),
        (["--rdzv-conf=read_timeout=soon"], {}, "read_timeout in --rdzv-conf is 'soon'; allowed: an integer"),
    ],
)
def test_a_refusal_is_one_line_with_status_2(
    options: list[str], environ: dict[str, str], words: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text("print('started')")
    done = start(*options, "script.py", cwd=tmp_path, **environ)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(f"elastic-run: refused: {words}")
    assert "Traceback" not in done.stderr


def test_a_program_that_the_system_cannot_start_is_a_failure_in_words(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("no program, and no line that says what reads it")
    program.chmod(0o755)
    done = start("--standalone", "--master=off", "--no-python", "./program", cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "workers could not be started: Exec format error" in done.stderr


def test_a_job_starts_where_nothing_can_be_written_at_home_and_status_finds_it(tmp_path: Path) -> None:
    script = os.fsencode(tmp_path) + b"/\xff.py"
    with open(script, "w") as file:
        file.write("print('started')")
    given: dict[str, str | None] = {"XDG_CACHE_HOME": None, "HOME": "/proc/nobody", "TMPDIR": str(tmp_path)}
    done = start("--standalone", "--job=j", script, cwd=tmp_path, **given)
    assert done.returncode == 0 and done.stdout == "started\n"
    assert "(/proc/nobody): the run directory is in" in done.stderr
    for arguments in (["status"], ["status", "--job", "j"]):
        found = start(*arguments, module="elastic_ext.cli", cwd=tmp_path, **given)
        assert found.returncode == 0 and found.stdout.startswith("j: has ended"), found


def test_status_finds_the_job_that_was_started_without_a_word_of_where(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('started')")
    assert start("--standalone", "--master=off", "--job=j", "script.py", cwd=tmp_path).returncode == 0
    done = start("status", module="elastic_ext.cli", cwd=tmp_path, TMPDIR=str(tmp_path))
    assert done.returncode == 0 and done.stdout.startswith("j: has ended")


def test_a_job_starts_where_its_files_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('started')")
    (tmp_path / "run" / "agent.json" / "in the way").mkdir(parents=True)
    done = start("--standalone", "script.py", cwd=tmp_path, ELASTIC_EXT_RUN_DIR=str(tmp_path / "run"))
    assert done.returncode == 0 and done.stdout == "started\n"
    assert "elastic-ext status and config see no agent" in done.stderr


def test_a_worker_may_start_an_agent_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('started')")
    inner = ["--no-python", sys.executable, "-m", "elastic_ext.run", "--standalone", "script.py"]
    done = start("--standalone", "--nproc-per-node=2", *inner, cwd=tmp_path, module=FORKING_RUN[1])
    assert done.returncode == 0 and done.stdout == "started\nstarted\n", done.stderr


WITHOUT_PROC = """unshare --map-root-user --mount sh -c 'mount -t tmpfs none /proc && exec "$@"' sh"""


def test_where_processes_cannot_be_told_apart_nothing_is_started(tmp_path: Path) -> None:
    if subprocess.run([*shlex.split(WITHOUT_PROC), "true"], capture_output=True).returncode != 0:
        pytest.skip("nobody may cover /proc here: it takes namespaces of users and mounts")
    script = tmp_path / "script.py"
    script.write_text("print('started')")
    done = start("--standalone", str(script), cwd=tmp_path, within=WITHOUT_PROC)
    assert done.returncode == 2 and "started" not in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("elastic-run: refused: processes cannot be identified without /proc: ")
    assert line.endswith("(/proc)")
