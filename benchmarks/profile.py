"""What it costs that a rank's profile is kept: an ElasticTrainer's step with it over the same step without.

A very small model on one rank: all of whose steps are looked at one by one, so that what looking adds can be seen in
seconds; of whose steps some are, as by default; and none, which is what every other step costs. Each side has several
models that take turns, since where one lies in memory can be worth percents of a step.

Models whose step takes about 4 and about 40 milliseconds, of which a profile is to take less than one, and less than a
fifth of a percent: there, where things lie is worth more than that. So both sides are the same models in the same
memory, which take some steps none of which is looked at, and then as many all of which are. By default some of so many
are, so that a look may take so many times as much; and what a step costs that is not looked at, as it was measured
before, is taken off.

Everything runs on one thread with batches in memory, and both sides end with the same parameters; windows are written
after every second of training. It runs in a process whose allocator keeps what is freed: by default it gives gradients
of megabytes back to the system in some steps and not in others, by where small objects lie, and to have their pages
again is worth percents.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal
from unittest import mock

import torch

from benchmarks.differences import DifferenceTable, compare_differences, compare_shares
from benchmarks.harness import Reading, Readings, Side, frozen, shortened, shown_value
from benchmarks.trainer_ranks import Loop, Task, make_loop
from elastic_ext.profile import probe, recorder, windows
from elastic_ext.profile.phases import Phase, Timeline

__all__ = [
    "CPU",
    "LOOKS",
    "MOST_SECONDS",
    "NAMES",
    "SMALL",
    "WALL",
    "cost_of_looking",
    "main",
    "share_of_steps",
    "sides",
]

SMALL = Task(widths=(8, 8), micro_batch=8, num_micro_steps=1)
SHORT = Task(widths=(512, 1024, 1024, 512), micro_batch=32, num_micro_steps=1)
LONG = Task(widths=(1024, 2048, 2048, 1024), micro_batch=96, num_micro_steps=1)
NAMES = {False: "ElasticTrainer, ELASTIC_EXT_PROFILE=off", True: "ElasticTrainer"}
LOOKS = {False: "ElasticTrainer, no step looked at", True: "ElasticTrainer, every step looked at"}
MOST_SECONDS = 20e-6  # half a percent of a step of 4 ms
CPU, WALL = "cpu", "wall"
Which = Literal["every step looked at", "as by default", "no step looked at"]
_MEASURES = {CPU: "CPU time", WALL: "wall time"}
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(10**10)}
_ALLOCATOR_IN_WORDS = ", ".join(f"{name}={value}" for name, value in ALLOCATOR.items())
NUM_OF_SMALL = 240  # steps in a block
NUM_LOOPS = 5  # of each side, which take turns: where its tensors lie makes one quicker than another


def main(share: float = 1.0) -> list[DifferenceTable]:
    """Tables of what looking costs, and of what it takes of steps of two lengths."""
    with mock.patch.dict(os.environ, ALLOCATOR):  # which is read as a process starts
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as process:
            return process.submit(_tables, share).result()


def _tables(share: float) -> list[DifferenceTable]:
    assert ALLOCATOR.items() <= os.environ.items()
    torch.set_num_threads(1)
    num_rounds, num_long = shortened(120, share, least=30), shortened(60, share, least=15)
    passing = cost_of_looking("no step looked at", num_rounds=num_rounds)
    _, beyond = passing.rows[1].interval
    return [
        cost_of_looking("every step looked at", num_rounds=num_rounds),
        cost_of_looking("as by default", num_rounds=num_rounds),
        passing,
        *share_of_steps("about 4 ms", SHORT, 0.01, passing_seconds=beyond, num_rounds=num_long),
        *share_of_steps("about 40 ms", LONG, 0.002, passing_seconds=beyond, num_rounds=num_long),
    ]


_FOREVER = 10**15  # nanoseconds
_RESTING: Mapping[Which, Callable[[int], int] | None] = {
    "every step looked at": lambda look_began: 0,
    "as by default": None,
    "no step looked at": lambda look_began: look_began + _FOREVER,
}


def cost_of_looking(which: Which, *, num_rounds: int) -> DifferenceTable:
    """What a profile adds to a very small step, in seconds of a processor."""
    resting = _RESTING[which]
    with ExitStack() as stack:
        if resting is not None:
            stack.enter_context(mock.patch.object(probe, "rests_until", resting))
        found = compare_differences(
            f"A step, CPU time: one rank, a very small model, {which}",
            [_on_processor(side) for side in stack.enter_context(_loops(SMALL, NUM_OF_SMALL))],
            {NAMES[True]: MOST_SECONDS} if resting is None else {},
            num_rounds=num_rounds,
        )
    return dataclasses.replace(found, notes=(cost_of_marks(),))


def _on_processor(side: Side) -> Side:
    def run() -> Reading:
        done = side.run()
        assert isinstance(done, Readings)
        return Reading(value=done.values[CPU], work=done.work)

    return dataclasses.replace(side, run=run)


def share_of_steps(
    length: str, task: Task, at_most: float, *, passing_seconds: float, num_rounds: int
) -> list[DifferenceTable]:
    """What looking takes of longer steps, of a processor and of the clock.

    ``at_most`` is the part of a step that a profile may take, ``passing_seconds`` what it takes of a step that is not
    looked at.
    """
    titles = {f"A look at a step of {length}, {what}: one rank": name for name, what in _MEASURES.items()}
    with _one_loop(task) as (both, step_seconds, num_in_cycle):
        num_looked_at = _num_in_look(step_seconds)
        share = (at_most - passing_seconds / step_seconds) * num_in_cycle / num_looked_at
        sides = [_titled(side, titles) for side in both]
        found = compare_shares([*titles], sides, {LOOKS[True]: share}, num_rounds=num_rounds)
    notes = (
        f"the target is {at_most:.1%} of a step less what is spent on each step, looked at or not: "
        f"{shown_value(passing_seconds, 'seconds')} (the far end of the interval above)",
        f"by default {num_looked_at} of {num_in_cycle} steps are looked at, and so a look may take "
        f"{num_in_cycle / num_looked_at:.2g} times as much",
        f"both sides keep what is freed ({_ALLOCATOR_IN_WORDS})",
    )
    return [dataclasses.replace(each, notes=notes) for each in found]


def _num_in_look(step_seconds: float) -> int:
    """How many steps of this length are looked at one after another."""
    nanoseconds = round(step_seconds * 1e9)
    return next(number for number in itertools.count(1) if probe.is_over(number, number * nanoseconds))


def _titled(side: Side, titles: Mapping[str, str]) -> Side:
    def run() -> Readings:
        done = side.run()
        assert isinstance(done, Readings)
        return Readings(values={title: done.values[name] for title, name in titles.items()}, work=done.work)

    return dataclasses.replace(side, run=run)


@contextmanager
def _one_loop(task: Task) -> Iterator[tuple[list[Side], float, int]]:
    """Sides that are the same loops, of whose steps some are looked at or none; a step's length, and after how many
    steps the pace begins anew."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.enter_context(mock.patch.object(windows, "window_seconds", return_value=float(3 * NUM_LOOPS)))
        loops = [make_loop("ours", task, Path(folder) / str(number), stack) for number in range(NUM_LOOPS)]
        seconds = min(loop.run(80).wall_seconds for loop in loops)  # the census is taken, and the machine is measured
        num_in_cycle = max(round(probe.rests_until(0) * 1e-9 / seconds), _num_in_look(seconds))
        switch = _Switch(stack, num_in_cycle=num_in_cycle)
        stack.enter_context(frozen())
        yield [switch.side(looks, loops) for looks in LOOKS], seconds, num_in_cycle


class _Switch:
    """Has loops look at all steps or at none, as it is told, from the end of the next look on."""

    def __init__(self, stack: ExitStack, *, num_in_cycle: int) -> None:
        self._num_in_cycle = num_in_cycle
        self._looks = True
        self._has_begun = False
        self._ahead = 0  # nanoseconds, of the clock that rests end by
        stack.enter_context(mock.patch.object(probe, "rests_until", self._rests_until))
        stack.enter_context(mock.patch.object(recorder, "perf_counter_ns", self._now))

    def side(self, looks: bool, loops: Sequence[Loop]) -> Side:
        in_turn = itertools.cycle(loops)

        def run() -> Readings:
            loop = next(in_turn)
            self._looks, self._has_begun = looks, False
            self._ahead += 2 * _FOREVER  # a rest that goes on ends
            while not self._has_begun:
                loop.run(1)
            done = loop.run(self._num_in_cycle)
            return Readings(values={CPU: done.cpu_seconds, WALL: done.wall_seconds}, work=done.work)

        return Side(name=LOOKS[looks], run=run)

    def _now(self) -> int:
        return time.perf_counter_ns() + self._ahead

    def _rests_until(self, look_began: int) -> int:
        self._has_begun = True
        return 0 if self._looks else look_began + _FOREVER


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
        stack.enter_context(frozen())
        yield both


def sides(task: Task, folder: Path, num_in_block: int, stack: ExitStack) -> list[Side]:
    """Sides that read a step's time on a processor and on the clock, in seconds.

    Their loops are made by turns: the system has its large pages for those that come first.
    """
    made: dict[bool, list[Loop]] = {False: [], True: []}
    for number, is_kept in itertools.product(range(NUM_LOOPS), made):
        with mock.patch.dict(os.environ, {"ELASTIC_EXT_PROFILE": "on" if is_kept else "off"}):
            made[is_kept].append(make_loop("ours", task, folder / str(is_kept) / str(number), stack))
        made[is_kept][-1].run(32)  # the census is taken, and the machine is measured
    return [_side(is_kept, loops, folder, num_in_block) for is_kept, loops in made.items()]


def _side(is_kept: bool, loops: list[Loop], folder: Path, num_in_block: int) -> Side:
    assert bool(list((folder / str(is_kept)).rglob("profile-0.jsonl"))) is is_kept, (
        "this side keeps what the other does"
    )
    in_turn = itertools.cycle(loops)

    def run() -> Readings:
        done = next(in_turn).run(num_in_block)
        return Readings(values={CPU: done.cpu_seconds, WALL: done.wall_seconds}, work=done.work)

    return Side(name=NAMES[is_kept], run=run)
