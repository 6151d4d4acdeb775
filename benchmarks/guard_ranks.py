"""What one rank does in benchmarks/guard.py: steps of a training in one of the ways, and steps that come again."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from benchmarks.joined import joined
from benchmarks.linear import digest_of, random_batches, start_again
from elastic_ext import ElasticDataLoader, ElasticTrainer, FollowOptions, StepOptions

__all__ = [
    "NUM_WARMING",
    "Block",
    "Done",
    "Rank",
    "Task",
    "Training",
    "Trial",
    "WayName",
    "begin_anew",
    "set_up",
    "training_rank",
    "trying_rank",
]

WayName = Literal["never", "always", "step", "auto"]
WAYS: tuple[WayName, ...] = get_args(WayName)
NUM_WARMING = 4  # steps, of which "auto" guards the first three


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is trained, and how."""

    widths: tuple[int, ...]
    """Of the layers, from the inputs to the outputs."""
    num_samples: int
    """Of a step, on each rank."""
    num_micro_steps: int = 1


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


# --- ranks ----------------------------------------------------------------------------------------------------------


@contextmanager
def training_rank(setup: Rank) -> Iterator[Callable[[Block], Done]]:
    """A rank with a training for each way, made before anything is timed."""
    with _placed(setup), ExitStack() as stack:
        trainings = {way: stack.enter_context(Training(setup, setup.task, way, job=way)) for way in WAYS}
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


def begin_anew() -> None:
    """What such a process does: it hears which rank it is, takes the step, and says what came of it."""
    setup: Rank = pickle.load(sys.stdin.buffer)
    with _placed(setup), Training(setup, _halved(setup.task), "always", job="anew") as training:
        done = training.run(1)
    sys.stdout.buffer.write(pickle.dumps(done))


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
            step_options=StepOptions(guard="auto" if way == "step" else way),
            follow_options=FollowOptions(job=job, run_dir=setup.folder / job, progress=False),
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
