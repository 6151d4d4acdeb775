"""Workers with a pulse, as real processes without torch, each of which does one thing; and how they are waited for."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from elastic_ext.agent.workers.monitor import Watched
from elastic_ext.ranks.heartbeat import Activity, HeartbeatReading, begin_heartbeat, heartbeat_file, read_heartbeat
from elastic_ext.ranks.processes import process_of

__all__ = ["Worker", "reading_of", "state_of", "until", "worker"]

Found = TypeVar("Found")
_DEADLINE_SECONDS = 60.0
_MARK = "ready"


class Worker:
    """A process that is a worker, seen from its agent's side."""

    def __init__(self, process: subprocess.Popen[bytes], rank: int) -> None:
        self.process = process
        found = process_of(process.pid)
        assert found is not None
        self.watched = Watched(local_rank=rank, rank=rank, seat=rank, process=found)


@contextmanager
def worker(does: str, folder: Path, rank: int = 0) -> Iterator[Worker]:
    """One that ``does`` what the function of that name below does, and has begun to."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.beating", does, str(folder), str(rank)],
        cwd=Path(__file__).resolve().parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().decode().strip() == _MARK
        if does != "gets on":
            until(lambda: state_of(process.pid) == "S")  # and has come to where it stays
        yield Worker(process, rank)
    finally:
        process.kill()
        process.communicate()


def until(look: Callable[[], Found | None]) -> Found:
    """What ``look`` gives once it gives something."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while not (found := look()):
        assert time.monotonic() < deadline, "nothing came"
        threading.Event().wait(0.005)
    return found


def state_of(pid: int) -> str:
    """A letter, as Linux has it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def reading_of(folder: Path, rank: int = 0) -> HeartbeatReading:
    """What its pulse says, as soon as it can be read: a worker that takes very short steps writes all the time."""
    return until(lambda: read_heartbeat(heartbeat_file(folder, rank)))


# --- what workers do ------------------------------------------------------------------------------------------------


def waits_for_a_lock(ready: Callable[[], None]) -> None:
    lock = threading.Lock()
    lock.acquire()
    ready()
    lock.acquire()


def keeps_the_interpreter(ready: Callable[[], None]) -> None:
    """A deadlock in C, in which no thread of Python's can run."""
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)
    library.pthread_mutex_lock(mutex)
    ready()
    library.pthread_mutex_lock(mutex)


def has_closed_what_was_open(ready: Callable[[], None]) -> None:
    """As a daemon does; and has opened another file under every number of those."""
    folder = Path(sys.argv[2])
    os.closerange(3, 20)
    for _ in range(3, 20):
        os.open(folder / "of its own", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    waits_to_be_ended(ready)


def does_not_answer(ready: Callable[[], None]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    keeps_the_interpreter(ready)


def becomes_another_program(ready: Callable[[], None]) -> None:
    ready()
    os.execv("/bin/sleep", ["sleep", "600"])


def waits_to_be_ended(ready: Callable[[], None]) -> None:
    ready()
    sys.stdin.buffer.read()


def main(does: str, folder: Path, rank: int) -> None:
    def ready() -> None:
        os.write(1, f"{_MARK}\n".encode())

    if does == "tells nothing":
        return waits_to_be_ended(ready)
    if does == "starts another":
        with worker("is in a step", folder, rank):
            return waits_to_be_ended(ready)
    pulse = begin_heartbeat(folder, seat=rank, rank=rank, restart=0, run_dir=folder / "run")
    if does == "is outside":
        pulse.note(Activity.OUTSIDE)
        return waits_to_be_ended(ready)
    if does == "gets on":
        ready()
        threading.Thread(target=sys.stdin.buffer.read, daemon=True).start()
        step = 0
        while True:  # its test ends it
            pulse.enter(0)
            step += 1
            pulse.leave(step, step, 0)
            if step % 50 == 0:
                threading.Event().wait(0.001)
    pulse.enter(0)
    acts = {"is in a step": waits_to_be_ended}
    for function in (
        waits_for_a_lock,
        keeps_the_interpreter,
        becomes_another_program,
        has_closed_what_was_open,
        does_not_answer,
    ):
        acts[function.__name__.replace("_", " ")] = function
    return acts[does](ready)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
