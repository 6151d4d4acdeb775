"""Indexed: the loops over a dataset that is asked for samples by index. Where one stands is a position in an order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elastic_ext.accumulate import BatchPlan

from .ahead import Ahead
from .cursor import Cursor, num_chunks
from .making import Making
from .order import BatchOrder, Order
from .recut import can_be_recut
from .sampler import ElasticDistributedSampler
from .seeding import SeededDataset, SeededOrder

__all__ = ["Indexed"]


class Indexed:
    """The epochs of a sampler's order, which is one of samples, or of whole batches of them."""

    num_workers = None
    keeps_workers = has_own_positions = False
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
    ) -> None:
        self.asked = SeededDataset(dataset) if seeds_samples else dataset
        self.collate_fn = collate_fn
        self.auto_collation = is_of_batches or batch_size is not None
        self.running: Ahead | None = None
        self._sampler = sampler
        self._batch_size = batch_size or 1
        self._drop_last = drop_last
        self._is_of_batches = is_of_batches
        self._seeds_samples = seeds_samples
        self._given_plan: BatchPlan | None = None
        self._rank = sampler.rank
        self._position = 0  # that the next loop begins at
        self._position_epoch = -1  # if it is over this epoch
        self._is_begun = False  # a loop over this epoch, or it is over; the next one is over another
        self._begun_epoch = -1  # that the last loop was over
        self._next_epoch: int | None = None  # named while a loop is under way

    @property
    def epoch(self) -> int:
        return self._sampler.epoch

    @property
    def remaining(self) -> int | None:
        return self._cursor.remaining

    @property
    def num_ranks(self) -> int:
        return self._sampler.num_replicas

    @property
    def goes_on(self) -> bool:
        return self._position > 0

    def __getstate__(self) -> dict[str, Any]:
        """All but the loop that is under way, which a copy has none of."""
        return {**self.__dict__, "running": None}

    def collate_with(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn

    def begin(self, making: Making) -> Ahead:
        if self.running is not None and self._given_plan is not None:
            self.running.end()  # a trainer counts what one loop takes
        named, self.running = self._next_epoch, None
        if named is not None:
            self.set_epoch(named)
        if self._is_begun and self.epoch == self._begun_epoch:
            self.set_epoch(self.epoch + 1)
        if self.epoch != self._position_epoch:
            self._position = 0
        self._is_begun, self._begun_epoch, self._next_epoch = True, self.epoch, None
        order = self._order()
        cursor = Cursor(order.num_samples, position=self._position or self._sampler.goes_on_at)
        self.running = Ahead(
            order, cursor, making, self._planned(), self._rank, can_recut=can_be_recut(self.collate_fn)
        )
        self._position = 0
        return self.running

    def num_batches(self) -> int:
        if self.running is not None and self._is_under_way:
            return len(self.running)
        return num_chunks(self._planned(), self._sampler.order.num_samples - self._position)

    def why_not_resize(self, batch_size: int) -> str | None:
        try:
            self._planned(batch_size)
        except ValueError as error:
            return str(error)
        return None

    def resize(self, batch_size: int) -> None:
        self._batch_size = batch_size
        if self.running is not None and self._given_plan is None:
            self.running.plan(self._planned(), self._rank)

    def plan(self, plan: BatchPlan, rank: int) -> None:
        self._given_plan, self._rank = plan, rank
        if self.running is not None:
            self.running.plan(plan, rank)

    def set_epoch(self, epoch: int) -> None:
        if self._is_under_way:
            self._next_epoch = epoch
            return
        if epoch != self.epoch or self.running is not None:
            self._position = 0
        self.running = None
        self._sampler.set_epoch(epoch)
        self._is_begun = False

    def state_dict(self) -> dict[str, Any]:
        cursor = self._cursor
        is_over = self.running is None and self._is_begun  # as a state that was loaded says
        order = self._sampler.order if self.running is None else self.running.order
        return {
            "epoch": self.epoch if self.running is None else self._begun_epoch,
            "position": cursor.passed,
            "is_over": is_over or self._planned().next_step(cursor.remaining) is None,
            "order": order.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        missing = sorted({"epoch", "position", "is_over", "order"} - set(state))
        if missing:
            raise ValueError(
                f"the state has no {', '.join(missing)}, and is none of a loader of samples with an index; give the "
                "loader the dataset with which the state was saved"
            )
        is_over, epoch = bool(state["is_over"]), int(state["epoch"])
        if is_over:  # the next epoch may have another length
            self._sampler.seed = dict(state["order"]).get("seed", self._sampler.seed)
            self._sampler.set_epoch(epoch)
        else:
            self._sampler.load_state_dict(state)
        self.running, self._next_epoch = None, None
        self._is_begun, self._begun_epoch = is_over, epoch if is_over else -1
        self._position, self._position_epoch = 0 if is_over else int(state["position"]), epoch

    def rewind(self, state: Mapping[str, Any]) -> None:
        running = self.running
        self.load_state_dict(state)
        if running is not None and not running.has_ended:
            order = self._order()
            running.go_to(order, Cursor(order.num_samples, position=int(state["position"])))
            self.running, self._position = running, 0
            self._is_begun, self._begun_epoch = True, self.epoch

    @property
    def _is_under_way(self) -> bool:
        """Somebody loops."""
        return self.running is not None and not self.running.has_ended

    @property
    def _cursor(self) -> Cursor:
        """Of the loop under way, or of the last one, or of the one that comes where there was none."""
        if self.running is not None:
            return self.running.cursor
        return Cursor(self._sampler.order.num_samples, position=self._position)

    def _order(self) -> Order:
        order: Order = self._sampler.order
        if self._is_of_batches:
            order = BatchOrder(order)
        return SeededOrder(order, seed=self._sampler.seed, epoch=self.epoch) if self._seeds_samples else order

    def _planned(self, batch_size: int | None = None) -> BatchPlan:
        """The plan that was given, or that of a loader by itself."""
        if self._given_plan is not None:
            return self._given_plan
        size = batch_size or self._batch_size
        shares = self._sampler.share_weights
        num_rounds, rest = divmod(size, shares[self._sampler.rank])
        if rest:
            raise ValueError(
                f"batch_size is {size}, and this rank has {shares[self._sampler.rank]} samples of a round "
                f"(share_weights {list(shares)}); give each rank as many times its share"
            )
        return BatchPlan(
            global_batch=num_rounds * sum(shares),
            num_ranks=len(shares),
            micro_batch=num_rounds * max(shares),
            weights=shares,
            drop_last=self._drop_last,
        )
