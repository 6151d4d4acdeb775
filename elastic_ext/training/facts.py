"""What rank 0 reports of its job and model to whoever tunes it: what can be changed, and what is in force."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, get_args, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from elastic_ext.config.keys import TUNABLE
from elastic_ext.doctor.hardware import group_limits
from elastic_ext.errors import ConfigError
from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.ranks.world import World
from elastic_ext.records.metrics import JobFacts, ModelProfile
from elastic_ext.strategies import STRATEGIES, StrategyName

from .batches import LOADER_SETTINGS
from .parallelism import values_of

if TYPE_CHECKING:
    from .training import Training

__all__ = [
    "FactsOfJob",
    "processors",
    "profile_of",
    "tell_of_model",
]


# --- what can be changed in the job, and what is in force ------------------------------------------------------------
# What rank 0 tells of its job, for whoever tunes it: what can be changed while it trains, and what is in force.
#
# A key can be changed where something in this job acts upon it between two steps: a loader that can be told, a model
# that can be spread otherwise. What is learned stays as it is: keys that change it are left to people, but for the
# number of samples of a step where the user lets it be chosen.

_BATCH = "global_batch_size"
_SIZE = "dataloader.batch_size"
_STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)
_WITH_DEGREE = tuple(name for name in _STRATEGIES if STRATEGIES[name].has_degree)
_UNITS = (1, 2, 4)
_MOST_WORKERS, _FEW_WORKERS = 64, 8
_LEARNED = "what the model learns depends on this value, so that the tuner leaves it to people"
_UNTOLD = "the {} of this dataloader cannot change while training runs; that of an ElasticDataLoader can"
_NORMALISED = "the model normalises over micro-batches (BatchNorm), so that another size would change what is learned"
_ALONE = "one rank trains this model: there is nobody to share it with"
_NO_PLAN = "the ranks do not share this model's gradients"
_NO_BLOCKS = "the model has no repeated blocks that were found or named"


@runtime_checkable
class _ChangingSource(Protocol):
    """A loader that takes workers, prefetching and pinning from the config during a loop."""

    @property
    def fixed_settings(self) -> Mapping[str, str]:
        """The keys of the section ``dataloader`` that cannot change in that loop, each with the reason."""

    @property
    def least_workers(self) -> int:
        """The fewest workers that the loader can have."""


@dataclass(frozen=True, slots=True)
class _Choices:
    """Which config keys this job can change while it trains, to what, and why it cannot change the others."""

    free: Mapping[str, Sequence[Any]]
    """By key, the values that it can take; empty for all that the key allows."""
    fixed: Mapping[str, str]
    """By key, why it cannot be changed."""

    def __or__(self, other: _Choices) -> _Choices:
        return _Choices({**self.free, **other.free}, {**self.fixed, **other.fixed})


class FactsOfJob:
    """What rank 0 reports of one job to whoever tunes it; other ranks report nothing."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._model, self._batches, self._spread = training.model, training.batches, training.spread
        self._follower = training.follower
        self._why_not_reshard = training.why_not_reshard
        self._num_processors: int | None = None
        self._choices: _Choices | None = None
        self._num_parameters = 0
        self._last: JobFacts | None = None

    def take_world(self, world: World) -> None:
        """Look anew for what a job of these ranks can change, and tell of it where this rank is the first."""
        self._num_processors = self._choices = self._last = None

    def tell(self) -> None:
        """Write the job's facts, where they differ from those written last."""
        if self._follower.ranks.rank > 0 or not self._follower.settings.enabled:
            return
        facts = self.look()
        if facts is not None and (self._last is None or replace(facts, time=self._last.time) != self._last):
            self._last = facts
            self._follower.reports.write_facts(facts)

    def look(self) -> JobFacts | None:
        """The job's facts as of now; None where it is not known how many samples a step has."""
        follower, batches = self._follower, self._batches
        analyzer = self._training.analyzer
        global_batch, num_replicas = batches.step_samples, self._training.gradients.sharing.num_ranks
        if not global_batch:
            return None
        ranks, reports = follower.ranks, follower.reports
        num_local = sum(name.host == ranks.names[0].host for name in ranks.names)
        if self._num_processors is None:
            self._num_processors = max(processors() // num_local, 1)
        share = batches.share or -(-global_batch // num_replicas)
        choices = self._with_batch(self._choices or self._looked_for(share, self._num_processors))
        device = next((part.device.type for part in self._model.parameters()), "cpu")
        return JobFacts(
            time=time.time(),
            restart=follower.settings.restart,
            world_size=ranks.world_size,
            members=ranks.world.members,
            num_local=num_local,
            device=device,
            num_processors=self._num_processors,
            config_version=follower.config.version,
            config_revision=follower.config.revision,
            values=self._values(global_batch, share),
            choices=choices.free,
            fixed=choices.fixed,
            global_batch=global_batch,
            share=share,
            num_replicas=num_replicas,
            bound=self._training.growing.bound,
            num_blocks=self._spread.num_blocks,
            num_parameters=self._counted(),
            census=reports.census,
            calibration=reports.calibration,
            memory=None if analyzer is None else analyzer.facts(),
            learning=self._training.learning.facts(),
        )

    def _values(self, global_batch: int, share: int) -> dict[str, Any]:
        """By key the value in force: the config's, or what the loader and the plan say where they know better."""
        config, batches, plan = self._follower.config, self._batches, self._spread.plan
        values: dict[str, Any] = {key: config.get(key) for key in TUNABLE}
        values["global_batch_size"] = global_batch
        micro_batch = values[_SIZE]
        values[_SIZE] = min(micro_batch, share) if isinstance(micro_batch, int) else share
        values.update(batches.loader_values)
        if plan is not None:
            values.update({key: None for key in values if key.startswith(("parallelism.", "communication."))})
            values.update(values_of(plan))
        return values

    def _counted(self) -> int:
        """The number of elements of the model's parameters; 0 while some have no size, before the first step."""
        if self._num_parameters == 0:
            parts = list(self._model.parameters())
            if any(map(is_lazy, parts)):
                return 0
            self._num_parameters = sum(part.numel() for part in parts)
        return self._num_parameters

    def _looked_for(self, share: int, num_processors: int) -> _Choices:
        """What can be changed; looked for once the model has a plan, and the same from then on.

        From another plan much the same could be said, and whoever tunes is to choose from the same all along.
        """
        found = self._loading(share, num_processors) | self._spreading(self._spread.plan)
        free = {key: tuple(given) for key, given in found.free.items()}
        fixed = {key: found.fixed.get(key, _LEARNED) for key in TUNABLE if key not in free}
        choices = _Choices(free, fixed)
        if self._spread.plan is not None or self._why_not_reshard is not None:
            self._choices = choices
        return choices

    # ---- samples ----

    def _with_batch(self, choices: _Choices) -> _Choices:
        """``choices`` with the key of a step's samples, where the config in force lets the tuner choose that."""
        if self._training.learning.lets_grow:
            fixed = {key: why for key, why in choices.fixed.items() if key != _BATCH}
            return _Choices({**choices.free, _BATCH: ()}, fixed)
        why_not = self._training.learning.why_not
        return _Choices(choices.free, {**choices.fixed, _BATCH: why_not}) if why_not else choices

    def _loading(self, share: int, num_processors: int) -> _Choices:
        loader = self._batches.loader
        free: dict[str, Sequence[Any]] = {}
        fixed: dict[str, str] = {}
        why_not = self._why_not_resize(share)
        if why_not is None:
            free[_SIZE] = ()
        else:
            fixed[_SIZE] = why_not
        is_told = isinstance(loader, _ChangingSource) and self._batches.loader_applier is not None
        why_fixed = loader.fixed_settings if isinstance(loader, _ChangingSource) else {}
        for name in LOADER_SETTINGS:
            key = f"dataloader.{name}"
            if not is_told:
                fixed[key] = _UNTOLD.format(name)
            elif name in why_fixed:
                fixed[key] = why_fixed[name]
            else:
                free[key] = ()
        least = loader.least_workers if isinstance(loader, _ChangingSource) else 0
        if least > 0 and "dataloader.num_workers" in free:
            most = min(max(2 * num_processors, _FEW_WORKERS), _MOST_WORKERS)
            free["dataloader.num_workers"] = range(least, most + 1)
        return _Choices(free, fixed)

    def _why_not_resize(self, share: int) -> str | None:
        """Why micro-batches cannot be of another size, or must not, None where they can."""
        if self._batches.source is None:
            return _UNTOLD.format("batch_size")
        if any(isinstance(part, _BatchNorm) for part in self._model.modules()):
            return _NORMALISED
        applier, now = self._batches.loader_applier, self._batches.largest
        if applier is None or share == 1:
            return None
        try:
            other = self._follower.config.revise({_SIZE: now // 2 or 2}, "to be asked for")
        except ConfigError as error:
            return str(error)
        return applier.check(other)

    # ---- how the model is spread ----

    def _spreading(self, plan: ParallelPlan | None) -> _Choices:
        """The choices of keys that change the plan, found by asking which changes would be accepted."""
        keys = [key for key in TUNABLE if key.startswith(("parallelism.", "communication."))]
        if plan is None or self._why_not_reshard is not None:
            why = self._why_not_reshard or _NO_PLAN
            return _Choices({}, dict.fromkeys(keys, why))
        free, fixed = dict(self._strategies(plan)), {}
        why_not_recompute = self._why_not(replace(plan, activation_checkpoint=0.0 if plan.ratio else 1.0))
        if self._spread.num_blocks == 0:
            why_not_recompute = _NO_BLOCKS
        if why_not_recompute is None:
            free["parallelism.activation_checkpoint"] = ()
        else:
            fixed["parallelism.activation_checkpoint"] = why_not_recompute
        other = _ALONE if self._spread.num_ranks == 1 else "the model can be given no other value of this key"
        fixed |= {key: other for key in keys if key not in free and key not in fixed}
        return _Choices(free, fixed)

    def _strategies(self, plan: ParallelPlan) -> Iterator[tuple[str, Sequence[Any]]]:
        """The choices of strategy, shard degree, unit, prefetch and bucket size, by plans that would be accepted."""
        num_ranks = self._spread.num_ranks
        if num_ranks == 1:
            return
        plain = ParallelPlan(plan.strategy, unit=plan.unit, activation_checkpoint=plan.activation_checkpoint)
        plans = {name: replace(plain, strategy=name) for name in _STRATEGIES if name not in _WITH_DEGREE}
        possible = [name for name, each in plans.items() if name == plan.strategy or self._why_not(each) is None]
        degrees = [
            degree
            for degree in range(2, num_ranks)
            if num_ranks % degree == 0
            and any(self._why_not(replace(plain, strategy=each, shard_degree=degree)) is None for each in _WITH_DEGREE)
        ]
        possible += [name for name in _WITH_DEGREE if degrees or name == plan.strategy]
        if degrees:
            yield "parallelism.shard_degree", degrees
        if len(possible) > 1:
            yield "parallelism.strategy", possible
        over_all = [name for name in plans if STRATEGIES[name].is_sharded]
        sharded = next((name for name in (plan.strategy, *possible) if name in over_all), None)
        if sharded is not None:
            base = plan if plan.strategy == sharded else plans[sharded]
            units = [each for each in _UNITS if each <= max(self._spread.num_blocks, 1)]
            units = [each for each in units if each == base.unit or self._why_not(replace(base, unit=each)) is None]
            if units:
                yield "parallelism.unit", units
            yield "parallelism.prefetch", ()
        if any(not STRATEGIES[name].is_sharded for name in possible):
            yield "communication.bucket_cap_mb", ()

    def _why_not(self, plan: ParallelPlan) -> str | None:
        made, told = self._spread.transition(plan, self._training.optimizers)
        return told if made is None else None


def processors() -> int:
    """How many processors this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = group_limits().quota_cores
    return allowed if quota is None else max(min(allowed, int(quota)), 1)


# --- what a rank reports of its model --------------------------------------------------------------------------------
# What a rank reports of its model as training begins, and each time that the model was resharded: for people, and those
# who say how it could be trained better.

_MOST_BLOCKS = 8


def tell_of_model(training: Training) -> None:
    """Write which model is trained, and how it is spread now."""
    plan, sharing = training.spread.plan, training.gradients.sharing.name
    training.follower.reports.write_model(
        profile_of(
            training.model,
            training.optimizers,
            rank=training.ranks.rank,
            sharing=sharing,
            plan=None if plan is None else str(plan),
        )
    )


def profile_of(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, rank: int, sharing: str, plan: str | None
) -> ModelProfile:
    """What ``model`` is, and what this rank holds of it and of its optimizers' state; ``sharing`` says how."""
    parameters = [each for each in model.parameters() if not is_lazy(each)]  # those have no size before the first step
    kept = [each for optimizer in optimizers for each in optimizer.state.values() if isinstance(each, Mapping)]
    state = [value for each in kept for value in each.values()]
    kinds: Counter[str] = Counter()
    for each in parameters:
        kinds[str(each.dtype).removeprefix("torch.")] += each.numel()
    blocks = Counter(type(each).__name__ for each in model.modules() if any(True for _ in each.children()))
    repeated = [f"{number} x {name}" for name, number in blocks.most_common() if number > 1]
    return ModelProfile(
        time=time.time(),
        rank=rank,
        name=type(model).__name__,
        num_parameters=sum(kinds.values()),
        num_trainable=sum(each.numel() for each in parameters if each.requires_grad),
        by_dtype=", ".join(f"{name} {number}" for name, number in kinds.most_common()),
        parameter_bytes=_held(parameters),
        buffer_bytes=_held(model.buffers()),
        optimizer_bytes=_held(value for value in state if isinstance(value, torch.Tensor)),
        optimizers=", ".join(type(each).__name__ for each in optimizers),
        blocks=", ".join(repeated[:_MOST_BLOCKS]),
        device=str(parameters[0].device) if parameters else "",
        sharing=sharing,
        plan=plan,
    )


def _held(tensors: Iterable[torch.Tensor]) -> int:
    """How many bytes of ``tensors`` lie on this rank."""
    own = (each.to_local() if isinstance(each, DTensor) else each for each in tensors)
    return sum(each.numel() * each.element_size() for each in own)
