"""elastic-ext config where an agent has the file: asked where it runs, left out where it has ended."""

from __future__ import annotations

import dataclasses
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from elastic_ext.agent.config_writer import ConfigWriter, ForeignWrite, config_requests
from elastic_ext.agent.control import Control, ask
from elastic_ext.agent.folder import NodeFolders
from elastic_ext.cli import main
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.ranks.processes import process_of, this_process
from elastic_ext.records.agent import AGENT_FILE, AgentRecord

REPOSITORY = Path(__file__).resolve().parents[2]
END_SECONDS = 240.0


class Agent:
    """The part of an agent that has a config file, in this process."""

    def __init__(self, run_dir: Path, capsys: pytest.CaptureFixture[str], config_file: Path | None = None) -> None:
        self._capsys = capsys
        self.run_dir = run_dir
        self.path = config_file or run_dir / "config.json"
        run_dir.mkdir(parents=True, exist_ok=True)
        self.told: list[ForeignWrite] = []
        self.asked: list[str] = []
        self.tuner = ConfigWriter(self.path, on_foreign=self.told.append, settle_seconds=0.0)
        self.control = Control(run_dir / "socket", {name: self._noting(name) for name in config_requests(self.tuner)})
        me = this_process()
        self.record = AgentRecord(
            node_id="n",
            job="j",
            run_id="r",
            host=socket.gethostname(),
            pid=me.pid,
            start_ticks=me.start_ticks,
            time=0.0,
            version="0",
            config_file=str(self.path.absolute()),
            memory_folder="",
            socket=str(self.control.path),
            log_folder="",
        )
        self.write(self.record)
        self.out = self.err = ""

    def _noting(self, name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """The handler of requests of that name, which notes that it was asked."""

        def handler(request: dict[str, Any]) -> dict[str, Any]:
            self.asked.append(name.removeprefix("config-"))
            return config_requests(self.tuner)[name](request)

        return handler

    def write(self, record: AgentRecord) -> None:
        (self.run_dir / AGENT_FILE).write_text(record.to_json())

    def run(self, *arguments: str) -> int:
        self._capsys.readouterr()
        status = main(["config", *arguments])
        self.out, self.err = self._capsys.readouterr()
        return status

    def in_file(self) -> object:
        return ElasticConfig.parse(self.path.read_bytes()).get("user.x")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ELASTIC_EXT_CONFIG_FILE", "ELASTIC_EXT_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def agent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Agent]:
    made = Agent(tmp_path / "run", capsys)
    with made.control:
        yield made


def test_a_change_goes_through_the_agent_in_the_words_that_there_are_without_one(
    agent: Agent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [
        ("set", "user.x=1", "user.y=1", "optimizer.learning_rate=0.1", "--reason", "größe", "--at-step", "9"),
        ("set", "user.x=[1, 2]", "optimizer.learning_rate="),
        ("undo",),
        ("set", "optimizer.learning_rate=-1"),
        ("set", "user.absent="),
        ("set", "typo=1"),
        ("undo",),
        ("show",),
        ("history",),
        ("diff",),
    ]
    for command in commands:
        asked = (agent.run(*command, "--file", str(agent.path)), agent.out, agent.err)
        alone = (main(["config", *command, "--file", str(tmp_path / "alone.json")]), *capsys.readouterr())
        assert _without_times(asked) == _without_times(alone)
        is_early = "version 2 holds what version 1 set for step 9 as well (user.y)" in asked[1]
        assert is_early == (command == commands[1])
    assert agent.path.read_bytes() == (tmp_path / "alone.json").read_bytes()
    assert agent.asked == ["set", "set", "undo", "set", "set", "set", "undo"]
    agent.tuner.look()
    assert agent.told == []


def _without_times(done: tuple[int, str, str]) -> tuple[int, str, str]:
    return done[0], re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", done[1]), done[2]


def test_a_change_with_force_is_written_directly_and_is_a_persons_version_for_the_agent(agent: Agent) -> None:
    assert agent.run("set", "user.x=1", "--file", str(agent.path)) == 0
    assert agent.run("set", "user.x=2", "--force", "--file", str(agent.path)) == 0
    assert agent.out == "version 2 written\nuser.x: 1 -> 2\n"
    agent.tuner.look()
    assert agent.asked == ["set"] and [each.version for each in agent.told] == [2]


def test_an_agent_that_has_ended_is_left_out(agent: Agent) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(END_SECONDS)
    agent.write(dataclasses.replace(agent.record, pid=ended.pid))
    assert agent.run("set", "user.x=1", "--file", str(agent.path)) == 0
    agent.write(dataclasses.replace(agent.record, start_ticks=agent.record.start_ticks + 1))  # its pid is another's now
    assert agent.run("set", "user.x=2", "--file", str(agent.path)) == 0
    assert agent.asked == [] and agent.in_file() == 2


def test_an_agent_that_runs_and_does_not_listen_is_a_refusal_with_what_to_do_and_nothing_is_written(
    agent: Agent,
) -> None:
    agent.control.close()
    for command in (["set", "user.x=1"], ["undo"]):
        assert agent.run(*command, "--file", str(agent.path)) == 1
        assert f"the agent of this file runs (pid {os.getpid()} on" in agent.err
        assert "no agent listens" in agent.err and "--force" in agent.err
    assert not agent.path.exists()
    assert agent.run("set", "user.x=1", "--force", "--file", str(agent.path)) == 0
    agent.control = Control(agent.control.path, {})  # for the fixture to close
    agent.control.start()


def test_an_agent_that_listens_to_nobody_is_left_out(agent: Agent) -> None:
    agent.write(dataclasses.replace(agent.record, socket=""))
    assert agent.run("set", "user.x=1", "--file", str(agent.path)) == 0
    assert agent.asked == [] and agent.in_file() == 1


def test_an_agent_on_another_machine_is_a_refusal_as_long_as_it_runs_there(agent: Agent) -> None:
    agent.write(dataclasses.replace(agent.record, host="node-b", pid=1))
    with ExitStack() as stack:
        folders = NodeFolders.make(agent.run_dir, is_given=True)
        stack.callback(folders.close)
        assert agent.run("set", "user.x=1", "--file", str(agent.path)) == 1
        assert "runs on node-b, and this is" in agent.err and "--force" in agent.err
        assert not agent.path.exists()
    assert agent.run("set", "user.x=1", "--file", str(agent.path)) == 0
    assert agent.asked == [] and agent.in_file() == 1


def test_a_file_that_the_agent_beside_it_does_not_have_is_written_directly(agent: Agent) -> None:
    other = agent.run_dir / "other.json"
    assert agent.run("set", "user.x=1", "--file", str(other)) == 0
    assert agent.asked == [] and other.exists()


def test_a_config_file_elsewhere_leads_to_the_agent_of_the_run_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(tmp_path / "run", capsys, config_file=tmp_path / "elsewhere.json")
    monkeypatch.setenv("ELASTIC_EXT_RUN_DIR", str(agent.run_dir))
    monkeypatch.chdir(tmp_path)
    with agent.control:
        assert agent.run("set", "user.x=1", "--file", "elsewhere.json") == 0
        (tmp_path / "link.json").symlink_to("elsewhere.json")
        assert agent.run("set", "user.x=2", "--file", "link.json") == 0
    assert agent.asked == ["set", "set"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', "\ud800"])
def test_a_record_that_is_damaged_is_no_agent(agent: Agent, text: str) -> None:
    (agent.run_dir / AGENT_FILE).write_bytes(text.encode(errors="surrogatepass"))
    assert agent.run("set", "user.x=1", "--file", str(agent.path)) == 0
    assert agent.asked == []


def test_a_change_that_is_too_large_for_a_request_is_refused(agent: Agent) -> None:
    assert agent.run("set", "user.x=" + "y" * 70_000, "--file", str(agent.path)) == 2
    assert agent.err.startswith("elastic-ext: refused: the request has 70")
    assert agent.asked == []


def test_a_disk_that_is_full_for_the_agent_exits_1_and_leaves_the_file_as_it_was(agent: Agent) -> None:
    assert agent.run("set", "user.x=1", "--file", str(agent.path)) == 0
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        status = main(["config", "set", "user.x=2", "--file", str(agent.path)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert status == 1 and agent.in_file() == 1
    assert agent.run("set", "user.x=3", "--file", str(agent.path)) == 0


AGENT = """
import socket, sys
from pathlib import Path
from elastic_ext.agent.control import Control
from elastic_ext.ranks.processes import this_process
from elastic_ext.records.agent import AGENT_FILE, AgentRecord
from elastic_ext.agent.config_writer import ConfigWriter, config_requests
run_dir = Path(sys.argv[1])
tuner = ConfigWriter(run_dir / "config.json", on_foreign=lambda write: print("foreign", write.version, flush=True))
me = this_process()
with Control(run_dir / "socket", config_requests(tuner)) as control:
    record = AgentRecord(
        node_id="n", job="j", run_id="r", host=socket.gethostname(), pid=me.pid, start_ticks=me.start_ticks, time=0.0,
        version="0", config_file=str(tuner.path), memory_folder="", socket=str(control.path), log_folder="",
    )
    (run_dir / AGENT_FILE).write_text(record.to_json())
    print("ready", flush=True)
    for line in sys.stdin:
        tuner.look()
        print("looked", flush=True)
"""


def test_an_agent_in_another_process_is_asked_and_after_its_death_the_file_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", AGENT, str(tmp_path)]
    file = str(tmp_path / "config.json")
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as other,
        ExitStack() as undo,
    ):
        undo.callback(other.kill)
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        assert main(["config", "set", "user.x=1", "--file", file]) == 0
        assert main(["config", "set", "user.x=2", "--file", file, "--force"]) == 0
        other.stdin.write("look\n")
        other.stdin.flush()
        assert [other.stdout.readline(), other.stdout.readline()] == ["foreign 2\n", "looked\n"]
        other.kill()
        other.wait(END_SECONDS)
        assert process_of(other.pid) is None and (tmp_path / "socket").exists()
        with pytest.raises(Exception, match="no agent listens"):
            ask(tmp_path / "socket", {"do": "config-undo"})
        assert main(["config", "undo", "--file", file]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["version 3 written", "user.x: 2 -> 1"]


def test_an_agent_that_does_not_say_what_it_has_written_is_a_failure_in_words(agent: Agent) -> None:
    agent.control.close()
    agent.control = Control(agent.control.path, {"config-set": lambda request: {}})
    agent.control.start()
    assert agent.run("set", "user.x=1", "--file", str(agent.path)) == 1
    assert "does not say what it has written" in agent.err
