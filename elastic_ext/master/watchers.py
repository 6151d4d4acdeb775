"""Watchers: the streams on which nodes are told of configs. A node has one; what is sent on it must be held soon.

There are thousands of them, each of which waits nearly always: what waits is a future that the stream itself awaits,
with no task, coroutine or event of its own.
"""

from __future__ import annotations

import asyncio

__all__ = ["Unacknowledged", "Watcher", "Watchers"]


class Unacknowledged(Exception):
    """A node was sent a config and does not say that it holds it: it may no longer hear."""


class Watcher:
    """One stream. Whoever serves it sends while ``has_news``, and else waits for ``rung``, until it ``is_over``."""

    __slots__ = ("_acknowledge_seconds", "_bell", "_deadline", "_held", "_newest", "_sent", "_timer", "is_over")

    def __init__(self, held_version: int, acknowledge_seconds: float) -> None:
        self.is_over = False
        self._sent = self._held = self._newest = held_version
        self._acknowledge_seconds = acknowledge_seconds
        self._deadline = 0.0
        self._bell: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def has_news(self, newest_version: int) -> bool:
        """Whether a version is to be sent, which counts as sent. Unacknowledged where an earlier one is not held."""
        now = asyncio.get_running_loop().time()
        self._newest = max(self._newest, newest_version)
        if self._sent < self._newest:
            self._sent, self._deadline = self._newest, now + self._acknowledge_seconds
            return True
        if self._is_owed and now >= self._deadline:
            raise Unacknowledged(
                f"version {self._sent} was sent {self._acknowledge_seconds:.0f} seconds ago, and this node has "
                "not said since that it holds it"
            )
        return False

    def rung(self) -> asyncio.Future[None]:
        """To be awaited: done as soon as there may be something to do."""
        loop = asyncio.get_running_loop()
        self._bell = loop.create_future()
        self._stop_timer()
        if self._is_owed:
            self._timer = loop.call_at(self._deadline, self._ring)
        return self._bell

    def tell(self, version: int) -> None:
        """There is a newer version."""
        self._newest = max(self._newest, version)
        self._ring()

    def acknowledge(self, version: int) -> None:
        """The node holds this version."""
        self._held = max(self._held, version)
        if not self._is_owed:
            self._stop_timer()

    def end(self) -> None:
        """The stream is over."""
        self.is_over = True
        self._stop_timer()
        self._ring()

    @property
    def _is_owed(self) -> bool:
        return self._held < self._sent

    def _ring(self) -> None:
        if self._bell is not None and not self._bell.done():
            self._bell.set_result(None)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Watchers:
    """The streams of all nodes."""

    def __init__(self, acknowledge_seconds: float) -> None:
        self._acknowledge_seconds = acknowledge_seconds
        self._by_node: dict[str, Watcher] = {}

    def begin(self, node_id: str, held_version: int) -> Watcher:
        """The node's stream, until ``forget``; an older one of it ends."""
        self.end(node_id)
        mine = self._by_node[node_id] = Watcher(held_version, self._acknowledge_seconds)
        return mine

    def forget(self, node_id: str, watcher: Watcher) -> None:
        """Nobody serves this stream any more."""
        watcher.end()
        if self._by_node.get(node_id) is watcher:
            del self._by_node[node_id]

    def tell(self, version: int) -> None:
        """There is a newer version for all."""
        for each in self._by_node.values():
            each.tell(version)

    def acknowledge(self, node_id: str, version: int) -> None:
        """A node holds this version."""
        watcher = self._by_node.get(node_id)
        if watcher is not None:
            watcher.acknowledge(version)

    def end(self, node_id: str) -> None:
        """A node's stream is over."""
        watcher = self._by_node.get(node_id)
        if watcher is not None:
            watcher.end()

    def end_all(self) -> None:
        """All of them are over."""
        for each in self._by_node.values():
            each.end()
