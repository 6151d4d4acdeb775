"""The ranks of benchmarks/reshard.py: each trains a model that is spread otherwise on the way, and one by hand."""

from __future__ import annotations

import ctypes
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.checkpoint_ranks import give_memory_back, number_in
from benchmarks.checkpoint_ways import WAYS
from benchmarks.joined import joined
from benchmarks.reshard_by_hand import (
    Gpt,
    Part,
    Task,
    Training,
    Way,
    full_digest,
    make_by_hand,
    make_model,
    make_optimizer,
    parts_of,
    rows_on,
    take_step,
    tensors_of,
)
from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.fsdp.reshard.sharded_model import Spread

__all__ = [
    "Arrive",
    "Change",
    "Done",
    "Keep",
    "Order",
    "Pair",
    "Rank",
    "Show",
    "Train",
    "Trained",
    "changing_rank",
    "digest_of",
]

_M_MMAP_THRESHOLD = -3  # of mallopt
_MAPPED_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """Which rank a process is, where it finds the others, and where it keeps what it saves."""

    rank: int
    world_size: int
    port: int
    storage: Path
    task: Task
    way: Way
    """How the model is spread at first."""
    gives_back: bool = False
    """Memory that is let go of goes back to the system at once, and what is held can be seen from outside."""


@dataclass(frozen=True, slots=True)
class Change:
    """Spread the model otherwise."""

    way: Way


@dataclass(frozen=True, slots=True)
class Keep:
    """Save it, with torch.distributed.checkpoint."""


@dataclass(frozen=True, slots=True)
class Show:
    """Tell what it is."""


@dataclass(frozen=True, slots=True)
class Arrive:
    """Begin anew with two models, one spread by hand and one that arrives there after some steps."""

    origin: Way
    way: Way


@dataclass(frozen=True, slots=True)
class Train:
    """Take some steps, from the same state each time."""

    num_steps: int
    is_by_hand: bool = False
    is_recorded: bool = False
    """What is exchanged is told, step by step, and no time."""
    goes_on: bool = False
    """From where the last ones led to."""


Order = Change | Keep | Show | Arrive | Train


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What a rank made of an order."""

    seconds: float = 0.0
    """Of a change or a save; of a step, in the mean."""
    sent_bytes: int = 0
    """By this rank, to others, as it was handed to the collective."""
    num_letters: int = 0
    """To other ranks, of which each has a tail."""
    least_bytes: int = 0
    """What it lacks of its new rows, which others have to send."""
    peak_bytes: int = 0
    """By how much more memory lay in the process at once than before or after, whichever was more."""
    wiring_seconds: float = 0.0
    moving_seconds: float = 0.0
    losses: tuple[float, ...] = ()
    exchanged: tuple[str, ...] = ()
    path: Path | None = None
    parts: Mapping[str, Part] = field(default_factory=dict)


@contextmanager
def changing_rank(setup: Rank) -> Iterator[Callable[[Order], Done]]:
    """A rank that has a model to train, and to spread otherwise."""
    if setup.gives_back:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
    with joined(rank=setup.rank, world_size=setup.world_size, port=setup.port), WAYS["dcp"](setup.storage) as saving:
        trained = Trained(setup.task, setup.way)
        pair: Pair | None = None
        numbers = itertools.count(1)

        def answer(order: Order) -> Done:
            nonlocal pair
            if isinstance(order, Change):
                return trained.change(order.way)
            if isinstance(order, Keep):
                dist.barrier()
                began = time.perf_counter()
                path = saving.save(next(numbers), trained.model, trained.optimizer)
                dist.barrier()
                return Done(seconds=time.perf_counter() - began, path=path)
            if isinstance(order, Show):
                return Done(parts=parts_of(trained.model, trained.optimizer))
            if isinstance(order, Arrive):
                if pair is not None:
                    pair.close()
                pair = None  # before the next one takes memory
                pair = Pair(setup.task, order.origin, order.way)
                return Done()
            if order.goes_on:
                return trained.train(order.num_steps)
            assert pair is not None
            return pair.train(order)

        try:
            yield answer
        finally:
            trained.close()
            if pair is not None:
                pair.close()


class Trained:
    """A model in training whose plan can be changed."""

    def __init__(self, task: Task, way: Way) -> None:
        self.model: Gpt = make_model(task)
        self._task = task
        self._way = way
        self._spread = Spread(self.model, num_local=dist.get_world_size())
        self._spread.put_on(_plan_of(way))
        self.optimizer = make_optimizer(self.model)
        self._num_steps = 0

    @property
    def training(self) -> Training:
        return Training(self.model, self.model, self.optimizer)

    def train(self, num_steps: int) -> Done:
        """Go on."""
        began = time.perf_counter()
        numbers = range(self._num_steps, self._num_steps + num_steps)
        losses = tuple(take_step(self.training, self._task, number) for number in numbers)
        self._num_steps += num_steps
        return Done(seconds=(time.perf_counter() - began) / num_steps, losses=losses)

    def change(self, way: Way) -> Done:
        """As the trainer does between two steps, with all that has to be found out for it."""
        plan, least_bytes = _plan_of(way), self._lacking(way)
        give_memory_back()
        dist.barrier()
        before_kib = number_in("/proc/self/status", "VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
        with _counting_sent() as sent:
            began = time.perf_counter()
            made, told = self._spread.transition(plan, [self.optimizer])
            assert made is not None, told
            prepared = self._spread.prepare(plan, [self.optimizer], [], []) if "spread" in made.steps else None
            moved = self._spread.change(made, prepared, _agree)
            seconds = time.perf_counter() - began
        peak_kib = number_in("/proc/self/status", "VmHWM")
        del prepared
        self._way = way
        give_memory_back()
        after_kib = number_in("/proc/self/status", "VmRSS")
        return Done(
            seconds=seconds,
            sent_bytes=sum(sent),
            num_letters=len(sent) * (dist.get_world_size() - 1),
            least_bytes=least_bytes,
            peak_bytes=(peak_kib - max(before_kib, after_kib)) * 1024,
            wiring_seconds=0.0 if moved is None else moved.wiring_seconds,
            moving_seconds=0.0 if moved is None else moved.moving_seconds,
        )

    def close(self) -> None:
        self._spread.close()

    def _lacking(self, way: Way) -> int:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        total = 0
        for _, tensor in tensors_of(self.model, self.optimizer):
            if tensor.dim():
                has, needs = (rows_on(rank, num_ranks, each, len(tensor)) for each in (self._way, way))
                common = max(0, min(has.stop, needs.stop) - max(has.start, needs.start))
                total += (len(needs) - common) * math.prod(tensor.shape[1:]) * tensor.element_size()
        return total


class Pair:
    """The same model twice, spread alike: by hand from the start, and by a change after some steps."""

    def __init__(self, task: Task, origin: Way, way: Way) -> None:
        self._task = task
        self._arrived = Trained(task, origin)
        self._arrived.train(2)
        self._arrived.change(way)
        self._by_hand = make_by_hand(make_model(task), way)
        self._start = [tensor.clone() for tensor in _locals(self._arrived.training)]
        for number in (0, 1):  # the first makes state, and after it DDP orders its buckets
            for training in (self._arrived.training, self._by_hand):
                take_step(training, task, number)
        shapes = [[tensor.shape for tensor in _locals(each)] for each in (self._arrived.training, self._by_hand)]
        assert shapes[0] == shapes[1], "they do not lie alike"

    def train(self, order: Train) -> Done:
        """Both begin where the change has led to."""
        training = self._by_hand if order.is_by_hand else self._arrived.training
        for tensor, start in zip(_locals(training), self._start, strict=True):
            tensor.copy_(start)
        dist.barrier()
        losses: list[float] = []
        if order.is_recorded:
            with _Recording() as seen:
                losses += (take_step(training, self._task, number) for number in range(order.num_steps))
            return Done(losses=tuple(losses), exchanged=tuple(seen.exchanged))
        began = time.perf_counter()
        losses += (take_step(training, self._task, number) for number in range(order.num_steps))
        seconds = (time.perf_counter() - began) / order.num_steps
        return Done(seconds=seconds, losses=tuple(losses), parts=parts_of(training.model, training.optimizer))

    def close(self) -> None:
        self._arrived.close()


def _plan_of(way: Way) -> ParallelPlan:
    return ParallelPlan(
        strategy=way.strategy,
        shard_degree=way.shard_degree,
        unit=way.unit,
        activation_checkpoint="all" if way.is_recomputed else "none",
    )


def _agree(error: BaseException | None) -> None:
    failed = torch.tensor([int(error is not None)])
    dist.all_reduce(failed)
    if failed.item():
        raise RuntimeError("a rank has failed") from error


@contextmanager
def _counting_sent() -> Iterator[list[int]]:
    """What each all_to_all_single is given for other ranks, in bytes."""
    sent: list[int] = []
    exchange = dist.all_to_all_single

    def counted(
        output: torch.Tensor, input: torch.Tensor, taken: Sequence[int], given: Sequence[int], **options: Any
    ) -> Any:
        own = dist.get_rank(options.get("group"))
        sent.append(sum(size for rank, size in enumerate(given) if rank != own) * input.element_size())
        return exchange(output, input, list(taken), list(given), **options)

    dist.all_to_all_single = counted  # type: ignore[assignment]
    try:
        yield sent
    finally:
        dist.all_to_all_single = exchange


def _locals(training: Training) -> list[torch.Tensor]:
    """The memory of all state on this rank."""
    tensors = (tensor for _, tensor in tensors_of(training.model, training.optimizer))
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The collectives in their order, each with the shapes and types of what it was given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.exchanged: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            told = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in given)
            self.exchanged.append(f"{func}: {told}")
        return func(*args, **(kwargs or {}))


def digest_of(answers: Sequence[Done]) -> str:
    """Of the full state that all ranks told."""
    return full_digest([done.parts for done in answers])
