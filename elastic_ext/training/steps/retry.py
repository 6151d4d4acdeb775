"""Micro-steps that are run again in smaller micro-batches where memory does not suffice, and how many samples a rank
takes at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from elastic_ext.config.apply import Proposal
from elastic_ext.config.control_word import REFUSES_SINGLE_SAMPLE, Purpose
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.errors import ElasticError, StepError, StepUndone
from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.torch_private.out_of_memory import advise, is_out_of_memory, let_go

from .oom_guard import StepFailure

if TYPE_CHECKING:
    from elastic_ext.training.training import Training

__all__ = ["Attempts", "Growing"]

_logger = logging.getLogger(__name__)


# --- how many samples a rank takes at once ---------------------------------------------------------------------------
# Fewer where memory did not suffice, more where somebody asks for it.
#
# A single sample is no size to go to where a layer refuses one: that is found out by trying.
#
# What did not fit is remembered, with the plan by which the model lay then.

_KEY = "dataloader.batch_size"
_REASON = "trainer.try_grow()"
_NO_LESS = (
    "{}, and micro-batches cannot be smaller: have activations recomputed (activation_checkpoint), shard the model "
    "(trainer.reshard), or make it smaller{}; the step was taken back"
)
_TAKES_NONE = ", or have its layers take a single sample, as GroupNorm does and BatchNorm does not"
_TOO_FEW = (
    "{} after step {}: the next step has so few samples that a rank has a single one, in micro-batches of "
    "{} too, as they were before memory ran out; leave the last samples of an epoch out (drop_last=True), have another "
    "global_batch_size, or layers that take a single sample, as GroupNorm does and BatchNorm does not; the step was "
    "taken back"
)
_FIXED = "trainer.try_grow() needs a dataloader that can be told another size of micro-batches; use ElasticDataLoader"
_WHOLE = "a micro-batch is a rank's whole part of the global batch already: {} samples"
_BOUND = "memory ran out with {} samples at once, and {} would be no fewer"


class Growing:
    """Makes micro-batches smaller where memory runs out, and larger on request; remembers what did not fit.

    All ranks call ``shrink`` and ``check`` together.
    """

    def __init__(self, training: Training) -> None:
        self._follower = training.follower
        self._batches = training.batches
        self._counts = training.counts
        self._memory = training.memory
        self._spread = training.spread
        self._bounds: dict[ParallelPlan | None, int] = {}  # samples that did not fit, by plan
        self._failed_with = 0  # samples at once, when memory ran out last
        self._size_before = 0  # of micro-batches, when memory first ran out
        self._takes_one = True  # as far as is known

    @property
    def has_shrunk(self) -> bool:
        """Whether micro-batches are smaller than the script would have them, since memory ran out."""
        return self._failed_with > 0

    @property
    def bound(self) -> int | None:
        """The fewest samples at once that did not fit into memory under the present plan; None where all did."""
        return self._bounds.get(self._spread.plan)

    def tell(self) -> dict[str, Any]:
        """What was learnt of memory so far, as JSON for ranks that join."""
        bounds = [[None if plan is None else asdict(plan), bound] for plan, bound in self._bounds.items()]
        return {
            "bounds": bounds,
            "failed_with": self._failed_with,
            "size_before": self._size_before,
            "takes_one": self._takes_one,
        }

    def join(self, told: Mapping[str, Any]) -> None:
        """Know what the ranks have learnt that this one has joined, so that all shrink alike."""
        self._bounds = {None if plan is None else ParallelPlan(**plan): bound for plan, bound in told["bounds"]}
        self._failed_with, self._size_before = told["failed_with"], told["size_before"]
        self._takes_one = told["takes_one"]

    def try_grow(self) -> Proposal:
        """Propose micro-batches twice as large, unless they are known not to fit into memory."""
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
        """Forget what passes take of memory, since the model has another plan."""
        self._memory.per_sample = None

    def shrink(self, largest: int, failures: Mapping[int, str]) -> None:
        """Put smaller micro-batches in force after ``largest`` samples at once did not fit; with all ranks.

        Where a layer refused a single sample, sizes that leave one are passed over. StepError where no size is left.
        """
        follower, plan = self._follower, self._spread.plan
        refusals = {rank: text for rank, text in failures.items() if text.startswith(REFUSES_SINGLE_SAMPLE)}
        self._takes_one &= not refusals
        if len(refusals) < len(failures):
            self._failed_with = largest
            self._size_before = self._size_before or self._batches.micro_batch
            if largest >= self._batches.largest:  # else it was an epoch's tail, whose like has fitted
                self._bounds[plan] = min(largest, self._bounds.get(plan, largest))
        follower.meet(Purpose.RETRY_SMALLER, doubt="took back a step that ran out of memory")
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
        follower.reports.write_event("out-of-memory", step=self._counts.global_step, text=told, details=details)

    def warn(self) -> None:
        """Warn where the allocator has found memory hard to get since the last time."""
        warning = self._memory.warning()
        if warning is not None:
            _logger.warning("%s: %s", self._follower.ranks.names[self._follower.ranks.rank], warning)


# --- micro-steps that are functions, and come again in smaller micro-batches where memory does not suffice -----------
# Only a function can be run again with nothing of the first time left: what it made goes when it is left, and the
# exception with it.

_Result = TypeVar("_Result")

_CANNOT_SHRINK = (
    "{}. The step was taken back. It is not taken again in smaller micro-batches, since this dataloader has a batch "
    "size of its own; use an ElasticDataLoader"
)
_NOT_GUARDED = (
    "{}. Other ranks may be waiting for this one's gradients, so training ends here, to go on from a checkpoint; "
    'StepOptions(guard="always") has steps taken again wherever memory runs out, where the model allows it'
)
_CANNOT_BE_GUARDED = (
    "{}. Other ranks may be waiting for this one's gradients, so training ends here, to go on from a checkpoint: the "
    "step cannot be taken again, since "
)
_NOT_KEPT = (
    "{}. The step was taken back, but for buffers and registered state that it may have changed; "
    'StepOptions(guard="always") keeps them, and has the step taken again in smaller micro-batches'
)


_OFF = "{}. The step was taken back; with ELASTIC_EXT=off micro-batches stay as large as they are"


class Attempts:
    """Runs functions as micro-steps, and has the step come again in smaller micro-batches where memory runs out."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._steps, self._guarding = training.steps, training.guarding
        self._growing = training.growing if training.follower.settings.enabled else None  # where nothing may change
        self.on_batch: Callable[[Any], None] | None = None
        """Called with a function's batch before the function is called."""

    def run(
        self, function: Callable[..., _Result], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> _Result | None:
        """Take a micro-step by calling ``function``; gives its result, or None where the step comes again."""
        steps = self._steps
        if self.on_batch is not None:
            self.on_batch(_batch_of(arguments, options))
        failures: dict[int, str] | None = None
        steps.by_function, steps.failure = True, None
        try:
            with steps:
                return function(*arguments, **options)
            return None  # ranks were lost, and the step was undone
        except StepUndone as undone:  # all ranks have heard of it
            failures = undone.failures
        except (RuntimeError, MemoryError, ValueError) as error:
            failure = steps.failure
            if failure is None or not (is_out_of_memory(error) or self._has_come_to_one(failure)):
                raise
            why_not = self._why_not(failure)
            if why_not is not None:
                advise(error, why_not)
                raise
        finally:
            steps.by_function = False
        let_go()
        largest = steps.largest
        assert largest is not None
        assert self._growing is not None
        if failures is None:
            failures = self._tell(steps.failure)
        self._growing.shrink(largest, failures)
        self._guarding.expect_again()
        return None

    def _has_come_to_one(self, failure: StepFailure) -> bool:
        """Whether a layer refuses a single sample, which it was given because memory ran out before."""
        return bool(failure.refusal) and self._growing is not None and self._growing.has_shrunk

    def _tell(self, failure: StepFailure | None) -> dict[int, str]:
        """Tell the other ranks that memory ran out here; gives the failures of all, by rank."""
        assert failure is not None
        try:
            self._guarding.hear(str(failure))
        except StepUndone as undone:
            return undone.failures
        raise AssertionError("a failure was told, and nothing was undone")

    @property
    def _leaves_nothing(self) -> bool:
        """Whether passes change nothing but gradients: there are no buffers and no registered state."""
        return not self._training.registered and next(self._training.model.buffers(), None) is None

    def _why_not(self, failure: StepFailure) -> str | None:
        """Why the step is not taken again after a failure, None where it is."""
        if self._growing is None:
            return _OFF
        if failure.largest is None:
            return _CANNOT_SHRINK
        if failure.is_guarded:
            return None
        if self._training.gradients.sharing.has_others:
            why_not = self._guarding.why_not
            return (
                _NOT_GUARDED if why_not is None else _CANNOT_BE_GUARDED + why_not.replace("{", "{{").replace("}", "}}")
            )
        return None if failure.keeps_all or self._leaves_nothing else _NOT_KEPT


def _batch_of(arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The batch in a function's arguments, as a loader would have given it."""
    if options and not arguments:
        return options
    return arguments[0] if len(arguments) == 1 else arguments
