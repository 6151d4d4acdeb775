"""The folders of an agent, the processes of this machine, and the warden that outlives an agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_ext.agent.folder import STAGING, NodeFolders, NodeTaken, spare_cache, with_cache
from elastic_ext.agent.orphan_guard import Warden
from elastic_ext.ranks.processes import ProcessIdentity, end_groups, is_alive, process_of, this_process
from tests.support.nodes import until

WORLD_WRITABLE = 0o777
WAITS = "import signal; print('up', flush=True); signal.pause()"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAITS}"
WITH_CHILD = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WAITS!r}]); sys.stdin.readline()"


@contextmanager
def process(code: str) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert started.stdout is not None and started.stdout.readline() == "up\n"
        yield started
    finally:
        started.kill()
        started.communicate()


def identity(started: subprocess.Popen[str]) -> ProcessIdentity:
    found = process_of(started.pid)
    assert found is not None
    return found


def test_a_process_is_known_by_its_pid_and_its_start() -> None:
    with process(WAITS) as started:
        found = identity(started)
        assert is_alive(found) and not is_alive(ProcessIdentity(pid=found.pid, start_ticks=found.start_ticks + 1))
        started.kill()
        until(lambda: not is_alive(found) or None)  # a zombie has ended
    assert process_of(started.pid) is None
    assert this_process().pid == os.getpid()


def test_groups_end_at_sigterm_and_the_deaf_are_killed() -> None:
    with process(WAITS) as willing, process(DEAF) as deaf:
        groups = [identity(willing), identity(deaf)]
        assert end_groups(groups, patience_seconds=0.5) == [groups[1]]
        assert willing.wait() == -signal.SIGTERM and deaf.wait() == -signal.SIGKILL


def test_what_a_leader_has_left_in_its_group_ends_too_and_a_process_that_only_has_its_pid_does_not() -> None:
    with process(WITH_CHILD) as leader:
        found = identity(leader)
        assert leader.stdin is not None
        leader.stdin.write("\n")
        leader.stdin.flush()
        assert leader.wait() == 0
        assert end_groups([found], patience_seconds=5) == []
    with process(WAITS) as other:
        stranger = ProcessIdentity(pid=other.pid, start_ticks=identity(other).start_ticks - 1)
        assert end_groups([stranger], patience_seconds=5) == []
        assert other.poll() is None


def test_agents_of_one_job_have_a_run_directory_each_and_one_that_was_given_is_refused_to_the_second(
    tmp_path: Path,
) -> None:
    first = NodeFolders.make(tmp_path / "run", is_given=False)
    second = NodeFolders.make(tmp_path / "run", is_given=False)
    assert (first.run_dir, second.run_dir) == (tmp_path / "run", tmp_path / "run-2")
    assert first.memory != second.memory and first.staging.is_dir()
    with pytest.raises(NodeTaken, match="ELASTIC_EXT_RUN_DIR"):
        NodeFolders.make(tmp_path / "run", is_given=True)
    first.close()
    assert not first.memory.exists() and second.staging.is_dir()
    third = NodeFolders.make(tmp_path / "run", is_given=True)
    second.close()
    third.close()


def test_what_a_dead_agent_has_left_in_memory_goes_when_the_next_one_comes(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from elastic_ext.agent.folder import NodeFolders
import os
folders = NodeFolders.make(Path({str(tmp_path / "run")!r}), is_given=True)
print(folders.memory, flush=True)
os._exit(1)
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    left = Path(done.stdout.strip())
    assert left.is_dir()
    folders = NodeFolders.make(tmp_path / "run", is_given=True)
    assert not left.exists()
    folders.close()


def test_the_warden_goes_with_an_agent_that_ends_in_order_and_leaves_its_workers(tmp_path: Path) -> None:
    folders = NodeFolders.make(tmp_path / "run", is_given=True)
    with process(WAITS) as worker:
        warden = Warden(folders.memory, folders.memory_lock, patience_seconds=1.0)
        warden.watch([identity(worker)])
        warden.dismiss()
        assert worker.poll() is None
    folders.close()


def test_the_warden_ends_the_workers_of_an_agent_that_was_killed_and_removes_its_folder(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys
from pathlib import Path
from elastic_ext.agent.folder import NodeFolders
from elastic_ext.ranks.processes import process_of
from elastic_ext.agent.orphan_guard import Warden
folders = NodeFolders.make(Path({str(tmp_path / "run")!r}), is_given=True)
warden = Warden(folders.memory, folders.memory_lock, patience_seconds=0.5)
warden.watch([process_of(int(pid)) for pid in sys.argv[1:]])
print(folders.memory, flush=True)
signal.pause()
"""
    with process(WAITS) as willing, process(DEAF) as deaf:
        pids = [str(each.pid) for each in (willing, deaf)]
        agent = subprocess.Popen([sys.executable, "-c", code, *pids], stdout=subprocess.PIPE, text=True)
        assert agent.stdout is not None
        memory = Path(agent.stdout.readline().strip())
        assert (memory / STAGING).is_dir()
        agent.kill()
        agent.communicate()
        assert willing.wait(30) == -signal.SIGTERM and deaf.wait(30) == -signal.SIGKILL
        until(lambda: not memory.exists() or None)


def test_a_run_directory_into_which_anybody_may_write_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / "run"
    NodeFolders.make(run_dir, is_given=True).close()
    assert not caplog.records, "the one that is made is its owner's alone"
    run_dir.chmod(WORLD_WRITABLE)
    NodeFolders.make(run_dir, is_given=True).close()
    assert [each.getMessage() for each in caplog.records] == [
        f"the run directory {run_dir} has mode 0777, so that anybody can change the job's config there; do: chmod o-w "
        f"{run_dir}"
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="a directory is given to another user by root alone")
def test_a_run_directory_of_another_user_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    os.chown(run_dir, 65534, 65534)
    NodeFolders.make(run_dir, is_given=True).close()
    (warning,) = (each.getMessage() for each in caplog.records)
    assert warning == (
        f"the run directory {run_dir} belongs to user 65534, who can change the job's config there; use one of user 0"
    )


def test_the_spare_cache_is_a_folder_of_this_user_and_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    nowhere = {"XDG_CACHE_HOME": "/dev/null"}
    spare = spare_cache()
    for _ in range(2):  # it is made, and then it is there
        assert with_cache(nowhere) == {"XDG_CACHE_HOME": str(spare)}
    spare.rename(tmp_path / "elsewhere")
    for target in ("elsewhere", "nothing"):
        spare.symlink_to(tmp_path / target)
        with pytest.raises(ValueError, match="is no folder of this user: give a run directory, ELASTIC_EXT_RUN_DIR"):
            with_cache(nowhere)
        spare.unlink()
    assert not (tmp_path / "nothing").exists()
