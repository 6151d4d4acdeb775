"""What agreement costs per step, and how soon a change takes effect, with real gloo ranks on this machine.

Cost: the wall time and the CPU time (all threads of a rank) of a step with ``boundary()`` after it, over the step
without it, at 2 and 4 ranks, with steps of about 4 and 40 ms, agreeing at every step, every 10 and "auto". Beside it
what one would write by hand. A step is matrix products, a wait as for a device, so that four ranks leave two processors
some room, and a reduction that keeps the ranks in step as gradients do (of one number: a large one varies by more than
what is measured here). Processes take all sides by turns, block by block; a block holds several agreements. Where CPU
time is compared, the wait is counted in, as the claim is a share of the step.

Change: from just before the rename of a config file until the last rank has passed the boundary at which it came into
force, with agreement at every step.

Not measured: several machines (all ranks talk over loopback), NCCL, the watcher's thread (it runs beside all sides,
the baseline too) and the process that holds the store (as torchrun does, it is none of the ranks).
"""

from __future__ import annotations

import dataclasses
import random
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.agreement_ranks import (
    Block,
    Changes,
    Done,
    Rank,
    Seen,
    SideName,
    StepSize,
    changing_rank,
    training_rank,
)
from benchmarks.gang import Gang
from benchmarks.harness import Claim, Comparison, Readings, Result, Side, compare_measures, shown_value
from benchmarks.quantiles import QuantileTable, Samples
from benchmarks.replacing import replace_file

__all__ = ["main"]

TARGET = Claim(at_most=1.005)
SIDES: dict[SideName, str] = {
    "bare": "the step alone",
    "1": "boundary(), agreeing every step",
    "10": "boundary(), every 10 steps",
    "auto": "boundary(), auto",
    "all_reduce": "by hand: all_reduce of one integer, every step",
    "object": "by hand: broadcast_object_list of a dict, every step",
    "store": "by hand: TCPStore.check, every step (tells, agrees on nothing)",
}
NUM_CHANGES = 50
MIN_ROUNDS = 5
PEERS_ARE_SLOWER = 1.1
NUM_CALIBRATING = 200  # matrix products


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One table: how many ranks, which steps, how often."""

    world_size: int
    step_seconds: float
    computing: float
    """Which part of a step is arithmetic; the rest is waiting."""
    num_steps: int
    """In a block, at least."""
    budget_seconds: float
    """How long to go on, about."""
    sides: tuple[SideName, ...] = ("bare", "1", "10", "auto", "all_reduce", "object", "store")


FEW: tuple[SideName, ...] = ("bare", "1", "auto")  # what a peer costs does not depend on the length of a step
PLANS = (
    Plan(world_size=2, step_seconds=0.004, computing=0.5, num_steps=50, budget_seconds=55.0),
    Plan(world_size=4, step_seconds=0.004, computing=0.25, num_steps=50, budget_seconds=55.0),
    Plan(world_size=2, step_seconds=0.040, computing=0.5, num_steps=8, budget_seconds=25.0, sides=FEW),
    Plan(world_size=4, step_seconds=0.040, computing=0.25, num_steps=8, budget_seconds=25.0, sides=FEW),
)
NUM_STEPS_TO_SETTLE = 100  # "auto" looks at the last 32 steps, and changes its interval at an agreement only
NUM_INTERVALS = 2  # in a block, at least: in a shorter one the median would miss agreements altogether


def main(share: float = 1.0) -> list[Result]:
    """Two tables (wall, CPU) for each plan, and one of changes."""
    results: list[Result] = []
    for plan in PLANS:
        results.extend(cost_of_agreement(dataclasses.replace(plan, budget_seconds=share * plan.budget_seconds)))
    results.append(latency_of_changes(world_size=2, num_changes=NUM_CHANGES))
    return results


def cost_of_agreement(plan: Plan) -> list[Comparison]:
    """The plan's sides compared: wall time, CPU time."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with (
        tempfile.TemporaryDirectory() as folder,
        Gang(training_rank, _ranks(plan.world_size, store.port, Path(folder))) as gang,
    ):
        return _compared(plan, gang)


def _compared(plan: Plan, gang: Gang[Rank, Block, Done]) -> list[Comparison]:
    size = _size_of_step(plan, gang)
    share = f"{plan.computing:.0%} computing, the rest waiting"
    what = f"steps of about {plan.step_seconds * 1000:g} ms ({share}), {plan.world_size} ranks"
    wall, cpu = f"Agreement, wall time of a step: {what}", f"Agreement, CPU time and wait of a step: {what}"
    (settling, *_) = gang.ask(Block(side="auto", num_steps=NUM_STEPS_TO_SETTLE, size=size))
    num_steps = max(plan.num_steps, NUM_INTERVALS * settling.every)
    intervals: list[int] = []

    def run(side: SideName) -> Readings:
        answers = gang.ask(Block(side=side, num_steps=num_steps, size=size))
        if side == "auto":
            intervals.append(answers[0].every)
        seconds = mean(answer.wall_seconds for answer in answers)
        busy = mean(answer.cpu_seconds for answer in answers) + size.wait_seconds
        return Readings(values={wall: seconds, cpu: busy}, work=tuple(answer.work for answer in answers))

    compared = compare_measures(
        [wall, cpu],
        [
            Side(name=SIDES[side], run=_bound(run, side), claim=TARGET if side == "auto" else None)
            for side in plan.sides
        ],
        num_rounds=_num_rounds(plan, num_steps, settling.wall_seconds),
    )
    settled = intervals[1:]  # without the round that warmed up
    span = "" if min(settled) == max(settled) else f" ({min(settled)} to {max(settled)})"
    notes = [f"auto settled on an agreement every {median(settled):g} steps{span}; a block is {num_steps} steps long"]
    calls = {
        side: mean(
            answer.call_seconds
            for answer in gang.ask(Block(side=side, num_steps=num_steps, size=size, is_call_timed=True))
        )
        for side in plan.sides
        if side in ("1", "10", "auto")
    }
    inside = "; ".join(
        f"{SIDES[side]}: {shown_value(seconds, 'seconds')} ({seconds / compared[0].rows[0].median:.2%})"
        for side, seconds in calls.items()
    )
    return [
        dataclasses.replace(
            comparison, notes=(*notes, _over_baseline(comparison), f"mean time inside the call, per step: {inside}")
        )
        for comparison in compared
    ]


def _num_rounds(plan: Plan, num_steps: int, step_seconds: float) -> int:
    """How many rounds the budget allows after one to warm up."""
    round_seconds = (len(plan.sides) + 1) * num_steps * step_seconds * PEERS_ARE_SLOWER
    return max(MIN_ROUNDS, round(plan.budget_seconds / round_seconds) - 1)


def _bound(run: Callable[[SideName], Readings], side: SideName) -> Callable[[], Readings]:
    return lambda: run(side)


def _size_of_step(plan: Plan, gang: Gang[Rank, Block, Done]) -> StepSize:
    """As many products as fill the computing part of a step, all ranks at it at once."""
    trial = StepSize(num_products=NUM_CALIBRATING, wait_seconds=0.0)
    empty = StepSize(num_products=0, wait_seconds=0.0)
    seconds = []
    for _ in range(5):
        full = gang.ask(Block(side="bare", num_steps=5, size=trial))
        bare = gang.ask(Block(side="bare", num_steps=5, size=empty))
        seconds.append(full[0].cpu_seconds - bare[0].cpu_seconds)
    num_products = round(plan.step_seconds * plan.computing / (median(seconds) / NUM_CALIBRATING))
    return StepSize(num_products=max(num_products, 1), wait_seconds=plan.step_seconds * (1 - plan.computing))


def _over_baseline(comparison: Comparison) -> str:
    baseline = comparison.rows[0].median
    costs = [f"{row.name}: {(row.ratio - 1) * baseline * 1e6:+.0f} µs" for row in comparison.rows[1:]]
    return f"over the step alone, per step: {'; '.join(costs)}"


def latency_of_changes(*, world_size: int, num_changes: int) -> QuantileTable:
    """From the rename of a config file to all ranks having it in force, agreeing at every step."""
    size = StepSize(num_products=1, wait_seconds=0.004)
    renamed_ns: dict[int, int] = {}
    pause = threading.Event()
    draw = random.Random(0)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with (
        tempfile.TemporaryDirectory() as folder,
        Gang(changing_rank, _ranks(world_size, store.port, Path(folder))) as gang,
    ):
        gang.tell(Changes(size=size, last_version=num_changes))
        for version in range(1, num_changes + 1):
            pause.wait(draw.uniform(0.04, 0.08))
            renamed_ns[version] = replace_file(Path(folder) / "config.json", _contents(version))
        seen: Sequence[Seen] = gang.answers(deadline_seconds=90.0)
    seconds: list[list[float]] = []
    num_boundaries: list[list[float]] = []
    for version in sorted(seen[0].applied):
        (boundary,) = {rank.applied[version] for rank in seen}
        renamed = renamed_ns[version]
        seconds.append([(max(rank.boundary_ns[boundary] for rank in seen) - renamed) / 1e9])
        num_before = sum(1 for passed in seen[0].boundary_ns if passed <= renamed)
        num_boundaries.append([float(boundary - num_before + 1)])
    passed_over = num_changes - len(seconds)
    return QuantileTable(
        title=f"Change in force on all ranks: {world_size} ranks, steps of about 4 ms, agreeing every step",
        rows=(
            Samples(name="from the rename, in time", occasions=seconds),
            Samples(name="from the rename, in boundaries passed", occasions=num_boundaries, unit="count"),
        ),
        notes=(
            "1 boundary is the first one after the rename; a control word is read one boundary after it was begun",
            f"{passed_over} of {num_changes} versions were replaced before they could come into force",
        ),
    )


def _contents(version: int) -> bytes:
    return b'{"version": %d, "user": {"rate": %.2f}}' % (version, version / 100)


def _ranks(world_size: int, port: int, folder: Path) -> list[Rank]:
    return [Rank(rank=rank, world_size=world_size, port=port, folder=folder) for rank in range(world_size)]
