"""elastic_ext: tune, reshard, scale and heal a PyTorch training job without stopping it.

The public names are loaded when they are first used, so that a process which needs no torch never imports it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config.agreement import Boundary
    from .config.apply import Applied, Applier, Proposal
    from .config.elastic_config import ElasticConfig
    from .config.follower import ConfigFollower, follow_config
    from .config.watcher import ConfigWatcher
    from .data.batch_plan import BatchPlan, StepPlan
    from .data.loader import ElasticDataLoader
    from .data.sampler import ElasticDistributedSampler
    from .data.sources import MicroBatchSource
    from .errors import (
        ApplyError,
        ConfigError,
        ElasticError,
        PeerLostError,
        RanksDisagreeError,
        RanksError,
        RanksFailedError,
        StepError,
        TornStepError,
        WorkerDiedError,
    )
    from .fsdp.plan import ParallelPlan
    from .profile.output import Sink, TensorBoardSink
    from .profile.summary import StepProfile
    from .training.optimizers.amp import ElasticScaler
    from .training.optimizers.optimizer import ElasticLRScheduler, ElasticOptimizer
    from .training.options import CheckpointInterval, CheckpointOptions, FollowOptions, MemoryModel, StepOptions
    from .training.parallelism import ReshardReport
    from .training.trainer import ElasticTrainer

__all__ = [
    "Applied",
    "Applier",
    "ApplyError",
    "BatchPlan",
    "Boundary",
    "CheckpointInterval",
    "CheckpointOptions",
    "ConfigError",
    "ConfigFollower",
    "ConfigWatcher",
    "ElasticConfig",
    "ElasticDataLoader",
    "ElasticDistributedSampler",
    "ElasticError",
    "ElasticLRScheduler",
    "ElasticOptimizer",
    "ElasticScaler",
    "ElasticTrainer",
    "FollowOptions",
    "MemoryModel",
    "MicroBatchSource",
    "ParallelPlan",
    "PeerLostError",
    "Proposal",
    "RanksDisagreeError",
    "RanksError",
    "RanksFailedError",
    "ReshardReport",
    "Sink",
    "StepError",
    "StepOptions",
    "StepPlan",
    "StepProfile",
    "TensorBoardSink",
    "TornStepError",
    "WorkerDiedError",
    "follow_config",
]

_HOMES = {
    "Applied": "config.apply",
    "Applier": "config.apply",
    "ApplyError": "errors",
    "BatchPlan": "data.batch_plan",
    "Boundary": "config.agreement",
    "CheckpointInterval": "training.options",
    "CheckpointOptions": "training.options",
    "ConfigError": "errors",
    "ConfigFollower": "config.follower",
    "ConfigWatcher": "config.watcher",
    "ElasticConfig": "config.elastic_config",
    "ElasticDataLoader": "data.loader",
    "ElasticDistributedSampler": "data.sampler",
    "ElasticError": "errors",
    "ElasticLRScheduler": "training.optimizers.optimizer",
    "ElasticOptimizer": "training.optimizers.optimizer",
    "ElasticScaler": "training.optimizers.amp",
    "ElasticTrainer": "training.trainer",
    "FollowOptions": "training.options",
    "MemoryModel": "training.options",
    "MicroBatchSource": "data.sources",
    "ParallelPlan": "fsdp.plan",
    "PeerLostError": "errors",
    "Proposal": "config.apply",
    "RanksDisagreeError": "errors",
    "RanksError": "errors",
    "RanksFailedError": "errors",
    "ReshardReport": "training.parallelism",
    "Sink": "profile.output",
    "StepError": "errors",
    "StepOptions": "training.options",
    "StepPlan": "data.batch_plan",
    "StepProfile": "profile.summary",
    "TensorBoardSink": "profile.output",
    "TornStepError": "errors",
    "WorkerDiedError": "errors",
    "follow_config": "config.follower",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
