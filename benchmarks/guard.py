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
import gc
import itertools
import logging
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from benchmarks.differences import DifferenceTable, compare_differences
from benchmarks.gang import Gang
from benchmarks.harness import (
    Claim,
    Comparison,
    Reading,
    Readings,
    Result,
    Side,
    check_same_work,
    compare_measures,
    shown_value,
)
from benchmarks.joined import joined
from benchmarks.linear import digest_of, random_batches, start_again
from elastic_ext import ElasticDataLoader, ElasticTrainer

__all__ = [
    "FREE",
    "MOST_SECONDS",
    "NAMES",
    "Block",
    "Done",
    "Rank",
    "Task",
    "Training",
    "Trial",
    "cost_of_calls",
    "costs_of_steps",
    "costs_of_trials",
    "in_words",
    "main",
    "seconds_of_trial",
    "set_up",
    "sides_of_steps",
    "start_over",
    "training_rank",
    "trying_rank",
]

WayName = Literal["never", "always", "step", "auto"]
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
NUM_WARMING = 4  # steps, of which "auto" guards the first three
MIN_ROUNDS = 15
NUM_CALIBRATING = 3  # rounds
BUDGET_SECONDS = 22.0  # for each comparison, about
NUM_TRIALS = 3
ROOT = Path(__file__).resolve().parent.parent
SECONDS_TO_START = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is trained, and how."""

    widths: tuple[int, ...]
    """Of the layers, from the inputs to the outputs."""
    num_samples: int
    """Of a step, on each rank."""
    num_micro_steps: int = 1


TINY = Task(widths=(8, 8), num_samples=8)
NUM_OF_TINY = 240  # steps in a block
MOST_SECONDS = 10e-6  # 1% of a step of a millisecond
LARGE = Task(widths=(512, 1024, 1024, 1024, 1024, 1024, 512), num_samples=64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """Which rank a process is, and where it finds the others."""

    rank: int
    world_size: int
    port: int
    folder: Path
    task: Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Train from the beginning for so many steps, in one of the ways."""

    way: WayName
    num_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Make a training, and take one step from the beginning, after as many as it takes to warm up."""

    has_failure: bool
    """The step is begun in one micro-batch, for which memory does not suffice; else it is in two from the start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What a rank made of some steps; moments are of the clock that all processes of a machine share."""

    began: float
    ended: float
    cpu_seconds: float
    """Of all its threads."""
    failed: float | None
    """When memory ran out on this rank."""
    step_seconds: float
    """Of a step before them, where steps came before."""
    work: tuple[int, str]
    """Steps, and a digest of the parameters and buffers that they led to."""


def main() -> list[Result]:
    """Four tables of steps by ranks and micro-steps, one of calls, and one of steps that come again by ranks."""
    torch.set_num_threads(1)
    steps = [
        table
        for num_ranks, num_micro_steps in itertools.product((1, 2), (1, 4))
        for table in costs_of_steps(dataclasses.replace(LARGE, num_micro_steps=num_micro_steps), num_ranks)
    ]
    return [*steps, cost_of_calls(), *(costs_of_trials(LARGE, num_ranks) for num_ranks in (1, 2))]


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


def cost_of_calls(*, budget_seconds: float = BUDGET_SECONDS) -> DifferenceTable:
    """run() where nothing is guarded, by what it takes more than step()."""
    with tempfile.TemporaryDirectory() as folder, set_up(TINY, 1, Path(folder)) as (setup,), ExitStack() as stack:

        def side(name: WayName) -> Side:
            training = stack.enter_context(Training(setup, TINY, name, job=name))
            training.run(NUM_WARMING)

            def run() -> Reading:
                done = training.run(NUM_OF_TINY)
                return Reading(value=done.cpu_seconds / NUM_OF_TINY, work=done.work)

            return Side(name=NAMES[name], run=run)

        sides = [side(name) for name in PAIRS["not guarded"]]
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
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
    begin = [sys.executable, "-c", "from benchmarks.guard import begin_anew; begin_anew()"]
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


def begin_anew() -> None:
    """What such a process does: it hears which rank it is, takes the step, and says what came of it."""
    setup: Rank = pickle.load(sys.stdin.buffer)
    with _placed(setup), Training(setup, _halved(setup.task), "always", job="anew") as training:
        done = training.run(1)
    sys.stdout.buffer.write(pickle.dumps(done))


# --- ranks ----------------------------------------------------------------------------------------------------------


@contextmanager
def training_rank(setup: Rank) -> Iterator[Callable[[Block], Done]]:
    """A rank with a training for each way, made before anything is timed."""
    with _placed(setup), ExitStack() as stack:
        trainings = {way: stack.enter_context(Training(setup, setup.task, way, job=way)) for way in NAMES}
        for training in trainings.values():
            training.run(NUM_WARMING)
        gc.collect()
        gc.freeze()

        def take(block: Block) -> Done:
            trainings[block.way].run(1)  # its memory is at hand then, whichever training came before
            return trainings[block.way].run(block.num_steps)

        yield take


@contextmanager
def trying_rank(setup: Rank) -> Iterator[Callable[[Trial], Done]]:
    """A rank that makes a training for each trial."""
    logging.getLogger("elastic_ext").setLevel(logging.ERROR)  # failures are planted: no news
    numbers = itertools.count()

    def take(trial: Trial) -> Done:
        task = setup.task if trial.has_failure else _halved(setup.task)
        with Training(setup, task, "always", job=f"trial-{next(numbers)}") as training:
            before = training.run(NUM_WARMING)
            training.planted.is_armed = trial.has_failure and setup.rank == 0
            done = training.run(1)
        return dataclasses.replace(done, step_seconds=before.step_seconds)

    with _placed(setup):
        yield take


@contextmanager
def set_up(task: Task, num_ranks: int, folder: Path) -> Iterator[list[Rank]]:
    """All ranks of one group, and the store by which they find each other."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield [
        Rank(rank=rank, world_size=num_ranks, port=store.port, folder=folder, task=task) for rank in range(num_ranks)
    ]


@contextmanager
def _placed(setup: Rank) -> Iterator[None]:
    torch.set_num_threads(1)
    with ExitStack() as stack:
        if setup.world_size > 1:
            stack.enter_context(joined(rank=setup.rank, world_size=setup.world_size, port=setup.port))
        yield


# --- training -------------------------------------------------------------------------------------------------------


class Planted(nn.Module):
    """Hands on what it is given; memory runs out where it is to have a gradient, once, if it is armed."""

    def __init__(self) -> None:
        super().__init__()
        self.is_armed = False
        self.failed: float | None = None
        """When."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.is_armed:
            inputs.register_hook(self._fail)  # type: ignore[no-untyped-call]
        return inputs

    def _fail(self, gradient: torch.Tensor) -> None:
        self.is_armed = False
        self.failed = time.monotonic()
        raise torch.OutOfMemoryError("CUDA out of memory. (planted)")


class Samples:
    """As many as a step takes, over and over; a batch is made of them at once."""

    def __init__(self, task: Task, num_ranks: int) -> None:
        self._num_samples = task.num_samples * num_ranks
        ((self._inputs, self._targets),) = random_batches(task.widths, self._num_samples, 1, seed=0)

    def __len__(self) -> int:
        return self._num_samples << 20

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [index % self._num_samples for index in indices]
        return self._inputs[rows], self._targets[rows]


class Training:
    """One rank's, of steps that are taken in one of the ways."""

    def __init__(self, setup: Rank, task: Task, way: WayName, *, job: str) -> None:
        self.planted = Planted()
        self._is_shared = setup.world_size > 1
        plain = _model(task.widths, self.planted)
        self.model: nn.Module = DistributedDataParallel(plain) if self._is_shared else plain
        samples = Samples(task, setup.world_size)
        micro_batch = task.num_samples // task.num_micro_steps
        loader: Any = ElasticDataLoader(samples, micro_batch, collate_fn=lambda batch: batch)
        self.trainer = ElasticTrainer(
            self.model,
            loader,
            global_batch_size=task.num_samples * setup.world_size,
            guard="auto" if way == "step" else way,
            job=job,
            run_dir=setup.folder / job,
            progress=False,
        )
        self._optimizer = self.trainer.prepare(SGD(plain.parameters(), lr=0.01))
        self._state = [tensor.detach() for tensor in (*plain.parameters(), *plain.buffers())]
        self._start = [tensor.clone() for tensor in self._state]
        self._batches = iter(loader)
        self._take = self._entered if way == "step" else self._called

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *error: object) -> None:
        self.trainer.__exit__(*error)  # type: ignore[arg-type]

    def run(self, num_steps: int) -> Done:
        """Take so many steps from the beginning."""
        start_again(self._state, self._start)
        gc.collect()
        if self._is_shared:
            dist.barrier()
        trainer, take = self.trainer, self._take
        last = trainer.global_step + num_steps
        began, cpu_began = time.monotonic(), time.process_time()
        for batch in self._batches:
            take(*batch)
            if trainer.global_step == last:
                break
        ended, cpu_ended = time.monotonic(), time.process_time()
        return Done(
            began=began,
            ended=ended,
            cpu_seconds=cpu_ended - cpu_began,
            failed=self.planted.failed,
            step_seconds=(ended - began) / num_steps,
            work=(num_steps, digest_of(self._state)),
        )

    def _called(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.trainer.run(self._micro_step, inputs, targets)

    def _entered(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        with self.trainer.step():
            self._micro_step(inputs, targets)

    def _micro_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        mse_loss(self.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()


def _model(widths: Sequence[int], planted: Planted) -> nn.Sequential:
    """Layers with BatchNorm between them, and what can fail in their middle."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width, following in itertools.pairwise(widths):
        layers += [nn.Linear(width, following), nn.BatchNorm1d(following), nn.ReLU()]
    layers.pop()  # outputs may be negative
    layers.insert(len(layers) // 2, planted)
    return nn.Sequential(*layers)


def _halved(task: Task) -> Task:
    """The same steps in micro-batches half as large."""
    return dataclasses.replace(task, num_micro_steps=2 * task.num_micro_steps)


def _ranks_in_words(num_ranks: int) -> str:
    return "one rank" if num_ranks == 1 else f"DDP on {num_ranks} ranks"
