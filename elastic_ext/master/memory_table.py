"""What a rank's device would hold at its peak, for micro-batches, plans and shares of blocks computed again. Pure.

All numbers are those that the tuner has: ``strategy.memory`` predicts, and here is said of what, and what of it fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from elastic_ext.config.keys import TuningSection
from elastic_ext.fsdp.plan import ParallelPlan, Strategy
from elastic_ext.records.metrics import JobFacts
from elastic_ext.tuner.memory import HEADROOM, Memory, usable_bytes
from elastic_ext.tuner.space import Point, Shape, point_of, shape_of

__all__ = ["Asked", "Limit", "Plan", "Row", "limit_of", "plans_asked", "predicted", "present_plan"]

_STRATEGY, _DEGREE = "parallelism.strategy", "parallelism.shard_degree"
_HYBRID: Strategy = "hybrid_shard"


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What to predict; what is left out is as the job can have it, or as it is."""

    micro_batches: tuple[int, ...] = ()
    strategy: Strategy | None = None
    shard_degree: int | None = None
    unit: int | Literal["whole"] | None = None
    ratios: tuple[float, ...] = ()


class Plan(NamedTuple):
    """How the model would lie: a column of a table."""

    strategy: str
    shard_degree: int
    """Ranks that share a copy of the model; 1 where each has a whole one."""
    unit: int
    """Blocks that are gathered at once; 0 where nothing is."""

    def __str__(self) -> str:
        return f"{self.strategy}/{self.shard_degree}" if self.strategy == _HYBRID else self.strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One prediction."""

    micro_batch: int
    plan: Plan
    activation_checkpoint: float
    peak_bytes: int | None
    """None where nothing is known of it."""
    passes_bytes: int | None
    fits: bool | None
    """Under the limit; None where there is none that is known."""
    is_refuted: bool
    """Steps like these have run out of memory, whatever is predicted."""
    is_present: bool
    """As the job is now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """What a rank may take of its device's memory."""

    capacity_bytes: int | None
    """What there is for a process, where that is known,"""
    allowed_bytes: int | None
    """... what a person allows of it,"""
    headroom: float
    """... and the share of the less of both that stays free."""

    @property
    def usable_bytes(self) -> int | None:
        """What may be used; None where no limit is known."""
        usable = usable_bytes(self.capacity_bytes, self.allowed_bytes, self.headroom)
        return None if usable is None else int(usable)


def limit_of(facts: JobFacts, tuning: TuningSection) -> Limit:
    """The one that holds in a job whose config says this of tuning."""
    return Limit(
        capacity_bytes=None if facts.memory is None else facts.memory.capacity_bytes,
        allowed_bytes=tuning.memory_bytes,
        headroom=HEADROOM if tuning.headroom is None else tuning.headroom,
    )


def present_plan(facts: JobFacts) -> Plan:
    """By which the model lies now."""
    return _plan(shape_of(point_of(facts.values), facts))


def predicted(facts: JobFacts, asked: Asked, limit: Limit) -> list[Row]:
    """By share of blocks, by micro-batch, by plan; ValueError for what no plan of this job can be."""
    present = point_of(facts.values)
    now = shape_of(present, facts)
    points = plans_asked(facts, asked)
    ratios = asked.ratios or (now.activation_checkpoint,)
    if any(ratios) and not facts.num_blocks:
        raise ValueError(
            f"the share of blocks to compute again is {max(ratios):g}, and the model has no repeated blocks that were "
            "found or named; leave it out, or name them with units= in the script"
        )
    rows = []
    for ratio in dict.fromkeys(ratios):
        for micro_batch in dict.fromkeys(asked.micro_batches or _sizes(facts.share, now.micro_batch)):
            of_size = _with_share(facts, micro_batch)
            memory = Memory(of_size)
            rows += [
                _row(memory, of_size, point._replace(batch_size=micro_batch, activation_checkpoint=ratio), now, limit)
                for point in points
            ]
    return rows


def plans_asked(facts: JobFacts, asked: Asked) -> list[Point]:
    """Of each plan a point; ValueError where what is asked for can be no plan on these ranks."""
    present = point_of(facts.values)
    named = _named(asked)
    if named is not None:
        points = _points_of(named, facts, present, asked)
    else:
        choices = [str(each) for each in facts.choices.get(_STRATEGY, ())]
        strategies = dict.fromkeys([*choices, str(present.strategy or "no_shard")])
        points = [point for each in strategies for point in _points_of(each, facts, present, asked)]
    if asked.unit is not None and not any(shape_of(point, facts).is_sharded for point in points):
        raise ValueError(
            f"unit is {asked.unit} with the strategy {points[0].strategy}, where nothing is gathered; choose another "
            "strategy or leave it out"
        )
    return list({_plan(shape_of(point, facts)): point for point in points}.values())


def _points_of(strategy: str, facts: JobFacts, present: Point, asked: Asked) -> list[Point]:
    """Those of one strategy: of hybrid_shard one for each degree; ValueError where it is asked for, and has none."""
    unit = present.unit if asked.unit is None else asked.unit
    own = _own_degree(strategy, facts, present)
    points, whys_not = [], []
    for degree in _degrees(strategy, facts, own, asked):
        try:
            plan = ParallelPlan(strategy, shard_degree=degree)  # type: ignore[arg-type]
            plan.degrees(facts.world_size, facts.num_local)
        except ValueError as error:
            if own is None or degree != own:
                whys_not.append(error)
                continue
        kept = degree if strategy == _HYBRID else None
        points.append(present._replace(strategy=strategy, shard_degree=kept, unit=unit))
    if whys_not and not points and strategy == _named(asked):
        raise whys_not[0]
    return points


def _named(asked: Asked) -> Strategy | None:
    """The strategy that is asked for; degrees are chosen with one alone."""
    return asked.strategy or (_HYBRID if asked.shard_degree is not None else None)


def _own_degree(strategy: str, facts: JobFacts, present: Point) -> int | None:
    """Of hybrid_shard where the model lies by it now, which it does whatever is said of its ranks."""
    return shape_of(present, facts).shard_degree if strategy == _HYBRID == present.strategy else None


def _degrees(strategy: str, facts: JobFacts, own: int | None, asked: Asked) -> Sequence[int | None]:
    if asked.shard_degree is not None or strategy != _HYBRID:
        return [asked.shard_degree]
    known = {each for each in (*facts.choices.get(_DEGREE, ()), own) if type(each) is int}
    return sorted(known) or [None]


def _sizes(share: int, present: int) -> list[int]:
    """1, 2, 4, ... up to a rank's part of a step, and the present one."""
    powers = [1 << exponent for exponent in range(share.bit_length())]
    return sorted({*powers, present, share})


def _with_share(facts: JobFacts, micro_batch: int) -> JobFacts:
    """The job, or one like it whose steps have as many samples as that on a rank."""
    if micro_batch <= facts.share:
        return facts
    return replace(facts, share=micro_batch, global_batch=micro_batch * facts.num_replicas)


def _row(memory: Memory, facts: JobFacts, point: Point, now: Shape, limit: Limit) -> Row:
    shape, peak, usable = shape_of(point, facts), memory.peak(point), limit.usable_bytes
    is_alike = _plan(shape) == _plan(now) and shape.activation_checkpoint == now.activation_checkpoint
    return Row(
        micro_batch=shape.micro_batch,
        plan=_plan(shape),
        activation_checkpoint=shape.activation_checkpoint,
        peak_bytes=None if peak is None else peak.num_bytes,
        passes_bytes=None if peak is None else peak.passes_bytes,
        fits=None if peak is None or usable is None else peak.num_bytes <= usable,
        is_refuted=is_alike and facts.bound is not None and shape.micro_batch >= facts.bound,
        is_present=is_alike and shape.micro_batch == now.micro_batch,
    )


def _plan(shape: Shape) -> Plan:
    return Plan(strategy=shape.strategy, shard_degree=shape.shard_degree, unit=shape.unit)
