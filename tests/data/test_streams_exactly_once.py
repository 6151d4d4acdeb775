"""Every sample of an IterableDataset is committed once, in the order in which workers take turns, whatever happens on
the way: sizes change, workers are killed or die of a sample, steps are rolled back, runs go on elsewhere.

The order is that of a model without processes, which is told the same sizes.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from elastic_ext.data.batch_plan import BatchPlan
from elastic_ext.data.loader import ElasticDataLoader
from tests.support import pools
from tests.support.loading import changed, settled
from tests.support.pools import worker_pids

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than processors
SECONDS = 60  # for each example
MOST_DEATHS = 2  # in a stage; three of the same cause are an error


class Shared(IterableDataset[int]):
    """0 to ``size`` - 1, shared out among the workers; a worker dies, once, of each sample that has a file in a folder.

    It has no state.
    """

    def __init__(self, size: int, folder: Path) -> None:
        self.size, self.folder = size, folder
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        own, num = (0, 1) if info is None else (info.id, info.num_workers)
        start, self.at = self.at, 0
        for number, sample in enumerate(range(own, self.size, num)):
            if number >= start:
                if info is not None and (self.folder / str(sample)).exists():
                    (self.folder / str(sample)).unlink()
                    os.kill(os.getpid(), signal.SIGKILL)
                self.at = number + 1
                yield sample
        self.at = 0


class Telling(Shared):
    """One that tells where it is, and can go on there."""

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Model:
    """The samples of all streams, without processes: whose turn it is gives what it has left, then the next."""

    def __init__(self, size: int, num_workers: int) -> None:
        self.streams = [list(range(own, size, max(num_workers, 1))) for own in range(max(num_workers, 1))]
        self.turn = 0

    def take(self, num_samples: int) -> list[int]:
        """So many, or all that are left."""
        taken: list[int] = []
        while len(taken) < num_samples and any(self.streams):
            stream = self.streams[self.turn]
            num_own = num_samples - len(taken)
            taken += stream[:num_own]
            del stream[:num_own]
            self.turn = (self.turn + 1) % len(self.streams)
        return taken


@dataclass(frozen=True)
class Turn:
    """One step, and what comes before it."""

    global_batch: int
    micro_batch: int
    rolls_back_after: int | None
    """The step is taken twice, the first time up to so many micro-steps."""
    kills: int | None
    """Which of the workers, by a number that is cut to how many there are."""


turns = st.builds(
    Turn,
    global_batch=st.integers(1, 16),
    micro_batch=st.integers(1, 6),
    rolls_back_after=st.none() | st.integers(1, 3),
    kills=st.none() | st.integers(0, 9),
)
stages = st.lists(st.lists(turns, max_size=5).map(tuple), max_size=3)


@dataclass(frozen=True)
class Run:
    """What an example is of."""

    size: int
    num_workers: int
    tells: bool
    prefetch_factor: int
    stages: Sequence[Sequence[Turn]]
    """Between two of them another loader goes on."""
    dies_of: int | None


def runs(most_samples: int) -> st.SearchStrategy[Run]:
    return st.builds(
        Run,
        size=st.integers(0, most_samples),
        num_workers=st.integers(1, 3),
        tells=st.booleans(),
        prefetch_factor=st.integers(1, 3),
        stages=stages,
        dies_of=st.none() | st.integers(0, most_samples),
    )


TO_THE_END = (Turn(5, 2, None, None),) * 1000


def check(run: Run, folder: Path) -> None:
    """Go through the stages and then to the end of the epoch."""
    model = Model(run.size, run.num_workers)
    dataset = (Telling if run.tells else Shared)(run.size, folder)
    most_kills = MOST_DEATHS
    if run.dies_of is not None:
        (folder / str(run.dies_of)).touch()
        most_kills -= 1
    state: dict[str, Any] | None = None
    left = list(range(run.size))
    for number, stage in enumerate([*run.stages, TO_THE_END]):
        loader = ElasticDataLoader(
            dataset,
            4,
            num_workers=run.num_workers if number == 0 else 1 + number,  # the state says how many there have to be
            prefetch_factor=run.prefetch_factor,
            collate_fn=list,
            fast_forward=not run.tells,
        )
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        for sample in committed_in(stage, loader, model, most_kills):
            left.remove(sample)
        state = loader.state_dict()
        if state["is_over"]:
            break
    assert len(left) == sum(map(len, model.streams)) < max(turn.global_batch for turn in [*TO_THE_END, *stage])


def committed_in(stage: Sequence[Turn], loader: ElasticDataLoader, model: Model, most_kills: int) -> Iterator[int]:
    """What is committed in a stage, of the model's order."""
    others = worker_pids()
    plan = BatchPlan(global_batch=4, num_ranks=1, micro_batch=4)
    loader.plan(plan, 0)
    batches = iter(loader)
    for turn in stage:
        plan = BatchPlan(global_batch=turn.global_batch, num_ranks=1, micro_batch=turn.micro_batch)
        loader.plan(plan, 0)
        if turn.kills is not None and most_kills and (alive := sorted(worker_pids() - others)):
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(alive[turn.kills % len(alive)], signal.SIGKILL)
                most_kills -= 1
        sizes = plan.full_step.micro_batches[0]
        if turn.rolls_back_after is not None:
            list(itertools.islice(batches, min(turn.rolls_back_after, len(sizes))))
            loader.rollback()
        taken = list(itertools.islice(batches, len(sizes)))
        if len(taken) < len(sizes):  # what is too little for a step is left out
            loader.rollback()
            return
        assert taken == [model.take(size) for size in sizes]
        loader.commit()
        yield from itertools.chain(*taken)


def check_within(run: Run) -> None:
    with pools.within(SECONDS), tempfile.TemporaryDirectory() as folder:
        check(run, Path(folder))
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def _nothing_left() -> Iterator[None]:
    """No process, descriptor, thread or shared memory outlives the tests."""
    check(Run(8, 1, True, 1, [], None), Path("."))  # what is opened once and stays
    before = settled()
    yield
    assert settled() == before


with_workers = settings(
    phases=[phase for phase in Phase if phase is not Phase.shrink], suppress_health_check=[HealthCheck.too_slow]
)


@settings(with_workers, max_examples=5)
@given(run=runs(90))
def test_every_sample_is_committed_once_in_turn_whatever_becomes_of_workers(run: Run) -> None:
    check_within(run)


@pytest.mark.slow
@settings(with_workers, max_examples=200)
@given(run=runs(300))
def test_every_sample_is_committed_once_in_turn_whatever_becomes_of_workers_at_length(run: Run) -> None:
    check_within(run)


@settings(with_workers, max_examples=4)
@given(
    size=st.integers(1, 90),
    num_workers=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    kills=st.lists(st.none() | st.integers(0, 9), min_size=1, max_size=6),
)
def test_without_a_trainer_every_sample_is_handed_out_once_whatever_becomes_of_workers(
    size: int, num_workers: int, sizes: list[int], kills: list[int | None]
) -> None:
    others = worker_pids()
    with pools.within(SECONDS):
        loader = ElasticDataLoader(Telling(size, Path(".")), sizes[0], num_workers=num_workers, collate_fn=list)
        found: list[list[int]] = []
        num_kills = 0
        for number, batch in enumerate(loader):
            found.append(batch)
            changed(loader, batch_size=sizes[(number + 1) % len(sizes)])
            victim = kills[number % len(kills)]
            if victim is not None and num_kills < MOST_DEATHS and (alive := sorted(worker_pids() - others)):
                with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                    os.kill(alive[victim % len(alive)], signal.SIGKILL)
                    num_kills += 1
    gc.collect()
    for own in range(num_workers):
        assert [each for each in itertools.chain(*found) if each % num_workers == own] == list(
            range(own, size, num_workers)
        )
    short = [batch for number, batch in enumerate(found) if len(batch) != sizes[number % len(sizes)]]
    assert len(short) <= num_workers  # the last of each stream
