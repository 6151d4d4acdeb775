"""Worlds whose members change while processes live: their default groups, formed one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

__all__ = ["Former", "Workers", "agents_store"]

Workers = tuple[int, ...]
"""The numbers of workers in the order of their ranks."""


@contextmanager
def agents_store() -> Iterator[int]:
    """The port of a store that is in no worker, as an agent's is."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    yield store.port
    del store


class Former:
    """Forms the default process group of one world after another, as whoever changes the members does.

    ``port`` is that of ``agents_store``.
    """

    def __init__(self, own: int, port: int) -> None:
        self._own = own
        self._store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]

    def of(self, generation: int, workers: Workers) -> Callable[[], None]:
        """What ends the present group and forms that of ``workers``; one that is not among them is left alone."""

        def form() -> None:
            if dist.is_initialized():
                dist.destroy_process_group()
            if self._own in workers:
                store = dist.PrefixStore(f"generation/{generation}", self._store)  # type: ignore[attr-defined]
                rank = workers.index(self._own)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=len(workers))

        return form
