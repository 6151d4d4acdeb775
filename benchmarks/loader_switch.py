"""How long a loop waits for a batch where workers and batch size change, beside making torch's DataLoader anew.

A consumer takes as long for each batch; in the middle of an epoch 4 workers become 6, and batches of 8 samples 12.
Read is by how much the longest time between two batches is more than that: a wait, what is done for the change itself,
and what keeps the consumer from going on. Workers need half of its time, before and after, and sleep for that, as those
that wait for storage do. ElasticDataLoader is told as a trainer tells it. Torch's is made anew with what is left of the
order, and the old one is let go once the new workers are at work.

The live change waits at most 0.05 times as long, and at most one sample's time longer than where nothing changes.

Not measured: datasets that take long to open, which each new worker does again where they are not forked.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from benchmarks.differences import Differences, DifferenceTable
from benchmarks.harness import (
    Claim,
    Readings,
    Result,
    Side,
    UnlikeWorkError,
    bootstrap_interval,
    comparison_of,
    run_rounds,
    shortened,
)
from benchmarks.loader_speed import without_advice
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.data.batch_plan import BatchPlan
from elastic_ext.data.loader import ElasticDataLoader

__all__ = ["SWITCH", "Change", "Switch", "compared", "main", "waits_live", "waits_made_anew"]

Change = Literal["workers", "batch size"]
CHANGES: tuple[tuple[Change, ...], ...] = (("workers", "batch size"), ("workers",), ("batch size",))
NUM_ROUNDS = 7
CLAIM = Claim(at_most=0.05)


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """An epoch whose settings change in the middle: a pair is what they are before and after."""

    num_workers: tuple[int, int]
    batch_size: tuple[int, int]
    num_batches: tuple[int, int]
    sample_seconds: float
    """What a sample takes a worker."""
    consumer_seconds: float
    """What a batch takes whoever asked for it."""

    @property
    def num_samples(self) -> int:
        return sum(size * num for size, num in zip(self.batch_size, self.num_batches, strict=True))


SWITCH = Switch(
    num_workers=(4, 6), batch_size=(8, 12), num_batches=(5, 20), sample_seconds=0.010, consumer_seconds=0.040
)


class Slow(Dataset[tuple[int, int]]):
    """Samples that take their time, each with the worker that made it."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch

    def __len__(self) -> int:
        return self._switch.num_samples

    def __getitem__(self, index: int) -> tuple[int, int]:
        time.sleep(self._switch.sample_seconds)
        info = get_worker_info()
        return index, -1 if info is None else info.id


def main(share: float = 1.0) -> list[Result]:
    """The longest waits, as ratios to making the loader anew and as differences from no change."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    with warnings.catch_warnings():
        without_advice()
        return compared(SWITCH, num_rounds=shortened(NUM_ROUNDS, share, least=3))


def compared(switch: Switch, *, num_rounds: int) -> list[Result]:
    """A table of ratios and one of differences, out of the same rounds."""
    unchanged = Side(name="no change", run=partial(waits_live, switch, ()))
    anew = Side(name="torch's DataLoader, made anew", run=partial(waits_made_anew, switch))
    again = Side(name="torch's DataLoader, made anew again", run=partial(waits_made_anew, switch))
    live = [
        Side(name=f"live: {' and '.join(changes)}", run=partial(waits_live, switch, changes), claim=CLAIM)
        for changes in CHANGES
    ]
    workers, sizes = (f"{before} to {after}" for before, after in (switch.num_workers, switch.batch_size))
    what = f"The longest wait for a batch: {workers} workers, batches of {sizes} samples"

    def read(side: Side) -> Readings:
        gc.collect()
        waits: Any = side.run()
        return Readings(values={what: max(waits)}, work=switch.num_samples)

    sides = [unchanged, anew, again, *live]
    unchanged_again, *readings = run_rounds(sides, read, num_rounds=num_rounds)
    by_name = {side.name: mine for side, mine in zip(sides, readings, strict=True)}
    ratios = comparison_of(what, [anew, *live], [by_name[side.name] for side in (again, anew, *live)])
    least = [one[what] for one in by_name[unchanged.name]]

    def more(mine: Sequence[Mapping[str, float]]) -> list[float]:
        return [one[what] - other for one, other in zip(mine, least, strict=True)]

    rows = [
        Differences(
            name=side.name,
            values=[one[what] for one in by_name[side.name]],
            differences=more(by_name[side.name]),
            at_most=switch.sample_seconds if side in live else None,
        )
        for side in (unchanged, *live, anew)
    ]
    aa_interval = bootstrap_interval(more(unchanged_again))
    return [ratios, DifferenceTable(title=f"{what}, and no change", rows=tuple(rows), aa_interval=aa_interval)]


def waits_live(switch: Switch, changes: tuple[Change, ...]) -> list[float]:
    """How long each batch is waited for, in seconds, from where these settings of an ElasticDataLoader change."""
    before, after = (
        ElasticConfig.from_values({"dataloader.num_workers": number}, version=version)
        for version, number in enumerate(switch.num_workers, start=1)
    )
    loader = ElasticDataLoader(Slow(switch), switch.batch_size[0], shuffle=True, num_workers=switch.num_workers[0])
    loader.plan(_plan(switch.batch_size[0]), 0)

    def change(batches: Iterator[Any]) -> Iterator[Any]:
        if "workers" in changes:
            loader.apply(before, after)
        if "batch size" in changes:
            loader.plan(_plan(switch.batch_size[1]), 0)
        return batches

    taken = _taken(switch, iter(loader), change, loader.commit)
    found = (max(taken.workers) >= switch.num_workers[0], max(taken.sizes) == switch.batch_size[1])
    if found != ("workers" in changes, "batch size" in changes):
        raise UnlikeWorkError(f"asked to change {changes}; seen: workers {taken.workers}, batches of {taken.sizes}")
    return taken.waits


def waits_made_anew(switch: Switch) -> list[float]:
    """How long each batch is waited for, in seconds, from where torch's DataLoader is replaced."""
    dataset = Slow(switch)
    order: list[int] = torch.randperm(len(dataset)).tolist()

    def batches_from(place: int, which: int) -> Iterator[Any]:
        left: Any = order[place:]
        return iter(DataLoader(dataset, switch.batch_size[which], sampler=left, num_workers=switch.num_workers[which]))

    def change(_: Iterator[Any]) -> Iterator[Any]:
        return batches_from(switch.batch_size[0] * switch.num_batches[0], 1)

    return _taken(switch, batches_from(0, 0), change, lambda: None).waits


@dataclass(frozen=True, kw_only=True, slots=True)
class _Taken:
    """From the change on: how long each batch was waited for, their sizes, and who made their samples."""

    waits: list[float]
    sizes: list[int]
    workers: set[int]


def _taken(
    switch: Switch,
    batches: Iterator[Any],
    change: Callable[[Iterator[Any]], Iterator[Any]],
    commit: Callable[[], object],
) -> _Taken:
    """An epoch, consumed; ``change`` gives what it goes on with."""
    seen: list[int] = []
    taken = _Taken(waits=[], sizes=[], workers=set())
    ends_at = time.perf_counter()  # what is done with the batch before
    for number in count():
        if number == switch.num_batches[0]:
            batches = change(batches)
        batch = next(batches, None)
        came_at = time.perf_counter()
        if batch is None:
            break
        indices, workers = (part.tolist() for part in batch)
        seen += indices
        if number >= switch.num_batches[0]:
            taken.waits.append(came_at - ends_at)
            taken.sizes.append(len(indices))
            taken.workers.update(workers)
        commit()
        ends_at = came_at + switch.consumer_seconds
        time.sleep(max(ends_at - time.perf_counter(), 0.0))
    if sorted(seen) != list(range(switch.num_samples)):
        raise UnlikeWorkError(f"of {switch.num_samples} samples, {len(set(seen))} came, in {len(seen)} places")
    return taken


def _plan(batch_size: int) -> BatchPlan:
    return BatchPlan(global_batch=batch_size, num_ranks=1, micro_batch=batch_size)
