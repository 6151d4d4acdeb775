"""Loops of peers train the same bits with this library as without it, and say nothing; also when they are resumed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest

from elastic_ext import CheckpointInterval
from tests.support.ranks import RankPool
from tests.training.mistakes.jobs import ByHand, Job, LoaderKind, Made, WithLibrary
from tests.training.mistakes.peers import dlrover_like, lightning_like, nano_gpt_like
from tests.training.mistakes.test_mistakes import warnings_to

DEADLINE_SECONDS = 60.0
PEERS: dict[str, tuple[Callable[[Job], None], Literal["one", "two"]]] = {
    "nanoGPT": (nano_gpt_like, "one"),
    "DLRover": (dlrover_like, "one"),
    "Lightning": (lightning_like, "two"),
}
Came = tuple[list[Any], list[float], list[str]]  # the bits at the end, the rates of the steps, what was said


def by_hand(rank: int, num_ranks: int, name: str) -> Came:
    loop, kind = PEERS[name]
    made = Made(kind, rank, num_ranks)
    job = ByHand(made)
    loop(job)
    return made.bits(), job.rates, []


def with_library(
    rank: int, num_ranks: int, name: str, loader: LoaderKind, folder: Path, stops: tuple[int | None, ...]
) -> Came:
    """A trainer after another, each from the checkpoint of the one before, and the last one to the end."""
    loop, kind = PEERS[name]
    rates: list[float] = []
    said: list[str] = []
    with warnings_to(said.append):
        for stop_at in stops:
            made = Made(kind, rank, num_ranks)
            job = WithLibrary(made, folder, loader, stop_at)
            loop(job)
            rates += job.rates
    return made.bits(), rates, said


Expected = Callable[[str, int], list[Came]]


@pytest.fixture(scope="module")
def expected(ranks: RankPool) -> Expected:
    """What comes of a peer's loop by hand on so many ranks, each once."""

    @cache
    def of(name: str, num_ranks: int) -> list[Came]:
        options: dict[str, Any] = {"process_group": num_ranks > 1, "deadline_seconds": DEADLINE_SECONDS}
        return ranks.run(num_ranks, by_hand, num_ranks, name, **options)

    return of


def both(
    ranks: RankPool, expected: Expected, folder: Path, name: str, num_ranks: int, loader: LoaderKind, stops: Any
) -> None:
    options: dict[str, Any] = {"process_group": num_ranks > 1, "deadline_seconds": DEADLINE_SECONDS}
    came = ranks.run(num_ranks, with_library, num_ranks, name, loader, folder, stops, **options)
    for (bits, rates, said), (own_bits, own_rates, _) in zip(came, expected(name, num_ranks), strict=True):
        assert said == []
        assert rates == own_rates
        assert bits == own_bits


each_way = pytest.mark.parametrize("num_ranks", [1, 2])
each_peer = pytest.mark.parametrize("name", list(PEERS))


@each_way
@each_peer
@pytest.mark.parametrize("loader", ["ours", "torchs"])
def test_a_peers_loop_trains_the_bits_that_it_trains_without_the_library(
    ranks: RankPool, expected: Expected, tmp_path: Path, name: str, loader: LoaderKind, num_ranks: int
) -> None:
    both(ranks, expected, tmp_path, name, num_ranks, loader, (None,))


@each_way
@each_peer
def test_a_peers_loop_that_is_stopped_within_an_epoch_goes_on_with_the_next_sample(
    ranks: RankPool, expected: Expected, tmp_path: Path, name: str, num_ranks: int
) -> None:
    both(ranks, expected, tmp_path, name, num_ranks, "ours", (6, None))


@each_way
@pytest.mark.parametrize("name", [name for name in PEERS if name != "Lightning"])  # whose schedules step after it
@pytest.mark.parametrize("loader", ["ours", "torchs"])
def test_a_peers_loop_that_is_stopped_with_an_epochs_last_step_goes_on_with_the_next_epoch(
    ranks: RankPool, expected: Expected, tmp_path: Path, name: str, loader: LoaderKind, num_ranks: int
) -> None:
    both(ranks, expected, tmp_path, name, num_ranks, loader, (4, None))


@each_way
@pytest.mark.parametrize("loader", ["ours", "torchs"])
def test_schedules_that_step_between_epochs_are_not_behind_after_a_resume(
    ranks: RankPool, expected: Expected, tmp_path: Path, loader: LoaderKind, num_ranks: int
) -> None:
    """The checkpoint is saved as the epoch ends, and the process is killed before the next one begins."""
    options: dict[str, Any] = {"process_group": num_ranks > 1, "deadline_seconds": DEADLINE_SECONDS}
    came = ranks.run(num_ranks, ended_after_an_epoch, num_ranks, loader, tmp_path, **options)
    assert [bits for bits, _, _ in came] == [bits for bits, _, _ in expected("Lightning", num_ranks)]


@each_way
def test_a_loop_that_is_stopped_before_its_schedules_step_is_told_so(
    ranks: RankPool, tmp_path: Path, num_ranks: int
) -> None:
    options: dict[str, Any] = {"process_group": num_ranks > 1, "deadline_seconds": DEADLINE_SECONDS}
    came = ranks.run(num_ranks, with_library, num_ranks, "Lightning", "ours", tmp_path, (4, None), **options)
    (said,) = came[0][2]
    assert "StepLR has never stepped within a step: if it is to step after each epoch, call its step() once" in said


def ended_after_an_epoch(rank: int, num_ranks: int, loader: LoaderKind, folder: Path) -> Came:
    rates: list[float] = []
    for num_epochs in (1, 3):
        made = Made("two", rank, num_ranks)
        job = WithLibrary(made, folder, loader, None, checkpoint_interval=CheckpointInterval(epochs=1))
        lightning_like(job, num_epochs)
        rates += job.rates
    return made.bits(), rates, []
