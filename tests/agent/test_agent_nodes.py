"""Several nodes of one job: they join, leave, fail and are lost, and training goes on with those that there are."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.launcher.api import LaunchConfig

from elastic_ext.agent.rendezvous import handler_for
from elastic_ext.members.plan import MembershipPlan
from elastic_ext.ranks.processes import is_alive
from elastic_ext.records.agent import MEMBERSHIP_FILE
from tests.support.elastic_job import NUM_SAMPLES
from tests.support.nodes import FORKING_RUN, Node, last_step, nodes, samples_of_steps, set_config, until
from tests.support.ports import free_port
from tests.support.thinning import the_first

JOB = ("-m", "tests.support.elastic_job")
FOR_EVER = ("--steps=1000000", "--pace=0.1", "--every=1000000")


class Cluster:
    """Where nodes of one job meet, and how they are started.

    A node is lost that is silent for ``silence`` seconds: on a machine under load others are for a while. A round
    begins some seconds after the first node has come to it: one that comes later ends it again, and where that takes
    less than the nodes of a loaded machine are apart, they might never all be in one. Members change by a restart, by
    which the processes of a round begin together; how they change live is seen in test_agent_members.py.
    """

    def __init__(
        self, folder: Path, *, nnodes: str = "1:3", max_restarts: int = 0, conf: str = "", silence: int = 30
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self.launch = [
            f"--nnodes={nnodes}",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self.port}",
            "--rdzv-id=job",
            "--rdzv-conf=last_call_timeout=5,join_timeout=240,keep_alive_interval=1,"
            f"keep_alive_max_attempt={silence}{conf}",
            f"--max-restarts={max_restarts}",
            "--members=restart",
            "--local-addr=127.0.0.1",
        ]

    def node(self, number: int, arguments: Sequence[str] = FOR_EVER, *, num_workers: int = 1) -> Node:
        launch = [*self.launch, f"--nproc-per-node={num_workers}"]
        job = [*launch, *JOB, str(self.folder), *arguments]
        return Node(self.folder / f"node-{number}", job, launcher=FORKING_RUN)

    def wait_for_steps(self, number: int) -> int:
        """Until so many more steps were taken; the last of them."""
        first = last_step(self.folder)
        until(lambda: last_step(self.folder) >= first + number or None, what=f"{number} steps more")
        return last_step(self.folder)

    def begun(self) -> list[int]:
        """After which step the processes of each round went on, in the order in which they came."""
        words = [file.read_text().split()[:4] for file in self.folder.glob("samples-0-*.txt")]
        return [int(step) for _, step, _, _ in sorted(words, key=lambda each: int(each[3]))]  # pids may begin anew

    def check_samples(self) -> None:
        """Every step has the samples of one, and every epoch has each once."""
        steps = samples_of_steps(self.folder)
        assert sorted(steps) == list(range(1, len(steps) + 1))
        taken = [sample for step in sorted(steps) for sample in steps[step]]
        for start in range(0, len(taken) - NUM_SAMPLES + 1, NUM_SAMPLES):
            assert sorted(taken[start : start + NUM_SAMPLES]) == list(range(NUM_SAMPLES))


def plan_of(node: Node) -> MembershipPlan:
    return MembershipPlan.from_json((node.run_dir / MEMBERSHIP_FILE).read_text())


def version_in(node: Node) -> int:
    file = Path(node.record().config_file)
    return int(json.loads(file.read_text())["version"]) if file.exists() else 0


def train_together(world_size: int, *made: Node) -> None:
    """Until all of these nodes train in one round; one that comes to it late, on a busy machine, makes one more."""

    def are_together() -> bool:
        plans = [plan_of(node) for node in made]
        return len({plan.version for plan in plans}) == 1 and plans[0].world_size == world_size

    until(are_together, what=f"{world_size} workers train together")


def reasons_of(node: Node) -> list[str]:
    """Why each round that this node took part in was another one than that before it."""
    return [event["text"] for event in node.events() if event["kind"] == "membership"]


def lose(node: Node) -> None:
    """As where a machine loses its power."""
    workers = node.workers()
    node.send(signal.SIGSTOP)  # so that it does not see its workers end
    for worker in workers.values():
        os.kill(worker.pid, signal.SIGKILL)
    node.process.kill()


@pytest.mark.parametrize("num_workers", the_first([1, 2]))
def test_a_node_joins_and_one_leaves_while_training_goes_on_and_no_step_is_lost(
    tmp_path: Path, num_workers: int
) -> None:
    cluster = Cluster(tmp_path)
    with nodes(cluster.node(0), cluster.node(1, num_workers=num_workers)) as (first, second):
        until(
            lambda: "membership" in first.kinds() and plan_of(first).world_size == 1 + num_workers,
            what="both are there",
        )
        num_changes = first.kinds().count("membership-changing")
        cluster.wait_for_steps(3)
        third = cluster.node(2)
        with nodes(third):
            first.wait_for("training goes on meanwhile", times=num_changes + 1)
            before = last_step(tmp_path)
            third.wait_for("workers started")
            assert last_step(tmp_path) > before  # the round of before had trained on
            train_together(2 + num_workers, first, second, third)
            assert sum("rendezvous" in node.kinds() for node in (first, second, third)) == 1, "one of them hosts it"
            at_join, version = cluster.wait_for_steps(3), plan_of(first).version
            second.send(signal.SIGTERM)
            assert second.end() == 143
            train_together(2, first, third)
            cluster.wait_for_steps(3)
            assert plan_of(first).version > version
            assert any(second.record().node_id in reason for node in (first, third) for reason in reasons_of(node))
            begun = cluster.begun()
            assert begun == sorted(begun) and len(begun) >= 3 and begun[-1] > at_join, begun
            first.send(signal.SIGTERM)
            third.send(signal.SIGTERM)
            assert {first.end(), third.end()} == {143}
    steps = samples_of_steps(tmp_path)
    assert len(steps) == max(steps)
    cluster.check_samples()
    assert "worker-failed" not in [*first.kinds(), *second.kinds(), *third.kinds()]


def test_a_failure_is_counted_once_on_all_nodes_and_the_last_ends_all_of_them(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, nnodes="2", max_restarts=1)
    with nodes(cluster.node(0), cluster.node(1)) as (first, second):
        cluster.wait_for_steps(2)
        os.kill(next(iter(second.workers().values())).pid, signal.SIGKILL)
        first.wait_for("workers started", times=2)
        second.wait_for("workers started", times=2)
        cluster.wait_for_steps(2)
        killed = next(iter(second.workers().items()))
        os.kill(killed[1].pid, signal.SIGKILL)
        assert (first.end(), second.end()) == (1, 1)
    for node in (first, second):
        assert re.search(rf"rank {killed[0]} \(local rank 0, pid {killed[1].pid}\) on \S+ ended by SIGKILL", node.text)
        assert [event["generation"] for event in node.events() if event["kind"] == "membership"] == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [True, False])
def test_a_node_that_is_lost_is_no_failure_that_counts(tmp_path: Path, is_first: bool) -> None:
    cluster = Cluster(tmp_path, conf=",is_host=0", silence=4)
    store = TCPStore("127.0.0.1", cluster.port, is_master=True, wait_for_workers=False)  # on none of the nodes
    with nodes(cluster.node(0), cluster.node(1), cluster.node(2)) as made:
        cluster.wait_for_steps(2)
        ranks = [next(iter(node.workers())) for node in made]
        lost = made[ranks.index(0 if is_first else 2)]
        others = [node for node in made if node is not lost]
        lose(lost)
        for node in others:
            node.wait_for("workers started", times=2)
        cluster.wait_for_steps(3)
        assert plan_of(others[0]).world_size == 2 and lost.record().node_id in plan_of(others[0]).reason
        for node in others:
            node.send(signal.SIGTERM)
        assert {node.end() for node in others} == {143}
    cluster.check_samples()
    del store


@pytest.mark.slow
def test_nodes_hand_the_config_to_one_another_and_who_joins_follows_the_jobs(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    left = tmp_path / "node-2" / "config.json"
    left.parent.mkdir()
    left.write_text('{"version": 20, "optimizer": {"learning_rate": 9.0}}')
    with nodes(cluster.node(0), cluster.node(1)) as (first, second):
        cluster.wait_for_steps(2)
        set_config(second, "optimizer.learning_rate=0.5")
        until(lambda: version_in(first) == 1 or None, what="version 1 on the first node")
        with nodes(cluster.node(2)) as (third,):
            third.wait_for("workers started")
            until(lambda: version_in(third) == 1 or None, what="version 1 on the node that joins")
            assert "config-aside" in third.kinds() and list(left.parent.glob("config-of-before.json"))
            cluster.wait_for_steps(3)
            set_config(third, "optimizer.learning_rate=0.25")
            until(lambda: version_in(first) == version_in(second) == 2 or None, what="version 2 on all")
            for node in (first, second, third):
                node.send(signal.SIGTERM)
            assert {node.end() for node in (first, second, third)} == {143}
    applied = [
        json.loads(line)["details"]["version"]
        for node in (first, second, third)
        for file in node.run_dir.glob("events-[0-9].jsonl")
        for line in file.read_text().splitlines()
        if '"config-applied"' in line
    ]
    assert set(applied) <= {0, 1, 2}


@pytest.mark.slow
def test_a_node_that_is_lost_while_nodes_meet_is_done_without(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, conf=",is_host=0", silence=4)
    store = TCPStore("127.0.0.1", cluster.port, is_master=True, wait_for_workers=False)
    with nodes(cluster.node(0), cluster.node(1)) as (first, second):
        cluster.wait_for_steps(2)
        with nodes(cluster.node(2)) as (third,):
            first.wait_for("training goes on meanwhile")
            third.process.kill()
            until(lambda: plan_of(first).version > 1 or None)
            cluster.wait_for_steps(3)
            until(lambda: plan_of(first).world_size == 2 or None)
            cluster.wait_for_steps(3)
            for node in (first, second):
                node.send(signal.SIGTERM)
            assert {node.end() for node in (first, second)} == {143}
    cluster.check_samples()
    del store


@pytest.mark.slow
def test_a_hang_is_found_by_the_agents_of_all_nodes_together(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, nnodes="2", max_restarts=1)
    cluster.launch.append("--hang-seconds=2")
    job = ("--steps=12", "--every=4", "--hang-at=7")
    with nodes(cluster.node(0, job), cluster.node(1, job)) as made:
        assert [node.end() for node in made] == [0, 0], made[0].text
    for node in made:
        (hang,) = [event for event in node.events() if event["kind"] == "hang"]
        assert hang["details"]["ranks"] == [1] and "rank 0 waits for it" in hang["text"]
        (stacks,) = [event for event in node.events() if event["kind"] == "stacks"]
        assert Path(stacks["details"]["path"]).stat().st_size > 1000
        assert node.kinds().count("workers-started") == 2
    assert any("in hang" in Path(node.run_dir / "stacks").glob("*.txt").__next__().read_text() for node in made)
    cluster.check_samples()


@pytest.mark.slow
def test_where_the_rendezvous_is_lost_the_others_end_and_say_why(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, nnodes="2", max_restarts=3, silence=4)
    with nodes(cluster.node(0)) as (first,):
        until(lambda: _listens(cluster.port) or None)
        with nodes(cluster.node(1)) as (second,):
            cluster.wait_for_steps(2)
            workers = second.workers()
            lose(first)
            assert second.end() == 1
            assert "rendezvous" in second.text and "gone" in second.text
            assert not any(is_alive(worker) for worker in workers.values())


@pytest.mark.slow
def test_a_node_that_is_interrupted_leaves_the_others_to_train_on(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with nodes(cluster.node(0)) as (first,):
        until(lambda: _listens(cluster.port) or None)
        with nodes(cluster.node(1)) as (second,):
            second.wait_for("workers started")
            cluster.wait_for_steps(3)
            second.send(signal.SIGINT)
            assert second.end() == 130
            until(lambda: plan_of(first).world_size == 1 or None)
            cluster.wait_for_steps(3)
            first.send(signal.SIGTERM)
            assert first.end() == 143
    cluster.check_samples()


ENDS = """
import os, sys, time
rank, folder = int(os.environ["RANK"]), sys.argv[1]
is_again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
if rank == 1 and not is_again:
    while not os.path.exists(f"{folder}/fail"):
        if os.path.exists(f"{folder}/end"):
            sys.exit(0)
        time.sleep(0.02)
    raise ValueError("too late")
"""


def ending(cluster: Cluster) -> list[Node]:
    """Two nodes, of which one ends at once, and the other as the test says."""
    script = cluster.folder / "ends.py"
    script.write_text(ENDS)
    arguments = [*cluster.launch, str(script), str(cluster.folder)]
    return [Node(cluster.folder / f"node-{number}", arguments) for number in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("max_restarts", [0, 1])
def test_a_node_that_is_done_hears_of_failures_on_others(tmp_path: Path, max_restarts: int) -> None:
    with nodes(*ending(Cluster(tmp_path, nnodes="2", max_restarts=max_restarts))) as made:
        until(lambda: any("it waits for those of other nodes" in node.text for node in made) or None)
        (tmp_path / "fail").touch()
        status = 1 - max_restarts
        assert [node.end() for node in made] == [status, status], made[0].text + made[1].text
    for node in made:
        assert node.kinds().count("workers-started") == 1 + max_restarts
        assert max_restarts or "ValueError: too late" in node.text  # on both of them


@pytest.mark.slow
def test_a_node_that_is_done_is_not_taken_for_lost_however_long_the_others_work(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, nnodes="2", max_restarts=3)
    with nodes(*ending(cluster)) as made:
        until(lambda: any("it waits for those of other nodes" in node.text for node in made) or None)
        (done,) = [node for node in made if "it waits" in node.text]
        silence = time.monotonic() + 8  # torch's rendezvous has nodes lost after 4
        until(lambda: time.monotonic() > silence or None)
        assert done.process.poll() is None
        (tmp_path / "end").touch()
        assert [node.end() for node in made] == [0, 0], made[0].text + made[1].text
    assert [node.kinds().count("workers-started") for node in made] == [1, 1]


@pytest.mark.slow
def test_the_first_node_leaves_with_the_rendezvous_and_the_others_train_on(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, nnodes="1:2")
    with nodes(cluster.node(0)) as (first,):
        until(lambda: _listens(cluster.port) or None)
        with nodes(cluster.node(1)) as (second,):
            second.wait_for("workers started")
            cluster.wait_for_steps(3)
            first.send(signal.SIGTERM)
            assert first.end() == 143
            second.wait_for("the rendezvous does not answer any more")
            cluster.wait_for_steps(3)
            num_lines = len(second.lines)
            cluster.wait_for_steps(100)
            second.send(signal.SIGTERM)
            assert second.end() == 143
    assert len(second.lines) - num_lines < 20, second.text  # torch prints a stack each time it finds it gone
    cluster.check_samples()


@pytest.mark.slow
def test_workers_of_which_one_is_stopped_go_on_once_it_is_continued(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, nnodes="2")
    with nodes(cluster.node(0), cluster.node(1)) as (first, second):
        cluster.wait_for_steps(2)
        (worker,) = second.workers().values()
        os.kill(worker.pid, signal.SIGSTOP)
        until(lambda: _state_of(worker.pid) == "T" or None)
        os.kill(worker.pid, signal.SIGCONT)
        cluster.wait_for_steps(2)
        first.send(signal.SIGTERM)
        second.send(signal.SIGTERM)
        assert {first.end(), second.end()} == {143}
    cluster.check_samples()


@pytest.mark.slow
def test_nodes_of_a_static_rendezvous_restart_together(tmp_path: Path) -> None:
    port = free_port()
    launch = [
        "--nnodes=2",
        "--nproc-per-node=1",
        "--master-addr=127.0.0.1",
        f"--master-port={port}",
        "--max-restarts=1",
    ]
    made = [
        Node(tmp_path / f"node-{rank}", [*launch, f"--node-rank={rank}", *JOB, str(tmp_path), *FOR_EVER])
        for rank in (0, 1)
    ]
    with nodes(*made) as (first, second):
        until(lambda: last_step(tmp_path) > 2 or None)
        os.kill(second.workers()[1].pid, signal.SIGKILL)
        first.wait_for("workers started", times=2)
        step = last_step(tmp_path)
        until(lambda: last_step(tmp_path) > step + 2 or None)
        assert second.workers()[1]


def test_an_agent_is_refused_the_run_directory_of_another(tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    script.write_text("import signal; signal.pause()")
    with nodes(Node(tmp_path / "node", [str(script)])) as (first,):
        first.wait_for("workers started")
        with nodes(Node(tmp_path / "node", [str(script)])) as (second,):
            assert second.end() == 2
            assert "is held by another agent" in second.text and "ELASTIC_EXT_RUN_DIR" in second.text
        assert first.process.poll() is None


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        arguments = [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{other.getsockname()[1]}",
            "--rdzv-id=j",
            __file__,
        ]
        with nodes(Node(tmp_path / "node", ["--rdzv-conf=read_timeout=1", *arguments])) as (node,):
            assert node.end() == 1
            assert str(other.getsockname()[1]) in node.text and "could not meet" in node.text
            assert "Something listens there that is no rendezvous" in node.text


def test_an_endpoint_at_which_nothing_listens_is_said_to_be_one() -> None:
    launch = meeting_at("127.0.513", free_port(), local_addr=None)
    with pytest.raises(
        RendezvousConnectionError, match=r"Nothing listens there.*refused.*--local-addr=127\.0\.513"
    ) as why:
        handler_for(launch)
    assert "Something listens" not in str(why.value)


@pytest.mark.parametrize("address", ["127.0.2.1", "127.0.513"])
def test_the_node_whose_address_is_the_endpoint_has_the_rendezvous_by_whatever_name(address: str) -> None:
    launch = meeting_at("127.0.513", free_port(), local_addr=address)  # 127.0.2.1, as torch does not find out
    meeting = handler_for(launch)
    another = handler_for(launch)  # of the same machine: this one comes as a guest
    assert meeting.get_run_id() == another.get_run_id() == "job"
    assert meeting.shutdown() and another.shutdown()


def meeting_at(host: str, port: int, *, local_addr: str | None) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=2,
        nproc_per_node=1,
        run_id="job",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{host}:{port}",
        rdzv_configs={"read_timeout": 1},
        local_addr=local_addr,
    )


def _listens(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
