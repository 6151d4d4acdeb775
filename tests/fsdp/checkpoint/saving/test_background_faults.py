"""Saves that fail while training goes on: all ranks hear of it alike, and in time, and the next one works."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from elastic_ext.errors import CheckpointError
from elastic_ext.fsdp.checkpoint.format.shardfile import laid_out
from elastic_ext.fsdp.checkpoint.saving import saver
from elastic_ext.fsdp.checkpoint.saving.background import THREAD_NAME
from tests.support.file_operations import FileOperations, Gate, Strike
from tests.support.ranks import RankPool
from tests.support.saving import (
    FAILING,
    checkpointer_of,
    end_saves,
    extra_of,
    fill,
    garbage_in,
    go_on,
    job_folder,
    make_state,
    newest_of,
    take_over,
)
from tests.support.thinning import the_first
from tests.support.trials import Trial, run_one

_SHORT_SECONDS = 2.0  # for storage that hangs, and otherwise does not on a busy machine
_SOON_SECONDS = 15.0  # on a busy machine, and half of what ranks have for each other


# --- a rank that fails ----------------------------------------------------------------------------------------------


UNABLE = {
    "memory": "there is no memory for the staged copy of this save: ",
    "names": "the state of this step cannot be staged: two tensors are named 'a'; give each a name of its own",
    "thread": "the thread that writes this save cannot be started: can't start new thread",
}


def unable_to(what: str, patch: pytest.MonkeyPatch, staging: Any) -> None:
    """Have this process unable to begin an async save."""
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name == THREAD_NAME:
            raise RuntimeError("can't start new thread")
        start(thread)

    if what == "memory":
        patch.setattr(staging, "hold", lambda *_: bytearray(1 << 60))
    elif what == "names":
        patch.setattr(staging, "hold", lambda *_: laid_out([("a", "F32", (1,))] * 2, generation=""))
    else:
        patch.setattr(threading.Thread, "start", start_others)


def unable(rank: int, storage: Path, what: str) -> list[str]:
    """Rank 1 cannot begin the first save."""
    model, optimizer = make_state()
    errors = []
    with checkpointer_of(storage, in_background=True) as checkpointer, pytest.MonkeyPatch.context() as patch:
        checkpointer.load(model, optimizer)
        if rank == 1:
            unable_to(what, patch, checkpointer._job.saver._staging)
        checkpointer.save(2, model, optimizer, extra_of(2))
        try:
            checkpointer.wait()
        except CheckpointError as error:
            errors.append(str(error))
        patch.undo()
        fill(model, optimizer, 2)
        checkpointer.save(2, model, optimizer, extra_of(2))
    return errors


@pytest.mark.parametrize("what", UNABLE)
def test_a_rank_that_cannot_begin_a_save_is_an_error_on_all_and_the_next_save_works(
    what: str, ranks: RankPool, storage: Path
) -> None:
    for end in run_one(ranks, storage.parent / "ends", Trial(fn=unable, args=(storage, what))):
        assert end.error is None, end
        assert [f"rank 1: {UNABLE[what]}" in text for text in end.value] == [True], end
    assert newest_of(storage) == 2


def interrupted(rank: int, storage: Path) -> str:
    """Somebody interrupts rank 1 while it copies; what the ranks are told by the next wait()."""
    model, optimizer = make_state()
    with checkpointer_of(storage, in_background=True) as checkpointer:
        checkpointer.load(model, optimizer)
        staging: Any = checkpointer._job.saver._staging
        hold = staging.hold
        if rank == 1:
            staging.hold = lambda *_: signal.default_int_handler(signal.SIGINT, None)
        with pytest.raises(KeyboardInterrupt) if rank == 1 else nullcontext():
            checkpointer.save(2, model, optimizer, extra_of(2))
        with pytest.raises(CheckpointError) as told:
            checkpointer.wait()
        staging.hold = hold
        fill(model, optimizer, 2)
        checkpointer.save(2, model, optimizer, extra_of(2))
    return str(told.value)


def test_an_interrupt_while_a_rank_copies_is_an_error_on_all_and_the_next_save_works(
    ranks: RankPool, storage: Path
) -> None:
    for end in run_one(ranks, storage.parent / "ends", Trial(fn=interrupted, args=(storage,))):
        assert end.error is None, end
        assert "rank 1: the save was interrupted while it copied the state of this step" in end.value, end
    assert newest_of(storage) == 2 and garbage_in(storage) == []


def fail_once(rank: int, storage: Path, victim: int, strike: Strike, like: str) -> tuple[str, float]:
    """What is told of a save that fails on one rank, and how long training was held up by beginning it."""
    model, optimizer = make_state()
    with checkpointer_of(storage, in_background=True, storage_timeout_seconds=2.0) as checkpointer:
        checkpointer.load(model, optimizer)
        checkpointer.claim()
        operations = FileOperations(storage, strike, 0 if rank == victim else None, like=like)
        began = time.monotonic()
        checkpointer.save(2, model, optimizer, extra_of(2))
        held_up = time.monotonic() - began
        dist.barrier()  # training goes on
        told = ""
        try:
            checkpointer.wait()
        except CheckpointError as error:
            told = str(error)
        operations.end()
        if strike == "hang":  # its thread may still read the memory that is kept
            with pytest.raises(CheckpointError, match="has not answered yet"):
                checkpointer.save(3, model, optimizer, extra_of(3))
        else:
            fill(model, optimizer, 2)
            checkpointer.save(2, model, optimizer, extra_of(2))
            checkpointer.wait()
        return told, held_up


@pytest.mark.parametrize(
    ("victim", "strike", "like", "words"),
    [*FAILING, (0, "broken", "os.fsync", "Input/output error")],
)
def test_a_save_that_fails_is_one_error_on_all_ranks_and_the_next_works(
    victim: int, strike: Strike, like: str, words: str, ranks: RankPool, storage: Path
) -> None:
    ends = run_one(ranks, storage.parent / "ends", Trial(fn=fail_once, args=(storage, victim, strike, like)))
    assert [end.error for end in ends] == [None, None], ends
    assert ends[0].value[0] == ends[1].value[0]
    assert words in ends[0].value[0] and f"rank {victim}: " in ends[0].value[0]
    assert newest_of(storage) == 2 and garbage_in(storage) == []


@pytest.mark.parametrize(("victim", "like"), the_first([(1, "os.writev"), (0, "os.mkdir"), (0, ".COMMIT.")]))
def test_storage_that_hangs_holds_up_no_training_and_loses_no_checkpoint(
    victim: int, like: str, ranks: RankPool, storage: Path
) -> None:
    ends = run_one(ranks, storage.parent / "ends", Trial(fn=fail_once, args=(storage, victim, "hang", like)))
    assert [end.error for end in ends] == [None, None], ends
    for end in ends:
        told, held_up = end.value
        assert "within 2 seconds" in told or "longer than 2 seconds" in told, told
        assert held_up < 1.5
    assert newest_of(storage) == 1
    assert [end.error for end in run_one(ranks, storage.parent / "ends", Trial(fn=go_on, args=(storage,)))] == [
        None,
        None,
    ]


def lose_a_peer(rank: int, storage: Path) -> str:
    model, optimizer = make_state()
    checkpointer = checkpointer_of(storage, in_background=True)
    checkpointer.load(model, optimizer)
    checkpointer.claim()
    Gate(storage, like="os.writev")
    checkpointer.save(2, model, optimizer, extra_of(2))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.wait()
    return "it waited"


def test_a_lost_peer_is_noticed_at_once_by_who_waits(ranks: RankPool, storage: Path) -> None:
    ends = run_one(ranks, storage.parent / "ends", Trial(fn=lose_a_peer, args=(storage,), num_ranks=2))
    assert (ends[0].error or "").startswith("PeerLostError") and ends[0].seconds < 20, ends
    assert newest_of(storage) == 1


def commit_late(rank: int, storage: Path) -> tuple[int, list[str]]:
    """A save is given up while its COMMIT is held up, and is committed all the same; what ranks make of it."""
    model, optimizer = make_state()
    checkpointer = checkpointer_of(storage, in_background=True, storage_timeout_seconds=_SHORT_SECONDS)
    with checkpointer:
        first = checkpointer.load(model, optimizer).path
        checkpointer.claim()
        gate = Gate(storage, like=".COMMIT.") if rank == 0 else None
        fill(model, optimizer, 2)
        checkpointer.save(2, model, optimizer, extra_of(2))
        with pytest.raises(CheckpointError, match=f"longer than {_SHORT_SECONDS:g} seconds"):
            checkpointer.wait()
        if gate is not None:
            gate.open()
        end_saves()
        dist.barrier()
        assert newest_of(storage) == 2
        told = []
        for path in (first, None):  # the run's own late one is no surprise to the ranks that have not heard of it
            loaded = checkpointer.load(model, optimizer, path)
            try:
                checkpointer.save(loaded.step + 1, model, optimizer, extra_of(loaded.step + 1))
                checkpointer.wait()
                told.append(f"saved {loaded.step + 1}")
            except CheckpointError as error:
                told.append(str(error))
    return newest_of(storage), told


def test_a_save_that_is_committed_after_it_was_given_up_is_the_same_to_all_ranks(
    ranks: RankPool, storage: Path
) -> None:
    ends = run_one(ranks, storage.parent / "ends", Trial(fn=commit_late, args=(storage,)))
    assert [end.error for end in ends] == [None, None], ends
    assert ends[0].value == ends[1].value
    newest, told = ends[0].value
    assert (newest, told[1]) == (3, "saved 3")
    assert "step_2 holds a checkpoint already, saved at step 2" in told[0]
    assert garbage_in(storage) == []


@pytest.mark.parametrize("in_background", [False, True])
def test_old_checkpoints_that_are_removed_slowly_are_a_warning(
    in_background: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = make_state()
    with checkpointer_of(tmp_path, in_background=in_background, keep_last=1) as checkpointer:
        checkpointer.save(1, model, optimizer)
        checkpointer.wait()
        gate = Gate(job_folder(tmp_path) / "step_1", like="os.remove")
        if in_background:
            checkpointer.save(2, model, optimizer)
            gate.wait_until_reached()
            assert not checkpointer.is_saving()
        storage: Any = checkpointer._job._storage
        storage.seconds, seconds = 0.1 if in_background else _SHORT_SECONDS, storage.seconds
        if not in_background:
            checkpointer.save(2, model, optimizer)
        checkpointer.wait()
        assert "old checkpoints are still being removed" in caplog.text
        assert newest_of(tmp_path) == 2
        gate.open()
        end_saves()
        storage.seconds = seconds
        checkpointer.save(3, model, optimizer)
    assert [path.parent.name for path in job_folder(tmp_path).glob("*/COMMIT")] == ["step_3"]


# --- a run or a rank that is gone -----------------------------------------------------------------------------------


def lose_the_folder(rank: int, storage: Path, in_background: bool) -> None:
    """Another run puts the checkpoint aside while ranks write: the first one sees whose the folder is, the other one
    only that its own is gone.
    """
    has_come = storage.parent / "has-come"

    def come() -> None:
        take_over(storage)
        folder = job_folder(storage) / "step_2"
        folder.rename(folder.with_name(".garbage-0123456789abcdef-step_2"))
        has_come.write_bytes(b"x")

    model, optimizer = make_state()
    with checkpointer_of(storage, in_background=in_background) as checkpointer:
        checkpointer.load(model, optimizer)
        checkpointer.claim()
        if rank == 0:
            FileOperations(storage, has_come.read_bytes, 0, like="model_meta.json")  # the first that it writes
        else:
            FileOperations(storage, come, 0, like="os.writev")
        checkpointer.save(2, model, optimizer, extra_of(2))
        checkpointer.wait()


@pytest.mark.parametrize("in_background", [False, True])
def test_who_is_fenced_is_fenced_on_all_ranks_whatever_else_they_run_into(
    in_background: bool, ranks: RankPool, storage: Path
) -> None:
    os.mkfifo(storage.parent / "has-come")  # whoever opens it waits for the other
    trial = Trial(fn=lose_the_folder, args=(storage, in_background))
    for end in run_one(ranks, storage.parent / "ends", trial):
        assert end.error is not None and end.error.startswith("CheckpointFenced: "), end
        assert "process 4711 on elsewhere" in end.error
        assert "rank 1: " not in end.error
    assert newest_of(storage) == 1


def leave_with_an_exception(rank: int, storage: Path) -> float:
    """How long closing takes where the other rank has died while it wrote."""
    monkeypatch = pytest.MonkeyPatch()  # in a process that ends with this
    monkeypatch.setattr(saver, "PATIENCE_SECONDS", 0.2)
    model, optimizer = make_state()
    checkpointer = checkpointer_of(storage, in_background=True)
    checkpointer.load(model, optimizer)
    checkpointer.claim()
    FileOperations(storage, "kill", 0 if rank == 1 else None, like="os.writev")
    checkpointer.save(2, model, optimizer, extra_of(2))
    if rank == 1:
        end_saves()
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError), checkpointer:
        raise ZeroDivisionError
    return time.monotonic() - began


def test_closing_while_an_exception_is_handled_waits_no_long_time_for_who_is_dead(
    ranks: RankPool, storage: Path
) -> None:
    ends = run_one(ranks, storage.parent / "ends", Trial(fn=leave_with_an_exception, args=(storage,)))
    assert ends[1].exit_signal == signal.SIGKILL
    assert ends[0].error is None and ends[0].value < _SOON_SECONDS, ends
    assert any("rank 1 has not said within 0.2 seconds" in text for text in ends[0].log), ends[0].log
    assert newest_of(storage) == 1
