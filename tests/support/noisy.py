"""A small training whose gradients are noisy, for tests of what follows from that; and how noisy they truly are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.optim import SGD

from elastic_ext import ParallelPlan
from elastic_ext.records.metrics import FILE, JobFacts
from elastic_ext.training.counters import NoiseScale
from elastic_ext.training.gradients.noise import _FIRST_PAIRS
from tests.support.loops import put
from tests.support.training import Slices, make_data, make_model, trainer_of

__all__ = ["BATCH", "LETS", "Run", "found_in", "learnable", "loss_of", "truth"]

NUM_SAMPLES = 4096
BATCH = 8
LETS = {"version": 1, "tuning": {"knobs": {"global_batch_size": [BATCH, 16 * BATCH]}}}
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(inputs), targets)


def learnable(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Classes that inputs tell of, though not surely."""
    inputs, _ = make_data(NUM_SAMPLES, dtype)
    draw = torch.Generator().manual_seed(2)
    scores = inputs.double() @ torch.randn(6, 5, generator=draw, dtype=torch.float64)
    return inputs, (scores + torch.randn(NUM_SAMPLES, 5, generator=draw, dtype=torch.float64)).argmax(1)


def truth(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The noise scale by the gradient of every single sample."""
    values = {name: part.detach() for name, part in model.named_parameters()}

    def loss(values: dict[str, torch.Tensor], one: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(functional_call(model, values, (one[None],)), target[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))(values, *data)
    rows = torch.cat([part.reshape(len(data[0]), -1) for part in each.values()], dim=1)
    square = rows.mean(0).square().sum()
    return float((rows.square().sum(1).mean() - square) / square)


class Run:
    """One rank's training in steps that move nothing, or as far as its rate has them."""

    def __init__(
        self,
        folder: Path,
        *,
        rank: int = 0,
        model: nn.Module | None = None,
        source: Any = None,
        make: Callable[[nn.Module], Any] = lambda model: SGD(model.parameters(), lr=1e-9),
        scaler: Any = None,
        config: Mapping[str, Any] | None = LETS,
        dtype: torch.dtype = torch.float64,
        micro_batch: int = BATCH,
        plan: ParallelPlan | None = None,
        loss: Loss = loss_of,
        **given: Any,
    ) -> None:
        (folder / str(rank)).mkdir(parents=True, exist_ok=True)
        if config is not None:
            put(folder, rank, config)
        self.model = make_model(dtype) if model is None else model
        self.source = Slices(learnable(dtype), micro_batch, is_endless=True) if source is None else source
        self.trainer = trainer_of(folder, self.model, self.source, rank=rank, **{"global_batch_size": BATCH, **given})
        if plan is not None:
            self.trainer.parallelize(self.model, plan)
        self.optimizer = made = make(self.model)
        if scaler is None:
            self.optimizer = self.trainer.prepare(made)
        else:
            self.optimizer, scaler = self.trainer.prepare(made, None, scaler)
        self.scaler, self.loss, self.folder = scaler, loss, folder
        self.max_norm: float | None = None
        self.rates: list[float] = []
        """That each step used, of the first group."""

    @property
    def noise(self) -> NoiseScale:
        found: NoiseScale = self.trainer._counts.noise_scale
        return found

    @property
    def facts(self) -> JobFacts:
        self.trainer._training.facts.tell()
        return JobFacts.from_json((self.folder / "0" / FILE).read_text())

    @property
    def is_looking(self) -> bool:
        return self.trainer._training.state.on_gradients is not None

    def train(
        self,
        num_steps: int,
        meanwhile: Callable[[int], None] | None = None,
        *,
        is_enough: Callable[[], bool] = lambda: False,
    ) -> Run:
        """Until so many lie behind; ``meanwhile`` is called within each micro-step, before the optimizer's step."""
        trainer, optimizer = self.trainer, self.optimizer
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        for inputs, targets in self.source:
            with trainer.step():
                loss = self.loss(self.model, inputs, targets)
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
                if meanwhile is not None:
                    meanwhile(trainer.global_step)
                if self.max_norm is not None:
                    trainer.clip_grad_norm_(self.model.parameters(), self.max_norm)
                if trainer.sync_gradients:
                    self.rates.append(optimizers[0].effective_rates[0])
                for each in optimizers:
                    if self.scaler is None:
                        each.step()
                    else:
                        self.scaler.step(each)
                    each.zero_grad()
                if self.scaler is not None:
                    self.scaler.update()
            if trainer.sync_gradients and (trainer.global_step >= num_steps or is_enough()):
                return self
        raise AssertionError("the data came to their end before training did")


def found_in(run: Run, num_steps: int = 2 * _FIRST_PAIRS, **options: Any) -> NoiseScale:
    with run.trainer:
        run.train(num_steps, **options)
    return run.noise
