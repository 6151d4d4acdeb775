"""Changes of members drawn at random, by real agents and a real training: the state stays what it is across each."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.member_nodes import Job, check_samples, plan_of, told
from tests.support.nodes import Node, nodes, until

MOST_NODES = 4
MOST_MORE_BYTES = 16 << 20
HELD = ("descriptors", "sockets", "threads")


@dataclass(frozen=True, kw_only=True)
class Line:
    """What a worker says of its state after a step, or after the change to the plan of a version."""

    pid: int
    version: int
    step: int
    world_size: int
    state: str
    held: tuple[int, ...]


def lines_in(folder: Path) -> Iterator[Line]:
    for file in folder.glob("state-*.txt"):
        for row in file.read_text().splitlines():
            version, step, size, state, *held = row.split()
            yield Line(
                pid=int(file.stem.removeprefix("state-")),
                version=int(version),
                step=int(step),
                world_size=int(size),
                state=state,
                held=tuple(map(int, held)),
            )


def last_step(folder: Path) -> int:
    return max((line.step for line in lines_in(folder)), default=0)


def taken_of(pid: int) -> dict[str, int]:
    """What a process takes: descriptors and threads, and the bytes that are in memory of its own."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {
        "descriptors": len([*Path(f"/proc/{pid}/fd").iterdir()]),
        "threads": int(status["Threads"]),
        "bytes": int(status["RssAnon"].split()[0]) << 10,
    }


class Game:
    """Nodes that are started and told to leave, one at a time."""

    def __init__(self, job: Job, seed: int, strategy: str) -> None:
        self.job = job
        self.sizes: dict[int, int] = {}
        self.agents: dict[Path, list[dict[str, int]]] = {}
        self.workers: dict[int, list[dict[str, int]]] = {}
        self._draw = random.Random(seed)
        self._script: Sequence[str] = [
            *("-m", "tests.support.elastic_job", "--steps=1000000", "--every=1000000", "--pace=0.02"),
            *("--tells-state", "--sharded", f"--strategy={strategy}"),
        ]
        self._nodes: list[Node] = []

    def play(self, num_changes: int) -> None:
        with ExitStack() as stack:
            self._start(stack)
            for _ in range(num_changes):
                self._wait_for_steps()
                num_nodes = len(self._nodes)
                comes = num_nodes == 1 or (num_nodes < MOST_NODES and self._draw.random() < 0.5)
                (self._start if comes else self._leave)(stack)
                self._wait_until_in_force()
            self._wait_for_steps()
            for node in self._nodes:
                assert node.kinds().count("workers-started") == 1, node.text
                assert "worker-failed" not in node.kinds() and "trouble" not in node.kinds(), node.text
            while self._nodes:
                self._leave(stack)

    def _start(self, stack: ExitStack) -> None:
        (node,) = stack.enter_context(nodes(self.job.node(len(self.job.nodes), script=self._script)))
        self._nodes.append(node)

    def _leave(self, stack: ExitStack) -> None:
        node = self._nodes.pop(self._draw.randrange(len(self._nodes)))
        node.send(signal.SIGTERM)
        assert node.end() == 143, node.text

    def _wait_for_steps(self) -> None:
        begun = last_step(self.job.folder)
        self._until(lambda: last_step(self.job.folder) > begun + 2)

    def _until(self, is_so: Callable[[], bool]) -> None:
        def look() -> bool:
            for node in self._nodes:
                assert node.process.poll() is None, node.text
            return is_so()

        until(look)

    def _wait_until_in_force(self) -> None:
        version = len(self.sizes) + 2

        def are_in() -> bool:
            told_of = [told(node, "membership-in-force") for node in self._nodes]
            return all(each and each[-1]["details"]["plan"] == version for each in told_of)

        self._until(are_in)
        self.sizes[version] = plan_of(self._nodes[0]).world_size
        for node in self._nodes:
            self.agents.setdefault(node.run_dir, []).append(taken_of(node.process.pid))
            for worker in node.workers().values():
                self.workers.setdefault(worker.pid, []).append(taken_of(worker.pid))


def check_states(folder: Path, sizes: dict[int, int]) -> None:
    """After each change all ranks have the state that all had before it, and after each step they have the same."""
    lines = [*lines_in(folder)]
    after_steps: dict[int, set[str]] = {}
    for line in lines:
        if not line.version:
            after_steps.setdefault(line.step, set()).add(line.state)
    assert {len(states) for states in after_steps.values()} == {1}
    for version, size in sizes.items():
        changed = [line for line in lines if line.version == version]
        assert len(changed) == size and {line.world_size for line in changed} == {size}
        (step,) = {line.step for line in changed}
        assert {line.state for line in changed} == after_steps[step], f"membership {version}"


def check_held(folder: Path) -> None:
    """Process groups leave nothing behind in a worker: what it has in worlds of a size stays the same."""
    for pid in {line.pid for line in lines_in(folder)}:
        changes = [line for line in lines_in(folder) if line.pid == pid and line.version]
        for size in {line.world_size for line in changes}:
            seen = [line.held for line in changes if line.world_size == size][1:]  # the first has what is made once
            for number, what in enumerate(HELD):
                counts = [each[number] for each in seen]
                assert not counts or max(counts) <= counts[0] + 1, (pid, size, what, counts)


def check_taken(processes: Sequence[Sequence[Mapping[str, int]]]) -> None:
    """Nothing grows in agents and workers, from their second change on; an agent may have come to hold the store."""
    for rows in processes:
        assert max(row["descriptors"] for row in rows) < 64 and max(row["threads"] for row in rows) < 32, rows
        for row in rows[2:]:
            assert row["bytes"] < rows[1]["bytes"] + MOST_MORE_BYTES, rows


def test_the_state_stays_what_it_is_across_changes(tmp_path: Path) -> None:
    game = Game(Job(tmp_path), 1, "full_shard")
    game.play(3)
    check_states(tmp_path, game.sizes)
    check_samples(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "seed"), [("no_shard", 2), ("full_shard", 3), ("shard_grad_op", 4)])
def test_the_state_stays_what_it_is_across_twenty_changes_and_nothing_grows(
    tmp_path: Path, strategy: str, seed: int
) -> None:
    game = Game(Job(tmp_path), seed, strategy)
    game.play(20)
    assert {*game.sizes.values()} == set(range(1, MOST_NODES + 1))
    check_states(tmp_path, game.sizes)
    check_samples(tmp_path)
    check_held(tmp_path)
    check_taken([*game.agents.values(), *game.workers.values()])
