"""Growing: how many samples a rank takes at once: fewer where memory did not suffice, more where somebody asks for it.

A single one is no size to go to where a layer refuses that: it is found out by trying.

What did not fit is remembered, with the plan by which the model lay then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING

from .batches import Batches
from .config.apply import Proposal
from .config.control_word import REFUSES_ONE
from .config.elastic_config import ElasticConfig
from .errors import ElasticError, StepError

if TYPE_CHECKING:
    from .config.follower import ConfigFollower
    from .counts import Counts
    from .device_memory import DeviceMemory

__all__ = ["Growing"]

_logger = logging.getLogger(__name__)

_KEY = "dataloader.batch_size"
_REASON = "trainer.try_grow()"
_NO_LESS = (
    "{}, and there cannot be fewer: have activations recomputed (activation_checkpoint), share the model out "
    "(trainer.reshard), or make it smaller{}; the step was taken back"
)
_TAKES_NONE = ", or have its layers take a single sample, as GroupNorm does and BatchNorm does not"
_TOO_FEW = (
    "{} after step {}: the step that comes is one of so few samples that a rank has a single one, in micro-batches of "
    "{} too, as they were before memory ran out; leave the last samples of an epoch out (drop_last=True), have another "
    "global_batch_size, or layers that take a single sample, as GroupNorm does and BatchNorm does not; the step was "
    "taken back"
)
_FIXED = "trainer.try_grow() needs a dataloader that can be told another size of micro-batches; use ElasticDataLoader"
_WHOLE = "a micro-batch is a rank's whole part of the global batch already: {} samples"
_BOUND = "memory ran out with {} samples at once, and {} would be no fewer"


class Growing:
    """One rank's part; what ``shrink`` and ``check`` do, all ranks do together."""

    def __init__(
        self,
        follower: ConfigFollower,
        batches: Batches,
        counts: Counts,
        memory: DeviceMemory,
        plan: Callable[[], Hashable],
    ) -> None:
        """``plan`` says by which the model lies."""
        self._follower = follower
        self._batches = batches
        self._counts = counts
        self._memory = memory
        self._plan = plan
        self._bounds: dict[Hashable, int] = {}  # samples that did not fit, by plan
        self._failed_with = 0  # samples at once, when memory ran out last
        self._size_before = 0  # of micro-batches, when memory first ran out
        self._takes_one = True  # as far as is known

    @property
    def has_shrunk(self) -> bool:
        """Whether micro-batches are smaller than the script would have them, since memory ran out."""
        return self._failed_with > 0

    @property
    def bound(self) -> int | None:
        """The fewest samples at once for which memory did not suffice by the present plan; None where it always did."""
        return self._bounds.get(self._plan())

    def try_grow(self) -> Proposal:
        """Ask for micro-batches twice as large, where that is not known to be too much."""
        if self._batches.source is None:
            raise ElasticError(_FIXED)
        now = self._batches.largest
        wanted = min(2 * now, self._batches.share)
        refusal = _WHOLE.format(now) if wanted <= now else None
        if refusal is None and self.bound is not None and wanted >= self.bound:
            refusal = _BOUND.format(self.bound, wanted)
        if refusal is not None:
            return Proposal({_KEY: wanted}, _REASON, outcome="refused", refusal=refusal)
        return self._follower.propose({_KEY: wanted}, _REASON)

    def check(self, new: ElasticConfig) -> str | None:
        """Why there is no room for steps as ``new`` cuts them, None where there may be."""
        if self._batches.check(new) is not None:
            return None  # which is said by who has cut them
        if new.reason == _REASON and self.bound is not None and self._batches.largest_under(new) >= self.bound:
            return _BOUND.format(self.bound, self._batches.largest_under(new))  # learnt since it was asked for
        is_other_plan = new.parallelism != self._follower.config.parallelism  # by which nothing was measured
        if self._memory.per_sample is None or is_other_plan:
            return None
        largest = self._batches.largest_under(new)
        return self._memory.why_no_room(largest) if largest > self._batches.largest else None

    def forget(self) -> None:
        """The model lies by another plan: what its passes take is not known."""
        self._memory.per_sample = None

    def shrink(self, largest: int, failures: Mapping[int, str]) -> None:
        """Memory did not suffice for so many samples at once: have fewer from here on, with all ranks.

        Or fewer had been too few for a layer: then as many as it takes, but not so many again as did not fit.
        """
        follower, plan = self._follower, self._plan()
        refusals = {rank: text for rank, text in failures.items() if text.startswith(REFUSES_ONE)}
        self._takes_one &= not refusals
        if len(refusals) < len(failures):
            self._failed_with = largest
            self._size_before = self._size_before or self._batches.micro_batch
            if largest >= self._batches.largest:  # else it was an epoch's tail, whose like has fitted
                self._bounds[plan] = min(largest, self._bounds.get(plan, largest))
        follower.meet_to_shrink()
        now = follower.config.dataloader.batch_size
        assert now is not None
        wanted = self._batches.fewer(self._failed_with, takes_one=self._takes_one)
        where = ", ".join(f"on rank {rank} {text}" for rank, text in sorted((refusals or failures).items()))
        step, with_so_many = self._counts.global_step, f"with {self._failed_with} sample(s) at once"
        told = f"memory ran out {where} after step {step}"
        if refusals:
            told = f"memory ran out {with_so_many} after step {step}, and {where}"
        if wanted == 0 and refusals and self._batches.leaves_one(self._size_before):
            raise StepError(_TOO_FEW.format(where, step, self._size_before))
        if wanted == 0:
            told += "" if refusals else f", {with_so_many}"
            raise StepError(_NO_LESS.format(told, "" if self._takes_one else _TAKES_NONE))
        if now != wanted:
            refusal = follower.revise({_KEY: wanted}, told)
            if refusal:
                raise StepError(f"{told}, and micro-batches of {wanted} were refused: {refusal}")
        told += f": the step is taken again in micro-batches of {wanted} instead of {largest} samples"
        if follower.ranks.rank == 0:
            _logger.warning("%s", told)
        self.warn()
        details = {"micro_batch": wanted, "was": largest, "ranks": sorted(failures)}
        follower.reports.tell("out-of-memory", step=self._counts.global_step, text=told, details=details)

    def warn(self) -> None:
        """Tell of an allocator that finds memory hard to get."""
        warning = self._memory.warning()
        if warning is not None:
            _logger.warning("%s: %s", self._follower.ranks.names[self._follower.ranks.rank], warning)
