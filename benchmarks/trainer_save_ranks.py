"""The processes of benchmarks/trainer_save.py: each trains the same model in a loop of its own, and saves in its way.

A run is some steps without a save, and as many with one: after the first of them all of the state is saved.
"""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import mse_loss
from torch.optim import AdamW, Optimizer

from benchmarks.checkpoint_ways import fast_settings, locals_of
from benchmarks.joined import joined
from benchmarks.linear import digest_of, linear_model, random_batches, start_again
from elastic_ext import CheckpointInterval, CheckpointOptions, ElasticTrainer, FollowOptions
from elastic_ext.fsdp import ShardCheckpointer
from elastic_ext.fsdp.checkpoint.saving.background import THREAD_NAME

__all__ = ["Device", "Done", "LoopName", "Rank", "Run", "Task", "training_process"]

Device = Literal["cpu", "cuda"]
LoopName = Literal["copy", "reused", "before", "beside", "shelf"]

JOB = "loop"
NUM_BATCHES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is trained: linear layers."""

    widths: tuple[int, ...]
    num_samples: int
    """Of a batch."""
    num_steps: int
    """Without a save, and as many with one: no save may take longer."""
    device: Device = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """How a process trains and saves, where its group's store is, and its folders."""

    loop: LoopName
    port: int
    folder: Path
    shelf: Path
    """In memory, for the loop that is named so."""
    task: Task


@dataclass(frozen=True, slots=True)
class Run:
    """Train from the beginning, without and with a save."""

    shows: bool
    """What was saved is loaded and told; that run's times are of no use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What a run took."""

    quiet_seconds: float
    """All of its steps without a save."""
    busy_seconds: float
    """As many with one."""
    blocked_seconds: float
    """Of them, in which nothing was trained for the sake of the save."""
    is_late: bool
    """The save went on when they were over, and was waited for in their time."""
    state_bytes: int
    digest: str
    """Of the state that the run led to."""
    saved_digest: str | None
    """Of what was loaded, if it is shown."""

    @property
    def lost_seconds(self) -> float:
        return self.busy_seconds - self.quiet_seconds


@contextmanager
def training_process(setup: Rank) -> Iterator[Callable[[Run], Done]]:
    """A process with its loop, made and warm before anything is timed."""
    with joined(rank=0, world_size=1, port=setup.port), ExitStack() as stack:
        loop = _LOOPS[setup.loop](setup, stack)
        loop.take(setup.task.num_steps - 1)  # the next save comes after so many more steps, and one
        gc.collect()
        gc.freeze()
        yield loop.run


class _Loop:
    """Training by hand."""

    def __init__(self, setup: Rank, stack: ExitStack) -> None:
        self._folder, self._shelf, self._task = setup.folder, setup.shelf, setup.task
        self._model, self._optimizer = _made(setup.task)
        task = setup.task
        self._batches = random_batches(task.widths, task.num_samples, NUM_BATCHES, seed=1, device=task.device)
        self._prepare(stack)
        self._start = [tensor.clone() for tensor in self._state()]
        self._turn = itertools.cycle(self._batches)

    def run(self, order: Run) -> Done:
        num_steps = self._task.num_steps
        start_again(self._state(), self._start)
        self._turn = itertools.cycle(self._batches)
        began = self._now()
        quiet_blocked = self.take(num_steps)
        quiet = self._now() - began
        began = self._now()
        blocked = self.take(1)
        due = self._digest() if order.shows else None
        blocked += self._begin()
        blocked += self.take(num_steps - 1)
        is_late = self._is_saving()
        self._finish()
        busy = self._now() - began
        saved = self._loaded_digest() if order.shows else None
        if saved != due:
            raise RuntimeError("what was loaded is not what was there when the save was due")
        self._remove()
        return Done(
            quiet_seconds=quiet,
            busy_seconds=busy,
            blocked_seconds=blocked - quiet_blocked,
            is_late=is_late,
            state_bytes=sum(tensor.nbytes for tensor in self._state()),
            digest=self._digest(),
            saved_digest=saved,
        )

    def take(self, num_steps: int) -> float:
        """Take so many steps; for how long nothing was trained meanwhile."""
        return sum(self._step(*next(self._turn)) for _ in range(num_steps))

    def _prepare(self, stack: ExitStack) -> None:
        """What is done once."""

    def _step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        self._learn(inputs, targets)
        self._now()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._now()
        return 0.0

    def _begin(self) -> float:
        """Begin to save what there is; how long training waits for that."""
        raise NotImplementedError

    def _is_saving(self) -> bool:
        return False

    def _finish(self) -> None:
        """Wait until it is saved."""

    def _load(self, model: nn.Module, optimizer: Optimizer) -> None:
        raise NotImplementedError

    def _remove(self) -> None:
        """Leave nothing of it."""

    def _learn(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        mse_loss(self._model(inputs), targets).backward()  # type: ignore[no-untyped-call]

    def _now(self) -> float:
        """When all that was begun is done."""
        if self._task.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _state(self) -> list[torch.Tensor]:
        return list(locals_of(self._model, self._optimizer))

    def _digest(self) -> str:
        return digest_of(self._state())

    def _loaded_digest(self) -> str:
        model, optimizer = _made(self._task)
        self._load(model, optimizer)
        return digest_of(list(locals_of(model, optimizer)))


class _Copying(_Loop):
    """What no way does without that copies before it goes on: one copy to memory that is kept, pinned for a GPU."""

    def _prepare(self, stack: ExitStack) -> None:
        sizes = [tensor.nbytes for tensor in self._state()]
        if self._task.device == "cuda":
            memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
        else:
            memory = torch.frombuffer(mmap.mmap(-1, sum(sizes)), dtype=torch.uint8)
        self._parts = torch.split(memory.zero_(), sizes)

    def _begin(self) -> float:
        began = self._now()
        for part, tensor in zip(self._parts, self._state(), strict=True):
            part.copy_(tensor.view(-1).view(torch.uint8), non_blocking=True)
        return self._now() - began

    def _load(self, model: nn.Module, optimizer: Optimizer) -> None:
        for part, tensor in zip(self._parts, locals_of(model, optimizer), strict=True):
            tensor.view(-1).view(torch.uint8).copy_(part)


class _Dcp(_Loop):
    """dcp.async_save with the settings that were fastest, and a stager that is kept."""

    def _prepare(self, stack: ExitStack) -> None:
        is_on_gpu = self._task.device == "cuda"
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=is_on_gpu,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=is_on_gpu,
            )
        )
        stack.callback(self._stager.close)
        self._group = dist.new_group(backend="gloo")
        self._future: Future[Any] | None = None
        self._numbers = itertools.count()
        self._path = self._folder

    def _begin(self) -> float:
        began = self._now()
        self._path = self._folder / f"async_{next(self._numbers)}"
        state = _state_of(self._model, self._optimizer)
        future = dcp.async_save(  # type: ignore[attr-defined]
            state, process_group=self._group, async_stager=self._stager, **fast_settings(self._path)
        )
        assert isinstance(future, Future), "this stager works on no thread of its own"
        self._future = future
        return self._now() - began

    def _is_saving(self) -> bool:
        return self._future is not None and not self._future.done()

    def _finish(self) -> None:
        assert self._future is not None
        self._future.result()

    def _load(self, model: nn.Module, optimizer: Optimizer) -> None:
        state = _state_of(model, optimizer)
        dcp.load(state, checkpoint_id=self._path)  # type: ignore[attr-defined]
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def _remove(self) -> None:
        shutil.rmtree(self._path)


class _Ours(_Loop):
    """ElasticTrainer, which saves by itself; what is saved is copied before the next step begins."""

    is_beside = False
    """It is copied beside that step's passes."""

    def _prepare(self, stack: ExitStack) -> None:
        num_steps = self._task.num_steps
        self._trainer = ElasticTrainer(
            self._model,
            micro_batch_size=self._task.num_samples,
            checkpoint_interval=CheckpointInterval(steps=2 * num_steps),
            shared_storage_path=self._folder / "storage",
            checkpoint_options=CheckpointOptions(overlap_saving=self.is_beside, save_on_signals=False),
            follow_options=FollowOptions(job=JOB, run_dir=self._folder / "run", progress=False),
        )
        stack.callback(self._trainer.close)
        self._inner: Optimizer = self._optimizer
        self._stepped = self._trainer.prepare(self._inner)

    def _step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        trainer = self._trainer
        began = self._now()
        with trainer.step():
            entered = time.perf_counter()
            self._learn(inputs, targets)
            learnt = self._now()
            with trainer.mutate():  # which waits for what optimizer.step() would wait for
                fenced = time.perf_counter()
            self._stepped.step()
            self._stepped.zero_grad()
            stepped = self._now()
        return (entered - began) + (fenced - learnt) + (time.perf_counter() - stepped)

    def _begin(self) -> float:
        return 0.0  # it has: the next step waits as long as it takes

    def _is_saving(self) -> bool:
        return bool(_writing_threads())

    def _finish(self) -> None:
        for thread in _writing_threads():
            thread.join()
        if len(self._saved()) != 1:
            raise RuntimeError(f"{self._folder} holds {len(self._saved())} checkpoints, and one was to be saved")

    def _load(self, model: nn.Module, optimizer: Optimizer) -> None:
        (path,) = self._saved()
        with ShardCheckpointer(self._folder / "storage", job=JOB) as checkpointer:
            checkpointer.load(model, optimizer, path)

    def _remove(self) -> None:
        (path,) = self._saved()
        shutil.rmtree(path)

    def _saved(self) -> list[Path]:
        return [path.parent for path in (self._folder / "storage").glob("fsdp_checkpoint/*/step_*/COMMIT")]


class _OursBeside(_Ours):
    is_beside = True


class _OursOnShelf(_OursBeside):
    """What is copied lies in memory that would outlive the process."""

    def _prepare(self, stack: ExitStack) -> None:
        os.environ["ELASTIC_EXT_STAGING_DIR"] = str(self._shelf)
        super()._prepare(stack)

    def _finish(self) -> None:
        super()._finish()
        if not any(self._shelf.iterdir()):
            raise RuntimeError(f"{self._shelf} has no room for the copy")


_LOOPS: dict[LoopName, Callable[[Rank, ExitStack], _Loop]] = {
    "copy": _Copying,
    "reused": _Dcp,
    "before": _Ours,
    "beside": _OursBeside,
    "shelf": _OursOnShelf,
}


def _made(task: Task) -> tuple[nn.Module, Optimizer]:
    """A model and its optimizer, which has its state."""
    model = linear_model(task.widths).to(task.device)
    optimizer = AdamW(model.parameters(), fused=True)
    for part in model.parameters():
        part.grad = torch.zeros_like(part)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def _writing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]
