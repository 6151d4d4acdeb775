"""Which micro-batches this rank's steps are made of, and where an epoch's samples stand when a checkpoint is saved."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from elastic_ext.config.apply import Applier
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.keys import DataloaderSection, Value
from elastic_ext.data.batch_plan import BatchPlan, StepPlan
from elastic_ext.data.sources import (
    BatchDrawingSource,
    CountedSource,
    EndingSource,
    FixedBatchSizes,
    LeavableSource,
    MicroBatchSource,
    OrderedSource,
    OwnPositions,
    ResumableSource,
    RewindableSource,
)
from elastic_ext.errors import CheckpointDamaged
from elastic_ext.fsdp.checkpoint.loading.source import Opened
from elastic_ext.fsdp.pickled_values import read_plain
from elastic_ext.fsdp.value_encoding import pack, unpack

from .remarks import EpochLength

__all__ = ["LOADER_SETTINGS", "Batches", "Positions", "RankStep", "name_epoch", "own_position", "packed_position"]


def name_epoch(loader: object, epoch: int) -> None:
    """Call ``set_epoch(epoch)`` of a loader, or else of its samplers, where they have it: some shuffle by the epoch."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    for part in (loader,) if hasattr(loader, "set_epoch") else samplers:
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


# --- where an epoch's samples stood when a checkpoint was saved, and how a loader goes on there, or back to it -------
# What a loader must offer for that is in data/sources.py.

_CANNOT_GO_BACK = (
    "this dataloader cannot go back to where the checkpoint was saved: a running loop over the dataloader goes on with "
    "its next batches, and the next loop begins an epoch from its first batch; an ElasticDataLoader can go back"
)
_GOES_BACK_LATER = (
    "the samples since the checkpoint come again in the next loop over the dataloader: leave the running loop, and "
    "begin another, as trainer.batches() does by itself; an ElasticDataLoader hands these samples out again in the "
    "same loop"
)

_OWN = {"of": "each rank"}
"""What a checkpoint holds for all ranks as the dataloader's position where each rank has a position of its own."""
_WHY_NOT = "why there is none"


class Positions:
    """Where a trainer's dataloader stands in its epoch, asked for a checkpoint and put back from one."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def held(self) -> Any:
        """The loader's position, which all ranks share, as plain values; None where the loader cannot go on from one.

        Where each rank has a position of its own, a mark that says so; where the loader has none, the reason.
        """
        source = self._loader
        if isinstance(source, OwnPositions) and source.has_own_positions:
            why_not = source.why_no_position
            return dict(_OWN) if why_not is None else {_WHY_NOT: why_not}
        return source.state_dict() if isinstance(source, ResumableSource) else None

    def own(self) -> Any:
        """This rank's own position in a loader that stands elsewhere on each rank; None for all other loaders."""
        source = self._loader
        has_own = isinstance(source, OwnPositions) and source.has_own_positions and source.why_no_position is None
        return source.state_dict() if has_own else None

    def resume(self, position: Mapping[str, Any], own: Any) -> str | None:
        """Have the loader go on from a checkpoint's position; gives the reason where its epoch begins anew instead."""
        held, source = _either(position["source"], own), self._loader
        if isinstance(held, str):
            return f"{held}: the epoch begins anew"
        if held is not None and isinstance(source, ResumableSource):
            source.load_state_dict(held)
            return None
        if source is None or (held is None and not position["num_batches"]):
            return None
        done = "in the middle of an epoch" if held is not None else f"after {position['num_batches']} of its batches"
        return (
            f"the checkpoint was saved {done}, and this dataloader cannot go on there: the epoch begins anew; an "
            "ElasticDataLoader goes on with the next sample"
        )

    def go_on(self) -> str | None:
        """Have the next loop go on where the last one was left; gives the reason where its epoch begins anew instead.

        A loader that cannot go on anywhere is left as it is.
        """
        held, source = _either(self.held(), self.own()), self._loader
        if isinstance(held, str):
            return f"{held}: the epoch begins anew"
        if isinstance(source, RewindableSource):
            source.rewind(held)
        elif held is not None and isinstance(source, ResumableSource):
            source.load_state_dict(held)
        return None

    def can_go_back(self, position: Mapping[str, Any]) -> bool:
        """Whether the samples after a checkpoint's position can be handed out again."""
        held = position["source"]
        return held is not None and not _is_missing(held) and isinstance(self._loader, ResumableSource)

    def go_back(self, position: Mapping[str, Any], own: Any) -> str | None:
        """Have the samples after a checkpoint's position come again; gives a warning where they do not, or later.

        Called between two steps. A loader with sizes of its own goes on as if nothing had happened.
        """
        held, source = _either(position["source"], own), self._loader
        if not self.can_go_back(position) or isinstance(held, str):
            return None if source is None else _CANNOT_GO_BACK
        if isinstance(source, RewindableSource):
            source.rewind(held)
            return None
        assert isinstance(source, ResumableSource)
        source.load_state_dict(held)
        return _GOES_BACK_LATER


def _either(held: Any, own: Any) -> Any:
    """The position that all ranks share, or this rank's own; a string gives the reason where there is none."""
    if _is_missing(held):
        return f"the position of the dataloader is not known: {held[_WHY_NOT]}"
    if held != _OWN:
        return held
    why_not = "each rank had its own position in the dataset, and the number of ranks is another now"
    return why_not if own is None else own


def _is_missing(held: Any) -> bool:
    return isinstance(held, Mapping) and _WHY_NOT in held


# --- which micro-batches this rank's steps are made of, whether the loader can be told or has sizes of its own -------
# The cutting itself is in data/batch_plan.py; what a loader must offer, in data/sources.py.

_BY_HAND = (
    "the loop accumulates gradients over several micro-batches by itself, and calls optimizer.step() in some of them; "
    "in steps of {num} micro-batches they would be accumulated twice. Start the job with global_batch_size=, and call "
    "optimizer.step() in every micro-step"
)
_NO_LOADER = "no dataloader was given to the trainer; give it an ElasticDataLoader"
LOADER_SETTINGS = tuple(each.name for each in fields(DataloaderSection) if each.name != "batch_size")
"""The keys of the section ``dataloader`` that a loader alone can put in force."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStep:
    """How one rank's part of one step is cut into micro-batches."""

    weights: tuple[float, ...]
    """The weight of each micro-batch's mean loss in the gradient of the step."""
    num_samples: int | None
    """Samples of the step over all ranks; None where that is not known."""
    sizes: tuple[int, ...] | None = field(default=None, compare=False)
    """The number of samples in each of this rank's micro-batches; None where that is not known."""
    largest: int | None = None
    """The most samples that any rank takes at once in the step; None where the loader cannot be told another size."""

    @property
    def num_micro_steps(self) -> int:
        return len(self.weights)


class Batches:
    """How a trainer's steps are cut into micro-batches, and how far its epoch has come.

    Call ``begin`` before the first step.
    """

    def __init__(
        self,
        loader: Any = None,
        *,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        share_weights: tuple[float, ...] | None = None,
    ) -> None:
        for name, value in (("global_batch_size", global_batch_size), ("micro_batch_size", micro_batch_size)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is {value!r}; allowed: an integer >= 1, or None")
        self.source = loader if isinstance(loader, MicroBatchSource) and loader.batch_size is not None else None
        self.counted = self.source if isinstance(self.source, CountedSource) else None
        """The dataloader, where it counts the micro-batches handed out since the last commit; else None."""
        self.is_resuming = False
        """Whether a state is being loaded, whose global batch counts where the script gave none."""
        self.loader = loader
        self.positions = Positions(loader)
        """How the dataloader goes on from a position, or back to one."""
        self.ordered = self.source if isinstance(self.source, OrderedSource) else None
        """The dataloader, where it draws an order that has to be the same on all ranks; else None."""
        self.drawing = loader if isinstance(loader, BatchDrawingSource) and loader.draws_batches else None
        """The dataloader, where each rank draws batches of its own; else None."""
        self._fixed = None if self.source is not None or loader is None else FixedBatchSizes.of(loader)
        if micro_batch_size is not None and (self.source is not None or self._fixed is not None):
            raise ValueError(
                f"micro_batch_size is {micro_batch_size}, and a dataloader has a batch size; give one of them"
            )
        if self.source is None and share_weights is not None:
            raise ValueError("share_weights needs a dataloader that gives ranks unequal parts, an ElasticDataLoader")
        if micro_batch_size is not None:
            self._fixed = FixedBatchSizes(micro_batch=micro_batch_size)
        if global_batch_size is not None and self.source is None and self._fixed is None:
            raise ValueError(
                f"global_batch_size is {global_batch_size}, and the size of a micro-batch is not known; pass the "
                "dataloader that the loop uses, or micro_batch_size"
            )
        self._given_batch = global_batch_size
        self.is_gathered_by_hand = False
        """Whether the loop accumulates gradients by itself: no global batch was asked for, and optimizers step in some
        micro-steps alone.
        """
        self._share_weights = share_weights
        self._num_ranks, self._rank = 1, 0
        self._global_batch: int | None = None
        self._plan: BatchPlan | None = None
        self._full: tuple[StepPlan, RankStep] | None = None
        self._single = RankStep(weights=(1.0,), num_samples=None)
        self._num_taken = 0  # batches of the epoch, from a loader with sizes of its own
        self._has_passed = False  # something of the epoch
        self._may_carry = False  # a batch in hand that was cut otherwise

    @property
    def global_batch(self) -> int | None:
        """Samples per step over all ranks; None where every micro-step commits."""
        return self._global_batch

    def keeps(self, step: RankStep) -> bool:
        """Whether the trainer accumulates gradients in ``step``: a global batch is given, or it has several parts."""
        return self._given_batch is not None or step.num_micro_steps > 1

    @property
    def largest(self) -> int:
        """The most samples that a rank takes at once in a full step; 0 where that is not known."""
        return 0 if self._full is None else self._full[0].largest

    @property
    def share(self) -> int:
        """The most samples that a rank has in a full step, over its micro-batches; 0 where that is not known."""
        return 0 if self._full is None else max(map(sum, self._full[0].micro_batches))

    @property
    def effect(self) -> str:
        """What a rank takes at once, where that is less than the micro-batch size in force, in words; else empty."""
        if self._plan is None or self.largest == self._plan.micro_batch:
            return ""
        return f"{self.largest} at once: a rank's share of a step is {self.share}"

    @property
    def step_samples(self) -> int | None:
        """Samples of a full step over all ranks; None where that is not known."""
        return self._single.num_samples if self._full is None else self._global_batch

    def largest_under(self, config: ElasticConfig) -> int:
        """The most samples that a rank would take at once in a full step under ``config``, which was checked."""
        if self.source is None:
            return self.largest
        micro_batch = config.dataloader.batch_size or self.source.batch_size
        return self._planned(config.global_batch_size or 0, micro_batch, self._num_ranks).full_step.largest

    def fewer(self, largest: int, *, takes_one: bool) -> int:
        """A micro-batch size with which ranks take fewer than ``largest`` samples at once in the next step; 0 for none.

        The present size is halved until it is one. Unless the model ``takes_one`` sample at once, it also leaves no
        rank with a single sample, and sizes between the halves are tried too.
        """
        assert self._plan is not None
        sizes = [self._plan.micro_batch]
        while sizes[-1] > 1:
            sizes.append(sizes[-1] // 2)
        if not takes_one:
            sizes += range(largest - 1, 1, -1)
        return next((size for size in sizes if self._is_fewer(size, largest, takes_one=takes_one)), 0)

    @property
    def micro_batch(self) -> int:
        """The size of micro-batches in force."""
        assert self._plan is not None
        return self._plan.micro_batch

    def leaves_one(self, micro_batch: int) -> bool:
        """Whether some rank would take a single sample at once in the next step, with this micro-batch size."""
        assert self.source is not None
        assert self._plan is not None
        try:
            plan = self._planned(self._plan.global_batch, micro_batch, self._num_ranks)
        except ValueError:
            return False
        step = plan.next_step(self.source.remaining)
        return step is not None and step.smallest == 1

    def _is_fewer(self, micro_batch: int, largest: int, *, takes_one: bool) -> bool:
        assert self.source is not None
        assert self._plan is not None
        try:
            plan = self._planned(self._plan.global_batch, micro_batch, self._num_ranks)
        except ValueError:  # which says why, where that is asked for
            return takes_one
        step = plan.next_step(self.source.remaining)  # what was carried over came back with the step
        steps = [plan.full_step] if step is None else [plan.full_step, step]
        return (step is None or step.largest < largest) and (takes_one or all(each.smallest > 1 for each in steps))

    @property
    def num_steps(self) -> int | None:
        """Steps of an epoch; None where that is not known."""
        num_batches = None if self._fixed is None else self._fixed.num_batches
        if num_batches is not None:
            return -(-num_batches // (self._full[1].num_micro_steps if self._full is not None else 1))
        remaining = None if self.source is None else self.source.remaining
        return None if remaining is None or self._plan is None else max(self._plan.num_steps(remaining), 1)

    @property
    def num_steps_left(self) -> int | None:
        """Steps that are left of the epoch under way; None where that is not known."""
        num_steps = self.num_steps
        if num_steps is not None and self.is_over:
            return 0
        if num_steps is None or self._fixed is None:
            return num_steps  # by the samples that remain
        return num_steps - self._num_taken // (self._full[1].num_micro_steps if self._full is not None else 1)

    def epoch_length(self, num_ranks: int) -> EpochLength | None:
        """The length of an epoch in the script's own batches, asked before ``begin``; None where it is not known."""
        fixed, source = self._fixed, self.source
        if fixed is not None and fixed.num_batches is not None:
            return EpochLength(num_batches=fixed.num_batches, batch_samples=fixed.micro_batch * num_ranks)
        num_samples = None if source is None else source.remaining
        if source is None or num_samples is None:
            return None
        return EpochLength(num_batches=-(-num_samples // source.batch_size), batch_samples=source.batch_size)

    @property
    def is_over(self) -> bool:
        """Whether the epoch has come to its end, as far as its length is known, and no other has begun."""
        if self.source is None:
            return self._has_passed and self._num_taken == 0
        return self._has_passed and self.has_none_left

    @property
    def has_none_left(self) -> bool:
        """Whether no step is left to the loop over a source that is under way, or to the one that comes."""
        source = self.source
        return source is not None and self._plan is not None and self._next_plan(source) is None

    @property
    def is_mid_epoch(self) -> bool:
        """Whether the epoch holds more steps, as far as that is known."""
        if self.source is not None:
            return self._plan is not None and self._next_plan(self.source) is not None
        return self._num_taken > 0 and self._fixed is not None and self._fixed.num_batches is not None

    @property
    def is_at_end(self) -> bool:
        """Whether a loader says that the loop over it has come to its end; a step that is taken back may undo that."""
        return isinstance(self.loader, EndingSource) and self.loader.is_at_end

    @property
    def is_left_early(self) -> bool:
        """Whether a loop that has been left is known to have left a part of its epoch behind.

        Of a loader that says nothing of its end, and has no length, that is not known.
        """
        if isinstance(self.loader, EndingSource):
            return not self.loader.is_at_end
        if self.source is not None:
            return self.source.remaining is not None and self.is_mid_epoch
        has_length = self._fixed is not None and self._fixed.num_batches is not None
        return has_length and (self._num_taken > 0 or not self._has_passed)

    @property
    def can_begin_later(self) -> bool:
        """Whether the next loop can be over all of a later epoch than the one that the loader has gone back to.

        A loader that does not go on from a position begins each loop with the first sample.
        """
        is_told = isinstance(self.loader, LeavableSource) and hasattr(self.loader, "set_epoch")
        return is_told or not isinstance(self.loader, ResumableSource)

    def begin_later(self, epoch: int) -> None:
        """Have the next loop be over all of ``epoch``, and not over what is left of an earlier one."""
        if isinstance(self.loader, ResumableSource):
            name_epoch(self.loader, epoch)

    @property
    def may_end_apart(self) -> bool:
        """Whether ``is_left_early`` may differ from rank to rank."""
        return isinstance(self.loader, EndingSource) and (self.source is None or self.source.remaining is None)

    @property
    def loader_applier(self) -> Applier | None:
        """The dataloader as an applier of config keys; None where it follows none."""
        return self.loader if hasattr(self.loader, "check") and hasattr(self.loader, "apply") else None

    @property
    def can_replay(self) -> bool:
        """Whether samples that a rolled back step took are handed out again."""
        return self.source is not None

    @property
    def description(self) -> tuple[int | None, ...]:
        """The size and number of the dataloader's own batches, which must be the same on all ranks."""
        fixed = self._fixed
        if fixed is None:
            return (None,)
        return fixed.micro_batch, fixed.num_batches, fixed.last_batch

    def startup_values(self, num_ranks: int) -> dict[str, object]:
        """The script's batch sizes as values of config keys; ValueError where they do not go together."""
        source, fixed = self.source, self._fixed
        micro_batch = fixed.micro_batch if fixed is not None else None
        batch = self._given_batch
        if source is not None:
            micro_batch = source.batch_size
            batch = batch or micro_batch * num_ranks
            self._planned(batch, micro_batch, num_ranks)
        elif batch is not None and fixed is not None:
            fixed.num_micro_steps(batch, num_ranks)
        values: dict[str, object] = {"global_batch_size": batch, "dataloader.batch_size": micro_batch}
        return {path: value for path, value in values.items() if value is not None}

    def begin(self, config: ElasticConfig, *, num_ranks: int, rank: int) -> None:
        """Cut steps as ``config`` says, from the next one on."""
        self._num_ranks, self._rank = num_ranks, rank
        batch, source, fixed = config.global_batch_size, self.source, self._fixed
        self._global_batch = batch if source is not None or fixed is not None else None
        if source is not None:
            assert batch is not None
            self._tell(batch, config.dataloader.batch_size or source.batch_size)
        elif batch is not None and fixed is not None:
            num_micro_steps = fixed.num_micro_steps(batch, num_ranks)
            full = StepPlan(global_batch=batch, micro_batches=((fixed.micro_batch,) * num_micro_steps,) * num_ranks)
            self._full = full, self._for_this_rank(full)
        if source is None and fixed is not None:
            num_samples = fixed.micro_batch * num_ranks
            self._single = RankStep(weights=(1.0,), num_samples=num_samples, sizes=(fixed.micro_batch,))

    def begin_epoch(self) -> None:
        """Begin an epoch; a loader with sizes of its own may have more or fewer batches than in the last one."""
        self.end_epoch()
        fixed = FixedBatchSizes.of(self.loader) if self.source is None and self.loader is not None else None
        if fixed is not None and self._fixed is not None:
            if fixed.micro_batch != self._fixed.micro_batch:
                raise ValueError(
                    f"the dataloader's batches were changed from {self._fixed.micro_batch} to {fixed.micro_batch} "
                    "samples; leave them as they are, or use an ElasticDataLoader, whose batches may change"
                )
            self._fixed = fixed
            if self.drawing is not None and fixed.num_batches is not None:  # of the next loop, which may go on midway
                self._fixed = replace(fixed, num_batches=len(self.loader))

    def count_rest(self) -> None:
        """Count the batches that are left as all of the epoch's, as the loader goes on from a position or back to one.

        Only a loader that draws its batches for this rank alone has sizes of its own, and goes on from a position.
        """
        fixed, loader = self._fixed, self.loader
        if self.drawing is None or fixed is None or fixed.num_batches is None:
            return
        self._num_taken, self._has_passed = 0, loader.is_at_end
        if not loader.is_at_end:
            self._fixed = replace(fixed, num_batches=loader.remaining)

    def leave_epoch(self) -> None:
        """End an epoch, whether or not its loop has come to the end of the data, and tell the loader."""
        self.end_epoch()
        if isinstance(self.loader, LeavableSource):
            self.loader.leave_epoch()

    def end_epoch(self) -> None:
        """Count no batch of an epoch as taken; the next loop over the data is over the next epoch."""
        self._num_taken, self._has_passed = 0, False

    def pass_rest(self) -> None:
        """Have the next loop be over the next epoch, also where the loader stands at the end of the last one."""
        if self.source is not None and self.has_none_left:
            for _ in self.loader:  # there is nothing but its end
                self.source.rollback()
                break

    def next_step(self, *, keep_batch: bool = True) -> RankStep | None:
        """How the next step is cut, the same object for all full steps; None where the epoch is over.

        Without ``keep_batch``, or without a global batch, every micro-step is a step.
        """
        if not keep_batch or self._full is None:
            return self._single_step()
        if self.source is not None:
            plan = self._next_plan(self.source)
            if plan is self._full[0]:
                return self._full[1]
            return None if plan is None else self._for_this_rank(plan)
        full, step = self._full
        fixed = self._fixed
        assert fixed is not None
        if fixed.num_batches is None or fixed.num_batches - self._num_taken > full.num_micro_steps:
            return step
        return self._for_this_rank(fixed.next_step(self._num_taken, full.num_micro_steps, self._num_ranks))

    def commit(self, num_micro_steps: int) -> None:
        """Count the samples that a step of ``num_micro_steps`` took as consumed."""
        self._has_passed = True
        if self.source is not None:
            self.source.commit(num_micro_steps)
            return
        self._num_taken += num_micro_steps
        if self._fixed is not None and self._num_taken == self._fixed.num_batches:
            self._num_taken = 0
            if self.drawing is not None:  # what was left of an epoch has ended, and a whole one comes
                self._fixed = FixedBatchSizes.of(self.loader)

    def rollback(self, num_micro_steps: int) -> None:
        """Have the samples of the step under way come again; a loader with sizes of its own has gone past them."""
        if self.source is not None:
            self.source.rollback()
        else:
            self.commit(num_micro_steps)

    def position(self) -> dict[str, Any]:
        """Where the epoch stands, as plain values for a checkpoint: batches taken, and the loader's position."""
        return {"num_batches": self._num_taken, "source": self.positions.held()}

    def check(self, new: ElasticConfig) -> str | None:
        """Why steps cannot be cut as ``new`` says, None where they can."""
        batch, micro_batch = new.global_batch_size, new.dataloader.batch_size
        settings = [name for name in LOADER_SETTINGS if getattr(new.dataloader, name) is not None]
        if settings and self.loader is None:
            return f"{', '.join(settings)} cannot change: {_NO_LOADER}, which could change them"
        if settings and self.loader_applier is None:
            return f"{', '.join(settings)} of this dataloader cannot change while it is in use"
        if self.source is not None:
            try:
                plan = self._planned(batch or 0, micro_batch or self.source.batch_size, self._num_ranks)
            except ValueError as error:
                return str(error)
            num = plan.full_step.num_micro_steps
            return _BY_HAND.format(num=num) if self.is_gathered_by_hand and num > 1 else None
        fixed = self._fixed
        if micro_batch is not None and (fixed is None or micro_batch != fixed.micro_batch):
            if self.loader is None:
                return f"the loop itself sets the batch size: {_NO_LOADER}, whose batch size can change"
            has = "and this one has none" if fixed is None else f"this one has {fixed.micro_batch}"
            return f"the batch size of a DataLoader cannot change ({has}); use an ElasticDataLoader, whose can"
        if batch is not None and batch != self._global_batch:
            if (self._global_batch is None and not self.is_resuming) or fixed is None:
                why_not = "this run has no global batch: each micro-step is a step"
                return f"{why_not}; start it with global_batch_size= to change that size"
            try:
                fixed.num_micro_steps(batch, self._num_ranks)
            except ValueError as error:
                return str(error)
        return None

    @property
    def num_handed(self) -> int:
        """Batches that the loop has taken since the last commit; 0 where the dataloader does not count them."""
        return 0 if self.counted is None else self.counted.num_handed

    def why_not_ranks(self, config: ElasticConfig, num_ranks: int) -> str | None:
        """Why steps cannot be cut for so many ranks, None where they can."""
        if self.source is None:
            return f"{_NO_LOADER}, which could be told how many ranks there are"
        try:
            size = config.dataloader.batch_size or self.source.batch_size
            plan = self._planned(config.global_batch_size or 0, size, num_ranks)
        except ValueError as error:
            return str(error)
        num = plan.full_step.num_micro_steps
        return _BY_HAND.format(num=num) if self.is_gathered_by_hand and num > 1 else None

    def loses_rest(self, config: ElasticConfig, num_ranks: int) -> bool:
        """Whether so many ranks could take no step of what is left of the epoch, and those that are here can."""
        source = self.source
        if source is None or self._plan is None or self.why_not_ranks(config, num_ranks) is not None:
            return False
        size = config.dataloader.batch_size or source.batch_size
        planned = self._planned(config.global_batch_size or 0, size, num_ranks)
        return self._next_plan(source) is not None and planned.next_step(source.remaining) is None

    @property
    def loader_values(self) -> dict[str, Value]:
        """The present settings of the loader as values of config keys, as far as it tells them."""
        found = {f"dataloader.{name}": getattr(self.loader, name, None) for name in LOADER_SETTINGS}
        return {path: value for path, value in found.items() if isinstance(value, int)}

    def own_values(self) -> dict[str, object]:
        """Config values that a resumed config may not change: the batch size of a loader that has its own."""
        return {} if self._fixed is None else {"dataloader.batch_size": self._fixed.micro_batch}

    def _single_step(self) -> RankStep | None:
        """A step that has the next micro-batch alone; None where the epoch is over."""
        if self.source is None:
            fixed = self._fixed
            if fixed is None or fixed.last_batch is None or self._num_taken + 1 != fixed.num_batches:
                return self._single
            return self._for_this_rank(fixed.next_step(self._num_taken, 1, self._num_ranks))
        plan = self._next_plan(self.source)
        self._may_carry = True  # the step after this one may begin with what was cut for the rest of another
        if plan is None:
            return None
        chunks = tuple(sizes[:1] for sizes in plan.micro_batches)
        return self._for_this_rank(StepPlan(global_batch=sum(map(sum, chunks)), micro_batches=chunks))

    def _next_plan(self, source: MicroBatchSource) -> StepPlan | None:
        assert self._plan is not None
        if not self._may_carry:
            return self._plan.next_step(source.remaining)
        carried = None if self.counted is None else self.counted.carried
        self._may_carry = carried is not None
        return self._plan.next_step(source.remaining, carried)

    def _tell(self, global_batch: int, micro_batch: int) -> None:
        assert self.source is not None
        self._plan = self._planned(global_batch, micro_batch, self._num_ranks)
        self._full = self._plan.full_step, self._for_this_rank(self._plan.full_step)
        self.source.plan(self._plan, self._rank)
        self._may_carry = True

    def _planned(self, global_batch: int, micro_batch: int, num_ranks: int) -> BatchPlan:
        assert self.source is not None
        return BatchPlan(
            global_batch=global_batch,
            num_ranks=num_ranks,
            micro_batch=micro_batch,
            weights=self._share_weights,
            drop_last=self.source.drop_last,
        )

    def _for_this_rank(self, plan: StepPlan) -> RankStep:
        weights = tuple(plan.weight(self._rank, index) for index in range(plan.num_micro_steps))
        largest = plan.largest if self.source is not None else None
        sizes = plan.micro_batches[self._rank]
        return RankStep(weights=weights, num_samples=plan.global_batch, sizes=sizes, largest=largest)


# --- a rank's own dataloader position, as its part of a checkpoint ---------------------------------------------------
# No other rank has that position, nor can go on from it.

_PREFIX = "position"  # of the names of its tensors


def packed_position(held: Any, rank: int) -> dict[str, torch.Tensor]:
    """A rank's own dataloader position as tensors by name, for a checkpoint; empty where there is no position."""
    if held is None:
        return {}
    tensors: dict[str, torch.Tensor] = {}
    whole = json.dumps(pack(held, f"{_PREFIX}/{rank}", tensors)).encode()
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    return {**copies, f"{_PREFIX}/{rank}": torch.frombuffer(bytearray(whole), dtype=torch.uint8)}


def own_position(opened: Opened, *, rank: int, num_ranks: int) -> Any:
    """This rank's own dataloader position in a checkpoint; None where it has none, or had more or fewer ranks."""
    whole = f"{_PREFIX}/{rank}"
    names = {name for name in opened.names("extra") if name == whole or name.startswith(f"{whole}/")}
    if opened.num_ranks != num_ranks or whole not in names:
        return None
    tensors = {name: opened.read_whole("extra", name) for name in sorted(names)}
    try:
        return unpack(read_plain(tensors[whole].numpy().tobytes()), tensors)
    except ValueError as error:
        raise CheckpointDamaged(f"{opened.found.path} does not say where the dataloader stood: {error}") from None
