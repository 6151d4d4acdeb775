"""elastic-run with a master: its own with --standalone, one that is named, none; and one that comes to harm."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_ext.agent.arguments import parse
from elastic_ext.agent.master.embedded import master_choice
from elastic_ext.cli import main
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.errors import MasterRefused
from elastic_ext.master.address import Address, MasterPlace
from elastic_ext.master.client import MasterClient
from elastic_ext.master.credentials import make_token
from elastic_ext.master.wire import master_pb2 as pb
from elastic_ext.ranks.processes import is_alive, process_of
from elastic_ext.records.agent import MASTER_FILE, MasterRecord
from tests.support.masters import MasterProcess, master_in_process
from tests.support.nodes import Node, last_step, nodes, until
from tests.support.ports import free_port
from tests.support.proxies import Proxy

WAITS = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / "began").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
"""
TRAINS = ("-m", "tests.support.elastic_job")


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    """A worker that waits until there is a file `go`."""
    (tmp_path / "waits.py").write_text(WAITS)
    return [str(tmp_path / "waits.py"), str(tmp_path)]


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MasterProcess]:
    folder = tmp_path / "of-master"
    folder.mkdir()
    yield from master_in_process(folder, "--beat-seconds", "0.5", "--lease-seconds", "2", "--job", "job")


def place_of(master: MasterProcess, port: int = 0) -> MasterPlace:
    return MasterPlace(address=Address(host="127.0.0.1", port=port or master.port), token_file=master.token_file)


def record_of(node: Node) -> MasterRecord | None:
    file = node.run_dir / MASTER_FILE
    return MasterRecord.from_json(file.read_text()) if file.exists() else None


def client_of(record: MasterRecord) -> MasterClient:
    return MasterClient(MasterPlace(address=Address.parse(record.address), token_file=Path(record.token_file)))


def applied(node: Node, version: int, ranks: int = 2) -> bool:
    """Whether all ranks have told that the version is in force."""
    files = [file.read_text() for file in node.run_dir.glob("events-[0-9]*.jsonl")]
    return len(files) == ranks and all(f"version {version} " in text for text in files)


# ---- what is asked for ----


def choice(*arguments: str) -> object:
    return master_choice(parse([*arguments, "train.py"], {}))


def test_there_is_a_master_where_one_is_named_and_with_standalone_and_otherwise_none(tmp_path: Path) -> None:
    make_token(tmp_path / "token")
    assert choice() == "none"
    assert choice("--standalone") == "own"
    assert choice("--standalone", "--master=off") == choice("--master", "OFF") == "none"
    given = choice("--master=[::1]:7788", f"--token-file={tmp_path / 'token'}")
    assert given == MasterPlace(address=Address(host="::1", port=7788), token_file=tmp_path / "token")


def test_the_environment_names_a_master_as_it_gives_other_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MASTER", "node-1:7788")
    assert choice() == MasterPlace(address=Address(host="node-1", port=7788))
    assert choice("--master=off") == "none"
    monkeypatch.setenv("PET_TOKEN_FILE", "/of/the/cluster")
    assert choice("--master=off") == "none", "whoever does without needs no token"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--master=nowhere"], "--master: 'nowhere' is no address of a master; allowed: HOST:PORT"),
        (["--master=a:1", "--token-file=/nowhere"], "the token file /nowhere does not exist"),
        (["--master=a:1", "--master-ca=/nowhere"], "--master-ca cannot be read: No such file"),
        (["--token-file=t"], "--token-file is given, and there is no --master .* give --master HOST:PORT as well"),
        (["--token-file=t", "--master-ca=c"], "--token-file and --master-ca are given, and there is no --master"),
        (["--standalone", "--master-ca=c"], "--master-ca is given, .* of --standalone has a token of its own"),
    ],
)
def test_what_cannot_be_a_master_is_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("[", r"\[")):
        choice(*arguments)


# ---- its own ----


def test_standalone_has_a_master_that_is_found_by_the_run_directory_and_ends_with_the_agent(
    tmp_path: Path, script: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with nodes(Node(tmp_path / "node", ["--standalone", "--nproc-per-node=1", *script])) as (node,):
        record = until(lambda: record_of(node))
        until(lambda: (tmp_path / "began").exists() or None)
        assert stat.S_IMODE((node.run_dir / "master.token").stat().st_mode) == 0o600
        process = process_of(record.pid)
        assert process is not None
        place = MasterPlace(address=Address.parse(record.address))
        with MasterClient(place) as stranger, pytest.raises(MasterRefused, match="asks for its token"):
            stranger.set_config(pb.SetConfigRequest(changes={"user.x": "2"}))
        with client_of(record) as client:
            status = until(lambda: found if (found := client.status()).nodes[0].workers else None)
            assert status.membership.nodes[0].num_workers == 1
            assert status.nodes[0].workers[0].state == "running"
            assert status.nodes[0].node.agent_id == status.membership.nodes[0].node_id == node.record().node_id
            client.set_config(pb.SetConfigRequest(changes={"user.x": "1"}))
        until(lambda: (node.run_dir / "config.json").exists() or None)
        assert main(["status", str(node.run_dir)]) == 0
        assert f"{record.address}    (elastic-ext status --master {node.run_dir})" in capsys.readouterr().out
        assert main(["config", "show", "--master", str(node.run_dir)]) == 0
        (tmp_path / "go").touch()
        assert node.end() == 0, node.text
        assert not is_alive(process) and record_of(node) is None
    token = (node.run_dir / "master.token").read_text().strip()
    for file in node.run_dir.rglob("*"):
        if file.is_file() and file.name != "master.token":
            assert token.encode() not in file.read_bytes(), file
    assert token not in node.text


def test_an_own_master_ends_with_an_agent_that_is_killed(tmp_path: Path, script: list[str]) -> None:
    with nodes(Node(tmp_path / "node", ["--standalone", "--nproc-per-node=1", *script])) as (node,):
        record = until(lambda: record_of(node))
        process = process_of(record.pid)
        assert process is not None
        node.send(signal.SIGKILL)
        until(lambda: not is_alive(process) or None)


# ---- one that is named ----


def test_a_master_of_another_job_keeps_a_node_from_starting(
    tmp_path: Path, script: list[str], master: MasterProcess
) -> None:
    given = ["--master", master.address, "--token-file", str(master.token_file), "--job=another"]
    with nodes(Node(tmp_path / "node", [*given, "--nproc-per-node=1", *script])) as (node,):
        assert node.end() == 2, node.text
    assert "this master is of job 'job', not of 'another'" in node.text
    assert not (tmp_path / "began").exists()


def test_without_a_master_workers_are_started_and_it_is_said_once(tmp_path: Path, script: list[str]) -> None:
    (tmp_path / "go").touch()
    given = ["--master", f"127.0.0.1:{free_port()}", "--nproc-per-node=1"]
    with nodes(Node(tmp_path / "node", [*given, *script])) as (node,):
        assert node.end() == 0, node.text
    assert [kind for kind in node.kinds() if kind.startswith("master-")] == ["master-absent"], node.text


def test_a_node_that_ctrl_c_ends_tells_its_master_that_it_was_told_to(
    tmp_path: Path, script: list[str], master: MasterProcess
) -> None:
    given = ["--master", master.address, "--token-file", str(master.token_file), "--job=job", "--nproc-per-node=1"]
    with nodes(Node(tmp_path / "node", [*given, *script])) as (node,):
        node.wait_for("this node has joined")
        until(lambda: (tmp_path / "began").exists() or None)
        node.send(signal.SIGINT)
        assert node.end() == 130, node.text
    with MasterClient(place_of(master)) as client:
        assert any(each.text.endswith("has left: it was told to end") for each in client.events())


# ---- trainings ----


def training(tmp_path: Path, address: str, master: MasterProcess) -> Node:
    given = ["--master", address, "--token-file", str(master.token_file), "--job=job", "--nproc-per-node=2"]
    job = [*TRAINS, str(tmp_path), "--steps=100000", "--pace=0.01", "--every=100000"]
    return Node(tmp_path / "node", [*given, *job])


def goes_on(tmp_path: Path) -> None:
    """Some more steps are taken."""
    step = last_step(tmp_path)
    until(lambda: last_step(tmp_path) > step + 20 or None)


@pytest.mark.slow
def test_a_training_goes_on_through_all_that_can_become_of_its_master(tmp_path: Path, master: MasterProcess) -> None:
    with Proxy(master.port) as proxy, nodes(training(tmp_path, f"127.0.0.1:{proxy.port}", master)) as (node,):
        until(lambda: last_step(tmp_path) > 3 or None)
        node.wait_for("this node has joined")

        def kinds() -> list[str]:
            return [kind for kind in node.kinds() if kind.startswith("master-")]

        def sets(value: int) -> int:
            with MasterClient(place_of(master)) as client:
                return client.set_config(pb.SetConfigRequest(changes={"user.x": str(value)})).version

        first = sets(1)
        until(lambda: applied(node, first) or None)

        master.kill()
        until(lambda: kinds().count("master-lost") == 1 or None)
        goes_on(tmp_path)
        master.start()
        proxy.target = master.port
        until(lambda: kinds().count("master-back") == 1 or None)
        second = sets(2)
        until(lambda: applied(node, second) or None)

        assert master.process is not None
        master.process.send_signal(signal.SIGSTOP)
        until(lambda: kinds().count("master-lost") == 2 or None)
        goes_on(tmp_path)
        master.process.send_signal(signal.SIGCONT)
        until(lambda: kinds().count("master-back") == 2 or None)

        proxy.cut()
        third = sets(3)
        until(lambda: kinds().count("master-lost") == 3 or None)
        goes_on(tmp_path)
        proxy.mend()
        until(lambda: applied(node, third) or None)

        node.send(signal.SIGSTOP)  # the agent; its workers train
        with MasterClient(place_of(master)) as client:
            until(lambda: client.status().nodes[0].state == "lost" or None)
            goes_on(tmp_path)
            node.send(signal.SIGCONT)
            until(lambda: client.status().nodes[0].state == "live" or None)
        fourth = sets(4)
        until(lambda: applied(node, fourth) or None)
        assert "worker-failed" not in node.kinds() and node.kinds().count("workers-started") == 1
        node.send(signal.SIGTERM)
        assert node.end() == 143


@pytest.mark.slow
def test_an_own_master_that_is_killed_under_training_goes_on_as_the_same(tmp_path: Path) -> None:
    job = [*TRAINS, str(tmp_path), "--steps=100000", "--pace=0.01", "--every=100000"]
    with nodes(Node(tmp_path / "node", ["--standalone", "--nproc-per-node=2", *job])) as (node,):
        until(lambda: last_step(tmp_path) > 3 or None)
        first = until(lambda: record_of(node))
        with client_of(first) as client:
            client.set_config(pb.SetConfigRequest(changes={"user.x": "1"}))
        until(lambda: applied(node, 1) or None)
        os.kill(first.pid, signal.SIGKILL)
        second = until(lambda: found if (found := record_of(node)) and found.pid != first.pid else None)
        assert (second.job_id, second.epoch) == (first.job_id, first.epoch + 1)
        with client_of(second) as client:
            assert client.set_config(pb.SetConfigRequest(changes={"user.x": "2"})).version == 2
        until(lambda: applied(node, 2) or None)
        goes_on(tmp_path)
        node.send(signal.SIGTERM)
        assert node.end() == 143
    assert ElasticConfig.parse((node.run_dir / "config.json").read_bytes()).get("user.x") == 2
