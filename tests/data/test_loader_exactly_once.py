"""Every sample of an epoch is committed once, in the order of the epoch, whatever happens on the way: ranks and sizes
change, workers come and go and are killed, steps are rolled back.

Ranks are loaders of one process here, which take their steps in turn; their workers are real.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from elastic_ext.data.batch_plan import BatchPlan, StepPlan
from elastic_ext.data.loader import ElasticDataLoader
from tests.support import pools
from tests.support.loading import changed, collate_by_hand, indices_in, loader_of, settled
from tests.support.pools import worker_pids

SECONDS = 60  # for each example
MOST_KILLS = 2  # in a stage; three deaths of the same cause are an error

with_workers = settings(
    phases=[phase for phase in Phase if phase is not Phase.shrink], suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture(scope="module", autouse=True)
def _nothing_left() -> Iterator[None]:
    """No process, descriptor, thread or shared memory outlives the tests."""
    list(loader_of(4, num_workers=1))  # what is opened once and stays
    before = settled()
    yield
    assert settled() == before


@dataclass(frozen=True)
class Turn:
    """One step, and what comes before it."""

    micro_batch: int
    num_workers: int | None
    """None: as before."""
    prefetch_factor: int
    rolls_back_after: int | None
    """The step is taken twice, the first time up to so many micro-steps."""
    then_micro_batch: int
    """In force after that."""
    kills: int | None
    """Which of the workers, by a number that is cut to how many there are."""


@dataclass(frozen=True)
class Stage:
    """What happens between two resumes."""

    num_ranks: int
    global_batch: int
    turns: tuple[Turn, ...]

    def plan(self, micro_batch: int) -> BatchPlan:
        return BatchPlan(
            global_batch=max(self.global_batch, self.num_ranks), num_ranks=self.num_ranks, micro_batch=micro_batch
        )


def stages(most_workers: int) -> st.SearchStrategy[list[Stage]]:
    sizes = st.integers(1, 7)
    turns = st.builds(
        Turn,
        micro_batch=sizes,
        num_workers=st.none() | st.integers(0, most_workers),
        prefetch_factor=st.integers(1, 3),
        rolls_back_after=st.none() | st.integers(1, 3),
        then_micro_batch=sizes,
        kills=st.none() | st.integers(0, 9) if most_workers else st.none(),
    )
    return st.lists(
        st.builds(
            Stage,
            num_ranks=st.integers(1, 3),
            global_batch=st.integers(3, 20),
            turns=st.lists(turns, max_size=4).map(tuple),
        ),
        max_size=3,
    )


TO_THE_END = Stage(1, 5, (Turn(2, None, 2, None, 2, None),) * 1000)


def check(size: int, seed: int, stages: Sequence[Stage], first_workers: int, collate_fn: Any) -> None:
    """Go through the stages and then to the end of the epoch."""
    state: dict[str, Any] | None = None
    committed: list[int] = []
    for stage in [*stages, TO_THE_END]:
        loaders = [
            loader_of(size, shuffle=True, seed=seed, num_workers=first_workers, collate_fn=collate_fn)
            for _ in range(stage.num_ranks)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
        committed += committed_in(stage, loaders)
        states = [loader.state_dict() for loader in loaders]
        assert all(each == states[0] for each in states)
        state = states[0]
        assert state["position"] == len(committed)
        if state["is_over"]:
            break
    expected = indices_in(loader_of(size, 1, shuffle=True, seed=seed))
    assert committed == expected[: len(committed)]
    assert size - len(committed) < stage.num_ranks


def committed_in(stage: Stage, loaders: list[ElasticDataLoader]) -> list[int]:
    """What all ranks together commit in a stage."""
    others = worker_pids()
    tell(loaders, stage.plan(stage.turns[0].micro_batch if stage.turns else 1))
    streams = [iter(loader) for loader in loaders]
    committed: list[int] = []
    num_kills = 0
    for turn in stage.turns:
        plan = stage.plan(turn.micro_batch)
        tell(loaders, plan)
        if turn.num_workers is not None:
            for loader in loaders:
                changed(loader, num_workers=turn.num_workers, prefetch_factor=turn.prefetch_factor)
        if turn.kills is not None and num_kills < MOST_KILLS:
            alive = sorted(worker_pids() - others)
            if alive:
                with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                    os.kill(alive[turn.kills % len(alive)], signal.SIGKILL)
                    num_kills += 1
        step = plan.next_step(loaders[0].remaining)
        if step is None:
            break
        if turn.rolls_back_after is not None:
            take(streams, step, turn.rolls_back_after)
            for loader in loaders:
                loader.rollback()
            plan = stage.plan(turn.then_micro_batch)
            tell(loaders, plan)
            again = plan.next_step(loaders[0].remaining)
            assert again is not None
            step = again
        committed += take(streams, step, step.num_micro_steps)
        for loader in loaders:
            loader.commit()
    return committed


def tell(loaders: list[ElasticDataLoader], plan: BatchPlan) -> None:
    for rank, loader in enumerate(loaders):
        loader.plan(plan, rank)


def take(streams: Sequence[Iterator[Any]], step: StepPlan, num_micro_steps: int) -> list[int]:
    """The samples of so many micro-steps of a step, on all ranks, which are of the sizes that it has."""
    taken: list[int] = []
    for sizes in itertools.islice(zip(*step.micro_batches, strict=True), num_micro_steps):
        batches = [next(stream) for stream in streams]
        assert tuple(len(indices) for indices, _ in batches) == sizes
        taken += indices_in(batches)
    return taken


seeds = st.integers(0, 9)
collate_fns = st.sampled_from([None, collate_by_hand])


@settings(max_examples=50)
@given(size=st.integers(1, 120), stages=stages(most_workers=0), seed=seeds, collate_fn=collate_fns)
def test_every_sample_is_committed_once_in_order(size: int, stages: list[Stage], seed: int, collate_fn: Any) -> None:
    check(size, seed, stages, 0, collate_fn)


@settings(with_workers, max_examples=5)
@given(
    size=st.integers(20, 120),
    stages=stages(most_workers=3),
    seed=seeds,
    collate_fn=collate_fns,
    first_workers=st.integers(0, 2),
)
def test_every_sample_is_committed_once_in_order_whatever_becomes_of_workers(
    size: int, stages: list[Stage], seed: int, collate_fn: Any, first_workers: int
) -> None:
    with pools.within(SECONDS):
        check(size, seed, stages, first_workers, collate_fn)
    gc.collect()


@pytest.mark.slow
@settings(with_workers, max_examples=400)
@given(
    size=st.integers(20, 400),
    stages=stages(most_workers=3),
    seed=seeds,
    collate_fn=collate_fns,
    first_workers=st.integers(0, 2),
)
def test_every_sample_is_committed_once_in_order_whatever_becomes_of_workers_at_length(
    size: int, stages: list[Stage], seed: int, collate_fn: Any, first_workers: int
) -> None:
    with pools.within(SECONDS):
        check(size, seed, stages, first_workers, collate_fn)
    gc.collect()
