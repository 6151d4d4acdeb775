"""The appliers that change how a model in training is sharded, and what they report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from elastic_ext.config.apply import AskAgainLater, Declined
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.keys import TORCH, CommunicationSection, ParallelismSection, keys_of
from elastic_ext.errors import ElasticError, RanksFailedError
from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.fsdp.reshard.change import Change, ChangeCost
from elastic_ext.fsdp.reshard.transition import Transition

if TYPE_CHECKING:
    from elastic_ext.config.follower import ConfigFollower

    from .training import Training

__all__ = ["FixedSharding", "Parallelism", "ReshardReport", "plan_of", "values_of"]


# --- the appliers that change how a model in training is sharded, and what they report -------------------------------
# The sections ``parallelism`` and ``communication`` of a config together name one plan. Whether it can be put on is
# found out on every rank before any of them changes something.

_PLANNED = {**keys_of(ParallelismSection), **keys_of(CommunicationSection)}
_PATHS: Mapping[str, str] = {path.partition(".")[2]: path for path in _PLANNED}
"""The dotted config key of each field of a plan."""
_LEFT_TO_TORCH = ("prefetch", "bucket_cap_mb")  # where a plan has None

_HALF = (
    "a change of how the model is spread failed halfway, and parts of it lie by either plan: start the job again, "
    "which resumes from a checkpoint"
)
_NOTHING = "nothing has changed, since {}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReshardReport:
    """What a change of plan has done and cost."""

    old: ParallelPlan
    new: ParallelPlan
    steps: tuple[str, ...]
    seconds: float
    """How long training stood still on this rank."""
    moved_bytes: int
    """Bytes that were sent between all ranks."""
    extra_bytes: int
    """The most memory that a rank took for a while, beside what its state took before or after."""
    replaced: int
    """How many parameters are other objects now: optimizers and registered state have them."""

    def details(self) -> dict[str, object]:
        """The report as plain values, for the details of an event."""
        return {
            "old": values_of(self.old),
            "new": values_of(self.new),
            "steps": list(self.steps),
            "seconds": self.seconds,
            "moved_bytes": self.moved_bytes,
            "extra_bytes": self.extra_bytes,
            "replaced": self.replaced,
        }

    def __str__(self) -> str:
        told = f"{_in_words(self.old)} -> {_in_words(self.new)} in {self.seconds:.3f} s"
        if "spread" not in self.steps:
            return told
        told += f", {self.moved_bytes} bytes between ranks, {self.extra_bytes} bytes of memory for a while"
        return told + (f"; {self.replaced} parameters are other objects now" if self.replaced else "")


class Parallelism:
    """Changes how a model is sharded in training; applies the config's sections parallelism and communication."""

    paths = frozenset(_PATHS.values())
    """The dotted keys of a config that name a plan."""

    def __init__(self, training: Training) -> None:
        """``training`` is one of a model with a plan."""
        spread = training.spread
        self.report: ReshardReport | None = None
        """The report of the last change of plan; None before the first."""
        assert spread.plan is not None
        self.startup_values: Mapping[str, object] = values_of(spread.plan)
        """The plan by which the model was given to the trainer, as values of config keys."""
        self._spread = spread
        self._training = training
        self._prepared: tuple[ParallelPlan, Transition, Change | None] | None = None

    def appliers(self) -> list[_Section]:
        """An applier for each of the two sections, in the order in which they are called."""
        return [_Section("communication", self), _Section("parallelism", self)]

    def check(self, new: ElasticConfig) -> str | None:
        """Why the plan that ``new`` names cannot be put on, None where it can."""
        training, self._prepared = self._training, None
        if not any(new.get(path) is not None for path in _PATHS.values()):
            return None
        try:
            plan = plan_of(new)
            made, told = self._spread.transition(plan, training.optimizers)
            if made is None:
                return told
            if "recompute" in made.steps and plan.ratio and not training.steps.has_not_begun:
                is_tried, why_not = self._spread.try_recomputing()
                if not is_tried:
                    raise AskAgainLater
                if why_not is not None:
                    return why_not
            change = None
            if "spread" in made.steps:
                known = training.let_go_of_parameters()
                change = self._spread.prepare(plan, training.optimizers, training.registered_tensors(), known)
                made = replace(made, items=tuple(change.bucket_plan.items))  # with what is registered
        except (ValueError, ElasticError) as error:
            return str(error)
        self._prepared = plan, made, change
        return None

    def apply(self, new: ElasticConfig) -> None:
        """Change the model to the plan that ``new`` names; all ranks call this between two steps, after none refused.

        Declined where nothing has changed.
        """
        training = self._training
        assert self._spread.plan is not None
        if plan_of(new) == self._spread.plan:
            return
        assert self._prepared is not None, "it was checked just before"
        (plan, made, change), self._prepared = self._prepared, None
        error: Exception | None = None
        try:
            training.session.wait_for_staging()
            self._spread.wait()  # for the step before, which is none of the change
        except Exception as caught:
            error = caught
        try:
            self._all_or_raise(error)
        except RanksFailedError as failure:
            raise Declined(_NOTHING.format(_told_of(failure))) from failure
        began, old = time.perf_counter(), self._spread.plan
        try:
            moved = self._spread.change(made, change, self._all_or_raise)
        except Exception as error:
            if change is None or not change.is_as_before:
                training.steps.give_up(_HALF)
                raise
            raise Declined(_NOTHING.format(_told_of(error))) from error
        except BaseException:  # whoever interrupts it is told what became of it by the next call
            training.steps.give_up(_HALF)
            raise
        finally:
            training.session.take_up_model()  # also where it has gone back: DDP is another object by then
        self._spread.wait()
        self.report = _report(old, plan, made, moved, time.perf_counter() - began)
        training.session.tell_resharded(self.report)

    def _all_or_raise(self, error: BaseException | None) -> None:
        self._training.ranks.all_or_raise(error, "changing how the model is spread")

    def forget(self) -> None:
        """Drop a change that was checked and is not made now, with the tensors that it would have moved."""
        self._prepared = None

    def close(self) -> None:
        """Drop a change that was checked, and free what moving tensors needs."""
        self.forget()
        self._spread.close()


class _Section:
    """The applier of one of the two sections; both are applied by ``Parallelism``."""

    def __init__(self, section: str, owner: Parallelism) -> None:
        self.section = section
        self._owner = owner

    def check(self, new: ElasticConfig) -> str | None:
        return self._owner.check(new) if self.section == "parallelism" else None

    def apply(self, old: ElasticConfig, new: ElasticConfig) -> None:
        self._owner.apply(new)


def values_of(plan: ParallelPlan) -> dict[str, object]:
    """A plan as values of config keys: all of its fields, whatever was in force before."""
    values: dict[str, Any] = {path: getattr(plan, name) for name, path in _PATHS.items()}
    values |= {_PATHS[name]: TORCH for name in _LEFT_TO_TORCH if getattr(plan, name) is None}
    return {path: value for path, value in values.items() if value is not None}  # a degree goes with the strategy


def plan_of(config: ElasticConfig) -> ParallelPlan:
    """The plan that a config names."""
    given = {name: config.get(path) for name, path in _PATHS.items()}
    given |= {name: None for name in _LEFT_TO_TORCH if given[name] == TORCH}
    kept: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return ParallelPlan(**kept)


def _report(
    old: ParallelPlan, new: ParallelPlan, made: Transition, moved: ChangeCost | None, seconds: float
) -> ReshardReport:
    return ReshardReport(
        old=old,
        new=new,
        steps=made.steps,
        seconds=seconds,
        moved_bytes=0 if moved is None else moved.sent_bytes,
        extra_bytes=0 if moved is None else moved.extra_bytes,
        replaced=0 if moved is None else moved.num_replaced,
    )


def _told_of(error: Exception) -> str:
    """The text of a failure, with that of each rank that has failed."""
    if isinstance(error, RanksFailedError):
        ends = {rank: text.rstrip().rpartition("\n")[2] for rank, text in error.tracebacks.items()}
        return "; ".join(f"rank {rank} raised {end}" for rank, end in ends.items())
    return str(error) if isinstance(error, ElasticError) else f"{type(error).__name__}: {error}"


def _in_words(plan: ParallelPlan) -> str:
    told: str = plan.strategy
    if plan.shard_degree is not None:
        told += f" of {plan.shard_degree}"
    if not plan.is_replicated:
        told += f", unit {plan.unit}"
    return told + (f", {plan.ratio:.0%} recomputed" if plan.ratio else "")


# --- refuses a config that asks for another sharding, where the model's cannot be changed ----------------------------


class FixedSharding:
    """The applier of the section ``parallelism`` for a model whose sharding cannot be changed: it refuses that."""

    section = "parallelism"
    only_checks = True
    _PATHS = tuple(path for path, key in _PLANNED.items() if key.knob is not None and key.knob.cost == "move")

    def __init__(self, reason: str, follower: ConfigFollower) -> None:
        self._reason = reason
        self._follower = follower

    def check(self, new: ElasticConfig) -> str | None:
        now = self._follower.config
        changed = [path for path in self._PATHS if new.get(path) is not None and new.get(path) != now.get(path)]
        return f"{', '.join(changed)} cannot be changed: {self._reason}" if changed else None

    def apply(self, old: ElasticConfig, new: ElasticConfig) -> None:
        """Do nothing: other appliers may act on other keys of the section."""
