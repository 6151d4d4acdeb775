"""SIGTERM and SIGUSR1: how they end a training with a checkpoint, and how a loader's workers are left alive for it."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.util import register_after_fork
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn, Protocol

from elastic_ext.ranks.board import Board
from elastic_ext.ranks.deadlines import OwnedThread
from elastic_ext.ranks.processes import do_in_forked_processes

__all__ = ["EXIT_STATUS", "SIGNALS", "SIGNALS_THREAD_NAME", "THREAD_NAME", "Leaving", "spare_loader_workers"]

_logger = logging.getLogger(__name__)


# --- the signal that tells a whole job to end leaves loader workers alive, for the steps that are still to be taken --
# torchrun sends SIGTERM to the process group of every rank, and some schedulers to all processes there are. A worker
# that ended by it would end its rank too, in the middle of whatever that does, by an exception and without a
# checkpoint.

SIGNALS_THREAD_NAME = "elastic_ext signals"
_SPARED = (signal.SIGTERM, signal.SIGUSR1)
_TARGET = "_worker_loop"  # torch's, and torchdata's
_OWN = "elastic_ext.data.workers.worker_process"  # where an ElasticDataLoader's workers begin


def spare_loader_workers(owner: object, *, is_over: Callable[[], bool]) -> None:
    """Have loader workers forked from here on end by a SIGTERM of their parent alone, as long as ``owner`` lives.

    No SIGUSR1 ends them. That their parent is gone workers notice by themselves.
    """

    def in_worker(_: object) -> None:
        target = getattr(multiprocessing.current_process(), "_target", None)
        is_worker = getattr(target, "__name__", "") == _TARGET or getattr(target, "__module__", "") == _OWN
        if is_worker and not is_over():
            # The worker sets a handler of its own before any of our code runs again: so it is not to arrive there.
            signal.pthread_sigmask(signal.SIG_BLOCK, _SPARED)
            threading.Thread(target=_obey, args=(os.getppid(),), name=SIGNALS_THREAD_NAME, daemon=True).start()

    register_after_fork(owner, in_worker)


def _obey(parent: int) -> None:
    while (told := signal.sigwaitinfo(_SPARED)).si_pid != parent or told.si_signo != signal.SIGTERM:
        pass
    os._exit(0)  # as torch's own handler does


# --- SIGTERM and SIGUSR1 end a training with a checkpoint of what it came to -----------------------------------------
#     in steps       the control word carries the request; all ranks finish the same step, save, and exit
#     outside        nobody comes to a boundary for a while, as in an evaluation: half of that time is waited for
#                    one; then a thread of each rank has written what was copied last. Where nothing was, it is waited
#                    longer, and what there is to go on from is the last checkpoint
#
# Which of the two it is all ranks learn from the store, where the first to say it decides. Either way the exit status
# is 143, once the checkpoint exists or there is no time left for it.

EXIT_STATUS = 143
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
THREAD_NAME = "elastic_ext leaving"
_STATUS = Path("/proc/self/status")
_POLL_SECONDS = 0.25
_SILENT_SECONDS = 6.0  # of a rank that ought to have given a sign within one
_MARGIN = 0.1  # of the time there is, to end in

_How = Literal["in steps", "from memory"]
_ASKED, _HOW, _SIGN = "leaving/asked", "leaving/how", "leaving"  # on the board of the ranks


class ToldToEnd(Protocol):
    """A training that can be told to end, asked by a thread beside it."""

    def request_leave(self) -> None:
        """Have all ranks finish the same step, save, and exit."""

    def can_write(self) -> bool:
        """Whether the newest step is copied, and can be written without the training thread."""

    def has_some(self) -> bool:
        """Whether there is some state to go on from, if no newer step ends."""

    def has_nothing(self) -> bool:
        """Whether there is nothing to lose: no step was taken so far."""

    def write_newest(self, seconds: float) -> str:
        """Write the newest copy of the training state within ``seconds``; gives the outcome in words."""

    def write_with_others(self) -> None:
        """Write this rank's part of the newest copy, if another rank has begun to write it; called now and then."""


class Leaving:
    """Ends a training with a checkpoint at SIGTERM or SIGUSR1 to any rank; ``start`` it, and ``stop`` it."""

    def __init__(self, board: Board, training: ToldToEnd, *, seconds: float) -> None:
        self._board = board
        self._seconds = seconds * (1 - _MARGIN)
        self._margin = seconds * _MARGIN
        self._training = training
        self._asked_at: float | None = None
        self._signal = ""
        self._is_over = threading.Event()
        self._has_given_back = self._must_exit = self._has_told = self._has_warned = self._is_deaf = (
            self._is_in_steps
        ) = False
        self._handlers: dict[int, Any] = {}
        self._reader, self._writer = socket.socketpair()  # where signals are seen while the main thread is deep in C
        self._main = threading.main_thread().ident
        # Two: the store may not answer for very long, as where the machine that has it is gone.
        self._threads = [
            OwnedThread(run, name=THREAD_NAME, stopping=self._is_over) for run in (self._listen, self._watch)
        ]

    def take_world(self, board: Board) -> None:
        """Listen on the ``board`` of other ranks from here on, and tell these if this rank was told to end."""
        self._board, self._has_told = board, False

    def start(self) -> None:
        """Take the signals that nobody else takes, and listen for other ranks that were sent one."""
        if threading.current_thread() is threading.main_thread():
            # What a forked process is sent, as a loader's worker, ends that one, however early it comes, and no other.
            do_in_forked_processes(self, Leaving.give_back)
            caught = _caught_outside_python()
            for number in SIGNALS:
                if _is_a_trainers(handler := signal.getsignal(number)) or (
                    handler is signal.SIG_DFL and number not in caught
                ):
                    self._handlers[number] = handler
                    signal.signal(number, self._take)
            self._writer.setblocking(False)
            self._have_signals_written()
            if signal.SIGTERM in self._handlers:
                spare_loader_workers(self, is_over=self._is_over.is_set)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop listening, and give the signals back to their earlier handlers."""
        self._is_over.set()
        if threading.current_thread() is not threading.main_thread():
            return  # which alone can give them back: a signal that comes yet finds that this is over
        self.give_back()
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")
        have_ended = [thread.close(_POLL_SECONDS * 8) for thread in self._threads]
        if all(have_ended):
            self._reader.close()
            self._writer.close()

    def give_back(self) -> None:
        """Take no signals any more; in the main thread."""
        if self._writer.fileno() != -1 and (found := signal.set_wakeup_fd(-1)) != self._writer.fileno():
            signal.set_wakeup_fd(found, warn_on_full_buffer=False)
        earlier = [number for number in self._handlers if signal.getsignal(number) == self._take]
        self._has_given_back = True
        for number in earlier:
            signal.signal(number, self._earlier_handler(number))
            if _is_a_trainers(handler := signal.getsignal(number)):
                handler.__self__._have_signals_written()  # type: ignore[union-attr]

    def _earlier_handler(self, number: int) -> Any:
        """The handler of a signal before this took it; that of a trainer that has given it back is passed over."""
        handler = self._handlers[number]
        while _is_a_trainers(handler) and handler.__self__._has_given_back:
            handler = handler.__self__._handlers[number]
        return handler

    def _have_signals_written(self) -> None:
        """Have signals written to a socket, so that they are seen while the main thread is deep in C.

        Not where somebody other than an earlier trainer has them written.
        """
        found = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        earlier = [handler.__self__ for handler in self._handlers.values() if _is_a_trainers(handler)]
        if found != -1 and found not in [each._writer.fileno() for each in earlier]:
            signal.set_wakeup_fd(found, warn_on_full_buffer=False)

    @property
    def is_asked(self) -> bool:
        """Whether a signal has come, to this rank or to another that has told of it."""
        return self._asked_at is not None

    def claim(self) -> bool:
        """Whether training ends by a save between steps; asked on one rank, once all have finished the same step."""
        return self._decide("in steps") == "in steps"

    def go_from_memory(self) -> None:
        """End by writing the newest copy, since training cannot go on; returns when this process exits anyway."""
        if self._decide("from memory") == "from memory":
            self.wait()

    def wait(self) -> None:
        """Wait until another thread, which writes the newest copy, has this process exit."""
        self._is_over.wait(self._seconds + self._margin)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._is_over.is_set():  # and the one that took it could not give it back
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if self._must_exit or self._is_deaf:
            raise SystemExit(EXIT_STATUS)
        self._note(signal.Signals(number).name)

    def _note(self, what: str) -> None:
        if self._asked_at is None:
            self._signal, self._asked_at = what, time.monotonic()
            self._training.request_leave()

    def _listen(self) -> None:
        """Note signals to this rank, and see that the rank ends by one even if the store does not answer."""
        while not self._is_over.is_set():
            if select.select([self._reader], [], [], _POLL_SECONDS)[0]:
                for number in self._reader.recv(64):
                    if number in SIGNALS and signal.getsignal(number) == self._take:
                        self._note(signal.Signals(number).name)
            if self._asked_at is None or self._is_over.is_set():
                continue
            if self._is_deaf:
                self._exit()
            late = time.monotonic() - self._asked_at
            if late > self._seconds + self._margin / 2 and not self._is_in_steps and not self._must_exit:
                _logger.error(
                    "%.0f seconds after %s the ranks' store does not answer: this process ends and saves nothing",
                    late,
                    self._signal,
                )
                _exit_at_once()

    def _watch(self) -> None:
        try:
            while not self._is_over.wait(_POLL_SECONDS):
                self._look()
        except RuntimeError as error:  # the store is gone, with the process that had it
            self._is_deaf = True  # what is sent to this rank ends it at once
            if not self._is_over.is_set():
                _logger.debug("signals sent to other ranks are not heard of any more: %s", error)

    def _look(self) -> None:
        self._training.write_with_others()
        if self._asked_at is None and self._board.has(_ASKED):
            self._note("a signal to another rank")
        if self._asked_at is None:
            return
        if not self._has_told:
            self._has_told = True
            self._board.post(_ASKED, 1)
            self._board.tell(_SIGN, 1)
            _logger.info("%s: training is to end; the step under way is saved first, if it ends in time", self._signal)
        late = time.monotonic() - self._asked_at
        how = self._decided()
        if how is None and (self._training.has_nothing() or self._has_waited(late)):
            how = self._decide("from memory")
        if how == "from memory":
            self._leave(self._seconds - late)
        elif how is None and late > _SILENT_SECONDS and not self._board.has(*self._board.of_peers(_SIGN)):
            if self._decide("from memory") == "from memory":
                _logger.error("%.0f seconds after %s a rank gives no sign: nothing newer is saved", late, self._signal)
                self._exit()  # a launcher that restarts the job waits for it
        elif how is None and late > self._seconds:
            self._decide("from memory")
            _logger.error("%.0f seconds after %s no step has ended: nothing is saved", late, self._signal)
            self._exit()
        elif late > self._seconds and not self._has_warned:
            self._has_warned = True
            _logger.error(
                "%.0f seconds after %s the checkpoint is not written, and the launcher may end this process now; allow "
                "it more time, and say so with ELASTIC_EXT_SHUTDOWN_SECONDS",
                late,
                self._signal,
            )

    def _has_waited(self, late: float) -> bool:
        """Whether training ends without another step: the longer none has ended, the older a state will do."""
        training, part = self._training, late / self._seconds
        return (part > 1 / 2 and training.can_write()) or (part > 3 / 4 and training.has_some())

    def _leave(self, seconds: float) -> None:
        """Write the newest copy, and exit."""
        what = self._training.write_newest(max(seconds, 0.0))
        _logger.warning("%s: training ends between steps; %s", self._signal, what)
        self._exit()

    def _exit(self) -> None:
        """Have the main thread exit, wherever it is."""
        self._must_exit = True
        if self._main is not None and signal.getsignal(signal.SIGTERM) == self._take and not self._is_over.is_set():
            signal.pthread_kill(self._main, signal.SIGTERM)
        if not self._is_over.wait(self._margin):  # it does not come back from where it is
            _exit_at_once()

    def _decided(self) -> _How | None:
        how: _How | None = self._board.read(_HOW)
        return None if how is None else self._learn(how)

    def _decide(self, how: _How) -> _How:
        """How all ranks end training, by the store: ``how``, unless another way was decided before."""
        return self._learn(self._board.decide(_HOW, how))

    def _learn(self, how: _How) -> _How:
        self._is_in_steps = how == "in steps"
        return how


def _is_a_trainers(handler: Any) -> bool:
    """Whether a signal's handler is that of another trainer in this process."""
    return isinstance(getattr(handler, "__self__", None), Leaving)


def _caught_outside_python() -> frozenset[int]:
    """The signals that somebody has a handler in C for, such as faulthandler, of which Python says nothing."""
    try:
        status = _STATUS.read_text()
    except OSError:  # another system
        return frozenset()
    mask = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:")), 0)
    return frozenset(number for number in SIGNALS if mask >> (number - 1) & 1)


def _exit_at_once() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_STATUS)
