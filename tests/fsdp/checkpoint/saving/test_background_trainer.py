"""A trainer's checkpoints that are due while another one is being saved, and the memory that it keeps for them."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from elastic_ext import CheckpointInterval
from elastic_ext.errors import CheckpointError
from tests.support.file_operations import Gate
from tests.support.saving import Small, end_saves
from tests.support.scripts import begun
from tests.support.thinning import the_first

_END_SECONDS = 120.0  # for a script, on a busy machine


def checkpoints_of(small: Small) -> Any:
    return small.trainer._training.checkpoints.job


# --- another one is under way ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("when_saving", ["skip", "error"])
def test_a_checkpoint_that_is_asked_for_waits_for_the_one_under_way(tmp_path: Path, when_saving: str) -> None:
    small = Small(tmp_path, when_saving=when_saving)
    with small.trainer:
        gate = Gate(small.storage, like="os.mkdir")
        small.take(2)
        proposal = small.trainer.propose({"checkpoint.now": True, "checkpoint.steps": 1000}, "somebody asks")
        threading.Timer(0.2, gate.open).start()
        small.take(4)
        assert proposal.outcome == "in force"
        assert gate.is_open
    first, second, *_ = small.saved
    assert first == "step_2" and second in ("step_3", "step_4")


def test_what_was_left_out_at_the_last_step_is_saved_as_training_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = Small(tmp_path, when_saving="skip")
    with small.trainer:
        gate = Gate(small.storage, like="os.mkdir")
        small.take(6)
        threading.Timer(0.1, gate.open).start()
    assert "step_4 is not saved, since" in caplog.text
    assert "step_6 is not saved, since" in caplog.text
    assert small.saved == ["step_2", "step_6"]


def test_an_epochs_checkpoint_that_was_left_out_at_the_end_has_its_name(tmp_path: Path) -> None:
    small = Small(tmp_path, when_saving="skip", checkpoint_interval=CheckpointInterval(epochs=1))
    with small.trainer:
        gate = Gate(small.storage, like="os.mkdir")
        for epoch in range(3):
            with small.trainer.epoch(epoch):
                small.take()
        threading.Timer(0.1, gate.open).start()
    assert small.saved == ["epoch_1", "epoch_3"]


def test_what_is_due_while_storage_hangs_for_too_long_is_an_error_and_not_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = Small(tmp_path, when_saving="skip")
    gate = Gate(small.storage, like="os.mkdir")
    small.take(5)
    assert "step_4 is not saved, since" in caplog.text
    storage = checkpoints_of(small)._storage
    seconds, storage.seconds = storage.seconds, 0.0  # the one under way has taken longer by now
    small.take()
    with pytest.raises(CheckpointError, match="took longer than 0 seconds"):
        small.take()
    gate.open()
    end_saves()
    storage.seconds = seconds
    small.trainer.close()


def test_a_save_by_hand_that_hangs_yet_holds_up_what_is_due(tmp_path: Path) -> None:
    small = Small(tmp_path)
    gate = Gate(small.storage, like="os.mkdir")
    storage = checkpoints_of(small)._storage
    seconds, storage.seconds = storage.seconds, 0.1
    with pytest.raises(CheckpointError, match="took longer than"):
        small.trainer.save_checkpoint()
    storage.seconds = seconds
    small.take(2)
    with pytest.raises(CheckpointError, match="has not answered yet"):
        small.take()
    gate.open()
    small.trainer.close()


def test_old_checkpoints_that_are_being_removed_leave_out_no_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = Small(tmp_path, when_saving="skip", keep_last=1)
    with small.trainer:
        small.take(3)
        end_saves()
        (folder,) = small.storage.glob("fsdp_checkpoint/*/step_2")
        gate = Gate(folder, like="os.remove")
        small.take(2)
        gate.wait_until_reached()
        assert small.saved == ["step_2", "step_4"]
        small.take(2)
        gate.open()
    assert small.saved == ["step_7"], "the last step's, as training ends"
    assert "is not saved" not in caplog.text


# --- memory ---------------------------------------------------------------------------------------------------------


def test_memory_is_made_when_there_is_an_interval(tmp_path: Path) -> None:
    small = Small(tmp_path, checkpoint_interval=CheckpointInterval())
    with small.trainer:
        staging = checkpoints_of(small).saver._staging
        small.take(2)
        small.trainer.save_checkpoint()
        assert staging.num_bytes == 0
        small.trainer.propose({"checkpoint.steps": 1000}, "from now on")
        small.take(2)
        assert staging.num_bytes > 0
    assert small.saved == ["step_2", "step_4"]


# --- the end of a script --------------------------------------------------------------------------------------------


SCRIPT = """
import os, sys, threading
from pathlib import Path
from tests.support.file_operations import FileOperations
from tests.support.saving import Small, checkpointer_of, make_state

def write_late():  # no folder is made before the script has come to its end
    threading.main_thread().join()
    threading.Event().wait(0.3)  # and nothing else keeps the process

folder = Path(sys.argv[1])
if os.fork():
    small = Small(folder)
    FileOperations(small.storage, write_late, 0, like="os.mkdir")
    small.take(2)
    small.trainer.reset()
    small.take(2)
else:
    checkpointer = checkpointer_of(folder / "other", in_background=True)
    checkpointer.claim()
    FileOperations(folder / "other", write_late, 0, like="os.mkdir")
    checkpointer.save(1, *make_state())
"""


@pytest.mark.parametrize("is_new", the_first([False, True]), ids=["forked", "new interpreter"])
@pytest.mark.usefixtures("forked_jobs")
def test_a_script_that_closes_nothing_has_its_last_checkpoints(tmp_path: Path, is_new: bool) -> None:
    """One of them is under way when it ends, one is due and not begun; with a trainer, and without."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with begun([str(script), str(tmp_path)], env=environment, is_new=is_new) as process:
        told, _ = process.communicate(timeout=_END_SECONDS)
    assert (process.returncode, told) == (0, "")
    saved = sorted(path.parent.name for path in (tmp_path / "storage").glob("fsdp_checkpoint/*/*/COMMIT"))
    assert saved == ["step_2", "step_4"]
    assert len(list((tmp_path / "other").glob("fsdp_checkpoint/*/step_1/COMMIT"))) == 1
