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
_TARGET = "_worker_loop"  # torch's, and torchdata's


def spare_loader_workers(owner: object, *, is_over: Callable[[], bool]) -> None:
    """Have the workers that are forked from here on end by no SIGTERM but their parent's; as long as ``owner`` lives.

    What they have to do with a parent that is gone they see by themselves.
    """

    def in_worker(_: object) -> None:
        target = getattr(multiprocessing.current_process(), "_target", None)
        if getattr(target, "__name__", "") == _TARGET and not is_over():
            # The worker sets a handler of its own before any of our code runs again: so it is not to arrive there.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            threading.Thread(target=_obey, args=(os.getppid(),), name=THREAD_NAME, daemon=True).start()

    register_after_fork(owner, in_worker)


def _obey(parent: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(0)  # as torch's own handler does
