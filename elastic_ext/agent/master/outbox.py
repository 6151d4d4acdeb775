"""What an agent has to exchange with its master: events that are not delivered yet, and the node's config. Needs no
grpc.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from elastic_ext.agent.config_writer import ConfigWriter
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.errors import ConfigError
from elastic_ext.records.metrics import JobEvent

__all__ = ["EventOutbox", "HeldConfig", "NewestConfig"]


# --- events that a master is to hear of, kept until it has; as many as there is room for -----------------------------


class EventOutbox:
    """The newest events that no master has confirmed yet, and how many older ones were dropped. Any thread may call."""

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
        """The number of the first event that ``lend`` gave last, among all events ever put, from 1.

        A master that has an event of this number leaves it out.
        """

    def put(self, events: Iterable[JobEvent], *, num_dropped: int = 0) -> None:
        """Add new events; ``num_dropped`` is how many more there were that are not kept."""
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
        """The oldest events, at most ``most``, and how many were dropped; they stay here until ``confirm``."""
        with self._lock:
            found = tuple(self._waiting)[:most]
            self._num_lent, self._num_dropped_lent, self._num_passed = len(found), self._num_dropped, 0
            self.lent_from = self._num_gone + 1
            return found, self._num_dropped

    def lend_less(self, num: int) -> None:
        """Count only the first ``num`` of the events lent last as lent; the others were not sent."""
        with self._lock:
            self._num_lent = min(self._num_lent, max(num - self._num_passed, 0))
            self._num_passed = min(self._num_passed, num)

    def confirm(self) -> None:
        """Remove the events lent last: they have arrived, or are not to be sent again."""
        with self._lock:
            for _ in range(self._num_lent):
                self._waiting.popleft()
            self._num_gone += self._num_lent
            self._num_dropped -= self._num_dropped_lent + self._num_passed
            self._num_lent = self._num_dropped_lent = self._num_passed = 0

    def __len__(self) -> int:
        return len(self._waiting)


# --- a node's config as its master sees it: which one the node holds, and one that is to be taken --------------------

_RETRY_SECONDS = 0.02
_PATIENCE_SECONDS = 2.0
_MASTER = "the master"


@dataclass(frozen=True, kw_only=True, slots=True)
class NewestConfig:
    """The newest config that the node's config file has had; version 0 where there is none."""

    version: int = 0
    digest: str = ""
    text: str = ""


class HeldConfig:
    """A node's config as the threads see it that speak with a master; they never hold up the agent's loop."""

    def __init__(self, writer: ConfigWriter, stop: threading.Event) -> None:
        self._writer = writer
        self._stop = stop
        self._is_in_use = False
        self._last = NewestConfig()

    def begin(self) -> None:
        """Begin to exchange configs: nodes have met, and the config of an earlier job is set aside."""
        self._is_in_use = True

    @property
    def is_in_use(self) -> bool:
        return self._is_in_use

    def now(self) -> NewestConfig:
        """The config that the node's file holds now; version 0 where there is none, or ``begin`` was not called yet."""
        newest = self._writer.newest() if self._is_in_use else None
        if newest is None:
            return NewestConfig()
        last = self._last
        if (last.version, last.text) != newest:
            last = self._last = NewestConfig(version=newest[0], digest=_digest_of(newest[1]), text=newest[1])
        return last

    @property
    def trouble(self) -> str:
        """Why the node does not have the config that it should have, in a sentence; empty where it has."""
        return self._writer.trouble or ""

    def take(self, version: int, text: str) -> bool:
        """Write the master's config into the node's file, with some patience for other writers; whether it is there."""
        if not self._is_in_use:
            return False
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self._writer.take(text, whose=_MASTER, waits=True):
            if self.now().version >= version:
                return True
            if self._writer.trouble is not None or time.monotonic() >= deadline or self._stop.wait(_RETRY_SECONDS):
                return False
        return True


def _digest_of(text: str) -> str:
    try:
        return ElasticConfig.parse(text.encode(errors="surrogatepass")).digest
    except ConfigError:  # the config file's writer keeps none that is refused
        return ""
