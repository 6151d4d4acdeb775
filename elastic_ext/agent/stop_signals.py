"""StopSignals: what tells an agent to end, from its first moment to its last: one counts, and others change nothing.

Torch has handlers of its own, set as workers are started, which raise at every one: a second would break off the ending
of workers, and leave these behind.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException

__all__ = ["StopSignals"]

_AGAIN_SECONDS = 1.0


class StopSignals:
    """The signals of these names. In another thread than the main one there are none."""

    def __init__(self, names: str) -> None:
        self.told: signal.Signals | None = None
        """The first that came."""
        found = [getattr(signal, name.strip(), None) for name in names.split(",")]
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.getsignal(each) for each in found if isinstance(each, signal.Signals)}
        self._alarm_before: Any = None
        self._is_raised = False

    def __enter__(self) -> StopSignals:
        self.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hold()
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._alarm_before is not None:
            signal.signal(signal.SIGALRM, self._alarm_before)

    def take(self) -> None:
        """Have them from now on, whoever had them; but not a SIGHUP that nohup has had ignored."""
        for number, before in self._before.items():
            is_nohup = number == signal.SIGHUP and before == signal.SIG_IGN
            signal.signal(number, signal.SIG_IGN if is_nohup else self._note)

    def hold(self) -> None:
        """From now on one that comes is noted, for whoever looks."""
        self._is_raised = False
        if self._alarm_before is not None:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def let_through(self) -> None:
        """From now on one that comes is raised, as SignalException, and so is one that has come.

        It is raised again and again until ``hold()`` is called: the first may come to what passes over exceptions, as
        logging does while it writes.
        """
        self._is_raised = True
        if self._before and self._alarm_before is None:
            self._alarm_before = signal.signal(signal.SIGALRM, self._raise)
        if self.told is not None:
            raise self._raised(self.told)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.told is None:
            self.told = signal.Signals(number)
            self._raise(number, frame)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self.told is not None and self._is_raised:
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
            raise self._raised(self.told)

    def _raised(self, number: signal.Signals) -> SignalException:
        return SignalException(f"process {os.getpid()} got {number.name}", sigval=number)
