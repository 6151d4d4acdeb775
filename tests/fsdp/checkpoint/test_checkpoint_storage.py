"""Storage that is full, read-only, closed, broken or silent, and runs that should not save where they do: one clear
error on all ranks in time, and the checkpoint from before is still the newest.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from elastic_ext.errors import CheckpointError, CheckpointFenced, ElasticError
from elastic_ext.fsdp.checkpoint.folder.commit import COMMIT
from tests.support.file_operations import SLOW_SECONDS, FileOperations, StaleView, Strike, WhatIsStale
from tests.support.ranks import RankPool
from tests.support.saving import (
    FAILING,
    begin_job,
    checkpointer_of,
    digest_at,
    digest_of,
    extra_of,
    fill,
    garbage_in,
    go_on,
    job_folder,
    load_newest,
    make_state,
    newest_of,
    take_over,
    train,
)
from tests.support.thinning import each_once, the_first
from tests.support.trials import End, Trial, run_one, run_trials

_FAILS_WITHIN_SECONDS = 30.0  # on a busy machine; what is waited for is 1 s, or 5 s for a run that may be ending
_NOBODY = 65534


def run_in_time(ranks: RankPool, folder: Path, trial: Trial) -> list[End]:
    ends = run_one(ranks, folder / "ends", trial)
    assert all(end.seconds < _FAILS_WITHIN_SECONDS for end in ends), ends
    return ends


def error_of_all(ends: list[End]) -> str:
    """The error that every rank raised."""
    errors = {end.error for end in ends}
    assert len(errors) == 1 and None not in errors, ends
    (error,) = errors
    return str(error)


# --- operations that fail -------------------------------------------------------------------------------------------


def fail_each_operation(
    rank: int, storage: Path, victim: int, strike: Strike, first: int, stride: int
) -> tuple[int, int]:
    """A rank of runs whose saves each fail at an operation, and are tried again; how many were tried, and did fail."""
    model, optimizer = make_state()
    num_failed, num_tried, step = 0, 0, 2
    while True:
        at = first + num_tried * stride
        with checkpointer_of(storage) as checkpointer:  # each claims the folder anew
            checkpointer.load(model, optimizer)
            fill(model, optimizer, step)
            operations = FileOperations(storage, strike, at if rank == victim else None)
            try:
                checkpointer.save(step, model, optimizer, extra_of(step))
                has_failed = False
            except CheckpointError:
                has_failed = True
                assert newest_of(storage) == step - 1
            seen = operations.end()
            if has_failed:
                num_failed += 1
                checkpointer.save(step, model, optimizer, extra_of(step))
        assert newest_of(storage) == step
        step += 1
        struck = torch.tensor(int(rank != victim or at < len(seen)))
        dist.all_reduce(struck, dist.ReduceOp.MIN)
        if not struck.item():
            return num_tried, num_failed
        num_tried += 1
        if rank == 0:  # or there would be more operations each time
            shutil.rmtree(job_folder(storage) / f"step_{step - 2}")
        dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "strike"), [(0, "broken"), (1, "full")])
def test_operation_that_fails_is_an_error_on_all_ranks_and_the_next_try_saves(
    victim: int, strike: Strike, ranks: RankPool, storage: Path
) -> None:
    storages = [storage.parent / f"copy-{place}" for place in range(8)]
    for copy in storages:
        shutil.copytree(storage, copy)
    trials = [
        Trial(fn=fail_each_operation, args=(copy, victim, strike, place, len(storages)))
        for place, copy in enumerate(storages)
    ]
    all_ends = run_trials(ranks, storage.parent / "ends", trials)
    num_tried, num_failed = 0, 0
    for ends in all_ends:
        assert ends[0].value is not None and ends[0].value == ends[1].value, ends
        num_tried, num_failed = num_tried + ends[0].value[0], num_failed + ends[0].value[1]
    print(f"\n{num_tried} operations of rank {victim} failed, one in each save; {num_failed} of these saves failed")
    assert num_failed > num_tried / 2
    assert [garbage_in(copy) for copy in storages] == [[]] * len(storages)


@pytest.mark.parametrize(
    ("victim", "strike", "like", "words"),
    the_first(
        [
            (1, "broken", "os.fsync", "Input/output error"),
            (0, "full", "trainer_state", "No space left on device"),
            *FAILING,
        ],
        2,
    ),
)
def test_failed_save_is_one_error_on_all_ranks_and_the_old_checkpoint_stays(
    victim: int, strike: Strike, like: str, words: str, ranks: RankPool, storage: Path
) -> None:
    ends = run_in_time(ranks, storage.parent, Trial(fn=fail_like, args=(storage, victim, strike, like)))
    error = error_of_all(ends)
    assert error.startswith("CheckpointError: ") and words in error and f"rank {victim}: " in error, error
    log = [text for end in ends for text in end.log if "checkpoint step_2 failed on rank" in text]
    assert len(log) == 1 and log[0].endswith(f"rank {victim}"), "where it failed, and nowhere else"
    assert newest_of(storage) == 1
    assert not (job_folder(storage) / "step_2").exists()
    assert [end.error for end in run_in_time(ranks, storage.parent, Trial(fn=go_on, args=(storage,)))] == [None, None]
    assert newest_of(storage) == 2 and garbage_in(storage) == []


def fail_like(rank: int, storage: Path, victim: int, strike: Strike, like: str) -> None:
    """A rank of a run whose save fails at the first operation of a kind."""
    model, optimizer = make_state()
    with checkpointer_of(storage, storage_timeout_seconds=3.0 if strike == "hang" else 30.0) as checkpointer:
        checkpointer.load(model, optimizer)
        checkpointer.claim()
        FileOperations(storage, strike, 0 if rank == victim else None, like=like)
        checkpointer.save(2, model, optimizer, extra_of(2))


@pytest.mark.parametrize(
    ("victim", "like", "doing"),
    the_first(
        [
            (1, "os.writev", "writing checkpoint step_2"),
            (0, "os.mkdir", "beginning checkpoint step_2"),
            (0, ".COMMIT.", "committing checkpoint step_2"),
        ]
    ),
)
def test_storage_that_hangs_is_an_error_on_all_ranks_in_time(
    victim: int, like: str, doing: str, ranks: RankPool, storage: Path
) -> None:
    error = error_of_all(run_in_time(ranks, storage.parent, Trial(fn=fail_like, args=(storage, victim, "hang", like))))
    assert f"rank {victim}: the storage took longer than 3 seconds while {doing}" in error, error
    assert "storage_timeout_seconds" in error
    assert newest_of(storage) == 1


def load_while_it_hangs(rank: int, storage: Path, victim: int, like: str) -> None:
    model, optimizer = make_state()
    with checkpointer_of(storage, storage_timeout_seconds=3.0) as checkpointer:
        FileOperations(storage, "hang", 0 if rank == victim else None, like=like)
        checkpointer.load(model, optimizer)


@pytest.mark.parametrize(
    ("victim", "like", "doing"),
    the_first(
        [
            (0, "step_1/COMMIT", "looking for checkpoints"),
            (1, "safetensors", "reading"),
            (0, "os.listdir fsdp_checkpoint", "looking for checkpoints"),
            (1, "step_1/COMMIT", "reading"),
            (1, "model_meta.json", "reading"),
            (0, "optim_meta.json", "reading"),
            (1, "trainer_state.json", "reading"),
        ]
    ),
)
def test_storage_that_hangs_while_loading_is_an_error_on_all_ranks_in_time(
    victim: int, like: str, doing: str, ranks: RankPool, storage: Path
) -> None:
    trial = Trial(fn=load_while_it_hangs, args=(storage, victim, like))
    error = error_of_all(run_in_time(ranks, storage.parent, trial))
    assert f"rank {victim}: the storage took longer than 3 seconds while {doing}" in error, error
    assert "storage_timeout_seconds" in error


def resume_while_it_hangs(rank: int, folder: Path, storage: Path, victim: int, like: str) -> None:
    """A trainer's rank that saves a step, and one that is to go on from there."""
    train(folder, storage, 1, rank=rank)
    FileOperations(storage, "hang", 0 if rank == victim else None, like=like)
    train(folder, storage, 2, rank=rank, timeout_seconds=6.0)


@pytest.mark.parametrize(
    ("victim", "like", "doing"),
    the_first(
        [
            (1, "extra_meta", "reading"),
            (0, "step_1/COMMIT", "claiming the job's folder"),
            (1, "step_1/COMMIT", "reading"),
        ]
    ),
)
def test_storage_that_hangs_while_a_trainer_resumes_is_an_error_on_all_ranks_in_time(
    victim: int, like: str, doing: str, ranks: RankPool, tmp_path: Path
) -> None:
    arguments = (tmp_path / "run", tmp_path / "storage", victim, like)
    error = error_of_all(run_in_time(ranks, tmp_path, Trial(fn=resume_while_it_hangs, args=arguments)))
    assert f"rank {victim}: the storage took longer than 3 seconds while {doing}" in error, error
    assert newest_of(tmp_path / "storage") == 1


def go_on_slowly(rank: int, storage: Path, victims: Sequence[int]) -> int:
    """A rank of a run that loads, claims and saves while each operation takes long on some; how many did."""
    model, optimizer = make_state()
    operations = FileOperations(storage, "slow", range(10_000) if rank in victims else None)
    with checkpointer_of(storage) as checkpointer:
        assert checkpointer.load(model, optimizer).step == 1
        fill(model, optimizer, 2)
        checkpointer.save(2, model, optimizer, extra_of(2))
    return len(operations.end())


@pytest.mark.parametrize("victims", [(1,), *(pytest.param(each, marks=pytest.mark.slow) for each in [(0,), (0, 1)])])
def test_storage_that_is_slow_costs_time_and_nothing_else(
    victims: tuple[int, ...], ranks: RankPool, storage: Path
) -> None:
    ends = run_in_time(ranks, storage.parent, Trial(fn=go_on_slowly, args=(storage, victims)))
    assert [(end.error, end.log) for end in ends] == [(None, ())] * 2, ends
    assert all(end.seconds > ends[victim].value * SLOW_SECONDS > 1 for end in ends for victim in victims), ends
    load_newest(storage, 2)


def save_with_small_files(rank: int, storage: Path) -> None:
    """Rank 1 may write no more than a few bytes to a file: the system's own limit."""
    model, optimizer = make_state()
    with checkpointer_of(storage) as checkpointer:
        checkpointer.load(model, optimizer)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        try:
            checkpointer.save(2, model, optimizer)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_limit_on_the_size_of_files_is_one_error_on_all_ranks(ranks: RankPool, storage: Path) -> None:
    error = error_of_all(run_in_time(ranks, storage.parent, Trial(fn=save_with_small_files, args=(storage,))))
    assert "rank 1: File too large" in error and "model_param.00001-00002.safetensors" in error, error
    assert newest_of(storage) == 1


# --- file systems ---------------------------------------------------------------------------------------------------


def save_on_small_file_system(_: int, folder: Path) -> str:
    """In a file system of this process's own: it becomes full, and is emptied, and becomes read-only."""
    libc = ctypes.CDLL(None, use_errno=True)
    clone_newns, ms_rdonly, ms_remount, ms_rec, ms_private = 0x20000, 1, 32, 16384, 1 << 18
    target = os.fsencode(folder)
    if (
        libc.unshare(clone_newns)
        or libc.mount(b"none", b"/", None, ms_rec | ms_private, None)
        or libc.mount(b"none", target, b"tmpfs", 0, b"size=1m")
    ):
        return f"no file system can be mounted here: {os.strerror(ctypes.get_errno())}"
    model, optimizer = make_state()
    fill(model, optimizer, 1)
    with checkpointer_of(folder) as checkpointer:
        checkpointer.save(1, model, optimizer)
        filler = folder / "filler"
        with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        fill(model, optimizer, 2)
        with pytest.raises(CheckpointError, match="No space left on device"):
            checkpointer.save(2, model, optimizer)
        assert checkpointer.load(model, optimizer).step == 1 and digest_of(model, optimizer) == digest_at(1)
        filler.unlink()
        fill(model, optimizer, 2)
        checkpointer.save(2, model, optimizer)
        assert garbage_in(folder) == []
    assert not libc.mount(b"none", target, b"tmpfs", ms_remount | ms_rdonly, None)
    with checkpointer_of(folder) as checkpointer:
        assert checkpointer.load(model, optimizer).step == 2 and digest_of(model, optimizer) == digest_at(2)
        with pytest.raises(CheckpointError, match="Read-only file system"):
            checkpointer.save(3, model, optimizer)
    return ""


def test_file_system_that_is_full_then_empty_then_read_only(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (end,) = run_in_time(ranks, tmp_path, Trial(fn=save_on_small_file_system, args=(tmp_path / "small",), num_ranks=1))
    assert end.error is None, end.trace
    if end.value:
        pytest.skip(end.value)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that every user may come to."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def save_without_permission(_: int, storage: Path) -> None:
    model, optimizer = make_state()
    if os.geteuid() == 0:
        os.seteuid(_NOBODY)
    with checkpointer_of(storage) as checkpointer:
        assert checkpointer.load(model, optimizer).step == 1
        checkpointer.save(2, model, optimizer)


def test_folder_without_permission_loads_and_refuses_saves_on_all_ranks(ranks: RankPool, open_folder: Path) -> None:
    storage = open_folder / "storage"
    ranks.run(2, begin_job, storage, 1)
    folders = [storage, *(path for path in storage.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    ends = run_in_time(ranks, open_folder, Trial(fn=save_without_permission, args=(storage,)))
    for folder in folders:
        folder.chmod(0o755)
    error = error_of_all(ends)
    why = "the lock belongs to user root, who alone can hold it" if os.geteuid() == 0 else "Permission denied"
    words = f"rank 0: checkpoints cannot be kept in {storage}: {why} ("
    assert error.startswith("CheckpointError: ") and words in error, error
    assert error.endswith("); give a shared_storage_path in which this process may write")
    assert [end.log for end in ends] == [(), ()], "the sentence is all that is said"
    assert newest_of(storage) == 1


@pytest.mark.parametrize("below", ["", "further"])
def test_storage_behind_a_file_is_refused(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    model, optimizer = make_state()
    with checkpointer_of(tmp_path / "file" / below) as checkpointer:
        with pytest.raises(CheckpointError, match=rf"{tmp_path}/file is no folder, and checkpoints"):
            checkpointer.save(1, model, optimizer)
        with pytest.raises(CheckpointError):
            checkpointer.load(model, optimizer)


# --- a trainer whose saves fail -------------------------------------------------------------------------------------


def train_on_full_disk(rank: int, folder: Path, storage: Path, how: str) -> tuple[int, int]:
    """Step 1 is saved; from then on rank 1 has no space, or has it again for step 4."""
    train(folder, storage, 1, rank=rank)
    FileOperations(storage, "full", range(2) if rank == 1 else None, like="os.writev")
    return train(folder, storage, 4, rank=rank, when_save_fails=how)


def test_training_goes_on_without_a_checkpoint_where_the_user_allows_it(ranks: RankPool, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    ends = run_in_time(ranks, tmp_path, Trial(fn=train_on_full_disk, args=(tmp_path / "run", storage, "warn")))
    assert [end.value for end in ends] == [(1, 4), (1, 4)], ends
    told = [text for text in ends[0].log if "not saved" in text]  # once for each, as soon as it is known
    assert len(told) == 2 and all("No space left on device" in text for text in told), ends[0].log
    assert sorted(path.parent.name for path in job_folder(storage).glob(f"*/{COMMIT}")) == ["step_1", "step_4"]
    assert garbage_in(storage) == []


def test_training_stops_on_all_ranks_where_a_save_fails(ranks: RankPool, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    ends = run_in_time(ranks, tmp_path, Trial(fn=train_on_full_disk, args=(tmp_path / "run", storage, "raise")))
    error = error_of_all(ends)
    assert error.startswith("CheckpointError: saving ") and "step_2 failed: rank 1: No space left on device" in error
    assert newest_of(storage) == 1


# --- runs and ranks that do not go together -------------------------------------------------------------------------


def test_second_run_of_a_job_is_refused_and_told_who_has_the_folder(ranks: RankPool, tmp_path: Path) -> None:
    model, optimizer = make_state()
    with checkpointer_of(tmp_path / "storage") as checkpointer:
        checkpointer.save(1, model, optimizer, extra_of(1))
        ends = run_in_time(ranks, tmp_path, Trial(fn=go_on, args=(tmp_path / "storage",)))
        error = error_of_all(ends)
        assert error.startswith("CheckpointFenced: "), error
        assert f"process {os.getpid()} on {socket.gethostname()}" in error and "job=" in error, error
        checkpointer.save(2, model, optimizer, extra_of(2))
    assert run_in_time(ranks, tmp_path, Trial(fn=go_on, args=(tmp_path / "storage",)))[0].value.step == 3


def save_when_fenced(rank: int, storage: Path, like: str) -> list[str]:
    """A rank of a run that another one fences in the middle of its save; what it raises, twice."""
    model, optimizer = make_state()
    errors = []
    with checkpointer_of(storage) as checkpointer:
        checkpointer.load(model, optimizer)
        checkpointer.claim()
        FileOperations(storage, lambda: take_over(storage), 0 if rank == 0 else None, like=like)
        for step in (2, 3):
            try:
                checkpointer.save(step, model, optimizer)
            except CheckpointFenced as error:
                errors.append(str(error))
    return errors


@pytest.mark.parametrize("like", the_first([".COMMIT.", "os.mkdir", "RUN.json", "os.writev"], 2))
def test_run_that_is_fenced_commits_nothing(like: str, ranks: RankPool, storage: Path) -> None:
    ends = run_in_time(ranks, storage.parent, Trial(fn=save_when_fenced, args=(storage, like)))
    for end in ends:
        assert end.value is not None and len(end.value) == 2, end
        assert all("process 4711 on elsewhere" in text for text in end.value), end
    assert newest_of(storage) == 1
    ends = run_in_time(ranks, storage.parent, Trial(fn=go_on, args=(storage,)))
    assert [end.value and end.value.step for end in ends] == [2, 2], ends
    assert garbage_in(storage) == []


@pytest.mark.parametrize("victim", the_first([0, 1]))
def test_rank_lost_in_the_middle_of_a_save_is_lost_to_the_others_too(
    victim: int, ranks: RankPool, storage: Path
) -> None:
    ends = run_in_time(ranks, storage.parent, Trial(fn=fail_like, args=(storage, victim, "kill", "os.writev")))
    assert ends[victim].exit_signal == 9
    assert str(ends[1 - victim].error).startswith("PeerLostError: "), ends
    assert "checkpoint step_2" in str(ends[1 - victim].error)
    assert newest_of(storage) == 1
    assert not (job_folder(storage) / "step_2" / COMMIT).exists()


def save_different_steps(rank: int, storage: Path) -> str:
    model, optimizer = make_state()
    with checkpointer_of(storage) as checkpointer:
        checkpointer.load(model, optimizer)
        with pytest.raises(ElasticError) as caught:
            checkpointer.save(2 + rank, model, optimizer)
        assert newest_of(storage) == 1
        checkpointer.save(4, model, optimizer)
    return str(caught.value)


def test_ranks_that_save_different_steps_at_once_all_hear_of_it(ranks: RankPool, storage: Path) -> None:
    ends = run_in_time(ranks, storage.parent, Trial(fn=save_different_steps, args=(storage,)))
    assert [end.error for end in ends] == [None, None], ends
    assert ends[0].value == ends[1].value
    assert "rank 0: save step 2 of epoch 0; rank 1: save step 3 of epoch 0" in ends[0].value
    assert newest_of(storage) == 4


# --- clients that do not see at once what others do ------------------------------------------------------------------


def save_with_a_stale_view(rank: int, storage: Path, log: Path, what: WhatIsStale, in_background: bool) -> str:
    """A rank of a run that goes on, saves, and loads what it has saved; none knows of what the other has made."""
    if rank == 1:  # its names come after the first rank's last, which the first rank is not to know of by itself
        FileOperations(storage, "slow", range(1000), like="os.link")
    StaleView(storage, log, f"rank {rank}", what)
    model, optimizer = make_state(seed=9)
    with checkpointer_of(storage, in_background=in_background) as checkpointer:
        assert checkpointer.load(model, optimizer).step == 1
        fill(model, optimizer, 2)
        checkpointer.save(2, model, optimizer, extra_of(2))
        checkpointer.wait()
    with checkpointer_of(storage) as checkpointer:
        assert checkpointer.latest() == job_folder(storage) / "step_2"
        assert checkpointer.load(model, optimizer).step == 2
    return digest_of(model, optimizer)


def load_with_a_stale_view(_: int, storage: Path, log: Path, what: WhatIsStale) -> tuple[int, str]:
    StaleView(storage, log, "another", what)
    model, optimizer = make_state(seed=9)
    with checkpointer_of(storage) as checkpointer:
        return checkpointer.load(model, optimizer).step, digest_of(model, optimizer)


def begin_anew_with_a_stale_view(_: int, storage: Path, log: Path, what: WhatIsStale) -> None:
    StaleView(storage, log, "one more", what)
    model, optimizer = make_state(seed=9)
    with checkpointer_of(storage) as checkpointer:
        checkpointer.save(9, model, optimizer, extra_of(9))


@pytest.mark.parametrize(("what", "in_background"), each_once(["listings", "names"], [True, False]))
def test_clients_that_remember_what_was_are_told_what_is(
    what: WhatIsStale, in_background: bool, ranks: RankPool, storage: Path
) -> None:
    log = storage.parent / "log"
    log.mkdir()
    trial = Trial(fn=save_with_a_stale_view, args=(storage, log, what, in_background))
    ends = run_one(ranks, storage.parent, trial)
    assert [end.error for end in ends] == [None, None], ends
    assert newest_of(storage) == 2 and garbage_in(storage) == []
    (end,) = run_one(ranks, storage.parent, Trial(fn=load_with_a_stale_view, args=(storage, log, what), num_ranks=1))
    assert end.value == (2, digest_at(2)), end
    begin_anew = Trial(fn=begin_anew_with_a_stale_view, args=(storage, log, what), num_ranks=1)
    assert run_one(ranks, storage.parent, begin_anew)[0].error is None
    left = sorted(path.parent.name.partition("-")[0] for path in job_folder(storage).glob(f"*/{COMMIT}"))
    assert left == ["step_1.abandoned", "step_2.abandoned", "step_9"]


@pytest.mark.parametrize("in_background", the_first([True, False]))
def test_storage_that_does_not_show_what_others_have_made_commits_nothing(
    in_background: bool, ranks: RankPool, storage: Path
) -> None:
    log = storage.parent / "log"
    log.mkdir()
    trial = Trial(fn=save_with_a_stale_view, args=(storage, log, "names for ever", in_background))
    error = error_of_all(run_one(ranks, storage.parent, trial))
    assert error.startswith("CheckpointError: ") and "rank 1: No such file or directory" in error
    assert newest_of(storage) == 1
    assert [end.error for end in run_one(ranks, storage.parent, Trial(fn=go_on, args=(storage,)))] == [None, None]
    assert newest_of(storage) == 2 and garbage_in(storage) == []


# --- a lineage ------------------------------------------------------------------------------------------------------


def test_run_from_an_older_step_renames_what_it_leaves_and_latest_follows(ranks: RankPool, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    first = ranks.run(2, begin_job, storage, 4)
    folder = job_folder(storage)
    ends = run_in_time(ranks, tmp_path, Trial(fn=go_on, args=(storage, folder / "step_2")))
    assert [end.value.loaded_digest for end in ends] == [digests[2] for digests in first]
    names = sorted(path.name.partition("-")[0] for path in folder.iterdir() if path.name.startswith("step_"))
    assert names == ["step_1", "step_2", "step_3", "step_3.abandoned", "step_4.abandoned"]
    model, optimizer = make_state()
    with checkpointer_of(storage) as checkpointer:
        assert checkpointer.latest() == folder / "step_3"
        assert checkpointer.load(model, optimizer).path == folder / "step_3"
        (left,) = folder.glob("step_4.abandoned-*")
        assert checkpointer.load(model, optimizer, left).step == 4
        assert digest_of(model, optimizer) == digest_at(4)
    assert run_in_time(ranks, tmp_path, Trial(fn=go_on, args=(storage,)))[0].value.step == 4
    assert newest_of(storage) == 4 and garbage_in(storage) == []


def go_back(rank: int, storage: Path) -> list[int]:
    """A rank of a run that saves, goes back to what it has saved, and saves again; what it found on the way."""
    model, optimizer = make_state()
    found = []
    with checkpointer_of(storage) as checkpointer:
        checkpointer.load(model, optimizer)
        for step in (2, 3):
            fill(model, optimizer, step)
            checkpointer.save(step, model, optimizer, extra_of(step))
        for back, step in ((1, 2), (2, 3)):
            found.append(checkpointer.load(model, optimizer, job_folder(storage) / f"step_{back}").step)
            fill(model, optimizer, step)
            checkpointer.save(step, model, optimizer, extra_of(step))
            latest = checkpointer.latest()
            assert latest is not None
            found.append(int(latest.name.removeprefix("step_")))
    return found


def test_run_that_goes_back_to_its_own_checkpoint_saves_from_there(ranks: RankPool, storage: Path) -> None:
    ends = run_in_time(ranks, storage.parent, Trial(fn=go_back, args=(storage,)))
    assert [end.value for end in ends] == [[1, 2, 2, 3]] * 2, ends
    names = sorted(path.name.partition("-")[0] for path in job_folder(storage).iterdir() if path.name[:5] == "step_")
    assert names == ["step_1", "step_2", "step_2.abandoned", "step_3", "step_3.abandoned"]
    assert garbage_in(storage) == []


def test_latest_is_the_newest_that_leads_to_what_was_loaded(tmp_path: Path) -> None:
    model, optimizer = make_state()
    with checkpointer_of(tmp_path / "storage") as checkpointer:
        first, second = (checkpointer.save(step, model, optimizer, extra_of(step)) for step in (1, 2))
    with checkpointer_of(tmp_path / "storage") as checkpointer:
        assert checkpointer.latest() == second
        checkpointer.load(model, optimizer, first)
        assert checkpointer.latest() == first
        third = checkpointer.save(3, model, optimizer, extra_of(3))
        assert checkpointer.latest() == third
    assert not second.exists()
