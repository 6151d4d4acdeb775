"""What it costs a rank that its agent sees how far it is: a step with a pulse over the same step without.

A very small model on one rank, so that what is added can be seen, and one whose step takes milliseconds, of which it is
to be less than half a percent. Both sides are ElasticTrainer on one thread, with batches in memory, and end with the
same parameters; the pulse lies in memory, where an agent has it, and is written twice in each micro-step.

The agent's own work is measured beside it: looks at eight workers that have a pulse, one after another.

Not measured: what an agent's looks take from workers that leave it no core of its own.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from unittest import mock

import torch

from benchmarks.differences import DifferenceTable, compare_differences
from benchmarks.harness import Claim, Comparison, Reading, Result, Side, compare, frozen, shortened, shown_value
from benchmarks.trainer_ranks import Task, make_loop
from elastic_ext.agent.workers.hangs import HangLimits
from elastic_ext.agent.workers.monitor import Monitor, Watched
from elastic_ext.ranks.heartbeat import heartbeat_file, read_heartbeat
from elastic_ext.ranks.processes import process_of

__all__ = ["MOST_SECONDS", "NAMES", "SMALL", "cost_of_looks", "cost_of_writing", "main", "share_of_steps", "sides"]

SMALL = Task(widths=(8, 8), micro_batch=8, num_micro_steps=1)
MODERATE = Task(widths=(256, 512, 512, 256), micro_batch=64, num_micro_steps=1)
NAMES: Mapping[bool, str] = {False: "ElasticTrainer", True: "ElasticTrainer, with a pulse"}
MOST_SECONDS = 5e-6  # half a percent of a step of a millisecond
SHARE = Claim(at_most=1.005)
NUM_OF_SMALL, NUM_OF_MODERATE = 240, 24  # micro-steps in a block
NUM_WORKERS, NUM_LOOKS = 8, 50
_WORKER = """
import sys
from pathlib import Path
from elastic_ext.ranks.heartbeat import begin_heartbeat
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
begin_heartbeat(folder, seat=rank, rank=rank, restart=0, run_dir=folder).enter(0)
sys.stdout.write("x")
sys.stdout.flush()
sys.stdin.read()
"""


def main(share: float = 1.0) -> list[Result]:
    """A table of a very small step, and one of a moderate one."""
    torch.set_num_threads(1)
    num_rounds = shortened(200, share, least=15)
    return [cost_of_writing(num_rounds=num_rounds), share_of_steps(num_rounds=num_rounds)]


def cost_of_writing(*, num_rounds: int) -> DifferenceTable:
    """What a pulse adds to a step, in seconds; with what an agent's look takes, in words."""
    with tempfile.TemporaryDirectory() as folder, _loops(SMALL, Path(folder), NUM_OF_SMALL) as both:
        compared = compare_differences(
            "A step, CPU time: one rank, a very small model",
            both,
            {NAMES[True]: MOST_SECONDS},
            num_rounds=num_rounds,
        )
    return dataclasses.replace(compared, notes=(cost_of_looks(),))


def share_of_steps(*, num_rounds: int) -> Comparison:
    """What a pulse takes of a step of milliseconds."""
    with tempfile.TemporaryDirectory() as folder, _loops(MODERATE, Path(folder), NUM_OF_MODERATE) as both:
        return compare("A step, CPU time: one rank, a moderate model", both, num_rounds=num_rounds)


@contextmanager
def _loops(task: Task, folder: Path, num_in_block: int) -> Iterator[list[Side]]:
    with ExitStack() as stack:
        both = sides(task, folder, num_in_block, stack)
        stack.enter_context(frozen())
        yield both


def sides(task: Task, folder: Path, num_in_block: int, stack: ExitStack) -> list[Side]:
    """Sides that read a micro-step's CPU time in seconds."""

    def side(has_pulse: bool) -> Side:
        own = folder / str(has_pulse)
        own.mkdir()
        pulses = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")) if has_pulse else ""
        with mock.patch.dict(os.environ, {"ELASTIC_EXT_PULSE_DIR": pulses}):
            loop = make_loop("ours", task, own, stack)
        if has_pulse:
            found = read_heartbeat(heartbeat_file(Path(pulses), 0))
            assert found is not None, "this side has no pulse"

        def run() -> Reading:
            done = loop.run(num_in_block)
            return Reading(value=done.cpu_seconds, work=done.work)

        return Side(name=NAMES[has_pulse], run=run, claim=SHARE if has_pulse else None)

    return [side(False), side(True)]


def cost_of_looks(*, num_workers: int = NUM_WORKERS, num_looks: int = NUM_LOOKS) -> str:
    """What an agent's look at its workers takes, in words."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        workers = []
        for rank in range(num_workers):
            process = subprocess.Popen(
                [sys.executable, "-c", _WORKER, folder, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            stack.callback(process.communicate)
            assert process.stdout is not None
            process.stdout.read(1)
            found = process_of(process.pid)
            assert found is not None
            workers.append(Watched(local_rank=rank, rank=rank, seat=rank, process=found))
        monitor = Monitor(run_dir=Path(folder), pulse_dir=Path(folder), limits=HangLimits(), every_seconds=0.0)
        seconds = []
        for _ in range(num_looks):
            began = time.perf_counter()
            monitor.look(workers, restart=0, membership_version=0, world_size=num_workers)
            seconds.append(time.perf_counter() - began)
    return (
        f"a look at {num_workers} workers takes their agent {shown_value(median(seconds), 'seconds')} (median), "
        f"{shown_value(max(seconds), 'seconds')} where it looks up who has started whom; there is one a second"
    )
