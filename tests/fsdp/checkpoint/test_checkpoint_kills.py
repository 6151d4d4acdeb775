"""Saves that are killed at each of their file operations: what was saved before loads, and the next run saves on.

Of those that are copied while a trainer takes its next step, also where that step is.

Two gloo ranks, each a process; one of them is killed just before an operation, or in the middle of making a file
durable, which then has half its bytes. The other one hears of it. Then the job begins again.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elastic_ext.fsdp.checkpoint.folder.commit import COMMIT, read_commit
from tests.support.file_operations import Strike
from tests.support.ranks import RankPool
from tests.support.saving import (
    MOMENTS,
    Moment,
    Saved,
    begin_job,
    begin_training,
    checkpointer_of,
    digest_at,
    digest_of,
    garbage_in,
    job_folder,
    make_state,
    train_on,
)
from tests.support.saving import go_on as save_on
from tests.support.thinning import the_first
from tests.support.trials import End, Trial, run_trials

NUM_RANKS = 2
_KEPT_IN_MEMORY = Path("/dev/shm")  # being killed loses nothing that was written, wherever it was


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job that has saved, what its ranks held at each step, and what the next save does."""

    storage: Path
    digests: list[dict[int, str]]
    """By rank and step."""
    operations: list[list[str]]
    """By rank."""
    from_path: str | None
    """The checkpoint that the killed run goes on from, None for the newest."""
    arguments: dict[str, Any]
    """Of its checkpointer, or its trainer."""
    go_on: Callable[..., Saved]


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Where a save is killed."""

    rank: int
    at: int | Moment
    strike: Strike
    words: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A save that is killed."""

    num_steps: int
    from_path: str | None
    in_background: bool = False
    overlaps: bool = False
    """It is a trainer's, and copied while the next step goes on."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """One in memory, where there is such a file system: there are many files to write."""
    if not _KEPT_IN_MEMORY.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=_KEPT_IN_MEMORY) as name:
        yield Path(name)


def make_job(ranks: RankPool, folder: Path, case: Case) -> Job:
    """A job that has saved; and what its next save would do, seen in a copy."""
    storage, tried = folder / "storage", folder / "tried"
    begin, go_on = (begin_training, train_on) if case.overlaps else (begin_job, save_on)
    (began,) = run_trials(ranks, folder / "ends", [Trial(fn=begin, args=(storage, case.num_steps))])
    assert not any(end.error for end in began), began
    shutil.copytree(storage, tried)
    path = None if case.from_path is None else job_folder(tried) / case.from_path
    arguments: dict[str, Any] = {} if case.overlaps else {"in_background": case.in_background}
    trial = Trial(fn=go_on, args=(tried, path, None, "kill", None, arguments))
    (went_on,) = run_trials(ranks, folder / "ends", [trial])
    assert not any(end.error for end in went_on), went_on
    digests = [dict(end.value) for end in began]
    for rank, end in enumerate(went_on):
        if case.from_path is None:
            digests[rank][end.value.step] = end.value.digest
        if case.overlaps:  # of the step after it, with which training ends
            digests[rank][end.value.step + 1] = digest_at(end.value.step + 100)
    return Job(
        storage=storage,
        digests=digests,
        operations=[end.value.operations for end in went_on],
        from_path=case.from_path,
        arguments=arguments,
        go_on=go_on,
    )


def points_of(job: Job) -> list[Point]:
    """Before each operation of each rank, and in the middle of each that makes a file durable."""
    points = []
    for rank, operations in enumerate(job.operations):
        points += [Point(rank=rank, at=at, strike="kill", words=words) for at, words in enumerate(operations)]
        points += [
            Point(rank=rank, at=at, strike="tear", words=words)
            for at, words in enumerate(operations)
            if words.startswith("os.fsync") and words.endswith(".tmp")
        ]
        if job.go_on is train_on:
            points += [Point(rank=rank, at=moment, strike="kill", words=moment) for moment in MOMENTS]
    return points


def sample_of(points: list[Point], *, every: int) -> list[Point]:
    """Some of them, with all around COMMIT, and some where no file is touched."""
    return [
        point
        for place, point in enumerate(points)
        if place % every == 0
        or (COMMIT in point.words and "os.link" in point.words)
        or (point.rank == 1 and point.at in MOMENTS[2::2])
    ]


def kill_and_go_on(ranks: RankPool, folder: Path, job: Job, points: list[Point]) -> None:
    """Each of ``points`` in a copy of the job's storage, and then a new run there."""
    storages = [folder / f"killed-{place}" for place in range(len(points))]
    for storage in storages:
        shutil.copytree(job.storage, storage)
    starts = [None if job.from_path is None else job_folder(storage) / job.from_path for storage in storages]
    trials = [
        Trial(fn=job.go_on, args=(storage, start, point.rank, point.strike, point.at, job.arguments))
        for storage, start, point in zip(storages, starts, points, strict=True)
    ]
    killed = run_trials(ranks, folder / "ends", trials)
    newest = [_newest_in(storage, point, ends) for storage, point, ends in zip(storages, points, killed, strict=True)]
    again = run_trials(ranks, folder / "ends", [Trial(fn=job.go_on, args=(storage,)) for storage in storages])
    for storage, point, before, ends in zip(storages, points, newest, again, strict=True):
        for rank, end in enumerate(ends):
            assert end.error is None and isinstance(end.value, Saved), (point, end)
            assert end.value.loaded_step == before, (point, end)
            assert end.value.loaded_digest == job.digests[rank][before], (point, rank)
        model, optimizer = make_state(seed=5)
        with checkpointer_of(storage) as checkpointer:
            has_ended = job.go_on is train_on  # with a checkpoint of its last step too
            assert checkpointer.load(model, optimizer).step == before + 1 + has_ended, point
        assert digest_of(model, optimizer) == digest_at(before + 1 + 100 * has_ended), point
        assert garbage_in(storage) == [], point


def _newest_in(storage: Path, point: Point, ends: list[End]) -> int:
    """The newest step that exists after a kill, of which the other rank has heard if it could."""
    victim, other = ends[point.rank], ends[1 - point.rank]
    assert victim.exit_signal == 9, (point, victim)
    commits = list(job_folder(storage).glob(f"step_*/{COMMIT}"))
    # What was put aside for a save that then did not come to be counts as before.
    savers = {read_commit(path.parent).run_id for path in commits}
    counting = [path for path in commits if path.parent.name.partition(".abandoned-")[2] not in savers]
    error = other.error or ""
    has_heard = error.startswith("PeerLostError") or "gloo/transport" in error  # in a pass, which is none of ours
    assert has_heard or (other.error is None and isinstance(other.value, Saved)), (point, other)
    assert other.seconds < 60, (point, other)
    return max(int(path.parent.name.removeprefix("step_").partition(".")[0]) for path in counting)


def _told(what: str, points: list[Point], killed: list[Point], job: Job) -> None:
    counts = [len(operations) for operations in job.operations]
    torn = sum(point.strike == "tear" for point in killed)
    print(
        f"\n{what}: {counts[0]} file operations on rank 0 and {counts[1]} on rank 1, {len(points)} points with torn "
        f"files; killed at {len(killed)} of them, {torn} with a torn file"
    )


CASES = {
    "the next save": Case(num_steps=1, from_path=None),
    "a save that leaves newer checkpoints behind": Case(num_steps=3, from_path="step_1"),
    "a save in the background": Case(num_steps=1, from_path=None, in_background=True),
    "one that leaves newer ones behind": Case(num_steps=3, from_path="step_1", in_background=True),
    "a save beside the next step": Case(num_steps=1, from_path=None, overlaps=True),
}


@pytest.mark.parametrize("what", the_first(reversed(CASES), 2))
def test_save_killed_at_sampled_operations_leaves_a_checkpoint(what: str, ranks: RankPool, folder: Path) -> None:
    job = make_job(ranks, folder, CASES[what])
    points = points_of(job)
    assert len(points) > 100
    killed = sample_of(points, every=100)
    _told(what, points, killed, job)
    kill_and_go_on(ranks, folder, job, killed)


@pytest.mark.slow
@pytest.mark.parametrize("what", CASES)
def test_save_killed_at_every_operation_leaves_a_checkpoint(what: str, ranks: RankPool, folder: Path) -> None:
    job = make_job(ranks, folder, CASES[what])
    points = points_of(job)
    _told(what, points, points, job)
    kill_and_go_on(ranks, folder, job, points)
