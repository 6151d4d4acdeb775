"""Workers come and go by the thousand while a loop goes on, and some are killed.

None dies that was neither told to end nor killed by the test, every sample comes once and in order, and what there is
of descriptors, threads and memory does not grow.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import psutil
import pytest

from elastic_ext.data.loader import ElasticDataLoader
from tests.support import pools
from tests.support.beating import until
from tests.support.loading import Numbers, changed
from tests.support.pools import WaitAt, gate, open_gate, warnings_in, worker_pids

pytestmark = pytest.mark.usefixtures("started_once", "nothing_left")

BATCH_SIZE = 4
MOST_WORKERS, MOST_AHEAD = 4, 3
MOST_BATCHES = 3  # between two changes
BATCHES_BETWEEN_KILLS = MOST_WORKERS * MOST_AHEAD  # no batch is under way at two: one over which three die is an error
MOST_GROWTH_BYTES = 4 << 20


@dataclass(frozen=True)
class Census:
    """How many there are, in this process and in the nursery, while one worker is there and none is on its way."""

    descriptors: int
    threads: int
    nursery_descriptors: int
    nursery_threads: int

    def is_within(self, other: Census) -> bool:
        return all(mine <= others for mine, others in zip(astuple(self), astuple(other), strict=True))


class Changing:
    """A loop over a loader whose workers change between its batches, and are killed at random."""

    def __init__(self, num_changes: int, seed: int) -> None:
        self.size = BATCH_SIZE * (MOST_BATCHES * num_changes + 20 * (MOST_WORKERS * MOST_AHEAD + 2))
        self.num_taken = 0
        """Samples, each of which was the one that follows the one before."""
        self.killed: set[int] = set()
        self._num_batches_since_kill = 0
        self._random = random.Random(seed)
        self._others = worker_pids()
        self._loader = ElasticDataLoader(Numbers(self.size), BATCH_SIZE, num_workers=1, collate_fn=pools.as_they_are)
        self._stream = iter(self._loader)

    def change(self) -> None:
        """Want another number of workers, perhaps kill one, and take some batches."""
        num_workers, prefetch_factor = self._random.randint(0, MOST_WORKERS), self._random.randint(1, MOST_AHEAD)
        changed(self._loader, num_workers=num_workers, prefetch_factor=prefetch_factor)
        if self._num_batches_since_kill >= BATCHES_BETWEEN_KILLS and self._random.random() < 0.2:
            self._kill_one()
        for _ in range(self._random.randint(0, MOST_BATCHES)):
            self._take()

    def settle(self) -> int:
        """Have one worker, who is ready; gives the nursery's pid."""
        changed(self._loader, num_workers=1, prefetch_factor=1)
        for _ in range(1 + MOST_WORKERS * MOST_AHEAD):  # what earlier workers had made ahead, and one
            self._take()
        until(self.is_settled)
        return psutil.Process(self._workers()[0]).ppid()

    def is_settled(self) -> bool:
        """Whether there is one worker, who is ready; those that become ready are too many, and told to end here."""
        return self._loader.is_settled and len(self._workers()) == 1

    def finish(self) -> None:
        """Come to the end of the epoch."""
        while self.num_taken < self.size:
            self._take()
        assert next(self._stream, None) is None

    def deaths_by_others(self, warnings: Sequence[str]) -> list[str]:
        """What warnings say of workers that this has not killed, and all that they say of something else."""
        deaths = [(re.search(r"pid (\d+) was killed by SIGKILL", each), each) for each in warnings]
        return [each for death, each in deaths if death is None or int(death[1]) not in self.killed]

    def _take(self) -> None:
        batch = [index for index, _ in next(self._stream)]
        assert batch == list(range(self.num_taken, self.num_taken + BATCH_SIZE))
        self.num_taken += BATCH_SIZE
        self._num_batches_since_kill += 1

    def _workers(self) -> list[int]:
        return sorted(worker_pids() - self._others)

    def _kill_one(self) -> None:
        workers = self._workers()
        if workers:
            victim = self._random.choice(workers)
            self.killed.add(victim)
            self._num_batches_since_kill = 0
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(victim, signal.SIGKILL)


def census(nursery: int) -> Census:
    here, there = psutil.Process(), psutil.Process(nursery)
    return Census(here.num_fds(), here.num_threads(), there.num_fds(), there.num_threads())


def memory(nursery: int) -> list[int]:
    return [psutil.Process(pid).memory_info().rss for pid in (os.getpid(), nursery)]


def go_through(num_changes: int, num_between_censuses: int, caplog: pytest.LogCaptureFixture) -> str:
    """Make so many changes; gives what there was of each kind, in words."""
    changing = Changing(num_changes, seed=num_changes)
    for _ in range(num_between_censuses):  # until all is open that is opened once
        changing.change()
    nursery = changing.settle()
    first, bytes_before = census(nursery), memory(nursery)
    for number in range(num_between_censuses, num_changes):
        changing.change()
        if (number + 1) % num_between_censuses == 0:
            assert changing.settle() == nursery
            until(lambda: changing.is_settled() and census(nursery).is_within(first))  # the last are given back
    last, bytes_after = census(nursery), memory(nursery)
    changing.finish()
    assert changing.deaths_by_others(warnings_in(caplog)) == []
    assert changing.killed
    growths = [after - before for before, after in zip(bytes_before, bytes_after, strict=True)]
    assert max(growths) < MOST_GROWTH_BYTES
    return (
        f"{num_changes} changes, {len(changing.killed)} killed, {len(warnings_in(caplog))} warned of; {first} became "
        f"{last}; memory grew by {growths[0] >> 10} KiB here and {growths[1] >> 10} KiB in the nursery"
    )


def test_workers_that_are_on_their_way_when_none_is_wanted_any_more_end(tmp_path: Path) -> None:
    others, gates = worker_pids(), [gate(tmp_path / f"{slot}") for slot in range(2)]
    loader = ElasticDataLoader(
        Numbers(10**6), BATCH_SIZE, collate_fn=pools.as_they_are, worker_init_fn=lambda slot: WaitAt(gates[slot])()
    )
    stream = iter(loader)
    with pools.within(120):
        changed(loader, num_workers=2)
        until(lambda: len(worker_pids() - others) == 2)
        changed(loader, num_workers=0)
        for each in gates:
            open_gate(each)
        until(lambda: next(stream) and not worker_pids() - others)


def test_workers_change_sixty_times(caplog: pytest.LogCaptureFixture) -> None:
    with pools.within(120):
        go_through(60, 15, caplog)


@pytest.mark.slow
def test_workers_change_five_thousand_times(caplog: pytest.LogCaptureFixture) -> None:
    with pools.within(3600):
        print(go_through(5000, 250, caplog))
