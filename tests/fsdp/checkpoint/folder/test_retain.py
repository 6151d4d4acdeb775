"""Retention: which checkpoints go, and what is left whatever happens while they do; readers that keep theirs."""

from __future__ import annotations

import errno
import functools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.errors import CheckpointNotFound
from elastic_ext.fsdp.checkpoint.folder.claim import LAPSE_SECONDS, Reader, Reading, is_mark, readers_of
from elastic_ext.fsdp.checkpoint.folder.cleanup import apply_retention, verdicts_on
from elastic_ext.fsdp.checkpoint.folder.commit import COMMIT, Chain, Commit, Lineage, checksum_of
from elastic_ext.fsdp.checkpoint.folder.job_folder import JobFolder
from elastic_ext.fsdp.checkpoint.folder.listing import ListedCheckpoint, Retention, RetentionVerdict, judge
from tests.support.saves import META, SHARD, Run, assert_loads, assert_tidy, recovered, runs
from tests.support.syscalls import at_call, can_fail, every_kill, failure
from tests.support.thinning import the_first

REPOSITORY = str(Path(__file__).resolve().parents[4])
END_SECONDS = 120.0
ONE: Chain = (Lineage(id="a"),)


def found(name: str, *, step: int | None = None, epoch: int = 0, chain: Chain = ONE) -> ListedCheckpoint:
    step = int(name.partition(".")[0].partition("_")[2]) if step is None else step
    commit = Commit(
        generation=f"{chain[-1].id}-{name.partition('.')[0]}",
        lineage=chain,
        global_step=step,
        epoch=epoch,
        num_ranks=1,
        metas={},
        states={},
        shards={},
        saved_at="2026-11-20T19:30:00+00:00",
    )
    return ListedCheckpoint(path=Path(name), commit=commit)


def steps(*numbers: int) -> list[ListedCheckpoint]:
    return [found(f"step_{number}") for number in numbers]


def stays(verdicts: Sequence[RetentionVerdict]) -> list[str]:
    return [verdict.found.name for verdict in verdicts if verdict.stays]


def names(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if name not in ("RUN.json", "RUN.lock", "meta"))


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + END_SECONDS
    while not happened():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


# ---- which go ----


@pytest.mark.parametrize(
    ("numbers", "rule", "left"),
    [
        ([], Retention(), []),
        ([1], Retention(), [1]),
        ([3, 1, 2], Retention(), [3]),
        ([1, 2, 3], Retention(keep_last=2), [2, 3]),
        ([1, 2, 3], Retention(keep_last=9), [1, 2, 3]),
        ([1, 2, 3], Retention(keep_last=None), [1, 2, 3]),
        ([100, 200, 300, 400, 500], Retention(keep_every=200), [200, 400, 500]),
        ([300, 600, 900, 1200, 1500, 2100], Retention(keep_every=1000), [1200, 2100]),  # no multiple is ever saved
        ([0, 1, 2, 3], Retention(keep_every=1, keep_last=1), [1, 2, 3]),
        ([10, 20, 30], Retention(keep_last=2, keep_every=1000), [20, 30]),
    ],
)
def test_the_last_stay_and_the_first_from_each_multiple_on(
    numbers: list[int], rule: Retention, left: list[int]
) -> None:
    assert stays(judge(steps(*numbers), rule)) == [f"step_{number}" for number in left]


def test_every_verdict_says_why() -> None:
    verdicts = judge(
        [*steps(1, 2, 3, 4, 5, 6), found("step_9.abandoned-b", chain=(Lineage(id="c"),))],
        Retention(keep_last=2, keep_every=3),
        being_read={"step_1": "process 7 on elsewhere", "step_6": "process 8"},
        incomplete={"step_2": "x is missing"},
    )
    assert [(verdict.found.name, verdict.stays, verdict.why) for verdict in verdicts] == [
        ("step_1", True, "being read by process 7 on elsewhere"),
        ("step_2", True, "not counted, since x is missing"),
        ("step_3", True, "the first from step 3 on"),
        ("step_4", False, "none of the last 2"),
        ("step_5", True, "one of the last 2"),
        ("step_6", True, "the newest"),
        ("step_9.abandoned-b", True, "abandoned, and not counted"),
    ]


def test_what_training_went_on_without_takes_no_place_and_goes_only_if_asked_for() -> None:
    fork = (Lineage(id="a"), Lineage(id="b", from_step=2, from_generation="a-step_2"))
    some = [
        *steps(1, 2, 3),  # step 3 was left behind, and has its name still
        found("step_3.abandoned-c", chain=(Lineage(id="c"),)),
        found("step_4", chain=fork),
        found("step_5", chain=fork),
    ]
    assert stays(judge(some, Retention(keep_last=3))) == ["step_2", "step_3", "step_3.abandoned-c", "step_4", "step_5"]
    assert stays(judge(some, Retention(keep_last=1, keep_abandoned=False))) == ["step_3", "step_5"]
    assert stays(judge(some, Retention(), chain=ONE)) == ["step_3", "step_3.abandoned-c", "step_4", "step_5"]


def test_two_checkpoints_of_one_step_are_two() -> None:
    some = [found("step_60"), found("epoch_1", step=60, epoch=1), found("step_50")]
    assert stays(judge(some, Retention(keep_last=1))) == ["epoch_1"]
    assert stays(judge(some, Retention(keep_last=2))) == ["step_60", "epoch_1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"keep_last": 0}, "keep_last is 0; allowed: an integer >= 1"),
        ({"keep_last": True}, "keep_last is True"),
        ({"keep_last": None, "keep_every": 5}, "keep_every is 5 and keep_last None"),
        ({"keep_every": 0}, "keep_every is 0; allowed: a number of steps"),
        ({"keep_every": 1.5}, "keep_every is 1.5"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Retention(**arguments)


RULES = st.builds(Retention, keep_last=st.integers(1, 5), keep_every=st.none() | st.integers(1, 50))
NUMBERS = st.lists(st.integers(0, 200), unique=True, max_size=20).map(sorted)


@given(numbers=NUMBERS, rule=RULES)
def test_removing_after_each_save_leaves_what_removing_once_leaves(numbers: list[int], rule: Retention) -> None:
    left: list[ListedCheckpoint] = []
    for number in numbers:
        verdicts = judge([*left, *steps(number)], rule)
        left = [verdict.found for verdict in verdicts if verdict.stays]
        assert left[-1].commit.global_step == number
    assert left == [verdict.found for verdict in judge(steps(*numbers), rule) if verdict.stays]
    assert rule.keep_last is not None and len(left) >= min(rule.keep_last, len(numbers))


@given(numbers=NUMBERS, rule=RULES, bad=st.sets(st.integers(0, 200)))
def test_what_is_not_whole_never_takes_the_place_of_what_is(numbers: list[int], rule: Retention, bad: set[int]) -> None:
    some = steps(*sorted({*numbers, *bad}))
    incomplete = {f"step_{number}": "a file is missing" for number in bad}
    with_bad = judge(some, rule, incomplete=incomplete)
    assert [one for one in stays(with_bad) if one not in incomplete] == stays(
        judge([one for one in some if one.name not in incomplete], rule)
    )
    assert incomplete.keys() <= set(stays(with_bad))


@given(numbers=NUMBERS, rule=RULES, read=st.sets(st.integers(0, 200)))
def test_being_read_only_adds_to_what_stays(numbers: list[int], rule: Retention, read: set[int]) -> None:
    without = stays(judge(steps(*numbers), rule))
    being_read = {f"step_{number}": "somebody" for number in read}
    assert set(stays(judge(steps(*numbers), rule, being_read=being_read))) == {
        *without,
        *(f"step_{number}" for number in read if number in numbers),
    }


# ---- in a folder ----


def test_a_run_keeps_what_it_is_told_to_and_the_rest_is_gone(tmp_path: Path) -> None:
    run = Run(tmp_path, "a")
    for number in range(1, 8):
        run.save(f"step_{number}")
        run.folder.retain(Retention(keep_last=2, keep_every=3), run.chain)
    assert names(tmp_path) == ["step_3", "step_6", "step_7"]
    for one in run.folder.checkpoints():
        assert_loads(one)
    assert_tidy(tmp_path)
    run.end()


def test_a_checkpoint_whose_file_was_cut_short_evicts_none(tmp_path: Path) -> None:
    run = Run(tmp_path, "a")
    for number in (1, 2, 3):
        last = run.save(f"step_{number}")
    os.truncate(last.path / SHARD, 100)
    verdicts = run.folder.retain(Retention(keep_last=1), run.chain)
    assert stays(verdicts) == ["step_2", "step_3"]
    assert verdicts[-1].why.startswith(f"not counted, since {SHARD} has 100 of ")
    run.end()


def test_failed_saves_and_unreadable_ones_evict_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, "a")
    for number in (1, 2):
        run.save(f"step_{number}")
    for number in (3, 4, 5):
        run.folder.begin(f"step_{number}", "g", run.chain)
    (tmp_path / "step_6").mkdir()
    (tmp_path / "step_6" / COMMIT).write_bytes(b"nonsense")
    run.save("step_7")
    os.unlink(run.save("step_8").path / SHARD)
    verdicts = run.folder.retain(Retention(keep_last=2), run.chain)
    assert stays(verdicts) == ["step_2", "step_7", "step_8"]
    assert verdicts[-1].why == f"not counted, since {SHARD} is missing"
    assert names(tmp_path) == ["step_2", *(f"step_{number}" for number in range(3, 9))]
    run.end()


def test_descriptions_of_tensors_stay_while_a_checkpoint_has_them(tmp_path: Path) -> None:
    runs(tmp_path, {"a": (None, ["step_1", "step_2"]), "b": ("step_1", ["step_3"])})
    run = Run(tmp_path, "c").go_on(JobFolder(tmp_path).latest())
    (tmp_path / "meta" / f"{checksum_of(b'of nobody')}.json").write_bytes(b"of nobody")
    run.save("step_4")
    run.folder.retain(Retention(), run.chain)
    assert [path.stem for path in (tmp_path / "meta").iterdir()] == [checksum_of(META)]
    assert names(tmp_path) == ["step_2.abandoned-b", "step_4"]
    assert_loads(ListedCheckpoint.read(tmp_path / "step_2.abandoned-b"))
    run.end()


def test_a_run_that_is_fenced_removes_nothing_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, "a")
    for number in (1, 2):
        run.save(f"step_{number}")
    run.end()
    later = Run(tmp_path, "b")
    verdicts = run.folder.retain(Retention(), run.chain)
    assert [verdict.stays for verdict in verdicts] == [True, True] and "taken over by another run" in verdicts[0].why
    assert names(tmp_path) == ["step_1", "step_2"]
    later.end()


def test_nothing_is_raised_where_the_folder_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "job").mkdir()
    run = Run(tmp_path / "job", "a")
    run.save("step_1")
    (tmp_path / "job").rename(tmp_path / "elsewhere")
    assert run.folder.retain(Retention(), run.chain) == []
    assert "are not removed now" in caplog.text
    run.end()


# ---- killed, failed, interrupted ----


def _with_some(path: Path) -> Run:
    runs(path, {"a": (None, ["step_1", "step_2", "step_3"]), "b": ("step_2", ["step_4"])})
    return Run(path, "c").go_on(JobFolder(path).latest())


def _retain(run: Run) -> None:
    run.folder.retain(Retention(keep_abandoned=False), run.chain)


def kill_everywhere(folder: Path, stride: int) -> int:
    """Kill a removal of three checkpoints at every so many calls; which is the last."""
    lives: list[Run] = []

    def prepare() -> Callable[[], None]:
        lives.append(_with_some(Path(tempfile.mkdtemp(dir=folder))))
        return functools.partial(_retain, lives[-1])

    def check(number: int) -> None:
        run = lives[-1]
        run.end()
        left = {one.name for one in run.folder.checkpoints()}
        assert left in ({"step_1", "step_2", "step_4"}, {"step_2", "step_4"}, {"step_4"}), number
        assert recovered(run.folder.path) == "b-1"  # all that is there loads, and the rest is removed

    return every_kill(prepare, check, stride=stride)


@pytest.mark.parametrize("stride", the_first([4, 1]))
def test_a_removal_killed_at_any_call_leaves_whole_checkpoints_and_garbage_that_is_removed(
    ram: Path, stride: int
) -> None:
    command = [sys.executable, "-m", "tests.fsdp.checkpoint.folder.test_retain", str(ram), str(stride)]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=END_SECONDS, check=False
    )  # its own process, since it forks
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50


@pytest.mark.parametrize(("number", "stride"), the_first([(errno.ENOSPC, 3), (errno.ENOSPC, 1), (errno.EIO, 1)]))
def test_a_call_that_fails_leaves_whole_checkpoints_and_the_next_removal_ends_the_work(
    ram: Path, number: int, stride: int
) -> None:
    for call in range(0, 1000, stride):
        path = ram / str(call)
        path.mkdir()
        run = _with_some(path)
        with at_call(call, failure(number), counts=can_fail) as calls:
            _retain(run)
        for one in run.folder.checkpoints():
            assert_loads(one)
        _retain(run)
        assert [one.name for one in run.folder.checkpoints()] == ["step_4"]
        run.end()
        recovered(path)
        if len(calls.names) <= call:
            assert call > 50
            return


@pytest.mark.slow
def test_two_who_remove_at_once_remove_the_same(ram: Path) -> None:
    for call in range(1000):
        path = ram / str(call)
        path.mkdir()
        run = _with_some(path)
        others: list[list[RetentionVerdict]] = []

        def remove(path: Path = path, others: list[list[RetentionVerdict]] = others) -> None:
            others.append(apply_retention(path, Retention(keep_abandoned=False)))

        with at_call(call, remove):
            own = run.folder.retain(Retention(keep_abandoned=False), run.chain)
        assert names(path) == ["step_4"]
        assert not any(verdict.has_failed for verdict in [*own, *(others[0] if others else ())])
        run.end()
        if not others:
            assert call > 50
            return


def test_a_reader_that_comes_at_any_call_of_a_removal_reads_all_of_it_or_finds_none(ram: Path) -> None:
    num_read = num_missing = 0
    for call in range(0, 1000, 2):
        path = ram / str(call)
        path.mkdir()
        run = _with_some(path)
        seen: list[tuple[Reading, ListedCheckpoint | None]] = []

        def read(path: Path = path, seen: list[tuple[Reading, ListedCheckpoint | None]] = seen) -> None:
            reading = Reading(path / "step_2")
            try:
                seen.append((reading, ListedCheckpoint.read(path / "step_2")))
            except CheckpointNotFound:
                seen.append((reading, None))

        with at_call(call, read):
            _retain(run)
        if not seen:
            assert num_read > 10 and num_missing > 10
            return
        ((reading, read_one),) = seen
        if read_one is not None:
            assert_loads(read_one)
            assert ListedCheckpoint.read(path / "step_2") == read_one
        num_read += read_one is not None
        num_missing += read_one is None
        reading.close()
        _retain(run)
        assert names(path) == ["step_4"]
        run.end()


def test_a_removal_at_any_call_of_a_reader_takes_nothing_from_it(ram: Path) -> None:
    outcomes = set()
    for call in range(1000):
        path = ram / str(call)
        path.mkdir()
        run = _with_some(path)
        with at_call(call, functools.partial(_retain, run)) as calls:
            try:
                with Reading(path / "step_2"):
                    assert_loads(ListedCheckpoint.read(path / "step_2"))
                outcomes.add("read")
            except CheckpointNotFound:
                outcomes.add("missing")
        run.end()
        if len(calls.names) <= call:
            break
    assert outcomes == {"read", "missing"}


# ---- readers ----


def test_what_is_read_stays_until_its_last_reader_has_ended(tmp_path: Path) -> None:
    run = Run(tmp_path, "a")
    for number in (1, 2):
        run.save(f"step_{number}")
    with Reading(tmp_path / "step_1"):
        with Reading(tmp_path / "step_1"):
            assert len(readers_of(tmp_path / "step_1")) == 2
            verdict = run.folder.retain(Retention(), run.chain)[0]
            assert verdict.stays
            assert verdict.why.startswith(f"being read by process {os.getpid()} on ") and "and 1 more" in verdict.why
        assert run.folder.retain(Retention(), run.chain)[0].stays
        assert_loads(ListedCheckpoint.read(tmp_path / "step_1"))
    assert not run.folder.retain(Retention(), run.chain)[0].stays
    assert names(tmp_path) == ["step_2"]
    run.end()


KILLED_READER = """
import sys
from pathlib import Path
from elastic_ext.fsdp.checkpoint.folder.claim import Reading
reading = Reading(Path(sys.argv[1]))
print("reading", flush=True)
sys.stdin.read()
"""


def test_a_reader_that_was_killed_holds_a_checkpoint_no_longer_than_its_mark_lasts(tmp_path: Path) -> None:
    run = Run(tmp_path, "a")
    for number in (1, 2):
        run.save(f"step_{number}")
    command = [sys.executable, "-c", KILLED_READER, str(tmp_path / "step_1")]
    reader = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None and reader.stdout.readline() == "reading\n"
    reader.send_signal(signal.SIGKILL)
    reader.communicate(timeout=END_SECONDS)
    (seen,) = readers_of(tmp_path / "step_1")
    assert seen.pid == reader.pid
    assert run.folder.retain(Retention(), run.chain)[0].stays
    (mark,) = [path for path in (tmp_path / "step_1").iterdir() if is_mark(path.name)]
    age(mark, LAPSE_SECONDS - 10)
    assert run.folder.retain(Retention(), run.chain)[0].stays
    age(mark, LAPSE_SECONDS + 10)
    assert not run.folder.retain(Retention(), run.chain)[0].stays
    assert names(tmp_path) == ["step_2"]
    run.end()


def test_a_dead_readers_mark_is_garbage_for_the_next_run_and_a_living_ones_is_not(tmp_path: Path) -> None:
    runs(tmp_path, {"a": (None, ["step_1"])})
    dead, living = (tmp_path / "step_1" / f".reading-{letter * 16}.json" for letter in "ab")
    for mark in (dead, living):
        mark.write_bytes(b"{")
    age(dead, LAPSE_SECONDS + 10)
    assert readers_of(tmp_path / "step_1") == [Reader(host="a host that has not said its name", pid=0, since="of late")]
    run = Run(tmp_path, "b")
    assert run.folder.prune_garbage() == [str(dead.relative_to(tmp_path))]
    assert living.exists()
    run.end()


def test_a_reader_keeps_its_mark_fresh_and_puts_it_back(tmp_path: Path) -> None:
    with Reading(tmp_path, touch_seconds=0.01):
        (mark,) = tmp_path.iterdir()
        age(mark, 1000)
        wait_until(lambda: time.time() - mark.stat().st_mtime < 500)
        mark.unlink()
        wait_until(mark.exists)
    assert list(tmp_path.iterdir()) == []


def test_what_is_read_on_a_full_disk_is_marked_all_the_same(tmp_path: Path) -> None:
    with at_call(0, failure(errno.ENOSPC), counts=lambda name: name == "write"):
        reading = Reading(tmp_path)
    assert len(readers_of(tmp_path)) == 1
    reading.close()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_marked_can_be_read(tmp_path: Path) -> None:
    with Reading(tmp_path / "missing") as reading:
        reading.close()
    assert threading.active_count() == 1 or all(
        thread.name != "elastic_ext reading" for thread in threading.enumerate()
    )


def test_the_library_marks_what_it_loads(tmp_path: Path) -> None:
    import torch

    from elastic_ext.fsdp import ShardCheckpointer
    from elastic_ext.fsdp.checkpoint.loading.source import Opened

    seen: list[list[Reader]] = []

    class Looking:
        """Loads nothing, and sees who reads."""

        def check(self, opened: Opened) -> None:
            seen.append(readers_of(opened.found.path))

        def refilled(self, opened: Opened, touched: Collection[str]) -> set[str]:
            return set()

        def load(self, opened: Opened) -> None:
            seen.append(readers_of(opened.found.path))

    with ShardCheckpointer(tmp_path, job="job") as checkpointer:
        path = checkpointer.save(1, torch.nn.Linear(2, 2))
        checkpointer._job.restore(Looking(), falls_back=True)
        assert [[reader.pid for reader in readers] for readers in seen] == [[os.getpid()]] * 2
        assert readers_of(path) == []


def test_what_becomes_of_each_can_be_seen_without_removing_any(tmp_path: Path) -> None:
    runs(tmp_path, {"a": (None, ["step_1", "step_2", "step_3"])})
    with Reading(tmp_path / "step_1"):
        assert stays(verdicts_on(tmp_path, Retention())) == ["step_1", "step_3"]
    assert names(tmp_path) == ["step_1", "step_2", "step_3"]


def age(path: Path, seconds: float) -> None:
    """Have a file look as if it had last been written so long ago."""
    then = time.time() - seconds
    os.utime(path, (then, then))


if __name__ == "__main__":
    sys.stdout.write(f"{kill_everywhere(Path(sys.argv[1]), int(sys.argv[2]))}\n")
