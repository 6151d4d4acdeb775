"""What a micro-step of ElasticTrainer costs where the model is sharded with fully_shard, over the same loop by hand.

Two gloo ranks, a micro-step of several milliseconds, wall and CPU time; by hand gradients stay unshared
(``set_requires_gradient_sync``) but in the last micro-step of a step, and every pass gathers parameters as ours does.
The rest is as in benchmarks/trainer_steps.py.

Not measured: accelerate, whose plugin for fully_shard is not made for CPUs; a mesh of two dimensions; an accelerator.
"""

from __future__ import annotations

import dataclasses

import torch

from benchmarks.harness import Result
from benchmarks.trainer_ranks import LoopName
from benchmarks.trainer_steps import MODERATE, Plan, on_ranks

__all__ = ["main"]

NAMES: tuple[LoopName, ...] = ("hand", "ours", "backward")
PLANS = (
    Plan(num_micro_steps=1, num_in_block=24, budget_seconds=80.0, names=NAMES),
    Plan(num_micro_steps=4, num_in_block=32, budget_seconds=80.0, names=NAMES),
)


def main(share: float = 1.0) -> list[Result]:
    """Two tables for each plan: of wall and of CPU time."""
    torch.set_num_threads(1)
    task = dataclasses.replace(MODERATE, is_sharded=True)
    return [table for plan in PLANS for table in on_ranks(plan.shortened(share), num_ranks=2, task=task)]
