"""Which simulated jobs there are: seeds to develop a search on, and seeds to report with, which are not looked at
before, and what may happen to a job while it trains. Frozen: nothing here is changed after a search has been seen.

A job is tried where it has a safe point to begin with, and where a step by the best point takes neither less than a
fiftieth of a second nor more than twenty seconds; others are passed over, by this rule and no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.simulated_job import SimulatedJob
from benchmarks.simulated_time import Circumstances

__all__ = ["CHANGES", "DEVELOPMENT_SEEDS", "REPORT_SEEDS", "is_tried", "seeds_tried"]

DEVELOPMENT_SEEDS: Sequence[int] = range(1000, 2000)
REPORT_SEEDS: Sequence[int] = tuple(5_000_000 + 97 * number for number in range(96))
LEAST_SECONDS, MOST_SECONDS = 0.02, 20.0
CHANGES: Mapping[str, Circumstances] = {
    "links an eighth as fast": Circumstances(link=1 / 8),
    "loading six times as long": Circumstances(loading=6.0),
    "one rank 1.5 times as slow": Circumstances(slow_rank=1.5),
}


def is_tried(job: SimulatedJob) -> bool:
    """Whether it has a safe start, and steps of a length at which such models are trained."""
    oracle = job.oracle
    return job.has_start and oracle is not None and LEAST_SECONDS <= job.true_step_seconds(oracle) <= MOST_SECONDS


def seeds_tried(seeds: Sequence[int], most: int) -> Iterator[int]:
    """The first so many of them whose jobs are tried."""
    found = 0
    for seed in seeds:
        if found == most:
            return
        if is_tried(SimulatedJob(seed)):
            found += 1
            yield seed
