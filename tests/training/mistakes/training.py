"""Training: the small one in which loops make their mistakes, and what it knows of the samples that were trained on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from elastic_ext import ElasticDataLoader, ElasticTrainer
from tests.support.training import make_data, make_model, shared, trainer_of

__all__ = ["GLOBAL_BATCH", "MICRO_BATCH", "NUM_SAMPLES", "Batch", "Training"]

Batch = tuple[torch.Tensor, torch.Tensor]
NUM_SAMPLES, GLOBAL_BATCH, MICRO_BATCH = 64, 16, 4


class Training:
    """One rank's: 64 samples in steps of 16, which are 4 micro-batches of 4 on one rank, and 2 on each of two."""

    def __init__(self, rank: int, num_ranks: int, folder: Path) -> None:
        self.rank, self.num_ranks, self.folder = rank, num_ranks, folder
        self.bare_model: Any = make_model()
        self.model: Any = shared(self.bare_model, num_ranks)
        inputs, targets = make_data(NUM_SAMPLES)
        self.dataset = TensorDataset(inputs, targets, torch.arange(NUM_SAMPLES))
        self.trainer: Any = None
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.scaler: Any = None
        self.loader: Any = None
        self.is_prepared = False
        self.num_steps = 0
        """Of an epoch."""
        self._taken: list[tuple[int, list[int]]] = []  # the steps before, and the samples of each batch
        self._batches: Iterator[Batch] | None = None

    def sgd(self, **options: Any) -> Optimizer:
        """An optimizer of the whole model."""
        return torch.optim.SGD(self.model.parameters(), lr=0.1, **options)

    def elastic_loader(self, **options: Any) -> Any:
        return ElasticDataLoader(self.dataset, batch_size=MICRO_BATCH, **options)

    def elastic_loader_of(self, batch_sampler: Any) -> Any:
        return ElasticDataLoader(self.dataset, batch_sampler=batch_sampler)

    def torch_loader(self, **options: Any) -> Any:
        return DataLoader(self.dataset, batch_size=MICRO_BATCH, **options)

    def dataset_in_twos(self) -> Any:
        return DataLoader(self.dataset, batch_size=2)

    def make(self, loader: Any = None, *, model: Any = None, **arguments: Any) -> Any:
        """A trainer, by default over an ElasticDataLoader."""
        self.loader = self.elastic_loader() if loader is None else loader
        arguments = {"global_batch_size": GLOBAL_BATCH, **arguments}
        self.num_steps = NUM_SAMPLES // (arguments["global_batch_size"] or MICRO_BATCH * self.num_ranks)
        trainer: ElasticTrainer = trainer_of(
            self.folder, self.model if model is None else model, self.loader, rank=self.rank, **arguments
        )
        self.trainer = trainer
        return trainer

    def prepare(
        self, optimizer: Any = None, scheduler: Any = None, scaler: Any = None, loader: Any = None, **arguments: Any
    ) -> None:
        """Make what was not made, and prepare it."""
        if self.trainer is None:
            self.make(loader, **arguments)
        given = self.sgd() if optimizer is None else optimizer
        prepared = self.trainer.prepare(given, scheduler, scaler)
        values = list(prepared) if isinstance(prepared, tuple) else [prepared]
        self.optimizer = values.pop(0)
        self.scheduler = None if scheduler is None else values.pop(0)
        self.scaler = None if scaler is None else values.pop(0)
        self.is_prepared = True

    @property
    def batches(self) -> Iterator[Batch]:
        """Those of the one loop over the loader; a second ``for`` goes on in it."""
        if self._batches is None:
            self._batches = self._noting(self.loader)
        return self._batches

    def next_loop(self) -> Iterator[Batch]:
        """Those of another loop, as of the next epoch."""
        self._batches = None
        return self.batches

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        return nn.functional.cross_entropy(self.model(inputs), targets)

    def finish(self) -> None:
        """What a micro-step ends with."""
        for optimizer in self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]:
            optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        for optimizer in self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]:
            optimizer.zero_grad()

    def learn(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """The work on one micro-batch."""
        self.loss(inputs, targets).backward()
        self.finish()

    def go_on(self) -> None:
        """Take what is left of the loop's epoch, without a mistake."""
        for inputs, targets in self.batches:
            with self.trainer.step():
                self.learn(inputs, targets)

    def forget_taken(self, num_committed: int) -> None:
        """What was taken for steps that have not committed was not trained on."""
        self._taken = [(step, samples) for step, samples in self._taken if step < num_committed]

    @property
    def trained(self) -> list[int]:
        """The samples that this rank has trained on."""
        return [sample for _, samples in self._taken for sample in samples]

    def _noting(self, loader: Any) -> Iterator[Batch]:
        for inputs, targets, numbers in loader:
            self._taken.append((self.trainer.global_step, numbers.tolist()))
            yield inputs, targets
