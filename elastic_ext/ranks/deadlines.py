"""Waiting that comes to an end: calls with a limit of time, threads that their owner ends, and how long to wait before
the next try.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Backoff", "Call", "NoAnswer", "OwnedThread", "within"]


# --- a thread that its owner ends ------------------------------------------------------------------------------------


class OwnedThread(threading.Thread):
    """A named daemon thread with an owner, who starts it and closes it.

    The function that it runs waits on the event ``stopping``, or on something that ``wake`` ends, and returns once the
    event is set.
    """

    def __init__(
        self,
        run: Callable[[], object],
        *,
        name: str,
        stopping: threading.Event | None = None,
        wake: Callable[[], object] | None = None,
    ) -> None:
        """``stopping`` is an event of the owner's, where others look at it too; ``wake`` is called after it is set."""
        super().__init__(target=run, name=name, daemon=True)
        self.stopping = threading.Event() if stopping is None else stopping
        self._wake = wake

    @property
    def is_started(self) -> bool:
        """Whether the thread was ever started."""
        return self.ident is not None

    def stop(self) -> None:
        """Set the event at which the thread ends, without waiting for the end."""
        self.stopping.set()
        if self._wake is not None:
            self._wake()

    def wait(self, seconds: float | None) -> bool:
        """Wait at most ``seconds``, without limit for None; whether the thread has ended, or was never started.

        False at once for the thread itself, which may be the one that collects its owner as garbage.
        """
        if self.is_started and self is not threading.current_thread():
            self.join(seconds)
        return not self.is_alive()

    def close(self, seconds: float | None) -> bool:
        """Stop the thread and wait for its end; gives whether the thread has ended in time. Twice is allowed."""
        self.stop()
        return self.wait(seconds)


# --- calls that may never come back ----------------------------------------------------------------------------------
# A file system whose server is gone does not answer, nor does a store whose process has stopped.

_Result = TypeVar("_Result")


class NoAnswer(Exception):
    """A call has given no answer within its limit of time."""


class Call(OwnedThread, Generic[_Result]):
    """A call that may never return, made on a thread of its own; nothing can end the thread then."""

    def __init__(self, act: Callable[[], _Result], *, name: str = "elastic_ext-asks") -> None:
        super().__init__(self._keep, name=name)
        self._act = act
        self._results: list[_Result] = []
        self._errors: list[BaseException] = []

    def within(self, seconds: float) -> _Result:
        """Make the call; gives its result or raises its error, NoAnswer if it takes longer than ``seconds``."""
        self.start()
        self.wait(seconds)
        if self._errors:
            raise self._errors.pop()
        if not self._results:
            raise NoAnswer(f"no answer within {seconds:g} s")
        return self._results.pop()

    def _keep(self) -> None:
        try:
            self._results.append(self._act())
        except BaseException as error:
            self._errors.append(error)
        finally:
            del self._act  # through which it would keep what it has worked on


def within(seconds: float, act: Callable[[], _Result], *, name: str = "elastic_ext-asks") -> _Result:
    """The result or the error of ``act``, called on a thread of that ``name``; NoAnswer if it takes too long."""
    return Call(act, name=name).within(seconds)


# --- how long to wait before the next try, so that many who have lost the same thing do not come back at once --------
# Each wait is anything from nothing to a bound (full jitter), and the bound doubles with each try: pure but for the
# random numbers, which are given.

_MOST_DOUBLINGS = 30


class Backoff:
    """How long to wait before each new try of something that fails: random waits under a bound that doubles."""

    def __init__(self, chance: random.Random, *, first_seconds: float, most_seconds: float) -> None:
        self._chance = chance
        self._first_seconds = first_seconds
        self._most_seconds = most_seconds
        self.num_tries = 0
        """How many waits were asked for since the last ``forget``."""

    def next_seconds(self) -> float:
        """Seconds to wait before the next try, which is counted."""
        bound = min(self._first_seconds * 2.0 ** min(self.num_tries, _MOST_DOUBLINGS), self._most_seconds)
        self.num_tries += 1
        return self._chance.uniform(0.0, bound)

    def forget(self) -> None:
        """Begin with short waits again, after a try that went well."""
        self.num_tries = 0
