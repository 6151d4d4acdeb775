"""How long a loop takes from its beginning to its first batch, beside torch's DataLoader, where workers are forked.

Each loop has new workers, and samples cost nothing: what is read is starting them, and the way of one batch. A fork
takes longer the more memory the process has that forks, so there is a process that holds much, too.

Nothing is claimed: ElasticDataLoader's workers are forked from a process of their own, which is forked first.

Not measured: workers that are not forked, which take seconds to begin anywhere.
"""

from __future__ import annotations

import gc
import time
import warnings
from functools import partial
from typing import Any

import torch

from benchmarks.harness import Comparison, Reading, Result, Side, compare, shortened
from benchmarks.loader_speed import NAMES, LoaderName, Tiny, make_loader, without_advice

__all__ = ["compared", "first_batch", "main"]

NUM_WORKERS = (1, 2, 4)
HELD_BYTES = (0, 1 << 30)
NUM_ROUNDS = 15
BATCH_SIZE = 8


def main(share: float = 1.0) -> list[Result]:
    """A table for each number of workers, in a small process and in a large one."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    with warnings.catch_warnings():
        without_advice()
        return [
            compared(num_workers, num_bytes, num_rounds=shortened(NUM_ROUNDS, share, least=5))
            for num_bytes in HELD_BYTES
            for num_workers in NUM_WORKERS
        ]


def compared(num_workers: int, held_bytes: int, *, num_rounds: int) -> Comparison:
    """The loaders with so many workers, in a process that holds so much more memory than it needs."""
    held = torch.ones(held_bytes, dtype=torch.uint8)  # written, so that it is there
    sides = [Side(name=NAMES[name], run=partial(first_batch, name, num_workers)) for name in ("torch", "ours")]
    holding = f", {held.nbytes >> 20} MiB held" if held_bytes else ""
    return compare(f"The first batch of a loop, {num_workers} workers{holding}", sides, num_rounds=num_rounds)


def first_batch(name: LoaderName, num_workers: int) -> Reading:
    """Begin a loop, and leave it with its first batch."""
    dataset = Tiny(BATCH_SIZE * num_workers * 4)
    loader: Any = make_loader(name, dataset, BATCH_SIZE, num_workers=num_workers, multiprocessing_context="fork")
    began = time.perf_counter()
    batches = iter(loader)
    batch = next(batches)
    seconds = time.perf_counter() - began
    del batches  # its workers end before others begin
    return Reading(value=seconds, work=tuple(batch.tolist()))
