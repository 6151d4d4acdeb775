"""Training: one training on this rank, as the object by which its parts reach each other.

``ElasticTrainer`` makes it of what it was given, ``prepare()`` adds the parts that need optimizers and the other ranks.
Those parts are made of this one object, and read from it, when they act, the parts that are made after them.

What happens at the moments of a training (it begins, passes a boundary, was resharded, went back, ends) is said in
session.py, in order; how its epochs begin and end, in epochs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from elastic_ext.profile.output import Sinks

from .counters import Counts
from .logged import LoggedNumbers

if TYPE_CHECKING:
    from elastic_ext.config.follower import ConfigFollower
    from elastic_ext.fsdp.reshard.sharded_model import Spread
    from elastic_ext.profile.memory.analyzer import Analyzer
    from elastic_ext.profile.memory.model_description import FactoryOrigins
    from elastic_ext.profile.output import ProfileOutput
    from elastic_ext.profile.recorder import Recorder
    from elastic_ext.ranks.group import Ranks

    from .batches import Batches
    from .checkpoints.checkpoints import CheckpointRequest, Checkpoints
    from .checkpoints.loop import Saving
    from .checkpoints.state import TrainingState
    from .facts import FactsOfJob
    from .gradients.gradients import Gradients
    from .gradients.noise import Learning
    from .losses import Losses
    from .members import MembersChange, TrainingMembers
    from .optimizers.accelerate import Accelerated
    from .optimizers.prepared import PreparedOptimizers
    from .optimizers.rates import OptimizerSettings
    from .options import FollowOptions, StepOptions
    from .parallelism import Parallelism
    from .reports import TrainingReports
    from .session import Session
    from .steps.device_memory import DeviceMemory
    from .steps.oom_guard import Guarding
    from .steps.retry import Attempts, Growing
    from .steps.state import StepState
    from .steps.steps import Steps

__all__ = ["NOT_SPREAD", "Training"]

NOT_SPREAD = "the model is not spread; call trainer.parallelize(model, plan) before prepare()"


@dataclass(kw_only=True, slots=True, eq=False)
class Training:
    """One training on this rank: what it was given, and its parts."""

    # ---- given to ElasticTrainer, or before prepare() ----
    model: nn.Module
    accelerated: Accelerated | None
    is_sharded: bool
    """Whether the user says that the model is sharded when ``prepare`` is called."""
    options: StepOptions
    following: FollowOptions
    request: CheckpointRequest
    """The trainer's arguments about its checkpoints."""
    factory: FactoryOrigins | None
    """Names of functions that make a model like this one in a process beside training; None where none were given."""
    state: StepState
    gradients: Gradients
    spread: Spread
    batches: Batches
    counts: Counts = field(default_factory=Counts)
    logged: LoggedNumbers = field(default_factory=LoggedNumbers)
    """The numbers that the script logs."""
    registered: dict[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    """Tensors that the user has registered, by name."""
    unclaimed: dict[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    """Registered tensors that were loaded, and that nobody has registered so far."""
    appliers: list[tuple[Any, ...]] = field(default_factory=list)
    """The user's own appliers, with their checks and sections."""
    loaded_config: Mapping[str, Any] | None = None
    """The config of a state that was loaded before ``prepare``."""
    sinks: Sinks = field(default_factory=Sinks)
    """The user's sinks, to which rank 0 writes its profile."""
    on_members: list[Callable[[MembersChange], object]] = field(default_factory=list)
    """The script's functions that are called after each change of members."""

    # ---- made by prepare(), in this order ----
    prepared: PreparedOptimizers = field(init=False)
    """The optimizers, schedules and scaler that take part in steps."""
    settings: OptimizerSettings = field(init=False)
    startup: Mapping[str, object] = field(init=False)
    """The script's own values of config keys."""
    follower: ConfigFollower = field(init=False)
    reports: TrainingReports = field(init=False)
    """What training says of itself; ``follower.reports`` writes it down."""
    memory: DeviceMemory = field(init=False)
    guarding: Guarding = field(init=False)
    growing: Growing = field(init=False)
    learning: Learning = field(init=False)
    recorder: Recorder | None = field(init=False)
    """The recorder of where this rank's time goes; None where nothing is profiled."""
    profile_output: ProfileOutput = field(init=False)
    facts: FactsOfJob = field(init=False)
    members: TrainingMembers = field(init=False)
    """Which members train, and how that changes."""
    losses: Losses = field(init=False)
    """How training goes on where some of them are lost."""
    session: Session = field(init=False)
    parallelism: Parallelism | None = field(init=False, default=None)
    """The applier that changes how the model is sharded; None where it has no plan."""
    steps: Steps = field(init=False)
    saved_state: TrainingState = field(init=False)
    """The state of this rank that checkpoints hold."""
    checkpoints: Checkpoints | None = field(init=False)
    saving: Saving | None = field(init=False, default=None)
    """When the loop saves checkpoints; None where it keeps none, and until the session has begun."""
    attempts: Attempts = field(init=False)

    @property
    def ranks(self) -> Ranks:
        """All ranks of the training."""
        return self.follower.ranks

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers as the user made them."""
        return [each.inner for each in self.prepared.optimizers]

    @property
    def analyzer(self) -> Analyzer | None:
        """What knows how much memory steps take; None on all ranks but the first, and where nothing is profiled."""
        return None if self.recorder is None else self.recorder.analyzer

    @property
    def why_not_reshard(self) -> str | None:
        """Why the model stays as it is sharded, None where that can be changed."""
        return self.spread.why_not or (None if self.spread.plan else NOT_SPREAD)

    def registered_tensors(self) -> Sequence[Mapping[str, torch.Tensor]]:
        """The tensors that the user has registered, in the same order on all ranks."""
        return [tensors for _, tensors in sorted(self.registered.items())]

    def let_go_of_parameters(self) -> Sequence[object]:
        """Drop references to parameters where possible; gives our objects that still refer to some."""
        self.guarding.let_go()
        return self.gradients.holders()
