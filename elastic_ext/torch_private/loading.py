"""Loading data in worker processes: the private parts of torch for it, which only this file uses.

``private_parts`` looks for all of it first, and raises where this torch keeps it elsewhere: nothing is guessed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import inspect
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import get_worker_info

from elastic_ext.errors import ElasticError
from elastic_ext.version import TESTED_TORCH_IN_WORDS

__all__ = ["PrivateParts", "pinned", "private_parts", "remove_shared_memory_of", "thread_state"]

_SHARED_MEMORY = Path("/dev/shm")

_PARAMETERS = (
    "dataset_kind",
    "dataset",
    "index_queue",
    "data_queue",
    "done_event",
    "auto_collation",
    "collate_fn",
    "drop_last",
    "base_seed",
    "init_fn",
    "worker_id",
    "num_workers",
    "persistent_workers",
    "shared_seed",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrivateParts:
    """The private parts of torch's DataLoader that a worker process runs, and answers with."""

    worker_loop: Callable[..., None]
    """Torch's loop of a worker: seeds, sets ``get_worker_info()``, and makes batches until it is given None."""
    map_kind: object
    """Torch's constant for a dataset that is asked for samples by index."""
    wrapper: type[Any]
    """Torch's ExceptionWrapper: an exception on its way to another process, which ``reraise()`` raises there."""

    def run_loop(
        self,
        queues: object,
        *,
        dataset: object,
        auto_collation: bool,
        collate_fn: Callable[[Any], Any],
        worker_init_fn: Callable[[int], None] | None,
        base_seed: int,
        worker_id: int,
        num_workers: int,
    ) -> None:
        """Run torch's loop of a worker in this process, until it is given None.

        ``queues`` is one object with what the loop calls of its index queue, its result queue and its done event.
        """
        self.worker_loop(
            dataset_kind=self.map_kind,
            dataset=dataset,
            index_queue=queues,
            data_queue=queues,
            done_event=queues,
            auto_collation=auto_collation,
            collate_fn=collate_fn,
            drop_last=False,
            base_seed=base_seed,
            init_fn=worker_init_fn,
            worker_id=worker_id,
            num_workers=num_workers,
            persistent_workers=False,
            shared_seed=None,
        )

    def tell_dataset(self, dataset: object) -> None:
        """Have ``get_worker_info()`` name this dataset; called in a worker."""
        object.__setattr__(get_worker_info(), "dataset", dataset)  # which refuses to be set otherwise

    def wrapped(self, worker_id: int) -> Any:
        """The exception that is being handled, wrapped as torch's loop wraps it."""
        return self.wrapper(where=f"in DataLoader worker process {worker_id}")


def thread_state() -> object:
    """The dict that Python keeps for the calling thread. Who holds it keeps it alive in processes that are forked, too.

    A forked process drops the dicts of all threads but the one that forked, and with them what torch has cached there.
    If a cache of DTensor's is the last to refer to a process group, that would be destroyed in the forked process, and
    wait for its own threads, which a fork does not copy.
    """
    address = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThreadState_GetDict", ctypes.pythonapi))()  # not ours yet
    return ctypes.cast(address, ctypes.py_object).value


def pinned(batch: Any, device: str = "") -> Any:
    """``batch`` in page-locked memory, its classes kept; as it is where there is no accelerator."""
    if not torch.accelerator.is_available():
        return batch
    return _found("torch.utils.data._utils.pin_memory", "pin_memory")(batch, device or None)


def remove_shared_memory_of(pid: int) -> None:
    """Remove the shared memory that a process which has ended left under its name, where no other process has it open.

    Torch names the memory of a tensor that is sent, opens it and takes the name away again. A process that is killed in
    between leaves the name, and with it memory of the machine, which nobody would ever free. Processes of other
    containers may share the folder and the pid; what is theirs they have open, and the kernel gives no lease on it.
    """
    for file in _SHARED_MEMORY.glob(f"torch_{pid}_*"):
        with contextlib.suppress(OSError):  # it is in use, somebody else's, or gone
            descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                # Who opens it while the lease is held has a signal sent here: not SIGIO, which would end this process.
                fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
                fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
                file.unlink()
            finally:
                os.close(descriptor)


def private_parts() -> PrivateParts:
    """This torch's private parts of loading; raises where one is missing, or is not as this library knows it."""
    worker_loop = _found("torch.utils.data._utils.worker", "_worker_loop")
    parameters = tuple(inspect.signature(worker_loop).parameters)
    if parameters != _PARAMETERS:
        others = sorted(set(parameters) ^ set(_PARAMETERS)) or ["their order"]
        raise _unknown(f"_worker_loop with the known parameters (these differ: {', '.join(others)})")
    wrapper = _found("torch._utils", "ExceptionWrapper")
    _found("torch._utils", "ExceptionWrapper", "reraise")
    try:
        raise ValueError("a trial")
    except ValueError:
        trial = wrapper(where="in a trial")
    for name in ("exc_type", "exc_msg"):
        if not hasattr(trial, name):
            raise _unknown(f"{name} of an ExceptionWrapper")
    return PrivateParts(
        worker_loop=worker_loop,
        map_kind=_found("torch.utils.data", "_DatasetKind", "Map"),
        wrapper=wrapper,
    )


def _found(module: str, *names: str) -> Any:
    try:
        found: Any = importlib.import_module(module)
        for name in names:
            found = getattr(found, name)
    except (ImportError, AttributeError):
        raise _unknown(".".join((module, *names))) from None
    return found


def _unknown(what: str) -> ElasticError:
    return ElasticError(
        f"torch {torch.__version__} has no {what}, which the versions that this library knows "
        f"({TESTED_TORCH_IN_WORDS}) have; load data with one of those, or with torch's own DataLoader"
    )
