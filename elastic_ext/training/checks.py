"""Checks of what a trainer and ``prepare()`` are given: the model, its loader, optimizers and scaler, whether ranks are
joined, and whether all of them load alike.
"""

from __future__ import annotations

import gc
import json
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from elastic_ext.errors import RanksDisagreeError
from elastic_ext.fsdp.checkpoint.folder.claim import check_job
from elastic_ext.ranks.group import Ranks
from elastic_ext.ranks.world import World
from elastic_ext.records.text import path_given
from elastic_ext.torch_private import pipelines

from .batches import Batches
from .optimizers.accelerate import Accelerated, is_prepared
from .options import CheckpointInterval, LaunchSize
from .remarks import Remarks

__all__ = [
    "EpochsOfSampler",
    "SameLoading",
    "SamplersOfBefore",
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
    "num_unshared",
    "remark_on_shares",
]

_logger = logging.getLogger(__name__)

# --- the model, its loader, optimizers and scaler, before anything begins --------------------------------------------

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


# --- samplers of torch's DataLoader ----------------------------------------------------------------------------------
# Whether one shares samples out among ranks, and whether it is told of epochs.


def num_unshared(loader: Any) -> int | None:
    """The length of a dataset whose samples nothing shares out among ranks; None where something may.

    What accelerate has prepared shares out by itself, and so may a batch sampler of the user's own.
    """
    if not isinstance(loader, DataLoader) or is_prepared(loader) or isinstance(loader.dataset, IterableDataset):
        return None
    if type(loader.batch_sampler) is not BatchSampler or hasattr(loader.sampler, "num_replicas"):
        return None
    try:
        num_samples = len(loader.dataset)  # type: ignore[arg-type]
        return num_samples if len(loader.sampler) == num_samples else None  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def remark_on_shares(num_samples: int, num_replicas: int, sampler: object) -> str:
    """A warning that each of several replicas takes all ``num_samples`` samples of its dataset."""
    return (
        f"each of {num_replicas} replicas of the model takes all {num_samples} samples of its dataset, since the "
        f"dataloader's {type(sampler).__name__} shares nothing out: an epoch has each sample {num_replicas} times, "
        "unless each rank's dataset holds others; use an ElasticDataLoader, which gives each rank its part of every "
        "step, or sampler=DistributedSampler(dataset)"
    )


class EpochsOfSampler:
    """Notices that a DistributedSampler was not told of a new epoch, so that two epochs have the same order."""

    def __init__(self, loader: Any) -> None:
        sampler = getattr(loader, "sampler", None)
        self._sampler: Any = sampler if isinstance(sampler, DistributedSampler) and sampler.shuffle else None
        self._last: tuple[int, int] | None = None  # an epoch, and the sampler's at its end

    def end(self, epoch: int) -> str | None:
        """A warning if the epoch that has ended had the same order as the one before; None where it had not."""
        if self._sampler is None:
            return None
        last, self._last = self._last, (epoch, self._sampler.epoch)
        if last is None or self._last != (last[0] + 1, last[1]):
            return None
        return (
            f"epochs {last[0]} and {epoch} had the same order of samples: the DistributedSampler shuffles by its "
            f"epoch, which was {last[1]} in both; call dataloader.sampler.set_epoch(epoch) before each loop, or use an "
            "ElasticDataLoader, which needs no such call"
        )


class SamplersOfBefore:
    """Finds the script's own DistributedSamplers that were made for the ranks of before a change of members.

    Such a sampler keeps its number of ranks: an evaluation with it leaves samples out, or takes some twice.
    """

    def __init__(self) -> None:
        self._told: weakref.WeakSet[Any] = weakref.WeakSet()
        self._found: weakref.WeakSet[Any] | None = None  # before the change, where it was looked for them then

    def find(self) -> None:
        """Find the samplers that there are now, so that the next ``look`` takes no time: none is made before it."""
        self._found = weakref.WeakSet(_distributed_samplers())

    def look(self, before: World, now: World, *, own: object, since: str) -> list[str]:
        """A warning for each such sampler that is alive and was not told of; ``own`` is the one that a loader adapts.

        Without ``find`` all objects of the process are gone through: some 30 ms for 300,000 of them.
        """
        known, self._found = self._found, None
        place = before.size, before.rank
        if place == (now.size, now.rank):
            return []

        def found() -> list[Any]:
            alive = _distributed_samplers() if known is None else known
            made = (each for each in alive if (each.num_replicas, each.rank) == place)
            return [each for each in made if each is not own and each not in self._told]

        if not found():
            return []
        gc.collect()  # a sampler that the script has just replaced may have waited for it
        samplers = found()
        self._told.update(samplers)
        return [_remark_on_sampler(each, now, since) for each in samplers]


def _distributed_samplers() -> list[Any]:
    """All DistributedSamplers of this process, torch's own and those of classes derived from it."""
    kinds, to_look_at = set[type](), [DistributedSampler]
    while to_look_at:
        kind = to_look_at.pop()
        kinds.add(kind)
        to_look_at += type.__subclasses__(kind)
    return [each for each in gc.get_referrers(*kinds) if type(each) in kinds]  # an object refers to its class


def _remark_on_sampler(sampler: Any, now: World, since: str) -> str:
    return (
        f"a {type(sampler).__name__} over a {type(sampler.dataset).__name__} of {len(sampler.dataset)} samples was "
        f"made for rank {sampler.rank} of {sampler.num_replicas}, and this is rank {now.rank} of {now.size} {since}: "
        "a loop over it leaves samples out, or ranks take the same ones; make the sampler and its DataLoader in each "
        "evaluation, or anew in a function that trainer.on_members() is given"
    )


# --- whether the loaders of all ranks give batches of the same sizes, out of the same order of samples ---------------


class SameLoading:
    """Compares the dataloaders of all ranks, at the same places on each; all ranks raise where they differ."""

    def __init__(self, batches: Batches, ranks: Ranks) -> None:
        self._batches = batches
        self._ranks = ranks
        self._compares_orders = False  # at each epoch: a sampler draws them
        self._num_unshared: int | None = None  # samples that each rank takes of a dataset, where that is their number
        self._compares_batches = False  # at the first one: each rank draws them for itself

    def compare(self) -> None:
        """Raise where loaders differ: the ranks would take different numbers of steps, or samples twice.

        Where seeds of the order differ, all take rank 0's: seeds of each rank's workers may be that rank's own.
        """
        ordered = self._batches.ordered
        mine = {
            "sizes": self._batches.description,
            "seed": None if ordered is None else ordered.seed,
            "draws": ordered is not None and ordered.draws_order,
            "batches": self._batches.drawing is not None,
            "unshared": num_unshared(self._batches.loader) if self._batches.source is None else None,
        }
        answers = [json.loads(data) for data in self._gather(mine)]
        if any(other["sizes"] != answers[0]["sizes"] for other in answers):
            told = "; ".join(f"rank {rank}: {_in_words(each['sizes'])}" for rank, each in enumerate(answers))
            raise RanksDisagreeError(
                f"the ranks' dataloaders differ ({told}); give all ranks batches of the same sizes"
            )
        seed = answers[0]["seed"]
        if ordered is not None and None not in (ordered.seed, seed) and ordered.seed != seed:
            ordered.take_seed(seed)
        self._compares_orders = len(answers) > 1 and any(each["draws"] for each in answers)
        self._compares_batches = all(each["batches"] for each in answers)
        unshared = {each["unshared"] for each in answers}
        self._num_unshared = unshared.pop() if len(unshared) == 1 else None  # else each rank has a dataset of its own
        self.compare_orders()

    def take_world(self, world: World) -> None:
        """Compare with the ranks of ``world`` from here on, of whose loaders it is known that they are alike."""
        ordered = self._batches.ordered
        self._compares_orders = world.size > 1 and ordered is not None and ordered.draws_order
        self._compares_batches = False

    def compare_shares(self, num_replicas: int, remarks: Remarks) -> None:
        """Warn where each of several replicas of the model takes all samples; called after ``compare``."""
        if self._num_unshared is not None and num_replicas > 1:
            sampler = self._batches.loader.sampler
            remarks.say("samples not shared out", remark_on_shares(self._num_unshared, num_replicas, sampler))

    def compare_orders(self) -> None:
        """Raise where ranks' samplers have drawn different orders for the next epoch."""
        if not self._compares_orders:
            return
        ordered = self._batches.ordered
        orders = [json.loads(data) for data in self._gather(None if ordered is None else ordered.order_to_come())]
        if any(order != orders[0] for order in orders):
            told = "; ".join(f"rank {rank}: {order}" for rank, order in enumerate(orders))
            raise RanksDisagreeError(
                f"the ranks' samplers draw different orders, and samples would come twice or never ({told}); have the "
                "sampler draw from its `generator`, from random numbers of random, numpy.random or torch, which are "
                "seeded alike on all ranks, or from a seed of its own and its set_epoch(epoch)"
            )

    def compare_batches(self, num_replicas: int) -> None:
        """Warn, once, where the batch samplers of all ranks have drawn the same batches for several replicas."""
        if not self._compares_batches or num_replicas == 1:
            return
        self._compares_batches = False
        drawing = self._batches.drawing
        drawn = [json.loads(data) for data in self._gather(None if drawing is None else drawing.order_to_come())]
        if all(order == drawn[0] for order in drawn) and self._ranks.rank == 0:
            _logger.warning(
                "the batch samplers of all ranks draw the same batches: each sample is trained on %d times in an "
                "epoch; have the batch_sampler give each rank its share of them, or the loader seed=rank on each rank, "
                "so that each draws its own",
                num_replicas,
            )

    def _gather(self, mine: object) -> list[bytes]:
        return self._ranks.gather(json.dumps(mine).encode(), "comparing dataloaders")


def _in_words(description: Sequence[int | None]) -> str:
    if len(description) == 1:
        return "batches of the sizes that the trainer sets"
    micro_batch, num_batches, last_batch = description
    length = "an unknown number of" if num_batches is None else str(num_batches)
    return f"{length} batches of {micro_batch} samples" + (f", the last of {last_batch}" if last_batch else "")
