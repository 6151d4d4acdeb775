"""What a trainer can be given, checked before anything begins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from .accelerator import Accelerated, is_prepared
from .interval import CheckpointInterval

__all__ = ["check_checkpoints", "check_choice", "check_model", "check_not_prepared", "check_ranks_are_joined"]


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")


def check_checkpoints(interval: CheckpointInterval | None, path: str | Path | None) -> None:
    if interval is not None and not isinstance(interval, CheckpointInterval):
        raise ValueError(f"checkpoint_interval is {interval!r}; allowed: a CheckpointInterval, or None")
    if path is not None and not isinstance(path, (str, Path)):
        raise ValueError(f"shared_storage_path is {path!r}; allowed: a path, or None")
    if interval is not None and path is None:
        raise ValueError("checkpoint_interval was given without shared_storage_path; say where checkpoints go")
    if path is not None:
        raise NotImplementedError(
            "this version saves no checkpoints by itself; leave shared_storage_path and checkpoint_interval out, and "
            "keep trainer.state_dict() in checkpoints of your own"
        )


def check_model(model: object, *, use_fsdp: bool, accelerator: object) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; allowed: a torch.nn.Module")
    is_sharded = any(isinstance(part, (FSDPModule, FullyShardedDataParallel)) for part in model.modules())
    if use_fsdp and not is_sharded:
        raise ValueError("use_fsdp is True and the model is not sharded; call fully_shard(model) first")
    if is_sharded:
        raise NotImplementedError("this version trains plain and DDP models; leave this one unsharded")
    if accelerator is None:
        check_not_prepared(model)


def check_not_prepared(*things: object) -> None:
    """Raise where accelerate has prepared one of them, and the trainer was not told by which accelerator."""
    for thing in things:
        if is_prepared(thing):
            raise ValueError(
                f"accelerate has prepared the {type(thing).__name__}, and would divide losses and count steps beside "
                "the trainer; give ElasticTrainer(..., accelerator=accelerator)"
            )


def check_ranks_are_joined(num_ranks: int, are_gradients_shared: bool, accelerated: Accelerated | None) -> None:
    """Raise where ranks would train models of their own, or share gradients otherwise than the accelerator has it."""
    num_processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if num_processes > 1 and not are_gradients_shared:
        advice = (
            "wrap it with torch.nn.parallel.DistributedDataParallel before it is given to ElasticTrainer"
            if accelerated is None
            else "give ElasticTrainer what accelerator.prepare(model) returns"
        )
        raise ValueError(
            f"the model is not wrapped, and there are {num_processes} ranks: each would train a model of its own; "
            f"{advice}"
        )
    if accelerated is not None and accelerated.num_ranks != num_ranks:
        raise ValueError(
            f"the accelerator cuts its loaders for {accelerated.num_ranks} ranks, and the model averages its gradients "
            f"over {num_ranks}; make the accelerator where ranks are joined, and have it prepare the model"
        )
