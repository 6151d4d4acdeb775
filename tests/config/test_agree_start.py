"""How ranks start together: with the same arguments, the file found at the start, whatever their process group is."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_ext.torch_private.groups import store_of_default_group
from tests.support.loops import errors_of, follower_of, put, rate, same, seen_by, step_until, take_step
from tests.support.ranks import RankPool

UNLIKE = "RanksDisagreeError: ranks start with different values; give all ranks the same: "

# --- start, resume, thinning ----------------------------------------------------------------------------------------


def start_unlike(rank: int, folder: Path) -> None:
    with follower_of(folder, rank, startup={"optimizer.learning_rate": 0.1 * (1 + (rank == 2))}):
        pass


def test_ranks_that_start_with_unlike_values_are_refused_by_name(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks.run_outcomes(3, start_unlike, tmp_path, deadline_seconds=45.0)
    for text in errors_of(outcomes, but=-1):
        assert text.startswith(f"{UNLIKE}optimizer.learning_rate is 0.1 on rank 0, 1, 0.2 on rank 2")


def start_with_files(rank: int, folder: Path, have: list[bool]) -> tuple[str, str]:
    (folder / str(rank)).mkdir(exist_ok=True)
    if have[rank]:
        put(folder, rank, rate(5, 0.5))
    with seen_by() as seen, follower_of(folder, rank) as follower:
        at_start = follower.config.label
        for _ in range(5):
            take_step(follower, seen)
        put(folder, rank, rate(5, 0.5))
        step_until(follower, seen, lambda: follower.config.version == 5)
    return at_start, follower.config.label


@pytest.mark.parametrize(("have", "expected"), [([True, True], "version 5"), ([True, False], "version 0")])
def test_the_file_found_at_start_is_in_force_from_the_first_step_if_every_rank_finds_it(
    ranks: RankPool, tmp_path: Path, have: list[bool], expected: str
) -> None:
    assert same(ranks.run(2, start_with_files, tmp_path, have)) == (expected, "version 5")


def count_agreements(rank: int, folder: Path) -> list[int]:
    with seen_by() as seen, follower_of(folder, rank, agree_every_steps="auto") as follower:
        intervals = []
        for _ in range(300):
            take_step(follower, seen)
            intervals.append(follower.agreement.every)
    return intervals


def test_agreements_thin_out_to_the_same_interval_on_all_ranks_when_steps_are_short(
    ranks: RankPool, tmp_path: Path
) -> None:
    intervals = same(ranks.run(2, count_agreements, tmp_path))
    assert intervals[0] == 1
    assert intervals[-1] > 1
    assert all(later <= 2 * sooner for sooner, later in itertools.pairwise(intervals)), "a burst must not silence a run"


def two_followers(rank: int, folder: Path) -> tuple[str, str]:
    first, second = folder / "first", folder / "second"
    for each in (first, second):
        each.mkdir(exist_ok=True)
    with seen_by() as seen, follower_of(first, rank) as one, follower_of(second, rank) as two:
        put(first, rank, rate(1, 0.1))
        put(second, rank, rate(9, 0.9))
        step_until(one, seen, lambda: one.config.version == 1)
        step_until(two, seen, lambda: two.config.version == 9)
        return one.config.label, two.config.label


def test_two_followers_in_one_process_do_not_know_of_each_other(ranks: RankPool, tmp_path: Path) -> None:
    assert same(ranks.run(2, two_followers, tmp_path)) == ("version 1", "version 9")


def share_a_file(rank: int, folder: Path) -> list[str]:
    (folder / "0").mkdir(exist_ok=True)
    with seen_by() as seen, follower_of(folder, 0) as follower:
        if rank == 0:
            put(folder, 0, "{", seen_by=follower)
        warned = False
        while not warned:  # rank 0 tells the others, step by step, whether it has warned
            flag = torch.tensor(float(rank == 0 and any("was refused" in line for line in seen.log)))
            dist.all_reduce(flag)
            warned = bool(flag)
            take_step(follower, seen)
        if rank == 0:
            put(folder, 0, {"version": 2})
        step_until(follower, seen, lambda: follower.config.version == 2)
        return [line for line in seen.log if "was refused" in line]


def test_of_the_ranks_on_a_machine_that_follow_one_file_one_warns(ranks: RankPool, tmp_path: Path) -> None:
    first, *others = ranks.run(3, share_a_file, tmp_path)
    assert len(first) == 1
    assert others == [[], []]


def start_with_other_arguments(rank: int, folder: Path, arguments: list[dict[str, Any]]) -> None:
    with follower_of(folder, rank, **arguments[rank]):
        pass


@pytest.mark.parametrize(
    "arguments", [[{"agree_every_steps": 3}, {"agree_every_steps": 7}], [{}, {"agree_every_steps": "auto"}]]
)
def test_ranks_that_would_agree_at_other_intervals_are_refused(
    ranks: RankPool, tmp_path: Path, arguments: list[dict[str, Any]]
) -> None:
    outcomes = ranks.run_outcomes(2, start_with_other_arguments, tmp_path, arguments, deadline_seconds=45.0)
    for text in errors_of(outcomes, but=-1):
        assert text.startswith(f"{UNLIKE}agree_every_steps is ")


def test_an_argument_that_is_wrong_on_one_rank_is_told_to_all(ranks: RankPool, tmp_path: Path) -> None:
    arguments = [{}, {"startup": {"dataloader.batch_size": 0}}]
    outcomes = ranks.run_outcomes(2, start_with_other_arguments, tmp_path, arguments, deadline_seconds=45.0)
    first, second = errors_of(outcomes, but=-1)
    assert second == "ConfigError: dataloader.batch_size is 0; allowed: an integer >= 1"
    assert first.startswith("RanksFailedError: 1 of 2 ranks failed while starting to follow a config\n--- rank 1:")
    assert "dataloader.batch_size is 0" in first


def start_at_other_steps(rank: int, folder: Path) -> None:
    with follower_of(folder, rank, start_step=40 * rank, timeout_seconds=600.0):
        pass


def test_ranks_that_start_at_different_steps_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks.run_outcomes(2, start_at_other_steps, tmp_path, deadline_seconds=45.0)
    for text in errors_of(outcomes, but=-1):
        assert text.startswith(f"{UNLIKE}steps already taken is 0 on rank 0, 40 on rank 1")


def wrong_in_another_way(rank: int, folder: Path, arguments: list[dict[str, Any]], word: str) -> None:
    if rank == 1:
        os.environ["ELASTIC_EXT"] = word
    with follower_of(folder, rank, timeout_seconds=600.0, **arguments[rank]):
        pass


@pytest.mark.parametrize(
    ("startup", "word", "expected"),
    [(["x"], "on", "AttributeError"), ({}, "of", "ValueError: ELASTIC_EXT is 'of'")],
)
def test_whatever_is_wrong_on_one_rank_at_the_start_is_told_to_all(
    ranks: RankPool, tmp_path: Path, startup: Any, word: str, expected: str
) -> None:
    arguments = [{}, {"startup": startup}]
    outcomes = ranks.run_outcomes(2, wrong_in_another_way, tmp_path, arguments, word, deadline_seconds=45.0)
    first, second = errors_of(outcomes, but=-1)
    assert first.startswith("RanksFailedError: 1 of 2 ranks failed while starting to follow a config")
    assert expected in first
    assert second.startswith(expected)


# --- other default groups -------------------------------------------------------------------------------------------


def follow_beside_another_backend(rank: int, folder: Path) -> str:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend "fake"

    assert FakeStore is not None
    store = dist.FileStore(str(folder / "store"), 2)  # type: ignore[attr-defined]
    dist.init_process_group("fake", store=store, rank=rank, world_size=2)
    with follower_of(folder, rank) as follower:
        put(folder, rank, rate(1, 0.5))
        for _ in range(100_000):
            follower.boundary()
            if follower.config.version == 1:
                break
    label = follower.config.label
    dist.destroy_process_group()
    return label


def test_ranks_agree_whatever_the_backend_of_the_default_group_and_wherever_its_store(
    ranks: RankPool, tmp_path: Path
) -> None:
    assert same(ranks.run(2, follow_beside_another_backend, tmp_path, process_group=False)) == "version 1"


def look_into_the_private_store(rank: int) -> str:
    store = store_of_default_group()
    if rank == 0:
        store.set("hello", "from rank 0")
    return str(store.get("hello").decode())  # waits for it


def test_this_torch_keeps_the_store_of_its_default_group_where_it_is_looked_for(ranks: RankPool) -> None:
    assert ranks.run(2, look_into_the_private_store) == ["from rank 0"] * 2
