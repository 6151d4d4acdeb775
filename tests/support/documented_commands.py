"""Run every command of README and docs as a user would: in a terminal, with the commands of the environment that this
runs in, which `make test-wheel` makes of the wheel.

    build/wheel/env/bin/python -m tests.support.documented_commands [WORD OF A SCENE ...]

A page that can be run from top to bottom is run so (documents.py). The commands of the other blocks need a job, a
master or checkpoints: a *scene* has them, and types the commands of its blocks as they stand, with the names of this
machine in place of those on the page. What no scene types is in ELSEWHERE, with where it is run; a command that is in
neither is a fault.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .documents import Block, console_steps, fenced_blocks

ROOT = Path(__file__).resolve().parent.parent.parent
BINARIES = Path(sys.executable).parent
COMMAND_SECONDS = 180.0
START_SECONDS = 120.0
STEP_SECONDS = 0.05
ENDED_BY_US = (0, 130, 143, -signal.SIGINT, -signal.SIGTERM)
"""Exit statuses of what a scene starts and then ends."""

ELSEWHERE: Mapping[str, str] = {
    r"elastic-ext members": "tests/agent/test_agent_members.py, with nodes of its own",
    r"pip install ": "what `make test-wheel` did before",
    r"make ": "each target is called by .ci/run or by a workflow, or needs a GPU",
    r"\.venv/bin/python -m pytest": "a developer's, in the environment that make makes",
    r"kubectl ": "needs a cluster; tests/test_manifests.py reads the files",
}
"""Commands that no scene types, as regular expressions of how they begin, and where they are run."""


class CommandFault(Exception):
    """A command that did not do what its page says."""


# ---- a user's terminal ----------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Terminal:
    """A shell of a user who has installed the library, with a home of their own."""

    home: Path
    names: dict[str, str] = field(default_factory=dict)
    """Regular expressions of names that stand on pages, and what they are called here."""

    def __post_init__(self) -> None:
        self.folder = self.home
        kept = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
        self.environ = {
            **kept,
            "HOME": str(self.home),
            "PATH": f"{BINARIES}:{os.environ['PATH']}",
            "COLUMNS": "120",
            "OMP_NUM_THREADS": "1",
        }
        self._started: list[tuple[str, subprocess.Popen[bytes], Path]] = []
        self._started_at = 0.0

    def translated(self, command: str) -> str:
        """A command of a page with the names of this machine."""
        for name, here in self.names.items():
            command = re.sub(name, here.replace("\\", r"\\"), command)
        return command

    def run(self, command: str, *, statuses: Sequence[int] = (0,)) -> str:
        """What a command writes; CommandFault where it ends otherwise than with one of ``statuses``."""
        line = self.translated(command)
        if line.startswith("cd "):
            self.folder = self.folder / line.split()[1]
            return ""
        if line.startswith("export "):
            for pair in line.split()[1:]:
                name, _, value = pair.partition("=")
                self.environ[name] = value
            return ""
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_SECONDS,
        )
        if done.returncode not in statuses:
            raise CommandFault(f"$ {line}\nended with status {done.returncode}:\n{done.stdout}")
        return done.stdout

    def start(self, command: str) -> None:
        """Start a command that goes on until it is told to end."""
        line = self.translated(command)
        output = self.home / f"output-{len(self._started)}.txt"
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {line}"],
                cwd=self.folder,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append((line, process, output))
        self._started_at = time.time()

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait for something that what was started does; CommandFault where it ends before, or takes too long."""
        end = time.monotonic() + START_SECONDS
        while not is_so():
            for line, process, output in self._started:
                if process.poll() is not None:
                    raise CommandFault(f"$ {line}\nended with status {process.returncode}:\n{output.read_text()}")
            if time.monotonic() > end:
                told = "\n".join(f"$ {line}\n{output.read_text()}" for line, _, output in self._started)
                raise CommandFault(f"{what} did not come within {START_SECONDS:.0f} s:\n{told}")
            time.sleep(0.2)

    def end(self) -> None:
        """End what was started, last first; CommandFault where something had failed, or fails now."""
        faults = []
        while self._started:
            line, process, output = self._started.pop()
            had_ended = process.poll()
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if (process.returncode if had_ended is None else had_ended) not in ENDED_BY_US:
                faults.append(f"$ {line}\nended with status {process.returncode}:\n{output.read_text()}")
        if faults:
            raise CommandFault("\n".join(faults))

    def wait_for_all(self, *, statuses: Sequence[int]) -> None:
        """Wait until all that was started has ended by itself, with one of ``statuses``."""
        while self._started:
            line, process, output = self._started.pop()
            if process.wait(COMMAND_SECONDS) not in statuses:
                raise CommandFault(f"$ {line}\nended with status {process.returncode}:\n{output.read_text()}")

    # ---- what a scene needs to know of a job ----

    def steps_are_taken(self) -> bool:
        """Whether what was started last has taken steps."""
        written = self.home.glob(".cache/elastic_ext/**/metrics-0.json")
        return any(path.stat().st_mtime > self._started_at for path in written)

    def agent_folder(self) -> Path:
        """The run directory of the agent that has started last."""
        return max(self.home.glob(".cache/elastic_ext/*/nodes/*"), key=lambda path: path.stat().st_mtime)

    def checkpoints(self) -> list[Path]:
        """The checkpoints of the user's job, oldest first."""
        found = self.home.glob("checkpoints/**/COMMIT")
        return sorted((commit.parent for commit in found), key=lambda path: path.stat().st_mtime)


@contextmanager
def terminal(folder: Path) -> Iterator[Terminal]:
    """A terminal of a new user, whose train.py is README's loop; it goes on, without haste, and saves checkpoints."""
    home = Path(tempfile.mkdtemp(dir=folder))
    script = readmes_loop().replace("range(trainer.start_epoch, 10)", "range(trainer.start_epoch, 1_000_000)")
    script = script.replace("global_batch_size=64)", f'global_batch_size=64, shared_storage_path="{home}/checkpoints")')
    script = script.replace("in loader:\n", f"in loader:\n{' ' * 16}__import__('time').sleep({STEP_SECONDS})\n")
    assert all(each in script for each in ("1_000_000", "checkpoints", "sleep")), "README's loop has changed"
    (home / "train.py").write_text(script)
    opened = Terminal(home=home)
    try:
        yield opened
    finally:
        opened.end()


def readmes_loop() -> str:
    """The loop of README as it is after its diff."""
    (diff,) = [block.code for block in fenced_blocks((ROOT / "README.md").read_text()) if block.language == "diff"]
    return "\n".join(line[1:] for line in diff.splitlines() if line[:1] != "-")


def free_port() -> int:
    """A port where nobody listens now."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


Scene = Callable[[Sequence[str], Path], None]
"""Plays commands in a new folder within one that is given."""

# ---- scenes ---------------------------------------------------------------------------------------------------------


def with_a_job(commands: Sequence[str], folder: Path) -> None:
    """A job is started on two ranks by the first command that starts one; the others are typed while it trains."""
    with terminal(folder) as user:
        user.names |= {"--nproc-per-node=8": "--nproc-per-node=2", "--nnodes=1:4": "--nnodes=1"}
        user.names["one:29400"] = f"127.0.0.1:{free_port()}"
        for command in commands:
            if command.startswith(("elastic-run ", "python train.py")):
                if command.startswith("python"):
                    user.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
                    user.environ["MASTER_PORT"] = str(free_port())
                user.start(command)
                user.wait_until(user.steps_are_taken, "a step")
                if command.startswith("elastic-run"):
                    user.names["~/.cache/elastic_ext/train-5f0c1a2b/nodes/one"] = str(user.agent_folder())
            else:
                user.run(command)


def with_a_master(commands: Sequence[str], folder: Path) -> None:
    """A master as master.md has it, the job nano as an agent on it; then what is asked of both, and of what is left."""
    with terminal(folder) as user:
        port, is_asked = free_port(), False
        user.names |= {"7788": str(port), "head:": "127.0.0.1:", "--bind 0.0.0.0": "--bind 127.0.0.1"}
        user.names |= {
            "10.0.0.1": "127.0.0.1",
            "--nnodes=1:4": "--nnodes=1",
            "--nproc-per-node=8": "--nproc-per-node=2",
        }
        if "--tls-cert" in " ".join(commands):
            user.run(
                "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=master "
                "-addext subjectAltName=IP:127.0.0.1 -keyout master.key -out master.pem"
            )
        for command in commands:
            if "elastic_ext.master" in command:
                user.start(command)
                user.wait_until(lambda: is_listening(port), "the master")
            elif command.startswith("elastic-run "):
                user.start(command)
                user.wait_until(user.steps_are_taken, "a step")
                is_asked = True
            elif "--follow" in command:
                user.start(command)
            else:
                assert is_asked or "master.token" in command, f"{command}: there is no job yet"
                user.run(command)


def with_a_job_of_the_past(commands: Sequence[str], folder: Path) -> None:
    """A job named nano that has trained under elastic-run, and has ended."""
    with terminal(folder) as user:
        user.start("elastic-run --standalone --nproc-per-node=2 --job nano train.py")
        user.wait_until(user.steps_are_taken, "a step")
        time.sleep(2)
        user.end()
        for command in commands:
            user.run(command)


def with_a_model_of_memory(commands: Sequence[str], folder: Path) -> None:
    """The script of memory_prediction.md, as the job tiny."""
    with terminal(folder) as user:
        page = (ROOT / "docs" / "memory_prediction.md").read_text()
        script = next(block.code for block in fenced_blocks(page) if "MemoryModel" in block.code)
        (user.home / "train.py").write_text(script)
        user.environ["ELASTIC_EXT_JOB"] = "tiny"
        user.run("python train.py")
        for command in commands:
            user.run(command)


def with_checkpoints(commands: Sequence[str], folder: Path) -> None:
    """The checkpoints of a job that was started, told to end, and started again from an older one."""
    with terminal(folder) as user:
        for _ in range(2):
            user.start("elastic-run --standalone --nproc-per-node=2 train.py")
            known = len(user.checkpoints())
            user.wait_until(user.steps_are_taken, "a step")
            user.end()
            assert len(user.checkpoints()) > known, "a job that is told to end saves a checkpoint"
        first, second = user.checkpoints()[-2:]
        user.names |= {r"/mnt/checkpoints/fsdp_checkpoint/my-model_20261104-093012": str(first.parent)}
        if commands[0].startswith("mv "):
            second.rename(first.parent / "step_5000.abandoned-06ac65fb6190")
            user.folder = first.parent
        user.names |= {"step_4000": first.name, r"ls -d step_\* epoch_\*": "ls -d step_*"}
        for command in commands:
            user.run(command)


def with_doctor(commands: Sequence[str], folder: Path) -> None:
    """A machine that is looked at alone, and as three nodes at once."""
    with terminal(folder) as user:
        (user.home / "shared").mkdir()
        user.names |= {"/shared/checkpoints": str(user.home / "shared"), "node0:29400": f"127.0.0.1:{free_port()}"}
        for command in commands:
            if "--nnodes 3" in command:
                for _ in range(2):
                    user.start(command)
                user.run(command, statuses=(0, 1))  # 1: this machine has troubles, which it says
                user.wait_for_all(statuses=(0, 1))
            else:
                user.run(command, statuses=(0, 1))


def with_examples(commands: Sequence[str], folder: Path) -> None:
    """The examples, for four steps each."""
    with terminal(folder) as user:
        shutil.copytree(ROOT / "examples", user.home / "examples")
        for command in commands:
            user.run(f"{command} --steps=4")


def with_a_shell(commands: Sequence[str], folder: Path) -> None:
    """A shell, and no job."""
    with terminal(folder) as user:
        for command in commands:
            user.run(command)


SCENES: Sequence[tuple[Scene, Sequence[tuple[str, str]]]] = (
    # a scene, and the blocks that it plays one after another: a page, and how the first command of its blocks begins
    (with_a_job, [("README.md", "pip install")]),
    (with_a_job, [("hangs.md", "elastic-run")]),
    (with_a_job, [("launcher.md", "elastic-run --standalone")]),
    (with_a_job, [("launcher.md", "elastic-run --nnodes")]),
    (with_a_job, [("master.md", "elastic-run --standalone"), ("cli.md", "elastic-ext status")]),
    (with_a_job, [("tuning.md", "elastic-run")]),
    (with_a_job, [("my_job_died.md", "elastic-run")]),
    (with_a_job, [("profile.md", "python"), ("profile.md", "elastic-ext status")]),
    (
        with_a_master,
        [
            ("master.md", "install"),
            ("master.md", "elastic-run --master"),
            ("master.md", "elastic-ext config set"),
            ("cli.md", "elastic-ext events"),
            ("cli.md", "elastic-ext tuning log"),
            ("tuning.md", "export"),
        ],
    ),
    (with_a_master, [("security.md", "install")]),
    (with_a_job_of_the_past, [("cli.md", "elastic-ext report"), ("report.md", "elastic-ext report")]),
    (with_a_model_of_memory, [("memory_prediction.md", "elastic-ext tuning memory")]),
    (with_checkpoints, [("my_job_died.md", "elastic-ext ckpt ls"), ("my_job_died.md", "cd")]),
    (with_checkpoints, [("my_job_died.md", "mv")]),
    (with_doctor, [("doctor.md", "elastic-ext doctor"), ("shared_storage.md", "elastic-ext doctor")]),
    (with_examples, [("loops.md", "python")]),
    (with_a_shell, [("cli.md", "eval")]),
)


def is_listening(port: int) -> bool:
    """Whether somebody listens at a port of this machine."""
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


# ---- all commands ---------------------------------------------------------------------------------------------------


def pages() -> list[Path]:
    """README, CONTRIBUTING and the pages of docs."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks_played(page: Path, begins: str) -> list[Block]:
    """The console blocks of a page that it does not run by itself, and whose first command begins so."""
    found = [
        block
        for block in fenced_blocks(page.read_text())
        if block.language == "console" and not block.is_run and commands_of(block)[0].startswith(begins)
    ]
    if not found:
        raise CommandFault(f"{page.name} has no block that begins with {begins!r}")
    return found


def commands_of(block: Block) -> list[str]:
    """The commands of a console block, in order."""
    return [step.command for step in console_steps(block)]


def commands_of_scene(parts: Sequence[tuple[str, str]]) -> list[str]:
    """The commands that a scene types, in order."""
    blocks = [block for page, begins in parts for block in blocks_played(page_named(page), begins)]
    return [command for block in blocks for command in commands_of(block) if not is_elsewhere(command)]


def is_elsewhere(command: str) -> bool:
    """Whether a command is run elsewhere, or cannot be run on one machine."""
    return any(re.match(begins, command) for begins in ELSEWHERE)


def left_out() -> list[str]:
    """Commands that no page runs by itself, no scene plays, and nothing says of where they are run."""
    played = {
        (page, block.line)
        for _, parts in SCENES
        for page, begins in parts
        for block in blocks_played(page_named(page), begins)
    }
    return [
        f"{page.name}, line {step.line}: $ {step.command}"
        for page in pages()
        for block in fenced_blocks(page.read_text())
        if block.language == "console" and not block.is_run and (page.name, block.line) not in played
        for step in console_steps(block)
        if not is_elsewhere(step.command)
    ]


def page_named(name: str) -> Path:
    """A page by its file name."""
    return next(page for page in pages() if page.name == name)


def name_of(scene: Scene) -> str:
    """What a scene is called on the terminal."""
    return scene.__name__.replace("_", " ")


def main(words: Sequence[str]) -> int:
    """0 where every command did what its page says, else 1, with the faults on the standard error stream.

    With ``words``, only scenes are played that have one in their name or their pages.
    """
    faults = [f"no scene plays {each}" for each in left_out()]
    with tempfile.TemporaryDirectory() as name:
        for page in () if words else pages():
            faults += run_page_apart(page, Path(tempfile.mkdtemp(dir=name)))
        for scene, parts in SCENES:
            if words and not any(word in f"{name_of(scene)} {parts}" for word in words):
                continue
            commands = commands_of_scene(parts)
            began = time.monotonic()
            try:
                scene(commands, Path(name))
            except (CommandFault, AssertionError, subprocess.TimeoutExpired) as error:
                faults.append(f"{name_of(scene)}, {parts[0][0]}: {error}")
            where, seconds = ", ".join(dict.fromkeys(page for page, _ in parts)), time.monotonic() - began
            print(f"{name_of(scene)}: {len(commands)} commands of {where}, {seconds:.0f} s", flush=True)
    for fault in faults:
        sys.stderr.write(f"{fault}\n")
    return 1 if faults else 0


def run_page_apart(page: Path, folder: Path) -> list[str]:
    """The faults of a page that is run from top to bottom in a process of its own."""
    if not any(block.is_run for block in fenced_blocks(page.read_text())):
        return []
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "documents.py"), str(page)],
        cwd=folder,
        env={**os.environ, "ELASTIC_EXT_RUN_DIR": str(folder / "run")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMMAND_SECONDS,
    )
    print(f"{page.name}: run from top to bottom")
    return [] if done.returncode == 0 else [f"{page.name}: {done.stdout}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
