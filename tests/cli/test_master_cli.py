"""elastic-ext status, events and config where a master is asked, or the files of a run directory for events."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_ext.agent.journal import Journal
from elastic_ext.cli import main
from elastic_ext.cli.master import event_words, is_healthy, status_words
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.master.address import Address, MasterPlace
from elastic_ext.master.wire import master_pb2 as pb
from elastic_ext.records.agent import MASTER_FILE, MasterRecord
from elastic_ext.records.metrics import JobEvent
from tests.support.linked import LinkedNode, in_file, linked
from tests.support.masters import ROOT, TOKEN, MasterThread, master_on_thread
from tests.support.nodes import until
from tests.support.ports import free_port


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONFIG_FILE", "RUN_DIR", "MASTER", "TOKEN_FILE", "JOB"):
        monkeypatch.delenv(f"ELASTIC_EXT_{name}", raising=False)
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MasterThread]:
    folder = tmp_path / "of-master"
    folder.mkdir()
    yield from master_on_thread(folder, "--beat-seconds", "0.2", "--lease-seconds", "5")


def place_of(master: MasterThread) -> MasterPlace:
    return MasterPlace(address=Address(host="127.0.0.1", port=master.port), token_file=master.token_file)


@pytest.fixture
def node(master: MasterThread, tmp_path: Path) -> Iterator[LinkedNode]:
    with linked(tmp_path / "node", place_of(master)) as made:
        until(lambda: made.told() or None)
        yield made


class Shell:
    """Commands against one master, and what they print."""

    def __init__(self, master: MasterThread, capsys: pytest.CaptureFixture[str]) -> None:
        self._ways = ["--master", master.address, "--token-file", str(master.token_file)]
        self._capsys = capsys
        self.out = self.err = ""

    def run(self, *arguments: str, ways: bool = True) -> int:
        self._capsys.readouterr()
        try:
            return main([*arguments, *(self._ways if ways else [])])
        finally:
            self.out, self.err = self._capsys.readouterr()

    def json(self, *arguments: str) -> Any:
        assert self.run(*arguments, "--json") in (0, 1), self.err
        return json.loads(self.out)


@pytest.fixture
def shell(master: MasterThread, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(master, capsys)


# ---- the config ----


def test_a_config_that_is_set_is_in_the_nodes_file_and_the_words_are_those_of_a_file(
    shell: Shell, node: LinkedNode
) -> None:
    assert shell.run("config", "set", "optimizer.learning_rate=0.1", "user.x=[1, 2]", "--reason", "größe") == 0
    assert shell.out == (
        "version 1 written\noptimizer.learning_rate: not set -> 0.1\nuser.x: not set -> [1, 2]\ntaken by 1 of 1 node\n"
    )
    assert in_file(node) == 1
    assert shell.run("config", "set", "user.x=", "--at-step", "9") == 0
    assert "user.x: [1, 2] -> not set" in shell.out
    assert shell.run("config", "undo") == 0
    assert "version 3 written\nuser.x: not set -> [1, 2]" in shell.out
    assert shell.run("config", "show") == 0
    assert json.loads(shell.out)["version"] == 3
    assert shell.run("config", "diff", "1", "3") == 0 and shell.out == ""
    assert shell.run("config", "history") == 0
    assert next(line for line in shell.out.splitlines() if line.startswith("version")).endswith(": größe")
    assert ElasticConfig.parse((node.run_dir / "config.json").read_bytes()).version == 3


def test_what_was_set_for_a_later_step_and_comes_with_another_version_is_told(shell: Shell) -> None:
    assert shell.run("config", "set", "user.x=1", "--at-step", "9") == 0
    assert shell.run("config", "set", "user.y=1") == 0
    assert "version 2 holds what version 1 set for step 9 as well (user.x): it comes into force with" in shell.out


def test_what_commands_say_can_be_had_as_json(shell: Shell, master: MasterThread, node: LinkedNode) -> None:
    assert shell.json("config", "set", "user.x=1") == {
        "version": 1,
        "place": f"the config of the master at {master.address}",
        "changes": {"user.x": {"before": None, "after": 1}},
        "num_holding": 1,
        "num_nodes": 1,
    }
    assert shell.json("config", "diff", "1", "1") == {"from": 1, "to": 1, "changes": {}}
    (row,) = [shell.json("config", "history")]
    assert (row["version"], row["author"], row["config"]["user"]) == (1, "person", {"x": 1})
    status = shell.json("status")
    assert status["healthy"] is True and status["nodes"][0]["node"]["node_id"] == "node"
    assert shell.run("events", "--json", "--last", "0") == 0
    events = [json.loads(line) for line in shell.out.splitlines()]
    assert "node-joined" in [each["kind"] for each in events]
    assert all(isinstance(each["details"], dict) for each in events)


def test_a_version_that_the_ranks_have_refused_is_passed_over_by_set_and_by_undo(
    shell: Shell, node: LinkedNode
) -> None:
    assert shell.run("config", "set", "user.x=1") == 0
    assert shell.run("config", "set", "global_batch_size=1") == 0
    digest = ElasticConfig.parse((node.run_dir / "config.json").read_bytes()).digest
    details = {"version": 2, "digest": digest, "why": "too few"}
    event = JobEvent(time=time.time(), generation=0, rank=0, step=4, kind="config-refused", text="", details=details)
    (node.run_dir / "events-0.jsonl").write_text(event.to_json() + "\n")
    until(lambda: (shell.run("events", "--last", "0", "--json"), "config-refused" in shell.out)[1] or None)
    assert shell.run("config", "set", "user.y=1") == 0
    made = "version 3 written\nmade from version 1, since the job has refused version 2: too few\n"
    assert shell.out == f"{made}user.y: not set -> 1\ntaken by 1 of 1 node\n"
    assert shell.run("config", "undo") == 0
    assert shell.out == "version 4 written\nuser.y: 1 -> not set\ntaken by 1 of 1 node\n"


def test_a_config_that_cannot_be_is_refused_with_the_masters_words_and_nothing_is_written(shell: Shell) -> None:
    for change, words in (
        ("optimizer.learning_rate=-1", "optimizer.learning_rate is -1"),
        ("dataloader.batch_sise=8", "is not a known key"),
        ("user.absent=", "user.absent is not in the file"),
        ("nonsense", "KEY=VALUE"),
    ):
        assert shell.run("config", "set", change) == 2
        assert "refused: " in shell.err and words in shell.err, shell.err
    assert shell.run("config", "show") == 2 and "does not exist" in shell.err
    assert shell.run("config", "undo") == 2


def test_a_config_without_any_node_is_written_and_nobody_has_taken_it(shell: Shell) -> None:
    assert shell.run("config", "set", "user.x=1") == 0
    assert shell.out.endswith("taken by 0 of 0 nodes\n")


# ---- which master ----


def test_a_master_is_named_by_the_environment_or_by_a_run_directory_and_arguments_come_first(
    shell: Shell, master: MasterThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ELASTIC_EXT_MASTER", master.address)
    monkeypatch.setenv("ELASTIC_EXT_TOKEN_FILE", str(master.token_file))
    assert shell.run("config", "set", "user.x=1", ways=False) == 0
    assert shell.run("config", "show", "--file", str(tmp_path / "none.json"), ways=False) == 2
    assert "none.json does not exist" in shell.err
    monkeypatch.delenv("ELASTIC_EXT_MASTER")
    monkeypatch.delenv("ELASTIC_EXT_TOKEN_FILE")
    record = MasterRecord(
        address=master.address, token_file=str(master.token_file), ca_file="", pid=0, job_id="", epoch=1, time=0.0
    )
    (tmp_path / MASTER_FILE).write_text(record.to_json())
    assert shell.run("config", "show", "--master", str(tmp_path), ways=False) == 0
    assert shell.run("status", "--master", str(tmp_path / "of-master"), ways=False) == 2
    assert "has no master.json" in shell.err
    assert shell.run("events", "--master", "nowhere", ways=False) == 2 and "HOST:PORT" in shell.err


def test_nobody_there_is_1_and_no_token_is_2_and_neither_says_the_token(
    shell: Shell, master: MasterThread, tmp_path: Path
) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    for command in (["status"], ["events"], ["config", "show"]):
        assert shell.run(*command, "--master", nobody, ways=False) == 1
        assert f"no master answers at {nobody}" in shell.err
        assert shell.run(*command, "--master", master.address, ways=False) == 2
        assert TOKEN not in shell.err + shell.out
        readable = tmp_path / "readable"
        readable.write_text(TOKEN)
        readable.chmod(0o644)
        assert shell.run(*command, "--master", master.address, "--token-file", str(readable), ways=False) == 2
        assert "chmod 600" in shell.err and TOKEN not in shell.err


def test_ctrl_c_while_a_master_is_waited_for_ends_any_command_without_a_word() -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    commands = (["config", "show"], ["status"], ["tuning", "log"], ["events"])
    for command in commands:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            silent.settimeout(60)
            words = [*command, "--master", f"127.0.0.1:{silent.getsockname()[1]}"]
            argv = [sys.executable, "-m", "elastic_ext.cli", *words]
            with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environ) as process:
                connection, _ = silent.accept()
                with connection:
                    process.send_signal(signal.SIGINT)
                    try:
                        assert process.communicate(timeout=60)[0] == b"", command
                    finally:
                        process.kill()
                    assert process.returncode == 130, command


# ---- the status ----


def test_a_status_in_words_says_who_is_there_and_what_is_wrong() -> None:
    status = pb.JobStatus(
        job="nano", epoch=3, up_seconds=7300.0, library="0.1.0", troubles=["node b on h is lost"],
        recommendations=["use fewer workers"],
        nodes=[
            pb.NodeStatus(
                node=pb.Node(node_id="a", host="h", pid=7), state="live", seen_seconds=1.0, config_version=2,
                machine="8 GPUs",
                workers=[
                    pb.Worker(
                        rank=0, pid=9, state="running", step=5, steps_per_second=2.5, memory_bytes=1 << 30,
                        activity="forward", activity_seconds=0.0, shares={"data": 0.4, "forward": 0.5, "other": 0.1},
                        trouble="it waits\x1b[2J",
                        metrics={
                            "epoch": 1, "num_epoch_steps_left": 20, "checkpoint_step": 4,
                            "checkpoint_time": time.time() - 90.0,
                        },
                    )
                ],
            ),
            pb.NodeStatus(node=pb.Node(node_id="b", host="h"), state="lost", seen_seconds=100.0),
        ],
        progress=pb.Progress(step=5, samples_per_second=80.0),
        config=pb.ConfigStatus(version=2, author="person", reason="why", num_holding=1, num_nodes=1, in_force=[2]),
        events=[pb.JobEvent(time=0.0, node_id="a", rank=0, step=4, text="happened")],
    )  # fmt: skip
    text = status_words(status, "here:1")
    assert not is_healthy(status) and "\x1b" not in text
    lines = [line.strip() for line in text.splitlines()]
    assert lines[0] == "nano: 1 node, step 5, in trouble"
    for each in (
        "a  live  pid 7 on h  config 2  seen 1 s ago  8 GPUs",
        "rank 0  pid 9  running  step 5  2.5 steps/s  1.00 GiB  forward for 0 s  forward 50%, data 40%",
        "b  lost  pid 0 on h  no config  seen 1 min ago",
        "node b on h is lost",
        "use fewer workers",
    ):
        assert each in lines, text
    assert "master         here:1, epoch 3, for 2 h, elastic_ext 0.1.0" in text
    left = "20 steps left of the epoch, about 8 s"
    assert f"progress       step 5 in epoch 1; {left}; last checkpoint of step 4, 1 min ago" in text
    assert lines[-1].endswith("a, rank 0, step 4: happened")
    assert is_healthy(pb.JobStatus()) and status_words(pb.JobStatus(), "here:1").startswith("no job yet: 0 nodes\n")
    assert "a time that cannot be" in event_words(pb.JobEvent(time=1e30))


def test_a_status_says_which_ranks_a_node_has_and_who_of_the_membership_was_never_heard_of() -> None:
    shares = [pb.NodeShare(node_id=name, host="h", first_rank=first, num_workers=num) for name, first, num in SHARES]
    known = [pb.Node(node_id=f"h-{name}", host="h", agent_id=name) for name in ("one", "two", "old")]
    status = pb.JobStatus(
        nodes=[pb.NodeStatus(node=each, state="live") for each in known],
        membership=pb.Membership(version=1, nodes=shares, reason="met"),
    )
    lines = status_words(status, "here:1").splitlines()
    assert [line.split("  on h")[0].split() for line in lines if " on h " in line] == [
        [*["h-one", "live", "pid", "0", "on", "h", "rank", "0", "no", "config", "seen", "0", "s", "ago"]],
        [*["h-two", "live", "pid", "0", "on", "h", "ranks", "1", "to", "4", "no", "config", "seen", "0", "s", "ago"]],
        [*["h-old", "live", "pid", "0", "on", "h", "no", "config", "seen", "0", "s", "ago"]],
    ]
    assert any("the master never heard of: three (ranks 5 to 6)" in line for line in lines)
    for node in status.nodes:
        node.node.agent_id = ""  # of an earlier version, which does not say so
    assert "never heard of" not in status_words(status, "here:1")


SHARES = [("one", 0, 1), ("two", 1, 4), ("three", 5, 2)]


def test_a_job_in_trouble_has_exit_status_1(shell: Shell, master: MasterThread) -> None:
    caller = master.caller()
    caller.join("a")
    caller.beat("a", trouble="the disk is full")
    assert shell.run("status") == 1 and "the disk is full" in shell.out


# ---- events ----


def test_events_that_come_are_shown_while_they_are_followed(master: MasterThread, node: LinkedNode) -> None:
    command = ["events", "--follow", "--json", "--master", master.address, "--token-file", str(master.token_file)]
    with following(command) as process:
        assert process.stdout is not None
        kinds: list[dict[str, Any]] = []
        node.journal.tell("odd", "happened while somebody looked", number=7)
        while not kinds or kinds[-1]["kind"] != "odd":
            kinds.append(json.loads(process.stdout.readline()))
        assert kinds[-1]["details"] == {"number": 7} and kinds[-1]["node_id"] == "node"
        numbers = [each["number"] for each in kinds]
        assert numbers == sorted(set(numbers))


def following(command: list[str]) -> subprocess.Popen[str]:
    class Following(subprocess.Popen[str]):
        def __exit__(self, *given: Any) -> None:
            self.kill()
            super().__exit__(*given)

    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return Following(
        [sys.executable, "-m", "elastic_ext.cli", *command], stdout=subprocess.PIPE, text=True, env=environ, cwd=ROOT
    )


def test_events_of_a_run_directory_are_shown_in_order_and_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal(tmp_path)
    of_rank = JobEvent(time=time.time() - 9, generation=1, rank=3, step=12, kind="saved", text="a checkpoint")
    (tmp_path / "events-3.jsonl").write_text(of_rank.to_json() + "\n")
    journal.note("started", "the job\x1b[2J begins")
    assert main(["events", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[21:] for line in lines] == ["rank 3, step 12: a checkpoint", "agent: the job [2J begins"]
    assert main(["events", str(tmp_path), "--json", "--last", "1"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["kind"], record["rank"], record["restart"]) == ("started", -1, 0)
    with following(["events", str(tmp_path), "--follow"]) as process:
        assert process.stdout is not None
        assert "a checkpoint" in process.stdout.readline() and "begins" in process.stdout.readline()
        journal.note("went-on", "something came")
        assert "something came" in process.stdout.readline()


def test_events_of_no_job_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["events", "--last", "-1"])
