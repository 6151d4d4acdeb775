"""Jobs of nodes that come and go, each an agent with workers, and what these have written; for tests of members."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from elastic_ext.members.plan import MembershipPlan
from elastic_ext.records.agent import MEMBERSHIP_FILE, WORKERS_FILE, WorkersRecord

from .elastic_job import GLOBAL_BATCH, NUM_SAMPLES
from .nodes import FORKING_RUN, Node, nodes, until
from .ports import free_port

__all__ = [
    "STAND_IN",
    "Job",
    "check_samples",
    "end",
    "plan_of",
    "ranks_seen",
    "samples_by_step",
    "told",
    "wait_for_kind",
]

STAND_IN = ("-m", "tests.support.member_job")
"""Workers that are no trainer, and speak of members with their agent by themselves."""


class Job:
    """A job whose nodes meet in a store that none of them has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[Node] = []
        self._port = free_port()
        self._store = TCPStore("127.0.0.1", self._port, is_master=True, wait_for_workers=False)

    def node(self, number: int, *options: str, num_workers: int = 1, script: Sequence[str] = STAND_IN) -> Node:
        last_call = 2 if number == 0 else 60  # which all await as one starts; who comes then waits for those that are
        launch = [
            "--nnodes=1:4",
            f"--nproc-per-node={num_workers}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self._port}",
            "--rdzv-id=job",
            f"--rdzv-conf=is_host=0,last_call_timeout={last_call},join_timeout=240,"
            "keep_alive_interval=1,keep_alive_max_attempt=30",
            "--local-addr=127.0.0.1",
            "--shutdown-timeout=20",
            "--members=auto",
            *options,
        ]
        arguments = [*launch, *script[:2], str(self.folder), *script[2:]]
        self.nodes.append(Node(self.folder / f"node-{number}", arguments, launcher=FORKING_RUN))
        return self.nodes[-1]

    @contextmanager
    def started(self, *options: str, num_workers: int = 1) -> Iterator[Node]:
        """The first node, whose workers train."""
        with nodes(self.node(0, *options, num_workers=num_workers)) as (first,):
            self.wait_for(num_workers, of=first)
            until(lambda: len([*first.run_dir.glob("member-*.json")]) == num_workers)
            yield first

    def say(self, name: str, words: str = "planted") -> None:
        (self.folder / name).write_text(words)

    def seen(self) -> dict[int, list[tuple[int, int, int, int]]]:
        """By pid: version, rank, number of ranks and seat in each world that a worker has been in."""
        return {pid: [row[:4] for row in rows] for pid, rows in self._rows().items()}

    def _rows(self) -> dict[int, list[Any]]:
        found = {}
        for file in self.folder.glob("seen-*.txt"):
            rows = [tuple(int(each) for each in line.split()) for line in file.read_text().splitlines()]
            found[int(file.stem.removeprefix("seen-"))] = rows
        return found

    def wait_for(
        self, world_size: int, *, version: int | None = None, of: Node | None = None
    ) -> dict[int, tuple[int, int, int, int]]:
        """Until as many workers live and are in one world, whose plan has that version; the last row of each by pid."""

        def together() -> dict[int, tuple[int, int, int, int]] | None:
            assert of is None or of.process.poll() is None, of.text
            last = {pid: rows[-1] for pid, rows in self.seen().items() if rows and _is_there(pid)}
            is_one = len({row[0] for row in last.values()}) == 1 and len(last) == world_size
            is_one = is_one and all(row[2] == world_size for row in last.values())
            return last if is_one and (version is None or next(iter(last.values()))[0] == version) else None

        return until(together, what=f"{world_size} workers in one world: {self.seen()}")

    def check_steps(self) -> None:
        """No step is taken again."""
        for rows in self._rows().values():
            assert [row[4] for row in rows] == sorted(row[4] for row in rows)


def _is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def plan_of(node: Node) -> MembershipPlan:
    return MembershipPlan.from_json((node.run_dir / MEMBERSHIP_FILE).read_text())


def told(node: Node, kind: str) -> list[dict[str, Any]]:
    return [event for event in node.events() if event["kind"] == kind]


def wait_for_kind(node: Node, kind: str, *, times: int = 1) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        events = told(node, kind)
        return events[times - 1] if len(events) >= times else None

    return until(found, what=f"{kind} in {node.run_dir.name}:\n{node.text}")


def ranks_seen(node: Node) -> list[tuple[int, int, int]]:
    """Rank, seat and membership version of a node's workers, as its agent has written them last."""
    record = WorkersRecord.from_json((node.run_dir / WORKERS_FILE).read_text())
    return [(each.rank, each.seat or 0, record.membership_version) for each in record.workers]


def end(job: Job, *made: Node) -> None:
    job.say("end")
    assert [node.end() for node in made] == [0] * len(made), "\n".join(node.text for node in made)


def samples_by_step(folder: Path) -> dict[int, list[int]]:
    """The samples of each step that all processes together have taken."""
    found: dict[int, list[int]] = {}
    for file in folder.glob("samples-*.txt"):
        for line in file.read_text().splitlines():
            if line[0].isdigit():
                step, *samples = (int(each) for each in line.split())
                found.setdefault(step, []).extend(samples)
    return dict(sorted(found.items()))


def check_samples(folder: Path) -> None:
    """Each step has a global batch of other samples, and each epoch all of them once."""
    steps = samples_by_step(folder)
    whole = [step for step in steps if step < max(steps)]
    assert whole == list(range(1, len(whole) + 1)) and all(len({*steps[step]}) == GLOBAL_BATCH for step in whole)
    taken = [sample for step in whole for sample in steps[step]]
    for start in range(0, len(taken) - NUM_SAMPLES + 1, NUM_SAMPLES):
        assert sorted(taken[start : start + NUM_SAMPLES]) == list(range(NUM_SAMPLES))
