"""What a micro-step of ElasticTrainer costs by default, beside loops by hand and loops of other libraries.

One rank: the training thread's CPU time of a micro-step where nothing changes. A very small model, with one and with
four micro-steps per step, so small that what is added can be seen; and one whose steps take about 20 ms, as a share of
them. All over the same loop without a trainer.

Two gloo ranks with DDP: wall and CPU time of a micro-step of several milliseconds, over DDP by hand, which leaves
gradients unshared (``no_sync``) but in the last micro-step of a step. All are on one thread, and batches lie in memory.

Ours does all that it does in training: it watches its config file, agrees with the other ranks as often as it chooses
to, and writes metrics every 10 seconds. As sides take turns, those come more often per micro-step than in training.
With ``rollback="full"`` it keeps random states and buffers at the beginning of every step too; nothing is claimed of
what that costs.

Not measured: a dataloader, an accelerator, schedulers, and Fabric on two ranks.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.differences import DifferenceTable, compare_differences
from benchmarks.gang import Gang
from benchmarks.harness import Claim, Comparison, Reading, Readings, Result, Side, compare_measures, frozen
from benchmarks.trainer_ranks import Block, Done, LoopName, Rank, Task, make_loop, training_rank

__all__ = [
    "MODERATE",
    "ON_RANKS",
    "Plan",
    "against_aa_interval",
    "main",
    "on_ranks",
    "sides_of_one_rank",
    "sides_of_ranks",
]

SMALL = Task(widths=(8, 8), micro_batch=8, num_micro_steps=1)
MODERATE = Task(widths=(256, 512, 512, 256), micro_batch=64, num_micro_steps=1)
LARGE = Task(widths=(256, 1024, 1024, 256), micro_batch=160, num_micro_steps=1)  # a step takes about 20 ms
NAMES: Mapping[LoopName, str] = {
    "hand": "by hand",
    "default": "ElasticTrainer, no global batch",
    "ours": "ElasticTrainer",
    "backward": "ElasticTrainer, trainer.backward",
    "full": 'ElasticTrainer, rollback="full"',
    "accelerate": "accelerate",
    "fabric": "Lightning Fabric",
}
ON_RANKS: tuple[LoopName, ...] = ("hand", "ours", "backward", "accelerate")
RATIO = Claim(at_most=1.05)
CLAIMED: tuple[LoopName, ...] = ("default", "ours", "backward")
SHORT = 240  # micro-steps: sides that are read close together differ least by what else the machine does
MIN_ROUNDS = 9
NUM_CALIBRATING = 4  # rounds
MARGIN = 1.2  # how much longer a round takes with all that is between its blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One comparison."""

    num_micro_steps: int
    """Of a step."""
    num_in_block: int
    """Micro-steps."""
    budget_seconds: float
    """How long to go on, about."""
    names: tuple[LoopName, ...]
    task: Task = MODERATE
    most_seconds: float = math.inf
    """What ours may take more than by hand, per micro-step."""

    def shortened(self, share: float) -> Plan:
        """The same with a share of its time."""
        return dataclasses.replace(self, budget_seconds=share * self.budget_seconds)


ALONE = (
    Plan(
        num_micro_steps=1,
        num_in_block=SHORT,
        budget_seconds=60.0,
        names=("hand", "default", "ours", "backward", "full", "accelerate", "fabric"),
        task=SMALL,
        most_seconds=10e-6,
    ),
    Plan(
        num_micro_steps=4,
        num_in_block=SHORT,
        budget_seconds=60.0,
        names=("hand", "ours", "backward", "full", "accelerate", "fabric"),
        task=SMALL,
        most_seconds=15e-6,
    ),
    Plan(
        num_micro_steps=1,
        num_in_block=10,
        budget_seconds=60.0,
        names=("hand", "ours", "accelerate", "fabric"),
        task=LARGE,
        most_seconds=0.005 * 20e-3,
    ),
)
TOGETHER = (
    Plan(num_micro_steps=1, num_in_block=32, budget_seconds=85.0, names=ON_RANKS),
    Plan(num_micro_steps=4, num_in_block=48, budget_seconds=85.0, names=ON_RANKS),
)


def main(share: float = 1.0) -> list[Result]:
    """A table for each plan on one rank; two, of wall and of CPU time, for each plan on two ranks."""
    torch.set_num_threads(1)
    alone, together = ([plan.shortened(share) for plan in plans] for plans in (ALONE, TOGETHER))
    return [*map(on_one_rank, alone), *(table for plan in together for table in on_ranks(plan, num_ranks=2))]


# --- one rank -------------------------------------------------------------------------------------------------------


def on_one_rank(plan: Plan) -> DifferenceTable:
    """The plan's loops, by what they take more than the one by hand."""
    task = dataclasses.replace(plan.task, num_micro_steps=plan.num_micro_steps)
    size = "steps of about 20 ms, " if plan.task is LARGE else ""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        sides = sides_of_one_rank(task, plan.names, plan.num_in_block, Path(folder), stack)
        stack.enter_context(frozen())
        return compare_differences(
            f"A micro-step, CPU time of the training thread: one rank, {size}{_steps(plan)}",
            sides,
            {NAMES[name]: plan.most_seconds for name in plan.names if name in CLAIMED},
            num_rounds=_num_rounds(plan, lambda: [side.run() for side in (sides[0], *sides)]),
        )


def sides_of_one_rank(
    task: Task, names: tuple[LoopName, ...], num_in_block: int, folder: Path, stack: ExitStack
) -> list[Side]:
    """Sides that read the training thread's CPU time of a micro-step, in seconds."""

    def side(name: LoopName) -> Side:
        loop = make_loop(name, task, folder, stack)

        def run() -> Reading:
            done = loop.run(num_in_block)
            return Reading(value=done.thread_seconds, work=done.work)

        return Side(name=NAMES[name], run=run)

    return [side(name) for name in names]


# --- two ranks ------------------------------------------------------------------------------------------------------


def on_ranks(plan: Plan, *, num_ranks: int, task: Task = MODERATE) -> list[Comparison]:
    """The plan's loops on ranks that train together: wall time, CPU time."""
    what = f"{'fully_shard' if task.is_sharded else 'DDP'} on {num_ranks} ranks, {_steps(plan)}"
    wall, cpu = f"A micro-step, wall time: {what}", f"A micro-step, CPU time: {what}"
    task = dataclasses.replace(task, num_micro_steps=plan.num_micro_steps)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            Rank(rank=rank, world_size=num_ranks, port=store.port, folder=Path(folder), task=task, names=plan.names)
            for rank in range(num_ranks)
        ]
        with Gang(training_rank, ranks) as gang:
            sides = sides_of_ranks(gang, plan.names, plan.num_in_block, wall, cpu)
            num_rounds = _num_rounds(plan, lambda: [side.run() for side in (sides[0], *sides)])
            compared = compare_measures([wall, cpu], sides, num_rounds=num_rounds)
            interval = json.loads((Path(folder) / "ours" / "metrics-0.json").read_text())["agree_every_steps"]
    settled = f"{NAMES['ours']} agreed every {interval} steps"
    return [
        dataclasses.replace(comparison, notes=(*against_aa_interval(comparison), settled)) for comparison in compared
    ]


def sides_of_ranks(
    gang: Gang[Rank, Block, Done], names: tuple[LoopName, ...], num_in_block: int, wall: str, cpu: str
) -> list[Side]:
    """Sides that read a micro-step's wall and CPU time in seconds, as a mean over the ranks."""

    def side(name: LoopName) -> Side:
        def run() -> Readings:
            answers = gang.ask(Block(name=name, num_micro_steps=num_in_block))
            values = {
                wall: mean(answer.wall_seconds for answer in answers),
                cpu: mean(answer.cpu_seconds for answer in answers),
            }
            return Readings(values=values, work=tuple(answer.work for answer in answers))

        return Side(name=NAMES[name], run=run, claim=RATIO if name in CLAIMED else None)

    return [side(name) for name in names]


def against_aa_interval(comparison: Comparison) -> list[str]:
    """For claims of a ratio that is within the A/A interval: whether it is."""
    low, high = comparison.rows[0].aa_interval
    return [
        f"{row.name}: {row.ratio:.3f} is {'not above' if row.ratio <= high else 'above'} the A/A interval, "
        f"{low:.3f} to {high:.3f}"
        for row in comparison.rows
        if row.claim
    ]


# --------------------------------------------------------------------------------------------------------------------


def _steps(plan: Plan) -> str:
    return "A = 1" if plan.num_micro_steps == 1 else f"A = {plan.num_micro_steps} micro-steps per step"


def _num_rounds(plan: Plan, take_round: Callable[[], object]) -> int:
    """How many rounds the budget allows, after some that tell how long they take; the first of them warms up."""
    seconds = []
    for _ in range(NUM_CALIBRATING):
        began = time.perf_counter()
        take_round()
        seconds.append(time.perf_counter() - began)
    return max(MIN_ROUNDS, round((plan.budget_seconds - sum(seconds)) / (MARGIN * median(seconds[1:]))))
