"""Runs that begin anew where a job has checkpoints: until one of their own exists, the old ones are what is resumed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from elastic_ext.errors import CheckpointError
from elastic_ext.fsdp.checkpoint.commit import COMMIT
from tests.file_operations import FileOperations, Strike
from tests.ranks import RankPool
from tests.saving import begin_job, checkpointer_of, digest_at, digest_of, extra_of, fill, job_folder, make_state
from tests.trials import Trial, run_trials

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
    ("step", "strike"),
    [
        pytest.param(1, "kill", marks=pytest.mark.slow),
        (OLD_STEPS, "kill"),
        pytest.param(OLD_STEPS, "full", marks=pytest.mark.slow),
    ],
)
def test_the_newest_one_is_resumed_until_there_is_one_of_the_new_run(
    ranks: RankPool, tmp_path: Path, step: int, strike: Strike
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
    points = sorted({*range(0, len(words), 20), *late})
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
