"""Loops over a map-style dataset, which is asked for samples by index, one epoch after another; a position in the
epoch's order says where a loop stands.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from .batch_plan import BatchPlan
from .order import BatchOrder, EpochPosition, EvenOrder, Order, num_chunks
from .prefetch import IndexedLoop, can_be_recut
from .sampler import ElasticDistributedSampler
from .seeding import SeededDataset, SeededOrder
from .workers.producer import BatchProducer

__all__ = ["BatchLoop", "Epochs", "IndexedEpochs"]

_logger = logging.getLogger(__name__)


# --- the loops over a dataset, one after another: what a loader asks of them, with or without indices ----------------
# A map-style dataset is in IndexedEpochs, one that gives its samples itself in iterable.py.


class BatchLoop(Protocol):
    """A loop over a dataset: an iterator over its batches, which counts those that are consumed."""

    @property
    def has_ended(self) -> bool:
        """Whether the loop has ended: nobody takes batches from it any more."""

    @property
    def num_handed(self) -> int:
        """How many batches were handed out that are not consumed."""

    @property
    def carried(self) -> tuple[int, ...] | None:
        """The sizes, by rank, of the first batch not consumed, if steps were cut otherwise since it was handed out."""

    def __len__(self) -> int:
        """How many batches the loop hands out in all, as far as that is known."""

    def __next__(self) -> Any: ...

    def plan(self, plan: BatchPlan, rank: int) -> None:
        """Cut steps by ``plan`` from now on, beginning after the last consumed sample."""

    def commit(self, num_batches: int | None = None) -> None:
        """Take the first ``num_batches`` that were handed out, or all, as consumed."""

    def rollback(self) -> None:
        """Hand out again the batches that are not consumed."""

    def end(self) -> None:
        """End the loop: no more batches are asked for."""


class Epochs(Protocol):
    """The loops over one dataset, in turn: each goes on from a loaded state, or goes through the next epoch."""

    fetches_lists: bool
    """Whether a worker's task is a list of indices that torch's worker loop collates; else one index or request."""

    @property
    def worker_dataset(self) -> Any:
        """What workers ask for samples, instead of the dataset itself."""

    @property
    def collate_fn(self) -> Callable[[Any], Any]:
        """Makes a batch of the samples that ``worker_dataset`` gives."""

    @property
    def fixes_num_workers(self) -> bool:
        """Whether the number of workers cannot change during a loop."""

    @property
    def has_own_positions(self) -> bool:
        """Whether each rank has to go on from a state of its own."""

    @property
    def why_no_position(self) -> str | None:
        """Why a later loop cannot go on where this one is; None if it can."""

    @property
    def last_loop(self) -> BatchLoop | None:
        """The loop that was begun last."""

    @property
    def remaining(self) -> int | None:
        """Samples of the epoch, over all ranks, that no commit has passed; None where that is not known."""

    @property
    def is_at_end(self) -> bool:
        """Whether the loop under way, or the last one, has no samples left, as far as it has seen."""

    @property
    def num_workers(self) -> int | None:
        """The number of workers that the next loop needs to go on; None where any will do."""

    @property
    def num_ranks(self) -> int:
        """Among how many ranks the samples are shared out, as far as that is known."""

    @property
    def goes_on(self) -> bool:
        """Whether the next loop goes on with an epoch that was under way."""

    def collate_with(self, collate_fn: Callable[[Any], Any]) -> None:
        """Have the workers of later loops make batches with this function."""

    def draw_shuffle_seed(self) -> None:
        """Draw the seed that shuffles the next loop's IterDataPipe, as torch does before it draws the workers' seed."""

    def begin(self, producer: BatchProducer) -> BatchLoop:
        """Begin the next loop, whose batches ``producer`` makes."""

    def num_batches(self) -> int:
        """How many batches this rank has in the loop under way, or between two loops in the next one."""

    def why_not_resize(self, batch_size: int) -> str | None:
        """Why batches cannot have ``batch_size`` samples where no trainer plans them; None if they can."""

    def resize(self, batch_size: int) -> None:
        """Have batches of ``batch_size`` samples, where no trainer plans them."""

    def plan(self, plan: BatchPlan, rank: int) -> None:
        """Cut steps by ``plan`` from the last commit on."""

    def leave_epoch(self) -> None:
        """Give up the rest of the last loop's epoch, if that loop has ended and has consumed a part of it."""

    def set_epoch(self, epoch: int) -> None:
        """Have the next loop go through this epoch; a loop under way goes on where it stands.

        The next loop goes on from a loaded position in this epoch; one in another epoch is dropped.
        """

    @property
    def seed(self) -> int | None:
        """The seed of the order, where the order is to be the same on all ranks."""

    @property
    def draws_order(self) -> bool:
        """Whether the order may depend on more than the seed and the epoch."""

    def take_seed(self, seed: int) -> None:
        """Draw later orders from this seed."""

    def order_to_come(self) -> Mapping[str, Any] | None:
        """The order of the loop under way, or of the next one, as plain values that ranks compare.

        Called between two loops, it moves on to the next loop's epoch and draws that one's order.
        """

    def state_dict(self) -> dict[str, Any]:
        """The position of the epoch, as a state for a checkpoint."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next loop go on from a state."""

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Have the loop under way, or the next one, go on from a state."""


# --- the loops over a dataset that is asked for samples by index -----------------------------------------------------
# Where one stands is a position in an order.


class IndexedEpochs:
    """The epochs of a map-style dataset, in a sampler's order: one of samples, or of whole batches of samples."""

    num_workers = None
    fixes_num_workers = False
    why_no_position = None

    def __init__(
        self,
        dataset: Any,
        sampler: ElasticDistributedSampler,
        *,
        batch_size: int | None,
        drop_last: bool,
        is_of_batches: bool,
        collate_fn: Callable[[Any], Any],
        seeds_samples: bool,
        in_order: bool = True,
    ) -> None:
        self.worker_dataset = SeededDataset(dataset) if seeds_samples else dataset
        self.collate_fn = collate_fn
        self.fetches_lists = is_of_batches or batch_size is not None
        self.last_loop: IndexedLoop | None = None
        self._sampler = sampler
        self._batch_size = batch_size or 1
        self._drop_last = drop_last
        self._is_of_batches = is_of_batches
        self.has_own_positions = is_of_batches and sampler.num_replicas == 1  # each rank has batches of its own
        self._seeds_samples = seeds_samples
        self._in_order = in_order
        self._given_plan: BatchPlan | None = None
        self._rank = sampler.rank
        # Whether order_to_come() has drawn the next loop's batches: drawn again, a batch sampler may give others.
        self._is_drawn = False
        self._place = EpochPosition()  # where the loop under way began, or the next one will

    @property
    def epoch(self) -> int:
        return self._sampler.epoch

    @property
    def seed(self) -> int | None:
        """The seed of the order; None where each rank has batches of its own."""
        return None if self._is_of_batches else self._sampler.seed

    @property
    def draws_order(self) -> bool:
        """Whether a sampler gives the order, which may depend on more than seed and epoch."""
        return not self._is_of_batches and self._sampler.sampler is not None

    @property
    def remaining(self) -> int | None:
        if self.last_loop is not None:
            return self.last_loop.remaining
        return self._num_left(self._now, self._sampler.order.num_samples)

    @property
    def is_at_end(self) -> bool:
        return self._now.is_over or self._planned().next_step(self.remaining) is None

    @property
    def num_ranks(self) -> int:
        return self._sampler.num_replicas

    @property
    def goes_on(self) -> bool:
        place = self._to_come()
        return place.position > 0 or bool(place.completed)

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, which has no loop under way: it stands where that loop does."""
        return {**self.__dict__, "last_loop": None, "_place": self._now}

    def collate_with(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn

    def draw_shuffle_seed(self) -> None:
        """Nothing to draw: the order of each epoch comes from one seed."""

    def begin(self, producer: BatchProducer) -> IndexedLoop:
        if self.last_loop is not None and self._given_plan is not None:
            self.last_loop.end()  # a trainer counts what one loop takes
        place, self.last_loop = self._to_come(), None
        self._sampler.set_epoch(place.epoch)
        start = self._start_of(place)
        if start == 0 and not place.completed and not self._is_drawn:
            self._sampler.draw_anew()
        self._is_drawn = False
        self._place = replace(place, position=start)
        self._sampler.begin_elsewhere()  # this loop goes on at its loaded position instead
        self.last_loop = IndexedLoop(
            self._order(self._place),
            start,
            producer,
            self._planned(),
            self._rank,
            can_recut=can_be_recut(self.collate_fn),
            completed=place.completed,
            as_they_come=not self._in_order and self._given_plan is None and self.num_ranks == 1,
        )
        self._warn_of_samples_left_out(self.last_loop.remaining or 0)
        return self.last_loop

    def num_batches(self) -> int:
        if self.last_loop is not None and self._is_under_way:
            return len(self.last_loop)
        place = self._to_come()
        place = replace(place, position=self._start_of(place))
        goes_on = place.position or place.completed
        num_samples = self._sampler.order.num_samples if goes_on else self._sampler.told_length
        return num_chunks(self._planned(), self._rank, self._num_left(place, num_samples))

    def why_not_resize(self, batch_size: int) -> str | None:
        try:
            self._planned(batch_size)
        except ValueError as error:
            return str(error)
        return None

    def resize(self, batch_size: int) -> None:
        self._batch_size = batch_size
        if self.last_loop is not None and self._given_plan is None:
            self.last_loop.plan(self._planned(), self._rank)

    def plan(self, plan: BatchPlan, rank: int) -> None:
        self._given_plan, self._rank = plan, rank
        if self.last_loop is not None:
            self.last_loop.keep_order()
            self.last_loop.plan(plan, rank)

    def leave_epoch(self) -> None:
        if self.last_loop is not None and self.last_loop.has_ended and self._now.starts_next_epoch:
            self._place, self.last_loop = replace(self._now, is_over=True), None

    def set_epoch(self, epoch: int) -> None:
        if self._is_under_way:
            self._place = replace(self._place, next_epoch=epoch)
            return
        self._place, self.last_loop = self._now.at(epoch), None
        self._sampler.set_epoch(epoch)

    def take_seed(self, seed: int) -> None:
        self._sampler.reseed(seed)

    def order_to_come(self) -> dict[str, Any]:
        if self.last_loop is not None and self._is_under_way:
            return self.last_loop.order.state_dict()
        self._place, self.last_loop = self._to_come(), None
        self._sampler.set_epoch(self._place.epoch)
        if self._is_of_batches and self._start_of(self._place) == 0:
            self._sampler.draw_anew()
            self._is_drawn = True
        return self._sampler.order.state_dict()

    def state_dict(self) -> dict[str, Any]:
        place = self._now
        order = self._sampler.order if self.last_loop is None else self.last_loop.order
        state = {
            "epoch": place.epoch,
            "position": place.position,
            "is_over": self.is_at_end,
            "order": order.state_dict(),
        }
        return state | {"completed": [list(each) for each in place.completed]} if place.completed else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        missing = sorted({"epoch", "position", "is_over", "order"} - set(state))
        if missing == ["is_over"]:
            raise ValueError(
                "the state has no is_over, and is one of an ElasticDistributedSampler by itself; give it to the "
                "sampler's load_state_dict(), or give the loader what its own state_dict() gave"
            )
        if missing:
            raise ValueError(
                f"the state has no {', '.join(missing)}, and is not one of a loader over a map-style dataset; "
                "give the loader the dataset with which the state was saved"
            )
        is_over, epoch = bool(state["is_over"]), int(state["epoch"])
        if is_over:  # the next epoch may have another length
            self._sampler.reseed(dict(state["order"]).get("seed", self._sampler.seed))
            self._sampler.set_epoch(epoch)
        else:
            self._sampler.load_state_dict({key: value for key, value in state.items() if key != "completed"})
        self.last_loop = None
        if is_over:
            self._place = EpochPosition(epoch=epoch, starts_next_epoch=True, is_over=True)
            return
        completed = tuple((int(start), int(stop)) for start, stop in state.get("completed", ()))
        self._place = EpochPosition(epoch=epoch, position=int(state["position"]), completed=completed)

    def rewind(self, state: Mapping[str, Any]) -> None:
        loop = self.last_loop
        self.load_state_dict(state)
        if loop is not None and not loop.has_ended:
            place = replace(self._place, epoch=self.epoch, starts_next_epoch=False, is_over=False)
            if self._place.is_over:  # the loop stays in that epoch, and has no samples left, wherever that was left
                place = replace(place, position=self._sampler.order.num_samples)
            self._sampler.begin_elsewhere()  # this loop goes on at the loaded position, and no later one does
            loop.go_to(self._order(place), place.position, place.completed)
            self.last_loop, self._place = loop, place

    def _warn_of_samples_left_out(self, num_left: int) -> None:
        """Warn, on one rank, where a loop begins that has samples and no step, since its ranks are too many."""
        plan = self._given_plan
        if plan is None or plan.drop_last or self._rank != 0 or not num_left or plan.next_step(num_left) is not None:
            return
        _logger.warning(
            "the last %d samples of epoch %d are left out: each of %d ranks needs one in every step; to train on them, "
            "go on from the checkpoint with at most %d ranks",
            num_left,
            self.epoch,
            plan.num_ranks,
            num_left,
        )

    @property
    def _is_under_way(self) -> bool:
        """Whether a loop is under way."""
        return self.last_loop is not None and not self.last_loop.has_ended

    @property
    def _now(self) -> EpochPosition:
        """The position of the loop under way, or where the last one left the epoch, or where the next one begins.

        Its ``starts_next_epoch``: without a trainer an epoch is left once a loop over it has begun; with one, once a
        step of it was committed, or where it has no step left.
        """
        place = self._place
        if self.last_loop is None:
            return place if place.epoch == self.epoch else place.at(self.epoch)
        position, completed = self.last_loop.standing
        starts_next_epoch = (
            self._given_plan is None
            or position != place.position
            or self._given_plan.next_step(self.last_loop.remaining) is None
        )
        return replace(place, position=position, completed=completed, starts_next_epoch=starts_next_epoch)

    def _to_come(self) -> EpochPosition:
        """Where the next loop begins; the sampler's own epoch may have been set meanwhile."""
        place = self._now
        return place.at(self.epoch) if place.next_epoch is None and place.epoch != self.epoch else place.to_come()

    def _start_of(self, place: EpochPosition) -> int:
        """The position at which a loop from a place begins, which the sampler's own state may say."""
        return place.position or (self._sampler.goes_on_at if place.epoch == self.epoch else 0)

    def _order(self, place: EpochPosition) -> Order:
        """The order of the epoch, up to the position at which it ends for a loop that begins at ``place``."""
        order: Order = self._sampler.order
        if self._is_of_batches:
            order = BatchOrder(order)
        num_more = self._num_left(place, order.num_samples) - _num_after(place, order.num_samples)
        if num_more:
            order = EvenOrder(order, order.num_samples + num_more)
        return SeededOrder(order, seed=self._sampler.seed, epoch=self.epoch) if self._seeds_samples else order

    def _num_left(self, place: EpochPosition, num_samples: int) -> int:
        """How many samples a loop from a place has, in an epoch of ``num_samples``.

        The sampler's ``drop_last`` leaves out the last ones that are too few for a round among the ranks. Its ``pad``
        fills that round up with samples that come again, but not with a trainer, whose steps may be of any size.
        """
        num_left = _num_after(place, num_samples)
        plan = self._given_plan
        rest = num_left % (sum(self._sampler.share_weights) if plan is None else plan.num_ranks)
        if self._sampler.drop_last:
            return num_left - rest
        if self._sampler.pad and plan is None and rest:
            return num_left - rest + sum(self._sampler.share_weights)
        return num_left

    def _planned(self, batch_size: int | None = None) -> BatchPlan:
        """The plan that a trainer gave, or the one by which a loader by itself cuts its batches."""
        if self._given_plan is not None:
            return self._given_plan
        size = batch_size or self._batch_size
        shares = self._sampler.share_weights
        num_rounds, rest = divmod(size, shares[self._sampler.rank])
        if rest:
            raise ValueError(
                f"batch_size {size} is not a multiple of this rank's share weight {shares[self._sampler.rank]} "
                f"(share_weights {list(shares)}); use k * share_weights[rank] with one k for all ranks"
            )
        return BatchPlan(
            global_batch=num_rounds * sum(shares),
            num_ranks=len(shares),
            micro_batch=num_rounds * max(shares),
            weights=shares,
            drop_last=self._drop_last,
            is_even=False,
        )


def _num_after(place: EpochPosition, num_samples: int) -> int:
    """How many of an epoch's samples are not consumed at a place."""
    return num_samples - place.position - sum(stop - start for start, stop in place.completed)
