"""Jobs: what a peer's loop is given, with this library and without it, so that the loop itself is the same text.

Without it a job does by hand what steps of several micro-batches take: it divides losses, keeps DDP from sharing
gradients too early, and lets optimizers and schedules act where a step ends, as DLRover's own wrappers do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from elastic_ext import ElasticDataLoader
from tests.support.training import bits_of, make_data, trainer_of

__all__ = ["ByHand", "Job", "LoaderKind", "Made", "WithLibrary"]

GLOBAL_BATCH, MICRO_BATCH = 16, 4
LoaderKind = Literal["ours", "torchs"]


class Made:
    """What both kinds of job train, with what: the same on every call."""

    def __init__(self, kind: Literal["one", "two"], rank: int, num_ranks: int) -> None:
        torch.manual_seed(0)
        self.rank, self.num_ranks = rank, num_ranks
        parts = {"maker": nn.Linear(6, 6), "judge": nn.Linear(6, 5)}
        if kind == "one":
            parts = {"all": nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))}  # type: ignore[dict-item]
        wrapped = {name: part.double() for name, part in parts.items()}
        if num_ranks > 1:
            wrapped = {name: DistributedDataParallel(part) for name, part in wrapped.items()}  # type: ignore[misc]
        self.model: Any = nn.ModuleDict(wrapped)
        self.optimizers: list[Any] = [
            torch.optim.AdamW(part.parameters(), lr=0.01, weight_decay=0.1) for part in wrapped.values()
        ]
        self.schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in self.optimizers]
        self.dataset = TensorDataset(*make_data(64))
        self.validation = DataLoader(TensorDataset(*make_data(24, seed=7)), batch_size=8)

    def torch_loader(self) -> Any:
        """Each rank's share of the batches, in turn, in the order of the dataset."""
        size, together = MICRO_BATCH, MICRO_BATCH * self.num_ranks
        order = [
            sample
            for start in range(self.rank * size, len(self.dataset), together)
            for sample in range(start, start + size)
        ]
        return DataLoader(self.dataset, batch_size=size, sampler=order)

    def bits(self) -> list[Any]:
        """Parameters, the state of the optimizers, and of the schedules."""
        model = {name.replace("module.", ""): part for name, part in self.model.state_dict().items()}
        return bits_of(
            model, [each.state_dict() for each in self.optimizers], [each.state_dict() for each in self.schedulers]
        )


class Job(Protocol):
    """What a peer's loop uses."""

    model: Any
    optimizers: list[Any]
    schedulers: list[Any]
    loader: Any
    validation: Any
    num_micro_steps: int
    rates: list[float]
    """What the steps have used; the loop notes it."""

    @property
    def global_step(self) -> int: ...

    @property
    def sync_gradients(self) -> bool: ...

    @property
    def start_epoch(self) -> int: ...

    @property
    def is_to_stop(self) -> bool:
        """Whether this process is to end here, with a checkpoint."""

    def step(self) -> AbstractContextManager[None]: ...

    def epoch(self, epoch: int) -> AbstractContextManager[Any]: ...

    def reset(self) -> None: ...

    def backward(self, loss: Any) -> None: ...

    def clip(self, parameters: Any) -> None: ...

    def close(self) -> None: ...


class _Gated:
    """An optimizer or a schedule that acts where the step by hand ends."""

    def __init__(self, inner: Any, job: ByHand) -> None:
        self._inner, self._job = inner, job
        self._may_zero = False

    def step(self) -> None:
        if self._job.sync_gradients or not self._job.is_inside:
            self._inner.step()
            self._may_zero = True

    def zero_grad(self) -> None:
        if self._may_zero:
            self._inner.zero_grad()
            self._may_zero = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class ByHand:
    """A job without the library, which is never stopped."""

    start_epoch = 0
    is_to_stop = False

    def __init__(self, made: Made) -> None:
        self.model, self.validation, self.loader = made.model, made.validation, made.torch_loader()
        self.optimizers: list[Any] = [_Gated(each, self) for each in made.optimizers]
        self.schedulers: list[Any] = [_Gated(each, self) for each in made.schedulers]
        self.num_micro_steps = GLOBAL_BATCH // (MICRO_BATCH * made.num_ranks)
        self.rates: list[float] = []
        self.global_step = 0
        self.sync_gradients = self.is_inside = False
        self._index = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        self._index += 1
        self.sync_gradients, self.is_inside = self._index == self.num_micro_steps, True
        for part in self.model.values():
            if isinstance(part, DistributedDataParallel):
                part.require_backward_grad_sync = self.sync_gradients
        yield
        self.is_inside = False
        if self.sync_gradients:
            self._index, self.global_step = 0, self.global_step + 1

    def epoch(self, epoch: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def reset(self) -> None: ...

    def backward(self, loss: Any) -> None:
        (loss / self.num_micro_steps).backward()

    def clip(self, parameters: Any) -> None:
        if self.sync_gradients:
            nn.utils.clip_grad_norm_(parameters, 0.5)

    def close(self) -> None: ...


class WithLibrary:
    """The same job under a trainer; ``stop_at`` a step it saves a checkpoint and ends."""

    def __init__(self, made: Made, folder: Path, loader: LoaderKind, stop_at: int | None, **arguments: Any) -> None:
        self.model, self.validation = made.model, made.validation
        self.loader: Any = made.torch_loader()
        if loader == "ours":
            self.loader = ElasticDataLoader(made.dataset, batch_size=MICRO_BATCH)
        self.num_micro_steps = GLOBAL_BATCH // (MICRO_BATCH * made.num_ranks)
        self.rates: list[float] = []
        self._stop_at = stop_at
        self._trainer: Any = trainer_of(
            folder,
            made.model,
            self.loader,
            rank=made.rank,
            global_batch_size=GLOBAL_BATCH,
            shared_storage_path=folder / "storage",
            **arguments,
        )
        self.optimizers, self.schedulers = self._trainer.prepare(made.optimizers, made.schedulers)

    @property
    def global_step(self) -> int:
        return self._trainer.global_step  # type: ignore[no-any-return]

    @property
    def sync_gradients(self) -> bool:
        return self._trainer.sync_gradients  # type: ignore[no-any-return]

    @property
    def start_epoch(self) -> int:
        return self._trainer.start_epoch  # type: ignore[no-any-return]

    @property
    def is_to_stop(self) -> bool:
        if not (self.sync_gradients and self.global_step == self._stop_at):
            return False
        self._trainer.save_checkpoint()
        return True

    def step(self) -> AbstractContextManager[None]:
        return self._trainer.step()  # type: ignore[no-any-return]

    def epoch(self, epoch: int) -> AbstractContextManager[Any]:
        return self._trainer.epoch(epoch)  # type: ignore[no-any-return]

    def reset(self) -> None:
        self._trainer.reset()

    def backward(self, loss: Any) -> None:
        loss.backward()

    def clip(self, parameters: Any) -> None:
        self._trainer.clip_grad_norm_(parameters, 0.5)

    def close(self) -> None:
        self._trainer.close()
