"""What forked processes do first: there is one hook, however many trainers, in whichever order it came."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from elastic_ext.fsdp.checkpoint.folder.claim import Claim
from elastic_ext.ranks.board import Board
from elastic_ext.ranks.heartbeat import begin_heartbeat
from elastic_ext.ranks.processes import do_in_forked_processes
from elastic_ext.training.checkpoints.signals import Leaving
from tests.support.stores import PlainStore
from tests.support.told_to_end import ToldToEnd

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120

LEAVING = """
import os, signal, sys, threading
from elastic_ext.ranks.board import Board
from tests.support.stores import PlainStore
from elastic_ext.training.checkpoints.signals import SIGNALS, Leaving
from tests.support.told_to_end import ToldToEnd

unraisable = []
sys.unraisablehook = lambda found: unraisable.append(f"{found.object}: {found.exc_value!r}")


def leaving():
    return Leaving(Board(PlainStore(), "job"), ToldToEnd(), seconds=60.0)


def fork(faults):
    \"\"\"Fork, and note what is not as it was in this thread, or not this process's own in the other.\"\"\"
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    child = os.fork()
    has_kept_mask = signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
    if child == 0:
        is_its_own = all(signal.getsignal(number) is signal.SIG_DFL for number in SIGNALS)
        os._exit(0 if is_its_own and has_kept_mask and signal.set_wakeup_fd(-1) == -1 and not unraisable else 1)
    if not has_kept_mask:
        faults.append("the thread that forked blocks others")
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
        faults.append("the forked process takes its parent's signals, blocks others, or had an exception")
"""


def faults_in(script: str) -> str:
    """What a process of its own prints, since hooks stay; nothing where all is well."""
    ran = subprocess.run(
        [sys.executable, "-c", LEAVING + script], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
    )
    return ran.stdout + ran.stderr


def test_hooks_that_come_while_another_thread_forks_are_not_called_after_it_by_halves() -> None:
    script = """
begun, go_on, faults = threading.Event(), threading.Event(), []
os.register_at_fork(before=lambda: (begun.set(), go_on.wait(60)))
forking = threading.Thread(target=fork, args=[faults])
forking.start()
begun.wait(60)
it = leaving()
it.start()
go_on.set()
forking.join()
fork(faults)
it.stop()
print(*faults, *unraisable, sep="\\n", end="")
"""
    assert faults_in(script) == ""


def test_threads_may_fork_while_trainers_begin_and_end() -> None:
    script = """
def fork_often(faults):
    for _ in range(15):
        fork(faults)


faults = []
threads = [threading.Thread(target=fork_often, args=[faults]) for _ in range(4)]
for thread in threads:
    thread.start()
while any(thread.is_alive() for thread in threads):
    first, second = leaving(), leaving()
    first.start()
    second.start()
    first.stop()
    second.stop()
print(*faults, *unraisable, sep="\\n", end="")
"""
    assert faults_in(script) == ""


def test_a_second_trainer_adds_no_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[dict[str, Any]] = []
    register = os.register_at_fork

    def noted(**each: Any) -> None:
        hooks.append(each)
        register(**each)

    monkeypatch.setattr(os, "register_at_fork", noted)
    for number in range(3):
        hooks.clear()
        leaving = Leaving(Board(PlainStore(), "job"), ToldToEnd(), seconds=1.0)
        leaving.start()
        pulse = begin_heartbeat(tmp_path, seat=0, rank=0, restart=0, run_dir=tmp_path)
        claim = Claim(tmp_path, f"run-{number}", patience_seconds=0)
        assert pulse.wants_micro_steps
        leaving.stop()
        pulse.end()
        claim.release()
    assert hooks == []


class Owner:
    """Something that forked processes are to leave alone, which notes that one has."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def note(self) -> None:
        os.write(self.pipe, b"noted ")

    def fail(self) -> None:
        raise OSError("its file is closed")


def said_by_a_forked_process(pipe: int) -> bytes:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, 64)
    except BlockingIOError:
        return b""


def test_what_is_gone_is_kept_by_no_hook_and_one_that_fails_keeps_no_other_from_its_turn() -> None:
    read, write = os.pipe()
    owners = [Owner(write) for _ in range(3)]
    for owner, action in zip(owners, (Owner.fail, Owner.note, Owner.note), strict=True):
        do_in_forked_processes(owner, action)
    assert said_by_a_forked_process(read) == b"noted noted "
    gone = weakref.ref(owners.pop())
    del owner
    gc.collect()
    assert gone() is None
    assert said_by_a_forked_process(read) == b"noted "
    os.close(read)
    os.close(write)
