"""Loader workers: the signal that tells a whole job to end leaves them alive, for the steps that are still to be taken.

torchrun sends SIGTERM to the process group of every rank, and some schedulers to all processes there are. A worker that
ended by it would end its rank too, in the middle of whatever that does, by an exception and without a checkpoint.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.util import register_after_fork

__all__ = ["THREAD_NAME", "spare_loader_workers"]

THREAD_NAME = "elastic_ext signals"
_SPARED = (signal.SIGTERM, signal.SIGUSR1)
_TARGET = "_worker_loop"  # torch's, and torchdata's
_OWN = "elastic_ext.data.process"  # where an ElasticDataLoader's workers begin


def spare_loader_workers(owner: object, *, is_over: Callable[[], bool]) -> None:
    """Have workers that are forked from here on end by their parent's SIGTERM alone; as long as ``owner`` lives.

    No SIGUSR1 ends them. What they have to do with a parent that is gone they see by themselves.
    """

    def in_worker(_: object) -> None:
        target = getattr(multiprocessing.current_process(), "_target", None)
        is_worker = getattr(target, "__name__", "") == _TARGET or getattr(target, "__module__", "") == _OWN
        if is_worker and not is_over():
            # The worker sets a handler of its own before any of our code runs again: so it is not to arrive there.
            signal.pthread_sigmask(signal.SIG_BLOCK, _SPARED)
            threading.Thread(target=_obey, args=(os.getppid(),), name=THREAD_NAME, daemon=True).start()

    register_after_fork(owner, in_worker)


def _obey(parent: int) -> None:
    while (told := signal.sigwaitinfo(_SPARED)).si_pid != parent or told.si_signo != signal.SIGTERM:
        pass
    os._exit(0)  # as torch's own handler does
