"""What it costs that a step can be taken again where memory runs out, and what it costs to take one again.

Guarded steps: the wall and CPU time of a step with ``guard="always"``, over ``guard="never"``. With DDP their gradients
are averaged after the passes, not beside them. Unguarded steps: ``trainer.run(...)`` with ``guard="auto"``, after the
steps that it guards at the start, over ``with trainer.step():``; and with a very small model, so that what is added can
be seen.

Again: an OutOfMemoryError is planted in the middle of a backward pass, on the first rank, and the step comes again in
two micro-batches. It takes from the error until the last rank has ended the step; beside it are the same step where
nothing fails, and starting over: from the start of new processes, one for each rank, to the end of their first step,
with micro-batches of the size that fits. Of a job that is started over that is the least it waits: nothing is said of
its old processes' end, a launcher's delay, a checkpoint, or the steps since that. Before a step comes again garbage is
collected, which takes the longer the more objects a process has: here it is most of the time on one rank.

A model of five million parameters with BatchNorm, on one rank alone and in DDP on two gloo ranks, one thread each. A
step is as many samples in one micro-batch as in four. All begin with the same parameters and buffers and take the same
samples, and must end with the same parameters and buffers.

Not measured: a GPU, where memory that has run out is also given back before the step comes again; slow networks.
"""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import mean, median

import torch

from benchmarks.differences import DifferenceTable, compare_differences
from benchmarks.gang import Gang
from benchmarks.guard_ranks import (
    NUM_WARMING,
    Block,
    Done,
    Rank,
    Task,
    Training,
    Trial,
    WayName,
    set_up,
    training_rank,
    trying_rank,
)
from benchmarks.harness import (
    Claim,
    Comparison,
    Reading,
    Readings,
    Result,
    Side,
    check_same_work,
    compare_measures,
    frozen,
    shown_value,
)

__all__ = [
    "FREE",
    "MOST_SECONDS",
    "NAMES",
    "cost_of_calls",
    "costs_of_steps",
    "costs_of_trials",
    "in_words",
    "main",
    "seconds_of_trial",
    "sides_of_steps",
    "start_over",
]

NAMES: Mapping[WayName, str] = {
    "never": 'run(), guard="never"',
    "always": 'run(), guard="always"',
    "step": "with trainer.step()",
    "auto": 'run(), guard="auto", after its guarded steps',
}
PAIRS: Mapping[str, Sequence[WayName]] = {"guarded": ("never", "always"), "not guarded": ("step", "auto")}
"""What is compared, the baseline first."""
FREE = Claim(at_most=1.01)
NUM_IN_BLOCK = 2  # steps: sides that are read close together differ least by what else the machine does
MIN_ROUNDS = 9
NUM_CALIBRATING = 3  # rounds
BUDGET_SECONDS = 22.0  # for each comparison, about
NUM_TRIALS = 3
ROOT = Path(__file__).resolve().parent.parent
SECONDS_TO_START = 120.0


TINY = Task(widths=(8, 8), num_samples=8)
NUM_OF_TINY = 240  # steps in a block
MOST_SECONDS = 10e-6  # 1% of a step of a millisecond
LARGE = Task(widths=(512, 1024, 1024, 1024, 1024, 1024, 512), num_samples=64)


def main(share: float = 1.0) -> list[Result]:
    """Four tables of steps by ranks and micro-steps, one of calls, and one of steps that come again by ranks."""
    torch.set_num_threads(1)
    budget_seconds = share * BUDGET_SECONDS
    steps = [
        table
        for num_ranks, num_micro_steps in product((1, 2), (1, 4))
        for table in costs_of_steps(
            dataclasses.replace(LARGE, num_micro_steps=num_micro_steps), num_ranks, budget_seconds=budget_seconds
        )
    ]
    calls = cost_of_calls(budget_seconds=budget_seconds)
    return [*steps, calls, *(costs_of_trials(LARGE, num_ranks) for num_ranks in (1, 2))]


# --- steps in which nothing fails -----------------------------------------------------------------------------------


def costs_of_steps(task: Task, num_ranks: int, *, budget_seconds: float = BUDGET_SECONDS) -> list[Comparison]:
    """Guarded steps over others, and run() over step(): wall time, CPU time."""
    micro_steps = "A = 1" if task.num_micro_steps == 1 else f"A = {task.num_micro_steps} micro-steps per step"
    on_ranks = f"{_ranks_in_words(num_ranks)}, {micro_steps}"
    found: list[Comparison] = []
    work: dict[str, object] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        set_up(task, num_ranks, Path(folder)) as setups,
        Gang(training_rank, setups) as gang,
    ):
        for what, names in PAIRS.items():
            wall, cpu = f"A step, {what}, wall time: {on_ranks}", f"A step, {what}, CPU time: {on_ranks}"
            sides = sides_of_steps(gang, names, NUM_IN_BLOCK, wall, cpu, work)
            compared = compare_measures([wall, cpu], sides, num_rounds=_num_rounds(budget_seconds, sides))
            check_same_work(work)
            found += [dataclasses.replace(each, notes=(in_words(each),)) for each in compared]
    return found


def sides_of_steps(
    gang: Gang[Rank, Block, Done],
    names: Sequence[WayName],
    num_steps: int,
    wall: str,
    cpu: str,
    work: dict[str, object],
) -> list[Side]:
    """Sides that read a step's wall and CPU time in seconds, as a mean over the ranks.

    ``work`` has what each did last: also of sides that are not compared with one another it is to be the same.
    """

    def side(name: WayName) -> Side:
        def run() -> Readings:
            answers = gang.ask(Block(way=name, num_steps=num_steps))
            values = {
                wall: mean(answer.ended - answer.began for answer in answers) / num_steps,
                cpu: mean(answer.cpu_seconds for answer in answers) / num_steps,
            }
            work[NAMES[name]] = done = tuple(answer.work for answer in answers)
            return Readings(values=values, work=done)

        return Side(name=NAMES[name], run=run, claim=FREE if name == "auto" else None)

    return [side(name) for name in names]


def _num_rounds(budget_seconds: float, sides: Sequence[Side]) -> int:
    """How many rounds the budget allows, of which the first warms up; the baseline runs twice in each."""
    seconds = []
    for _ in range(NUM_CALIBRATING):
        began = time.perf_counter()
        for side in (sides[0], *sides):
            side.run()
        seconds.append(time.perf_counter() - began)
    return max(MIN_ROUNDS, round(budget_seconds / median(seconds)) - NUM_CALIBRATING - 1)


def in_words(comparison: Comparison) -> str:
    """What the second side takes more than the first, and whether the first differs from itself as much."""
    baseline, other = comparison.rows
    low, high = baseline.aa_interval
    place = "above" if other.ratio > high else "below" if other.ratio < low else "within"
    more = (other.ratio - 1) * baseline.median
    return (
        f"{other.name}: {more * 1e3:+.2f} ms a step; {other.ratio:.4f} is {place} the A/A interval, "
        f"{low:.4f} to {high:.4f}"
    )


def cost_of_calls(*, num_steps: int = NUM_OF_TINY, budget_seconds: float = BUDGET_SECONDS) -> DifferenceTable:
    """run() where nothing is guarded, by what it takes more than step()."""
    with tempfile.TemporaryDirectory() as folder, set_up(TINY, 1, Path(folder)) as (setup,), ExitStack() as stack:

        def side(name: WayName) -> Side:
            training = stack.enter_context(Training(setup, TINY, name, job=name))
            training.run(NUM_WARMING)

            def run() -> Reading:
                done = training.run(num_steps)
                return Reading(value=done.cpu_seconds / num_steps, work=done.work)

            return Side(name=NAMES[name], run=run)

        sides = [side(name) for name in PAIRS["not guarded"]]
        stack.enter_context(frozen())
        return compare_differences(
            "A step, not guarded, CPU time: one rank, a model that takes next to nothing",
            sides,
            {NAMES["auto"]: MOST_SECONDS},
            num_rounds=_num_rounds(budget_seconds, sides),
        )


# --- a step that comes again ----------------------------------------------------------------------------------------


def costs_of_trials(task: Task, num_ranks: int, *, num_trials: int = NUM_TRIALS) -> Comparison:
    """A step that comes again, and starting over, over the same step where nothing fails."""
    title = f"From memory running out to the end of the step: {_ranks_in_words(num_ranks)}"
    before: list[float] = []

    def tried(gang: Gang[Rank, Trial, Done], *, has_failure: bool) -> Readings:
        answers = gang.ask(Trial(has_failure=has_failure))
        if has_failure:
            before.append(max(answer.step_seconds for answer in answers))
        return Readings(values={title: seconds_of_trial(answers)}, work=tuple(answer.work for answer in answers))

    def started_over() -> Readings:
        seconds, answers = start_over(task, num_ranks)
        return Readings(values={title: seconds}, work=tuple(answer.work for answer in answers))

    with (
        tempfile.TemporaryDirectory() as folder,
        set_up(task, num_ranks, Path(folder)) as setups,
        Gang(trying_rank, setups) as gang,
    ):
        sides = [
            Side(name="the step alone, in two micro-batches", run=lambda: tried(gang, has_failure=False)),
            Side(name="the step taken again, in two micro-batches", run=lambda: tried(gang, has_failure=True)),
            Side(name="started over, to the end of the first step", run=started_over),
        ]
        (compared,) = compare_measures([title], sides, num_rounds=num_trials, num_warmup_rounds=0)
    _, again, anew = compared.rows
    note = (
        f"a step in one micro-batch took {shown_value(median(before), 'seconds')} before; starting over took "
        f"{anew.median / again.median:,.0f} times as long as taking the step again"
    )
    return dataclasses.replace(compared, notes=(note,))


def seconds_of_trial(answers: Sequence[Done]) -> float:
    """Until the last rank ended: from where memory ran out, or where it did not, from where the first rank began."""
    failures = [answer.failed for answer in answers if answer.failed is not None]
    return max(answer.ended for answer in answers) - min(failures or [answer.began for answer in answers])


def start_over(task: Task, num_ranks: int) -> tuple[float, list[Done]]:
    """Start a process for each rank, which takes a step in two micro-batches: the seconds until the last ended it."""
    begin = [sys.executable, "-c", "from benchmarks.guard_ranks import begin_anew; begin_anew()"]
    with tempfile.TemporaryDirectory() as folder, set_up(task, num_ranks, Path(folder)) as setups, ExitStack() as stack:
        began = time.monotonic()
        processes = []
        for setup in setups:
            process = subprocess.Popen(begin, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
            stack.enter_context(process)
            stack.callback(process.kill)  # where all is well it has ended
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(setup))
            process.stdin.close()
            process.stdin = None
            processes.append(process)
        answers = [_heard(process) for process in processes]
    return max(answer.ended for answer in answers) - began, answers


def _heard(process: subprocess.Popen[bytes]) -> Done:
    said, _ = process.communicate(timeout=SECONDS_TO_START)
    if process.returncode != 0:
        raise RuntimeError(f"a process that starts over ended with status {process.returncode}; see its own output")
    done: Done = pickle.loads(said)
    return done


def _ranks_in_words(num_ranks: int) -> str:
    return "one rank" if num_ranks == 1 else f"DDP on {num_ranks} ranks"
