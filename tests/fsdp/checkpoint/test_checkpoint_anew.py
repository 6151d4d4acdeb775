"""Runs that begin anew where a job has checkpoints: until one of their own exists, the old ones are what is resumed."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ext.cli import main
from elastic_ext.errors import CheckpointError
from elastic_ext.fsdp.checkpoint.folder.cleanup import Clearing, Hold, apply_retention
from elastic_ext.fsdp.checkpoint.folder.commit import COMMIT
from elastic_ext.fsdp.checkpoint.folder.job_folder import JobFolder
from elastic_ext.fsdp.checkpoint.folder.listing import ListedCheckpoint, Listing, Retention
from tests.support.file_operations import FileOperations, Strike
from tests.support.ranks import RankPool
from tests.support.saves import Run, assert_loads, runs
from tests.support.saving import (
    begin_job,
    checkpointer_of,
    digest_at,
    digest_of,
    extra_of,
    fill,
    job_folder,
    make_state,
)
from tests.support.thinning import the_first
from tests.support.trials import Trial, run_trials

OLD_STEPS = 3


def begin_anew(rank: int, storage: Path, step: int, strike: Strike, at: int | None) -> list[str]:
    """A rank of a run that loads nothing, and whose first save is struck on the first rank."""
    model, optimizer = make_state()
    fill(model, optimizer, 100 + step)
    with checkpointer_of(storage) as checkpointer:
        operations = FileOperations(storage, strike, at if rank == 0 else None)
        checkpointer.save(step, model, optimizer, extra_of(step))
        return operations.end()


def newest_state(storage: Path) -> tuple[int, str]:
    """What a run that goes on would load."""
    model, optimizer = make_state(seed=7)
    with checkpointer_of(storage) as checkpointer:
        step = checkpointer.load(model, optimizer).step
    return step, digest_of(model, optimizer)


@pytest.mark.parametrize(
    ("step", "strike", "stride"),
    the_first([(OLD_STEPS, "kill", 5), (OLD_STEPS, "kill", 1), (OLD_STEPS, "full", 1), (1, "kill", 1)]),
)
def test_the_newest_one_is_resumed_until_there_is_one_of_the_new_run(
    ranks: RankPool, tmp_path: Path, step: int, strike: Strike, stride: int
) -> None:
    storage = tmp_path / "storage"
    ranks.run(2, begin_job, storage, OLD_STEPS)
    shutil.copytree(storage, tmp_path / "tried")
    (tried,) = run_trials(
        ranks, tmp_path / "ends", [Trial(fn=begin_anew, args=(tmp_path / "tried", step, "kill", None))]
    )
    assert [end.error for end in tried] == [None, None], tried
    words = tried[0].value
    late = [at for at, each in enumerate(words) if COMMIT in each or ".abandoned" in each]
    points = sorted({*range(0, len(words), 20 * stride), *late[::stride]})
    copies = [tmp_path / f"copy-{at}" for at in points]
    for copy in copies:
        shutil.copytree(storage, copy)
    run_trials(
        ranks,
        tmp_path / "ends",
        [Trial(fn=begin_anew, args=(copy, step, strike, at)) for copy, at in zip(copies, points, strict=True)],
    )
    old, new = (OLD_STEPS, digest_at(OLD_STEPS)), (step, digest_at(100 + step))
    seen = [newest_state(copy) for copy in copies]
    assert set(seen) <= {old, new}, [(words[at], found) for at, found in zip(points, seen, strict=True)]
    assert seen[0] == old


def test_what_a_run_that_saved_has_left_behind_is_not_taken_up_again(tmp_path: Path) -> None:
    begin_job(0, tmp_path, OLD_STEPS)
    begin_anew(0, tmp_path, 1, "kill", None)
    folder = job_folder(tmp_path)
    assert len(list(folder.glob("step_*.abandoned-*"))) == OLD_STEPS
    assert newest_state(tmp_path) == (1, digest_at(101))
    os.rename(folder / "step_1", tmp_path / "moved")
    for path in folder.glob("step_*.abandoned-*"):
        shutil.rmtree(path)
    model, optimizer = make_state()
    with checkpointer_of(tmp_path) as checkpointer, pytest.raises(CheckpointError, match="no checkpoint"):
        checkpointer.load(model, optimizer)


# ---- which of them count, by what their COMMITs and names say ----


class DiesSoon(Hold):
    """The claim of a run that dies when it has looked at it so many times."""

    def __init__(self, run: Run, num_looks: int) -> None:
        self.folder, self.since_ns = run.claim.folder, run.claim.since_ns
        self._num_looks = num_looks

    def check(self) -> None:
        self._num_looks -= 1
        if self._num_looks < 0:
            raise InterruptedError


def die_before_a_commit(run: Run, name: str, num_looks: int = 1000) -> None:
    """Do what a run does until its first COMMIT is to appear, and no more than so much of it."""
    run.folder.begin(name, "g", run.chain)
    with suppress(InterruptedError):
        Clearing(DiesSoon(run, num_looks)).abandon(run.chain)
    run.end()


def counting(path: Path) -> list[str]:
    return [one.commit.generation for one in Listing.counting(path).found]


def newest_in(path: Path) -> str | None:
    latest = JobFolder(path).latest()
    return None if latest is None else latest.commit.generation


def copy_with_new_times(path: Path, target: Path) -> Path:
    """What copying a folder without its times may leave: what was abandoned is the newest of all."""
    shutil.copytree(path, target)
    for seconds, name in enumerate(sorted(os.listdir(target), key=lambda name: (".abandoned" in name, name))):
        for file in (target / name).glob("*"):
            os.utime(file, (seconds, seconds))
    return target


def test_what_counts_is_the_same_in_a_copy_whatever_its_files_times(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    runs(tmp_path / "job", {"a": (None, ["step_1", "step_2", "step_3"]), "b": ("step_1", ["step_2"])})
    copy = copy_with_new_times(tmp_path / "job", tmp_path / "copy")
    assert counting(copy) == counting(tmp_path / "job") == ["a-1", "b-1"]


def test_what_several_runs_abandon_that_all_die_counts_until_one_saves(tmp_path: Path) -> None:
    runs(tmp_path, {"a": (None, ["step_1", "step_2", "step_3"])})
    for run_id, name, num_looks in (("b", "step_3", 2), ("c", "step_1", 3), ("d", "step_9", 1000), ("e", "step_2", 0)):
        die_before_a_commit(Run(tmp_path, run_id), name, num_looks)
        assert counting(tmp_path) == ["a-1", "a-2", "a-3"]
    run = Run(tmp_path, "f").go_on(JobFolder(tmp_path).latest())
    run.save("step_4")
    assert newest_in(tmp_path) == "f-1"
    run.end()


def test_what_was_left_twice_gives_way_to_what_was_left_last(tmp_path: Path) -> None:
    runs(tmp_path, {"a": (None, ["step_1", "step_5"])})
    die_before_a_commit(Run(tmp_path, "b"), "step_1")
    runs(tmp_path, {"c": (None, ["step_2"])})
    die_before_a_commit(Run(tmp_path, "d"), "step_2")
    assert counting(tmp_path) == ["c-1"]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_run_that_dies_before_it_has_saved_changes_nothing_that_counts(data: st.DataObject) -> None:
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=folder) as kept:
        path, newest = Path(kept), None
        for number in range(data.draw(st.integers(1, 7), label="runs")):
            run = Run(path, f"r{number}")
            before = Listing.counting(path).found
            parent: ListedCheckpoint | None = data.draw(st.sampled_from([None, *before]), label=f"parent of {number}")
            run.go_on(parent)
            step = (parent.commit.global_step if parent else 0) + data.draw(st.integers(1, 2), label="step")
            if data.draw(st.booleans(), label="dies"):
                die_before_a_commit(run, f"step_{step}", data.draw(st.integers(0, 9), label="looks"))
                assert counting(path) == [one.commit.generation for one in before]
            else:
                for further in range(data.draw(st.integers(1, 2), label="saves")):
                    newest = run.save(f"step_{step + further}").commit.generation
                run.end()
            assert newest_in(path) == newest
            if data.draw(st.booleans(), label="prune"):
                keep_last = data.draw(st.integers(1, 3), label="last")
                apply_retention(path, Retention(keep_last=keep_last, keep_abandoned=False))
                assert newest_in(path) == newest
        for one in Listing.counting(path).found:
            assert_loads(one)


def test_what_counts_is_the_same_to_every_command_and_none_removes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs(tmp_path, {"a": (None, ["step_1", "step_2", "step_3"])})
    die_before_a_commit(Run(tmp_path, "b"), "step_9")
    assert main(["ckpt", "ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("abandoned for a run that has saved nothing: a resume may use it") == 3
    main(["ckpt", "show", str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[0] == str(tmp_path / "step_3.abandoned-b")
    assert main(["ckpt", "prune", str(tmp_path), "--abandoned", "--keep-last", "2"]) == 0
    assert "step_3.abandoned-b stays: the newest" in capsys.readouterr().out
    assert counting(tmp_path) == ["a-2", "a-3"]
