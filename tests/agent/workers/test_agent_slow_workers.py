"""Workers that keep the others waiting are named by what each is busy with by itself, once."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_ext.agent.workers.stragglers import NodeRound, SlowNews, SlowWorkers, StragglerRounds
from elastic_ext.profile.phases import Phase
from elastic_ext.profile.stragglers import RankBusyTime
from elastic_ext.ranks.board import Board
from elastic_ext.records.run_dir import RunDirectory
from tests.support.nodes import Node, nodes, until
from tests.support.ports import free_port
from tests.support.profiles import made_window
from tests.support.stores import PlainStore

STEP = {Phase.FORWARD: 0.004, Phase.BACKWARD: 0.005, Phase.OPTIMIZER: 0.001}
SLOW = {**STEP, Phase.FORWARD: 0.02}


class Agents:
    """One for each of these nodes, with the ranks on it, and a clock."""

    def __init__(self, folder: Path, *ranks: Sequence[int]) -> None:
        self.now = 0.0
        self.ranks = ranks
        self.world_size = sum(map(len, ranks))
        store = PlainStore()
        self._boards = [Board(store, "round", place=place, num_peers=len(ranks)) for place in range(len(ranks))]
        self._folders = [folder / str(number) for number in range(len(ranks))]
        for each in self._folders:
            each.mkdir()
        self._each = [
            SlowWorkers(each, host=f"node{number}", clock=lambda: self.now) for number, each in enumerate(self._folders)
        ]

    def round(self, *slow: int, silent: Sequence[int] = (), seconds: float = 10.0) -> list[list[SlowNews]]:
        """Ranks take steps for a while, of which some are slow, and agents look."""
        self.now += seconds
        for folder, ranks in zip(self._folders, self.ranks, strict=True):
            for rank in set(ranks) - set(silent):
                window = made_window(SLOW if rank in slow else STEP, rank=rank, world_size=self.world_size)
                RunDirectory(folder, seat=rank).add_window(replace(window, begin=self.now - 1, end=self.now))
        together = [place for place, ranks in enumerate(self.ranks) if ranks]
        return [
            each.look(ranks, board, together)
            for each, ranks, board in zip(self._each, self.ranks, self._boards, strict=True)
        ]


def told(news: list[list[SlowNews]]) -> list[list[tuple[int, bool]]]:
    return [[(each.rank, each.is_slow) for each in row] for row in news]


def test_a_slow_worker_is_told_of_once_after_three_rounds_and_again_when_it_is_slow_no_more(tmp_path: Path) -> None:
    agents = Agents(tmp_path, [0, 1, 2])
    found = [agents.round(1) for _ in range(6)]
    assert [told(each) for each in found] == [[[]], [[]], [[(1, True)]], [[]], [[]], [[]]]
    assert found[2][0][0].text.startswith("slow worker: rank 1 on node0 takes 2.60 times as long as is usual")
    assert [told(agents.round()) for _ in range(7)] == [[[]]] * 5 + [[[(1, False)]], [[]]]
    assert [told(agents.round(2)) for _ in range(3)] == [[[]], [[]], [[(2, True)]]]


def test_a_worker_that_is_slow_now_and_then_is_not_told_of_each_time(tmp_path: Path) -> None:
    agents = Agents(tmp_path, [0, 1])
    for _ in range(3):
        last = agents.round(1)
    assert told(last) == [[(1, True)]]
    for _ in range(5):
        assert [told(agents.round(*slow)) for slow in ([], [1], [1], [1])] == [[[]]] * 4


def test_a_round_waits_for_all_workers_of_the_node(tmp_path: Path) -> None:
    agents = Agents(tmp_path, [0, 1])
    for _ in range(8):
        assert told(agents.round(1, silent=[0])) == [[]]
    assert [told(agents.round(1)) for _ in range(3)] == [[[]], [[]], [[(1, True)]]]


def test_between_two_rounds_nothing_is_read(tmp_path: Path) -> None:
    agents = Agents(tmp_path, [0, 1])
    assert [told(agents.round(1, seconds=4.0)) for _ in range(8)] == [[[]]] * 8  # every third is a round
    assert told(agents.round(1, seconds=4.0)) == [[(1, True)]]


def test_a_node_without_workers_is_not_waited_for_and_does_not_judge(tmp_path: Path) -> None:
    agents = Agents(tmp_path, (), (0, 1), (), (2, 3))
    found = [agents.round(1) for _ in range(4)]
    assert [rank for row in found for news in told(row)[1::2] for rank in news] == [(1, True), (1, True)]


def test_of_several_nodes_each_says_who_is_slow_and_where(tmp_path: Path) -> None:
    agents = Agents(tmp_path, [0], [1], [2])
    found = [told(agents.round(2)) for _ in range(5)]
    assert found[:3] == [[[], [], []]] * 3  # the first node hears of a round when it looks the next time
    assert found[3] == [[(2, True)]] * 3 and found[4] == [[], [], []]
    assert told(agents.round(2, silent=[1])) == [[], [], []]


def test_rounds_of_unlike_configs_or_told_of_before_are_not_compared() -> None:
    def of(place: int, until: float, version: int = 1) -> NodeRound:
        time = RankBusyTime(rank=place, host="n", seconds=0.01 * (1 + 2 * place), step_seconds=0.03)
        return NodeRound.from_row(
            json.loads(json.dumps(NodeRound(until=until, config=(version, 0), times=(time,)).to_row()))
        )

    rounds = StragglerRounds()
    for number in range(1, 10):
        rounds.see({0: of(0, number), 1: of(1, 5.0)})  # the second one says nothing new but once
        rounds.see({0: of(0, number), 1: of(1, number + 0.5, version=2)})
    rounds.see({0: of(0, 12.0), 1: of(1, 12.0)})
    assert not rounds.slow
    rounds.see({0: of(0, 13.0), 1: of(1, 13.0)})
    assert [each.rank for each in rounds.slow] == [1]


@pytest.mark.parametrize("row", [None, 3, [1], [1, 2, 3, 4], ["x", 1, 1, []], [1, 1, 1, [{"rank": 1}]], [1, 1, 1, [2]]])
def test_what_is_no_round_is_refused(row: Any) -> None:
    with pytest.raises(ValueError, match=r"no round|could not|missing|not enough|no object|unpack"):
        NodeRound.from_row(row)


@pytest.mark.slow
def test_under_elastic_run_the_journal_names_the_worker_that_sleeps_in_its_forward_pass(tmp_path: Path) -> None:
    with nodes(Node(tmp_path / "node", ["--standalone", "--nproc-per-node=3", "-m", "tests.support.slow_job"])) as (
        node,
    ):
        until(lambda: "slow-worker" in node.kinds() or None, what=node.text)
        (slow,) = [each for each in node.events() if each["kind"] == "slow-worker"]
        assert slow["details"]["rank"] == 1
        assert "slow worker: rank 1 on " in slow["text"] and "times as long as is usual" in slow["text"]
        with contextlib.suppress(ProcessLookupError):
            node.send(signal.SIGTERM)
        node.end()
    assert "slow worker: rank 1 on" in node.text


@pytest.mark.slow
def test_of_two_nodes_both_journals_name_the_worker_and_where_it_is(tmp_path: Path) -> None:
    endpoint = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=job"]
    launch = ["--nnodes=2", "--nproc-per-node=1", *endpoint, "-m", "tests.support.slow_job"]
    one, other = (Node(tmp_path / name, launch) for name in ("one", "other"))
    with nodes(one, other):
        for node in (one, other):
            slow = until(lambda node=node: slow_of(node) or None, what=node.text)  # type: ignore[misc]
            assert [each["details"]["rank"] for each in slow] == [1]
        for node in (one, other):
            with contextlib.suppress(ProcessLookupError):
                node.send(signal.SIGTERM)
        for node in (one, other):
            node.end()


def slow_of(node: Node) -> list[dict[str, Any]]:
    return [each for each in node.events() if each["kind"] == "slow-worker"]
