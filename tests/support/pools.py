"""What worker processes make in tests, and what a test run has open: importable by workers that are not forked."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import random
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy
import psutil
import torch
from torch.utils.data import IterableDataset, get_worker_info

from elastic_ext.data.workers.pool import Pool
from elastic_ext.data.workers.worker import THREAD_NAME
from elastic_ext.data.workers.worker_process import WorkerSpec

if TYPE_CHECKING:
    import pytest

_Taken = TypeVar("_Taken")

FORK = multiprocessing.get_context("fork")


@dataclass
class Samples:
    """A dataset whose samples are their indices, but for some that do something first, and may give another."""

    doing: Mapping[int, Callable[[], Any]]

    def __getitem__(self, index: int) -> Any:
        done = self.doing[index]() if index in self.doing else None
        return index if done is None else done


class Whole(Samples):
    """The same, asked for all samples of a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert type(indices) is list
        return [self[index] for index in indices]


class Numbered(IterableDataset[int]):
    """A stream of numbers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


def as_they_are(samples: Any) -> Any:
    """A collate_fn."""
    return samples


def work(
    doing: Mapping[int, Callable[[], Any]] | None = None, *, collate_fn: Callable[[Any], Any] = as_they_are, **more: Any
) -> WorkerSpec:
    """Samples, as lists unless told otherwise."""
    return WorkerSpec(dataset=Samples(doing or {}), collate_fn=collate_fn, **{"base_seed": 7, **more})


@dataclass
class Heavy:
    """A sample that does something when it is pickled, and arrives as what came of that."""

    doing: Callable[[], Any]

    def __reduce__(self) -> Any:
        return (_itself, (self.doing(),))


def _itself(value: Any) -> Any:
    return value


def take_long() -> None:
    """As long as batches take that are worth a second thread to send them."""
    time.sleep(0.01)


@dataclass(frozen=True)
class Begun:
    """Samples and what they are pickled with: whether the second was begun before the first was pickled."""

    event: threading.Event = field(default_factory=threading.Event)

    def first(self) -> Heavy:
        """Whose pickling waits for the second."""
        take_long()
        return Heavy(lambda: self.event.wait(30.0))

    def second(self) -> bool:
        """Lets the first go."""
        self.event.set()
        return True


def batches_made(pool: Pool, num_workers: int, batches: list[list[int]], first: int = 0) -> list[Any]:
    """Batches made by so many workers."""
    pool.resize(num_workers)
    pool.wait_ready(num_workers)
    numbers = range(first, first + len(batches))
    for number, indices in zip(numbers, batches, strict=True):
        pool.submit(number, indices)
    return [pool.take(number) for number in numbers]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- what a sample does ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WaitAt:
    """Wait until the test comes to the gate."""

    gate: Path

    def __call__(self) -> None:
        gate = os.open(self.gate, os.O_RDWR)  # and so there is never an end of file
        os.read(gate, 1)
        os.close(gate)


@dataclass(frozen=True)
class Once:
    """Do something the first time only, in whichever process."""

    mark: Path
    what: Callable[[], Any]

    def __call__(self) -> Any:
        try:
            self.mark.touch(exist_ok=False)
        except FileExistsError:
            return None
        return self.what()


@dataclass(frozen=True)
class Both:
    """Do one thing after the other."""

    first: Callable[[], Any]
    then: Callable[[], Any]

    def __call__(self) -> Any:
        self.first()
        return self.then()


def die_by_sigkill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class NoteIn:
    """Add a word to a file."""

    file: Path
    word: str

    def __call__(self) -> None:
        with self.file.open("a") as file:
            file.write(self.word)


@dataclass(frozen=True)
class DieAndLeaveAChild:
    """Die, and leave a process that holds all that was open until the test comes to a gate."""

    gate: Path

    def __call__(self) -> None:
        if os.fork() == 0:
            WaitAt(self.gate)()
            os._exit(0)
        die_by_sigkill()


def kill_the_parent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    hang_for_ever()


def kill_for_good(pid: int) -> None:
    """Kill somebody's child, and come back when it is gone."""
    watched = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([watched], [], [], 20)[0]
    os.close(watched)


def die_by_segfault() -> None:
    ctypes.string_at(0)


def die_by_exit() -> None:
    os._exit(3)


def hang_for_ever() -> None:
    threading.Event().wait()


@dataclass(frozen=True)
class InterruptAndHang:
    """Send a process what Ctrl-C would."""

    pid: int

    def __call__(self) -> None:
        os.kill(self.pid, signal.SIGINT)
        hang_for_ever()


def a_tensor() -> torch.Tensor:
    return torch.arange(1000)


def a_megabyte() -> bytes:
    return bytes(2**20)


def pid() -> int:
    return os.getpid()


def pid_and_parent() -> tuple[int, int]:
    return os.getpid(), os.getppid()


def info_and_random_numbers() -> tuple[Any, ...]:
    info = get_worker_info()
    assert info is not None
    is_ours = type(info.dataset).__name__ == Samples.__name__  # and no wrapper of it
    numbers = (random.random(), torch.rand(()).item(), float(numpy.random.rand()))
    return info.id, info.num_workers, info.seed, is_ours, torch.get_num_threads(), numbers


class TwoArguments(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first, second)


@dataclass(frozen=True)
class Raise:
    """Raise an exception made anew."""

    make: Callable[..., BaseException]
    arguments: tuple[object, ...]

    def __call__(self) -> None:
        raise self.make(*self.arguments)


@dataclass(frozen=True)
class WhenTaken:
    """A sample that calls a function of the parent's where it is unpickled."""

    function: Callable[[str], Any]
    argument: str

    def __call__(self) -> WhenTaken:
        return self

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return self.function, (self.argument,)


# --- a gate between test and worker ---------------------------------------------------------------------------------


def gate(path: Path) -> Path:
    """A place where a worker waits for the test."""
    os.mkfifo(path)
    return path


def open_gate(path: Path | str) -> None:
    """Wait until a worker is there, and let one go on."""
    Path(path).write_bytes(b".")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[None]:
    """In here a gate lets one worker go on, whether it is there already or comes later."""
    gate = os.open(path, os.O_RDWR)
    try:
        os.write(gate, b".")
        yield
    finally:
        os.close(gate)


# --- processes -------------------------------------------------------------------------------------------------------


def ensure_servers() -> None:
    """Have the processes that are started once and stay: what they fork finds this module imported, and torch."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    multiprocessing.forkserver.ensure_running()
    multiprocessing.resource_tracker.ensure_running()


def child_pids() -> set[int]:
    """The processes that this one has started and that have not ended."""
    return {child.pid for child in psutil.Process().children() if is_alive(child.pid)}


def worker_pids() -> set[int]:
    """Those that they have started: what nurseries fork."""
    found: set[int] = set()
    for child in child_pids():
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(one.pid for one in psutil.Process(child).children() if is_alive(one.pid))
    return found


def is_alive(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for has."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- what is open ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """What a process has."""

    descriptors: tuple[str, ...]
    """What each is of."""
    processes: frozenset[int]
    threads: frozenset[str]
    shared_memory: frozenset[str]


def held() -> Held:
    """What this one has."""
    return Held(
        descriptors=tuple(sorted(filter(None, map(_opened, os.listdir("/proc/self/fd"))))),
        processes=frozenset(child.pid for child in psutil.Process().children()),
        threads=frozenset(thread.name for thread in threading.enumerate()) & {THREAD_NAME},
        shared_memory=frozenset(name for name in os.listdir("/dev/shm") if _is_left(name)),
    )


def _opened(descriptor: str) -> str:
    """What a descriptor is of, without the number that it has in the kernel; nothing once it is closed."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").partition(":[")[0]
    except FileNotFoundError:
        return ""


def _is_left(name: str) -> bool:
    """Whether a piece of shared memory is torch's, and was made by this process or by one that is gone."""
    made_by = name.split("_")[1] if name.startswith("torch_") else ""
    return made_by.isdigit() and (int(made_by) == os.getpid() or not psutil.pid_exists(int(made_by)))


def however_late(take: Callable[[], _Taken]) -> _Taken:
    """What ``take`` gives, asked again as often as it times out: the machine may be busy."""
    while True:
        try:
            return take()
        except RuntimeError as error:
            if "timed out" not in str(error):
                raise


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail, rather than wait for ever."""

    def fail(*_: object) -> None:
        raise AssertionError(f"still not done after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, fail)
    left = signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(left)
        signal.signal(signal.SIGALRM, before)


def main_of_a_job() -> None:
    """A process with busy workers, that says their pids and their nursery's, and waits to be killed."""
    doing: dict[int, Callable[[], Any]] = dict.fromkeys(range(3), pid_and_parent)
    with Pool(work(doing), context=FORK) as pool:
        pool.resize(3)
        pool.wait_ready(3)
        for number in range(30):
            pool.submit(number, [number % 3])
        pids = {pid for number in range(30) for pair in pool.take(number) for pid in pair}
        print(*sorted(pids), flush=True)
        for number in range(30, 60):
            pool.submit(number, [5])
        hang_for_ever()
