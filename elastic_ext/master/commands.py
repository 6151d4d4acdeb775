"""What `elastic-ext status` and `elastic-ext events` do where a master is asked."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from typing import Any

from elastic_ext.ckpt.terminal import Terminal
from elastic_ext.errors import MasterAbsent, MasterBusy, MasterError, MasterRefused
from elastic_ext.ranks.deadlines import Backoff

from .client import MasterClient
from .job_words import event_words, is_healthy, status_words
from .places import MasterPlace
from .wire import master_pb2 as wire
from .wire.plain import as_dict

__all__ = ["run_events", "run_status"]

_HEALTHY = 0
_TROUBLE, _REFUSED = 1, 2
_FIRST_SECONDS, _MOST_SECONDS = 0.5, 10.0


def run_status(place: MasterPlace, terminal: Terminal) -> int:
    """Show the job; gives the exit status."""
    try:
        with MasterClient(place) as client:
            status = client.status()
    except (MasterError, ValueError) as error:
        return _complained(error, terminal)
    healthy = is_healthy(status)
    terminal.tell({**as_dict(status), "healthy": healthy}, status_words(status, str(place.address)))
    return _HEALTHY if healthy else _TROUBLE


def run_events(place: MasterPlace, terminal: Terminal, *, most: int, follow: bool) -> int:
    """Show the newest events, ``most`` of them or with 0 all, and those to come; gives the exit status.

    A master that goes away while it is followed is waited for, and nothing is shown twice or left out.
    """
    try:
        for event in _events(place, terminal, most=most, follow=follow):
            terminal.tell(_event_record(event), event_words(event))
            terminal.flush()
    except (MasterError, ValueError) as error:
        return _complained(error, terminal)
    return _HEALTHY


def _events(place: MasterPlace, terminal: Terminal, *, most: int, follow: bool) -> Iterator[wire.JobEvent]:
    backoff = Backoff(random.Random(), first_seconds=_FIRST_SECONDS, most_seconds=_MOST_SECONDS)
    last, has_begun = 0, False
    with MasterClient(place) as client:
        while True:
            try:
                for event in client.events(after=last, most=0 if has_begun else most, follow=follow):
                    last, has_begun = event.number, True
                    backoff.forget()
                    yield event
                if not follow:
                    return
                words = f"the master at {place.address} has ended the events"
            except (MasterAbsent, MasterBusy) as error:
                if not follow or not has_begun:
                    raise
                words = str(error)
            if backoff.num_tries == 0:
                terminal.complain(f"{words}; it is waited for")
            threading.Event().wait(backoff.next_seconds())


def _event_record(event: wire.JobEvent) -> dict[str, Any]:
    """With its details as JSON has them."""
    record = as_dict(event)
    try:
        details = json.loads(event.details or "{}")
    except (ValueError, RecursionError):
        details = {}
    return {**record, "details": details if isinstance(details, dict) else {}}


def _complained(error: Exception, terminal: Terminal) -> int:
    terminal.complain(str(error))
    return _REFUSED if isinstance(error, (MasterRefused, ValueError)) else _TROUBLE
