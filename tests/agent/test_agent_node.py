"""One node under elastic-run: failures are explained, workers restarted, what was staged is kept, nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from elastic_ext.agent.status.files import read_run_directory
from elastic_ext.agent.status.status import NodeStatus, status_of
from elastic_ext.doctor.findings import check_node
from elastic_ext.doctor.records import NodeHardware
from elastic_ext.fsdp.checkpoint.folder.commit import read_commit
from elastic_ext.ranks.processes import is_alive
from tests.support.elastic_job import NUM_SAMPLES
from tests.support.nodes import ELASTIC_RUN, FORKING_RUN, Node, last_step, nodes, samples_of_steps, until
from tests.support.ports import free_port

JOB = ("-m", "tests.support.elastic_job")


def started(
    tmp_path: Path,
    *arguments: str,
    launch: tuple[str, ...] = ("--master=off",),
    launcher: tuple[str, ...] = FORKING_RUN,
) -> Node:
    """A node of two workers that train, by default without a master, whose start takes as long as a worker's."""
    options = ["--standalone", "--nproc-per-node=2", *launch]
    return Node(tmp_path / "node", [*options, *JOB, str(tmp_path), *arguments], launcher=launcher)


def status_in(run_dir: Path) -> NodeStatus:
    return status_of(read_run_directory(run_dir, now=time.time(), host=socket.gethostname()))


def held(folder: Path, step: int, *, ranks: int = 2) -> bool:
    """Whether so many processes have written that step."""
    files = folder.glob("samples-*.txt")
    return sum(f"\n{step} " in file.read_text() for file in files) >= ranks


def test_a_worker_that_is_killed_is_named_and_training_goes_on_from_what_all_ranks_had_staged(tmp_path: Path) -> None:
    arguments = ("--steps=16", "--every=4", "--full-from=6", "--hold-at=10")
    with nodes(started(tmp_path, *arguments, launch=("--master=off", "--max-restarts=1"))) as (node,):
        node.wait_for("No space left")
        until(lambda: held(tmp_path, 10))
        (tmp_path / "go").touch()
        os.kill(node.workers()[1].pid, signal.SIGKILL)
        assert node.end() == 0, node.text
    assert "rank 1" in node.text and "SIGKILL" in node.text
    (staged,) = [event for event in node.events() if event["kind"] == "staged"]
    assert staged["details"]["path"].endswith("step_8"), staged
    began = [json.loads(line) for line in (node.run_dir / "events-0.jsonl").read_text().splitlines()]
    assert [event["step"] for event in began if event["kind"] == "training-began"] == [0, 8]
    steps = samples_of_steps(tmp_path)
    assert sorted(steps) == list(range(1, 17))
    assert sorted(sample for step in range(1, 9) for sample in steps[step]) == list(range(NUM_SAMPLES))
    assert sorted(sample for step in range(9, 17) for sample in steps[step]) == list(range(NUM_SAMPLES))


def test_workers_end_with_an_agent_that_is_killed(tmp_path: Path) -> None:
    with nodes(started(tmp_path, "--steps=100000", "--pace=0.05")) as (node,):
        until(lambda: last_step(tmp_path) > 3 or None)
        workers, memory = node.workers(), Path(node.record().memory_folder)
        node.send(signal.SIGKILL)
        until(lambda: not any(is_alive(worker) for worker in workers.values()) or None)
        until(lambda: not memory.exists() or None)
        assert len(workers) == 2


def test_sigterm_ends_all_with_a_checkpoint_from_which_the_next_start_resumes_and_says_so(tmp_path: Path) -> None:
    job = ("--steps=100000", "--pace=0.05", "--every=100000")
    with nodes(started(tmp_path, *job, launch=(), launcher=ELASTIC_RUN)) as (node,):  # its workers are new interpreters
        until(lambda: last_step(tmp_path) > 3 or None)
        node.send(signal.SIGTERM)
        assert node.end() == 143
        told = re.search(r"has ended its workers after SIGTERM; (training was told to end, .*)", node.text)
        events = [event["text"] for event in node.events() if event["kind"] == "ended"]
    (commit,) = (tmp_path / "checkpoints").rglob("COMMIT")
    step, status = read_commit(commit.parent).global_step, status_in(node.run_dir)
    words = f"training was told to end, and can go on from step {step}"
    assert "this node leaves the job; its workers are told to save a checkpoint and to end" in node.text
    assert told is not None and told[1] == f"{words}: {commit.parent} is saved"
    assert events == [f"this node has ended its workers after SIGTERM; {told[1]}"]
    assert status.troubles == () and status.notes == (words,)
    assert [(each.state, each.exit_code) for each in status.ranks] == [("left", 143)] * 2
    with nodes(started(tmp_path, f"--steps={step + 2}", "--every=100000")) as (node,):
        assert node.end() == 0, node.text
    assert f"training resumes from {commit.parent}, of step {step}, saved by 2 ranks" in node.text


def test_a_worker_that_somebody_has_told_to_end_is_said_to_have_saved(tmp_path: Path) -> None:
    with nodes(started(tmp_path, "--steps=100000", "--pace=0.05", "--every=100000")) as (node,):
        until(lambda: last_step(tmp_path) > 3 or None)
        os.kill(node.workers()[1].pid, signal.SIGTERM)
        assert node.end() == 1
    (commit,) = (tmp_path / "checkpoints").rglob("COMMIT")
    words = f"training was told to end, and can go on from step {read_commit(commit.parent).global_step}"
    line = next(line for line in node.lines if "no restart is left" in line)
    assert f"exited with status 143: {words}: {commit.parent} is saved" in line
    assert status_in(node.run_dir).notes == (words,)


DEAF = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"{sys.argv[1]}/deaf-{os.environ['RANK']}", "w").close()
while True:
    signal.pause()
"""


def test_however_often_it_is_told_to_end_no_worker_is_left(tmp_path: Path) -> None:
    script = tmp_path / "deaf.py"
    script.write_text(DEAF)
    launch = ("--standalone", "--master=off", "--nproc-per-node=2", "--shutdown-timeout=2")
    with nodes(Node(tmp_path / "node", [*launch, str(script), str(tmp_path)])) as (node,):
        until(lambda: len(list(tmp_path.glob("deaf-*"))) == 2 or None)
        workers = node.workers()

        def ends() -> bool | None:
            node.send(signal.SIGTERM)
            return node.process.poll() is not None or None

        until(ends)
        assert node.end() in (143, -signal.SIGTERM)  # the last may have come when Python itself was about to end
        assert "this node leaves the job; its workers are told to end\n" in node.text
        assert "this node has ended its workers after SIGTERM" in node.text
        assert len(workers) == 2 and not any(is_alive(worker) for worker in workers.values())


WAITS = """
import os, signal, sys
print(os.environ["MASTER_ADDR"], file=open(f"{sys.argv[1]}/address-{os.environ['RANK']}", "w"))
os.rename(f"{sys.argv[1]}/address-{os.environ['RANK']}", f"{sys.argv[1]}/ready-{os.environ['RANK']}")
signal.pause()
"""


def addresses_listened_at(node: Node) -> set[str]:
    """Where other processes can connect to an agent, whatever the port."""
    connections = psutil.Process(node.process.pid).net_connections(kind="inet")
    return {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("how", ["alone", "two nodes", "two static nodes"])
def test_nodes_that_meet_on_this_machine_listen_at_its_loopback_address_alone(tmp_path: Path, how: str) -> None:
    script, port = tmp_path / "waits.py", free_port()
    script.write_text(WAITS)
    launches = [["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=job"]] * 2
    if how == "alone":
        launches = [["--standalone"]]
    elif how == "two static nodes":
        launches = [["--nnodes=2", f"--node-rank={rank}", f"--master-port={port}"] for rank in range(2)]
    made = [
        Node(tmp_path / f"node-{index}", [*launch, str(script), str(tmp_path)]) for index, launch in enumerate(launches)
    ]
    with nodes(*made) as started:
        until(lambda: len(list(tmp_path.glob("ready-*"))) == len(started) or None)
        assert {each.read_text().strip() for each in tmp_path.glob("ready-*")} == {"127.0.0.1"}
        found = [addresses_listened_at(node) for node in started]
    assert set.union(*found) == {"127.0.0.1"}, found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_node_that_is_told_to_end_while_it_waits_for_others_says_so(tmp_path: Path, number: signal.Signals) -> None:
    endpoint = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=job"]
    with nodes(Node(tmp_path / "node", ["--nnodes=2", *endpoint, __file__])) as (node,):
        node.wait_for("  logs ")
        memory = Path(node.record().memory_folder)
        assert memory.exists()
        node.send(number)
        assert node.end() == 128 + number, node.text
        assert not memory.exists()
    assert f"before it has started workers, after {number.name}" in node.text and "Traceback" not in node.text


def test_a_worker_that_hangs_is_named_by_where_it_is_and_all_are_restarted(tmp_path: Path) -> None:
    launch = ("--master=off", "--max-restarts=1", "--hang-seconds=2")
    with nodes(started(tmp_path, "--steps=12", "--every=4", "--hang-at=7", launch=launch)) as (node,):
        assert node.end() == 0, node.text
    (hang,) = [event for event in node.events() if event["kind"] == "hang"]
    (stacks,) = [event for event in node.events() if event["kind"] == "stacks"]
    assert 1 in hang["details"]["ranks"] and "in step 8" in hang["text"]
    assert "rank 1" in stacks["text"] and "in hang" in stacks["text"]
    written = Path(stacks["details"]["path"]).read_text()
    assert "rank 0" in written and "backward" in written
    steps = samples_of_steps(tmp_path)
    assert sorted(steps) == list(range(1, 13))
    assert "training goes on after step 4: 3 steps taken again (36 samples)" in node.text
    assert f"checkpoints: {tmp_path / 'checkpoints'}, every 4 steps" in node.text


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_loader_that_locks_up_is_a_hang_of_its_rank_between_two_steps(tmp_path: Path, num_ranks: int) -> None:
    """After ten minutes, in which a loop may do something that it did not say; who waits for it is told meanwhile."""
    launch = ("--standalone", f"--nproc-per-node={num_ranks}", "--max-restarts=1", "--hang-seconds=2")
    options = (str(tmp_path), "--steps=20", "--every=4", "--deadlock-at=7")
    with nodes(Node(tmp_path / "node", [*launch, *JOB, *options])) as (node,):
        assert node.end(within=900) == 0, node.text
    (hang,) = [event for event in node.events() if event["kind"] == "hang"]
    (stacks,) = [event for event in node.events() if event["kind"] == "stacks"]
    assert f"rank {num_ranks - 1}:" in hang["text"] and "between two steps" in hang["text"], hang["text"]
    assert re.search(rf"rank {num_ranks - 1}, MainThread: elastic_job\.py:\d+ in train \(pool\.py", stacks["text"])
    waiting = [event for event in node.events() if event["kind"] == "waiting"]
    assert (1 <= len(waiting) <= 10) if num_ranks > 1 else not waiting
    assert sorted(samples_of_steps(tmp_path)) == list(range(1, 21))
    assert "training goes on after step 4" in node.text


def test_the_config_is_changed_through_the_agent_and_what_others_write_is_noticed(tmp_path: Path) -> None:
    with nodes(started(tmp_path, "--steps=100000", "--pace=0.05", "--every=100000", launch=())) as (node,):
        until(lambda: last_step(tmp_path) > 2 or None)
        command = [sys.executable, "-m", "elastic_ext.cli"]
        set_ = [*command, "config", "set", "optimizer.learning_rate=0.5", "--file", node.record().config_file]
        assert subprocess.run(set_, check=True, capture_output=True, text=True).stdout.startswith("version 1 written")
        until(lambda: applied(node, 1) or None)
        config = json.loads(Path(node.record().config_file).read_text())
        Path(node.record().config_file).write_text(json.dumps({**config, "version": 2, "reason": "by hand"}))
        until(lambda: applied(node, 2) or None)
        until(lambda: "config-foreign" in node.kinds() or None)
        status = subprocess.run([*command, "status", str(node.run_dir), "--json"], capture_output=True, text=True)
        assert status.returncode == 0, status.stdout
        assert [rank["config_version"] for rank in json.loads(status.stdout)["ranks"]] == [2, 2]
        node.send(signal.SIGTERM)
        assert node.end() == 143


def test_a_machine_on_which_something_is_wrong_is_not_started_on_where_that_was_asked_for(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('started')")
    with nodes(Node(tmp_path / "node", ["--node-check", str(script)])) as (node,):
        status = node.end()
    hardware = NodeHardware.from_json((node.run_dir / "hardware.json").read_text())
    why_not, _ = check_node(hardware)  # this machine, whatever it is like
    assert (status == 2) == (why_not is not None)
    assert ("started" in node.lines) == (why_not is None)


@pytest.mark.slow
def test_a_config_for_which_there_is_no_room_leaves_the_old_one_and_training_goes_on(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(small)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.decode()}")
    try:
        config = small / "config.json"
        launch = ("--config-file", str(config))
        with nodes(started(tmp_path, "--steps=100000", "--pace=0.05", "--every=100000", launch=launch)) as (node,):
            until(lambda: last_step(tmp_path) > 2 or None)
            set_ = [sys.executable, "-m", "elastic_ext.cli", "config", "set", "--file", str(config)]
            in_run = {**os.environ, "ELASTIC_EXT_RUN_DIR": str(node.run_dir)}
            assert subprocess.run([*set_, "user.x=1"], env=in_run, capture_output=True).returncode == 0
            until(lambda: applied(node, 1) or None)
            with contextlib.suppress(OSError), open(small / "filler", "wb", buffering=0) as filler:
                while True:
                    filler.write(bytes(4096))
            refused = subprocess.run([*set_, "user.x=2"], env=in_run, capture_output=True, text=True)
            assert refused.returncode == 1 and "No space left" in refused.stderr and "as it was" in refused.stderr
            assert json.loads(config.read_text())["version"] == 1
            step = last_step(tmp_path)
            until(lambda: last_step(tmp_path) > step + 3 or None)
            (small / "filler").unlink()
            assert subprocess.run([*set_, "user.x=3"], env=in_run, capture_output=True).returncode == 0
            until(lambda: applied(node, 2) or None)
            node.send(signal.SIGTERM)
            assert node.end() == 143
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def applied(node: Node, version: int) -> bool:
    """Whether a version is in force on both ranks."""
    files = [node.run_dir / f"events-{rank}.jsonl" for rank in (0, 1)]
    return all(file.exists() and f'"version":{version},' in file.read_text() for file in files)


@pytest.mark.slow
def test_50_starts_leave_nothing_behind(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('here')")
    before = left_on_machine()
    for _ in range(50):
        with nodes(Node(tmp_path / "node", ["--standalone", "--nproc-per-node=2", str(script)])) as (node,):
            assert node.end() == 0, node.text
    assert left_on_machine() <= before
    assert len(list((tmp_path / "node" / "logs").iterdir())) <= 10


def left_on_machine() -> set[str]:
    """What an agent could leave: in memory, among temporary files, and processes."""
    processes = {
        f"process {each.pid}"
        for each in psutil.process_iter()
        if each.status() != psutil.STATUS_ZOMBIE and "elastic_ext" in " ".join(each.cmdline())
    }
    files = {str(path) for folder in ("/dev/shm", tempfile.gettempdir()) for path in Path(folder).glob("*elastic*")}
    return processes | files


_UNWRITABLE = """
import sys, torch
from elastic_ext import ElasticTrainer, FollowOptions
model = torch.nn.Linear(2, 2)
job = FollowOptions(job="job")
with ElasticTrainer(model, micro_batch_size=1, shared_storage_path=sys.argv[1], follow_options=job) as trainer:
    trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
"""


def test_a_folder_that_cannot_be_used_is_one_sentence_of_the_worker_and_of_the_agent(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "script.py").write_text(_UNWRITABLE)
    arguments = [
        "--standalone",
        "--master=off",
        "--local-addr=127.0.0.1",
        str(tmp_path / "script.py"),
        str(tmp_path / "file" / "below"),
    ]
    with nodes(Node(tmp_path / "node", arguments, launcher=FORKING_RUN)) as (node,):
        assert node.end() == 1
    words = f"{tmp_path / 'file'} is no folder, and checkpoints are to lie there; move it away"
    lines = [line for line in node.lines if words in line]
    assert [line.split()[0] for line in lines] == ["elastic_ext.errors.CheckpointError:", "elastic-run", "elastic-run"]
    assert "Traceback" not in node.text and len(node.lines) < 20, node.text
