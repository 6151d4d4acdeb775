"""What is copied for a training that may be told to end is no save that is due: it tells nothing and delays nothing."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ext import CheckpointInterval
from elastic_ext.errors import CheckpointError
from tests.support.file_operations import FileOperations
from tests.support.ranks import RankPool
from tests.support.saving import Small, end_saves


def checkpoints_of(small: Small) -> Any:
    return small.trainer._training.checkpoints


def saving_of(small: Small) -> Any:
    return small.trainer._training.saving


def test_a_save_that_failed_is_told_of_where_the_next_one_is_due_and_by_no_copy(tmp_path: Path) -> None:
    small = Small(tmp_path, checkpoint_interval=CheckpointInterval())
    checkpoints = checkpoints_of(small)
    small.take()
    FileOperations(small.storage, "full", 0, like="os.writev")
    checkpoints.save("step_1", checkpoints.moment(), checkpoints._mode())
    end_saves()
    small.take()
    saving_of(small)._copy()
    assert checkpoints.job.saver.is_holding
    with pytest.raises(CheckpointError, match="No space left on device"):
        checkpoints._save_or_warn("step_2", checkpoints.moment(), checkpoints._mode())
    checkpoints._save_or_warn("step_2", checkpoints.moment(), checkpoints._mode())
    small.trainer.close()
    assert small.saved == ["step_2"]


def test_a_save_that_failed_is_one_line_where_training_goes_on_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = Small(tmp_path, when_save_fails="warn")
    small.take(3)
    end_saves()
    shutil.rmtree(small.storage)
    small.take(4)
    small.trainer.close()
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [step for step in (4, 6, 7) for line in told if f"step_{step} was not saved: " in line] == [4, 6, 7]
    assert len(told) == 3


def test_what_is_saved_is_not_copied(tmp_path: Path) -> None:
    small = Small(tmp_path)
    checkpoints = checkpoints_of(small)
    small.take()
    saving_of(small)._copy()
    assert checkpoints.job.saver.is_holding
    small.trainer.save_checkpoint()
    saving_of(small)._copy()
    assert not checkpoints.job.saver.is_holding
    small.trainer.close()


def test_what_was_due_and_is_not_begun_leaves_the_checkpoint_before_to_go_on_from(tmp_path: Path) -> None:
    small = Small(tmp_path)
    saving = saving_of(small)
    saving._copied_at = math.inf  # nothing is copied by itself
    small.take()
    assert not saving.has_some() and "nothing was copied so far, and nothing is saved" in saving._write_newest(1.0)[1]
    small.take(3)
    assert checkpoints_of(small).is_due
    assert saving.has_some() and not saving.can_write()
    step, told = saving._write_newest(30.0)
    assert step == 2 and "step_2 is what there is to go on from; training has come to step 4" in told
    assert small.saved == ["step_2"]
    small.trainer.close()
    resumed = Small(tmp_path)
    saving = saving_of(resumed)
    saving._copied_at = math.inf
    resumed.take()
    step, told = saving._write_newest(30.0)
    assert step == 4 and "step_4 is what there is to go on from; training has come to step 5" in told
    resumed.trainer.close()


def test_a_copy_that_cannot_be_made_is_none_and_training_goes_on(tmp_path: Path) -> None:
    small = Small(tmp_path)
    checkpoints = checkpoints_of(small)
    small.take()
    checkpoints._state.model.register_buffer("bad", torch.zeros(1).to_sparse())
    saving_of(small)._copy()
    assert not checkpoints.job.saver.is_holding
    small.trainer._model.bad = None
    small.take(4)
    small.trainer.close()
    assert "step_4" in small.saved


def test_the_next_copy_waits_until_this_one_was_worth_it(tmp_path: Path) -> None:
    small = Small(tmp_path, checkpoint_interval=CheckpointInterval())
    saving_of(small)._makes_copies = True
    small.take()
    assert saving_of(small)._is_copy_wanted()
    saving_of(small)._copy()
    saving_of(small)._copy_seconds = 60.0
    small.take()
    assert not saving_of(small)._is_copy_wanted()
    small.trainer.close()


def num_copies(rank: int, folder: Path, every: int) -> int:
    """Of a run in which the first copy takes so long that there is time for no other."""
    small = Small(folder, rank=rank, checkpoint_interval=CheckpointInterval(steps=1000), agree_every_steps=every)
    checkpoints = checkpoints_of(small)
    checkpoints.job.saver._staging._finish()  # its memory is there
    saving_of(small)._copy_seconds = 600.0
    moments = set()
    for _ in range(6 * every):
        small.take()
        moments.add(saving_of(small)._copied_at)
    small.trainer.close()
    return len(moments - {-math.inf})


@pytest.mark.parametrize("every", [1, 3])
def test_one_copy_is_made_of_one_that_is_wanted(every: int, ranks: RankPool, tmp_path: Path) -> None:
    assert num_copies(0, tmp_path, every) == 1
    (tmp_path / "ranks").mkdir()
    assert ranks.run(2, num_copies, tmp_path / "ranks", every) == [1, 1]
