"""What it costs that a rank's profile is kept: an ElasticTrainer's step with it over the same step without.

A very small model on one rank, each of whose steps is looked at one by one, so that what looking adds can be seen in
seconds; the same with the pace that is kept by default, which looks at some of so short steps; and models whose step
takes about 4 and about 40 milliseconds, of which it is to be less than one, and less than a fifth of a percent. Both
sides run on one thread with batches in memory, and end with the same parameters; windows are written after every
second of training. Each side has several models that take turns, since where one lies in memory can be worth percents
of a step.

All of it runs in a process whose allocator keeps what is freed: by default it gives gradients of megabytes back to the
system in some steps and not in others, by where small objects lie, and to have their pages again is worth percents.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import multiprocessing
import os
import resource
import tempfile
import timeit
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch

from benchmarks.differences import DifferenceTable, compare_differences, compare_shares
from benchmarks.harness import Reading, Readings, Side, shown_value
from benchmarks.trainer_ranks import Task, make_loop
from elastic_ext.profile import pace, windows
from elastic_ext.profile.phases import Phase
from elastic_ext.profile.timeline import Timeline

__all__ = ["CPU", "MOST_SECONDS", "NAMES", "SMALL", "WALL", "cost_of_looking", "main", "share_of_steps", "sides"]

SMALL = Task(widths=(8, 8), micro_batch=8, num_micro_steps=1)
SHORT = Task(widths=(512, 1024, 1024, 512), micro_batch=32, num_micro_steps=1)
LONG = Task(widths=(1024, 2048, 2048, 1024), micro_batch=96, num_micro_steps=1)
NAMES = {False: "ElasticTrainer, ELASTIC_EXT_PROFILE=off", True: "ElasticTrainer"}
MOST_SECONDS = 20e-6  # half a percent of a step of 4 ms
CPU, WALL = "cpu", "wall"
_MEASURES = {CPU: "CPU time", WALL: "wall time"}
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(10**10)}
_ALLOCATOR_IN_WORDS = ", ".join(f"{name}={value}" for name, value in ALLOCATOR.items())
NUM_OF_SMALL = 240  # steps in a block
NUM_LOOPS = 5  # of each side, which take turns: where its tensors lie makes one quicker than another


def main() -> list[DifferenceTable]:
    """Tables of what looking costs, and of what it takes of steps of two lengths."""
    with mock.patch.dict(os.environ, ALLOCATOR):  # which is read as a process starts
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as process:
            return process.submit(_tables).result()


def _tables() -> list[DifferenceTable]:
    assert ALLOCATOR.items() <= os.environ.items()
    torch.set_num_threads(1)
    return [
        cost_of_looking(num_rounds=120, is_every_step=True),
        cost_of_looking(num_rounds=120, is_every_step=False),
        *share_of_steps("about 4 ms", SHORT, 0.01, num_in_block=24, num_rounds=150),
        *share_of_steps("about 40 ms", LONG, 0.002, num_in_block=3, num_rounds=120),
    ]


def cost_of_looking(*, num_rounds: int, is_every_step: bool) -> DifferenceTable:
    """What a profile adds to a very small step, in seconds of a processor."""
    which = "every step looked at" if is_every_step else "as by default"
    with ExitStack() as stack:
        if is_every_step:
            stack.enter_context(mock.patch.object(pace, "steps_between", return_value=0))
        found = compare_differences(
            f"A step, CPU time: one rank, a very small model, {which}",
            [_on_processor(side) for side in stack.enter_context(_loops(SMALL, NUM_OF_SMALL))],
            {} if is_every_step else {NAMES[True]: MOST_SECONDS},
            num_rounds=num_rounds,
        )
    return dataclasses.replace(found, notes=(cost_of_marks(),))


def _on_processor(side: Side) -> Side:
    def run() -> Reading:
        done = side.run()
        assert isinstance(done, Readings)
        return Reading(value=done.values[CPU], work=done.work)

    return dataclasses.replace(side, run=run)


def _num_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def share_of_steps(
    length: str, task: Task, at_most: float, *, num_in_block: int, num_rounds: int
) -> list[DifferenceTable]:
    """What a profile takes of longer steps, of a processor and of the clock; ``at_most`` is a part of a step."""
    titles = {f"A step of {length}, {what}: one rank": name for name, what in _MEASURES.items()}
    num_faults = dict.fromkeys(NAMES.values(), 0.0)

    def counted(side: Side) -> Side:
        def run() -> Readings:
            before = _num_faults()
            done = side.run()
            assert isinstance(done, Readings)
            num_faults[side.name] += _num_faults() - before
            return Readings(values={title: done.values[name] for title, name in titles.items()}, work=done.work)

        return dataclasses.replace(side, run=run)

    with _loops(task, num_in_block) as both:
        found = compare_shares(
            [*titles], [counted(side) for side in both], {NAMES[True]: at_most}, num_rounds=num_rounds
        )
    num_steps = {name: (num_rounds + 1) * num_in_block * num for name, num in zip(NAMES.values(), (2, 1), strict=True)}
    faults = ", ".join(f"{num / num_steps[name]:.2f} ({name})" for name, num in num_faults.items())
    notes = (
        f"the target is {at_most:.1%} of a step; both sides keep what is freed ({_ALLOCATOR_IN_WORDS}), and fault in "
        f"so many pages a step: {faults}",
    )
    return [dataclasses.replace(each, notes=notes) for each in found]


def cost_of_marks() -> str:
    """What it takes to say that a phase begins, in words."""
    timeline = Timeline(Phase.OTHER)
    best = min(timeit.repeat(lambda: timeline.enter(Phase.DATA), number=20_000, repeat=5)) / 20_000
    return f"to say that a phase begins takes {shown_value(best, 'seconds')}; a step has about ten of them"


@contextmanager
def _loops(task: Task, num_in_block: int) -> Iterator[list[Side]]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        # A loop trains for a fifteenth of the time, and is to write a window after a second of that.
        stack.enter_context(mock.patch.object(windows, "window_seconds", return_value=float(3 * NUM_LOOPS)))
        both = sides(task, Path(folder), num_in_block, stack)
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        yield both


def sides(task: Task, folder: Path, num_in_block: int, stack: ExitStack) -> list[Side]:
    """Sides that read a step's time on a processor and on the clock, in seconds."""

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

        def run() -> Readings:
            done = next(in_turn).run(num_in_block)
            return Readings(values={CPU: done.cpu_seconds, WALL: done.wall_seconds}, work=done.work)

        return Side(name=NAMES[is_kept], run=run)

    return [side(False), side(True)]
