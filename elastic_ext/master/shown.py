"""Shown: the status that people ask for, made no more often than a master can spare the time. Of a job of thousands of
nodes it takes a part of a second, in which nobody else is answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .wire import master_pb2 as wire

__all__ = ["Shown"]

_FREE_SECONDS = 0.005  # what takes no longer is made anew each time,
_SHARE = 0.1  # ... and all else in no more than so much of the time


class Shown:
    """One job's status. ``make`` makes it as it is now, ``events`` gives the newest ones, as many as are asked for, and
    ``clock`` only ever goes on."""

    def __init__(
        self,
        make: Callable[[wire.GetStatusRequest], wire.JobStatus],
        events: Callable[[int], Sequence[wire.JobEvent]],
        clock: Callable[[], float],
    ) -> None:
        self._make = make
        self._events = events
        self._clock = clock
        self._kept: dict[bool, tuple[float, wire.JobStatus]] = {}  # without workers or with them: until when, and which

    def status(self, request: wire.GetStatusRequest) -> wire.JobStatus:
        """As it is, or as it was when it was made last; events are always the newest."""
        now = self._clock()
        until, kept = self._kept.get(request.without_workers, (now, None))
        if kept is not None and now < until:
            found = wire.JobStatus()
            found.CopyFrom(kept)
            del found.events[:]
            found.events.extend(self._events(request.num_events))
            return found
        status = self._make(request)
        seconds = self._clock() - now
        self._kept.pop(request.without_workers, None)
        if seconds > _FREE_SECONDS:
            self._kept[request.without_workers] = now + seconds / _SHARE, status
        return status
