"""elastic-run beside torchrun: the same command line, the same environment of workers, the same output and logs."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from elastic_ext.agent.arguments import parser
from tests.support.nodes import ELASTIC_RUN, TORCHRUN
from tests.support.scripts import begun
from tests.support.thinning import the_first

SCRIPT = """
import json, os, sys, time
names = ("RANK LOCAL_RANK ROLE_RANK ROLE_NAME GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE ROLE_WORLD_SIZE GROUP_WORLD_SIZE "
         "TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_USE_AGENT_STORE OMP_NUM_THREADS PYTHONPATH "
         "TORCH_NCCL_ASYNC_ERROR_HANDLING CUDA_VISIBLE_DEVICES PLANTED").split()
found = {name: os.environ.get(name) for name in names}
found["names"] = sorted(name for name in os.environ if not name.startswith("ELASTIC_EXT_"))
found |= {"argv": sys.argv[1:], "main": __name__}
found["addr"] = bool(os.environ["MASTER_ADDR"]) and os.environ["MASTER_PORT"].isdecimal()
found["error file"] = bool(os.environ["TORCHELASTIC_ERROR_FILE"])
found["parent only"] = "ELASTIC_EXT_AGENT_PID" in os.environ
rank, count = int(found["RANK"]), int(found["TORCHELASTIC_RESTART_COUNT"])
with open(os.path.join(os.environ["OUT"], f"worker-{rank}-{count}.json"), "w") as file:
    json.dump(found, file)
os.write(1, f"out of {rank} {'apple' if rank == 0 else 'pear'}\\n".encode())
os.write(2, f"err of {rank}\\n".encode())
open(f"{os.environ['OUT']}-{rank}-{count}", "w").close()
if "fail" in sys.argv and rank == 1 and count < int(sys.argv[-1]):
    while not os.path.exists(f"{os.environ['OUT']}-0-{count}"):  # or it might be ended before it has told of itself
        time.sleep(0.01)
    sys.exit(7)
"""


@dataclass
class Ran:
    """What came of one launch."""

    status: int
    workers: dict[str, Any]
    stdout: list[str]
    stderr: list[str]
    logs: dict[str, str]
    """What lies in the folder for logs; run ids and random parts of names left out."""


class Run:
    """A launch that has begun."""

    def __init__(
        self, launcher: tuple[str, ...], folder: Path, options: list[str], arguments: list[str], environ: dict[str, str]
    ) -> None:
        self.folder, self.logs, self.out = folder, folder / "logs", folder / "out"
        self.out.mkdir(parents=True)
        script = folder / "script.py"
        script.write_text(SCRIPT)
        script.chmod(0o755)
        options = [option.replace("LOGS", str(self.logs)) for option in options]
        if "--no-python" in options or "--no_python" in options:
            command = [*options, sys.executable, str(script)]
        elif "-m" in options:
            command = [*options, "script"]
        else:
            command = [*options, str(script)]
        given = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PET_", "ELASTIC_EXT", "TORCHELASTIC"))
            and name != "OMP_NUM_THREADS"  # launchers set it
        }
        given |= {
            "OUT": str(self.out),
            "PYTHONPATH": os.pathsep.join(path for path in [*sys.path, str(folder)] if path),
        }
        given |= {"ELASTIC_EXT_RUN_DIR": str(folder / "node"), **environ}
        self.errors = folder / "stderr"
        with self.errors.open("wb") as file:
            self.process = begun([*launcher, *command, *arguments], env=given, stderr=file.fileno())

    def end(self) -> Ran:
        with self.process:
            output, _ = self.process.communicate(timeout=240)
            status = self.process.wait()
        found = {file.name: json.loads(file.read_text()) for file in sorted(self.out.iterdir())}
        for values in found.values():
            if values["PYTHONPATH"]:
                values["PYTHONPATH"] = values["PYTHONPATH"].replace(str(self.folder), "FOLDER")
        return Ran(
            status=status,
            workers=found,
            stdout=sorted(output.splitlines()),
            stderr=sorted(line for line in self.errors.read_text().splitlines() if "err of" in line),
            logs={
                re.sub("^[^/]*", "RUN", str(file.relative_to(self.logs))): file.read_text()
                for file in sorted(self.logs.rglob("*"))
                if file.is_file()
            },
        )


QUICK: dict[str, tuple[list[str], list[str], dict[str, str]]] = {
    "standalone, spelt with underscores, no python, virtual local ranks, and restarted": (
        ["--standalone", "--nproc_per_node=2", "--max_restarts=1", "--no_python", "--virtual_local_rank"],
        ["--its-own", "a b", "fail", "1"],
        {"PLANTED": "1", "CUDA_VISIBLE_DEVICES": "3, 5"},
    ),
    "teed and filtered, and out of restarts": (
        [
            "--nproc-per-node=2",
            "--max-restarts=1",
            "--tee=3",
            "--log-dir=LOGS",
            "--role=trainer",
            "--local-ranks-filter=0",
            "--duplicate-stdout-filters=apple",
        ],
        ["fail", "9"],
        {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${role_name} ${rank}/${local_rank}]: "},
    ),
    "static, in the environment, a module, redirected": (
        ["--master-addr=127.0.0.1", "--master-port=0", "-m", "-r", "0:1,1:2", "--log_dir=LOGS"],
        ["--name", "z"],
        {"PET_NPROC_PER_NODE": "2", "PET_MAX_RESTARTS": "3", "OMP_NUM_THREADS": "3"},
    ),
    "one worker, in this interpreter": (["--run-path", "--nproc-per-node=1"], ["w"], {}),
}
"""All options, several of them in each launch; in CASES launches have fewer options and more workers."""
CASES: dict[str, tuple[list[str], list[str], dict[str, str]]] = {
    "standalone": (["--standalone", "--nproc-per-node=2"], ["--its-own", "a b"], {"PLANTED": "1"}),
    "spelt with underscores, and restarted": (["--nproc_per_node=2", "--max_restarts=2"], ["fail", "2"], {}),
    "teed and filtered": (
        [
            "--nproc-per-node=3",
            "--tee=3",
            "--log-dir=LOGS",
            "--local-ranks-filter=0,2",
            "--duplicate-stdout-filters=apple",
        ],
        [],
        {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${role_name} ${rank}/${local_rank}]: "},
    ),
    "teed, and out of restarts": (
        ["--nproc-per-node=2", "--max-restarts=1", "-t", "3", "--log_dir=LOGS", "--role=trainer"],
        ["fail", "9"],
        {},
    ),
    "static, in the environment": (
        ["--master-addr=127.0.0.1", "--master-port=0"],
        ["x"],
        {"PET_NPROC_PER_NODE": "2", "PET_MAX_RESTARTS": "3", "OMP_NUM_THREADS": "3"},
    ),
    "no python, with virtual local ranks": (
        ["--no-python", "--virtual-local-rank", "--nproc-per-node=2"],
        ["y"],
        {"CUDA_VISIBLE_DEVICES": "3, 5"},
    ),
    "a module, redirected": (
        ["-m", "--nproc-per-node=3", "-r", "0:1,1:2,2:3", "--log-dir=LOGS"],
        ["--name", "z"],
        {},
    ),
    "in this interpreter": (["--run-path", "--nproc-per-node=2"], ["w"], {}),
}


def test_every_option_of_its_own_is_told_of_and_no_other() -> None:
    helps = [each.format_help() for each in (parser(), get_args_parser())]
    options = [{name for name in re.findall(r"--[a-z_-]+", words) if "_" not in name} for words in helps]
    page = Path(__file__).resolve().parents[2].joinpath("docs", "launcher.md").read_text()
    table = page.partition("## What it adds")[2].partition("##")[0]
    assert set(re.findall(r"(?m)^\| `(--[a-z-]+)", table)) == options[0] - options[1] - {
        "--shutdown-timeout"
    }  # torch 2.11 has not got it


@pytest.mark.parametrize("case", the_first([*QUICK, *CASES], len(QUICK)))
def test_what_torchrun_does_elastic_run_does(case: str, tmp_path: Path) -> None:
    options, arguments, environ = {**QUICK, **CASES}[case]
    both = [
        Run(launcher, tmp_path / name, options, arguments, environ)
        for launcher, name in ((TORCHRUN, "torch"), (ELASTIC_RUN, "ours"))
    ]
    theirs, ours = (each.end() for each in both)
    assert theirs.workers, case
    assert ours == theirs
