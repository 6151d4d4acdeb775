"""How many batches come in a second, beside torch's DataLoader and torchdata's StatefulDataLoader.

All loaders have the same arguments. Tiny samples are shuffled, and read by whole epochs whose workers stay, so that
drawing an order counts, whether a loader does it beforehand or as it goes. Others are read in blocks out of a loop that
goes on: what was made while other sides ran is taken before the clock begins, and each block costs the same. Samples
that take long sleep: workers compete for no processor, as those that wait for storage do not.

Throughput is at least 0.95 of torch's for tiny samples, and for others no less than torch's.

Not measured: the first batch (benchmarks/loader_first.py), pinned memory, workers that are not forked.
"""

from __future__ import annotations

import gc
import random
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness import Reading, Result, Side, UnlikeWorkError
from benchmarks.rates import RateTable, compare_rates
from elastic_ext.data.loader import ElasticDataLoader

__all__ = [
    "NAMES",
    "SAMPLES",
    "Kind",
    "Large",
    "LoaderName",
    "Sleeping",
    "Tiny",
    "main",
    "make_loader",
    "sides_of",
    "skewed_costs",
    "without_advice",
]

LoaderName = Literal["torch", "ours", "stateful"]
NAMES: dict[LoaderName, str] = {
    "torch": "torch's DataLoader",
    "ours": "ElasticDataLoader",
    "stateful": "torchdata's StatefulDataLoader",
}
NUM_WORKERS = (0, 2, 4)
SECONDS = 10.0  # for each table, about
MIN_ROUNDS = 5
NUM_PERIODS = 1 << 20  # blocks until the dataset of a loop is over
AS_FAST = 1.0


class Tiny(Dataset[int]):
    """Samples that cost next to nothing."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> int:
        return index


class Sleeping(Dataset[int]):
    """Samples that take as many seconds as ``costs`` says, over and over."""

    def __init__(self, costs: Sequence[float]) -> None:
        self._costs = costs

    def __len__(self) -> int:
        return len(self._costs) * NUM_PERIODS

    def __getitem__(self, index: int) -> int:
        time.sleep(self._costs[index % len(self._costs)])
        return index


class Large(Dataset[tuple[int, torch.Tensor]]):
    """Samples of ``num_bytes``, which are in memory."""

    def __init__(self, period: int, num_bytes: int) -> None:
        self._period = period
        self._sample = torch.ones(num_bytes // 4)  # float32

    def __len__(self) -> int:
        return self._period * NUM_PERIODS

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self._sample


def even_costs(num_samples: int) -> list[float]:
    """5 to 10 ms."""
    draw = random.Random(0)
    return [draw.uniform(0.005, 0.010) for _ in range(num_samples)]


def skewed_costs(num_samples: int) -> list[float]:
    """2 ms, and ten times as much for one of eight."""
    costs = [0.020 if number % 8 == 0 else 0.002 for number in range(num_samples)]
    random.Random(0).shuffle(costs)
    return costs


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of samples, and how much of them is read at once."""

    name: str
    dataset: Callable[[int], Dataset[Any]]
    """Of so many samples: those of an epoch, or of a block, after which costs come again."""
    batch_size: int
    num_batches: int
    """That are timed: of an epoch; or of a block for each worker, with none for one."""
    is_in_epochs: bool = False
    at_least: float = AS_FAST


SAMPLES = (
    Kind(name="tiny samples", dataset=Tiny, batch_size=128, num_batches=625, is_in_epochs=True, at_least=0.95),
    Kind(name="samples of 5 to 10 ms", dataset=lambda n: Sleeping(even_costs(n)), batch_size=2, num_batches=10),
    Kind(
        name="samples of 2 ms, 1 of 8 of 20", dataset=lambda n: Sleeping(skewed_costs(n)), batch_size=4, num_batches=10
    ),
    Kind(name="samples of 4 MB", dataset=lambda n: Large(n, 4 << 20), batch_size=4, num_batches=10),
)


def main(share: float = 1.0) -> list[Result]:
    """A table for each kind of samples and number of workers."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    with warnings.catch_warnings():
        without_advice()
        return [
            table_of(kind, num_workers, budget_seconds=share * SECONDS)
            for kind in SAMPLES
            for num_workers in NUM_WORKERS
        ]


def without_advice() -> None:
    """Torch warns where workers are more than processors, which those that sleep may well be."""
    warnings.filterwarnings("ignore", message="This DataLoader will create")


def table_of(kind: Kind, num_workers: int, *, budget_seconds: float) -> RateTable:
    """The loaders at these settings."""
    with ExitStack() as stack:
        sides = sides_of(kind, num_workers, tuple(NAMES), stack)
        began = time.perf_counter()
        for side in (sides[0], *sides):
            side.run()
        seconds = time.perf_counter() - began
        return compare_rates(
            f"{kind.name}, batches of {kind.batch_size}, {num_workers} workers",
            "batches",
            sides,
            {NAMES["ours"]: kind.at_least},
            num_rounds=max(MIN_ROUNDS, round(budget_seconds / seconds) - 1),
        )


def sides_of(kind: Kind, num_workers: int, names: Sequence[LoaderName], stack: ExitStack) -> list[Side]:
    """Sides that read batches a second; their workers are gone when the stack is left."""
    read = _epochs if kind.is_in_epochs else _blocks
    return [Side(name=NAMES[name], run=read(name, kind, num_workers, stack)) for name in names]


def make_loader(name: LoaderName, dataset: Dataset[Any], batch_size: int, **arguments: Any) -> Any:
    """A loader of the library of that name."""
    if name == "torch":
        return DataLoader(dataset, batch_size, **arguments)
    if name == "ours":
        return ElasticDataLoader(dataset, batch_size, **arguments)
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # which it calls
        return StatefulDataLoader(dataset, batch_size, **arguments)


def _epochs(name: LoaderName, kind: Kind, num_workers: int, stack: ExitStack) -> Callable[[], Reading]:
    num_samples = kind.batch_size * kind.num_batches
    loader = make_loader(
        name,
        kind.dataset(num_samples),
        kind.batch_size,
        shuffle=True,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )
    kept = [loader]
    stack.callback(kept.clear)  # torch's workers end with the last of their loader
    del loader
    if sorted(index for batch in kept[0] for index in batch.tolist()) != list(range(num_samples)):
        raise UnlikeWorkError(f"{NAMES[name]}: an epoch of {num_samples} samples does not have each of them once")

    def run() -> Reading:
        num_batches = num_seen = 0
        began = time.perf_counter()
        for batch in kept[0]:
            num_batches += 1
            num_seen += len(batch)
        return Reading(value=num_batches / (time.perf_counter() - began), work=(num_batches, num_seen))

    return run


def _blocks(name: LoaderName, kind: Kind, num_workers: int, stack: ExitStack) -> Callable[[], Reading]:
    num_batches = kind.num_batches * max(num_workers, 1)
    num_before = 3 * num_workers  # two for each worker are ready, and one more each until all are at work
    period = kind.batch_size * (num_before + num_batches)
    batches = _without_end(make_loader(name, kind.dataset(period), kind.batch_size, num_workers=num_workers))
    stack.callback(batches.close)

    def run() -> Reading:
        seen: list[int] = []
        for _ in range(num_before):
            next(batches)
        began = time.perf_counter()
        for _ in range(num_batches):
            seen += _indices(next(batches)).tolist()
        rate = num_batches / (time.perf_counter() - began)
        return Reading(value=rate, work=tuple(index % period for index in seen))

    return run


def _without_end(loader: Any) -> Any:
    """A generator of its batches, epoch after epoch; closed, it leaves nothing."""
    while True:
        yield from loader


def _indices(batch: Any) -> torch.Tensor:
    indices: torch.Tensor = batch if isinstance(batch, torch.Tensor) else batch[0]
    return indices
