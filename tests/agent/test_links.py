"""Two nodes with a real link between them, which is cut, comes back, or is slow: nothing is lost, and it is told."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.elastic_job import NUM_SAMPLES
from tests.support.links import Link, link, why_no_links
from tests.support.nodes import Node, last_step, nodes, samples_of_steps, set_config, until

pytestmark = [pytest.mark.slow]
WHY_NOT = why_no_links()
if WHY_NOT is not None:
    pytestmark.append(pytest.mark.skip(reason=WHY_NOT))

JOB = ("-m", "tests.support.elastic_job")
TOKEN = "a-token-of-tests-alone"
RENDEZVOUS_PORT, MASTER_PORT = 29400, 7788
NUM_STEPS = 60
NUM_UNTIL_BACK = 500  # steps: whoever was cut off is back before the other has taken them all alone
SILENT_SECONDS = 4.0  # how long a node may say nothing before the rendezvous takes it for lost
NUM_SENT = 250_000  # two seconds at 1 Mbit/s, of which a bucket of 32 kB takes a quarter

SENDS = """
import socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[4])) as line:
    began = time.monotonic()
    line.sendall(bytes(int(sys.argv[3])))
    assert line.recv(1) == b"!"
    print(time.monotonic() - began)
"""
TAKES = """
import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    print("ready", flush=True)
    while True:
        line, left = server.accept()[0], int(sys.argv[3])
        while left and (data := line.recv(left)):
            left -= len(data)
        line.sendall(b"!")
"""


def seconds_to_send(between: Link, patience: float) -> float | None:
    """How long it takes until the other host has ``NUM_SENT`` bytes, None where it has not in time."""
    send = [*between.within(1), sys.executable, "-c", SENDS, between.address(0), str(MASTER_PORT), str(NUM_SENT)]
    done = subprocess.run([*send, str(patience)], check=False, capture_output=True, text=True)
    return float(done.stdout) if done.returncode == 0 else None


def test_a_link_lets_as_much_through_as_it_was_made_for_and_nothing_while_it_is_cut() -> None:
    with link() as between:
        take = [*between.within(0), sys.executable, "-c", TAKES, between.address(0), str(MASTER_PORT), str(NUM_SENT)]
        with subprocess.Popen(take, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None and other.stdout.readline() == b"ready\n"
            try:
                assert (seconds_to_send(between, 60.0) or 60.0) < 1.0
                between.set_rate("1mbit")
                assert (seconds_to_send(between, 60.0) or 0.0) > 1.0
                between.cut()
                assert seconds_to_send(between, 2.0) is None
                between.mend()
                assert (seconds_to_send(between, 60.0) or 0.0) > 1.0
            finally:
                other.kill()


class LinkedJob:
    """A job of two nodes, each on a host of its own, and its master on the first."""

    def __init__(self, folder: Path, between: Link, *arguments: str) -> None:
        self.folder, self.link = folder, between
        self.arguments = arguments
        self._token = folder / "token"
        self._token.touch(mode=0o600)
        self._token.write_text(TOKEN)
        self._num_nodes = 0

    @contextlib.contextmanager
    def master(self) -> Iterator[None]:
        command = [*self.link.within(0), sys.executable, "-m", "elastic_ext.master", "--bind", self.link.address(0)]
        files = ["--state-dir", str(self.folder / "master"), "--token-file", str(self._token)]
        files += ["--port-file", str(self.folder / "master-port"), "--port", str(MASTER_PORT)]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        process = subprocess.Popen([*command, *files], env=environ, stderr=subprocess.DEVNULL)
        try:
            until((self.folder / "master-port").exists, what="a master")
            yield
        finally:
            process.kill()
            process.wait()

    def node(self, host: int) -> Node:
        self._num_nodes += 1
        launch = [
            "--nnodes=1:2",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.link.address(0)}:{RENDEZVOUS_PORT}",
            "--rdzv-id=job",
            "--rdzv-conf=last_call_timeout=5,join_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=4,"
            f"is_host={int(host == 0)}",
            "--max-restarts=3",
            f"--local-addr={self.link.address(host)}",
            f"--master={self.link.address(0)}:{MASTER_PORT}",
            f"--token-file={self._token}",
            "--job=job",
        ]
        return Node(
            self.folder / f"node-{self._num_nodes}",
            [*launch, *JOB, str(self.folder), *self.arguments],
            environ={"GLOO_SOCKET_IFNAME": self.link.interface(host)},
            within=self.link.within(host),
        )

    def wait_for_steps(self, number: int) -> None:
        first = last_step(self.folder)
        until(lambda: last_step(self.folder) >= first + number or None, what=f"{number} steps more")

    def check_samples(self, num_steps: int) -> None:
        """Every step was taken, and every epoch has each sample once."""
        steps = samples_of_steps(self.folder)
        assert sorted(steps) == list(range(1, num_steps + 1))
        taken = [sample for step in sorted(steps) for sample in steps[step]]
        for start in range(0, len(taken) - NUM_SAMPLES + 1, NUM_SAMPLES):
            assert sorted(taken[start : start + NUM_SAMPLES]) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("seed", range(10))
def test_a_node_that_is_cut_off_and_comes_back_trains_on_with_the_other(tmp_path: Path, seed: int) -> None:
    """Away for longer than the rendezvous waits, it is lost and joins again; else nobody is told of anything."""
    dice = random.Random(seed)
    with link() as between:
        job = LinkedJob(tmp_path, between, f"--steps={NUM_UNTIL_BACK}", "--pace=0.05", "--every=5")
        with job.master(), nodes(job.node(0), job.node(1)) as (first, second):
            job.wait_for_steps(dice.randrange(1, NUM_STEPS // 2))
            between.cut()
            before, seconds = last_step(tmp_path), dice.choice([1.0, 3.0, 8.0, 15.0])
            threading.Event().wait(seconds)  # what is tried, and nothing to wait for
            if seconds < SILENT_SECONDS:
                assert last_step(tmp_path) <= before + 1, "one without the other"
            between.mend()
            assert (first.end(), second.end()) == (0, 0), f"{first.text}\n\n{second.text}"
        kinds = first.kinds()
    job.check_samples(NUM_UNTIL_BACK)
    is_told = "left or was lost" in first.text
    assert is_told or "worker-failed" not in kinds
    if seconds < SILENT_SECONDS / 2:  # what was sent meanwhile comes up to as long after that again
        assert [event["generation"] for event in first.events() if event["kind"] == "membership"] == [0]
    elif seconds > SILENT_SECONDS:
        assert is_told, first.text


@pytest.mark.parametrize("moment", ["a save", "a change of plan", "a join"])
def test_a_slow_link_holds_nothing_up_for_good(tmp_path: Path, moment: str) -> None:
    arguments = ["--sharded"] if moment == "a change of plan" else []
    with link() as between:
        job = LinkedJob(tmp_path, between, f"--steps={NUM_STEPS}", "--every=1", "--pace=0.02", *arguments)
        with job.master(), contextlib.ExitStack() as stack:
            (first,) = stack.enter_context(nodes(job.node(0)))
            second = None
            if moment != "a join":
                (second,) = stack.enter_context(nodes(job.node(1)))
            job.wait_for_steps(3)
            between.set_rate("1mbit")
            if moment == "a join":
                (second,) = stack.enter_context(nodes(job.node(1)))
                second.wait_for("workers started")
            elif moment == "a change of plan":
                set_config(first, "parallelism.strategy=no_shard")
                told = first.run_dir / "events-0.jsonl"
                until(lambda: "no_shard" in told.read_text() or None, what="the plan")
            assert second is not None
            assert (first.end(), second.end()) == (0, 0), f"{first.text}\n\n{second.text}"
    job.check_samples(NUM_STEPS)
    newest = max(tmp_path.rglob("COMMIT"), key=lambda path: path.stat().st_mtime_ns)
    verify = [sys.executable, "-m", "elastic_ext.cli", "ckpt", "verify", str(newest.parent)]
    assert subprocess.run(verify, check=False, capture_output=True).returncode == 0
