"""Watchers: the streams on which nodes are told of configs. A node has one; what is sent on it must be held soon."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Unacknowledged", "Watcher", "Watchers"]


class Unacknowledged(Exception):
    """A node was sent a config and does not say that it holds it: it may no longer hear."""


class Watcher:
    """One stream."""

    def __init__(self, held_version: int, acknowledge_seconds: float) -> None:
        self._sent_version = self._held_version = held_version
        self._acknowledge_seconds = acknowledge_seconds
        self._newest_version = held_version
        self._bell = asyncio.Event()
        self._is_over = False

    async def wants(self, newest_version: int) -> bool:
        """Wait until there is something to be sent; False where the stream is over. Unacknowledged."""
        self._newest_version = max(self._newest_version, newest_version)
        while not self._is_over and self._sent_version >= self._newest_version:
            await self._rung()
        self._sent_version = self._newest_version
        return not self._is_over

    def tell(self, version: int) -> None:
        """There is a newer version."""
        self._newest_version = max(self._newest_version, version)
        self._bell.set()

    def acknowledge(self, version: int) -> None:
        """The node holds this version."""
        if self._held_version < self._sent_version:
            self._bell.set()
        self._held_version = max(self._held_version, version)

    def end(self) -> None:
        """The stream is over."""
        self._is_over = True
        self._bell.set()

    async def _rung(self) -> None:
        seconds = self._acknowledge_seconds if self._held_version < self._sent_version else None
        try:
            await asyncio.wait_for(self._bell.wait(), seconds)
        except asyncio.TimeoutError:
            raise Unacknowledged(
                f"version {self._sent_version} was sent {seconds:.0f} seconds ago, and this node has not said since "
                "that it holds it"
            ) from None
        self._bell.clear()


class Watchers:
    """The streams of all nodes."""

    def __init__(self, acknowledge_seconds: float) -> None:
        self._acknowledge_seconds = acknowledge_seconds
        self._by_node: dict[str, Watcher] = {}

    @contextmanager
    def watching(self, node_id: str, held_version: int) -> Iterator[Watcher]:
        """The node's stream while it lasts; an older one of it ends."""
        self.end(node_id)
        mine = self._by_node[node_id] = Watcher(held_version, self._acknowledge_seconds)
        try:
            yield mine
        finally:
            if self._by_node.get(node_id) is mine:
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
