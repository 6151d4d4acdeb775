"""A claim on a job's folder: with locks the second of two runs is refused, and without them the first is fenced."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from elastic_ext.errors import CheckpointDamaged, CheckpointError, CheckpointFenced
from elastic_ext.fsdp.checkpoint.folder.claim import Claim, read_holder
from elastic_ext.fsdp.checkpoint.folder.cleanup import Visit
from elastic_ext.fsdp.checkpoint.folder.commit import chain_after
from elastic_ext.records.files import write_new
from tests.support.saves import SHARD, Run, assert_tidy
from tests.support.syscalls import at_call, failure

REPOSITORY = str(Path(__file__).resolve().parents[4])
END_SECONDS = 120.0

# Claims a folder, forks a child that outlives it, and waits to be killed.
HOLDER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from elastic_ext.fsdp.checkpoint.folder.claim import Claim
claim = Claim(Path(sys.argv[2]), "holder")
ready, tell = os.pipe()
if sys.argv[3] == "forks" and os.fork() == 0:
    os.write(tell, b".")
    os.read(0, 1)  # until the test lets go
    os._exit(0)
if sys.argv[3] == "forks":
    os.read(ready, 1)  # the child has come so far that it holds no lock
print("held", flush=True)
sys.stdin.read()
"""


def held_by_another(path: Path, how: str = "holds") -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-c", HOLDER, REPOSITORY, str(path), how]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    return holder


def test_a_second_run_is_refused_with_who_has_the_folder_and_what_to_do(tmp_path: Path) -> None:
    with held_by_another(tmp_path) as holder:
        with pytest.raises(CheckpointFenced, match=rf"process {holder.pid} on .*, since 20.*job="):
            Run(tmp_path, "second", patience_seconds=0.1)
        of_holder = read_holder(tmp_path)
        assert of_holder is not None and of_holder.id == "holder"  # and the first goes on
        holder.kill()
    Run(tmp_path, "second").end()


READER = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_SH)
print("held", flush=True)
sys.stdin.read()
"""


def test_who_holds_the_lock_for_reading_fences_nobody_and_is_named(tmp_path: Path) -> None:
    Run(tmp_path, "first").end()
    command = [sys.executable, "-I", "-c", READER, str(tmp_path / "RUN.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == "held\n"
        with pytest.raises(
            CheckpointError, match=rf"no run has .*process {reader.pid} \(.*for reading.*; end that"
        ) as told:
            Claim(tmp_path, "second", patience_seconds=0, visit_seconds=0)
        assert not isinstance(told.value, CheckpointFenced)
        threading.Timer(0.1, reader.kill).start()
        Claim(tmp_path, "second", patience_seconds=END_SECONDS).release()


VISITOR = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from elastic_ext.fsdp.checkpoint.folder.cleanup import Visit
with Visit(Path(sys.argv[2])).alone() as why_not:
    print(why_not, flush=True)
    sys.stdin.read()
"""


def test_who_only_tidies_is_waited_for_and_named_and_no_run_that_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Run(tmp_path, "ended").end()
    command = [sys.executable, "-I", "-c", VISITOR, REPOSITORY, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as visitor:
        assert visitor.stdout is not None and visitor.stdout.readline() == "None\n"
        with pytest.raises(
            CheckpointError, match=rf"tidied by .*ckpt prune`, process {visitor.pid} on .*; wait"
        ) as told:
            Claim(tmp_path, "second", patience_seconds=0, visit_seconds=0.1)
        assert type(told.value) is CheckpointError
        with Visit(tmp_path).alone() as why_not:
            assert why_not is not None and f"tidied by `elastic-ext ckpt prune`, process {visitor.pid} on" in why_not
        threading.Timer(0.1, visitor.kill).start()
        claim = Claim(tmp_path, "second", patience_seconds=0, visit_seconds=END_SECONDS)
    assert "this run waits for that" in caplog.text
    with pytest.raises(CheckpointFenced, match=f"in use by another run of this job .process {os.getpid()} on"):
        Claim(tmp_path, "third", patience_seconds=0)
    claim.release()


def test_one_process_cannot_claim_a_folder_twice_until_it_lets_go(tmp_path: Path) -> None:
    claim = Claim(tmp_path, "a", patience_seconds=0)
    with pytest.raises(CheckpointFenced, match=f"process {os.getpid()} on"):
        Claim(tmp_path, "b", patience_seconds=0)
    claim.check()
    claim.release()
    claim.release()
    Claim(tmp_path, "b", patience_seconds=0).release()
    with pytest.raises(CheckpointFenced, match="taken over"):
        claim.check()


def test_a_run_that_is_dying_is_waited_for(tmp_path: Path) -> None:
    with held_by_another(tmp_path) as holder:
        claimed = threading.Event()

        def claim() -> None:
            Claim(tmp_path, "second", patience_seconds=END_SECONDS).release()
            claimed.set()

        thread = threading.Thread(target=claim)
        thread.start()
        assert not claimed.wait(0.1)
        holder.send_signal(signal.SIGKILL)
        assert claimed.wait(END_SECONDS)
        thread.join(END_SECONDS)


def test_a_workers_process_that_outlives_its_run_does_not_hold_its_folder(tmp_path: Path) -> None:
    with held_by_another(tmp_path, "forks") as holder:
        holder.kill()
        holder.wait(END_SECONDS)
        Run(tmp_path, "second").end()  # while the worker still waits for its input to end


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_without_locks_the_run_that_comes_last_has_the_folder_and_the_other_is_told(
    tmp_path: Path, number: int
) -> None:
    with at_call(0, failure(number), counts=lambda name: name == "flock"):
        first = Run(tmp_path, "first")
    first.save("step_1")
    path = first.folder.begin("step_2", "g", first.chain)
    write_new(path / SHARD, b"half")
    second = Run(tmp_path, "second")
    second.go_on(second.folder.latest()).save("step_2")
    for act in (
        lambda: first.folder.discard("step_2"),
        lambda: first.folder.begin("step_3", "g", first.chain),
        first.folder.prune_garbage,
        first.claim.check,
    ):
        with pytest.raises(CheckpointFenced, match=rf"taken over by another run.*process {os.getpid()} on.*job="):
            act()
    assert [one.name for one in second.folder.checkpoints()] == ["step_1", "step_2"]
    second.claim.check()
    second.folder.prune_garbage()
    assert_tidy(tmp_path)
    second.end()


def test_a_folder_whose_owner_cannot_be_read_or_is_gone_is_not_written_to(tmp_path: Path) -> None:
    run = Run(tmp_path, "a")
    for data in (b"", b"{", b"[]", b'{"id": "a"}', b'{"id": 1, "host": "", "pid": 0, "since": ""}', b"\xff"):
        (tmp_path / "RUN.json").write_bytes(data)
        with pytest.raises(CheckpointDamaged, match=r"RUN\.json"):
            run.save("step_1")
    (tmp_path / "RUN.json").unlink()
    with pytest.raises(CheckpointError, match=r"RUN\.json is gone"):
        run.save("step_1")
    assert sorted(os.listdir(tmp_path)) == ["RUN.lock"]
    run.end()
    Run(tmp_path, "b").save("step_1")


def test_a_folder_that_cannot_be_written_is_the_file_systems_own_error_and_is_not_held(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"):
        Claim(tmp_path / "gone", "a")
    with (
        at_call(0, failure(errno.ENOSPC), counts=lambda name: name == "write"),
        pytest.raises(OSError, match=os.strerror(errno.ENOSPC)),
    ):
        Claim(tmp_path, "a")
    Claim(tmp_path, "b", patience_seconds=0).release()


def test_ids_that_could_not_be_a_part_of_a_name_are_refused(tmp_path: Path) -> None:
    for run_id in ("", "a/b", "..", "a b", "x" * 65):
        with pytest.raises(ValueError, match="a run's id"):
            Claim(tmp_path, run_id)
        with pytest.raises(ValueError, match="a run's id"):
            chain_after(None, run_id=run_id)
