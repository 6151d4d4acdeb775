"""ElasticDataLoader: torch's DataLoader, whose batch size, workers, prefetching and pinning change between two batches.

    loader = ElasticDataLoader(dataset, batch_size=32, shuffle=True, num_workers=4)
    trainer = ElasticTrainer(model, loader, global_batch_size=256)      # which tells it sizes and ranks

Where an epoch stands is one position in an order that no number of ranks, workers or samples per batch changes.

How the arguments of a loader choose its loops, what settings are refused, and how a loader without a trainer follows a
config file, is here too.
"""

from __future__ import annotations

import logging
import multiprocessing
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler
from typing_extensions import TypeVar

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.keys import DataloaderSection
from elastic_ext.config.watcher import ConfigWatcher
from elastic_ext.profile.phases import Phase, Timeline
from elastic_ext.records.text import check_flag
from elastic_ext.torch_private.loading import pinned

from .batch_plan import BatchPlan
from .indexed import BatchLoop, Epochs, IndexedEpochs
from .iterable import StreamedEpochs
from .sampler import BatchSamplerAdapter, DistributedSamplerAdapter, ElasticDistributedSampler
from .workers.producer import BatchProducer
from .workers.worker_process import WorkerSpec

__all__ = ["ElasticDataLoader", "LoaderConfigFollower", "Ordering", "epochs_of", "fixed_settings", "why_not_change"]

_logger = logging.getLogger(__name__)


# --- the loops over a dataset, chosen by the arguments of its loader; which arguments are refused --------------------


@dataclass(frozen=True, slots=True)
class Ordering:
    """The arguments by which a loader orders samples."""

    sampler: Any
    batches: Iterable[Any] | None
    """A batch sampler that decides itself how many samples a batch has; None without one."""
    shuffle: bool
    seed: int | None


def epochs_of(loader: DataLoader[Any], ordering: Ordering, *, seeds_samples: bool, fast_forward: bool) -> Epochs:
    """The loops over a loader's dataset; ValueError where there can be none."""
    if isinstance(loader.dataset, IterableDataset):
        return _streamed(loader, ordering, seeds_samples, fast_forward)
    return _indexed(loader, ordering, seeds_samples, fast_forward)


def _streamed(loader: DataLoader[Any], ordering: Ordering, seeds_samples: bool, fast_forward: bool) -> StreamedEpochs:
    if seeds_samples:
        raise ValueError(
            "seed_samples=True needs samples with an index, and those of an IterableDataset have none; leave "
            "seed_samples out, or give a map-style dataset"
        )
    return StreamedEpochs(
        loader.dataset,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        collate_fn=loader.collate_fn,
        fast_forward=fast_forward,
        in_order=loader.in_order,
        seed=ordering.seed,
        generator=loader.generator,
    )


def _indexed(loader: DataLoader[Any], ordering: Ordering, seeds_samples: bool, fast_forward: bool) -> IndexedEpochs:
    if fast_forward:
        raise ValueError(
            "fast_forward is for an IterableDataset; a loader over a map-style dataset, which is asked for samples by "
            "index, resumes at any sample at once; leave fast_forward out"
        )
    seed = ordering.seed
    if seed is None:
        seed = 0 if loader.generator is None else loader.generator.initial_seed()
    dataset: Any = loader.dataset
    sampler: Any = ordering.sampler if ordering.batches is None else ordering.batches
    if sampler is None:
        sampler = ElasticDistributedSampler(dataset, 1, 0, shuffle=ordering.shuffle, seed=seed)
    elif isinstance(sampler, ElasticDistributedSampler):
        pass
    elif ordering.batches is not None:
        sampler = BatchSamplerAdapter(sampler, dataset, seed)
    elif DistributedSamplerAdapter.can_adapt(sampler):
        sampler = DistributedSamplerAdapter(sampler)
    else:
        sampler = ElasticDistributedSampler(None, 1, 0, sampler=sampler, seed=seed)
    return IndexedEpochs(
        dataset,
        sampler,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        is_of_batches=ordering.batches is not None,
        collate_fn=loader.collate_fn,
        seeds_samples=seeds_samples,
        in_order=loader.in_order,
    )


# --- why the workers and sizes of a loader cannot be as a config wants them ------------------------------------------
# Where they can be, ElasticDataLoader.apply sets them.


def why_not_change(loader: DataLoader[Any], batches: Any, epochs: Epochs, wanted: DataloaderSection) -> str | None:
    """Why a loader's workers and sizes cannot be as ``wanted``; ``batches`` is a batch sampler that decides sizes."""
    if loader.persistent_workers and wanted.num_workers == 0:
        return (
            "num_workers is 0, and the loader was made with persistent_workers=True, which needs at least 1; keep one "
            "worker, or make the loader without persistent_workers"
        )
    changes_workers = wanted.num_workers is not None and wanted.num_workers != loader.num_workers
    if changes_workers and isinstance(loader.dataset, IterableDataset) and hasattr(loader.dataset, "__next__"):
        return (
            "num_workers of an IterableDataset changes from one loop to the next, and this dataset is an iterator, "
            "which gives nothing to a second loop; have the dataset's __iter__ return a new iterator"
        )
    if wanted.batch_size is None:
        return None
    if batches is None:
        if loader.batch_size is None:
            return "batch_size is None, which makes no batches; make the loader with a number"
    elif wanted.batch_size != getattr(batches, "batch_size", None) and not hasattr(batches, "set_batch_size"):
        return (
            "the batch_sampler decides how many samples a batch has; give it a method set_batch_size(batch_size), "
            "or the loader a sampler and a batch_size"
        )
    return epochs.why_not_resize(wanted.batch_size)


def fixed_settings(*, fixes_num_workers: bool, can_pin: bool) -> dict[str, str]:
    """Which settings cannot change while a loop is under way, each with the reason."""
    found = {}
    if fixes_num_workers:
        found["num_workers"] = "workers of an IterableDataset change from one loop to the next, and not within one"
    if not can_pin:
        found["pin_memory"] = "there is no accelerator that batches could be copied to"
    return found


# --- the config file of a loader that is used by itself, without a trainer that would follow one for it --------------


class LoaderConfigFollower:
    """Reads the config file of a loader that has no trainer, and applies it between two batches, until ``close``."""

    def __init__(
        self,
        file: str | Path,
        *,
        check: Callable[[ElasticConfig], str | None],
        apply: Callable[[ElasticConfig, ElasticConfig], None],
        num_ranks: int = 1,
    ) -> None:
        self._watcher = ConfigWatcher(file)
        self._check = check
        self._apply = apply
        self._num_ranks = num_ranks
        self._has_news = True
        self._is_started = False
        self._in_force = ElasticConfig.from_values({})
        self._seen: ElasticConfig | None = None

    def look(self) -> None:
        """Apply what the file says, if that has changed; costs next to nothing where it has not."""
        if not self._has_news:
            return
        if not self._is_started:
            self._is_started = True
            self._watcher.on_news = self._note
            self._watcher.start()
        self._has_news = False
        new = self._watcher.newest
        if new is None or new is self._seen:
            return
        self._seen = new
        reason = _why_not_alone(new, self._num_ranks) or self._check(new)
        if reason is not None:
            _logger.warning("%s of %s was refused: %s", new.label, self._watcher.path, reason)
            return
        self._apply(self._in_force, new)
        self._in_force = new
        _logger.info("%s of %s is in force in this loader", new.label, self._watcher.path)

    def close(self) -> None:
        """Stop following the file. Closing twice is allowed."""
        self._watcher.close()

    def _note(self) -> None:
        self._has_news = True


def _why_not_alone(new: ElasticConfig, num_ranks: int) -> str | None:
    """Why a loader without a trainer cannot apply a config; None if it can."""
    if dist.is_available() and dist.is_initialized():
        num_ranks = max(num_ranks, dist.get_world_size())
    if new.dataloader.batch_size is None or num_ranks == 1:
        return None
    return (
        f"dataloader.batch_size is {new.dataloader.batch_size}, and {num_ranks} ranks have to change their batch size "
        "at the same step; give the loader to an ElasticTrainer, which does that, or leave the key out"
    )


# --- torch's DataLoader, whose batch size, workers, prefetching and pinning change between two batches ---------------

_PREFETCH = 2  # as torch has it
_Sample = TypeVar("_Sample", covariant=True, default=Any)


class ElasticDataLoader(DataLoader[_Sample]):
    """Batches of a dataset; arguments as torch's DataLoader has them, and some more.

    ``shuffle`` draws an order from ``seed``, by default that of ``generator``, else 0, and the epoch's number: the same
    on all ranks; ``torch.manual_seed`` has no part in it. A ``sampler`` draws it otherwise: its ``generator`` is seeded
    from ``seed`` and the epoch, so that all ranks draw the same order; it has to draw from that generator, or from this
    process's random numbers. Each loop over the loader is another epoch, unless ``set_epoch`` names one.

    ``config_file`` is followed by a loader that has no trainer. ``seed_samples`` has the random numbers of a sample
    depend on ``seed``, epoch and index alone. ``fast_forward``: an IterableDataset without
    ``state_dict`` is resumed by drawing and dropping the samples that are consumed already.

    By itself it gives all samples, or those of the rank of an ElasticDistributedSampler or of torch's
    DistributedSampler; with a trainer those of the trainer's rank.
    """

    section = "dataloader"

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[Any] | Iterable[Any] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int | None = None,
        config_file: str | Path | None = None,
        seed_samples: bool = False,
        fast_forward: bool = False,
    ) -> None:
        check_flag("seed_samples", seed_samples)
        check_flag("fast_forward", fast_forward)
        given: dict[str, Any] = {
            "dataset": dataset,
            "batch_size": batch_size,
            "shuffle": shuffle,
            "sampler": sampler,
            "batch_sampler": batch_sampler,
            "num_workers": num_workers,
            "collate_fn": collate_fn,
            "pin_memory": pin_memory,
            "drop_last": drop_last,
            "timeout": timeout,
            "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context,
            "generator": generator,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "pin_memory_device": pin_memory_device,
            "in_order": in_order,
        }
        batches = of_torch = given.get("batch_sampler")
        # torch's own BatchSampler stands for its sampler and its batch size, which can change. Arguments that do not go
        # with a batch sampler are left as they are, for torch to refuse.
        if (
            type(batches) is BatchSampler
            and not isinstance(dataset, IterableDataset)
            and not _has_conflicting_arguments(given)
        ):
            given |= {"batch_size": batches.batch_size, "sampler": batches.sampler, "drop_last": batches.drop_last}
            batches = given["batch_sampler"] = None
        super().__init__(**given)
        if batches is not of_torch:
            self.__dict__["batch_sampler"] = of_torch  # and not one that is like it: its size may be set
        if self.prefetch_factor == 0:
            raise ValueError("prefetch_factor is 0, and workers are given at least one batch; give 1, or leave it out")
        self._batches = batches
        self._started_with = (self.num_workers, self.prefetch_factor, self.pin_memory)
        self._is_alone = True
        order = Ordering(given.get("sampler"), batches, shuffle=bool(given.get("shuffle")), seed=seed)
        self._epochs = epochs_of(self, order, seeds_samples=seed_samples, fast_forward=fast_forward)
        self._producer: BatchProducer | None = None  # the one that is kept from epoch to epoch
        self._kept_for: BatchLoop | None = None  # the last loop that it was used by
        self._kept_collate_fn: Any = None  # with which its workers make batches
        self._finished: BatchLoop | None = None  # the last loop that came to its end
        # A loop that came to its end within a step keeps its workers: after a rollback it hands out batches again.
        self._ending: _Loop | None = None
        self._step_before: _StepBefore | None = None
        self._producers: weakref.WeakSet[BatchProducer] = weakref.WeakSet()
        self._config_follower: LoaderConfigFollower | None = None
        self.timeline: Timeline | None = None
        """The timeline in which the loader notes that a loop waits for a batch."""
        self.on_batch: Callable[[Any], None] | None = None
        """Called with each batch before the loop has it."""
        self.is_in_step: Callable[[], bool] = _never
        """Whether a trainer's micro-step is under way."""
        self.on_loop: Callable[[], None] | None = None
        """Called before a loop begins; raises where none may."""
        if config_file is not None:
            me = weakref.ref(self)
            self._config_follower = LoaderConfigFollower(
                config_file, check=partial(_check, me), apply=partial(_apply, me), num_ranks=self._epochs.num_ranks
            )
            weakref.finalize(self, self._config_follower.close)

    # ---- a loop ----

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.on_loop is not None:
            self.on_loop()
        if self._config_follower is not None:
            self._config_follower.look()
        self._warn_of_pinning()
        self._take_size()
        self._keep_step()
        self._epochs.collate_with(self.collate_fn)  # which may have been set since
        num_workers = self._epochs.num_workers
        self._epochs.draw_shuffle_seed()
        producer = self._producer_for(self.num_workers if num_workers is None else num_workers)
        loop = self._epochs.begin(producer)
        if producer is not self._producer:
            return _Loop(self, loop, producer)
        self._kept_for = loop
        return _Loop(self, loop, None)

    def __len__(self) -> int:
        """How many batches this rank has in the loop under way, or between two loops in the next one."""
        if self._epochs.last_loop is None or self._epochs.last_loop.has_ended:
            self._take_size()
        return self._epochs.num_batches()

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, which has no loops under way, no workers, and follows no file."""
        own = {
            "_producer": None,
            "_kept_for": None,
            "_kept_collate_fn": None,
            "_finished": None,
            "_ending": None,
            "_step_before": None,
            "_producers": None,
            "_config_follower": None,
            "timeline": None,
            "on_batch": None,
            "on_loop": None,
            "is_in_step": _never,
        }
        return {**self.__dict__, **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _producers=weakref.WeakSet())

    def set_epoch(self, epoch: int) -> None:
        """Name the epoch that the next loop goes through; a loop under way goes on where it stands.

        The next loop goes on from a loaded position in this epoch; one in another epoch is dropped.
        """
        self._epochs.set_epoch(epoch)

    @property
    def is_alone(self) -> bool:
        """Whether no trainer tells this loader what is consumed."""
        return self._is_alone

    # ---- as a trainer sees it ----

    @property
    def remaining(self) -> int | None:
        """Samples of the epoch, over all ranks, that no commit has passed; None where that is not known.

        Where a ``batch_sampler`` decides how many samples a batch has, batches are counted instead.
        """
        return self._epochs.remaining

    @property
    def is_at_end(self) -> bool:
        """Whether the loop under way, or the last one, has no samples left, as far as it has seen."""
        return self._epochs.is_at_end

    @property
    def num_handed(self) -> int:
        """Batches that were handed out and that no commit has taken as consumed."""
        loop, before = self._epochs.last_loop, self._step_before
        return (0 if loop is None else loop.num_handed) + (0 if before is None else before.num_handed)

    @property
    def carried(self) -> tuple[int, ...] | None:
        """The sizes, by rank, of the first batch not consumed, if steps were cut otherwise since it was handed out."""
        loop = self._epochs.last_loop
        return None if loop is None else loop.carried

    @property
    def has_own_positions(self) -> bool:
        """Whether each rank has to go on from a state of its own."""
        return self._epochs.has_own_positions

    @property
    def why_no_position(self) -> str | None:
        """Why another loader cannot go on from where this one is; None if it can."""
        return self._epochs.why_no_position

    @property
    def seed(self) -> int | None:
        """The seed of the order, where the order is to be the same on all ranks."""
        return self._epochs.seed

    @property
    def draws_order(self) -> bool:
        """Whether a sampler gives the order, which may give each rank another one."""
        return self._epochs.draws_order

    @property
    def draws_batches(self) -> bool:
        """Whether a batch sampler says which batches this rank has, and those of other ranks are not known here."""
        return self._batches is not None and self._epochs.has_own_positions

    def take_seed(self, seed: int) -> None:
        """Draw later orders from this seed; workers are seeded as before."""
        self._epochs.take_seed(seed)

    def order_to_come(self) -> Mapping[str, Any] | None:
        """The order of the loop under way, or of the next one, as plain values that ranks compare.

        Called between two loops, it moves on to the next loop's epoch and draws that one's order.
        """
        return self._epochs.order_to_come()

    def plan(self, plan: BatchPlan, rank: int) -> None:
        """Cut steps by ``plan`` from the last commit on."""
        if self.batch_size is None:
            raise ValueError("batch_size is None, which makes no batches; give a number for a trainer to change")
        if self._config_follower is not None:
            raise ValueError(
                "config_file is for a loader without a trainer, and this loader's trainer follows the config file "
                "itself; leave config_file out"
            )
        self._is_alone = False
        self._epochs.plan(plan, rank)

    def take_batch(self, loop: _Loop) -> Any:
        """The next batch of ``loop``, which is one over this loader and calls this; StopIteration at its end."""
        batches, timeline = loop.batches, self.timeline
        if not self.is_alone and self._epochs.last_loop is not batches:
            raise ValueError(
                "only one loop over a trainer's loader runs at a time, and a newer one has begun; for a loop within a "
                "loop make a second loader that no trainer has"
            )
        if self._config_follower is not None:
            self._config_follower.look()
        if timeline is not None and not timeline.is_here:  # a thread that loads ahead: training does not wait for it
            timeline = None
        before = None if timeline is None else timeline.enter(Phase.DATA)
        try:
            batch = next(batches)
        except StopIteration:
            self._finished = batches
            if self.is_in_step():
                self._ending = loop
            else:
                loop.close()
            raise
        finally:
            if timeline is not None and before is not None:
                timeline.enter(before)
            if self.is_alone:  # what is handed out is consumed, also where it cannot be made
                batches.commit()
        if self.on_batch is not None:
            self.on_batch(batch)
        return batch

    def commit(self, num_micro_batches: int | None = None) -> None:
        """Take the first batches that were handed out, or all, as consumed; the others begin the next step."""
        before, loop = self._step_before, self._epochs.last_loop
        if self._ending is not None:
            self._ending.close()
            self._ending = None
        if before is not None:
            self._step_before = None
            if num_micro_batches is not None:
                num_micro_batches = max(num_micro_batches - before.num_handed, 0)
        if loop is not None:
            loop.commit(num_micro_batches)

    def rollback(self) -> None:
        """Hand out again what was handed out since the last commit, in the loop that is under way."""
        self._ending = None
        before, self._step_before = self._step_before, None
        if self._epochs.last_loop is not None:
            self._epochs.last_loop.rollback()
        if before is not None:
            self._epochs.rewind(before.state)

    def leave_epoch(self) -> None:
        """Give up the rest of the last loop's epoch, so that the next epoch comes.

        A loop under way goes on. An epoch of which no step was committed is still to come.
        """
        self._epochs.leave_epoch()

    def state_dict(self) -> dict[str, Any]:
        """The position of the epoch: samples that are not consumed come from there, with any ranks, sizes and workers.

        Over an IterableDataset it is this rank's own, and for as many workers. It is this rank's own, too, with a
        ``batch_sampler`` of its own: it counts batches, which the batch sampler has to give again.
        """
        return self._epochs.state_dict() if self._step_before is None else dict(self._step_before.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next loop go on from a state; ValueError where this loader cannot."""
        self._epochs.load_state_dict(state)

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Have the loop under way, or the next one, go on from a state. Called between two steps."""
        self._epochs.rewind(state)

    @property
    def fixed_settings(self) -> dict[str, str]:
        """The settings of this loader that cannot change during a loop, each with the reason."""
        return fixed_settings(fixes_num_workers=self._epochs.fixes_num_workers, can_pin=_can_pin())

    @property
    def least_workers(self) -> int:
        """The fewest workers that this loader can have."""
        return int(self.persistent_workers)

    @property
    def is_settled(self) -> bool:
        """Whether all wanted workers run, and none of the batches is left that were asked for before these changed."""
        return all(producer.is_settled for producer in self._producers)

    def check(self, new: ElasticConfig) -> str | None:
        """Why this loader's workers and sizes cannot be as in ``new``; None where they can."""
        return why_not_change(self, self._batches, self._epochs, new.dataloader)

    def apply(self, old: ElasticConfig, new: ElasticConfig) -> None:
        """Set workers, prefetching and pinning as in ``new``, and without a trainer the batch size.

        More workers are started in the background.
        """
        wanted = new.dataloader
        workers, prefetch, pins = self._started_with
        self.num_workers = workers if wanted.num_workers is None else wanted.num_workers
        self.prefetch_factor = wanted.prefetch_factor or prefetch or (_PREFETCH if self.num_workers else None)
        self.pin_memory = pins if wanted.pin_memory is None else wanted.pin_memory
        if self.is_alone:
            self._resize(wanted.batch_size)
        for producer in self._producers:
            producer.prefetch_factor = self.prefetch_factor or _PREFETCH
            producer.pin = self._pin()
            if not self._epochs.fixes_num_workers:
                producer.resize(self.num_workers)

    # ---- how it is made ----

    def _keep_step(self) -> None:
        """Keep the step that had the last batches of the loop before, where a loop begins within that step."""
        loop = self._epochs.last_loop
        if loop is None or loop is not self._finished or loop.num_handed == 0 or not self.is_in_step():
            return
        num_handed = self.num_handed
        state = self.state_dict()
        loop.commit()  # so that the loop that begins is over the next epoch
        self._step_before = _StepBefore(state, num_handed)

    def _take_size(self) -> None:
        """Take up a batch size that was set at torch's own batch sampler, as torch's loader does for the next loop."""
        batches = self.batch_sampler
        if type(batches) is not BatchSampler or batches.batch_size == self.batch_size:
            return
        size = batches.batch_size
        if not self.is_alone:
            raise ValueError(
                f"batch_size of the batch_sampler was set to {size}, and a trainer says how many samples a batch has; "
                f"leave it at {self.batch_size}, and change dataloader.batch_size in the config"
            )
        self._epochs.resize(size)
        self.__dict__["batch_size"] = size  # which torch refuses to be set otherwise

    def _resize(self, batch_size: int | None) -> None:
        """Have batches of ``batch_size`` samples, or of as many as this loader was made with."""
        if self._batches is None:
            size = batch_size or self.batch_size
            if size is not None:
                self._epochs.resize(size)
        elif batch_size is not None and hasattr(self._batches, "set_batch_size"):
            self._batches.set_batch_size(batch_size)  # for the loop that comes, which draws its batches

    def _pin(self) -> Callable[[Any], Any] | None:
        return partial(pinned, device=self.pin_memory_device) if self.pin_memory and _can_pin() else None

    def _producer_for(self, num_workers: int) -> BatchProducer:
        """The workers that make the batches of a loop: new ones, or those that are kept from loop to loop."""
        producer, collates_otherwise = self._producer, self._kept_collate_fn != self.collate_fn
        if producer is not None and (self._epochs.fixes_num_workers or collates_otherwise):
            if self.is_alone and self._kept_for is not None and not self._kept_for.has_ended:
                return self._new_producer(num_workers)  # a worker has one stream, and a loop in a loop has others
            if producer.num_workers != num_workers or collates_otherwise:
                producer.close()
                producer = None
        if producer is None:
            producer = self._new_producer(num_workers)
        if self.persistent_workers:
            self._producer, self._kept_collate_fn = producer, self.collate_fn
        return producer

    def _new_producer(self, num_workers: int) -> BatchProducer:
        context: Any = self.multiprocessing_context
        if context is None:
            context = torch.multiprocessing.get_context()
        elif not isinstance(context, BaseContext):
            context = multiprocessing.get_context(context)
        worker_dataset = self._epochs.worker_dataset
        producer = BatchProducer(
            WorkerSpec(
                dataset=worker_dataset,
                collate_fn=self._epochs.collate_fn,
                base_seed=self._draw_base_seed(),
                auto_collation=self._epochs.fetches_lists,
                worker_init_fn=self.worker_init_fn,
                user_dataset=None if worker_dataset is self.dataset else self.dataset,
            ),
            context=context,
            timeout_seconds=self.timeout,
            num_workers=num_workers,
            prefetch_factor=self.prefetch_factor or _PREFETCH,
            pin=self._pin(),
            round_robin=self.in_order,
        )
        self._producers.add(producer)
        return producer

    def _draw_base_seed(self) -> int:
        """Draw the base seed of a loop's workers from ``generator``, or else from torch's random numbers.

        It is drawn for a loop without workers too: some may be added while it goes on.
        """
        generator = self.generator
        if generator is None and self._epochs.goes_on:  # torch's random numbers were drawn from as the epoch began
            generator = torch.Generator()
            generator.set_state(torch.get_rng_state())
        return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())

    def _warn_of_pinning(self) -> None:
        """Warn of unsuitable pinning, as torch does, in words that begin as torch's do."""
        if self.pin_memory and self.pin_memory_device:
            warnings.warn(
                "pin_memory_device is deprecated, the current accelerator will be used as the device; leave it out",
                stacklevel=3,
            )
        if self.pin_memory and not _can_pin():
            warnings.warn(
                "'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be "
                "used; leave pin_memory out on a machine without an accelerator",
                stacklevel=3,
            )


@dataclass(frozen=True, slots=True)
class _StepBefore:
    """A step whose first batches came from a loop that has ended since."""

    state: Mapping[str, Any]
    """The loader's state where the step began."""
    num_handed: int
    """Batches of the step that the loop before had handed out."""


class _Loop:
    """One loop over a loader; as it ends, the workers end that are its own."""

    def __init__(self, loader: ElasticDataLoader, batches: BatchLoop, producer: BatchProducer | None) -> None:
        self.batches = batches
        self._loader = loader
        self._producer = producer

    def __len__(self) -> int:
        """How many batches the loop has from its beginning on, as they are cut now."""
        return len(self.batches)

    def __iter__(self) -> _Loop:
        return self

    def __next__(self) -> Any:
        return self._loader.take_batch(self)

    def close(self) -> None:
        if self._producer is not None:
            self._producer.close()  # first: whoever has died by the same Ctrl-C is not to be replaced
        self.batches.end()

    def __del__(self) -> None:
        self.close()


def _has_conflicting_arguments(given: Mapping[str, Any]) -> bool:
    """Whether arguments were given beside a batch sampler that do not go with one, which torch refuses."""
    return given.get("batch_size", 1) != 1 or any(given.get(name) for name in ("shuffle", "sampler", "drop_last"))


def _never() -> bool:
    return False


def _can_pin() -> bool:
    return torch.accelerator.is_available()


def _check(loader: weakref.ref[ElasticDataLoader], new: ElasticConfig) -> str | None:
    found = loader()
    return None if found is None else found.check(new)


def _apply(loader: weakref.ref[ElasticDataLoader], old: ElasticConfig, new: ElasticConfig) -> None:
    found = loader()
    if found is not None:
        found.apply(old, new)
