"""Batches of a dataset made by a pool of workers or in this process, and copied to page-locked memory where that is
asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.context import BaseContext
from typing import Any

from .pool import Pool
from .worker import name_samples
from .worker_process import TrackedIndices, WorkerSpec

__all__ = ["BatchProducer", "Pinning"]


# --- copies batches to page-locked memory, from which an accelerator reads them while training goes on ---------------


class Pinning:
    """Pins batches while ``pin`` is set: those of workers on a thread of its own, as soon as they have come."""

    def __init__(self, pin: Callable[[Any], Any] | None = None) -> None:
        self.pin = pin
        self._thread: ThreadPoolExecutor | None = None

    def pin_later(self, batch: Any) -> Future[Any] | Any:
        """The batch itself, or a future of the batch as the pinning thread pins it."""
        if self.pin is None:
            return batch
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="elastic_ext pinning")
        return self._thread.submit(self.pin, batch)

    def pin_now(self, batch: Any) -> Any:
        """Pin the batch in the calling thread while ``pin`` is set, and give it."""
        return batch if self.pin is None else self.pin(batch)

    def close(self) -> None:
        """End the pinning thread. Closing twice is allowed."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None


# --- batches of a dataset, made by a pool of workers or in this process, and as many ahead as is asked for -----------


class BatchProducer:
    """Makes a loader's batches: by workers, which come and go in the background, or in this process without any."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        context: BaseContext,
        timeout_seconds: float,
        num_workers: int,
        prefetch_factor: int,
        pin: Callable[[Any], Any] | None = None,
        round_robin: bool = True,
    ) -> None:
        self._spec = spec
        self._context = context
        self._timeout_seconds = timeout_seconds
        self._round_robin = round_robin
        self._pinning = Pinning(pin)
        self._num_workers = 0
        self._is_closed = False
        self._prefetch_factor = prefetch_factor
        self._pool: Pool | None = None
        self._fills_in = False  # this process makes batches until the first worker is ready
        self._own: dict[int, list[Any]] = {}  # what this process is to make, when it is taken
        self._making_lock = threading.Lock()  # held while this process makes a batch: nobody forks it meanwhile
        self._number = 0
        self._last_gone = 0  # the highest number that was taken or forgotten
        self._last_before = 0  # the last number asked for before workers or prefetching changed
        if num_workers:
            self._have(num_workers, is_first=True)

    @property
    def num_ahead(self) -> int:
        """How many batches to ask for before the first of them is taken."""
        return 0 if self._makes_here() else self._num_workers * self.prefetch_factor

    @property
    def pin(self) -> Callable[[Any], Any] | None:
        """The function that pins each batch before it is taken; None where batches are not pinned."""
        return self._pinning.pin

    @pin.setter
    def pin(self, pin: Callable[[Any], Any] | None) -> None:
        self._pinning.pin = pin

    @property
    def num_workers(self) -> int:
        """How many workers are wanted."""
        return self._num_workers

    @property
    def prefetch_factor(self) -> int:
        """How many batches to ask for ahead, for each worker."""
        return self._prefetch_factor

    @prefetch_factor.setter
    def prefetch_factor(self, prefetch_factor: int) -> None:
        if prefetch_factor != self._prefetch_factor:
            self._prefetch_factor = prefetch_factor
            self._last_before = self._number

    @property
    def is_settled(self) -> bool:
        """Whether all wanted workers are ready, and make all coming batches; none is left of those asked for before.

        Earlier workers, where there were more, may have made many ahead, which come faster than new ones are made.
        """
        if self._last_gone < self._last_before:
            return False
        if self._pool is None or self._is_closed or self._num_workers == 0:
            return True
        return not self._own and self._pool.num_ready >= self._num_workers

    def resize(self, num_workers: int) -> None:
        """Want this many workers, and come back at once; nothing happens once it is closed."""
        if num_workers == self._num_workers or self._is_closed:
            return
        self._fills_in = self._num_workers == 0
        self._last_before = self._number
        self._have(num_workers)

    def submit(self, indices: list[Any], slot: int | None = None, *, batch_index: int | None = None) -> int:
        """Have a batch of these indices made, by the worker of ``slot`` if given; gives its number.

        It is the batch number ``batch_index`` of the loop, by which workers take turns.
        """
        self._number += 1
        if self._makes_here():
            self._own[self._number] = indices
        else:
            assert self._pool is not None
            self._pool.submit(self._number, indices if self._spec.auto_collation else indices[0], slot, batch_index)
        return self._number

    def take(self, number: int) -> Any:
        """The batch of that number, once it is made; raises what making it raised."""
        self._last_gone = max(self._last_gone, number)
        indices = self._own.get(number)
        if indices is not None:
            try:
                with self._making_lock:
                    batch = self._pinning.pin_now(self._made(indices))
            except KeyboardInterrupt:  # it is asked for again then
                raise
            except BaseException:  # a dataset's SystemExit too
                del self._own[number]
                raise
            del self._own[number]
            return batch
        assert self._pool is not None
        return self._pool.take(number)

    def first_made(self, numbers: Sequence[int]) -> int:
        """Which of these numbers' batches has come first, once one has; none of them was taken."""
        elsewhere = [number for number in numbers if number not in self._own]
        if self._pool is None or not elsewhere:  # this process makes one when it is taken
            return numbers[0]
        return self._pool.first_made(elsewhere)

    def forget(self, number: int) -> None:
        """Drop the batch of this number: nobody will take it."""
        self._last_gone = max(self._last_gone, number)
        if self._own.pop(number, None) is None:
            assert self._pool is not None
            self._pool.forget(number)

    def close(self) -> None:
        """End all workers. Closing twice is allowed; ``forget`` may be called as before."""
        self._is_closed = True
        if self._pool is not None:
            self._pool.close()
        self._pinning.close()

    def _makes_here(self) -> bool:
        """Whether this process makes the batches that are asked for now."""
        if self._pool is None:
            return True
        if self._fills_in or (self._num_workers == 0 and not self._is_closed):
            num_ready = self._pool.num_ready  # where none are wanted, too: then the pool retires those that come late
            self._fills_in = self._num_workers > 0 and num_ready == 0
        return self._num_workers == 0 or self._fills_in

    def _have(self, num_workers: int, *, is_first: bool = False) -> None:
        self._num_workers = num_workers
        if self._pool is None:
            self._pool = Pool(
                self._spec,
                context=self._context,
                timeout_seconds=self._timeout_seconds,
                finish=self._pinning.pin_later,
                fork_lock=self._making_lock,
                round_robin=self._round_robin,
            )
        self._pool.resize(num_workers, is_first=is_first)

    def _made(self, indices: list[Any]) -> Any:
        spec = self._spec
        dataset = spec.dataset
        tracked = TrackedIndices(indices)
        try:
            if not spec.auto_collation:
                return spec.collate_fn(dataset[indices[0]])
            at_once = getattr(dataset, "__getitems__", None)
            return spec.collate_fn(at_once(indices) if at_once else [dataset[index] for index in tracked])
        except Exception as error:
            name_samples(error, tracked.at, indices)
            raise
