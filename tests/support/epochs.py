"""A training of several epochs whose loop does much between two of them, on one rank or on several: for tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, get_worker_info

from elastic_ext import CheckpointInterval, ElasticDataLoader
from elastic_ext.fsdp.checkpoint.folder.commit import COMMIT
from tests.support.sharded import WAYS, values_of
from tests.support.training import ResumableSlices, bits_of, make_data, trainer_of

__all__ = ["BATCH", "BY_EPOCHS", "BY_STEPS", "LOADERS", "STEPS", "Act", "Crash", "Seen", "saved_in", "train"]

BATCH = 4
STEPS = 4  # of an epoch
BY_EPOCHS, BY_STEPS = CheckpointInterval(epochs=1), CheckpointInterval(steps=STEPS)


class Crash(Exception):
    """What ends a run."""


Act = Callable[[Any, int], object]
"""Given the trainer and the number of the epoch that has ended."""


@dataclass
class Seen:
    """What a run came to, on one rank."""

    started_at: tuple[int, int] = (0, 0)
    """The epoch and the step."""
    steps: list[tuple[int, int, float, float, list[Any]]] = field(default_factory=list)
    """The epoch, the step after it, the loss, the rate, and the samples of each micro-step."""
    final: list[Any] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def samples(self) -> list[Any]:
        """Of this rank, in order."""
        return [sample for *_, samples in self.steps for sample in samples]


class Stream(IterableDataset[Any]):
    """One rank's part of the data, shared out among workers; it can tell where it is."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._own = list(zip(*make_data(BATCH * STEPS), strict=True))[rank::num_ranks]
        self._at = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        start, self._at = self._at, 0
        for number, sample in enumerate(self._own[0 if info is None else info.id :: info.num_workers if info else 1]):
            if number >= start:
                self._at = number + 1
                yield sample
        self._at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]


def _torchs(rank: int, num_ranks: int, **options: Any) -> Any:
    dataset = TensorDataset(*make_data(BATCH * STEPS))
    if num_ranks > 1:
        sampler: Any = DistributedSampler(dataset, num_ranks, rank, shuffle=True, seed=3)
        return DataLoader(dataset, batch_size=2, sampler=sampler, **options)
    return DataLoader(dataset, batch_size=2, shuffle=True, **options)


def _elastic(**options: Any) -> Any:
    return ElasticDataLoader(TensorDataset(*make_data(BATCH * STEPS)), batch_size=2, shuffle=True, seed=5, **options)


LOADERS: dict[str, Callable[[int, int], Any]] = {
    "elastic": lambda rank, num_ranks: _elastic(),
    "elastic with workers": lambda rank, num_ranks: _elastic(num_workers=2),
    "own": lambda rank, num_ranks: ResumableSlices(make_data(BATCH * STEPS), 2),
    "stream": lambda rank, num_ranks: ElasticDataLoader(Stream(rank, num_ranks), batch_size=2),
    "stream with workers": lambda rank, num_ranks: ElasticDataLoader(Stream(rank, num_ranks), 2, num_workers=2),
    "torch's": lambda rank, num_ranks: _torchs(rank, num_ranks),
    "torch's with workers": lambda rank, num_ranks: _torchs(rank, num_ranks, num_workers=2),
}


def saved_in(storage: Path) -> list[str]:
    """The names of the checkpoints there."""
    return sorted(path.parent.name for path in storage.glob(f"fsdp_checkpoint/*/*/{COMMIT}"))


def train(
    folder: Path,
    name: str,
    kind: str = "elastic",
    *,
    rank: int = 0,
    way: str | None = None,
    every: CheckpointInterval | None = BY_EPOCHS,
    num_epochs: int = 4,
    of_epoch: int | None = None,
    max_steps: int | None = None,
    crash_at: int | None = None,
    crash_between: int | None = None,
    validates: bool = True,
    between: Act | None = None,
    at_step: Act | None = None,
    **given: Any,
) -> Seen:
    """Train from wherever the newest checkpoint of ``name`` is.

    A loop over the data is left by ``break`` after ``of_epoch`` steps, and at ``max_steps``, where training ends. The
    run crashes after step ``crash_at``, or between epoch ``crash_between`` and the next, when all is done there but the
    scheduler's step. ``between`` is called between two epochs, ``at_step`` after each step.
    """
    (folder / name).mkdir(exist_ok=True)
    num_ranks = WAYS[way].num_ranks if way is not None else 1
    torch.manual_seed(0)
    random.seed(7)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 5)).double()
    model = plain if way is None else WAYS[way].wrap(plain)
    named = {name.removeprefix("module.").replace(".", "/"): part for name, part in model.named_parameters()}
    average = {name: part.detach().clone() for name, part in named.items()}
    loader = LOADERS[kind](rank, num_ranks)
    held_out = DataLoader(TensorDataset(*make_data(6, seed=9)), batch_size=2, shuffle=True)
    inner = SGD(model.parameters(), lr=0.4, momentum=0.9)
    schedule = lr_scheduler.StepLR(inner, step_size=1, gamma=0.5)
    trainer = trainer_of(
        folder / name,
        model,
        loader,
        rank=rank,
        global_batch_size=BATCH,
        shared_storage_path=folder / f"storage of {name}",
        checkpoint_interval=every,
        **given,
    )
    trainer.register_state("average", average)
    seen = Seen()

    def train_epoch(epoch: int) -> None:
        if isinstance(getattr(loader, "sampler", None), DistributedSampler):
            loader.sampler.set_epoch(epoch)
        taken: list[Any] = []
        for inputs, targets in loader:
            taken.append(inputs[:, 0].tolist())
            with trainer.step():
                loss = nn.functional.cross_entropy(model(inputs), targets)
                trainer.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if not trainer.sync_gradients:
                continue
            rate = inner.param_groups[0]["lr"]
            seen.steps.append(
                (epoch, trainer.global_step, loss.item(), rate, [each for part in taken for each in part])
            )
            taken.clear()
            if at_step is not None:
                at_step(trainer, epoch)
            if trainer.global_step == crash_at:
                raise Crash
            if trainer.global_step == max_steps or trainer.num_steps == of_epoch:
                break

    def do_between(epoch: int) -> None:
        if between is not None:
            between(trainer, epoch)
        if validates:
            with torch.no_grad():
                for inputs, _ in held_out:  # which draws from torch's default generator
                    model(inputs)
            random.random()
        with torch.no_grad():
            for name, part in named.items():
                average[name].lerp_(part.detach(), 0.5)
        inner.param_groups[0]["weight_decay"] = 0.01 * epoch  # by hand
        if epoch == crash_between:
            raise Crash
        scheduler.step()

    try:
        with trainer:
            optimizer, scheduler = trainer.prepare(inner, schedule)
            seen.started_at = trainer.start_epoch, trainer.global_step
            for epoch in range(trainer.start_epoch, num_epochs):
                with trainer.epoch(epoch):
                    train_epoch(epoch)
                do_between(epoch)
                if trainer.global_step == max_steps:
                    break
    except (Crash, SystemExit) as error:
        seen.error = error
    seen.final = bits_of(values_of(model), average, inner.state_dict()["param_groups"], schedule.last_epoch)
    seen.final += bits_of(random.getstate(), torch.get_rng_state(), trainer.global_step)
    return seen
