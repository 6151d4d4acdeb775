"""The ranks of benchmarks/checkpoint_save.py: each holds a state to save, and trains a small model beside it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from benchmarks.checkpoint_ranks import (
    Part,
    Rank,
    Task,
    draw_values,
    give_memory_back,
    make_training,
    number_in,
    parts_of,
    tensors_of,
)
from benchmarks.checkpoint_ways import BACKGROUND_WAYS, BackgroundName, BackgroundWay, locals_of
from benchmarks.joined import joined

__all__ = [
    "Answer",
    "Held",
    "Load",
    "Order",
    "Prepare",
    "Prepared",
    "Save",
    "Saved",
    "Show",
    "Train",
    "Trained",
    "saving_rank",
]

LOOP = Task(num_blocks=2, width=128, num_words=1000)
WORDS_SHAPE = (4, 64)  # of a micro-batch: sequences, words of each
NUM_WARMUP_STEPS = 3
MOST_STEPS = 2000  # while a save goes on


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make a way, and do what it can before the first save; train meanwhile."""

    way: BackgroundName
    num_steps: int


@dataclass(frozen=True, slots=True)
class Save:
    """Save, and wait until it is durable."""

    way: BackgroundName
    step: int
    """Not saved before in this way."""
    changes: bool
    """All tensors change as soon as they may, and are as before when all is done."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load into a model and an optimizer that hold other values."""

    way: BackgroundName
    path: Path


@dataclass(frozen=True, slots=True)
class Show:
    """Tell what is saved."""


@dataclass(frozen=True, slots=True)
class Train:
    """Train without a save, then save and train until that is durable."""

    way: BackgroundName | None
    """None for no save: training goes on as it is."""
    step: int
    num_quiet_steps: int


Order = Prepare | Save | Load | Show | Train


@dataclass(frozen=True, slots=True)
class Prepared:
    resident_bytes: int
    """In memory before the way was made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """What a save took on a rank."""

    path: Path
    blocked_seconds: float
    """Until training might go on."""
    durable_seconds: float
    """From the same moment."""
    cpu_seconds: float
    """Of all threads, and of processes of its own."""
    extra_bytes: int
    """By how much more memory lay in the process, and in its own processes, at once than before."""
    resident_bytes: int
    """In memory afterwards."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank has of the state."""

    parts: Mapping[str, Part]
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """How long steps took on a rank."""

    quiet_seconds: Sequence[float]
    """Of each before the save."""
    blocked_seconds: float = 0.0
    busy_seconds: Sequence[float] = field(default_factory=tuple)
    """Of each while it went on."""
    path: Path | None = None

    @property
    def lost_seconds(self) -> float:
        """How much later than without a save the same steps were done."""
        return self.blocked_seconds + sum(self.busy_seconds) - len(self.busy_seconds) * mean(self.quiet_seconds)


Answer = Prepared | Saved | Held | Trained


@contextmanager
def saving_rank(setup: Rank) -> Iterator[Callable[[Order], Answer]]:
    """A rank with a state to save, in ways that are made when they are first asked for."""
    with joined(rank=setup.rank, world_size=setup.world_size, port=setup.port), ExitStack() as stack:
        yield _Saving(setup, init_device_mesh("cpu", (setup.world_size,)), stack).answer


class _Saving:
    def __init__(self, setup: Rank, mesh: DeviceMesh, stack: ExitStack) -> None:
        self._setup, self._mesh, self._stack = setup, mesh, stack
        self._model, self._optimizer = make_training(setup.task, mesh)
        draw_values(self._model, self._optimizer)
        self._loop = _Loop(mesh)
        self._ways: dict[BackgroundName, BackgroundWay] = {}

    def answer(self, order: Order) -> Answer:
        if isinstance(order, Prepare):
            return self._prepare(order)
        if isinstance(order, Save):
            return self._save(order)
        if isinstance(order, Train):
            return self._train(order)
        if isinstance(order, Show):
            return _held(self._model, self._optimizer)
        others = make_training(self._setup.task, self._mesh)
        self._way(order.way).load(order.path, *others)
        return _held(*others)

    def _prepare(self, order: Prepare) -> Prepared:
        self._loop.take(NUM_WARMUP_STEPS)
        _settle()
        before = _resident_bytes(_own_processes())
        self._way(order.way)
        self._loop.take(order.num_steps)
        return Prepared(before)

    def _save(self, order: Save) -> Saved:
        way = self._way(order.way)
        _settle()
        before = _own_processes()
        for process in before:
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # the peak is counted from here on
        resident, cpu = _resident_bytes(before), _cpu_seconds(before)
        began = time.perf_counter()
        path = way.begin(order.step, self._model, self._optimizer)
        blocked = time.perf_counter() - began
        if order.changes:
            self._turn()
        way.finish()
        durable = time.perf_counter() - began
        after = _own_processes()
        cpu, peak = _cpu_seconds(after) - cpu, _sum_of(after, "VmHWM")
        if order.changes:
            self._turn()
        _settle()
        return Saved(
            path=path,
            blocked_seconds=blocked,
            durable_seconds=durable,
            cpu_seconds=cpu,
            extra_bytes=max(peak - resident, 0),
            resident_bytes=_resident_bytes(after),
        )

    def _train(self, order: Train) -> Trained:
        _settle()
        self._loop.take(NUM_WARMUP_STEPS)
        quiet = self._loop.take(order.num_quiet_steps)
        if order.way is None:
            return Trained(quiet_seconds=quiet, busy_seconds=self._loop.take(order.num_quiet_steps))
        way = self._way(order.way)
        began = time.perf_counter()
        path = way.begin(order.step, self._model, self._optimizer)
        blocked = time.perf_counter() - began
        busy = self._loop.take(1)
        while way.is_saving() and len(busy) < MOST_STEPS:
            busy += self._loop.take(1)
        way.finish()
        return Trained(quiet_seconds=quiet, blocked_seconds=blocked, busy_seconds=busy, path=path)

    def _way(self, name: BackgroundName) -> BackgroundWay:
        if name not in self._ways:
            self._ways[name] = self._stack.enter_context(BACKGROUND_WAYS[name](self._setup.storage))
            self._ways[name].prepare(self._model, self._optimizer)
        return self._ways[name]

    def _turn(self) -> None:
        """Give every number the other sign; twice is exactly as before."""
        for tensor in locals_of(self._model, self._optimizer):
            tensor.neg_()


class _Loop:
    """A small model in training, sharded over all ranks."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._model, self._optimizer = make_training(LOOP, mesh)
        draw_values(self._model, self._optimizer)
        self._seeds = itertools.count()

    def take(self, num_steps: int) -> list[float]:
        """How long each of so many steps takes."""
        return [self._step() for _ in range(num_steps)]

    def _step(self) -> float:
        draw = torch.Generator().manual_seed(next(self._seeds))
        words = torch.randint(LOOP.num_words, WORDS_SHAPE, generator=draw)
        began = time.perf_counter()
        self._optimizer.zero_grad()
        self._model(words).square().mean().backward()
        self._optimizer.step()
        return time.perf_counter() - began


def _held(model: nn.Module, optimizer: Optimizer) -> Held:
    num_bytes = sum(tensor.nbytes for tensor in locals_of(model, optimizer))
    return Held(parts_of(dict(tensors_of(model, optimizer))), num_bytes)


def _settle() -> None:
    """All ranks begin together, and none finds memory that it kept for nothing."""
    give_memory_back()
    dist.barrier()


def _own_processes() -> list[psutil.Process]:
    this = psutil.Process()
    return [this, *this.children(recursive=True)]


def _cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    children = [each.cpu_times() for each in processes[1:]]
    return time.process_time() + sum(times.user + times.system for times in children)


def _resident_bytes(processes: Sequence[psutil.Process]) -> int:
    return _sum_of(processes, "VmRSS")


def _sum_of(processes: Sequence[psutil.Process], what: str) -> int:
    return 1024 * sum(number_in(f"/proc/{each.pid}/status", what) for each in processes)
