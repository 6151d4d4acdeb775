"""Ranks: models that are not shared, or not by all; ranks that differ in what they load or leave out."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.training.mistakes.causes import Room
from tests.training.mistakes.training import NUM_SAMPLES, Training

__all__ = ["RANKS"]

RANKS = Room()


@RANKS.cause(
    "the processes of a launcher have no process group",
    says="WORLD_SIZE is 2: a launcher has started 2 processes, and this one has no process group, so each "
    "would train a ",
    comes_as="ValueError",
    found="at once",
)
def joins_no_group(training: Training) -> None:
    os.environ["WORLD_SIZE"] = "2"
    training.prepare()


@RANKS.cause(
    "the model is not wrapped",
    says="the model is not wrapped, and there are 2 ranks: each would train a model of its own; wrap it with ",
    comes_as="ValueError",
    found="at once",
    num_ranks=(2,),
)
def leaves_the_model_bare(training: Training) -> None:
    training.model = training.bare_model
    training.prepare()


@RANKS.cause(
    "the model is wrapped over some of the ranks",
    says="the model has 2 replicas that share gradients, of 1 ranks each, and there are 4 ranks: the others "
    "would train a ",
    comes_as="ValueError",
    found="at once",
    num_ranks=(4,),
)
def wraps_over_half_of_the_ranks(training: Training) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    training.model = DistributedDataParallel(training.bare_model, process_group=groups[training.rank // 2])
    training.prepare()


@RANKS.cause(
    "what is trained lies beside DDP",
    says="parameters that an optimizer trains lie outside of DDP: 1.weight, 1.bias; nothing averages their "
    "gradients, and ",
    comes_as="ValueError",
    found="at once",
    num_ranks=(2,),
)
def trains_a_head_beside_ddp(training: Training) -> None:
    training.model = nn.Sequential(training.model, nn.Linear(5, 5, dtype=torch.float64))
    training.prepare()


@RANKS.cause(
    "parts of the model are shared in different ways",
    says="the model mixes DDP, fully_shard and FSDP1; wrap it in one of them",
    comes_as="ValueError",
    found="at once",
    num_ranks=(2,),
)
def mixes_two_ways(training: Training) -> None:
    head: Any = fully_shard(nn.Linear(5, 5, dtype=torch.float64))
    training.model = nn.Sequential(training.model, head)
    training.prepare()


@RANKS.cause(
    "a model is said to be sharded, and is not",
    says="use_fsdp is True and the model is not sharded; call fully_shard(model) before ElasticTrainer is made, or "
    'trainer.parallelize(model, ParallelPlan(strategy="full_shard")) before prepare(); or leave use_fsdp out',
    comes_as="ValueError",
    found="at once",
    num_ranks=(1, 2),
)
def forgets_to_shard(training: Training) -> None:
    training.make(use_fsdp=True)
    training.prepare()


class OfAccelerate(nn.Linear):
    """What accelerate has prepared says so."""

    _is_accelerate_prepared = True


@RANKS.cause(
    "accelerate has prepared the model, and the trainer does not know",
    says="accelerate has prepared the OfAccelerate, and would divide losses and count steps beside the trainer; give ",
    comes_as="ValueError",
    found="at once",
    num_ranks=(1, 2),
)
def leaves_the_accelerator_out(training: Training) -> None:
    training.make(model=OfAccelerate(6, 5))


@RANKS.cause(
    "the ranks' dataloaders have unlike lengths",
    says=re.compile(
        r"the ranks' dataloaders differ \(rank 0: 16 batches of 4 samples; rank 1: 14 batches of 4 samples\); "
        r"give all ranks batches of the same sizes"
    ),
    comes_as="RanksDisagreeError",
    found="at once",
    num_ranks=(2,),
)
def loads_more_on_one_rank(training: Training) -> None:
    training.dataset.tensors = tuple(part[: NUM_SAMPLES - 8 * training.rank] for part in training.dataset.tensors)
    training.prepare(loader=training.torch_loader())


@RANKS.cause(
    "a rank leaves its optimizer out",
    says="ranks differ in steps: rank 0: 1 steps, 1 boundaries, 2 backward passes (between two steps); rank "
    "1: 0 steps, ",
    comes_as="RanksDisagreeError",
    found="at once",
    num_ranks=(2,),
    num_committed=None,
)
def leaves_the_optimizer_out_on_one_rank(training: Training) -> None:
    training.prepare()
    for inputs, targets in training.batches:
        with training.trainer.step():
            training.loss(inputs, targets).backward()
            if training.rank == 0:
                training.finish()
