"""Pinning: copies batches to page-locked memory, from which an accelerator reads them while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

__all__ = ["Pinning"]


class Pinning:
    """Pins batches while ``pin`` is there: those of workers on a thread of its own, as soon as they have come."""

    def __init__(self, pin: Callable[[Any], Any] | None = None) -> None:
        self.pin = pin
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, batch: Any) -> Future[Any] | Any:
        """The batch itself, or what will be the pinned one."""
        if self.pin is None:
            return batch
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="elastic_ext pinning")
        return self._thread.submit(self.pin, batch)

    def done(self, batch: Any) -> Any:
        """The pinned batch, now."""
        return batch if self.pin is None else self.pin(batch)

    def close(self) -> None:
        """End the thread; twice is allowed."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None
