"""Gloo ranks as real processes for the tests, started once and used again by the tests that follow.

What a test asks its ranks to do lives in the test's own file; failures to script are in tests/support/faults.py; what
runs inside these processes is in tests/support/ranks_worker.py. Linux only.

Words: the *nursery* is one process without threads that has imported torch and forks *workers* on request, in
milliseconds where importing torch costs seconds. A *run* gives each of N workers a *rank*; what became of a rank is its
*outcome*. Whoever dies, nothing stays behind: the nursery ends its workers when its socket to the tests closes, and the
kernel ends the workers when the nursery dies.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.support.ranks_worker import (
    NURSERY_REPLY,
    NURSERY_REQUEST,
    STACKS_SIGNAL,
    Clean,
    Raised,
    RankError,
    Ready,
    Returned,
    Task,
)

__all__ = ["Outcome", "RankError", "RankPool", "RanksFailed"]

Value = TypeVar("Value")

_NURSERY_START_SECONDS = 300.0  # importing torch on a busy machine
_READY_SECONDS = 120.0  # for a new worker to reach the store on a busy machine
_AFTERMATH_SECONDS = 20.0  # for what a worker does by itself: leave a process group, write its stacks, exit


@dataclass(frozen=True, kw_only=True, slots=True)
class _Died:
    """The answer of a worker whose connection or life ended before it gave one."""


_Answer = Returned | Raised | _Died


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one rank: it returned a value, or raised, or died, or hung."""

    rank: int
    pid: int
    value: Any = None
    error: RankError | None = None
    exit_signal: int | None = None
    exit_code: int | None = None
    hung: bool = False
    stacks: str = ""  # where the threads stood, for a rank that hung or crashed
    output: str = ""  # what the rank wrote to stdout and stderr during the run
    unclean: str = ""  # why the worker could not be used again although its function returned

    @property
    def ok(self) -> bool:
        """True when the function returned."""
        return self.error is None and self.exit_signal is None and self.exit_code is None and not self.hung


class RanksFailed(Exception):
    """Some ranks of a run did not return; the message holds each one's traceback, signal or stacks, in rank order."""

    def __init__(self, outcomes: list[Outcome], deadline_seconds: float) -> None:
        self.outcomes = tuple(outcomes)
        told = [describe_failure(outcome, deadline_seconds) for outcome in outcomes if not outcome.ok]
        super().__init__(f"{len(told)} of {len(outcomes)} ranks failed\n\n" + "\n\n".join(told))


def describe_failure(outcome: Outcome, deadline_seconds: float) -> str:
    """The words for one rank that did not return."""
    who = f"rank {outcome.rank} (pid {outcome.pid})"
    if outcome.error is not None:
        text = f"{who} raised {outcome.error.type_name}: {outcome.error.message}\n{outcome.error.traceback}"
    elif outcome.hung:
        text = f"{who} hung: still running when its {deadline_seconds:g} s were over\n{outcome.stacks}"
    elif outcome.exit_signal is not None:
        text = f"{who} died of {_signal_name(outcome.exit_signal)}\n{outcome.stacks}"
    else:
        text = f"{who} ended with exit code {outcome.exit_code}\n{outcome.stacks}"
    return f"{text.rstrip()}\n  its output ends with:\n{outcome.output[-2000:]}" if outcome.output else text.rstrip()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


# ---- in the tests' process ----


class RankPool:
    """Warm workers, more of them as runs ask for more; one run at a time.

    Whoever makes a pool closes it; tests use the one of the session fixture `ranks`.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._nursery = _Nursery(Path(self._folder.name))
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[_Worker] = []
        self._num_runs = 0
        atexit.register(self.close)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The nursery's pid, then the worker's that will be rank 0, rank 1 and so on."""
        return [self._nursery.pid, *(worker.pid for worker in self._workers)]

    def run(
        self,
        num_ranks: int,
        fn: Callable[..., Value],
        *args: object,
        deadline_seconds: float = 60.0,
        env: Mapping[str, str] | None = None,
        process_group: bool = True,
    ) -> list[Value]:
        """The values of `fn(rank, *args)` in rank order; RanksFailed unless every rank returned.

        See `run_outcomes` for the arguments.
        """
        outcomes = self.run_outcomes(
            num_ranks, fn, *args, deadline_seconds=deadline_seconds, env=env, process_group=process_group
        )
        if not all(outcome.ok for outcome in outcomes):
            raise RanksFailed(outcomes, deadline_seconds)
        return [outcome.value for outcome in outcomes]

    def run_outcomes(
        self,
        num_ranks: int,
        fn: Callable[..., object],
        *args: object,
        deadline_seconds: float = 60.0,
        env: Mapping[str, str] | None = None,
        process_group: bool = True,
    ) -> list[Outcome]:
        """What became of `fn(rank, *args)` on each of the ranks, in rank order, whatever it was.

        `fn` is a function of a module; it, the arguments and the value are pickled. `env` is added to the ranks'
        environment during the run. The default process group is gloo and new for this run; its store is in the calling
        process and outlives any rank. With `process_group=False` there is none. Random seeds are the same in every run.
        A rank that raises exits, so its peers' collectives with it fail as they would in training.
        """
        call = pickle.dumps((fn, args))
        self._fill(num_ranks)
        self._num_runs += 1
        workers = self._workers[:num_ranks]
        try:
            deadline = time.monotonic() + deadline_seconds
            for rank, worker in enumerate(workers):
                worker.begin_run()
                worker.send(
                    Task(
                        rank=rank,
                        num_ranks=num_ranks,
                        store_prefix=f"run/{self._num_runs}" if process_group else None,
                        env=dict(env or {}),
                        sys_path=list(sys.path),
                        call=call,
                    )
                )
            answers = _collect(workers, deadline)
            stopped = [answer is None and worker.is_stopped() for worker, answer in zip(workers, answers, strict=True)]
            _end_hung([worker for worker, answer in zip(workers, answers, strict=True) if answer is None])
            unclean = _clean([w for w, answer in zip(workers, answers, strict=True) if isinstance(answer, Returned)])
            return [
                self._outcome(rank, worker, answer, was_stopped, unclean.get(worker.pid, ""))
                for rank, (worker, answer, was_stopped) in enumerate(zip(workers, answers, stopped, strict=True))
            ]
        except BaseException:  # an interrupted run leaves its workers in the middle of something
            for worker in workers:
                if worker in self._workers:
                    self._replace(worker)
            raise

    def start(self, argv: Sequence[str], streams: tuple[int, int, int], *, folder: Path, env: Mapping[str, str]) -> int:
        """The pid of a process that runs a script, or a module after ``-m``, with these for its standard input, output
        and error, and whose end is that of an interpreter; it has a session of its own."""
        told = json.dumps([list(argv), str(folder), dict(env)])
        return self._nursery.start(told.encode(), streams)

    def reap(self, pid: int) -> int:
        """The exit code of a script's process that has ended, as those of ``subprocess`` are."""
        return self._nursery.reap(pid)

    def renew(self) -> None:
        """Has the next run be one of new processes, which have no connections of earlier ones."""
        for worker in list(self._workers):
            self._replace(worker)

    def close(self) -> None:
        """Ends every process of the pool and waits for them; once is enough, more do no harm."""
        atexit.unregister(self.close)
        self._nursery.close()
        for worker in self._workers:
            worker.close()
        self._workers = []
        self._folder.cleanup()

    def _fill(self, num_ranks: int) -> None:
        """Makes the first `num_ranks` workers exist and wait for a task."""
        for worker in list(self._workers):
            if worker.is_dead():
                self._replace(worker)
        while len(self._workers) < num_ranks:
            self._workers.append(self._new_worker())
        for worker in self._workers[:num_ranks]:
            worker.await_ready()

    def _outcome(self, rank: int, worker: _Worker, answer: _Answer | None, was_stopped: bool, unclean: str) -> Outcome:
        """The outcome of one rank; its worker is replaced unless the function returned and left it clean."""
        output = worker.output()
        if isinstance(answer, Returned):
            if unclean:
                self._replace(worker)
            value = pickle.loads(answer.pickled_value)
            return Outcome(rank=rank, pid=worker.pid, value=value, output=output, unclean=unclean)
        if isinstance(answer, _Died):
            _wait_each([worker.end])
        stacks = worker.stacks()
        exit_code = self._replace(worker)
        if isinstance(answer, Raised):
            return Outcome(rank=rank, pid=worker.pid, error=answer.error, output=output)
        if answer is None:
            note = "(it had been stopped by a signal)\n" if was_stopped else ""
            return Outcome(rank=rank, pid=worker.pid, hung=True, stacks=note + stacks, output=output)
        if exit_code < 0:
            return Outcome(rank=rank, pid=worker.pid, exit_signal=-exit_code, stacks=stacks, output=output)
        return Outcome(rank=rank, pid=worker.pid, exit_code=exit_code, stacks=stacks, output=output)

    def _replace(self, worker: _Worker) -> int:
        """The exit code of a worker, ended if it still ran; its successor takes its place and gets ready meanwhile."""
        worker.kill()
        exit_code = self._nursery.reap(worker.pid)
        worker.close()
        self._workers[self._workers.index(worker)] = self._new_worker()
        return exit_code

    def _new_worker(self) -> _Worker:
        """A worker that has begun to get ready."""
        worker = self._nursery.fork()
        worker.send(self._store.port)
        return worker


class _Nursery:
    """The process that forks workers, seen from the tests' process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_NURSERY_START_SECONDS)
        program = Path(__file__).with_name("nursery.py")
        # One thread each: forking is safe only without threads, and many ranks share few cores. The time-out is that of
        # DNS: a TCPStore's client asks for the name of ::ffff:127.0.0.1, and would wait 5 s for an answer that is lost.
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        with theirs, open(folder / "nursery.output", "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(program), json.dumps(sys.path), str(theirs.fileno()), str(folder)],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **threads, "GLOO_SOCKET_IFNAME": "lo", "RES_OPTIONS": "timeout:1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self) -> _Worker:
        """A new worker; the first one waits for the nursery's imports."""
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            pid = self._ask(b"f", 0, [theirs.fileno()])
        return _Worker(pid, ours, self._folder)

    def start(self, told: bytes, streams: tuple[int, int, int]) -> int:
        """The pid of a new process that runs a script."""
        return self._ask(b"s", 0, list(streams), told)

    def reap(self, pid: int) -> int:
        """The exit code of a dead worker (a negative one is a signal); until then its pid cannot be given again."""
        return self._ask(b"r", pid, [])

    def close(self) -> None:
        """Ends the nursery, which ends its workers first."""
        self._socket.close()
        try:
            self._process.wait(_AFTERMATH_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, request: bytes, number: int, descriptors: list[int], told: bytes = b"") -> int:
        try:
            with self._lock:
                socket.send_fds(self._socket, [NURSERY_REQUEST.pack(request, number) + told], descriptors)
                reply: tuple[int] = NURSERY_REPLY.unpack(self._socket.recv(NURSERY_REPLY.size))
        except (OSError, struct.error) as error:
            output = (self._folder / "nursery.output").read_text(errors="replace")
            message = f"the nursery of the ranks does not answer; its output ends with:\n{output[-4000:]}"
            raise RuntimeError(message) from error
        return reply[0]


class _Worker:
    """One worker, seen from the tests' process."""

    def __init__(self, pid: int, connection: Connection[Any, Any], folder: Path) -> None:
        self.pid = pid
        self.connection = connection
        self.end = os.pidfd_open(pid)  # readable once the worker has ended, even if its children hold the connection
        self._output = folder / f"{pid}.output"
        self._stacks = folder / f"{pid}.stacks"
        self._output_start = 0
        self._is_ready = False

    def await_ready(self) -> None:
        """Returns when the worker waits for a task; RuntimeError when it does not come to that."""
        if not self._is_ready:
            wait([self.connection, self.end], _READY_SECONDS)
            if not isinstance(self.receive(), Ready):
                raise RuntimeError(f"worker {self.pid} did not get ready; its output:\n{self.output()}{self.stacks()}")
            self._is_ready = True

    def begin_run(self) -> None:
        """Marks where the output of the run begins."""
        self._output_start = self._output.stat().st_size if self._output.exists() else 0

    def send(self, message: object) -> None:
        """Sends a message; a worker that has died is found by reading, not by writing."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(pickle.dumps(message))

    def receive(self) -> object:
        """The next message, once `connection` or `end` is readable; None when the worker died without one."""
        try:
            return pickle.loads(self.connection.recv_bytes()) if self.connection.poll() else None
        except (EOFError, OSError):
            return None

    def is_dead(self) -> bool:
        return bool(wait([self.end], 0))

    def is_stopped(self) -> bool:
        state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "T"

    def output(self) -> str:
        return self._output.read_bytes()[self._output_start :].decode(errors="replace") if self._output.exists() else ""

    def stacks(self) -> str:
        return self._stacks.read_text(errors="replace") if self._stacks.exists() else ""

    def kill(self) -> None:
        """Ends the worker and the processes it started; only before it is reaped, while the pid is surely its own."""
        for kill in (os.kill, os.killpg):
            with contextlib.suppress(ProcessLookupError):  # no group yet: it was forked a moment ago
                kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Lets go of what was opened for the worker, which has ended."""
        self.connection.close()
        os.close(self.end)
        for path in (self._output, self._stacks):
            path.unlink(missing_ok=True)


def _collect(workers: list[_Worker], deadline: float) -> list[_Answer | None]:
    """Each worker's answer to its task, in their order; None for those silent until `deadline` (monotonic)."""
    answers: dict[int, _Answer] = {}
    pending = {worker.pid: worker for worker in workers}
    while pending and (left := deadline - time.monotonic()) > 0:
        ready = wait([waitable for worker in pending.values() for waitable in (worker.connection, worker.end)], left)
        for worker in list(pending.values()):
            if worker.connection in ready or worker.end in ready:
                message = worker.receive()
                answers[worker.pid] = message if isinstance(message, Returned | Raised) else _Died()
                del pending[worker.pid]
    return [answers.get(worker.pid) for worker in workers]


def _end_hung(workers: list[_Worker]) -> None:
    """Makes workers write their stacks and die of it; one that a signal stopped is continued to do so."""
    for worker in workers:
        os.kill(worker.pid, STACKS_SIGNAL)
        os.kill(worker.pid, signal.SIGCONT)
    _wait_each([worker.end for worker in workers])


def _clean(workers: list[_Worker]) -> dict[int, str]:
    """Why workers that returned cannot be used again, by pid; the empty string for those that can."""
    for worker in workers:
        worker.send(Clean())
    _wait_each([worker.connection for worker in workers])
    unclean: dict[int, str] = {}
    for worker in workers:
        message = worker.receive()
        unclean[worker.pid] = message if isinstance(message, str) else "it did not clean up in time"
    return unclean


def _wait_each(waitables: list[Any]) -> None:
    """Returns when each is readable, or when the aftermath has lasted too long."""
    deadline = time.monotonic() + _AFTERMATH_SECONDS
    pending = list(waitables)
    while pending and (left := deadline - time.monotonic()) > 0:
        ready = wait(pending, left)
        pending = [waitable for waitable in pending if waitable not in ready]
