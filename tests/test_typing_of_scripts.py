"""What mypy, and so an editor, knows of a user's script: the values of ``prepare()``, and which arguments there are.

``make lint`` checks this file strictly. A line with ``type: ignore`` is a mistake that mypy must find: one that it does
not find is an unused ignore, which is an error.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import assert_type

from elastic_ext import (
    CheckpointOptions,
    ElasticDataLoader,
    ElasticLRScheduler,
    ElasticOptimizer,
    ElasticScaler,
    ElasticTrainer,
    FollowOptions,
    StepOptions,
)


def values_of_prepare(
    trainer: ElasticTrainer, optimizer: Optimizer, scheduler: LRScheduler, scaler: torch.amp.GradScaler
) -> None:
    assert_type(trainer.prepare(optimizer), ElasticOptimizer)
    assert_type(trainer.prepare([optimizer, optimizer]), list[ElasticOptimizer])
    assert_type(
        trainer.prepare([optimizer, optimizer], [scheduler]), tuple[list[ElasticOptimizer], list[ElasticLRScheduler]]
    )
    assert_type(trainer.prepare(optimizer, scheduler), tuple[ElasticOptimizer, ElasticLRScheduler])
    assert_type(
        trainer.prepare(optimizer, scheduler, scaler), tuple[ElasticOptimizer, ElasticLRScheduler, ElasticScaler]
    )
    assert_type(trainer.prepare(optimizer, scaler=scaler), tuple[ElasticOptimizer, ElasticScaler])
    trainer.prepare("x")  # type: ignore[arg-type]


def arguments_that_there_are(model: nn.Module, dataset: Any) -> None:
    loader: ElasticDataLoader[Any] = ElasticDataLoader(dataset, 8, shuffle=True, num_workers=2, pin_memory=True, seed=1)
    trainer = ElasticTrainer(
        model,
        loader,
        global_batch_size=64,
        shared_storage_path="/shared",
        step_options=StepOptions(guard="always"),
        checkpoint_options=CheckpointOptions(keep_last=3),
        follow_options=FollowOptions(job="mine"),
    )
    assert_type(trainer.global_step, int)


def arguments_that_there_are_not(model: nn.Module, dataset: Any) -> None:
    ElasticDataLoader(dataset, shufle=True)  # type: ignore[call-arg]
    ElasticTrainer(model, global_batch=64)  # type: ignore[call-arg]
    ElasticTrainer(model, global_batch_size="64")  # type: ignore[arg-type]
    StepOptions(guard="sometimes")  # type: ignore[arg-type]
    CheckpointOptions(keep_lats=3)  # type: ignore[call-arg]


def test_every_mistake_of_these_scripts_is_one_for_python_too() -> None:
    """The names that mypy misses in them are no arguments when the script runs, either."""
    source = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    (mistakes,) = (
        node
        for node in source.body
        if isinstance(node, ast.FunctionDef) and node.name == "arguments_that_there_are_not"
    )
    for statement in mistakes.body:
        scope = globals() | {"model": nn.Linear(1, 1), "dataset": [1.0]}
        try:
            exec(compile(ast.Module([statement], []), __file__, "exec"), scope)
        except (TypeError, ValueError):
            continue
        raise AssertionError(f"{ast.unparse(statement)} was not refused")
