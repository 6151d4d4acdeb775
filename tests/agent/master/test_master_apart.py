"""Agents' links with a real master that is killed, stopped, cut off or beset: nothing is lost, and nobody is taken for
another."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic_ext.agent.journal import Journal
from elastic_ext.agent.master.embedded import OwnMaster
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.history import ConfigEdit
from elastic_ext.master.address import Address, MasterPlace
from elastic_ext.master.client import MasterClient
from elastic_ext.master.wire import master_pb2 as pb
from elastic_ext.ranks.deadlines import Backoff
from elastic_ext.ranks.processes import process_of
from tests.support.linked import LinkedNode, config, in_file, linked
from tests.support.masters import MasterProcess, master_in_process
from tests.support.nodes import until
from tests.support.proxies import Proxy

LEASE_SECONDS = 1.0


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MasterProcess]:
    folder = tmp_path / "of-master"
    folder.mkdir()
    times = ("--beat-seconds", "0.2", "--lease-seconds", str(LEASE_SECONDS), "--acknowledge-seconds", "1")
    yield from master_in_process(folder, *times)


def place_of(master: MasterProcess, port: int = 0) -> MasterPlace:
    return MasterPlace(address=Address(host="127.0.0.1", port=port or master.port), token_file=master.token_file)


def states(client: MasterClient) -> dict[str, str]:
    return {each.node.node_id: each.state for each in client.status(without_workers=True).nodes}


def set_x(client: MasterClient, value: int) -> int:
    return client.set_config(pb.SetConfigRequest(changes={"user.x": str(value)})).version


def joined(node: LinkedNode) -> LinkedNode:
    until(lambda: node.told() or None, what="joining")
    return node


def _has_told(node: LinkedNode, kind: str) -> Callable[[], bool | None]:
    return lambda: kind in node.told() or None


def _has_in_file(node: LinkedNode, version: int) -> Callable[[], bool | None]:
    return lambda: in_file(node) == version or None


def test_a_master_that_is_killed_and_started_again_goes_on_with_the_job(master: MasterProcess, tmp_path: Path) -> None:
    with linked(tmp_path / "node", place_of(master)) as node, MasterClient(place_of(master)) as client:
        joined(node)
        assert set_x(client, 1) == 1
        until(lambda: in_file(node) == 1 or None)
        before = client.status()
        master.kill()
        until(lambda: "master-lost" in node.told() or None)
        node.tuner.set(ConfigEdit({"user.x": 2}, reason="while it was away"))
        node.journal.tell("odd", "happened while it was away")
        master.start()
        until(lambda: "master-back" in node.told() or None)
        with MasterClient(place_of(master)) as again:
            until(lambda: again.status().config.version == 2 or None)
            after = again.status(num_events=1000)
            assert (after.job_id, after.epoch) == (before.job_id, before.epoch + 1)
            until(lambda: "odd" in [each.kind for each in again.events()] or None)
            assert set_x(again, 3) == 3
        until(lambda: in_file(node) == 3 or None)
        until(lambda: node.told() == ["master-joined", "master-lost", "master-back"] or None)


def test_a_master_that_is_stopped_longer_than_the_lease_is_lost_and_takes_nobody_for_lost_by_that(
    master: MasterProcess, tmp_path: Path
) -> None:
    with linked(tmp_path / "node", place_of(master)) as node, MasterClient(place_of(master)) as client:
        joined(node)
        assert master.process is not None
        master.process.send_signal(signal.SIGSTOP)
        try:
            until(lambda: "master-lost" in node.told() or None)
        finally:
            master.process.send_signal(signal.SIGCONT)
        until(lambda: "master-back" in node.told() or None)
        until(lambda: states(client) == {"node": "live"} or None)
        set_x(client, 1)
        until(lambda: in_file(node) == 1 or None)


@pytest.mark.parametrize("is_long", [False, True], ids=["shorter", "longer"])
def test_a_node_that_is_cut_off_for_longer_or_shorter_than_its_lease_comes_back_and_has_the_newest_config(
    master: MasterProcess, tmp_path: Path, is_long: bool
) -> None:
    with (
        Proxy(master.port) as proxy,
        linked(tmp_path / "node", place_of(master, proxy.port)) as node,
        MasterClient(place_of(master)) as client,
    ):
        joined(node)
        proxy.cut()
        if is_long:
            until(lambda: states(client) == {"node": "lost"} or None)
            until(lambda: "master-lost" in node.told() or None)
        assert set_x(client, 1) == 1
        assert in_file(node) == 0
        proxy.mend()
        until(lambda: in_file(node) == 1 or None)
        until(lambda: states(client) == {"node": "live"} or None)
        kinds = [each.kind for each in client.events()]
        assert ("node-lost" in kinds) == is_long
        if is_long:
            until(lambda: node.told() == ["master-joined", "master-lost", "master-back"] or None)


def test_of_two_agents_with_one_name_the_higher_incarnation_is_the_node_and_the_other_says_no_more(
    master: MasterProcess, tmp_path: Path
) -> None:
    with (
        linked(tmp_path / "a", place_of(master), incarnation=1) as first,
        MasterClient(place_of(master)) as client,
    ):
        joined(first)
        with linked(tmp_path / "b", place_of(master), incarnation=2) as second:
            until(lambda: "master-fenced" in first.told() or None)
            with linked(tmp_path / "c", place_of(master), incarnation=1) as late:
                until(lambda: "master-fenced" in late.told() or None)
            set_x(client, 1)
            until(lambda: in_file(second) == 1 or None)
            assert in_file(first) == 0 and second.told() == ["master-joined"]
        first.link.close("it ends")
        (node,) = client.status().nodes
        assert (node.node.incarnation, node.state) == (2, "left")


def test_a_herd_of_agents_comes_back_to_a_master_that_was_restarted(master: MasterProcess, tmp_path: Path) -> None:
    with ExitStack() as stack:
        nodes = []
        for number in range(24):
            node = LinkedNode(tmp_path / str(number), place_of(master), node_id=f"node-{number}")
            node.link.start()
            node.link.begin_configs()
            stack.callback(node.link.close, "the test is over")
            nodes.append(node)
        for node in nodes:
            joined(node)
        master.kill()
        for node in nodes:
            until(_has_told(node, "master-lost"))
        master.start()
        with MasterClient(place_of(master)) as client:
            set_x(client, 7)
            for node in nodes:
                until(_has_in_file(node, 1))
            assert set(states(client).values()) == {"live"}


def test_a_nodes_own_change_is_the_masters_and_comes_to_the_other_nodes(master: MasterProcess, tmp_path: Path) -> None:
    with MasterClient(place_of(master)) as client, ExitStack() as stack:
        first, second = (LinkedNode(tmp_path / name, place_of(master), node_id=name) for name in ("first", "second"))
        for node in (first, second):
            node.tuner.look()
            node.link.start()
            node.link.begin_configs()
            stack.callback(node.link.close, "the test is over")
            joined(node)
        first.tuner.set(ConfigEdit({"user.x": 5}, reason="by hand"))
        until(lambda: in_file(second) == 1 or None)
        (entry,) = client.configs()
        assert (entry.author, entry.node_id) == ("node", "first")
        assert ElasticConfig.parse((second.run_dir / "config.json").read_bytes()).get("user.x") == 5


def test_one_version_with_two_contents_is_a_trouble_on_both_sides_until_the_next_version(
    master: MasterProcess, tmp_path: Path
) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "config.json").write_text(config(1, x=1))
    with MasterClient(place_of(master)) as client:
        set_x(client, 2)
        with linked(tmp_path / "node", place_of(master)) as node:
            joined(node)
            until(lambda: "config-conflict" in [each.kind for each in client.events()] or None)
            assert ElasticConfig.parse((node.run_dir / "config.json").read_bytes()).get("user.x") == 1
            set_x(client, 3)
            until(lambda: in_file(node) == 2 or None)


# ---- one that the agent starts ----


def own_master(run_dir: Path) -> tuple[OwnMaster, Journal]:
    run_dir.mkdir(exist_ok=True)
    journal = Journal(run_dir)
    return OwnMaster(
        run_dir, "-- job", journal, Backoff(random.Random(1), first_seconds=0.1, most_seconds=0.2)
    ), journal


def kinds_of(run_dir: Path) -> str:
    file = run_dir / "events-agent.jsonl"
    return file.read_text() if file.exists() else ""


def test_an_own_master_that_is_killed_is_started_again_with_what_it_knew_and_ends_when_it_is_closed(
    tmp_path: Path,
) -> None:
    own, _ = own_master(tmp_path)
    try:
        found = until(own.find)
        with MasterClient(found.place) as client:
            set_x(client, 1)
            job_id = client.status().job_id
        os.kill(found.pid, signal.SIGKILL)
        again = until(lambda: each if (each := own.find()) is not None and each.pid != found.pid else None)
        with MasterClient(again.place) as client:
            assert (client.status().job_id, client.status().config.version) == (job_id, 1)
        process = process_of(again.pid)
        assert process is not None
        arguments = Path(f"/proc/{again.pid}/cmdline").read_bytes()
        assert (tmp_path / "master.token").read_bytes().strip() not in arguments + (
            tmp_path / "master.log"
        ).read_bytes()
    finally:
        own.close()
    assert process_of(again.pid) is None and not (tmp_path / "master.port").exists()
    assert "was ended by signal 9" in kinds_of(tmp_path)
    assert own.find() is None


def test_an_own_master_that_cannot_be_is_given_up_with_its_own_words(tmp_path: Path) -> None:
    own, _ = own_master(tmp_path)
    (tmp_path / "master").write_text("in the place of a folder")
    try:
        until(lambda: own.find() is None and "master-given-up" in kinds_of(tmp_path))
    finally:
        own.close()
    assert "ended with status 2" in kinds_of(tmp_path) and "training goes on without a master" in kinds_of(tmp_path)
