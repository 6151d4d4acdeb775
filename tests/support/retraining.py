"""A training whose model is spread otherwise while it goes on, on ranks: for tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from elastic_ext import Proposal
from elastic_ext.fsdp.plan import ParallelPlan
from tests.support.resharding import FULL, GRAD_OP, KEPT, WHOLE, Net
from tests.support.training import ResumableSlices, make_data, trainer_of

__all__ = [
    "MICRO_BATCH",
    "RECOMPUTED",
    "TOUR",
    "WIDTH",
    "Retraining",
    "State",
    "are_in_force",
    "differing",
    "needs_passes_taken_back",
    "resharded",
    "stayed",
    "whole",
]

RECOMPUTED = ParallelPlan(strategy="full_shard", unit=2, activation_checkpoint="all", prefetch=1)
TOUR = {1: WHOLE, 3: KEPT, 5: WHOLE, 7: GRAD_OP, 9: RECOMPUTED, 11: WHOLE, 13: FULL}
"""After which step for which plan is asked; it is in force two steps later at the latest."""
WIDTH = 6
MICRO_BATCH = 3

needs_passes_taken_back = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"),
    reason="this torch cannot take back a pass through sharded modules that failed",
)

State = dict[str, torch.Tensor]
Act = Callable[["Retraining"], object]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all of it; where it is sharded all ranks call this."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Retraining:
    """One rank's training of a model with most of what a model may have, beside a moving average of it."""

    def __init__(
        self,
        rank: int,
        folder: Path,
        plan: ParallelPlan | None,
        *,
        name: str = "run",
        num_micro_steps: int = 1,
        max_norm: float | None = None,
        model: nn.Module | None = None,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
        make_optimizer: Callable[[Any], Optimizer] | None = None,
        loader: Any = None,
        averages: bool = True,
        **given: Any,
    ) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.num_ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        self.folder = folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.model: Any = Net(WIDTH) if model is None else model
        if wrap is not None:
            self.model = wrap(self.model)
        self.loader = loader or ResumableSlices(make_data(64, torch.float32), MICRO_BATCH, is_endless=True)
        given.setdefault("global_batch_size", MICRO_BATCH * num_micro_steps * self.num_ranks)
        self.trainer = trainer_of(self.folder, self.model, self.loader, rank=rank, **given)
        if plan is not None:
            assert self.trainer.parallelize(self.model, plan) is self.model
        trained = (part for part in self.model.parameters() if part.requires_grad)
        self.inner = AdamW(trained, lr=1e-2) if make_optimizer is None else make_optimizer(trained)
        self.average: dict[str, torch.Tensor] = {}
        if averages:
            self.average.update((name, part.detach().clone()) for name, part in self.model.named_parameters())
            self.trainer.register_state("average", self.average)
        self.optimizer, self.schedule = self.trainer.prepare(
            self.inner, LambdaLR(self.inner, lambda step: 1.0 / (1 + step))
        )
        torch.manual_seed(17 + rank)
        self.max_norm = max_norm
        self.losses: list[float] = []
        """Of micro-steps, in order."""
        self.proposals: list[Proposal] = []
        """One for each plan that was asked for."""

    @property
    def plan(self) -> ParallelPlan:
        """By which the model lies."""
        found: ParallelPlan = self.trainer._training.spread.plan
        return found

    def micro_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        trainer = self.trainer
        with trainer.step():
            loss = nn.functional.cross_entropy(self.model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            if self.max_norm is not None:
                trainer.clip_grad_norm_(self.model.parameters(), self.max_norm)
            self.optimizer.step()
            if trainer.sync_gradients:
                with torch.no_grad():
                    for name, part in self.model.named_parameters():
                        if name in self.average:
                            self.average[name].lerp_(part.detach(), 0.25)
            self.schedule.step()
            self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def train(self, until: int, at: Mapping[int, Act | ParallelPlan] | None = None) -> Retraining:
        """One loop over the data until a step; ``at`` says what to do after which step, or for which plan to ask."""
        to_do = dict(at or {})
        self._do(to_do)
        for inputs, targets in self.loader:
            self.micro_step(inputs, targets)
            if not self.trainer._session.steps.is_partial:
                self._do(to_do)
                if self.trainer.global_step >= until:
                    break
        return self

    def _do(self, to_do: dict[int, Act | ParallelPlan]) -> None:
        act = to_do.pop(self.trainer.global_step, None)
        if isinstance(act, ParallelPlan):
            self.proposals.append(self.trainer.reshard(act))
        elif act is not None:
            act(self)

    def state(self) -> dict[str, torch.Tensor]:
        """All of it that training changes, whole; all ranks call this."""
        found = {f"average of {name}": whole(tensor) for name, tensor in self.average.items()}
        for name, part in self.model.named_parameters():
            name = name.removeprefix("module.").removeprefix("_orig_mod.")
            found[name] = whole(part)
            for key, value in self.inner.state.get(part, {}).items():
                found[f"{name} {key}"] = whole(value)
        return found


def differing(one: State, other: State) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def stayed(rank: int, folder: Path, plan: ParallelPlan | None, until: int, **given: Any) -> tuple[list[float], State]:
    """A training that never changes: its losses, and what came of it."""
    run = Retraining(rank, folder, plan, name="stayed", **given)
    with run.trainer:
        run.train(until)
        return run.losses, run.state()


def are_in_force(run: Retraining) -> bool:
    """Every plan that was asked for."""
    assert [each.refusal for each in run.proposals if each.outcome != "in force"] == []
    return bool(run.proposals)


def resharded(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What this rank has told of changes of plan."""
    lines = (folder / str(rank) / f"events-{rank}.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == "resharded"]
