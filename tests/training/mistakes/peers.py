"""Loops in the manner of peers: nanoGPT's, DLRover's and Lightning's, written anew.

Each has the habits that make its kind of loop hard to keep in steps, and none of them is a mistake: it has to train the
same bits with this library as without it. What it is given is in jobs.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.training.mistakes.jobs import Job

__all__ = ["dlrover_like", "lightning_like", "nano_gpt_like"]


def nano_gpt_like(job: Job, num_steps: int = 10) -> None:
    """No epochs: batches for ever, the next one fetched between forward and backward; the rate is set by hand in each
    iteration; `break` at the last one."""
    model, (optimizer,) = job.model["all"], job.optimizers
    batches = _for_ever(job.loader)
    inputs, targets = next(batches)
    while True:
        rate = _rate_of(job.global_step, num_steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        job.rates.append(rate)
        for _ in range(job.num_micro_steps):
            with job.step():
                loss = nn.functional.cross_entropy(model(inputs), targets)
                inputs, targets = next(batches)  # while the model computes
                job.backward(loss)
                job.clip(model.parameters())
                optimizer.step()
                optimizer.zero_grad()
        if job.is_to_stop or job.global_step >= num_steps:
            break
    job.close()


def dlrover_like(job: Job, num_steps: int = 12) -> None:
    """`reset()` at each epoch and no block around it; gradients are cleared first; the schedule steps with steps."""
    model, (optimizer,), (scheduler,) = job.model["all"], job.optimizers, job.schedulers
    is_stopped = False
    while job.global_step < num_steps and not is_stopped:
        job.reset()
        for inputs, targets in job.loader:
            with job.step():
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), targets)
                job.backward(loss)
                optimizer.step()
                _note_rate(job, optimizer)
                scheduler.step()
            if job.is_to_stop:
                is_stopped = True
                break
    job.close()


def lightning_like(job: Job, num_epochs: int = 3) -> None:
    """Two optimizers that are toggled in a training step; schedules step after the loop of each epoch, and the model is
    validated between two."""
    module = _ManualModule(job)
    is_stopped = False
    for epoch in range(job.start_epoch, num_epochs):
        job.model.train()
        with job.epoch(epoch):
            for index, batch in enumerate(job.loader):
                with job.step():
                    module.training_step(batch, index)
                if job.is_to_stop:
                    is_stopped = True
                    break
        if is_stopped:
            break
        for scheduler in job.schedulers:
            scheduler.step()
        job.model.eval()
        with torch.no_grad():
            for batch in job.validation:
                module.validation_step(batch)
    job.close()


class _ManualModule:
    """What a user of Lightning writes, with manual optimization."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.validated: list[float] = []

    def training_step(self, batch: Any, index: int) -> None:
        inputs, targets = batch
        maker, judge = self._job.model["maker"], self._job.model["judge"]
        of_maker, of_judge = self._job.optimizers
        with self._toggled(judge):
            with torch.no_grad():
                made = maker(inputs)
            self._learn(of_judge, nn.functional.cross_entropy(judge(made), targets))
        with self._toggled(maker):
            self._learn(of_maker, nn.functional.mse_loss(maker(inputs), inputs))
        _note_rate(self._job, of_maker)

    def validation_step(self, batch: Any) -> None:
        inputs, targets = batch
        made = self._job.model["judge"](self._job.model["maker"](inputs))
        self.validated.append(nn.functional.cross_entropy(made, targets).item())

    def _learn(self, optimizer: Any, loss: torch.Tensor) -> None:
        self._job.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    def _toggled(self, part: nn.Module) -> Any:
        return _Toggled(self._job.model, part)


class _Toggled:
    """Within it only one part of the model needs gradients."""

    def __init__(self, model: Any, part: nn.Module) -> None:
        self._others = [each for other in model.values() if other is not part for each in other.parameters()]

    def __enter__(self) -> None:
        for each in self._others:
            each.requires_grad_(False)

    def __exit__(self, *ignored: object) -> None:
        for each in self._others:
            each.requires_grad_(True)


def _for_ever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _rate_of(step: int, num_steps: int) -> float:
    """A warm-up, and half a cosine."""
    if step < 2:
        return 0.01 * (step + 1) / 2
    return 0.005 * (1.0 + math.cos(math.pi * step / num_steps))


def _note_rate(job: Job, optimizer: Any) -> None:
    if job.sync_gradients:
        job.rates.append(float(optimizer.param_groups[0]["lr"]))
