"""A job's folder: saves that are killed, that fail, that others interrupt; forks, claims, and what is never removed."""

from __future__ import annotations

import contextlib
import errno
import functools
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ext.errors import CheckpointDamaged, CheckpointError, CheckpointFenced, CheckpointNotFound
from elastic_ext.fsdp.checkpoint.folder.commit import COMMIT, checksum_of, place_in
from elastic_ext.fsdp.checkpoint.folder.job_folder import FOLDER, JobFolder
from elastic_ext.fsdp.checkpoint.folder.listing import ListedCheckpoint
from tests.support.saves import META, SCENARIOS, Run, assert_loads, assert_tidy, recovered, runs
from tests.support.syscalls import at_call, can_fail, failure, recorded
from tests.support.thinning import the_first

REPOSITORY = str(Path(__file__).resolve().parents[4])
END_SECONDS = 120.0
NOW = datetime(2026, 11, 20, 19, 30, 5)


def scenarios(*quick: str) -> pytest.MarkDecorator:
    """All of them, of which these are tried in every run."""
    names = sorted(SCENARIOS, key=lambda name: name not in quick)
    return pytest.mark.parametrize("scenario", the_first(names, len(quick)))


def names(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if name not in ("RUN.json", "RUN.lock", "meta"))


def names_of(found: list[ListedCheckpoint]) -> list[str]:
    return [one.name for one in found]


def test_whatever_the_umask_nobody_else_may_write_into_a_jobs_folder(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = JobFolder.find_or_make(tmp_path / "new" / "storage", "job", now=NOW)
        run = Run(folder.path, "first")
        run.save("step_1")
        run.end()
    finally:
        os.umask(before)
    made = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    assert len(made) > 8 and [path for path in made if path.stat().st_mode & 0o002] == []


# ---- killed, failed and interrupted at every call ----


FEWER = [("a claim", 1), ("a fork", 2), ("garbage", 2)]
"""Scenarios of which a run is killed at so many calls in every test run: at each, or at every second one."""


@pytest.mark.parametrize(
    ("scenario", "stride"), the_first([*FEWER, *((name, 1) for name in SCENARIOS if name != "a claim")], len(FEWER))
)
def test_a_run_killed_at_any_call_leaves_a_newest_checkpoint_that_loads_and_garbage_that_is_removed(
    ram: Path, scenario: str, stride: int, record_property: Callable[[str, object], None]
) -> None:
    command = [sys.executable, "-m", "tests.support.saves", scenario, str(ram), str(stride)]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=END_SECONDS, check=False
    )  # its own process, since it forks
    assert done.returncode == 0, done.stderr
    counts = [int(line.split()[1]) for line in done.stdout.splitlines()]
    record_property("kills", sum(counts) - 1)
    assert len(counts) == len(SCENARIOS[scenario][2])
    assert sum(counts) > 20 / stride and min(counts) > 1


@scenarios("a save after another", "a save that is given up", "a claim")
def test_a_call_that_fails_is_an_error_and_the_next_save_succeeds(ram: Path, scenario: str) -> None:
    before, act, expected = SCENARIOS[scenario]
    num_failed = 0
    for call in range(1000):
        path = Path(tempfile.mkdtemp(dir=ram))
        run = before(path)
        error: Exception | None = None
        try:
            with at_call(call, failure(errno.ENOSPC), counts=can_fail) as calls:
                act(run)
        except (OSError, CheckpointError) as caught:
            error = caught
        if len(calls.names) <= call:
            break
        newest = run.folder.latest()
        generation = newest and newest.commit.generation
        if error is None:
            assert generation == expected[-1]
        else:
            num_failed += 1
            reason = error if isinstance(error, OSError) else error.__cause__
            assert isinstance(reason, OSError) and reason.errno == errno.ENOSPC
            assert generation in (expected[:-1] or expected)
        if act.__name__ == "_save" and error is not None:
            assert_loads(run.save("step_2"))
        run.end()
        recovered(path)
    assert num_failed > 10


@pytest.mark.parametrize("scenario", the_first(["the first save", "a fork", "a save after another"], 2))
def test_a_run_that_comes_at_any_call_of_anothers_save_has_the_last_word(ram: Path, scenario: str) -> None:
    before, act, expected = SCENARIOS[scenario]
    num_fenced = num_seen = 0
    for call in range(1000):
        path = Path(tempfile.mkdtemp(dir=ram))
        run = before(path)
        run.end()  # as on a file system without locks
        seen: list[ListedCheckpoint | None] = []

        def usurp(path: Path = path, seen: list[ListedCheckpoint | None] = seen) -> None:
            other = Run(path, "usurper")
            other.folder.prune_garbage()
            seen.append(other.folder.latest())
            other.go_on(seen[0])
            other.save(f"step_{seen[0].commit.global_step + 1 if seen[0] else 2}")  # often the same name
            other.end()

        ended = "committed"
        with at_call(call, usurp):
            try:
                act(run)
            except CheckpointFenced:
                ended = "fenced"
        if not seen:
            break
        newest = run.folder.latest()
        assert newest is not None and newest.commit.run_id == "usurper"
        for found in run.folder.checkpoints():
            assert_loads(found)
        took = seen[0] is not None and seen[0].commit.generation == expected[-1]
        assert took or ended == "fenced"  # what a run was told to be saved was not overlooked
        num_fenced += ended == "fenced"
        num_seen += took
    assert num_fenced > 30 and num_seen > 3


def test_what_a_commit_vouches_for_is_on_the_disk_before_it_and_it_is_before_commit_returns(tmp_path: Path) -> None:
    run = Run(tmp_path, "a")
    with recorded() as calls:
        run.save("step_1")
        run.save("step_2")
    seen = [name for name in calls.names if name in ("write", "writev", "fsync", "link", "mkdir")]
    new_meta = ["link", "write", "fsync", "link", "mkdir", "link"]
    files = ["write", "writev", "writev", "writev", "fsync", "fsync", "link", "link"]
    commit = ["write", "fsync", "fsync", "fsync", "link", "fsync"]  # itself, the job's folder, its own; its own again
    assert seen == ["mkdir", *new_meta, *files, *commit, "mkdir", "link", *files, *commit]


# ---- lineages ----


def test_a_fork_renames_what_lay_after_it_and_keeps_it(tmp_path: Path) -> None:
    runs(tmp_path, {"a": (None, ["step_1", "step_2", "step_3"]), "b": ("step_3", ["step_4"])})
    run = Run(tmp_path, "c")
    run.go_on(run.folder.found("step_2"))
    assert names_of(run.folder.candidates()) == ["step_4", "step_3", "step_2", "step_1"]
    assert run.folder.latest(run.chain) == run.folder.found("step_2")
    run.save("step_3")
    assert names(tmp_path) == [
        "step_1",
        "step_2",
        "step_3",
        "step_3.abandoned-c",
        "step_4.abandoned-c",
    ]
    assert names_of(run.folder.checkpoints()) == ["step_1", "step_2", "step_3"]
    assert_loads(ListedCheckpoint.read(tmp_path / "step_4.abandoned-c"))
    run.end()


def test_the_same_step_abandoned_again_and_again_gets_a_new_name_each_time(tmp_path: Path) -> None:
    runs(tmp_path, {"a": (None, ["step_1", "step_2"])})
    for _ in range(3):
        (tmp_path / "step_3").mkdir()
        (tmp_path / "step_3" / COMMIT).write_bytes(b"nonsense")
        run = Run(tmp_path, "b")
        run.go_on(run.folder.found("step_1"))
        run.folder.begin("step_3", "g", run.chain)
        run.folder.discard("step_3")
        run.end()
    assert names(tmp_path) == [
        "step_1",
        "step_2",
        "step_3.unreadable",
        "step_3.unreadable-2",
        "step_3.unreadable-3",
    ]


def test_a_run_that_only_goes_on_renames_nothing(tmp_path: Path) -> None:
    runs(tmp_path, {"a": (None, ["step_1", "step_2"]), "b": ("step_2", ["step_3"]), "c": ("step_3", ["step_4"])})
    assert names(tmp_path) == ["step_1", "step_2", "step_3", "step_4"]
    latest = JobFolder(tmp_path).latest()
    assert latest is not None and [one.id for one in latest.commit.lineage] == ["a", "b", "c"]


def test_no_checkpoint_is_written_twice_by_its_run_or_those_that_go_on_from_it(tmp_path: Path) -> None:
    run = Run(tmp_path, "a")
    run.save("step_1")
    with pytest.raises(CheckpointError, match=r"step_1 holds a checkpoint already.*written twice"):
        run.save("step_1")
    run.folder.begin("step_2", "g", run.chain)
    with pytest.raises(CheckpointError, match="being saved already"):
        run.folder.begin("step_2", "g", run.chain)
    run.folder.discard("step_2")
    run.end()
    run = Run(tmp_path, "b")
    run.go_on(run.folder.found("step_1"))
    with pytest.raises(CheckpointError, match=r"step_1 holds a checkpoint already, saved at step 1 by run a"):
        run.save("step_1")
    run.save("step_2")
    run.end()


def test_of_two_checkpoints_of_one_step_the_one_that_was_no_good_can_be_saved_again(tmp_path: Path) -> None:
    run = Run(tmp_path, "a")
    run.save("step_60")
    run.save("epoch_1", step=60, epoch=1)
    assert names_of(run.folder.candidates()) == ["epoch_1", "step_60"]
    run.end()
    run = Run(tmp_path, "b")
    run.go_on(run.folder.found("step_60"))  # the shards of epoch_1 turned out to be damaged
    with pytest.raises(CheckpointError, match="written twice"):
        run.save("step_60")
    saved = run.save("epoch_1", step=60, epoch=1)
    assert run.folder.latest() == run.folder.latest(run.chain) == saved
    assert names(tmp_path) == ["epoch_1", "epoch_1.abandoned-b", "step_60"]
    run.end()


def test_the_newest_is_told_by_steps_and_not_by_names(tmp_path: Path) -> None:
    run = Run(tmp_path, "a")
    for name, step, epoch in [("step_9", 9, 0), ("epoch_1", 10, 1), ("step_11", 11, 1), ("epoch_2", 20, 2)]:
        run.save(name, step=step, epoch=epoch)
    assert names_of(run.folder.candidates()) == ["epoch_2", "step_11", "epoch_1", "step_9"]
    run.end()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whatever_runs_go_on_from_what_is_left_is_one_line_and_nothing_is_lost(data: st.DataObject) -> None:
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=folder) as kept:
        path = Path(kept)
        generations = set()
        for number in range(data.draw(st.integers(1, 6), label="runs")):
            run = Run(path, f"r{number}")
            candidates = run.folder.candidates()
            parent = data.draw(st.sampled_from([None, *candidates]), label=f"parent of {number}")
            run.go_on(parent)
            step = parent.commit.global_step if parent else 0
            for _ in range(data.draw(st.integers(0, 3), label="saves")):
                step += data.draw(st.integers(1, 2), label="step")
                generations.add(run.save(f"step_{step}").commit.generation)
                left = run.folder.checkpoints()
                assert run.folder.latest() == run.folder.latest(run.chain) == left[-1]
                for one in left:
                    place = place_in(run.chain, run_id=one.commit.run_id, global_step=one.commit.global_step)
                    assert place is not None
            run.folder.prune_garbage()
            run.end()
        assert {ListedCheckpoint.read(path / name).commit.generation for name in names(path)} == generations
        assert_tidy(path)


# ---- commits ----


def test_a_commit_is_refused_while_a_file_is_missing_or_has_another_size(tmp_path: Path) -> None:
    run = Run(tmp_path, "a")
    good = run.save("step_1")
    for file in [*good.commit.metas, *good.commit.states, *good.commit.shards]:
        for damage in ("missing", "longer"):
            path = run.folder.begin("step_2", good.commit.generation, run.chain)
            run.folder.put_meta("step_2", "model_meta.json", META)
            others = [COMMIT, "model_meta.json"]
            shutil.copytree(tmp_path / "step_1", path, dirs_exist_ok=True, ignore=lambda *_, others=others: others)
            if damage == "missing":
                (path / file).unlink()
            else:
                with open(path / file, "ab") as opened:
                    opened.write(b"x")
            with pytest.raises(CheckpointError, match=rf"{file}.*(is missing|has \d+ bytes where).*not committed"):
                run.folder.commit("step_2", good.commit)
            with pytest.raises(CheckpointNotFound):
                run.folder.found("step_2")
            run.folder.discard("step_2")
    assert names(tmp_path) == ["step_1"]
    run.end()


@pytest.mark.parametrize("name", ["", "..", "step_", "step_-1", "step_1/", "../step_1", "Step_1", "step_1\n", "best"])
def test_only_steps_and_epochs_are_names_of_checkpoints(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path, "a")
    with pytest.raises(ValueError, match="step_N or epoch_N"):
        run.folder.begin(name, "g", run.chain)
    run.end()


def test_what_others_put_into_the_folder_is_neither_read_nor_removed(tmp_path: Path) -> None:
    run = Run(tmp_path, "a")
    run.save("step_1")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step_2").write_text("a file")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").write_text("mine")
    (tmp_path / "step_3").symlink_to("elsewhere")
    (tmp_path / "best").symlink_to("step_1")
    shutil.copytree(tmp_path / "step_1", tmp_path / "step_1.copy")
    before = names(tmp_path)
    run.folder.prune_garbage()
    run.end()
    run = Run(tmp_path, "b")
    assert names(tmp_path) == before and (tmp_path / "elsewhere" / "kept").exists()
    assert names_of(run.folder.checkpoints()) == ["step_1"]
    for name in ("step_2", "step_3"):
        with pytest.raises(CheckpointError, match=rf"{name} is no folder.*move it away"):
            run.folder.begin(name, "g", run.chain)
    run.end()


def test_what_cannot_be_removed_is_a_warning_and_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, "a")
    run.folder.begin("step_1", "g", run.chain)
    with at_call(0, failure(errno.EBUSY), counts=lambda name: name == "rmdir"):
        run.folder.discard("step_1")
    (left,) = names(tmp_path)
    assert left.startswith(".garbage-") and "cannot be removed, and will be tried again" in caplog.text
    assert run.folder.prune_garbage() == [left]
    assert names(tmp_path) == [] and run.folder.prune_garbage() == []
    run.end()


def test_a_damaged_commit_is_told_and_others_are_read(tmp_path: Path) -> None:
    runs(tmp_path, {"a": (None, ["step_1", "step_2", "step_3"])})
    path = tmp_path / "step_2" / COMMIT
    path.write_bytes(path.read_bytes().replace(b'"epoch": 0', b'"epoch": 1'))
    with at_call(2, failure(errno.EIO), counts=lambda name: name == "open"):
        listing = JobFolder(tmp_path).listing()
    assert names_of(list(listing.found)) == ["step_1"] and listing.unfinished == ()
    assert isinstance(listing.unreadable["step_2"], CheckpointDamaged)
    assert isinstance(listing.unreadable["step_3"], OSError)
    with at_call(2, failure(errno.EIO), counts=lambda name: name == "open"), pytest.raises(OSError, match="error"):
        JobFolder(tmp_path).latest()  # it may be the newest
    (tmp_path / "step_3" / COMMIT).unlink()
    (tmp_path / "step_3" / COMMIT).mkdir()
    assert isinstance(JobFolder(tmp_path).listing().unreadable["step_3"], CheckpointDamaged)
    latest = JobFolder(tmp_path).latest()
    assert latest is not None and latest.name == "step_1"


def test_a_file_system_that_fails_for_a_moment_costs_no_checkpoint(tmp_path: Path) -> None:
    runs(tmp_path, {"a": (None, ["step_1", "step_2"])})
    for call in range(100):
        with at_call(call, failure(errno.ESTALE), counts=can_fail) as calls, contextlib.suppress(OSError):
            Run(tmp_path, "b").end()
        if len(calls.names) <= call:
            break
        assert names(tmp_path) == ["step_1", "step_2"]
    assert call > 10


# ---- descriptions of tensors ----


def test_a_description_is_written_once_and_linked_from_then_on(tmp_path: Path) -> None:
    run = Run(tmp_path, "a")
    inodes = set()
    for name in ("step_1", "step_2"):
        run.folder.begin(name, "g", run.chain)
        checksum = run.folder.put_meta(name, "model_meta.json", b"{}")
        inodes |= {os.stat(tmp_path / name / "model_meta.json").st_ino}
    assert inodes == {os.stat(tmp_path / "meta" / f"{checksum}.json").st_ino}
    run.end()


def test_a_description_that_the_disk_has_changed_is_written_again(tmp_path: Path) -> None:
    run = Run(tmp_path, "a")
    found = run.save("step_1")
    (path,) = (tmp_path / "meta").iterdir()
    path.write_bytes(b'{"tensors": {\0}}')
    with pytest.raises(CheckpointDamaged, match=r"model_meta\.json is not what was saved"):
        found.read_meta("model_meta.json")
    assert_loads(run.save("step_2"))
    run.end()


def test_descriptions_that_no_checkpoint_has_are_removed_and_nothing_beside_them(tmp_path: Path) -> None:
    runs(tmp_path, {"a": (None, ["step_1", "step_2"])})
    run = Run(tmp_path, "b").go_on(ListedCheckpoint.read(tmp_path / "step_1"))
    for name, data in (("step_3", b"given up"), ("step_4", b"under way")):
        run.folder.begin(name, "g", run.chain)
        run.folder.put_meta(name, "model_meta.json", data)
    run.folder.discard("step_3")
    (tmp_path / "meta" / "notes.json").write_text("somebody's own")
    (tmp_path / "step_1").rename(tmp_path / "step_1.abandoned-b")
    shutil.rmtree(tmp_path / "step_2")
    kept = {f"{checksum_of(data)}.json" for data in (META, b"under way")} | {"notes.json"}
    assert run.folder.prune_garbage() == [f"meta/{checksum_of(b'given up')}.json"]
    assert set(os.listdir(tmp_path / "meta")) == kept
    shutil.rmtree(tmp_path / "step_1.abandoned-b")
    assert run.folder.prune_garbage() == [f"meta/{checksum_of(META)}.json"]
    run.end()


def test_a_save_goes_on_whenever_another_run_removes_what_is_kept(tmp_path: Path) -> None:
    for call in range(1000):
        path = tmp_path / str(call)
        path.mkdir()
        run = Run(path, "a")
        run.folder.begin("step_1", "g", run.chain)
        run.folder.put_meta("step_1", "model_meta.json", META)
        run.folder.discard("step_1")

        def remove(path: Path = path) -> None:
            (path / "meta" / f"{checksum_of(META)}.json").unlink(missing_ok=True)

        with at_call(call, remove) as calls:
            saved = run.save("step_2")
        assert_loads(saved)
        run.end()
        if len(calls.names) <= call:
            break
    assert call > 20


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EMLINK])
def test_without_hard_links_a_checkpoint_holds_a_copy(tmp_path: Path, number: int) -> None:
    run = Run(tmp_path, "a")
    for name in ("step_1", "step_2"):
        run.folder.begin(name, "g", run.chain)
    run.folder.put_meta("step_1", "model_meta.json", b"{}")
    with at_call(0, failure(number), counts=lambda name: name == "link"):
        run.folder.put_meta("step_2", "model_meta.json", b"{}")
    assert (tmp_path / "step_2" / "model_meta.json").read_bytes() == b"{}"
    assert (tmp_path / "step_2" / "model_meta.json").stat().st_nlink == 1
    assert os.listdir(tmp_path / "step_2") == ["model_meta.json"]
    run.end()


# ---- folders of jobs ----


def test_a_restarted_job_finds_its_folder_and_another_job_gets_one_of_its_own(tmp_path: Path) -> None:
    storage = tmp_path / "not" / "there"
    assert JobFolder.find(storage, "a") is None
    first = JobFolder.find_or_make(storage, "a", now=NOW)
    assert first.path == storage / FOLDER / "a_20261120-193005"
    again = JobFolder.find_or_make(storage, "a", now=NOW + timedelta(days=1))
    found = JobFolder.find(storage, "a")
    assert found is not None and found.path == again.path == first.path
    other = JobFolder.find_or_make(storage, "a_20261120-193005", now=NOW)
    assert other.path != first.path
    assert JobFolder.find_or_make(storage, "a", now=NOW).path == first.path


@pytest.mark.parametrize("seconds", [-1, 0, 1])
def test_a_run_that_starts_at_any_call_of_anothers_start_meets_it_in_one_folder(tmp_path: Path, seconds: int) -> None:
    for call in range(100):
        storage = tmp_path / str(call)
        others: list[JobFolder] = []

        def come(storage: Path = storage, others: list[JobFolder] = others) -> None:
            others.append(JobFolder.find_or_make(storage, "a", now=NOW))

        with at_call(call, come):
            mine = JobFolder.find_or_make(storage, "a", now=NOW + timedelta(seconds=seconds))
        if not others:
            break
        assert mine.path == others[0].path
        assert folders_in(storage) == [mine.path.name]
    assert call > 5


def test_a_start_that_fails_at_any_call_leaves_the_next_one_a_folder(tmp_path: Path) -> None:
    for call in range(100):
        storage = tmp_path / str(call)
        with at_call(call, failure(errno.EIO), counts=can_fail) as calls, contextlib.suppress(OSError):
            JobFolder.find_or_make(storage, "a", now=NOW)
        if len(calls.names) <= call:
            break
        found = JobFolder.find_or_make(storage, "a", now=NOW + timedelta(days=1))
        assert folders_in(storage) == [found.path.name]
    assert call > 10


NUM_STARTS = 40


@pytest.mark.parametrize("num_starters", the_first([4, 6]))
def test_processes_that_start_a_job_for_the_first_time_at_once_all_get_one_folder(
    tmp_path: Path, num_starters: int
) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(num_starters)
    with ProcessPoolExecutor(
        num_starters, mp_context=context, initializer=_meet_at, initargs=(barrier, END_SECONDS)
    ) as pool:
        starters = [pool.submit(start_often, tmp_path, seconds) for seconds in range(num_starters)]
        found = [starter.result(END_SECONDS) for starter in starters]
    for number, paths in enumerate(zip(*found, strict=True)):
        assert set(paths) == {paths[0]}, f"start {number}"
        assert folders_in(tmp_path / str(number)) == [paths[0].name]
    assert len({path.name for path in found[0]}) > 1, "not always the same process is the first"


def start_often(storage: Path, seconds: int) -> list[Path]:
    """One of the processes, whose clock goes ahead: each job's folder, at the same moment as the others."""
    paths = []
    for number in range(NUM_STARTS):
        _meet()
        paths.append(JobFolder.find_or_make(storage / str(number), "a", now=NOW + timedelta(seconds=seconds)).path)
    return paths


_meet: Callable[[], object]


def _meet_at(barrier: Any, seconds: float) -> None:
    global _meet
    _meet = functools.partial(barrier.wait, seconds)


def test_a_job_that_lost_its_first_folder_gets_it_again_and_one_that_was_renamed_is_found(tmp_path: Path) -> None:
    first = JobFolder.find_or_make(tmp_path, "a", now=NOW).path
    first.rmdir()
    assert JobFolder.find_or_make(tmp_path, "a", now=NOW + timedelta(days=1)).path == first
    later = first.rename(first.with_name("a_20270101-000000"))
    assert JobFolder.find_or_make(tmp_path, "a", now=NOW + timedelta(days=1)).path == later


def test_what_does_not_name_a_folder_of_the_job_is_refused_with_its_path(tmp_path: Path) -> None:
    first = JobFolder.find_or_make(tmp_path, "a", now=NOW).path
    first.rmdir()
    for text in (b"", b"b_20261120-193005", b"../a_20261120-193005", b"\xff" * 300):
        (tmp_path / FOLDER / ".jobs" / "a").write_bytes(text)
        with pytest.raises(CheckpointError, match=r"\.jobs/a does not hold the name of a folder of job 'a'; remove it"):
            JobFolder.find_or_make(tmp_path, "a", now=NOW)
    assert folders_in(tmp_path) == []


def folders_in(storage: Path) -> list[str]:
    return sorted(path.name for path in (storage / FOLDER).glob("[!.]*"))
