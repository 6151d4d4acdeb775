"""What a worker process runs: torch's own loop, with the parent at the other end of two pipes, and the messages on
these.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import math
import multiprocessing
import os
import queue
import select
import signal
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

from elastic_ext.records.json import JsonRecord
from elastic_ext.torch_private.loading import PrivateParts, private_parts

__all__ = [
    "MADE",
    "READY",
    "STACK_SIGNAL",
    "STOP",
    "Inbox",
    "PipeOutbox",
    "Seat",
    "TrackedIndices",
    "WorkerSpec",
    "end_with_parent",
    "run",
]


# --- numbered messages over pipes, written and read without ever waiting ---------------------------------------------
# frame:  8 bytes, the length of the payload | 8 bytes, its number | the payload

_HEADER = struct.Struct("=Qq")
_INT = struct.Struct("i")
_READ_BYTES = 65536  # what a pipe holds, unless somebody changes that
_COPIED_BYTES = 65536  # payloads up to here are written in one call with their header


class PipeOutbox:
    """Messages written to a pipe; those that the pipe has no room for stay here until ``flush``."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._left: deque[memoryview] = deque()
        self.num_sent_bytes = 0
        """How many bytes this outbox was given to send."""

    def send(self, number: int, payload: memoryview) -> bool:
        """Send a message; gives whether all that was sent is in the pipe. BrokenPipeError if nobody can read it."""
        header = _HEADER.pack(len(payload), number)
        self.num_sent_bytes += len(header) + len(payload)
        if len(payload) <= _COPIED_BYTES:
            self._left.append(memoryview(b"".join((header, payload))))
        else:
            self._left.extend((memoryview(header), payload))
        return self.flush()

    def flush(self) -> bool:
        """Write what is left; gives whether all that was sent is in the pipe. BrokenPipeError if nobody can read it."""
        while self._left:
            first = self._left[0]
            try:
                num_written = os.write(self._descriptor, first)
            except BlockingIOError:
                return False
            if num_written == len(first):
                self._left.popleft()
            else:
                self._left[0] = first[num_written:]
        return True

    def num_read_bytes(self) -> int:
        """How many bytes have been read at the other end, also where that is closed by now."""
        (num_in_pipe,) = _INT.unpack(fcntl.ioctl(self._descriptor, termios.FIONREAD, bytes(_INT.size)))
        return self.num_sent_bytes - sum(map(len, self._left)) - int(num_in_pipe)


class Inbox:
    """Messages read from a pipe."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._partial = bytearray()
        self._missing_bytes = 0  # until the partial frame is whole, as far as that is known

    def read(self) -> list[tuple[int, memoryview]]:
        """The messages that have arrived whole; none where none have. EOFError when nobody can write any more."""
        while True:
            try:
                data = os.read(self._descriptor, _READ_BYTES)
            except BlockingIOError:
                return []
            if not data:
                raise EOFError
            if self._partial:
                self._partial += data
                if len(data) < self._missing_bytes:
                    self._missing_bytes -= len(data)
                    continue
                whole: bytes | bytearray = self._partial
                self._partial = bytearray()
            else:
                whole = data
            messages = self._taken_apart(whole)
            if messages:
                return messages

    def _taken_apart(self, data: bytes | bytearray) -> list[tuple[int, memoryview]]:
        view = memoryview(data)
        messages = []
        start = 0
        self._missing_bytes = 0
        while start + _HEADER.size <= len(view):
            num_bytes, number = _HEADER.unpack_from(view, start)
            end = start + _HEADER.size + num_bytes
            if end > len(view):
                self._missing_bytes = end - len(view)
                break
            messages.append((number, view[start + _HEADER.size : end]))
            start = end
        if start < len(view):
            self._partial = bytearray(view[start:])
        return messages


# --- what a worker process runs: torch's own loop, with the parent at the other end of two pipes ---------------------
# Nothing here runs in the parent but the making of a ``WorkerSpec``.

READY = -1
"""The number of a worker's first message, that it can take tasks: its pid, and the pipe of its stacks."""
STOP = -2
"""The number of the last message to a worker."""
MADE = -3
"""The number of the message that a batch is made and will be sent: a death in the next task is not blamed on it."""
STACK_SIGNAL = signal.SIGRTMAX - 5
"""The signal that has a worker write down the stacks of its threads."""

_PR_SET_PDEATHSIG = 1
_NOTHING = memoryview(b"")
_LONG_SECONDS = 1e-3  # to make a batch; of quicker ones a second thread costs more than it saves


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """What all workers of a pool make batches with: dataset, collate_fn and seed, as torch's DataLoader takes them."""

    dataset: Any
    """A dataset that is asked for samples by index."""
    collate_fn: Callable[[Any], Any]
    base_seed: int
    auto_collation: bool = True
    """Whether a task is a list of indices, whose samples are collated; else one index, whatever that is."""
    worker_init_fn: Callable[[int], None] | None = None
    user_dataset: Any = None
    """What ``get_worker_info`` gives instead of ``dataset``, where that is one of ours around the user's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat(JsonRecord):
    """A worker's slot, the number of workers, and the seed from which the worker is seeded."""

    slot: int
    """The worker's id, as ``get_worker_info`` gives it."""
    num_workers: int
    base_seed: int

    @property
    def name(self) -> str:
        """The name of the worker's process."""
        return f"elastic_ext worker {self.slot}"


class _Closable(Protocol):
    def close(self) -> None: ...


def run(spec: WorkerSpec, seat: Seat, indices: Connection, results: Connection, inherited: Iterable[_Closable]) -> None:
    """Make batches until told to stop, or until the parent is gone. ``inherited``: what only the parent is to hold."""
    end_with_parent()
    for each in inherited:
        each.close()
    parts = private_parts()
    stack_read, stack_write = os.pipe()
    faulthandler.register(STACK_SIGNAL, file=stack_write)
    by_list = spec.auto_collation and not getattr(spec.dataset, "__getitems__", None)
    queues = ParentQueues(indices.fileno(), results.fileno(), parts, seat.slot, stack_read, tracks_indices=by_list)
    parts.run_loop(
        queues,
        dataset=spec.dataset,
        auto_collation=spec.auto_collation,
        collate_fn=spec.collate_fn,
        worker_init_fn=spec.worker_init_fn if spec.user_dataset is None else partial(_begin, spec, parts),
        base_seed=seat.base_seed,
        worker_id=seat.slot,
        num_workers=seat.num_workers,
    )


def _begin(spec: WorkerSpec, parts: PrivateParts, slot: int) -> None:
    """Have ``get_worker_info`` give the user's dataset, then call the user's ``worker_init_fn``."""
    parts.tell_dataset(spec.user_dataset)
    if spec.worker_init_fn is not None:
        spec.worker_init_fn(slot)


def end_with_parent() -> None:
    """Have this process killed when its parent is gone, whatever it does then."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    if os.getppid() == parent.pid:
        # Linux sends the signal as the thread ends that forked this process; that thread outlives the workers.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # multiprocessing's fork server forked it, and outlives the parent
        threading.Thread(
            target=_kill_this_process_after, args=(parent.sentinel,), name="elastic_ext parent", daemon=True
        ).start()


def _kill_this_process_after(sentinel: int) -> None:
    """Kill this process once the process of this multiprocessing sentinel has ended."""
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


class TrackedIndices(list[Any]):
    """A list of indices that tells which of them is being looked up."""

    _reading: Any = None  # the iterator over them

    def __iter__(self) -> Iterator[Any]:
        self._reading = super().__iter__()  # which costs nothing where nobody asks
        return self._reading  # type: ignore[no-any-return]

    @property
    def at(self) -> tuple[Any, ...]:
        """The index that is being looked up, alone in a tuple; empty before the first and after the last."""
        if self._reading is None:
            return ()
        _, _, *num_read = self._reading.__reduce__()  # an iterator that is at its end tells no number
        return (self[num_read[0] - 1],) if num_read and num_read[0] > 0 else ()


class ParentQueues:
    """The pipes to the parent, as torch's worker loop wants them: index queue, result queue and done event in one."""

    def __init__(
        self, indices: int, results: int, parts: PrivateParts, slot: int, stack: int, *, tracks_indices: bool
    ) -> None:
        self._parts = parts
        self._slot = slot
        self._stack = stack
        self._tracks_indices = tracks_indices
        self._inbox = Inbox(indices)
        self._readable = select.poll()
        self._readable.register(indices, select.POLLIN)
        self._arrived: deque[tuple[int, memoryview]] = deque()
        self._task: object = None
        self._results = results
        self._outbox = PipeOutbox(results)
        self._sending = threading.Lock()
        self._has_unsent = threading.Event()  # set while the outbox has bytes that the pipe has no room for
        self._feeder: threading.Thread | None = None
        self._made: queue.SimpleQueue[tuple[int, object]] | None = None  # for a thread to send, once making takes long
        self._began_at = math.inf
        self._is_ready = False
        self._is_over = False

    def get(self, timeout: float) -> tuple[int, object] | None:
        """The next task; None when there will be none."""
        if not self._is_ready:  # torch's loop asks for the first task when it has set everything up
            self._is_ready = True
            self._send(READY, (os.getpid(), self._stack))
        while not self._arrived and not self._is_over:
            if not self._readable.poll(timeout * 1000):
                raise queue.Empty
            try:
                self._arrived.extend(self._inbox.read())
            except EOFError:
                self._is_over = True
        if self._is_over or self._arrived[0][0] == STOP:
            self._is_over = True
            return None
        number, payload = self._arrived.popleft()
        task = ForkingPickler.loads(payload)
        self._task = TrackedIndices(task) if self._tracks_indices and type(task) is list else task
        self._began_at = time.perf_counter()
        return number, self._task

    def put(self, answer: tuple[int, Any]) -> None:
        """Send a batch, or the exception that came instead."""
        number, outcome = answer
        if isinstance(outcome, self._parts.wrapper):
            self._note_index(outcome)
        self._task = None
        if self._made is None and time.perf_counter() - self._began_at > _LONG_SECONDS:
            self._made = queue.SimpleQueue()
            threading.Thread(target=self._send_made, name="elastic_ext batches", daemon=True).start()
        if self._made is None:
            self._send(number, outcome)
        else:
            self._write(MADE, _NOTHING)
            self._made.put((number, outcome))

    def is_set(self) -> bool:
        """Whether no more tasks will come."""
        return self._is_over

    def cancel_join_thread(self) -> None:
        """Nothing to do: torch's loop calls this in the end."""

    def close(self) -> None:
        """Nothing to do: torch's loop calls this in the end, and the descriptors go with the process."""

    def _note_index(self, wrapper: Any) -> None:
        if isinstance(self._task, TrackedIndices) and self._task.at:
            wrapper.at = self._task.at

    def _send_made(self) -> None:
        """Pickle and send batches while the next ones are made, as torch's workers do."""
        assert self._made is not None
        while True:
            number, outcome = self._made.get()
            self._send(number, outcome)
            del outcome  # its memory goes with the one who reads it

    def _send(self, number: int, outcome: object) -> None:
        self._write(number, self._pickled(outcome))

    def _write(self, number: int, payload: memoryview) -> None:
        with self._sending:
            try:
                if self._outbox.send(number, payload):
                    return
            except BrokenPipeError:  # nobody wants it: the next get() ends
                self._is_over = True
                return
            self._has_unsent.set()
            if self._feeder is None:  # the pipe is full; the next batch can be made while it empties
                self._feeder = threading.Thread(target=self._feed, name="elastic_ext results", daemon=True)
                self._feeder.start()

    def _pickled(self, outcome: object) -> memoryview:
        try:
            return ForkingPickler.dumps(outcome)
        except Exception:  # whatever the user's objects raise: told as what the batch raised
            if not isinstance(outcome, self._parts.wrapper):
                return self._pickled(self._parts.wrapped(self._slot))
        outcome.exc_type = RuntimeError  # its own class cannot travel; its words can
        return ForkingPickler.dumps(outcome)

    def _feed(self) -> None:
        writable = select.poll()
        writable.register(self._results, select.POLLOUT)
        while True:
            self._has_unsent.wait()
            writable.poll()
            with self._sending:
                try:
                    if self._outbox.flush():
                        self._has_unsent.clear()
                except BrokenPipeError:
                    self._is_over = True
                    return
