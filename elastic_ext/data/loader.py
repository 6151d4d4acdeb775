"""ElasticDataLoader: torch's DataLoader, whose batch size, workers, prefetching and pinning change between two batches.

    loader = ElasticDataLoader(dataset, batch_size=32, shuffle=True, num_workers=4)
    trainer = ElasticTrainer(model, loader, global_batch_size=256)      # which tells it sizes and ranks

Where an epoch stands is one position in an order that no number of ranks, workers or samples per batch changes.
"""

from __future__ import annotations

import multiprocessing
import warnings
import weakref
from collections.abc import Iterator, Mapping
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from elastic_ext.accumulate import BatchPlan
from elastic_ext.config import ElasticConfig

from .ahead import Ahead
from .cursor import Cursor, num_chunks
from .internals import pinned
from .making import Making
from .pool import Work
from .sampler import ElasticDistributedSampler

__all__ = ["ElasticDataLoader"]

_PREFETCH = 2  # as torch has it


class ElasticDataLoader(DataLoader[Any]):
    """Batches of a dataset with samples that are asked for by index; arguments as torch's DataLoader has them.

    ``shuffle`` draws an order from ``seed``, by default that of ``generator``, and the epoch's number: the same on all
    ranks. A ``sampler`` draws it otherwise; it has to give the same order wherever it is asked, for which its
    ``generator`` is seeded so. Each loop over the loader is another epoch, unless ``set_epoch`` names one.

    By itself it gives all samples, or those of an ElasticDistributedSampler's rank; with a trainer those of the
    trainer's rank.
    """

    section = "dataloader"

    def __init__(self, dataset: Any, batch_size: int | None = 1, *args: Any, seed: int | None = None, **kwargs: Any):
        if isinstance(dataset, IterableDataset):
            raise NotImplementedError(
                "an IterableDataset has no samples to ask for by index; load it with torch's DataLoader"
            )
        super().__init__(dataset, batch_size, *args, **kwargs)
        given = dict(zip(("shuffle", "sampler", "batch_sampler"), args, strict=False)) | kwargs
        if given.get("batch_sampler") is not None:
            raise NotImplementedError(
                "a batch_sampler makes batches of its own sizes; give a sampler and a batch_size, or use torch's "
                "DataLoader"
            )
        if seed is None:
            seed = 0 if self.generator is None else self.generator.initial_seed()
        sampler = given.get("sampler")
        if isinstance(sampler, ElasticDistributedSampler):
            self._order = sampler
        elif sampler is not None:
            self._order = ElasticDistributedSampler(None, 1, 0, sampler=sampler, seed=seed)
        else:
            self._order = ElasticDistributedSampler(dataset, 1, 0, shuffle=bool(given.get("shuffle")), seed=seed)
        self._plan: BatchPlan | None = None
        self._rank = self._order.rank
        self._ahead: Ahead | None = None
        self._making: Making | None = None  # that is kept from epoch to epoch
        self._makings: weakref.WeakSet[Making] = weakref.WeakSet()
        self._position = 0  # that the next loop begins at
        self._is_begun = False  # a loop over this epoch; the next one is over another

    # ---- a loop ----

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._is_begun:
            self.set_epoch(self._order.epoch + 1)
        self._is_begun = True
        self._warn_of_pinning()
        making = self._making if self._making is not None else self._new_making()
        if self.persistent_workers:
            self._making = making
        order = self._order.order
        cursor = Cursor(order.num_samples, position=self._position)
        can_recut = self.collate_fn is default_collate
        self._ahead = Ahead(order, cursor, making, self._planned(), self._rank, can_recut=can_recut)
        self._position = 0
        return _Loop(self, self._ahead, None if self.persistent_workers else making)

    def __len__(self) -> int:
        """How many batches the loop that comes has on this rank."""
        return num_chunks(self._planned(), self._order.order.num_samples - self._position)

    def __getstate__(self) -> dict[str, Any]:
        """All but the loops that are under way and their workers, which a copy has none of."""
        return {**self.__dict__, "_ahead": None, "_making": None, "_makings": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _makings=weakref.WeakSet())

    def set_epoch(self, epoch: int) -> None:
        """Name the epoch that the next loop is over; one that is under way, or was loaded, goes on where it stands."""
        if epoch != self._order.epoch:
            self._position = 0
        self._order.set_epoch(epoch)
        self._is_begun = False

    @property
    def is_alone(self) -> bool:
        """Whether nobody tells it what is consumed."""
        return self._plan is None

    # ---- as a trainer sees it ----

    @property
    def remaining(self) -> int | None:
        """Samples of the epoch, over all ranks, that no commit has passed."""
        return self._cursor.remaining

    def plan(self, plan: BatchPlan, rank: int) -> None:
        """Cut steps like this from the last commit on."""
        if self.batch_size is None:
            raise ValueError("batch_size is None, which makes no batches; give a number for a trainer to change")
        self._plan, self._rank = plan, rank
        if self._ahead is not None:
            self._ahead.plan(plan, rank)

    def commit(self) -> None:
        """What was handed out is consumed."""
        if self._ahead is not None:
            self._ahead.commit()

    def rollback(self) -> None:
        """Hand out again what was handed out since the last commit, in the loop that is under way."""
        if self._ahead is not None:
            self._ahead.rollback()

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands: what is not consumed comes from there, whatever the ranks, sizes and workers."""
        return {
            "epoch": self._order.epoch,
            "position": self._cursor.passed,
            "is_over": self._planned().next_step(self._cursor.remaining) is None,
            "order": self._order.order.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there with the loop that comes; ValueError where this loader's order is another."""
        self._order.load_state_dict(state)
        self._ahead = None
        self._is_begun = bool(state["is_over"])
        self._position = 0 if self._is_begun else int(state["position"])

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Go on from there in the loop that is under way, or in the one that comes. Called between two steps."""
        ahead = self._ahead
        self.load_state_dict(state)
        if ahead is not None:
            order = self._order.order
            ahead.go_to(order, Cursor(order.num_samples, position=int(state["position"])))
            self._ahead, self._position, self._is_begun = ahead, 0, True

    def check(self, new: ElasticConfig) -> str | None:
        """Why the workers and their like cannot change so."""
        if self.persistent_workers and new.dataloader.num_workers == 0:
            return "num_workers is 0, and persistent_workers keeps some; leave one, or make the loader without it"
        return None

    def apply(self, old: ElasticConfig, new: ElasticConfig) -> None:
        """Have as many workers, and so on; more workers are started beside training."""
        wanted = new.dataloader
        if wanted.num_workers is not None:
            self.num_workers = wanted.num_workers
        if wanted.prefetch_factor is not None or (self.num_workers and self.prefetch_factor is None):
            self.prefetch_factor = wanted.prefetch_factor or _PREFETCH
        if wanted.pin_memory is not None:
            self.pin_memory = wanted.pin_memory
        for making in self._makings:
            making.prefetch_factor = self.prefetch_factor or _PREFETCH
            making.resize(self.num_workers)

    # ---- ----

    @property
    def _cursor(self) -> Cursor:
        """Of the loop under way, or of the last one, or of the one that comes where there was none."""
        if self._ahead is not None:
            return self._ahead.cursor
        return Cursor(self._order.order.num_samples, position=self._position)

    def _planned(self) -> BatchPlan:
        """The trainer's plan, or that of a loader by itself."""
        if self._plan is not None:
            return self._plan
        size, num_ranks = self.batch_size or 1, self._order.num_replicas
        return BatchPlan(global_batch=size * num_ranks, num_ranks=num_ranks, micro_batch=size, drop_last=self.drop_last)

    def _new_making(self) -> Making:
        context: Any = self.multiprocessing_context
        if context is None:
            context = torch.multiprocessing.get_context()
        elif not isinstance(context, BaseContext):
            context = multiprocessing.get_context(context)
        making = Making(
            Work(
                dataset=self.dataset,
                collate_fn=self.collate_fn,
                base_seed=self._draw_seed(),
                auto_collation=self.batch_size is not None,
                worker_init_fn=self.worker_init_fn,
            ),
            context=context,
            timeout_seconds=self.timeout,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor or _PREFETCH,
        )
        self._makings.add(making)
        return making

    def _warn_of_pinning(self) -> None:
        """Of what torch warns of, in words that begin as its do."""
        if self.pin_memory and self.pin_memory_device:
            warnings.warn(
                "pin_memory_device is deprecated, the current accelerator will be used as the device; leave it out",
                stacklevel=3,
            )
        if self.pin_memory and not torch.accelerator.is_available():
            warnings.warn(
                "'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be "
                "used; leave it out, or set it where there is one",
                stacklevel=3,
            )

    def _draw_seed(self) -> int:
        """What workers are seeded from, drawn with or without any: those that come later change no random number."""
        generator = self.generator
        if generator is None and self._position > 0:  # an epoch that goes on has had it drawn
            generator = torch.Generator()
            generator.set_state(torch.get_rng_state())
        return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


class _Loop:
    """One loop over a loader; with it end the workers that are its own."""

    def __init__(self, loader: ElasticDataLoader, ahead: Ahead, making: Making | None) -> None:
        self._loader = loader
        self._ahead = ahead
        self._making = making
        self._start = ahead.cursor.passed

    def __len__(self) -> int:
        """How many batches it has from its beginning on, as they are cut now."""
        return num_chunks(self._loader._planned(), (self._ahead.cursor.num_samples or 0) - self._start)

    def __iter__(self) -> _Loop:
        return self

    def __next__(self) -> Any:
        loader, ahead = self._loader, self._ahead
        try:
            batch = next(ahead)
        except StopIteration:
            self.close()
            raise
        finally:
            if loader.is_alone:  # what a loop is given is consumed, also where it cannot be made
                ahead.commit()
        return pinned(batch, loader.pin_memory_device) if loader.pin_memory else batch

    def close(self) -> None:
        if self._making is not None:
            self._making.close()  # first: whoever has died by the same Ctrl-C is not to be replaced
        self._ahead.close()

    def __del__(self) -> None:
        self.close()
