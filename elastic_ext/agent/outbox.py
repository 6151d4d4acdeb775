"""Outbox: events that a master is to hear of, kept until it has; as many as there is room for. Pure."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from elastic_ext.records.metrics import JobEvent

__all__ = ["Outbox"]


class Outbox:
    """The newest events that nobody has confirmed yet, and how many older ones had to go. Any thread may call."""

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._waiting: deque[JobEvent] = deque()
        self._num_dropped = 0
        self._num_lent = 0  # of those that wait, the first
        self._num_dropped_lent = 0
        self._num_passed = 0  # lent ones that had to go before it was known whether they arrived
        self._num_gone = 0  # of all that have come
        self.lent_from = 1
        """The number of the first event that was lent last, of all that have come, from 1: whoever has it need not take
        it again."""

    def put(self, events: Iterable[JobEvent], *, num_dropped: int = 0) -> None:
        """These have come; ``num_dropped`` others have, and were not kept."""
        with self._lock:
            self._waiting.extend(events)
            self._num_dropped += num_dropped
            while len(self._waiting) > self._most:
                self._waiting.popleft()
                self._num_gone += 1
                self._num_dropped += 1
                if self._num_lent:
                    self._num_lent, self._num_passed = self._num_lent - 1, self._num_passed + 1

    def lend(self, most: int) -> tuple[tuple[JobEvent, ...], int]:
        """The oldest ``most`` of them, and how many were dropped; they stay until ``confirm``."""
        with self._lock:
            found = tuple(self._waiting)[:most]
            self._num_lent, self._num_dropped_lent, self._num_passed = len(found), self._num_dropped, 0
            self.lent_from = self._num_gone + 1
            return found, self._num_dropped

    def lend_less(self, num: int) -> None:
        """Of what was lent last only the first ``num`` are; the others were not sent."""
        with self._lock:
            self._num_lent = min(self._num_lent, max(num - self._num_passed, 0))
            self._num_passed = min(self._num_passed, num)

    def confirm(self) -> None:
        """What was lent last has arrived, or is not to be sent again."""
        with self._lock:
            for _ in range(self._num_lent):
                self._waiting.popleft()
            self._num_gone += self._num_lent
            self._num_dropped -= self._num_dropped_lent + self._num_passed
            self._num_lent = self._num_dropped_lent = self._num_passed = 0

    def __len__(self) -> int:
        return len(self._waiting)
