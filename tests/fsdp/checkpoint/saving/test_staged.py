"""What ranks have staged in a folder that outlives them: completed after they were killed, when all of them had staged
the same save, and never otherwise; what there was before stays as it is.

Ranks are processes that are killed at scripted points, as in tests/fsdp/checkpoint/test_checkpoint_kills.py; then
``complete`` is called as an agent would.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_ext import CheckpointInterval, CheckpointOptions, ElasticTrainer
from elastic_ext.errors import CheckpointError, CheckpointExists, CheckpointFenced
from elastic_ext.fsdp import ShardCheckpointer
from elastic_ext.fsdp.checkpoint.folder.commit import COMMIT, read_commit
from elastic_ext.fsdp.checkpoint.saving import staging as staging_module
from elastic_ext.fsdp.checkpoint.saving.rescue import Completion, Outcome, RescuePlan, choose, clear, complete, rows_in
from elastic_ext.fsdp.checkpoint.saving.shared_memory import MEMORY, RECORD, Shelf, StagedCopy, StagedFiles, boot_id
from tests.support.file_operations import FileOperations
from tests.support.ranks import RankPool
from tests.support.saving import (
    JOB,
    begin_job,
    checkpointer_of,
    digest_at,
    digest_of,
    extra_of,
    fill,
    garbage_in,
    go_on,
    is_loaded,
    job_folder,
    make_state,
    newest_of,
)
from tests.support.thinning import the_first
from tests.support.training import grouped
from tests.support.trials import Trial, run_trials

ROOT = Path(__file__).resolve().parents[4]
_STAGING_DIR = "ELASTIC_EXT_STAGING_DIR"
_KEPT_IN_MEMORY = Path("/dev/shm")


@pytest.fixture
def folder(ram: Path) -> Iterator[Path]:
    """One in memory, where there is such a file system."""
    if not _KEPT_IN_MEMORY.is_dir():
        yield ram
        return
    with tempfile.TemporaryDirectory(dir=_KEPT_IN_MEMORY) as name:
        yield Path(name)


def record_in(shelf: Path) -> Path:
    (path,) = shelf.glob(f"*{RECORD}")
    return path


def whole_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def unfinished_in(storage: Path) -> list[str]:
    """What is left of saves that failed, but for descriptions of tensors, which the next save may have."""
    return [path for path in garbage_in(storage) if "/meta/" not in path]


# --- killed ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Where a rank is killed while it saves: before the copy number ``at``, or an operation in one of two folders."""

    rank: int
    in_: str
    at: int
    words: str = ""


def strike_copy(at: int) -> list[int]:
    """Have this process killed before it stages the tensor number ``at``; a list of what it stages, from now on."""
    names, seen = vars(staging_module), list[int]()
    put = names["put_bytes"]

    def put_or_die(part: Any, into: memoryview) -> None:
        if len(seen) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        seen.append(len(into))
        put(part, into)

    names["put_bytes"] = put_or_die
    return seen


def stage(
    rank: int, storage: Path, shelf: Path, point: Point | None, keep_previous: bool, num_failed: int
) -> dict[str, list[Any]]:
    """A rank that goes on from step 1, saves ``num_failed`` steps for which there is no room, and then one more, in
    which it may be killed. What it did in that, where it was not."""
    os.environ[_STAGING_DIR] = str(shelf)
    model, optimizer = make_state(seed=9)
    with checkpointer_of(storage, in_background=True, keep_previous=keep_previous) as checkpointer:
        checkpointer.load(model, optimizer)
        checkpointer.claim()
        checkpointer.prepare(model, optimizer)
        staging: Any = checkpointer._job.saver._staging
        assert staging.num_bytes > 0  # and its thread has ended
        for step in range(2, 2 + num_failed):
            fill(model, optimizer, step)
            full = FileOperations(storage, "full", range(1000), like="os.mkdir")
            checkpointer.save(step, model, optimizer, extra_of(step))
            with pytest.raises(CheckpointError, match="No space left"):
                checkpointer.wait()
            full.end()
        at = {} if point is None or point.rank != rank else {point.in_: point.at}
        copies = strike_copy(at.get("copies", -1))
        on_shelf = FileOperations(shelf, "kill", at.get("shelf"))
        on_storage = FileOperations(storage, "kill", at.get("storage"))
        step = 2 + num_failed
        fill(model, optimizer, step)
        checkpointer.save(step, model, optimizer, extra_of(step))
        fill(model, optimizer, step + 100)
        checkpointer.wait()
        return {"copies": copies, "shelf": on_shelf.end(), "storage": on_storage.end()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    storage: Path
    points: list[Point]


def make_job(ranks: RankPool, folder: Path, num_failed: int = 0, keep_previous: bool = False) -> Job:
    """A job with one checkpoint, and all points at which its next save can be killed, seen in a copy."""
    storage, tried, shelf = folder / "storage", folder / "tried", folder / "tried-shelf"
    shelf.mkdir()
    (began,) = run_trials(ranks, folder / "ends", [Trial(fn=begin_job, args=(storage, 1))])
    assert not any(end.error for end in began), began
    shutil.copytree(storage, tried)
    (ends,) = run_trials(
        ranks, folder / "ends", [Trial(fn=stage, args=(tried, shelf, None, keep_previous, num_failed))]
    )
    assert not any(end.error for end in ends), ends
    assert list(shelf.iterdir()) == []
    points = [
        Point(rank=rank, in_=where, at=at, words=str(words))
        for rank, end in enumerate(ends)
        for where in ("copies", "shelf", "storage")
        for at, words in enumerate(end.value[where])
    ]
    return Job(storage=storage, points=points)


def sample_of(points: Sequence[Point], every: int) -> list[Point]:
    """Some of them, with more of those on the shelf, which are few, and all around COMMIT."""
    chosen = []
    for _, group in itertools.groupby(points, key=lambda point: (point.rank, point.in_)):
        for place, point in enumerate(group):
            stride = min(every, 3) if point.in_ == "shelf" else every
            if place % stride == 0 or (COMMIT in point.words and "os.link" in point.words):
                chosen.append(point)
    return chosen


def not_yet_committed(points: Sequence[Point]) -> list[Point]:
    """Those at which all had staged, and rank 0, which writes COMMIT, is killed before it has."""
    of_the_writer = [point for point in points if point.rank == 0 and point.in_ == "storage"]
    (commit,) = [point.at for point in of_the_writer if COMMIT in point.words and "os.link" in point.words]
    return [point for point in of_the_writer if point.at <= commit]


def kill_at(
    ranks: RankPool,
    folder: Path,
    job: Job,
    points: Sequence[Point],
    *,
    num_failed: int = 0,
    keep_previous: bool = False,
) -> list[tuple[Point, Path, Path]]:
    """Each of ``points`` in a copy of the job's storage: with the storage and the shelf that are left."""
    left = []
    for place, point in enumerate(points):
        storage, shelf = folder / f"killed-{place}", folder / f"shelf-{place}"
        shutil.copytree(job.storage, storage)
        shelf.mkdir()
        left.append((point, storage, shelf))
    trials = [
        Trial(fn=stage, args=(storage, shelf, point, keep_previous, num_failed)) for point, storage, shelf in left
    ]
    for (point, _, _), ends in zip(left, run_trials(ranks, folder / "ends", trials), strict=True):
        other = ends[1 - point.rank]
        assert ends[point.rank].exit_signal == signal.SIGKILL, (point, ends)
        assert other.error is None or other.error.startswith("PeerLostError"), (point, other)
        assert other.seconds < 60
    return left


def expected_of(point: Point, outcomes: list[Outcome], storage: Path) -> int:
    """The newest step that there has to be when step 2 was struck at ``point``."""
    if point.in_ == "copies" or (point.in_ == "shelf" and ".tmp" in point.words):
        assert [outcome.path for outcome in outcomes] == [None], (point, outcomes)
        assert f"cannot be completed: of 2 ranks these had not staged it: {point.rank}" in outcomes[0].why
        return 1
    if point.in_ == "shelf":  # before there was a copy, or after it had become a checkpoint
        assert all(outcome.path is None for outcome in outcomes), (point, outcomes)
        return 1 if not (job_folder(storage) / "step_2" / COMMIT).exists() else 2
    return 2


def complete_each(ranks: RankPool, folder: Path, left: list[tuple[Point, Path, Path]]) -> int:
    """As an agent does, and then the job goes on; how many were completed and not whole already."""
    num_completed = 0
    steps = []
    for point, storage, shelf in left:
        was_there = (job_folder(storage) / "step_2" / COMMIT).exists()
        outcomes = complete(shelf)
        expected = expected_of(point, outcomes, storage)
        assert newest_of(storage) == expected, (point, outcomes)
        made = [outcome.path for outcome in outcomes if outcome.path is not None]
        assert made == ([job_folder(storage) / "step_2"] if expected == 2 and not was_there else []), (point, outcomes)
        num_completed += len(made)
        for step in range(1, expected + 1):
            assert is_loaded(storage, step), point
        assert all(outcome.path is None for outcome in complete(shelf))
        clear(shelf)
        assert list(shelf.iterdir()) == []
        steps.append(expected)
    again = run_trials(ranks, folder / "ends", [Trial(fn=go_on, args=(storage,)) for _, storage, _ in left])
    for (point, storage, _), step, ends in zip(left, steps, again, strict=True):
        assert [end.error for end in ends] == [None, None], (point, ends)
        assert [end.value.loaded_step for end in ends] == [step, step], point
        assert garbage_in(storage) == [], point
        assert is_loaded(storage, step + 1), point
    return num_completed


@pytest.mark.parametrize("every", [60, pytest.param(1, marks=pytest.mark.slow)])
def test_what_all_ranks_had_staged_is_completed_wherever_one_is_killed(
    every: int, ranks: RankPool, folder: Path
) -> None:
    job = make_job(ranks, folder)
    points = sample_of(job.points, every)
    assert {(point.rank, point.in_) for point in points} == set(
        itertools.product((0, 1), ("copies", "shelf", "storage"))
    )
    num_completed = complete_each(ranks, folder, kill_at(ranks, folder, job, points))
    print(f"\nkilled at {len(points)} of {len(job.points)} points; {num_completed} saves were completed afterwards")
    assert num_completed >= len(not_yet_committed(points)) > 0


@pytest.mark.parametrize("keep_previous", the_first([True, False]))
def test_killed_in_mid_copy_the_save_before_is_completed_if_it_is_kept(
    keep_previous: bool, ranks: RankPool, folder: Path
) -> None:
    job = make_job(ranks, folder, num_failed=1, keep_previous=keep_previous)
    points = [point for point in job.points if point.in_ == "copies"][::5]
    assert {point.rank for point in points} == {0, 1}
    left = kill_at(ranks, folder, job, points, num_failed=1, keep_previous=keep_previous)
    for point, storage, shelf in left:
        (outcome,) = complete(shelf)
        if keep_previous:
            assert outcome.path == job_folder(storage) / "step_2", (point, outcome)
            assert is_loaded(storage, 2)
        else:
            assert outcome.path is None and "step_3 cannot be completed" in outcome.why, (point, outcome)
        assert newest_of(storage) == (2 if keep_previous else 1)
        assert is_loaded(storage, 1)


# --- one process ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """What one rank has left: step 1 saved, step 2 staged."""

    storage: Path
    shelf: Path


def stage_alone(storage: Path, shelf: Path, steps: Sequence[int] = (2,), **arguments: Any) -> None:
    """One rank that stages steps, and has no room for them on its storage."""
    model, optimizer = make_state(seed=9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_STAGING_DIR, str(shelf))
        checkpointer = checkpointer_of(storage, in_background=True, **arguments)
    with checkpointer:
        checkpointer.load(model, optimizer)
        for step in steps:
            fill(model, optimizer, step)
            full = FileOperations(storage, "full", range(1000), like="os.mkdir")
            checkpointer.save(step, model, optimizer, extra_of(step))
            with pytest.raises(CheckpointError, match="No space left"):
                checkpointer.wait()
            full.end()


@pytest.fixture
def left(ram: Path) -> Left:
    storage, shelf = ram / "storage", ram / "shelf"
    shelf.mkdir()
    begin_job(0, storage, 1)
    stage_alone(storage, shelf)
    return Left(storage=storage, shelf=shelf)


def why_not(left: Left) -> str:
    """Why nothing is completed, and that nothing was changed by that."""
    before = whole_files(left.storage)
    outcomes = complete(left.shelf, patience_seconds=0.1)
    assert [outcome.path for outcome in outcomes] in ([], [None]), outcomes
    assert whole_files(left.storage) == before
    assert is_loaded(left.storage, 1)
    return outcomes[0].why if outcomes else ""


def test_completed_checkpoint_is_like_one_that_was_saved(left: Left, ram: Path) -> None:
    (outcome,) = complete(left.shelf)
    other = ram / "other"
    begin_job(0, other, 2)
    mine, its = job_folder(left.storage) / "step_2", job_folder(other) / "step_2"
    assert outcome.path == mine
    assert outcome.why == f"{mine} is saved, from the copies that its ranks had staged in memory"
    assert {path.name: path.stat().st_size for path in mine.iterdir() if path.name != COMMIT} == {
        path.name: path.stat().st_size for path in its.iterdir() if path.name != COMMIT
    }
    own, others = read_commit(mine), read_commit(its)
    assert (own.metas, own.states, set(own.shards)) == (others.metas, others.states, set(others.shards))
    assert (own.global_step, own.epoch, own.num_ranks, own.versions) == (2, 0, 1, others.versions)
    assert is_loaded(left.storage, 2) and is_loaded(left.storage, 1)
    assert garbage_in(left.storage) == []
    model, optimizer = make_state()
    with checkpointer_of(left.storage) as checkpointer:
        assert checkpointer.load(model, optimizer).step == 2
        checkpointer.save(3, model, optimizer)
        assert checkpointer.latest() == job_folder(left.storage) / "step_3"


def test_completing_works_without_torch(left: Left) -> None:
    code = (
        "import sys; from pathlib import Path; from elastic_ext.fsdp.checkpoint.saving.rescue import complete; "
        f"print(complete(Path({str(left.shelf)!r}))[0].path, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environ)
    assert done.stdout.split() == [str(job_folder(left.storage) / "step_2"), "False", "False"], done.stderr
    assert is_loaded(left.storage, 2)


def test_what_is_committed_is_not_completed_again(left: Left) -> None:
    kept = left.shelf.with_name("kept")
    shutil.copytree(left.shelf, kept)
    assert complete(left.shelf)[0].path is not None
    before = whole_files(left.storage)
    (outcome,) = complete(kept)
    assert outcome.path is None and outcome.why.startswith("nothing staged is left to complete: "), outcome
    assert "step_2 exists, saved at step 2, and step 2 was staged" in outcome.why
    assert whole_files(left.storage) == before


def test_what_comes_before_the_newest_checkpoint_is_not_completed(ram: Path) -> None:
    storage, shelf = ram / "storage", ram / "shelf"
    shelf.mkdir()
    begin_job(0, storage, 1)
    model, optimizer = make_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_STAGING_DIR, str(shelf))
        checkpointer = checkpointer_of(storage, in_background=True)
    with checkpointer:
        checkpointer.load(model, optimizer)
        full = FileOperations(storage, "full", range(1000), like="os.mkdir")
        checkpointer.save(2, model, optimizer, extra_of(2))
        with pytest.raises(CheckpointError):
            checkpointer.wait()
        full.end()
        assert len(rows_in(shelf)) == 1
        kept = ram / "kept"
        shutil.copytree(shelf, kept)
        checkpointer.save(3, model, optimizer, extra_of(3))
        checkpointer.wait()
        assert rows_in(shelf) == []  # what is a checkpoint is forgotten
    assert list(shelf.iterdir()) == []
    (outcome,) = complete(kept)
    assert outcome.path is None and "step_3 exists, saved at step 3, and step 2 was staged" in outcome.why


def test_with_keep_previous_the_newest_of_two_is_completed(ram: Path) -> None:
    storage, shelf = ram / "storage", ram / "shelf"
    shelf.mkdir()
    begin_job(0, storage, 1)
    stage_alone(storage, shelf, (2, 3, 4), keep_previous=True)
    assert sorted(row.name for row in rows_in(shelf)) == ["step_3", "step_4"]
    (outcome,) = complete(shelf)
    assert outcome.path == job_folder(storage) / "step_4" and is_loaded(storage, 4)


# --- refused --------------------------------------------------------------------------------------------------------


def test_run_that_was_fenced_completes_nothing(left: Left) -> None:
    model, optimizer = make_state()
    with checkpointer_of(left.storage) as checkpointer:
        checkpointer.load(model, optimizer)
        checkpointer.claim()
        assert "is in use by another run of this job" in why_not_while_held(left)
    assert "was taken over by another run of this job" in why_not(left)
    with checkpointer_of(left.storage) as checkpointer:
        checkpointer.load(model, optimizer)
        checkpointer.save(2, model, optimizer, extra_of(2))
    assert "was taken over by another run of this job" in why_not(left)


def why_not_while_held(left: Left) -> str:
    before = whole_files(left.storage)
    (outcome,) = complete(left.shelf, patience_seconds=0.1)
    assert outcome.path is None and whole_files(left.storage) == before
    return outcome.why


def test_folder_of_a_job_that_is_gone_is_a_reason(left: Left) -> None:
    job_folder(left.storage).rename(left.storage / "elsewhere")
    (outcome,) = complete(left.shelf)
    assert outcome.path is None and "No such file or directory" in outcome.why


def damage_record(shelf: Path, change: Callable[[bytes], bytes]) -> None:
    path = record_in(shelf)
    path.write_bytes(change(path.read_bytes()))


def change_record(shelf: Path, **changes: Any) -> None:
    damage_record(shelf, lambda data: replace(StagedFiles.decoded(data), **changes).encoded())


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("at", [0, 20, 32, 33, 60, 300, 2000, -1])
def test_record_with_another_bit_is_refused(at: int, left: Left, caplog: pytest.LogCaptureFixture) -> None:
    damage_record(left.shelf, lambda data: flipped(data, at % len(data)))
    if at == 32:  # the end of a line, which is checked by nothing and says nothing
        assert complete(left.shelf)[0].path is not None
        return
    assert why_not(left) == ""
    assert "cannot be used: it does not match its checksum" in caplog.text


@pytest.mark.parametrize("num_bytes", [0, 10, 33, 200, 3000])
def test_record_that_was_cut_off_is_refused(num_bytes: int, left: Left, caplog: pytest.LogCaptureFixture) -> None:
    damage_record(left.shelf, lambda data: data[:num_bytes])
    assert why_not(left) == ""
    assert "cannot be used: it does not match its checksum" in caplog.text


def test_record_of_another_start_of_the_machine_is_refused(left: Left, caplog: pytest.LogCaptureFixture) -> None:
    change_record(left.shelf, boot="another" + boot_id())
    assert why_not(left) == ""
    assert "cannot be used: it was made before this machine was started" in caplog.text


def test_copy_that_is_cut_off_or_gone_is_refused(left: Left, caplog: pytest.LogCaptureFixture) -> None:
    (memory,) = left.shelf.glob(f"*{MEMORY}")
    os.truncate(memory, 4096)
    assert why_not(left) == ""
    assert "cannot be used: its copy has 4096 bytes where " in caplog.text
    memory.unlink()
    assert why_not(left) == ""
    assert "No such file or directory" in caplog.text


@pytest.mark.parametrize("memory", ["../storage/RUN.json", "/etc/passwd", "", 3])
def test_record_that_names_a_file_elsewhere_is_refused(memory: Any, left: Left) -> None:
    change_record(left.shelf, memory=memory)
    assert why_not(left) == ""


def test_what_another_process_of_the_rank_has_left_is_never_mixed_with_what_comes(left: Left) -> None:
    """A record is gone before its copy is, and before there is another copy that it could be taken for."""
    found = record_in(left.shelf).name.partition(".")[0]
    (left.shelf / f"{found}.0.{'0' * 16}{MEMORY}").write_bytes(bytes(10))
    (left.shelf / f".{found}.0{RECORD}.{'0' * 16}.tmp").write_bytes(bytes(10))
    another = left.shelf / f"another-0.0{RECORD}"
    shutil.copy(record_in(left.shelf), another)
    operations = FileOperations(left.shelf)
    shelf = Shelf(left.shelf, f"{left.storage}/{JOB}", seat=0, rank_now=lambda: 0)
    pages = shelf.pages(shelf.begin() or 0, 8192)
    removed = [words.split()[1] for words in operations.end() if words.startswith("os.remove ")]
    assert removed[0].endswith(RECORD) and len(removed) == 5, removed
    assert pages is not None and len(pages) == 8192
    assert sorted(path.suffix for path in left.shelf.iterdir()) == [MEMORY, RECORD]
    assert another.exists()


def test_storage_whose_name_is_no_utf8_has_copies_too(tmp_path: Path) -> None:
    owner = f"{os.fsdecode(b'/caf' + bytes([0xE9]))}/{JOB}"
    shelf = Shelf(tmp_path, owner, seat=0, rank_now=lambda: 0, room_in=lambda folder: 1 << 20)  # on however full a disk
    pages = shelf.pages(shelf.begin() or 0, 4096)
    assert pages is not None and len(pages) == 4096


def test_copies_of_other_ranks_and_saves_are_not_mixed(left: Left) -> None:
    """The first rank has staged step 2; of the second there is an older save, and one of another number of ranks."""
    record = StagedFiles.decoded(record_in(left.shelf).read_bytes())
    first = replace(record, row=replace(record.row, num_ranks=2))
    record_in(left.shelf).write_bytes(first.encoded())
    stale = replace(first.row, rank=1, generation="0123", global_step=1, name="step_1")
    for place, row in enumerate([stale, replace(first.row, rank=1, num_ranks=3)]):
        (left.shelf / f"other-1.{place}{RECORD}").write_bytes(replace(record, row=row).encoded())
    assert "step_2 cannot be completed: of 3 ranks these had not staged it: 0, 2" in why_not(left)


# --- choosing -------------------------------------------------------------------------------------------------------


def row(run: str, generation: str, rank: int, num_ranks: int = 2, step: int = 5, staged_ns: int = 0) -> StagedCopy:
    return StagedCopy(
        folder="/storage/fsdp_checkpoint/a-job_20261105-021140",
        name=f"step_{step}",
        generation=generation,
        run_id=run,
        global_step=step,
        rank=rank,
        num_ranks=num_ranks,
        staged_ns=staged_ns,
    )


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        ([], {}),
        ([row("r", "a", 0), row("r", "a", 1)], {"r": "a"}),
        ([row("r", "a", 0)], {"r": None}),
        ([row("r", "a", 1)], {"r": None}),
        ([row("r", "a", 0), row("r", "b", 1)], {"r": None}),
        ([row("r", "a", 0), row("r", "a", 1, 3)], {"r": None}),
        ([row("r", "a", 0, 1)], {"r": "a"}),
        ([row("r", "a", 0), row("r", "a", 1), row("r", "b", 0, step=6)], {"r": "a"}),
        ([row("r", "a", 0), row("r", "a", 1), row("r", "b", 0, step=6), row("r", "b", 1, step=6)], {"r": "b"}),
        ([row("r", "a", rank, staged_ns=2) for rank in (0, 1)] + [row("r", "b", rank) for rank in (0, 1)], {"r": "a"}),
        ([row("r", "a", 0, 1, step=9), row("s", "b", 0, 1)], {"r": "a", "s": "b"}),
    ],
)
def test_newest_save_that_is_whole_on_every_rank_is_chosen(
    rows: list[StagedCopy], chosen: dict[str, str | None]
) -> None:
    for order in itertools.permutations(rows):
        choices = choose(order)
        assert {choice.run_id: choice.generation for choice in choices} == chosen
        assert choices == choose(rows)


@pytest.mark.parametrize(
    "change",
    [{"name": "a"}, {"generation": "a/b"}, {"rank": 2}, {"rank": -1}, {"num_ranks": 0}, {"folder": "a"}, {"folder": 3}],
)
def test_row_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="allowed: "):
        replace(row("r", "a", 0), **change)


# --- several nodes --------------------------------------------------------------------------------------------------


def stage_on_node(rank: int, storage: Path, shelves: list[Path]) -> None:
    """Each rank on a node of its own; both die when they have staged step 2."""
    os.environ[_STAGING_DIR] = str(shelves[rank])
    model, optimizer = make_state(seed=9)
    with checkpointer_of(storage, in_background=True) as checkpointer:
        checkpointer.load(model, optimizer)
        checkpointer.claim()
        fill(model, optimizer, 2)
        FileOperations(storage, "hang", 0, like="os.mkdir")
        checkpointer.save(2, model, optimizer, extra_of(2))
        os.kill(os.getpid(), signal.SIGKILL)


def test_agents_of_several_nodes_complete_together(ranks: RankPool, folder: Path) -> None:
    storage, shelves = folder / "storage", [folder / "node-0", folder / "node-1"]
    for shelf in shelves:
        shelf.mkdir()
    ends = run_trials(
        ranks,
        folder / "ends",
        [Trial(fn=begin_job, args=(storage, 1)), Trial(fn=stage_on_node, args=(storage, shelves))],
        at_once=1,
    )
    assert [end.exit_signal for end in ends[1]] == [9, 9], ends
    told = [json.loads(json.dumps([asdict(row) for row in rows_in(shelf)])) for shelf in shelves]
    rows = [StagedCopy(**row) for rows in told for row in rows]
    (choice,) = choose(rows)
    assert choose(rows_in(shelves[1]))[0].generation is None
    completions = [Completion(shelf, choice) for shelf in shelves]
    assert [completion.has_first for completion in completions] == [True, False]

    completions[0].begin()
    with pytest.raises(CheckpointError, match=r"only 1 of the 2 ranks .* what the others had staged is lost"):
        completions[0].commit(completions[0].write())
    completions[0].close()
    assert newest_of(storage) == 1 and unfinished_in(storage) == []

    completions[0].begin()
    written = json.loads(json.dumps([completion.write() for completion in completions[::-1]]))
    path = completions[0].commit([of_rank for of_node in written for of_rank in of_node])
    for completion in completions:
        completion.close()
    assert path == job_folder(storage) / "step_2" and is_loaded(storage, 2) and is_loaded(storage, 1)
    assert garbage_in(storage) == []
    with pytest.raises(CheckpointExists):
        completions[0].begin()
    completions[0].close()
    checkpointer_of(storage).claim()
    with Completion(shelves[0], choice) as fenced, pytest.raises(CheckpointFenced):
        fenced.begin(patience_seconds=0.1)


def test_completion_that_finds_no_room_leaves_what_there_was(left: Left) -> None:
    for like in ("os.mkdir", "os.writev", "os.fsync", ".COMMIT."):
        full = FileOperations(left.storage, "full", 0, like=like)
        (outcome,) = complete(left.shelf)
        full.end()
        assert outcome.path is None and "No space left on device" in outcome.why, like
        assert newest_of(left.storage) == 1 and unfinished_in(left.storage) == []
        assert is_loaded(left.storage, 1), like
    assert complete(left.shelf)[0].path is not None
    assert is_loaded(left.storage, 2)


# --- memory ---------------------------------------------------------------------------------------------------------


def save_on_small_shelf(_: int, folder: Path, size: str, arguments: dict[str, Any]) -> tuple[str, list[str]]:
    """Two saves with a shelf that is a file system of its own, of so many bytes; what lies there then."""
    libc = ctypes.CDLL(None, use_errno=True)
    clone_newns, ms_rec, ms_private = 0x20000, 16384, 1 << 18
    shelf = folder / "small"
    shelf.mkdir(parents=True)
    if (
        libc.unshare(clone_newns)
        or libc.mount(b"none", b"/", None, ms_rec | ms_private, None)
        or libc.mount(b"none", os.fsencode(shelf), b"tmpfs", 0, f"size={size}".encode())
    ):
        return f"no file system can be mounted here: {os.strerror(ctypes.get_errno())}", []
    os.environ[_STAGING_DIR] = str(shelf)
    model, optimizer = make_state(width=600)  # about 80 KB
    with checkpointer_of(folder / "storage", in_background=True, **arguments) as checkpointer:
        checkpointer.prepare(model, optimizer)
        for step in (1, 2):
            fill(model, optimizer, step)
            checkpointer.save(step, model, optimizer, extra_of(step))
        checkpointer.wait()
        names = [path.suffix for path in shelf.iterdir()]
        checkpointer.load(model, optimizer)
        assert digest_of(model, optimizer) == digest_at(2, 600)
    return "", names


@pytest.mark.parametrize(
    ("size", "arguments", "num_kept"),
    [
        ("64k", {}, 0),
        ("128k", {}, 1),
        ("400k", {}, 1),
        ("128k", {"keep_previous": True}, 0),
        ("400k", {"keep_previous": True}, 2),
    ],
)
def test_what_has_no_room_is_staged_in_the_process_and_one_warning_says_so(
    size: str, arguments: dict[str, Any], num_kept: int, ranks: RankPool, ram: Path
) -> None:
    trial = Trial(fn=save_on_small_shelf, args=(ram / "files", size, arguments), num_ranks=1)
    ((end,),) = run_trials(ranks, ram / "ends", [trial])
    assert end.error is None, end.trace
    reason, names = end.value
    if reason:
        pytest.skip(reason)
    assert names == [MEMORY] * num_kept
    told = [line for line in end.log if "stages what it saves in its own memory" in line]
    assert len(told) == (0 if num_kept else 1), end.log
    for line in told:
        assert (
            "bytes are needed in " in line
            and "there is room for " in line
            and "docker run --shm-size" in line
            and "medium: Memory" in line
        )


def save_with_small_files(_: int, folder: Path) -> list[str]:
    """The shelf's file cannot be as large as it is to be, which is found while room is made for it."""
    (folder / "shelf").mkdir(parents=True)
    os.environ[_STAGING_DIR] = str(folder / "shelf")
    model, optimizer = make_state(width=600)
    with checkpointer_of(folder / "storage", in_background=True) as checkpointer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, resource.RLIM_INFINITY))
        checkpointer.prepare(model, optimizer)
        staging: Any = checkpointer._job.saver._staging
        assert staging.num_bytes > 20000
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        checkpointer.save(1, model, optimizer)
        checkpointer.wait()
    return os.listdir(folder / "shelf")


def test_room_that_cannot_be_had_is_no_signal_and_no_failed_save(ranks: RankPool, ram: Path) -> None:
    trial = Trial(fn=save_with_small_files, args=(ram / "files",), num_ranks=1)
    ((end,),) = run_trials(ranks, ram / "ends", [trial])
    assert end.error is None and end.value == [], end
    assert ["File too large" in line for line in end.log] == [True], end.log


def test_folder_that_is_gone_is_a_warning_and_saves_go_on(
    ram: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(_STAGING_DIR, str(ram / "shelf"))
    model, optimizer = make_state()
    for _ in range(2):  # it was never there; it goes while it is used
        with checkpointer_of(ram / "storage", in_background=True) as checkpointer:
            step = 1 if checkpointer.latest() is None else 1 + checkpointer.load(model, optimizer).step
            checkpointer.save(step, model, optimizer, extra_of(step))
            checkpointer.wait()
            shutil.rmtree(ram / "shelf", ignore_errors=True)
            for later in (step + 1, step + 2):
                fill(model, optimizer, later)
                checkpointer.save(later, model, optimizer, extra_of(later))
            checkpointer.wait()
        assert is_loaded(ram / "storage", later)
        (ram / "shelf").mkdir()
    assert "stages what it saves in its own memory" in caplog.text
    assert "the staged copy has no record in" in caplog.text


def test_without_an_agent_memory_is_this_processs_own(ram: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_STAGING_DIR, raising=False)
    model, optimizer = make_state(width=600)
    sizes = []
    for keep_previous in (False, True):
        arguments: dict[str, Any] = {"in_background": True, "keep_previous": keep_previous}
        with checkpointer_of(ram / str(keep_previous), **arguments) as checkpointer:
            checkpointer.prepare(model, optimizer)
            staging: Any = checkpointer._job.saver._staging
            sizes.append(staging.num_bytes)
    assert sizes[0] == sizes[1] > 0
    with pytest.raises(ValueError, match="keep_previous is True, and nothing is saved in the background"):
        ShardCheckpointer(ram, job=JOB, keep_previous=True)


def sizes_in(shelf: Path) -> Iterator[int]:
    """Of its files, of which some are taken away by whoever saves beside."""
    for path in shelf.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            yield path.stat().st_size


@pytest.mark.parametrize("keep_previous", [False, True])
def test_a_trainer_has_its_agent_keep_one_copy_or_two(
    keep_previous: bool, ram: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = ram / "shelf"
    shelf.mkdir()
    monkeypatch.setenv(_STAGING_DIR, str(shelf))
    model = nn.Linear(64, 64)
    arguments: dict[str, Any] = {"shared_storage_path": ram / "storage", "job": JOB, "run_dir": ram / "run"}
    arguments |= {"checkpoint_interval": CheckpointInterval(steps=1), "keep_previous": keep_previous}
    with ElasticTrainer(model, micro_batch_size=1, **grouped(**arguments)) as trainer:
        optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(4):
            with trainer.step():
                model(torch.ones(1, 64)).sum().backward()
                optimizer.step()
        assert sum(size > 64 * 64 * 4 for size in sizes_in(shelf)) == 1 + keep_previous
    with pytest.raises(ValueError, match="keep_previous is True, and nothing is saved in the background"):
        ElasticTrainer(
            model,
            shared_storage_path=ram,
            checkpoint_options=CheckpointOptions(save_in_background=False, keep_previous=True),
        )


def maps_of(shelf: Path) -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count(str(shelf))


@pytest.mark.parametrize("keep_previous", [False, True])
def test_50_saves_leak_neither_memory_nor_descriptors(
    keep_previous: bool, ram: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = ram / "shelf"
    shelf.mkdir()
    monkeypatch.setenv(_STAGING_DIR, str(shelf))
    model, optimizer = make_state(width=64)
    num_slots = 2 if keep_previous else 1
    before = len(os.listdir("/proc/self/fd"))
    counts = []
    with checkpointer_of(ram / "storage", in_background=True, keep_previous=keep_previous) as checkpointer:
        for step in range(1, 51):
            if step % 20 == 0:  # more than there is room for
                model.register_buffer(f"more_{step}", torch.ones(step * 1000))
            checkpointer.save(step, model, optimizer, extra_of(step))
            if step % 10 == 5:
                checkpointer.wait()
                gc.collect()
                counts.append((len(os.listdir("/proc/self/fd")), maps_of(shelf), len(os.listdir(shelf))))
        staging: Any = checkpointer._job.saver._staging
        sizes = {path.stat().st_size for path in shelf.glob(f"*{MEMORY}")}
        assert staging.num_bytes == sum(sizes) * num_slots // len(sizes)
    assert len(set(counts)) == 1 and counts[0][1:] == (num_slots, num_slots), counts
    assert list(shelf.iterdir()) == []
    del checkpointer, staging
    gc.collect()
    assert maps_of(shelf) == 0 and len(os.listdir("/proc/self/fd")) <= before


def test_model_without_tensors_of_its_own_on_a_rank_is_staged_and_completed(ram: Path) -> None:
    """The second rank's file of a kind, or all of its files, may have nothing in them."""
    record = StagedFiles(row=row("r", "a", 1))
    assert StagedFiles.decoded(record.encoded()) == record
    with record.mapped(ram) as memory:
        assert len(memory) == 0


def test_choice_without_a_generation_has_nothing_to_complete(left: Left) -> None:
    choice = RescuePlan(run_id="r", generation=None, why="")
    assert not Completion(left.shelf, choice).has_first
