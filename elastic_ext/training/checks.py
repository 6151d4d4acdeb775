"""Checks of what a trainer and ``prepare()`` are given: the model, its loader, optimizers and scaler, and whether ranks
are joined; all of them before anything begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from elastic_ext.fsdp.checkpoint.folder.claim import check_job
from elastic_ext.records.text import path_given
from elastic_ext.torch_private import pipelines

from .optimizers.accelerate import Accelerated, is_prepared
from .options import CheckpointInterval, LaunchSize

__all__ = [
    "check_checkpoints",
    "check_model",
    "check_not_prepared",
    "check_process_group",
    "check_ranks_are_joined",
    "check_samples",
    "check_scaler",
    "check_sharded",
    "check_shared",
    "check_updates",
]

_MOST_NAMES = 4
_UPDATED_IN_BACKWARD = (
    "parameters of the model are updated within backward (_apply_optimizer_in_backward), in every micro-step, before "
    "the step has all its gradients; make an optimizer of its own for each parameter instead, give all of them to "
    "prepare(), and call those that it returns from register_post_accumulate_grad_hook; or step one optimizer after "
    "backward"
)


def check_checkpoints(interval: CheckpointInterval | None, path: str | Path | None, *, job: str | None) -> None:
    """ValueError where checkpoints cannot go to ``path``, or are due and have none."""
    if interval is not None and not isinstance(interval, CheckpointInterval):
        raise ValueError(f"checkpoint_interval is {interval!r}; allowed: a CheckpointInterval, or None")
    if path is not None:
        path_given("shared_storage_path", path)
        if job is not None:
            check_job(job)
    if interval is not None and path is None:
        raise ValueError("checkpoint_interval was given without shared_storage_path; say where checkpoints go")


def check_model(model: object, *, accelerator: object) -> None:
    parts = list(model.modules()) if isinstance(model, nn.Module) else [model]
    if any(map(pipelines.are_in_use, parts)):
        raise NotImplementedError(pipelines.REFUSED.format(f"model is a {type(model).__name__}"))
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; allowed: a torch.nn.Module")
    if accelerator is None:
        check_not_prepared(model)


def check_sharded(model: nn.Module) -> None:
    """Raise where the model is not sharded, though the trainer was told that it is."""
    if not any(isinstance(part, (FSDPModule, FullyShardedDataParallel)) for part in model.modules()):
        raise ValueError(
            "use_fsdp is True and the model is not sharded; call fully_shard(model) before ElasticTrainer is made, or "
            'trainer.parallelize(model, ParallelPlan(strategy="full_shard")) before prepare(); or leave use_fsdp out'
        )


def check_samples(loader: object, *, num_replicas: int, rank: int, num_parts: int) -> None:
    """Raise where a sampler would give the ranks of one replica different samples."""
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None) or getattr(loader, "sampler", None)
    given = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)
    if num_parts > 1 and None not in given and given != (num_replicas, rank):
        raise ValueError(
            f"the dataloader's sampler has num_replicas={given[0]} and rank={given[1]}, and the model is spread over "
            f"{num_parts} ranks, which take the same samples; give the sampler num_replicas={num_replicas} and "
            f"rank={rank} (trainer.data_parallel_size and trainer.data_parallel_rank)"
        )


def check_scaler(scaler: object, model: nn.Module) -> None:
    """Raise where a scaler would see the infinities of one rank alone."""
    is_flat = any(isinstance(part, FullyShardedDataParallel) for part in model.modules())
    if is_flat and scaler is not None and not isinstance(scaler, ShardedGradScaler):
        raise ValueError(
            f"scaler is a {type(scaler).__name__}; allowed with FSDP1: a ShardedGradScaler "
            "(torch.distributed.fsdp.sharded_grad_scaler), which hears of infinities on other ranks"
        )


def check_not_prepared(*things: object) -> None:
    """Raise where accelerate has prepared one of ``things``, as the trainer was not told by which accelerator."""
    for thing in things:
        if is_prepared(thing):
            raise ValueError(
                f"accelerate has prepared the {type(thing).__name__}, and would divide losses and count steps beside "
                "the trainer; give ElasticTrainer(..., accelerator=accelerator)"
            )


def check_process_group(launched: LaunchSize) -> None:
    """Raise where a launcher has started several processes, and this one trains by itself."""
    why_not = launched.why_not_alone(has_group=dist.is_available() and dist.is_initialized())
    if why_not is not None:
        raise ValueError(why_not)


def check_ranks_are_joined(*, num_replicas: int, num_parts: int, accelerated: Accelerated | None = None) -> None:
    """Raise where some ranks would train a model of their own: the replicas, of ``num_parts`` ranks, are not all."""
    num_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if num_ranks != num_replicas * num_parts:
        if num_replicas == num_parts == 1:
            advice = (
                "wrap it with torch.nn.parallel.DistributedDataParallel or fully_shard before it is given to "
                "ElasticTrainer"
                if accelerated is None
                else "give ElasticTrainer what accelerator.prepare(model) returns"
            )
            raise ValueError(
                f"the model is not wrapped, and there are {num_ranks} ranks: each would train a model of its own; "
                f"{advice}"
            )
        raise ValueError(
            f"the model has {num_replicas} replicas that share gradients, of {num_parts} ranks each, and there are "
            f"{num_ranks} ranks: the others would train a model of their own; wrap it over all ranks"
        )
    if accelerated is not None and accelerated.num_ranks != num_replicas:
        raise ValueError(
            f"the accelerator cuts its loaders for {accelerated.num_ranks} ranks, and the model averages its gradients "
            f"over {num_replicas}; make the accelerator where ranks are joined, and have it prepare the model"
        )


def check_shared(
    model: nn.Module,
    groups: Iterable[Mapping[str, Any]],
    *,
    left_out: Callable[[Iterable[torch.Tensor]], Sequence[torch.Tensor]],
    how: str,
) -> None:
    """Raise where optimizers train parameters whose gradients nothing averages over the ranks.

    ``groups`` are the optimizers' parameter groups, ``left_out`` gives the parameters that are not averaged, and
    ``how`` names the way in which the others are.
    """
    trained = dict.fromkeys(part for group in groups for part in group["params"] if part.requires_grad)
    alone = left_out(trained)
    if not alone:
        return
    names = {id(part): name for name, part in model.named_parameters()}
    told = [names.get(id(part), f"one of shape {tuple(part.shape)} that is not the model's") for part in alone]
    more = f" and {len(told) - _MOST_NAMES} more" if len(told) > _MOST_NAMES else ""
    raise ValueError(
        f"parameters that an optimizer trains lie outside of {how}: {', '.join(told[:_MOST_NAMES])}{more}; nothing "
        "averages their gradients, and each rank would train its own; wrap the whole model, in an nn.ModuleDict with "
        "what else is trained, and then make the optimizer; or average them by register_post_accumulate_grad_hook"
    )


def check_updates(model: nn.Module) -> None:
    """Raise where parameters are updated within backward, or the model is a stage of a pipeline."""
    if any(getattr(part, "_in_backward_optimizers", None) for part in model.parameters()):
        raise ValueError(_UPDATED_IN_BACKWARD)
    if pipelines.has_stage_of({id(part) for part in model.modules()}):
        raise ValueError(pipelines.REFUSED.format("the model is a stage of a pipeline"))
