"""What resuming far into a very large shuffled epoch costs, in time and in memory, beside torch's and torchdata's.

Time: from a saved state to the first batch of a new loader, at 0.8 of 10 million samples, beside torchdata's
StatefulDataLoader, which saves states of its own; each gives the samples that the loader gave next which was saved.
ElasticDataLoader is at least 50 times as fast.

Memory: what a process needs more, at its peak, to make a loader and take a few batches at 0.8 of an epoch, and how long
that takes. Torch's DataLoader skips what lies before as it can: in its sampler. It is run at 10 million samples alone,
as it keeps all their indices in a list.
"""

from __future__ import annotations

import gc
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import RandomSampler

from benchmarks.gang import Gang
from benchmarks.harness import (
    Claim,
    Comparison,
    Reading,
    Readings,
    Result,
    Side,
    UnlikeWorkError,
    compare,
    comparison_of,
    run_rounds,
    shown_value,
)
from benchmarks.loader_speed import NAMES, LoaderName, Tiny, make_loader, without_advice

__all__ = ["Measured", "Seen", "main", "measuring", "measuring_process", "resume_of", "resuming"]

NUM_SAMPLES = 10_000_000
BATCH_SIZE = 1000
AT = 0.8  # of the epoch
NUM_TAKEN = 4  # batches, where memory is measured
NUM_ROUNDS = 3  # ratios are far from what is claimed
CLAIM = Claim(at_most=1 / 50)


def main(share: float = 1.0) -> list[Result]:
    """Times of resumes without workers and with two; unless time is short, memory and time by the number of samples."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        without_advice()
        resumes = [resuming(NUM_SAMPLES, num_workers, num_rounds=NUM_ROUNDS) for num_workers in (0, 2)]
    if share < 1:
        return [*resumes]
    many = [NUM_SAMPLES * times for times in (1, 10, 100)]
    return [*resumes, *measuring(NUM_SAMPLES, many, num_rounds=NUM_ROUNDS)]


class Whole(Tiny):
    """The same, a batch at once: what a loader takes for itself is not lost in what samples take."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


# --- time -----------------------------------------------------------------------------------------------------------


def resuming(num_samples: int, num_workers: int, *, num_rounds: int) -> Comparison:
    """The time from a saved state to the first batch of a new loader."""
    resumes = compare(
        f"From a state at {AT:g} of {num_samples:,} samples to the next batch, {num_workers} workers",
        [
            Side(
                name=NAMES[name],
                run=resume_of(name, num_samples, num_workers),
                claim=CLAIM if name == "ours" else None,
            )
            for name in ("stateful", "ours")
        ],
        num_rounds=num_rounds,
        num_warmup_rounds=0,
    )
    stateful, ours = resumes.rows
    return replace(resumes, notes=(f"{stateful.name} takes {1 / ours.ratio:,.0f} times as long",))


def resume_of(name: LoaderName, num_samples: int, num_workers: int) -> Callable[[], Reading]:
    """What resumes a loader of that name where another has come that far; torchdata wants as many workers as it had."""

    def new_loader() -> Any:
        return make_loader(name, Whole(num_samples), BATCH_SIZE, shuffle=True, num_workers=num_workers)

    loader = new_loader()
    batches = iter(loader)
    for _ in range(int(AT * num_samples) // BATCH_SIZE):
        next(batches)
    state = loader.state_dict()
    expected = next(batches)

    def resume() -> Reading:
        began = time.perf_counter()
        resumed = new_loader()
        resumed.load_state_dict(state)
        batches = iter(resumed)
        first = next(batches)
        taken_seconds = time.perf_counter() - began
        if not torch.equal(first, expected):
            raise UnlikeWorkError(f"{NAMES[name]} went on with {first[:5].tolist()}, not {expected[:5].tolist()}")
        return Reading(value=taken_seconds, work=len(first))

    return resume


# --- memory ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a process is to do: take batches of a new loader far into an epoch."""

    name: LoaderName
    num_samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What that took."""

    peak_bytes: int
    """That it had more than before."""
    seconds: float
    """Until the first batch."""
    num_taken: int
    """Samples, each another one of the dataset's."""


def measuring(num_of_torch: int, nums_of_ours: Sequence[int], *, num_rounds: int) -> list[Comparison]:
    """Memory and time, each in a process of its own; torch's DataLoader is the baseline whatever ours is given."""
    memory = f"More memory, at its peak, for {NUM_TAKEN} batches at {AT:g} of an epoch"
    seconds = f"From no loader to the first batch at {AT:g} of an epoch"
    measured = [Measured(name="torch", num_samples=num_of_torch)]
    measured += [Measured(name="ours", num_samples=number) for number in nums_of_ours]
    sides = [Side(name=f"{NAMES[each.name]}, {each.num_samples:,} samples", run=_asked(each)) for each in measured]

    def read(side: Side) -> Readings:
        seen = side.run()
        assert isinstance(seen, Seen)
        return Readings(values={memory: seen.peak_bytes, seconds: seen.seconds}, work=seen.num_taken)

    readings = run_rounds(sides, read, num_rounds=num_rounds, num_warmup_rounds=0)
    in_bytes = comparison_of(memory, sides, readings, unit="bytes")
    per_sample = in_bytes.rows[0].median / num_of_torch
    many = max(nums_of_ours)
    note = (
        f"torch's DataLoader: {per_sample:.0f} bytes a sample, {shown_value(per_sample * many, 'bytes')} for {many:,}"
    )
    return [replace(in_bytes, notes=(note,)), comparison_of(seconds, sides, readings)]


def _asked(measured: Measured) -> Callable[[], Seen]:
    def run() -> Seen:
        with Gang(measuring_process, [measured]) as gang:
            (seen,) = gang.ask(None)
        return seen

    return run


@contextmanager
def measuring_process(measured: Measured) -> Iterator[Callable[[None], Seen]]:
    """A process that has loaded everything but a dataset."""
    torch.set_num_threads(1)
    next(iter(make_loader(measured.name, Tiny(BATCH_SIZE), BATCH_SIZE, shuffle=True)))
    yield lambda _: _seen(measured)


def _seen(measured: Measured) -> Seen:
    gc.collect()
    bytes_before = _memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
    began = time.perf_counter()
    batches = _batches_at(measured, int(AT * measured.num_samples))
    taken = [next(batches)]
    seconds = time.perf_counter() - began
    taken += islice(batches, NUM_TAKEN - 1)
    peak_bytes = _memory_bytes("VmHWM") - bytes_before
    indices = {index for batch in taken for index in batch.tolist()}
    if not 0 <= min(indices) <= max(indices) < measured.num_samples:
        raise UnlikeWorkError(f"{min(indices)} to {max(indices)} are not within {measured.num_samples} samples")
    return Seen(peak_bytes=peak_bytes, seconds=seconds, num_taken=len(indices))


def _batches_at(measured: Measured, position: int) -> Iterator[Any]:
    dataset = Whole(measured.num_samples)
    if measured.name == "torch":
        sampler = islice(RandomSampler(dataset), position, None)
        return iter(make_loader("torch", dataset, BATCH_SIZE, sampler=sampler))
    loader = make_loader(measured.name, dataset, BATCH_SIZE, shuffle=True)
    loader.load_state_dict({**loader.state_dict(), "position": position})  # as one that came that far would save it
    return iter(loader)


def _memory_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024
