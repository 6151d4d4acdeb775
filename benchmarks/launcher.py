"""elastic-run beside torchrun: how long until the first step, and how long no step is taken when something happens.

Both start the same script, on this machine, with the same settings: two ranks of one node, or nodes of one rank each
that meet at 127.0.0.1, in a rendezvous that is on none of them. More nodes are waited for for two seconds (30 by
default), and a node that is silent for four is lost (15 by default). torchrun gets
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which nodes cannot join.

    start       from the start of the launcher to the first step
    crash       a worker of two is killed with SIGKILL: from the last step before to the first one after
    join        a third node comes to two
    leave       one of three nodes is sent SIGTERM
    node lost   the agent and the worker of one of three nodes are killed with SIGKILL

Steps are 20 ms of sleep and a small model; what is measured is launchers and the start of processes, which here import
torch from memory. Both sides end with the same number of ranks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.harness import Claim, Comparison, Reading, Result, Side, compare, shortened

__all__ = ["SIDES", "Job", "crash", "job_of", "join", "leave", "lose", "main", "start"]

SIDES: Mapping[str, Sequence[str]] = {
    "torchrun": ("-m", "torch.distributed.run"),
    "elastic-run": ("-m", "elastic_ext.run"),
}
NO_SLOWER = Claim(at_most=1.05)
BETTER = Claim(at_most=0.75)
_DEADLINE_SECONDS = 120.0
_POLL_SECONDS = 0.01
_NUM_STEPS = 20  # before something happens
_MEET = "is_host=0,last_call_timeout=2,join_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=4"


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """Ranks that were started together, and when they took which steps."""

    began: int
    num_ranks: int
    first: float
    last: float
    first_step: int
    last_step: int


class Job:
    """The launchers of one job, each a node."""

    def __init__(
        self, launcher: Sequence[str], folder: Path, script: Sequence[str] = ("benchmarks.launcher_job",)
    ) -> None:
        """``script``: the module that ranks run, and what it is given before the folder."""
        self._launcher = launcher
        self.folder = folder
        self._script = script
        self.nodes: list[psutil.Popen] = []
        self._store: TCPStore | None = None

    def start_alone(self, *options: str) -> None:
        """One node with two ranks."""
        self._start("--standalone", "--nproc-per-node=2", *options)

    def start_node(self) -> None:
        """One of several, with one rank."""
        if self._store is None:  # with none of the nodes, any of which may go
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        endpoint = f"--rdzv-endpoint=127.0.0.1:{self._store.port}"
        meet = ["--rdzv-backend=c10d", endpoint, "--rdzv-id=job", f"--rdzv-conf={_MEET}"]
        self._start("--nnodes=1:4", "--nproc-per-node=1", "--local-addr=127.0.0.1", "--max-restarts=1", *meet)

    def _start(self, *options: str) -> None:
        number = len(self.nodes)
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "ELASTIC_EXT_RUN_DIR": str(self.folder / f"node-{number}"),
            "ELASTIC_EXT_JOB": "job",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        script = ("-m", *self._script, str(self.folder))
        with open(self.folder / f"node-{number}.log", "w") as log:
            node = psutil.Popen(
                [sys.executable, *self._launcher, *options, *script],
                env=environ,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        self.nodes.append(node)

    def rounds(self) -> list[Round]:
        """Those that have taken a step on all of their ranks, in order."""
        found: dict[int, list[tuple[int, list[tuple[int, float]]]]] = {}
        for file in self.folder.glob("steps-*.txt"):
            first, *lines = [line.split() for line in file.read_text().splitlines()] or [[]]
            if len(first) == 2:
                steps = [(int(line[0]), float(line[1])) for line in lines if len(line) == 2]
                found.setdefault(int(first[1]), []).append((int(first[0]), steps))
        rounds = []
        for began, ranks in sorted(found.items()):
            if len(ranks) == ranks[0][0] and all(steps for _, steps in ranks):
                steps = ranks[0][1]
                rounds.append(
                    Round(
                        began=began,
                        num_ranks=len(ranks),
                        first=steps[0][1],
                        last=max(steps[-1][1] for _, steps in ranks),
                        first_step=steps[0][0],
                        last_step=steps[-1][0],
                    )
                )
        return rounds

    def wait(self, is_there: Callable[[list[Round]], bool]) -> list[Round]:
        """The rounds, as soon as they are as they should be."""
        end = time.monotonic() + _DEADLINE_SECONDS
        while not is_there(rounds := self.rounds()):
            if time.monotonic() > end:
                logs = "\n".join(log.read_text()[-2000:] for log in sorted(self.folder.glob("*.log")))
                raise RuntimeError(f"not in time; rounds so far: {rounds}\n{logs}")
            time.sleep(_POLL_SECONDS)
        return rounds

    def wait_for_ranks(self, num_ranks: int) -> list[Round]:
        """Until so many have taken some steps."""
        return self.wait(
            lambda rounds: (
                bool(rounds)
                and rounds[-1].num_ranks == num_ranks
                and rounds[-1].last_step >= rounds[-1].first_step + _NUM_STEPS
            )
        )

    def workers(self, node: int) -> list[psutil.Process]:
        """The workers of a node."""
        children = self.nodes[node].children(recursive=True)
        return [each for each in children if self._script[0] in each.cmdline()]

    def close(self) -> None:
        """End it all, whatever it does."""
        everyone: list[psutil.Process] = [*self.nodes]
        for node in self.nodes:
            if node.is_running():
                everyone += node.children(recursive=True)
        for process in everyone:
            if process.is_running():
                process.kill()
        psutil.wait_procs(everyone, timeout=10)
        for node in self.nodes:
            node.wait()


@contextmanager
def job_of(launcher: Sequence[str], script: Sequence[str] = ("benchmarks.launcher_job",)) -> Iterator[Job]:
    """A job of it, which ends here."""
    with tempfile.TemporaryDirectory(prefix="launcher-") as folder:
        job = Job(launcher, Path(folder), script)
        try:
            yield job
        finally:
            job.close()


def start(launcher: Sequence[str]) -> Reading:
    """The time to the first step."""
    with job_of(launcher) as job:
        began = time.time()
        job.start_alone()
        (first,) = job.wait(lambda rounds: bool(rounds))
        return Reading(value=first.first - began, work=(first.num_ranks, first.first_step))


def crash(launcher: Sequence[str]) -> Reading:
    """... without a step where a worker was killed."""
    with job_of(launcher) as job:
        job.start_alone("--max-restarts=1")
        job.wait_for_ranks(2)
        job.workers(0)[1].kill()
        return _stall(job.wait(lambda rounds: len(rounds) == 2))


def join(launcher: Sequence[str]) -> Reading:
    """... where a node comes."""
    with job_of(launcher) as job:
        _start_nodes(job, 2)
        job.start_node()
        return _stall(job.wait(lambda rounds: rounds[-1].num_ranks == 3))


def leave(launcher: Sequence[str]) -> Reading:
    """... where a node leaves."""
    with job_of(launcher) as job:
        _start_nodes(job, 3)
        job.nodes[2].send_signal(signal.SIGTERM)
        return _stall(job.wait(lambda rounds: rounds[-1].num_ranks == 2))


def lose(launcher: Sequence[str]) -> Reading:
    """... where a node is lost."""
    with job_of(launcher) as job:
        _start_nodes(job, 3)
        workers = job.workers(2)
        job.nodes[2].suspend()
        for worker in workers:
            worker.kill()
        job.nodes[2].kill()
        return _stall(job.wait(lambda rounds: rounds[-1].num_ranks == 2))


def main(share: float = 1.0) -> list[Result]:
    """A table for each; with less time, without those of nodes: benchmarks/members.py has a join in its short form."""
    compared: list[Comparison] = [
        _compare("Start to the first step, two ranks", start, NO_SLOWER, num_rounds=shortened(11, share, least=4)),
        _compare("No step: a worker is killed", crash, NO_SLOWER, num_rounds=shortened(5, share, least=3)),
    ]
    if share >= 1:
        compared += [
            _compare("No step: a node joins", join, BETTER, num_rounds=3),
            _compare("No step: a node leaves", leave, BETTER, num_rounds=3),
            _compare("No step: a node is lost", lose, NO_SLOWER, num_rounds=3),
        ]
    return [replace(compared[0], notes=(cost_of_watching(),)), *compared[1:]]


def cost_of_watching(*, seconds: float = 20.0) -> str:
    """What the launchers take of the processor while two ranks train, in words."""
    taken = {name: _share_taken(launcher, seconds) for name, launcher in SIDES.items()}
    more = (taken["elastic-run"] - taken["torchrun"]) / (os.cpu_count() or 1)
    told = ", ".join(f"{name} {share:.2%} of one core" for name, share in taken.items())
    return (
        f"While training, over {seconds:.0f} seconds: {told}; that is {more:.2%} more of this machine "
        f"(target: less than 0.50%: {'pass' if more < 0.005 else 'fail'})."
    )


def _share_taken(launcher: Sequence[str], seconds: float) -> float:
    shares = []
    for _ in range(3):
        with job_of(launcher) as job:
            job.start_alone()
            job.wait_for_ranks(2)
            workers = {worker.pid for worker in job.workers(0)}
            own = [job.nodes[0], *(each for each in job.nodes[0].children() if each.pid not in workers)]
            before = sum(sum(each.cpu_times()[:2]) for each in own)
            time.sleep(seconds / 3)
            shares.append((sum(sum(each.cpu_times()[:2]) for each in own) - before) / (seconds / 3))
    return median(shares)


def _compare(title: str, measure: Callable[[Sequence[str]], Reading], claim: Claim, *, num_rounds: int) -> Comparison:
    sides = [
        Side(name=name, run=lambda launcher=launcher: measure(launcher), claim=claim if name == "elastic-run" else None)  # type: ignore[misc]
        for name, launcher in SIDES.items()
    ]
    return compare(title, sides, num_rounds=num_rounds, num_warmup_rounds=0)


def _start_nodes(job: Job, number: int) -> None:
    for _ in range(number):
        job.start_node()
    job.wait_for_ranks(number)


def _stall(rounds: Sequence[Round]) -> Reading:
    """Between the last two rounds."""
    before, after = rounds[-2:]
    return Reading(value=after.first - before.last, work=(before.num_ranks, after.num_ranks))
