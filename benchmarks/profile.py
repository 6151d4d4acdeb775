"""What it costs that a rank's profile is kept: an ElasticTrainer's step with it over the same step without.

A very small model on one rank, each of whose steps is looked at one by one, so that what looking adds can be seen in
seconds; the same with the pace that is kept by default, which looks at some of so short steps; and models whose step
takes about 4 and about 40 milliseconds, of which it is to be less than one, and less than a fifth of a percent. Both
sides run on one thread with batches in memory, and end with the same parameters; windows are written every second.
Each side has several models that take turns, since where one lies in memory can be worth percents of a step.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import tempfile
import timeit
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch

from benchmarks.differences import DifferenceTable, compare_differences
from benchmarks.harness import Claim, Comparison, Reading, Result, Side, compare, shown_value
from benchmarks.trainer_ranks import Task, make_loop
from elastic_ext.profile import pace
from elastic_ext.profile.phases import Phase
from elastic_ext.profile.timeline import Timeline

__all__ = ["MOST_SECONDS", "NAMES", "SMALL", "cost_of_looking", "main", "share_of_steps", "sides"]

SMALL = Task(widths=(8, 8), micro_batch=8, num_micro_steps=1)
SHORT = Task(widths=(512, 1024, 1024, 512), micro_batch=32, num_micro_steps=1)
LONG = Task(widths=(1024, 2048, 2048, 1024), micro_batch=96, num_micro_steps=1)
NAMES = {False: "ElasticTrainer, ELASTIC_EXT_PROFILE=off", True: "ElasticTrainer"}
MOST_SECONDS = 20e-6  # half a percent of a step of 4 ms
NUM_OF_SMALL = 240  # steps in a block
NUM_LOOPS = 5  # of each side, which take turns: where its tensors lie makes one quicker than another


def main() -> list[Result]:
    """Tables of what looking costs, and of what it takes of steps of two lengths."""
    torch.set_num_threads(1)
    return [
        cost_of_looking(num_rounds=200, is_every_step=True),
        cost_of_looking(num_rounds=200, is_every_step=False),
        share_of_steps("about 4 ms", SHORT, Claim(at_most=1.01), num_in_block=24, num_rounds=150),
        share_of_steps("about 40 ms", LONG, Claim(at_most=1.002), num_in_block=3, num_rounds=100),
    ]


def cost_of_looking(*, num_rounds: int, is_every_step: bool) -> DifferenceTable:
    """What a profile adds to a very small step, in seconds."""
    which = "every step looked at" if is_every_step else "as by default"
    with ExitStack() as stack:
        if is_every_step:
            stack.enter_context(mock.patch.object(pace, "steps_between", return_value=0))
        found = compare_differences(
            f"A step, CPU time: one rank, a very small model, {which}",
            stack.enter_context(_loops(SMALL, NUM_OF_SMALL)),
            {} if is_every_step else {NAMES[True]: MOST_SECONDS},
            num_rounds=num_rounds,
        )
    return dataclasses.replace(found, notes=(cost_of_marks(),))


def share_of_steps(length: str, task: Task, claim: Claim, *, num_in_block: int, num_rounds: int) -> Comparison:
    """What a profile takes of longer steps."""
    with _loops(task, num_in_block, claim) as both:
        return compare(f"A step of {length}, CPU time: one rank", both, num_rounds=num_rounds)


def cost_of_marks() -> str:
    """What it takes to say that a phase begins, in words."""
    timeline = Timeline(Phase.OTHER)
    best = min(timeit.repeat(lambda: timeline.enter(Phase.DATA), number=20_000, repeat=5)) / 20_000
    return f"to say that a phase begins takes {shown_value(best, 'seconds')}; a step has about ten of them"


@contextmanager
def _loops(task: Task, num_in_block: int, claim: Claim | None = None) -> Iterator[list[Side]]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        both = sides(task, Path(folder), num_in_block, stack, claim)
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        yield both


def sides(task: Task, folder: Path, num_in_block: int, stack: ExitStack, claim: Claim | None = None) -> list[Side]:
    """Sides that read a step's CPU time in seconds."""

    def side(is_kept: bool) -> Side:
        own = folder / str(is_kept)
        own.mkdir()
        loops = []
        for number in range(NUM_LOOPS):
            with mock.patch.dict(os.environ, {"ELASTIC_EXT_PROFILE": "on" if is_kept else "off"}):
                loops.append(make_loop("ours", task, own / str(number), stack))
            loops[-1].run(32)  # the census is taken, and the machine is measured
        assert bool(list(own.rglob("profile-0.jsonl"))) is is_kept, "this side keeps what the other does"
        in_turn = itertools.cycle(loops)

        def run() -> Reading:
            done = next(in_turn).run(num_in_block)
            return Reading(value=done.cpu_seconds, work=done.work)

        return Side(name=NAMES[is_kept], run=run, claim=claim if is_kept else None)

    return [side(False), side(True)]
